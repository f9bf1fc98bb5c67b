"""What every model with these norms does: averaging statistics, logging diagnostics, folding for decoding."""

import torch
from fairseq.logging import metrics
from torch import nn

from pn_fairseq.common.errors import FoldedModelError
from pn_fairseq.models.norm_options import NormOptions
from pn_fairseq.norms import running_norms

#: Name of a buffer that marks the weights of a folded model.
FOLDED_MARK = "norms_folded"


def _summary(name: str, values: list[float]) -> float:
    """One value for all norms: the largest of a ``..._max``, the sum of a number of ``..._steps``, else the mean."""
    if name.endswith("_max"):
        return max(values)
    return sum(values) if name.endswith("_steps") else sum(values) / len(values)


class NormReport:
    """Logs the diagnostics of all norms of ``model`` every ``interval`` updates.

    ``norm_psi_distance`` and ``norm_nu_rms`` are means over the norms, ``norm_gamma_max`` the largest,
    ``norm_guarded_steps`` and ``norm_nonfinite_steps`` sums since the run was started. Diagnostics of a norm of
    one's own are summarized by the same endings. The values are read, which waits for a GPU, only when they are logged.
    """

    def __init__(self, model: nn.Module, interval: int):
        self.interval = interval
        self.norms = running_norms(model)
        self.logged_at = 0
        for norm in self.norms:
            norm.collecting = True

    def at_update(self, num_updates: int) -> None:
        """To be called while fairseq's metrics are being gathered, before the forward of update ``num_updates``."""
        if num_updates % self.interval or num_updates == self.logged_at:
            return
        self.logged_at = num_updates
        collected: dict[str, list[float]] = {}
        for norm in self.norms:
            for name, value in norm.diagnostics().items():
                collected.setdefault(name, []).append(float(value))
        for name, values in collected.items():
            metrics.log_scalar(f"norm_{name}", _summary(name, values), weight=0, priority=2000, round=5)


class NormedModel:
    """Mixin; must precede fairseq's class in the bases of a model, whose ``__init__`` ends with :meth:`use_norms`."""

    def use_norms(self, norms: NormOptions) -> None:
        #: Whether :mod:`pn_fairseq.fairseq_patches.training` averages its statistics over the ranks.
        self.averages_norm_stats = not norms.no_average_norm_stats
        self.norm_report = NormReport(self, norms.norm_stats_interval) if norms.norm_stats_interval else None
        self.norm_probe = None
        if norms.norm_probe and not norms.norms_folded:
            from pn_fairseq.models.norm_probe import NormProbe  # imports pyarrow

            self.norm_probe = NormProbe(self, norms.norm_probe, norms.norm_probe_interval, norms.norm_probe_layers)
        #: Whether the norms are folded into the projections that follow them; such a model can only decode.
        self.folded = norms.norms_folded
        if self.folded:
            self.register_buffer(FOLDED_MARK, torch.ones((), dtype=torch.int64))
            self.eval()

    def train(self, mode: bool = True):
        if mode and self.folded:
            raise FoldedModelError()
        return super().train(mode)

    def load_state_dict(self, state_dict, strict=True, model_cfg=None, args=None):
        if FOLDED_MARK in state_dict and not self.folded:
            raise FoldedModelError()
        return super().load_state_dict(state_dict, strict, model_cfg, args)

    def set_num_updates(self, num_updates: int) -> None:
        if self.norm_report is not None:
            self.norm_report.at_update(num_updates)
        if self.norm_probe is not None:
            self.norm_probe.check()
        super().set_num_updates(num_updates)
