"""A norm with running statistics, in evaluation, as part of the linear maps that follow it."""

import torch
from torch import Tensor

from pn_fairseq.norms.base import RunningNorm


@torch.no_grad()
def folded_linear(norm: RunningNorm, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    r"""Weight (K, C) and bias (K,) of the linear map that takes the place of ``norm`` and the one that follows it.

    In evaluation a norm is :math:`s \odot h + b` with constant vectors s and b (:meth:`RunningNorm.evaluation_affine`)
    of the layer-scaled input h, so that

    .. math:: W (s \odot h + b) + c = (W\,\mathrm{diag}(s))\, h + (W b + c)

    What is left of the norm is its layer-scale, ``norm.layer_scale``, which does nothing where it has no groups.

    Args:
        norm: a norm over C channels.
        weight: W, (K, C).
        bias: c, (K,); None for 0.

    Returns:
        Both in float64, whatever the types of the arguments.
    """
    norm.flush()
    scale, shift = norm.evaluation_affine(torch.float64)
    weight = weight.to(torch.float64)
    moved = weight @ shift
    return weight * scale, moved if bias is None else moved + bias.to(torch.float64)
