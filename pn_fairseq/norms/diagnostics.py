"""Diagnostics of training steps: how far batches are from the running statistics, and how many steps are faulty."""

import torch
from torch import Tensor

from pn_fairseq.norms.tokens import Contribution


def collect(norm, contribution: Contribution, counted: Tensor, collected: dict[str, Tensor]) -> None:
    """Put into ``collected`` what a step shows that is about to enter the state of ``norm``; see
    :meth:`.RunningNorm.diagnostics`. ``counted``: whether it enters, 0-d."""
    batch = norm.statistics_of(contribution.batch)[norm.moment_name].to(torch.float32)
    # 0 where the statistics of the batch equal the running ones.
    ratio = _log(batch) - _log(norm.get_buffer(norm.moment_name))
    faulty = (contribution.batch.count > 0) & ~counted
    seen = {"psi_distance": 0.5 * ratio.abs().mean(), "nonfinite_steps": faulty, **norm.observe(contribution)}
    for name, value in seen.items():
        if name.endswith("_steps"):
            value = collected.get(name, 0) + value.to(torch.int64)
        collected[name] = value


def _log(values: Tensor) -> Tensor:
    return values.clamp(min=torch.finfo(values.dtype).tiny).log()
