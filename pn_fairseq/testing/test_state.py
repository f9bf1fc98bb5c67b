"""When the state changes: at a flush, once for each backward, by what the forward saw."""

import copy
from types import SimpleNamespace

import pytest
import torch

from pn_fairseq.norms import set_loss_scale
from pn_fairseq.testing.helpers import (
    CHANNELS,
    CHECKPOINTING,
    COUNT,
    assert_close,
    assert_same,
    assert_state_unchanged,
    assert_states_equal,
    checkpointed,
    random_batch,
    rng,
    some_steps,
    state_of,
    tensors,
    to_mask,
    to_tensor,
    train_step,
)


def test_a_forward_changes_nothing(running):
    """Neither one whose backward is still to come, nor one without a graph, nor one whose loss is dropped."""
    for updates in (None, 0, 9):
        norm = running.trained(psi_warmup_updates=3)
        if updates is not None:
            norm.set_num_updates(updates)
        before = state_of(norm)
        x, mask, _ = tensors(rng(2))
        kept = norm(x.requires_grad_(), mask)
        assert_state_unchanged(norm, before)
        with torch.no_grad():
            assert torch.equal(norm(x, mask), kept)
        norm(x, mask)
        assert_state_unchanged(norm, before)
        assert_state_unchanged(norm.eval(), before)


FLUSHES = {
    "flush": lambda norm: norm.flush(),
    "next forward": lambda norm: norm(torch.ones(2, 2, CHANNELS)),
    "set_num_updates": lambda norm: norm.set_num_updates(7),
    "eval": lambda norm: norm.eval(),
    "train": lambda norm: norm.train(),
    "state_dict": lambda norm: norm.state_dict(),
    "deepcopy": copy.deepcopy,
    "conversion": lambda norm: norm.float(),
    "diagnostics": lambda norm: norm.diagnostics(),
    "within a model": lambda norm: torch.nn.Sequential(norm).state_dict(),
    "attribute": lambda norm: norm.num_batches_tracked,
    "named_buffers": lambda norm: list(norm.named_buffers()),
    "buffers of a model": lambda norm: list(torch.nn.Sequential(norm).buffers()),  # as AveragedModel reads them
}


@pytest.mark.parametrize("when", FLUSHES)
def test_a_backward_is_taken_in_before_the_state_is_used(running, when):
    """Once, and not by the backward itself."""
    norm = running.trained()
    before, buffers = state_of(norm), dict(norm.named_buffers())
    x, mask, dy = tensors(rng(2))
    norm(x.requires_grad_(), mask).backward(dy)
    assert_same(buffers.values(), before.values(), "a backward pass writes no buffer")
    FLUSHES[when](norm)
    assert int(buffers[COUNT]) == int(before[COUNT]) + 1
    once = state_of(norm)
    norm.flush()
    assert_state_unchanged(norm, once)


def test_flush_waits_inside_a_backward(running):
    """A module that computes within a backward pass, as a recomputation does, sees the state as it was."""
    norm = running.trained()
    before = state_of(norm)
    x, mask, dy = tensors(rng(2))
    norm(x.requires_grad_(), mask).backward(dy)
    seen = []

    def look(gradient):
        norm.flush()
        seen.append({name: value.clone() for name, value in norm.named_buffers()})

    y = torch.ones(1, requires_grad=True) * 2
    y.register_hook(look)
    y.backward()
    for name, value in before.items():
        assert torch.equal(seen[0][name], value), name
    norm.flush()
    assert int(norm.num_batches_tracked) == int(before[COUNT]) + 1


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0)], ids=str)
def test_uses_before_a_backward_see_the_same_state_and_count_once_each(running, order):
    norm = running.trained(psi_warmup_updates=2)
    before = state_of(norm)
    batches = [tensors(rng(seed)) for seed in (3, 4, 5)]
    copies = [copy.deepcopy(norm) for _ in batches]
    leaves = [x.clone().requires_grad_() for x, _, _ in batches]
    outputs = [norm(leaf, mask) for leaf, (_, mask, _) in zip(leaves, batches, strict=True)]
    for index in order:
        outputs[index].backward(batches[index][2])
    for leaf, y, (x, mask, dy), twin in zip(leaves, outputs, batches, copies, strict=True):
        x.requires_grad_()
        expected = twin(x, mask)
        expected.backward(dy)
        assert_same((y, leaf.grad), (expected, x.grad))
    assert state_of(norm)[COUNT] == before[COUNT] + 3


def test_one_use_after_another_in_a_graph_counts_twice(running):
    norm = running.trained()
    before = state_of(norm)
    x, mask, dy = tensors(rng(3))
    hidden = norm(x.requires_grad_(), mask)
    assert torch.equal(copy.deepcopy(norm)(hidden, mask), y := norm(hidden, mask))
    y.backward(dy)
    assert state_of(norm)[COUNT] == before[COUNT] + 2


def test_gradient_accumulation_counts_every_batch_and_adds_gradients(case):
    norm, twin = case.trained(), case.trained()
    generator = rng(4)
    norm.zero_grad()
    total = dict.fromkeys(dict(norm.named_parameters()), 0.0)
    for number in range(3):
        x, mask, dy = random_batch(generator)
        norm(to_tensor(x, requires_grad=True), to_mask(mask)).backward(to_tensor(dy))
        step = train_step(twin, x, mask, dy)
        assert_states_equal(norm, twin)
        for name, parameter in norm.named_parameters():
            total[name] = total[name] + step[f"d{name}"]
            assert_close(parameter.grad, total[name], 1e-5, f"batch {number}: {name}", terms=1.0)


def test_a_second_backward_of_a_retained_graph_gives_the_same_and_counts_nothing(running):
    norm, other = running.trained(), running.trained()
    x, mask, dy = tensors(rng(3))
    x.requires_grad_()
    y, of_other = norm(x, mask), other(x, mask)
    (once,) = torch.autograd.grad(y, x, dy, retain_graph=True)
    after = state_of(norm)
    (twice,) = torch.autograd.grad(y, x, dy)
    assert torch.equal(once, twice)
    assert_state_unchanged(norm, after)
    for gradient in (dy, 3 * dy):  # nothing is flushed between the two
        torch.autograd.grad(of_other, x, gradient, retain_graph=True)
    assert_state_unchanged(other, after)


@pytest.mark.parametrize("loaded_first", [True, False], ids=["before the backward", "after it"])
def test_a_step_belongs_to_the_state_that_a_load_replaces(running, loaded_first):
    """The gradient is that of the forward that was run."""
    norm, plain, saved = running.trained(), running.trained(), running.trained(steps=5)
    x, mask, dy = tensors(rng(3))
    leaf, leaf_of_plain = x.clone().requires_grad_(), x.clone().requires_grad_()
    plain(leaf_of_plain, mask).backward(dy)
    y = norm(leaf, mask)
    if not loaded_first:
        y.backward(dy)
    norm.load_state_dict(state_of(saved), strict=False)
    if loaded_first:
        y.backward(dy)
    assert torch.equal(leaf.grad, leaf_of_plain.grad)
    assert_states_equal(norm, saved)


def test_parameters_that_are_loaded_alone_leave_the_state_and_the_number_of_updates(running):
    norm, twin = running.trained(psi_warmup_updates=9), running.trained(psi_warmup_updates=9)
    for module in (norm, twin):
        module.set_num_updates(1)
        x, mask, dy = tensors(rng(3))
        module(x.requires_grad_(), mask).backward(dy)  # waits for a flush
    norm.load_state_dict(dict(norm.named_parameters()), strict=False)
    assert_same(some_steps(norm), some_steps(twin))


def test_a_frozen_norm_computes_the_same(running):
    norm, frozen = running.trained(steps=1), running.trained(steps=1)
    x, mask, _ = tensors(rng(3))
    assert torch.equal(frozen.requires_grad_(False)(x, mask), norm(x, mask))


@pytest.mark.parametrize("frozen", ["x", "parameters", "weight", "bias"])
def test_frozen_inputs_and_parameters_change_nothing_else(running, frozen):
    norm, twin = running.trained(), running.trained()
    norm.weight.requires_grad_(frozen not in ("parameters", "weight"))
    norm.bias.requires_grad_(frozen not in ("parameters", "bias"))
    x, mask, dy = random_batch(rng(3))
    expected = train_step(twin, x, mask, dy)
    leaf = to_tensor(x, requires_grad=frozen != "x")
    norm.zero_grad()
    norm(leaf, to_mask(mask)).backward(to_tensor(dy))
    for name, tensor in (("dx", leaf), ("dweight", norm.weight), ("dbias", norm.bias)):
        assert (tensor.grad is not None) == tensor.requires_grad
        if tensor.grad is not None:
            assert_close(tensor.grad, expected[name], 1e-6, name)
    assert_states_equal(norm, twin)


@pytest.mark.parametrize("how", [None, *CHECKPOINTING, "nested", "with hooks"])
def test_a_step_that_no_gradient_reaches_counts_once(running, how):
    """It changes what a backward would have changed, but the state that is made of gradients."""
    norm, twin = running.trained(psi_warmup_updates=2), running.trained(psi_warmup_updates=2)
    before = state_of(norm)

    class Scaled(torch.nn.Module):
        """The factor gets a gradient, the norm none."""

        def forward(self, factor, x, mask):
            return factor * twin.requires_grad_(False)(x, mask)

    use = Scaled() if how is None else checkpointed(Scaled(), how)
    for number in range(3):
        x, mask, dy = tensors(rng(number))
        norm(x.clone().requires_grad_(), mask).backward(dy)
        with torch.no_grad():
            twin(x, mask)
        factor = torch.ones((), requires_grad=True)
        use(factor, x, mask).backward(dy)
        for key, value in state_of(norm).items():
            of_gradients = key in norm.gradient_state
            assert torch.equal(state_of(twin)[key], before[key] if of_gradients else value), (number, key)
    assert int(twin.num_batches_tracked) == int(before[COUNT]) + 3


def test_state_made_of_gradients_is_named(running):
    """Twice the gradient doubles it, from an initial value of 0, and changes no other state."""
    norm, twin = running.build(), running.build()
    for number in range(3):
        x, mask, dy = tensors(rng(number))
        norm(x.clone().requires_grad_(), mask).backward(dy)
        twin(x.clone().requires_grad_(), mask).backward(2 * dy)
    for key, value in state_of(norm).items():
        of_gradients = key in norm.gradient_state
        assert torch.equal(state_of(twin)[key], 2 * value if of_gradients else value), key
        assert not of_gradients or value.any()


@pytest.mark.parametrize("how", ["numbers", "tensors", "a scaler"])
def test_a_loss_scale_changes_no_state(running, how):
    """It halves after an overflow, and grows; a resumed training has another one, or none."""
    plain, scaled = running.build(4, psi_warmup_updates=2), running.build(4, psi_warmup_updates=2)
    scales = [1024.0, 1024.0, 512.0, 2.0, 2.0**20, 1.0, 3.0]
    if how == "a scaler":  # which reads the variable of the loop
        set_loss_scale(torch.nn.Sequential(scaled), SimpleNamespace(scale=lambda tensor: tensor * scale))
    generator = rng(1)
    for number, scale in enumerate(scales):
        if how != "a scaler":
            set_loss_scale(torch.nn.Sequential(scaled), scale if how == "numbers" else torch.tensor(scale))
        exact = scale != 3.0
        x, mask, dy = tensors(generator)
        if number == 1:  # overflows
            scaled(x.clone().requires_grad_(), mask).backward(torch.full_like(dy, torch.inf))
        results = []
        for norm, factor in ((plain, 1.0), (scaled, scale)):
            norm.zero_grad()
            leaf = x.clone().requires_grad_()
            norm(leaf, mask).backward(dy * factor)
            gradients = [leaf.grad, *(p.grad for p in norm.parameters())]
            results.append([gradient / factor for gradient in gradients] + list(state_of(norm).values()))
        for one, twin in zip(*results, strict=True):
            torch.testing.assert_close(one, twin, rtol=0 if exact else 1e-5, atol=0 if exact else 1e-5, msg=f"{number}")
    for wrong in (0, torch.tensor(0.0), -1.0, torch.inf, torch.nan, torch.ones(2), "x", torch.nn.Linear(1, 1)):
        with pytest.raises(ValueError, match="scale=.* must be a number greater than 0"):
            set_loss_scale(scaled, wrong)
