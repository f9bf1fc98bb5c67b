"""Pairs of sentences: reading them from published files, and choosing among them."""

from __future__ import annotations

import contextlib
import gzip
import os
import re
import shutil
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import zip_longest
from pathlib import Path

from pn_fairseq.common.command import UserError, say
from pn_fairseq.common.files import recorded, write_settings
from pn_fairseq.pipeline.data.binarize import SPLITS
from pn_fairseq.pipeline.data.subwords import MODELS

#: Bytes of a line. A longer one is not a sentence, and a file without line feeds could fill the memory.
LONGEST_LINE = 1 << 20
#: Characters of a token, as in Moses' clean-corpus-n.perl.
LONGEST_TOKEN = 1000
BOM = "\ufeff"

#: A published file -> its sentences.
Reader = Callable[[Path], Iterator[str]]


def name_of(path: Path) -> str:
    """A file's name in messages. What is unpacked to .../unpacked/ARCHIVE/MEMBER is called ARCHIVE/MEMBER."""
    return str(path).rpartition("/unpacked/")[2]


# --- reading ---


def byte_lines(path: Path) -> Iterator[bytes]:
    """The lines of a file, FILE or FILE.gz, with their ends; they end at line feeds only.

    Raises:
        UserError: a line is too long; FILE.gz is damaged.
    """
    packed = path.with_name(f"{path.name}.gz")
    if not path.exists() and packed.exists():
        path = packed
    number = 0
    with gzip.open(path) if path == packed else path.open("rb") as file:
        try:
            while line := file.readline(LONGEST_LINE + 1):
                number += 1
                if len(line) > LONGEST_LINE:
                    raise UserError(f"{name_of(path)}: line {number} has more than {LONGEST_LINE} bytes; is it text?")
                yield line
        except (EOFError, gzip.BadGzipFile, zlib.error):
            raise UserError(f"{name_of(path)} is damaged or cut off; get it again") from None


def lines(path: Path) -> Iterator[str]:
    """The same of a UTF-8 file.

    Raises:
        UserError: as :func:`byte_lines`; or a line is not UTF-8.
    """
    for number, line in enumerate(byte_lines(path), 1):
        try:
            yield line.decode("utf-8")
        except UnicodeDecodeError as error:
            message = f"line {number} is not UTF-8 ({error.reason}); convert the file first"
            raise UserError(f"{name_of(path)}: {message}") from None


def as_is(path: Path) -> Iterator[str]:
    """Text with one sentence a line, unchanged, without a byte order mark.

    A carriage return in the middle of a line is refused: some tools take it for the end of the line.
    """
    for number, line in enumerate(lines(path), 1):
        if number == 1 and line.startswith(BOM):
            say("prepare", f"note: {name_of(path)} begins with a byte order mark, which is left out")
            line = line.removeprefix(BOM)
        if "\r" in line.removesuffix("\n").removesuffix("\r"):
            place = f"{name_of(path)}: line {number}"
            raise UserError(f"{place} has a carriage return in the middle, which tools take for the end of a line")
        yield line


def without_carriage_returns(path: Path) -> Iterator[str]:
    """Text without carriage returns, which normalize-punctuation.perl deletes."""
    return (line.replace("\r", "") for line in lines(path))


def tokens(path: Path) -> Iterator[str]:
    """Text that comes tokenized, with one blank between the tokens."""
    return (" ".join(line.split()) for line in lines(path))  # at all white space of Unicode, where fairseq cuts, too


def strip_tags(path: Path) -> Iterator[str]:
    """The sentences of IWSLT's train.tags.*, as in fairseq's recipe.

    Lines with <url>, <talkid> or <keywords> go; of titles and descriptions the tags go and the text stays. Entities
    such as &amp; stay as they are. White space at the ends goes, and a carriage return becomes a blank.
    """
    for line in lines(path):
        if not any(tag in line for tag in ("<url>", "<talkid>", "<keywords>")):
            yield re.sub(r"</?(?:title|description)>", "", line).strip().replace("\r", " ")


def segments(path: Path, blanks: str | None = None) -> Iterator[str]:
    """The sentences of IWSLT's and WMT's test sets: the text of ``<seg id="N">...</seg>``. Entities stay as they are.

    Args:
        blanks: what is removed at both ends of a sentence (None: all white space). A carriage return becomes a blank.
    """
    for number, line in enumerate(lines(path), 1):
        if "<seg" in line:
            if not (segment := re.search(r'<seg id="\d+">(.*)</seg>', line)):
                raise UserError(f'{name_of(path)}: line {number} is not of the form <seg id="N">...</seg>')
            yield segment[1].strip(blanks).replace("\r", " ")


def wmt_segments(path: Path) -> Iterator[str]:
    """The same for WMT, with the white space that sacrebleu removes."""
    return segments(path, " \t\f\v\r")


def take(reader: Reader, paths: Sequence[Path], outputs: Sequence[Path]) -> int:
    """Append the pairs of two published files (source, target) to two files of text, and return their number."""
    names, counts, one_empty, nul = [name_of(path) for path in paths], [0, 0], 0, 0
    for output in outputs:
        output.parent.mkdir(parents=True, exist_ok=True)
    with outputs[0].open("ab") as source, outputs[1].open("ab") as target:
        for pair in zip_longest(*map(reader, paths)):
            counts = [count + (side is not None) for count, side in zip(counts, pair, strict=True)]
            if None in pair:
                continue
            one_empty += not pair[0].strip() or not pair[1].strip()
            nul += any("\0" in side for side in pair)
            for file, side in zip((source, target), pair, strict=True):
                file.write((side if reader is as_is else f"{side.removesuffix(chr(10))}\n").encode())
    if 0 in counts:
        empty = names[counts.index(0)]
        raise UserError(f"{empty}: is empty, or no text that can be read here ({reader.__name__})")
    if counts[0] != counts[1]:
        lengths = f"{names[0]} has {counts[0]} lines and {names[1]} {counts[1]}"
        raise UserError(f"{lengths}: they are not translations of each other")
    both = f"{names[0]} and {paths[1].name}"
    if one_empty:
        say("prepare", f"note: {one_empty} of the {counts[0]} pairs of {both} have an empty side")
    if nul:
        say("prepare", f"note: {nul} pairs of {both} have NUL characters, which the tokenizer removes")
    return counts[0]


# --- choosing ---


def objection(source: list[str], target: list[str], least: float, most: float, ratio: float) -> str | None:
    """Why a pair of sentences, as tokens, is removed; None if it is kept.

    The rule of Moses' clean-corpus-n.perl: both sides must have ``least`` to ``most`` tokens between white space, and
    no empty side, neither may have more than ``ratio`` times the tokens of the other, and no token more than 1000
    characters.
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


def select(dest: Path, settings: Mapping[str, str], folders: Mapping[str, Path], made: Path) -> None:
    """Write the pairs that are kept, in their order: ``DEST/NAME`` from each folder, unless that is done.

    Cleaning (the settings clean, clean_stage, clean_splits) removes pairs. With the setting ``valid_every=N`` each N-th
    training pair that is kept becomes one of the validation set.

    Args:
        dest: also gets removed.tsv, one line for each removed pair, and counts.txt, as ``name=value``.
        settings: of the prepared data.
        folders: name (raw, tok, bpe) -> folder with SPLIT.LANG, line by line the same sentences; the model of the
            subwords is copied.
        made: a new folder, where all of it is written before it is moved to ``dest``.
    """
    if recorded(dest, "counts").exists():
        return
    languages, valid_every = (settings["source"], settings["target"]), int(settings["valid_every"])
    least, most, ratio = (float(number) for number in (settings["clean"] or "0 inf inf").split())
    counted = [*folders].index(settings["clean_stage"]) * 2  # the first of the two files whose tokens are counted
    splits = SPLITS if valid_every == 0 else ("train", "test")
    counts, written = {}, Counter()
    for name, folder in folders.items():
        (made / name).mkdir(parents=True)
        for model in (folder / file for file in MODELS.values()):
            if model.exists():
                shutil.copy(model, made / name)
    with contextlib.ExitStack() as stack:

        def opened(top: Iterable[Path], split: str, mode: str) -> list:
            paths = [folder / f"{split}.{lang}" for folder in top for lang in languages]
            return [stack.enter_context(path.open(mode)) for path in paths]

        outputs = {split: opened((made / name for name in folders), split, "wb") for split in SPLITS}
        removed = stack.enter_context((made / "removed.tsv").open("w", encoding="utf-8"))
        removed.write("\t".join(["split", "line", "reason", *(f"tokens {lang}" for lang in languages)]) + "\n")
        for split in splits:
            read, reasons, cleaned = 0, Counter(), settings["clean"] and split in settings["clean_splits"].split(",")
            try:
                for lines in zip(*opened(folders.values(), split, "rb"), strict=True):
                    read += 1
                    if cleaned:
                        source, target = (line.decode("utf-8").split() for line in lines[counted : counted + 2])
                        if reason := objection(source, target, least, most, ratio):
                            reasons[reason] += 1
                            removed.write(f"{split}\t{read}\t{reason}\t{len(source)}\t{len(target)}\n")
                            continue
                    kept = read - reasons.total()
                    goal = "valid" if split == "train" and valid_every and kept % valid_every == 0 else split
                    for file, line in zip(outputs[goal], lines, strict=True):
                        file.write(line if line.endswith(b"\n") else line + b"\n")
                    written[goal] += 1
            except ValueError as error:
                raise UserError(f"the files of {split} have different numbers of lines after line {read}") from error
            counts[f"{split}.read"] = read
            if cleaned:
                counts[f"{split}.removed"] = reasons.total()
                counts |= {f"{split}.removed.{key.replace(' ', '_')}": reasons[key] for key in sorted(reasons)}
    counts |= {split: written[split] for split in SPLITS}
    for split in SPLITS:
        if not written[split]:
            numbers = ", ".join(f"{name}={count}" for name, count in counts.items())
            raise UserError(f"no sentence pair of {split} is left ({numbers})")
    write_settings(made / "counts.txt", counts)
    for name in (*folders, "removed.tsv", "counts.txt"):  # the counts are moved last and say that all is there
        shutil.rmtree(dest / name, ignore_errors=True)
        os.replace(made / name, dest / name)
