"""Sums over the ranks of a process group, and one set of running statistics for all of them."""

import torch
import torch.distributed as dist
from torch import Tensor, nn


def world_size(group=None) -> int:
    """Number of ranks in ``group`` (None: all); 1 where ``torch.distributed`` is not in use."""
    if not dist.is_available() or not dist.is_initialized():
        return 1
    return dist.get_world_size(group)


def all_reduce_sum(values: Tensor, group=None) -> Tensor:
    """``values`` summed over the ranks of ``group``, a new tensor."""
    total = values.detach().clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    return total


@torch.no_grad()
def average_running_stats(model: nn.Module, group=None) -> bool:
    """Replace the running statistics of every unsynchronised norm of ``model`` by their mean over the ranks.

    Variances are combined about the common mean: var = mean(var_k + mean_k^2) - mean(mean_k)^2. One all-reduce, which
    every rank has to join. Returns whether there was one: not with one rank, nor without such norms.
    """
    from pn_fairseq.norms.base import running_norms

    ranks = world_size(group)
    norms = [norm for norm in running_norms(model) if not norm.synchronises()]
    if ranks == 1 or not norms:
        return False
    states = []
    for norm in norms:
        norm.flush()
        # float64 holds the counters, too: ranks that skipped different batches have different ones.
        state = {name: buffer.double() for name, buffer in norm.named_buffers(recurse=False)}
        if norm.mean_name is not None:
            state[norm.moment_name] = state[norm.moment_name] + state[norm.mean_name].square()
        states.append(state)
    flat = torch.cat([value.flatten() for state in states for value in state.values()])
    parts = iter((all_reduce_sum(flat, group) / ranks).split([v.numel() for state in states for v in state.values()]))
    for norm, state in zip(norms, states, strict=True):
        averaged = {name: next(parts).view_as(value) for name, value in state.items()}
        if norm.mean_name is not None:
            averaged[norm.moment_name] = averaged[norm.moment_name] - averaged[norm.mean_name].square()
        norm.discard_pending()
        for name, buffer in norm.named_buffers(recurse=False):
            buffer.copy_(averaged[name] if buffer.is_floating_point() else averaged[name].round())
    return True
