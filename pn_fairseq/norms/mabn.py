"""MABN: normalization by moving averages of the statistics of both passes."""

from torch import Tensor

from pn_fairseq.norms.core.step import Step
from pn_fairseq.norms.core.window import WindowNorm


class MovingAverageBatchNorm(WindowNorm):
    r"""Moving average batch normalization, MABN (Yan et al. 2020, "Towards Stabilizing Batch
    Statistics in Backward Propagation of Batch Normalization").

    Training step number t, per channel, with :math:`\psi_B^2 = \mathrm{mean}_M(x^2)` over the real
    tokens M and means over the last ``window`` steps, this one included (early, see
    :class:`~pn_fairseq.norms.core.window.WindowNorm`: only of this step):

    .. math::
        \psi^2 &= \mathrm{mean}_t(\psi_B^2), \qquad D = \sqrt{\psi^2 + \epsilon}, \qquad
        \hat x = x / D, \qquad y = \gamma r \hat x + \beta \\
        \lambda_B &= \mathrm{mean}_M(\gamma r\,\mathrm{d}y\,\hat x), \qquad
        \lambda = \mathrm{mean}_t(\lambda_B), \qquad
        \mathrm{d}x = (\gamma r\,\mathrm{d}y - \lambda \hat x) / D

    r = D / sqrt(running psi^2 + eps), clipped to [1/5, 5], so that y is that of evaluation where
    nothing is clipped. r is 1 in the first 1,000 optimizer updates, or in the warm-up if that is
    longer. After each step :math:`\psi^2` enters the running :math:`\psi^2`, which evaluation uses,
    by an exponential average.

    The paper also centralizes the weights of the layer in front, so that the output of that layer
    has mean 0. In a pre-norm transformer the residual stream, the sum of many layers' outputs, is
    in front, so nothing is centralized here.

    Args:
        alpha_fwd: decay of the running :math:`\psi^2`, in (0, 1).
        window: steps that are averaged.
        psi_warmup_updates: length of the warm-up in optimizer updates.
        others: see :class:`~pn_fairseq.norms.core.base.RunningNorm`.

    Buffers, float32: ``running_psi2`` (C,), initially 1, ``psi2_window`` and ``lambda_window``
    (window, C), initially 0, the :math:`\psi_B^2` and :math:`\lambda_B` of the last steps;
    ``num_batches_tracked``, int64.
    """

    mixes_tokens = "at first"

    def __init__(self, num_features: int, alpha_fwd: float = 0.98, **common):
        super().__init__(num_features, alpha_fwd=alpha_fwd, **common)

    def forward_pass(self, step: Step) -> Tensor:
        self.begin(step, step.moments())
        return step.normalize(step.psi2, weight=step.times_weight(step.ratio))
