"""Reading fairseq's training log in its log format ``json``: the ``--log-file``, or the saved
standard output.
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass, field
from pathlib import Path

#: A JSON record, at the start of a line or after a logger's prefix. A setting can also hold JSON.
_JSON = re.compile(r'(?:^|[|-] )(?=\{")')
_DEVICES = re.compile(r"training on (\d+) devices")
_PARAMETERS = re.compile(r"num\. (?:shared )?model params: ([\d,]+)")
_SAVED = re.compile(r"Saved checkpoint .* \(epoch (\d+) @ (\d+) updates, score")
_DONE = re.compile(r"done training in ([\d.]+) seconds")
#: What fairseq writes before it ends -> the name of the setting that ended it.
_REASONS = {
    "Stopping training due to num_updates": "max_update",
    "Stopping training due to cumulative_training_time": "stop_time_hours",
    "early stop since valid performance": "patience",
}
_FAULT = re.compile(
    r"\b(?:NaN|Inf) detected in output of|Detected nan/inf grad norm|gradients are Nan/Inf"
)


@dataclass
class Start:
    """One start of a training run; a resumed run has several."""

    world_size: int | None = None  # None if the log does not say
    updates: list[int] = field(default_factory=list)  # of its training records, in order
    # target tokens trained on between the first and the last record (wpb times updates)
    tokens: float = 0.0
    # between the records, validation and saving included (updates times wpb / wps)
    interval_seconds: float = 0.0
    # fairseq's wall of the last record, in seconds; 0 in a start that resumed a run
    wall: float = 0.0
    # "done training in ... seconds"; None if the start was cut off
    done_seconds: float | None = None
    reason: str | None = None  # why it ended, a value of _REASONS; None if the log does not say

    @property
    def seconds(self) -> float:
        """Length in seconds; if the start was cut off, up to its last record."""
        return (
            max(self.wall, self.interval_seconds)
            if self.done_seconds is None
            else self.done_seconds
        )


@dataclass
class TrainingLog:
    """The content of one log. Losses are in bits per target token."""

    # update -> fairseq's loss since the previous record
    train: dict[int, float] = field(default_factory=dict)
    # without label smoothing: nll_loss, or else loss
    train_nll: dict[int, float] = field(default_factory=dict)
    # update -> validation loss without label smoothing
    valid: dict[int, float] = field(default_factory=dict)
    starts: list[Start] = field(default_factory=list)  # in order
    tokens_per_second: dict[int, float] = field(default_factory=dict)  # update -> fairseq's wps
    # epoch and update of the last checkpoint; None if the log mentions none
    saved: tuple[int, int] | None = None
    parameters: int | None = None  # of the model; None if the log does not say
    unreadable: int = 0  # lines that look like a record but are cut off or contain no numbers
    faults: int = 0  # lines in which fairseq reports a NaN or an infinity

    @property
    def updates(self) -> int:
        """The last update with a record; 0 if there is no record."""
        return max([0, *self.train, *self.valid])

    @property
    def ended(self) -> bool:
        """Whether the last start reached its end."""
        return bool(self.starts) and self.starts[-1].done_seconds is not None

    @property
    def reason(self) -> str | None:
        """Why the last start ended; None if it was cut off, or if the log does not say."""
        return self.starts[-1].reason if self.ended else None

    def _current(self) -> Start:
        if not self.starts:
            self.starts.append(Start())
        return self.starts[-1]

    def _read_text(self, line: str) -> None:
        devices, parameters = _DEVICES.search(line), _PARAMETERS.search(line)
        saved, done = _SAVED.search(line), _DONE.search(line)
        if devices:
            self.starts.append(Start(world_size=int(devices[1])))
        elif parameters:
            self.parameters = int(parameters[1].replace(",", ""))
        elif saved:
            self.saved = int(saved[1]), int(saved[2])
        elif done:
            self._current().done_seconds = float(done[1])
        elif _FAULT.search(line):
            self.faults += 1
        for text, reason in _REASONS.items():
            if text in line:
                self._current().reason = reason

    def _read_record(self, record: dict) -> None:
        if "valid_num_updates" in record:
            loss = record.get("valid_nll_loss", record.get("valid_loss"))
            self.valid[int(record["valid_num_updates"])] = float(loss)
        elif "loss" in record and "num_updates" in record:
            self._read_training(int(record["num_updates"]), record)

    def _read_training(self, update: int, record: dict) -> None:
        loss = float(record["loss"])
        start = self._current()
        if start.updates and update <= start.updates[-1]:
            # A resumed run whose log does not state the number of devices.
            start = Start()
            self.starts.append(start)
        if start.updates:
            before = start.updates[-1]
        else:
            # fairseq logs at fixed updates, so a resumed run continues after the nearest record of
            # the starts before it.
            before = max((earlier for earlier in self.train if earlier < update), default=0)
        start.updates.append(update)
        self.train[update] = loss
        self.train_nll[update] = float(record.get("nll_loss", loss))
        start.wall = max(start.wall, _number(record, "wall"))
        tokens = _number(record, "wpb") * (update - before)
        start.tokens += tokens
        speed = _number(record, "wps")
        if speed > 0:
            self.tokens_per_second[update] = speed
            start.interval_seconds += tokens / speed


def read_log(path: str | Path) -> TrainingLog:
    """Read a log.

    If a resumed run repeated an update, the later record counts, but the time of both. Lines that
    were cut off are counted in ``unreadable``.

    Raises:
        OSError: the file cannot be read.
    """
    log = TrainingLog()
    with Path(path).open(encoding="utf-8", errors="replace") as lines:
        for line in lines:
            match = _JSON.search(line)
            try:
                if match:
                    log._read_record(json.loads(line[match.end() :]))
                else:
                    log._read_text(line)
            except (ValueError, TypeError, KeyError):
                log.unreadable += 1
    return log


def _number(record: dict, name: str) -> float:
    """A number of a record; 0 if it is missing or not finite."""
    value = float(record.get(name) or 0)
    return value if math.isfinite(value) else 0.0
