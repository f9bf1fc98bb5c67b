"""Shared by the benchmarks: medians of ratios, and CSV files with the versions and the machine."""

import argparse
import csv
import errno
import os
import statistics
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from pn_fairseq.machine import describe


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """First quartile, median and third quartile; a single value is all three."""
    if len(values) < 2:
        return (values[0],) * 3
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, middle, high


def ratios(values: Sequence[float], base: Sequence[float]) -> tuple[float, float, float]:
    """:func:`quartiles` of ``values`` divided by ``base``, round by round."""
    return quartiles([value / other for value, other in zip(values, base, strict=True)])


def positive(text: str) -> int:
    """A whole number above 0, for argparse."""
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive whole number")
    return int(text)


def partial(path: str | os.PathLike) -> Path:
    """Temporary name of a file until it is complete."""
    return Path(f"{path}.partial")


def output_file(text: str) -> Path:
    """A file that can be written, for argparse: checked before hours of measuring."""
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
    """Write ``rows``, which have the same keys, each with the date (UTC), the versions and the machine."""
    where = {key: ", ".join(value) if isinstance(value, list) else value for key, value in describe().items()}
    where = {"date": datetime.now(UTC).isoformat(timespec="seconds"), **where}
    with open(partial(path), "w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, [*rows[0], *where])
        writer.writeheader()
        writer.writerows({**row, **where} for row in rows)
    os.replace(partial(path), path)
