"""Every implementation of the operators against the reference in float64, on shapes that are odd on
purpose.

That the reference computes what the papers say is tested in tests/norms, which knows no operator.
"""

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from pn_fairseq import kernels
from pn_fairseq.kernels import reference
from pn_fairseq.kernels.first_use import results_of, samples
from pn_fairseq.norms import MaskedBatchNorm
from pn_fairseq.testing.helpers import unrounded

from ..norms.oracle_windows import MovingAverageOracle, UnifiedOracle
from ..pairwise import pairwise
from .checks import CHANGES, EPS, check_faults, check_samples
from .conftest import INTERPRETED

pytestmark = pytest.mark.usefixtures("implementation")
OPS = torch.ops.pn_fairseq

#: Relative to the largest value of a result: 64 roundings of float32, also before the one to a half
#: type.
TOLERANCE = {
    torch.float64: 1e-12,
    **dict.fromkeys((torch.float32, torch.bfloat16, torch.float16), 2**-18),
}


def make(shape, mask, dtype, seed=0):
    """x, dy, padding in the order of the rows, and four vectors over channels, all away from 0
    and 1.
    """
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
    return (
        x.to(dtype),
        dy.to(dtype),
        padding,
        vectors.to(torch.float32 if dtype != torch.float64 else dtype),
    )


def assert_close(actual, expected, dtype, what, factor=1.0):
    """Relative to the largest of ``expected``."""
    assert actual.shape == expected.shape, what
    actual, expected = actual.double().numpy(), expected.numpy()
    if dtype in (torch.float16, torch.bfloat16):
        actual = unrounded(actual, expected, dtype)
    close = factor * TOLERANCE[dtype] * abs(expected).max()
    np.testing.assert_allclose(actual, expected, rtol=0, atol=close, err_msg=what)


@pytest.mark.parametrize(
    ("channels", "dtype"),
    [(1024, torch.float32), (1023, torch.float32), (1024, torch.bfloat16), (2050, torch.float16)],
)
def test_results_larger_than_the_caches(implementation, channels, dtype):
    """They are written around the caches, if their rows are aligned as that needs it; also at
    the ends.
    """
    if implementation != "cpp":
        pytest.skip("nothing is special about this size")
    x, dy, padding, (weight, bias, moment, nu) = make((64, channels), "some", dtype)
    times = 2**24 // channels // 64 + 1
    x, dy, padding = (values.repeat_interleave(times, 0) for values in (x, dy, padding))
    groups, center = (2, None) if channels % 2 == 0 else (0, moment - 1)

    def run(module, x, dy, padding):
        y, inv_rms, *_ = module.normalize(
            x, weight, bias, center, moment, padding, None, groups, EPS, True
        )
        arguments = (
            dy,
            x,
            padding,
            weight,
            center,
            moment,
            nu,
            *[None] * 3,
            inv_rms,
            groups,
            EPS,
            True,
        )
        return y, module.gradient(*arguments)[0]

    found = run(kernels, x, dy, padding)
    for rows in (slice(0, 3), slice(-3, None)):
        expected = run(reference, x[rows].double(), dy[rows].double(), padding[rows])
        assert_close(found[0][rows], expected[0], dtype, "y", 1.5)
        assert_close(
            found[1][rows], expected[1], dtype, "dx", 4.0 if dtype == torch.float32 else 2.0
        )


def test_half_types_are_rounded_once():
    """Each value is the float64 result rounded, or a neighbour of that where float32 arithmetic
    is not exact enough.
    """
    for dtype in (torch.float16, torch.bfloat16):
        x, _, _, (weight, bias, moment, _) = make((64, 40), "none", dtype)
        arguments = (weight, bias, None, moment, None, None, 4, EPS, False)
        y, exact = (
            kernels.normalize(x, *arguments)[0],
            reference.normalize(x.double(), *arguments)[0],
        )
        assert_close(y, exact, dtype, "y")
        assert (y != exact.to(dtype)).float().mean() < 0.01


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_special_values(dtype):
    """Infinities, NaN, subnormal numbers and both zeros pass as through a multiplication by 1."""
    tiny = torch.finfo(dtype).tiny
    values = torch.tensor(
        [0.0, -0.0, float("inf"), -float("inf"), float("nan"), tiny, tiny / 4, 1.0, 3.0]
    ).to(dtype)
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
    products = kernels.gradient(
        dy, x, padding, weight, None, moment, nu, *[None] * 3, inv_rms, 3, EPS, True
    )[2]
    x[padding], dy[padding] = float("nan"), float("inf")
    for centered in (True, False):
        for found in kernels.moments(x, padding, 3, EPS, centered)[1:]:
            assert found.isfinite().all()
    assert (
        kernels.normalize(x, None, None, None, moment, padding, None, 3, EPS, True)[2]
        .isfinite()
        .all()
    )
    found = kernels.gradient(
        dy, x, padding, weight, None, moment, nu, *[None] * 3, inv_rms, 3, EPS, True
    )[2]
    torch.testing.assert_close(found, products)


@pytest.mark.parametrize(
    "dtype", [torch.float32, *(() if INTERPRETED else (torch.bfloat16, torch.float64))]
)
@pytest.mark.parametrize("groups", [0, 3])
def test_what_is_not_finite_in_a_token_that_the_loss_does_not_depend_on_reaches_no_gradient(
    groups, dtype
):
    channels = 6 if INTERPRETED else 12  # more than one vector of each implementation
    x, dy, padding, (weight, bias, moment, nu) = make((4, 3, channels), "some", dtype)
    dy[padding] = 0.0
    dy[0, 0, :-4] = 0.0  # a token with some zeros counts
    faulty = x.clone()
    faulty[padding] = (
        torch.tensor([float("nan"), float("inf"), -0.0]).to(dtype).repeat(channels // 3)
    )
    zeros = torch.zeros_like(dy).masked_fill(padding.unsqueeze(-1), -0.0)
    found = []
    for tokens, grad in ((x, dy), (faulty, dy + zeros)):
        inv_rms = OPS.moments(tokens, padding, groups, EPS, False)[0]
        stats = OPS.standardize(tokens, weight, bias, 3, True, 1.0, EPS, 0.0, 0.0, 1.0, 0.0)[1]
        vectors, centered = (weight, None, moment), (weight, bias, moment)
        found += [
            *OPS.gradient(
                grad, tokens, padding, *vectors, nu, *[None] * 3, inv_rms, groups, EPS, True
            ),
            *OPS.gradient(
                grad, tokens, padding, *centered, nu, bias, None, None, inv_rms, groups, EPS, False
            ),
            *OPS.gradient(grad, tokens, None, *vectors, *[None] * 4, inv_rms, groups, EPS, True),
            *OPS.gradient_sums(grad, tokens, padding, *vectors, None, inv_rms, groups, EPS),
            *OPS.standardize_gradient(grad, tokens, weight, stats, 3, 1.0, 0.0, True, True, True),
            *OPS.squash_gradient(grad, tokens, weight, bias[:1], nu[:1], groups == 0),
        ]
    clean, with_faults = found[: len(found) // 2], found[len(found) // 2 :]
    assert all(torch.equal(one, other) for one, other in zip(clean, with_faults, strict=True))


def test_sums_of_many_rows_keep_their_precision():
    """All equal and positive, where a float32 running sum loses a bit with every doubling."""
    x = torch.full((300_000, 3), 1.1)
    exact = x.double().square().mean(0)
    assert_close(
        kernels.moments(x, None, 0, EPS, False)[2], exact, torch.float32, "second moment", 2.0
    )


def test_a_large_mean_leaves_the_variance_precise():
    x = torch.randn(4000, 5, dtype=torch.float64) + 1e3
    variance = kernels.moments(x.float(), None, 0, EPS, True)[2].double()
    exact = x.float().double().var(0, unbiased=False)
    torch.testing.assert_close(variance, exact, rtol=1e-4, atol=0)


def test_the_same_threads_give_the_same_bits():
    x, dy, padding, (weight, bias, moment, nu) = make((160, 11, 40), "some", torch.float32)

    def run():
        first = kernels.normalize(x, weight, bias, None, moment, padding, None, 4, EPS, True)
        return *first, *kernels.gradient(
            dy, x, padding, weight, None, moment, nu, *[None] * 3, first[1], 4, EPS, True
        )

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
            arguments = (weight, center, moment, *[None] * 4, x.new_empty(4, 3, 0), 0, EPS, sums)
            dx = kernels.gradient(dy, x, padding, *arguments)[0]
            torch.testing.assert_close(dx, dy * weight / (moment + EPS).sqrt())
    norm = MaskedBatchNorm(21).eval()
    norm(x.requires_grad_()).sum().backward()
    torch.testing.assert_close(x.grad, torch.full_like(x, (1 + norm.eps) ** -0.5))


#: Tokens, channels, groups: next to a power of two, more tokens than are summed up at once in
#: float32, one token, none, one channel, one in each group. Under Triton's interpreter, which takes
#: a second for a sample, a vector is two wide.
WIDE = [(9, 24, 4), (5, 31, 0), (7, 33, 3), (700, 35, 5)]
SAMPLES = pairwise(
    shape=[
        *([(5, 6, 2), (3, 5, 0), (4, 9, 3)] if INTERPRETED else WIDE),
        (1, 8, 2),
        (0, 16, 2),
        (5, 1, 1),
        (6, 7, 7),
    ],
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
    """The calls that `pn check` and the first use of a GPU compare; wherever the tokens lie,
    results are contiguous.
    """
    check_samples(*sample["shape"], sample["dtype"], change=sample["change"])


@pytest.mark.parametrize("channels", [1, 33])
def test_a_fault_leaves_the_state(channels):
    check_faults(channels, "cpu")


def state_of(channels: int) -> tuple[torch.Tensor, ...]:
    """psi^2 or a variance, nu or a mean, the number of batches, and the diagnostics."""
    generator = torch.Generator().manual_seed(1)
    moment, other = torch.rand((2, channels), generator=generator) + 0.5
    return moment, other, torch.tensor(3), torch.tensor([5.0, 7.0, 0.0, 0.0])


@pytest.mark.parametrize("warmup", [0, 9])
@pytest.mark.parametrize("has_gradient", [True, False])
def test_the_state_of_pn(warmup, has_gradient):
    """By the formula of the paper in float64.

    With alpha_bwd = 0.5 the factor of nu is cut off where Gamma > 2.
    """
    channels, tokens = 9, 7.0
    psi2, nu, number, noted = state_of(channels)
    batch, used = psi2.flip(0) * 2, psi2 * 0.7
    batch[0] = 0.0  # its logarithm is that of the smallest normal number
    products = torch.stack([nu.flip(0), nu]) * tokens
    old = psi2.double().numpy(), nu.double().numpy()
    arguments = batch, used, products, torch.tensor(tokens), EPS, warmup, 0.9, 0.5, has_gradient
    kernels.power_update_(psi2, nu, number, noted, *arguments)
    share = 0.25 if warmup else 0.1
    batch, used, mean = (value.double().numpy() for value in (batch, used, products[0] / tokens))
    gamma = batch / (used + EPS)
    assert gamma.max() > 2.0 and number == 4
    np.testing.assert_allclose(psi2, old[0] + share * (batch - old[0]), rtol=5 * 2**-22)
    moved = old[1] * np.maximum(0.0, 1.0 - 0.5 * gamma) + 0.5 * mean if has_gradient else old[1]
    np.testing.assert_allclose(nu, moved, rtol=5 * 2**-22)
    distance = 0.5 * abs(np.log(np.maximum(batch, 2.0**-126)) - np.log(old[0])).mean()
    np.testing.assert_allclose(noted, [5.0, 8.0, distance, gamma.max()], rtol=5 * 2**-20)


@pytest.mark.parametrize("unbiased", [True, False])
def test_running_averages(unbiased):
    channels, tokens = 9, 7.0
    moment, mean, number, noted = state_of(channels)
    batch, batch_mean = moment.flip(0), mean - 3
    old = moment.double().numpy(), mean.double().numpy()
    products, count = torch.ones(2, channels), torch.tensor(tokens)
    kernels.running_average_(
        moment, mean, number, noted, batch, batch_mean, products, count, 0.8, unbiased
    )
    entering = batch.double().numpy() * (tokens / (tokens - 1.0) if unbiased else 1.0)
    np.testing.assert_allclose(moment, 0.8 * old[0] + 0.2 * entering, rtol=5 * 2**-22)
    np.testing.assert_allclose(
        mean, 0.8 * old[1] + 0.2 * batch_mean.double().numpy(), rtol=5 * 2**-22
    )
    distance = 0.5 * abs(np.log(entering) - np.log(old[0])).mean()
    assert number == 4
    np.testing.assert_allclose(noted, [5.0, 7.0, distance, 0.0], rtol=5 * 2**-20)


def test_autograd_sees_that_state_has_changed():
    """So that it refuses to differentiate what was computed from the old values."""
    state = state_of(5)
    before = [value._version for value in state]
    products, count = torch.ones(2, 5), torch.tensor(3.0)
    kernels.power_update_(
        *state, state[0] + 1, state[0] + 2, products, count, EPS, 0, 0.9, 0.9, True
    )
    assert all(value._version > version for value, version in zip(state, before, strict=True))


def test_a_loss_scale_changes_no_state_and_scales_every_gradient():
    """By a power of two, which multiplies without rounding."""
    x, dy, padding, (weight, _, used, nu) = make((5, 3, 12), "some", torch.float32)
    scale, state = torch.full((1,), 64.0), state_of(12)
    found = []
    for dy_of_loss, loss_scale in ((dy, None), (dy * scale, scale)):
        y, inv_rms, mean, moment, count = kernels.batch_normalize(
            x, weight, None, padding, 3, EPS, True
        )
        copies = [value.clone() for value in state]
        given = dy_of_loss, x, padding, weight, mean, moment, count, loss_scale, inv_rms
        first = *kernels.batch_step_(*given, *copies, 3, EPS, 0.9, True), *copies
        copies = [value.clone() for value in state]
        given = dy_of_loss, x, padding, weight, used, nu, loss_scale, inv_rms
        second = *kernels.power_step_(*given, *copies, moment, count, 3, EPS, 0, 0.9, 0.9), *copies
        found.append((first, second))
    for plain, scaled in zip(*found, strict=True):
        for place, (one, other) in enumerate(zip(plain, scaled, strict=True)):
            assert torch.equal(one * scale if place < 2 else one, other), place


def ratio_from_the_fourth_step(oracle):
    """r in [1/5, 5]; the oracle has it from step 1,001 on."""

    def ratio(number, root):
        if number <= 3:
            return np.ones(oracle.channels)
        return np.clip(root / np.sqrt(oracle.psi2 + oracle.eps), 1 / 5, 5)

    return ratio


@pytest.mark.parametrize(
    "filtration", [None, False, True], ids=["MABN", "UN", "UN with filtration"]
)
def test_the_state_of_norms_with_windows(filtration):
    """Steps of which one is an outlier, against the oracle of the norms."""
    channels, rows, unified = 4, 2, filtration is not None
    oracle = UnifiedOracle(channels, window=rows, filtration=filtration) if unified else None
    oracle = oracle or MovingAverageOracle(channels, alpha=0.9, window=rows)
    oracle.ratio = ratio_from_the_fourth_step(oracle)
    running, nu = torch.ones(channels), torch.zeros(channels) if unified else None
    windows, number, noted = torch.zeros(2, rows, channels), torch.tensor(0), torch.zeros(4)
    state = running, nu, *windows, number, noted
    for seed, size in enumerate((1.0, 2.0, 1.0, 1.5, 9.0, 0.3)):
        x, dy, padding, _ = make((5, channels), "some", torch.float32, seed)
        x = x * size
        _, ctx = oracle.forward(x.numpy(), padding.numpy())
        expected, *_ = oracle.backward(dy.numpy(), ctx)
        inv_rms, _, batch, count = kernels.moments(x, padding, 0, EPS, False)
        given = windows[0], running, number, None, batch, None, 0, 3, EPS, unified, bool(filtration)
        psi2, gain, marks = kernels.window_statistics(*given)
        weight = None, psi2, None, inv_rms, 0, EPS
        _, products = kernels.gradient_sums(dy, x, padding, gain, *weight)
        seen = None if nu is None else nu.clone(), windows[1].clone(), number.clone()
        of_step = psi2, batch, marks, products, count, count
        correction = kernels.window_update_(*state, *seen, *of_step, 0.9, 0.9, True)
        vectors = gain, None, psi2, correction, None, None, None
        dx, *_ = kernels.gradient(dy, x, padding, *vectors, inv_rms, 0, EPS, False)
        assert_close(dx, torch.from_numpy(expected), torch.float32, "dx", 4.0)
    assert number == oracle.count == 6 and noted[0] == 0
    assert not unified or any(oracle.skipped) == filtration
    names = {"psi2": running, "psi2_window": windows[0], "lambda_window": windows[1], "nu": nu}
    for name, value in names.items():
        if value is not None:
            assert_close(value, torch.from_numpy(getattr(oracle, name)), torch.float32, name, 4.0)


class WithoutFloat64(TorchDispatchMode):
    """A device without float64, such as Apple's."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == kernels.ops.NAMESPACE:
            with self:
                return kernels.OPERATORS[func.overloadpacket.__name__](*args)
        result = func(*args, **(kwargs or {}))
        for value in tree_leaves(result):
            assert not isinstance(value, torch.Tensor) or value.dtype != torch.float64, (
                f"float64 from {func}"
            )
        return result


def test_the_reference_needs_no_float64(implementation):
    if implementation != "reference":
        pytest.skip("devices without float64 compute by the reference")
    for dtype in (torch.float32, torch.bfloat16):
        for name, arguments in samples(dtype, torch.device("cpu"), [(6, 4, 2)]):
            with WithoutFloat64():
                results_of(getattr(OPS, name), name, arguments)


class _InPlace(torch.autograd.Function):
    """PN after the warm-up, or BN, whose backward moves ``state``, buffers of a module, in
    place.
    """

    @staticmethod
    def forward(ctx, x, weight, state, is_pn):
        used = torch.stack(state[:2])
        if is_pn:
            y, inv_rms, moment, count = kernels.normalize(
                x, weight, None, None, used[0], None, None, 2, EPS, True
            )
            ctx.save_for_backward(x, weight, inv_rms, moment, count, used)
        else:
            y, inv_rms, mean, moment, count = kernels.batch_normalize(
                x, weight, None, None, 2, EPS, True
            )
            ctx.save_for_backward(x, weight, inv_rms, moment, count, mean)
        ctx.state, ctx.is_pn = state, is_pn
        return y

    @staticmethod
    def backward(ctx, dy):
        x, weight, inv_rms, moment, count, kept = ctx.saved_tensors
        if ctx.is_pn:
            given = dy, x, None, weight, kept[0], kept[1], None, inv_rms
            dx, parameters = kernels.power_step_(
                *given, *ctx.state, moment, count, 2, EPS, 0, 0.9, 0.9
            )
        else:
            given = dy, x, None, weight, kept, moment, count, None, inv_rms
            dx, parameters = kernels.batch_step_(*given, *ctx.state, 2, EPS, 0.9, True)
        return dx, parameters[0], None, None


class _Moving(torch.nn.Module):
    def __init__(self, is_pn: bool):
        super().__init__()
        self.weight, self.is_pn = torch.nn.Parameter(torch.ones(8)), is_pn
        for name, value in zip(("moment", "other", "number", "noted"), state_of(8), strict=True):
            self.register_buffer(name, value)

    def forward(self, x):
        return _InPlace.apply(
            x, self.weight, (self.moment, self.other, self.number, self.noted), self.is_pn
        )


@pytest.mark.skipif(INTERPRETED, reason="the interpreter cannot be traced")
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_a_compiled_backward_moves_buffers_in_place(backend):
    layers = [
        torch.nn.Sequential(_Moving(True), torch.nn.Linear(8, 8), _Moving(False)) for _ in range(2)
    ]
    layers[1].load_state_dict(layers[0].state_dict())
    torch.compiler.reset()
    models = layers[0], torch.compile(layers[1], backend=backend, fullgraph=True)
    places = [buffer.data_ptr() for buffer in layers[1].buffers()]
    for seed in range(3):
        x = torch.randn(6, 8, generator=torch.Generator().manual_seed(seed))
        for model in models:
            model(x).square().sum().backward()
    eager, compiled = layers
    assert eager[0].number == eager[2].number == 6
    torch.testing.assert_close(compiled.state_dict(), eager.state_dict())
    for one, other in zip(compiled.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-5, atol=1e-4)
    assert places == [buffer.data_ptr() for buffer in compiled.buffers()]


def test_opcheck():
    """The operators change nothing but the state and alias none of their arguments. Tracing sees
    the shapes of the results.
    """
    seen = {}
    for name, arguments in samples(torch.float32, torch.device("cpu"), [(12, 12, 3)]):
        seen.setdefault((name, *(argument is None for argument in arguments)), arguments)
    for (name, *_), arguments in seen.items():
        torch.library.opcheck(
            getattr(OPS, name).default, arguments, test_utils=["test_schema", "test_faketensor"]
        )


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
    assert torch.autograd.gradcheck(
        lambda *inputs: kernels.evaluate(*inputs, mean, moment, groups, EPS), inputs
    )
    with pytest.raises(RuntimeError, match="no second derivative"):
        y = kernels.evaluate(x, weight, bias, mean, moment, groups, EPS)
        torch.autograd.grad(y.sum(), x, create_graph=True)
