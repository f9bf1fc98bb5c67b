"""UN: unified normalization, by moving averages of the statistics of both passes."""

from torch import Tensor

from pn_fairseq.norms.core.base import COUNT
from pn_fairseq.norms.core.checks import check_alpha
from pn_fairseq.norms.core.step import Step
from pn_fairseq.norms.core.window import WindowNorm


class UnifiedNorm(WindowNorm):
    r"""Unified normalization, UN (Yang et al. 2022, "Unified Normalization for Accelerating and
    Stabilizing Transformers").

    Training step number t, per channel, with :math:`\psi_B^2 = \mathrm{mean}_M(x^2)` over the real
    tokens M and means over the last ``window`` steps, this one included (early, see
    :class:`~pn_fairseq.norms.core.window.WindowNorm`: only of this step):

    .. math::
        \psi^2 &= \exp \mathrm{mean}_t(\log \psi_B^2), \qquad D = \sqrt{\psi^2 + \epsilon}, \qquad
        \hat x = x / D, \qquad y = \gamma \hat x + \beta \\
        \lambda_B &= \mathrm{mean}_M(\gamma r\,\mathrm{d}y\,\hat x), \qquad
        \nu_t = \alpha_\mathrm{bwd} \nu_{t-1}
        + (1 - \alpha_\mathrm{bwd})\, \mathrm{mean}_t(\lambda_B), \qquad
        \mathrm{d}x = (\gamma r\,\mathrm{d}y - \nu_t \hat x) / D

    r = D / sqrt(running psi^2 + eps), clipped to [1/5, 5]; 1 in the first 1,000 optimizer updates,
    or in the warm-up if that is longer. It acts only on the gradient. After each step
    :math:`\psi^2` enters the running :math:`\psi^2`, which evaluation uses, by an exponential
    average.

    **Filtration of outliers** (``outlier_filtration``; the authors recommend it for images but not
    for text). With v the variance of all numbers of sqrt(``psi2_window``) before this step, a step
    that is not early is *skipped* if the arithmetic mean of the window that contains it exceeds the
    geometric one by more than v ``window`` in some channel. A skipped step uses its own
    :math:`\psi_B^2`, r = 1 and its own :math:`\lambda_B` in place of :math:`\nu`; the windows take
    the running :math:`\psi^2` and the old :math:`\nu` in place of its statistics. With ``window=1``
    every step is skipped, which is PN-V.

    Args:
        alpha_fwd, alpha_bwd: decay of the running :math:`\psi^2` and of :math:`\nu`, in (0, 1).
        window: steps that are averaged.
        outlier_filtration: skip outliers.
        psi_warmup_updates: length of the warm-up in optimizer updates.
        others: see :class:`~pn_fairseq.norms.core.base.RunningNorm`.

    Buffers, float32: ``running_psi2`` (C,), initially 1, ``nu`` (C,), initially 0, ``psi2_window``
    and ``lambda_window`` (window, C), initially 0; ``num_batches_tracked``, int64.
    """

    normalizes_by = "window, geometric"
    geometric = True
    scales_gradient_of_weight = False

    def __init__(
        self,
        num_features: int,
        alpha_bwd: float = 0.9,
        window: int = 4,
        outlier_filtration: bool = False,
        **common,
    ):
        super().__init__(num_features, window=window, **common)
        self.alpha_bwd = check_alpha("alpha_bwd", alpha_bwd)
        self.outlier_filtration = outlier_filtration
        self.add_state("nu", 0.0)

    def forward_pass(self, step: Step) -> Tensor:
        self.begin(step, step.moments())
        return step.normalize(step.psi2)


class UnifiedNormRelease(UnifiedNorm):
    r"""Unified normalization as the authors' code computes it in their translation models.

    (a) Their models pass no padding mask, so padding counts in :math:`\psi_B^2` and in
        :math:`\lambda_B`, and :math:`\nu \hat x` is also subtracted at padding.
    (b) The gradient of :math:`\gamma` has the factor r, though y does not:
        :math:`\sum r\,\mathrm{d}y\,\hat x`.
    (c) The warm-up and the 1,000 of r count training forwards, not optimizer updates.

    Arguments, buffers and errors: see :class:`UnifiedNorm`. A batch without a real token changes no
    state.
    """

    scales_gradient_of_weight = True  # (b)

    def completed_updates(self, state: dict[str, Tensor]) -> Tensor:
        return state[COUNT]  # (c)

    def forward_pass(self, step: Step) -> Tensor:
        step.padding_counts = True
        everywhere = step.moments()
        step.padding_counts = False
        step.moments()  # the number of real tokens decides whether the step is taken in
        self.begin(step, everywhere)  # (a)
        return step.normalize(step.psi2)

    def backward_pass(self, step: Step) -> tuple[Tensor, Tensor]:
        step.padding_counts = True
        return super().backward_pass(step)
