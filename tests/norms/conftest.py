"""Every test of the norms runs with every implementation of the kernels that computes on CPUs here.

Triton does so under its interpreter, slowly, and is chosen by ``PN_FAIRSEQ_KERNELS``, which lets the tests run with one
implementation alone. Processes that a test starts compute with the same one as the test.
"""

import pytest

from pn_fairseq import kernels
from pn_fairseq.kernels.selection import IMPLEMENTATIONS

IMPLEMENTATION_NAMES = (
    [kernels.forced()]
    if kernels.forced()
    else [name for name in kernels.available() if IMPLEMENTATIONS[name] in (None, "CPU")]
)

#: Modules in which no kernel runs: errors of arguments, the oracles themselves, and weights of a moving average.
WITHOUT_KERNELS = ("test_errors", "test_oracle", "test_psi_warmup")

#: Tests that start processes, each of which imports torch for seconds, and are about what these tell one another more
#: than about arithmetic, which test_sync checks with two workers and every implementation: name -> parameter. With
#: another implementation than the one that is in use anyhow they are slow tests.
ONCE = {
    "test_workers_on_shards_give_what_one_gives_on_the_whole_batch": {"equality": 3},
    "test_no_step_of_pn_waits_for_another_worker": {},
    "test_one_worker_may_save_alone": {},
    "test_two_synchronised_workers_give_what_one_gives": {},
    "test_import_does_not_need_fairseq": {},
}


def pytest_generate_tests(metafunc):
    if metafunc.module.__name__.rpartition(".")[2] in WITHOUT_KERNELS:
        return
    # By module, so that what takes long to set up can be shared by the tests of one implementation.
    metafunc.parametrize("implementation", IMPLEMENTATION_NAMES, indirect=True, scope="module")


@pytest.hookimpl(tryfirst=True)  # before tests are chosen by their marks
def pytest_collection_modifyitems(items):
    for item in items:
        parameters = item.callspec.params if hasattr(item, "callspec") else {}
        if parameters.get("implementation") in IMPLEMENTATION_NAMES[:-1]:
            once = ONCE.get(item.originalname)
            if once is not None and once.items() <= parameters.items():
                item.add_marker(pytest.mark.slow)


@pytest.fixture(scope="module", autouse=True)
def implementation(request):
    """Compute with the implementation that is the parameter, if there is one, here and in processes started here."""
    if not hasattr(request, "param"):
        yield None
        return
    with pytest.MonkeyPatch.context() as patch, kernels.using(request.param):
        patch.setenv(kernels.VARIABLE, request.param)
        yield request.param
