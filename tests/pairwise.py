"""Tests of all pairs of parameters instead of all combinations: mostly two at a time interact."""

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

    def number_of_missing(chosen):
        return len(pairs(chosen) & missing)

    missing = set().union(*map(pairs, product(*places)))
    found = []
    for first in cycle(product(*places[:2])):
        if not missing:
            return found
        best = max((first + rest for rest in product(*places[2:])), key=number_of_missing)
        if number_of_missing(best):
            missing -= pairs(best)
            chosen = dict(zip(names, best, strict=True))
            found.append({name: values[chosen[name]] for name, values in factors.items()})


def in_pairs(indirect=(), **factors) -> pytest.MarkDecorator:
    """Parametrize a test with :func:`pairwise`; the factors that ``indirect`` names go to
    fixtures.
    """
    rows = [tuple(row.values()) for row in pairwise(**factors)]
    return pytest.mark.parametrize(tuple(factors), rows, indirect=indirect, ids=str)
