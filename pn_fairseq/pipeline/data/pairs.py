"""Pairs of sentences: reading them from published files, and choosing among them."""

from __future__ import annotations

import contextlib
import gzip
import os
import re
import shutil
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import zip_longest
from pathlib import Path

from pn_fairseq.common.command import UserError, say
from pn_fairseq.common.files import atomic_folder, named_errors, recorded
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
    """How messages call a file. What is unpacked to DEST/unpacked/ARCHIVE/MEMBER is called ARCHIVE/MEMBER."""
    return str(path).rpartition("/unpacked/")[2]


# --- reading ---


def lines(path: Path) -> Iterator[str]:
    """The lines of a UTF-8 file, FILE or FILE.gz, with their ends; they end at line feeds only.

    Raises:
        UserError: a line is too long or not UTF-8; FILE.gz is damaged.
    """
    packed = path.with_name(f"{path.name}.gz")
    if not path.exists() and packed.exists():
        path, opened = packed, gzip.open(packed)
    else:
        opened = path.open("rb")
    number = 0
    with opened as file:
        try:
            while line := file.readline(LONGEST_LINE + 1):
                number += 1
                if len(line) > LONGEST_LINE:
                    raise UserError(f"{name_of(path)}: line {number} has more than {LONGEST_LINE} bytes; is it text?")
                yield line.decode("utf-8")
        except UnicodeDecodeError as error:
            raise UserError(
                f"{name_of(path)}: line {number} is not UTF-8 ({error.reason}); convert the file first"
            ) from None
        except (EOFError, gzip.BadGzipFile, zlib.error):
            raise UserError(f"{name_of(path)} is damaged or cut off; get it again") from None


def as_is(path: Path) -> Iterator[str]:
    """Text with one sentence a line, unchanged, without a byte order mark.

    A carriage return in the middle of a line is refused: some tools take it for the end of the line.
    """
    for number, line in enumerate(lines(path), 1):
        if number == 1 and line.startswith(BOM):
            say("prepare", f"note: {name_of(path)} begins with a byte order mark, which is left out")
            line = line.removeprefix(BOM)
        if "\r" in line.removesuffix("\n").removesuffix("\r"):
            raise UserError(
                f"{name_of(path)}: line {number} has a carriage return in the middle, which tools take for the end "
                "of a line"
            )
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
        found = re.findall(r'<seg id="?\d+"?\s*>(.*?)</seg>', line, re.IGNORECASE)
        if len(found) != len(re.findall("<seg ", line, re.IGNORECASE)):
            raise UserError(f'{name_of(path)}: line {number} is not of the form <seg id="N">...</seg>')
        yield from (text.strip(blanks).replace("\r", " ") for text in found)


def wmt_segments(path: Path) -> Iterator[str]:
    """The same for WMT, with the white space that sacrebleu removes."""
    return segments(path, " \t\f\v\r")


def pairs(reader: Reader, paths: Sequence[Path]) -> Iterator[tuple[str, str]]:
    """The pairs of two files that a reader turns into as many sentences."""
    counts = [0, 0]
    for pair in zip_longest(*(reader(path) for path in paths)):
        for side in (0, 1):
            counts[side] += pair[side] is not None
        if None not in pair:
            yield pair
    names = [name_of(path) for path in paths]
    for name, count in zip(names, counts, strict=True):
        if not count:
            raise UserError(f"{name}: is empty, or no text that can be read here ({reader.__name__})")
    if counts[0] != counts[1]:
        raise UserError(
            f"{names[0]} has {counts[0]} lines and {names[1]} {counts[1]}: they are not translations of each other"
        )


def take(reader: Reader, paths: Sequence[Path], outputs: Sequence[Path]) -> int:
    """Append the pairs of two published files (source, target) to two files of text, and return their number."""
    count = one_empty = nul = 0
    for output in outputs:
        output.parent.mkdir(parents=True, exist_ok=True)
    with named_errors(outputs[0].parent), outputs[0].open("ab") as source, outputs[1].open("ab") as target:
        for pair in pairs(reader, paths):
            count += 1
            one_empty += not pair[0].strip() or not pair[1].strip()
            nul += any("\0" in side for side in pair)
            for file, side in zip((source, target), pair, strict=True):
                file.write((side if reader is as_is else f"{side.removesuffix(chr(10))}\n").encode())
    names = f"{name_of(paths[0])} and {paths[1].name}"
    if one_empty:
        say("prepare", f"note: {one_empty} of the {count} pairs of {names} have an empty side")
    if nul:
        say("prepare", f"note: {nul} pairs of {names} have NUL characters, which the tokenizer removes")
    return count


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


def _select(settings: Mapping[str, str], splits: Sequence[str], folders: Mapping[str, Path], output: Path) -> None:
    languages = settings["source"], settings["target"]
    least, most, ratio = (float(number) for number in (settings["clean"] or "0 inf inf").split())
    clean_splits = settings["clean_splits"].split(",") if settings["clean"] else []
    valid_every = int(settings["valid_every"])
    counts, written = [], Counter()
    with contextlib.ExitStack() as stack:
        removed = stack.enter_context((output / "removed.tsv").open("w", encoding="utf-8"))
        removed.write("\t".join(["split", "line", "reason", *(f"tokens {lang}" for lang in languages)]) + "\n")

        def opened(top: Mapping[str, Path], split: str, mode: str) -> list:
            paths = [folder / f"{split}.{lang}" for folder in top.values() for lang in languages]
            return [stack.enter_context(path.open(mode)) for path in paths]

        made = {name: output / name for name in folders}
        for folder in made.values():
            folder.mkdir()
        outputs = {split: opened(made, split, "wb") for split in SPLITS}
        counted = list(folders).index(settings["clean_stage"]) * 2 if clean_splits else 0
        for split in splits:
            read, reasons = 0, Counter()
            try:
                for lines in zip(*opened(folders, split, "rb"), strict=True):
                    read += 1
                    if split in clean_splits:
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
            counts.append(f"{split}.read={read}")
            if split in clean_splits:
                counts.append(f"{split}.removed={reasons.total()}")
                counts += [f"{split}.removed.{key.replace(' ', '_')}={reasons[key]}" for key in sorted(reasons)]
    counts += [f"{split}={written[split]}" for split in outputs]
    for split in outputs:
        if not written[split]:
            raise UserError(f"no sentence pair of {split} is left ({', '.join(counts)})")
    (output / "counts.txt").write_text("".join(f"{line}\n" for line in counts), encoding="utf-8")


def select(dest: Path, settings: Mapping[str, str], splits: Sequence[str], folders: Mapping[str, Path]) -> None:
    """Write the pairs that are kept, in their order: ``DEST/NAME`` from each folder, unless that is done.

    Cleaning (the settings clean, clean_stage, clean_splits) removes pairs. With the setting ``valid_every=N`` each N-th
    pair of the training text that is kept becomes one of the validation set.

    Args:
        dest: also gets removed.tsv, one line for each removed pair, and counts.txt, as ``name=value``.
        settings: of the prepared data.
        splits: the splits that the folders have.
        folders: name (raw, tok, bpe) -> folder with SPLIT.LANG, line by line the same sentences; the model of the
            subwords is copied.
    """
    selected = dest / "stages/selected"
    if recorded(dest, "counts").exists():
        return
    if not selected.exists():
        with atomic_folder(selected) as partial, named_errors(selected):
            _select(settings, splits, folders, partial)
            for name, folder in folders.items():
                for model in (folder / file for file in MODELS.values()):
                    if model.exists():
                        shutil.copy(model, partial / name)
    # The counts are moved last and say that all is there.
    for name in (*folders, "removed.tsv", "counts", "counts.txt"):  # counts: of an older version
        if (selected / name).exists():
            shutil.rmtree(dest / name, ignore_errors=True)
            os.replace(selected / name, dest / name)
