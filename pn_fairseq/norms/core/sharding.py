"""How the operators of norms that treat each token by itself work on a ``DTensor``, as under
``SequenceParallel``.

Each of their inputs may be split along any dimension but the channels. The gradients of parameters
are then sums over parts, which DTensor adds. The operators are those of
:mod:`pn_fairseq.kernels.ops`; a norm with statistics of a batch has no rule here, because its sums
would need the tokens of all ranks.
"""

import sys
from functools import cache

import torch
from torch import Tensor


def is_distributed(x: Tensor) -> bool:
    """Whether ``x`` is a DTensor.

    The module of that class may not be loaded, and is not needed to know.
    """
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(x, module.DTensor)


@cache
def register() -> None:
    """Tell DTensor the rules, once."""
    from torch.distributed.tensor import Partial, Replicate, Shard
    from torch.distributed.tensor.experimental import register_sharding

    #: Operator -> its arguments that have the tokens of x, and its results that do, each with the
    #: number of dimensions before those of x; the results that are gradients of parameters; the
    #: number of results.
    rules = {
        "normalize": ({0: 0, 6: 0}, {0: 0, 1: 0}, (), 4),
        "gradient": ({0: 0, 1: 0, 10: 0}, {0: 0}, (1, 2), 3),
        "standardize": ({0: 0}, {0: 0, 1: 1}, (), 2),
        "standardize_gradient": ({0: 0, 1: 0, 3: 1}, {0: 0}, (1,), 2),
        "squash": ({0: 0}, {0: 0}, (), 1),
        "squash_gradient": ({0: 0, 1: 0}, {0: 0}, (1, 2), 3),
    }

    def add(name: str, inputs: dict, outputs: dict, sums: tuple, number: int) -> None:
        @register_sharding(getattr(torch.ops.pn_fairseq, name).default)
        def placements(*arguments):
            whole = [Replicate() if hasattr(each, "shape") else None for each in arguments]
            found = [([Replicate()] * number, whole)]
            dimensions = len(arguments[0].shape) - 1
            for dimension in range(dimensions):
                given = list(whole)
                results = [Replicate()] * number
                for index, before in inputs.items():
                    if given[index] is not None:
                        given[index] = Shard(dimension + before)
                for index, before in outputs.items():
                    results[index] = Shard(dimension + before)
                for index in sums:
                    results[index] = Partial()
                found.append((results, given))
            return found

    for name, rule in rules.items():
        add(name, *rule)
