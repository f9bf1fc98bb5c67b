"""Shared by the benchmarks: turns, medians of ratios, and CSV files with the versions and the
machine.
"""

import argparse
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path

import numpy
import pandas

from pn_fairseq.common.checkpoints import CheckpointError, check_output_path
from pn_fairseq.common.files import atomic_write
from pn_fairseq.pipeline.machine import describe_machine


def in_turns(
    work: Mapping[str, Callable[[int], object]],
    rounds: int,
    warm: int,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, list[float]]:
    """Seconds of each by round. In each round all take a turn, the first one another each time.

    ``work`` is called with the number of the round; the first ``warm`` rounds are not counted.
    ``clock`` gives the seconds.
    """
    names = list(work)
    seconds = {name: [] for name in work}
    for number in range(rounds + warm):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            begin = clock()
            work[name](number)
            if number >= warm:
                seconds[name].append(clock() - begin)
        show_round(number, warm, rounds)
    print(file=sys.stderr)
    return seconds


def show_round(number: int, warm: int, rounds: int) -> None:
    """Say on stderr, on one line, that a round is over."""
    turn = f"round {number + 1 - warm} of {rounds}"
    if number < warm:
        turn = f"warm-up round {number + 1} of {warm}"
    print(f"\r{turn:<25}", end="", file=sys.stderr, flush=True)


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """First quartile, median and third quartile."""
    return tuple(float(value) for value in numpy.quantile(values, (0.25, 0.5, 0.75)))


def ratios(values: Sequence[float], base: Sequence[float]) -> tuple[float, float, float]:
    """:func:`quartiles` of ``values`` divided by ``base``, round by round."""
    return quartiles([value / other for value, other in zip(values, base, strict=True)])


def positive(text: str) -> int:
    """A whole number above 0, for argparse."""
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive whole number")
    return int(text)


def output_file(text: str) -> Path:
    """A file that can be written, for argparse: checked before hours of measuring."""
    try:
        check_output_path(text)
    except CheckpointError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return Path(text)


def settings_of(args: argparse.Namespace) -> dict[str, object]:
    """What was measured, as columns of a CSV file."""
    others = ("output", "norms", "checkpoint", "no_memory")
    return {name: value for name, value in vars(args).items() if name not in others}


def report_speeds(
    unit: str,
    amounts: Sequence[float],
    seconds: Mapping[str, Sequence[float]],
    base: str,
    settings: Mapping[str, object],
    more: Mapping[str, Mapping[str, float | str | None]],
    output: Path | None,
) -> None:
    """Print the median speed of each, and how many times as fast as ``base`` it is, with quartiles.

    Args:
        unit: what is counted; ``amounts`` of it were done in the rounds.
        seconds: as :func:`in_turns` returns it.
        settings: columns of the CSV file ``output`` alone.
        more: further columns by name, instead of a setting of the same name.
    """
    rows = {}
    for name, taken in seconds.items():
        speeds = [amount / each for amount, each in zip(amounts, taken, strict=True)]
        low, middle, high = ratios(seconds[base], taken)  # of speeds: the inverse of times
        measured = {f"{unit}_per_s": quartiles(speeds)[1], f"times_{base}": middle}
        measured |= {"times_low": low, "times_high": high, **more[name]}
        rows[name] = {key: _cell(value) for key, value in measured.items()}
    print(pandas.DataFrame.from_dict(rows, orient="index").to_string())
    if output:
        write_csv(output, [{"norm": name, **settings, **row} for name, row in rows.items()])


def _cell(value: float | str | None) -> str:
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    return f"{value:.4g}"


def write_csv(path: Path, rows: list[dict]) -> None:
    """Write ``rows``, which have the same keys, each with the date (UTC), the versions and the
    machine.
    """
    where = describe_machine()
    where["gpus"] = ", ".join(where["gpus"])
    date = datetime.now(UTC).isoformat(timespec="seconds")
    frame = pandas.DataFrame(rows, dtype=object).assign(date=date, **where)
    with atomic_write(path) as file:
        frame.to_csv(file, index=False)
