"""A summary of the norms' diagnostics in fairseq's log and TensorBoard."""

from fairseq.logging import metrics
from torch import nn

from pn_fairseq.norms.base import running_norms


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
