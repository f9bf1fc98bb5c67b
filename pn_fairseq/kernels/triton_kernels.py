"""The Triton kernels behind :mod:`.triton_ops`. What they compute is documented in :mod:`.reference`.

A kernel over tokens is a grid of (programs, blocks of channels). A program takes every ``programs``-th tile of ``ROWS``
tokens; a tile is (ROWS, BG, BS): tokens, ``BG`` groups, and the ``BS`` channels (powers of two, the rest is masked) of
each. Without layer-scale all channels are one group. Where a group is larger than registers can hold, ``CHUNKS``
blocks share it, and what is summed over its channels (1 / rms, and the projection in backward) comes from a kernel of
its own. Sums over tokens stay in registers until a program ends; it then writes them to ``partials``, a buffer

    sums: (slots, programs, C),   real tokens: (programs,),   ticket: 1,   padding: (programs,)

all in the wide type, which :func:`finish_sums` and its relatives add up in the order of the programs. Counts there are
whole numbers small enough to be exact. What concerns all channels at once (is everything finite?) is done by the last
program of these to finish, found by drawing tickets: which one it is has no influence on the result.

Tokens are numbered time * batch + sequence. Offsets in memory are 64 bit; token numbers are if ``LONG`` says so.
"""

import triton
import triton.language as tl

INFINITY = tl.constexpr(float("inf"))

# Rows of vectors of PN, of PN-V and BN, and entries of tally, as in reference.py.
SQUARES, PSI2_USED, NU, PSI2_BEFORE, PSI2_BATCH = (tl.constexpr(row) for row in range(5))
MOMENT, MOMENT_BEFORE, MEAN, MEAN_BEFORE = (tl.constexpr(row) for row in range(4))
TOKENS, COUNTED, CUMULATIVE, STEPS_BEFORE = (tl.constexpr(entry) for entry in range(4))


@triton.jit
def _root(value):
    """The square root, rounded correctly."""
    if value.dtype == tl.float64:
        return tl.sqrt(value)
    else:
        return tl.sqrt_rn(value)


@triton.jit
def _quotient(numerator, denominator):
    """numerator / denominator, rounded correctly."""
    if denominator.dtype == tl.float64:
        return numerator / denominator
    else:
        return tl.div_rn(numerator, denominator)


@triton.jit
def _all_finite(values, inside):
    """Whether all ``values`` are that are ``inside``, as 1 or 0."""
    return 1 - tl.max(((tl.abs(values) < INFINITY) == 0).to(tl.int32) * inside.to(tl.int32), 0)


@triton.jit
def _channels(
    block, GROUPS: tl.constexpr, SIZE: tl.constexpr, BG: tl.constexpr, BS: tl.constexpr, CHUNKS: tl.constexpr
):
    """Groups (BG,), channels (BG, BS) and which of these exist, of a block of channels."""
    if CHUNKS == 1:
        group = block * BG + tl.arange(0, BG)
        k = tl.arange(0, BS)
    else:
        group = block // CHUNKS + tl.arange(0, BG)
        k = (block % CHUNKS) * BS + tl.arange(0, BS)
    channel = group[:, None] * SIZE + k[None, :]
    return group, channel, (group < GROUPS)[:, None] & (k < SIZE)[None, :]


@triton.jit
def _first_row(ROWS: tl.constexpr, LONG: tl.constexpr):
    program = tl.program_id(0)
    if LONG:
        program = program.to(tl.int64)
    return program * ROWS


@triton.jit
def _row_offsets(row, batch, step_t, step_b, BATCHED: tl.constexpr):
    """Offsets of tokens in memory, 64 bit."""
    if BATCHED:
        time = row // batch
        return time.to(tl.int64) * step_t + (row - time * batch).to(tl.int64) * step_b
    else:
        return row.to(tl.int64) * step_t


@triton.jit
def _channel_offsets(channel, step):
    """Offsets of channels in memory, 64 bit. A ``step`` of 1 is a constant to the compiler."""
    return channel.to(tl.int64) * step


@triton.jit
def _vector(pointer, channel, inside, default: tl.constexpr, WIDE: tl.constexpr):
    """A vector over channels, wide; ``default`` everywhere if it is not given."""
    if pointer is None:
        return tl.full(channel.shape, default, WIDE)
    else:
        return tl.load(pointer + channel, mask=inside, other=default).to(WIDE)


@triton.jit
def _real(mask, row, valid, batch, mask_t, mask_b, BATCHED: tl.constexpr):
    """Which tokens are real, (ROWS,)."""
    if mask is None:
        return valid
    else:
        padding = tl.load(mask + _row_offsets(row, batch, mask_t, mask_b, BATCHED), mask=valid, other=1)
        return valid & (padding == 0)


@triton.jit
def _scales(h, row, valid, group, inv_rms, GROUPS: tl.constexpr, SIZE: tl.constexpr, EPS: tl.constexpr, GIVEN):
    """1 / rms of each token and group, (ROWS, BG, 1): ``inv_rms`` if ``GIVEN``, else computed and written there."""
    place = inv_rms + row.to(tl.int64)[:, None] * GROUPS + group[None, :]
    exists = valid[:, None] & (group < GROUPS)[None, :]
    if GIVEN:
        scales = tl.load(place, mask=exists, other=0.0)
    else:
        scales = tl.rsqrt(tl.sum(h * h, 2) / SIZE + EPS)
        tl.store(place, scales, mask=exists)
    return scales[:, :, None]


@triton.jit
def _write_sum(partials, slot: tl.constexpr, channel, inside, total, C: tl.constexpr):
    row = slot * tl.num_programs(0).to(tl.int64) + tl.program_id(0)
    tl.store(partials + row * C + channel, total, mask=inside)


@triton.jit
def _write_count(partials, count, SLOTS: tl.constexpr, C: tl.constexpr):
    """The number of real tokens that this program has seen, and a fresh ticket."""
    if tl.program_id(1) == 0:
        programs = tl.num_programs(0)
        counts = partials + programs.to(tl.int64) * SLOTS * C
        tl.store(counts + tl.program_id(0), count.to(partials.dtype.element_ty))
        if tl.program_id(0) == 0:
            tl.store(counts + programs, tl.zeros([], partials.dtype.element_ty))


# Kernels over tokens.


@triton.jit(do_not_specialize=["rows", "batch"])
def normalize(
    x,
    y,
    inv_rms,
    weight,
    bias,
    mean,
    moment,
    tally,
    rows,
    batch,
    x_t,
    x_b,
    x_c,
    y_t,
    y_b,
    y_c,
    GROUPS: tl.constexpr,
    SIZE: tl.constexpr,
    BG: tl.constexpr,
    BS: tl.constexpr,
    CHUNKS: tl.constexpr,
    ROWS: tl.constexpr,
    SCALED: tl.constexpr,
    GIVEN: tl.constexpr,
    BATCHED: tl.constexpr,
    LONG: tl.constexpr,
    WIDE: tl.constexpr,
    EPS: tl.constexpr,
):
    """y from given statistics. With ``tally``: only if that says that the step is in the psi warm-up."""
    group, channel, inside = _channels(tl.program_id(1), GROUPS, SIZE, BG, BS, CHUNKS)
    gain = _vector(weight, channel, inside, 1.0, WIDE)
    if moment is not None:
        gain = _quotient(gain, _root(_vector(moment, channel, inside, 1.0, WIDE) + EPS))
    shift = _vector(bias, channel, inside, 0.0, WIDE)
    centre = _vector(mean, channel, inside, 0.0, WIDE)
    x_channel, y_channel = _channel_offsets(channel, x_c), _channel_offsets(channel, y_c)
    end = rows
    if tally is not None:
        if tl.load(tally + CUMULATIVE) == 0:
            end = rows * 0
    for start in range(_first_row(ROWS, LONG), end, tl.num_programs(0) * ROWS):
        row = start + tl.arange(0, ROWS)
        valid = row < rows
        here = valid[:, None, None] & inside[None, :, :]
        x_row = _row_offsets(row, batch, x_t, x_b, BATCHED)
        h = tl.load(x + x_row[:, None, None] + x_channel[None, :, :], mask=here, other=0.0).to(WIDE)
        if SCALED:
            h = h * _scales(h, row, valid, group, inv_rms, GROUPS, SIZE, EPS, GIVEN)
        if mean is not None:
            h = h - centre[None, :, :]
        if (weight is not None) or (moment is not None):
            h = h * gain[None, :, :]
        if bias is not None:
            h = h + shift[None, :, :]
        y_row = _row_offsets(row, batch, y_t, y_b, BATCHED)
        tl.store(y + y_row[:, None, None] + y_channel[None, :, :], h.to(y.dtype.element_ty), mask=here)


@triton.jit(do_not_specialize=["rows", "batch", "warmup", "mask_t", "mask_b"])
def observe(
    x,
    y,
    mask,
    inv_rms,
    weight,
    bias,
    running_psi2,
    steps,
    partials,
    rows,
    batch,
    warmup,
    mask_t,
    mask_b,
    x_t,
    x_b,
    x_c,
    y_t,
    y_b,
    y_c,
    GROUPS: tl.constexpr,
    SIZE: tl.constexpr,
    BG: tl.constexpr,
    BS: tl.constexpr,
    CHUNKS: tl.constexpr,
    ROWS: tl.constexpr,
    SCALED: tl.constexpr,
    GIVEN: tl.constexpr,
    BATCHED: tl.constexpr,
    LONG: tl.constexpr,
    WIDE: tl.constexpr,
    EPS: tl.constexpr,
    WARMUP: tl.constexpr,
    REST: tl.constexpr,
):
    """Sums of h^2 over the real tokens (slot 0) and with ``REST`` over the padding (slot 1).

    With ``y`` also the result of PN, unless the step is in the psi warm-up, which ``WARMUP`` says it can be.
    """
    C: tl.constexpr = GROUPS * SIZE
    group, channel, inside = _channels(tl.program_id(1), GROUPS, SIZE, BG, BS, CHUNKS)
    x_channel = _channel_offsets(channel, x_c)
    if y is not None:
        y_channel = _channel_offsets(channel, y_c)
        gain = _vector(weight, channel, inside, 1.0, WIDE)
        gain = _quotient(gain, _root(_vector(running_psi2, channel, inside, 1.0, WIDE) + EPS))
        shift = _vector(bias, channel, inside, 0.0, WIDE)
        normalizes = True
        if WARMUP:
            normalizes = tl.load(steps) >= warmup
    squares = tl.zeros([BG, BS], WIDE)
    rest = tl.zeros([BG, BS], WIDE)
    count = tl.zeros([], tl.int32)
    for start in range(_first_row(ROWS, LONG), rows, tl.num_programs(0) * ROWS):
        row = start + tl.arange(0, ROWS)
        valid = row < rows
        real = _real(mask, row, valid, batch, mask_t, mask_b, BATCHED)
        here = valid[:, None, None] & inside[None, :, :]
        x_row = _row_offsets(row, batch, x_t, x_b, BATCHED)
        h = tl.load(x + x_row[:, None, None] + x_channel[None, :, :], mask=here, other=0.0).to(WIDE)
        if SCALED:
            h = h * _scales(h, row, valid, group, inv_rms, GROUPS, SIZE, EPS, GIVEN)
        if mask is None:
            squares += tl.sum(h * h, 0)
        else:
            squares += tl.sum(tl.where(real[:, None, None], h * h, 0.0), 0)
            if REST:
                rest += tl.sum(tl.where(real[:, None, None], 0.0, h * h), 0)
            count += tl.sum(real.to(tl.int32), 0)
        if y is not None:
            if normalizes:
                h = h * gain[None, :, :]
                if bias is not None:
                    h = h + shift[None, :, :]
                y_row = _row_offsets(row, batch, y_t, y_b, BATCHED)
                tl.store(y + y_row[:, None, None] + y_channel[None, :, :], h.to(y.dtype.element_ty), mask=here)
    _write_sum(partials, 0, channel, inside, squares, C)
    if REST:
        _write_sum(partials, 1, channel, inside, rest, C)
        _write_count(partials, count, 2, C)
    else:
        _write_count(partials, count, 1, C)


@triton.jit
def _add_tile(h, keep, tokens, mean, squares):
    """Count, mean and squared deviations of a sample of tokens, with those of a tile that are to ``keep`` added.

    Chan, Golub & LeVeque 1983, Eq. 2.1; the samples have the same tokens in all channels.
    """
    kept = tl.sum(keep.to(h.dtype), 0)
    tile_mean = tl.sum(tl.where(keep[:, None, None], h, 0.0), 0) / tl.maximum(kept, 1.0)
    deviation = tl.where(keep[:, None, None], h - tile_mean[None, :, :], 0.0)
    share = kept / tl.maximum(tokens + kept, 1.0)
    difference = tile_mean - mean
    squares += tl.sum(deviation * deviation, 0)
    if kept > 0:
        squares += difference * difference * (tokens * share)
        mean += difference * share
    return tokens + kept, mean, squares


@triton.jit(do_not_specialize=["rows", "batch", "mask_t", "mask_b"])
def observe_centered(
    x,
    mask,
    inv_rms,
    partials,
    rows,
    batch,
    mask_t,
    mask_b,
    x_t,
    x_b,
    x_c,
    GROUPS: tl.constexpr,
    SIZE: tl.constexpr,
    BG: tl.constexpr,
    BS: tl.constexpr,
    CHUNKS: tl.constexpr,
    ROWS: tl.constexpr,
    SCALED: tl.constexpr,
    GIVEN: tl.constexpr,
    BATCHED: tl.constexpr,
    LONG: tl.constexpr,
    WIDE: tl.constexpr,
    EPS: tl.constexpr,
    REST: tl.constexpr,
):
    """Means of h and squared deviations from them in each program's real tokens (slots 0, 1).

    With ``REST`` also in the padding (slots 2, 3).
    """
    C: tl.constexpr = GROUPS * SIZE
    group, channel, inside = _channels(tl.program_id(1), GROUPS, SIZE, BG, BS, CHUNKS)
    x_channel = _channel_offsets(channel, x_c)
    mean, squares = tl.zeros([BG, BS], WIDE), tl.zeros([BG, BS], WIDE)
    rest_mean, rest_squares = tl.zeros([BG, BS], WIDE), tl.zeros([BG, BS], WIDE)
    count, rest_count = tl.zeros([], WIDE), tl.zeros([], WIDE)
    for start in range(_first_row(ROWS, LONG), rows, tl.num_programs(0) * ROWS):
        row = start + tl.arange(0, ROWS)
        valid = row < rows
        real = _real(mask, row, valid, batch, mask_t, mask_b, BATCHED)
        here = valid[:, None, None] & inside[None, :, :]
        x_row = _row_offsets(row, batch, x_t, x_b, BATCHED)
        h = tl.load(x + x_row[:, None, None] + x_channel[None, :, :], mask=here, other=0.0).to(WIDE)
        if SCALED:
            h = h * _scales(h, row, valid, group, inv_rms, GROUPS, SIZE, EPS, GIVEN)
        count, mean, squares = _add_tile(h, real, count, mean, squares)
        if REST:
            padding = valid & (real == 0)
            rest_count, rest_mean, rest_squares = _add_tile(h, padding, rest_count, rest_mean, rest_squares)
    _write_sum(partials, 0, channel, inside, mean, C)
    _write_sum(partials, 1, channel, inside, squares, C)
    if REST:
        _write_sum(partials, 2, channel, inside, rest_mean, C)
        _write_sum(partials, 3, channel, inside, rest_squares, C)
        _write_count(partials, count, 4, C)
        programs = tl.num_programs(0)
        padding = partials + programs.to(tl.int64) * 4 * C + programs + 1
        tl.store(padding + tl.program_id(0), rest_count, mask=tl.program_id(1) == 0)
    else:
        _write_count(partials, count, 2, C)


@triton.jit
def _gradient_vectors(
    weight, vectors, scale, slope, channel, inside, C: tl.constexpr, EPS: tl.constexpr, WIDE: tl.constexpr
):
    """The vectors of dh = scale * dy - 1_M (slope * (h - mean) + ...): those of PN if there are its ``vectors``."""
    if vectors is None:
        return _vector(scale, channel, inside, 1.0, WIDE), _vector(slope, channel, inside, 0.0, WIDE)
    else:
        divisor2 = _vector(vectors + PSI2_USED * C, channel, inside, 1.0, WIDE) + EPS
        gain = _vector(weight, channel, inside, 1.0, WIDE)
        nu = _vector(vectors + NU * C, channel, inside, 0.0, WIDE)
        return _quotient(gain, _root(divisor2)), _quotient(nu, divisor2)


@triton.jit(do_not_specialize=["rows", "batch", "mask_t", "mask_b"])
def differentiate(
    dy,
    x,
    dx,
    mask,
    inv_rms,
    projection,
    weight,
    vectors,
    scale,
    slope,
    offset,
    mean,
    partials,
    rows,
    batch,
    mask_t,
    mask_b,
    dy_t,
    dy_b,
    dy_c,
    x_t,
    x_b,
    x_c,
    dx_t,
    dx_b,
    dx_c,
    GROUPS: tl.constexpr,
    SIZE: tl.constexpr,
    BG: tl.constexpr,
    BS: tl.constexpr,
    CHUNKS: tl.constexpr,
    ROWS: tl.constexpr,
    SCALED: tl.constexpr,
    BATCHED: tl.constexpr,
    LONG: tl.constexpr,
    WIDE: tl.constexpr,
    EPS: tl.constexpr,
):
    """dx, if it is given, and if ``partials`` is, sums of dy (h - mean) and dy.

    Slots 0 and 1 are sums over the real tokens, 2 and 3 over the padding (with ``mask``). With PN's ``vectors`` slot 1
    is the sum of dy over all tokens and there is no slot 3.
    """
    C: tl.constexpr = GROUPS * SIZE
    group, channel, inside = _channels(tl.program_id(1), GROUPS, SIZE, BG, BS, CHUNKS)
    dy_channel, x_channel = _channel_offsets(channel, dy_c), _channel_offsets(channel, x_c)
    centre = _vector(mean, channel, inside, 0.0, WIDE)
    if dx is not None:
        dx_channel = _channel_offsets(channel, dx_c)
        scales, slopes = _gradient_vectors(weight, vectors, scale, slope, channel, inside, C, EPS, WIDE)
        offsets = _vector(offset, channel, inside, 0.0, WIDE)
    product, plain = tl.zeros([BG, BS], WIDE), tl.zeros([BG, BS], WIDE)
    rest_product, rest_plain = tl.zeros([BG, BS], WIDE), tl.zeros([BG, BS], WIDE)
    for start in range(_first_row(ROWS, LONG), rows, tl.num_programs(0) * ROWS):
        row = start + tl.arange(0, ROWS)
        valid = row < rows
        real = _real(mask, row, valid, batch, mask_t, mask_b, BATCHED)[:, None, None]
        here = valid[:, None, None] & inside[None, :, :]
        dy_row = _row_offsets(row, batch, dy_t, dy_b, BATCHED)
        x_row = _row_offsets(row, batch, x_t, x_b, BATCHED)
        dh = tl.load(dy + dy_row[:, None, None] + dy_channel[None, :, :], mask=here, other=0.0).to(WIDE)
        h = tl.load(x + x_row[:, None, None] + x_channel[None, :, :], mask=here, other=0.0).to(WIDE)
        if SCALED:
            rms = _scales(h, row, valid, group, inv_rms, GROUPS, SIZE, EPS, True)
            h = h * rms
        if partials is not None:
            along = dh * (h - centre[None, :, :])
            if mask is None:
                product += tl.sum(along, 0)
                plain += tl.sum(dh, 0)
            else:
                product += tl.sum(tl.where(real, along, 0.0), 0)
                rest_product += tl.sum(tl.where(real, 0.0, along), 0)
                if vectors is None:
                    plain += tl.sum(tl.where(real, dh, 0.0), 0)
                    rest_plain += tl.sum(tl.where(real, 0.0, dh), 0)
                else:
                    plain += tl.sum(dh, 0)
        if dx is not None:
            dh = dh * scales[None, :, :]
            if (slope is not None) or (vectors is not None):
                correction = slopes[None, :, :] * (h - centre[None, :, :]) + offsets[None, :, :]
                dh = dh - tl.where(real, correction, 0.0)
            if SCALED:
                if projection is None:
                    projected = (tl.sum(dh * h, 2) / SIZE)[:, :, None]
                else:
                    projected = _scales(h, row, valid, group, projection, GROUPS, SIZE, EPS, True)
                dh = (dh - h * projected) * rms
            dx_row = _row_offsets(row, batch, dx_t, dx_b, BATCHED)
            tl.store(dx + dx_row[:, None, None] + dx_channel[None, :, :], dh.to(dx.dtype.element_ty), mask=here)
    if partials is not None:
        _write_sum(partials, 0, channel, inside, product, C)
        _write_sum(partials, 1, channel, inside, plain, C)
        count = tl.zeros([], tl.int32)
        if mask is None:
            _write_count(partials, count, 2, C)
        else:
            _write_sum(partials, 2, channel, inside, rest_product, C)
            if vectors is None:
                _write_sum(partials, 3, channel, inside, rest_plain, C)
                _write_count(partials, count, 4, C)
            else:
                _write_count(partials, count, 3, C)


@triton.jit(do_not_specialize=["rows", "batch", "mask_t", "mask_b"])
def sum_over_groups(
    dy,
    x,
    mask,
    inv_rms,
    projection,
    weight,
    vectors,
    scale,
    slope,
    offset,
    mean,
    rows,
    batch,
    mask_t,
    mask_b,
    dy_t,
    dy_b,
    dy_c,
    x_t,
    x_b,
    x_c,
    GROUPS: tl.constexpr,
    SIZE: tl.constexpr,
    BS: tl.constexpr,
    CHUNKS: tl.constexpr,
    BATCHED: tl.constexpr,
    WIDE: tl.constexpr,
    EPS: tl.constexpr,
):
    """What groups that are larger than a tile need first: ``inv_rms``, or with ``dy`` mean_k(dh_k h_k) of each."""
    C: tl.constexpr = GROUPS * SIZE
    for item in range(tl.program_id(0).to(tl.int64), rows.to(tl.int64) * GROUPS, tl.num_programs(0)):
        place = item + tl.arange(0, 1).to(tl.int64)
        row, group = place // GROUPS, (place % GROUPS).to(tl.int32)
        valid = row < rows
        total = tl.zeros([1, BS], WIDE)
        for chunk in range(CHUNKS):
            _, channel, inside = _channels(group * CHUNKS + chunk, GROUPS, SIZE, 1, BS, CHUNKS)
            x_place = _row_offsets(row, batch, x_t, x_b, BATCHED)[:, None] + _channel_offsets(channel, x_c)
            h = tl.load(x + x_place, mask=inside, other=0.0).to(WIDE)
            if dy is None:
                total += h * h
            else:
                h = h * tl.load(inv_rms + item)
                dy_place = _row_offsets(row, batch, dy_t, dy_b, BATCHED)[:, None] + _channel_offsets(channel, dy_c)
                scales, slopes = _gradient_vectors(weight, vectors, scale, slope, channel, inside, C, EPS, WIDE)
                dh = tl.load(dy + dy_place, mask=inside, other=0.0).to(WIDE) * scales
                if (slope is not None) or (vectors is not None):
                    centred = h - _vector(mean, channel, inside, 0.0, WIDE)
                    correction = slopes * centred + _vector(offset, channel, inside, 0.0, WIDE)
                    real = _real(mask, row, valid, batch, mask_t, mask_b, BATCHED)
                    dh = dh - tl.where(real[:, None], correction, 0.0)
                total += dh * h
        mean_of_group = tl.sum(tl.sum(total, 1), 0) / SIZE
        if dy is None:
            tl.store(inv_rms + item, tl.rsqrt(mean_of_group + EPS))
        else:
            tl.store(projection + item, mean_of_group)


# Kernels over what the programs have left.


@triton.jit
def _add_up(partials, slot, channel, inside, programs, end, C: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr):
    """The sum of a slot over the first ``end`` of the programs, (BLOCK,)."""
    total = tl.zeros([PARTS, BLOCK], partials.dtype.element_ty)
    first = partials + slot * programs.to(tl.int64) * C
    for start in range(0, end, PARTS):
        part = start + tl.arange(0, PARTS)
        here = (part < end)[:, None] & inside[None, :]
        total += tl.load(first + part.to(tl.int64)[:, None] * C + channel[None, :], mask=here, other=0.0)
    return tl.sum(total, 0)


@triton.jit
def _add_up_deviations(
    partials, counts, slot, centre, channel, inside, programs, C: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr
):
    """Squared deviations from ``centre`` (BLOCK,), where ``slot`` has means, the next one the deviations from them."""
    total = tl.zeros([PARTS, BLOCK], partials.dtype.element_ty)
    length = programs.to(tl.int64) * C
    for start in range(0, programs, PARTS):
        part = start + tl.arange(0, PARTS)
        here = (part < programs)[:, None] & inside[None, :]
        place = partials + slot * length + part.to(tl.int64)[:, None] * C + channel[None, :]
        tokens = tl.load(counts + part, mask=part < programs, other=0.0)[:, None]
        distance = tl.load(place, mask=here, other=0.0) - centre[None, :]
        around = tl.load(place + length, mask=here, other=0.0) + tokens * distance * distance
        total += tl.where(tokens > 0, around, 0.0)
    return tl.sum(total, 0)


@triton.jit
def _mean_of_all(
    partials, counts, tokens, channel, inside, programs, C: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr
):
    """The mean over ``tokens`` real tokens, (BLOCK,), where slot 0 has the means of the programs."""
    total = tl.zeros([PARTS, BLOCK], partials.dtype.element_ty)
    for start in range(0, programs, PARTS):
        part = start + tl.arange(0, PARTS)
        here = (part < programs)[:, None] & inside[None, :]
        held = tl.load(counts + part, mask=part < programs, other=0.0)[:, None]
        total += held * tl.load(partials + part.to(tl.int64)[:, None] * C + channel[None, :], mask=here, other=0.0)
    return tl.sum(total, 0) / tl.maximum(tokens, 1.0)


@triton.jit
def _count(partials, programs, rows, MASKED: tl.constexpr, SLOTS: tl.constexpr, C: tl.constexpr, PARTS: tl.constexpr):
    """The number of real tokens, 64 bit."""
    if MASKED:
        total = tl.zeros([PARTS], tl.int64)
        counts = partials + programs.to(tl.int64) * SLOTS * C
        for start in range(0, programs, PARTS):
            part = start + tl.arange(0, PARTS)
            total += tl.load(counts + part, mask=part < programs, other=0.0).to(tl.int64)
        return tl.sum(total, 0)
    else:
        return rows.to(tl.int64)


@triton.jit
def _is_last(partials, programs, SLOTS: tl.constexpr, C: tl.constexpr):
    """Whether all other programs have come here before this one, so that it sees whatever they have written."""
    ticket = partials + programs.to(tl.int64) * SLOTS * C + programs
    tl.debug_barrier()  # the ticket that one thread draws stands for what all of them have written
    drawn = tl.atomic_add(ticket, tl.full([], 1.0, partials.dtype.element_ty), sem="acq_rel")
    return drawn.to(tl.int32) == tl.num_programs(0) - 1


@triton.jit
def _written(row, channel, C: tl.constexpr):
    """Values of channels that another program may have written in this launch, read after its ticket was drawn."""
    return tl.load(row + channel, mask=channel < C, other=0.0, cache_modifier=".cg")


@triton.jit
def _move(running, batch, share, channel, C: tl.constexpr):
    """Take statistics of the batch into the running ones with weight ``share``."""
    old = tl.load(running + channel, mask=channel < C, other=0.0)
    tl.store(running + channel, old + share * (batch.to(old.dtype) - old), mask=channel < C)


@triton.jit
def _write_tally(tally, tokens, counted, cumulative, done):
    tl.store(tally + TOKENS, tokens)
    tl.store(tally + COUNTED, counted.to(tl.int64))
    tl.store(tally + CUMULATIVE, cumulative.to(tl.int64))
    tl.store(tally + STEPS_BEFORE, done)


@triton.jit
def _restore(running, before, C: tl.constexpr, TAIL: tl.constexpr):
    for start in range(0, C, TAIL):
        each = start + tl.arange(0, TAIL)
        value = tl.load(before + each, mask=each < C, other=0.0)
        tl.store(running + each, value.to(running.dtype.element_ty), mask=each < C)


@triton.jit
def _take_back(steps, tally):
    tl.store(steps, tl.load(tally + STEPS_BEFORE))
    tl.store(tally + COUNTED, tl.zeros([], tl.int64))


@triton.jit(do_not_specialize=["programs", "rows"])
def finish_sums(
    partials,
    sums,
    count,
    programs,
    rows,
    C: tl.constexpr,
    SLOTS: tl.constexpr,
    MASKED: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """``sums`` (any number of slots, C): zeros where there are no partial sums. ``count`` of tokens, if given."""
    slot = tl.program_id(1)
    channel = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = channel < C
    end = tl.where(slot < SLOTS, programs, 0)
    total = _add_up(partials, slot, channel, inside, programs, end, C, PARTS, BLOCK)
    tl.store(sums + slot * C + channel, total, mask=inside)
    if count is not None:
        if (tl.program_id(0) == 0) & (slot == 0):
            tokens = _count(partials, programs, rows, MASKED, SLOTS, C, PARTS)
            tl.store(count, tokens.to(count.dtype.element_ty))


@triton.jit(do_not_specialize=["programs", "rows"])
def finish_centered(
    partials,
    mean,
    squares,
    count,
    programs,
    rows,
    C: tl.constexpr,
    SLOTS: tl.constexpr,
    MASKED: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The mean over the real tokens, and the squared deviations of real tokens and of padding from it, (2, C)."""
    WIDE: tl.constexpr = partials.dtype.element_ty
    channel = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = channel < C
    counts = partials + programs.to(tl.int64) * SLOTS * C
    tokens = _count(partials, programs, rows, MASKED, SLOTS, C, PARTS).to(WIDE)
    centre = _mean_of_all(partials, counts, tokens, channel, inside, programs, C, PARTS, BLOCK)
    around = _add_up_deviations(partials, counts, 0, centre, channel, inside, programs, C, PARTS, BLOCK)
    rest = tl.zeros([BLOCK], WIDE)
    if MASKED:
        padding = counts + programs + 1
        rest = _add_up_deviations(partials, padding, 2, centre, channel, inside, programs, C, PARTS, BLOCK)
    tl.store(mean + channel, centre, mask=inside)
    tl.store(squares + channel, around, mask=inside)
    tl.store(squares + C + channel, rest, mask=inside)
    if tl.program_id(0) == 0:
        tl.store(count, tokens)


@triton.jit(do_not_specialize=["programs", "rows", "warmup"])
def finish_power_forward(
    partials,
    running_psi2,
    nu,
    steps,
    vectors,
    tally,
    programs,
    rows,
    warmup,
    C: tl.constexpr,
    SHARE: tl.constexpr,
    UPDATE: tl.constexpr,
    WARMUP: tl.constexpr,
    MASKED: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
    TAIL: tl.constexpr,
):
    """``vectors`` and ``tally`` of PN's forward, and with ``UPDATE`` the running psi^2; ``SHARE`` is 1 - alpha."""
    WIDE: tl.constexpr = partials.dtype.element_ty
    channel = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = channel < C
    tokens = _count(partials, programs, rows, MASKED, 1, C, PARTS)
    squares = _add_up(partials, 0, channel, inside, programs, programs, C, PARTS, BLOCK)
    batch = _quotient(squares, tl.maximum(tokens, 1).to(WIDE))
    before = _vector(running_psi2, channel, inside, 1.0, WIDE)
    used = before
    done = tl.load(steps)
    warming_up = done < done  # no
    if WARMUP:
        warming_up = done < warmup
        if warming_up & (tokens > 0):
            used = batch
    tl.store(vectors + SQUARES * C + channel, squares, mask=inside)
    tl.store(vectors + PSI2_USED * C + channel, used, mask=inside)
    tl.store(vectors + NU * C + channel, _vector(nu, channel, inside, 0.0, WIDE), mask=inside)
    tl.store(vectors + PSI2_BEFORE * C + channel, before, mask=inside)
    tl.store(vectors + PSI2_BATCH * C + channel, batch, mask=inside)
    if _is_last(partials, programs, 1, C):
        TYPE: tl.constexpr = running_psi2.dtype.element_ty
        batch_row = vectors + PSI2_BATCH * C
        counted = tl.where(tokens > 0, 1, 0)
        for start in range(0, C, TAIL):
            each = start + tl.arange(0, TAIL)
            counted *= _all_finite(_written(batch_row, each, C).to(TYPE), each < C)
        if UPDATE:
            if counted > 0:
                share = tl.full([], SHARE, TYPE)
                if WARMUP:
                    if warming_up:
                        share = _quotient(tl.full([], 1.0, TYPE), (done + 1).to(TYPE))
                for start in range(0, C, TAIL):
                    each = start + tl.arange(0, TAIL)
                    _move(running_psi2, _written(batch_row, each, C), share, each, C)
                tl.store(steps, done + 1)
        _write_tally(tally, tokens, counted, warming_up, done)


@triton.jit(do_not_specialize=["programs"])
def finish_power_backward(
    partials,
    weight,
    dweight,
    dbias,
    lambda_total,
    vectors,
    running_psi2,
    nu,
    steps,
    tally,
    programs,
    C: tl.constexpr,
    SLOTS: tl.constexpr,
    SHARE: tl.constexpr,
    EPS: tl.constexpr,
    UPDATE: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
    TAIL: tl.constexpr,
):
    """The gradients of the parameters, Lambda's sum, and with ``UPDATE`` nu; ``SHARE`` is 1 - alpha."""
    WIDE: tl.constexpr = partials.dtype.element_ty
    channel = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = channel < C
    product = _add_up(partials, 0, channel, inside, programs, programs, C, PARTS, BLOCK)
    root = _root(_vector(vectors + PSI2_USED * C, channel, inside, 1.0, WIDE) + EPS)
    scale = _quotient(_vector(weight, channel, inside, 1.0, WIDE), root)
    tl.store(lambda_total + channel, scale * product, mask=inside)
    if dweight is not None:
        plain = _add_up(partials, 1, channel, inside, programs, programs, C, PARTS, BLOCK)
        if SLOTS == 3:
            product += _add_up(partials, 2, channel, inside, programs, programs, C, PARTS, BLOCK)
        tl.store(dweight + channel, _quotient(product, root).to(dweight.dtype.element_ty), mask=inside)
        tl.store(dbias + channel, plain.to(dbias.dtype.element_ty), mask=inside)
    if UPDATE:
        if _is_last(partials, programs, SLOTS, C):
            tokens = tl.load(tally + TOKENS)
            number = tl.maximum(tokens, 1).to(WIDE)
            finite = tl.full([], 1, tl.int32)
            for start in range(0, C, TAIL):
                each = start + tl.arange(0, TAIL)
                exists = each < C
                total = tl.load(lambda_total + each, mask=exists, other=0.0, cache_modifier=".cg")
                divisor2 = tl.load(vectors + PSI2_USED * C + each, mask=exists, other=1.0) + EPS
                gamma = _quotient(tl.load(vectors + PSI2_BATCH * C + each, mask=exists, other=0.0), divisor2)
                finite *= _all_finite(total / number, exists) * _all_finite(gamma, exists)
            if finite > 0:
                # Without a real token there is nothing to learn from.
                for start in range(0, tl.where(tokens > 0, C, 0), TAIL):
                    each = start + tl.arange(0, TAIL)
                    exists = each < C
                    total = tl.load(lambda_total + each, mask=exists, other=0.0, cache_modifier=".cg")
                    divisor2 = tl.load(vectors + PSI2_USED * C + each, mask=exists, other=1.0) + EPS
                    gamma = _quotient(tl.load(vectors + PSI2_BATCH * C + each, mask=exists, other=0.0), divisor2)
                    decay = tl.maximum(1.0 - SHARE * gamma, 0.0)
                    moved = tl.load(nu + each, mask=exists, other=0.0) * decay + SHARE * _quotient(total, number)
                    tl.store(nu + each, moved.to(nu.dtype.element_ty), mask=exists)
            else:
                _restore(running_psi2, vectors + PSI2_BEFORE * C, C, TAIL)
                _take_back(steps, tally)


@triton.jit
def _unbiased(variance, tokens):
    """Not finite for one token."""
    number = tokens.to(variance.dtype)
    return variance * _quotient(number, number - 1.0)


@triton.jit(do_not_specialize=["programs", "rows"])
def finish_batch_forward(
    partials,
    running_mean,
    running_moment,
    steps,
    vectors,
    tally,
    programs,
    rows,
    C: tl.constexpr,
    SHARE: tl.constexpr,
    CUMULATIVE_MEAN: tl.constexpr,
    UPDATE: tl.constexpr,
    MASKED: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
    TAIL: tl.constexpr,
):
    """``vectors`` and ``tally`` of the forward of PN-V or, with ``running_mean``, of BN; with ``UPDATE`` the state.

    ``SHARE`` is 1 - alpha. Slots are those of :func:`observe` or :func:`observe_centered`.
    """
    WIDE: tl.constexpr = partials.dtype.element_ty
    SLOTS: tl.constexpr = 1 if running_mean is None else 2
    channel = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = channel < C
    tokens = _count(partials, programs, rows, MASKED, SLOTS, C, PARTS)
    number = tl.maximum(tokens, 1).to(WIDE)
    if running_mean is None:
        squares = _add_up(partials, 0, channel, inside, programs, programs, C, PARTS, BLOCK)
    else:
        counts = partials + programs.to(tl.int64) * SLOTS * C
        centre = _mean_of_all(partials, counts, number, channel, inside, programs, C, PARTS, BLOCK)
        squares = _add_up_deviations(partials, counts, 0, centre, channel, inside, programs, C, PARTS, BLOCK)
        tl.store(vectors + MEAN * C + channel, centre, mask=inside)
        tl.store(vectors + MEAN_BEFORE * C + channel, _vector(running_mean, channel, inside, 0.0, WIDE), mask=inside)
    tl.store(vectors + MOMENT * C + channel, _quotient(squares, number), mask=inside)
    tl.store(vectors + MOMENT_BEFORE * C + channel, _vector(running_moment, channel, inside, 1.0, WIDE), mask=inside)
    if _is_last(partials, programs, SLOTS, C):
        TYPE: tl.constexpr = running_moment.dtype.element_ty
        done = tl.load(steps)
        counted = tl.where(tokens > 0, 1, 0)
        for start in range(0, C, TAIL):
            each = start + tl.arange(0, TAIL)
            value = _written(vectors + MOMENT * C, each, C)
            if running_mean is not None:
                value = _unbiased(value, tokens)
                counted *= _all_finite(_written(vectors + MEAN * C, each, C).to(TYPE), each < C)
            counted *= _all_finite(value.to(TYPE), each < C)
        if UPDATE:
            if counted > 0:
                share = tl.full([], SHARE, TYPE)
                if CUMULATIVE_MEAN:
                    share = _quotient(tl.full([], 1.0, TYPE), (done + 1).to(TYPE))
                for start in range(0, C, TAIL):
                    each = start + tl.arange(0, TAIL)
                    value = _written(vectors + MOMENT * C, each, C)
                    if running_mean is not None:
                        value = _unbiased(value, tokens)
                        _move(running_mean, _written(vectors + MEAN * C, each, C), share, each, C)
                    _move(running_moment, value, share, each, C)
                tl.store(steps, done + 1)
        _write_tally(tally, tokens, counted, tl.full([], CUMULATIVE_MEAN, tl.int64), done)


@triton.jit(do_not_specialize=["programs"])
def finish_batch_backward(
    partials,
    weight,
    dweight,
    dbias,
    sums,
    scale,
    slope,
    offset,
    vectors,
    running_mean,
    running_moment,
    steps,
    tally,
    programs,
    C: tl.constexpr,
    SLOTS: tl.constexpr,
    EPS: tl.constexpr,
    UPDATE: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
    TAIL: tl.constexpr,
):
    """Sums over the real tokens (2, C), the gradients of the parameters, and the vectors that dx is computed with.

    With ``UPDATE`` the step is taken back where the sums are not finite.
    """
    WIDE: tl.constexpr = partials.dtype.element_ty
    channel = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = channel < C
    product = _add_up(partials, 0, channel, inside, programs, programs, C, PARTS, BLOCK)
    plain = _add_up(partials, 1, channel, inside, programs, programs, C, PARTS, BLOCK)
    tl.store(sums + channel, product, mask=inside)
    tl.store(sums + C + channel, plain, mask=inside)
    number = tl.maximum(tl.load(tally + TOKENS), 1).to(WIDE)
    divisor2 = _vector(vectors + MOMENT * C, channel, inside, 1.0, WIDE) + EPS
    gain = _quotient(_vector(weight, channel, inside, 1.0, WIDE), _root(divisor2))
    tl.store(scale + channel, gain, mask=inside)
    tl.store(slope + channel, _quotient(gain * _quotient(product, number), divisor2), mask=inside)
    if offset is not None:
        tl.store(offset + channel, gain * _quotient(plain, number), mask=inside)
    if dweight is not None:
        if SLOTS == 4:
            product += _add_up(partials, 2, channel, inside, programs, programs, C, PARTS, BLOCK)
            plain += _add_up(partials, 3, channel, inside, programs, programs, C, PARTS, BLOCK)
        tl.store(dweight + channel, _quotient(product, _root(divisor2)).to(dweight.dtype.element_ty), mask=inside)
        tl.store(dbias + channel, plain.to(dbias.dtype.element_ty), mask=inside)
    if UPDATE:
        if _is_last(partials, programs, SLOTS, C):
            finite = tl.full([], 1, tl.int32)
            for start in range(0, C, TAIL):
                each = start + tl.arange(0, TAIL)
                finite *= _all_finite(_written(sums, each, C), each < C)
                finite *= _all_finite(_written(sums + C, each, C), each < C)
            if finite == 0:
                _restore(running_moment, vectors + MOMENT_BEFORE * C, C, TAIL)
                if running_mean is not None:
                    _restore(running_mean, vectors + MEAN_BEFORE * C, C, TAIL)
                _take_back(steps, tally)
