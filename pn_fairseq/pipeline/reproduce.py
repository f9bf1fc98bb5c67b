"""Every step from the text to a report, for a list of norms and seeds, as ``pn reproduce`` calls
it.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
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
from pn_fairseq.common.published import PAPER
from pn_fairseq.pipeline.data.corpus import Corpus
from pn_fairseq.pipeline.data.prepare import main as prepare_data
from pn_fairseq.pipeline.data.recipes import RECIPES
from pn_fairseq.pipeline.data.settings import check_not_inside, check_prepared
from pn_fairseq.pipeline.runs import parts_of

#: How long a step may take to end after Ctrl-C, which reaches it as well, before it gets SIGTERM.
GRACE_SECONDS = 10


#: Corpora that a recipe prepares, by the name of the recipe.
CORPORA = {name: recipe.REPRODUCE for name, recipe in RECIPES.items() if recipe.CONFIG}


@functools.cache
def find_corpus(name: str) -> Corpus:
    """A corpus with a recipe, or a configuration for prepared data, of whose models only the
    norms are to differ.
    """
    if name in CORPORA:
        return CORPORA[name]
    from pn_fairseq.pipeline.settings import compose

    architecture = compose(find_yaml(name, CONFIGS), [], world_size=1, on_cpu=True)[0].model._name
    if parts := parts_of(architecture):
        return Corpus(name, parts[2], models=(parts[0],))
    raise UserError(
        f"{name}: model._name={architecture} is not MODEL_NORM_SIZE, as transformer_pn_tiny: no "
        "norm fits it"
    )


def planned_runs(
    corpus: Corpus, norms: Sequence[str], seeds: Sequence[int], models: Sequence[str], size: str
) -> dict[str, list[str]]:
    """The runs: their names, and the settings of the model and the seed."""
    from pn_fairseq.norms import NORMS

    for model in models:
        if model not in corpus.models:
            raise UserError(unknown("model", model, corpus.models))
    known = [entry.short for entry in NORMS.values()]
    planned: dict[str, list[str]] = {}
    for model, norm, seed in itertools.product(models, norms, seeds):
        short, *settings = norm.split("+")
        if short not in known:
            raise UserError(unknown("norm", short, known))
        name = f"{f'{model}_' if len(corpus.models) > 1 else ''}{norm}_seed{seed}"
        if name in planned:
            raise UserError(f"{name} is planned twice: name each norm and seed once")
        planned[name] = [f"model._name={model}_{short}_{size}", f"common.seed={seed}"]
        planned[name] += [f"model.{setting}" for setting in settings]
    return planned


def of_table(corpus: Corpus, table: str) -> tuple[str, list[str]]:
    """The configuration of a published table, and its rows as norms."""
    from pn_fairseq.norms import NORMS

    if table not in corpus.tables:
        raise UserError(unknown("table", table, corpus.tables))
    config, rows = corpus.tables[table].config, corpus.tables[table].rows
    return config, [
        "+".join([NORMS[row.norm].short, *map("=".join, row.settings.items())]) for row in rows
    ]


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
    ranks: int | None = None,
    preparation: Sequence[str] = (),
    dry_run: bool = False,
) -> int:
    """Prepare the data, make every run and a report on them; what is done is skipped.

    Args:
        name: of a corpus in :data:`CORPORA`, or of a configuration, whose ``data`` is prepared.
        norms, seeds, models, size: one run is made for each norm, seed and model; the default is
            the corpus's. A norm is ``NORM[+key=value...]`` with settings of the model.
        table: a published table, whose rows and configuration replace ``norms``.
        settings: what differs from the configuration, as ``key=value``; ``{run}`` in one is the
            folder of the run. runs: the folder for the runs and the report (default
            ``runs/CONFIG``). data: the prepared data (default ``runs/data/CONFIG``). ranks: of each
            run and decoding. preparation: more options of ``pn prepare``. dry_run: check the
            settings and print the commands.

    Returns:
        The exit code: 1 if a run failed.
    """
    corpus = find_corpus(name)
    config, norms = of_table(corpus, table) if table else (corpus.config, norms or corpus.norms)
    planned = planned_runs(
        corpus, norms, seeds or corpus.seeds, models or corpus.models, size or corpus.size
    )
    runs = absolute(runs or Path("runs") / Path(config).stem)
    data = absolute(data or Path("runs/data") / Path(corpus.config).stem)
    where = [] if name in CORPORA else ["--data", str(data)]
    if not dry_run:
        check_no_writer(runs)
    if where:
        check_prepared(data, "--data")
    else:
        check_not_inside(data, "--data")
    # each norm with settings of its own, or else one norm of each model
    for model in corpus.models:
        of_model = [
            (arch, *more)
            for arch, _, *more in planned.values()
            if arch.startswith(f"model._name={model}_")
        ]
        for own in dict.fromkeys(given for given in of_model if len(given) > 1) or of_model[:1]:
            check_training(config, *where, *own, *settings)

    # Every command, in order.
    prepare = ["prepare", name, "--dest", data, *preparation] if name in CORPORA else []
    if prepare:
        prepare_data([*map(str, prepare[1:]), "--check"])
    on_ranks = ["--ranks", str(ranks)] if ranks else []
    commands: dict[Path, list[list]] = {}
    for run_name, own in planned.items():
        run = runs / run_name
        train = [
            "--data",
            data,
            "--run",
            run,
            *own,
            *(setting.replace("{run}", str(run)) for setting in settings),
        ]
        commands[run] = [["train", config, *train, *on_ranks]]
        for verb, *options in corpus.steps[1:]:
            commands[run].append(
                [verb, "--run", run, *options, *(on_ranks if verb == "generate" else [])]
            )
        # it was begun, with its settings and data
        if (run / "config.yaml").is_file() and data.is_dir():
            check_training(config, *map(str, train))
    report = ["report", *commands, "--output", runs / (f"report-{table}" if table else "report")]
    if table in PAPER:  # a report of language models knows its corpus
        report += ["--paper", table]

    if dry_run:
        for step in filter(None, [prepare, *itertools.chain(*commands.values()), report]):
            print(shown(step))
        return 0
    with only_writer(runs) as note:
        if prepare:
            note("prepare")
            must(prepare)
        failed = [run.name for run, steps in commands.items() if not _make(name, run, steps, note)]
        note("report")
        must(report)
    if failed:
        count = f"{len(failed)} of {len(commands)} runs failed: {' '.join(failed)}"
        say(name, f"{count} (the report says why); rerun the command to retry them")
    return 1 if failed else 0


@functools.cache  # the runs of several seeds have the same settings
def check_training(config: str, *arguments: str) -> None:
    """Check the settings of a run."""
    from pn_fairseq.pipeline import train

    train.main([config, "--check", *arguments])


def must(step: Sequence[str | Path]) -> None:
    """Run a step without which nothing else can be done; it has named the reason if it fails."""
    if code := execute(step):
        sys.exit(code)


def program(step: Sequence[str | Path]) -> list[str | Path]:
    """The command that runs a step by this very package,

    also where the current folder has another one.
    """
    return [
        sys.executable,
        *(["-P"] if PACKAGE.parent != Path.cwd() else []),
        "-m",
        "pn_fairseq",
        *step,
    ]


def execute(step: Sequence[str | Path], messages: Path | None = None) -> int:
    """Run a step to its end and return its exit code;

    the file ``messages`` also gets what it writes to stderr.
    """

    def copy_messages() -> None:
        # whole lines: the step also writes to stdout, which may be the same file
        for line in process.stderr or ():
            line = line.removesuffix(b"\n") + b"\n"
            with contextlib.suppress(OSError):  # a full disk; the step must be able to write
                kept.write(line)
            with contextlib.suppress(OSError):  # `| head`
                sys.stderr.buffer.write(line)
                sys.stderr.buffer.flush()

    with messages.open("wb", buffering=0) if messages else contextlib.nullcontext() as kept:
        process = subprocess.Popen(
            program(step),
            stdin=subprocess.DEVNULL,
            stderr=subprocess.PIPE if messages else None,
            # the line about an interruption comes from here
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
    """One run through its steps; False after a failure, which is noted in its folder and ends
    this run only.

    ``note`` is told each step.
    """
    # not in the folder of the run: `pn report DIR/*_seed*` finds runs only
    work = run.parent / "logs" / run.name
    work.mkdir(parents=True, exist_ok=True)
    for step in steps:
        verb, messages = step[0], work / f"{step[0]}.err"
        say(name, f"{run.name}: {verb}")
        note(f"{run.name}: {verb}")
        if not (code := execute(step, messages)):
            continue
        say(name, f"{run.name} failed in {verb} (its messages are in {work})")
        run.mkdir(parents=True, exist_ok=True)
        lines = messages.read_text("utf-8", "replace").splitlines()
        reason = why_it_failed(128 - code if code > 128 else code, lines)
        with atomic_write(run / "failed", "w") as file:
            file.write(f"{verb}: {reason}\n")
        return False
    (run / "failed").unlink(missing_ok=True)
    return True
