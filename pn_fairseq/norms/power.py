"""PN: power normalization with a running statistic forward and a running correction backward."""

from dataclasses import dataclass

import torch
from torch import Tensor

from pn_fairseq import kernels
from pn_fairseq.norms.base import COUNT, RunningNorm
from pn_fairseq.norms.checks import check_alpha, check_whole
from pn_fairseq.norms.tokens import Contribution, Tokens

#: More batches than any training has: the warm-up is on at every value of the counter.
ALWAYS = 2**62


@dataclass(slots=True)
class PowerContribution(Contribution):
    """``psi2``: psi^2 in D. ``nu``: nu before the step. ``warmup``: :meth:`PowerNorm.warmup_batches`."""

    psi2: Tensor | None = None
    nu: Tensor | None = None
    warmup: int = 0


class PowerNorm(RunningNorm):
    r"""Power normalization, PN (Shen et al. 2020, Definition 3 and Algorithm 2).

    Training step number t, per channel, with the mean taken over the real tokens M of the batch:

    .. math::
        \psi_B^2 &= \mathrm{mean}_M(x^2), \qquad
        \hat x = x / D, \quad D = \sqrt{\psi_{t-1}^2 + \epsilon}, \qquad y = \gamma \hat x + \beta \\
        \psi_t^2 &= \alpha_\mathrm{fwd} \psi_{t-1}^2 + (1 - \alpha_\mathrm{fwd}) \psi_B^2 \\
        \mathrm{d}x &= (\mathrm{d}\hat x - \nu_{t-1} \hat x) / D, \qquad \mathrm{d}\hat x = \gamma\,\mathrm{d}y \\
        \nu_t &= \nu_{t-1} \max(0, 1 - (1 - \alpha_\mathrm{bwd}) \Gamma) + (1 - \alpha_\mathrm{bwd}) \Lambda, \qquad
        \Gamma = \mathrm{mean}_M(\hat x^2), \quad \Lambda = \mathrm{mean}_M(\mathrm{d}\hat x\,\hat x)

    dx is not the derivative of the forward but the paper's approximation of PN-V's gradient. ``max(0, .)`` keeps the
    factor of nu from becoming negative where the paper's Assumption 10 does not hold: without it nu diverges if Gamma
    stays above 2 / (1 - alpha_bwd). In evaluation
    :math:`y = \gamma x / \sqrt{\psi^2 + \epsilon} + \beta`.

    **psi warm-up.** For the first ``psi_warmup_updates`` optimizer updates D = sqrt(psi_B^2 + eps), and psi^2 is the
    mean of psi_B^2 over the batches since the warm-up began. :meth:`set_num_updates` sets how many updates are
    completed; 0 begins a new warm-up. Without these calls a module counts its training steps, and a module with a
    warm-up reads x twice in every step, also after the warm-up.

    Args:
        alpha_fwd, alpha_bwd: decay of :math:`\psi^2` and of :math:`\nu`, in (0, 1).
        psi_warmup_updates: length of the warm-up in optimizer updates; 0: none. Without one psi = 1 divides the first
            batches, and training may diverge where activations are larger. Give the warm-up of the learning rate, and
            the number of attention heads as ``layer_scale_groups``, as in the paper's Transformer. In a causal decoder
            the warm-up leaks future tokens, because psi_B is of the whole batch.
        sync: see :class:`~pn_fairseq.norms.base.RunningNorm`. After the warm-up a step has one asynchronous all-reduce,
            and the forward does not wait.
        others: see :class:`~pn_fairseq.norms.base.RunningNorm`.

    Buffers: ``running_psi2`` (:math:`\psi^2`, initially 1) and ``nu`` (initially 0), (C,) float32, and
    ``num_batches_tracked``, int64.
    """

    moment_name = "running_psi2"
    gradient_state = ("nu",)
    contribution_type = PowerContribution
    mixes_tokens = "at first"

    def __init__(self, num_features: int, alpha_bwd: float = 0.9, psi_warmup_updates: int = 0, **common):
        super().__init__(num_features, **common)
        self.alpha_bwd = check_alpha("alpha_bwd", alpha_bwd)
        self.psi_warmup_updates = check_whole("psi_warmup_updates", psi_warmup_updates, minimum=0)
        self.add_state("running_psi2", 1.0)
        self.add_state("nu", 0.0)

    def set_num_updates(self, num_updates: int) -> None:
        if num_updates == 0 and self._num_updates != 0:  # the t of the cumulative mean counts from here
            self.num_batches_tracked.zero_()
        super().set_num_updates(num_updates)

    def warmup_batches(self) -> int:
        """The psi warm-up is on while ``num_batches_tracked`` is less than this."""
        if self._num_updates is None:
            return self.psi_warmup_updates
        return ALWAYS if self._num_updates < self.psi_warmup_updates else 0

    def forward_pass(self, tokens: Tokens, contribution: Contribution) -> Tensor:
        contribution.warmup = self.warmup_batches()
        contribution.psi2, contribution.nu = self.frozen_view(self.running_psi2), self.frozen_view(self.nu)
        if contribution.warmup == 0:
            return tokens.normalize(contribution.psi2, moments=True)
        batch = tokens.moments()  # psi_B is needed before the first token is normalized: two passes
        warming_up = (self.num_batches_tracked < contribution.warmup) & (batch.count > 0)
        contribution.psi2 = torch.where(warming_up, batch.moment, contribution.psi2.to(batch.moment.dtype))
        return tokens.normalize(contribution.psi2)

    def backward_pass(self, tokens: Tokens, contribution: Contribution) -> tuple[Tensor, Tensor]:
        return tokens.gradient(contribution.psi2, nu=contribution.nu, sums=True)

    def update(self, contribution: Contribution) -> dict[str, Tensor]:
        psi2, nu, count = kernels.power_update(
            self.running_psi2,
            self.nu,
            self.num_batches_tracked,
            contribution.batch.moment,
            contribution.psi2,
            contribution.products,
            contribution.batch.count,
            self.eps,
            contribution.warmup,
            self.alpha_fwd,
            self.alpha_bwd,
        )
        return {"running_psi2": psi2, "nu": nu, COUNT: count}

    def gamma(self, contribution: Contribution) -> Tensor:
        """Gamma, (C,)."""
        return contribution.batch.moment / (contribution.psi2.to(contribution.batch.moment.dtype) + self.eps)

    def observe(self, contribution: Contribution) -> dict[str, Tensor]:
        """``gamma_max``: largest Gamma of a channel."""
        return {"gamma_max": self.gamma(contribution).max()}

    def step_flags(self, contribution: Contribution, counted: Tensor) -> dict[str, Tensor]:
        """Also ``guarded_steps``: how often ``max(0, .)`` acted."""
        guarded = ((1.0 - self.alpha_bwd) * self.gamma(contribution) > 1.0).any() & counted
        return {**super().step_flags(contribution, counted), "guarded_steps": guarded}

    def diagnostics(self) -> dict[str, Tensor]:
        """The diagnostics of :class:`RunningNorm` and :meth:`observe`, and ``nu_rms``, the root mean square of nu."""
        collected = super().diagnostics()
        return {**collected, "nu_rms": self.nu.square().mean().sqrt()} if collected else collected
