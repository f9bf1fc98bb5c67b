"""When the state changes: in the backward, once for each forward, by what the forward read."""

import copy
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch

from pn_fairseq.norms import ignoring, set_loss_scale
from pn_fairseq.testing.helpers import (
    CHANNELS,
    CHECKPOINTING,
    COUNT,
    assert_close,
    assert_same,
    assert_state_unchanged,
    assert_states_equal,
    checkpointed,
    forwards,
    gradients_of,
    long,
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
    """Whether its backward is still to come, it has no graph, or its loss is dropped."""
    for updates in (None, 0, 9):
        norm = running.trained(psi_warmup_updates=3)
        if updates is not None:
            norm.set_num_updates(updates)
        before = state_of(norm)
        x, mask, _ = tensors(2)
        kept = norm(x.requires_grad_(), mask)
        assert_state_unchanged(norm, before)
        with torch.no_grad():
            assert torch.equal(norm(x, mask), kept)
        norm(x, mask)
        assert_state_unchanged(norm, before)
        assert_state_unchanged(norm.eval(), before)


def test_the_state_is_right_when_the_backward_returns(running):
    """The backward moves the state in place. Reading the state afterwards does not change it."""
    norm = running.trained()
    before = state_of(norm)
    buffers = dict(norm.named_buffers())
    memory = {name: buffer.data_ptr() for name, buffer in buffers.items()}
    x, mask, dy = tensors(2)
    y = norm(x.requires_grad_(), mask)
    assert_state_unchanged(norm, before)
    y.backward(dy)
    assert int(buffers[COUNT]) == int(before[COUNT]) + 1
    once = {name: buffer.clone() for name, buffer in buffers.items()}
    copy.deepcopy(norm.eval())
    norm.train().float().diagnostics()
    norm.set_num_updates(7)
    norm(x, mask)
    assert_state_unchanged(norm, once)
    for name, buffer in norm.named_buffers():
        assert buffer is buffers[name] and buffer.data_ptr() == memory[name], name


@long
@pytest.mark.parametrize("how", CHECKPOINTING)
def test_a_recomputed_forward_reads_what_its_forward_read(running, how):
    """Even after the backward of another batch has moved the state."""
    plain = running.trained(psi_warmup_updates=1)
    twin = running.trained(psi_warmup_updates=1)
    results = []
    for norm, use in ((plain, plain), (twin, checkpointed(twin, how))):
        batches = [tensors(seed) for seed in (3, 4)]
        leaves, outputs = forwards(use, batches)
        for y, (_, _, dy) in zip(outputs, batches, strict=True):
            y.backward(dy)
        gradients = [leaf.grad for leaf in leaves]
        results.append([*outputs, *gradients, *state_of(norm).values()])
    assert_same(*results)


def test_pipeline_schedules_without_checkpointing(running):
    """Two batches are in flight (1F1B). Each backward uses what its own forward read."""
    norm = running.trained(psi_warmup_updates=1)
    batches = [tensors(seed) for seed in (3, 4, 5)]
    leaves = [x.clone().requires_grad_() for x, _, _ in batches]
    outputs = []
    twins = []
    for action in ("F0", "F1", "B0", "F2", "B1", "B2"):
        number = int(action[1])
        _, mask, dy = batches[number]
        if action[0] == "F":
            twins.append(copy.deepcopy(norm))
            outputs.append(norm(leaves[number], mask))
        else:
            outputs[number].backward(dy)
    for leaf, y, twin, (x, mask, dy) in zip(leaves, outputs, twins, batches, strict=True):
        expected = twin(x.requires_grad_(), mask)
        expected.backward(dy)
        assert_same((y, leaf.grad), (expected, x.grad))


def test_a_retry_after_an_error_counts_once(running):
    """A backward pass that fails before it reaches the norm moves nothing; one that fails
    afterwards has moved it.
    """
    norm = running.trained()
    before = int(norm.num_batches_tracked)
    x, mask, dy = tensors(2)
    fails = True

    def fail(gradient):
        if fails:
            raise RuntimeError("out of memory")

    for place in ("above", "below"):
        fails = True
        leaf = x.clone().requires_grad_()
        inside = leaf * 1
        y = norm(inside, mask)
        failing = inside if place == "below" else y
        failing.register_hook(fail)
        with pytest.raises(RuntimeError, match="out of memory"):
            y.backward(dy, retain_graph=True)
        assert int(norm.num_batches_tracked) == before + (place == "below")
        fails = False
        y.backward(dy)
        before += 1
        assert int(norm.num_batches_tracked) == before


def test_threads_that_train_one_norm_lose_no_step(running):
    norm = running.trained()
    steps = 50
    before = int(norm.num_batches_tracked)

    def train(seed):
        x, mask, dy = tensors(seed)
        for _ in range(steps):
            norm(x.clone().requires_grad_(), mask).backward(dy)

    with ThreadPoolExecutor(2) as threads:
        list(threads.map(train, (1, 2)))
    assert int(norm.num_batches_tracked) == before + 2 * steps


@pytest.mark.parametrize("inside", ["forward", "both"])
def test_a_batch_that_is_ignored_in_its_forward_enters_no_statistic(running, inside):
    """Its gradient is that of training, even if its backward comes after the block."""
    norm = running.trained()
    plain = running.trained()
    before = state_of(norm)
    x, mask, dy = tensors(2)
    expected = plain(x.clone().requires_grad_(), mask)
    leaf = x.clone().requires_grad_()
    with ignoring(torch.nn.Sequential(norm)):
        y = norm(leaf, mask)
        if inside == "both":
            y.backward(dy)
    if inside == "forward":
        y.backward(dy)
    assert_same([y], [expected])
    assert leaf.grad.isfinite().all()
    assert leaf.grad.any()
    assert_state_unchanged(norm, before)
    norm(leaf, mask).backward(dy)
    assert int(norm.num_batches_tracked) == int(before[COUNT]) + 1


@long
@pytest.mark.parametrize("how", CHECKPOINTING)
def test_gradients_of_a_frozen_norm_in_a_checkpointed_part(running, how):
    """The norm moves its state in the forward; a later recomputation still reads the state from
    before.
    """
    plain = running.trained(psi_warmup_updates=1)
    twin = running.trained(psi_warmup_updates=1)

    class Scaled(torch.nn.Module):
        def __init__(self, norm):
            super().__init__()
            self.norm = norm.requires_grad_(False)
            self.factor = torch.nn.Parameter(torch.ones(CHANNELS))

        def forward(self, x, mask, hook):
            return self.norm(x, mask) * self.factor + 0 * hook

    results = []
    for block in (Scaled(plain), Scaled(twin)):
        if block.norm is twin:
            use = checkpointed(block, how)
        else:
            use = block
        values = []
        for seed in range(2):
            x, mask, dy = tensors(seed)
            hook = torch.zeros((), requires_grad=True)  # needed by reentrant checkpointing
            y = use(x, mask, hook)
            y.backward(dy)
            values += [y, block.factor.grad.clone()]
        results.append([*values, *state_of(block).values()])
    assert_same(*results)


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0)], ids=str)
def test_uses_before_a_backward_see_the_same_state_and_count_once_each(running, order):
    norm = running.trained(psi_warmup_updates=2)
    before = state_of(norm)
    twin = copy.deepcopy(norm)
    batches = [tensors(seed) for seed in (3, 4, 5)]
    leaves, outputs = forwards(norm, batches)
    for index in order:
        outputs[index].backward(batches[index][2])
    for leaf, y, (x, mask, dy) in zip(leaves, outputs, batches, strict=True):
        x.requires_grad_()
        expected = copy.deepcopy(twin)(x, mask)
        expected.backward(dy)
        assert_same((y, leaf.grad), (expected, x.grad))
    assert state_of(norm)[COUNT] == before[COUNT] + 3


def test_one_use_after_another_in_a_graph_counts_twice(running):
    norm = running.trained()
    before = state_of(norm)
    x, mask, dy = tensors(3)
    hidden = norm(x.requires_grad_(), mask)
    y = norm(hidden, mask)
    assert torch.equal(copy.deepcopy(norm)(hidden, mask), y)
    y.backward(dy)
    assert state_of(norm)[COUNT] == before[COUNT] + 2


def test_gradient_accumulation_counts_every_batch_and_adds_gradients(case):
    norm = case.trained()
    twin = case.trained()
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
    norm = running.trained()
    other = running.trained()
    x, mask, dy = tensors(3)
    x.requires_grad_()
    y = norm(x, mask)
    of_other = other(x, mask)
    (once,) = torch.autograd.grad(y, x, dy, retain_graph=True)
    after = state_of(norm)
    (twice,) = torch.autograd.grad(y, x, dy)
    assert torch.equal(once, twice)
    assert_state_unchanged(norm, after)
    for gradient in (dy, 3 * dy):  # only the first counts
        torch.autograd.grad(of_other, x, gradient, retain_graph=True)
    assert_state_unchanged(other, after)


@pytest.mark.parametrize("loaded_first", [True, False], ids=["before the backward", "after it"])
def test_a_step_belongs_to_the_state_that_a_load_replaces(running, loaded_first):
    """The gradient is that of the forward that ran."""
    norm = running.trained()
    plain = running.trained()
    saved = running.trained(steps=5)
    x, mask, dy = tensors(3)
    leaf = x.clone().requires_grad_()
    leaf_of_plain = x.clone().requires_grad_()
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
    norm = running.trained(psi_warmup_updates=9)
    twin = running.trained(psi_warmup_updates=9)
    for module in (norm, twin):
        module.set_num_updates(1)
        x, mask, dy = tensors(3)
        module(x.requires_grad_(), mask).backward(dy)
    norm.load_state_dict(dict(norm.named_parameters()), strict=False)
    assert_same(some_steps(norm), some_steps(twin))


def test_a_frozen_norm_computes_the_same(running):
    norm = running.trained(steps=1)
    frozen = running.trained(steps=1)
    x, mask, _ = tensors(3)
    assert torch.equal(frozen.requires_grad_(False)(x, mask), norm(x, mask))


@pytest.mark.parametrize("frozen", ["x", "parameters", "weight", "bias"])
def test_frozen_inputs_and_parameters_change_nothing_else(running, frozen):
    norm = running.trained()
    twin = running.trained()
    for name, parameter in norm.named_parameters():
        parameter.requires_grad_(frozen not in ("parameters", name))
    x, mask, dy = random_batch(3)
    expected = train_step(twin, x, mask, dy)
    leaf = to_tensor(x, requires_grad=frozen != "x")
    norm.zero_grad()
    norm(leaf, to_mask(mask)).backward(to_tensor(dy))
    for name, tensor in {"x": leaf, **dict(norm.named_parameters())}.items():
        assert (tensor.grad is not None) == tensor.requires_grad
        if tensor.grad is not None:
            assert_close(tensor.grad, expected[f"d{name}"], 1e-6, name)
    assert_states_equal(norm, twin)


@pytest.mark.parametrize("how", [None, *CHECKPOINTING, "nested", "with hooks"])
def test_a_step_that_no_gradient_reaches_counts_once(running, how):
    """It changes what a backward would have changed, except the state made of gradients."""
    norm = running.trained(psi_warmup_updates=2)
    twin = running.trained(psi_warmup_updates=2)
    before = state_of(norm)

    class Scaled(torch.nn.Module):
        """The factor gets a gradient, the norm none."""

        def forward(self, factor, x, mask):
            return factor * twin.requires_grad_(False)(x, mask)

    if how is None:
        use = Scaled()
    else:
        use = checkpointed(Scaled(), how)
    for number in range(3):
        x, mask, dy = tensors(number)
        norm(x.clone().requires_grad_(), mask).backward(dy)
        with torch.no_grad():
            twin(x, mask)
        factor = torch.ones((), requires_grad=True)
        use(factor, x, mask).backward(dy)
        actual = state_of(twin)
        for key, value in state_of(norm).items():
            if key in norm.gradient_state:
                expected = before[key]
            else:
                expected = value
            assert torch.equal(actual[key], expected), f"{number}: {key}"
    assert int(twin.num_batches_tracked) == int(before[COUNT]) + 3


def test_state_made_of_gradients_is_named(running):
    """Twice the gradient doubles it, from an initial value of 0, and changes no other state."""
    norm = running.build()
    twin = running.build()
    for number in range(3):
        x, mask, dy = tensors(number)
        norm(x.clone().requires_grad_(), mask).backward(dy)
        twin(x.clone().requires_grad_(), mask).backward(2 * dy)
    actual = state_of(twin)
    for key, value in state_of(norm).items():
        if key in norm.gradient_state:
            assert torch.equal(actual[key], 2 * value) and value.any(), key
        else:
            assert torch.equal(actual[key], value), key


@pytest.mark.parametrize("how", ["numbers", "tensors", "a scaler"])
def test_a_loss_scale_changes_no_state(running, how):
    """The scale of a scaler halves after an overflow, and grows; a resumed training uses another
    scale, or none.
    """
    plain = running.build(4, psi_warmup_updates=2)
    scaled = running.build(4, psi_warmup_updates=2)
    scales = [1024.0, 1024.0, 512.0, 2.0, 2.0**20, 1.0, 3.0]
    model = torch.nn.Sequential(scaled)
    scaler = SimpleNamespace(factor=1.0)
    scaler.scale = lambda tensor: tensor * scaler.factor
    if how == "a scaler":
        set_loss_scale(model, scaler)
    generator = rng(1)
    for number, scale in enumerate(scales):
        scaler.factor = scale
        if how == "numbers":
            set_loss_scale(model, scale)
        elif how == "tensors":
            set_loss_scale(model, torch.tensor(scale))
        tolerance = 1e-5 if scale == 3.0 else 0  # a power of two is exact
        x, mask, dy = tensors(generator)
        if number == 1:  # overflows
            infinite = torch.full_like(dy, torch.inf)
            scaled(x.clone().requires_grad_(), mask).backward(infinite)
        results = []
        for norm, factor in ((plain, 1.0), (scaled, scale)):
            norm.zero_grad()
            leaf = x.clone().requires_grad_()
            norm(leaf, mask).backward(dy * factor)
            gradients = [gradient / factor for gradient in [leaf.grad, *gradients_of(norm)]]
            results.append(gradients + list(state_of(norm).values()))
        torch.testing.assert_close(*results, rtol=tolerance, atol=tolerance)
    numbers = (0, torch.tensor(0.0), -1.0, torch.inf, torch.nan)
    for wrong in (*numbers, torch.ones(2), "x", torch.nn.Linear(1, 1)):
        with pytest.raises(ValueError, match="scale=.* must be a number greater than 0"):
            set_loss_scale(scaled, wrong)
