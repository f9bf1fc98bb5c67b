"""Reading fairseq's training log."""

import json
from dataclasses import dataclass, field
from pathlib import Path


@dataclass
class LearningCurve:
    """Numbers of one training run by update.

    Attributes:
        train: update -> training loss, averaged since the record before (fairseq's ``loss``, base 2).
        valid: update -> validation loss per token without smoothing (fairseq's ``valid_nll_loss``, base 2).
    """

    train: dict[int, float] = field(default_factory=dict)
    valid: dict[int, float] = field(default_factory=dict)


def read_log(path: str | Path) -> LearningCurve:
    """Read a log written with ``--log-format json``.

    Text and JSON records are mixed, and a record may stand behind ``... | train_inner | ``. Where a resumed run did
    an update again the later record holds. A last line that was cut off is passed over.

    Raises:
        OSError: the file cannot be read.
        ValueError: it holds no record.
    """
    curve = LearningCurve()
    with Path(path).open(encoding="utf-8", errors="replace") as lines:
        for line in lines:
            start = line.find("{")
            if start < 0:
                continue
            try:
                record = json.loads(line[start:])
            except json.JSONDecodeError:
                continue
            if "valid_nll_loss" in record and "valid_num_updates" in record:
                curve.valid[int(record["valid_num_updates"])] = float(record["valid_nll_loss"])
            elif "loss" in record and "num_updates" in record:
                curve.train[int(record["num_updates"])] = float(record["loss"])
    if not curve.train and not curve.valid:
        raise ValueError(f"{path} holds no training record (was it written with log_format json?)")
    return curve
