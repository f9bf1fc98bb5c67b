"""examples/tour.ipynb runs, and docs/tour.md shows it."""

import shutil

import pytest

from .pages import ROOT

pytest.importorskip("nbformat")
from docs.tools import tour  # noqa: E402


def notebook():
    return tour.nbformat.read(tour.NOTEBOOK, as_version=4)


def test_page_shows_the_notebook():
    text, pictures = tour.page(notebook())
    assert tour.PAGE.read_text("utf-8") == text, f"{tour.COMMAND} --no-run writes it"
    assert len(pictures) == 3
    for name, png in pictures.items():
        assert (tour.PICTURES / name).read_bytes() == png


@pytest.mark.slow
def test_notebook_runs(tmp_path, monkeypatch):
    """In a copy, with a quarter of the updates; its pictures and table appear again."""
    pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    (tmp_path / "examples").mkdir()
    (tmp_path / "data").symlink_to(ROOT / "data")
    copy = tmp_path / "examples/tour.ipynb"
    shutil.copy(tour.NOTEBOOK, copy)
    monkeypatch.setattr(tour, "NOTEBOOK", copy)
    short = notebook()
    for cell in short.cells:
        cell.source = cell.source.replace("updates=200, warmup=30", "updates=50, warmup=5")
        cell.pop("outputs", None) if cell.cell_type == "markdown" else cell.update(outputs=[])
    text, pictures = tour.page(tour.run(short))
    assert len(pictures) == 3 and all(png.startswith(b"\x89PNG") for png in pictures.values())
    assert "PowerNorm for LayerNorm" in text
    (table,) = [part for part in text.split("```") if part.startswith("text\nnorm ")]
    for line in table.strip().splitlines()[2:]:
        assert float(line.split()[-1]) < 1e-4, line  # alone or in a batch
