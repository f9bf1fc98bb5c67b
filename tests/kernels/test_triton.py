"""Triton's kernels under its interpreter, which has to be switched on before triton is imported:

TRITON_INTERPRET=1 PN_FAIRSEQ_KERNELS=triton python -m pytest tests/kernels/test_triton.py

``test_triton_interpreted.py`` does that in a process of its own, and runs the tests of the
operators there as well.
"""

import inspect
import os
from types import SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

if os.environ.get("TRITON_INTERPRET", "0") in ("", "0"):
    pytest.skip("needs TRITON_INTERPRET=1; see test_triton_interpreted.py", allow_module_level=True)
pytest.importorskip("triton")

from pn_fairseq import kernels
from pn_fairseq.kernels import triton_kernels, triton_ops
from pn_fairseq.kernels.first_use import samples
from pn_fairseq.norms import build_norm

from .checks import EPS, check, check_samples


@pytest.mark.parametrize("first", [1000.0, 2000.0])
def test_variance_far_from_zero(first):
    """mean / std is 1,000: float32 sums of squares would have no digit of the variance left. Sums
    shifted by the ``first`` token would, but not where that is an outlier.
    """
    x = torch.randn(41, 5) + 1000
    x[0] = first
    _, _, moment, _ = triton_ops.moments(x, None, 0, EPS, True)
    torch.testing.assert_close(
        moment.double(),
        x.double().var(0, correction=0),
        rtol=1e-4 if first == 1000 else 2e-6,
        atol=0,
    )


def test_dx_and_sums_in_two_passes(monkeypatch):
    monkeypatch.setattr(triton_ops, "MAX_FUSED_CHANNELS", 4)
    check_samples(4, 5, 0, torch.float32)


def test_what_does_not_fit_is_computed_by_the_reference_with_one_warning(monkeypatch):
    """Of every operator; without kernels nothing else can compute."""
    monkeypatch.setattr(triton_ops, "kernels", None)
    triton_ops._tokens_of.cache_clear()
    monkeypatch.setattr(triton_ops, "MAX_CHANNELS", 16)
    warned = set()
    for name, arguments in samples(torch.float32, torch.device("cpu"), [(5, 18, 3)]):
        if name in warned:
            continue
        warned.add(name)
        triton_ops.warn_by_reference.cache_clear()
        with pytest.warns(
            UserWarning, match="plain PyTorch.*: 18 channels .*a row of 32"
        ) as record:
            check(name, *arguments)
            check(name, *arguments)
        assert len(record) == 1, name
    assert warned == set(kernels.OPERATORS)
    monkeypatch.setattr(triton_ops, "MAX_TOKENS", 4)
    triton_ops._tokens_of.cache_clear()
    with pytest.warns(UserWarning, match="5 tokens are more than the 4"):
        for name, arguments in samples(torch.float32, torch.device("cpu"), [(5, 12, 1)]):
            if "x" in inspect.signature(kernels.OPERATORS[name]).parameters:  # it reads tokens
                check(name, *arguments)


#: Operations that start no kernel on a GPU: memory and views of it.
WITHOUT_LAUNCH = {
    "empty",
    "empty_like",
    "new_empty",
    "detach",
    "alias",
    "view",
    "_unsafe_view",
    "t",
    "unbind",
    "set_",
}
WITHOUT_LAUNCH |= {"select", "slice", "unsqueeze"}


class Launches(TorchDispatchMode):
    """Names of the kernels that a block launches, of Triton and of torch."""

    def __init__(self, monkeypatch):
        super().__init__()
        self.names = []
        kernels = {
            name: self.noting(name) for name in vars(triton_kernels) if not name.startswith("_")
        }
        monkeypatch.setattr(triton_ops, "kernels", SimpleNamespace(**kernels))

    def noting(self, name):
        def launch(grid, *args, **constants):
            self.names.append(name)
            with _disable_current_modes():  # torch copies tensors for the interpreter
                getattr(triton_kernels, name)[grid](*args, **constants)

        return type(
            "",
            (),
            {"__getitem__": lambda _, grid: lambda *args, **rest: launch(grid, *args, **rest)},
        )()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        if func.namespace == "pn_fairseq":
            with self:
                return getattr(triton_ops, name)(*args)
        if name not in WITHOUT_LAUNCH:
            self.names.append(name)
        return func(*args, **(kwargs or {}))

    def taken(self):
        names = self.names
        self.names = []
        return names


FORWARD = ["norm_forward", "finish_moments"]
BACKWARD = ["norm_backward", "finish_gradient_sums", "norm_backward"]

#: Copies of the state of UN, one for each buffer. MABN has no nu.
CLONES = ["clone"] * 5


@pytest.mark.parametrize(
    ("name", "forward", "backward"),
    [
        # stack: what the step reads of the state
        ("power", ["stack", *FORWARD], ["norm_backward", "finish_power_step"]),
        ("power-v", [*FORWARD, "norm_forward"], [*BACKWARD, "running_average_"]),
        ("batch", [*FORWARD, "norm_forward"], [*BACKWARD, "running_average_"]),
        (
            "unified",
            [*CLONES, *FORWARD, "window_statistics", "norm_forward"],
            ["mul", *BACKWARD[:2], "window_update_", "norm_backward"],
        ),
        (
            "mabn",
            [*CLONES[1:], *FORWARD, "window_statistics", "mul", "norm_forward"],
            ["mul", *BACKWARD[:2], "mul_", "window_update_", "norm_backward"],
        ),
        *(
            (
                name,
                ["norm_forward", kernel],
                [f"{kernel}_gradient", "finish_gradient_sums", "norm_backward"],
            )
            for name, kernel in (("group", "standardize"), ("derf", "squash"))
        ),
    ],
)
def test_launches_of_a_training_step(name, forward, backward, monkeypatch):
    """With diagnostics, as ``pn train`` collects them.

    Also that no value is read back: that would be an operation.
    """
    norm, other = (build_norm(name, 12, layer_scale_groups=3) for _ in range(2))
    norm.collecting = True
    x = torch.randn(4, 2, 12, requires_grad=True)
    dy = torch.randn(4, 2, 12)
    mask = torch.tensor([[False, False, False, False], [False, False, True, True]])
    copy = x.detach().clone().requires_grad_()
    with kernels.using("reference"):
        other(copy, mask).backward(dy)
    norm.has_looked_at_mask = True
    with kernels.using("triton"), Launches(monkeypatch) as launches:
        y = norm(x, mask)
        assert launches.taken() == forward
        y.backward(dy)
        assert launches.taken() == backward
    torch.testing.assert_close(norm.state_dict(), other.state_dict())
    torch.testing.assert_close(x.grad, copy.grad, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(norm.weight.grad, other.weight.grad, rtol=1e-5, atol=1e-5)
