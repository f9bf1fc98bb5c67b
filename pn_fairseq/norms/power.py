"""PN: power normalization with a running statistic forward and a running correction backward."""

import torch
from torch import Tensor

from pn_fairseq import kernels
from pn_fairseq.norms.core.base import COUNT, RunningNorm
from pn_fairseq.norms.core.checks import check_alpha, check_whole
from pn_fairseq.norms.core.passes import is_captured, one_at_a_time
from pn_fairseq.norms.core.step import Step

#: More batches than any training has: the warm-up is on at every value of the counter.
ALWAYS = 2**62


class PowerNorm(RunningNorm):
    r"""Power normalization, PN (Shen et al. 2020, Definition 3 and Algorithm 2).

    Training step number t, per channel, with the mean taken over the real tokens M of the batch:

    .. math::
        \psi_B^2 &= \mathrm{mean}_M(x^2), \qquad
        \hat x = x / D, \quad D = \sqrt{\psi_{t-1}^2 + \epsilon}, \qquad
        y = \gamma \hat x + \beta \\
        \psi_t^2 &= \alpha_\mathrm{fwd} \psi_{t-1}^2 + (1 - \alpha_\mathrm{fwd}) \psi_B^2 \\
        \mathrm{d}x &= (\mathrm{d}\hat x - \nu_{t-1} \hat x) / D, \qquad
        \mathrm{d}\hat x = \gamma\,\mathrm{d}y \\
        \nu_t &= \nu_{t-1} \max(0, 1 - (1 - \alpha_\mathrm{bwd}) \Gamma)
        + (1 - \alpha_\mathrm{bwd}) \Lambda, \qquad
        \Gamma = \mathrm{mean}_M(\hat x^2), \quad
        \Lambda = \mathrm{mean}_M(\mathrm{d}\hat x\,\hat x)

    dx is not the derivative of the forward but the paper's approximation of PN-V's gradient.
    ``max(0, .)`` keeps the factor of nu from becoming negative where the paper's Assumption 10 does
    not hold: without it nu diverges if Gamma stays above 2 / (1 - alpha_bwd). In evaluation
    :math:`y = \gamma x / \sqrt{\psi^2 + \epsilon} + \beta`.

    **psi warm-up.** For the first ``psi_warmup_updates`` optimizer updates D = sqrt(psi_B^2 + eps),
    and psi^2 is the mean of psi_B^2 over the batches since the warm-up began.
    :meth:`set_num_updates` sets how many updates are completed; 0 begins a new warm-up. Without
    these calls a module counts its training steps. A step of the warm-up reads x twice; so do later
    steps of a compiled module that was not told the number of updates.

    Args:
        alpha_fwd, alpha_bwd: decay of :math:`\psi^2` and of :math:`\nu`, in (0, 1).
        psi_warmup_updates: length of the warm-up in optimizer updates; 0: none. Without one psi = 1
            divides the first batches, and training may diverge where activations are larger. Give
            the warm-up of the learning rate, and the number of attention heads as
            ``layer_scale_groups``, as in the paper's Transformer. In a causal decoder the warm-up
            leaks future tokens, because psi_B covers the whole batch.
        sync: see :class:`~pn_fairseq.norms.core.base.RunningNorm`. After the warm-up a step has one
            asynchronous all-reduce, and the forward does not wait.
        others: see :class:`~pn_fairseq.norms.core.base.RunningNorm`.

    Buffers: ``running_psi2`` (:math:`\psi^2`, initially 1) and ``nu`` (initially 0), (C,) float32,
    and ``num_batches_tracked``, int64.
    """

    moment_name = "running_psi2"
    gradient_state = ("nu",)
    keeps = ("psi2", "warmup")
    mixes_tokens = "at first"
    normalizes_by = "running"
    reports = ("nonfinite_steps", "psi_distance", "guarded_steps", "gamma_max")

    #: Without :meth:`set_num_updates`: steps until the module next checks whether its own steps
    #: have ended the warm-up.
    _steps_until_look = 1

    def __init__(
        self, num_features: int, alpha_bwd: float = 0.9, psi_warmup_updates: int = 0, **common
    ):
        super().__init__(num_features, **common)
        self.alpha_bwd = check_alpha("alpha_bwd", alpha_bwd)
        self.psi_warmup_updates = check_whole("psi_warmup_updates", psi_warmup_updates, minimum=0)
        self.add_state("running_psi2", 1.0)
        self.add_state("nu", 0.0)
        self._begin_warmup()

    def set_num_updates(self, num_updates: int | None) -> None:
        # the t of the cumulative mean counts from here
        if num_updates == 0 and self._num_updates != 0:
            self.num_batches_tracked.zero_()
        super().set_num_updates(num_updates)
        self._warm_up((num_updates or 0) < self.psi_warmup_updates)
        self._steps_until_look = 1

    def reset_running_stats(self) -> None:
        super().reset_running_stats()
        self._begin_warmup()

    def _begin_warmup(self) -> None:
        """Begin the warm-up, with no step in the state."""
        self._warm_up((self._num_updates or 0) < self.psi_warmup_updates)
        self._steps_until_look = self.psi_warmup_updates

    def _warm_up(self, warming: bool) -> None:
        """Note whether the warm-up is on, and whether its end depends on the steps in the state."""
        self._warmup, self.reads = 0, ("running_psi2", "nu")
        if warming and self._told:
            self._warmup = ALWAYS
        elif warming:
            self._warmup, self.reads = self.psi_warmup_updates, (*self.reads, COUNT)

    def _look_at_own_steps(self, number: Tensor) -> None:
        """Record when the module's own steps have ended the warm-up. Reading their ``number`` waits
        for the device, so it is read only after enough steps to end the warm-up.
        """
        if not 0 < self._warmup < ALWAYS or torch.compiler.is_compiling():
            return
        self._steps_until_look -= 1
        if self._steps_until_look <= 0 and not is_captured(number):
            self._steps_until_look = self.psi_warmup_updates - int(number)
            self._warm_up(self._steps_until_look > 0)

    def whole_step(self, x, padding, weight, bias) -> Tensor | None:
        train = kernels.compiled("power_train", x)
        state, seen, repeats = self._buffers, self._seen, self.repeats()
        if train is None or (seen.warmup if repeats else self._warmup):
            return None
        read = seen.state if repeats else state
        y, psi2, nu = train(
            x,
            weight,
            bias,
            padding,
            [state["running_psi2"], state["nu"], state[COUNT]],
            *self.known_to_step(),
            read["running_psi2"],
            read["nu"],
            self.layer_scale_groups,
            self.eps,
            self.alpha_fwd,
            self.alpha_bwd,
        )
        if not repeats:
            self.has_read({"running_psi2": psi2, "nu": nu})
        return y

    def forward_pass(self, step: Step) -> Tensor:
        step.warmup = self._warmup if torch.compiler.is_compiling() else self._seen.warmup
        step.psi2 = step.state["running_psi2"]
        if step.warmup == 0:
            return step.normalize(step.psi2, moments=True)
        batch = step.moments()  # psi_B is needed before the first token is normalized: two passes
        warming_up = batch.count > 0
        if step.warmup != ALWAYS:
            warming_up = warming_up & (step.state[COUNT] < step.warmup)
        step.psi2 = torch.where(warming_up, batch.moment, step.psi2.to(batch.moment.dtype))
        return step.normalize(step.psi2)

    def backward_pass(self, step: Step) -> tuple[Tensor, Tensor]:
        with one_at_a_time():
            by_passes = self.whole_step is None or self.synchronises()
            state = None if by_passes else self.state_to_move(step)
            if state is None:
                return step.gradient(step.psi2, nu=step.state["nu"], sums=True)
            gradients = kernels.power_step_(
                step.dy,
                step.x,
                step.padding,
                step.weight,
                step.psi2,
                step.state["nu"],
                step.loss_scale,
                step.inv_rms,
                state["running_psi2"],
                state["nu"],
                state[COUNT],
                self.diagnostics_memory(),
                step.batch.moment,
                step.batch.count,
                self.layer_scale_groups,
                self.eps,
                step.warmup,
                self.alpha_fwd,
                self.alpha_bwd,
            )
            step.mark_taken_in()
        self._look_at_own_steps(state[COUNT])
        return gradients

    def update(self, step: Step, state: dict[str, Tensor]) -> None:
        kernels.power_update_(
            state["running_psi2"],
            state["nu"],
            state[COUNT],
            self.diagnostics_memory(),
            step.batch.moment,
            step.psi2,
            step.products,
            step.batch.count,
            self.eps,
            step.warmup,
            self.alpha_fwd,
            self.alpha_bwd,
            step.has_gradient,
        )
        self._look_at_own_steps(state[COUNT])

    def diagnostics(self) -> dict[str, Tensor]:
        """The diagnostics of :class:`RunningNorm`; ``gamma_max``: largest Gamma of a channel in the
        last step; ``guarded_steps``: how often ``max(0, .)`` acted; ``nu_rms``: the root mean
        square of nu.
        """
        collected = super().diagnostics()
        return {**collected, "nu_rms": self.nu.square().mean().sqrt()} if collected else collected
