"""Parallel text of your own: six files of train, valid and test.

Takes train, valid and test in both languages from --corpus (train.es, train.en, ... one sentence a line, UTF-8, plain
or .gz), tokenizes and, unless --keep-case is given, lower-cases it.
"""

from pn_fairseq.pipeline.data.preparation import CORPUS, KEEP_CASE, Option, Preparation, bpe, need_text

CONFIG = ""
OPTIONS = (
    CORPUS,
    Option("--source", "LANG", "the language to translate from, as in the names of the files", needed=True),
    Option("--target", "LANG", "the language to translate to", needed=True),
    bpe(10000),
    KEEP_CASE,
)


def prepare(data: Preparation, corpus: str, source: str, target: str, bpe: str, keep_case: bool) -> None:
    names = [f"{split}.{lang}" for split in ("train", "valid", "test") for lang in (source, target)]
    folder = need_text(corpus, *names)
    data.begin(CONFIG, source=source, target=target, lower=int(not keep_case), bpe=bpe)
    data.take_folder(folder)
    data.tokenize("raw", "tok")
    data.segment()
    data.binarize()
