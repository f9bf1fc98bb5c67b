"""Options of norms as text, read once, in the types of the constructors' arguments."""

import inspect
import re
from collections.abc import Mapping
from typing import get_args

from pn_fairseq.common.errors import most_similar
from pn_fairseq.norms.registry import SHARED, NormEntry, check_option, find_norm

_TRUTH = {
    "true": True,
    "yes": True,
    "on": True,
    "1": True,
    "false": False,
    "no": False,
    "off": False,
    "0": False,
}


def _whole(value: object) -> int:
    if type(value) not in (int, str):
        raise ValueError
    return int(value)


def _number(value: object) -> float:
    if type(value) not in (int, float, str):
        raise ValueError
    return float(value)


#: Type of a constructor's argument -> what converts a value to it, and its name in messages.
_TYPES = {
    str: (str, "a text"),
    bool: (lambda value: _TRUTH[str(value).lower()], "true or false"),
    int: (_whole, "a whole number"),
    float: (_number, "a number"),
}


def read_pairs(text: str) -> dict[str, object]:
    """``KEY=VALUE[,KEY=VALUE]`` as a dict of texts; ``NORM.KEY=VALUE`` is an entry of a dict
    ``NORM`` in it.

    A value can contain commas, as in ``detach=mean,std``.

    Raises:
        ValueError: the text does not have that form.
    """
    options: dict[str, object] = {}
    for part in re.split(r",(?=[\w.-]+=)", text):
        key, _, value = part.partition("=")
        norm, dot, option = key.rpartition(".")
        of_norm = options.setdefault(norm, {}) if dot else options
        if not (option and value and (norm or not dot) and isinstance(of_norm, dict)):
            raise ValueError(f"{part!r} is not KEY=VALUE")
        of_norm[option] = value
    return options


def typed(option: str, value: object, argument: inspect.Parameter) -> object:
    """A value in the type of the constructor's argument: the type of its annotation, else that of
    its default.

    Raises:
        ValueError: the value does not have that type. The constructors check ranges.
    """
    if argument.annotation is argument.empty:
        kinds = (type(argument.default),)
    else:
        kinds = _kinds(argument.annotation)
    kind = next((kind for kind in kinds if kind in _TYPES), None)
    if kind is None or isinstance(value, (list, tuple)):
        return value
    convert, wanted = _TYPES[kind]
    try:
        return convert(value)
    except (KeyError, ValueError):
        raise ValueError(f"norm option {option}={value!r} is not {wanted}") from None


def _kinds(annotation: object) -> tuple:
    """The types in an annotation, such as ``int | None``; the annotation is a text if the module
    postpones annotations.
    """
    if isinstance(annotation, str):
        words = re.findall(r"\w+", annotation)
        return tuple(kind for kind in _TYPES if kind.__name__ in words)
    return get_args(annotation) or (annotation,)


def parse_options(given: object, norms: Mapping[str, NormEntry]) -> dict[str, object]:
    """The options of the norms of a model, in the types of the constructors' arguments.

    Args:
        given: text as for :func:`read_pairs`, or option -> value, and name of a norm -> options of
            this norm only. Values that are None are left out.
        norms: the norms of the model.

    Raises:
        ValueError: no norm of the model accepts an option, or a value has another type.
    """
    try:
        given = read_pairs(given) if isinstance(given, str) else dict(given)
    except (TypeError, ValueError):
        raise ValueError(f"norm_options={given!r} is not KEY=VALUE[,KEY=VALUE]") from None
    options: dict[str, object] = {}
    for key, value in given.items():
        if isinstance(value, Mapping):
            options[key] = parse_options(value, {key: find_norm(key)})
        elif value is not None:
            options[key] = typed(key, value, _argument(str(key), norms))
    return options


def _argument(option: str, norms: Mapping[str, NormEntry]) -> inspect.Parameter:
    if option in SHARED:
        raise ValueError(
            f"norm option {option!r} belongs to all norms: it has the flag {SHARED[option]}"
        )
    known = {}
    for entry in norms.values():
        known |= entry.own_options
    meant = most_similar(option, [*known, *SHARED])
    if option not in known and meant in SHARED:
        raise ValueError(f"unknown norm option {option!r}, did you mean the flag {SHARED[meant]}?")
    return check_option(option, known, f"the options of {', '.join(norms)} are")


def options_of(norm: str, options: Mapping[str, object]) -> dict[str, object]:
    """The options for one norm: those for every norm, and those for this norm only."""
    only = options.get(norm)
    common = {key: value for key, value in options.items() if not isinstance(value, Mapping)}
    if isinstance(only, Mapping):
        return common | dict(only)
    return common
