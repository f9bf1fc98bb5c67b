"""train.sh on several workers and machines, by itself and under SLURM, and fairseq-hydra-train by itself."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from pn_fairseq.checkpoints import load_checkpoint
from pn_fairseq.cli import UserError
from pn_fairseq.training_log import read_log

from .scripts_helpers import ROOT, SCRIPTS, assert_refused, environment, run

sys.path.insert(0, str(SCRIPTS / "lib"))
from compose import Batches, compose_batches, spread  # noqa: E402 (a script's library, not a package)
from machines import Place, agree, find_place  # noqa: E402

#: Without dropout, whose masks depend on how the batches lie, an update is the same sum on any number of workers.
SETTINGS = (
    *("tokens_per_update=1600", "dataset.max_tokens=400", "model.dropout=0", "model._name=transformer_ln_tiny"),
    *("checkpoint.save_interval_updates=4", "common.log_interval=1", "lr_scheduler.warmup_updates=10"),
)


def free_port() -> int:
    with socket.create_server(("localhost", 0)) as server:
        return server.getsockname()[1]


def command(data: Path, where: Path, *overrides: str) -> list:
    return ["bash", SCRIPTS / "train.sh", "verses_es_en", "--data", data, "--run", where, *SETTINGS, *overrides]


def start(data: Path, where: Path, *overrides: str, **changes: str) -> subprocess.Popen:
    """train.sh in the background, in a process group of its own, as a shell or SLURM starts it."""
    return subprocess.Popen(
        list(map(str, command(data, where, *overrides))),
        env=environment(**changes),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def finish(*processes: subprocess.Popen) -> list[tuple[int, str]]:
    """Exit codes and what was said, once all have ended; none is left behind if the test fails."""
    try:
        outputs = [process.communicate(timeout=300) for process in processes]
    finally:
        for process in processes:
            process.kill()
    return [(process.returncode, out + err) for process, (out, err) in zip(processes, outputs, strict=True)]


def workers_of(where: Path) -> list[int]:
    """Processes that name the run directory on their command line, and so train there."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            words = (entry / "cmdline").read_bytes()
        except OSError:
            continue
        if str(where).encode() in words and entry.name != str(os.getpid()):
            found.append(int(entry.name))
    return found


def gone(where: Path, seconds: float = 10) -> bool:
    deadline = time.monotonic() + seconds
    while workers_of(where) and time.monotonic() < deadline:
        time.sleep(0.1)
    return not workers_of(where)


def wait_for(condition, processes, seconds: float = 200) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it took too long"
        ended = [process.communicate() for process in processes if process.poll() is not None]
        assert not ended, ended
        time.sleep(0.01)


def curve(where: Path) -> dict[int, float]:
    return read_log(where / "train.log").train


def starts(where: Path) -> list[dict]:
    return [json.loads(line) for line in (where / "starts.jsonl").read_text("utf-8").splitlines()]


# --- Two machines -----------------------------------------------------------------------------------------------------


def machine(data: Path, where: Path, rank: int, port: int, *overrides: str) -> subprocess.Popen:
    place = {"NNODES": "2", "NODE_RANK": str(rank), "MASTER_ADDR": "localhost", "MASTER_PORT": str(port), "NPROC": "2"}
    return start(data, where, *overrides, **place)


@pytest.fixture(scope="module")
def killed(data, tmp_path_factory):
    """Two machines of two workers each, one of which is killed after a checkpoint: the run, and how both ended."""
    where, port = tmp_path_factory.mktemp("several") / "run", free_port()
    both = [machine(data, where, rank, port, "optimization.max_update=400") for rank in (1, 0)]
    wait_for(lambda: (where / "checkpoints/checkpoint_last.pt").exists(), both)
    workers = [pid for pid in workers_of(where) if b"worker.py" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    agents = [pid for pid in workers_of(where) if os.getpgid(pid) == both[0].pid]
    of_machine_1 = [pid for pid in workers if int(Path(f"/proc/{pid}/stat").read_text().split()[3]) in agents]
    assert len(of_machine_1) == 2, (workers, agents)
    os.kill(of_machine_1[0], signal.SIGKILL)
    return where, finish(*both)


@pytest.fixture(scope="module")
def resumed(killed, data):
    """The same run, gone on with under SLURM by two tasks of one worker each."""
    where, _ = killed
    tools = where.parent / "slurm"
    tools.mkdir()
    (tools / "scontrol").write_text(
        '#!/bin/sh\n[ "$*" = "show hostnames node[1-2]" ] && printf "localhost\\nelsewhere\\n"\n'
    )
    (tools / "scontrol").chmod(0o755)
    last = load_checkpoint(where / "checkpoints/checkpoint_last.pt")["optimizer_history"][-1]["num_updates"]
    tasks = [
        start(
            *(data, where, f"optimization.max_update={last + 3}"),
            **{"SLURM_JOB_ID": str(os.getpid()), "SLURM_STEP_ID": "0", "SLURM_NNODES": "2", "MASTER_PORT": str(free)},
            **{"SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": str(rank), "SLURM_NODEID": str(rank), "SLURM_LOCALID": "0"},
            **{"SLURM_STEP_TASKS_PER_NODE": "1(x2)", "SLURM_STEP_NODELIST": "node[1-2]"},
            **{"PATH": f"{tools}:{environment()['PATH']}"},
        )
        for free in [free_port()]
        for rank in range(2)
    ]
    return last, finish(*tasks)


def test_if_one_worker_dies_all_stop(killed):
    where, ends = killed
    assert gone(where)
    for code, said in ends:
        assert code == 1, said
        assert re.search(r"^train.sh: error: worker \d (was ended by|failed)", said, re.M), said
    assert "was ended by SIGKILL" in ends[0][1]


def test_several_machines_learn_what_one_worker_does(killed, resumed, data, tmp_path):
    """Also after the resumption on other workers, in the middle of an epoch.

    The losses are sums over the same sentences in another order, in float32: they agree to the last digit that fairseq
    logs, 0.001 bits, give or take one for rounding.
    """
    where, _ = killed
    last, ends = resumed
    assert [code for code, _ in ends] == [0, 0], ends
    assert f"epoch 1 @ {last} updates" in ends[0][1]
    run(*command(data, tmp_path / "one", f"optimization.max_update={last + 3}"))
    several, one = curve(where), curve(tmp_path / "one")
    assert one.keys() == set(range(1, last + 4)) <= several.keys() and one[last + 3] < one[1] - 1
    assert {update: several[update] for update in one} == pytest.approx(one, abs=0.0015)
    valid, alone = read_log(where / "train.log").valid, read_log(tmp_path / "one/train.log").valid
    assert {update: valid[update] for update in alone} == pytest.approx(alone, abs=0.0015)


def test_each_start_is_written_down(killed, resumed):
    first, second = starts(killed[0])
    assert (first["workers"], first["update_freq"], second["workers"], second["update_freq"]) == (4, 1, 2, 2)
    for record in (first, second):
        assert (record["max_tokens"], record["tokens_per_update"]) == (400, 1600)
        assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\+00:00", record["started"]) and record["torch"]
    assert [part["workers"] for part in first["machines"]] == [2, 2]


@pytest.mark.slow
@pytest.mark.parametrize("overrides", [("model._name=transformer_pnv_tiny", "+model.norm_sync=off")], ids=["PN-V"])
def test_statistics_of_one_batch_each_do_not_see_the_workers(overrides, data, tmp_path):
    """A norm that takes the statistics of a worker's own batch has the same batches on four workers as on one.

    What is kept running differs (each worker has its own), and with it validation.
    """
    port = free_port()
    few = (*overrides, "optimization.max_update=6")
    ends = finish(*[machine(data, tmp_path / "several", rank, port, *few) for rank in (0, 1)])
    assert [code for code, _ in ends] == [0, 0], ends
    run(*command(data, tmp_path / "one", *few))
    assert curve(tmp_path / "several") == pytest.approx(curve(tmp_path / "one"), abs=0.0015)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sent", "code"),
    [(signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGKILL, -9)],
    ids=lambda value: getattr(value, "name", None),
)
def test_a_signal_ends_all_workers(sent, code, data, tmp_path):
    """SIGTERM is what SLURM pre-empts with; after SIGKILL nothing can be said, but nothing may be left either."""
    where = tmp_path / "run"
    process = start(data, where, NPROC="2")
    wait_for(lambda: (where / "checkpoints/checkpoint_last.pt").exists(), [process])
    process.send_signal(sent)
    ((ended, said),) = finish(process)
    assert ended == code, said
    assert gone(where)
    if code > 0:
        assert f"train.sh: error: ended by {sent.name}" in said


@pytest.mark.slow
def test_two_trainings_in_one_run_are_refused(data, tmp_path):
    where = tmp_path / "run"
    first = start(data, where)
    wait_for((where / "train.log").exists, [first])
    second = run(*command(data, where), check=False)
    assert_refused(second, str(where), "another process")
    first.terminate()
    finish(first)


# --- Where a start stands ---------------------------------------------------------------------------------------------

TORCH = {"NNODES": "3", "NODE_RANK": "1", "MASTER_ADDR": "head"}
STEP = {
    **{"SLURM_JOB_ID": "100", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "3"},
    **{"SLURM_NODEID": "1", "SLURM_LOCALID": "1", "SLURM_STEP_TASKS_PER_NODE": "2(x2)", "SLURM_STEP_NODELIST": "head"},
}


@pytest.mark.parametrize(
    ("env", "gpus", "place"),
    [
        ({}, 0, Place(1, 0, 1, False)),
        ({}, 8, Place(1, 0, 8, True)),
        ({"NPROC": "2"}, 0, Place(1, 0, 2, False)),
        ({"NPROC": "2"}, 8, Place(1, 0, 2, True)),
        ({"MASTER_ADDR": "left over"}, 1, Place(1, 0, 1, True)),
        (TORCH, 2, Place(3, 1, 2, True, None, "head", 29500)),
        ({**TORCH, "MASTER_PORT": "1234", "NPROC": "3"}, 0, Place(3, 1, 3, False, None, "head", 1234)),
        ({"NNODES": "1"}, 0, Place(1, 0, 1, False)),
        ({**STEP, **TORCH}, 0, Place(3, 1, 1, False, None, "head", 29500)),
        # One task per GPU: all GPUs are visible to both tasks, or each sees its own.
        (STEP, 2, Place(4, 3, 1, True, 1, "head", 21600)),
        (STEP, 1, Place(4, 3, 1, True, None, "head", 21600)),
        ({**STEP, "SLURM_GPUS_PER_TASK": "4"}, 4, Place(4, 3, 4, True, None, "head", 21600)),
        # One task per machine.
        (
            {**STEP, "SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1", "SLURM_STEP_TASKS_PER_NODE": "1(x2)"},
            8,
            Place(2, 1, 8, True, None, "head", 21600),
        ),
        # A shell on one machine of an allocation, and a batch job of one machine.
        ({**STEP, "SLURM_STEP_NUM_TASKS": "1"}, 8, Place(1, 0, 8, True)),
        ({"SLURM_JOB_ID": "100", "SLURM_NNODES": "1", "SLURM_NTASKS": "8"}, 8, Place(1, 0, 8, True)),
    ],
)
def test_the_place_of_a_start(env, gpus, place):
    assert find_place(env, gpus) == place


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
        ({"TORCHELASTIC_RUN_ID": "none", "RANK": "0"}, 0, ("torchrun",)),
        ({"SLURM_JOB_ID": "100", "SLURM_NNODES": "2"}, 8, ("2 machines", "srun")),
        (STEP, 8, ("2 tasks", "8 visible GPUs")),
        ({**STEP, "NPROC": "2"}, 2, ("NPROC=2", "one worker")),
        ({**STEP, "SLURM_STEP_NODELIST": "node[1-2]"}, 2, ("scontrol", "MASTER_ADDR")),
        ({**STEP, "SLURM_STEP_TASKS_PER_NODE": "many"}, 2, ("SLURM_STEP_TASKS_PER_NODE", "many")),
    ],
)
def test_what_is_missing_or_contradicts_itself(env, gpus, needles):
    with pytest.raises(UserError) as caught:
        find_place(env, gpus)
    for needle in needles:
        assert needle in str(caught.value)


def test_mistakes_get_one_line_before_anything_is_made(data, tmp_path):
    result = run(*command(data, tmp_path / "run"), check=False, NNODES="2", NODE_RANK="0")
    assert_refused(result, "MASTER_ADDR")
    assert not (tmp_path / "run").exists()


# --- One decision for all ---------------------------------------------------------------------------------------------


def together(*members: tuple[Place, dict], decide=lambda known: {"known": known}) -> list:
    """``agree`` of several starts at once: what each returns, or its UserError."""
    results = [None] * len(members)

    def take_part(number: int) -> None:
        place, mine = members[number]
        try:
            results[number] = agree(place, mine, decide)
        except UserError as error:
            results[number] = error

    threads = [threading.Thread(target=take_part, args=(number,)) for number in range(len(members))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    return results


def member(rank: int, port: int, starts: int = 3, same: str = "x", timeout: float = 5) -> tuple[Place, dict]:
    return Place(starts, rank, rank + 1, False, None, "localhost", port, timeout), {"same": same, "workers": rank + 1}


def test_the_first_start_decides_for_all():
    port = free_port()
    results = together(*(member(rank, port) for rank in (2, 0, 1)))
    assert results == [{"known": [{"same": "x", "workers": rank + 1} for rank in range(3)]}] * 3
    socket.create_server(("localhost", port)).close()  # free again, for torchrun


def test_a_refusal_of_the_first_reaches_all():
    def decide(known):
        raise UserError("common.sed is no setting")

    port = free_port()
    results = together(*(member(rank, port, 2) for rank in range(2)), decide=decide)
    assert all(isinstance(result, UserError) and "common.sed is no setting" in str(result) for result in results)


@pytest.mark.parametrize(
    ("others", "needle"),
    [
        ([{"rank": 1, "same": "y"}, {"rank": 2}], "another command"),
        ([{"rank": 1}, {"rank": 1}], "started twice"),
        ([{"rank": 1, "starts": 2}, {"rank": 2}], "one of 2"),
        ([{"rank": 1}], "number 2 of 3 did not start within 1 seconds"),
    ],
    ids=["another command", "twice", "another number", "missing"],
)
def test_starts_that_do_not_fit_together(others, needle):
    port = free_port()
    first, *rest = together(member(0, port, timeout=1), *(member(port=port, timeout=1, **other) for other in others))
    assert isinstance(first, UserError) and needle in str(first)
    assert all(isinstance(result, UserError) for result in rest)


def test_a_stranger_at_the_port_is_sent_away():
    port = free_port()

    def knock():
        while True:
            try:
                with socket.create_connection(("localhost", port), timeout=5) as connection:
                    return connection.sendall(b"GET / HTTP/1.0\r\n\r\n")
            except ConnectionRefusedError:
                time.sleep(0.01)

    stranger = threading.Thread(target=knock)
    stranger.start()
    lead = threading.Thread(target=lambda: results.append(agree(*member(0, port, 2), lambda known: {"n": len(known)})))
    results = []
    lead.start()
    stranger.join(20)
    assert agree(*member(1, port, 2), None) == {"n": 2}
    lead.join(20)
    assert results == [{"n": 2}]


def test_nobody_at_the_port_and_a_port_that_is_taken():
    with pytest.raises(UserError, match="did not answer.*START_TIMEOUT"):
        agree(*member(1, free_port(), timeout=0.1), None)
    with socket.create_server(("", 0)) as server, pytest.raises(UserError, match="MASTER_PORT"):
        agree(*member(0, server.getsockname()[1]), None)
    with pytest.raises(UserError, match="no machine"):
        place, mine = member(1, 1)
        agree(Place(**{**vars(place), "address": "no.such.host.invalid"}), mine, None)


# --- Tokens per update ------------------------------------------------------------------------------------------------


def test_tokens_per_update_are_kept_on_any_number_of_workers():
    for tokens in (4096, 1600, 524288, 1000):
        for cap in (4096, 400, 333):
            for workers in range(1, 20):
                batches = spread(tokens, cap, workers)
                taken = workers * batches.update_freq * batches.max_tokens
                # Nearly all of them: less than one is lost in each batch, and none where it divides.
                assert tokens - workers * batches.update_freq < taken <= tokens
                assert batches.max_tokens <= cap
                assert batches.update_freq == 1 or workers * (batches.update_freq - 1) * cap < tokens
                if tokens % (workers * cap) == 0:
                    assert batches.max_tokens == cap
    with pytest.raises(UserError, match="too few"):
        spread(3, 400, 4)


@pytest.mark.parametrize(
    ("overrides", "workers", "expected"),
    [
        ((), 1, Batches(1, 1, 2048, 2048)),
        ((), 4, Batches(4, 1, 512, 2048)),
        ((), 3, Batches(3, 1, 682, 2048)),
        (("dataset.max_tokens=512",), 2, Batches(2, 2, 512, 2048)),
        (("dataset.max_tokens=500",), 1, Batches(1, 5, 409, 2048)),
        (("tokens_per_update=8192",), 2, Batches(2, 2, 2048, 8192)),
        (("optimization.update_freq=[4]",), 2, Batches(2, 2, 2048, 8192)),
        (("optimization.update_freq=[4]", "dataset.max_tokens=100"), 4, Batches(4, 1, 100, 400)),
    ],
)
def test_what_an_override_means(overrides, workers, expected):
    config = ROOT / "configs/verses_es_en.yaml"
    assert compose_batches(config, ["task.data=/data", *overrides], workers) == expected


def test_a_config_without_tokens_per_update_states_it_for_one_worker(tmp_path):
    own = tmp_path / "own.yaml"
    text = (ROOT / "configs/verses_es_en.yaml").read_text("utf-8")
    own.write_text(text.partition("# Tokens per update")[0].replace("update_freq: [1]", "update_freq: [3]"))
    assert compose_batches(own, ["task.data=/data"], 2) == Batches(2, 2, 1536, 6144)
    assert compose_batches(own, ["task.data=/data", "dataset.max_tokens=1024"], 2) == Batches(2, 3, 1024, 6144)


@pytest.mark.parametrize(
    ("overrides", "workers", "needle"),
    [
        (("tokens_per_update=0",), 1, "tokens_per_update=0"),
        (("tokens_per_update=many",), 1, "tokens_per_update=many"),
        (("tokens_per_update=400", "optimization.update_freq=[2]"), 1, "the same thing"),
        (("optimization.update_freq=[1,2]",), 1, "update_freq"),
        (("dataset.batch_size=8",), 2, "dataset.batch_size"),
        (("distributed_training.distributed_world_size=2",), 1, "NPROC"),
    ],
)
def test_batches_that_are_refused(overrides, workers, needle):
    with pytest.raises(UserError, match=re.escape(needle)):
        compose_batches(ROOT / "configs/verses_es_en.yaml", ["task.data=/data", *overrides], workers)


def test_a_batch_that_is_too_small_for_a_sentence_says_what_to_do(data, tmp_path):
    few = command(data, tmp_path / "run", "tokens_per_update=60")
    result = run(*few, check=False, NPROC="4")
    assert_refused(result, "train.es", "4 workers x 15 tokens", "fewer workers")
    assert not (tmp_path / "run").exists()


# --- fairseq-hydra-train by itself ------------------------------------------------------------------------------------


def test_a_sweep_over_norms(data, tmp_path):
    """Jobs of one process: each has checkpoints, log and best loss of its own."""
    sweep = (
        *("fairseq-hydra-train", "-m", "--config-dir", ROOT / "configs", "--config-name", "verses_es_en"),
        *(f"task.data={data}/bin", f"common.user_dir={ROOT}/pn_fairseq", "dataset.max_tokens=400"),
        *("model._name=transformer_ln_tiny,transformer_pn_tiny", "optimization.max_update=2", "common.log_interval=1"),
    )
    run(*sweep, cwd=tmp_path)
    jobs = sorted((tmp_path / "runs/hydra/verses_es_en").glob("*model._name=*"))
    assert [re.search(r"transformer_\w+", job.name)[0] for job in jobs] == [
        "transformer_ln_tiny",
        "transformer_pn_tiny",
    ]
    for job, power in zip(jobs, (False, True), strict=True):
        assert list(curve(job)) == [1, 2]
        log = (job / "train.log").read_text("utf-8")
        records = [line for line in log.splitlines() if '"update"' in line]
        assert len(records) == 2 and log.count("done training") == 1
        assert any((job / "tensorboard").rglob("events.*"))
        last, best = (load_checkpoint(job / f"checkpoints/checkpoint_{name}.pt") for name in ("last", "best"))
        assert any(key.endswith("running_psi2") for key in last["model"]) is power
        assert last["extra_state"]["best"] == best["extra_state"]["val_loss"] == last["extra_state"]["val_loss"]
