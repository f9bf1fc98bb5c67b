"""Training forwards whose backward is still to come: what they used, and what they changed.

Three things meet here. Under activation checkpointing a forward runs a second time during the backward pass; it has
to use the numbers of the first and must not change the state again. Several forwards may precede one backward. And a
step whose gradient turns out not to be finite has to be taken back.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

#: Forwards in training mode that never see a backward (statistics re-estimated without gradients, say) must not
#: pile up. Within one graph a module can be used this often under activation checkpointing.
MAX_PENDING = 128

COUNT = "num_batches_tracked"


def in_backward() -> bool:
    """Whether autograd is walking a graph right now, which makes this forward a recomputation.

    Holds for fairseq's ``checkpoint_wrapper`` and both variants of ``torch.utils.checkpoint``. The gradient mode
    cannot tell: the first computation runs without gradients in one of them and with gradients in another.
    """
    return torch._C._current_graph_task_id() != -1


@dataclass(eq=False)
class Step:
    """One training forward of one module.

    Attributes:
        key: a statistic of the batch on this worker, (C,), by which a recomputation finds the step.
        used: what the forward computed with and its recomputation has to use again.
        forgotten: whether this stands for a recomputation whose first computation is not known; it changes no state.
        seen_backward: whether its backward has begun.
        count: number of real tokens, 0-d; over all workers if they are synchronised. This and all below is None until
            the sums over the workers have arrived.
        batch: statistics of the batch by buffer name, (C,) float32.
        weight: number of the step, from 1 -> weight of the batch in the averages.
        counted: whether it changes the state, 0-d bool.
        before: the state that it found.
        settled: whether its gradient has been judged.
    """

    key: Tensor
    used: dict[str, Tensor]
    forgotten: bool = False
    seen_backward: bool = False
    count: Tensor | None = None
    batch: dict[str, Tensor] | None = None
    weight: Callable[[Tensor], float | Tensor] | None = None
    counted: Tensor | None = None
    before: dict[str, Tensor] | None = None
    settled: bool = False

    def unfold(self) -> None:
        """Set everything above from what a kernel left. Nothing to do for a step that no kernel made as a whole."""

    def advance(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        """The state after this step, given the state before it. No value is read by the host."""
        self.before = state
        after = {COUNT: state[COUNT] + self.counted}
        weight = self.weight(state[COUNT] + 1)
        for name, value in self.batch.items():
            after[name] = torch.where(self.counted, state[name] + weight * (value - state[name]), state[name])
        return after


class PendingSteps:
    """The steps of one module whose backward is still to come, oldest first, and the ones settled since the oldest."""

    def __init__(self):
        self.steps: list[Step] = []

    def add(self, step: Step) -> Step:
        """Keep ``step`` until it is settled."""
        self.steps = [*self.steps[1 - MAX_PENDING :], step]
        return step

    def count_in(self, step: Step, buffers: dict[str, Tensor]) -> None:
        """Let ``step``, whose statistics are there now, change ``buffers``."""
        _store(step.advance({name: buffers[name].clone() for name in (COUNT, *step.batch)}), buffers)

    def find(self, key: Callable[[], Tensor]) -> Step | None:
        """The step whose forward is being recomputed: the one with this ``key``, the latest if several have it.

        ``key`` is called where there is a choice.

        Raises:
            RuntimeError: none has it.
        """
        waiting = [step for step in self.steps if not step.seen_backward]
        if len(waiting) <= 1:  # the usual case needs no look at the values, which would wait for a GPU
            return waiting[0] if waiting else None
        sought = key()
        for step in waiting:
            step.unfold()
        distances = [_distance(step.key, sought) for step in waiting]
        nearest = min(reversed(range(len(waiting))), key=lambda index: distances[index])
        if not distances[nearest] < 1e-2:
            raise RuntimeError(
                f"a norm was recomputed for a batch that is not among its last {len(waiting)} training forwards: "
                f"more than {MAX_PENDING} checkpointed uses of one module before a backward, or a recomputation "
                "that does not repeat the forward"
            )
        return waiting[nearest]

    def settle(self, step: Step, buffers: dict[str, Tensor], finite: Tensor) -> None:
        """Take ``step`` back from ``buffers`` where its gradient was not ``finite`` (0-d bool).

        The steps after it are done again from the state before it, so the result is what it would have been without
        the faulty step, to the bit and in whatever order gradients come.
        """
        if step in self.steps:
            step.counted = step.counted & finite
            state = step.before
            for later in self.steps[self.steps.index(step) :]:
                later.unfold()
                state = later.advance(state)
            _store(state, buffers)
        self.settled(step)

    def is_latest(self, step: Step) -> bool:
        """Whether no step has come after ``step``."""
        return bool(self.steps) and self.steps[-1] is step

    def settled(self, step: Step) -> None:
        """Note that ``step`` has been judged, and forget what can no longer be asked for."""
        step.settled = True
        while self.steps and self.steps[0].settled:
            self.steps = self.steps[1:]


def _store(state: dict[str, Tensor], buffers: dict[str, Tensor]) -> None:
    for name, value in state.items():
        assign(buffers[name], value)


def assign(buffer: Tensor, value: Tensor) -> None:
    """``buffer.copy_(value)``, also inside ``torch.func.grad``, which forbids it for a module's own buffers.

    A running statistic is not a part of the function that is differentiated, so the value is taken out of the
    transform. Not so for ``vmap``: there is no one value for a whole batch of calls.
    """
    while torch._C._functorch.is_gradtrackingtensor(value):
        value = torch._C._functorch.get_unwrapped(value)
    with torch._C._DisableFuncTorch():
        buffer.copy_(value)


def _distance(one: Tensor, other: Tensor) -> float:
    """Relative distance of two vectors; infinite unless both have their NaN in the same places."""
    if not torch.equal(one.isnan(), other.isnan()):
        return float("inf")
    one, other = one.nan_to_num(), other.nan_to_num()
    return float((one - other).abs().sum() / one.abs().sum().clamp(min=torch.finfo(one.dtype).tiny))
