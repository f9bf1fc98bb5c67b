"""What the norms share: affine parameters, layer-scale in front, and float32 state that training steps change."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pn_fairseq import kernels
from pn_fairseq.norms.checks import check_alpha, check_input, check_positive, check_whole
from pn_fairseq.norms.distributed import world_size
from pn_fairseq.norms.layer_scale import LayerScale
from pn_fairseq.norms.nested import over_tokens
from pn_fairseq.norms.tokens import Contribution, Moments, Tokens, Training

COUNT = "num_batches_tracked"


def _no_fast_path(module: nn.Module, args: tuple) -> None:
    """A hook that does nothing: see :class:`ChannelNorm`. No lambda: a norm can be pickled."""


class ChannelNorm(nn.Module):
    """A norm over activations. One without state defines :meth:`normalize`.

    Args:
        num_features: number of channels C.
        eps: added to the second moment before the root, here and in layer-scale.
        affine: if True, the norm has the parameters that :attr:`learned` names. The other parameters are None.
        layer_scale_groups: groups of the :class:`LayerScale` in front; 0: none.
        batch_first: activations are (B, T, C) instead of (T, B, C), as in ``torch.nn.TransformerEncoderLayer``.

    Raises:
        ValueError: an argument or an input does not fit; the message holds its value.
    """

    #: Whether a token's y in training depends on other tokens of the batch, also on later tokens: "never", "always", or
    #: "at first": until warm-ups and schedules end, and after that only in channels where a factor is clipped.
    mixes_tokens = "never"

    #: Which of ``weight`` (gain, initially 1) and ``bias`` (initially 0), (C,), the norm has.
    learned: tuple[str, ...] = ("weight", "bias")

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        affine: bool = True,
        layer_scale_groups: int = 0,
        batch_first: bool = False,
    ):
        super().__init__()
        self.num_features = check_whole("num_features", num_features, minimum=1)
        self.eps = check_positive("eps", eps)
        self.affine = affine
        self.layer_scale_groups = layer_scale_groups
        self.batch_first = batch_first
        self.layer_scale = LayerScale(num_features, layer_scale_groups, eps, batch_first)
        if not self.is_torch_layer_norm():
            # torch.nn.TransformerEncoderLayer has a fast path in evaluation: it reads weight, bias and eps of its norms
            # and computes LayerNorm itself. torch does not use the fast path if a submodule has a hook. This hook is
            # on layer_scale: most norms do not call that module, so the hook costs no time.
            self.layer_scale.register_forward_pre_hook(_no_fast_path)
        for name in ("weight", "bias"):
            learns = affine and name in self.learned
            self.register_parameter(name, nn.Parameter(torch.empty(num_features)) if learns else None)
        self._built_on_meta = torch.get_default_device().type == "meta"
        ChannelNorm.reset_parameters(self)

    #: TorchScript would compile the hook of this module in a model that exports methods, as fairseq's models do.
    __jit_ignored_attributes__ = ("layer_scale",)

    def reset_parameters(self) -> None:
        """Set ``weight`` to 1 and ``bias`` to 0."""
        if self.weight is not None:
            nn.init.ones_(self.weight)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    @property
    def _is_hf_initialized(self) -> bool:
        return self.__dict__.get("_is_hf_initialized", False)

    @_is_hf_initialized.setter
    def _is_hf_initialized(self, value: bool) -> None:
        """``from_pretrained`` of transformers sets this of every module, after it has given uninitialized memory to the
        tensors that are not in the checkpoint. In the meantime torch.nn.init leaves the other ones as they are."""
        self.__dict__["_is_hf_initialized"] = value
        if self._built_on_meta:
            self._built_on_meta = False
            self.reset_parameters()

    def set_num_updates(self, num_updates: int) -> None:
        """Tell the norm how many optimizer updates are completed."""

    def is_torch_layer_norm(self) -> bool:
        """Whether y is LayerNorm with ``weight``, ``bias`` and ``eps``, so that torch may compute it in our place."""
        return False

    def forward(self, x: Tensor, padding_mask: Tensor | None = None) -> Tensor:
        """Normalize ``x``, (T, B, C) or (N, C), or (B, T, C) with ``batch_first``.

        ``padding_mask`` is (B, T), in both layouts, or (N,); bool, True = padding. Padding is normalized like other
        tokens and enters no statistic, except with the variant ``release`` of some norms. The result has the shape and
        dtype of ``x`` and is contiguous for all strides of ``x``, as the result of ``torch.nn.LayerNorm``; only
        ``none`` without layer-scale returns ``x`` itself. The arithmetic is float64 for a float64 ``x``, otherwise
        float32.

        ``x`` may be a nested tensor, (B, *, C) without padding, for both values of ``batch_first``.
        """
        if x.is_nested:
            return over_tokens(self.forward, x, padding_mask)
        check_input(x, padding_mask, self.num_features, self.batch_first)
        return self.normalize(self.layer_scale(x) if self.layer_scale_groups else x)

    def normalize(self, h: Tensor) -> Tensor:
        """y for the layer-scaled activations h, (..., C), in their shape and type; each token by itself."""
        raise NotImplementedError

    def extra_repr(self) -> str:
        return f"{self.num_features}, eps={self.eps}, affine={self.affine}"


class _State(dict):
    """The buffers of a :class:`RunningNorm` as ``torch.nn.Module`` keeps them. Reading a buffer first applies the
    pending contributions.

    This also holds for ``norm.running_psi2``, ``model.named_buffers()`` and all that is built on them: averages of
    weights, loggers, the broadcast of ``DistributedDataParallel``.
    """

    def __init__(self, norm: "RunningNorm", buffers: dict[str, Tensor]):
        super().__init__(buffers)
        self._norm = norm

    def __getitem__(self, name: str) -> Tensor:
        self._norm.flush()
        return super().__getitem__(name)

    def items(self):
        self._norm.flush()
        return super().items()

    def values(self):
        self._norm.flush()
        return super().values()

    def __reduce__(self):  # a plain dict: the norm that is a copy makes its own _State
        return dict, (dict(self),)


class RunningNorm(ChannelNorm):
    r"""A norm with running statistics: state that training steps change and evaluation uses.

    A subclass names its state with :meth:`add_state`, says in :attr:`moment_name` (and :attr:`mean_name`) which part of
    it evaluation normalizes by, and defines :meth:`forward_pass`, :meth:`backward_pass` and, unless it keeps
    exponential averages, :meth:`update`. Masks, layer-scale, precision, ranks, activation checkpointing, gradient
    accumulation, inf and NaN, evaluation, recalibration, averaging, saving and diagnostics are handled by this class. A
    norm that also uses the statistics of each token defines :meth:`token_part` and :meth:`effective_affine`.

    **When the state changes.** A forward changes no state, except while :attr:`recalibrating`. A backward stores a
    :class:`~.tokens.Contribution`, once per forward. A forward that no backward can reach, because neither the input
    nor a parameter of the norm requires a gradient, stores it itself, unless gradients are disabled
    (``torch.no_grad()``); a checkpointed forward counts once. Such a step changes all state but
    :attr:`gradient_state`. :meth:`flush` applies the steps to the state, and discards those
    without a real token or with a number that is not finite. It runs before the next training forward (not inside a
    backward pass, where a forward is a recomputation and has to see the same state again), in :meth:`set_num_updates`,
    on a change between training and evaluation, on saving, loading, copying and conversion, and when a buffer is read:
    as an attribute, or from ``buffers()`` or ``named_buffers()`` of this module or of a model that holds it. A tensor
    that was read earlier changes at the next of these occasions, and not during the backward pass itself.

    The state stays float32 through ``.half()``, ``.bfloat16()``, ``.to(dtype)`` and loading. The buffer
    ``num_batches_tracked`` (int64) counts the steps that were applied.

    Args:
        alpha_fwd: decay of the exponential averages, in (0, 1).
        sync: take all statistics over the real tokens of all ranks, weighted by their number; every rank has to run the
            same forwards and backwards. Without ``torch.distributed``, or with one rank, it changes nothing.
        process_group: the ranks; None: all. A copy of the module has None, and no loss scale.
        others: see :class:`ChannelNorm`.
    """

    #: Buffers that evaluation normalizes by: the second moment, and the mean that it is about; None: it is about 0.
    moment_name: str
    mean_name: str | None = None

    mixes_tokens = "always"

    #: Buffers made of gradients. A step without a backward leaves them as they are.
    gradient_state: tuple[str, ...] = ()

    #: Whether evaluation is one scale and shift per channel of the layer-scaled input, which folds into a linear map. A
    #: class whose :meth:`token_part` adds something in evaluation sets it to False.
    folds = True

    #: While set, forwards in training mode normalize with the statistics of the batch, and the running ones become the
    #: mean over the batches; see :func:`pn_fairseq.norms.recalibrating`.
    recalibrating = False

    #: While set, :meth:`diagnostics` has something to report.
    collecting = False

    #: What the loss is multiplied by before the backward pass; see :func:`pn_fairseq.norms.set_loss_scale`.
    loss_scale = None

    #: While True, training batches enter no statistic: this rank repeats a batch because its own data has ended. In a
    #: synchronized norm this rank adds zeros to the all-reduce.
    ignoring = False

    def __init__(
        self,
        num_features: int,
        alpha_fwd: float = 0.9,
        sync: bool = False,
        process_group=None,
        eps: float = 1e-5,
        affine: bool = True,
        layer_scale_groups: int = 0,
        batch_first: bool = False,
    ):
        super().__init__(num_features, eps, affine, layer_scale_groups, batch_first)
        self.alpha_fwd = check_alpha("alpha_fwd", alpha_fwd)
        self.sync, self.process_group = sync, process_group
        self._initial: dict[str, float] = {}
        self._pending: list[Contribution] = []
        #: Changes when the state is replaced: contributions of forwards before the replacement are discarded.
        self.state_version = 0
        self._num_updates: int | None = None
        self._buffers = _State(self, self._buffers)
        self._collected: dict[str, Tensor] = {}
        self.register_buffer(COUNT, torch.zeros((), dtype=torch.int64))
        self.register_state_dict_pre_hook(_before_saving)  # functions of this file: a norm can be pickled
        self.register_load_state_dict_pre_hook(_before_loading)

    # What a norm defines.

    def add_state(self, name: str, initial: float, *rows: int) -> None:
        """Register the buffer ``name``, (C,) float32 or (\\*rows, C), with its initial value."""
        self._initial[name] = initial
        self.register_buffer(name, torch.full((*rows, self.num_features), initial, dtype=torch.float32))
        self._buffers[COUNT] = self._buffers.pop(COUNT)  # the counter comes last, as in torch.nn.BatchNorm1d

    def forward_pass(self, tokens: Tokens, step: Contribution) -> Tensor:
        """y, (T, B, C), from :meth:`.Tokens.normalize`.

        It must set ``step.batch``, by :meth:`.Tokens.moments` or ``normalize(moments=True)``. It may keep in ``step``
        what the other passes need. State that ``step`` keeps goes through :meth:`frozen_view`.
        """
        raise NotImplementedError

    def backward_pass(self, tokens: Tokens, step: Contribution) -> tuple[Tensor, Tensor]:
        """dx, and the gradients of weight and bias, (2, C), from :meth:`.Tokens.gradient` or ``gradient_sums``."""
        raise NotImplementedError

    def effective_affine(
        self, weight: Tensor | None, bias: Tensor | None, further: Sequence[Tensor], mean: Tensor | None, moment: Tensor
    ) -> tuple[Tensor | None, Tensor | None]:
        """The factors a and b, (C,), in y = a x_hat + b; None: 1 and 0. Here: ``weight`` and ``bias``.

        Evaluation, folding and recalibration use it. A norm whose a and b are not ``weight`` and ``bias``, such as
        ``prep-batch``, overrides this method and also calls it in :meth:`forward_pass`; its :meth:`backward_pass`
        returns the gradients.

        Args:
            weight, bias: of the norm, (C,), or None.
            further: the values of :meth:`further_parameters`.
            mean, moment: what x_hat is normalized by, (C,), in the dtype that the factors should have.
        """
        return weight, bias

    def token_part(self, x: Tensor) -> Tensor | None:
        """What is added to y in a norm that mixes the statistics of the batch with the statistics of each token.

        None: nothing. ``x`` is the input of the norm: apply ``self.layer_scale``. The result has the shape and dtype of
        ``x``, is a function of each token by itself, and gets its gradients from autograd. It is called in training
        (after :meth:`forward_pass`), in evaluation, and while :attr:`recalibrating`. Where it returns a tensor in
        evaluation, :attr:`folds` must be False.
        """
        return None

    def further_parameters(self) -> tuple[Tensor, ...]:
        """The learned parameters besides weight and bias; the passes get them as ``tokens.further``. ``backward_pass``
        returns their gradients last, after dx and the gradients of weight and bias."""
        return ()

    def batch_moments(self, tokens: Tokens) -> Moments:
        """The statistics of a batch, over all ranks: ``step.batch``, and what recalibration averages."""
        return tokens.moments(centered=self.mean_name is not None)

    def update(self, step: Contribution) -> dict[str, Tensor]:
        """The state after ``step``, by buffer name; what is missing stays as it is. Written only if all is finite.

        If the result has ``num_batches_tracked``, it is written without a check: the kernel that computed it has
        checked the values. Here: exponential averages of :meth:`statistics_of`.
        """
        batch = self.statistics_of(step.batch)
        mean = None if self.mean_name is None else self._buffers[self.mean_name]
        moment, mean, count = kernels.running_average(
            self._buffers[self.moment_name],
            mean,
            self.num_batches_tracked,
            batch[self.moment_name],
            None if mean is None else batch[self.mean_name],
            step.products,
            step.batch.count,
            0,
            self.alpha_fwd,
        )
        new = {self.moment_name: moment, COUNT: count}
        return new if self.mean_name is None else {self.mean_name: mean, **new}

    def statistics_of(self, batch: Moments) -> dict[str, Tensor]:
        """The values of a batch that enter the running statistics for evaluation, by buffer name."""
        moments = {self.moment_name: batch.moment}
        return moments if self.mean_name is None else {self.mean_name: batch.mean, **moments}

    def observe(self, step: Contribution) -> dict[str, Tensor]:
        """More :meth:`diagnostics` of a step that is about to be taken in, by name, each 0-d."""
        return {}

    @staticmethod
    def frozen_view(state: Tensor) -> Tensor:
        """``state`` as it is now, for a backward that runs later: no copy, but it keeps its values.

        That is right because nothing in this class writes to the memory of a buffer while a step may need it:
        :meth:`flush` gives each buffer new memory, and :meth:`discard_pending`, which runs before the state is loaded
        or reset in place, moves the buffers away from the memory that the views have.
        """
        return state.data

    # Training.

    def forward(self, x: Tensor, padding_mask: Tensor | None = None) -> Tensor:
        if x.is_nested:
            return over_tokens(self.forward, x, padding_mask)
        check_input(x, padding_mask, self.num_features, self.batch_first)
        if not self.training:
            return self._evaluate(x)
        return (
            self._train_uncompiled(x, padding_mask) if torch.compiler.is_compiling() else self._train(x, padding_mask)
        )

    forward.__doc__ = ChannelNorm.forward.__doc__

    def _train(self, x: Tensor, padding_mask: Tensor | None) -> Tensor:
        if torch._C._are_functorch_transforms_active():
            raise RuntimeError("torch.func cannot transform a norm of pn_fairseq in training mode: call eval() first")
        self.flush()
        if self.ignoring and self.synchronises():
            padding_mask = torch.ones(x.shape[-2::-1], dtype=torch.bool, device=x.device)
            padding_mask = padding_mask.t() if self.batch_first else padding_mask
        if self.recalibrating:
            y = self._recalibrate(x, padding_mask)
        else:
            step = Contribution()
            y = Training.apply(x, self.weight, self.bias, padding_mask, self, step, *self.further_parameters())
            if not y.requires_grad and torch.is_grad_enabled() and not _was_counted():
                self._contribute_without_backward(step)
        return self._with_token_part(y, x)

    def _with_token_part(self, y: Tensor, x: Tensor) -> Tensor:
        part = self.token_part(x)
        return y if part is None else y + part

    @torch._disable_dynamo  # torch.compiler.disable would import torch._dynamo here, which takes a second
    def _train_uncompiled(self, x: Tensor, padding_mask: Tensor | None) -> Tensor:
        return self._train(x, padding_mask)

    def synchronises(self) -> bool:
        """Whether statistics are summed over several ranks."""
        return self.sync and world_size(self.process_group) > 1

    def contribute(self, step: Contribution, version: int | None) -> None:
        """Keep ``step`` for :meth:`flush`. Start the all-reduce of its sums that are not yet over all ranks."""
        step.work = None
        if not (step.batch.reduced and step.products_reduced):  # every rank starts it, even for a discarded step
            local = [] if step.batch.reduced else [step.batch.moment * step.batch.count]
            local += [] if step.products_reduced else [*step.products]
            step.flat = torch.cat([*local, step.batch.count[None]])
            step.work = dist.all_reduce(step.flat, group=self.process_group, async_op=True)
        if version == self.state_version and (not self.ignoring or self.synchronises()):
            self._pending.append(step)

    def _contribute_without_backward(self, step: Contribution) -> None:
        step.has_gradient, step.products_reduced = False, True
        step.products = step.batch.moment.new_zeros(2, self.num_features)
        self.contribute(step, self.state_version)

    def flush(self) -> None:
        """Apply to the state the steps whose backward has run. It starts no all-reduce: a single rank may call it."""
        if not self._pending or torch._C._current_graph_task_id() != -1:  # inside a backward pass
            return
        pending = self._pending.copy()
        self._pending.clear()
        for step in pending:
            self._take_in(step)

    def _take_in(self, step: Contribution) -> None:
        if step.work is not None:
            self._wait(step)
        new = self.update(step)
        if not step.has_gradient:
            new = {name: value for name, value in new.items() if name not in self.gradient_state}
        if COUNT not in new:
            values = torch.cat([value.flatten() for value in (*new.values(), step.products)])
            counted = values.isfinite().all() & (step.batch.count > 0)
            old = {name: self._buffers[name] for name in new}
            new = {name: torch.where(counted, new[name].detach().to(old[name].dtype), old[name]) for name in new}
            new[COUNT] = self.num_batches_tracked + counted
        if self.collecting:
            self._collect(step, new[COUNT] > self.num_batches_tracked)
        buffers = self._buffers
        for name, value in new.items():
            buffers[name].data = value  # new memory: a frozen view keeps the old

    def _wait(self, step: Contribution) -> None:
        """Put the sums over all ranks into ``step``."""
        step.work.wait()
        *parts, count = step.flat.split([self.num_features] * (step.flat.numel() // self.num_features) + [1])
        if not step.batch.reduced:
            moment = parts.pop(0) / count.clamp(min=1.0)
            step.batch = Moments(None, moment, count[0], reduced=True)
        if not step.products_reduced:
            step.products = torch.stack(parts)

    def set_num_updates(self, num_updates: int) -> None:
        """Tell the norm that ``num_updates`` optimizer updates are completed."""
        self.flush()
        self._num_updates = num_updates

    def completed_updates(self) -> Tensor:
        """Completed optimizer updates, 0-d int64. Without :meth:`set_num_updates` the applied steps are counted."""
        if self._num_updates is None:
            return self.num_batches_tracked
        return torch.full_like(self.num_batches_tracked, self._num_updates)

    def current_loss_scale(self) -> float | Tensor | None:
        """A number or 0-d tensor; None: 1."""
        if hasattr(self.loss_scale, "scale"):
            return self.loss_scale.scale(torch.ones((), device=self._buffers[COUNT].device))
        return self.loss_scale

    def discard_pending(self) -> None:
        """Discard the steps that :meth:`flush` has not applied, and those whose backward has not run yet.

        These backwards still use the state of their forward (:meth:`frozen_view`), also after the state is overwritten.
        """
        self._pending.clear()
        self.state_version += 1
        for buffer in self._buffers.values():  # new memory, which the caller may write to; frozen views keep the old
            buffer.set_(buffer.clone())

    def reset_parameters(self) -> None:
        """Give the parameters and the state their initial values, as ``reset_parameters`` of torch's BatchNorm does."""
        super().reset_parameters()
        self.reset_running_stats()

    def reset_running_stats(self) -> None:
        """Give the state its initial values."""
        self.discard_pending()
        for name, buffer in self._buffers.items():
            nn.init.constant_(buffer, self._initial.get(name, 0))

    def train(self, mode: bool = True):
        self.flush()
        return super().train(mode)

    # Evaluation.

    def evaluation_statistics(self) -> tuple[Tensor | None, Tensor]:
        """What evaluation normalizes by: the mean (None: 0) and the second moment about it, both (C,)."""
        return None if self.mean_name is None else self._buffers[self.mean_name], self._buffers[self.moment_name]

    def evaluation_affine(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Scale and shift, (C,) of ``dtype``: in evaluation y = scale * h + shift, with h the layer-scaled x.

        Without :meth:`token_part`, which is None in evaluation for a norm that :attr:`folds`.
        """
        mean, moment = (value if value is None else value.to(dtype) for value in self.evaluation_statistics())
        given = (value if value is None else value.to(dtype) for value in (self.weight, self.bias))
        further = [value.to(dtype) for value in self.further_parameters()]
        weight, bias = self.effective_affine(*given, further, mean, moment)
        scale = torch.rsqrt(moment + self.eps)
        scale = scale if weight is None else scale * weight
        shift = torch.zeros_like(scale) if bias is None else bias
        return scale, shift if mean is None else shift - mean * scale

    def _evaluate(self, x: Tensor) -> Tensor:
        return self._with_token_part(self._normalize_by(x, *self.evaluation_statistics()), x)

    def _normalize_by(self, x: Tensor, mean: Tensor | None, moment: Tensor) -> Tensor:
        if moment.dtype != (dtype := kernels.acc_dtype(x)):
            mean, moment = None if mean is None else mean.to(dtype), moment.to(dtype)
        weight, bias = self.effective_affine(self.weight, self.bias, self.further_parameters(), mean, moment)
        return kernels.evaluate(x, weight, bias, mean, moment, self.layer_scale_groups, self.eps)

    def _recalibrate(self, x: Tensor, padding_mask: Tensor | None) -> Tensor:
        step = Contribution()
        batch = self.batch_moments(Tokens(self, step, x.detach(), padding_mask, None, None))
        with torch.no_grad():
            new = {name: value.to(torch.float32) for name, value in self.statistics_of(batch).items()}
            finite = torch.stack([value.isfinite().all() for value in new.values()]).all()
            counted = (batch.count > 0) & finite & (not self.ignoring or self.synchronises())
            count = self.num_batches_tracked.add_(counted).clamp(min=1)
            for name, value in new.items():
                running = self._buffers[name]
                running.copy_(torch.where(counted, running + (value - running) / count, running))
        return self._normalize_by(x, batch.mean, batch.moment)

    # Diagnostics.

    def _collect(self, step: Contribution, counted: Tensor) -> None:
        faulty = (step.batch.count > 0) & ~counted
        self._collected["nonfinite_steps"] = self._collected.get("nonfinite_steps", 0) + faulty.to(torch.int64)
        batch = self.statistics_of(step.batch)[self.moment_name].to(torch.float32)
        # 0 where the statistics of the batch equal the running ones.
        ratio = _log(batch) - _log(self._buffers[self.moment_name])
        self._collected["psi_distance"] = 0.5 * ratio.abs().mean()
        self._collected.update(self.observe(step))

    def diagnostics(self) -> dict[str, Tensor]:
        """What was seen while :attr:`collecting` was set, by name, each 0-d.

        ``psi_distance``: of the last step, the mean over channels of abs(log(psi_B / psi)), psi^2 being the second
        moment. ``nonfinite_steps``: number of steps discarded because a statistic or gradient was not finite.
        """
        self.flush()
        return dict(self._collected)

    # Conversion and copies.

    def _apply(self, fn, recurse=True):
        """Buffers take device and memory of ``fn``, and neither its dtype nor its values: ``to_empty`` has none."""
        self.flush()
        before = dict(self._buffers)
        super()._apply(fn, recurse)
        for name, old in before.items():
            new = self._buffers[name]
            if new.dtype != old.dtype:
                new = self._buffers[name] = torch.empty_like(old, device=new.device)
            if old.is_meta:
                new.fill_(self._initial.get(name, 0))
            elif new is not old and not new.is_meta:
                new.copy_(old)
        return self

    def __getstate__(self):
        self.flush()
        # Steps belong to the graphs of this module, not to the graphs of a copy. A process group cannot be copied, and
        # a copy of a scaler would not follow the scaler.
        return {**self.__dict__, "_pending": [], "process_group": None, "loss_scale": None}

    def __setstate__(self, state: dict) -> None:
        super().__setstate__(state)
        self._buffers = _State(self, self._buffers)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, alpha_fwd={self.alpha_fwd}"


def running_norms(model: nn.Module) -> list[RunningNorm]:
    """The norms of ``model`` (itself included) that have running statistics."""
    return [module for module in model.modules() if isinstance(module, RunningNorm)]


def set_loss_scale(model: nn.Module, scale) -> None:
    """Tell the norms of ``model`` what the loss is multiplied by before the backward pass, as under a ``GradScaler``.

    What they keep of gradients (:attr:`RunningNorm.gradient_state`), and the penalty of ``batch-reg``, are then those
    of the loss itself. Without it they are in units of the scale, and wrong for some steps after each of its changes.

    Args:
        scale: a number, a 0-d tensor, or an object whose method ``scale(tensor)`` multiplies by the scale, such as
            ``torch.amp.GradScaler``: one call suffices, its scale is used as it is in each backward pass. None: 1.

    Raises:
        ValueError: a number that is not greater than 0.
    """
    if isinstance(scale, int | float):
        scale = None if check_positive("scale", scale) == 1.0 else scale
    for norm in running_norms(model):
        norm.loss_scale = scale


def _was_counted() -> bool:
    """Whether this forward is a recomputation by checkpointing without reentry, whose first computation had gradients
    enabled. With reentry the first computation has them disabled."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return hooks is not None and hooks[0].__qualname__.startswith("_recomputation_hook.")


def _before_saving(module: RunningNorm, *_) -> None:
    module.flush()


def _before_loading(module: RunningNorm, state_dict: dict, prefix: str, *_) -> None:
    module.discard_pending()
    module._num_updates = None
    # With assign=True torch takes the tensors as they are. The dict is torch's own, not the caller's.
    for name, buffer in module._buffers.items():
        loaded = state_dict.get(prefix + name)
        if isinstance(loaded, Tensor):
            state_dict[prefix + name] = loaded.to(buffer.dtype).contiguous()


def _log(values: Tensor) -> Tensor:
    return values.clamp(min=torch.finfo(values.dtype).tiny).log()
