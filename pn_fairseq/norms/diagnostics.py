"""Diagnostics of training steps: how far batches are from the running statistics, and how many steps are faulty."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from pn_fairseq.norms.tokens import Contribution


@dataclass
class Collected:
    """What a norm keeps for :meth:`.RunningNorm.diagnostics`. A step is only counted: on a GPU each operator on it is
    one more launch. The rest is computed when it is read.

    Attributes:
        steps: how many steps had each property of :meth:`.RunningNorm.step_flags`.
        last: the contribution of the last step, and the running moment before it.
    """

    steps: dict[str, Tensor] = field(default_factory=dict)
    last: tuple[Contribution, Tensor] | None = None

    def take(self, norm, contribution: Contribution, counted: Tensor) -> None:
        """A step that is about to enter the state of ``norm``. ``counted``: whether it enters, 0-d."""
        for name, flag in norm.step_flags(contribution, counted).items():
            self.steps[name] = self.steps.get(name, 0) + flag
        self.last = contribution, norm.frozen_view(norm.get_buffer(norm.moment_name))

    def report(self, norm) -> dict[str, Tensor]:
        """By name, each 0-d; empty before the first step."""
        if self.last is None:
            return {}
        contribution, running = self.last
        batch = norm.statistics_of(contribution.batch)[norm.moment_name].to(torch.float32)
        # 0 where the statistics of the batch equal the running ones.
        distance = 0.5 * (_log(batch) - _log(running)).abs().mean()
        return {"psi_distance": distance, **norm.observe(contribution), **self.steps}


def _log(values: Tensor) -> Tensor:
    return values.clamp(min=torch.finfo(values.dtype).tiny).log()
