import os
import subprocess
import sys

import pytest

from pn_fairseq.common.command import (
    ArgumentParser,
    NothingSaved,
    UserError,
    run,
    say_next,
    why_it_failed,
)
from pn_fairseq.common.errors import Unavailable


def raising(error: BaseException):
    def body():
        raise error

    return body


INSTALL = "in the checkout: pip install --no-build-isolation '.[fairseq]'"
MEMORY = "there is not enough memory; use fewer processes or a larger machine"
RESUMES = "interrupted; run the same command again to resume"
BEGINS = "interrupted before anything was saved; the same command begins again"
#: Python buffers what it writes into a pipe, unless the variable is set.
BUFFERED = os.environ | {"PYTHONUNBUFFERED": ""}


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (UserError("no\nfile"), 2, "error: no file"),
        (OSError(28, "No space left", "out"), 2, "error: out: No space left"),
        (Unavailable("no kernels"), 2, "error: no kernels"),
        (
            ModuleNotFoundError("", name="fairseq"),
            2,
            f"error: fairseq is not installed ({INSTALL})",
        ),
        (MemoryError(), 2, f"error: {MEMORY}"),
        (KeyboardInterrupt(), 130, RESUMES),
        (KeyboardInterrupt(15), 143, RESUMES),
        (NothingSaved(15), 143, BEGINS),
    ],
    ids=lambda value: type(value).__name__,
)
def test_an_end_is_one_line_and_an_exit_code(error, code, line, capsys, monkeypatch):
    monkeypatch.delenv("PN_FAIRSEQ_STEP", raising=False)
    assert run("tool", raising(error), resumes=True) == code
    assert capsys.readouterr().err == f"tool: {line}\n"
    run("tool", raising(error))
    line = line.replace("; run the same command again to resume", "")
    assert capsys.readouterr().err == f"tool: {line}\n"


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        (1, "the last line"),
        (-9, "killed by SIGKILL, as happens when memory runs out"),
        (-11, "killed by SIGSEGV"),
        (-127, "exit code 255"),  # as pn reproduce has it of a step
    ],
)
def test_why_a_process_failed(code, reason):
    assert why_it_failed(code, ["a line", "the last line", ""]) == reason


@pytest.mark.ci
def test_a_thread_that_computes_does_not_abort_the_end():
    """fairseq loads batches in such a thread.

    When sys.exit ended this process, it was aborted each time.
    """
    program = """
import atexit, threading, time, torch
from pn_fairseq import __main__

def body(_):
    def compute():
        while True:
            torch.zeros(64).add_(1)

    threading.Thread(target=compute, daemon=True).start()
    time.sleep(0.2)
    print("output")
    raise KeyboardInterrupt

atexit.register(print, "at exit")
__main__.options = body
__main__.main()
"""
    command = [sys.executable, "-c", program]
    result = subprocess.run(command, env=BUFFERED, capture_output=True, text=True)
    assert result.returncode == 130
    assert result.stdout == "output\nat exit\n"
    assert result.stderr == "pn: interrupted\n"


def test_lines_of_progress_keep_their_place_in_a_pipe():
    program = """
from pn_fairseq.common.command import say
print("first")
say("step", "second")
print("third")
"""
    command = [sys.executable, "-c", program]
    result = subprocess.run(
        command, env=BUFFERED, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert result.stdout == "first\n[step] second\nthird\n"


def test_a_wrong_choice_names_the_nearest_and_all(capsys):
    parser = ArgumentParser(prog="pn prepare")
    corpora = parser.add_subparsers(metavar="CORPUS", parser_class=ArgumentParser)
    corpora.choices.update(text=None, verses=None)
    assert run("tool", lambda: parser.parse_args(["verse"])) == 2
    line = "argument CORPUS: unknown 'verse' (choose from text, verses), did you mean 'verses'?"
    assert capsys.readouterr().err == f"tool: error: {line} (see pn prepare --help)\n"


def test_the_next_command_is_named_unless_a_longer_one_runs_the_step(capsys, monkeypatch):
    monkeypatch.delenv("PN_FAIRSEQ_STEP", raising=False)
    say_next("train", "average", "--run", "my run")
    assert capsys.readouterr().err == "[train] next: pn average --run 'my run'\n"
    monkeypatch.setenv("PN_FAIRSEQ_STEP", "1")
    say_next("train", "average", "--run", "my run")
    assert capsys.readouterr().err == ""


def test_a_mistake_of_the_tool_is_a_traceback():
    with pytest.raises(KeyError):
        run("tool", raising(KeyError("x")))
