"""pn train on several ranks of one machine, and under torchrun on several, by gloo on CPUs."""

import contextlib
import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from pn_fairseq.common.checkpoints import load_checkpoint
from pn_fairseq.common.command import UserError
from pn_fairseq.pipeline.launch import RankLayout, find_layout
from pn_fairseq.pipeline.training_log import read_log

from ..docs.pages import blocks
from ..fixtures.slurm import Slurm, slurm  # noqa: F401
from ..scripts_helpers import ROOT, SCRIPTS, environment, run, verb, wait_for

#: Without dropout, whose masks depend on the shape of the batches, an update is the same sum on any
#: number of ranks.
SETTINGS = """
tokens_per_update=1600 dataset.max_tokens=400 model.dropout=0 model._name=transformer_ln_tiny
checkpoint.save_interval_updates=4 common.log_interval=1 lr_scheduler.warmup_updates=10
""".split()


def free_port() -> int:
    with socket.create_server(("localhost", 0)) as server:
        return server.getsockname()[1]


def arguments(data: Path, where: Path, *overrides: str) -> list[str]:
    words = ("verses_es_en", "--data", data, "--run", where, *SETTINGS, *overrides)
    return [str(word) for word in words]


def start(
    data: Path,
    where: Path,
    *overrides: str,
    launcher=("bash", SCRIPTS / "train.sh"),
    **changes: str,
):
    """pn train in the background, in a process group of its own, as a shell or SLURM starts it."""
    return subprocess.Popen(
        [*map(str, launcher), *arguments(data, where, *overrides)],
        env=environment(CUDA_VISIBLE_DEVICES="", **changes),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def finish(*processes: subprocess.Popen) -> list[tuple[int, str]]:
    """Exit codes and output of all processes; none is left running if the test fails."""
    try:
        outputs = [process.communicate(timeout=400) for process in processes]
    finally:
        for process in processes:
            process.kill()
    codes = [process.returncode for process in processes]
    return [(code, out + err) for code, (out, err) in zip(codes, outputs, strict=True)]


def ranks_of(where: Path) -> list[int]:
    """Processes that name the run directory on their command line, and so train there."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if str(where).encode() in (entry / "cmdline").read_bytes():
                found.append(int(entry.name))
    return [pid for pid in found if pid != os.getpid()]


def records(where: Path) -> list[dict]:
    return [json.loads(line) for line in (where / "starts.jsonl").read_text("utf-8").splitlines()]


def updates_of(where: Path) -> int:
    state = load_checkpoint(where / "checkpoints/checkpoint_last.pt")
    return state["optimizer_history"][-1]["num_updates"]


def assert_same_curves(several: Path, one: Path) -> None:
    """The losses are sums over the same sentences in another order: equal to fairseq's last
    digit, give or take one.
    """
    ours, theirs = read_log(several / "train.log"), read_log(one / "train.log")
    assert theirs.train
    for mine, expected in ((ours.train, theirs.train), (ours.valid, theirs.valid)):
        assert {update: mine[update] for update in expected} == pytest.approx(expected, abs=0.0015)


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


def test_more_ranks_than_gpus_and_machines_that_are_no_number_are_refused():
    for env, ranks, needle in (
        ({}, 3, "--ranks 3, but 2 GPUs"),
        ({"PET_NNODES": "1:4"}, None, "PET_NNODES=1:4: "),
        ({"PET_NNODES": "0"}, None, "PET_NNODES=0: "),
    ):
        with pytest.raises(UserError, match=needle):
            find_layout(env, 2, ranks)


@pytest.mark.ci
def test_two_ranks_learn_what_one_does(data, tmp_path, monkeypatch, capsys):
    where = tmp_path / "run"
    words = arguments(data, where, "optimization.max_update=2", "--ranks", "2")
    run("pn", "train", *words, CUDA_VISIBLE_DEVICES="")
    train_on_one_rank(data, monkeypatch, capsys, 2, tmp_path / "one")
    assert_same_curves(where, tmp_path / "one")
    (record,) = records(where)
    assert record["world_size"] == record["update_freq"] == record["ranks_of_this_machine"] == 2
    assert (record["max_tokens"], record["tokens_per_update"]) == (400, 1600)


def train_on_one_rank(data, monkeypatch, capsys, updates: int, *folders: Path) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    for folder in folders:
        code = verb("train")(arguments(data, folder, f"optimization.max_update={updates}"))
        assert code == 0, capsys.readouterr().err


@pytest.mark.slow
def test_two_ranks_stop_if_one_dies_and_one_resumes(data, tmp_path, monkeypatch, capsys):
    where = tmp_path / "run"
    process = start(data, where, "optimization.max_update=400", "--ranks", "2")
    wait_for((where / "checkpoints/checkpoint_last.pt").exists, process)
    victim = max(pid for pid in ranks_of(where) if pid != process.pid)
    os.kill(victim, signal.SIGKILL)
    ((code, stderr),) = finish(process)
    assert code == 1
    wait_for(lambda: not ranks_of(where), seconds=20)
    killed = r"^pn train: error: rank \d was killed by SIGKILL, and all .* to resume$"
    assert re.search(killed, stderr, re.M), stderr

    train_on_one_rank(data, monkeypatch, capsys, updates_of(where) + 2, where, tmp_path / "one")
    assert_same_curves(where, tmp_path / "one")
    first, second = records(where)
    assert (first["world_size"], first["update_freq"]) == (2, 2)
    assert (second["world_size"], second["update_freq"]) == (1, 4)


def machine(
    data: Path, where: Path, rank: int, port: int, *overrides: str, ranks: int = 1
) -> subprocess.Popen:
    """torchrun as the user starts it on one of two machines (docs/several_gpus.md)."""
    options = (
        f"--nnodes 2 --node-rank {rank} --nproc-per-node {ranks} --master-addr localhost "
        f"--master-port {port}"
    )
    launcher = ("torchrun", *options.split(), "-m", "--", "pn_fairseq", "train")
    return start(data, where, *overrides, launcher=launcher)


@pytest.mark.slow
def test_two_machines_of_two_ranks(data, tmp_path):
    where, port = tmp_path / "run", free_port()
    few = "optimization.max_update=4"
    machines = [machine(data, where, rank, port, few, ranks=2) for rank in (1, 0)]
    ends = finish(*machines)
    assert [code for code, _ in ends] == [0, 0], ends
    words = arguments(data, tmp_path / "one", few)
    run("bash", SCRIPTS / "train.sh", *words, CUDA_VISIBLE_DEVICES="")
    assert_same_curves(where, tmp_path / "one")
    (record,) = records(where)
    assert record["world_size"] == 4 and record["ranks_of_this_machine"] == 2


@pytest.mark.slow
def test_machines_that_do_not_fit_together(data, tmp_path):
    port = free_port()
    where = tmp_path / "run"
    machines = [machine(data, where, rank, port, f"common.seed={rank + 1}") for rank in (0, 1)]
    ends = finish(*machines)
    assert all(code != 0 for code, _ in ends)
    assert any("rank 1 was started with different settings" in stderr for _, stderr in ends), ends


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sent", "code"),
    [(signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGKILL, -9)],
    ids=lambda value: getattr(value, "name", None),
)
def test_a_signal_ends_all_ranks(sent, code, data, tmp_path):
    """SLURM pre-empts with SIGTERM. SIGKILL leaves no message, and no process either."""
    where = tmp_path / "run"
    process = start(data, where, "--ranks", "2")
    wait_for((where / "checkpoints/checkpoint_last.pt").exists, process)
    process.send_signal(sent)
    ((ended, stderr),) = finish(process)
    assert ended == code, stderr
    wait_for(lambda: not ranks_of(where), seconds=20)
    if code > 0:
        lines = [line for line in stderr.splitlines() if not line.startswith("[train] ")]
        assert lines == ["pn train: interrupted; run the same command again to resume"]


@pytest.mark.slow
def test_a_sweep_over_norms(data, tmp_path):
    """fairseq-hydra-train without scripts/: jobs of one process, each with its own checkpoints,
    log and best loss.
    """
    configuration = ("--config-dir", ROOT / "configs", "--config-name", "verses_es_en")
    places = (f"task.data={data}/bin", f"common.user_dir={ROOT}/pn_fairseq")
    settings = (
        "dataset.max_tokens=400 model._name=transformer_ln_tiny,transformer_pn_tiny "
        "optimization.max_update=2 common.log_interval=1"
    )
    sweep = (*configuration, *places, *settings.split())
    run("fairseq-hydra-train", "-m", *sweep, cwd=tmp_path)
    jobs = sorted((tmp_path / "runs/hydra/verses_es_en_sweep").glob("*/*_seed1"))
    names = ["0_transformer_ln_tiny_seed1", "1_transformer_pn_tiny_seed1"]
    assert [job.name for job in jobs] == names
    for job, power in zip(jobs, (False, True), strict=True):
        assert list(read_log(job / "train.log").train) == [1, 2]
        log = (job / "train.log").read_text("utf-8")
        assert log.count('"update"') == 2 and log.count("done training") == 1
        assert any((job / "tensorboard").rglob("events.*"))
        last, best = (
            load_checkpoint(job / f"checkpoints/checkpoint_{name}.pt") for name in ("last", "best")
        )
        assert any(key.endswith("running_psi2") for key in last["model"]) is power
        smallest = last["extra_state"]["best"]
        for state in (last, best):
            assert state["extra_state"]["val_loss"] == smallest
        # The scripts take such a folder as a run.
        run("bash", SCRIPTS / "average.sh", "--run", job)
        run("bash", SCRIPTS / "generate.sh", "--run", job, "--beam", "1", "--max-len-b", "5")
        assert len((job / "generate/test/hyp.tok").read_text("utf-8").splitlines()) == 37


def batch_script(cluster: Slurm, number: int, command: str, small: str) -> Path:
    """A script of docs/several_gpus.md as printed, with a small training on CPUs in place of
    ``command``.
    """
    page = blocks(ROOT / "docs/several_gpus.md", "bash")
    scripts = [block for block in page if block.startswith("#!")]
    text = scripts[number].replace(" --gpus-per-node=8", "")
    assert text.count(command) == 1, text
    script = cluster.folder / "work/job.sh"
    script.parent.mkdir(exist_ok=True)
    script.write_text(text.replace(command, small), "utf-8")
    environment = script.parent / ".venv"
    if not environment.exists():
        environment.symlink_to(sys.prefix)
    return script


def submit_training(cluster: Slurm, data: Path, where: Path) -> int:
    small = shlex.join([*arguments(data, where, "optimization.max_update=120"), "--ranks", "1"])
    return cluster.submit(batch_script(cluster, 0, "wmt14_en_de_big common.fp16=true", small))


@pytest.fixture(scope="module")
def undisturbed(slurm, data):  # noqa: F811
    """The folder of a training run on two nodes of a SLURM."""
    where = slurm.folder / "undisturbed"
    job = submit_training(slurm, data, where)
    slurm.wait_for(job, "COMPLETED")
    (record,) = records(where)
    assert (record["world_size"], record["ranks_of_this_machine"]) == (2, 1)
    return where


def assert_resumed(where: Path) -> None:
    assert [record["world_size"] for record in records(where)] == [2, 2]
    assert updates_of(where) == 120
    assert sorted(read_log(where / "train.log").train) == list(range(1, 121))


def assert_same_bits(one: Path, other: Path) -> None:
    files = [folder / "checkpoints/checkpoint_last.pt" for folder in (one, other)]
    ours, theirs = (load_checkpoint(file)["model"] for file in files)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


@pytest.mark.slow
def test_a_job_whose_node_fails_is_requeued_and_resumes(slurm, data, undisturbed):  # noqa: F811
    where = slurm.folder / "requeued"
    job = submit_training(slurm, data, where)
    wait_for((where / "checkpoints/checkpoint_last.pt").exists)
    slurm.kill_slurmd("node2")
    slurm.wait_for(job, "PENDING")
    assert updates_of(where) < 120
    slurm.nodes["node2"].kill()
    slurm.start_node("node2")
    slurm.wait_for(job, "COMPLETED")
    assert_resumed(where)
    assert_same_bits(where, undisturbed)


@pytest.mark.slow
def test_a_job_that_scancel_ends_says_so_in_one_line_and_resumes(slurm, data, undisturbed):  # noqa: F811
    where = slurm.folder / "cancelled"
    job = submit_training(slurm, data, where)
    wait_for((where / "checkpoints/checkpoint_last.pt").exists)
    slurm.command("scancel", job)
    slurm.wait_for(job, "CANCELLED")
    wait_for(lambda: not slurm.command("squeue", "-h"))
    output = (slurm.folder / f"work/slurm-{job}.out").read_text("utf-8").splitlines()
    own = [line for line in output if not line.startswith(("[train] ", "srun: ", "slurmstepd"))]
    # one line for each node
    assert own == 2 * ["pn train: interrupted; run the same command again to resume"]
    assert updates_of(where) < 120
    assert not [*where.rglob("tmp*"), *where.rglob("*.*tmp*")]
    slurm.wait_for(submit_training(slurm, data, where), "COMPLETED")
    assert_resumed(where)
    assert_same_bits(where, undisturbed)


@pytest.mark.slow
def test_a_job_array_is_a_sweep_with_one_report(slurm, data):  # noqa: F811
    few = "optimization.max_update=6 generation.beam=1 generation.max_len_b=10"
    settings = " ".join([*SETTINGS[:2], few])
    script = batch_script(slurm, 1, " --runs", f" --data {data} {settings} --runs")
    job = slurm.submit(script, "--array=2-5")
    wait_for(lambda: not slurm.command("squeue", "-h"), seconds=400)
    runs = sorted((script.parent / "runs/sweep").glob("*/*_seed*"))
    assert [run.name for run in runs] == ["ln_seed1", "ln_seed2", "pn_seed1", "pn_seed2"], job
    run("pn", "report", *runs, "--output", script.parent / "report")
    report = (script.parent / "report/report.md").read_text("utf-8")
    assert re.findall(r"^\| (\w+) +\| +2 \(1, 2\) \|", report, re.M) == ["LN", "PN"]
