"""Differences from the control as a table, as sentences and as a picture: in ``pn report`` and
in docs/results.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pandas

from pn_fairseq.pipeline.metrics import Measure
from pn_fairseq.pipeline.paired_bootstrap import p_text
from pn_fairseq.report.curves import headless_pyplot, save, style
from pn_fairseq.report.markdown import Markdown, missing
from pn_fairseq.report.significance import MEASURES, POWER, Family, Interval, families


def signed(value: float, digits: int = 2) -> str:
    """A difference, with its sign."""
    plain = f"{value:+.{digits}f}"
    return plain.replace("-", "−") if float(plain) else plain[1:]


def count(amount: int, one: str, several: str = "") -> str:
    """ "1 run", "3 runs"."""
    return f"{amount:,} {one if amount == 1 else several or one + 's'}"


def side_of(differences: Collection[float]) -> str:
    """ "lower in 5 of 6": the side on which most differences are."""
    below, above = (sum(sign * difference > 0 for difference in differences) for sign in (-1, 1))
    side, amount = ("lower", below) if below >= above else ("higher", above)
    return f"{side} in {amount} of {len(differences)}"


@dataclass(frozen=True)
class Compared:
    """The comparisons by one measure."""

    measure: Measure
    families: list[Family]
    untested: dict[str, str]  # system -> why it is not tested

    @property
    def intervals(self) -> dict[str, Interval]:
        return {
            system: interval
            for family in self.families
            for system, interval in family.intervals.items()
        }

    def text(self, interval: Interval) -> str:
        difference, low, high = (
            signed(value, self.measure.decimals)
            for value in (interval.difference, interval.low, interval.high)
        )
        return f"{difference} ({low} to {high})"

    def verdict(self, interval: Interval) -> str:
        """The verdict in words.

        It names the margin of equivalence if the whole interval is within it.
        """
        verdict, margin = interval.verdict(self.measure), f"±{self.measure.margin:g}"
        if verdict == "equivalent":
            return f"equivalent within {margin}"
        small = max(-interval.low, interval.high) <= self.measure.margin
        return f"{verdict}, but within {margin}" if small else verdict

    def sentence(self, family: Family) -> str:
        """Every resolved difference of the family with its interval,

        and the range of the others.
        """
        verdicts = {
            system: interval.verdict(self.measure) for system, interval in family.intervals.items()
        }
        texts = {
            system: f"{system} {self.text(interval)}"
            for system, interval in family.intervals.items()
        }
        titles = {
            "better": f"better than {family.control}",
            "worse": f"worse than {family.control}",
            "equivalent": f"equivalent to {family.control} within ±{self.measure.margin:g}",
        }
        parts = []
        if not {"better", "worse"} & {*verdicts.values()}:
            parts.append(f"no system is shown to differ from {family.control}")
        for verdict, title in titles.items():
            if systems := [texts[system] for system, own in verdicts.items() if own == verdict]:
                parts.append(f"{title}: {', '.join(systems)}")
        by_difference = sorted(verdicts, key=lambda system: family.intervals[system].difference)
        if unresolved := [
            texts[system] for system in by_difference if verdicts[system] == "not resolved"
        ]:
            ends = list(dict.fromkeys((unresolved[0], unresolved[-1])))
            if len(unresolved) > 2:
                ends = [f"{len(unresolved)} systems, from {ends[0]} to {ends[-1]}"]
            parts.append(f"not resolved: {' and '.join(ends)}")
        return f"{'; '.join(parts)}."

    def strength(self, family: Family) -> str:
        """What the design of a family can detect."""
        digits, systems = self.measure.decimals, count(len(family.intervals), "system")
        return (
            f"{systems} and {family.control}, up to {count(family.blocks, 'block')}; noise "
            f"{family.deviation:.{digits}f} with {family.design.degrees} degrees of freedom; "
            "simultaneous intervals of "
            f"±{family.half_width:.{digits}f}, and a true difference of "
            f"{family.detectable:.{digits}f} is found with "
            f"{POWER:.0%} probability"
        )

    def planned(self, system: str) -> str | None:
        """The difference of a planned comparison with its uncorrected interval and p-value.

        None: it was not tested.
        """
        family = next((family for family in self.families if system in family.intervals), None)
        if family is None:
            return None
        interval, sides = family.separate[system], side_of(family.pairs[system].values())
        return (
            f"{system} − {family.control}: {self.text(interval)}, {p_text(interval.p_value)}, "
            f"{sides} blocks"
        )


def compare(frame: pandas.DataFrame) -> dict[str, Compared]:
    """Column of report.csv -> the comparisons by this measure, for all measures that at least one
    run has.

    Args:
        frame: rows of report.csv, as in :func:`pn_fairseq.report.significance.families`.
    """
    return {
        column: Compared(measure, *families(frame, column))
        for column, measure in MEASURES.items()
        if column in frame and frame[column].notna().any()
    }


def table(compared: Mapping[str, Compared]) -> pandas.DataFrame:
    """A row for each system that is compared, a column for each measure."""
    rows: dict[str, dict[str, str]] = {}
    for of_measure in compared.values():
        rows |= {
            system: {"system": system} for system in (*of_measure.intervals, *of_measure.untested)
        }
    for system, row in rows.items():
        for of_measure in compared.values():
            if interval := of_measure.intervals.get(system):
                text = Markdown(f"{of_measure.text(interval)} {of_measure.verdict(interval)}")
            else:
                text = missing(f"not tested: {of_measure.untested.get(system, 'not measured')}")
            row[of_measure.measure.title] = text
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
    size = (max(6.4, 1.6 * len(measures) + 0.09 * max(map(len, names))), height)
    figure, axes = headless_pyplot().subplots(
        1, len(measures), figsize=size, sharey=True, squeeze=False, layout="constrained"
    )
    for axis, measure in zip(axes[0], measures, strict=True):
        axis.axvspan(-measure.margin, measure.margin, color="#dddddd", linewidth=0)
        axis.axvline(0, color="black", linewidth=1)
        title, _, unit = measure.title.partition(" (")
        axis.set_title(f"{title}\n({unit}" if unit else title)
        axis.set_xlabel(f"← {better}" if measure.better == "lower" else f"{better} →")
        axis.locator_params(axis="x", nbins=4)
        axis.grid(axis="x", alpha=0.3)
    figure.supxlabel(
        f"{difference}\n(grey: counts as equivalent)", fontsize="medium", parse_math=False
    )
    axes[0][0].set_yticks(range(len(names)), names, parse_math=False)
    axes[0][0].set_ylim(len(names) - 0.5, -0.5)
    return figure, axes[0]


def seeds_of(frame: pandas.DataFrame) -> dict[str, int]:
    """The number of seeds of each system in rows of report.csv."""
    return frame.groupby("system")["seed"].nunique().to_dict()


def number_of_seeds(count: int) -> str:
    return f"{count} seed{'s' * (count != 1)}"


def plot(
    compared: Mapping[str, Compared], order: Sequence[str], output: Path, seeds: Mapping[str, int]
) -> str | None:
    """Draw points and simultaneous intervals, one column for each measure, into ``output`` (.png).

    Args:
        order: the systems, as the rows.
        seeds: the number of seeds of each system, by :func:`seeds_of`.

    Returns:
        The picture's name; None if there was nothing to draw.
    """
    columns = [of_measure for of_measure in compared.values() if of_measure.intervals]
    if not columns:
        return None
    controls = {}
    for of_measure in columns:
        for family in of_measure.families:
            controls |= dict.fromkeys(family.intervals, family.control)
    systems = sorted(
        (name for name in order if name in controls), key=lambda name: order.index(controls[name])
    )
    names = [f"{system}, {number_of_seeds(seeds[system])}" for system in systems]
    of_controls = [
        f"{control} ({number_of_seeds(seeds[control])})"
        for control in dict.fromkeys(controls.values())
    ]
    control = (
        of_controls[0] if len(of_controls) == 1 else f"its own control ({', '.join(of_controls)})"
    )
    difference = f"difference from {control}, with simultaneous 95% intervals"
    figure, axes = panels(
        [of_measure.measure for of_measure in columns], names, 0.3 * len(names) + 2, difference
    )
    for axis, of_measure in zip(axes, columns, strict=True):
        for index, family in enumerate(of_measure.families):
            rows = [systems.index(system) for system in family.intervals]
            centers = [interval.difference for interval in family.intervals.values()]
            halves = [interval.difference - interval.low for interval in family.intervals.values()]
            look = style(index) | {"linestyle": "none"}
            axis.errorbar(
                centers, rows, xerr=halves, markersize=5, elinewidth=1.6, capsize=3, **look
            )
    save(figure, output)
    return output.name
