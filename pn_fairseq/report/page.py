"""A small document, and its two renderings: Markdown (GitHub's) and one HTML file that needs nothing else."""

from __future__ import annotations

import base64
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from urllib.parse import quote


@dataclass(frozen=True)
class Code:
    """Text to be shown letter for letter."""

    text: str


@dataclass(frozen=True)
class Missing:
    """What stands where a value is not there; it says why."""

    text: str


@dataclass(frozen=True)
class Strong:
    """Emphasised text."""

    text: str


Part = str | Code | Missing | Strong
#: A run of text: one part or several.
Inline = Part | Sequence[Part]


@dataclass(frozen=True)
class Heading:
    level: int
    text: Inline


@dataclass(frozen=True)
class Paragraph:
    text: Inline


@dataclass(frozen=True)
class Bullets:
    items: Sequence[Inline]


@dataclass(frozen=True)
class Block:
    """Lines to be shown letter for letter."""

    text: str


@dataclass(frozen=True)
class Table:
    """Rows of cells under a header; the first column names the row. ``numbers`` are columns aligned to the right."""

    header: Sequence[Inline]
    rows: Sequence[Sequence[Inline]]
    numbers: frozenset[int] = field(default_factory=frozenset)

    def __post_init__(self):
        for row in self.rows:
            if len(row) != len(self.header) or any(cell == "" for cell in row):
                raise ValueError(f"a row of a report's table has a hole: {row}")


@dataclass(frozen=True)
class Picture:
    """A picture in the folder of the pages; ``alt`` says in words what it shows."""

    file: str
    alt: str


Element = Heading | Paragraph | Bullets | Block | Table | Picture


def _parts(inline: Inline) -> Sequence[Part]:
    return [inline] if isinstance(inline, Code | Missing | Strong | str) else inline


# Markdown ------------------------------------------------------------------------------------------------------------

_MARKDOWN_SPECIAL = re.compile(r"([\\`*\[\]|~$])|(?<![0-9A-Za-z])_|_(?![0-9A-Za-z])")


def _md_text(text: str) -> str:
    text = " ".join(text.split()).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return _MARKDOWN_SPECIAL.sub(lambda match: f"\\{match[0]}", text)


def _md_code(text: str, in_table: bool) -> str:
    text = text.replace("\n", " ")
    fence = "`" * (max((len(run) for run in re.findall("`+", text)), default=0) + 1)
    pad = " " if text.startswith(("`", " ")) or text.endswith(("`", " ")) else ""
    # GitHub takes a bar for the end of a cell in code, too, unless a backslash stands before it.
    text = text.replace("|", "\\|") if in_table else text
    return f"{fence}{pad}{text}{pad}{fence}"


def _md_marked(mark: str, text: str) -> str:
    # Markdown knows no emphasis with a space at its edge, and the spaces at the seams between two parts are meant.
    words = text.strip()
    if not words:
        return text
    lead, tail = text[: len(text) - len(text.lstrip())], text[len(text.rstrip()) :]
    return f"{lead}{mark}{_md_text(words)}{mark}{tail}"


def _md(inline: Inline, in_table: bool = False) -> str:
    pieces = []
    for part in _parts(inline):
        match part:
            case Code(text):
                pieces.append(_md_code(text, in_table))
            case Missing(text):
                pieces.append(_md_marked("*", text))
            case Strong(text):
                pieces.append(_md_marked("**", text))
            case _:
                pieces.append(_md_marked("", part))
    return "".join(pieces)


def markdown(elements: Sequence[Element]) -> str:
    """The document in GitHub's Markdown."""
    blocks = []
    for element in elements:
        match element:
            case Heading(level, text):
                blocks.append(f"{'#' * level} {_md(text)}")
            case Paragraph(text):
                blocks.append(_md(text))
            case Bullets(items):
                blocks.append("\n".join(f"- {_md(item)}" for item in items))
            case Block(text):
                fence = "`" * max(3, max((len(run) for run in re.findall("`+", text)), default=0) + 1)
                blocks.append(f"{fence}\n{text}\n{fence}")
            case Table(header, rows, numbers):
                lines = [header, *rows]
                cells = ["| " + " | ".join(_md(cell, in_table=True) for cell in line) + " |" for line in lines]
                rule = "|" + "|".join("---:" if index in numbers else "---" for index in range(len(header))) + "|"
                blocks.append("\n".join([cells[0], rule, *cells[1:]]))
            case Picture(file, alt):
                blocks.append(f"![{_md_text(alt)}]({quote(file)})")
    return "\n\n".join(blocks) + "\n"


# HTML ----------------------------------------------------------------------------------------------------------------

_STYLE = """\
:root { color-scheme: light; }
body { font: 16px/1.5 "Liberation Sans", Arial, Helvetica, sans-serif; color: #111; background: #fff;
  max-width: 70rem; margin: 2rem auto; padding: 0 1rem; }
h1, h2, h3 { line-height: 1.2; }
h2 { margin-top: 2.5rem; border-bottom: 2px solid #111; }
h3 { margin-top: 1.8rem; }
.table { overflow-x: auto; }
table { border-collapse: collapse; margin: 1rem 0; font-size: 0.875rem; }
th, td { border-bottom: 1px solid #999; padding: 0.3rem 0.6rem; text-align: left; vertical-align: top; }
thead th { border-bottom: 2px solid #111; vertical-align: bottom; }
.number { text-align: right; font-variant-numeric: tabular-nums; }
td.number { white-space: nowrap; }
.missing { font-style: italic; color: #444; }
code, pre { font: 0.9em/1.4 "Liberation Mono", Consolas, monospace; overflow-wrap: break-word; }
pre { background: #f4f4f4; border: 1px solid #ccc; padding: 0.6rem; white-space: pre-wrap; }
img { max-width: 100%; height: auto; }
@media print {
  @page { size: A4 landscape; margin: 12mm; }
  body { font-size: 10pt; max-width: none; margin: 0; padding: 0; }
  .table { overflow: visible; }
  table { font-size: 8pt; break-inside: avoid; }
  th, td { padding: 0.2rem 0.4rem; }
  thead { display: table-header-group; }
  tr, img, pre { break-inside: avoid; }
  img { max-height: 110mm; }
  h2, h3 { break-after: avoid; }
}"""


def _html(inline: Inline) -> str:
    pieces = []
    for part in _parts(inline):
        match part:
            case Code(text):
                pieces.append(f"<code>{escape(text)}</code>")
            case Missing(text):
                pieces.append(f'<span class="missing">{escape(text)}</span>')
            case Strong(text):
                pieces.append(f"<strong>{escape(text)}</strong>")
            case _:
                pieces.append(escape(part))
    return "".join(pieces)


def _html_table(table: Table) -> str:
    def row(cells: Sequence[Inline], head: bool) -> str:
        made = []
        for index, cell in enumerate(cells):
            scope = ' scope="col"' if head else ' scope="row"' if index == 0 else ""
            tag = "th" if scope else "td"
            kind = ' class="number"' if index in table.numbers else ""
            made.append(f"<{tag}{scope}{kind}>{_html(cell)}</{tag}>")
        return f"<tr>{''.join(made)}</tr>"

    body = "\n".join(row(cells, False) for cells in table.rows)
    return (
        f'<div class="table"><table>\n<thead>{row(table.header, True)}</thead>\n'
        f"<tbody>\n{body}\n</tbody>\n</table></div>"
    )


def html(elements: Sequence[Element], pictures: dict[str, Path]) -> str:
    """The document as one HTML file: the pictures are in it, nothing is fetched, no script is run.

    Args:
        elements: the document; its first heading is the title.
        pictures: name of each :class:`Picture` -> the PNG file to embed.
    """
    title = next(element.text for element in elements if isinstance(element, Heading))
    blocks = []
    for element in elements:
        match element:
            case Heading(level, text):
                blocks.append(f"<h{level}>{_html(text)}</h{level}>")
            case Paragraph(text):
                blocks.append(f"<p>{_html(text)}</p>")
            case Bullets(items):
                blocks.append("<ul>\n" + "\n".join(f"<li>{_html(item)}</li>" for item in items) + "\n</ul>")
            case Block(text):
                blocks.append(f"<pre>{escape(text)}</pre>")
            case Table():
                blocks.append(_html_table(element))
            case Picture(file, alt):
                data = base64.b64encode(pictures[file].read_bytes()).decode("ascii")
                blocks.append(f'<p><img alt="{escape(alt)}" src="data:image/png;base64,{data}"></p>')
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{re.sub('<[^>]+>', '', _html(title))}</title>\n<style>\n{_STYLE}\n</style>\n</head>\n<body>\n"
        + "\n".join(blocks)
        + "\n</body>\n</html>\n"
    )
