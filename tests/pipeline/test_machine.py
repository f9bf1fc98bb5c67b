import json
import os
import platform
import subprocess
import sys
from importlib import metadata

import torch

import pn_fairseq
from pn_fairseq.pipeline import machine

from ..scripts_helpers import ROOT


def test_description_is_of_this_machine_and_of_what_is_installed():
    found = json.loads(json.dumps(machine.describe_machine()))
    assert found["python"] == platform.python_version() == sys.version.split()[0]
    assert found["torch"] == torch.__version__ and found["pn_fairseq"] == pn_fairseq.__version__
    assert found["fairseq"] == f"fairseq-fixed {metadata.version('fairseq-fixed')}"
    cores = subprocess.check_output(["nproc"], env={**os.environ, "OMP_NUM_THREADS": ""})
    assert found["cores"] == int(cores)
    assert len(found["gpus"]) == torch.cuda.device_count() and found["cuda"] == torch.version.cuda
    assert platform.release() in found["os"] and found["cpu"]
    commit = git(ROOT, "rev-parse", "HEAD") if (ROOT / ".git").exists() else ""
    assert (found["git_commit"] or "").removesuffix("-modified") == commit


def git(folder, *arguments: str) -> str:
    who = ("-c", "user.name=x", "-c", "user.email=x@example.org")
    words = ["git", "-C", str(folder), *who, *arguments]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def test_commit_is_that_of_the_checkout_and_says_if_files_were_changed(tmp_path):
    package = tmp_path / "pn_fairseq"
    package.mkdir()
    (package / "__init__.py").write_text("")
    assert machine._git_commit(package) is None, "no checkout"
    git(tmp_path, "init", "-q")
    assert machine._git_commit(package) is None, "a file of somebody else's repository"
    git(tmp_path, "add", "pn_fairseq")
    git(tmp_path, "commit", "-q", "-m", "first")
    commit = git(tmp_path, "rev-parse", "HEAD")
    (tmp_path / "notes").write_text("not tracked")
    assert machine._git_commit(package) == commit
    (package / "__init__.py").write_text("changed = True\n")
    assert machine._git_commit(package) == f"{commit}-modified"


def test_a_machine_without_git(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert machine.describe_machine()["git_commit"] is None
