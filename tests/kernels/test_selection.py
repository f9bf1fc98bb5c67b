"""Which implementation is in use, by choice, by force, and where there is no compiler."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from pn_fairseq import kernels
from pn_fairseq.kernels.selection import EXTENSION

ROOT = Path(__file__).parents[2]


def info(**environment):
    return subprocess.run(
        [sys.executable, "-m", "pn_fairseq", "--info"],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )


def test_reference_can_be_forced():
    result = info(PN_FAIRSEQ_KERNELS="reference")
    assert result.returncode == 0
    assert "kernels on CPU: reference (PN_FAIRSEQ_KERNELS=reference)" in result.stdout
    assert "kernels on CUDA: reference" in result.stdout


def test_cpp_can_be_forced_where_it_was_compiled():
    result = info(PN_FAIRSEQ_KERNELS="cpp")
    if importlib.util.find_spec(EXTENSION):  # whatever is forced in this process
        assert result.returncode == 0 and "kernels on CPU: cpp (PN_FAIRSEQ_KERNELS=cpp" in result.stdout
    else:
        assert result.returncode == 2 and result.stdout == ""
        assert len(result.stderr.splitlines()) == 1 and "compiler" in result.stderr


def test_an_unknown_name_is_refused_in_one_line():
    result = info(PN_FAIRSEQ_KERNELS="fast")
    assert result.returncode == 2 and result.stdout == ""
    (line,) = result.stderr.splitlines()
    assert "PN_FAIRSEQ_KERNELS=fast" in line and "reference, triton, cpp" in line


@pytest.mark.skipif("cpp" not in kernels.available(), reason="there are no C++ kernels here")
def test_using_the_reference_is_for_the_block_alone(monkeypatch):
    x = torch.ones(2, 3)

    def computes():
        with torch.profiler.profile() as profile:
            kernels.moments(x, None, 0, 1e-5, False)
        return {event.key for event in profile.key_averages()}

    assert "aten::sum" not in computes() and "pn_fairseq::moments" in computes()
    with kernels.using("reference"):
        assert "aten::sum" in computes()
    assert "aten::sum" not in computes()


def test_unknown_kernels_cannot_be_used():
    with pytest.raises(kernels.Unavailable, match="'fast'"), kernels.using("fast"):
        pass


def test_without_a_compiler_the_build_says_so_in_one_line(tmp_path):
    build = subprocess.run(
        [sys.executable, "setup.py", "-q", "build_ext", "--build-lib", tmp_path / "lib", "--build-temp", tmp_path],
        cwd=ROOT,
        env={**os.environ, "CC": "/nowhere/cc", "CXX": "/nowhere/c++"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert build.returncode == 0, build.stderr
    (line,) = [line for line in build.stderr.splitlines() if line.startswith("pn_fairseq:")]
    assert "without C++ kernels" in line and "/nowhere/c" in line
    assert "Traceback" not in build.stderr
    assert not list(tmp_path.rglob("*.so"))
