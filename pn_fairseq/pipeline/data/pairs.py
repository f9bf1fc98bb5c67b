"""Pairs of sentences: reading them from published files, and choosing among them."""

from __future__ import annotations

import contextlib
import gzip
import os
import re
import shutil
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from itertools import zip_longest
from pathlib import Path

from pn_fairseq.common.command import UserError, say
from pn_fairseq.common.files import atomic_folder
from pn_fairseq.pipeline.data.subwords import MODELS

#: Bytes of a line. A longer one is not a sentence, and a file without line feeds could fill the memory.
LONGEST_LINE = 1 << 20
#: Characters of a token, as in Moses' clean-corpus-n.perl.
LONGEST_TOKEN = 1000
BOM = "\ufeff"


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
            say("data", f"note: {name_of(path)} begins with a byte order mark, which is left out")
            line = line.removeprefix(BOM)
        if "\r" in line.removesuffix("\n").removesuffix("\r"):
            raise UserError(
                f"{name_of(path)}: line {number} has a carriage return in the middle, which tools take for the end "
                "of a line"
            )
        yield line


def without_carriage_returns(path: Path) -> Iterator[str]:
    """Text without carriage returns, which normalize-punctuation.perl deletes."""
    for line in lines(path):
        yield line.replace("\r", "")


def tokens(path: Path) -> Iterator[str]:
    """Text that comes tokenized, with one blank between the tokens."""
    for line in lines(path):
        yield " ".join(line.split())  # at all white space of Unicode, where fairseq cuts, too


def strip_tags(path: Path) -> Iterator[str]:
    """The sentences of IWSLT's train.tags.*, as in fairseq's recipe.

    Lines with <url>, <talkid> or <keywords> go; of titles and descriptions the tags go and the text stays. Entities
    such as &amp; stay as they are. White space at the ends goes, and a carriage return becomes a blank.
    """
    for line in lines(path):
        if not any(tag in line for tag in ("<url>", "<talkid>", "<keywords>")):
            yield re.sub(r"</?(?:title|description)>", "", line).strip().replace("\r", " ")


def xml_segments(path: Path) -> Iterator[str]:
    """The sentences of IWSLT's test sets: the lines ``<seg id="N"> text </seg>``."""
    found = False
    for line in lines(path):
        if "<seg id" in line:
            found = True
            yield re.sub(r'<seg id="[0-9]*">\s*|\s*</seg>\s*', "", line).strip().replace("\r", " ")
    if not found:
        raise UserError(f"{name_of(path)} has no line with '<seg id': it is not a test set in XML")


def sgml_segments(path: Path) -> Iterator[tuple[tuple[str, int], str]]:
    """((document, number), sentence) of WMT's test sets in SGML, whose entities stay as they are.

    Own code and not `sacrebleu -t wmt14/full`, which gives the same text (tested): that downloads to a place of its
    own and cannot take an archive that is here, as on a machine without a network.
    """
    document = ""
    for number, line in enumerate(lines(path), 1):
        if match := re.search(r'<doc\b[^>]*?\bdocid="([^"]*)"', line, re.IGNORECASE):
            document = match[1]
        found = re.findall(r'<seg\s+id="?(\d+)"?\s*>(.*?)</seg>', line, re.IGNORECASE)
        if len(found) != len(re.findall(r"<seg\b", line, re.IGNORECASE)):
            raise UserError(f'{name_of(path)}: line {number} is not of the form <seg id="N">...</seg>')
        for position, text in found:
            yield (document, int(position)), text.replace("\r", " ").strip(" \t\f\v")


def sgml_pairs(paths: tuple[Path, Path]) -> Iterator[tuple[str, str]]:
    """The pairs of a test set in SGML. Both files must have the same sentences, by document and number."""
    source, target = map(name_of, paths)
    sides = [list(sgml_segments(path)) for path in paths]
    for path, side in zip(paths, sides, strict=True):
        if not side:
            raise UserError(f"{name_of(path)} has no <seg>: is it a test set of WMT?")
    for (place, _), (other, _) in zip(*sides, strict=False):
        if place != other:
            raise UserError(
                f"{source} has sentence {place[1]} of {place[0]} where {target} has {other[1]} of {other[0]}"
            )
    if len(sides[0]) != len(sides[1]):
        raise UserError(f"{source} has {len(sides[0])} sentences and {target} {len(sides[1])}")
    return ((one, other) for (_, one), (_, other) in zip(*sides, strict=True))


def line_pairs(reader: Callable[[Path], Iterator[str]], paths: tuple[Path, Path]) -> Iterator[tuple[str, str]]:
    """The pairs of two files that a reader turns into as many sentences."""
    counts = [0, 0]
    for pair in zip_longest(*(reader(path) for path in paths)):
        for side in (0, 1):
            counts[side] += pair[side] is not None
        if None not in pair:
            yield pair
    for path, count in zip(paths, counts, strict=True):
        if not count:
            raise UserError(f"{name_of(path)}: is empty")
    if counts[0] != counts[1]:
        names = [name_of(path) for path in paths]
        raise UserError(
            f"{names[0]} has {counts[0]} lines and {names[1]} {counts[1]}: they are not translations of each other"
        )


#: How a published file is read, by the name of the option of the step ``take``.
READERS = {
    "as-is": as_is,
    "without-carriage-returns": without_carriage_returns,
    "tokens": tokens,
    "strip-tags": strip_tags,
    "xml-segments": xml_segments,
}


def take(kind: str, paths: tuple[Path, Path], outputs: tuple[Path, Path]) -> int:
    """Append the pairs of two published files to two files of text, and return their number.

    Args:
        kind: a key of :data:`READERS`, or ``sgml-segments``.
        paths: the file of the source language and that of the target language.
        outputs: where the sentences go, one a line.
    """
    pairs = sgml_pairs(paths) if kind == "sgml-segments" else line_pairs(READERS[kind], paths)
    count = one_empty = nul = 0
    for output in outputs:
        output.parent.mkdir(parents=True, exist_ok=True)
    with outputs[0].open("ab") as source, outputs[1].open("ab") as target:
        for pair in pairs:
            count += 1
            one_empty += not pair[0].strip() or not pair[1].strip()
            nul += any("\0" in side for side in pair)
            for file, side in zip((source, target), pair, strict=True):
                file.write((side if kind == "as-is" else f"{side.removesuffix(chr(10))}\n").encode())
    names = f"{name_of(paths[0])} and {paths[1].name}"
    if one_empty:
        say("data", f"note: {one_empty} of the {count} pairs of {names} have an empty side")
    if nul:
        say("data", f"note: {nul} pairs of {names} have NUL characters, which the tokenizer removes")
    return count


# --- choosing ---


def objection(source: list[str], target: list[str], least: int, most: int, ratio: float) -> str | None:
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


def _select(settings: Mapping[str, str], splits: list[str], folders: Mapping[str, Path], output: Path) -> None:
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
        outputs = {split: opened(made, split, "wb") for split in ("train", "valid", "test")}
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
    (output / "counts").write_text("".join(f"{line}\n" for line in counts), encoding="utf-8")


def select(dest: Path, settings: Mapping[str, str], splits: list[str], folders: Mapping[str, Path]) -> None:
    """Write the pairs that are kept, in their order: ``DEST/NAME`` from each folder, unless that is done.

    Cleaning (the settings clean, clean_stage, clean_splits) removes pairs. With the setting ``valid_every=N`` each N-th
    pair of the training text that is kept becomes one of the validation set.

    Args:
        dest: also gets removed.tsv, one line for each removed pair, and counts, as ``name=value``.
        settings: of the prepared data.
        splits: the splits that the folders have.
        folders: name (raw, tok, bpe) -> folder with SPLIT.LANG, line by line the same sentences; the model of the
            subwords is copied.
    """
    selected = dest / "stages/selected"
    if (dest / "counts").exists():
        return
    if not selected.exists():
        with atomic_folder(selected) as partial:
            _select(settings, splits, folders, partial)
            for name, folder in folders.items():
                for model in (folder / file for file in MODELS.values()):
                    if model.exists():
                        shutil.copy(model, partial / name)
    # `counts` is moved last and says that all is there.
    for name in (*folders, "removed.tsv", "counts"):
        if (selected / name).exists():
            shutil.rmtree(dest / name, ignore_errors=True)
            os.replace(selected / name, dest / name)
