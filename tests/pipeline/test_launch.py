"""The layout of the ranks, from the variables of torchrun and of the user."""

import pytest

from pn_fairseq.common.command import UserError
from pn_fairseq.pipeline.launch import RankLayout, find_layout


@pytest.mark.parametrize(
    ("env", "gpus", "layout"),
    [
        ({}, 0, RankLayout(False, 1)),
        ({}, 8, RankLayout(True, 8)),
        ({"NPROC": "2"}, 0, RankLayout(False, 2)),
        ({"NPROC": "2"}, 8, RankLayout(True, 2)),
        ({"MASTER_ADDR": "left over"}, 1, RankLayout(True, 1)),
        ({"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1"}, 2, RankLayout(True, 4, 3, 1)),
    ],
)
def test_the_layout_of_the_ranks(env, gpus, layout):
    assert find_layout(env, gpus) == layout


@pytest.mark.parametrize(
    ("env", "gpus", "needles"),
    [
        ({"NPROC": "3"}, 2, ("NPROC=3", "2 GPUs")),
        ({"NPROC": "0"}, 0, ("NPROC", "at least 1")),
        ({"NPROC": "two"}, 0, ("NPROC", "'two'")),
    ],
)
def test_a_number_of_processes_that_is_wrong(env, gpus, needles):
    with pytest.raises(UserError) as caught:
        find_layout(env, gpus)
    assert all(needle in str(caught.value) for needle in needles)
