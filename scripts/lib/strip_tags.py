"""Take the text out of the files of IWSLT, as the recipes of fairseq do: one sentence a line.

strip_tags.py train INPUT OUTPUT
    A file train.tags.*: without the lines that have <url>, <talkid> or <keywords>, and without the tags of titles and
    descriptions, whose text stays.
strip_tags.py segments OUTPUT INPUT [INPUT ...]
    The lines `<seg id="N"> text </seg>` of XML test sets, one set after the other.

Entities such as &amp; stay as they are, as they do there. White space at the ends of a line goes, and a carriage return
within one becomes a space, which is what it is to the tokenizer.
"""

import re
from collections.abc import Iterator
from pathlib import Path

from conventions import ArgumentParser, UserError
from text_files import step, whole_file

DROPPED = ("<url>", "<talkid>", "<keywords>")
REMOVED = re.compile(r"</?(?:title|description)>")
SEGMENT = "<seg id"
SEGMENT_TAGS = re.compile(r'<seg id="[0-9]*">\s*|\s*</seg>\s*')


def text_lines(path: Path) -> Iterator[str]:
    """The lines of a file, which end at line feeds only."""
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            try:
                yield line.decode("utf-8").removesuffix("\n")
            except UnicodeDecodeError as error:
                raise UserError(f"{path}: line {number} is not UTF-8 ({error.reason})") from error


def training_text(path: Path) -> Iterator[str]:
    """The sentences of a file train.tags.*."""
    for line in text_lines(path):
        if not any(tag in line for tag in DROPPED):
            yield REMOVED.sub("", line)


def segments(path: Path) -> Iterator[str]:
    """The sentences of a test set."""
    found = False
    for line in text_lines(path):
        if SEGMENT in line:
            found = True
            yield SEGMENT_TAGS.sub("", line)
    if not found:
        raise UserError(f"{path} has no line with '{SEGMENT}': it is no test set in XML")


def main(argv: list[str] | None) -> None:
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("kind", choices=("train", "segments"))
    parser.add_argument("files", nargs="+", type=Path)
    args = parser.parse_args(argv)
    if args.kind == "train":
        source, output = args.files
        sentences = training_text(source)
    else:
        output, *sources = args.files
        sentences = (sentence for source in sources for sentence in segments(source))
    with whole_file(output) as file:
        for sentence in sentences:
            file.write(f"{sentence.strip().replace(chr(13), ' ')}\n".encode())


step("strip_tags.py", main)
