"""Several ranks compute what one rank computes."""

from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

from pn_fairseq.norms import average_running_stats, set_loss_scale
from pn_fairseq.testing.helpers import (
    CHANNELS,
    COUNT,
    assert_same,
    running_cases,
    some_steps,
    state_of,
)
from pn_fairseq.testing.ranks import run_ranks

RANK_STEPS = 8
RANK_WARMUP = 4
#: Number of ranks -> uneven numbers of sentences of each rank.
SHARDS = {2: [5, 2], 3: [4, 3, 2]}


def rank_batches(world, empty_last=False):
    """Batches (T, B, C) with masks and output gradients, float64.

    With ``empty_last``, every second batch of the last rank contains no real token.
    """
    generator = torch.Generator().manual_seed(world)
    total = sum(SHARDS[world])
    for step in range(RANK_STEPS):
        time = 3 + step % 3
        x = torch.randn(time, total, CHANNELS, generator=generator, dtype=torch.float64)
        x *= 1 + 0.3 * step
        dy = torch.randn(time, total, CHANNELS, generator=generator, dtype=torch.float64)
        lengths = torch.randint(1, time + 1, (total, 1), generator=generator)
        mask = torch.arange(time) >= lengths
        if empty_last and step % 2:
            mask[-SHARDS[world][-1] :] = True
        yield x, dy * mask.t().logical_not().unsqueeze(-1), mask


def shard(batches, world, rank):
    start = sum(SHARDS[world][:rank])
    part = slice(start, start + SHARDS[world][rank])
    parts = []
    for x, dy, mask in batches:
        parts.append((x[:, part], dy[:, part], mask[part]))
    return parts


def rank_norm(case, sync):
    return case.build(
        4, psi_warmup_updates=RANK_WARMUP, alpha_fwd=0.8, alpha_bwd=0.7, sync=sync
    ).double()


def run_steps(norm, batches, with_updates=True, recomputed=False, scaled=False):
    """Run forward and backward over ``batches``; return the results of each step.

    ``scaled``: the loss has another scale in each step, and no gradient reaches every third step.
    """
    record = []
    for step, (x, dy, mask) in enumerate(batches):
        if with_updates:
            norm.set_num_updates(step)
        frozen = scaled and step % 3 == 2
        scale = 4.0**step if scaled else 1.0
        set_loss_scale(norm, scale)
        x = x.clone().requires_grad_(not frozen)
        norm.requires_grad_(not frozen).zero_grad()
        if recomputed:
            y = checkpoint(norm, x, mask, use_reentrant=True)
        else:
            y = norm(x, mask)
        if not frozen:
            y.backward(dy * scale)
        given = {"y": y.detach(), "state": state_of(norm)}
        for key, leaf in {"x": x, **dict(norm.named_parameters())}.items():
            given[f"d{key}"] = torch.zeros_like(leaf) if frozen else leaf.grad / scale
        record.append(given)
    return record


#: Name -> arguments of run_steps, and whether a rank has batches without a real token.
RANK_RUNS = {
    "with updates": ({"with_updates": True}, True),
    "without updates": ({"with_updates": False}, False),
    "recomputed": ({"with_updates": True, "recomputed": True}, True),
    "scaled, frozen in some steps": ({"scaled": True}, True),
}


def faults_of(case, batches, is_last_rank):
    """Of each step: whether a rank met a number that is not finite, and the state before and after
    it.
    """
    steps = []
    for where in ("x", "dy", "dy, frozen input"):
        norm = rank_norm(case, sync=True)
        for step, (x, dy, mask) in enumerate(batches):
            norm.set_num_updates(step)
            before = state_of(norm)
            x = x.clone()
            dy = dy.clone()
            mask = mask.clone()
            faulty = step in (2, 6)
            if faulty and is_last_rank:
                values = x if where == "x" else dy
                values[0, 0, 1] = torch.inf
                mask[0, 0] = False
            norm(x.requires_grad_("frozen" not in where), mask).backward(dy)
            steps.append((faulty, before, state_of(norm)))
    return steps


def state_while_ignoring(case, batches, ignored):
    """The state after training in which a rank without data of its own repeats batches that are to
    count for nothing.
    """
    norm = rank_norm(case, sync=True)
    norm.ignoring = ignored
    return run_steps(norm, batches)[-1]["state"]


def average_of(case, batches, is_first_rank):
    """The states of two unsynchronized norms, the second trained on the first rank only, before and
    after an average over the ranks, and how many collectives the average needed.
    """
    norms = torch.nn.ModuleList(rank_norm(case, sync=False) for _ in range(2))
    run_steps(norms[0], batches)
    if is_first_rank:
        run_steps(norms[1], batches[:3])
        norms.state_dict()  # a single rank may save
    before = [state_of(norm) for norm in norms]
    with mock.patch.object(dist, "all_reduce", wraps=dist.all_reduce) as all_reduce:
        average_running_stats(norms)
    return before, [state_of(norm) for norm in norms], all_reduce.call_count


def on_ranks(rank, world, chosen):
    """All results that the tests below check, by norm, because processes are slow to start."""
    results = {}
    for case in chosen:
        mine = results[str(case)] = {}
        for name, (options, empty_last) in RANK_RUNS.items():
            batches = shard(rank_batches(world, empty_last), world, rank)
            mine[name] = run_steps(rank_norm(case, sync=True), batches, **options)
        batches = shard(rank_batches(world), world, rank)
        is_last = rank == world - 1
        mine["faults"] = faults_of(case, batches, is_last)
        mine["ignoring"] = state_while_ignoring(case, batches, is_last)
        mine["average"] = average_of(case, batches, rank == 0)
    return results


_ranks: dict[tuple, list] = {}


def ranks_of(config, world=2):
    """Results of :func:`on_ranks` for all norms, computed once."""
    chosen = running_cases(config.getoption("norm_names", None))
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
    batches = rank_batches(world, empty_last)
    whole = run_steps(rank_norm(running, sync=False), batches, **options)
    close = dict(rtol=1e-6, atol=1e-6)
    for step, expected in enumerate(whole):
        parts = [rank[str(running)][name][step] for rank in ranks]
        for key in ("y", "dx"):
            joined = torch.cat([part[key] for part in parts], 1)
            torch.testing.assert_close(joined, expected[key], **close)
        for key in expected.keys() - {"y", "dx", "state"}:
            summed = sum(part[key] for part in parts)
            torch.testing.assert_close(summed, expected[key], **close)
        states = [part["state"] for part in parts]
        for key, value in expected["state"].items():
            for state in states:
                torch.testing.assert_close(state[key], value, **close, msg=f"step {step}: {key}")
                assert torch.equal(state[key], states[0][key]), f"ranks differ in {key}"


def test_a_fault_on_one_rank_changes_the_state_of_none(running, pytestconfig):
    for rank in ranks_of(pytestconfig):
        for number, (faulty, before, after) in enumerate(rank[str(running)]["faults"]):
            assert torch.equal(after[COUNT], before[COUNT] + (not faulty)), number
            for key, value in after.items():
                assert value.isfinite().all(), key
                if faulty:
                    assert torch.equal(value, before[key]), key


def test_a_rank_whose_batches_are_ignored_counts_for_nothing(running, pytestconfig):
    first, second = (rank[str(running)]["ignoring"] for rank in ranks_of(pytestconfig))
    batches = shard(rank_batches(2), 2, 0)
    last = run_steps(rank_norm(running, sync=False), batches)[-1]
    for key, value in last["state"].items():
        torch.testing.assert_close(first[key], value, rtol=1e-6, atol=1e-6, msg=key)
        assert torch.equal(first[key], second[key]), key


def test_average_over_the_ranks_does_not_depend_on_what_each_has_trained(running, pytestconfig):
    results = [rank[str(running)]["average"] for rank in ranks_of(pytestconfig)]
    (befores, afters, calls), (befores_of_second, afters_of_second, calls_of_second) = results
    assert calls == calls_of_second == 1
    mean_name = running.cls.mean_name
    moment_name = running.cls.moment_name
    for norm in range(2):  # 0: trained on both ranks, 1: only on the first
        first = doubled(befores[norm])
        second = doubled(befores_of_second[norm])
        after = afters[norm]
        of_second = afters_of_second[norm]
        differs = [not torch.equal(value, second[key]) for key, value in first.items()]
        assert any(differs)
        expected = {key: (value + second[key]) / 2 for key, value in first.items()}
        if mean_name is not None:
            # the variance is the mean of the squares minus the square of the mean
            squares = [state[moment_name] + state[mean_name] ** 2 for state in (first, second)]
            expected[moment_name] = sum(squares) / 2 - expected[mean_name] ** 2
        expected[COUNT] = expected[COUNT].round()
        torch.testing.assert_close(doubled(after), expected, rtol=1e-6, atol=1e-9)
        for key, value in after.items():
            assert torch.equal(value, of_second[key]), key


def doubled(state):
    return {key: value.double() for key, value in state.items()}


def test_without_several_ranks_sync_changes_nothing(running):
    norms = [rank_norm(running, sync) for sync in (True, False)]
    assert_same(*(some_steps(norm) for norm in norms))
    assert not average_running_stats(norms[0])
