"""Half-precision input loses nothing in the statistics, against the oracles and float64; nor does float64 input."""

import copy

import numpy as np
import pytest
import torch

from pn_fairseq.norms import NORMS, VARIANTS, build_norm

from .helpers import (
    CHANNELS,
    STATEFUL,
    affine_of,
    assert_close,
    assert_steps_close,
    flushed,
    oracle_step,
    random_batch,
    randomize_affine,
    rng,
    state_of,
    train_step,
)
from .oracle import make_oracle


@pytest.mark.parametrize("name", NORMS)
@pytest.mark.parametrize("groups", [0, 4])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_one_rounding_away_from_the_oracle(name, groups, dtype):
    """The oracle gets the rounded inputs; what is left is the rounding of the results."""
    norm = randomize_affine(build_norm(name, CHANNELS, layer_scale_groups=groups, psi_warmup_updates=2)).to(dtype)
    oracle = make_oracle(name, CHANNELS, layer_scale_groups=groups, psi_warmup_updates=2, **affine_of(norm))
    generator = rng(4)
    for step in range(6):
        x, mask, dy = random_batch(generator)
        x, dy = (torch.tensor(a).to(dtype).double().numpy() for a in (x, dy))
        actual, expected = train_step(norm, x, mask, dy, dtype), oracle_step(oracle, x, mask, dy)
        assert_steps_close(actual, expected, torch.finfo(dtype).eps, f"step {step}:")


def statistics(x):
    x = x.double().flatten(0, -2)
    return {"psi2": x.pow(2).mean(0), "mean": x.mean(0), "var": x.var(0)}


@pytest.mark.every_implementation
@pytest.mark.parametrize("name", ["batch", "power-v", "power"])
@pytest.mark.parametrize(
    ("dtype", "shape", "std"),
    [(torch.float16, (11, 3, CHANNELS), 300.0), (torch.bfloat16, (4096, CHANNELS), 1.0)],
    ids=["fp16-squares-overflow", "bf16-4096-rows"],
)
def test_statistics_of_half_precision_input_are_those_of_float64(name, dtype, shape, std):
    """A float16 square overflows from 256 on, and a bfloat16 sum stops growing after some hundred rows."""
    x = (torch.tensor(rng(5).normal(size=shape)) * std + std / 4).to(dtype)
    norm = build_norm(name, CHANNELS, psi_warmup_updates=1).to(dtype)
    norm(x.requires_grad_()).sum().backward()
    exact, state = statistics(x.detach()), state_of(norm)
    if name == "power":
        assert_close(state["running_psi2"], exact["psi2"], 5e-6)
    elif name == "power-v":
        assert_close(state["running_psi2"], 0.9 + 0.1 * exact["psi2"], 5e-6)
    else:
        assert_close(state["running_mean"], 0.1 * exact["mean"], 5e-6)
        assert_close(state["running_var"], 0.9 + 0.1 * exact["var"], 5e-6)


@pytest.mark.every_implementation
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_nu_of_half_precision_input_is_that_of_float64(dtype):
    x = torch.tensor(rng(6).normal(size=(4096, CHANNELS))).to(dtype)
    dy = (torch.tensor(rng(7).normal(size=x.shape)) + 0.5 * x).to(dtype)
    norm = build_norm("power", CHANNELS).to(dtype)
    oracle = make_oracle("power", CHANNELS)
    for _ in range(2):
        train_step(norm, x.double(), None, dy.double(), dtype)
        oracle_step(oracle, x.double().numpy(), None, dy.double().numpy())
    assert_close(state_of(norm)["nu"], oracle.nu, 1e-5)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("name", STATEFUL)
def test_arithmetic_with_float64_input_is_float64(name, variant):
    """Of a float32 state: the results are as with a float64 state of the same values."""
    norm = randomize_affine(build_norm(name, CHANNELS, variant, window=2, renorm_updates=4)).double()
    generator = rng(3)
    for update in (0, 1, 2, 1001):  # warm-ups and schedules are over then
        norm.set_num_updates(update)
        x, mask, dy = random_batch(generator)
        narrow, wide = flushed(norm), copy.deepcopy(norm)
        for state in wide.buffers():
            state.data = state.data.double() if state.is_floating_point() else state.data
        expected = train_step(wide, x, mask, dy, torch.float64)
        assert_steps_close(train_step(narrow, x, mask, dy, torch.float64), expected, 1e-12)


@pytest.mark.parametrize("name", STATEFUL)
def test_slow_moving_average_does_not_stall(name):
    """With alpha = 0.999 a bfloat16 average of level 1 does not move: its steps are below half a unit."""
    norm = build_norm(name, CHANNELS, alpha_fwd=0.999).bfloat16()
    x = torch.full((8, CHANNELS), 2.0, dtype=torch.bfloat16)
    x[::2] = -1.0
    for _ in range(50):
        norm(x.requires_grad_()).backward(torch.zeros_like(x))
    norm.eval()
    mean, moment = norm.evaluation_statistics()
    target = 2.5 if mean is None else float(x.detach().double().var(0)[0])
    expected = target + (1 - target) * 0.999**50
    if name == "batch-renorm":  # it averages biased standard deviations
        target = (float(x.detach().double().var(0, correction=0)[0]) + norm.eps) ** 0.5
        expected = (target + ((1 + norm.eps) ** 0.5 - target) * 0.999**50) ** 2 - norm.eps
    assert_close(moment, np.full(CHANNELS, expected), 1e-5)
