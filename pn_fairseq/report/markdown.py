"""Text as GitHub's Markdown."""

from __future__ import annotations

import re
from html import escape
from pathlib import Path

import jinja2
import pandas

# Tables hold Markdown objects. With pyarrow installed pandas would keep strings in its format,
# which has no classes.
pandas.set_option("mode.string_storage", "python")

_SPECIAL = re.compile(r"([\\`*\[\]|~$])|(?<![0-9A-Za-z])_|_(?![0-9A-Za-z])")
_NUMBER = re.compile(r"[+−]?\d[\d,.]*( .*)?")


class Markdown(str):
    """Text that is Markdown already."""


def text(value: object) -> Markdown:
    """A value such that it is shown as it is, on one line."""
    if isinstance(value, Markdown):
        return value
    plain = escape(" ".join(str(value).split()), quote=False)
    return Markdown(_SPECIAL.sub(r"\\\g<0>", plain))


def missing(value: str) -> Markdown:
    """What is shown where a value is missing; it says why."""
    return Markdown(f"*{text(value)}*")


def _fence(text: str, least: int) -> str:
    """More backticks than any run of them in a text."""
    longest = max(map(len, re.findall("`+", text)), default=0)
    return "`" * max(least, longest + 1)


def code(value: object, in_table: bool = True) -> Markdown:
    """Text to be shown letter for letter."""
    plain = str(value).replace("\n", " ")
    fence = _fence(plain, 1)
    ends_in_a_tick = plain.startswith(("`", " ")) or plain.endswith(("`", " "))
    pad = " " if ends_in_a_tick else ""
    if in_table:  # In GitHub's tables a bar ends a cell, also in code, unless escaped.
        plain = plain.replace("|", "\\|")
    return Markdown(f"{fence}{pad}{plain}{pad}{fence}")


def block(lines: list[str]) -> Markdown:
    """Lines to be shown letter for letter."""
    fence = _fence("\n".join(lines), 3)
    fenced = [fence, *lines, fence]
    return Markdown("\n".join(fenced))


def table(frame: pandas.DataFrame) -> Markdown:
    """A table; columns of numbers are aligned to the right.

    Raises:
        ValueError: a cell is empty.
    """
    cells = frame.map(text)
    if (cells == "").any(axis=None):
        raise ValueError(f"a table of the report has a hole: {frame.to_dict('records')}")
    cells.columns = [text(name) for name in frame.columns]

    sides = ["left"]
    for number in range(1, cells.shape[1]):
        there = [cell for cell in cells.iloc[:, number] if not cell.startswith("*")]
        are_numbers = there and all(_NUMBER.fullmatch(cell) for cell in there)
        sides.append("right" if are_numbers else "left")
    pipes = {"tablefmt": "pipe", "colalign": sides, "disable_numparse": True}
    return Markdown(cells.to_markdown(index=False, **pipes))


def template(name: str) -> jinja2.Template:
    """A template of this folder.

    What it inserts is shown as it is, unless it is :class:`Markdown`.
    """
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        finalize=text,
    )
    environment.filters["code"] = lambda value: code(value, in_table=False)
    environment.globals |= {"table": table, "block": block}
    return environment.get_template(name)
