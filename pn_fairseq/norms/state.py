"""The buffers of a norm with running statistics, and the contributions that wait to enter them."""

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from pn_fairseq.norms.channel import ChannelNorm
from pn_fairseq.norms.tokens import Contribution

COUNT = "num_batches_tracked"


class Buffers(dict):
    """The buffers of a module as ``torch.nn.Module`` keeps them. Reading one first applies the pending contributions.

    This also holds for ``norm.running_psi2``, ``model.named_buffers()`` and all that is built on them: averages of
    weights, loggers, the broadcast of ``DistributedDataParallel``.
    """

    def __init__(self, queue: "StateQueue", buffers: dict[str, Tensor]):
        super().__init__(buffers)
        self._queue = queue

    def __getitem__(self, name: str) -> Tensor:
        if self._queue.pending:  # a step of a norm reads some ten buffers
            self._queue.flush()
        return dict.__getitem__(self, name)

    def items(self):
        self._queue.flush()
        return super().items()

    def values(self):
        self._queue.flush()
        return super().values()

    def __reduce__(self):  # a plain dict: the norm that is a copy makes its own
        return dict, (dict(self),)


@torch.jit.ignore  # or else torch.jit.trace tries to compile it and what it refers to, 4 s for each kind of norm
class StateQueue:
    """The contributions whose backward has run, until they enter the buffers of ``norm``.

    No memory that a pending backward may need is written to: :meth:`flush` gives each buffer new memory, and so does
    :meth:`discard`, which runs before the caller writes to the buffers. So a view of a buffer keeps its values, unless
    processes share the buffers, whose memory therefore stays the same: there a view is a copy.
    """

    def __init__(self, norm, buffers: dict[str, Tensor]):
        self._norm = norm
        self.buffers = Buffers(self, buffers)
        self.pending: list[Contribution] = []
        #: Changes when the state is replaced: contributions of forwards before the replacement are discarded.
        self.version = 0
        self.memory_changed()

    def memory_changed(self) -> None:
        """To be called after the buffers have got other memory from outside."""
        self._shared = any(buffer.device.type == "cpu" and buffer.is_shared() for buffer in dict.values(self.buffers))

    def new_contribution(self) -> Contribution:
        """For a forward that begins now."""
        return self._norm.contribution_type(self.version, self._objects())

    def _objects(self) -> list[int]:
        return list(map(id, dict.values(self.buffers)))

    def put(self, contribution: Contribution) -> None:
        """Keep a contribution.

        Raises:
            RuntimeError: in its forward the module had other buffers, which are gone.
        """
        if contribution.version != self.version:
            return
        if contribution.buffers != self._objects():
            raise RuntimeError(
                "torch.func.functional_call cannot train a norm of pn_fairseq with buffers that it is given: give it "
                "the parameters alone, or call eval() first"
            )
        self.pending.append(contribution)

    def flush(self) -> None:
        """Apply the contributions. It starts no all-reduce: a single rank may call it."""
        if not self.pending or torch._C._current_graph_task_id() != -1:  # inside a backward pass
            return
        if torch._C._len_torch_dispatch_stack() and _saves_operators():
            with _disable_current_modes():
                return self.flush()
        pending, self.pending = self.pending, []
        for contribution in pending:
            for name, value in self._norm.state_after(contribution).items():
                buffer = self.buffers[name]
                if self._shared:
                    buffer.copy_(value)
                else:
                    buffer.data = value

    def discard(self) -> None:
        """Forget the contributions, also those whose backward has not run yet. The buffers may then be written to."""
        self.pending.clear()
        self.version += 1
        if not self._shared:
            for buffer in self.buffers.values():
                buffer.set_(buffer.clone())

    def view(self, buffer: Tensor) -> Tensor:
        """``buffer`` with the values that it has now, for a backward that runs later."""
        return buffer.clone() if self._shared else buffer.data


def _saves_operators() -> bool:
    """Whether selective checkpointing records operators, and would take those of a flush for those of the forward."""
    modes = torch.utils._python_dispatch._get_current_dispatch_mode_stack()
    return any(type(mode).__name__ == "_CachingTorchDispatchMode" for mode in modes)


def is_recomputation() -> bool:
    """Whether this forward is a recomputation by checkpointing without reentry, whose first computation had gradients
    enabled. With reentry the first computation has them disabled. A compiled backward repeats what its graph
    checkpoints."""
    node = torch._C._current_autograd_node()
    if node is not None and node.name().startswith("CompiledFunction"):
        return True
    autograd, hooks = torch._C._autograd, []
    while (top := autograd._top_saved_tensors_default_hooks(True)) is not None:
        hooks.append(top)
        autograd._pop_saved_tensors_default_hooks()
    for pair in reversed(hooks):
        autograd._push_saved_tensors_default_hooks(*pair)
    return any(getattr(pack, "__qualname__", "").startswith("_recomputation_hook.") for pack, _ in hooks)


class StatefulNorm(ChannelNorm):
    """A norm whose state is right however the module is created, converted, copied, saved and loaded."""

    def __init__(self, num_features: int, **common):
        super().__init__(num_features, **common)
        self._initial: dict[str, float] = {}
        self._num_updates: int | None = None
        self._set_queue()
        self.register_buffer(COUNT, torch.zeros((), dtype=torch.int64))
        self.register_load_state_dict_pre_hook(_before_loading)  # a function of this file: a norm can be pickled

    def _set_queue(self) -> None:
        self._queue = StateQueue(self, self._buffers)
        self._buffers = self._queue.buffers

    def add_state(self, name: str, initial: float, *rows: int) -> None:
        """Register the buffer ``name``, (C,) float32 or (\\*rows, C), with its initial value."""
        self._initial[name] = initial
        self.register_buffer(name, torch.full((*rows, self.num_features), initial, dtype=torch.float32))
        self._buffers[COUNT] = self._buffers.pop(COUNT)  # the counter comes last, as in torch.nn.BatchNorm1d

    def frozen_view(self, state: Tensor) -> Tensor:
        """``state`` with the values that it has now, for a backward that runs later."""
        return self._queue.view(state)

    def check_memory(self) -> None:
        """Raise RuntimeError where a part of the state is still on the meta device and has no values.

        FSDP1 with ``MixedPrecision(buffer_dtype=...)`` assigns to ``data`` of the buffers, past :meth:`_apply`: here
        they become float32 again.
        """
        for name in self._initial:
            if (buffer := dict.__getitem__(self._buffers, name)).dtype != torch.float32:
                buffer.data = buffer.data.float()
        if missing := [name for name, buffer in dict.items(self._buffers) if buffer.is_meta]:
            raise RuntimeError(
                f"{', '.join(missing)} of {getattr(self, 'name', type(self).__name__)} never got values: the module "
                "is on the meta device, or was when load_state_dict(assign=True) loaded a checkpoint without them: "
                'model.to_empty(device="cpu") before load_state_dict gives them their initial values'
            )

    def flush(self) -> None:
        """Apply the contributions to the state. It starts no all-reduce: a single rank may call it."""
        self._queue.flush()

    def discard_pending(self) -> None:
        """Discard the contributions that :meth:`flush` has not applied, and those whose backward has not run yet.

        These backwards still use the state of their forward (:meth:`frozen_view`), also after the state is overwritten.
        """
        self._queue.discard()

    def reset_parameters(self) -> None:
        """Give the parameters and the state their initial values, as ``reset_parameters`` of torch's BatchNorm does."""
        super().reset_parameters()
        self.reset_running_stats()

    def reset_running_stats(self) -> None:
        """Give the state its initial values."""
        self.discard_pending()
        for name in (*self._initial, COUNT):  # a buffer of torch.nn.utils.prune is no state
            nn.init.constant_(self._buffers[name], self._initial.get(name, 0))

    def train(self, mode: bool = True):
        self.flush()
        return super().train(mode)

    def _apply(self, fn, recurse=True):
        """Buffers take device and memory of ``fn``, and neither its dtype nor its values: ``to_empty`` has none."""
        self.flush()
        before = dict(self._buffers)
        super()._apply(fn, recurse)
        for name, old in before.items():
            new = self._buffers[name]
            if new.dtype != old.dtype:
                new = old if new.device == old.device else torch.empty_like(old, device=new.device)
                self._buffers[name] = new
            if old.is_meta:
                new.fill_(self._initial.get(name, 0))
            elif new is not old:
                new.copy_(old)
        self._queue.memory_changed()
        return self

    def __getstate__(self):
        self.flush()
        # Contributions belong to the graphs of this module, not to the graphs of a copy. A process group cannot be
        # copied, and a copy of a scaler would not follow the scaler.
        return {**self.__dict__, "_queue": None, "process_group": None, "loss_scale": None}

    def __setstate__(self, state: dict) -> None:
        super().__setstate__(state)
        self._set_queue()


def _before_loading(module: StatefulNorm, state_dict: dict, prefix: str, *_) -> None:
    if not any(prefix + name in state_dict for name in module._buffers):
        return  # the parameters of adapters, for example: the state stays
    module.discard_pending()
    module.set_num_updates(None)
    # With assign=True torch takes the tensors as they are. The dict is torch's own, not the caller's.
    for name, buffer in module._buffers.items():
        loaded = state_dict.get(prefix + name)
        if isinstance(loaded, Tensor):
            state_dict[prefix + name] = loaded.to(buffer.dtype).contiguous()
