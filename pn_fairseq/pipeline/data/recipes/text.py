"""Parallel text of your own: six files of train, valid and test.

Takes train, valid and test in both languages from --corpus (train.es, train.en, ... one sentence a line, UTF-8, plain,
.gz or .xz), tokenizes and, unless --keep-case is given, lower-cases it. With --tokenized it takes text that others have
prepared, in tokens or in subwords of them, as it is. With --like it prepares text for a model that was trained on other
data, to continue its training (checkpoint.finetune_from_model).
"""

import json
import re
from pathlib import Path

from pn_fairseq.common.command import UserError
from pn_fairseq.pipeline.data import pairs, subwords
from pn_fairseq.pipeline.data.binarize import SPLITS
from pn_fairseq.pipeline.data.preparation import CORPUS, KEEP_CASE, Preparation, bpe
from pn_fairseq.pipeline.data.tokens import NONE

CONFIG = ""
SOURCE = "the language to translate from, as in the names of the files (with --like: that of DATA)"
TOKENIZED = "the text is in tokens, or in subwords that end in @@ where a word goes on: take it as it is"
CODES = "apply the merges in this file of subword-nmt, or name those of text in subwords, instead of learning --bpe N"
PROTECT = "regular expressions, one a line, of text such as <2en> that neither tokenization nor subwords may change"
LIKE = "take languages, settings, subwords and dictionary of this prepared data, for a model that was trained on it"
MERGES = 10000
OPTIONS = {
    **CORPUS,
    "--source": {"metavar": "LANG", "help": SOURCE},
    "--target": {"metavar": "LANG", "help": "the language to translate to"},
    "--bpe": {**bpe(MERGES)["--bpe"], "default": None},
    "--codes": {"metavar": "FILE", "type": Path, "help": CODES},
    "--tokenized": {"action": "store_true", "help": TOKENIZED},
    "--protect": {"metavar": "FILE", "type": Path, "help": PROTECT},
    **KEEP_CASE,
    "--like": {"metavar": "DATA", "type": Path, "help": LIKE},
}


def patterns(file: Path) -> str:
    """The setting ``protect`` of a file with regular expressions."""
    lines = [line.strip() for line in pairs.lines(file)]
    for number, line in enumerate(lines, 1):
        try:
            groups = re.compile(line).groups
        except re.error as error:
            raise UserError(f"{file}: line {number} is not a regular expression ({error})") from None
        if groups:
            raise UserError(f"{file}: line {number} has a group: write (?:...) for (...), and \\( for a bracket")
    if not any(lines):
        raise UserError(f"{file} has no regular expression (--protect)")
    return json.dumps([line for line in lines if line])


def prepare(
    data: Preparation, corpus: str, source: str | None, target: str | None, like: Path | None, **options
) -> None:
    codes = options["codes"]
    if like:
        if given := [f"--{name.replace('_', '-')}" for name, value in options.items() if value]:
            raise UserError(f"--like takes the settings of '{like}': leave out {' and '.join(given)}")
        data.begin_like(like, source=source, target=target)
    else:
        if not (source and target):
            raise UserError("--source and --target are required (without --like)")
        if source == target:
            raise UserError(f"--source and --target are both '{source}'")
        settings = {"tokenizer": NONE} if options["tokenized"] else {}
        settings |= {"protect": patterns(options["protect"])} if options["protect"] else {}
        size = subwords.count_merges(codes) if codes else options["bpe"] or MERGES
        lower = int(not options["keep_case"])
        data.begin(CONFIG, source=source, target=target, lower=lower, bpe=size, **settings)
    folder = Path(corpus).absolute()
    if data.settings["tokenizer"] == NONE:
        sides = data.settings["source"], data.settings["target"]
        data.prepare_tokens({split: [folder / f"{split}.{lang}" for lang in sides] for split in SPLITS}, codes)
    else:
        data.prepare_folder(folder, codes=codes)
