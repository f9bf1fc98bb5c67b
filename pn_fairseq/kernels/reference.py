"""What the kernels compute, in plain PyTorch: the definition that the faster implementations are tested against.

Shapes and names, here and in :mod:`pn_fairseq.kernels.ops`:

``x`` (T, B, C) or (N, C), float16, bfloat16, float32 or float64. All arithmetic is in the *wide* type, float64 for
float64 and float32 otherwise, with one rounding of what is returned in the type of ``x``. ``padding_mask`` (B, T) or
(N,) bool, True = padding, or None; M are the real tokens and N is their number. ``groups`` is the number of layer-scale
groups, 0 without layer-scale. ``inv_rms`` (..., G), wide, is the factor 1 / sqrt(mean_k(x_k^2) + eps) of each token
and group, and h = x * inv_rms what layer-scale hands on; without layer-scale h = x. Vectors over channels are (C,).
Arguments that do not keep :mod:`.contract` raise ValueError.

The functions are differentiable where their result is, which the kernels' own gradients are tested against.
"""

from typing import Optional

import torch
from torch import Tensor

from pn_fairseq.kernels.contract import Contract, checked, wide_type

#: Rows of ``vectors``, what a training forward of PN leaves for its backward: sum over M of h^2; psi^2 under the
#: divisor; nu; running psi^2 before the step; psi^2 of the batch.
SQUARES, PSI2_USED, NU, PSI2_BEFORE, PSI2_BATCH = range(5)

#: Rows of ``vectors``, what a training forward of PN-V or BN leaves for its backward: second moment of the batch, about
#: its mean in BN; the running one before the step; and in BN alone the mean of the batch; the running one before.
MOMENT, MOMENT_BEFORE, MEAN, MEAN_BEFORE = range(4)

#: Entries of ``tally``, int64: number of real tokens; whether the step changed the state (0 or 1); whether its batch
#: weighs 1 / number of the step in the running statistics (0 or 1), as in the psi warm-up and in recalibration; number
#: of steps before it.
TOKENS, COUNTED, CUMULATIVE, STEPS_BEFORE = range(4)


def _padding(padding_mask: Tensor) -> Tensor:
    """(B, T) or (N,) -> (T, B, 1) or (N, 1), which broadcasts against the activations."""
    return padding_mask.transpose(0, -1).unsqueeze(-1)


def _as(x: Tensor, values: Tensor) -> Tensor:
    """``values`` in the type and the layout of ``x``."""
    return torch.empty_like(x).copy_(values)


def _over_tokens(values: Tensor) -> Tensor:
    return values.flatten(0, -2).sum(0)


def _split(values: Tensor, groups: int) -> Tensor:
    return values.unflatten(-1, (groups, values.size(-1) // groups))


def inverse_rms(x: Tensor, groups: int, eps: float) -> Tensor:
    """1 / sqrt(mean_k(x_k^2) + eps) of each token and group, (..., G)."""
    h = x.to(wide_type(x))
    if groups == 0:
        return torch.empty_like(h[..., :0])
    return torch.rsqrt(_split(h, groups).square().mean(-1) + eps).contiguous()


def layer_scaled(x: Tensor, inv_rms: Tensor, groups: int) -> Tensor:
    """h = x * inv_rms, wide."""
    h = x.to(wide_type(x))
    if groups == 0:
        return h
    return (_split(h, groups) * inv_rms.unsqueeze(-1)).flatten(-2)


#: Not by the decorator, which TorchScript cannot compile.
_NORMALIZE = Contract(("x", "weight", "bias", "mean", "moment", "inv_rms", "groups"))


def normalize(
    x: Tensor,
    weight: Optional[Tensor],  # noqa: UP045 (TorchScript)
    bias: Optional[Tensor],  # noqa: UP045
    mean: Optional[Tensor],  # noqa: UP045
    moment: Optional[Tensor],  # noqa: UP045
    inv_rms: Optional[Tensor],  # noqa: UP045
    groups: int,
    eps: float,
) -> tuple[Tensor, Tensor]:
    """y = weight * (h - mean) / sqrt(moment + eps) + bias, and ``inv_rms``; empty, (0,), where that is given.

    What is None is left out: all of ``weight``, ``bias``, ``mean`` and ``moment`` in layer-scale alone.
    """
    if not torch.jit.is_scripting():
        _NORMALIZE.check((x, weight, bias, mean, moment, inv_rms, groups))
    scales = inverse_rms(x, groups, eps) if inv_rms is None else inv_rms
    h = layer_scaled(x, scales, groups)
    wide = h.dtype
    if mean is not None:
        h = h - mean.to(wide)
    if moment is not None:
        scale = 1.0 / torch.sqrt(moment.to(wide) + eps)
        if weight is not None:
            scale = weight.to(wide) * scale
        h = h * scale if bias is None else torch.addcmul(bias.to(wide), h, scale)
        return _as(x, h), scales if inv_rms is None else scales.new_empty(0)
    if weight is not None:
        h = h * weight.to(wide)
    if bias is not None:
        h = h + bias.to(wide)
    return _as(x, h), scales if inv_rms is None else scales.new_empty(0)


@checked
def moments(
    x: Tensor, padding_mask: Tensor | None, groups: int, eps: float, centered: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Sums over tokens: ``inv_rms``, mean (C,), squares (2, C) and the number of real tokens (0-d), all wide.

    ``squares`` holds the sums of h^2 over the real tokens and over the padding. ``centered``: the mean is that of h
    over the real tokens (0 if there are none) and the squares are (h - mean)^2; else the mean is empty, (0,).
    """
    inv_rms = inverse_rms(x, groups, eps)
    h = layer_scaled(x, inv_rms, groups)
    if padding_mask is None:
        padding = torch.zeros((), dtype=torch.bool, device=x.device)
        count = torch.full((), h.shape[:-1].numel(), dtype=h.dtype, device=x.device)
    else:
        padding = _padding(padding_mask)
        count = padding.logical_not().sum().to(h.dtype)
    mean = h.new_empty(0)
    if centered:
        mean = _over_tokens(h.masked_fill(padding, 0.0)) / count.clamp(min=1.0)
        h = h - mean
    real = _over_tokens(h.masked_fill(padding, 0.0).square())
    rest = _over_tokens(h.masked_fill(padding.logical_not(), 0.0).square())
    return inv_rms, mean, torch.stack([real, rest]), count


@checked
def gradient_sums(
    dy: Tensor, x: Tensor, padding_mask: Tensor | None, mean: Tensor | None, inv_rms: Tensor, groups: int
) -> Tensor:
    """Sums over the real tokens and over the padding of dy * (h - mean) and of dy: (2, 2, C), wide."""
    h = layer_scaled(x, inv_rms, groups)
    dy = dy.to(h.dtype)
    if mean is not None:
        h = h - mean.to(h.dtype)
    parts = [dy * h, dy]
    if padding_mask is None:
        real = torch.stack([_over_tokens(part) for part in parts])
        return torch.stack([real, torch.zeros_like(real)])
    padding = _padding(padding_mask)
    return torch.stack(
        [
            torch.stack([_over_tokens(part.masked_fill(out, 0.0)) for part in parts])
            for out in (padding, padding.logical_not())
        ]
    )


@checked
def gradient(
    dy: Tensor,
    x: Tensor,
    padding_mask: Tensor | None,
    scale: Tensor | None,
    slope: Tensor | None,
    offset: Tensor | None,
    mean: Tensor | None,
    inv_rms: Tensor,
    groups: int,
    sums: bool,
) -> tuple[Tensor, Tensor]:
    """Gradient with respect to ``x``, and :func:`gradient_sums` from the same pass if ``sums`` (else empty).

    dh = scale * dy - 1_M (slope * (h - mean) + offset), and through layer-scale, per token and group,
    dx = (dh - h mean_k(dh_k h_k)) * inv_rms.

    Without ``slope`` there is no correction, so that ``offset`` and ``padding_mask`` are not looked at for dx.
    """
    h = layer_scaled(x, inv_rms, groups)
    dh = dy.to(h.dtype)
    if scale is not None:
        dh = dh * scale.to(h.dtype)
    if slope is not None:
        correction = slope.to(h.dtype) * (h if mean is None else h - mean.to(h.dtype))
        if offset is not None:
            correction = correction + offset.to(h.dtype)
        if padding_mask is not None:
            correction = correction.masked_fill(_padding(padding_mask), 0.0)
        dh = dh - correction
    if groups:
        projection = _split(dh * h, groups).mean(-1, keepdim=True)
        dh = (_split(dh, groups) - _split(h, groups) * projection).mul(inv_rms.unsqueeze(-1)).flatten(-2)
    total = gradient_sums(dy, x, padding_mask, mean, inv_rms, groups) if sums else h.new_empty(0)
    return _as(x, dh), total


@checked
def power_forward(
    x: Tensor,
    padding_mask: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    running_psi2: Tensor,
    nu: Tensor,
    steps: Tensor,
    groups: int,
    eps: float,
    alpha: float,
    warmup: int,
    update: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """A training forward of PN (Shen et al. 2020, Algorithm 2): y, ``inv_rms``, ``vectors`` (5, C) and ``tally`` (4,).

    The step is in the psi warm-up if ``steps < warmup``: it is normalized with the psi of the batch, if that has a real
    token, and weighs 1 / number of the step in the running psi^2; else with the running psi, and weighs 1 - alpha.
    With ``update``, ``running_psi2`` and ``steps`` are advanced in place, unless the batch has no real token or a
    psi^2 that is not finite.
    """
    inv_rms, _, squares, count = moments(x, padding_mask, groups, eps, False)
    wide = squares.dtype
    batch = squares[0] / count.clamp(min=1.0)
    before = running_psi2.to(wide, copy=True)
    warming_up = steps < warmup
    used = torch.where(warming_up & (count > 0), batch, before)
    y, _ = normalize(x, weight, bias, None, used, inv_rms, groups, eps)
    vectors = torch.stack([squares[0], used, nu.to(wide), before, batch])
    return y, inv_rms, vectors, _count_in([(running_psi2, batch)], count, steps, alpha, warming_up, update)


def _count_in(
    statistics: list[tuple[Tensor, Tensor]],
    count: Tensor,
    steps: Tensor,
    alpha: float,
    cumulative: Tensor,
    update: bool,
) -> Tensor:
    """The ``tally`` of a step; with ``update``, its statistics are taken into the running ones.

    ``statistics`` are pairs of a running statistic and that of the batch, ``count`` the number of real tokens.
    """
    batches = [batch.to(running.dtype) for running, batch in statistics]
    counted = (count > 0) & torch.stack([batch.isfinite().all() for batch in batches]).all()
    tally = torch.stack([count.to(torch.int64), counted.to(torch.int64), cumulative.to(torch.int64), steps])
    if update:
        share = torch.where(cumulative, 1.0 / (steps + 1), 1.0 - alpha)
        for (running, _), batch in zip(statistics, batches, strict=True):
            running.copy_(torch.where(counted, running + share * (batch - running), running))
        steps.add_(counted)
    return tally


def _take_back(statistics: list[tuple[Tensor, Tensor]], steps: Tensor, tally: Tensor, finite: Tensor) -> None:
    """Undo the latest step where its gradient is not ``finite``, given pairs of a running statistic and the old one."""
    for running, before in statistics:
        running.copy_(torch.where(finite, running, before.to(running.dtype)))
    steps.copy_(torch.where(finite, steps, tally[STEPS_BEFORE]))
    tally[COUNTED].mul_(finite)


def parameter_gradients(x: Tensor, weight: Tensor | None, sums: Tensor, root: Tensor) -> tuple[Tensor, Tensor]:
    """d weight and d bias from :func:`gradient_sums` and what h is divided by; empty without."""
    if weight is None:
        return x.new_empty(0), x.new_empty(0)
    product, plain = sums.sum(0).unbind()
    return (product / root).to(weight.dtype), plain.to(weight.dtype)


@checked
def power_backward(
    dy: Tensor,
    x: Tensor,
    padding_mask: Tensor | None,
    weight: Tensor | None,
    inv_rms: Tensor,
    vectors: Tensor,
    running_psi2: Tensor,
    nu: Tensor,
    steps: Tensor,
    tally: Tensor,
    groups: int,
    eps: float,
    alpha: float,
    update: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The backward of :func:`power_forward`: dx, d weight, d bias (empty without) and Lambda's sum over M, (C,) wide.

    With D = sqrt(psi2_used + eps) and x_hat = h / D: dh = (weight * dy - 1_M nu * x_hat) / D, where nu is that of the
    forward, and Lambda = mean over M of weight * dy * x_hat. With ``update`` the present ``nu`` is advanced in place,

        nu <- nu * max(0, 1 - (1 - alpha) Gamma) + (1 - alpha) Lambda,    Gamma = psi2_batch / D^2,

    unless there is no real token or one of Gamma and Lambda is not finite. In the latter case the step is taken back,
    too: ``running_psi2`` and ``steps`` become what they were before it, so no other step may have come after it.
    """
    wide = wide_type(x)
    divisor2 = vectors[PSI2_USED] + eps
    root = torch.sqrt(divisor2)
    gain = torch.ones_like(root) if weight is None else weight.to(wide)
    scale = gain / root
    slope = vectors[NU] / divisor2
    dx, sums = gradient(dy, x, padding_mask, scale, slope, None, None, inv_rms, groups, True)
    lambda_total = scale * sums[0, 0]
    dweight, dbias = parameter_gradients(dx, weight, sums, root)
    if update:
        tokens = tally[TOKENS]
        gamma_moment = vectors[PSI2_BATCH] / divisor2
        lambda_moment = lambda_total / tokens.clamp(min=1)
        finite = gamma_moment.isfinite().all() & lambda_moment.isfinite().all()
        moved = nu * (1.0 - (1.0 - alpha) * gamma_moment).clamp(min=0.0) + (1.0 - alpha) * lambda_moment
        nu.copy_(torch.where(finite & (tokens > 0), moved, nu.to(wide)))
        _take_back([(running_psi2, vectors[PSI2_BEFORE])], steps, tally, finite)
    return dx, dweight, dbias, lambda_total


def unbiased(variance: Tensor, count: Tensor) -> Tensor:
    """The unbiased variance, given the biased one of ``count`` tokens. Not finite for one token."""
    return variance * (count / (count - 1.0))


@checked
def batch_forward(
    x: Tensor,
    padding_mask: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_moment: Tensor,
    steps: Tensor,
    groups: int,
    eps: float,
    alpha: float,
    cumulative: bool,
    update: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """A training forward of BN, or of PN-V without ``running_mean``: y, ``inv_rms``, ``vectors`` and ``tally`` (4,).

    y = weight * (h - mean) / sqrt(moment + eps) + bias, where mean and moment = mean over M of (h - mean)^2 are those
    of the real tokens (0 if there are none); the mean is left out in PN-V. ``vectors`` is (4, C), (2, C) in PN-V.

    With ``update``, the running statistics and ``steps`` are advanced in place, unless the batch has no real token or
    statistics that are not finite. The batch weighs 1 - alpha, or 1 / number of the step if ``cumulative``; the running
    moment of BN is that of the unbiased variances, of which a batch of one token has none.
    """
    centered = running_mean is not None
    inv_rms, mean, squares, count = moments(x, padding_mask, groups, eps, centered)
    moment = squares[0] / count.clamp(min=1.0)
    y, _ = normalize(x, weight, bias, mean if centered else None, moment, inv_rms, groups, eps)
    rows = [moment, running_moment.to(moment.dtype)]
    statistics = [(running_moment, unbiased(moment, count) if centered else moment)]
    if centered:
        rows += [mean, running_mean.to(mean.dtype)]
        statistics.append((running_mean, mean))
    vectors, by_number = torch.stack(rows), torch.full_like(steps, cumulative, dtype=torch.bool)
    return y, inv_rms, vectors, _count_in(statistics, count, steps, alpha, by_number, update)


def exact_gradient(
    weight: Tensor | None, moment: Tensor, total: Tensor, count: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """``scale``, ``slope`` and ``offset`` with which :func:`gradient` differentiates through statistics of the batch.

    ``moment`` (C,) is that of the ``count`` real tokens; ``total`` (2, C) are the sums over them of dy * (h - mean) and
    of dy. The offset is that of BN: PN-V has none.
    """
    root = torch.sqrt(moment + eps)
    scale = 1.0 / root if weight is None else weight.to(root.dtype) / root
    along, across = (total / count.clamp(min=1)).unbind()
    return scale, scale * along / (root * root), scale * across


@checked
def batch_backward(
    dy: Tensor,
    x: Tensor,
    padding_mask: Tensor | None,
    weight: Tensor | None,
    inv_rms: Tensor,
    vectors: Tensor,
    running_mean: Tensor | None,
    running_moment: Tensor,
    steps: Tensor,
    tally: Tensor,
    groups: int,
    eps: float,
    update: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The exact gradient of :func:`batch_forward`: dx, d weight, d bias (empty without), and sums over M, (2, C) wide.

    With D = sqrt(moment + eps) and x_hat = (h - mean) / D, where ``mean`` is left out in PN-V,

        dh = weight / D * (dy - 1_M (x_hat mean_M(dy x_hat) + mean_M(dy))).

    The sums are those of dy * (h - mean) and of dy. With ``update``, the step is taken back if one of them is not
    finite: the running statistics and ``steps`` become what they were before it, so no other step may have come after.
    """
    centered = running_mean is not None
    mean, moment = vectors[MEAN] if centered else None, vectors[MOMENT]
    sums = gradient_sums(dy, x, padding_mask, mean, inv_rms, groups)
    total = sums[0].clone()
    scale, slope, offset = exact_gradient(weight, moment, total, tally[TOKENS], eps)
    offset = offset if centered else None
    dx, _ = gradient(dy, x, padding_mask, scale, slope, offset, mean, inv_rms, groups, False)
    if update:
        before = [(running_moment, vectors[MOMENT_BEFORE])]
        if centered:
            before.append((running_mean, vectors[MEAN_BEFORE]))
        _take_back(before, steps, tally, total.isfinite().all())
    return dx, *parameter_gradients(dx, weight, sums, torch.sqrt(moment + eps)), total
