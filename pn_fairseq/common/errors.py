"""A user's mistakes that show wherever norms are used, and how fairseq's own programs end on them. Without torch."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class Unavailable(RuntimeError):
    """An implementation of the kernels was asked for that cannot run here; the message says why and what to do."""


def fairseq_program() -> str | None:
    """The program of fairseq that is on the call stack, such as ``fairseq-train``; None in any other program."""
    frame, program = sys._getframe(), None
    while frame is not None:
        if frame.f_globals.get("__package__") == "fairseq_cli":
            program = f"fairseq-{Path(frame.f_code.co_filename).stem.replace('_', '-')}"
        frame = frame.f_back
    return program


@contextmanager
def one_line_errors(*errors: type[Exception]) -> Iterator[None]:
    """End a program of fairseq with one line and exit code 2 on one of ``errors``; a caller of any other gets it."""
    try:
        yield
    except errors as error:
        program = fairseq_program()
        if program is None:
            raise
        print(f"{program}: error: {' '.join(str(error).split())}", file=sys.stderr)
        raise SystemExit(2) from error
