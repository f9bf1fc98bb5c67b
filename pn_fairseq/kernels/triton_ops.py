"""The operators of :mod:`pn_fairseq.kernels.ops` by Triton, for CUDA.

Nothing here waits for the GPU or reads from it. A training step of PN after the psi warm-up is two launches each way;
in the warm-up the forward has a third one, because psi of the batch has to be known before anything is normalized. One
of PN-V or BN is three each way: sums over tokens, what is for all channels to know, and the result.

The shapes of tiles and the number of programs are chosen by rule and not by trial, which would cost seconds for every
new shape and could choose differently, and so round differently, in every run. With ``TRITON_INTERPRET=1`` in the
environment before triton is imported, the same functions compute on the CPU, slowly: tests do that.
"""

from functools import lru_cache, wraps

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.graph import increment_version

from pn_fairseq.kernels import triton_kernels as kernels
from pn_fairseq.kernels.contract import checked
from pn_fairseq.kernels.reference import MEAN, MOMENT, PSI2_USED, wide_type

#: Channels that one program holds: of one layer-scale group at most ``WHOLE``, which would else be read twice, and
#: ``PIECE`` where nothing forces them together.
WHOLE, PIECE = 8192, 4096

#: Elements of a tile that one thread holds, and threads that a multiprocessor has registers for: forward, which needs
#: up to 72 of them at these tiles, and backward, which holds two tensors and more sums and needs up to 96.
FORWARD, BACKWARD = (16, 896), (16, 640)

#: Tiles that a program is given at least, once every multiprocessor has one: sums are written once per program.
TILES = 4

#: What a program of the second kernel adds up at a time: programs of the first, and channels.
PARTS, BLOCK = 128, 32

#: Most tokens that one program may count: counts are kept as float32.
EXACT = 2**23

#: Channels that the last program of the second kernel looks at a time.
TAIL = 4096

#: Whether the kernels compute on the CPU.
INTERPRETED = not isinstance(kernels.normalize, triton.runtime.JITFunction)

FINISH = {"num_warps": 8, "num_stages": 1, "enable_fp_fusion": True}


@lru_cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


class _Shape:
    """How the channels of a token are cut up, and how many tokens make a tile."""

    def __init__(self, channels: int, groups: int, eps: float, wide: torch.dtype, per_thread: int, threads: int):
        scaled, groups = groups > 0, max(groups, 1)
        size = channels // groups
        bs = triton.next_power_of_2(size)
        bg = chunks = 1
        if bs > (WHOLE if scaled else PIECE):
            bs = PIECE
            chunks = triton.cdiv(size, bs)
        else:
            bg = min(triton.next_power_of_2(groups), max(PIECE // bs, 1))
        warps = min(max(bg * bs // 256, 1), 16)
        self.rows = max(per_thread * 32 * warps // (bg * bs), 1)
        self.blocks = triton.cdiv(groups, bg) * chunks
        #: Programs that fill a multiprocessor.
        self.resident = max(threads // (32 * warps), 1)
        #: Whether a group is spread over several blocks, and layer-scale needs kernels of its own.
        self.split = scaled and chunks > 1
        self.constants = {
            "GROUPS": groups,
            "SIZE": size,
            "BS": bs,
            "CHUNKS": chunks,
            "WIDE": tl.float64 if wide is torch.float64 else tl.float32,
            "EPS": eps,
        }
        self.options = {"num_warps": warps, "num_stages": 1, "enable_fp_fusion": True}
        self.tile = self.constants | {"BG": bg, "ROWS": self.rows, "SCALED": scaled} | self.options


_shape = lru_cache(_Shape)


class _Call:
    """One call over the tokens of ``tensors``, which have one shape: the grid, and what its kernels share.

    Attributes:
        programs: number of programs that the tokens are dealt out to. It depends on the shape and the GPU only.
        tokens: rows, batch and, with a mask, its steps over time and batch; arguments of the kernels over tokens.
        steps: over time, batch and channels, of each of ``tensors``.
    """

    def __init__(self, load, groups: int, eps: float, mask: Tensor | None, masked: bool, *tensors: Tensor):
        x = tensors[0]
        channels = x.size(-1)
        self.wide = wide_type(x)
        self.shape = shape = _shape(channels, groups, eps, self.wide, *load)
        if x.dim() == 3:
            time, batch, _ = x.shape
            steps = [tensor.stride() for tensor in tensors]
            if batch == 1 or (mask is None and all(over_time == batch * step for over_time, step, _ in steps)):
                if batch > 1:
                    steps = [(step, 0, over_channels) for _, step, over_channels in steps]
                time, batch = time * batch, 1
            mask_steps = (0, 0) if mask is None else (mask.stride(1), mask.stride(0))
        else:
            time, batch = x.size(0), 1
            steps = [(tensor.stride(0), 0, tensor.stride(1)) for tensor in tensors]
            mask_steps = (0, 0) if mask is None else (mask.stride(0), 0)
        self.rows = rows = time * batch
        self.tokens = (rows, batch, *mask_steps) if masked else (rows, batch)
        self.steps = [step for of_tensor in steps for step in of_tensor]
        processors, tiles = _multiprocessors(x.device), -(-rows // shape.rows)
        most = max(processors * shape.resident // shape.blocks, 1)
        self.programs = max(min(most, max(-(-tiles // TILES), min(tiles, processors))), rows // EXACT, 1)
        self.grid = (self.programs, shape.blocks)
        self.layout = {"BATCHED": batch > 1, "LONG": rows >= 2**30}
        self.channels, self.device = channels, x.device

    def partials(self, slots: int, counts: int = 1) -> Tensor:
        return torch.empty(self.programs * (slots * self.channels + counts) + 1, dtype=self.wide, device=self.device)

    def finish(self) -> dict:
        """What kernels that finish a whole step are told about how to."""
        return {"PARTS": PARTS, "BLOCK": BLOCK, "TAIL": min(TAIL, triton.next_power_of_2(self.channels)), **FINISH}

    def finish_grid(self, slots: int = 1) -> tuple[int, int]:
        return (-(-self.channels // BLOCK), slots)

    def scales(self, x: Tensor, groups: int, given: Tensor | None, steps: list[int]) -> tuple[Tensor, bool]:
        """``inv_rms``, and whether it is filled: it is to be by the kernel that reads x, unless groups are split."""
        if given is not None:
            return given, True
        scales = torch.empty((*x.shape[:-1], groups), dtype=self.wide, device=self.device)
        if self.shape.split:
            self.over_groups(None, x, None, scales, None, None, None, None, None, None, None, [0, 0, 0, *steps])
        return scales, self.shape.split

    def over_groups(self, dy, x, mask, inv_rms, projection, weight, vectors, scale, slope, offset, mean, steps):
        constants = self.shape.constants | {"BATCHED": self.layout["BATCHED"]} | self.shape.options
        rows, batch, *mask_steps = self.tokens
        programs = max(min(self.rows * constants["GROUPS"], 8 * _multiprocessors(x.device)), 1)
        kernels.sum_over_groups[(programs,)](
            dy, x, mask, inv_rms, projection, weight, vectors, scale, slope, offset, mean,
            rows, batch, *(mask_steps or (0, 0)), *steps, **constants,
        )  # fmt: skip


def _where_x_is(function):
    """Checks the arguments, and launches where the first one is: Triton takes the current device."""
    function = checked(function, dense=True)

    @wraps(function)
    def on_device(x, *args):
        if x.is_cuda and x.get_device() != torch.cuda.current_device():
            with torch.cuda.device(x.device):
                return function(x, *args)
        return function(x, *args)

    return on_device


def _note_changes(*changed: Tensor | None) -> None:
    """Tell autograd what kernels have changed in place, which it sees of operators of its own only."""
    increment_version([tensor for tensor in changed if tensor is not None])


@_where_x_is
def normalize(x, weight, bias, mean, moment, inv_rms, groups, eps):
    y = torch.empty_like(x)
    call = _Call(FORWARD, groups, eps, None, False, x, y)
    scales, given = call.scales(x, groups, inv_rms, call.steps[:3])
    kernels.normalize[call.grid](
        x, y, scales, weight, bias, mean, moment, None, *call.tokens, *call.steps,
        GIVEN=given, **call.layout, **call.shape.tile,
    )  # fmt: skip
    return y, scales if inv_rms is None else scales.new_empty(0)


def _observe(call, x, mask, scales, given, centered, rest):
    """Sums of h^2, or means and squared deviations if ``centered``, of each program; with ``rest`` of padding, too."""
    kinds = 2 if centered else 1
    slots = 2 * kinds if rest else kinds
    partials = call.partials(slots, counts=2 if centered else 1)
    if centered:
        kernels.observe_centered[call.grid](
            x, mask, scales, partials, *call.tokens, *call.steps[:3],
            GIVEN=given, REST=rest, **call.layout, **call.shape.tile,
        )  # fmt: skip
    else:
        rows, batch, *mask_steps = call.tokens
        kernels.observe[call.grid](
            x, None, mask, scales, None, None, None, None, partials,
            rows, batch, 0, *mask_steps, *call.steps[:3], 0, 0, 0,
            GIVEN=given, WARMUP=False, REST=rest, **call.layout, **call.shape.tile,
        )  # fmt: skip
    return partials, slots


@_where_x_is
def moments(x, padding_mask, groups, eps, centered):
    call = _Call(FORWARD, groups, eps, padding_mask, True, x)
    masked = padding_mask is not None
    scales, given = call.scales(x, groups, None, call.steps)
    mean = torch.empty(call.channels if centered else 0, dtype=call.wide, device=x.device)
    squares = torch.empty((2, call.channels), dtype=call.wide, device=x.device)
    count = torch.empty((), dtype=call.wide, device=x.device)
    partials, slots = _observe(call, x, padding_mask, scales, given, centered, masked)
    finish = {"C": call.channels, "SLOTS": slots, "MASKED": masked, "PARTS": PARTS, "BLOCK": BLOCK, **FINISH}
    if centered:
        kernels.finish_centered[call.finish_grid()](partials, mean, squares, count, call.programs, call.rows, **finish)
    else:
        kernels.finish_sums[call.finish_grid(2)](partials, squares, count, call.programs, call.rows, **finish)
    return scales, mean, squares, count


def _differentiate(call, dy, x, dx, mask, inv_rms, weight, vectors, scale, slope, offset, mean, partials):
    projection = None
    if call.shape.split and dx is not None:
        projection = torch.empty_like(inv_rms)
        call.over_groups(dy, x, mask, inv_rms, projection, weight, vectors, scale, slope, offset, mean, call.steps[:6])
    steps = call.steps if dx is not None else (*call.steps[:6], 0, 0, 0)
    kernels.differentiate[call.grid](
        dy, x, dx, mask, inv_rms, projection, weight, vectors, scale, slope, offset, mean, partials,
        *call.tokens, *steps, **call.layout, **call.shape.tile,
    )  # fmt: skip


def _sums(call, partials, slots):
    sums = torch.empty((2, 2, call.channels), dtype=call.wide, device=partials.device)
    kernels.finish_sums[call.finish_grid(4)](
        partials, sums, None, call.programs, call.rows,
        C=call.channels, SLOTS=slots, MASKED=False, PARTS=PARTS, BLOCK=BLOCK, **FINISH,
    )  # fmt: skip
    return sums


@_where_x_is
def gradient_sums(dy, x, padding_mask, mean, inv_rms, groups):
    call = _Call(BACKWARD, groups, 0.0, padding_mask, True, dy, x)
    slots = 2 if padding_mask is None else 4
    partials = call.partials(slots)
    _differentiate(call, dy, x, None, padding_mask, inv_rms, None, None, None, None, None, mean, partials)
    return _sums(call, partials, slots)


@_where_x_is
def gradient(dy, x, padding_mask, scale, slope, offset, mean, inv_rms, groups, sums):
    dx = torch.empty_like(x)
    call = _Call(BACKWARD, groups, 0.0, padding_mask, True, dy, x, dx)
    slots = 2 if padding_mask is None else 4
    partials = call.partials(slots) if sums else None
    _differentiate(call, dy, x, dx, padding_mask, inv_rms, None, None, scale, slope, offset, mean, partials)
    return dx, _sums(call, partials, slots) if sums else inv_rms.new_empty(0)


@_where_x_is
def power_forward(x, padding_mask, weight, bias, running_psi2, nu, steps, groups, eps, alpha, warmup, update):
    y = torch.empty_like(x)
    call = _Call(FORWARD, groups, eps, padding_mask, True, x, y)
    scales, given = call.scales(x, groups, None, call.steps[:3])
    vectors = torch.empty((5, call.channels), dtype=call.wide, device=x.device)
    tally = torch.empty(4, dtype=torch.int64, device=x.device)
    partials = call.partials(1)
    rows, batch, *mask_steps = call.tokens
    kernels.observe[call.grid](
        x, y, padding_mask, scales, weight, bias, running_psi2, steps, partials,
        rows, batch, warmup, *mask_steps, *call.steps,
        GIVEN=given, WARMUP=warmup > 0, REST=False, **call.layout, **call.shape.tile,
    )  # fmt: skip
    kernels.finish_power_forward[call.finish_grid()](
        partials, running_psi2, nu, steps, vectors, tally, call.programs, rows, warmup,
        C=call.channels, SHARE=1.0 - alpha, UPDATE=update, WARMUP=warmup > 0, MASKED=padding_mask is not None,
        **call.finish(),
    )  # fmt: skip
    if warmup > 0:
        kernels.normalize[call.grid](
            x, y, scales, weight, bias, None, vectors[PSI2_USED], tally, rows, batch, *call.steps,
            GIVEN=True, **call.layout, **call.shape.tile,
        )  # fmt: skip
    if update:
        _note_changes(running_psi2, steps)
    return y, scales, vectors, tally


def _like_parameters(weight):
    return (None, None) if weight is None else (torch.empty_like(weight), torch.empty_like(weight))


@_where_x_is
def power_backward(
    dy, x, padding_mask, weight, inv_rms, vectors, running_psi2, nu, steps, tally, groups, eps, alpha, update
):
    dx = torch.empty_like(x)
    call = _Call(BACKWARD, groups, eps, padding_mask, True, dy, x, dx)
    slots = 2 if padding_mask is None else 3
    partials = call.partials(slots)
    dweight, dbias = _like_parameters(weight)
    lambda_total = torch.empty(call.channels, dtype=call.wide, device=x.device)
    _differentiate(call, dy, x, dx, padding_mask, inv_rms, weight, vectors, None, None, None, None, partials)
    kernels.finish_power_backward[call.finish_grid()](
        partials, weight, dweight, dbias, lambda_total, vectors, running_psi2, nu, steps, tally, call.programs,
        C=call.channels, SLOTS=slots, SHARE=1.0 - alpha, EPS=eps, UPDATE=update,
        **call.finish(),
    )  # fmt: skip
    if update:
        _note_changes(running_psi2, nu, steps, tally)
    if weight is None:
        dweight, dbias = dx.new_empty(0), dx.new_empty(0)
    return dx, dweight, dbias, lambda_total


@_where_x_is
def batch_forward(
    x, padding_mask, weight, bias, running_mean, running_moment, steps, groups, eps, alpha, cumulative, update
):
    y = torch.empty_like(x)
    call = _Call(FORWARD, groups, eps, padding_mask, True, x, y)
    centered, masked = running_mean is not None, padding_mask is not None
    scales, given = call.scales(x, groups, None, call.steps[:3])
    vectors = torch.empty((4 if centered else 2, call.channels), dtype=call.wide, device=x.device)
    tally = torch.empty(4, dtype=torch.int64, device=x.device)
    partials, _ = _observe(call, x, padding_mask, scales, given, centered, False)
    kernels.finish_batch_forward[call.finish_grid()](
        partials, running_mean, running_moment, steps, vectors, tally, call.programs, call.rows,
        C=call.channels, SHARE=1.0 - alpha, CUMULATIVE_MEAN=cumulative, UPDATE=update, MASKED=masked, **call.finish(),
    )  # fmt: skip
    kernels.normalize[call.grid](
        x, y, scales, weight, bias, vectors[MEAN] if centered else None, vectors[MOMENT], None,
        *call.tokens[:2], *call.steps, GIVEN=True, **call.layout, **call.shape.tile,
    )  # fmt: skip
    if update:
        _note_changes(running_mean, running_moment, steps)
    return y, scales, vectors, tally


@_where_x_is
def batch_backward(
    dy, x, padding_mask, weight, inv_rms, vectors, running_mean, running_moment, steps, tally, groups, eps, update
):
    dx = torch.empty_like(x)
    call = _Call(BACKWARD, groups, eps, padding_mask, True, dy, x, dx)
    slots = 2 if padding_mask is None else 4
    partials = call.partials(slots)
    dweight, dbias = _like_parameters(weight)
    sums = torch.empty((2, call.channels), dtype=call.wide, device=x.device)
    centered = running_mean is not None
    vectors_of_dx = torch.empty((3 if centered else 2, call.channels), dtype=call.wide, device=x.device)
    scale, slope, *offset = vectors_of_dx.unbind()
    offset, mean = (offset[0], vectors[MEAN]) if centered else (None, None)
    _differentiate(call, dy, x, None, padding_mask, inv_rms, None, None, None, None, None, mean, partials)
    kernels.finish_batch_backward[call.finish_grid()](
        partials, weight, dweight, dbias, sums, scale, slope, offset,
        vectors, running_mean, running_moment, steps, tally, call.programs,
        C=call.channels, SLOTS=slots, EPS=eps, UPDATE=update, **call.finish(),
    )  # fmt: skip
    _differentiate(call, dy, x, dx, padding_mask, inv_rms, None, None, scale, slope, offset, mean, None)
    if update:
        _note_changes(running_mean, running_moment, steps, tally)
    if weight is None:
        dweight, dbias = dx.new_empty(0), dx.new_empty(0)
    return dx, dweight, dbias, sums
