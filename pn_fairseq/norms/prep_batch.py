"""PRepBN: layer normalization that fades into a batch normalization which folds into the next
linear map.
"""

import torch
from torch import Tensor, nn

from pn_fairseq import kernels
from pn_fairseq.norms.batch import MaskedBatchNorm
from pn_fairseq.norms.core.base import COUNT
from pn_fairseq.norms.core.checks import check_whole
from pn_fairseq.norms.core.step import Step


class ProgressiveBatchNorm(MaskedBatchNorm):
    r"""Progressive re-parameterized batch normalization, PRepBN (Guo et al. 2024, "SLAB: Efficient
    Transformers with Simplified Linear Attention and Progressive Re-parameterized Batch
    Normalization").

    .. math:: y = \lambda\, \mathrm{LN}(x) + (1 - \lambda)\, \mathrm{RepBN}(x), \qquad
        \mathrm{RepBN}(x) = \mathrm{BN}(x) + \alpha x

    BN is :class:`~pn_fairseq.norms.MaskedBatchNorm` with ``weight`` and ``bias``; LN has its own
    gain and bias; :math:`\alpha` is one learned number. All gradients are exact. In evaluation
    y = RepBN(x) by the running statistics, at every :math:`\lambda`, so validation means little
    before the fade has ended. In evaluation RepBN is a constant affine map, which folds.

    **Fade.** :math:`\lambda = \max(0, 1 - n / N)` after n completed optimizer updates
    (:meth:`set_num_updates`; without these calls training steps are counted, and LN is always
    computed), with N = ``fade_updates``. In a transformer, N is by default 4/5 of ``--max-update``.
    The authors' code counts training forwards.

    Args:
        fade_updates: length N of the fade in optimizer updates; 0: none, RepBN from the start.
        affine: learn both gains and biases and :math:`\alpha`, which otherwise is 1.
        others: see :class:`~pn_fairseq.norms.core.base.RunningNorm`.

    Parameters: ``weight``, ``bias``, ``ln_weight``, ``ln_bias``, (C,), and ``rep_alpha``, (1,),
    initially 1.
    Buffers: see :class:`~pn_fairseq.norms.MaskedBatchNorm`.
    """

    follows_updates = True
    reads = (COUNT,)
    normalizes_by = "token, then batch"
    keeps = ("rest",)  # 1 - lambda, the share of RepBN

    def __init__(self, num_features: int, fade_updates: int = 60_000, **common):
        super().__init__(num_features, **common)
        self.fade_updates = check_whole("fade_updates", fade_updates, minimum=0)
        self.faded = self.fade_updates == 0
        if self.affine:
            self.ln_weight = nn.Parameter(torch.ones(num_features))
            self.ln_bias = nn.Parameter(torch.zeros(num_features))
            self.rep_alpha = nn.Parameter(torch.ones(1))
        else:
            self.ln_weight = self.ln_bias = self.rep_alpha = None

    def reset_parameters(self) -> None:
        super().reset_parameters()
        if self.affine:
            nn.init.ones_(self.ln_weight)
            nn.init.zeros_(self.ln_bias)
            nn.init.ones_(self.rep_alpha)

    def set_num_updates(self, num_updates: int | None) -> None:
        super().set_num_updates(num_updates)
        # An attribute that, unlike the number, changes once: torch.compile compiles a graph for
        # each value.
        self.faded = self.fade_updates <= (num_updates or 0)

    def rest(self, state: dict[str, Tensor], dtype: torch.dtype) -> Tensor:
        r""":math:`1 - \lambda`, 0-d."""
        if self.fade_updates == 0:
            return torch.ones((), dtype=dtype, device=state[COUNT].device)
        return (self.completed_updates(state).to(dtype) / self.fade_updates).clamp(max=1.0)

    def evaluation_caveat(self) -> str:
        rest = float(self.rest(self._buffers, torch.float32))
        if rest == 1:
            return ""
        return (
            f"at lambda = {1 - rest:.3g}: until it is 0, after fade_updates={self.fade_updates}, "
            "evaluation lacks the LayerNorm that training uses. Give fade_updates= four fifths of "
            "your updates."
        )

    def further_parameters(self) -> tuple[Tensor, ...]:
        # LN's gain and bias get their gradients in token_part, and zeros from backward_pass: if
        # they got no gradient after the fade, DistributedDataParallel would fail.
        if self.affine:
            return (self.rep_alpha, self.ln_weight, self.ln_bias)
        return ()

    def token_part(self, x: Tensor, state: dict[str, Tensor]) -> Tensor | None:
        if not self.training or self.recalibration or self.faded:
            return None
        dtype = torch.promote_types(x.dtype, torch.float32)
        share = 1.0 - self.rest(state, dtype)
        weight = share * (
            self.ln_weight if self.affine else x.new_ones(self.num_features, dtype=dtype)
        )
        bias = share * self.ln_bias if self.affine else None
        return kernels.standardized(self.layer_scale(x), weight, bias, eps_in_root=self.eps)

    def training_affine(self, step: Step) -> tuple[Tensor, Tensor]:
        step.rest = self.rest(step.state, step.batch.moment.dtype)
        weight, bias = super().training_affine(step)
        return step.rest * weight, step.rest * bias

    def backward_pass(self, step: Step) -> tuple[Tensor, ...]:
        batch = step.batch
        sigma = (batch.moment + self.eps).sqrt()
        gain = step.rest * (step.weight if self.affine else torch.ones_like(sigma))
        total, _ = super().training_affine(step)
        dx, parameters = self.exact_gradient(step, gain, step.rest * total)
        parameters = step.rest * parameters
        if not self.affine:
            return dx, parameters
        by_alpha = (sigma * parameters[0] + batch.mean * parameters[1]).sum()[None]
        return dx, parameters, by_alpha, *torch.zeros_like(parameters)

    def effective_affine(self, weight, bias, further, mean, moment):
        r"""For RepBN: as x = D x_hat + mu, the factors are gamma + alpha D and beta + alpha mu."""
        sigma = (moment + self.eps).sqrt()
        if not further:
            return 1.0 + sigma, mean
        # In evaluation mean is a buffer, which may change before the backward.
        return torch.addcmul(weight, further[0], sigma), torch.addcmul(
            bias, further[0], mean.clone()
        )
