"""What the steps of the preparation share: files of text that are written whole or not at all, by all cores.

A line ends at a line feed and nowhere else; carriage returns and Unicode's other line ends are white space, as they are
for Moses' scripts. Every step turns each line into exactly one line, so that a file can be cut at any line end, and its
pieces worked on at the same time and put together in order: the result does not depend on the number of workers.
"""

import contextlib
import functools
import multiprocessing
import os
import signal
import sys
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import BinaryIO, NoReturn, TypeVar

from conventions import UserError, command
from tqdm import tqdm

#: Bytes of text that one worker takes at a time: large against the cost of handing it over (and of starting a Perl
#: script), small against a corpus, so that no core is idle at its end.
PIECE = 1 << 18

#: Pieces for each worker that are handed out before the first of their results is taken: enough that none waits for
#: work, few enough that the results which wait need little memory, whatever the size of the corpus.
AHEAD = 4


T = TypeVar("T")

Piece = tuple[Path, int, int]
"""A part of a file that begins and ends between lines: its path, begin and end in bytes."""


def step(name: str, body: Callable[[list[str] | None], None]) -> NoReturn:
    """Run a step's main function by the conventions of ``pn_fairseq.cli``, and leave."""
    # So that a step that is ended by its script removes what it has begun.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))

    def main(argv: list[str] | None) -> None:
        try:
            body(argv)
        except OSError as error:
            named = f"{error.filename}: " if error.filename else ""
            raise UserError(f"{named}{error.strerror or error}") from error

    sys.exit(command(name)(main)())


@contextlib.contextmanager
def whole_file(path: Path) -> Iterator[BinaryIO]:
    """A file for writing that takes its place when all is written; after an error there is none."""
    partial = path.with_name(f"{path.name}.partial")
    try:
        # Closing is part of writing: a full disk may show there first. OSErrors of writing name no file themselves.
        try:
            with partial.open("wb") as file:
                yield file
        except OSError as error:
            raise OSError(error.errno, error.strerror, error.filename or str(path)) from error
        os.replace(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def pieces(path: Path, size: int = PIECE) -> list[Piece]:
    """Cut a file at line ends: (path, begin, end) in bytes, each of about ``size``."""
    total = path.stat().st_size
    found, begin = [], 0
    with path.open("rb") as file:
        while begin < total:
            file.seek(min(begin + size, total) - 1)
            file.readline()
            end = file.tell()
            found.append((path, begin, end))
            begin = end
    return found


def read_piece(piece: Piece) -> bytes:
    """The lines of a piece; the last line of a file gets its line feed if it has none."""
    path, begin, end = piece
    with path.open("rb") as file:
        file.seek(begin)
        text = file.read(end - begin)
    return text if text.endswith(b"\n") else text + b"\n"


def _serve(pipe: Connection, other_end: Connection, make: Callable[[], Callable[[Piece], T]]) -> None:
    """A worker: takes pieces from the pipe and answers, until the other end is closed."""
    # Ctrl-C goes to the whole group; the parent ends the workers.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    other_end.close()
    function = make()
    with contextlib.suppress(EOFError, ConnectionError):
        while True:
            number, piece = pipe.recv()
            pipe.send((number, function(piece)))


def _in_order(
    make: Callable[[], Callable[[Piece], T]], every: Sequence[Piece], workers: int
) -> Generator[T, None, None]:
    """What a function says of each piece, in their order; ``make`` makes the function in each of the processes."""
    workers = min(workers, len(every))
    if workers <= 1:
        yield from map(make(), every)
        return
    # Not multiprocessing's pool: it waits for ever for a worker that was killed, be it for lack of memory or together
    # with this process, by its group. A pipe for each worker has no locks, and ends with it.
    context = multiprocessing.get_context("fork")
    processes, idle, busy = [], [], []
    left = deque(enumerate(every))
    done: dict[int, T] = {}
    try:
        for _ in range(workers):
            here, there = context.Pipe()
            process = context.Process(target=_serve, args=(there, here, make), daemon=True)
            process.start()
            processes.append(process)
            there.close()
            idle.append(here)
        for wanted in range(len(every)):
            try:
                while wanted not in done:
                    while idle and left and left[0][0] < wanted + AHEAD * workers:
                        busy.append(idle.pop())
                        busy[-1].send(left.popleft())
                    for pipe in wait(busy):
                        number, done[number] = pipe.recv()
                        busy.remove(pipe)
                        idle.append(pipe)
            except (EOFError, OSError) as error:
                raise UserError(
                    "a worker process was ended; if there was too little memory, use fewer --workers"
                ) from error
            yield done.pop(wanted)
    finally:
        for process in processes:
            process.kill()
        for process in processes:
            process.join()


def _do(work: Callable[[bytes], bytes], piece: Piece) -> tuple[bytes, int] | str:
    """The piece, worked on, and its lines; or what the user is told, since not every exception can leave a process."""
    try:
        text = read_piece(piece)
        result = work(text)
    except UserError as error:
        return str(error)
    except OSError as error:
        return f"{error.filename or piece[0]}: {error.strerror or error}"
    before, after = text.count(b"\n"), result.count(b"\n")
    if before != after:
        return f"{piece[0]}: {before} lines went into a step and {after} came out: sentences were lost"
    return result, before


def transform(
    jobs: Sequence[tuple[Path, Path]],
    make_work: Callable[[], Callable[[bytes], bytes]],
    workers: int,
    label: str,
) -> int:
    """Turn each input file into its output file, line by line, with ``workers`` processes; returns the lines done.

    ``make_work`` is called once in each process and returns the function that turns some lines into as many.
    """
    cut = {output: pieces(source) for source, output in jobs}
    every = [piece for parts in cut.values() for piece in parts]
    done = 0
    with contextlib.ExitStack() as stack:
        results = _in_order(lambda: functools.partial(_do, make_work()), every, workers)
        stack.enter_context(contextlib.closing(results))
        bytes_in_all = sum(end - begin for _, begin, end in every)
        bar = stack.enter_context(
            tqdm(total=bytes_in_all, desc=label, unit="B", unit_scale=True, disable=not sys.stderr.isatty())
        )
        for output, parts in cut.items():
            with whole_file(output) as file:
                for _, begin, end in parts:
                    result = next(results)
                    if isinstance(result, str):
                        raise UserError(result)
                    text, lines = result
                    file.write(text)
                    done += lines
                    bar.update(end - begin)
    return done


def reduce(texts: Sequence[Path], function: Callable[[bytes], T], workers: int, label: str) -> Iterator[T]:
    """What a function says of each piece of the texts, in their order, asked by ``workers`` processes."""
    every = [piece for path in texts for piece in pieces(path)]
    results = _in_order(lambda: lambda piece: function(read_piece(piece)), every, workers)
    with contextlib.closing(results):
        yield from tqdm(results, total=len(every), desc=label, unit="piece", disable=not sys.stderr.isatty())


def per_line(function: Callable[[str], str]) -> Callable[[bytes], bytes]:
    """A function of lines from a function of one line."""

    def work(text: bytes) -> bytes:
        lines = text.decode("utf-8").split("\n")
        lines.pop()  # what follows the last line feed: nothing
        return "".join([f"{function(line)}\n" for line in lines]).encode("utf-8")

    return work
