"""The learning curves of a report, and what all pictures share."""

from __future__ import annotations

import io
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np
import pandas

from pn_fairseq.common.files import atomic_write
from pn_fairseq.pipeline.training_log import TrainingLog

#: Colours that colour-blind readers can tell apart (Okabe and Ito 2008, without the two that vanish
#: on white, and a grey), each with a dash and a marker, so that the lines also differ in grey.
COLOURS = ("#000000", "#D55E00", "#0072B2", "#009E73", "#CC79A7", "#E69F00", "#777777")
DASHES = ("-", (0, (5, 2)), (0, (1.2, 1.2)), (0, (6, 1.5, 1.2, 1.5)), (0, (9, 3)))
MARKERS = ("o", "s", "^", "D", "v", "X", "P")

#: In points, at a width of 6.4 inches: 6 points if a picture is printed in a column of 3.4 inches.
TEXT_SIZE = 11.5

#: Markers on a line; more would hide it.
_MARKERS_PER_LINE = 12

#: The losses of the first updates are several times the later losses and would flatten the rest of
#: the curves.
_SKIPPED = 0.2


def on_one_grid(curves: Sequence[Mapping[int, float]]) -> tuple[list[int], np.ndarray]:
    """Curves at the updates of the first one that are within all: updates (n), and values
    (curves, n).

    With another seed an epoch may have a batch more or less, so that the validation at its end is
    at another update: between the updates of a curve its value is linearly interpolated.
    """
    curves = [dict(sorted(curve.items())) for curve in curves if curve]
    if not curves:
        return [], np.empty((0, 0))
    low = max(map(min, curves))
    high = min(map(max, curves))
    grid = [update for update in curves[0] if low <= update <= high]
    values = [np.interp(grid, list(curve), list(curve.values())) for curve in curves]
    return grid, np.array(values)


def difference_of_curves(
    curves: Sequence[Mapping[int, float]], baseline: Sequence[Mapping[int, float]]
) -> list[dict[int, float]]:
    """Each curve minus the mean of the baseline's, at the updates that the baseline has reached."""
    grid, values = on_one_grid(baseline)
    if not grid:
        return []
    differences = []
    for curve in curves:
        updates = [update for update in curve if grid[0] <= update <= grid[-1]]
        if not updates:
            continue
        own = np.array([curve[update] for update in updates])
        means = np.interp(updates, grid, values.mean(axis=0))
        differences.append(dict(zip(updates, own - means, strict=True)))
    return differences


def style(index: int) -> dict:
    """Colour, dash and marker of a line."""
    return {
        "color": COLOURS[index % len(COLOURS)],
        "linestyle": DASHES[index % len(DASHES)],
        "marker": MARKERS[index % len(MARKERS)],
    }


def headless_pyplot():
    """matplotlib's pyplot, which opens no window, with :data:`TEXT_SIZE`."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    pyplot.rcParams.update({"font.size": TEXT_SIZE, "axes.titlesize": "medium"})
    return pyplot


def legend(figure, lines: Mapping[str, object], columns: int, **options) -> None:
    """A legend above a figure. Labels are shown verbatim, without mathematics."""
    options |= {"loc": "outside upper center", "ncols": columns, "frameon": False}
    drawn = figure.legend(list(lines.values()), list(lines), **options)
    for text in drawn.get_texts():
        text.set_parse_math(False)


def save(figure, file: Path, dpi: int = 130, colours: int | None = None) -> None:
    """Write a figure in the format that the suffix names, whole or not at all, and close it.

    ``colours``: size of the palette of a PNG; with 128 colours the file has a third of the size.
    """
    from matplotlib import pyplot
    from PIL import Image  # which matplotlib also needs

    try:
        with atomic_write(file) as out:
            if colours:
                picture = io.BytesIO()
                figure.savefig(picture, dpi=dpi)
                reduced = Image.open(picture).convert("RGB").quantize(colours)
                reduced.save(out, "PNG", optimize=True)
            else:
                figure.savefig(out, dpi=dpi, format=file.suffix[1:])
    finally:
        pyplot.close(figure)


def _draw(axis, curves: Sequence[Mapping[int, float]], index: int, shift: float = 0):
    """The mean of curves as a line with markers, and the band from the smallest to the largest."""
    grid, values = on_one_grid(curves)
    if len(values) > 1:
        band = {"color": style(index)["color"], "alpha": 0.15, "linewidth": 0}
        axis.fill_between(grid, values.min(axis=0), values.max(axis=0), **band)
    # If two lines coincide, shifted markers show both.
    every = max(1, math.ceil(len(grid) / _MARKERS_PER_LINE))
    first = int(shift * every)
    mark = {"markersize": 4.5, "markerfacecolor": "white", "markevery": (first, every)}
    (line,) = axis.plot(grid, values.mean(axis=0), linewidth=1.4, **mark, **style(index))
    return line


#: The losses of a :class:`TrainingLog` that are drawn.
_LOSSES = ("train", "train_nll", "valid")
#: The columns of the table of :func:`records`.
COLUMNS = ("picture", "system", "compared with", "run", "update", *_LOSSES, "end")
#: :attr:`TrainingLog.reason`, why a run ended -> the reason in words.
_ENDS = {"patience": "patience", "stop_time_hours": "its time limit", "max_update": "max_update"}


def records(
    picture: str, systems: Mapping[str, Mapping[str, TrainingLog]], baselines: Mapping[str, str]
) -> list[dict]:
    """What a picture shows: a row for each run and update, with an empty text for a loss that was
    not logged.

    ``end`` states in the last row of a run why it ended, if the log says so.

    Args:
        picture: the name of the picture's file.
        systems: label -> name of a run -> its log.
        baselines: label -> the label of the system with which it is compared.
    """
    rows = []
    for label, logs in systems.items():
        control = baselines.get(label, "")
        common = {"picture": picture, "system": label, "compared with": control}
        for name, log in logs.items():
            losses = {loss: getattr(log, loss) for loss in _LOSSES}
            if log.ended:
                end = _ENDS.get(log.reason, "")
            else:
                end = "not finished"
            updates = set().union(*losses.values())
            for update in sorted(updates):
                row = {**common, "run": name, "update": update}
                for loss, curve in losses.items():
                    row[loss] = str(curve.get(update, ""))
                row["end"] = end if update == log.updates else ""
                rows.append(row)
    return rows


def _limit(axis, drawn: Sequence[Mapping[int, float]], below: bool) -> None:
    """Cut off values of early updates above (and below) the rest of the curves; the panel says what
    is cut.
    """
    finite = []
    rest = []
    for curve in drawn:
        points = [(update, loss) for update, loss in curve.items() if math.isfinite(loss)]
        finite += points
        last = max((update for update, _ in points), default=0)
        rest += [loss for update, loss in points if update >= _SKIPPED * last]
    if not rest or max(rest) == min(rest):
        return
    margin = 0.08 * (max(rest) - min(rest))
    if below:
        lowest = min(rest)
    else:
        lowest = min(loss for _, loss in finite)
    low = lowest - margin
    high = max(rest) + margin
    axis.set_ylim(low, high)
    cut = [(update, loss) for update, loss in finite if not low <= loss <= high]
    if cut:
        worst = max((loss for _, loss in cut), key=abs)
        last = max(update for update, _ in cut)
        text = f"not shown: up to {worst:.3g} in the first {last:,} updates"
        place = {"transform": axis.transAxes, "ha": "right", "va": "top"}
        box = {"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 1}
        axis.text(0.985, 0.95, text, style="italic", bbox=box, **place)


#: System -> the curves of its runs, update -> loss.
Curves = Mapping[str, Sequence[Mapping[int, float]]]


def _curves(rows: pandas.DataFrame, loss: str) -> Curves:
    logged = rows[rows[loss] != ""].astype({"update": int, loss: float})
    by_system = {label: [] for label in rows["system"].unique()}
    for (label, _), of_run in logged.groupby(["system", "run"], sort=False):
        by_system[label].append(dict(zip(of_run["update"], of_run[loss], strict=True)))
    return by_system


def _differences(valid: Curves, baselines: Mapping[str, str]) -> tuple[str, Curves]:
    """The name of the baselines, and the differences from them, with the baseline itself first if
    there is one.
    """
    minus = {}
    controls = set(baselines.values())
    name = "the LN that differs least"
    if len(controls) == 1:
        (name,) = controls
        baselines = {name: name, **baselines}
    for label, ln in baselines.items():
        # A baseline may have its own baseline in another picture, as LN with other initial weights
        # has LN.
        if ln in valid:
            minus[label] = difference_of_curves(valid[label], valid[ln])
    return name, minus


def _titles(rows: pandas.DataFrame) -> dict[str, str]:
    """The labels in the legend: the number of runs, and where and why a line ends before others: at
    the end of its shortest run.
    """
    last = rows.astype({"update": int}).groupby(["system", "run"])["update"].max()
    longest = last.groupby("system").min().max()
    titles = {}
    for label in rows["system"].unique():
        runs = last[label]
        titles[label] = f"{label}, {len(runs)} run{'s' * (len(runs) > 1)}"
        if runs.min() >= 0.98 * longest:
            continue
        titles[label] += f", ends at {runs.min():,}"
        of_run = rows[(rows["system"] == label) & (rows["run"] == runs.idxmin())]
        reasons = [reason for reason in of_run["end"] if reason]
        if reasons:
            titles[label] += f" ({reasons[-1]})"
    return titles


def plot(rows: pandas.DataFrame, output: Path) -> None:
    """Draw the learning curves in the :func:`records` of a picture, as text, into ``output``.

    Each system is a line: for several runs their mean over the updates that all have reached, in a
    band from the lowest to the highest run. The legend states the number of runs, and where and why
    a line ends if it ends before others. A panel shows the differences from the systems with which
    others are compared.
    """
    compared = rows[rows["compared with"] != ""].drop_duplicates("system")
    baselines = dict(zip(compared["system"], compared["compared with"], strict=True))
    labels = list(rows["system"].unique())
    train, valid, smoothed = (_curves(rows, loss) for loss in ("train_nll", "valid", "train"))
    control, minus = _differences(valid, baselines)
    panels = [
        ("training, negative log-likelihood", train),
        ("validation, negative log-likelihood", valid),
    ]
    if any(minus[label] for label in baselines if label in minus):
        panels.append((f"validation, difference from {control} (below 0 is better)", minus))
    if smoothed != train:
        panels.append(("training with label smoothing (what is minimized)", smoothed))

    titles = _titles(rows)
    columns = _columns_of_a_legend(titles.values())
    rows_of_legend = math.ceil(len(labels) / columns)
    height = 2.2 * len(panels) + 0.3 * rows_of_legend + 0.4
    figure, axes = headless_pyplot().subplots(
        len(panels), 1, figsize=(6.4, height), sharex=True, layout="constrained"
    )
    lines = {}
    for axis, (title, drawn) in zip(axes, panels, strict=True):
        points = []
        for label, curves in drawn.items():
            if curves:
                index = labels.index(label)
                if title.startswith("training"):
                    shift = index / len(labels)
                else:
                    shift = 0
                lines[label] = _draw(axis, curves, index, shift)
                points += curves
        if not points:
            middle = {"ha": "center", "va": "center", "transform": axis.transAxes}
            axis.text(0.5, 0.5, "nothing logged", **middle)
        _limit(axis, points, below=drawn is minus)
        axis.set_title(title, loc="left", parse_math=False, wrap=True)
        axis.set_ylabel("bits per token")
        axis.grid(alpha=0.3)
    axes[-1].set_xlabel("updates (line: mean of the runs, band: lowest to highest)")
    axes[-1].ticklabel_format(axis="x", style="plain")
    axes[-1].xaxis.get_major_locator().set_params(integer=True, nbins=7)
    if lines:
        shown = {titles[label]: lines[label] for label in labels if label in lines}
        legend(figure, shown, columns, handlelength=4)
    save(figure, output, dpi=110, colours=128)


def _columns_of_a_legend(titles: Iterable[str]) -> int:
    longest = max(map(len, titles), default=0)
    if longest < 14:
        return 3
    if longest < 24:
        return 2
    return 1
