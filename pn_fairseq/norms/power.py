"""PN: power normalization with a running statistic forward and a running correction backward."""

from dataclasses import dataclass
from typing import Optional

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from pn_fairseq import kernels
from pn_fairseq.kernels import reference
from pn_fairseq.norms.base import psi_distance
from pn_fairseq.norms.checks import check_alpha
from pn_fairseq.norms.pending import Step, assign
from pn_fairseq.norms.psi_warmup import PsiWarmup
from pn_fairseq.norms.whole_step import KernelStep, WholeStep, WholeStepNorm

#: More steps than any training has.
ALWAYS = 2**62


@dataclass(eq=False)
class PowerStep(KernelStep):
    """A step of PN by one kernel; ``eps`` is that of the norm's forward pass."""

    eps: float = 0.0

    def statistics(self) -> tuple[None, Tensor]:
        return None, self.vectors[reference.PSI2_USED]

    def _unfold_vectors(self) -> None:
        self.key, psi2, nu, before, batch = self.vectors.unbind()
        self.used = {
            "psi2": psi2,
            "nu": nu,
            "gamma_moment": batch / (psi2 + self.eps),
            "positions": self.count.to(batch.dtype),
        }
        self.batch = {"running_psi2": batch.to(torch.float32)}
        self.before["running_psi2"] = before.to(torch.float32)


class ApproximateWholeStep(WholeStep):
    """With a gradient that is no derivative and has none."""

    backward = staticmethod(once_differentiable(WholeStep.backward))


class PowerNorm(WholeStepNorm):
    r"""Power normalization, PN (Shen et al. 2020, Definition 3 and Algorithm 2).

    Training forward number t, per channel, with the mean taken over the real tokens M of the batch:

    .. math::
        \psi_B^2 &= \mathrm{mean}_M(x^2), \qquad
        \hat x = x / \sqrt{\psi_{t-1}^2 + \epsilon}, \qquad y = \gamma \hat x + \beta \\
        \psi_t^2 &= \alpha_\mathrm{fwd} \psi_{t-1}^2 + (1 - \alpha_\mathrm{fwd}) \psi_B^2

    The backward pass is not the derivative of this but the paper's approximation of PN-V's:

    .. math::
        \mathrm{d}x &= (\gamma\,\mathrm{d}y - \nu_{t-1} \hat x) / \sqrt{\psi_{t-1}^2 + \epsilon} \\
        \nu_t &= \nu_{t-1} \max(0, 1 - (1 - \alpha_\mathrm{bwd}) \mathrm{mean}_M(\hat x^2))
                 + (1 - \alpha_\mathrm{bwd})\, \mathrm{mean}_M(\gamma\,\mathrm{d}y\,\hat x)

    ``max(0, .)`` enforces the paper's Assumption 10; without it the recursion diverges as soon as a batch's mean
    square exceeds ``2 / (1 - alpha_bwd)`` times the running one. During the psi warm-up :math:`\psi_B` takes the
    place of :math:`\psi_{t-1}` as the divisor, and :math:`\psi_t^2` is the mean of the batches so far. In
    evaluation :math:`y = \gamma x / \sqrt{\psi^2 + \epsilon} + \beta`.

    Args:
        num_features: number of channels C.
        eps: added to the second moment before the root.
        alpha_fwd: decay of :math:`\psi^2`, in (0, 1).
        alpha_bwd: decay of :math:`\nu`, in (0, 1).
        affine: learn ``weight`` (gamma) and ``bias`` (beta), both (C,).
        layer_scale_groups: groups of the :class:`~pn_fairseq.norms.LayerScale` in front; 0 means none.
        psi_warmup_updates: length of the warm-up in optimizer updates, or in training forwards for a module that is
            never told the number of updates (:meth:`set_num_updates`).
        sync, process_group: see :class:`~pn_fairseq.norms.base.RunningNorm`. After the warm-up no step waits for
            another worker: the sums are on their way until the next look at the state.

    Buffers: ``running_psi2`` (:math:`\psi^2`, initially 1) and ``nu`` (initially 0), (C,) float32, and
    ``num_batches_tracked``, int64.

    Shapes: see :meth:`forward`.

    Raises:
        ValueError: an argument or an input does not fit; the message holds its value.
    """

    layer_scale_per_head = True
    backward_statistics = ("nu",)
    sync_by_default = False  # as in the paper, Section 5
    whole_step = ApproximateWholeStep

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
        # None: no trainer has spoken, the module's own counter decides. Kept as a flag and not as the number of
        # updates, which would make torch.compile specialize on every update.
        self._warming_up: bool | None = None

    def set_num_updates(self, num_updates: int) -> None:
        super().set_num_updates(num_updates)
        self._warming_up = self.psi_warmup.active(num_updates)

    def _is_warming_up(self) -> bool | Tensor:
        if self.recalibrating:
            return True
        if self._warming_up is not None:
            return self._warming_up
        if self.psi_warmup.updates == 0:
            return False
        active = self.psi_warmup.active(self.num_batches_tracked)
        # Whether to wait for the other workers is for the host to decide; one worker need not read its counter.
        return bool(active) if self.synchronises() else active

    def _warmup_in_steps(self) -> int:
        """The number of steps below which the warm-up is on, for a kernel that looks at the counter itself."""
        if self._warming_up is None and not self.recalibrating:
            return self.psi_warmup.updates
        return ALWAYS if self.recalibrating or self._warming_up else 0

    def _key(self, x: Tensor, padding_mask: Tensor | None) -> Tensor:
        return self._moments(x, padding_mask)[2][0]

    def _train_in_parts(self, x: Tensor, padding_mask: Tensor | None) -> Tensor:
        padding_mask = self._mask(x, padding_mask)
        inv_rms, _, squares, count = self._moments(x, padding_mask)
        local = torch.cat([squares[0], count[None]])
        step = self._recomputed(lambda: local[:-1]) or self._new_step(local)
        step.unfold()
        return self._normalize(x, padding_mask, inv_rms, step.used["psi2"], step)

    def _normalize(
        self, x: Tensor, padding_mask: Tensor | None, inv_rms: Tensor, divisor2: Tensor, step: Step
    ) -> Tensor:
        """Normalize by the psi of ``step`` and divide the gradient by sqrt(``divisor2`` + eps), (C,).

        Positions that are padding get no part of nu and give none.
        """
        return _PowerNormFunction.apply(
            x,
            self.weight,
            self.bias,
            padding_mask,
            inv_rms,
            step.used["psi2"],
            divisor2,
            step.used["nu"],
            self.layer_scale.groups,
            self.eps,
            lambda total: self._finish(step, total),
        )

    @torch.no_grad()
    def _new_step(self, local: Tensor) -> Step:
        """Begin a step, given sum(x^2) and the number of real tokens on this worker, (C + 1,)."""
        warming_up = self._is_warming_up()
        psi2 = self.running_psi2.to(local.dtype, copy=True)
        total = None
        if warming_up is not False:  # the batch's own psi is needed now
            total = self.sum_over_workers(local)
            psi2 = torch.where((total[-1] > 0) & warming_up, self._mean(total), psi2)
        step = self._begin(local[:-1], psi2=psi2, nu=self.nu.to(local.dtype, copy=True))

        def count_in(total: Tensor) -> None:
            def weight(number: Tensor) -> float | Tensor:
                return self.psi_warmup.weight(warming_up, number, self.alpha_fwd)

            psi2_batch = self._mean(total)
            step.used["gamma_moment"] = psi2_batch / (step.used["psi2"] + self.eps)
            step.used["positions"] = total[-1]
            self._count_in(step, {"running_psi2": psi2_batch}, total[-1], weight)

        if total is not None:
            count_in(total)
        else:
            self._when_summed(local, count_in)
        return step

    @staticmethod
    def _mean(total: Tensor) -> Tensor:
        return total[:-1] / total[-1].clamp(min=1.0)

    def _forward_kernel(self, x, padding_mask, weight, bias, update):
        return kernels.power_forward(
            x,
            padding_mask,
            weight,
            bias,
            self.running_psi2,
            self.nu,
            self.num_batches_tracked,
            self.layer_scale.groups,
            self.eps,
            self.alpha_fwd,
            self._warmup_in_steps(),
            update,
        )

    def _new_kernel_step(self, vectors: Tensor, tally: Tensor, unknown: bool) -> "PowerStep":
        return PowerStep(None, None, unknown, unknown, vectors=vectors, tally=tally, alpha=self.alpha_fwd, eps=self.eps)

    def _backward_kernel(self, dy, x, padding_mask, weight, inv_rms, step, update):
        return kernels.power_backward(
            dy,
            x,
            padding_mask,
            weight,
            inv_rms,
            step.vectors,
            self.running_psi2,
            self.nu,
            self.num_batches_tracked,
            step.tally,
            self.layer_scale.groups,
            self.eps,
            self.alpha_bwd,
            update,
        )

    def _finish(self, step: Step, lambda_total: Tensor) -> None:
        """End a step, given the sum of dx_hat x_hat on this worker, (C,)."""
        if self.begin_backward(step):
            self._when_summed(lambda_total, lambda total: self._end(step, total))

    @torch.no_grad()
    def _end(self, step: Step, lambda_total: Tensor) -> None:
        """Line 4 of the backward pass, with Gamma = mean(x_hat^2) and Lambda = mean(dx_hat x_hat), both (C,)."""
        step.unfold()
        gamma_moment = step.used["gamma_moment"]
        lambda_moment = lambda_total / step.used["positions"].clamp(min=1.0)
        finite = gamma_moment.isfinite().all() & lambda_moment.isfinite().all()
        rate = 1.0 - self.alpha_bwd
        moved = self.nu * self._guard(1.0 - rate * gamma_moment, finite) + rate * lambda_moment
        if self.collecting:
            self._collected["gamma_max"] = gamma_moment.max()
            self._collected["nu_rms"] = moved.square().mean().sqrt()
        self.settle(step, finite)
        assign(self.nu, torch.where(finite & (step.count > 0), moved, self.nu.to(moved.dtype)))

    def _guard(self, decay: Tensor, finite: Tensor) -> Tensor:
        """``max(0, decay)``, (C,); ``finite`` (0-d) tells whether the step counts."""
        if self.collecting:
            self._add("guarded_steps", finite & (decay < 0).any())
        return decay.clamp(min=0.0)

    def _note_step(self, step: Step, finite: Tensor) -> None:
        super()._note_step(step, finite)
        self._collected["psi_distance"] = psi_distance(step.batch["running_psi2"], self.running_psi2)

    def diagnostics(self) -> dict[str, Tensor]:
        """What was seen while :attr:`collecting` was set, by name, each 0-d; empty if it was not.

        Of the last batch: ``psi_distance``, the mean over channels of abs(log(psi_B / psi)); ``nu_rms``, the root mean
        square of nu; ``gamma_max``, the largest mean(x_hat^2) of a channel. Since collecting began:
        ``guarded_steps``, how often ``max(0, .)`` acted, and ``nonfinite_steps``, how often a statistic or gradient
        that was not finite kept a step out of the state.
        """
        return super().diagnostics()

    def evaluation_statistics(self) -> tuple[Optional[Tensor], Tensor]:  # noqa: UP045 (TorchScript)
        return None, self.running_psi2

    def extra_repr(self) -> str:
        return (
            f"{super().extra_repr()}, alpha_fwd={self.alpha_fwd}, alpha_bwd={self.alpha_bwd}, "
            f"psi_warmup_updates={self.psi_warmup.updates}"
        )


class _PowerNormFunction(torch.autograd.Function):
    """y = weight * h / sqrt(psi2 + eps) + bias, with PN's approximate gradient, divided by sqrt(divisor2 + eps).

    ``x`` (T, B, C) or (N, C), which ``inv_rms`` makes h; ``padding_mask`` or None; ``psi2``, ``divisor2`` and ``nu``
    (C,); ``finish`` is handed the sum of dx_hat x_hat over what is not padding, (C,), once the backward pass has it.
    """

    @staticmethod
    def forward(x, weight, bias, padding_mask, inv_rms, psi2, divisor2, nu, groups, eps, finish):
        return kernels.normalize(x, weight, bias, None, psi2, inv_rms, groups, eps)[0]

    @staticmethod
    def setup_context(ctx, inputs, output):
        x, weight, _, *tensors, ctx.groups, ctx.eps, ctx.finish = inputs
        ctx.save_for_backward(x, weight, *tensors)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        x, weight, padding_mask, inv_rms, psi2, divisor2, nu = ctx.saved_tensors
        root, divisor = torch.sqrt(psi2 + ctx.eps), torch.sqrt(divisor2 + ctx.eps)
        gain = torch.ones_like(root) if weight is None else weight.to(root.dtype)
        slope = nu / (root * divisor)
        dx, sums = kernels.gradient(dy, x, padding_mask, gain / divisor, slope, None, None, inv_rms, ctx.groups, True)
        ctx.finish(gain / root * sums[0, 0])
        dweight = dbias = None
        if weight is not None:
            dweight, dbias = reference.parameter_gradients(dx, weight, sums, root)
        return dx, dweight, dbias, *(None,) * 8
