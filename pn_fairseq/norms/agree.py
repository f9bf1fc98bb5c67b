"""One set of running statistics for all workers, where each has been keeping its own."""

import torch
from torch import nn

from pn_fairseq.norms.base import running_norms
from pn_fairseq.norms.workers import sum_now, workers


@torch.no_grad()
def agree_on_statistics(model: nn.Module, group=None) -> bool:
    """Replace the running statistics of all norms in ``model`` by their mean over the workers of ``group``.

    Of variances the mean is taken about the common mean: var = mean(var_k + mean_k^2) - mean(mean_k)^2. Norms that are
    synchronised agree already and are left out, as are those that have seen no training forward since the last time.
    One collective call, which every worker has to join. Returns whether there was one.
    """
    count = workers(group)
    norms = [norm for norm in running_norms(model) if norm.trained_alone and not norm.synchronises()]
    if count == 1 or not norms:
        return False
    # float64 holds the counters, too; workers that skipped different batches have different ones.
    states = [{name: buffer.double() for name, buffer in norm.named_buffers(recurse=False)} for norm in norms]
    for norm, state in zip(norms, states, strict=True):
        for variance, mean in norm.variances.items():
            state[variance] = state[variance] + state[mean].square()
    flat = torch.cat([value.flatten() for state in states for value in state.values()])
    parts = iter((sum_now(flat, group) / count).split([value.numel() for state in states for value in state.values()]))
    for norm, state in zip(norms, states, strict=True):
        agreed = {name: next(parts).view_as(value) for name, value in state.items()}
        for variance, mean in norm.variances.items():
            agreed[variance] = agreed[variance] - agreed[mean].square()
        for name, buffer in norm.named_buffers(recurse=False):
            buffer.copy_(agreed[name] if buffer.is_floating_point() else agreed[name].round())
        norm.forget_pending()
        norm.trained_alone = False
    return True
