"""The definition of the operators in plain PyTorch, against which the C++ and Triton
implementations are tested.

A function whose name ends in ``_`` changes the state that its docstring names, in place, and
nothing else; the others are pure. Names and shapes, here and in :mod:`.ops`:

- ``x``, ``dy``: (..., C), any strides, one type: float16, bfloat16, float32 or float64. A row is a
  token.
- ``padding``: (...) bool, the tokens of x in the order of x, any strides; True = padding. None:
  every token is real. M denotes the real tokens, N their number.
- ``groups``: number of layer-scale groups G; 0: no layer-scale.
- ``inv_rms``: (..., G): 1 / sqrt(mean_k(x_k^2) + eps) of each token and group; h = x * inv_rms.
  G = 0: h = x.
- vectors: (C,), any floating-point type: ``weight``, ``bias``, ``mean``, ``moment`` (the second
  moment about the mean), ``nu``, ``offset``.
- ``eps``: added to every mean square before the root.
- ``loss_scale``: one element, any floating-point type: what the loss is multiplied by. None: 1.
- ``count``: 0-d, N in the accumulation dtype.

With D = sqrt(moment + eps), x_hat = (h - mean) / D and dx_hat = weight * dy; what is None is left
out.

A token whose dy is 0 in all channels, and that gets no correction by the statistics of the batch,
is *unused*: the loss does not depend on it. Its dx is 0 and it is left out of all sums over tokens,
even if its x is not finite. So NaN and infinity at padding do not reach the gradients of parameters
as 0 * NaN.

Arithmetic, sums and returned vectors use the *accumulation dtype*: float64 for float64, else
float32. Results in the type of x are rounded once, and are contiguous for all strides of x, like
the results of torch's LayerNorm.
"""

import math

import torch
from torch import Tensor

Maybe = Tensor | None


def acc_dtype(x: Tensor) -> torch.dtype:
    """The accumulation dtype for activations ``x``."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _grouped(h: Tensor, groups: int) -> Tensor:
    return h.unflatten(-1, (groups, h.size(-1) // groups))


def _layer_scaled(
    x: Tensor, groups: int, eps: float, inv_rms: Maybe = None
) -> tuple[Tensor, Tensor]:
    """h, in the accumulation dtype, and ``inv_rms``, which is computed unless given."""
    h = x.to(acc_dtype(x))
    if groups == 0:
        return h, torch.empty_like(h[..., :0]) if inv_rms is None else inv_rms
    grouped = _grouped(h, groups)
    if inv_rms is None:
        mean_square = grouped.square().mean(-1)
        inv_rms = torch.rsqrt(mean_square + eps).contiguous()
    return (grouped * inv_rms.unsqueeze(-1)).flatten(-2), inv_rms


def _centered(h: Tensor, mean: Maybe) -> Tensor:
    return h if mean is None else h - mean.to(h.dtype)


def _factors(weight: Maybe, moment: Maybe, eps: float, dtype: torch.dtype) -> Maybe:
    """weight / D, (C,); None: 1."""
    if moment is None:
        return weight
    return _affine(torch.rsqrt(moment.to(dtype) + eps), weight)


def _affine(values: Tensor, factors: Maybe, shift: Maybe = None, out: Maybe = None) -> Tensor:
    """factors * values + shift, in one pass; in the memory of ``out``, if it is given."""
    dtype = values.dtype
    if factors is None and shift is None:
        return values
    if shift is None:
        return torch.mul(values, factors.to(dtype), out=out)
    if factors is None:
        return torch.add(values, shift.to(dtype), out=out)
    return torch.addcmul(shift.to(dtype), values, factors.to(dtype), out=out)


def _result(values: Tensor, like: Tensor) -> Tensor:
    """``values`` in the type of ``like``, contiguous, and not in the memory of ``like``, because
    results share none with arguments.
    """
    result = values.to(like.dtype).contiguous()
    return result.clone() if result is like else result


#: Floating-point type -> the integer type with as many bits.
_BITS = {torch.float64: torch.int64, torch.float32: torch.int32}


def _only(values: Tensor, tokens: Maybe, in_place: bool = False) -> Tensor:
    """``values`` (..., C), float32 or float64, with zeros except at ``tokens`` (...); None: all
    tokens.

    A product with 0 would keep NaN and infinity. Masking bits takes a third of the time of
    ``masked_fill``.
    """
    if tokens is None:
        return values
    bits = values.view(_BITS[values.dtype])
    ones = tokens.to(bits.dtype).neg_().unsqueeze(-1)
    return (bits.bitwise_and_(ones) if in_place else bits & ones).view(values.dtype)


def _real(padding: Maybe) -> Maybe:
    """Which tokens are real; None: all."""
    return None if padding is None else ~padding


def _used(dy: Tensor, padding: Maybe = None, corrected: bool = False) -> Maybe:
    """Which tokens enter the sums, (...); None: all do. ``corrected``: the statistics of the batch
    correct the gradient of real tokens.
    """
    if corrected and padding is None:
        return None
    used = (dy.amax(-1) != 0) | (dy.amin(-1) != 0)
    return used.logical_or_(~padding) if corrected else used


#: Tokens that one product with ones adds up sequentially: more would lose digits.
_ADDED_AT_ONCE = 512


def _finite_sum(values: Tensor, tokens: Maybe = None) -> Maybe:
    """The sum over ``tokens`` (None: all), by products with 1 and 0, in half the time of ``sum``.

    Returns None if the sum is not finite, as 0 * NaN makes it; if there are few values; or outside
    of eager mode on a CPU: tracing cannot look at values, and autocast would round the products.
    """
    traced = type(values) is not Tensor or torch.compiler.is_compiling()
    if traced or not values.is_cpu or values.numel() < 2**15:
        return None
    flat = values.flatten(0, -2)
    weights = flat.new_ones(len(flat)) if tokens is None else tokens.flatten().to(flat.dtype)
    parts = zip(flat.split(_ADDED_AT_ONCE), weights.split(_ADDED_AT_ONCE), strict=True)
    sums = [torch.mv(part.t(), part_weights) for part, part_weights in parts]
    total = torch.stack(sums).sum(0)
    return total if total.isfinite().all() else None


def _sum_over_tokens(values: Tensor, tokens: Maybe = None) -> Tensor:
    """The sum over ``tokens``; None: over all."""
    total = _finite_sum(values, tokens)
    if total is not None:
        return total
    return _only(values, tokens).flatten(0, -2).sum(0)


def _mean_over_tokens(values: Tensor, padding: Maybe, count: Tensor) -> Tensor:
    """The mean over the ``count`` real tokens."""
    return _sum_over_tokens(values, _real(padding)) / count.clamp(min=1.0)


def _count(h: Tensor, padding: Maybe) -> Tensor:
    """N, 0-d."""
    if padding is None:
        tokens = math.prod(h.shape[:-1])  # in a graph, numel() would turn a length into a constant
        return torch.full((), tokens, dtype=h.dtype, device=h.device)
    return padding.logical_not().sum().to(h.dtype)


def normalize(
    x: Tensor,
    weight: Maybe,
    bias: Maybe,
    mean: Maybe,
    moment: Maybe,
    padding: Maybe,
    inv_rms: Maybe,
    groups: int,
    eps: float,
    sums: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Normalize by given statistics: y = weight * x_hat + bias.

    Returns:
        y; ``inv_rms`` (empty if it was given); and, in the same pass if ``sums``, the second moment
        about 0 of the batch, mean_M(h^2) (C,), 0 if N = 0, and N (0-d). Without ``sums`` these two
        are empty and ``padding`` is unused.
    """
    h, new_inv_rms = _layer_scaled(x, groups, eps, inv_rms)
    factors = _factors(weight, moment, eps, h.dtype)
    y = _result(_affine(_centered(h, mean), factors, bias), x)
    if inv_rms is not None:
        new_inv_rms = h.new_empty(0)
    if not sums:
        return y, new_inv_rms, h.new_empty(0), h.new_empty(0)
    count = _count(h, padding)
    return y, new_inv_rms, _mean_over_tokens(h.square(), padding, count), count


def moments(
    x: Tensor, padding: Maybe, groups: int, eps: float, centered: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Statistics of the batch, before it is normalized.

    Returns:
        ``inv_rms``; mean_M(h) (C,) if ``centered``, else empty; the second moment mean_M((h -
        mean)^2) (C,), about 0 unless ``centered``; N (0-d). Means over no token are 0.
    """
    inv_rms, mean, _, moment, count = _moments(x, padding, groups, eps, centered)
    return inv_rms, mean, moment, count


def _moments(x, padding, groups, eps, centered) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The results of :func:`moments`, with h - mean in the middle."""
    h, inv_rms = _layer_scaled(x, groups, eps)
    count = _count(h, padding)
    mean = h.new_empty(0)
    if centered:
        mean = _mean_over_tokens(h, padding, count)
        h = h - mean
    return inv_rms, mean, h, _mean_over_tokens(h.square(), padding, count), count


def gradient_sums(
    dy: Tensor,
    x: Tensor,
    padding: Maybe,
    weight: Maybe,
    mean: Maybe,
    moment: Maybe,
    loss_scale: Maybe,
    inv_rms: Tensor,
    groups: int,
    eps: float,
) -> tuple[Tensor, Tensor]:
    """Sums over tokens of a backward pass.

    Returns:
        ``parameters`` (2, C): the sums of dy * x_hat and of dy over *all* tokens, the gradients of
        weight and bias; ``products`` (2, C): the sums of dx_hat * x_hat and of dx_hat over the
        *real* tokens, over the loss scale.
    """
    h, _ = _layer_scaled(x, groups, eps, inv_rms)
    return _gradient_sums(dy, _centered(h, mean), padding, False, weight, moment, loss_scale, eps)


def _gradient_sums(dy, centered, padding, corrected, weight, moment, loss_scale, eps) -> tuple:
    dy = dy.to(centered.dtype)
    real = _real(padding)
    terms = dy * centered
    sum_of_terms = _finite_sum(terms)
    if sum_of_terms is None:
        terms = _only(terms, _used(dy, padding, corrected), in_place=True)
        sum_of_terms = _sum_over_tokens(terms)
    over_all = sum_of_terms, _sum_over_tokens(dy)
    over_real = over_all
    if padding is not None:
        over_real = _sum_over_tokens(terms, real), _sum_over_tokens(dy, real)
    factors = _factors(None, moment, eps, dy.dtype)
    parameters, products = (
        torch.stack([_affine(of_terms, factors), of_dy])
        for of_terms, of_dy in (over_all, over_real)
    )
    products = _affine(products, weight)
    return parameters, products if loss_scale is None else products / loss_scale.to(dy.dtype)


def gradient(
    dy: Tensor,
    x: Tensor,
    padding: Maybe,
    weight: Maybe,
    mean: Maybe,
    moment: Maybe,
    nu: Maybe,
    offset: Maybe,
    count: Maybe,
    loss_scale: Maybe,
    inv_rms: Tensor,
    groups: int,
    eps: float,
    sums: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradient with respect to x, and :func:`gradient_sums` from the same pass if ``sums`` (else
    empty).

    dh = (dx_hat - 1_M (nu * x_hat + offset)) / D, where 1_M is 1 on real tokens and 0 on padding;
    ``offset`` goes with ``nu``. Both are first divided by max(``count``, 1), if there is a count,
    and multiplied by the loss scale. Through layer-scale, per token and group, dx = (dh - h
    mean_k(dh_k h_k)) * inv_rms.
    """
    h, _ = _layer_scaled(x, groups, eps, inv_rms)
    centered = _centered(h, mean)
    dtype = h.dtype
    corrected = nu is not None
    correction = None
    if corrected:
        factors = _factors(None, moment, eps, dtype)
        share = -1.0 if count is None else -1.0 / count.clamp(min=1.0)
        if loss_scale is not None:
            share = share * loss_scale.to(dtype)
        slope = _affine(_affine(nu.to(dtype) * share, factors), factors)
        shift = None if offset is None else _affine(offset.to(dtype) * share, factors)
        no_longer_needed = None if mean is None or sums else centered
        correction = _affine(centered, slope, shift, out=no_longer_needed)
        correction = _only(correction, _real(padding), in_place=True)
    factors = _factors(weight, moment, eps, dtype)
    dh = _affine(dy.to(dtype), factors, correction, out=correction)
    if groups:
        projection = _grouped(dh * h, groups).mean(-1, keepdim=True)
        through = _grouped(dh, groups) - _grouped(h, groups) * projection
        dh = (through * inv_rms.unsqueeze(-1)).flatten(-2)
        dh = _only(dh, _used(dy, padding, corrected), in_place=True)
    dx = _result(dh, dy)  # without groups, an unused token's dx does not depend on x: it is 0
    if not sums:
        return dx, h.new_empty(0), h.new_empty(0)
    return dx, *_gradient_sums(dy, centered, padding, corrected, weight, moment, loss_scale, eps)


def enters(
    running: Tensor, diagnostics: Maybe, batch: Tensor, count: Tensor, *others: Tensor
) -> Tensor:
    """Whether a batch counts, 0-d: it contains a real token, and all its numbers, including
    ``others``, are finite in float32, the type of the state. Writes the entries 0 and 2 of
    ``diagnostics``; see :func:`running_average_`.
    """
    numbers = [values.float().flatten() for values in (batch, *others)]
    has_token = count > 0
    counted = has_token & torch.cat(numbers).isfinite().all()
    if diagnostics is not None:
        tiny = torch.finfo(torch.float32).tiny
        distance = batch.float().clamp(min=tiny).log() - running.clamp(min=tiny).log()
        diagnostics[0].add_(has_token & ~counted)
        diagnostics[2].copy_(0.5 * distance.abs().mean())
    return counted


def move(state: Tensor, after: Tensor, counted: Tensor) -> None:
    state.copy_(torch.where(counted, after.to(state.dtype), state))


def _average(running: Tensor, batch: Tensor, share: float | Tensor, counted: Tensor) -> None:
    move(running, running + share * (batch - running), counted)


def running_average_(
    moment: Tensor,
    mean: Maybe,
    num_batches: Tensor,
    diagnostics: Maybe,
    batch_moment: Tensor,
    batch_mean: Maybe,
    products: Tensor,
    count: Tensor,
    alpha: float,
    unbiased: bool,
) -> None:
    """Move running statistics, which are exponential averages, by a batch.

    ``moment``, ``mean`` (C,) float32, ``num_batches`` 0-d int64 and ``diagnostics`` are changed;
    the other arguments belong to the batch. ``unbiased``: ``batch_moment`` enters times N / (N -
    1). The statistics stay unchanged if N is 0 or a number of the batch is not finite; these
    numbers include the ``products`` (2, C) of its gradient and, if ``unbiased``, the moment, which
    is infinite or NaN for one token.

    ``diagnostics`` (4,) float32, or None: [0] grows by 1 if the batch has a real token and does not
    count; [1] by 1 if max(0, .) acts in :func:`power_update_` and the batch counts; [2] becomes the
    mean over the channels of 0.5 |log(moment of the batch) - log(running moment before it)|, where
    a moment is at least float32's smallest normal number; [3] becomes the largest Gamma of a
    channel. Only :func:`power_update_` writes [1] and [3].
    """
    if unbiased:
        batch_moment = batch_moment * (count / (count - 1.0))
    of_batch = (products,) if mean is None else (products, batch_mean)
    counted = enters(moment, diagnostics, batch_moment, count, *of_batch)
    _average(moment, batch_moment, 1.0 - alpha, counted)
    if mean is not None:
        _average(mean, batch_mean, 1.0 - alpha, counted)
    num_batches.add_(counted)


def power_update_(
    psi2: Tensor,
    nu: Tensor,
    num_batches: Tensor,
    diagnostics: Maybe,
    batch_psi2: Tensor,
    used_psi2: Tensor,
    products: Tensor,
    count: Tensor,
    eps: float,
    warmup: int,
    alpha_fwd: float,
    alpha_bwd: float,
    has_gradient: bool,
) -> None:
    """Move psi^2, nu and num_batches of PN by a batch (Shen et al. 2020, line 4 of both passes of
    Algorithm 2).

    They and ``diagnostics`` (:func:`running_average_`) are changed; without ``has_gradient`` nu
    stays. The state stays unchanged if N is 0 or a number of the batch is not finite. ``used_psi2``
    is the psi^2 in D, and ``products`` (2, C) are the sums over M of dx_hat * x_hat and of dx_hat.
    """
    gamma = batch_psi2 / (used_psi2.to(batch_psi2.dtype) + eps)
    counted = enters(psi2, diagnostics, batch_psi2, count, products, gamma)
    if diagnostics is not None:
        diagnostics[1].add_(((1.0 - alpha_bwd) * gamma > 1.0).any() & counted)
        diagnostics[3].copy_(gamma.max())
    # during the warm-up the mean of the batches, then an exponential average
    cumulative = 1.0 / (num_batches + 1).to(batch_psi2.dtype)
    share = torch.where(num_batches < warmup, cumulative, 1.0 - alpha_fwd)
    _average(psi2, batch_psi2, share, counted)
    if has_gradient:
        lambda_ = products[0] / count.clamp(min=1.0)
        kept = (1.0 - (1.0 - alpha_bwd) * gamma).clamp(min=0.0)
        move(nu, nu * kept + (1.0 - alpha_bwd) * lambda_, counted)
    num_batches.add_(counted)


def power_step_(
    dy: Tensor,
    x: Tensor,
    padding: Maybe,
    weight: Maybe,
    used_psi2: Tensor,
    nu: Tensor,
    loss_scale: Maybe,
    inv_rms: Tensor,
    psi2: Tensor,
    running_nu: Tensor,
    num_batches: Tensor,
    diagnostics: Maybe,
    batch_psi2: Tensor,
    count: Tensor,
    groups: int,
    eps: float,
    warmup: int,
    alpha_fwd: float,
    alpha_bwd: float,
) -> tuple[Tensor, Tensor]:
    """The backward of PN: :func:`gradient` by ``used_psi2`` and ``nu``, and :func:`power_update_`
    with its sums.

    Returns:
        dx; the gradients of weight and bias (2, C), in the type of ``weight``.
    """
    given = dy, x, padding, weight, None, used_psi2, nu, None, None, loss_scale, inv_rms
    dx, parameters, products = gradient(*given, groups, eps, True)
    state = psi2, running_nu, num_batches, diagnostics
    batch = batch_psi2, used_psi2, products, count
    power_update_(*state, *batch, eps, warmup, alpha_fwd, alpha_bwd, True)
    return dx, _in_type_of(weight, parameters)


def _in_type_of(weight: Maybe, parameters: Tensor) -> Tensor:
    return parameters if weight is None else parameters.to(weight.dtype)


def batch_normalize(
    x: Tensor,
    weight: Maybe,
    bias: Maybe,
    padding: Maybe,
    groups: int,
    eps: float,
    centered: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """y, normalized by the :func:`moments` of the batch, and these moments: ``inv_rms``, mean,
    moment and N.
    """
    inv_rms, mean, h, moment, count = _moments(x, padding, groups, eps, centered)
    factors = _factors(weight, moment, eps, h.dtype)
    y = _affine(h, factors, bias, out=h if centered else None)
    return _result(y, x), inv_rms, mean, moment, count


def batch_step_(
    dy: Tensor,
    x: Tensor,
    padding: Maybe,
    weight: Maybe,
    mean: Maybe,
    moment: Tensor,
    count: Tensor,
    loss_scale: Maybe,
    inv_rms: Tensor,
    running_moment: Tensor,
    running_mean: Maybe,
    num_batches: Tensor,
    diagnostics: Maybe,
    groups: int,
    eps: float,
    alpha: float,
    unbiased: bool,
) -> tuple[Tensor, Tensor]:
    """The backward of a norm by batch statistics with the exact gradient, and
    :func:`running_average_`.

    :func:`gradient` gets the products of :func:`gradient_sums` as ``nu`` and, if there is a
    ``mean``, as ``offset``.

    Returns:
        dx; the gradients of weight and bias (2, C), in the type of ``weight``.
    """
    given = (dy, x, padding, weight, mean, moment)
    rest = (inv_rms, groups, eps)
    parameters, products = gradient_sums(*given, loss_scale, *rest)
    nu, offset = products.unbind()
    corrections = nu, None if mean is None else offset, count, loss_scale
    dx, _, _ = gradient(*given, *corrections, *rest, False)
    state = running_moment, running_mean, num_batches, diagnostics
    running_average_(*state, moment, mean, products, count, alpha, unbiased)
    return dx, _in_type_of(weight, parameters)


def window_statistics(
    psi2_window: Tensor,
    running_psi2: Tensor,
    num_batches: Tensor,
    completed: Maybe,
    batch_psi2: Tensor,
    warmup: int,
    ratio_warmup: int,
    eps: float,
    geometric: bool,
    filtration: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """What a forward of UN (``geometric``) or MABN normalizes by; see their docstrings for the
    symbols.

    ``psi2_window`` (M, C), ``running_psi2`` (C,) float32 and ``num_batches`` 0-d int64 are the
    state, which does not change; ``batch_psi2`` (C,) is psi_B^2. ``completed`` 0-d int64: completed
    optimizer updates; None: the steps are counted. A step is early up to number M, and before
    update ``warmup``; r is 1 up to update ``ratio_warmup``. With M = 1 every step of UN is skipped;
    otherwise only with ``filtration``.

    Returns:
        psi^2 in D; r, which is 1 if the step is skipped; both (C,) in the accumulation dtype; and
        whether the step is early and whether it is skipped, (2,) bool.
    """
    dtype = batch_psi2.dtype
    rows = len(psi2_window)
    updates = (num_batches if completed is None else completed) + 1
    early = (num_batches + 1 <= rows) | (updates < warmup)
    window = _with_row(psi2_window, batch_psi2, num_batches)
    average = window.log().mean(0).exp() if geometric else window.mean(0)
    skip = torch.zeros_like(early)
    if geometric and rows == 1:
        skip = torch.ones_like(early)
    elif filtration:
        bound = psi2_window.to(dtype).sqrt().var() * rows
        skip = (window.mean(0) - average > bound).any() & ~early
    psi2 = torch.where(early | skip, batch_psi2, average)
    squared_ratio = (psi2 + eps) / (running_psi2.to(dtype) + eps)
    ratio = squared_ratio.sqrt().clamp(1 / 5, 5)
    is_one = skip | (updates <= ratio_warmup)
    return psi2, torch.where(is_one, 1.0, ratio), torch.stack([early, skip])


def _next_row(window: Tensor, num_batches: Tensor) -> Tensor:
    """The row of a ring buffer that the next step overwrites, (M, 1)."""
    rows = torch.arange(len(window), device=window.device)
    return (rows == (num_batches + 1) % len(window)).unsqueeze(1)


def _with_row(window: Tensor, row: Tensor, num_batches: Tensor) -> Tensor:
    """The ring buffer after the next step with the value ``row``, (M, C), in the type of
    ``row``.
    """
    return torch.where(_next_row(window, num_batches), row, window.to(row.dtype))


def window_update_(
    running_psi2: Tensor,
    nu: Maybe,
    psi2_window: Tensor,
    lambda_window: Tensor,
    num_batches: Tensor,
    diagnostics: Maybe,
    seen_nu: Maybe,
    seen_lambda: Tensor,
    seen_batches: Tensor,
    psi2: Tensor,
    batch_psi2: Tensor,
    marks: Tensor,
    products: Tensor,
    count: Tensor,
    counted_tokens: Tensor,
    alpha_fwd: float,
    alpha_bwd: float,
    has_gradient: bool,
) -> Tensor:
    """Move the state of UN, or of MABN, which has no ``nu``, by a step.

    The arguments up to ``diagnostics`` (:func:`running_average_`) are changed; those named ``seen``
    are nu, the window of lambda and the number of batches as the forward saw them. ``psi2`` and
    ``marks`` come from :func:`window_statistics`, ``products`` from :func:`gradient_sums` with its
    gain. ``counted_tokens``: the number of tokens in psi_B^2 and lambda_B, which is N = ``count``
    unless padding counts. Without ``has_gradient`` nu and the window of lambda stay. Nothing moves
    if N is 0 or a number of the step is not finite.

    Returns:
        the factor of x_hat in dx, (C,): nu_t, or lambda_B in a skipped step; for MABN lambda.
    """
    early, skip = marks.unbind()
    own = products[0] / counted_tokens.clamp(min=1.0)
    average = torch.where(early | skip, own, _with_row(seen_lambda, own, seen_batches).mean(0))
    correction = average
    if nu is not None:
        moved = alpha_bwd * seen_nu.to(own.dtype) + (1.0 - alpha_bwd) * average
        correction = torch.where(skip, own, moved)
    counted = enters(running_psi2, diagnostics, batch_psi2, count, psi2, products, average)
    row_moves = _next_row(psi2_window, num_batches) & counted
    move(psi2_window, torch.where(skip, running_psi2.to(own.dtype), batch_psi2), row_moves)
    _average(running_psi2, psi2, 1.0 - alpha_fwd, counted)
    if has_gradient:
        entering = own if nu is None else torch.where(skip, nu.to(own.dtype), own)
        move(lambda_window, entering, row_moves)
        if nu is not None:
            move(nu, alpha_bwd * nu + (1.0 - alpha_bwd) * average, counted)
    num_batches.add_(counted)
    return correction


def standardize(
    x: Tensor,
    weight: Maybe,
    bias: Maybe,
    groups: int,
    centered: bool,
    square_factor: float,
    eps_in_root: float,
    eps_outside: float,
    min_divisor: float,
    gain: float,
    gain_slope: float,
    through_mean: bool = True,
    through_divisor: bool = True,
) -> tuple[Tensor, Tensor]:
    """Normalize each group of channels of each token by its own statistics.

    y = weight * z (gain + gain_slope z) + bias, z = (x - mean) / divisor, divisor =
    max(sqrt(square_factor * m + eps_in_root) + eps_outside, min_divisor), where m is the mean
    square of x - mean over the group's channels, and mean is 0 unless ``centered``. For torch's own
    differentiation, gain + gain_slope z is a constant, and so is what no gradient goes ``through``.

    Returns:
        y, and ``stats`` (3, ..., G): mean, 1 / divisor, and the share c of
        :func:`standardize_gradient`.
    """
    h = _grouped(x.to(acc_dtype(x)), groups)
    mean = h.mean(-1, keepdim=True) if centered else h.new_zeros(*h.shape[:-1], 1)
    variance = (h - mean).square().mean(-1, keepdim=True)
    second = square_factor * variance + eps_in_root
    tiny = torch.finfo(h.dtype).tiny  # from here on the root has a finite derivative
    root = second.clamp(min=tiny).sqrt()
    outside = root + eps_outside
    divisor = outside.clamp(min=min_divisor)
    depends = (second > tiny) & (outside >= min_divisor)
    share = torch.where(depends, square_factor * divisor / root, 0.0)
    deviation = h - (mean if through_mean else mean.detach())
    z = deviation / (divisor if through_divisor else divisor.detach())
    curved = z * (gain + gain_slope * z.detach())
    y = _affine(curved.flatten(-2), weight, bias)
    return _result(y, x), torch.stack([mean, 1 / divisor, share]).squeeze(-1)


def standardize_gradient(
    dy: Tensor,
    x: Tensor,
    weight: Maybe,
    stats: Tensor,
    groups: int,
    gain: float,
    gain_slope: float,
    through_mean: bool,
    through_divisor: bool,
    sums: bool,
) -> tuple[Tensor, Tensor]:
    """Gradient of :func:`standardize`, where gain + gain_slope z, and what no gradient goes
    ``through``, are constants.

    With dz = weight * dy * (gain + gain_slope z) and means over the channels of a group,
    dx = (dz - [through_mean] mean(dz) - [through_divisor] c z mean(dz z)) / divisor.

    Returns:
        dx; and the gradients of weight and bias (2, C), over all tokens, if ``sums``, else an empty
        tensor.
    """
    mean, inverse, share = stats.unsqueeze(-1)
    z = (_grouped(x.to(stats.dtype), groups) - mean) * inverse
    curved = gain + gain_slope * z
    wide = dy.to(stats.dtype)
    dz = _grouped(_affine(wide, weight), groups) * curved
    dx = dz
    if through_mean:
        dx = dx - dz.mean(-1, keepdim=True)
    if through_divisor:
        dx = dx - share * z * (dz * z).mean(-1, keepdim=True)
    used = _used(dy)
    dx = _result(_only((dx * inverse).flatten(-2), used), x)
    if not sums:
        return dx, stats.new_empty(0)
    products = _only(wide * (z * curved).flatten(-2), used)
    return dx, torch.stack([_sum_over_tokens(products), _sum_over_tokens(wide)])


def squash(
    x: Tensor,
    weight: Maybe,
    bias: Maybe,
    alpha: Tensor,
    shift: Maybe,
    erf: bool,
) -> Tensor:
    """y = weight * f(alpha x + shift) + bias with f = tanh, or ``erf``; alpha and shift have one
    element.
    """
    value, _ = _squashed(x.to(acc_dtype(x)), alpha, shift, erf)
    return _result(_affine(value, weight, bias), x)


def _squashed(h: Tensor, alpha: Tensor, shift: Maybe, erf: bool) -> tuple[Tensor, Tensor]:
    """f and its argument."""
    argument = h * alpha.to(h.dtype)
    if shift is not None:
        argument = argument + shift.to(h.dtype)
    return torch.erf(argument) if erf else torch.tanh(argument), argument


def squash_gradient(
    dy: Tensor, x: Tensor, weight: Maybe, alpha: Tensor, shift: Maybe, erf: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of :func:`squash`: dx (..., C); of weight and bias (2, C); of alpha and shift
    (2,).
    """
    h = _only(x.to(acc_dtype(x)), _used(dy))
    value, argument = _squashed(h, alpha, shift, erf)
    wide = dy.to(h.dtype)
    slope = 1 - value.square()
    if erf:
        slope = 2 / math.sqrt(math.pi) * torch.exp(-argument.square())
    inner = _affine(wide, weight) * slope
    parameters = torch.stack([_sum_over_tokens(wide * value), _sum_over_tokens(wide)])
    scalars = torch.stack([(inner * h).sum(), inner.sum()])
    return _result(inner * alpha.to(h.dtype), dy), parameters, scalars
