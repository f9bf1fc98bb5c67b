"""Data of language models: three texts, one sentence or paragraph a line, as fairseq's binary data with one dictionary.

A folder of it has
  raw/  the text as it came       bin/  fairseq's binary data
  tok/  tokens, one blank between them, as they are counted
  settings.txt  what it was made with, name=value, then the checksums of the text
  counts.txt    name=value: tokens and lines of each split, vocabulary, tokens that are <unk>

A token is a word of tok/, or the end of a line.
"""

from __future__ import annotations

import gzip
import re
import shutil
import zipfile
from collections.abc import Sequence
from pathlib import Path

from pn_fairseq.common.command import UserError, say
from pn_fairseq.common.files import atomic_write, checksum, count_lines, read_settings, recorded, write_settings
from pn_fairseq.pipeline.data import archives, pairs
from pn_fairseq.pipeline.data.binarize import SPLITS, lengths, make_bin
from pn_fairseq.pipeline.data.parallel import Job, per_line, transform
from pn_fairseq.pipeline.data.settings import check_same
from pn_fairseq.pipeline.data.tokens import SACREMOSES, tokenizer

#: The books of the verses that are validation and test; all others are training. Neighbours in the order of the text.
BOOKS = {
    "valid": ("Ezekiel",),
    "test": (
        *("Daniel", "Hosea", "Joel", "Amos", "Obadiah", "Jonah", "Micah", "Nahum", "Habakkuk", "Zephaniah", "Haggai"),
        *("Zechariah", "Malachi"),
    ),
}


def verses(corpus: Path, folder: Path) -> list[Path]:
    """Write the English verses to files in ``folder``, in the order of the text, split by :data:`BOOKS`.

    The splits of ``corpus``, data/verses.es-en, interleave verses: neighbours of its test verses are in its train.
    """
    every: list[tuple[str, int, int, str]] = []
    for split in SPLITS:
        with gzip.open(corpus / f"{split}.refs.gz", "rt", encoding="utf-8") as refs:
            with gzip.open(corpus / f"{split}.en.gz", "rt", encoding="utf-8") as text:
                for reference, verse in zip(refs, text, strict=True):
                    book, chapter, number = re.fullmatch(r"(.+) (\d+):(\d+)\n", reference).groups()
                    every.append((book, int(chapter), int(number), verse))
    order = {book: place for place, book in enumerate(dict.fromkeys(book for book, *_ in every))}
    every.sort(key=lambda verse: (order[verse[0]], *verse[1:3]))
    folder.mkdir(parents=True, exist_ok=True)
    for split in SPLITS:
        others = {book for books in BOOKS.values() for book in books}
        books = BOOKS.get(split) or order.keys() - others
        with atomic_write(folder / f"{split}.txt", "w") as file:
            file.writelines(verse for book, _, _, verse in every if book in books)
    return [folder / f"{split}.txt" for split in SPLITS]


def unzip(archive: Path, folder: Path, members: Sequence[str]) -> list[Path]:
    """Extract these members of a zip archive, by their paths, as files of ``folder`` without their directories."""
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with zipfile.ZipFile(archive) as file:
            archives.refuse_missing(archive, members, file.namelist())
            if sum(file.getinfo(member).file_size for member in members) > archives.LIMIT:
                raise UserError(f"{archive} has more than {archives.LIMIT} bytes of text, the limit; do not use it")
            for member in members:
                with file.open(member) as source, atomic_write(folder / Path(member).name) as target:
                    shutil.copyfileobj(source, target, archives.CHUNK)
    except (zipfile.BadZipFile, *archives.DAMAGE) as error:
        raise UserError(f"{archive} is damaged or cut off ({error}); get it again") from None
    return [folder / Path(member).name for member in members]


def prepare(
    dest: Path,
    workers: int,
    name: str,
    texts: Sequence[Path],
    tokenize: str = "",
    lower: bool = False,
    min_count: int = 1,
    expect: Sequence[int] = (),
) -> None:
    """Make the data in ``dest`` of train, valid and test, plain or .gz. Run again, it does what is missing.

    Args:
        workers: processes.
        name: of the corpus, for reports.
        texts: the files of train, valid and test.
        tokenize: language of Moses' tokenizer; "": the text has tokens.
        min_count: words that are rarer in train become <unk>.
        expect: numbers of tokens of the published files; others are an error.
    """
    raw = dest / "text.partial"
    raw.mkdir(parents=True)
    for split, path in zip(SPLITS, texts, strict=True):
        with atomic_write(raw / f"{split}.txt", "w") as file:
            file.writelines(f"{line.removesuffix(chr(10))}\n" for line in pairs.as_is(path))
        if not (raw / f"{split}.txt").stat().st_size:
            raise UserError(f"{pairs.name_of(path)} is empty")
    settings = {
        "task": "language_modeling",
        "corpus": name,
        "unit": "word",
        "language": tokenize,
        "tokenizer": SACREMOSES if tokenize else "none",
        "lower": int(lower),
        "min_count": min_count,
    }
    sums = {f"{split}.txt": checksum(raw / f"{split}.txt") for split in SPLITS}
    if (kept := recorded(dest, "settings")).exists():
        check_same(dest, read_settings(kept), {**{key: str(value) for key, value in settings.items()}, **sums}, sums)
    write_settings(kept, settings, sums)
    shutil.rmtree(dest / "raw", ignore_errors=True)
    raw.rename(dest / "raw")

    words = {"normalize": "0", "nonprinting": "0", "aggressive": "0", "lower": str(int(lower)), "tokenizer": SACREMOSES}
    plain = per_line(lambda line: " ".join((line.lower() if lower else line).split()))
    work = tokenizer(words, tokenize) if tokenize else plain
    transform([Job(dest / f"raw/{s}.txt", dest / f"tok/{s}.txt", work) for s in SPLITS], workers, "tokenizing")
    tokens = {split: _tokens(dest / f"tok/{split}.txt") for split in SPLITS}
    if expect and list(tokens.values()) != list(expect):
        here, published = (" / ".join(f"{count:,}" for count in counts) for counts in (tokens.values(), expect))
        raise UserError(f"this is not {name}: train, valid and test have {here} tokens, and {name} has {published}")
    flags = ["--only-source", "--thresholdsrc", str(min_count), *(f"--{s}pref=tok/{s}.txt" for s in SPLITS)]
    make_bin(dest, workers, flags, {split: f"tok/{split}.txt" for split in SPLITS})
    made = {split: sum(lengths(dest / f"bin/{split}.idx")) for split in SPLITS}
    if made != tokens:
        raise UserError(f"{dest}/bin has {made} tokens, and {dest}/tok has {tokens}: remove {dest}/bin and try again")
    lines = {f"{split}.lines": count_lines(dest / f"tok/{split}.txt") for split in SPLITS}
    write_settings(recorded(dest, "counts"), {**tokens, **lines, **_unknown(dest / "bin")})
    say("prepare", f"{dest} is complete: {', '.join(f'{count:,} {split}' for split, count in tokens.items())} tokens")


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
