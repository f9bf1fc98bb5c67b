from pathlib import Path

import pytest
import torch

from .scripts_helpers import cut_corpus, prepare


@pytest.fixture(scope="session", autouse=True)
def _one_thread():
    """The tensors are tiny: threads would cost more than they give, and change the order of sums."""
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def data(tmp_path_factory) -> Path:
    """A small cut of the corpus, prepared for training by the scripts; the cut itself lies beside it in corpus/."""
    base = tmp_path_factory.mktemp("prepared")
    prepare(cut_corpus(base / "corpus"), base / "data")
    return base / "data"
