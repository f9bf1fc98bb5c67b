"""Batch renormalization: batch statistics, corrected towards the running ones."""

import torch
from torch import Tensor

from pn_fairseq.norms.batch import MaskedBatchNorm
from pn_fairseq.norms.core.base import COUNT
from pn_fairseq.norms.core.checks import check_real, check_whole
from pn_fairseq.norms.core.step import Step


class BatchRenorm(MaskedBatchNorm):
    r"""Batch renormalization, BRN (Ioffe 2017, "Batch Renormalization", Algorithm 1).

    Training, per channel, with the moments of the N real tokens M of the batch and
    :math:`\sigma = \sqrt{\mathrm{var} + \epsilon}` of the batch (B) and of the running statistics:

    .. math::
        r = \mathrm{clip}(\sigma_B / \sigma,\, 1 / r_\mathrm{max},\, r_\mathrm{max}), \qquad
        d = \mathrm{clip}((\mu_B - \mu) / \sigma,\, -d_\mathrm{max},\, d_\mathrm{max}) \\
        \hat x = (x - \mu_B) / \sigma_B, \qquad y = \gamma (\hat x r + d) + \beta

    r and d are constants in the gradient, which is otherwise exact. Where nothing is clipped,
    :math:`y = \gamma (x - \mu) / \sigma + \beta`, as in evaluation. Afterwards :math:`\mu` and
    :math:`\sigma` (the standard deviation, not the variance) move towards the batch's values by
    exponential averages.

    **Schedule**, in completed optimizer updates (:meth:`set_num_updates`; without these calls a
    module counts its training steps). The paper's 5,000, 25,000 and 40,000 steps are here 1/8, 5/8
    and all of ``renorm_updates``: up to the first point r_max = 1 and d_max = 0, which is BN; then
    d_max grows linearly up to the second point and r_max up to the third. In a transformer,
    ``renorm_updates`` is by default 3/10 of ``--max-update``: the paper uses 40,000 steps, and its
    baseline trains for 130,000.

    Args:
        alpha_fwd: decay of :math:`\mu` and :math:`\sigma`, in (0, 1).
        renorm_updates: length of the schedule in optimizer updates.
        renorm_r_max, renorm_d_max: r_max (at least 1) and d_max (at least 0) at its end.
        others: see :class:`~pn_fairseq.norms.core.base.RunningNorm`.

    Buffers: ``running_mean`` (initially 0) and ``running_var`` (:math:`\sigma^2 - \epsilon`,
    initially 1), (C,) float32, and ``num_batches_tracked``, int64. Recalibration takes the mean of
    the (biased) variances of the batches.
    """

    unbiased = False
    follows_updates = True
    reads = ("running_mean", "running_var", COUNT)
    keeps = ("sigma", "r", "d")  # sigma_B, r and d of the batch
    mixes_tokens = "at first"
    normalizes_by = "batch and running"

    def __init__(
        self,
        num_features: int,
        alpha_fwd: float = 0.99,
        renorm_updates: int = 40_000,
        renorm_r_max: float = 3.0,
        renorm_d_max: float = 5.0,
        **common,
    ):
        super().__init__(num_features, alpha_fwd=alpha_fwd, **common)
        self.renorm_updates = check_whole("renorm_updates", renorm_updates, minimum=0)
        self.renorm_r_max = check_real("renorm_r_max", renorm_r_max, minimum=1)
        self.renorm_d_max = check_real("renorm_d_max", renorm_d_max, minimum=0)

    def limits(self, step: Step) -> tuple[Tensor, Tensor]:
        """r_max and d_max, 0-d."""
        updates = self.completed_updates(step.state).to(step.batch.moment.dtype)
        since = updates / max(self.renorm_updates, 1) - 1 / 8
        r_max = self.renorm_r_max
        d_max = self.renorm_d_max
        return (since * ((r_max - 1) / (7 / 8)) + 1).clamp(1, r_max), (
            since * (d_max / (4 / 8))
        ).clamp(0, d_max)

    def training_affine(self, step: Step) -> tuple[Tensor, Tensor]:
        batch = step.batch
        r_max, d_max = self.limits(step)
        sigma = (step.state["running_var"].to(batch.moment.dtype) + self.eps).sqrt()
        step.sigma = (batch.moment + self.eps).sqrt()
        step.r = (step.sigma / sigma).clamp(1 / r_max, r_max)
        step.d = ((batch.mean - step.state["running_mean"]) / sigma).clamp(-d_max, d_max)
        weight = step.times_weight(step.r)
        bias = step.times_weight(step.d)
        if step.bias is not None:
            bias = step.bias + bias
        return weight, bias

    def backward_pass(self, step: Step) -> tuple[Tensor, Tensor]:
        dx, (products, sums) = self.exact_gradient(step, step.times_weight(step.r))
        return dx, torch.stack([step.r * products + step.d * sums, sums])

    def update(self, step: Step, state: dict[str, Tensor]) -> None:
        mean = state["running_mean"]
        share = 1 - self.alpha_fwd
        sigma = (state["running_var"] + self.eps).sqrt()
        new = {
            "running_mean": mean + share * (step.batch.mean - mean),
            "running_var": (sigma + share * (step.sigma - sigma)).square() - self.eps,
        }
        self.move(step, state, new)
