"""``--convert-norms 'PATTERN=NORM[,key=value...]'`` puts norms of this package into any model of
fairseq.

These norms get the padding mask from the arguments of fairseq's modules, unless
``--norm-ignore-mask`` is given, which also applies to the norms of this package's own models. Both
flags are settings of the model, and its checkpoints contain them.
"""

import inspect
import json
from contextlib import nullcontext
from functools import partial

from fairseq import models
from fairseq.dataclass import utils
from fairseq.models import ARCH_MODEL_REGISTRY
from fairseq.models.speech_to_text import S2TTransformerEncoder
from fairseq.modules import checkpoint_activations
from fairseq.utils import safe_getattr
from torch import Tensor, nn

from pn_fairseq.common.command import checked
from pn_fairseq.fairseq_patches import patch
from pn_fairseq.fairseq_patches.diagnostics_log import DiagnosticsLog, dashboard_interval
from pn_fairseq.fairseq_patches.run_settings import circumstances_of, writable
from pn_fairseq.norms import RunningNorm, build_norm, convert_norms, running_norms
from pn_fairseq.norms.conversion.convert import convert
from pn_fairseq.norms.conversion.converted_norm import ConvertedNorm
from pn_fairseq.norms.masks.padding import current_backward, padding
from pn_fairseq.norms.options import read_pairs, typed
from pn_fairseq.norms.registry import check_option, find_norm

#: Settings of a model that this patch adds.
SETTINGS = ("convert_norms", "norm_ignore_mask")

#: Keys of a specification that are arguments of ``convert_norms`` itself.
OWN_KEYS = ("layout", "skip", "zero_padding")


def is_padding(index: int, tokens):
    """The mask of a batch of token ids (B, T), in which ``index`` is padding; speech features have
    no such mask.
    """
    if not isinstance(tokens, Tensor) or tokens.is_floating_point():
        return NotImplemented
    return tokens.eq(index)


def parse(text: str) -> tuple[str, str, dict]:
    """Pattern, norm and options of 'PATTERN=NORM[,key=value...]'.

    Raises:
        ValueError: ``text`` is something else, the norm or an option does not exist, or a value has
            another type.
    """
    first, _, pairs = str(text).partition(",")
    pattern, _, norm = first.partition("=")
    if not (pattern and norm):
        raise ValueError(
            f"{text!r} is not 'PATTERN=NORM[,key=value...]', such as "
            "'encoder.*=batch,alpha_fwd=0.95'"
        )
    parameters = {
        **inspect.signature(convert_norms).parameters,
        **inspect.signature(build_norm).parameters,
    }
    known = {name: parameters[name] for name in (*OWN_KEYS, "variant")}
    # the layout and the trainer determine the other two
    known |= {
        name: parameter
        for name, parameter in find_norm(norm).options.items()
        if name not in ("batch_first", "process_group")
    }
    options = {}
    try:
        for key, value in (read_pairs(pairs) if pairs else {}).items():
            options[key] = typed(key, value, check_option(key, known, f"{norm} has"))
    except ValueError as error:
        raise ValueError(f"{text!r}: {error}") from None
    return pattern, norm, options


def add_flags(group) -> None:
    """Add the flags of this patch to a group of arguments."""
    norms = (
        "put this norm in the place of the model's norms whose names match the pattern, such as "
        "'encoder.*=batch'; "
    )
    norms += "any architecture; repeatable (docs/own_model.md)"
    specification = checked(parse, "PATTERN=NORM[,key=value...]")
    group.add_argument("--convert-norms", action="append", help=norms, **specification)
    ignore = "the norms of pn_fairseq see no padding mask and count padding, to compare with"
    group.add_argument("--norm-ignore-mask", action="store_true", help=ignore)


def given_settings(settings) -> dict[str, object]:
    """The settings of this patch that are given, from a Namespace or a hydra node."""
    values = {name: safe_getattr(settings, name) for name in SETTINGS}
    return {name: value for name, value in values.items() if value}


@patch(utils, "override_module_args", "args")
def override_module_args(original, args):
    """Keep these settings for a model with a dataclass, which has no fields for them."""
    overrides, deletes = original(args)
    cls = ARCH_MODEL_REGISTRY.get(getattr(args, "arch", None))
    if getattr(cls, "__dataclass", None) is not None:
        # JSON is a subset of hydra's syntax for values, except for escapes in quoted strings, which
        # do not occur here.
        overrides += [
            f"+model.{name}={json.dumps(value)}" for name, value in given_settings(args).items()
        ]
    return overrides, deletes


@patch(models, "build_model", "cfg task from_checkpoint")
def build_model(original, cfg, task, from_checkpoint=False):
    given = given_settings(cfg)
    if not given:
        return original(cfg, task, from_checkpoint)
    with writable(cfg):
        for name in given:
            delattr(cfg, name)
    try:
        model = original(cfg, task, from_checkpoint)
    finally:
        with writable(cfg):
            for name, value in given.items():
                setattr(cfg, name, value)
    ignores = bool(given.get("norm_ignore_mask"))
    specifications = given.get("convert_norms") or []
    run = circumstances_of(cfg)
    for text in [specifications] if isinstance(specifications, str) else specifications:
        pattern, norm, chosen = parse(text)
        own = {key: chosen.pop(key) for key in OWN_KEYS if key in chosen}
        entry = find_norm(norm)
        chosen = entry.defaults_of_run(run) | chosen
        try:
            convert(
                model,
                norm,
                pattern,
                own.get("skip"),
                own.get("layout"),
                {} if ignores else masks(task),
                own.get("zero_padding", False),
                chosen,
                none_is_no_padding=True,
            )
        except ValueError as error:
            raise ValueError(f"--convert-norms {text!r}: {error}") from None
        model.averages_norm_stats = True
    interval = dashboard_interval(cfg)
    if specifications and interval and not hasattr(model, "diagnostics_log"):
        model.diagnostics_log = DiagnosticsLog(running_norms(model), interval)
    if ignores:
        for module in model.modules():
            if isinstance(module, RunningNorm):
                module.register_forward_pre_hook(without_mask, with_kwargs=True)
    return model


@patch(
    checkpoint_activations, "_checkpointed_forward", "original_forward offload_to_cpu args kwargs"
)
def checkpointed_forward(original, original_forward, offload_to_cpu, *args, **kwargs):
    """Give the recomputation of a layer the masks that its hooks, which run outside of it, read
    from its arguments.
    """
    _, recomputation = padding.context_fn()

    def forward(*args, **kwargs):
        with nullcontext() if current_backward() == -1 else recomputation:
            return original_forward(*args, **kwargs)

    return original(forward, offload_to_cpu, *args, **kwargs)


@patch(S2TTransformerEncoder, "_forward", "self src_tokens src_lengths return_all_hiddens")
def encoder_of_speech(original, self, src_tokens, src_lengths, return_all_hiddens=False):
    """Give the norm after the last layer the mask of the frames that the layers get, which is not
    an argument there.
    """
    norm = self.layer_norm
    if not isinstance(norm, ConvertedNorm) or without_mask in norm._forward_pre_hooks.values():
        return original(self, src_tokens, src_lengths, return_all_hiddens)
    masks_of_layers: list[Tensor] = []
    hooks = [
        self.transformer_layers[0].register_forward_pre_hook(
            lambda module, args: masks_of_layers.append(args[1])
        ),
        norm.register_forward_pre_hook(lambda module, args: (*args, masks_of_layers[0])),
    ]
    try:
        return original(self, src_tokens, src_lengths, return_all_hiddens)
    finally:
        for hook in hooks:
            hook.remove()


def masks(task) -> dict:
    """The arguments of fairseq's modules that hold masks."""
    arguments = dict.fromkeys(
        ("self_attn_padding_mask", "encoder_padding_mask", "padding_mask"), "mask"
    )
    for name in ("source_dictionary", "target_dictionary"):
        try:
            dictionary = getattr(task, name)
        except (AttributeError, NotImplementedError, KeyError):
            continue
        if hasattr(dictionary, "pad"):
            mask = partial(is_padding, dictionary.pad())
            return {**arguments, "prev_output_tokens": mask, "src_tokens": mask}
    pad = 1  # of fairseq's dictionaries
    return {**arguments, "src_tokens": partial(is_padding, pad)}


def without_mask(module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    """A hook that calls the norm as if there were no padding."""
    return args[:1], {name: value for name, value in kwargs.items() if name != "padding_mask"}
