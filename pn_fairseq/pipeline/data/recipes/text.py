"""Parallel text of your own: six files of train, valid and test.

Reads train, valid and test in both languages from --corpus (train.es, train.en, ..., one sentence per line, UTF-8,
plain, .gz or .xz), tokenizes and, unless --keep-case is given, lower-cases the text. With --tokenized, the text already
consists of tokens or subwords and is not changed. With --like, the text is prepared for a model that was trained on
other data, to continue its training (checkpoint.finetune_from_model).
"""

import re
from dataclasses import replace
from pathlib import Path

from pn_fairseq.common.command import UserError, absolute
from pn_fairseq.pipeline.data import pairs, subwords
from pn_fairseq.pipeline.data.binarize import SPLITS
from pn_fairseq.pipeline.data.preparation import CORPUS, KEEP_CASE, Preparation, Settings, bpe
from pn_fairseq.pipeline.data.settings import MOSES, NONE, SACREMOSES, read

CONFIG = ""
SOURCE = "the language to translate from, as in the names of the files (with --like: that of DATA)"
TOKENIZED = "the text consists of tokens, or of subwords that end in @@ inside a word: do not change it"
CODES = "merges of subword-nmt to apply, or by which the text was already split (default: learn --bpe N of them)"
PROTECT = "regular expressions, one per line, of text such as <2en> that neither tokenization nor subwords may change"
LIKE = "use languages, settings, subwords and dictionary of this prepared data, for a model that was trained on it"
MERGES = 10000
OPTIONS = {
    **CORPUS,
    "--source": {"metavar": "LANG", "help": SOURCE},
    "--target": {"metavar": "LANG", "help": "the language to translate to"},
    "--bpe": {**bpe(MERGES)["--bpe"], "default": None},
    "--codes": {"metavar": "FILE", "type": absolute, "help": CODES},
    "--tokenized": {"action": "store_true", "help": TOKENIZED},
    "--protect": {"metavar": "FILE", "type": absolute, "help": PROTECT},
    **KEEP_CASE,
    "--like": {"metavar": "DATA", "type": absolute, "help": LIKE},
}


def patterns(file: Path) -> list[str]:
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
    return [line for line in lines if line]


def settings_like(options) -> Settings:
    """The settings of other prepared data. How it was cleaned and what it is validated on are not the model's."""
    data, own = options.like, ("bpe", "codes", "tokenized", "protect", "keep_case")
    if given := [f"--{name.replace('_', '-')}" for name in own if getattr(options, name)]:
        raise UserError(f"--like takes the settings of '{data}': leave out {' and '.join(given)}")
    made_with = read(data / "settings.txt")
    if not (data / "bin").is_dir():
        raise UserError(f"'{data}' is no prepared data of a translation corpus (--like)")
    chosen = {name: getattr(options, name) for name in ("source", "target", "segmentation")}
    chosen["tokenizer"] = MOSES if options.moses else None
    for name, value in chosen.items():
        if value not in (None, old := getattr(made_with, name)):
            raise UserError(f"'{data}' has {name}={old}, not {value} (--like)")
    return replace(made_with, clean=(), valid_every=0)


def settings(options) -> Settings:
    if options.like:
        return settings_like(options)
    if not (options.source and options.target):
        raise UserError("--source and --target are required (without --like)")
    if options.source == options.target:
        raise UserError(f"--source and --target are both '{options.source}'")
    return Settings(
        source=options.source,
        target=options.target,
        lower=not options.keep_case,
        bpe=subwords.count_merges(options.codes) if options.codes else options.bpe or MERGES,
        tokenizer=NONE if options.tokenized else SACREMOSES,
        protect=patterns(options.protect) if options.protect else [],
    )


def prepare(data: Preparation, options) -> None:
    if data.settings.tokenizer == NONE:
        sides = data.settings.endings
        texts = {split: [options.corpus / f"{split}.{lang}" for lang in sides] for split in SPLITS}
        data.prepare_tokens(texts, options.codes)
    else:
        data.prepare_folder(options.corpus, codes=options.codes)
