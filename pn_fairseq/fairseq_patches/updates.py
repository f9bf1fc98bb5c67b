"""Around an update: the norms learn which batches count and how the loss is scaled, and ``--norm-probe`` records.

fairseq tells the task, and not the model, that a rank has run out of data: the rank repeats an old batch and multiplies
its loss by 0, so that it takes part in the collective calls. fairseq tells the model the number of the update before
each of its batches, but not which batch is the last one, nor whether the update was skipped. And on a CPU it creates
the gradient norm of a step that it skips, because fp16 overflowed, on a GPU.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from unittest import mock

import torch
from fairseq.tasks.fairseq_task import FairseqTask
from fairseq.trainer import Trainer
from torch import nn

from pn_fairseq.common.errors import Unavailable, one_line_errors
from pn_fairseq.fairseq_patches import patch
from pn_fairseq.fairseq_patches.not_finite import explained
from pn_fairseq.norms import running_norms, set_loss_scale


@patch(Trainer, "train_step", "self samples raise_oom")
def update(original, trainer, *args, **kwargs):
    """An update of the weights, with all of its batches."""
    stay = mock.patch.object(torch.Tensor, "cuda", lambda tensor, *_, **__: tensor)
    with nullcontext() if trainer.cuda else stay, explained(trainer), probed(trainer):
        return original(trainer, *args, **kwargs)


@patch(FairseqTask, "train_step", "self sample model criterion optimizer update_num ignore_grad")
def batch(original, task, sample, model, criterion, optimizer, update_num, ignore_grad=False, **kwargs):
    """The forward and backward pass of one batch of an update."""
    set_loss_scale(model, getattr(optimizer, "scaler", None))
    # The first use of the kernels on a device can show that they cannot run there.
    with one_line_errors(Unavailable), ignoring_batches(model, ignore_grad):
        return original(task, sample, model, criterion, optimizer, update_num, ignore_grad, **kwargs)


@contextmanager
def probed(trainer: Trainer) -> Iterator[None]:
    """Tell ``--norm-probe`` where the update begins and ends."""
    probe = getattr(trainer.get_model(), "norm_probe", None)
    if probe is None:
        yield
        return
    with one_line_errors(ValueError, OSError):
        probe.begin(trainer.get_num_updates(), trainer.criterion, os.path.abspath(trainer.cfg.checkpoint.save_dir))
    yield
    with one_line_errors(OSError):
        probe.end(trainer.get_num_updates())


@contextmanager
def ignoring_batches(model: nn.Module, ignore: bool = True) -> Iterator[None]:
    """Keep what ``model`` sees out of the statistics of its norms."""
    norms = running_norms(model) if ignore else []
    for norm in norms:
        norm.ignoring = True
    try:
        yield
    finally:
        for norm in norms:
            norm.ignoring = False
