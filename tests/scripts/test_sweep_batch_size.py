"""pn reproduce batch_size: the commands that it makes, and what it does about runs that fail."""

import pytest

from pn_fairseq.pipeline import reproduce, train

from ..scripts_helpers import script

FEWER = ["optimization.max_update=7"]
SIZES = ["512", "1024", "2048", "4096"]


def test_commands(tmp_path):
    shown = script("sweep_batch_size.sh", "--dry-run", "--runs", tmp_path, *FEWER, NORMS="pn", SEEDS="1")
    trainings = [line for line in shown.stdout.splitlines() if line.startswith("pn train")]
    assert [line.partition(f"--run {tmp_path}/")[2] for line in trainings] == [
        f"tokens{size}/pn_seed1 model._name=transformer_pn_tiny common.seed=1 dataset.max_tokens={size} "
        "tokens_per_update=4096 optimization.max_update=7"
        for size in SIZES
    ]
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("fails", "count"), [("train", 4), ("prepare", 1)])
def test_a_run_that_fails_stops_no_other(fails, count, tmp_path, monkeypatch):
    """Without data nothing can be made."""
    line = f'echo "$NPROC $*" >>"{tmp_path}/calls"; [ "$1" != {fails} ]'
    monkeypatch.setattr(reproduce, "program", lambda step: ["bash", "-c", line, "pn", *step])
    monkeypatch.setattr(train, "main", lambda argv: 0)
    monkeypatch.setenv("NPROC", "")
    try:
        code = reproduce.main(["batch_size", "--runs", str(tmp_path / "runs")])
    except SystemExit as end:
        code = end.code
    calls = (tmp_path / "calls").read_text().splitlines()
    assert code == 1 and sum(line.startswith("1 prepare") for line in calls) == count
    assert calls[-1].startswith("1 figures ") == (fails == "train")
