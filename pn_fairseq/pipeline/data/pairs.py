"""Sentences: reading them from published files, and the rule that removes sentence pairs."""

from __future__ import annotations

import gzip
import lzma
import re
from collections.abc import Callable, Iterator
from pathlib import Path

from pn_fairseq.common.command import UserError, say
from pn_fairseq.common.files import not_utf8
from pn_fairseq.pipeline.data.archives import DAMAGE

#: Most characters of a token, as in Moses' clean-corpus-n.perl.
LONGEST_TOKEN = 1000
BOM = "\ufeff"
#: Most files that a message names.
SHOWN = 12

#: A published file -> its sentences.
Reader = Callable[[Path], Iterator[str]]


#: Ending of a compressed file -> its first bytes, and the function that opens it.
COMPRESSED = {".gz": (b"\x1f\x8b", gzip.open), ".xz": (b"\xfd7zXZ", lzma.open)}


def existing(path: Path) -> Path:
    """FILE, FILE.gz or FILE.xz, the first that exists."""
    names = [path, *(path.with_name(path.name + ending) for ending in COMPRESSED)]
    files = [name for name in names if name.exists()]
    if not files:
        beside = sorted(other.name for other in path.parent.glob(f"{path.stem}.*"))
        if not beside:
            beside = sorted(other.name for other in path.parent.glob("*") if other.is_file())
        others = f"; there are {', '.join(beside[:SHOWN])}" if beside else ""
        if len(beside) > SHOWN:
            others += f" and {len(beside) - SHOWN} more"
        kinds = ", ".join(COMPRESSED)
        raise UserError(f"there is no {path}, plain or compressed ({kinds}){others}")
    if len(files) > 1:
        say(
            "prepare",
            f"note: {files[0]} is used, and not {', '.join(file.name for file in files[1:])} "
            "beside it",
        )
    return files[0]


def lines(path: Path, errors: str = "strict") -> Iterator[str]:
    """The lines of a UTF-8 file, plain or compressed, with their ends; only line feeds end them."""
    path, number = existing(path), 0
    with path.open("rb") as file:
        head = file.read(8)
    unpack = next((unpack for magic, unpack in COMPRESSED.values() if head.startswith(magic)), open)
    try:
        with unpack(path, "rb") as file:
            for line in file:
                number += 1
                yield line.decode("utf-8", errors)
    except UnicodeDecodeError as error:
        raise UserError(not_utf8(path, number, error)) from None
    except DAMAGE:
        raise UserError(f"{path} is damaged or cut off; get it again") from None


def as_bytes(path: Path) -> Iterator[str]:
    """Lines of any bytes: bytes that are not UTF-8 become surrogates, which :func:`append` writes
    as the same bytes.
    """
    return lines(path, "surrogateescape")


def as_is(path: Path) -> Iterator[str]:
    """Text with one sentence per line, unchanged, without a byte order mark.

    A carriage return in the middle of a line is refused, because some tools treat it as the end of
    the line.
    """
    for number, line in enumerate(lines(path), 1):
        if number == 1 and line.startswith(BOM):
            say("prepare", f"note: {path} begins with a byte order mark, which is left out")
            line = line.removeprefix(BOM)
        if "\r" in line.removesuffix("\n").removesuffix("\r"):
            what = "has a carriage return in the middle, which tools take for the end of a line"
            raise UserError(f"{path}: line {number} {what}")
        yield line


def without_carriage_returns(path: Path) -> Iterator[str]:
    """Text without carriage returns, which normalize-punctuation.perl deletes."""
    return (line.replace("\r", "") for line in lines(path))


def tokens(path: Path) -> Iterator[str]:
    """Text that is already tokenized, with one blank between the tokens."""
    # split at all Unicode white space, as fairseq does
    return (" ".join(line.split()) for line in lines(path))


def own_tokens(path: Path) -> Iterator[str]:
    """The same for a user's text, as :func:`as_is` reads it."""
    return (" ".join(line.split()) for line in as_is(path))


def lower_cased_tokens(path: Path) -> Iterator[str]:
    """The same; upper case is refused."""
    for number, line in enumerate(own_tokens(path), 1):
        if line != line.lower():
            raise UserError(
                f"{path}: line {number} has upper case: lower-case the text, or keep it "
                "(--keep-case)"
            )
        yield line


def strip_tags(path: Path) -> Iterator[str]:
    """The sentences of IWSLT's train.tags.*, as in fairseq's recipe.

    Lines with <url>, <talkid> or <keywords> are dropped; titles and descriptions lose their tags
    and keep their text. Entities such as &amp; stay as they are. White space at the ends is
    removed, and a carriage return becomes a blank.
    """
    for line in lines(path):
        if not any(tag in line for tag in ("<url>", "<talkid>", "<keywords>")):
            yield re.sub(r"</?(?:title|description)>", "", line).strip().replace("\r", " ")


def segments(path: Path, blanks: str | None = None) -> Iterator[str]:
    """The sentences of IWSLT's and WMT's test sets: the text of ``<seg id="N">...</seg>``. Entities
    stay as they are.

    Args:
        blanks: what is removed at both ends of a sentence (None: all white space). A carriage
            return becomes a blank.
    """
    for number, line in enumerate(lines(path), 1):
        if "<seg" in line:
            segment = re.search(r'<seg id="\d+">(.*)</seg>', line)
            if not segment:
                raise UserError(f'{path}: line {number} is not of the form <seg id="N">...</seg>')
            yield segment[1].strip(blanks).replace("\r", " ")


def append(reader: Reader, path: Path, output: Path) -> int:
    """Append the sentences of a published file to a file of text, one a line, and return their
    number.
    """
    count = empty = escaped = 0
    output.parent.mkdir(parents=True, exist_ok=True)
    with output.open("ab") as file:
        for line in reader(path):
            sentence = line.removesuffix("\n")
            count, empty = count + 1, empty + (not sentence.strip())
            escaped += reader is as_is and ("&apos;" in sentence or "&quot;" in sentence)
            file.write(f"{sentence}\n".encode(errors="surrogateescape"))
    if not count:
        raise UserError(f"{path} is empty, or no text that can be read here")
    if escaped:
        what = (
            "Moses' entities, such as &apos;: text that is tokenized already is taken as it is by "
            "--tokenized"
        )
        say("prepare", f"note: {escaped} of the {count} lines of {path} have {what}")
    if empty:
        say("prepare", f"note: {empty} of the {count} lines of {path} are empty")
    return count


def objection(
    source: list[str], target: list[str], least: float, most: float, ratio: float
) -> str | None:
    """Why a pair of sentences, as tokens, is removed; None if it is kept.

    The rule of Moses' clean-corpus-n.perl: each side must contain ``least`` to ``most`` tokens
    between white space, and at least one; neither may contain more than ``ratio`` times the tokens
    of the other; no token may be longer than 1000 characters.
    """
    lengths = len(source), len(target)
    if 0 in lengths:
        return "empty"
    if max(lengths) > most:
        return "too long"
    if min(lengths) < least:
        return "too short"
    if max(lengths) / min(lengths) > ratio:
        return "ratio"
    if any(len(token) > LONGEST_TOKEN for side in (source, target) for token in side):
        return "long token"
    return None
