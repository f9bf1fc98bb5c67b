"""PN as the code released with the paper computes it."""

import torch
from torch import Tensor

from pn_fairseq.norms.base import RunningNorm, psi_distance
from pn_fairseq.norms.checks import check_alpha
from pn_fairseq.norms.pending import Step, assign
from pn_fairseq.norms.psi_warmup import PsiWarmup
from pn_fairseq.norms.workers import sum_now


class PowerNormRelease(RunningNorm):
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

    The released code has no rules about faults. This module keeps those of :class:`RunningNorm`, which change no
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

    layer_scale_per_head = True
    last_norm_warmup_updates = 1000
    backward_statistics = ("nu",)
    sync_by_default = False

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        alpha_fwd: float = 0.9,
        alpha_bwd: float = 0.9,
        affine: bool = True,
        layer_scale_groups: int = 0,
        psi_warmup_updates: int = 0,
        sync: bool = False,
        process_group=None,
    ):
        super().__init__(num_features, eps, affine, layer_scale_groups, sync, process_group, running_psi2=1.0, nu=0.0)
        self.alpha_fwd = check_alpha("alpha_fwd", alpha_fwd)
        self.alpha_bwd = check_alpha("alpha_bwd", alpha_bwd)
        self.psi_warmup = PsiWarmup(psi_warmup_updates)

    @torch.jit.unused
    def _train(self, h: Tensor, padding_mask: Tensor | None) -> Tensor:
        padding, count = self._real_tokens(h, padding_mask)
        squares = h.detach().square()
        over_real = self._sum_over_real(squares, padding)
        step = self._recomputed(over_real)
        if step is None:
            over_all = over_real if padding is None else self._sum_over_real(squares, None)
            step = self._new_step(over_real, over_all, count, h.numel() // self.num_features)
        return _PowerNormReleaseFunction.apply(
            h,
            self.weight,
            self.bias,
            step.used["denominator"],
            step.used["divisor"],
            step.used["nu"],
            lambda total: self._finish(step, total),
        )

    @torch.no_grad()
    def _new_step(self, over_real: Tensor, over_all: Tensor, count: Tensor, positions: int) -> Step:
        """Begin a step, given sum(x^2) over the real tokens and over all positions, (C,), and the numbers of both."""
        total = torch.cat([over_real, over_all, count[None], torch.full_like(count[None], positions)])
        if self.synchronises():
            total = sum_now(total, self.process_group)
        sum_real, sum_all, numbers = total.split((self.num_features, self.num_features, 2))
        count, positions = numbers
        psi2_batch = sum_real / count.clamp(min=1.0)

        batch_root = (psi2_batch + self.eps).sqrt()
        running_root = (self.running_psi2.to(total.dtype) + self.eps).sqrt()
        warming_up = self.recalibrating or self.psi_warmup.active(self.num_batches_tracked)
        some_token = count > 0
        step = self._begin(
            over_real,
            denominator=torch.where(some_token & warming_up, batch_root, running_root),
            # Without a real token there is no psi_B, and 1 / sqrt(eps) would blow the gradient up.
            divisor=torch.where(some_token, batch_root, running_root),
            nu=self.nu.to(total.dtype, copy=True),
        )
        step.used["positions"] = positions
        step.used["gamma_moment"] = sum_all / positions.clamp(min=1.0) / step.used["denominator"].square()
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

    def _finish(self, step: Step, lambda_total: Tensor) -> None:
        """End a step, given the sum of dx_hat x_hat over all positions of this worker, (C,)."""
        if self._begin_backward(step):
            self._when_summed(lambda_total, lambda total: self._update_nu(step, total))

    @torch.no_grad()
    def _update_nu(self, step: Step, lambda_total: Tensor) -> None:
        gamma_moment = step.used["gamma_moment"]
        lambda_moment = lambda_total / step.used["positions"].clamp(min=1.0)
        finite = gamma_moment.isfinite().all() & lambda_moment.isfinite().all()
        rate = 1.0 - self.alpha_bwd
        moved = self.nu * (1.0 - rate * gamma_moment) + rate * lambda_moment
        if self.collecting:
            self._collected["gamma_max"] = gamma_moment.max()
            self._collected["nu_rms"] = moved.square().mean().sqrt()
        self._settle(step, finite)
        assign(self.nu, torch.where(finite & (step.count > 0), moved, self.nu.to(moved.dtype)))

    def _note_step(self, step: Step, finite: Tensor) -> None:
        super()._note_step(step, finite)
        self._collected["psi_distance"] = psi_distance(step.batch["running_psi2"], self.running_psi2)

    def diagnostics(self) -> dict[str, Tensor]:
        """What was seen while :attr:`collecting` was set, by name, each 0-d; empty if it was not.

        As for :class:`~pn_fairseq.norms.PowerNorm`, without ``guarded_steps``: there is no guard.
        """
        return super().diagnostics()

    def _evaluate(self, h: Tensor) -> Tensor:
        return self._affine(h * torch.rsqrt(self.running_psi2.to(h.dtype) + self.eps))

    def extra_repr(self) -> str:
        return (
            f"{super().extra_repr()}, alpha_fwd={self.alpha_fwd}, alpha_bwd={self.alpha_bwd}, "
            f"psi_warmup_updates={self.psi_warmup.updates}"
        )


class _PowerNormReleaseFunction(torch.autograd.Function):
    """y = weight * x / denominator + bias, with the gradient of the released code.

    ``x`` (T, B, C) or (N, C); ``weight`` and ``bias`` (C,) or None; ``denominator``, ``divisor`` (of the gradient) and
    ``nu`` (C,); ``finish`` is handed the sum of dx_hat x_hat over all positions, (C,), once the backward pass has it.
    """

    @staticmethod
    def forward(x, weight, bias, denominator, divisor, nu, finish):
        normalized = x / denominator
        if weight is None:
            return normalized
        return torch.addcmul(bias.to(x.dtype), normalized, weight.to(x.dtype))

    @staticmethod
    def setup_context(ctx, inputs, output):
        x, weight, _, denominator, divisor, nu, finish = inputs
        ctx.save_for_backward(x, weight, denominator, divisor, nu)
        ctx.finish = finish

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dy):
        x, weight, denominator, divisor, nu = ctx.saved_tensors
        normalized = x / denominator
        dnormalized = dy if weight is None else dy * weight.to(dy.dtype)
        tokens = tuple(range(x.dim() - 1))
        ctx.finish((dnormalized * normalized).sum(tokens))
        dx = (dnormalized - nu * normalized) / divisor
        dweight = dbias = None
        if weight is not None:
            dweight = (dy * normalized).sum(tokens).to(weight.dtype)
            dbias = dy.sum(tokens).to(weight.dtype)
        return dx, dweight, dbias, None, None, None, None
