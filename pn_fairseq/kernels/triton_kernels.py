"""The Triton kernels that :mod:`.triton_ops` launches. :mod:`.reference` defines what they compute.

:func:`norm_forward` and :func:`norm_backward`, :func:`standardize`, :func:`squash` and their
  gradients are the passes
over the tokens. Each program takes every ``num_programs``-th tile of ``BLOCK_N`` tokens. A tile is
(BLOCK_N, BLOCK_G, BLOCK_K): tokens, all groups, all channels of a group. BLOCK_G and BLOCK_K are
powers of two; masks cut elements past the end. Without groups all channels are one group. Sums over
tokens stay in registers until the program ends and writes them to

    partials: (slots, programs, C), then (programs,) of each sum that is one number, such as that of
        the real tokens

in the accumulation dtype. :func:`finish_moments` and :func:`finish_gradient_sums` add these up in
the order of the programs, so that equal inputs give equal bits. :func:`running_average_` and
:func:`power_update_` are one program each.

``rows`` is the number of tokens, 32 bit; offsets in memory are 64 bit. A kernel is compiled without
the arguments that are None. What is read need not be contiguous: see :func:`_places`. What is
written is.
"""

import triton
import triton.language as tl

INFINITY = tl.constexpr(float("inf"))


@triton.jit
def _sqrt(value):
    """The square root, rounded correctly."""
    if value.dtype == tl.float64:
        return tl.sqrt(value)
    else:
        return tl.sqrt_rn(value)


@triton.jit
def _divide(numerator, denominator):
    """numerator / denominator, rounded correctly."""
    if denominator.dtype == tl.float64:
        return numerator / denominator
    else:
        return tl.div_rn(numerator, denominator)


@triton.jit
def _vector(pointer, channel, inside, default: tl.constexpr, ACC: tl.constexpr):
    """A vector over channels in the accumulation dtype; ``default`` everywhere if there is none."""
    if pointer is None:
        return tl.full(channel.shape, default, ACC)
    else:
        return tl.load(pointer + channel, mask=inside, other=default).to(ACC)


# The passes over the tokens.


@triton.jit
def _channels(
    GROUPS: tl.constexpr, GROUP_SIZE: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_K: tl.constexpr
):
    """The groups (BLOCK_G,) and channels (BLOCK_G, BLOCK_K) of a tile, and which of these
    channels there are.
    """
    group, k = tl.arange(0, BLOCK_G), tl.arange(0, BLOCK_K)
    return (
        group,
        group[:, None] * GROUP_SIZE + k[None, :],
        (group < GROUPS)[:, None] & (k < GROUP_SIZE)[None, :],
    )


@triton.jit
def _offsets(row, channel, C: tl.constexpr):
    return row.to(tl.int64)[:, None, None] * C + channel[None, :, :]


@triton.jit
def _places(row, channel, inner, outer_stride, inner_stride, C: tl.constexpr):
    """Offsets of a tile in a tensor (outer, inner, C) with these strides; without strides it is
    contiguous.
    """
    if outer_stride is None:
        return _offsets(row, channel, C)
    else:
        return _starts(row, inner, outer_stride, inner_stride)[:, None, None] + channel[None, :, :]


@triton.jit
def _read(
    tokens,
    row,
    channel,
    exists,
    inner,
    outer_stride,
    inner_stride,
    C: tl.constexpr,
    ACC: tl.constexpr,
):
    """A tile in the accumulation dtype, 0 where there is nothing."""
    places = _places(row, channel, inner, outer_stride, inner_stride, C)
    return tl.load(tokens + places, mask=exists, other=0.0).to(ACC)


@triton.jit
def _starts(row, inner, outer_stride, inner_stride):
    """Offsets of tokens in a tensor (outer, inner, ...) with these strides."""
    outer = row // inner
    return outer.to(tl.int64) * outer_stride + (row - outer * inner).to(tl.int64) * inner_stride


@triton.jit
def _real(padding, row, valid, inner, outer_stride, inner_stride):
    """Which tokens of a tile are real, (BLOCK_N,)."""
    if padding is None:
        return valid
    else:
        if outer_stride is not None:
            row = _starts(row, inner, outer_stride, inner_stride)
        return valid & (tl.load(padding + row, mask=valid, other=1) == 0)


@triton.jit
def _loaded(pointer, ACC: tl.constexpr):
    """A number, or 1 where there is none."""
    if pointer is None:
        return tl.full([], 1.0, ACC)
    else:
        return tl.load(pointer).to(ACC)


@triton.jit
def _unused(dy):
    """Which tokens of a tile the loss does not depend on, (BLOCK_N, 1, 1)."""
    return (tl.sum(tl.sum((dy != 0).to(tl.int32), 2), 1) == 0)[:, None, None]


@triton.jit
def _inv_rms(
    h, inv_rms, row, valid, group, GROUPS: tl.constexpr, K: tl.constexpr, EPS: tl.constexpr, GIVEN
):
    """1 / rms of each token and group of a tile, (BLOCK_N, BLOCK_G, 1): read if GIVEN, else
    computed and written.
    """
    places = inv_rms + row.to(tl.int64)[:, None] * GROUPS + group[None, :]
    exists = valid[:, None] & (group < GROUPS)[None, :]
    if GIVEN:
        scales = tl.load(places, mask=exists, other=0.0)
    else:
        scales = tl.rsqrt(tl.sum(h * h, 2) / K + EPS)
        tl.store(places, scales, mask=exists)
    return scales[:, :, None]


@triton.jit
def _add_tile(h, real, count, mean, squares):
    """Count, mean and sum of squared deviations of the tokens so far, with the real ones of a tile
    added.

    Chan, Golub & LeVeque 1983, Eq. 2.1. Squares about a fixed point would cancel where that is far
    from the mean.
    """
    added = tl.sum(real.to(h.dtype), 0)
    keep = real[:, None, None]
    tile_mean = tl.sum(tl.where(keep, h, 0.0), 0) / tl.maximum(added, 1.0)
    deviation = tl.where(keep, h - tile_mean[None, :, :], 0.0)
    share = added / tl.maximum(count + added, 1.0)
    difference = tile_mean - mean
    squares += tl.sum(deviation * deviation, 0)
    if added > 0:
        squares += difference * difference * (count * share)
        mean += difference * share
    return count + added, mean, squares


@triton.jit
def _write_partial(partials, slot: tl.constexpr, channel, inside, total, C: tl.constexpr):
    row = slot * tl.num_programs(0).to(tl.int64) + tl.program_id(0)
    tl.store(partials + row * C + channel, total, mask=inside)


@triton.jit(do_not_specialize=["rows", "inner"])
def norm_forward(
    x,  # (rows, C)
    y,  # (rows, C), type of x, written; None: only the sums
    inv_rms,  # (rows, GROUPS) ACC, read if GIVEN and written otherwise; None: no layer-scale
    weight,  # (C,) or None
    bias,  # (C,) or None
    mean,  # (C,) or None
    moment,  # (C,) or None
    padding,  # (rows) bool, or None: all tokens are real
    partials,  # slots 0: squares, 1: sum (if CENTERED); counts; written. None: only y
    rows,
    inner,  # rows that an index of the first axis of x has; None: what is read is contiguous
    x_outer,  # stride of the first axis of x, in elements; None: x is contiguous
    x_inner,  # of the second
    padding_outer,  # as of x
    padding_inner,
    GROUPS: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_K: tl.constexpr,
    ACC: tl.constexpr,
    EPS: tl.constexpr,
    GIVEN: tl.constexpr,
    CENTERED: tl.constexpr,
):
    """y = weight (h - mean) / sqrt(moment + eps) + bias, and each program's sums over its real
    tokens.

    They are the sums of h^2; if CENTERED, of h and of the squared deviations from the program's
    mean.
    """
    C: tl.constexpr = GROUPS * GROUP_SIZE
    group, channel, inside = _channels(GROUPS, GROUP_SIZE, BLOCK_G, BLOCK_K)
    if y is not None:
        center = _vector(mean, channel, inside, 0.0, ACC)
        scale = _vector(weight, channel, inside, 1.0, ACC)
        if moment is not None:
            scale = _divide(scale, _sqrt(_vector(moment, channel, inside, 1.0, ACC) + EPS))
        shift = _vector(bias, channel, inside, 0.0, ACC)
    count = tl.zeros([], ACC)
    batch_mean, squares = tl.zeros([BLOCK_G, BLOCK_K], ACC), tl.zeros([BLOCK_G, BLOCK_K], ACC)
    for start in range(tl.program_id(0) * BLOCK_N, rows, tl.num_programs(0) * BLOCK_N):
        row = start + tl.arange(0, BLOCK_N)
        valid = row < rows
        exists = valid[:, None, None] & inside[None, :, :]
        h = _read(x, row, channel, exists, inner, x_outer, x_inner, C, ACC)
        if inv_rms is not None:
            h = h * _inv_rms(h, inv_rms, row, valid, group, GROUPS, GROUP_SIZE, EPS, GIVEN)
        if partials is not None:
            real = _real(padding, row, valid, inner, padding_outer, padding_inner)
            if CENTERED:
                count, batch_mean, squares = _add_tile(h, real, count, batch_mean, squares)
            else:
                count += tl.sum(real.to(ACC), 0)
                squares += tl.sum(tl.where(real[:, None, None], h * h, 0.0), 0)
        if y is not None:
            if mean is not None:
                h = h - center[None, :, :]
            if (weight is not None) or (moment is not None):
                h = h * scale[None, :, :]
            if bias is not None:
                h = h + shift[None, :, :]
            tl.store(y + _offsets(row, channel, C), h.to(y.dtype.element_ty), mask=exists)
    if partials is not None:
        _write_partial(partials, 0, channel, inside, squares, C)
        if CENTERED:
            _write_partial(partials, 1, channel, inside, batch_mean * count, C)
        SLOTS: tl.constexpr = 2 if CENTERED else 1
        tl.store(partials + tl.num_programs(0).to(tl.int64) * (SLOTS * C) + tl.program_id(0), count)


@triton.jit(do_not_specialize=["rows", "inner"])
def norm_backward(
    dy,  # (rows, C)
    x,  # (rows, C)
    dx,  # (rows, C), type of x, written; None: only the sums
    inv_rms,  # (rows, GROUPS) ACC; None: no layer-scale
    weight,  # (C,) or None
    mean,  # (C,) or None
    moment,  # (C,) or None
    nu,  # (C,) or None
    offset,  # (C,) or None; unused without nu
    count,  # () ACC, or None: what nu and offset are divided by
    loss_scale,  # (1,) or None: what they are multiplied by
    padding,  # (rows) bool, or None: all tokens are real
    # slots 0: dy (h - mean), 1: dy; with padding 2, 3: of real tokens; then a 0; written. None:
    # only dx
    partials,
    rows,
    inner,  # as in norm_forward, and so are the strides
    dy_outer,
    dy_inner,
    x_outer,
    x_inner,
    padding_outer,
    padding_inner,
    GROUPS: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_K: tl.constexpr,
    ACC: tl.constexpr,
    EPS: tl.constexpr,
):
    """dx through normalization and layer-scale, and each program's sums over its tokens."""
    C: tl.constexpr = GROUPS * GROUP_SIZE
    group, channel, inside = _channels(GROUPS, GROUP_SIZE, BLOCK_G, BLOCK_K)
    center = _vector(mean, channel, inside, 0.0, ACC)
    if dx is not None:  # dh = scale dy - 1_M (slope (h - mean) + shift)
        scale = _vector(weight, channel, inside, 1.0, ACC)
        slope = _vector(nu, channel, inside, 0.0, ACC)
        shift = _vector(offset, channel, inside, 0.0, ACC)
        if count is not None:
            tokens = tl.maximum(tl.load(count), 1.0)
            slope, shift = _divide(slope, tokens), _divide(shift, tokens)
        if loss_scale is not None:
            loss = _loaded(loss_scale, ACC)
            slope, shift = slope * loss, shift * loss
        if moment is not None:
            divisor2 = _vector(moment, channel, inside, 1.0, ACC) + EPS
            divisor = _sqrt(divisor2)
            scale, slope, shift = (
                _divide(scale, divisor),
                _divide(slope, divisor2),
                _divide(shift, divisor),
            )
    products, plain = tl.zeros([BLOCK_G, BLOCK_K], ACC), tl.zeros([BLOCK_G, BLOCK_K], ACC)
    real_products, real_plain = tl.zeros([BLOCK_G, BLOCK_K], ACC), tl.zeros([BLOCK_G, BLOCK_K], ACC)
    for start in range(tl.program_id(0) * BLOCK_N, rows, tl.num_programs(0) * BLOCK_N):
        row = start + tl.arange(0, BLOCK_N)
        valid = row < rows
        exists = valid[:, None, None] & inside[None, :, :]
        real = _real(padding, row, valid, inner, padding_outer, padding_inner)[:, None, None]
        dh = _read(dy, row, channel, exists, inner, dy_outer, dy_inner, C, ACC)
        h = _read(x, row, channel, exists, inner, x_outer, x_inner, C, ACC)
        if inv_rms is not None:
            scales = _inv_rms(h, inv_rms, row, valid, group, GROUPS, GROUP_SIZE, EPS, True)
            h = h * scales
        unused = _unused(dh)
        if nu is not None:
            unused = unused & (real == 0)
        if partials is not None:
            product = tl.where(unused, 0.0, dh * (h - center[None, :, :]))
            products += tl.sum(product, 0)
            plain += tl.sum(dh, 0)
            if padding is not None:
                real_products += tl.sum(tl.where(real, product, 0.0), 0)
                real_plain += tl.sum(tl.where(real, dh, 0.0), 0)
        if dx is not None:
            dh = dh * scale[None, :, :]
            if nu is not None:
                correction = slope[None, :, :] * (h - center[None, :, :]) + shift[None, :, :]
                dh = dh - tl.where(real, correction, 0.0)
            if inv_rms is not None:
                projection = tl.sum(dh * h, 2) / GROUP_SIZE
                dh = (dh - h * projection[:, :, None]) * scales
            dh = tl.where(unused, 0.0, dh)
            tl.store(dx + _offsets(row, channel, C), dh.to(dx.dtype.element_ty), mask=exists)
    if partials is not None:
        _write_partial(partials, 0, channel, inside, products, C)
        _write_partial(partials, 1, channel, inside, plain, C)
        if padding is not None:
            _write_partial(partials, 2, channel, inside, real_products, C)
            _write_partial(partials, 3, channel, inside, real_plain, C)
        SLOTS: tl.constexpr = 2 if padding is None else 4
        arrived = partials + tl.num_programs(0).to(tl.int64) * (SLOTS * C)
        tl.store(arrived, 0.0, mask=tl.program_id(0) == 0)


@triton.jit
def _stat(stats, number: tl.constexpr, rows, row, group, GROUPS: tl.constexpr):
    """Where one of the three statistics of each token and group of a tile lies, (BLOCK_N,
    BLOCK_G).
    """
    return stats + (number * rows.to(tl.int64) + row)[:, None] * GROUPS + group[None, :]


@triton.jit(do_not_specialize=["rows", "inner"])
def standardize(
    x,  # (rows, C)
    y,  # (rows, C), type of x, written
    stats,  # (3, rows, GROUPS) ACC, written
    weight,  # (C,) or None
    bias,  # (C,) or None
    rows,
    inner,  # as in norm_forward
    x_outer,
    x_inner,
    GROUPS: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_K: tl.constexpr,
    ACC: tl.constexpr,
    CENTERED: tl.constexpr,
    SQUARE_FACTOR: tl.constexpr,
    EPS_IN_ROOT: tl.constexpr,
    EPS_OUTSIDE: tl.constexpr,
    MIN_DIVISOR: tl.constexpr,
    GAIN: tl.constexpr,
    GAIN_SLOPE: tl.constexpr,
):
    """y by the statistics of each group of a token, and these."""
    C: tl.constexpr = GROUPS * GROUP_SIZE
    TINY: tl.constexpr = 2.2250738585072014e-308 if ACC == tl.float64 else 1.1754943508222875e-38
    group, channel, inside = _channels(GROUPS, GROUP_SIZE, BLOCK_G, BLOCK_K)
    scale = _vector(weight, channel, inside, 1.0, ACC)
    shift = _vector(bias, channel, inside, 0.0, ACC)
    for start in range(tl.program_id(0) * BLOCK_N, rows, tl.num_programs(0) * BLOCK_N):
        row = start + tl.arange(0, BLOCK_N)
        valid = row < rows
        exists = valid[:, None, None] & inside[None, :, :]
        z = _read(x, row, channel, exists, inner, x_outer, x_inner, C, ACC)
        mean = tl.zeros([BLOCK_N, BLOCK_G], ACC)
        if CENTERED:
            mean = tl.sum(z, 2) / GROUP_SIZE
            z = tl.where(inside[None, :, :], z - mean[:, :, None], 0.0)
        second = tl.sum(z * z, 2) / GROUP_SIZE * SQUARE_FACTOR + EPS_IN_ROOT
        root = _sqrt(tl.where(second < TINY, TINY, second))  # unlike tl.maximum, this keeps NaN
        divisor = root + EPS_OUTSIDE
        share = tl.where(
            (second > TINY) & (divisor >= MIN_DIVISOR), SQUARE_FACTOR * divisor / root, 0.0
        )
        inverse = 1.0 / tl.where(divisor < MIN_DIVISOR, MIN_DIVISOR, divisor)
        group_exists = valid[:, None] & (group < GROUPS)[None, :]
        tl.store(_stat(stats, 0, rows, row, group, GROUPS), mean, mask=group_exists)
        tl.store(_stat(stats, 1, rows, row, group, GROUPS), inverse, mask=group_exists)
        tl.store(_stat(stats, 2, rows, row, group, GROUPS), share, mask=group_exists)
        z = z * inverse[:, :, None]
        z = z * (GAIN + GAIN_SLOPE * z)
        if weight is not None:
            z = z * scale[None, :, :]
        if bias is not None:
            z = z + shift[None, :, :]
        tl.store(y + _offsets(row, channel, C), z.to(y.dtype.element_ty), mask=exists)


@triton.jit(do_not_specialize=["rows", "inner"])
def standardize_gradient(
    dy,  # (rows, C)
    x,  # (rows, C)
    dx,  # (rows, C), type of x, written; None: only the sums
    weight,  # (C,) or None
    stats,  # (3, rows, GROUPS) ACC
    partials,  # slots 0: dy z (gain + gain_slope z), 1: dy; written. None: only dx
    rows,
    inner,  # as in norm_backward
    dy_outer,
    dy_inner,
    x_outer,
    x_inner,
    GROUPS: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_K: tl.constexpr,
    ACC: tl.constexpr,
    GAIN: tl.constexpr,
    GAIN_SLOPE: tl.constexpr,
    THROUGH_MEAN: tl.constexpr,
    THROUGH_DIVISOR: tl.constexpr,
):
    """dx through the statistics of each group of a token,

    and each program's sums over its tokens.
    """
    C: tl.constexpr = GROUPS * GROUP_SIZE
    group, channel, inside = _channels(GROUPS, GROUP_SIZE, BLOCK_G, BLOCK_K)
    scale = _vector(weight, channel, inside, 1.0, ACC)
    products, plain = tl.zeros([BLOCK_G, BLOCK_K], ACC), tl.zeros([BLOCK_G, BLOCK_K], ACC)
    for start in range(tl.program_id(0) * BLOCK_N, rows, tl.num_programs(0) * BLOCK_N):
        row = start + tl.arange(0, BLOCK_N)
        valid = row < rows
        exists = valid[:, None, None] & inside[None, :, :]
        group_exists = valid[:, None] & (group < GROUPS)[None, :]
        grad = _read(dy, row, channel, exists, inner, dy_outer, dy_inner, C, ACC)
        h = _read(x, row, channel, exists, inner, x_outer, x_inner, C, ACC)
        mean = tl.load(_stat(stats, 0, rows, row, group, GROUPS), mask=group_exists, other=0.0)
        inverse = tl.load(_stat(stats, 1, rows, row, group, GROUPS), mask=group_exists, other=0.0)[
            :, :, None
        ]
        z = tl.where(_unused(grad), 0.0, (h - mean[:, :, None]) * inverse)
        curve = GAIN + GAIN_SLOPE * z
        if partials is not None:
            products += tl.sum(grad * (z * curve), 0)
            plain += tl.sum(grad, 0)
        if dx is not None:
            dz = grad * scale[None, :, :] * curve  # 0 beyond the channels
            through = dz
            if THROUGH_MEAN:
                through = through - (tl.sum(dz, 2) / GROUP_SIZE)[:, :, None]
            if THROUGH_DIVISOR:
                share = tl.load(
                    _stat(stats, 2, rows, row, group, GROUPS), mask=group_exists, other=0.0
                )
                through = through - z * (share * (tl.sum(dz * z, 2) / GROUP_SIZE))[:, :, None]
            through = tl.where(_unused(grad), 0.0, through * inverse)
            tl.store(dx + _offsets(row, channel, C), through.to(dx.dtype.element_ty), mask=exists)
    if partials is not None:
        _write_partial(partials, 0, channel, inside, products, C)
        _write_partial(partials, 1, channel, inside, plain, C)


@triton.jit
def _tanh(value):
    """tanh. Near 0, where the formula by exp cancels, it is Lambert's x / (1 + x^2 / (3 + x^2 / (5
    + ...))) up to 13, which is 2e-16 off there at most.
    """
    size = tl.abs(value)
    near = size < 0.5
    square = tl.where(near, value * value, 0.0)
    numerator = ((square + 378.0) * square + 17325.0) * square + 135135.0
    denominator = ((28.0 * square + 3150.0) * square + 62370.0) * square + 135135.0
    far = 1.0 - 2.0 / (tl.exp(2.0 * size) + 1.0)
    return tl.where(near, value * (numerator / denominator), tl.where(value < 0, -far, far))


@triton.jit
def _squashed(h, alpha, shift, ERF: tl.constexpr):
    """f(alpha h + shift), and the argument of f."""
    argument = h * tl.load(alpha).to(h.dtype)
    if shift is not None:
        argument = argument + tl.load(shift).to(h.dtype)
    value = tl.erf(argument) if ERF else _tanh(argument)
    return value, argument


@triton.jit(do_not_specialize=["rows", "inner"])
def squash(
    x,  # (rows, C)
    y,  # (rows, C), type of x, written
    weight,  # (C,) or None
    bias,  # (C,) or None
    alpha,  # (1,)
    shift,  # (1,) or None
    rows,
    inner,  # as in norm_forward
    x_outer,
    x_inner,
    GROUPS: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_K: tl.constexpr,
    ACC: tl.constexpr,
    ERF: tl.constexpr,
):
    """y = weight f(alpha x + shift) + bias with f = tanh, or erf."""
    C: tl.constexpr = GROUPS * GROUP_SIZE
    group, channel, inside = _channels(GROUPS, GROUP_SIZE, BLOCK_G, BLOCK_K)
    scale = _vector(weight, channel, inside, 1.0, ACC)
    offset = _vector(bias, channel, inside, 0.0, ACC)
    for start in range(tl.program_id(0) * BLOCK_N, rows, tl.num_programs(0) * BLOCK_N):
        row = start + tl.arange(0, BLOCK_N)
        exists = (row < rows)[:, None, None] & inside[None, :, :]
        h = _read(x, row, channel, exists, inner, x_outer, x_inner, C, ACC)
        value, argument = _squashed(h, alpha, shift, ERF)
        if weight is not None:
            value = value * scale[None, :, :]
        if bias is not None:
            value = value + offset[None, :, :]
        tl.store(y + _offsets(row, channel, C), value.to(y.dtype.element_ty), mask=exists)


@triton.jit(do_not_specialize=["rows", "inner"])
def squash_gradient(
    dy,  # (rows, C)
    x,  # (rows, C)
    dx,  # (rows, C), type of x, written; None: only the sums
    weight,  # (C,) or None
    alpha,  # (1,)
    shift,  # (1,) or None
    # slots 0: dy f, 1: dy; numbers: weight dy f' x, and weight dy f'; written. None: only dx
    partials,
    rows,
    inner,  # as in norm_backward
    dy_outer,
    dy_inner,
    x_outer,
    x_inner,
    GROUPS: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_K: tl.constexpr,
    ACC: tl.constexpr,
    ERF: tl.constexpr,
):
    """dx, and each program's sums over its tokens."""
    C: tl.constexpr = GROUPS * GROUP_SIZE
    group, channel, inside = _channels(GROUPS, GROUP_SIZE, BLOCK_G, BLOCK_K)
    if dx is not None:
        scale = _vector(weight, channel, inside, 1.0, ACC) * tl.load(alpha).to(ACC)
    products, plain = tl.zeros([BLOCK_G, BLOCK_K], ACC), tl.zeros([BLOCK_G, BLOCK_K], ACC)
    stretched, shifted = tl.zeros([BLOCK_G, BLOCK_K], ACC), tl.zeros([BLOCK_G, BLOCK_K], ACC)
    for start in range(tl.program_id(0) * BLOCK_N, rows, tl.num_programs(0) * BLOCK_N):
        row = start + tl.arange(0, BLOCK_N)
        exists = (row < rows)[:, None, None] & inside[None, :, :]
        dh = _read(dy, row, channel, exists, inner, dy_outer, dy_inner, C, ACC)
        h = _read(x, row, channel, exists, inner, x_outer, x_inner, C, ACC)
        h = tl.where(_unused(dh), 0.0, h)
        value, argument = _squashed(h, alpha, shift, ERF)
        if partials is not None:
            products += tl.sum(dh * value, 0)
            plain += tl.sum(dh, 0)
        slope = 1.1283791670955126 * tl.exp(-argument * argument) if ERF else 1.0 - value * value
        dh = dh * slope
        if partials is not None:
            stretched += tl.sum(dh * h, 0)
            shifted += tl.sum(dh, 0)
        if dx is not None:
            tl.store(
                dx + _offsets(row, channel, C),
                (dh * scale[None, :, :]).to(dx.dtype.element_ty),
                mask=exists,
            )
    if partials is not None:
        _write_partial(partials, 0, channel, inside, products, C)
        _write_partial(partials, 1, channel, inside, plain, C)
        gain = _vector(weight, channel, inside, 1.0, ACC)  # only here, for its registers
        stretched, shifted = stretched * gain, shifted * gain
        numbers = partials + tl.num_programs(0).to(tl.int64) * (2 * C) + tl.program_id(0)
        tl.store(numbers, tl.sum(tl.sum(stretched, 1), 0))
        tl.store(numbers + tl.num_programs(0), tl.sum(tl.sum(shifted, 1), 0))


# The sums that the programs of a pass have left, added up for BLOCK_C channels, BLOCK_P programs at
# a time.


@triton.jit
def _total(
    partials,
    slot,
    channel,
    inside,
    programs,
    C: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """The sum of a slot over all programs, (BLOCK_C,)."""
    total = tl.zeros([BLOCK_P, BLOCK_C], partials.dtype.element_ty)
    for start in range(0, programs, BLOCK_P):
        program = start + tl.arange(0, BLOCK_P)
        places = partials + (slot * programs.to(tl.int64) + program)[:, None] * C + channel[None, :]
        total += tl.load(places, mask=(program < programs)[:, None] & inside[None, :], other=0.0)
    return tl.sum(total, 0)


@triton.jit
def _total_number(numbers, programs, BLOCK_P: tl.constexpr):
    """The sum of one number of every program."""
    total = tl.zeros([BLOCK_P], numbers.dtype.element_ty)
    for start in range(0, programs, BLOCK_P):
        program = start + tl.arange(0, BLOCK_P)
        total += tl.load(numbers + program, mask=program < programs, other=0.0)
    return tl.sum(total, 0)


@triton.jit(do_not_specialize=["programs"])
def finish_moments(
    partials,  # of norm_forward
    mean,  # (C,) ACC, written; None: the moment is about 0
    moment,  # (C,) ACC, written
    count,  # () ACC, written
    programs,
    C: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """Mean, second moment about it, and number of the real tokens. Both are 0 if there is none."""
    ACC: tl.constexpr = partials.dtype.element_ty
    SLOTS: tl.constexpr = 1 if mean is None else 2
    channel = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    inside = channel < C
    counts = partials + SLOTS * C * programs.to(tl.int64)
    number = _total_number(counts, programs, BLOCK_P)
    divisor = tl.maximum(number, 1.0)
    squares = _total(partials, 0, channel, inside, programs, C, BLOCK_P, BLOCK_C)
    if mean is not None:
        center = _total(partials, 1, channel, inside, programs, C, BLOCK_P, BLOCK_C) / divisor
        # n_p (mean_p - mean)^2: Chan's formula for all programs at once
        between = tl.zeros([BLOCK_P, BLOCK_C], ACC)
        for start in range(0, programs, BLOCK_P):
            program = start + tl.arange(0, BLOCK_P)
            added = tl.load(counts + program, mask=program < programs, other=0.0)[:, None]
            sums = partials + (programs.to(tl.int64) + program)[:, None] * C + channel[None, :]
            total = tl.load(sums, mask=(program < programs)[:, None] & inside[None, :], other=0.0)
            difference = tl.where(added > 0, total / tl.maximum(added, 1.0) - center[None, :], 0.0)
            between += added * difference * difference
        squares += tl.sum(between, 0)
        tl.store(mean + channel, center, mask=inside)
    tl.store(moment + channel, squares / divisor, mask=inside)
    tl.store(count, number, mask=tl.program_id(0) == 0)


@triton.jit
def _divisor(moment, channel, inside, EPS: tl.constexpr, ACC: tl.constexpr):
    """D, or 1 without a moment."""
    if moment is None:
        return tl.full(channel.shape, 1.0, ACC)
    else:
        return _sqrt(_vector(moment, channel, inside, 1.0, ACC) + EPS)


@triton.jit
def _finished(
    partials,
    slot,
    weight,
    divisor,
    loss_scale,
    parameters,
    channel,
    inside,
    programs,
    C: tl.constexpr,
    MASKED: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """Write the sums of a slot over all tokens, ``parameters`` (2, C) of any type; returns
    ``products``, over the real ones and over the loss scale.
    """
    over_all = _total(partials, slot, channel, inside, programs, C, BLOCK_P, BLOCK_C)
    over_real = over_all
    if MASKED:
        over_real = _total(partials, slot + 2, channel, inside, programs, C, BLOCK_P, BLOCK_C)
    parameter = _divide(over_all, divisor)
    if parameters.dtype.element_ty.primitive_bitwidth == 16:
        parameter = parameter.to(tl.float32)  # not every triton rounds float64 to these
    tl.store(
        parameters + slot * C + channel, parameter.to(parameters.dtype.element_ty), mask=inside
    )
    over_real = _divide(over_real, divisor) * _vector(weight, channel, inside, 1.0, over_real.dtype)
    return (
        over_real
        if loss_scale is None
        else _divide(over_real, tl.load(loss_scale).to(over_real.dtype))
    )


@triton.jit(do_not_specialize=["programs"])
def finish_gradient_sums(
    partials,  # of norm_backward, or of another gradient: without weight and moment
    weight,  # (C,) or None
    moment,  # (C,) or None
    loss_scale,  # (1,) or None
    parameters,  # (2, C), written
    products,  # (2, C) ACC, written; or None
    scalars,  # (2,) ACC, written: sums of the numbers; or None
    programs,
    EPS: tl.constexpr,
    MASKED: tl.constexpr,
    C: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """The gradients of weight and bias and their parts from the real tokens;

    the second axis of the grid is the row.
    """
    ACC: tl.constexpr = partials.dtype.element_ty
    channel = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    inside = channel < C
    slot = tl.program_id(1)
    divisor = tl.where(slot == 0, _divisor(moment, channel, inside, EPS, ACC), 1.0)
    product = _finished(
        partials,
        slot,
        weight,
        divisor,
        loss_scale,
        parameters,
        channel,
        inside,
        programs,
        C,
        MASKED,
        BLOCK_P,
        BLOCK_C,
    )
    if products is not None:
        tl.store(products + slot * C + channel, product, mask=inside)
    if scalars is not None:
        numbers = partials + (2 * C + slot) * programs.to(tl.int64)
        tl.store(
            scalars + slot, _total_number(numbers, programs, BLOCK_P), mask=tl.program_id(0) == 0
        )


# The state after a batch. One program moves all channels, because one number that is not finite
# keeps the batch out.


@triton.jit
def _all_finite(values):
    """In float32. Values beyond C have to be finite."""
    return tl.min((tl.abs(values.to(tl.float32)) < INFINITY).to(tl.int32), 0) == 1


@triton.jit
def _share_of_batch(num_batches, warmup, SHARE: tl.constexpr, ACC: tl.constexpr):
    """See :func:`.reference.share_of_batch`; SHARE is 1 - alpha."""
    cumulative = _divide(tl.full([], 1.0, ACC), (num_batches + 1).to(ACC))
    return tl.where(num_batches < warmup, cumulative, tl.full([], SHARE, ACC))


@triton.jit
def _log(values):
    """The logarithm of values of a moment, at least float32's smallest normal number. NaN stays."""
    values = values.to(tl.float32)
    return tl.log(tl.where(values < 1.1754943508222875e-38, 1.1754943508222875e-38, values))


@triton.jit
def _distance(running, batch, inside):
    """The sum of |log(batch) - log(running)|: see the entry 2 of the diagnostics."""
    return tl.sum(tl.where(inside, tl.abs(_log(batch) - _log(running)), 0.0), 0)


@triton.jit
def _note(diagnostics, distance, real, counted, C: tl.constexpr):
    """The entries 0 and 2 of the diagnostics: see :func:`.reference.running_average_`."""
    tl.store(diagnostics, tl.load(diagnostics) + (real & (counted == 0)).to(tl.float32))
    tl.store(diagnostics + 2, 0.5 * distance / C)


@triton.jit
def _batch_moment(batch_moment, channel, inside, tokens, UNBIASED: tl.constexpr):
    """The moment of a batch as it enters the running one."""
    batch = tl.load(batch_moment + channel, mask=inside, other=0.0)
    if UNBIASED:
        batch = tl.where(inside, batch * _divide(tokens, tokens - 1.0), 0.0)
    return batch


@triton.jit
def running_average_(
    moment,  # (C,) float32, changed
    mean,  # (C,) float32, changed; or None
    num_batches,  # () int64, changed
    diagnostics,  # (4,) float32, changed; or None
    batch_moment,  # (C,) ACC
    batch_mean,  # (C,), or None
    products,  # (2, C)
    count,  # ()
    SHARE: tl.constexpr,
    UNBIASED: tl.constexpr,
    C: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """The operator of this name; SHARE is 1 - alpha."""
    batches, tokens = tl.load(num_batches), tl.load(count)
    counted, distance = tokens > 0, tl.zeros([], tl.float32)
    for start in range(0, C, BLOCK_C):
        channel = start + tl.arange(0, BLOCK_C)
        inside = channel < C
        for row in tl.static_range(2):
            counted &= _all_finite(tl.load(products + row * C + channel, mask=inside, other=0.0))
        batch = _batch_moment(batch_moment, channel, inside, tokens, UNBIASED)
        counted &= _all_finite(batch)
        if mean is not None:
            counted &= _all_finite(tl.load(batch_mean + channel, mask=inside, other=0.0))
        if diagnostics is not None:
            distance += _distance(tl.load(moment + channel, mask=inside, other=1.0), batch, inside)
    for start in range(0, C, BLOCK_C):
        channel = start + tl.arange(0, BLOCK_C)
        moves = tl.where(counted, channel, C) < C
        old = tl.load(moment + channel, mask=moves, other=0.0)
        batch = _batch_moment(batch_moment, channel, moves, tokens, UNBIASED)
        tl.store(moment + channel, (old + SHARE * (batch - old)).to(tl.float32), mask=moves)
        if mean is not None:
            old = tl.load(mean + channel, mask=moves, other=0.0)
            center = tl.load(batch_mean + channel, mask=moves, other=0.0)
            tl.store(mean + channel, (old + SHARE * (center - old)).to(tl.float32), mask=moves)
    if diagnostics is not None:
        _note(diagnostics, distance, tokens > 0, counted, C)
    tl.store(num_batches, batches + counted.to(tl.int64))


@triton.jit
def _gamma(batch_psi2, used_psi2, channel, inside, EPS: tl.constexpr):
    """psi_B^2 and Gamma."""
    batch = tl.load(batch_psi2 + channel, mask=inside, other=0.0)
    return batch, _divide(
        batch, tl.load(used_psi2 + channel, mask=inside, other=1.0).to(batch.dtype) + EPS
    )


@triton.jit
def _move_power(
    psi2,
    nu,
    num_batches,
    diagnostics,
    batch_psi2,
    used_psi2,
    products,
    tokens,
    share,
    counted,
    distance,
    largest,
    EPS: tl.constexpr,
    SHARE_BWD: tl.constexpr,
    HAS_GRADIENT: tl.constexpr,
    C: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    for start in range(0, C, BLOCK_C):
        channel = start + tl.arange(0, BLOCK_C)
        moves = tl.where(counted, channel, C) < C
        batch, gamma = _gamma(batch_psi2, used_psi2, channel, moves, EPS)
        old = tl.load(psi2 + channel, mask=moves, other=0.0)
        tl.store(psi2 + channel, (old + share * (batch - old)).to(tl.float32), mask=moves)
        if HAS_GRADIENT:
            old = tl.load(nu + channel, mask=moves, other=0.0)
            product = tl.load(products + channel, mask=moves, other=0.0, cache_modifier=".cg").to(
                batch.dtype
            )
            lambda_ = _divide(product, tl.maximum(tokens, 1.0).to(batch.dtype))
            moved = old * tl.maximum(1.0 - SHARE_BWD * gamma, 0.0) + SHARE_BWD * lambda_
            tl.store(nu + channel, moved.to(tl.float32), mask=moves)
    if diagnostics is not None:
        _note(diagnostics, distance, tokens > 0, counted, C)
        guarded = counted & (SHARE_BWD * largest > 1.0)
        tl.store(diagnostics + 1, tl.load(diagnostics + 1) + guarded.to(tl.float32))
        tl.store(diagnostics + 3, largest.to(tl.float32))
    tl.store(num_batches, tl.load(num_batches) + counted.to(tl.int64))


@triton.jit(do_not_specialize=["programs", "warmup"])
def power_update_(
    psi2,  # (C,) float32, changed
    nu,  # (C,) float32, changed if HAS_GRADIENT
    num_batches,  # () int64, changed
    diagnostics,  # (4,) float32, changed; or None
    batch_psi2,  # (C,) ACC
    used_psi2,  # (C,), psi^2 under D
    products,  # (2, C); None with partials
    count,  # ()
    # of norm_backward, and room for 3 numbers of each program of this kernel and one a channel; or
    # None
    partials,
    weight,  # (C,), or None
    loss_scale,  # (1,), or None
    parameters,  # (2, C), written with partials
    programs,  # of norm_backward
    warmup,
    EPS: tl.constexpr,
    SHARE_FWD: tl.constexpr,
    SHARE_BWD: tl.constexpr,
    HAS_GRADIENT: tl.constexpr,
    MASKED: tl.constexpr,
    C: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_Q: tl.constexpr,  # programs of this kernel at least
    BLOCK_S: tl.constexpr,  # channels of the state that are moved at a time
):
    """The operator of this name; the shares are 1 - alpha.

    With ``partials`` each program adds up the sums of BLOCK_C channels, as finish_gradient_sums;
    the one that comes last moves the state. Without there is one program.
    """
    ACC: tl.constexpr = batch_psi2.dtype.element_ty
    tokens = tl.load(count)
    share = _share_of_batch(tl.load(num_batches), warmup, SHARE_FWD, ACC)
    counted, distance, largest = tokens > 0, tl.zeros([], tl.float32), tl.zeros([], ACC)
    if partials is not None:
        arrived = partials + programs.to(tl.int64) * ((4 if MASKED else 2) * C)
        notes = arrived + 1
        products = notes + 3 * tl.num_programs(0)
    for start in range(tl.program_id(0) * BLOCK_C, C, tl.num_programs(0) * BLOCK_C):
        channel = start + tl.arange(0, BLOCK_C)
        inside = channel < C
        batch, gamma = _gamma(batch_psi2, used_psi2, channel, inside, EPS)
        counted &= _all_finite(batch) & _all_finite(gamma)
        for row in tl.static_range(2):
            if partials is None:
                product = tl.load(products + row * C + channel, mask=inside, other=0.0)
            else:
                divisor = _divisor(used_psi2 if row == 0 else None, channel, inside, EPS, ACC)
                product = _finished(
                    partials,
                    row,
                    weight,
                    divisor,
                    loss_scale,
                    parameters,
                    channel,
                    inside,
                    programs,
                    C,
                    MASKED,
                    BLOCK_P,
                    BLOCK_C,
                )
                if row == 0:
                    tl.store(products + channel, product, mask=inside)
            counted &= _all_finite(product)
        if diagnostics is not None:
            distance += _distance(tl.load(psi2 + channel, mask=inside, other=1.0), batch, inside)
            # which the maximum leaves out
            not_numbers = tl.sum(tl.where(gamma == gamma, 0.0, gamma), 0)
            largest = tl.maximum(largest, tl.max(gamma, 0)) + not_numbers
    last = tl.num_programs(0) == 1
    if partials is not None:
        place = tl.program_id(0)
        tl.store(notes + place, counted.to(ACC))
        tl.store(notes + tl.num_programs(0) + place, distance.to(ACC))
        tl.store(notes + 2 * tl.num_programs(0) + place, largest)
        tl.debug_barrier()
        number = tl.atomic_add(
            arrived.to(tl.pointer_type(tl.int32), bitcast=True), 1, sem="acq_rel"
        )
        last = number == tl.num_programs(0) - 1
    if last:
        if partials is not None:
            program = tl.arange(0, BLOCK_Q)
            valid = program < tl.num_programs(0)
            of_all = notes + program
            counted = tl.min(tl.load(of_all, mask=valid, other=1.0, cache_modifier=".cg"), 0) > 0
            of_all += tl.num_programs(0)
            distance = tl.sum(tl.load(of_all, mask=valid, other=0.0, cache_modifier=".cg"), 0).to(
                tl.float32
            )
            of_all += tl.num_programs(0)
            gammas = tl.load(of_all, mask=valid, other=0.0, cache_modifier=".cg")
            largest = tl.max(gammas, 0) + tl.sum(tl.where(gammas == gammas, 0.0, gammas), 0)
        _move_power(
            psi2,
            nu,
            num_batches,
            diagnostics,
            batch_psi2,
            used_psi2,
            products,
            tokens,
            share,
            counted,
            distance,
            largest,
            EPS,
            SHARE_BWD,
            HAS_GRADIENT,
            C,
            BLOCK_S,
        )


@triton.jit
def _window_means(window, own, row, channel, inside, M: tl.constexpr, C: tl.constexpr):
    """Means over the ring buffer ``window`` (M, C) with ``own`` in a row: of the values, and of
    their logarithms.
    """
    plain, logarithms = tl.zeros(own.shape, own.dtype), tl.zeros(own.shape, own.dtype)
    for number in range(M):
        value = tl.load(window + number * C + channel, mask=inside, other=1.0).to(own.dtype)
        value = tl.where(number == row, own, value)
        plain += value
        logarithms += tl.log(value)
    return plain / M, logarithms / M


@triton.jit
def window_statistics(
    psi2_window,  # (M, C) float32
    running_psi2,  # (C,) float32
    num_batches,  # () int64
    completed,  # () int64, or None
    batch_psi2,  # (C,) ACC
    weight,  # (C,), or None
    psi2,  # (C,) ACC, written
    gain,  # (C,) ACC, written
    marks,  # (2,) bool, written
    WARMUP: tl.constexpr,
    RATIO_WARMUP: tl.constexpr,
    EPS: tl.constexpr,
    GEOMETRIC: tl.constexpr,
    FILTRATION: tl.constexpr,
    M: tl.constexpr,
    C: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """The operator of this name."""
    ACC: tl.constexpr = batch_psi2.dtype.element_ty
    batches = tl.load(num_batches)
    updates = batches if completed is None else tl.load(completed)
    row = (batches + 1) % M
    early = (batches + 1 <= M) | (updates + 1 < WARMUP)
    skip = early & (early == 0)
    if GEOMETRIC and M == 1:
        skip = skip == 0
    elif FILTRATION:
        total, squares, excess = tl.zeros([], ACC), tl.zeros([], ACC), tl.zeros([], ACC)
        for start in range(0, M * C, BLOCK_C):
            place = start + tl.arange(0, BLOCK_C)
            total += tl.sum(
                tl.sqrt(tl.load(psi2_window + place, mask=place < M * C, other=0.0).to(ACC)), 0
            )
        for start in range(0, M * C, BLOCK_C):
            place = start + tl.arange(0, BLOCK_C)
            root = tl.sqrt(
                tl.load(psi2_window + place, mask=place < M * C, other=0.0).to(ACC)
            ) - total / (M * C)
            squares += tl.sum(tl.where(place < M * C, root * root, 0.0), 0)
        for start in range(0, C, BLOCK_C):
            channel = start + tl.arange(0, BLOCK_C)
            inside = channel < C
            own = tl.load(batch_psi2 + channel, mask=inside, other=1.0)
            plain, logarithms = _window_means(psi2_window, own, row, channel, inside, M, C)
            excess = tl.maximum(
                excess, tl.max(tl.where(inside, plain - tl.exp(logarithms), 0.0), 0)
            )
        skip = (early == 0) & (excess > squares / (M * C - 1) * M)
    for start in range(0, C, BLOCK_C):
        channel = start + tl.arange(0, BLOCK_C)
        inside = channel < C
        own = tl.load(batch_psi2 + channel, mask=inside, other=1.0)
        plain, logarithms = _window_means(psi2_window, own, row, channel, inside, M, C)
        average = tl.exp(logarithms) if GEOMETRIC else plain
        used = tl.where(early | skip, own, average)
        running = tl.load(running_psi2 + channel, mask=inside, other=1.0).to(ACC)
        ratio = _sqrt(_divide(used + EPS, running + EPS))
        # unlike tl.clamp, this keeps NaN
        ratio = tl.where(ratio < 0.2, 0.2, tl.where(ratio > 5.0, 5.0, ratio))
        ratio = tl.where(skip | (updates + 1 <= RATIO_WARMUP), 1.0, ratio).to(ACC)
        tl.store(psi2 + channel, used, mask=inside)
        tl.store(gain + channel, ratio * _vector(weight, channel, inside, 1.0, ACC), mask=inside)
    tl.store(marks, early)
    tl.store(marks + 1, skip)


@triton.jit
def _window_step(
    products,
    counted_tokens,
    seen_lambda,
    seen_row,
    alone,
    channel,
    inside,
    M: tl.constexpr,
    C: tl.constexpr,
):
    """lambda_B, and the mean of lambda over the window; ``alone``: that of this step."""
    own = tl.load(products + channel, mask=inside, other=0.0)
    own = _divide(own, tl.maximum(tl.load(counted_tokens), 1.0).to(own.dtype))
    average = tl.zeros(own.shape, own.dtype)
    for number in range(M):
        value = tl.load(seen_lambda + number * C + channel, mask=inside, other=0.0).to(own.dtype)
        average += tl.where(number == seen_row, own, value)
    return own, tl.where(alone, own, average / M)


@triton.jit
def window_update_(
    running_psi2,  # (C,) float32, changed
    nu,  # (C,) float32, changed if HAS_GRADIENT; or None
    psi2_window,  # (M, C) float32, changed
    lambda_window,  # (M, C) float32, changed if HAS_GRADIENT
    num_batches,  # () int64, changed
    diagnostics,  # (4,) float32, changed; or None
    seen_nu,  # (C,) or None
    seen_lambda,  # (M, C)
    seen_batches,  # () int64
    psi2,  # (C,) ACC
    batch_psi2,  # (C,) ACC
    marks,  # (2,) bool
    products,  # (2, C) ACC
    count,  # () ACC
    counted_tokens,  # () ACC
    correction,  # (C,) ACC, written
    SHARE_FWD: tl.constexpr,
    SHARE_BWD: tl.constexpr,
    HAS_GRADIENT: tl.constexpr,
    M: tl.constexpr,
    C: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """The operator of this name; the shares are 1 - alpha."""
    batches, tokens = tl.load(num_batches), tl.load(count)
    early, skip = tl.load(marks) != 0, tl.load(marks + 1) != 0
    seen_row = (tl.load(seen_batches) + 1) % M
    counted, distance = tokens > 0, tl.zeros([], tl.float32)
    for start in range(0, C, BLOCK_C):
        channel = start + tl.arange(0, BLOCK_C)
        inside = channel < C
        own, average = _window_step(
            products, counted_tokens, seen_lambda, seen_row, early | skip, channel, inside, M, C
        )
        step = average
        if nu is not None:
            old = tl.load(seen_nu + channel, mask=inside, other=0.0).to(own.dtype)
            step = tl.where(skip, own, (1.0 - SHARE_BWD) * old + SHARE_BWD * average)
        tl.store(correction + channel, step, mask=inside)
        batch = tl.load(batch_psi2 + channel, mask=inside, other=1.0)
        counted &= _all_finite(batch) & _all_finite(average)
        counted &= _all_finite(tl.load(psi2 + channel, mask=inside, other=0.0))
        for row in tl.static_range(2):
            counted &= _all_finite(tl.load(products + row * C + channel, mask=inside, other=0.0))
        if diagnostics is not None:
            distance += _distance(
                tl.load(running_psi2 + channel, mask=inside, other=1.0), batch, inside
            )
    written = (batches + 1) % M * C
    for start in range(0, C, BLOCK_C):
        channel = start + tl.arange(0, BLOCK_C)
        moves = tl.where(counted, channel, C) < C
        old = tl.load(running_psi2 + channel, mask=moves, other=0.0)
        entering = tl.where(skip, old, tl.load(batch_psi2 + channel, mask=moves, other=0.0))
        tl.store(psi2_window + written + channel, entering.to(tl.float32), mask=moves)
        moved = old + SHARE_FWD * (tl.load(psi2 + channel, mask=moves, other=0.0) - old)
        tl.store(running_psi2 + channel, moved.to(tl.float32), mask=moves)
        if HAS_GRADIENT:
            own, average = _window_step(
                products, counted_tokens, seen_lambda, seen_row, early | skip, channel, moves, M, C
            )
            entering = own
            if nu is not None:
                old = tl.load(nu + channel, mask=moves, other=0.0)
                entering = tl.where(skip, old, own)
                tl.store(
                    nu + channel,
                    ((1.0 - SHARE_BWD) * old + SHARE_BWD * average).to(tl.float32),
                    mask=moves,
                )
            tl.store(lambda_window + written + channel, entering.to(tl.float32), mask=moves)
    if diagnostics is not None:
        _note(diagnostics, distance, tokens > 0, counted, C)
    tl.store(num_batches, batches + counted.to(tl.int64))
