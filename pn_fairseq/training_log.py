"""Reading fairseq's training log."""

import json
import math
import re
from dataclasses import dataclass, field
from pathlib import Path

_DEVICES = re.compile(r"training on (\d+) devices")
_PARAMETERS = re.compile(r"num\. (?:shared )?model params: ([\d,]+)")
_DONE = re.compile(r"done training in ([\d.]+) seconds")
#: What fairseq says before it ends -> why it ends, in the words of the settings.
_REASONS = {
    "Stopping training due to num_updates": "max_update",
    "Stopping training due to cumulative_training_time": "stop_time_hours",
    "early stop since valid performance": "patience",
}
_FAULT = re.compile(r"\b(?:NaN|Inf) detected in output of|Detected nan/inf grad norm|gradients are Nan/Inf")


@dataclass
class LearningCurve:
    """Numbers of one training run by update.

    Attributes:
        train: update -> training loss, averaged since the record before (fairseq's ``loss``, base 2).
        valid: update -> validation loss per token without smoothing (fairseq's ``valid_nll_loss``, base 2).
    """

    train: dict[int, float] = field(default_factory=dict)
    valid: dict[int, float] = field(default_factory=dict)


@dataclass
class Start:
    """What the log tells of one start of the training; a resumed run has several.

    Attributes:
        workers: number of data-parallel processes; None if the log does not say.
        updates: updates of its records of the training, in their order.
        tokens: target-side tokens trained on between the first and the last record (``wpb`` times updates).
        interval_seconds: time between the records, validation and saving included (updates times ``wpb / wps``).
        wall: fairseq's ``wall`` in the last record, in seconds. It is 0 in a start that resumed a run.
        done_seconds: what ``done training in ... seconds`` says; None if the start did not end by itself.
        reason: why it ended: ``max_update``, ``stop_time_hours``, ``patience``; None if nothing announced an end.
    """

    workers: int | None = None
    updates: list[int] = field(default_factory=list)
    tokens: float = 0.0
    interval_seconds: float = 0.0
    wall: float = 0.0
    done_seconds: float | None = None
    reason: str | None = None

    @property
    def seconds(self) -> float:
        """Length in seconds; of a start that did not end by itself, up to its last record."""
        return max(self.wall, self.interval_seconds) if self.done_seconds is None else self.done_seconds


@dataclass
class TrainingLog:
    """All that the reports take from one log.

    Attributes:
        curve: losses by update.
        starts: the starts of the run, in their order.
        tokens_per_second: update -> target-side tokens per second since the record before (fairseq's ``wps``).
        diagnostics: name (``norm_...``) -> update -> value, of records that hold one.
        parameters: number of parameters of the model; None if the log does not say.
        unreadable: lines that look like a record and are none: cut off, or without numbers.
        faults: lines in which fairseq reports a NaN or an infinity.
    """

    curve: LearningCurve = field(default_factory=LearningCurve)
    starts: list[Start] = field(default_factory=list)
    tokens_per_second: dict[int, float] = field(default_factory=dict)
    diagnostics: dict[str, dict[int, float]] = field(default_factory=dict)
    parameters: int | None = None
    unreadable: int = 0
    faults: int = 0

    @property
    def updates(self) -> int:
        """The last update that the log knows of."""
        return max([0, *self.curve.train, *self.curve.valid])

    @property
    def ended(self) -> bool:
        """Whether the last start came to its end by itself."""
        return bool(self.starts) and self.starts[-1].done_seconds is not None


def read_training_log(path: str | Path) -> TrainingLog:
    """Read a log written with ``--log-format json``.

    Text and JSON records are mixed, and a record may stand behind ``... | train_inner | ``. Where a resumed run did
    an update again the later record holds; its time counts, too. A line that was cut off is counted and passed over.

    Raises:
        OSError: the file cannot be read.
    """
    log = TrainingLog()
    with Path(path).open(encoding="utf-8", errors="replace") as lines:
        for line in lines:
            start = line.find('{"')
            if start < 0:
                _read_text(log, line)
                continue
            try:
                _read_record(log, json.loads(line[start:]))
            except (ValueError, TypeError, KeyError):
                log.unreadable += 1
    return log


def read_log(path: str | Path) -> LearningCurve:
    """The learning curve in a log; see :func:`read_training_log`.

    Raises:
        OSError: the file cannot be read.
        ValueError: it holds no record.
    """
    curve = read_training_log(path).curve
    if not curve.train and not curve.valid:
        raise ValueError(f"{path} holds no training record (was it written with log_format json?)")
    return curve


def _read_text(log: TrainingLog, line: str) -> None:
    if match := _DEVICES.search(line):
        log.starts.append(Start(workers=int(match[1])))
    elif match := _PARAMETERS.search(line):
        log.parameters = int(match[1].replace(",", ""))
    elif match := _DONE.search(line):
        _current(log).done_seconds = float(match[1])
    elif _FAULT.search(line):
        log.faults += 1
    else:
        for words, reason in _REASONS.items():
            if words in line:
                _current(log).reason = reason


def _current(log: TrainingLog) -> Start:
    if not log.starts:
        log.starts.append(Start())
    return log.starts[-1]


def _read_record(log: TrainingLog, record: dict) -> None:
    if "valid_nll_loss" in record and "valid_num_updates" in record:
        _current(log)
        log.curve.valid[int(record["valid_num_updates"])] = float(record["valid_nll_loss"])
    elif "loss" in record and "num_updates" in record:
        _read_training_record(log, int(record["num_updates"]), float(record["loss"]), record)


def _read_training_record(log: TrainingLog, update: int, loss: float, record: dict) -> None:
    start = _current(log)
    if start.updates and update <= start.updates[-1]:
        # A resumed run whose log does not say on how many devices.
        log.starts.append(start := Start())
    # fairseq logs at fixed updates, so that a resumed run goes on after the nearest record of the starts before it.
    before = start.updates[-1] if start.updates else max((u for u in log.curve.train if u < update), default=0)
    start.updates.append(update)
    log.curve.train[update] = loss
    start.wall = max(start.wall, _number(record, "wall"))
    speed, tokens = _number(record, "wps"), _number(record, "wpb") * (update - before)
    start.tokens += tokens
    if speed > 0:
        log.tokens_per_second[update] = speed
        start.interval_seconds += tokens / speed
    for name, value in record.items():
        # Between two reports of the norms fairseq repeats their names without a value.
        if name.startswith("norm_") and value is not None:
            log.diagnostics.setdefault(name, {})[update] = float(value)


def _number(record: dict, name: str) -> float:
    """A number of a record; 0 where it is missing, or not finite."""
    value = record.get(name)
    value = 0.0 if value is None else float(value)
    return value if math.isfinite(value) else 0.0
