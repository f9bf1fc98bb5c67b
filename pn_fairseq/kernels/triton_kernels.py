"""The Triton kernels that :mod:`.triton_ops` launches. :mod:`.reference` defines what they compute.

:func:`norm_forward` and :func:`norm_backward`, :func:`standardize`, :func:`squash` and their
gradients are the passes over the tokens. Each program processes every ``num_programs``-th tile of
``BLOCK_N`` tokens. A tile is (BLOCK_N, BLOCK_G, BLOCK_K): tokens, all groups, all channels of a
group. BLOCK_G and BLOCK_K are powers of two; masks exclude elements past the end. Without groups
all channels are one group. A vector over channels is (1, BLOCK_G, BLOCK_K). Sums over tokens stay
in registers until the program ends and writes them to

    partials: (slots, programs, C), then (programs,) for each sum that is one number, such as the
        count of real tokens

in the accumulation dtype. :func:`finish_moments`, :func:`finish_gradient_sums` and
:func:`finish_power_step` add these up in the order of the programs, so that equal inputs give equal
bits. One program moves the state, all channels at once.

``rows`` is the number of tokens, 32 bit; offsets in memory are 64 bit. A kernel is compiled without
the arguments that are None. Tensors that are read need not be contiguous (see :func:`_starts`);
those that are written must be.

Arguments are named as in the operators; their constants are in capitals. (C,) stands for a vector
over channels of any type; comments say what is written or changed.
"""

import triton
import triton.language as tl
from triton.language import constexpr

INFINITY = constexpr(float("inf"))

#: float32's smallest normal number, and float64's.
TINY_32 = constexpr(1.1754943508222875e-38)
TINY_64 = constexpr(2.2250738585072014e-308)


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
def _vector(pointer, at, default, ACC):
    """A vector over channels in the accumulation dtype; ``default`` everywhere if there is none.

    ``at``: the channels, and which of them exist.
    """
    channel, inside = at
    if pointer is None:
        return tl.full(channel.shape, default, ACC)
    else:
        return tl.load(pointer + channel, mask=inside, other=default).to(ACC)


@triton.jit
def _number(pointer, ACC):
    """A number, or 1 where there is none."""
    if pointer is None:
        return tl.full([], 1.0, ACC)
    else:
        return tl.load(pointer).to(ACC)


@triton.jit
def _divisor(moment, at, EPS, ACC):
    """D, or 1 without a moment."""
    if moment is None:
        return tl.full(at[0].shape, 1.0, ACC)
    else:
        return _sqrt(_vector(moment, at, 1.0, ACC) + EPS)


@triton.jit
def _columns(first, C, BLOCK: constexpr):
    """The channels from the ``first`` one on, and which of them exist."""
    channel = first + tl.arange(0, BLOCK)
    return channel, channel < C


# The passes over the tokens.


@triton.jit
def _channels(GROUPS, GROUP_SIZE, BLOCK_G: constexpr, BLOCK_K: constexpr):
    """The channels of a tile, and which of them exist, both (1, BLOCK_G, BLOCK_K)."""
    group = tl.arange(0, BLOCK_G)[None, :, None]
    k = tl.arange(0, BLOCK_K)[None, None, :]
    return group * GROUP_SIZE + k, (group < GROUPS) & (k < GROUP_SIZE)


@triton.jit
def _tiles(BLOCK_N):
    """The first token of this program, and the distance from tile to tile."""
    return tl.program_id(0) * BLOCK_N, tl.num_programs(0) * BLOCK_N


@triton.jit
def _tile(start, rows, at, BLOCK_N: constexpr):
    """The tokens of a tile, which of them exist, (BLOCK_N,), its channels, and which of its
    elements exist.
    """
    channel, inside = at
    row = start + tl.arange(0, BLOCK_N)
    valid = row < rows
    return row, valid, channel, valid[:, None, None] & inside


@triton.jit
def _starts(row, inner, outer_stride, inner_stride, C):
    """Offsets of tokens in a tensor (outer, inner, C) with these strides; without strides the
    tensor is contiguous.
    """
    if outer_stride is None:
        return row.to(tl.int64) * C
    else:
        outer = row // inner
        within = row - outer * inner
        return outer.to(tl.int64) * outer_stride + within.to(tl.int64) * inner_stride


@triton.jit
def _read(tokens, tile, inner, outer_stride, inner_stride, C, ACC):
    """A tile in the accumulation dtype, 0 where no element exists."""
    row, _, channel, exists = tile
    starts = _starts(row, inner, outer_stride, inner_stride, C)
    places = starts[:, None, None] + channel
    return tl.load(tokens + places, mask=exists, other=0.0).to(ACC)


@triton.jit
def _write(tokens, tile, values, C):
    row, _, channel, exists = tile
    starts = row.to(tl.int64) * C
    tl.store(tokens + (starts[:, None, None] + channel), values, mask=exists)


@triton.jit
def _real(padding, tile, inner, outer_stride, inner_stride):
    """Which tokens of a tile are real, (BLOCK_N,)."""
    row, valid, _, _ = tile
    if padding is None:
        return valid
    else:
        starts = _starts(row, inner, outer_stride, inner_stride, 1)
        return valid & (tl.load(padding + starts, mask=valid, other=1) == 0)


@triton.jit
def _over_tokens(values):
    """The sum over the tokens of a tile, (1, BLOCK_G, BLOCK_K)."""
    return tl.sum(values, 0, keep_dims=True)


@triton.jit
def _sum_of_all(values):
    return tl.sum(tl.ravel(values), 0)


@triton.jit
def _group_mean(values, GROUP_SIZE):
    """The mean over the channels of each group of a tile, (BLOCK_N, BLOCK_G, 1)."""
    return tl.sum(values, 2, keep_dims=True) / GROUP_SIZE


@triton.jit
def _used(dy):
    """Which tokens of a tile the loss depends on, (BLOCK_N, 1, 1)."""
    different = (dy != 0).to(tl.int32)
    number = tl.sum(tl.sum(different, 2), 1)
    return (number != 0)[:, None, None]


@triton.jit
def _of_groups(number, rows, tile, GROUPS, BLOCK_G: constexpr):
    """The places of the groups of a tile in statistic ``number`` of several, (rows, GROUPS) each,
    and which of them exist, (BLOCK_N, BLOCK_G).
    """
    row, valid, _, _ = tile
    group = tl.arange(0, BLOCK_G)[None, :]
    plane_and_row = number * rows.to(tl.int64) + row[:, None]
    return plane_and_row * GROUPS + group, valid[:, None] & (group < GROUPS)


@triton.jit
def _read_statistic(statistics, number, rows, tile, GROUPS, BLOCK_G):
    """Statistic ``number`` of each group of a tile, (BLOCK_N, BLOCK_G, 1)."""
    places, exists = _of_groups(number, rows, tile, GROUPS, BLOCK_G)
    return tl.load(statistics + places, mask=exists, other=0.0)[:, :, None]


@triton.jit
def _write_statistic(statistics, number, rows, tile, values, GROUPS, BLOCK_G):
    """Write statistic ``number`` of each group of a tile, (BLOCK_N, BLOCK_G)."""
    places, exists = _of_groups(number, rows, tile, GROUPS, BLOCK_G)
    tl.store(statistics + places, values, mask=exists)


@triton.jit
def _inv_rms(h, inv_rms, rows, tile, GROUPS, GROUP_SIZE, BLOCK_G, EPS, GIVEN):
    """1 / rms of each token and group of a tile, (BLOCK_N, BLOCK_G, 1): read if GIVEN, else
    computed and written.
    """
    if GIVEN:
        return _read_statistic(inv_rms, 0, rows, tile, GROUPS, BLOCK_G)
    else:
        mean_square = tl.sum(h * h, 2) / GROUP_SIZE
        scales = tl.rsqrt(mean_square + EPS)
        _write_statistic(inv_rms, 0, rows, tile, scales, GROUPS, BLOCK_G)
        return scales[:, :, None]


@triton.jit
def _add_tile(h, real, count, mean, squares):
    """Count, mean and sum of squared deviations of the tokens so far, with the real tokens of a
    tile added.

    Chan, Golub & LeVeque 1983, Eq. 2.1. Squares about a fixed point would cancel if the point is
    far from the mean.
    """
    keep = real[:, None, None]
    added = tl.sum(real.to(h.dtype), 0)
    total = _over_tokens(tl.where(keep, h, 0.0))
    tile_mean = total / tl.maximum(added, 1.0)
    deviation = tl.where(keep, h - tile_mean, 0.0)
    share = added / tl.maximum(count + added, 1.0)
    difference = tile_mean - mean
    squares += _over_tokens(deviation * deviation)
    if added > 0:
        squares += difference * difference * (count * share)
        mean += difference * share
    return count + added, mean, squares


@triton.jit
def _write_partial(partials, slot, at, total, C):
    channel, inside = at
    programs = tl.num_programs(0).to(tl.int64)
    row = slot * programs + tl.program_id(0)
    tl.store(partials + row * C + channel, total, mask=inside)


@triton.jit
def _write_sums(partials, slot, at, products, plain, C):
    """Write the sums from which the gradients of weight and bias are computed."""
    _write_partial(partials, slot, at, products, C)
    _write_partial(partials, slot + 1, at, plain, C)


@triton.jit
def _numbers(partials, SLOTS, C):
    """Where the numbers of the programs begin."""
    return partials + tl.num_programs(0).to(tl.int64) * (SLOTS * C)


@triton.jit(do_not_specialize=["rows", "inner"])
def norm_forward(
    y,  # (rows, C), type of x, written; None: only the sums
    partials,  # slots 0: squares, 1: sum (if CENTERED); counts; written. None: only y
    x,  # (rows, C)
    padding,  # (rows) bool, or None: all tokens are real
    inv_rms,  # (rows, GROUPS) ACC, read if GIVEN and written otherwise; None: no layer-scale
    weight,  # (C,) or None, as the next three
    bias,
    mean,
    moment,
    rows,
    inner,  # rows per index of the first axis of x; None: all tensors that are read are contiguous
    x_outer,  # stride of the first axis of x, in elements; None: x is contiguous
    x_inner,  # of the second
    padding_outer,  # as of x
    padding_inner,
    GROUPS: constexpr,
    GROUP_SIZE: constexpr,
    BLOCK_N: constexpr,
    BLOCK_G: constexpr,
    BLOCK_K: constexpr,
    ACC: constexpr,
    EPS: constexpr,
    GIVEN: constexpr,
    CENTERED: constexpr,
):
    """y = weight (h - mean) / sqrt(moment + eps) + bias, and each program's sums over its real
    tokens.

    The sums are those of h^2; if CENTERED, of h and of the squared deviations from the program's
    mean.
    """
    C: constexpr = GROUPS * GROUP_SIZE
    at = _channels(GROUPS, GROUP_SIZE, BLOCK_G, BLOCK_K)
    first, stride = _tiles(BLOCK_N)
    center = _vector(mean, at, 0.0, ACC)
    shift = _vector(bias, at, 0.0, ACC)
    scale = _vector(weight, at, 1.0, ACC)
    scale = _divide(scale, _divisor(moment, at, EPS, ACC))
    count = tl.zeros([], ACC)
    zeros = tl.zeros(at[0].shape, ACC)
    batch_mean = zeros
    squares = zeros
    for start in range(first, rows, stride):
        tile = _tile(start, rows, at, BLOCK_N)
        h = _read(x, tile, inner, x_outer, x_inner, C, ACC)
        if inv_rms is not None:
            h *= _inv_rms(h, inv_rms, rows, tile, GROUPS, GROUP_SIZE, BLOCK_G, EPS, GIVEN)
        if partials is not None:
            real = _real(padding, tile, inner, padding_outer, padding_inner)
            if CENTERED:
                count, batch_mean, squares = _add_tile(h, real, count, batch_mean, squares)
            else:
                count += tl.sum(real.to(ACC), 0)
                counted = tl.where(real[:, None, None], h * h, 0.0)
                squares += _over_tokens(counted)
        if y is not None:
            _write(y, tile, (h - center) * scale + shift, C)
    if partials is not None:
        _write_partial(partials, 0, at, squares, C)
        if CENTERED:
            _write_partial(partials, 1, at, batch_mean * count, C)
        SLOTS: constexpr = 2 if CENTERED else 1
        tl.store(_numbers(partials, SLOTS, C) + tl.program_id(0), count)


@triton.jit(do_not_specialize=["rows", "inner"])
def norm_backward(
    dx,  # (rows, C), type of x, written; None: only the sums
    # slots 0: dy (h - mean), 1: dy; with padding 2, 3: of real tokens; then a 0; written. None:
    # only dx
    partials,
    dy,  # (rows, C)
    x,  # (rows, C)
    padding,  # (rows) bool, or None: all tokens are real
    inv_rms,  # (rows, GROUPS) ACC; None: no layer-scale
    weight,  # (C,) or None, as the next four; offset is unused without nu
    mean,
    moment,
    nu,
    offset,
    count,  # () ACC, or None: what nu and offset are divided by
    loss_scale,  # (1,) or None: what they are multiplied by
    rows,
    inner,  # as in norm_forward, and so are the strides
    dy_outer,
    dy_inner,
    x_outer,
    x_inner,
    padding_outer,
    padding_inner,
    GROUPS: constexpr,
    GROUP_SIZE: constexpr,
    BLOCK_N: constexpr,
    BLOCK_G: constexpr,
    BLOCK_K: constexpr,
    ACC: constexpr,
    EPS: constexpr,
):
    """dx through normalization and layer-scale, and each program's sums over its tokens.

    dh = scale dy - 1_M (slope (h - mean) + shift).
    """
    C: constexpr = GROUPS * GROUP_SIZE
    at = _channels(GROUPS, GROUP_SIZE, BLOCK_G, BLOCK_K)
    first, stride = _tiles(BLOCK_N)
    center = _vector(mean, at, 0.0, ACC)
    divisor = _divisor(moment, at, EPS, ACC)
    scale = _divide(_vector(weight, at, 1.0, ACC), divisor)
    tokens = tl.maximum(_number(count, ACC), 1.0)
    factor = _divide(_divide(_number(loss_scale, ACC), tokens), divisor)
    slope = _divide(_vector(nu, at, 0.0, ACC) * factor, divisor)
    shift = _vector(offset, at, 0.0, ACC) * factor
    zeros = tl.zeros(at[0].shape, ACC)
    products = zeros
    plain = zeros
    real_products = zeros
    real_plain = zeros
    for start in range(first, rows, stride):
        tile = _tile(start, rows, at, BLOCK_N)
        real = _real(padding, tile, inner, padding_outer, padding_inner)[:, None, None]
        dh = _read(dy, tile, inner, dy_outer, dy_inner, C, ACC)
        h = _read(x, tile, inner, x_outer, x_inner, C, ACC)
        if inv_rms is not None:
            scales = _read_statistic(inv_rms, 0, rows, tile, GROUPS, BLOCK_G)
            h *= scales
        used = _used(dh)
        if nu is not None:
            used = used | real
        if partials is not None:
            product = tl.where(used, dh * (h - center), 0.0)
            products += _over_tokens(product)
            plain += _over_tokens(dh)
            if padding is not None:
                real_products += _over_tokens(tl.where(real, product, 0.0))
                real_plain += _over_tokens(tl.where(real, dh, 0.0))
        if dx is not None:
            dh *= scale
            if nu is not None:
                correction = slope * (h - center) + shift
                dh -= tl.where(real, correction, 0.0)
            if inv_rms is not None:
                projection = _group_mean(dh * h, GROUP_SIZE)
                dh = (dh - h * projection) * scales
            _write(dx, tile, tl.where(used, dh, 0.0), C)
    if partials is not None:
        _write_sums(partials, 0, at, products, plain, C)
        if padding is not None:
            _write_sums(partials, 2, at, real_products, real_plain, C)
        arrived = _numbers(partials, 2 if padding is None else 4, C)
        tl.store(arrived, 0.0, mask=tl.program_id(0) == 0)


@triton.jit(do_not_specialize=["rows", "inner"])
def standardize(
    y,  # (rows, C), type of x, written
    stats,  # (3, rows, GROUPS) ACC, written
    x,  # (rows, C)
    weight,  # (C,) or None, as the next
    bias,
    rows,
    inner,  # as in norm_forward
    x_outer,
    x_inner,
    GROUPS: constexpr,
    GROUP_SIZE: constexpr,
    BLOCK_N: constexpr,
    BLOCK_G: constexpr,
    BLOCK_K: constexpr,
    ACC: constexpr,
    CENTERED: constexpr,
    SQUARE_FACTOR: constexpr,
    EPS_IN_ROOT: constexpr,
    EPS_OUTSIDE: constexpr,
    MIN_DIVISOR: constexpr,
    GAIN: constexpr,
    GAIN_SLOPE: constexpr,
):
    """y by the statistics of each group of a token, and these statistics."""
    C: constexpr = GROUPS * GROUP_SIZE
    TINY: constexpr = TINY_64 if ACC == tl.float64 else TINY_32
    at = _channels(GROUPS, GROUP_SIZE, BLOCK_G, BLOCK_K)
    first, stride = _tiles(BLOCK_N)
    scale = _vector(weight, at, 1.0, ACC)
    shift = _vector(bias, at, 0.0, ACC)
    for start in range(first, rows, stride):
        tile = _tile(start, rows, at, BLOCK_N)
        z = _read(x, tile, inner, x_outer, x_inner, C, ACC)
        mean = tl.zeros([BLOCK_N, BLOCK_G], ACC)
        if CENTERED:
            mean = tl.sum(z, 2) / GROUP_SIZE
            z = tl.where(at[1], z - mean[:, :, None], 0.0)
        mean_square = tl.sum(z * z, 2) / GROUP_SIZE
        second = mean_square * SQUARE_FACTOR + EPS_IN_ROOT
        root = _sqrt(tl.where(second < TINY, TINY, second))  # unlike tl.maximum, this keeps NaN
        divisor = root + EPS_OUTSIDE
        depends = (second > TINY) & (divisor >= MIN_DIVISOR)
        share = tl.where(depends, SQUARE_FACTOR * divisor / root, 0.0)
        inverse = 1.0 / tl.where(divisor < MIN_DIVISOR, MIN_DIVISOR, divisor)
        _write_statistic(stats, 0, rows, tile, mean, GROUPS, BLOCK_G)
        _write_statistic(stats, 1, rows, tile, inverse, GROUPS, BLOCK_G)
        _write_statistic(stats, 2, rows, tile, share, GROUPS, BLOCK_G)
        z = z * inverse[:, :, None]
        z = z * (GAIN + GAIN_SLOPE * z)
        _write(y, tile, z * scale + shift, C)


@triton.jit(do_not_specialize=["rows", "inner"])
def standardize_gradient(
    dx,  # (rows, C), type of x, written; None: only the sums
    partials,  # slots 0: dy z (gain + gain_slope z), 1: dy; written. None: only dx
    dy,  # (rows, C)
    x,  # (rows, C)
    weight,  # (C,) or None
    stats,  # (3, rows, GROUPS) ACC
    rows,
    inner,  # as in norm_backward
    dy_outer,
    dy_inner,
    x_outer,
    x_inner,
    GROUPS: constexpr,
    GROUP_SIZE: constexpr,
    BLOCK_N: constexpr,
    BLOCK_G: constexpr,
    BLOCK_K: constexpr,
    ACC: constexpr,
    GAIN: constexpr,
    GAIN_SLOPE: constexpr,
    THROUGH_MEAN: constexpr,
    THROUGH_DIVISOR: constexpr,
):
    """dx through the statistics of each group of a token, and each program's sums over its
    tokens.
    """
    C: constexpr = GROUPS * GROUP_SIZE
    at = _channels(GROUPS, GROUP_SIZE, BLOCK_G, BLOCK_K)
    first, stride = _tiles(BLOCK_N)
    scale = _vector(weight, at, 1.0, ACC)
    zeros = tl.zeros(at[0].shape, ACC)
    products = zeros
    plain = zeros
    for start in range(first, rows, stride):
        tile = _tile(start, rows, at, BLOCK_N)
        grad = _read(dy, tile, inner, dy_outer, dy_inner, C, ACC)
        h = _read(x, tile, inner, x_outer, x_inner, C, ACC)
        mean = _read_statistic(stats, 0, rows, tile, GROUPS, BLOCK_G)
        inverse = _read_statistic(stats, 1, rows, tile, GROUPS, BLOCK_G)
        used = _used(grad)
        z = tl.where(used, (h - mean) * inverse, 0.0)
        curve = GAIN + GAIN_SLOPE * z
        if partials is not None:
            products += _over_tokens(grad * (z * curve))
            plain += _over_tokens(grad)
        if dx is not None:
            dz = grad * scale * curve  # 0 beyond the channels
            through = dz
            if THROUGH_MEAN:
                through -= _group_mean(dz, GROUP_SIZE)
            if THROUGH_DIVISOR:
                share = _read_statistic(stats, 2, rows, tile, GROUPS, BLOCK_G)
                projection = share * _group_mean(dz * z, GROUP_SIZE)
                through -= z * projection
            dh = tl.where(used, through * inverse, 0.0)
            _write(dx, tile, dh, C)
    if partials is not None:
        _write_sums(partials, 0, at, products, plain, C)


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
    signed = tl.where(value < 0, -far, far)
    return tl.where(near, value * (numerator / denominator), signed)


@triton.jit
def _squashed(h, alpha, shift, ERF):
    """f(alpha h + shift), and the argument of f."""
    argument = h * tl.load(alpha).to(h.dtype)
    if shift is not None:
        argument = argument + tl.load(shift).to(h.dtype)
    value = tl.erf(argument) if ERF else _tanh(argument)
    return value, argument


@triton.jit(do_not_specialize=["rows", "inner"])
def squash(
    y,  # (rows, C), type of x, written
    x,  # (rows, C)
    weight,  # (C,) or None, as the next
    bias,
    alpha,  # (1,)
    shift,  # (1,) or None
    rows,
    inner,  # as in norm_forward
    x_outer,
    x_inner,
    GROUPS: constexpr,
    GROUP_SIZE: constexpr,
    BLOCK_N: constexpr,
    BLOCK_G: constexpr,
    BLOCK_K: constexpr,
    ACC: constexpr,
    ERF: constexpr,
):
    """y = weight f(alpha x + shift) + bias with f = tanh, or erf."""
    C: constexpr = GROUPS * GROUP_SIZE
    at = _channels(GROUPS, GROUP_SIZE, BLOCK_G, BLOCK_K)
    first, stride = _tiles(BLOCK_N)
    scale = _vector(weight, at, 1.0, ACC)
    offset = _vector(bias, at, 0.0, ACC)
    for start in range(first, rows, stride):
        tile = _tile(start, rows, at, BLOCK_N)
        h = _read(x, tile, inner, x_outer, x_inner, C, ACC)
        value, _ = _squashed(h, alpha, shift, ERF)
        _write(y, tile, value * scale + offset, C)


@triton.jit(do_not_specialize=["rows", "inner"])
def squash_gradient(
    dx,  # (rows, C), type of x, written; None: only the sums
    # slots 0: dy f, 1: dy; numbers: weight dy f' x, and weight dy f'; written. None: only dx
    partials,
    dy,  # (rows, C)
    x,  # (rows, C)
    weight,  # (C,) or None
    alpha,  # (1,)
    shift,  # (1,) or None
    rows,
    inner,  # as in norm_backward
    dy_outer,
    dy_inner,
    x_outer,
    x_inner,
    GROUPS: constexpr,
    GROUP_SIZE: constexpr,
    BLOCK_N: constexpr,
    BLOCK_G: constexpr,
    BLOCK_K: constexpr,
    ACC: constexpr,
    ERF: constexpr,
):
    """dx, and each program's sums over its tokens."""
    C: constexpr = GROUPS * GROUP_SIZE
    at = _channels(GROUPS, GROUP_SIZE, BLOCK_G, BLOCK_K)
    first, stride = _tiles(BLOCK_N)
    scale = _vector(weight, at, 1.0, ACC) * tl.load(alpha).to(ACC)
    zeros = tl.zeros(at[0].shape, ACC)
    products = zeros
    plain = zeros
    stretched = zeros
    shifted = zeros
    for start in range(first, rows, stride):
        tile = _tile(start, rows, at, BLOCK_N)
        grad = _read(dy, tile, inner, dy_outer, dy_inner, C, ACC)
        h = _read(x, tile, inner, x_outer, x_inner, C, ACC)
        h = tl.where(_used(grad), h, 0.0)
        value, argument = _squashed(h, alpha, shift, ERF)
        slope = 1.0 - value * value
        if ERF:
            slope = 1.1283791670955126 * tl.exp(-argument * argument)  # 2 / sqrt(pi)
        dh = grad * slope
        if partials is not None:
            products += _over_tokens(grad * value)
            plain += _over_tokens(grad)
            stretched += _over_tokens(dh * h)
            shifted += _over_tokens(dh)
        if dx is not None:
            _write(dx, tile, dh * scale, C)
    if partials is not None:
        _write_sums(partials, 0, at, products, plain, C)
        gain = _vector(weight, at, 1.0, ACC)  # loaded only here, to save registers
        numbers = _numbers(partials, 2, C) + tl.program_id(0)
        tl.store(numbers, _sum_of_all(stretched * gain))
        tl.store(numbers + tl.num_programs(0), _sum_of_all(shifted * gain))


# The sums that the programs of a pass have written are added up for BLOCK_C channels, BLOCK_P
# programs at a time.


@triton.jit
def _some(partials, slot, start, at, programs, C, BLOCK_P: constexpr):
    """A slot of BLOCK_P programs from ``start`` on, (BLOCK_P, channels), 0 beyond the last one."""
    channel, inside = at
    program = start + tl.arange(0, BLOCK_P)[:, None]
    row = slot * programs.to(tl.int64) + program
    exists = (program < programs) & inside[None, :]
    return tl.load(partials + row * C + channel[None, :], mask=exists, other=0.0)


@triton.jit
def _total(partials, slot, at, programs, C, BLOCK_P: constexpr):
    """The sum of a slot over all programs, for the channels."""
    total = tl.zeros([BLOCK_P, at[0].shape[0]], partials.dtype.element_ty)
    for start in range(0, programs, BLOCK_P):
        total += _some(partials, slot, start, at, programs, C, BLOCK_P)
    return tl.sum(total, 0)


@triton.jit
def _total_number(numbers, programs, BLOCK_P):
    """The sum of one number of every program."""
    return tl.sum(_total(numbers, 0, _columns(0, 1, 1), programs, 1, BLOCK_P), 0)


@triton.jit(do_not_specialize=["programs"])
def finish_moments(
    partials,  # of norm_forward
    mean,  # (C,) ACC, written; None: the moment is about 0
    moment,  # (C,) ACC, written
    count,  # () ACC, written
    programs,
    C: constexpr,
    BLOCK_P: constexpr,
    BLOCK_C: constexpr,
):
    """Mean of the real tokens, second moment about it, and their number. All are 0 without any."""
    at = _columns(tl.program_id(0) * BLOCK_C, C, BLOCK_C)
    channel, inside = at
    SLOTS: constexpr = 1 if mean is None else 2
    counts = partials + SLOTS * C * programs.to(tl.int64)
    number = _total_number(counts, programs, BLOCK_P)
    divisor = tl.maximum(number, 1.0)
    squares = _total(partials, 0, at, programs, C, BLOCK_P)
    if mean is not None:
        center = _total(partials, 1, at, programs, C, BLOCK_P) / divisor
        tl.store(mean + channel, center, mask=inside)
        # n_p (mean_p - mean)^2: Chan's formula for all programs at once
        between = tl.zeros([BLOCK_P, BLOCK_C], partials.dtype.element_ty)
        for start in range(0, programs, BLOCK_P):
            added = _some(counts, 0, start, _columns(0, 1, 1), programs, 1, BLOCK_P)
            total = _some(partials, 1, start, at, programs, C, BLOCK_P)
            difference = total / tl.maximum(added, 1.0) - center[None, :]
            between += added * difference * difference
        squares += tl.sum(between, 0)
    tl.store(moment + channel, squares / divisor, mask=inside)
    tl.store(count, number, mask=tl.program_id(0) == 0)


@triton.jit(do_not_specialize=["programs"])
def finish_gradient_sums(
    partials,  # of norm_backward, or of another gradient: without weight and moment
    weight,  # (C,) or None, as the next
    moment,
    loss_scale,  # (1,) or None
    parameters,  # (2, C), written: the sums over all tokens
    products,  # (2, C) ACC, written: those over the real tokens, divided by the loss scale; or None
    scalars,  # (2,) ACC, written: sums of the numbers; or None
    programs,
    EPS: constexpr,
    MASKED: constexpr,
    C: constexpr,
    BLOCK_P: constexpr,
    BLOCK_C: constexpr,
):
    """The gradients of weight and bias and their parts from the real tokens. The second axis of the
    grid selects their row.
    """
    ACC: constexpr = partials.dtype.element_ty
    at = _columns(tl.program_id(0) * BLOCK_C, C, BLOCK_C)
    channel, inside = at
    slot = tl.program_id(1)
    row = slot * C + channel
    divisor = tl.where(slot == 0, _divisor(moment, at, EPS, ACC), 1.0)
    over_all = _total(partials, slot, at, programs, C, BLOCK_P)
    parameter = _divide(over_all, divisor)
    if parameters.dtype.element_ty.primitive_bitwidth == 16:
        parameter = parameter.to(tl.float32)  # not every triton rounds float64 to 16-bit types
    tl.store(parameters + row, parameter, mask=inside)
    if products is not None:
        product = over_all
        if MASKED:
            product = _total(partials, slot + 2, at, programs, C, BLOCK_P)
        product = _divide(product, divisor) * _vector(weight, at, 1.0, ACC)
        product = _divide(product, _number(loss_scale, ACC))
        tl.store(products + row, product, mask=inside)
    if scalars is not None:
        numbers = partials + (2 * C + slot) * programs.to(tl.int64)
        number = _total_number(numbers, programs, BLOCK_P)
        tl.store(scalars + slot, number, mask=tl.program_id(0) == 0)


# The state after a batch. One program moves all channels, because one number that is not finite
# keeps the batch out. Values beyond C must be finite. State that all threads read is read before a
# reduction, in which they wait for each other.


@triton.jit
def _finite(values):
    """Whether ``values`` are finite in float32."""
    return tl.abs(values.to(tl.float32)) < INFINITY


@triton.jit
def _log(values):
    """The logarithm of max(moment, float32's smallest normal number). NaN stays NaN."""
    values = values.to(tl.float32)
    return tl.log(tl.where(values < TINY_32, TINY_32, values))


@triton.jit
def _products(products, at, C):
    """The sums of dx_hat * x_hat and of dx_hat, which other programs may just have written."""
    channel, inside = at
    product = tl.load(products + channel, mask=inside, other=0.0, cache_modifier=".cg")
    plain = tl.load(products + C + channel, mask=inside, other=0.0, cache_modifier=".cg")
    return product, plain


@triton.jit
def _add_to(diagnostic, condition):
    tl.store(diagnostic, tl.load(diagnostic) + condition.to(tl.float32))


@triton.jit
def _enters(running, diagnostics, batch, finite, sums, tokens, at, C):
    """Whether a batch counts, and which channels of the state it moves. Writes the entries 0 and 2
    of the diagnostics: see :func:`.reference.running_average_`.
    """
    channel, inside = at
    product, plain = sums
    finite &= _finite(batch) & _finite(product) & _finite(plain)
    all_finite = tl.min(finite.to(tl.int32), 0) == 1
    counted = (tokens > 0) & all_finite
    if diagnostics is not None:
        before = tl.load(running + channel, mask=inside, other=1.0)
        distance = tl.abs(_log(batch) - _log(before))
        total = tl.sum(tl.where(inside, distance, 0.0), 0)
        tl.store(diagnostics + 2, 0.5 * total / C)
        _add_to(diagnostics, (tokens > 0) & (all_finite == 0))
    return counted, tl.where(counted, channel, C) < C  # the interpreter has no scalar & vector


@triton.jit
def _average(running, batch, share, channel, moves):
    old = tl.load(running + channel, mask=moves, other=0.0)
    moved = old + share * (batch - old)
    tl.store(running + channel, moved, mask=moves)


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
    ALPHA: constexpr,
    UNBIASED: constexpr,
    C: constexpr,
    BLOCK_C: constexpr,
):
    """The operator of this name."""
    ACC: constexpr = batch_moment.dtype.element_ty
    at = _columns(0, C, BLOCK_C)
    channel, inside = at
    tokens = tl.load(count)
    batches = tl.load(num_batches)
    batch = _vector(batch_moment, at, 0.0, ACC)
    if UNBIASED:
        batch = tl.where(inside, batch * _divide(tokens, tokens - 1.0), 0.0)
    center = _vector(batch_mean, at, 0.0, ACC)
    sums = _products(products, at, C)
    finite = _finite(center)
    counted, moves = _enters(moment, diagnostics, batch, finite, sums, tokens, at, C)
    _average(moment, batch, 1.0 - ALPHA, channel, moves)
    if mean is not None:
        _average(mean, center, 1.0 - ALPHA, channel, moves)
    tl.store(num_batches, batches + counted.to(tl.int64))


@triton.jit
def power_update_(
    psi2,  # (C,) float32, changed
    nu,  # (C,) float32, changed if HAS_GRADIENT
    num_batches,  # () int64, changed
    diagnostics,  # (4,) float32, changed; or None
    batch_psi2,  # (C,) ACC
    used_psi2,  # (C,), psi^2 under D
    products,  # (2, C)
    count,  # ()
    EPS: constexpr,
    WARMUP: constexpr,
    ALPHA_FWD: constexpr,
    ALPHA_BWD: constexpr,
    HAS_GRADIENT: constexpr,
    C: constexpr,
    BLOCK_C: constexpr,
):
    """The operator of this name."""
    ACC: constexpr = batch_psi2.dtype.element_ty
    SHARE_BWD: constexpr = 1.0 - ALPHA_BWD
    at = _columns(0, C, BLOCK_C)
    channel, inside = at
    tokens = tl.load(count)
    batches = tl.load(num_batches)
    batch = _vector(batch_psi2, at, 0.0, ACC)
    gamma = _divide(batch, _vector(used_psi2, at, 1.0, ACC) + EPS)
    sums = _products(products, at, C)
    finite = _finite(gamma)
    counted, moves = _enters(psi2, diagnostics, batch, finite, sums, tokens, at, C)
    if diagnostics is not None:
        not_numbers = tl.sum(tl.where(gamma == gamma, 0.0, gamma), 0)  # tl.max ignores NaN
        largest = tl.max(gamma, 0) + not_numbers
        tl.store(diagnostics + 3, largest)
        _add_to(diagnostics + 1, counted & (SHARE_BWD * largest > 1.0))
    cumulative = _divide(tl.full([], 1.0, ACC), (batches + 1).to(ACC))
    share = tl.where(batches < WARMUP, cumulative, tl.full([], 1.0 - ALPHA_FWD, ACC))
    _average(psi2, batch, share, channel, moves)
    if HAS_GRADIENT:
        lambda_ = _divide(sums[0], tl.maximum(tokens, 1.0))
        old = tl.load(nu + channel, mask=moves, other=0.0)
        kept = old * tl.maximum(1.0 - SHARE_BWD * gamma, 0.0)
        tl.store(nu + channel, kept + SHARE_BWD * lambda_, mask=moves)
    tl.store(num_batches, batches + counted.to(tl.int64))


@triton.jit(do_not_specialize=["programs"])
def finish_power_step(
    partials,  # of norm_backward, and room for the products behind its 0
    weight,  # (C,) or None
    loss_scale,  # (1,) or None
    parameters,  # (2, C), written
    psi2,  # this one and the next six: as in power_update_
    nu,
    num_batches,
    diagnostics,
    batch_psi2,
    used_psi2,
    count,
    programs,
    EPS: constexpr,
    WARMUP: constexpr,
    ALPHA_FWD: constexpr,
    ALPHA_BWD: constexpr,
    MASKED: constexpr,
    C: constexpr,
    BLOCK_P: constexpr,
    BLOCK_C: constexpr,
    BLOCK: constexpr,  # all channels
):
    """:func:`finish_gradient_sums`; the program that ends last also runs :func:`power_update_`."""
    arrived = partials + programs.to(tl.int64) * ((4 if MASKED else 2) * C)
    products = arrived + 1
    finish_gradient_sums(
        partials,
        weight,
        used_psi2,
        loss_scale,
        parameters,
        products,
        None,
        programs,
        EPS,
        MASKED,
        C,
        BLOCK_P,
        BLOCK_C,
    )
    tl.debug_barrier()
    counter = arrived.to(tl.pointer_type(tl.int32), bitcast=True)
    number = tl.atomic_add(counter, 1, sem="acq_rel")
    if number == tl.num_programs(0) * tl.num_programs(1) - 1:
        power_update_(
            psi2,
            nu,
            num_batches,
            diagnostics,
            batch_psi2,
            used_psi2,
            products,
            count,
            EPS,
            WARMUP,
            ALPHA_FWD,
            ALPHA_BWD,
            True,
            C,
            BLOCK,
        )


# Windows: ring buffers of the last M steps. Step number t goes to row t % M.


@triton.jit
def _with_step(window, number, own, batches, at, M, C):
    """Row ``number`` of a window after and before a step with the value ``own``."""
    before = _vector(window + number * C, at, 1.0, own.dtype)
    return tl.where(number == (batches + 1) % M, own, before), before


@triton.jit
def window_statistics(
    psi2_window,  # (M, C) float32
    running_psi2,  # (C,) float32
    num_batches,  # () int64
    completed,  # () int64, or None
    batch_psi2,  # (C,) ACC
    psi2,  # (C,) ACC, written
    ratio,  # (C,) ACC, written
    marks,  # (2,) bool, written
    WARMUP: constexpr,
    RATIO_WARMUP: constexpr,
    EPS: constexpr,
    GEOMETRIC: constexpr,
    FILTRATION: constexpr,
    M: constexpr,
    C: constexpr,
    BLOCK_C: constexpr,
):
    """See ``window_statistics`` of the reference, which explains early, skip and ratio."""
    ACC: constexpr = batch_psi2.dtype.element_ty
    at = _columns(0, C, BLOCK_C)
    channel, inside = at
    batches = tl.load(num_batches)
    updates = batches if completed is None else tl.load(completed)
    early = (batches + 1 <= M) | (updates + 1 < WARMUP)
    own = _vector(batch_psi2, at, 1.0, ACC)
    zeros = tl.zeros(own.shape, ACC)
    average = zeros
    logarithms = zeros
    roots = zeros  # of the window before this step
    for number in range(M):
        value, before = _with_step(psi2_window, number, own, batches, at, M, C)
        average += value / M
        logarithms += tl.log(value) / M
        roots += tl.where(inside, tl.sqrt(before), 0.0)
    geometric = tl.exp(logarithms)
    never = early & (early == 0)  # False in the type of early
    skip = never
    if GEOMETRIC and M == 1:
        skip = never == 0
    elif FILTRATION:
        mean = tl.sum(roots, 0) / (M * C)
        squares = zeros
        for number in range(M):
            _, before = _with_step(psi2_window, number, own, batches, at, M, C)
            deviation = tl.sqrt(before) - mean
            squares += tl.where(inside, deviation * deviation, 0.0)
        variance = tl.sum(squares, 0) / (M * C - 1)
        excess = tl.max(tl.where(inside, average - geometric, 0.0), 0)
        skip = (early == 0) & (excess > variance * M)
    used = tl.where(early | skip, own, geometric if GEOMETRIC else average)
    running = _vector(running_psi2, at, 1.0, ACC)
    root = _sqrt(_divide(used + EPS, running + EPS))
    # within 1/5 and 5; unlike tl.clamp, this keeps NaN
    clipped = tl.where(root < 0.2, 0.2, tl.where(root > 5.0, 5.0, root))
    tl.store(psi2 + channel, used, mask=inside)
    is_one = skip | (updates + 1 <= RATIO_WARMUP)
    tl.store(ratio + channel, tl.where(is_one, 1.0, clipped), mask=inside)
    tl.store(marks, early)
    tl.store(marks + 1, skip)


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
    ALPHA_FWD: constexpr,
    ALPHA_BWD: constexpr,
    HAS_GRADIENT: constexpr,
    M: constexpr,
    C: constexpr,
    BLOCK_C: constexpr,
):
    """The operator of this name."""
    ACC: constexpr = psi2.dtype.element_ty
    at = _columns(0, C, BLOCK_C)
    channel, inside = at
    tokens = tl.load(count)
    batches = tl.load(num_batches)
    seen = tl.load(seen_batches)
    early = tl.load(marks) != 0
    skip = tl.load(marks + 1) != 0
    sums = _products(products, at, C)
    own = _divide(sums[0], tl.maximum(tl.load(counted_tokens), 1.0))  # lambda_B
    average = tl.zeros(own.shape, ACC)
    for number in range(M):
        value, _ = _with_step(seen_lambda, number, own, seen, at, M, C)
        average += value / M
    average = tl.where(early | skip, own, average)
    factor = average
    if nu is not None:
        old = _vector(seen_nu, at, 0.0, ACC)
        moved = ALPHA_BWD * old + (1.0 - ALPHA_BWD) * average
        factor = tl.where(skip, own, moved)
    tl.store(correction + channel, factor, mask=inside)
    batch = _vector(batch_psi2, at, 1.0, ACC)
    used = _vector(psi2, at, 1.0, ACC)
    finite = _finite(used) & _finite(average)
    counted, moves = _enters(running_psi2, diagnostics, batch, finite, sums, tokens, at, C)
    row = (batches + 1) % M * C + channel
    entering = tl.where(skip, _vector(running_psi2, at, 1.0, ACC), batch)
    tl.store(psi2_window + row, entering, mask=moves)
    _average(running_psi2, used, 1.0 - ALPHA_FWD, channel, moves)
    if HAS_GRADIENT:
        entering = own
        if nu is not None:
            entering = tl.where(skip, _vector(nu, at, 0.0, ACC), own)
            _average(nu, average, 1.0 - ALPHA_BWD, channel, moves)
        tl.store(lambda_window + row, entering, mask=moves)
    tl.store(num_batches, batches + counted.to(tl.int64))
