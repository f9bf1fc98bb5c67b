"""``pn reproduce demo``, the studies and ``batch_size``: trainings that this project has chosen.

The docstring of each is its help, and its first line is in the help of ``pn reproduce``.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from pn_fairseq.common.command import ArgumentParser, UserError, say
from pn_fairseq.pipeline.reproduce import AGAIN, must, reproduce, shown


def demo(argv: Sequence[str]) -> int:
    """One small training on the verses, with sample translations.

    Trains a small pre-norm transformer with PN in the encoder on Spanish-English verses, with the settings of the
    configuration verses_es_en, and prints BLEU, sample translations and where the learning curve is. Run again, it
    resumes where it was interrupted.
    """
    parser = ArgumentParser(prog="pn reproduce demo", description=inspect.getdoc(demo))
    parser.add_argument("settings", nargs="*", metavar="key=value", help="settings of the training")
    parser.add_argument("--run", type=Path, metavar="DIR", default="runs/demo", help="the results (default runs/demo)")
    architecture = "transformer_NORM_tiny, as transformer_ln_tiny (default transformer_pn_tiny)"
    parser.add_argument("--arch", metavar="NAME", default="transformer_pn_tiny", help=architecture)
    args = parser.parse_intermixed_args(argv)
    run, data = args.run.absolute(), Path("runs/data/verses_es_en").absolute()
    train = ["train", "verses_es_en", "--data", data, "--run", run, f"model._name={args.arch}", *args.settings]
    after_training = [[verb, "--run", run] for verb in ("average", "generate", "score")]
    for step in ([*train, "--check"], ["prepare", "verses", "--dest", data], train, *after_training):
        say("demo", shown(step))
        must(step)
    files = {"source": data / "raw/test.es", "reference": data / "raw/test.en"}
    files["translation"] = run / "generate/test/hyp.txt"
    lines = {name: file.read_text("utf-8").splitlines() for name, file in files.items()}
    print("\nSample translations")
    for number in range(1, 6):
        for name, of_file in lines.items():
            print(f"  {name:<11} {of_file[number * len(of_file) // 6 - 1]}")
        print(flush=True)
    must(["report", run, "--output", run / "report"])
    print(f"learning curve: {run / 'report/report-curves-1.png'}")
    return 0


class Part(NamedTuple):
    """One call of :func:`reproduce` within a comparison."""

    corpus: str
    folder: str  # of its runs
    seed: int
    norms: str  # as in NORMS
    settings: tuple[str, ...] = ()  # of the training
    models: str = ""  # as in MODELS; all models of the corpus if empty


class Study(NamedTuple):
    """Trainings that answer one question."""

    parts: list[Part]  # in their order: a seed is whole before the next one begins
    planned: tuple[str, ...] = ()  # comparisons that were named before the runs, as ``pn report --planned`` takes them


def norms() -> Study:
    """All norms on the verses and Multi30k, and in a language model.

    Trains, averages, decodes and scores the norms on the verses and Multi30k, and evaluates language models of the
    English verses. Three seeds or more: the norms of the PowerNorm paper's Table 4 and some more, layer-scale, the
    variants `release`, BN in the decoder, learning rates of LN, PN and BN, and every norm in the language model. One
    seed: all other norms, PN in the decoder, the decays of PN. LN and PN are also trained with each pair of three data
    orders and three initial weights. The results are in docs/results.
    """
    from pn_fairseq.norms import NORMS

    # Multi30k is trained for half as many updates as the verses, 3 epochs: the 33 epochs of the configuration
    # multi30k_de_en are too long for so many runs on a CPU. The checkpoints of updates 600 to 800 are averaged.
    short = ("optimization.max_update=800", "lr_scheduler.warmup_updates=200", "tokens_per_update=2048")
    short += ("checkpoint.save_interval_updates=50",)
    parts = []
    for seed in (1, 2, 3):
        parts.append(Part("verses", "verses", seed, "ln pn bn pnv rms gn brn mabn ada un"))
        variants = "pn+layer_scale_groups=0 ln+layer_scale_groups=4 pn+norm_variant=release bn+norm_variant=release"
        parts.append(Part("verses", "verses", seed, f"{variants} bn+decoder_norm=batch"))
        if seed == 1:
            parts.append(Part("verses", "verses", 1, "none lns dn sn dyt derf rbn prepbn pn+decoder_norm=power"))
        parts.append(Part("multi30k", "multi30k", seed, "ln pn bn pnv pn+layer_scale_groups=0 rms", short))
    # The decays that the paper tried, without 0.9 and 0.9: these are the defaults, which are trained above.
    decays = [(fwd, bwd) for fwd in (0.9, 0.95, 0.99) for bwd in (0.9, 0.95, 0.99) if (fwd, bwd) != (0.9, 0.9)]
    tuned = " ".join(f"pn+norm_alpha_fwd={fwd}+norm_alpha_bwd={bwd}" for fwd, bwd in decays)
    parts.append(Part("verses", "verses", 1, tuned))
    # Half and twice the learning rate of the configuration verses_es_en: does the ranking depend on it?
    for seed, rate in itertools.product((1, 2, 3), (0.0025, 0.01)):
        parts.append(Part("verses", f"verses_lr{rate}", seed, "ln pn bn", (f"optimization.lr=[{rate}]",)))
    # More blocks for the comparisons that three seeds do not resolve.
    parts += [Part("verses", "verses", seed, "ln pn bn pnv") for seed in (4, 5, 6, 7, 8)]
    parts += [Part("verses", "verses", seed, "rms ada mabn brn") for seed in (4, 5)]
    parts += [Part("multi30k", "multi30k", seed, "ln pn bn rms", short) for seed in (4, 5, 6)]
    # Does the noise come from the data order or from the initial weights? Runs whose seed and init_seed are equal are
    # already among those above.
    for seed, init_seed in itertools.permutations((1, 2, 3), 2):
        crossed = f"ln+init_seed={init_seed} pn+init_seed={init_seed}"
        parts.append(Part("verses", "verses_init", seed, crossed))
    every = " ".join(entry.short for entry in NORMS.values())
    parts += [Part("verses_lm", "verses_lm", seed, every, models="transformer_lm") for seed in (1, 2, 3)]
    # Comparisons with LN: validation loss, and test loss of language models. They were chosen when the results of seeds
    # 1 to 3 were known, and before the later seeds ran. They are tested apart, without correction for the others.
    return Study(parts, ("PN:loss", "PN:bits"))


#: Seeds of the other studies. LN, PN and BN on the verses with these seeds are planned by compare_norms, too.
_SEEDS = (5, 6, 7)


def masks() -> Study:
    """BN and PN with and without the padding mask, on the verses.

    Does the padding mask matter? Trains BN and PN with and without the mask, and LN as the control, on the verses: with
    five seeds in fairseq's batches, which hold sentences of similar length and little padding, and with three seeds in
    batches of random sentences, which hold much padding. --norm-probe records the distance of running to batch
    statistics.
    """
    systems = "ln bn pn bn+norm_ignore_mask=true pn+norm_ignore_mask=true"
    probe = ("model.norm_probe='{run}/norm_probe'", "model.norm_probe_interval=50")
    at_random = ("task._name=translation_random_batches", *probe)
    parts = []
    for seed in _SEEDS:
        parts.append(Part("verses", "masks_by_length", seed, systems, probe))
        parts.append(Part("verses", "masks_random", seed, systems, at_random))
    # The rule before the runs: two more seeds where the first three settle nothing, which is so in batches by length.
    parts += [Part("verses", "masks_by_length", seed, systems, probe) for seed in (8, 9)]
    return Study(parts, ("BN:loss", "BN:bleu", "PN:loss", "PN:bleu"))  # with the mask, and the same norm without it


def placements() -> Study:
    """LN and PN before, after and inside a sublayer, on the verses.

    Where should a norm stand? Trains every placement, in encoder and decoder, with LN, and some with PN in the encoder,
    on the verses with three seeds; and with one seed models with 18 + 18 layers, which may not train at all, for 300
    updates, 200 of them warm-up, whose translations are greedy and short. "mix" is "pre" in models with less than 4
    layers a side, so only the deep models have it.
    """
    from pn_fairseq.models.placements import PLACEMENTS

    def placed(norm: str, name: str) -> str:
        return norm if name == "pre" else f"{norm}+encoder_norm_placement={name}+decoder_norm_placement={name}"

    systems = [placed("ln", name) for name in PLACEMENTS]
    systems += [placed("pn", name) for name in ("post", "sandwich", "sub")]
    shallow = " ".join(system for system in systems if "=mix" not in system)
    parts = [Part("verses", "placements", seed, shallow) for seed in _SEEDS]
    depth = ("model.encoder_layers=18", "model.decoder_layers=18")
    updates = ("optimization.max_update=300", "lr_scheduler.warmup_updates=200")
    search = ("generation.beam=1", "generation.max_len_b=60")
    return Study([*parts, Part("verses", "placements_deep", _SEEDS[0], " ".join(systems), depth + updates + search)])


def adanorm() -> Study:
    """The tables of the AdaNorm paper, on the verses.

    Do the derivatives of mean and variance matter more than the forward normalization, and do gain and bias overfit?
    Trains the rows of Tables 1 to 4 of the AdaNorm paper on the verses with three seeds: with the norm in every place
    of encoder and decoder, as the paper says, and after the last layers only, as in its authors' code; and LN as the
    control. docs/results/adanorm.md shows what it gave.
    """
    means = ("", "+norm_options.detach=mean", "+norm_options.detach=std")
    rows = {("none", "none"): ("",), ("lns", "layer-simple"): ("",), ("dn", "detach"): means,
            ("ada", "ada"): ("", "+norm_options.ada_scale=2.0")}  # fmt: skip
    every = [f"{norm}+decoder_norm={name}{option}" for (norm, name), options in rows.items() for option in options]
    last = [
        f"ln+encoder_norm_last={name}+decoder_norm_last={name}{option}"
        for (_, name), options in rows.items()
        for option in options
        if name != "detach"  # the authors' code has it also; its effect is measured in every place
    ]
    return Study([Part("verses", "adanorm", seed, " ".join(["ln", *every, *last])) for seed in _SEEDS])


def study(planned: Callable[[], Study], argv: Sequence[str]) -> int:
    """``pn reproduce compare_...``: the parts of a study, and a report on each folder; 1 if a run failed."""
    name, parts = f"compare_{planned.__name__}", planned().parts
    count = sum(len(part.norms.split()) for part in parts)
    about = f"{inspect.getdoc(planned)}\n\n{count} runs of some minutes on 2 CPU cores. One rank per visible GPU."
    parser = ArgumentParser(prog=f"pn reproduce {name}", description=about, epilog=AGAIN)
    runs = f"where the runs go, as DIR/CORPUS/NORM_seedN, and reports, as DIR/CORPUS/report (default runs/{name})"
    parser.add_argument("--runs", type=Path, metavar="DIR", default=f"runs/{name}", help=runs)
    parser.add_argument("--dry-run", action="store_true", help="print the commands and do nothing")
    parser.set_defaults(multi30k=None)
    if any(part.corpus == "multi30k" for part in parts):
        text = "the text of Multi30k (pn prepare multi30k --help); without it that corpus is left out"
        parser.add_argument("--multi30k", type=Path, metavar="DIR", help=text)
    args = parser.parse_args(argv)
    if args.multi30k and not args.multi30k.is_dir():
        raise UserError(f"--multi30k {args.multi30k} is not a directory")
    parts = [part for part in parts if part.corpus != "multi30k" or args.multi30k]
    failed = 0
    for part in parts:
        words = ["--runs", str(args.runs / part.folder), *(["--dry-run"] if args.dry_run else [])]
        words += ["--corpus", str(args.multi30k)] if part.corpus == "multi30k" else []
        env = {"NORMS": part.norms, "SEEDS": str(part.seed), **({"MODELS": part.models} if part.models else {})}
        failed |= reproduce(part.corpus, [*words, *part.settings], {**os.environ, **env})
    if args.dry_run:
        return 0
    for folder in dict.fromkeys(args.runs / part.folder for part in parts):
        must(["report", *sorted(folder.glob("*_seed*")), "--output", folder / "report"])
    return failed


def batch_size(argv: Sequence[str]) -> int:
    """Figure 5 of the PowerNorm paper: BLEU against the tokens of a mini-batch.

    An update has 4,096 tokens, by accumulation. For each of 512, 1,024, 2,048 and 4,096 tokens it calls pn reproduce
    CORPUS; then pn figures draws all runs.

    It also takes the settings, --data DIR, NORMS and SEEDS of pn reproduce CORPUS --help. A mini-batch is what all
    ranks take at once; every training has one rank (NPROC=1).
    """
    parser = ArgumentParser(prog="pn reproduce batch_size", description=inspect.getdoc(batch_size), epilog=AGAIN)
    corpora, runs = ("verses", "iwslt14", "wmt14"), "where the runs go, as DIR/tokens512/NORM_seedN, and DIR/figures"
    parser.add_argument("--corpus", choices=corpora, default="verses", help="the corpus (default verses)")
    parser.add_argument("--runs", type=Path, metavar="DIR", help=f"{runs} (default runs/batch_size_CORPUS)")
    parser.add_argument("--dry-run", action="store_true", help="print the commands and do nothing")
    args, words = parser.parse_known_args(argv)
    words += ["--dry-run"] if args.dry_run else []
    runs = args.runs or Path(f"runs/batch_size_{args.corpus}")
    os.environ["NPROC"] = "1"
    failed = 0
    for tokens in (512, 1024, 2048, 4096):
        batch = [f"dataset.max_tokens={tokens}", "tokens_per_update=4096"]
        failed |= reproduce(args.corpus, ["--runs", str(runs / f"tokens{tokens}"), *batch, *words])
    if not args.dry_run:
        must(["figures", *sorted(runs.glob("tokens*/*_seed*")), "--output", runs / "figures"])
    return failed


EXPERIMENTS = {"demo": demo, "batch_size": batch_size}
for _planned in (norms, masks, placements, adanorm):
    EXPERIMENTS[f"compare_{_planned.__name__}"] = functools.wraps(_planned)(functools.partial(study, _planned))
