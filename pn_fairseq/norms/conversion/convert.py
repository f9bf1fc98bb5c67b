"""Replace the norms of any PyTorch model by norms of this package, which receive the padding
mask.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from pn_fairseq.norms.conversion.candidates import is_norm, norms_to_replace
from pn_fairseq.norms.conversion.converted_norm import Conversion, ConvertedNorm, replacement
from pn_fairseq.norms.conversion.future_tokens import warn_of_future_tokens
from pn_fairseq.norms.conversion.mask_arguments import (
    add_argument_hooks,
    arguments_with_mask,
    mask_forms,
)
from pn_fairseq.norms.core.channel import ChannelNorm
from pn_fairseq.norms.masks.layouts import LAYOUTS
from pn_fairseq.norms.masks.padding import ARGUMENT_FORMS, FORMS
from pn_fairseq.norms.registry import check_option, find_norm


def convert_norms(
    model: nn.Module,
    norm: str,
    *,
    only: str | Iterable[str] | None = None,
    skip: str | Iterable[str] | None = None,
    layout: str | None = None,
    mask_from: str | Sequence[str] | Mapping[str, str | Callable] | None = None,
    zero_padding: bool = False,
    **options,
) -> nn.Module:
    """Replace the norms of ``model``, which is changed and returned, by the norm ``norm``::

        model = convert_norms(model, "batch", mask_from="attention_mask")

    The function replaces ``LayerNorm`` and ``RMSNorm`` over the last dimension, ``BatchNorm1d`` and
    ``SyncBatchNorm`` of torch, apex's and fairseq's LayerNorms, and modules of other classes (such
    as T5's and Llama's norms) that compute LayerNorm or RMSNorm with a gain of (C,), as a call on
    random tokens shows. The gain is ``weight`` or the only parameter besides a bias; if the old
    norm stores gain - 1, as in Gemma, so does the new one. With ``layout="BCHW"`` the function also
    replaces ``BatchNorm2d``. :func:`norm_report` lists the norms.

    The new norm keeps eps, dtype, device and training mode. A weight or bias that the new norm also
    uses stays the same Parameter with the same name; any other is dropped. If both norms have the
    same running statistics, the new norm also keeps the statistics and their decay. A norm can add
    parameters, such as a ``bias`` of zeros where it replaces an RMSNorm, so create the optimizer
    after the conversion. A checkpoint of the unconverted model loads; loading does not change
    parameters and buffers that the checkpoint does not contain.

    Padding is normalized like other tokens and enters no statistic, except with
    ``variant="release"`` of some norms.

    Args:
        norm: a key of :data:`pn_fairseq.norms.NORMS`.
        only: pattern or patterns of module names, as in ``fnmatch`` ("encoder.*"); other norms stay
            as they are.
        skip: patterns of names of norms that stay as they are.
        layout: "BTC" or "TBC", the layout of the input of norms over the last dimension. By default
            each norm infers it from the shape of its first mask; if B equals T in that mask, the
            forward raises ValueError. Batch norms of torch keep their layout, (B, C, T) or (N, C).
            "BCHW" also replaces ``BatchNorm2d``.
        mask_from: the argument that holds the mask in the forward of the model or of modules in it.
            By default arguments with known names are used: %s (after the dot, in modules of that
            package). For others give a dict: name -> one of %s (see :class:`padding`), or a
            function of the value that returns the mask as bool, True = padding, None if there is
            none, or NotImplemented. With ``()`` only ``with padding(...)`` blocks count. The table
            in docs/own_model.md says which mask a norm uses: that of a block around the call, else
            that of the innermost module around the norm with such an argument.
        zero_padding: write zeros at padding after the norm, as a following convolution needs.
        options: for the norm, see :func:`build_norm`. A norm with running statistics uses
            ``sync=True`` by default, except "power", which uses it only where it replaces a
            ``SyncBatchNorm``. "power" uses a psi warm-up of 1,000 updates unless
            ``psi_warmup_updates`` is given: without a warm-up it starts with psi = 1, and does not
            normalize at first. Give the length of your learning rate's warm-up, and
            ``layer_scale_groups`` = attention heads, as in the paper's Transformer. In the warm-up
            "power" mixes the tokens of a batch, so a causal decoder leaks future tokens.
            "prep-batch" fades from LayerNorm to BatchNorm over 60,000 updates, during which
            evaluation means little: give ``fade_updates`` = four fifths of your updates.

    A checkpoint does not contain the options: give the same options before you load it. Loading
    raises RuntimeError if the checkpoint was trained with other ``layer_scale_groups``.

    Raises:
        ValueError: a pattern, name, layout or option does not fit, or there is nothing to replace.
    """
    return convert(model, norm, only, skip, layout, mask_from, zero_padding, options)


if convert_norms.__doc__:  # python -OO removes it
    convert_norms.__doc__ %= (
        ", ".join(f"``{name}``" for name in ARGUMENT_FORMS),
        ", ".join(f'"{form}"' for form in FORMS),
    )


def convert(
    model, norm, only, skip, layout, mask_from, zero_padding, options, none_is_no_padding=False
) -> nn.Module:
    """The body of :func:`convert_norms`.

    ``none_is_no_padding``: a mask argument that is None means no padding, as in fairseq.
    """
    if not isinstance(model, nn.Module):
        if isinstance(model, str):
            found = repr(model)
        else:
            found = f"of type {type(model).__name__}"
        raise ValueError(
            f"the model comes first, as in convert_norms(model, 'batch'), but it is {found}"
        )
    entry = find_norm(norm)
    options = entry.converted_defaults | options
    if layout not in (None, *LAYOUTS):
        raise ValueError(f"layout={layout!r} must be one of {', '.join(LAYOUTS)}")
    known = dict(entry.options, variant=None)
    del known["batch_first"]  # follows from the layout
    for option in options:
        check_option(option, known, f"{norm} has")
    refuse_wrapped(model)
    forms = mask_forms(mask_from)
    names: dict[nn.Module, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        names.setdefault(module, []).append(name)
    conversion = Conversion(none_is_no_padding)
    if none_is_no_padding and not forms:
        conversion.warned.add("missing")  # no mask means no padding: nothing to warn about
    made = {}
    for module, offset in norms_to_replace(names, only, skip, layout).items():
        made[module] = replacement(
            module, names[module][0], norm, layout, zero_padding, conversion, options, offset
        )
    for parent in names:
        for key, child in parent._modules.items():
            parent._modules[key] = made.get(child, child)
    model = made.get(model, model)
    if forms:
        add_argument_hooks(model, list(made.values()), forms)
    parts = {part.name: part for part in made.values() if part is not model}
    warn_of_future_tokens(model, parts, stacklevel=4)  # points at the caller of convert_norms
    for module in model.modules():
        if isinstance(module, nn.TransformerEncoder) and named_norms(module, ConvertedNorm):
            # with nested tensors it would read weight and bias of norms that may lack them
            module.use_nested_tensor = False
    return model


def named_norms(model: nn.Module, kind: type = ChannelNorm) -> dict[str, ChannelNorm]:
    """The norms of this package in ``model`` that are instances of ``kind``, by their names."""
    return {name: module for name, module in model.named_modules() if isinstance(module, kind)}


#: Classes that keep a list of a model's parameters, without those of a norm that is added later.
_WRAPPERS = ("DistributedDataParallel", "FullyShardedDataParallel", "FSDPModule", "DeepSpeedEngine")


def refuse_wrapped(model: nn.Module) -> None:
    """Raise ValueError if ``model`` or a part of it is wrapped for several ranks."""
    for name, module in model.named_modules():
        for cls in type(module).__mro__:
            if cls.__name__ in _WRAPPERS:
                raise ValueError(
                    f"{name or 'the model'} is wrapped in {cls.__name__}, which would not reduce "
                    "the gradients of parameters that the new norms add: convert before you wrap"
                )


def norm_parameter_names(
    model: nn.Module, replaced: type[nn.Module] | tuple[type[nn.Module], ...] | None = None
) -> list[str]:
    """The names of the parameters of the norms of ``model``, as in ``model.named_parameters()``.

    Training code often excludes the parameters of norms from weight decay, and finds the norms by
    their classes, such as ``torch.nn.LayerNorm``. Norms of this package have other classes::

        norms = set(norm_parameter_names(model))
        decayed = [p for name, p in model.named_parameters() if name not in norms]

    Args:
        replaced: only norms with which :func:`convert_norms` replaced modules of this class or
            these classes, as ``isinstance`` finds them. By default all norms: of this package, of
            torch, and others that compute LayerNorm or RMSNorm. So a conversion changes the list
            only by the parameters that the new norms add or lack.
    """
    kinds = (replaced,) if isinstance(replaced, type) else replaced
    names = {}
    for prefix, module in model.named_modules():
        if kinds is None:
            is_wanted = is_norm(module)
        else:
            is_wanted = isinstance(module, ConvertedNorm) and module.took_the_place_of(kinds)
        if is_wanted:
            names |= dict(module.named_parameters(prefix))
    return list(names)


@dataclass(frozen=True)
class ReplacedNorm:
    """A norm of a converted model; ``str()`` of it is one line.

    Attributes:
        name: name of the module in the model.
        replaced: class of the module that the norm replaced.
        norm: class of the norm.
        layout: layout of its input; None: inferred from the shape of the mask.
        masks: arguments that supply its mask outside of ``with padding(...)`` blocks, the innermost
            first. If one is None, those after it are not used.
        psi_warmup_updates: length of its psi warm-up; None: it has none.
        layer_scale_groups: groups of the layer-scale in front of it; 0: none.
        line: the line of the table in docs/own_model.md that decided in the last forward that
            looked for a mask; None: no forward did.
        decided: the same in words.
    """

    name: str
    replaced: str
    norm: str
    layout: str | None
    masks: tuple[str, ...]
    psi_warmup_updates: int | None = None
    layer_scale_groups: int = 0
    line: int | None = None
    decided: str = ""

    def __str__(self) -> str:
        sources = ["padding(...)", *self.masks]
        if len(self.masks) > 1:
            sources[1] += " (if it is None, no other)"
        text = f"{self.name}: {self.norm} for {self.replaced}"
        if self.psi_warmup_updates is not None:
            text += f", psi warm-up of {self.psi_warmup_updates} updates"
        if self.layer_scale_groups:
            text += f", layer-scale of {self.layer_scale_groups} groups"
        text += f", layout {self.layout or 'of the mask'}, mask from {', else '.join(sources)}"
        if self.line is not None:
            text += f"; last: {self.decided} (line {self.line})"
        return text


def norm_report(model: nn.Module) -> list[ReplacedNorm]:
    r"""The norms that :func:`convert_norms` put into ``model``.

    ``print(*norm_report(model), sep="\n")`` prints one per line.
    """
    report = []
    for name, norm in named_norms(model, ConvertedNorm).items():
        decision = {}
        last = norm.mask_history.last
        if last is not None:
            decision = {"line": last.line, "decided": last.where}
        masks = arguments_with_mask(model, name, norm.conversion)
        replaced = ReplacedNorm(
            name=name or norm.name,
            replaced=norm.replaced,
            norm=type(norm).__name__,
            layout=norm.layout.name,
            masks=tuple(masks),
            psi_warmup_updates=getattr(norm, "psi_warmup_updates", None),
            layer_scale_groups=norm.layer_scale_groups,
            **decision,
        )
        report.append(replaced)
    return report
