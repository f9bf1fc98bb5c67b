"""BN: batch normalization over the real tokens of a padded batch."""

from typing import Optional

from torch import Tensor

from pn_fairseq.kernels.reference import unbiased
from pn_fairseq.norms.exact import ExactNorm


class MaskedBatchNorm(ExactNorm):
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
    moment_name = "running_var"
    mean_name = "running_mean"

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
            num_features, eps, alpha, affine, layer_scale_groups, sync, process_group, running_mean=0.0, running_var=1.0
        )

    def _train_in_parts(self, x: Tensor, padding_mask: Tensor | None) -> Tensor:
        padding_mask = self._mask(x, padding_mask)
        inv_rms, mean, squares, count = self._moments(x, padding_mask, centered=True)
        total, squares = mean * count, squares[0]
        if self.synchronises():
            own, (mean, _) = mean, self._mean_over_workers(total, count)
            squares = squares + count * (own - mean).square()
        variance, count = self._mean_over_workers(squares, count)
        step = self._begin(total)
        # A statistic that is not finite, as the unbiased variance of one token, changes no state.
        batch = {"running_mean": mean, "running_var": unbiased(variance, count)}
        self._count_in(step, batch, count, self._weight(self.alpha))
        return self._normalize_exactly(x, padding_mask, mean, variance, count, inv_rms, step)

    def evaluation_statistics(self) -> tuple[Optional[Tensor], Tensor]:  # noqa: UP045 (TorchScript)
        return self.running_mean, self.running_var
