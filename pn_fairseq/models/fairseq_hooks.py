"""Places in fairseq where the norms have to know what is going on and no model is told.

Importing this module wraps the functions; each does what it did before, and tells the model.
"""

import functools
from contextlib import contextmanager

from fairseq import checkpoint_utils
from fairseq.tasks.fairseq_task import FairseqTask
from fairseq.trainer import Trainer
from torch import nn

from pn_fairseq.errors import end_fairseq, ending_fairseq
from pn_fairseq.models.transformer_pn import FoldedModelError
from pn_fairseq.norms import average_running_stats, running_norms


@contextmanager
def ignoring_batches(model: nn.Module):
    """Keep what ``model`` sees out of the statistics of its norms."""
    norms = running_norms(model)
    for norm in norms:
        norm.ignoring = True
    try:
        yield
    finally:
        for norm in norms:
            norm.ignoring = False


def _agree(model: nn.Module) -> None:
    if getattr(model, "norm_agreement", False):
        average_running_stats(model)


def wrap(owner, name: str, wrapper) -> None:
    """Put ``wrapper(original, ...)`` in the place of ``owner.name``, once, however often its module is executed."""
    original = getattr(owner, name)
    wrappers = getattr(original, "pn_fairseq", frozenset())
    this = f"{wrapper.__module__}.{wrapper.__qualname__}"
    if this in wrappers:
        return

    @functools.wraps(original)
    def function(*args, **kwargs):
        return wrapper(original, *args, **kwargs)

    function.pn_fairseq = wrappers | {this}
    setattr(owner, name, function)


def _train_step(original, task, sample, model, criterion, optimizer, update_num, ignore_grad=False, **kwargs):
    """A worker that has run out of data repeats an old batch and multiplies its loss by 0."""
    if not ignore_grad:
        return original(task, sample, model, criterion, optimizer, update_num, ignore_grad, **kwargs)
    with ignoring_batches(model):
        return original(task, sample, model, criterion, optimizer, update_num, ignore_grad, **kwargs)


def _begin_valid_epoch(original, task, epoch, model):
    """All workers are about to validate."""
    _agree(model)
    return original(task, epoch, model)


def _save_checkpoint(original, cfg, trainer, epoch_itr, val_loss):
    """All workers come here, and the first one saves."""
    _agree(trainer.get_model())
    return original(cfg, trainer, epoch_itr, val_loss)


def _new_trainer(original, trainer, cfg, task, model, *args, **kwargs):
    """Here and not at the first step, which would end in a traceback."""
    if getattr(model, "folded", False):
        end_fairseq(FoldedModelError())
    return original(trainer, cfg, task, model, *args, **kwargs)


def _load_checkpoint(original, trainer, filename, *args, **kwargs):
    """fairseq answers whatever keeps weights from being loaded with an exception that does not say what."""
    try:
        return original(trainer, filename, *args, **kwargs)
    except Exception as error:
        if isinstance(error.__context__, FoldedModelError):
            end_fairseq(f"{filename}: {error.__context__}")
        raise


def _compute(original, *args, **kwargs):
    """Where the kernels are used for the first time, and turn out to be unable to run on this device."""
    with ending_fairseq():
        return original(*args, **kwargs)


wrap(FairseqTask, "train_step", _train_step)
for _step in ("train_step", "valid_step", "inference_step"):
    wrap(FairseqTask, _step, _compute)
wrap(FairseqTask, "begin_valid_epoch", _begin_valid_epoch)
wrap(checkpoint_utils, "save_checkpoint", _save_checkpoint)
wrap(Trainer, "__init__", _new_trainer)
wrap(Trainer, "load_checkpoint", _load_checkpoint)
