"""What every norm owes its users as a torch module: evaluation, saving, copying, TorchScript."""

import copy
import io
import pickle
import subprocess
import sys

import pytest
import torch

from pn_fairseq.norms import NORMS, build_norm

from .helpers import (
    CHANNELS,
    STATEFUL,
    affine_of,
    assert_close,
    assert_state_unchanged,
    assert_states_equal,
    oracle_step,
    random_batch,
    randomize_affine,
    rng,
    state_of,
    to_mask,
    train_step,
)
from .oracle import make_oracle

OPTIONS = {"psi_warmup_updates": 2}


def trained(name, groups=0, affine=True, steps=4, **options):
    """A norm whose state is away from its initial value, and the oracle beside it."""
    norm = randomize_affine(build_norm(name, CHANNELS, layer_scale_groups=groups, affine=affine, **OPTIONS, **options))
    oracle = make_oracle(name, CHANNELS, layer_scale_groups=groups, **OPTIONS, **options, **affine_of(norm))
    generator = rng(1)
    for _ in range(steps):
        batch = random_batch(generator)
        train_step(norm.train(), *batch)
        oracle_step(oracle, *batch)
    return norm, oracle


def some_input(seed=2, shape=(5, 3, CHANNELS)):
    x, mask, _ = random_batch(rng(seed), shape)
    return torch.tensor(x, dtype=torch.float32), to_mask(mask)


@pytest.mark.parametrize("name", NORMS)
@pytest.mark.parametrize("groups", [0, 4])
@pytest.mark.parametrize("affine", [True, False], ids=["affine", "plain"])
@pytest.mark.parametrize("shape", [(5, 3, CHANNELS), (7, CHANNELS), (1, 1, CHANNELS)])
def test_evaluation_follows_the_oracle_with_and_without_mask(name, groups, affine, shape):
    norm, oracle = trained(name, groups, affine)
    norm.eval()
    x, _ = some_input(shape=shape)
    mask = torch.zeros(shape[-2::-1], dtype=torch.bool)
    mask.view(-1)[0] = True
    assert_close(norm(x), oracle.evaluate(x.double().numpy()))
    assert torch.equal(norm(x, mask), norm(x))


@pytest.mark.parametrize("name", NORMS)
def test_evaluation_treats_every_token_alone(name):
    norm, _ = trained(name, 4)
    norm.eval()
    x, _ = some_input()
    whole = norm(x)
    assert_close(norm(x[1:3, 2:]), whole[1:3, 2:].detach(), 1e-6)


@pytest.mark.parametrize("name", NORMS)
def test_evaluation_changes_no_state(name):
    norm, _ = trained(name)
    norm.eval()
    before = state_of(norm)
    for seed in range(3):
        x, mask, dy = random_batch(rng(seed))
        with torch.no_grad():
            norm(torch.tensor(x, dtype=torch.float32), to_mask(mask))
        train_step(norm, x, mask, dy)
    assert_state_unchanged(norm, before)


@pytest.mark.parametrize("name", STATEFUL)
def test_training_without_gradients_updates_what_forward_updates(name):
    """As when statistics are estimated again for averaged weights."""
    norm, oracle = trained(name)
    nu = norm.nu.clone() if name == "power" else None
    for seed in (5, 6):
        x, mask, _ = random_batch(rng(seed))
        with torch.no_grad():
            norm(torch.tensor(x, dtype=torch.float32), to_mask(mask))
        oracle.forward(x, mask)
    assert int(norm.num_batches_tracked) == oracle.count
    if name == "batch":
        assert_close(norm.running_mean, oracle.mean)
        assert_close(norm.running_var, oracle.var)
    else:
        assert_close(norm.running_psi2, oracle.psi2)
    if nu is not None:
        assert torch.equal(norm.nu, nu)


@pytest.mark.parametrize("name", STATEFUL)
def test_inference_mode_in_evaluation(name):
    norm, oracle = trained(name)
    x, _ = some_input()
    with torch.inference_mode():
        y = norm.eval()(x)
    assert_close(y, oracle.evaluate(x.double().numpy()))
    batch = random_batch(rng(7))
    assert_close(train_step(norm.train(), *batch)["y"], oracle_step(oracle, *batch)["y"])


def continue_the_same(norm, other, steps=4):
    """Both go on training with the same batches and stay the same to the bit."""
    generator = rng(8)
    for _ in range(steps):
        batch = random_batch(generator)
        expected, actual = train_step(norm.train(), *batch), train_step(other.train(), *batch)
        for key in expected:
            assert (actual[key] == expected[key]).all(), key
        assert_states_equal(other, norm)


@pytest.mark.parametrize("name", NORMS)
@pytest.mark.parametrize("steps", [1, 4])
def test_state_dict_round_trip(name, steps):
    """In the middle of the warm-up and after it: the count that decides about it is part of the state."""
    norm, _ = trained(name, steps=steps)
    other = build_norm(name, CHANNELS, **OPTIONS)
    assert set(norm.state_dict()) == {"weight", "bias", *state_of(norm)}
    file = io.BytesIO()
    torch.save(norm.state_dict(), file)
    file.seek(0)
    result = other.load_state_dict(torch.load(file, weights_only=True))
    assert not result.missing_keys and not result.unexpected_keys
    continue_the_same(norm, other)


@pytest.mark.parametrize("name", STATEFUL)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_state_loaded_from_another_type_becomes_float32(name, dtype):
    norm, _ = trained(name)
    saved = {k: v.to(dtype) if v.is_floating_point() else v for k, v in norm.state_dict().items()}
    other = build_norm(name, CHANNELS)
    other.load_state_dict(saved)
    for key, value in state_of(other).items():
        assert value.dtype == state_of(norm)[key].dtype
        torch.testing.assert_close(value, saved[key].to(value.dtype), rtol=0, atol=0)


@pytest.mark.parametrize("name", STATEFUL)
def test_state_dict_can_be_loaded_between_forward_and_backward(name):
    """The gradient is that of the forward that was run, with the statistics of that time."""
    norm, oracle = trained(name)
    saved = {k: v.clone() for k, v in norm.state_dict().items()}
    x, mask, dy = random_batch(rng(9))
    leaf = torch.tensor(x, dtype=torch.float32, requires_grad=True)
    y = norm(leaf, to_mask(mask))
    norm.zero_grad()
    buffers = {k: v for k, v in saved.items() if k not in ("weight", "bias")}
    norm.load_state_dict(buffers, strict=False)
    y.backward(torch.tensor(dy, dtype=torch.float32))
    assert_close(leaf.grad, oracle_step(oracle, x, mask, dy)["dx"], 5e-5)
    for key, value in buffers.items():
        assert torch.equal(norm.state_dict()[key], value), f"{key}: what was loaded is there"


@pytest.mark.parametrize("name", NORMS)
@pytest.mark.parametrize("how", ["deepcopy", "pickle", "torch.save"])
@pytest.mark.parametrize("mid_step", [False, True], ids=["after-a-step", "before-a-backward"])
@pytest.mark.parametrize("told", [False, True], ids=["untold", "told-updates"])
def test_copies_go_on_alike_and_apart(name, how, mid_step, told):
    norm, _ = trained(name, 4, steps=1)
    if told:
        norm.set_num_updates(1)
    pending = norm(torch.ones(2, 2, CHANNELS, requires_grad=True)) if mid_step else None
    if how == "deepcopy":
        other = copy.deepcopy(norm)
    elif how == "pickle":
        other = pickle.loads(pickle.dumps(norm))
    else:
        file = io.BytesIO()
        torch.save(norm, file)
        file.seek(0)
        other = torch.load(file, weights_only=False)
    assert_states_equal(other, norm)
    before = state_of(norm)
    untouched = copy.deepcopy(other)
    train_step(untouched.train(), *random_batch(rng(10)))
    assert_state_unchanged(norm, before)
    del pending
    continue_the_same(norm, other)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("name", NORMS)
@pytest.mark.parametrize("groups", [0, 4])
@pytest.mark.parametrize("affine", [True, False], ids=["affine", "plain"])
def test_torchscript_in_evaluation(name, groups, affine):
    norm, _ = trained(name, groups, affine)
    scripted = torch.jit.script(norm.eval())
    file = io.BytesIO()
    torch.jit.save(scripted, file)
    file.seek(0)
    loaded = torch.jit.load(file)
    for shape in ((5, 3, CHANNELS), (7, CHANNELS)):
        x, mask = some_input(shape=shape)
        mask = mask if len(shape) == 3 else torch.zeros(shape[0], dtype=torch.bool)
        for module in (scripted, loaded):
            torch.testing.assert_close(module(x), norm(x))
            torch.testing.assert_close(module(x, mask), norm(x, mask))
    half = x.half()
    assert scripted(half).dtype == torch.float16


@pytest.mark.parametrize("name", NORMS)
def test_repr_names_the_size(name):
    assert str(CHANNELS) in repr(build_norm(name, CHANNELS))


def test_import_does_not_need_fairseq():
    code = "import sys, pn_fairseq.norms; sys.exit(any(m.split('.')[0] == 'fairseq' for m in sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
