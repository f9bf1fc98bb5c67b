"""pn figures: what is drawn from probes, scores and checkpoints that are written here; mistakes."""

import numpy as np
import pytest
import torch
from matplotlib import pyplot

from pn_fairseq.report.figures import FIGURES, Absent, Subject, read_subject
from pn_fairseq.report.runs import read_runs

from ..fixtures.reports import make_probed, make_run, report, with_score
from ..scripts_helpers import refused, verb

main = verb("figures")


@pytest.fixture
def runs(tmp_path):
    return [make_probed(tmp_path / "bn"), make_probed(tmp_path / "pnv", "power-v", "psi2", 2048)]


def subjects_of(runs):
    return [read_subject(run, run.name, run.name) for run in read_runs(runs)]


def boxes(axis):
    """The boxes of a panel: medians from left to right."""
    lines = [line for line in axis.lines if line.get_linewidth() == 1.6]
    lines.sort(key=lambda line: np.nanmean(line.get_xdata()))
    return [line.get_ydata()[0] for line in lines]


def marks(axis):
    """The lines of the paper's numbers."""
    return [line for line in axis.lines if line.get_linestyle() == ":"]


def test_boxes_are_fifths_of_training_of_the_first_norm(runs):
    figure = FIGURES[2].draw(subjects_of(runs))
    fifths = [np.median([20 * n + 10, 20 * n + 20]) for n in range(5)]
    for axis in figure.axes:
        assert boxes(axis) == list(np.repeat(fifths, len(runs)))
        ticks = [label.get_text() for label in axis.get_xticklabels()]
        assert ticks == ["20", "40", "60", "80", "100"]
    (paper,) = marks(figure.axes[1])
    np.testing.assert_allclose(paper.get_ydata(), (0.0505, 0.735, 1.023, 1.349, 1.373))


@pytest.mark.parametrize(("layer", "factors"), [(0, [1, 10]), (1, [10_000, 1000])])
def test_the_fourth_figure_takes_the_statistic_that_a_norm_normalizes_by(layer, factors, runs):
    """Variances of BN and second moments of PN-V; in the second layer the other way round."""
    name = f"encoder.layers.{layer}.self_attn_layer_norm"
    subjects = [read_subject(run, run.name, run.name, name) for run in read_runs(runs)]
    figure = FIGURES[4].draw(subjects)
    for axis, unit in zip(figure.axes, (1, 100 * 50), strict=True):
        assert boxes(axis)[:2] == [15 * factor * unit for factor in factors]


def test_a_training_that_ended_early_fills_its_fifths(tmp_path):
    run = make_probed(tmp_path / "run", max_update=250)
    for expected in (15, 30):  # of updates 1 to 20; once it has not ended, 1 to 50
        (subject,) = subjects_of([run])
        first = subject.series[subject.series["fifth"] == 1]
        assert first["g_mu_l2"].median() == expected
        text = (run / "train.log").read_text()
        (run / "train.log").write_text(text.partition("done")[0])


def test_many_runs_can_be_told_apart(tmp_path):
    runs = [make_probed(tmp_path / str(number)) for number in range(12)]
    figure = FIGURES[2].draw(subjects_of(runs))
    looks = {(box.get_edgecolor(), box.get_hatch()) for box in figure.axes[0].patches}
    assert len(looks) == 12


def test_gradients_are_of_the_summed_loss_and_summed_over_tokens(runs):
    """As the paper's marks; the probe has gradients of the mean loss, averaged over 100 tokens of
    50 samples, or over 4 of 2, as of a translation model beside images.
    """
    subjects = subjects_of(runs)
    subjects[1].series = subjects[1].series.assign(tokens=4.0, sample_size=2.0)
    axis = FIGURES[3].draw(subjects).axes[0]
    _, paper = marks(axis)
    np.testing.assert_allclose(paper.get_ydata(), [0.0084, 0.0086, 0.0067, 0.0074, 0.0076])
    for mark in marks(axis):
        assert list(mark.get_xdata()) == list(axis.get_xticks()), "shifted beside the boxes"
    assert axis.get_xlabel().endswith("of 1 run)")
    assert boxes(axis)[:2] == [15 * 100 * 50, 15 * 4 * 2]


def test_batch_size(tmp_path):
    points = [("ln", 512, 20.0), ("ln", 512, 22.0), ("ln", 4096, 23.0), ("pn", 512, 24.0)]
    subjects = [Subject("x", "y", line, tokens=tokens, bleu=bleu) for line, tokens, bleu in points]
    figure = FIGURES[5].draw(subjects)
    ours, paper = figure.axes
    lines = {line.get_label(): line.get_xydata() for line in ours.lines}
    np.testing.assert_array_equal(lines["pn"], [[512, 24]])
    # no line across the sizes that were not trained
    expected = [[512, 21], [1024, np.nan], [2048, np.nan], [4096, 23]]
    np.testing.assert_array_equal(lines["ln"], expected)
    spans = [np.diff(axis.get_ylim())[0] for axis in figure.axes]
    assert spans[0] == pytest.approx(spans[1])
    for axis in figure.axes:
        bleu = np.concatenate([line.get_ydata() for line in axis.lines])
        middle = (np.nanmin(bleu) + np.nanmax(bleu)) / 2
        assert np.mean(axis.get_ylim()) == pytest.approx(middle)
    assert max(line.get_ydata().max() for line in paper.lines) == 35.90


def test_spectra(tmp_path):
    generator = np.random.default_rng(0)
    left, _ = np.linalg.qr(generator.normal(size=(20, 4)))
    right, _ = np.linalg.qr(generator.normal(size=(4, 4)))
    weight = torch.tensor(left @ np.diag([8.0, 4.0, 2.0, 1.0]) @ right)
    files = {
        "checkpoint_last.pt": {"encoder.embed_tokens.weight": weight},
        "language_model.pt": {"decoder.embed_tokens.weight": 3 * weight},
        "without.pt": {"output.weight": weight},
    }
    for name, model in files.items():
        torch.save({"model": model}, tmp_path / name)
    *seeds, without = (Subject(name, "ln", "ln", checkpoint=tmp_path / name) for name in files)
    ln = Subject("x", "LN", "LN", spectrum=np.array([4.0, 4.0, 2.0, 2.0]))
    ratio = FIGURES[6].draw([*seeds, ln]).axes[3]
    own, others = np.array([8, 4, 2, 1]), np.array([4, 4, 2, 2])
    expected = own / 85**0.5 / (others / 40**0.5)
    np.testing.assert_allclose(ratio.lines[0].get_ydata(), expected)
    np.testing.assert_allclose(ratio.lines[2].get_ydata(), np.ones(4))
    figure = FIGURES[6].draw(seeds)
    for axis, divisor in zip(figure.axes, (8.0, 4.0, np.sqrt(85.0)), strict=True):
        for line in axis.lines:
            if line.get_marker() == "None":
                np.testing.assert_allclose(line.get_ydata(), own / divisor)
    with pytest.raises(Absent, match="without.pt has no word embeddings"):
        FIGURES[6].draw([without])


def test_gains_are_those_of_the_last_recorded_update(runs):
    figure = FIGURES[7].draw(subjects_of(runs))
    (axis,) = figure.axes  # no final_layer_norm was recorded
    assert boxes(axis) == [350.0] * 4  # 100 times the median of 0 to 7; two layers of two runs
    assert axis.get_title(loc="left") == "before self-attention"
    (paper,) = marks(axis)
    assert list(paper.get_ydata()) == [0.121, 0.090]


def test_the_papers_gains_stand_at_their_layers(runs):
    """Where only layers 4 and 6 were recorded."""
    (subject,) = subjects_of(runs[:1])
    names = {
        "encoder.layers.0.self_attn_layer_norm": "encoder.layers.3.final_layer_norm",
        "encoder.layers.1.self_attn_layer_norm": "encoder.layers.5.final_layer_norm",
    }
    subject.probe["norm"] = subject.probe["norm"].map(names)
    figure = FIGURES[7].draw([subject])
    (paper,) = marks(figure.axes[0])
    assert list(paper.get_ydata()) == [0.124, 0.172]


@pytest.mark.ci
def test_files_and_what_is_said_of_what_is_missing(runs, tmp_path, capsys):
    main([*runs, "--output", tmp_path / "out"])
    out, err = capsys.readouterr()
    names = []
    for number in (2, 3, 4, 7):
        names += [f"figure-{number}.png", f"figure-{number}.pdf"]
    assert out.split() == [str(tmp_path / "out" / name) for name in names]
    assert (tmp_path / "out/figure-2.png").read_bytes()[:4] == b"\x89PNG"
    assert (tmp_path / "out/figure-2.pdf").read_bytes()[:4] == b"%PDF"
    assert err.splitlines() == [
        "pn figures: not drawn: Figure 5: no run has scores (pn score) and dataset.max_tokens",
        "pn figures: not drawn: Figure 6: no run has a checkpoint_last.pt",
    ]
    page = report(*runs).text
    for words in ("bn/series", "](figure-2.png)", "](figure-7.pdf)"):
        assert words in page


def test_what_a_run_lacks_is_said_and_old_figures_are_removed(runs, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("pn_fairseq.report.figures.save", lambda figure, file: file.touch())
    out = tmp_path / "out"
    out.mkdir()
    for name in ("figure-2.png", "figure-6.png", "figure-6.pdf", "figure-8.png"):
        (out / name).touch()
    scored = with_score(make_run(tmp_path / "scored"), 20)
    main([scored, runs[0], "--output", out, "--labels", "a", "b"])
    name = read_runs([scored, runs[0]])[0].name
    line = f"Figure 2 is without {name}: not every run has a --norm-probe file"
    assert line in capsys.readouterr().err
    expected = {f"figure-{number}.png" for number in (2, 3, 4, 5, 7, 8)}
    assert {path.name for path in out.glob("*.png")} == expected
    assert not (out / "figure-6.pdf").exists()


def test_runs_that_differ_by_their_seed_or_mini_batch_are_a_line(tmp_path, monkeypatch):
    drawn = []

    def draw(subjects):
        drawn[:] = [(subject.tokens, subject.line) for subject in subjects]
        return pyplot.figure()

    monkeypatch.setitem(FIGURES, 5, FIGURES[5]._replace(draw=draw))
    changes = [{}, {"dataset__max_tokens": 512}, {"model__layer_scale_groups": 0}]
    words = []
    for seed, settings in enumerate(changes, 1):
        run = make_run(tmp_path / str(seed), "pn", seed, **settings)
        words.append(with_score(run, 20))
    words += ["--output", tmp_path / "out"]
    assert main(words) == 0
    assert drawn == [(2048, "PN"), (512, "PN"), (2048, "PN (layer_scale_groups=0)")]
    assert main([*words, "--labels", "x", "x", "y"]) == 0
    assert drawn == [(2048, "x"), (512, "x"), (2048, "y")]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("bn", "pnv", "--labels", "one"), "2 runs but 1 --labels"),
        (("bn",), "series cannot be read"),
        (
            ("pnv", "--norm", "encoder.layers.1.self_attn_norm"),
            "did you mean 'encoder.layers.1.self_attn_layer_norm'",
        ),
        (("pnv", "--output", "bn/train.log"), "bn/train.log' is a file; name a folder"),
        (("pnv", "damaged"), "damaged/checkpoint_last.pt"),
        (("empty",), "nothing to draw: Figure 2: no run has a --norm-probe file; Figure 3"),
    ],
)
def test_mistakes_are_one_line(arguments, message, runs, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    next((runs[0] / "series").iterdir()).write_bytes(b"PAR1 is not enough")
    for name in ("empty", "damaged"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "failed").write_text("train: no memory")
    (tmp_path / "damaged/checkpoint_last.pt").write_bytes(b"cut off")
    refused(capsys, main(["--output", "out", *arguments]), message)
    assert not (tmp_path / "out").exists()
