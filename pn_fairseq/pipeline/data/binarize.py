"""fairseq's binary data from text in subwords."""

from __future__ import annotations

import functools
import os
import re
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from pn_fairseq.common.command import UserError, say, why_it_failed
from pn_fairseq.common.files import atomic_folder, count_lines

SPLITS = ("train", "valid", "test")
#: A fairseq index file (.idx) of the memory-mapped format begins with this (the last 8 bytes are
#: the version). A type of one byte and the number of sentences in 8 bytes follow. Importing fairseq
#: to ask the same would take seconds.
MAGIC = b"MMIDIDX\x00\x00" + (1).to_bytes(8, "little")
TYPES = range(1, 11)
#: Bytes before the lengths of the sentences, of 4 bytes each.
HEADER = 26


def sentences(index: Path) -> int:
    """Number of sentences in a fairseq index file."""
    with index.open("rb") as file:
        head = file.read(HEADER)
    if len(head) < HEADER or not head.startswith(MAGIC) or head[17] not in TYPES:
        raise UserError(f"{index} is damaged, or no index of fairseq's memory-mapped format")
    return int.from_bytes(head[18:], "little")


def make_bin(
    folder: Path, workers: int, flags: Sequence[str], texts: Mapping[str, str], to: str = "bin"
) -> None:
    """Make ``folder/TO`` by fairseq-preprocess with these flags, unless it is there. The log is
    preprocess.log.

    Args:
        texts: name of an index in the new folder -> the text, in ``folder``, whose sentences it
            must have.
    """
    final, process = folder / to, None
    if final.exists():
        return
    say("prepare", "binarizing with fairseq-preprocess")
    with atomic_folder(final) as partial:
        # -P: no modules of the folder. The names of files are relative, because fairseq splits them
        # at commas.
        command = [
            sys.executable,
            "-P",
            "-m",
            "fairseq_cli.preprocess",
            *flags,
            "--workers",
            str(workers),
        ]
        command += ["--destdir", str(partial.relative_to(folder))]
        # A session of its own, so that its worker processes are ended with it. It inherits the lock
        # of DEST (close_fds), and the next preparation waits for one that outlived a kill -9.
        options = {
            "cwd": folder,
            "close_fds": False,
            "start_new_session": True,
            "text": True,
            "errors": "replace",
        }
        before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
        unblock = functools.partial(signal.pthread_sigmask, signal.SIG_SETMASK, before)
        try:
            # A signal waits until the process is known here: one that nobody ends would go on
            # writing.
            signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM))
            pipes = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE}
            process = subprocess.Popen(command, preexec_fn=unblock, **pipes, **options)
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
    """Text, as ``train.en`` -> the percentage of its subwords that fairseq-preprocess replaced
    by <unk>.
    """
    log = (folder / "preprocess.log").read_text("utf-8")
    return dict(re.findall(r"(?:bpe|tok)/(\S+): \d+ sents, \d+ tokens, ([\d.]+)% replaced", log))
