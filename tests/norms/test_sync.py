"""Statistics over several workers: K processes on shards of a batch give what one gives on the whole batch."""

import copy
import os

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.utils.checkpoint import checkpoint

from pn_fairseq.norms import build_norm

STATEFUL = ["batch", "power-v", "power"]
CHANNELS = 6
STEPS = 12
WARMUP = 4
#: Sentences of each worker: uneven, and the last one's are all padding.
SHARDS = {2: [5, 2], 3: [4, 3, 2]}


def make_batches(world: int, empty_last: bool):
    """Batches (T, B, C) with masks and output gradients, float64; with ``empty_last`` the last worker has no token."""
    generator = torch.Generator().manual_seed(world)
    total = sum(SHARDS[world])
    for step in range(STEPS):
        time = 3 + step % 3
        x = torch.randn(time, total, CHANNELS, generator=generator, dtype=torch.float64) * (1 + 0.3 * step)
        dy = torch.randn(time, total, CHANNELS, generator=generator, dtype=torch.float64)
        lengths = torch.randint(1, time + 1, (total, 1), generator=generator)
        mask = torch.arange(time) >= lengths
        if empty_last:
            mask[-SHARDS[world][-1] :] = True
        yield x, dy * mask.t().logical_not().unsqueeze(-1), mask


def make_norm(name: str, sync: bool):
    norm = build_norm(
        name, CHANNELS, layer_scale_groups=2, psi_warmup_updates=WARMUP, alpha_fwd=0.8, alpha_bwd=0.7, sync=sync
    ).double()
    with torch.no_grad():
        norm.weight.copy_(torch.linspace(0.5, 1.5, CHANNELS))
        norm.bias.copy_(torch.linspace(-1, 1, CHANNELS))
    return norm


def run_steps(norm, batches, told: bool, checkpointed: bool = False) -> list[dict]:
    """Forward and backward over ``batches``; what each step gave."""
    record = []
    for step, (x, dy, mask) in enumerate(batches):
        if told:
            norm.set_num_updates(step)
        x = x.clone().requires_grad_()
        norm.zero_grad()
        y = checkpoint(norm, x, mask, use_reentrant=True) if checkpointed else norm(x, mask)
        y.backward(dy)
        state = {key: value.clone() for key, value in norm.state_dict().items()}
        record.append({"y": y.detach(), "dx": x.grad, "dw": norm.weight.grad, "db": norm.bias.grad, "state": state})
    norm.eval()
    record.append({"y": norm(x, mask).detach()})
    return record


def shard(batches, world: int, rank: int):
    start = sum(SHARDS[world][:rank])
    part = slice(start, start + SHARDS[world][rank])
    return [(x[:, part], dy[:, part], mask[part]) for x, dy, mask in batches]


CASES = [
    (name, empty_last, told, checkpointed)
    for name in STATEFUL
    for empty_last in (False, True)
    for told, checkpointed in ((True, False), (False, False), (True, True))
]


def equality_worker(rank: int, world: int, folder: str) -> None:
    record = {}
    for case in CASES:
        name, empty_last, told, checkpointed = case
        batches = shard(list(make_batches(world, empty_last)), world, rank)
        record[case] = run_steps(make_norm(name, sync=True), batches, told, checkpointed)
    torch.save(record, f"{folder}/{rank}.pt")


def start(rank: int, work, world: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=world)
    try:
        work(rank, world, folder)
    finally:
        dist.destroy_process_group()


def run_workers(work, world: int, folder) -> list:
    mp.spawn(start, args=(work, world, str(folder)), nprocs=world)
    return [torch.load(f"{folder}/{rank}.pt") for rank in range(world)]


@pytest.fixture(scope="module", params=[2, 3])
def equality(request, implementation, tmp_path_factory):
    world = request.param
    return world, run_workers(equality_worker, world, tmp_path_factory.mktemp(f"world{world}"))


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)))
def test_workers_on_shards_give_what_one_gives_on_the_whole_batch(equality, case):
    world, workers = equality
    name, empty_last, told, checkpointed = case
    whole = run_steps(make_norm(name, sync=False), make_batches(world, empty_last), told, checkpointed)
    close = dict(rtol=1e-6, atol=1e-6)
    for step, expected in enumerate(whole):
        parts = [worker[case][step] for worker in workers]
        assert torch.allclose(torch.cat([part["y"] for part in parts], dim=1), expected["y"], **close), step
        if "dx" not in expected:
            continue
        assert torch.allclose(torch.cat([part["dx"] for part in parts], dim=1), expected["dx"], **close), step
        for key in ("dw", "db"):
            assert torch.allclose(sum(part[key] for part in parts), expected[key], **close), (step, key)
        for part in parts:
            for key, value in expected["state"].items():
                assert torch.allclose(part["state"][key].double(), value.double(), **close), (step, key)
                # Not close but the same: agreed statistics.
                assert torch.equal(part["state"][key], parts[0]["state"][key]), (step, key)


class Watch:
    """Counts collective calls: waited for at once, started for later, and how many of these have been waited for."""

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


def waiting_worker(rank: int, world: int, folder: str) -> None:
    """Collective calls at each point of a step of PN after the warm-up, by what comes after the step."""
    watch = dist.all_reduce = Watch()
    x, dy, mask = shard(list(make_batches(world, False)), world, rank)[3]
    seen = {}
    looks = {
        "next forward": lambda norm: norm(x, mask),
        "evaluation": lambda norm: norm.eval()(x, mask),
        "saving": lambda norm: norm.state_dict(),
        "copying": lambda norm: copy.deepcopy(norm),
        "next update": lambda norm: norm.set_num_updates(6),
        "flush": lambda norm: norm.flush(),
    }
    for look, do in looks.items():
        norm = make_norm("power", sync=True)
        norm.set_num_updates(WARMUP)
        before = watch.counts()
        y = norm(x.requires_grad_(), mask)
        after_forward = watch.counts()
        y.backward(dy)
        after_backward = watch.counts()
        stale = norm.running_psi2.clone()
        do(norm)
        norm.flush()
        points = (before, after_forward, after_backward, watch.counts())
        steps = [
            tuple(b - a for a, b in zip(one, two, strict=True)) for one, two in zip(points, points[1:], strict=False)
        ]
        seen[look] = steps, bool((stale == 1.0).all()), norm.running_psi2.clone()
    torch.save(seen, f"{folder}/{rank}.pt")


def test_no_step_of_pn_waits_for_another_worker(tmp_path):
    for seen in run_workers(waiting_worker, 2, tmp_path):
        for look, (steps, was_on_its_way, psi2) in seen.items():
            forward, backward, afterwards = steps
            assert forward == (0, 1, 0), look  # started one sum, waited for none
            assert backward == (0, 1, 0), look
            assert was_on_its_way, look
            again = 1 if look == "next forward" else 0
            assert afterwards == (0, again, 2 + again), look
            assert not torch.equal(psi2, torch.ones(CHANNELS)), look


def fault_worker(rank: int, world: int, folder: str) -> None:
    """One worker alone has an infinity, in its input or in its gradient; then all go on."""
    record = {}
    batches = shard(list(make_batches(world, False)), world, rank)
    for name in STATEFUL:
        for where in ("x", "dy", "dy, frozen input"):
            norm = make_norm(name, sync=True)
            for step, (x, dy, mask) in enumerate(batches):
                norm.set_num_updates(step)
                x, dy = x.clone(), dy.clone()
                if step in (2, 7) and rank == world - 1:
                    (x if where == "x" else dy)[0, 0, 1] = float("inf")
                    mask = mask.clone()
                    mask[0, 0] = False
                before = copy.deepcopy(norm.state_dict())
                norm(x.requires_grad_("frozen" not in where), mask).backward(dy)
                if step in (2, 7):
                    record[name, where, step] = before, copy.deepcopy(norm.state_dict())
            record[name, where, "end"] = norm.state_dict()
    torch.save(record, f"{folder}/{rank}.pt")


def test_a_fault_on_one_worker_changes_the_state_of_none(tmp_path):
    records = run_workers(fault_worker, 2, tmp_path)
    for record in records:
        for case, states in record.items():
            if case[2] == "end":
                for key, value in states.items():
                    assert torch.equal(value, records[0][case][key]), (case, key)
                    assert value.isfinite().all()
                assert int(states["num_batches_tracked"]) == STEPS - 2, case
                continue
            before, after = states
            for key in before:
                if key not in ("weight", "bias"):
                    assert torch.equal(before[key], after[key]), (case, key)


@pytest.mark.parametrize("name", STATEFUL)
def test_without_distribution_sync_changes_nothing(name):
    batches = list(make_batches(2, False))
    for one, other in zip(
        run_steps(make_norm(name, True), batches, True), run_steps(make_norm(name, False), batches, True), strict=True
    ):
        assert torch.equal(one["y"], other["y"])


def test_one_worker_may_save_alone(tmp_path):
    """fairseq asks rank 0 alone for the state; a collective call there would hang."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    run_workers(saving_worker, 2, tmp_path)


def saving_worker(rank: int, world: int, folder: str) -> None:
    norm = make_norm("power", sync=True)
    norm.set_num_updates(WARMUP)
    x, dy, mask = shard(list(make_batches(world, False)), world, rank)[3]
    norm(x.requires_grad_(), mask).backward(dy)
    if rank == 0:
        norm.state_dict()
    torch.save({}, f"{folder}/{rank}.pt")
