"""Text as GitHub's Markdown."""

from __future__ import annotations

import re
from html import escape
from pathlib import Path

import jinja2
import pandas

# Tables hold Markdown objects. If pyarrow is installed, pandas would store strings in pyarrow's
# format, which loses their class.
pandas.set_option("mode.string_storage", "python")

_SPECIAL = re.compile(r"([\\`*\[\]|~$])|(?<![0-9A-Za-z])_|_(?![0-9A-Za-z])")
_NUMBER = re.compile(r"[+−]?\d[\d,.]*( .*)?")


class Markdown(str):
    """Text that is already Markdown."""


def text(value: object) -> Markdown:
    """A value, escaped so that it is shown verbatim on one line."""
    if isinstance(value, Markdown):
        return value
    plain = escape(" ".join(str(value).split()), quote=False)
    return Markdown(_SPECIAL.sub(r"\\\g<0>", plain))


def missing(value: str) -> Markdown:
    """The text for a missing value, which says why it is missing."""
    return Markdown(f"*{text(value)}*")


def _fence(text: str, least: int) -> str:
    """More backticks than the longest run of them in a text."""
    longest = max(map(len, re.findall("`+", text)), default=0)
    return "`" * max(least, longest + 1)


def code(value: object, in_table: bool = True) -> Markdown:
    """Text to be shown verbatim."""
    plain = str(value).replace("\n", " ")
    fence = _fence(plain, 1)
    ends_in_a_tick = plain.startswith(("`", " ")) or plain.endswith(("`", " "))
    pad = " " if ends_in_a_tick else ""
    if in_table:  # In GitHub's tables an unescaped bar ends a cell, even in code.
        plain = plain.replace("|", "\\|")
    return Markdown(f"{fence}{pad}{plain}{pad}{fence}")


def block(lines: list[str]) -> Markdown:
    """Lines to be shown verbatim."""
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
    """A template from this folder.

    Inserted values are shown verbatim, unless they are :class:`Markdown`.
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
