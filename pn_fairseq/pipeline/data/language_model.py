"""Data of language models: three texts, one sentence or paragraph a line, as fairseq's binary data with one dictionary.

raw/ has the text as it came, tok/ tokens with one blank between them, as they are counted; a token is a word of tok/,
or the end of a line. With unit=byte a word is a byte, in two hexadecimal digits, and the end of a line is the byte 0A.
counts.txt has the tokens and lines of each split, the vocabulary, and the share of <unk>.
"""

from __future__ import annotations

import gzip
import re
from collections.abc import Sequence
from pathlib import Path

from pn_fairseq.common.command import UserError, say
from pn_fairseq.common.files import count_lines
from pn_fairseq.pipeline.data import pairs, tokens
from pn_fairseq.pipeline.data.binarize import SPLITS, lengths, make_bin
from pn_fairseq.pipeline.data.parallel import per_line
from pn_fairseq.pipeline.data.preparation import Option, Preparation

#: The books of the verses that are validation and test; all others are training. Neighbours in the order of the text.
BOOKS = {
    "valid": ("Ezekiel",),
    "test": (
        *("Daniel", "Hosea", "Joel", "Amos", "Obadiah", "Jonah", "Micah", "Nahum", "Habakkuk", "Zephaniah", "Haggai"),
        *("Zechariah", "Malachi"),
    ),
}


#: What a token can be, and the option of recipes.
UNITS = ("word", "byte")
UNIT = Option("--unit", "UNIT", "what a token is: word (default), or byte, which takes the text as it is", "word")


def verses(corpus: Path, folder: Path) -> list[Path]:
    """Write the English verses to files in ``folder``, in the order of the text, split by :data:`BOOKS`.

    The splits of ``corpus``, data/verses.es-en, interleave verses: neighbours of its test verses are in its train.
    """
    every: list[tuple[str, int, int, str]] = []
    for split in SPLITS:
        files = [gzip.decompress((corpus / f"{split}.{kind}.gz").read_bytes()).decode() for kind in ("refs", "en")]
        for reference, verse in zip(*(text.removesuffix("\n").split("\n") for text in files), strict=True):
            book, chapter, number = re.fullmatch(r"(.+) (\d+):(\d+)", reference).groups()
            every.append((book, int(chapter), int(number), verse))
    order = {book: place for place, book in enumerate(dict.fromkeys(book for book, *_ in every))}
    every.sort(key=lambda verse: (order[verse[0]], *verse[1:3]))
    split_of = {book: split for split, books in BOOKS.items() for book in books}
    folder.mkdir()
    for split in SPLITS:
        text = "".join(f"{verse}\n" for book, *_, verse in every if split_of.get(book, "train") == split)
        (folder / f"{split}.txt").write_text(text, encoding="utf-8", newline="\n")
    return [folder / f"{split}.txt" for split in SPLITS]


def prepare(
    data: Preparation,
    name: str,
    texts: Sequence[Path],
    tokenize: str = "",
    lower: bool = False,
    min_count: int = 1,
    expect: Sequence[int] = (),
    unit: str = "word",
) -> None:
    """Make the data of train, valid and test, plain or .gz, in the folder of ``data``, which is open.

    Args:
        name: of the corpus, for reports.
        texts: the files of train, valid and test.
        tokenize: language of Moses' tokenizer; "": the text has tokens.
        min_count: words that are rarer in train become <unk>.
        expect: numbers of tokens of the published files; others are an error.
        unit: word or byte; with bytes the text is neither tokenized nor changed.
    """
    if unit not in UNITS:
        raise UserError(f"--unit must be {' or '.join(UNITS)}, not '{unit}'")
    if unit == "byte" and (tokenize or lower or min_count > 1):
        raise UserError("--unit byte takes the text as it is: leave out --tokenize, --lower and --min-count")
    data.settings = {
        "task": "language_modeling",
        "corpus": name,
        "unit": unit,
        "language": tokenize,
        "tokenizer": tokens.SACREMOSES if tokenize else "none",
        "lower": str(int(lower)),
        "min_count": str(min_count),
    }
    (data.partial / "text").mkdir()
    for path, output in zip(texts, data.files(), strict=True):
        with (data.partial / "text" / output).open("wb") as file:
            lines = pairs.byte_lines(path) if unit == "byte" else (line.encode() for line in pairs.as_is(path))
            file.writelines(line.removesuffix(b"\n") + b"\n" for line in lines)
            if not file.tell():
                raise UserError(f"{pairs.name_of(path)} is empty")
    data.keep_text("raw")

    words = {"normalize": "0", "nonprinting": "0", "aggressive": "0", **data.settings}
    plain = per_line(lambda line: " ".join((line.lower() if lower else line).split()))
    work = _bytes if unit == "byte" else tokens.tokenizer(words, tokenize) if tokenize else plain
    data.transform("tokenizing", "raw", "tok", lambda *_: work)
    counts = {split: _tokens(data.dest / f"tok/{split}.txt") for split in SPLITS}
    if expect and list(counts.values()) != list(expect):
        here, published = (" / ".join(f"{count:,}" for count in numbers) for numbers in (counts.values(), expect))
        raise UserError(f"this is not {name}: train, valid and test have {here} tokens, and {name} has {published}")
    flags = ["--only-source", "--thresholdsrc", str(min_count), *(f"--{split}pref=tok/{split}.txt" for split in SPLITS)]
    make_bin(data.dest, data.workers, flags, {split: f"tok/{split}.txt" for split in SPLITS})
    made = {split: sum(lengths(data.dest / f"bin/{split}.idx")) for split in SPLITS}
    if made != counts:
        raise UserError(
            f"{data.dest}/bin has {made} tokens, and tok has {counts}: remove {data.dest}/bin and try again"
        )
    lines = {f"{split}.lines": count_lines(data.dest / f"tok/{split}.txt") for split in SPLITS}
    data.finish({**counts, **lines, **_unknown(data.dest / "bin")})
    say("prepare", f"{data.dest} is complete: {', '.join(f'{counts[split]:,} {split}' for split in SPLITS)} tokens")


def _bytes(text: bytes) -> bytes:
    return b"".join(line.hex(" ").encode() + b"\n" for line in text.removesuffix(b"\n").split(b"\n"))


def _tokens(path: Path) -> int:
    with path.open(encoding="utf-8", newline="\n") as file:
        return sum(len(line.split()) + 1 for line in file)


def _unknown(folder: Path) -> dict[str, object]:
    """Size of fairseq's dictionary without its own symbols, and the share of each split that is <unk>."""
    types = [line.split() for line in (folder / "dict.txt").read_text("utf-8").splitlines()]
    words = [word for word, _ in types if not word.startswith("madeupword")]
    log = (folder / "preprocess.log").read_text("utf-8")
    shares = re.findall(r"tok/(\w+)\.txt: \d+ sents, \d+ tokens, ([\d.]+)% replaced", log)
    return {"vocabulary": len(words), **{f"{split}.unk_percent": share for split, share in shares}}
