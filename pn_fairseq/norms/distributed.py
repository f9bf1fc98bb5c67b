"""Sums over the ranks of a process group."""

import torch
import torch.distributed as dist
from torch import Tensor


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
