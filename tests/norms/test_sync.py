"""Three ranks, for some norms, and what PN's synchronisation costs.

The shared suite has two ranks, for all norms.
"""

import contextlib
import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    FullyShardedDataParallel,
    MixedPrecision,
    MixedPrecisionPolicy,
    fully_shard,
)

from pn_fairseq.norms import RunningNorm, build_norm
from pn_fairseq.testing.helpers import CHANNELS, cases
from pn_fairseq.testing.ranks import run_ranks
from pn_fairseq.testing.test_ranks import (
    RANK_RUNS,
    RANK_STEPS,
    SHARDS,
    assert_ranks_equal_one,
    rank_batches,
    rank_norm,
    run_steps,
    shard,
)

BATCH, POWER = cases(["batch"])[0], cases(["power"])[0]
BF16 = torch.bfloat16


def noting(original, events):
    """``original``, the all-reduce, with a note of each call, and of each wait for one that was
    only started.
    """

    def all_reduce(*args, async_op=False, **kwargs):
        started = original(*args, async_op=async_op, **kwargs)
        events.append("started" if async_op else "at once")
        return (
            SimpleNamespace(wait=lambda: events.append("waited") or started.wait())
            if async_op
            else started
        )

    return all_reduce


def all_reduces(rank, world):
    """The all-reduces in the forward and in the backward of a step of PN, and psi^2 when the
    backward has returned.
    """
    found = {}
    x, dy, mask = shard(rank_batches(world), world, rank)[3]
    events = []
    dist.all_reduce = noting(dist.all_reduce, events)
    for updates in (0, 100):
        norm = build_norm("power", x.size(-1), psi_warmup_updates=4, sync=True).double()
        norm.set_num_updates(updates)
        events.clear()
        leaf = x.clone().requires_grad_()
        leaf.register_hook(lambda gradient: events.append("dx"))
        y = norm(leaf, mask)
        forward, events[:] = events[:], []
        y.backward(dy)
        found[updates] = forward, events[:], norm.running_psi2.clone()
    return found


def test_three_ranks_on_shards_give_what_one_gives_on_the_whole_batch(ranks):
    assert_ranks_equal_one(POWER, "with updates", 3, ranks)


def test_a_step_of_pn_after_the_warmup_waits_for_one_all_reduce_at_the_end_of_its_backward(ranks):
    for rank in ranks:
        forward, backward, psi2 = rank[100]
        assert (forward, backward) == ([], ["started", "dx", "waited"])
        assert not torch.equal(psi2, torch.ones_like(psi2))


def test_a_step_of_pn_in_the_warmup_needs_psi_at_once(ranks):
    for rank in ranks:
        assert rank[0][:2] == (["at once"], ["started", "dx", "waited"])


def backward_twice(rank):
    """dx of two backwards of a retained graph, and the number of steps."""
    norm, x = build_norm("power", 8, sync=True), torch.randn(4, 3, 8, requires_grad=True)
    y = norm(x)
    (once,) = torch.autograd.grad(y.sum(), x, retain_graph=True)
    (twice,) = torch.autograd.grad(y.sum(), x)
    return once, twice, norm.num_batches_tracked


def test_two_backwards_of_a_retained_graph_count_once(ranks):
    for rank in ranks:
        once, twice, steps = rank["twice"]
        assert torch.equal(once, twice) and steps == 1


def seen_states(rank, wrapper=nn.parallel.DistributedDataParallel):
    """The state that each forward of an unsynchronised norm finds, here under DDP."""
    norm = build_norm("power", 8, psi_warmup_updates=2)
    seen = []
    norm.register_forward_pre_hook(
        lambda module, args: seen.append(copy.deepcopy(module.state_dict()))
    )
    model = wrapper(norm)
    torch.manual_seed(rank)
    for step in range(5):
        norm.set_num_updates(step)
        model(torch.randn(4, 3, 8) * (rank + 1)).square().sum().backward()
        seen[-1] = {name: value.clone() for name, value in seen[-1].items()}
    return seen


def test_ddp_gives_every_rank_the_state_of_the_first_one(ranks):
    """Its broadcast of buffers, which is on by default, reads the state up to date: no rank goes
    on with a mixture.
    """
    alone = seen_states(0, nn.Sequential)
    for rank in ranks:
        for seen, expected in zip(rank["seen"], alone, strict=True):
            assert all(torch.equal(seen[name], value) for name, value in expected.items())


class Net(nn.Module):
    """A linear map before a norm, whose gradients need the statistics of all ranks."""

    def __init__(self, norm):
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(CHANNELS, CHANNELS, dtype=torch.float64)
        self.norm = norm

    def forward(self, x, mask):
        return self.norm(self.linear(x), mask)


def ddp(model, sync):
    return nn.parallel.DistributedDataParallel(model, broadcast_buffers=sync)


def fsdp1(model, sync, mixed_precision=None):
    return FullyShardedDataParallel(
        model, mixed_precision=mixed_precision, device_id=torch.device("cpu")
    )


def fsdp2(model, sync, **options):
    for part in (model.linear, model):  # the norm's parameters belong to the root
        fully_shard(part, mesh=init_device_mesh("cpu", (dist.get_world_size(),)), **options)
    return model


@dataclass(frozen=True)
class Wrapper:
    """``wrap(model, sync)``. ``accumulate``: gradients of every second batch stay on their rank
    until the next. ``rounding``: of the whole training run.
    """

    wrap: Callable
    accumulate: bool = False
    dtype: torch.dtype = torch.float64
    autocast: bool = False
    rounding: float = 1e-6


PLAIN = Wrapper(ddp)
#: bfloat16 rounds each of the updates by 2^-8, and momentum doubles an update.
MIXED = {"dtype": torch.float32, "rounding": 2 * RANK_STEPS * 2**-8}
WRAPPERS = {
    "DDP": PLAIN,
    "DDP, no_sync": Wrapper(ddp, accumulate=True),
    "DDP, autocast": Wrapper(ddp, autocast=True, **MIXED),
    "FSDP1": Wrapper(fsdp1),
    "FSDP1, mixed": Wrapper(
        partial(fsdp1, mixed_precision=MixedPrecision(BF16, torch.float32, BF16)), **MIXED
    ),
    "FSDP2": Wrapper(fsdp2),
    "FSDP2, mixed": Wrapper(
        partial(fsdp2, mp_policy=MixedPrecisionPolicy(BF16, torch.float32)), **MIXED
    ),
}
UPDATES_SAVED = 4


def new_net(sync, wrapper=PLAIN, case=BATCH):
    return Net(rank_norm(case, sync)).to(wrapper.dtype)


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.5)


def wrapped_steps(model, batches, wrapper=PLAIN, scale=1.0, optimizer=None):
    """The state after each update, and the inputs of the norm with their masks.

    ``scale``: of the loss.
    """
    optimizer, states, inputs = optimizer or sgd(model), [], []
    norm = next(module for module in model.modules() if isinstance(module, RunningNorm))
    hook = norm.register_forward_pre_hook(
        lambda module, args: inputs.append((args[0].detach(), args[1]))
    )
    for step, (x, dy, mask) in enumerate(batches):
        hold = wrapper.accumulate and step % 2 == 0
        with model.no_sync() if hold and hasattr(model, "no_sync") else contextlib.nullcontext():
            with torch.autocast("cpu", BF16, enabled=wrapper.autocast):
                y = model(x.to(wrapper.dtype), mask)
            y.backward((dy * scale).to(y.dtype))
        if hold:
            continue
        optimizer.step()
        optimizer.zero_grad()
        state = {key.removeprefix("module."): value for key, value in model.state_dict().items()}
        states.append(
            {key: getattr(value, "full_tensor", value.clone)() for key, value in state.items()}
        )
    hook.remove()
    return states, inputs


def loaded(model, folder):
    """The optimizer of ``model``, both as the distributed checkpoint in ``folder`` has them."""
    optimizer = sgd(model)
    state = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    dcp.load(state, checkpoint_id=folder, no_dist=not dist.is_initialized())
    set_state_dict(
        model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
    )
    return optimizer


def joined(model, batches, **options):
    """States and inputs of the steps under ``join``, and the error; the ranks have 2, 3 and 4
    batches.
    """
    batches, optimizer, states, inputs = batches[: 2 + dist.get_rank()], sgd(model), [], []
    try:
        with model.join(**options):
            for batch in batches:
                state, step_inputs = wrapped_steps(model, [batch], optimizer=optimizer)
                states, inputs = states + state, inputs + step_inputs
    except RuntimeError as error:
        return states, inputs, str(error)
    return states, inputs, ""


def on_ranks(rank, world, folder):
    """All that the tests look at: processes are slow to start. Wrapped models have the mean of the
    ranks' gradients, as one process whose loss is divided by their number.
    """
    options, empty_last = RANK_RUNS["with updates"]
    steps = run_steps(
        rank_norm(POWER, True), shard(rank_batches(world, empty_last), world, rank), **options
    )
    found = {
        str(POWER): {"with updates": steps},
        "seen": seen_states(rank),
        "twice": backward_twice(rank),
    }
    batches = shard(rank_batches(world), world, rank)
    for name, wrapper in WRAPPERS.items():
        for sync, case in ((True, BATCH), (False, POWER)):
            found[name, sync] = wrapped_steps(
                wrapper.wrap(new_net(sync, wrapper, case), sync), batches, wrapper
            )
    model = fsdp2(new_net(True), True)
    optimizer = sgd(model)
    wrapped_steps(model, batches[:UPDATES_SAVED], optimizer=optimizer)
    dcp.save(
        dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True)),
        checkpoint_id=folder,
    )
    again = fsdp2(new_net(True), True)
    found["loaded"] = wrapped_steps(again, batches[UPDATES_SAVED:], optimizer=loaded(again, folder))
    found["join, refused"] = joined(ddp(new_net(True), True), batches)
    found["join, thrown"] = joined(
        ddp(new_net(True), True), batches, throw_on_early_termination=True
    )
    found["join, apart"] = joined(ddp(new_net(False, case=POWER), False), batches)
    model = ddp(new_net(True), True)
    optimizer = sgd(model)
    wrapped_steps(model, batches[:UPDATES_SAVED], optimizer=optimizer)
    if rank == world - 1:  # its data has ended
        x, dy, mask = batches[0]
        batches, model.module.norm.ignoring = [(x, 0 * dy, mask)] * RANK_STEPS, True
    found["repeating"] = wrapped_steps(model, batches[UPDATES_SAVED:], optimizer=optimizer)
    return found | all_reduces(rank, world)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return tmp_path_factory.mktemp("checkpoint")


@pytest.fixture(scope="module")
def ranks(checkpoint):
    return run_ranks(on_ranks, 3, str(checkpoint))


def assert_states(ours, expected, rounding):
    """``rounding``: of each tensor, relative to its Euclidean norm, or to 1 where that is
    smaller.
    """
    for one, other in zip(ours, expected, strict=True):
        for key, value in other.items():
            assert one[key].dtype == value.dtype, key
            error = (one[key] - value).double().norm() / value.double().norm().clamp(min=1.0)
            assert error <= rounding, key


def whole(wrapper=PLAIN):
    """The states of one process, which computes by bfloat16 where the ranks do."""
    wrapper = replace(wrapper, autocast=wrapper.dtype == torch.float32)
    return wrapped_steps(new_net(False, wrapper), rank_batches(3), wrapper, 1 / 3)[0]


def replayed(case, *inputs):
    """What a norm in one process evaluates by after ``inputs``: for each rank, its part of each
    batch with its mask.
    """
    norm = rank_norm(case, False).requires_grad_(False)
    for parts in zip(*inputs, strict=True):
        x, mask = zip(*parts, strict=True)
        norm(torch.cat(x, 1), torch.cat(mask))
    return {
        f"norm.{name}": norm.get_buffer(name) for name in (norm.mean_name, norm.moment_name) if name
    }


@pytest.mark.parametrize("name", WRAPPERS)
def test_wrapped_models_on_three_ranks_train_as_one_on_the_whole_batch(ranks, name):
    wrapper = WRAPPERS[name]
    expected = whole(wrapper)
    statistics = replayed(BATCH, *(rank[name, True][1] for rank in ranks))
    for rank in ranks:
        states, _ = rank[name, True]
        assert_states(states, expected, wrapper.rounding)
        assert_states(states[-1:], [statistics], 1e-5)


@pytest.mark.parametrize("name", [*WRAPPERS, "DDP, join"])
def test_without_synchronization_each_rank_has_the_statistics_of_a_process_of_its_own(ranks, name):
    for number, rank in enumerate(ranks):
        states, inputs, *errors = rank["join, apart"] if name == "DDP, join" else rank[name, False]
        assert len(inputs) == (2 + number if name == "DDP, join" else RANK_STEPS) and not any(
            errors
        )
        assert_states(states[-1:], [replayed(POWER, inputs)], 1e-5)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_distributed_checkpoint_is_continued_on_three_ranks_and_in_one_process(ranks, checkpoint):
    expected = whole()[UPDATES_SAVED:]
    for rank in ranks:
        assert_states(rank["loaded"][0], expected, 1e-6)
    model = new_net(False)
    optimizer = loaded(model, str(checkpoint))
    batches = list(rank_batches(3))[UPDATES_SAVED:]
    assert_states(
        wrapped_steps(model, batches, scale=1 / 3, optimizer=optimizer)[0], expected, 1e-6
    )


def test_join_with_synchronized_statistics_ends_with_an_error_on_all_ranks(ranks):
    """As torch's SyncBatchNorm it needs ``throw_on_early_termination=True``, which the error
    names.
    """
    expected = whole()[:2]
    for number, rank in enumerate(ranks):
        states, _, error = rank["join, refused"]
        assert not states and "throw_on_early_termination=True" in error
        states, _, error = rank["join, thrown"]
        assert ("exhausted all inputs" if number == 0 else "Detected at least one rank") in error
        assert_states(states, expected, 1e-6)


def test_a_rank_that_repeats_an_ignored_batch_leaves_updates_and_statistics_to_the_others(ranks):
    batches = list(rank_batches(3))
    for _, dy, mask in batches[UPDATES_SAVED:]:
        mask[-SHARDS[3][-1] :] = True
        dy[:, -SHARDS[3][-1] :] = 0.0
    expected = wrapped_steps(new_net(False), batches, scale=1 / 3)[0][UPDATES_SAVED:]
    for rank in ranks:
        assert_states(rank["repeating"][0], expected, 1e-6)
