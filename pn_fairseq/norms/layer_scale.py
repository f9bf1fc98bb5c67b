"""Layer-scale: the per-token, per-group root-mean-square scaling in front of a batch-statistics norm."""

from typing import Optional

import torch
from torch import Tensor, nn

from pn_fairseq import kernels
from pn_fairseq.kernels import reference
from pn_fairseq.norms.checks import check_input, check_positive, check_whole


class LayerScale(nn.Module):
    r"""Divide each group of channels of each token by its root mean square.

    .. math:: y_g = x_g \,/\, \sqrt{\mathrm{mean}_k(x_{g,k}^2) + \epsilon}

    No mean is subtracted and there is no gain. ``groups=1`` is RMSNorm without a gain (Zhang & Sennrich 2019,
    Eq. 4); the code released with PowerNorm puts it in front of every PN with as many groups as attention heads.

    Args:
        num_features: number of channels C.
        groups: number of equal groups G that the channels split into; 0 turns the module off.
        eps: added to the mean square before the root.

    Shapes:
        ``x`` (T, B, C) or (N, C), any floating type; the result has the same shape and type. The arithmetic is
        float32 (float64 for float64 input). ``padding_mask`` is accepted for symmetry with the norms and not used:
        tokens do not see each other.

    Raises:
        ValueError: ``num_features`` is not a positive whole number, ``groups`` is negative or does not divide it,
            ``eps`` is not positive, or the input does not have ``num_features`` channels.
    """

    def __init__(self, num_features: int, groups: int, eps: float = 1e-5):
        super().__init__()
        self.num_features = check_whole("num_features", num_features, minimum=1)
        self.groups = check_whole("groups", groups, minimum=0)
        if self.groups and self.num_features % self.groups:
            raise ValueError(f"num_features={num_features} is not divisible by groups={groups}")
        self.eps = check_positive("eps", eps)

    def forward(self, x: Tensor, padding_mask: Optional[Tensor] = None) -> Tensor:  # noqa: UP045 (TorchScript)
        if not torch.jit.is_scripting():
            check_input(x, padding_mask, self.num_features)
        if self.groups == 0:
            return x
        if torch.jit.is_scripting():  # a saved module has to run where this package is not
            y, _ = reference.normalize(x, None, None, None, None, None, self.groups, self.eps)
        else:
            y, _ = kernels.normalize(x, None, None, None, None, None, self.groups, self.eps)
        return y

    def extra_repr(self) -> str:
        return f"{self.num_features}, groups={self.groups}, eps={self.eps}"
