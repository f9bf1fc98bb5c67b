"""A training run as a report shows it: a missing or damaged file is a problem that is listed,
not an error.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from pn_fairseq.common.command import UserError
from pn_fairseq.common.files import check_folders, count_lines, read_settings, short_names
from pn_fairseq.pipeline import runs, stamp
from pn_fairseq.pipeline.evaluate_lm import Perplexity, read_perplexity
from pn_fairseq.pipeline.metrics import METRICS
from pn_fairseq.pipeline.training_log import Start, TrainingLog, read_log
from pn_fairseq.pipeline.translation_scores import Score, Scores, is_scored, low_bleu, read_scores

#: What language models are compared by -> the attribute of :class:`Perplexity`.
LM_MEASURES = {"perplexity": "perplexity", "bits": "bits", "batch": "batch_perplexity"}


@dataclass(frozen=True)
class Run(runs.Run):
    """A training run with its results on ``subset``. None: not known, or not done.

    All files are read at once; ``problems`` then lists what failed, is missing or is damaged, one
    sentence each.
    """

    name: str  # different from the names of all other runs of the report
    subset: str = "test"
    problems: list[str] = field(default_factory=list, compare=False)

    def __post_init__(self) -> None:
        for name in ("log", "settings_by_name", "data_settings", "starts", "perplexity", "scores"):
            getattr(self, name)  # adds the problems of its file
        if self.log:
            self.problems[:0] = self._training_problems()
        if not self.known:
            self.problems[:] = ["never began: there is neither config.yaml nor train.log"]
        if self.failed is not None:
            self.problems.insert(0, f"failed: {self.failed or '(the file is empty)'}")

    @cached_property
    def saved(self) -> list[Path]:
        """The checkpoints that fairseq saved while it trained, without averages."""
        name = re.compile(r"checkpoint(_last|_best|_?\d+(_\d+)?)\.pt")
        return sorted(
            file for file in self.checkpoints.glob("checkpoint*.pt") if name.fullmatch(file.name)
        )

    @cached_property
    def from_checkpoints(self) -> bool:
        """Whether ``log`` is made from checkpoints:

        fairseq-train saved some and wrote no log in JSON.
        """
        if self.ours or not self.saved:
            return False
        logged = read_log(self.log_file) if self.log_file else TrainingLog()
        return not (logged.train or logged.valid)

    @cached_property
    def log(self) -> TrainingLog | None:
        try:
            if self.from_checkpoints:
                log = log_of_checkpoints(self.saved)
                self.problems.append(
                    f"there is no log in JSON: settings and losses are from {len(self.saved)} "
                    "checkpoints "
                    "(fairseq-train --log-file train.log --log-format json would record every "
                    "step, speed and time)"
                )
                return log
            log = super().log
        except UserError as error:
            self.problems.append(f"no log, and a checkpoint cannot be read: {error}")
            return None
        if log is None:
            self.problems.append("not trained: there is no train.log")
        elif log.unreadable:
            lines = "1 line" if log.unreadable == 1 else f"{log.unreadable} lines"
            self.problems.append(
                f"{lines} of {self.log_file.name} cannot be read (cut off?) and not shown here"
            )
        return log

    @cached_property
    def settings_by_name(self) -> dict[str, object]:
        """All settings by dotted name; empty if they are not known."""
        try:
            return super().settings_by_name
        except UserError as error:
            self.problems.append(f"no settings: {error}")
            return {}

    def get(self, key: str, default: object = None) -> object:
        value = self.settings_by_name.get(key)
        return default if value is None else value

    @cached_property
    def data_folder(self) -> Path | None:
        """Where the prepared data was; if only fairseq-preprocess made it, the folder of the
        binary files.
        """
        try:
            return self.data or self.bin
        except UserError:
            return None

    @cached_property
    def data_settings(self) -> dict[str, str] | None:
        """The settings of the prepared data and the checksums of its files,

        as they were when the run was trained.
        """
        try:
            if not self.ours and self.data is None:
                return self._data_of_fairseq()
            return read_settings(
                self.path / "data.settings" if self.ours else self.data / "settings.txt"
            )
        except (UserError, OSError, ValueError) as error:
            self.problems.append(
                f"the data is not known, so the run is compared with no other: {error}"
            )
            return None

    def _data_of_fairseq(self) -> dict[str, str]:
        """The languages and the folder of data that pn prepare did not make."""
        try:
            source, target = runs.infer_languages(self.bin)
        except UserError:
            source = target = ""
        return {
            "source": self.get("task.source_lang", source),
            "target": self.get("task.target_lang", target),
            "folder": str(self.bin),
        }

    @cached_property
    def starts(self) -> list[dict]:
        """The records of starts.jsonl, in order.

        ``world_size`` is the number of ranks, and each of the ``machines`` has its number of
        ``ranks``.
        """
        try:
            lines = (self.path / "starts.jsonl").read_text("utf-8", errors="replace").splitlines()
        except OSError:
            if self.ours:
                self.problems.append(
                    "versions and hardware are not recorded: there is no starts.jsonl"
                )
            return []
        records = []
        for number, line in enumerate(lines, 1):
            try:
                records += [dict(json.loads(line))] if line.strip() else []
            except (ValueError, TypeError):
                self.problems.append(f"line {number} of starts.jsonl cannot be read")
        return records

    @property
    def seed(self) -> int | None:
        return self.get("common.seed")

    @property
    def language_model(self) -> bool:
        return self.get("task._name") == "language_modeling"

    @property
    def world_size(self) -> int:
        """Of the last start."""
        sizes = [
            start.get("world_size")
            for start in self.starts
            if isinstance(start.get("world_size"), int)
        ]
        logged = (
            [start.world_size for start in self.log.starts if start.world_size] if self.log else []
        )
        return (sizes or logged or [self.get("distributed_training.distributed_world_size", 1)])[-1]

    @property
    def machine(self) -> str | None:
        """The GPUs, or else the processor, of all starts; None if no start recorded them."""
        models = [
            start.get("gpus") or [start["cpu"]]
            for start in self.starts
            if start.get("gpus") or start.get("cpu")
        ]
        return (
            " and ".join(dict.fromkeys(", ".join(dict.fromkeys(names)) for names in models)) or None
        )

    @property
    def code(self) -> str | None:
        """The commit of this project, of all starts; None if no start recorded it."""
        commits = [start["git_commit"] for start in self.starts if start.get("git_commit")]
        return " and ".join(dict.fromkeys(commits)) or None

    @property
    def max_update(self) -> int | None:
        limit = self.get("optimization.max_update")
        return limit or None if isinstance(limit, int) else None

    @property
    def trained(self) -> bool:
        """Whether the log has a record."""
        return self.log is not None and bool(self.log.train or self.log.valid)

    @property
    def known(self) -> bool:
        """Whether the run has settings or a log."""
        return bool(self.settings_by_name) or self.log is not None

    @cached_property
    def failed(self) -> str | None:
        """The line in ``failed``."""
        file = self.path / "failed"
        return (
            " ".join(file.read_text("utf-8", errors="replace").split()) if file.is_file() else None
        )

    @cached_property
    def probe(self) -> Path | None:
        """The folder of ``--norm-probe``, which may have been moved."""
        setting = self.get("model.norm_probe")
        folders = [
            self.path / "norm_probe",
            *([self.path / Path(setting).name, Path(setting)] if setting else []),
        ]
        return next((folder for folder in folders if any(folder.glob("update-*.parquet"))), None)

    @property
    def result(self) -> Path:
        """The folder of the hypotheses and scores."""
        return self.path / "generate" / self.subset

    @cached_property
    def decoded(self) -> int | None:
        """The number of hypotheses."""
        file = self.result / "hyp.tok"
        return count_lines(file) if file.is_file() else None

    @cached_property
    def decoding(self) -> str | None:
        """The decoding settings, as pn generate recorded them."""
        settings = stamp.read(self.result / "made.txt")
        # How it was decoded, without what was decoded.
        how = [
            f"{name}={value}"
            for name, value in settings.items()
            if name not in ("checkpoint", "data", "subset")
        ]
        return " ".join(how) or None

    @cached_property
    def scores(self) -> Scores | None:
        """Of a translation."""
        if self.language_model:
            return None
        if self.decoded is None:
            file = self.result.relative_to(self.path) / "hyp.tok"
            lacking = "" if any(self.checkpoints.glob("*.pt")) else ", and there is no checkpoint"
            self.problems.append(f"not decoded: there is no {file}{lacking}")
            return None
        made = stamp.read(stamp.stamp_of(self.checkpoints / "averaged.pt"))
        _, _, averaged = made.get("averaged", "").partition(" ")  # "epoch 3", or "files"
        wanted = self.get("average_last")
        if wanted and averaged and int(averaged) < wanted:
            self.problems.append(
                f"averaged.pt is the average of {averaged}, not of average_last={wanted} "
                "checkpoints"
            )
        try:
            scores = read_scores(self.result)
            if not is_scored(self.path, self.subset):
                raise UserError(
                    "scores.json belongs to other hypotheses (pn score writes it again)"
                )
        except UserError as error:
            self.problems.append(f"not scored: {error}")
            return None
        self.problems.extend(scores.warnings)
        if warning := low_bleu(scores.by_metric["tokenized"].score):
            self.problems.append(f"tokenized {warning}")
        return scores

    @cached_property
    def perplexity(self) -> Perplexity | None:
        """Of a language model."""
        try:
            return read_perplexity(self.path, self.subset) if self.language_model else None
        except UserError as error:
            self.problems.append(f"not measured: {error}")
            return None

    @property
    def measures(self) -> dict[str, float]:
        """What systems are compared by, by name; NaN where it was not measured."""
        if self.language_model:
            return {
                name: getattr(self.perplexity, field, math.nan)
                for name, field in LM_MEASURES.items()
            }
        return {name: self.score(name).score if self.score(name) else math.nan for name in METRICS}

    def score(self, metric: str) -> Score | None:
        """The score by one of :data:`METRICS`; None if the run was not scored by it."""
        return self.scores.by_metric.get(metric) if self.scores else None

    @property
    def measured(self) -> bool:
        return bool(self.scores or self.perplexity)

    @property
    def unfinished(self) -> bool:
        """Whether a training run began, did not end, and has not reached its last update."""
        reached = self.log.updates >= self.max_update if self.max_update else self.from_checkpoints
        return self.trained and not self.log.ended and not reached

    def _training_problems(self) -> list[str]:
        problems, log = [], self.log
        if not self.trained:
            return ["not trained: train.log has no record"]
        done = (
            f"update {log.updates:,} of {self.max_update:,}"
            if self.max_update
            else f"update {log.updates:,}"
        )
        if self.unfinished:
            problems.append(f"training not finished: {done} (interrupted, failed or still running)")
        elif not log.ended and not self.from_checkpoints:
            problems.append(f"training cut off, but at {done}")
        elif (
            log.ended
            and self.max_update
            and log.updates < self.max_update
            and log.reason != "patience"
        ):
            reasons = {"stop_time_hours": "the time limit", "max_update": "an earlier max_update"}
            reason = reasons.get(log.reason, "max_epoch, or a reason that is not logged")
            problems.append(f"training ended at {done}: {reason}")
        for kind, losses in (("training", log.train), ("validation", log.valid)):
            if faulty := sorted(
                update for update, loss in losses.items() if not math.isfinite(loss)
            ):
                problems.append(
                    f"the {kind} loss is not finite (NaN or infinity) in {len(faulty)} of "
                    f"{len(losses)} records, "
                    f"first at update {faulty[0]:,}"
                )
        if log.faults:
            problems.append(
                f"fairseq reports a NaN or an infinity in {log.faults} lines of the log"
            )
        if not log.valid:
            problems.append("never validated")
        return problems


def read_runs(paths: Sequence[Path], subset: str = "test") -> list[Run]:
    """Read the folders of runs. The folder of a sweep (``-m``) means all its jobs.

    Raises:
        UserError: a path is not a run, or is given twice.
    """
    jobs: list[Path] = []
    for path in paths:
        if (path / "multirun.yaml").is_file():
            jobs += sorted(job for job in path.iterdir() if (job / ".hydra").is_dir())
        elif path.name != "multirun.yaml":  # of `SWEEP/*`
            jobs.append(path)
    # All before the first is read: a misspelt name is to show at once.
    seen: dict[Path, Path] = {}
    check_folders(jobs)
    for path in jobs:
        folder = runs.Run(path)
        if (
            not folder.ours
            and not folder.log_file
            and not any(folder.checkpoints.glob("checkpoint*.pt"))
        ):
            raise UserError(
                f"'{path}' is not a run: it has no config.yaml of pn train, no log of "
                "fairseq-train (its "
                "--log-file or saved output, as *.log, *.out or *.txt) and no checkpoint"
            )
        if (first := seen.setdefault(path.resolve(), path)) is not path:
            raise UserError(f"'{path}' is given twice (also as '{first}')")
    return [Run(path, name, subset) for path, name in zip(jobs, short_names(jobs), strict=True)]


def log_of_checkpoints(files: Sequence[Path]) -> TrainingLog:
    """The losses that the checkpoints of a training run hold, at the updates that were saved.

    fairseq keeps the sums of its meters in a checkpoint. The training loss is the mean since the
    epoch began.

    Raises:
        CheckpointError: a checkpoint cannot be read.
    """
    from pn_fairseq.common.checkpoints import load_checkpoint  # needs torch

    meters = {
        "train": ("train", "loss"),
        "train_nll": ("train", "nll_loss"),
        "valid": ("valid", "nll_loss"),
    }
    losses = {kind: {} for kind in meters}
    for file in files:
        state = load_checkpoint(file)
        update = (
            state["optimizer_history"][-1]["num_updates"] if state.get("optimizer_history") else 0
        )
        means = {
            (group, name): round(float(meter["sum"]) / float(meter["count"]), 3)
            for group, of_group in state.get("extra_state", {}).get("metrics", {}).items()
            for _, name, _, meter in of_group
            if meter.get("count")
        }
        for kind, (group, name) in meters.items():
            loss = means.get((group, name), means.get((group, "loss")))
            if loss is not None:
                losses[kind][update] = loss
    log = TrainingLog(**{kind: dict(sorted(of_kind.items())) for kind, of_kind in losses.items()})
    log.starts = [Start(updates=list(log.train))]
    return log
