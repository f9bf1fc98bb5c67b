"""Settings, prepared data and checkpoints, checked before a training run begins.

hydra compares the settings of all sections but the model with the types that fairseq declares.
fairseq declares a model by the flags of its parser, and declares no ranges: :data:`RANGES` lists
them.
"""

import argparse
import ast
import math
import os
import re
import shlex
import warnings
from pathlib import Path

import torch
from fairseq import tasks
from fairseq.data import Dictionary
from fairseq.data.indexed_dataset import MMapIndexedDataset
from fairseq.models import ARCH_MODEL_REGISTRY, FairseqLanguageModel
from fairseq.optim import build_optimizer
from fairseq.optim.lr_scheduler import build_lr_scheduler
from fairseq.tasks import TASK_REGISTRY
from omegaconf import DictConfig, OmegaConf, open_dict

from pn_fairseq.common.checkpoint_files import LAST, newest_checkpoint
from pn_fairseq.common.checkpoints import CheckpointError, load_checkpoint
from pn_fairseq.common.command import UserError, whole_number
from pn_fairseq.common.errors import unknown
from pn_fairseq.common.files import read_settings
from pn_fairseq.fairseq_patches.one_line_errors import check_criterion
from pn_fairseq.models.from_checkpoint import load_weights
from pn_fairseq.pipeline import stamp
from pn_fairseq.pipeline.data.binarize import REMEDY, SPLITS, fault
from pn_fairseq.pipeline.runs import Run, flat
from pn_fairseq.pipeline.setting_roles import role_of
from pn_fairseq.pipeline.training_settings import Batches, flags, one_value

#: Patterns of dotted names, lower bound, upper bound (excluded).
RANGES = (
    (r"model\.(\w+_)?(dropout|layerdrop)|criterion\.label_smoothing", 0, 1),
    (
        r"model\.(encoder|decoder)_(layers|attention_heads|\w*_dim)|model\.(core_rank|cores)"
        r"|(model|task)\.max_(source|target)_positions|task\.tokens_per_sample|generation\.beam"
        r"|dataset\.(max_tokens|batch_size)(_valid)?|dataset\.required_batch_size_multiple",
        1,
        math.inf,
    ),
    (
        r"dataset\.(validate_interval|num_workers\w*)|checkpoint\.save_interval_updates"
        r"|optimization\.(lr|clip_norm|max_update|max_epoch|stop_time_hours)"
        r"|optimizer\.(weight_decay|adam_eps)|lr_scheduler\.(warmup_updates|min_lr)",
        0,
        math.inf,
    ),
    (
        r"optimization\.stop_min_lr|lr_scheduler\.warmup_init_lr|checkpoint\.(patience|keep_\w+s)",
        -1,
        math.inf,
    ),
)


def check_end(cfg: DictConfig) -> str:
    """How a training without a largest number of updates or epochs ends; "" if it has one.

    Raises:
        UserError: the training would never end.
    """
    if cfg.optimization.max_update or cfg.optimization.max_epoch:
        return ""
    names = ("optimization.stop_time_hours", "optimization.stop_min_lr", "checkpoint.patience")
    limits = {name: OmegaConf.select(cfg, name) for name in names}
    limits = [f"{name}={value}" for name, value in limits.items() if value and value > 0]
    if not limits:
        raise UserError(
            "optimization.max_update=0 sets no limit, and nothing else does: the training would "
            "never end; give a number above 0, or optimization.max_epoch"
        )
    return f"optimization.max_update=0 sets no limit: the training ends by {', '.join(limits)}"


def check_values(cfg: DictConfig) -> None:
    """Refuse a value of a wrong type, one that is not among a flag's choices, and one outside of
    its range.
    """
    parser = argparse.ArgumentParser()
    for action in flags("model", ARCH_MODEL_REGISTRY[cfg.model._name]):
        name, value = f"model.{action.dest}", cfg.model.get(action.dest)
        if value is not None and action.nargs == 0 and not isinstance(value, bool):
            raise UserError(f"{name}={value} must be true or false")
        if OmegaConf.is_list(value) and action.nargs is None and action.type in (int, float):
            raise UserError(one_value(name))
        # NormOptions.build checks norms and their options
        if value is not None and action.type in (int, float, str, None):
            try:
                parser._check_value(action, parser._get_value(action, str(value)))
            except argparse.ArgumentError as error:
                raise UserError(f"{name}={value}: {error.message}") from None
    betas = cfg.optimizer.get("adam_betas")
    if betas and not _are_betas(str(betas)):
        raise UserError(
            f"optimizer.adam_betas={betas} must be two numbers from 0 to below 1: '(0.9, 0.98)'"
        )
    if cfg.lr_scheduler._name == "inverse_sqrt" and cfg.lr_scheduler.warmup_updates == 0:
        raise UserError(
            "lr_scheduler.warmup_updates=0 fits no inverse_sqrt, which divides by it; give 1 for "
            "no warm-up"
        )
    for name, value in flat(OmegaConf.to_container(cfg)).items():
        for pattern, low, high in RANGES:
            if re.fullmatch(pattern, name):
                _check_range(name, value, low, high)
                break


def _are_betas(text: str) -> bool:
    try:
        first, second = ast.literal_eval(text)  # as fairseq evaluates it
        return 0 <= first < 1 and 0 <= second < 1
    except (SyntaxError, TypeError, ValueError):
        return False


def _check_range(name: str, value: object, low: float, high: float) -> None:
    for number in value if isinstance(value, list) else [value]:
        if isinstance(number, int | float) and not low <= number < high:
            end = "" if high == math.inf else f" and below {high}"
            raise UserError(
                f"{name}={value} is outside of its range: it must be at least {low}{end}"
            )


def build(cfg: DictConfig, with_data: bool = True) -> tuple:
    """The task and the model, on the meta device; criterion, optimizer and schedule are built as a
    check. ``cfg`` is not changed.

    Without the data, a made-up vocabulary replaces that of the data.
    """
    cfg = OmegaConf.create(OmegaConf.to_container(cfg))
    is_lm = issubclass(ARCH_MODEL_REGISTRY[cfg.model._name], FairseqLanguageModel)
    if is_lm != {"language_modeling": True, "translation": False}.get(cfg.task._name, is_lm):
        raise UserError(
            f"model._name={cfg.model._name} is not a model for task._name={cfg.task._name}"
        )
    try:
        if with_data:
            task = _task_with_data(cfg)
        else:
            # Larger than the vocabulary of WikiText-103 and the cutoffs of an adaptive softmax.
            cutoffs = re.findall(r"\d+", str(cfg.model.get("adaptive_softmax_cutoff")))
            dictionary = Dictionary()
            dictionary.symbols += ["word"] * max(300_000, *map(int, cutoffs), 0)
            task = TASK_REGISTRY[cfg.task._name](cfg.task, dictionary, dictionary)
        with torch.device("meta"), open_dict(cfg):
            model = task.build_model(cfg.model)
        task.build_criterion(cfg.criterion)
        if is_lm:
            check_criterion(model, cfg.criterion._name == "adaptive_loss")
        optimizer = build_optimizer(
            cfg.optimizer, [weight for weight in model.parameters() if weight.requires_grad]
        )
        build_lr_scheduler(cfg.lr_scheduler, optimizer)
        return task, model
    except (UserError, OSError):
        raise
    except Exception as error:  # fairseq asserts, or raises plain Exceptions
        reason = " ".join(str(error).split()) or type(error).__name__
        known = isinstance(error, ValueError) or type(error) is Exception
        raise UserError(reason if known else f"the settings fit no model: {reason}") from error


def _task_with_data(cfg: DictConfig) -> tasks.FairseqTask:
    try:
        return tasks.setup_task(cfg.task)
    except FileNotFoundError as error:
        missing = Path(error.filename or "")
        if missing.parent == Path(cfg.task.data):
            raise UserError(f"{missing.parent} has no {missing.name}: {REMEDY}") from error
        raise


def check_model(cfg: DictConfig, data: Path, batches: Batches) -> torch.nn.Module:
    """Build all parts of the training, without memory for the weights, and check the lengths of all
    sentences.

    Returns:
        The model, on the meta device.

    Raises:
        UserError: a part cannot be built, the data is damaged or does not fit the model, or a
            sentence is too long, so that fairseq would silently skip it.
    """
    task, model = build(cfg)
    if cfg.task._name == "language_modeling":
        _check_blocks(cfg, data, task, model)
        return model
    source, target = cfg.task.source_lang, cfg.task.target_lang
    sides = (("source", source, task.source_dictionary), ("target", target, task.target_dictionary))
    limits = map(min, task.max_positions(), model.max_positions())
    for (side, lang, dictionary), most in zip(sides, limits, strict=True):
        for split in _subsets_of(cfg):
            dataset = open_data(data / "bin", f"{split}.{source}-{target}.{lang}", dictionary)
            limit, setting = most, f"task.max_{side}_positions"
            if split == cfg.dataset.train_subset and cfg.dataset.max_tokens:
                limit = min(most, cfg.dataset.max_tokens)
            too_long = dataset.sizes > limit
            if not too_long.any():
                continue
            advice = f"raise task.max_{side}_positions and model.max_{side}_positions"
            if limit < most:
                setting = "dataset.max_tokens"
                advice = f"raise {setting}"
                if batches.world_size * batches.update_freq > 1:
                    advice += f", use fewer ranks or a larger tokens_per_update ({batches})"
            first = int(too_long.argmax()) + 1
            raise UserError(
                f"{setting} is too small: {data}/bpe/{split}.{lang} has {int(too_long.sum())} "
                f"sentences of more than {limit - 1} subwords, the first in line {first}: fairseq "
                f"would silently skip them; shorten them, or {advice}"
            )
    return model


def _subsets_of(cfg: DictConfig) -> list[str]:
    """The splits that a run trains and validates on, and the test set."""
    given = [cfg.dataset.train_subset, *str(cfg.dataset.valid_subset).split(","), "test"]
    return list(dict.fromkeys(given))


def check_subsets(cfg: DictConfig, data: Path) -> None:
    """Refuse the name of a split that prepared data does not contain."""
    known = {file.name.partition(".")[0] for file in (data / "bin").glob("*.idx")}
    for name in ("train_subset", "valid_subset"):
        for split in str(cfg.dataset[name]).split(","):
            if not known or split in known:
                continue
            if split in SPLITS:
                raise UserError(f"{data / 'bin'} has no {split}: {REMEDY}")
            text = unknown("split", split, sorted(known))
            raise UserError(f"dataset.{name}={cfg.dataset[name]}: {text} in '{data}'")


def _check_blocks(cfg: DictConfig, data: Path, task, model) -> None:
    """Check that every block of text fits model and batches."""
    block = whole_number("task.tokens_per_sample", cfg.task.tokens_per_sample)
    mode = cfg.task.sample_break_mode or "none"
    for split in _subsets_of(cfg):
        text = open_data(data / "bin", split, task.dictionary)
        line = int(text.sizes.max())
        longest = {"none": block, "eos": line}.get(mode, max(block, line))
        blocks = f"{split} has blocks of {longest} tokens"
        if longest > model.max_positions():
            raise UserError(
                f"{blocks}, the model takes {model.max_positions()}: raise "
                "task.max_target_positions"
            )
        of_training = split == cfg.dataset.train_subset and cfg.dataset.max_tokens
        if of_training and longest > cfg.dataset.max_tokens:
            raise UserError(
                f"dataset.max_tokens is too small: {blocks}, and a rank takes "
                f"{cfg.dataset.max_tokens} at once; raise it or lower task.tokens_per_sample"
            )


def open_data(folder: Path, name: str, dictionary: Dictionary) -> MMapIndexedDataset:
    """fairseq's data set ``name`` in the folder bin/, whose files are checked to be whole and to
    fit the dictionary.

    Its ``sizes`` are a view of a file that stays open as long as the data set exists.
    """
    problem = fault(folder, name, len(dictionary))
    if problem:
        raise UserError(f"{problem}: {REMEDY}")
    return MMapIndexedDataset(str(folder / name))


def take_languages(cfg: DictConfig, data: Path) -> None:
    """Translate from and to the languages of the prepared data, unless the settings name them.

    Raises:
        UserError: the settings name other languages than those of the data, or the data is not
            of the configuration's kind.
    """
    file = data / "settings.txt"
    if not file.is_file():  # pn train --check needs no data
        return
    settings = read_settings(file)
    source, target = settings.get("source"), settings.get("target")
    if "source_lang" not in cfg.task:
        if source is not None:
            raise UserError(
                f"'{data}' was prepared for translation ({source}-{target}), and the configuration "
                "trains a language model"
            )
        return
    if source is None or target is None:
        raise UserError(f"{file} names no languages: it is not of a translation corpus")
    wanted = cfg.task.source_lang or source, cfg.task.target_lang or target
    if wanted != (source, target):
        raise UserError(
            f"'{data}' was prepared from {source}-{target}, and the settings say "
            f"{'-'.join(wanted)}: add task.source_lang={source} task.target_lang={target}"
        )
    cfg.task.source_lang, cfg.task.target_lang = source, target


def check_same_run(cfg: DictConfig, data: Path, run: Path) -> None:
    """Refuse to resume a run that was started with different settings or different data."""
    kept = run / "data.settings"
    if kept.is_file() and kept.read_bytes() != (data / "settings.txt").read_bytes():
        raise UserError(
            f"'{run}' was started with different data than '{data}' (compare {kept}); use another "
            "--run"
        )
    before = Run(run).settings_by_name
    now = flat(OmegaConf.to_container(cfg))
    changed = []
    for key in sorted({*before, *now}, key=lambda key: (not key.startswith("model."), key)):
        old, new = before.get(key), now.get(key)
        if old != new and not role_of(key).may_change:
            old, new = ("unset" if value is None else value for value in (old, new))
            changed.append(f"{key} {old} -> {new}")
    if not changed:
        return
    shown = changed[:3]
    if len(changed) > 3:
        shown.append(f"and {len(changed) - 3} more")
    raise UserError(
        f"'{run}' was started with different settings: {', '.join(shown)}; use another --run or "
        "remove it (only limits, decoding, saving, validation and logging may change when a run is "
        "resumed)"
    )


def longer_than_asked(cfg: DictConfig, run: Path) -> str:
    """By how much a run is longer than the settings ask for, by its log; "" if it is not."""
    log = Run(run).log
    if log is None or log.saved is None:
        return ""
    for name, has in zip(("epoch", "update"), log.saved, strict=True):
        limit = cfg.optimization[f"max_{name}"] or 0
        if 0 < limit < has:
            asked = f"{limit} {name}{'s' * (limit > 1)}"
            return (
                f"'{run}' was trained for {has} {name}s, more than "
                f"optimization.max_{name}={limit}: it stays as it is, and is not comparable with "
                f"runs of {asked}, which need another folder"
            )
    return ""


def check_last(model: torch.nn.Module, last: Path, cfg: DictConfig) -> dict:
    """Read the checkpoint that a run resumes from; if it is damaged, the message names the newest
    other one.
    """
    try:
        state = load_checkpoint(last)
    except CheckpointError as error:
        command = _copy_of_newest(last)
        if not command:
            raise
        raise CheckpointError(f"{error}; the newest other one: {command}") from error
    check_fit(model, state, last, cfg)
    return state


def _copy_of_newest(last: Path) -> str:
    """The command that copies the newest other checkpoint over ``last``; "" if there is none."""
    newest = newest_checkpoint(last.parent, last)
    return shlex.join(["cp", str(newest), str(last)]) if newest else ""


def check_optimizer_state(state: dict, last: Path, cfg: DictConfig) -> None:
    """Refuse to resume from a checkpoint without the state of the optimizer: fairseq would count
    the updates from 0 again.
    """
    if state.get("last_optimizer_state") is not None or cfg.checkpoint.reset_optimizer:
        return
    origin = "pn average writes such files, and so does checkpoint.no_save_optimizer_state=true"
    if stamp.stamp_of(last).is_file():
        origin = "pn average wrote it"
    command = _copy_of_newest(last)
    resume = f"to resume from the newest other checkpoint: {command}; " if command else ""
    raise CheckpointError(
        f"{last} has no optimizer state ({origin}), so a training would begin again at update 0; "
        f"{resume}to train on from these weights, give a new --run and "
        f"checkpoint.finetune_from_model={shlex.quote(str(last))}"
    )


def check_last_is_there(run: Path) -> None:
    """Refuse a run with checkpoints, but without the one that it resumes from: it would begin again
    among them. A run that was killed during its first save begins again.
    """
    folder = run / "checkpoints"
    newest = newest_checkpoint(folder, folder / LAST)
    if newest is None or (folder / LAST).exists():
        return
    log = Run(run).log
    if log is not None and log.saved is None:
        return
    raise CheckpointError(
        f"{folder} has {newest.name} but no {LAST}: {_copy_of_newest(folder / LAST)} to resume "
        f"from it, or remove {run} to begin again"
    )


def check_fit(
    model: torch.nn.Module, state: dict, file: str | os.PathLike, cfg: DictConfig
) -> None:
    """Refuse a checkpoint in ``file`` that does not fit ``model``, which is on the meta device."""
    with warnings.catch_warnings(action="ignore"):  # nothing is copied to the meta device
        load_weights(model, state["model"], file, cfg.model)
