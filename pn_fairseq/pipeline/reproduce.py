"""``pn reproduce``: a corpus, a configuration, a study, or the demo.

A study is a YAML file: ``about`` is its text, ``planned`` lists the comparisons that were named
before its runs (``pn report --planned``), and ``parts`` holds the arguments for
:func:`~pn_fairseq.pipeline.steps.reproduce`. The lists are written out, so that a new norm or
placement changes no study.
"""

from __future__ import annotations

import argparse
import inspect
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import NoReturn

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
from pn_fairseq.common.errors import did_you_mean
from pn_fairseq.common.files import CONFIGS, find_yaml, names_in, only_writer
from pn_fairseq.pipeline.data.experiment import Experiment
from pn_fairseq.pipeline.data.recipes import RECIPES
from pn_fairseq.pipeline.data.settings import is_prepared
from pn_fairseq.pipeline.prepare import options_of_recipe
from pn_fairseq.pipeline.runs import load_config
from pn_fairseq.pipeline.steps import (
    PlannedRun,
    experiments,
    find_experiment,
    is_corpus,
    load_corpus,
    must,
    planned_runs,
    reproduce,
)
from pn_fairseq.pipeline.train import setting_of

#: The studies that come with this project.
STUDIES = CONFIGS / "studies"

ABOUT = """\
Run all steps from text to a report, for a list of norms and seeds. WHAT is

  a corpus, which is prepared first: {corpora};
              or the path of a recipe of your own, FILE.py (docs/adding_a_corpus.md)
  a configuration or the path of a YAML file, for prepared data of your own (--data): {configs}
  demo        one small run on the verses, with sample translations
  --study NAME-OR-FILE
              a list of runs that answer one question: {studies}; or such a file of your own
              (keys of its parts: {keys}; docs/compare.md)
"""

#: The end of every help text.
AGAIN = """
The same command skips finished steps and resumes. If a run fails, the report lists it, and the
others still run. To train on several machines, start the training commands that --dry-run prints
with torchrun (docs/several_gpus.md); this command then does the remaining steps.
"""


def word_list(text: str) -> list[str]:
    """The type of an option that is a list, separated by commas or blanks."""
    parts = re.findall(r"[^\s,]+", text)
    if parts:
        return parts
    raise argparse.ArgumentTypeError("must name at least one")


def seed_list(text: str) -> list[int]:
    """The type of a list of seeds."""
    parts = word_list(text)
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


def _parser(name: str, experiment: Experiment, preparation: Mapping[str, dict]) -> ArgumentParser:
    verbs = list(dict.fromkeys(verb for verb, *_ in experiment.steps))
    description = (
        f"From raw text to a report. For every norm and seed: {', '.join(verbs)}; then one report "
        "on all runs.\n"
    )
    if "evaluate-lm" in verbs:
        description += (
            "The language models are causal, unlike the code that the paper names "
            "(docs/language_modeling.md).\n"
        )

    def of_flag(option: str, value: str | None, words: list[str]) -> str:
        return setting_of(option, value, [experiment.config])

    parser = ArgumentParser(
        prog=f"pn reproduce {name}", description=description, epilog=AGAIN, setting_of=of_flag
    )
    add = parser.add_argument
    settings = (
        f"settings that replace those of configuration {experiment.config}; {{run}} stands for "
        "the folder of the run"
    )
    add("settings", nargs="*", metavar="key=value", help=settings)
    norms = (
        f"NORM as in {experiment.models[0]}_NORM_{experiment.size}; NORM+key=value adds a setting "
        f"of the model (default {','.join(experiment.norms)})"
    )
    add("--norms", type=word_list, metavar="LIST", help=norms)
    default = ",".join(map(str, experiment.seeds))
    seeds = f"train each norm with each seed (default {default})"
    add("--seeds", type=seed_list, metavar="LIST", help=seeds)
    models = f"models to train with each norm ({','.join(experiment.models)})"
    add("--models", type=word_list, metavar="LIST", help=models)
    size = (
        f"size of the models (default {experiment.size}); for another size set --runs: run names "
        "do not contain it"
    )
    add("--size", metavar="SIZE", help=size)
    if experiment.tables:
        table = (
            "instead of --norms: the rows of a published table, with its configuration (the runs "
            "go to runs/CONFIG); the report, DIR/report-NAME, shows the published numbers. NAME: "
            f"{', '.join(experiment.tables)}"
        )
        add("--table", metavar="NAME", help=table)
    stem = Path(experiment.config).stem
    run_name = "MODEL_NORM_seedN" if len(experiment.models) > 1 else "NORM_seedN"
    runs = (
        f"where the runs go, as DIR/{run_name}, and the report, as DIR/report (default runs/{stem})"
    )
    add("--runs", type=Path, metavar="DIR", help=runs)
    made = "written by pn prepare"
    if is_corpus(name):
        made = f"made if it does not exist; for your own data: pn reproduce {experiment.config}"
    data = f"the prepared data, {made} (default runs/data/{stem})"
    add("--data", type=Path, metavar="DIR", help=data)
    add_ranks(parser)
    dry_run = "check the settings, print the commands and do nothing"
    add("--dry-run", action="store_true", help=dry_run)
    group = parser.add_argument_group(f"passed on to pn prepare {name}")
    for flag, arguments in preparation.items():
        group.add_argument(flag, **arguments)
    return parser


def of_corpus(name: str, argv: Sequence[str]) -> int:
    """``pn reproduce NAME`` with the arguments ``argv``."""
    options = options_of_recipe(RECIPES[name]) if is_corpus(name) else {}
    args = vars(_parser(name, find_experiment(name), options).parse_intermixed_args(argv))
    check_settings(args["settings"], list(argv), ("--norms", "--seeds", "--models"))
    for option in ("norms", "size"):
        if args.get("table") and args[option]:
            raise UserError(f"--table and --{option} both say what is trained: give one of them")
    preparation = []
    for flag, kind in options.items():
        value = args.pop(flag.removeprefix("--").replace("-", "_"))
        if value is True:
            preparation.append(flag)
        elif value not in (kind.get("default"), False):
            preparation += [flag, str(value)]
    return reproduce(name, preparation=preparation, **args)


def check_no_folder(path: Path) -> None:
    """Refuse a folder of text or of prepared data instead of a configuration."""
    if not path.is_dir():
        return
    if is_prepared(path):
        is_lm = not (path / "settings.txt").read_text("utf-8").startswith("source=")
        command = shown(["reproduce", "own_text_lm" if is_lm else "own_text", "--data", path])
        raise UserError(f"'{path}' is prepared data; name it by --data: {command}")
    data = Path("runs/data", path.resolve().name)
    prepare = shown(["prepare", "text", "--corpus", path, "--dest", data])
    command = shown(["reproduce", "own_text", "--data", data])
    raise UserError(
        f"'{path}' is a folder; prepare its text first: {prepare} --source LANG --target LANG, "
        f"then {command}"
    )


def main(argv: Sequence[str]) -> int:
    # otherwise fairseq configures logging when it is imported
    logging.getLogger().addHandler(logging.NullHandler())
    if argv and not argv[0].startswith("-"):
        what, *options = argv
        if what in names_in(STUDIES):
            raise UserError(f"{what} is a study: pn reproduce --study {what}")
        if what == "demo":
            return demo(options)
        if what not in experiments() and what not in names_in(CONFIGS):
            check_no_folder(Path(what))
        return of_corpus(load_corpus(what) if what.endswith(".py") else what, options)
    if any(word.partition("=")[0] == "--study" for word in argv):
        return study_command(argv)
    parser = ArgumentParser(
        prog="pn reproduce",
        usage="pn reproduce WHAT [options] [key=value ...]",
        description=ABOUT.format(
            corpora=", ".join(experiments()),
            configs=", ".join(names_in(CONFIGS)),
            studies=", ".join(names_in(STUDIES)),
            keys=", ".join(part.name for part in fields(Part)),
        ),
        epilog="pn reproduce WHAT --help lists the options.",
    )
    parser.add_argument("WHAT")
    parser.parse_args(argv)
    return 2


# --- studies ---


def _key(example: object, **default):
    """A field of a part, with an example value for messages about a wrong form."""
    return field(metadata={"example": example}, **default)


@dataclass
class Part:
    """Runs of one corpus within a study, in the words of its file."""

    # a corpus with a recipe, the file of a recipe, or a configuration
    corpus: str = _key("verses", default=MISSING)
    seeds: list[int] = _key([1, 2, 3], default=MISSING)
    norms: list[str] = _key(["ln", "pn"], default=MISSING)
    # folder of its runs within the study's folder (default: corpus)
    folder: str = _key("slow", default="")
    models: list[str] = _key(["transformer"], default_factory=list)
    settings: list[str] = _key(["optimization.max_update=6"], default_factory=list)
    # prepared data, for a configuration
    data: str | None = _key("runs/data/mine", default=None)
    # unless --ranks is given
    ranks: int | None = _key(2, default=None)


@dataclass
class Study:
    """Training runs that answer one question."""

    about: str = MISSING
    parts: list[Part] = MISSING
    planned: list[str] = field(default_factory=list)


def read_study(name: str) -> Study:
    """The study with this name in configs/studies, or in a file."""
    file = find_yaml(name, STUDIES)
    settings = load_config(file)
    fault = _fault(OmegaConf.to_container(settings))
    try:
        if fault:
            raise ValueError(fault)
        study = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(Study), settings))
    except (OmegaConfBaseException, ValueError) as error:
        reason = f"{getattr(error, 'full_key', '')} {str(error).splitlines()[0]}".strip()
        raise UserError(f"{file} is not a study, as configs/studies/*.yaml are: {reason}") from None
    for number, part in enumerate(study.parts, 1):
        if part.corpus.endswith(".py"):
            part.corpus = load_corpus(part.corpus)
        part.folder = part.folder or part.corpus
        folder = Path(part.folder)
        if folder.is_absolute() or ".." in folder.parts:
            raise UserError(
                f"{file}: part {number} has its runs in '{folder}', outside of the study's folder; "
                "give it a folder in there, as in 'folder: slow'"
            )
    return study


def _fault(study: dict) -> str:
    """What is wrong with the form of a study; "" if nothing."""
    known = [key.name for key in fields(Study)]
    for key in study:
        if key not in known:
            return f"it has the unknown key '{key}'{did_you_mean(str(key), known)}"
    for key in ("about", "parts"):
        if study.get(key) in (None, "", []):
            return f"it has no {key}; about (its question) and parts (its runs) are needed"
    if not _has_form(study["parts"], [{}]):
        return "parts must be a list of parts, as in '- {corpus: verses, seeds: [1], norms: [ln]}'"
    for number, part in enumerate(study["parts"], 1):
        fault = _fault_of_part(part)
        if fault:
            return f"part {number} {fault}"
    return ""


def _fault_of_part(part: dict) -> str:
    """The same for one part."""
    known = [key.name for key in fields(Part)]
    for key in part:
        if key not in known:
            return f"has the unknown key '{key}'{did_you_mean(str(key), known)}"
    for key in fields(Part):
        example = key.metadata["example"]
        words = f"as in '{key.name}: {str(example).replace(chr(39), '')}'"
        if key.default is MISSING and key.name not in part:
            return f"has no {key.name}; give it, {words}"
        given = part.get(key.name)
        is_unset = key.name not in part or (given is None and key.default is None)
        if not is_unset and not _has_form(given, example):
            return f"has {key.name}: {given}, which needs another form, {words}"
    return ""


def _has_form(value: object, example: object) -> bool:
    """Whether a value of YAML is a list, a mapping, a whole number or a text like the example."""
    if isinstance(example, list):
        return isinstance(value, list) and all(_has_form(item, example[0]) for item in value)
    if isinstance(example, dict):
        return isinstance(value, dict)
    if isinstance(example, int):
        return re.fullmatch(r"\d+", str(value)) is not None
    return isinstance(value, str | int | float)


def _check_planned_once(study: Study) -> None:
    """Refuse two parts that plan the same run with other settings or other data."""
    planned_by: dict[Path, tuple[int, tuple]] = {}
    for number, part in enumerate(study.parts, 1):
        for run in _planned(part):
            path = Path(part.folder, run.name)
            content = (part.corpus, run.settings, part.settings, part.data)
            first, content_of_first = planned_by.setdefault(path, (number, content))
            if content != content_of_first:
                raise UserError(
                    f"parts {first} and {number} of the study both plan the run '{path}', with "
                    "other settings or data; give one of them another folder"
                )


def study_command(argv: Sequence[str]) -> int:
    """``pn reproduce --study NAME``: the parts of a study, and a report on each folder; 1 if a
    run failed.
    """
    parser = ArgumentParser(prog="pn reproduce", add_help=False)
    parser.add_argument("--study", metavar="NAME-OR-FILE", required=True)
    chosen, options = parser.parse_known_args(argv)
    study = read_study(chosen.study)
    args = _study_parser(chosen.study, study).parse_intermixed_args(options)
    _check_planned_once(study)
    failed = 0
    for seed in sorted({seed for part in study.parts for seed in part.seeds}):
        # each seed is finished before the next begins
        for part in study.parts:
            if seed not in part.seeds:
                continue
            failed |= reproduce(
                part.corpus,
                norms=part.norms,
                seeds=[seed],
                models=part.models,
                settings=[*part.settings, *args.settings],
                runs=args.runs / part.folder,
                data=Path(part.data) if part.data else None,
                data_option="data:",
                ranks=args.ranks or part.ranks,
                dry_run=args.dry_run,
            )
    runs_in: dict[Path, set[Path]] = {}  # folder -> the runs that its report is about
    for part in study.parts:
        folder = args.runs / part.folder
        runs_in.setdefault(folder, {*folder.glob("*_seed*")})
        if args.dry_run:
            runs_in[folder].update(folder / run.name for run in _planned(part))
    for folder, runs in runs_in.items():
        report = ["report", *sorted(runs), "--output", folder / "report"]
        if args.dry_run:
            print(shown(report))
        else:
            must(report)
    return failed


def _planned(part: Part) -> list[PlannedRun]:
    """The runs of a part."""
    experiment = find_experiment(part.corpus)
    models = part.models or experiment.models
    return planned_runs(experiment, part.norms, part.seeds, models, experiment.size)


def _study_parser(what: str, study: Study) -> ArgumentParser:
    count = sum(len(part.norms) * len(part.seeds) for part in study.parts)
    parser = ArgumentParser(
        prog=f"pn reproduce --study {what}",
        description=f"{study.about}\n{count} runs. One rank per visible GPU, or one on the CPU.",
        epilog=AGAIN,
    )
    add = parser.add_argument
    settings = "settings of every run, in addition to those of the study"
    add("settings", nargs="*", metavar="key=value", help=settings)
    default = f"runs/{Path(what).stem}"
    runs = (
        "where the runs go, as DIR/FOLDER/NORM_seedN, and reports, as DIR/FOLDER/report (default "
        f"{default})"
    )
    add("--runs", type=Path, metavar="DIR", default=default, help=runs)
    add_ranks(parser)
    add("--dry-run", action="store_true", help="print the commands and do nothing")
    for key in ("data", "models", "norms", "seeds"):
        add(f"--{key}", type=_of_part(key), help=argparse.SUPPRESS)
    return parser


def _of_part(key: str) -> Callable[[str], NoReturn]:
    """The type of an option that is a key in the parts of a study."""

    def refuse(value: str) -> NoReturn:
        raise argparse.ArgumentTypeError(
            f"add {key}: {value} to the part, in the file of the study"
        )

    return refuse


def demo(argv: Sequence[str]) -> int:
    """One small training run on the verses, with sample translations.

    Trains a small pre-norm transformer with PN in the encoder on Spanish-English verses, with the
    settings of the configuration demo, and prints BLEU, sample translations and the path of the
    learning curve. The same command resumes after an interruption.
    """
    parser = ArgumentParser(prog="pn reproduce demo", description=inspect.getdoc(demo))
    add = parser.add_argument
    add("settings", nargs="*", metavar="key=value", help="settings of the run")
    results = "the results (default runs/demo)"
    add("--run", type=Path, metavar="DIR", default="runs/demo", help=results)
    architecture = (
        "transformer_NORM_tiny, such as transformer_ln_tiny (default transformer_pn_tiny)"
    )
    add("--arch", metavar="NAME", default="transformer_pn_tiny", help=architecture)
    args = parser.parse_intermixed_args(argv)
    run, data = absolute(args.run), absolute("runs/data/verses_es_en")
    of_data = ["--data", data]
    of_run = ["--run", run, f"model._name={args.arch}", *args.settings]
    train = ["train", "demo", *of_data, *of_run]
    check = ["train", "demo", *(of_data if is_prepared(data) else []), *of_run, "--check"]
    after_training = [[verb, "--run", run] for verb in ("average", "generate", "score")]
    steps = [check, ["prepare", "verses", "--dest", data], train, *after_training]
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
