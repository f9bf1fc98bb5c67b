"""Every implementation of the operators against the reference in float64, on shapes that are odd on
purpose.

That the reference computes what the papers say is tested in tests/norms, which knows no operator.
"""

import copy

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
from .checks import CHANGES, EPS, OPS, call, check_faults, check_samples
from .conftest import INTERPRETED

pytestmark = pytest.mark.usefixtures("implementation")

#: Relative to the largest value of a result: 64 roundings of float32, also before the one to a half
#: type.
TOLERANCE = dict.fromkeys((torch.float32, torch.bfloat16, torch.float16), 2**-18)
TOLERANCE[torch.float64] = 1e-12

#: Arguments that have a row for each token.
TOKENS = ("x", "dy", "padding")


def make(shape, mask, dtype, seed=0, **more) -> dict:
    """Arguments by their names: x, dy, padding in the order of the rows, and four vectors over
    channels, all away from 0 and 1; and what is given as ``more``.
    """
    generator = torch.Generator().manual_seed(seed)
    like = {"generator": generator, "dtype": torch.float64}
    given = {"x": (torch.randn(shape, **like) * 1.7 + 0.4).to(dtype)}
    given["dy"] = torch.randn(shape, **like).to(dtype)
    if mask == "some":
        padding = torch.rand(shape[:-1], generator=generator) < 0.3
        padding.view(-1)[0] = False
        given["padding"] = padding
    vectors = torch.rand((4, shape[-1]), **like) + 0.5
    vectors = vectors.to(torch.float32 if dtype != torch.float64 else dtype)
    return given | dict(zip(("weight", "bias", "moment", "nu"), vectors, strict=True)) | more


def assert_close(actual, expected, dtype, what, factor=1.0):
    """Relative to the largest of ``expected``."""
    assert actual.shape == expected.shape, what
    actual = actual.double().numpy()
    expected = expected.numpy()
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
    given = make((64, channels), "some", dtype)
    times = 2**24 // channels // 64 + 1
    for name in TOKENS:
        given[name] = given[name].repeat_interleave(times, 0)
    given |= {"groups": 2} if channels % 2 == 0 else {"mean": given["moment"] - 1}

    def run(module, given):
        y, inv_rms, *_ = call("normalize", module, **given)
        return y, call("gradient", module, **given, inv_rms=inv_rms)[0]

    y, dx = run(OPS, given)
    for rows in (slice(0, 3), slice(-3, None)):
        part = given | {name: given[name][rows] for name in TOKENS}
        part |= {"x": part["x"].double(), "dy": part["dy"].double()}
        expected_y, expected_dx = run(reference, part)
        assert_close(y[rows], expected_y, dtype, "y", 1.5)
        factor = 4.0 if dtype == torch.float32 else 2.0
        assert_close(dx[rows], expected_dx, dtype, "dx", factor)


def test_half_types_are_rounded_once():
    """Each value is the float64 result rounded, or a neighbour of that where float32 arithmetic
    is not exact enough.
    """
    for dtype in (torch.float16, torch.bfloat16):
        given = make((64, 40), "none", dtype, groups=4, sums=False)
        y = call("normalize", **given)[0]
        given["x"] = given["x"].double()
        exact = call("normalize", reference, **given)[0]
        assert_close(y, exact, dtype, "y")
        assert (y != exact.to(dtype)).float().mean() < 0.01


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_special_values(dtype):
    """Infinities, NaN, subnormal numbers and both zeros pass as through a multiplication by 1."""
    smallest = torch.finfo(dtype).tiny
    largest = torch.finfo(dtype).max
    special = [
        0.0,
        -0.0,
        float("inf"),
        -float("inf"),
        float("nan"),
        smallest,
        smallest / 4,
        1.0,
        3.0,
    ]
    x = torch.tensor(special).to(dtype).repeat(4)[None]

    def times(factor, x):
        weight = torch.full((x.size(1),), factor)
        return call("normalize", x=x, weight=weight, sums=False)[0]

    torch.testing.assert_close(times(1.0, x), x, rtol=0, atol=0, equal_nan=True)
    large = torch.full((1, 20), largest, dtype=dtype)
    assert times(2.0, large).isinf().all()


def test_what_is_not_finite_at_padding_enters_no_statistic():
    given = make((3, 4, 18), "some", torch.float32, groups=3)
    inv_rms = call("moments", **given)[0]
    products = call("gradient", **given, inv_rms=inv_rms)[2]
    padding = given["padding"]
    given["x"][padding] = float("nan")
    given["dy"][padding] = float("inf")
    for centered in (True, False):
        for statistic in call("moments", **given, centered=centered)[1:]:
            assert statistic.isfinite().all()
    assert call("normalize", **given)[2].isfinite().all()
    torch.testing.assert_close(call("gradient", **given, inv_rms=inv_rms)[2], products)


@pytest.mark.parametrize(
    "dtype", [torch.float32, *(() if INTERPRETED else (torch.bfloat16, torch.float64))]
)
@pytest.mark.parametrize("groups", [0, 3])
def test_what_is_not_finite_in_a_token_that_the_loss_does_not_depend_on_reaches_no_gradient(
    groups, dtype
):
    channels = 6 if INTERPRETED else 12  # more than one vector of each implementation
    given = make((4, 3, channels), "some", dtype)
    padding = given.pop("padding")
    dy = given["dy"]
    dy[padding] = 0.0
    dy[0, 0, :-4] = 0.0  # a token with some zeros counts
    faulty = given["x"].clone()
    at_padding = torch.tensor([float("nan"), float("inf"), -0.0]).to(dtype)
    faulty[padding] = at_padding.repeat(channels // 3)
    zeros = torch.zeros_like(dy).masked_fill(padding.unsqueeze(-1), -0.0)
    bias = given["bias"]
    nu = given.pop("nu")

    def gradients(**tokens):
        by_token = given | tokens | {"groups": 3}
        by_token["stats"] = call("standardize", **by_token)[1]
        squashed = by_token | {"alpha": nu[:1], "shift": bias[:1], "erf": groups == 0}
        plain = given | tokens | {"groups": groups}
        plain["inv_rms"] = call("moments", **plain)[0]
        masked = plain | {"padding": padding}
        centered = masked | {"mean": bias, "nu": nu, "offset": bias, "sums": False}
        return (
            *call("gradient", **masked, nu=nu),
            *call("gradient", **centered),
            *call("gradient", **plain),
            *call("gradient_sums", **masked),
            *call("standardize_gradient", **by_token),
            *call("squash_gradient", **squashed),
        )

    clean = gradients()
    with_faults = gradients(x=faulty, dy=dy + zeros)
    for one, other in zip(clean, with_faults, strict=True):
        assert torch.equal(one, other)


def test_sums_of_many_rows_keep_their_precision():
    """All equal and positive, where a float32 running sum loses a bit with every doubling."""
    x = torch.full((300_000, 3), 1.1)
    exact = x.double().square().mean(0)
    moment = call("moments", x=x, centered=False)[2]
    assert_close(moment, exact, torch.float32, "second moment", 2.0)


def test_a_large_mean_leaves_the_variance_precise():
    x = torch.randn(4000, 5, dtype=torch.float64) + 1e3
    variance = call("moments", x=x.float())[2].double()
    exact = x.float().double().var(0, unbiased=False)
    torch.testing.assert_close(variance, exact, rtol=1e-4, atol=0)


def test_the_same_threads_give_the_same_bits():
    given = make((160, 11, 40), "some", torch.float32, groups=4)

    def run():
        y, inv_rms, *sums = call("normalize", **given)
        return y, *sums, *call("gradient", **given, inv_rms=inv_rms)

    threads = torch.get_num_threads()
    results = []
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
    given = make((4, 3, 21), "some", torch.float32)
    given["inv_rms"] = given["x"].new_empty(4, 3, 0)
    x = given["x"]
    mean = given.pop("nu")
    x[1, 1, 3] = float("inf")
    expected = given["dy"] * given["weight"] / (given["moment"] + EPS).sqrt()
    for center in (None, mean):
        for sums in (False, True):
            dx = call("gradient", **given, mean=center, sums=sums)[0]
            torch.testing.assert_close(dx, expected)
    norm = MaskedBatchNorm(21).eval()
    norm(x.requires_grad_()).sum().backward()
    slope = (1 + norm.eps) ** -0.5
    torch.testing.assert_close(x.grad, torch.full_like(x, slope))


#: Tokens, channels, groups: next to a power of two, more tokens than are summed up at once in
#: float32, one token, none, one channel, one in each group. Under Triton's interpreter, which takes
#: a second for a sample, a vector is two wide.
WIDE = [(9, 24, 4), (5, 31, 0), (7, 33, 3), (700, 35, 5)]
NARROW = [(5, 6, 2), (3, 5, 0), (4, 9, 3)]
SHAPES = NARROW if INTERPRETED else WIDE
SHAPES += [(1, 8, 2), (0, 16, 2), (5, 1, 1), (6, 7, 7)]
SAMPLES = []
for row in pairwise(shape=SHAPES, dtype=list(TOLERANCE), change=list(CHANGES)):
    is_slow = INTERPRETED and len(SAMPLES) % 16
    SAMPLES.append(pytest.param(row, marks=pytest.mark.slow if is_slow else ()))


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda sample: " ".join(map(str, sample.values())))
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


#: What operators call the state of a norm.
OF_PN = ("psi2", "nu", "num_batches", "diagnostics")
OF_PN_STEP = ("psi2", "running_nu", "num_batches", "diagnostics")
OF_BN = ("moment", "mean", "num_batches", "diagnostics")
OF_BN_STEP = ("running_moment", "running_mean", "num_batches", "diagnostics")


def named(names, state):
    return dict(zip(names, state, strict=True))


def doubles(*values):
    return [value.double().numpy() for value in values]


def assert_state(found, expected, roundings=4):
    """A state in float32, or numbers computed from it; ``roundings`` of 2^-24 each."""
    np.testing.assert_allclose(found, expected, rtol=5 * roundings * 2**-24)


def distance(batch, running) -> float:
    """What the diagnostics say of a moment; the least that has a logarithm is 2^-126."""
    ratio = np.maximum(batch, 2.0**-126) / running
    return 0.5 * abs(np.log(ratio)).mean()


@pytest.mark.parametrize("warmup", [0, 9])
@pytest.mark.parametrize("has_gradient", [True, False])
def test_the_state_of_pn(warmup, has_gradient):
    """By the formula of the paper in float64.

    With alpha_bwd = 0.5 the factor of nu is cut off where Gamma > 2.
    """
    tokens = 7.0
    state = state_of(9)
    psi2, nu, number, noted = state
    batch = psi2.flip(0) * 2
    used = psi2 * 0.7
    batch[0] = 0.0  # its logarithm is that of the smallest normal number
    products = torch.stack([nu.flip(0), nu]) * tokens
    old_psi2, old_nu = doubles(psi2, nu)
    given = dict(batch_psi2=batch, used_psi2=used, products=products, count=torch.tensor(tokens))
    given |= dict(warmup=warmup, alpha_bwd=0.5, has_gradient=has_gradient)
    call("power_update_", **named(OF_PN, state), **given)
    share = 0.25 if warmup else 0.1
    batch, used, lambda_ = doubles(batch, used, products[0] / tokens)
    gamma = batch / (used + EPS)
    assert gamma.max() > 2.0 and number == 4
    assert_state(psi2, old_psi2 + share * (batch - old_psi2))
    moved = old_nu
    if has_gradient:
        kept = np.maximum(0.0, 1.0 - 0.5 * gamma)
        moved = old_nu * kept + 0.5 * lambda_
    assert_state(nu, moved)
    assert_state(noted, [5.0, 8.0, distance(batch, old_psi2), gamma.max()], roundings=16)


@pytest.mark.parametrize("unbiased", [True, False])
def test_running_averages(unbiased):
    tokens = 7.0
    state = state_of(9)
    moment, mean, number, noted = state
    batch = moment.flip(0)
    batch_mean = mean - 3
    old_moment, old_mean = doubles(moment, mean)
    given = dict(batch_moment=batch, batch_mean=batch_mean, products=torch.ones(2, 9))
    given |= dict(count=torch.tensor(tokens), alpha=0.8, unbiased=unbiased)
    call("running_average_", **named(OF_BN, state), **given)
    entering, entering_mean = doubles(batch, batch_mean)
    if unbiased:
        entering *= tokens / (tokens - 1.0)
    assert_state(moment, 0.8 * old_moment + 0.2 * entering)
    assert_state(mean, 0.8 * old_mean + 0.2 * entering_mean)
    assert number == 4
    assert_state(noted, [5.0, 7.0, distance(entering, old_moment), 0.0], roundings=16)


def test_autograd_sees_that_state_has_changed():
    """So that it refuses to differentiate what was computed from the old values."""
    state = state_of(5)
    before = [value._version for value in state]
    batch = dict.fromkeys(("batch_psi2", "used_psi2"), state[0] + 1)
    batch |= {"products": torch.ones(2, 5), "count": torch.tensor(3.0)}
    call("power_update_", **named(OF_PN, state), **batch)
    for value, version in zip(state, before, strict=True):
        assert value._version > version


def test_a_loss_scale_changes_no_state_and_scales_every_gradient():
    """By a power of two, which multiplies without rounding."""
    given = make((5, 3, 12), "some", torch.float32, groups=3)
    dy = given.pop("dy")
    used = given["moment"]
    names = ("inv_rms", "mean", "moment", "count")
    given |= zip(names, call("batch_normalize", **given)[1:], strict=True)
    given |= {"batch_psi2": given["moment"], "used_psi2": used}

    def step(name, names, dy, loss_scale=None):
        state = [value.clone() for value in state_of(12)]
        results = call(name, **given, dy=dy, loss_scale=loss_scale, **named(names, state))
        return *results, *state

    scale = torch.full((1,), 64.0)
    for name, names in (("batch_step_", OF_BN_STEP), ("power_step_", OF_PN_STEP)):
        plain = step(name, names, dy)
        scaled = step(name, names, dy * scale, scale)
        for place, (one, other) in enumerate(zip(plain, scaled, strict=True)):
            assert torch.equal(one * scale if place < 2 else one, other), place


def ratio_from_the_fourth_step(oracle):
    """r in [1/5, 5]; the oracle has it from step 1,001 on."""

    def ratio(number, root):
        if number <= 3:
            return np.ones(oracle.channels)
        running_root = np.sqrt(oracle.psi2 + oracle.eps)
        return np.clip(root / running_root, 1 / 5, 5)

    return ratio


@pytest.mark.parametrize(
    "filtration", [None, False, True], ids=["MABN", "UN", "UN with filtration"]
)
def test_the_state_of_norms_with_windows(filtration):
    """Steps of which one is an outlier, against the oracle of the norms."""
    channels = 4
    rows = 2
    unified = filtration is not None
    if unified:
        oracle = UnifiedOracle(channels, window=rows, filtration=filtration)
    else:
        oracle = MovingAverageOracle(channels, alpha=0.9, window=rows)
    oracle.ratio = ratio_from_the_fourth_step(oracle)
    running = torch.ones(channels)
    number = torch.tensor(0)
    nu = torch.zeros(channels) if unified else None
    windows = torch.zeros(2, rows, channels)
    noted = torch.zeros(4)
    state = {"running_psi2": running, "nu": nu, "num_batches": number, "diagnostics": noted}
    state |= {"psi2_window": windows[0], "lambda_window": windows[1]}
    kind = {"ratio_warmup": 3, "geometric": unified, "filtration": bool(filtration)}
    for seed, size in enumerate((1.0, 2.0, 1.0, 1.5, 9.0, 0.3)):
        given = make((5, channels), "some", torch.float32, seed)
        tokens = {name: given[name] for name in TOKENS}
        tokens["x"] = tokens["x"] * size
        _, ctx = oracle.forward(tokens["x"].numpy(), tokens["padding"].numpy())
        expected, *_ = oracle.backward(tokens["dy"].numpy(), ctx)
        inv_rms, _, batch, count = call("moments", **tokens, centered=False)
        psi2, ratio, marks = call("window_statistics", **state, **kind, batch_psi2=batch)
        tokens |= {"inv_rms": inv_rms, "weight": ratio, "moment": psi2}
        _, products = call("gradient_sums", **tokens)
        seen = {"seen_lambda": windows[1].clone(), "seen_batches": number.clone()}
        if unified:
            seen["seen_nu"] = nu.clone()
        of_step = {"psi2": psi2, "batch_psi2": batch, "marks": marks, "products": products}
        of_step |= {"count": count, "counted_tokens": count}
        correction = call("window_update_", **state, **seen, **of_step)
        dx, *_ = call("gradient", **tokens, nu=correction, sums=False)
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
            assert getattr(value, "dtype", None) != torch.float64, f"float64 from {func}"
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
        given = dict(x=x, weight=weight, groups=2)
        if is_pn:
            y, inv_rms, moment, count = call("normalize", **given, moment=used[0])
            kept = used
        else:
            y, inv_rms, kept, moment, count = call("batch_normalize", **given)
        ctx.save_for_backward(x, weight, inv_rms, moment, count, kept)
        ctx.state = state
        ctx.is_pn = is_pn
        return y

    @staticmethod
    def backward(ctx, dy):
        x, weight, inv_rms, moment, count, kept = ctx.saved_tensors
        given = dict(x=x, dy=dy, weight=weight, inv_rms=inv_rms, count=count, groups=2)
        if ctx.is_pn:
            given |= named(OF_PN_STEP, ctx.state)
            given |= dict(used_psi2=kept[0], nu=kept[1], batch_psi2=moment)
            dx, parameters = call("power_step_", **given)
        else:
            given |= named(OF_BN_STEP, ctx.state)
            dx, parameters = call("batch_step_", **given, mean=kept, moment=moment)
        return dx, parameters[0], None, None


class _Moving(torch.nn.Module):
    def __init__(self, is_pn: bool):
        super().__init__()
        self.is_pn = is_pn
        self.weight = torch.nn.Parameter(torch.ones(8))
        for name, value in zip(("moment", "other", "number", "noted"), state_of(8), strict=True):
            self.register_buffer(name, value)

    def forward(self, x):
        state = self.moment, self.other, self.number, self.noted
        return _InPlace.apply(x, self.weight, state, self.is_pn)


@pytest.mark.skipif(INTERPRETED, reason="the interpreter cannot be traced")
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_a_compiled_backward_moves_buffers_in_place(backend):
    eager = torch.nn.Sequential(_Moving(True), torch.nn.Linear(8, 8), _Moving(False))
    compiled = copy.deepcopy(eager)
    torch.compiler.reset()
    models = eager, torch.compile(compiled, backend=backend, fullgraph=True)
    places = [buffer.data_ptr() for buffer in compiled.buffers()]
    for seed in range(3):
        x = torch.randn(6, 8, generator=torch.Generator().manual_seed(seed))
        for model in models:
            model(x).square().sum().backward()
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
    for misfit in ({"weight": torch.ones(5)}, {"groups": 4}, {"padding": short}):
        with pytest.raises(ValueError, match="do not fit x of shape"):
            call("normalize", x=x, **misfit)


@pytest.mark.parametrize("groups", [0, 2])
def test_gradients_of_evaluation(groups):
    """By finite differences."""
    given = make((2, 2, 6), "none", torch.float64)
    inputs = [given[name].requires_grad_() for name in ("x", "weight", "bias")]

    def evaluate(*inputs):
        return kernels.evaluate(*inputs, given["nu"], given["moment"], groups, EPS)

    assert torch.autograd.gradcheck(evaluate, inputs)
    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.autograd.grad(evaluate(*inputs).sum(), inputs[0], create_graph=True)
