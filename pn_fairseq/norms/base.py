"""What the norms share: affine parameters, layer-scale in front, float32 state that changes once per step.

The norms decide what is to be computed and when the state changes; :mod:`pn_fairseq.kernels` computes it.
"""

from collections.abc import Callable
from typing import Any, Optional

import torch
from torch import Tensor, nn

from pn_fairseq import kernels
from pn_fairseq.kernels import reference
from pn_fairseq.norms.checks import check_input, check_positive, check_whole
from pn_fairseq.norms.layer_scale import LayerScale
from pn_fairseq.norms.pending import COUNT, PendingSteps, Step, in_backward
from pn_fairseq.norms.workers import sum_later, sum_now, workers


class ChannelNorm(nn.Module):
    """A norm over (T, B, C) or (N, C) activations with a per-channel gain and bias and layer-scale in front.

    Subclasses define ``_train`` and ``_evaluate``.

    Args:
        num_features: number of channels C.
        eps: added to the second moment before the root, here and in layer-scale.
        affine: learn ``weight`` (gain, initially 1) and ``bias`` (initially 0), both (C,); None without.
        layer_scale_groups: groups of the :class:`LayerScale` in front; 0 means none.

    Raises:
        ValueError: an argument or an input does not fit; the message holds its value.
    """

    #: How many layer-scale groups a transformer gives this norm unless told otherwise: one per head, or none.
    layer_scale_per_head = False

    #: Length of the psi warm-up that a transformer gives this norm after its last encoder layer; None: as elsewhere.
    last_norm_warmup_updates: int | None = None

    #: Whether a transformer synchronises this norm when there are several workers, unless told otherwise.
    sync_by_default = False

    def __init__(self, num_features: int, eps: float = 1e-5, affine: bool = True, layer_scale_groups: int = 0):
        super().__init__()
        self.num_features = check_whole("num_features", num_features, minimum=1)
        self.eps = check_positive("eps", eps)
        self.affine = affine
        self.layer_scale = LayerScale(num_features, layer_scale_groups, eps)
        self.weight = nn.Parameter(torch.empty(num_features)) if affine else None
        self.bias = nn.Parameter(torch.empty(num_features)) if affine else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        if self.affine:
            nn.init.ones_(self.weight)
            nn.init.zeros_(self.bias)

    def set_num_updates(self, num_updates: int) -> None:
        """Tell the norm how many optimizer updates are completed. Only a norm with running statistics listens."""

    def flush(self) -> None:
        """Bring the state up to date. Only a norm that is synchronised between workers has something to do."""

    def forward(self, x: Tensor, padding_mask: Optional[Tensor] = None) -> Tensor:  # noqa: UP045 (TorchScript)
        """Normalize ``x``, (T, B, C) or (N, C); ``padding_mask`` is (B, T) or (N,) bool, True = padding.

        The result has the shape and type of ``x``; statistics and arithmetic are float32, or float64 for a float64
        ``x``. Padding is normalized like the rest and enters no statistic.
        """
        if not torch.jit.is_scripting():
            check_input(x, padding_mask, self.num_features)
            self.flush()
        return self._train(x, padding_mask) if self.training else self._evaluate(x)

    def _normalize_by(self, x: Tensor, mean: Optional[Tensor], moment: Tensor) -> Tensor:  # noqa: UP045 (TorchScript)
        """``x`` through layer-scale, normalized by given statistics; differentiable."""
        groups = self.layer_scale.groups
        if torch.jit.is_scripting():  # a saved module has to run where this package is not
            y, _ = reference.normalize(x, self.weight, self.bias, mean, moment, None, groups, self.eps)
        else:
            y, _ = kernels.normalize(x, self.weight, self.bias, mean, moment, None, groups, self.eps)
        return y

    def extra_repr(self) -> str:
        groups = self.layer_scale.groups
        return f"{self.num_features}, eps={self.eps}, affine={self.affine}, layer_scale_groups={groups}"


class RunningNorm(ChannelNorm):
    """A norm with running statistics.

    The statistics and ``num_batches_tracked`` (int64, the training forwards that counted) are buffers. Statistics
    stay float32 through ``.half()``, ``.bfloat16()``, ``.to(dtype)`` and loading: a moving average in bfloat16 stalls.

    A training forward changes them once, also where activation checkpointing runs it twice, and not at all where
    the batch has no real token or its statistics or gradient are not finite.

    Args:
        sync: take the statistics over the real tokens of all data-parallel workers, weighted by their number. All
            workers have to run the same forwards and backwards. Without ``torch.distributed``, or with one worker,
            it changes nothing.
        process_group: the workers; None means all. A copy of the module has None.
        initial: name and initial value of each statistic.
    """

    sync_by_default = True  # as in the paper, Section 5

    #: While set, training forwards normalize with the batch's own statistics and the running ones become the plain
    #: mean over the batches: statistics for weights that were not trained with them, such as averaged ones.
    recalibrating = False

    #: Statistics of the backward pass, which forwards alone cannot re-estimate.
    backward_statistics: tuple[str, ...] = ()

    #: While set, :meth:`diagnostics` has something to report.
    collecting = False

    #: While set, training forwards and their backwards leave no trace in the statistics. A worker that has nothing to
    #: train on takes part in the sums over the workers with nothing.
    ignoring = False

    #: Statistics that are variances -> the means that they are about.
    variances: dict[str, str] = {}

    def __init__(
        self,
        num_features: int,
        eps: float,
        affine: bool,
        layer_scale_groups: int,
        sync: bool = False,
        process_group=None,
        **initial: float,
    ):
        super().__init__(num_features, eps, affine, layer_scale_groups)
        self.sync = sync
        self.process_group = process_group
        self._initial = initial
        for name in initial:
            self.register_buffer(name, torch.empty(num_features, dtype=torch.float32))
        self.register_buffer(COUNT, torch.empty((), dtype=torch.int64))
        self._num_updates = None
        self._arriving: list[tuple[Any, Tensor, Callable[[Tensor], None]]] = []
        #: Whether a training forward has run since the workers last agreed on the statistics.
        self.trained_alone = False
        self._collected: dict[str, Tensor] = {}
        self.reset_running_stats()
        self.register_state_dict_pre_hook(_flush_first)
        self.register_load_state_dict_pre_hook(_before_loading)

    def set_num_updates(self, num_updates: int) -> None:
        """Tell the norm that ``num_updates`` optimizer updates are completed."""
        if num_updates != self._num_updates:  # an update is over: no backward of an earlier forward will come
            self.flush()
            self._num_updates = num_updates
            self._pending = PendingSteps()

    def reset_running_stats(self) -> None:
        """Forget everything that training has seen."""
        self.flush()
        for name, value in self._initial.items():
            self._buffers[name].fill_(value)
        self._buffers[COUNT].zero_()
        self._pending = PendingSteps()

    def forget_pending(self) -> None:
        """Let backwards that are still to come change no state: it was replaced, by loading or by agreement."""
        for step in self._pending.steps:
            step.forgotten = step.seen_backward = True
        self._pending = PendingSteps()

    def train(self, mode: bool = True):
        self.flush()
        return super().train(mode)

    def evaluation_statistics(self) -> tuple[Optional[Tensor], Tensor]:  # noqa: UP045 (TorchScript)
        """What evaluation normalizes by: a mean that is subtracted, None for none, and a second moment, both (C,)."""
        raise NotImplementedError

    def evaluation_affine(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Scale and shift, (C,) of ``dtype``: in evaluation y = scale * h + shift, with h what layer-scale gives."""
        mean, moment = self.evaluation_statistics()
        scale = torch.rsqrt(moment.to(dtype) + self.eps)
        weight, bias = self.weight, self.bias
        if weight is not None and bias is not None:
            scale = scale * weight.to(dtype)
            shift = bias.to(dtype)
        else:
            shift = torch.zeros_like(scale)
        return scale, shift if mean is None else shift - mean.to(dtype) * scale

    def _evaluate(self, x: Tensor) -> Tensor:
        mean, moment = self.evaluation_statistics()
        return self._normalize_by(x, mean, moment)

    # Sums over tokens and workers.

    def synchronises(self) -> bool:
        """Whether statistics are summed over several workers."""
        return self.sync and workers(self.process_group) > 1

    def _mask(self, x: Tensor, padding_mask: Tensor | None) -> Tensor | None:
        """What is padding for the statistics: the mask, or everything where this worker is to add nothing."""
        if self.ignoring and self.synchronises():
            return torch.ones(x.shape[-2::-1], dtype=torch.bool, device=x.device)
        return padding_mask

    def _moments(self, x: Tensor, padding_mask: Tensor | None, centered: bool = False):
        """:func:`~pn_fairseq.kernels.reference.moments` of layer-scaled ``x`` on this worker."""
        return kernels.moments(x.detach(), padding_mask, self.layer_scale.groups, self.eps, centered)

    def sum_over_workers(self, vector: Tensor) -> Tensor:
        """``vector`` itself for one worker; waits for the others if there are several."""
        return sum_now(vector, self.process_group) if self.synchronises() else vector

    def _mean_over_workers(self, total: Tensor, count: Tensor) -> tuple[Tensor, Tensor]:
        """Mean over the real tokens of all workers, (C,), 0 if there are none, and their number.

        ``total`` (C,) is the sum over the ``count`` real tokens of this worker.
        """
        if self.synchronises():
            summed = sum_now(torch.cat([total, count[None]]), self.process_group)
            total, count = summed[:-1], summed[-1]
        return total / count.clamp(min=1.0), count

    def _when_summed(self, total: Tensor, then: Callable[[Tensor], None]) -> None:
        """Call ``then`` with ``total`` summed over the workers: at once for one worker, else when :meth:`flush` is due.

        The sum is on its way while the step goes on. Whoever looks at the state calls :meth:`flush` first.
        """
        if self.synchronises():
            self._arriving.append((*sum_later(total, self.process_group), then))
        else:
            then(total)

    def flush(self) -> None:
        """Take in what is still on its way from the other workers.

        Called by every forward, on saving, loading and copying, and on a change between training and evaluation. It
        waits for sums that all workers have started, unless one of them failed, and starts none: one worker may call
        it alone.
        """
        if not self._arriving:
            return
        arriving, self._arriving = self._arriving, []
        with torch.no_grad():
            for work, total, then in arriving:
                work.wait()
                then(total)

    # The life of a training step.

    def _weight(self, alpha: float) -> Callable[[Tensor], float | Tensor]:
        """Number of a step -> weight of its batch in an exponential average with decay ``alpha``."""
        if self.recalibrating:
            return lambda number: 1.0 / number
        return lambda number: 1.0 - alpha

    @torch.no_grad()
    def _begin(self, key: Tensor, **used: Tensor) -> Step:
        """A training forward: a new step, or under a recomputation the step of the first computation.

        ``key`` (C,) is a statistic of the batch on this worker; ``used`` is what a recomputation has to use again.
        """
        self.trained_alone = True
        if step := self._recomputed(lambda: key):
            step.unfold()
            return step
        if in_backward() or self._leaves_no_step():
            return Step(key, used, forgotten=True, seen_backward=True)
        return self._pending.add(Step(key.detach(), used))

    def _leaves_no_step(self) -> bool:
        """Whether this forward is to be ignored and no other worker waits for it."""
        return self.ignoring and not self.synchronises()

    def _recomputed(self, key: Callable[[], Tensor]) -> Step | None:
        """The step that is being recomputed, None if this is no recomputation (or of a forward long forgotten).

        ``key`` computes the statistic of the batch by which the step is found among several.
        """
        return self._pending.find(key) if in_backward() and not self._leaves_no_step() else None

    @torch.no_grad()
    def _count_in(
        self, step: Step, batch: dict[str, Tensor], count: Tensor, weight: Callable[[Tensor], float | Tensor]
    ) -> None:
        """Take the statistics ``batch`` over ``count`` real tokens into the running ones; once for a step.

        ``weight`` tells how much they count, given the number of the step.
        """
        if step.batch is not None or step.forgotten:
            return
        step.batch = {name: value.detach().to(torch.float32) for name, value in batch.items()}
        step.count, step.weight = count, weight
        finite = torch.stack([value.isfinite().all() for value in step.batch.values()]).all()
        step.counted = (count > 0) & finite
        if self.collecting:
            self._note_step(step, finite)
        self._pending.count_in(step, self._buffers)

    def begin_backward(self, step: Step) -> bool:
        """Whether this is the first backward of ``step`` (a retained graph can be walked again)."""
        first, step.seen_backward = not step.seen_backward, True
        return first

    @torch.no_grad()
    def settle(self, step: Step, finite: Tensor) -> None:
        """End a step whose gradient has been seen: take it back where that was not ``finite`` (0-d bool)."""
        step.unfold()
        if self.collecting:
            self._add("nonfinite_steps", step.counted & finite.logical_not())
        self._pending.settle(step, self._buffers, finite)

    # Reports.

    def _note_step(self, step: Step, finite: Tensor) -> None:
        self._add("nonfinite_steps", finite.logical_not())

    def _add(self, name: str, condition: Tensor) -> None:
        self._collected[name] = self._collected.get(name, 0) + condition.to(torch.int64)

    def diagnostics(self) -> dict[str, Tensor]:
        """What was seen while :attr:`collecting` was set, by name, each 0-d; empty if it was not.

        ``nonfinite_steps``: how often a statistic or gradient that was not finite kept a step out of the state.
        """
        self.flush()
        return dict(self._collected)

    def _apply(self, fn, recurse=True):
        self.flush()
        kept = dict(self._buffers)
        super()._apply(fn, recurse)
        for name, old in kept.items():
            new = self._buffers[name]
            if new.dtype != old.dtype:
                self._buffers[name] = old.to(new.device) if old.device.type != "meta" else new.to(old.dtype)
        return self

    def __getstate__(self):
        self.flush()
        # What waits for its backward belongs to this module's graphs, not to a copy; a process group cannot be copied.
        return {**self.__dict__, "_pending": PendingSteps(), "process_group": None}


def running_norms(model: nn.Module) -> list[RunningNorm]:
    """The norms of ``model`` (itself included) that have running statistics."""
    return [module for module in model.modules() if isinstance(module, RunningNorm)]


def _flush_first(module: RunningNorm, *_) -> None:
    module.flush()


def _before_loading(module: RunningNorm, state_dict: dict, prefix: str, *_) -> None:
    module.flush()
    module.forget_pending()
    # With assign=True torch takes the tensors as they are. The dict is one of torch's own, not the caller's.
    for name, buffer in module._buffers.items():
        loaded = state_dict.get(prefix + name)
        if isinstance(loaded, Tensor):
            state_dict[prefix + name] = loaded.to(buffer.dtype).contiguous()


def psi_distance(batch: Tensor, running: Tensor) -> Tensor:
    """Mean over channels of abs(log(psi_B / psi)), given both squared, (C,): 0 where the batch is what was expected."""
    tiny = torch.finfo(running.dtype).tiny
    return 0.5 * (batch.clamp(min=tiny).log() - running.clamp(min=tiny).log()).abs().mean()
