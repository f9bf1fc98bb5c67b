"""docs.tools.figures: what it records of runs is enough to draw the pictures again."""

import re

import numpy as np
import pandas
import pytest
import torch

from docs.tools import figures, results
from pn_fairseq.report.curves import COLUMNS
from pn_fairseq.report.figures import FIGURES, read_subject
from pn_fairseq.report.runs import read_runs

from ..fixtures.reports import make_probed
from .pages import ROOT

RUNNING = {"pn": "psi2", "pnv": "psi2", "pnv_ls": "psi2"}


@pytest.mark.ci
def test_the_records_draw_the_pictures(tmp_path, monkeypatch):
    monkeypatch.setattr(figures, "FIGURES", tmp_path)
    numbers, names, _, suffix = figures.DRAWN[1]
    third = (numbers, names, "encoder.layers.1.self_attn_layer_norm", suffix)
    monkeypatch.setattr(figures, "DRAWN", [figures.DRAWN[0], third, *figures.DRAWN[2:]])
    # tests/report/test_figures.py saves some
    monkeypatch.setattr(figures, "save", lambda figure, file: file.touch())
    (tmp_path / "runs").mkdir()
    for name in figures.MODELS:
        folder = figures.folder_of(tmp_path / "runs", name)
        make_probed(folder, running=RUNNING.get(name, "mu,sigma2,psi2"))
        (folder / "checkpoints").mkdir()
        weight = torch.randn(20, 6, generator=torch.Generator().manual_seed(0))
        state = {"model": {"encoder.embed_tokens.weight": weight}}
        torch.save(state, folder / "checkpoints/checkpoint_last.pt")
    figures.write(tmp_path / "runs")
    monkeypatch.setattr(figures, "RESULTS", tmp_path / "results")
    for _, name in figures.IMAGES.values():
        make_probed(tmp_path / "runs" / name)
        (tmp_path / "runs" / name / "epochs.csv").write_text("epoch\n1\n")
    figures.write_images(tmp_path / "runs")
    records = pandas.read_parquet(tmp_path / figures.RECORDS)
    assert set(records["run"]) == set(figures.MODELS)
    assert records["mu_distance_l2"].dtype == "float32"
    for norm in (None, "encoder.layers.1.self_attn_layer_norm"):
        (recorded,) = figures.subjects(("bn",), norm)
        (run,) = read_runs([figures.folder_of(tmp_path / "runs", "bn")])
        series = read_subject(run, "bn", "bn", norm).series
        for column in ("mu_distance_l2", "g_sigma2_l2", "fifth", "update"):
            np.testing.assert_allclose(recorded.series[column], series[column], rtol=1e-6)
    figures.draw()
    pictures = ("2", "3", "4", "4-layer-3", "6", "7", "2-images", "3-images")
    assert {file.stem for file in tmp_path.glob("*.png")} == {f"figure-{name}" for name in pictures}
    medians = pandas.read_csv(tmp_path / "medians.csv").set_index(["run", "norm", "quantity"])
    (image,) = figures.subjects(("resnet20_bn",), None)
    assert image.series["fifth"].nunique() == 5
    assert (tmp_path / "results/images" / name / "epochs.csv").is_file()
    row = medians.loc["ln", "encoder.layers.0.self_attn_layer_norm", "mu_distance_l2"]
    assert row.tolist() == [15, 35, 55, 75, 95]


def test_the_published_records_are_enough():
    """Every picture has records of each run in each fifth of the training, and the tables are their
    medians.
    """
    medians = pandas.concat([figures.read("medians.csv"), figures.read("images-medians.csv")])
    medians = medians.set_index(["run", "norm", "quantity"])
    drawn = {"figure-5"}
    for numbers, *_, suffix in figures.DRAWN:
        drawn |= {f"figure-{number}{suffix}" for number in numbers}
    page = (ROOT / "docs/figures.md").read_text("utf-8")
    assert set(re.findall(r"figures/(figure-[^)]+)\.png", page)) == drawn
    spectra = figures.read("spectra.csv")
    assert spectra.shape == (128, len(figures.MODELS)) and (spectra > 0).all(axis=None)
    for numbers, names, norm, _ in figures.DRAWN:
        if 6 in numbers:
            continue
        for subject in figures.subjects(names, norm):
            assert all(FIGURES[number].shows(subject) for number in numbers)
            (name,) = subject.series["norm"].unique()
            by_fifth = subject.series.groupby("fifth").median(numeric_only=True)
            for kind in ("mu_distance", "sigma2_distance", "psi2_distance", "g_mu", "g_psi2"):
                expected = medians.loc[(subject.run, name, f"{kind}_l2")].astype(float)
                np.testing.assert_allclose(by_fifth[f"{kind}_l2"], expected, rtol=1e-3)


def test_the_pictures_of_the_results_are_drawn_from_what_is_published(tmp_path, monkeypatch):
    """They show the runs that a page names, and the records beside them."""
    text = "".join(page.read_text("utf-8") for page in results.RESULTS.glob("*.md"))
    assert all(f"<!-- runs: {query} -->" in text for query in results.INTERVALS.values())
    names = [*results.INTERVALS, *results.CURVES, "placements.png", "masks.png"]
    assert all((results.RESULTS / name).is_file() for name in names)
    for picture in results.CURVES:
        rows = results.records_of(picture)
        assert len(rows) and {*COLUMNS} - {"picture", "end"} <= {*rows}
        assert not rows["system"].isin(results.LEFT_OUT).any()
    multi30k = results.records_of("multi30k.png")
    ended = multi30k[multi30k["end"] == "patience"].set_index(["system", "run"])["update"]
    assert len(ended) == 11
    assert ended["BN", "1"] == "3355" and ended["LN (post)", "2"] == "6344"
    drawn = []
    monkeypatch.setattr(results, "save", lambda figure, file: drawn.append(figure))
    results.draw_masks(tmp_path / "masks.png")
    (figure,) = drawn
    names = [label.get_text() for label in figure.axes[0].get_yticklabels()]
    assert names[0] == "BN, batches by length, 5 seeds"
    assert "without the mask" in figure.get_supxlabel()
