"""BN: batch normalization over the real tokens of a padded batch."""

from dataclasses import dataclass

import torch
from torch import Tensor

from pn_fairseq.norms.base import RunningNorm
from pn_fairseq.norms.tokens import Contribution, Moments, Tokens


class BatchStatsNorm(RunningNorm):
    r"""A norm by the statistics of the batch with the exact gradient; what BN and PN-V have in common.

    y = weight x_hat + bias, x_hat = (h - mean) / D, D = sqrt(moment + eps), where mean and moment are taken over the
    N real tokens M of the batch. With dx_hat = weight dy, real tokens get (Shen et al. 2020, Eq. 6; BN: Eq. 3)

    .. math:: \mathrm{d}h = (\mathrm{d}\hat x - \hat x\,\mathrm{mean}_M(\mathrm{d}\hat x\,\hat x)
        - [\text{BN}]\;\mathrm{mean}_M(\mathrm{d}\hat x)) / D

    and padding dx_hat / D: it is divided by the statistics and takes no part in their gradient.
    """

    def forward_pass(self, tokens: Tokens, contribution: Contribution) -> Tensor:
        batch = self.batch_moments(tokens)
        weight, bias = self.effective_affine(tokens.weight, tokens.bias, tokens.further, batch.mean, batch.moment)
        return tokens.normalize(batch.moment, batch.mean, weight, bias)

    def backward_pass(self, tokens: Tokens, contribution: Contribution) -> tuple[Tensor, Tensor]:
        return self.exact_gradient(tokens, contribution)

    def exact_gradient(
        self, tokens: Tokens, contribution: Contribution, weight: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """dx and the sums over tokens of dy x_hat and of dy, (2, C), for y = weight x_hat + bias."""
        batch = contribution.batch
        parameters, products = tokens.gradient_sums(batch.moment, batch.mean, weight)
        nu, offset = self.corrections(contribution, products)
        offset = None if batch.mean is None else offset
        dx, _ = tokens.gradient(batch.moment, batch.mean, nu, offset, weight)
        return dx, parameters

    def corrections(self, contribution: Contribution, products: Tensor) -> tuple[Tensor, Tensor]:
        """What multiplies x_hat and 1 in the gradient through the statistics: the means of ``products`` over M."""
        nu, offset = (products / contribution.batch.count.clamp(min=1.0)).unbind()
        return nu, offset


class MaskedBatchNorm(BatchStatsNorm):
    r"""Batch normalization, BN (Ioffe & Szegedy 2015; Shen et al. 2020, Algorithm 1, gradient Eq. 3).

    What ``torch.nn.BatchNorm1d`` computes when it is given only the N real tokens:

    .. math:: \hat x = (x - \mu_B) / \sqrt{\sigma_B^2 + \epsilon}, \qquad y = \gamma \hat x + \beta

    with the biased variance and the exact gradient. The running mean and (unbiased) variance are exponential averages
    for evaluation.

    Args:
        alpha_fwd: decay of the running statistics, in (0, 1); torch's ``momentum`` is ``1 - alpha_fwd``.
        others: see :class:`~pn_fairseq.norms.base.RunningNorm`.

    Buffers: ``running_mean`` (initially 0) and ``running_var`` (initially 1), (C,) float32, and
    ``num_batches_tracked``, int64. A batch of one real token has no unbiased variance and changes none of them.
    """

    moment_name = "running_var"
    mean_name = "running_mean"

    def __init__(self, num_features: int, **common):
        super().__init__(num_features, **common)
        self.add_state("running_mean", 0.0)
        self.add_state("running_var", 1.0)

    def statistics_of(self, batch: Moments) -> dict[str, Tensor]:
        unbiased = batch.moment * (batch.count / (batch.count - 1.0))  # infinite for one token: it does not count
        return {"running_mean": batch.mean, "running_var": unbiased}


@dataclass(slots=True)
class ReleaseContribution(Contribution):
    """``real``: number of real tokens; that in ``batch`` is of all positions."""

    real: Tensor | None = None


class MaskedBatchNormRelease(MaskedBatchNorm):
    r"""Batch normalization as in the code released with PowerNorm; it is not known whether it gave the published BLEU.

    Padding is filled with the mean of the real tokens and counted. With A positions, N of them real tokens M,

    .. math:: \mu_B = \mathrm{mean}_M(x), \qquad \sigma_B^2 = \frac{1}{A} \sum_M (x - \mu_B)^2

    so the more padding, the smaller the variance and the larger the real tokens come out. The running variance is
    :math:`\sigma_B^2 A / (A - 1)`. The gradient is the exact one of this forward. A transformer puts layer-scale with
    one group in front, does not synchronize it and averages with ``alpha_fwd`` 0.95 by default.

    Arguments, buffers and errors: see :class:`MaskedBatchNorm`.
    """

    contribution_type = ReleaseContribution

    def __init__(self, num_features: int, alpha_fwd: float = 0.95, **common):
        super().__init__(num_features, alpha_fwd=alpha_fwd, **common)

    def batch_moments(self, tokens: Tokens) -> Moments:
        positions = tokens.with_padding().moments().count
        real = tokens.moments(centered=True)
        counted = torch.where(real.count > 0, positions, real.count)
        batch = Moments(real.mean, real.moment * real.count / counted.clamp(min=1.0), counted, reduced=True)
        tokens.contribution.batch, tokens.contribution.real = batch, real.count
        return batch

    def corrections(self, contribution: Contribution, products: Tensor) -> tuple[Tensor, Tensor]:
        nu, offset = products.unbind()
        return nu / contribution.batch.count.clamp(min=1.0), offset / contribution.real.clamp(min=1.0)
