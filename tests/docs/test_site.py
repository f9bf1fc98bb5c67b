"""The documentation site."""

import inspect
import subprocess
import sys

import pytest

from pn_fairseq import norms

from .pages import ROOT


@pytest.mark.parametrize("name", norms.__all__)
def test_public_name_is_documented(name):
    value = getattr(norms, name)
    if inspect.isclass(value) or inspect.isfunction(value):
        assert inspect.getdoc(value)


@pytest.mark.slow
def test_strict_build(tmp_path):
    """No broken link or anchor, no undocumented public name."""
    pytest.importorskip("mkdocs")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", tmp_path / "site"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    assert "<math" in (tmp_path / "site/api.html").read_text("utf-8")
    page = (tmp_path / "site/architecture.html").read_text("utf-8")
    assert page.count('src="figures/architecture-') == 3 and "unpkg" not in page
    assert not (tmp_path / "site/tools").exists()
