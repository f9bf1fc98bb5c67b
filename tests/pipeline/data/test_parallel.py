"""Text files processed by several processes, also where one of them is killed."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pn_fairseq.common.command import UserError
from pn_fairseq.pipeline.data.parallel import PIECE, per_line, transform
from tests.scripts_helpers import ROOT, environment, wait_for

LINES = "".join(f"line {number} of a text that is not short at all\n" for number in range(60_000))


def upper(text: bytes) -> bytes:
    if b"kill" in text:
        os.kill(os.getpid(), signal.SIGKILL)
    if b"sleep" in text:
        Path("asleep").touch()
        time.sleep(100)
    return text.upper()


@pytest.fixture
def text(tmp_path) -> Path:
    (tmp_path / "in").write_text(LINES + "the last line has no line feed")
    assert (tmp_path / "in").stat().st_size > 8 * PIECE
    return tmp_path / "in"


@pytest.mark.parametrize("workers", [1, 3])
def test_many_pieces_come_out_in_order(text, workers):
    out = text.with_name("out")
    (text.parent / "out.pieces").mkdir()
    (text.parent / "out.pieces/7").write_text("left by a process that was killed")
    transform(text, out, upper, workers)
    assert out.read_text() == LINES.upper() + "THE LAST LINE HAS NO LINE FEED\n"
    assert {path.name for path in text.parent.iterdir()} == {"in", "out"}


@pytest.mark.parametrize("workers", [1, 2])
def test_a_lost_sentence_is_noticed(text, workers):
    with pytest.raises(UserError, match="in: .* lines went into a step and .* came out"):
        transform(text, text.with_name("out"), lambda text: text[text.index(b"\n") + 1 :], workers)
    assert {path.name for path in text.parent.iterdir()} == {"in"}


def test_lines_end_at_line_feeds_only():
    assert (
        per_line(str.upper)("a\rb\u2028c\x85d\n\ne\n".encode())
        == "A\rB\u2028C\x85D\n\nE\n".encode()
    )


def test_a_worker_that_is_killed(text):
    """As for lack of memory."""
    text.write_text(LINES + "kill\n")
    with pytest.raises(UserError, match="worker process was ended.*--workers"):
        transform(text, text.with_name("out"), upper, 3)
    assert {path.name for path in text.parent.iterdir()} == {"in"}


CODE = """
import os, sys
from pathlib import Path
from pn_fairseq.common.command import handle_signals, run
from pn_fairseq.pipeline.data.parallel import transform
from tests.pipeline.data.test_parallel import upper
handle_signals()
sys.exit(run("test", lambda: transform(Path("in"), Path("out"), upper, 3)))
"""


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGKILL, -9)]
)
def test_workers_end_with_their_parent(text, number, code):
    """The signal reaches the parent only."""
    text.write_text(LINES + "sleep\n")
    process = subprocess.Popen(
        [sys.executable, "-c", CODE],
        cwd=text.parent,
        env=environment(PYTHONPATH=str(ROOT)),
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    wait_for((text.parent / "asleep").exists, process)
    process.send_signal(number)
    _, stderr = process.communicate(timeout=60)  # ends when all that hold the pipe have ended
    assert process.returncode == code and "Traceback" not in stderr, stderr
    if code > 0:
        assert len(stderr.splitlines()) == 1 and {path.name for path in text.parent.iterdir()} == {
            "in",
            "asleep",
        }
