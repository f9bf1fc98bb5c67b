"""What a call costs on any machine: peak memory, kernels launched, and bytes read and written; from torch.profiler."""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import prod

import torch
from torch.profiler import ProfilerActivity, profile
from torch.profiler._memory_profiler import SchemaMatcher

#: Operators that make a tensor, or change what one is, and touch no data.
NO_WORK = re.compile(
    r"aten::(empty|empty_\w+|new_empty|new_empty_strided|resize_|as_strided_|_unsafe_view|detach_?|set_)$"
)

#: In place, and without a look at what was there.
OVERWRITES = ("aten::copy_", "aten::fill_", "aten::zero_")

#: What starts a kernel, a copy or a memset on a GPU, in the words of the CUDA runtime and driver.
LAUNCH = re.compile(r"cu(da)?Launch(Cooperative)?Kernel|cuda(Memcpy|Memset)|cuMem(cpy|set)")

#: A kernel that torch.compile has made for the CPU.
COMPILED = re.compile(r"cpp_fused|cpp_\d+$")


@dataclass(frozen=True)
class Counts:
    """Kernels launched, and bytes read and written; these are None where the profiler cannot see them."""

    kernels: int
    bytes_read: int | None
    bytes_written: int | None


def _profiled(run: Callable[[], object], device: torch.device):
    activities = [ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
        torch.cuda.synchronize()
    with profile(activities=activities, profile_memory=True, record_shapes=True) as found:
        kept = run()
        if device.type == "cuda":
            torch.cuda.synchronize()
    del kept
    return found.profiler.kineto_results


def peak_memory(run: Callable[[], object], device: torch.device) -> int:
    """The most bytes in use at once beyond those at the beginning: from the allocator on CUDA, else the profiler."""
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before
    in_use = most = 0
    for event in _profiled(run, device).events():
        if event.name() == "[memory]":
            in_use += event.nbytes()
            most = max(most, in_use)
    return most


def count(
    run: Callable[[], object], device: torch.device, look_into: str | None = None, opaque: bool = False
) -> Counts:
    """Profile one call of ``run``.

    An operator counts if it has a kernel of its own for the device, or else if nothing that it calls counts; so
    ``layer_norm`` is one ``native_layer_norm``, and ``masked_fill`` a ``copy_`` and a ``masked_fill_``. Views,
    allocations and what only asks for a type do not count.

    An operator reads its input tensors but those that it only writes, each once, what is expanded at its real size, and
    a number as a tensor of 8 bytes. It writes the tensors that its schema says it changes, and whatever it allocates
    and does not free again. What it keeps to itself, caches and scratch memory, is not seen: this is the traffic that
    the operators' interfaces ask for, the same on every machine.

    Args:
        run: the call; what it returns is kept alive until the count is over.
        device: where it computes. On a CPU ``kernels`` is the number of the operators that count, and of loops that
            torch.compile made (with ``torch._inductor.config.cpp.enable_kernel_profile``); on CUDA it is the number of
            launches, copies and memsets, which the runtime has reported. Sizes there are those of the allocator.
        look_into: a namespace whose operators are made of others here.
        opaque: something computes that is not an operator, and the bytes are None.
    """
    results = _profiled(run, device)
    operators, kernels = [], 0
    for root in results.experimental_event_tree():
        operators += _operators(root, device.type.upper(), f"{look_into}::")
        kernels += sum(bool(COMPILED.search(event.name)) for event in _all(root))
    if device.type == "cuda":
        kernels = sum(bool(LAUNCH.match(event.name())) for event in results.events())
    else:
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
    """The schema that a call fits, or None if it is not an operator or fits none."""
    kind, fields = event.typed
    if kind.name != "TorchOp" or "::" not in event.name:
        return None
    known = SchemaMatcher.lookup_schemas(event.name) or ()
    # The matcher takes an empty tensor for none, which then fits no schema that wants one.
    same_length = [schema for schema in known if len(schema.arguments) == len(fields.inputs)]
    return next(iter([*SchemaMatcher.match_schemas(fields), *same_length]), None)


def _operators(event, device: str, look_into: str) -> list[tuple]:
    """The operators under ``event`` that count, each with its schema."""
    schema = _schema(event)
    own = False
    if schema is not None and NO_WORK.match(event.name):
        return []
    if schema is not None and not event.name.startswith(look_into):
        name = f"{schema.name}.{schema.overload_name}" if schema.overload_name else schema.name

        def has(key: str) -> bool:
            return torch._C._dispatch_has_kernel_for_dispatch_key(name, key)

        # `to` and `reshape` give a view or a copy, and only what they call tells which.
        own = not has("CompositeImplicitAutograd")
        if own and any(value.alias_info is not None and not value.alias_info.is_write for value in schema.returns):
            return []
        if own and has(device):
            return [(event, schema)]
    found = [operator for child in event.children for operator in _operators(child, device, look_into)]
    return found or ([(event, schema)] if own else [])


def _size(tensor) -> int:
    expanded = zip(tensor.sizes, tensor.strides, strict=True)
    return prod(size for size, stride in expanded if stride or not size) * tensor.dtype.itemsize


def _moved(event, schema) -> tuple[int, int]:
    read, written = {}, {}
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
