"""``pn check``."""

import pytest
import torch

from pn_fairseq import kernels
from pn_fairseq.kernels.check import check
from pn_fairseq.kernels.first_use import TOLERANCE


@pytest.mark.skipif("cpp" not in kernels.available(), reason="there are no C++ kernels here")
def test_the_implementations_of_this_machine_are_right():
    table, fine = check()
    assert fine and table.count("ok") >= len(kernels.OPERATORS), table


@pytest.mark.skipif("cpp" not in kernels.available(), reason="there are no C++ kernels here")
def test_an_implementation_that_is_wrong_is_found(monkeypatch):
    """The reference is what is changed here: the difference is the same."""
    right = kernels.OPERATORS["moments"]

    def wrong(*arguments):
        inv_rms, mean, moment, count = right(*arguments)
        return inv_rms, mean, moment * (1 + 10 * TOLERANCE[torch.float16]), count

    monkeypatch.setitem(kernels.OPERATORS, "moments", wrong)
    table, fine = check()
    assert not fine
    (line,) = [line for line in table.splitlines() if "OFF" in line]
    assert "moments" in line and "float16" in line
