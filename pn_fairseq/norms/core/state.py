"""The state of a norm: plain buffers, which a backward moves in place, and the copies that a
forward reads.
"""

import torch
from torch import Tensor, nn

from pn_fairseq.norms.core.channel import ChannelNorm
from pn_fairseq.norms.core.compiled import look
from pn_fairseq.norms.core.passes import (
    copies_of,
    inside_backward,
    refuse_captured_recomputation,
    unrecorded,
)

COUNT = "num_batches_tracked"


class Seen:
    """What the last training forward outside of a backward pass read, for recomputations.

    Attributes:
        state: copies of the state, by name; their values are arbitrary before the first forward.
        read: whether such a forward has run.
        warmup: :attr:`.StatefulNorm._warmup` in that forward.
    """

    __slots__ = ("read", "state", "warmup")

    def __init__(self, state: dict[str, Tensor]):
        self.state = state
        self.read = False
        self.warmup = 0


class StatefulNorm(ChannelNorm):
    """A norm whose state stays right however the module is created, converted, copied, saved and
    loaded.
    """

    #: The state that a training forward reads, by name; None: all of it.
    reads: tuple[str, ...] | None = None

    #: Whether the norm follows a schedule in optimizer updates, and so keeps their number on its
    #: device.
    follows_updates = False

    #: Whether :meth:`set_num_updates` has set how many updates are completed. This seldom changes:
    #: torch.compile compiles a graph for each value.
    _told = False

    #: In PN: the psi warm-up is on while ``num_batches_tracked`` is less than this number, which
    #: also seldom changes.
    _warmup = 0

    def __init__(self, num_features: int, **common):
        super().__init__(num_features, **common)
        self._initial: dict[str, float] = {}
        self._num_updates: int | None = None
        #: Tensors that follow the device of the norm but are not state, such as the number of
        #: completed updates.
        self._scratch = {"updates": torch.tensor(0)} if self.follows_updates else {}
        self._seen = Seen({})
        self.begin_epoch()
        self.register_buffer(COUNT, torch.zeros((), dtype=torch.int64))
        # a function of this file, so that a norm can be pickled
        self.register_load_state_dict_pre_hook(_before_loading)

    def add_state(self, name: str, initial: float, *rows: int) -> None:
        """Register the buffer ``name``, (C,) float32 or (\\*rows, C), with its initial value."""
        self._initial[name] = initial
        shape = (*rows, self.num_features)
        self.register_buffer(name, torch.full(shape, initial, dtype=torch.float32))
        # the counter comes last, as in torch.nn.BatchNorm1d
        self._buffers[COUNT] = self._buffers.pop(COUNT)
        self._seen = Seen({name: buffer.clone() for name, buffer in self._buffers.items()})

    def begin_epoch(self) -> None:
        """To be called when the state is replaced: a step whose forward came before does not enter
        the new state. A step keeps the :attr:`epoch` of its forward; True there means that the
        epoch has ended.
        """
        if "epoch" in vars(self):
            self.epoch.fill_(True)
        self.epoch = flag()

    def repeats(self) -> bool:
        """Whether a training forward repeats an earlier one, inside a backward pass (activation
        checkpointing). It then reads what the last training forward outside of a backward pass
        read, although the state may have moved since.
        """
        if not (self._seen.read and inside_backward()):
            return False
        refuse_captured_recomputation(self._buffers[COUNT])
        return True

    def has_read(self, state: dict[str, Tensor]) -> None:
        """Keep the copies that a forward has read, by name, for forwards that repeat it."""
        seen = self._seen
        seen.state.update(state)
        seen.read = True
        seen.warmup = self._warmup

    def read_state(self) -> dict[str, Tensor]:
        """Copies of the state that a training forward reads, by name; see :meth:`repeats`."""
        if self.reads is None:
            names = tuple(self._buffers)
        else:
            names = self.reads
        if not names:
            return {}
        buffers = [self._buffers[name] for name in names]
        seen = self._seen
        if torch.compiler.is_compiling():
            copies = look([seen.state[name] for name in names], buffers)
            return dict(zip(names, copies, strict=True))
        if self.repeats():
            return dict(seen.state)
        with unrecorded():
            read = dict(zip(names, copies_of(buffers), strict=True))
        self.has_read(read)
        return read

    def ensure_memory(self) -> None:
        """Repair what others did to the buffers past :meth:`_apply`: FSDP1 with
        ``MixedPrecision(buffer_dtype=...)`` assigns to their ``data``, and transformers replaces
        them.

        Raises:
            RuntimeError: a part of the state is still on the meta device and has no values.
        """
        missing = []
        for name, buffer in self._buffers.items():
            if buffer.is_meta:
                missing.append(name)
            elif buffer.dtype != torch.float32 and name in self._initial:
                buffer.data = buffer.data.float()
        if missing:
            name = getattr(self, "name", type(self).__name__)
            raise RuntimeError(
                f"{', '.join(missing)} of {name} never got values: the module is on the meta "
                "device, or was when load_state_dict(assign=True) loaded a checkpoint without "
                "them: model.to_empty(device='cpu') before load_state_dict gives them their "
                "initial values"
            )
        if self._scratch["diagnostics"].device != self._buffers[COUNT].device:
            self._follow_buffers()

    def set_num_updates(self, num_updates: int | None) -> None:
        """Tell the norm that ``num_updates`` optimizer updates are completed; None: the number is
        unknown.
        """
        self._num_updates = num_updates
        self._told = num_updates is not None
        if self.follows_updates and self._told:
            self._scratch["updates"].fill_(num_updates)

    def completed_updates(self, state: dict[str, Tensor]) -> Tensor:
        """Completed optimizer updates, 0-d int64, for a norm that :attr:`follows_updates`. Without
        :meth:`set_num_updates` the steps that have entered ``state`` are counted."""
        if self._told:
            return self._scratch["updates"]
        return state[COUNT]

    def reset_parameters(self) -> None:
        """Set the parameters and the state to their initial values, as ``reset_parameters`` of
        torch's BatchNorm does.
        """
        super().reset_parameters()
        self.reset_running_stats()

    def reset_running_stats(self) -> None:
        """Set the state to its initial values."""
        self.begin_epoch()
        for name in (*self._initial, COUNT):  # a buffer of torch.nn.utils.prune is not state
            nn.init.constant_(self._buffers[name], self._initial.get(name, 0))

    def _apply(self, fn, recurse=True):
        """Buffers get their device and memory from ``fn``, but keep their dtype and values:
        ``to_empty`` provides no values.
        """
        before = dict(self._buffers)
        super()._apply(fn, recurse)
        for name, old in before.items():
            new = self._buffers[name]
            if new.dtype != old.dtype:
                if new.device == old.device:
                    new = old
                else:
                    new = torch.empty_like(old, device=new.device)
                self._buffers[name] = new
            if old.is_meta:
                new.fill_(self._initial.get(name, 0))
            elif new is not old:
                new.copy_(old)
        self._follow_buffers()
        return self

    def _follow_buffers(self) -> None:
        """Move the tensors that are not state to the device of the state."""
        device = self._buffers[COUNT].device
        self._scratch = {name: _moved(tensor, device) for name, tensor in self._scratch.items()}
        self._seen.state = {
            name: _moved(tensor, device) for name, tensor in self._seen.state.items()
        }
        StatefulNorm.set_num_updates(self, self._num_updates)

    def __getstate__(self):
        state = self.__dict__.copy()
        # A process group cannot be copied, and a copy of a scaler would not follow the scaler.
        state["process_group"] = state["loss_scale"] = None
        # Another process that receives the norm would share the memory.
        state["epoch"] = flag()
        state["_has_loss_scale"] = flag()
        state["_seen"] = Seen(dict(self._seen.state))
        return state


def flag() -> Tensor:
    """A flag that Python sets and C++ reads."""
    return torch.zeros((), dtype=torch.bool, device="cpu")


def _moved(tensor: Tensor, device: torch.device) -> Tensor:
    """``tensor`` on ``device``; zeros if it was on the meta device, without values."""
    if tensor.is_meta:
        return torch.zeros_like(tensor, device=device)
    return tensor.to(device)


def _before_loading(module: StatefulNorm, state_dict: dict, prefix: str, *_) -> None:
    if not any(prefix + name in state_dict for name in module._buffers):
        return  # for example only the parameters of adapters: the state stays
    module.begin_epoch()
    module.set_num_updates(None)
    # With assign=True torch takes the tensors as they are. The dict is torch's own, not the
    # caller's.
    for name, buffer in module._buffers.items():
        loaded = state_dict.get(prefix + name)
        if isinstance(loaded, Tensor):
            state_dict[prefix + name] = loaded.to(buffer.dtype).contiguous()
