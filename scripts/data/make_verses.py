#!/usr/bin/env python3
"""Make the Spanish-English verses corpus, data/verses.es-en, from two public-domain texts packaged by Debian.

The Spanish is the Reina-Valera of 1909 (package ``sword-text-sparv``), the English comes from the modern public-domain
text of package ``sword-text-web``; ``mod2imp`` of package ``libsword-utils`` prints both with their markup. Markup is
removed, the texts are joined verse by verse, and what does not correspond is dropped (README.md of the corpus). Only
the standard library is used, and the same input gives the same bytes on every machine.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import io
import re
import subprocess
import sys
import unicodedata
import xml.etree.ElementTree as ET
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

ES_MODULE, EN_MODULE = "spaRV1909eb", "engWEB2015eb"
PACKAGES = ("libsword-utils", "sword-text-web", "sword-text-sparv")
CORPUS = Path(__file__).resolve().parents[2] / "data/verses.es-en"
#: Places where the same reference names different words in the two texts: book, first and last verse, why. Found with a
#: word translation model, then read.
MISALIGNED = Path(__file__).with_name("misaligned.tsv")
HELD_OUT = {"valid": 1000, "test": 1000}
SEED = 1
MAX_WORDS = 60
MAX_RATIO = 2


class Ref(NamedTuple):
    """The reference of one verse, as the modules spell it."""

    book: str
    chapter: int
    verse: int

    def __str__(self) -> str:
        return f"{self.book} {self.chapter}:{self.verse}"


class Pair(NamedTuple):
    """One verse in both languages."""

    ref: Ref
    es: str
    en: str


def read_module(module: str, dump: Path | None) -> str:
    """What ``mod2imp MODULE`` prints, or has printed to the file ``dump``."""
    command = ["mod2imp", module]
    data = dump.read_bytes() if dump else subprocess.run(command, capture_output=True, check=True).stdout
    if b"$$$" not in data:
        raise ValueError(f"{dump or module} has no verses")
    return data.decode("utf-8")


# --- markup ---

DROPPED = {"note", "rdg", "reference", "catchWord", "speaker"}
BLOCKS = {"div", "l", "lg", "lb", "title", "chapter", "speaker"}
# These start in one verse and end in another, which makes a single verse ill-formed; they hold no text of theirs.
ACROSS_VERSES = re.compile(r"</?(?:list|item)\b[^>]*>")
# Private characters that stand for a removed element until the text around it is known.
NOTE, ADDED, ADDED_END = "\ue000", "\ue001", "\ue002"
CLITICS = {"me", "te", "se", "nos", "os", "lo", "la", "le", "los", "las", "les"}


def _text(element: ET.Element) -> str:
    tag, text = element.tag, ""
    # The heading of a psalm ("A Psalm by David") belongs to its first verse, and the Spanish has it there as plain
    # text; every other title was added by an editor.
    if tag not in DROPPED and (tag != "title" or element.get("canonical") == "true"):
        text = (element.text or "") + "".join(_text(child) + (child.tail or "") for child in element)
        if tag == "title" and text.strip() and text.rstrip()[-1].isalnum():
            text = text.rstrip() + "."  # so that the heading does not run into the verse
        if tag == "transChange":
            text = ADDED + text + ADDED_END
    if tag == "note":
        text = NOTE + text
    return f" {text} " if tag in BLOCKS else text


def _place_note(match: re.Match[str]) -> str:
    """What a removed footnote leaves behind; the modules often write ``word<note/>word``."""
    text = match.string
    left, right = text[: match.start()][-1:], text[match.end() :][:1]
    if match["before"] or match["after"]:
        return " "
    return "" if not left or not right or right in ",.;:!?)]”’—-" or left in "([“‘—-¿¡" else " "


def strip_markup(markup: str) -> tuple[str, bool]:
    """The plain text of one verse of OSIS, and whether its words are in doubt.

    They are in doubt when the Spanish marks a pronoun as added by the translators with no space on either side: it may
    end the verb before it (*haced* + *lo*) or be a word (*gentes* + *lo* + *oyeron*).
    """
    text = _text(ET.fromstring(f"<verse>{ACROSS_VERSES.sub(' ', markup)}</verse>"))
    doubtful = False

    def place_added(match: re.Match[str]) -> str:
        nonlocal doubtful
        words, (start, end) = match[1], match.span()
        left = text[:start][-1:].isalpha() and words[:1].isalpha()
        right = text[end:][:1].isalpha() and words[-1:].isalpha()
        if left and words.split() and words.split()[0].lower() in CLITICS:
            doubtful = doubtful or right or len(words.split()) > 1
            left = False  # "sáca" + "lo" is one word
        return " " * left + words + " " * right

    text = re.sub(f"{ADDED}([^{ADDED_END}]*){ADDED_END}", place_added, text)
    text = re.sub(f"(?P<before>\\s*){NOTE}(?P<after>\\s*)", _place_note, text)
    text = unicodedata.normalize("NFC", " ".join(text.split()))
    # A line of verse that ends in a dash would leave a space where the prose has none.
    text = re.sub(r"(?<=\w)— (?=[\w“‘])", "—", text)
    return re.sub(r" +([,.;:!?)”])", r"\1", text), doubtful


# --- letters ---

WORD = re.compile(r"[^\W\d_]+")


def usual_forms(texts: Iterable[str]) -> dict[str, str]:
    """Each word in small letters -> the form in which it mostly occurs inside a sentence."""
    counts: dict[str, Counter[str]] = {}
    for text in texts:
        for match in WORD.finditer(text):
            word = match[0]
            # A word is inside a sentence when another word, at most a comma between, is before it.
            if (word.islower() or word.istitle()) and re.search(r"[^\W\d_][,;]? $", text[: match.start()][-3:]):
                counts.setdefault(word.lower(), Counter())[word] += 1
    return {lower: forms.most_common(1)[0][0] for lower, forms in counts.items()}


def lower_initials(text: str, forms: dict[str, str]) -> str:
    """Undo the capitals that open a chapter (*EN el principio*, *Y FUÉ*): they are typography, not spelling."""

    def replace(match: re.Match[str]) -> str:
        word = match[0]
        if len(word) < 2 or not word.isupper():
            return word
        opens = re.search(r"(^|[.!?:])[\s(¡¿“‘]*$", text[: match.start()]) is not None
        form = forms.get(word.lower())
        if form is None:
            # A word seen nowhere else; one that is a sentence of its own is a heading, such as ALEPH.
            return word.capitalize() if opens and not text.startswith(".", match.end()) else word
        return form[:1].upper() + form[1:] if opens else form

    return WORD.sub(replace, text)


# --- choosing ---


def duplicate_key(text: str) -> str:
    """What two texts share when they count as the same: their letters and digits, in small letters."""
    return " ".join(re.findall(r"[^\W_]+", text.casefold()))


def misaligned() -> set[tuple[str, tuple[int, int], tuple[int, int]]]:
    """The table of places to drop: (book, first, last), each a chapter and a verse."""

    def place(text: str) -> tuple[int, int]:
        chapter, verse = text.split(":")
        return int(chapter), 10**6 if verse == "end" else int(verse)

    rows = [line.split("\t") for line in MISALIGNED.read_text("utf-8").splitlines()[1:]]
    return {(book, place(first), place(last)) for book, first, last, _ in rows}


def join(es_dump: str, en_dump: str) -> tuple[list[Pair], set[Ref]]:
    """The verses that both texts have, in order, and those among them whose words are in doubt."""
    doubtful: set[Ref] = set()
    sides: list[dict[Ref, str]] = [{}, {}]
    for dump, side in zip((es_dump, en_dump), sides, strict=True):
        parts = re.split(r"^\$\$\$(.*)\n", dump, flags=re.MULTILINE)
        for name, markup in zip(parts[1::2], parts[2::2], strict=True):
            match = re.fullmatch(r"(.+) (\d+):(\d+)", name.strip())
            if not match or match[3] == "0":  # verse 0 is a heading
                continue
            ref = Ref(match[1], int(match[2]), int(match[3]))
            text, doubt = strip_markup(markup)
            if text:
                side[ref] = text
            if doubt:
                doubtful.add(ref)
    es, en = sides
    forms = usual_forms(es.values())
    texts = {ref: lower_initials(text, forms) if ref.verse == 1 else text for ref, text in es.items()}
    return [Pair(ref, text, en[ref]) for ref, text in texts.items() if ref in en], doubtful


def choose(pairs: Iterable[Pair], doubtful: set[Ref]) -> tuple[list[Pair], Counter[str]]:
    """The pairs to keep, and how many each rule dropped; the first rule that applies counts."""
    table = misaligned()
    seen: set[tuple[str, str]] = set()
    kept, dropped = [], Counter()
    for pair in pairs:
        here = pair.ref.chapter, pair.ref.verse
        shorter, longer = sorted((len(pair.es.split()), len(pair.en.split())))
        keys = {("es", duplicate_key(pair.es)), ("en", duplicate_key(pair.en))}
        if any(pair.ref.book == book and first <= here <= last for book, first, last in table):
            dropped["numbered or divided differently (table)"] += 1
        elif pair.ref in doubtful:
            dropped["added pronoun with no space around it"] += 1
        elif longer > MAX_WORDS:
            dropped[f"over {MAX_WORDS} words on a side"] += 1
        elif longer > MAX_RATIO * shorter:
            dropped[f"lengths over 1:{MAX_RATIO}"] += 1
        elif keys & seen:
            dropped["text already seen on either side"] += 1
        else:
            seen |= keys
            kept.append(pair)
    return kept, dropped


def split(pairs: list[Pair]) -> dict[str, list[Pair]]:
    """The pairs of each split, by a hash of the seed and the reference; each split keeps the order."""
    ranked = sorted((pair.ref for pair in pairs), key=lambda ref: hashlib.sha256(f"{SEED} {ref}".encode()).digest())
    if len(ranked) <= sum(HELD_OUT.values()):
        raise ValueError(f"only {len(ranked)} verses are left: too few to split")
    owner = dict(zip(ranked, (name for name, size in HELD_OUT.items() for _ in range(size)), strict=False))
    return {name: [p for p in pairs if owner.get(p.ref, "train") == name] for name in ("train", *HELD_OUT)}


def write(splits: dict[str, list[Pair]], out: Path) -> None:
    """Write SPLIT.{es,en,refs}.gz, and their checksums packed (SHA256SUMS) and unpacked (SHA256SUMS.text)."""
    texts, packed = {}, {}
    for name, pairs in splits.items():
        for column, lines in (
            ("es", [p.es for p in pairs]),
            ("en", [p.en for p in pairs]),
            ("refs", [p.ref for p in pairs]),
        ):
            text = "".join(f"{line}\n" for line in lines).encode()
            buffer = io.BytesIO()
            # No time and no name, so that equal texts give equal files.
            with gzip.GzipFile(filename="", fileobj=buffer, mode="wb", compresslevel=9, mtime=0) as stream:
                stream.write(text)
            texts[f"{name}.{column}"], packed[f"{name}.{column}.gz"] = text, buffer.getvalue()
    out.mkdir(parents=True, exist_ok=True)
    for name, data in packed.items():
        (out / name).write_bytes(data)
    for name, files in (("SHA256SUMS", packed), ("SHA256SUMS.text", texts)):
        sums = [f"{hashlib.sha256(data).hexdigest()}  {file}\n" for file, data in sorted(files.items())]
        (out / name).write_text("".join(sums), encoding="ascii")


def main(argv: list[str] | None = None) -> int:
    """Make the corpus and print what was dropped; 0, or 2 for a mistake in its use."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, metavar="DIR", default=CORPUS, help="default: data/verses.es-en")
    for option, module in (("--rv-imp", ES_MODULE), ("--web-imp", EN_MODULE)):
        parser.add_argument(option, type=Path, metavar="FILE", help=f"saved output of 'mod2imp {module}'")
    args = parser.parse_args(argv)
    try:
        pairs, doubtful = join(read_module(ES_MODULE, args.rv_imp), read_module(EN_MODULE, args.web_imp))
        kept, dropped = choose(pairs, doubtful)
        splits = split(kept)
        write(splits, args.out)
    except (OSError, ValueError, subprocess.CalledProcessError, ET.ParseError) as error:
        print(f"make_verses.py: error: {error} (Debian packages: {', '.join(PACKAGES)})", file=sys.stderr)
        return 2
    rows = [("verses in both texts", len(pairs)), *((f"- {rule}", -count) for rule, count in dropped.items())]
    for label, count in [*rows, ("kept", len(kept)), *((f"  {name}", len(part)) for name, part in splits.items())]:
        print(f"{label:<44}{count:>8}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
