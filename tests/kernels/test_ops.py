"""The operators against formulas in float64, on shapes that are odd on purpose, with every implementation there is."""

import pytest
import torch

from pn_fairseq import kernels
from pn_fairseq.kernels import reference
from pn_fairseq.kernels.contract import CONTIGUOUS, VECTORS, Contract, checked
from pn_fairseq.kernels.ops import SCHEMAS
from pn_fairseq.norms import MaskedBatchNorm

EPS, ALPHA = 1e-5, 0.9
OPS = torch.ops.pn_fairseq

#: Relative to the largest value of a result: float32 arithmetic, and one rounding to the storage type.
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-6, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}

# (T, B, C) or (N, C), and layer-scale groups.
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
MASKS = ["none", "some", "all"]


@pytest.fixture(params=kernels.available(), autouse=True)
def implementation(request):
    if kernels.forced() not in (None, request.param):
        pytest.skip(f"{kernels.VARIABLE}={kernels.forced()}")
    with kernels.using(request.param):
        yield request.param


def make(shape, mask, dtype, seed=0):
    """x, dy, padding mask and vectors over channels, all away from 0 and 1."""
    generator = torch.Generator().manual_seed(seed)
    channels = shape[-1]
    x = torch.randn(shape, generator=generator, dtype=torch.float64) * 1.7 + 0.4
    dy = torch.randn(shape, generator=generator, dtype=torch.float64)
    outer = shape[-2::-1]
    padding = {"none": None, "all": torch.ones(outer, dtype=torch.bool)}.get(mask, torch.zeros(outer, dtype=torch.bool))
    if mask == "some" and padding.numel() > 1:
        padding = torch.rand(outer, generator=generator) < 0.3
        padding.view(-1)[0] = False
    vectors = torch.rand((4, channels), generator=generator, dtype=torch.float64) + 0.5
    return x.to(dtype), dy.to(dtype), padding, vectors.to(torch.float32 if dtype != torch.float64 else dtype)


def real_rows(x, padding):
    rows = x.double().flatten(0, -2)
    real = torch.ones(len(rows), dtype=torch.bool) if padding is None else ~padding.transpose(0, -1).flatten()
    return rows, real


def scaled(rows, groups):
    if groups == 0:
        return rows, rows.new_empty(len(rows), 0)
    split = rows.unflatten(-1, (groups, rows.size(-1) // groups))
    inverse = 1 / (split.pow(2).mean(-1) + EPS).sqrt()
    return (split * inverse[..., None]).reshape(rows.shape), inverse


def assert_close(actual, expected, dtype, what, factor=1.0):
    assert actual.shape == expected.shape, what
    if expected.numel():
        error = (actual.double() - expected).abs().max() / expected.abs().max().clamp(min=1e-30)
        assert error <= factor * TOLERANCE[dtype], f"{what}: {float(error):.2e}"


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=lambda dtype: str(dtype)[6:])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize(("shape", "groups"), SHAPES)
def test_a_training_step_of_pn(shape, groups, mask, dtype):
    x, dy, padding, (weight, bias, psi2, nu) = make(shape, mask, dtype)
    psi2, nu, steps = psi2.float(), nu.float(), torch.tensor(3)
    old_psi2, old_nu = psi2.double(), nu.double()
    for warmup in (0, 10):
        psi2.copy_(old_psi2), nu.copy_(old_nu), steps.fill_(3)
        state = (groups, EPS, ALPHA)
        y, inv_rms, vectors, tally = kernels.power_forward(
            x, padding, weight, bias, psi2, nu, steps, *state, warmup, True
        )
        rows, real = real_rows(x, padding)
        h, inverse = scaled(rows, groups)
        count = int(real.sum())
        batch = h[real].pow(2).mean(0) if count else torch.zeros_like(old_psi2)
        used = batch if warmup and count else old_psi2
        root = (used + EPS).sqrt()
        share = (1 / 4 if warmup else 1 - ALPHA) if count else 0.0
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        assert_close(y.reshape(rows.shape), weight.double() * h / root + bias.double(), dtype, "y", 1.5)
        assert_close(inv_rms.reshape(inverse.shape), inverse, wide, "inv_rms")
        assert_close(psi2, old_psi2 + share * (batch - old_psi2), torch.float32, "psi2")
        assert tally.tolist() == [count, int(count > 0), int(warmup > 0), 3] and int(steps) == 3 + (count > 0)
        assert_close(vectors[reference.PSI2_BATCH], batch, wide, "batch")

        after = steps.clone(), psi2.clone()
        dx, dweight, dbias, total = kernels.power_backward(
            dy, x, padding, weight, inv_rms, vectors, psi2, nu, steps, tally, *state, True
        )
        grad = dy.double().flatten(0, -2)
        product = (grad * weight.double() * h / root)[real].sum(0)
        dh = (weight.double() * grad - real[:, None] * old_nu * h / root) / root
        if groups:
            split, by = (each.unflatten(-1, (groups, shape[-1] // groups)) for each in (dh, h))
            dh = ((split - by * (split * by).mean(-1, keepdim=True)) * inverse[..., None]).reshape(rows.shape)
        # Groups of one channel have a gradient that is a difference of equal terms.
        factor = 1e4 if groups == shape[-1] else 2.0
        assert_close(dx.reshape(rows.shape), dh, dtype, "dx", factor)
        scale = grad.abs().sum(0).max() + 1
        for name, found, expected in (
            ("dweight", dweight, (grad * h / root).sum(0)),
            ("dbias", dbias, grad.sum(0)),
            ("lambda", total, product),
        ):
            assert (found.double() - expected).abs().max() <= 4 * TOLERANCE[wide] * scale, name
        guard = (1 - (1 - ALPHA) * batch / (used + EPS)).clamp(min=0)
        expected = old_nu * guard + (1 - ALPHA) * product / max(1, count) if count else old_nu
        assert (nu.double() - expected).abs().max() <= 4e-6 * (1 + expected.abs().max())
        assert torch.equal(steps, after[0]) and torch.equal(psi2, after[1])


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=lambda dtype: str(dtype)[6:])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize(("shape", "groups"), SHAPES)
@pytest.mark.parametrize("centered", [False, True], ids=["pn-v", "bn"])
def test_a_training_step_of_pn_v_and_bn(centered, shape, groups, mask, dtype):
    """The gradient is what autograd gives for the formula, in which padding takes no part in the statistics'."""
    x, dy, padding, (weight, bias, running_moment, running_mean) = make(shape, mask, dtype)
    state = running_mean.float() if centered else None, running_moment.float(), torch.tensor(3)
    old = [each.double() for each in state if each is not None]
    y, inv_rms, vectors, tally = kernels.batch_forward(
        x, padding, weight, bias, *state, groups, EPS, ALPHA, mask == "none", True
    )
    dx, dweight, dbias, sums = kernels.batch_backward(
        dy, x, padding, weight, inv_rms, vectors, *state, tally, groups, EPS, True
    )
    rows, real = real_rows(x, padding)
    rows.requires_grad_()
    h, inverse = scaled(rows, groups)
    count = int(real.sum())
    mean = h[real].sum(0) / max(count, 1) if centered else torch.zeros(shape[-1], dtype=torch.float64)
    moment = (h - mean)[real].pow(2).sum(0) / max(count, 1)
    root = (moment + EPS).sqrt()
    x_hat = torch.where(real[:, None], (h - mean) / root, (h - mean.detach()) / root.detach())
    grad = dy.double().flatten(0, -2)
    result = x_hat * weight.double() + bias.double()
    (expected_dx,) = torch.autograd.grad(result, rows, grad)
    h, mean, moment, root, x_hat = (each.detach() for each in (h, mean, moment, root, x_hat))

    wide = torch.float64 if dtype == torch.float64 else torch.float32
    steep = weight.double() / root  # 300 and more where a channel has one value only
    precision = 4 * TOLERANCE[wide] * ((h.abs() + mean.abs()).amax(0) if len(h) else mean + 1)

    def assert_within(found, expected, bound, what):
        assert found.shape == expected.shape, what
        assert ((found.double() - expected).abs() <= bound + TOLERANCE[found.dtype] * 2 * expected.abs()).all(), what

    assert_within(y.reshape(rows.shape), result.detach(), precision * steep, "y")
    assert_close(inv_rms.reshape(inverse.shape), inverse.detach(), wide, "inv_rms")
    assert_within(vectors[reference.MOMENT], moment, precision, "moment")
    counted = count > 1 if centered else count > 0
    share = (1 / 4 if mask == "none" else 1 - ALPHA) if counted else 0.0
    unbiased = moment * count / max(count - 1, 1) if centered else moment
    precision = 4 * TOLERANCE[torch.float32] * (1 + old[-2].max() + unbiased.max() + mean.abs().max())
    assert_within(state[1], old[-2] + share * (unbiased - old[-2]), precision, "running moment")
    if centered:
        assert_within(vectors[reference.MEAN], mean, precision, "mean")
        assert_within(state[0], old[0] + share * (mean - old[0]), precision, "running mean")
    assert len(vectors) == (4 if centered else 2)
    assert tally.tolist() == [count, int(counted), int(mask == "none"), 3] and int(state[2]) == 3 + counted

    largest = grad.abs().max() if len(grad) else 1.0
    bound = 8 * TOLERANCE[wide] * largest * steep.max() * (inverse.detach().max() if inverse.numel() else 1)
    assert_within(dx.reshape(rows.shape), expected_dx, bound, "dx")
    products = (grad * (h - mean)), grad
    bound = 8 * TOLERANCE[wide] * (1 + sum(each.abs().sum(0).max() for each in products) + count * mean.abs().max())
    assert_within(sums, torch.stack([each[real].sum(0) for each in products]), bound, "sums")
    assert_within(dweight, (grad * x_hat).sum(0), bound / root, "dweight")
    assert_within(dbias, grad.sum(0), bound, "dbias")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=lambda dtype: str(dtype)[6:])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize(("shape", "groups"), SHAPES)
def test_the_parts_give_what_the_reference_gives(shape, groups, mask, dtype):
    x, dy, padding, (scale, slope, offset, mean) = make(shape, mask, dtype)
    wide = scale.dtype
    for centered in (False, True):
        found = kernels.moments(x, padding, groups, EPS, centered)
        expected = reference.moments(x.double(), padding, groups, EPS, centered)
        for number, (one, other) in enumerate(zip(found, expected, strict=True)):
            assert one.shape == other.shape
            if other.numel():
                assert (one.double() - other).abs().max() <= 4 * TOLERANCE[wide] * (1 + other.abs().max()), number
    inv_rms = found[0]
    for center in (None, mean):
        for given in (None, inv_rms):
            y, _ = kernels.normalize(x, scale, offset, center, slope, given, groups, EPS)
            wanted, _ = reference.normalize(x.double(), scale, offset, center, slope, None, groups, EPS)
            assert_close(y, wanted, dtype, "y", 1.5)
        sums = kernels.gradient_sums(dy, x, padding, center, inv_rms, groups)
        exact = reference.gradient_sums(dy.double(), x.double(), padding, center, inv_rms.double(), groups)
        bound = 8 * TOLERANCE[wide] * (1 + exact.abs().max()) if exact.numel() else 0
        assert (sums.double() - exact).abs().max() <= bound
        for own_slope, own_offset in ((None, None), (None, offset), (slope, None), (slope, offset)):
            for wanted in (True, False):
                arguments = (padding, scale, own_slope, own_offset, center)
                dx, total = kernels.gradient(dy, x, *arguments, inv_rms, groups, wanted)
                exact_dx, _ = reference.gradient(dy.double(), x.double(), *arguments, inv_rms.double(), groups, False)
                factor = 1e4 if groups == shape[-1] else 4.0
                assert_close(dx, exact_dx, dtype, "dx", factor)
                assert total.numel() == (sums.numel() if wanted else 0)
                if wanted:
                    assert (total.double() - exact).abs().max() <= bound


def layouts(x):
    """The same values in other layouts, one of them with its channels apart from one another."""
    yield "batch-first", x.transpose(0, 1).contiguous().transpose(0, 1)
    larger = torch.zeros(x.size(0), x.size(1) + 2, x.size(2) + 5, dtype=x.dtype)
    larger[:, 1:-1, 2:-3] = x
    yield "slice", larger[:, 1:-1, 2:-3]
    yield "every second channel", torch.stack([x, x], -1).flatten(-2)[..., ::2]
    yield "channels first", x.permute(2, 0, 1).contiguous().permute(1, 2, 0)


def whole_steps(groups, weight, bias, moment, other):
    """Every training step that is one operator each way: x, dy, mask -> results and state, number of steps after the
    forward, and after both, and the tally. Vectors are (C,)."""

    def power(x, dy, padding):
        *state, steps = moment.clone(), other.clone(), torch.tensor(0)
        y, inv_rms, vectors, tally = kernels.power_forward(
            x, padding, weight, bias, *state, steps, groups, EPS, ALPHA, 0, True
        )
        in_between = steps.clone()
        arguments = (inv_rms, vectors, *state, steps, tally, groups, EPS, ALPHA, True)
        return y, *kernels.power_backward(dy, x, padding, weight, *arguments), *state, in_between, steps, tally

    def batch(x, dy, padding, centered):
        *state, steps = other.clone() if centered else None, moment.clone(), torch.tensor(0)
        y, inv_rms, vectors, tally = kernels.batch_forward(
            x, padding, weight, bias, *state, steps, groups, EPS, ALPHA, False, True
        )
        in_between = steps.clone()
        arguments = (inv_rms, vectors, *state, steps, tally, groups, EPS, True)
        changed = state if centered else state[1:]
        return y, *kernels.batch_backward(dy, x, padding, weight, *arguments), *changed, in_between, steps, tally

    return {
        "pn": power,
        "pn-v": lambda *given: batch(*given, centered=False),
        "bn": lambda *given: batch(*given, centered=True),
    }


STEPS = ["pn", "pn-v", "bn"]


@pytest.mark.parametrize("norm", STEPS)
@pytest.mark.parametrize("groups", [0, 3])
def test_layouts_make_no_difference(norm, groups):
    x, dy, padding, vectors = make((5, 4, 33), "some", torch.float32)
    step = whole_steps(groups, *vectors)[norm]
    expected = step(x, dy, padding)
    for (name, other_x), (_, other_dy) in zip(layouts(x), list(layouts(dy))[::-1], strict=True):
        found = step(other_x, other_dy, padding.t().contiguous().t())
        for one, other in zip(found, expected, strict=True):
            assert_close(one, other.double(), torch.float32, name)  # sums are in another order
        assert found[0].stride() == torch.empty_like(other_x).stride(), name
    token = dy[:1, :1].clone()
    expanded = step(x, token.expand(5, 4, 33), padding)
    for one, other in zip(expanded, step(x, token.repeat(5, 4, 1), padding), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("channels", "dtype"), [(1024, torch.float32), (1023, torch.float32), (1024, torch.bfloat16), (2050, torch.float16)]
)
def test_what_no_cache_holds(implementation, channels, dtype):
    """Results of this size are written around the caches, if their rows lie as that needs it; at the ends, too."""
    if implementation != "cpp":
        pytest.skip("nothing is special about this size")
    x, dy, padding, (weight, bias, psi2, nu) = make((2**23 // channels + 3, 2, channels), "some", dtype)
    state = psi2.clone(), nu.clone(), torch.tensor(0)
    groups = 2 if channels % 2 == 0 else 0
    y, inv_rms, vectors, tally = kernels.power_forward(x, padding, weight, bias, *state, groups, EPS, ALPHA, 0, True)
    dx, *_ = kernels.power_backward(
        dy, x, padding, weight, inv_rms, vectors, *state, tally, groups, EPS, ALPHA, True
    )  # fmt: skip
    scale = weight.double() / (psi2.double() + EPS).sqrt()
    for rows in (slice(0, 2), slice(-2, None)):
        part = x[rows].double()
        h = scaled(part.flatten(0, 1), groups)[0].view(part.shape) if groups else part
        assert_close(y[rows], h * scale + bias.double(), dtype, "y")
        real = torch.ones(part.shape[:2], dtype=torch.bool) if padding is None else ~padding.t()[rows]
        dh = dy[rows].double() * scale - real[..., None] * (nu.double() * h / (psi2.double() + EPS))
        if groups:
            split, hot = (v.unflatten(-1, (groups, -1)) for v in (dh, h))
            inverse = scaled(part.flatten(0, 1), groups)[1].view(*part.shape[:2], groups, 1)
            dh = ((split - hot * (split * hot).mean(-1, keepdim=True)) * inverse).flatten(-2)
        assert_close(dx[rows], dh, dtype, "dx", factor=4.0 if dtype == torch.float32 else 1.0)


def test_half_types_are_rounded_once():
    """Each value is the nearest one to what float64 gives, or next to it where float32 arithmetic could not tell."""
    for dtype in (torch.float16, torch.bfloat16):
        x, _, _, (weight, bias, psi2, _) = make((64, 40), "none", dtype)
        y, _ = kernels.normalize(x, weight, bias, None, psi2, None, 4, EPS)
        exact, _ = reference.normalize(x.double(), weight, bias, None, psi2, None, 4, EPS)
        units = (y.view(torch.int16).int() - exact.to(dtype).view(torch.int16).int()).abs()
        assert units.max() <= 1 and (units > 0).float().mean() < 0.01


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_special_values(dtype):
    """Infinities, NaN, subnormal numbers and both zeros pass as through a multiplication by 1."""
    tiny = torch.finfo(dtype).tiny
    values = torch.tensor([0.0, -0.0, float("inf"), -float("inf"), float("nan"), tiny, tiny / 4, 1.0, 3.0]).to(dtype)
    x = values.repeat(4)[None]
    y, _ = kernels.normalize(x, torch.ones(x.size(1)), None, None, None, None, 0, EPS)
    torch.testing.assert_close(y, x, rtol=0, atol=0, equal_nan=True)
    big = torch.full((1, 20), torch.finfo(dtype).max, dtype=dtype)
    assert kernels.normalize(big, torch.full((20,), 2.0), None, None, None, None, 0, EPS)[0].isinf().all()


@pytest.mark.parametrize("norm", STEPS)
@pytest.mark.parametrize("where", ["x", "dy"])
def test_a_step_that_is_not_finite_is_taken_back(norm, where):
    x, dy, padding, (weight, bias, moment, other) = make((5, 4, 33), "some", torch.float32)
    (x if where == "x" else dy)[0, 0, 17] = float("nan")
    *results, in_between, steps, tally = whole_steps(3, weight, bias, moment, other)[norm](x, dy, padding)
    assert int(in_between) == (0 if where == "x" else 1)
    before = {"pn": [moment, other], "pn-v": [moment], "bn": [other, moment]}[norm]
    assert all(torch.equal(now, old) for now, old in zip(results[-len(before) :], before, strict=True))
    assert int(steps) == 0 and tally.tolist() == [int((~padding).sum()), 0, 0, 0]


def test_sums_of_many_rows_keep_their_precision():
    """All equal and positive, where a float32 running sum loses a bit with every doubling."""
    x = torch.full((300_000, 3), 1.1)
    squares = kernels.moments(x, None, 0, EPS, False)[2][0]
    exact = x.double().square().sum(0)
    assert ((squares.double() - exact) / exact).abs().max() < 1e-6


@pytest.mark.parametrize("norm", STEPS)
def test_the_same_threads_give_the_same_bits(norm):
    x, dy, padding, vectors = make((160, 11, 40), "some", torch.float32)

    def step():
        return whole_steps(4, *vectors)[norm](x, dy, padding)

    one = step()
    assert all(torch.equal(a, b) for a, b in zip(one, step(), strict=True))
    try:
        torch.set_num_threads(2)
        two = step()
        assert all(torch.equal(a, b) for a, b in zip(two, step(), strict=True))
    finally:
        torch.set_num_threads(1)
    for a, b in zip(one, two, strict=True):
        assert_close(a, b.double(), torch.float32, "two threads")  # sums are in another order


def test_without_a_slope_the_gradient_does_not_depend_on_x():
    """In evaluation a norm is linear in h, so an infinity in x is none in dx: also in BN, which subtracts a mean."""
    x, dy, padding, (scale, _, offset, mean) = make((4, 3, 21), "some", torch.float32)
    x[1, 1, 3] = float("inf")
    for center in (None, mean):
        for sums in (False, True):
            for own_offset in (None, offset):
                arguments = padding, scale, None, own_offset, center, x.new_empty(4, 3, 0), 0, sums
                torch.testing.assert_close(kernels.gradient(dy, x, *arguments)[0], dy * scale)
    norm = MaskedBatchNorm(21).eval()
    norm(x.requires_grad_()).sum().backward()
    torch.testing.assert_close(x.grad, torch.full_like(x, (1 + norm.eps) ** -0.5))


def samples():
    """Arguments of every operator, with and without what may be left out."""
    x, dy, padding, (weight, bias, psi2, nu) = make((4, 3, 12), "some", torch.float32)
    for groups in (0, 3):
        inv_rms, _, _, _ = kernels.moments(x, padding, groups, EPS, False)
        yield "moments", (x, padding, groups, EPS, groups == 0)
        yield "normalize", (x.clone().requires_grad_(), weight, bias, nu, psi2, None, groups, EPS)
        yield "normalize", (x, None, None, None, None, inv_rms, groups, EPS)
        yield "gradient_sums", (dy, x, padding, nu if groups else None, inv_rms, groups)
        yield "gradient", (dy, x, None, weight, None, None, None, inv_rms, groups, False)
        yield "gradient", (dy, x.transpose(0, 1).contiguous().transpose(0, 1), padding, weight, bias, psi2, nu,
                           inv_rms, groups, True)  # fmt: skip
        state = psi2.clone(), nu.clone(), torch.tensor(1)
        yield "power_forward", (x, padding, weight, bias, *state, groups, EPS, ALPHA, 3, True)
        yield "power_forward", (x.bfloat16(), None, None, None, *state, groups, EPS, ALPHA, 0, False)
        _, _, vectors, tally = kernels.power_forward(x, padding, weight, bias, *state, groups, EPS, ALPHA, 0, True)
        rest = (inv_rms, vectors, *state, tally, groups, EPS, ALPHA, True)
        yield "power_backward", (dy, x, padding, weight.bfloat16(), *rest)
        yield "power_backward", (dy, x, None, None, *rest)
        for mean in (None, nu.clone()):
            state = mean, psi2.clone(), torch.tensor(1)
            yield "batch_forward", (x, padding, weight, bias, *state, groups, EPS, ALPHA, groups == 0, True)
            yield "batch_forward", (x.bfloat16(), None, None, None, *state, groups, EPS, ALPHA, False, False)
            _, _, vectors, tally = kernels.batch_forward(
                x, padding, None, None, *state, groups, EPS, ALPHA, False, True
            )
            rest = (inv_rms, vectors, *state, tally, groups, EPS, True)
            yield "batch_backward", (dy, x, padding, weight.bfloat16(), *rest)
            yield "batch_backward", (dy, x, None, None, *rest)


def test_opcheck(implementation):
    """Schemas tell what is changed in place and nothing is aliased; shapes and gradients for tracing are registered."""
    seen = set()
    for name, arguments in samples():
        checks = ["test_schema", "test_autograd_registration", "test_faketensor"]
        if name not in seen and implementation == kernels.available()[-1]:
            checks.append("test_aot_dispatch_dynamic")  # traces the operator, not what it computes: once will do
        torch.library.opcheck(getattr(OPS, name).default, arguments, test_utils=checks)
        seen.add(name)
    assert seen == set(SCHEMAS)


def check_versions():
    """Autograd is told of what is changed in place, and of nothing else, as it is by the reference."""

    def changes(function, arguments):
        tensors = [value for value in arguments if isinstance(value, torch.Tensor)]
        before = [tensor._version for tensor in tensors]
        function(*arguments)
        return [tensor._version - version for tensor, version in zip(tensors, before, strict=True)]

    whole = {name for name in SCHEMAS if name.startswith(("power", "batch"))}
    for name, arguments in samples():
        for update in (True, False) if name in whole else (arguments[-1],):
            given = (*arguments[:-1], update)
            found = changes(getattr(OPS, name).default, given)
            assert found == changes(getattr(reference, name), given), (name, update)
            assert any(found) == (update and name in whole), (name, update)


def test_what_is_changed_in_place_has_a_new_version():
    check_versions()


def spoiled(name, value):
    """``value``, an argument that fits x of (4, 3, 12), as it does not."""
    if name == "groups":
        yield from (-1, 5)
    elif name == "x":
        yield from (value[0, 0], value[None], value.long())
    elif isinstance(value, torch.Tensor):
        yield from (value[None], value.int())
        if value.dim():
            yield from (value[:1], value[..., :1])  # which would broadcast
        if name not in VECTORS:
            yield from (value.bfloat16(), value.double())
        if name in CONTIGUOUS:
            yield torch.stack([value, value], -1)[..., 0]


def test_arguments_that_do_not_fit_are_refused():
    """By all implementations alike, with a line that names the argument, and before anything is changed."""
    refused = set()
    for operator, arguments in samples():
        function = getattr(OPS, operator).default
        names = [argument.name for argument in function._schema.arguments]
        if arguments[names.index("groups")] == 0:
            continue
        kept = [value.clone() if isinstance(value, torch.Tensor) else value for value in arguments]
        for place, (name, value) in enumerate(zip(names, arguments, strict=True)):
            for wrong in spoiled(name, value):
                with pytest.raises(ValueError, match=rf"\b({name}|dy|padding_mask)\b.* has to"):
                    function(*arguments[:place], wrong, *arguments[place + 1 :])
                refused.add((operator, name))
        for before, after in zip(kept, arguments, strict=True):
            assert torch.equal(before, after) if isinstance(before, torch.Tensor) else before is after
    unchecked = {"eps", "alpha", "warmup", "update", "cumulative", "centered", "sums"}
    expected = {
        (operator, argument.name)
        for operator in SCHEMAS
        for argument in getattr(OPS, operator).default._schema.arguments
    }
    assert refused == {(operator, name) for operator, name in expected if name not in unchecked}


def test_the_contract_of_implementations_in_python():
    """All on one device; and those that read through pointers get what is contiguous."""
    x, _, padding, (weight, bias, _, _) = make((4, 3, 12), "some", torch.float32)
    names = "x", "padding_mask", "weight", "groups"
    Contract(names).check((x, padding, weight, 3))
    with pytest.raises(ValueError, match="weight has to be torch.float32 of shape .* on cpu, got .* on meta"):
        Contract(names).check((x, padding, weight.to("meta"), 3))

    def operator(x, weight, groups):
        return weight

    apart = torch.stack([weight, bias], -1)[:, 0]
    assert checked(operator)(x, apart, 3) is apart
    dense = checked(operator, dense=True)(x, apart, 3)
    assert dense.is_contiguous() and torch.equal(dense, weight)


@pytest.mark.parametrize("groups", [0, 3])
def test_vectors_may_be_strided(groups):
    """But for the state: a weight may be a view of something larger."""
    x, dy, padding, vectors = make((4, 3, 12), "some", torch.float32)
    apart = [torch.stack([vector, -vector], -1)[:, 0] for vector in vectors]
    weight, bias, mean, moment = apart
    y, inv_rms = kernels.normalize(x, *vectors, None, groups, EPS)
    assert torch.equal(kernels.normalize(x, *apart, None, groups, EPS)[0], y)
    far = torch.stack([inv_rms, -inv_rms], -1)[..., 0]
    assert torch.equal(kernels.normalize(x, *apart, far, groups, EPS)[0], y)
    found = kernels.gradient(dy, x, padding, *apart, far, groups, True)
    expected = kernels.gradient(dy, x, padding, *vectors, inv_rms, groups, True)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    for norm, step in whole_steps(groups, *vectors).items():
        found = whole_steps(groups, weight, bias, *vectors[2:])[norm](x, dy, padding)
        assert all(torch.equal(a, b) for a, b in zip(found, step(x, dy, padding), strict=True)), norm


def test_gradients_of_normalize():
    """First and second derivatives, with respect to everything that has one."""
    x, _, _, (weight, bias, psi2, mean) = make((2, 2, 6), "none", torch.float64)
    inputs = [value.requires_grad_() for value in (x, weight, bias, mean, psi2)]
    for groups in (0, 2):

        def run(*inputs, groups=groups):
            return kernels.normalize(*inputs, None, groups, EPS)[0]

        assert torch.autograd.gradcheck(run, inputs, fast_mode=True)
        assert torch.autograd.gradgradcheck(run, inputs, fast_mode=True)


@pytest.mark.parametrize("groups", [0, 2])
def test_the_reference_gradient_is_the_derivative(groups):
    """Of PN-V's first part: with slope and offset at 0, dx is what autograd gives for normalize."""
    x, dy, _, (weight, bias, psi2, mean) = make((3, 2, 8), "none", torch.float64)
    leaf = x.clone().requires_grad_()
    y, inv_rms = reference.normalize(leaf, weight, bias, mean, psi2, None, groups, EPS)
    (expected,) = torch.autograd.grad(y, leaf, dy)
    scale = weight / (psi2 + EPS).sqrt()
    dx, _ = kernels.gradient(dy, x, None, scale, None, None, None, inv_rms.detach(), groups, False)
    torch.testing.assert_close(dx, expected)
