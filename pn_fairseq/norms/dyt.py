"""DyT and Derf: a squashing function in place of a norm."""

import torch
from torch import Tensor, nn

from pn_fairseq import kernels
from pn_fairseq.norms.core.base import ChannelNorm
from pn_fairseq.norms.core.checks import check_positive


class DynamicTanh(ChannelNorm):
    r"""Dynamic Tanh, DyT (Zhu et al. 2025): :math:`y = \gamma \tanh(\alpha x) + \beta`, without
    statistics.

    ``alpha``, (1,), is always learned, even with ``affine=False``. The norm has no state, and a
    padding mask changes nothing.

    Args:
        alpha_init: initial value of ``alpha``, greater than 0. The paper's is 0.5, less in large
            language models.
        eps: epsilon of layer-scale.
        others: see :class:`~pn_fairseq.norms.core.base.ChannelNorm`.
    """

    normalizes_by = "element"

    def __init__(self, num_features: int, alpha_init: float = 0.5, **common):
        super().__init__(num_features, **common)
        self.alpha_init = check_positive("alpha_init", alpha_init)
        self.alpha = nn.Parameter(torch.full((1,), self.alpha_init))

    def reset_parameters(self) -> None:
        """Set ``weight`` to 1, ``bias`` to 0 and ``alpha`` to ``alpha_init``."""
        super().reset_parameters()
        nn.init.constant_(self.alpha, self.alpha_init)

    def normalize(self, h: Tensor) -> Tensor:
        return kernels.squashed(h, self.gain, self.bias, self.alpha, None, erf=False)


class DynamicErf(DynamicTanh):
    r"""Dynamic erf, Derf (Chen et al. 2025): :math:`y = \gamma\, \mathrm{erf}(\alpha x + s) +
    \beta`.

    ``shift`` is s, (1,), learned, initially 0. The rest is as in :class:`DynamicTanh`.
    """

    def __init__(self, num_features: int, **common):
        super().__init__(num_features, **common)
        self.shift = nn.Parameter(torch.zeros(1))

    def reset_parameters(self) -> None:
        """Set ``weight`` to 1, ``bias`` and ``shift`` to 0, and ``alpha`` to ``alpha_init``."""
        super().reset_parameters()
        nn.init.zeros_(self.shift)

    def normalize(self, h: Tensor) -> Tensor:
        return kernels.squashed(h, self.gain, self.bias, self.alpha, self.shift, erf=True)
