"""The first use of a GPU compares the kernels with the reference.

Tensors on the CPU stand for a GPU's.
"""

import warnings

import pytest
import torch

from pn_fairseq import kernels
from pn_fairseq.kernels import first_use, selection


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "pn_fairseq"


#: What a healthy GPU computes at its first use: the attempt to launch, each operator twice, and
#: what was asked for.
FIRST = 2 * len(kernels.OPERATORS) + 2


@pytest.mark.parametrize("dtype", first_use.TOLERANCE, ids=str)
def test_the_first_use_compares_every_operator_once(gpu, dtype):
    healthy = gpu()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        first = healthy.normalize(dtype)
        assert len(first) == FIRST and set(first) == set(kernels.OPERATORS)
        assert healthy.normalize(dtype) == healthy.normalize(torch.float64) == ["normalize"]


def test_the_next_process_compares_again_only_where_something_has_changed(gpu, monkeypatch):
    assert len(gpu().normalize()) == FIRST
    assert len(gpu().normalize()) == 2
    assert len(gpu(name="another GPU").normalize()) == FIRST
    assert len(gpu(version="3.8").normalize()) == FIRST
    for owner, name, value in (
        (first_use, "driver", lambda: "551.0"),
        (torch, "__version__", "2.99.0"),
    ):
        with monkeypatch.context() as changed:
            changed.setattr(owner, name, value)
            assert len(gpu().normalize()) == FIRST
    assert len(gpu().normalize()) == 2


@pytest.mark.parametrize("wrong", sorted(kernels.OPERATORS))
def test_where_one_operator_is_off_the_reference_computes_with_one_warning(gpu, wrong):
    broken = gpu(wrong=wrong)
    with pytest.warns(UserWarning, match="plain PyTorch on CUDA") as record:
        assert len(broken.normalize()) == FIRST - 1
        assert broken.normalize() == []
    (warning,) = record
    message = str(warning.message)
    assert f"differs from plain PyTorch in float32: {wrong} by" in message
    assert "pn check" in message


def test_what_is_off_is_compared_again_by_the_next_process(gpu, folder):
    for _ in range(2):
        with pytest.warns(UserWarning, match="differs"):
            assert len(gpu(wrong="moments").normalize()) == FIRST - 1
    assert not folder.exists()
    assert len(gpu().normalize()) == FIRST


def test_what_is_off_cannot_be_forced(gpu):
    with pytest.raises(
        kernels.Unavailable, match="^PN_FAIRSEQ_KERNELS=triton: .* differs from plain"
    ):
        gpu(wrong="moments", forced="triton").normalize()


def test_a_kernel_that_does_not_compile_is_not_used(gpu, monkeypatch):
    broken = gpu()

    def out_of_resources(*arguments):
        raise RuntimeError("out of resource: shared memory\nhint")

    monkeypatch.setattr(selection._triton_operators(), "gradient", out_of_resources)
    with pytest.warns(
        UserWarning, match=r"cannot launch a kernel \(out of resource: shared memory\)$"
    ):
        broken.normalize()


def test_a_cache_that_cannot_be_written_is_done_without(gpu, monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert len(gpu().normalize()) == len(gpu().normalize()) == FIRST


def test_nothing_is_compared_in_a_cuda_graph(gpu, monkeypatch):
    healthy = gpu()
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert len(healthy.normalize()) == 2
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    assert len(healthy.normalize()) == FIRST - 1


def test_defaults_of_the_caller_do_not_matter(gpu):
    """A default device and type, and the random state."""
    healthy = gpu()
    state = torch.get_rng_state()
    x = torch.ones(1)
    torch.set_default_dtype(torch.float64)
    try:
        with torch.device("meta"):
            assert selection._wrong_on(x) == ""
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(state, torch.get_rng_state()) and len(healthy.calls) == FIRST - 2
