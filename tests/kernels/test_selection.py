"""Which implementation is used: by default, when it is forced, and without a compiler."""

import importlib.util
import subprocess
import warnings
from functools import cache
from types import SimpleNamespace

import pytest
import torch

from pn_fairseq import kernels
from pn_fairseq.kernels import reference, selection
from pn_fairseq.kernels.selection import EXTENSION

from ..scripts_helpers import ROOT, run


def info(**environment):
    return run("warm-python", "-m", "pn_fairseq", "--info", cwd=ROOT, check=False, **environment)


def test_reference_can_be_forced():
    result = info(PN_FAIRSEQ_KERNELS="reference")
    assert result.returncode == 0
    assert "kernels on CPU: reference (PN_FAIRSEQ_KERNELS=reference)" in result.stdout
    assert "kernels on CUDA: reference" in result.stdout


def test_cpp_can_be_forced_where_it_was_compiled():
    result = info(PN_FAIRSEQ_KERNELS="cpp")
    if importlib.util.find_spec(EXTENSION):  # also where another is forced in this process
        assert result.returncode == 0 and "kernels on CPU: cpp (PN_FAIRSEQ_KERNELS=cpp" in result.stdout
    else:
        assert result.returncode == 2 and result.stdout == ""
        assert len(result.stderr.splitlines()) == 1 and "compiler" in result.stderr


def test_triton_forced_without_a_gpu():
    """One line, and no traceback of triton's."""
    pytest.importorskip("triton")
    command = "import torch; from pn_fairseq.norms import PowerNorm; PowerNorm(4)(torch.ones(2, 4))"
    variables = {"PN_FAIRSEQ_KERNELS": "triton", "TRITON_INTERPRET": "0"}
    done = run("warm-python", "-c", command, cwd=ROOT, check=False, **variables)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].endswith(
        "Unavailable: PN_FAIRSEQ_KERNELS=triton: triton computes on CUDA, and on the CPU only with TRITON_INTERPRET=1"
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
    assert "aten::sum" not in computes()


def test_unknown_kernels_cannot_be_used():
    with pytest.raises(kernels.Unavailable, match="'fast'"), kernels.using("fast"):
        pass


class Gpu:
    """Stands for a GPU with triton, with tensors on the CPU. Counts the launches of ``normalize``."""

    def __init__(self, monkeypatch, capability=(9, 0), forced=None, fails=None):
        self.launched = 0

        def normalize(*args):
            self.launched += 1
            if fails:
                raise fails
            return reference.normalize(*args)

        module = SimpleNamespace(INTERPRETED=False, normalize=normalize)
        monkeypatch.setattr(selection, "_triton_operators", lambda: module)
        monkeypatch.setenv("TRITON_INTERPRET", "1")  # the tensors are on the CPU
        monkeypatch.setattr(selection, "FORCED", forced)
        monkeypatch.setattr(torch.version, "cuda", "12.8")
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "GPU")
        monkeypatch.setattr(selection, "_compared", {torch.device("cpu"): ""})  # tests/kernels/test_first_use.py

    def normalize(self):
        x = torch.tensor([[1.0, -2.0]])
        y, *_ = selection._by_triton("normalize")(x, None, None, None, torch.full((2,), 4.0), None, None, 0, 0.0, False)
        assert torch.equal(y, x / 2)


@pytest.fixture
def gpu(monkeypatch):
    for function in (selection._no_triton_on, selection._warn_without_triton):
        monkeypatch.setattr(selection, function.__name__, cache(function.__wrapped__))
    return lambda **options: Gpu(monkeypatch, **options)


UNUSABLE = [
    (dict(fails=RuntimeError("Failed to find C compiler.\nSet CC.")), "Failed to find C compiler"),
    (dict(fails=subprocess.CalledProcessError(1, ["cc", "main.c"])), "'cc', 'main.c'"),
    (dict(capability=(6, 1)), "compute capability 7.0, and GPU has 6.1"),
]


def test_triton_is_tried_once(gpu):
    healthy = gpu()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        healthy.normalize()
        healthy.normalize()
    assert healthy.launched == 3


@pytest.mark.parametrize(("options", "reason"), UNUSABLE, ids=lambda value: value if isinstance(value, str) else "")
def test_where_triton_cannot_launch_the_reference_computes_with_one_warning(gpu, options, reason):
    unusable = gpu(**options)
    with pytest.warns(UserWarning, match="plain PyTorch on CUDA") as record:
        unusable.normalize()
        unusable.normalize()
    (warning,) = record
    assert reason in str(warning.message) and "\n" not in str(warning.message)
    assert unusable.launched == (1 if "fails" in options else 0)


@pytest.mark.parametrize(("options", "reason"), UNUSABLE, ids=lambda value: value if isinstance(value, str) else "")
def test_where_triton_cannot_launch_it_cannot_be_forced(gpu, options, reason):
    unusable = gpu(forced="triton", **options)
    with pytest.raises(kernels.Unavailable, match="^PN_FAIRSEQ_KERNELS=triton: ") as raised:
        unusable.normalize()
    assert reason in str(raised.value)


def test_triton_that_is_not_installed_cannot_be_forced(monkeypatch):
    monkeypatch.setenv(kernels.VARIABLE, "triton")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(kernels.Unavailable, match="^PN_FAIRSEQ_KERNELS=triton: triton is not installed$"):
        selection._select()


@pytest.mark.parametrize("forced", [None, "triton"])
def test_info_says_why_triton_does_not_launch(gpu, forced, monkeypatch):
    gpu(forced=forced)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(selection, "_no_triton_on", lambda device: f"no compiler for {device}")
    name, why = kernels.describe()["CUDA"]
    assert name == ("none" if forced else "reference") and why.endswith("no compiler for cuda:0")
    assert "triton" not in kernels.available()


def test_without_a_compiler_the_build_says_so_in_one_line(tmp_path):
    arguments = ("-q", "build_ext", "--build-lib", tmp_path / "lib", "--build-temp", tmp_path)
    build = run("warm-python", "-m", "setup", *arguments, cwd=ROOT, CC="/nowhere/cc", CXX="/nowhere/c++")
    _, line = [line for line in build.stderr.splitlines() if line.startswith("pn_fairseq:")]
    assert "without C++ kernels" in line and "/nowhere/c" in line
    assert "Traceback" not in build.stderr
    assert not list(tmp_path.rglob("*.so"))
