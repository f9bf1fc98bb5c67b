"""pn-figures: what is drawn from probes, scores and checkpoints that are written here; mistakes."""

import json

import matplotlib
import numpy as np
import pytest
import torch
import yaml

from pn_fairseq.probes import SCHEMA, write_update
from pn_fairseq.report import figures
from pn_fairseq.report.command import main as report
from pn_fairseq.report.figures import FIGURES, Absent, Subject, main, read_subject
from pn_fairseq.report.runs import read_runs

matplotlib.use("Agg")
from matplotlib import pyplot  # noqa: E402

CHANNELS = 8


def write_probe(folder, kind, running, updates=range(10, 101, 10), layers=2):
    """Every vector of update n has the length n, that of the second layer 1000 n; gain over psi_B is 0 to 7 times n."""
    folder.mkdir()
    columns = [field.name for field in SCHEMA if field.name.endswith(("_l1", "_l2"))]
    for update in updates:
        rows = []
        for layer in range(layers):
            row = dict.fromkeys(columns, float(update) * 1000**layer)
            row |= {
                "update": update,
                "forward": 0,
                "norm": f"encoder.layers.{layer}.self_attn_layer_norm",
                "kind": kind,
            }
            row |= {"running": running, "channels": CHANNELS, "tokens": 100.0, "sample_size": 50.0}
            row |= {"gamma_over_psi_batch": [float(update * n) for n in range(CHANNELS)]}
            rows.append(row)
        rows.append(rows[0] | {"forward": None, "mu_distance_l2": 1e9})  # all tokens of the update: not in the boxes
        write_update(folder, update, rows, "test")


def make_run(where, norm="batch", running="mu,sigma2,psi2", max_tokens=512):
    where.mkdir()
    settings = {
        "model": {
            "_name": "transformer_bn_tiny",
            "encoder_norm": norm,
            "norm_probe": f"/elsewhere/{where.name}/series",
        },
        "optimization": {"max_update": 100},
        "dataset": {"max_tokens": max_tokens},
    }
    (where / "config.yaml").write_text(yaml.safe_dump(settings))
    record = {"epoch": 1, "train_loss": "5", "train_nll_loss": "4", "train_num_updates": "100"}
    (where / "train.log").write_text(f"2026-01-01 00:00:00 | INFO | train | {json.dumps(record)}\n")
    write_probe(where / "series", norm, running)
    return where


@pytest.fixture
def runs(tmp_path):
    return [make_run(tmp_path / "bn"), make_run(tmp_path / "pnv", "power-v", "psi2", 2048)]


def subjects_of(runs):
    return [read_subject(run, run.name) for run in read_runs(runs)]


def boxes(axis):
    """The boxes of a panel: medians from left to right."""
    lines = [line for line in axis.lines if line.get_linewidth() == 1.6]
    return [line.get_ydata()[0] for line in sorted(lines, key=lambda line: np.nanmean(line.get_xdata()))]


def test_boxes_are_fifths_of_training_of_the_first_norm(runs):
    figure = FIGURES[2](pyplot, subjects_of(runs))
    fifths = [np.median([20 * n + 10, 20 * n + 20]) for n in range(5)]
    for axis in figure.axes:
        assert boxes(axis) == [median for median in fifths for _ in runs]
        assert [label.get_text() for label in axis.get_xticklabels()] == ["20", "40", "60", "80", "100"]
    drawn = [line.get_ydata() for line in figure.axes[1].lines if line.get_linestyle() == ":"]
    np.testing.assert_allclose(drawn, [(0.0505, 0.735, 1.023, 1.349, 1.373)])
    pyplot.close(figure)


def test_another_norm(runs):
    (run,) = read_runs(runs[:1])
    subject = read_subject(run, "bn", "encoder.layers.1.self_attn_layer_norm")
    figure = FIGURES[3](pyplot, [subject])
    assert boxes(figure.axes[0])[0] == 15 * 1000
    pyplot.close(figure)


def test_the_fourth_figure_takes_the_statistic_that_a_norm_normalizes_by(runs, monkeypatch):
    asked = []
    monkeypatch.setattr(figures, "_fifths", lambda runs, column: asked.append((runs[0].label, column)) or [[1.0]] * 5)
    pyplot.close(FIGURES[4](pyplot, subjects_of(runs)))
    assert asked == [
        ("bn", "sigma2_distance_l2"),
        ("pnv", "psi2_distance_l2"),
        ("bn", "g_sigma2_l2"),
        ("pnv", "g_psi2_l2"),
    ]


def test_gradients_have_a_second_axis_in_the_papers_unit(runs):
    figure = FIGURES[3](pyplot, subjects_of(runs))
    marks = [line for line in figure.axes[0].lines if line.get_linestyle() == ":"]
    paper = [0.0084, 0.0086, 0.0067, 0.0074, 0.0076]
    np.testing.assert_allclose(marks[1].get_ydata() * 100 * 50, paper)  # tokens times sample size
    pyplot.close(figure)


def test_batch_size(tmp_path):
    points = [("ln", 512, 20.0), ("ln", 512, 22.0), ("ln", 4096, 23.0), ("pn", 512, 24.0), ("bn", 512, None)]
    subjects = [Subject("x", None, tokens, bleu, norm, None) for norm, tokens, bleu in points]
    figure = FIGURES[5](pyplot, subjects)
    ours, paper = figure.axes
    lines = {
        line.get_label(): line.get_xydata().tolist() for line in ours.lines if not line.get_label().startswith("_")
    }
    assert lines == {"ln": [[512, 21], [4096, 23]], "pn": [[512, 24]]}
    assert max(line.get_ydata().max() for line in paper.lines) == 35.90
    pyplot.close(figure)


def test_spectra(tmp_path):
    generator = np.random.default_rng(0)
    left, _ = np.linalg.qr(generator.normal(size=(20, 4)))
    right, _ = np.linalg.qr(generator.normal(size=(4, 4)))
    weight = torch.tensor(left @ np.diag([8.0, 4.0, 2.0, 1.0]) @ right)
    torch.save({"model": {"encoder.embed_tokens.weight": weight}}, tmp_path / "checkpoint_last.pt")
    torch.save({"model": {"decoder.embed_tokens.weight": 3 * weight}}, tmp_path / "language_model.pt")
    torch.save({"model": {"output.weight": weight}}, tmp_path / "without.pt")
    files = ("checkpoint_last.pt", "language_model.pt", "without.pt")  # two seeds, and one that is left out
    figure = FIGURES[6](pyplot, [Subject("ln", None, None, None, "ln", tmp_path / file) for file in files])
    for axis, divisor in zip(figure.axes, (8.0, 4.0, np.sqrt(85.0)), strict=True):
        ours = [line.get_ydata() for line in axis.lines if line.get_marker() == "None"]
        np.testing.assert_allclose(ours, [np.array([8, 4, 2, 1]) / divisor] * 2)
    pyplot.close(figure)
    with pytest.raises(Absent, match="checkpoint_last"):
        FIGURES[6](pyplot, [Subject("ln", None, None, None, "ln", None)])


def test_gains_are_those_of_the_last_recorded_update(runs):
    figure = FIGURES[7](pyplot, subjects_of(runs))
    (axis,) = figure.axes  # no final_layer_norm was recorded
    assert boxes(axis) == [350.0] * 4  # 100 times the median of 0 to 7; two layers of two runs
    assert axis.get_title(loc="left") == "before self-attention"
    pyplot.close(figure)


def test_files_and_what_is_said_of_what_is_missing(runs, tmp_path, capsys):
    main([*map(str, runs), "--output", str(tmp_path / "out")])
    out, err = capsys.readouterr()
    names = [f"figure-{n}.{kind}" for n in (2, 3, 4, 7) for kind in ("png", "pdf")]
    assert out.split() == [str(tmp_path / "out" / name) for name in names]
    assert (tmp_path / "out/figure-2.png").read_bytes()[:4] == b"\x89PNG"
    assert (tmp_path / "out/figure-2.pdf").read_bytes()[:4] == b"%PDF"
    assert err.splitlines() == [
        "pn-figures: not drawn: Figure 5: no run has scores (scripts/score.sh)",
        "pn-figures: not drawn: Figure 6: no run has a checkpoint_last.pt",
    ]
    report([*map(str, runs), "--output", str(tmp_path / "out")])
    page = (tmp_path / "out/report.md").read_text("utf-8")
    assert "bn/series" in page and "](figure-2.png)" in page and "](figure-7.png)" in page


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("nothing",), "there is no directory 'nothing'"),
        (("bn", "pnv", "--labels", "one"), "2 runs but 1 --labels"),
        (("bn",), "series cannot be read"),
        (("pnv", "--norm", "encoder.layers.1.self_attn_norm"), "did you mean 'encoder.layers.1.self_attn_layer_norm'"),
        (("pnv", "--output", "bn/train.log"), "cannot write to --output bn/train.log"),
        (("empty",), "nothing to draw: Figure 2: no run has a --norm-probe file; Figure 3"),
    ],
)
def test_mistakes_are_one_line(arguments, message, runs, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    next((runs[0] / "series").iterdir()).write_bytes(b"PAR1 is not enough")
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty/failed").write_text("train: no memory")
    assert main(["--output", "out", *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error and len(error.splitlines()) == 1
