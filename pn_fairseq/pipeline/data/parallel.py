"""Text processing on all cores: a file is cut at line ends, processes change the pieces, and the
results are joined in order.

A line ends only at a line feed; carriage returns and Unicode's other line ends are white space, as
for Moses' scripts. Every function turns a line into exactly one line, so the result does not depend
on the number of processes.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

from pn_fairseq.common.command import UserError
from pn_fairseq.common.files import atomic_write, scratch_folder

#: Bytes of text in a piece: large relative to the cost of passing it on (and of starting a Perl
#: script), small relative to a corpus, so that no core is idle at its end.
PIECE = 1 << 18

#: Some lines -> as many lines.
Work = Callable[[bytes], bytes]


def progress(iterable=None, **options):
    """tqdm's progress bar; if stderr is not a terminal, a line every 30 seconds."""
    from tqdm import tqdm  # takes longer to import than most steps

    tqdm.monitor_interval = 0  # no extra thread, because the processes of the pool are forked
    interval = {} if sys.stderr.isatty() else {"delay": 30, "mininterval": 30, "maxinterval": 30}
    return tqdm(iterable, **interval, **options)


def pieces(path: Path) -> list[tuple[int, int]]:
    """Cut a file at line ends: (begin, end) in bytes."""
    total, cuts = path.stat().st_size, [0]
    with path.open("rb") as file:
        while cuts[-1] < total:
            file.seek(min(cuts[-1] + PIECE, total) - 1)
            file.readline()
            cuts.append(file.tell())
    return list(zip(cuts, cuts[1:], strict=False))


def _start_worker(work: Work) -> None:
    global _work
    _work = work  # a forked process inherits the function, which usually cannot be pickled
    # Ctrl-C reaches the whole group; the parent ends its workers
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def end_with_parent() -> None:
        multiprocessing.parent_process().join()
        os._exit(1)

    threading.Thread(target=end_with_parent, daemon=True).start()


def _change(source: Path, begin: int, end: int, result: Path) -> Path:
    """Write the result of the function for a piece to a file: a worker that is killed while it
    sends a large message would hang the pool. The last line of a file gets a line feed if it lacks
    one.
    """
    with source.open("rb") as file:
        file.seek(begin)
        text = file.read(end - begin)
    text = text if text.endswith(b"\n") else text + b"\n"
    try:
        changed = _work(text)
    except UserError as error:
        raise UserError(f"{source}: {error}") from None
    before, after = text.count(b"\n"), changed.count(b"\n")
    if before != after:
        raise UserError(
            f"{source}: {before} lines went into a step and {after} came out: sentences were lost"
        )
    result.write_bytes(changed)
    return result


def transform(source: Path, output: Path, work: Work, workers: int, label: str = "") -> None:
    """Write each line of ``source``, changed by ``work``, to ``output``."""
    cuts, fork = pieces(source), multiprocessing.get_context("fork")
    output.parent.mkdir(parents=True, exist_ok=True)
    with (
        atomic_write(output) as file,
        scratch_folder(output.with_name(f"{output.name}.pieces")) as folder,
    ):
        pool = ProcessPoolExecutor(max(1, min(workers, len(cuts))), fork, _start_worker, (work,))
        try:
            results = [pool.submit(_change, source, *cut, folder / str(cut[0])) for cut in cuts]
            for result in progress(results, desc=label, unit="piece"):
                file.write(result.result().read_bytes())
                result.result().unlink()
        except BrokenProcessPool:
            raise UserError(
                "a worker process was ended; if memory was short, use fewer --workers"
            ) from None
        finally:
            for process in multiprocessing.active_children():
                process.kill()
            pool.shutdown(cancel_futures=True)


def per_line(function: Callable[[str], str]) -> Work:
    """Turn a function of one line into a function of several lines."""

    def work(text: bytes) -> bytes:
        lines = text.decode("utf-8").removesuffix("\n").split("\n")
        return "".join([f"{function(line)}\n" for line in lines]).encode("utf-8")

    return work
