"""What tests of norms share: odd-shaped batches, one training step, comparisons."""

import numpy as np
import torch

from pn_fairseq.norms import running_norms

CHANNELS = 12  # divisible by 4 heads, and neither a power of two nor equal to any time or batch size used here


def rng(seed=0):
    return np.random.default_rng(seed)


def random_mask(generator, time, batch, p=0.3):
    """(B, T) bool with padding anywhere, not only at the end, and at least two real tokens."""
    mask = generator.random((batch, time)) < p
    mask.flat[0] = False
    mask.flat[-1] = False
    return mask


def random_batch(generator, shape=(5, 3, CHANNELS), masked=True, scale=1.0):
    """x and dy with every channel at its own level and spread, and a mask: (x, mask or None, dy), NumPy float64."""
    channels = shape[-1]
    x = generator.normal(size=shape) * generator.uniform(0.3, 2.0, channels) + generator.normal(size=channels)
    dy = generator.normal(size=shape)
    mask = None
    if masked:
        mask = random_mask(generator, shape[0], shape[1]) if len(shape) == 3 else random_mask(generator, shape[0], 1)[0]
    return x * scale, mask, dy


def real_tokens(shape, mask):
    """Boolean selector of the real tokens of x, for x of this shape."""
    if mask is None:
        return np.ones(shape[:-1], dtype=bool)
    return ~np.asarray(mask).T if len(shape) == 3 else ~np.asarray(mask)


def to_tensor(values, dtype=torch.float32, requires_grad=False):
    return torch.tensor(np.asarray(values)).to(dtype).requires_grad_(requires_grad)


def to_mask(mask):
    return None if mask is None else torch.tensor(np.asarray(mask))


def tensors(generator, shape=(5, 3, CHANNELS), masked=True):
    """:func:`random_batch` as tensors."""
    x, mask, dy = random_batch(generator, shape, masked)
    return to_tensor(x), to_mask(mask), to_tensor(dy)


def randomize_affine(norm, seed=1):
    """Weights of both signs away from 1, biases away from 0: one that is left out or applied twice shows.

    Other parameters of the norm get positive values.
    """
    generator = rng(seed)
    draw = {"weight": lambda size: generator.uniform(-2, 2, size), "bias": lambda size: generator.normal(size=size)}
    with torch.no_grad():
        for name, parameter in norm.named_parameters():
            values = draw.get(name, lambda size: generator.uniform(0.3, 1.5, size))(tuple(parameter.shape))
            parameter.copy_(torch.tensor(values))
    return norm


def train_step(norm, x, mask=None, dy=None, dtype=torch.float32):
    """One training forward and backward; y, dx and the parameters' gradients as float64 NumPy arrays."""
    norm.zero_grad(set_to_none=True)
    x = to_tensor(x, dtype, requires_grad=True)
    y = norm(x) if mask is None else norm(x, to_mask(mask))
    y.backward(to_tensor(dy, y.dtype))
    out = {"y": y.detach(), "dx": x.grad}
    out |= {f"d{name}": parameter.grad for name, parameter in norm.named_parameters()}
    return {key: value.double().numpy() for key, value in out.items()}


def flushed(norm):
    """``norm``, with the steps taken in whose backward has run: before a buffer is read."""
    for each in running_norms(norm):
        each.flush()
    return norm


def state_of(norm):
    """An independent copy of every buffer, with the steps taken in whose backward has run."""
    return {name: buffer.detach().clone() for name, buffer in flushed(norm).named_buffers()}


def assert_state_unchanged(norm, before):
    """Every buffer is what it was, to the bit."""
    after = state_of(norm)
    assert after.keys() == before.keys()
    for name in before:
        assert torch.equal(after[name], before[name]), f"{name}: {before[name]} became {after[name]}"


def assert_states_equal(norm, other):
    assert_state_unchanged(norm, state_of(other))


def assert_same(actual, expected, what=""):
    """Two sequences of tensors are equal to the bit."""
    for one, two in zip(actual, expected, strict=True):
        assert torch.equal(one, two), f"{what}: differs by {(one - two).abs().max()}"


def assert_close(actual, expected, rtol=2e-5, what="", terms=0.0):
    """Relative to the largest expected value, or ``terms`` if larger: sums of both signs may cancel."""
    actual = np.asarray(actual.detach().double() if isinstance(actual, torch.Tensor) else actual, dtype=np.float64)
    expected = np.asarray(expected.detach() if isinstance(expected, torch.Tensor) else expected, dtype=np.float64)
    scale = max(np.abs(expected).max(), terms) if expected.size else 0.0
    np.testing.assert_allclose(actual, expected, rtol=rtol, atol=rtol * scale, err_msg=what)


def unrounded(rounded, exact, dtype):
    """Of the values that round to ``rounded`` in ``dtype`` the one nearest to ``exact``; float64, NumPy."""
    info = torch.finfo(dtype)
    half_unit = info.eps / 2 * np.maximum(np.abs(rounded), info.tiny)
    return np.clip(exact, rounded - half_unit, rounded + half_unit)
