"""``--norm-probe`` is notified where an update begins and ends.

fairseq's trainer gives the model only the number of the update, before each of its batches; the model cannot see
whether the update was skipped, and which batch is the last one.
"""

import os

from fairseq.trainer import Trainer

from pn_fairseq.common.errors import one_line_errors
from pn_fairseq.fairseq_patches import patch


@patch(Trainer, "train_step", "self samples raise_oom")
def train_step(original, trainer, *arguments, **options):
    probe = getattr(trainer.get_model(), "norm_probe", None)
    if probe is None:
        return original(trainer, *arguments, **options)
    with one_line_errors(ValueError, OSError):
        probe.begin(trainer.get_num_updates(), trainer.criterion, os.path.abspath(trainer.cfg.checkpoint.save_dir))
    result = original(trainer, *arguments, **options)
    with one_line_errors(OSError):
        probe.end(trainer.get_num_updates())
    return result
