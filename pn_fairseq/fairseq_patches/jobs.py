"""Each job of a sweep (``fairseq-hydra-train -m``) starts fresh, and each record is written to ``--log-file`` once.

The jobs run in one process, and fairseq keeps the best validation loss, the count of ``--patience``, the log file and
the TensorBoard writers of one job for the next. It opens the log file again in every epoch and keeps the earlier
handlers: in epoch 10 each record is written 10 times.
"""

import logging
import os
import sys

from fairseq import checkpoint_utils
from fairseq.dataclass import initialize
from fairseq.logging import progress_bar

from pn_fairseq.common.errors import one_line_errors
from pn_fairseq.fairseq_patches import patch
from pn_fairseq.fairseq_patches.resuming import counter


@patch(initialize, "add_defaults", "cfg")
def begin(original, cfg):
    """A training calls this before everything else that needs settings, also in each job of a sweep."""
    original(cfg)
    forget_earlier_job()
    with one_line_errors(OSError):
        if cfg.common.log_file is not None:
            os.makedirs(os.path.dirname(os.path.abspath(cfg.common.log_file)), exist_ok=True)


if "fairseq_cli.train" in sys.modules:
    sys.modules["fairseq_cli.train"].add_defaults = initialize.add_defaults


def forget_earlier_job() -> None:
    for function in filter(None, (checkpoint_utils.save_checkpoint, counter())):
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
    "iterator log_format log_interval log_file epoch prefix aim_repo aim_run_hash aim_param_checkpoint_dir "
    "tensorboard_logdir default_log_format wandb_project wandb_run_name azureml_logging",
)
def new_progress_bar(original, *args, log_file=None, **kwargs):
    opened = [handler.baseFilename for handler in file_handlers(progress_bar.logger)]
    if log_file is not None and os.path.abspath(log_file) in opened:
        log_file = None
    return original(*args, log_file=log_file, **kwargs)
