"""Activation checkpointing: the forward runs twice, with the outputs, gradients and state of one that runs once."""

import copy
import functools

import numpy as np
import pytest
import torch
from torch.utils.checkpoint import checkpoint

from pn_fairseq.norms import NORMS, build_norm

from .helpers import (
    CHANNELS,
    STATEFUL,
    assert_states_equal,
    random_batch,
    randomize_affine,
    rng,
    state_of,
    to_mask,
)

VARIANTS = ("reentrant", "non-reentrant", "fairseq")


def checkpointed(block, variant):
    """``block`` as a function of (x, mask) that recomputes its forward in the backward pass."""
    if variant == "fairseq":
        module = pytest.importorskip("fairseq.modules.checkpoint_activations")
        return module.checkpoint_wrapper(block)
    return functools.partial(checkpoint, block, use_reentrant=variant == "reentrant")


class Block(torch.nn.Module):
    def __init__(self, name, groups=0, **options):
        super().__init__()
        torch.manual_seed(5)
        self.fc = torch.nn.Linear(CHANNELS, CHANNELS)
        self.norm = randomize_affine(build_norm(name, CHANNELS, layer_scale_groups=groups, **options))
        self.out = torch.nn.Linear(CHANNELS, CHANNELS)

    def forward(self, x, mask=None):
        return x + self.out(torch.tanh(self.norm(self.fc(x), mask)))


def twins(name, groups=0, **options):
    plain = Block(name, groups, **options).train()
    return plain, copy.deepcopy(plain)


def batch(generator):
    x, mask, dy = random_batch(generator)
    return torch.tensor(x, dtype=torch.float32), to_mask(mask), torch.tensor(dy, dtype=torch.float32)


def run_step(block, uses, x, mask, dy):
    """Forward through each function of ``uses`` in turn, backward, SGD; everything the step produced."""
    block.zero_grad()
    leaf = x.clone().requires_grad_()
    hidden = leaf
    for use in uses:
        hidden = use(hidden, mask)
    hidden.backward(dy)
    results = [hidden.detach().clone(), leaf.grad.clone()] + [p.grad.clone() for p in block.parameters()]
    with torch.no_grad():
        for parameter in block.parameters():
            parameter -= 0.01 * parameter.grad
    return results


def assert_same(actual, expected, step):
    for a, e in zip(actual, expected, strict=True):
        assert torch.equal(a, e), f"step {step}: differs by {(a - e).abs().max()}"


@pytest.mark.parametrize("name", NORMS)
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("groups", [0, 4])
@pytest.mark.parametrize("warmup", [0, 2])
@pytest.mark.parametrize("update_freq", [None, 2])
def test_same_as_without_checkpointing(name, variant, groups, warmup, update_freq):
    """Over the end of the warm-up, where the recomputed forward would take the other branch by its own count."""
    plain, other = twins(name, groups, psi_warmup_updates=warmup)
    use = checkpointed(other, variant)
    generator = rng(1)
    for step in range(6):
        if update_freq is not None:
            plain.norm.set_num_updates(step // update_freq)
            other.norm.set_num_updates(step // update_freq)
        x, mask, dy = batch(generator)
        expected = run_step(plain, [plain], x, mask, dy)
        assert_same(run_step(other, [use], x, mask, dy), expected, step)
        assert_states_equal(other.norm, plain.norm)
        if name in STATEFUL:
            assert int(other.norm.num_batches_tracked) == step + 1


@pytest.mark.parametrize("name", STATEFUL)
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("warmup", [0, 3])
@pytest.mark.parametrize("repeats", [2, 3])
def test_module_used_several_times_each_use_checkpointed(name, variant, warmup, repeats):
    plain, other = twins(name, psi_warmup_updates=warmup)
    use = checkpointed(other, variant)
    generator = rng(2)
    for step in range(5):
        x, mask, dy = batch(generator)
        expected = run_step(plain, [plain] * repeats, x, mask, dy)
        assert_same(run_step(other, [use] * repeats, x, mask, dy), expected, step)
        assert_states_equal(other.norm, plain.norm)


@pytest.mark.parametrize("name", STATEFUL)
@pytest.mark.parametrize("variant", VARIANTS)
def test_module_used_very_often_each_use_checkpointed(name, variant):
    """One layer for all depths, as in a Universal Transformer, with more uses than a short memory would hold."""
    plain, other = twins(name)
    x, mask, dy = batch(rng(11))
    expected = run_step(plain, [plain] * 24, x, mask, dy)
    assert_same(run_step(other, [checkpointed(other, variant)] * 24, x, mask, dy), expected, 0)
    assert_states_equal(other.norm, plain.norm)


@pytest.mark.parametrize("name", STATEFUL)
@pytest.mark.parametrize("variant", ["reentrant", "non-reentrant"])
def test_two_uses_within_one_checkpoint(name, variant):
    plain, other = twins(name, psi_warmup_updates=3)

    def both(x, mask):
        return other(other(x, mask), mask)

    generator = rng(3)
    for step in range(5):
        x, mask, dy = batch(generator)
        expected = run_step(plain, [plain, plain], x, mask, dy)
        assert_same(run_step(other, [checkpointed(both, variant)], x, mask, dy), expected, step)
        assert_states_equal(other.norm, plain.norm)


@pytest.mark.parametrize("name", STATEFUL)
@pytest.mark.parametrize("variant", ["reentrant", "non-reentrant"])
@pytest.mark.parametrize("which", [0, 1])
def test_only_one_of_two_uses_checkpointed(name, variant, which):
    plain, other = twins(name, psi_warmup_updates=3)
    uses = [other, other]
    uses[which] = checkpointed(other, variant)
    generator = rng(4)
    for step in range(5):
        x, mask, dy = batch(generator)
        expected = run_step(plain, [plain, plain], x, mask, dy)
        assert_same(run_step(other, uses, x, mask, dy), expected, step)
        assert_states_equal(other.norm, plain.norm)


@pytest.mark.parametrize("name", STATEFUL)
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("order", [(0, 1), (1, 0)], ids=["first-first", "last-first"])
def test_two_forwards_before_two_backwards(name, variant, order):
    plain, other = twins(name, psi_warmup_updates=2)
    generator = rng(5)
    steps = [[batch(generator) for _ in range(2)] for _ in range(4)]

    def run(block, use):
        for step in steps:
            block.zero_grad()
            leaves = [x.clone().requires_grad_() for x, _, _ in step]
            outputs = [use(leaf, mask) for leaf, (_, mask, _) in zip(leaves, step, strict=True)]
            for index in order:
                outputs[index].backward(step[index][2])
            yield [leaf.grad for leaf in leaves] + [p.grad.clone() for p in block.parameters()]

    runs = zip(run(other, checkpointed(other, variant)), run(plain, plain), strict=True)
    for step, (actual, expected) in enumerate(runs):
        assert_same(actual, expected, step)
        assert_states_equal(other.norm, plain.norm)


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize("name", STATEFUL)
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("told", [False, True], ids=["untold", "told-updates"])
def test_forwards_that_are_thrown_away_in_between(name, variant, told):
    """A loss that is dropped, statistics gathered without gradients, an evaluation: none disturbs the next step."""
    plain, other = twins(name, psi_warmup_updates=3)
    use = checkpointed(other, variant)
    generator = rng(6)
    for step in range(5):
        if told:
            plain.norm.set_num_updates(step)
            other.norm.set_num_updates(step)
        x, mask, dy = batch(generator)
        plain(x.clone().requires_grad_(), mask)
        use(x.clone().requires_grad_(), mask)
        x, mask, dy = batch(generator)
        with torch.no_grad():
            plain(x, mask)
            use(x, mask)
        plain.eval()
        other.eval()
        with torch.no_grad():
            assert torch.equal(plain(x, mask), use(x, mask))
        plain.train()
        other.train()
        x, mask, dy = batch(generator)
        expected = run_step(plain, [plain], x, mask, dy)
        assert_same(run_step(other, [use], x, mask, dy), expected, step)
        assert_states_equal(other.norm, plain.norm)


@pytest.mark.parametrize("name", STATEFUL)
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("where", ["x", "dy", "padding-only"])
def test_faulty_steps_leave_no_trace(name, variant, where):
    plain, other = twins(name, psi_warmup_updates=2)
    use = checkpointed(other, variant)
    generator = rng(7)
    for step in range(6):
        x, mask, dy = batch(generator)
        before = state_of(other.norm)
        bad_x, bad_dy, bad_mask = x.clone(), dy.clone(), mask.clone()
        first = np.argwhere(~mask.T.numpy())[0]
        if where == "x":
            bad_x[first[0], first[1], 3] = torch.nan
        elif where == "dy":
            bad_dy[first[0], first[1], 3] = torch.inf
        else:
            bad_mask[:] = True
        leaf = bad_x.requires_grad_()
        use(leaf, bad_mask).backward(bad_dy)
        for key, value in before.items():
            assert torch.equal(state_of(other.norm)[key], value), key
        expected = run_step(plain, [plain], x, mask, dy)
        assert_same(run_step(other, [use], x, mask, dy), expected, step)
        assert_states_equal(other.norm, plain.norm)


@pytest.mark.parametrize("name", STATEFUL)
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("where", ["x", "dy"])
@pytest.mark.parametrize("faulty", [0, 1])
@pytest.mark.parametrize("order", [(0, 1), (1, 0)], ids=["first-first", "last-first"])
def test_fault_in_one_of_two_forwards_is_taken_back_alone(name, variant, where, faulty, order):
    """The recomputed forward finds its own first run, also where a NaN compares equal to nothing."""
    plain, other = twins(name)
    use = checkpointed(other, variant)
    generator = rng(10)
    batches = [batch(generator) for _ in range(2)]
    x, mask, dy = batches[faulty]
    first = tuple(np.argwhere(~mask.T.numpy())[0])
    (x if where == "x" else dy)[(*first, 3)] = torch.nan
    gradients = []
    for block, function in ((plain, plain), (other, use)):
        leaves = [x.clone().requires_grad_() for x, _, _ in batches]
        outputs = [function(leaf, mask) for leaf, (_, mask, _) in zip(leaves, batches, strict=True)]
        for index in order:
            outputs[index].backward(batches[index][2])
        gradients.append(leaves[1 - faulty].grad)
        assert int(block.norm.num_batches_tracked) == 1
    assert torch.equal(*gradients)
    assert_states_equal(other.norm, plain.norm)


@pytest.mark.parametrize("name", STATEFUL)
@pytest.mark.parametrize("variant", VARIANTS)
def test_two_norms_in_one_checkpoint(name, variant):
    class Pair(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.two = Block(name, psi_warmup_updates=2), Block(name, 4)

        def forward(self, x, mask):
            return self.two(self.one(x, mask), mask)

    plain = Pair().train()
    other = copy.deepcopy(plain)
    use = checkpointed(other, variant)
    generator = rng(8)
    for step in range(5):
        x, mask, dy = batch(generator)
        expected = run_step(plain, [plain], x, mask, dy)
        assert_same(run_step(other, [use], x, mask, dy), expected, step)
        assert_states_equal(other, plain)


@pytest.mark.parametrize("name", STATEFUL)
@pytest.mark.parametrize("variant", VARIANTS)
def test_half_precision(name, variant):
    plain, other = twins(name, 4, psi_warmup_updates=2)
    plain.bfloat16()
    other.bfloat16()
    use = checkpointed(other, variant)
    generator = rng(9)
    for step in range(4):
        x, mask, dy = batch(generator)
        x, dy = x.bfloat16(), dy.bfloat16()
        expected = run_step(plain, [plain], x, mask, dy)
        assert_same(run_step(other, [use], x, mask, dy), expected, step)
        assert_states_equal(other.norm, plain.norm)
