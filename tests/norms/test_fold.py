"""A norm in evaluation as part of the linear map that follows it."""

import numpy as np
import pytest
import torch

from pn_fairseq.norms import build_norm
from pn_fairseq.norms.fold import folded_linear

from .helpers import CHANNELS, STATEFUL, affine_of, random_batch, randomize_affine, rng, to_mask


def trained(name, groups, affine=True):
    norm = randomize_affine(build_norm(name, CHANNELS, layer_scale_groups=groups, affine=affine))
    x, mask, _ = random_batch(rng(3), scale=2.0)
    norm(torch.tensor(x, dtype=torch.float32), to_mask(mask))
    return norm.eval()


def by_hand(norm, x):
    """Evaluation as the definitions say, in NumPy and float64."""
    if norm.layer_scale.groups:
        grouped = x.reshape(*x.shape[:-1], norm.layer_scale.groups, -1)
        x = (grouped / np.sqrt((grouped**2).mean(-1, keepdims=True) + norm.eps)).reshape(x.shape)
    state = {key: value.double().numpy() for key, value in norm.named_buffers()}
    if "running_var" in state:
        x = (x - state["running_mean"]) / np.sqrt(state["running_var"] + norm.eps)
    else:
        x = x / np.sqrt(state["running_psi2"] + norm.eps)
    affine = affine_of(norm)
    return x * affine["weight"] + affine["bias"] if affine else x


@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("groups", [0, 1, 4])
@pytest.mark.parametrize("name", STATEFUL)
def test_folded_map_of_the_layer_scaled_input_is_the_map_of_the_norm(name, groups, affine):
    norm = trained(name, groups, affine)
    generator = rng(5)
    weight, bias = generator.normal(size=(7, CHANNELS)), generator.normal(size=7)
    x = random_batch(generator)[0]
    expected = by_hand(norm, x) @ weight.T + bias
    folded = folded_linear(norm, torch.tensor(weight), torch.tensor(bias))
    assert all(value.dtype == torch.float64 for value in folded)
    actual = torch.nn.functional.linear(norm.layer_scale(torch.tensor(x)), *folded)
    np.testing.assert_allclose(actual.detach().numpy(), expected, rtol=1e-11, atol=1e-11)
    np.testing.assert_allclose(norm(torch.tensor(x)).detach().numpy(), by_hand(norm, x), rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("name", STATEFUL)
def test_without_a_bias_it_gets_one(name):
    norm = trained(name, 0)
    x, weight = torch.randn(3, CHANNELS, dtype=torch.float64), torch.randn(7, CHANNELS, dtype=torch.float64)
    folded = folded_linear(norm, weight, None)
    torch.testing.assert_close(x @ folded[0].T + folded[1], norm(x) @ weight.T, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("name", STATEFUL)
def test_evaluation_follows_a_state_that_was_set_loaded_or_trained(name):
    """Nothing is kept from one call to the next."""
    norm, other = trained(name, 0), trained(name, 0)
    x = torch.randn(3, CHANNELS)
    norm(x)
    randomize_affine(norm, seed=9)
    np.testing.assert_allclose(norm(x).detach().numpy(), by_hand(norm, x.double().numpy()), rtol=1e-5, atol=1e-5)
    norm.load_state_dict(other.state_dict())
    assert torch.equal(norm(x), other(x))
    norm.train()
    norm(3 * torch.randn(20, CHANNELS))
    norm.eval()
    np.testing.assert_allclose(norm(x).detach().numpy(), by_hand(norm, x.double().numpy()), rtol=1e-5, atol=1e-5)
