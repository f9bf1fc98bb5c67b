"""How every command-line tool ends."""

import subprocess
import sys

import pytest

from pn_fairseq.common.command import Interrupted, UserError, run
from pn_fairseq.common.errors import Unavailable


def raising(error: BaseException):
    def body():
        raise error

    return body


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (UserError("no\nfile"), 2, "tool: error: no file\n"),
        (OSError(28, "No space left", "out"), 2, "tool: error: out: No space left\n"),
        (Unavailable("no kernels"), 2, "tool: error: no kernels\n"),
        (
            ModuleNotFoundError("", name="fairseq"),
            2,
            "tool: error: fairseq is not installed (in the checkout: pip install --no-build-isolation '.[fairseq]')\n",
        ),
        (MemoryError(), 2, "tool: error: there is not enough memory; use fewer processes or a larger machine\n"),
        (KeyboardInterrupt(), 130, "tool: interrupted; run the same command again to resume\n"),
        (Interrupted(15), 143, "tool: interrupted; run the same command again to resume\n"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_an_end_is_one_line_and_an_exit_code(error, code, line, capsys, monkeypatch):
    monkeypatch.delenv("PN_FAIRSEQ_STEP", raising=False)
    assert run("tool", raising(error)) == code
    assert capsys.readouterr().err == line


def test_a_mistake_of_the_tool_is_a_traceback():
    with pytest.raises(KeyError):
        run("tool", raising(KeyError("x")))


IN_A_FINALIZER = """
import signal, sys, time
from pn_fairseq.common.command import handle_signals, run
handle_signals()

class Finalized:
    def __del__(self):
        signal.raise_signal(signal.SIGTERM)

def body():
    Finalized()
    time.sleep(60)

sys.exit(run("tool", body))
"""


def test_a_signal_in_a_finalizer_is_not_lost():
    """Python ignores what its handler raises there; a signal that arrived while a module was imported was lost so."""
    done = subprocess.run([sys.executable, "-c", IN_A_FINALIZER], capture_output=True, text=True, timeout=30)
    assert (done.returncode, done.stderr) == (143, "tool: interrupted; run the same command again to resume\n")
