"""PN-V against the oracle, autograd of the plain formula and finite differences (Shen et al. 2020, Eq. 6)."""

import pytest
import torch

from pn_fairseq.norms import PowerNormV

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
from .oracle import PowerNormVOracle, oracle_state


@pytest.mark.every_implementation
@pytest.mark.parametrize("masked", [False, True], ids=["no-mask", "mask"])
@pytest.mark.parametrize(
    ("groups", "affine", "alpha"), [(0, True, 0.9), (1, False, 0.5), (4, True, 0.5), (4, False, 0.9)]
)
def test_training_follows_the_oracle(masked, groups, affine, alpha):
    norm = randomize_affine(PowerNormV(CHANNELS, alpha_fwd=alpha, affine=affine, layer_scale_groups=groups)).train()
    oracle = PowerNormVOracle(CHANNELS, alpha, groups=groups, **affine_of(norm))
    generator = rng(1)
    for step in range(10):
        shape = (1 + step % 5, 3, CHANNELS)
        x, mask, dy = random_batch(generator, shape, masked, scale=generator.uniform(0.2, 3))
        assert_steps_close(train_step(norm, x, mask, dy), oracle_step(oracle, x, mask, dy), what=f"step {step}:")
        assert_state_close(norm, oracle_state(oracle), what=f"step {step}:")
    assert_close(norm.eval()(torch.tensor(x, dtype=torch.float32)), oracle.evaluate(x))


@pytest.mark.parametrize("masked", [False, True], ids=["no-mask", "mask"])
def test_gradient_is_that_of_autograd_for_the_plain_formula(masked):
    """Gradient arriving at padding stays there: padding enters no statistic, and so no sum of the backward pass."""
    norm = randomize_affine(PowerNormV(CHANNELS)).double().train()
    x, mask, dy = random_batch(rng(2), masked=masked)
    real = torch.tensor(real_tokens(x.shape, mask))
    leaf, weight, bias = (t.clone().detach().requires_grad_() for t in (torch.tensor(x), norm.weight, norm.bias))
    root = (leaf[real].pow(2).mean(0) + 1e-5).sqrt()
    plain = weight * torch.where(real[..., None], leaf / root, leaf / root.detach()) + bias
    plain.backward(torch.tensor(dy))
    actual = train_step(norm, x, mask, dy, torch.float64)
    expected = {"y": plain.detach(), "dx": leaf.grad, "dweight": weight.grad, "dbias": bias.grad}
    assert_steps_close(actual, expected, rtol=1e-10)


@pytest.mark.parametrize("groups", [0, 4])
@pytest.mark.parametrize("masked", [False, True], ids=["no-mask", "mask"])
def test_gradcheck(groups, masked):
    norm = randomize_affine(PowerNormV(6 if groups == 0 else 8, layer_scale_groups=groups)).double().train()
    channels = norm.weight.numel()
    x, mask, _ = random_batch(rng(3), (3, 2, channels), masked)
    real = torch.tensor(real_tokens(x.shape, mask))

    def run(x, weight, bias):
        y = torch.func.functional_call(norm, {"weight": weight, "bias": bias}, (x, to_mask(mask)))
        return y[real]

    inputs = (torch.tensor(x, requires_grad=True), norm.weight, norm.bias)
    assert torch.autograd.gradcheck(run, inputs)


def test_two_dimensional_input():
    norm = randomize_affine(PowerNormV(CHANNELS, layer_scale_groups=4)).train()
    oracle = PowerNormVOracle(CHANNELS, groups=4, **affine_of(norm))
    generator = rng(4)
    for _ in range(3):
        x, mask, dy = random_batch(generator, (7, CHANNELS))
        assert_steps_close(train_step(norm, x, mask, dy), oracle_step(oracle, x, mask, dy))
        assert_state_close(norm, oracle_state(oracle))


def test_single_token_and_single_channel():
    norm = randomize_affine(PowerNormV(1)).train()
    oracle = PowerNormVOracle(1, **affine_of(norm))
    x, mask, dy = random_batch(rng(5), (1, 1, 1), masked=False)
    # dx is a difference of nearly equal terms here: (1 - x^2 / D^2) = eps / D^2.
    actual, expected = train_step(norm.double(), x, mask, dy, torch.float64), oracle_step(oracle, x, mask, dy)
    assert_steps_close(actual, expected, rtol=1e-6)


def test_initial_state():
    norm = PowerNormV(CHANNELS)
    assert state_of(norm).keys() == {"running_psi2", "num_batches_tracked"}
    assert torch.equal(norm.running_psi2, torch.ones(CHANNELS))
    assert norm.num_batches_tracked.dtype == torch.int64
