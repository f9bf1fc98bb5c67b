"""Normalization by the batch's own statistics with the exact gradient: what PN-V and BN have in common."""

from dataclasses import dataclass

import torch
from torch import Tensor

from pn_fairseq import kernels
from pn_fairseq.kernels import reference
from pn_fairseq.norms.checks import check_alpha
from pn_fairseq.norms.pending import Step
from pn_fairseq.norms.whole_step import KernelStep, WholeStepNorm
from pn_fairseq.norms.workers import differentiable_sum


@dataclass(eq=False)
class BatchStep(KernelStep):
    """A step of PN-V or BN by one kernel; ``moment_name`` and ``mean_name`` as in :class:`ExactNorm`."""

    moment_name: str = ""
    mean_name: str | None = None

    def statistics(self) -> tuple[Tensor | None, Tensor]:
        return None if self.mean_name is None else self.vectors[reference.MEAN], self.vectors[reference.MOMENT]

    def _unfold_vectors(self) -> None:
        mean, moment = self.statistics()
        count = self.count.to(moment.dtype)
        before = {self.moment_name: self.vectors[reference.MOMENT_BEFORE]}
        if mean is None:
            self.key, batch = moment * count, {self.moment_name: moment}
        else:
            self.key, batch = mean * count, {self.moment_name: reference.unbiased(moment, count), self.mean_name: mean}
            before[self.mean_name] = self.vectors[reference.MEAN_BEFORE]
        self.used = {}
        self.batch = {name: value.to(torch.float32) for name, value in batch.items()}
        self.before |= {name: value.to(torch.float32) for name, value in before.items()}


class ExactNorm(WholeStepNorm):
    r"""y = weight (h - mean) / sqrt(moment + eps) + bias, where the statistics are those of the real tokens of h.

    With :math:`\hat x` the normalized activations and D the root, real tokens get the gradient

    .. math:: \mathrm{d}h = \gamma / D\,(\mathrm{d}y - \hat x\,\mathrm{mean}_M(\mathrm{d}y\,\hat x)
        - 1_\mathrm{BN}\,\mathrm{mean}_M(\mathrm{d}y))

    (Shen et al. 2020, Eq. 6 and Eq. 3) and padding :math:`\gamma\,\mathrm{d}y / D`: it is divided by the statistics and
    takes no part in their gradient.

    Args:
        alpha: decay of the running statistics, in (0, 1).
        others: see :class:`~pn_fairseq.norms.base.RunningNorm`.
    """

    #: Names of the running second moment and, in BN, of the running mean, about which the moment is.
    moment_name: str
    mean_name: str | None = None

    def __init__(
        self,
        num_features: int,
        eps: float,
        alpha: float,
        affine: bool,
        layer_scale_groups: int,
        sync: bool,
        process_group,
        **initial: float,
    ):
        super().__init__(num_features, eps, affine, layer_scale_groups, sync, process_group, **initial)
        self.alpha = check_alpha("alpha", alpha)

    def _key(self, x: Tensor, padding_mask: Tensor | None) -> Tensor:
        _, mean, squares, count = self._moments(x, padding_mask, centered=self.mean_name is not None)
        return squares[0] if self.mean_name is None else mean * count

    def _running(self) -> tuple[Tensor | None, Tensor, Tensor]:
        """The state, as kernels take it."""
        mean = None if self.mean_name is None else self._buffers[self.mean_name]
        return mean, self._buffers[self.moment_name], self.num_batches_tracked

    def _forward_kernel(self, x, padding_mask, weight, bias, update):
        return kernels.batch_forward(
            x,
            padding_mask,
            weight,
            bias,
            *self._running(),
            self.layer_scale.groups,
            self.eps,
            self.alpha,
            self.recalibrating,
            update,
        )

    def _new_kernel_step(self, vectors: Tensor, tally: Tensor, unknown: bool) -> BatchStep:
        names = {"moment_name": self.moment_name, "mean_name": self.mean_name}
        return BatchStep(None, None, unknown, unknown, vectors=vectors, tally=tally, alpha=self.alpha, **names)

    def _backward_kernel(self, dy, x, padding_mask, weight, inv_rms, step, update):
        return kernels.batch_backward(
            dy,
            x,
            padding_mask,
            weight,
            inv_rms,
            step.vectors,
            *self._running(),
            step.tally,
            self.layer_scale.groups,
            self.eps,
            update,
        )

    def _end(self, step: Step, sums: Tensor) -> None:
        # One gradient that is not finite, on any worker, makes the sums so.
        self.settle(step, sums.isfinite().all())

    def _normalize_exactly(
        self,
        x: Tensor,
        padding_mask: Tensor | None,
        mean: Tensor | None,
        moment: Tensor,
        count: Tensor,
        inv_rms: Tensor,
        step: Step,
    ) -> Tensor:
        """The result, given the statistics. The backward pass ends ``step``.

        Args:
            x: activations before layer-scale, which ``inv_rms`` makes h.
            mean, moment: statistics of the batch, (C,); ``mean`` is None for PN-V, whose moment is about 0.
            count: number of real tokens, 0-d; over all workers, as are the statistics.
        """
        return _ExactGradient.apply(x, self.weight, self.bias, padding_mask, mean, moment, count, inv_rms, self, step)

    def differentiable_gradient(
        self,
        dy: Tensor,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        padding_mask: Tensor | None,
        needed: tuple[bool, ...],
    ) -> tuple[Tensor | None, ...]:
        """dx, d weight and d bias, those that are ``needed``, as functions that autograd can differentiate in turn."""
        y, inputs = self._formula(x, weight, bias, padding_mask), (x, weight, bias)
        wanted = [number for number in range(3) if needed[number]]
        found = torch.autograd.grad(y, [inputs[number] for number in wanted], dy, create_graph=True)
        gradients = dict(zip(wanted, found, strict=True))
        return tuple(gradients.get(number) for number in range(3))

    def _formula(self, x: Tensor, weight: Tensor | None, bias: Tensor | None, padding_mask: Tensor | None) -> Tensor:
        groups = self.layer_scale.groups
        h = reference.layer_scaled(x, reference.inverse_rms(x, groups, self.eps), groups)
        padding = torch.zeros_like(h[..., :1], dtype=torch.bool)
        if padding_mask is not None:
            padding = padding | padding_mask.transpose(0, -1).unsqueeze(-1)

        def mean_over_real(values: Tensor) -> Tensor:
            total = torch.cat([values.masked_fill(padding, 0.0).flatten(0, -2).sum(0), (~padding).sum()[None]])
            if self.synchronises():
                total = differentiable_sum(total, self.process_group)
            return total[:-1] / total[-1].clamp(min=1.0)

        mean = mean_over_real(h) if self.mean_name is not None else h.new_zeros(h.size(-1))
        root = torch.sqrt(mean_over_real((h - mean).square()) + self.eps)
        y = torch.where(padding, (h - mean.detach()) / root.detach(), (h - mean) / root)
        if weight is not None:
            y = y * weight.to(y.dtype) + bias.to(y.dtype)
        return y.to(x.dtype)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, alpha={self.alpha}"


class _ExactGradient(torch.autograd.Function):
    @staticmethod
    def forward(x, weight, bias, padding_mask, mean, moment, count, inv_rms, norm, step):
        return kernels.normalize(x, weight, bias, mean, moment, inv_rms, norm.layer_scale.groups, norm.eps)[0]

    @staticmethod
    def setup_context(ctx, inputs, output):
        *tensors, ctx.norm, ctx.step = inputs
        ctx.save_for_backward(*tensors)

    @staticmethod
    def backward(ctx, dy):
        x, weight, bias, padding_mask, mean, moment, count, inv_rms = ctx.saved_tensors
        norm, groups = ctx.norm, ctx.norm.layer_scale.groups
        nothing = (None,) * 7
        with torch.no_grad():
            local = kernels.gradient_sums(dy, x, padding_mask, mean, inv_rms, groups)
            total = norm.sum_over_workers(local[0])
            if norm.begin_backward(ctx.step):
                norm._end(ctx.step, total)
        if torch.is_grad_enabled():  # the gradient is to be differentiated in its turn
            found = norm.differentiable_gradient(dy, x, weight, bias, padding_mask, ctx.needs_input_grad)
            return *found, *nothing
        scale, slope, offset = reference.exact_gradient(weight, moment, total, count, norm.eps)
        offset = None if mean is None else offset
        dx, _ = kernels.gradient(dy, x, padding_mask, scale, slope, offset, mean, inv_rms, groups, False)
        dweight = dbias = None
        if weight is not None:
            dweight, dbias = reference.parameter_gradients(dx, weight, local, torch.sqrt(moment + norm.eps))
        return dx, dweight, dbias, *nothing
