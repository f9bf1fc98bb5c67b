"""Text by all cores: files are cut at line ends, processes work on the pieces, the results are joined in order.

A line ends at a line feed and nowhere else; carriage returns and Unicode's other line ends are white space, as they are
for Moses' scripts. Every function turns a line into exactly one line, so the result does not depend on the number of
processes.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path

from pn_fairseq.common.command import UserError, deferred_signals
from pn_fairseq.common.files import atomic_write, named_errors, scratch_folder

#: Bytes of text in a piece: large against the cost of handing it over (and of starting a Perl script), small against a
#: corpus, so that no core is idle at its end.
PIECE = 1 << 18

#: Some lines -> as many lines.
Work = Callable[[bytes], bytes]


def progress(iterable=None, **options):
    """tqdm's progress bar, on a terminal only."""
    from tqdm import tqdm  # takes longer to import than most steps

    tqdm.monitor_interval = 0  # no thread of its own: the processes of the pool are forked
    return tqdm(iterable, disable=not sys.stderr.isatty(), **options)


def pieces(path: Path) -> list[tuple[Path, int, int]]:
    """Cut a file at line ends: (path, begin, end) in bytes."""
    total = path.stat().st_size
    cuts = [0]
    with path.open("rb") as file:
        while cuts[-1] < total:
            file.seek(min(cuts[-1] + PIECE, total) - 1)
            file.readline()
            cuts.append(file.tell())
    return [(path, begin, end) for begin, end in zip(cuts, cuts[1:], strict=False)]


@dataclass(frozen=True)
class Job:
    """A file to make: each line of ``source``, changed by ``work``."""

    source: Path
    output: Path
    work: Work


def _process(work: Work, piece: tuple[Path, int, int], output: Path) -> None:
    """Write what ``work`` makes of a piece. The last line of a file gets its line feed if it has none."""
    path, begin, end = piece
    with path.open("rb") as file:
        file.seek(begin)
        text = file.read(end - begin)
    text = text if text.endswith(b"\n") else text + b"\n"
    try:
        result = work(text)
    except UserError as error:
        raise UserError(f"{path}: {error}") from None
    before, after = text.count(b"\n"), result.count(b"\n")
    if before != after:
        raise UserError(f"{path}: {before} lines went into a step and {after} came out: sentences were lost")
    with named_errors(output):
        output.write_bytes(result)


def _start_worker(tasks: Sequence[tuple]) -> None:
    global _tasks
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent ends its workers
    signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def end_with_parent() -> None:
        multiprocessing.parent_process().join()
        os._exit(1)

    threading.Thread(target=end_with_parent, daemon=True).start()
    _tasks = tasks


def _process_task(number: int) -> None:
    _process(*_tasks[number])


def _process_all(tasks: Sequence[tuple], workers: int) -> Iterator[None]:
    """Call :func:`_process` for all tasks, its arguments; yields when the next one, in their order, is done."""
    if min(workers, len(tasks)) <= 1:
        yield from (_process(*task) for task in tasks)
        return
    # The results are files: a worker that is killed while it sends a large message would leave the pool waiting. The
    # processes are forked, so that they have the functions, most of which cannot be pickled.
    fork = multiprocessing.get_context("fork")
    pool = ProcessPoolExecutor(min(workers, len(tasks)), fork, _start_worker, (tasks,))
    try:
        with deferred_signals():  # Python ignores what a handler raises in the middle of a fork
            futures = [pool.submit(_process_task, number) for number in range(len(tasks))]
        for future in futures:
            while not wait([future], timeout=1).done:  # a signal that comes right before the wait is handled after it
                pass
            yield future.result()
    except BrokenProcessPool:
        raise UserError("a worker process was ended; if memory was short, use fewer --workers") from None
    finally:
        with deferred_signals():
            for process in multiprocessing.active_children():
                process.kill()
            pool.shutdown(cancel_futures=True)


def transform(jobs: Sequence[Job], workers: int, label: str) -> None:
    """Make the output files that are missing."""
    jobs = [job for job in jobs if not job.output.exists()]
    if not jobs:
        return
    with scratch_folder(jobs[0].output.parent / "pieces.partial") as folder:
        cut = [(job, pieces(job.source)) for job in jobs]
        every = [(job.work, piece) for job, parts in cut for piece in parts]
        tasks = [(*task, folder / str(number)) for number, task in enumerate(every)]
        results, files = _process_all(tasks, workers), iter([file for *_, file in tasks])
        with contextlib.closing(results), progress(total=len(tasks), desc=label, unit="piece") as bar:
            for job, parts in cut:
                job.output.parent.mkdir(parents=True, exist_ok=True)
                with atomic_write(job.output) as output:
                    for _ in parts:
                        next(results)
                        result = next(files)
                        output.write(result.read_bytes())
                        result.unlink()
                        bar.update()


def per_line(function: Callable[[str], str]) -> Work:
    """A function of lines from a function of one line."""

    def work(text: bytes) -> bytes:
        lines = text.decode("utf-8").removesuffix("\n").split("\n")
        return "".join([f"{function(line)}\n" for line in lines]).encode("utf-8")

    return work
