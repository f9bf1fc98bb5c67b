"""The files of fairseq checkpoints: whether one can be read or written, and which ones a
``--save-dir`` contains. This module imports no torch, so a misspelt path is refused at once.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Sequence
from pathlib import Path

from pn_fairseq.common.command import UserError

#: The checkpoint that a run resumes from.
LAST = "checkpoint_last.pt"
GET_ANOTHER = "copy it again from where it was written, or use another checkpoint"

#: Where the folder of a training run holds its settings, beside the folder of its checkpoints.
SETTINGS = ("config.yaml", ".hydra/config.yaml")
#: The names that fairseq gives its checkpoints; shards of one add their number.
_OWN_NAME = re.compile(r"checkpoint(\d+|_\d+_\d+|_last|_best|\.best_.+)(-.+)?\.pt")

_NAME_PATTERNS = {
    "epoch": re.compile(r"checkpoint\d+\.pt"),
    "update": re.compile(r"checkpoint_\d+_\d+\.pt"),
}


class CheckpointError(UserError):
    """A checkpoint cannot be read, written or used.

    The text is one line: the file, what is wrong, what to do.
    """


def check_input_path(path: str | os.PathLike) -> os.stat_result:
    """Raise :class:`CheckpointError` unless ``path`` is a regular file that is not empty; return
    its ``stat``.
    """
    try:
        info = os.stat(path)
        if not stat.S_ISREG(info.st_mode):  # opening a pipe would block
            raise CheckpointError(f"{path}: is not a regular file; name a file of a checkpoint")
        with open(path, "rb"):
            pass
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror})") from error
    if info.st_size == 0:
        raise CheckpointError(f"{path}: is empty; {GET_ANOTHER}")
    return info


def check_output_path(path: str | os.PathLike, inputs: Sequence[Path] = ()) -> None:
    """Raise :class:`CheckpointError` unless a file can be written at ``path``. To be called before
    the work, not after it.
    """
    target = Path(os.path.realpath(path))
    for one in inputs:
        if target.exists() and one.exists() and target.samefile(one):
            raise CheckpointError(
                f"{path}: cannot be written, it is one of the inputs ({one}); choose another name"
            )
    if not target.parent.is_dir():
        raise CheckpointError(
            f"{path}: cannot be written, there is no directory {target.parent}; create it first"
        )
    if target.exists() and not target.is_file():
        # os.replace would replace a device such as /dev/null by a file.
        raise CheckpointError(
            f"{path}: cannot be written, it exists and is not a regular file; choose another name"
        )
    if not os.access(target.parent, os.W_OK | os.X_OK):
        raise CheckpointError(
            f"{path}: cannot be written, no permission to write in {target.parent}"
        )
    for place in (Path(path).absolute(), target):
        if _OWN_NAME.fullmatch(place.name) and _is_of_training(place.parent, inputs):
            raise CheckpointError(
                f"{path}: cannot be written, fairseq's training writes, removes and resumes from "
                f"files named {place.name} in this folder; choose another name, such as averaged.pt"
            )


def _is_of_training(folder: Path, inputs: Sequence[Path]) -> bool:
    """Whether ``folder`` contains the checkpoints of a training run: one that wrote one of the
    inputs, or one whose settings are beside the folder.
    """
    if any(one.exists() and one.absolute().parent.samefile(folder) for one in inputs):
        return True
    return any((folder.parent / name).is_file() for name in SETTINGS)


def newest_checkpoint(folder: Path, other_than: Path) -> Path | None:
    """The newest fairseq checkpoint in ``folder`` except ``other_than``; None if there is none."""
    files = [path for path in folder.glob("checkpoint*.pt") if _OWN_NAME.fullmatch(path.name)]
    others = [path for path in files if path != other_than]
    return max(others, key=lambda path: path.stat().st_mtime, default=None)


def find_checkpoints(
    directory: str | os.PathLike, by: str = "epoch", last: int | None = None
) -> list[Path]:
    """The checkpoints that ``fairseq-train`` left in ``directory``, newest first.

    Args:
        directory: fairseq's ``--save-dir``.
        by: ``"epoch"`` for ``checkpoint{epoch}.pt``, ``"update"`` for
            ``checkpoint_{epoch}_{update}.pt``. The numbers are compared as numbers:
            ``checkpoint10.pt`` is newer than ``checkpoint9.pt``.
        last: the largest number to return, at least 1; None: all of them.

    Raises:
        CheckpointError: the directory cannot be read.
    """
    try:
        names = [entry.name for entry in os.scandir(directory) if not entry.is_dir()]
    except OSError as error:
        raise CheckpointError(
            f"{directory}: cannot list the checkpoints ({error.strerror})"
        ) from error
    found = [Path(directory, name) for name in filter(_NAME_PATTERNS[by].fullmatch, names)]
    return sorted(found, key=numbers_in, reverse=True)[:last]


def numbers_in(path: Path) -> list[int]:
    """The epoch, or the update and the epoch, in the name of a file that
    :func:`find_checkpoints` found.
    """
    return [int(number) for number in re.findall(r"\d+", path.name)][::-1]


def checkpoints_to_average(
    directory: str | os.PathLike, last: int, usual: str = "epoch"
) -> tuple[list[Path], str, str]:
    """The ``last`` newest checkpoints of a training run, or all checkpoints if there are fewer.

    Args:
        directory: fairseq's ``--save-dir``.
        last: the number of checkpoints, at least 1.
        usual: ``by`` of :func:`find_checkpoints`. If there is no checkpoint of this kind, the other
            kind is used; if there is neither, ``checkpoint_last.pt``.

    Returns:
        The files, oldest first; their kind, or ``"last"``; and a note if they are not ``last``
        checkpoints of the usual kind, else an empty text.

    Raises:
        CheckpointError: no such checkpoint exists.
    """
    wanted = f"{last} {usual} checkpoints"
    other = "update" if usual == "epoch" else "epoch"
    for kind in (usual, other):
        paths = find_checkpoints(directory, kind, last)[::-1]
        if paths:
            present = f"{len(paths)} {kind} checkpoint{'s' * (len(paths) > 1)}"
            complete = kind == usual and len(paths) == last
            note = "" if complete else f"{directory}: averaging {present} instead of {wanted}"
            return paths, kind, note
    newest = Path(directory, LAST)
    best = Path(directory, "checkpoint_best.pt")
    if newest.is_file():
        return [newest], "last", f"{directory} has none of the {wanted}: using only {newest.name}"
    advice = (
        f"; it has {best.name} (--inputs {best})"
        if best.is_file()
        else ", nor any other: train first (pn train)"
    )
    raise CheckpointError(f"{directory} has none of the {wanted}{advice}")
