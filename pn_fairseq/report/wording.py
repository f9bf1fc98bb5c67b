"""Numbers and places in words, the same throughout a report."""

from __future__ import annotations

import math
import os
import shlex
from collections.abc import Sequence
from pathlib import Path


def number(value: float, digits: int = 2) -> str:
    """A number with a fixed number of digits and a comma in the thousands."""
    return f"{value:,.{digits}f}" if math.isfinite(value) else "not finite"


def signed(value: float, digits: int = 2) -> str:
    """A difference, with its sign."""
    text = f"{value:+.{digits}f}"
    return text.replace("-", "−") if float(text) else text[1:]


def p_value(value: float) -> str:
    return "p < 0.001" if value < 0.001 else f"p = {value:.3f}"


def duration(seconds: float) -> str:
    """Seconds as people say them."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {rest:02d} s"


def count(amount: int, one: str, several: str = "") -> str:
    """ "1 run", "3 runs"."""
    return f"{amount:,} {one if amount == 1 else several or one + 's'}"


def listed(items: Sequence[object]) -> str:
    """Items in a row; a span of whole numbers as its ends."""
    if len(items) > 2 and all(isinstance(item, int) for item in items):
        numbers = sorted(items)
        if numbers == list(range(numbers[0], numbers[-1] + 1)):
            return f"{numbers[0]} to {numbers[-1]}"
    return ", ".join(str(item) for item in items)


def here(text: str | Path) -> str:
    """A path, or a text with paths in it, relative to the working directory where they lie in it."""
    return str(text).replace(f"{os.getcwd()}/", "")


def command(words: Sequence[str]) -> str:
    """A command line that a shell reads as these words."""
    return shlex.join(words)
