"""LayerScale against the oracle, autograd, finite differences and torch's RMSNorm."""

import pytest
import torch

from pn_fairseq.norms import LayerScale

from .helpers import CHANNELS, assert_close, rng
from .oracle import layer_scale_backward, layer_scale_forward

SHAPES = [(5, 3, CHANNELS), (7, CHANNELS), (1, 1, CHANNELS)]


def forward_and_dx(module, x, dy):
    x = torch.tensor(x, requires_grad=True)
    y = module(x)
    y.backward(torch.tensor(dy))
    return y, x.grad


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("groups", [1, 2, 4, CHANNELS])
@pytest.mark.parametrize("eps", [1e-5, 0.1])
def test_follows_the_oracle(shape, groups, eps):
    generator = rng(1)
    x, dy = generator.normal(size=shape), generator.normal(size=shape)
    y, dx = forward_and_dx(LayerScale(CHANNELS, groups, eps=eps), x, dy)
    expected_y, rms = layer_scale_forward(x.reshape(-1, CHANNELS), groups, eps)
    expected_dx = layer_scale_backward(dy.reshape(-1, CHANNELS), expected_y, rms, groups)
    assert y.shape == shape and y.dtype == torch.float64
    assert_close(y, expected_y.reshape(shape), 1e-10)
    assert_close(dx, expected_dx.reshape(shape), 1e-10)


@pytest.mark.parametrize("groups", [1, 4])
def test_gradient_is_that_of_autograd_for_the_plain_formula(groups):
    generator = rng(2)
    x, dy = generator.normal(size=SHAPES[0]), generator.normal(size=SHAPES[0])

    def plain(x):
        split = x.unflatten(-1, (groups, -1))
        return (split / (split.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt()).flatten(-2)

    actual, expected = forward_and_dx(LayerScale(CHANNELS, groups), x, dy), forward_and_dx(plain, x, dy)
    for a, e in zip(actual, expected, strict=True):
        assert_close(a, e.detach(), 1e-10)


@pytest.mark.parametrize("groups", [1, 2, 4, 8])
def test_gradcheck(groups):
    x = torch.tensor(rng(3).normal(size=(3, 2, 8)), requires_grad=True)
    assert torch.autograd.gradcheck(LayerScale(8, groups), (x,))


def test_one_group_is_rms_norm_without_a_gain():
    x = torch.tensor(rng(4).normal(size=SHAPES[0]))
    assert_close(LayerScale(CHANNELS, 1)(x), torch.nn.functional.rms_norm(x, (CHANNELS,), eps=1e-5), 1e-10)


def test_groups_are_contiguous_channels():
    x = torch.ones(1, 1, 4)
    x[..., :2] = 100.0
    assert_close(LayerScale(4, 2)(x), [[[1.0, 1.0, 1.0, 1.0]]], 1e-4)


@pytest.mark.parametrize("groups", [1, 3])
def test_scale_of_the_input_does_not_matter(groups):
    x = torch.tensor(rng(5).normal(size=SHAPES[0])) * 10
    module = LayerScale(CHANNELS, groups, eps=1e-12)
    assert_close(module(x * 1000), module(x), 1e-9)


def test_one_channel_keeps_its_sign_only():
    y = LayerScale(1, 1)(torch.tensor([[3.0], [-0.5], [0.0]]))
    assert_close(y, [[1.0], [-1.0], [0.0]], 1e-4)


def test_zero_token_stays_zero_with_finite_gradient():
    y, dx = forward_and_dx(LayerScale(CHANNELS, 4), torch.zeros(2, CHANNELS).numpy(), torch.ones(2, CHANNELS).numpy())
    assert not y.any() and dx.isfinite().all()


def test_zero_groups_is_the_identity():
    x = torch.tensor(rng(6).normal(size=SHAPES[0]))
    assert torch.equal(LayerScale(CHANNELS, 0)(x), x)


def test_has_neither_parameters_nor_state():
    module = LayerScale(CHANNELS, 4)
    assert not list(module.parameters()) and not module.state_dict()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_computed_in_float32(dtype):
    """Squares of 300 overflow float16; the result has one rounding, at the end."""
    x = (torch.tensor(rng(7).normal(size=SHAPES[0])) * 300).to(dtype)
    y = LayerScale(CHANNELS, 4)(x)
    expected = layer_scale_forward(x.double().numpy().reshape(-1, CHANNELS), 4)[0].reshape(x.shape)
    assert y.dtype == dtype
    assert_close(y, expected, torch.finfo(dtype).eps)


@pytest.mark.parametrize("training", [True, False])
def test_is_the_same_in_training_and_evaluation(training):
    x = torch.tensor(rng(8).normal(size=SHAPES[0]))
    assert torch.equal(LayerScale(CHANNELS, 4).train(training)(x), LayerScale(CHANNELS, 4)(x))
