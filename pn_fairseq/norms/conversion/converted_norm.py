"""The norms of a converted model: how each replaces another norm, and how its padding mask reaches
it.
"""

import re
import warnings
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import cache
from uuid import uuid4

import torch
from torch import Tensor, nn

from pn_fairseq.norms.core.base import COUNT, ChannelNorm, RunningNorm
from pn_fairseq.norms.core.channel import no_fast_path
from pn_fairseq.norms.core.checks import (
    can_look_at_values,
    empty_sentences,
    padding_on_the_left,
)
from pn_fairseq.norms.core.compiled import find, open_scopes, operator
from pn_fairseq.norms.core.sharding import is_distributed
from pn_fairseq.norms.masks.layouts import Layout
from pn_fairseq.norms.masks.padding import (
    AllIsKnown,
    PaddingMask,
    Scope,
    current_backward,
    current_scopes,
)
from pn_fairseq.norms.masks.search import (
    BLOCK,
    GIVEN,
    NONE,
    Found,
    find_mask,
    hidden_mask,
    masks_around,
)
from pn_fairseq.norms.registry import NormEntry, build_norm, find_norm

#: Batch norms of torch that can be replaced -> the layouts of their inputs.
_OWN_LAYOUTS = {nn.BatchNorm1d: "BCT", nn.BatchNorm2d: "BCHW", nn.SyncBatchNorm: "BC"}
BATCH_NORMS = tuple(_OWN_LAYOUTS)

#: The key for the number of groups in the state of a converted norm with layer-scale. The number
#: changes what the norm computes, and no tensor of the state shows it.
SAVED_GROUPS = "layer_scale_groups"

#: Attributes in which a norm may store its epsilon.
EPS_NAMES = ("eps", "variance_epsilon", "epsilon")


@dataclass
class Conversion:
    """One call of :func:`convert_norms`, which a norm and the hooks that serve it share.

    Copies keep the ``id``, so the hooks of a model also serve a copy of one of its norms.

    Attributes:
        none_is_no_padding: whether an argument that is None means that there is no padding, as in
            fairseq, rather than that no mask was given.
        warned: the kinds of warnings that have been given.
        has_had_mask: whether one of its norms has received a mask.
    """

    none_is_no_padding: bool = False
    warned: set[str] = field(default_factory=set)
    has_had_mask: bool = False
    id: str = field(default_factory=lambda: uuid4().hex)

    def warn(self, kind: str, text: str) -> None:
        """Give the warning ``text``, the only one of its kind for a model."""
        if kind not in self.warned:
            self.warned.add(kind)
            warnings.warn(f"{text} (This warning appears once for a model.)", stacklevel=3)


@dataclass
class MaskHistory:
    """Where a norm got its masks from in forwards that were not recomputations.

    Attributes:
        sources: those of "block", "padding(None)" and "argument" that occurred.
        last: what the search in the last forward found.
    """

    sources: set[str] = field(default_factory=set)
    last: Found | None = None

    def add(self, found: Found) -> None:
        self.last = replace(found, mask=None, scope=None)
        if found.line == BLOCK:
            self.sources.add("padding(None)" if found.mask is None else "block")
        elif found.line != GIVEN and found.mask is not None:
            self.sources.add("argument")


class ConvertedNorm:
    """The norm of a converted model, a mixin that must precede the norm class in the bases.

    ``norm(x)`` uses the layout of the replaced module, and finds its mask
    (:mod:`pn_fairseq.norms.masks.padding`).
    """

    #: Set by :func:`replacement`.
    name: str
    replaced: str
    replaced_keys: frozenset[str]
    #: Module and name of the class of the replaced module and of its bases.
    replaced_classes: frozenset[tuple[str, str]]
    shares_statistics: bool
    layout: Layout
    zero_padding: bool
    conversion: Conversion
    mask_history: MaskHistory

    #: :meth:`_warn_of_inverted_mask` looks at masks instead, because it knows the layout.
    has_looked_at_mask = True

    #: Whether the counter of steps has been looked at in evaluation.
    has_looked_at_count = False

    #: The gain is the parameter ``gain_name`` plus ``gain_offset``, as in the replaced module.
    gain_name = "weight"
    gain_offset = 0.0

    @property
    def gain(self) -> Tensor | None:
        parameter = getattr(self, self.gain_name)
        if not self.gain_offset:
            return parameter
        return parameter.to(torch.promote_types(parameter.dtype, torch.float32)) + self.gain_offset

    def reset_parameters(self) -> None:
        super().reset_parameters()
        if self.gain_offset:
            nn.init.constant_(getattr(self, self.gain_name), 1.0 - self.gain_offset)

    __jit_unused_properties__ = (*ChannelNorm.__jit_unused_properties__, "momentum")

    @property
    def momentum(self):
        raise AttributeError("a converted norm has alpha_fwd, which is 1 - momentum")

    @momentum.setter
    def momentum(self, value) -> None:
        """Refused: recipes that freeze the statistics of torch's BatchNorm set ``momentum``, which
        no norm here reads.
        """
        raise AttributeError(
            f"{self.name}: momentum={value} would change nothing, because {type(self).__name__} "
            "averages with alpha_fwd = 1 - momentum: set alpha_fwd. Batches enter no statistic "
            "inside `with ignoring(model):`, or after norm.eval()"
        )

    def took_the_place_of(self, classes: tuple[type[nn.Module], ...]) -> bool:
        """Whether the replaced module was an instance of one of ``classes``."""
        return any(_identity(cls) in self.replaced_classes for cls in classes)

    def __reduce__(self):
        classes = type(self).__mro__
        plain = classes[classes.index(ConvertedNorm) + 1]
        return _rebuild, (plain,), self.__getstate__()

    def _get_name(self) -> str:
        return f"{super()._get_name()} for {self.replaced}"

    def _save_to_state_dict(self, destination: dict, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self.layer_scale_groups:
            groups = torch.tensor(self.layer_scale_groups, device="cpu")
            destination[prefix + SAVED_GROUPS] = groups

    def forward(self, x: Tensor, padding_mask: Tensor | None = None) -> Tensor:
        if isinstance(self, RunningNorm):
            self._check_statistics(x)
        if x.is_nested:  # has no padding
            return super().forward(x)
        try:
            if padding_mask is not None:
                self._check_given_mask(x, padding_mask)
            tokens = self.layout.channels_last(x)
            padding = None
            if self.uses_mask() and torch.compiler.is_compiling():
                scope = open_scopes[-1] if open_scopes else None
                padding = padding_of(tokens, padding_mask, self.handle, scope)
            elif self.uses_mask():
                padding = self.find_padding(tokens, padding_mask)
            return self._arranged(x, tokens, padding)
        except ValueError as error:
            raise ValueError(f"{self.name}: {error}") from None

    def _check_statistics(self, x: Tensor) -> None:
        """Check a norm with running statistics before it normalizes ``x``."""
        if type(x) is not Tensor and is_distributed(x):
            raise ValueError(
                f"{self.name}: {type(self).__name__} needs the statistics of all tokens, but its "
                "input is a DTensor, as under SequenceParallel: take a norm of each token by "
                "itself, such as 'rms', or leave this norm out of the plan"
            )
        if not self.training and not torch.compiler.is_dynamo_compiling():
            self._warn_of_early_evaluation()

    def _check_given_mask(self, x: Tensor, mask) -> None:
        """Refuse a second argument that is not a mask, even if this norm does not use a mask."""
        found = type(mask).__name__
        if isinstance(mask, Tensor):
            found = f"{mask.dtype} {tuple(mask.shape)}"
            if not mask.is_floating_point():
                mask = PaddingMask("mask", mask, "the mask").value
                # a mask (B, T) is also valid for rows (N, C)
                if mask.dim() < x.dim() or (mask.dim() == 2 and mask.shape != x.shape):
                    return
        raise ValueError(
            "its second argument must be a padding mask, bool with True = padding, but it is "
            f"{found} beside an input of {tuple(x.shape)}; if the model hands a gate or a "
            f"residual to this norm, leave it as it is (skip={self.name!r})"
        )

    def find_padding(self, tokens: Tensor, mask: Tensor | None) -> Tensor | None:
        """Which of ``tokens``, (..., C), are padding; None: none are.

        ``mask``: the mask of the call, or None.
        """
        if mask is None:
            found = self._find_mask(tokens)
        else:
            found = Found(GIVEN, "the mask of the call", PaddingMask("mask", mask, "the mask"))
            self.mask_history.add(found)
        mask = found.mask
        if mask is None:
            return None
        if tokens.dim() > 2 and mask.form != "lengths":
            if mask.value.dim() not in (2, tokens.dim() - 1):
                raise ValueError(f"{mask}, but an input of {tuple(tokens.shape)} needs (B, T)")
        generates = self.training and not torch.is_grad_enabled()
        padding = self.layout.padding(tokens, mask, generates)
        self._warn_of_inverted_mask(tokens, mask)
        return padding

    def _warn_of_inverted_mask(self, tokens: Tensor, mask: PaddingMask) -> None:
        """Look once at every mask on the CPU, but elsewhere only at the first mask, since reading
        it waits for the device. The first mask already shows an inversion: nothing is left of the
        longest sentence, or, if all sentences are shorter than the batch, what is left is padding.
        """
        is_first = not self.conversion.has_had_mask
        self.conversion.has_had_mask = True
        if "inverted" in self.conversion.warned or not can_look_at_values():
            return
        text = ""
        if is_first and tokens.dim() == 3 and mask.form != "lengths":
            is_time_first = self.layout.name == "TBC" or len(tokens) != mask.batch
            sentences = tokens.transpose(0, 1) if is_time_first else tokens
            text = padding_on_the_left(sentences, mask.of(sentences.size(1)), mask.form)
        if (is_first or not mask.waits_for_device) and mask.empty_sentences:
            text = empty_sentences(mask.empty_sentences, mask.batch, mask.form)
        if text:
            self.conversion.warn("inverted", f"{self.name}: by {mask.source} {text}")

    def _warn_of_early_evaluation(self) -> None:
        """Called in evaluation. Reads the state only once, since this waits for the device."""
        if self.has_looked_at_count or "initial" in self.conversion.warned:
            return
        moment = self._buffers[self.moment_name]
        count = self._buffers[COUNT]
        if moment.is_meta or not can_look_at_values():
            return
        self.has_looked_at_count = True
        if (count == 0) & (moment == 1).all():  # recalibrating() counts no step
            self.conversion.warn(
                "initial",
                f"{self.name} is evaluated, but has counted no training step: its running "
                "statistics are the initial ones. Train the model after the conversion. If the "
                "statistics are in a checkpoint, convert the model before you load it: an "
                "unconverted model drops them.",
            )
            return
        caveat = self.evaluation_caveat()
        if caveat:
            self.conversion.warn("early", f"{self.name} is evaluated {caveat}")

    def uses_mask(self) -> bool:
        return self.zero_padding or (self.training and isinstance(self, RunningNorm))

    def _find_mask(self, x: Tensor) -> Found:
        scopes = [*current_scopes()]
        found = find_mask(self.name, self.conversion.id, scopes)
        if current_backward() == -1:
            if found.line == BLOCK and found.mask is None:
                self._warn_of_hidden_mask(found, scopes)
            elif found.mask is None:
                self._warn_of_missing_mask(x, found)
            self.mask_history.add(found)
        elif found.line != BLOCK and not any(isinstance(scope, AllIsKnown) for scope in scopes):
            self._refuse_another_mask(found)
        return found

    def _refuse_another_mask(self, found: Found) -> None:
        """Called in a recomputation, where ``found`` may not be what the forward found: blocks have
        ended, and the modules around the recomputed part do not run again.
        """
        gone = {"block"}
        if found.mask is not None:
            gone.add("padding(None)")
        elif found.line != NONE:
            gone.add("argument")
        if gone & self.mask_history.sources:
            raise RuntimeError(
                f"{self.name}: this forward is being recomputed (activation checkpointing), but "
                "its padding mask is gone; pass the mask as an argument of the checkpointed "
                "module (convert_norms(mask_from=...)), or give checkpoint "
                "context_fn=padding.context_fn"
            )

    def _warn_of_hidden_mask(self, found: Found, scopes: list[Scope]) -> None:
        """Called in `with padding(None)`, which the user may have written to silence the warning
        about a missing mask.
        """
        if "hidden" in self.conversion.warned or found.scope.only is not None:
            return
        hidden = hidden_mask(self.conversion.id, scopes)
        is_later = "padding(None)" in self.mask_history.sources
        if hidden is None or (hidden.waits_for_device and is_later):
            return
        if hidden.has_padding:
            self.conversion.warn(
                "hidden",
                f"{self.name}: `with padding(None)` says that there is no padding, and hides "
                f"{hidden.source}, which has some: leave the block out, or give it only= with the "
                "names of the norms that it is for.",
            )

    def _warn_of_missing_mask(self, x: Tensor, found: Found) -> None:
        is_of_sequences = x.dim() == 3 or (x.dim() > 3 and self.zero_padding)
        if "missing" in self.conversion.warned or not is_of_sequences:
            return
        if found.line == NONE and (self.conversion.none_is_no_padding or _is_full(found, x)):
            return
        if found.line == NONE or found.is_unread:
            reason = f" ({found.where})"
        else:
            reason = ""
        uses = []
        effects = []
        if self.training and isinstance(self, RunningNorm):
            uses.append("takes statistics over the tokens of a batch")
            effects.append("is counted")
        if self.zero_padding:
            uses.append("writes zeros at padding (zero_padding=True)")
            effects.append("is not set to 0 and enters what follows the norm")
        self.conversion.warn(
            "missing",
            f"{self.name} {' and '.join(uses)}, and no padding mask has reached it{reason}: "
            f"padding, if there is any, {' and '.join(effects)}. Run the model in "
            "`with padding(...)`, or convert it with mask_from=...; `with padding(None)` says "
            "that there is no padding.",
        )

    def _arranged(self, x: Tensor, tokens: Tensor, padding: Tensor | None) -> Tensor:
        """The norm of ``x`` in the layout of x; ``tokens`` are those of x with channels last."""
        if tokens.dim() in (2, 3):
            y = super().forward(tokens, padding)
        else:
            rows = None if padding is None else padding.reshape(-1)
            y = super().forward(tokens.reshape(-1, tokens.size(-1)), rows)
            y = y.view(tokens.shape)
        if self.zero_padding and padding is not None:
            y = y.masked_fill(padding.unsqueeze(-1), 0.0)
        if tokens is not x:
            y = y.movedim(-1, 1)
            if x.is_contiguous():
                y = y.contiguous()  # as from torch's norms, whose callers may call view
        return y


def _is_full(found: Found, x: Tensor) -> bool:
    """Whether an argument that is None hides masks that fit ``x`` and contain no padding. For such
    a batch, Hugging Face's models pass on None.
    """
    around = [mask for mask in masks_around(found) if mask.time(x.size(1)) in x.shape]
    return bool(around) and not any(mask.has_padding for mask in around)


@operator(
    "padding_of(Tensor tokens, Tensor? mask, Tensor norm, Tensor? scope) -> Tensor",
    lambda tokens, *_: tokens.new_empty(tokens.shape[:-1], dtype=torch.bool),
)
def padding_of(tokens, mask, norm, scope):
    """:meth:`ConvertedNorm.find_padding` in ``scope``; the result has its own memory, since the
    compiler may write there.
    """
    norm = find(norm)
    try:
        with nullcontext() if scope is None else find(scope):
            padding = norm.find_padding(tokens, mask)
    except ValueError as error:
        raise ValueError(f"{norm.name}: {error}") from None
    if padding is None:
        return tokens.new_zeros(tokens.shape[:-1], dtype=torch.bool)
    return padding.clone(memory_format=torch.contiguous_format)


@cache
def _converted_class(cls: type[ChannelNorm]) -> type[ChannelNorm]:
    attributes = {"__module__": cls.__module__, "__doc__": cls.__doc__}
    return type(cls.__name__, (ConvertedNorm, cls), attributes)


def _rebuild(cls: type[ChannelNorm]) -> ChannelNorm:
    converted = _converted_class(cls)
    return converted.__new__(converted)


def replacement(
    module: nn.Module, name: str, norm: str, layout, zero_padding, conversion, options, gain_offset
) -> ChannelNorm:
    """The norm that replaces ``module``; see :func:`convert_norms`, :func:`.norms_to_replace`."""
    name = name or type(module).__name__
    weight = getattr(module, gain_of(module) or "", None)
    tensors = [tensor for tensor in (weight, *module.buffers()) if tensor is not None]
    like = tensors[0] if tensors else torch.zeros(())
    defaults = _defaults(find_norm(norm), module, weight, like)
    channels = _channels(module, weight)
    made = build_norm(norm, channels, batch_first=True, **(defaults | options))
    buffers = dict(module.named_buffers(recurse=False))
    made.shares_statistics = (
        isinstance(module, BATCH_NORMS)
        and len(made._buffers) > 0
        and made._buffers.keys() <= buffers.keys()
    )
    if made.shares_statistics and "alpha_fwd" not in options:
        made.alpha_fwd = _alpha_of_momentum(module.momentum, name)
    made.to(device=like.device, dtype=like.dtype if like.is_floating_point() else None)
    if made.shares_statistics:
        for key, buffer in buffers.items():
            made._buffers[key].copy_(buffer)
    _take_parameters(made, module, gain_offset)
    _take_hooks(made, module)
    made.__class__ = _converted_class(type(made))
    made.name = name
    made.replaced = type(module).__name__
    made.replaced_keys = frozenset(module.state_dict())
    made.replaced_classes = frozenset(_identity(cls) for cls in type(module).__mro__)
    given = layout if layout in ("BTC", "TBC") else None
    own_layouts = [own for cls, own in _OWN_LAYOUTS.items() if isinstance(module, cls)]
    made.layout = Layout(own_layouts[0] if own_layouts else None, given, name)
    made.zero_padding = zero_padding
    made.conversion = conversion
    made.mask_history = MaskHistory()
    made.register_load_state_dict_pre_hook(_before_loading)
    return made.train(module.training)


def _channels(module: nn.Module, weight: Tensor | None) -> int:
    if isinstance(module, BATCH_NORMS):
        return module.num_features
    if weight is None:
        return module.normalized_shape[0]
    return weight.numel()


def _defaults(entry: NormEntry, module: nn.Module, weight: Tensor | None, like: Tensor) -> dict:
    """The options of the new norm that are not given; ``like`` has the type of ``module``."""
    eps = eps_of(module)
    defaults = {
        "eps": torch.finfo(like.dtype).eps if eps is None else eps,
        "affine": weight is not None,
    }
    is_synchronised = isinstance(module, nn.SyncBatchNorm)
    if "sync" in entry.options:
        defaults["sync"] = entry.default("sync") or is_synchronised
        if is_synchronised:
            defaults["process_group"] = module.process_group
    return defaults


def _take_parameters(made: ChannelNorm, module: nn.Module, gain_offset: float) -> None:
    """Give ``made`` the gain and bias of ``module`` under their names, as far as it uses them."""
    bias = module._parameters.get("bias")
    if bias is not None and made.bias is not None:
        made._parameters["bias"] = bias
    gain_name = gain_of(module)
    gain = module._parameters.get(gain_name)
    if gain is None or made.weight is None:
        return
    made._parameters["weight"] = gain
    if gain_name == "weight" and gain_offset == 0:
        return
    if gain_name in made._parameters:  # with another meaning there
        gain_name = "weight"
    made.gain_name = gain_name
    made.gain_offset = gain_offset
    names = {"weight": gain_name}
    made._parameters = {
        names.get(name, name): parameter for name, parameter in made._parameters.items()
    }
    made.layer_scale.register_forward_pre_hook(no_fast_path)  # the fast path reads weight


def _take_hooks(made: ChannelNorm, module: nn.Module) -> None:
    for attribute, hooks in vars(module).items():
        if re.match("_(forward|backward)_(pre_)?hooks", attribute):
            getattr(made, attribute).update(hooks)


def _alpha_of_momentum(momentum: float | None, name: str) -> float:
    """``alpha_fwd`` for the ``momentum`` of a batch norm of torch: with 0 the statistics are those
    of the last batch, with 1 the initial ones.
    """
    if momentum is None:
        raise ValueError(
            f"{name}: its momentum=None averages all batches equally, which no norm here does "
            "while it trains: give alpha_fwd=0.9 (momentum=0.1), or another decay, and take the "
            "mean over batches by recalibrating() afterwards; or leave this norm as it is "
            f"(skip={name!r})"
        )
    if not 0 <= momentum <= 1:
        raise ValueError(
            f"{name}: its momentum={momentum} is not in [0, 1]: give alpha_fwd=, which is 1 - "
            "momentum"
        )
    return 1.0 - momentum


def _identity(cls: type) -> tuple[str, str]:
    """The module and name that identify a class even if the class itself cannot be pickled."""
    return cls.__module__, cls.__qualname__


def eps_of(module: nn.Module) -> float | None:
    """The epsilon of ``module``; None if it stores none, or None as torch.nn.RMSNorm does."""
    for name in EPS_NAMES:
        eps = getattr(module, name, None)
        if eps is not None:
            return eps
    return None


def gain_of(module: nn.Module) -> str | None:
    """The name of the gain of a norm: ``weight``, or its only parameter besides a bias."""
    if isinstance(getattr(module, "weight", None), Tensor):
        return "weight"
    others = []
    for name, parameter in module._parameters.items():
        if name != "bias" and parameter is not None:
            others.append(name)
    if len(others) == 1:
        return others[0]
    return None


def _before_loading(
    module: ConvertedNorm,
    state_dict: dict,
    prefix: str,
    metadata: dict,
    strict: bool,
    missing_keys: list[str],
    unexpected_keys: list[str],
    errors: list[str],
) -> None:
    """Turn the state of the replaced module into a state of ``module``; what it lacks stays
    unchanged. The state of the replaced module does not record layer-scale; in a state of a
    converted norm, layer-scale must be that of ``module``.
    """
    saved_groups = state_dict.pop(prefix + SAVED_GROUPS, None)
    given = {key.removeprefix(prefix) for key in state_dict if key.startswith(prefix)}
    if saved_groups is not None or not given <= module.replaced_keys:
        groups = 0 if saved_groups is None else int(saved_groups)
        if groups != module.layer_scale_groups:
            errors.append(
                f"{module.name}: the checkpoint was trained with layer_scale_groups={groups}, and "
                f"here it is {module.layer_scale_groups}; give convert_norms the options that the "
                "trained model had"
            )
        return
    if not given:
        return
    own = dict(module.named_parameters(recurse=False)) | module._buffers
    if given == own.keys():
        return
    for key in given - own.keys():
        del state_dict[prefix + key]
    kept = own.keys() - given
    if not module.shares_statistics:
        kept |= own.keys() & {COUNT}
    for key in kept:
        state_dict[prefix + key] = own[key].detach().clone()
