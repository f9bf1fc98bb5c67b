"""Parameters of which mostly two at a time interact:

tests of all pairs in the place of all combinations.
"""

from itertools import combinations, cycle, product

import pytest


def pairwise(**factors) -> list[dict]:
    """Combinations in which every pair of values of two factors is found, chosen greedily; the
    same in every run.
    """
    names = sorted(factors, key=lambda name: -len(factors[name]))
    places = [range(len(factors[name])) for name in names]

    def pairs(chosen):
        return set(combinations(enumerate(chosen), 2))

    missing = set().union(*map(pairs, product(*places)))
    found = []
    for first in cycle(product(*places[:2])):
        if not missing:
            return [
                {name: factors[name][chosen[names.index(name)]] for name in factors}
                for chosen in found
            ]
        best = max(
            (first + rest for rest in product(*places[2:])),
            key=lambda chosen: len(pairs(chosen) & missing),
        )
        if pairs(best) & missing:
            found.append(best)
            missing -= pairs(best)


def in_pairs(indirect=(), **factors) -> pytest.MarkDecorator:
    """Parametrize a test with :func:`pairwise`; the factors that ``indirect`` names go to
    fixtures.
    """
    rows = [tuple(row.values()) for row in pairwise(**factors)]
    return pytest.mark.parametrize(tuple(factors), rows, indirect=indirect, ids=str)
