"""Patches of fairseq: what fairseq gets wrong, and what it does not tell the norms.

:func:`apply` runs when ``pn_fairseq.models`` is imported, as ``--user-dir`` does, and changes
functions of fairseq for the rest of the process. Each function of fairseq is replaced in one place,
which lists what happens in which order. ``PN_FAIRSEQ_NO_PATCHES=1`` turns all patches off. A patch
is skipped, with a warning, if the parameters of its function differ from those in the fairseq for
which the patch was written. ``pn info`` lists the patches.
"""

import ast
import functools
import importlib
import inspect
import os
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

#: The environment variable that turns off the patches.
SWITCH = "PN_FAIRSEQ_NO_PATCHES"

#: The files of the patches, in the order in which they are applied.
ORDER = (
    # What today's NumPy and torch need.
    "numpy_2",
    "checkpoints",
    # From the command line to the model.
    "composition",
    "command_line",
    "starting",
    "convert_norms",
    "one_line_errors",
    # Training.
    "training",
    "adaptive_loss",
    "layer_drop",
    "moving_average",
    # Data, decoding and evaluation.
    "batches",
    "several_files",
    "decoding",
    "eval_lm_blocks",
)


def patches_enabled() -> bool:
    """Whether the environment leaves the patches on."""
    return os.environ.get(SWITCH, "0") in ("", "0")


def patches() -> dict[str, str]:
    """Name of each patch -> the first sentence of its docstring.

    Imports neither torch nor fairseq.
    """
    sentences = {}
    for name in ORDER:
        source = Path(__file__).with_name(f"{name}.py").read_text("utf-8")
        sentences[name] = (
            ast.get_docstring(ast.parse(source)).partition("\n\n")[0].replace("\n", " ")
        )
    return sentences


def apply() -> None:
    """Apply all patches, unless they are turned off."""
    if patches_enabled():
        for name in ORDER:
            importlib.import_module(f"{__name__}.{name}")


def running_program(name: str) -> ModuleType | None:
    """The module of fairseq's program ``name``, even if Python runs it with ``-m``; None if it is
    not imported.
    """
    main = sys.modules["__main__"]
    return main if getattr(main.__spec__, "name", None) == name else sys.modules.get(name)


def patch(owner, name: str, parameters: str) -> Callable[[Callable], Callable]:
    """Decorator: ``wrapper(original, ...)`` replaces the function ``owner.name``.

    Args:
        owner: a module or class of fairseq.
        name: name of a function in ``owner``.
        parameters: the names of the function's parameters, separated by spaces. If they differ,
            nothing is replaced.

    Raises:
        RuntimeError: another patch has already replaced the function.
    """

    def replace(wrapper: Callable) -> Callable:
        original = getattr(owner, name)
        earlier = getattr(original, "patched_by", None)
        if earlier is not None and name in vars(owner):  # an inherited patch may be patched again
            raise RuntimeError(
                f"{owner.__name__}.{name} is patched by {earlier}, and again by "
                f"{wrapper.__module__}"
            )
        actual = " ".join(inspect.signature(original).parameters)
        if actual != parameters:
            warnings.warn(
                f"{wrapper.__module__} is not applied: {owner.__name__}.{name} of this fairseq "
                f"takes ({actual}) instead of ({parameters})",
                stacklevel=2,
            )
        elif patches_enabled():  # the pipeline imports some of these modules for their functions

            @functools.wraps(original)
            def function(*args, **kwargs):
                return wrapper(original, *args, **kwargs)

            function.patched_by = wrapper.__module__
            setattr(owner, name, function)
        return wrapper

    return replace
