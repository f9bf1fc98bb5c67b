"""The settings of a training run: composed as fairseq-hydra-train will, fitted to the workers, and checked.

A mistake is a UserError, one line, before anything is trained: a setting that does not exist or does not fit, an
architecture or norm that cannot be built, a sentence that is too long for the model, other settings than those that a
run was begun with.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from fairseq import tasks
from fairseq.data.data_utils import load_indexed_dataset
from fairseq.dataclass.initialize import add_defaults, hydra_init
from fairseq.models import ARCH_MODEL_REGISTRY
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf, open_dict

import pn_fairseq.models  # noqa: F401 (registers the architectures)
from pn_fairseq.checkpoints import CheckpointError, load_checkpoint
from pn_fairseq.cli import UserError

#: Settings that say when to stop or how to report. They may change between two stints of one run; others may not.
MAY_CHANGE = {
    "optimization": {"max_update", "max_epoch", "stop_time_hours", "update_freq"},
    "checkpoint": {"patience", "save_dir", "keep_last_epochs", "keep_interval_updates"},
    "common": {"log_interval", "log_format", "log_file", "tensorboard_logdir", "user_dir", "cpu"},
    "bmuf": {"distributed_world_size"},
    # A run may go on with another number of workers; what holds is tokens_per_update.
    "dataset": {"num_workers", "max_tokens", "max_tokens_valid"},
    # Where things are is no setting; that the data is the same is checked by its own settings.
    "task": {"data"},
}
#: The same for whole sections, and for what this pipeline adds to fairseq's settings.
MAY_CHANGE_WHOLLY = {"distributed_training", "average_last"}
STOP = ("optimization.max_update", "optimization.max_epoch", "optimization.stop_time_hours", "checkpoint.patience")


#: What is derived from the number of workers and where they are, and so is no setting for the user.
OURS = ("world_size", "rank", "num_procs", "init_method", "port", "no_spawn")


@dataclass(frozen=True)
class Batches:
    """How the tokens of one update are spread: ``workers * update_freq * max_tokens`` of ``tokens_per_update``.

    Where batches are counted in sentences (``dataset.batch_size`` without ``dataset.max_tokens``, one worker only),
    ``tokens_per_update`` and ``max_tokens`` are None.
    """

    workers: int
    update_freq: int
    max_tokens: int | None
    tokens_per_update: int | None

    def __str__(self) -> str:
        if self.max_tokens is None:
            return f"1 worker x dataset.batch_size sentences x update-freq {self.update_freq}"
        product = self.workers * self.update_freq * self.max_tokens
        of = "" if product == self.tokens_per_update else f" of {self.tokens_per_update}"
        workers = f"{self.workers} worker{'s' if self.workers > 1 else ''}"
        factors = f"{workers} x {self.max_tokens} tokens x update-freq {self.update_freq}"
        return f"{factors} = {product}{of} tokens per update"


def spread(tokens_per_update: int, cap: int, workers: int) -> Batches:
    """Spread ``tokens_per_update`` over ``workers``, none of which takes more than ``cap`` tokens at once.

    update_freq = ceil(tokens_per_update / (workers * cap)), and then max_tokens = floor(tokens_per_update / (workers *
    update_freq)), which is ``cap`` where that divides. fairseq deals the batches of an update out in turn, so workers
    with the same max_tokens get the very batches that one worker takes one after the other.
    """
    update_freq = -(-tokens_per_update // (workers * cap))
    max_tokens = tokens_per_update // (workers * update_freq)
    if max_tokens < 1:
        raise UserError(f"{tokens_per_update} tokens per update are too few for {workers} workers")
    return Batches(workers, update_freq, max_tokens, tokens_per_update)


def names(overrides: Sequence[str]) -> set[str]:
    """The settings that ``overrides`` change."""
    return {override.split("=", 1)[0].lstrip("+~").split("@", 1)[0] for override in overrides}


def compose_batches(config: Path, overrides: Sequence[str], workers: int) -> Batches:
    """The batches that the settings ask for, on ``workers`` workers.

    The tokens per update are ``tokens_per_update``, of the configuration or an override; without it, and where
    ``optimization.update_freq`` is overridden, ``update_freq * max_tokens``, which states it for one worker. An
    override of ``dataset.max_tokens`` alone changes how much a worker takes at once, not the tokens per update.
    """
    settings = compose_settings(config, list(overrides))
    given = names(overrides)
    frequencies = list(settings.optimization.update_freq)
    if len(set(frequencies)) != 1 or int(frequencies[0]) < 1:
        raise UserError(f"optimization.update_freq={frequencies} must be one whole number, as in [4]")
    update_freq, cap = int(frequencies[0]), settings.dataset.max_tokens
    if taken := sorted(key for key in given if key.removeprefix("distributed_training.distributed_") in OURS):
        raise UserError(f"{taken[0]} is not for you to set: NPROC, NNODES and so on say it (see --help)")
    if cap is None or settings.dataset.batch_size is not None:
        if workers > 1:
            raise UserError("several workers need batches in tokens: set dataset.max_tokens, and no dataset.batch_size")
        return Batches(1, update_freq, cap, cap and cap * update_freq)
    if cap < 1:
        raise UserError(f"dataset.max_tokens={cap} must be at least 1")
    if {"tokens_per_update", "optimization.update_freq"} <= given:
        raise UserError("tokens_per_update and optimization.update_freq say the same thing: give one of them")
    tokens = settings.get("tokens_per_update")
    if "optimization.update_freq" in given:
        tokens = update_freq * cap
    elif tokens is None:
        without = [override for override in overrides if names([override]) != {"dataset.max_tokens"}]
        tokens = update_freq * (compose_settings(config, without).dataset.max_tokens or cap)
    if not isinstance(tokens, int) or isinstance(tokens, bool) or tokens < 1:
        raise UserError(f"tokens_per_update={tokens} must be a whole number of at least 1")
    return spread(tokens, cap, workers)


def batch_overrides(batches: Batches, settings) -> list[str]:
    """``batches`` as overrides, for settings composed without them."""
    if batches.max_tokens is None:
        return []
    changes = [f"++tokens_per_update={batches.tokens_per_update}", f"optimization.update_freq=[{batches.update_freq}]"]
    changes.append(f"dataset.max_tokens={batches.max_tokens}")
    # Validation is no update: it goes on in batches of the size that was asked for.
    return [*changes, f"dataset.max_tokens_valid={settings.dataset.max_tokens_valid}"]


def compose_settings(config: Path, overrides: list[str]):
    """The settings as fairseq-hydra-train composes them, plain values only."""
    hydra_init(config.stem)
    with initialize_config_dir(config_dir=str(config.parent), version_base="1.1"):
        settings = compose(config_name=config.stem, overrides=overrides)
    add_defaults(settings)
    return OmegaConf.create(OmegaConf.to_container(settings, resolve=True, enum_to_str=True))


def check_model(settings, data: Path, batches: Batches) -> None:
    """Build the task and the model, without memory for its weights, and look at the lengths of all sentences."""
    arch = settings.model.get("_name")
    if arch not in ARCH_MODEL_REGISTRY:
        ours = sorted(name for name in ARCH_MODEL_REGISTRY if name.startswith("transformer_") and "pn" in name)
        raise UserError(f"model._name={arch} is no architecture; of this plugin's: {', '.join(ours)} and the like")
    source, target = settings.task.source_lang, settings.task.target_lang
    for lang in (source, target):
        if not (data / "bin" / f"dict.{lang}.txt").is_file():
            raise UserError(
                f"{data}/bin has no dictionary of '{lang}' (task.source_lang={source}, target_lang={target})"
            )
    settings = OmegaConf.create(OmegaConf.to_container(settings))
    task = tasks.setup_task(settings.task)
    with torch.device("meta"), open_dict(settings):
        model = task.build_model(settings.model)
    for split in ("train", "valid", "test"):
        for lang, limit in zip((source, target), model.max_positions(), strict=True):
            dataset = load_indexed_dataset(str(data / "bin" / f"{split}.{source}-{target}.{lang}"))
            sizes = dataset.sizes  # a view of the file that the dataset keeps open
            if split == "train" and settings.dataset.max_tokens:
                limit = min(limit, settings.dataset.max_tokens)
            too_long = sizes > limit
            if long := int(too_long.sum()):
                line = int(too_long.argmax()) + 1
                positions = f"model.max_{'source' if lang == source else 'target'}_positions"
                instead = f"raise dataset.max_tokens or {positions}"
                if (
                    split == "train"
                    and limit == batches.max_tokens
                    and (batches.workers > 1 or batches.update_freq > 1)
                ):
                    instead = f"take fewer workers or a larger tokens_per_update ({batches}), or {instead}"
                raise UserError(
                    f"{data}/bpe/{split}.{lang} has {long} sentences of more than {limit - 1} subwords, the first in "
                    f"line {line}: fairseq would leave them out without a word; shorten them, or {instead}"
                )


def flat(settings, prefix=()) -> dict[str, object]:
    """Settings by dotted name, those left out that may change."""
    values = {}
    for key, value in settings.items():
        if not prefix and key in MAY_CHANGE_WHOLLY:
            continue
        if isinstance(value, dict):
            values |= flat(value, (*prefix, key))
        elif not (len(prefix) == 1 and key in MAY_CHANGE.get(prefix[0], ())):
            values[".".join((*prefix, str(key)))] = value
    return values


def check_same_run(settings, data: Path, run: Path) -> None:
    """Refuse to go on with a run that was begun with other settings or other data."""
    kept = run / "data.settings"
    if kept.is_file() and kept.read_bytes() != (data / "settings").read_bytes():
        raise UserError(f"'{run}' was begun with other data than '{data}' ({kept} tells which); name another --run")
    begun = OmegaConf.to_container(OmegaConf.load(run / "config.yaml"))
    before, now = flat(begun), flat(OmegaConf.to_container(settings))
    if "tokens_per_update" not in before and begun["dataset"]["max_tokens"]:
        # A run from before the settings said so.
        workers = begun["distributed_training"]["distributed_world_size"]
        before["tokens_per_update"] = begun["dataset"]["max_tokens"] * begun["optimization"]["update_freq"][0] * workers
    different = [key for key in sorted({*before, *now}) if before.get(key) != now.get(key)]
    if different:
        named = ", ".join(f"{key} {before.get(key)} -> {now.get(key)}" for key in different[:3])
        raise UserError(f"'{run}' was begun with other settings ({named}); name another --run or remove it")


def is_finished(settings, run: Path) -> bool:
    """Whether the run has come to its end: its last update, or an end that fairseq announced for the same limits."""
    try:
        last = load_checkpoint(run / "checkpoints/checkpoint_last.pt")
    except CheckpointError:
        return False  # train.sh makes a damaged one again before it trains
    updates = last["optimizer_history"][-1]["num_updates"]
    limit = settings.optimization.max_update
    if limit and updates >= limit:
        return True
    log = run / "train.log"
    lines = log.read_text("utf-8", errors="replace").splitlines() if log.is_file() else []
    ended = bool(lines) and "done training" in lines[-1]
    before = OmegaConf.load(run / "config.yaml")
    return ended and all(OmegaConf.select(before, key) == OmegaConf.select(settings, key) for key in STOP)
