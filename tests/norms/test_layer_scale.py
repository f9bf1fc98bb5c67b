"""LayerScale against the oracle, finite differences and torch's RMSNorm."""

import pytest
import torch

from pn_fairseq.norms import LayerScale

from .helpers import CHANNELS, assert_close, rng
from .oracle import layer_scale_backward, layer_scale_forward


@pytest.mark.parametrize("shape", [(5, 3, CHANNELS), (7, CHANNELS), (1, 1, CHANNELS)])
@pytest.mark.parametrize(("groups", "eps"), [(1, 0.1), (4, 1e-5), (CHANNELS, 0.1)])
def test_follows_the_oracle(shape, groups, eps):
    """Also at a token of zeros."""
    generator = rng(1)
    x, dy = generator.normal(size=shape), generator.normal(size=shape)
    x[0] = 0 if shape[0] > 1 else x[0]
    leaf = torch.tensor(x, requires_grad=True)
    y = LayerScale(CHANNELS, groups, eps=eps)(leaf)
    y.backward(torch.tensor(dy))
    expected_y, rms = layer_scale_forward(x.reshape(-1, CHANNELS), groups, eps)
    expected_dx = layer_scale_backward(dy.reshape(-1, CHANNELS), expected_y, rms, groups)
    assert y.shape == shape and y.dtype == torch.float64
    assert_close(y, expected_y.reshape(shape), 1e-10)
    assert_close(leaf.grad, expected_dx.reshape(shape), 1e-10)


@pytest.mark.parametrize("groups", [1, 2, 8])
def test_gradcheck(groups):
    x = torch.tensor(rng(3).normal(size=(3, 2, 8)), requires_grad=True)
    assert torch.autograd.gradcheck(LayerScale(8, groups), (x,))


def test_one_group_is_rms_norm_without_a_gain():
    x = torch.tensor(rng(4).normal(size=(5, 3, CHANNELS)))
    assert_close(LayerScale(CHANNELS, 1)(x), torch.nn.functional.rms_norm(x, (CHANNELS,), eps=1e-5), 1e-10)


def test_zero_groups_is_the_identity():
    x = torch.tensor(rng(6).normal(size=(5, 3, CHANNELS)))
    assert torch.equal(LayerScale(CHANNELS, 0)(x), x)


def test_has_neither_parameters_nor_state():
    module = LayerScale(CHANNELS, 4)
    assert not list(module.parameters()) and not module.state_dict()
