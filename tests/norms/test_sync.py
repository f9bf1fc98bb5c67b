"""Three ranks, for some norms, and what PN's synchronisation costs. The shared suite has two ranks, for all norms."""

import contextlib
import itertools

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from pn_fairseq.norms import build_norm
from pn_fairseq.testing.helpers import CHANNELS
from pn_fairseq.testing.ranks import run_ranks
from pn_fairseq.testing.test_ranks import (
    RANK_RUNS,
    assert_ranks_equal_one,
    cases,
    rank_batches,
    rank_norm,
    run_steps,
    shard,
)

CASES = cases(["power", "batch"])
BATCH = cases(["batch"])[0]


class Watch:
    """Counts the all-reduces: those that wait at once, those that were started, and the waits for these."""

    def __init__(self):
        self.at_once = self.started = self.waited = 0
        self.original = dist.all_reduce

    def __call__(self, tensor, *args, async_op=False, **kwargs):
        work = self.original(tensor, *args, async_op=async_op, **kwargs)
        if not async_op:
            self.at_once += 1
            return work
        self.started += 1
        watch = self

        class Work:
            def wait(self):
                watch.waited += 1
                return work.wait()

        return Work()

    def counts(self):
        return self.at_once, self.started, self.waited


LOOKS = {
    "next forward": lambda norm, x, mask: norm(x, mask),
    "evaluation": lambda norm, x, mask: norm.eval()(x, mask),
    "flush": lambda norm, x, mask: norm.flush(),
    "reading": lambda norm, x, mask: norm.running_psi2,
}


def work(rank, world):
    """The runs of the shared suite, and the all-reduces at each point of a step of PN."""
    found = {}
    for case in CASES:
        found[str(case)] = {
            name: run_steps(rank_norm(case, True), shard(rank_batches(world, empty_last), world, rank), **options)
            for name, (options, empty_last) in RANK_RUNS.items()
            if name == "with updates"
        }
    x, dy, mask = shard(rank_batches(world), world, rank)[3]
    dist.all_reduce = watch = Watch()
    for updates in (0, 100):
        for look, do in LOOKS.items():
            norm = build_norm("power", x.size(-1), psi_warmup_updates=4, sync=True).double()
            norm.set_num_updates(updates)
            psi2 = norm.running_psi2  # what is read later is up to date
            points = [watch.counts()]
            y = norm(x.clone().requires_grad_(), mask)
            points.append(watch.counts())
            y.backward(dy)
            points.append(watch.counts())
            stale = psi2.clone()
            do(norm, x, mask)
            points.append(watch.counts())
            steps = [tuple(b - a for a, b in zip(one, two, strict=True)) for one, two in itertools.pairwise(points)]
            found[updates, look] = steps, stale, norm.running_psi2.clone()
    return found


@pytest.fixture(scope="module")
def three_ranks():
    return run_ranks(work, 3)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_three_ranks_on_shards_give_what_one_gives_on_the_whole_batch(three_ranks, case):
    assert_ranks_equal_one(case, "with updates", 3, three_ranks)


@pytest.mark.parametrize("look", LOOKS)
def test_a_step_of_pn_after_the_warmup_has_one_all_reduce_and_waits_for_it_in_flush(three_ranks, look):
    for rank in three_ranks:
        (forward, backward, afterwards), stale, psi2 = rank[100, look]
        assert forward == (0, 0, 0)
        assert backward == (0, 1, 0), "started, and not waited for"
        assert afterwards == (0, 0, 1)
        assert torch.equal(stale, torch.ones_like(stale)) and not torch.equal(psi2, stale)


def test_a_step_of_pn_in_the_warmup_needs_psi_at_once(three_ranks):
    for rank in three_ranks:
        (forward, backward, afterwards), *_ = rank[0, "flush"]
        assert (forward, backward, afterwards) == ((1, 0, 0), (0, 1, 0), (0, 0, 1))


def seen_states(rank, world, wrapper=nn.parallel.DistributedDataParallel):
    """The state that each forward of an unsynchronised norm finds, here under DDP."""
    norm = build_norm("power", 8, psi_warmup_updates=2)
    seen = []
    norm.register_forward_pre_hook(lambda module, args: seen.append(module.state_dict()))
    model = wrapper(norm)
    torch.manual_seed(rank)
    for step in range(5):
        norm.set_num_updates(step)
        model(torch.randn(4, 3, 8) * (rank + 1)).square().sum().backward()
        seen[-1] = {name: value.clone() for name, value in seen[-1].items()}
    return seen


def test_ddp_gives_every_rank_the_state_of_the_first_one():
    """Its broadcast of buffers, which is on by default, reads the state up to date: no rank goes on with a mixture."""
    first, second = run_ranks(seen_states, 2)
    alone = seen_states(0, 1, nn.Sequential)
    for one, other, expected in zip(first, second, alone, strict=True):
        for name, value in expected.items():
            assert torch.equal(one[name], value) and torch.equal(other[name], value), name


class Net(nn.Module):
    """A linear map before a norm, whose gradients need the statistics of all ranks."""

    def __init__(self, norm):
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(CHANNELS, CHANNELS, dtype=torch.float64)
        self.norm = norm

    def forward(self, x, mask):
        return self.norm(self.linear(x), mask)


def sharded(model):
    for part in (model.linear, model):  # the norm's parameters belong to the root
        fully_shard(part, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    return model


#: Name -> how a model is wrapped, and whether the gradients of every second batch stay on their rank until the next.
WRAPPERS = {
    "DDP": (nn.parallel.DistributedDataParallel, False),
    "DDP, no_sync": (nn.parallel.DistributedDataParallel, True),
    "FSDP2": (sharded, False),
}


def wrapped_steps(model, batches, accumulate, lr):
    """The state after each update."""
    optimizer, record = torch.optim.SGD(model.parameters(), lr=lr), []
    for step, (x, dy, mask) in enumerate(batches):
        hold = accumulate and step % 2 == 0
        with model.no_sync() if hold and hasattr(model, "no_sync") else contextlib.nullcontext():
            model(x, mask).backward(dy)
        if hold:
            continue
        optimizer.step()
        optimizer.zero_grad()
        state = {key.removeprefix("module."): value for key, value in model.state_dict().items()}
        record.append({key: getattr(value, "full_tensor", value.clone)() for key, value in state.items()})
    return record


def on_wrapped_ranks(rank, world):
    """The ranks have the mean of their gradients, and one process has the sum."""
    batches = shard(rank_batches(world), world, rank)
    return {
        name: wrapped_steps(wrap(Net(rank_norm(BATCH, True))), batches, accumulate, 0.1 * world)
        for name, (wrap, accumulate) in WRAPPERS.items()
    }


@pytest.fixture(scope="module")
def wrapped():
    return run_ranks(on_wrapped_ranks, 3)


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_wrapped_models_on_three_ranks_train_as_one_on_the_whole_batch(wrapped, wrapper):
    expected = wrapped_steps(Net(rank_norm(BATCH, False)), rank_batches(3), WRAPPERS[wrapper][1], 0.1)
    for rank in wrapped:
        for ours, theirs in zip(rank[wrapper], expected, strict=True):
            for key, value in theirs.items():
                torch.testing.assert_close(ours[key], value, rtol=1e-6, atol=1e-6, msg=f"{wrapper}: {key}")
