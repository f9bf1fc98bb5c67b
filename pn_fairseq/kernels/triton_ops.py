"""The operators of :mod:`.ops` by Triton, for CUDA.

Nothing here waits for the GPU or reads from it. What reads tokens is one launch over them and, where there are sums, a
small one that finishes them; the operators on the state are one small launch. What does not fit into one program (more
than ``MAX_CHANNELS`` channels) is computed by the reference.

The shapes of tiles and the number of programs are chosen by rule and not by trial, which would cost seconds for every
new shape and could choose differently, and so round differently, in every run. With ``TRITON_INTERPRET=1`` in the
environment before triton is imported, the same functions compute on the CPU, slowly: tests do that.
"""

from functools import lru_cache, wraps

import torch
import triton
import triton.language as tl
from torch import Tensor

from pn_fairseq.kernels import triton_kernels as kernels
from pn_fairseq.kernels.ops import OPERATORS
from pn_fairseq.kernels.reference import acc_dtype

#: Channels that one program can hold, with groups and their number rounded up to powers of two.
MAX_CHANNELS = 8192

#: Tokens that one call can take: their numbers are 32 bit.
MAX_TOKENS = 2**30

#: Elements of a tile that a thread holds.
ELEMENTS = 16

#: Threads that a multiprocessor has registers for: 72 of each forward; 128 backward, with two tensors and more sums.
FORWARD_THREADS, BACKWARD_THREADS = 896, 512

#: Channels for which one backward pass has registers for dx and the sums over tokens; for more there are two passes.
MAX_FUSED_CHANNELS = 4096

#: Tiles that a program takes at least, once every multiprocessor has one: sums are written once per program.
MIN_TILES = 4

#: Programs, and channels, that a program of a finishing kernel adds up at a time.
BLOCK_P, BLOCK_C = 128, 32

#: Channels of the state that are read at a time.
STATE_CHANNELS = 4096

#: Whether the kernels compute on the CPU.
INTERPRETED = not isinstance(kernels.norm_forward, triton.runtime.JITFunction)

_FINISH = {"num_warps": 8, "num_stages": 1, "enable_fp_fusion": True}


class _DoesNotFit(Exception):
    """The arguments are for the reference."""


def _readable(values, x: Tensor):
    """An argument as the kernels can read it: contiguous, or as :func:`_strides` says."""
    if not isinstance(values, Tensor):
        return values
    mask = values.dtype is torch.bool and values.dim() <= 2
    tokens = values.shape == x.shape and values.dim() in (2, 3) and values.stride(-1) == 1
    return values if mask or tokens else values.contiguous()


def _strides(padding: Tensor | None, *tensors: Tensor) -> tuple[int | None, ...]:
    """How the kernels find the tokens of tensors of one shape, and their mask: ``inner``, and ``outer_stride`` and
    ``inner_stride`` of each, the mask the last. None where all, or this one, are contiguous."""
    inner, strides = None, []
    for values in (*tensors, padding):
        if values is None or values.is_contiguous():
            strides += (None, None)
        elif tensors[0].dim() == 2:
            inner = 1
            strides += (values.stride(0), 0)
        else:
            inner = tensors[0].size(1)
            strides += values.stride()[:2]
    return inner, *strides


def _operator(function):
    """Call ``function`` on the device of the first argument, x or dy; if it cannot, the reference."""

    @wraps(function)
    def operator(*args):
        readable = [_readable(value, args[0]) for value in args]
        try:
            if not args[0].is_cuda or args[0].get_device() == torch.cuda.current_device():
                return function(*readable)
            with torch.cuda.device(args[0].device):  # Triton launches on the current one
                return function(*readable)
        except _DoesNotFit:
            return OPERATORS[function.__name__](*args)

    return operator


@lru_cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


@lru_cache
def _tile(channels: int, groups: int, acc: torch.dtype, elements: int) -> dict:
    """How a tile holds the channels, how many tokens it has, and how many warps work on it."""
    groups = max(groups, 1)
    block_g, block_k = triton.next_power_of_2(groups), triton.next_power_of_2(channels // groups)
    width = block_g * block_k
    if width > MAX_CHANNELS:
        raise _DoesNotFit
    warps = min(max(width // 256, 1), 16)
    return {
        "GROUPS": groups,
        "GROUP_SIZE": channels // groups,
        "BLOCK_N": max(elements * 32 * warps // width, 1),
        "BLOCK_G": block_g,
        "BLOCK_K": block_k,
        "ACC": tl.float64 if acc is torch.float64 else tl.float32,
        "num_warps": warps,
        "num_stages": 1,
        "enable_fp_fusion": True,
    }


class _Tokens:
    """The tokens of ``x`` as a pass over them sees them; ``threads`` fill a multiprocessor.

    Attributes:
        rows: number of tokens.
        programs: number of programs that share them. It depends on the shape and the GPU only.
        tile: constants of the kernel.
        width: channels of a tile, those included that a mask leaves out.
    """

    def __init__(self, x: Tensor, groups: int, threads: int):
        self.channels, self.device, self.acc = x.size(-1), x.device, acc_dtype(x)
        self.rows = x.numel() // self.channels
        if self.rows > MAX_TOKENS:
            raise _DoesNotFit
        self.tile = _tile(self.channels, groups, self.acc, ELEMENTS)
        self.width = self.tile["BLOCK_G"] * self.tile["BLOCK_K"]
        processors = _multiprocessors(x.device)
        tiles = triton.cdiv(self.rows, self.tile["BLOCK_N"])
        resident = processors * max(threads // (32 * self.tile["num_warps"]), 1)
        self.programs = max(min(resident, max(triton.cdiv(tiles, MIN_TILES), min(tiles, processors))), 1)

    def new(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=self.acc, device=self.device)

    def partials(self, slots: int, numbers: int = 1) -> Tensor:
        return self.new(self.programs * (slots * self.channels + numbers))

    def passes(self, dx: Tensor | None, partials: Tensor | None) -> list[tuple[Tensor | None, Tensor | None]]:
        """What each pass of a gradient writes: one has no registers for both with many channels."""
        if dx is None or partials is None or self.width <= MAX_FUSED_CHANNELS:
            return [(dx, partials)]
        return [(dx, None), (None, partials)]

    def finish(self, kernel, rows: int, *args, **constants) -> None:
        """Launch a kernel that adds up what the programs have left."""
        constants |= {"C": self.channels, "BLOCK_P": BLOCK_P, "BLOCK_C": BLOCK_C, **_FINISH}
        kernel[triton.cdiv(self.channels, BLOCK_C), rows](*args, self.programs, **constants)

    def moments(self, partials: Tensor, centered: bool) -> tuple[Tensor, Tensor, Tensor]:
        """mean (empty unless ``centered``), moment and count."""
        mean, moment, count = self.new(self.channels if centered else 0), self.new(self.channels), self.new()
        self.finish(kernels.finish_moments, 1, partials, mean if centered else None, moment, count)
        return mean, moment, count

    def gradient_sums(
        self, partials: Tensor, weight, moment, loss_scale, eps: float, masked: bool
    ) -> tuple[Tensor, Tensor]:
        parameters, products = self.new(2, self.channels), self.new(2, self.channels)
        arguments = partials, weight, moment, loss_scale, parameters, products, None
        self.finish(kernels.finish_gradient_sums, 2, *arguments, EPS=eps, MASKED=masked)
        return parameters, products

    def parameter_sums(self, partials: Tensor, scalars: Tensor | None = None) -> Tensor:
        parameters = self.new(2, self.channels)
        arguments = partials, None, None, None, parameters, None, scalars
        self.finish(kernels.finish_gradient_sums, 2, *arguments, EPS=0.0, MASKED=False)
        return parameters


@_operator
def normalize(x, weight, bias, mean, moment, padding, inv_rms, groups, eps, sums):
    tokens = _Tokens(x, groups, FORWARD_THREADS)
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    scales = tokens.new(*x.shape[:-1], groups) if inv_rms is None else inv_rms
    partials = tokens.partials(1) if sums else None
    kernels.norm_forward[tokens.programs,](
        x, y, scales if groups else None, weight, bias, mean, moment, padding if sums else None, partials,
        tokens.rows, *_strides(padding if sums else None, x),
        GIVEN=inv_rms is not None, CENTERED=False, EPS=eps, **tokens.tile,
    )  # fmt: skip
    batch_moment = count = tokens.new(0)
    if sums:
        _, batch_moment, count = tokens.moments(partials, centered=False)
    return y, scales if inv_rms is None else tokens.new(0), batch_moment, count


@_operator
def moments(x, padding, groups, eps, centered):
    tokens = _Tokens(x, groups, FORWARD_THREADS)
    inv_rms = tokens.new(*x.shape[:-1], groups)
    partials = tokens.partials(2 if centered else 1)
    kernels.norm_forward[tokens.programs,](
        x, None, inv_rms if groups else None, None, None, None, None, padding, partials,
        tokens.rows, *_strides(padding, x), GIVEN=False, CENTERED=centered, EPS=eps, **tokens.tile,
    )  # fmt: skip
    return inv_rms, *tokens.moments(partials, centered)


@_operator
def gradient(dy, x, padding, weight, mean, moment, nu, offset, count, loss_scale, inv_rms, groups, eps, sums):
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    corrections = nu, offset, count, loss_scale
    return dx, *_backward(dy, x, dx, padding, weight, mean, moment, *corrections, inv_rms, groups, eps, sums)


@_operator
def gradient_sums(dy, x, padding, weight, mean, moment, loss_scale, inv_rms, groups, eps):
    given = dy, x, None, padding, weight, mean, moment
    return _backward(*given, None, None, None, loss_scale, inv_rms, groups, eps, True)


def _backward(
    dy, x, dx, padding, weight, mean, moment, nu, offset, count, loss_scale, inv_rms, groups, eps, sums
):  # fmt: skip
    tokens = _Tokens(x, groups, BACKWARD_THREADS)
    partials = tokens.partials(2 if padding is None else 4) if sums else None
    for out, sums_out in tokens.passes(dx, partials):
        kernels.norm_backward[tokens.programs,](
            dy, x, out, inv_rms if groups else None, weight, mean, moment, nu, offset, count, loss_scale, padding,
            sums_out, tokens.rows, *_strides(padding, dy, x), EPS=eps, **tokens.tile,
        )  # fmt: skip
    if not sums:
        return tokens.new(0), tokens.new(0)
    return tokens.gradient_sums(partials, weight, moment, loss_scale, eps, padding is not None)


@_operator
def standardize(
    x, weight, bias, groups, centered, square_factor, eps_in_root, eps_outside, min_divisor, gain, gain_slope
):  # fmt: skip
    tokens = _Tokens(x, groups, FORWARD_THREADS)
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    stats = tokens.new(3, *x.shape[:-1], groups)
    kernels.standardize[tokens.programs,](
        x, y, stats, weight, bias, tokens.rows, *_strides(None, x)[:-2], CENTERED=centered,
        SQUARE_FACTOR=square_factor, EPS_IN_ROOT=eps_in_root, EPS_OUTSIDE=eps_outside, MIN_DIVISOR=min_divisor,
        GAIN=gain, GAIN_SLOPE=gain_slope, **tokens.tile,
    )  # fmt: skip
    return y, stats


@_operator
def standardize_gradient(dy, x, weight, stats, groups, gain, gain_slope, through_mean, through_divisor, sums):
    tokens = _Tokens(x, groups, BACKWARD_THREADS)
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    partials = tokens.partials(2) if sums else None
    for out, sums_out in tokens.passes(dx, partials):
        kernels.standardize_gradient[tokens.programs,](
            dy, x, out, weight, stats, sums_out, tokens.rows, *_strides(None, dy, x)[:-2],
            GAIN=gain, GAIN_SLOPE=gain_slope, THROUGH_MEAN=through_mean, THROUGH_DIVISOR=through_divisor, **tokens.tile,
        )  # fmt: skip
    return dx, tokens.parameter_sums(partials) if sums else tokens.new(0)


@_operator
def squash(x, weight, bias, alpha, shift, erf):
    tokens = _Tokens(x, 1, FORWARD_THREADS)
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    arguments = x, y, weight, bias, alpha, shift, tokens.rows, *_strides(None, x)[:-2]
    kernels.squash[tokens.programs,](*arguments, ERF=erf, **tokens.tile)
    return y


@_operator
def squash_gradient(dy, x, weight, alpha, shift, erf):
    tokens = _Tokens(x, 1, BACKWARD_THREADS)
    dx, scalars = torch.empty(x.shape, dtype=x.dtype, device=x.device), tokens.new(2)
    partials = tokens.partials(2, numbers=2)
    for out, sums_out in tokens.passes(dx, partials):
        arguments = dy, x, out, weight, alpha, shift, sums_out, tokens.rows, *_strides(None, dy, x)[:-2]
        kernels.squash_gradient[tokens.programs,](*arguments, ERF=erf, **tokens.tile)
    return dx, tokens.parameter_sums(partials, scalars), scalars


def _all_channels(vector: Tensor) -> dict:
    """Constants of a kernel that is one program over all channels of ``vector``."""
    block = min(triton.next_power_of_2(vector.numel()), STATE_CHANNELS)
    return {"C": vector.numel(), "BLOCK_C": block, "num_warps": max(block // 256, 1), "num_stages": 1}


@_operator
def running_average_(
    moment, mean, num_batches, diagnostics, batch_moment, batch_mean, products, count, alpha, unbiased
):  # fmt: skip
    state, batch = (moment, mean, num_batches, diagnostics), (batch_moment, batch_mean, products, count)
    kernels.running_average_[1,](*state, *batch, SHARE=1.0 - alpha, UNBIASED=unbiased, **_all_channels(moment))


@_operator
def power_update_(
    psi2, nu, num_batches, diagnostics, batch_psi2, used_psi2, products, count, eps, warmup, alpha_fwd, alpha_bwd,
    has_gradient,
):  # fmt: skip
    state, batch = (psi2, nu, num_batches, diagnostics), (batch_psi2, used_psi2, products, count)
    kernels.power_update_[1,](
        *state, *batch, warmup, EPS=eps, SHARE_FWD=1.0 - alpha_fwd, SHARE_BWD=1.0 - alpha_bwd,
        HAS_GRADIENT=has_gradient, **_all_channels(psi2),
    )  # fmt: skip


def _in_type_of(weight: Tensor | None, values: Tensor) -> Tensor:
    return values if weight is None else values.to(weight.dtype)


def power_step_(
    dy, x, padding, weight, used_psi2, nu, loss_scale, inv_rms, psi2, running_nu, num_batches, diagnostics,
    batch_psi2, count, groups, eps, warmup, alpha_fwd, alpha_bwd,
):  # fmt: skip
    given = dy, x, padding, weight, None, used_psi2, nu, None, None, loss_scale, inv_rms
    dx, parameters, products = gradient(*given, groups, eps, True)
    state, batch = (psi2, running_nu, num_batches, diagnostics), (batch_psi2, used_psi2, products, count)
    power_update_(*state, *batch, eps, warmup, alpha_fwd, alpha_bwd, True)
    return dx, _in_type_of(weight, parameters)


def batch_normalize(x, weight, bias, padding, groups, eps, centered):
    inv_rms, mean, moment, count = moments(x, padding, groups, eps, centered)
    center = mean if centered else None
    y, *_ = normalize(x, weight, bias, center, moment, None, inv_rms, groups, eps, False)
    return y, inv_rms, mean, moment, count


def batch_step_(
    dy, x, padding, weight, mean, moment, count, loss_scale, inv_rms, running_moment, running_mean, num_batches,
    diagnostics, groups, eps, alpha, unbiased,
):  # fmt: skip
    given = dy, x, padding, weight, mean, moment
    parameters, products = gradient_sums(*given, loss_scale, inv_rms, groups, eps)
    nu, offset = products.unbind()
    corrections = nu, None if mean is None else offset, count, loss_scale
    dx, *_ = gradient(*given, *corrections, inv_rms, groups, eps, False)
    state = running_moment, running_mean, num_batches, diagnostics
    running_average_(*state, moment, mean, products, count, alpha, unbiased)
    return dx, _in_type_of(weight, parameters)
