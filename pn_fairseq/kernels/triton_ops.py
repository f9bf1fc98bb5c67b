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

import inspect
import warnings
from functools import cache, lru_cache, wraps

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.compiler import CompiledKernel

from pn_fairseq.kernels import triton_kernels as kernels
from pn_fairseq.kernels.ops import CHANGED, OPERATORS

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

#: Whether the kernels compute on the CPU.
INTERPRETED = not isinstance(kernels.norm_forward, triton.runtime.JITFunction)

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
    if device.type != "cuda":
        return 1
    return torch.cuda.get_device_properties(device).multi_processor_count


def _quotient(number: int, divisor: int) -> int:
    """Rounded up. The function of triton takes 3 us."""
    return -(-number // divisor)


def _check_width(width: int, row: str) -> None:
    """Raise unless one program can hold a ``row`` of ``width`` numbers."""
    if width > MAX_CHANNELS:
        raise _DoesNotFit(
            f"{row} make a row of {width} numbers, with powers of two, and Triton's kernels take "
            f"{MAX_CHANNELS}"
        )


def _warps(width: int) -> int:
    return min(max(width // 256, 1), 16)


class _Tokens:
    """The tokens of a shape as a pass over them sees them; ``threads`` fill a multiprocessor.

    Attributes:
        acc: the accumulation dtype.
        rows: number of tokens.
        width: channels of a tile, those included that a mask leaves out.
        tile: constants of the kernel: how a tile holds the channels, how many tokens it has, and
            how many warps work on it.
        programs: number of programs that share the tokens. It depends on the shape and the GPU
            only.
        blocks: number of programs that finish the sums, and ``finishing`` their constants.
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
        spans = max(groups, 1)
        block_g = triton.next_power_of_2(spans)
        block_k = triton.next_power_of_2(self.channels // spans)
        self.width = block_g * block_k
        _check_width(self.width, f"{self.channels} channels in {spans} group(s)")
        warps = _warps(self.width)
        block_n = max(ELEMENTS * 32 * warps // self.width, 1)
        self.tile = {
            "GROUPS": spans,
            "GROUP_SIZE": self.channels // spans,
            "BLOCK_N": block_n,
            "BLOCK_G": block_g,
            "BLOCK_K": block_k,
            "ACC": tl.float64 if self.acc is torch.float64 else tl.float32,
            "num_warps": warps,
            "num_stages": 1,
        }
        processors = _multiprocessors(device)
        resident = processors * max(threads // (32 * warps), 1)
        tiles = _quotient(self.rows, block_n)
        wanted = max(_quotient(tiles, MIN_TILES), min(tiles, processors))
        self.programs = max(min(resident, wanted), 1)
        self.blocks = _quotient(self.channels, BLOCK_C)
        self.finishing = {
            "C": self.channels,
            "BLOCK_P": BLOCK_P,
            "BLOCK_C": BLOCK_C,
            "num_warps": 8,
            "num_stages": 1,
        }
        self.key = device, self.channels, groups, self.acc

    def new(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=self.acc, device=self.device)

    def partials(self, slots: int, more: int = 0) -> Tensor:
        """Room for the sums of the programs, for one or two numbers of each, and for ``more``."""
        return self.new(self.programs * (slots * self.channels + 2) + more)

    def launch(self, name: str, tensors, strides, flags: dict) -> None:
        """Launch a kernel that reads the tokens."""
        grid, numbers = (self.programs, 1, 1), (self.rows, *strides)
        _launch(name, grid, tensors, numbers, self.tile, flags, self.key, strides[1:])

    def finish(self, name: str, rows: int, tensors, flags: dict) -> None:
        """Launch a kernel that adds up what the programs have left."""
        grid, numbers = (self.blocks, rows, 1), (self.programs,)
        _launch(name, grid, tensors, numbers, self.finishing, flags, self.key)

    def moments(self, partials: Tensor, mean: Tensor | None) -> tuple[Tensor, Tensor]:
        """The moment and the count; also writes the ``mean``, if there is memory for it."""
        moment, count = self.new(self.channels), self.new()
        self.finish("finish_moments", 1, (partials, mean, moment, count), {})
        return moment, count

    def gradient_sums(
        self, partials, products, weight=None, moment=None, loss_scale=None, scalars=None, **rest
    ) -> Tensor:
        """``parameters``; also writes ``products`` and ``scalars``, if there is memory for them.

        ``rest``: the type of the result and the flags of the kernel, unless they are these.
        """
        parameters = torch.empty(
            (2, self.channels), dtype=rest.pop("dtype", self.acc), device=self.device
        )
        tensors = partials, weight, moment, loss_scale, parameters, products, scalars
        flags = {"EPS": 0.0, "MASKED": False} | rest
        self.finish("finish_gradient_sums", 2, tensors, flags)
        return parameters


_tokens_of = lru_cache(4096)(_Tokens)


def _tokens(x: Tensor, groups: int, threads: int) -> _Tokens:
    return _tokens_of(x.shape, x.dtype, x.device, groups, threads)


def _passes(tokens: _Tokens, dx: Tensor | None, partials: Tensor | None) -> list[tuple]:
    """What each pass of a gradient writes: one has no registers for both with many channels."""
    if dx is None or partials is None or tokens.width <= MAX_FUSED_CHANNELS:
        return [(dx, partials)]
    return [(dx, None), (None, partials)]


def _like(x: Tensor) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


def _masked(padding: Tensor | None) -> dict:
    return {"MASKED": padding is not None}


@cache
def _numbers_of(name: str) -> list[str]:
    """The arguments of an operator that are numbers, as its kernel names them."""
    annotations = inspect.get_annotations(OPERATORS[name])
    return [each.upper() for each, kind in annotations.items() if kind in (int, float, bool)]


def _flags(name: str, numbers) -> dict:
    return dict(zip(_numbers_of(name), numbers, strict=False))


@_operator
def normalize(x, weight, bias, mean, moment, padding, inv_rms, groups, eps, sums):
    tokens = _tokens(x, groups, FORWARD_THREADS)
    y, nothing, given = _like(x), tokens.new(0), inv_rms is not None
    scales = inv_rms if given else tokens.new(*x.shape[:-1], groups)
    padding = padding if sums else None
    partials = tokens.partials(1) if sums else None
    used = scales if groups else None
    tensors = x, y, used, weight, bias, mean, moment, padding, partials
    flags = {"EPS": eps, "GIVEN": given, "CENTERED": False}
    tokens.launch("norm_forward", tensors, _strides(x, padding), flags)
    new_scales = nothing if given else scales
    if not sums:
        return y, new_scales, nothing, nothing
    return y, new_scales, *tokens.moments(partials, None)


@_operator
def moments(x, padding, groups, eps, centered):
    tokens = _tokens(x, groups, FORWARD_THREADS)
    inv_rms = tokens.new(*x.shape[:-1], groups)
    partials = tokens.partials(2 if centered else 1)
    vectors = None, None, None, None
    tensors = x, None, inv_rms if groups else None, *vectors, padding, partials
    flags = {"EPS": eps, "GIVEN": False, "CENTERED": centered}
    tokens.launch("norm_forward", tensors, _strides(x, padding), flags)
    mean = tokens.new(tokens.channels if centered else 0)
    return inv_rms, mean, *tokens.moments(partials, mean if centered else None)


@_operator
def batch_normalize(x, weight, bias, padding, groups, eps, centered):
    inv_rms, mean, moment, count = moments.__wrapped__(x, padding, groups, eps, centered)
    statistics = mean if centered else None, moment
    rest = None, inv_rms, groups, eps, False
    y, *_ = normalize.__wrapped__(x, weight, bias, *statistics, *rest)
    return y, inv_rms, mean, moment, count


def _backward(tokens, dy, x, dx, partials, padding, vectors, corrections, inv_rms, eps) -> None:
    """Write dx, and what the programs have summed up, if there is memory for them. ``vectors``:
    weight, mean and moment; ``corrections``: nu, offset, count and loss scale.
    """
    strides = _strides(dy, x, padding)
    for out, sums in _passes(tokens, dx, partials):
        tensors = dy, x, out, inv_rms, *vectors, *corrections, padding, sums
        tokens.launch("norm_backward", tensors, strides, {"EPS": eps})


@_operator
def gradient(
    dy, x, padding, weight, mean, moment, nu, offset, count, loss_scale, inv_rms, groups, eps, sums
):
    tokens, dx = _tokens(x, groups, BACKWARD_THREADS), _like(x)
    partials = tokens.partials(2 if padding is None else 4) if sums else None
    vectors, corrections = (weight, mean, moment), (nu, offset, count, loss_scale)
    scales = inv_rms if groups else None
    _backward(tokens, dy, x, dx, partials, padding, vectors, corrections, scales, eps)
    if not sums:
        nothing = tokens.new(0)
        return dx, nothing, nothing
    products = tokens.new(2, tokens.channels)
    given = partials, products, weight, moment, loss_scale
    return dx, tokens.gradient_sums(*given, EPS=eps, **_masked(padding)), products


def _sums(dy, x, padding, weight, mean, moment, loss_scale, inv_rms, groups, eps, dtype=None):
    tokens = _tokens(x, groups, BACKWARD_THREADS)
    partials = tokens.partials(2 if padding is None else 4)
    vectors, corrections = (weight, mean, moment), (None, None, None, loss_scale)
    scales = inv_rms if groups else None
    _backward(tokens, dy, x, None, partials, padding, vectors, corrections, scales, eps)
    products = tokens.new(2, tokens.channels)
    given = partials, products, weight, moment, loss_scale
    rest = {"dtype": dtype or tokens.acc, "EPS": eps}
    return tokens.gradient_sums(*given, **rest, **_masked(padding)), products


gradient_sums = _operator(wraps(OPERATORS["gradient_sums"])(_sums))


@_operator
def standardize(x, weight, bias, groups, *numbers):
    tokens = _tokens(x, groups, FORWARD_THREADS)
    y, stats = _like(x), tokens.new(3, *x.shape[:-1], groups)
    flags = _flags("standardize", (groups, *numbers))
    tokens.launch("standardize", (x, y, stats, weight, bias), _strides(x), flags)
    return y, stats


@_operator
def standardize_gradient(dy, x, weight, stats, groups, *numbers):
    tokens, dx = _tokens(x, groups, BACKWARD_THREADS), _like(x)
    *numbers, sums = numbers
    partials = tokens.partials(2) if sums else None
    flags = _flags("standardize_gradient", (groups, *numbers))
    for out, sums_out in _passes(tokens, dx, partials):
        tensors = dy, x, out, weight, stats, sums_out
        tokens.launch("standardize_gradient", tensors, _strides(dy, x), flags)
    return dx, tokens.gradient_sums(partials, None) if sums else tokens.new(0)


@_operator
def squash(x, weight, bias, alpha, shift, erf):
    tokens, y = _tokens(x, 1, FORWARD_THREADS), _like(x)
    tokens.launch("squash", (x, y, weight, bias, alpha, shift), _strides(x), {"ERF": erf})
    return y


@_operator
def squash_gradient(dy, x, weight, alpha, shift, erf):
    tokens, dx = _tokens(x, 1, BACKWARD_THREADS), _like(x)
    partials, scalars = tokens.partials(2), tokens.new(2)
    for out, sums in _passes(tokens, dx, partials):
        tensors = dy, x, out, weight, alpha, shift, sums
        tokens.launch("squash_gradient", tensors, _strides(dy, x), {"ERF": erf})
    return dx, tokens.gradient_sums(partials, None, scalars=scalars), scalars


def _on_state(name: str, tensors, numbers, **window: int) -> None:
    """Launch the kernel of an operator on the state. ``tensors``: its own, and its results;
    ``window``: the rows ``M`` of the ring buffers.
    """
    channels = tensors[0].size(-1)
    width = triton.next_power_of_2(channels)
    _check_width(width, f"{channels} channels")
    flags = _flags(name, numbers)
    constants = {"C": channels, "BLOCK_C": width, "num_warps": _warps(width), "num_stages": 1}
    key = tensors[0].device, channels, *window.values()
    _launch(name, (1, 1, 1), tensors, (), constants | window, flags, *key)


@_operator
def running_average_(*arguments):
    _on_state("running_average_", arguments[:8], arguments[8:])


@_operator
def power_update_(*arguments):
    _on_state("power_update_", arguments[:8], arguments[8:])


@_operator
def window_statistics(*arguments):
    window, batch_psi2 = arguments[0], arguments[4]
    marks = torch.empty(2, dtype=torch.bool, device=window.device)
    results = torch.empty_like(batch_psi2), torch.empty_like(batch_psi2), marks
    _on_state("window_statistics", (*arguments[:6], *results), arguments[6:], M=len(window))
    return results


@_operator
def window_update_(*arguments):
    window, correction = arguments[2], torch.empty_like(arguments[9])
    _on_state("window_update_", (*arguments[:15], correction), arguments[15:], M=len(window))
    return correction


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
    *numbers,
):
    tokens, dx = _tokens(x, groups, BACKWARD_THREADS), _like(x)
    partials = tokens.partials(2 if padding is None else 4, 1 + 2 * tokens.channels)
    vectors, corrections = (weight, None, used_psi2), (nu, None, None, loss_scale)
    scales = inv_rms if groups else None
    _backward(tokens, dy, x, dx, partials, padding, vectors, corrections, scales, eps)
    dtype = tokens.acc if weight is None else weight.dtype
    parameters = torch.empty((2, tokens.channels), dtype=dtype, device=x.device)
    state = psi2, running_nu, num_batches, diagnostics
    tensors = partials, weight, loss_scale, parameters, *state, batch_psi2, used_psi2, count
    flags = _flags("power_update_", (eps, *numbers)) | _masked(padding) | {"BLOCK": tokens.width}
    tokens.finish("finish_power_step", 2, tensors, flags)
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
    *numbers,
):
    given, rest = (dy, x, padding, weight, mean, moment), (inv_rms, groups, eps)
    dtype = None if weight is None else weight.dtype
    parameters, products = _sums(*given, loss_scale, *rest, dtype)
    nu, offset = products.unbind()
    corrections = nu, None if mean is None else offset, count, loss_scale
    dx, *_ = gradient.__wrapped__(*given, *corrections, *rest, False)
    state = running_moment, running_mean, num_batches, diagnostics
    _on_state("running_average_", (*state, moment, mean, products, count), numbers)
    return dx, parameters
