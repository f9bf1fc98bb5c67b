"""Parallel text of your own: train, valid and test in both languages.

Reads train, valid and test in both languages from --corpus (train.es, train.en, ..., one sentence
per line, UTF-8, plain, .gz or .xz), tokenizes and, unless --keep-case is given, lower-cases the
text. Further test sets are test1.*, test2.*, and so on; --test NAME adds one to data that is
prepared already. With --tokenized, the text already consists of tokens or subwords and is not
changed. With --like, the text is prepared for a model that was trained on other data, to continue
its training (checkpoint.finetune_from_model).
"""

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from pn_fairseq.common.command import UserError, absolute, say, shown
from pn_fairseq.pipeline.data import pairs, subwords
from pn_fairseq.pipeline.data.binarize import SPLITS
from pn_fairseq.pipeline.data.folder import CORPUS, KEEP_CASE, DataFolder, Settings, bpe
from pn_fairseq.pipeline.data.settings import MOSES, NONE, SACREMOSES, check_prepared, read

CONFIG = ""
TRAIN = "own_text"  # the configuration that pn prepare advises
SOURCE = "the language to translate from, as in the names of the files (with --like: that of DATA)"
TOKENIZED = (
    "the text consists of tokens, or of subwords that end in @@ inside a word: do not change it"
)
CODES = (
    "merges of subword-nmt to apply, or by which the text was already split (default: learn --bpe "
    "N of them)"
)
PROTECT = (
    "regular expressions, one per line, of text such as <2en> that neither tokenization nor "
    "subwords may change"
)
LIKE = (
    "use languages, settings, subwords and dictionary of this prepared data, for a model that was "
    "trained on it"
)
TEST = (
    "only add the test set NAME (NAME.fr, NAME.en, ... in --corpus) to the data --dest, which is "
    "prepared already"
)
#: Options whose values --like and --test take from other data.
GIVEN = ("bpe", "codes", "tokenized", "protect", "keep_case")
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
    "--test": {"metavar": "NAME", "help": TEST},
}


def patterns(file: Path) -> list[str]:
    """The setting ``protect`` of a file with regular expressions."""
    lines = [line.strip() for line in pairs.lines(file)]
    for number, line in enumerate(lines, 1):
        try:
            groups = re.compile(line).groups
        except re.error as error:
            raise UserError(
                f"{file}: line {number} is not a regular expression ({error})"
            ) from None
        if groups:
            raise UserError(
                f"{file}: line {number} has a group: write (?:...) for (...), and \\( for a bracket"
            )
    if not any(lines):
        raise UserError(f"{file} has no regular expression (--protect)")
    return [line for line in lines if line]


def settings_of_prepared(data: Path, option: str, options) -> Settings:
    """The settings of prepared data, which ``option`` names; other options must not change them."""
    given = [f"--{name.replace('_', '-')}" for name in GIVEN if getattr(options, name)]
    if given:
        raise UserError(f"{option} takes the settings of '{data}': leave out {' and '.join(given)}")
    check_prepared(data, "--dest" if option == "--test" else option)
    made_with = read(data / "settings.txt")
    chosen = {name: getattr(options, name) for name in ("source", "target", "segmentation")}
    chosen["tokenizer"] = MOSES if options.moses else None
    for name, value in chosen.items():
        old = getattr(made_with, name)
        if value not in (None, old):
            raise UserError(f"'{data}' has {name}={old}, not {value} ({option})")
    return made_with


def settings(options) -> Settings:
    if options.like and options.test:
        raise UserError("--test adds to the data --dest: leave out --like")
    if options.test:
        if not re.fullmatch(r"[A-Za-z0-9][\w-]*", options.test) or options.test in SPLITS:
            raise UserError(
                f"--test {options.test}: name it as its files, NAME.LANG, and other than train, "
                "valid, test"
            )
        return settings_of_prepared(options.dest, "--test", options)
    if options.like:
        if options.like == options.dest:
            raise UserError(
                f"--like and --dest are both '{options.dest}', whose data would be replaced: name "
                "another --dest"
            )
        # Cleaning and the choice of the validation set do not belong to the model.
        return replace(
            settings_of_prepared(options.like, "--like", options), clean=(), valid_every=0
        )
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


def test_sets(folder: Path, dest: Path, languages: Sequence[str]) -> list[str]:
    """The further test sets in a folder: test1, test2, ... A note names other files whose names
    begin with test.

    Raises:
        UserError: a number is missing, which fairseq-preprocess does not allow.
    """
    files = [file for lang in languages for file in folder.glob(f"test*.{lang}*")]
    names = {file.name.partition(".")[0] for file in files} - {"test"}
    numbered = sorted(
        (name for name in names if re.fullmatch("test[1-9][0-9]?", name)),
        key=lambda name: int(name[4:]),
    )
    for number, name in enumerate(numbered, 1):
        if name != f"test{number}":
            raise UserError(
                f"{folder} has {name}, but no test{number}: number them from 1, or add it later by "
                "--test"
            )
    for name in sorted(names - {*numbered}):
        command = shown(["prepare", "text", "--corpus", folder, "--dest", dest, "--test", name])
        say("prepare", f"note: {folder}/{name}.* is left out; to add it afterwards: {command}")
    return numbered


def prepare(data: DataFolder, options) -> None:
    if options.test:
        data.splits = [options.test]
        data.add_test(options.corpus)
        return
    data.splits = [*SPLITS, *test_sets(options.corpus, data.dest, data.settings.endings)]
    data.prepare_folder(options.corpus, codes=options.codes)
