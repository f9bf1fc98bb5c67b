"""The corpora that ``pn prepare`` knows: one module for each, to be read from top to bottom.

A recipe is a module with
  a docstring            what --help prints; its first line is in the list of the corpora
  CONFIG                 the configuration that trains on it, which is also the name of its folder in runs/data;
                         "": --dest must be given
  OPTIONS                its options, in addition to --dest and --workers: flag -> arguments of add_argument
  prepare(data, ...)     the steps in their order: methods of Preparation. The values of the options are its arguments
"""

import importlib
import pkgutil

#: Name of the corpus -> its recipe.
RECIPES = {
    module.name: importlib.import_module(f"{__name__}.{module.name}") for module in pkgutil.iter_modules(__path__)
}
