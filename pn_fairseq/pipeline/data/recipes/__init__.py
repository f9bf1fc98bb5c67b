"""The corpora that ``pn prepare`` knows: one module for each, to be read from top to bottom.

A recipe is a module with
  a docstring            what --help prints; its first line is in the list of the corpora
  CONFIG                 the configuration that trains on it, which is also the name of its folder in runs/data
  OPTIONS                its options, beside --dest and --workers
  prepare(data, ...)     the steps in their order: methods of Preparation. The values of the options are its arguments
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass

from pn_fairseq.pipeline.data.preparation import Option


@dataclass(frozen=True)
class Recipe:
    """How a corpus is prepared."""

    about: str
    config: str  # "": --dest must be given
    options: tuple[Option, ...]
    prepare: Callable[..., None]


def _recipe(name: str) -> Recipe:
    module = importlib.import_module(f"{__name__}.{name}")
    return Recipe(module.__doc__, module.CONFIG, module.OPTIONS, module.prepare)


#: Name of the corpus -> its recipe.
RECIPES = {module.name: _recipe(module.name) for module in pkgutil.iter_modules(__path__)}
