"""A training resumed with other batches continues at the same share of the epoch.

fairseq saves the place in an epoch as a number of batches of one rank. With another number of ranks, another
``update_freq`` or another ``max_tokens`` that number is another place: sentences would be skipped or repeated.
"""

from fairseq.trainer import Trainer

from pn_fairseq.fairseq_patches import patch
from pn_fairseq.fairseq_patches.early_stopping import KEY


def batches(cfg, epoch: int) -> dict:
    """The unit of the place in an epoch: ``workers`` ranks take ``max_tokens`` tokens each, ``update_freq`` times."""
    frequencies = cfg.optimization.update_freq
    return {
        "workers": cfg.distributed_training.distributed_world_size,
        "max_tokens": cfg.dataset.max_tokens,
        "update_freq": frequencies[min(epoch, len(frequencies)) - 1],
    }


def convert(place: int, before: dict, now: dict) -> int:
    """The place in units of ``now`` after the same number of tokens, workers * max_tokens * place; whole updates.

    Batches that are counted in sentences are taken to hold as much as before.
    """
    share = before["workers"] / now["workers"]
    if before["max_tokens"] and now["max_tokens"]:
        share *= before["max_tokens"] / now["max_tokens"]
    return round(place * share / now["update_freq"]) * now["update_freq"]


@patch(Trainer, "save_checkpoint", "self filename extra_state")
def save(original, trainer, filename, extra_state):
    iterator = extra_state.get("train_iterator")
    if iterator is not None:
        ours = {"batches": batches(trainer.cfg, iterator["epoch"])}
        extra_state = {**extra_state, KEY: {**extra_state.get(KEY, {}), **ours}}
    return original(trainer, filename, extra_state)


@patch(Trainer, "load_checkpoint", "self filename reset_optimizer reset_lr_scheduler optimizer_overrides reset_meters")
def load(original, trainer, *args, **kwargs):
    extra_state = original(trainer, *args, **kwargs)
    before = (extra_state or {}).get(KEY, {}).get("batches")
    if before is None:
        return extra_state
    iterator = extra_state["train_iterator"]
    now = batches(trainer.cfg, iterator["epoch"])
    if not iterator["iterations_in_epoch"] or before == now:
        return extra_state
    place = convert(iterator["iterations_in_epoch"], before, now)
    # Rounding can give a place behind the end. fairseq takes that for the end of the epoch in version 1 only.
    return {**extra_state, "train_iterator": {**iterator, "version": 1, "iterations_in_epoch": place}}
