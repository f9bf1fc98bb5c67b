"""Tests of the rules that every norm has to keep, your own norms included: ``pn test-norms``.

``test_*.py`` hold the tests, :mod:`.helpers` what they share; :mod:`.ranks` starts processes that
train together. These are the rules that a norm gets from its base class. What a norm computes is
its own: compare that with a plain implementation of its formulas, as tests/norms does.
"""
