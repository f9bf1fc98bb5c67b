"""Norms inside attention and feed-forward networks, whose modules get only x: the padding mask
comes from the scope.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

from fairseq.modules import MultiheadAttention
from torch import Tensor, nn

from pn_fairseq.norms.masks.padding import Scope, current_scope


class InnerMasks(Scope):
    """The padding (B, T) of the input of a module, and of the keys of an attention.

    Converted norms do not see this scope.
    """

    def __init__(self, queries: Tensor | None, keys: Tensor | None):
        super().__init__()
        self.queries, self.keys = queries, keys


class NormedInput(nn.Module):
    """``linear`` after ``norm`` of x (T, B, C), in a module run inside :func:`inner_masks`."""

    def __init__(self, norm: nn.Module, linear: nn.Module):
        super().__init__()
        self.norm, self.linear = norm, linear

    def forward(self, x: Tensor) -> Tensor:
        mask = current_scope().queries if self.norm.training else None
        return self.linear(self.norm(x, mask))


class HeadNorm(nn.Module):
    """A projection to ``side``, "queries" or "keys", and N over the channels of each head of its
    output, times ``scaling``; in an attention that runs inside :func:`inner_masks`. x is (T, B, C).
    """

    def __init__(self, linear: nn.Module, norm: nn.Module, heads: int, scaling: float, side: str):
        super().__init__()
        self.linear, self.norm = linear, norm
        self.heads, self.scaling, self.side = heads, scaling, side

    def forward(self, x: Tensor) -> Tensor:
        projected = self.linear(x)
        length, batch, channels = projected.shape
        sequences = batch * self.heads
        heads = projected.view(length, sequences, channels // self.heads)
        mask = getattr(current_scope(), self.side) if self.norm.training else None
        if mask is not None:
            mask = mask.repeat_interleave(self.heads, dim=0)
        y = self.norm(heads, mask) * self.scaling
        return y.view(length, batch, channels)


def inner_masks(
    module: nn.Module, mask: Tensor | None, keys: Tensor | None = None
) -> AbstractContextManager:
    """The scope in which ``module``, an attention or a projection, runs on tokens with the padding
    ``mask`` (B, T); ``keys`` is the padding of an attention's keys.
    """
    parts = [module]
    for name in ("q_proj", "k_proj", "out_proj"):
        parts.append(getattr(module, name, None))
    for part in parts:
        if isinstance(part, (NormedInput, HeadNorm)) and part.norm.training:
            return InnerMasks(mask, keys)
    return nullcontext()


def add_qk_norm(attention: MultiheadAttention, build: Callable[[int], nn.Module]) -> None:
    """Add norms of queries and keys, from ``build(channels of a head)``, to an attention.

    softmax(N_q(q) N_k(k)^T / sqrt(d)) for a head with d channels. Henry et al. 2020, arXiv
    2010.04245, normalize by the L2 norm and learn the scale, as the norm ``scale`` does with a gain
    g, initially sqrt(d), in both N_q and N_k. (The paper uses one gain, with another initial
    value.) Today's language models use ``rms``.
    """
    heads, head_dim = attention.num_heads, attention.head_dim
    queries = HeadNorm(attention.q_proj, build(head_dim), heads, attention.scaling, "queries")
    attention.q_proj = queries
    attention.k_proj = HeadNorm(attention.k_proj, build(head_dim), heads, 1.0, "keys")
    attention.scaling = 1.0
    # otherwise torch's own function reads the weights of q_proj and k_proj
    attention.skip_embed_dim_check = True
