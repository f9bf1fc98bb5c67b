"""PN-V: power normalization with the batch's own quadratic mean and the exact gradient."""

from typing import Optional

from torch import Tensor

from pn_fairseq.norms.base import psi_distance
from pn_fairseq.norms.exact import ExactNorm
from pn_fairseq.norms.pending import Step


class PowerNormV(ExactNorm):
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
        sync, process_group: see :class:`~pn_fairseq.norms.base.RunningNorm`.

    Buffers: ``running_psi2`` (C,) float32, initially 1, and ``num_batches_tracked``, int64.

    Raises:
        ValueError: an argument or an input does not fit; the message holds its value.
    """

    layer_scale_per_head = True
    moment_name = "running_psi2"

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
        super().__init__(num_features, eps, alpha, affine, layer_scale_groups, sync, process_group, running_psi2=1.0)

    def _train_in_parts(self, x: Tensor, padding_mask: Tensor | None) -> Tensor:
        padding_mask = self._mask(x, padding_mask)
        inv_rms, _, squares, count = self._moments(x, padding_mask)
        psi2_batch, count = self._mean_over_workers(squares[0], count)
        step = self._begin(squares[0])
        self._count_in(step, {"running_psi2": psi2_batch}, count, self._weight(self.alpha))
        return self._normalize_exactly(x, padding_mask, None, psi2_batch, count, inv_rms, step)

    def _note_step(self, step: Step, finite: Tensor) -> None:
        super()._note_step(step, finite)
        self._collected["psi_distance"] = psi_distance(step.batch["running_psi2"], self.running_psi2)

    def evaluation_statistics(self) -> tuple[Optional[Tensor], Tensor]:  # noqa: UP045 (TorchScript)
        return None, self.running_psi2
