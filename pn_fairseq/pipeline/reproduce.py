"""``pn reproduce``: every step from the text to a report, for a list of norms and seeds."""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pn_fairseq.common.command import (
    ArgumentParser,
    Interrupted,
    UserError,
    deferred_signals,
    did_you_mean,
    say,
    whole_number,
)
from pn_fairseq.common.files import PACKAGE, atomic_write, known_configs
from pn_fairseq.common.published import LM_TABLES, PAPER, Rows
from pn_fairseq.pipeline.data.prepare import main as prepare_data
from pn_fairseq.pipeline.data.recipes import RECIPES


@dataclass(frozen=True)
class Corpus:
    """What differs between corpora."""

    config: str  # the name of a configuration, or the path of one
    size: str  # the architectures are MODEL_NORM_SIZE
    seeds: str = "1 2 3"
    models: tuple[str, ...] = ("transformer",)
    norms: str = "ln bn pnv pn"
    subsets: tuple[str, ...] = ("test",)  # which are decoded; the report is about the first

    @property
    def steps(self) -> list[list[str]]:
        """The commands, one after the other for each run: verb and options."""
        if "transformer" not in self.models:
            return [["train"], ["average"], ["evaluate-lm"]]
        options = [[] if subset == "test" else ["--subset", subset] for subset in self.subsets]
        return [["train"], ["average"], *([verb, *words] for words in options for verb in ("generate", "score"))]

    @property
    def tables(self) -> dict[str, Rows]:
        """The published tables of the corpus."""
        stem, every = Path(self.config).stem, {**PAPER, **LM_TABLES}
        return {name: table for name, table in every.items() if table.config.startswith(stem)}


_BOTH = ("transformer_lm", "tensorized_lm")
#: The paper has layer-scale "in each model setting"; it would not change LN and GN, and PN-V and PN have it by default.
_SCALED = " ".join(f"{norm}+layer_scale_groups=1" for norm in ("bn", "brn", "mabn"))
#: fairseq's own model, post-norm.
_POST_NORM = "ln+encoder_norm_placement=post+decoder_norm_placement=post"
#: Corpora that a recipe prepares, by the name of the recipe.
CORPORA = {
    "verses": Corpus("verses_es_en", "tiny", seeds="1 2"),
    "multi30k": Corpus("multi30k_de_en", "tiny"),
    "multi30k_published": Corpus(
        "multi30k_en_de_tiny", "tiny", norms=f"{_POST_NORM} ln pn bn", subsets=("test", "test1")
    ),
    "iwslt14": Corpus("iwslt14_de_en", "iwslt"),
    "iwslt15_envi": Corpus("iwslt15_en_vi", "iwslt"),
    "wmt14": Corpus("wmt14_en_de_big", "wmt_en_de_big", seeds="1"),
    "verses_lm": Corpus("verses_lm_en", "tiny", models=_BOTH, norms="ln ln+layer_scale_groups=4 gn bn brn mabn pnv pn"),
    "ptb": Corpus("ptb_lm", "ptb", seeds="1", models=("tensorized_lm",), norms=f"ln gn {_SCALED} pnv pn"),
    "wikitext103": Corpus(
        "wikitext103_lm", "wt103", seeds="1", models=("tensorized_lm",), norms="ln bn+layer_scale_groups=1 pnv pn"
    ),
    "enwik8": Corpus("enwik8_lm", "base", seeds="1", models=("transformer_lm",), norms="none ln lns dn ada"),
}

ABOUT = """\
All steps from the text to a report, for a list of norms and seeds. WHAT is

  a corpus, which is prepared first: {corpora}
  a configuration or the path of a YAML file, for prepared data of your own (--data): {configs}
"""

#: The end of every help text.
AGAIN = """
Run again, it skips what is done and continues with the rest. A run that fails is named in the report; the others are
still made. To train on several machines, start the training commands of --dry-run there by torchrun
(docs/several_gpus.md); this command then does the other steps.
"""


def _parser(name: str, corpus: Corpus, passed_on: Mapping[str, dict]) -> ArgumentParser:
    several, verbs = len(corpus.models) > 1, dict.fromkeys(verb for verb, *_ in corpus.steps)
    about = f"From raw text to a table. For every norm and seed: {', '.join(verbs)}; then one report over all.\n"
    about += "One rank per visible GPU (pn train --help)."
    if "evaluate-lm" in verbs:
        about += "\nThe language models are causal, unlike the code that the paper names (docs/language_modeling.md)."
    names = f"as in {corpus.models[0]}_NORM_{corpus.size}; NORM+key=value adds a setting of the model"
    variables = {
        f'NORMS="{corpus.norms}"': f"the norms, {names}",
        f'SEEDS="{corpus.seeds}"': "one run is made for each norm and seed",
        f"SIZE={corpus.size}": "the size of the models; it needs a --runs of its own, since the names of runs lack it",
    }
    if several:
        variables[f'MODELS="{" ".join(corpus.models)}"'] = "and for each of these models"
    if corpus.tables:
        variables["TABLE=NAME"] = f"""\
instead of NORMS: the rows of a published table, with its config (the runs go to runs/CONFIG). The
      report, DIR/report-NAME, has the published numbers. NAME is one of
      {" ".join(corpus.tables)}"""
    listed = "".join(f"  {variable}\n      {meaning}\n" for variable, meaning in variables.items())
    parser = ArgumentParser(prog=f"pn reproduce {name}", description=about, epilog=f"environment:\n{listed}{AGAIN}")
    settings = f"settings that differ from the configuration {corpus.config}; {{run}} in one is the folder of the run"
    parser.add_argument("settings", nargs="*", metavar="key=value", help=settings)
    stem, run_name = Path(corpus.config).stem, f"{'MODEL_' if several else ''}NORM_seedN"
    runs = f"where the runs go, as DIR/{run_name}, and the report, as DIR/report (default runs/{stem})"
    parser.add_argument("--runs", metavar="DIR", help=runs)
    made = "which pn prepare has made"
    if name in CORPORA:
        made = f"made if it is not there; for data of your own: pn reproduce {corpus.config}"
    parser.add_argument("--data", metavar="DIR", help=f"the prepared data, {made} (default runs/data/{stem})")
    parser.add_argument("--dry-run", action="store_true", help="check the settings, print the commands and do nothing")
    group = parser.add_argument_group(f"passed on to pn prepare {name}")
    for flag, kind in passed_on.items():
        group.add_argument(flag, **kind)
    return parser


def own_corpus(config: str) -> Corpus:
    """What a configuration says about the models to train."""
    from pn_fairseq.norms import NORMS
    from pn_fairseq.pipeline.settings import compose
    from pn_fairseq.pipeline.train import find_config

    name = compose(find_config(config), [], world_size=1, on_cpu=True)[0].model._name
    known = "|".join(entry.short for entry in NORMS.values())
    if found := re.fullmatch(rf"(transformer|transformer_lm|tensorized_lm)_({known})_(\w+)", name):
        return Corpus(config, found[3], models=(found[1],))
    raise UserError(f"{config}: model._name={name} is not MODEL_NORM_SIZE, as transformer_pn_tiny: no norm fits it")


def main(argv: Sequence[str]) -> int:
    from pn_fairseq.pipeline.experiments import EXPERIMENTS

    if argv and not argv[0].startswith("-"):
        what, *words = argv
        return EXPERIMENTS[what](words) if what in EXPERIMENTS else reproduce(what, words)
    listed = "".join(f"  {what:<18}  {made.__doc__.splitlines()[0]}\n" for what, made in EXPERIMENTS.items())
    parser = ArgumentParser(
        prog="pn reproduce",
        usage="pn reproduce WHAT [options] [key=value ...]",
        description=ABOUT.format(corpora=", ".join(CORPORA), configs=", ".join(known_configs())) + listed,
        epilog="pn reproduce WHAT --help has the options.",
    )
    parser.add_argument("WHAT")
    parser.parse_args(argv)
    return 2


def trainings(corpus: Corpus, norms: Sequence[str], env: Mapping[str, str]) -> dict[str, list[str]]:
    """The runs: their names and settings of the model and the seed."""
    from pn_fairseq.norms import NORMS

    models = env.get("MODELS", " ".join(corpus.models)).split()
    seeds = [whole_number("SEEDS", seed) for seed in env.get("SEEDS", corpus.seeds).split()]
    if not (norms and seeds and models):
        raise UserError("NORMS, SEEDS and MODELS must each name at least one")
    for model in models:
        if model not in corpus.models:
            raise UserError(f"MODELS: unknown model '{model}'; there are {' '.join(corpus.models)}")
    known = [entry.short for entry in NORMS.values()]
    planned: dict[str, list[str]] = {}
    for model, norm, seed in itertools.product(models, norms, seeds):
        short, *settings = norm.split("+")
        if short not in known:
            raise UserError(f"NORMS: unknown norm '{short}'{did_you_mean(short, known)}; there are {' '.join(known)}")
        name = f"{f'{model}_' if len(corpus.models) > 1 else ''}{norm}_seed{seed}"
        if name in planned:
            raise UserError(f"NORMS and SEEDS name {name} twice")
        planned[name] = [f"model._name={model}_{short}_{env.get('SIZE') or corpus.size}", f"common.seed={seed}"]
        planned[name] += [f"model.{setting}" for setting in settings]
    return planned


def of_table(corpus: Corpus, table: str, env: Mapping[str, str]) -> tuple[str, list[str]]:
    """The configuration of a published table, and its rows as NORMS has them."""
    from pn_fairseq.norms import NORMS

    for other, what in {"NORMS": "which norms", "SIZE": "the size of the models"}.items():
        if other in env:
            raise UserError(f"TABLE and {other} both say {what}: give one of them")
    if table not in corpus.tables:
        known = " ".join(corpus.tables) or "none of this corpus"
        raise UserError(f"TABLE: unknown table '{table}'{did_you_mean(table, corpus.tables)}; there are {known}")
    config, rows = corpus.tables[table].config, corpus.tables[table].rows
    return config, ["+".join([NORMS[row.norm].short, *map("=".join, row.settings.items())]) for row in rows]


def reproduce(name: str, words: Sequence[str], env: Mapping[str, str] = os.environ) -> int:
    """``pn reproduce NAME`` with the arguments ``words``; returns the exit code."""
    logging.getLogger().addHandler(logging.NullHandler())  # else fairseq configures logging when it is imported
    corpus, passed_on = (CORPORA[name], RECIPES[name].OPTIONS) if name in CORPORA else (own_corpus(name), {})
    args = _parser(name, corpus, passed_on).parse_intermixed_args(words)
    config, norms = corpus.config, env.get("NORMS", corpus.norms).split()
    if table := env.get("TABLE"):
        config, norms = of_table(corpus, table, env)
    planned = trainings(corpus, norms, env)
    runs = Path(args.runs or Path("runs") / Path(config).stem).absolute()
    data = Path(args.data or Path("runs/data") / Path(corpus.config).stem).absolute()
    where = [] if name in CORPORA else ["--data", str(data)]
    if where and not ((data / "settings.txt").is_file() and (data / "bin").is_dir()):
        raise UserError(f"'{data}' is not prepared data (--data): pn prepare makes it from your text")
    for model in corpus.models:  # each norm with settings of its own, or else one norm of each model
        of_model = [(arch, *more) for arch, _, *more in planned.values() if arch.startswith(f"model._name={model}_")]
        for settings in dict.fromkeys(words for words in of_model if len(words) > 1) or of_model[:1]:
            check_training(config, *where, *settings, *args.settings)

    # Every command, in order.
    prepare = ["prepare", name, "--dest", data] if name in CORPORA else []
    for flag, kind in passed_on.items():
        value = getattr(args, flag.removeprefix("--").replace("-", "_"))
        if value not in (kind.get("default"), False):
            prepare += [flag] if value is True else [flag, str(value)]
    if prepare:
        prepare_data([*map(str, prepare[1:]), "--check"])
    commands: dict[Path, list[list]] = {}
    for run_name, settings in planned.items():
        run = runs / run_name
        train = ["--data", data, "--run", run, *settings]
        train += [setting.replace("{run}", str(run)) for setting in args.settings]
        commands[run] = [
            ["train", config, *train],
            *([verb, "--run", run, *words] for verb, *words in corpus.steps[1:]),
        ]
        if (run / "config.yaml").is_file() and data.is_dir():  # it was begun, with its settings and data
            check_training(config, *map(str, train))
    report = ["report", *commands, "--output", runs / (f"report-{table}" if table else "report")]
    if table in PAPER:  # a report of language models knows its corpus
        report += ["--paper", table]

    if args.dry_run:
        for step in filter(None, [prepare, *itertools.chain(*commands.values()), report]):
            print(shown(step))
        return 0
    if prepare:
        must(prepare)
    failed = [run.name for run, steps in commands.items() if not _make(name, run, steps)]
    must(report)
    if failed:
        count = f"{len(failed)} of {len(commands)} runs failed: {' '.join(failed)}"
        say(name, f"{count} (the report says why); the same command tries them again")
    return 1 if failed else 0


@functools.cache  # the runs of several seeds have the same settings
def check_training(*words: str) -> None:
    """Check the settings of a training."""
    from pn_fairseq.pipeline import train

    train.main([words[0], "--check", *words[1:]])


def shown(step: Sequence[str | Path]) -> str:
    """A step as one may type it, with paths relative to the current folder."""
    return shlex.join(["pn", *(str(word).removeprefix(f"{Path.cwd()}/") for word in step)])


def must(step: Sequence[str | Path]) -> None:
    """Run a step without which nothing else can be done; it has named the reason if it fails."""
    if code := execute(step):
        sys.exit(code)


def program(step: Sequence[str | Path]) -> list[str | Path]:
    """The command that runs a step by this very package, also where the current folder has another one."""
    return [sys.executable, *(["-P"] if PACKAGE.parent != Path.cwd() else []), "-m", "pn_fairseq", *step]


def execute(step: Sequence[str | Path], messages: Path | None = None) -> int:
    """Run a step to its end and return its exit code; the file ``messages`` also gets what it writes to stderr."""
    process = None

    def copy_messages() -> None:
        for line in process.stderr or ():  # whole lines: the step also writes to stdout, which may be the same file
            line = line.removesuffix(b"\n") + b"\n"
            with contextlib.suppress(OSError):  # a full disk; the step must be able to write
                kept.write(line)
            with contextlib.suppress(OSError):  # `| head`
                sys.stderr.buffer.write(line)
                sys.stderr.buffer.flush()

    with messages.open("wb", buffering=0) if messages else contextlib.nullcontext() as kept:
        try:
            with deferred_signals():
                process = subprocess.Popen(
                    program(step),
                    stdin=subprocess.DEVNULL,
                    stderr=subprocess.PIPE if messages else None,
                    env={**os.environ, "PN_FAIRSEQ_STEP": "1"},  # the line about an interruption comes from here
                )
            copy_messages()
            code = process.wait()
        except (Interrupted, KeyboardInterrupt):
            if process:
                with deferred_signals():
                    process.terminate()
                    copy_messages()
                    process.wait()
            raise
    code = code if code >= 0 else 128 - code
    if code in (130, 143):
        raise Interrupted(code - 128)
    return code


def _make(name: str, run: Path, steps: Sequence[Sequence[str | Path]]) -> bool:
    """One run through its steps; False after a failure, which is noted in its folder and ends this run only."""
    work = run.parent / "logs" / run.name  # not in the folder of the run: `pn report DIR/*_seed*` finds runs only
    work.mkdir(parents=True, exist_ok=True)
    for step in steps:
        verb, messages = step[0], work / f"{step[0]}.err"
        say(name, f"{run.name}: {verb}")
        if not (code := execute(step, messages)):
            continue
        say(name, f"{run.name} failed in {verb} (its messages are in {work})")
        run.mkdir(parents=True, exist_ok=True)
        lines = [line for line in messages.read_text("utf-8", "replace").splitlines() if line.strip()]
        reason = lines[-1] if lines else "it printed no reason"
        if code > 128:
            reason = f"killed by {signal.Signals(code - 128).name}, as happens when memory runs out"
        with atomic_write(run / "failed", "w") as file:
            file.write(f"{verb}: {reason}\n")
        return False
    (run / "failed").unlink(missing_ok=True)
    return True
