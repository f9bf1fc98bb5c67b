"""Training steps that one kernel makes as a whole each way, where nothing has to happen in between."""

from dataclasses import dataclass

import torch
from torch import Tensor

from pn_fairseq import kernels
from pn_fairseq.norms.base import RunningNorm
from pn_fairseq.norms.pending import COUNT, Step, in_backward


@dataclass(eq=False)
class KernelStep(Step):
    """A step that one kernel has made as a whole: what that left, and what is needed to read it.

    Subclasses define what the rows of ``vectors`` are.

    Attributes:
        vectors, tally: see :mod:`pn_fairseq.kernels.reference`.
        alpha: decay of the running statistics in forward.
        unfolded: whether the attributes of :class:`Step` have been read from ``vectors`` and ``tally``.
        replayed: whether they have changed since, so that a kernel no longer knows.
    """

    vectors: Tensor | None = None
    tally: Tensor | None = None
    alpha: float = 0.0
    unfolded: bool = False
    replayed: bool = False

    def statistics(self) -> tuple[Tensor | None, Tensor]:
        """Mean (None for none) and second moment that the forward normalized by, both (C,)."""
        raise NotImplementedError

    def _unfold_vectors(self) -> None:
        """Set ``key``, ``used`` and ``batch`` and add to ``before`` what the rows of ``vectors`` are; count is set."""
        raise NotImplementedError

    def advance(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        self.replayed = True
        return super().advance(state)

    def unfold(self) -> None:
        if self.unfolded:
            return
        self.unfolded = True
        self.count, counted, cumulative, steps_before = self.tally.unbind()
        self.counted, self.before = counted.bool(), {COUNT: steps_before}
        cumulative, alpha = cumulative.bool(), self.alpha
        self.weight = lambda number: torch.where(cumulative, 1.0 / number, 1.0 - alpha)
        self._unfold_vectors()


class WholeStep(torch.autograd.Function):
    """A training step of ``norm`` on one worker in one kernel each way. ``step`` is what is recomputed, or None."""

    @staticmethod
    def forward(ctx, x, weight, bias, padding_mask, norm, step):
        y, inv_rms, ctx.step = norm.forward_at_once(x, weight, bias, padding_mask, step)
        ctx.norm = norm
        ctx.save_for_backward(x, weight, bias, padding_mask, inv_rms)
        return y

    @staticmethod
    def backward(ctx, dy):
        x, weight, bias, padding_mask, inv_rms = ctx.saved_tensors
        with torch.no_grad():
            dx, dweight, dbias = ctx.norm.backward_at_once(dy, x, weight, padding_mask, inv_rms, ctx.step)
        if torch.is_grad_enabled():  # the gradient is to be differentiated in its turn
            found = ctx.norm.differentiable_gradient(dy, x, weight, bias, padding_mask, ctx.needs_input_grad)
            return *found, None, None, None
        if weight is None:
            dweight = dbias = None
        return dx, dweight, dbias, None, None, None


class WholeStepNorm(RunningNorm):
    """A norm with a kernel for a whole training step, and another way to make one in parts.

    The parts are for workers that share statistics, for :attr:`collecting` and for the transforms of ``torch.func``:
    there something has to happen, or to be seen, between the sums over tokens and what is made of them.

    Subclasses define the methods below that raise ``NotImplementedError``, and ``differentiable_gradient`` if
    :attr:`whole_step` is :class:`WholeStep` itself.
    """

    #: The autograd function of the whole step.
    whole_step = WholeStep

    @torch.jit.unused
    def _train(self, x: Tensor, padding_mask: Tensor | None) -> Tensor:
        if self._needs_parts():
            return self._train_in_parts(x, padding_mask)
        step = self._recomputed(lambda: self._key(x, padding_mask))
        if step is not None and not isinstance(step, KernelStep):
            return self._train_in_parts(x, padding_mask)
        return self.whole_step.apply(x, self.weight, self.bias, padding_mask, self, step)

    def _needs_parts(self) -> bool:
        """Whether something has to happen between the parts of a step, which one kernel would do at once."""
        return self.collecting or self.synchronises() or torch._C._are_functorch_transforms_active()

    def _train_in_parts(self, x: Tensor, padding_mask: Tensor | None) -> Tensor:
        raise NotImplementedError

    def _key(self, x: Tensor, padding_mask: Tensor | None) -> Tensor:
        """The statistic of the batch by which a recomputation finds its step, (C,)."""
        raise NotImplementedError

    def _forward_kernel(
        self, x: Tensor, padding_mask: Tensor | None, weight: Tensor | None, bias: Tensor | None, update: bool
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """y, ``inv_rms``, ``vectors`` and ``tally``; changes the state with ``update``."""
        raise NotImplementedError

    def _new_kernel_step(self, vectors: Tensor, tally: Tensor, unknown: bool) -> KernelStep:
        """``unknown``: of a forward that is to leave no trace."""
        raise NotImplementedError

    def _backward_kernel(
        self,
        dy: Tensor,
        x: Tensor,
        padding_mask: Tensor | None,
        weight: Tensor | None,
        inv_rms: Tensor,
        step: KernelStep,
        update: bool,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """dx, d weight, d bias, and sums over tokens for :meth:`_end`; ends the step itself with ``update``."""
        raise NotImplementedError

    def _end(self, step: Step, sums: Tensor) -> None:
        """End a step, given the sums of its backward over the workers' tokens."""
        raise NotImplementedError

    def forward_at_once(
        self, x: Tensor, weight: Tensor | None, bias: Tensor | None, padding_mask: Tensor | None, step: Step | None
    ) -> tuple[Tensor, Tensor, Step]:
        """y, ``inv_rms`` and the step: a new one unless it is ``step`` that is recomputed."""
        if step is not None:
            groups = self.layer_scale.groups
            return *kernels.normalize(x, weight, bias, *step.statistics(), None, groups, self.eps), step
        self.trained_alone = True
        unknown = in_backward() or self._leaves_no_step()
        y, inv_rms, vectors, tally = self._forward_kernel(x, padding_mask, weight, bias, not unknown)
        step = self._new_kernel_step(vectors, tally, unknown)
        return y, inv_rms, step if unknown else self._pending.add(step)

    def backward_at_once(
        self, dy: Tensor, x: Tensor, weight: Tensor | None, padding_mask: Tensor | None, inv_rms: Tensor, step: Step
    ) -> tuple[Tensor, Tensor, Tensor]:
        """dx, d weight and d bias; ends ``step``."""
        first = self.begin_backward(step)
        # The kernel can take back the latest step only, and it has nothing to report.
        whole = first and not step.replayed and not self.collecting and self._pending.is_latest(step)
        dx, dweight, dbias, sums = self._backward_kernel(dy, x, padding_mask, weight, inv_rms, step, whole)
        if whole:
            step.unfolded = False  # the tally has changed
            self._pending.settled(step)
        elif first:
            self._end(step, sums)
        return dx, dweight, dbias
