"""PN-V: power normalization with the batch's own quadratic mean and the exact gradient."""

from pn_fairseq.norms.batch import BatchStatsNorm


class PowerNormV(BatchStatsNorm):
    r"""Power normalization with batch statistics, PN-V (Shen et al. 2020, Definition 1; gradient
    Eq. 6).

    Training, per channel, with the mean taken over the N real tokens M of the batch:

    .. math:: \psi_B^2 = \mathrm{mean}_M(x^2), \qquad \hat x = x / \sqrt{\psi_B^2 + \epsilon},
        \qquad y = \gamma \hat x + \beta

    and the exact gradient :math:`\mathrm{d}x = (\mathrm{d}\hat x - 1_M \hat x \sum_M \mathrm{d}\hat
    x\,\hat x / N) / \sqrt{\psi_B^2 + \epsilon}`. For evaluation, :math:`\psi^2` is an exponential
    average of the batches'.

    Args:
        alpha_fwd: decay of :math:`\psi^2`, in (0, 1).
        others: see :class:`~pn_fairseq.norms.core.base.RunningNorm`.

    Buffers: ``running_psi2`` (C,) float32, initially 1, and ``num_batches_tracked``, int64.
    """

    moment_name = "running_psi2"
    normalizes_by = "batch about 0"

    def __init__(self, num_features: int, **common):
        super().__init__(num_features, **common)
        self.add_state("running_psi2", 1.0)
