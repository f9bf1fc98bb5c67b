"""What fairseq forgets when a training goes on, and what it does not forget when another begins in the same process.

- **Early stopping.** fairseq counts the validations without improvement in attributes of a function, which no
  checkpoint holds: a training that is interrupted more often than ``patience`` allows would never stop early. Here the
  count goes into the checkpoint.
- **The place in the epoch** is kept as a number of batches of one worker. With another number of workers, another
  ``update_freq`` or another ``max_tokens`` that is another place. Here it is converted, so that the same share of the
  epoch's data is done.
- **Several workers** get the checkpoint from the first by ``torch.load``, which from torch 2.6 on refuses the settings
  in it, so that only one worker could go on. The first has read the file with the safe loader; what it passes on to
  its own kind needs none.
- **Several trainings in one process**, which is how ``fairseq-hydra-train -m`` runs a sweep: the best validation loss,
  the early-stopping count, the log file and TensorBoard's of one job would go on in the next. Here each begins with
  none.
- **The log file** is opened once more in every epoch, and every record is then written as often. Here it is opened
  once.

Importing this module wraps the functions, like :mod:`pn_fairseq.models.fairseq_hooks`.
"""

import logging
import os
import sys

import torch
from fairseq import checkpoint_utils
from fairseq.distributed import utils as distributed_utils
from fairseq.logging import progress_bar
from fairseq.trainer import Trainer

from pn_fairseq.models.fairseq_hooks import wrap

#: Where the additions lie in a checkpoint's ``extra_state``.
KEY = "pn_fairseq"


def _early_stopping():
    """The function whose attributes are fairseq's memory of the validations, where ``fairseq_cli.train`` is in use."""
    train = sys.modules.get("fairseq_cli.train")
    return getattr(train, "should_stop_early", None)


def _batches(cfg, epoch: int) -> dict:
    """What the place in an epoch is counted in: ``workers`` take ``max_tokens`` each, ``update_freq`` times."""
    frequencies = cfg.optimization.update_freq
    return {
        "workers": cfg.distributed_training.distributed_world_size,
        "max_tokens": cfg.dataset.max_tokens,
        "update_freq": frequencies[min(epoch, len(frequencies)) - 1],
    }


def convert_place(position: int, before: dict, now: dict) -> int:
    """The place in an epoch, in batches of one worker, for other batches; a whole number of updates.

    position * workers * max_tokens tokens were taken before, and as many are now. Where batches are not counted in
    tokens, a batch is taken to hold as much as before.
    """
    share = before["workers"] / now["workers"]
    if before["max_tokens"] and now["max_tokens"]:
        share *= before["max_tokens"] / now["max_tokens"]
    return round(position * share / now["update_freq"]) * now["update_freq"]


def _save(original, trainer, filename, extra_state):
    place = extra_state.get("train_iterator")
    if place is not None:
        ours = {"batches": _batches(trainer.cfg, place["epoch"])}
        memory = _early_stopping()
        if hasattr(memory, "best"):
            ours["early_stopping"] = {"best": memory.best, "num_runs": getattr(memory, "num_runs", 0)}
        extra_state = {**extra_state, KEY: ours}
    return original(trainer, filename, extra_state)


def _load(original, trainer, filename, *args, **kwargs):
    extra_state = original(trainer, filename, *args, **kwargs)
    if not extra_state or KEY not in extra_state:
        return extra_state
    ours, place = extra_state[KEY], extra_state["train_iterator"]
    now = _batches(trainer.cfg, place["epoch"])
    if place["iterations_in_epoch"] and ours["batches"] != now:
        # Of version 1, fairseq takes a place behind the end, which rounding can give, for the end of the epoch.
        place = {**place, "version": 1}
        place["iterations_in_epoch"] = convert_place(place["iterations_in_epoch"], ours["batches"], now)
        extra_state = {**extra_state, "train_iterator": place}
    memory = _early_stopping()
    if memory is not None and "early_stopping" in ours:
        memory.best, memory.num_runs = ours["early_stopping"]["best"], ours["early_stopping"]["num_runs"]
    return extra_state


def _log_files(logger: logging.Logger) -> list[logging.FileHandler]:
    return [handler for handler in logger.handlers if isinstance(handler, logging.FileHandler)]


def _broadcast(_, obj, src_rank, group, dist_device):
    """An object of worker ``src_rank`` for all."""
    holder = [obj]
    torch.distributed.broadcast_object_list(holder, src=src_rank, group=group, device=dist_device)
    return holder[0]


def _call_main(original, cfg, main, **kwargs):
    """A training begins in a process that has already run one; the first came before this module."""
    for function in (checkpoint_utils.save_checkpoint, _early_stopping()):
        for name in ("best", "num_runs"):
            if hasattr(function, name):
                delattr(function, name)
    for logger in (logging.getLogger("fairseq_cli.train"), progress_bar.logger):
        for handler in _log_files(logger):
            logger.removeHandler(handler)
            handler.close()
    for writer in progress_bar._tensorboard_writers.values():
        writer.close()
    progress_bar._tensorboard_writers.clear()
    return original(cfg, main, **kwargs)


def _progress_bar(original, *args, log_file=None, **kwargs):
    """The bar of one more epoch, which writes to the file that is open already."""
    there = [file.baseFilename for file in _log_files(progress_bar.logger)]
    if log_file is not None and os.path.abspath(log_file) in there:
        log_file = None
    return original(*args, log_file=log_file, **kwargs)


wrap(Trainer, "save_checkpoint", _save)
wrap(Trainer, "load_checkpoint", _load)
wrap(distributed_utils, "_broadcast_object_slow", _broadcast)
wrap(distributed_utils, "call_main", _call_main)
wrap(progress_bar, "progress_bar", _progress_bar)
