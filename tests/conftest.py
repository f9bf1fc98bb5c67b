import fcntl
import gc
import os
from functools import cache
from pathlib import Path
from unittest import mock

import pytest
import torch

from .scripts_helpers import cut_corpus, prepare

pytest_plugins = ["tests.margins"]
pytest.register_assert_rewrite("pn_fairseq.testing")

# The tensors are tiny: threads would cost more than they give, and change the order of sums.
# Processes that tests start are told by the variable.
os.environ["OMP_NUM_THREADS"] = os.environ.get("TEST_THREADS", "1")
torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))


def pytest_collection_finish():
    """What is imported by now stays: to look for garbage in it again and again takes a seventh of
    the time.
    """
    gc.freeze()
    gc.set_threshold(20_000)


@pytest.fixture(scope="module", autouse=True)
def _norms():
    """Norms that the tests of a file register are gone after it."""
    from pn_fairseq.norms import NORMS

    with mock.patch.dict(NORMS):
        yield


@cache
def seeded() -> torch.Tensor:
    torch.manual_seed(0)
    return torch.get_rng_state()


@pytest.fixture(autouse=True)
def _seed():
    """torch.manual_seed formats the stack for each kind of GPU that is not there, a millisecond
    for every test.
    """
    if torch.cuda.is_available():
        torch.manual_seed(0)
    else:
        torch.set_rng_state(seeded())


@pytest.fixture(scope="session")
def data(tmp_path_factory) -> Path:
    """A small cut of the corpus, prepared for training by the scripts; the cut itself is beside it
    in corpus/.

    Made once for all processes of pytest-xdist, whose base directories are in one directory of the
    run.
    """
    base = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        base = base.parent
    base = base / "prepared"
    base.mkdir(exist_ok=True)
    with (base / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (base / "data").exists():
            prepare(cut_corpus(base / "corpus"), base / "data")
    return base / "data"


@pytest.fixture(scope="session")
def dictionaries(tmp_path_factory) -> Path:
    """A folder with the dictionaries that a translation task looks for, of the models in
    tests/fixtures.
    """
    from .models.helpers import VOCABULARY, make_dictionary

    base = tmp_path_factory.mktemp("dictionaries")
    for lang in ("de", "en"):
        make_dictionary(VOCABULARY).save(str(base / f"dict.{lang}.txt"))
    return base
