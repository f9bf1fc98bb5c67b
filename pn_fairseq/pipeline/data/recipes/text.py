"""Parallel text of your own: six files of train, valid and test.

Takes train, valid and test in both languages from --corpus (train.es, train.en, ... one sentence a line, UTF-8, plain
or .gz), tokenizes and, unless --keep-case is given, lower-cases it.
"""

from pathlib import Path

from pn_fairseq.common.command import UserError
from pn_fairseq.pipeline.data.preparation import CORPUS, KEEP_CASE, Preparation, bpe

CONFIG = ""
SOURCE = "the language to translate from, as in the names of the files"
OPTIONS = {
    **CORPUS,
    "--source": {"metavar": "LANG", "required": True, "help": SOURCE},
    "--target": {"metavar": "LANG", "required": True, "help": "the language to translate to"},
    **bpe(10000),
    **KEEP_CASE,
}


def prepare(data: Preparation, corpus: str, source: str, target: str, bpe: int, keep_case: bool) -> None:
    if source == target:
        raise UserError(f"--source and --target are both '{source}'")
    data.begin(CONFIG, source=source, target=target, lower=int(not keep_case), bpe=bpe)
    data.prepare_folder(Path(corpus).absolute())
