"""Make a training that was killed while it wrote a checkpoint resumable: repair_checkpoints.py SAVE_DIR.

With several workers the first one writes, so this is called by the first machine alone.

fairseq writes the first file of a save beside and renames it, and then copies it to checkpoint_last.pt and
checkpoint_best.pt. A copy that was cut off would stop the resumed run with an unpickling error, and without
checkpoint_last.pt it would begin again. Such a copy is made again from the newest whole checkpoint, which is the one
that was being copied. Prints a line for each.
"""

import os
import shutil
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path


def is_whole(path: Path) -> bool:
    """Whether a checkpoint, which is a zip archive, is there to its end and matches its checksums."""
    try:
        with zipfile.ZipFile(path) as archive:
            return archive.testzip() is None
    except (OSError, zipfile.BadZipFile):
        return False


def repair(folder: Path) -> Iterator[str]:
    """Repair the checkpoints in ``folder``, and say in a line each what was done."""
    last, best = folder / "checkpoint_last.pt", folder / "checkpoint_best.pt"
    present = sorted(folder.glob("checkpoint*.pt"), key=lambda path: path.stat().st_mtime, reverse=True)
    wanting = [path for path in (last, best) if path.exists() and not is_whole(path)]
    if present and not last.exists():
        wanting.append(last)
    if not wanting:
        return
    whole = next((path for path in present if path not in wanting and is_whole(path)), None)
    for path in wanting:
        state = "was cut off" if path.exists() else "was missing"
        if whole is None:
            path.unlink(missing_ok=True)
            yield f"{path.name} {state} and no other checkpoint is whole: starting afresh"
            continue
        partial = path.with_name(f"{path.name}.partial")
        shutil.copyfile(whole, partial)
        os.replace(partial, path)
        yield f"{path.name} {state}; made again from {whole.name}"


if __name__ == "__main__":
    for line in repair(Path(sys.argv[1])):
        print(line)
