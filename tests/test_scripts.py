"""What the scripts do with mistakes, and what they share."""

import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from .scripts_helpers import ROOT, SCRIPTS, assert_refused, environment, run, script

USER_SCRIPTS = sorted(path.name for path in SCRIPTS.glob("*.sh"))


def test_shellcheck_finds_nothing():
    files = [ROOT / ".ci/run", *SCRIPTS.glob("*.sh"), *SCRIPTS.glob("lib/*.sh")]
    assert run("shellcheck", "-x", "-P", "SCRIPTDIR", *files).stdout == ""


@pytest.mark.parametrize("name", USER_SCRIPTS)
def test_help_and_unknown_argument(name, tmp_path):
    usage = script(name, "--help", cwd=tmp_path)
    assert usage.stdout.startswith(("usage: scripts/" + name, "usage: [VENV=")) and usage.stderr == ""
    assert_refused(script(name, "--no-such-option", cwd=tmp_path, check=False), "--no-such-option", "--help")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["prepare_text.sh", "train.sh", "average.sh", "generate.sh", "score.sh"])
def test_needed_arguments(name):
    assert_refused(script(name, check=False), "--help")


@pytest.mark.parametrize(
    ("arguments", "needles"),
    [
        (("prepare_text.sh", "--corpus"), ("--corpus needs a value",)),
        (
            ("prepare_text.sh", "--corpus", "/nowhere", "--source", "es", "--target", "en", "--dest", "x"),
            ("/nowhere",),
        ),
        (
            ("prepare_text.sh", "--corpus", ".", "--source", "es", "--target", "es", "--dest", "x"),
            ("--source and --target",),
        ),
        (
            ("prepare_text.sh", "--corpus", ".", "--source", "es", "--target", "en", "--dest", "x", "--bpe", "many"),
            ("--bpe", "many"),
        ),
        (("train.sh", "no_such_config"), ("no_such_config", "verses_es_en")),
        (("average.sh", "--run", "/nowhere"), ("/nowhere", "is not a training run")),
        (("generate.sh", "--run", "/nowhere"), ("/nowhere", "is not a training run")),
        (("score.sh", "--run", "/nowhere"), ("/nowhere", "no training run")),
    ],
    ids=lambda value: " ".join(value[:3]) if isinstance(value, tuple) else None,
)
def test_mistakes_get_one_line(arguments, needles, tmp_path):
    assert_refused(script(*arguments, cwd=tmp_path, check=False), *needles)
    assert list(tmp_path.iterdir()) == [], "something was left behind"


def test_a_run_without_its_parts(tmp_path):
    (tmp_path / "config.yaml").write_text("checkpoint: {keep_last_epochs: -1}\n")
    (tmp_path / "data").write_text(f"{tmp_path}/prepared\n")
    (tmp_path / "prepared/bin").mkdir(parents=True)
    assert_refused(script("score.sh", "--run", tmp_path, check=False), "hyp.tok", "generate.sh")


def test_missing_tools_are_named(tmp_path):
    """A machine with a shell and nothing else of ours."""
    tools = tmp_path / "bin"
    tools.mkdir()
    for tool in ("bash", "basename", "dirname", "cat", "sed", "nproc", "gzip", "mkdir", "readlink"):
        (tools / tool).symlink_to(subprocess.check_output(["which", tool], text=True).strip())
    (tmp_path / "config.yaml").write_text("")
    (tmp_path / "data").write_text("/nowhere\n")
    result = script("average.sh", "--run", tmp_path, PATH=str(tools), VENV="/nowhere", check=False)
    assert_refused(result, "'python'", "make venv")


@pytest.mark.parametrize(
    ("changes", "needles"),
    [
        ({"PYTHON": "no-such-python"}, ("no-such-python", "3.11")),
        ({"CC": "no-such-compiler", "CXX": "no-such-compiler", "PIP_CACHE_DIR": "EMPTY"}, ("no-such-compiler", "g++")),
        ({"PYTHON": "OLD"}, ("3.8", "3.11")),
    ],
    ids=["no interpreter", "no compiler", "old Python"],
)
def test_set_up_names_what_is_missing(changes, needles, tmp_path):
    if changes.get("PYTHON") == "OLD":
        old = tmp_path / "python3.8"
        # Says that it is 3.8, and compares accordingly: what an old interpreter would do.
        old.write_text('#!/bin/sh\ncase "$2" in *exit*) exit 1 ;; *) echo 3.8 ;; esac\n')
        old.chmod(0o755)
        changes = {"PYTHON": str(old)}
    if "PIP_CACHE_DIR" in changes:  # where fairseq could lie compiled
        changes = {**changes, "PIP_CACHE_DIR": str(tmp_path / "cache")}
    result = script("make_venv.sh", VENV=str(tmp_path / "new"), check=False, **changes)
    assert_refused(result, *needles)
    assert not (tmp_path / "new").exists()


@pytest.fixture
def made(tmp_path):
    """A checkout, the mark of a complete environment, and what runs make_venv.sh there; its interpreter makes nothing.

    The mark holds the key, and the sources and the file of the compiled kernels; torch and interpreter are remembered.
    """
    checkout, kernels = tmp_path / "checkout", Path("pn_fairseq/kernels/cpp")
    shutil.copytree(SCRIPTS, checkout / "scripts")
    for file in ("constraints.txt", "setup.py"):
        shutil.copy(ROOT / file, checkout)
    shutil.copytree(ROOT / kernels, checkout / kernels)
    venv, library = tmp_path / "venv", tmp_path / "library.so"
    (venv / "bin").mkdir(parents=True)
    (venv / "bin/python").symlink_to(sys.executable)
    library.write_text("compiled")
    torch = "torch==2.13.0 --index-url https://example.org"
    key = (checkout / "constraints.txt").read_bytes() + (checkout / "setup.py").read_bytes()
    key = hashlib.sha256(key + f"{checkout} no-such-python {torch}\n".encode()).hexdigest()
    sources = b"".join(file.read_bytes() for file in sorted((checkout / kernels).iterdir()))
    entries = {
        "python": "no-such-python",
        "torch": torch,
        "key": key,
        "kernels": hashlib.sha256(sources).hexdigest(),
        "library": str(library),
    }
    (venv / ".pn_fairseq").write_text("".join(f"{name}={value}\n" for name, value in entries.items()))

    def make(**changes):
        return run("bash", checkout / "scripts/make_venv.sh", VENV=str(venv), check=False, **changes)

    return SimpleNamespace(make=make, checkout=checkout, venv=venv, entries=entries, library=library)


def test_set_up_again_is_instant_until_something_changes(made):
    assert (made.make().returncode, made.make().stderr) == (0, "")
    assert made.make(TORCH=made.entries["torch"], PYTHON="no-such-python").returncode == 0
    assert_refused(made.make(TORCH="torch==2.12.0"), "no-such-python")
    with (made.checkout / "constraints.txt").open("a") as file:
        file.write("# changed\n")
    assert_refused(made.make(), "no-such-python")


def test_set_up_compiles_the_kernels_when_there_is_a_compiler_at_last(made):
    """None were compiled, or they were deleted since: nothing to do without a compiler, and one attempt with it."""
    log, mark = made.venv / "log", made.venv / ".pn_fairseq"
    python = made.venv / "bin/python"
    python.unlink()

    def interpreter(library):
        """Writes down what it was to do, and names the library as it would after the installation."""
        python.write_text(f"#!/bin/sh\necho \"$1 $2 $*\" >>'{log}'\n[ \"$1\" != -c ] || echo '{library}'\n")
        python.chmod(0o755)

    def entries():
        return dict(line.split("=", 1) for line in mark.read_text().splitlines())

    compiler = {"CC": "true", "CXX": "true"}
    none = {"CC": "no-such-compiler", "CXX": "no-such-compiler"}
    interpreter("")
    assert made.make(**none).returncode == 0 and not log.exists()
    made.library.unlink()
    assert made.make(**none).returncode == 0 and not log.exists()
    result = made.make(**compiler)
    assert (result.returncode, result.stderr) == (0, "[make_venv] compiling the C++ kernels\n")
    assert "pip" in log.read_text() and "--no-build-isolation" in log.read_text()
    assert entries() == made.entries | {"kernels": "none", "library": ""}

    log.unlink()
    assert made.make(**none).returncode == 0 and not log.exists()
    interpreter(made.library)
    made.library.write_text("compiled")
    assert made.make(**compiler).returncode == 0 and log.exists()
    assert entries() == made.entries
    log.unlink()
    for compilers in (compiler, none):
        assert made.make(**compilers).returncode == 0 and not log.exists()
    with next((made.checkout / "pn_fairseq/kernels/cpp").iterdir()).open("a") as file:
        file.write("// changed\n")
    interpreter("")
    made.make(**none)
    assert entries()["kernels"] == "none", "kernels of older sources"


def test_set_up_leaves_somebody_elses_folder_alone(tmp_path):
    (tmp_path / "thesis.tex").write_text("years of work")
    assert_refused(script("make_venv.sh", VENV=str(tmp_path), check=False), str(tmp_path), "left alone")
    assert (tmp_path / "thesis.tex").read_text() == "years of work"


def test_damaged_corpus_is_refused(tmp_path):
    copy = tmp_path / "checkout"
    for part in ("scripts", "data"):
        shutil.copytree(ROOT / part, copy / part)
    with (copy / "data/verses.es-en/train.en.gz").open("r+b") as file:
        file.truncate(500_000)
    result = subprocess.run(
        ["bash", copy / "scripts/prepare_verses.sh"], env=environment(), capture_output=True, text=True
    )
    assert_refused(result, "verses.es-en", "damaged")
    assert not (copy / "runs").exists()


def in_common(code: str, **changes: str) -> subprocess.CompletedProcess:
    prelude = f"set -euo pipefail; root={ROOT}; source {SCRIPTS}/lib/common.sh; "
    return run("bash", "-c", prelude + code, "test.sh", check=False, **changes)


def test_make_file_leaves_a_whole_file_or_none(tmp_path):
    assert in_common(f"make_file {tmp_path}/good echo hello").returncode == 0
    assert (tmp_path / "good").read_text() == "hello\n"
    failing = in_common(f"half() {{ echo half; return 1; }}; make_file {tmp_path}/bad half")
    assert_refused(failing, f"{tmp_path}/bad")
    in_common(f"make_file {tmp_path}/good echo other")
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"good": "hello\n"}


def test_a_lost_line_is_noticed(tmp_path):
    (tmp_path / "in").write_text("a\nb\nc\n")
    (tmp_path / "out").write_text("a\nb\n")
    assert_refused(in_common(f"same_lines {tmp_path}/in {tmp_path}/out"), "2 lines", "has 3")
    # The last line need not end in a newline.
    (tmp_path / "out").write_text("a\nb\nc")
    assert in_common(f"same_lines {tmp_path}/in {tmp_path}/out").returncode == 0


def test_the_makefile_lists_its_targets():
    listed = run("make", "-C", ROOT, "help").stdout
    assert all(f"make {target}" in listed for target in ("venv", "demo", "test", "lint"))


def test_the_scripts_are_executable():
    assert all(os.access(path, os.X_OK) for path in [ROOT / ".ci/run", *SCRIPTS.glob("*.sh")])
