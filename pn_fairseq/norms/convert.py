"""Norms of this package in the place of the norms of any PyTorch model, with the padding mask handed to them.

:func:`convert_norms` replaces the norms. :mod:`pn_fairseq.norms.padding` has the masks.
"""

from __future__ import annotations

import inspect
import warnings
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache

import torch
from torch import Tensor, nn

from pn_fairseq.norms.base import COUNT, ChannelNorm, RunningNorm
from pn_fairseq.norms.padding import ARGUMENT_FORMS, FORMS, PaddingMask, Scope, current_scope
from pn_fairseq.norms.registry import build_norm, find_norm

#: Orders of the dimensions of activations.
LAYOUTS = ("BTC", "TBC", "BCT", "BCHW")

#: Layouts whose channels follow the batch dimension -> the numbers of dimensions that an input may have. "BC" is the
#: layout of SyncBatchNorm.
CHANNELS_FIRST = {"BCT": (3,), "BCHW": (4,), "BC": (3, 4)}

#: Forwards under ``no_grad`` whose masks one norm keeps for a recomputation.
_KEPT = 64

_PASS_IT = (
    "pass the mask as an argument of the checkpointed module (convert_norms(mask_from=...)), or give checkpoint "
    "context_fn=padding.context_fn"
)


class Conversion:
    """One call of :func:`convert_norms`: what its norms share."""

    def __init__(self, warned: bool = False):
        self.warned = warned


class _Forward:
    """The mask of one training forward, for its recomputation."""

    __slots__ = ("__weakref__", "done", "key", "mask")

    def __init__(self, key: tuple[int, ...], mask: PaddingMask | None):
        self.key, self.mask, self.done = key, mask, False

    def finish(self, *_) -> None:
        self.done = True


class _Memory:
    """The masks of a norm's training forwards whose backward has not run.

    Activation checkpointing runs a forward again in the backward pass, when ``with padding(...)`` has been left.
    A forward that builds a graph is remembered as long as its graph; one without (the first forward of reentrant
    checkpointing) until a recomputation of it has run backward. A copy of a norm remembers nothing.
    """

    def __init__(self) -> None:
        self.forwards: list[weakref.ref[_Forward]] = []
        self.without_graph: list[_Forward] = []
        self.lost = False

    def __getstate__(self):
        return {"forwards": [], "without_graph": [], "lost": False}

    def add(self, key: tuple[int, ...], mask: PaddingMask | None, node) -> None:
        forward = _Forward(key, mask)
        if node is None:
            self.without_graph.append(forward)
            if len(self.without_graph) > _KEPT:
                self.without_graph.pop(0)
                self.lost = True
            return
        node.register_hook(forward.finish)  # runs after the node's backward, and lives as long as the node
        self.forwards = [each for each in self.forwards if each() is not None]
        self.forwards.append(weakref.ref(forward))

    def recall(self, key: tuple[int, ...], name: str) -> PaddingMask | None:
        """The mask of the forward that runs again.

        Raises:
            RuntimeError: it is not certain which one that is.
        """
        found = self._waiting(key)
        if not found or (self.lost and self.without_graph):
            raise RuntimeError(
                f"{name}: a forward runs again in a backward pass, and its padding mask is no longer known; {_PASS_IT}"
            )
        if any(not _same(each.mask, found[0].mask) for each in found[1:]):
            raise RuntimeError(
                f"{name}: a forward on tokens {key} runs again in a backward pass, and it is not known which one: "
                f"several forwards of this shape, with different padding masks, have had no backward yet; {_PASS_IT}"
            )
        return found[0].mask

    def _waiting(self, key: tuple[int, ...]) -> list[_Forward]:
        """Forwards of this shape whose backward has not run; if there are none, those whose graph is kept."""
        alive = [forward for each in self.forwards if (forward := each()) is not None]
        candidates = [each for each in (*alive, *self.without_graph) if each.key == key]
        return [each for each in candidates if not each.done] or candidates

    def consume(self, key: tuple[int, ...], mask: PaddingMask | None, node) -> None:
        """Forget a forward without a graph when ``node``, of its recomputation, has run backward."""
        forward = next((each for each in self.without_graph if each.key == key and _same(each.mask, mask)), None)
        if forward is not None:
            node.register_hook(lambda *_: self._forget(forward))
            self._forget(forward)
            self.without_graph.append(forward)  # the next recomputation takes another one

    def _forget(self, forward: _Forward) -> None:
        if forward in self.without_graph:
            self.without_graph.remove(forward)


def _same(one: PaddingMask | None, other: PaddingMask | None) -> bool:
    return one is other or (one is not None and one.same_as(other))


class ConvertedNorm:
    """Comes before a norm's class among the bases of a norm in a converted model.

    ``norm(x)`` has the layout of the replaced module, and finds its mask (:mod:`pn_fairseq.norms.padding`).
    """

    #: Set by :func:`convert_norms`.
    name: str
    replaced: str
    replaced_keys: frozenset[str]
    layout: str | None
    row_order: str | None
    zero_padding: bool
    conversion: Conversion

    def __reduce__(self):
        return _rebuild, (type(self).__mro__[type(self).__mro__.index(ConvertedNorm) + 1],), self.__getstate__()

    def _get_name(self) -> str:
        return f"{super()._get_name()} for {self.replaced}"

    def forward(self, x: Tensor, padding_mask: Tensor | None = None) -> Tensor:
        if x.is_nested:  # has no padding
            return super().forward(x)
        if not self._uses_mask():
            return self._arranged(x, None)[0]
        if torch.compiler.is_compiling():
            return self._masked_uncompiled(x, padding_mask)
        return self._masked(x, padding_mask)

    def _uses_mask(self) -> bool:
        return self.zero_padding or (self.training and isinstance(self, RunningNorm))

    @torch._disable_dynamo
    def _masked_uncompiled(self, x: Tensor, padding_mask: Tensor | None) -> Tensor:
        return self._masked(x, padding_mask)

    def _masked(self, x: Tensor, padding_mask: Tensor | None) -> Tensor:
        again = torch._C._current_graph_task_id() != -1
        key = tuple(x.shape)
        try:
            mask = self._find_mask(x, again) if padding_mask is None else PaddingMask("mask", padding_mask, "the mask")
            y, raw = self._arranged(x, mask)
        except ValueError as error:
            raise ValueError(f"{self.name}: {error}") from None
        if not again:
            # Recalibration runs no backward.
            if raw.grad_fn is not None or (self.training and not getattr(self, "recalibrating", False)):
                self.memory.add(key, mask, raw.grad_fn)
        elif raw.grad_fn is not None:
            self.memory.consume(key, mask, raw.grad_fn)
        return y

    def _find_mask(self, x: Tensor, again: bool) -> PaddingMask | None:
        """The mask of the innermost scope in which something is known.

        If the innermost mask argument is None, the mask of a ``with padding(...)`` block outside is used; if a module's
        forward with a mask comes first, there is no mask. In a recomputation only scopes count that began in the same
        backward pass: a block around the call of ``backward`` may belong to another forward.
        """
        task = torch._C._current_graph_task_id()
        scope, missing = current_scope(), False
        while scope is not None:
            if scope.graph_task == task and scope.conversion in (None, self.conversion):
                mask = scope.mask()
                if mask is None and not scope.declared:
                    missing = True
                elif mask is not NotImplemented:
                    return None if missing and scope.owner is not None else mask
            scope = scope.outer
        if again:
            return self.memory.recall(tuple(x.shape), self.name)
        self._warn(x)
        return None

    def _warn(self, x: Tensor) -> None:
        if self.conversion.warned or x.dim() != 3 or not (self.training and isinstance(self, RunningNorm)):
            return
        self.conversion.warned = True
        warnings.warn(
            f"{self.name} takes statistics over the tokens of a batch, and no padding mask has reached it: padding, if "
            "there is any, is counted. Run the model in `with padding(...)`, or convert it with mask_from=...; "
            "`with padding(None)` says that there is no padding. (This warning appears once for a model.)",
            stacklevel=2,
        )

    def _arranged(self, x: Tensor, mask: PaddingMask | None) -> tuple[Tensor, Tensor]:
        """y in the shape of ``x``, and the output of the norm itself."""
        tokens = x
        if self.layout in CHANNELS_FIRST and x.dim() != 2:
            if x.dim() not in CHANNELS_FIRST[self.layout]:
                raise ValueError(f"expected an input of layout {self.layout} or (N, C), got {tuple(x.shape)}")
            tokens = x.movedim(1, -1)
        padding = None if mask is None else self._padding(tokens, mask)
        if tokens.dim() in (2, 3):
            y = raw = super().forward(tokens, padding)
        else:
            rows = None if padding is None else padding.reshape(-1)
            raw = super().forward(tokens.reshape(-1, tokens.size(-1)), rows)
            y = raw.view(tokens.shape)
        if self.zero_padding and padding is not None:
            y = y.masked_fill(padding.unsqueeze(-1), 0.0)
        if tokens is not x:
            y = y.movedim(-1, 1)
            if x.is_contiguous():
                y = y.contiguous()  # as torch's norms, whose callers may call view
        return y, raw

    def _padding(self, x: Tensor, mask: PaddingMask) -> Tensor | None:
        """Bool, True = padding, in the shape of the tokens of x (..., C); None: none of its rows is a token of a
        padded sequence."""
        shape = tuple(x.shape[:-1])
        value = mask.value
        first = self.layout in CHANNELS_FIRST
        if mask.form != "lengths" and tuple(value.shape) == shape and (x.dim() != 3 or first):
            return mask.of(shape[-1]).to(x.device)
        if first and x.dim() == 4:
            raise ValueError(f"images {shape} = (B, H, W) need a mask of this shape; {mask.source} is {_shape(mask)}")
        if x.dim() == 2:
            return self._rows(x, mask)
        known = "BTC" if first else self.layout or self._seen_layout
        fits = []
        for layout in ("BTC", "TBC"):
            batch, time = shape[:2] if layout == "BTC" else (shape[1], shape[0])
            if mask.batch == batch and mask.time(time) == time:
                fits.append(layout)
        if known is None and len(fits) == 2:
            raise ValueError(
                f"tokens {tuple(x.shape)} may be (B, T, C) or (T, B, C), because B and T of {mask.source} are equal; "
                "give convert_norms layout='BTC' or layout='TBC'"
            )
        if not fits or (known is not None and known not in fits):
            self._refuse(x, mask, known, fits)
        layout = known or fits[0]
        self._seen_layout = layout
        time = shape[1] if layout == "BTC" else shape[0]
        padding = mask.of(time).to(x.device)
        padding = padding if layout == "BTC" else padding.t()
        return padding.reshape(shape[:2] + (1,) * (len(shape) - 2)).expand(shape)

    def _refuse(self, x: Tensor, mask: PaddingMask, known: str | None, fits: list[str]) -> None:
        shape = tuple(x.shape)
        if fits:
            raise ValueError(
                f"tokens {shape} do not have the layout {known} but {fits[0]}: {mask.source} is {_shape(mask)}; give "
                f"convert_norms layout='{fits[0]}' for this norm"
            )
        first = known == "BTC" if known else shape[0] == mask.batch or shape[1] != mask.batch
        batch, time = shape[:2] if first else (shape[1], shape[0])
        what = f"{batch} sequences of length {time}, and {mask.source} is for {mask.batch} of length {mask.time(time)}"
        raise ValueError(
            f"its tokens are {what}; run the part of the model that has another length in `with padding(...)` with a "
            "mask of that length, take the mask from an argument that has it (mask_from=...), or leave this norm as it "
            "is (skip=...)"
        )

    def _rows(self, x: Tensor, mask: PaddingMask) -> Tensor | None:
        """The mask of tokens x (N, C): one vector for each sequence, or all tokens of all sequences."""
        rows, batch = x.size(0), mask.batch
        time = mask.time(rows // batch if batch and rows % batch == 0 else rows)
        if rows == batch * time and time > 1:
            if self.row_order is None:
                raise ValueError(
                    f"the order of its {rows} rows, the tokens of {batch} sequences, is not known; give convert_norms "
                    "layout='BTC' or layout='TBC'"
                )
            padding = mask.of(time).to(x.device)
            return (padding if self.row_order == "BTC" else padding.t()).reshape(-1)
        if rows == batch:
            return None
        raise ValueError(f"it has {rows} rows, and {mask.source} is {_shape(mask)}")


def _shape(mask: PaddingMask) -> str:
    return f"{tuple(mask.value.shape)}"


@cache
def _converted_class(cls: type[ChannelNorm]) -> type[ChannelNorm]:
    return type(cls.__name__, (ConvertedNorm, cls), {"__module__": cls.__module__, "__doc__": cls.__doc__})


def _rebuild(cls: type[ChannelNorm]) -> ChannelNorm:
    made = _converted_class(cls)
    return made.__new__(made)


@dataclass(frozen=True)
class ReplacedNorm:
    """A norm of a converted model; ``str()`` of it is one line.

    Attributes:
        name: of the module in the model.
        replaced: class of the module that it took the place of.
        norm: its class.
        layout: of its input; None: read from the shape of the mask.
        masks: where its mask comes from, the innermost first; every ``with padding(...)`` counts besides.
    """

    name: str
    replaced: str
    norm: str
    layout: str | None
    masks: tuple[str, ...]

    def __str__(self) -> str:
        masks = ", else ".join((*self.masks, "padding(...)"))
        return f"{self.name}: {self.norm} for {self.replaced}, layout {self.layout or 'of the mask'}, mask from {masks}"


class _ArgumentHook:
    """Makes a scope of every forward of one module, with the mask that is among its arguments."""

    def __init__(self, name: str, argument: str, position: int | None, form, conversion: Conversion, declared: bool):
        self.source = f"argument {argument} of {name or 'the model'}"
        self.argument, self.position, self.form = argument, position, form
        self.conversion, self.declared = conversion, declared

    def before(self, module: nn.Module, args: tuple, kwargs: dict) -> None:
        if torch.compiler.is_compiling():
            if not module.training:  # in evaluation only zero_padding uses a mask
                return
            _begin_uncompiled(self, args, kwargs)
        else:
            self.begin(args, kwargs)

    def begin(self, args: tuple, kwargs: dict) -> None:
        value = kwargs.get(self.argument)
        if value is None and self.position is not None and self.position < len(args):
            value = args[self.position]
        Scope(lambda: self._mask(value), self.declared, self, self.conversion).enter()

    def after(self, module: nn.Module, args: tuple, output) -> None:
        if torch.compiler.is_compiling():
            if module.training:
                _end_uncompiled(self)
        else:
            self.end()

    def end(self) -> None:
        scope = current_scope()
        if scope is not None and scope.owner is self:
            scope.exit()

    def _mask(self, value):
        """PaddingMask, None or NotImplemented from the value of the argument."""
        form = self.form
        if callable(form):
            value = form(value)
            form = "mask"
        if value is None or value is NotImplemented:
            return value
        if not isinstance(value, Tensor):
            return NotImplemented
        inner = value
        while inner.dim() > 2 and inner.size(1) == 1:
            inner = inner.squeeze(1)
        if form != "lengths" and inner.dim() != 2:
            return NotImplemented  # which query sees which key, (B, H, Q, K)
        if form == "valid" and value.dim() > 2 and value.is_floating_point():
            form = "additive"  # what attention_mask has become inside Hugging Face's models
        return PaddingMask(form, value, self.source)


@torch._disable_dynamo
def _begin_uncompiled(hook: _ArgumentHook, args: tuple, kwargs: dict) -> None:
    hook.begin(args, kwargs)


@torch._disable_dynamo
def _end_uncompiled(hook: _ArgumentHook) -> None:
    hook.end()


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
    """Put the norm ``norm`` in the place of the norms of ``model``, which is changed and returned::

        model = convert_norms(model, "batch", mask_from="attention_mask")

    The function replaces ``LayerNorm`` and ``RMSNorm`` over the last dimension, ``BatchNorm1d`` and ``SyncBatchNorm``
    of torch, apex's and fairseq's LayerNorms, and modules of other classes (such as T5's and Llama's norms) that
    compute LayerNorm or RMSNorm with their ``weight`` of (C,), which a call on random tokens shows.
    With ``layout="BCHW"`` it also replaces ``BatchNorm2d``. :func:`norm_report` lists the norms.

    The new norm keeps eps, dtype, device and training mode. A weight or bias that the new norm also has stays the same
    Parameter with the same name; another weight or bias is dropped. If both norms have the same running statistics,
    the new norm also keeps the statistics and their decay. A norm can have additional parameters, such as a ``bias`` of
    zeros in the place of an RMSNorm, so create the optimizer after the conversion. A checkpoint of the unconverted
    model loads; loading does not change parameters and buffers that the checkpoint does not contain.

    Padding is normalized like other tokens and enters no statistic, except with ``variant="release"`` of some norms.

    Args:
        norm: a key of :data:`pn_fairseq.norms.NORMS`.
        only: pattern or patterns of module names, as in ``fnmatch`` ("encoder.*"); the others stay as they are.
        skip: patterns of names that stay as they are.
        layout: "BTC" or "TBC", of the input of norms over the last dimension. By default each norm reads it from the
            shape of its first mask; if B equals T in that mask, the forward raises ValueError. Batch norms of torch
            keep their own layout, (B, C, T) or (N, C). "BCHW" also replaces ``BatchNorm2d``.
        mask_from: the argument that holds the mask in the forward of the model or of modules in it. Names that are
            known: %s. For others give a dict: name -> one of %s (see :class:`padding`), or a function of the value that
            returns the mask as bool, True = padding, None if there is none, or NotImplemented. If a
            forward has several of these arguments, the first name in ``mask_from`` is used. A norm takes the innermost
            mask around it: from the argument of a module, or from a ``with padding(...)`` block.
        zero_padding: write zeros at padding after the norm, as a convolution that follows needs.
        options: for the norm, see :func:`build_norm`. A norm with running statistics has ``sync=True`` by default,
            except "power", which has it only in the place of a ``SyncBatchNorm``.

    Raises:
        ValueError: a pattern, name, layout or option does not fit, or there is nothing to replace.
    """
    return convert(model, norm, only, skip, layout, mask_from, zero_padding, options)


convert_norms.__doc__ %= (", ".join(f"``{name}``" for name in ARGUMENT_FORMS), ", ".join(f'"{form}"' for form in FORMS))


def convert(model, norm, only, skip, layout, mask_from, zero_padding, options, none_is_no_padding=False) -> nn.Module:
    """What :func:`convert_norms` does. ``none_is_no_padding``: a mask that is None means no padding, as in fairseq."""
    entry = find_norm(norm)
    if layout not in (None, *LAYOUTS):
        raise ValueError(f"layout={layout!r} must be one of {', '.join(LAYOUTS)}")
    known = (entry.options | {"variant"}) - {"batch_first"}
    if unknown := sorted(set(options) - known):
        raise ValueError(
            f"norm {norm!r} has no option {', '.join(map(repr, unknown))}; known: {', '.join(sorted(known))}"
        )
    forms = _forms(mask_from)
    names: dict[nn.Module, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        names.setdefault(module, []).append(name)
    conversion = Conversion(warned=mask_from is None and none_is_no_padding)
    made = {
        module: _replacement(module, names[module][0], norm, layout, zero_padding, conversion, options)
        for module in _choose(names, only, skip, layout)
    }
    for parent in names:
        for key, child in parent._modules.items():
            if child in made:
                parent._modules[key] = made[child]
    model = made.get(model, model)
    if forms:
        _hook(model, list(made.values()), forms, conversion, none_is_no_padding)
    for module in model.modules():
        if isinstance(module, nn.TransformerEncoder) and any(isinstance(m, ConvertedNorm) for m in module.modules()):
            module.enable_nested_tensor = module.use_nested_tensor = False  # its fast path, which is LayerNorm's
    return model


def norm_report(model: nn.Module) -> list[ReplacedNorm]:
    r"""The norms that :func:`convert_norms` put into ``model``: ``print(*norm_report(model), sep="\n")``."""
    return [
        ReplacedNorm(module.name, module.replaced, module.__class__.__name__, module.layout, module.masks)
        for module in model.modules()
        if isinstance(module, ConvertedNorm)
    ]


def _forms(mask_from) -> dict[str, str | Callable]:
    """Name of an argument -> its form."""
    if mask_from is None:
        return {}
    if isinstance(mask_from, Mapping):
        if wrong := [form for form in mask_from.values() if not (callable(form) or form in FORMS)]:
            raise ValueError(f"mask_from: {wrong[0]!r} must be a function or one of {', '.join(FORMS)}")
        return dict(mask_from)
    names = [mask_from] if isinstance(mask_from, str) else list(mask_from)
    if unknown := [name for name in names if name not in ARGUMENT_FORMS]:
        raise ValueError(
            f"mask_from={unknown[0]!r}: what its values mean is not known; give a dict such as "
            f"{{{unknown[0]!r}: 'mask'}} (True = padding), 'valid' (other than 0 = token), 'lengths' or 'additive'; "
            f"known names: {', '.join(ARGUMENT_FORMS)}"
        )
    return {name: ARGUMENT_FORMS[name] for name in names}


def _choose(names: dict[nn.Module, list[str]], only, skip, layout: str | None) -> list[nn.Module]:
    """The modules to replace.

    Raises:
        ValueError: there is none, or a pattern matches none.
    """
    only, skip = (
        [patterns] if isinstance(patterns, str) else None if patterns is None else list(patterns)
        for patterns in (only, skip)
    )
    norms = {module: why for module in names if (why := _why_not(module, layout)) is not None}
    for pattern in [*(only or ()), *(skip or ())]:
        if not any(fnmatchcase(name, pattern) for module in norms for name in names[module]):
            known = ", ".join(names[module][0] or "the model" for module in norms) or "none"
            raise ValueError(f"the pattern {pattern!r} matches no norm of the model; norms: {known}")

    def matches(module: nn.Module, patterns: list[str]) -> bool:
        return any(fnmatchcase(name, pattern) for name in names[module] for pattern in patterns)

    wanted = [
        module
        for module in norms
        if (only is None or matches(module, only)) and not (skip is not None and matches(module, skip))
    ]
    if not (chosen := [module for module in wanted if not norms[module]]):
        reasons = "; ".join(f"{names[module][0] or type(module).__name__} {norms[module]}" for module in wanted)
        raise ValueError(f"the model has no norm to replace{': ' if reasons else ''}{reasons}")
    return chosen


#: Batch norms of torch, which are replaced; norms that always stay as they are.
_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.SyncBatchNorm)
_OTHERS = (nn.GroupNorm, nn.modules.batchnorm._NormBase, ChannelNorm)


def _why_not(module: nn.Module, layout: str | None) -> str | None:
    """Why the norm ``module`` cannot be replaced; "" if it can; None: it is no norm, or of a kind that always stays."""
    if isinstance(module, _BATCH_NORMS):
        if isinstance(module, nn.BatchNorm2d) and layout != "BCHW":
            return "is for images: give layout='BCHW'"
        if isinstance(module, nn.modules.lazy.LazyModuleMixin):
            return "does not know its number of channels yet"
        return "" if module.track_running_stats else "has no running statistics"
    if isinstance(module, _OTHERS):
        return None
    if isinstance(module, (nn.LayerNorm, nn.RMSNorm)):
        if len(module.normalized_shape) != 1:
            return f"normalizes {len(module.normalized_shape)} dimensions"
        return "" if type(module) in (nn.LayerNorm, nn.RMSNorm) else _compare(module)
    parameters = dict(module.named_parameters())
    weight = parameters.get("weight")
    if weight is None or weight.dim() != 1 or not set(parameters) <= {"weight", "bias"} or _eps(module) is None:
        return None
    return _compare(module)


def _eps(module: nn.Module) -> float | None:
    return getattr(module, "eps", getattr(module, "variance_epsilon", None))


@torch.no_grad()
def _compare(module: nn.Module) -> str:
    """Why ``module`` is not LayerNorm or RMSNorm of the last dimension with its weight, bias and eps; "" if it is."""
    weight, bias, eps = getattr(module, "weight", None), getattr(module, "bias", None), _eps(module) or 0.0
    if weight is not None and weight.is_meta:
        return "is on the meta device, and cannot be compared with LayerNorm or RMSNorm"
    channels = weight.numel() if weight is not None else module.normalized_shape[0]
    # Short tokens show where eps is added.
    x = torch.randn(3, 4, channels, generator=torch.Generator().manual_seed(0))
    x = x * torch.tensor([1.0, 1e-3, 10.0])[:, None, None] + torch.linspace(-1, 1, 4)[None, :, None] * 1e-3
    x = x if weight is None else x.to(weight)
    try:
        y = module(x)
        y = y.double() if isinstance(y, Tensor) and y.shape == x.shape else None
    except Exception:
        y = None
    if y is None:
        return "does not take tokens (..., C)"
    gain = 1.0 if weight is None else weight.double()
    shift = 0.0 if bias is None else bias.double()
    wide = x.double()
    for centered in (wide - wide.mean(-1, keepdim=True), wide):
        expected = gain * centered * torch.rsqrt(centered.square().mean(-1, keepdim=True) + eps) + shift
        tolerance = 1e-4 if x.dtype in (torch.float32, torch.float64) else 3e-2
        if torch.allclose(y, expected, rtol=tolerance, atol=tolerance):
            return ""
    return "computes neither LayerNorm nor RMSNorm with its weight"


def _replacement(module: nn.Module, name: str, norm: str, layout, zero_padding, conversion, options) -> ChannelNorm:
    """The norm that takes the place of ``module``."""
    entry = find_norm(norm)
    batch = isinstance(module, _BATCH_NORMS)
    weight = getattr(module, "weight", None)
    like = next((tensor for tensor in (weight, *module.buffers()) if tensor is not None), torch.zeros(()))
    channels = module.num_features if batch else like.numel() if weight is not None else module.normalized_shape[0]
    eps = _eps(module)
    defaults = {"eps": torch.finfo(like.dtype).eps if eps is None else eps, "affine": weight is not None}
    if "sync" in entry.options:
        defaults["sync"] = entry.sync or isinstance(module, nn.SyncBatchNorm)
        if isinstance(module, nn.SyncBatchNorm):
            defaults["process_group"] = module.process_group
    made = build_norm(norm, channels, batch_first=True, **{**defaults, **options})
    buffers = {key: buffer for key, buffer in module.named_buffers(recurse=False) if batch}
    made.shares_statistics = {*made._buffers} <= {*buffers} and bool(made._buffers)
    if made.shares_statistics and "alpha_fwd" not in options and module.momentum and module.momentum < 1:
        made.alpha_fwd = 1.0 - module.momentum
    made.to(device=like.device, dtype=like.dtype if like.is_floating_point() else None)
    for key, parameter in module.named_parameters(recurse=False):
        if made._parameters.get(key) is not None:
            made._parameters[key] = parameter
    if made.shares_statistics:
        for key, buffer in buffers.items():
            made._buffers[key].copy_(buffer)
    made.__class__ = _converted_class(type(made))
    made.name, made.replaced, made.masks = name or type(module).__name__, type(module).__name__, ()
    made.replaced_keys = frozenset(module.state_dict())
    made.row_order = layout if layout in ("BTC", "TBC") else None
    made.layout = _own_layout(module) or made.row_order
    made.zero_padding, made.conversion, made.memory, made._seen_layout = zero_padding, conversion, _Memory(), None
    for hooks in ("forward_hooks", "forward_pre_hooks", "backward_hooks", "backward_pre_hooks"):
        for kind in ("", "_with_kwargs", "_always_called"):
            getattr(made, f"_{hooks}{kind}", {}).update(getattr(module, f"_{hooks}{kind}", {}))
    made.register_load_state_dict_pre_hook(_before_loading)
    return made.train(module.training)


def _own_layout(module: nn.Module) -> str | None:
    """The layout of the input of ``module``; None: it only says that the channels come last."""
    own = {nn.BatchNorm1d: "BCT", nn.BatchNorm2d: "BCHW", nn.SyncBatchNorm: "BC"}
    return next((layout for cls, layout in own.items() if isinstance(module, cls)), None)


def _before_loading(module: ConvertedNorm, state_dict: dict, prefix: str, *_) -> None:
    """Make the state of the module that was replaced one of ``module``; what it lacks stays as it is."""
    given = {key.removeprefix(prefix) for key in state_dict if key.startswith(prefix)}
    own = {**dict(module.named_parameters(recurse=False)), **module._buffers}
    if not given or not given <= module.replaced_keys or given == {*own}:
        return
    for key in given - {*own}:
        del state_dict[prefix + key]
    for key, tensor in own.items():
        if key not in given or (key == COUNT and not module.shares_statistics):
            state_dict[prefix + key] = tensor.detach().clone()


def _hook(model: nn.Module, norms: list, forms: dict, conversion: Conversion, none_is_no_padding: bool) -> None:
    """Give every module around ``norms`` that has an argument of ``forms`` a hook."""
    using = [norm for norm in norms if norm.zero_padding or isinstance(norm, RunningNorm)]
    hooked: dict[str, str] = {}
    for name, module in model.named_modules():
        if isinstance(module, ConvertedNorm) or not any(each in using for each in module.modules()):
            continue
        try:
            parameters = list(inspect.signature(type(module).forward).parameters.values())[1:]
        except (TypeError, ValueError):
            continue
        found = {each.name: (index, each) for index, each in enumerate(parameters)}
        if "encoder_out" in found:
            found.pop("encoder_padding_mask", None)  # of fairseq's decoder layers: the mask of what they attend to
        if argument := next((each for each in forms if each in found), None):
            index, parameter = found[argument]
            position = None if parameter.kind == parameter.KEYWORD_ONLY else index
            hook = _ArgumentHook(name, argument, position, forms[argument], conversion, none_is_no_padding)
            module.register_forward_pre_hook(hook.before, with_kwargs=True)
            module.register_forward_hook(hook.after, always_call=True)
            hooked[name] = hook.source
    if using and not hooked:
        raise ValueError(
            f"mask_from={', '.join(forms)}: the forward of no module around the replaced norms has such an argument"
        )
    for norm in norms:
        around = [name for name in hooked if not name or norm.name.startswith(f"{name}.")]
        norm.masks = tuple(hooked[name] for name in sorted(around, key=len, reverse=True))
