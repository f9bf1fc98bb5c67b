"""What the operators compute, in plain PyTorch. The C++ and Triton implementations are tested against it.

All functions are pure: they change none of their arguments. Names and shapes, here and in :mod:`.ops`:

================  ==================================================================================================
``x``, ``dy``     (..., C), any strides, one type: float16, bfloat16, float32 or float64. A row is a token.
``padding``       (...) bool, contiguous, in the order of x; True = padding. None: every token is real.
                  M denotes the real tokens, N their number.
``groups``        number of layer-scale groups G; 0: no layer-scale
``inv_rms``       (..., G): 1 / sqrt(mean_k(x_k^2) + eps) of each token and group; h = x * inv_rms. G = 0: h = x.
vectors           (C,), any floating-point type: ``weight``, ``bias``, ``mean``, ``moment`` (the second moment about
                  the mean), ``nu``, ``offset``
``eps``           added to every mean square before the root
================  ==================================================================================================

With D = sqrt(moment + eps), x_hat = (h - mean) / D and dx_hat = weight * dy; what is None is left out.

A token whose dy is 0 in all channels, and that gets no correction by the statistics of the batch, is *unused*: the loss
does not depend on it. Its dx is 0 and it is left out of all sums over tokens, also where its x is not finite. So NaN
and infinity at padding do not reach the gradients of parameters as 0 * NaN.

Arithmetic, sums and vectors that are returned have the *accumulation dtype*: float64 for float64, else float32. Results
in the type of x are rounded once, and contiguous for all strides of x, as the results of torch's LayerNorm.
"""

import math

import torch
from torch import Tensor


def acc_dtype(x: Tensor) -> torch.dtype:
    """The accumulation dtype for activations ``x``."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _grouped(h: Tensor, groups: int) -> Tensor:
    return h.unflatten(-1, (groups, h.size(-1) // groups))


def _inverse_rms(x: Tensor, groups: int, eps: float) -> Tensor:
    h = x.to(acc_dtype(x))
    if groups == 0:
        return torch.empty_like(h[..., :0])
    return torch.rsqrt(_grouped(h, groups).square().mean(-1) + eps).contiguous()


def _layer_scaled(x: Tensor, inv_rms: Tensor, groups: int) -> Tensor:
    """h, in the accumulation dtype."""
    h = x.to(acc_dtype(x))
    return h if groups == 0 else (_grouped(h, groups) * inv_rms.unsqueeze(-1)).flatten(-2)


def _standardized(h: Tensor, mean: Tensor | None, moment: Tensor | None, eps: float) -> Tensor:
    """x_hat."""
    if mean is not None:
        h = h - mean.to(h.dtype)
    return h if moment is None else h / torch.sqrt(moment.to(h.dtype) + eps)


def _result(values: Tensor, like: Tensor) -> Tensor:
    """``values`` in the type of ``like``, contiguous, and not in its memory: results share none with arguments."""
    result = values.to(like.dtype).contiguous()
    return result.clone() if result is like else result


def _real(values: Tensor, padding: Tensor | None) -> Tensor:
    """``values`` (..., C) with zeros at padding: a product with 0 would keep NaN and infinity."""
    return values if padding is None else values.masked_fill(padding.unsqueeze(-1), 0.0)


def _unused(dy: Tensor) -> Tensor:
    """Which tokens the loss does not depend on, (..., 1)."""
    return (dy == 0).all(-1, keepdim=True)


def _sum_over_tokens(values: Tensor) -> Tensor:
    return values.flatten(0, -2).sum(0)


def _count(h: Tensor, padding: Tensor | None) -> Tensor:
    """N, 0-d."""
    if padding is None:
        return torch.full((), h.shape[:-1].numel(), dtype=h.dtype, device=h.device)
    return padding.logical_not().sum().to(h.dtype)


def normalize(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor | None,
    moment: Tensor | None,
    padding: Tensor | None,
    inv_rms: Tensor | None,
    groups: int,
    eps: float,
    sums: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Normalize by given statistics: y = weight * x_hat + bias.

    Returns:
        y; ``inv_rms`` (empty if it was given); and, in the same pass if ``sums``, the second moment about 0 of the
        batch, mean_M(h^2) (C,), 0 if N = 0, and N (0-d). Without ``sums`` these two are empty and ``padding`` is
        unused.
    """
    scales = _inverse_rms(x, groups, eps) if inv_rms is None else inv_rms
    h = _layer_scaled(x, scales, groups)
    y = _standardized(h, mean, moment, eps)
    if weight is not None:
        y = y * weight.to(h.dtype)
    if bias is not None:
        y = y + bias.to(h.dtype)
    batch_moment, count = h.new_empty(0), h.new_empty(0)
    if sums:
        count = _count(h, padding)
        batch_moment = _sum_over_tokens(_real(h, padding).square()) / count.clamp(min=1.0)
    return _result(y, x), scales if inv_rms is None else h.new_empty(0), batch_moment, count


def moments(
    x: Tensor, padding: Tensor | None, groups: int, eps: float, centered: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Statistics of the batch before anything is normalized.

    Returns:
        ``inv_rms``; mean_M(h) (C,) if ``centered``, else empty; the second moment mean_M((h - mean)^2) (C,), about 0
        unless ``centered``; N (0-d). Means over no token are 0.
    """
    inv_rms = _inverse_rms(x, groups, eps)
    h = _layer_scaled(x, inv_rms, groups)
    count = _count(h, padding)
    mean = h.new_empty(0)
    if centered:
        mean = _sum_over_tokens(_real(h, padding)) / count.clamp(min=1.0)
        h = h - mean
    return inv_rms, mean, _sum_over_tokens(_real(h, padding).square()) / count.clamp(min=1.0), count


def gradient_sums(
    dy: Tensor,
    x: Tensor,
    padding: Tensor | None,
    weight: Tensor | None,
    mean: Tensor | None,
    moment: Tensor | None,
    inv_rms: Tensor,
    groups: int,
    eps: float,
) -> tuple[Tensor, Tensor]:
    """Sums over tokens of a backward pass.

    Returns:
        ``parameters`` (2, C): the sums of dy * x_hat and of dy over *all* tokens, the gradients of weight and bias;
        ``products`` (2, C): the sums of dx_hat * x_hat and of dx_hat over the *real* tokens.
    """
    xhat = _standardized(_layer_scaled(x, inv_rms, groups), mean, moment, eps)
    return _gradient_sums(dy.to(xhat.dtype), xhat, _unused(dy), padding, weight)


def _gradient_sums(dy, xhat, unused, padding, weight) -> tuple[Tensor, Tensor]:
    parts = ((dy * xhat).masked_fill(unused, 0.0), dy)
    parameters = torch.stack([_sum_over_tokens(part) for part in parts])
    products = torch.stack([_sum_over_tokens(_real(part, padding)) for part in parts])
    return parameters, products if weight is None else products * weight.to(xhat.dtype)


def gradient(
    dy: Tensor,
    x: Tensor,
    padding: Tensor | None,
    weight: Tensor | None,
    mean: Tensor | None,
    moment: Tensor | None,
    nu: Tensor | None,
    offset: Tensor | None,
    inv_rms: Tensor,
    groups: int,
    eps: float,
    sums: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradient with respect to x, and :func:`gradient_sums` from the same pass if ``sums`` (else empty).

    dh = (dx_hat - 1_M (nu * x_hat + offset)) / D, where 1_M is 1 on real tokens and 0 on padding; ``offset`` goes with
    ``nu``. Through layer-scale, per token and group, dx = (dh - h mean_k(dh_k h_k)) * inv_rms.
    """
    h = _layer_scaled(x, inv_rms, groups)
    xhat, unused = _standardized(h, mean, moment, eps), _unused(dy)
    dh = dy.to(h.dtype)
    if weight is not None:
        dh = dh * weight.to(h.dtype)
    if nu is not None:
        unused = unused & padding.unsqueeze(-1) if padding is not None else torch.zeros_like(unused)
        correction = nu.to(h.dtype) * xhat
        if offset is not None:
            correction = correction + offset.to(h.dtype)
        dh = dh - _real(correction, padding)
    if moment is not None:
        dh = dh / torch.sqrt(moment.to(h.dtype) + eps)
    if groups:
        projection = _grouped(dh * h, groups).mean(-1, keepdim=True)
        dh = ((_grouped(dh, groups) - _grouped(h, groups) * projection) * inv_rms.unsqueeze(-1)).flatten(-2)
    dx = _result(dh.masked_fill(unused, 0.0), dy)
    if not sums:
        return dx, h.new_empty(0), h.new_empty(0)
    return dx, *_gradient_sums(dy.to(h.dtype), xhat, unused, padding, weight)


def share_of_batch(num_batches: Tensor, warmup: int, alpha: float) -> Tensor:
    """Weight w of a batch in a running statistic, s <- s + w (s_B - s); ``num_batches`` are in it already (0-d).

    1 / (num_batches + 1) while ``num_batches < warmup``, which gives the mean of the batches; then 1 - alpha, which
    gives an exponential average.
    """
    return torch.where(num_batches < warmup, 1.0 / (num_batches + 1).double(), 1.0 - alpha)


def running_average(
    moment: Tensor,
    mean: Tensor | None,
    num_batches: Tensor,
    batch_moment: Tensor,
    batch_mean: Tensor | None,
    products: Tensor,
    count: Tensor,
    alpha: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Running statistics after a batch, exponential averages: moment, mean (empty without one) and num_batches.

    ``moment``, ``mean`` (C,) float32 and ``num_batches`` int64 are the running statistics before the batch; the
    other arguments belong to the batch. The running statistics stay as they are if N = ``count`` is 0 or a number of
    the batch is not finite, among them the ``products`` (2, C) of its gradient.
    """
    pairs = [(moment, batch_moment)] + ([] if mean is None else [(mean, batch_mean)])
    finite = [value.float().isfinite().all() for value in (products, *(new for _, new in pairs))]
    counted = (count > 0) & torch.stack(finite).all()
    after = [torch.where(counted, (old + (1.0 - alpha) * (new - old)).float(), old) for old, new in pairs]
    return after[0], moment.new_empty(0) if mean is None else after[1], num_batches + counted


def power_update(
    psi2: Tensor,
    nu: Tensor,
    num_batches: Tensor,
    batch_psi2: Tensor,
    used_psi2: Tensor,
    products: Tensor,
    count: Tensor,
    eps: float,
    warmup: int,
    alpha_fwd: float,
    alpha_bwd: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """The new psi^2, nu and num_batches of PN (Shen et al. 2020, line 4 of both passes of Algorithm 2).

    The state stays as it is if N = ``count`` is 0 or a number of the batch is not finite. ``used_psi2`` is the psi^2 in
    D, and ``products`` (2, C) are the sums over M of dx_hat * x_hat and of dx_hat.
    """
    gamma = batch_psi2 / (used_psi2.to(batch_psi2.dtype) + eps)
    lambda_ = products[0] / count.clamp(min=1.0)
    finite = batch_psi2.float().isfinite().all() & gamma.isfinite().all() & products.isfinite().all()
    counted = (count > 0) & finite
    new_psi2 = psi2 + share_of_batch(num_batches, warmup, alpha_fwd) * (batch_psi2 - psi2)
    new_nu = nu * (1.0 - (1.0 - alpha_bwd) * gamma).clamp(min=0.0) + (1.0 - alpha_bwd) * lambda_
    psi2, nu = torch.where(counted, new_psi2.float(), psi2), torch.where(counted, new_nu.float(), nu)
    return psi2, nu, num_batches + counted


def standardize(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
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

    y = weight * z (gain + gain_slope z) + bias, z = (x - mean) / divisor, divisor = max(sqrt(square_factor * m +
    eps_in_root) + eps_outside, min_divisor), where m is the mean square of x - mean over the group's channels, and mean
    is 0 unless ``centered``. For torch's own differentiation, gain + gain_slope z is a constant, and so is what no
    gradient goes ``through``.

    Returns:
        y, and ``stats`` (3, ..., G): mean, 1 / divisor, and the share c of :func:`standardize_gradient`.
    """
    h = _grouped(x.to(acc_dtype(x)), groups)
    mean = h.mean(-1, keepdim=True) if centered else h.new_zeros(*h.shape[:-1], 1)
    deviation = h - (mean if through_mean else mean.detach())
    second = square_factor * (h - mean).square().mean(-1, keepdim=True) + eps_in_root
    tiny = torch.finfo(h.dtype).tiny  # the root has a derivative from here on
    root = second.clamp(min=tiny).sqrt()
    divisor = (root + eps_outside).clamp(min=min_divisor)
    share = torch.where((second > tiny) & (root + eps_outside >= min_divisor), square_factor * divisor / root, 0.0)
    z = deviation / (divisor if through_divisor else divisor.detach())
    y = (z * (gain + gain_slope * z.detach())).flatten(-2)
    if weight is not None:
        y = y * weight.to(y.dtype)
    if bias is not None:
        y = y + bias.to(y.dtype)
    return _result(y, x), torch.stack([mean, 1 / divisor, share]).squeeze(-1)


def standardize_gradient(
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    stats: Tensor,
    groups: int,
    gain: float,
    gain_slope: float,
    through_mean: bool,
    through_divisor: bool,
    sums: bool,
) -> tuple[Tensor, Tensor]:
    """Gradient of :func:`standardize`, where gain + gain_slope z, and what no gradient goes ``through``, are constants.

    With dz = weight * dy * (gain + gain_slope z) and means over the channels of a group,
    dx = (dz - [through_mean] mean(dz) - [through_divisor] c z mean(dz z)) / divisor.

    Returns:
        dx; and the gradients of weight and bias (2, C), over all tokens, if ``sums``, else an empty tensor.
    """
    mean, inverse, share = stats.unsqueeze(-1)
    z = (_grouped(x.to(stats.dtype), groups) - mean) * inverse
    curved = gain + gain_slope * z
    wide = dy.to(stats.dtype)
    dz = _grouped(wide if weight is None else wide * weight.to(stats.dtype), groups) * curved
    dx = dz
    if through_mean:
        dx = dx - dz.mean(-1, keepdim=True)
    if through_divisor:
        dx = dx - share * z * (dz * z).mean(-1, keepdim=True)
    unused = _unused(dy)
    dx = _result((dx * inverse).flatten(-2).masked_fill(unused, 0.0), x)
    if not sums:
        return dx, stats.new_empty(0)
    products = (wide * (z * curved).flatten(-2)).masked_fill(unused, 0.0)
    return dx, torch.stack([_sum_over_tokens(products), _sum_over_tokens(wide)])


def squash(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, alpha: Tensor, shift: Tensor | None, erf: bool
) -> Tensor:
    """y = weight * f(alpha x + shift) + bias with f = tanh, or ``erf``; alpha and shift have one element."""
    return _result(_squashed(x, alpha, shift, erf, weight, bias)[0], x)


def _squashed(x, alpha, shift, erf, weight, bias) -> tuple[Tensor, Tensor, Tensor]:
    """y, f and its argument, in the accumulation dtype."""
    h = x.to(acc_dtype(x))
    argument = h * alpha.to(h.dtype)
    if shift is not None:
        argument = argument + shift.to(h.dtype)
    value = torch.erf(argument) if erf else torch.tanh(argument)
    y = value if weight is None else value * weight.to(h.dtype)
    return y if bias is None else y + bias.to(h.dtype), value, argument


def squash_gradient(
    dy: Tensor, x: Tensor, weight: Tensor | None, alpha: Tensor, shift: Tensor | None, erf: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of :func:`squash`: dx (..., C); of weight and bias (2, C); of alpha and shift (2,)."""
    x = x.masked_fill(_unused(dy), 0.0)
    _, value, argument = _squashed(x, alpha, shift, erf, None, None)
    wide = dy.to(value.dtype)
    slope = 2 / math.sqrt(math.pi) * torch.exp(-argument.square()) if erf else 1 - value.square()
    inner = (wide if weight is None else wide * weight.to(wide.dtype)) * slope
    parameters = torch.stack([_sum_over_tokens(wide * value), _sum_over_tokens(wide)])
    scalars = torch.stack([(inner * x.to(inner.dtype)).sum(), inner.sum()])
    return _result(inner * alpha.to(inner.dtype), x), parameters, scalars
