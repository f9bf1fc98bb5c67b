"""Command-line tools, and the conventions they share.

A user's mistake ends a tool with one line, ``toolname: error: what is wrong and what to do``, and exit code 2; Ctrl-C
ends it with exit code 130. A traceback is left for bugs in the tool itself.
"""

from __future__ import annotations

import argparse
import functools
import logging
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NoReturn


class UserError(Exception):
    """A mistake of the user of a tool; its text is the one line they see."""


class ArgumentParser(argparse.ArgumentParser):
    """argparse's parser, whose errors are a :class:`UserError`: one line, without the usage text before it."""

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message} (see {self.prog} --help)")


def _unavailable() -> tuple[type[Exception], ...]:
    """What says that kernels cannot run, if they are in use: importing it here would import torch, too."""
    errors = sys.modules.get("pn_fairseq.errors")
    return (errors.Unavailable,) if errors else ()


def command(tool: str, *user_errors: type[Exception]) -> Callable[[Callable], Callable[..., int]]:
    """Decorate a tool's ``main(argv)`` so that it returns the exit code of the conventions above.

    Args:
        tool: the tool's name, as it begins its error lines.
        user_errors: exceptions, besides :class:`UserError` and :class:`pn_fairseq.errors.Unavailable`, that mean a
            mistake of the user and not a bug.
    """

    def decorate(body: Callable) -> Callable[..., int]:
        @functools.wraps(body)
        def main(argv: list[str] | None = None) -> int:
            try:
                code = body(argv) or 0
                sys.stdout.flush()
                return code
            except (UserError, *user_errors, *_unavailable()) as error:
                # A file name may hold a line break; the promise is one line.
                print(f"{tool}: error: {' '.join(str(error).splitlines())}", file=sys.stderr)
                return 2
            except KeyboardInterrupt:
                print(f"{tool}: interrupted", file=sys.stderr)
                return 130
            except BrokenPipeError:
                # The reader of the output (`| head`) is gone. Python would complain again when it flushes at exit.
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
                return 141

        return main

    return decorate


@contextmanager
def without_fairseqs_log(level: int = logging.WARNING) -> Iterator[None]:
    """Without what fairseq logs below ``level``, such as every file that it opens, and torch's and hydra's advice."""
    logger = logging.getLogger("fairseq")
    before = logger.level
    logger.setLevel(level)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(before)
