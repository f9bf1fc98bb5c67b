"""Make a training that was killed while it wrote a checkpoint resumable: repair_checkpoints.py SAVE_DIR.

fairseq writes the first file of a save beside and renames it, and then copies it to checkpoint_last.pt and
checkpoint_best.pt. A copy that was cut off would stop the resumed run with an unpickling error. Such a copy is made
again from the newest whole checkpoint. Prints a line for each.
"""

import os
import shutil
import sys
import zipfile
from pathlib import Path


def is_whole(path: Path) -> bool:
    """Whether a checkpoint, which is a zip archive, is there to its end and matches its checksums."""
    try:
        with zipfile.ZipFile(path) as archive:
            return archive.testzip() is None
    except (OSError, zipfile.BadZipFile):
        return False


def main(folder: Path) -> int:
    damaged = [path for name in ("checkpoint_last.pt", "checkpoint_best.pt") if not is_whole(path := folder / name)]
    damaged = [path for path in damaged if path.exists()]
    if not damaged:
        return 0
    others = sorted(folder.glob("checkpoint*.pt"), key=lambda path: path.stat().st_mtime, reverse=True)
    whole = next((path for path in others if path not in damaged and is_whole(path)), None)
    for path in damaged:
        if whole is None:
            path.unlink()
            print(f"{path.name} was cut off and no other checkpoint is whole: starting afresh")
            continue
        partial = path.with_name(f"{path.name}.partial")
        shutil.copyfile(whole, partial)
        os.replace(partial, path)
        print(f"{path.name} was cut off; made again from {whole.name}")
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
