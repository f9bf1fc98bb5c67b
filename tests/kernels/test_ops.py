"""The operators against formulas in float64, on shapes that are odd on purpose, with every implementation there is."""

from itertools import product

import numpy as np
import pytest
import torch

from pn_fairseq import kernels
from pn_fairseq.kernels import reference
from pn_fairseq.kernels.first_use import samples
from pn_fairseq.norms import MaskedBatchNorm
from pn_fairseq.testing.helpers import unrounded

from ..pairwise import in_pairs, pairwise
from .checks import CHANGES, EPS, check_samples
from .conftest import INTERPRETED

pytestmark = pytest.mark.usefixtures("implementation")
ALPHA = 0.9
OPS = torch.ops.pn_fairseq

#: Relative to the largest value of a result: 64 roundings of float32, also before the one to a half type.
TOLERANCE = {torch.float64: 1e-12, **dict.fromkeys((torch.float32, torch.bfloat16, torch.float16), 2**-18)}

# (..., C), and layer-scale groups.
SHAPES = [
    ((5, 3, 64), 4),
    ((3, 7, 67), 0),  # a prime, three above vectors of any width
    ((4, 3, 31), 1),  # one below a power of two
    ((2, 5, 21), 3),  # groups narrower than a vector
    ((3, 3, 13), 13),  # groups of one channel
    ((1, 1, 48), 2),  # one token
    ((37, 1, 1), 1),  # one channel
    ((700, 33), 3),  # more rows than are summed up at once in float32
    ((0, 3, 8), 2),
    ((4, 0, 8), 0),
]
#: Every shape in every type with padding; without padding, and with nothing else, in one of two types.
PASSES = list(product(SHAPES, ["some"], TOLERANCE)) + [
    tuple(row.values())
    for row in pairwise(shape_and_groups=SHAPES, mask=["none", "all"], dtype=[torch.float32, torch.bfloat16])
]


def make(shape, mask, dtype, seed=0):
    """x, dy, padding in the order of the rows, and four vectors over channels, all away from 0 and 1."""
    generator = torch.Generator().manual_seed(seed)
    channels = shape[-1]
    x = torch.randn(shape, generator=generator, dtype=torch.float64) * 1.7 + 0.4
    dy = torch.randn(shape, generator=generator, dtype=torch.float64)
    outer = shape[:-1]
    padding = {"none": None, "all": torch.ones(outer, dtype=torch.bool)}.get(mask, torch.zeros(outer, dtype=torch.bool))
    if mask == "some" and padding.numel() > 1:
        padding = torch.rand(outer, generator=generator) < 0.3
        padding.view(-1)[0] = False
    vectors = torch.rand((4, channels), generator=generator, dtype=torch.float64) + 0.5
    return x.to(dtype), dy.to(dtype), padding, vectors.to(torch.float32 if dtype != torch.float64 else dtype)


def real_rows(x, padding):
    rows = x.double().flatten(0, -2)
    real = torch.ones(len(rows), dtype=torch.bool) if padding is None else ~padding.flatten()
    return rows, real


def scaled(rows, groups):
    if groups == 0:
        return rows, rows.new_empty(len(rows), 0)
    split = rows.unflatten(-1, (groups, rows.size(-1) // groups))
    inverse = 1 / (split.pow(2).mean(-1) + EPS).sqrt()
    return (split * inverse[..., None]).reshape(rows.shape), inverse


def assert_close(actual, expected, dtype, what, factor=1.0, terms=None):
    """Relative to the largest of ``expected``, or of the ``terms`` that it is a difference of."""
    assert actual.shape == expected.shape, what
    if expected.numel():
        size = torch.stack([value.abs().max() for value in (expected, *([] if terms is None else [terms]))]).max()
        actual, expected = actual.detach().double().numpy(), expected.detach().numpy()
        if dtype in (torch.float16, torch.bfloat16):
            actual = unrounded(actual, expected, dtype)
        np.testing.assert_allclose(actual, expected, rtol=0, atol=factor * TOLERANCE[dtype] * float(size), err_msg=what)


def formulas(x, dy, padding, weight, bias, mean, moment, nu, offset, groups):
    """Everything that the operators compute of a batch, in float64, by the formulas of reference.py."""
    rows, real = real_rows(x, padding)
    dy = dy.double().flatten(0, -2)
    h, inverse = scaled(rows, groups)
    root = (moment.double() + EPS).sqrt()
    xhat = (h - mean) / root
    dxhat = dy * weight.double()
    dh = (dxhat - real[:, None] * (nu * xhat + offset)) / root
    dx = dh
    if groups:
        split, hot = (values.unflatten(-1, (groups, -1)) for values in (dh, h))
        dx = ((split - hot * (split * hot).mean(-1, keepdim=True)) * inverse[..., None]).reshape(dh.shape)
    count = int(real.sum())

    def mean_of(values):
        return values[real].mean(0) if count else torch.zeros_like(root)

    own_mean = mean_of(h)
    return {
        "y": weight.double() * xhat + bias.double(),
        "inv_rms": inverse,
        "second moment": mean_of(h.pow(2)),
        "mean": own_mean,
        "variance": mean_of((h - own_mean).pow(2)),
        "count": torch.tensor(float(count), dtype=torch.float64),
        "dx": dx,
        "dh": dh if not groups else dh * inverse.repeat_interleave(h.size(1) // groups, 1),
        "parameters": torch.stack([(dy * xhat).sum(0), dy.sum(0)]),
        "products": torch.stack([(dxhat * xhat)[real].sum(0), dxhat[real].sum(0)]),
    }


@pytest.mark.parametrize(("shape_and_groups", "mask", "dtype"), PASSES, ids=str)
def test_passes_over_the_tokens(shape_and_groups, mask, dtype):
    shape, groups = shape_and_groups
    x, dy, padding, (weight, bias, moment, nu) = make(shape, mask, dtype)
    acc = torch.float64 if dtype == torch.float64 else torch.float32
    mean, offset = nu - 1, bias - 1
    for center, along, across in ((mean, nu, offset), (None, nu, None), (None, None, None)):
        zero = torch.zeros(())
        given = (zero if value is None else value.double() for value in (center, along, across))
        expected = formulas(x, dy, padding, weight, bias, next(given), moment, *given, groups)

        def check(name, value, dtype=acc, factor=1.0, expected=expected):
            assert value.dtype == dtype, name
            flat = value.flatten(0, -2) if value.dim() == len(shape) and len(shape) > 2 else value
            terms = {"variance": "second moment", "dx": "dh"}.get(name, name)
            assert_close(flat, expected[name], dtype, name, factor, expected[terms])

        y, inv_rms, second, count = kernels.normalize(x, weight, bias, center, moment, padding, None, groups, EPS, True)
        check("y", y, dtype, 1.5), check("inv_rms", inv_rms)
        check("second moment", second), check("count", count)
        again, *empty = kernels.normalize(x, weight, bias, center, moment, None, inv_rms, groups, EPS, False)
        assert_close(again.flatten(0, -2), expected["y"], dtype, "y by given inv_rms", 1.5)
        assert [value.numel() for value in empty] == [0, 0, 0]

        _, own_mean, variance, count = kernels.moments(x, padding, groups, EPS, True)
        check("mean", own_mean, factor=2), check("variance", variance, factor=2), check("count", count)
        _, none, second, _ = kernels.moments(x, padding, groups, EPS, False)
        check("second moment", second)
        assert none.numel() == 0

        vectors = (weight, center, moment)
        dx, parameters, products = kernels.gradient(dy, x, padding, *vectors, along, across, inv_rms, groups, EPS, True)
        check("dx", dx, dtype, 4.0 if dtype == torch.float32 else 2.0)
        check("parameters", parameters, factor=4), check("products", products, factor=4)
        only_dx, *empty = kernels.gradient(dy, x, padding, *vectors, along, across, inv_rms, groups, EPS, False)
        assert torch.equal(only_dx, dx) and [value.numel() for value in empty] == [0, 0]
        sums = kernels.gradient_sums(dy, x, padding, *vectors, inv_rms, groups, EPS)
        check("parameters", sums[0], factor=4), check("products", sums[1], factor=4)


#: centered, square_factor, eps_in_root, eps_outside, min_divisor; gain, gain_slope; through the mean, through the
#: divisor; weight and bias.
PER_TOKEN = [
    ((True, 1.0, EPS, 0.0, 0.0), (1.0, 0.0), (True, True), True),  # GN
    ((True, 1.0, EPS, 0.0, 0.0), (1.0, 0.0), (False, True), False),  # DetachNorm
    ((True, 1.0, EPS, 0.0, 0.0), (2.0, -0.2), (True, False), False),
    ((True, 1.25, 0.0, 1e-3, 0.0), (2.0, -0.2), (True, True), False),  # AdaNorm
    ((False, 1.0, EPS, 0.0, 0.0), (1.0, 0.0), (False, True), True),  # RMSNorm
    ((False, 12.0, 0.0, 0.0, 6.0), (1.0, 0.0), (False, True), True),  # ScaleNorm, some tokens below the bound
]


@in_pairs(shape_and_groups=SHAPES, settings=PER_TOKEN, dtype=list(TOLERANCE))
def test_statistics_of_a_token(shape_and_groups, settings, dtype):
    """By torch's differentiation in float64."""
    (shape, groups), (divisor, curve, through, affine) = shape_and_groups, settings
    groups = max(groups, 1)
    x, dy, _, (weight, bias, *_) = make(shape, "none", dtype)
    wide, gain, shift = (value.double().requires_grad_() for value in (x, weight, bias))
    centered, factor, inside, outside, least = divisor

    def seen(value, goes_through):
        return value if goes_through else value.detach()

    h = wide.unflatten(-1, (groups, shape[-1] // groups))
    mean = h.mean(-1, keepdim=True) if centered else torch.zeros(1, dtype=torch.float64)
    # 1e-60: the derivative of a root is infinite at 0, where a group has one channel.
    root = (factor * (h - mean).square().mean(-1, keepdim=True) + inside + 1e-60).sqrt() + outside
    z = (h - seen(mean, through[0])) / seen(root.clamp(min=least), through[1])
    expected = (z * (curve[0] + curve[1] * z.detach())).flatten(-2)
    if affine:
        expected = expected * gain + shift
    expected.backward(dy.double())
    given = (weight, bias) if affine else (None, None)
    y, stats = OPS.standardize(x, *given, groups, *divisor, *curve)
    dx, sums = OPS.standardize_gradient(dy, x, given[0], stats, groups, *curve, *through, affine)
    steep = (1 / root).max().double() * dy.double().abs().max() if x.numel() else torch.zeros(())
    assert_close(y, expected.detach(), dtype, "y", 4.0 if dtype == torch.float32 else 2.0)
    assert_close(dx, wide.grad, dtype, "dx", 8.0 if dtype == torch.float32 else 2.0, steep)
    assert y.dtype == dx.dtype == dtype and stats.dtype == reference.acc_dtype(x)
    assert stats.shape == (3, *shape[:-1], groups)
    if affine:
        for found, leaf in zip(sums, (gain, shift), strict=True):
            assert_close(found, leaf.grad, dtype, "sums", 8.0, dy.double().abs().sum().detach() / max(shape[-1], 1))
    else:
        assert sums.numel() == 0


@in_pairs(
    shape=[(5, 3, 64), (3, 7, 67), (1, 1), (700, 33), (4, 0, 8)],
    dtype=list(TOLERANCE),
    affine=[True, False],
    erf=[True, False],
)
def test_squashing(shape, erf, affine, dtype):
    """By torch's differentiation in float64."""
    x, dy, _, (weight, bias, alpha, shift) = make(shape, "none", dtype)
    alpha, shift = alpha[:1] * 0.7, shift[:1] - 1 if erf else None
    leaves = [None if value is None else value.double().requires_grad_() for value in (x, weight, bias, alpha, shift)]
    argument = leaves[0] * leaves[3] + (0 if shift is None else leaves[4])
    expected = torch.erf(argument) if erf else torch.tanh(argument)
    if affine:
        expected = expected * leaves[1] + leaves[2]
    expected.backward(dy.double())
    given = (weight, bias) if affine else (None, None)
    y = OPS.squash(x, *given, alpha, shift, erf)
    dx, sums, scalars = OPS.squash_gradient(dy, x, given[0], alpha, shift, erf)
    assert y.dtype == dx.dtype == dtype and sums.dtype == scalars.dtype == reference.acc_dtype(x)
    assert_close(y, expected.detach(), dtype, "y", 4.0)
    assert_close(dx, leaves[0].grad, dtype, "dx", 8.0)
    terms = dy.double().abs().sum() * (x.double().abs().max() + 1 if x.numel() else 1)
    if affine:
        assert_close(sums[0], leaves[1].grad, dtype, "dweight", 4.0, terms / shape[-1])
        assert_close(sums[1], leaves[2].grad, dtype, "dbias", 4.0, terms / shape[-1])
    assert_close(scalars[0], leaves[3].grad[0], dtype, "dalpha", 4.0, terms)
    if erf:
        assert_close(scalars[1], leaves[4].grad[0], dtype, "dshift", 4.0, terms)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("fault", ["none", "no token", "batch", "products"])
@pytest.mark.parametrize("warmup", [0, 4, 9])
def test_operators_on_the_state(warmup, fault, dtype):
    """Formulas of Shen et al. 2020, Algorithm 2, and of a cumulative mean, in float64."""
    generator = torch.Generator().manual_seed(1)
    psi2, nu, used, *batch = torch.rand((5, 33), generator=generator, dtype=torch.float64) * 3 + 0.2
    products = torch.randn((2, 33), generator=generator, dtype=torch.float64) * 50
    count, tracked = torch.tensor(0.0 if fault == "no token" else 17.0, dtype=torch.float64), torch.tensor(4)
    if fault == "batch":
        batch[0][3] = float("inf")
    if fault == "products":
        products[1, 5] = float("nan")
    given = [value.to(dtype) for value in (*batch, products, count)]
    share = 1 / 5 if warmup > 4 else 1 - ALPHA
    counted = fault == "none"

    def check(new, old, expected):
        assert new.dtype == torch.float32
        assert_close(new, expected if counted else old.float().double(), torch.float32, "state", 4)

    moment, mean, after = kernels.running_average(
        psi2.float(), nu.float(), tracked, given[0], given[1], given[2], given[3], warmup, ALPHA
    )
    check(moment, psi2, psi2 + share * (batch[0] - psi2))
    check(mean, nu, nu + share * (batch[1] - nu))
    assert int(after) == 4 + counted and int(tracked) == 4
    assert kernels.running_average(
        psi2.float(), None, tracked, given[0], None, given[2], given[3], warmup, ALPHA
    )[1].numel() == 0  # fmt: skip

    new_psi2, new_nu, after = kernels.power_update(
        psi2.float(), nu.float(), tracked, given[0], used.to(dtype), given[2], given[3], EPS, warmup, ALPHA, 0.7
    )
    gamma, lambda_ = batch[0] / (used + EPS), products[0] / count
    check(new_psi2, psi2, psi2 + share * (batch[0] - psi2))
    check(new_nu, nu, nu * (1 - 0.3 * gamma).clamp(min=0) + 0.3 * lambda_)
    assert int(after) == 4 + counted


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
    groups = 2 if channels % 2 == 0 else 0
    y, inv_rms, *_ = kernels.normalize(x, weight, bias, None, moment, padding, None, groups, EPS, True)
    dx, *_ = kernels.gradient(dy, x, padding, weight, None, moment, nu, None, inv_rms, groups, EPS, True)
    zero = torch.zeros(())
    for rows in (slice(0, 3), slice(-3, None)):
        arguments = (weight, bias, zero, moment, nu.double(), zero, groups)
        expected = formulas(x[rows], dy[rows], padding[rows], *arguments)
        assert_close(y[rows], expected["y"], dtype, "y", 1.5)
        assert_close(dx[rows], expected["dx"], dtype, "dx", 4.0 if dtype == torch.float32 else 2.0)


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
    assert torch.equal(kernels.normalize(x, None, None, None, moment, padding, None, 3, EPS, True)[2].isfinite().all(),
                       torch.tensor(True))  # fmt: skip
    found = kernels.gradient(dy, x, padding, weight, None, moment, nu, None, inv_rms, 3, EPS, True)[2]
    torch.testing.assert_close(found, products)


@pytest.mark.parametrize("dtype", [torch.float32, *(() if INTERPRETED else (torch.bfloat16, torch.float64))])
@pytest.mark.parametrize("groups", [0, 3])
def test_what_is_not_finite_in_a_token_that_the_loss_does_not_depend_on_reaches_no_gradient(groups, dtype):
    x, dy, padding, (weight, bias, moment, nu) = make((4, 3, 12), "some", dtype)
    dy[padding] = 0.0
    dy[0, 0, :8] = 0.0  # a token with some zeros counts
    faulty = x.clone()
    faulty[padding] = torch.tensor([float("nan"), float("inf"), -0.0]).to(dtype).repeat(4)
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

    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        one = run()
        assert all(torch.equal(a, b) for a, b in zip(one, run(), strict=True))
        torch.set_num_threads(2)
        two = run()
        assert all(torch.equal(a, b) for a, b in zip(two, run(), strict=True))
    finally:
        torch.set_num_threads(threads)
    for a, b in zip(one, two, strict=True):
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


#: Tokens, channels, groups: primes, one next to a power of two, one token, none, one channel, one in each group. Under
#: Triton's interpreter, which takes a second for a sample, vectors have two elements.
WIDE = [(9, 24, 4), (5, 31, 0), (7, 33, 3)]
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
    for weight, groups, padding in (
        (torch.ones(5), 0, None),
        (None, 4, None),
        (None, 0, torch.ones(3, dtype=torch.bool)),
    ):
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
