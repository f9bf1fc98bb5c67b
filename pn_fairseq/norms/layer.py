"""LN: layer normalization, the baseline."""

import torch
import torch.nn.functional as F
from torch import Tensor

from pn_fairseq.norms.base import ChannelNorm
from pn_fairseq.norms.checks import check_input


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

    def forward(self, x: Tensor, padding_mask: Tensor | None = None) -> Tensor:
        check_input(x, padding_mask, self.num_features, self.batch_first)
        x = self.layer_scale(x)
        weight, bias = self.weight, self.bias
        if weight is not None and x.dtype == torch.float64:
            weight, bias = weight.double(), bias.double()  # layer_norm takes no narrower parameters than its input
        return F.layer_norm(x, (self.num_features,), weight, bias, self.eps)

    forward.__doc__ = ChannelNorm.forward.__doc__
