"""``pn reproduce``: a corpus, a configuration, a study, or the demo.

A study is a YAML file: ``about`` is its text, ``planned`` the comparisons that were named before
its runs (``pn report --planned``), and ``parts`` has what
:func:`~pn_fairseq.pipeline.reproduce.reproduce` is called with. Its lists are written out, so that
a new norm or placement changes no study.
"""

from __future__ import annotations

import argparse
import inspect
import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from omegaconf import MISSING, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from pn_fairseq.common.command import (
    ArgumentParser,
    UserError,
    absolute,
    check_settings,
    say,
    shown,
    whole,
)
from pn_fairseq.common.files import CONFIGS, find_yaml, names_in, only_writer
from pn_fairseq.pipeline.data.prepare import options_of
from pn_fairseq.pipeline.data.recipes import RECIPES
from pn_fairseq.pipeline.reproduce import CORPORA, Corpus, find_corpus, must, reproduce
from pn_fairseq.pipeline.runs import load_config
from pn_fairseq.pipeline.train import setting_of

#: The studies that come with this project.
STUDIES = CONFIGS / "studies"

ABOUT = """\
Run all steps from text to a report, for a list of norms and seeds. WHAT is

  a corpus, which is prepared first: {corpora}
  a configuration or the path of a YAML file, for prepared data of your own (--data): {configs}
  demo        one small run on the verses, with sample translations
  --study NAME-OR-FILE
              a list of runs that answer one question: {studies}; or such a file of your own
"""

#: The end of every help text.
AGAIN = """
The same command skips finished steps and resumes. If a run fails, the report lists it, and the
others still run. To train on several machines, start the training commands that --dry-run prints
with torchrun (docs/several_gpus.md); this command then does the remaining steps.
"""


def names(text: str) -> list[str]:
    """The type of an option that is a list, with commas or blanks between its parts."""
    if parts := re.findall(r"[^\s,]+", text):
        return parts
    raise argparse.ArgumentTypeError("must name at least one")


def seeds(text: str) -> list[int]:
    """The type of a list of seeds."""
    parts = names(text)
    for part in parts:
        span = re.fullmatch(r"(\d{1,4})(?:-|\.\.|:)(\d{1,4})", part)
        if span:
            meant = ",".join(map(str, range(int(span[1]), int(span[2]) + 1)))
            advice = f", did you mean '{meant}'?" if 0 < len(meant) < 80 else ""
            raise argparse.ArgumentTypeError(f"'{part}' is not a list of seeds{advice}")
    return [whole(part) for part in parts]


def add_ranks(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--ranks", type=whole, metavar="N", help="ranks for training and decoding (pn train --help)"
    )


def _parser(name: str, corpus: Corpus, preparation: Mapping[str, dict]) -> ArgumentParser:
    steps = ", ".join(dict.fromkeys(verb for verb, *_ in corpus.steps))
    description = (
        f"From raw text to a report. For every norm and seed: {steps}; then one report on all "
        f"runs.\n"
    )
    if "evaluate-lm" in steps:
        description += (
            "The language models are causal, unlike the code that the paper names "
            "(docs/language_modeling.md).\n"
        )

    def of_flag(option: str, value: str | None, words: list[str]) -> str:
        return setting_of(option, value, [corpus.config])

    parser = ArgumentParser(
        prog=f"pn reproduce {name}", description=description, epilog=AGAIN, setting_of=of_flag
    )
    settings = (
        f"settings that replace those of configuration {corpus.config}; {{run}} stands for the "
        f"folder of the run"
    )
    parser.add_argument("settings", nargs="*", metavar="key=value", help=settings)
    add = parser.add_argument
    meaning = (
        f"NORM as in {corpus.models[0]}_NORM_{corpus.size}; NORM+key=value adds a setting of the "
        f"model"
    )
    add("--norms", type=names, metavar="LIST", help=f"{meaning} (default {','.join(corpus.norms)})")
    default = ",".join(map(str, corpus.seeds))
    add(
        "--seeds",
        type=seeds,
        metavar="LIST",
        help=f"train each norm with each seed (default {default})",
    )
    add(
        "--models",
        type=names,
        metavar="LIST",
        help=f"models to train with each norm ({','.join(corpus.models)})",
    )
    size = (
        f"size of the models (default {corpus.size}); for another size set --runs: run names do "
        f"not contain it"
    )
    add("--size", metavar="SIZE", help=size)
    if corpus.tables:
        table = (
            "instead of --norms: the rows of a published table, with its configuration (the runs "
            "go to runs/CONFIG)"
        )
        table += (
            f"; the report, DIR/report-NAME, shows the published numbers. NAME: "
            f"{', '.join(corpus.tables)}"
        )
        add("--table", metavar="NAME", help=table)
    stem, run_name = (
        Path(corpus.config).stem,
        f"{'MODEL_' if len(corpus.models) > 1 else ''}NORM_seedN",
    )
    runs = (
        f"where the runs go, as DIR/{run_name}, and the report, as DIR/report (default runs/{stem})"
    )
    add("--runs", type=Path, metavar="DIR", help=runs)
    made = "written by pn prepare"
    if name in CORPORA:
        made = f"made if it does not exist; for your own data: pn reproduce {corpus.config}"
    add(
        "--data",
        type=Path,
        metavar="DIR",
        help=f"the prepared data, {made} (default runs/data/{stem})",
    )
    add_ranks(parser)
    add(
        "--dry-run",
        action="store_true",
        help="check the settings, print the commands and do nothing",
    )
    group = parser.add_argument_group(f"passed on to pn prepare {name}")
    for flag, kind in preparation.items():
        group.add_argument(flag, **kind)
    return parser


def of_corpus(name: str, argv: Sequence[str]) -> int:
    """``pn reproduce NAME`` with the arguments ``argv``."""
    options = options_of(RECIPES[name]) if name in CORPORA else {}
    args = vars(_parser(name, find_corpus(name), options).parse_intermixed_args(argv))
    check_settings(args["settings"], list(argv), ("--norms", "--seeds", "--models"))
    if args.get("table") and (both := [option for option in ("norms", "size") if args[option]]):
        raise UserError(f"--table and --{both[0]} both say what is trained: give one of them")
    preparation = []
    for flag, kind in options.items():
        value = args.pop(flag.removeprefix("--").replace("-", "_"))
        if value not in (kind.get("default"), False):
            preparation += [flag] if value is True else [flag, str(value)]
    return reproduce(name, preparation=preparation, **args)


def main(argv: Sequence[str]) -> int:
    # else fairseq configures logging when it is imported
    logging.getLogger().addHandler(logging.NullHandler())
    if argv and not argv[0].startswith("-"):
        what, *options = argv
        if what in names_in(STUDIES):
            raise UserError(f"{what} is a study: pn reproduce --study {what}")
        return demo(options) if what == "demo" else of_corpus(what, options)
    if any(word.partition("=")[0] == "--study" for word in argv):
        return study_command(argv)
    parser = ArgumentParser(
        prog="pn reproduce",
        usage="pn reproduce WHAT [options] [key=value ...]",
        description=ABOUT.format(
            corpora=", ".join(CORPORA),
            configs=", ".join(names_in(CONFIGS)),
            studies=", ".join(names_in(STUDIES)),
        ),
        epilog="pn reproduce WHAT --help lists the options.",
    )
    parser.add_argument("WHAT")
    parser.parse_args(argv)
    return 2


# --- studies ---


@dataclass
class Part:
    """Runs of one corpus within a study, in the words of its file."""

    corpus: str = MISSING  # with a recipe, or a configuration
    seeds: list[int] = MISSING
    norms: list[str] = MISSING
    folder: str = "${.corpus}"  # of its runs, within the study's
    models: list[str] = field(default_factory=list)
    settings: list[str] = field(default_factory=list)
    data: str | None = None  # prepared data, for a configuration
    ranks: int | None = None  # unless --ranks is given


@dataclass
class Study:
    """Training runs that answer one question."""

    about: str = MISSING
    parts: list[Part] = MISSING
    planned: list[str] = field(default_factory=list)


def read_study(name: str) -> Study:
    """The study in configs/studies of this name, or in a file."""
    file = find_yaml(name, STUDIES)
    try:
        return OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(Study), load_config(file)))
    except (OmegaConfBaseException, ValueError) as error:
        reason = f"{getattr(error, 'full_key', '')} {str(error).splitlines()[0]}".strip()
        raise UserError(f"{file} is not a study, as configs/studies/*.yaml are: {reason}") from None


def study_command(argv: Sequence[str]) -> int:
    """``pn reproduce --study NAME``: the parts of a study, and a report on each folder; 1 if a
    run failed.
    """
    chosen = ArgumentParser(prog="pn reproduce", add_help=False)
    chosen.add_argument("--study", metavar="NAME-OR-FILE", required=True)
    chosen, options = chosen.parse_known_args(argv)
    study, name = read_study(chosen.study), Path(chosen.study).stem
    count = sum(len(part.norms) * len(part.seeds) for part in study.parts)
    parser = ArgumentParser(
        prog=f"pn reproduce --study {chosen.study}",
        description=f"{study.about}\n{count} runs. One rank per visible GPU, or one on the CPU.",
        epilog=AGAIN,
    )
    add = parser.add_argument
    add(
        "settings",
        nargs="*",
        metavar="key=value",
        help="settings of every run, in addition to those of the study",
    )
    runs = (
        f"where the runs go, as DIR/FOLDER/NORM_seedN, and reports, as DIR/FOLDER/report (default "
        f"runs/{name})"
    )
    add("--runs", type=Path, metavar="DIR", default=f"runs/{name}", help=runs)
    add_ranks(parser)
    add("--dry-run", action="store_true", help="print the commands and do nothing")
    args = vars(parser.parse_intermixed_args(options))
    failed = 0
    seeds = sorted({seed for part in study.parts for seed in part.seeds})
    for seed in seeds:  # a seed is whole before the next one begins
        for part in study.parts:
            if seed in part.seeds:
                failed |= reproduce(
                    part.corpus,
                    norms=part.norms,
                    seeds=[seed],
                    models=part.models,
                    settings=[*part.settings, *args["settings"]],
                    runs=args["runs"] / part.folder,
                    data=part.data and Path(part.data),
                    ranks=args["ranks"] or part.ranks,
                    dry_run=args["dry_run"],
                )
    if not args["dry_run"]:
        for folder in dict.fromkeys(args["runs"] / part.folder for part in study.parts):
            must(["report", *sorted(folder.glob("*_seed*")), "--output", folder / "report"])
    return failed


def demo(argv: Sequence[str]) -> int:
    """One small training run on the verses, with sample translations.

    Trains a small pre-norm transformer with PN in the encoder on Spanish-English verses, with the
    settings of the configuration demo, and prints BLEU, sample translations and the path of the
    learning curve. The same command resumes after an interruption.
    """
    parser = ArgumentParser(prog="pn reproduce demo", description=inspect.getdoc(demo))
    parser.add_argument("settings", nargs="*", metavar="key=value", help="settings of the run")
    parser.add_argument(
        "--run",
        type=Path,
        metavar="DIR",
        default="runs/demo",
        help="the results (default runs/demo)",
    )
    architecture = (
        "transformer_NORM_tiny, such as transformer_ln_tiny (default transformer_pn_tiny)"
    )
    parser.add_argument("--arch", metavar="NAME", default="transformer_pn_tiny", help=architecture)
    args = parser.parse_intermixed_args(argv)
    run, data = absolute(args.run), absolute("runs/data/verses_es_en")
    train = [
        "train",
        "demo",
        "--data",
        data,
        "--run",
        run,
        f"model._name={args.arch}",
        *args.settings,
    ]
    after_training = [[verb, "--run", run] for verb in ("average", "generate", "score")]
    steps = [[*train, "--check"], ["prepare", "verses", "--dest", data], train, *after_training]
    with only_writer(run) as note:
        for step in steps:
            say("demo", shown(step))
            note(step[0])
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
