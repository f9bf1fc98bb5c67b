"""``pn reproduce demo``, ``compare_norms`` and ``batch_size``: trainings that this project has chosen."""

from __future__ import annotations

import argparse
import itertools
import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from pn_fairseq.common.command import ArgumentParser, UserError, say
from pn_fairseq.pipeline.reproduce import check_settings, must, reproduce


def _parser(name: str, text: str) -> ArgumentParser:
    """A parser whose help is ``text``, up to the first line that begins with ``Run again``, and what follows it."""
    about, _, end = text.partition("\nRun again")
    formatter = argparse.RawDescriptionHelpFormatter
    return ArgumentParser(
        prog=f"pn reproduce {name}", description=about, epilog=f"Run again{end}", formatter_class=formatter
    )


# --- demo ---

_DEMO = """\
Trains a small pre-norm transformer with PN in the encoder on Spanish-English verses, with the settings of the
configuration verses_es_en, and prints BLEU, sample translations and where the learning curve is.

Run again, it resumes where it was interrupted.
"""


def demo(argv: Sequence[str]) -> int:
    """``pn reproduce demo``: every step for one model on the verses."""
    parser = _parser("demo", _DEMO)
    parser.add_argument("settings", nargs="*", default=[], metavar="key=value", help="settings of the training")
    parser.add_argument(
        "--run", type=Path, metavar="DIR", default="runs/demo", help="where everything goes (default runs/demo)"
    )
    names = "transformer_pn_tiny (default), transformer_ln_tiny, transformer_bn_tiny, transformer_pnv_tiny"
    parser.add_argument("--arch", metavar="NAME", default="transformer_pn_tiny", help=names)
    args = parser.parse_intermixed_args(argv)
    check_settings(args.settings)
    run, data = args.run.absolute(), Path("runs/data/verses_es_en").absolute()
    train = ["train", "verses_es_en", "--data", data, "--run", run, f"model._name={args.arch}", *args.settings]
    must([*train, "--check"])
    say("demo", "1/5 preparing the corpus")
    must(["prepare", "verses", "--dest", data])
    say("demo", f"2/5 training {args.arch}")
    must(train)
    say("demo", "3/5 averaging checkpoints")
    must(["average", "--run", run])
    say("demo", "4/5 decoding the test set")
    must(["generate", "--run", run])
    say("demo", "5/5 scoring")
    must(["score", "--run", run], quiet=True)
    must(["report", run, "--output", run / "report"], quiet=True)
    texts = {"source": data / "raw/test.es", "reference": data / "raw/test.en"}
    texts["translation"] = run / "generate/test/hyp.txt"
    lines = {name: path.read_text("utf-8").splitlines() for name, path in texts.items()}
    count = len(lines["translation"])
    print("\nSample translations")
    for number in range(1, 6):
        for name in texts:
            print(f"  {name:<11} {lines[name][number * count // 6 - 1]}")
        print()
    print((run / "generate/test/scores.txt").read_text("utf-8"), end="")
    print(f"learning curve:   {run / 'report/report-curves-1.png'}")
    return 0


# --- compare_norms ---

_COMPARE_NORMS = """\
Trains, averages, decodes and scores the norms on the verses and Multi30k, seed by seed. Three seeds: the norms of the
PowerNorm paper's Table 4 and some more, layer-scale, the variants `release`, BN in the decoder, learning rates of LN,
PN and BN. One seed: all other norms, PN in the decoder, the decays of PN. Then more seeds of some norms: up to eight on
the verses, six on Multi30k. The results are in docs/results.

Run again, it skips what is done and continues. 138 runs of 8 minutes on 2 CPU cores. A run that fails is named in
the report; the others are still made. One rank per visible GPU.
"""


class Part(NamedTuple):
    """One call of :func:`reproduce` within a comparison."""

    corpus: str
    folder: str  # of its runs
    seed: int
    norms: str  # as in NORMS
    settings: tuple[str, ...] = ()  # of the training


#: Comparisons with LN that were planned before the runs, as ``pn report --planned`` takes them: validation loss, and
#: test loss of language models. They are tested apart, without correction for the other comparisons.
PLANNED = ("PN:loss", "PN:bits")


def manifest() -> list[Part]:
    """The parts of the comparison, in their order."""
    # On Multi30k half the updates of the verses, 3 epochs: the configuration multi30k_de_en trains 33, too long for 18
    # runs on a CPU. The average is over updates 600 to 800.
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
    # As the paper tuned them; 0.9 and 0.9 are the defaults above.
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
    return parts


def compare_norms(argv: Sequence[str]) -> int:
    """``pn reproduce compare_norms``: the parts of :func:`manifest`, and a report on each folder."""
    parser = _parser("compare_norms", _COMPARE_NORMS)
    runs = "where the runs go, as DIR/CORPUS/NORM_seedN, and reports, as DIR/CORPUS/report (default runs/compare_norms)"
    parser.add_argument("--runs", type=Path, metavar="DIR", default="runs/compare_norms", help=runs)
    text = "the text of Multi30k (pn prepare multi30k --help); without it that corpus is left out"
    parser.add_argument("--multi30k", type=Path, metavar="DIR", help=text)
    parser.add_argument("--only", choices=("verses", "multi30k"), help="one of the corpora")
    parser.add_argument("--dry-run", action="store_true", help="print the commands and do nothing")
    args = parser.parse_args(argv)
    if args.only == "multi30k" and not args.multi30k:
        raise UserError("--only multi30k needs --multi30k DIR, the folder with its text")
    if args.multi30k and not args.multi30k.is_dir():
        raise UserError(f"--multi30k {args.multi30k} is not a directory")
    wanted = {args.only} if args.only else {"verses", "multi30k"} if args.multi30k else {"verses"}
    parts = [part for part in manifest() if part.corpus in wanted]
    of_corpus = {"verses": [], "multi30k": ["--corpus", str(args.multi30k)]}
    calls = [
        (part.corpus, args.runs / part.folder, [*of_corpus[part.corpus], *part.settings], part.norms, part.seed)
        for part in parts
    ]
    failed = _reproduce_all(calls, args.dry_run)
    if args.dry_run:
        return 0
    for folder in dict.fromkeys(folder for _, folder, *_ in calls):
        must(["report", *sorted(folder.glob("*_seed*")), "--output", folder / "report"])
    if failed:
        say("compare_norms", f"some runs failed; the reports in {args.runs}/*/report say which and why")
    return failed


# --- batch_size ---

_BATCH_SIZE = """\
BLEU against the tokens of a mini-batch, at 4,096 tokens an update by accumulation: Figure 5 of the PowerNorm paper.
For each of 512, 1,024, 2,048 and 4,096 tokens it calls pn reproduce CORPUS; then pn figures draws all runs.

In the environment: NORMS and SEEDS, as of pn reproduce CORPUS --help. A mini-batch is what all ranks take at once;
every training has one rank (NPROC=1).

Run again, it skips what is done and continues with the rest. A run that fails is named in the report of its size; the
others are still made.
"""


def batch_size(argv: Sequence[str]) -> int:
    """``pn reproduce batch_size``: the same update in mini-batches of four sizes."""
    parser = _parser("batch_size", _BATCH_SIZE)
    add, corpora = parser.add_argument, ("verses", "iwslt14", "wmt14")
    add("settings", nargs="*", default=[], metavar="key=value", help="settings that differ from those of the corpus")
    add("--corpus", choices=corpora, default="verses", help="the corpus (default verses)")
    runs = "where the runs go, as DIR/tokens512/NORM_seedN, and DIR/figures (default runs/batch_size_CORPUS)"
    add("--runs", type=Path, metavar="DIR", help=runs)
    add("--data", metavar="DIR", help="the prepared data, made if it is not there (default as of pn reproduce CORPUS)")
    add("--dry-run", action="store_true", help="print the commands and do nothing")
    args = parser.parse_intermixed_args(argv)
    check_settings(args.settings)
    runs = args.runs or Path(f"runs/batch_size_{args.corpus}")
    os.environ["NPROC"] = "1"
    calls = []
    for tokens in (512, 1024, 2048, 4096):
        words = [
            *(["--data", args.data] if args.data else []),
            f"dataset.max_tokens={tokens}",
            "tokens_per_update=4096",
        ]
        calls.append((args.corpus, runs / f"tokens{tokens}", [*words, *args.settings], None, None))
    failed = _reproduce_all(calls, args.dry_run)
    if not args.dry_run:
        must(["figures", *sorted(runs.glob("tokens*/*_seed*")), "--output", runs / "figures"])
    return failed


def _reproduce_all(calls: Sequence[tuple], dry_run: bool) -> int:
    """Call :func:`reproduce` for corpus, folder of the runs, words, norms and seed; 1 if a run failed, as there."""
    failed = 0
    for corpus, folder, words, norms, seed in calls:
        chosen = {"NORMS": norms, "SEEDS": str(seed)} if norms else {}
        options = ["--runs", str(folder), *(["--dry-run"] if dry_run else [])]
        failed |= reproduce(corpus, [*options, *words], {**os.environ, **chosen})
    return failed
