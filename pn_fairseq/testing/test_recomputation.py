"""Activation checkpointing changes no bit."""

import copy
import functools

import pytest
import torch
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from pn_fairseq.testing.helpers import (
    CHANNELS,
    CHECKPOINTING,
    COUNT,
    assert_same,
    checkpointed,
    forwards,
    gradients_of,
    long,
    rng,
    some_steps,
    state_of,
    tensors,
)


class Block(torch.nn.Module):
    """A norm between linear maps, and a second norm after them."""

    def __init__(self, case, **options):
        super().__init__()
        torch.manual_seed(5)
        self.fc = torch.nn.Linear(CHANNELS, CHANNELS)
        self.norm = case.build(**options)
        self.out = torch.nn.Linear(CHANNELS, CHANNELS)
        self.last = case.build(4, **options)

    def forward(self, x, mask=None):
        hidden = torch.tanh(self.norm(self.fc(x), mask))
        return x + self.last(self.out(hidden), mask)

    def set_num_updates(self, num_updates):
        self.norm.set_num_updates(num_updates)
        self.last.set_num_updates(num_updates)


def twins(case, **options):
    plain = Block(case, **options).train()
    return plain, copy.deepcopy(plain)


def run_step(block, uses, x, mask, dy):
    """Run forward through each function of ``uses`` in turn, backward and SGD; return everything
    the step produced.
    """
    block.zero_grad()
    leaf = x.clone().requires_grad_()
    hidden = leaf
    for use in uses:
        hidden = use(hidden, mask)
    hidden.backward(dy)
    results = [hidden.detach().clone(), leaf.grad.clone()]
    results += [gradient.clone() for gradient in gradients_of(block)]
    with torch.no_grad():
        for parameter in block.parameters():
            parameter -= 0.01 * parameter.grad
    return results + list(state_of(block).values())


@pytest.mark.parametrize("how", CHECKPOINTING)
@pytest.mark.parametrize("updates", [None, 2], ids=["without updates", "with updates"])
@long
def test_recomputation_changes_no_bit(case, how, updates):
    """Past the end of a warm-up of 2, in the types of mixed precision, with uses in turn and
    dropped forwards.
    """
    plain, twin = twins(case, psi_warmup_updates=2)
    use = checkpointed(twin, how)

    def both(x, mask):
        return twin(twin(x, mask), mask)

    chains = [([use], 1), ([use, use], 2), ([twin, use], 2), ([use, twin], 2)]
    if how == "fairseq":  # its wrapper accepts only modules
        chains.append(([use], 1))
    else:
        chains.append(([checkpointed(both, how)], 2))
    chains.append(([use] * 8, 8))
    generator = rng(1)
    for step, (chain, times) in enumerate(chains):
        if updates is not None:
            plain.set_num_updates(step // updates)
            twin.set_num_updates(step // updates)
        x, mask, dy = tensors(generator)
        expected = run_step(plain, [plain] * times, x, mask, dy)
        assert_same(run_step(twin, chain, x, mask, dy), expected, f"step {step}")
        for function in (plain, use):  # dropped
            function(x.clone().requires_grad_(), mask)


@pytest.mark.parametrize("how", CHECKPOINTING)
@pytest.mark.parametrize(
    ("what", "order"),
    [
        ("two batches", (0, 1)),
        ("two batches", (1, 0)),
        ("one batch twice", (0, 1)),
        ("a fault in the first", (1, 0)),
        ("bfloat16", (0, 1)),
    ],
    ids=str,
)
@long
def test_recomputation_of_two_graphs_changes_no_bit(running, how, what, order):
    plain, twin = twins(running, psi_warmup_updates=2)
    if what == "bfloat16":
        dtype = torch.bfloat16
    else:
        dtype = torch.float32
    plain = plain.to(dtype)
    twin = twin.to(dtype)
    use = checkpointed(twin, how)
    generator = rng(5)
    for step in range(3):
        batches = [tensors(generator) for _ in range(2)]
        if what == "one batch twice":
            batches[1] = batches[0]
        if what == "a fault in the first":
            batches[0][0][:] = torch.nan
        results = []
        for block, function in ((plain, plain), (twin, use)):
            block.zero_grad()
            leaves, outputs = forwards(function, batches, dtype)
            for index in order:
                outputs[index].backward(batches[index][2].to(dtype))
            gradients = [leaf.grad for leaf in leaves] + gradients_of(block)
            gradients = [gradient.nan_to_num(9.0) for gradient in gradients]
            results.append(gradients + list(state_of(block).values()))
        assert_same(*results, f"step {step}")


@pytest.mark.parametrize("how", CHECKPOINTING)
@long
def test_recomputation_of_a_retained_graph_gives_the_same_again(running, how):
    """A reentrant recomputation is a forward like any other, so every backward counts; without it
    only the first one does.
    """
    plain, twin = twins(running)
    use = checkpointed(twin, how)
    batch = tensors(6)
    assert_same(run_step(twin, [use], *batch), run_step(plain, [plain], *batch))
    x, mask, dy = tensors(7)
    gradients = []
    for function in (plain, use):
        leaf = x.clone().requires_grad_()
        y = function(leaf, mask)
        for _ in range(2):
            leaf.grad = None
            y.backward(dy, retain_graph=True)
            gradients.append(leaf.grad)
    assert_same(gradients, gradients[:1] * 4)
    assert state_of(plain)["norm." + COUNT] == 2
    assert state_of(twin)["norm." + COUNT] == 2 + (how != "non-reentrant")


def test_selective_checkpointing_that_saves_all_operators_changes_no_bit(running):
    plain, twin = twins(running, psi_warmup_updates=2)
    save = functools.partial(
        create_selective_checkpoint_contexts, lambda *_, **__: CheckpointPolicy.MUST_SAVE
    )
    use = functools.partial(checkpoint, twin, use_reentrant=False, context_fn=save)
    results = []
    for block, call in ((twin, use), (plain, plain)):
        generator = rng(1)
        for _ in range(4):
            x, mask, dy = tensors(generator)
            call(x.requires_grad_(), mask).backward(dy)
        results.append([x.grad, *gradients_of(block), *state_of(block).values()])
    assert_same(*results)


def test_shared_memory_stays_shared(running):
    norm = running.trained()
    twin = running.trained()
    torch.nn.Sequential(norm).share_memory()
    pointers = [buffer.data_ptr() for buffer in norm.buffers()]
    assert_same(some_steps(norm), some_steps(twin))
    norm.load_state_dict(twin.state_dict())
    norm.reset_running_stats()
    assert [buffer.data_ptr() for buffer in norm.buffers()] == pointers
    assert all(buffer.is_shared() for buffer in norm.buffers())
