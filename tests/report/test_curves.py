import numpy
import pandas

from pn_fairseq.pipeline.training_log import Start, TrainingLog
from pn_fairseq.report import curves
from pn_fairseq.report.curves import difference_of_curves, on_one_grid, style


def test_curves_are_brought_to_one_grid():
    assert on_one_grid([{}])[0] == []
    grid, values = on_one_grid([{1: 2.0, 2: 3.0}, {1: 4.0, 2: 7.0}])
    assert grid == [1, 2] and (values == [[2, 3], [4, 7]]).all()
    # Update 10 is before the second curve, 40 after it; at 20 it is a third of the way from 6 to 9.
    grid, values = on_one_grid([{10: 1.0, 20: 1.0, 30: 1.0, 40: 1.0}, {18: 6.0, 24: 9.0, 30: 3.0}])
    assert grid == [20, 30] and (values[1] == [7, 3]).all()


def test_difference_from_the_mean_of_the_baseline():
    baseline = [{10: 4.0, 20: 3.0}, {10: 6.0, 20: 3.0}]
    assert difference_of_curves([{5: 9.0, 10: 4.5, 15: 4.0}], baseline) == [{10: -0.5, 15: 0.0}]
    assert difference_of_curves([{5: 9.0}], baseline) == difference_of_curves([{5: 9.0}], []) == []


def draw(folder, systems, baselines):
    """The picture of ``systems`` (label -> logs), drawn from its records."""
    runs = {}
    for label, logs in systems.items():
        runs[label] = {str(number): log for number, log in enumerate(logs)}
    rows = pandas.DataFrame(curves.records("x.png", runs, baselines))
    curves.plot(rows, folder / "x.png")
    return (folder / "x.png").read_bytes()


def test_curves_that_are_flat_short_or_not_finite(tmp_path):
    train = {10: 9.5, 100: 5.5, 200: 4.5}
    full = TrainingLog(train, {10: 9.0, 100: 5.0, 200: 4.0}, {100: 4.0, 200: 3.0})
    not_finite = {10: 9.0, 100: float("nan"), 200: float("inf")}
    faulty = TrainingLog(train, not_finite, {})
    flat = TrainingLog({10: 3.0, 100: 5.0}, {10: 3.0, 100: 5.0}, {100: 4.0, 200: 4.0})
    name = "_a $b$ _c"
    # LN with other initial weights is compared with LN, which is in another picture, and PN with
    # that LN.
    of_another = {"LN (init_seed=1)": "LN", "PN (init_seed=1)": "LN (init_seed=1)"}
    with_faults = {name: [full, full], "c": [faulty]}
    for systems, baselines in (
        (with_faults, {"c": name}),
        ({"a": [flat]}, {}),
        (dict.fromkeys(of_another, [full]), of_another),
    ):
        assert draw(tmp_path, systems, baselines).startswith(b"\x89PNG")


def test_panels(tmp_path, monkeypatch):
    """Training and validation have ranges of their own; the band spans the seeds; what is cut
    off is written there.
    """
    from matplotlib import pyplot

    monkeypatch.setattr(pyplot, "close", lambda figure: None)
    ln, pn = [], []
    for d in (0.0, 0.2):
        ln.append(TrainingLog({}, {10: 9.0, 100: 5.0, 200: 4.0 + d}, {100: 4.0, 200: 3.0 + d}))
    for d in (0.0, 0.1, 0.5):
        pn.append(TrainingLog({}, {10: 9.0, 100: 5.0, 200: 3.5}, {100: 4.2, 200: 2.5 + d}))
    draw(tmp_path, {"LN": ln, "PN": pn}, {"PN": "LN"})
    train, valid, minus, smoothed = pyplot.gcf().axes
    assert train.get_xlim() == valid.get_xlim() == minus.get_xlim()
    for axis, low, high in ((train, 3.5, 5.0), (valid, 2.5, 4.2)):  # of all but the first updates
        margin = 0.08 * (high - low)
        numpy.testing.assert_allclose(axis.get_ylim(), (low - margin, high + margin))
    (cut,) = train.texts
    assert cut.get_text() == "not shown: up to 9 in the first 10 updates"
    (line,) = [line for line in minus.lines if line.get_ydata()[-1] < 0]
    assert line.get_xdata()[-1] == 200
    numpy.testing.assert_allclose(line.get_ydata(), [0.2, 2.7 - 3.1])
    low, high = minus.collections[-1].get_datalim(minus.transData).intervaly
    numpy.testing.assert_allclose([low, high], [2.5 - 3.1, 0.2])
    assert smoothed.texts[0].get_text() == "nothing logged"


def test_the_legend_says_how_many_runs_and_why_a_line_ends(tmp_path, monkeypatch):
    from matplotlib import pyplot

    monkeypatch.setattr(pyplot, "close", lambda figure: None)
    losses = {100: 5.0, 200: 4.0, 300: 3.0}
    short = {100: 5.0, 200: 4.0}
    full = TrainingLog(losses, losses, losses)
    full.starts = [Start(done_seconds=1.0, reason="max_update")]
    by_patience, killed = TrainingLog(short, short, short), TrainingLog(short, short, short)
    by_patience.starts = [Start(done_seconds=1.0, reason="patience")]
    killed.starts = [Start()]
    systems = {"LN": [full], "BN": [full, by_patience], "PN": [killed]}
    draw(tmp_path, systems, {"BN": "LN", "PN": "LN"})
    (legend,) = pyplot.gcf().legends
    shown = [text.get_text() for text in legend.get_texts()]
    assert shown == [
        "LN, 1 run",
        "BN, 2 runs, ends at 200 (patience)",
        "PN, 1 run, ends at 200 (not finished)",
    ]
    assert "mean of the runs" in pyplot.gcf().axes[-1].get_xlabel()


def test_no_two_of_a_picture_have_the_same_colour():
    """LN of two models and five systems: more are never together (``_OF_A_PICTURE``)."""
    colours = [style(number)["color"] for number in range(7)]
    assert len(set(colours)) == 7
