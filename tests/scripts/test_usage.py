import os
import shutil
import subprocess

import pytest

from pn_fairseq.common import files
from pn_fairseq.common.command import UserError
from pn_fairseq.pipeline.data.recipes import verses

from ..scripts_helpers import ROOT, SCRIPTS, assert_refused, in_process, run, script, words_of

USER_SCRIPTS = sorted(path.name for path in SCRIPTS.glob("*.sh"))


def quick(name: str, *arguments) -> subprocess.CompletedProcess:
    """A script, in this process where it only calls pn
    (test_a_script_calls_its_checkout_from_any_folder).
    """
    words = words_of(name)
    if words:
        return in_process(*words, *arguments, check=False)
    return script(name, *arguments, check=False)


@pytest.mark.parametrize("name", USER_SCRIPTS)
def test_help_and_unknown_argument(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    usage = quick(name, "--help")
    first = "Create the environment" if name == "make_venv.sh" else "usage: "
    assert usage.stdout.startswith(first)
    assert (usage.returncode, usage.stderr) == (0, "")
    assert_refused(quick(name, "--no-such-option"), "--no-such-option")
    assert list(tmp_path.iterdir()) == []


def test_a_script_calls_its_checkout_from_any_folder(tmp_path):
    """By a link, with a checkout without kernels as the current folder and a CDPATH."""
    (tmp_path / "link.sh").symlink_to(SCRIPTS / "score.sh")
    (tmp_path / "pn_fairseq").mkdir()
    (tmp_path / "pn_fairseq/__init__.py").write_text("raise ImportError")
    other = {"CDPATH": str(tmp_path), "VENV": "/nowhere"}
    usage = run("bash", tmp_path / "link.sh", "--help", cwd=tmp_path, **other).stdout
    assert usage == script("score.sh", "--help").stdout
    user_dir = run(SCRIPTS / "pn", "--user-dir", cwd=tmp_path, **other).stdout
    assert user_dir == f"{ROOT / 'pn_fairseq'}\n"


def test_every_wrapper_is_one_line():
    """Everything else is Python."""
    for name in USER_SCRIPTS:
        if name != "make_venv.sh":
            text = (SCRIPTS / name).read_text("utf-8")
            (line,) = [line for line in text.splitlines() if not line.startswith("#")]
            assert line.startswith('exec bash "$(dirname "$(readlink -f "$0")")/pn" '), name


def test_missing_tools_are_named(tmp_path):
    """A machine with a shell and without this project's environment."""
    tools = tmp_path
    for tool in ("bash", "basename", "dirname", "cat", "sed", "nproc", "gzip", "mkdir", "readlink"):
        (tools / tool).symlink_to(subprocess.check_output(["which", tool], text=True).strip())
    how = {"PATH": str(tools), "VENV": "/nowhere", "check": False}
    result = run("bash", SCRIPTS / "average.sh", "--run", "x", **how)
    assert_refused(result, "no Python in '/nowhere'", "make venv")


def test_damaged_corpus_is_refused(tmp_path, monkeypatch):
    shutil.copytree(ROOT / "data", tmp_path / "data")
    with (tmp_path / "data/verses.es-en/train.en.gz").open("r+b") as file:
        file.truncate(500_000)
    monkeypatch.setattr(files, "PACKAGE", tmp_path / "pn_fairseq")
    with pytest.raises(UserError, match="verses.es-en is damaged"):
        verses.corpus()


def test_what_a_wheel_has_inside_the_package(tmp_path, monkeypatch):
    """Folders and files; in a checkout they are beside it."""
    monkeypatch.setattr(files, "PACKAGE", tmp_path / "pn_fairseq")
    (tmp_path / "pn_fairseq/data/corpus").mkdir(parents=True)
    (tmp_path / "pn_fairseq/data/table.yaml").touch()
    for name in ("data/corpus", "data/table.yaml"):
        assert files.shipped(name) == tmp_path / "pn_fairseq" / name
    assert files.shipped("configs") == tmp_path / "configs"


def test_the_makefile_lists_its_targets():
    listed = run("make", "-C", ROOT, "help").stdout
    assert all(f"make {target}" in listed for target in ("venv", "demo", "test", "lint"))


def test_the_scripts_are_executable():
    for path in (ROOT / ".ci/run", SCRIPTS / "pn", *SCRIPTS.glob("*.sh")):
        assert os.access(path, os.X_OK), path
