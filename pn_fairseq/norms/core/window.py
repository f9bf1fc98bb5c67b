"""What MABN and UN share: statistics over the last batches, kept in ring buffers."""

from torch import Tensor

from pn_fairseq import kernels
from pn_fairseq.norms.core.base import COUNT, RunningNorm
from pn_fairseq.norms.core.checks import check_whole
from pn_fairseq.norms.core.passes import one_at_a_time
from pn_fairseq.norms.core.step import Moments, Step


class WindowNorm(RunningNorm):
    r"""A norm that averages :math:`\psi_B^2 = \mathrm{mean}_M(x^2)` and
    :math:`\lambda_B = \mathrm{mean}_M(\mathrm{d}\hat x\,\hat x)` over the last ``window`` steps.

    A *step* is a training forward that has updated the state. With gradient accumulation an
    optimizer update comprises several steps. Step number t goes to row t mod ``window`` of two ring
    buffers. These are state like any other: they are saved, resumed and copied, and averaged over
    ranks and over checkpoints row by row.

    A step is *early* while t <= ``window``, and before optimizer update number
    ``psi_warmup_updates`` (without calls of :meth:`set_num_updates` steps are counted). Early steps
    use their own statistics.

    Args:
        window: steps in a ring buffer, the latest included.
        psi_warmup_updates: length of the warm-up in optimizer updates.
        others: see :class:`RunningNorm`.

    Buffers: ``running_psi2`` (C,), initially 1, ``psi2_window`` and ``lambda_window`` (window, C),
    initially 0.
    """

    moment_name = "running_psi2"
    normalizes_by = "window"
    gradient_state = ("nu", "lambda_window")
    follows_updates = True

    #: ``own_psi2``, ``counted``: psi_B^2, and the number of tokens that it covers. ``psi2``,
    #: ``ratio``: psi^2 in D, and r; ``marks``: whether the step is early and whether it is skipped.
    keeps = ("own_psi2", "counted", "psi2", "ratio", "marks")

    #: Decay of nu, in a norm that has one.
    alpha_bwd = 0.0

    #: The ratio r is 1 for at least this many updates.
    ratio_warmup = 1000

    #: Whether psi^2 is the geometric instead of the arithmetic mean of the window.
    geometric = False

    #: Whether steps with outliers are skipped; see :class:`UnifiedNorm`.
    outlier_filtration = False

    #: Whether the gradient of weight has the factor r.
    scales_gradient_of_weight = True

    def __init__(self, num_features: int, window: int = 16, psi_warmup_updates: int = 0, **common):
        super().__init__(num_features, **common)
        self.window = check_whole("window", window, minimum=1)
        self.psi_warmup_updates = check_whole("psi_warmup_updates", psi_warmup_updates, minimum=0)
        self.add_state("running_psi2", 1.0)
        self.add_state("psi2_window", 0.0, self.window)
        self.add_state("lambda_window", 0.0, self.window)

    def begin(self, step: Step, batch: Moments) -> None:
        """Store the statistics ``batch`` in the step, and what it normalizes by."""
        step.own_psi2 = batch.moment
        step.counted = batch.count
        step.psi2, step.ratio, step.marks = kernels.window_statistics(
            step.state["psi2_window"],
            step.state["running_psi2"],
            step.state[COUNT],
            self.completed_updates(step.state),
            step.own_psi2,
            self.psi_warmup_updates,
            max(self.ratio_warmup, self.psi_warmup_updates),
            self.eps,
            self.geometric,
            self.outlier_filtration,
        )

    def backward_pass(self, step: Step) -> tuple[Tensor, Tensor]:
        gain = step.times_weight(step.ratio)
        parameters, _ = step.gradient_sums(step.psi2, weight=gain)
        if self.scales_gradient_of_weight:
            parameters[0].mul_(step.ratio)
        with one_at_a_time():
            state = self.state_to_move(step)
            if state is not None:
                correction = self.update(step, state)
            else:  # dx needs the correction, but the state must not move
                copies = {name: value.clone() for name, value in step.state.items()}
                correction = self._move_window(step, copies, None)
            step.mark_taken_in()
        dx, _ = step.gradient(step.psi2, nu=correction, weight=gain)
        return dx, parameters

    def update(self, step: Step, state: dict[str, Tensor]) -> Tensor:
        """Move the ``state``, and return the factor of x_hat in dx, (C,)."""
        return self._move_window(step, state, self.diagnostics_memory())

    def _move_window(
        self, step: Step, state: dict[str, Tensor], diagnostics: Tensor | None
    ) -> Tensor:
        return kernels.window_update_(
            state["running_psi2"],
            state.get("nu"),
            state["psi2_window"],
            state["lambda_window"],
            state[COUNT],
            diagnostics,
            step.state.get("nu"),
            step.state["lambda_window"],
            step.state[COUNT],
            step.psi2,
            step.own_psi2,
            step.marks,
            step.products,
            step.batch.count,
            step.counted,
            self.alpha_fwd,
            self.alpha_bwd,
            step.has_gradient,
        )
