"""fairseq's binary data from text in subwords: binarize.py FOLDER SOURCE TARGET WORKERS.

Runs fairseq-preprocess on FOLDER/bpe/{train,valid,test}, with one dictionary for both languages, and makes FOLDER/bin
when it has as many sentences as the text. fairseq's own log is FOLDER/bin/preprocess.log.
"""

import os
import shutil
import struct
import subprocess
import sys
from pathlib import Path

from conventions import UserError
from text_files import step

#: The start of a fairseq index file (.idx) of the memory-mapped format: magic, version, code of the type, sentences.
#: Importing fairseq to ask the same would take seconds.
HEADER = struct.Struct("<9sQBQ")
MAGIC = b"MMIDIDX\x00\x00"


def sentences(index: Path) -> int:
    """How many sentences a fairseq index file holds."""
    with index.open("rb") as file:
        head = file.read(HEADER.size)
    if len(head) < HEADER.size or not head.startswith(MAGIC):
        raise UserError(f"{index} is not an index of fairseq's memory-mapped format")
    return HEADER.unpack(head)[3]


def lines(path: Path) -> int:
    with path.open("rb") as file:
        return sum(1 for _ in file)


def main(argv: list[str] | None) -> None:
    folder, source, target, workers = sys.argv[1:]
    final = Path(folder, "bin")
    partial = final.with_name("bin.partial")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        # From within the folder, because fairseq-preprocess splits the names that it is given at commas.
        result = subprocess.run(
            ["fairseq-preprocess", "--source-lang", source, "--target-lang", target, "--joined-dictionary"]
            + [f"--{split}pref=bpe/{split}" for split in ("train", "valid", "test")]
            + ["--destdir", partial.name, "--workers", workers],
            cwd=folder,
            capture_output=True,
            text=True,
            errors="replace",
        )
        if result.returncode:
            said = [line for line in result.stderr.splitlines() if line.strip()]
            raise UserError(f"fairseq-preprocess failed: {said[-1] if said else result.returncode} (in {folder})")
        for split in ("train", "valid", "test"):
            for lang in (source, target):
                text = Path(folder, "bpe", f"{split}.{lang}")
                made, expected = sentences(partial / f"{split}.{source}-{target}.{lang}.idx"), lines(text)
                if made != expected:
                    raise UserError(f"{partial} has {made} sentences of {text}, which has {expected}: some were lost")
        os.rename(partial, final)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


step("binarize.py", main)
