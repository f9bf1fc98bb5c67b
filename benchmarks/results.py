"""What the benchmarks have in common: medians of ratios, and a CSV file that says where its numbers come from."""

import argparse
import csv
import errno
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


def positive(text: str) -> int:
    """A whole number above 0, for argparse."""
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive whole number")
    return int(text)


def partial(path: str | os.PathLike) -> Path:
    """Where a file is written before it gets its name, whole."""
    return Path(f"{path}.partial")


def output_file(text: str) -> Path:
    """A file that can be written, for argparse: known before hours of measuring, not after."""
    path = Path(text)
    try:
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        partial(path).touch()
        partial(path).unlink()
    except OSError as error:
        raise argparse.ArgumentTypeError(f"cannot write {text}: {error.strerror}") from error
    return path


def write_csv(path: str | os.PathLike, rows: list[dict]) -> None:
    """Write ``rows``, all with the same keys, and in each the date (UTC), the versions and the machine."""
    where = {key: ", ".join(value) if isinstance(value, list) else value for key, value in describe().items()}
    where = {"date": datetime.now(UTC).isoformat(timespec="seconds"), **where}
    with open(partial(path), "w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, [*rows[0], *where])
        writer.writeheader()
        writer.writerows({**row, **where} for row in rows)
    os.replace(partial(path), path)
