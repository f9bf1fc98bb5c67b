"""Triton's kernels under its interpreter, which has to be switched on before triton is imported:

TRITON_INTERPRET=1 PN_FAIRSEQ_KERNELS=triton python -m pytest tests/kernels/test_triton.py

``test_triton_interpreted.py`` does that in a process of its own. The interpreter cuts float32 off to bfloat16 where a
GPU rounds, hence one unit in the last place.
"""

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
from pn_fairseq.norms import build_norm

from .triton_checks import EPS, Case, check, check_state, check_tokens

INF, NAN = float("inf"), float("nan")


@pytest.fixture(autouse=True)
def _several_programs(monkeypatch):
    """Small tiles on two multiprocessors, so that small inputs make several programs, with several tiles each."""
    monkeypatch.setattr(triton_ops, "ELEMENTS", 2)
    monkeypatch.setattr(triton_ops, "MIN_TILES", 2)
    monkeypatch.setattr(triton_ops, "BLOCK_P", 2)
    monkeypatch.setattr(triton_ops, "_multiprocessors", lambda device: 2)


@pytest.mark.parametrize(
    "case",
    [
        Case((9, 24), 4),
        pytest.param(Case((5, 31), 0, masked=False), marks=pytest.mark.slow),
        pytest.param(Case((7, 33), 3, torch.bfloat16, parameters=None), marks=pytest.mark.slow),
        Case((1, 8), 2, torch.float64, masked=False),
        Case((0, 16), 2, torch.float16),
        Case((5, 1), 1, parameters=torch.bfloat16),
        Case((6, 7), 7, torch.float16, parameters=torch.float16),
    ],
    ids=str,
)
def test_operators(case):
    """Shapes are odd on purpose: primes, one next to a power of two, one token, none, one channel, one per group."""
    check_tokens(case)


@pytest.mark.parametrize(
    "changed",
    [
        {},
        {"warmup": 9},
        {"warmup": 3},
        {"warmup": 2**62, "num_batches": torch.tensor(0)},
        {"count": torch.tensor(0.0)},
        {"batch_moment": torch.tensor([1.0, 2.0, INF, 1.0, 1.0])},
        {"batch_mean": torch.tensor([1.0, 2.0, 3.0, 1.0, NAN])},
        {"products": torch.tensor([[1.0, 2.0, 3.0, 4.0, 5.0], [NAN, 1.0, 1.0, 1.0, 1.0]])},
    ],
    ids=lambda changed: " ".join(changed) or "plain",
)
def test_state(changed):
    check_state(5, **changed)


@pytest.mark.parametrize("first", [1000.0, 2000.0])
def test_variance_far_from_zero(first):
    """mean / std is 1,000: float32 sums of squares would have no digit of the variance left. Sums shifted by the
    ``first`` token would, but not where that is an outlier."""
    case = Case((41, 5), 0, masked=False)
    x = case.x / 2 + 1000
    x[0] = first
    _, _, moment, _ = triton_ops.moments(x, None, 0, EPS, True)
    torch.testing.assert_close(
        moment.double(), x.double().var(0, correction=0), rtol=1e-4 if first == 1000 else 2e-6, atol=0
    )


def test_values_at_padding_enter_no_statistic():
    case = Case((6, 8), 2)
    case.padding = torch.tensor([False, True, False, False, True, False])
    case.x[1], case.x[4] = NAN, INF
    arguments = case.weight, case.bias, None, case.moment, case.padding, None, 2, EPS, True
    _, _, moment, count = check("normalize", case.x, *arguments)
    assert moment.isfinite().all() and count == 4
    inv_rms, mean, moment, _ = check("moments", case.x, case.padding, 2, EPS, True)
    assert mean.isfinite().all() and moment.isfinite().all()
    arguments = case.padding, case.weight, None, case.moment, case.nu, None, inv_rms, 2, EPS, True
    dx, parameters, products = check("gradient", case.dy, case.x, *arguments, terms=20.0)
    assert products.isfinite().all() and parameters[0].isnan().all() and dx[0].isfinite().all()


def test_nothing_but_padding():
    case = Case((5, 6), 2)
    case.padding.fill_(True)
    check_tokens(case)


def test_without_nu_the_gradient_does_not_depend_on_x():
    case = Case((4, 5), 0)
    case.x[1, 2] = INF
    arguments = None, case.weight, case.mean, case.moment, None, None, case.x.new_empty(4, 0), 0, EPS, False
    assert check("gradient", case.dy, case.x, *arguments)[0].isfinite().all()


def test_dx_and_sums_in_two_passes(monkeypatch):
    monkeypatch.setattr(triton_ops, "MAX_FUSED_CHANNELS", 16)
    check_tokens(Case((4, 17), 0))


def test_what_does_not_fit_is_computed_by_the_reference(monkeypatch):
    monkeypatch.setattr(triton_ops, "kernels", None)
    triton_ops._tile.cache_clear()
    monkeypatch.setattr(triton_ops, "MAX_CHANNELS", 16)
    check_tokens(Case((5, 18), 3))
    check_state(17)
    monkeypatch.setattr(triton_ops, "MAX_TOKENS", 4)
    check_tokens(Case((5, 2), 1))


def test_tensors_that_are_not_contiguous():
    case = Case((6, 8), 2)
    arguments = case.weight, case.bias, case.mean, case.moment, case.padding, None, 2, EPS, True
    apart = [
        torch.stack([value, value], -1)[..., 0] if isinstance(value, torch.Tensor) else value for value in arguments
    ]
    check("normalize", case.x.t().contiguous().t(), *apart)


@pytest.mark.parametrize("axes", [2, 3])
@pytest.mark.parametrize("groups", [0, 2])
def test_tokens_are_read_where_they_lie(axes, groups):
    """Rows of a wider matrix, and (T, B, C) of which only dy or x is in the order of (B, T, C)."""
    case = Case((8, 8), groups)
    wide = [torch.full((2 * value.size(0), 11), torch.nan) for value in (case.x, case.dy)]
    for one, value in zip(wide, (case.x, case.dy), strict=True):
        one[::2, 2:10] = value
    pairs = [(wide[0][::2, 2:10], wide[1][::2, 2:10])]
    if axes == 3:
        x, dy = (value.view(4, 2, 8) for value in (case.x, case.dy))
        turned_x, turned_dy = (value.transpose(0, 1).contiguous().transpose(0, 1) for value in (x, dy))
        case.padding = case.padding.view(4, 2)
        pairs = [(turned_x, dy), (x, turned_dy), (turned_x, turned_dy), (turned_x, torch.ones(()).expand(4, 2, 8))]
    for case.x, case.dy in pairs:
        check_tokens(case)


#: Operations that start no kernel on a GPU: memory and views of it.
WITHOUT_LAUNCH = {"empty", "empty_like", "new_empty", "detach", "alias", "view", "_unsafe_view", "t", "unbind", "set_"}
WITHOUT_LAUNCH |= {"select", "slice"}


class Launches(TorchDispatchMode):
    """Names of the kernels that a block launches, of Triton and of torch."""

    def __init__(self, monkeypatch):
        super().__init__()
        self.names = []
        kernels = {name: self.noting(name) for name in vars(triton_kernels) if not name.startswith("_")}
        monkeypatch.setattr(triton_ops, "kernels", SimpleNamespace(**kernels))

    def noting(self, name):
        def launch(grid, *args, **constants):
            self.names.append(name)
            with _disable_current_modes():  # torch copies tensors for the interpreter
                getattr(triton_kernels, name)[grid](*args, **constants)

        return type("", (), {"__getitem__": lambda _, grid: lambda *args, **rest: launch(grid, *args, **rest)})()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        if func.namespace == "pn_fairseq":
            with self:
                return getattr(triton_ops, name)(*args)
        if name not in WITHOUT_LAUNCH:
            self.names.append(name)
        return func(*args, **(kwargs or {}))

    def taken(self):
        names, self.names = self.names, []
        return names


@pytest.mark.parametrize(
    ("name", "forward", "backward", "update"),
    [
        ("power", ["norm_forward", "finish_moments"], ["norm_backward", "finish_gradient_sums"], ["power_update"]),
        (
            "power-v",
            ["norm_forward", "finish_moments", "norm_forward"],
            ["norm_backward", "finish_gradient_sums", "clamp", "div", "norm_backward"],
            ["running_average"],
        ),
        (
            "batch",
            ["norm_forward", "finish_moments", "norm_forward"],
            ["norm_backward", "finish_gradient_sums", "clamp", "div", "norm_backward"],
            ["sub", "div", "mul", "running_average"],  # for the unbiased variance
        ),
        (
            "group",
            ["norm_forward", "standardize"],
            ["standardize_gradient", "finish_gradient_sums", "norm_backward"],
            [],
        ),
        ("derf", ["norm_forward", "squash"], ["squash_gradient", "finish_gradient_sums", "norm_backward"], []),
    ],
)
def test_launches_of_a_training_step(name, forward, backward, update, monkeypatch):
    """Also that no value is read back: that would be an operation here.

    The mask is in the order of the tokens in memory. From another one the norm makes a copy, one more launch each way.
    """
    norm, other = (build_norm(name, 12, layer_scale_groups=3) for _ in range(2))
    x, dy = torch.randn(4, 2, 12, requires_grad=True), torch.randn(4, 2, 12)
    mask = torch.tensor([[False, False], [False, False], [False, True], [False, True]]).t()
    copy = x.detach().clone().requires_grad_()
    with kernels.using("reference"):
        other(copy, mask).backward(dy)
    with kernels.using("triton"), Launches(monkeypatch) as launches:
        y = norm(x, mask)
        assert launches.taken() == forward
        y.backward(dy)
        assert launches.taken() == backward
        if update:
            norm.flush()
        assert launches.taken() == update
    torch.testing.assert_close(norm.state_dict(), other.state_dict())
    torch.testing.assert_close(x.grad, copy.grad, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(norm.weight.grad, other.weight.grad, rtol=1e-5, atol=1e-5)
