"""Largest error / tolerance of each test's comparisons by ``np.testing.assert_allclose``,
``torch.isclose`` and ``torch.testing.assert_close``: ``pytest --margins`` prints the largest ones.

A ratio near 1 passes on this processor and fails on the next one, which adds in another order:
CONTRIBUTING.md has the largest ratio of each kind of processor, and the rule for choosing a
tolerance. Comparisons in other processes and comparisons that do not hold (such as those that are
to fail) are not recorded, and equality to the bit counts as 0.
"""

import numpy as np
import pytest
import torch

MARGINS = pytest.StashKey[list]()


def pytest_addoption(parser):
    parser.addoption(
        "--margins",
        type=int,
        nargs="?",
        const=20,
        help="print the N (20) largest errors / tolerances",
    )


def pytest_configure(config):
    """Record from now on, in the ratios of the test that runs."""
    if config.getoption("--margins") is None:
        return
    ratios = config.stash[MARGINS] = []

    def record(actual, expected, rtol, atol):
        actual = np.asarray(actual, dtype=np.float64)
        expected = np.asarray(expected, dtype=np.float64)
        tolerance = atol + rtol * np.nan_to_num(np.abs(expected))
        with np.errstate(invalid="ignore"):  # the difference of infinities
            error = np.abs(actual - expected)
        within = np.isfinite(error) & (error > 0) & (error <= tolerance)
        ratio = np.divide(error, tolerance, where=within, out=np.zeros_like(error))
        ratios.append(float(np.max(ratio, initial=0.0)))

    def numpy_close(actual, desired, rtol=1e-7, atol=0, **options):
        assert_allclose(actual, desired, rtol=rtol, atol=atol, **options)
        record(actual, desired, rtol, atol)

    def torch_close(input, other, rtol=1e-5, atol=1e-8, equal_nan=False):
        actual = input.detach().double().cpu()
        record(actual, other.detach().double().cpu(), rtol, atol)
        return isclose(input, other, rtol=rtol, atol=atol, equal_nan=equal_nan)

    assert_allclose = np.testing.assert_allclose
    isclose = torch.isclose
    # torch.testing.assert_close calls torch.isclose.
    np.testing.assert_allclose = numpy_close
    torch.isclose = torch_close


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    ratios = item.config.stash.get(MARGINS, [])
    ratios.clear()
    result = yield
    if ratios:
        item.user_properties.append(("margin", max(ratios)))  # which pytest-xdist hands on
    return result


def pytest_terminal_summary(terminalreporter, config):
    if config.getoption("--margins") is None:
        return
    margins = []
    for report in terminalreporter.stats.get("passed", []):
        if report.when == "call":
            ratio = dict(report.user_properties).get("margin")
            if ratio is not None:
                margins.append((ratio, report.nodeid))
    terminalreporter.section(f"largest of {len(margins)} errors / tolerances")
    for ratio, test in sorted(margins, reverse=True)[: config.getoption("--margins")]:
        terminalreporter.line(f"{ratio:.2g} {test}")
