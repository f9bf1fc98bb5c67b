"""Padding: it is normalized like the rest, but its values, its amount and its place change nothing else."""

import numpy as np
import pytest
import torch

from pn_fairseq.norms import NORMS, build_norm

from .helpers import (
    ALL_NORMS,
    CHANNELS,
    STATEFUL,
    assert_close,
    assert_state_unchanged,
    random_batch,
    randomize_affine,
    real_tokens,
    rng,
    state_of,
    to_mask,
    train_step,
)

NORMS_AND_GROUPS = [(name, groups) for name in NORMS for groups in (0, 4)]


def test_every_registered_norm_is_covered_here():
    assert set(NORMS) == set(ALL_NORMS)


def make(name, groups=0, **options):
    return randomize_affine(build_norm(name, CHANNELS, layer_scale_groups=groups, **options)).train()


def more_padding(x, mask, dy, fill):
    """Three more padding rows at the end, one in front, and a whole sentence of padding; the gradient there is 0."""
    time, batch, channels = x.shape
    generator = rng(99)
    wide_x = generator.normal(size=(time + 4, batch + 1, channels)) * 50 if fill is None else None
    if wide_x is None:
        wide_x = np.full((time + 4, batch + 1, channels), fill)
    wide_mask = np.ones((batch + 1, time + 4), dtype=bool)
    wide_dy = np.zeros_like(wide_x)
    inner = (slice(1, time + 1), slice(0, batch))
    wide_x[inner] = np.where(mask.T[..., None], wide_x[inner], x)
    wide_dy[inner] = np.where(mask.T[..., None], 0, dy)
    wide_mask[:batch, 1 : time + 1] = mask
    return wide_x, wide_mask, wide_dy


def tokens(values, shape, mask):
    """Real tokens, sentence by sentence: the order does not depend on the padding."""
    return np.swapaxes(values, 0, 1)[np.swapaxes(real_tokens(shape, mask), 0, 1)]


@pytest.mark.parametrize(("name", "groups"), NORMS_AND_GROUPS)
@pytest.mark.parametrize("warmup", [0, 2])
def test_more_padding_with_other_values_changes_nothing(name, groups, warmup):
    plain = make(name, groups, psi_warmup_updates=warmup)
    padded = make(name, groups, psi_warmup_updates=warmup)
    generator = rng(1)
    for step in range(4):
        x, mask, dy = random_batch(generator)
        dy[mask.T] = 0
        wide = more_padding(x, mask, dy, fill=None)
        expected, actual = train_step(plain, x, mask, dy), train_step(padded, *wide)
        for key in ("y", "dx"):
            real = tokens(expected[key], x.shape, mask)
            assert_close(tokens(actual[key], wide[0].shape, wide[1]), real, 1e-5, f"step {step}: {key}")
        for key in ("dweight", "dbias"):
            assert_close(actual[key], expected[key], 1e-5, f"step {step}: {key}")
        for key, value in state_of(plain).items():
            assert_close(state_of(padded)[key], value, 1e-6, f"step {step}: {key}")


@pytest.mark.parametrize(("name", "groups"), NORMS_AND_GROUPS)
@pytest.mark.parametrize("fill", [np.inf, -np.inf, np.nan, 1e30])
@pytest.mark.parametrize("warmup", [0, 2])
def test_padding_that_is_not_finite_reaches_no_statistic_and_no_real_token(name, groups, fill, warmup):
    """1e30 is finite, and its square is not, in float32."""
    plain = make(name, groups, psi_warmup_updates=warmup)
    padded = make(name, groups, psi_warmup_updates=warmup)
    generator = rng(2)
    for step in range(4):
        x, mask, dy = random_batch(generator)
        dy[mask.T] = 0
        wide = more_padding(x, mask, dy, fill)
        expected, actual = train_step(plain, x, mask, dy), train_step(padded, *wide)
        for key in ("y", "dx"):
            real = tokens(expected[key], x.shape, mask)
            assert_close(tokens(actual[key], wide[0].shape, wide[1]), real, 1e-5, f"step {step}: {key}")
        for key, value in state_of(plain).items():
            assert_close(state_of(padded)[key], value, 1e-6, f"step {step}: {key}")


@pytest.mark.parametrize(("name", "groups"), NORMS_AND_GROUPS)
def test_gradient_that_arrives_at_padding_stays_there(name, groups):
    quiet, noisy = make(name, groups), make(name, groups)
    generator = rng(3)
    for step in range(3):
        x, mask, dy = random_batch(generator)
        silent = np.where(mask.T[..., None], 0, dy)
        expected, actual = train_step(quiet, x, mask, silent), train_step(noisy, x, mask, 100 * dy - 99 * silent)
        real = real_tokens(x.shape, mask)
        assert_close(actual["dx"][real], expected["dx"][real], 1e-6, f"step {step}")
        for key, value in state_of(quiet).items():
            assert_close(state_of(noisy)[key], value, 1e-6, f"step {step}: {key}")


@pytest.mark.parametrize(("name", "groups"), NORMS_AND_GROUPS)
def test_statistics_send_no_gradient_to_padding(name, groups):
    """With no gradient arriving at padding, none leaves it, though real tokens get theirs through the statistics."""
    norm = make(name, groups)
    generator = rng(4)
    for _ in range(3):
        x, mask, dy = random_batch(generator)
        dy[mask.T] = 0
        actual = train_step(norm, x, mask, dy)
        assert not actual["dx"][~real_tokens(x.shape, mask)].any()
        assert actual["dx"][real_tokens(x.shape, mask)].all()


@pytest.mark.parametrize("name", STATEFUL)
def test_padding_is_normalized_like_the_real_tokens(name):
    """A padding position that holds what a real token holds comes out as that token does."""
    norm = make(name, 4)
    generator = rng(5)
    for _ in range(3):
        x, mask, dy = random_batch(generator)
        mask[1, 2], mask[0, 0] = True, False
        x[2, 1] = x[0, 0]
        y = train_step(norm, x, mask, dy)["y"]
        assert_close(y[2, 1], y[0, 0], 1e-6)


@pytest.mark.parametrize(("name", "groups"), NORMS_AND_GROUPS)
@pytest.mark.parametrize("shape", [(5, 3, CHANNELS), (7, CHANNELS)])
def test_mask_without_padding_equals_no_mask(name, groups, shape):
    without, with_mask = make(name, groups), make(name, groups)
    generator = rng(6)
    for _ in range(3):
        x, _, dy = random_batch(generator, shape, masked=False)
        empty = np.zeros(shape[-2::-1], dtype=bool)
        expected, actual = train_step(without, x, None, dy), train_step(with_mask, x, empty, dy)
        for key, value in expected.items():
            assert_close(actual[key], value, 1e-6, key)
        for key, value in state_of(without).items():
            assert_close(state_of(with_mask)[key], value, 1e-6, key)


@pytest.mark.parametrize("name", STATEFUL)
def test_mask_is_read_as_batch_by_time(name):
    """One sentence of padding in a square batch: transposing the mask would count other tokens."""
    norm, reference = make(name), make(name)
    x, _, dy = random_batch(rng(7), (4, 4, CHANNELS), masked=False)
    mask = np.zeros((4, 4), dtype=bool)
    mask[1] = True
    train_step(norm, x, mask, dy)
    kept = [0, 2, 3]
    train_step(reference, x[:, kept], None, dy[:, kept])
    for key, value in state_of(reference).items():
        assert_close(state_of(norm)[key], value, 1e-6, key)


@pytest.mark.parametrize("name", NORMS)
def test_mask_is_left_as_it_was(name):
    x, mask, dy = random_batch(rng(8))
    tensor, kept = to_mask(mask), to_mask(mask)
    make(name)(torch.tensor(x, dtype=torch.float32, requires_grad=True), tensor).sum().backward()
    assert torch.equal(tensor, kept)


@pytest.mark.parametrize("name", NORMS)
def test_input_and_gradient_are_left_as_they_were(name):
    x, mask, dy = (torch.tensor(a) for a in random_batch(rng(9)))
    leaf, grad = x.clone().requires_grad_(), dy.clone()
    make(name, 4).double()(leaf, mask).backward(grad)
    assert torch.equal(leaf.detach(), x) and torch.equal(grad, dy)


@pytest.mark.parametrize("name", NORMS)
@pytest.mark.parametrize("groups", [0, 4])
@pytest.mark.parametrize("warmup", [0, 9])
def test_batch_of_padding_alone_changes_no_state(name, groups, warmup):
    norm = make(name, groups, psi_warmup_updates=warmup)
    generator = rng(10)
    for _ in range(2):
        train_step(norm, *random_batch(generator))
    before = state_of(norm)
    x, mask, dy = random_batch(generator)
    mask[:] = True
    actual = train_step(norm, x, mask, dy)
    assert_state_unchanged(norm, before)
    for key, value in actual.items():
        assert np.isfinite(value).all(), key


@pytest.mark.parametrize("name", NORMS)
@pytest.mark.parametrize("groups", [0, 4])
@pytest.mark.parametrize("warmup", [0, 9])
@pytest.mark.parametrize("shape", [(0, 3, CHANNELS), (5, 0, CHANNELS), (0, CHANNELS)])
@pytest.mark.parametrize("masked", [False, True], ids=["no-mask", "mask"])
def test_batch_without_any_token_changes_no_state(name, groups, warmup, shape, masked):
    norm = make(name, groups, psi_warmup_updates=warmup)
    train_step(norm, *random_batch(rng(11)))
    before = state_of(norm)
    mask = np.zeros(shape[-2::-1], dtype=bool) if masked else None
    actual = train_step(norm, np.zeros(shape), mask, np.zeros(shape))
    assert_state_unchanged(norm, before)
    assert actual["y"].shape == shape and actual["dx"].shape == shape
    assert not actual["dweight"].any() and not actual["dbias"].any()
    assert norm.eval()(torch.zeros(shape)).shape == shape


@pytest.mark.parametrize("name", STATEFUL)
def test_training_goes_on_after_a_batch_of_padding(name):
    """Without a backward pass of its own, too."""
    norm, reference = make(name, psi_warmup_updates=3), make(name, psi_warmup_updates=3)
    generator = rng(12)
    for step in range(5):
        x, mask, dy = random_batch(generator)
        y = norm(torch.tensor(x, dtype=torch.float32), torch.ones(mask.shape, dtype=torch.bool))
        if step % 2:
            y.sum().backward()
        actual, expected = train_step(norm, x, mask, dy), train_step(reference, x, mask, dy)
        for key, value in expected.items():
            np.testing.assert_array_equal(actual[key], value, key)
        assert_state_unchanged(norm, state_of(reference))
