"""The settings of a training run: a pure function of a file in configs/, the overrides and the world size.

hydra reads the file and the overrides as ``fairseq-hydra-train`` does; then every key is checked, the tokens of an
update are spread over the ranks, and the model is built once on the meta device. A mistake is a
:class:`~pn_fairseq.common.command.UserError`, before anything is written. Every rank composes them for itself.
"""

import argparse
import dataclasses
import re
import typing
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from fairseq import tasks
from fairseq.dataclass.configs import FairseqConfig
from fairseq.dataclass.initialize import add_defaults
from fairseq.models import (
    ARCH_CONFIG_REGISTRY,
    ARCH_MODEL_NAME_REGISTRY,
    ARCH_MODEL_REGISTRY,
    MODEL_DATACLASS_REGISTRY,
    FairseqLanguageModel,
)
from fairseq.optim import build_optimizer
from fairseq.optim.lr_scheduler import build_lr_scheduler
from fairseq.registry import REGISTRIES
from fairseq.tasks import TASK_DATACLASS_REGISTRY, TASK_REGISTRY
from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

import pn_fairseq.plugin  # noqa: F401 (registers the architectures)
from pn_fairseq.common.command import UserError, did_you_mean, whole_number
from pn_fairseq.common.environment import patches_enabled
from pn_fairseq.common.files import configs_folder, recorded
from pn_fairseq.common.old_settings import renamed
from pn_fairseq.fairseq_patches.convert_norms import SETTINGS
from pn_fairseq.models.transformer_lm_pn import check_criterion
from pn_fairseq.norms.registry import NormEntry
from pn_fairseq.pipeline.checks import open_data, stand_in_dictionary
from pn_fairseq.pipeline.runs import flat, load_config

#: Settings of this pipeline in addition to fairseq's. Configs hold average_last in fairseq's free section ``scoring``.
OWN = ("tokens_per_update", "average_last")
#: These follow from the number of ranks.
DERIVED = ("world_size", "rank", "num_procs", "init_method", "port", "no_spawn")
#: Settings that may change when a run is resumed, as patterns of dotted names: when to stop, what to report, save and
#: validate, how to decode, where things are, on how many ranks. All others decide the weights.
MAY_CHANGE = re.compile(
    r"(generation|common_eval|eval_lm|interactive|distributed_training|bmuf|scoring)(\..*)?|average_last"
    r"|optimization\.(max_update|max_epoch|stop_time_hours|update_freq)"
    r"|checkpoint\.(patience|save_.*|keep_.*|no_(epoch|last|save).*|write_checkpoints_asynchronously|maximize_.*|best_.*)"
    r"|common\.(log_.*|tensorboard_logdir|wandb_.*|azureml_logging|aim_.*|user_dir|cpu|fp16_no_flatten_grads)"
    r"|dataset\.(num_workers.*|data_buffer_size|max_tokens|max_tokens_valid|batch_size_valid|max_valid_steps"
    r"|(validate|fixed_validation|disable_validation).*)"
    r"|task\.data|model\.norm_(stats_interval|probe.*)"
)
#: Limits that decide whether a run is finished.
LIMITS = ("optimization.max_update", "optimization.max_epoch", "optimization.stop_time_hours", "checkpoint.patience")


@dataclasses.dataclass(frozen=True)
class Batches:
    """How the tokens of one update are spread: ``world_size * update_freq * max_tokens`` of ``tokens_per_update``.

    Where batches are counted in sentences (``dataset.batch_size``, one rank only), the latter two may be None.
    """

    world_size: int
    update_freq: int
    max_tokens: int | None
    tokens_per_update: int | None

    def __str__(self) -> str:
        ranks = f"{self.world_size} rank{'s' if self.world_size > 1 else ''}"
        if self.max_tokens is None:
            return f"{ranks} x dataset.batch_size sentences x update-freq {self.update_freq}"
        product = self.world_size * self.update_freq * self.max_tokens
        of = "" if product == self.tokens_per_update else f" of {self.tokens_per_update}"
        return f"{ranks} x {self.max_tokens} tokens x update-freq {self.update_freq} = {product}{of} tokens per update"


def spread(tokens_per_update: int, cap: int, world_size: int) -> Batches:
    """Spread ``tokens_per_update`` over ``world_size`` ranks, none of which takes more than ``cap`` tokens at once.

    update_freq = ceil(tokens_per_update / (world_size * cap)), and then max_tokens = floor(tokens_per_update /
    (world_size * update_freq)), which is ``cap`` where that divides. fairseq deals the batches of an update out in
    turn, so ranks with the same max_tokens get the very batches that one rank takes one after the other.
    """
    update_freq = -(-tokens_per_update // (world_size * cap))
    max_tokens = tokens_per_update // (world_size * update_freq)
    if max_tokens < 1:
        raise UserError(f"{tokens_per_update} tokens per update are too few for {world_size} ranks")
    return Batches(world_size, update_freq, max_tokens, tokens_per_update)


def compose(config: Path, overrides: Sequence[str], world_size: int, on_cpu: bool) -> tuple[DictConfig, Batches]:
    """The settings of a training, as fairseq takes them, and its batches.

    ``overrides`` are ``key=value`` in hydra's syntax, with or without ``+``; ``on_cpu``: the ranks compute on CPUs.
    """
    for override in overrides:
        _check_section(config, override)
    given = [_forced(_as_list(override)) for override in overrides]
    names = {override.partition("=")[0].lstrip("+~") for override in given}
    for name in names:
        if name.removeprefix("distributed_training.distributed_") in DERIVED:
            raise UserError(f"{name} cannot be set here; it follows from NPROC or torchrun (see --help)")
    unresolved = _read(config, given)
    cfg = _resolved(unresolved)
    batches = _batches(config, cfg, names, world_size)
    # What follows from the number of ranks. Resolved again, since other settings refer to these.
    derived = {"distributed_training.distributed_world_size": world_size, "distributed_training.device_id": 0}
    if batches.max_tokens is not None:
        derived["optimization.update_freq"] = [batches.update_freq]
        derived["dataset.max_tokens"] = batches.max_tokens
        derived["dataset.max_tokens_valid"] = cfg.dataset.max_tokens_valid  # validation is not part of an update
    if world_size > 1:
        derived["distributed_training.distributed_no_spawn"] = True
        derived["distributed_training.distributed_init_method"] = "env://"
        if on_cpu and "distributed_training.distributed_backend" not in names:
            derived["distributed_training.distributed_backend"] = "gloo"
    if on_cpu and cfg.common.fp16 and not cfg.common.memory_efficient_fp16:
        derived["common.fp16_no_flatten_grads"] = True  # fairseq asks CUDA when it flattens them
    average_last = cfg.get("average_last", (cfg.scoring or {}).get("average_last", 0))
    average_last = whole_number("average_last", average_last, least=0) or None
    for key, value in derived.items():
        OmegaConf.update(unresolved, key, value)
    cfg = _resolved(unresolved)
    with open_dict(cfg):
        cfg.tokens_per_update, cfg.average_last, cfg.scoring = batches.tokens_per_update, average_last, None
    return cfg, batches


def _forced(override: str) -> str:
    """With ``++``, which sets a key whether or not the file has it; :func:`check_keys` refuses unknown ones."""
    key, equals, _ = override.partition("=")
    settable = equals and not key.startswith("~") and ("." in key or key.lstrip("+") in OWN)
    return f"++{override.lstrip('+')}" if settable else override


def _as_list(override: str) -> str:
    """A number where fairseq declares a list is a list of one: ``optimization.lr=0.001``."""
    key, _, value = override.partition("=")
    section, _, name = key.lstrip("+").partition(".")
    declared = FairseqConfig.__dataclass_fields__.get(section)
    fields = getattr(declared and declared.type, "__dataclass_fields__", {})
    is_list = name in fields and typing.get_origin(fields[name].type) is list
    return f"{key}=[{value}]" if is_list and re.fullmatch(r"[-+]?[\d.]+([eE][-+]?\d+)?", value) else override


def _check_section(config: Path, override: str) -> None:
    """Refuse a setting without its section, and name the section."""
    key, equals, value = override.lstrip("+").partition("=")
    if not equals or "." in key or key in OWN or key.startswith("~"):
        return
    if key in FairseqConfig.__dataclass_fields__:
        raise UserError(f"'{key}' is a section of the settings, did you mean '{key}._name={value}'?")
    raise UserError(f"unknown setting '{key}'{_did_you_mean(key, _read(config, []))}")


def _read(config: Path, overrides: Sequence[str]) -> DictConfig:
    """The settings as fairseq-hydra-train composes them, every key checked.

    The ``defaults`` of the file can name other files next to it, and those in configs/.
    """
    for override in overrides:
        try:
            OverridesParser.create().parse_override(override)
        except HydraException as error:
            advice = "put quotes around such a value: KEY=\"'VALUE'\""
            raise UserError(
                f"{override.lstrip('+')} cannot be read: {' '.join(str(error).split())}; {advice}"
            ) from error
    own = flat(OmegaConf.to_container(load_config(config)))  # hydra's message about a broken file has many lines
    try:
        with warnings.catch_warnings(action="ignore"), initialize_config_dir(str(config.parent), version_base="1.1"):
            cfg = hydra_compose(config.stem, [*overrides, f"hydra.searchpath=['file://{configs_folder()}']"])
        if "_name" not in (cfg.get("model") or {}) or not cfg.get("task"):
            raise UserError(f"{config} has no model._name or no task: it is not a configuration of a training")
        _check_own(config, own, cfg, overrides)
        check_keys(cfg)
        schema = OmegaConf.structured(FairseqConfig)
        OmegaConf.set_struct(schema, False)  # for OWN
        cfg = OmegaConf.merge(schema, cfg)
        of_patch = {key: cfg.model[key] for key in SETTINGS if key in cfg.model}
        cfg.model = {key: value for key, value in cfg.model.items_ex(resolve=False) if key not in of_patch}
        add_defaults(cfg)
        if of_patch:  # fairseq's dataclasses of models do not have these fields
            cfg.model = {**OmegaConf.to_container(cfg.model), **of_patch}
        return cfg
    except (HydraException, OmegaConfBaseException) as error:
        raise UserError(_one_line(error)) from error


def _check_own(config: Path, own: dict, cfg: DictConfig, overrides: Sequence[str]) -> None:
    """Refuse a setting of the file that one of its ``defaults`` replaces."""
    given = tuple(f"{override.partition('=')[0].lstrip('+~')}." for override in overrides)
    composed = flat(OmegaConf.to_container(cfg))
    for key, value in own.items():
        replaced = key in composed and composed[key] != value and not f"{key}.".startswith(given)
        if replaced and not key.startswith(("defaults", "hydra.")):
            raise UserError(
                f"{config} has {key}={value}, and a file among its defaults has {key}={composed[key]}, which counts "
                "because it comes later: leave one of them out, or put _self_ after that file"
            )


def _resolved(cfg: DictConfig) -> DictConfig:
    """A copy with plain values only."""
    try:
        return OmegaConf.create(OmegaConf.to_container(cfg, resolve=True, enum_to_str=True))
    except OmegaConfBaseException as error:
        raise UserError(_one_line(error)) from error


def _one_line(error: Exception) -> str:
    """hydra's message and advice, without the lines about its internal keys."""
    text = f"{error}\n{error.__cause__}" if isinstance(error, HydraException) and error.__cause__ else str(error)
    lines = [line.strip().rstrip(".") for line in text.splitlines()]
    kept = [line for line in lines if line and not re.match(r"full_key:|reference_type=|object_type=|See https", line)]
    line = ": ".join(dict.fromkeys(kept)).replace("++", "")
    line = line.replace("Invalid value assigned: AnyNode is not a ListConfig, list or tuple", "it must be a list")
    key = re.search(r"full_key: (\S+)", text)
    return line if key is None or key[1] in line else f"{key[1]}: {line}"


def check_keys(cfg: DictConfig) -> None:
    """Refuse a key that fairseq would ignore, and name the most similar one that exists."""
    sections = FairseqConfig.__dataclass_fields__
    for section, node in cfg.items():
        if section not in sections and section not in OWN:
            raise UserError(f"unknown section '{section}' in the settings{did_you_mean(section, [*sections, *OWN])}")
        known = _known_keys(section, node.get("_name")) if OmegaConf.is_dict(node) else None
        for key in node if known else ():
            if key not in known:
                raise UserError(f"unknown setting '{section}.{key}'{_did_you_mean(f'{section}.{key}', cfg)}")


def _did_you_mean(name: str, cfg: DictConfig) -> str:
    """Advice on a dotted name, or on one without its section: the same key elsewhere, or else the most similar one."""
    section, _, key = name.rpartition(".")
    keys = {}
    for known in FairseqConfig.__dataclass_fields__:
        node = cfg.get(known)
        if known != "_name":
            keys[known] = (_known_keys(known, node and node.get("_name")) or set()) - {"_name"}
    elsewhere = [f"{other}.{key}" for other in keys if key in keys[other]]
    if elsewhere:
        return did_you_mean(elsewhere[0], elsewhere[:1])
    for sections in ([section] if section in keys else [], keys):
        names = {similar: f"{other}.{similar}" for other in reversed(list(sections)) for similar in keys[other]}
        if advice := did_you_mean(key, [*names, *OWN]):
            return advice if (found := advice.split("'")[1]) in OWN else advice.replace(found, names[found])
    return ""


def _known_keys(section: str, name: str | None) -> set[str] | None:
    """The keys of a section, given its ``_name``; None where nothing is known about them."""
    always = {"_name", *(SETTINGS if section == "model" and patches_enabled() else ())}
    declared = FairseqConfig.__dataclass_fields__[section].type
    if dataclasses.is_dataclass(declared):
        return {field.name for field in dataclasses.fields(declared)}
    if section == "scoring" and name is None:
        return {"_name", "average_last"}
    if section == "model":
        if name not in ARCH_MODEL_REGISTRY:
            ours = sorted(arch for arch, cls in ARCH_MODEL_REGISTRY.items() if cls.__module__.startswith("pn_fairseq."))
            similar = did_you_mean(str(name), ours) or did_you_mean(str(name), ARCH_MODEL_REGISTRY)
            raise UserError(f"unknown architecture model._name={name}{similar or '; there are ' + ', '.join(ours)}")
        component = ARCH_MODEL_REGISTRY[name]
        declared = MODEL_DATACLASS_REGISTRY.get(ARCH_MODEL_NAME_REGISTRY[name])
    else:
        of_section = REGISTRIES.get(section, {})
        names, classes = of_section.get("registry", {}), of_section.get("dataclass_registry", {})
        if section == "task":
            names, classes = TASK_REGISTRY, TASK_DATACLASS_REGISTRY
        if name is not None and name not in names:
            raise UserError(f"unknown {section}: {section}._name={name}{did_you_mean(str(name), names)}")
        component, declared = names.get(name), classes.get(name)
    if declared is not None:
        return {field.name for field in dataclasses.fields(declared)} | always
    if not hasattr(component, "add_args"):
        return None
    parser = argparse.ArgumentParser(argument_default=argparse.SUPPRESS)
    component.add_args(parser)
    return {action.dest for action in parser._actions} | always


def _batches(config: Path, cfg: DictConfig, names: set[str], world_size: int) -> Batches:
    """The tokens per update are ``tokens_per_update``; without it, and where ``optimization.update_freq`` is
    overridden, ``update_freq * max_tokens``, which states them for one rank. Where ``dataset.max_tokens`` is overridden
    and ``update_freq`` is not, a rank takes another number of tokens at once, and an update the same.
    """
    frequencies = list(cfg.optimization.update_freq)
    if len(set(frequencies)) != 1 or int(frequencies[0]) < 1:
        raise UserError(f"optimization.update_freq={frequencies} must be one whole number, as in [4]")
    update_freq, cap = int(frequencies[0]), cfg.dataset.max_tokens
    if cap is None or cfg.dataset.batch_size is not None:
        if world_size > 1:
            raise UserError("several ranks need batches in tokens: set dataset.max_tokens, and no dataset.batch_size")
        return Batches(1, update_freq, cap, cap and cap * update_freq)
    cap = whole_number("dataset.max_tokens", cap)
    if {"tokens_per_update", "optimization.update_freq"} <= names:
        raise UserError("tokens_per_update and optimization.update_freq set the same thing: give one of them")
    tokens = cfg.get("tokens_per_update")
    if "optimization.update_freq" in names:
        tokens = update_freq * cap
    elif tokens is None:
        of_file = _read(config, []).dataset.max_tokens if "dataset.max_tokens" in names else cap
        tokens = update_freq * (of_file or cap)
    return spread(whole_number("tokens_per_update", tokens), cap, world_size)


def check_names(cfg: DictConfig) -> dict[str, NormEntry]:
    """Refuse norms and options of norms that do not exist, and a model of another task, without any data.

    Returns:
        The norms of the model: their names and entries in the registry; none for a model of fairseq.
    """
    is_lm = issubclass(ARCH_MODEL_REGISTRY[cfg.model._name], FairseqLanguageModel)
    if is_lm != {"language_modeling": True, "translation": False}.get(cfg.task._name, is_lm):
        raise UserError(f"model._name={cfg.model._name} is not a model for task._name={cfg.task._name}")
    norm_options = getattr(ARCH_MODEL_REGISTRY[cfg.model._name], "norm_options", None)
    if norm_options is None:  # a model of fairseq
        return {}
    filled = OmegaConf.create(OmegaConf.to_container(cfg))
    try:
        ARCH_CONFIG_REGISTRY[cfg.model._name](filled.model)
        return norm_options.from_args(filled.model).names()
    except ValueError as error:
        raise UserError(str(error)) from error


def check_model(cfg: DictConfig, data: Path, batches: Batches) -> torch.nn.Module:
    """Build all parts of the training, without memory for the weights, and look at the lengths of all sentences.

    Returns:
        The model, on the meta device.

    Raises:
        UserError: a part cannot be built, the data is damaged or does not fit the model, or a sentence is too long:
            fairseq would silently skip it.
    """
    task, model = build(cfg)
    if cfg.task._name == "language_modeling":
        _check_blocks(cfg, data, task, model)
        return model
    source, target = cfg.task.source_lang, cfg.task.target_lang
    limits = zip(("source", "target"), task.max_positions(), model.max_positions(), strict=True)
    dictionaries = (task.source_dictionary, task.target_dictionary)
    for (side, of_task, of_model), lang, dictionary in zip(limits, (source, target), dictionaries, strict=True):
        for split in ("train", "valid", "test"):
            limit = min(of_task, of_model)
            dataset = open_data(data / "bin", f"{split}.{source}-{target}.{lang}", dictionary)
            if split == "train" and cfg.dataset.max_tokens:
                limit = min(limit, cfg.dataset.max_tokens)
            too_long = dataset.sizes > limit
            if count := int(too_long.sum()):
                advice = f"raise dataset.max_tokens or task.max_{side}_positions and model.max_{side}_positions"
                if split == "train" and limit == batches.max_tokens and batches.world_size * batches.update_freq > 1:
                    advice = f"use fewer ranks or a larger tokens_per_update ({batches}), or {advice}"
                raise UserError(
                    f"{data}/bpe/{split}.{lang} has {count} sentences of more than {limit - 1} subwords, the first in "
                    f"line {int(too_long.argmax()) + 1}: fairseq would silently skip them; shorten them, or {advice}"
                )
    return model


def build(cfg: DictConfig, with_data: bool = True) -> tuple:
    """The task and the model, on the meta device, after criterion, optimizer and schedule; ``cfg`` stays as it is.

    Without the data a vocabulary stands in for its own.
    """
    cfg = OmegaConf.create(OmegaConf.to_container(cfg))
    try:
        if with_data:
            task = tasks.setup_task(cfg.task)
        else:
            dictionary = stand_in_dictionary(cfg)
            task = TASK_REGISTRY[cfg.task._name](cfg.task, dictionary, dictionary)
        with torch.device("meta"), open_dict(cfg):
            model = task.build_model(cfg.model)
        task.build_criterion(cfg.criterion)
        if isinstance(model, FairseqLanguageModel):
            check_criterion(model, cfg.criterion._name == "adaptive_loss")
        optimizer = build_optimizer(cfg.optimizer, [weight for weight in model.parameters() if weight.requires_grad])
        build_lr_scheduler(cfg.lr_scheduler, optimizer)
        return task, model
    except (UserError, OSError):
        raise
    except Exception as error:  # fairseq asserts, or raises plain ones
        reason = " ".join(str(error).split()) or type(error).__name__
        known = isinstance(error, ValueError) or type(error) is Exception
        raise UserError(reason if known else f"the settings fit no model: {reason}") from error


def _check_blocks(cfg: DictConfig, data: Path, task, model) -> None:
    """Every block of text has to fit model and batches."""
    block = whole_number("task.tokens_per_sample", cfg.task.tokens_per_sample)
    mode = cfg.task.sample_break_mode or "none"
    for split in ("train", "valid", "test"):
        text = open_data(data / "bin", split, task.dictionary)
        line = int(text.sizes.max())
        longest = {"none": block, "eos": line}.get(mode, max(block, line))
        if longest > model.max_positions():
            raise UserError(
                f"{split} has blocks of {longest} tokens, the model takes {model.max_positions()}: raise "
                "task.max_target_positions"
            )
        if split == "train" and cfg.dataset.max_tokens and longest > cfg.dataset.max_tokens:
            raise UserError(
                f"{split} has blocks of {longest} tokens, and a rank takes {cfg.dataset.max_tokens} at once: lower "
                "task.tokens_per_sample or raise dataset.max_tokens"
            )


def check_same_run(cfg: DictConfig, data: Path, run: Path) -> None:
    """Refuse to resume a run that was started with different settings or different data."""
    kept = run / "data.settings"
    if kept.is_file() and kept.read_bytes() != recorded(data, "settings").read_bytes():
        raise UserError(f"'{run}' was started with different data than '{data}' (compare {kept}); use another --run")
    norms = check_names(cfg)
    begun = OmegaConf.to_container(load_config(run / "config.yaml"))
    before, now = (_by_norm(renamed(flat(one)), norms) for one in (begun, OmegaConf.to_container(cfg)))
    keys = sorted({*before, *now}, key=lambda key: (not key.startswith("model."), key))
    changed = [key for key in keys if before.get(key) != now.get(key) and not MAY_CHANGE.fullmatch(key)]
    shown = [f"{key} {before.get(key)} -> {now.get(key)}" for key in changed]
    if shown:
        more = f", and {len(shown) - 3} more" if len(shown) > 3 else ""
        raise UserError(
            f"'{run}' was started with different settings: {', '.join(shown[:3])}{more}; use another --run or remove "
            "it (only limits, decoding, saving, validation and logging may change when a run is resumed)"
        )


def _by_norm(settings: dict[str, object], norms: Mapping[str, NormEntry]) -> dict[str, object]:
    """``settings`` by dotted name, with norm options as ``model.norm_options.NORM.KEY`` for each of the ``norms``."""
    prefix, given = "model.norm_options.", {}
    for key in [key for key in settings if key.startswith(prefix)]:
        norm, _, option = key.removeprefix(prefix).rpartition(".")
        given.setdefault(norm, {})[option] = settings.pop(key)
    for norm, entry in norms.items():
        options = {**given.get("", {}), **given.get(norm, {})}
        settings |= {f"{prefix}{norm}.{key}": value for key, value in options.items() if key in entry.own_options}
    return settings
