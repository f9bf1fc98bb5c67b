"""Conventions of all command-line tools.

A user error ends ``pn VERB`` with one line, ``pn VERB: error: what is wrong and what to do``, and exit code 2. Ctrl-C
ends it with exit code 130, SIGTERM with 143, each with one line. A traceback means a bug in the tool.
"""

from __future__ import annotations

import argparse
import logging
import os
import re
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NoReturn

from pn_fairseq import __version__
from pn_fairseq.common.errors import Unavailable, did_you_mean


class UserError(Exception):
    """A mistake of the user. The text is one line: what is wrong, where, what to do."""


class _HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Fills a text of one line, and leaves the lines of a longer one."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        formatter = argparse.HelpFormatter if "\n" not in text.strip() else argparse.RawDescriptionHelpFormatter
        return formatter._fill_text(self, text, width, indent)


class ArgumentParser(argparse.ArgumentParser):
    """argparse's parser; its errors are a :class:`UserError` instead of the usage text."""

    def __init__(self, **options):
        super().__init__(**{"formatter_class": _HelpFormatter, **options})

    def parse_known_args(self, args=None, namespace=None):
        if "--version" not in self._option_string_actions:
            self.add_argument("--version", action="version", version=f"pn_fairseq {__version__}")
        self._words = list(sys.argv[1:] if args is None else args)
        return super().parse_known_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        if (
            re.search("(is|are) required$", message) or "are required:" in message
        ):  # argparse looks for missing arguments before unknown options
            options = [word.partition("=")[0] for word in self._words if word.startswith("--")]
            known = list(self._option_string_actions)
            unknown = [each for each in options if not any(option.startswith(each) for option in known)]
            message = f"unrecognized arguments: {unknown[0]}" if unknown else message
        if unknown := re.match("unrecognized arguments: (--[^ =]+)", message):
            message += did_you_mean(unknown[1], self._option_string_actions)
        raise UserError(f"{message} (see {self.prog} --help)")


def whole(text: str) -> int:
    """The type of an option that counts something."""
    if not re.fullmatch("[1-9][0-9]{0,11}", text):
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 1, not '{text}'")
    return int(text)


def whole_number(name: str, value: object, least: int = 1, most: int | None = None) -> int:
    """A setting or an environment variable that counts something."""
    text = str(value)
    if not re.fullmatch(r"\d{1,12}", text) or int(text) < least or (most and int(text) > most):
        limits = f"from {least} to {most}" if most else f"of at least {least}"
        raise UserError(f"{name} must be a whole number {limits}, not '{text}'")
    return int(text)


def say(step: str, text: str) -> None:
    """A line of progress."""
    print(f"[{step}] {text}", file=sys.stderr, flush=True)


class Interrupted(BaseException):
    """SIGINT or SIGTERM arrived. Raised from the signal handler, so ``finally`` blocks run."""

    def __init__(self, number: int):
        super().__init__(number)
        self.exit_code = 128 + number


def handle_signals() -> None:
    """Turn SIGINT and SIGTERM into :class:`Interrupted`, also where the parent ignored SIGINT (a background job)."""

    owner = os.getpid()

    def interrupt(number, _):
        if os.getpid() != owner:
            os._exit(128 + number)  # a forked process, such as one that loads data
        signal.signal(number, signal.SIG_IGN)  # a second signal must not interrupt the clean-up
        raise Interrupted(number)

    def send_again(ignored) -> None:
        """Python ignores what is raised in a finalizer, and every import runs one: without this the signal is lost."""
        if not isinstance(ignored.exc_value, Interrupted):
            return sys.__unraisablehook__(ignored)
        (number,) = ignored.exc_value.args
        signal.signal(number, interrupt)
        timer = threading.Timer(0.1, os.kill, (owner, number))  # when the finalizer has ended
        timer.daemon = True
        timer.start()

    sys.unraisablehook = send_again
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, interrupt)


@contextmanager
def deferred_signals() -> Iterator[None]:
    """Signals that arrive in the block act at its end: a process that is being started must not be left behind."""
    arrived: list[int] = []
    before = {
        number: signal.signal(number, lambda number, _: arrived.append(number))
        for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        for number in arrived[:1]:
            signal.raise_signal(number)


def run(tool: str, body: Callable[[], int | None], *user_errors: type[Exception]) -> int:
    """Run ``body`` and return the exit code of the conventions above.

    Args:
        tool: name of the tool in its error lines.
        body: returns an exit code; None means 0.
        user_errors: exceptions that mean a user error, besides :class:`UserError`, ``Unavailable`` and OSError.
    """
    try:
        code = body() or 0
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        # The reader of the output (`| head`) has closed it. Python would complain again when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except (UserError, Unavailable, OSError, *user_errors) as error:
        text = f"{error.filename}: {error.strerror}" if getattr(error, "filename", None) else str(error)
        # A file name may hold a line break; the promise is one line.
        print(f"{tool}: error: {' '.join(text.splitlines())}", file=sys.stderr)
        return 2
    except (KeyboardInterrupt, Interrupted) as error:
        if "PN_FAIRSEQ_STEP" not in os.environ:  # else the script that runs this as one of its steps says so
            print(f"{tool}: interrupted; run the same command again to resume", file=sys.stderr)
        return getattr(error, "exit_code", 130)
    except ModuleNotFoundError as error:
        if str(error.name).startswith("pn_fairseq"):
            raise
        advice = "in the checkout: pip install --no-build-isolation '.[fairseq]'"
        print(f"{tool}: error: {error.name} is not installed ({advice})", file=sys.stderr)
        return 2
    except MemoryError:
        print(f"{tool}: error: there is not enough memory; use fewer processes or a larger machine", file=sys.stderr)
        return 2


@contextmanager
def without_fairseqs_log(level: int = logging.WARNING) -> Iterator[None]:
    """Hide what fairseq logs below ``level``, and the warnings of torch and hydra."""
    logger = logging.getLogger("fairseq")
    before = logger.level
    logger.setLevel(level)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(before)
