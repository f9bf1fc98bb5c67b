"""``pn prepare CORPUS``: from published text to fairseq's binary data, by the recipe of the
corpus.
"""

from __future__ import annotations

from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from types import ModuleType

from pn_fairseq.common.command import ArgumentParser, UserError, absolute, say, say_next, whole
from pn_fairseq.common.files import check_can_be_folder, check_file, check_folders, scratch_folder
from pn_fairseq.pipeline.data import languages, pairs, settings, subwords, tokens
from pn_fairseq.pipeline.data.folder import DataFolder, locked
from pn_fairseq.pipeline.data.recipes import RECIPES, load
from pn_fairseq.pipeline.data.settings import LanguageModelSettings, Settings
from pn_fairseq.pipeline.machine import own_cores

EPILOG = """\
The same command resumes. Line counts are checked after every step. --dest then contains
  raw/  the text before tokenization    tok/  tokens, as they are scored
  bpe/  subwords (of translations)      bin/  fairseq's binary data, with one dictionary
  settings.txt, counts.txt, and with cleaning removed.tsv: which pairs were removed and why; text/
  with all pairs
"""


#: Options of recipes that download files, and of recipes that learn subwords.
MIRROR = {
    "--mirror": {
        "metavar": "DIR-OR-URL",
        "help": "a folder that contains the files to download, or its URL",
    }
}
SEGMENTATION = (
    "the kind of subwords (default subword-nmt); with sentencepiece, --bpe is the size of the "
    "vocabulary"
)
MOSES = "a checkout of mosesdecoder whose Perl scripts replace sacremoses"
TOOLS = {
    "--segmentation": {"choices": [*subwords.MODELS], "help": SEGMENTATION},
    "--moses": {"metavar": "DIR", "type": absolute, "help": MOSES},
}


def options_of_recipe(recipe: ModuleType) -> dict[str, dict]:
    """The options of a recipe: flag -> arguments of add_argument."""
    options = recipe.OPTIONS
    return (
        options | (MIRROR if "--archive" in options else {}) | (TOOLS if "--bpe" in options else {})
    )


def _parser() -> ArgumentParser:
    description = (
        "Turn published text into fairseq's binary data. CORPUS may be a recipe of yours, FILE.py."
    )
    parser = ArgumentParser(prog="pn prepare", description=description)
    corpora = parser.add_subparsers(
        dest="recipe", required=True, metavar="CORPUS", parser_class=ArgumentParser
    )
    for name, recipe in RECIPES.items():
        title = recipe.__doc__.splitlines()[0]
        corpus = corpora.add_parser(name, help=title, description=recipe.__doc__, epilog=EPILOG)
        where = f"default runs/data/{recipe.CONFIG}" if recipe.CONFIG else "required"
        dest = f"the prepared data ({where})"
        corpus.add_argument(
            "--dest", type=absolute, metavar="DIR", help=dest, required=not recipe.CONFIG
        )
        for flag, kind in options_of_recipe(recipe).items():
            corpus.add_argument(flag, **kind)
        check = "only check that DIR was not made with other settings"
        corpus.add_argument("--check", action="store_true", help=check)
        corpus.add_argument(
            "--workers",
            type=whole,
            default=own_cores(),
            metavar="N",
            help="processes (default: all cores)",
        )
    return parser


def main(argv: list[str]) -> None:
    if argv and argv[0].endswith(".py"):
        argv = [load(argv[0]), *argv[1:]]
    if argv and argv[0] not in ("-h", "--help", "--version") and argv[0].startswith("-"):
        raise UserError(f"the corpus comes before {argv[0]}: pn prepare CORPUS (see --help)")
    options = _parser().parse_args(argv)
    recipe = RECIPES[options.recipe]
    if "corpus" in options:
        # a user's recipe may declare another type
        options.corpus = absolute(options.corpus)
        if not options.check:
            check_folders([options.corpus], "--corpus")
    for option in ("codes", "protect"):
        file = getattr(options, option, None)
        if file:
            check_file(file, f"--{option}", pairs.COMPRESSED)
    made_with = with_tools(recipe.settings(options), options)
    name = recipe.folder(options) if hasattr(recipe, "folder") else recipe.CONFIG
    dest = options.dest or absolute(Path("runs/data", name))
    check_can_be_folder(dest, "--dest")
    if dest == getattr(options, "corpus", None):
        raise UserError(f"--corpus and --dest are both '{dest}': name another --dest")
    if (dest / "config.yaml").is_file():
        raise UserError(f"--dest '{dest}' is a run of pn train: name another folder")
    settings.check(dest, made_with.as_text(), {})  # before anything is downloaded
    if options.check:
        return
    package = languages.missing_package(getattr(made_with, "target", ""))
    if package:
        say(
            "prepare",
            f"note: detokenized BLEU of {made_with.target} needs: pip install '{package}'",
        )
    given = {name: getattr(options, name, None) for name in ("moses", "mirror", "archive", "like")}
    data = DataFolder(dest, made_with, options.workers, **given)
    try:
        with locked(dest), scratch_folder(data.partial):
            recipe.prepare(data, options)
    except OSError as error:  # an error while writing may not name the file
        raise UserError(f"{error.filename or dest}: {error.strerror or error}") from None
    if getattr(options, "test", None):
        say_next("prepare", "generate", "--run", "RUN", "--subset", options.test)
        return
    config = getattr(recipe, "TRAIN", recipe.CONFIG) or "CONFIG"
    if hasattr(recipe, "REPRODUCE"):
        config = recipe.REPRODUCE.config
    command = ["train", config]
    if options.dest:
        command += ["--data", options.dest]
    if getattr(options, "like", None):  # the next training continues another one
        command += ["--run", "NEW-RUN"]
        command += ["checkpoint.finetune_from_model=RUN/checkpoints/averaged.pt"]
    say_next("prepare", *command)


def with_tools(
    made_with: Settings | LanguageModelSettings, options: Namespace
) -> Settings | LanguageModelSettings:
    """The settings of a recipe with the tools that the user chose."""
    moses, segmentation = (getattr(options, name, None) for name in ("moses", "segmentation"))
    if segmentation:
        made_with = replace(made_with, segmentation=segmentation)
    if moses and made_with.tokenizer not in (settings.SACREMOSES, settings.MOSES):
        raise UserError("--moses: this text comes in tokens; leave the option out")
    if moses:
        made_with = replace(made_with, tokenizer=settings.MOSES)
    if made_with.tokenizer == settings.MOSES:
        tokens.checkout(made_with, moses)
    return made_with
