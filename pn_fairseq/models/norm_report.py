"""A summary of the norms' diagnostics in fairseq's log and TensorBoard."""

from fairseq.logging import metrics
from torch import nn

from pn_fairseq.norms.base import running_norms

#: Diagnostic -> how the norms' values are made one.
_SUMMARY = {
    "psi_distance": lambda values: sum(values) / len(values),
    "nu_rms": lambda values: sum(values) / len(values),
    "gamma_max": max,
    "guarded_steps": sum,
    "nonfinite_steps": sum,
}


class NormReport:
    """Logs the diagnostics of all norms of ``model`` every ``interval`` updates.

    ``norm_psi_distance`` and ``norm_nu_rms`` are means over the norms, ``norm_gamma_max`` the largest,
    ``norm_guarded_steps`` and ``norm_nonfinite_steps`` sums since the training was started. The values are read, which
    waits for a GPU, only when they are logged.
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
            metrics.log_scalar(f"norm_{name}", _SUMMARY[name](values), weight=0, priority=2000, round=5)
