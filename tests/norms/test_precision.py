"""Types: the state is float32 whatever the model's type, and half-precision input loses nothing in the statistics."""

import numpy as np
import pytest
import torch

from pn_fairseq.norms import NORMS, build_norm

from .helpers import (
    CHANNELS,
    STATEFUL,
    affine_of,
    assert_close,
    assert_state_unchanged,
    assert_steps_close,
    oracle_step,
    random_batch,
    randomize_affine,
    rng,
    state_of,
    to_mask,
    train_step,
)
from .oracle import make_oracle

CASTS = {
    "half": lambda m: m.half(),
    "bfloat16": lambda m: m.bfloat16(),
    "double": lambda m: m.double(),
    "float": lambda m: m.float(),
    "to-dtype": lambda m: m.to(torch.float16),
    "to-device-dtype": lambda m: m.to("cpu", torch.bfloat16),
    "to-tensor": lambda m: m.to(torch.ones(1, dtype=torch.float16)),
    "type": lambda m: m.type(torch.float16),
    "half-and-back": lambda m: m.half().float(),
}


def make(name, groups=0, **options):
    return randomize_affine(build_norm(name, CHANNELS, layer_scale_groups=groups, **options)).train()


@pytest.mark.parametrize("name", STATEFUL)
@pytest.mark.parametrize("cast", CASTS)
@pytest.mark.parametrize("within_a_parent", [False, True])
def test_casting_the_model_leaves_the_state_alone(name, cast, within_a_parent):
    norm = make(name)
    generator = rng(1)
    for _ in range(3):
        train_step(norm, *random_batch(generator))
    before = state_of(norm)
    CASTS[cast](torch.nn.Sequential(norm) if within_a_parent else norm)
    assert_state_unchanged(norm, before)
    for key, value in state_of(norm).items():
        assert value.dtype == (torch.int64 if key == "num_batches_tracked" else torch.float32), key


@pytest.mark.parametrize("name", NORMS)
def test_casting_the_model_casts_the_parameters(name):
    assert make(name).half().weight.dtype == torch.float16
    assert make(name).double().bias.dtype == torch.float64


@pytest.mark.parametrize("name", STATEFUL)
def test_buffers_follow_the_model_to_another_device(name):
    norm = make(name).to("meta")
    assert all(buffer.is_meta for buffer in norm.buffers())


@pytest.mark.parametrize("name", STATEFUL)
def test_buffers_of_the_model_stay_registered_after_a_cast(name):
    norm = make(name)
    keys = list(norm.state_dict())
    norm.half()
    train_step(norm, *random_batch(rng(2)), dtype=torch.float16)
    assert list(norm.state_dict()) == keys
    assert_state_unchanged(norm, {k: v for k, v in norm.state_dict().items() if k not in ("weight", "bias")})


@pytest.mark.parametrize("name", NORMS)
@pytest.mark.parametrize("groups", [0, 4])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("cast_parameters", [True, False])
@pytest.mark.parametrize("training", [True, False])
def test_output_and_gradients_have_the_types_of_what_they_belong_to(name, groups, dtype, cast_parameters, training):
    """Parameters of another type than the input are what mixed precision looks like."""
    norm = make(name, groups).train(training)
    if cast_parameters:
        norm.to(dtype)
    x, mask, _ = random_batch(rng(3))
    x = torch.tensor(x).to(dtype).requires_grad_()
    y = norm(x, to_mask(mask))
    y.sum().backward()
    assert y.dtype == dtype and x.grad.dtype == dtype
    assert norm.weight.grad.dtype == norm.weight.dtype and norm.bias.grad.dtype == norm.bias.dtype


@pytest.mark.parametrize("name", NORMS)
@pytest.mark.parametrize("groups", [0, 4])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_one_rounding_away_from_the_oracle(name, groups, dtype):
    """The oracle gets the rounded inputs; what is left is the rounding of the results."""
    norm = make(name, groups, psi_warmup_updates=2).to(dtype)
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


@pytest.mark.parametrize("name", STATEFUL)
@pytest.mark.parametrize(
    ("dtype", "shape", "std"),
    [(torch.float16, (11, 3, CHANNELS), 300.0), (torch.bfloat16, (4096, CHANNELS), 1.0)],
    ids=["fp16-squares-overflow", "bf16-4096-rows"],
)
def test_statistics_of_half_precision_input_are_those_of_float64(name, dtype, shape, std):
    """A float16 square overflows from 256 on, and a bfloat16 sum stops growing after some hundred rows."""
    x = (torch.tensor(rng(5).normal(size=shape)) * std + std / 4).to(dtype)
    norm = make(name, psi_warmup_updates=1).to(dtype)
    norm(x)
    exact, state = statistics(x), state_of(norm)
    if name == "power":
        assert_close(state["running_psi2"], exact["psi2"], 5e-6)
    elif name == "power-v":
        assert_close(state["running_psi2"], 0.9 + 0.1 * exact["psi2"], 5e-6)
    else:
        assert_close(state["running_mean"], 0.1 * exact["mean"], 5e-6)
        assert_close(state["running_var"], 0.9 + 0.1 * exact["var"], 5e-6)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_nu_of_half_precision_input_is_that_of_float64(dtype):
    x = torch.tensor(rng(6).normal(size=(4096, CHANNELS))).to(dtype)
    dy = (torch.tensor(rng(7).normal(size=x.shape)) + 0.5 * x).to(dtype)
    norm = build_norm("power", CHANNELS).to(dtype)
    oracle = make_oracle("power", CHANNELS)
    for _ in range(2):
        train_step(norm, x.double(), None, dy.double(), dtype)
        oracle_step(oracle, x.double().numpy(), None, dy.double().numpy())
    assert_close(norm.nu, oracle.nu, 1e-5)


@pytest.mark.parametrize("name", STATEFUL)
def test_slow_moving_average_does_not_stall(name):
    """With alpha = 0.999 a bfloat16 average of level 1 does not move: its steps are below half a unit."""
    norm = build_norm(name, CHANNELS, alpha_fwd=0.999).bfloat16()
    x = torch.full((8, CHANNELS), 2.0, dtype=torch.bfloat16)
    x[::2] = -1.0
    for _ in range(50):
        norm(x)
    target = 2.5 if name != "batch" else float(x.double().var(0)[0])
    expected = target + (1 - target) * 0.999**50
    assert_close(norm.running_var if name == "batch" else norm.running_psi2, np.full(CHANNELS, expected), 1e-5)


@pytest.mark.parametrize("name", NORMS)
def test_works_under_autocast(name):
    norm = make(name, 4)
    x, mask, dy = random_batch(rng(8))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        leaf = torch.tensor(x, dtype=torch.bfloat16, requires_grad=True)
        y = norm(leaf, to_mask(mask))
    y.backward(torch.tensor(dy).to(y.dtype))
    assert y.isfinite().all() and leaf.grad.isfinite().all()
    assert all(b.dtype in (torch.float32, torch.int64) for b in norm.buffers())


@pytest.mark.parametrize("name", STATEFUL)
@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("within_a_parent", [False, True])
def test_loaded_statistics_are_float32(name, assign, dtype, within_a_parent):
    """Whatever they were saved as, and the caller keeps what was loaded; training goes on from there."""
    saved = make(name)
    for _ in range(3):
        train_step(saved, *random_batch(rng(5)))
    norm = make(name)
    source, target = (torch.nn.Sequential(each) if within_a_parent else each for each in (saved, norm))
    state = {key: value.to(dtype) if value.is_floating_point() else value for key, value in source.state_dict().items()}
    given = dict(state)
    target.load_state_dict(state, assign=assign)
    assert state.keys() == given.keys() and all(state[key] is value for key, value in given.items())
    for key, value in state_of(norm).items():
        assert value.dtype == (torch.int64 if key == "num_batches_tracked" else torch.float32), key
        torch.testing.assert_close(value, state_of(saved)[key].to(dtype).to(value.dtype), rtol=0, atol=0)
    steps = int(norm.num_batches_tracked)
    train_step(norm, *random_batch(rng(6)))
    assert int(norm.num_batches_tracked) == steps + 1
