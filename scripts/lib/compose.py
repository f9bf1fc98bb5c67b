"""Compose the settings of a training run, check them, and say whether the run is finished.

compose.py CONFIG_FILE DATA RUN OUTPUT [key=value ...]

Writes every setting, as fairseq-hydra-train will see it, to OUTPUT, and prints "finished" if RUN has nothing left to
do with these settings, else "train". A mistake ends in exit code 2 and one line, before anything is trained: a setting
that does not exist or does not fit, an architecture or norm that cannot be built, a sentence that is too long for the
model.
"""

import contextlib
import io
import logging
import sys
import warnings
from pathlib import Path

import torch
from fairseq import tasks
from fairseq.data.data_utils import load_indexed_dataset
from fairseq.dataclass.initialize import add_defaults, hydra_init
from fairseq.models import ARCH_MODEL_REGISTRY
from hydra import compose, initialize_config_dir
from hydra.errors import HydraException
from omegaconf import OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

import pn_fairseq.models  # noqa: F401 (registers the architectures)
from pn_fairseq.checkpoints import CheckpointError, load_checkpoint

#: Settings that say when to stop or how to report. They may change between two stints of one run; others may not.
MAY_CHANGE = {
    "optimization": {"max_update", "max_epoch", "stop_time_hours"},
    "checkpoint": {"patience", "save_dir"},
    "common": {"log_interval", "log_format", "log_file", "tensorboard_logdir", "user_dir"},
    "dataset": {"num_workers"},
    # Where things are is no setting; that the data is the same is checked by its own settings.
    "task": {"data"},
}
STOP = ("optimization.max_update", "optimization.max_epoch", "optimization.stop_time_hours", "checkpoint.patience")


class Refused(Exception):
    """The settings do not fit; the text is what the user sees."""


def compose_settings(config: Path, overrides: list[str]):
    """The settings as fairseq-hydra-train composes them, plain values only."""
    hydra_init(config.stem)
    with initialize_config_dir(config_dir=str(config.parent), version_base="1.1"):
        settings = compose(config_name=config.stem, overrides=overrides)
    add_defaults(settings)
    return OmegaConf.create(OmegaConf.to_container(settings, resolve=True, enum_to_str=True))


def check_model(settings, data: Path) -> None:
    """Build the task and the model, without memory for its weights, and look at the lengths of all sentences."""
    arch = settings.model.get("_name")
    if arch not in ARCH_MODEL_REGISTRY:
        ours = sorted(name for name in ARCH_MODEL_REGISTRY if name.startswith("transformer_") and "pn" in name)
        raise Refused(f"model._name={arch} is no architecture; of this plugin's: {', '.join(ours)} and the like")
    source, target = settings.task.source_lang, settings.task.target_lang
    for lang in (source, target):
        if not (data / "bin" / f"dict.{lang}.txt").is_file():
            raise Refused(f"{data}/bin has no dictionary of '{lang}' (task.source_lang={source}, target_lang={target})")
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
                raise Refused(
                    f"{data}/bpe/{split}.{lang} has {long} sentences of more than {limit - 1} subwords, the first in "
                    f"line {line}: fairseq would leave them out without a word; shorten them, or raise "
                    f"dataset.max_tokens or model.max_{'source' if lang == source else 'target'}_positions"
                )


def flat(settings, prefix=()) -> dict[str, object]:
    """Settings by dotted name, those left out that may change."""
    values = {}
    for key, value in settings.items():
        if isinstance(value, dict):
            values |= flat(value, (*prefix, key))
        elif not (len(prefix) == 1 and key in MAY_CHANGE.get(prefix[0], ())):
            values[".".join((*prefix, str(key)))] = value
    return values


def check_same_run(settings, data: Path, run: Path) -> None:
    """Refuse to go on with a run that was begun with other settings or other data."""
    kept = run / "data.settings"
    if kept.is_file() and kept.read_bytes() != (data / "settings").read_bytes():
        raise Refused(f"'{run}' was begun with other data than '{data}' ({kept} tells which); name another --run")
    before = flat(OmegaConf.to_container(OmegaConf.load(run / "config.yaml")))
    now = flat(OmegaConf.to_container(settings))
    different = [key for key in sorted({*before, *now}) if before.get(key) != now.get(key)]
    if different:
        named = ", ".join(f"{key} {before.get(key)} -> {now.get(key)}" for key in different[:3])
        raise Refused(f"'{run}' was begun with other settings ({named}); name another --run or remove it")


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


def main(config: str, data: str, run: str, output: str, *overrides: str) -> str:
    settings = compose_settings(Path(config), list(overrides))
    check_model(settings, Path(data))
    begun = (Path(run) / "checkpoints/checkpoint_last.pt").exists() and (Path(run) / "config.yaml").exists()
    if begun:
        check_same_run(settings, Path(data), Path(run))
    OmegaConf.save(settings, output)
    return "finished" if begun and is_finished(settings, Path(run)) else "train"


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            answer = main(*sys.argv[1:])
    except (Refused, ValueError, HydraException, OmegaConfBaseException) as error:
        cause = error.__cause__ if isinstance(error, HydraException) and error.__cause__ else error
        lines = [line.strip() for line in f"{error}\n{cause}".splitlines() if line.strip()]
        print(lines[0], file=sys.stderr)
        sys.exit(2)
    print(answer)
