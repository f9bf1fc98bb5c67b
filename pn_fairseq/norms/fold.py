"""A norm with running statistics, in evaluation, as part of the maps before or after it."""

import inspect

import torch
from torch import Tensor, nn

from pn_fairseq.norms.core.base import RunningNorm
from pn_fairseq.norms.core.channel import no_fast_path


@torch.no_grad()
def folded_linear(norm: RunningNorm, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    r"""Weight (K, C) and bias (K,) of the linear map that replaces ``norm`` and the linear map
    after it.

    In evaluation a norm is :math:`s \odot h + b` with constant vectors s and b
    (:meth:`RunningNorm.evaluation_affine`) of the layer-scaled input h, so that

    .. math:: W (s \odot h + b) + c = (W\,\mathrm{diag}(s))\, h + (W b + c)

    What is left of the norm is its layer-scale, ``norm.layer_scale``, which does nothing without
    groups.

    Args:
        norm: a norm over C channels.
        weight: W, (K, C).
        bias: c, (K,); None for 0.

    Returns:
        Both in float64, for all types of the arguments.
    """
    return _folded(norm, weight, bias, after=True)


def _folded(
    norm: RunningNorm, weight: Tensor, bias: Tensor | None, after: bool
) -> tuple[Tensor, Tensor]:
    """Weight (K, C, ...) and bias of a map ``after`` ``norm``, or else before it, in float64."""
    scale, shift = norm.evaluation_affine()
    weight = weight.double()
    constant = 0.0 if bias is None else bias.double()
    if after:
        constant = constant + weight.reshape(*weight.shape[:2], -1).sum(-1) @ shift
    else:
        constant = constant * scale + shift
    along_channels = [1] * weight.dim()
    along_channels[int(after)] = -1
    return weight * scale.view(along_channels), constant


@torch.no_grad()
def fold_norms(model: nn.Module, *args, **kwargs) -> list[tuple[str, str]]:
    r"""Fold the norms with running statistics of ``model``, in evaluation, into the maps before or
    after them.

    Like ``torch.nn.utils.fusion``, but finds the maps itself: ``model(*args, **kwargs)`` runs once
    to see which linear maps and convolutions produce the input of a norm or read its output, and
    after each fold to compare. A fold is kept if the output stays the same (to 1e-4 of its greatest
    value; use an input with padding if the model accepts it, and float32 or wider).
    A norm stays as it is if its output is also used elsewhere, as in a post-norm transformer, or if
    the weight of the map is computed (weight norm, pruning) or belongs to other modules as well
    (tied embeddings). An ``nn.Identity`` replaces a folded norm, so a checkpoint of the model no
    longer fits.

    Returns:
        The names of the folded norms, each with the names of the maps that now contain it.

    Raises:
        ValueError: the model is in training mode.
    """
    if model.training:
        raise ValueError("the norms of a model can be folded in evaluation only; call eval() first")
    names = {module: name for name, module in model.named_modules()}
    maps = [module for module in names if isinstance(module, _MAPS)]
    norms = []
    for module in names:
        if isinstance(module, RunningNorm) and module.folds and not module.layer_scale_groups:
            norms.append(module)
    makers: dict[int, nn.Module] = {}
    inputs: dict[nn.Module, tuple[nn.Module | None, Tensor]] = {}
    takers: dict[int, list[nn.Module]] = {}
    kept: list[Tensor] = []  # so that no two tensors have the same id

    def watch(module: nn.Module, args: tuple, kwargs: dict, output: Tensor) -> None:
        given, *_ = inspect.signature(module.forward).bind(*args, **kwargs).args
        kept.extend((given, output))
        if isinstance(module, RunningNorm):
            inputs[module] = makers.get(id(given)), output
        else:
            makers[id(output)] = module
            takers.setdefault(id(given), []).append(module)

    watched = (*maps, *norms)
    hooks = [module.register_forward_hook(watch, with_kwargs=True) for module in watched]
    try:
        expected = tensors_of(model(*args, **kwargs))
    finally:
        for hook in hooks:
            hook.remove()
    folded = []
    for norm, (maker, output) in inputs.items():
        before = [maker] if maker is not None else []
        after = takers.get(id(output), [])
        for neighbours, is_after in ((before, False), (after, True)):
            if neighbours and _try(model, norm, neighbours, is_after, expected, args, kwargs):
                parts = [names[neighbour] for neighbour in neighbours]
                folded.append((names[norm], ", ".join(parts)))
                break
    return folded


#: Maps over channels. In the weight of a transposed convolution, channels are another dimension.
_MAPS = (nn.Linear, nn.Conv1d, nn.Conv2d)


class FoldedNorm(nn.Identity):
    """Replaces a folded norm. ``nn.TransformerEncoderLayer`` reads eps, and computes LayerNorm
    without calling its norms unless one of them has a hook.
    """

    def __init__(self, eps: float):
        super().__init__()
        self.eps = eps
        self.register_forward_pre_hook(no_fast_path)
        self.eval()


def _try(
    model: nn.Module, norm: RunningNorm, maps: list[nn.Module], after: bool, expected, args, kwargs
) -> bool:
    """Fold ``norm`` into each of ``maps``, which come after or before it; undo the fold if the
    output changes, or if the model uses ``norm`` other than by calling it.
    """
    if getattr(norm, "zero_padding", False):
        return False
    for module in maps:
        weight = module._parameters.get("weight")  # None: it is computed
        # differs also for a convolution with groups
        if weight is None or weight.size(int(after)) != norm.num_features:
            return False
        if _is_shared(module, model):
            return False
    unfolded = {module: (module.weight, module.bias) for module in maps}
    parents = []
    for parent in model.modules():
        for key, child in parent._modules.items():
            if child is norm:
                parents.append((parent, key))
    same = False
    try:
        for module, (weight, bias) in unfolded.items():
            wide, constant = _folded(norm, weight, bias, after)
            module.weight = nn.Parameter(wide.to(weight.dtype), weight.requires_grad)
            module.bias = nn.Parameter(constant.to(weight.dtype), weight.requires_grad)
        for parent, key in parents:
            parent._modules[key] = FoldedNorm(norm.eps)
        outputs = tensors_of(model(*args, **kwargs))
        same = len(outputs) == len(expected) and all(map(_is_close, outputs, expected))
    except Exception:  # for example, the model reads the norm's weight
        pass
    finally:
        if not same:
            for module, (weight, bias) in unfolded.items():
                module.weight = weight
                module.bias = bias
            for parent, key in parents:
                parent._modules[key] = norm
    return same


def _is_shared(module: nn.Module, model: nn.Module) -> bool:
    """Whether a parameter of ``module`` also belongs to another module of ``model``."""
    own = {id(parameter) for parameter in module.parameters(recurse=False)}
    for user in model.modules():
        others = map(id, user.parameters(recurse=False))
        if user is not module and not own.isdisjoint(others):
            return True
    return False


def _is_close(output: Tensor, original: Tensor) -> bool:
    """Whether ``output`` is ``original``, to 1e-4 of its greatest value."""
    if output.shape != original.shape:
        return False
    error = (output - original).abs().max()
    return bool(error <= 1e-4 * original.abs().max())


def tensors_of(output) -> list[Tensor]:
    """The floating-point tensors in the output of a model."""
    if isinstance(output, Tensor):
        if output.is_floating_point():
            return [output]
        return []
    parts = ()
    if isinstance(output, dict):
        parts = output.values()
    elif isinstance(output, (list, tuple)):
        parts = output
    found = []
    for part in parts:
        found += tensors_of(part)
    return found
