"""Triton's kernels on a GPU: what only a GPU can show."""

import math
from functools import partial

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

if not torch.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)
pytest.importorskip("triton")

from pn_fairseq import kernels
from pn_fairseq.kernels import reference
from pn_fairseq.kernels.first_use import results_of, samples
from pn_fairseq.norms import LayerScale, MaskedBatchNorm, PowerNorm, PowerNormV, build_norm

from ..pairwise import in_pairs
from .checks import CHANGES, OPS, call, check_faults, check_samples

#: (tokens, C), and groups of layer-scale. The last two do not fit into one program: the reference
#: computes.
SHAPES = [
    ((4096, 512), 4),
    ((4096, 1024), 16),
    ((4087, 513), 3),
    ((4099, 127), 0),
    ((155, 768), 12),
    ((51, 4096), 8),
    ((39, 8192), 1),
    ((1, 512), 4),
    ((0, 512), 4),
    ((100003, 1), 1),
    ((602, 7), 7),
    ((15, 20000), 20),
    ((15, 10007), 0),
]
DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float64]


@pytest.fixture(autouse=True)
def _by_triton():
    with kernels.using("triton"):
        yield


@in_pairs(shape_and_groups=SHAPES, dtype=DTYPES, change=list(CHANGES))
def test_operators(shape_and_groups, dtype, change):
    (tokens, channels), groups = shape_and_groups
    check_samples(tokens, channels, groups, dtype, "cuda", change)


@pytest.mark.parametrize("channels", [1, 5, 512, 1024, 8192, 10007])
def test_a_fault_leaves_the_state(channels):
    check_faults(channels, "cuda")


def results(calls: list[tuple[str, tuple]]) -> list[torch.Tensor]:
    """Everything that the operators give."""
    found = []
    for name, arguments in calls:
        found += results_of(getattr(OPS, name), name, arguments)
    return found


def calls_of(*shape: int, dtype=torch.float32):
    """The samples of a shape, and what the operators give of them."""
    calls = list(samples(dtype, torch.device("cuda"), [shape]))
    return calls, results(calls)


def assert_equal(found: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)


def test_deterministic():
    calls, first = calls_of(2**15, 1024, 16, dtype=torch.bfloat16)
    for _ in range(50):
        assert_equal(results(calls), first)


def test_every_element_is_written():
    """Memory that results are given is full of NaN beforehand."""
    calls, expected = calls_of(4087, 513, 3)
    sizes = (1, 1, 600, 600, 1200, 1200, 2**18, 2**28)
    junk = [torch.full((size,), math.nan, device="cuda") for size in sizes]
    del junk
    assert_equal(results(calls), expected)


def test_two_streams():
    calls, expected = calls_of(2**13, 512, 4)
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in range(2)]
    found = []
    for turn in range(20):
        with torch.cuda.stream(streams[turn % 2]):
            found.append(results(calls))
    torch.cuda.synchronize()
    for several in found:
        assert_equal(several, expected)


@pytest.mark.parametrize("masked", [True, False])
def test_more_elements_than_32_bits_count(masked):
    """2^31 + 2^21 elements: the last tokens are as in a batch of their own."""
    if torch.cuda.get_device_properties(0).total_memory < 40 * 2**30:
        pytest.skip("needs 40 GiB of GPU memory")
    channels = 1024
    tokens = 2**21 + 2**11
    x = torch.randn(tokens, channels, device="cuda", dtype=torch.bfloat16)
    padding = torch.zeros(tokens, dtype=torch.bool, device="cuda") if masked else None
    weight = torch.randn(channels, device="cuda")
    ones = torch.ones(channels, device="cuda")
    vectors = dict(weight=weight, moment=ones, groups=4)
    y, inv_rms, moment, count = call("normalize", x=x, bias=ones - 1, padding=padding, **vectors)
    assert count == tokens
    last = call("normalize", reference, x=x[-1000:], **vectors, sums=False)[0]
    torch.testing.assert_close(y[-1000:], last, rtol=2**-7, atol=1e-6)
    squares = 0.0
    for part in x.split(2**16):
        of_part = call("moments", reference, x=part, groups=4, centered=False)[2]
        squares += of_part.double() * len(part)
    torch.testing.assert_close(moment.double(), squares / tokens, rtol=3e-6, atol=0)
    dx = call("gradient", dy=y, x=x, padding=padding, inv_rms=inv_rms, **vectors)[0]
    ends = dict(dy=y[-1000:], x=x[-1000:], inv_rms=inv_rms[-1000:])
    expected = call("gradient", reference, **ends, **vectors, sums=False)[0]
    torch.testing.assert_close(dx[-1000:], expected, rtol=2**-7, atol=1e-5)


NORMS = {
    "pn with layer-scale": lambda: PowerNorm(512, layer_scale_groups=4),
    "pn": lambda: PowerNorm(512),
    "pn in its warm-up": lambda: PowerNorm(512, psi_warmup_updates=10),
    "pn-v": lambda: PowerNormV(512, layer_scale_groups=4),
    "bn": lambda: MaskedBatchNorm(512),
    "layer-scale": lambda: LayerScale(512, 4),
}
for name in ("layer-simple", "ada", "scale", "group", "dyt", "derf"):
    NORMS[name] = partial(build_norm, name, 512, groups=4)


def inputs() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x and dy (64, 8, 512), and a mask whose transpose is in the order of the tokens."""
    x, dy = torch.randn(2, 64, 8, 512, device="cuda")
    mask = (torch.rand(64, 8, device="cuda") < 0.1).t()
    return x.requires_grad_(), dy, mask


@pytest.mark.parametrize("name", NORMS)
def test_norms_give_what_the_reference_gives(name):
    norm = NORMS[name]().cuda()
    other = NORMS[name]().cuda()
    x, dy, mask = inputs()
    copy = x.detach().clone().requires_grad_()
    for _ in range(3):
        y = norm(x, mask)
        y.backward(dy)
        with kernels.using("reference"):
            expected = other(copy, mask)
            expected.backward(dy)
        torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(x.grad, copy.grad, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(norm.state_dict(), other.state_dict())
    torch.testing.assert_close(norm.eval()(x), other.eval()(x))


@pytest.mark.parametrize("name", NORMS)
def test_nothing_waits_for_the_gpu(name):
    norm = NORMS[name]().cuda()
    x, dy, mask = inputs()
    norm(x, mask).backward(dy)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(3):
            norm(x, mask).backward(dy)
        norm.eval()(x, mask)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_launches_of_pn():
    """Two each way, beside the copy of the state that is read and the accumulation of gradients.

    tests/kernels/test_triton.py counts all of them by the interpreter.
    """
    norm = NORMS["pn with layer-scale"]().cuda()
    x, dy, mask = inputs()

    def train():
        norm(x, mask).backward(dy)

    for _ in range(2):
        train()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        train()
        torch.cuda.synchronize()
    ours = ("norm_", "finish_", "power_", "running_")
    launched = []
    for event in seen.events():
        on_gpu = event.device_type == torch.autograd.DeviceType.CUDA
        if on_gpu and event.name.startswith(ours):
            launched.append(event.name)
    launched.sort()
    assert launched == ["finish_moments", "finish_power_step", "norm_backward", "norm_forward"]


def test_evaluation_in_a_graph():
    norm = NORMS["pn with layer-scale"]().cuda().eval()
    x = torch.randn(64, 8, 512, device="cuda")
    with torch.no_grad():
        expected = norm(x)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = norm(x)
    y.zero_()
    graph.replay()
    torch.testing.assert_close(y, expected, rtol=0, atol=0)


@pytest.mark.parametrize("name", NORMS)
def test_replays_of_a_training_step_move_the_state(name):
    """A captured step, forward and backward, moves the state and gives dx at every replay as
    eager steps do.
    """
    norm = NORMS[name]().cuda()
    twin = NORMS[name]().cuda()
    batches = [inputs() for _ in range(4)]
    x, dy, mask = batches[0]
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        norm(x, mask).backward(dy)
    torch.cuda.current_stream().wait_stream(side)
    twin(x.detach().clone().requires_grad_(), mask).backward(dy)
    x.grad = None
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = norm(x, mask)
        y.backward(dy)
    for _ in range(3):
        graph.replay()
        leaf = x.detach().clone().requires_grad_()
        expected = twin(leaf, mask)
        expected.backward(dy)
        torch.testing.assert_close(y, expected)
        torch.testing.assert_close(x.grad, leaf.grad)
    torch.testing.assert_close(norm.state_dict(), twin.state_dict())


def test_evaluation_under_torch_compile():
    norm = NORMS["pn with layer-scale"]().cuda().eval()
    x = torch.randn(64, 8, 512, device="cuda")
    with torch.no_grad():
        torch.testing.assert_close(torch.compile(norm, fullgraph=True)(x), norm(x))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one GPU")
def test_another_device_than_the_current_one():
    assert torch.cuda.current_device() == 0
    check_samples(35, 24, 4, torch.float32, "cuda:1")
