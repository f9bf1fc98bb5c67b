"""The tests of the norms compute with the kernels that are in use anyhow.

Those marked ``every_implementation`` run once with each implementation that computes on CPUs here;
tests/kernels compares the implementations operator by operator. Triton computes on CPUs under its
interpreter, slowly, and only where ``PN_FAIRSEQ_KERNELS`` asks for it. Processes that a test starts
compute with the same implementation as the test.
"""

import pytest

from pn_fairseq import kernels
from pn_fairseq.kernels.selection import IMPLEMENTATIONS

if kernels.FORCED:
    IMPLEMENTATION_NAMES = [kernels.FORCED]
else:
    on_cpus = [name for name, device in IMPLEMENTATIONS.items() if device in (None, "CPU")]
    IMPLEMENTATION_NAMES = [name for name in kernels.available() if name in on_cpus]


def pytest_configure(config):
    config.addinivalue_line(
        "markers", "every_implementation: runs with each implementation of the kernels"
    )


def pytest_generate_tests(metafunc):
    if metafunc.definition.get_closest_marker("every_implementation"):
        metafunc.parametrize("implementation", IMPLEMENTATION_NAMES, indirect=True)


@pytest.fixture(autouse=True)
def implementation(request):
    """Compute with the implementation that is the parameter, if there is one, here and in
    processes started here.
    """
    if not hasattr(request, "param"):
        yield None
        return
    with pytest.MonkeyPatch.context() as patch, kernels.using(request.param):
        patch.setenv(kernels.VARIABLE, request.param)
        yield request.param
