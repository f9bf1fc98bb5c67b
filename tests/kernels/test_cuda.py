"""Triton's kernels on a GPU: what the interpreter and the compiler alone cannot show."""

import math

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

if not torch.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)
pytest.importorskip("triton")

from pn_fairseq import kernels
from pn_fairseq.kernels import reference, triton_ops
from pn_fairseq.norms import LayerScale, MaskedBatchNorm, PowerNorm, PowerNormV

from .triton_checks import ALPHA, EPS, Case, check_batch, check_parts, check_power

SHAPES = [
    ((64, 64, 512), 4),
    ((64, 64, 1024), 16),
    ((61, 67, 513), 3),
    ((4099, 127), 0),
    ((31, 5, 768), 12),
    ((17, 3, 4096), 8),
    ((13, 3, 8192), 1),
    ((5, 3, 20000), 1),
    ((5, 3, 20000), 20),
    ((5, 3, 10007), 0),
    ((1, 1, 512), 4),
    ((0, 3, 512), 4),
    ((100003, 1), 1),
    ((301, 2, 7), 7),
]
DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float64]


@pytest.fixture(autouse=True)
def _by_triton():
    with kernels.using("triton"):
        yield


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("shape", "groups"), SHAPES)
def test_operators(shape, groups, dtype):
    for masked in (True, False):
        check_power(Case(shape, groups, dtype, masked=masked, device="cuda"))
        for centred in (False, True):
            check_batch(Case(shape, groups, dtype, masked=masked, device="cuda"), centred)
        check_parts(Case(shape, groups, dtype, masked=masked, device="cuda"))
    check_power(Case(shape, groups, dtype, warmup=2**62, affine=False, device="cuda"))


@pytest.mark.parametrize("layout", ["batch first", "slice", "channels first"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_strides(layout, dtype):
    check_power(Case((37, 11, 96), 4, dtype, layout=layout, device="cuda"))
    check_parts(Case((37, 11, 96), 0, dtype, layout=layout, device="cuda"))
    check_batch(Case((37, 11, 96), 4, dtype, layout=layout, device="cuda"), centred=True)


def _step(case: Case, update: bool = True) -> list[torch.Tensor]:
    state = case.psi2.clone(), case.nu.clone(), case.count.clone()
    y, inv_rms, vectors, tally = triton_ops.power_forward(
        case.x, case.mask, case.weight, case.bias, *state, case.groups, EPS, ALPHA, case.warmup, update
    )
    backward = triton_ops.power_backward(
        case.dy, case.x, case.mask, case.weight, inv_rms, vectors, *state, tally, case.groups, EPS, ALPHA, update
    )
    return [y, inv_rms, vectors, tally, *backward, *state]


def _batch_step(case: Case, centred: bool) -> list[torch.Tensor]:
    state = case.mean.clone() if centred else None, case.psi2.clone(), case.count.clone()
    y, inv_rms, vectors, tally = triton_ops.batch_forward(
        case.x, case.mask, case.weight, case.bias, *state, case.groups, EPS, ALPHA, False, True
    )
    backward = triton_ops.batch_backward(
        case.dy, case.x, case.mask, case.weight, inv_rms, vectors, *state, tally, case.groups, EPS, True
    )
    return [y, inv_rms, vectors, tally, *backward, *state[0 if centred else 1 :]]


def test_same_as_the_reference():
    case = Case((128, 32, 512), 4, device="cuda")
    state = case.psi2.clone(), case.nu.clone(), case.count.clone()
    y, inv_rms, vectors, tally = reference.power_forward(
        case.x, case.mask, case.weight, case.bias, *state, case.groups, EPS, ALPHA, case.warmup, True
    )
    backward = reference.power_backward(
        case.dy, case.x, case.mask, case.weight, inv_rms, vectors, *state, tally, case.groups, EPS, ALPHA, True
    )
    for ours, theirs in zip(_step(case), [y, inv_rms, vectors, tally, *backward, *state], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5 * max(theirs.abs().max().item(), 1))


@pytest.mark.parametrize("warmup", [0, 2**62])
def test_deterministic(warmup):
    case = Case((512, 64, 1024), 16, torch.bfloat16, warmup=warmup, device="cuda")
    for step in (_step, lambda case: _batch_step(case, centred=warmup > 0)):
        first = step(case)
        for _ in range(50):
            assert all(torch.equal(one, other) for one, other in zip(first, step(case), strict=True))


def test_every_element_is_written():
    """Memory that results are given is full of NaN beforehand."""
    case = Case((61, 67, 513), 3, device="cuda")
    expected = _step(case)
    torch.empty(2**28, device="cuda").fill_(math.nan)
    assert all(torch.equal(one, other) for one, other in zip(expected, _step(case), strict=True))


def test_two_streams():
    case = Case((512, 64, 512), 4, device="cuda")
    expected = _step(case)
    torch.cuda.synchronize()
    streams, found = [torch.cuda.Stream() for _ in range(2)], []
    for turn in range(20):
        with torch.cuda.stream(streams[turn % 2]):
            found.append(_step(case))
    torch.cuda.synchronize()
    assert all(torch.equal(one, other) for step in found for one, other in zip(expected, step, strict=True))


@pytest.mark.parametrize("masked", [True, False])
def test_more_elements_than_32_bits_count(masked):
    """2^31 + 2^21 elements: the last tokens are as they are alone."""
    channels, tokens = 1024, 2**21 + 2**11
    if torch.cuda.get_device_properties(0).total_memory < 40 * 2**30:
        pytest.skip("needs 40 GiB of GPU memory")
    x = torch.randn(tokens // 2, 2, channels, device="cuda", dtype=torch.bfloat16)
    mask = torch.zeros(2, tokens // 2, dtype=torch.bool, device="cuda") if masked else None
    weight, zero = torch.randn(channels, device="cuda"), torch.zeros(channels, device="cuda")
    psi2, nu, steps = zero + 1, zero.clone(), torch.tensor(0, device="cuda")
    y, scales, vectors, tally = triton_ops.power_forward(x, mask, weight, zero, psi2, nu, steps, 4, EPS, ALPHA, 0, True)
    assert tally.tolist() == [tokens, 1, 0, 0]
    last, _ = reference.normalize(x[-1000:], weight, zero, None, zero + 1, None, 4, EPS)
    torch.testing.assert_close(y[-1000:], last, rtol=2**-7, atol=1e-6)
    squares = sum(reference.moments(part, None, 4, EPS, False)[2][0].double() for part in x.split(2**16))
    torch.testing.assert_close(vectors[0].double(), squares, rtol=3e-6, atol=0)
    dx, *_ = triton_ops.power_backward(y, x, mask, weight, scales, vectors, psi2, nu, steps, tally, 4, EPS, ALPHA, True)
    expected, _ = reference.gradient(
        y[-1000:], x[-1000:], None, weight / (1 + EPS) ** 0.5, None, None, None, scales[-1000:], 4, False
    )
    torch.testing.assert_close(dx[-1000:], expected, rtol=2**-7, atol=1e-5)


def test_more_tokens_than_32_bits_count():
    tokens = 2**31 + 5
    if torch.cuda.get_device_properties(0).total_memory < 40 * 2**30:
        pytest.skip("needs 40 GiB of GPU memory")
    x = torch.ones(tokens, 1, dtype=torch.float16, device="cuda")
    x[-1] = 3
    _, _, squares, count = triton_ops.moments(x, None, 0, EPS, False)
    assert count.item() == float(torch.tensor(tokens, dtype=torch.float32))
    assert squares[0].item() == pytest.approx(tokens + 8, rel=1e-6)
    y, _ = triton_ops.normalize(x, None, None, None, torch.ones(1, device="cuda"), None, 0, EPS)
    assert y[-1].item() == 3 and y[-2].item() == 1 and y[0].item() == 1


NORMS = [
    lambda: PowerNorm(512, layer_scale_groups=4),
    lambda: PowerNorm(512),
    lambda: PowerNorm(512, psi_warmup_updates=10),
    lambda: PowerNormV(512, layer_scale_groups=4),
    lambda: MaskedBatchNorm(512),
    lambda: LayerScale(512, 4),
]


@pytest.mark.parametrize("build", NORMS)
def test_nothing_waits_for_the_gpu(build):
    norm = build().cuda()
    x = torch.randn(64, 8, 512, device="cuda", requires_grad=True)
    mask = torch.zeros(8, 64, dtype=torch.bool, device="cuda")
    dy = torch.randn_like(x)
    norm(x, mask).backward(dy)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(3):
            norm(x, mask).backward(dy)
        norm.eval()(x, mask)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize(("warmup", "launches"), [(0, 4), (2**62, 5)])
def test_launches(warmup, launches):
    case = Case((64, 64, 512), 4, torch.bfloat16, warmup=warmup, device="cuda")
    _step(case)
    state = case.psi2.clone(), case.nu.clone(), case.count.clone()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        _, inv_rms, vectors, tally = triton_ops.power_forward(
            case.x, case.mask, case.weight, case.bias, *state, 4, EPS, ALPHA, warmup, True
        )
        triton_ops.power_backward(
            case.dy, case.x, case.mask, case.weight, inv_rms, vectors, *state, tally, 4, EPS, ALPHA, True
        )
        torch.cuda.synchronize()
    names = [event.name for event in seen.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    assert len(names) == launches, names


@pytest.mark.parametrize("centred", [False, True])
def test_launches_of_a_step_by_the_batch(centred):
    """Three each way, beside the copies of the state that the test makes."""
    case = Case((64, 64, 512), 4, torch.bfloat16, device="cuda")
    _batch_step(case, centred)
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        _batch_step(case, centred)
        torch.cuda.synchronize()
    names = [event.name for event in seen.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    assert len([name for name in names if not name.startswith("Mem")]) == 6, names


def test_in_a_graph():
    norm, x = PowerNorm(512, layer_scale_groups=4).cuda(), torch.randn(64, 8, 512, device="cuda", requires_grad=True)
    other = PowerNorm(512, layer_scale_groups=4).cuda()
    dy = torch.randn_like(x)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        norm(x).backward(dy)
    torch.cuda.current_stream().wait_stream(stream)
    norm.reset_running_stats()
    x.grad = None
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        norm(x).backward(dy)
    for _ in range(3):
        graph.replay()
        copy = x.detach().clone().requires_grad_()
        other(copy).backward(dy)
        torch.testing.assert_close(x.grad, copy.grad, rtol=0, atol=0)
        x.grad.zero_()
    torch.testing.assert_close(norm.running_psi2, other.running_psi2, rtol=0, atol=0)


def test_under_torch_compile():
    norm, other = (PowerNorm(512, layer_scale_groups=4).cuda() for _ in range(2))
    x = torch.randn(64, 8, 512, device="cuda")
    mask = torch.zeros(8, 64, dtype=torch.bool, device="cuda")
    compiled = torch.compile(norm)
    for _ in range(2):
        torch.testing.assert_close(compiled(x, mask), other(x, mask))
    torch.testing.assert_close(norm.state_dict(), other.state_dict())


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one GPU")
def test_another_device_than_the_current_one():
    case = Case((7, 5, 24), 4, device="cuda:1")
    assert torch.cuda.current_device() == 0
    check_power(case)
