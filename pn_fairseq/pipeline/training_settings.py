"""The settings of a training run: a pure function of a file in configs/, the overrides and the
world size.

hydra reads the file and the overrides as ``fairseq-hydra-train`` does; then every key is checked,
and the tokens of an update are spread over the ranks. A mistake raises
:class:`~pn_fairseq.common.command.UserError` before anything is written. Every rank composes the
settings itself.
"""

import argparse
import dataclasses
import difflib
import inspect
import os
import re
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path

from fairseq import options
from fairseq.dataclass.configs import FairseqConfig
from fairseq.dataclass.initialize import add_defaults
from fairseq.models import ARCH_MODEL_REGISTRY
from fairseq.registry import REGISTRIES
from fairseq.tasks import TASK_REGISTRY
from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.errors import HydraException, OverrideParseException
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

import pn_fairseq.models  # noqa: F401 (registers the architectures)
from pn_fairseq.common.command import (
    UserError,
    absolute,
    did_you_mean,
    say,
    split_paths,
    whole_number,
)
from pn_fairseq.common.files import CONFIGS
from pn_fairseq.fairseq_patches.convert_norms import SETTINGS
from pn_fairseq.pipeline.runs import load_config
from pn_fairseq.pipeline.setting_roles import role_of

#: Settings of this pipeline in addition to fairseq's. Configs hold average_last in fairseq's
#: free-form section ``scoring``.
OWN = ("tokens_per_update", "average_last")
#: A short run logs more often than its configuration says, so that its learning curve has this many
#: points.
POINTS = 20
#: Settings that name files. They become absolute, since a run may be resumed, decoded or reported
#: from another folder.
PATHS = (
    "checkpoint.continue_once",
    "checkpoint.finetune_from_model",
    "common.quantization_config_path",
    "common.tensorboard_logdir",
    "model.decoder_embed_path",
    "model.encoder_embed_path",
    "model.norm_module",
    "model.norm_probe",
)
#: The sections of fairseq's settings.
SECTIONS = {
    name: field.type
    for name, field in FairseqConfig.__dataclass_fields__.items()
    if name != "_name"
}
#: Sections whose component is often replaced by another with other settings.
EXCHANGED = ("criterion", "lr_scheduler", "optimizer")
#: Settings that follow from the number of ranks.
DERIVED = ("world_size", "rank", "num_procs", "init_method", "port", "no_spawn")


@dataclasses.dataclass(frozen=True)
class Batches:
    """How the tokens of one update are spread: ``world_size * update_freq * max_tokens`` of
    ``tokens_per_update``.

    If batches are counted in sentences (``dataset.batch_size``, one rank only), the latter two may
    be None.
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
        return (
            f"{ranks} x {self.max_tokens} tokens x update-freq {self.update_freq} = {product}{of} "
            f"tokens per update"
        )


def spread(tokens_per_update: int, cap: int, world_size: int) -> Batches:
    """Spread ``tokens_per_update`` over ``world_size`` ranks, none of which processes more than
    ``cap`` tokens at once.

    update_freq = ceil(tokens_per_update / (world_size * cap)), and then max_tokens =
    floor(tokens_per_update / (world_size * update_freq)), which is ``cap`` where that divides.
    fairseq assigns the batches of an update to the ranks in turn, so with the same max_tokens they
    get the very batches that a single rank would process in sequence.
    """
    update_freq = -(-tokens_per_update // (world_size * cap))
    max_tokens = tokens_per_update // (world_size * update_freq)
    if max_tokens < 1:
        raise UserError(f"{tokens_per_update} tokens per update are too few for {world_size} ranks")
    return Batches(world_size, update_freq, max_tokens, tokens_per_update)


def compose(
    config: Path, overrides: Sequence[str], world_size: int, on_cpu: bool
) -> tuple[DictConfig, Batches]:
    """The settings of a training run, as fairseq expects them, and its batches.

    ``overrides`` are ``key=value`` in hydra's syntax, with or without ``+``; ``on_cpu``: the ranks
    compute on CPUs.
    """
    given = {}
    for override in overrides:
        name, _, value = override.lstrip("+").partition("=")
        given[name] = value
    for name, value in given.items():
        if name.removeprefix("distributed_training.distributed_") in DERIVED:
            raise UserError(
                f"{name} cannot be set here; it follows from --ranks or torchrun (see --help)"
            )
        if name in SECTIONS:
            raise UserError(
                f"'{name}' is a section of the settings, did you mean '{name}._name={value}'?"
            )
    try:
        cfg = _read(config, overrides)
        batches = _batches(config, cfg, given, world_size)
        _fit_batches(cfg, batches)
        if cfg.optimization.max_update and "common.log_interval" not in given:
            most = max(1, int(cfg.optimization.max_update) // POINTS)
            cfg.common.log_interval = min(int(cfg.common.log_interval), most)
        backend_given = "distributed_training.distributed_backend" in given
        _fit_ranks(cfg, world_size, on_cpu, backend_given)
        cfg = OmegaConf.create(OmegaConf.to_container(cfg, resolve=True, enum_to_str=True))
    except (HydraException, OmegaConfBaseException) as error:
        raise UserError(_one_line(error)) from error
    _make_absolute(cfg)
    average_last = cfg.get("average_last", (cfg.scoring or {}).get("average_last"))
    if average_last is not None:
        average_last = whole_number("average_last", average_last)
    cfg.average_last = average_last
    cfg.tokens_per_update, cfg.scoring = batches.tokens_per_update, None
    return cfg, batches


def _fit_batches(cfg: DictConfig, batches: Batches) -> None:
    if batches.max_tokens is None:
        return
    # In fairseq max_tokens_valid is a reference to max_tokens; the assignment fixes its value,
    # because validation is not part of an update.
    cfg.dataset.max_tokens_valid = cfg.dataset.max_tokens_valid
    cfg.dataset.max_tokens = batches.max_tokens
    cfg.optimization.update_freq = [batches.update_freq]


def _fit_ranks(cfg: DictConfig, world_size: int, on_cpu: bool, backend_given: bool) -> None:
    distributed = cfg.distributed_training
    distributed.distributed_world_size = world_size
    # fairseq reads LOCAL_RANK, and the settings of all ranks must be the same
    distributed.device_id = 0
    if world_size > 1:
        distributed.distributed_no_spawn = True
        distributed.distributed_init_method = "env://"
        if on_cpu and not backend_given:
            distributed.distributed_backend = "gloo"
    if on_cpu and cfg.common.fp16 and not cfg.common.memory_efficient_fp16:
        cfg.common.fp16_no_flatten_grads = True  # fairseq calls CUDA to flatten gradients


def _make_absolute(cfg: DictConfig) -> None:
    for name in PATHS:
        value = OmegaConf.select(cfg, name)
        if not value:
            continue
        paths = [str(value)]
        if name == "model.norm_module":  # files, separated by commas
            paths = split_paths(str(value))
            for path in paths:
                if not os.path.isfile(path):
                    raise UserError(
                        f"model.norm_module: there is no file '{path}'; name it by "
                        "model.norm_module=FILE"
                    )
        OmegaConf.update(cfg, name, ",".join(str(absolute(path)) for path in paths))


def _read(config: Path, overrides: Sequence[str]) -> DictConfig:
    """The settings as fairseq-hydra-train composes them, with every key checked.

    The ``defaults`` of the file can name other files next to it, and files in configs/.
    """
    # With ++, hydra sets a key whether or not the file contains it.
    forced = [
        override if override.startswith("~") else f"++{override.lstrip('+')}"
        for override in overrides
    ]
    load_config(config)  # checked first: hydra's message about a broken file has many lines
    with (
        warnings.catch_warnings(action="ignore"),
        initialize_config_dir(str(config.parent), version_base="1.1"),
    ):
        cfg = hydra_compose(config.stem, [*forced, f"hydra.searchpath=['file://{CONFIGS}']"])
    if "_name" not in (cfg.get("model") or {}) or "_name" not in (cfg.get("task") or {}):
        raise UserError(
            f"{config} has no model._name or no task._name: it is not a configuration of a "
            "training run"
        )
    _drop(cfg, overrides)
    check_keys(cfg)
    # fairseq declares lists; a number becomes a list of one
    for key in ("optimization.lr", "optimization.update_freq"):
        value = OmegaConf.select(cfg, key)
        if value is not None and not OmegaConf.is_list(value):
            OmegaConf.update(cfg, key, [value])
    _check_copies(cfg)
    schema = OmegaConf.structured(FairseqConfig)
    OmegaConf.set_struct(schema, False)  # for OWN
    cfg = OmegaConf.merge(schema, cfg)
    # fairseq's dataclasses of models have no fields for the settings of a patch
    with open_dict(cfg):
        of_patch = {key: cfg.model.pop(key) for key in SETTINGS if key in cfg.model}
    # fairseq's own function: begin() in fairseq_patches/starting.py is for training runs
    inspect.unwrap(add_defaults)(cfg)
    with open_dict(cfg.model):
        cfg.model.update(of_patch)
    return cfg


def _drop(cfg: DictConfig, overrides: Sequence[str]) -> None:
    """If the ``_name`` of a section is overridden, remove the file's settings that the new
    component lacks.
    """
    given = {override.lstrip("+~").partition("=")[0] for override in overrides}
    for section in EXCHANGED:
        if f"{section}._name" not in given:
            continue
        own = [key for key in cfg[section] if f"{section}.{key}" not in given]
        old = sorted(set(own) - known_keys(section, cfg))
        with open_dict(cfg):
            for key in old:
                del cfg[section][key]
        first_rank = "PN_FAIRSEQ_RANK" not in os.environ and os.environ.get("RANK", "0") == "0"
        if old and first_rank:
            name = cfg[section]._name
            say("train", f"note: {section}._name={name} has no {', '.join(old)}; dropped")


def one_value(key: str, given: str = "") -> str:
    """The message about several values of a setting, of which ``given`` may be a single text."""
    text = f"{key} takes one value in a run; 'pn reproduce' makes several runs (--seeds 1,2)"
    if given:
        if re.fullmatch(r"\d+,\d+", given) and key != "common.seed":
            text += f"; a decimal number has a point: {key}={given.replace(',', '.')}"
        text += f"; a value that has commas itself needs quotes: \"{key}='{given}'\""
    return text


def _one_line(error: Exception) -> str:
    """hydra's message and advice, without the lines about its internal keys."""
    text = str(error)
    if isinstance(error, HydraException) and error.__cause__:
        text += f"\n{error.__cause__}"
    # "Sweep parameters 'common.seed=1,2' requires --multirun"; in a sweep such as 'key=range(1,3)'
    # the text is not a list that quotes would keep together.
    sweep = re.search(r"'\+*([\w.]+)=(.*?)'", text)
    if sweep and "--multirun" in text:
        return one_value(sweep[1], "" if "(" in sweep[2] else sweep[2])
    # Below its message hydra prints lines such as "    full_key: optimization.lr[0]" and
    # "    object_type=DictConfig".
    kept: dict[str, None] = {}  # each line once, in order
    for line in text.splitlines():
        line = line.strip().rstrip(".")
        if line and not re.match(r"full_key:|reference_type=|object_type=|See https", line):
            kept[line] = None
    line = ": ".join(kept).replace("++", "")
    if isinstance(error, OverrideParseException):
        key = error.override.lstrip("+")
        return f"{key} cannot be read: {line}; put quotes around such a value: KEY=\"'VALUE'\""
    key = re.search(r"full_key: (\S+)", text)
    if key and "ListConfig" in text:
        return one_value(key[1])
    return line if key is None or key[1] in line else f"{key[1]}: {line}"


def check_keys(cfg: DictConfig) -> None:
    """Refuse a key that fairseq would ignore, and name the most similar one that exists."""
    for section, node in cfg.items():
        if section not in SECTIONS and section not in OWN:
            raise UserError(f"unknown setting '{section}'{_advice(section, cfg)}")
        unknown = sorted(node.keys() - known_keys(section, cfg)) if OmegaConf.is_dict(node) else []
        if unknown:
            name = f"{section}.{unknown[0]}"
            raise UserError(f"unknown setting '{name}'{_advice(name, cfg)}")


def _check_copies(cfg: DictConfig) -> None:
    """Refuse a different value in a key to which fairseq copies a setting of another section."""
    for section, node in cfg.items():
        if section in OWN or not OmegaConf.is_dict(node):
            continue
        for key, original in _copies(section, cfg).items():
            if key in node and node[key] != OmegaConf.select(cfg, original):
                value = str(node[key]).replace(" ", "")
                raise UserError(
                    f"unknown setting '{section}.{key}' (fairseq copies {original} to it), did you "
                    f"mean '{original}={value}'?"
                )


def _copies(section: str, cfg: DictConfig) -> dict[str, str]:
    """The keys of a section to which fairseq copies a setting -> that setting.

    A setting that may change when a run is resumed is left out: a learning-rate schedule keeps its
    own ``max_update`` when the run's ``max_update`` is raised.
    """
    declared = SECTIONS[section]
    if not dataclasses.is_dataclass(declared):
        component = components_of(section).get(cfg[section].get("_name"))
        declared = getattr(component, "__dataclass", None)
    copies = {}
    for field in dataclasses.fields(declared) if declared else ():
        original = re.fullmatch(r"\$\{(\w+\.\w+)\}", str(field.default))
        # fairseq's own parsers distinguish a copy from a setting with such a default in this way
        if original and "help" not in field.metadata and not role_of(original[1]).may_change:
            copies[field.name] = original[1]
    return copies


def _advice(name: str, cfg: DictConfig) -> str:
    """Advice on an unknown setting or section: the most similar name in its section, a very similar
    one in another, or the component that has the setting, such as another learning-rate schedule.
    """
    own_section, _, key = name.rpartition(".")
    if name == "model.arch":
        return ", did you mean 'model._name'?"
    if own_section in EXCHANGED:
        for owner, component in components_of(own_section).items():
            if key in keys_of(own_section, component):
                return (
                    f": {own_section}._name={cfg[own_section]._name} has no such setting, {owner} "
                    "has one"
                )
    # name without section -> name with section; its own section if several have the name
    names = {own: own for own in (*OWN, *SECTIONS)}
    for section in sorted(SECTIONS, key=lambda section: section != own_section):
        for known in known_keys(section, cfg) - {"_name"}:
            names.setdefault(known, f"{section}.{known}")
    of_section = known_keys(own_section, cfg) - {"_name"} if own_section else names
    similar = difflib.get_close_matches(key, of_section, n=1)
    similar = similar or difflib.get_close_matches(key, names, n=1, cutoff=0.9)
    return f", did you mean '{names[similar[0]]}'?" if similar else ""


def of_flag(option: str, value: str | None, config: Path) -> str:
    """The setting ``section.key=value`` that corresponds to ``option`` of fairseq-train, or an
    empty text.
    """
    key = option.removeprefix("--").replace("-", "_")
    section = "model" if key == "arch" else key
    if section in SECTIONS and not dataclasses.is_dataclass(SECTIONS[section]):
        return f"{section}._name={value or 'NAME'}"
    cfg = _read(config, [])
    for section in SECTIONS:
        if key in known_keys(section, cfg):
            is_flag = isinstance(OmegaConf.select(cfg, f"{section}.{key}"), bool)
            given = value if value in ("true", "false") or not is_flag else "true"
            return f"{section}.{key}={given or 'VALUE'}"
    return ""


def known_keys(section: str, cfg: DictConfig) -> set[str]:
    """The keys of a section, which depend on the component that its ``_name`` selects."""
    if dataclasses.is_dataclass(SECTIONS[section]):
        return {field.name for field in dataclasses.fields(SECTIONS[section])}
    node = cfg.get(section)
    name = node.get("_name") if OmegaConf.is_dict(node) else node
    if name is None:
        return {"_name", "average_last"} if section == "scoring" else {"_name"}
    if OmegaConf.is_list(name):
        raise UserError(one_value(f"{section}._name"))
    components = components_of(section)
    if name not in components:
        advice = did_you_mean(str(name), components) or _known_components(str(name), components)
        raise UserError(f"unknown {section}._name={name}{advice}")
    return keys_of(section, components[name])


def _known_components(name: str, components: Mapping[str, type]) -> str:
    """This project's components, or else fairseq's: those whose names contain ``name``, as names of
    architectures contain the norm, or else all.
    """
    ours = []
    for known, component in components.items():
        if component.__module__.startswith("pn_fairseq."):
            ours.append(known)
    names = sorted(ours or components)
    with_it = [known for known in names if name in known.split("_")]
    if with_it:
        return f", did you mean one of {', '.join(with_it)}?"
    return f"; there are {', '.join(names)}"


def components_of(section: str) -> Mapping[str, type]:
    """The components that a section can select, by name."""
    registries = {"model": ARCH_MODEL_REGISTRY, "task": TASK_REGISTRY}
    return registries[section] if section in registries else REGISTRIES[section]["registry"]


def keys_of(section: str, component: type) -> set[str]:
    """The settings of a component."""
    declared = getattr(component, "__dataclass", None)
    keys = {"_name", *(action.dest for action in flags(section, component))}
    return keys | ({field.name for field in dataclasses.fields(declared)} if declared else set())


def flags(section: str, component: type) -> list[argparse.Action]:
    """The flags of fairseq-train for a component, and for a model also those of the patches."""
    parser = argparse.ArgumentParser(argument_default=argparse.SUPPRESS, add_help=False)
    if section == "model":
        options.add_model_args(parser)
    if hasattr(component, "add_args"):
        component.add_args(parser)
    return [action for action in parser._actions if action.dest != "arch"]


def _batches(config: Path, cfg: DictConfig, given: Mapping[str, str], world_size: int) -> Batches:
    """The tokens per update are ``tokens_per_update``; without it, or if
    ``optimization.update_freq`` is overridden, they are ``update_freq * max_tokens``, the number
    for one rank. If ``dataset.max_tokens`` is overridden but ``update_freq`` is not, a rank
    processes another number of tokens at once, but an update the same number.
    """
    frequencies = list(cfg.optimization.update_freq)
    if len(set(frequencies)) != 1 or int(frequencies[0]) < 1:
        raise UserError(
            f"optimization.update_freq={frequencies} must be one whole number, as in [4]"
        )
    update_freq, cap = int(frequencies[0]), cfg.dataset.max_tokens
    if cap is None or cfg.dataset.batch_size is not None:
        if world_size > 1:
            raise UserError(
                "several ranks need batches in tokens: set dataset.max_tokens, and no "
                "dataset.batch_size"
            )
        return Batches(1, update_freq, cap, cap and cap * update_freq)
    cap = whole_number("dataset.max_tokens", cap)
    if {"tokens_per_update", "optimization.update_freq"} <= given.keys():
        raise UserError(
            "tokens_per_update and optimization.update_freq set the same thing: give one of them"
        )
    tokens = cfg.get("tokens_per_update")
    if "optimization.update_freq" in given:
        tokens = update_freq * cap
    elif tokens is None:
        of_file = _read(config, []).dataset.max_tokens if "dataset.max_tokens" in given else cap
        tokens = update_freq * (of_file or cap)
    return spread(whole_number("tokens_per_update", tokens), cap, world_size)
