"""What setup.py leaves of a build, with compilers that take no time: they write what they were
asked for.
"""

import contextlib
import io
import os
import platform
import re
import runpy
import shutil
import sys
from unittest import mock

import pytest
import torch

from pn_fairseq import kernels
from pn_fairseq.kernels import selection
from pn_fairseq.kernels.selection import EXTENSION

from ..scripts_helpers import ROOT

ARM = "aarch64-linux-gnu-g++"
LIBRARY = EXTENSION.rpartition(".")[2] + ".so"

#: Writes down its arguments, one call a line, and makes the file that follows -o.
COMPILER = """#!/bin/sh
echo "$*" >>'{log}'
{condition}
while [ "$1" != -o ]; do shift; done
echo compiled >"$2"
"""
WITHOUT_OPENMP = (
    'case " $* " in *" -fopenmp "*) echo "unsupported option -fopenmp" >&2; exit 1 ;; esac'
)


@pytest.fixture
def build(tmp_path):
    """Runs setup.py of a copy of this project: arguments, what the compiler does first -> its
    lines, calls made.
    """
    checkout = tmp_path / "checkout"
    log = tmp_path / "log"
    sources = ROOT / "pn_fairseq/kernels"
    others = ("setup.py", "README.md", "pn_fairseq/__init__.py", sources / "selection.py")
    for file in (*others, *sources.glob("cpp/*")):
        copy = checkout / (ROOT / file).relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes((ROOT / file).read_bytes())

    def run(*arguments: str, condition: str = "", machine: str = platform.machine()):
        compiler = tmp_path / "c++"
        compiler.write_text(COMPILER.format(log=log, condition=condition))
        compiler.chmod(0o755)
        log.unlink(missing_ok=True)
        variables = {
            "CC": str(compiler),
            "CXX": str(compiler),
            "TORCH_DONT_CHECK_COMPILER_ABI": "1",
        }
        stderr = io.StringIO()
        with (
            mock.patch.dict(os.environ, variables),
            mock.patch.object(sys, "argv", ["setup.py", "-q", "build_ext", *arguments]),
            mock.patch.object(platform, "machine", lambda: machine),
            contextlib.chdir(checkout),
            contextlib.redirect_stderr(stderr),
        ):
            runpy.run_path("setup.py")
        announced, *messages = [
            line for line in stderr.getvalue().splitlines() if line.startswith("pn_fairseq:")
        ]
        assert "compiling the C++ kernels" in announced
        return messages, log.read_text().splitlines()

    run.checkout = checkout
    return run


def libraries(folder):
    return sorted(path.relative_to(folder).parts[-1] for path in folder.rglob("_cpp*"))


@pytest.fixture
def old(build):
    """What earlier builds left, where it is packaged and where it is imported; newer than all
    sources.
    """
    files = [build.checkout / folder / "pn_fairseq/kernels" / LIBRARY for folder in ("lib", ".")]
    for file in files:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("old")
        os.utime(file, (2**32, 2**32))
    files[0].with_name("_cpp_1_0_0.so").write_text("of another torch")
    return files


def test_the_library_bears_the_name_that_is_looked_for_and_is_always_compiled(build, old):
    assert (
        re.sub(r"[^0-9a-z]", "_", f"cpp_{torch.__version__}_{selection.SCHEMAS}") == LIBRARY[1:-3]
    )
    messages, calls = build("--inplace", "--build-lib", "lib")
    assert messages == [] and all("-fopenmp" in call for call in calls)
    assert libraries(build.checkout / "lib") == [LIBRARY]
    assert [file.read_text() for file in old] == ["compiled\n"] * 2


def test_a_failed_build_leaves_nothing_of_an_earlier_one(build, old):
    (line,), _ = build("--inplace", "--build-lib", "lib", condition="exit 1")
    assert line.startswith(
        "pn_fairseq: installed without C++ kernels, which could not be compiled: "
    )
    assert line.count("c++") == 1 and len(line) < 300, "a command with all its arguments"
    assert libraries(build.checkout) == []


def test_a_compiler_without_openmp(build):
    (line,), calls = build("--inplace", "--build-lib", "lib", condition=WITHOUT_OPENMP)
    assert "compiled without OpenMP" in line and "one thread" in line
    assert libraries(build.checkout) == [LIBRARY, LIBRARY]
    sources = {path.name for path in (ROOT / "pn_fairseq/kernels/cpp").glob("*.cpp")}
    plain = [call for call in calls if "-fopenmp" not in call]
    for source in sources:
        assert any(source in call for call in plain), source


@pytest.mark.slow
@pytest.mark.skipif(
    shutil.which(ARM) is None, reason=f"there is no {ARM} (Debian: g++-aarch64-linux-gnu)"
)
def test_the_sources_compile_for_64_bit_arm(build):
    """They are not linked: there is no torch for it here."""
    messages, _ = build(
        "--build-temp",
        "temp",
        condition=f'case " $* " in *" -c "*) exec {ARM} "$@" ;; esac',
        machine="aarch64",
    )
    assert messages == []
    objects = {path.stem: path.read_bytes() for path in (build.checkout / "temp").rglob("*.o")}
    assert set(objects) == {"ops", "rows_baseline"}
    assert all(content[18:20] == b"\xb7\x00" for content in objects.values()), (
        "ELF's number of aarch64"
    )


@pytest.mark.skipif("cpp" not in kernels.available(), reason="there are no C++ kernels here")
def test_kernels_for_another_torch_are_not_loaded(monkeypatch):
    monkeypatch.setattr(selection, "EXTENSION", "pn_fairseq.kernels._cpp_1_0_0")
    with pytest.warns(
        UserWarning, match="without its C\\+\\+ kernels: they are not compiled for torch"
    ):
        assert "--no-build-isolation" in selection._load_cpp()
