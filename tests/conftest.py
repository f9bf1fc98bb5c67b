import pytest
import torch


@pytest.fixture(scope="session", autouse=True)
def _one_thread():
    """The tensors are tiny: threads would cost more than they give, and change the order of sums."""
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)
