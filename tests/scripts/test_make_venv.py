"""scripts/make_venv.sh: what it refuses, and when it does something. No test creates an environment."""

import hashlib
import shutil
from types import SimpleNamespace

import pytest

from ..scripts_helpers import ROOT, SCRIPTS, assert_refused, environment, run, script


@pytest.mark.parametrize(
    ("changes", "needles"),
    [
        ({"PYTHON": "no-such-python"}, ("no-such-python", "3.11")),
        ({"CXX": "no-such-compiler", "PIP_CACHE_DIR": "EMPTY"}, ("no-such-compiler", "apt-get install", "g++")),
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
    if "PIP_CACHE_DIR" in changes:  # where a compiled fairseq could be
        changes = {**changes, "PIP_CACHE_DIR": str(tmp_path / "cache")}
    result = script("make_venv.sh", VENV=str(tmp_path / "new"), check=False, **changes)
    assert_refused(result, *needles)
    assert not (tmp_path / "new").exists()


@pytest.fixture
def made(tmp_path):
    """A checkout with a complete environment, whose interpreter writes down its arguments.

    ``make`` runs make_venv.sh there, ``calls`` are the interpreter's arguments since the last look, ``entries`` is what
    the environment says about itself.
    """
    checkout, venv, log = tmp_path / "checkout", tmp_path / "venv", tmp_path / "log"
    kernels = checkout / "pn_fairseq/kernels"
    shutil.copytree(SCRIPTS, checkout / "scripts")
    for file in ("constraints.txt", "setup.py"):
        shutil.copy(ROOT / file, checkout)
    shutil.copytree(ROOT / "pn_fairseq/kernels/cpp", kernels / "cpp")
    library, compiles, torch = kernels / "_cpp_1.so", tmp_path / "compiles", "torch==2.13.0 --index-url https://x.org"
    interpreter = venv / "bin/python"
    interpreter.parent.mkdir(parents=True)
    build = f"[ ! -e '{compiles}' ] || {{ sleep 0.05; echo >'{library}'; }}"  # newer than what was there before
    interpreter.write_text(f"#!/bin/sh\necho \"$*\" >>'{log}'\nrm -f '{library}'\n{build}\n")
    interpreter.chmod(0o755)
    compiles.touch()
    library.write_text("compiled")
    made_from = (checkout / "constraints.txt").read_bytes() + (checkout / "setup.py").read_bytes()
    made_from += f"{checkout} no-such-python {torch}\n".encode()
    sources = b"".join(file.read_bytes() for file in sorted((kernels / "cpp").iterdir()))
    (venv / ".pn_fairseq").write_text(
        f"python=no-such-python\ntorch={torch}\n"
        f"key={hashlib.sha256(made_from).hexdigest()}\n"
        f"kernels={hashlib.sha256(sources).hexdigest()}\ncompiler={shutil.which('true')}\nlibrary={library}\n"
    )

    def make(compiler="true", **changes):
        return run("bash", checkout / "scripts/make_venv.sh", VENV=str(venv), CXX=compiler, check=False, **changes)

    def calls():
        lines = log.read_text().splitlines() if log.exists() else []
        log.unlink(missing_ok=True)
        return lines

    def entries():
        return dict(line.split("=", 1) for line in (venv / ".pn_fairseq").read_text().splitlines())

    return SimpleNamespace(
        make=make, calls=calls, entries=entries, checkout=checkout, torch=torch, library=library, compiles=compiles
    )


def test_set_up_again_is_instant_until_something_changes(made):
    for compiler in ("true", "no-such-compiler"):
        done = made.make(compiler)
        assert (done.returncode, done.stderr, made.calls()) == (0, "", [])
    assert made.make(TORCH=made.torch, PYTHON="no-such-python").returncode == 0
    assert_refused(made.make(TORCH="torch==2.12.0"), "no-such-python")
    with (made.checkout / "constraints.txt").open("a") as file:
        file.write("# changed\n")
    assert_refused(made.make(), "no-such-python")


def test_set_up_compiles_the_kernels_again_when_it_can(made):
    made.library.unlink()
    assert made.make("no-such-compiler").returncode == 0 and made.calls() == []
    done = made.make()
    assert (done.returncode, done.stderr) == (0, "[make_venv] compiling the C++ kernels\n")
    (call,) = made.calls()
    assert call.startswith("-m pip ") and call.endswith("--verbose --no-build-isolation --no-deps -e .")
    assert made.library.exists() and made.entries()["library"] == str(made.library)
    assert made.make().returncode == 0 and made.calls() == []

    with next((made.checkout / "pn_fairseq/kernels/cpp").iterdir()).open("a") as file:
        file.write("// changed\n")
    made.compiles.unlink()
    made.make("no-such-compiler")
    assert len(made.calls()) == 1 and made.entries()["library"] == "", "the library was one of older sources"
    assert made.make("no-such-compiler").returncode == 0 and made.calls() == []
    made.make()
    assert len(made.calls()) == 1, "there is a compiler at last, which fails"
    made.make()
    assert made.calls() == [], "it is not tried again"


@pytest.mark.parametrize(
    ("installed", "chosen"),
    [
        (["3.11", "3.12", "3.13"], "3.13"),
        (["3.11", "3.14"], "3.11"),
        (["3.14"], "3.14"),
        (["3.10"], None),
    ],
    ids=str,
)
def test_the_newest_supported_interpreter_is_taken(installed, chosen, tmp_path):
    """Interpreters that know their version and lack venv, so that set-up ends with what it asks for."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in ("python3.11", "python3.12", "python3.13", "python3"):
        version = name.removeprefix("python")
        version = installed[-1] if version == "3" else version
        old = int(version.split(".")[1]) < 11 or version not in installed
        answer = f'case "$2" in *exit*) exit {int(old)} ;; *print*) echo {version} ;; *) exit 1 ;; esac'
        (folder / name).write_text(f"#!/bin/sh\n{answer}\n")
        (folder / name).chmod(0o755)
    path = f"{folder}:{environment()['PATH']}"
    done = script("make_venv.sh", VENV=str(tmp_path / "new"), check=False, PATH=path)
    if chosen is None:
        assert_refused(done, "no Python 3.11 to 3.13", "apt-get install")
    else:
        assert_refused(done, f"'python{chosen if chosen != '3.14' else '3'}'", f"apt-get install python{chosen}-venv")
    assert ("is untried" in done.stderr) == (chosen == "3.14")


def test_set_up_does_not_overwrite_another_directory(tmp_path):
    (tmp_path / "thesis.tex").write_text("years of work")
    assert_refused(script("make_venv.sh", VENV=str(tmp_path), check=False), str(tmp_path), "refusing to overwrite")
    assert (tmp_path / "thesis.tex").read_text() == "years of work"


@pytest.fixture
def fresh(tmp_path):
    """Runs make_venv.sh in a new checkout, with an interpreter that only writes down what pip is to install."""
    checkout, log, include = tmp_path / "checkout", tmp_path / "log", tmp_path / "include"
    shutil.copytree(SCRIPTS, checkout / "scripts")
    shutil.copytree(ROOT / "pn_fairseq/kernels/cpp", checkout / "pn_fairseq/kernels/cpp")
    for file in ("constraints.txt", "setup.py"):
        shutil.copy(ROOT / file, checkout)
    include.mkdir()
    (include / "Python.h").touch()
    interpreter = tmp_path / "python3.12"
    interpreter.write_text(
        f"""#!/bin/sh
case "$*" in
*version_info[:2]*) echo 3.12 ;;
*get_path*) echo '{include}' ;;
"-m venv --clear "*) rm -rf "$4" && mkdir -p "$4/bin" && cp "$0" "$4/bin/python" ;;
*" install "*) echo "$*" | sed 's/.* install -c [^ ]* //' >>'{log}' ;;
*" freeze") echo torch==2.13.0+cpu ;;
esac
"""
    )
    interpreter.chmod(0o755)

    def make(**changes):
        log.unlink(missing_ok=True)
        place = {"PYTHON": str(interpreter), "VENV": str(tmp_path / "venv"), "CXX": "true"}
        made = run("bash", checkout / "scripts/make_venv.sh", **place, **changes)
        return log.read_text().splitlines(), made.stderr.splitlines(), (tmp_path / "venv/constraints.txt").read_text()

    return make


def test_torch_for_a_cpu_is_one_setting(fresh):
    installed, said, constraints = fresh(TORCH="cpu")
    assert installed[:2] == ["pip", "torch --index-url https://download.pytorch.org/whl/cpu"]
    assert installed[-2:] == ["--no-build-isolation fairseq-fixed", "--verbose --no-build-isolation -e .[fairseq,test]"]
    assert not any("CUDA" in line for line in said) and said[-1].endswith("/venv/bin/activate")
    assert "\ntorch==2.13.0\n" in constraints


def test_gigabytes_of_cuda_are_announced_where_there_is_no_gpu(fresh):
    _, said, _ = fresh()
    (index,) = [index for index, line in enumerate(said) if line == "[make_venv] installing torch"]
    assert ("make venv TORCH=cpu" in said[index - 1]) == (shutil.which("nvidia-smi") is None)


def test_another_torch_takes_the_place_of_the_pinned_one(fresh):
    installed, _, constraints = fresh(TORCH="torch==2.12.0 --index-url https://example.org")
    assert installed[1] == "torch==2.12.0 --index-url https://example.org"
    assert "torch==2.13.0\n" not in constraints and "triton" not in constraints and "numpy==" in constraints
