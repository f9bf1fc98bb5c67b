"""LN: layer normalization, the baseline."""

import torch
import torch.nn.functional as F
from torch import Tensor

from pn_fairseq.norms.base import ChannelNorm


class LayerNorm(ChannelNorm):
    r"""Layer normalization, LN (Ba et al. 2016): per token, over its C channels.

    .. math:: y = \gamma\, (x - \mathrm{mean}(x)) / \sqrt{\mathrm{var}(x) + \epsilon} + \beta

    ``torch.nn.functional.layer_norm`` does the work, also on half types; parameters are named as in
    ``torch.nn.LayerNorm``. It has no state, and a padding mask changes nothing.

    Args:
        num_features: number of channels C.
        eps, affine, layer_scale_groups, batch_first: see :class:`~pn_fairseq.norms.base.ChannelNorm`.

    Raises:
        ValueError: an argument or an input does not fit; the message holds its value.
    """

    def normalize(self, h: Tensor) -> Tensor:
        weight, bias = self.weight, self.bias
        if weight is not None and h.dtype == torch.float64:
            weight, bias = weight.double(), bias.double()  # layer_norm takes no narrower parameters than its input
        return F.layer_norm(h, (self.num_features,), weight, bias, self.eps)
