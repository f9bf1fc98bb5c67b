"""``pn prepare CORPUS``: from published text to fairseq's binary data, by the recipe of the corpus."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType

from pn_fairseq.common.command import ArgumentParser, UserError, say_next, whole
from pn_fairseq.pipeline.data import subwords
from pn_fairseq.pipeline.data.preparation import Complete, Preparation
from pn_fairseq.pipeline.data.recipes import RECIPES, load

#: What the system reports where no more can be written, and where nothing can -> what helps.
_FULL, _ELSEWHERE = "make room and run the same command again", "name another directory (--dest)"
ADVICE = {
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT, errno.EFBIG), _FULL),
    **dict.fromkeys((errno.EROFS, errno.ENOTDIR, errno.EEXIST), _ELSEWHERE),
}
#: The options of every recipe, or of several, that are not arguments of its ``prepare``.
OWN = ("workers", "check", "mirror", "segmentation", "moses")
EPILOG = """\
The same command resumes. Line counts are checked after every step. --dest gets
  raw/  the text before tokenization    tok/  tokens, as they are scored
  bpe/  subwords (of translations)      bin/  fairseq's binary data, with one dictionary
  settings.txt, counts.txt, and with cleaning removed.tsv: which pairs were removed and why; text/ has all pairs
"""
#: Options of the recipes that download files, and of those that learn subwords.
MIRROR = {"--mirror": {"metavar": "DIR-OR-URL", "help": "a folder, or the URL of one, that has the files to download"}}
SEGMENTATION = "the kind of subwords (default subword-nmt); with sentencepiece, --bpe is the size of the vocabulary"
MOSES = "a checkout of mosesdecoder whose Perl scripts replace sacremoses"
TOOLS = {
    "--segmentation": {"choices": [*subwords.MODELS], "default": "subword-nmt", "help": SEGMENTATION},
    "--moses": {"metavar": "DIR", "type": Path, "help": MOSES},
}
#: Variables of earlier versions -> the options.
REPLACED = {"MOSES": "--moses DIR", "BPE": "--segmentation sentencepiece", "DATA_MIRROR": "--mirror DIR-OR-URL"}


def options_of(recipe: ModuleType) -> dict[str, dict]:
    """The options of a recipe: flag -> arguments of add_argument."""
    options = recipe.OPTIONS
    return options | (MIRROR if "--archive" in options else {}) | (TOOLS if "--bpe" in options else {})


def replaced_by(options: Mapping[str, dict]) -> dict[str, str]:
    """The variables of earlier versions that some of these options replace."""
    return {variable: option for variable, option in REPLACED.items() if option.split()[0] in options}


def _parser() -> ArgumentParser:
    about = "From published text to fairseq's binary data. CORPUS may be a recipe of yours: FILE.py."
    parser = ArgumentParser(prog="pn prepare", description=about)
    corpora = parser.add_subparsers(dest="recipe", required=True, metavar="CORPUS", parser_class=ArgumentParser)
    for name, recipe in RECIPES.items():
        options = options_of(recipe)
        corpus = corpora.add_parser(
            name,
            help=recipe.__doc__.splitlines()[0],
            description=recipe.__doc__,
            epilog=EPILOG,
            replaced=replaced_by(options),
        )
        where = f"default runs/data/{recipe.CONFIG}" if recipe.CONFIG else "it must be given"
        dest = f"the prepared data ({where})"
        corpus.add_argument("--dest", type=Path, metavar="DIR", help=dest, required=not recipe.CONFIG)
        for flag, kind in options.items():
            corpus.add_argument(flag, **kind)
        check = "only refuse a DIR that was made with other settings"
        corpus.add_argument("--check", action="store_true", help=check)
        cores = len(os.sched_getaffinity(0))
        corpus.add_argument("--workers", type=whole, default=cores, metavar="N", help="processes (default: all cores)")
    return parser


def main(argv: list[str]) -> None:
    if argv and argv[0].endswith(".py"):
        argv = [load(argv[0]), *argv[1:]]
    values = vars(_parser().parse_args(argv))
    recipe, dest = RECIPES[values.pop("recipe")], values.pop("dest")
    if not values["check"] and "corpus" in values and not Path(values["corpus"]).is_dir():
        raise UserError(f"there is no directory '{values['corpus']}' (--corpus)")
    try:
        own = {name: values.pop(name) for name in OWN if name in values}
        with contextlib.suppress(Complete), Preparation(dest, **own) as data:
            recipe.prepare(data, **values)
        if not own["check"]:
            where = ["--data", dest] if dest else []
            say_next("prepare", "train", recipe.CONFIG or "CONFIG", *where)
    except OSError as error:
        if error.errno not in ADVICE:
            raise
        place = error.filename or dest or "runs/data"
        raise UserError(f"{place}: {error.strerror}; {ADVICE[error.errno]}") from None
