"""The operators of :mod:`.ops` by Triton, for CUDA.

Nothing here waits for the GPU or reads from it. What reads tokens is one launch over them and,
where there are sums, a small one that finishes them; the operators on the state are one small
launch. What does not fit into one program (more than ``MAX_CHANNELS`` channels) is computed by the
reference.

The shapes of tiles and the number of programs are chosen by rule and not by trial, which would cost
seconds for every new shape and could choose differently, and so round differently, in every run.
With ``TRITON_INTERPRET=1`` in the environment before triton is imported, the same functions compute
on the CPU, slowly: tests do that.
"""

import warnings
from functools import cache, lru_cache, wraps

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.compiler import CompiledKernel

from pn_fairseq.kernels import triton_kernels as kernels
from pn_fairseq.kernels.ops import CHANGED, OPERATORS
from pn_fairseq.kernels.reference import acc_dtype

#: Channels that one program can hold, with groups and their number rounded up to powers of two.
MAX_CHANNELS = 8192

#: Tokens that one call can take: their numbers are 32 bit.
MAX_TOKENS = 2**30

#: Elements of a tile that a thread holds.
ELEMENTS = 16

#: Threads that a multiprocessor has registers for: 72 of each forward; 128 backward, with two
#: tensors and more sums.
FORWARD_THREADS, BACKWARD_THREADS = 896, 512

#: Channels for which one backward pass has registers for dx and the sums over tokens; for more
#: there are two passes.
MAX_FUSED_CHANNELS = 4096

#: Tiles that a program takes at least, once every multiprocessor has one: sums are written once per
#: program.
MIN_TILES = 4

#: Programs, and channels, that a program of a finishing kernel adds up at a time.
BLOCK_P, BLOCK_C = 128, 32

#: Channels of the state that are read at a time.
STATE_CHANNELS = 4096

#: Whether the kernels compute on the CPU.
INTERPRETED = not isinstance(kernels.norm_forward, triton.runtime.JITFunction)

_FINISH = {"num_warps": 8, "num_stages": 1, "enable_fp_fusion": True}


#: Whether a compiled kernel takes its constants as well, in order.
LAUNCHES_COMPILED = not INTERPRETED and tuple(map(int, triton.__version__.split(".")[:2])) >= (3, 6)


class _DoesNotFit(Exception):
    """The arguments are for the reference."""


def _readable(values: Tensor, x: Tensor) -> Tensor:
    """An argument that is not contiguous as the kernels can read it: as :func:`_strides` says,
    or else a copy.
    """
    mask = values.dtype is torch.bool and values.dim() <= 2
    tokens = values.shape == x.shape and values.dim() in (2, 3) and values.stride(-1) == 1
    return values if mask or tokens else values.contiguous()


def _strides(*tensors: Tensor | None) -> tuple[int | None, ...]:
    """How the kernels find the tokens of tensors and of masks: ``inner``, and ``outer_stride`` and
    ``inner_stride`` of each. None where all, or this one, are contiguous.
    """
    inner, strides = None, []
    for values in tensors:
        if values is None or values.is_contiguous():
            strides += (None, None)
        elif values.dim() == 1 or (values.dim() == 2 and values.dtype is not torch.bool):
            inner = 1
            strides += (values.stride(0), 0)
        else:
            inner = values.size(1)
            strides += values.stride()[:2]
    return inner, *strides


@cache
def _warn_without_triton(reason: str) -> None:
    warnings.warn(
        f"pn_fairseq computes by plain PyTorch, which is slow on a GPU: {reason}", stacklevel=4
    )


def _operator(function):
    """Call ``function`` on the device of the first argument, x or dy; if it cannot, the
    reference.
    """

    changes = CHANGED[function.__name__]

    @wraps(function)
    def operator(*args):
        x, readable = args[0], args
        if changes:
            state = [args[place] for place in changes if args[place] is not None]
            torch.autograd.graph.increment_version(state)
        for place, value in enumerate(args):
            if isinstance(value, Tensor) and not value.is_contiguous():
                readable = (*readable[:place], _readable(value, x), *readable[place + 1 :])
        try:
            if not x.is_cuda or x.get_device() == torch.cuda.current_device():
                return function(*readable)
            with torch.cuda.device(x.device):  # Triton launches on the current one
                return function(*readable)
        except _DoesNotFit as error:
            _warn_without_triton(str(error))
            return OPERATORS[function.__name__](*args)

    return operator


#: Kernel, device, shape of its tiles, flags, types of its arguments -> what was compiled for them,
#: and its constants.
_compiled: dict[tuple, tuple[CompiledKernel, list]] = {}


def _launch(
    name: str, grid: tuple[int, int, int], tensors, numbers, constants: dict, flags: dict, *key
) -> None:
    """Launch the kernel ``name``. ``key`` tells ``constants`` and whatever else it is compiled for.

    Triton itself takes 25 us to see that a kernel is compiled, most of it to look at each argument.
    It compiles other code for a tensor whose memory is not aligned, so only what is aligned is
    launched from here.
    """
    kinds, places = [name, *key, *flags.values()], 0
    for tensor in tensors:
        if tensor is None:
            kinds.append(None)
        else:
            kinds.append(tensor.dtype)
            places |= tensor.data_ptr()
    key = tuple(kinds)
    if key in _compiled and not places & 15:
        kernel, rest = _compiled[key]
        kernel[grid](*tensors, *numbers, *rest)
        return
    kernel = getattr(kernels, name)
    constants = constants | flags
    compiled = kernel[grid](*tensors, *numbers, **constants)
    if LAUNCHES_COMPILED and isinstance(compiled, CompiledKernel) and not places & 15:
        rest = kernel.arg_names[len(tensors) + len(numbers) :]
        _compiled[key] = compiled, [constants[constant] for constant in rest]


@lru_cache
def _multiprocessors(device: torch.device) -> int:
    return (
        torch.cuda.get_device_properties(device).multi_processor_count
        if device.type == "cuda"
        else 1
    )


def _quotient(number: int, divisor: int) -> int:
    """Rounded up. The function of triton takes 3 us."""
    return -(-number // divisor)


def _tile(channels: int, groups: int, acc: torch.dtype) -> dict:
    """How a tile holds the channels, how many tokens it has, and how many warps work on it."""
    groups = max(groups, 1)
    block_g, block_k = triton.next_power_of_2(groups), triton.next_power_of_2(channels // groups)
    width = block_g * block_k
    if width > MAX_CHANNELS:
        whole = (
            f"{channels} channels in {groups} group(s) make a row of {width} numbers, with powers "
            f"of two"
        )
        raise _DoesNotFit(f"{whole}, and Triton's kernels take {MAX_CHANNELS}")
    warps = min(max(width // 256, 1), 16)
    return {
        "GROUPS": groups,
        "GROUP_SIZE": channels // groups,
        "BLOCK_N": max(ELEMENTS * 32 * warps // width, 1),
        "BLOCK_G": block_g,
        "BLOCK_K": block_k,
        "ACC": tl.float64 if acc is torch.float64 else tl.float32,
        "num_warps": warps,
        "num_stages": 1,
        "enable_fp_fusion": True,
    }


class _Tokens:
    """The tokens of a shape as a pass over them sees them; ``threads`` fill a multiprocessor.

    Attributes:
        rows: number of tokens.
        programs: number of programs that share them. It depends on the shape and the GPU only.
        tile: constants of the kernel.
        width: channels of a tile, those included that a mask leaves out.
        blocks: number of programs that finish the sums.
        key: what all kernels are compiled for.
    """

    def __init__(
        self, shape: torch.Size, dtype: torch.dtype, device: torch.device, groups: int, threads: int
    ):
        self.channels, self.device = shape[-1], device
        self.acc = torch.float64 if dtype is torch.float64 else torch.float32
        self.rows = shape[:-1].numel()
        if self.rows > MAX_TOKENS:
            raise _DoesNotFit(
                f"{self.rows} tokens are more than the {MAX_TOKENS} that Triton's kernels take"
            )
        self.tile = _tile(self.channels, groups, self.acc)
        self.width = self.tile["BLOCK_G"] * self.tile["BLOCK_K"]
        processors = _multiprocessors(device)
        tiles = _quotient(self.rows, self.tile["BLOCK_N"])
        resident = processors * max(threads // (32 * self.tile["num_warps"]), 1)
        self.programs = max(
            min(resident, max(_quotient(tiles, MIN_TILES), min(tiles, processors))), 1
        )
        self.blocks = _quotient(self.channels, BLOCK_C)
        of_state = {
            "BLOCK_Q": triton.next_power_of_2(self.blocks),
            "BLOCK_S": min(triton.next_power_of_2(self.channels), 1024),
        }
        self.finishing = {"C": self.channels, "BLOCK_P": BLOCK_P, "BLOCK_C": BLOCK_C, **_FINISH}
        self.finishing_state = self.finishing | of_state
        self.key = device, self.channels, groups, self.acc

    def new(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=self.acc, device=self.device)

    def partials(self, slots: int, more: int = 0) -> Tensor:
        """Room for the sums of the programs, for one or two numbers of each, and for ``more``."""
        return self.new(self.programs * (slots * self.channels + 2) + more)

    def launch(self, name: str, tensors, strides, **flags) -> None:
        """Launch a kernel that reads the tokens."""
        numbers = (self.rows, *strides)
        _launch(
            name, (self.programs, 1, 1), tensors, numbers, self.tile, flags, self.key, strides[1:]
        )

    def finish(self, name: str, rows: int, tensors, *numbers, **flags) -> None:
        """Launch a kernel that adds up what the programs have left."""
        constants = self.finishing_state if name == "power_update_" else self.finishing
        _launch(
            name,
            (self.blocks, rows, 1),
            tensors,
            (self.programs, *numbers),
            constants,
            flags,
            self.key,
        )

    def passes(
        self, dx: Tensor | None, partials: Tensor | None
    ) -> list[tuple[Tensor | None, Tensor | None]]:
        """What each pass of a gradient writes: one has no registers for both with many channels."""
        if dx is None or partials is None or self.width <= MAX_FUSED_CHANNELS:
            return [(dx, partials)]
        return [(dx, None), (None, partials)]

    def moments(self, partials: Tensor, centered: bool) -> tuple[Tensor, Tensor, Tensor]:
        """mean (None unless ``centered``), moment and count."""
        mean, moment, count = (
            self.new(self.channels) if centered else None,
            self.new(self.channels),
            self.new(),
        )
        self.finish("finish_moments", 1, (partials, mean, moment, count))
        return mean, moment, count

    def gradient_sums(
        self, partials: Tensor, weight, moment, loss_scale, eps: float, masked: bool, dtype=None
    ) -> tuple[Tensor, Tensor]:
        """``parameters``, in ``dtype`` if it is given, and ``products``."""
        products = self.new(2, self.channels)
        parameters = torch.empty_like(products, dtype=dtype)
        tensors = partials, weight, moment, loss_scale, parameters, products, None
        self.finish("finish_gradient_sums", 2, tensors, EPS=eps, MASKED=masked)
        return parameters, products

    def parameter_sums(self, partials: Tensor, scalars: Tensor | None = None) -> Tensor:
        parameters = self.new(2, self.channels)
        tensors = partials, None, None, None, parameters, None, scalars
        self.finish("finish_gradient_sums", 2, tensors, EPS=0.0, MASKED=False)
        return parameters


_tokens_of = lru_cache(4096)(_Tokens)


def _tokens(x: Tensor, groups: int, threads: int) -> _Tokens:
    return _tokens_of(x.shape, x.dtype, x.device, groups, threads)


def _like(x: Tensor) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


def _nothing(x: Tensor) -> Tensor:
    """A result that was not asked for."""
    return torch.empty(0, dtype=acc_dtype(x), device=x.device)


def _normalize(x, weight, bias, mean, moment, padding, inv_rms, groups, eps, sums):
    tokens = _tokens(x, groups, FORWARD_THREADS)
    y, padding = _like(x), padding if sums else None
    scales = tokens.new(*x.shape[:-1], groups) if inv_rms is None else inv_rms
    partials = tokens.partials(1) if sums else None
    tensors = x, y, scales if groups else None, weight, bias, mean, moment, padding, partials
    flags = {"EPS": eps, "GIVEN": inv_rms is not None, "CENTERED": False}
    tokens.launch("norm_forward", tensors, _strides(x, padding), **flags)
    if not sums:
        return y, scales, None, None
    _, batch_moment, count = tokens.moments(partials, centered=False)
    return y, scales, batch_moment, count


@_operator
def normalize(x, weight, bias, mean, moment, padding, inv_rms, groups, eps, sums):
    y, scales, batch_moment, count = _normalize(
        x, weight, bias, mean, moment, padding, inv_rms, groups, eps, sums
    )
    if inv_rms is None and sums:
        return y, scales, batch_moment, count
    nothing = _nothing(x)
    scales = scales if inv_rms is None else nothing
    return (y, scales, batch_moment, count) if sums else (y, scales, nothing, nothing)


def _moments(x, padding, groups, eps, centered):
    tokens = _tokens(x, groups, FORWARD_THREADS)
    inv_rms = tokens.new(*x.shape[:-1], groups)
    partials = tokens.partials(2 if centered else 1)
    tensors = x, None, inv_rms if groups else None, None, None, None, None, padding, partials
    flags = {"EPS": eps, "GIVEN": False, "CENTERED": centered}
    tokens.launch("norm_forward", tensors, _strides(x, padding), **flags)
    return inv_rms, *tokens.moments(partials, centered)


@_operator
def moments(x, padding, groups, eps, centered):
    inv_rms, mean, moment, count = _moments(x, padding, groups, eps, centered)
    return inv_rms, mean if centered else _nothing(x), moment, count


@_operator
def batch_normalize(x, weight, bias, padding, groups, eps, centered):
    inv_rms, mean, moment, count = _moments(x, padding, groups, eps, centered)
    y, *_ = _normalize(x, weight, bias, mean, moment, None, inv_rms, groups, eps, False)
    return y, inv_rms, mean if centered else _nothing(x), moment, count


def _backward(
    dy, x, dx, partials, padding, weight, mean, moment, corrections, inv_rms, groups, eps
):
    """Write dx, and what the programs have summed up, if there is memory for them. ``corrections``:
    nu, offset, count and loss scale.
    """
    tokens = _tokens(x, groups, BACKWARD_THREADS)
    for out, sums_out in tokens.passes(dx, partials):
        tensors = (
            dy,
            x,
            out,
            inv_rms if groups else None,
            weight,
            mean,
            moment,
            *corrections,
            padding,
            sums_out,
        )
        tokens.launch("norm_backward", tensors, _strides(dy, x, padding), EPS=eps)


def _sums(dy, x, dx, padding, weight, mean, moment, corrections, inv_rms, groups, eps, dtype=None):
    """``parameters`` and ``products``; and dx from the same pass, if there is memory for it."""
    tokens = _tokens(x, groups, BACKWARD_THREADS)
    partials = tokens.partials(2 if padding is None else 4)
    _backward(dy, x, dx, partials, padding, weight, mean, moment, corrections, inv_rms, groups, eps)
    return tokens.gradient_sums(
        partials, weight, moment, corrections[3], eps, padding is not None, dtype
    )


@_operator
def gradient(
    dy, x, padding, weight, mean, moment, nu, offset, count, loss_scale, inv_rms, groups, eps, sums
):
    dx, corrections = _like(x), (nu, offset, count, loss_scale)
    if sums:
        return dx, *_sums(
            dy, x, dx, padding, weight, mean, moment, corrections, inv_rms, groups, eps
        )
    _backward(dy, x, dx, None, padding, weight, mean, moment, corrections, inv_rms, groups, eps)
    nothing = _nothing(x)
    return dx, nothing, nothing


@_operator
def gradient_sums(dy, x, padding, weight, mean, moment, loss_scale, inv_rms, groups, eps):
    corrections = None, None, None, loss_scale
    return _sums(dy, x, None, padding, weight, mean, moment, corrections, inv_rms, groups, eps)


@_operator
def standardize(
    x,
    weight,
    bias,
    groups,
    centered,
    square_factor,
    eps_in_root,
    eps_outside,
    min_divisor,
    gain,
    gain_slope,
):
    tokens = _tokens(x, groups, FORWARD_THREADS)
    y, stats = _like(x), tokens.new(3, *x.shape[:-1], groups)
    divisor = {
        "SQUARE_FACTOR": square_factor,
        "EPS_IN_ROOT": eps_in_root,
        "EPS_OUTSIDE": eps_outside,
    }
    flags = {
        "CENTERED": centered,
        **divisor,
        "MIN_DIVISOR": min_divisor,
        "GAIN": gain,
        "GAIN_SLOPE": gain_slope,
    }
    tokens.launch("standardize", (x, y, stats, weight, bias), _strides(x), **flags)
    return y, stats


@_operator
def standardize_gradient(
    dy, x, weight, stats, groups, gain, gain_slope, through_mean, through_divisor, sums
):
    tokens = _tokens(x, groups, BACKWARD_THREADS)
    dx, partials = _like(x), tokens.partials(2) if sums else None
    flags = {
        "GAIN": gain,
        "GAIN_SLOPE": gain_slope,
        "THROUGH_MEAN": through_mean,
        "THROUGH_DIVISOR": through_divisor,
    }
    for out, sums_out in tokens.passes(dx, partials):
        tokens.launch(
            "standardize_gradient", (dy, x, out, weight, stats, sums_out), _strides(dy, x), **flags
        )
    return dx, tokens.parameter_sums(partials) if sums else tokens.new(0)


@_operator
def squash(x, weight, bias, alpha, shift, erf):
    y = _like(x)
    _tokens(x, 1, FORWARD_THREADS).launch(
        "squash", (x, y, weight, bias, alpha, shift), _strides(x), ERF=erf
    )
    return y


@_operator
def squash_gradient(dy, x, weight, alpha, shift, erf):
    tokens = _tokens(x, 1, BACKWARD_THREADS)
    dx, scalars = _like(x), tokens.new(2)
    partials = tokens.partials(2)
    for out, sums_out in tokens.passes(dx, partials):
        tokens.launch(
            "squash_gradient",
            (dy, x, out, weight, alpha, shift, sums_out),
            _strides(dy, x),
            ERF=erf,
        )
    return dx, tokens.parameter_sums(partials, scalars), scalars


def _state_block(channels: int) -> tuple[int, int]:
    """Channels of the state that are read at a time, and warps for them."""
    block = min(triton.next_power_of_2(channels), STATE_CHANNELS)
    return block, max(block // 256, 1)


def _average(
    moment,
    mean,
    num_batches,
    diagnostics,
    batch_moment,
    batch_mean,
    products,
    count,
    alpha,
    unbiased,
):
    tensors = moment, mean, num_batches, diagnostics, batch_moment, batch_mean, products, count
    channels = moment.numel()
    block, warps = _state_block(channels)
    flags = {"SHARE": 1.0 - alpha, "UNBIASED": unbiased, "C": channels}
    constants = {"BLOCK_C": block, "num_warps": warps, "num_stages": 1}
    _launch("running_average_", (1, 1, 1), tensors, (), constants, flags, moment.device)


running_average_ = _operator(wraps(OPERATORS["running_average_"])(_average))


def _power_flags(eps, alpha_fwd, alpha_bwd, has_gradient, masked) -> dict:
    shares = {"EPS": eps, "SHARE_FWD": 1.0 - alpha_fwd, "SHARE_BWD": 1.0 - alpha_bwd}
    return {**shares, "HAS_GRADIENT": has_gradient, "MASKED": masked}


#: A warm-up of more batches is one of all batches: 31 bits, so that there is one type of this
#: argument.
_LONGEST_WARMUP = 2**31 - 1


@_operator
def power_update_(
    psi2,
    nu,
    num_batches,
    diagnostics,
    batch_psi2,
    used_psi2,
    products,
    count,
    eps,
    warmup,
    alpha_fwd,
    alpha_bwd,
    has_gradient,
):
    state, batch = (psi2, nu, num_batches, diagnostics), (batch_psi2, used_psi2, products, count)
    channels = psi2.numel()
    block, warps = _state_block(channels)
    flags = _power_flags(eps, alpha_fwd, alpha_bwd, has_gradient, False)
    blocks = {"C": channels, "BLOCK_P": 1, "BLOCK_C": block, "BLOCK_Q": 1, "BLOCK_S": block}
    constants = {**blocks, "num_warps": warps, "num_stages": 1}
    numbers = 0, min(warmup, _LONGEST_WARMUP)
    tensors = *state, *batch, None, None, None, None
    _launch("power_update_", (1, 1, 1), tensors, numbers, constants, flags, psi2.device, channels)


@_operator
def power_step_(
    dy,
    x,
    padding,
    weight,
    used_psi2,
    nu,
    loss_scale,
    inv_rms,
    psi2,
    running_nu,
    num_batches,
    diagnostics,
    batch_psi2,
    count,
    groups,
    eps,
    warmup,
    alpha_fwd,
    alpha_bwd,
):
    tokens, dx = _tokens(x, groups, BACKWARD_THREADS), _like(x)
    partials = tokens.partials(2 if padding is None else 4, 1 + 3 * tokens.blocks + tokens.channels)
    dtype = tokens.acc if weight is None else weight.dtype
    parameters = torch.empty((2, tokens.channels), dtype=dtype, device=x.device)
    corrections = nu, None, None, loss_scale
    _backward(
        dy, x, dx, partials, padding, weight, None, used_psi2, corrections, inv_rms, groups, eps
    )
    state, batch = (
        (psi2, running_nu, num_batches, diagnostics),
        (batch_psi2, used_psi2, None, count),
    )
    flags = _power_flags(eps, alpha_fwd, alpha_bwd, True, padding is not None)
    tensors = *state, *batch, partials, weight, loss_scale, parameters
    tokens.finish("power_update_", 1, tensors, min(warmup, _LONGEST_WARMUP), **flags)
    return dx, parameters


@_operator
def batch_step_(
    dy,
    x,
    padding,
    weight,
    mean,
    moment,
    count,
    loss_scale,
    inv_rms,
    running_moment,
    running_mean,
    num_batches,
    diagnostics,
    groups,
    eps,
    alpha,
    unbiased,
):
    given, rest = (padding, weight, mean, moment), (inv_rms, groups, eps)
    dtype = None if weight is None else weight.dtype
    parameters, products = _sums(dy, x, None, *given, (None, None, None, loss_scale), *rest, dtype)
    nu, offset = products.unbind()
    dx = _like(x)
    _backward(
        dy, x, dx, None, *given, (nu, None if mean is None else offset, count, loss_scale), *rest
    )
    state = running_moment, running_mean, num_batches, diagnostics
    _average(*state, moment, mean, products, count, alpha, unbiased)
    return dx, parameters


def _of_window(name: str, tensors, flags: dict, window: Tensor) -> None:
    """Launch a kernel on the state of a norm with ring buffers."""
    rows, channels = window.shape
    block, warps = _state_block(channels)
    constants = {
        "M": rows,
        "C": channels,
        "BLOCK_C": min(block, 1024),
        "num_warps": min(warps, 4),
        "num_stages": 1,
    }
    _launch(name, (1, 1, 1), tensors, (), constants, flags, window.device, rows, channels)


@_operator
def window_statistics(
    psi2_window,
    running_psi2,
    num_batches,
    completed,
    batch_psi2,
    weight,
    warmup,
    ratio_warmup,
    eps,
    geometric,
    filtration,
):
    psi2, gain = torch.empty_like(batch_psi2), torch.empty_like(batch_psi2)
    marks = torch.empty(2, dtype=torch.bool, device=psi2.device)
    tensors = (
        psi2_window,
        running_psi2,
        num_batches,
        completed,
        batch_psi2,
        weight,
        psi2,
        gain,
        marks,
    )
    flags = {"WARMUP": warmup, "RATIO_WARMUP": ratio_warmup, "EPS": eps}
    _of_window(
        "window_statistics",
        tensors,
        {**flags, "GEOMETRIC": geometric, "FILTRATION": filtration},
        psi2_window,
    )
    return psi2, gain, marks


@_operator
def window_update_(
    running_psi2,
    nu,
    psi2_window,
    lambda_window,
    num_batches,
    diagnostics,
    seen_nu,
    seen_lambda,
    seen_batches,
    psi2,
    batch_psi2,
    marks,
    products,
    count,
    counted_tokens,
    alpha_fwd,
    alpha_bwd,
    has_gradient,
):
    correction = torch.empty_like(psi2)
    state = running_psi2, nu, psi2_window, lambda_window, num_batches, diagnostics
    of_step = psi2, batch_psi2, marks, products, count, counted_tokens
    flags = {
        "SHARE_FWD": 1.0 - alpha_fwd,
        "SHARE_BWD": 1.0 - alpha_bwd,
        "HAS_GRADIENT": has_gradient,
    }
    tensors = *state, seen_nu, seen_lambda, seen_batches, *of_step, correction
    _of_window("window_update_", tensors, flags, psi2_window)
    return correction
