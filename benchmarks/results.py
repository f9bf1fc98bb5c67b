"""What the benchmarks have in common: medians of ratios, and a CSV file that says where its numbers come from."""

import csv
import os
import statistics
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from pn_fairseq.machine import describe


def spread(values: Sequence[float]) -> tuple[float, float, float]:
    """Lowest quartile, median and highest quartile; of fewer than two values the one there is."""
    if len(values) < 2:
        return (values[0],) * 3
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, middle, high


def ratios(values: Sequence[float], base: Sequence[float]) -> tuple[float, float, float]:
    """:func:`spread` of ``values`` divided by ``base``, each by that of the same round."""
    return spread([value / other for value, other in zip(values, base, strict=True)])


def write_csv(path: str | os.PathLike, rows: list[dict]) -> None:
    """Write ``rows``, all with the same keys, and in each the date (UTC), the versions and the machine."""
    where = {key: ", ".join(value) if isinstance(value, list) else value for key, value in describe().items()}
    where = {"date": datetime.now(UTC).isoformat(timespec="seconds"), **where}
    partial = Path(f"{path}.partial")
    with open(partial, "w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, [*rows[0], *where])
        writer.writeheader()
        writer.writerows({**row, **where} for row in rows)
    os.replace(partial, path)
