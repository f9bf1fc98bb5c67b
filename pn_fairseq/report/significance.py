"""How certain differences between systems are over seeds.

Every system is compared with the same control (LN). The runs of one seed on one machine are a
block: they share the order of the data, the initial weights and the rounding. The model is ``value
= system + block + noise`` with independent normal noise of one variance for all systems (Dunnett
1955 for the comparison with a control; here with blocks, which may be incomplete). A difference is
estimated within blocks only, so that machines can be pooled.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas
from scipy import optimize, stats

from pn_fairseq.pipeline.metrics import Measure
from pn_fairseq.pipeline.translation_scores import low_bleu
from pn_fairseq.report.measures import LOSS

#: Error rate of a whole family of comparisons, and the power that defines the detectable
#: difference.
ERROR_RATE = 0.05
POWER = 0.8

#: A system whose mean best validation loss is this much above its control's (bits per token) did
#: not train with its settings. It is not tested, and its spread over seeds does not enter the noise
#: against which the other systems are tested.
NOT_TRAINED = 0.75


@dataclass(frozen=True)
class Interval:
    """The difference of a system from its control, with a confidence interval and the two-sided p
    for no difference.
    """

    difference: float
    low: float
    high: float
    p_value: float

    def verdict(self, measure: Measure) -> str:
        """``better``, ``worse``, ``equivalent`` or ``inconclusive``.

        If the interval excludes 0: better or worse. If it is within the margin: equivalent
        (interval inclusion, Schuirmann 1987; with the 95% interval instead of 90% the error rate is
        at most 2.5%).
        """
        if self.low > 0 or self.high < 0:
            side = "higher" if self.low > 0 else "lower"
            return "better" if side == measure.better else "worse"
        if max(-self.low, self.high) <= measure.margin:
            return "equivalent"
        return "inconclusive"


class Design:
    """The model of a family: the runs of the control and of the systems that are compared with it.

    Args:
        runs: the system and the block of each run. If no block contains two systems, give the
            machine as the block.
        control: the system with which the others are compared.

    Attributes:
        systems: the systems whose difference from the control can be estimated, in the order of
            ``runs``. A system that no chain of shared blocks joins to the control is left out.
        runs: the number of runs.
        degrees: degrees of freedom of the noise's variance; 0 if nothing can be tested.
        errors: standard error of each difference, divided by the standard deviation of the noise.
    """

    def __init__(self, runs: Sequence[tuple[str, object]], control: str) -> None:
        system_of_run, block_of_run = zip(*runs, strict=True)
        names = [name for name in dict.fromkeys(system_of_run) if name != control]
        blocks = list(dict.fromkeys(block_of_run))
        columns = [[1.0] * len(runs)]
        for name in names:
            columns.append([system == name for system in system_of_run])
        for block in blocks[1:]:
            columns.append([other == block for other in block_of_run])
        matrix = np.array(columns, dtype=float).T
        inverse = np.linalg.pinv(matrix)
        self.runs = len(runs)
        self._residual = np.eye(self.runs) - matrix @ inverse
        self.degrees = self.runs - int(np.linalg.matrix_rank(matrix))
        contrasts = np.eye(matrix.shape[1])[1 : 1 + len(names)]
        projected = contrasts @ inverse @ matrix
        estimable = np.isclose(projected, contrasts, atol=1e-8).all(axis=1)
        self.systems = [name for name, known in zip(names, estimable, strict=True) if known]
        self._contrasts = contrasts[estimable] @ inverse
        covariance = self._contrasts @ self._contrasts.T
        self.errors = np.sqrt(np.diag(covariance))
        self._correlation = covariance / np.outer(self.errors, self.errors)

    def fit(self, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Estimate the differences and the noise.

        Args:
            values: a value for each run; more axes are more data sets of the same design.

        Returns:
            The differences from the control, (systems, ...), and the standard deviation of the
            noise, (...).
        """
        residual = self._residual @ values
        variance = (residual**2).sum(axis=0) / self.degrees
        return self._contrasts @ values, np.sqrt(variance)

    def probability(self, bound: float) -> float:
        """The probability that no estimated difference is more than ``bound`` standard errors
        from its true value.
        """
        if len(self.systems) == 1:
            return float(1 - 2 * stats.t.sf(bound, self.degrees))
        bounds = np.full(len(self.systems), bound)
        distribution = stats.multivariate_t(shape=self._correlation, df=self.degrees)
        return float(distribution.cdf(bounds, lower_limit=-bounds, random_state=0))

    def critical(self) -> float:
        """The number of standard errors in half a simultaneous interval."""
        one = float(stats.t.isf(ERROR_RATE / 2, self.degrees))
        if len(self.systems) == 1:
            return one
        share = ERROR_RATE / len(self.systems)
        bonferroni = float(stats.t.isf(share / 2, self.degrees))

        def excess(bound: float) -> float:
            return self.probability(bound) - 1 + ERROR_RATE

        return optimize.brentq(excess, one, 1.01 * bonferroni, xtol=1e-4)

    def detectable(self, critical: float) -> float:
        """The smallest difference, in standard deviations of the noise, that is found with
        probability :data:`POWER`.

        For the system with the median standard error, by the noncentral t distribution.
        """
        error = float(np.median(self.errors))

        def power(shift: float) -> float:
            above, above_lower = stats.nct.sf([critical, -critical], self.degrees, shift)
            return float(above + 1 - above_lower)

        high = critical
        while power(high) < POWER:
            high *= 2
        shift = optimize.brentq(lambda shift: power(shift) - POWER, 0, high)
        return error * shift


@dataclass(frozen=True)
class Family:
    """Systems with several runs, compared with one control."""

    control: str
    blocks: int  # most blocks of a system
    intervals: dict[str, Interval]  # simultaneous: all hold jointly with probability 95%
    # each holds with probability 95%: for a comparison that was planned before the runs
    separate: dict[str, Interval]
    deviation: float  # standard deviation of the noise
    design: Design
    half_width: float  # half the width of a simultaneous interval, as a median over the systems
    detectable: float  # the difference that is found with probability POWER
    # system -> (machine, seed) of each block that also contains the control -> difference
    pairs: dict[str, dict[tuple, float]]


def _family(values: pandas.Series, control: str) -> Family | None:
    """Compare systems with ``control``.

    None: nothing can be tested (no degrees of freedom, or no spread).

    Args:
        values: the index has the levels ``system`` and ``block``, which is (machine, seed).
    """
    # If no two systems share a block, the machine replaces it: see families().
    shared = values.groupby(level="block").size().gt(1).any()
    runs = [(system, block if shared else block[0]) for system, block in values.index]
    design = Design(runs, control)
    if not design.systems or design.degrees < 1:
        return None
    differences, deviation = design.fit(values.to_numpy(float))
    if deviation < 1e-9 * max(1.0, values.abs().max()):
        return None
    critical = design.critical()
    quantile = float(stats.t.isf(ERROR_RATE / 2, design.degrees))
    intervals = {}
    separate = {}
    pairs = {}
    by_block = values.unstack()
    errors = design.errors * deviation
    for system, center, error in zip(design.systems, differences, errors, strict=True):
        ratio = float(abs(center) / error)
        p_together = min(1.0, max(0.0, 1 - design.probability(ratio)))
        intervals[system] = _interval(center, critical * error, p_together)
        p_alone = 2 * float(stats.t.sf(ratio, design.degrees))
        separate[system] = _interval(center, quantile * error, p_alone)
        differences_by_block = by_block.loc[system] - by_block.loc[control]
        pairs[system] = differences_by_block.dropna().to_dict()
    return Family(
        control=control,
        blocks=int(values.groupby(level="system").size().max()),
        intervals=intervals,
        separate=separate,
        deviation=float(deviation),
        design=design,
        half_width=float(critical * np.median(design.errors) * deviation),
        detectable=float(design.detectable(critical) * deviation),
        pairs=pairs,
    )


def _interval(center: float, half: float, p: float) -> Interval:
    center = float(center)
    half = float(half)
    return Interval(center, center - half, center + half, p)


def families(frame: pandas.DataFrame, measure: str) -> tuple[list[Family], dict[str, str]]:
    """Compare systems by one measure, each with its control.

    A system and its control need two or more blocks. A repeated run (the same machine and seed)
    counts once, by the mean. If no two systems share a seed on one machine, the block is the
    machine, so that systems on different machines are never compared. A system that did not train
    (:data:`NOT_TRAINED`) is left out; for translation scores, so is a system with a BLEU below 1.

    Args:
        frame: the rows of report.csv: ``system``, ``compared with``, ``seed``, ``machine``, and the
            measure.

    Returns:
        The families, and for each other measured system why it is not tested.
    """
    measured = frame.dropna(subset=[measure]).fillna({"machine": "not recorded"})
    measured = measured.assign(block=_blocks(measured))
    values = measured.groupby(["system", "block"], sort=False)[measure].mean()
    counts = values.groupby(level="system", sort=False).size()
    # NaN if a measure is unknown
    known = measured.reindex(columns=["system", LOSS, "tokenized"])
    means = known.groupby("system").mean()
    losses = means[LOSS]
    bleu = means["tokenized"]
    low = set()
    if measure != LOSS:  # a difference in scores would only separate two kinds of noise
        low = {system for system in counts.index if low_bleu(bleu[system])}
    with_control = measured.dropna(subset=["compared with"])
    controls = with_control.groupby("system", sort=False)["compared with"].first()
    tested = []
    untested = {}
    for control in controls.unique():
        systems = controls.index[controls == control]
        if control not in counts:
            untested |= dict.fromkeys(systems, f"{control} was not measured")
            continue
        if control in low:
            untested |= dict.fromkeys(systems, f"the BLEU of {control} is below 1")
            continue
        several = []
        for system in systems:
            if system in low:
                untested[system] = "its BLEU is below 1"
            elif counts[system] == 1:
                untested[system] = "one seed"
            elif losses[system] - losses[control] > NOT_TRAINED:
                untested[system] = "did not train with these settings"
            else:
                several.append(system)
        if counts[control] == 1:
            untested |= dict.fromkeys(several, f"{control} has one seed")
            continue
        family = None
        if several:
            members = values.index.isin([control, *several], level="system")
            family = _family(values[members], control)
        for system in several:
            blocks = set(values[system].index)
            shares_a_block = not blocks.isdisjoint(values[control].index)
            if not family and shares_a_block:
                untested[system] = "no spread over seeds, or too few runs"
            elif not family or system not in family.intervals:
                untested[system] = f"no seed on one machine in common with {control}"
        if family:
            tested.append(family)
    return tested, untested


def _blocks(measured: pandas.DataFrame) -> list[tuple]:
    """(machine, seed) of each run; a run whose seed is unknown gets its own."""
    seeds = measured["seed"].astype(object)
    of_runs = [f"run {number}" for number in range(len(seeds))]
    return list(zip(measured["machine"], seeds.where(seeds.notna(), of_runs), strict=True))
