"""The sentences of WMT's test sets: sgml_segments.py SOURCE TEXT REFERENCE TEXT.

SOURCE and REFERENCE are in WMT's SGML of before 2021, which is no valid SGML (bare & and <), with each sentence as
``<seg id="N">...</seg>`` on one line. The sentences go to the TEXTs, one a line, without the blanks around them and
otherwise as they are; entities stay, as they do in sacrebleu's version of the test sets. Both files must have the same
sentences, by document and number.
"""

import re
from collections.abc import Iterator
from pathlib import Path

from conventions import ArgumentParser, UserError
from text_files import step, whole_file

DOCUMENT = re.compile(r'<doc\b[^>]*?\bdocid="([^"]*)"', re.IGNORECASE)
SEGMENT = re.compile(r'<seg\s+id="?(\d+)"?\s*>(.*?)</seg>', re.IGNORECASE)
OPENING = re.compile(r"<seg\b", re.IGNORECASE)


def segments(path: Path) -> Iterator[tuple[tuple[str, int], str]]:
    """((document, number), sentence) in the order of the file."""
    document = ""
    try:
        lines = path.read_bytes().decode("utf-8").split("\n")
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 (byte {error.start}); get it again") from None
    for number, line in enumerate(lines, start=1):
        if match := DOCUMENT.search(line):
            document = match[1]
        found = SEGMENT.findall(line)
        if len(found) != len(OPENING.findall(line)):
            raise UserError(f'{path}: line {number} is not of the form <seg id="N">...</seg>')
        for position, text in found:
            yield (document, int(position)), text.replace("\r", " ").strip(" \t\f\v")


def main(argv: list[str] | None) -> None:
    parser = ArgumentParser(prog="sgml_segments.py", description=__doc__)
    parser.add_argument("files", type=Path, nargs=4)
    args = parser.parse_args(argv)
    source, source_text, reference, reference_text = args.files
    sides = [list(segments(path)) for path in (source, reference)]
    for path, side in zip((source, reference), sides, strict=True):
        if not side:
            raise UserError(f"{path} has no <seg>: is it a test set of WMT?")
    for (place, _), (other, _) in zip(*sides, strict=False):
        if place != other:
            raise UserError(
                f"{source} has sentence {place[1]} of {place[0]} where {reference.name} has {other[1]} of {other[0]}"
            )
    if len(sides[0]) != len(sides[1]):
        raise UserError(f"{source} has {len(sides[0])} sentences and {reference.name} {len(sides[1])}")
    for side, output in zip(sides, (source_text, reference_text), strict=True):
        with whole_file(output) as file:
            for _, text in side:
                file.write(f"{text}\n".encode())


step("sgml_segments.py", main)
