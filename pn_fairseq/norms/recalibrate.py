"""Running statistics for weights that were not trained with them, such as averaged ones."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from pn_fairseq.norms.base import RunningNorm, running_norms


@contextmanager
def recalibrating(model: nn.Module) -> Iterator[list[RunningNorm]]:
    r"""Re-estimate the running statistics of all norms of ``model`` from the forwards inside the ``with`` block::

        with torch.no_grad(), recalibrating(model):
            for batch in batches:
                model(batch)

    Every :class:`RunningNorm` normalizes with the statistics of the batch, and its running mean and second moment
    become their mean over the n batches, :math:`\psi^2 = \frac{1}{n} \sum_i \psi_{B,i}^2`. That is what
    ``torch.optim.swa_utils.update_bn`` computes for torch's BatchNorm, but the rest of the model is in evaluation mode:
    the statistics are those of activations without dropout, as in evaluation.

    Batches count equally whatever their number of real tokens, as in the averages of training. Give batches of about
    the same size. A batch without a real token, or with statistics that are not finite, does not count.

    All other state keeps its value, among it the number of training steps (the psi warm-up does not begin again) and
    PN's :math:`\nu`, which only backward passes can estimate. Modes are restored. A norm that no batch has reached
    keeps its old statistics, and an exception inside the block restores those of all.

    Args:
        model: any module that holds norms of this package.

    Yields:
        The norms concerned, as :func:`running_norms`.
    """
    norms = running_norms(model)
    modes = [(module, module.training) for module in model.modules()]
    model.eval()  # takes pending steps into the state before it is read
    before = [{name: buffer.detach().clone() for name, buffer in norm.named_buffers()} for norm in norms]
    try:
        for norm in norms:
            norm.reset_running_stats()
            norm.recalibrating = True
            norm.train()
        yield norms
        for norm, state in zip(norms, before, strict=True):
            if norm.num_batches_tracked > 0:
                new = {name: norm.get_buffer(name).clone() for name in (norm.mean_name, norm.moment_name) if name}
                state.update(new)
    finally:
        for norm, state in zip(norms, before, strict=True):
            norm.discard_pending()
            norm.recalibrating = False
            for name, value in state.items():
                norm.get_buffer(name).copy_(value)
        for module, training in modes:
            module.training = training
