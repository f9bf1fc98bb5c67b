"""What the norms share: affine parameters, layer-scale in front, float32 state that changes once per step."""

from collections.abc import Callable
from typing import Optional

import torch
from torch import Tensor, nn

from pn_fairseq.norms.checks import check_input, check_positive, check_whole
from pn_fairseq.norms.layer_scale import LayerScale, widen
from pn_fairseq.norms.pending import PendingSteps, Step, in_backward


class ChannelNorm(nn.Module):
    """A norm over (T, B, C) or (N, C) activations with a per-channel gain and bias and layer-scale in front.

    Subclasses define ``_train`` and ``_evaluate`` on widened, layer-scaled activations.

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
        """Tell the norm how many optimizer updates are completed. Only a norm with a schedule listens."""

    def forward(self, x: Tensor, padding_mask: Optional[Tensor] = None) -> Tensor:  # noqa: UP045 (TorchScript)
        """Normalize ``x``, (T, B, C) or (N, C); ``padding_mask`` is (B, T) or (N,) bool, True = padding.

        The result has the shape and type of ``x``; statistics and arithmetic are float32, or float64 for a float64
        ``x``. Padding is normalized like the rest and enters no statistic.
        """
        if not torch.jit.is_scripting():
            check_input(x, padding_mask, self.num_features)
        h = self.layer_scale.scale(widen(x))
        y = self._train(h, padding_mask) if self.training else self._evaluate(h)
        return y.to(x.dtype)

    def _affine(self, normalized: Tensor) -> Tensor:
        """``weight * normalized + bias`` in the type of ``normalized``."""
        weight, bias = self.weight, self.bias
        if weight is None or bias is None:
            return normalized
        return torch.addcmul(bias.to(normalized.dtype), normalized, weight.to(normalized.dtype))

    def extra_repr(self) -> str:
        groups = self.layer_scale.groups
        return f"{self.num_features}, eps={self.eps}, affine={self.affine}, layer_scale_groups={groups}"


class RunningNorm(ChannelNorm):
    """A norm with running statistics.

    The statistics and ``num_batches_tracked`` (int64, the training forwards that counted) are buffers. Statistics
    stay float32 through ``.half()``, ``.bfloat16()`` and ``.to(dtype)``: a moving average in bfloat16 stalls.

    A training forward changes them once, also where activation checkpointing runs it twice, and not at all where
    the batch has no real token or its statistics or gradient are not finite.
    """

    #: While set, training forwards normalize with the batch's own statistics and the running ones become the plain mean
    #: over the batches: statistics for weights that were not trained with them, such as averaged ones.
    recalibrating = False

    def __init__(self, num_features: int, eps: float, affine: bool, layer_scale_groups: int, **initial: float):
        super().__init__(num_features, eps, affine, layer_scale_groups)
        self._initial = initial
        for name in initial:
            self.register_buffer(name, torch.empty(num_features, dtype=torch.float32))
        self.register_buffer("num_batches_tracked", torch.empty((), dtype=torch.int64))
        self._num_updates = None
        self.reset_running_stats()

    def set_num_updates(self, num_updates: int) -> None:
        """Tell the norm that ``num_updates`` optimizer updates are completed."""
        if num_updates != self._num_updates:  # an update is over: no backward of an earlier forward will come
            self._num_updates = num_updates
            self._pending = PendingSteps()

    def reset_running_stats(self) -> None:
        """Forget everything that training has seen."""
        for name, value in self._initial.items():
            self._buffers[name].fill_(value)
        self.num_batches_tracked.zero_()
        self._pending = PendingSteps()

    def _real_tokens(self, h: Tensor, padding_mask: Tensor | None) -> tuple[Tensor | None, Tensor]:
        """Padding as (T, B, 1) or (N, 1) bool, None without, and the number N of real tokens (0-d, type of ``h``)."""
        if padding_mask is None:
            return None, torch.full((), h.numel() // self.num_features, dtype=h.dtype, device=h.device)
        padding = padding_mask.transpose(0, -1).unsqueeze(-1)
        return padding, padding.logical_not().sum().to(h.dtype)

    @staticmethod
    def _mean_over_real(values: Tensor, count: Tensor) -> Tensor:
        """Mean over the ``count`` real tokens of ``values``, which are 0 at padding, (C,); 0 if there are none."""
        return values.flatten(0, -2).sum(0) / count.clamp(min=1.0)

    def _weight(self, alpha: float) -> Callable[[Tensor], float | Tensor]:
        """Number of a step -> weight of its batch in an exponential average with decay ``alpha``."""
        if self.recalibrating:
            return lambda number: 1.0 / number
        return lambda number: 1.0 - alpha

    @torch.no_grad()
    def _begin(
        self, key: Tensor, count: Tensor, batch: dict[str, Tensor], weight: Callable[[Tensor], float | Tensor], **used
    ) -> Step:
        """Take the statistics ``batch`` of one training forward over ``count`` real tokens into the running ones.

        ``weight`` tells how much they count, given the number of the step; ``used`` is what a recomputation has to
        use again. Under a recomputation nothing is taken in: the step of the first computation is found by ``key``
        (C,), a statistic of the batch, and returned.
        """
        if in_backward():
            return self._pending.find(key) or Step(key, used, settled=True)
        batch = {name: value.detach().to(torch.float32) for name, value in batch.items()}
        counted = count > 0
        for value in batch.values():
            counted = counted & value.isfinite().all()
        return self._pending.add(Step(key.detach(), used, batch, weight, counted), self._buffers)

    @torch.no_grad()
    def _settle(self, step: Step, finite: Tensor) -> bool:
        """End a step whose gradient has been seen: take it back where that was not ``finite`` (0-d bool).

        Returns whether this was the first backward of the step (a retained graph can be walked again).
        """
        return self._pending.settle(step, self._buffers, finite)

    def _settle_by(self, tensor: Tensor, step: Step) -> None:
        """Settle ``step`` when the gradient of ``tensor`` is known."""

        def settle(grad: Tensor | None) -> None:  # None: a gradient that is nowhere other than zero
            self._settle(step, torch.tensor(True) if grad is None else grad.isfinite().all())

        if tensor.requires_grad:
            tensor.register_hook(settle)

    def _apply(self, fn, recurse=True):
        kept = dict(self._buffers)
        super()._apply(fn, recurse)
        for name, old in kept.items():
            new = self._buffers[name]
            if new.dtype != old.dtype:
                self._buffers[name] = old.to(new.device) if old.device.type != "meta" else new.to(old.dtype)
        return self

    def __getstate__(self):
        # What waits for its backward belongs to this module's graphs, not to a copy of the module.
        return {**self.__dict__, "_pending": PendingSteps()}
