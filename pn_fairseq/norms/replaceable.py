"""Which norms of a model can be replaced by norms of this package."""

from __future__ import annotations

from fnmatch import fnmatchcase

import torch
from torch import Tensor, nn

from pn_fairseq.norms.base import ChannelNorm
from pn_fairseq.norms.converted import BATCH_NORMS, eps_of


def norms_to_replace(names: dict[nn.Module, list[str]], only, skip, layout: str | None) -> list[nn.Module]:
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


#: Norms that always stay as they are.
_OTHERS = (nn.GroupNorm, nn.modules.batchnorm._NormBase, ChannelNorm)


def _why_not(module: nn.Module, layout: str | None) -> str | None:
    """Why the norm ``module`` cannot be replaced; "" if it can; None: it is no norm, or of a kind that always stays."""
    if isinstance(module, BATCH_NORMS):
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
    if weight is None or weight.dim() != 1 or not set(parameters) <= {"weight", "bias"} or eps_of(module) is None:
        return None
    return _compare(module)


@torch.no_grad()
def _compare(module: nn.Module) -> str:
    """Why ``module`` is not LayerNorm or RMSNorm of the last dimension with its weight, bias and eps; "" if it is."""
    weight, bias, eps = getattr(module, "weight", None), getattr(module, "bias", None), eps_of(module) or 0.0
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
