"""The shared suite finds what would make the host wait for a GPU."""

import torch

from pn_fairseq.testing.test_module import HostReads


def test_reads_of_values_are_noticed():
    with HostReads() as reads:
        if torch.ones(()) > 0:
            float(torch.ones(3).masked_select(torch.tensor([True, False, True])).sum())
        torch.ones(()).item()
    assert len(reads.operations) == 4
