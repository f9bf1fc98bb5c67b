"""Runs Triton's kernels under its interpreter, which has to be chosen before anything imports triton."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

TESTS = Path(__file__).resolve().parents[1]

#: Of the norms' own tests, a few of each kind: the kernels' arithmetic, state, and how the two meet.
NORMS = [
    "norms/test_power.py",
    "norms/test_faults.py",
]


def run(*tests: str, select: str = "", **environment: str) -> str:
    """Output of pytest over ``tests`` with the interpreter on; fails if one of them does, or if there was none."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *(str(TESTS / test) for test in tests)]
    if select:
        command += ["-k", select]
    variables = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"} | environment
    done = subprocess.run(command, cwd=TESTS.parent, env=variables, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    assert re.search(r"\d+ passed", done.stdout), done.stdout
    return done.stdout


def test_operators():
    run("kernels/test_triton.py")
