"""RBN: batch normalization with a penalty on the distance of the batch's statistics from the running ones."""

from dataclasses import dataclass

import torch
from torch import Tensor

from pn_fairseq.norms.batch import MaskedBatchNorm
from pn_fairseq.norms.checks import check_real
from pn_fairseq.norms.tokens import Contribution, Moments, Tokens


@dataclass(slots=True)
class PenaltyContribution(Contribution):
    """``mean``, ``var``: the running statistics before the step. ``variance``: of the batch, before a clamp."""

    mean: Tensor | None = None
    var: Tensor | None = None
    variance: Tensor | None = None


class RegularizedBatchNorm(MaskedBatchNorm):
    r"""Regularized batch normalization, RBN (Wang et al. 2022, "Understanding the Failure of Batch Normalization for
    Transformers in NLP").

    Batch normalization (:class:`~pn_fairseq.norms.MaskedBatchNorm`), and a penalty on the loss, summed over channels:

    .. math:: P = \lambda_\mu \sum_c (\mu_B - \mu)^2 + \lambda_\sigma \sum_c (\sigma_B - \sigma)^2, \qquad
        \sigma_B = \sqrt{\mathrm{var}_B + \epsilon}

    with :math:`\mu` and :math:`\sigma` of the running statistics before the batch, as constants.

    **What the penalty is added to.** The backward pass adds the gradient of P to that of the activations, once for each
    forward of each norm, with the factor :attr:`penalty_scale`. Under fairseq that factor is the gradient that reaches
    the criterion's loss (:mod:`pn_fairseq.fairseq_patches.training`): the loss is L + P, as with an auxiliary loss
    of a criterion, for every criterion, under a loss scale, and with recomputed activations. The loss that is logged is
    L; ``--norm-stats-interval`` logs the mean of P over the norms as ``norm_penalty``.

    **How lambda counts.** fairseq's criteria sum L over the tokens of a batch (sentences with ``--sentence-avg``) and
    the trainer divides by their number in the whole update. P is added once per batch and norm. Per token it therefore
    weighs lambda over the number of tokens in a batch: the larger ``--max-tokens``, the weaker. ``--update-freq`` and
    more ranks change nothing as long as a batch stays the same; but a norm that is synchronized, the default, has one P
    for the batches of all ranks together.

    Args:
        alpha_fwd: decay of the running statistics, in (0, 1).
        lambda_mean, lambda_var: :math:`\lambda_\mu` and :math:`\lambda_\sigma`, at least 0. The defaults are the
            authors' for pre-norm translation models.
        others: see :class:`~pn_fairseq.norms.base.RunningNorm`.

    Buffers: see :class:`~pn_fairseq.norms.MaskedBatchNorm`.
    """

    contribution_type = PenaltyContribution

    def __init__(
        self, num_features: int, alpha_fwd: float = 0.95, lambda_mean: float = 0.1, lambda_var: float = 0.01, **common
    ):
        super().__init__(num_features, alpha_fwd=alpha_fwd, **common)
        self.lambda_mean = check_real("lambda_mean", lambda_mean, minimum=0)
        self.lambda_var = check_real("lambda_var", lambda_var, minimum=0)

    def forward_pass(self, tokens: Tokens, contribution: Contribution) -> Tensor:
        contribution.mean, contribution.var = self.frozen_view(self.running_mean), self.frozen_view(self.running_var)
        return super().forward_pass(tokens, contribution)

    def corrections(self, contribution: Contribution, products: Tensor) -> tuple[Tensor, Tensor]:
        # dP/dx = (by_mean + by_sigma x_hat) / N on the N real tokens; dx = (... - nu x_hat - offset) / D.
        if self.ignoring:
            return super().corrections(contribution, products)
        by_mean, by_sigma = self.penalty_gradient(contribution)
        sigma = (contribution.batch.moment + self.eps).sqrt()
        by_statistics = torch.stack([sigma * by_sigma, sigma * by_mean])
        nu, offset = ((products - by_statistics) / contribution.batch.count.clamp(min=1.0)).unbind()
        return nu, offset

    def penalty_gradient(self, contribution: Contribution) -> tuple[Tensor, Tensor]:
        r"""The derivatives of P by :math:`\mu_B` and :math:`\sigma_B`, (C,)."""
        gap_mean, gap_sigma = self._gaps(contribution)
        return 2 * self.lambda_mean * gap_mean, 2 * self.lambda_var * gap_sigma

    def _gaps(self, contribution: Contribution) -> tuple[Tensor, Tensor]:
        batch = contribution.batch
        sigma = (contribution.var.to(batch.moment.dtype) + self.eps).sqrt()
        return batch.mean - contribution.mean, (batch.moment + self.eps).sqrt() - sigma

    def penalty(self, contribution: Contribution) -> Tensor:
        """P, 0-d."""
        gap_mean, gap_sigma = self._gaps(contribution)
        return self.lambda_mean * gap_mean.square().sum() + self.lambda_var * gap_sigma.square().sum()

    def observe(self, contribution: Contribution) -> dict[str, Tensor]:
        """``penalty``: P of the last contribution."""
        return {"penalty": self.penalty(contribution)}


class RegularizedBatchNormRelease(RegularizedBatchNorm):
    r"""Regularized batch normalization as in the authors' code, with the settings that its instructions give.

    (a) The penalty has the absolute difference of the variances in place of the squared one of the deviations:

        .. math:: P = \lambda_\mu \sum_c (\mu_B - \mu)^2 + \lambda_\sigma \sum_c |\mathrm{var}_B - \mathrm{var}|

    (b) The running statistics in P already contain the batch, so a difference is ``alpha_fwd`` times the difference
        from those before the batch.
    (c) The running variance is the average of biased variances.
    (d) Variances are replaced by epsilon where they are smaller; epsilon is not added to them.

    Arguments, buffers and errors: see :class:`RegularizedBatchNorm`.
    """

    def batch_moments(self, tokens: Tokens) -> Moments:
        batch = super().batch_moments(tokens)
        tokens.contribution.variance = batch.moment
        batch = batch._replace(moment=self._clamped(batch.moment))
        tokens.contribution.batch = batch
        return batch

    def _clamped(self, variance: Tensor) -> Tensor:
        """What gives max(variance, eps) when eps is added to it, as all normalization does: (d)."""
        return variance.clamp(min=self.eps) - self.eps

    def evaluation_statistics(self) -> tuple[Tensor, Tensor]:
        return self.running_mean, self._clamped(self.running_var)

    def corrections(self, contribution: Contribution, products: Tensor) -> tuple[Tensor, Tensor]:
        nu, offset = super().corrections(contribution, products)
        return torch.where(contribution.variance > self.eps, nu, 0.0), offset  # below, D is a constant

    def _gaps(self, contribution: Contribution) -> tuple[Tensor, Tensor]:
        gaps = contribution.batch.mean - contribution.mean, contribution.batch.moment + self.eps - contribution.var
        return self.alpha_fwd * gaps[0], self.alpha_fwd * gaps[1]  # (b)

    def penalty_gradient(self, contribution: Contribution) -> tuple[Tensor, Tensor]:
        gap_mean, gap_var = self._gaps(contribution)
        sigma = (contribution.batch.moment + self.eps).sqrt()
        return 2 * self.lambda_mean * gap_mean, 2 * self.lambda_var * gap_var.sign() * sigma  # (a)

    def penalty(self, contribution: Contribution) -> Tensor:
        gap_mean, gap_var = self._gaps(contribution)
        return self.lambda_mean * gap_mean.square().sum() + self.lambda_var * gap_var.abs().sum()

    def statistics_of(self, batch: Moments) -> dict[str, Tensor]:
        return {"running_mean": batch.mean, "running_var": batch.moment + self.eps}  # (c), clamped
