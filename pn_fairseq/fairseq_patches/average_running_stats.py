"""Running statistics are averaged over the ranks before validation and before saving.

Norms that are not synchronized have other statistics on each rank. fairseq validates each rank's share of the data with
that rank's own buffers, and saves the buffers of rank 0. ``--no-average-norm-stats`` turns the averaging off for a
model.
"""

from fairseq import checkpoint_utils
from fairseq.tasks.fairseq_task import FairseqTask
from torch import nn

from pn_fairseq.fairseq_patches import patch
from pn_fairseq.norms import average_running_stats


def _average(model: nn.Module) -> None:
    if getattr(model, "averages_norm_stats", False):
        average_running_stats(model)


@patch(FairseqTask, "begin_valid_epoch", "self epoch model")
def begin_valid_epoch(original, task, epoch, model):
    """All ranks call this."""
    _average(model)
    return original(task, epoch, model)


@patch(checkpoint_utils, "save_checkpoint", "cfg trainer epoch_itr val_loss")
def save_checkpoint(original, cfg, trainer, epoch_itr, val_loss):
    """All ranks call this; rank 0 saves."""
    _average(trainer.get_model())
    return original(cfg, trainer, epoch_itr, val_loss)
