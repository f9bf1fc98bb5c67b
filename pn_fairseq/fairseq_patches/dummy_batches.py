"""Batches of a rank that has run out of data enter no running statistics.

Such a rank repeats an old batch and multiplies its loss by 0, so that it takes part in the collective calls. fairseq
passes this (``ignore_grad``) to the task and not to the model.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from fairseq.tasks.fairseq_task import FairseqTask
from torch import nn

from pn_fairseq.fairseq_patches import patch
from pn_fairseq.norms.base import running_norms


@contextmanager
def ignoring_batches(model: nn.Module) -> Iterator[None]:
    """Keep what ``model`` sees out of the statistics of its norms."""
    norms = running_norms(model)
    for norm in norms:
        norm.ignoring = True
    try:
        yield
    finally:
        for norm in norms:
            norm.ignoring = False


@patch(FairseqTask, "train_step", "self sample model criterion optimizer update_num ignore_grad")
def train_step(original, task, sample, model, criterion, optimizer, update_num, ignore_grad=False, **kwargs):
    if not ignore_grad:
        return original(task, sample, model, criterion, optimizer, update_num, ignore_grad, **kwargs)
    with ignoring_batches(model):
        return original(task, sample, model, criterion, optimizer, update_num, ignore_grad, **kwargs)
