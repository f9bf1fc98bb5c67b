"""A mistake of the user that shows wherever norms are used, and how fairseq's own programs end on it. Without torch."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn


class Unavailable(RuntimeError):
    """An implementation of the kernels was asked for that cannot run here; the message says why and what to do."""


def fairseq_program() -> str | None:
    """The name of the program of fairseq's that runs, such as ``fairseq-train``; None in a program of somebody else."""
    program = Path(sys.argv[0]) if sys.argv else Path()
    if program.name.startswith("fairseq-"):
        return program.name
    # A script that starts one of them, as scripts/lib/worker.py does, has imported its main function.
    main = getattr(sys.modules["__main__"], "cli_main", None)
    package, _, module = getattr(main, "__module__", "").rpartition(".")
    if program.parent.name == "fairseq_cli":  # python -m
        package, module = program.parent.name, program.stem
    return f"fairseq-{module.replace('_', '-')}" if package == "fairseq_cli" else None


def end_fairseq(reason: object) -> NoReturn:
    """End a program of fairseq's in one line, by the conventions of :mod:`pn_fairseq.cli`."""
    print(f"{fairseq_program() or 'fairseq-train'}: error: {reason}", file=sys.stderr)
    raise SystemExit(2)


@contextmanager
def ending_fairseq() -> Iterator[None]:
    """End a program of fairseq's on :class:`Unavailable`, which goes on to the caller in any other program."""
    try:
        yield
    except Unavailable as error:
        if fairseq_program() is None:
            raise
        end_fairseq(error)
