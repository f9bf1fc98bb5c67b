"""Imports and runs the programs of examples/, which are no package."""

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]


def load(name: str) -> ModuleType:
    path = ROOT / f"examples/{name}.py"
    spec = importlib.util.spec_from_file_location(f"examples_{name}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def refused(program: ModuleType, capsys, *arguments) -> str:
    """The one line of a mistake, without a progress bar."""
    with pytest.raises(SystemExit) as exit:
        program.main([str(argument) for argument in arguments])
    assert exit.value.code == 2
    lines = capsys.readouterr().err.splitlines()
    (line,) = [line for line in lines if line and "%|" not in line]
    return line
