"""The operators ``torch.ops.pn_fairseq.*``: schemas, shapes for tracing, gradients.

Every implementation registers its functions for its device under these schemas, and :mod:`.reference` serves the
devices that have none; what they compute is documented there. Tensors of activations may have any strides over time
and batch; results have the strides that ``torch.empty_like(x)`` gives.

====================  =============================================================================================
``normalize``         y from given statistics: evaluation, layer-scale, a training step in parts. Has a gradient.
``moments``           sums over tokens in forward: the first phase of a training step in parts
``gradient_sums``     sums over tokens in backward: its first phase in PN-V and BN in parts
``gradient``          dx from given vectors, and the sums over tokens from the same pass
``power_forward``     a whole training forward of PN, running statistic included
``power_backward``    a whole training backward of PN, running statistics included
``batch_forward``     a whole training forward of PN-V or BN, running statistics included
``batch_backward``    a whole training backward of PN-V or BN, taking the step back included
====================  =============================================================================================
"""

import torch
from torch import Tensor

from pn_fairseq.kernels import reference
from pn_fairseq.kernels.reference import wide_type

NAMESPACE = "pn_fairseq"

SCHEMAS = {
    "normalize": "(Tensor x, Tensor? weight, Tensor? bias, Tensor? mean, Tensor? moment, Tensor? inv_rms, int groups, "
    "float eps) -> (Tensor y, Tensor inv_rms)",
    "moments": "(Tensor x, Tensor? padding_mask, int groups, float eps, bool centered) -> (Tensor inv_rms, "
    "Tensor mean, Tensor squares, Tensor count)",
    "gradient_sums": "(Tensor dy, Tensor x, Tensor? padding_mask, Tensor? mean, Tensor inv_rms, int groups) -> Tensor",
    "gradient": "(Tensor dy, Tensor x, Tensor? padding_mask, Tensor? scale, Tensor? slope, Tensor? offset, "
    "Tensor? mean, Tensor inv_rms, int groups, bool sums) -> (Tensor dx, Tensor sums)",
    "power_forward": "(Tensor x, Tensor? padding_mask, Tensor? weight, Tensor? bias, Tensor(a!) running_psi2, "
    "Tensor nu, Tensor(b!) steps, int groups, float eps, float alpha, int warmup, bool update) -> (Tensor y, "
    "Tensor inv_rms, Tensor vectors, Tensor tally)",
    "power_backward": "(Tensor dy, Tensor x, Tensor? padding_mask, Tensor? weight, Tensor inv_rms, Tensor vectors, "
    "Tensor(a!) running_psi2, Tensor(b!) nu, Tensor(c!) steps, Tensor(d!) tally, int groups, float eps, float alpha, "
    "bool update) -> (Tensor dx, Tensor dweight, Tensor dbias, Tensor lambda_total)",
    "batch_forward": "(Tensor x, Tensor? padding_mask, Tensor? weight, Tensor? bias, Tensor(a!)? running_mean, "
    "Tensor(b!) running_moment, Tensor(c!) steps, int groups, float eps, float alpha, bool cumulative, bool update) -> "
    "(Tensor y, Tensor inv_rms, Tensor vectors, Tensor tally)",
    "batch_backward": "(Tensor dy, Tensor x, Tensor? padding_mask, Tensor? weight, Tensor inv_rms, Tensor vectors, "
    "Tensor(a!)? running_mean, Tensor(b!) running_moment, Tensor(c!) steps, Tensor(d!) tally, int groups, float eps, "
    "bool update) -> (Tensor dx, Tensor dweight, Tensor dbias, Tensor sums)",
}

_library = torch.library.Library(NAMESPACE, "DEF")
for _name, _schema in SCHEMAS.items():
    _library.define(_name + _schema)


def qualified(name: str) -> str:
    return f"{NAMESPACE}::{name}"


for _name in SCHEMAS:
    _library.impl(_name, getattr(reference, _name), "CompositeExplicitAutograd")


def _scales_of(x: Tensor, groups: int) -> Tensor:
    return x.new_empty((*x.shape[:-1], groups), dtype=wide_type(x))


@torch.library.register_fake(qualified("normalize"))
def _(x, weight, bias, mean, moment, inv_rms, groups, eps):
    return torch.empty_like(x), _scales_of(x, groups) if inv_rms is None else x.new_empty(0, dtype=wide_type(x))


@torch.library.register_fake(qualified("moments"))
def _(x, padding_mask, groups, eps, centered):
    wide, channels = wide_type(x), x.size(-1)
    return (
        _scales_of(x, groups),
        x.new_empty(channels if centered else 0, dtype=wide),
        x.new_empty((2, channels), dtype=wide),
        x.new_empty((), dtype=wide),
    )


@torch.library.register_fake(qualified("gradient_sums"))
def _(dy, x, padding_mask, mean, inv_rms, groups):
    return x.new_empty((2, 2, x.size(-1)), dtype=wide_type(x))


@torch.library.register_fake(qualified("gradient"))
def _(dy, x, padding_mask, scale, slope, offset, mean, inv_rms, groups, sums):
    return torch.empty_like(x), x.new_empty((2, 2, x.size(-1)) if sums else 0, dtype=wide_type(x))


@torch.library.register_fake(qualified("power_forward"))
def _(x, padding_mask, weight, bias, running_psi2, nu, steps, groups, eps, alpha, warmup, update):
    vectors = x.new_empty((5, x.size(-1)), dtype=wide_type(x))
    return torch.empty_like(x), _scales_of(x, groups), vectors, x.new_empty(4, dtype=torch.int64)


@torch.library.register_fake(qualified("batch_forward"))
def _(x, padding_mask, weight, bias, running_mean, running_moment, steps, groups, eps, alpha, cumulative, update):
    vectors = x.new_empty((2 if running_mean is None else 4, x.size(-1)), dtype=wide_type(x))
    return torch.empty_like(x), _scales_of(x, groups), vectors, x.new_empty(4, dtype=torch.int64)


def _like_parameters(x: Tensor, weight: Tensor | None) -> list[Tensor]:
    return [x.new_empty(0) if weight is None else torch.empty_like(weight) for _ in range(2)]


@torch.library.register_fake(qualified("power_backward"))
def _(dy, x, padding_mask, weight, inv_rms, vectors, running_psi2, nu, steps, tally, groups, eps, alpha, update):
    return torch.empty_like(x), *_like_parameters(x, weight), x.new_empty(x.size(-1), dtype=wide_type(x))


@torch.library.register_fake(qualified("batch_backward"))
def _(dy, x, padding_mask, weight, inv_rms, vectors, running_mean, running_moment, steps, tally, groups, eps, update):
    return torch.empty_like(x), *_like_parameters(x, weight), x.new_empty((2, x.size(-1)), dtype=wide_type(x))


# The gradient of normalize.


def _save(ctx, inputs, output):
    x, weight, bias, mean, moment, inv_rms, ctx.groups, ctx.eps = inputs
    # Running statistics may move on before the backward pass, which is about these.
    mean, moment = (value if value is None or value.requires_grad else value.clone() for value in (mean, moment))
    ctx.save_for_backward(x, weight, bias, mean, moment, output[1] if inv_rms is None else inv_rms)
    ctx.mark_non_differentiable(output[1])


def _normalize_backward(ctx, dy, _):
    x, weight, bias, mean, moment, inv_rms = ctx.saved_tensors
    nothing = (None, None, None)  # for inv_rms, groups, eps
    if torch.is_grad_enabled():  # the gradient is to be differentiated in its turn
        inputs = (x, weight, bias, mean, moment)
        wanted = [number for number in range(5) if ctx.needs_input_grad[number]]
        y, _ = reference.normalize(*inputs, None, ctx.groups, ctx.eps)
        found = torch.autograd.grad(y, [inputs[number] for number in wanted], dy, create_graph=True)
        gradients = dict(zip(wanted, found, strict=True))
        return *(gradients.get(number) for number in range(5)), *nothing
    wide = wide_type(x)
    root = None if moment is None else torch.sqrt(moment.to(wide) + ctx.eps)
    scale = None if weight is None else weight.to(wide)
    if root is not None:
        scale = 1.0 / root if scale is None else scale / root
    sums = any(ctx.needs_input_grad[1:5])
    dx, total = torch.ops.pn_fairseq.gradient(dy, x, None, scale, None, None, mean, inv_rms, ctx.groups, sums)
    dweight = dbias = dmean = dmoment = None
    if sums:
        product, plain = total[0].unbind()  # without a mask all tokens are real
        if ctx.needs_input_grad[1]:
            dweight = (product if root is None else product / root).to(weight.dtype)
        if ctx.needs_input_grad[2]:
            dbias = plain.to(bias.dtype)
        if ctx.needs_input_grad[3]:
            dmean = (-plain if scale is None else -plain * scale).to(mean.dtype)
        if ctx.needs_input_grad[4]:
            dmoment = (-0.5 * product * scale / (root * root)).to(moment.dtype)
    return dx, dweight, dbias, dmean, dmoment, *nothing


torch.library.register_autograd(qualified("normalize"), _normalize_backward, setup_context=_save)


# How the norms call them.

normalize_op = torch.ops.pn_fairseq.normalize.default
moments = torch.ops.pn_fairseq.moments.default
gradient_sums = torch.ops.pn_fairseq.gradient_sums.default
gradient = torch.ops.pn_fairseq.gradient.default
power_forward = torch.ops.pn_fairseq.power_forward.default
power_backward = torch.ops.pn_fairseq.power_backward.default
batch_forward = torch.ops.pn_fairseq.batch_forward.default
batch_backward = torch.ops.pn_fairseq.batch_backward.default


def normalize(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor | None,
    moment: Tensor | None,
    inv_rms: Tensor | None,
    groups: int,
    eps: float,
) -> tuple[Tensor, Tensor]:
    """:func:`.reference.normalize`, by the fastest implementation; inside a transform of ``torch.func`` by itself."""
    function = reference.normalize if torch._C._are_functorch_transforms_active() else normalize_op
    return function(x, weight, bias, mean, moment, inv_rms, groups, eps)
