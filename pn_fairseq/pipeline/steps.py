"""Every step from the text to a report, for a list of norms and seeds, as ``pn reproduce`` calls
it.
"""

from __future__ import annotations

import contextlib
import functools
import io
import itertools
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from pn_fairseq.common.command import UserError, absolute, say, shown, why_it_failed
from pn_fairseq.common.errors import unknown
from pn_fairseq.common.files import (
    CONFIGS,
    PACKAGE,
    atomic_write,
    check_no_writer,
    find_yaml,
    only_writer,
)
from pn_fairseq.pipeline import outdated, programs, stamp
from pn_fairseq.pipeline.data.experiment import Experiment
from pn_fairseq.pipeline.data.recipes import RECIPES, command_name, load
from pn_fairseq.pipeline.data.settings import check_not_inside, check_prepared, is_prepared
from pn_fairseq.pipeline.evaluate_lm import result_file
from pn_fairseq.pipeline.prepare import main as prepare_data
from pn_fairseq.pipeline.published import PAPER
from pn_fairseq.pipeline.runs import Run, parts_of

#: How long a step may take to end after Ctrl-C, which also reaches it, before it gets SIGTERM.
GRACE_SECONDS = 10


def experiments() -> dict[str, Experiment]:
    """Name of a recipe -> what is trained on its corpus."""
    recipes = RECIPES.items()
    return {name: recipe.REPRODUCE for name, recipe in recipes if hasattr(recipe, "REPRODUCE")}


def is_corpus(name: str) -> bool:
    """Whether a recipe prepares the data of ``name``; otherwise ``name`` is a configuration."""
    return name in experiments()


def load_corpus(file: str) -> str:
    """The name of the corpus whose recipe is in a user's file."""
    name = load(file)
    if not is_corpus(name):
        raise UserError(
            f"{file} has no REPRODUCE, which names the configuration and the models "
            "(docs/adding_a_corpus.md)"
        )
    return name


@functools.cache
def find_experiment(name: str) -> Experiment:
    """The experiment of a corpus with a recipe, or of a configuration for prepared data, whose
    models should differ only in their norms.
    """
    if is_corpus(name):
        return RECIPES[name].REPRODUCE
    config = find_yaml(name, CONFIGS, others=experiments())

    # imports fairseq, which takes seconds
    from pn_fairseq.pipeline.training_settings import compose

    cfg, _ = compose(config, [], world_size=1, on_cpu=True)
    parts = parts_of(cfg.model._name)
    if parts is None:
        raise UserError(
            f"{name}: model._name={cfg.model._name} is not MODEL_NORM_SIZE, as "
            "transformer_pn_tiny: no norm fits it"
        )
    model, _, size = parts
    return Experiment(name, size, models=(model,))


@dataclass(frozen=True)
class PlannedRun:
    """A run, and what distinguishes it from the others."""

    name: str
    model: str  # one of the experiment's models
    settings: tuple[str, ...]  # settings of the model, its architecture first
    seed: int


def planned_runs(
    experiment: Experiment,
    norms: Sequence[str],
    seeds: Sequence[int],
    models: Sequence[str],
    size: str,
) -> list[PlannedRun]:
    """One run for each model, norm and seed."""
    from pn_fairseq.norms import NORMS

    for model in models:
        if model not in experiment.models:
            raise UserError(unknown("model", model, experiment.models))
    known = [entry.short for entry in NORMS.values()]
    planned: dict[str, PlannedRun] = {}
    for model, norm, seed in itertools.product(models, norms, seeds):
        short, *settings = norm.split("+")
        if short not in known:
            raise UserError(unknown("norm", short, known))
        name = f"{norm}_seed{seed}"
        if len(experiment.models) > 1:
            name = f"{model}_{name}"
        if name in planned:
            raise UserError(f"{name} is planned twice: name each norm and seed once")
        own = (f"model._name={model}_{short}_{size}", *(f"model.{each}" for each in settings))
        planned[name] = PlannedRun(name, model, own, seed)
    return list(planned.values())


def of_table(experiment: Experiment, table: str) -> tuple[str, list[str]]:
    """The configuration of a published table, and its rows as norms."""
    from pn_fairseq.norms import NORMS

    if table not in experiment.tables:
        raise UserError(unknown("table", table, experiment.tables))
    published = experiment.tables[table]
    norms = []
    for row in published.rows:
        settings = [f"{key}={value}" for key, value in row.settings.items()]
        norms.append("+".join([NORMS[row.norm].short, *settings]))
    return published.config, norms


def reproduce(
    name: str,
    *,
    norms: Sequence[str] = (),
    seeds: Sequence[int] = (),
    models: Sequence[str] = (),
    size: str | None = None,
    table: str | None = None,
    settings: Sequence[str] = (),
    runs: Path | None = None,
    data: Path | None = None,
    data_option: str = "--data",
    ranks: int | None = None,
    preparation: Sequence[str] = (),
    dry_run: bool = False,
) -> int:
    """Prepare the data, make every run and a report on them; finished steps are skipped.

    Args:
        name: a corpus with a recipe, or a configuration, whose ``data`` is prepared.
        norms, seeds, models, size: one run is made for each norm, seed and model; the default is
            the experiment's. A norm is ``NORM[+key=value...]`` with settings of the model.
        table: a published table, whose rows and configuration replace ``norms``.
        settings: settings that differ from the configuration, as ``key=value``; ``{run}`` in one
            means the folder of the run.
        runs: the folder for the runs and the report (default ``runs/CONFIG``).
        data: the prepared data (default ``runs/data/CONFIG``).
        data_option: the name of ``data`` in messages: the option, or ``data:`` of a study.
        ranks: ranks of each run and decoding.
        preparation: more options of ``pn prepare``.
        dry_run: check the settings and print the commands.

    Returns:
        The exit code: 1 if a run failed.
    """
    experiment = find_experiment(name)
    config, norms = experiment.config, norms or experiment.norms
    if table:
        config, norms = of_table(experiment, table)
    planned = planned_runs(
        experiment,
        norms,
        seeds or experiment.seeds,
        models or experiment.models,
        size or experiment.size,
    )
    runs = absolute(runs or Path("runs") / Path(config).stem)
    is_default = data is None
    data = absolute(data or Path("runs/data") / Path(experiment.config).stem)
    if not dry_run:
        check_no_writer(runs)
    prepare: list[str | Path] = []
    if is_corpus(name):
        check_not_inside(data, data_option)
        prepare = ["prepare", command_name(name), "--dest", data, *preparation]
    else:
        check_prepared(data, data_option, is_default)
    notes = _check_systems(planned, config, settings, data=None if prepare else data)
    if prepare:
        prepare_data([*map(str, prepare[1:]), "--check"])
    commands = {}
    unchanged = set()  # runs that were begun with these settings
    for run in planned:
        folder = runs / run.name
        without_ranks = _arguments_of_training(run, config, settings, folder, data)
        commands[folder] = _commands(without_ranks, experiment, folder, ranks)
        # the run was begun, and its settings and data exist
        if (folder / "config.yaml").is_file() and is_prepared(data):
            of_run = check_training(*map(str, without_ranks))
            notes += of_run
            if not of_run:
                unchanged.add(folder)
    report = ["report", *commands, "--output", runs / (f"report-{table}" if table else "report")]
    if table in PAPER:  # a report of language models knows its corpus
        report += ["--paper", table]
    if dry_run:
        if prepare:
            print(shown(prepare))
        for folder, steps in commands.items():
            done = _done(folder, steps) if folder in unchanged else 0
            for number, step in enumerate(steps):
                print(shown(step) + ("  # done" if number < done else ""))
        print(shown(report))
    noted = f"; notes above: {len(notes)}" if notes else ""
    say(name, f"the settings are valid{noted}")
    if dry_run:
        return 0
    with only_writer(runs) as note:
        if prepare:
            note("prepare")
            must(prepare)
        failed = []
        for folder, steps in commands.items():
            if not _make(name, folder, steps, note):
                failed.append(folder.name)
        note("report")
        must(report)
    if failed:
        count = f"{len(failed)} of {len(commands)} runs failed: {' '.join(failed)}"
        say(name, f"{count} (the report says why); rerun the command to retry them")
    return 1 if failed else 0


def _check_systems(
    planned: Sequence[PlannedRun], config: str, settings: Sequence[str], data: Path | None
) -> list[str]:
    """Check the settings of each norm that has its own, or else of one norm for each model; return
    the notes.
    """
    notes: list[str] = []
    of_models: dict[str, list[PlannedRun]] = {}
    for run in planned:
        of_models.setdefault(run.model, []).append(run)
    where = [] if data is None else ["--data", str(data)]
    for runs in of_models.values():
        with_settings = [run for run in runs if len(run.settings) > 1]
        for run in with_settings or runs[:1]:
            notes += check_training(config, *where, *run.settings, *settings)
    return notes


def _arguments_of_training(
    run: PlannedRun, config: str, settings: Sequence[str], folder: Path, data: Path
) -> list[str | Path]:
    """The words after ``pn train`` of a run, without ``--ranks``."""
    architecture, *own = run.settings
    given = [setting.replace("{run}", str(folder)) for setting in settings]
    where = [config, "--data", data, "--run", folder]
    return [*where, architecture, f"common.seed={run.seed}", *own, *given]


def _commands(
    training: Sequence[str | Path], experiment: Experiment, folder: Path, ranks: int | None
) -> list[list[str | Path]]:
    """The commands of a run, in their order; ``training``: the words after ``pn train``."""
    on_ranks = ["--ranks", str(ranks)] if ranks else []
    commands = [["train", *training, *on_ranks]]
    for verb, *options in experiment.steps[1:]:
        command = [verb, "--run", folder, *options]
        commands.append(command + on_ranks if verb == "generate" else command)
    return commands


@functools.cache  # the runs of several seeds have the same settings
def check_training(config: str, *arguments: str) -> list[str]:
    """Check the settings of a run; print and return the notes of ``pn train --check``."""
    from pn_fairseq.pipeline import train

    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        train.main([config, "--check", *arguments])
    notes = [line for line in said.getvalue().splitlines() if "note: " in line]
    for line in notes:
        print(line, file=sys.stderr, flush=True)
    return notes


def _done(run: Path, steps: Sequence[Sequence[str | Path]]) -> int:
    """How many steps from the first on are done in a run that was begun with the same settings."""
    averaged = Run(run).averaged
    for number, (verb, *options) in enumerate(steps):
        subset = options[options.index("--subset") + 1] if "--subset" in options else "test"
        folder = run / "generate" / subset
        outputs = {
            "train": run / "made.txt",
            "average": averaged,
            "generate": folder / "hyp.tok",
            "score": folder / "scores.json",
            "evaluate-lm": result_file(run, subset),
        }
        made = folder / "made.txt" if verb == "generate" else stamp.stamp_of(outputs[verb])
        old = verb != "train" and outdated.is_outdated(made, averaged)
        if not outputs[verb].is_file() or old:
            return number
    return len(steps)


def must(step: Sequence[str | Path]) -> None:
    """Run a step without which nothing else can be done; if it fails, it reports the reason."""
    code = execute(step)
    if code:
        sys.exit(code)


def execute(step: Sequence[str | Path], messages: Path | None = None) -> int:
    """Run a step to its end and return its exit code; what it writes to stderr is also written to
    the file ``messages``.
    """

    def copy_messages() -> None:
        # whole lines: the step also writes to stdout, which may be the same file
        for line in process.stderr or ():
            line = line.removesuffix(b"\n") + b"\n"
            with contextlib.suppress(OSError):  # a full disk must not keep the step from writing
                kept.write(line)
            with contextlib.suppress(OSError):  # `| head`
                sys.stderr.buffer.write(line)
                sys.stderr.buffer.flush()

    # -P: run this very package, even if the current folder contains another one
    isolated = ["-P"] if PACKAGE.parent != Path.cwd() else []
    with messages.open("wb", buffering=0) if messages else contextlib.nullcontext() as kept:
        process = programs.start_python(
            *isolated,
            "-m",
            "pn_fairseq",
            *step,
            stdin=subprocess.DEVNULL,
            stderr=subprocess.PIPE if messages else None,
            # this process prints the line about an interruption
            env={**os.environ, "PN_FAIRSEQ_STEP": "1"},
        )
        try:
            copy_messages()
            code = process.wait()
        except KeyboardInterrupt as interruption:
            if not interruption.args:  # Ctrl-C: a second signal would interrupt the step's clean-up
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(GRACE_SECONDS)
            process.terminate()
            copy_messages()
            process.wait()
            raise
    code = code if code >= 0 else 128 - code
    if code in (130, 143):
        raise KeyboardInterrupt(code - 128)
    return code


def _make(
    name: str, run: Path, steps: Sequence[Sequence[str | Path]], note: Callable[[str], None]
) -> bool:
    """Take one run through its steps; False after a failure, which is recorded in its folder and
    ends only this run.

    ``note`` is called with each step.
    """
    # not in the folder of the run: `pn report DIR/*_seed*` finds runs only
    work = run.parent / "logs" / run.name
    work.mkdir(parents=True, exist_ok=True)
    for step in steps:
        verb, messages = step[0], work / f"{step[0]}.err"
        say(name, f"{run.name}: {verb}")
        note(f"{run.name}: {verb}")
        code = execute(step, messages)
        if not code:
            continue
        if Run(run).in_training:  # not a failure of this run
            say(name, f"{run.name} is trained by another process now: run this command again later")
            return False
        say(name, f"{run.name} failed in {verb} (its messages are in {work})")
        run.mkdir(parents=True, exist_ok=True)
        lines = messages.read_text("utf-8", "replace").splitlines()
        reason = why_it_failed(128 - code if code > 128 else code, lines)
        with atomic_write(run / "failed", "w") as file:
            file.write(f"{verb}: {reason}\n")
        return False
    (run / "failed").unlink(missing_ok=True)
    return True
