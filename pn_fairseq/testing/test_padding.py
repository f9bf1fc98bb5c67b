"""Padding and layouts of the input, faults in its numbers, and batches without a token."""

import itertools

import numpy as np
import pytest
import torch

from pn_fairseq.testing.helpers import (
    CHANNELS,
    assert_close,
    assert_same,
    assert_state_unchanged,
    assert_states_close,
    assert_states_equal,
    long,
    poison,
    random_batch,
    real_tokens,
    rng,
    state_of,
    tensors,
    to_mask,
    to_tensor,
    train_step,
)

# Padding and layouts.


def more_padding(x, mask, dy, fill=None):
    """Add three padding rows at the end, one in front, and a whole sentence of padding, all with
    gradient 0.
    """
    around = ((1, 3), (0, 1), (0, 0))
    wide_mask = np.pad(mask, ((0, 1), (1, 3)), constant_values=True)
    wide_x = np.pad(x, around)
    wide_dy = np.pad(dy, around)
    if fill is None:
        padding = rng(99).normal(size=wide_x.shape) * 50
    else:
        padding = fill
    return np.where(wide_mask.T[..., None], padding, wide_x), wide_mask, wide_dy


def in_order(values, shape, mask):
    """Real tokens, sentence by sentence, in an order that does not depend on the padding."""
    return np.swapaxes(values, 0, 1)[np.swapaxes(real_tokens(shape, mask), 0, 1)]


@pytest.mark.parametrize(
    ("groups", "fill"), [(0, None), (4, None), (4, np.inf), (0, np.nan), (4, 1e30)]
)
# more_padding adds a sentence of padding
@pytest.mark.filterwarnings("ignore:padding_mask. . of . sentences:UserWarning")
@long
def test_values_and_amount_of_padding_change_nothing_for_real_tokens(masking, groups, fill):
    """1e30 is a float32, but its square is not. A warm-up is over from the second of 4 steps on."""
    plain, padded = (masking.build(groups, psi_warmup_updates=2) for _ in range(2))
    generator = rng(2)
    for step in range(4):
        x, mask, dy = random_batch(generator)
        dy[mask.T] = 0
        wide = more_padding(x, mask, dy, fill)
        expected = train_step(plain, x, mask, dy)
        actual = train_step(padded, *wide)
        for key, value in expected.items():
            what = f"step {step}: {key}"
            if key in ("y", "dx"):
                found = in_order(actual[key], wide[0].shape, wide[1])
                assert_close(found, in_order(value, x.shape, mask), 1e-5, what)
            elif fill is None:
                assert_close(actual[key], value, 1e-5, what, terms=1.0)
        assert_states_close(padded, plain, what=f"step {step}:")


@pytest.mark.parametrize("groups", [0, 4])
def test_gradients_at_padding_stay_there_and_statistics_send_none(masking, groups):
    quiet = masking.build(groups)
    noisy = masking.build(groups)
    generator = rng(3)
    for step in range(3):
        x, mask, dy = random_batch(generator)
        silent = np.where(mask.T[..., None], 0, dy)
        loud = 100 * dy - 99 * silent
        expected = train_step(quiet, x, mask, silent)
        actual = train_step(noisy, x, mask, loud)
        real = real_tokens(x.shape, mask)
        assert_close(actual["dx"][real], expected["dx"][real], 1e-6, f"step {step}")
        assert not expected["dx"][~real].any()
        assert expected["dx"][real].all()
        assert_states_close(noisy, quiet, what=f"step {step}:")


def test_padding_is_normalized_like_the_real_tokens(case):
    """A padding position with the values of a real token gets the output of that token."""
    norm = case.build(4)
    generator = rng(5)
    for _ in range(3):
        x, mask, dy = random_batch(generator)
        mask[1, 2] = True
        mask[0, 0] = False
        x[2, 1] = x[0, 0]
        y = train_step(norm, x, mask, dy)["y"]
        assert_close(y[2, 1], y[0, 0], 1e-6)


@pytest.mark.parametrize("shape", [(5, 3, CHANNELS), (7, CHANNELS)])
def test_mask_without_padding_equals_no_mask(case, shape):
    without = case.build(4)
    with_mask = case.build(4)
    generator = rng(6)
    for _ in range(3):
        x, _, dy = random_batch(generator, shape, masked=False)
        empty = np.zeros(shape[-2::-1], dtype=bool)
        expected = train_step(without, x, None, dy)
        actual = train_step(with_mask, x, empty, dy)
        for key, value in expected.items():
            assert_close(actual[key], value, 1e-6, key)
        assert_states_close(with_mask, without)


def test_two_dimensional_input_equals_one_sentence(case):
    """(N, C) with a mask (N,), and (N, 1, C) with a mask (1, N)."""
    flat = case.build(4)
    sentence = case.build(4)
    generator = rng(7)
    for _ in range(3):
        x, mask, dy = random_batch(generator, (7, CHANNELS))
        actual = train_step(flat, x, mask, dy)
        expected = train_step(sentence, x[:, None], mask[None], dy[:, None])
        for key, value in expected.items():
            assert_close(actual[key], value.reshape(actual[key].shape), 1e-6, key)
        assert_states_close(flat, sentence)


@pytest.mark.parametrize(
    ("shape", "layout", "masked"),
    [
        ((5, 3, CHANNELS), "contiguous", True),
        ((5, 3, CHANNELS), "transposed", True),
        ((4, 4, CHANNELS), "contiguous", True),
        ((4, 4, CHANNELS), "transposed", False),
    ],
)
@long
def test_batch_first_equals_the_transposed_call(case, shape, layout, masked):
    """``transposed``: the memory of the input of the batch-first norm is in the order (T, B, C)."""
    time_first = case.build(4)
    batch_first = case.build(4, batch_first=True)
    generator = rng(8)
    for _ in range(3):
        x, mask, dy = random_batch(generator, shape, masked)
        if masked:
            # one sentence of padding: if the mask were read transposed, other tokens would count
            mask[1] = True
            mask[0] = False
        expected = train_step(time_first, x, mask, dy)
        leaf = to_tensor(x).transpose(0, 1)
        if layout == "contiguous":
            leaf = leaf.contiguous()
        leaf.requires_grad_()
        batch_first.zero_grad()
        y = batch_first(leaf, to_mask(mask))
        y.backward(to_tensor(dy).transpose(0, 1))
        assert_close(y.transpose(0, 1), expected["y"], 5e-6, "y")
        assert_close(leaf.grad.transpose(0, 1), expected["dx"], 1e-5, "dx")
        for name, parameter in batch_first.named_parameters():
            assert_close(parameter.grad, expected[f"d{name}"], 1e-5, name, terms=1.0)
        assert_states_close(batch_first, time_first, 5e-6)
    evaluated = batch_first.eval()(leaf).transpose(0, 1)
    assert_close(evaluated, time_first.eval()(leaf.transpose(0, 1)), 5e-6)


@pytest.mark.parametrize("training", [True, False])
def test_a_mask_that_does_not_fit_is_refused(case, training):
    for batch_first, shape, expected in (
        (False, (5, 3, CHANNELS), (3, 5)),
        (True, (3, 5, CHANNELS), (3, 5)),
    ):
        norm = case.build(batch_first=batch_first).train(training)
        for wrong in (expected[::-1], (1, 5), (15,), (3, 5, 1)):
            with pytest.raises(ValueError, match=", ".join(map(str, wrong))):
                norm(torch.zeros(shape), torch.zeros(wrong, dtype=torch.bool))
        with pytest.raises(ValueError, match="uint8"):
            norm(torch.zeros(shape), torch.zeros(expected, dtype=torch.uint8))
        with pytest.raises(ValueError, match="meta"):
            norm(torch.zeros(shape), torch.zeros(expected, dtype=torch.bool, device="meta"))
    for wrong in ((5, 3, 11), (12,), (2, 5, 3, 12)):
        with pytest.raises(ValueError, match="|".join(map(str, wrong))):
            norm(torch.zeros(wrong))


def test_inputs_masks_and_gradients_are_left_as_they_were(case):
    x, mask, dy = tensors(9)
    given = x.clone().requires_grad_(), mask.clone(), dy.clone()
    case.build(4)(*given[:2]).backward(given[2])
    assert_same(given, (x, mask, dy))


def test_strided_and_expanded_tensors(case):
    """Every second channel of a wider tensor, and the stride-0 gradient that sum() sends back."""
    norm = case.build(4)
    twin = case.build(4)
    generator = rng(10)
    for _ in range(2):
        x, mask, _ = random_batch(generator)
        wide = torch.zeros(*x.shape[:-1], 2 * CHANNELS)
        wide[..., ::2] = to_tensor(x)
        y = norm(wide.requires_grad_()[..., ::2], to_mask(mask))
        y.sum().backward()
        expected = train_step(twin, x, mask, np.ones_like(x))
        assert_close(y, expected["y"], 1e-6)
        assert_close(wide.grad[..., ::2], expected["dx"], 1e-5)
        assert_states_equal(norm, twin)


# Faults and empty batches.


@pytest.mark.parametrize(
    ("warmup", "where", "bad"),
    [(0, "x", np.inf), (9, "x", np.nan), (9, "dy", -np.inf), (0, "dy", np.nan)],
)
def test_numbers_that_are_not_finite_change_no_state(running, warmup, where, bad):
    """Training continues as if the batch had not been there."""
    norm, twin = (running.build(psi_warmup_updates=warmup) for _ in range(2))
    generator = rng(4)
    for step in range(4):
        x, mask, dy = random_batch(generator)
        if step != 2:
            expected = train_step(twin, x, mask, dy)
            actual = train_step(norm, x, mask, dy)
            for key, value in expected.items():
                np.testing.assert_array_equal(actual[key], value, key)
        elif where == "x":
            train_step(norm, poison(x, mask, bad), mask, dy)
        else:
            result = train_step(norm, x, mask, poison(dy, mask, bad))
            # The overflow must stay visible to the loss scaler, which looks for it in the
            # gradients.
            assert not np.isfinite(result["dx"]).all()
            assert not np.isfinite(result.get("dbias", result["dweight"])).all()
        assert_states_equal(norm, twin)


def test_a_fault_in_one_of_two_uses_keeps_the_other(running):
    for faulty, where, order in itertools.product((0, 1), ("x", "dy"), ((0, 1), (1, 0))):
        norm = running.trained()
        reference = running.trained()
        outputs = []
        for number, seed in enumerate((13, 14)):
            x, mask, dy = random_batch(seed)
            if number != faulty:
                train_step(reference, x, mask, dy)
            elif where == "x":
                x = poison(x, mask, np.nan)
            else:
                dy = poison(dy, mask, np.inf)
            y = norm(to_tensor(x, requires_grad=True), to_mask(mask))
            outputs.append((y, to_tensor(dy)))
        for index in order:
            y, gradient = outputs[index]
            y.backward(gradient)
        assert_states_equal(norm, reference)


def test_a_fault_in_a_gradient_reaches_every_use_in_its_graph(running):
    norm = running.trained()
    before = state_of(norm)
    x, mask, dy = tensors(16)
    hidden = torch.tanh(norm(x.requires_grad_(), mask))
    norm(hidden, mask).backward(torch.full_like(dy, torch.nan))
    assert_state_unchanged(norm, before)


@pytest.mark.parametrize(
    ("shape", "warmup"),
    [
        ((0, 3, CHANNELS), 9),
        ((5, 0, CHANNELS), 0),
        ((0, CHANNELS), 9),
        ((5, 3, CHANNELS), 0),
        ((5, 3, CHANNELS), 9),
    ],
)
def test_a_batch_without_a_real_token_changes_no_state(case, shape, warmup):
    """No token, or only padding."""
    norm = case.trained(4, psi_warmup_updates=warmup)
    before = state_of(norm)
    mask = np.ones(shape[-2::-1], dtype=bool)
    masks = [None, mask] if 0 in shape else [mask]
    for given in masks:
        x, _, dy = random_batch(11, shape, masked=False)
        actual = train_step(norm, x, given, dy)
        assert_state_unchanged(norm, before)
        assert actual["y"].shape == shape
        assert actual["dx"].shape == shape
        for key, value in actual.items():
            assert np.isfinite(value).all(), key
            if 0 in shape and key not in ("y", "dx"):
                assert not value.any(), key
    assert norm.eval()(torch.zeros(shape)).shape == shape
