"""Every implementation of the operators against the reference in float64, on shapes that are odd on purpose.

That the reference computes what the papers say is tested in tests/norms, which knows no operator.
"""

import numpy as np
import pytest
import torch

from pn_fairseq import kernels
from pn_fairseq.kernels import reference
from pn_fairseq.kernels.first_use import samples
from pn_fairseq.norms import MaskedBatchNorm
from pn_fairseq.testing.helpers import unrounded

from ..pairwise import pairwise
from .checks import CHANGES, EPS, check_faults, check_samples
from .conftest import INTERPRETED

pytestmark = pytest.mark.usefixtures("implementation")
OPS = torch.ops.pn_fairseq

#: Relative to the largest value of a result: 64 roundings of float32, also before the one to a half type.
TOLERANCE = {torch.float64: 1e-12, **dict.fromkeys((torch.float32, torch.bfloat16, torch.float16), 2**-18)}


def make(shape, mask, dtype, seed=0):
    """x, dy, padding in the order of the rows, and four vectors over channels, all away from 0 and 1."""
    generator = torch.Generator().manual_seed(seed)
    channels = shape[-1]
    x = torch.randn(shape, generator=generator, dtype=torch.float64) * 1.7 + 0.4
    dy = torch.randn(shape, generator=generator, dtype=torch.float64)
    outer = shape[:-1]
    padding = None
    if mask == "some":
        padding = torch.rand(outer, generator=generator) < 0.3
        padding.view(-1)[0] = False
    vectors = torch.rand((4, channels), generator=generator, dtype=torch.float64) + 0.5
    return x.to(dtype), dy.to(dtype), padding, vectors.to(torch.float32 if dtype != torch.float64 else dtype)


def assert_close(actual, expected, dtype, what, factor=1.0):
    """Relative to the largest of ``expected``."""
    assert actual.shape == expected.shape, what
    actual, expected = actual.double().numpy(), expected.numpy()
    if dtype in (torch.float16, torch.bfloat16):
        actual = unrounded(actual, expected, dtype)
    close = factor * TOLERANCE[dtype] * abs(expected).max()
    np.testing.assert_allclose(actual, expected, rtol=0, atol=close, err_msg=what)


@pytest.mark.parametrize(
    ("channels", "dtype"), [(1024, torch.float32), (1023, torch.float32), (1024, torch.bfloat16), (2050, torch.float16)]
)
def test_results_larger_than_the_caches(implementation, channels, dtype):
    """They are written around the caches, if their rows are aligned as that needs it; also at the ends."""
    if implementation != "cpp":
        pytest.skip("nothing is special about this size")
    x, dy, padding, (weight, bias, moment, nu) = make((64, channels), "some", dtype)
    times = 2**24 // channels // 64 + 1
    x, dy, padding = (values.repeat_interleave(times, 0) for values in (x, dy, padding))
    groups, center = (2, None) if channels % 2 == 0 else (0, moment - 1)

    def run(module, x, dy, padding):
        y, inv_rms, *_ = module.normalize(x, weight, bias, center, moment, padding, None, groups, EPS, True)
        arguments = dy, x, padding, weight, center, moment, nu, None, inv_rms, groups, EPS, True
        return y, module.gradient(*arguments)[0]

    found = run(kernels, x, dy, padding)
    for rows in (slice(0, 3), slice(-3, None)):
        expected = run(reference, x[rows].double(), dy[rows].double(), padding[rows])
        assert_close(found[0][rows], expected[0], dtype, "y", 1.5)
        assert_close(found[1][rows], expected[1], dtype, "dx", 4.0 if dtype == torch.float32 else 2.0)


def test_half_types_are_rounded_once():
    """Each value is the float64 result rounded, or a neighbour of that where float32 arithmetic is not exact enough."""
    for dtype in (torch.float16, torch.bfloat16):
        x, _, _, (weight, bias, moment, _) = make((64, 40), "none", dtype)
        arguments = (weight, bias, None, moment, None, None, 4, EPS, False)
        y, exact = kernels.normalize(x, *arguments)[0], reference.normalize(x.double(), *arguments)[0]
        assert_close(y, exact, dtype, "y")
        assert (y != exact.to(dtype)).float().mean() < 0.01


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_special_values(dtype):
    """Infinities, NaN, subnormal numbers and both zeros pass as through a multiplication by 1."""
    tiny = torch.finfo(dtype).tiny
    values = torch.tensor([0.0, -0.0, float("inf"), -float("inf"), float("nan"), tiny, tiny / 4, 1.0, 3.0]).to(dtype)
    x = values.repeat(4)[None]

    def times(factor, x):
        weight = torch.full((x.size(1),), factor)
        return kernels.normalize(x, weight, None, None, None, None, None, 0, EPS, False)[0]

    torch.testing.assert_close(times(1.0, x), x, rtol=0, atol=0, equal_nan=True)
    assert times(2.0, torch.full((1, 20), torch.finfo(dtype).max, dtype=dtype)).isinf().all()


def test_what_is_not_finite_at_padding_enters_no_statistic():
    x, dy, padding, (weight, _, moment, nu) = make((3, 4, 18), "some", torch.float32)
    clean = kernels.moments(x, padding, 3, EPS, True)
    inv_rms = clean[0]
    products = kernels.gradient(dy, x, padding, weight, None, moment, nu, None, inv_rms, 3, EPS, True)[2]
    x[padding], dy[padding] = float("nan"), float("inf")
    for centered in (True, False):
        for found in kernels.moments(x, padding, 3, EPS, centered)[1:]:
            assert found.isfinite().all()
    assert kernels.normalize(x, None, None, None, moment, padding, None, 3, EPS, True)[2].isfinite().all()
    found = kernels.gradient(dy, x, padding, weight, None, moment, nu, None, inv_rms, 3, EPS, True)[2]
    torch.testing.assert_close(found, products)


@pytest.mark.parametrize("dtype", [torch.float32, *(() if INTERPRETED else (torch.bfloat16, torch.float64))])
@pytest.mark.parametrize("groups", [0, 3])
def test_what_is_not_finite_in_a_token_that_the_loss_does_not_depend_on_reaches_no_gradient(groups, dtype):
    channels = 6 if INTERPRETED else 12  # more than one vector of each implementation
    x, dy, padding, (weight, bias, moment, nu) = make((4, 3, channels), "some", dtype)
    dy[padding] = 0.0
    dy[0, 0, :-4] = 0.0  # a token with some zeros counts
    faulty = x.clone()
    faulty[padding] = torch.tensor([float("nan"), float("inf"), -0.0]).to(dtype).repeat(channels // 3)
    zeros = torch.zeros_like(dy).masked_fill(padding.unsqueeze(-1), -0.0)
    found = []
    for tokens, grad in ((x, dy), (faulty, dy + zeros)):
        inv_rms = OPS.moments(tokens, padding, groups, EPS, False)[0]
        stats = OPS.standardize(tokens, weight, bias, 3, True, 1.0, EPS, 0.0, 0.0, 1.0, 0.0)[1]
        vectors = weight, None, moment
        found += [
            *OPS.gradient(grad, tokens, padding, *vectors, nu, None, inv_rms, groups, EPS, True),
            *OPS.gradient(grad, tokens, padding, weight, bias, moment, nu, bias, inv_rms, groups, EPS, False),
            *OPS.gradient(grad, tokens, None, *vectors, None, None, inv_rms, groups, EPS, True),
            *OPS.gradient_sums(grad, tokens, padding, *vectors, inv_rms, groups, EPS),
            *OPS.standardize_gradient(grad, tokens, weight, stats, 3, 1.0, 0.0, True, True, True),
            *OPS.squash_gradient(grad, tokens, weight, bias[:1], nu[:1], groups == 0),
        ]
    clean, with_faults = found[: len(found) // 2], found[len(found) // 2 :]
    assert all(torch.equal(one, other) for one, other in zip(clean, with_faults, strict=True))


def test_sums_of_many_rows_keep_their_precision():
    """All equal and positive, where a float32 running sum loses a bit with every doubling."""
    x = torch.full((300_000, 3), 1.1)
    exact = x.double().square().mean(0)
    assert_close(kernels.moments(x, None, 0, EPS, False)[2], exact, torch.float32, "second moment", 2.0)


def test_a_large_mean_leaves_the_variance_precise():
    x = torch.randn(4000, 5, dtype=torch.float64) + 1e3
    variance = kernels.moments(x.float(), None, 0, EPS, True)[2].double()
    exact = x.float().double().var(0, unbiased=False)
    torch.testing.assert_close(variance, exact, rtol=1e-4, atol=0)


def test_the_same_threads_give_the_same_bits():
    x, dy, padding, (weight, bias, moment, nu) = make((160, 11, 40), "some", torch.float32)

    def run():
        first = kernels.normalize(x, weight, bias, None, moment, padding, None, 4, EPS, True)
        return *first, *kernels.gradient(dy, x, padding, weight, None, moment, nu, None, first[1], 4, EPS, True)

    threads, results = torch.get_num_threads(), []
    try:
        for number in (1, 2):
            torch.set_num_threads(number)
            results.append(run())
            assert all(map(torch.equal, results[-1], run()))
    finally:
        torch.set_num_threads(threads)
    for a, b in zip(*results, strict=True):
        assert_close(a, b.double(), torch.float32, "two threads", 4.0)  # sums are in another order


def test_in_evaluation_an_infinity_in_x_is_none_in_dx():
    """A norm is linear in h there, also BN, which subtracts a mean."""
    x, dy, padding, (weight, _, moment, mean) = make((4, 3, 21), "some", torch.float32)
    x[1, 1, 3] = float("inf")
    for center in (None, mean):
        for sums in (False, True):
            arguments = (weight, center, moment, None, None, x.new_empty(4, 3, 0), 0, EPS, sums)
            dx = kernels.gradient(dy, x, padding, *arguments)[0]
            torch.testing.assert_close(dx, dy * weight / (moment + EPS).sqrt())
    norm = MaskedBatchNorm(21).eval()
    norm(x.requires_grad_()).sum().backward()
    torch.testing.assert_close(x.grad, torch.full_like(x, (1 + norm.eps) ** -0.5))


#: Tokens, channels, groups: next to a power of two, more tokens than are summed up at once in float32, one token, none,
#: one channel, one in each group. Under Triton's interpreter, which takes a second for a sample, a vector is two wide.
WIDE = [(9, 24, 4), (5, 31, 0), (7, 33, 3), (700, 35, 5)]
SAMPLES = pairwise(
    shape=[*([(5, 6, 2), (3, 5, 0), (4, 9, 3)] if INTERPRETED else WIDE), (1, 8, 2), (0, 16, 2), (5, 1, 1), (6, 7, 7)],
    dtype=list(TOLERANCE),
    change=list(CHANGES),
)


@pytest.mark.parametrize(
    "sample",
    [
        pytest.param(row, marks=pytest.mark.slow if INTERPRETED and place % 16 else ())
        for place, row in enumerate(SAMPLES)
    ],
    ids=lambda sample: " ".join(map(str, sample.values())),
)
def test_samples(sample):
    """The calls that `pn check` and the first use of a GPU compare; wherever the tokens lie, results are contiguous."""
    check_samples(*sample["shape"], sample["dtype"], change=sample["change"])


@pytest.mark.parametrize("channels", [1, 33])
def test_a_fault_leaves_the_state(channels):
    check_faults(channels, "cpu")


def test_opcheck():
    """The operators change none of their arguments and alias none. Tracing sees the shapes of the results."""
    seen = {}
    for name, arguments in samples(torch.float32, torch.device("cpu"), [(12, 12, 3)]):
        seen.setdefault((name, *(argument is None for argument in arguments)), arguments)
    for (name, *_), arguments in seen.items():
        torch.library.opcheck(getattr(OPS, name).default, arguments, test_utils=["test_schema", "test_faketensor"])


def test_sizes_that_do_not_fit_are_refused(implementation):
    """An implementation reads through pointers: it must not read what is not its own."""
    if implementation != "cpp":
        pytest.skip("torch and Triton check")
    x = torch.randn(4, 6)
    short = torch.ones(3, dtype=torch.bool)
    for weight, groups, padding in ((torch.ones(5), 0, None), (None, 4, None), (None, 0, short)):
        with pytest.raises(ValueError, match="do not fit x of shape"):
            kernels.normalize(x, weight, None, None, None, padding, None, groups, EPS, True)


@pytest.mark.parametrize("groups", [0, 2])
def test_gradients_of_evaluation(groups):
    """By finite differences."""
    x, _, _, (weight, bias, moment, mean) = make((2, 2, 6), "none", torch.float64)
    inputs = [value.requires_grad_() for value in (x, weight, bias)]
    assert torch.autograd.gradcheck(lambda *inputs: kernels.evaluate(*inputs, mean, moment, groups, EPS), inputs)
    with pytest.raises(RuntimeError, match="no second derivative"):
        y = kernels.evaluate(x, weight, bias, mean, moment, groups, EPS)
        torch.autograd.grad(y.sum(), x, create_graph=True)
