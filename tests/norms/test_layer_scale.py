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


def test_zero_groups_is_the_identity():
    x = torch.tensor(rng(6).normal(size=(5, 3, CHANNELS)))
    assert torch.equal(LayerScale(CHANNELS, 0)(x), x)
    assert not list(LayerScale(CHANNELS, 4).parameters()) and not LayerScale(CHANNELS, 4).state_dict()
