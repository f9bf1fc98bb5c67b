"""Training tells the norms what they need, ``--norm-probe`` records, and a number that is not
finite is explained.

fairseq tells the task, and not the model, that a rank has run out of data: the rank repeats an old
batch and multiplies its loss by 0, so that it takes part in the collective calls. fairseq tells the
model the number of the update before each of its batches, but not which batch is the last one, nor
whether the update was skipped. And if it skips a step on a CPU because fp16 overflowed, it creates
that step's gradient norm on a GPU.

Unsynchronized norms have different statistics on each rank. fairseq validates each rank's share of
the data with that rank's own buffers, and saves the buffers of rank 0; here running statistics are
averaged over the ranks beforehand. ``--no-average-norm-stats`` turns the averaging off for a model.

After a number that is not finite, fairseq repeats the update with hooks that log the first module
whose output is NaN or infinite. Its hooks on the backward pass raise ``StopIteration`` on a module
that returns a dict without tensors, as its own encoders do. With several ranks it reports
"gradients are inconsistent between workers" instead.
"""

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from unittest import mock

import torch
from fairseq import checkpoint_utils
from fairseq.nan_detector import NanDetector
from fairseq.tasks.fairseq_task import FairseqTask
from fairseq.trainer import Trainer
from torch import nn

from pn_fairseq.common.errors import NotFiniteError, Unavailable, one_line_errors
from pn_fairseq.fairseq_patches import patch
from pn_fairseq.fairseq_patches.checkpoints import write_files
from pn_fairseq.norms import average_running_stats, ignoring, set_loss_scale
from pn_fairseq.norms.fold import tensors_of


@patch(Trainer, "train_step", "self samples raise_oom")
def update(original, trainer, *args, **kwargs):
    """An update of the weights, with all of its batches."""
    compile_layers = getattr(trainer.get_model(), "compile_layers", None)
    if compile_layers is not None:
        compile_layers()
    where = nullcontext()
    if not trainer.cuda:
        where = mock.patch.object(torch.Tensor, "cuda", lambda tensor, *_, **__: tensor)
    with where, explained(trainer), probed(trainer):
        return original(trainer, *args, **kwargs)


@patch(Trainer, "_prepare_sample", "self sample is_dummy")
def prepare_sample(original, trainer, sample, *args, **kwargs):
    """Look for padding before a batch goes to the GPU, where this would make the program wait."""
    known = padding_of_inputs(trainer.task, sample) if trainer.cuda else {}
    prepared, is_dummy = original(trainer, sample, *args, **kwargs)
    for name, there_is in known.items():
        prepared["net_input"][name].has_padding = there_is
    return prepared, is_dummy


def padding_of_inputs(task: FairseqTask, sample) -> dict[str, bool]:
    """Name of an input of the model -> whether its tokens contain padding."""
    inputs = sample.get("net_input") if isinstance(sample, dict) else None
    known = {}
    for name, attribute in (
        ("src_tokens", "source_dictionary"),
        ("prev_output_tokens", "target_dictionary"),
    ):
        tokens, dictionary = (inputs or {}).get(name), getattr(task, attribute, None)
        if tokens is not None and dictionary is not None:
            known[name] = bool(tokens.eq(dictionary.pad()).any())
    return known


@patch(FairseqTask, "train_step", "self sample model criterion optimizer update_num ignore_grad")
def batch(
    original, task, sample, model, criterion, optimizer, update_num, ignore_grad=False, **kwargs
):
    """The forward and backward pass of one batch of an update."""
    scaler = getattr(optimizer, "scaler", None)
    # fairseq's own scaler keeps a number
    set_loss_scale(model, getattr(scaler, "loss_scale", scaler))
    # The first use of the kernels on a device can show that they cannot run there.
    with one_line_errors(Unavailable), ignoring(model, ignore_grad):
        return original(
            task, sample, model, criterion, optimizer, update_num, ignore_grad, **kwargs
        )


@patch(FairseqTask, "begin_valid_epoch", "self epoch model")
def begin_valid_epoch(original, task, epoch, model):
    """All ranks call this."""
    average(model)
    return original(task, epoch, model)


@patch(checkpoint_utils, "save_checkpoint", "cfg trainer epoch_itr val_loss")
def save_checkpoint(original, cfg, trainer, epoch_itr, val_loss):
    """All ranks call this; rank 0 saves."""
    average(trainer.get_model())
    return write_files(original, cfg, trainer, epoch_itr, val_loss)


def average(model: nn.Module) -> None:
    if getattr(model, "averages_norm_stats", False):
        average_running_stats(model)


@contextmanager
def probed(trainer: Trainer) -> Iterator[None]:
    """Tell ``--norm-probe`` where the update begins and ends."""
    probe = getattr(trainer.get_model(), "norm_probe", None)
    if probe is None:
        yield
        return
    with one_line_errors(ValueError, OSError):
        probe.begin(
            trainer.get_num_updates(),
            trainer.criterion,
            os.path.abspath(trainer.cfg.checkpoint.save_dir),
        )
    yield
    with one_line_errors(OSError):
        probe.end(trainer.get_num_updates())


#: fairseq's messages about a number that is not finite. With several ranks they list the norms of
#: the gradients.
_MESSAGES = re.compile(
    r"gradients are (Nan/Inf|inconsistent.*\b(nan|inf)\b)|Minimum loss scale reached", re.S
)
#: What the detectors found in this update, in words.
_first_modules: list[str] = []


@patch(NanDetector, "add_hooks", "self module")
def add_hooks(_, detector, module):
    """Put the hooks for the backward pass on the tensors of the output."""

    def watch(module, inputs, output):
        if detector.forward:
            detector.fhook_fn(module, inputs, output)
        for tensor in tensors_of(output) if detector.backward else ():
            if tensor.requires_grad:
                tensor.register_hook(lambda gradient: detector.bhook_fn(module, (), gradient))

    detector.fhooks.append(module.register_forward_hook(watch))


@patch(NanDetector, "_detect", "self tensor name backward")
def detect(original, detector, tensor, name, backward):
    message = original(detector, tensor, name, backward)
    if message:
        gradient = "the gradient of " if backward else ""
        _first_modules.append(
            f"{message.split()[0]} first in {gradient}the output of {name or 'the model'}"
        )
    return message


@contextmanager
def explained(trainer: Trainer) -> Iterator[None]:
    """Raise NotFiniteError where an update meets a number that is not finite.

    After a FloatingPointError fairseq repeats the update with its NanDetector.
    """
    _first_modules.clear()
    try:
        yield
    except NotFiniteError:  # from the same update, which fairseq repeats under --amp
        raise
    except Exception as error:
        # The repeated update may end in another error.
        fault = error if isinstance(error, FloatingPointError) else error.__context__
        if not isinstance(fault, FloatingPointError) or not _MESSAGES.search(str(fault)):
            raise
        loss_scale = getattr(getattr(trainer.optimizer, "scaler", None), "loss_scale", None)
        raise NotFiniteError(
            trainer.get_num_updates() + 1, loss_scale, *_first_modules[:1]
        ) from error
