"""The operators ``torch.ops.pn_fairseq.*``, and functions with a gradient made of them.

:mod:`.reference` defines the arguments and the results of each and serves every device; C++ and
Triton compute the same on CPU and CUDA. They trust their arguments, because the norms check users'
input once. Tokens and masks may have any strides, and the usual ones, such as those of a transposed
batch, are read without a copy. Results are contiguous, like the results of torch's LayerNorm. An
operator whose name ends in ``_`` changes state, which is contiguous, in place; the others are pure.

- ``normalize``: y from given statistics, optionally with the second moment of the batch from the
  same pass
- ``moments``: statistics of the batch
- ``gradient``: dx from given vectors, optionally with the sums over tokens from the same pass
- ``gradient_sums``: sums over tokens of a backward pass
- ``running_average_``: moves the running statistics of a norm that keeps averages
- ``power_update_``: moves the state of PN
- ``power_step_``: the backward of PN: ``gradient`` and ``power_update_``
- ``batch_normalize``: ``moments`` and ``normalize``
- ``batch_step_``: its backward: ``gradient_sums``, ``gradient`` and ``running_average_``
- ``window_statistics``: what a forward of UN or MABN normalizes by; ``window_update_`` moves their
  state
- ``standardize``: y by the statistics of each token; ``standardize_gradient`` is its backward
- ``squash``: y by tanh or erf, channel by channel; ``squash_gradient`` is its backward
"""

import re
import warnings
from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from pn_fairseq.kernels import reference

NAMESPACE = "pn_fairseq"

#: Operator -> its reference implementation.
OPERATORS: dict[str, Callable] = {}

#: Operator -> the names of its arguments, and of the numbers among them, which come last.
ARGUMENTS: dict[str, list[str]] = {}
NUMBERS: dict[str, list[str]] = {}

#: Operator -> the positions of the arguments that it changes.
CHANGED: dict[str, tuple[int, ...]] = {}

_library = torch.library.Library(NAMESPACE, "DEF")


def _operator(function: Callable, *state: str) -> Callable:
    """Define ``torch.ops.pn_fairseq.NAME`` with ``function`` as its reference implementation.

    The operator takes its name, its arguments without a default and their annotated types from
    ``function``. ``state`` names the arguments that it changes.
    """
    name = function.__name__
    schema = torch.library.infer_schema(function, mutates_args=state).replace("SymInt", "int")
    _library.define(name + re.sub(r", \w+ \w+=\w+", "", schema))
    _library.impl(name, function, "CompositeExplicitAutograd")
    # Every call whose result needs a gradient is inside a torch.autograd.Function, which defines
    # the gradient. A fallthrough skips autograd's dispatch key, whose default (a warning in the
    # backward that these operators have no gradient) costs time in every call.
    _library.impl(name, torch.library.fallthrough_kernel, "Autograd")
    operator = getattr(torch.ops.pn_fairseq, name).default
    OPERATORS[name] = function
    arguments = operator._schema.arguments
    ARGUMENTS[name] = [argument.name for argument in arguments]
    NUMBERS[name] = [each.name.upper() for each in arguments if "Tensor" not in str(each.type)]
    CHANGED[name] = tuple(ARGUMENTS[name].index(argument) for argument in state)
    return operator


normalize = _operator(reference.normalize)
moments = _operator(reference.moments)
gradient_sums = _operator(reference.gradient_sums)
gradient = _operator(reference.gradient)
running_average_ = _operator(
    reference.running_average_, "moment", "mean", "num_batches", "diagnostics"
)
power_update_ = _operator(reference.power_update_, "psi2", "nu", "num_batches", "diagnostics")
power_step_ = _operator(reference.power_step_, "psi2", "running_nu", "num_batches", "diagnostics")
batch_normalize = _operator(reference.batch_normalize)
_RUNNING = ("running_moment", "running_mean", "num_batches", "diagnostics")
batch_step_ = _operator(reference.batch_step_, *_RUNNING)
window_statistics = _operator(reference.window_statistics)
_WINDOW = ("running_psi2", "nu", "psi2_window", "lambda_window", "num_batches", "diagnostics")
window_update_ = _operator(reference.window_update_, *_WINDOW)
standardize = _operator(reference.standardize)
standardize_gradient = _operator(reference.standardize_gradient)
squash = _operator(reference.squash)
squash_gradient = _operator(reference.squash_gradient)


#: Name here -> function with a gradient that the C++ kernels provide, on any device; empty without
#: the kernels. ``power_train`` and ``batch_train`` are whole training steps.
COMPILED: dict[str, Callable] = {}


def compiled(name: str | None, x: Tensor) -> Callable | None:
    """A function of :data:`COMPILED`; it reads the memory of plain tensors. None if it is missing,
    or if an autograd function in Python is needed: torch.compile can trace that one, and a tensor
    subclass such as DTensor can replace its operators.
    """
    if torch.compiler.is_compiling() or type(x) is not Tensor:
        return None
    return COMPILED.get(name)


def exporting() -> bool:
    """Whether ``torch.export`` traces.

    ``torch.compiler.is_exporting()`` reads the same flag, but with torch 2.11 and earlier it is
    also true in the code that ``torch.compile`` compiles.
    """
    return torch.compiler._is_exporting_flag


def by_reference() -> bool:
    """Whether the reference computes instead of the operators: in a transform of ``torch.func``,
    and in a graph that leaves this process (``torch.export``, ``torch.jit.trace``, and ONNX through
    either), because the operators are unknown there.
    """
    return torch._C._are_functorch_transforms_active() or exporting() or torch.jit.is_tracing()


@cache
def warn_by_reference(reason: str) -> None:
    """Warn that a GPU computes with the reference, once for each ``reason``."""
    warnings.warn(
        f"pn_fairseq computes by plain PyTorch on CUDA, which is slow: {reason}", stacklevel=4
    )


def refuse_second_derivative() -> None:
    """Raise RuntimeError in a backward pass that is itself differentiated."""
    if torch.is_grad_enabled():
        raise RuntimeError("the norms of pn_fairseq have no second derivative (create_graph=True)")


def _parameters(sums: Tensor, needed: tuple[bool, ...], like: Tensor | None) -> list[Tensor | None]:
    """The rows of ``sums`` in the type of ``like``; None for a parameter that needs no gradient."""
    if not any(needed):
        return [None, None]
    rows = sums.to(like.dtype).unbind()
    return [row if needs else None for row, needs in zip(rows, needed, strict=True)]


class _Normalize(torch.autograd.Function):
    """``normalize`` by given statistics, differentiable with respect to x, weight and bias."""

    @staticmethod
    def forward(ctx, x, weight, bias, mean, moment, groups, eps):
        y, inv_rms, _, _ = normalize(x, weight, bias, mean, moment, None, None, groups, eps, False)
        # The running statistics may change before the backward pass, which needs the values that
        # this forward used.
        kept = [None if value is None else value.clone() for value in (mean, moment)]
        ctx.save_for_backward(x, weight, *kept, inv_rms)
        ctx.rest = groups, eps
        return y

    @staticmethod
    def backward(ctx, dy):
        refuse_second_derivative()
        x, weight, mean, moment, inv_rms = ctx.saved_tensors
        needed = ctx.needs_input_grad[1:3]
        nothing = None, None, None, None
        dx, sums, _ = gradient(
            dy, x, None, weight, mean, moment, *nothing, inv_rms, *ctx.rest, any(needed)
        )
        return dx, *_parameters(sums, needed, weight), *nothing


def evaluate(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor | None,
    moment: Tensor | None,
    groups: int,
    eps: float,
) -> Tensor:
    """y of :func:`.reference.normalize`, with its gradient: for evaluation, and for layer-scale by
    itself.
    """
    if by_reference():
        return reference.normalize(x, weight, bias, mean, moment, None, None, groups, eps, False)[0]
    # on a few tokens, the autograd function would cost as much as the operator
    if not torch.is_grad_enabled():
        return normalize(x, weight, bias, mean, moment, None, None, groups, eps, False)[0]
    function = compiled("evaluate", x) or _Normalize.apply
    return function(x, weight, bias, mean, moment, groups, eps)


class _Standardize(torch.autograd.Function):
    """``standardize`` with its gradient."""

    @staticmethod
    def forward(ctx, x, weight, bias, groups, centered, *rest):
        *divisor, gain, gain_slope, through_mean, through_divisor = rest
        y, stats = standardize(x, weight, bias, groups, centered, *divisor, gain, gain_slope)
        ctx.save_for_backward(x, weight, stats)
        ctx.rest = groups, gain, gain_slope, centered and through_mean, through_divisor
        return y

    @staticmethod
    def backward(ctx, dy):
        refuse_second_derivative()
        x, weight, stats = ctx.saved_tensors
        needed = ctx.needs_input_grad[1:3]
        dx, sums = standardize_gradient(dy, x, weight, stats, *ctx.rest, any(needed))
        return dx, *_parameters(sums, needed, weight), *[None] * 10


def standardized(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    groups: int = 1,
    centered: bool = True,
    square_factor: float = 1.0,
    eps_in_root: float = 0.0,
    eps_outside: float = 0.0,
    min_divisor: float = 0.0,
    gain: float = 1.0,
    gain_slope: float = 0.0,
    through_mean: bool = True,
    through_divisor: bool = True,
) -> Tensor:
    """y of :func:`.reference.standardize`, with its gradient."""
    divisor_and_gains = (
        centered,
        square_factor,
        eps_in_root,
        eps_outside,
        min_divisor,
        gain,
        gain_slope,
    )
    through = through_mean, through_divisor
    if by_reference():
        return reference.standardize(x, weight, bias, groups, *divisor_and_gains, *through)[0]
    if not torch.is_grad_enabled():
        return standardize(x, weight, bias, groups, *divisor_and_gains)[0]
    function = compiled("standardized", x) or _Standardize.apply
    return function(x, weight, bias, groups, *divisor_and_gains, *through)


class _Squash(torch.autograd.Function):
    """``squash``, differentiable with respect to x and all parameters."""

    @staticmethod
    def forward(ctx, x, weight, bias, alpha, shift, erf):
        ctx.save_for_backward(x, weight, alpha, shift)
        ctx.erf = erf
        return squash(x, weight, bias, alpha, shift, erf)

    @staticmethod
    def backward(ctx, dy):
        refuse_second_derivative()
        x, weight, alpha, shift = ctx.saved_tensors
        dx, sums, scalars = squash_gradient(dy, x, weight, alpha, shift, ctx.erf)
        needed = ctx.needs_input_grad
        rest = _parameters(scalars.unsqueeze(-1), needed[3:5], alpha)
        return dx, *_parameters(sums, needed[1:3], weight), *rest, None


def squashed(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    alpha: Tensor,
    shift: Tensor | None,
    erf: bool,
) -> Tensor:
    """y of :func:`.reference.squash`, with its gradient."""
    if by_reference():
        return reference.squash(x, weight, bias, alpha, shift, erf)
    if not torch.is_grad_enabled():
        return squash(x, weight, bias, alpha, shift, erf)
    function = compiled("squashed", x) or _Squash.apply
    return function(x, weight, bias, alpha, shift, erf)
