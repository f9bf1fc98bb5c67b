"""Norms inside ``torch.compile``: operators for what the compiler must not trace.

A training step is traced: its forward, its backward and the update of the state are operators on
tensors. The operators here do what depends on when the compiled graph runs. An operator that must
find a module gets its number in a tensor, and not in a constant, so that layers of one class share
a compiled graph.
"""

import itertools
import sys
from collections.abc import Callable
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from pn_fairseq.norms.core.passes import (
    inside_backward,
    is_recomputation,
    refuse_captured_recomputation,
)

_library = torch.library.Library("pn_fairseq", "FRAGMENT")
_numbers = itertools.count()
_objects: WeakValueDictionary[int, object] = WeakValueDictionary()

#: Tickets of the scopes (:class:`.padding.Scope`) of the modules in which compiled code runs, the
#: innermost last.
open_scopes: list[Tensor] = []


def _tags(*names: str) -> list[torch.Tag]:
    """The tags with these names that this version of torch knows."""
    return [getattr(torch.Tag, name) for name in names if hasattr(torch.Tag, name)]


class _Memory(bytearray):
    """The memory of a tensor that keeps ``content`` alive."""

    content: object


def handle_of(thing: object) -> Tensor:
    """A tensor by which :func:`find` finds ``thing``, as long as something else keeps ``thing``
    alive.
    """
    number = next(_numbers)
    _objects[number] = thing
    return torch.tensor(number, device="cpu")


def ticket_of(content: object) -> Tensor:
    """A tensor by which :func:`find` finds ``content``, and whose memory keeps it alive."""
    number = next(_numbers)
    memory = _Memory(number.to_bytes(8, sys.byteorder))
    memory.content = content
    _objects[number] = memory
    return torch.frombuffer(memory, dtype=torch.int64)


def ticket() -> Tensor:
    """The compiler's stand-in for :func:`ticket_of`."""
    return torch.empty(1, dtype=torch.int64, device="cpu")


def find(tensor: Tensor):
    """The object given to :func:`handle_of` or :func:`ticket_of`."""
    thing = _objects.get(int(tensor))
    if thing is None:
        raise RuntimeError(
            "a compiled norm of pn_fairseq cannot find what its forward kept: hooks on saved "
            "tensors, such as save_on_cpu, must not copy its tensors of whole numbers"
        )
    if isinstance(thing, _Memory):
        return thing.content
    return thing


def operator(schema: str, fake: Callable, captured: bool = False) -> Callable[[Callable], Callable]:
    """Decorator: turn a function of real (not fake) tensors, which may have any strides, into an
    operator. It has no derivative: the autograd functions of the norms call it.

    ``fake`` returns results for the compiler. ``captured``: a CUDA graph need only replay what the
    function launched; otherwise the function must run.
    """
    tags = _tags("flexible_layout") if captured else _tags("flexible_layout", "cudagraph_unsafe")

    def define(function: Callable) -> Callable:
        name = schema.partition("(")[0]
        _library.define(schema, tags=tags)
        _library.impl(name, function, "CompositeExplicitAutograd")
        _library.impl(name, torch.library.fallthrough_kernel, "Autograd")
        torch.library.register_fake(f"pn_fairseq::{name}", fake, lib=_library)
        return getattr(torch.ops.pn_fairseq, name).default

    return define


def _like(seen: list[Tensor], state: list[Tensor]) -> list[Tensor]:
    return [torch.empty_like(tensor) for tensor in state]


@operator("look(Tensor[] seen, Tensor[] state) -> Tensor[]", _like, captured=True)
def look(seen, state):
    """Copies of the ``state`` of a norm that a forward reads, as :meth:`.StatefulNorm.read_state`
    returns them.

    ``seen`` holds what the last forward outside of a backward pass read. The compiler repeats this
    operator in a backward graph that recomputes a forward. One operator copies all that a step
    reads, because the compiler would move a separate copy that only the backward needs behind the
    update of the state.
    """
    if inside_backward():
        refuse_captured_recomputation(seen[0])
    else:
        for memory, tensor in zip(seen, state, strict=True):
            # through data: autograd has saved the memory for graphs that need not read it again
            memory.data.copy_(tensor)
    return [tensor.clone() for tensor in seen]


@operator("counts_now(Tensor count) -> Tensor", torch.empty_like, captured=True)
def counts_now(count):
    """``count``, the number of real tokens of a step that no backward reaches; 0 if its forward is
    repeated.
    """
    if is_recomputation():
        return torch.zeros_like(count)
    return count.clone()


@operator(
    "scaled(Tensor norm, Tensor number) -> Tensor",
    lambda _, number: torch.empty((), device=number.device),
)
def scaled(norm, number):
    """The loss scale of a norm, on the device of ``number``."""
    scale = find(norm).current_loss_scale()
    if scale is None:
        return torch.ones((), device=number.device)
    return scale.clone()


@operator(
    "after(Tensor value, Tensor[] others) -> Tensor",
    lambda value, _: torch.empty_like(value),
    captured=True,
)
def after(value, others):
    """``value``, which for the compiler also depends on ``others``: a forward that needs ``value``
    computes them.
    """
    return value.clone()
