"""Running statistics for weights that were not trained with them, such as averaged ones."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from pn_fairseq.norms.base import RunningNorm, running_norms


@contextmanager
def recalibrating(model: nn.Module) -> Iterator[list[RunningNorm]]:
    r"""Re-estimate the running statistics of all norms of ``model`` from the forwards inside the ``with`` block::

        with torch.no_grad(), recalibrating(model):
            for batch in batches:
                model(batch)

    Every :class:`RunningNorm` normalizes with the statistics of the batch, and its running ones become their mean over
    the n batches, :math:`\psi^2 = \frac{1}{n} \sum_i \psi_{B,i}^2`. That is what ``torch.optim.swa_utils.update_bn``
    computes for torch's BatchNorm, but the rest of the model is in evaluation mode: the statistics are those of
    activations without dropout, which evaluation is going to see.

    Batches count equally whatever their number of real tokens, because they do so in the averages of training, which
    these take the place of. Give batches of about the same size, as in training; one without a real token, or whose
    statistics are not finite, does not count.

    What says how far training has come stays: the number of updates and of training forwards (the psi warm-up does not
    begin again) and PN's :math:`\nu`, which only backward passes can estimate. Modes are restored. A norm that no
    batch has reached keeps its old statistics, and an exception inside the block restores those of all.

    Args:
        model: any module that holds norms of this package.

    Yields:
        The norms concerned, as :func:`running_norms`.
    """
    norms = running_norms(model)
    modes = [(module, module.training) for module in model.modules()]
    model.eval()  # before the state is read: it brings synchronised statistics up to date
    before = [_state(norm) for norm in norms]
    try:
        for norm in norms:
            norm.reset_running_stats()
            norm.recalibrating = True
            norm.train()
        yield norms
        model.eval()
        for norm, old in zip(norms, before, strict=True):
            if norm.num_batches_tracked > 0:
                new = _state(norm)
                old.update((name, new[name]) for name in new if name not in _kept(norm))
    finally:
        for norm, state in zip(norms, before, strict=True):
            norm.reset_running_stats()  # forgets the forwards that never had a backward
            norm.recalibrating = False
            for name, value in state.items():
                norm.get_buffer(name).copy_(value)
        for module, training in modes:
            module.training = training


def _state(norm: RunningNorm) -> dict[str, torch.Tensor]:
    return {name: buffer.detach().clone() for name, buffer in norm.named_buffers()}


def _kept(norm: RunningNorm) -> tuple[str, ...]:
    return ("num_batches_tracked", *norm.backward_statistics)
