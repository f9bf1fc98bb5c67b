"""How sure a difference between two systems is."""

from __future__ import annotations

import math
import statistics
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from scipy import stats

from pn_fairseq.report.systems import System
from pn_fairseq.scoring import ScoringError, SystemResult, compare_folders

#: The measures that are tested, by their names in :mod:`pn_fairseq.scoring`.
MEASURES = ("tokenized", "detokenized", "chrf")


def mean_and_deviation(values: Sequence[float]) -> tuple[float, float | None]:
    """Mean and sample standard deviation, sqrt(sum (x - mean)^2 / (n - 1)); None for the deviation of one value."""
    return statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else None


@dataclass(frozen=True)
class Welch:
    """Welch's t-test of the difference of two means over seeds.

    Attributes:
        low, high: 95% confidence interval of the difference.
        p_value: two-sided, of no difference.
    """

    low: float
    high: float
    p_value: float


def welch(system: Sequence[float], baseline: Sequence[float]) -> Welch | None:
    """Welch's unequal-variances t-test (Welch 1947) by scipy; None with fewer than two values, or without spread."""
    if min(len(system), len(baseline)) < 2 or not any(statistics.stdev(values) for values in (system, baseline)):
        return None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of values that are all but the same
        result = stats.ttest_ind(system, baseline, equal_var=False)
        interval = result.confidence_interval(0.95)
    if not math.isfinite(result.pvalue):
        return None
    return Welch(float(interval.low), float(interval.high), float(result.pvalue))


@dataclass(frozen=True)
class Pair:
    """A system's run beside the baseline's run of the same seed.

    Attributes:
        seed: of both.
        system, baseline: measure -> result of the paired bootstrap; empty if it could not be computed.
        reason: why it could not be computed.
    """

    seed: object
    system: dict[str, SystemResult]
    baseline: dict[str, SystemResult]
    reason: str = ""


def pairs(system: System, baseline: System, subset: str, resamples: int) -> list[Pair]:
    """Paired bootstrap of every scored run of ``system`` against the baseline's run of the same seed."""
    found = []
    for run in system.runs:
        if run.scores is None:
            continue
        partner = next((other for other in baseline.runs if other.scores and other.seed == run.seed), None)
        if partner is None:
            continue
        folders: list[Path] = [one.path / "generate" / subset for one in (partner, run)]
        try:
            comparisons = compare_folders(
                (baseline.label, folders[0]), {system.label: folders[1]}, metrics=MEASURES, resamples=resamples
            )
        except (ScoringError, OSError) as error:
            found.append(Pair(run.seed, {}, {}, " ".join(str(error).split())))
            continue
        found.append(
            Pair(
                run.seed,
                {measure: comparison.systems[0] for measure, comparison in comparisons.items()},
                {measure: comparison.baseline for measure, comparison in comparisons.items()},
            )
        )
    return found
