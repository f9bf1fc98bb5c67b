"""pn average --run: which checkpoints of a run are averaged, and that it is done once."""

import os

import pytest
import torch
from omegaconf import OmegaConf

from pn_fairseq.common.checkpoints import load_checkpoint
from pn_fairseq.pipeline.average import main

KEEPS = {"keep_last_epochs": 10, "keep_interval_updates": -1}


def checkpoint(path, value: float, cfg=None):
    path.parent.mkdir(parents=True, exist_ok=True)
    history = [{"num_updates": int(value)}]
    torch.save({"model": {"w": torch.tensor([float(value)])}, "optimizer_history": history, "cfg": cfg}, path)


@pytest.fixture
def run(tmp_path, capsys):
    """``run(...)`` calls pn average for a run and returns its output and the average."""
    folder = tmp_path / "run"
    (tmp_path / "data/bin").mkdir(parents=True)
    folder.mkdir()
    (folder / "data").write_text(f"{tmp_path}/data\n")

    def average(*options, code=0) -> tuple[str, float | None]:
        assert main(["--run", str(folder), *map(str, options)]) == code
        output = folder / "checkpoints/averaged.pt"
        value = load_checkpoint(output)["model"]["w"].item() if output.exists() else None
        return capsys.readouterr().err, value

    def configure(average_last=None, **settings):
        config = {"checkpoint": {**KEEPS, **settings}, "average_last": average_last}
        (folder / "config.yaml").write_text(OmegaConf.to_yaml(OmegaConf.create(config)))

    average.folder, average.configure, average.checkpoints = folder, configure, folder / "checkpoints"
    configure()
    return average


def test_as_many_as_the_configuration_averages_or_the_run_keeps(run):
    for epoch in range(1, 13):
        checkpoint(run.checkpoints / f"checkpoint{epoch}.pt", epoch)
    checkpoint(run.checkpoints / "checkpoint_1_100.pt", 100)
    assert run()[1] == 7.5
    run.configure(average_last=2)
    assert run()[1] == 11.5
    assert run("--last", 3)[1] == 11
    assert run("--by", "update", "--last", 1)[1] == 100
    run.configure(keep_interval_updates=4, average_last=1)
    assert run()[1] == 100
    run.configure(keep_interval_updates=1)
    assert run()[1] == 100
    run.configure(keep_last_epochs=-1)
    assert "--last" in run(code=2)[0]
    assert "--last" in run("--last", 0, code=2)[0]


def test_a_short_run(run):
    run.checkpoints.mkdir()
    messages, _ = run(code=2)
    assert "none of the 10 epoch checkpoints" in messages and messages.count("\n") == 1
    checkpoint(run.checkpoints / "checkpoint_last.pt", 3)
    messages, value = run()
    assert "using only checkpoint_last.pt" in messages and value == 3
    assert (run.checkpoints / "averaged.pt.made.txt").read_text() == "last 1\n"
    for epoch in (1, 2):
        checkpoint(run.checkpoints / f"checkpoint{epoch}.pt", epoch)
    for options in ((), ("--last", 3)):
        messages, value = run(*options)
        assert f"has 2 epoch checkpoints instead of {3 if options else 10}" in messages and value == 1.5
    assert (run.checkpoints / "averaged.pt.made.txt").read_text() == "epoch 2\n"
    assert "--by epoch" in run("--by", "update", "--last", 1, code=2)[0]


def test_it_is_done_once_until_something_changes(run):
    for epoch in (1, 2):
        checkpoint(run.checkpoints / f"checkpoint{epoch}.pt", epoch)
    assert run("--last", 2)[1] == 1.5
    output = run.checkpoints / "averaged.pt"
    before = output.read_bytes(), output.stat().st_mtime_ns
    assert "already" in run("--last", 2)[0]
    assert (output.read_bytes(), output.stat().st_mtime_ns) == before
    assert output.with_name("averaged.pt.made.txt").read_text() == "epoch 2\n"
    assert run("--last", 1)[1] == 2
    newer = output.stat().st_mtime_ns + 10**9
    checkpoint(run.checkpoints / "checkpoint3.pt", 3)
    os.utime(run.checkpoints / "checkpoint3.pt", ns=(newer, newer))
    assert run("--last", 1)[1] == 3


def test_other_options_average_again_and_an_old_mark_is_read(run):
    for epoch in (1, 2, 3):
        checkpoint(run.checkpoints / f"checkpoint{epoch}.pt", epoch)
    assert run("--last", 1)[1] == 3
    mark = run.checkpoints / "averaged.pt.made.txt"
    mark.rename(run.checkpoints / "averaged.pt.made")
    assert "already" in run("--last", 1)[0]
    assert run("--last", 1, "--upper-bound", 2)[1] == 2
    assert mark.read_text() == "epoch 1 upper_bound=2\n" and not (run.checkpoints / "averaged.pt.made").exists()
    assert "already" in run("--last", 1, "--upper-bound", 2)[0]


def test_a_damaged_checkpoint_leaves_the_earlier_average_without_its_mark(run):
    checkpoint(run.checkpoints / "checkpoint1.pt", 1)
    assert run("--last", 1)[1] == 1
    (run.checkpoints / "checkpoint2.pt").write_bytes(b"PK")
    messages, value = run("--last", 2, code=2)
    assert "checkpoint2.pt" in messages and messages.count("\n") == 1 and value == 1
    assert not (run.checkpoints / "averaged.pt.made.txt").exists()


def test_folders_of_fairseqs_own_commands(run, tmp_path, capsys):
    cfg = {"task": {"data": f"{tmp_path}/data/bin"}, "checkpoint": KEEPS, "model": None}
    plain = tmp_path / "save-dir"
    for epoch in (1, 3):
        checkpoint(plain / f"checkpoint{epoch}.pt", epoch, cfg)
    assert main(["--run", str(plain)]) == 0
    assert load_checkpoint(plain / "averaged.pt")["model"]["w"].item() == 2
    job = tmp_path / "0_transformer_pn_tiny_seed1"
    (job / ".hydra").mkdir(parents=True)
    (job / ".hydra/config.yaml").write_text(OmegaConf.to_yaml({**cfg, "scoring": {"average_last": 1}}))
    for epoch in (1, 3):
        checkpoint(job / f"checkpoints/checkpoint{epoch}.pt", epoch)
    assert main(["--run", str(job)]) == 0
    assert load_checkpoint(job / "checkpoints/averaged.pt")["model"]["w"].item() == 3


def test_mistakes_get_one_line(run, tmp_path, capsys):
    for options, needle in (
        ((), "one of the arguments --run --inputs is required"),
        (("--run", "/nowhere"), "is not a training run"),
        (("--by", "week"), "week"),
    ):
        assert main(list(options)) == 2
        messages = capsys.readouterr().err
        assert needle in messages and messages.count("\n") == 1
    (tmp_path / "data/bin").rmdir()
    messages, _ = run(code=2)
    assert "is gone" in messages and "data/bin" in messages
