"""The source distribution and the wheel: complete, and usable in an empty folder of a fresh
environment.
"""

import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
from pathlib import Path

import pytest

from pn_fairseq import kernels
from pn_fairseq.__main__ import VERBS

from .scripts_helpers import ROOT, run

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def sdist(tmp_path_factory) -> Path:
    """The unpacked source distribution of the files that git knows or would add."""
    base = tmp_path_factory.mktemp("sdist")
    listed = run("git", "-C", ROOT, "ls-files", "-co", "--exclude-standard").stdout.splitlines()
    for name in filter(lambda name: (ROOT / name).is_file(), listed):
        (base / "checkout" / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, base / "checkout" / name)
    # Isolated builds have no torch.
    code = (
        "import sys; sys.modules['torch'] = None; from setuptools import build_meta; "
        "build_meta.build_sdist('..')"
    )
    run(sys.executable, "-c", code, cwd=base / "checkout")
    (archive,) = base.glob("*.tar.gz")
    with tarfile.open(archive) as file:
        file.extractall(base, filter="data")
    return base / archive.name.removesuffix(".tar.gz")


@pytest.fixture(scope="module")
def installed(sdist, tmp_path_factory):
    """Runs the commands of a fresh environment that has the wheel; what the wheel depends on is
    this environment's.
    """
    base = tmp_path_factory.mktemp("wheel")
    pip = (sys.executable, "-m", "pip")
    run(*pip, "wheel", "--quiet", "--no-deps", "--no-build-isolation", "-w", base, sdist)
    run(sys.executable, "-m", "venv", "--without-pip", base / "venv")
    python = base / "venv/bin/python"
    packages = run(
        python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"
    ).stdout.strip()
    # A path in a .pth file is no site folder: the editable installation in it is not seen.
    Path(packages, "dependencies.pth").write_text(f"{sysconfig.get_path('purelib')}\n")
    (wheel,) = base.glob("*.whl")
    run(*pip, f"--python={python}", "install", "--quiet", "--no-deps", "--ignore-installed", wheel)
    (base / "empty").mkdir()

    def call(program: str, *words: str) -> subprocess.CompletedProcess:
        kept = {
            name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VENV")
        }
        env = {**kept, "PATH": f"{base}/venv/bin:{os.environ['PATH']}"}
        call = {
            "cwd": base / "empty",
            "env": env,
            "capture_output": True,
            "text": True,
            "timeout": 600,
        }
        return subprocess.run([f"{base}/venv/bin/{program}", *words], **call)

    call.wheel = wheel.name
    return call


def test_the_source_distribution_has_what_a_build_and_the_scripts_need(sdist):
    of_checkout = run(
        "git", "-C", ROOT, "ls-files", "configs", "data", "scripts", "pn_fairseq"
    ).stdout.splitlines()
    assert len(of_checkout) > 100
    for name in of_checkout:
        assert (sdist / name).is_file() or not (ROOT / name).is_file(), name
    assert not (sdist / "tests").exists()


@pytest.mark.parametrize(
    "command", ["train iwslt14_de_en --check", "train verses_lm_en --check", "--version"]
)
def test_commands_in_an_empty_folder(command, installed):
    done = installed("pn", *command.split())
    assert done.returncode == 0, done.stderr


def test_it_uses_the_same_kernels_as_the_checkout(installed):
    lines = installed("pn", "info").stdout.splitlines()
    computing = []
    for device, (name, why) in kernels.describe().items():
        computing.append(f"kernels on {device}: {name} ({why})")
    assert [line for line in lines if line.startswith("kernels on ")] == computing
    assert "/venv/lib/" in next(
        line for line in lines if line.startswith("folder for --user-dir: ")
    )
    assert ("py3-none-any" in installed.wheel) == ("cpp" not in kernels.available())


def test_every_verb_has_help(installed):
    code = """
from pn_fairseq.__main__ import call
for verb in {verbs}:
    print(verb, call([*verb.split(), "--help"]))
"""
    verbs = [*VERBS, *(["prepare iwslt14"] if "prepare" in VERBS else []), "reproduce demo"]
    done = installed("python", "-c", code.format(verbs=verbs))
    assert [verb for verb in verbs if f"\n{verb} 0\n" not in f"\n{done.stdout}"] == [], done.stderr
