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
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path

from pn_fairseq.common.command import UserError, deferred_signals
from pn_fairseq.common.files import atomic_write

#: Bytes of text in a piece: large against the cost of handing it over (and of starting a Perl script), small against a
#: corpus, so that no core is idle at its end.
PIECE = 1 << 18

Work = Callable[[bytes], bytes]


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


def _serve(pipe: Connection, make: Callable[[], Work], every: Sequence) -> None:
    """A worker process: sends (result, None) or (None, what went wrong) for each of its pieces."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent ends its workers
    signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def end_with_parent() -> None:
        multiprocessing.parent_process().join()
        os._exit(1)

    threading.Thread(target=end_with_parent, daemon=True).start()
    work = make()
    for piece in every:
        try:
            answer = _apply(work, piece), None
        except (UserError, OSError, MemoryError) as error:
            answer = None, error
        pipe.send(answer)  # waits until the parent has taken what was sent before


def map_pieces(make: Callable[[], Work], every: Sequence, workers: int) -> Iterator:
    """The results of the function that ``make`` returns, in order of the pieces; each process calls ``make`` once.

    Each of N processes works on every N-th piece and has a pipe of its own. Not concurrent.futures: its workers share
    one pipe and its lock, and one that is killed while it sends a result (out of memory, a cancelled job) leaves the
    executor waiting for ever.
    """
    workers = min(workers, len(every))
    if workers <= 1:
        work = make()
        yield from (_apply(work, piece) for piece in every)
        return
    context = multiprocessing.get_context("fork")  # functions made in place cannot be pickled
    processes, pipes = [], []
    try:
        with deferred_signals():  # Python ignores what a handler raises in the middle of a fork
            for number in range(workers):
                here, there = context.Pipe(duplex=False)
                mine = every[number::workers]
                processes.append(context.Process(target=_serve, args=(there, make, mine), daemon=True))
                processes[-1].start()
                there.close()
                pipes.append(here)
        for number in range(len(every)):
            pipe = pipes[number % workers]
            try:
                while not pipe.poll(1):  # a signal that comes right before the wait is handled after it
                    pass
                result, error = pipe.recv()
            except (EOFError, OSError):
                raise UserError("a worker process was ended; if memory was short, use fewer --workers") from None
            if error:
                raise error
            yield result
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
    """Write each output file of the ``jobs``, (input, output), that is missing.

    ``make`` returns the function that turns some lines into as many; it is called once in each process.
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
