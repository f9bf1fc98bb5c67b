"""BN: batch normalization over the real tokens of a padded batch."""

import torch
from torch import Tensor

from pn_fairseq import kernels
from pn_fairseq.norms.core.base import COUNT, RunningNorm
from pn_fairseq.norms.core.passes import one_at_a_time
from pn_fairseq.norms.core.step import Moments, Step


class BatchStatsNorm(RunningNorm):
    r"""A norm by the statistics of the batch with the exact gradient: the common part of BN and
    PN-V.

    y = weight x_hat + bias, x_hat = (h - mean) / D, D = sqrt(moment + eps), where mean and moment
    are taken over the N real tokens M of the batch. With dx_hat = weight dy, real tokens get (Shen
    et al. 2020, Eq. 6; BN: Eq. 3)

    .. math:: \mathrm{d}h = (\mathrm{d}\hat x - \hat x\,\mathrm{mean}_M(\mathrm{d}\hat x\,\hat x)
        - [\text{BN}]\;\mathrm{mean}_M(\mathrm{d}\hat x)) / D

    and padding gets dx_hat / D: it is normalized, but does not contribute to the statistics.
    """

    reads = ()

    def whole_step(self, x, padding, weight, bias) -> Tensor | None:
        train = kernels.compiled("batch_train", x)
        if train is None:
            return None
        names = (self.moment_name, self.mean_name, COUNT)
        state = [self._buffers[name] for name in names if name is not None]
        options = self.layer_scale_groups, self.eps, self.alpha_fwd, self.unbiased
        return train(x, weight, bias, padding, state, *self.known_to_step(), *options)

    def forward_pass(self, step: Step) -> Tensor:
        if self.whole_step is not None and not self.synchronises():
            centered = self.mean_name is not None
            y, step.inv_rms, mean, moment, count = kernels.batch_normalize(
                step.x,
                step.weight,
                step.bias,
                step.padding,
                self.layer_scale_groups,
                self.eps,
                centered,
            )
            step.batch = Moments(mean if centered else None, moment, count, reduced=True)
            return y
        batch = self.batch_moments(step)
        return step.normalize(batch.moment, batch.mean, *self.training_affine(step))

    def training_affine(self, step: Step) -> tuple[Tensor | None, Tensor | None]:
        """The counterpart in training of :meth:`effective_affine`."""
        return self.effective_affine(
            step.weight, step.bias, step.further, step.batch.mean, step.batch.moment
        )

    def backward_pass(self, step: Step) -> tuple[Tensor, Tensor]:
        if self.whole_step is None or self.synchronises():
            return self.exact_gradient(step)
        with one_at_a_time():
            state = self.state_to_move(step)
            if state is None:
                return self.exact_gradient(step)
            gradients = kernels.batch_step_(
                step.dy,
                step.x,
                step.padding,
                step.weight,
                step.batch.mean,
                step.batch.moment,
                step.batch.count,
                step.loss_scale,
                step.inv_rms,
                state[self.moment_name],
                None if self.mean_name is None else state[self.mean_name],
                state[COUNT],
                self.diagnostics_memory(),
                self.layer_scale_groups,
                self.eps,
                self.alpha_fwd,
                self.unbiased,
            )
            step.mark_taken_in()
        return gradients

    def exact_gradient(
        self, step: Step, weight: Tensor | None = None, total: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """dx and the sums over tokens of dy x_hat and of dy, (2, C), for y = weight x_hat +
        bias. ``total``: the factor of dy in dx, if it differs from ``weight``.
        """
        batch = step.batch
        parameters, products = step.gradient_sums(batch.moment, batch.mean, weight)
        nu, offset = self.corrections(step, products)
        offset = None if batch.mean is None else offset
        total = weight if total is None else total
        dx, _ = step.gradient(batch.moment, batch.mean, nu, offset, total, batch.count)
        return dx, parameters

    def corrections(self, step: Step, products: Tensor) -> tuple[Tensor, Tensor]:
        """The factors of x_hat and 1 in the gradient through the statistics, times N. Here:
        ``products``.
        """
        return products.unbind()


class MaskedBatchNorm(BatchStatsNorm):
    r"""Batch normalization, BN (Ioffe & Szegedy 2015; Shen et al. 2020, Algorithm 1, gradient Eq.
    3).

    Computes what ``torch.nn.BatchNorm1d`` computes from only the N real tokens:

    .. math:: \hat x = (x - \mu_B) / \sqrt{\sigma_B^2 + \epsilon}, \qquad y = \gamma \hat x + \beta

    with the biased variance and the exact gradient. The running mean and (unbiased) variance are
    exponential averages for evaluation.

    Args:
        alpha_fwd: decay of the running statistics, in (0, 1); torch's ``momentum`` is ``1 -
            alpha_fwd``.
        others: see :class:`~pn_fairseq.norms.core.base.RunningNorm`.

    Buffers: ``running_mean`` (initially 0) and ``running_var`` (initially 1), (C,) float32, and
    ``num_batches_tracked``, int64. A batch of one real token has no unbiased variance and changes
    none of them.
    """

    moment_name = "running_var"
    mean_name = "running_mean"
    unbiased = True  # not finite for one token: such a batch does not count

    def __init__(self, num_features: int, **common):
        super().__init__(num_features, **common)
        self.add_state("running_mean", 0.0)
        self.add_state("running_var", 1.0)


class MaskedBatchNormRelease(MaskedBatchNorm):
    r"""Batch normalization as in the code released with PowerNorm; it is not known whether it gave
    the published BLEU.

    Padding is filled with the mean of the real tokens and counted. With A positions, of which N are
    real tokens M,

    .. math:: \mu_B = \mathrm{mean}_M(x), \qquad \sigma_B^2 = \frac{1}{A} \sum_M (x - \mu_B)^2

    so more padding makes the variance smaller and the normalized real tokens larger. The running
    variance averages :math:`\sigma_B^2 A / (A - 1)`. The gradient is the exact one of this forward.
    By default a transformer puts layer-scale with one group in front of this norm, does not
    synchronize the norm, and averages with ``alpha_fwd`` 0.95.

    Arguments, buffers and errors: see :class:`MaskedBatchNorm`.
    """

    #: ``real``: number of real tokens; ``batch`` counts all positions.
    keeps = ("real",)

    def __init__(self, num_features: int, alpha_fwd: float = 0.95, **common):
        super().__init__(num_features, alpha_fwd=alpha_fwd, **common)

    def batch_moments(self, step: Step) -> Moments:
        step.padding_counts = True
        positions = step.moments().count
        step.padding_counts = False
        real = step.moments(centered=True)
        counted = torch.where(real.count > 0, positions, real.count)
        step.batch = Moments(
            real.mean, real.moment * real.count / counted.clamp(min=1.0), counted, reduced=True
        )
        step.real = real.count
        return step.batch

    def corrections(self, step: Step, products: Tensor) -> tuple[Tensor, Tensor]:
        nu, offset = products.unbind()
        return nu, offset * step.batch.count / step.real.clamp(min=1.0)
