"""What the operators ask of their arguments, whichever implementation computes; cpp/ops.cpp asks the same.

Nothing is broadcast, and no type is guessed: an implementation may read through pointers. With x (T, B, C) or (N, C),
float16, bfloat16, float32 or float64, and C a multiple of ``groups``, or ``groups`` 0:

=====================================  ====================================================================
``dy``                                 shape and type of x
``padding_mask``                       (B, T) or (N,), bool
vectors over channels                  (C,), floating-point
``inv_rms``                            (T, B, G) or (N, G), wide
``vectors``                            (5, C) of PN, (4, C) of BN, (2, C) of PN-V; wide, contiguous
``nu``, ``running_*``                  (C,), float32, contiguous
``steps``, ``tally``                   (), and (4,), contiguous; int64
=====================================  ====================================================================

All of them are where x is. What is optional may be None.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import wraps
from inspect import signature

import torch
from torch import Tensor

TYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)

VECTORS = ("weight", "bias", "scale", "slope", "offset", "mean", "moment")
STATE = ("nu", "running_psi2", "running_mean", "running_moment")
CONTIGUOUS = ("vectors", "tally", *STATE)

#: Tensor -> what is asked of it: that of the tensor of this name, or of all of a kind.
KINDS = {
    **{name: name for name in ("dy", "padding_mask", "inv_rms", "vectors", "steps", "tally")},
    **dict.fromkeys(VECTORS, "vector"),
    **dict.fromkeys(STATE, "state"),
}


def wide_type(x: Tensor) -> torch.dtype:
    """The type that sums and statistics of ``x`` are computed in."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


class Contract:
    """The contract of an operator with arguments of these ``names``, in their order."""

    def __init__(self, names: Iterable[str]):
        names = list(names)
        self.of_x, self.of_groups = names.index("x"), names.index("groups")
        self.of_mean = names.index("running_mean") if "running_mean" in names else None
        self.tensors = [
            (place, name, KINDS[name], name in CONTIGUOUS) for place, name in enumerate(names) if name in KINDS
        ]

    def check(self, args: Sequence) -> None:
        """Raise ValueError if an argument does not fit; the message names it and what it has to be."""
        x, groups = args[self.of_x], args[self.of_groups]
        shape, dtype, device = x.shape, x.dtype, x.device
        if len(shape) not in (2, 3):
            raise ValueError(f"x has to be (T, B, C) or (N, C), got {tuple(shape)}")
        channels = shape[-1]
        if groups < 0 or (groups and channels % groups):
            raise ValueError(f"groups={groups} has to divide the {channels} channels, or be 0")
        if dtype not in TYPES:
            raise ValueError(f"x has to be float16, bfloat16, float32 or float64, got {dtype}")
        wide = wide_type(x)
        rows = 5 if self.of_mean is None else 2 if args[self.of_mean] is None else 4
        expected = {
            "dy": (shape, dtype),
            "padding_mask": (shape[-2::-1], torch.bool),
            "inv_rms": ((*shape[:-1], groups), wide),
            "vectors": ((rows, channels), wide),
            "steps": ((), torch.int64),
            "tally": ((4,), torch.int64),
            "state": ((channels,), torch.float32),
        }
        for place, name, kind, contiguous in self.tensors:
            tensor = args[place]
            if tensor is None:
                continue
            own = tensor.dtype
            if kind == "vector":
                sizes, wanted = (channels,), own if own.is_floating_point else torch.float32
            else:
                sizes, wanted = expected[kind]
            if own != wanted or tensor.shape != sizes or tensor.device != device:
                raise ValueError(
                    f"{name} has to be {wanted} of shape {tuple(sizes)} on {device}, got {own} of shape "
                    f"{tuple(tensor.shape)} on {tensor.device}"
                )
            if contiguous and not tensor.is_contiguous():
                raise ValueError(f"{name} has to be contiguous")


def checked(operator: Callable, dense: bool = False) -> Callable:
    """``operator``, which computes with arguments that keep the contract, and raises ValueError with others.

    ``dense``: it is given vectors over channels and ``inv_rms`` contiguous, whatever they were.
    """
    contract = Contract(signature(operator).parameters)
    strided = [place for place, _, kind, _ in contract.tensors if dense and kind in ("vector", "inv_rms")]

    @wraps(operator)
    def checking(*args):
        contract.check(args)
        for place in strided:
            if args[place] is not None and not args[place].is_contiguous():
                args = (*args[:place], args[place].contiguous(), *args[place + 1 :])
        return operator(*args)

    return checking
