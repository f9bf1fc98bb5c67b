"""Overflows: a batch that is not finite, or whose gradient is not, leaves no trace in the state."""

import numpy as np
import pytest
import torch

from pn_fairseq.norms import build_norm

from .helpers import (
    CHANNELS,
    STATEFUL,
    affine_of,
    assert_state_close,
    assert_state_unchanged,
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
from .oracle import make_oracle, oracle_state

BAD_VALUES = [np.inf, -np.inf, np.nan]


def make(name, groups=0, **options):
    return randomize_affine(build_norm(name, CHANNELS, layer_scale_groups=groups, **options)).train()


def poison(values, mask, bad):
    """``bad`` in one channel of one real token."""
    values = values.copy()
    first = tuple(np.argwhere(real_tokens(values.shape, mask))[0])
    values[(*first, 5)] = bad
    return values


@pytest.mark.parametrize("name", STATEFUL)
@pytest.mark.parametrize("groups", [0, 4])
@pytest.mark.parametrize("bad", BAD_VALUES)
@pytest.mark.parametrize("warmup", [0, 9])
def test_batch_that_is_not_finite_changes_no_state(name, groups, bad, warmup):
    """Whether its gradient is finite or not, or never comes."""
    norm = make(name, groups, psi_warmup_updates=warmup)
    generator = rng(1)
    for _ in range(2):
        train_step(norm, *random_batch(generator))
    before = state_of(norm)
    x, mask, dy = random_batch(generator)
    x = poison(x, mask, bad)
    train_step(norm, x, mask, dy)
    assert_state_unchanged(norm, before)
    train_step(norm, x, mask, dy * np.nan)
    assert_state_unchanged(norm, before)
    with torch.no_grad():
        norm(torch.tensor(x, dtype=torch.float32), to_mask(mask))
    assert_state_unchanged(norm, before)


@pytest.mark.parametrize("name", STATEFUL)
@pytest.mark.parametrize("warmup", [0, 9])
def test_square_that_overflows_changes_no_state(name, warmup):
    """1e30 is a float32, its square is not."""
    norm = make(name, psi_warmup_updates=warmup)
    train_step(norm, *random_batch(rng(2)))
    before = state_of(norm)
    x, mask, dy = random_batch(rng(3))
    train_step(norm, poison(x, mask, 1e30), mask, dy)
    assert_state_unchanged(norm, before)


@pytest.mark.parametrize("name", STATEFUL)
@pytest.mark.parametrize("groups", [0, 4])
@pytest.mark.parametrize("bad", BAD_VALUES)
@pytest.mark.parametrize("affine", [True, False], ids=["affine", "plain"])
@pytest.mark.parametrize("warmup", [0, 9])
def test_gradient_that_is_not_finite_takes_the_whole_step_back(name, groups, bad, affine, warmup):
    norm = make(name, groups, affine=affine, psi_warmup_updates=warmup)
    generator = rng(4)
    for _ in range(2):
        train_step(norm, *random_batch(generator))
    before = state_of(norm)
    x, mask, dy = random_batch(generator)
    actual = train_step(norm, x, mask, poison(dy, mask, bad))
    assert_state_unchanged(norm, before)
    # The loss scaler finds the overflow by looking at the gradients: it must not be hidden from it.
    assert not np.isfinite(actual["dx"]).all()
    if affine:
        assert not np.isfinite(actual["dbias"]).all()


@pytest.mark.parametrize("name", STATEFUL)
def test_whole_gradient_of_nan_takes_the_whole_step_back(name):
    norm = make(name)
    train_step(norm, *random_batch(rng(5)))
    before = state_of(norm)
    x, mask, dy = random_batch(rng(6))
    train_step(norm, x, mask, np.full_like(dy, np.nan))
    assert_state_unchanged(norm, before)


@pytest.mark.parametrize("name", STATEFUL)
@pytest.mark.parametrize("frozen", ["x", "parameters"])
def test_step_is_taken_back_where_something_is_frozen(name, frozen):
    norm = make(name)
    train_step(norm, *random_batch(rng(7)))
    before = state_of(norm)
    x, mask, dy = random_batch(rng(8))
    leaf = torch.tensor(x, dtype=torch.float32, requires_grad=frozen != "x")
    norm.requires_grad_(frozen != "parameters")
    norm(leaf, to_mask(mask)).backward(torch.tensor(poison(dy, mask, np.inf), dtype=torch.float32))
    assert_state_unchanged(norm, before)


@pytest.mark.parametrize("name", STATEFUL)
@pytest.mark.parametrize("groups", [0, 4])
@pytest.mark.parametrize("warmup", [0, 5])
def test_training_goes_on_as_if_the_faulty_batches_had_not_been_there(name, groups, warmup):
    options = {"psi_warmup_updates": warmup}
    norm = make(name, groups, **options)
    oracle = make_oracle(name, CHANNELS, layer_scale_groups=groups, **options, **affine_of(norm))
    generator = rng(9)
    for step in range(12):
        x, mask, dy = random_batch(generator)
        if step % 3 == 1:
            train_step(norm, poison(x, mask, BAD_VALUES[step % 2]), mask, dy)
        if step % 4 == 2:
            train_step(norm, x, mask, poison(dy, mask, np.nan))
        actual, expected = train_step(norm, x, mask, dy), oracle_step(oracle, x, mask, dy)
        assert_steps_close(actual, expected, rtol=5e-5, what=f"step {step}:")
        assert_state_close(norm, oracle_state(oracle), what=f"step {step}:")


@pytest.mark.parametrize("name", STATEFUL)
@pytest.mark.parametrize("first_forward_first", [True, False])
def test_two_forwards_whose_gradients_overflow_are_both_taken_back(name, first_forward_first):
    norm = make(name)
    train_step(norm, *random_batch(rng(10)))
    before = state_of(norm)
    outputs = []
    for seed in (11, 12):
        x, mask, dy = random_batch(rng(seed))
        y = norm(torch.tensor(x, dtype=torch.float32, requires_grad=True), to_mask(mask))
        outputs.append((y, torch.tensor(poison(dy, mask, np.inf), dtype=torch.float32)))
    for y, dy in outputs if first_forward_first else outputs[::-1]:
        y.backward(dy)
    for key, value in before.items():
        torch.testing.assert_close(state_of(norm)[key], value, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("name", STATEFUL)
@pytest.mark.parametrize("faulty", [0, 1])
@pytest.mark.parametrize("first_forward_first", [True, False])
def test_of_two_forwards_only_the_one_whose_gradient_overflows_is_taken_back(name, faulty, first_forward_first):
    """What stays is what one step with the other batch alone does to psi, the mean, the variance and the count."""
    norm, reference = make(name), make(name)
    outputs = []
    for number, seed in enumerate((13, 14)):
        x, mask, dy = random_batch(rng(seed))
        if number != faulty:
            train_step(reference, x, mask, dy)
        else:
            dy = poison(dy, mask, np.inf)
        y = norm(torch.tensor(x, dtype=torch.float32, requires_grad=True), to_mask(mask))
        outputs.append((y, torch.tensor(dy, dtype=torch.float32)))
    for y, dy in outputs if first_forward_first else outputs[::-1]:
        y.backward(dy)
    expected = state_of(reference)
    if faulty == 0:
        expected.pop("nu", None)  # the second forward saw the psi of the first, so its x-hat and nu are its own
    for key, value in expected.items():
        torch.testing.assert_close(state_of(norm)[key], value, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", STATEFUL)
def test_shared_module_whose_gradient_overflows_is_as_before(name):
    norm = make(name)
    train_step(norm, *random_batch(rng(15)))
    before = state_of(norm)
    x, mask, dy = random_batch(rng(16))
    leaf = torch.tensor(x, dtype=torch.float32, requires_grad=True)
    y = norm(torch.tanh(norm(leaf, to_mask(mask))), to_mask(mask))
    y.backward(torch.tensor(poison(dy, mask, np.nan), dtype=torch.float32))
    assert_state_unchanged(norm, before)


@pytest.mark.parametrize("name", STATEFUL)
@pytest.mark.parametrize("bad", BAD_VALUES)
def test_evaluation_of_what_is_not_finite_changes_no_state(name, bad):
    norm = make(name)
    train_step(norm, *random_batch(rng(17)))
    norm.eval()
    before = state_of(norm)
    x, mask, dy = random_batch(rng(18))
    train_step(norm, poison(x, mask, bad), mask, dy)
    assert_state_unchanged(norm, before)
