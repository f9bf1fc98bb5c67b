"""What the steps of the preparation share: files of text that are written whole or not at all, by all cores.

A line ends at a line feed and nowhere else; carriage returns and Unicode's other line ends are white space, as they are
for Moses' scripts. Every step turns each line into exactly one line, so that a file can be cut at any line end, and its
pieces worked on at the same time and put together in order: the result does not depend on the number of workers.
"""

import contextlib
import functools
import multiprocessing
import multiprocessing.pool
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO, NoReturn, TypeVar

from conventions import UserError, command
from tqdm import tqdm

#: Bytes of text that one worker takes at a time: large against the cost of handing it over (and of starting a Perl
#: script), small against a corpus, so that no core is idle at its end.
PIECE = 1 << 18


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


_work: Callable[[bytes], bytes] | None = None


def _start(make_work: Callable[[], Callable[[bytes], bytes]]) -> None:
    global _work
    # Ctrl-C goes to the whole group; the parent ends the workers.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    _work = make_work()


def _pool(workers: int, make_work: Callable) -> multiprocessing.pool.Pool:
    return multiprocessing.get_context("fork").Pool(workers, _start, (make_work,))


def _do(piece: Piece) -> tuple[bytes, int] | str:
    """The piece, worked on, and its lines; or what the user is told, since not every exception can leave a process."""
    try:
        text = read_piece(piece)
        result = _work(text)
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
        if (workers := min(workers, len(every))) > 1:
            results = stack.enter_context(_pool(workers, make_work)).imap(_do, every)
        else:
            global _work
            _work = make_work()
            results = map(_do, every)
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
    """What a function says of each piece of the texts, in no particular order, asked by ``workers`` processes."""
    every = [piece for path in texts for piece in pieces(path)]
    with contextlib.ExitStack() as stack:
        ask = functools.partial(_ask, function)
        if (workers := min(workers, len(every))) > 1:
            results = stack.enter_context(_pool(workers, lambda: None)).imap_unordered(ask, every)
        else:
            results = map(ask, every)
        yield from tqdm(results, total=len(every), desc=label, unit="piece", disable=not sys.stderr.isatty())


def _ask(function: Callable[[bytes], T], piece: Piece) -> T:
    return function(read_piece(piece))


def per_line(function: Callable[[str], str]) -> Callable[[bytes], bytes]:
    """A function of lines from a function of one line."""

    def work(text: bytes) -> bytes:
        lines = text.decode("utf-8").split("\n")
        lines.pop()  # what follows the last line feed: nothing
        return "".join([f"{function(line)}\n" for line in lines]).encode("utf-8")

    return work
