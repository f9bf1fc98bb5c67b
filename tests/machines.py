"""The numeric tests on every kind of processor that this one can be: `make test-machines`, for an
hour or more.

Prints a row for each setting: what passed, and the largest error / tolerance (tests/margins.py).
Arguments go to pytest. Exit code 1 if a test fails, or if a ratio is above 0.2: such a tolerance is
not met by every processor.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import torch

TESTS = Path(__file__).parent
ROOMS = "norms models kernels fairseq_patches examples benchmarks pipeline/test_fold.py".split()
LARGEST = 0.2
CAPABILITY = torch.backends.cpu.get_cpu_capability()

#: Environment variables. torch's kernels and the C++ kernels here obey the same one in what vectors
#: they use.
SETTINGS = {CAPABILITY: {}}
if "AVX" in CAPABILITY:  # torch does not ask the processor
    SETTINGS["AVX2"] = {"ATEN_CPU_CAPABILITY": "avx2"}
SETTINGS |= {
    "no vectors": {"ATEN_CPU_CAPABILITY": "default"},
    "no C++ kernels": {"PN_FAIRSEQ_KERNELS": "reference"},
    "no C++ kernels, no vectors": {
        "PN_FAIRSEQ_KERNELS": "reference",
        "ATEN_CPU_CAPABILITY": "default",
    },
    "MKL without AVX": {"MKL_ENABLE_INSTRUCTIONS": "SSE4_2"},
    "MKL as on any processor": {"MKL_CBWR": "COMPATIBLE"},
    "oneDNN without AVX": {"ONEDNN_MAX_CPU_ISA": "SSE41"},
    "2 threads": {"TEST_THREADS": "2"},
    "other seeds": {"PYTHONPATH": str(TESTS / "another_seed")},
}


def main() -> int:
    print("| setting | passed | largest error / tolerance |\n|---|---|---|", flush=True)
    fine = True
    for name, variables in SETTINGS.items():
        command = [sys.executable, "-m", "pytest", "-q", "-m", "not slow", "--margins"]
        command += sys.argv[1:] + [f"tests/{room}" for room in ROOMS]
        where = {"cwd": TESTS.parent, "env": os.environ | variables}
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, **where)
        ratio = re.search(r"errors / tolerances =+\n(\S+) ", done.stdout)
        # pytest's last line
        *_, passed = [None, *re.findall(r"^(?:\d+ failed, )?\d+ passed", done.stdout, re.M)]
        right = done.returncode == 0 and ratio is not None and float(ratio[1]) <= LARGEST
        print(f"| {name} | {passed} | {ratio and ratio[1]} |", flush=True)
        if not right:
            print(done.stdout[-20_000:], file=sys.stderr)
        fine = fine and right
    return 0 if fine else 1


if __name__ == "__main__":
    sys.exit(main())
