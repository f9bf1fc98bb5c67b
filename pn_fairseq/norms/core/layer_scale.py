"""Layer-scale: the per-token, per-group root-mean-square scaling in front of a batch-statistics
norm.
"""

from torch import Tensor, nn

from pn_fairseq import kernels
from pn_fairseq.norms.core.checks import check_groups, check_input, check_positive, check_whole


class LayerScale(nn.Module):
    r"""Divide each group of channels of each token by its root mean square.

    .. math:: y_g = x_g \,/\, \sqrt{\mathrm{mean}_k(x_{g,k}^2) + \epsilon}

    No mean is subtracted, and no gain is applied. ``groups=1`` is RMSNorm without a gain (Zhang &
    Sennrich 2019, Eq. 4); the code released with PowerNorm puts layer-scale in front of every PN,
    with as many groups as attention heads.

    Args:
        num_features: number of channels C.
        groups: number of equal groups G that the channels split into; 0 turns the module off.
        eps: added to the mean square before the root.
        batch_first: see :class:`~pn_fairseq.norms.core.base.ChannelNorm`. It changes the check of
            ``padding_mask`` only.

    The name is the PowerNorm paper's. CaiT's LayerScale, a learned factor per channel on a residual
    branch, is something else. ``padding_mask`` changes nothing: each token is scaled by itself.

    Raises:
        ValueError: ``num_features`` is not a positive whole number, ``groups`` is negative or does
            not divide it, ``eps`` is not positive, or the input does not have ``num_features``
            channels.
    """

    def __init__(
        self, num_features: int, groups: int, eps: float = 1e-5, batch_first: bool = False
    ):
        super().__init__()
        self.num_features = check_whole("num_features", num_features, minimum=1)
        self.groups = check_whole("groups", groups, minimum=0)
        if self.groups:
            check_groups(self.num_features, self.groups, " of layer-scale (layer_scale_groups)")
        self.eps = check_positive("eps", eps)
        self.batch_first = batch_first

    def forward(self, x: Tensor, padding_mask: Tensor | None = None) -> Tensor:
        """Scale ``x``; shapes as in :meth:`pn_fairseq.norms.core.base.ChannelNorm.forward`."""
        check_input(x, padding_mask, self.num_features, self.batch_first)
        if self.groups == 0:
            return x
        return kernels.evaluate(x, None, None, None, None, self.groups, self.eps)

    def __prepare_scriptable__(self):
        """Called by ``torch.jit.script`` for every module of a model; every norm of this package
        holds a LayerScale.
        """
        raise RuntimeError(
            "torch.jit.script cannot compile norms of pn_fairseq; use torch.jit.trace or "
            "torch.export"
        )

    def extra_repr(self) -> str:
        return f"{self.num_features}, groups={self.groups}, eps={self.eps}"
