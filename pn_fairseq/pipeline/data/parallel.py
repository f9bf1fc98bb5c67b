"""Text by all cores: files are cut at line ends, processes work on the pieces, the results are joined in order.

A line ends at a line feed and nowhere else; carriage returns and Unicode's other line ends are white space, as they are
for Moses' scripts. Every function turns a line into exactly one line, so the result does not depend on the number of
processes.
"""

from __future__ import annotations

import contextlib
import functools
import multiprocessing
import os
import signal
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import TypeVar

from pn_fairseq.pipeline.command import UserError
from pn_fairseq.pipeline.files import atomic_write

#: Bytes of text in a piece: large against the cost of handing it over (and of starting a Perl script), small against a
#: corpus, so that no core is idle at its end.
PIECE = 1 << 18

#: Pieces for each worker that are handed out before the first of their results is taken: enough that none waits for
#: work, few enough that the results which wait need little memory.
AHEAD = 4

T = TypeVar("T")
Work = Callable[[bytes], T]


def progress(iterable=None, **options):
    """tqdm's progress bar, on a terminal only."""
    from tqdm import tqdm  # takes longer to import than most steps

    return tqdm(iterable, disable=not sys.stderr.isatty(), **options)


def pieces(path: Path) -> list[tuple[Path, int, int]]:
    """Cut a file at line ends: (path, begin, end) in bytes."""
    total = path.stat().st_size
    found, begin = [], 0
    with path.open("rb") as file:
        while begin < total:
            file.seek(min(begin + PIECE, total) - 1)
            file.readline()
            end = file.tell()
            found.append((path, begin, end))
            begin = end
    return found


def _read(piece: tuple[Path, int, int]) -> bytes:
    """The lines of a piece. The last line of a file gets its line feed if it has none."""
    path, begin, end = piece
    with path.open("rb") as file:
        file.seek(begin)
        text = file.read(end - begin)
    return text if text.endswith(b"\n") else text + b"\n"


def _apply(work: Work, piece):
    try:
        return work(_read(piece))
    except UserError as error:
        raise UserError(f"{piece[0]}: {error}") from None


def _serve(pipe: Connection, make: Callable[[], Work]) -> None:
    """A worker process: answers each piece with (its result, None) or (None, what went wrong)."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent ends its workers
    signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def end_with_parent() -> None:
        multiprocessing.parent_process().join()
        os._exit(1)

    threading.Thread(target=end_with_parent, daemon=True).start()
    work = make()
    with contextlib.suppress(EOFError, ConnectionError):
        while True:
            number, piece = pipe.recv()
            try:
                answer = _apply(work, piece), None
            except (UserError, OSError, MemoryError) as error:
                answer = None, error
            pipe.send((number, *answer))


@contextlib.contextmanager
def _signals_later() -> Iterator[None]:
    """Handle SIGINT and SIGTERM after the block: Python ignores what a handler raises in the middle of a fork."""
    arrived = []
    handlers = {
        number: signal.signal(number, lambda number, _: arrived.append(number))
        for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        for number in arrived[:1]:
            signal.raise_signal(number)


def map_pieces(make: Callable[[], Work], every: Sequence, workers: int) -> Iterator:
    """What the function that ``make`` returns says of each piece, in order; it is made once in each process.

    Own processes with a pipe each, and not concurrent.futures: its workers share one pipe and its lock, and one that is
    killed while it sends a result (out of memory, a cancelled job) leaves the executor waiting for ever.
    """
    if min(workers, len(every)) <= 1:
        work = make()
        yield from (_apply(work, piece) for piece in every)
        return
    context = multiprocessing.get_context("fork")  # functions made in place cannot be pickled
    processes, idle, busy = [], [], []
    left = deque(enumerate(every))
    done = {}
    try:
        with _signals_later():
            for _ in range(min(workers, len(every))):
                here, there = context.Pipe()
                processes.append(context.Process(target=_serve, args=(there, make), daemon=True))
                processes[-1].start()
                there.close()
                idle.append(here)
        for wanted in range(len(every)):
            while wanted not in done:
                while idle and left and left[0][0] < wanted + AHEAD * len(processes):
                    busy.append(idle.pop())
                    busy[-1].send(left.popleft())
                # The timeout: a signal that comes right before the wait is handled after it.
                for pipe in wait(busy, timeout=1):
                    number, *done[number] = pipe.recv()
                    busy.remove(pipe)
                    idle.append(pipe)
            result, error = done.pop(wanted)
            if error:
                raise error
            yield result
    except (EOFError, ConnectionError):
        raise UserError("a worker process was ended; if there was too little memory, use fewer --workers") from None
    finally:
        for process in processes:
            process.kill()
        for process in processes:
            process.join()


def _as_many_lines(work: Work, text: bytes) -> bytes:
    result = work(text)
    before, after = text.count(b"\n"), result.count(b"\n")
    if before != after:
        raise UserError(f"{before} lines went into a step and {after} came out: sentences were lost")
    return result


def transform(jobs: Sequence[tuple[Path, Path]], make: Callable[[], Work], workers: int, label: str) -> None:
    """Write each output file that is missing from its input file.

    Args:
        jobs: (input, output) of each file.
        make: returns the function that turns some lines into as many; called once in each process.
        workers: number of processes.
        label: name of the step in the progress bar on a terminal.
    """
    cut = [(output, pieces(source)) for source, output in jobs if not output.exists()]
    every = [piece for _, parts in cut for piece in parts]
    results = map_pieces(lambda: functools.partial(_as_many_lines, make()), every, workers)
    bar = progress(total=len(every), desc=label, unit="piece")
    with contextlib.closing(results), bar:
        for output, parts in cut:
            output.parent.mkdir(parents=True, exist_ok=True)
            with atomic_write(output) as file:
                for _ in parts:
                    file.write(next(results))
                    bar.update()


def per_line(function: Callable[[str], str]) -> Callable[[bytes], bytes]:
    """A function of lines from a function of one line."""

    def work(text: bytes) -> bytes:
        lines = text.decode("utf-8").removesuffix("\n").split("\n")
        return "".join([f"{function(line)}\n" for line in lines]).encode("utf-8")

    return work
