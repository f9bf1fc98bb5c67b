"""Sums over the ranks of a process group."""

import torch
import torch.distributed as dist
from torch import Tensor, nn


def world_size(group=None) -> int:
    """Number of ranks in ``group`` (None: all); 1 if ``torch.distributed`` is not in use."""
    if not dist.is_available() or not dist.is_initialized():
        return 1
    return dist.get_world_size(group)


def all_reduce_sum(values: Tensor, group=None) -> Tensor:
    """``values`` summed over the ranks of ``group``, a new tensor."""
    total = values.detach().clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    return total


def refuse_join() -> None:
    """Raise RuntimeError inside ``DistributedDataParallel.join``, unless a rank without data ends
    it for all ranks.

    In that context a rank without data runs the collectives of the wrapper, but not those of a
    norm.
    """
    wrapper = nn.parallel.DistributedDataParallel._active_ddp_module
    if (
        wrapper is not None
        and (join := wrapper._join_config).enable
        and not join.throw_on_early_termination
    ):
        raise RuntimeError(
            "a norm with sync=True does not work under DistributedDataParallel.join, because a "
            "rank whose data has ended runs no forward: give join(throw_on_early_termination=True) "
            "or the norm sync=False"
        )
