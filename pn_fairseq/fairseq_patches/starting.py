"""A run starts with all of its ranks, also on CPUs and under ``torchrun``; no job of a sweep
continues another.

fairseq starts as many ranks as there are GPUs: on a CPU it does nothing and ends with exit code 0.
Under torchrun it divides by the number of GPUs or, without ``--distributed-world-size``, lets every
rank train alone and overwrite the checkpoints of the others. It passes a device number to torch's
DistributedDataParallel, which refuses it for a model on the CPU.

The jobs of a sweep (``fairseq-hydra-train -m``) run in one process, and fairseq keeps the best
validation loss, the count of ``--patience``, the log file and the TensorBoard writers of one job
for the next. It reopens ``--log-file`` in every epoch and keeps the earlier handlers: in epoch 10
each record is written 10 times.
"""

import importlib.util
import logging
import os
from argparse import ArgumentTypeError
from unittest import mock

import torch
from fairseq import checkpoint_utils
from fairseq.dataclass import initialize
from fairseq.distributed import utils as distributed_utils
from fairseq.logging import progress_bar
from fairseq.models import distributed_fairseq_model
from torch.multiprocessing import ProcessExitedException
from torch.nn.parallel import DistributedDataParallel

from pn_fairseq.common.errors import one_line_errors
from pn_fairseq.fairseq_patches import patch, running_program
from pn_fairseq.fairseq_patches.checkpoints import early_stopping_function
from pn_fairseq.fairseq_patches.command_line import architecture


def launched_ranks() -> int:
    """The number of ranks that torchrun has started; 1 without torchrun."""
    launched = os.environ.keys() >= {"MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "RANK"}
    return int(os.environ["WORLD_SIZE"]) if launched else 1


@patch(distributed_utils, "call_main", "cfg main kwargs")
def call_main(original, cfg, main, **kwargs):
    """Every command of fairseq except generation calls this to start its ranks."""
    settings, launched = cfg.distributed_training, launched_ranks()
    if launched > 1 and settings.distributed_init_method is None:
        settings.distributed_world_size = launched
    on_gpus = torch.cuda.is_available() and not cfg.common.cpu
    if settings.distributed_world_size == 1 or on_gpus:
        return original(cfg, main, **kwargs)
    if settings.distributed_backend == "nccl":
        settings.distributed_backend = "gloo"
    devices = 1 if launched > 1 else settings.distributed_world_size
    with mock.patch.object(torch.cuda, "device_count", lambda: devices):
        if settings.distributed_init_method is None:
            distributed_utils.infer_init_method(settings)
        if not settings.distributed_no_spawn:
            try:
                return original(cfg, main, **kwargs)
            except ProcessExitedException as error:  # the rank has reported why
                raise SystemExit(error.exit_code) from error
    return original(cfg, main, **kwargs)


def distributed_data_parallel(module, **options) -> DistributedDataParallel:
    """torch's DistributedDataParallel, without device numbers for a module on the CPU."""
    if all(parameter.device.type == "cpu" for parameter in module.parameters()):
        options |= {"device_ids": None, "output_device": None}
    return DistributedDataParallel(module, **options)


distributed_fairseq_model.DistributedDataParallel = distributed_data_parallel


@patch(initialize, "add_defaults", "cfg")
def begin(original, cfg):
    """Training calls this before anything else that needs settings, also in each job of a sweep."""
    original(cfg)
    forget_earlier_job()
    with one_line_errors(OSError, ValueError, ArgumentTypeError):
        check(cfg)
        if cfg.common.log_file is not None:
            os.makedirs(os.path.dirname(os.path.abspath(cfg.common.log_file)), exist_ok=True)


train = running_program("fairseq_cli.train")
if train is not None:
    train.add_defaults = initialize.add_defaults


def check(cfg) -> None:
    """Refuse what would end in a traceback, or in nothing trained.

    Raises:
        ArgumentTypeError: the architecture is unknown.
        ValueError: torchrun's ranks would train alone, or a package is missing.
    """
    name = getattr(cfg.get("model"), "_name", None)
    if name is not None:
        architecture(name)
    ranks = launched_ranks()
    if ranks > cfg.distributed_training.distributed_world_size == 1:
        raise ValueError(
            f"torchrun has started {ranks} ranks, each of which would train alone: use pn train or "
            f"fairseq-train, or give distributed_training.distributed_world_size={ranks}"
        )
    if (
        cfg.checkpoint.write_checkpoints_asynchronously
        and importlib.util.find_spec("iopath") is None
    ):
        raise ValueError(
            "--write-checkpoints-asynchronously needs the package iopath: pip install iopath"
        )


def forget_earlier_job() -> None:
    # Both functions keep the best loss in their attributes.
    for function in filter(None, (checkpoint_utils.save_checkpoint, early_stopping_function())):
        for name in ("best", "num_runs"):
            vars(function).pop(name, None)
    for logger in (logging.getLogger("fairseq_cli.train"), progress_bar.logger):
        for handler in file_handlers(logger):
            logger.removeHandler(handler)
            handler.close()
    for writer in progress_bar._tensorboard_writers.values():
        writer.close()
    progress_bar._tensorboard_writers.clear()


def file_handlers(logger: logging.Logger) -> list[logging.FileHandler]:
    return [handler for handler in logger.handlers if isinstance(handler, logging.FileHandler)]


@patch(
    progress_bar,
    "progress_bar",
    "iterator log_format log_interval log_file epoch prefix aim_repo aim_run_hash "
    "aim_param_checkpoint_dir tensorboard_logdir default_log_format wandb_project wandb_run_name "
    "azureml_logging",
)
def new_progress_bar(original, *args, log_file=None, **kwargs):
    opened = [handler.baseFilename for handler in file_handlers(progress_bar.logger)]
    if log_file is not None and os.path.abspath(log_file) in opened:
        log_file = None
    return original(*args, log_file=log_file, **kwargs)
