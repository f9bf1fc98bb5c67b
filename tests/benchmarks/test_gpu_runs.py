"""benchmarks/gpu_runs.sh: commands side by side, cut off in time, and resumed elsewhere."""

import os
import shutil
import tarfile

import pytest

from benchmarks.models import SHORT
from pn_fairseq.common.command import UserError
from pn_fairseq.pipeline.training_settings import compose

from ..scripts_helpers import ROOT, run

#: In place of `pn`: counts its calls in a checkpoint, and a word tells how it goes on.
PN = """#!/usr/bin/env bash
mkdir -p "runs/$1" runs/data
echo text >runs/data/text
echo update >>"runs/$1/checkpoint_last.pt"
head -c 300000 /dev/zero >"runs/$1/large"
echo "loss of $1"
case $2 in
    sleep) exec sleep 600 ;;
    fail) exit 3 ;;
esac
"""
LIST = """# a comment
first end   # another

second sleep
third fail
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pn").write_text(PN)
    os.chmod(tmp_path / "pn", 0o755)
    (tmp_path / "list").write_text(LIST)
    return tmp_path


def train(folder, *words, **variables):
    variables = {"PN": str(folder / "pn"), "EVERY": "1", **variables}
    script = ROOT / "benchmarks/gpu_runs.sh"
    return run("bash", script, *words, cwd=folder, check=False, **variables)


def test_runs_are_cut_off_and_resumed(folder):
    done = train(folder, "list", "out", "2")
    assert done.returncode == 1
    assert "pn first end   : finished" in done.stderr
    assert "pn second sleep: cut off" in done.stderr
    assert "pn third fail: FAILED, see runs/logs/3.log" in done.stderr
    assert (folder / "runs/logs/2.log").read_text() == "loss of second\n"
    with tarfile.open(folder / "out/small.tar.gz") as archive:
        names = archive.getnames()
    files = {f"runs/{run}/checkpoint_last.pt" for run in ("first", "second", "third")}
    assert {*names} == files | {f"runs/logs/{number}.log" for number in (1, 2, 3)}
    os.rename(folder / "runs", folder / "elsewhere")
    again = train(folder, "list", "out", "2")
    assert "goes on from out/runs.tar" in again.stderr
    assert (folder / "runs/second/checkpoint_last.pt").read_text() == "update\nupdate\n"
    assert (folder / "runs/second/large").stat().st_size == 300_000
    with tarfile.open(folder / "out/runs.tar") as archive:
        assert not any(name.startswith("runs/data") for name in archive.getnames())


def test_files_may_vanish_while_they_are_copied(folder):
    """Nor does a copy that fails end the commands."""
    (folder / "pn").write_text("""#!/usr/bin/env bash
mkdir -p runs
while ((SECONDS < 5)); do
    touch runs/{1..200}
    rm runs/[0-9]*
done
touch runs/last
""")
    (folder / "list").write_text("any\n")
    done = train(folder, "list", "out", "60")
    assert done.stderr == "[gpu_runs.sh] pn any: finished\n"
    with tarfile.open(folder / "out/small.tar.gz") as archive:
        assert sorted(archive.getnames()) == ["runs/last", "runs/logs/1.log"]
    os.makedirs(folder / "out/runs.tar.partial/in the way")
    done = train(folder, "list", "out", "60")
    assert done.returncode == 0
    assert "runs/ could not be copied (tar: " in done.stderr
    assert "pn any: finished" in done.stderr


def test_what_is_written_last_is_copied(folder):
    """Also if a command ends while the files are copied."""
    (folder / "pn").write_text("""#!/usr/bin/env bash
sleep 2
echo last >runs/state
""")
    (folder / "list").write_text("any\n")
    (folder / "tools").mkdir()
    slow = folder / "tools/tar"
    slow.write_text(f'#!/bin/sh\n{shutil.which("tar")} "$@"\nsleep 3\n')
    slow.chmod(0o755)
    train(folder, "list", "out", "60", PATH=f"{folder / 'tools'}:{os.environ['PATH']}")
    with tarfile.open(folder / "out/runs.tar") as archive:
        assert archive.extractfile("runs/state").read() == b"last\n"


@pytest.mark.parametrize(
    ("words", "variables", "message"),
    [
        ("list out", {}, "expected LIST OUT SECONDS"),
        ("list out soon", {}, "expected LIST OUT SECONDS"),
        ("missing out 2", {}, "there is no list 'missing'"),
        ("empty out 2", {}, "'empty' names no command"),
        ("list out 2", {"PN": "/no/pn"}, "there is no '/no/pn'"),
    ],
)
def test_mistakes(folder, words, variables, message):
    (folder / "empty").write_text("# nothing\n")
    done = train(folder, *words.split(), **variables)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"gpu_runs.sh: error: {message}")
    assert not (folder / "out").exists()


def test_the_runs_of_the_list_have_settings_that_exist():
    """Each configuration with each norm and each setting of it; and no two commands have the same
    folder, which the first would lock.
    """
    overrides = {}
    norms = set()
    folders = set()
    for line in (ROOT / "benchmarks/gpu_runs.txt").read_text("utf-8").splitlines():
        words = line.partition("#")[0].split()
        if not words:
            continue
        verb, config, *options = words
        assert verb == "reproduce"
        settings = overrides.setdefault(config, set())
        settings |= {word for word in options if word.startswith("common.")}
        runs = options[options.index("--runs") + 1]
        assert runs.startswith("runs/") and runs not in folders
        folders.add(runs)
        for norm in options[options.index("--norms") + 1].split(","):
            short, *own = norm.split("+")
            norms.add(short)
            settings |= {f"model.{setting}" for setting in own}
    assert norms <= {*SHORT}
    assert overrides.keys() == {"ptb_lm_paper", "iwslt15_en_vi_adanorm"}
    for config, settings in overrides.items():
        options = {"world_size": 1, "on_cpu": True}
        path = ROOT / "configs" / f"{config}.yaml"
        compose(path, sorted(settings), **options)
        with pytest.raises(UserError, match="no_setting"):
            compose(path, ["model.no_setting=1"], **options)
