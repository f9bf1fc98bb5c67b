"""Norms without parameters: none at all, and the variants of LN in Xu et al. 2019."""

from collections.abc import Sequence

from torch import Tensor

from pn_fairseq import kernels
from pn_fairseq.norms.core.base import ChannelNorm
from pn_fairseq.norms.core.checks import check_positive, check_real


class NoNorm(ChannelNorm):
    """No normalization ("w/o Norm" in Xu et al. 2019, Table 1): y = x itself, or the layer-scaled
    x.

    It has no parameters and no state, and a padding mask changes nothing.

    Arguments: see :class:`~pn_fairseq.norms.core.base.ChannelNorm`.
    """

    learned = ()
    normalizes_by = "nothing"

    def normalize(self, h: Tensor) -> Tensor:
        return h


class LayerNormSimple(ChannelNorm):
    r"""LayerNorm-simple (Xu et al. 2019, Section 3.1): LN without gain and bias.

    .. math:: y = (x - \mathrm{mean}(x)) / \sqrt{\mathrm{var}(x) + \epsilon}

    Mean and biased variance are taken over the channels of a token. The norm has no parameters and
    no state, and a padding mask changes nothing.

    Arguments: see :class:`~pn_fairseq.norms.core.base.ChannelNorm`.
    """

    learned = ()

    def normalize(self, h: Tensor) -> Tensor:
        return kernels.standardized(h, eps_in_root=self.eps)


class DetachNorm(LayerNormSimple):
    r"""DetachNorm (Xu et al. 2019, Section 3.2): LayerNorm-simple with mean or standard deviation
    as constants.

    In the forward it is :class:`LayerNormSimple`. With the standard deviation :math:`\sigma =
    \sqrt{\mathrm{var}(x) + \epsilon}`, the output y, and means over the channels of a token, the
    gradient is

    .. math:: \mathrm{d}x = (\mathrm{d}y - [\text{mean not detached}]\; \mathrm{mean}(\mathrm{d}y)
        - [\text{std not detached}]\; y\, \mathrm{mean}(\mathrm{d}y\, y)) / \sigma

    Args:
        detach: statistics that are constants to the gradient: "mean", "std" or "mean,std", or a
            sequence of these.
        others: see :class:`LayerNormSimple`.
    """

    def __init__(self, num_features: int, detach: str | Sequence[str] = "mean,std", **common):
        super().__init__(num_features, **common)
        parts = sorted(detach.split(",") if isinstance(detach, str) else detach)
        if parts not in (["mean"], ["std"], ["mean", "std"]):
            raise ValueError(f"detach={detach!r} must be mean, std or mean,std")
        self.detach = tuple(parts)

    def normalize(self, h: Tensor) -> Tensor:
        through = {
            "through_mean": "mean" not in self.detach,
            "through_divisor": "std" not in self.detach,
        }
        return kernels.standardized(h, eps_in_root=self.eps, **through)


class AdaNorm(LayerNormSimple):
    r"""AdaNorm (Xu et al. 2019, Section 4): a gain that depends on the input and gets no gradient.

    .. math:: z = (x - \mathrm{mean}(x)) / \sqrt{\mathrm{var}(x) + \epsilon}, \qquad
        y = a\, \mathrm{sg}(1 - k z) \odot z

    sg(.) is a constant for the gradient. Mean and biased variance are taken over the channels of a
    token.

    Args:
        ada_k: k, at least 0. The paper uses 1/10.
        ada_scale: the factor a, greater than 0, which the paper calls C. The paper uses 1 for
            English-Vietnamese and 2 for German-English and English-German.
        others: see :class:`LayerNormSimple`.
    """

    def __init__(self, num_features: int, ada_k: float = 0.1, ada_scale: float = 1.0, **common):
        super().__init__(num_features, **common)
        self.ada_k = check_real("ada_k", ada_k, minimum=0)
        self.ada_scale = check_positive("ada_scale", ada_scale)

    def _normalize(self, h: Tensor, **divisor) -> Tensor:
        return kernels.standardized(
            h, gain=self.ada_scale, gain_slope=-self.ada_scale * self.ada_k, **divisor
        )

    def normalize(self, h: Tensor) -> Tensor:
        return self._normalize(h, eps_in_root=self.eps)


class AdaNormRelease(AdaNorm):
    r"""AdaNorm as in its authors' code: :math:`z = (x - \mathrm{mean}(x)) / (\mathrm{std}(x) +
    \epsilon)`.

    The standard deviation is the unbiased one, over C - 1, so there must be at least two channels.
    Arguments are those of :class:`AdaNorm`. ``ada_scale`` is 2 by default in the authors' code.
    """

    def normalize(self, h: Tensor) -> Tensor:
        return self._normalize(
            h, square_factor=self.num_features / max(self.num_features - 1, 1), eps_outside=self.eps
        )
