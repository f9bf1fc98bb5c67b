"""Learning curves as a picture: the one place that plots."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from pn_fairseq.training_log import LearningCurve

#: Colours that stay apart for the colour-blind (Okabe and Ito 2008, without the two that vanish on white), with a dash
#: and a marker each, so that the lines stay apart in grey, too. More systems than colours go on with other dashes.
_COLOURS = ("#000000", "#D55E00", "#0072B2", "#009E73", "#CC79A7", "#E69F00")
_DASHES = ("-", (0, (5, 2)), (0, (1.2, 1.2)), (0, (6, 1.5, 1.2, 1.5)), (0, (9, 3)))
_MARKERS = ("o", "s", "^", "D", "v", "X", "P")

#: Marks on a line; more would hide it.
_MARKS_PER_LINE = 12

#: The losses of the first updates are several times those of the rest and would flatten all that is of interest.
_SKIPPED = 0.2

TRAINING = "loss with label smoothing (bits per token)"
VALIDATION = "negative log-likelihood (bits per token)"


@dataclass(frozen=True)
class Picture:
    """What was drawn.

    Attributes:
        cut: whether the first losses lie above the frame.
        nonfinite: labels of the lines that have a NaN or an infinity in them.
        missing: labels without anything to draw.
    """

    cut: bool
    nonfinite: tuple[str, ...]
    missing: tuple[str, ...]


def mean_curve(curves: Sequence[Mapping[int, float]]) -> dict[int, float]:
    """The mean over curves, at the updates of the first one that lie within all.

    An epoch may have a batch more or less with another seed, and the validation at its end is then at another update:
    between the updates of a curve its value is linearly interpolated.
    """
    curves = [curve for curve in curves if curve]
    if not curves:
        return {}
    low, high = max(min(curve) for curve in curves), min(max(curve) for curve in curves)
    grid = [update for update in sorted(curves[0]) if low <= update <= high]
    values = [np.interp(grid, sorted(curve), [curve[update] for update in sorted(curve)]) for curve in curves]
    return dict(zip(grid, np.mean(values, axis=0).tolist(), strict=True))


def _style(index: int) -> dict:
    return {
        "color": _COLOURS[index % len(_COLOURS)],
        "linestyle": _DASHES[index % len(_DASHES)],
        "marker": _MARKERS[index % len(_MARKERS)],
    }


def _draw(axis, curves: Sequence[Mapping[int, float]], index: int, count: int):
    style = _style(index)
    if len(curves) > 1:
        for curve in curves:
            updates = sorted(curve)
            axis.plot(updates, [curve[u] for u in updates], color=style["color"], linewidth=0.6, alpha=0.45)
    mean = mean_curve(curves)
    # The marks of different lines stand at different updates: where the lines are one, all of them can be seen.
    every = max(1, math.ceil(len(mean) / _MARKS_PER_LINE))
    offset = (index * every // max(1, count)) if every > 1 else 0
    (line,) = axis.plot(
        list(mean),
        list(mean.values()),
        linewidth=1.4,
        markersize=4.5,
        markevery=(offset, every),
        markerfacecolor="white",
        **style,
    )
    return line


def _upper_limit(curves: Sequence[Mapping[int, float]]) -> float | None:
    """Where to cut the frame: at the largest loss behind the first updates of each curve; None to cut nothing."""
    rest, everything = [], []
    for curve in curves:
        finite = {update: loss for update, loss in curve.items() if math.isfinite(loss)}
        everything += finite.values()
        if finite:
            begin = _SKIPPED * max(finite)
            rest += [loss for update, loss in finite.items() if update >= begin]
    if not rest or max(everything) <= max(rest):
        return None
    low, high = min(rest), max(rest)
    return high + 0.08 * (high - low) if high > low else None


def plot(systems: Mapping[str, Sequence[LearningCurve]], output: Path) -> Picture:
    """Draw training and validation loss of each system into ``output`` (.png, .pdf or .svg; whole or not at all).

    Args:
        systems: label -> the learning curves of its runs. Several are thin lines, and their mean, over the updates
            that all of them have, is a thick one.
        output: the file; its suffix is the format.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(10, 4.2), constrained_layout=True)
    cut, nonfinite, missing = False, [], []
    for axis, title, label in zip(axes, ("training", "validation"), (TRAINING, VALIDATION), strict=True):
        drawn = {
            name: [curve for curve in (one.train if title == "training" else one.valid for one in curves) if curve]
            for name, curves in systems.items()
        }
        missing += [name for name, curves in drawn.items() if not curves]
        nonfinite += [
            name for name, curves in drawn.items() if any(not math.isfinite(v) for c in curves for v in c.values())
        ]
        lines = {
            name: _draw(axis, curves, index, len(drawn)) for index, (name, curves) in enumerate(drawn.items()) if curves
        }
        if limit := _upper_limit([curve for curves in drawn.values() for curve in curves]):
            axis.set_ylim(top=limit)
            cut = True
        axis.set(title=title, xlabel="updates", ylabel=label)
        axis.ticklabel_format(axis="x", style="plain")
        axis.xaxis.get_major_locator().set_params(integer=True, nbins=7)
        axis.grid(alpha=0.3)
        if lines:
            # Given one by one and without mathematics, so that any name is shown as it is.
            legend = axis.legend(list(lines.values()), list(lines), handlelength=4)
            for text in legend.get_texts():
                text.set_parse_math(False)
        else:
            axis.text(0.5, 0.5, "nothing logged", ha="center", va="center", transform=axis.transAxes)
    partial = output.with_name(f"{output.name}.partial")
    try:
        figure.savefig(partial, dpi=160, format=output.suffix[1:])
        os.replace(partial, output)
    finally:
        pyplot.close(figure)
        partial.unlink(missing_ok=True)
    return Picture(cut, tuple(dict.fromkeys(nonfinite)), tuple(dict.fromkeys(missing)))
