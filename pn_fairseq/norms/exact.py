"""Normalization by the batch's own statistics with the exact gradient: what PN-V and BN have in common."""

import torch
from torch import Tensor

from pn_fairseq import kernels
from pn_fairseq.kernels import reference
from pn_fairseq.norms.pending import Step
from pn_fairseq.norms.workers import differentiable_sum


def normalize_exactly(
    norm,
    x: Tensor,
    padding_mask: Tensor | None,
    mean: Tensor | None,
    moment: Tensor,
    count: Tensor,
    inv_rms: Tensor,
    step: Step,
) -> Tensor:
    r"""y = weight (h - mean) / sqrt(moment + eps) + bias, where the statistics are those of the real tokens of h.

    With :math:`\hat x` the normalized activations and D the root, real tokens get the gradient

    .. math:: \mathrm{d}h = \gamma / D\,(\mathrm{d}y - \hat x\,\mathrm{mean}_M(\mathrm{d}y\,\hat x)
        - 1_\mathrm{BN}\,\mathrm{mean}_M(\mathrm{d}y))

    (Shen et al. 2020, Eq. 6 and Eq. 3) and padding :math:`\gamma\,\mathrm{d}y / D`: it is divided by the statistics and
    takes no part in their gradient. The backward pass ends ``step``.

    Args:
        norm: the :class:`~pn_fairseq.norms.base.RunningNorm`, with its affine parameters and workers.
        x: activations before layer-scale, which ``inv_rms`` makes h.
        mean, moment: statistics of the batch, (C,); ``mean`` is None for PN-V, whose moment is about 0.
        count: number of real tokens, 0-d; over all workers, as are the statistics.
    """
    return _ExactGradient.apply(x, norm.weight, norm.bias, padding_mask, mean, moment, count, inv_rms, norm, step)


class _ExactGradient(torch.autograd.Function):
    @staticmethod
    def forward(x, weight, bias, padding_mask, mean, moment, count, inv_rms, norm, step):
        return kernels.normalize(x, weight, bias, mean, moment, inv_rms, norm.layer_scale.groups, norm.eps)[0]

    @staticmethod
    def setup_context(ctx, inputs, output):
        *tensors, ctx.norm, ctx.step = inputs
        ctx.save_for_backward(*tensors)

    @staticmethod
    def backward(ctx, dy):
        x, weight, bias, padding_mask, mean, moment, count, inv_rms = ctx.saved_tensors
        norm, groups = ctx.norm, ctx.norm.layer_scale.groups
        nothing = (None,) * 7
        with torch.no_grad():
            local = kernels.gradient_sums(dy, x, padding_mask, mean, inv_rms, groups)
            total = norm.sum_over_workers(local[0])
            if norm.begin_backward(ctx.step):
                # One gradient that is not finite, on any worker, makes the sums so.
                norm.settle(ctx.step, total.isfinite().all())
        if torch.is_grad_enabled():  # the gradient is to be differentiated in its turn
            y = _formula(norm, x, weight, bias, padding_mask, mean is not None)
            wanted = [number for number in range(3) if ctx.needs_input_grad[number]]
            found = torch.autograd.grad(y, [(x, weight, bias)[number] for number in wanted], dy, create_graph=True)
            gradients = dict(zip(wanted, found, strict=True))
            return *(gradients.get(number) for number in range(3)), *nothing
        root = torch.sqrt(moment + norm.eps)
        scale = 1.0 / root if weight is None else weight.to(root.dtype) / root
        along, across = (total / count.clamp(min=1.0)).unbind()
        slope = scale * along / (root * root)
        offset = None if mean is None else scale * across
        dx, _ = kernels.gradient(dy, x, padding_mask, scale, slope, offset, mean, inv_rms, groups, False)
        dweight = dbias = None
        if weight is not None:
            product, plain = local.sum(0).unbind()
            dweight, dbias = (product / root).to(weight.dtype), plain.to(bias.dtype)
        return dx, dweight, dbias, *nothing


def _formula(norm, x, weight, bias, padding_mask, centered: bool) -> Tensor:
    """The same by operations that autograd can differentiate any number of times."""
    groups = norm.layer_scale.groups
    h = reference.layer_scaled(x, reference.inverse_rms(x, groups, norm.eps), groups)
    padding = torch.zeros_like(h[..., :1], dtype=torch.bool)
    if padding_mask is not None:
        padding = padding | padding_mask.transpose(0, -1).unsqueeze(-1)

    def mean_over_real(values: Tensor) -> Tensor:
        total = torch.cat([values.masked_fill(padding, 0.0).flatten(0, -2).sum(0), (~padding).sum()[None]])
        if norm.synchronises():
            total = differentiable_sum(total, norm.process_group)
        return total[:-1] / total[-1].clamp(min=1.0)

    mean = mean_over_real(h) if centered else h.new_zeros(h.size(-1))
    root = torch.sqrt(mean_over_real((h - mean).square()) + norm.eps)
    y = torch.where(padding, (h - mean.detach()) / root.detach(), (h - mean) / root)
    if weight is not None:
        y = y * weight.to(y.dtype) + bias.to(y.dtype)
    return y.to(x.dtype)
