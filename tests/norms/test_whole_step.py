"""A training step by one kernel each way: the same as one made in parts, and where the two meet."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from pn_fairseq.norms import build_norm, recalibrating

from .helpers import CHANNELS, STATEFUL, random_batch, randomize_affine, rng, to_mask

EXACT = ["power-v", "batch"]

#: Operator each way.
KERNELS = {name: ("batch_forward", "batch_backward") for name in EXACT} | {"power": ("power_forward", "power_backward")}


def pair(name, **options):
    """Two norms with the same parameters, of which the second does everything in parts."""
    norms = [build_norm(name, CHANNELS, **options).train() for _ in range(2)]
    randomize_affine(norms[0])
    norms[1].load_state_dict(norms[0].state_dict())
    norms[1].collecting = True
    return norms


def tensors(generator, **options):
    x, mask, dy = random_batch(generator, **options)
    return torch.tensor(x, dtype=torch.float32), to_mask(mask), torch.tensor(dy, dtype=torch.float32)


def step(norm, x, mask, dy):
    leaf = x.clone().requires_grad_()
    norm.zero_grad()
    y = norm(leaf, mask)
    y.backward(dy)
    parameters = [parameter.grad for parameter in norm.parameters()]
    return y.detach(), leaf.grad, *parameters


@pytest.mark.parametrize("name", STATEFUL)
def test_one_operator_each_way(name):
    norm = build_norm(name, CHANNELS, layer_scale_groups=4)
    x, mask, dy = tensors(rng(0))
    x.requires_grad_()
    seen = []
    for call in (lambda: norm(x, mask), lambda: seen[0][1].backward(dy)):
        with torch.profiler.profile() as profile:
            result = call()
        seen.append(({event.key for event in profile.key_averages() if event.key.startswith("pn_fairseq")}, result))
    assert tuple(names for names, _ in seen) == tuple({f"pn_fairseq::{each}"} for each in KERNELS[name])


@pytest.mark.parametrize("name", STATEFUL)
@pytest.mark.parametrize("groups", [0, 4])
@pytest.mark.parametrize("affine", [True, False])
def test_same_as_in_parts(name, groups, affine):
    """Also where a statistic or a gradient is not finite, and over the end of a psi warm-up."""
    whole, parts = pair(name, layer_scale_groups=groups, affine=affine, psi_warmup_updates=3)
    generator = rng(1)
    for number in range(8):
        x, mask, dy = tensors(generator)
        if number == 4:
            x[0, 0, 1], mask = float("nan"), None
        if number == 6:
            dy[0, 0, 1], mask = float("inf"), None
        for found, expected in zip(step(whole, x, mask, dy), step(parts, x, mask, dy), strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5, equal_nan=True)
        torch.testing.assert_close(whole.state_dict(), parts.state_dict(), rtol=1e-6, atol=1e-6)
    assert int(whole.num_batches_tracked) == 6


@pytest.mark.parametrize("name", STATEFUL)
def test_recalibration_is_the_same_as_in_parts(name):
    whole, parts = pair(name, layer_scale_groups=4)
    generator = rng(2)
    batches = [tensors(generator)[:2] for _ in range(5)]
    for norm in (whole, parts):
        with torch.no_grad(), recalibrating(norm):
            for x, mask in batches:
                norm(x, mask)
    torch.testing.assert_close(whole.state_dict(), parts.state_dict(), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", STATEFUL)
@pytest.mark.parametrize("first_whole", [True, False])
@pytest.mark.parametrize("fault", [False, True])
def test_recomputed_in_the_other_way(name, first_whole, fault):
    """Collecting is switched on or off between a forward and its recomputation under activation checkpointing."""
    norm, plain = pair(name)
    plain.collecting = False
    x, mask, dy = tensors(rng(3))
    step(norm, x + 1, mask, dy), step(plain, x + 1, mask, dy)
    if fault:
        dy[0, 0, 0], mask = float("nan"), None
    norm.collecting = not first_whole
    leaf = x.clone().requires_grad_()
    norm.zero_grad()
    y = checkpoint(norm, leaf, mask, use_reentrant=True)
    norm.collecting = first_whole
    y.backward(dy)
    found = y.detach(), leaf.grad, *(parameter.grad for parameter in norm.parameters())
    for one, other in zip(found, step(plain, x, mask, dy), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5, equal_nan=True)
    torch.testing.assert_close(norm.state_dict(), plain.state_dict(), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", EXACT)
@pytest.mark.parametrize("groups", [0, 4])
@pytest.mark.parametrize("in_parts", [False, True])
def test_second_derivative(name, groups, in_parts):
    norm = randomize_affine(build_norm(name, CHANNELS, layer_scale_groups=groups).double())
    norm.collecting = in_parts
    x = torch.randn(3, 2, CHANNELS, dtype=torch.float64, requires_grad=True)
    inputs = (x, norm.weight, norm.bias)

    def call(x, weight, bias):
        return torch.func.functional_call(norm, {"weight": weight, "bias": bias}, (x,))

    assert torch.autograd.gradcheck(call, inputs, fast_mode=True)
    assert torch.autograd.gradgradcheck(call, inputs, fast_mode=True)


@pytest.mark.parametrize("name", EXACT)
def test_gradient_that_can_be_differentiated_is_the_same_and_ends_the_step(name):
    """Padding included; a gradient that is not finite takes the step back."""
    norm, _ = pair(name, layer_scale_groups=4)
    x, mask, dy = tensors(rng(4))
    before = norm.state_dict()
    before = {key: value.clone() for key, value in before.items()}
    leaf = x.clone().requires_grad_()
    y = norm(leaf, mask)
    (dx,) = torch.autograd.grad(y, leaf, dy, create_graph=True)
    (plain,) = torch.autograd.grad(norm(leaf, mask), leaf, dy)
    assert dx.requires_grad
    torch.testing.assert_close(dx.detach(), plain, rtol=1e-5, atol=1e-5)
    assert not norm._pending.steps and int(norm.num_batches_tracked) == 2
    norm.load_state_dict(before)
    torch.autograd.grad(norm(leaf, None), leaf, torch.full_like(dy, float("nan")), create_graph=True)
    torch.testing.assert_close(norm.state_dict(), before, rtol=0, atol=0)


def test_approximate_gradient_has_no_derivative():
    norm = build_norm("power", CHANNELS)
    x = torch.randn(4, 2, CHANNELS, requires_grad=True)
    (dx,) = torch.autograd.grad(norm(x).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        dx.sum().backward()
