"""Each job of a sweep (``fairseq-hydra-train -m``) starts fresh.

The jobs run in one process, and fairseq keeps the best validation loss, the count of ``--patience``, the log file and
the TensorBoard writers of one job for the next.
"""

import logging

from fairseq import checkpoint_utils
from fairseq.distributed import utils as distributed_utils
from fairseq.logging import progress_bar

from pn_fairseq.fairseq_patches import patch
from pn_fairseq.fairseq_patches.early_stopping import counter
from pn_fairseq.fairseq_patches.log_file import file_handlers


@patch(distributed_utils, "call_main", "cfg main kwargs")
def call_main(original, cfg, main, **kwargs):
    """Called for each job. The first job was called before the plugin was loaded, and has nothing to clear."""
    for function in (checkpoint_utils.save_checkpoint, counter()):
        for name in ("best", "num_runs"):
            vars(function).pop(name, None) if function else None
    for logger in (logging.getLogger("fairseq_cli.train"), progress_bar.logger):
        for handler in file_handlers(logger):
            logger.removeHandler(handler)
            handler.close()
    for writer in progress_bar._tensorboard_writers.values():
        writer.close()
    progress_bar._tensorboard_writers.clear()
    return original(cfg, main, **kwargs)
