"""Where one start of a training stands among all, from the variables of torchrun, SLURM and the user."""

import pytest

from pn_fairseq.common.command import UserError
from pn_fairseq.pipeline.launch import Place, find_place

TORCH = {"NNODES": "3", "NODE_RANK": "1", "MASTER_ADDR": "head"}
#: The last of two tasks on each of two machines.
STEP = {
    **{"SLURM_JOB_ID": "100", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_NUM_NODES": "2"},
    **{"SLURM_PROCID": "3", "SLURM_NODEID": "1", "SLURM_LOCALID": "1", "SLURM_STEP_NODELIST": "head"},
}
PER_MACHINE = {**STEP, "SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1", "SLURM_LOCALID": "0"}


@pytest.mark.parametrize(
    ("env", "gpus", "place", "world_size"),
    [
        ({}, 0, Place(False), 1),
        ({}, 8, Place(True, 8), 8),
        ({"NPROC": "2"}, 0, Place(False, 2), 2),
        ({"NPROC": "2"}, 8, Place(True, 2), 2),
        ({"MASTER_ADDR": "left over"}, 1, Place(True, 1), 1),
        (TORCH, 2, Place(True, 2, 3, 1, "head", 29500), 6),
        ({**TORCH, "MASTER_PORT": "1234", "NPROC": "3"}, 0, Place(False, 3, 3, 1, "head", 1234), 9),
        ({"NNODES": "1"}, 0, Place(False), 1),
        ({**STEP, **TORCH}, 0, Place(False, 1, 3, 1, "head", 29500), 3),
        # As torchrun starts a rank.
        (
            {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "MASTER_ADDR": "head"},
            2,
            Place(True, address="head", rank=3, local_rank=1, ranks=4),
            4,
        ),
        # One task per rank: all GPUs are visible to both tasks, or each sees its own.
        (STEP, 2, Place(True, 1, 1, 0, "head", 21600, 3, 1, 4), 4),
        (STEP, 1, Place(True, 1, 1, 0, "head", 21600, 3, 1, 4), 4),
        (STEP, 0, Place(False, 1, 1, 0, "head", 21600, 3, 1, 4), 4),
        # One task per machine.
        (PER_MACHINE, 8, Place(True, 8, 2, 1, "head", 21600), 16),
        ({**PER_MACHINE, "NPROC": "3"}, 8, Place(True, 3, 2, 1, "head", 21600), 6),
        # A shell on one machine of an allocation, and a batch job of one machine.
        ({**STEP, "SLURM_STEP_NUM_TASKS": "1"}, 8, Place(True, 8), 8),
        ({"SLURM_JOB_ID": "100", "SLURM_NNODES": "1", "SLURM_NTASKS": "8"}, 8, Place(True, 8), 8),
    ],
)
def test_the_place_of_a_start(env, gpus, place, world_size):
    found = find_place(env, gpus)
    assert found == place and found.world_size == world_size


@pytest.mark.parametrize(
    ("env", "gpus", "needles"),
    [
        ({"NPROC": "3"}, 2, ("NPROC=3", "2 GPUs")),
        ({"NPROC": "0"}, 0, ("NPROC", "at least 1")),
        ({"NPROC": "two"}, 0, ("NPROC", "'two'")),
        ({"NNODES": "2", "NODE_RANK": "0"}, 0, ("MASTER_ADDR",)),
        ({"NNODES": "2", "MASTER_ADDR": "head"}, 0, ("NODE_RANK", "0 to 1")),
        ({**TORCH, "NODE_RANK": "3"}, 0, ("NODE_RANK=3", "0 to 2")),
        ({"NNODES": "1", "NODE_RANK": "1"}, 0, ("NODE_RANK=1",)),
        ({**TORCH, "MASTER_PORT": "70000"}, 0, ("MASTER_PORT", "65535")),
        ({"NODE_RANK": "0"}, 0, ("NODE_RANK", "NNODES")),
        ({"SLURM_JOB_ID": "100", "SLURM_NNODES": "2"}, 8, ("2 machines", "srun")),
        (STEP, 8, ("4 tasks on 2 machines", "8 visible GPUs")),
        ({**STEP, "NPROC": "2"}, 2, ("NPROC=2", "one rank")),
        ({**STEP, "SLURM_STEP_NODELIST": "node[1-2]"}, 2, ("scontrol", "MASTER_ADDR")),
        ({"RANK": "x", "WORLD_SIZE": "2"}, 0, ("RANK", "'x'")),
    ],
)
def test_what_is_missing_or_contradicts_itself(env, gpus, needles):
    with pytest.raises(UserError) as caught:
        find_place(env, gpus)
    for needle in needles:
        assert needle in str(caught.value)


def test_the_first_host_is_the_one_that_scontrol_names_first(tmp_path, monkeypatch):
    tool = tmp_path / "scontrol"
    tool.write_text('#!/bin/sh\n[ "$*" = "show hostnames node[1-2]" ] && printf "node1\\nnode2\\n"\n')
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert find_place({**STEP, "SLURM_STEP_NODELIST": "node[1-2]"}, 2).address == "node1"
