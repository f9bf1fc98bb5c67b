"""PN as the code released with the paper computes it."""

import torch
from torch import Tensor

from pn_fairseq.norms.core.base import COUNT, RunningNorm
from pn_fairseq.norms.core.step import Step
from pn_fairseq.norms.power import PowerNorm


class PowerNormRelease(PowerNorm):
    r"""Power normalization as in the authors' released code, which gave the published 35.87 BLEU on
    IWSLT14 De-En.

    The released code differs from Algorithm 2 of the paper, which
    :class:`~pn_fairseq.norms.PowerNorm` computes. In the notation there, with M the real tokens, A
    all T*B positions, padding included, and W the length of the psi warm-up, training forward
    number t computes

    .. math::
        \hat x &= x / D_t, \qquad y = \gamma \hat x + \beta, \qquad
        D_t = \sqrt{(t \le W \,?\, \psi_B^2 : \psi_{t-1}^2) + \epsilon}, \qquad
        \psi_B^2 = \mathrm{mean}_M(x^2) \\
        \tilde\psi^2 &= t < W \,?\, \psi_{t-1}^2 + (\psi_B^2 - \psi_{t-1}^2) / t \,:\, \psi_{t-1}^2,
        \qquad
        \psi_t^2 = \alpha_\mathrm{fwd} \tilde\psi^2 + (1 - \alpha_\mathrm{fwd}) \psi_B^2 \\
        \mathrm{d}x &= (\gamma\,\mathrm{d}y - \nu_{t-1} \hat x) / \sqrt{\psi_B^2 + \epsilon} \\
        \nu_t &= \nu_{t-1} (1 - (1 - \alpha_\mathrm{bwd})\, \mathrm{mean}_A(\hat x^2))
        + (1 - \alpha_\mathrm{bwd})\, \mathrm{mean}_A(\gamma\,\mathrm{d}y\,\hat x)

    Differences from the paper, in the order in which they are likely to be noticed:

    (a) The gradient is divided by :math:`\sqrt{\psi_B^2 + \epsilon}`, also after the warm-up, where
        the paper divides it by :math:`\sqrt{\psi_{t-1}^2 + \epsilon}`, as the forward pass does.
    (b) Within the warm-up :math:`\psi^2` takes the cumulative mean *and then also* the exponential
        step, so a batch weighs :math:`1 - \alpha_\mathrm{fwd}(1 - 1/t)` instead of :math:`1/t`: a
        recent batch counts much more than an old one. The cumulative mean ends one forward before
        the normalization with :math:`\psi_B` does.
    (c) The means behind :math:`\nu` are over A and not M, and :math:`\nu \hat x` is also subtracted
        at padding. The amount of padding in a batch therefore influences training.
        :math:`\psi_B^2` stays over M.
    (d) There is no :math:`\max(0, \cdot)`: :math:`\nu` diverges when
        :math:`\mathrm{mean}_A(\hat x^2)` stays above :math:`2 / (1 - \alpha_\mathrm{bwd})`. The
        released code stores ``ema_gz`` = :math:`\nu / (1 - \alpha_\mathrm{bwd})`; the buffer here
        is :math:`\nu`, for the same recursion.
    (e) The warm-up counts training forwards, not optimizer updates: gradient accumulation shortens
        it.
    (f) In a transformer, the norm after the last encoder layer has its own warm-up of 1,000
        forwards, which the model passes as ``psi_warmup_updates``.

    Evaluation is the paper's, :math:`y = \gamma x / \sqrt{\psi^2 + \epsilon} + \beta`.

    One difference from the released code remains: its group scaling uses a fixed epsilon of 1e-5,
    even in a norm with another ``eps``. Here layer-scale uses ``eps``, as in all norms: with m the
    mean square of a token's group, its scaled activations are
    :math:`\sqrt{(m + 10^{-5}) / (m + \epsilon)}` times the released ones. With the default ``eps``,
    1e-5, they are equal.

    The released code does not handle faults. This module keeps the rules of
    :class:`~pn_fairseq.norms.core.base.RunningNorm`, which change no result of a training run
    without faults. Since padding enters the means of (c), a number at padding that is not finite
    also counts as a fault.

    Args:
        psi_warmup_updates: length W of the warm-up in training forwards; :meth:`set_num_updates`
            does not change it.
        sync, process_group: see :class:`~pn_fairseq.norms.core.base.RunningNorm`. Every forward
            waits for the other ranks, because its backward needs :math:`\psi_B`.
        others: see :class:`PowerNorm`.

    Buffers: ``running_psi2`` (:math:`\psi^2`, initially 1) and ``nu`` (initially 0), (C,) float32,
    and ``num_batches_tracked``, int64.
    """

    #: ``moment``, ``positions``: mean of h^2 over all positions, and their number. ``divisor2``:
    #: psi^2 in dx.
    keeps = ("psi2", "moment", "positions", "divisor2")
    reads = ("running_psi2", "nu", COUNT)
    reports = (*RunningNorm.reports, "gamma_max")

    def _warm_up(self, warming: bool) -> None:
        pass  # the state determines whether the warm-up is on: (e)

    def set_num_updates(self, num_updates: int | None) -> None:
        RunningNorm.set_num_updates(self, num_updates)  # (e)

    def forward_pass(self, step: Step) -> Tensor:
        step.padding_counts = True
        over_all = step.moments()
        step.padding_counts = False
        step.moment = over_all.moment
        step.positions = over_all.count.clamp(min=1.0)
        batch = step.moments()  # also step.batch, which enters the running psi^2: (c)
        psi2 = step.state["running_psi2"].to(batch.moment.dtype)
        some = batch.count > 0  # without a real token there is no psi_B
        warming_up = some & (step.state[COUNT] < self.psi_warmup_updates)
        step.psi2 = torch.where(warming_up, batch.moment, psi2)
        step.divisor2 = torch.where(some, batch.moment, psi2)
        return step.normalize(step.psi2)

    def backward_pass(self, step: Step) -> tuple[Tensor, Tensor]:
        ratio = torch.sqrt((step.psi2 + self.eps) / (step.divisor2 + self.eps))  # (a)
        weight = step.times_weight(ratio)
        step.padding_counts = True  # (c)
        dx, parameters = step.gradient(
            step.psi2, nu=ratio * step.state["nu"], weight=weight, sums=True
        )
        step.products = step.products / ratio
        return dx, parameters

    def update(self, step: Step, state: dict[str, Tensor]) -> None:
        gamma = step.moment / (step.psi2 + self.eps)
        if self.collecting:
            self.note("gamma_max", gamma.max())
        number = (state[COUNT] + 1).to(step.batch.moment.dtype)
        # (b): both steps of a batch combined.
        share = torch.where(
            number < self.psi_warmup_updates,
            1.0 - self.alpha_fwd * (1.0 - 1.0 / number),
            1.0 - self.alpha_fwd,
        )
        rate = 1.0 - self.alpha_bwd
        psi2 = state["running_psi2"]
        nu = state["nu"]
        new = {
            "running_psi2": psi2 + share * (step.batch.moment - psi2),
            # (d)
            "nu": nu * (1.0 - rate * gamma) + rate * step.products[0] / step.positions,
        }
        self.move(step, state, new)
