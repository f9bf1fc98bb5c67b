"""The settings of a model as fairseq passes them, flat or in a hydra node, and the settings of the
run beside them.
"""

from contextlib import AbstractContextManager, nullcontext

from omegaconf import OmegaConf, open_dict

from pn_fairseq.norms.registry import Circumstances


def writable(settings) -> AbstractContextManager:
    """In this block the settings of a model, even a hydra node, accept keys that they do not
    declare.
    """
    return open_dict(settings) if OmegaConf.is_config(settings) else nullcontext()


def run_setting(args, node: str, key: str):
    """A setting of a run; 0 if it is missing or empty.

    Args:
        args: the settings of a model as fairseq passes them. From the command line they are one
            flat Namespace with all settings. Under hydra the setting is in a ``node`` beside the
            model's node.
    """
    if hasattr(args, "_get_parent"):
        parent = args._get_parent()
        args = parent.get(node) if parent is not None else None
    return getattr(args, key, None) or 0


def learning_rate_warmup(args) -> int:
    """The warm-up of the learning rate in updates, under either name in fairseq's schedules; 0 if
    there is none.
    """
    return int(
        run_setting(args, "lr_scheduler", "warmup_updates")
        or run_setting(args, "lr_scheduler", "warmup_steps")
    )


def circumstances_of(args) -> Circumstances:
    """What the defaults of norms can depend on, but for the attention heads; ``args`` as in
    :func:`run_setting`.
    """
    updates = int(run_setting(args, "optimization", "max_update"))
    return Circumstances(warmup=learning_rate_warmup(args), updates=updates or None)
