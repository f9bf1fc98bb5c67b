"""Differences from the control as a table, as sentences and as a picture: in ``pn report`` and in docs/results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pandas

from pn_fairseq.common.files import atomic_write
from pn_fairseq.pipeline.scoring import p_text
from pn_fairseq.report.curves import headless_pyplot, style
from pn_fairseq.report.markdown import Markdown, missing
from pn_fairseq.report.significance import MEASURES, POWER, Family, Interval, Measure, families

_VERDICTS = ("better", "worse", "equivalent", "not resolved")


def signed(value: float, digits: int = 2) -> str:
    """A difference, with its sign."""
    plain = f"{value:+.{digits}f}"
    return plain.replace("-", "−") if float(plain) else plain[1:]


def count(amount: int, one: str, several: str = "") -> str:
    """ "1 run", "3 runs"."""
    return f"{amount:,} {one if amount == 1 else several or one + 's'}"


def side_of(differences: Sequence[float]) -> str:
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
        return {system: one for family in self.families for system, one in family.intervals.items()}

    def family_of(self, system: str) -> Family | None:
        """The family in which a system is tested."""
        return next((family for family in self.families if system in family.intervals), None)

    def text(self, one: Interval) -> str:
        digits = self.measure.digits
        return f"{signed(one.difference, digits)} ({signed(one.low, digits)} to {signed(one.high, digits)})"

    def verdict(self, one: Interval) -> str:
        """In words, with the margin where it matters."""
        verdict, margin = one.verdict(self.measure), f"±{self.measure.margin:g}"
        if verdict == "equivalent":
            return f"equivalent within {margin}"
        small = verdict != "not resolved" and max(-one.low, one.high) <= self.measure.margin
        return f"{verdict}, and within {margin}" if small else verdict

    def sentence(self, family: Family) -> str:
        """What the family shows: every resolved difference with its interval, and the range of the others."""
        groups: dict[str, list[tuple[str, Interval]]] = {verdict: [] for verdict in _VERDICTS}
        for system, one in family.intervals.items():
            groups[one.verdict(self.measure)].append((system, one))
        titles = dict(zip(_VERDICTS, (f"better than {family.control}", f"worse than {family.control}"), strict=False))
        titles["equivalent"] = f"equivalent to {family.control} within ±{self.measure.margin:g}"
        parts = [
            f"{title}: {', '.join(f'{system} {self.text(one)}' for system, one in groups[verdict])}"
            for verdict, title in titles.items()
            if groups[verdict]
        ]
        if not groups["better"] and not groups["worse"]:
            parts.insert(0, f"no system is shown to differ from {family.control}")
        if open_ := sorted(groups["not resolved"], key=lambda pair: pair[1].difference):
            ends = " to ".join(f"{system} {self.text(one)}" for system, one in dict.fromkeys((open_[0], open_[-1])))
            parts.append(f"not resolved: {ends}" if len(open_) < 3 else f"not resolved: {len(open_)} systems, {ends}")
        return f"{'; '.join(parts)}."

    def strength(self, family: Family) -> str:
        """What the design of a family can detect."""
        digits, systems = self.measure.digits, count(len(family.intervals), "system")
        return (
            f"{systems} and {family.control}, up to {count(family.blocks, 'block')}; noise "
            f"{family.deviation:.{digits}f} with {family.design.degrees} degrees of freedom; simultaneous intervals of "
            f"±{family.half_width:.{digits}f}, and a true difference of {family.detectable:.{digits}f} is found with "
            f"{POWER:.0%} probability"
        )

    def planned(self, system: str) -> str | None:
        """A comparison that was planned before the runs, without correction. None: it was not tested."""
        if (family := self.family_of(system)) is None:
            return None
        interval, sides = family.separate[system], side_of(family.pairs[system])
        return f"{system} − {family.control}: {self.text(interval)}, {p_text(interval.p_value)}, {sides} blocks"


def compare(frame: pandas.DataFrame) -> dict[str, Compared]:
    """Column of report.csv -> the comparisons by this measure, of the measures that any run has.

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
    systems = dict.fromkeys(system for one in compared.values() for system in (*one.intervals, *one.untested))
    rows = []
    for system in systems:
        row = {"system": system}
        for one in compared.values():
            interval = one.intervals.get(system)
            cell = missing(f"not tested: {one.untested.get(system, 'not measured')}")
            row[one.measure.title] = Markdown(f"{one.text(interval)} {one.verdict(interval)}") if interval else cell
        rows.append(row)
    return pandas.DataFrame(rows)


def plot(compared: Mapping[str, Compared], order: Sequence[str], output: Path) -> bool:
    """Draw points and simultaneous intervals, one column for each measure, into ``output`` (.png).

    Returns:
        Whether there was anything to draw.
    """
    shown = {name: one for name, one in compared.items() if one.intervals}
    controls = {system: f.control for one in shown.values() for f in one.families for system in f.intervals}
    systems = sorted((name for name in order if name in controls), key=lambda name: order.index(controls[name]))
    if not shown:
        return False
    pyplot = headless_pyplot()
    height = 0.3 * len(systems) + 1.5
    figure, axes = pyplot.subplots(
        1, len(shown), figsize=(6.4, height), sharey=True, squeeze=False, layout="constrained"
    )
    for axis, one in zip(axes[0], shown.values(), strict=True):
        axis.axvspan(-one.measure.margin, one.measure.margin, color="#dddddd", linewidth=0)
        axis.axvline(0, color="black", linewidth=1)
        for index, family in enumerate(one.families):
            places = [systems.index(system) for system in family.intervals]
            ends = [(each.difference, each.difference - each.low) for each in family.intervals.values()]
            centers, halves = zip(*ends, strict=True)
            look = style(index) | {"linestyle": "none"}
            axis.errorbar(centers, places, xerr=halves, markersize=5, elinewidth=1.6, capsize=3, **look)
        title, _, unit = one.measure.title.partition(" (")
        axis.set_title(f"{title}\n({unit}" if unit else title)
        axis.set_xlabel("← better" if one.measure.lower_is_better else "better →")
        axis.locator_params(axis="x", nbins=4)
        axis.grid(axis="x", alpha=0.3)
    axes[0][0].set_yticks(range(len(systems)), systems, parse_math=False)
    axes[0][0].set_ylim(len(systems) - 0.5, -0.5)
    try:
        with atomic_write(output) as file:
            figure.savefig(file, format="png", dpi=130)
    finally:
        pyplot.close(figure)
    return True
