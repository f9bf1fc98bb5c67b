"""PN as the code released with the paper computes it."""

import torch
from torch import Tensor

from pn_fairseq.norms.pending import Step
from pn_fairseq.norms.power import PowerNorm


class PowerNormRelease(PowerNorm):
    r"""Power normalization as in the authors' released code, which gave the published 35.87 BLEU on IWSLT14 De-En.

    The released code is not Algorithm 2 of the paper, which :class:`~pn_fairseq.norms.PowerNorm` is. In the notation
    there, with M the real tokens, A all T*B positions, padding included, and W the length of the psi warm-up, training
    forward number t computes

    .. math::
        \hat x &= x / D_t, \qquad y = \gamma \hat x + \beta, \qquad
        D_t = \sqrt{(t \le W \,?\, \psi_B^2 : \psi_{t-1}^2) + \epsilon}, \qquad \psi_B^2 = \mathrm{mean}_M(x^2) \\
        \tilde\psi^2 &= t < W \,?\, \psi_{t-1}^2 + (\psi_B^2 - \psi_{t-1}^2) / t \,:\, \psi_{t-1}^2, \qquad
        \psi_t^2 = \alpha_\mathrm{fwd} \tilde\psi^2 + (1 - \alpha_\mathrm{fwd}) \psi_B^2 \\
        \mathrm{d}x &= (\gamma\,\mathrm{d}y - \nu_{t-1} \hat x) / \sqrt{\psi_B^2 + \epsilon} \\
        \nu_t &= \nu_{t-1} (1 - (1 - \alpha_\mathrm{bwd})\, \mathrm{mean}_A(\hat x^2))
                 + (1 - \alpha_\mathrm{bwd})\, \mathrm{mean}_A(\gamma\,\mathrm{d}y\,\hat x)

    What differs from the paper, in the order in which it is likely to be noticed:

    (a) The gradient is divided by :math:`\sqrt{\psi_B^2 + \epsilon}`, also after the warm-up, where the paper divides
        it by :math:`\sqrt{\psi_{t-1}^2 + \epsilon}`, as the forward pass does.
    (b) Within the warm-up :math:`\psi^2` takes the cumulative mean *and then also* the exponential step, so a batch
        weighs :math:`1 - \alpha_\mathrm{fwd}(1 - 1/t)` instead of :math:`1/t`: a recent batch counts much more than
        an old one. The cumulative mean ends one forward before the normalization with :math:`\psi_B` does.
    (c) The means behind :math:`\nu` are over A and not M, and :math:`\nu \hat x` is subtracted at padding, too. How
        much padding a batch has therefore has an influence on training. :math:`\psi_B^2` stays over M.
    (d) There is no :math:`\max(0, \cdot)`: :math:`\nu` diverges when :math:`\mathrm{mean}_A(\hat x^2)` stays above
        :math:`2 / (1 - \alpha_\mathrm{bwd})`. The released code stores ``ema_gz`` =
        :math:`\nu / (1 - \alpha_\mathrm{bwd})`; the buffer here is :math:`\nu`, for the same recursion.
    (e) The warm-up counts training forwards, not optimizer updates: gradient accumulation shortens it.
    (f) In a transformer, the norm after the last encoder layer has a warm-up of its own
        (:attr:`last_norm_warmup_updates`). That is for who builds the model to honour, not for this module.

    Evaluation is the paper's, :math:`y = \gamma x / \sqrt{\psi^2 + \epsilon} + \beta`.

    The released code has no rules about faults. This module keeps those of :class:`PowerNorm`, which change no
    result of a training without faults: float32 state, one change of it per step under activation checkpointing, each
    backward with the values of its own forward, and none for a batch without a real token or whose statistics or
    gradient are not finite; since padding enters the means, that includes what is not finite at padding.

    Args:
        num_features: number of channels C.
        eps: added to the second moment before the root.
        alpha_fwd: decay of :math:`\psi^2`, in (0, 1).
        alpha_bwd: decay of :math:`\nu`, in (0, 1).
        affine: learn ``weight`` (gamma) and ``bias`` (beta), both (C,).
        layer_scale_groups: groups of the :class:`~pn_fairseq.norms.LayerScale` in front; 0 means none.
        psi_warmup_updates: length W of the warm-up in training forwards, whatever :meth:`set_num_updates` is told.
        sync, process_group: see :class:`~pn_fairseq.norms.base.RunningNorm`. Every forward waits for the other
            workers, because its backward needs :math:`\psi_B`.

    Buffers: ``running_psi2`` (:math:`\psi^2`, initially 1) and ``nu`` (initially 0), (C,) float32, and
    ``num_batches_tracked``, int64.

    Shapes: see :meth:`forward`.

    Raises:
        ValueError: an argument or an input does not fit; the message holds its value.
    """

    last_norm_warmup_updates = 1000

    def _needs_parts(self) -> bool:
        return True

    def _train_in_parts(self, x: Tensor, padding_mask: Tensor | None) -> Tensor:
        inv_rms, _, squares, count = self._moments(x, self._mask(x, padding_mask))
        over_real = squares[0]
        step = self._recomputed(lambda: over_real)
        if step is None:
            over_all, positions = squares.sum(0), x.numel() // self.num_features
            if self.ignoring:
                over_all, positions = torch.zeros_like(over_all), 0
            step = self._new_step(over_real, over_all, count, positions)
        # (c): as if nothing were padding.
        return self._normalize(x, None, inv_rms, step.used["divisor2"], step)

    @torch.no_grad()
    def _new_step(self, over_real: Tensor, over_all: Tensor, count: Tensor, positions: int) -> Step:
        """Begin a step, given sum(x^2) over the real tokens and over all positions, (C,), and the numbers of both."""
        total = torch.cat([over_real, over_all, count[None], torch.full_like(count[None], positions)])
        sum_real, sum_all, numbers = self.sum_over_workers(total).split((self.num_features, self.num_features, 2))
        count, positions = numbers
        psi2_batch = sum_real / count.clamp(min=1.0)
        running = self.running_psi2.to(total.dtype)
        warming_up = self.recalibrating or self.psi_warmup.active(self.num_batches_tracked)
        some_token = count > 0
        step = self._begin(
            over_real,
            psi2=torch.where(some_token & warming_up, psi2_batch, running),
            # Without a real token there is no psi_B, and 1 / sqrt(eps) would blow the gradient up.
            divisor2=torch.where(some_token, psi2_batch, running),
            nu=self.nu.to(total.dtype, copy=True),
        )
        step.used["positions"] = positions
        step.used["gamma_moment"] = sum_all / positions.clamp(min=1.0) / (step.used["psi2"] + self.eps)
        self._count_in(step, {"running_psi2": psi2_batch}, count, self._weight_of_batch())
        return step

    def _weight_of_batch(self):
        """Number of a step -> weight of its batch in psi^2: both steps of (b) in one."""
        if self.recalibrating:
            return self._weight(self.alpha_fwd)

        def weight(number: Tensor) -> Tensor:
            cumulative = self.psi_warmup.active(number)  # one forward less than the normalization: t < W, not t <= W
            return torch.where(cumulative, 1.0 - self.alpha_fwd * (1.0 - 1.0 / number), 1.0 - self.alpha_fwd)

        return weight

    def _guard(self, decay: Tensor, finite: Tensor) -> Tensor:
        return decay  # (d)
