"""fairseq's binary data from text in subwords."""

from __future__ import annotations

import functools
import os
import re
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from pn_fairseq.common.command import UserError, say, why_it_failed
from pn_fairseq.common.files import atomic_folder, count_lines
from pn_fairseq.pipeline import programs

SPLITS = ("train", "valid", "test")
#: What to do about a :func:`fault`.
REMEDY = "prepare the data again (pn prepare)"
#: A fairseq index file (.idx) of the memory-mapped format begins with this (the last 8 bytes are
#: the version). A type of one byte, a key of TYPES, and the number of sentences in 8 bytes follow.
#: Importing fairseq to ask the same would take seconds.
MAGIC = b"MMIDIDX\x00\x00" + (1).to_bytes(8, "little")
TYPES = dict(zip(range(1, 11), "u1 i1 i2 i4 i8 f8 f8 u2 u4 u8".split(), strict=True))
#: Bytes before the lengths of the sentences, of 4 bytes each. Their places follow, of 8 bytes each.
HEADER = 26
#: Number of subwords of every fairseq dictionary that its file does not list.
SPECIAL = 4


def _header(index: Path) -> tuple[np.dtype, int]:
    """The type of a subword and the number of sentences in a fairseq index file."""
    with index.open("rb") as file:
        head = file.read(HEADER)
    if len(head) < HEADER or not head.startswith(MAGIC) or head[17] not in TYPES:
        raise UserError(f"{index} is damaged, or no index of fairseq's memory-mapped format")
    return np.dtype(TYPES[head[17]]), int.from_bytes(head[18:], "little")


def sentences(index: Path) -> int:
    """Number of sentences in a fairseq index file."""
    _, count = _header(index)
    return count


def lengths(index: Path) -> np.ndarray:
    """Numbers of subwords of the sentences, with their ends."""
    return np.fromfile(index, np.int32, sentences(index), offset=HEADER)


def words_in(dictionary: Path) -> int:
    """Number of subwords in a dictionary of fairseq-preprocess, or 0 without the file."""
    return count_lines(dictionary) + SPECIAL if dictionary.is_file() else 0


def fault(folder: Path, name: str, words: int) -> str:
    """What is wrong with the binary data ``name`` in the folder bin/; "" if its files are whole and
    fit a dictionary with this many ``words``.
    """
    index, content = folder / f"{name}.idx", folder / f"{name}.bin"
    if not (index.is_file() and content.is_file()):
        return f"{folder} has no {name}"
    try:
        dtype, count = _header(index)
    except UserError:
        return f"{index} is cut off or damaged"
    if index.stat().st_size < HEADER + 12 * count:
        return f"{index} is cut off or damaged"
    subwords = int(lengths(index).sum(dtype=np.int64))
    size, expected = content.stat().st_size, subwords * dtype.itemsize
    if size != expected:
        return f"{content} has {size} bytes instead of {expected}"
    largest = int(np.memmap(content, dtype, "r").max()) if expected else 0
    if largest >= words:
        return (
            f"{content} has the subword number {largest}, but its dictionary in {folder} only "
            f"{words} subwords"
        )
    return ""


def make_bin(
    folder: Path, workers: int, flags: Sequence[str], texts: Mapping[str, str], to: str = "bin"
) -> None:
    """Make ``folder/TO`` by fairseq-preprocess with these flags, unless it exists. The log is
    preprocess.log.

    Args:
        texts: name of an index in the new folder -> the text, in ``folder``, whose number of
            sentences it must contain.
    """
    final, process = folder / to, None
    if final.exists():
        return
    say("prepare", "binarizing with fairseq-preprocess")
    with atomic_folder(final) as partial:
        # -P: import no modules from the folder. File names are relative, because fairseq splits
        # them at commas.
        command = ["-P", "-m", "fairseq_cli.preprocess", *flags, "--workers", workers]
        command += ["--destdir", partial.relative_to(folder)]
        before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
        unblock = functools.partial(signal.pthread_sigmask, signal.SIG_SETMASK, before)
        try:
            # A signal waits until the process is known here: otherwise nobody would end the
            # process, which would go on writing.
            signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM))
            # Its own session, so that its worker processes are ended with it. It inherits the lock
            # of DEST (close_fds), so the next preparation waits for a process that outlived a
            # kill -9 of this one.
            process = programs.start_python(
                *command,
                cwd=folder,
                preexec_fn=unblock,
                close_fds=False,
                start_new_session=True,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
                errors="replace",
            )
            unblock()
            messages = process.communicate()[1].splitlines()
        except BaseException:
            unblock()
            if process:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            raise
        if process.returncode:
            raise UserError(
                f"fairseq-preprocess failed: {why_it_failed(process.returncode, messages)} (in "
                f"{folder})"
            )
        for name, text in texts.items():
            made, expected = sentences(partial / f"{name}.idx"), count_lines(folder / text)
            if made != expected:
                raise UserError(
                    f"{partial} has {made} sentences of {text}, which has {expected}: some were "
                    "lost"
                )


def unknown_shares(folder: Path) -> dict[str, str]:
    """Text, such as ``train.en`` -> the percentage of its subwords that fairseq-preprocess replaced
    by <unk>.
    """
    log = (folder / "preprocess.log").read_text("utf-8")
    return dict(re.findall(r"(?:bpe|tok)/(\S+): \d+ sents, \d+ tokens, ([\d.]+)% replaced", log))
