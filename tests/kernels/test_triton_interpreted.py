"""Runs Triton's kernels under its interpreter, which has to be chosen before anything imports triton."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

TESTS = Path(__file__).resolve().parents[1]

#: Of the norms' own tests, one or two of each kind: the arithmetic, the state, and how the two meet.
NORMS = {
    "norms/test_power.py": "test_warmup_normalizes_with "
    "or test_strided_input or test_every_second_channel or test_forward_without_grad or test_gradients_in_eval_mode",
    "norms/test_power_v.py": "test_single_token_and_single_channel",
    "norms/test_batch.py": "test_variance_survives or test_single_real_token",
    "norms/test_layer_scale.py": "test_one_group_is_rms_norm or test_zero_token or test_half_precision",
    "norms/test_faults.py": "test_whole_gradient_of_nan",
}


def run(*tests: str, select: str = "", timeout: float = 600, **environment: str) -> str:
    """Output of pytest over ``tests`` with the interpreter on; fails if one of them does, or if there was none."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *(str(TESTS / test) for test in tests)]
    if select:
        command += ["-k", select]
    variables = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"} | environment
    done = subprocess.run(command, cwd=TESTS.parent, env=variables, capture_output=True, text=True, timeout=timeout)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    assert re.search(r"\d+ passed", done.stdout), done.stdout
    return done.stdout


def test_operators():
    run("kernels/test_triton.py")


def test_norms():
    """With everything computed by Triton, which it refuses to do without the interpreter."""
    selected = " or ".join(NORMS.values())
    run(*NORMS, select=selected, PN_FAIRSEQ_KERNELS="triton")


@pytest.mark.slow
def test_all_norm_tests():
    run("norms", select="not workers and not sync", PN_FAIRSEQ_KERNELS="triton", timeout=7200)


def test_forced_without_a_gpu():
    """One line, and no traceback of triton's."""
    command = "import torch; from pn_fairseq.norms import PowerNorm; PowerNorm(4)(torch.ones(2, 4))"
    variables = os.environ | {"PN_FAIRSEQ_KERNELS": "triton", "TRITON_INTERPRET": "0"}
    done = subprocess.run(
        [sys.executable, "-c", command], cwd=TESTS.parent, env=variables, capture_output=True, text=True
    )
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].endswith(
        "Unavailable: PN_FAIRSEQ_KERNELS=triton computes on CUDA only, unless TRITON_INTERPRET=1 is set, "
        "and this input is on the CPU"
    )
