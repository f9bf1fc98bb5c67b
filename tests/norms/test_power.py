"""PN against the oracle of Shen et al. 2020, Algorithm 2."""

import numpy as np
import pytest
import torch

from pn_fairseq.norms import PowerNorm

from .helpers import (
    CHANNELS,
    affine_of,
    assert_close,
    assert_states_equal,
    assert_training_follows,
    batches,
    oracle_step,
    random_batch,
    randomize_affine,
    rng,
    to_mask,
    train_step,
)
from .oracle import PowerNormOracle


def make_pair(alpha_fwd=0.9, alpha_bwd=0.9, affine=True, groups=0, warmup=0, eps=1e-5):
    norm = PowerNorm(
        CHANNELS, alpha_bwd, warmup, alpha_fwd=alpha_fwd, eps=eps, affine=affine, layer_scale_groups=groups
    )
    randomize_affine(norm)
    oracle = PowerNormOracle(CHANNELS, alpha_fwd, alpha_bwd, warmup, groups=groups, eps=eps, **affine_of(norm))
    return norm.train(), oracle


def test_power_oracle_in_one_worked_example():
    """One channel, tokens 3 and 4, a third that is padding; alphas 0.5: every number by hand."""
    oracle = PowerNormOracle(1, alpha=0.5, alpha_bwd=0.5, eps=0.0)
    mask = np.array([False, False, True])
    oracle.psi2, oracle.nu = np.array([25.0]), np.array([2.0])
    y, ctx = oracle.forward(np.array([[3.0], [4.0], [5.0]]), mask)
    np.testing.assert_allclose(y[:, 0], [0.6, 0.8, 1.0])
    np.testing.assert_allclose(oracle.psi2, 25.0)
    dx, dweight, dbias = oracle.backward(np.array([[1.0], [-1.0], [10.0]]), ctx)
    np.testing.assert_allclose(dx[:, 0], [(1 - 1.2) / 5, (-1 - 1.6) / 5, 10 / 5])
    np.testing.assert_allclose(oracle.psi2, [0.5 * 25 + 0.5 * 12.5])
    np.testing.assert_allclose(oracle.nu, [2 * (1 - 0.5 * 0.5) + 0.5 * (0.6 - 0.8) / 2])
    np.testing.assert_allclose([dweight[0], dbias[0]], [0.6 - 0.8 + 10, 10])


@pytest.mark.parametrize("alpha_bwd", [0.5, 0.9])
def test_large_batch_power_does_not_make_nu_diverge(alpha_bwd):
    """Gamma > 2 / (1 - alpha) makes the unguarded factor smaller than -1; the guard stops it at 0 (Assumption 10),
    channel by channel."""
    norm, oracle = make_pair(alpha_fwd=0.99, alpha_bwd=alpha_bwd)
    generator, steps = rng(13), []
    for _ in range(32):
        x, mask, dy = random_batch(generator)
        steps.append((x * np.geomspace(0.1, 30, CHANNELS), mask, dy))
    first_gamma = (steps[0][0] ** 2).mean(axis=(0, 1))
    assert first_gamma.min() < 0.1 and first_gamma.max() > 2 / (1 - alpha_bwd)
    assert_training_follows(norm, oracle, steps)


def test_warmup_is_over_at_once_for_a_model_that_has_been_trained():
    norm, oracle = make_pair(warmup=4)
    norm.set_num_updates(4)
    oracle.set_num_updates(4)
    assert_training_follows(norm, oracle, batches(5))


def test_warmup_by_updates_may_start_after_forwards_without_a_trainer():
    norm, oracle = make_pair(warmup=3)
    steps = list(batches(12))
    assert_training_follows(norm, oracle, steps[:5])
    assert_training_follows(norm.train(), oracle, steps[5:], update_freq=2)


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


def test_resuming_in_the_middle_of_a_warmup_continues_it():
    straight, stopped = (PowerNorm(CHANNELS, psi_warmup_updates=6).train() for _ in range(2))
    for update, batch in enumerate(batches(9)):
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
