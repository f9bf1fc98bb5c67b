"""scripts/make_venv.sh: what it refuses, when it does something, and where torch and its
dependencies come from.
"""

import hashlib
import re
import shutil
import subprocess
import zipfile
from types import SimpleNamespace

import pytest

from ..scripts_helpers import ROOT, SCRIPTS, assert_refused, environment, run


def make_checkout(folder):
    """The files that make_venv.sh reads."""
    shutil.copytree(SCRIPTS, folder / "scripts")
    shutil.copytree(ROOT / "pn_fairseq/kernels/cpp", folder / "pn_fairseq/kernels/cpp")
    for file in ("constraints.txt", "setup.py"):
        shutil.copy(ROOT / file, folder)
    return folder


@pytest.fixture
def made(tmp_path):
    """A checkout with a complete environment, whose interpreter writes down its arguments.

    ``make`` runs make_venv.sh there, ``calls`` are the interpreter's arguments since the last look.
    """
    checkout = make_checkout(tmp_path / "checkout")
    venv, log = tmp_path / "venv", tmp_path / "log"
    torch = "torch==2.13.0 --extra-index-url https://x.org"
    interpreter = venv / "bin/python"
    interpreter.parent.mkdir(parents=True)
    interpreter.write_text(f"#!/bin/sh\necho \"$*\" >>'{log}'\n")
    interpreter.chmod(0o755)
    made_from, kernels = hashlib.sha256(), hashlib.sha256()
    for name in ("constraints.txt", "setup.py"):
        made_from.update((checkout / name).read_bytes())
    made_from.update(f"{checkout} no-such-python {torch}\n".encode())
    for file in sorted((checkout / "pn_fairseq/kernels/cpp").iterdir()):
        kernels.update(file.read_bytes())
    (venv / ".pn_fairseq").write_text(
        f"python=no-such-python\ntorch={torch}\nmade_from={made_from.hexdigest()}\n"
        f"kernels={kernels.hexdigest()}\n"
    )

    def make(**changes):
        how = {"VENV": str(venv), "check": False, **changes}
        return run("bash", checkout / "scripts/make_venv.sh", **how)

    def calls():
        lines = log.read_text().splitlines() if log.exists() else []
        log.unlink(missing_ok=True)
        return lines

    return SimpleNamespace(make=make, calls=calls, checkout=checkout, torch=torch)


def test_it_does_nothing_until_something_changes(made):
    for variables in ({}, {"TORCH": made.torch, "PYTHON": "no-such-python"}):
        done = made.make(**variables)
        assert (done.returncode, done.stderr, made.calls()) == (0, "", [])
    refused = made.make(TORCH="torch==2.12.0")
    assert_refused(refused, "no-such-python", "3.11 to 3.13", "apt-get install")
    with (made.checkout / "constraints.txt").open("a") as file:
        file.write("# changed\n")
    assert_refused(made.make(), "no-such-python")


def test_changed_sources_are_compiled_again(made):
    with next((made.checkout / "pn_fairseq/kernels/cpp").iterdir()).open("a") as file:
        file.write("// changed\n")
    done = made.make()
    assert done.returncode == 0 and "compiling fairseq and the C++ kernels" in done.stderr
    *compiled, packages = made.calls()
    options = [call.split()[-1].partition("=")[0] for call in compiled]
    assert set(options) == {"--requirement", "--editable"}
    for call in compiled:
        assert "--no-deps --no-build-isolation" in call
    assert packages.startswith("-m pip ") and packages.endswith(" pn-fairseq[fairseq,test]")
    assert made.make().stderr == "" and made.calls() == []


def test_the_newest_supported_interpreter_is_taken(tmp_path):
    """Of interpreters without venv, so that it ends there."""
    without_venv = 'case "$*" in *venv*) exit 1 ;; esac'
    for name, line in (
        ("python3.12", without_venv),
        ("python3.11", without_venv),
        ("python3.13", "exit 127"),  # as of pyenv, which has it not chosen
    ):
        (tmp_path / name).write_text(f"#!/bin/sh\n{line}\n")
        (tmp_path / name).chmod(0o755)
    path = f"{tmp_path}:{environment()['PATH']}"
    done = run("bash", SCRIPTS / "make_venv.sh", VENV=str(tmp_path / "new"), PATH=path, check=False)
    assert_refused(done, "'python3.12'", "apt-get install python3-venv")
    assert not (tmp_path / "new").exists()


def test_what_another_has_made_stays_as_it_is(made, tmp_path):
    """The second checkout's script is this one's; a mark without ``checkout=`` is that of an
    earlier version.
    """
    venv, checkout = tmp_path / "venv", made.checkout
    marked = venv / ".pn_fairseq"
    mark = marked.read_text()
    (tmp_path / "link").symlink_to("venv")
    (tmp_path / "dangling").symlink_to("nowhere")
    shutil.copytree(venv, checkout / ".venv")
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis/chapter 1").write_text("years of work")
    of_another = f"of the checkout '{checkout}'"
    for name, line, message in (
        ("link", "", "/link' is a link to '"),
        ("link/", "", "/link' is a link to '"),
        ("dangling", "", "/dangling' is a link to '"),
        ("venv", f"checkout={checkout}\n", of_another),
        ("thesis", "", f"refusing to overwrite VENV='{tmp_path}/thesis'"),
        ("checkout/.venv", "", of_another),
    ):
        marked.write_text(line + mark)
        refused = run("bash", SCRIPTS / "make_venv.sh", VENV=f"{tmp_path}/{name}", check=False)
        assert_refused(refused, message, "choose another VENV")
        assert marked.read_text() == line + mark
        assert (checkout / ".venv/bin/python").exists()
    assert (tmp_path / "thesis/chapter 1").read_text() == "years of work"
    refused = made.make(TORCH="torch==2.12.0")  # its own: refused for want of an interpreter only
    assert_refused(refused, "no-such-python")


@pytest.mark.parametrize("reachable", [True, False])
def test_only_torch_is_asked_of_its_own_index(tmp_path, reachable):
    """With an interpreter that writes down its arguments, and a pip that reaches that index or
    does not.
    """
    fake, log = tmp_path / "python", tmp_path / "log"
    checkout = make_checkout(tmp_path / "checkout")
    fake.write_text(
        f"""#!/bin/sh
        echo "$*" >>'{log}'
        case "$*" in
            *"-m venv"*) mkdir -p "$4/bin" && cp "$0" "$4/bin/python" ;;
            *--index-url*) echo 'ERROR: No matching distribution' && exit {int(not reachable)} ;;
        esac
        """.replace("\n        ", "\n")
    )
    fake.chmod(0o755)
    variables = {"PYTHON": str(fake), "VENV": f"{tmp_path}/venv"}
    variables |= {"TORCH": "cpu", "TORCH_INDEX": "https://torch.org"}
    done = run("bash", checkout / "scripts/make_venv.sh", **variables)
    steps = [line.partition(" ")[2] for line in done.stderr.splitlines()]
    wanted = "torch==2.13.0+cpu --no-deps --retries 1 --timeout 15 --index-url https://torch.org"
    assert steps[1] == f"2/4 installing {wanted}"
    assert [step[:3] for step in steps if step[1:2] == "/"] == ["1/4", "2/4", "3/4", "4/4"]
    assert ("not from there (ERROR: No matching distribution)" in done.stderr) is not reachable
    assert len(steps) == 5 + (not reachable)
    pip = re.findall(r"-m pip .*-c .*constraints.txt (.*)", log.read_text())
    assert pip[:3] == ["pip", wanted, "torch numpy cython setuptools wheel"]
    assert len(pip) == 6 and pip[-1] == "pn-fairseq[fairseq,test]"
    assert run("bash", checkout / "scripts/make_venv.sh", **variables).stderr == ""


#: What torch 2.13.0+cpu needs.
NEEDED = ["filelock", "typing-extensions>=4.10.0", "setuptools>=77.0.3", "sympy>=1.13.3"]
NEEDED += ["networkx>=2.5.1", "jinja2", "fsspec>=0.8.5"]


@pytest.mark.slow
def test_torch_for_cpus_from_an_index_that_has_nothing_else(tmp_path):
    """A fresh environment, the pinned pip, a small stand-in for torch. A fairseq that does not
    exist ends it then.

    The stand-in has a version that the usual index does not have.
    """
    checkout, venv = make_checkout(tmp_path / "checkout"), tmp_path / "venv"
    pins = (checkout / "constraints.txt").read_text()
    pins = pins.replace("\ntorch==2.13.0\n", "\ntorch==2.13.99\n")
    pins = pins.replace("fairseq-fixed==", "fairseq-fixed==99.")
    (checkout / "constraints.txt").write_text(pins)
    index, name = tmp_path / "index/torch", "torch-2.13.99+cpu-py3-none-any.whl"
    index.mkdir(parents=True)
    (index / "index.html").write_text(f'<a href="{name}">torch</a>')
    metadata = "Metadata-Version: 2.1\nName: torch\nVersion: 2.13.99+cpu\n"
    metadata += "".join(f"Requires-Dist: {name}\n" for name in NEEDED)
    pure = "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    with zipfile.ZipFile(index / name, "w") as wheel:
        for file, text in (("METADATA", metadata), ("WHEEL", pure), ("RECORD", "")):
            wheel.writestr(f"torch-2.13.99+cpu.dist-info/{file}", text)
    variables = {"VENV": str(venv), "TORCH": "cpu", "TORCH_INDEX": f"file://{tmp_path}/index"}
    done = run("bash", checkout / "scripts/make_venv.sh", check=False, **variables)
    last = done.stderr.splitlines()[-1]
    assert done.returncode == 2 and "pip could not install 'fairseq and pn_fairseq'" in last
    assert "[make_venv] 2/4 installing torch==2.13.99+cpu" in done.stderr
    assert "CUDA" not in done.stderr
    pip = [venv / "bin/python", "-m", "pip", "list", "--format=freeze"]
    listed = subprocess.check_output(pip, text=True).replace("Jinja2", "jinja2").split()
    pinned = re.findall("(?m)^(?:pip|setuptools|jinja2)==.*", pins)
    assert {"torch==2.13.99+cpu", *pinned} <= set(listed)
    assert not any(line.startswith(("triton==", "nvidia")) for line in listed)
