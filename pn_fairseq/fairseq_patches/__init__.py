"""Patches of fairseq, one file each: what fairseq gets wrong, and what it does not tell the norms.

:func:`apply` runs when fairseq loads this plugin's models (``--user-dir``) and changes functions of fairseq for the
rest of the process. ``PN_FAIRSEQ_NO_PATCHES=1`` turns all patches off. A patch whose function takes other arguments
than in the fairseq that it was written for is left out with a warning. ``python -m pn_fairseq --info`` lists them.
"""

import ast
import functools
import importlib
import inspect
import warnings
from collections.abc import Callable
from pathlib import Path

from pn_fairseq.common.environment import patches_enabled


def patches() -> dict[str, str]:
    """Name of each patch -> the first sentence of its docstring. Imports neither torch nor fairseq."""
    files = sorted(Path(__file__).parent.glob("[a-z]*.py"))
    docstrings = {file.stem: ast.get_docstring(ast.parse(file.read_text("utf-8"))) for file in files}
    return {name: docstring.partition("\n\n")[0].replace("\n", " ") for name, docstring in docstrings.items()}


def apply() -> None:
    """Apply all patches, unless they are turned off."""
    if patches_enabled():
        for name in patches():
            importlib.import_module(f"{__name__}.{name}")


def patch(owner, name: str, parameters: str) -> Callable[[Callable], Callable]:
    """Decorator: ``wrapper(original, ...)`` replaces the function ``owner.name``.

    Args:
        owner: a module or class of fairseq.
        name: of a function in it.
        parameters: the names of the function's parameters, separated by spaces. If they differ, nothing is replaced.
    """

    def replace(wrapper: Callable) -> Callable:
        original = getattr(owner, name)
        found = " ".join(inspect.signature(original).parameters)
        if found != parameters:
            warnings.warn(
                f"{wrapper.__module__} is not applied: {owner.__name__}.{name} of this fairseq takes ({found}) instead "
                f"of ({parameters})",
                stacklevel=2,
            )
        elif patches_enabled():

            @functools.wraps(original)
            def function(*args, **kwargs):
                return wrapper(original, *args, **kwargs)

            setattr(owner, name, function)
        return wrapper

    return replace
