"""The norms with batch statistics: over 16 steps against their formulas."""

from copy import deepcopy
from functools import partial

import numpy as np
import pytest
import torch

from pn_fairseq.norms import MaskedBatchNorm, build_norm
from pn_fairseq.testing.helpers import cases

from ..pairwise import in_pairs
from . import oracle as oracles
from . import oracle_windows as windows
from .conftest import IMPLEMENTATION_NAMES
from .helpers import (
    CHANNELS,
    STATEFUL,
    affine_of,
    assert_close,
    assert_state_close,
    assert_steps_close,
    assert_training_follows,
    batches,
    oracle_step,
    random_batch,
    randomize_affine,
    real_tokens,
    rng,
    state_of,
    to_mask,
    to_tensor,
    train_step,
)

WINDOW = {"window": 3, "psi_warmup_updates": 9, "alpha_fwd": 0.8}
PENALTY = {"lambda_mean": 3.0, "lambda_var": 2.0}
TIGHT = {"renorm_updates": 8, "renorm_r_max": 1.2, "renorm_d_max": 0.3, "alpha_fwd": 0.7}
#: Name -> norm, its options, and its oracle.
CASES = {}


def case(name, norm, oracle, **options):
    CASES[name] = norm, options, oracle


case("pn", "power", oracles.PowerNormOracle, alpha_fwd=0.99, alpha_bwd=0.7, eps=0.5)
case("pn, warm-up", "power", oracles.PowerNormOracle, alpha_fwd=0.5, psi_warmup_updates=7)
case("pn, not affine", "power", oracles.PowerNormOracle, affine=False, alpha_bwd=0.95)
case("bn", "batch", oracles.BatchNormOracle, alpha_fwd=0.5, eps=0.1)
case("bn, release", "batch", oracles.BatchNormReleaseOracle, variant="release")
case("pn-v", "power-v", oracles.PowerNormVOracle, alpha_fwd=0.5, eps=0.1)
case("pn-v, not affine", "power-v", oracles.PowerNormVOracle, affine=False)
case("brn", "batch-renorm", oracles.BatchRenormOracle, renorm_updates=12)
case("brn, tight", "batch-renorm", oracles.BatchRenormOracle, **TIGHT, eps=0.1)
case("mabn", "mabn", windows.MovingAverageOracle, window=4, eps=0.1)
case("mabn, window of 1", "mabn", windows.MovingAverageOracle, window=1)
case("mabn, warm-up", "mabn", windows.MovingAverageOracle, **WINDOW)
case("un", "unified", windows.UnifiedOracle, alpha_fwd=0.8, alpha_bwd=0.7, eps=0.1)
case("un, warm-up", "unified", windows.UnifiedOracle, psi_warmup_updates=9)
case("un, filtration", "unified", windows.UnifiedOracle, outlier_filtration=True)
case("un, window of 1", "unified", windows.UnifiedOracle, window=1)
released = partial(windows.UnifiedOracle, release=True)
case("un, release", "unified", released, variant="release")
case("rbn", "batch-reg", oracles.RegularizedOracle, **PENALTY, eps=0.1)
released = partial(oracles.RegularizedOracle, release=True)
case("rbn, release", "batch-reg", released, **PENALTY, variant="release")
case("prepbn", "prep-batch", oracles.ProgressiveOracle, fade_updates=10, eps=0.1)
case("prepbn, not affine", "prep-batch", oracles.ProgressiveOracle, fade_updates=10, affine=False)
#: Options of the norms -> their names in the oracles; those that are missing have the same name, or
#: none.
OF_ORACLES = {
    "alpha_fwd": "alpha",
    "psi_warmup_updates": "warmup",
    "fade_updates": "fade",
    "renorm_updates": "updates",
    "renorm_r_max": "r_max",
    "renorm_d_max": "d_max",
    "outlier_filtration": "filtration",
}


def make_pair(name, groups=0, **more):
    norm_name, options, oracle = CASES[name]
    options = options | more
    norm = double(norm_name, layer_scale_groups=groups, **options)
    given = {}
    for key, value in options.items():
        if key not in ("variant", "affine"):
            given[OF_ORACLES.get(key, key)] = value
    return norm, oracle(CHANNELS, groups=groups, **given, **affine_of(norm))


def test_every_norm_with_state_is_tested_here():
    assert set(STATEFUL) == {name for name, *_ in CASES.values()}


def some_batches():
    """The 13th has values far from the others."""
    for step, (x, mask, dy) in enumerate(batches(16, seed=1, low=0.3, high=4, sentences=3)):
        yield x * (10 if step == 12 else 1), mask, dy


@in_pairs(
    indirect=["implementation"],
    name=list(CASES),
    groups=[0, 4],
    implementation=IMPLEMENTATION_NAMES,
)
def test_training_follows_the_formulas(name, groups):
    """With gradient arriving at padding positions."""
    assert_training_follows(*make_pair(name, groups), some_batches(), dtype=torch.float64)


@pytest.mark.parametrize("name", ["mabn", "un", "un, filtration", "un, release"])
def test_training_follows_the_formulas_where_r_is_not_1(name):
    """The last steps of a training of 1,000 and the first ones after it."""
    norm, oracle = make_pair(name)
    norm.num_batches_tracked.fill_(997)
    norm.psi2_window.fill_(1.0)
    norm.lambda_window.fill_(0.5)
    oracle.count = 997
    oracle.psi2s = {number: np.ones(CHANNELS) for number in range(990, 998)}
    oracle.lambdas = {number: np.full(CHANNELS, 0.5) for number in range(990, 998)}
    assert_training_follows(norm, oracle, some_batches(), dtype=torch.float64)
    assert not getattr(oracle, "filtration", False) or 0 < sum(oracle.skipped) < 16


@pytest.mark.parametrize("masked", [False, True], ids=["no-mask", "mask"])
@pytest.mark.parametrize("affine", [True, False], ids=["affine", "plain"])
def test_bn_equals_torch_on_the_gathered_tokens(masked, affine):
    norm = randomize_affine(
        MaskedBatchNorm(CHANNELS, eps=1e-3, alpha_fwd=0.6, affine=affine)
    ).train()
    reference = torch.nn.BatchNorm1d(CHANNELS, eps=1e-3, momentum=0.4, affine=affine)
    reference.load_state_dict(dict(norm.named_parameters()), strict=False)
    for step, (x, mask, dy) in enumerate(batches(20, masked, sentences=3)):
        real = real_tokens(x.shape, mask)
        dy[~real] = 0
        actual = train_step(norm, x, mask, dy)
        expected = train_step(reference, x[real], None, dy[real])
        actual |= {key: actual[key][real] for key in ("y", "dx")}
        # dx of a few tokens is what is left of terms that nearly cancel.
        assert_steps_close(actual, expected, rtol=2e-4, what=f"step {step}:")
        for name, value in state_of(norm).items():
            assert_close(value, reference.get_buffer(name), what=f"step {step}: {name}")


@pytest.mark.parametrize("name", ["batch", "batch-renorm", "mabn"])
def test_single_real_token_leaves_finite_results(name):
    """The unbiased variance of one token, which BN keeps, does not exist: it counts in the other
    norms alone.
    """
    norm = randomize_affine(build_norm(name, CHANNELS)).train()
    x, mask, dy = random_batch(rng(6))
    mask[:] = True
    mask[0, 0] = False
    actual = train_step(norm, x, mask, dy)
    assert all(torch.tensor(value).isfinite().all() for value in actual.values())
    assert all(buffer.isfinite().all() for buffer in state_of(norm).values())
    assert norm.num_batches_tracked == (name != "batch")
    if name == "batch":
        assert_close(actual["y"][0, 0], norm.bias.detach())


@pytest.mark.parametrize("name", ["mabn", "un"])
def test_updates_count_for_the_warm_ups_where_they_are_given(name):
    """Two steps to an update: 1,000 updates are 2,000 steps. The windows count steps."""
    plain = build_norm(CASES[name][0], CHANNELS, window=2, psi_warmup_updates=3)
    counted = deepcopy(plain)
    generator = rng(3)
    for step in range(8):
        counted.set_num_updates(step // 2)
        batch = random_batch(generator)
        same = np.array_equal(train_step(plain, *batch)["y"], train_step(counted, *batch)["y"])
        warms_up = step + 1 < 3
        counted_warms_up = step // 2 + 1 < 3
        assert same == (warms_up == counted_warms_up)
        assert torch.equal(state_of(plain)["psi2_window"], state_of(counted)["psi2_window"])


def test_prepbn_fades_by_updates_where_they_are_given():
    """And at once if that is over, or if there is no fade."""
    plain = build_norm("prep-batch", CHANNELS, fade_updates=4).double()
    counted = deepcopy(plain)
    faded = deepcopy(plain)
    never = build_norm("prep-batch", CHANNELS, fade_updates=0).double()
    generator = rng(3)
    faded.set_num_updates(4)
    for step in range(6):
        counted.set_num_updates(step)
        batch = random_batch(generator)
        norms = {"plain": plain, "counted": counted, "faded": faded, "never": never}
        y = {key: train_step(norm, *batch, torch.float64)["y"] for key, norm in norms.items()}
        assert_close(y["counted"], y["plain"], 1e-9)
        assert_close(y["faded"], y["never"], 1e-9)
        assert (abs(y["faded"] - y["plain"]).max() < 1e-9) == (step >= 4)


def steps_of(norm, number=5, seed=4):
    generator = rng(seed)
    return [train_step(norm, *random_batch(generator), torch.float64) for _ in range(number)]


def double(name, **options):
    return randomize_affine(build_norm(name, CHANNELS, **options)).double().train()


def test_brn_unclipped_trains_with_what_evaluation_computes():
    norm = double("batch-renorm", renorm_updates=0, renorm_r_max=1e6, renorm_d_max=1e6)
    steps_of(norm)
    x, mask, _ = random_batch(rng(5))
    x = to_tensor(x, torch.float64)
    mask = to_mask(mask)
    assert_close(norm.train()(x, mask), norm.eval()(x, mask), 1e-6)


@pytest.mark.parametrize("variant", ["paper", "release"])
def test_penalty_is_among_the_diagnostics(variant):
    """In the release variances are at least eps, and the running statistics hold the batch
    already.
    """
    norm = build_norm("batch-reg", CHANNELS, variant, eps=0.5, **PENALTY).double()
    norm.collecting = True
    x, _, dy = random_batch(rng(9), masked=False)
    x = x * np.linspace(0.1, 2, CHANNELS)
    train_step(norm, x, None, dy, torch.float64)
    mean = x.mean((0, 1))
    var = x.var((0, 1))
    assert var.min() < 0.5 < var.max()
    by_mean = mean**2
    by_var = (np.sqrt(var + 0.5) - np.sqrt(1.5)) ** 2
    if variant == "release":
        by_mean = (0.95 * mean) ** 2
        by_var = 0.95 * np.abs(np.maximum(var, 0.5) - 1)
    expected = 3 * by_mean.sum() + 2 * by_var.sum()
    assert_close(norm.diagnostics()["penalty"], expected, 1e-6)


# PN: Shen et al. 2020, Algorithm 2.


def test_power_oracle_in_one_worked_example():
    """One channel, tokens 3 and 4, a third that is padding; alphas 0.5: every number by hand."""
    oracle = oracles.PowerNormOracle(1, alpha=0.5, alpha_bwd=0.5, eps=0.0)
    mask = np.array([False, False, True])
    oracle.psi2 = np.array([25.0])
    oracle.nu = np.array([2.0])
    y, ctx = oracle.forward(np.array([[3.0], [4.0], [5.0]]), mask)
    np.testing.assert_allclose(y[:, 0], [0.6, 0.8, 1.0])
    np.testing.assert_allclose(oracle.psi2, 25.0)
    dy = np.array([[1.0], [-1.0], [10.0]])
    dx, dweight, dbias = oracle.backward(dy, ctx)
    np.testing.assert_allclose(dx[:, 0], [(1 - 1.2) / 5, (-1 - 1.6) / 5, 10 / 5])
    np.testing.assert_allclose(oracle.psi2, [0.5 * 25 + 0.5 * 12.5])
    gamma = 0.5  # (0.36 + 0.64) / 2
    lambda_ = (0.6 - 0.8) / 2
    np.testing.assert_allclose(oracle.nu, [2 * (1 - 0.5 * gamma) + 0.5 * lambda_])
    np.testing.assert_allclose(dweight, [0.6 - 0.8 + 10])
    np.testing.assert_allclose(dbias, [10])


def test_large_batch_power_does_not_make_nu_diverge():
    """Gamma > 2 / (1 - alpha) makes the unguarded factor smaller than -1; the guard stops it at 0
    (Assumption 10), channel by channel.
    """
    scale = np.geomspace(0.1, 30, CHANNELS)
    steps = [(x * scale, mask, dy) for x, mask, dy in batches(32, sentences=3)]
    first_gamma = (steps[0][0] ** 2).mean(axis=(0, 1))
    assert first_gamma.min() < 0.1
    assert first_gamma.max() > 2 / (1 - 0.9)
    assert_training_follows(*make_pair("pn", alpha_bwd=0.9), steps, dtype=torch.float64)


def test_warmup_is_over_at_once_for_a_model_that_has_been_trained():
    norm, oracle = make_pair("pn, warm-up")
    for each in (norm, oracle):
        each.set_num_updates(7)
    assert_training_follows(norm, oracle, batches(5), dtype=torch.float64)


def test_warmup_by_updates_may_start_after_forwards_without_a_trainer():
    norm, oracle = make_pair("pn, warm-up", psi_warmup_updates=3)
    steps = list(batches(12))
    assert_training_follows(norm, oracle, steps[:5], dtype=torch.float64)
    assert_training_follows(norm.train(), oracle, steps[5:], dtype=torch.float64, update_freq=2)


def test_what_is_changed_in_place_before_the_backward():
    """The output may be; the gradient never has another weight than the forward."""
    x, mask, dy = random_batch(rng(19))
    norm, oracle = make_pair("pn", groups=4)
    leaf = to_tensor(x, torch.float64, requires_grad=True)
    y = norm(leaf, to_mask(mask))
    y.mul_(3.0)
    y.backward(to_tensor(dy, torch.float64))
    assert_close(leaf.grad, oracle_step(oracle, x, mask, 3 * dy)["dx"])
    y = norm(leaf, to_mask(mask))
    with torch.no_grad():
        norm.weight.mul_(5.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


# Several forwards before a backward, and the type of the arithmetic.


@pytest.mark.parametrize("order", [(0, 1), (1, 0)], ids=["first-first", "last-first"])
@pytest.mark.parametrize("name", [name for name in CASES if "not affine" not in name])
def test_each_backward_uses_the_values_of_its_own_forward(name, order):
    norm, oracle = make_pair(name)
    generator = rng(1)
    for step in range(6):
        norm.zero_grad()
        work = []
        for _ in range(2):
            x, mask, dy = random_batch(generator)
            leaf = to_tensor(x, torch.float64, requires_grad=True)
            y = norm(leaf, to_mask(mask))
            expected_y, ctx = oracle.forward(x, mask)
            assert_close(y, expected_y)
            work.append((leaf, y, dy, ctx))
        dweight = 0
        dbias = 0
        for index in order:
            leaf, y, dy, ctx = work[index]
            y.backward(to_tensor(dy, torch.float64))
            dx, dw, db = oracle.backward(dy, ctx)
            dweight = dweight + dw
            dbias = dbias + db
            assert_close(leaf.grad, dx, 5e-5, f"step {step}, forward {index}")
        assert_close(norm.weight.grad, dweight, 5e-5)
        assert_close(norm.bias.grad, dbias, 5e-5)
        assert_state_close(norm, oracles.oracle_state(oracle), what=f"step {step}:")


@pytest.mark.parametrize("case", cases(STATEFUL), ids=str)
def test_arithmetic_with_float64_input_is_float64(case):
    """Of a float32 state: the results are as with a float64 state of the same values."""
    norm = case.build(window=2).double()
    generator = rng(3)
    for update in (0, 1, 2, 1001):  # warm-ups and schedules are over then
        norm.set_num_updates(update)
        x, mask, dy = random_batch(generator)
        narrow = norm
        wide = deepcopy(norm)
        for state in wide.buffers():
            state.data = state.data.double() if state.is_floating_point() else state.data
        expected = train_step(wide, x, mask, dy, torch.float64)
        assert_steps_close(train_step(narrow, x, mask, dy, torch.float64), expected, 1e-12)
