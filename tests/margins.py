"""Largest error / tolerance of the numeric comparisons of each test: ``pytest --margins`` prints
the largest of them.

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

    def record(actual, expected, tolerance):
        with np.errstate(invalid="ignore"):  # the difference of infinities
            error = np.abs(
                np.asarray(actual, dtype=np.float64) - np.asarray(expected, dtype=np.float64)
            )
        within = np.isfinite(error) & (error > 0) & (error <= tolerance)
        ratios.append(
            float(
                np.max(
                    np.divide(error, tolerance, where=within, out=np.zeros_like(error)), initial=0.0
                )
            )
        )

    def numpy_close(actual, desired, rtol=1e-7, atol=0, **options):
        assert_allclose(actual, desired, rtol=rtol, atol=atol, **options)
        record(actual, desired, atol + rtol * np.abs(np.asarray(desired, dtype=np.float64)))

    def torch_close(input, other, rtol=1e-5, atol=1e-8, equal_nan=False):
        actual, expected = (tensor.detach().double().cpu().numpy() for tensor in (input, other))
        record(actual, expected, atol + rtol * np.nan_to_num(np.abs(expected)))
        return isclose(input, other, rtol=rtol, atol=atol, equal_nan=equal_nan)

    def approximately(self, actual):
        equal = equals(self, actual)
        if equal and isinstance(self.expected, float) and np.ndim(actual) == 0:
            record(float(actual), self.expected, float(self.tolerance))
        return equal

    # its module has different names in different versions of pytest
    number = type(pytest.approx(0.0))
    assert_allclose = np.testing.assert_allclose
    isclose = torch.isclose
    equals = number.__eq__
    # torch.testing.assert_close calls torch.isclose.
    np.testing.assert_allclose = numpy_close
    torch.isclose = torch_close
    number.__eq__ = approximately


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
    margins = [
        (ratio, report.nodeid)
        for report in terminalreporter.stats.get("passed", [])
        for name, ratio in report.user_properties
        if name == "margin" and report.when == "call"
    ]
    terminalreporter.section(f"largest of {len(margins)} errors / tolerances")
    for ratio, test in sorted(margins, reverse=True)[: config.getoption("--margins")]:
        terminalreporter.line(f"{ratio:.2g} {test}")
