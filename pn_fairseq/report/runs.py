"""A training run as a report shows it: a missing or damaged file is listed as a problem, and is not
an error.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import yaml

from pn_fairseq.common.command import UserError
from pn_fairseq.common.errors import unknown
from pn_fairseq.common.files import check_folders, count_lines, read_settings, short_names
from pn_fairseq.pipeline import outdated, stamp
from pn_fairseq.pipeline.evaluate_lm import Perplexity, read_perplexity, result_file
from pn_fairseq.pipeline.generate import SEARCH
from pn_fairseq.pipeline.runs import Run, check_run_folder, infer_languages
from pn_fairseq.pipeline.training_log import Start, TrainingLog
from pn_fairseq.pipeline.translation_scores import Score, Scores, is_scored, low_bleu, read_scores
from pn_fairseq.report import measures
from pn_fairseq.report.measures import Value


@dataclass(frozen=True, kw_only=True, eq=False)
class ReportedRun:
    """A training run with its results on ``subset``. None: unknown, or not done."""

    folder: Run
    name: str  # different from the names of all other runs of the report
    subset: str
    log: TrainingLog | None
    # the checkpoints that the log is made from, if fairseq-train wrote no log in JSON
    logged_by: list[Path]
    settings_by_name: dict[str, object]  # all settings by dotted name; empty: unknown
    # the settings of the prepared data and the checksums of its files when the run was trained
    data_settings: dict[str, str] | None
    # the records of starts.jsonl, in order; ``world_size`` is the number of ranks
    starts: list[dict]
    unreadable_starts: list[int] | None  # line numbers in starts.jsonl; None: no such file
    scores: Scores | None  # of a translation
    perplexity: Perplexity | None  # of a language model
    values: dict[str, Value]  # name of a measure -> the value by which the run is compared
    # why "log", "settings", "data", "result" or "measures" cannot be read
    errors: dict[str, Exception]

    @property
    def path(self) -> Path:
        return self.folder.path

    def get(self, key: str, default: object = None) -> object:
        """A setting; a null counts as absent."""
        value = self.settings_by_name.get(key)
        if value is None:
            return default
        return value

    @cached_property
    def data_folder(self) -> Path | None:
        """Where the prepared data was; if only fairseq-preprocess made it, the folder of the binary
        files.
        """
        try:
            return self.folder.data or self.folder.bin
        except UserError:
            return None

    @property
    def seed(self) -> int | None:
        return self.get("common.seed")

    @property
    def language_model(self) -> bool:
        return self.get("task._name") == "language_modeling"

    @property
    def world_size(self) -> int:
        """The number of ranks in the last start."""
        recorded = [start.get("world_size") for start in self.starts]
        sizes = [size for size in recorded if isinstance(size, int)]
        if not sizes and self.log:
            sizes = [start.world_size for start in self.log.starts if start.world_size]
        if sizes:
            return sizes[-1]
        return self.get("distributed_training.distributed_world_size", 1)

    @property
    def machine(self) -> str | None:
        """The GPUs, or else the processor, of all starts; None if no start recorded them."""
        models = []
        for start in self.starts:
            if start.get("gpus"):
                models.append(", ".join(dict.fromkeys(start["gpus"])))
            elif start.get("cpu"):
                models.append(start["cpu"])
        return " and ".join(dict.fromkeys(models)) or None

    @property
    def code(self) -> str | None:
        """The commit of this project, of all starts; None if no start recorded it."""
        commits = [start["git_commit"] for start in self.starts if start.get("git_commit")]
        return " and ".join(dict.fromkeys(commits)) or None

    @property
    def max_update(self) -> int | None:
        limit = self.get("optimization.max_update")
        if isinstance(limit, int) and limit:
            return limit
        return None

    @property
    def trained(self) -> bool:
        """Whether the log has a record."""
        return self.log is not None and bool(self.log.train or self.log.valid)

    @property
    def unfinished(self) -> bool:
        """Whether a training run began, did not end, and has not reached its last update."""
        if not self.trained or self.log.ended:
            return False
        if self.max_update:
            return self.log.updates < self.max_update
        return not self.logged_by

    @property
    def known(self) -> bool:
        """Whether the run has settings or a log."""
        return bool(self.settings_by_name) or self.log is not None

    @property
    def measured(self) -> bool:
        return bool(self.values)

    @cached_property
    def failed(self) -> str | None:
        """The line in ``failed``."""
        file = self.path / "failed"
        if not file.is_file():
            return None
        return " ".join(file.read_text("utf-8", errors="replace").split())

    @cached_property
    def probe(self) -> Path | None:
        """The folder of ``--norm-probe``, which may have been moved."""
        folders = [self.path / "norm_probe"]
        setting = self.get("model.norm_probe")
        if setting:
            folders += [self.path / Path(setting).name, Path(setting)]
        for folder in folders:
            if any(folder.glob("update-*.parquet")):
                return folder
        return None

    @property
    def result(self) -> Path:
        """The folder of the hypotheses and scores."""
        return self.path / "generate" / self.subset

    @cached_property
    def decoded(self) -> int | None:
        """The number of hypotheses."""
        file = self.result / "hyp.tok"
        if file.is_file():
            return count_lines(file)
        return None

    @cached_property
    def decoding(self) -> str | None:
        """How, but not what, the run decoded, as pn generate recorded it."""
        settings = stamp.read(self.result / "made.txt")
        for name in ("checkpoint", "checkpoint_file", "data", "subset"):
            settings.pop(name, None)
        words = [f"{name}={value}" for name, value in settings.items()]
        return " ".join(words) or None

    def score(self, metric: str) -> Score | None:
        """The score that pn score computed by ``metric``; None if there is none."""
        if self.scores:
            return self.scores.by_metric.get(metric)
        return None

    @cached_property
    def problems(self) -> list[str]:
        """What failed, is missing or is damaged, one sentence for each problem."""
        problems = []
        if self.failed is not None:
            problems.append(f"failed: {self.failed or '(the file is empty)'}")
        if not self.known:
            return [*problems, "never began: there is neither config.yaml nor train.log"]
        if self.log is not None:
            problems += _problems_of_training(self, self.log)
        return problems + _problems_of_files(self) + _problems_of_results(self)


def read_runs(paths: Sequence[Path], subset: str = "test") -> list[ReportedRun]:
    """Read the folders of runs. The folder of a sweep (``-m``) means all its jobs.

    Raises:
        UserError: a path is not a run, or is given twice.
    """
    jobs: list[Path] = []
    for path in paths:
        if (path / "multirun.yaml").is_file():
            jobs += sorted(job for job in path.iterdir() if (job / ".hydra").is_dir())
        elif path.name != "multirun.yaml":  # from `SWEEP/*`
            jobs.append(path)
    # Check all before the first is read, so that a misspelt name is reported at once.
    seen: dict[Path, Path] = {}
    check_folders(jobs)
    for path in jobs:
        _check_that_it_is_a_run(path)
        first = seen.setdefault(path.resolve(), path)
        if first is not path:
            if str(path) == str(first):
                also = ""
            else:
                also = f" (also as '{first}')"
            raise UserError(f"'{path}' is given twice{also}")
    _check_subset(jobs, subset)
    names = short_names(jobs)
    return [read_run(path, name, subset) for path, name in zip(jobs, names, strict=True)]


def _check_subset(paths: Sequence[Path], subset: str) -> None:
    """Refuse a subset on which no run has results, unless it is ``test``: that report says why."""
    results: set[str] = set()
    for path in paths:
        results |= {file.parent.name for file in path.glob("generate/*/hyp.tok")}
        results |= {file.parent.name for file in path.glob(f"generate/*/{measures.FILE}")}
        results |= {file.stem for file in path.glob("evaluate_lm/*.json")}
    known = sorted(name for name in results if not re.search(r"-context\d+$", name))
    if subset != "test" and subset not in known:
        raise UserError(f"--subset: no run has results; {unknown('subset', subset, known)}")


def _check_that_it_is_a_run(path: Path) -> None:
    folder = Run(path)
    if folder.ours or any(folder.checkpoints.glob("checkpoint*.pt")) or folder.log_file:
        return
    check_run_folder(path)
    raise UserError(
        f"'{path}' is not a run: it has no config.yaml of pn train, no log of fairseq-train (its "
        "--log-file or saved output, as *.log, *.out or *.txt) and no checkpoint"
    )


def read_run(path: Path, name: str, subset: str = "test") -> ReportedRun:
    """Read all files of a run."""
    folder = Run(path)
    result = path / "generate" / subset
    logged_by: list[Path] = []
    log = data_settings = scores = perplexity = None
    settings: dict[str, object] = {}
    values: list[Value] = []
    errors: dict[str, Exception] = {}
    try:
        logged_by = _without_a_log(folder)
        log = log_of_checkpoints(logged_by) if logged_by else folder.log
    except (UserError, OSError) as error:
        errors["log"] = error
    try:
        settings = folder.settings_by_name
    except (UserError, OSError) as error:
        errors["settings"] = error
    try:
        data_settings = _read_data_settings(folder, settings)
    except (UserError, OSError, ValueError) as error:
        errors["data"] = error
    try:
        if settings.get("task._name") == "language_modeling":
            perplexity = read_perplexity(path, subset)
            values += measures.of_perplexity(perplexity)
        elif (result / "hyp.tok").is_file():
            scores = _read_scores(path, subset)
            values += measures.of_scores(scores)
    except (UserError, OSError) as error:
        errors["result"] = error
    try:
        values += measures.of_file(result)
    except (UserError, OSError) as error:
        errors["measures"] = error
    starts, unreadable_starts = _read_starts(path / "starts.jsonl")
    decoded_with = _decoded_with(result)
    return ReportedRun(
        folder=folder,
        name=name,
        subset=subset,
        log=log,
        logged_by=logged_by,
        settings_by_name={
            setting: decoded_with.get(setting, value) for setting, value in settings.items()
        },
        data_settings=data_settings,
        starts=starts,
        unreadable_starts=unreadable_starts,
        scores=scores,
        perplexity=perplexity,
        values={value.measure.name: value for value in values},
        errors=errors,
    )


def _decoded_with(folder: Path) -> dict[str, object]:
    """The settings with which hypotheses were decoded, by dotted name: options of ``pn generate``
    may have replaced the settings of the run.
    """
    made = stamp.read(folder / "made.txt")
    return {f"generation.{name}": yaml.safe_load(made[name]) for name in SEARCH if name in made}


def _without_a_log(folder: Run) -> list[Path]:
    """The checkpoints that fairseq-train saved, without averages, if it wrote no log in JSON; else
    none.
    """
    log = folder.log
    if folder.ours or (log and (log.train or log.valid)):
        return []
    name = re.compile(r"checkpoint(_last|_best|_?\d+(_\d+)?)\.pt")
    files = sorted(folder.checkpoints.glob("checkpoint*.pt"))
    return [file for file in files if name.fullmatch(file.name)]


def _read_data_settings(folder: Run, settings: dict[str, object]) -> dict[str, str]:
    if folder.ours:
        return read_settings(folder.path / "data.settings")
    if not settings:
        raise UserError(f"the settings of '{folder.path}' do not name its data")
    if folder.data is not None:
        return read_settings(folder.data / "settings.txt")
    return _data_of_fairseq(folder, settings)


def _data_of_fairseq(folder: Run, settings: dict[str, object]) -> dict[str, str]:
    """The languages and the folder, if pn prepare did not make the data."""
    try:
        source, target = infer_languages(folder.bin)
    except UserError:
        source = target = ""
    return {
        "source": settings.get("task.source_lang") or source,
        "target": settings.get("task.target_lang") or target,
        "folder": str(folder.bin),
    }


def _read_starts(file: Path) -> tuple[list[dict], list[int] | None]:
    """The records, and the numbers of the lines without a record; None without the file."""
    try:
        text = file.read_text("utf-8", errors="replace")
    except OSError:
        return [], None
    records = []
    unreadable = []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        try:
            records.append(dict(json.loads(line)))
        except (ValueError, TypeError):
            unreadable.append(number)
    return records, unreadable


def _read_scores(run: Path, subset: str) -> Scores:
    scores = read_scores(run / "generate" / subset)
    if not is_scored(run, subset):
        raise UserError("scores.json belongs to other hypotheses (pn score writes it again)")
    return scores


def _problems_of_training(run: ReportedRun, log: TrainingLog) -> list[str]:
    """Problems of the training according to the log of a run."""
    problems = []
    if not run.trained:
        return ["not trained: train.log has no record"]
    done = f"update {log.updates:,}"
    if run.max_update:
        done += f" of {run.max_update:,}"
    early = log.ended and run.max_update and log.updates < run.max_update
    if run.unfinished:
        problems.append(f"training not finished: {done} (interrupted, failed or still running)")
    elif not log.ended and not run.logged_by:
        problems.append(f"training cut off, but at {done}")
    elif early and log.reason != "patience":
        reasons = {"stop_time_hours": "the time limit", "max_update": "an earlier max_update"}
        reason = reasons.get(log.reason, "max_epoch, or a reason that is not logged")
        problems.append(f"training ended at {done}: {reason}")
    for kind, losses in (("training", log.train), ("validation", log.valid)):
        faulty = [update for update, loss in losses.items() if not math.isfinite(loss)]
        if faulty:
            problems.append(
                f"the {kind} loss is not finite (NaN or infinity) in {len(faulty)} of "
                f"{len(losses)} records, first at update {min(faulty):,}"
            )
    if log.faults:
        problems.append(f"fairseq reports a NaN or an infinity in {log.faults} lines of the log")
    if not log.valid:
        problems.append("never validated")
    return problems


def _problems_of_files(run: ReportedRun) -> list[str]:
    """What is missing or damaged among the files that the training wrote."""
    problems = []
    errors = run.errors
    if "log" in errors and not run.logged_by:
        problems.append(f"the log cannot be read: {errors['log']}")
    elif "log" in errors:
        problems.append(f"no log, and a checkpoint cannot be read: {errors['log']}")
    elif run.logged_by:
        problems.append(
            f"there is no log in JSON: settings and losses are from {len(run.logged_by)} "
            "checkpoints (fairseq-train --log-file train.log --log-format json would record every "
            "step, speed and time)"
        )
    elif run.log is None:
        problems.append("not trained: there is no train.log")
    elif run.log.unreadable:
        lines = "1 line" if run.log.unreadable == 1 else f"{run.log.unreadable} lines"
        name = run.folder.log_file.name
        problems.append(f"{lines} of {name} cannot be read (cut off?) and not shown here")
    if "settings" in errors:
        problems.append(f"no settings: {errors['settings']}")
    if "data" in errors:
        problems.append(
            f"the data is not known, so the run is compared with no other: {errors['data']}"
        )
    if run.unreadable_starts is None and run.folder.ours:
        problems.append("versions and hardware are not recorded: there is no starts.jsonl")
    for number in run.unreadable_starts or []:
        problems.append(f"line {number} of starts.jsonl cannot be read")
    return problems


def _problems_of_results(run: ReportedRun) -> list[str]:
    """What is missing, damaged or outdated among the results of the checkpoints."""
    problems = []
    errors = run.errors
    averaged = run.folder.averaged
    name = f"generate/{run.subset}/hyp.tok"
    hypotheses = run.path / name
    if run.language_model:
        file = result_file(run.path, run.subset)
        problems += outdated.of_result(
            str(file.relative_to(run.path)), stamp.stamp_of(file), averaged
        )
    elif run.decoded is None and not run.measured:
        lacking = "" if any(run.folder.checkpoints.glob("*.pt")) else ", and there is no checkpoint"
        problems.append(f"not decoded: there is no {name}{lacking}")
    elif run.decoded is not None:
        number = outdated.number_averaged(averaged)
        wanted = run.get("average_last")
        if wanted and number and number < wanted:
            problems.append(
                f"averaged.pt is the average of {number}, not of average_last={wanted} checkpoints"
            )
        problems += outdated.of_result(name, run.result / "made.txt", averaged)
    if "result" in errors:
        done = "measured" if run.language_model else "scored"
        problems.append(f"not {done}: {errors['result']}")
    if run.scores:
        problems += run.scores.warnings
        warning = low_bleu(run.scores.by_metric["tokenized"].score)
        if warning:
            problems.append(f"tokenized {warning}")
    if "measures" in errors:
        problems.append(f"its measures are not shown: {errors['measures']}")
    others = run.values.keys() - measures.MEASURES.keys()
    if others and hypotheses.is_file():
        written = (run.result / measures.FILE).stat().st_mtime
        if written < hypotheses.stat().st_mtime:
            problems.append(
                f"{measures.FILE} is older than hyp.tok and may belong to other hypotheses"
            )
    return problems


#: Loss in a :class:`TrainingLog` -> group and name of the meter in a checkpoint.
_METERS = {
    "train": ("train", "loss"),
    "train_nll": ("train", "nll_loss"),
    "valid": ("valid", "nll_loss"),
}


def log_of_checkpoints(files: Sequence[Path]) -> TrainingLog:
    """The losses in the checkpoints of a training run, at the saved updates.

    fairseq stores the sums of its meters in a checkpoint. The training loss is the mean since the
    epoch began.

    Raises:
        CheckpointError: a checkpoint cannot be read.
    """
    from pn_fairseq.common.checkpoints import load_checkpoint  # needs torch

    losses: dict[str, dict[int, float]] = {kind: {} for kind in _METERS}
    for file in files:
        state = load_checkpoint(file)
        history = state.get("optimizer_history")
        if history:
            update = history[-1]["num_updates"]
        else:
            update = 0
        means = {}
        groups = state.get("extra_state", {}).get("metrics", {})
        for group, meters in groups.items():
            for _, name, _, meter in meters:
                if meter.get("count"):
                    mean = float(meter["sum"]) / float(meter["count"])
                    means[group, name] = round(mean, 3)
        for kind, (group, name) in _METERS.items():
            loss = means.get((group, name), means.get((group, "loss")))
            if loss is not None:
                losses[kind][update] = loss
    ordered = {kind: dict(sorted(curve.items())) for kind, curve in losses.items()}
    log = TrainingLog(**ordered)
    log.starts = [Start(updates=list(log.train))]
    return log
