"""BatchNorm with a random shift and scale of its output: a norm from outside the package.

    pn train verses_es_en ... model._name=transformer_bn_tiny \\
        +model.norm_module=examples/noisy_batch.py model.encoder_norm=noisy-batch

Santurkar et al. 2018 (arXiv 1805.11604, appendix, algorithm 1) train with it to see whether BN
helps because it keeps the distribution of a layer's inputs calm: here it does not. ``pn
test-norms`` fails with it, since it compares forwards with each other, and this norm is random.
"""

import torch
from torch import Tensor

from pn_fairseq.norms import MaskedBatchNorm, register_norm

#: n_mu, n_sigma, r_mu and r_sigma of the paper's experiments.
SHIFT, SCALE, SHIFT_RANGE, SCALE_DEVIATION = 0.5, 1.25, 0.1, 0.1


@register_norm(
    "noisy-batch", "noisybn", "batch normalization with noise, an example", label="noisy BN"
)
class NoisyBatchNorm(MaskedBatchNorm):
    r"""y = s BN(x) + m in training, and BN(x) in evaluation.

    For every forward and channel mu ~ U(-0.5, 0.5) and sigma ~ U(1, 1.25); for each token and
    channel m ~ U(mu - 0.1, mu + 0.1) and s ~ N(sigma, 0.1^2). x, y: (..., C).
    """

    def forward(self, x: Tensor, *args, **kwargs) -> Tensor:
        y = super().forward(x, *args, **kwargs)
        if not self.training:
            return y
        mu = y.new_empty(y.size(-1)).uniform_(-SHIFT, SHIFT)
        sigma = torch.empty_like(mu).uniform_(1.0, SCALE)
        shift = mu + SHIFT_RANGE * (2 * torch.rand_like(y) - 1)
        scale = sigma + SCALE_DEVIATION * torch.randn_like(y)
        return scale * y + shift
