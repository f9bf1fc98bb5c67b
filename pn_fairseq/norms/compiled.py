"""Norms inside ``torch.compile``: an operator that calls a module as without the compiler, and one for its gradient.

The compiler sees the operators and not what they do. When the compiled graph runs, the eager code runs in them: state,
masks and contributions are handled there and nowhere else. An operator finds a module by a number in a tensor, so that
layers of one class share a compiled graph.

- A forward changes no state, so the compiler may compute it again: activation checkpointing counts a step once.
- ``call_gradient`` contributes to the state. It has an ordered effect: it is never removed, repeated or reordered.
- CUDA graphs, which replay no Python, leave both out.
"""

import itertools
import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn
from torch._higher_order_ops.effects import _EffectType, _register_effectful_op
from torch.autograd.graph import GradientEdge, get_gradient_edge, saved_tensors_hooks

_library = torch.library.Library("pn_fairseq", "FRAGMENT")
_numbers = itertools.count()
_objects: WeakValueDictionary[int, object] = WeakValueDictionary()

#: The scopes (:class:`.padding.Scope`) of the modules that compiled code runs in, the innermost last, as tickets.
open_scopes: list[Tensor] = []


#: The operators run Python, which CUDA graphs do not replay, and take any strides. torch 2.8 does not know all tags.
_TAGS = [getattr(torch.Tag, name) for name in ("cudagraph_unsafe", "flexible_layout") if hasattr(torch.Tag, name)]


class _Memory(bytearray):
    """The memory of a tensor that keeps ``content`` alive."""

    content: object


def handle_of(thing: object) -> Tensor:
    """A tensor by which :func:`find` finds ``thing``, as long as something else keeps ``thing`` alive."""
    number = next(_numbers)
    _objects[number] = thing
    return torch.tensor(number, device="cpu")


def ticket_of(content: object) -> Tensor:
    """A tensor by which :func:`find` finds ``content``, which lives as long as the memory of the tensor."""
    number = next(_numbers)
    memory = _Memory(number.to_bytes(8, sys.byteorder))
    memory.content = content
    _objects[number] = memory
    return torch.frombuffer(memory, dtype=torch.int64)


def ticket() -> Tensor:
    """What the compiler takes for :func:`ticket_of`."""
    return torch.empty(1, dtype=torch.int64, device="cpu")


def find(tensor: Tensor):
    """The object of :func:`handle_of` or :func:`ticket_of`."""
    thing = _objects.get(int(tensor))
    if thing is None:
        raise RuntimeError(
            "a compiled norm of pn_fairseq cannot find what its forward kept: hooks on saved tensors, such as "
            "save_on_cpu, must not copy its tensors of whole numbers"
        )
    return thing.content if isinstance(thing, _Memory) else thing


def operator(schema: str, fake: Callable) -> Callable[[Callable], Callable]:
    """Decorator: make a function of real tensors an operator. ``fake`` gives results for the compiler."""

    def define(function: Callable) -> Callable:
        name = schema.partition("(")[0]
        _library.define(schema, tags=_TAGS)
        _library.impl(name, function, "CompositeExplicitAutograd")
        _library.impl(name, torch.library.fallthrough_kernel, "Autograd")
        torch.library.register_fake(f"pn_fairseq::{name}", fake, lib=_library)
        return getattr(torch.ops.pn_fairseq, name).default

    return define


def _like(x: Tensor) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@dataclass(slots=True)
class _Step:
    """The autograd graph of a forward, without its x: the compiler may overwrite that memory and compute x again.

    Attributes:
        output: where the gradient enters the graph.
        inputs: the tensors that get a gradient.
        given: holds x while :func:`call_gradient` runs.
    """

    output: GradientEdge
    inputs: list[Tensor]
    given: list[Tensor]


@operator(
    "call(Tensor x, Tensor? padding_mask, Tensor? scope, Tensor module, Tensor[] parameters, bool differentiable, "
    "bool grad_enabled, Tensor unique) -> (Tensor y, Tensor step)",
    lambda x, *_: (_like(x), ticket()),
)
def call(x, padding_mask, scope, module, parameters, differentiable, grad_enabled, unique):
    """``module.forward(x, padding_mask)`` in ``scope``, and what :func:`call_gradient` needs.

    ``parameters``: those that get a gradient. ``differentiable``: x gets one. ``unique``: a tensor from torch.empty,
    which the compiler never takes for another one, so that it does not take two calls with equal arguments for one.
    """
    module, given = find(module), []

    def pack(tensor: Tensor) -> Tensor | None:
        if tensor.untyped_storage().data_ptr() != x.untyped_storage().data_ptr():
            return tensor
        return None if tensor.shape == x.shape and tensor.stride() == x.stride() else tensor.clone()

    def unpack(saved: Tensor | None) -> Tensor:
        return given[0] if saved is None else saved

    within = nullcontext() if scope is None else find(scope)
    # A dispatch mode, under which torch calls operators while it watches them, excludes autograd from them.
    recording = torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.AutogradFunctionality, False)
    with within, recording, torch.set_grad_enabled(grad_enabled), saved_tensors_hooks(pack, unpack):
        leaf = x.detach().requires_grad_(differentiable)
        y = module.forward(leaf, None if padding_mask is None else padding_mask.clone())
        step = None
        if y.requires_grad:
            own = [parameter for parameter in module.parameters() if parameter.requires_grad]
            if [parameter.data_ptr() for parameter in own] != [parameter.data_ptr() for parameter in parameters]:
                raise RuntimeError("a compiled norm of pn_fairseq cannot train parameters that are not its own")
            step = _Step(get_gradient_edge(y), [leaf] * differentiable + own, given)
    leaf.data = leaf.new_empty(0)  # the graph keeps the leaf
    y = y.detach().contiguous()
    return y if pack(y) is y else y.clone(), ticket_of(step)


@operator(
    "call_gradient(Tensor dy, Tensor x, Tensor[] parameters, Tensor step, bool differentiable) -> Tensor[]",
    lambda dy, x, parameters, _, differentiable: [_like(tensor) for tensor in [x] * differentiable + parameters],
)
def call_gradient(dy, x, parameters, step, differentiable):
    """The gradients of x, if ``differentiable``, and of the parameters; the state gets its contribution."""
    step = find(step)
    step.given.append(x)
    try:
        gradients = torch.autograd.grad(step.output, step.inputs, dy, retain_graph=True, allow_unused=True)
    finally:
        step.given.clear()
    return [
        torch.zeros_like(tensor) if gradient is None else gradient.contiguous()
        for tensor, gradient in zip([x] * differentiable + parameters, gradients, strict=True)
    ]


_register_effectful_op(call_gradient, _EffectType.ORDERED)


class _Call(torch.autograd.Function):
    """``call`` with its gradient. The parameters are saved so that torch notices a change before the backward pass."""

    @staticmethod
    def forward(ctx, x, padding_mask, scope, module, differentiable, *parameters):
        unique = torch.empty(1, device="cpu")
        y, step = call(x, padding_mask, scope, module, parameters, differentiable, True, unique)
        ctx.save_for_backward(x, step, *parameters)
        ctx.differentiable = differentiable
        return y

    @staticmethod
    def backward(ctx, dy):
        x, step, *parameters = ctx.saved_tensors
        gradients = call_gradient(dy, x, parameters, step, ctx.differentiable)
        dx, *gradients = gradients if ctx.differentiable else [None, *gradients]
        return dx, None, None, None, None, *gradients


def compiled_call(module: nn.Module, x: Tensor, padding_mask: Tensor | None) -> Tensor:
    """``module.forward(x, padding_mask)``, which the compiler does not look into.

    The module has a tensor ``handle`` (:func:`handle_of`). y is contiguous, in the shape and dtype of x.
    """
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    scope = open_scopes[-1] if open_scopes else None
    grad_enabled = torch.is_grad_enabled()
    if grad_enabled and (x.requires_grad or parameters):
        return _Call.apply(x, padding_mask, scope, module.handle, x.requires_grad, *parameters)
    return call(x, padding_mask, scope, module.handle, [], False, grad_enabled, torch.empty(1, device="cpu"))[0]
