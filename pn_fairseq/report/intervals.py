"""Differences from the control as a table, as sentences and as a picture: in ``pn report`` and in
docs/results.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pandas

from pn_fairseq.pipeline.metrics import Measure
from pn_fairseq.pipeline.paired_bootstrap import p_text
from pn_fairseq.report.curves import headless_pyplot, save, style
from pn_fairseq.report.markdown import Markdown, missing
from pn_fairseq.report.measures import MEASURES
from pn_fairseq.report.significance import POWER, Family, Interval, families


def signed(value: float, digits: int = 2) -> str:
    """A difference, with its sign."""
    plain = f"{value:+.{digits}f}"
    if float(plain):
        return plain.replace("-", "−")
    return plain[1:]


def count(amount: int, one: str, several: str = "") -> str:
    """ "1 run", "3 runs"."""
    noun = one
    if amount != 1:
        noun = several or f"{one}s"
    return f"{amount:,} {noun}"


def side_of(differences: Collection[float]) -> str:
    """ "lower in 5 of 6": the side on which most differences are."""
    below = sum(difference < 0 for difference in differences)
    above = sum(difference > 0 for difference in differences)
    if below >= above:
        return f"lower in {below} of {len(differences)}"
    return f"higher in {above} of {len(differences)}"


@dataclass(frozen=True)
class Compared:
    """The comparisons by one measure."""

    measure: Measure
    families: list[Family]
    untested: dict[str, str]  # system -> why it is not tested

    @property
    def intervals(self) -> dict[str, Interval]:
        intervals = {}
        for family in self.families:
            intervals |= family.intervals
        return intervals

    def text(self, interval: Interval) -> str:
        digits = self.measure.decimals
        low = signed(interval.low, digits)
        high = signed(interval.high, digits)
        return f"{signed(interval.difference, digits)} ({low} to {high})"

    def verdict(self, interval: Interval) -> str:
        """The verdict in words.

        It names the margin of equivalence if the whole interval is within it.
        """
        verdict = interval.verdict(self.measure)
        margin = f"±{self.measure.margin:g}"
        if verdict == "equivalent":
            return f"equivalent within {margin}"
        farthest = max(-interval.low, interval.high)
        if farthest <= self.measure.margin:
            return f"{verdict}, but within {margin}"
        return verdict

    def sentence(self, family: Family) -> str:
        """Every conclusive difference with its interval, and the range of the other differences."""
        control = family.control
        titles = {
            "better": f"better than {control}",
            "worse": f"worse than {control}",
            "equivalent": f"equivalent to {control} within ±{self.measure.margin:g}",
        }
        found: dict[str, dict[str, Interval]] = {}
        for system, interval in family.intervals.items():
            found.setdefault(interval.verdict(self.measure), {})[system] = interval
        parts = []
        if "better" not in found and "worse" not in found:
            parts.append(f"no system differs significantly from {control}")
        for verdict, title in titles.items():
            if verdict in found:
                parts.append(f"{title}: {', '.join(self._texts(found[verdict].items()))}")
        others = found.get("inconclusive", {})
        inconclusive = self._texts(sorted(others.items(), key=_difference))
        if len(inconclusive) > 2:
            ends = f"from {inconclusive[0]} to {inconclusive[-1]}"
            parts.append(f"inconclusive: {len(inconclusive)} systems, {ends}")
        elif inconclusive:
            parts.append(f"inconclusive: {' and '.join(inconclusive)}")
        return f"{'; '.join(parts)}."

    def _texts(self, intervals: Iterable[tuple[str, Interval]]) -> list[str]:
        return [f"{system} {self.text(interval)}" for system, interval in intervals]

    def strength(self, family: Family) -> str:
        """What the design of a family can detect."""
        digits = self.measure.decimals
        systems = count(len(family.intervals), "system")
        blocks = count(family.blocks, "block")
        noise = f"{family.deviation:.{digits}f}"
        half_width = f"{family.half_width:.{digits}f}"
        detectable = f"{family.detectable:.{digits}f}"
        return (
            f"{systems} and {family.control}, up to {blocks}; noise {noise} with "
            f"{family.design.degrees} degrees of freedom; simultaneous intervals of ±{half_width}, "
            f"and a true difference of {detectable} is found with {POWER:.0%} probability"
        )

    def planned(self, system: str) -> str | None:
        """The difference of a planned comparison with its uncorrected interval and p-value.

        None: the system was not tested.
        """
        for family in self.families:
            if system in family.separate:
                interval = family.separate[system]
                pairs = f"{system} − {family.control}"
                p = p_text(interval.p_value)
                sides = side_of(family.pairs[system].values())
                return f"{pairs}: {self.text(interval)}, {p}, {sides} blocks"
        return None


def _difference(system_and_interval: tuple[str, Interval]) -> float:
    return system_and_interval[1].difference


def compare(
    frame: pandas.DataFrame, measures: Mapping[str, Measure] = MEASURES
) -> dict[str, Compared]:
    """Column of report.csv -> the comparisons by this measure, for ``measures`` with a margin and a
    value in at least one run.

    Args:
        frame: rows of report.csv, as in :func:`pn_fairseq.report.significance.families`.
    """
    compared = {}
    for name, measure in measures.items():
        if measure.margin is not None and name in frame and frame[name].notna().any():
            compared[name] = Compared(measure, *families(frame, name))
    return compared


def differences_table(compared: Mapping[str, Compared]) -> pandas.DataFrame:
    """A row for each compared system, a column for each measure."""
    rows: dict[str, dict[str, str]] = {}
    for comparison in compared.values():
        for system in (*comparison.intervals, *comparison.untested):
            rows[system] = {"system": system}
    for system, row in rows.items():
        for comparison in compared.values():
            interval = comparison.intervals.get(system)
            if interval:
                text = f"{comparison.text(interval)} {comparison.verdict(interval)}"
                row[comparison.measure.title] = Markdown(text)
            else:
                why = comparison.untested.get(system, "not measured")
                row[comparison.measure.title] = missing(f"not tested: {why}")
    return pandas.DataFrame(rows.values())


def panels(
    measures: Sequence[Measure],
    names: Sequence[str],
    height: float,
    difference: str,
    better: str = "better",
):
    """A figure and its axes: a column for each measure with its margin of equivalence, and a row
    for each name.

    ``difference``: what is drawn, for the label of the axes, such as "difference from LN".
    """
    width = 1.6 * len(measures) + 0.09 * max(map(len, names))
    figure, axes = headless_pyplot().subplots(
        1,
        len(measures),
        figsize=(max(6.4, width), height),
        sharey=True,
        squeeze=False,
        layout="constrained",
    )
    for axis, measure in zip(axes[0], measures, strict=True):
        axis.axvspan(-measure.margin, measure.margin, color="#dddddd", linewidth=0)
        axis.axvline(0, color="black", linewidth=1)
        title = measure.title.replace(" (", "\n(", 1)
        axis.set_title(title, parse_math=False)
        direction = f"← {better}" if measure.better == "lower" else f"{better} →"
        axis.set_xlabel(direction)
        axis.locator_params(axis="x", nbins=4)
        axis.grid(axis="x", alpha=0.3)
    label = f"{difference}\n(grey: counts as equivalent)"
    figure.supxlabel(label, fontsize="medium", parse_math=False)
    axes[0][0].set_yticks(range(len(names)), names, parse_math=False)
    axes[0][0].set_ylim(len(names) - 0.5, -0.5)
    return figure, axes[0]


def seeds_of(frame: pandas.DataFrame) -> dict[str, int]:
    """The number of seeds of each system in rows of report.csv."""
    return frame.groupby("system")["seed"].nunique().to_dict()


def plot(
    compared: Mapping[str, Compared], order: Sequence[str], output: Path, seeds: Mapping[str, int]
) -> str | None:
    """Draw points and simultaneous intervals, one column for each measure, into ``output`` (.png).

    Args:
        order: the systems in the order of the rows.
        seeds: the number of seeds of each system, from :func:`seeds_of`.

    Returns:
        The picture's name; None if there was nothing to draw.
    """
    columns = [comparison for comparison in compared.values() if comparison.intervals]
    if not columns:
        return None
    controls: dict[str, str] = {}
    for comparison in columns:
        for family in comparison.families:
            controls |= dict.fromkeys(family.intervals, family.control)
    systems = [system for system in order if system in controls]
    systems.sort(key=lambda system: order.index(controls[system]))
    names = [f"{system}, {count(seeds[system], 'seed')}" for system in systems]
    with_seeds = []
    for control in dict.fromkeys(controls.values()):
        with_seeds.append(f"{control} ({count(seeds[control], 'seed')})")
    control = f"its own control ({', '.join(with_seeds)})"
    if len(with_seeds) == 1:
        control = with_seeds[0]
    difference = f"difference from {control}, with simultaneous 95% intervals"
    measures = [comparison.measure for comparison in columns]
    figure, axes = panels(measures, names, 0.3 * len(names) + 2, difference)
    for axis, comparison in zip(axes, columns, strict=True):
        for index, family in enumerate(comparison.families):
            rows = [systems.index(system) for system in family.intervals]
            centers = [interval.difference for interval in family.intervals.values()]
            halves = [interval.difference - interval.low for interval in family.intervals.values()]
            look = style(index) | {"linestyle": "none", "markersize": 5}
            axis.errorbar(centers, rows, xerr=halves, elinewidth=1.6, capsize=3, **look)
    save(figure, output)
    return output.name
