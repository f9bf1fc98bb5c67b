"""The warm-up schedule of PN's running statistic psi."""

import torch
from torch import Tensor

from pn_fairseq.norms.checks import check_whole


class PsiWarmup:
    r"""When the psi warm-up is on, and how much a new batch counts in the running statistic.

    During the warm-up PN normalizes with the batch's own :math:`\psi_B` and :math:`\psi^2` is the cumulative mean of
    the batches so far; afterwards PN normalizes with the running :math:`\psi` and :math:`\psi^2` is an exponential
    average (Shen et al. 2020, Section 4.2 and Algorithm 2).

    The warm-up is counted in optimizer updates, so that gradient accumulation does not shorten it; a module that no
    trainer tells the number of updates counts its training forwards in their place.

    Args:
        updates: length of the warm-up W; 0 means that there is none.

    Raises:
        ValueError: ``updates`` is not a whole number of at least 0.
    """

    def __init__(self, updates: int = 0):
        self.updates = check_whole("psi_warmup_updates", updates, minimum=0)

    def active(self, completed: int | Tensor) -> bool | Tensor:
        """Whether the warm-up is on after ``completed`` updates: ``completed < W``.

        A tensor gives a tensor, so that a counter on a GPU need not be read back.
        """
        return completed < self.updates

    def weight(self, active: bool | Tensor, step: int | Tensor, alpha: float) -> float | Tensor:
        r"""Weight w of batch number ``step`` (from 1) in :math:`\psi^2 \leftarrow \psi^2 + w(\psi_B^2 - \psi^2)`.

        ``1 / step`` during the warm-up (a cumulative mean), ``1 - alpha`` after it.
        """
        if isinstance(active, Tensor):
            return torch.where(active, 1.0 / step, 1.0 - alpha)
        return 1.0 / step if active else 1.0 - alpha

    def __repr__(self) -> str:
        return f"PsiWarmup({self.updates})"

    def __eq__(self, other) -> bool:
        return isinstance(other, PsiWarmup) and other.updates == self.updates
