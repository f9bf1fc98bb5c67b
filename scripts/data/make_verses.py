#!/usr/bin/env python3
"""Make the Spanish-English verses corpus from two public-domain texts packaged by Debian.

The Spanish is the Reina-Valera of 1909 (package ``sword-text-sparv``), the English comes from the modern
public-domain text of package ``sword-text-web``; ``mod2imp`` of package ``libsword-utils`` prints both with their
markup.  This script strips the markup, joins the two texts verse by verse, drops what does not correspond and writes

    {train,valid,test}.{es,en}.gz   one verse a line, raw text (cased, untokenized), UTF-8, NFC
    {train,valid,test}.refs.gz      the reference of each line
    SHA256SUMS                      of the .gz files
    SHA256SUMS.text                 of what is inside them

Only the standard library is used, and the same input gives the same bytes on every machine.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import io
import os
import re
import shutil
import subprocess
import sys
import unicodedata
import xml.etree.ElementTree as ET
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

EN_MODULE = "engWEB2015eb"
ES_MODULE = "spaRV1909eb"
PACKAGES = {"mod2imp": "libsword-utils", EN_MODULE: "sword-text-web", ES_MODULE: "sword-text-sparv"}

SPLITS = ("train", "valid", "test")
LANGUAGES = ("es", "en")
HELD_OUT = {"valid": 1000, "test": 1000}
SEED = 1
MAX_WORDS = 60
MAX_RATIO = 2

EVERYTHING = 10**6  # "to the end of the chapter" in the table below

# Places where the two texts number or divide their verses differently, so that the same reference names different
# words: (book, first chapter, first verse, last chapter, last verse), all inclusive, and why.
MISALIGNED: tuple[tuple[str, int, int, int, int, str], ...] = (
    # Renumbered: the same verses under other numbers.
    ("Numbers", 12, 16, 13, EVERYTHING, "Spanish 13:1 is English 12:16"),
    ("Numbers", 29, 40, 30, EVERYTHING, "Spanish 30:1 is English 29:40"),
    ("I Samuel", 23, 29, 24, EVERYTHING, "Spanish 24:1 is English 23:29"),
    ("I Kings", 22, 43, 22, EVERYTHING, "Spanish 22:44 is the second half of English 22:43"),
    ("I Chronicles", 21, 14, 21, EVERYTHING, "the English is one number behind from here"),
    ("II Chronicles", 33, 1, 33, EVERYTHING, "the English is one number ahead"),
    ("Job", 38, 1, 41, EVERYTHING, "the Spanish starts its chapters 39 to 41 at other verses"),
    ("Hosea", 11, 12, 12, EVERYTHING, "Spanish 12:1 is English 11:12"),
    ("Jonah", 1, 17, 2, EVERYTHING, "Spanish 2:1 is English 1:17"),
    ("Matthew", 23, 13, 23, 14, "the two verses are in the other order"),
    # Divided at other words: part of a verse is in the verse beside it.
    ("Exodus", 1, 8, 1, 9, "'he said to his people' is on the other side"),
    ("Joshua", 2, 8, 2, 9, "'she said to the men' is on the other side"),
    ("Judges", 6, 29, 6, 30, "'the men of the city said to Joash' is on the other side"),
    ("Judges", 11, 39, 11, 40, "'it became a custom in Israel' is on the other side"),
    ("Judges", 14, 18, 14, 20, "English 14:19 is in Spanish 14:20"),
    ("I Samuel", 10, 25, 10, 26, "'Samuel sent all the people away' is on the other side"),
    ("I Samuel", 15, 24, 15, 25, "'please pardon my sin' is on the other side"),
    ("I Samuel", 17, 55, 17, 56, "Abner's answer is on the other side"),
    ("I Samuel", 28, 12, 28, 13, "the woman's question is on the other side"),
    ("II Samuel", 2, 31, 2, 32, "the burial of Asahel is on the other side"),
    ("I Kings", 16, 29, 16, 30, "the years of Ahab are on the other side"),
    ("I Kings", 18, 33, 18, 34, "the four jars are on the other side"),
    ("I Kings", 20, 2, 20, 3, "'Ben Hadad says' is on the other side"),
    ("II Kings", 4, 30, 4, 31, "'he arose, and followed her' is on the other side"),
    ("I Chronicles", 1, 30, 1, 32, "the lists of names are divided elsewhere"),
    ("I Chronicles", 21, 4, 21, 5, "'gave the sum of the census' is on the other side"),
    ("II Chronicles", 30, 18, 30, 19, "'who sets his heart to seek God' is on the other side"),
    ("Jeremiah", 51, 21, 51, 22, "the chariot and its rider are on the other side"),
    ("Mark", 6, 27, 6, 28, "the beheading is on the other side"),
    ("Mark", 12, 14, 12, 15, "'shall we give' is on the other side"),
    ("Luke", 7, 18, 7, 19, "'calling two of his disciples' is on the other side"),
    ("Acts", 10, 46, 10, 47, "'then Peter answered' is on the other side"),
    ("Acts", 11, 25, 11, 26, "'he brought him to Antioch' is on the other side"),
    ("Acts", 13, 19, 13, 20, "the four hundred fifty years are on the other side"),
    ("Acts", 19, 40, 19, 41, "Spanish 19:40 holds both verses"),
    ("II Corinthians", 13, 12, 13, EVERYTHING, "Spanish 13:12 holds two verses, and a note on the letter follows"),
    ("Colossians", 1, 21, 1, 22, "'now he has reconciled' is on the other side"),
    ("II Thessalonians", 1, 7, 1, 8, "'in flaming fire' is on the other side"),
    # More on one side: another manuscript tradition, or words that are not of the verse.
    ("Acts", 9, 5, 9, 6, "the Spanish has a longer text"),
    ("Romans", 14, 23, 14, 23, "the English appends here what the Spanish has as 16:25 to 16:27"),
    ("I John", 5, 7, 5, 8, "the Spanish has a longer text"),
    ("Revelation of John", 22, 21, 22, 21, "the glossary of the English module is appended"),
    # The Spanish ends these letters with a note on where they were written ("Escrita de Roma ..."); the English does
    # not.
    ("Romans", 16, 25, 16, EVERYTHING, "note on the letter"),
    ("I Corinthians", 16, 24, 16, EVERYTHING, "note on the letter"),
    ("Galatians", 6, 18, 6, EVERYTHING, "note on the letter"),
    ("Ephesians", 6, 24, 6, EVERYTHING, "note on the letter"),
    ("Philippians", 4, 23, 4, EVERYTHING, "note on the letter"),
    ("Colossians", 4, 18, 4, EVERYTHING, "note on the letter"),
    ("I Thessalonians", 5, 28, 5, EVERYTHING, "note on the letter"),
    ("II Thessalonians", 3, 18, 3, EVERYTHING, "note on the letter"),
    ("I Timothy", 6, 21, 6, EVERYTHING, "note on the letter"),
    ("II Timothy", 4, 22, 4, EVERYTHING, "note on the letter"),
    ("Titus", 3, 15, 3, EVERYTHING, "note on the letter"),
    ("Philemon", 1, 25, 1, EVERYTHING, "note on the letter"),
    ("Hebrews", 13, 25, 13, EVERYTHING, "note on the letter"),
    # Not a matter of numbers: here the Spanish module joins a name and the pronoun after it (Josué + los).
    ("Joshua", 5, 4, 5, 4, "two words are glued in the Spanish"),
)


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


class UserError(Exception):
    """Something the person who runs the script can put right; shown as one line."""


# --- reading -----------------------------------------------------------------------------------------------------


def run_mod2imp(module: str) -> str:
    """Return what ``mod2imp MODULE`` prints, its markup included."""
    packages = "install the Debian packages " + ", ".join(PACKAGES.values())
    program = shutil.which("mod2imp")
    if program is None:
        raise UserError(f"mod2imp was not found: {packages}")
    done = subprocess.run([program, module], capture_output=True, check=False)
    # mod2imp reports an unknown module on its error stream, and not always by its exit status.
    if done.returncode != 0 or b"$$$" not in done.stdout:
        raise UserError(f"mod2imp cannot read the module {module} (of package {PACKAGES[module]}): {packages}")
    return decode(done.stdout, f"the output of mod2imp {module}")


def read_dump(path: Path) -> str:
    """Return the text of a file that holds the output of mod2imp."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from None
    text = decode(data, str(path))
    if "$$$" not in text:
        raise UserError(f"{path} holds no verses: it is not the output of mod2imp")
    return text


def decode(data: bytes, what: str) -> str:
    """Decode UTF-8, and say what was wrong in one line if it is not."""
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        raise UserError(f"{what} is not UTF-8") from None


def parse_imp(text: str) -> Iterator[tuple[Ref, str]]:
    """Yield (reference, markup) for every verse; headings, which are verse 0, are left out."""
    parts = re.split(r"^\$\$\$(.*)\n", text, flags=re.MULTILINE)
    for name, body in zip(parts[1::2], parts[2::2], strict=True):
        match = re.fullmatch(r"(.+) (\d+):(\d+)", name.strip())
        if match and int(match[3]) > 0:
            yield Ref(match[1], int(match[2]), int(match[3])), body


# --- markup ------------------------------------------------------------------------------------------------------

DROPPED = {"note", "rdg", "reference", "catchWord", "speaker"}
BLOCKS = {"div", "l", "lg", "lb", "title", "chapter", "speaker"}
# These start in one verse and end in another, which leaves a verse by itself ill-formed; they hold no text of theirs.
ACROSS_VERSES = re.compile(r"</?(?:list|item)\b[^>]*>")

# Private characters that stand for a removed element until the text around it is known.
NOTE, ADDED, ADDED_END = "\ue000", "\ue001", "\ue002"

CLOSING = re.escape(",.;:!?)]”’—-")
OPENING = re.escape("([“‘—-¿¡")
CLITICS = {"me", "te", "se", "nos", "os", "lo", "la", "le", "los", "las", "les"}


def _text(element: ET.Element, out: list[str]) -> None:
    tag = element.tag
    # The heading of a psalm ("A Psalm by David") belongs to its first verse, and the Spanish has it there as plain
    # text; every other title was added by an editor.
    keep = tag not in DROPPED and (tag != "title" or element.get("canonical") == "true")
    if tag == "note":
        out.append(NOTE)
    elif tag in BLOCKS:
        out.append(" ")
    if keep:
        inner: list[str] = [element.text or ""]
        for child in element:
            _text(child, inner)
            inner.append(child.tail or "")
        text = "".join(inner)
        if tag == "title" and text.strip() and text.rstrip()[-1].isalnum():
            text = text.rstrip() + "."  # so that the heading does not run into the verse
        if tag == "transChange":
            text = ADDED + text + ADDED_END
        out.append(text)
    if tag in BLOCKS:
        out.append(" ")


def _place_note(match: re.Match[str]) -> str:
    """Decide what a removed footnote leaves behind; the modules often write ``word<note/>word``."""
    if match["before"] or match["after"]:
        return " "
    text = match.string
    left, right = text[: match.start()][-1:], text[match.end() :][:1]
    if not left or not right or re.match(f"[{CLOSING}]", right) or re.match(f"[{OPENING}]", left):
        return ""
    return " "


def strip_markup(markup: str) -> tuple[str, bool]:
    """Return the plain text of one verse of OSIS, and whether its words are in doubt.

    The words are in doubt when the Spanish marks a pronoun as added by the translators with no space on either side:
    it may end the verb before it (*haced* + *lo*) or stand alone (*gentes* + *lo* + *oyeron*).
    """
    root = ET.fromstring(f"<verse>{ACROSS_VERSES.sub(' ', markup)}</verse>")
    out: list[str] = []
    _text(root, out)
    text = "".join(out)

    doubtful = False

    def place_added(match: re.Match[str]) -> str:
        nonlocal doubtful
        words, (start, end) = match[1], match.span()
        left = text[:start][-1:].isalpha() and words[:1].isalpha()
        right = text[end:][:1].isalpha() and words[-1:].isalpha()
        clitic = words.split() and words.split()[0].lower() in CLITICS
        if left and clitic:
            doubtful = doubtful or right or len(words.split()) > 1
            left = False  # "sáca" + "lo" is one word
        return " " * left + words + " " * right

    text = re.sub(f"{ADDED}([^{ADDED_END}]*){ADDED_END}", place_added, text)
    text = re.sub(f"(?P<before>\\s*){NOTE}(?P<after>\\s*)", _place_note, text)
    text = unicodedata.normalize("NFC", " ".join(text.split()))
    # A line of verse that ends in a dash would leave a space where the prose has none.
    text = re.sub(r"(?<=\w)— (?=[\w“‘])", "—", text)
    return re.sub(r" +([,.;:!?)”])", r"\1", text), doubtful


# --- letters -----------------------------------------------------------------------------------------------------

WORD = re.compile(r"[^\W\d_]+")


def usual_forms(texts: Iterable[str]) -> dict[str, str]:
    """Map each word in small letters to the form in which it mostly occurs inside a sentence."""
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
            # A word seen nowhere else; one that is a sentence by itself is a heading, such as ALEPH.
            return word.capitalize() if opens and not text.startswith(".", match.end()) else word
        return form[:1].upper() + form[1:] if opens else form

    return WORD.sub(replace, text)


# --- choosing ----------------------------------------------------------------------------------------------------


def duplicate_key(text: str) -> str:
    """What two texts share when they count as the same: their letters and digits, in small letters."""
    return " ".join(re.findall(r"[^\W_]+", text.casefold()))


def misaligned(ref: Ref) -> bool:
    """Whether the table says that this reference names different words in the two texts."""
    here = (ref.chapter, ref.verse)
    return any(ref.book == book and (c1, v1) <= here <= (c2, v2) for book, c1, v1, c2, v2, _ in MISALIGNED)


def join(es_dump: str, en_dump: str) -> tuple[list[Pair], set[Ref]]:
    """Return the verses that both texts have, in order, and those among them whose words are in doubt."""
    doubtful: set[Ref] = set()
    texts: list[dict[Ref, str]] = []
    for dump in (es_dump, en_dump):
        side: dict[Ref, str] = {}
        for ref, markup in parse_imp(dump):
            try:
                text, doubt = strip_markup(markup)
            except ET.ParseError as error:
                raise UserError(f"the markup of {ref} is broken: {error}") from None
            if text:
                side[ref] = text
            if doubt:
                doubtful.add(ref)
        texts.append(side)
    es, en = texts
    forms = usual_forms(es.values())
    pairs = [
        Pair(ref, lower_initials(text, forms) if ref.verse == 1 else text, en[ref])
        for ref, text in es.items()
        if ref in en
    ]
    return pairs, doubtful


def choose(pairs: Iterable[Pair], doubtful: set[Ref]) -> tuple[list[Pair], dict[str, int]]:
    """Return the pairs to keep, and how many each rule dropped; the first rule that applies counts."""
    dropped = {
        "numbered or divided differently (table)": 0,
        "added pronoun with no space around it": 0,
        f"over {MAX_WORDS} words on a side": 0,
        f"lengths over 1:{MAX_RATIO}": 0,
        "text already seen on either side": 0,
    }
    rules = list(dropped)
    seen: dict[str, set[str]] = {"es": set(), "en": set()}
    kept = []
    for pair in pairs:
        lengths = sorted((len(pair.es.split()), len(pair.en.split())))
        keys = {"es": duplicate_key(pair.es), "en": duplicate_key(pair.en)}
        if misaligned(pair.ref):
            rule = rules[0]
        elif pair.ref in doubtful:
            rule = rules[1]
        elif lengths[1] > MAX_WORDS:
            rule = rules[2]
        elif lengths[1] > MAX_RATIO * lengths[0]:
            rule = rules[3]
        elif any(keys[language] in seen[language] for language in LANGUAGES):
            rule = rules[4]
        else:
            for language in LANGUAGES:
                seen[language].add(keys[language])
            kept.append(pair)
            continue
        dropped[rule] += 1
    return kept, dropped


def split(pairs: list[Pair]) -> dict[str, list[Pair]]:
    """Deal the pairs to the splits by a hash of the seed and the reference; each split keeps the order."""

    def rank(pair: Pair) -> bytes:
        return hashlib.sha256(f"{SEED} {pair.ref}".encode()).digest()

    ranked = sorted(pairs, key=rank)
    if len(ranked) <= sum(HELD_OUT.values()):
        raise UserError(f"only {len(ranked)} verses are left: too few to split")
    owner: dict[Ref, str] = {}
    start = 0
    for name, size in HELD_OUT.items():
        owner.update((pair.ref, name) for pair in ranked[start : start + size])
        start += size
    splits: dict[str, list[Pair]] = {name: [] for name in SPLITS}
    for pair in pairs:
        splits[owner.get(pair.ref, "train")].append(pair)
    return splits


# --- writing -----------------------------------------------------------------------------------------------------


def compress(data: bytes) -> bytes:
    """Gzip with no time and no name, so that equal texts give equal files."""
    buffer = io.BytesIO()
    with gzip.GzipFile(filename="", fileobj=buffer, mode="wb", compresslevel=9, mtime=0) as stream:
        stream.write(data)
    return buffer.getvalue()


def write_file(path: Path, data: bytes) -> None:
    """Write beside and rename, so that a file is whole or not there."""
    beside = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        try:
            beside.write_bytes(data)
            os.replace(beside, path)
        finally:
            beside.unlink(missing_ok=True)
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}") from None


def write_corpus(splits: dict[str, list[Pair]], out: Path) -> None:
    """Write every file of the corpus but its README."""
    files: dict[str, bytes] = {}
    for name, pairs in splits.items():
        columns = {"es": [p.es for p in pairs], "en": [p.en for p in pairs], "refs": [str(p.ref) for p in pairs]}
        for suffix, lines in columns.items():
            files[f"{name}.{suffix}"] = "".join(line + "\n" for line in lines).encode("utf-8")
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"cannot make the folder {out}: {error.strerror}") from None
    packed = {name + ".gz": compress(data) for name, data in files.items()}
    for name, data in packed.items():
        write_file(out / name, data)
    for name, sums in (("SHA256SUMS", packed), ("SHA256SUMS.text", files)):
        lines = [f"{hashlib.sha256(data).hexdigest()}  {file}\n" for file, data in sorted(sums.items())]
        write_file(out / name, "".join(lines).encode("ascii"))


# --- command line ------------------------------------------------------------------------------------------------


def add_source_arguments(parser: argparse.ArgumentParser) -> None:
    """The options that say where the two texts come from."""
    parser.add_argument(
        "--rv-imp", type=Path, metavar="FILE", help=f"read the Spanish from FILE, the output of 'mod2imp {ES_MODULE}'"
    )
    parser.add_argument(
        "--web-imp", type=Path, metavar="FILE", help=f"read the English from FILE, the output of 'mod2imp {EN_MODULE}'"
    )


def load_dumps(args: argparse.Namespace) -> tuple[str, str]:
    """Return the Spanish and the English dump that the options name."""
    es = read_dump(args.rv_imp) if args.rv_imp else run_mod2imp(ES_MODULE)
    en = read_dump(args.web_imp) if args.web_imp else run_mod2imp(EN_MODULE)
    return es, en


def main(argv: list[str] | None = None) -> int:
    """Run the command line; 0 when the corpus was written, 2 for a mistake in its use."""
    parser = argparse.ArgumentParser(
        description="Make the Spanish-English verses corpus from two public-domain texts packaged by Debian.",
        epilog="Without --rv-imp and --web-imp the script runs mod2imp itself; "
        f"that needs the Debian packages {', '.join(PACKAGES.values())}.",
    )
    parser.add_argument(
        "--out",
        type=Path,
        metavar="DIR",
        default=Path(__file__).resolve().parents[2] / "data" / "verses.es-en",
        help="folder to write to (default: data/verses.es-en of this repository)",
    )
    add_source_arguments(parser)
    args = parser.parse_args(argv)
    try:
        es, en = load_dumps(args)
        pairs, doubtful = join(es, en)
        kept, dropped = choose(pairs, doubtful)
        splits = split(kept)
        write_corpus(splits, args.out)
    except UserError as error:
        print(f"make_verses.py: error: {error}", file=sys.stderr)
        return 2
    rows = [("verses in both texts", len(pairs))]
    rows += [(f"- {rule}", -count) for rule, count in dropped.items()]
    rows += [("kept", len(kept))]
    rows += [(f"  {name}", len(part)) for name, part in splits.items()]
    for label, count in rows:
        print(f"{label:<44}{count:>8}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
