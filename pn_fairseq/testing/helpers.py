"""What tests of norms share: the norms to test, odd-shaped batches, one training step,
recomputation, comparisons.
"""

import functools
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch.utils.checkpoint import checkpoint

from pn_fairseq.norms import NORMS, VARIANTS, ChannelNorm, RunningNorm, build_norm

# divisible by 4 heads, and neither a power of two nor equal to any time or batch size used here
CHANNELS = 12
COUNT = "num_batches_tracked"

#: Schedules short enough for the few steps of a test.
SCHEDULES = {"renorm_updates": 4, "fade_updates": 3}


@dataclass(frozen=True)
class Case:
    """A registered norm in one of its variants."""

    name: str
    variant: str

    @property
    def cls(self) -> type[ChannelNorm]:
        return NORMS[self.name].variant(self.variant)

    def build(self, groups: int = 0, **options) -> ChannelNorm:
        """The norm in training mode, with random weights.

        Options that the norm does not accept are ignored.
        """
        options = {"layer_scale_groups": groups, **SCHEDULES, **options}
        norm = build_norm(self.name, CHANNELS, self.variant, **options)
        return randomize_affine(norm).train()

    def trained(self, groups: int = 0, steps: int = 3, **options) -> ChannelNorm:
        """The norm after ``steps`` training steps, which move its state from the initial values."""
        norm = self.build(groups, **options)
        generator = rng(1)
        for _ in range(steps):
            train_step(norm, *random_batch(generator))
        return norm

    def __str__(self) -> str:
        if self.variant == VARIANTS[0]:
            return self.name
        return f"{self.name}-{self.variant}"


def cases(names=None) -> list[Case]:
    """The norms with these names (None: all) in all their variants."""
    found = []
    for name in NORMS if names is None else names:
        for variant in (VARIANTS[0], *NORMS[name].variants):
            found.append(Case(name, variant))
    return found


def running_cases(names=None) -> list[Case]:
    """The :func:`cases` with running statistics."""
    return [case for case in cases(names) if issubclass(case.cls, RunningNorm)]


def first_of_each_kind() -> dict[str, str]:
    """What training normalizes by (:attr:`.ChannelNorm.normalizes_by`) -> the first such norm,
    which represents the others in tests that do not run with every norm.
    """
    found = {}
    for name, entry in NORMS.items():
        found.setdefault(entry.cls.normalizes_by, name)
    return found


def of_kinds(*kinds: str) -> list[str]:
    """The norms that represent these kinds."""
    first = first_of_each_kind()
    return [first[kind] for kind in kinds]


#: Kinds that torch.compile sees as different: without statistics, with state, with windows.
COMPILED_KINDS = ("element", "running", "window, geometric")


def long(test):
    """Mark a long test: it counts as slow with norms that do not represent their kind, or, if it
    compiles, one of COMPILED_KINDS.
    """
    test.long = True
    return test


def pytest_generate_tests(metafunc):
    """A hook of pytest. ``case``: every norm. ``running``: norms with running statistics.
    ``masking``: norms that leave padding out, which variants that reproduce released code need not
    do.
    """
    if getattr(metafunc.function, "long", False):
        slow = pytest.mark.slow
    else:
        slow = ()
    if "compiler" in metafunc.fixturenames:
        quick = of_kinds(*COMPILED_KINDS)
    else:
        # the released PN has its own passes
        quick = [*first_of_each_kind().values(), "power-release"]
    names = metafunc.config.getoption("norm_names", None)
    fixtures = {
        "case": cases(names),
        "running": running_cases(names),
        "masking": [case for case in cases(names) if case.variant == VARIANTS[0]],
    }
    for fixture, values in fixtures.items():
        if fixture in metafunc.fixturenames:
            params = []
            for case in values:
                marks = () if str(case) in quick else slow
                params.append(pytest.param(case, marks=marks))
            metafunc.parametrize(fixture, params, ids=str)


def some_steps(norm, number=3, seed=8, **options):
    """The results of ``number`` training steps: y, gradients and, at the end, the state."""
    generator = rng(seed)
    results = []
    for _ in range(number):
        norm.train()
        step = train_step(norm, *random_batch(generator, **options))
        results += map(torch.tensor, step.values())
    results += state_of(norm).values()
    return results


def gradients_of(module):
    """The gradients of the parameters that have one; if any parameter is trained, some must."""
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    gradients = [parameter.grad for parameter in trained if parameter.grad is not None]
    assert gradients or not trained
    return gradients


def poison(values, mask, bad):
    """Put ``bad`` into one channel of one real token."""
    values = values.copy()
    real = real_tokens(values.shape, mask)
    first = tuple(np.argwhere(real)[0])
    values[(*first, 5)] = bad
    return values


CHECKPOINTING = ("reentrant", "non-reentrant", "fairseq")


def hooked(block):
    """``block`` with its own hooks for saved tensors, one of which has no name."""

    nameless = functools.partial(torch.clone)

    def call(*args):
        with torch.autograd.graph.saved_tensors_hooks(nameless, lambda tensor: tensor):
            return block(*args)

    return call


def checkpointed(block, how):
    """``block`` as a function that recomputes its forward in the backward pass."""
    if how == "fairseq":
        module = pytest.importorskip("fairseq.modules.checkpoint_activations")
        return module.checkpoint_wrapper(block)
    # the exponential of the inner part makes the outer recomputation go beyond that part
    if how in ("nested", "with hooks"):
        if how == "nested":
            inner = checkpointed(block, "non-reentrant")
        else:
            inner = hooked(block)
        return checkpointed(lambda *args: inner(*args).exp().log(), "non-reentrant")
    return functools.partial(checkpoint, block, use_reentrant=how == "reentrant")


def rng(seed=0):
    """A generator seeded with ``seed``; a generator is returned unchanged."""
    return np.random.default_rng(seed)


def random_mask(generator, time, batch, p=0.3):
    """(B, T) bool with padding anywhere, not only at the end, and at least two real tokens."""
    mask = generator.random((batch, time)) < p
    mask.flat[0] = False
    mask.flat[-1] = False
    return mask


def random_batch(seed, shape=(5, 3, CHANNELS), masked=True, scale=1.0):
    """x and dy, in which every channel has its own level and spread, and a mask: (x, mask or None,
    dy), NumPy float64. ``seed`` may be a generator, which then continues.
    """
    generator = rng(seed)
    channels = shape[-1]
    x = generator.normal(size=shape)
    x *= generator.uniform(0.3, 2.0, channels)
    x += generator.normal(size=channels)
    dy = generator.normal(size=shape)
    mask = None
    if masked and len(shape) == 3:
        mask = random_mask(generator, shape[0], shape[1])
    elif masked:
        mask = random_mask(generator, shape[0], 1)[0]
    return x * scale, mask, dy


def real_tokens(shape, mask):
    """A Boolean selector of the real tokens of an x with this shape."""
    if mask is None:
        return np.ones(shape[:-1], dtype=bool)
    return ~np.asarray(mask).T


def to_tensor(values, dtype=torch.float32, requires_grad=False):
    tensor = torch.tensor(np.asarray(values))
    return tensor.to(dtype).requires_grad_(requires_grad)


def to_mask(mask):
    if mask is None:
        return None
    return torch.tensor(np.asarray(mask))


def tensors(seed, shape=(5, 3, CHANNELS), masked=True):
    """:func:`random_batch` as tensors."""
    x, mask, dy = random_batch(seed, shape, masked)
    return to_tensor(x), to_mask(mask), to_tensor(dy)


def forwards(function, batches, dtype=torch.float32):
    """``function`` of each batch (x, mask, dy): leaves of the inputs, and the outputs."""
    leaves = []
    outputs = []
    for x, mask, _ in batches:
        leaf = x.to(dtype, copy=True).requires_grad_()
        leaves.append(leaf)
        outputs.append(function(leaf, mask))
    return leaves, outputs


def randomize_affine(norm, seed=1):
    """Set weights of both signs away from 1, and biases away from 0, so that omitting one or
    applying it twice shows.

    Other parameters of the norm get positive values.
    """
    generator = rng(seed)
    with torch.no_grad():
        for name, parameter in norm.named_parameters():
            size = tuple(parameter.shape)
            if name == "weight":
                values = generator.uniform(-2, 2, size)
            elif name == "bias":
                values = generator.normal(size=size)
            else:
                values = generator.uniform(0.3, 1.5, size)
            parameter.copy_(torch.tensor(values))
    return norm


def train_step(norm, x, mask, dy, dtype=torch.float32):
    """Run one training forward and backward; return y, dx and the parameters' gradients as float64
    NumPy arrays.
    """
    norm.zero_grad(set_to_none=True)
    x = to_tensor(x, dtype, requires_grad=True)
    if mask is None:
        y = norm(x)
    else:
        y = norm(x, to_mask(mask))
    y.backward(to_tensor(dy, y.dtype))
    out = {"y": y.detach(), "dx": x.grad}
    for name, parameter in norm.named_parameters():
        out[f"d{name}"] = parameter.grad
    return {key: value.double().numpy() for key, value in out.items()}


def state_of(norm):
    """An independent copy of every buffer."""
    return {name: buffer.detach().clone() for name, buffer in norm.named_buffers()}


def assert_state_unchanged(norm, before):
    """Assert that every buffer is bitwise unchanged."""
    after = state_of(norm)
    assert after.keys() == before.keys()
    for name in before:
        assert torch.equal(after[name], before[name]), (
            f"{name}: {before[name]} became {after[name]}"
        )


def assert_states_equal(norm, expected):
    assert_state_unchanged(norm, state_of(expected))


def assert_states_close(norm, expected, rtol=1e-6, what=""):
    """:func:`assert_close` for every buffer."""
    actual = state_of(norm)
    for name, value in state_of(expected).items():
        assert_close(actual[name], value, rtol, f"{what} {name}")


def assert_same(actual, expected, what=""):
    """Assert that two sequences of tensors are bitwise equal."""
    for one, two in zip(actual, expected, strict=True):
        assert torch.equal(one, two), f"{what}: differs by {(one - two).abs().max()}"


def assert_close(actual, expected, rtol=2e-5, what="", terms=0.0):
    """Compare relative to the largest expected value or, if that is larger, to ``terms``, the size
    of the terms of a sum, which may cancel.
    """
    actual = as_float64(actual)
    expected = as_float64(expected)
    if expected.size:
        scale = max(np.abs(expected).max(), terms)
    else:
        scale = 0.0
    np.testing.assert_allclose(actual, expected, rtol=rtol, atol=rtol * scale, err_msg=what)


def as_float64(values):
    if isinstance(values, torch.Tensor):
        values = values.detach().double()
    return np.asarray(values, dtype=np.float64)


def unrounded(rounded, exact, dtype):
    """The value nearest to ``exact`` among those that round to ``rounded`` in ``dtype``; float64,
    NumPy.
    """
    info = torch.finfo(dtype)
    size = np.maximum(np.abs(rounded), info.tiny)
    half_unit = info.eps / 2 * size
    return np.clip(exact, rounded - half_unit, rounded + half_unit)
