"""Nested tensors: sequences of different lengths without padding, as
``torch.nn.TransformerEncoder`` creates them.
"""

from collections.abc import Callable

import torch
from torch import Tensor


def over_tokens(norm: Callable[[Tensor], Tensor], x: Tensor, padding_mask: Tensor | None) -> Tensor:
    """``norm`` of the tokens of a nested tensor (B, *, C), all of them real, as rows (N, C); the
    result is nested like ``x``.

    Raises:
        ValueError: a padding mask is given, or the tokens do not follow one another without gaps.
    """
    if padding_mask is not None:
        raise ValueError("a nested tensor has no padding: give no padding_mask")
    if x.dim() != 3:
        raise ValueError(f"expected a nested tensor of shape (B, *, C), got one of {x.dim()} axes")
    if x.layout == torch.jagged:
        if x._ragged_idx != 1 or x.lengths() is not None:
            raise ValueError(
                "expected a nested tensor (B, *, C) without gaps, got a view of another one"
            )
        return torch.nested.nested_tensor_from_jagged(norm(x.values()), x.offsets())
    sequences = x.unbind()
    lengths = [len(sequence) for sequence in sequences]
    y = norm(torch.cat(sequences)).split(lengths)
    return torch.nested.as_nested_tensor(list(y))
