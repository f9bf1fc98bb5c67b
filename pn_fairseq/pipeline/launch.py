"""Rank, machine and world size of one start of train.sh, read from torchrun's and SLURM's variables."""

import os
import re
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass

from pn_fairseq.common.command import UserError, whole_number


@dataclass(frozen=True)
class Place:
    """One start of train.sh: it launches the ranks of a machine, or is one rank. All machines are assumed equal."""

    gpu: bool  # whether the ranks compute on GPUs
    local_world_size: int = 1  # ranks that this start launches
    nodes: int = 1  # machines
    node: int = 0  # which of them this is
    address: str = ""  # where the ranks find each other
    port: int = 29500
    rank: int | None = None  # of this process, if torchrun or SLURM started it as one
    local_rank: int = 0  # the GPU of such a rank
    ranks: int | None = None  # how many of them there are

    @property
    def world_size(self) -> int:
        return self.nodes * self.local_world_size if self.ranks is None else self.ranks


def find_place(env: Mapping[str, str], gpus: int) -> Place:
    """Read rank, machine and world size from environment variables, with ``gpus`` visible GPUs.

    Raises:
        UserError: a variable is missing or wrong, or contradicts another.
    """
    if "RANK" in env and "WORLD_SIZE" in env:  # torchrun
        return Place(
            gpus > 0,
            address=env.get("MASTER_ADDR", ""),
            rank=variable(env, "RANK"),
            local_rank=variable(env, "LOCAL_RANK", 0),
            ranks=variable(env, "WORLD_SIZE", least=1),
        )
    if "NNODES" in env:
        nodes = variable(env, "NNODES", least=1)
        if nodes > 1 and "NODE_RANK" not in env:
            raise UserError(f"NNODES={nodes} needs NODE_RANK, the number of this machine, 0 to {nodes - 1}")
        node = variable(env, "NODE_RANK", 0)
        if node >= nodes:
            raise UserError(f"NODE_RANK={node} is too large: NNODES={nodes} machines are numbered 0 to {nodes - 1}")
        if nodes > 1 and not env.get("MASTER_ADDR"):
            raise UserError(f"NNODES={nodes} needs MASTER_ADDR, the name or address of the machine with NODE_RANK=0")
        address = env["MASTER_ADDR"] if nodes > 1 else ""
        return Place(gpus > 0, processes(env, gpus), nodes, node, address, _port(env, 29500))
    if "NODE_RANK" in env:
        raise UserError("NODE_RANK is set but NNODES is not; set NNODES to the number of machines")
    # Only srun sets this variable.
    tasks = variable(env, "SLURM_STEP_NUM_TASKS", 1, least=1)
    if tasks > 1:
        return _of_slurm_task(env, gpus, tasks)
    nodes = variable(env, "SLURM_JOB_NUM_NODES", variable(env, "SLURM_NNODES", 1))
    if nodes > 1 and "SLURM_STEP_NUM_TASKS" not in env:
        raise UserError(
            f"this SLURM job has {nodes} machines, and only one would train: "
            "call it by 'srun --ntasks-per-node=1 scripts/train.sh ...'"
        )
    return Place(gpus > 0, processes(env, gpus))


def _of_slurm_task(env: Mapping[str, str], gpus: int, tasks: int) -> Place:
    """One of several tasks of srun: one per machine, which launches the ranks there, or one per rank."""
    nodes = variable(env, "SLURM_STEP_NUM_NODES", least=1)
    address = env.get("MASTER_ADDR") or _first_host(env)
    # The steps of a job may train side by side.
    port = _port(env, 20000 + (16 * variable(env, "SLURM_JOB_ID") + variable(env, "SLURM_STEP_ID", 0)) % 20000)
    if tasks == nodes:
        return Place(gpus > 0, processes(env, gpus), nodes, variable(env, "SLURM_NODEID"), address, port)
    if gpus > 1 and tasks != nodes * gpus:
        raise UserError(
            f"{tasks} tasks on {nodes} machines with {gpus} visible GPUs: start one task per machine "
            "(srun --ntasks-per-node=1) or one per GPU"
        )
    if variable(env, "NPROC", 1) != 1:
        raise UserError(f"NPROC={env['NPROC']}, but with several tasks on a machine each task is one rank")
    rank, local_rank = variable(env, "SLURM_PROCID"), variable(env, "SLURM_LOCALID")
    return Place(gpus > 0, 1, 1, 0, address, port, rank, local_rank, tasks)


def variable(
    env: Mapping[str, str], name: str, default: int | None = None, least: int = 0, most: int | None = None
) -> int:
    """A whole number among environment variables."""
    if text := env.get(name):
        return whole_number(name, text, least, most)
    if default is None:
        raise UserError(f"{name} is not set")
    return default


def _port(env: Mapping[str, str], default: int) -> int:
    return variable(env, "MASTER_PORT", default, 1, 65535)


def processes(env: Mapping[str, str], gpus: int) -> int:
    """How many processes: one per GPU, one where there is none, or NPROC."""
    count = variable(env, "NPROC", max(1, gpus), least=1)
    if gpus and count > gpus:
        raise UserError(
            f"NPROC={count}, but {gpus} GPU{'s are' if gpus > 1 else ' is'} visible, and a GPU takes one process "
            "(CUDA_VISIBLE_DEVICES= uses the CPU)"
        )
    return count


def _first_host(env: Mapping[str, str]) -> str:
    names = env.get("SLURM_STEP_NODELIST") or env["SLURM_JOB_NODELIST"]
    if not re.search(r"[\[,]", names):
        return names
    try:
        command = ["scontrol", "show", "hostnames", names]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout.split()[0]
    except (OSError, subprocess.SubprocessError, IndexError):
        raise UserError(
            f"'scontrol show hostnames {names}' does not work here: name the machine of the first task with MASTER_ADDR"
        ) from None


def torchrun(place: Place, arguments: list[str]) -> int:
    """Launch the ranks of this machine, each ``python -m pn_fairseq train ARGUMENTS``, and wait for them.

    torchrun stops all ranks when one of them fails or when it gets a signal.
    """
    import signal
    from unittest import mock

    import torch
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import get_args_parser, run

    from pn_fairseq.common.command import Interrupted

    where = ["--standalone"]
    timeout = variable(os.environ, "START_TIMEOUT", 600, least=1)
    if place.nodes > 1:
        where = ["--nnodes", str(place.nodes), "--node-rank", str(place.node), "--rdzv-conf", f"timeout={timeout}"]
        where += ["--master-addr", place.address, "--master-port", str(place.port)]
    options = get_args_parser().parse_args(
        [*where, "--nproc-per-node", str(place.local_world_size), "--module", "pn_fairseq"]
    )
    options.training_script_args = ["train", *arguments]  # torchrun's parser would take --run for one of its own
    try:
        with mock.patch.dict(os.environ, PN_FAIRSEQ_STEP="1"):  # this process tells of an interruption, not its ranks
            run(options)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        if failure.exitcode in (130, 143):
            raise Interrupted(failure.exitcode - 128) from error
        if failure.exitcode == 2:
            return 2  # a mistake of the user, which the rank has already named
        how = f"was killed by {signal.Signals(-failure.exitcode).name}" if failure.exitcode < 0 else "failed"
        raise TrainingFailed(f"rank {rank} {how}, and all ranks were stopped") from error
    except SignalException as error:
        raise Interrupted(int(error.sigval)) from error
    except torch.distributed.DistError as error:
        raise UserError(
            f"the {place.nodes} machines did not find each other at {place.address}:{place.port} within {timeout} "
            f"seconds (NNODES, MASTER_ADDR, MASTER_PORT, START_TIMEOUT): {str(error).splitlines()[0]}"
        ) from error
    return 0


class TrainingFailed(Exception):
    """The training ended by an error that is not a mistake of the user; the text is one line."""
