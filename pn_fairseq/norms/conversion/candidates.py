"""Which norms of a model can be replaced by norms of this package."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from pn_fairseq.norms.conversion.converted_norm import BATCH_NORMS, EPS_NAMES, eps_of, gain_of
from pn_fairseq.norms.conversion.mask_arguments import parameters_of
from pn_fairseq.norms.core.base import ChannelNorm
from pn_fairseq.norms.masks.padding import ARGUMENT_FORMS, matches, patterns_of


def norms_to_replace(
    names: dict[nn.Module, list[str]], only, skip, layout: str | None
) -> dict[nn.Module, float]:
    """The modules in ``names`` to replace, and what each adds to its gain: 1 if the gain is
    zero-centred, as in Gemma, else 0. For the other arguments see :func:`convert_norms`.

    One warning lists the norms that cannot be replaced and that ``skip`` does not name, with the
    reasons.

    Raises:
        ValueError: no norm can be replaced, a pattern matches none, or the weight of a norm would
            be lost.
    """
    only = patterns_of(only)
    skip = patterns_of(skip) or ()
    # the model may be under construction in `with torch.device("meta")`, as in transformers
    with torch.device("cpu"):
        verdicts = {module: _offset(module, layout) for module in names}
    norms = {module: verdict for module, verdict in verdicts.items() if verdict is not None}
    for pattern in (*(only or ()), *skip):
        if not any(matches(names[module], [pattern]) for module in norms):
            found = ", ".join(names[module][0] or "the model" for module in norms)
            known = f"norms: {found}" if found else _why_none(names)
            raise ValueError(f"the pattern {pattern!r} matches no norm of the model; {known}")
    chosen = {}
    reasons = {}
    for module, verdict in norms.items():
        is_wanted = only is None or matches(names[module], only)
        if not is_wanted or matches(names[module], skip):
            continue
        if isinstance(verdict, str):
            reasons[module] = verdict
        else:
            chosen[module] = verdict
    labels = {module: names[module][0] or type(module).__name__ for module in norms}
    if not chosen:
        listed = "; ".join(f"{labels[module]} {reason}" for module, reason in reasons.items())
        if not norms:
            listed = _why_none(names)
        raise ValueError(
            f"the model has no norm to replace: {listed or 'only= and skip= leave none'}"
        )
    left = {}
    for module, reason in reasons.items():
        if chosen.keys().isdisjoint(module.modules()):  # no norm inside it is replaced
            left.setdefault(reason, []).append(labels[module])
    if left:
        _warn_of_those_left(left)
    for module in chosen:
        _refuse_what_would_be_lost(module, labels[module])
        if layout == "BCT" and not isinstance(module, BATCH_NORMS):
            raise ValueError(
                f"layout='BCT' is for batch norms; {labels[module]} is a {type(module).__name__} "
                "over the last dimension: give 'BTC' or 'TBC'"
            )
    return chosen


def _refuse_what_would_be_lost(module: nn.Module, label: str) -> None:
    for key in ("weight", "bias"):
        if key not in module._parameters and isinstance(getattr(module, key, None), Tensor):
            raise ValueError(
                f"the {key} of {label} is not a parameter of its own and would be lost (does a "
                "parametrization or pruning compute it?); convert the model first, or leave this "
                "norm as it is (skip=...)"
            )


def _why_none(modules: Iterable[nn.Module]) -> str:
    """Why none of ``modules`` can be replaced."""
    own = sorted({type(module).__name__ for module in modules if isinstance(module, ChannelNorm)})
    if own:
        return (
            f"its norms come from this package already ({', '.join(own)}); convert a model "
            f"with its original norms"
        )
    return (
        "it has neither a LayerNorm or RMSNorm over the last dimension, nor a BatchNorm1d or "
        "SyncBatchNorm, nor a module of another class that computes the same"
    )


def _warn_of_those_left(names_of: dict[str, list[str]]) -> None:
    """``names_of``: why a norm cannot be replaced -> the names of such norms."""
    lines = []
    for reason, names in names_of.items():
        if len(names) > 1:
            more = f" (and {len(names) - 1} more)"
        else:
            more = ""
        lines.append(f"{names[0]} {reason}{more}")
    warnings.warn(
        f"convert_norms leaves some norms as they are: {'; '.join(lines)}. (With their names in "
        "skip=... it does so without this warning.)",
        stacklevel=5,
    )


#: Norms that stay as they are, unless an earlier branch of :func:`_offset_with_one_input` replaces
#: them.
_OTHERS = (nn.GroupNorm, nn.modules.batchnorm._NormBase, ChannelNorm)


def is_norm(module: nn.Module) -> bool:
    """Whether ``module`` is a norm: of this package, of torch, or one that
    :func:`norms_to_replace` recognizes.
    """
    with torch.device("cpu"):
        return isinstance(module, _OTHERS) or _offset(module, None) is not None


def _offset(module: nn.Module, layout: str | None) -> float | str | None:
    """What the norm ``module`` adds to its gain; a string: why it cannot be replaced; None: it is
    not a norm, or is of a kind that always stays.
    """
    offset = _offset_with_one_input(module, layout)
    if isinstance(offset, float):
        second = _second_input(module)
        if second is not None:
            return f"takes a second input, {second}, that is no padding mask"
    return offset


def _second_input(module: nn.Module) -> str | None:
    """What the forward of ``module`` expects besides the activations and a padding mask, such as a
    gate or a residual.
    """
    for parameter in parameters_of(module)[1:]:
        is_named = parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        if is_named and ARGUMENT_FORMS.get(parameter.name) != "mask":
            return parameter.name
    return None


def _offset_with_one_input(module: nn.Module, layout: str | None) -> float | str | None:
    """:func:`_offset` of a norm that is called with its activations alone."""
    if isinstance(module, (nn.LazyBatchNorm1d, nn.LazyBatchNorm2d)):
        return "does not know its number of channels yet"
    if isinstance(module, BATCH_NORMS):
        if isinstance(module, nn.BatchNorm2d) and layout != "BCHW":
            return "is for images: give layout='BCHW'"
        if module.track_running_stats:
            return 0.0
        return "has no running statistics"
    if isinstance(module, _OTHERS):
        return None
    if isinstance(module, (nn.LayerNorm, nn.RMSNorm)):
        dimensions = len(module.normalized_shape)
        if dimensions != 1:
            return f"normalizes {dimensions} dimensions"
        if type(module) in (nn.LayerNorm, nn.RMSNorm):
            return 0.0
        return _compare(module)
    is_called_norm = eps_of(module) is not None or "norm" in type(module).__name__.lower()
    names = [name for name, _ in module.named_parameters()]
    has_two_of_its_own = len(names) == 2 and module._parameters.keys() == set(names)
    if is_called_norm and has_two_of_its_own and "bias" not in names:
        for gain, bias in itertools.permutations(names):
            if isinstance(_compare(module, gain, bias), float):
                return f"computes LayerNorm, but its bias is called {bias}: call it bias"
    gain = gain_of(module)
    if gain is None or getattr(module, gain).dim() != 1 or gain in module._buffers:
        return None
    for name in names:
        if gain not in name and "bias" not in name:
            return None
    if is_called_norm:
        return _compare(module)
    if module._modules or module._buffers:  # a call might change its state
        return None
    # Any module with one vector, such as a PReLU. It is not called a norm, so it stays without a
    # warning, unless it computes a norm with an unknown epsilon.
    offset = _compare(module)
    if offset == _UNKNOWN_EPS:
        return offset
    return None


#: Why a norm stays whose formula holds with an epsilon that none of :data:`EPS_NAMES` stores.
_UNKNOWN_EPS = (
    "computes LayerNorm or RMSNorm, but its epsilon is unknown: store it as "
    f"{' or '.join(EPS_NAMES)}"
)


@torch.no_grad()
def _compare(
    module: nn.Module, gain_name: str | None = None, bias_name: str = "bias"
) -> float | str:
    """What ``module`` adds to its gain, if it is LayerNorm or RMSNorm of the last dimension with
    its gain (by default that of :func:`gain_of`), bias and eps; else why it is not.

    Its own gain may be zeros, uninitialized or on the meta device, so random tokens get a random
    gain. A computed gain, as from a parametrization, stays as it is.
    """
    generator = torch.Generator().manual_seed(0)
    gain_name = gain_name or gain_of(module)
    weight = getattr(module, gain_name or "", None)
    bias = getattr(module, bias_name, None)
    channels = module.normalized_shape[0] if weight is None else weight.numel()
    # Short tokens show where eps is added.
    lengths = torch.tensor([1.0, 1e-3, 10.0])[:, None, None]
    shifts = torch.linspace(-1, 1, 4)[None, :, None] * 1e-3
    x = torch.randn(3, 4, channels, generator=generator) * lengths + shifts
    if weight is not None:
        x = x.to("cpu" if weight.is_meta else weight.device, weight.dtype)
    eps = eps_of(module)
    is_stored = eps is not None or hasattr(module, "eps")
    if eps is None:  # as in nn.RMSNorm; a class without such an attribute adds nothing
        eps = torch.finfo(x.dtype).eps if is_stored else 0.0
    random = {}
    for name in (gain_name, bias_name):
        if module._parameters.get(name) is not None:
            random[name] = (torch.rand(channels, generator=generator) + 0.5).to(x)
    gain = _wide(random.get(gain_name, weight), 1.0)
    shift = _wide(random.get(bias_name, bias), 0.0)
    y = _output(module, random, x)
    if y is None:
        return "does not accept inputs of shape (..., C)"
    offset = _fitting_offset(x, y, gain, shift, eps)
    if offset is not None:
        return offset
    if not is_stored:
        # for long tokens no usual epsilon matters
        long = torch.randn(3, 4, channels, generator=generator).to(x) * 30
        y = _output(module, random, long)
        if y is not None and _fitting_offset(long, y, gain, shift, 0.0) is not None:
            return _UNKNOWN_EPS
    return "computes neither LayerNorm nor RMSNorm with its weight"


def _wide(value: Tensor | None, default: float) -> Tensor:
    if value is None:
        return torch.tensor(default, dtype=torch.float64)
    return value.double()


def _output(module: nn.Module, parameters: dict[str, Tensor], x: Tensor) -> Tensor | None:
    """The output of ``module`` for ``x`` with ``parameters``, in float64; None if it fails or has
    another shape.
    """
    try:
        y = torch.func.functional_call(module, parameters, x)
    except Exception:
        return None
    if isinstance(y, Tensor) and y.shape == x.shape:
        return y.double()
    return None


def _fitting_offset(x: Tensor, y: Tensor, gain: Tensor, shift: Tensor, eps: float) -> float | None:
    """What is added to ``gain`` if ``y`` is LayerNorm or RMSNorm of ``x``; None: it is neither."""
    wide = x.double()
    if x.dtype in (torch.float32, torch.float64):
        tolerance = 1e-4
    else:
        tolerance = 3e-2
    for centered in (wide - wide.mean(-1, keepdim=True), wide):
        normalized = centered * torch.rsqrt(centered.square().mean(-1, keepdim=True) + eps)
        for offset in (0.0, 1.0):
            expected = (gain + offset) * normalized + shift
            if torch.allclose(y, expected, rtol=tolerance, atol=tolerance):
                return offset
    return None
