"""Checkpoints are read safely and written whole, and a resumed run continues where it was, with its
``--patience``.

Reading: from torch 2.6 on, ``torch.load`` accepts only tensors and plain containers, and so refuses
the settings in a checkpoint, even in the copies that rank 0 sends to the other ranks; its message
advises executing what the file holds. ``torch.load`` compares no checksums: fairseq decodes with a
weight that has a flipped bit. For weights that do not fit a model, or a run that continues from the
weights of a folded model, fairseq reports only that architectures differ.

Writing: fairseq writes the first file of a save under another name and renames it, but copies it in
place to ``checkpoint_best.pt`` and ``checkpoint_last.pt``. A run whose copy was cut off cannot be
resumed. Here a copy is also written under another name and then renamed. If a save falls on the
last update of an epoch, fairseq writes no file for that update (fairseq issue 2230): without epoch
checkpoints the save is lost, and an average lacks its newest model. Here every save by updates
writes its file.

Resuming: fairseq saves the place in an epoch as a number of batches of one rank. With another
number of ranks, another ``update_freq`` or another ``max_tokens`` that number denotes another
place: sentences would be skipped or repeated. fairseq counts the validations without improvement in
attributes of a function, which no checkpoint contains (fairseq issue 3531): a run that is
interrupted more often than the patience allows never stops early. A training run in 16 bits updates
a float32 copy of the weights, which fairseq does not save: after a resumption it updates weights
that are rounded to 16 bits.
"""

import os
import pickle
from types import SimpleNamespace

import torch
from fairseq import checkpoint_utils
from fairseq.distributed import utils as distributed_utils
from fairseq.file_io import PathManager
from fairseq.models import BaseFairseqModel
from fairseq.optim.fp16_optimizer import _FP16OptimizerMixin
from fairseq.trainer import Trainer

from pn_fairseq.common.checkpoints import (
    CheckpointError,
    allow_fairseq_checkpoints,
    explain_misfit,
    readable,
)
from pn_fairseq.common.errors import FoldedModelError, one_line_errors
from pn_fairseq.fairseq_patches import patch, running_program

#: Key in a checkpoint's ``extra_state`` for what this project adds.
KEY = "pn_fairseq"
#: Key in an optimizer's state for the float32 weights of a training run in 16 bits.
WEIGHTS = "float32_weights"

allow_fairseq_checkpoints()


class MisfitError(RuntimeError):
    """Weights do not fit a model; the message names one of them."""


@patch(checkpoint_utils, "load_checkpoint_to_cpu", "path arg_overrides load_on_all_ranks")
def load_checkpoint_to_cpu(original, path, *args, **kwargs):
    if not os.path.isfile(path):  # fairseq fetches a remote path, and reports a missing file
        return original(path, *args, **kwargs)
    with (
        one_line_errors(CheckpointError),
        readable(path, pickle.UnpicklingError, RuntimeError, EOFError),
    ):
        return original(path, *args, **kwargs)


@patch(BaseFairseqModel, "load_state_dict", "self state_dict strict model_cfg args")
def load_state_dict(original, model, *args, **kwargs):
    with one_line_errors(MisfitError):
        try:
            return original(model, *args, **kwargs)
        except RuntimeError as error:
            raise MisfitError(explain_misfit(error)) from error


@patch(distributed_utils, "_broadcast_object_slow", "obj src_rank group dist_device")
def broadcast_object(_, obj, src_rank, group, dist_device):
    """The same program sends the checkpoint, so receiving it needs no safe loader."""
    holder = [obj]
    torch.distributed.broadcast_object_list(holder, src=src_rank, group=group, device=dist_device)
    return holder[0]


@patch(PathManager, "copy", "src_path dst_path overwrite")
def copy(original, src_path, dst_path, overwrite=False):
    if not overwrite or not PathManager.supports_rename(dst_path):
        return original(src_path, dst_path, overwrite=overwrite)
    partial = f"{dst_path}.tmp"
    try:
        copied = original(src_path, partial, overwrite=True)
    except Exception:
        if PathManager.exists(partial):
            PathManager.rm(partial)
        raise
    PathManager.rename(partial, dst_path)
    return copied


def write_files(original, cfg, trainer, epoch_itr, val_loss):
    """fairseq's ``save_checkpoint``, which also writes the ``checkpoint_E_U.pt`` of an update U
    that ends epoch E.
    """
    interval = cfg.save_interval_updates
    lost = interval > 0 and trainer.get_num_updates() % interval == 0 and epoch_itr.end_of_epoch()
    of_epoch = not cfg.no_epoch_checkpoints and epoch_itr.epoch % cfg.save_interval == 0
    # asynchronous writing allows only one file for each save
    if not lost or (of_epoch and cfg.write_checkpoints_asynchronously):
        return original(cfg, trainer, epoch_itr, val_loss)
    within_epoch = SimpleNamespace(
        epoch=epoch_itr.epoch, state_dict=epoch_itr.state_dict, end_of_epoch=lambda: False
    )
    saved = original(cfg, trainer, within_epoch, val_loss)
    if saved and of_epoch:
        suffix = trainer.checkpoint_suffix
        PathManager.copy(
            saved,
            os.path.join(cfg.save_dir, f"checkpoint{epoch_itr.epoch}{suffix}.pt"),
            overwrite=True,
        )
        if cfg.keep_last_epochs > 0:
            files = checkpoint_utils.checkpoint_paths(
                cfg.save_dir, pattern=rf"checkpoint(\d+){suffix}\.pt"
            )
            for file in files[cfg.keep_last_epochs :]:  # sorted, the newest first
                os.remove(file)
    return saved


@patch(Trainer, "save_checkpoint", "self filename extra_state")
def save(original, trainer, filename, extra_state):
    """Add the state of early stopping and the unit of the batches, which fairseq does not save."""
    ours = {}
    stopping = early_stopping_function()
    if hasattr(stopping, "best"):
        ours["early_stopping"] = {"best": stopping.best, "num_runs": stopping.num_runs}
    iterator = extra_state.get("train_iterator")
    if iterator is not None:
        ours["batches"] = batches(trainer.cfg, iterator["epoch"])
    return original(trainer, filename, {**extra_state, KEY: ours})


@patch(
    Trainer,
    "load_checkpoint",
    "self filename reset_optimizer reset_lr_scheduler optimizer_overrides reset_meters",
)
def load(original, trainer, filename, reset_optimizer=False, *args, reset_meters=False, **kwargs):
    with one_line_errors(FoldedModelError):
        try:
            extra_state = original(
                trainer, filename, reset_optimizer, *args, reset_meters=reset_meters, **kwargs
            )
        except Exception as error:
            # fairseq replaces the error of NormedModel.load_state_dict by its own
            if isinstance(error.__context__, FoldedModelError):
                raise FoldedModelError(filename) from error
            raise
    saved = (extra_state or {}).get(KEY, {})
    stopping = early_stopping_function()
    # A new training run from these weights starts with a new best loss. fairseq resets its best
    # loss by the same rule.
    if "early_stopping" in saved and stopping and not reset_optimizer and not reset_meters:
        stopping.best = saved["early_stopping"]["best"]
        stopping.num_runs = saved["early_stopping"]["num_runs"]
    if "batches" in saved:
        return in_other_batches(extra_state, saved["batches"], trainer.cfg)
    return extra_state


@patch(_FP16OptimizerMixin, "state_dict", "self")
def optimizer_state(original, optimizer):
    weights = [each.data for each in float32_copies(optimizer)]
    return {**original(optimizer), WEIGHTS: weights}


@patch(_FP16OptimizerMixin, "load_state_dict", "self state_dict optimizer_overrides")
def load_optimizer_state(original, optimizer, state_dict, optimizer_overrides=None):
    """Also load the saved float32 weights, where rounding them gives the weights of the model.

    Elsewhere the model's weights have changed since the state was saved, or it was saved in
    another 16-bit type: there the model's weights count.
    """
    original(optimizer, state_dict, optimizer_overrides)
    copies = float32_copies(optimizer)
    saved = state_dict.get(WEIGHTS, ())
    if [each.shape for each in copies] != [each.shape for each in saved]:
        return
    rounded_type = optimizer.fp16_params[0].dtype
    for rounded, exact in zip(copies, saved, strict=True):
        exact = exact.to(rounded.device)
        same = exact.to(rounded_type).float() == rounded.data
        rounded.data.copy_(torch.where(same, exact, rounded.data))


def float32_copies(optimizer) -> list[torch.nn.Parameter]:
    """fairseq's float32 copies of the weights: one for each weight, or a flat one for each GPU."""
    copies = optimizer.fp32_params
    return list(copies.values()) if isinstance(copies, dict) else list(copies)


@patch(checkpoint_utils, "load_checkpoint", "cfg trainer passthrough_args")
def load_and_check(original, cfg, trainer, **kwargs):
    """Load a checkpoint, if there is one, and the training data; refuse a run that would end at
    once.
    """
    extra_state, epoch_itr = original(cfg, trainer, **kwargs)
    optimization, lr = trainer.cfg.optimization, trainer.get_lr()
    epoch = epoch_itr.next_epoch_idx
    # a checkpoint of the run itself may be past the last epoch: the run has ended
    elsewhere = os.path.dirname(os.path.abspath(cfg.restore_file)) != os.path.abspath(cfg.save_dir)
    with one_line_errors(ValueError):
        if trainer.get_num_updates() == 0 and lr <= optimization.stop_min_lr:
            raise ValueError(
                f"the learning rate begins at {lr:g}, where --stop-min-lr "
                f"{optimization.stop_min_lr:g} ends the training: give a larger "
                "--warmup-init-lr or --lr"
            )
        if getattr(trainer.lr_scheduler, "period", 1) == 0:  # cosine would divide by it
            raise ValueError(
                "--lr-scheduler cosine: --max-update leaves no update after --warmup-updates; give "
                "a larger --max-update, fewer --warmup-updates or --lr-period-updates"
            )
        if os.path.dirname(cfg.restore_file) and elsewhere and 0 < optimization.max_epoch < epoch:
            raise ValueError(
                f"{cfg.restore_file} continues in epoch {epoch}, after --max-epoch "
                f"{optimization.max_epoch}: give --reset-dataloader, or --finetune-from-model in "
                "place of --restore-file"
            )
    return extra_state, epoch_itr


def early_stopping_function():
    """fairseq's function whose attributes ``best`` and ``num_runs`` hold the count; None outside of
    training.
    """
    return getattr(running_program("fairseq_cli.train"), "should_stop_early", None)


def batches(cfg, epoch: int) -> dict:
    """The unit of the place in an epoch: ``workers`` ranks process ``max_tokens`` tokens each,
    ``update_freq`` times.
    """
    frequencies = cfg.optimization.update_freq
    return {
        "workers": cfg.distributed_training.distributed_world_size,
        "max_tokens": cfg.dataset.max_tokens,
        "update_freq": frequencies[min(epoch, len(frequencies)) - 1],
    }


def convert(place: int, before: dict, now: dict) -> int:
    """The place in units of ``now`` after the same number of tokens, workers * max_tokens * place,
    rounded to whole updates.

    Batches that are counted in sentences are assumed to hold as much as before.
    """
    share = before["workers"] / now["workers"]
    if before["max_tokens"] and now["max_tokens"]:
        share *= before["max_tokens"] / now["max_tokens"]
    return round(place * share / now["update_freq"]) * now["update_freq"]


def in_other_batches(extra_state: dict, before: dict, cfg) -> dict:
    """``extra_state`` with the place in the epoch in units of the batches of ``cfg``."""
    iterator = extra_state["train_iterator"]
    now = batches(cfg, iterator["epoch"])
    if not iterator["iterations_in_epoch"] or before == now:
        return extra_state
    batches_done = convert(iterator["iterations_in_epoch"], before, now)
    # Rounding can result in a place past the end. Only in version 1 does fairseq treat this as the
    # end of the epoch.
    return {
        **extra_state,
        "train_iterator": {**iterator, "version": 1, "iterations_in_epoch": batches_done},
    }
