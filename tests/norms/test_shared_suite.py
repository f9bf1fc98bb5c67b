"""The shared suite on the norms of this package. A user runs it on other norms: pn test-norms."""

import torch

from pn_fairseq.testing.helpers import pytest_generate_tests  # noqa: F401
from pn_fairseq.testing.test_evaluation import *  # noqa: F403
from pn_fairseq.testing.test_module import *  # noqa: F403
from pn_fairseq.testing.test_module import HostReads
from pn_fairseq.testing.test_padding import *  # noqa: F403
from pn_fairseq.testing.test_ranks import *  # noqa: F403
from pn_fairseq.testing.test_recomputation import *  # noqa: F403
from pn_fairseq.testing.test_state import *  # noqa: F403


def test_reads_for_which_the_host_would_wait_for_a_gpu_are_noticed():
    with HostReads() as reads:
        if torch.ones(()) > 0:
            float(torch.ones(3).masked_select(torch.tensor([True, False, True])).sum())
        torch.ones(()).item()
    assert len(reads.operations) == 4
