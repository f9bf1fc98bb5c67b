"""Costs of a call that do not depend on the machine: peak memory, kernels launched, bytes read
and written.
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import prod

import torch
from torch.profiler import ProfilerActivity, profile
from torch.profiler._memory_profiler import SchemaMatcher

#: Operators that allocate a tensor or change its metadata, and touch no data.
NO_WORK = re.compile(
    r"aten::(empty|empty_\w+|new_empty|new_empty_strided|resize_|as_strided_|_unsafe_view|detach_?|set_)$"
)

#: In-place operators that do not read what they overwrite.
OVERWRITES = ("aten::copy_", "aten::fill_", "aten::zero_")

#: A CPU kernel that torch.compile has generated.
COMPILED = re.compile(r"cpp_fused|cpp_\d+$")


@dataclass(frozen=True)
class Counts:
    """Kernels, and bytes read and written; None where the profiler cannot see them."""

    kernels: int
    bytes_read: int | None
    bytes_written: int | None


def _profiled(run: Callable[[], object]):
    options = {"profile_memory": True, "record_shapes": True}
    with profile(activities=[ProfilerActivity.CPU], **options) as found:
        kept = run()
    del kept
    return found.profiler.kineto_results


def peak_memory(run: Callable[[], object], device: torch.device) -> int:
    """Peak of the bytes in use, less those at the beginning: from the allocator on CUDA, else
    the profiler.
    """
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before
    in_use = most = 0
    for event in _profiled(run).events():
        if event.name() == "[memory]":
            in_use += event.nbytes()
            most = max(most, in_use)
    return most


def count(run: Callable[[], object], look_into: str | None = None, opaque: bool = False) -> Counts:
    """Profile one call of ``run``, which computes on the CPU.

    ``kernels`` is the number of the operators that count, and of loops that torch.compile generated
    (``torch._inductor.config.cpp.enable_kernel_profile``).

    An operator counts if it has a kernel for the CPU, or if nothing that it calls counts:
    ``layer_norm`` is one ``native_layer_norm``, and ``masked_fill`` a ``copy_`` and a
    ``masked_fill_``. Views, allocations and what only asks for a type do not count.

    An operator reads each of its input tensors once, except those that it only writes; an expanded
    tensor counts with its size in memory, a number as 8 bytes. It writes the tensors that its
    schema marks as changed, and what it allocates and does not free. Caches and scratch memory
    inside an operator are not counted, so the figures are the same on every machine.

    Args:
        run: the call; what it returns is kept alive while the operators are counted.
        look_into: a namespace whose operators are counted by the operators that they call.
        opaque: whether code runs that is not an operator; the bytes are None then.
    """
    operators = []
    kernels = 0
    for root in _profiled(run).experimental_event_tree():
        operators += _operators(root, f"{look_into}::")
        kernels += sum(bool(COMPILED.search(event.name)) for event in _all(root))
    kernels += len(operators)
    if opaque:
        return Counts(kernels, None, None)
    moved = [_moved(*operator) for operator in operators]
    return Counts(kernels, sum(read for read, _ in moved), sum(written for _, written in moved))


def _all(event) -> Iterator:
    yield event
    for child in event.children:
        yield from _all(child)


def _schema(event):
    """The schema of a call, or None if it is not an operator or matches none."""
    kind, fields = event.typed
    if kind.name != "TorchOp" or "::" not in event.name:
        return None
    known = SchemaMatcher.lookup_schemas(event.name) or ()
    # The matcher takes an empty tensor for None, which no schema with a tensor accepts.
    same_length = [schema for schema in known if len(schema.arguments) == len(fields.inputs)]
    return next(iter([*SchemaMatcher.match_schemas(fields), *same_length]), None)


def _operators(event, look_into: str) -> list[tuple]:
    """The operators under ``event`` that count, each with its schema."""
    schema = _schema(event)
    own = False
    if schema is not None and NO_WORK.match(event.name):
        return []
    if schema is not None and not event.name.startswith(look_into):
        if schema.overload_name:
            name = f"{schema.name}.{schema.overload_name}"
        else:
            name = schema.name

        def has(key: str) -> bool:
            return torch._C._dispatch_has_kernel_for_dispatch_key(name, key)

        # `to` and `reshape` give a view or a copy; only the operators that they call tell which.
        own = not has("CompositeImplicitAutograd")
        if own and any(
            value.alias_info is not None and not value.alias_info.is_write
            for value in schema.returns
        ):
            return []
        if own and has("CPU"):
            return [(event, schema)]
    found = []
    for child in event.children:
        found += _operators(child, look_into)
    return found or ([(event, schema)] if own else [])


def _size(tensor) -> int:
    expanded = zip(tensor.sizes, tensor.strides, strict=True)
    return prod(size for size, stride in expanded if stride or not size) * tensor.dtype.itemsize


def _moved(event, schema) -> tuple[int, int]:
    read = {}
    written = {}
    for argument, value in zip(schema.arguments, event.typed[1].inputs, strict=True):
        changed = argument.alias_info is not None and argument.alias_info.is_write
        for tensor in value if isinstance(value, list) else [value]:
            if not hasattr(tensor, "strides"):
                continue
            if changed:
                written[tensor.impl_ptr] = _size(tensor)
            if not changed or not (argument.is_out or event.name in OVERWRITES):
                read[tensor.impl_ptr] = _size(tensor)
    kept = {}
    for inner in _all(event):
        kind, fields = inner.typed
        if kind.name == "Allocation":
            if fields.alloc_size > 0:
                kept[fields.ptr] = fields.alloc_size
            else:
                kept.pop(fields.ptr, None)
    return sum(read.values()), sum(written.values()) + sum(kept.values())
