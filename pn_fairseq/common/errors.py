"""A user's mistakes that appear wherever norms are used, and how they end fairseq's own programs.

This module imports no torch.
"""

import difflib
import importlib.util
import sys
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType


class Unavailable(RuntimeError):
    """A requested implementation of the kernels cannot run here; the message says why and what to
    do.
    """


class FoldedModelError(RuntimeError):
    """Raised if a folded model is trained, or if its weights are loaded into a model that is not
    folded.

    Args:
        file: the checkpoint of the folded model, for the message.
    """

    def __init__(self, file: str | None = None):
        super().__init__(
            f"{file or 'the model'} was folded by pn fold, for decoding only; to train, use the "
            "checkpoint that it was folded from"
        )


def fairseq_program() -> str | None:
    """The outermost fairseq program on the call stack, such as ``fairseq-train``; None in any other
    program.
    """
    frame, program = sys._getframe(), None
    while frame is not None:
        if frame.f_globals.get("__package__") == "fairseq_cli":
            program = f"fairseq-{Path(frame.f_code.co_filename).stem.replace('_', '-')}"
        frame = frame.f_back
    return program


@contextmanager
def one_line_errors(*errors: type[Exception]) -> Iterator[None]:
    """On one of ``errors``, end a fairseq program with one line and exit code 2. In any other
    program the error propagates to the caller.
    """
    try:
        yield
    except errors as error:
        program = fairseq_program()
        if program is None:
            raise
        print(f"{program}: error: {' '.join(str(error).split())}", file=sys.stderr)
        raise SystemExit(2) from error


def most_similar(name: str, known: Iterable[str]) -> str | None:
    """The most similar of the ``known`` names; None if none is similar."""
    cutoff = 0.5 if len(name) < 4 else 0.6  # one letter of two may be wrong
    similar = difflib.get_close_matches(name, list(known), n=1, cutoff=cutoff)
    return similar[0] if similar else None


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """``", did you mean 'X'?"`` for the most similar of the ``known`` names, or an empty string
    if none is similar.
    """
    meant = most_similar(name, known)
    return "" if meant is None else f", did you mean {meant!r}?"


def unknown(kind: str, name: str, known: Iterable[str]) -> str:
    """The message about a name that does not exist, with the most similar name and all existing
    names.
    """
    known = list(known)
    return (
        f"unknown {kind} {name!r}{did_you_mean(name, known)}; there are "
        f"{', '.join(known) or 'none'}"
    )


def run_file(file: Path, name: str) -> ModuleType:
    """Run a user's Python file as the module ``name``.

    Raises:
        ValueError: the file raises an error; the message states the line, the kind and the text.
    """
    spec = importlib.util.spec_from_file_location(name, file)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        frames = traceback.extract_tb(error.__traceback__)
        lines = [f"line {frame.lineno}: " for frame in frames if frame.filename == str(file)]
        where = "".join(lines[-1:])  # empty for a syntax error, whose text states the line
        raise ValueError(f"{where}{type(error).__name__}: {error}") from error
    return module


def error_chain(error: BaseException | None) -> Iterator[BaseException]:
    """The error and the errors that led to it, at most 20 because causes can form a circle."""
    for _ in range(20):
        if error is None:
            return
        yield error
        error = error.__cause__ or error.__context__


class NotFiniteError(FloatingPointError):
    """A training run ended because its loss or its gradients are NaN or infinite.

    Args:
        update: the number of the optimizer update, from 1.
        loss_scale: the factor of the loss under fp16; None without fp16.
        where: the module in which the first such number was found, in words.
    """

    def __init__(self, update: int, loss_scale: float | None = None, where: str = ""):
        scale = "" if loss_scale is None else f" with the loss scale {loss_scale:g}"
        super().__init__(
            f"the loss or its gradients are not finite in update {update}{scale} "
            f"({where or 'no module was found'}); try a smaller learning rate, a longer warm-up, "
            "another precision (float32, bf16), or other decays of the norms' running statistics"
        )
