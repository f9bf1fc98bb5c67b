"""What MABN and UN share: statistics over the last batches, which they keep in ring buffers."""

import torch
from torch import Tensor

from pn_fairseq.norms.base import COUNT, RunningNorm
from pn_fairseq.norms.checks import check_whole
from pn_fairseq.norms.step import Moments, Step


class WindowNorm(RunningNorm):
    r"""A norm that averages :math:`\psi_B^2 = \mathrm{mean}_M(x^2)` and
    :math:`\lambda_B = \mathrm{mean}_M(\mathrm{d}\hat x\,\hat x)` over the last ``window`` steps.

    A *step* is a training forward that has updated the state. With gradient accumulation an
    optimizer update has several steps. Step number t goes to row t mod ``window`` of two ring
    buffers. They are state like any other: saved, resumed, copied; averages over ranks and over
    checkpoints are taken row by row.

    A step is *early* while t <= ``window``, and before optimizer update number
    ``psi_warmup_updates`` (without calls of
    :meth:`set_num_updates` steps are counted). Early steps use their own statistics.

    Args:
        window: steps in a ring buffer, the latest included.
        psi_warmup_updates: length of the warm-up in optimizer updates.
        others: see :class:`RunningNorm`.

    Buffers: ``running_psi2`` (C,), initially 1, ``psi2_window`` and ``lambda_window`` (window, C),
    initially 0.
    """

    moment_name = "running_psi2"
    gradient_state = ("nu", "lambda_window")
    follows_updates = True

    #: ``number``, ``updates``: of this step and of its optimizer update, from 1; ``early``: whether
    #: it is early. ``own_psi2``, ``counted``: psi_B^2, and the number of tokens that it is over.
    #: ``psi2``, ``ratio``: psi^2 in D, and r.
    keeps = ("number", "updates", "early", "own_psi2", "counted", "psi2", "ratio")

    #: The ratio r is 1 for at least so many updates.
    ratio_warmup = 1000

    def __init__(self, num_features: int, window: int = 16, psi_warmup_updates: int = 0, **common):
        super().__init__(num_features, **common)
        self.window = check_whole("window", window, minimum=1)
        self.psi_warmup_updates = check_whole("psi_warmup_updates", psi_warmup_updates, minimum=0)
        self.add_state("running_psi2", 1.0)
        self.add_state("psi2_window", 0.0, self.window)
        self.add_state("lambda_window", 0.0, self.window)

    def begin(self, step: Step, batch: Moments) -> None:
        """Note the statistics ``batch``, the number of the step, and whether it is early."""
        step.number = step.state[COUNT] + 1
        step.updates = self.completed_updates(step.state) + 1
        step.early = (step.number <= self.window) | (step.updates < self.psi_warmup_updates)
        step.own_psi2, step.counted = batch.moment, batch.count.clamp(min=1.0)

    def ratio(self, step: Step) -> Tensor:
        r"""r = sqrt(psi^2 + eps) / sqrt(running psi^2 + eps) in [1/5, 5]; 1 at first."""
        running = step.state["running_psi2"].to(step.psi2.dtype)
        ratio = ((step.psi2 + self.eps) / (running + self.eps)).sqrt().clamp(1 / 5, 5)
        return torch.where(
            step.updates <= max(self.ratio_warmup, self.psi_warmup_updates), 1.0, ratio
        )

    def own_lambda(self, step: Step) -> Tensor:
        """lambda_B; 0 without a backward."""
        return step.products[0] / step.counted

    def average_lambda(self, step: Step) -> Tensor:
        """The mean of lambda over the last steps; early: that of this step."""
        own = self.own_lambda(step)
        average = with_row(step.state["lambda_window"], own, step.number).mean(0)
        return torch.where(step.early, own, average)


def with_row(window: Tensor, row: Tensor, number: Tensor) -> Tensor:
    """The ring buffer ``window``, (M, C), after step ``number`` with the value ``row``, (C,)."""
    rows = torch.arange(len(window), device=window.device)
    return torch.where((rows == number % len(window))[:, None], row, window)
