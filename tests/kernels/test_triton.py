"""Triton's kernels under its interpreter, which has to be switched on before triton is imported:

TRITON_INTERPRET=1 PN_FAIRSEQ_KERNELS=triton python -m pytest tests/kernels/test_triton.py

``test_triton_interpreted.py`` does that in a process of its own. The interpreter cuts float32 off to bfloat16 where a
GPU rounds, hence one unit in the last place.
"""

import os

import pytest
import torch

if os.environ.get("TRITON_INTERPRET", "0") in ("", "0"):
    pytest.skip("needs TRITON_INTERPRET=1; see test_triton_interpreted.py", allow_module_level=True)
pytest.importorskip("triton")

from pn_fairseq import kernels
from pn_fairseq.kernels import triton_ops
from pn_fairseq.norms import MaskedBatchNorm, PowerNorm, PowerNormV

from .test_ops import check_versions
from .triton_checks import Case, check_batch, check_parts, check_power

#: Odd on purpose: primes, one below and above a power of two, one token, none, one channel, a group per channel.
SHAPES = [
    ((3, 5, 24), 4),
    ((7, 3, 31), 0),
    ((2, 3, 33), 3),
    ((13, 65), 5),
    ((1, 1, 8), 2),
    ((0, 3, 16), 2),
    ((5, 1, 1), 1),
    ((3, 2, 7), 7),
]


@pytest.fixture(autouse=True)
def _several_programs(monkeypatch):
    """Small tiles, so that these small inputs are dealt out to several programs, and in several rounds."""
    monkeypatch.setattr(triton_ops, "FORWARD", (2, 64))
    monkeypatch.setattr(triton_ops, "BACKWARD", (1, 96))
    monkeypatch.setattr(triton_ops, "PARTS", 2)
    monkeypatch.setattr(triton_ops, "TAIL", 16)


@pytest.mark.parametrize("number", range(len(SHAPES)), ids=lambda number: str(SHAPES[number]))
def test_power(number):
    """Half of the shapes have a mask and the other half parameters; in ``test_parts`` it is the other way round."""
    check_power(Case(*SHAPES[number], masked=number % 2 == 0, affine=number % 2 == 1))


@pytest.mark.parametrize("number", range(len(SHAPES)), ids=lambda number: str(SHAPES[number]))
def test_batch(number):
    for centred in (False, True):
        check_batch(Case(*SHAPES[number], masked=(number % 2 == 0) == centred, affine=number % 2 == 1), centred)


@pytest.mark.parametrize("number", range(len(SHAPES)), ids=lambda number: str(SHAPES[number]))
def test_parts(number):
    check_parts(Case(*SHAPES[number], masked=number % 2 == 1, affine=number % 2 == 0))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_types(dtype):
    check_power(Case((3, 5, 24), 4, dtype))
    check_batch(Case((3, 5, 24), 4, dtype), centred=True)
    check_parts(Case((3, 5, 24), 4, dtype))


@pytest.mark.parametrize("layout", ["batch first", "slice", "channels first", "expanded dy"])
def test_strides(layout):
    check_power(Case((3, 5, 12), 2, layout=layout))
    check_batch(Case((3, 5, 12), 2, layout=layout), centred=True)
    check_power(Case((3, 5, 12), 0, layout=layout, masked=False))
    check_parts(Case((3, 5, 12), 2, layout=layout))


def test_versions():
    with kernels.using("triton"):
        check_versions()


@pytest.mark.parametrize(("warmup", "steps"), [(4, 3), (3, 3), (2**62, 0)])
def test_warmup(warmup, steps):
    check_power(Case((3, 4, 8), 2, warmup=warmup, steps=steps))


def test_cumulative():
    for centred in (False, True):
        check_batch(Case((3, 4, 8), 2, warmup=1, steps=2), centred)


def test_nothing_but_padding():
    for warmup in (0, 9):
        case = Case((2, 3, 8), 2, warmup=warmup)
        case.mask.fill_(True)
        check_power(case)
        check_parts(case)
        check_batch(case, centred=warmup > 0)


def test_blocks_of_channels(monkeypatch):
    """Tokens that are too long for one program, with whole groups in a block and with groups over several blocks."""
    monkeypatch.setattr(triton_ops, "WHOLE", 8)
    monkeypatch.setattr(triton_ops, "PIECE", 4)
    triton_ops._shape.cache_clear()
    try:
        check_parts(Case((2, 2, 18), 0))
        check_power(Case((2, 2, 18), 1, warmup=4))
        check_parts(Case((2, 2, 18), 2))
        check_power(Case((2, 2, 30), 5))
        check_batch(Case((2, 2, 18), 1), centred=True)
        check_batch(Case((2, 2, 18), 2), centred=False)
    finally:
        triton_ops._shape.cache_clear()


def test_many_tokens():
    check_power(Case((101, 3, 5), 1))
    check_batch(Case((101, 3, 5), 1), centred=True)


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_not_finite(value):
    in_x = Case((3, 2, 8), 2)
    in_x.mask.fill_(False)
    in_x.x[1, 1, 3] = value
    check_power(in_x)
    check_batch(in_x, centred=False)
    in_dy = Case((3, 2, 8), 2)
    in_dy.mask.fill_(False)
    in_dy.dy[1, 1, 3] = value
    check_power(in_dy)
    check_batch(in_dy, centred=True)


def test_padding_of_any_value():
    """What is not finite in padding stays there."""
    case = Case((3, 2, 8), 2)
    case.mask.fill_(False)
    case.mask[1, 2] = True
    case.x[2, 1] = float("nan")
    psi2, count = case.psi2.clone(), case.count.clone()
    arguments = (case.mask, case.weight, case.bias, psi2, case.nu, count, 2, 1e-5, 0.9, 0, True)
    y, _, _, tally = triton_ops.power_forward(case.x, *arguments)
    assert tally.tolist() == [5, 1, 0, 3] and psi2.isfinite().all() and y.isnan().sum() == 8


@pytest.mark.parametrize("build", [PowerNorm, PowerNormV, MaskedBatchNorm])
def test_a_norm_uses_it(build):
    with kernels.using("triton"):
        norm = build(12, layer_scale_groups=3)
        x = torch.randn(4, 2, 12, requires_grad=True)
        norm(x, torch.zeros(2, 4, dtype=torch.bool)).square().sum().backward()
    with kernels.using("reference"):
        other = build(12, layer_scale_groups=3)
        copy = x.detach().clone().requires_grad_()
        other(copy, torch.zeros(2, 4, dtype=torch.bool)).square().sum().backward()
    torch.testing.assert_close(norm.state_dict(), other.state_dict())
    torch.testing.assert_close(x.grad, copy.grad, rtol=1e-5, atol=1e-5)
