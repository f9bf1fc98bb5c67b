"""Runs Triton's kernels under its interpreter, which has to be chosen before anything imports
triton.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

TESTS = Path(__file__).resolve().parents[1]


def run(*options: str, timeout: float = 600, **environment: str) -> None:
    """Run pytest with the interpreter on; fails if a test does, or if there was none."""
    variables = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"} | environment
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *options]
    done = subprocess.run(
        command, cwd=TESTS, env=variables, capture_output=True, text=True, timeout=timeout
    )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    assert re.search(r"\d+ passed", done.stdout), done.stdout


#: Tests of the operators that take the interpreter minutes, whose half types it cuts off where a
#: GPU rounds, or which test_triton.py has for its kernels.
LONG = "rounded or special or precis or same_bits or opcheck or evaluation"


@pytest.mark.slow
@pytest.mark.parametrize("mark", [pytest.param("not slow", marks=pytest.mark.ci), "slow"])
def test_operators(mark):
    run(
        "kernels/test_triton.py",
        "kernels/test_ops.py",
        "-m",
        mark,
        "-k",
        f"not ({LONG})",
        PN_FAIRSEQ_KERNELS="triton",
    )


@pytest.mark.slow
def test_all_norm_tests():
    """With everything computed by Triton, which it refuses to do without the interpreter."""
    run("norms", "-k", "not sync", PN_FAIRSEQ_KERNELS="triton", timeout=7200)
