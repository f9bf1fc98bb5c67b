"""How the operators of norms that normalize each token by itself work on a ``DTensor``, as under
``SequenceParallel``.

Each of their inputs may be split along any dimension but the channels. The gradients of parameters
are then sums over parts, which DTensor adds up. The operators are those of
:mod:`pn_fairseq.kernels.ops`; norms with batch statistics have no rule here, because their sums
would need the tokens of all ranks.
"""

import sys
from functools import cache

import torch
from torch import Tensor


def is_distributed(x: Tensor) -> bool:
    """Whether ``x`` is a DTensor, without loading the module of that class."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(x, module.DTensor)


@cache
def register() -> None:
    """Tell DTensor the rules, once."""
    from torch.distributed.tensor import Partial, Replicate, Shard
    from torch.distributed.tensor.experimental import register_sharding

    # Operator -> its results. A number: a result per token, with this number of dimensions in front
    # of those of x. Partial: a gradient of parameters, to be summed over the ranks. Replicate: an
    # empty tensor.
    results_of = {
        "normalize": (0, 0, Replicate, Replicate),
        "gradient": (0, Partial, Partial),
        "standardize": (0, 1),
        "standardize_gradient": (0, Partial),
        "squash": (0,),
        "squash_gradient": (0, Partial, Partial),
    }

    def add(name: str, kinds: tuple) -> None:
        @register_sharding(getattr(torch.ops.pn_fairseq, name).default)
        def placements(*arguments):
            axes = len(arguments[0].shape)
            whole = [Replicate() if hasattr(each, "shape") else None for each in arguments]
            possible = [([Replicate()] * len(kinds), whole)]
            for dimension in range(axes - 1):
                given = list(whole)
                for place, each in enumerate(arguments):
                    # a vector has fewer dimensions than the tokens
                    if given[place] is not None and len(each.shape) >= axes:
                        given[place] = Shard(dimension + len(each.shape) - axes)
                results = [
                    Shard(dimension + kind) if isinstance(kind, int) else kind() for kind in kinds
                ]
                possible.append((results, given))
            return possible

    for name, kinds in results_of.items():
        add(name, kinds)
