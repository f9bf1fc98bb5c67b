"""Norms with running statistics: float32 state that training steps change and evaluation uses."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from pn_fairseq import kernels
from pn_fairseq.norms.channel import ChannelNorm
from pn_fairseq.norms.checks import check_alpha, check_input, check_positive, warn_of_empty_sentences
from pn_fairseq.norms.compiled import compiled_step
from pn_fairseq.norms.diagnostics import Collected
from pn_fairseq.norms.distributed import refuse_join, world_size
from pn_fairseq.norms.nested import over_tokens
from pn_fairseq.norms.state import COUNT, StatefulNorm, is_recomputation
from pn_fairseq.norms.tokens import Contribution, Moments, Tokens, Training


class RunningNorm(StatefulNorm):
    r"""A norm with running statistics: state that training steps change and evaluation uses.

    A subclass names its state with :meth:`add_state`, says in :attr:`moment_name` (and :attr:`mean_name`) which part of
    it evaluation normalizes by, and defines :meth:`forward_pass`, :meth:`backward_pass` and, unless it keeps
    exponential averages, :meth:`update`. Masks, layer-scale, precision, ranks, activation checkpointing, gradient
    accumulation, inf and NaN, evaluation, recalibration, averaging, saving and diagnostics are handled by this class. A
    norm that also uses the statistics of each token defines :meth:`token_part` and :meth:`effective_affine`.

    **When the state changes.** A forward changes no state. A backward stores a :class:`~.tokens.Contribution`, once per
    forward. A forward that no backward can reach, because neither the input nor a parameter of the norm requires a
    gradient, stores it itself, unless gradients are disabled (``torch.no_grad()``); a checkpointed forward counts once.
    Such a step changes all state but :attr:`gradient_state`. :meth:`flush` applies the contributions to the state, and
    discards those without a real token or with a number that is not finite. It runs before the next training forward
    (not inside a backward pass, where a forward is a recomputation and has to see the same state again), in
    :meth:`set_num_updates`, on a change between training and evaluation, on saving, loading, copying and conversion,
    and when a buffer is read: as an attribute, or from ``buffers()`` or ``named_buffers()`` of this module or of a
    model that holds it. A tensor that was read earlier changes at the next of these occasions, and not during the
    backward pass itself.

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

    #: Holds what a norm keeps between forward, backward and update.
    contribution_type = Contribution

    #: Whether evaluation is one scale and shift per channel of the layer-scaled input, which folds into a linear map. A
    #: class whose :meth:`token_part` adds something in evaluation sets it to False.
    folds = True

    #: While set, it takes the place of a training step: :func:`pn_fairseq.norms.recalibrating`.
    recalibrating = False

    #: While set, :meth:`diagnostics` has something to report.
    collecting = False

    #: What the loss is multiplied by before the backward pass; see :func:`pn_fairseq.norms.set_loss_scale`.
    loss_scale = None

    #: Whether the norm has looked for sentences without a token, in its first mask only: it waits for the device.
    has_looked_at_mask = False

    #: While True, training batches enter no statistic: this rank repeats a batch because its own data has ended. In a
    #: synchronized norm this rank adds zeros to the all-reduce.
    ignoring = False

    def __init__(self, num_features: int, alpha_fwd: float = 0.9, sync: bool = False, process_group=None, **common):
        super().__init__(num_features, **common)
        self.alpha_fwd = check_alpha("alpha_fwd", alpha_fwd)
        self.sync, self.process_group = sync, process_group
        self._collected = Collected()

    # What a norm defines.

    def forward_pass(self, tokens: Tokens, contribution: Contribution) -> Tensor:
        """y, (T, B, C), from :meth:`.Tokens.normalize`.

        It must set ``contribution.batch``, by :meth:`.Tokens.moments` or ``normalize(moments=True)``. It may keep in
        ``contribution`` what the other passes need, if :attr:`contribution_type` declares it; state goes through
        :meth:`frozen_view`.
        """
        raise NotImplementedError

    def backward_pass(self, tokens: Tokens, contribution: Contribution) -> tuple[Tensor, Tensor]:
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
        """The statistics of a batch, over all ranks: ``contribution.batch``, and what recalibration averages."""
        return tokens.moments(centered=self.mean_name is not None)

    def update(self, contribution: Contribution) -> dict[str, Tensor]:
        """The state after ``contribution``, ``num_batches_tracked`` included, by buffer name. What is missing stays.

        Nothing changes where a number is not finite or where there is no real token; :meth:`if_counted` does that.
        Here: exponential averages of :meth:`statistics_of`.
        """
        batch = self.statistics_of(contribution.batch)
        mean = None if self.mean_name is None else self._buffers[self.mean_name]
        moment, mean, count = kernels.running_average(
            self._buffers[self.moment_name],
            mean,
            self.num_batches_tracked,
            batch[self.moment_name],
            None if mean is None else batch[self.mean_name],
            contribution.products,
            contribution.batch.count,
            self.alpha_fwd,
        )
        new = {self.moment_name: moment, COUNT: count}
        return new if self.mean_name is None else {self.mean_name: mean, **new}

    def if_counted(self, contribution: Contribution, new: dict[str, Tensor]) -> dict[str, Tensor]:
        """``new`` and the counter after it, for :meth:`update`; the old values if the step does not count."""
        values = torch.cat([value.flatten() for value in (*new.values(), contribution.products)])
        counted = values.isfinite().all() & (contribution.batch.count > 0)
        old = {name: self._buffers[name] for name in new}
        new = {name: torch.where(counted, value.detach().to(old[name].dtype), old[name]) for name, value in new.items()}
        return {**new, COUNT: self.num_batches_tracked + counted}

    def statistics_of(self, batch: Moments) -> dict[str, Tensor]:
        """The values of a batch that enter the running statistics for evaluation, by buffer name."""
        moments = {self.moment_name: batch.moment}
        return moments if self.mean_name is None else {self.mean_name: batch.mean, **moments}

    def observe(self, contribution: Contribution) -> dict[str, Tensor]:
        """More :meth:`diagnostics` of the last step, by name, each 0-d. It is called when they are read. What is
        counted over all steps belongs in :meth:`step_flags`."""
        return {}

    def step_flags(self, contribution: Contribution, counted: Tensor) -> dict[str, Tensor]:
        """Properties of a step that :meth:`diagnostics` counts, by name, each 0-d bool. ``counted``: whether the step
        is about to enter the state."""
        return {"nonfinite_steps": (contribution.batch.count > 0) & ~counted}

    # Training.

    def forward(self, x: Tensor, padding_mask: Tensor | None = None) -> Tensor:
        if x.is_nested:
            return over_tokens(self.forward, x, padding_mask)
        check_input(x, padding_mask, self.num_features, self.batch_first)
        compiling = torch.compiler.is_compiling()
        if not (x.is_meta or compiling):
            self.check_memory()
        if not self.training:
            return self._with_token_part(self.normalize_by(x, *self.evaluation_statistics()), x)
        refuse_transforms()
        if compiling:
            y = compiled_step(self, x, padding_mask)
        else:
            if padding_mask is not None and not self.has_looked_at_mask:
                self.has_looked_at_mask = True
                warn_of_empty_sentences(padding_mask)
            further = self.further_parameters()
            y = self.training_step(Training.apply, x, self.gain, self.bias, padding_mask, further)
        return self._with_token_part(y, x)

    forward.__doc__ = ChannelNorm.forward.__doc__

    def training_step(self, apply, x: Tensor, weight, bias, padding_mask: Tensor | None, further) -> Tensor:
        """y of a training step without :meth:`token_part`; ``apply`` calls :class:`.Training`."""
        if x.is_cuda and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "a CUDA graph cannot replay a training step of a norm of pn_fairseq, because the state is updated in "
                "Python: call eval() before the capture, or leave the norm out of the graph"
            )
        self.flush()
        if self.synchronises():
            refuse_join()
            if self.ignoring:
                padding_mask = torch.ones(x.shape[-2::-1], dtype=torch.bool, device=x.device)
                padding_mask = padding_mask.t() if self.batch_first else padding_mask
        if self.recalibrating:
            return self.recalibrating(x, padding_mask)
        contribution = self._queue.new_contribution()
        y = apply(x, weight, bias, padding_mask, self, contribution, *further)
        if not y.requires_grad and torch.is_grad_enabled() and not is_recomputation():
            contribution.has_gradient, contribution.products_reduced = False, True
            contribution.products = contribution.batch.moment.new_zeros(2, self.num_features)
            self.contribute(contribution)
        return y

    def _with_token_part(self, y: Tensor, x: Tensor) -> Tensor:
        part = self.token_part(x)
        return y if part is None else y + part

    def synchronises(self) -> bool:
        """Whether statistics are summed over several ranks."""
        return self.sync and world_size(self.process_group) > 1

    def contribute(self, contribution: Contribution) -> None:
        """Keep ``contribution`` for :meth:`flush`, unless this rank's batches do not count."""
        synchronises = self.synchronises()
        if synchronises:
            contribution.start_sum(self.process_group)  # every rank starts it, even for a discarded step
        if not self.ignoring or synchronises:
            self._queue.put(contribution)

    def state_after(self, contribution: Contribution) -> dict[str, Tensor]:
        """What ``contribution`` changes, by buffer name."""
        contribution.finish_sum()
        new = self.update(contribution)
        if not contribution.has_gradient:
            new = {name: value for name, value in new.items() if name not in self.gradient_state}
        if self.collecting:
            self._collected.take(self, contribution, new[COUNT] > self.num_batches_tracked)
        return new

    def set_num_updates(self, num_updates: int | None) -> None:
        """Tell the norm that ``num_updates`` optimizer updates are completed; None: it is not known."""
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

    # Evaluation.

    def evaluation_statistics(self) -> tuple[Tensor | None, Tensor]:
        """What evaluation normalizes by: the mean (None: 0) and the second moment about it, both (C,)."""
        return None if self.mean_name is None else self._buffers[self.mean_name], self._buffers[self.moment_name]

    def evaluation_affine(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Scale and shift, (C,) of ``dtype``: in evaluation y = scale * h + shift, with h the layer-scaled x.

        Without :meth:`token_part`, which is None in evaluation for a norm that :attr:`folds`.
        """
        mean, moment = (value if value is None else value.to(dtype) for value in self.evaluation_statistics())
        given = (value if value is None else value.to(dtype) for value in (self.gain, self.bias))
        further = [value.to(dtype) for value in self.further_parameters()]
        weight, bias = self.effective_affine(*given, further, mean, moment)
        scale = torch.rsqrt(moment + self.eps)
        scale = scale if weight is None else scale * weight
        shift = torch.zeros_like(scale) if bias is None else bias
        return scale, shift if mean is None else shift - mean * scale

    def normalize_by(self, x: Tensor, mean: Tensor | None, moment: Tensor) -> Tensor:
        if moment.dtype != (dtype := kernels.acc_dtype(x)):
            mean, moment = None if mean is None else mean.to(dtype), moment.to(dtype)
        weight, bias = self.effective_affine(self.gain, self.bias, self.further_parameters(), mean, moment)
        return kernels.evaluate(x, weight, bias, mean, moment, self.layer_scale_groups, self.eps)

    # Diagnostics.

    def diagnostics(self) -> dict[str, Tensor]:
        """What was seen while :attr:`collecting` was set, by name, each 0-d.

        ``psi_distance``: of the last step, the mean over channels of abs(log(psi_B / psi)), psi^2 being the second
        moment. ``nonfinite_steps``: number of steps discarded because a statistic or gradient was not finite.
        """
        self.flush()
        return self._collected.report(self)


def refuse_transforms() -> None:
    """Called in training."""
    if torch.compiler.is_exporting() or torch.jit.is_tracing() or torch._C._are_functorch_transforms_active():
        raise RuntimeError(
            "torch.export and torch.func (and torch.jit.trace) cannot transform a norm of pn_fairseq in training mode: "
            "call eval() first"
        )


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
        ValueError: anything else, a number that is not finite and greater than 0 among it.
    """
    if not (scale is None or callable(getattr(scale, "scale", None))):
        number = scale.item() if isinstance(scale, Tensor) and scale.dim() == 0 else scale
        scale = None if check_positive("scale", number) == 1.0 else scale
    for norm in running_norms(model):
        norm.loss_scale = scale
