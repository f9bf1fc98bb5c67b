"""LN: layer normalization, the baseline."""

import torch.nn.functional as F
from torch import Tensor

from pn_fairseq import kernels
from pn_fairseq.norms.core.base import ChannelNorm


def layer_norm(h: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """LN of tokens h, (..., C), in their type. torch accepts only some parameters of another dtype,
    and which ones differs between CPU and CUDA.
    """
    size = h.shape[-1:]
    if weight is None or weight.dtype == h.dtype:
        return F.layer_norm(h, size, weight, bias, eps)
    wide = kernels.acc_dtype(h)
    return F.layer_norm(h.to(wide), size, weight.to(wide), bias.to(wide), eps).to(h.dtype)


class LayerNorm(ChannelNorm):
    r"""Layer normalization, LN (Ba et al. 2016): per token, over its C channels.

    .. math:: y = \gamma\, (x - \mathrm{mean}(x)) / \sqrt{\mathrm{var}(x) + \epsilon} + \beta

    ``torch.nn.functional.layer_norm`` computes it, also for half types; parameters are named as in
    ``torch.nn.LayerNorm``. The norm has no state, and a padding mask changes nothing.

    Arguments: see :class:`~pn_fairseq.norms.core.base.ChannelNorm`.
    """

    def is_torch_layer_norm(self) -> bool:
        return type(self) is LayerNorm and self.affine and not self.layer_scale_groups

    def normalize(self, h: Tensor) -> Tensor:
        return layer_norm(h, self.gain, self.bias, self.eps)
