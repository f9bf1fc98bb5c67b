"""LN against torch.nn.LayerNorm."""

import pytest
import torch

from pn_fairseq.norms import LayerNorm

from .helpers import (
    CHANNELS,
    affine_of,
    assert_close,
    assert_steps_close,
    oracle_step,
    random_batch,
    randomize_affine,
    rng,
    state_of,
    train_step,
)
from .oracle import LayerNormOracle


@pytest.mark.parametrize("affine", [True, False], ids=["affine", "plain"])
@pytest.mark.parametrize("masked", [False, True], ids=["no-mask", "mask"])
@pytest.mark.parametrize("shape", [(5, 3, CHANNELS), (7, CHANNELS), (1, 1, CHANNELS), (3, 2, 1)])
def test_equals_torch_layer_norm(affine, masked, shape):
    norm = randomize_affine(LayerNorm(shape[-1], eps=1e-3, affine=affine)).train()
    reference = torch.nn.LayerNorm(shape[-1], eps=1e-3, elementwise_affine=affine)
    if affine:
        reference.load_state_dict({"weight": norm.weight.data, "bias": norm.bias.data})
    x, mask, dy = random_batch(rng(1), shape, masked and shape[0] > 1)
    expected = train_step(reference, x, None, dy)
    assert_steps_close(train_step(norm, x, mask, dy), expected, rtol=1e-6)
    x = torch.tensor(x, dtype=torch.float32)
    assert_close(norm.eval()(x), reference(x).detach(), rtol=1e-6)


@pytest.mark.parametrize("groups", [1, 4])
def test_layer_scale_in_front_follows_the_oracle(groups):
    norm = randomize_affine(LayerNorm(CHANNELS, layer_scale_groups=groups)).train()
    oracle = LayerNormOracle(CHANNELS, groups=groups, **affine_of(norm))
    x, mask, dy = random_batch(rng(2))
    assert_steps_close(train_step(norm, x, mask, dy), oracle_step(oracle, x, mask, dy))


def test_has_no_state():
    assert not state_of(LayerNorm(CHANNELS))
