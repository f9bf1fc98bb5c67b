"""Data of language models: three texts, a sentence or paragraph per line, as fairseq's binary data
with one dictionary.

raw/ contains the original text, tok/ tokens with one blank between them, as they are counted; a
token is a word in tok/, or the end of a line. With unit=byte a word is a byte, in two hexadecimal
digits, and the end of a line is the byte 0A. counts.txt contains the numbers of tokens and lines of
each split, the vocabulary, and the share of <unk>.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from pn_fairseq.common.command import UserError
from pn_fairseq.common.files import count_lines
from pn_fairseq.pipeline.data import pairs, tokens
from pn_fairseq.pipeline.data.binarize import SPLITS, make_bin, unknown_shares
from pn_fairseq.pipeline.data.folder import DataFolder
from pn_fairseq.pipeline.data.parallel import Work
from pn_fairseq.pipeline.data.settings import LanguageModelSettings, Settings

#: What a token can be, an option of recipes.
UNIT = {
    "--unit": {
        "choices": ("word", "byte"),
        "default": "word",
        "help": "what a token is: word (default), or byte, which takes the text as it is",
    }
}


def prepare(data: DataFolder, texts: Sequence[Path], expect: Sequence[int] = ()) -> None:
    """Make the data in the folder of ``data`` from the files of train, valid and test, plain or
    .gz.

    Args:
        expect: numbers of tokens of the published files; other numbers are an error.
    """
    reader = pairs.as_bytes if data.settings.unit == "byte" else pairs.as_is
    for path, output in zip(texts, data.files(), strict=True):
        pairs.append(reader, path, data.partial / "text" / output)
    if not data.begin("raw"):
        return
    data.transform("tokenizing", "raw", "tok", lambda *_: _tokenizer(data.settings))
    texts_of = {split: f"tok/{split}.txt" for split in SPLITS}
    counts = {}
    for split, text in texts_of.items():
        counts[split] = sum(len(line.split()) + 1 for line in pairs.lines(data.dest / text))
    if expect and list(counts.values()) != list(expect):
        name = data.settings.corpus
        raise UserError(
            f"this is not {name}: train, valid and test have {_slashed(counts.values())} tokens, "
            f"and {name} has {_slashed(expect)}"
        )
    flags = ["--only-source", "--thresholdsrc", str(data.settings.min_count)]
    flags += [f"--{split}pref={text}" for split, text in texts_of.items()]
    make_bin(data.dest, data.workers, flags, texts_of)
    for split, text in texts_of.items():
        counts[f"{split}.lines"] = count_lines(data.dest / text)
    data.finish({**counts, **_unknown(data.dest / "bin")})


def _slashed(numbers: Iterable[int]) -> str:
    return " / ".join(f"{number:,}" for number in numbers)


def _tokenizer(settings: LanguageModelSettings) -> Work:
    if settings.unit == "byte":
        return _bytes
    lang = settings.language
    of_pairs = Settings(
        source=lang, target=lang, lower=settings.lower, tokenizer=settings.tokenizer
    )
    return tokens.tokenizer(of_pairs, lang)


def _bytes(text: bytes) -> bytes:
    lines = text.removesuffix(b"\n").split(b"\n")
    return b"".join(line.hex(" ").encode() + b"\n" for line in lines)


def _unknown(folder: Path) -> dict[str, object]:
    """Size of fairseq's dictionary without its own symbols, and the share of <unk> in each
    split.
    """
    lines = (folder / "dict.txt").read_text("utf-8").splitlines()
    counts: dict[str, object] = {}
    counts["vocabulary"] = sum(not line.startswith("madeupword") for line in lines)
    for text, share in unknown_shares(folder).items():
        counts[f"{text.removesuffix('.txt')}.unk_percent"] = share
    return counts
