"""Text of your own for language modeling: three files, train.txt, valid.txt and test.txt.

Takes train.txt, valid.txt and test.txt from --corpus (one sentence or paragraph a line, UTF-8, plain or .gz). A token
in counts.txt is a word, or with --unit byte a byte, or the end of a line.
"""

from pathlib import Path

from pn_fairseq.common.command import whole
from pn_fairseq.pipeline.data import language_model
from pn_fairseq.pipeline.data.binarize import SPLITS
from pn_fairseq.pipeline.data.preparation import CORPUS, Preparation

CONFIG = ""
SPLIT = "split punctuation as Moses does for this language (default: the text has tokens)"
RARE = "words that are rarer in train become <unk> (default 1)"
OPTIONS = {
    **CORPUS,
    "--tokenize": {"metavar": "LANG", "default": "", "help": SPLIT},
    "--lower": {"action": "store_true", "help": "lower-case"},
    **language_model.UNIT,
    "--min-count": {"metavar": "N", "type": whole, "default": 1, "help": RARE},
}


def prepare(data: Preparation, corpus: str, tokenize: str, lower: bool, unit: str, min_count: int) -> None:
    folder = Path(corpus).absolute()
    data.open(CONFIG, language_model.settings(folder.name, unit, tokenize, lower, min_count))
    language_model.prepare(data, [folder / f"{split}.txt" for split in SPLITS])
