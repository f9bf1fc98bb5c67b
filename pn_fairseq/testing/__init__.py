"""Tests of the rules that every norm has to keep, your own norms included: ``pn test-norms``.

:mod:`.test_norms` holds the tests, :mod:`.helpers` what they share, :mod:`.ranks` starts processes that train together.
"""
