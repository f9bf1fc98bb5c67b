"""RMSNorm and ScaleNorm: each token divided by its own root mean square or length."""

import math

import torch
from torch import Tensor, nn

from pn_fairseq import kernels
from pn_fairseq.norms.core.base import ChannelNorm


class RMSNorm(ChannelNorm):
    r"""Root mean square normalization (Zhang & Sennrich 2019, Eq. 4): per token, over its C
    channels.

    .. math:: y = \gamma\, x / \sqrt{\mathrm{mean}(x^2) + \epsilon}

    Computes the same as ``torch.nn.RMSNorm``. The norm has no bias and no state, and a padding mask
    changes nothing.

    Arguments: see :class:`~pn_fairseq.norms.core.base.ChannelNorm`.
    """

    learned = ("weight",)

    def normalize(self, h: Tensor) -> Tensor:
        # Layer-scale with one group and a gain.
        return kernels.evaluate(h, self.gain, None, None, None, 1, self.eps)


class RMSNormRelease(RMSNorm):
    r"""RMSNorm as in its authors' code for PyTorch: :math:`y = \gamma\, x /
    (\sqrt{\mathrm{mean}(x^2)} + 10^{-8})`.

    Arguments and shapes: see :class:`RMSNorm`; only layer-scale uses ``eps``.
    """

    def normalize(self, h: Tensor) -> Tensor:
        return kernels.standardized(h, self.gain, centered=False, eps_outside=1e-8)


class ScaleNorm(ChannelNorm):
    r"""ScaleNorm (Nguyen & Salazar 2019, Eq. 5): every token gets the learned length g.

    .. math:: y = g\, x / \max(\lVert x \rVert_2, \epsilon)

    ``g``, (1,), is initially :math:`\sqrt{C}`; it is always learned, even with ``affine=False``.
    The norm has no gain and bias per channel and no state, and a padding mask changes nothing.

    Args:
        eps: the least length that is divided by, and epsilon of layer-scale.
        others: see :class:`~pn_fairseq.norms.core.base.ChannelNorm`.
    """

    learned = ()

    def __init__(self, num_features: int, **common):
        super().__init__(num_features, **common)
        self.g = nn.Parameter(torch.full((1,), math.sqrt(num_features)))

    def reset_parameters(self) -> None:
        """Set ``g`` to :math:`\\sqrt{C}`."""
        nn.init.constant_(self.g, math.sqrt(self.num_features))

    def normalize(self, h: Tensor) -> Tensor:
        gain = self.g.expand(self.num_features)
        return kernels.standardized(
            h, gain, centered=False, square_factor=self.num_features, min_divisor=self.eps
        )
