"""The count of ``--patience`` survives an interruption (fairseq issue 3531).

fairseq counts the validations without improvement in attributes of a function, which no checkpoint holds: a training
that is interrupted more often than the patience allows never stops early. Here the count is part of the checkpoint.
"""

import sys

from fairseq.trainer import Trainer

from pn_fairseq.fairseq_patches import patch

#: Key in a checkpoint's ``extra_state`` of what the patches add.
KEY = "pn_fairseq"


def counter():
    """fairseq's function whose attributes ``best`` and ``num_runs`` are the count; None outside of a training."""
    return getattr(sys.modules.get("fairseq_cli.train"), "should_stop_early", None)


@patch(Trainer, "save_checkpoint", "self filename extra_state")
def save(original, trainer, filename, extra_state):
    count = counter()
    if hasattr(count, "best"):
        ours = {"early_stopping": {"best": count.best, "num_runs": getattr(count, "num_runs", 0)}}
        extra_state = {**extra_state, KEY: {**extra_state.get(KEY, {}), **ours}}
    return original(trainer, filename, extra_state)


@patch(Trainer, "load_checkpoint", "self filename reset_optimizer reset_lr_scheduler optimizer_overrides reset_meters")
def load(original, trainer, filename, reset_optimizer=False, *args, reset_meters=False, **kwargs):
    extra_state = original(trainer, filename, reset_optimizer, *args, reset_meters=reset_meters, **kwargs)
    saved = (extra_state or {}).get(KEY, {}).get("early_stopping")
    count = counter()
    # A new training from these weights has another best loss. fairseq resets its own best loss by the same rule.
    if saved and count and not reset_optimizer and not reset_meters:
        count.best, count.num_runs = saved["best"], saved["num_runs"]
    return extra_state
