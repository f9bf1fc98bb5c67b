"""BN: batch normalization over the real tokens of a padded batch."""

from typing import Optional

import torch
from torch import Tensor

from pn_fairseq.norms.base import RunningNorm
from pn_fairseq.norms.checks import check_alpha


class MaskedBatchNorm(RunningNorm):
    r"""Batch normalization, BN (Ioffe & Szegedy 2015; Shen et al. 2020, Algorithm 1, gradient Eq. 3).

    What ``torch.nn.BatchNorm1d`` computes when it is given the N real tokens alone:

    .. math:: \hat x = (x - \mu_B) / \sqrt{\sigma_B^2 + \epsilon}, \qquad y = \gamma \hat x + \beta

    with the biased variance and the exact gradient; the running mean and (unbiased) variance are exponential
    averages for evaluation.

    Args:
        num_features: number of channels C.
        eps: added to the variance before the root.
        alpha: decay of the running statistics, in (0, 1); torch's ``momentum`` is ``1 - alpha``.
        affine: learn ``weight`` and ``bias``, both (C,).
        layer_scale_groups: groups of the :class:`~pn_fairseq.norms.LayerScale` in front; 0 means none.
        sync, process_group: see :class:`~pn_fairseq.norms.base.RunningNorm`.

    Buffers: ``running_mean`` (initially 0) and ``running_var`` (initially 1), (C,) float32, and
    ``num_batches_tracked``, int64. A batch of one real token has no unbiased variance and changes none of them.

    Raises:
        ValueError: an argument or an input does not fit; the message holds its value.
    """

    variances = {"running_var": "running_mean"}

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        alpha: float = 0.9,
        affine: bool = True,
        layer_scale_groups: int = 0,
        sync: bool = False,
        process_group=None,
    ):
        super().__init__(
            num_features, eps, affine, layer_scale_groups, sync, process_group, running_mean=0.0, running_var=1.0
        )
        self.alpha = check_alpha("alpha", alpha)

    @torch.jit.unused
    def _train(self, h: Tensor, padding_mask: Tensor | None) -> Tensor:
        padding, count = self._real_tokens(h, padding_mask)
        real = h if padding is None else h.masked_fill(padding, 0.0)
        total = self._sum_over_real(real, padding)
        mean, count_all = self._mean_over_workers(total, count)
        centered = real - mean
        variance, count_all = self._mean_over_workers(self._sum_over_real(centered.square(), padding), count)
        # 1 / (N - 1) is infinite for one token, and a statistic that is not finite changes no state.
        unbiased = variance.detach() * (count_all / (count_all - 1.0))
        step = self._begin(total)
        batch = {"running_mean": mean, "running_var": unbiased}
        self._count_in(step, batch, count_all, self._weight(self.alpha))
        scale = torch.rsqrt(variance + self.eps)
        normalized = centered * scale
        if padding is not None:
            # Padding is normalized with the statistics but takes no part in their gradient.
            normalized = torch.where(padding, (h - mean.detach()) * scale.detach(), normalized)
        y = self._affine(normalized)
        self._settle_by(total, y, step)
        return y

    def evaluation_statistics(self) -> tuple[Optional[Tensor], Tensor]:  # noqa: UP045 (TorchScript)
        return self.running_mean, self.running_var

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, alpha={self.alpha}"
