"""``pn prepare CORPUS``: from published text to fairseq's binary data, by the recipe of the corpus."""

from __future__ import annotations

import argparse
import contextlib
import errno
import os
from pathlib import Path

from pn_fairseq.common.command import ArgumentParser, UserError, command, say, whole
from pn_fairseq.pipeline.data.preparation import Complete, Preparation
from pn_fairseq.pipeline.data.recipes import RECIPES, Recipe

MIRROR = "  DATA_MIRROR=DIR-OR-URL    a folder or URL that has the files to download\n"
TOOLS = """\
  MOSES=DIR                 a checkout of mosesdecoder whose Perl scripts replace sacremoses
  BPE=subword-nmt           (default) or sentencepiece, for which --bpe is the size of the vocabulary
"""


def _add_options(parser: ArgumentParser, recipe: Recipe) -> None:
    where = f"default runs/data/{recipe.config}" if recipe.config else "it must be given"
    parser.add_argument(
        "--dest", type=Path, metavar="DIR", help=f"the prepared data ({where})", required=not recipe.config
    )
    for option in recipe.options:
        kind = {"metavar": option.metavar, "type": option.type, "default": option.default, "required": option.needed}
        parser.add_argument(option.flag, help=option.help, **(kind if option.metavar else {"action": "store_true"}))
    cores = len(os.sched_getaffinity(0))
    parser.add_argument("--workers", type=whole, default=cores, metavar="N", help="processes (default: all cores)")


def _parser() -> ArgumentParser:
    about = "From published text to fairseq's binary data. The same command resumes."
    parser = ArgumentParser(prog="pn prepare", description=about)
    corpora = parser.add_subparsers(dest="recipe", required=True, metavar="CORPUS", parser_class=ArgumentParser)
    for name, recipe in RECIPES.items():
        flags = {option.flag for option in recipe.options}
        variables = (MIRROR if "--archive" in flags else "") + (TOOLS if "--bpe" in flags else "")
        corpus = corpora.add_parser(
            name,
            help=recipe.about.splitlines()[0],
            description=recipe.about,
            epilog="The same command resumes. Line counts are checked after every step."
            + (f"\n\nIn the environment:\n{variables}" if variables else ""),
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        _add_options(corpus, recipe)
    return parser


@command("pn prepare")
def main(argv: list[str] | None = None) -> None:
    args = _parser().parse_args(argv)
    recipe = RECIPES[args.recipe]
    values = {option.name: getattr(args, option.name) for option in recipe.options}
    try:
        with contextlib.closing(Preparation(args.dest, args.workers)) as data:
            recipe.prepare(data, **values)
    except Complete:
        say("prepare", f"{data.dest} is complete")
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise
        place = error.filename or args.dest or "runs/data"
        raise UserError(f"{place}: {error.strerror}; make room and run the same command again") from None
