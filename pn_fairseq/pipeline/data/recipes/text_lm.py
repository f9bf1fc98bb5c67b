"""Text of your own for language modeling: three files, train.txt, valid.txt and test.txt.

Takes train.txt, valid.txt and test.txt from --corpus (one sentence or paragraph a line, UTF-8, plain or .gz). A token
in counts.txt is a word, or with --unit byte a byte, or the end of a line.
"""

from pn_fairseq.common.command import whole
from pn_fairseq.pipeline.data import language_model
from pn_fairseq.pipeline.data.preparation import CORPUS, Option, Preparation, need_text

CONFIG = ""
OPTIONS = (
    CORPUS,
    Option(
        "--tokenize", "LANG", "split punctuation as Moses does for this language (default: the text has tokens)", ""
    ),
    Option("--lower", "", "lower-case"),
    language_model.UNIT,
    Option("--min-count", "N", "words that are rarer in train become <unk> (default 1)", 1, type=whole),
)

FILES = [f"{split}.txt" for split in ("train", "valid", "test")]


def prepare(data: Preparation, corpus: str, tokenize: str, lower: bool, unit: str, min_count: int) -> None:
    folder = need_text(corpus, *FILES)
    data.open(CONFIG)
    texts = [folder / name for name in FILES]
    language_model.prepare(data, folder.name, texts, tokenize, lower, min_count, unit=unit)
