"""How sure a difference between two systems is."""

from __future__ import annotations

import math
import statistics
import warnings
from collections.abc import Sequence
from typing import NamedTuple

from scipy import stats

from pn_fairseq.pipeline.scoring import Comparison, ScoringError, compare_folders
from pn_fairseq.report.runs import Run


class Welch(NamedTuple):
    """95% confidence interval of the difference of two means over seeds, and two-sided p of no difference."""

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


def corrected(p: float, comparisons: int) -> float:
    """p, corrected by Bonferroni for the number of comparisons that could have come out small."""
    return min(1.0, p * comparisons)


def pairs(
    system: Sequence[Run], baseline: Sequence[Run], subset: str, resamples: int
) -> list[tuple[object, dict[str, Comparison] | str]]:
    """Paired bootstrap of every scored run of a system against the baseline's run of the same seed.

    Returns:
        seed, and metric -> comparison of ``system`` with ``baseline``, or why it could not be computed.
    """
    found = []
    for run in system:
        partner = next((other for other in baseline if other.scores and other.seed == run.seed), None)
        if run.scores is None or partner is None:
            continue
        folders = {name: one.path / "generate" / subset for name, one in (("baseline", partner), ("system", run))}
        try:
            found.append((run.seed, compare_folders(folders, resamples=resamples)))
        except (ScoringError, OSError) as error:
            found.append((run.seed, " ".join(str(error).split())))
    return found
