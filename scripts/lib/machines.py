"""Where one start of train.sh stands among all that make up a training, and how the first tells the others what to do.

A training is started once on each machine, or once for each GPU by SLURM. The first start looks at the settings and the
run directory, alone, so that no two can disagree about what they saw; the others wait for its word.
"""

import contextlib
import json
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from pn_fairseq.cli import UserError

DEFAULT_PORT = 29500
#: Seconds that the starts wait for each other.
DEFAULT_TIMEOUT = 600


@dataclass(frozen=True)
class Place:
    """One start among ``starts``.

    Attributes:
        starts, rank: how many starts there are, and which this is.
        workers: how many workers this one runs.
        gpu: whether they run on GPUs.
        device: the only GPU to use, where another start uses the others of this machine; None: the first ones.
        address, port: where the first start is reached; empty and 0 where it is alone.
        timeout: seconds that the starts wait for each other.
    """

    starts: int
    rank: int
    workers: int
    gpu: bool
    device: int | None = None
    address: str = ""
    port: int = 0
    timeout: float = DEFAULT_TIMEOUT


def find_place(env: Mapping[str, str], gpus: int) -> Place:
    """Read the place of this start from environment variables, with ``gpus`` GPUs to be seen.

    Raises:
        UserError: a variable is missing, is not what it should be, or contradicts another.
    """
    if "TORCHELASTIC_RUN_ID" in env:
        raise UserError("do not start it with torchrun, which it calls itself: NPROC, NNODES and so on say how many")
    timeout = _whole(env, "START_TIMEOUT", DEFAULT_TIMEOUT, least=1)
    if "NNODES" in env:
        return _from_torch(env, gpus, timeout)
    if "NODE_RANK" in env:
        raise UserError("NODE_RANK is set but NNODES is not: how many machines are there?")
    if "SLURM_JOB_ID" in env:
        return _from_slurm(env, gpus, timeout)
    return Place(1, 0, _workers(env, gpus), gpus > 0, timeout=timeout)


def _whole(env: Mapping[str, str], name: str, default: int | None = None, least: int = 0) -> int:
    text = env.get(name)
    if text is None and default is not None:
        return default
    if text is None or not re.fullmatch(r"\d+", text) or int(text) < least:
        said = "is not set" if text is None else f"must be a whole number of at least {least}, not '{text}'"
        raise UserError(f"{name} {said}")
    return int(text)


def _port(env: Mapping[str, str], default: int) -> int:
    port = _whole(env, "MASTER_PORT", default, least=1)
    if port > 65535:
        raise UserError(f"MASTER_PORT must be at most 65535, not '{port}'")
    return port


def _workers(env: Mapping[str, str], gpus: int) -> int:
    """How many workers: one per GPU, one where there is none, or NPROC."""
    workers = _whole(env, "NPROC", max(1, gpus), least=1)
    if gpus and workers > gpus:
        raise UserError(
            f"NPROC={workers}, but {gpus} GPU{'s are' if gpus > 1 else ' is'} visible, and a GPU takes one worker "
            "(CUDA_VISIBLE_DEVICES= trains on the CPU)"
        )
    return workers


def _from_torch(env: Mapping[str, str], gpus: int, timeout: float) -> Place:
    """NNODES, NODE_RANK, MASTER_ADDR and MASTER_PORT, as torchrun has them."""
    starts = _whole(env, "NNODES", least=1)
    if starts > 1 and "NODE_RANK" not in env:
        raise UserError(f"NNODES={starts} needs NODE_RANK, 0 to {starts - 1}: which machine is this?")
    rank = _whole(env, "NODE_RANK", 0)
    if rank >= starts:
        raise UserError(f"NODE_RANK={rank} is too large: NNODES={starts} machines are numbered 0 to {starts - 1}")
    workers = _workers(env, gpus)
    if starts == 1:
        return Place(1, 0, workers, gpus > 0, timeout=timeout)
    if not env.get("MASTER_ADDR"):
        raise UserError(f"NNODES={starts} needs MASTER_ADDR, the name or address of the machine with NODE_RANK=0")
    return Place(starts, rank, workers, gpus > 0, None, env["MASTER_ADDR"], _port(env, DEFAULT_PORT), timeout)


def _from_slurm(env: Mapping[str, str], gpus: int, timeout: float) -> Place:
    """A step of srun with one task per machine or one per GPU; outside of a step, one machine."""
    if "SLURM_STEP_NUM_TASKS" not in env:  # srun sets it; a batch script has only what it asked for
        nodes = _whole(env, "SLURM_JOB_NUM_NODES", _whole(env, "SLURM_NNODES", 1))
        if nodes > 1:
            raise UserError(
                f"this SLURM job has {nodes} machines, and only one would train: "
                "call it by 'srun --ntasks-per-node=1 scripts/train.sh ...'"
            )
        return Place(1, 0, _workers(env, gpus), gpus > 0, timeout=timeout)
    tasks = _whole(env, "SLURM_STEP_NUM_TASKS", least=1)
    if tasks == 1:
        return Place(1, 0, _workers(env, gpus), gpus > 0, timeout=timeout)
    rank, node = _whole(env, "SLURM_PROCID"), _whole(env, "SLURM_NODEID")
    if rank >= tasks:
        raise UserError(f"SLURM_PROCID={rank} is too large for {tasks} tasks")
    here = _tasks_per_node(env)
    if node >= len(here):
        raise UserError(f"SLURM_NODEID={node} is too large: SLURM_STEP_TASKS_PER_NODE names {len(here)} machines")
    address = env.get("MASTER_ADDR") or _first_host(env)
    # The steps of a job may train side by side.
    chosen = 20000 + (16 * _whole(env, "SLURM_JOB_ID") + _whole(env, "SLURM_STEP_ID", 0)) % 20000
    device = None
    if here[node] == 1 or gpus <= 1 or "SLURM_GPUS_PER_TASK" in env:
        # On a CPU, tasks beside each other are one worker each unless NPROC says otherwise.
        workers = _workers(env, gpus)
    elif gpus == here[node]:
        workers, device = 1, _whole(env, "SLURM_LOCALID")
        if _whole(env, "NPROC", 1) != 1:
            raise UserError(f"NPROC={env['NPROC']}, but with {here[node]} tasks on {gpus} GPUs each has one worker")
    else:
        raise UserError(
            f"{here[node]} tasks on a machine with {gpus} visible GPUs: start one task per machine "
            "(srun --ntasks-per-node=1) or one per GPU"
        )
    return Place(tasks, rank, workers, gpus > 0, device, address, _port(env, chosen), timeout)


def _tasks_per_node(env: Mapping[str, str]) -> list[int]:
    """How many tasks each machine has, from SLURM's notation: 2(x3),1 is 2, 2, 2, 1."""
    text = env.get("SLURM_STEP_TASKS_PER_NODE") or env.get("SLURM_TASKS_PER_NODE") or ""
    counts = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if not match:
            raise UserError(f"SLURM_STEP_TASKS_PER_NODE='{text}' is not how SLURM counts tasks, as in 2(x3),1")
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def _first_host(env: Mapping[str, str]) -> str:
    names = env.get("SLURM_STEP_NODELIST") or env.get("SLURM_JOB_NODELIST")
    if not names:
        raise UserError("SLURM_STEP_NODELIST is not set: say with MASTER_ADDR where the first task runs")
    if not re.search(r"[\[,]", names):
        return names
    try:
        command = ["scontrol", "show", "hostnames", names]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout.split()[0]
    except (OSError, subprocess.SubprocessError, IndexError):
        raise UserError(
            f"'scontrol show hostnames {names}' does not work here: say with MASTER_ADDR where the first task runs"
        ) from None


def agree(place: Place, mine: dict, decide: Callable[[list[dict]], dict]) -> dict:
    """What the first start decides, on every start.

    Args:
        place: where this start stands.
        mine: what the first start has to know of this one. All must have the same ``"same"``.
        decide: called on the first start alone, with the ``mine`` of all by rank; its result goes to all.

    Raises:
        UserError: the starts do not fit together or do not find each other, or ``decide`` raised it; it is then raised
            on every start that was heard of.
    """
    if place.starts == 1:
        return decide([mine])
    return _lead(place, mine, decide) if place.rank == 0 else _follow(place, mine)


def _lead(place: Place, mine: dict, decide: Callable[[list[dict]], dict]) -> dict:
    with contextlib.ExitStack() as stack:
        answer = {"refused": "the first machine was stopped before the training began"}
        others: list[tuple[socket.socket, dict]] = []

        def tell() -> None:
            for connection, _ in others:
                with contextlib.suppress(OSError), connection:
                    connection.sendall(json.dumps(answer).encode() + b"\n")

        stack.callback(tell)
        try:
            known = _gather(place, mine, others)
            answer = {"decided": decide(known)}
        except UserError as error:
            answer = {"refused": str(error)}
            raise
        return answer["decided"]


def _gather(place: Place, mine: dict, others: list) -> list[dict]:
    """Hear all other starts. The port is free again on return, so that torch can have it."""
    known = {0: mine}
    deadline = time.monotonic() + place.timeout
    try:
        dual = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if dual else socket.AF_INET
        server = socket.create_server(("", place.port), family=family, dualstack_ipv6=dual, backlog=1024)
    except OSError as error:
        raise UserError(f"port {place.port} cannot be used ({error.strerror}): name another with MASTER_PORT") from None
    with server:
        while len(known) < place.starts:
            server.settimeout(max(deadline - time.monotonic(), 0.01))
            try:
                connection, _ = server.accept()
            except TimeoutError:
                missing = ", ".join(str(rank) for rank in range(place.starts) if rank not in known)
                raise UserError(
                    f"number {missing} of {place.starts} did not start within {place.timeout:.0f} seconds "
                    "(numbers begin with 0; START_TIMEOUT says how long to wait)"
                ) from None
            try:
                connection.settimeout(10)
                with connection.makefile("rb") as lines:
                    heard = json.loads(lines.readline(1_000_000))
                rank, starts, theirs = int(heard["rank"]), int(heard["starts"]), dict(heard["mine"])
                connection.settimeout(None)
            except (OSError, ValueError, KeyError, TypeError):
                connection.close()  # somebody else's, such as a scan of the ports
                continue
            others.append((connection, theirs))
            if starts != place.starts:
                raise UserError(f"number {rank} was started as one of {starts}, the first as one of {place.starts}")
            if rank in known or not 0 < rank < starts:
                raise UserError(f"number {rank} was started twice: each machine needs a NODE_RANK of its own")
            if theirs["same"] != mine["same"]:
                raise UserError(f"number {rank} was started with another command or other files than the first")
            known[rank] = theirs
    return [known[rank] for rank in range(place.starts)]


def _follow(place: Place, mine: dict) -> dict:
    deadline = time.monotonic() + place.timeout
    where = f"{place.address}:{place.port}"
    while True:
        try:
            connection = socket.create_connection((place.address, place.port), timeout=5)
            break
        except socket.gaierror:
            raise UserError(f"there is no machine '{place.address}' (MASTER_ADDR)") from None
        except OSError as error:
            if time.monotonic() > deadline:
                raise UserError(
                    f"the first machine did not answer at {where} within {place.timeout:.0f} seconds "
                    f"({error.strerror or error}); START_TIMEOUT says how long to wait"
                ) from None
            time.sleep(0.2)
    with connection:
        connection.settimeout(None)
        # Found out by the system if the first machine goes down without a word.
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        try:
            message = {"rank": place.rank, "starts": place.starts, "mine": mine}
            connection.sendall(json.dumps(message).encode() + b"\n")
            with connection.makefile("rb") as lines:
                answer = json.loads(lines.readline())
        except (OSError, ValueError):
            raise UserError(f"the first machine ({where}) was stopped before the training began") from None
    if "refused" in answer:
        raise UserError(f"{answer['refused']} (said the first machine, {where})")
    return answer["decided"]


def own_cores() -> int:
    """How many cores this process may use."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
