"""Sums over data-parallel workers, through ``torch.distributed`` on whatever backend is initialised."""

import torch
import torch.distributed as dist
from torch import Tensor


def workers(group=None) -> int:
    """Number of workers in ``group`` (None: all); 1 where nothing is distributed."""
    if not dist.is_available() or not dist.is_initialized():
        return 1
    return dist.get_world_size(group)


class _SumOverWorkers(torch.autograd.Function):
    """The sum over workers; its gradient is the sum of the workers' gradients, since each of them used it."""

    @staticmethod
    def forward(ctx, vector, group):
        ctx.group = group
        return sum_now(vector, group)

    @staticmethod
    def backward(ctx, grad):
        return sum_now(grad, ctx.group), None


def differentiable_sum(vector: Tensor, group=None) -> Tensor:
    """``vector`` summed over the workers of ``group``, a new tensor, differentiable."""
    return _SumOverWorkers.apply(vector, group)


def sum_now(vector: Tensor, group=None) -> Tensor:
    """``vector`` summed over the workers of ``group``, a new tensor; waits for the others."""
    total = vector.detach().clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    return total


def sum_later(vector: Tensor, group=None):
    """Start summing ``vector`` over the workers of ``group``; ``.wait()`` on the result, then read the tensor."""
    total = vector.detach().clone(memory_format=torch.contiguous_format)
    return dist.all_reduce(total, group=group, async_op=True), total
