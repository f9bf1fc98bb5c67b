"""The norms' numbers are checked with every implementation of the kernels that this machine can run.

What is about the norms' bookkeeping runs with the one that is in use; ``PN_FAIRSEQ_KERNELS`` chooses another for all.
"""

import pytest

from pn_fairseq import kernels

NUMERICAL = ("test_batch", "test_layer_scale", "test_oracle", "test_power", "test_power_v")


def pytest_generate_tests(metafunc):
    if metafunc.module.__name__.rpartition(".")[2] in NUMERICAL:
        names = kernels.available() if not kernels.forced() else [kernels.forced()]
        metafunc.parametrize("implementation", names, indirect=True)


@pytest.fixture(autouse=True)
def implementation(request):
    """Compute with the implementation that is the parameter, if there is one."""
    if not hasattr(request, "param"):
        yield None
        return
    with kernels.using(request.param):
        yield request.param
