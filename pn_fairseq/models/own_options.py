"""Options of single norms (``--norm-options``): read from text, and checked against the constructors of the norms."""

import re
from argparse import ArgumentTypeError
from collections.abc import Mapping
from typing import get_args

from omegaconf import BooleanNode, FloatNode, IntegerNode, OmegaConf, StringNode, ValidationError

from pn_fairseq.common.command import did_you_mean
from pn_fairseq.norms.registry import SHARED, NormEntry, find_norm

#: Type of a constructor argument -> what converts a value to it, and its name in messages.
_TYPES = {
    str: (StringNode, "a text"),
    bool: (BooleanNode, "true or false"),
    int: (IntegerNode, "a whole number"),
    float: (FloatNode, "a number"),
}


def read_options(text: str) -> dict[str, object]:
    """``KEY=VALUE[,KEY=VALUE]`` as a dict of texts; ``NORM.KEY=VALUE`` is an entry of a dict ``NORM`` in it.

    A value can contain commas, as in ``detach=mean,std``.

    Raises:
        ArgumentTypeError: the text does not have that form.
    """
    options: dict[str, object] = {}
    for part in re.split(r",(?=[\w.-]+=)", text):
        key, _, value = part.partition("=")
        norm, dot, option = key.rpartition(".")
        of_norm = options.setdefault(norm, {}) if dot else options
        if not (option and value and (norm or not dot) and isinstance(of_norm, dict)):
            raise ArgumentTypeError(f"{part!r} is not KEY=VALUE")
        of_norm[option] = value
    return options


def options_of(norm: str, options: Mapping[str, object]) -> dict[str, object]:
    """The options for one norm: those for every norm, and those for this norm only."""
    only = options.get(norm)
    common = {key: value for key, value in options.items() if not isinstance(value, Mapping)}
    return {**common, **(only if isinstance(only, Mapping) else {})}


def resolve_options(
    given: object, old: Mapping[str, object], norms: Mapping[str, NormEntry], updates: int
) -> dict[str, object]:
    """The options of a model's norms, with the schedules that are a part of the run unless they are given.

    Args:
        given, norms: see :func:`check_options`.
        old: ``norm_options.KEY`` -> value, from settings of an earlier version. It had a flag for each option, which
            norms without the option ignored.
        updates: length of the run in optimizer updates; 0: not known.

    Raises:
        ValueError: see :func:`check_options`.
    """
    options = check_options(given or {}, norms)
    for key, value in old.items():
        option = key.removeprefix("norm_options.")
        if any(option in entry.own_options for entry in norms.values()):
            options.setdefault(option, value)
    for name, entry in norms.items():
        for option, argument in entry.own_options.items():
            if option in options_of(name, options):
                continue
            if updates and option in entry.parts_of_run:
                options[option] = round(entry.parts_of_run[option] * updates)
            elif argument.default is argument.empty and option != "groups":
                raise ValueError(f"the norm {name} needs the norm option {option}")
    return options


def check_options(given: object, norms: Mapping[str, NormEntry]) -> dict[str, object]:
    """The options in the types of the constructors' arguments.

    Args:
        given: text as for :func:`read_options`, or option -> value, and name of a norm -> options of this norm only.
            A value None is left out.
        norms: the norms of a model.

    Raises:
        ValueError: no norm of the model has an option, or a value has another type. The constructors check ranges.
    """
    if OmegaConf.is_config(given):
        given = OmegaConf.to_container(given, resolve=True)
    try:
        given = read_options(given) if isinstance(given, str) else dict(given)
    except (ArgumentTypeError, TypeError, ValueError):
        raise ValueError(f"norm_options={given!r} is not KEY=VALUE[,KEY=VALUE]") from None
    options: dict[str, object] = {}
    for key, value in given.items():
        if isinstance(value, Mapping):
            options[key] = check_options(value, {key: find_norm(key)})
        elif value is not None:
            options[key] = _converted(str(key), value, norms)
    return options


def _converted(option: str, value: object, norms: Mapping[str, NormEntry]) -> object:
    if option in SHARED:
        raise ValueError(f"norm option {option!r} belongs to all norms: it has the flag {SHARED[option]}")
    arguments = [entry.own_options[option] for entry in norms.values() if option in entry.own_options]
    if not arguments:
        known = sorted({name for entry in norms.values() for name in entry.own_options})
        have = f"the options of {', '.join(norms)} are {', '.join(known) or 'none'}"
        raise ValueError(f"unknown norm option {option!r}{did_you_mean(option, known)} ({have}; see pn norms NAME)")
    argument = arguments[0]
    types = [type(argument.default)] if argument.annotation is argument.empty else _types(argument.annotation)
    kind = next((kind for kind in types if kind in _TYPES), None)
    if kind is None or isinstance(value, (list, tuple)):
        return value
    convert, wanted = _TYPES[kind]
    try:
        return convert(value)._value()
    except ValidationError:
        raise ValueError(f"norm option {option}={value!r} is not {wanted}") from None


def _types(annotation: object) -> tuple:
    """The types in an annotation, such as ``int | None``; a text where the module postpones annotations."""
    if isinstance(annotation, str):
        return tuple(kind for kind in _TYPES if re.search(rf"\b{kind.__name__}\b", annotation))
    return get_args(annotation) or (annotation,)
