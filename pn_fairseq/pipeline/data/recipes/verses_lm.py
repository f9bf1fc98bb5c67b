"""The English verses for language modeling: the corpus in the repository, split by book.

Checks data/verses.es-en against its checksums, puts its English verses in the order of the text and
splits them by book: validation is Ezekiel, test is Daniel to Malachi, train is the other 52 books.
Tokenizes as Moses does and lower-cases; words that occur once or twice in train become <unk>. With
--unit byte the text stays as it is, and DIR is verses_lm_en_bytes. The data is for `pn train
verses_lm_en`.
"""

import re
from pathlib import Path

from pn_fairseq.pipeline.data import language_model
from pn_fairseq.pipeline.data.binarize import SPLITS
from pn_fairseq.pipeline.data.experiment import Experiment
from pn_fairseq.pipeline.data.folder import DataFolder, LanguageModelSettings
from pn_fairseq.pipeline.data.pairs import as_is
from pn_fairseq.pipeline.data.recipes import verses
from pn_fairseq.pipeline.data.settings import SACREMOSES

CONFIG = "verses_lm_en"
_NORMS = ("ln", "ln+layer_scale_groups=4", "gn", "bn", "brn", "mabn", "pnv", "pn")
REPRODUCE = Experiment(CONFIG, "tiny", models=("transformer_lm", "tensorized_lm"), norms=_NORMS)
OPTIONS = language_model.UNIT

#: The books for validation and test, neighbours in the order of the text; all other books are for
#: training.
BOOKS = {
    "valid": ("Ezekiel",),
    "test": (
        "Daniel",
        "Hosea",
        "Joel",
        "Amos",
        "Obadiah",
        "Jonah",
        "Micah",
        "Nahum",
        "Habakkuk",
        "Zephaniah",
        "Haggai",
        "Zechariah",
        "Malachi",
    ),
}


def split_by_book(corpus: Path, folder: Path) -> list[Path]:
    """Write the English verses to files in ``folder``, in the order of the text, split by
    :data:`BOOKS`.

    The splits of ``corpus``, data/verses.es-en, interleave verses: its train contains neighbours of
    its test verses.
    """
    verses_of: dict[str, list[tuple[int, int, str]]] = {}  # book -> chapter, number, verse
    for split in SPLITS:
        references, verses = (as_is(corpus / f"{split}.{kind}") for kind in ("refs", "en"))
        for reference, verse in zip(references, verses, strict=True):
            book, chapter, number = re.fullmatch(r"(.+) (\d+):(\d+)\n", reference).groups()
            verses_of.setdefault(book, []).append((int(chapter), int(number), verse))
    split_of = {book: split for split, books in BOOKS.items() for book in books}
    folder.mkdir()
    texts = {split: folder / f"{split}.txt" for split in SPLITS}
    for book, verses in verses_of.items():
        with texts[split_of.get(book, "train")].open("ab") as text:
            text.writelines(verse.encode() for *_, verse in sorted(verses))
    return [*texts.values()]


def folder(options) -> str:
    return CONFIG if options.unit == "word" else f"{CONFIG}_bytes"


def settings(options) -> LanguageModelSettings:
    if options.unit == "byte":
        return LanguageModelSettings(corpus="verses", unit="byte")
    return LanguageModelSettings(
        corpus="verses", language="en", tokenizer=SACREMOSES, lower=True, min_count=3
    )


def prepare(data: DataFolder, options) -> None:
    language_model.prepare(data, split_by_book(verses.corpus(), data.partial / "unpacked"))
