"""scripts/sweep_batch_size.sh: the commands that it makes, and what it does about runs that fail."""

import shutil

import pytest

from ..scripts_helpers import SCRIPTS, run, script

FEWER = ["optimization.max_update=7"]
SIZES = ["512", "1024", "2048", "4096"]


def test_commands(tmp_path):
    shown = script("sweep_batch_size.sh", "--dry-run", "--runs", tmp_path, *FEWER, NORMS="pn", SEEDS="1")
    trainings = [line for line in shown.stdout.splitlines() if "scripts/train.sh" in line]
    assert [line.partition(f"--run {tmp_path}/")[2] for line in trainings] == [
        f"tokens{size}/pn_seed1 model._name=transformer_pn_tiny common.seed=1 dataset.max_tokens={size} "
        "tokens_per_update=4096 optimization.max_update=7"
        for size in SIZES
    ]
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("code", "sizes"), [(1, SIZES), (2, SIZES[:1])])
def test_a_run_that_fails_stops_no_other(code, sizes, tmp_path):
    """Code 1 of scripts/reproduce_verses.sh: a run failed, and the others were made. 2: nothing can be made."""
    scripts = shutil.copytree(SCRIPTS, tmp_path / "scripts")
    made = 'mkdir -p "$2/pn_seed1" && touch "$2/pn_seed1/failed"; echo "$NPROC $3" >> "$2/../log"'
    (scripts / "reproduce_verses.sh").write_text(f"#!/usr/bin/env bash\n{made}; exit {code}\n")
    result = run("bash", scripts / "sweep_batch_size.sh", "--runs", tmp_path / "runs", check=False)
    assert (tmp_path / "runs/log").read_text().splitlines() == [f"1 dataset.max_tokens={size}" for size in sizes]
    assert result.returncode == 2 and ("nothing to draw" in result.stderr) == (code == 1)
