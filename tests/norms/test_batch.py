"""BN on the real tokens, against torch.nn.BatchNorm1d on the gathered tokens."""

import numpy as np
import pytest
import torch

from pn_fairseq.norms import MaskedBatchNorm

from .helpers import (
    CHANNELS,
    affine_of,
    assert_close,
    assert_state_close,
    assert_steps_close,
    oracle_step,
    random_batch,
    randomize_affine,
    real_tokens,
    rng,
    state_of,
    to_mask,
    train_step,
)
from .oracle import BatchNormOracle, layer_scale_forward, oracle_state


def make_pair(alpha=0.9, affine=True, eps=1e-5):
    norm = randomize_affine(MaskedBatchNorm(CHANNELS, eps=eps, alpha_fwd=alpha, affine=affine)).train()
    reference = torch.nn.BatchNorm1d(CHANNELS, eps=eps, momentum=1 - alpha, affine=affine)
    if affine:
        reference.load_state_dict({"weight": norm.weight.data, "bias": norm.bias.data}, strict=False)
    return norm, reference


def assert_same_running_statistics(norm, reference):
    norm.flush()
    assert_close(norm.running_mean, reference.running_mean)
    assert_close(norm.running_var, reference.running_var)
    assert int(norm.num_batches_tracked) == int(reference.num_batches_tracked)


@pytest.mark.parametrize("masked", [False, True], ids=["no-mask", "mask"])
@pytest.mark.parametrize("affine", [True, False], ids=["affine", "plain"])
@pytest.mark.parametrize("alpha", [0.9, 0.5])
def test_equals_torch_on_the_gathered_tokens(masked, affine, alpha):
    norm, reference = make_pair(alpha, affine, eps=1e-3)
    generator = rng(1)
    for step in range(20):
        x, mask, dy = random_batch(generator, (2 + step % 4, 3, CHANNELS), masked, scale=generator.uniform(0.2, 3))
        real = real_tokens(x.shape, mask)
        dy[~real] = 0
        actual = train_step(norm, x, mask, dy)
        expected = train_step(reference, x[real], None, dy[real])
        for key in ("y", "dx"):
            actual[key] = actual[key][real]
        assert_steps_close(actual, expected, rtol=5e-5, what=f"step {step}:")
        assert_same_running_statistics(norm, reference)
    x = torch.tensor(x, dtype=torch.float32)
    assert_close(norm.eval()(x), reference.eval()(x.flatten(0, 1)).view_as(x).detach().double())


def test_two_dimensional_input_equals_torch():
    norm, reference = make_pair()
    generator = rng(2)
    for _ in range(5):
        x, mask, dy = random_batch(generator, (9, CHANNELS))
        real = ~mask
        dy[~real] = 0
        actual = train_step(norm, x, mask, dy)
        expected = train_step(reference, x[real], None, dy[real])
        assert_close(actual["y"][real], expected["y"])
        assert_close(actual["dx"][real], expected["dx"], rtol=5e-5)
        assert_same_running_statistics(norm, reference)


@pytest.mark.every_implementation
@pytest.mark.parametrize("groups", [0, 1, 4])
@pytest.mark.parametrize("masked", [False, True], ids=["no-mask", "mask"])
def test_training_follows_the_oracle(groups, masked):
    """With layer scale in front, and with gradient arriving at padding positions."""
    norm = randomize_affine(MaskedBatchNorm(CHANNELS, layer_scale_groups=groups)).train()
    oracle = BatchNormOracle(CHANNELS, groups=groups, **affine_of(norm))
    generator = rng(3)
    for step in range(10):
        x, mask, dy = random_batch(generator, masked=masked)
        actual, expected = train_step(norm, x, mask, dy), oracle_step(oracle, x, mask, dy)
        assert_steps_close(actual, expected, rtol=5e-5, what=f"step {step}:")
        assert_state_close(norm, oracle_state(oracle), what=f"step {step}:")
    assert_close(norm.eval()(torch.tensor(x, dtype=torch.float32)), oracle.evaluate(x))


@pytest.mark.parametrize("masked", [False, True], ids=["no-mask", "mask"])
@pytest.mark.parametrize("groups", [0, 4])
def test_gradcheck(masked, groups):
    norm = randomize_affine(MaskedBatchNorm(8, layer_scale_groups=groups)).double().train()
    x, mask, _ = random_batch(rng(4), (3, 2, 8), masked)
    real = torch.tensor(real_tokens(x.shape, mask))

    def run(x, weight, bias):
        y = torch.func.functional_call(norm, {"weight": weight, "bias": bias}, (x, to_mask(mask)))
        return y[real]

    assert torch.autograd.gradcheck(run, (torch.tensor(x, requires_grad=True), norm.weight, norm.bias))


def test_variance_survives_a_mean_far_above_the_spread():
    """E[x^2] - E[x]^2 in float32 would leave no correct digit at mean 3000 and spread 1."""
    norm, reference = make_pair()
    x, mask, dy = random_batch(rng(5))
    real = real_tokens(x.shape, mask)
    x = x + 3000
    dy[~real] = 0
    x = x.astype(np.float32)
    actual = train_step(norm, x, mask, dy)
    expected = train_step(reference.double(), x[real], None, dy[real], torch.float64)
    assert_close(actual["y"][real], expected["y"], rtol=2e-3)
    assert_close(state_of(norm)["running_var"], reference.running_var, rtol=2e-3)


def test_single_real_token_leaves_finite_results():
    """The unbiased variance of one token does not exist."""
    norm = randomize_affine(MaskedBatchNorm(CHANNELS)).train()
    x, mask, dy = random_batch(rng(6))
    mask[:] = True
    mask[0, 0] = False
    actual = train_step(norm, x, mask, dy)
    assert all(torch.tensor(value).isfinite().all() for value in actual.values())
    assert all(buffer.isfinite().all() for buffer in state_of(norm).values())
    assert_close(actual["y"][0, 0], norm.bias.detach())


def test_layer_scale_comes_first():
    x, mask, _ = random_batch(rng(7))
    scaled = layer_scale_forward(x.reshape(-1, CHANNELS), 4)[0].reshape(x.shape)
    with_scale = MaskedBatchNorm(CHANNELS, layer_scale_groups=4).double()
    without = MaskedBatchNorm(CHANNELS).double()
    expected = without(torch.tensor(scaled), to_mask(mask)).detach()
    assert_close(with_scale(torch.tensor(x), to_mask(mask)), expected, 1e-9)


def test_initial_state():
    norm = MaskedBatchNorm(CHANNELS)
    assert state_of(norm).keys() == {"running_mean", "running_var", "num_batches_tracked"}
    assert torch.equal(norm.running_mean, torch.zeros(CHANNELS))
    assert torch.equal(norm.running_var, torch.ones(CHANNELS))
    assert norm.num_batches_tracked.dtype == torch.int64
