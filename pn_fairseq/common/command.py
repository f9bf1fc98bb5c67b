"""Conventions of all command-line tools.

A user error ends ``pn VERB`` with one line, ``pn VERB: error: what is wrong and what to do``, and
exit code 2. Ctrl-C ends it with exit code 130, SIGTERM with 143, each with one line. A traceback
means a bug in the tool.
"""

from __future__ import annotations

import argparse
import logging
import os
import re
import shlex
import signal
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import zip_longest
from pathlib import Path
from typing import NoReturn

from pn_fairseq import __version__
from pn_fairseq.common.errors import Unavailable, did_you_mean


class UserError(Exception):
    """A mistake of the user. The text is one line: what is wrong, where, what to do."""


class _HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Wraps one-line text, and keeps the line breaks of longer text."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        formatter = (
            argparse.HelpFormatter
            if "\n" not in text.strip()
            else argparse.RawDescriptionHelpFormatter
        )
        return formatter._fill_text(self, text, width, indent)


#: Options of fairseq's programs and scripts -> our equivalent options.
FAIRSEQ = {
    "--num-update-checkpoints": "--last",
    "--num-epoch-checkpoints": "--last",
    "--average-last": "--last",
    "--save-dir": "--run",
    "--distributed-world-size": "--ranks",
    "--distributed-num-procs": "--ranks",
    "--gen-subset": "--subset",
    "--path": "--checkpoint",
    "--results-path": "--output",
    "--source-lang": "--source",
    "--src-lang": "--source",
    "--src": "--source",
    "-s": "--source",
    "--target-lang": "--target",
    "--tgt-lang": "--target",
    "--tgt": "--target",
    "--trg": "--target",
    "-t": "--target",
    "--destdir": "--dest",
    "--trainpref": "--corpus",
    "--srcdict": "--like",
    "--tgtdict": "--like",
    "--testpref": "--test",
    "--sys": "--hyp",
}
#: Option of fairseq that names files without their language, as in text/train -> the part of this
#: path that our option expects.
PREFIXES = {"--trainpref": "parent", "--testpref": "name"}


#: Options of fairseq's programs that no command needs.
NOT_NEEDED = {
    "--remove-bpe": "subwords are always joined",
    "--post-process": "subwords are always joined",
    "--user-dir": "pn loads its models itself",
    "--sacrebleu": "pn score computes sacreBLEU",
    "--scoring": "pn score computes the scores",
}


class ArgumentParser(argparse.ArgumentParser):
    """argparse's parser, which raises a :class:`UserError` instead of printing the usage text.

    ``setting_of`` receives an unknown option, the word after it and all words, and returns the
    setting ``key=value`` that the option means.
    """

    def __init__(
        self, setting_of: Callable[[str, str | None, list[str]], str] | None = None, **options
    ):
        self._setting_of = setting_of
        super().__init__(**{"formatter_class": _HelpFormatter, **options})

    def parse_known_args(self, args=None, namespace=None):
        if "--version" not in self._option_string_actions:
            self.add_argument("--version", action="version", version=f"pn_fairseq {__version__}")
        self._words = list(sys.argv[1:] if args is None else args)
        return super().parse_known_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        missing = re.search("(is|are) required$", message) or "are required:" in message
        if missing:  # argparse looks for missing arguments before unknown options
            for word in self._words:
                option = word.partition("=")[0]
                if re.match("--?[a-z]", option) and not self._is_known(option):
                    message = f"unrecognized arguments: {option}"
                    break
        unknown = re.match("unrecognized arguments: (--?[a-z][^ =]*)", message)
        setting = re.match(r"unrecognized arguments: ([a-z][\w.]*)=(\S+)", message)
        choice = re.fullmatch(
            r"argument (.+): invalid choice: '(.*?)' \(choose from (.*)\)", message
        )
        if unknown and self._chosen():
            self._chosen().error(message)
        elif unknown:
            message = f"unrecognized arguments: {unknown[1]}{self._advice(unknown[1])}"
        elif setting:
            message = f"unrecognized arguments: {setting[0].partition(': ')[2]}"
            message += self._option_of_setting(*setting.groups())
        elif choice:
            argument, chosen, listed = choice.groups()
            known = listed.replace("'", "").split(", ")
            message = (
                f"argument {argument}: unknown '{chosen}' (choose from "
                f"{', '.join(known)}){did_you_mean(chosen, known)}"
            )
        raise UserError(f"{message} (see {self.prog} --help)")

    def _chosen(self) -> ArgumentParser | None:
        """The parser of the command that the words choose; None if they choose none."""
        for action in self._actions:
            if isinstance(action, argparse._SubParsersAction):
                for word in self._words:
                    if word in action.choices:
                        return action.choices[word]
        return None

    def _is_known(self, option: str) -> bool:
        """Whether an option, possibly abbreviated, exists."""
        return any(name.startswith(option) for name in self._option_string_actions)

    def _advice(self, option: str) -> str:
        """Advice about an unknown option, with the exact words to type, or an empty text."""
        meant = self._ours() if option in FAIRSEQ else []
        if meant:
            return f", did you mean '{' '.join(meant)}'?"
        if self._setting_of is not None:
            setting = self._setting_of(option, self._value_of(option), self._words)
            if setting:
                return f", did you mean '{setting}'?"
        if option in NOT_NEEDED:
            return f": leave it out, {NOT_NEEDED[option]}"
        if not option.startswith("--"):  # any two single letters count as similar
            return ""
        return did_you_mean(option, self._option_string_actions)

    def _option_of_setting(self, setting: str, value: str) -> str:
        """The option of this program that corresponds to a setting of pn train."""
        option = f"--{setting.rpartition('.')[2].replace('_', '-')}"
        option = FAIRSEQ.get(option, option)
        if option in self._option_string_actions:
            return f", did you mean '{option} {value}'?"
        return ", a setting of 'pn train'"

    def _ours(self) -> list[str]:
        """Our equivalents of fairseq's options among the words of the command line."""
        words = []
        for option in (word.partition("=")[0] for word in self._words):
            ours = FAIRSEQ.get(option)
            if ours in self._option_string_actions:
                value = self._value_of(option)
                if value is not None and option in PREFIXES:
                    value = getattr(Path(value), PREFIXES[option])
                words += [ours] if value is None else [ours, str(value)]
        return words

    def _value_of(self, option: str) -> str | None:
        """The text after an option among the words; None if an option or nothing follows it."""
        value = None
        for word, following in zip_longest(self._words, self._words[1:]):
            name, equals, after = word.partition("=")
            if name == option:
                value = after if equals else following
        return None if value is None or re.match("--?[a-z]", value) else value


def refuse_blanks(settings: Sequence[str]) -> None:
    """Refuse a setting that was typed as ``KEY = VALUE``, ``KEY =VALUE`` or ``KEY= VALUE``."""
    for number, key in enumerate(settings[:-1]):
        following = settings[number + 1]
        if not (key.endswith("=") or following.startswith("=")):
            continue
        parts = settings[number : number + (3 if following == "=" else 2)]
        joined = "".join(parts)
        if re.fullmatch("[^=]+=[^=]+", joined):
            raise UserError(f"a setting has no blanks around '=', did you mean '{joined}'?")


def check_settings(
    settings: Sequence[str], words: Sequence[str] = (), lists: Iterable[str] = ()
) -> None:
    """Refuse arguments that are not ``key=value`` in hydra's syntax.

    Args:
        words: the whole command line.
        lists: options whose value is a comma-separated list, which the user may have separated by
            blanks.
    """
    refuse_blanks(settings)
    for setting in settings:
        if "=" in setting or setting.startswith("~"):
            continue
        for option in lists:
            parts = _values_after(option, words)
            if setting in parts[1:]:
                meant = f"did you mean '{option} {','.join(parts)}'?"
                raise UserError(f"unexpected argument '{setting}', {meant} (a list has commas)")
        raise UserError(f"unexpected argument '{setting}': settings are key=value (see --help)")


def _values_after(option: str, words: Sequence[str]) -> list[str]:
    """The words after ``option`` up to the next option or setting; none if it is not given."""
    values: list[str] = []
    if option in words:
        for word in words[words.index(option) + 1 :]:
            if word.startswith("-") or "=" in word:
                break
            values.append(word)
    return values


def whole(text: str) -> int:
    """The type of an option that counts something."""
    if not re.fullmatch("[1-9][0-9]{0,11}", text):
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 1, not '{text}'")
    return int(text)


def whole_number(name: str, value: object, least: int = 1) -> int:
    """The value of a setting that counts something."""
    text = str(value)
    if not re.fullmatch(r"\d{1,12}", text) or int(text) < least:
        raise UserError(f"{name} must be a whole number of at least {least}, not '{text}'")
    return int(text)


def absolute(text: str | Path) -> Path:
    """An absolute path without ``.`` and ``..``, which stays valid in another folder. Also the type
    of an option that names a path.
    """
    if not str(text):
        raise argparse.ArgumentTypeError("must name a file or folder, not ''")
    path = Path(text).absolute()
    # a symbolic link keeps its name, unless the path leaves it again
    return path.resolve() if ".." in path.parts else path


def split_paths(text: str) -> list[str]:
    """The paths in the value of an option ``FILE[,FILE]``; an empty one, which no file has, if
    there is none.
    """
    return [path for path in text.split(",") if path] or [""]


def checked(check, metavar: str, note: str = "") -> dict:
    """argparse's arguments for a flag that keeps its text, unless ``check`` raises a ValueError,
    which is shown with ``note``.
    """

    def parse(text: str) -> str:
        try:
            check(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(f"{error}{note}") from None
        return text

    return {"type": parse, "metavar": metavar}


def say(step: str, text: str) -> None:
    """Print a line of progress, even in a pipe after whatever was printed before it."""
    sys.stdout.flush()
    print(f"[{step}] {text}", file=sys.stderr, flush=True)


def shown(command: Iterable[object]) -> str:
    """A ``pn`` command as one may type it, with paths relative to the current folder."""
    folder = f"{Path.cwd()}/"
    return shlex.join(["pn", *(str(word).removeprefix(folder) for word in command)])


def say_next(step: str, *command: object) -> None:
    """Print the ``pn`` command that usually follows, unless a longer command runs this step."""
    if "PN_FAIRSEQ_STEP" not in os.environ:
        say(step, f"next: {shown(command)}")


def handle_signals() -> None:
    """Let SIGTERM raise a KeyboardInterrupt with the signal's number, and SIGINT a plain one, even
    in a background job, where the shell makes processes ignore it.
    """

    def interrupt(number, _):
        signal.signal(number, signal.SIG_IGN)  # a second one must not interrupt the clean-up
        raise KeyboardInterrupt(number)

    signal.signal(signal.SIGTERM, interrupt)
    signal.signal(signal.SIGINT, signal.default_int_handler)


class NothingSaved(KeyboardInterrupt):
    """An interruption before anything was saved from which the same command could continue."""


def run(tool: str, body: Callable[[], int | None], resumes: bool = False) -> int:
    """Run ``body`` and return the exit code of the conventions above.

    Args:
        tool: name of the tool in its error lines.
        body: returns an exit code; None means 0.
        resumes: whether the same command, if repeated, continues where it was interrupted.
    """
    advice = "; run the same command again to resume" if resumes else ""
    try:
        try:
            code = body() or 0
        except SystemExit as end:  # from argparse, which has written its line
            code = end.code or 0
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        # The reader of the output (`| head`) has closed the pipe. Python would complain again when
        # it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except (UserError, Unavailable, OSError) as error:
        text = (
            f"{error.filename}: {error.strerror}"
            if getattr(error, "filename", None)
            else str(error)
        )
        # A file name may contain a line break, but an error must be one line.
        print(f"{tool}: error: {' '.join(text.splitlines())}", file=sys.stderr)
        return 2
    except KeyboardInterrupt as error:
        if isinstance(error, NothingSaved):
            advice = " before anything was saved; the same command begins again"
        # in a step of a longer command, that command reports the interruption
        if "PN_FAIRSEQ_STEP" not in os.environ:
            print(f"{tool}: interrupted{advice}", file=sys.stderr)
        return 128 + next(
            (number for number in error.args if isinstance(number, int)), signal.SIGINT
        )
    except ModuleNotFoundError as error:
        if str(error.name).startswith("pn_fairseq"):
            raise
        advice = "in the checkout: pip install --no-build-isolation '.[fairseq]'"
        print(f"{tool}: error: {error.name} is not installed ({advice})", file=sys.stderr)
        return 2
    except MemoryError:
        print(
            f"{tool}: error: there is not enough memory; use fewer processes or a larger machine",
            file=sys.stderr,
        )
        return 2


def why_it_failed(code: int, lines: Iterable[str]) -> str:
    """Why a process failed: the signal that killed it, or else the last line that it wrote."""
    if code == -signal.SIGKILL:
        return "killed by SIGKILL, as happens when memory runs out"
    if code < 0:
        try:
            return f"killed by {signal.Signals(-code).name}"
        except ValueError:  # a number without a name, or an exit code such as 255
            return f"exit code {128 - code}"
    return ([line for line in lines if line.strip()] or ["it printed no reason"])[-1]


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
