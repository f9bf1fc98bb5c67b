"""Each record is written to ``--log-file`` once.

fairseq opens the file again in every epoch and keeps the earlier handlers: in epoch 10 each record is written 10 times.
"""

import logging
import os

from fairseq.logging import progress_bar

from pn_fairseq.fairseq_patches import patch


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
