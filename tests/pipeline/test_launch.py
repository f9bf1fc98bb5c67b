"""The layout of the ranks, from the variables of torchrun and --ranks."""

import pytest

from pn_fairseq.common.command import UserError
from pn_fairseq.pipeline.launch import RankLayout, find_layout


@pytest.mark.parametrize(
    ("env", "gpus", "ranks", "layout"),
    [
        ({}, 0, None, RankLayout(False, 1)),
        ({}, 8, None, RankLayout(True, 8)),
        ({}, 0, 2, RankLayout(False, 2)),
        ({}, 8, 2, RankLayout(True, 2)),
        ({"MASTER_ADDR": "left over"}, 1, None, RankLayout(True, 1)),
        ({"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1"}, 2, 4, RankLayout(True, 4, 3, 1)),
        ({"PET_NNODES": "2"}, 8, None, RankLayout(True, 16, machines=2)),
    ],
)
def test_the_layout_of_the_ranks(env, gpus, ranks, layout):
    assert find_layout(env, gpus, ranks) == layout


def test_more_ranks_than_gpus_are_refused():
    with pytest.raises(UserError, match="--ranks 3, but 2 GPUs"):
        find_layout({}, 2, 3)


@pytest.mark.parametrize("machines", ["1:4", "0"])
def test_machines_that_are_no_number_are_refused(machines):
    with pytest.raises(UserError, match=f"PET_NNODES={machines}: "):
        find_layout({"PET_NNODES": machines}, 0)
