"""Argument checks that all norms share. Each raises ValueError with the offending values."""

import math
import warnings
from collections.abc import Container
from numbers import Integral, Real

import torch
import torch.utils._python_dispatch
from torch import Tensor

from pn_fairseq.kernels.ops import by_reference


def check_whole(name: str, value, minimum: int) -> int:
    """``value`` as an int, if it is a whole number of at least ``minimum``."""
    if not _is_number(value, Integral) or value < minimum:
        raise ValueError(f"{name}={value!r} must be a whole number of at least {minimum}")
    return int(value)


def check_real(name: str, value, minimum: float) -> float:
    """``value`` as a float, if it is finite and at least ``minimum``."""
    if not _is_number(value) or value < minimum:
        raise ValueError(f"{name}={value!r} must be a number of at least {minimum}")
    return float(value)


def check_groups(num_features: int, groups: int, of: str = "") -> None:
    """Refuse a number of ``groups`` that does not divide ``num_features``; ``of``: what the groups
    belong to, for the message.
    """
    if num_features % groups == 0:
        return
    numbers = range(1, num_features + 1)
    divisors = ", ".join(str(number) for number in numbers if num_features % number == 0)
    raise ValueError(
        f"num_features={num_features} is not divisible by groups={groups}{of}; it is by {divisors}"
    )


def check_positive(name: str, value) -> float:
    """``value`` as a float, if it is finite and greater than 0."""
    if not _is_number(value) or value <= 0:
        raise ValueError(f"{name}={value!r} must be a number greater than 0")
    return float(value)


def check_alpha(name: str, value) -> float:
    """``value`` as a float, if it lies in the open interval (0, 1)."""
    if not _is_number(value) or not 0 < value < 1:
        raise ValueError(f"{name}={value!r} must lie strictly between 0 and 1")
    return float(value)


def _is_number(value, kind: type = Real) -> bool:
    """Whether ``value`` is a finite number of this ``kind``; a bool is not."""
    return isinstance(value, kind) and not isinstance(value, bool) and math.isfinite(value)


def check_input(
    x: Tensor, padding_mask: Tensor | None, num_features: int, batch_first: bool = False
) -> None:
    """Check activations (T, B, C), (B, T, C) if ``batch_first``, or (N, C), and their mask, (B,
    T) or (N,) bool.
    """
    shape = x.shape
    layout = "(B, T, C)" if batch_first else "(T, B, C)"
    if x.dim() not in (2, 3) or shape[-1] != num_features:
        raise ValueError(
            f"expected an input of shape {layout} or (N, C) with C={num_features} channels, got "
            f"{tuple(shape)}"
        )
    if not x.is_floating_point():
        raise ValueError(f"expected a floating-point input, got {x.dtype}")
    if padding_mask is None:
        return
    if padding_mask.dtype != torch.bool:
        raise ValueError(
            f"padding_mask must have dtype torch.bool (True = padding), got {padding_mask.dtype}"
        )
    if padding_mask.device != x.device:
        raise ValueError(
            f"padding_mask is on {padding_mask.device}, but the input is on {x.device}"
        )
    expected = shape[:-1]
    if x.dim() == 3 and not batch_first:
        expected = (shape[1], shape[0])
    if padding_mask.shape != expected:
        layouts = "(N, C): expected (N,)" if x.dim() == 2 else f"{layout}: expected (B, T)"
        raise ValueError(
            f"padding_mask of shape {tuple(padding_mask.shape)} does not fit an input of shape "
            f"{tuple(shape)} = {layouts} = {tuple(expected)}"
        )


def advice_on_momentum(unknown: Container[str], known: Container[str]) -> str:
    """For messages about ``unknown`` arguments: torch's ``momentum`` is our ``alpha_fwd``."""
    if "momentum" in unknown and "alpha_fwd" in known:
        return "; alpha_fwd=0.9 is torch's momentum=0.1"
    return ""


#: Form of a mask -> what to ask if it seems to mark tokens as padding.
IS_INVERTED = {
    "mask": "is the mask inverted? True is padding; where 1 is a token, give ~mask, or "
    "padding(valid=...).",
    "valid": "is the mask inverted? 1 is a token, as in a tokenizer's attention_mask; where 1 is "
    "padding, give mask == 0.",
    "additive": "is the mask inverted? 0 is a token, and -inf is padding; torch makes them of a "
    "bool mask in which True is padding: give ~mask if True is a token in it.",
    "lengths": "their length is 0.",
}


def empty_sentences(count: int, sentences: int, form: str) -> str:
    """The text about a mask of this form that leaves ``count`` of ``sentences`` without a token."""
    return f"{count} of {sentences} sentences consist of padding only: {IS_INVERTED[form]}"


def padding_on_the_left(x: Tensor, padding: Tensor, form: str) -> str:
    """The text about ``padding`` (B, T), of this form, if it is at the left of all sentences of
    ``x`` (B, T, C), as in an inverted mask of sentences that are all shorter than T.

    Before the first attention or dropout, real padding is the same in all sentences. So if either
    side is the same, the meaning of the mask is certain; otherwise the batch may be padded on the
    left to a fixed length.
    """
    is_on_the_left = padding[:, 0] & ~padding[:, -1]
    if len(x) == 1 or not is_on_the_left.all():
        return ""
    is_same = x.isclose(x[:1], rtol=1e-2).all(-1).all(0)
    is_token = ~padding.any(0)
    is_padding = padding.all(0)
    if is_same[is_padding].all():
        return ""
    if is_token.any() and is_same[is_token].all():
        return (
            "what every sentence has at its end as tokens is the same in all of them, and what is "
            f"called padding differs: {IS_INVERTED[form]}"
        )
    return (
        "all sentences begin with padding and none ends with it. Unless they are padded on the "
        f"left to a fixed length: {IS_INVERTED[form]}"
    )


def warn_of_empty_sentences(padding_mask: Tensor) -> None:
    """Warn, once per program, if ``padding_mask`` (B, T) leaves a sentence without a token."""
    if padding_mask.dim() != 2 or not can_look_at_values() or _told:
        return
    count = int(padding_mask.all(1).sum())
    if count:
        _told.add("empty sentences")
        text = empty_sentences(count, len(padding_mask), "mask")
        warnings.warn(f"padding_mask: {text}", stacklevel=4)


#: The warnings that this program has given.
_told: set[str] = set()


def can_look_at_values() -> bool:
    """Whether the program may read the values of tensors: not while it is compiled, traced,
    transformed or captured.
    """
    if torch.compiler.is_dynamo_compiling() or by_reference():
        return False
    # fake tensors, among others
    if torch.utils._python_dispatch._get_current_dispatch_mode() is not None:
        return False
    return not (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing())
