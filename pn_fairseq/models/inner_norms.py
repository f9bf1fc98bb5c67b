"""Norms inside attention and feed-forward networks. Their modules get x only; the padding mask is set before."""

from collections.abc import Callable

from fairseq.modules import MultiheadAttention
from torch import Tensor, nn


class NormedInput(nn.Module):
    """``linear`` after ``norm``; ``mask`` (B, T) is set before a forward in training, which gets x (T, B, C) only."""

    mask: Tensor | None = None

    def __init__(self, norm: nn.Module, linear: nn.Module):
        super().__init__()
        self.norm, self.linear = norm, linear

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.norm(x, self.mask if self.norm.training else None))


class HeadNorm(nn.Module):
    """A projection to queries or keys, and N over the channels of each head of its output, times ``scaling``.

    ``mask`` (B, T) is set before a forward in training, which gets x (T, B, C) only.
    """

    mask: Tensor | None = None

    def __init__(self, linear: nn.Module, norm: nn.Module, heads: int, scaling: float):
        super().__init__()
        self.linear, self.norm, self.heads, self.scaling = linear, norm, heads, scaling

    def forward(self, x: Tensor) -> Tensor:
        projected = self.linear(x)
        length, batch, channels = projected.shape
        heads = projected.view(length, batch * self.heads, channels // self.heads)
        mask = self.mask.repeat_interleave(self.heads, dim=0) if self.norm.training and self.mask is not None else None
        return (self.norm(heads, mask) * self.scaling).view(length, batch, channels)


def add_qk_norm(attention: MultiheadAttention, build: Callable[[int], nn.Module]) -> None:
    """Give an attention norms of its queries and keys, from ``build(channels of a head)``.

    softmax(N_q(q) N_k(k)^T / sqrt(d)) for a head with d channels. Henry et al. 2020, arXiv 2010.04245, normalize by the
    L2 norm and learn the scale: ``scale``, whose gain g, sqrt(d) at first, stands in N_q and in N_k. (They have one
    gain, with another initial value.) Today's language models use ``rms``.
    """
    for name, scaling in (("q_proj", attention.scaling), ("k_proj", 1.0)):
        norm = build(attention.head_dim)
        setattr(attention, name, HeadNorm(getattr(attention, name), norm, attention.num_heads, scaling))
    attention.scaling = 1.0
    attention.skip_embed_dim_check = True  # else torch's own function reads the weights of q_proj and k_proj


def set_masks(attention: MultiheadAttention, queries: Tensor | None, keys: Tensor | None) -> None:
    """Say which queries and keys (B, T) of the next forward are padding."""
    if isinstance(attention.q_proj, HeadNorm):
        attention.q_proj.mask, attention.k_proj.mask = queries, keys
