"""Which mask a norm of a converted model uses: the numbers here are those of the lines of the table
in docs/own_model.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache

from pn_fairseq.norms.masks.padding import Block, PaddingMask, Scope

GIVEN = 1
BLOCK = 2
ARGUMENT = 4
NONE = 5
TWO = 7
OF_TARGET = 8
NOTHING = 12

#: Beginnings of the names of arguments that belong to the target of an encoder-decoder model.
TARGET_NAMES = ("tgt", "trg", "target", "decoder", "dec_", "prev_output")

#: Beginnings of the names of masks for what a module attends to.
ATTENDED_NAMES = ("src", "source", "encoder", "enc_", "memory", "mem_", "context", "key_")


class Arguments(Scope):
    """The forward of a module, some of whose arguments may hold masks.

    Args:
        hook: the :class:`.ArgumentHook` of the module.
        read: returns the masks, name of the argument -> mask or None, and in words the arguments
            whose values are not in a mask's form. It is called once, when a norm asks.
        attends: whether the module attends to other tokens, such as the output of an encoder.
    """

    def __init__(
        self,
        hook,
        read: Callable[[], tuple[dict[str, PaddingMask | None], list[str]]],
        attends: bool,
    ):
        super().__init__()
        self.hook = hook
        self.attends = attends
        self._read = cache(read)  # also for copies of the scope

    def masks(self) -> dict[str, PaddingMask | None]:
        return self._read()[0]

    def unread(self) -> list[str]:
        return self._read()[1]


@dataclass(frozen=True)
class Found:
    """The result of the search for a mask.

    Attributes:
        line: line of the table.
        where: where the mask was found, or why there is none, in words.
        is_unread: whether an argument that may hold a mask holds something else.
        mask: the mask; None: there is none.
        scope: the scope in which the search ended.
    """

    line: int
    where: str
    mask: PaddingMask | None = None
    scope: Scope | None = None
    is_unread: bool = False


def find_mask(norm: str, conversion_id: str, scopes: list[Scope]) -> Found:
    """The mask of the innermost block that is for ``norm``, else :func:`find_argument`.

    Args:
        norm: name of the norm.
        conversion_id: id of the :class:`.Conversion` whose hooks are asked.
        scopes: the scopes, innermost first.

    Raises:
        ValueError: two arguments of one module hold a mask.
    """
    for scope in scopes:
        if isinstance(scope, Block) and scope.is_for(norm):
            given = "padding(None)" if scope.mask is None else scope.mask.source
            return Found(BLOCK, f"a block with {given}", scope.mask, scope)
    found = find_argument(conversion_id, scopes)
    if found.line == TWO:
        raise ValueError(
            f"{found.where} both hold a mask, and nothing says which is for its tokens: name one "
            "(convert_norms(mask_from=...)), or run each part of the model in its own `with "
            "padding(...)`"
        )
    return found


def find_argument(conversion_id: str, scopes: Iterable[Scope]) -> Found:
    """The mask of the innermost module with an argument for a mask.

    An argument that is None ends the search, because the masks of modules around may be for other
    tokens. For the same reason, around a module that attends to other tokens, the masks of a module
    that does not are ignored unless their names say that they are the target's.
    """
    attends = False
    unread = []
    for scope in scopes:
        if not isinstance(scope, Arguments) or scope.hook.conversion_id != conversion_id:
            continue
        masks = scope.masks()
        unread += scope.unread()
        is_outside = attends and not scope.attends
        if is_outside:
            masks = {name: mask for name, mask in masks.items() if name.startswith(TARGET_NAMES)}
        given = [name for name, mask in masks.items() if mask is not None]
        if len(given) > 1:
            where = f"arguments {' and '.join(given)} of {scope.hook.module}"
            return Found(TWO, where, scope=scope)
        if given:
            mask = masks[given[0]]
            return Found(OF_TARGET if is_outside else ARGUMENT, mask.source, mask, scope)
        if masks:
            return Found(NONE, "; ".join(scope.unread()) or _all_none(scope, masks), scope=scope)
        attends = attends or scope.attends
    if unread:
        return Found(NOTHING, "; ".join(unread), is_unread=True)
    return Found(NOTHING, "no block, and no argument of a module")


def _all_none(scope: Arguments, names: dict[str, None]) -> str:
    what = f"{' and '.join(names)} of {scope.hook.module}"
    if len(names) == 1:
        return f"argument {what} is None"
    return f"arguments {what} are None"


def hidden_mask(conversion_id: str, scopes: Iterable[Scope]) -> PaddingMask | None:
    """The mask that :func:`find_argument` finds; None also for an unreadable value, since a block
    replaces it.
    """
    try:
        return find_argument(conversion_id, scopes).mask
    except ValueError:
        return None


def masks_around(found: Found) -> list[PaddingMask]:
    """The masks that an argument that is None hides, from modules around it that attend to the same
    tokens.
    """
    masks: list[PaddingMask] = []
    for scope in found.scope.around():
        if not isinstance(scope, Arguments) or scope.attends != found.scope.attends:
            continue
        try:
            masks += [mask for mask in scope.masks().values() if mask is not None]
        except ValueError:  # an unreadable value says nothing
            continue
    return masks
