"""The tests of the norms compute with the kernels that are in use anyhow.

Those marked ``every_implementation`` run once with each implementation that computes on CPUs here; tests/kernels
compares the implementations operator by operator. Triton computes on CPUs under its interpreter, slowly, and only where
``PN_FAIRSEQ_KERNELS`` asks for it. Processes that a test starts compute with the same implementation as the test.
"""

import pytest

from pn_fairseq import kernels
from pn_fairseq.kernels.selection import IMPLEMENTATIONS

pytest.register_assert_rewrite("pn_fairseq.testing")

#: Tests of the shared suite that take long. On norms that differ in kind from each other they run by default.
LONG = {
    "test_evaluation_compiles_without_a_graph_break",
    "test_training_under_compile_is_training",
    "test_evaluation_can_be_exported",
    "test_recomputation_changes_no_bit",
    "test_recomputation_of_two_graphs_changes_no_bit",
    "test_recomputation_of_a_retained_graph_gives_the_same_again",
    "test_values_and_amount_of_padding_change_nothing_for_real_tokens",
    "test_batch_first_equals_the_transposed_call",
    "test_results_have_the_types_of_what_they_belong_to",
    "test_copies_continue_alike_and_apart",
}
KINDS = {"layer", "dyt", "batch", "power", "power-release", "power-v", "unified"}

IMPLEMENTATION_NAMES = (
    [kernels.forced()]
    if kernels.forced()
    else [name for name in kernels.available() if IMPLEMENTATIONS[name] in (None, "CPU")]
)


def pytest_configure(config):
    config.addinivalue_line("markers", "every_implementation: runs with each implementation of the kernels")


def pytest_collection_modifyitems(items):
    for item in items:
        if getattr(item, "originalname", None) in LONG:
            cases = {
                str(item.callspec.params[name]) for name in {"case", "running", "masking"} & item.callspec.params.keys()
            }
            if not cases & KINDS:
                item.add_marker(pytest.mark.slow)


def pytest_generate_tests(metafunc):
    if metafunc.definition.get_closest_marker("every_implementation"):
        metafunc.parametrize("implementation", IMPLEMENTATION_NAMES, indirect=True)


@pytest.fixture(autouse=True)
def implementation(request):
    """Compute with the implementation that is the parameter, if there is one, here and in processes started here."""
    if not hasattr(request, "param"):
        yield None
        return
    with pytest.MonkeyPatch.context() as patch, kernels.using(request.param):
        patch.setenv(kernels.VARIABLE, request.param)
        yield request.param
