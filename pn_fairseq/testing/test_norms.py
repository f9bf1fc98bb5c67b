"""The rules that a norm gets from its base class, checked for every norm that is registered.

They run for your own norms by ``pn test-norms --norm-module FILE``. What a norm computes is its
own: compare that with a plain implementation of its formulas, as tests/norms does.
"""

import contextlib
import copy
import functools
import io
import itertools
import pickle
from dataclasses import dataclass

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from pn_fairseq.norms import (
    NORMS,
    VARIANTS,
    ChannelNorm,
    RunningNorm,
    average_running_stats,
    build_norm,
    recalibrating,
    running_norms,
    set_loss_scale,
)
from pn_fairseq.norms.fold import folded_linear
from pn_fairseq.testing.helpers import (
    CHANNELS,
    assert_close,
    assert_same,
    assert_state_unchanged,
    assert_states_equal,
    flushed,
    random_batch,
    randomize_affine,
    real_tokens,
    rng,
    state_of,
    tensors,
    to_mask,
    to_tensor,
    train_step,
    unrounded,
)
from pn_fairseq.testing.ranks import run_ranks

COUNT = "num_batches_tracked"

#: Schedules that the few steps of a test go through.
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
        """In training mode, with random weights. Options that the norm does not have are ignored."""
        norm = build_norm(self.name, CHANNELS, self.variant, layer_scale_groups=groups, **SCHEDULES, **options)
        return randomize_affine(norm).train()

    def trained(self, groups: int = 0, steps: int = 3, **options) -> ChannelNorm:
        """After ``steps`` training steps: its state is away from the initial values."""
        norm = self.build(groups, **options)
        generator = rng(1)
        for _ in range(steps):
            train_step(norm, *random_batch(generator))
        return flushed(norm)

    def __str__(self) -> str:
        return self.name if self.variant == VARIANTS[0] else f"{self.name}-{self.variant}"


def cases(names=None) -> list[Case]:
    """The norms of these names (None: all) in all variants that they have."""
    names = NORMS if names is None else names
    return [Case(name, variant) for name in names for variant in (VARIANTS[0], *NORMS[name].variants)]


#: Norms that differ in kind from each other, as case names.
KINDS = {"layer", "dyt", "batch", "power", "power-release", "power-v", "unified"}


def long(test):
    """Mark a test that takes long: with other norms than KINDS it is slow."""
    test.long = True
    return test


def pytest_generate_tests(metafunc):
    """``case``: every norm. ``running``: those with running statistics. ``masking``: those that ignore padding, which
    the variants that reproduce released code need not do."""
    slow = pytest.mark.slow if getattr(metafunc.function, "long", False) else ()
    chosen = cases(metafunc.config.getoption("norm_names", None))
    fixtures = {
        "case": chosen,
        "running": [case for case in chosen if issubclass(case.cls, RunningNorm)],
        "masking": [case for case in chosen if case.variant == VARIANTS[0]],
    }
    for fixture, values in fixtures.items():
        if fixture in metafunc.fixturenames:
            cases_of = [pytest.param(case, marks=() if str(case) in KINDS else slow) for case in values]
            metafunc.parametrize(fixture, cases_of, ids=str)


def some_steps(norm, number=3, seed=8, **options):
    """What ``number`` training steps give: y, gradients and, at the end, the state."""
    generator = rng(seed)
    steps = [train_step(norm.train(), *random_batch(generator, **options)) for _ in range(number)]
    return [torch.tensor(value) for step in steps for value in step.values()] + list(state_of(norm).values())


# The module.


def test_parameters_and_initial_state(case):
    norm = case.build(affine=False)
    assert norm.weight is None and norm.bias is None
    norm = build_norm(case.name, CHANNELS, case.variant)
    for name, initial in (("weight", torch.ones(CHANNELS)), ("bias", torch.zeros(CHANNELS))):
        found = getattr(norm, name)
        assert (found is not None) == (name in norm.learned) and (found is None or torch.equal(found, initial))
    assert str(CHANNELS) in repr(norm)
    norm.set_num_updates(3)


def test_reset_parameters_gives_the_initial_values(case):
    norm, new = case.trained(), build_norm(case.name, CHANNELS, case.variant)
    norm.reset_parameters()
    assert_same(norm.state_dict().values(), new.state_dict().values())


def on_meta(norm):
    """``norm`` with other values than its initial ones, which are then lost."""
    return torch.nn.Sequential(norm).to("meta")


def without_some(state):
    return {key: value for key, value in state.items() if not key.endswith(("weight", "running_psi2", "running_var"))}


#: How a module without values gets values -> the function that gives it, of the module and a state dict to load.
MATERIALIZATIONS = {
    "to_empty": lambda model, state: model.to_empty(device="cpu"),
    "to_empty of each module": lambda model, state: model.apply(lambda m: m.to_empty(device="cpu", recurse=False)),
    "to_empty, then a part": lambda model, state: model.to_empty(device="cpu").load_state_dict(
        without_some(state), strict=False
    ),
    "a copy": lambda model, state: copy.deepcopy(model).to_empty(device="cpu")[0],
    "assign": lambda model, state: model.load_state_dict(state, assign=True),
    "assign a part, then to_empty": lambda model, state: (
        model.load_state_dict(without_some(state), strict=False, assign=True),
        model.to_empty(device="cpu"),
    ),
}


@pytest.mark.parametrize("how", MATERIALIZATIONS)
def test_state_is_initial_or_loaded_however_memory_is_given(running, how):
    model, loaded, new = on_meta(running.trained()), running.trained(), running.build()
    found = MATERIALIZATIONS[how](model, {f"0.{key}": value for key, value in loaded.state_dict().items()})
    norm = found if isinstance(found, RunningNorm) else model[0]
    for key, value in state_of(norm).items():
        part = how == "assign" or ("part" in how and without_some({key: value}))
        assert torch.equal(value, state_of(loaded if part else new)[key]), key


def test_memory_that_is_given_to_a_module_with_values_keeps_the_state(running):
    norm = running.trained()
    before = state_of(norm)
    torch.nn.Sequential(norm).to_empty(device="cpu")
    assert_state_unchanged(norm, before)


def test_a_module_on_meta_is_refused(running):
    for training in (True, False):
        norm = on_meta(running.build())[0].train(training)
        with pytest.raises(RuntimeError, match=f"{COUNT} of .* never got values: .*to_empty"):
            norm(torch.ones(2, CHANNELS))
        assert norm(torch.ones(2, CHANNELS, device="meta")).is_meta
        norm.load_state_dict(without_some(running.trained().state_dict()), strict=False, assign=True)
        with pytest.raises(RuntimeError, match="running_.* never got values"):
            norm(torch.ones(2, CHANNELS))


def test_reset_gives_the_initial_state(running):
    norm, new = running.trained(), running.build()
    norm.reset_running_stats()
    assert_states_equal(norm, new)
    assert_same(some_steps(norm), some_steps(new))


def test_state_belongs_to_a_running_norm(case):
    """The tests of state look at no other norm: one that is composed of norms would be used untested."""
    norm = case.build()
    with_state = [module for module in norm.modules() if any(True for _ in module.buffers(recurse=False))]
    assert with_state == ([norm] if isinstance(norm, RunningNorm) else []), (
        "a norm with buffers, or with parts that have some, derives from RunningNorm and has its state from add_state; "
        "token_part adds a part with statistics of each token (docs/adding_a_norm.md)"
    )


def test_state_is_float32_and_a_counter(running):
    state = state_of(running.build())
    assert state.pop(COUNT).dtype == torch.int64
    assert state and all(value.dtype == torch.float32 and value.shape[-1] == CHANNELS for value in state.values())


@pytest.mark.parametrize("steps", [1, 4])
def test_state_dict_round_trip(case, steps):
    """In the middle of a warm-up of 2 and after it. Training continues to the bit."""
    norm, other = case.trained(4, steps, psi_warmup_updates=2), case.build(4, psi_warmup_updates=2)
    assert set(norm.state_dict()) == {*dict(norm.named_parameters()), *state_of(norm)}
    file = io.BytesIO()
    torch.save(norm.state_dict(), file)
    file.seek(0)
    other.load_state_dict(torch.load(file, weights_only=True))
    assert_same(some_steps(other), some_steps(norm))


@pytest.mark.parametrize(
    ("how", "when"),
    [
        ("deepcopy", "before a backward"),
        ("deepcopy", "after a backward"),
        ("pickle", "with updates"),
        ("torch.save", "after a backward"),
    ],
)
@long
def test_copies_continue_alike_and_apart(case, how, when):
    norm = case.trained(4, 1, psi_warmup_updates=2)
    if when == "with updates":
        norm.set_num_updates(1)
    y = norm(torch.ones(2, 2, CHANNELS, requires_grad=True))
    if when == "after a backward":
        y.sum().backward()
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
    some_steps(copy.deepcopy(other), 1)
    assert_state_unchanged(norm, before)
    assert_same(some_steps(other), some_steps(norm))


def test_a_graph_belongs_to_the_original_and_not_to_its_copy(running):
    norm = running.trained()
    y = norm(torch.ones(2, 2, CHANNELS, requires_grad=True))
    other = copy.deepcopy(norm)
    before = state_of(other)
    y.sum().backward()
    assert_state_unchanged(other, before)
    assert state_of(norm)[COUNT] == before[COUNT] + 1


class HostReads(TorchDispatchMode):
    """Notes the operations of a block that would wait for a GPU: they read values, or have results of unknown size."""

    NAMES = ("_local_scalar_dense", "item", "is_nonzero", "nonzero", "masked_select", "equal")

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket.__name__ in self.NAMES:
            self.found.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("masked", "counted"), [(True, True), (False, False)], ids=["mask, with updates", "no mask, counting itself"]
)
def test_no_value_is_read_in_a_training_step(case, masked, counted):
    """A GPU never has to catch up with the host. An ``if`` on a value of a tensor would read it."""
    norm = case.build(4, psi_warmup_updates=2, outlier_filtration=True)
    x, mask, dy = tensors(rng(2))
    with HostReads() as reads:
        for step in range(4):  # in the warm-up and after it
            if counted:
                norm.set_num_updates(step)
            # Also a fault: what to do with it is decided where the numbers are.
            inputs = (x * float("inf") if step == 3 else x).detach().requires_grad_()
            norm(inputs, mask if masked else None).backward(dy)
    assert not reads.found, f"a training step reads values, for which a GPU waits (use torch.where): {reads.found}"


CHECKPOINTING = ("reentrant", "non-reentrant", "fairseq")


def hooked(block):
    """``block`` with hooks of its own for saved tensors, one of which has no name."""

    def call(*args):
        with torch.autograd.graph.saved_tensors_hooks(functools.partial(torch.clone), lambda tensor: tensor):
            return block(*args)

    return call


def checkpointed(block, how):
    """``block`` as a function that recomputes its forward in the backward pass."""
    if how == "fairseq":
        module = pytest.importorskip("fairseq.modules.checkpoint_activations")
        return module.checkpoint_wrapper(block)
    if how in ("nested", "with hooks"):  # the exponential of what is inside makes the outer recomputation go beyond it
        inner = checkpointed(block, "non-reentrant") if how == "nested" else hooked(block)
        return checkpointed(lambda *args: inner(*args).exp().log(), "non-reentrant")
    return functools.partial(checkpoint, block, use_reentrant=how == "reentrant")


# When the state changes.


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
    "buffers of a model": lambda norm: list(torch.nn.Sequential(norm).buffers()),
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


def test_an_average_of_models_reads_the_state_after_the_last_backward(running):
    """As torch.optim.swa_utils.AveragedModel does, by ``model.buffers()``."""
    model = torch.nn.Sequential(running.trained())
    average = torch.optim.swa_utils.AveragedModel(model, use_buffers=True)
    x, mask, dy = tensors(rng(2))
    model[0](x.requires_grad_(), mask).backward(dy)
    average.update_parameters(model)
    assert_same(state_of(average.module[0]).values(), state_of(model[0]).values())


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
    for leaf, y, (x, mask, dy), other in zip(leaves, outputs, batches, copies, strict=True):
        x.requires_grad_()
        expected = other(x, mask)
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
    norm, other = case.trained(), case.trained()
    generator = rng(4)
    norm.zero_grad()
    total = dict.fromkeys(dict(norm.named_parameters()), 0.0)
    for number in range(3):
        x, mask, dy = random_batch(generator)
        norm(to_tensor(x, requires_grad=True), to_mask(mask)).backward(to_tensor(dy))
        step = train_step(other, x, mask, dy)
        assert_states_equal(norm, other)
        for name, parameter in norm.named_parameters():
            total[name] = total[name] + step[f"d{name}"]
            assert_close(parameter.grad, total[name], 1e-5, f"batch {number}: {name}", terms=1.0)


def test_a_second_backward_of_a_retained_graph_gives_the_same_and_counts_nothing(running):
    norm = running.trained()
    x, mask, dy = tensors(rng(3))
    x.requires_grad_()
    y = norm(x, mask)
    (once,) = torch.autograd.grad(y, x, dy, retain_graph=True)
    after = state_of(norm)
    (twice,) = torch.autograd.grad(y, x, dy)
    assert torch.equal(once, twice)
    assert_state_unchanged(norm, after)


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


@pytest.mark.parametrize("frozen", ["x", "parameters", "weight", "bias"])
def test_frozen_inputs_and_parameters_change_nothing_else(running, frozen):
    norm, other = running.trained(), running.trained()
    norm.weight.requires_grad_(frozen not in ("parameters", "weight"))
    norm.bias.requires_grad_(frozen not in ("parameters", "bias"))
    x, mask, dy = random_batch(rng(3))
    expected = train_step(other, x, mask, dy)
    leaf = to_tensor(x, requires_grad=frozen != "x")
    norm.zero_grad()
    norm(leaf, to_mask(mask)).backward(to_tensor(dy))
    for name, tensor in (("dx", leaf), ("dweight", norm.weight), ("dbias", norm.bias)):
        assert (tensor.grad is not None) == tensor.requires_grad
        if tensor.grad is not None:
            assert_close(tensor.grad, expected[name], 1e-6, name)
    assert_states_equal(norm, other)


@pytest.mark.parametrize("how", [None, *CHECKPOINTING, "nested", "with hooks"])
def test_a_step_that_no_gradient_reaches_counts_once(running, how):
    """It changes what a backward would have changed, but the state that is made of gradients."""
    norm, other = running.trained(psi_warmup_updates=2), running.trained(psi_warmup_updates=2)
    before = state_of(norm)

    class Scaled(torch.nn.Module):
        """The factor gets a gradient, the norm none."""

        def forward(self, factor, x, mask):
            return factor * other.requires_grad_(False)(x, mask)

    use = Scaled() if how is None else checkpointed(Scaled(), how)
    for number in range(3):
        x, mask, dy = tensors(rng(number))
        norm(x.clone().requires_grad_(), mask).backward(dy)
        with torch.no_grad():
            other(x, mask)
        factor = torch.ones((), requires_grad=True)
        use(factor, x, mask).backward(dy)
        for key, value in state_of(norm).items():
            of_gradients = key in norm.gradient_state
            assert torch.equal(state_of(other)[key], before[key] if of_gradients else value), (number, key)
    assert int(other.num_batches_tracked) == int(before[COUNT]) + 3


def test_state_made_of_gradients_is_named(running):
    """Twice the gradient doubles it, from an initial value of 0, and changes no other state."""
    norm, other = running.build(), running.build()
    for number in range(3):
        x, mask, dy = tensors(rng(number))
        norm(x.clone().requires_grad_(), mask).backward(dy)
        other(x.clone().requires_grad_(), mask).backward(2 * dy)
    for key, value in state_of(norm).items():
        of_gradients = key in norm.gradient_state
        assert torch.equal(state_of(other)[key], 2 * value if of_gradients else value), key
        assert not of_gradients or value.any()


class Scaler:
    """A loss scale that follows a list."""

    def __init__(self, scales):
        self.scales = list(scales)

    def scale(self, tensor):
        return tensor * self.scales[0]


@pytest.mark.parametrize("how", ["numbers", "tensors", "a scaler"])
def test_a_loss_scale_changes_no_state(running, how):
    """It halves after an overflow, and grows; a resumed training has another one, or none."""
    plain, scaled = running.build(4, psi_warmup_updates=2), running.build(4, psi_warmup_updates=2)
    scales = [1024.0, 1024.0, 512.0, 512.0, 2.0**20, 1.0, 3.0]
    scaler = Scaler(scales)
    if how == "a scaler":
        set_loss_scale(torch.nn.Sequential(scaled), scaler)
    generator = rng(1)
    for number, scale in enumerate(scales):
        if how != "a scaler":
            set_loss_scale(torch.nn.Sequential(scaled), scale if how == "numbers" else torch.tensor(scale))
        exact = scale != 3.0
        x, mask, dy = tensors(generator)
        if number == 1:  # overflows
            scaled(x.clone().requires_grad_(), mask).backward(torch.full_like(dy, torch.inf))
        found = []
        for norm, factor in ((plain, 1.0), (scaled, scale)):
            norm.zero_grad()
            leaf = x.clone().requires_grad_()
            norm(leaf, mask).backward(dy * factor)
            gradients = [leaf.grad, *(p.grad for p in norm.parameters())]
            found.append([gradient / factor for gradient in gradients] + list(state_of(norm).values()))
        for one, other in zip(*found, strict=True):
            torch.testing.assert_close(
                one, other, rtol=0 if exact else 1e-5, atol=0 if exact else 1e-5, msg=f"{number}"
            )
        scaler.scales.pop(0)
    for wrong in (0, torch.tensor(0.0), -1.0, torch.inf, torch.nan, torch.ones(2), "x", torch.nn.Linear(1, 1)):
        with pytest.raises(ValueError, match="scale=.* must be a number greater than 0"):
            set_loss_scale(scaled, wrong)


# Padding and layouts.


def more_padding(x, mask, dy, fill=None):
    """Three more padding rows at the end, one in front, and a whole sentence of padding; the gradient there is 0."""
    time, batch, channels = x.shape
    wide_x = np.full((time + 4, batch + 1, channels), np.nan if fill is None else fill)
    if fill is None:
        wide_x = rng(99).normal(size=wide_x.shape) * 50
    wide_mask = np.ones((batch + 1, time + 4), dtype=bool)
    wide_dy = np.zeros_like(wide_x)
    inner = (slice(1, time + 1), slice(0, batch))
    wide_x[inner] = np.where(mask.T[..., None], wide_x[inner], x)
    wide_dy[inner] = np.where(mask.T[..., None], 0, dy)
    wide_mask[:batch, 1 : time + 1] = mask
    return wide_x, wide_mask, wide_dy


def in_order(values, shape, mask):
    """Real tokens, sentence by sentence: the order does not depend on the padding."""
    return np.swapaxes(values, 0, 1)[np.swapaxes(real_tokens(shape, mask), 0, 1)]


@pytest.mark.parametrize(("groups", "fill"), [(0, None), (4, None), (4, np.inf), (0, np.nan), (4, 1e30)])
@long
def test_values_and_amount_of_padding_change_nothing_for_real_tokens(masking, groups, fill):
    """1e30 is a float32, its square is not. From the second of 4 steps on a warm-up is over."""
    plain, padded = (masking.build(groups, psi_warmup_updates=2) for _ in range(2))
    generator = rng(2)
    for step in range(4):
        x, mask, dy = random_batch(generator)
        dy[mask.T] = 0
        wide = more_padding(x, mask, dy, fill)
        expected, actual = train_step(plain, x, mask, dy), train_step(padded, *wide)
        for key in ("y", "dx"):
            real = in_order(expected[key], x.shape, mask)
            assert_close(in_order(actual[key], wide[0].shape, wide[1]), real, 1e-5, f"step {step}: {key}")
        for key in expected.keys() - {"y", "dx"} if fill is None else ():
            assert_close(actual[key], expected[key], 1e-5, f"step {step}: {key}", terms=1.0)
        for key, value in state_of(plain).items():
            assert_close(state_of(padded)[key], value, 1e-6, f"step {step}: {key}")


@pytest.mark.parametrize("groups", [0, 4])
def test_gradients_at_padding_stay_there_and_statistics_send_none(masking, groups):
    quiet, noisy = masking.build(groups), masking.build(groups)
    generator = rng(3)
    for step in range(3):
        x, mask, dy = random_batch(generator)
        silent = np.where(mask.T[..., None], 0, dy)
        expected, actual = train_step(quiet, x, mask, silent), train_step(noisy, x, mask, 100 * dy - 99 * silent)
        real = real_tokens(x.shape, mask)
        assert_close(actual["dx"][real], expected["dx"][real], 1e-6, f"step {step}")
        assert not expected["dx"][~real].any()
        assert expected["dx"][real].all()
        for key, value in state_of(quiet).items():
            assert_close(state_of(noisy)[key], value, 1e-6, f"step {step}: {key}")


def test_padding_is_normalized_like_the_real_tokens(case):
    """A padding position that holds what a real token holds comes out as that token does."""
    norm = case.build(4)
    generator = rng(5)
    for _ in range(3):
        x, mask, dy = random_batch(generator)
        mask[1, 2], mask[0, 0] = True, False
        x[2, 1] = x[0, 0]
        y = train_step(norm, x, mask, dy)["y"]
        assert_close(y[2, 1], y[0, 0], 1e-6)


@pytest.mark.parametrize("shape", [(5, 3, CHANNELS), (7, CHANNELS)])
def test_mask_without_padding_equals_no_mask(case, shape):
    without, with_mask = case.build(4), case.build(4)
    generator = rng(6)
    for _ in range(3):
        x, _, dy = random_batch(generator, shape, masked=False)
        empty = np.zeros(shape[-2::-1], dtype=bool)
        expected, actual = train_step(without, x, None, dy), train_step(with_mask, x, empty, dy)
        for key, value in (expected | state_of(without)).items():
            assert_close((actual | state_of(with_mask))[key], value, 1e-6, key)


def test_two_dimensional_input_equals_one_sentence(case):
    """(N, C) with a mask (N,), and (N, 1, C) with a mask (1, N)."""
    flat, sentence = case.build(4), case.build(4)
    generator = rng(7)
    for _ in range(3):
        x, mask, dy = random_batch(generator, (7, CHANNELS))
        actual = train_step(flat, x, mask, dy)
        expected = train_step(sentence, x[:, None], mask[None], dy[:, None])
        for key, value in expected.items():
            assert_close(actual[key], value.reshape(actual[key].shape), 1e-6, key)
        for key, value in state_of(sentence).items():
            assert_close(state_of(flat)[key], value, 1e-6, key)


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
    time_first, batch_first = case.build(4), case.build(4, batch_first=True)
    generator = rng(8)
    for _ in range(3):
        x, mask, dy = random_batch(generator, shape, masked)
        if masked:
            mask[1], mask[0] = True, False  # one sentence of padding: other tokens would count, were it read transposed
        expected = train_step(time_first, x, mask, dy)
        leaf = to_tensor(x)
        leaf = (leaf.transpose(0, 1) if layout == "transposed" else leaf.transpose(0, 1).contiguous()).requires_grad_()
        batch_first.zero_grad()
        y = batch_first(leaf, to_mask(mask))
        y.backward(to_tensor(dy).transpose(0, 1))
        assert_close(y.transpose(0, 1), expected["y"], 5e-6, "y")
        assert_close(leaf.grad.transpose(0, 1), expected["dx"], 1e-5, "dx")
        for name, parameter in batch_first.named_parameters():
            assert_close(parameter.grad, expected[f"d{name}"], 1e-5, name, terms=1.0)
        for key, value in state_of(time_first).items():
            assert_close(state_of(batch_first)[key], value, 5e-6, key)
    assert_close(batch_first.eval()(leaf).transpose(0, 1), time_first.eval()(leaf.transpose(0, 1)), 5e-6)


@pytest.mark.parametrize("training", [True, False])
def test_a_mask_that_does_not_fit_is_refused(case, training):
    for batch_first, shape, expected in ((False, (5, 3, CHANNELS), (3, 5)), (True, (3, 5, CHANNELS), (3, 5))):
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
    x, mask, dy = tensors(rng(9))
    given = x.clone().requires_grad_(), mask.clone(), dy.clone()
    case.build(4)(*given[:2]).backward(given[2])
    assert_same((given[0], given[1], given[2]), (x, mask, dy))


def test_strided_and_expanded_tensors(case):
    """Every second channel of a wider tensor, and the stride-0 gradient that sum() sends back."""
    norm, other = case.build(4), case.build(4)
    generator = rng(10)
    for _ in range(2):
        x, mask, _ = random_batch(generator)
        wide = torch.zeros(*x.shape[:-1], 2 * CHANNELS)
        wide[..., ::2] = to_tensor(x)
        y = norm(wide.requires_grad_()[..., ::2], to_mask(mask))
        y.sum().backward()
        expected = train_step(other, x, mask, np.ones_like(x))
        assert_close(y, expected["y"], 1e-6)
        assert_close(wide.grad[..., ::2], expected["dx"], 1e-5)
        assert_states_equal(norm, other)


# Faults and empty batches.


def poison(values, mask, bad):
    """``bad`` in one channel of one real token."""
    values = values.copy()
    first = tuple(np.argwhere(real_tokens(values.shape, mask))[0])
    values[(*first, 5)] = bad
    return values


@pytest.mark.parametrize(
    ("warmup", "where", "bad"), [(0, "x", np.inf), (9, "x", np.nan), (9, "dy", -np.inf), (0, "dy", np.nan)]
)
def test_numbers_that_are_not_finite_change_no_state(running, warmup, where, bad):
    """Training continues as if the batch had not been there."""
    norm, other = (running.build(4 * (bad == np.nan), psi_warmup_updates=warmup) for _ in range(2))
    generator = rng(4)
    for step in range(4):
        x, mask, dy = random_batch(generator)
        if step != 2:
            assert_same(*([torch.tensor(v) for v in train_step(n, x, mask, dy).values()] for n in (norm, other)))
        elif where == "x":
            train_step(norm, poison(x, mask, bad), mask, dy)
        else:
            result = train_step(norm, x, mask, poison(dy, mask, bad))
            # The loss scaler finds the overflow by looking at the gradients: it must not be hidden from it.
            assert not np.isfinite(result["dx"]).all() and not np.isfinite(result["dbias"]).all()
        assert_states_equal(norm, other)


def test_a_fault_in_one_of_two_uses_keeps_the_other(running):
    for faulty, where, order in itertools.product((0, 1), ("x", "dy"), ((0, 1), (1, 0))):
        norm, reference = running.trained(), running.trained()
        outputs = []
        for number, seed in enumerate((13, 14)):
            x, mask, dy = random_batch(rng(seed))
            if number != faulty:
                train_step(reference, x, mask, dy)
            elif where == "x":
                x = poison(x, mask, np.nan)
            else:
                dy = poison(dy, mask, np.inf)
            outputs.append((norm(to_tensor(x, requires_grad=True), to_mask(mask)), to_tensor(dy)))
        for index in order:
            outputs[index][0].backward(outputs[index][1])
        assert_states_equal(norm, reference)


def test_a_fault_in_a_gradient_reaches_every_use_in_its_graph(running):
    norm = running.trained()
    before = state_of(norm)
    x, mask, dy = random_batch(rng(16))
    y = norm(torch.tanh(norm(to_tensor(x, requires_grad=True), to_mask(mask))), to_mask(mask))
    y.backward(to_tensor(np.full_like(dy, np.nan)))
    assert_state_unchanged(norm, before)


@pytest.mark.parametrize(
    ("shape", "warmup"),
    [((0, 3, CHANNELS), 9), ((5, 0, CHANNELS), 0), ((0, CHANNELS), 9), ((5, 3, CHANNELS), 0), ((5, 3, CHANNELS), 9)],
)
def test_a_batch_without_a_real_token_changes_no_state(case, shape, warmup):
    """No token, or only padding."""
    norm = case.trained(4, psi_warmup_updates=warmup)
    before = state_of(norm)
    mask = np.ones(shape[-2::-1], dtype=bool)
    for each in [None, mask] if 0 in shape else [mask]:
        x, _, dy = random_batch(rng(11), shape, masked=False)
        actual = train_step(norm, x, each, dy)
        assert_state_unchanged(norm, before)
        assert actual["y"].shape == shape and actual["dx"].shape == shape
        assert all(np.isfinite(value).all() for value in actual.values())
        if 0 in shape:
            assert not any(value.any() for key, value in actual.items() if key not in ("y", "dx"))
    assert norm.eval()(torch.zeros(shape)).shape == shape


# Precision.

CASTS = {
    "half": lambda m: m.half(),
    "to-device-bfloat16": lambda m: m.to("cpu", torch.bfloat16),
    "double": lambda m: m.double(),
    "type": lambda m: m.type(torch.float16),
    "half-and-back": lambda m: m.half().float(),
}


@pytest.mark.parametrize("cast", CASTS)
def test_conversion_casts_parameters_and_leaves_the_state_float32(running, cast):
    norm = running.trained()
    before, keys = state_of(norm), list(norm.state_dict())
    CASTS[cast](torch.nn.Sequential(norm))
    assert_state_unchanged(norm, before)
    assert norm.weight.dtype == CASTS[cast](torch.nn.Linear(1, 1)).weight.dtype
    assert list(norm.state_dict()) == keys
    assert all(buffer.is_meta for buffer in norm.to("meta").buffers())


@pytest.mark.parametrize(("assign", "dtype"), [(False, torch.float64), (True, torch.bfloat16)])
def test_loaded_state_is_float32(running, assign, dtype):
    """Whatever it was saved as. The caller keeps what was loaded, and training continues."""
    saved, norm = running.trained(), running.build()
    source, target = torch.nn.Sequential(saved), torch.nn.Sequential(norm)
    state = {key: value.to(dtype) if value.is_floating_point() else value for key, value in source.state_dict().items()}
    given = dict(state)
    target.load_state_dict(state, assign=assign)
    assert state.keys() == given.keys() and all(state[key] is value for key, value in given.items())
    for key, value in state_of(norm).items():
        assert value.dtype == state_of(saved)[key].dtype, key
        torch.testing.assert_close(value, state_of(saved)[key].to(dtype).to(value.dtype), rtol=0, atol=0)
    given = {key: value.clone() for key, value in given.items()}
    some_steps(norm, 1)
    assert int(norm.num_batches_tracked) == 4
    assert assign or all(torch.equal(state[key], value) for key, value in given.items())


DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("training", [True, False])
@long
def test_results_have_the_types_of_what_they_belong_to(case, dtype, training):
    """Parameters of another type than the input are what mixed precision looks like."""
    for parameters in DTYPES:
        norm = case.build(4).to(parameters).train(training)
        x, mask, _ = random_batch(rng(3))
        x = to_tensor(x, dtype, requires_grad=True)
        y = norm(x, to_mask(mask))
        y.sum().backward()
        assert y.dtype == dtype and x.grad.dtype == dtype
        gradients = [each.grad for each in norm.parameters() if training or each.grad is not None]
        assert all(gradient.dtype == parameters for gradient in gradients)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_one_rounding_away_from_float32(case, dtype):
    """Statistics and state are computed from the rounded input in float32; squares of 300 overflow float16."""
    narrow, wide = case.build(4, psi_warmup_updates=2).to(dtype), case.build(4, psi_warmup_updates=2)
    # One pass over the tokens rounds once. Other norms are several operators, each of which rounds: three times at
    # most, with a margin of five.
    one_pass = isinstance(narrow, RunningNorm) and not narrow.further_parameters()
    rtol = 1e-4 if one_pass else 5 * 3 * torch.finfo(dtype).eps / 2
    wide.load_state_dict({key: value.float() for key, value in narrow.state_dict().items()})
    generator = rng(4)
    for step in range(4):
        x, mask, dy = random_batch(generator, scale=300.0)
        x, dy = (to_tensor(value, dtype).double().numpy() for value in (x, dy))
        actual, expected = train_step(narrow, x, mask, dy, dtype), train_step(wide, x, mask, dy)
        for key, value in expected.items():
            terms = 0.0 if key in ("y", "dx") else 1.0
            assert_close(unrounded(actual[key], value, dtype), value, rtol, f"step {step}: {key}", terms)
        for key, value in state_of(wide).items():
            assert_close(state_of(narrow)[key], value, 1e-5, f"step {step}: {key}")


def test_works_under_autocast(case):
    norm = case.build(4)
    x, mask, dy = tensors(rng(8))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        x = x.bfloat16().requires_grad_()
        y = norm(x, mask)
    y.backward(dy.to(y.dtype))
    assert y.isfinite().all() and x.grad.isfinite().all()
    assert all(value.dtype in (torch.float32, torch.int64) for value in state_of(norm).values())


# Activation checkpointing.


class Block(torch.nn.Module):
    """A norm between linear maps, and a second norm behind them."""

    def __init__(self, case, **options):
        super().__init__()
        torch.manual_seed(5)
        self.fc = torch.nn.Linear(CHANNELS, CHANNELS)
        self.norm = case.build(**options)
        self.out = torch.nn.Linear(CHANNELS, CHANNELS)
        self.last = case.build(4, **options)

    def forward(self, x, mask=None):
        return x + self.last(self.out(torch.tanh(self.norm(self.fc(x), mask))), mask)

    def set_num_updates(self, num_updates):
        self.norm.set_num_updates(num_updates)
        self.last.set_num_updates(num_updates)


def twins(case, **options):
    plain = Block(case, **options).train()
    return plain, copy.deepcopy(plain)


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
    return results + list(state_of(block).values())


@pytest.mark.parametrize("how", CHECKPOINTING)
@pytest.mark.parametrize("updates", [None, 2], ids=["without updates", "with updates"])
@long
def test_recomputation_changes_no_bit(case, how, updates):
    """Over the end of a warm-up of 2, in the types of mixed precision, with uses in turn and dropped forwards."""
    plain, other = twins(case, psi_warmup_updates=2)
    use = checkpointed(other, how)

    def both(x, mask):
        return other(other(x, mask), mask)

    uses = [[use], [use, use], [other, use], [use, other]]
    uses += [[checkpointed(both, how)], [use] * 8] if how != "fairseq" else [[use], [use] * 8]
    generator = rng(1)
    for step, chain in enumerate(uses):
        if updates is not None:
            plain.set_num_updates(step // updates)
            other.set_num_updates(step // updates)
        x, mask, dy = tensors(generator)
        times = 2 if how != "fairseq" and step == 4 else len(chain)
        expected = run_step(plain, [plain] * times, x, mask, dy)
        assert_same(run_step(other, chain, x, mask, dy), expected, f"step {step}")
        for function in (plain, use):  # dropped
            function(x.clone().requires_grad_(), mask)


@pytest.mark.parametrize("how", CHECKPOINTING)
@pytest.mark.parametrize(
    ("what", "order"),
    [("two batches", (0, 1)), ("two batches", (1, 0)), ("one batch twice", (0, 1)), ("a fault in the first", (1, 0))]
    + [("bfloat16", (0, 1))],
    ids=str,
)
@long
def test_recomputation_of_two_graphs_changes_no_bit(running, how, what, order):
    plain, other = twins(running, psi_warmup_updates=2)
    dtype = torch.bfloat16 if what == "bfloat16" else torch.float32
    plain, other = plain.to(dtype), other.to(dtype)
    use = checkpointed(other, how)
    generator = rng(5)
    for step in range(3):
        batches = [tensors(generator) for _ in range(2)]
        if what == "one batch twice":
            batches[1] = batches[0]
        if what == "a fault in the first":
            batches[0][0][:] = torch.nan
        found = []
        for block, function in ((plain, plain), (other, use)):
            block.zero_grad()
            leaves = [x.to(dtype, copy=True).requires_grad_() for x, _, _ in batches]
            outputs = [function(leaf, mask) for leaf, (_, mask, _) in zip(leaves, batches, strict=True)]
            for index in order:
                outputs[index].backward(batches[index][2].to(dtype))
            gradients = [leaf.grad.nan_to_num(9.0) for leaf in leaves]
            gradients += [p.grad.nan_to_num(9.0) for p in block.parameters()]
            found.append(gradients + list(state_of(block).values()))
        assert_same(*found, f"step {step}")


@pytest.mark.parametrize("how", CHECKPOINTING)
@long
def test_recomputation_of_a_retained_graph_gives_the_same_again(running, how):
    """A reentrant recomputation is a forward like any other: there every backward counts, elsewhere only the first."""
    plain, other = twins(running)
    use = checkpointed(other, how)
    assert_same(run_step(other, [use], *tensors(rng(6))), run_step(plain, [plain], *tensors(rng(6))))
    x, mask, dy = tensors(rng(7))
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
    assert state_of(other)["norm." + COUNT] == 2 + (how != "non-reentrant")


def test_selective_checkpointing_that_saves_all_operators_changes_no_bit(running):
    plain, other = twins(running, psi_warmup_updates=2)
    save = functools.partial(create_selective_checkpoint_contexts, lambda *_, **__: CheckpointPolicy.MUST_SAVE)
    use = functools.partial(checkpoint, other, use_reentrant=False, context_fn=save)
    generator = rng(1)
    for _ in range(4):
        x, mask, dy = tensors(generator)
        assert_same(run_step(other, [use], x, mask, dy), run_step(plain, [plain], x, mask, dy))


def test_shared_memory_stays_shared(running):
    norm, other = running.trained(), running.trained()
    torch.nn.Sequential(norm).share_memory()
    pointers = [buffer.data_ptr() for buffer in norm.buffers()]
    assert_same(some_steps(norm), some_steps(other))
    norm.load_state_dict(other.state_dict())
    norm.reset_running_stats()
    assert [buffer.data_ptr() for buffer in norm.buffers()] == pointers
    assert all(buffer.is_shared() for buffer in norm.buffers())


# Evaluation.


def test_evaluation_is_causal_and_changes_no_state(case):
    """Each token by itself: later tokens, other sentences and a mask have no influence."""
    norm = case.trained(4).eval()
    before = state_of(norm)
    x, mask, dy = tensors(rng(2))
    whole = norm(x)
    assert_close(norm(x[1:3, 2:]), whole[1:3, 2:], 1e-6)
    for time in range(1, len(x) + 1):
        assert_close(norm(x[:time])[-1], whole[time - 1], 1e-6)
    assert torch.equal(norm(x, mask), whole)
    x[0, 0, 0] = torch.nan
    norm(x.requires_grad_(), mask).backward(dy)
    assert_state_unchanged(norm, before)


def test_training_mixes_tokens_as_the_norm_says(case):
    """Whether y depends on the tokens after it: in update 1, and, with statistics that fit the batch, long after."""
    x = torch.randn(5, 2, CHANNELS, generator=torch.Generator().manual_seed(3))
    other = torch.cat([x[:-1], x[-1:] * 1.1])
    early, late = (case.build(psi_warmup_updates=2, alpha_fwd=0.5) for _ in range(2))
    early.set_num_updates(1)
    for _ in range(25):
        late(x.clone().requires_grad_()).sum().backward()
    if isinstance(late, RunningNorm):
        flushed(late).num_batches_tracked.fill_(10**6)
    late.set_num_updates(10**6)
    says = case.cls.mixes_tokens
    for when, norm, mixes in (("update 1", early, says != "never"), ("the long run", late, says == "always")):
        difference = float((norm(x) - norm(other))[:-1].abs().max().detach())
        assert difference > 1e-3 if mixes else difference < 1e-5, (
            f"mixes_tokens is {says!r}, but in {when} another token changes y by {difference:.2g}"
        )


def test_statistics_are_means_over_tokens(running):
    """A batch that holds all its tokens twice changes nothing but the gradients of weights, up to N / (N - 1)."""
    once, twice = (running.build(4, psi_warmup_updates=2).double() for _ in range(2))
    generator = rng(4)
    for step in range(5):
        x, mask, dy = (value if value.dtype == torch.bool else value.double() for value in tensors(generator))
        one, two = x.clone().requires_grad_(), torch.cat([x, x], 1).requires_grad_()
        y_one, y_two = once(one, mask), twice(two, torch.cat([mask, mask]))
        y_one.backward(dy)
        y_two.backward(torch.cat([dy, dy], 1))
        expected = {"y": y_one, "dx": one.grad, **state_of(once)}
        actual = {"y": y_two[:, : x.size(1)], "dx": two.grad[:, : x.size(1)], **state_of(twice)}
        for key, value in expected.items():
            difference = (actual[key] - value).abs().max() / value.abs().max().clamp(min=1e-6)
            assert difference < 0.1, (
                f"step {step}: {key} depends on how many tokens a batch has: divide sums by contribution.batch.count"
            )


def test_the_gradient_is_a_derivative_in_the_long_run(running):
    """On one batch, again and again, statistics settle. dx is then the derivative of what a norm that has settled on x
    makes of x; or, where a norm takes statistics for constants, of its affine map."""
    x, _, dy = (value if value is None else value.double() for value in tensors(rng(3)))

    def settled(x):
        norm = running.build(alpha_fwd=0.5, alpha_bwd=0.5, psi_warmup_updates=2).double()
        for _ in range(25):
            leaf = x.clone().requires_grad_()
            y = norm(leaf)
            y.backward(dy)
        return norm.eval(), y.detach(), leaf.grad

    norm, _, dx = settled(x)
    generator, step = torch.Generator().manual_seed(1), 1e-3
    for _ in range(2):
        direction = torch.randn(x.shape, generator=generator, dtype=torch.float64)
        there, back = x + step * direction, x - step * direction
        exact = float(((settled(there)[1] - settled(back)[1]) * dy).sum()) / (2 * step)
        constant = float(((norm(there) - norm(back)).detach() * dy).sum()) / (2 * step)
        actual = float((dx * direction).sum())
        assert min(abs(actual - exact), abs(actual - constant)) < 0.01 * float(dx.norm()), (
            f"dx is wrong: along a direction the derivative is {exact:.4g} ({constant:.4g} with constant statistics), "
            f"and dx gives {actual:.4g}"
        )


@pytest.mark.parametrize(("groups", "affine"), [(0, True), (1, False), (4, True)])
def test_evaluation_is_the_affine_map_that_folding_uses(running, groups, affine):
    norm = running.trained(groups, affine=affine).eval()
    x = to_tensor(random_batch(rng(5))[0], torch.float64)
    part = norm.token_part(x)
    assert (part is None) == norm.folds
    scale, shift = norm.evaluation_affine(torch.float64)
    expected = scale * norm.layer_scale(x) + shift
    torch.testing.assert_close(norm(x), expected if part is None else expected + part, rtol=1e-11, atol=1e-11)
    if not norm.folds:
        return
    weight, bias = torch.randn(7, CHANNELS, dtype=torch.float64), torch.randn(7, dtype=torch.float64)
    for each in (bias, None):
        folded = folded_linear(norm, weight, each)
        actual = torch.nn.functional.linear(norm.layer_scale(x), *folded)
        expected = torch.nn.functional.linear(norm(x), weight, each)
        torch.testing.assert_close(actual, expected, rtol=1e-11, atol=1e-11)


def test_evaluation_follows_a_state_that_was_loaded_or_trained(running):
    """Nothing is kept from one call to the next."""
    norm, other = running.trained().eval(), running.trained(steps=6).eval()
    x = torch.randn(3, CHANNELS)
    norm(x)
    norm.load_state_dict(other.state_dict())
    assert torch.equal(norm(x), other(x))
    some_steps(norm, 2), some_steps(other, 2)
    assert torch.equal(norm.eval()(x), other.eval()(x))
    assert not torch.equal(norm(x), running.trained().eval()(x))


def test_evaluation_has_gradients(running):
    norm = running.trained(4).eval().double()
    x = to_tensor(random_batch(rng(5), (3, 2, CHANNELS))[0], torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(norm, (x,), fast_mode=True)
    with torch.inference_mode():
        y = norm(x)
    assert torch.equal(y, norm(x))
    some_steps(norm.float(), 1)


# torch.compile, torch.export, torch.func.


@pytest.fixture
def compiler():
    """torch.compile counts what it has compiled of one function, and stops at a limit."""
    torch._dynamo.reset()
    yield functools.partial(torch.compile, backend="aot_eager")
    torch._dynamo.reset()


@long
def test_evaluation_compiles_without_a_graph_break(case, compiler):
    norm = case.trained(4).eval()
    x, mask, _ = tensors(rng(2))
    compiled = compiler(norm, fullgraph=True)
    torch.testing.assert_close(compiled(x, mask), norm(x, mask))
    torch.testing.assert_close(compiled(x), norm(x))


@long
def test_training_under_compile_is_training(case, compiler):
    """In one graph, and one more for all other lengths; the updates of a warm-up compile nothing again."""
    plain, other = case.build(4, psi_warmup_updates=2), case.build(4, psi_warmup_updates=2)
    compiled = compiler(other, fullgraph=True)
    generator = rng(1)
    torch._dynamo.utils.counters.clear()
    for step, length in enumerate((5, 6, 4, 7, 9)):
        batch = random_batch(generator, (length, 3, CHANNELS))
        results = []
        for norm, call in ((plain, plain), (other, compiled)):
            norm.set_num_updates(step)
            gradients = train_step(call, *batch)
            results.append([torch.tensor(value) for value in gradients.values()] + list(state_of(norm).values()))
        torch.testing.assert_close(*results, rtol=1e-6, atol=1e-6)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2


@long
def test_evaluation_can_be_exported(case):
    norm = case.trained(4).eval()
    x, mask, _ = tensors(rng(2))
    exported = torch.export.export(norm, (x, mask))
    torch.testing.assert_close(exported.module()(x, mask), norm(x, mask))
    operators = [str(node.target) for node in exported.graph.nodes if node.op == "call_function"]
    assert not [name for name in operators if name.startswith("pn_fairseq")], "loads only where this package is"


def test_evaluation_under_transforms_of_torch_func(case):
    norm = case.trained(4).eval()
    parameters = dict(norm.named_parameters())
    x = torch.randn(6, CHANNELS)

    def loss(parameters, x):
        return torch.func.functional_call(norm, parameters, (x,)).square().sum()

    gradient, dx = torch.func.grad(loss, argnums=(0, 1))(parameters, x)
    for parameter in norm.parameters():
        parameter.grad = torch.zeros_like(parameter)  # it stays where only training uses the parameter
    norm(x.requires_grad_()).square().sum().backward()
    assert_close(dx, x.grad, terms=1.0)  # zero but for rounding where a norm is all that the loss sees
    per_token = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(parameters, x[:, None])
    for key, parameter in norm.named_parameters():
        assert_close(gradient[key], parameter.grad, terms=1.0)
        assert_close(per_token[key].sum(0), parameter.grad, terms=1.0)


def test_transforms_of_torch_func_and_second_derivatives_in_training_are_refused(running):
    norm = running.trained(4)
    x = torch.randn(6, CHANNELS, requires_grad=True)

    def loss(parameters):
        return torch.func.functional_call(norm, parameters, (x,)).square().sum()

    with pytest.raises(RuntimeError, match=r"torch.func .* call eval\(\) first"):
        torch.func.grad(loss)({key: value.detach() for key, value in norm.named_parameters()})
    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.autograd.grad(norm(x).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match=r"torch.export .* call eval\(\) first"):
        torch.export.export(norm, (x,), strict=False)
    before = state_of(norm)
    given = {name: value.clone() for name, value in norm.named_buffers()}
    for some in (given, dict(list(given.items())[:1])):
        y = torch.func.functional_call(norm, some, (x,))
        torch.func.functional_call(norm, {name: value.clone() for name, value in given.items()}, (x,))
        with pytest.raises(RuntimeError, match="functional_call"):
            y.sum().backward()
    assert_state_unchanged(norm, before)
    torch.func.functional_call(norm, dict(norm.named_parameters()), (x,)).sum().backward()
    assert state_of(norm)[COUNT] == before[COUNT] + 1


# Diagnostics.


@pytest.mark.parametrize("warmup", [0, 2])
def test_diagnostics_change_no_number_and_count_faults(running, warmup):
    plain, watched = (running.build(4, psi_warmup_updates=warmup) for _ in range(2))
    assert plain.diagnostics() == {}
    watched.collecting = True
    generator = rng(3)
    for step in range(5):
        x, mask, dy = random_batch(generator)
        if step in (1, 3):
            x, dy = (poison(x, mask, np.nan), dy) if step == 1 else (x, poison(dy, mask, np.inf))
        found = [train_step(norm, x, mask, dy) for norm in (plain, watched)]
        for key, value in found[0].items():
            np.testing.assert_array_equal(found[1][key], value, f"step {step}: {key}")
        assert_states_equal(plain, watched)
    report = watched.diagnostics()
    assert {"psi_distance", "nonfinite_steps"} <= report.keys()
    assert all(value.dim() == 0 and value.isfinite() for value in report.values())
    assert int(report["nonfinite_steps"]) == 2
    assert plain.diagnostics() == {}


# Recalibration.


class Stack(torch.nn.Module):
    """Two norms with layers between them: the second one's input depends on the first one."""

    def __init__(self, case):
        super().__init__()
        torch.manual_seed(6)
        self.first = case.build(psi_warmup_updates=2)
        self.dropout = torch.nn.Dropout(0.5)
        self.linear = torch.nn.Linear(CHANNELS, CHANNELS)
        self.second = case.build(psi_warmup_updates=2)

    def forward(self, x, mask=None):
        return self.second(self.linear(self.dropout(self.first(x, mask))), mask)


def trained_stack(case, steps=4):
    model = Stack(case).train()
    for x, mask, dy in [tensors(rng(20 + step)) for step in range(steps)]:
        model(x.requires_grad_(), mask).backward(dy)
    return flushed(model)


def calibration_batches(number, masked=True):
    generator = rng(30)
    return [random_batch(generator, (3 + 2 * n, 3, CHANNELS), masked, 1.0 + n)[:2] for n in range(number)]


def recalibrate(model, batches):
    with torch.no_grad(), recalibrating(model):
        for x, mask in batches:
            model(to_tensor(x), to_mask(mask))


def test_recalibration_is_the_mean_over_the_batches_of_the_statistics_of_each(running):
    """Their variance may be the biased or the unbiased one. What a variant does with padding is its own."""
    norm = running.trained()
    batches = calibration_batches(4, masked=running.variant == VARIANTS[0])
    recalibrate(norm, [*batches, (np.ones((2, 1, CHANNELS)), np.ones((1, 2), dtype=bool))])
    real = [x[real_tokens(x.shape, mask)] for x, mask in batches]
    mean, moment = norm.evaluation_statistics()
    if mean is not None:
        assert_close(mean, np.mean([each.mean(0) for each in real], axis=0))
        biased, unbiased = (np.mean([each.var(0, ddof=ddof) for each in real], axis=0) for ddof in (0, 1))
        nearer = abs(moment.numpy() - biased).sum() < abs(moment.numpy() - unbiased).sum()
        assert_close(moment, biased if nearer else unbiased)
    else:
        assert_close(moment, np.mean([(each**2).mean(0) for each in real], axis=0))


def test_recalibration_changes_the_evaluation_statistics_alone(running):
    model = trained_stack(running)
    model.linear.eval()
    before, modes = state_of(model), [module.training for module in model.modules()]
    with torch.no_grad(), recalibrating(model) as norms:
        assert norms == [model.first, model.second] == running_norms(model)
        assert all(norm.training and norm.recalibrating for norm in norms)
        assert not model.dropout.training and not model.training
        for x, mask in calibration_batches(3):
            model(to_tensor(x), to_mask(mask))
    assert [module.training for module in model.modules()] == modes
    assert not any(norm.recalibrating for norm in norms)
    estimated = {model.first.mean_name, model.first.moment_name}
    for key, value in state_of(model).items():
        assert torch.equal(value, before[key]) != (key.partition(".")[2] in estimated), key


def test_recalibration_forgets_the_old_statistics_and_the_order(running):
    model = trained_stack(running)
    recalibrate(model, calibration_batches(4))
    once = state_of(model)
    for norm in running_norms(model):
        norm.get_buffer(norm.moment_name).fill_(torch.nan)
    recalibrate(model, calibration_batches(4)[::-1])
    for key, value in state_of(model).items():
        assert_close(value, once[key], what=key)


def test_training_after_recalibration_is_that_of_a_model_with_the_same_state(running):
    model = trained_stack(running)
    recalibrate(model, calibration_batches(3))
    other = Stack(running).train()
    other.load_state_dict(model.state_dict())
    x, mask, dy = tensors(rng(9))
    for each in (model, other):
        torch.manual_seed(1)
        each(x, mask).backward(dy)
    assert_states_equal(model, other)


def test_recalibration_that_fails_or_reaches_no_batch_restores(running):
    model = trained_stack(running)
    before, modes = state_of(model), [module.training for module in model.modules()]
    with pytest.raises(KeyError), torch.no_grad(), recalibrating(model):
        model(torch.randn(4, 3, CHANNELS))
        raise KeyError("no such file")
    assert_state_unchanged(model, before)
    assert [module.training for module in model.modules()] == modes
    with recalibrating(model):  # also with a graph and a backward
        model.second(torch.full((4, 3, CHANNELS), torch.nan, requires_grad=True)).sum().backward()
    assert_state_unchanged(model, before)


# Several ranks.

RANK_STEPS = 8
RANK_WARMUP = 4
#: Sentences of each rank: uneven.
SHARDS = {2: [5, 2], 3: [4, 3, 2]}


def rank_batches(world, empty_last=False):
    """Batches (T, B, C) with masks and output gradients, float64.

    With ``empty_last`` the last rank has no real token in every second batch.
    """
    generator = torch.Generator().manual_seed(world)
    total = sum(SHARDS[world])
    for step in range(RANK_STEPS):
        time = 3 + step % 3
        x = torch.randn(time, total, CHANNELS, generator=generator, dtype=torch.float64) * (1 + 0.3 * step)
        dy = torch.randn(time, total, CHANNELS, generator=generator, dtype=torch.float64)
        lengths = torch.randint(1, time + 1, (total, 1), generator=generator)
        mask = torch.arange(time) >= lengths
        if empty_last and step % 2:
            mask[-SHARDS[world][-1] :] = True
        yield x, dy * mask.t().logical_not().unsqueeze(-1), mask


def shard(batches, world, rank):
    start = sum(SHARDS[world][:rank])
    part = slice(start, start + SHARDS[world][rank])
    return [(x[:, part], dy[:, part], mask[part]) for x, dy, mask in batches]


def rank_norm(case, sync):
    return case.build(4, psi_warmup_updates=RANK_WARMUP, alpha_fwd=0.8, alpha_bwd=0.7, sync=sync).double()


def run_steps(norm, batches, with_updates=True, recomputed=False, scaled=False):
    """Forward and backward over ``batches``; what each step gave.

    ``scaled``: the loss has another scale in each step, and no gradient reaches every third step.
    """
    record = []
    for step, (x, dy, mask) in enumerate(batches):
        if with_updates:
            norm.set_num_updates(step)
        frozen, scale = scaled and step % 3 == 2, 4.0**step if scaled else 1.0
        set_loss_scale(norm, scale)
        x = x.clone().requires_grad_(not frozen)
        norm.requires_grad_(not frozen).zero_grad()
        y = checkpoint(norm, x, mask, use_reentrant=True) if recomputed else norm(x, mask)
        if not frozen:
            y.backward(dy * scale)
        gradients = {"dx": x, "dw": norm.weight, "db": norm.bias}
        record.append({key: torch.zeros_like(t) if frozen else t.grad / scale for key, t in gradients.items()})
        record[-1]["y"] = y.detach()
        record[-1]["state"] = state_of(norm)
    return record


@contextlib.contextmanager
def counted_all_reduces():
    """Collects the ``async_op`` of every call of ``torch.distributed.all_reduce``."""
    original, calls = dist.all_reduce, []

    def counting(*args, **kwargs):
        calls.append(bool(kwargs.get("async_op")))
        return original(*args, **kwargs)

    dist.all_reduce = counting
    try:
        yield calls
    finally:
        dist.all_reduce = original


#: Name -> arguments of run_steps, and whether a rank has batches without a real token.
RANK_RUNS = {
    "with updates": ({"with_updates": True}, True),
    "without updates": ({"with_updates": False}, False),
    "recomputed": ({"with_updates": True, "recomputed": True}, True),
    "scaled, frozen in some steps": ({"scaled": True}, True),
}


def on_ranks(rank, world, chosen):
    """All that the tests below look at, by norm: processes are slow to start."""
    found = {}
    for case in chosen:
        mine = found[str(case)] = {}
        for name, (options, empty_last) in RANK_RUNS.items():
            batches = shard(rank_batches(world, empty_last), world, rank)
            mine[name] = run_steps(rank_norm(case, sync=True), batches, **options)
        batches = shard(rank_batches(world), world, rank)
        mine["faults"] = []
        for where in ("x", "dy", "dy, frozen input"):
            norm = rank_norm(case, sync=True)
            for step, (x, dy, mask) in enumerate(batches):
                norm.set_num_updates(step)
                before = state_of(norm)
                x, dy, mask = x.clone(), dy.clone(), mask.clone()
                faulty = step in (2, 6)
                if faulty and rank == world - 1:
                    (x if where == "x" else dy)[0, 0, 1] = torch.inf
                    mask[0, 0] = False
                norm(x.requires_grad_("frozen" not in where), mask).backward(dy)
                mine["faults"].append((faulty, before, state_of(norm)))
        # A rank without data of its own repeats a batch that is to count for nothing.
        norm = rank_norm(case, sync=True)
        norm.ignoring = rank == world - 1
        mine["ignoring"] = run_steps(norm, batches)[-1]["state"]
        # Unsynchronized, and trained on one rank only.
        norms = torch.nn.ModuleList(rank_norm(case, sync=False) for _ in range(2))
        run_steps(norms[0], batches)
        if rank == 0:
            run_steps(norms[1], batches[:3])
            norms.state_dict()  # a single rank may save
        before = [state_of(norm) for norm in norms]
        with counted_all_reduces() as calls:
            average_running_stats(norms)
        mine["average"] = before, [state_of(norm) for norm in norms], len(calls)
    return found


_ranks: dict[tuple, list] = {}


def ranks_of(config, world=2):
    """Results of :func:`on_ranks` for all norms, computed once."""
    chosen = [case for case in cases(config.getoption("norm_names", None)) if issubclass(case.cls, RunningNorm)]
    key = (world, *chosen)
    if key not in _ranks:
        modules = tuple(config.getoption("norm_modules", None) or ())
        _ranks[key] = run_ranks(on_ranks, world, chosen, norm_modules=modules)
    return _ranks[key]


@pytest.mark.parametrize("name", RANK_RUNS)
def test_ranks_on_shards_give_what_one_gives_on_the_whole_batch(running, name, pytestconfig):
    assert_ranks_equal_one(running, name, 2, ranks_of(pytestconfig))


def assert_ranks_equal_one(running, name, world, ranks):
    options, empty_last = RANK_RUNS[name]
    whole = run_steps(rank_norm(running, sync=False), rank_batches(world, empty_last), **options)
    close = dict(rtol=1e-6, atol=1e-6)
    for step, expected in enumerate(whole):
        parts = [rank[str(running)][name][step] for rank in ranks]
        for key in ("y", "dx"):
            torch.testing.assert_close(torch.cat([part[key] for part in parts], 1), expected[key], **close)
        for key in ("dw", "db"):
            torch.testing.assert_close(sum(part[key] for part in parts), expected[key], **close)
        for part in parts:
            for key, value in expected["state"].items():
                torch.testing.assert_close(part["state"][key], value, **close, msg=f"step {step}: {key}")
                assert torch.equal(part["state"][key], parts[0]["state"][key]), f"ranks differ in {key}"


def test_a_fault_on_one_rank_changes_the_state_of_none(running, pytestconfig):
    for rank in ranks_of(pytestconfig):
        for number, (faulty, before, after) in enumerate(rank[str(running)]["faults"]):
            assert torch.equal(after[COUNT], before[COUNT] + (not faulty)), number
            for key, value in after.items():
                assert value.isfinite().all(), key
                assert not faulty or torch.equal(value, before[key]), key


def test_a_rank_whose_batches_are_ignored_counts_for_nothing(running, pytestconfig):
    first, second = (rank[str(running)]["ignoring"] for rank in ranks_of(pytestconfig))
    first_only = run_steps(rank_norm(running, sync=False), shard(rank_batches(2), 2, 0))[-1]["state"]
    for key, value in first_only.items():
        torch.testing.assert_close(first[key], value, rtol=1e-6, atol=1e-6, msg=key)
        assert torch.equal(first[key], second[key]), key


def test_average_over_the_ranks_does_not_depend_on_what_each_has_trained(running, pytestconfig):
    found = [rank[str(running)]["average"] for rank in ranks_of(pytestconfig)]
    mean_name, moment_name = running.cls.mean_name, running.cls.moment_name
    for place in range(2):
        befores, afters = ([each[part][place] for each in found] for part in (0, 1))
        assert not all(torch.equal(befores[0][key], befores[1][key]) for key in befores[0])
        expected = {key: (befores[0][key].double() + befores[1][key].double()) / 2 for key in befores[0]}
        if mean_name is not None:
            squares = [each[moment_name].double() + each[mean_name].double() ** 2 for each in befores]
            expected[moment_name] = sum(squares) / 2 - expected[mean_name] ** 2
        expected[COUNT] = expected[COUNT].round()
        for key, value in expected.items():
            torch.testing.assert_close(afters[0][key].double(), value, rtol=1e-6, atol=1e-9, msg=key)
            assert torch.equal(afters[0][key], afters[1][key]), key
    assert [calls for *_, calls in found] == [1, 1]


def test_without_several_ranks_sync_changes_nothing(running):
    norms = [rank_norm(running, sync) for sync in (True, False)]
    assert_same(*(some_steps(norm) for norm in norms))
    assert not average_running_stats(norms[0])
