"""The C++ kernels for narrower vectors than this CPU has; which ones are used is decided once in
a process.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from pn_fairseq import kernels

#: Value of torch's variable -> what the kernels say they were compiled for.
CAPABILITIES = {"default": "any CPU", "avx2": "AVX2"}
#: Channels that fill no vector and groups that are narrower than one, in all types.
SOME = "cpp and (33 or 35 or half_types or special)"
#: inductor's own code is made for the processor, whatever the variable says.
ALL = "cpp and not opcheck and not inductor"
PROGRAM = """
import sys
import pytest
from pn_fairseq import kernels
print(kernels.describe()["CPU"])
sys.exit(pytest.main(sys.argv[1:]))
"""


@pytest.mark.slow
@pytest.mark.skipif("cpp" not in kernels.available(), reason="there are no C++ kernels here")
@pytest.mark.parametrize(
    "allowed, selection",
    [
        pytest.param("avx2", SOME, marks=pytest.mark.ci),
        *((allowed, ALL) for allowed in CAPABILITIES),
    ],
)
def test_operators(allowed, selection):
    if allowed == "avx2" and "AVX" not in torch.backends.cpu.get_cpu_capability():
        pytest.skip("this processor has no AVX2, and torch would compute with it all the same")
    tests = Path(__file__).with_name("test_ops.py")
    options = ["-q", "-p", "no:cacheprovider", "-k", selection, str(tests)]
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *options],
        env={**os.environ, "ATEN_CPU_CAPABILITY": allowed, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:]
    assert f"compiled for {CAPABILITIES[allowed]}" in done.stdout
