"""Where a forward runs: inside a backward pass, as a recomputation, or while a checkpoint
records operators.
"""

from contextlib import AbstractContextManager, nullcontext
from threading import Lock

import torch
from torch import Tensor
from torch.utils._python_dispatch import (
    _disable_current_modes,
    _get_current_dispatch_mode_stack,
)

_lock = Lock()


def one_at_a_time() -> AbstractContextManager:
    """A context for code that reads and writes the state of a norm: if two threads train one norm,
    one waits.
    """
    if torch.compiler.is_compiling():
        return nullcontext()
    return _lock


def inside_backward() -> bool:
    """Whether a backward pass is running, in which any forward is a recomputation."""
    return torch._C._current_graph_task_id() != -1


def unrecorded() -> AbstractContextManager:
    """A context for operators that selective checkpointing must not mistake for operators of the
    forward that it records.
    """
    if not torch.compiler.is_compiling():
        for mode in _get_current_dispatch_mode_stack():
            if type(mode).__name__ == "_CachingTorchDispatchMode":
                return _disable_current_modes()
    return nullcontext()


def is_captured(tensor: Tensor) -> bool:
    """Whether a CUDA graph is being captured, in which ``tensor`` has no value yet."""
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()


def refuse_captured_recomputation(tensor: Tensor) -> None:
    """Called in a recomputation: a replayed CUDA graph could not tell which forward it repeats."""
    if is_captured(tensor):
        raise RuntimeError(
            "a CUDA graph cannot hold the recomputation of a norm of pn_fairseq: leave out "
            "activation checkpointing, or do without CUDA graphs"
        )


def copies_of(buffers: list[Tensor]) -> list[Tensor]:
    """New tensors with the values of ``buffers``; vectors are copied by one operator."""
    if len({buffer.shape for buffer in buffers}) == 1:
        return list(torch.stack(buffers).unbind())
    return [buffer.clone() for buffer in buffers]


def is_recomputation() -> bool:
    """Whether this forward is a recomputation by non-reentrant checkpointing, or runs inside a
    compiled backward. Reentrant checkpointing needs no such test: its first computation runs with
    gradients disabled.
    """
    node = torch._C._current_autograd_node()
    if node is not None and node.name().startswith("CompiledFunction"):
        return True
    # A recomputation pushes torch.utils.checkpoint._recomputation_hook. torch shows only the top
    # hook, so pop all hooks and push them back.
    autograd = torch._C._autograd
    hooks = []
    while (top := autograd._top_saved_tensors_default_hooks(True)) is not None:
        hooks.append(top)
        autograd._pop_saved_tensors_default_hooks()
    for pair in reversed(hooks):
        autograd._push_saved_tensors_default_hooks(*pair)
    return any(
        getattr(pack, "__qualname__", "").startswith("_recomputation_hook.") for pack, _ in hooks
    )
