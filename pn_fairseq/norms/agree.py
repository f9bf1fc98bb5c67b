"""One set of running statistics for all workers, where each has been keeping its own."""

import torch
from torch import nn

from pn_fairseq.norms.base import RunningNorm
from pn_fairseq.norms.workers import sum_now, workers


@torch.no_grad()
def agree_on_statistics(model: nn.Module, group=None) -> bool:
    """Replace the running statistics of all norms in ``model`` by their mean over the workers of ``group``.

    Norms that are synchronised agree already and are left out, as are those that have seen no training forward since
    the last time. One collective call, which every worker has to join. Returns whether there was one.
    """
    count = workers(group)
    norms = [module for module in model.modules() if isinstance(module, RunningNorm)]
    norms = [norm for norm in norms if norm.trained_alone and not norm.synchronises()]
    if count == 1 or not norms:
        return False
    buffers = [buffer for norm in norms for buffer in norm.buffers(recurse=False)]
    # float64 holds the counters, too; workers that skipped different batches have different ones.
    mean = sum_now(torch.cat([buffer.double().flatten() for buffer in buffers]), group) / count
    for buffer, part in zip(buffers, mean.split([buffer.numel() for buffer in buffers]), strict=True):
        part = part.view_as(buffer)
        buffer.copy_(part if buffer.is_floating_point() else part.round())
    for norm in norms:
        norm.trained_alone = False
    return True
