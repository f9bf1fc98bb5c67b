"""Norms with running statistics: float32 state that training steps change and evaluation uses."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from weakref import ref

import torch
from torch import Tensor, nn

from pn_fairseq import kernels
from pn_fairseq.kernels.ops import by_reference
from pn_fairseq.kernels.reference import enters, move
from pn_fairseq.norms.core.channel import ChannelNorm
from pn_fairseq.norms.core.checks import (
    check_alpha,
    check_input,
    check_positive,
    warn_of_empty_sentences,
)
from pn_fairseq.norms.core.compiled import counts_now, scaled
from pn_fairseq.norms.core.distributed import refuse_join, world_size
from pn_fairseq.norms.core.nested import over_tokens
from pn_fairseq.norms.core.passes import (
    inside_backward,
    is_recomputation,
    one_at_a_time,
    unrecorded,
)
from pn_fairseq.norms.core.state import COUNT, StatefulNorm, flag
from pn_fairseq.norms.core.step import Moments, Step, Training

#: The numbers that norms collect. The operators that move the state write the first four.
DIAGNOSTICS = ("nonfinite_steps", "guarded_steps", "psi_distance", "gamma_max", "penalty")


#: The methods that a :attr:`RunningNorm.whole_step` replaces.
PASSES = (
    "backward_pass",
    "batch_moments",
    "corrections",
    "effective_affine",
    "exact_gradient",
    "forward_pass",
    "further_parameters",
    "statistics_of",
    "token_part",
    "training_affine",
    "update",
)


class RunningNorm(StatefulNorm):
    r"""A norm with running statistics: state that training steps change and evaluation uses.

    A subclass declares its state with :meth:`add_state`, names in :attr:`moment_name` (and
    :attr:`mean_name`) the part that evaluation normalizes by, and defines :meth:`forward_pass`,
    :meth:`backward_pass` and, unless it keeps exponential averages, :meth:`update`. This class
    handles masks, layer-scale, precision, ranks, activation checkpointing, gradient accumulation,
    inf and NaN, evaluation, recalibration, averaging, saving and diagnostics. A norm that also uses
    the statistics of each token defines :meth:`token_part` and :meth:`effective_affine`.

    **When the state changes.** The backward of a norm moves its state in place, once for each
    forward; a synchronized norm does so at the end of the backward pass. So the state is right when
    ``backward()`` returns. A forward changes no state: it copies what it and its backward read
    (:meth:`read_state`). A forward that no backward can reach, because neither the input nor a
    parameter of the norm requires a gradient, moves the state itself, except for
    :attr:`gradient_state`, and not under ``torch.no_grad()``; a checkpointed forward counts once.

    **A step does not count** if its batch has no real token, if a number is not finite, if
    :attr:`ignoring` was set in its forward, or if the state was replaced after its forward (by
    ``load_state_dict``, :meth:`reset_running_stats`,
    :func:`~pn_fairseq.norms.recalibrating` or :func:`~pn_fairseq.norms.average_running_stats`).

    The state stays float32 through ``.half()``, ``.bfloat16()``, ``.to(dtype)`` and loading. The
    buffer ``num_batches_tracked`` (int64) counts the steps that have entered the state.

    Args:
        alpha_fwd: decay of the exponential averages, in (0, 1).
        sync: take all statistics over the real tokens of all ranks, weighted by their number; every
            rank must run the same forwards and backwards. Without ``torch.distributed``, or with
            one rank, this option changes nothing.
        process_group: the ranks; None: all. A copy of the module has None, and no loss scale.
        others: see :class:`ChannelNorm`.
    """

    #: Buffers that evaluation normalizes by: the second moment, and the mean that it is about;
    #: None: it is about 0.
    moment_name: str
    mean_name: str | None = None

    mixes_tokens = "always"
    normalizes_by = "batch"

    #: Buffers made of gradients. A step without a backward leaves them as they are.
    gradient_state: tuple[str, ...] = ()

    #: The names of the attributes of the step, besides ``batch``, that :meth:`forward_pass` stores
    #: for the later passes: tensors, or values that the norm's options determine.
    keeps: tuple[str, ...] = ()

    #: ``whole_step(x, padding, *parameters)``: y from a C++ function that computes a training step
    #: with its backward; None if it cannot. Not used with synchronized statistics. The attribute is
    #: None in a class that overrides one of the :data:`PASSES`.
    whole_step = None

    #: Whether the second moment enters the running statistics with the factor N / (N - 1).
    unbiased = False

    #: Whether evaluation is one scale and shift per channel of the layer-scaled input, which folds
    #: into a linear map. A class whose :meth:`token_part` adds something in evaluation sets it to
    #: False.
    folds = True

    #: In a :func:`pn_fairseq.norms.recalibrating` block: what replaces a training step.
    recalibration = None

    #: While set, :meth:`diagnostics` has something to report.
    collecting = False

    #: What the loss is multiplied by before the backward pass; see
    #: :func:`pn_fairseq.norms.set_loss_scale`.
    loss_scale = None

    #: Whether the norm has looked for sentences without a token. It looks only at its first mask,
    #: because that waits for the device.
    has_looked_at_mask = False

    #: While True, the batches of training forwards enter no statistic:
    #: :func:`pn_fairseq.norms.ignoring`. In a synchronized norm this rank adds zeros to the
    #: all-reduce.
    ignoring = False

    def __init__(
        self,
        num_features: int,
        alpha_fwd: float = 0.9,
        sync: bool = False,
        process_group=None,
        **common,
    ):
        super().__init__(num_features, **common)
        self.alpha_fwd = check_alpha("alpha_fwd", alpha_fwd)
        self.sync, self.process_group = sync, process_group
        #: Whether :attr:`loss_scale` is set.
        self._has_loss_scale = flag()
        # -1: no step has run
        self._scratch["diagnostics"] = torch.tensor([0.0, 0.0, -1.0, 0.0, 0.0])
        #: References to the steps whose all-reduce runs, in the order of their backwards.
        self._waiting: list[ref[Step]] = []

    def __init_subclass__(cls, **keywords):
        super().__init_subclass__(**keywords)
        served = next(base for base in cls.__mro__ if "whole_step" in vars(base))
        if any(getattr(cls, name, 0) is not getattr(served, name, 0) for name in PASSES):
            cls.whole_step = None

    # What a norm defines.

    def forward_pass(self, step: Step) -> Tensor:
        """y, (T, B, C), from :meth:`.Step.normalize`.

        This method must set ``step.batch``, by :meth:`.Step.moments` or
        ``normalize(moments=True)``, and reads the state from ``step.state``. It may store in
        ``step`` what the other passes need, under the names in :attr:`keeps`.
        """
        raise NotImplementedError

    def backward_pass(self, step: Step) -> tuple[Tensor, Tensor]:
        """dx, and the gradients of weight and bias, (2, C), from :meth:`.Step.gradient` or
        ``gradient_sums``.

        This method must set ``step.products``, by one of these.
        """
        raise NotImplementedError

    def effective_affine(
        self,
        weight: Tensor | None,
        bias: Tensor | None,
        further: Sequence[Tensor],
        mean: Tensor | None,
        moment: Tensor,
    ) -> tuple[Tensor | None, Tensor | None]:
        """The factors a and b, (C,), in y = a x_hat + b; None: 1 and 0. Here: ``weight`` and
        ``bias``.

        Evaluation, folding and recalibration use it. A norm whose a and b are not ``weight`` and
        ``bias``, such as ``prep-batch``, overrides this method and also calls it in
        :meth:`forward_pass`; its :meth:`backward_pass` returns the gradients.

        Args:
            weight, bias: of the norm, (C,), or None.
            further: the values of :meth:`further_parameters`.
            mean, moment: what x_hat is normalized by, (C,), in the dtype that the factors should
                have.
        """
        return weight, bias

    def token_part(self, x: Tensor, state: dict[str, Tensor]) -> Tensor | None:
        """What is added to y in a norm that mixes the statistics of the batch with the statistics
        of each token.

        None: nothing. ``x`` is the input of the norm: apply ``self.layer_scale``. ``state`` is what
        the forward read. The result has the shape and dtype of ``x``, is a function of each token
        by itself, and gets its gradients from autograd. It is called in training (after
        :meth:`forward_pass`), in evaluation, and while :attr:`recalibration` is set. Where it
        returns a tensor in evaluation, :attr:`folds` must be False.
        """
        return None

    def evaluation_caveat(self) -> str:
        """Why evaluation means little yet, as words after "the norm is evaluated"; "" otherwise."""
        return ""

    def further_parameters(self) -> tuple[Tensor, ...]:
        """The learned parameters besides weight and bias; the passes get them as ``step.further``.
        ``backward_pass`` returns their gradients after dx and the gradients of weight and bias.
        """
        return ()

    def batch_moments(self, step: Step) -> Moments:
        """The statistics of a batch, over all ranks: ``step.batch``, which recalibration averages
        as well.
        """
        return step.moments(centered=self.mean_name is not None)

    def statistics_of(self, batch: Moments) -> tuple[Tensor, Tensor | None]:
        """The moment and the mean of a batch that enter the running statistics, before
        :attr:`unbiased` is applied.
        """
        return batch.moment, batch.mean

    def update(self, step: Step, state: dict[str, Tensor]) -> None:
        """Move the ``state``, tensors by name, in place, and count the step in
        ``num_batches_tracked``.

        A step with a number that is not finite, or without a real token, must change nothing;
        :meth:`move` does that. Here: exponential averages of :meth:`statistics_of`.
        """
        moment, mean = self.statistics_of(step.batch)
        kernels.running_average_(
            state[self.moment_name],
            None if self.mean_name is None else state[self.mean_name],
            state[COUNT],
            self.diagnostics_memory(),
            moment,
            mean,
            step.products,
            step.batch.count,
            self.alpha_fwd,
            self.unbiased,
        )

    def move(self, step: Step, state: dict[str, Tensor], new: dict[str, Tensor]) -> None:
        """For :meth:`update`: set the ``state`` to the ``new`` values, by name, and count the step,
        unless the step must change nothing. A step without a gradient leaves :attr:`gradient_state`
        unchanged.
        """
        moment, _ = self.statistics_of(step.batch)
        values = *new.values(), step.products
        running = state[self.moment_name]
        counted = enters(running, self.diagnostics_memory(), moment, step.batch.count, *values)
        for name, value in new.items():
            if step.has_gradient or name not in self.gradient_state:
                move(state[name], value, counted)
        state[COUNT].add_(counted)

    def note(self, name: str, value: Tensor) -> None:
        """For :meth:`update`, while :attr:`collecting` is set: record one of the
        :meth:`diagnostics`, 0-d, of this step.
        """
        self._scratch["diagnostics"][DIAGNOSTICS.index(name)] = value

    # Training.

    def forward(self, x: Tensor, padding_mask: Tensor | None = None) -> Tensor:
        if x.is_nested:
            return over_tokens(self.forward, x, padding_mask)
        check_input(x, padding_mask, self.num_features, self.batch_first)
        compiling = torch.compiler.is_compiling()
        if not (x.is_meta or compiling):
            self.ensure_memory()
        if not self.training:
            y, state = self.normalize_by(x, *self.evaluation_statistics()), self._buffers
        else:
            y, state = self._training_forward(x, padding_mask)
        part = self.token_part(x, state)
        return y if part is None else y + part

    forward.__doc__ = ChannelNorm.forward.__doc__

    def _training_forward(self, x: Tensor, padding_mask: Tensor | None):
        """y without :meth:`token_part`, and the state that it read."""
        refuse_transforms()
        compiling = torch.compiler.is_compiling()
        if padding_mask is not None and not (compiling or self.has_looked_at_mask):
            self.has_looked_at_mask = True
            warn_of_empty_sentences(padding_mask)
        if self.synchronises():
            refuse_join()
        padding = self._padding_of_step(x, padding_mask)
        if self.recalibration is not None:
            return self.recalibration.normalize(x, padding), self._buffers
        parameters = self.gain, self.bias, *self.further_parameters()
        if compiling:
            # With dynamic=True a number is an input of the graph. If the compiler met eps first
            # inside the autograd function, token_part could not use it outside.
            if not self.eps > 0:
                raise ValueError(f"eps must be positive, not {self.eps}")
        with_gradients = torch.is_grad_enabled()
        has_backward = with_gradients and _any_requires_grad(x, *parameters)
        if has_backward and self.whole_step is not None and not self.synchronises():
            y = self.whole_step(x, padding, *parameters)
            if y is not None:
                return y, self._buffers
        state = self.read_state()
        if has_backward:
            return Training.apply(self, state, padding, x, *parameters), state
        step = Step(self, state, padding, x, *parameters)
        y = self.forward_pass(step)
        if with_gradients:
            self._contribute_without_gradient(step)
        return y, state

    def known_to_step(self) -> tuple:
        """What the backward of a :attr:`whole_step` must know about the norm besides its state."""
        flags = self.epoch, self._has_loss_scale, self.handle, self.ignoring
        return self.diagnostics_memory(), *flags

    def _padding_of_step(self, x: Tensor, padding_mask: Tensor | None) -> Tensor | None:
        """The mask in the order of the tokens of x."""
        if self.ignoring and self.synchronises():
            return x.new_ones(x.shape[:-1], dtype=torch.bool)
        if padding_mask is None or padding_mask.dim() == 1 or self.batch_first:
            return padding_mask
        return padding_mask.t()

    def _contribute_without_gradient(self, step: Step) -> None:
        """Move the state by a step that no backward can reach, but only once if its forward is
        repeated.
        """
        if torch.compiler.is_compiling():
            step.batch = step.batch._replace(count=counts_now(step.batch.count))
        elif is_recomputation():
            return
        step.has_gradient, step.products_reduced = False, True
        step.products = step.batch.moment.new_zeros(2, self.num_features)
        self.contribute(step)

    def synchronises(self) -> bool:
        """Whether statistics are summed over several ranks."""
        return self.sync and world_size(self.process_group) > 1

    def contribute(self, step: Step) -> None:
        """Move the state by ``step``, whose backward has run; if its sum over the ranks is still
        running, move the state when this backward pass ends.
        """
        if self.synchronises():
            at_once = torch.compiler.is_compiling() or not inside_backward()
            # Every rank starts the sum, even for a step that does not count.
            step.start_sum(self.process_group, wait=at_once)
            if step.work is not None:
                self._waiting.append(ref(step))
                step.event = torch.cuda.current_stream().record_event() if step.x.is_cuda else None
                torch.autograd.Variable._execution_engine.queue_callback(
                    partial(self._take_in_until, step)
                )
                return
        self.take_in(step)

    def _take_in_until(self, last: Step) -> None:
        """Take in the waiting steps, in the order of their backwards, up to ``last``.

        A backward pass within another one ends first: without this order its steps would overtake
        earlier ones. Only the engine holds the steps, so those of a failed backward pass are gone.
        """
        if last.event is not None:
            torch.cuda.current_stream().wait_event(last.event)
        while any(waiting() is last for waiting in self._waiting):
            step = self._waiting.pop(0)()
            if step is not None:
                self.take_in(step)

    def take_in(self, step: Step) -> None:
        """Move the state by ``step``, unless it must not count, or has counted already."""
        step.finish_sum()
        with one_at_a_time():
            state = self.state_to_move(step)
            if state is None:
                return
            with unrecorded():
                self.update(step, state)
            step.mark_taken_in()

    def state_to_move(self, step: Step) -> dict[str, Tensor] | None:
        """The state that ``step`` moves: that of its forward.

        None: the step must not count, or has counted already.
        """
        if step.ignored and not self.synchronises():
            return None
        forward = step.forward
        if forward is None:  # compiled, or without a backward
            return self._buffers
        return forward.buffers if forward.counts and forward.epoch is self.epoch else None

    def diagnostics_memory(self) -> Tensor | None:
        """Where the operators that move the state write :data:`DIAGNOSTICS`."""
        return self._scratch["diagnostics"] if self.collecting else None

    def number_of(self, scale: float) -> Tensor:
        """A loss scale on the device of the norm, always in the same memory, as CUDA graphs
        require.
        """
        number = self._scratch.setdefault(
            "loss_scale", torch.ones((), device=self._buffers[COUNT].device)
        )
        return number.fill_(scale)

    def current_loss_scale(self) -> Tensor | None:
        """One number on the device of the norm; None: 1."""
        scale, number = self.loss_scale, self._buffers[COUNT]
        if scale is None:
            return None
        if isinstance(scale, Tensor):
            return scale.to(number.device)
        if torch.compiler.is_compiling():
            return scaled(self.handle, number)
        return scale.scale(torch.ones((), device=number.device))

    # Evaluation.

    def evaluation_statistics(self) -> tuple[Tensor | None, Tensor]:
        """What evaluation normalizes by: the mean (None: 0) and the second moment about it, both
        (C,).
        """
        mean = None if self.mean_name is None else self._buffers[self.mean_name]
        return mean, self._buffers[self.moment_name]

    def evaluation_affine(self) -> tuple[Tensor, Tensor]:
        """Scale and shift, (C,) in float64: in evaluation y = scale * h + shift, with h the
        layer-scaled x.

        Without :meth:`token_part`, which is None in evaluation for a norm that :attr:`folds`.
        """
        given = *self.evaluation_statistics(), self.gain, self.bias, *self.further_parameters()
        mean, moment, weight, bias, *further = _all_to(torch.float64, given)
        weight, bias = self.effective_affine(weight, bias, further, mean, moment)
        scale = torch.rsqrt(moment + self.eps)
        if weight is not None:
            scale = scale * weight
        shift = torch.zeros_like(scale) if bias is None else bias
        if mean is not None:
            shift = shift - mean * scale
        return scale, shift

    def normalize_by(self, x: Tensor, mean: Tensor | None, moment: Tensor) -> Tensor:
        dtype = kernels.acc_dtype(x)
        if moment.dtype != dtype:
            mean, moment = _all_to(dtype, (mean, moment))
        weight, bias = self.effective_affine(
            self.gain, self.bias, self.further_parameters(), mean, moment
        )
        return kernels.evaluate(x, weight, bias, mean, moment, self.layer_scale_groups, self.eps)

    # Diagnostics.

    #: Which of :data:`DIAGNOSTICS` the norm reports.
    reports: tuple[str, ...] = ("nonfinite_steps", "psi_distance")

    def diagnostics(self) -> dict[str, Tensor]:
        """What was seen while :attr:`collecting` was set, by name, each 0-d; empty before the first
        step.

        ``psi_distance``: mean over channels of abs(log(psi_B / psi)) in the last step, where psi^2
        is the second moment. ``nonfinite_steps``: number of steps that did not count because a
        statistic or gradient was not finite.
        """
        values = dict(zip(DIAGNOSTICS, self._scratch["diagnostics"].clone(), strict=True))
        if values["psi_distance"] == -1.0:
            return {}
        return {name: values[name] for name in self.reports}


def refuse_transforms() -> None:
    """Raise RuntimeError in training inside a transform or an exported graph."""
    if by_reference():
        raise RuntimeError(
            "torch.export and torch.func (and torch.jit.trace) cannot transform a norm of "
            "pn_fairseq in training mode: call eval() first"
        )


def _any_requires_grad(*tensors: Tensor | None) -> bool:
    for tensor in tensors:
        if tensor is not None and tensor.requires_grad:
            return True
    return False


def _all_to(dtype: torch.dtype, tensors: Iterable[Tensor | None]) -> list[Tensor | None]:
    return [None if tensor is None else tensor.to(dtype) for tensor in tensors]


def running_norms(model: nn.Module) -> list[RunningNorm]:
    """The norms of ``model`` (itself included) that have running statistics."""
    return [module for module in model.modules() if isinstance(module, RunningNorm)]


def set_loss_scale(model: nn.Module, scale) -> None:
    """Tell the norms of ``model`` what the loss is multiplied by before the backward pass, as under
    a ``GradScaler``.

    The state that norms keep of gradients (:attr:`RunningNorm.gradient_state`), and the penalty of
    ``batch-reg``, then belong to the loss itself. Without this call they are in units of the scale,
    and wrong for some steps after each change of the scale.

    Args:
        scale: a number, a 0-d tensor, or an object whose method ``scale(tensor)`` multiplies by the
            scale, such as ``torch.amp.GradScaler``: one call suffices, since each backward pass
            uses the current scale. None: 1.

    Raises:
        ValueError: anything else, including a number that is not finite or not greater than 0.
    """
    if not (scale is None or callable(getattr(scale, "scale", None))):
        number = scale.item() if isinstance(scale, Tensor) and scale.dim() == 0 else scale
        scale = None if check_positive("scale", number) == 1.0 else scale
    for norm in running_norms(model):
        norm.loss_scale = norm.number_of(scale) if isinstance(scale, (int, float)) else scale
        norm._has_loss_scale.fill_(scale is not None)


@contextmanager
def ignoring(model: nn.Module, ignore: bool = True) -> Iterator[None]:
    """Keep the batches of training forwards inside the ``with`` block out of the statistics of all
    norms of ``model``, even if their backward comes later::

        with ignoring(model):
            y = model(perturbed)  # normalized as in training; no running statistic changes

    In a synchronized norm this rank adds zeros to the sums over all ranks, which still enter the
    statistics: use the block on every rank, or on a rank that repeats a batch because its own data
    has ended. ``ignore`` False: do nothing.
    """
    norms = running_norms(model) if ignore else []
    before = [norm.ignoring for norm in norms]
    for norm in norms:
        norm.ignoring = True
    try:
        yield
    finally:
        for norm, value in zip(norms, before, strict=True):
            norm.ignoring = value
