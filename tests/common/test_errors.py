"""Kernels that are asked for and cannot run end every program with one line; a library's user
gets an exception.
"""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from pn_fairseq.common.errors import Unavailable, fairseq_program
from pn_fairseq.fairseq_patches.one_line_errors import compute
from pn_fairseq.kernels import VARIABLE

from ..models.helpers import write_data
from ..scripts_helpers import ROOT, call_in, run


def assert_one_line(result: subprocess.CompletedProcess, tool: str, *needles: str) -> None:
    (line,) = [
        line
        for line in result.stderr.splitlines()
        if "error" in line.lower() or "Traceback" in line
    ]
    assert result.returncode == 2, result.stderr
    assert line == result.stderr.splitlines()[-1] and line.startswith(
        f"{tool}: error: {VARIABLE}="
    ), result.stderr
    assert all(needle in line for needle in needles), line


def train(folder: Path, package: Path, **variables: str) -> subprocess.CompletedProcess:
    flags = (
        "--cpu --arch transformer_pn_tiny --optimizer adam --lr 0.001 --max-update 1 --max-tokens "
        "400 --no-save"
    )
    command = ("fairseq-train", write_data(folder), "--user-dir", package, *flags.split())
    return run(*command, cwd=folder, check=False, TRITON_INTERPRET="0", **variables)


@pytest.mark.ci
def test_training_without_the_kernels_that_were_asked_for(tmp_path):
    """When the package is imported."""
    ignored = shutil.ignore_patterns("*.so", "__pycache__")
    package = shutil.copytree(ROOT / "pn_fairseq", tmp_path / "pn_fairseq", ignore=ignored)
    result = train(tmp_path / "data", package, PYTHONPATH=str(tmp_path), **{VARIABLE: "cpp"})
    assert_one_line(result, "fairseq-train", "cpp, but there are no C++ kernels", "not compiled")


@pytest.mark.ci
def test_training_with_kernels_for_another_device(tmp_path):
    """When the first batch arrives."""
    assert_one_line(
        train(tmp_path, ROOT / "pn_fairseq", **{VARIABLE: "triton"}), "fairseq-train", "triton"
    )


@pytest.mark.ci
def test_a_tool(tmp_path):
    result = run(sys.executable, "-m", "pn_fairseq", "info", check=False, **{VARIABLE: "fast"})
    assert_one_line(result, "pn info", "=fast", "reference, triton, cpp")
    assert result.stdout == ""


@pytest.mark.ci
def test_a_library_raises():
    """Also where the program has imported fairseq."""
    code = "import fairseq.models\nfrom pn_fairseq.norms import PowerNorm"
    result = run(sys.executable, "-c", code, cwd=ROOT, check=False, **{VARIABLE: "fast"})
    assert result.returncode == 1
    assert result.stderr.splitlines()[-1].startswith(
        "pn_fairseq.common.errors.Unavailable: PN_FAIRSEQ_KERNELS=fast is not"
    )


def test_programs_of_fairseq_are_known_by_the_call_stack(capsys):
    assert fairseq_program() is None
    assert call_in("", "/home/me/train.py", fairseq_program) is None
    assert (
        call_in("fairseq_cli", "/site-packages/fairseq_cli/train.py", fairseq_program)
        == "fairseq-train"
    )

    def training():
        return call_in("fairseq_cli", "/site-packages/fairseq_cli/train.py", fairseq_program)

    # The program that the user has started, and not the one that it calls.
    assert (
        call_in("fairseq_cli", "/site-packages/fairseq_cli/hydra_train.py", training)
        == "fairseq-hydra-train"
    )


def test_computing(capsys):
    def fails():
        return compute(
            lambda: call_in("", "ops.py", lambda: (_ for _ in ()).throw(Unavailable("no\nGPU")))
        )

    with pytest.raises(Unavailable):
        fails()
    with pytest.raises(SystemExit) as stop:
        call_in("fairseq_cli", "/site-packages/fairseq_cli/generate.py", fails)
    assert stop.value.code == 2 and capsys.readouterr().err == "fairseq-generate: error: no GPU\n"
