"""Norms inside ``torch.compile``: an operator for the training step of a norm with state, and one for its gradient.

The compiler sees the operators and not what they do. When the compiled graph runs, the forward and backward of
:class:`.Training` run in them: state and contributions are handled there and nowhere else. An operator finds a module
by a number in a tensor, so that layers of one class share a compiled graph.

- A forward changes no state, so the compiler may compute it again: activation checkpointing counts a step once.
- ``step_gradient`` contributes to the state. It has an ordered effect: it is never removed, repeated or reordered.
- CUDA graphs, which replay no Python, leave both out.
"""

import itertools
import sys
from collections.abc import Callable
from functools import partial
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn
from torch._higher_order_ops.effects import _EffectType, _register_effectful_op

from pn_fairseq.norms.tokens import Training

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


class _Step:
    """Takes the place of the context of :class:`.Training`. The compiler keeps x and the parameters, or computes them
    again and overwrites their memory; a step keeps the rest."""

    kept: tuple[Tensor | None, ...] | None = None

    def save_for_backward(self, x, weight, bias, padding, inv_rms, *further):
        self.kept = padding, inv_rms


@operator(
    "step(Tensor x, Tensor? weight, Tensor? bias, Tensor? padding_mask, Tensor[] further, Tensor norm, bool counts, "
    "Tensor unique) -> (Tensor y, Tensor step)",
    lambda x, *_: (_like(x), ticket()),
)
def step(x, weight, bias, padding_mask, further, norm, counts, unique):
    """``norm.training_step``, and what :func:`step_gradient` needs.

    ``counts``: the step counts without a backward. ``unique``: a tensor from torch.empty, which the compiler never
    takes for another one, so that it does not take two calls with equal arguments for one.
    """
    norm, context = find(norm), _Step()
    norm.check_memory()
    padding_mask = None if padding_mask is None else padding_mask.clone()
    with torch.set_grad_enabled(counts):
        y = norm.training_step(partial(Training.forward, context), x, weight, bias, padding_mask, further)
    return y.contiguous(), ticket_of(context)


@operator(
    "step_gradient(Tensor dy, Tensor x, Tensor? weight, Tensor? bias, Tensor[] further, Tensor step) -> Tensor[]",
    lambda dy, *inputs: [_like(tensor) for tensor in _differentiable(*inputs)],
)
def step_gradient(dy, x, weight, bias, further, step):
    """The gradients of x and of the parameters that are not None; the state gets its contribution."""
    context = find(step)
    if context.kept is None:
        raise RuntimeError("recalibrating() a compiled model has no gradient: run it under torch.no_grad()")
    context.saved_tensors = x, weight, bias, *context.kept, *further
    try:
        gradients = Training.backward(context, dy)
    finally:
        del context.saved_tensors
    return [gradient.contiguous() for gradient in gradients if gradient is not None]


def _differentiable(x, weight, bias, further, _):
    return [x, *further] if weight is None else [x, weight, bias, *further]


_register_effectful_op(step_gradient, _EffectType.ORDERED)


class _CompiledTraining(torch.autograd.Function):
    """``step`` with its gradient."""

    @staticmethod
    def forward(ctx, x, weight, bias, padding_mask, norm, *further):
        y, context = step(x, weight, bias, padding_mask, further, norm, False, torch.empty(1, device="cpu"))
        ctx.save_for_backward(x, weight, bias, context, *further)
        return y

    @staticmethod
    def backward(ctx, dy):
        x, weight, bias, context, *further = ctx.saved_tensors
        dx, *gradients = step_gradient(dy, x, weight, bias, further, context)
        dweight, dbias, *gradients = gradients if weight is not None else (None, None, *gradients)
        return dx, dweight, dbias, None, None, *gradients


def compiled_step(norm: nn.Module, x: Tensor, padding_mask: Tensor | None) -> Tensor:
    """``norm.training_step`` of ``x``, which the compiler does not look into."""
    weight, bias, further = norm.gain, norm.bias, norm.further_parameters()
    grad_enabled = torch.is_grad_enabled()
    if grad_enabled and any(tensor is not None and tensor.requires_grad for tensor in (x, weight, bias, *further)):
        return _CompiledTraining.apply(x, weight, bias, padding_mask, norm.handle, *further)
    unique = torch.empty(1, device="cpu")
    return step(x, weight, bias, padding_mask, further, norm.handle, grad_enabled, unique)[0]
