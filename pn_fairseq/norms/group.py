"""GroupNorm: LN for each group of a token's channels."""

from torch import Tensor

from pn_fairseq import kernels
from pn_fairseq.norms.core.base import ChannelNorm
from pn_fairseq.norms.core.checks import check_groups, check_whole


class GroupNorm(ChannelNorm):
    r"""Group normalization (Wu & He 2018) of each token by itself, as in Shen et al. 2020, Table 4.

    .. math:: y_g = \gamma_g\, (x_g - \mathrm{mean}(x_g)) / \sqrt{\mathrm{var}(x_g) + \epsilon} +
      \beta_g

    for each group g of a token's channels, with the biased variance:
    ``torch.nn.functional.group_norm`` of activations (T*B, C). One group is LN. The norm has no
    state, and a padding mask changes nothing.

    Args:
        groups: number of equal groups that the channels split into. A transformer has as many as
            attention heads.
        others: see :class:`~pn_fairseq.norms.core.base.ChannelNorm`.
    """

    def __init__(self, num_features: int, groups: int = 1, **common):
        super().__init__(num_features, **common)
        self.groups = check_whole("groups", groups, minimum=1)
        check_groups(self.num_features, self.groups)

    def normalize(self, h: Tensor) -> Tensor:
        return kernels.standardized(
            h, self.gain, self.bias, groups=self.groups, eps_in_root=self.eps
        )
