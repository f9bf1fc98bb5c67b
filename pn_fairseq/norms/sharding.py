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

    operators = torch.ops.pn_fairseq

    def rules(arguments: list, split: dict[int, int], dimensions: int, results) -> list:
        """``split``: index of an argument that has the tokens of x -> the number of dimensions
        before those of x. ``dimensions``: of x. ``results``: the dimension that is split (None:
        none) -> placements of the results.
        """
        found = []
        for dimension in (None, *range(dimensions - 1)):
            placements = []
            for index, argument in enumerate(arguments):
                if not hasattr(argument, "shape"):
                    placements.append(None)
                elif index in split and dimension is not None:
                    placements.append(Shard(dimension + split[index]))
                else:
                    placements.append(Replicate())
            found.append((results(dimension), placements))
        return found

    def placed(dimension: int | None, shift: int = 0):
        return Replicate() if dimension is None else Shard(dimension + shift)

    def summed(dimension: int | None):
        return Replicate() if dimension is None else Partial()

    @register_sharding(operators.normalize.default)
    def normalize(*arguments):
        results = lambda d: [placed(d), placed(d), Replicate(), Replicate()]  # noqa: E731
        return rules(arguments, {0: 0, 6: 0}, len(arguments[0].shape), results)

    @register_sharding(operators.gradient.default)
    def gradient(*arguments):
        results = lambda d: [placed(d), summed(d), summed(d)]  # noqa: E731
        return rules(arguments, {0: 0, 1: 0, 10: 0}, len(arguments[0].shape), results)

    @register_sharding(operators.standardize.default)
    def standardize(*arguments):
        results = lambda d: [placed(d), placed(d, 1)]  # noqa: E731
        return rules(arguments, {0: 0}, len(arguments[0].shape), results)

    @register_sharding(operators.standardize_gradient.default)
    def standardize_gradient(*arguments):
        results = lambda d: [placed(d), summed(d)]  # noqa: E731
        return rules(arguments, {0: 0, 1: 0, 3: 1}, len(arguments[0].shape), results)

    @register_sharding(operators.squash.default)
    def squash(*arguments):
        return rules(arguments, {0: 0}, len(arguments[0].shape), lambda d: [placed(d)])

    @register_sharding(operators.squash_gradient.default)
    def squash_gradient(*arguments):
        results = lambda d: [placed(d), summed(d), summed(d)]  # noqa: E731
        return rules(arguments, {0: 0, 1: 0}, len(arguments[0].shape), results)
