"""PN-V: power normalization with the batch's own quadratic mean and the exact gradient."""

import torch
from torch import Tensor

from pn_fairseq.norms.base import RunningNorm
from pn_fairseq.norms.checks import check_alpha


class PowerNormV(RunningNorm):
    r"""Power normalization with batch statistics, PN-V (Shen et al. 2020, Definition 1; gradient Eq. 6).

    Training, per channel, with the mean taken over the N real tokens M of the batch:

    .. math:: \hat x = x / \sqrt{\mathrm{mean}_M(x^2) + \epsilon}, \qquad y = \gamma \hat x + \beta

    and the exact gradient :math:`\mathrm{d}x = (\mathrm{d}\hat x - 1_M \hat x \sum_M \mathrm{d}\hat x\,\hat x / N)
    / \sqrt{\psi_B^2 + \epsilon}`. For evaluation, :math:`\psi^2` is an exponential average of the batches'.

    Args:
        num_features: number of channels C.
        eps: added to the second moment before the root.
        alpha: decay of :math:`\psi^2`, in (0, 1).
        affine: learn ``weight`` and ``bias``, both (C,).
        layer_scale_groups: groups of the :class:`~pn_fairseq.norms.LayerScale` in front; 0 means none.

    Buffers: ``running_psi2`` (C,) float32, initially 1, and ``num_batches_tracked``, int64.

    Raises:
        ValueError: an argument or an input does not fit; the message holds its value.
    """

    layer_scale_per_head = True

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        alpha: float = 0.9,
        affine: bool = True,
        layer_scale_groups: int = 0,
    ):
        super().__init__(num_features, eps, affine, layer_scale_groups, running_psi2=1.0)
        self.alpha = check_alpha("alpha", alpha)

    @torch.jit.unused
    def _train(self, h: Tensor, padding_mask: Tensor | None) -> Tensor:
        padding, count = self._real_tokens(h, padding_mask)
        real = h if padding is None else h.masked_fill(padding, 0.0)
        psi2_batch = self._mean_over_real(real.square(), count)
        scale = torch.rsqrt(psi2_batch + self.eps)
        step = self._begin(psi2_batch, count, {"running_psi2": psi2_batch}, self._weight(self.alpha))
        normalized = real * scale
        if padding is not None:
            # Padding is divided by the statistic but takes no part in its gradient.
            normalized = torch.where(padding, h * scale.detach(), normalized)
        y = self._affine(normalized)
        # One gradient that is not finite makes that of the scale so, and those are C numbers only.
        self._settle_by(scale if scale.requires_grad else y, step)
        return y

    def _evaluate(self, h: Tensor) -> Tensor:
        return self._affine(h * torch.rsqrt(self.running_psi2.to(h.dtype) + self.eps))

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, alpha={self.alpha}"
