"""Parallel text of your own: six files of train, valid and test.

Takes train, valid and test in both languages from --corpus (train.es, train.en, ... one sentence a line, UTF-8, plain
or .gz), tokenizes and, unless --keep-case is given, lower-cases it. With --tokenized it takes text that others have
prepared, in tokens or in subwords of them, as it is.
"""

from pathlib import Path

from pn_fairseq.common.command import UserError
from pn_fairseq.pipeline.data import subwords
from pn_fairseq.pipeline.data.binarize import SPLITS
from pn_fairseq.pipeline.data.preparation import CORPUS, KEEP_CASE, Preparation, bpe
from pn_fairseq.pipeline.data.tokens import NONE

CONFIG = ""
SOURCE = "the language to translate from, as in the names of the files"
TOKENIZED = "the text is in tokens, or in subwords that end in @@ where a word goes on: take it as it is"
CODES = "apply the merges in this file of subword-nmt, or name those of text in subwords, instead of learning --bpe N"
OPTIONS = {
    **CORPUS,
    "--source": {"metavar": "LANG", "required": True, "help": SOURCE},
    "--target": {"metavar": "LANG", "required": True, "help": "the language to translate to"},
    **bpe(10000),
    "--codes": {"metavar": "FILE", "type": Path, "help": CODES},
    "--tokenized": {"action": "store_true", "help": TOKENIZED},
    **KEEP_CASE,
}


def prepare(
    data: Preparation,
    corpus: str,
    source: str,
    target: str,
    bpe: int,
    codes: Path | None,
    tokenized: bool,
    keep_case: bool,
) -> None:
    if source == target:
        raise UserError(f"--source and --target are both '{source}'")
    size = subwords.count_merges(codes) if codes else bpe
    tokenizer = {"tokenizer": NONE} if tokenized else {}
    data.begin(CONFIG, source=source, target=target, lower=int(not keep_case), bpe=size, **tokenizer)
    folder = Path(corpus).absolute()
    if tokenized:
        texts = {split: [folder / f"{split}.{lang}" for lang in (source, target)] for split in SPLITS}
        data.prepare_tokens(texts, codes)
    else:
        data.prepare_folder(folder, codes=codes)
