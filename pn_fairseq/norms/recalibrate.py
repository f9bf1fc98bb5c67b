"""Running statistics of a whole model: re-estimated for other weights, or averaged over the
ranks.
"""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from pn_fairseq.norms.core.base import COUNT, ChannelNorm, RunningNorm, running_norms
from pn_fairseq.norms.core.distributed import all_reduce_sum, world_size
from pn_fairseq.norms.core.step import Step


@contextmanager
def recalibrating(model: nn.Module) -> Iterator[list[RunningNorm]]:
    r"""Re-estimate the running statistics of all norms of ``model`` from the forwards inside the
    ``with`` block::

        with torch.no_grad(), recalibrating(model):
            for batch in batches:
                model(batch)

    Every :class:`RunningNorm` normalizes with the statistics of the batch, and its running mean and
    second moment become the means of those of the n batches, :math:`\psi^2 = \frac{1}{n} \sum_i
    \psi_{B,i}^2`. ``torch.optim.swa_utils.update_bn`` computes the same for torch's BatchNorm, but
    here the rest of the model is in evaluation mode: the statistics are taken over activations
    without dropout, as in evaluation.

    All batches count equally, however many real tokens they contain, as in the averages of
    training. Give batches of about the same size. A batch without a real token, or with statistics
    that are not finite, does not count.

    All other state keeps its value, including the number of training steps (the psi warm-up does
    not begin again) and PN's :math:`\nu`, which only backward passes can estimate. Modes are
    restored. A norm that no batch has reached keeps its old statistics, and after an exception
    inside the block all norms do.

    Args:
        model: any module that contains norms of this package.

    Yields:
        The norms concerned, those of :func:`running_norms`.
    """
    norms = running_norms(model)
    if not any(isinstance(module, ChannelNorm) for module in model.modules()):
        text = "changes nothing: the model has no norm of this package"
        warnings.warn(f"recalibrating({type(model).__name__}) {text}", stacklevel=3)
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        for norm in norms:
            norm.recalibration = Recalibration(norm)
            norm.train()
        yield norms
        for norm in norms:
            norm.recalibration.finish()
    finally:
        for norm in norms:
            norm.recalibration = None
        for module, training in modes:
            module.training = training


class Recalibration:
    """The statistics of ``norm`` in a :func:`recalibrating` block: their mean over the batches."""

    def __init__(self, norm: RunningNorm):
        self.norm = norm
        self.batches = torch.zeros_like(norm.get_buffer(COUNT))
        #: Buffer name -> sum over the batches.
        self.sums: dict[str, Tensor] = {}

    def normalize(self, x: Tensor, padding: Tensor | None) -> Tensor:
        """y by the statistics of the batch, which enter the mean."""
        norm = self.norm
        batch = norm.batch_moments(Step(norm, {}, padding, x.detach(), None, None))
        with torch.no_grad():
            moment, center = norm.statistics_of(batch)
            if norm.unbiased:
                moment = moment * (batch.count / (batch.count - 1.0))
            new = {norm.moment_name: moment.to(torch.float32)}
            if norm.mean_name is not None:
                new[norm.mean_name] = center.to(torch.float32)
            finite = torch.stack([value.isfinite().all() for value in new.values()]).all()
            enters = not norm.ignoring or norm.synchronises()
            counted = (batch.count > 0) & finite & enters
            self.batches = self.batches + counted
            for name, value in new.items():
                self.sums[name] = self.sums.get(name, 0.0) + torch.where(counted, value, 0.0)
        return norm.normalize_by(x, batch.mean, batch.moment)

    def finish(self) -> None:
        """Set the norm's statistics to the mean, if a batch has entered it."""
        if self.batches > 0:
            self.norm.begin_epoch()
            for name, total in self.sums.items():
                self.norm.get_buffer(name).copy_(total / self.batches)


@torch.no_grad()
def average_running_stats(model: nn.Module, group=None) -> bool:
    """Replace the running statistics of every unsynchronized norm of ``model`` by their mean over
    the ranks.

    Variances are combined about the common mean: var = mean(var_k + mean_k^2) - mean(mean_k)^2.
    This takes one all-reduce, which every rank must join. Returns whether it ran: with one rank, or
    without such norms, it does not.
    """
    ranks = world_size(group)
    norms = [norm for norm in running_norms(model) if not norm.synchronises()]
    if ranks == 1 or not norms:
        return False
    states = []
    for norm in norms:
        # float64 also holds the counters, which differ if ranks skipped different batches.
        state = {name: buffer.double() for name, buffer in norm.named_buffers(recurse=False)}
        if norm.mean_name is not None:
            state[norm.moment_name] += state[norm.mean_name].square()
        states.append(state)
    values = [value for state in states for value in state.values()]
    total = all_reduce_sum(parameters_to_vector(values), group)
    vector_to_parameters(total / ranks, values)
    for norm, state in zip(norms, states, strict=True):
        norm.begin_epoch()
        if norm.mean_name is not None:
            state[norm.moment_name] -= state[norm.mean_name].square()
        for name, buffer in norm.named_buffers(recurse=False):
            value = state[name]
            buffer.copy_(value if buffer.is_floating_point() else value.round())
    return True
