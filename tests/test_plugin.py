"""The two ways into the package: fairseq's --user-dir, and an ordinary import."""

import shutil
import sys

import pytest

from .scripts_helpers import ROOT, run

REGISTER = """
import sys
from argparse import Namespace
from fairseq.models import ARCH_MODEL_REGISTRY
from fairseq.utils import import_user_module
import_user_module(Namespace(user_dir=sys.argv[1]))
import pn_fairseq
print(pn_fairseq.__path__[0], "transformer_pn_iwslt" in ARCH_MODEL_REGISTRY)
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """The project as `pip install .` installs it, away from the checkout."""
    base = tmp_path_factory.mktemp("installed")
    shutil.copytree(ROOT / "pn_fairseq", base / "source/pn_fairseq")
    for file in ("setup.py", "pyproject.toml", "README.md"):
        shutil.copy(ROOT / file, base / "source")
    pip = (sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation")
    run(*pip, "--target", base / "site", base / "source")
    return base / "site"


def test_norms_do_not_load_fairseq(tmp_path):
    code = "import sys, pn_fairseq.norms; print('fairseq' in sys.modules)"
    assert run(sys.executable, "-c", code, cwd=tmp_path).stdout == "False\n"


def test_user_dir_of_the_checkout_from_another_folder(tmp_path):
    printed = run(sys.executable, "-m", "pn_fairseq", "--user-dir", cwd=tmp_path).stdout.strip()
    assert printed == str(ROOT / "pn_fairseq")
    assert run(sys.executable, "-c", REGISTER, printed, cwd=tmp_path).stdout.split() == [printed, "True"]


def test_installed_package_as_user_dir_from_another_folder(installed, tmp_path):
    place = {"cwd": tmp_path, "PYTHONPATH": str(installed)}
    printed = run(sys.executable, "-m", "pn_fairseq", "--user-dir", **place).stdout.strip()
    assert printed == str(installed / "pn_fairseq")
    result = run(sys.executable, "-c", REGISTER, printed, **place)
    assert result.stdout.split() == [printed, "True"]


def test_checkout_as_user_dir_beside_an_installed_package(installed, tmp_path):
    """The checkout that --user-dir names is used, whatever is installed."""
    result = run(sys.executable, "-c", REGISTER, ROOT / "pn_fairseq", cwd=tmp_path, PYTHONPATH=str(installed))
    assert result.stdout.split() == [str(ROOT / "pn_fairseq"), "True"]


def test_importing_the_package_after_fairseq_registers_the_model(tmp_path):
    code = """
from fairseq.models import ARCH_MODEL_REGISTRY
import pn_fairseq
print("transformer_pn_iwslt" in ARCH_MODEL_REGISTRY)
"""
    assert run(sys.executable, "-c", code, cwd=tmp_path).stdout == "True\n"


def test_version_and_missing_argument(tmp_path):
    assert run(sys.executable, "-m", "pn_fairseq", "--version", cwd=tmp_path).stdout.startswith("pn_fairseq 0.")
    result = run(sys.executable, "-m", "pn_fairseq", cwd=tmp_path, check=False)
    assert result.returncode == 2 and "--user-dir" in result.stderr
