"""Diagnostics of norms in fairseq's log, TensorBoard and wandb."""

from collections.abc import Sequence

from fairseq.logging import metrics
from torch import nn

from pn_fairseq.fairseq_patches.run_settings import run_setting

#: Settings with which fairseq shows curves of a run.
DASHBOARDS = ("tensorboard_logdir", "wandb_project")


def dashboard_interval(args) -> int | None:
    """``--log-interval`` of a run with a TensorBoard folder or a wandb project; else None.

    Args:
        args: the settings of a model, as for :func:`.run_setting`.
    """
    if any(run_setting(args, "common", key) for key in DASHBOARDS):
        return run_setting(args, "common", "log_interval")
    return None


def _summary(name: str, values: list[float]) -> float:
    """One value for all norms: the largest for a name ``..._max``, the sum for ``..._steps``, else
    the mean.
    """
    if name.endswith("_max"):
        return max(values)
    return sum(values) if name.endswith("_steps") else sum(values) / len(values)


class DiagnosticsLog(nn.Module):
    """A part of a model that logs the diagnostics of its ``norms`` every ``interval`` updates.

    ``norm_psi_distance`` and ``norm_nu_rms`` are means over the norms, ``norm_gamma_max`` is the
    largest value, ``norm_guarded_steps`` and ``norm_nonfinite_steps`` are sums since the run was
    started. Diagnostics of a user's norm are summarized by the same endings. The values are read,
    which waits for a GPU, only when they are logged.
    """

    def __init__(self, norms: Sequence[nn.Module], interval: int):
        super().__init__()
        self.interval = interval
        self.norms = norms  # a list, so that its modules are not parts of this one
        self.logged_at = 0
        for norm in norms:
            norm.collecting = True

    def set_num_updates(self, num_updates: int) -> None:
        """Called by fairseq while it gathers its metrics, before the forward of update
        ``num_updates``.
        """
        if num_updates % self.interval or num_updates == self.logged_at:
            return
        self.logged_at = num_updates
        collected: dict[str, list[float]] = {}
        for norm in self.norms:
            for name, value in norm.diagnostics().items():
                collected.setdefault(name, []).append(float(value))
        for name, values in collected.items():
            metrics.log_scalar(
                f"norm_{name}", _summary(name, values), weight=0, priority=2000, round=5
            )
