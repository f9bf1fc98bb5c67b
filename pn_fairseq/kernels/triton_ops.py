"""The operators of :mod:`.ops` by Triton, for CUDA.

Nothing here waits for the GPU or reads from it. An operator on tokens is one launch over them and,
if it sums, a small one that finishes the sums; an operator on the state is one small launch. The
reference computes what does not fit into one program (more than ``MAX_CHANNELS`` channels).

The shapes of tiles and the number of programs are chosen by rule and not by trial, which would cost
seconds for every new shape and could choose, and so round, differently in every run. With
``TRITON_INTERPRET=1`` in the environment before triton is imported, the same functions compute on
the CPU, slowly, as in the tests.
"""

from functools import lru_cache, wraps

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.compiler import CompiledKernel

from pn_fairseq.kernels import triton_kernels as kernels
from pn_fairseq.kernels.ops import CHANGED, NUMBERS, OPERATORS, warn_by_reference

#: Channels that one program can hold, with groups and their number rounded up to powers of two.
MAX_CHANNELS = 8192

#: Tokens that one call accepts: their numbers are 32 bit.
MAX_TOKENS = 2**30

#: Elements of a tile that a thread holds.
ELEMENTS = 16

#: Threads that a multiprocessor has registers for: each needs 72 forward, and 128 backward, with
#: two tensors and more sums.
FORWARD_THREADS = 896
BACKWARD_THREADS = 512

#: Channels up to which one backward pass has registers for both dx and the sums over tokens; more
#: channels need two passes.
MAX_FUSED_CHANNELS = 4096

#: Fewest tiles per program, once every multiprocessor has one: sums are written once per program.
MIN_TILES = 4

#: Numbers of programs and of channels that a program of a finishing kernel adds up at a time.
BLOCK_P = 128
BLOCK_C = 32

#: Whether the kernels compute on the CPU.
INTERPRETED = not isinstance(kernels.norm_forward, triton.runtime.JITFunction)

#: Whether a compiled kernel also expects its constants, in order.
LAUNCHES_COMPILED = not INTERPRETED and tuple(map(int, triton.__version__.split(".")[:2])) >= (3, 6)


class _DoesNotFit(Exception):
    """The kernels cannot process these arguments; the reference computes instead."""


def _readable(values: Tensor, x: Tensor) -> Tensor:
    """A non-contiguous argument in a form that the kernels can read: as it is, if :func:`_strides`
    can describe it, or else a copy.
    """
    mask = values.dtype is torch.bool and values.dim() <= 2
    tokens = values.shape == x.shape and values.dim() in (2, 3) and values.stride(-1) == 1
    return values if mask or tokens else values.contiguous()


def _strides(*tensors: Tensor | None) -> tuple[int | None, ...]:
    """How the kernels find the tokens of tensors and of masks: ``inner``, None if all are
    contiguous, and ``outer_stride`` and ``inner_stride`` of each, None if it is contiguous.
    """
    inner = None
    strides = []
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


def _operator(function):
    """Call ``function`` on the device of the first argument, x or dy, or the reference if
    ``function`` cannot process the arguments.
    """

    changes = CHANGED[function.__name__]

    @wraps(function)
    def operator(*args):
        x = args[0]
        readable = list(args)
        if changes:
            state = [args[place] for place in changes if args[place] is not None]
            torch.autograd.graph.increment_version(state)
        for place, value in enumerate(args):
            if isinstance(value, Tensor) and not value.is_contiguous():
                readable[place] = _readable(value, x)
        try:
            if not x.is_cuda or x.get_device() == torch.cuda.current_device():
                return function(*readable)
            with torch.cuda.device(x.device):  # Triton launches on the current one
                return function(*readable)
        except _DoesNotFit as error:
            warn_by_reference(str(error))
            return OPERATORS[function.__name__](*args)

    return operator


#: Kernel, device, shape of its tiles, flags, types of its arguments -> the code compiled for them,
#: and its constants.
_compiled: dict[tuple, tuple[CompiledKernel, list]] = {}


def _launch(
    name: str,
    grid: tuple[int, int, int],
    tensors,
    numbers,
    constants: dict,
    flags: dict,
    *compiled_for,
) -> None:
    """Launch the kernel ``name``. ``compiled_for`` determines ``constants`` and whatever else the
    kernel is compiled for. Triton compiles other code for a number that is 1 or a multiple of 16:
    each of ``numbers`` is in ``do_not_specialize`` of the kernel, or in ``compiled_for``.

    Triton itself needs 25 us to see that a kernel is compiled, mostly to inspect each argument. It
    compiles other code for a tensor whose memory is not aligned, so the shortcut here is only for
    aligned tensors.
    """
    kinds = [name, *compiled_for, *flags.values()]
    addresses = 0
    for tensor in tensors:
        if tensor is None:
            kinds.append(None)
        else:
            kinds.append(tensor.dtype)
            addresses |= tensor.data_ptr()
    key = tuple(kinds)
    if key in _compiled and not addresses & 15:
        kernel, rest = _compiled[key]
        kernel[grid](*tensors, *numbers, *rest)
        return
    kernel = getattr(kernels, name)
    constants = constants | flags
    compiled = kernel[grid](*tensors, *numbers, **constants)
    if LAUNCHES_COMPILED and isinstance(compiled, CompiledKernel) and not addresses & 15:
        rest = kernel.arg_names[len(tensors) + len(numbers) :]
        _compiled[key] = compiled, [constants[constant] for constant in rest]


@lru_cache
def _multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":
        return 1
    return torch.cuda.get_device_properties(device).multi_processor_count


def _quotient(number: int, divisor: int) -> int:
    """The quotient, rounded up. Triton's own function takes 3 us."""
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
        width: channels of a tile, including those that a mask excludes.
        tile: constants of the kernel: how a tile holds the channels, how many tokens it contains,
            and how many warps work on it.
        programs: number of programs that share the tokens. It depends only on the shape and the
            GPU.
        blocks: number of programs that finish the sums, and ``finishing`` their constants.
        key: what all kernels are compiled for.
    """

    def __init__(
        self, shape: torch.Size, dtype: torch.dtype, device: torch.device, groups: int, threads: int
    ):
        self.channels = shape[-1]
        self.device = device
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
        """Memory for the sums of the programs, for one or two numbers of each, and for ``more``."""
        return self.new(self.programs * (slots * self.channels + 2) + more)

    def parameters(self, like: Tensor | None) -> Tensor:
        """Memory for the gradients of weight and bias, in the type of ``like``, if given."""
        dtype = self.acc if like is None else like.dtype
        return torch.empty((2, self.channels), dtype=dtype, device=self.device)

    def launch(self, name: str, written, read, vectors, flags: dict) -> None:
        """Launch a kernel that reads the tokens: tensors and masks, with any strides."""
        strides = _strides(*read)
        tensors = *written, *read, *vectors
        grid = (self.programs, 1, 1)
        numbers = (self.rows, *strides)
        _launch(name, grid, tensors, numbers, self.tile, flags, self.key, strides[1:])

    def launch_gradient(self, name: str, dx, partials, read, vectors, flags: dict) -> None:
        """The same for dx and the sums, of which one may be None. With many channels, one pass has
        too few registers for both.
        """
        passes = [(dx, partials)]
        if dx is not None and partials is not None and self.width > MAX_FUSED_CHANNELS:
            passes = [(dx, None), (None, partials)]
        for written in passes:
            self.launch(name, written, read, vectors, flags)

    def finish(self, name: str, rows: int, tensors, flags: dict) -> None:
        """Launch a kernel that adds up the sums of the programs."""
        grid = (self.blocks, rows, 1)
        numbers = (self.programs,)
        _launch(name, grid, tensors, numbers, self.finishing, flags, self.key)

    def finish_sums(
        self, partials, like=None, vectors=(None, None, None), products=None, scalars=None, **flags
    ) -> Tensor:
        """``parameters`` (2, C), in the type of ``like``; also writes ``products`` and ``scalars``,
        if there is memory for them.
        """
        parameters = self.parameters(like)
        flags = {"EPS": 0.0, "MASKED": False} | flags
        tensors = partials, *vectors, parameters, products, scalars
        self.finish("finish_gradient_sums", 2, tensors, flags)
        return parameters


_tokens_of = lru_cache(4096)(_Tokens)


def _tokens(x: Tensor, groups: int, threads: int) -> _Tokens:
    return _tokens_of(x.shape, x.dtype, x.device, groups, threads)


def _like(x: Tensor) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


def _flags(name: str, numbers) -> dict:
    return dict(zip(NUMBERS[name], numbers, strict=False))


def _forward(x, y, padding, inv_rms, vectors, groups, eps, slots):
    """Launch ``norm_forward``, and finish its sums. ``slots``: 0 without sums, 1 about 0, 2 about
    the mean.

    Returns:
        ``inv_rms``, mean, moment and count, empty where there is none.
    """
    tokens = _tokens(x, groups, FORWARD_THREADS)
    given = inv_rms is not None
    nothing = tokens.new(0)
    scales = inv_rms if given else tokens.new(*x.shape[:-1], groups)
    partials = tokens.partials(slots) if slots else None
    written = (y, partials)
    vectors = (scales if groups else None, *vectors)
    flags = {"EPS": eps, "GIVEN": given, "CENTERED": slots == 2}
    tokens.launch("norm_forward", written, (x, padding), vectors, flags)
    new_scales = nothing if given else scales
    if not slots:
        return new_scales, nothing, nothing, nothing
    mean = tokens.new(tokens.channels) if slots == 2 else None
    moment = tokens.new(tokens.channels)
    count = tokens.new()
    tokens.finish("finish_moments", 1, (partials, mean, moment, count), {})
    return new_scales, nothing if mean is None else mean, moment, count


@_operator
def normalize(x, weight, bias, mean, moment, padding, inv_rms, groups, eps, sums):
    y = _like(x)
    vectors = (weight, bias, mean, moment)
    padding = padding if sums else None
    inv_rms, _, moment, count = _forward(x, y, padding, inv_rms, vectors, groups, eps, int(sums))
    return y, inv_rms, moment, count


@_operator
def moments(x, padding, groups, eps, centered):
    slots = 2 if centered else 1
    return _forward(x, None, padding, None, (None, None, None, None), groups, eps, slots)


@_operator
def batch_normalize(x, weight, bias, padding, groups, eps, centered):
    statistics = moments.__wrapped__(x, padding, groups, eps, centered)
    inv_rms, mean, moment, _ = statistics
    y = _like(x)
    vectors = (weight, bias, mean if centered else None, moment)
    _forward(x, y, None, inv_rms, vectors, groups, eps, 0)
    return y, *statistics


def _backward(tokens, dx, partials, dy, x, padding, inv_rms, vectors, eps) -> None:
    """Launch ``norm_backward``. ``vectors``: weight, mean, moment, nu, offset, count and loss
    scale.
    """
    read = (dy, x, padding)
    flags = {"EPS": eps}
    vectors = inv_rms if inv_rms.size(-1) else None, *vectors
    tokens.launch_gradient("norm_backward", dx, partials, read, vectors, flags)


def _gradient_sums(dy, x, padding, inv_rms, vectors, groups, eps, dx=None, like=None):
    """``parameters``, in the type of ``like``, and ``products``; also writes ``dx``."""
    tokens = _tokens(x, groups, BACKWARD_THREADS)
    partials = tokens.partials(2 if padding is None else 4)
    _backward(tokens, dx, partials, dy, x, padding, inv_rms, vectors, eps)
    products = tokens.new(2, tokens.channels)
    weight, _, moment, *_, loss_scale = vectors
    flags = {"EPS": eps, "MASKED": padding is not None}
    given = partials, like, (weight, moment, loss_scale), products
    return tokens.finish_sums(*given, **flags), products


@_operator
def gradient(
    dy, x, padding, weight, mean, moment, nu, offset, count, loss_scale, inv_rms, groups, eps, sums
):
    dx = _like(x)
    vectors = (weight, mean, moment, nu, offset, count, loss_scale)
    if sums:
        return dx, *_gradient_sums(dy, x, padding, inv_rms, vectors, groups, eps, dx)
    tokens = _tokens(x, groups, BACKWARD_THREADS)
    _backward(tokens, dx, None, dy, x, padding, inv_rms, vectors, eps)
    nothing = tokens.new(0)
    return dx, nothing, nothing


@_operator
def gradient_sums(dy, x, padding, weight, mean, moment, loss_scale, inv_rms, groups, eps):
    vectors = weight, mean, moment, None, None, None, loss_scale
    return _gradient_sums(dy, x, padding, inv_rms, vectors, groups, eps)


@_operator
def standardize(x, weight, bias, groups, *numbers):
    tokens = _tokens(x, groups, FORWARD_THREADS)
    y = _like(x)
    stats = tokens.new(3, *x.shape[:-1], groups)
    flags = _flags("standardize", (groups, *numbers))
    tokens.launch("standardize", (y, stats), (x,), (weight, bias), flags)
    return y, stats


@_operator
def standardize_gradient(dy, x, weight, stats, groups, *numbers):
    tokens = _tokens(x, groups, BACKWARD_THREADS)
    dx = _like(x)
    *numbers, sums = numbers
    partials = tokens.partials(2) if sums else None
    flags = _flags("standardize_gradient", (groups, *numbers))
    tokens.launch_gradient("standardize_gradient", dx, partials, (dy, x), (weight, stats), flags)
    return dx, tokens.finish_sums(partials) if sums else tokens.new(0)


@_operator
def squash(x, weight, bias, alpha, shift, erf):
    tokens = _tokens(x, 1, FORWARD_THREADS)
    y = _like(x)
    tokens.launch("squash", (y,), (x,), (weight, bias, alpha, shift), {"ERF": erf})
    return y


@_operator
def squash_gradient(dy, x, weight, alpha, shift, erf):
    tokens = _tokens(x, 1, BACKWARD_THREADS)
    dx = _like(x)
    partials = tokens.partials(2)
    scalars = tokens.new(2)
    vectors = (weight, alpha, shift)
    flags = {"ERF": erf}
    tokens.launch_gradient("squash_gradient", dx, partials, (dy, x), vectors, flags)
    return dx, tokens.finish_sums(partials, scalars=scalars), scalars


def _on_state(name: str, arguments, *results: Tensor, **window: int) -> None:
    """Launch the kernel of an operator on the state; ``window``: the rows ``M`` of its ring
    buffers.
    """
    names = NUMBERS[name]
    tensors = arguments[: -len(names)]
    numbers = arguments[-len(names) :]
    channels = tensors[0].size(-1)
    width = triton.next_power_of_2(channels)
    _check_width(width, f"{channels} channels")
    constants = {"C": channels, "BLOCK_C": width, "num_warps": _warps(width), "num_stages": 1}
    flags = dict(zip(names, numbers, strict=True))
    key = tensors[0].device, channels, *window.values()
    _launch(name, (1, 1, 1), (*tensors, *results), (), constants | window, flags, *key)


@_operator
def running_average_(*arguments):
    _on_state("running_average_", arguments)


@_operator
def power_update_(*arguments):
    _on_state("power_update_", arguments)


@_operator
def window_statistics(*arguments):
    window = arguments[0]
    batch_psi2 = arguments[4]
    psi2 = torch.empty_like(batch_psi2)
    ratio = torch.empty_like(batch_psi2)
    marks = torch.empty(2, dtype=torch.bool, device=window.device)
    _on_state("window_statistics", arguments, psi2, ratio, marks, M=len(window))
    return psi2, ratio, marks


@_operator
def window_update_(*arguments):
    window = arguments[2]
    correction = torch.empty_like(arguments[9])
    _on_state("window_update_", arguments, correction, M=len(window))
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
    tokens = _tokens(x, groups, BACKWARD_THREADS)
    dx = _like(x)
    masked = padding is not None
    partials = tokens.partials(4 if masked else 2, 1 + 2 * tokens.channels)
    vectors = weight, None, used_psi2, nu, None, None, loss_scale
    _backward(tokens, dx, partials, dy, x, padding, inv_rms, vectors, eps)
    parameters = tokens.parameters(weight)
    state = psi2, running_nu, num_batches, diagnostics
    tensors = partials, weight, loss_scale, parameters, *state, batch_psi2, used_psi2, count
    flags = _flags("power_update_", (eps, *numbers)) | {"MASKED": masked, "BLOCK": tokens.width}
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
    given = (dy, x, padding, inv_rms)
    rest = (groups, eps)
    statistics = (weight, mean, moment)
    vectors = *statistics, None, None, None, loss_scale
    parameters, products = _gradient_sums(*given, vectors, *rest, like=weight)
    nu, offset = products.unbind()
    vectors = *statistics, nu, None if mean is None else offset, count, loss_scale
    dx = _like(x)
    _backward(_tokens(x, groups, BACKWARD_THREADS), dx, None, *given, vectors, eps)
    state = running_moment, running_mean, num_batches, diagnostics
    _on_state("running_average_", (*state, moment, mean, products, count, *numbers))
    return dx, parameters
