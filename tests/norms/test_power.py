"""PN against the oracle of Shen et al. 2020, Algorithm 2."""

import math

import numpy as np
import pytest
import torch

from pn_fairseq.norms import PowerNorm

from .helpers import (
    CHANNELS,
    affine_of,
    assert_close,
    assert_state_close,
    assert_state_unchanged,
    assert_states_equal,
    assert_steps_close,
    oracle_step,
    random_batch,
    randomize_affine,
    rng,
    state_of,
    to_mask,
    train_step,
)
from .oracle import PowerNormOracle, oracle_state

STEPS = 32


def make_pair(channels=CHANNELS, alpha_fwd=0.9, alpha_bwd=0.9, affine=True, groups=0, warmup=0, eps=1e-5):
    norm = PowerNorm(
        channels,
        eps=eps,
        alpha_fwd=alpha_fwd,
        alpha_bwd=alpha_bwd,
        affine=affine,
        layer_scale_groups=groups,
        psi_warmup_updates=warmup,
    )
    randomize_affine(norm)
    oracle = PowerNormOracle(channels, alpha_fwd, alpha_bwd, warmup, groups=groups, eps=eps, **affine_of(norm))
    return norm.train(), oracle


def run_against_oracle(norm, oracle, batches, rtol=2e-5, dtype=torch.float32, update_freq=None):
    """Train on ``batches``, comparing everything after every step; update_freq: forwards per set_num_updates."""
    for step, (x, mask, dy) in enumerate(batches):
        if update_freq is not None:
            norm.set_num_updates(step // update_freq)
            oracle.set_num_updates(step // update_freq)
        actual = train_step(norm, x, mask, dy, dtype)
        assert_steps_close(actual, oracle_step(oracle, x, mask, dy), rtol, f"step {step}:")
        assert_state_close(norm, oracle_state(oracle), rtol, f"step {step}:")
    assert_close(norm.eval()(torch.tensor(x, dtype=dtype)), oracle.evaluate(x), rtol, "eval")


def batches_of_many_shapes(masked, steps=STEPS, channels=CHANNELS, seed=0):
    """Batches whose shape, level and spread change at every step, as in training on text."""
    generator = rng(seed)
    for step in range(steps):
        shape = (1 + step % 5, 3 - step % 2, channels)
        yield random_batch(generator, shape, masked, scale=generator.uniform(0.2, 3.0))


@pytest.mark.every_implementation
@pytest.mark.parametrize("groups", [0, 1, 4])
@pytest.mark.parametrize(
    ("warmup", "update_freq"), [(0, None), (7, None), (7, 2)], ids=["no-warmup", "warmup", "warmup-accumulating"]
)
def test_training_follows_algorithm_2(groups, warmup, update_freq):
    norm, oracle = make_pair(groups=groups, warmup=warmup, affine=groups != 1)
    masked = warmup > 0 or groups == 4
    run_against_oracle(norm, oracle, batches_of_many_shapes(masked), update_freq=update_freq)


@pytest.mark.parametrize(("alpha_fwd", "alpha_bwd"), [(0.5, 0.95), (0.99, 0.7), (0.95, 0.95)])
@pytest.mark.parametrize("warmup", [0, 7])
def test_the_two_alphas_are_not_mixed_up(alpha_fwd, alpha_bwd, warmup):
    norm, oracle = make_pair(alpha_fwd=alpha_fwd, alpha_bwd=alpha_bwd, warmup=warmup, groups=4)
    run_against_oracle(norm, oracle, batches_of_many_shapes(masked=True))


@pytest.mark.parametrize("masked", [False, True], ids=["no-mask", "mask"])
@pytest.mark.parametrize("groups", [0, 4])
def test_two_dimensional_input(masked, groups):
    generator = rng(2)
    batches = [random_batch(generator, (2 + step % 5, CHANNELS), masked) for step in range(STEPS)]
    norm, oracle = make_pair(groups=groups, warmup=3)
    run_against_oracle(norm, oracle, batches)


@pytest.mark.parametrize(("channels", "groups"), [(1, 0), (1, 1), (7, 7), (5, 1), (67, 0)])
def test_odd_channel_counts(channels, groups):
    """One channel, groups of a single channel, primes and three above a power of two.

    In float64: in a group of one channel the gradient is a difference of nearly equal terms.
    """
    norm, oracle = make_pair(channels=channels, groups=groups, warmup=2)
    batches = batches_of_many_shapes(True, channels=channels, seed=1)
    run_against_oracle(norm.double(), oracle, batches, rtol=5e-6, dtype=torch.float64)


def test_single_token():
    generator = rng(7)
    batches = [random_batch(generator, (1, 1, CHANNELS), masked=False) for _ in range(STEPS)]
    norm, oracle = make_pair(warmup=4)
    run_against_oracle(norm, oracle, batches)


def test_one_real_token_among_padding():
    generator = rng(8)
    batches = []
    for _ in range(STEPS):
        x, mask, dy = random_batch(generator)
        mask[:] = True
        mask[1, 2] = False
        batches.append((x, mask, dy))
    norm, oracle = make_pair(groups=4)
    run_against_oracle(norm, oracle, batches)


@pytest.mark.parametrize("groups", [0, 4])
def test_eps_enters_under_the_root(groups):
    norm, oracle = make_pair(eps=0.5, groups=groups, warmup=3)
    run_against_oracle(norm, oracle, batches_of_many_shapes(True))


@pytest.mark.parametrize("groups", [0, 4])
def test_float64_input_is_computed_in_float64(groups):
    """Only the state is rounded to float32, once per step."""
    norm, oracle = make_pair(groups=groups, warmup=5)
    run_against_oracle(norm.double(), oracle, batches_of_many_shapes(True), rtol=2e-6, dtype=torch.float64)


def test_first_step_in_float64_is_exact():
    """Before any state has been rounded, a tolerance of 1e-12 distinguishes float64 from float32 arithmetic."""
    norm, oracle = make_pair(groups=4)
    x, mask, dy = random_batch(rng(11))
    norm.double()
    oracle.weight = norm.weight.detach().numpy()
    oracle.bias = norm.bias.detach().numpy()
    assert_steps_close(train_step(norm, x, mask, dy, torch.float64), oracle_step(oracle, x, mask, dy), rtol=1e-12)


@pytest.mark.parametrize("alpha_bwd", [0.5, 0.9])
def test_large_batch_power_does_not_make_nu_diverge(alpha_bwd):
    """Gamma > 2 / (1 - alpha) makes the unguarded factor smaller than -1; the guard stops it at 0 (Assumption 10)."""
    norm, oracle = make_pair(alpha_fwd=0.99, alpha_bwd=alpha_bwd)
    generator = rng(12)
    batches = [random_batch(generator, scale=20.0) for _ in range(STEPS)]
    first_gamma = (batches[0][0] ** 2).mean(axis=(0, 1))
    assert (first_gamma > 2 / (1 - alpha_bwd)).all()
    run_against_oracle(norm, oracle, batches)


def test_guard_works_channel_by_channel():
    """Gamma from far below 1 to far above 2 / (1 - alpha) in one batch."""
    norm, oracle = make_pair()
    generator = rng(13)
    batches = []
    for _ in range(STEPS):
        x, mask, dy = random_batch(generator)
        x *= np.geomspace(0.1, 30, CHANNELS)
        batches.append((x, mask, dy))
    run_against_oracle(norm, oracle, batches)


def test_warmup_normalizes_with_the_batch_and_then_with_the_old_statistic():
    norm = PowerNorm(CHANNELS, psi_warmup_updates=1, affine=False)
    generator = rng(14)
    first, second = (random_batch(generator, masked=False)[0] for _ in range(2))
    psi2 = (first**2).mean(axis=(0, 1))
    y = train_step(norm, first, None, first, torch.float64)["y"]
    assert_close(y, first / np.sqrt(psi2 + 1e-5), 1e-6)
    assert_close(state_of(norm)["running_psi2"], psi2, 1e-6)
    assert_close(norm(torch.tensor(second)), second / np.sqrt(psi2 + 1e-5), 1e-6)


def test_warmup_counts_updates_once_it_is_told_about_them():
    """Four forwards per update: a warm-up of two updates lasts eight forwards, and t counts forwards."""
    norm, oracle = make_pair(warmup=2)
    run_against_oracle(norm, oracle, batches_of_many_shapes(True, steps=12), update_freq=4)


def test_warmup_is_over_at_once_for_a_model_that_has_been_trained():
    norm, oracle = make_pair(warmup=4)
    norm.set_num_updates(4)
    oracle.set_num_updates(4)
    run_against_oracle(norm, oracle, batches_of_many_shapes(True, steps=5))


def test_warmup_by_updates_may_start_after_forwards_without_a_trainer():
    norm, oracle = make_pair(warmup=3)
    batches = list(batches_of_many_shapes(True, steps=12))
    run_against_oracle(norm, oracle, batches[:5])
    run_against_oracle(norm.train(), oracle, batches[5:], update_freq=2)


def test_output_may_be_changed_in_place():
    norm, oracle = make_pair(groups=4)
    x, mask, dy = random_batch(rng(19))
    leaf = torch.tensor(x, dtype=torch.float32, requires_grad=True)
    y = norm(leaf, to_mask(mask))
    y.mul_(3.0)
    y.backward(torch.tensor(dy, dtype=torch.float32))
    assert_close(leaf.grad, oracle_step(oracle, x, mask, 3 * dy)["dx"])


def test_weight_changed_before_backward_is_not_used_silently():
    """Either an error or the gradient with the weight of the forward pass, never a gradient with the new weight."""
    norm, oracle = make_pair()
    x, mask, dy = random_batch(rng(20))
    leaf = torch.tensor(x, dtype=torch.float32, requires_grad=True)
    y = norm(leaf, to_mask(mask))
    with torch.no_grad():
        norm.weight.mul_(5.0)
    try:
        y.backward(torch.tensor(dy, dtype=torch.float32))
    except RuntimeError as error:
        assert "inplace" in str(error) or "in-place" in str(error)
    else:
        assert_close(leaf.grad, oracle_step(oracle, x, mask, dy)["dx"])


@pytest.mark.parametrize("before", [200, 5_000, 50_000])
def test_fine_tuning_has_a_warmup_that_works(before):
    """A training that begins from trained weights and meets data 3 times as large: after its warm-up of 100 updates
    evaluation and the first step behind the warm-up have the scale of training, however long the first training was.
    """
    trained = PowerNorm(CHANNELS, affine=False, psi_warmup_updates=100).train()
    x = torch.randn(256, CHANNELS, generator=torch.Generator().manual_seed(0))
    trained.set_num_updates(before)
    trained(x.requires_grad_()).backward(x.detach())
    trained.flush()
    trained.num_batches_tracked.fill_(before)
    norm = PowerNorm(CHANNELS, affine=False, psi_warmup_updates=100).train()
    norm.load_state_dict(trained.state_dict())
    larger = 3 * x.detach()
    for update in range(100):
        norm.set_num_updates(update)
        y = norm(larger.clone().requires_grad_())
        y.backward(torch.zeros_like(y))
        assert_close(y.square().mean().sqrt(), 1.0, 1e-3)
    norm.set_num_updates(100)
    assert_close(norm.running_psi2, larger.square().mean(0), 1e-5)
    assert_close(norm(larger).square().mean().sqrt(), 1.0, 1e-3)
    assert_close(norm.eval()(larger).square().mean().sqrt(), 1.0, 1e-3)


def test_resuming_in_the_middle_of_a_warmup_continues_it():
    straight, stopped = (PowerNorm(CHANNELS, psi_warmup_updates=6).train() for _ in range(2))
    for update, batch in enumerate(batches_of_many_shapes(True, steps=9)):
        if update == 4:
            state = stopped.state_dict()
            stopped = PowerNorm(CHANNELS, psi_warmup_updates=6).train()
            stopped.set_num_updates(0)  # as fairseq's trainer does before it has found a checkpoint
            stopped.load_state_dict(state)
        for norm in (straight, stopped):
            norm.set_num_updates(update)
            train_step(norm, *batch)
        assert_states_equal(stopped, straight)
    assert int(straight.num_batches_tracked) == 9


def test_initial_state_and_parameters():
    norm = PowerNorm(CHANNELS)
    assert state_of(norm).keys() == {"running_psi2", "nu", "num_batches_tracked"}
    assert torch.equal(norm.running_psi2, torch.ones(CHANNELS))
    assert torch.equal(norm.nu, torch.zeros(CHANNELS))
    assert norm.num_batches_tracked.dtype == torch.int64 and norm.num_batches_tracked.shape == ()
    assert int(norm.num_batches_tracked) == 0
    assert torch.equal(norm.weight, torch.ones(CHANNELS)) and torch.equal(norm.bias, torch.zeros(CHANNELS))
    plain = PowerNorm(CHANNELS, affine=False)
    assert plain.weight is None and plain.bias is None and not list(plain.parameters())


def test_gradients_in_eval_mode_are_those_of_the_fixed_scaling():
    norm, oracle = make_pair()
    generator = rng(22)
    for _ in range(3):
        batch = random_batch(generator)
        train_step(norm, *batch)
        oracle_step(oracle, *batch)
    norm.eval()
    before = state_of(norm)
    x, mask, dy = random_batch(generator)
    actual = train_step(norm, x, mask, dy)
    scale = 1 / np.sqrt(oracle.psi2 + 1e-5)
    assert_close(actual["dx"], dy * oracle.weight * scale)
    assert_close(actual["dweight"], (dy * x * scale).sum(axis=(0, 1)))
    assert_close(actual["dbias"], dy.sum(axis=(0, 1)))
    assert_state_unchanged(norm, before)


@pytest.mark.parametrize(("scale", "expected"), [(2.0, 0.0), (8.0, math.log(4)), (0.5, math.log(4))])
def test_psi_distance_is_that_of_the_logarithms(scale, expected):
    """abs(log(psi_B / psi)) with psi = 2, above and below it."""
    norm = PowerNorm(4)
    norm.running_psi2.fill_(4.0)
    norm.collecting = True
    norm(torch.full((3, 2, 4), scale, requires_grad=True)).sum().backward()
    assert norm.diagnostics()["psi_distance"].item() == pytest.approx(expected, abs=1e-6)
