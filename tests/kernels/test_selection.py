"""Which implementation is used: by default, when it is forced, and without a compiler."""

import importlib.util
import subprocess
import sys

import pytest
import torch

from pn_fairseq import kernels
from pn_fairseq.kernels import selection
from pn_fairseq.kernels.selection import EXTENSION

from ..scripts_helpers import ROOT, run


def info(**environment):
    return run(sys.executable, "-m", "pn_fairseq", "info", cwd=ROOT, check=False, **environment)


@pytest.mark.ci
def test_reference_can_be_forced():
    result = info(PN_FAIRSEQ_KERNELS="reference")
    assert result.returncode == 0
    assert "kernels on CPU: reference (PN_FAIRSEQ_KERNELS=reference)" in result.stdout
    assert "kernels on CUDA: reference" in result.stdout


@pytest.mark.ci
def test_cpp_can_be_forced_where_it_was_compiled():
    result = info(PN_FAIRSEQ_KERNELS="cpp")
    if importlib.util.find_spec(EXTENSION):  # also where another is forced in this process
        assert result.returncode == 0
        assert "kernels on CPU: cpp (PN_FAIRSEQ_KERNELS=cpp" in result.stdout
    else:
        assert result.returncode == 2 and result.stdout == ""
        assert len(result.stderr.splitlines()) == 1 and "compiler" in result.stderr


@pytest.mark.ci
def test_triton_forced_without_a_gpu():
    """One line, and no traceback of triton's."""
    pytest.importorskip("triton")
    command = "import torch; from pn_fairseq.norms import PowerNorm; PowerNorm(4)(torch.ones(2, 4))"
    variables = {"PN_FAIRSEQ_KERNELS": "triton", "TRITON_INTERPRET": "0"}
    done = run(sys.executable, "-c", command, cwd=ROOT, check=False, **variables)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].endswith(
        "Unavailable: PN_FAIRSEQ_KERNELS=triton: triton computes on CUDA, and on the CPU only with "
        "TRITON_INTERPRET=1"
    )


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
        with kernels.using("cpp"):
            assert "aten::sum" not in computes()
            with kernels.using("reference"):
                assert "aten::sum" in computes()
            assert "aten::sum" not in computes()
        assert "aten::sum" in computes()
    assert "aten::sum" not in computes()


def test_unknown_kernels_cannot_be_used():
    with pytest.raises(kernels.Unavailable, match="'fast'"), kernels.using("fast"):
        pass


UNUSABLE = [
    (dict(fails=RuntimeError("Failed to find C compiler.\nSet CC.")), "Failed to find C compiler"),
    (dict(fails=subprocess.CalledProcessError(1, ["cc", "main.c"])), "'cc', 'main.c'"),
    (dict(capability=(6, 1)), "compute capability 7.0, and GPU has 6.1"),
]


@pytest.mark.parametrize(
    ("options", "reason"), UNUSABLE, ids=lambda value: value if isinstance(value, str) else ""
)
def test_where_triton_cannot_launch_the_reference_computes_with_one_warning_unless_it_is_forced(
    gpu, options, reason
):
    unusable = gpu(**options)
    attempts = ["normalize"] if "fails" in options else []
    with pytest.warns(UserWarning, match="plain PyTorch on CUDA") as record:
        assert unusable.normalize() == attempts
        assert unusable.normalize() == []
    (warning,) = record
    assert reason in str(warning.message) and "\n" not in str(warning.message)
    with pytest.raises(kernels.Unavailable, match="^PN_FAIRSEQ_KERNELS=triton: ") as raised:
        gpu(forced="triton", **options).normalize()
    assert reason in str(raised.value)


def test_triton_that_is_not_installed_cannot_be_forced(monkeypatch):
    monkeypatch.setenv(kernels.VARIABLE, "triton")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(
        kernels.Unavailable, match="^PN_FAIRSEQ_KERNELS=triton: triton is not installed$"
    ):
        selection._select()


@pytest.mark.parametrize("forced", [None, "reference"])
def test_info_names_devices_that_have_no_kernels(monkeypatch, forced):
    monkeypatch.setattr(selection, "FORCED", forced)
    for kind in (torch.backends.mps, torch.xpu):
        monkeypatch.setattr(kind, "is_available", lambda: False)
    assert set(kernels.describe()) == {"CPU", "CUDA"}
    for kind in (torch.backends.mps, torch.xpu):
        monkeypatch.setattr(kind, "is_available", lambda: True)
    devices = kernels.describe()
    assert set(devices) == {"CPU", "CUDA", "MPS", "XPU"}
    assert devices["MPS"] == devices["XPU"]
    assert devices["MPS"][0] == "reference"


@pytest.mark.parametrize("forced", [None, "triton"])
def test_info_says_why_triton_does_not_launch(gpu, forced, monkeypatch):
    gpu(forced=forced)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(selection, "_no_triton_on", lambda device: f"no compiler for {device}")
    name, why = kernels.describe()["CUDA"]
    assert name == ("none" if forced else "reference") and why.endswith("no compiler for cuda:0")
    assert "triton" not in kernels.available()
