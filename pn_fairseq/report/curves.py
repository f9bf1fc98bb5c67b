"""The learning curves of a report, and what all pictures have in common."""

from __future__ import annotations

import io
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pandas

from pn_fairseq.common.files import atomic_write
from pn_fairseq.pipeline.training_log import TrainingLog

#: Colours that the colour-blind can tell apart (Okabe and Ito 2008, without the two that vanish on
#: white, and a grey), each with a dash and a marker, so that the lines also differ in grey.
COLOURS = ("#000000", "#D55E00", "#0072B2", "#009E73", "#CC79A7", "#E69F00", "#777777")
DASHES = ("-", (0, (5, 2)), (0, (1.2, 1.2)), (0, (6, 1.5, 1.2, 1.5)), (0, (9, 3)))
MARKERS = ("o", "s", "^", "D", "v", "X", "P")

#: In points, at a width of 6.4 inches: 6 points where a picture is printed in a column of 3.4
#: inches.
TEXT_SIZE = 11.5

#: Markers on a line; more would hide it.
_MARKERS_PER_LINE = 12

#: The losses of the first updates are several times the later losses and would flatten the rest of
#: the curves.
_SKIPPED = 0.2


def on_one_grid(curves: Sequence[Mapping[int, float]]) -> tuple[list[int], np.ndarray]:
    """Curves at the updates of the first one that are within all: updates (n), and values (curves,
    n).

    An epoch may have a batch more or less with another seed, and the validation at its end is then
    at another update: between the updates of a curve its value is linearly interpolated.
    """
    curves = [dict(sorted(curve.items())) for curve in curves if curve]
    if not curves:
        return [], np.empty((0, 0))
    low, high = max(min(curve) for curve in curves), min(max(curve) for curve in curves)
    grid = [update for update in curves[0] if low <= update <= high]
    return grid, np.array([np.interp(grid, list(curve), list(curve.values())) for curve in curves])


def difference(
    curves: Sequence[Mapping[int, float]], baseline: Sequence[Mapping[int, float]]
) -> list[dict[int, float]]:
    """Each curve minus the mean of the baseline's, at the updates that the baseline has reached."""
    grid, values = on_one_grid(baseline)
    if not grid:
        return []
    differences = []
    for curve in curves:
        within = {update: loss for update, loss in curve.items() if grid[0] <= update <= grid[-1]}
        if within:
            means = np.interp(list(within), grid, values.mean(axis=0))
            differences.append(
                dict(zip(within, np.array(list(within.values())) - means, strict=True))
            )
    return differences


def style(index: int) -> dict:
    """Colour, dash and marker of a line."""
    cycles = {"color": COLOURS, "linestyle": DASHES, "marker": MARKERS}
    return {name: values[index % len(values)] for name, values in cycles.items()}


def headless_pyplot():
    """matplotlib's pyplot, which opens no window, with :data:`TEXT_SIZE`."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    pyplot.rcParams.update({"font.size": TEXT_SIZE, "axes.titlesize": "medium"})
    return pyplot


def legend(figure, lines: Mapping[str, object], columns: int, **options) -> None:
    """A legend above a figure. Any label is shown as it is, without mathematics."""
    options = {"loc": "outside upper center", "ncols": columns, "frameon": False} | options
    for text in figure.legend(list(lines.values()), list(lines), **options).get_texts():
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
                figure.savefig(picture := io.BytesIO(), dpi=dpi)
                Image.open(picture).convert("RGB").quantize(colours).save(out, "PNG", optimize=True)
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
    # Where two lines are one, shifted markers show both.
    every = max(1, math.ceil(len(grid) / _MARKERS_PER_LINE))
    mark = {"markersize": 4.5, "markerfacecolor": "white", "markevery": (int(shift * every), every)}
    return axis.plot(grid, values.mean(axis=0), linewidth=1.4, **mark, **style(index))[0]


#: The losses of a :class:`TrainingLog` that are drawn.
_LOSSES = ("train", "train_nll", "valid")
#: Of the table of :func:`records`.
COLUMNS = ("picture", "system", "compared with", "run", "update", *_LOSSES, "end")
#: Why a run ended, by :attr:`TrainingLog.reason` -> in words.
_ENDS = {"patience": "patience", "stop_time_hours": "its time limit", "max_update": "max_update"}


def records(
    picture: str, systems: Mapping[str, Mapping[str, TrainingLog]], baselines: Mapping[str, str]
) -> list[dict]:
    """What a picture shows: a row for each run and update, with a loss that was not logged as an
    empty text.

    ``end`` says in the last row of a run why it ended, if the log does.

    Args:
        picture: the name of its file.
        systems: label -> name of a run -> its log.
        baselines: label -> the label of the system it is compared with.
    """
    return [
        {
            "picture": picture,
            "system": label,
            "compared with": baselines.get(label, ""),
            "run": name,
            "update": update,
        }
        | {loss: f"{getattr(log, loss).get(update, '')}" for loss in _LOSSES}
        | {
            "end": (_ENDS.get(log.reason, "") if log.ended else "not finished")
            if update == log.updates
            else ""
        }
        for label, logs in systems.items()
        for name, log in logs.items()
        for update in sorted({update for loss in _LOSSES for update in getattr(log, loss)})
    ]


def _finite(curves: Sequence[Mapping[int, float]]) -> list[dict[int, float]]:
    return [
        {update: loss for update, loss in curve.items() if math.isfinite(loss)} for curve in curves
    ]


def _frame(axis, drawn: Sequence[Mapping[int, float]], below: bool) -> None:
    """Cut off values of early updates above (and below) the rest of the curves;

    the panel says what is cut.
    """
    rest = [
        loss
        for curve in _finite(drawn)
        for update, loss in curve.items()
        if update >= _SKIPPED * max(curve)
    ]
    if not rest or max(rest) == min(rest):
        return
    margin = 0.08 * (max(rest) - min(rest))
    low = (
        min(rest if below else [loss for curve in _finite(drawn) for loss in curve.values()])
        - margin
    )
    high = max(rest) + margin
    axis.set_ylim(low, high)
    cut = [
        (update, loss)
        for curve in _finite(drawn)
        for update, loss in curve.items()
        if not low <= loss <= high
    ]
    if cut:
        worst, last = max((loss for _, loss in cut), key=abs), max(update for update, _ in cut)
        axis.text(
            0.985,
            0.95,
            f"not shown: up to {worst:.3g} in the first {last:,} updates",
            transform=axis.transAxes,
            ha="right",
            va="top",
            style="italic",
            bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 1},
        )


def _early_end(rows: pandas.DataFrame) -> str:
    """Where and why the line of a system ends: with its shortest run, whose rows are the first
    to end.
    """
    last = rows.astype({"update": int}).groupby("run")["update"].max()
    run = last.idxmin()
    reasons = [text for text in rows[rows["run"] == run]["end"] if text] if "end" in rows else []
    return f"ends at {last[run]:,}" + (f" ({reasons[-1]})" if reasons else "")


def plot(rows: pandas.DataFrame, output: Path) -> None:
    """Draw the learning curves in the :func:`records` of a picture, as text, into ``output``.

    Each system is a line; of several runs it is their mean over the updates that all have reached,
    in a band from the lowest to the highest run. The legend says of how many runs, and where and
    why a line ends that ends before others. A panel shows the differences from the systems that
    others are compared with.
    """
    compared = rows[rows["compared with"] != ""].drop_duplicates("system")
    baselines = dict(zip(compared["system"], compared["compared with"], strict=True))
    labels = list(rows["system"].unique())

    def curves(loss: str) -> dict[str, list[dict[int, float]]]:
        """System -> the curves of its runs, update -> loss."""
        logged = rows[rows[loss] != ""].astype({"update": int, loss: float})
        by_system = {label: [] for label in labels}
        for (label, _), of_run in logged.groupby(["system", "run"], sort=False):
            by_system[label].append(dict(zip(of_run["update"], of_run[loss], strict=True)))
        return by_system

    train, valid, smoothed = curves("train_nll"), curves("valid"), curves("train")
    # A baseline may have one of its own, in another picture: LN with other initial weights, and LN.
    minus = {
        label: difference(valid[label], valid[ln]) for label, ln in baselines.items() if ln in valid
    }
    panels = [
        ("training, negative log-likelihood", train),
        ("validation, negative log-likelihood", valid),
    ]
    if any(minus.values()):
        controls = set(baselines.values())
        name = controls.pop() if len(controls) == 1 else "the LN that differs least"
        minus = ({name: difference(valid[name], valid[name])} if name in valid else {}) | minus
        panels.append((f"validation, difference from {name} (below 0 is better)", minus))
    if smoothed != train:
        panels.append(("training with label smoothing (what is minimized)", smoothed))

    ends = {
        label: min(map(max, of_system))
        for label, of_system in train.items()
        if of_system and all(of_system)
    }
    names = {}
    for label in labels:
        of_system = rows[rows["system"] == label]
        runs = of_system["run"].nunique()
        names[label] = f"{label}, {runs} run{'s' * (runs > 1)}"
        if label in ends and ends[label] < 0.98 * max(ends.values()):
            names[label] += f", {_early_end(of_system)}"
    longest = max(map(len, names.values()), default=0)
    columns = 3 if longest < 14 else 2 if longest < 24 else 1
    height = 2.2 * len(panels) + 0.3 * math.ceil(len(labels) / columns) + 0.4
    size = (6.4, height)
    figure, axes = headless_pyplot().subplots(
        len(panels), 1, figsize=size, sharex=True, layout="constrained"
    )
    lines = {}
    for axis, (title, drawn) in zip(axes, panels, strict=True):
        for label, of_system in drawn.items():
            if of_system:
                shift = labels.index(label) / len(labels) if title.startswith("training") else 0
                lines[label] = _draw(axis, of_system, labels.index(label), shift)
        if not any(drawn.values()):
            axis.text(
                0.5, 0.5, "nothing logged", ha="center", va="center", transform=axis.transAxes
            )
        _frame(axis, sum(drawn.values(), []), below=drawn is minus)
        axis.set_title(title, loc="left", parse_math=False)
        axis.set_ylabel("bits per token")
        axis.grid(alpha=0.3)
    axes[-1].set_xlabel("updates (line: mean of the runs, band: lowest to highest)")
    axes[-1].ticklabel_format(axis="x", style="plain")
    axes[-1].xaxis.get_major_locator().set_params(integer=True, nbins=7)
    if lines:
        shown = {names[label]: lines[label] for label in labels if label in lines}
        legend(figure, shown, columns, handlelength=4)
    save(figure, output, dpi=110, colours=128)
