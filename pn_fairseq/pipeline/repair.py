"""Mending the checkpoints of a training that was killed while it saved one.

fairseq writes the first file of a save beside and renames it, and then copies it to ``checkpoint_best.pt`` and
``checkpoint_last.pt``. A kill can cut a copy off, which would stop the resumed run with an unpickling error, or come
before it, which would resume from an older state. Such a copy is made again from the newest whole checkpoint.
"""

import shutil
import zipfile
from collections.abc import Iterator
from pathlib import Path

from pn_fairseq.common.checkpoints import load_checkpoint
from pn_fairseq.common.files import atomic_write

LAST, BEST = "checkpoint_last.pt", "checkpoint_best.pt"


def is_whole(path: Path) -> bool:
    """Whether a checkpoint, which is a zip archive, is complete and matches its checksums.

    Raises:
        OSError: it cannot be read.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            return archive.testzip() is None
    except (EOFError, zipfile.BadZipFile):
        return False


def plan(folder: Path) -> dict[str, tuple[Path | None, str]]:
    """What :func:`repair` will do: name -> the checkpoint to copy there (None: remove it), and why."""
    last, best = folder / LAST, folder / BEST
    present = sorted(folder.glob("checkpoint*.pt"), key=lambda path: path.stat().st_mtime_ns, reverse=True)
    wanting = {path.name: "was cut off" for path in (last, best) if path.exists() and not is_whole(path)}
    if present and not last.exists():
        wanting[LAST] = "was missing"
    newest = next((path for path in present if path.name not in wanting and is_whole(path)), None)
    if newest and LAST not in wanting and newest.stat().st_mtime_ns > last.stat().st_mtime_ns:
        if _updates(load_checkpoint(newest)) > _updates(load_checkpoint(last)):
            wanting[LAST] = "was older"
    if newest and LAST in wanting and newest != best:
        state = load_checkpoint(newest)["extra_state"]
        if state["val_loss"] is not None and state["val_loss"] == state.get("best"):
            wanting.setdefault(BEST, "was older")  # the save that was interrupted was to write this one, too
    # checkpoint_last.pt is written last: after an interruption it still shows that a repair is needed.
    return {name: (newest, wanting[name]) for name in sorted(wanting)}


def _updates(state: dict) -> int:
    return state["optimizer_history"][-1]["num_updates"]


def resumed_from(folder: Path) -> Path:
    """The checkpoint that a training in ``folder`` resumes from, after the repair."""
    return plan(folder).get(LAST, (folder / LAST, ""))[0] or folder / LAST


def repair(folder: Path) -> Iterator[str]:
    """Repair the checkpoints in ``folder``, and say in a line each what was done."""
    for name, (source, why) in plan(folder).items():
        if source is None:
            (folder / name).unlink(missing_ok=True)
            yield f"{name} {why} and no other checkpoint is whole: starting from the beginning"
            continue
        with atomic_write(folder / name) as file, source.open("rb") as whole:
            shutil.copyfileobj(whole, file, 1 << 24)
        yield f"{name} {why}; made again from {source.name}"
