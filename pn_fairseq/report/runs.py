"""What the folder of a run holds, read for a report: of pn train, of fairseq-train, or a job of a sweep."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import yaml

from pn_fairseq.common.command import UserError
from pn_fairseq.common.files import count_lines, read_settings, recorded, short_names
from pn_fairseq.common.old_settings import renamed, renamed_record
from pn_fairseq.pipeline import runs
from pn_fairseq.pipeline.evaluate_lm import Perplexity, read_perplexity
from pn_fairseq.pipeline.runs import flat
from pn_fairseq.pipeline.scoring import METRICS, Scores, ScoringError, low_bleu, read_scores
from pn_fairseq.pipeline.training_log import Start, TrainingLog, without_flags_of_others

#: What an absent key in the settings of a translation's data means (pn prepare).
_DATA_DEFAULTS = {
    "segmentation": "subword-nmt",
    "tokenizer": "sacremoses",
    "clean_stage": "tok",
    "clean_splits": "train",
}

#: Perplexity, its logarithm per token, and the perplexity with the statistics of the batch (NaN without statistics).
LM_MEASURES = ("perplexity", "bits", "batch")


@dataclass
class Run:
    """One training run. None: not known, or not done."""

    path: Path  # the directory, as it was named
    name: str  # different from those of all other runs of the report
    ours: bool  # whether pn train wrote it
    settings: dict[str, object] | None = None  # by dotted name
    data: dict[str, str] | None = None  # settings of the prepared data that are not off, and its files' checksums
    data_path: Path | None = None  # where the prepared data was; for data of others, the folder with the binary files
    log: TrainingLog | None = None
    starts: list[dict] = field(default_factory=list)  # the records of starts.jsonl
    from_checkpoints: bool = False  # whether `log` is of checkpoints, for want of a log
    failed: str | None = None  # the line in `failed`
    decoded: int | None = None  # number of hypotheses
    decoding: str | None = None  # how it was decoded, as pn generate noted it
    scores: Scores | None = None
    perplexity: Perplexity | None = None  # of a language model
    problems: list[str] = field(default_factory=list)  # what failed or is missing, one sentence each

    def setting(self, name: str, default=None):
        """A setting by its dotted name."""
        value = (self.settings or {}).get(name)
        return default if value is None else value

    @property
    def seed(self) -> int | None:
        return self.setting("common.seed")

    @property
    def language_model(self) -> bool:
        return self.setting("task._name") == "language_modeling"

    @property
    def measures(self) -> dict[str, float]:
        """What systems are compared by, by name; NaN where it was not measured."""
        if not self.language_model:
            return {name: getattr(self.scores, name).score if self.scores else math.nan for name in METRICS}
        if (found := self.perplexity) is None:
            return dict.fromkeys(LM_MEASURES, math.nan)
        return dict(zip(LM_MEASURES, (found.perplexity, found.bits, found.batch_perplexity), strict=True))

    @property
    def measured(self) -> bool:
        return bool(self.scores or self.perplexity)

    @property
    def world_size(self) -> int:
        """Of the last start."""
        recorded = [start.get("world_size") for start in self.starts if isinstance(start.get("world_size"), int)]
        logged = [start.world_size for start in self.log.starts if start.world_size] if self.log else []
        return (recorded or logged or [self.setting("distributed_training.distributed_world_size", 1)])[-1]

    @property
    def machine(self) -> str | None:
        """The GPUs, or else the processor, of all starts; None if no start recorded them."""
        models = [start.get("gpus") or [start["cpu"]] for start in self.starts if start.get("gpus") or start.get("cpu")]
        return " and ".join(dict.fromkeys(", ".join(dict.fromkeys(one)) for one in models)) or None

    @property
    def max_update(self) -> int | None:
        limit = self.setting("optimization.max_update")
        return limit if isinstance(limit, int) and limit > 0 else None

    @property
    def trained(self) -> bool:
        """Whether the log has a record."""
        return self.log is not None and bool(self.log.train or self.log.valid)

    @property
    def known(self) -> bool:
        """Whether the run has settings or a log."""
        return self.settings is not None or self.log is not None


def read_runs(paths: Sequence[Path], subset: str = "test") -> list[Run]:
    """Read the folders of runs. A folder of a sweep (``-m``) stands for its jobs.

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
    for path in jobs:
        try:
            if not path.is_dir():
                raise UserError(f"there is no directory '{path}'")
            folder = runs.Run(path)
            if not folder.ours and not folder.log_file and not _checkpoints(path):
                raise UserError(
                    f"'{path}' is not a run: it has no config.yaml of pn train, no log of fairseq-train (its "
                    "--log-file or saved output, as *.log, *.out or *.txt) and no checkpoint"
                )
        except OSError as error:
            raise UserError(f"cannot read '{path}': {error.strerror}") from error
        if (other := seen.setdefault(path.resolve(), path)) is not path:
            raise UserError(f"'{path}' is given twice (also as '{other}')")
    return [read_run(path, subset, name) for path, name in zip(jobs, short_names(jobs), strict=True)]


def _checkpoints(folder: Path) -> list[Path]:
    """The checkpoints that fairseq saved while it trained, in the folder of a run or in its ``checkpoints``."""
    files = [*folder.glob("checkpoint*.pt"), *folder.glob("checkpoints/checkpoint*.pt")]
    return sorted(file for file in files if re.fullmatch(r"checkpoint(_last|_best|_?\d+(_\d+)?)\.pt", file.name))


def log_of_checkpoints(files: Sequence[Path]) -> TrainingLog:
    """What the checkpoints of a training hold of its log: the settings and the losses at the updates that were saved.

    fairseq keeps the sums of its meters in a checkpoint. The training loss is the mean since the epoch began.

    Raises:
        CheckpointError: a checkpoint cannot be read.
    """
    from pn_fairseq.common.checkpoints import load_checkpoint  # needs torch

    log, newest = TrainingLog(), {}
    for file in files:
        state = load_checkpoint(file)
        update = state["optimizer_history"][-1]["num_updates"] if state.get("optimizer_history") else 0
        meters = {
            (group, name): values
            for group, entries in state.get("extra_state", {}).get("metrics", {}).items()
            for _, name, _, values in entries
        }

        def mean(group: str, name: str, meters=meters) -> float | None:
            values = meters.get((group, name)) or {}
            return round(float(values["sum"]) / float(values["count"]), 3) if values.get("count") else None

        for losses, found in (
            (log.train, mean("train", "loss")),
            (log.train_nll, mean("train", "nll_loss") or mean("train", "loss")),
            (log.valid, mean("valid", "nll_loss") or mean("valid", "loss")),
        ):
            if found is not None:
                losses[update] = found
        if state.get("cfg") and update >= newest.get("update", 0):
            newest = {"update": update, "cfg": state["cfg"], "model": state["model"]}
    if newest:
        plain = {name: getattr(value, "__dict__", value) for name, value in newest["cfg"].items()}
        log.settings = without_flags_of_others(plain)
    log.train, log.train_nll, log.valid = (dict(sorted(one.items())) for one in (log.train, log.train_nll, log.valid))
    log.starts = [Start(updates=list(log.train))]
    return log


def read_run(path: Path, subset: str, name: str) -> Run:
    """Read the folder of a run. What is missing or damaged in it becomes a sentence in ``problems``."""
    run = Run(path, name, ours=runs.Run(path).ours)
    run.failed = _text(path / "failed")
    _read_log(run)
    _read_settings(run)
    _read_data(run)
    _read_starts(run)
    if run.language_model:
        try:
            run.perplexity = read_perplexity(path, subset)
        except UserError as error:
            run.problems.append(f"not measured: {error}")
    else:
        _read_result(run, path / "generate" / subset, subset)
    if run.log:
        run.problems[:0] = _training_problems(run)
    if not run.known:
        run.problems = ["never began: there is neither config.yaml nor train.log"]
    if run.failed is not None:
        run.problems.insert(0, f"failed: {run.failed or '(the file is empty)'}")
    return run


def _text(file: Path) -> str | None:
    """The text of a small file, on one line; None if it cannot be read."""
    try:
        return " ".join(file.read_text("utf-8", errors="replace").split())
    except OSError:
        return None


def _read_log(run: Run) -> None:
    try:
        folder, files = runs.Run(run.path), _checkpoints(run.path)
        run.log, file = folder.log, folder.log_file
        if files and not run.ours and not (run.log and (run.log.train or run.log.valid)):
            run.log = log_of_checkpoints(files)
            run.from_checkpoints = True
            run.problems.append(
                f"there is no log in JSON: settings and losses are from {len(files)} checkpoints (fairseq-train "
                "--log-file train.log --log-format json would record every step, speed and time)"
            )
            return
        if run.log is None:
            run.problems.append("not trained: there is no train.log")
            return
    except UserError as error:
        run.problems.append(f"no log, and a checkpoint cannot be read: {error}")
        return
    except OSError as error:
        run.problems.append(f"{error.filename or 'the log'} cannot be read: {error.strerror}")
        return
    if run.log.unreadable:
        lines = "1 line" if run.log.unreadable == 1 else f"{run.log.unreadable} lines"
        run.problems.append(f"{lines} of {file.name} cannot be read (cut off?); the records there are missing here")


def _read_settings(run: Run) -> None:
    file, settings = run.path / "config.yaml", run.log.settings if run.log else None
    try:
        if file.is_file():
            settings = yaml.safe_load(file.read_text("utf-8"))
            if not isinstance(settings, dict):
                raise ValueError("it holds no settings")
    except (OSError, ValueError, yaml.YAMLError) as error:
        run.problems.append(f"no settings: config.yaml cannot be read: {' '.join(str(error).split())}")
        return
    if settings is None:
        run.problems.append(f"no settings: there is no {'config.yaml' if run.ours else 'line with them in the log'}")
    else:
        run.settings = renamed(flat(settings))


def _read_data(run: Run) -> None:
    noted = run.path / "data.settings"
    if run.ours:
        if _text(run.path / "data"):
            run.data_path = Path((run.path / "data").read_text("utf-8", errors="replace").rstrip("\n"))
        else:
            run.problems.append("the path of the data is not recorded: the file 'data' is missing")
    elif folder := run.setting("task.data"):
        # fairseq takes several folders, separated by colons; the last part of ours is bin.
        run.data_path = Path(str(folder).split(":")[0])
        if recorded(run.data_path.parent, "settings").is_file():
            run.data_path = run.data_path.parent
            noted = recorded(run.data_path, "settings")
        else:
            names = [re.match(r"train\.([\w-]+)-([\w-]+)\.", file.name) for file in run.data_path.glob("train.*.bin")]
            pair = next((match.groups() for match in names if match), ("", ""))
            known = [run.setting(f"task.{side}_lang", pair[n]) for n, side in enumerate(("source", "target"))]
            run.data = {"source": known[0], "target": known[1], "folder": str(run.data_path)}
            return
    if not noted.is_file():
        what = "there is no data.settings" if run.ours else "the settings do not name it"
        run.problems.append(f"the data is not known: {what}, so the run is compared with no other")
        return
    try:
        # An absent key means that a step was off; `lower` and `bpe` are 0 then.
        settings = read_settings(noted)
        defaults = {} if settings.get("task") == "language_modeling" else _DATA_DEFAULTS
        run.data = {
            key: value
            for key, value in (defaults | settings).items()
            if key and value and (value != "0" or key in ("lower", "bpe"))
        }
    except (UserError, OSError, ValueError) as error:
        run.problems.append(f"the data is not known: {error}")
        return
    if "clean" not in run.data:  # How and where it was cleaned means nothing then.
        run.data = {key: value for key, value in run.data.items() if key not in ("clean_stage", "clean_splits")}


def _read_starts(run: Run) -> None:
    try:
        lines = (run.path / "starts.jsonl").read_text("utf-8", errors="replace").splitlines()
    except OSError:
        if run.ours:
            run.problems.append("versions and hardware are not recorded: there is no starts.jsonl")
        return
    for number, line in enumerate(lines, 1):
        try:
            if line.strip():
                run.starts.append(renamed_record(dict(json.loads(line))))
        except (ValueError, TypeError):
            run.problems.append(f"line {number} of starts.jsonl cannot be read")


def lines_of(file: Path) -> int | None:
    """Number of lines; None if the file cannot be read."""
    try:
        return count_lines(file)
    except OSError:
        return None


def _read_result(run: Run, folder: Path, subset: str) -> None:
    run.decoded = lines_of(folder / "hyp.tok")
    if run.decoded is None:
        checkpoints = [*run.path.glob("*.pt"), *run.path.glob("checkpoints/*.pt")]
        missing = ", and there is no checkpoint" if not checkpoints else ""
        if run.ours and checkpoints and not (run.path / "checkpoints/averaged.pt").is_file():
            missing = ", and not averaged"
        run.problems.append(f"not decoded: there is no {folder.relative_to(run.path)}/hyp.tok{missing}")
        return
    if made := _text(recorded(folder, "made")):
        # How it was decoded, without what was decoded.
        words = re.findall(r"\b((?!checkpoint=|data=|subset=)[a-z_0-9]+=\S+)", made)
        run.decoding = " ".join(words) or None
    averaged = (_text(recorded(run.path / "checkpoints", "averaged.pt.made")) or "").split()
    wanted = run.setting("average_last")
    if len(averaged) > 1 and wanted and averaged[1].isdecimal() and int(averaged[1]) < wanted:
        run.problems.append(f"averaged.pt is the average of {averaged[1]}, not of average_last={wanted} checkpoints")
    sentences = lines_of(folder / "ref.tok")
    if sentences is not None and sentences != run.decoded:
        run.problems.append(f"{run.decoded} hypotheses but {sentences} references of {subset}")
    try:
        run.scores = _usable_scores(folder, run.decoded)
    except ScoringError as error:
        run.problems.append(f"not scored: {error}")
        return
    if warning := low_bleu(run.scores.tokenized.score):
        run.problems.append(f"tokenized {warning}")


def _usable_scores(folder: Path, decoded: int) -> Scores:
    if not (folder / "scores.json").exists():
        raise ScoringError("there is no scores.json (pn score writes it)")
    scores = read_scores(folder)
    numbers = [getattr(scores, measure).score for measure in METRICS]
    if not all(isinstance(number, int | float) and math.isfinite(number) for number in numbers):
        raise ScoringError("a score in scores.json is not a number (pn score writes it anew)")
    if scores.sentences != decoded:
        raise ScoringError(f"scores.json is about {scores.sentences} sentences, but {decoded} were decoded")
    if (folder / "scores.json").stat().st_mtime < (folder / "hyp.tok").stat().st_mtime:
        raise ScoringError("scores.json is older than hyp.tok (pn score writes it anew)")
    return scores


def _training_problems(run: Run) -> list[str]:
    problems, log = [], run.log
    if not run.trained:
        return ["not trained: train.log holds no record"]
    last = log.starts[-1]
    done = f"update {log.updates:,} of {run.max_update:,}" if run.max_update else f"update {log.updates:,}"
    short = run.max_update is not None and log.updates < run.max_update
    if not log.ended and not (run.from_checkpoints and not short):
        unfinished = short or run.max_update is None
        how = (
            f"not finished: {done} (interrupted, failed or still running)" if unfinished else f"cut off, but at {done}"
        )
        problems.append(f"training {how}")
    elif short:
        why = {
            "patience": f"no better validation loss {run.setting('checkpoint.patience')} times in a row",
            "stop_time_hours": "the limit of time",
            "max_update": "an earlier max_update",
        }
        problems.append(f"training ended at {done}: {why.get(last.reason, 'max_epoch, or not said')}")
    for kind, values in (("training", log.train), ("validation", log.valid)):
        if faulty := sorted(update for update, loss in values.items() if not math.isfinite(loss)):
            problems.append(
                f"the {kind} loss is not finite (NaN or infinity) in {len(faulty)} of {len(values)} records, "
                f"first at update {faulty[0]:,}"
            )
    if log.faults:
        problems.append(f"fairseq reports a NaN or an infinity in {log.faults} lines of the log")
    if not log.valid:
        problems.append("never validated")
    return problems
