"""The corpora that ``pn prepare`` knows: one module for each, to be read from top to bottom.

A recipe is a module, here or in a file of a user (``pn prepare FILE.py``), with these names:

a docstring
    what ``--help`` prints; its first line appears in the list of corpora
``CONFIG``
    the configuration that trains on the corpus, and the name of its folder in runs/data; "":
    ``--dest`` must be given
``TRAIN``
    if ``CONFIG`` is "": the configuration that ``pn prepare`` advises
``OPTIONS``
    its options, in addition to ``--dest`` and ``--workers``: flag -> arguments of ``add_argument``
``REPRODUCE``
    the models that ``pn reproduce`` trains on the corpus, an ``Experiment``; a user's own text has
    none. In a user's file its configuration may be the path of a YAML file, relative to the recipe.
``settings(options)``
    how the data is made, a ``Settings``; ``options`` holds the values of all options
``prepare(data, options)``
    the steps in their order: methods of ``DataFolder``
``folder(options)``
    if it depends on the options: the name of the data's folder in runs/data, instead of ``CONFIG``
"""

import importlib
import pkgutil
from dataclasses import replace

from pn_fairseq.common.command import UserError, absolute
from pn_fairseq.common.errors import run_file

#: Name of the corpus -> its recipe.
RECIPES = {
    module.name: importlib.import_module(f"{__name__}.{module.name}")
    for module in pkgutil.iter_modules(__path__)
}


def load(file: str) -> str:
    """Add the recipe in a user's file to :data:`RECIPES`, and return its name, that of the file."""
    path = absolute(file)
    if not path.is_file():
        raise UserError(f"there is no recipe '{file}'")
    known = RECIPES.get(path.stem)
    if known and known.__file__ != str(path):
        raise UserError(
            f"'{file}' has the name of another recipe, '{known.__file__}'; give the file another "
            "name"
        )
    try:
        recipe = run_file(path, f"pn_fairseq_recipe_{path.stem}")
    except ValueError as error:
        raise UserError(f"{file}: {error}") from error
    for name in ("__doc__", "CONFIG", "OPTIONS", "settings", "prepare"):
        if getattr(recipe, name, None) is None:
            raise UserError(f"{file} is no recipe: it has no {name} (docs/adding_a_corpus.md)")
    experiment = getattr(recipe, "REPRODUCE", None)
    if experiment and experiment.config.endswith((".yaml", ".yml")):
        recipe.REPRODUCE = replace(experiment, config=str(path.parent / experiment.config))
    RECIPES[path.stem] = recipe
    return path.stem


def command_name(name: str) -> str:
    """The name of a recipe in ``pn prepare``: its own, or the path of a user's file."""
    recipe = RECIPES[name]
    return name if recipe.__package__ == __name__ else recipe.__file__
