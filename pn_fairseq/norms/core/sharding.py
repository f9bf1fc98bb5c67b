"""How the operators of norms that treat each token by itself work on a ``DTensor``, as under
``SequenceParallel``.

Each of their inputs may be split along any dimension but the channels. The gradients of parameters
are then sums over parts, which DTensor adds. The operators are those of
:mod:`pn_fairseq.kernels.ops`; a norm with statistics of a batch has no rule here, because its sums
would need the tokens of all ranks.
"""

import sys
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor


def is_distributed(x: Tensor) -> bool:
    """Whether ``x`` is a DTensor.

    The module of that class may not be loaded, and is not needed to know.
    """
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(x, module.DTensor)


class Rule(NamedTuple):
    """How the tokens of x are spread over an operator.

    Attributes:
        arguments: place of each argument that holds tokens -> how many dimensions precede the
            dimensions of x.
        results: the same for its results.
        sums: places of the results that are gradients of parameters.
        number_of_results: all of them.
    """

    arguments: dict[int, int]
    results: dict[int, int]
    sums: tuple[int, ...]
    number_of_results: int


RULES = {
    "normalize": Rule({0: 0, 6: 0}, {0: 0, 1: 0}, (), 4),
    "gradient": Rule({0: 0, 1: 0, 10: 0}, {0: 0}, (1, 2), 3),
    "standardize": Rule({0: 0}, {0: 0, 1: 1}, (), 2),
    "standardize_gradient": Rule({0: 0, 1: 0, 3: 1}, {0: 0}, (1,), 2),
    "squash": Rule({0: 0}, {0: 0}, (), 1),
    "squash_gradient": Rule({0: 0, 1: 0}, {0: 0}, (1, 2), 3),
}


@cache
def register() -> None:
    """Tell DTensor the rules, once."""
    from torch.distributed.tensor import Partial, Replicate, Shard
    from torch.distributed.tensor.experimental import register_sharding

    def add(name: str, rule: Rule) -> None:
        @register_sharding(getattr(torch.ops.pn_fairseq, name).default)
        def placements(*arguments):
            whole = [Replicate() if hasattr(each, "shape") else None for each in arguments]
            replicated = [Replicate()] * rule.number_of_results
            possible = [(replicated, whole)]
            dimensions_of_tokens = len(arguments[0].shape) - 1
            for dimension in range(dimensions_of_tokens):
                given = list(whole)
                results = list(replicated)
                for place, in_front in rule.arguments.items():
                    if given[place] is not None:
                        given[place] = Shard(dimension + in_front)
                for place, in_front in rule.results.items():
                    results[place] = Shard(dimension + in_front)
                for place in rule.sums:
                    results[place] = Partial()
                possible.append((results, given))
            return possible

    for name, rule in RULES.items():
        add(name, rule)
