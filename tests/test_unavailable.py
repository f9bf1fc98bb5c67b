"""Kernels that are asked for and cannot run end every program in one line; a library's user gets an exception."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from pn_fairseq.errors import fairseq_program
from pn_fairseq.kernels import VARIABLE

from .scripts_helpers import ROOT, run
from .test_generate import untrained_checkpoint


@pytest.fixture(scope="module")
def checkpoint(data, tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("run") / "checkpoints/averaged.pt"
    untrained_checkpoint(data, path)
    return path


@pytest.fixture(scope="module")
def uncompiled(tmp_path_factory) -> Path:
    """A folder with the package as it is where there was no compiler."""
    folder = tmp_path_factory.mktemp("uncompiled")
    shutil.copytree(ROOT / "pn_fairseq", folder / "pn_fairseq", ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    return folder


def assert_one_line(result: subprocess.CompletedProcess, tool: str, *needles: str) -> None:
    (line,) = [line for line in result.stderr.splitlines() if "error" in line.lower() or "Traceback" in line]
    assert result.returncode == 2, result.stderr
    assert line == result.stderr.splitlines()[-1] and line.startswith(f"{tool}: error: {VARIABLE}="), result.stderr
    assert all(needle in line for needle in needles), line


def with_fairseq(program: str, data: Path, *options, root: Path = ROOT, **changes: str) -> subprocess.CompletedProcess:
    given = (data / "bin", "--user-dir", root / "pn_fairseq", "-s", "es", "-t", "en", "--cpu", *options)
    module = program.removeprefix("fairseq-")
    return run(sys.executable, "-m", f"fairseq_cli.{module}", *given, check=False, TRITON_INTERPRET="0", **changes)


def train(data: Path, **options) -> subprocess.CompletedProcess:
    flags = "--arch transformer_pn_tiny --optimizer adam --lr 0.001 --max-update 1 --max-tokens 400 --no-save".split()
    return with_fairseq("fairseq-train", data, *flags, **options)


def test_training(data, uncompiled):
    without = train(data, root=uncompiled, PYTHONPATH=str(uncompiled), **{VARIABLE: "cpp"})
    assert_one_line(without, "fairseq-train", "cpp, but there are no C++ kernels", "not compiled")
    assert_one_line(train(data, **{VARIABLE: "triton"}), "fairseq-train", "triton")


def test_decoding(data, checkpoint):
    result = with_fairseq("fairseq-generate", data, "--path", checkpoint, **{VARIABLE: "triton"})
    assert_one_line(result, "fairseq-generate", "triton")


@pytest.mark.parametrize(
    ("tool", "name"), [("fold", "fast"), ("fold", "triton"), ("average-checkpoints", "triton")], ids=str
)
def test_tools(tool, name, data, checkpoint, tmp_path):
    output = tmp_path / "output.pt"
    arguments = (checkpoint, output)
    if tool == "average-checkpoints":
        arguments = ("--inputs", checkpoint, "--output", output, "--recalibrate", data / "bin", "--batches", "1")
    module = f"pn_fairseq.cli.{tool.replace('-', '_')}"
    changes = {VARIABLE: name, "TRITON_INTERPRET": "0"}
    result = run(sys.executable, "-m", module, *arguments, check=False, **changes)
    assert_one_line(result, f"pn-{tool}", f"={name}")
    assert not output.exists()


def test_a_library_raises():
    """Also beside fairseq, which somebody else's program may have imported."""
    code = "import fairseq.models\nfrom pn_fairseq.norms import PowerNorm"
    result = run(sys.executable, "-c", code, cwd=ROOT, check=False, **{VARIABLE: "fast"})
    assert result.returncode == 1
    assert result.stderr.splitlines()[-1].startswith("pn_fairseq.errors.Unavailable: PN_FAIRSEQ_KERNELS=fast is not")


@pytest.mark.parametrize(
    ("program", "name"),
    [
        ("/usr/bin/fairseq-train", "fairseq-train"),
        ("/site-packages/fairseq_cli/hydra_train.py", "fairseq-hydra-train"),
        ("/home/me/train.py", None),
        ("-c", None),
        ("", None),
    ],
)
def test_programs_of_fairseq_are_known_by_name(program, name, monkeypatch):
    monkeypatch.setattr(sys, "argv", [program])
    assert fairseq_program() == name


@pytest.mark.filterwarnings("ignore::UserWarning")  # fairseq uses hydra's old interface
def test_a_script_that_starts_fairseq_is_fairseq(monkeypatch):
    from fairseq_cli.hydra_train import cli_main

    monkeypatch.setattr(sys, "argv", ["/home/me/worker.py"])
    monkeypatch.setattr(sys.modules["__main__"], "cli_main", cli_main, raising=False)
    assert fairseq_program() == "fairseq-hydra-train"
