"""What was made before a run was trained further: the only place that determines this.

``pn average --run`` records up to which checkpoint it averaged, and the commands that decode or
measure a run record from which checkpoint. The commands that read ``averaged.pt`` print what is
outdated, and ``pn report`` lists it.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from pn_fairseq.common.checkpoint_files import LAST, find_checkpoints, numbers_in
from pn_fairseq.common.command import say, shown
from pn_fairseq.pipeline import stamp
from pn_fairseq.pipeline.training_log import read_log


def record_of_average(averaged: Sequence[Path], kind: str) -> dict[str, object]:
    """The record in a stamp of the averaged checkpoints, oldest first; ``kind`` as in
    :func:`~pn_fairseq.common.checkpoint_files.checkpoints_to_average`.
    """
    newest = numbers_in(averaged[-1])[0] if kind in ("epoch", "update") else ""
    return {"averaged": f"{kind} {len(averaged)}", "up_to": newest}


def record_of_training(run: Path) -> dict[str, str]:
    """The record in a stamp of the run at the time of the average; it is not compared."""
    return {"trained_to": str(_last_update(run))}


def number_averaged(averaged: Path) -> int | None:
    """The number of checkpoints of a run that the file averages; None: not recorded."""
    kind, _, number = stamp.read(stamp.stamp_of(averaged)).get("averaged", "").partition(" ")
    return int(number) if kind in ("epoch", "update", "last") and number else None


def record_of_result(checkpoints: Sequence[Path], run_checkpoints: Path) -> dict[str, str]:
    """The record in a stamp of the checkpoints that a result was made from; it is not compared,
    since a run may be moved.
    """
    names = [os.path.relpath(path, run_checkpoints) for path in checkpoints]
    return {"checkpoint_file": " + ".join(names)}


def of_average(averaged: Path) -> str:
    """How far a run was trained further after ``pn average --run`` wrote the file; "" if it was
    not, or if this is unknown.
    """
    made = stamp.read(stamp.stamp_of(averaged))
    kind = made.get("averaged", "").partition(" ")[0]
    folder = averaged.parent
    run = folder.parent if folder.name == "checkpoints" else folder
    again = f"{shown(['average', '--run', run])} makes it again"
    if kind == "last":
        last = averaged.parent / LAST
        if last.is_file() and stamp.differences(
            stamp.stamp_of(averaged), stamp.made_from({}, {"checkpoints": [last]})
        ):
            return f"{averaged} was made before {LAST}: the run was trained on ({again})"
    elif made.get("up_to", "").isdecimal() and kind in ("epoch", "update"):
        newest = find_checkpoints(averaged.parent, kind, 1)
        number = numbers_in(newest[0])[0] if newest else 0
        last = _last_update(run)
        average = f"{averaged} is the average up to {kind} {made['up_to']}"
        if number > int(made["up_to"]):
            trained = max(number, last) if kind == "update" else number
            return f"{average}, and the run was trained on to {kind} {trained} ({again})"
        if last > int(made["trained_to"]):
            command = shown(["average", "--run", run])
            return (
                f"{average}, and the run was trained on to update {last}, which only {LAST} has "
                f"({command} says how to average it as well)"
            )
    return ""


def _last_update(run: Path) -> int:
    """The update of the last checkpoint, by the log of ``pn train``; 0 without a readable log. This
    checkpoint is only in checkpoint_last.pt if the training ended between two saves by updates.
    """
    try:
        saved = read_log(run / "train.log").saved
    except OSError:
        return 0
    return saved[1] if saved else 0


def of_result(result: str, made: Path, averaged: Path) -> list[str]:
    """What is outdated about a result, whose stamp is ``made``: the average of its run, and the
    result itself if it was made from an earlier average.
    """
    if not averaged.is_file():
        return []
    texts = [of_average(averaged)]
    if _is_of_an_earlier_average(made, averaged):
        texts.append(f"{result} was made from an earlier {averaged.name}: make it again")
    return [text for text in texts if text]


def is_outdated(made: Path, averaged: Path) -> bool:
    """Whether a result, whose stamp is ``made``, or the average of its run is outdated."""
    if not averaged.is_file():
        return False
    return bool(of_average(averaged)) or _is_of_an_earlier_average(made, averaged)


def _is_of_an_earlier_average(made: Path, averaged: Path) -> bool:
    if stamp.read(made).get("checkpoint_file") != averaged.name:
        return False
    return bool(stamp.differences(made, stamp.made_from({}, {"checkpoint": [averaged]})))


def note_on_average(step: str, checkpoints: Sequence[Path]) -> None:
    """Print which of the checkpoints that a command reads are outdated averages."""
    for path in checkpoints:
        text = of_average(path)
        if text:
            say(step, f"note: {text}")
