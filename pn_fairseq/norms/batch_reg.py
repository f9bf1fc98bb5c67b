"""RBN: batch normalization with a penalty on the distance of the batch's statistics from the
running ones.
"""

import torch
from torch import Tensor

from pn_fairseq.norms.batch import MaskedBatchNorm
from pn_fairseq.norms.core.checks import check_real
from pn_fairseq.norms.core.compiled import after
from pn_fairseq.norms.core.step import Moments, Step


class RegularizedBatchNorm(MaskedBatchNorm):
    r"""Regularized batch normalization, RBN (Wang et al. 2022, "Understanding the Failure of Batch
    Normalization for Transformers in NLP").

    Batch normalization (:class:`~pn_fairseq.norms.MaskedBatchNorm`), and a penalty on the loss,
    summed over channels:

    .. math:: P = \lambda_\mu \sum_c (\mu_B - \mu)^2 + \lambda_\sigma \sum_c (\sigma_B - \sigma)^2,
        \qquad \sigma_B = \sqrt{\mathrm{var}_B + \epsilon}

    where :math:`\mu` and :math:`\sigma` come from the running statistics before the batch, and are
    constants.

    **What the penalty is added to.** The backward pass adds the gradient of P to that of the
    activations, once for each forward of each norm, with the factor :attr:`penalty_scale`. Under
    fairseq that factor is the gradient that reaches the criterion's loss
    (:mod:`pn_fairseq.fairseq_patches.training`): the loss is L + P, as with a criterion's auxiliary
    loss, for every criterion, under a loss scale, and with recomputed activations. The logged loss
    is L; ``--norm-stats-interval`` logs the mean of P over the norms as ``norm_penalty``.

    **How lambda counts.** fairseq's criteria sum L over the tokens of a batch (sentences with
    ``--sentence-avg``), and the trainer divides by their number in the whole update. P is added
    once per batch and norm. Per token it therefore weighs lambda divided by the number of tokens in
    a batch: the larger ``--max-tokens``, the weaker. ``--update-freq`` and more ranks change
    nothing as long as a batch stays the same; but a synchronized norm, the default, computes one P
    for the batches of all ranks together. In your own training loop ``DistributedDataParallel``
    divides by the number of ranks W: if the loss is multiplied by W, ``set_loss_scale(model, W)``
    keeps the weight of P.

    Args:
        alpha_fwd: decay of the running statistics, in (0, 1).
        lambda_mean, lambda_var: :math:`\lambda_\mu` and :math:`\lambda_\sigma`, at least 0. The
            defaults are the authors' for pre-norm translation models.
        others: see :class:`~pn_fairseq.norms.core.base.RunningNorm`.

    Buffers: see :class:`~pn_fairseq.norms.MaskedBatchNorm`.
    """

    reads = ("running_mean", "running_var")
    reports = (*MaskedBatchNorm.reports, "penalty")

    def __init__(
        self,
        num_features: int,
        alpha_fwd: float = 0.95,
        lambda_mean: float = 0.1,
        lambda_var: float = 0.01,
        **common,
    ):
        super().__init__(num_features, alpha_fwd=alpha_fwd, **common)
        self.lambda_mean = check_real("lambda_mean", lambda_mean, minimum=0)
        self.lambda_var = check_real("lambda_var", lambda_var, minimum=0)

    def batch_moments(self, step: Step) -> Moments:
        batch = super().batch_moments(step)
        if torch.compiler.is_compiling() and step.state:  # only the backward reads the state
            step.batch = batch = batch._replace(mean=after(batch.mean, list(step.state.values())))
        return batch

    def corrections(self, step: Step, products: Tensor) -> tuple[Tensor, Tensor]:
        # dP/dx = (by_mean + by_sigma x_hat) / N on the N real tokens; dx = (... - (nu x_hat +
        # offset) / N) / D.
        if step.ignored:
            return super().corrections(step, products)
        gap_mean = self.gap_mean(step)
        _, by_sigma = self.penalty_of_sigma(step)
        sigma = (step.batch.moment + self.eps).sqrt()
        by_mean = 2 * self.lambda_mean * gap_mean
        return (products - sigma * torch.stack([by_sigma, by_mean])).unbind()

    def gap_mean(self, step: Step) -> Tensor:
        r""":math:`\mu_B - \mu`, (C,)."""
        return step.batch.mean - step.state["running_mean"]

    def penalty_of_sigma(self, step: Step) -> tuple[Tensor, Tensor]:
        r"""The second part of P, (C,), and its derivative by :math:`\sigma_B`."""
        moment = step.batch.moment
        sigma = (step.state["running_var"].to(moment.dtype) + self.eps).sqrt()
        gap = (moment + self.eps).sqrt() - sigma
        return self.lambda_var * gap.square(), 2 * self.lambda_var * gap

    def update(self, step: Step, state: dict[str, Tensor]) -> None:
        if self.collecting:
            of_mean = self.lambda_mean * self.gap_mean(step).square()
            self.note("penalty", (of_mean + self.penalty_of_sigma(step)[0]).sum())
        super().update(step, state)


class RegularizedBatchNormRelease(RegularizedBatchNorm):
    r"""Regularized batch normalization as in the authors' code, with the settings that its
    instructions give.

    (a) The penalty contains the absolute difference of the variances instead of the squared
    difference of the standard deviations:

        .. math:: P = \lambda_\mu \sum_c (\mu_B - \mu)^2 + \lambda_\sigma \sum_c |\mathrm{var}_B -
          \mathrm{var}|

    (b) The running statistics in P already contain the batch, so a difference is ``alpha_fwd``
        times the difference from those before the batch.
    (c) The running variance is the average of biased variances.
    (d) Variances are replaced by epsilon where they are smaller; epsilon is not added to them.

    Arguments, buffers and errors: see :class:`RegularizedBatchNorm`.
    """

    keeps = ("variance",)  # of the batch, not clamped
    unbiased = False  # (c)

    def batch_moments(self, step: Step) -> Moments:
        batch = super().batch_moments(step)
        step.variance = batch.moment
        step.batch = batch = batch._replace(moment=self._clamped(batch.moment))
        return batch

    def _clamped(self, variance: Tensor) -> Tensor:
        """max(variance, eps) - eps: all normalization adds eps to the variance. (d)"""
        return variance.clamp(min=self.eps) - self.eps

    def evaluation_statistics(self) -> tuple[Tensor, Tensor]:
        return self.running_mean, self._clamped(self.running_var)

    def corrections(self, step: Step, products: Tensor) -> tuple[Tensor, Tensor]:
        nu, offset = super().corrections(step, products)
        return torch.where(step.variance > self.eps, nu, 0.0), offset  # below, D is a constant

    def gap_mean(self, step: Step) -> Tensor:
        return self.alpha_fwd * super().gap_mean(step)  # (b)

    def penalty_of_sigma(self, step: Step) -> tuple[Tensor, Tensor]:
        var = step.batch.moment + self.eps
        gap = self.alpha_fwd * (var - step.state["running_var"])  # (b)
        return self.lambda_var * gap.abs(), 2 * self.lambda_var * gap.sign() * var.sqrt()  # (a)

    def statistics_of(self, batch: Moments) -> tuple[Tensor, Tensor]:
        return batch.moment + self.eps, batch.mean  # clamped
