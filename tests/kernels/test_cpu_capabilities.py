"""The C++ kernels for narrower vectors than this CPU has; which ones are used is decided once in a process."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from pn_fairseq import kernels

#: Value of torch's variable -> what the kernels say they were compiled for.
CAPABILITIES = {"default": "any CPU", "avx2": "AVX2"}


@pytest.mark.skipif("cpp" not in kernels.available(), reason="there are no C++ kernels here")
@pytest.mark.parametrize("allowed", CAPABILITIES)
def test_operators(allowed):
    tests = Path(__file__).with_name("test_ops.py")
    environment = {**os.environ, "ATEN_CPU_CAPABILITY": allowed, "OMP_NUM_THREADS": "1"}
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", "cpp and not opcheck", str(tests)],
        env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stdout[-4000:]
    said = subprocess.run(
        [sys.executable, "-m", "pn_fairseq", "--info"], env=environment, capture_output=True, text=True, check=True
    )
    has_avx = "AVX" in torch.backends.cpu.get_cpu_capability()
    expected = CAPABILITIES[allowed if has_avx else "default"]
    assert f"compiled for {expected}" in said.stdout
