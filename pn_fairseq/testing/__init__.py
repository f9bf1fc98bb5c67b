"""Tests of the rules that every norm must keep, your own norms included: ``pn test-norms``.

``test_*.py`` contain the tests, :mod:`.helpers` what they share; :mod:`.ranks` starts processes
that train together. A norm inherits these rules from its base class. They do not cover what a norm
computes: compare that with a plain implementation of its formulas, as tests/norms does.
"""
