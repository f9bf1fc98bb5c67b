"""The tokens of one batch, as the forward and backward pass of a norm see them."""

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from pn_fairseq import kernels
from pn_fairseq.norms.distributed import all_reduce_sum


class Moments(NamedTuple):
    """Statistics of a batch over its real tokens, per channel, in the accumulation dtype.

    Attributes:
        mean: (C,); None where the moment is about 0.
        moment: the second moment about the mean (biased), (C,).
        count: number of real tokens N, 0-d; 0 makes mean and moment 0.
        reduced: whether they are over all ranks, if the norm is synchronized. Without synchronization always true.
    """

    mean: Tensor | None
    moment: Tensor
    count: Tensor
    reduced: bool


@dataclass(slots=True)
class Contribution:
    """What one training step contributes to the state: results of its forward and backward.

    A norm that keeps more between its passes declares it in a subclass, :attr:`.RunningNorm.contribution_type`, with
    default values.

    Attributes:
        version, buffers: the version of the state in the forward, and the identities of the buffers.
        batch: :class:`Moments` of the batch. In ``update`` they are over all ranks.
        products: (2, C), sums over the real tokens of dx_hat * x_hat and of dx_hat, where dx_hat = weight * dy / s with
            the loss scale s; in ``update`` over all ranks. Divide them by ``batch.count`` for means.
        products_reduced: whether the products have been summed over the ranks.
        has_gradient: whether a backward has run. Otherwise the products are 0.
        sums, work: the sums of :meth:`start_sum` and its asynchronous all-reduce.
    """

    version: int | None = None
    buffers: list[int] | None = None
    batch: Moments | None = None
    products: Tensor | None = None
    products_reduced: bool = False
    has_gradient: bool = True
    sums: Tensor | None = None
    work: object = None

    def start_sum(self, group) -> None:
        """Start the sum over the ranks of ``group`` of what is not yet over all ranks."""
        if self.batch.reduced and self.products_reduced:
            return
        local = [] if self.batch.reduced else [self.batch.moment * self.batch.count]
        local += [] if self.products_reduced else [*self.products]
        self.sums = torch.cat([*local, self.batch.count[None]])
        self.work = dist.all_reduce(self.sums, group=group, async_op=True)

    def finish_sum(self) -> None:
        """Wait for :meth:`start_sum`."""
        if self.work is None:
            return
        self.work.wait()
        channels = self.batch.moment.numel()
        *parts, count = self.sums.split([channels] * (self.sums.numel() // channels) + [1])
        if not self.batch.reduced:
            self.batch = Moments(None, parts.pop(0) / count.clamp(min=1.0), count[0], reduced=True)
        if not self.products_reduced:
            self.products = torch.stack(parts)
        self.sums = self.work = None  # a handle of a collective call cannot be copied


class Tokens:
    """The tokens of one batch with their mask and layer-scale; statistics are over all ranks in a synchronized norm.

    h denotes the layer-scaled activations, D = sqrt(moment + eps), x_hat = (h - mean) / D, dx_hat = weight * dy / s
    with the loss scale s (:func:`.set_loss_scale`; 1 without): what the state keeps of gradients does not depend on s.
    ``weight`` and ``bias`` belong to the norm unless an argument takes their place.

    Attributes:
        weight, bias: (C,) parameters of the norm, or None.
        further: the parameters of :meth:`.RunningNorm.further_parameters`.
        num_features: number of channels C.
        contribution: the :class:`Contribution` that they belong to.
        padding: the mask in the order of x, contiguous, or None; the backward gets the mask of its forward.
        inv_rms: factors of layer-scale, (..., G); None before a forward has computed them.
    """

    def __init__(
        self,
        norm,
        contribution: Contribution,
        x: Tensor,
        padding_mask: Tensor | None,
        weight,
        bias,
        further: Sequence[Tensor] = (),
        inv_rms=None,
        dy=None,
        loss_scale: float | Tensor | None = None,
    ):
        self._norm, self.contribution = norm, contribution
        self.weight, self.bias, self.num_features = weight, bias, norm.num_features
        self._groups, self._eps = norm.layer_scale_groups, norm.eps
        self._x, self._dy, self._loss_scale = x, dy, loss_scale
        self.padding = padding_mask
        if inv_rms is None and padding_mask is not None:  # a forward: from the order of the mask to that of x
            turned = padding_mask.dim() == 2 and not norm.batch_first
            self.padding = (padding_mask.t() if turned else padding_mask).contiguous()
        self.inv_rms, self.further = inv_rms, further

    def with_padding(self) -> "Tokens":
        """A copy whose statistics include padding: it has no mask, so all tokens count as real.

        On a rank that repeats a batch the mask stays; there the mask of a synchronized norm excludes every token.
        """
        unmasked = copy(self)
        if not self._norm.ignoring:
            unmasked.padding = None
        return unmasked

    def moments(self, centered: bool = False) -> Moments:
        """Statistics of the batch before anything is normalized, over all ranks; also ``contribution.batch``.

        ``centered``: the mean, and the second moment about it; otherwise the second moment about 0.
        """
        self.inv_rms, mean, moment, count = kernels.moments(self._x, self.padding, self._groups, self._eps, centered)
        batch = Moments(mean if centered else None, moment, count, reduced=True)
        if self._norm.synchronises():
            batch = _reduced(batch, self._norm.process_group)
        self.contribution.batch = batch
        return batch

    def normalize(
        self,
        moment: Tensor,
        mean: Tensor | None = None,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        moments: bool = False,
    ) -> Tensor:
        """y = weight * x_hat + bias.

        ``moments``: the same pass computes ``contribution.batch``, the second moment about 0 of this rank's tokens. The
        backward starts the sum over all ranks, which enters the state; the forward does not wait for it.
        """
        y, inv_rms, batch_moment, count = kernels.normalize(
            self._x,
            self.weight if weight is None else weight,
            self.bias if bias is None else bias,
            mean,
            moment,
            self.padding,
            self.inv_rms,
            self._groups,
            self._eps,
            moments,
        )
        if self.inv_rms is None:
            self.inv_rms = inv_rms
        if moments:
            self.contribution.batch = Moments(None, batch_moment, count, reduced=not self._norm.synchronises())
        return y

    def gradient_sums(
        self, moment: Tensor, mean: Tensor | None = None, weight: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """The sums over tokens that are needed before dx: ``parameters`` and ``products``, each (2, C).

        ``parameters``: the sums of dy * x_hat and of dy over all tokens of this rank, the gradients of weight and bias.
        ``products``: the sums of dx_hat * x_hat and of dx_hat over the real tokens of all ranks; also
        ``contribution.products``.
        """
        weight = self.weight if weight is None else weight
        parameters, products = kernels.gradient_sums(
            self._dy, self._x, self.padding, weight, mean, moment, None, self.inv_rms, self._groups, self._eps
        )
        products = self._over_loss_scale(products)
        if self._norm.synchronises():
            products = all_reduce_sum(products, self._norm.process_group)
        self.contribution.products, self.contribution.products_reduced = products, True
        return parameters, products

    def gradient(
        self,
        moment: Tensor,
        mean: Tensor | None = None,
        nu: Tensor | None = None,
        offset: Tensor | None = None,
        weight: Tensor | None = None,
        sums: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """dx, where dh = s (dx_hat - 1_M (nu * x_hat + offset)) / D and 1_M is 1 on real tokens and 0 on padding.

        ``sums``: the same pass also gives ``parameters`` as in :meth:`gradient_sums`, and as ``contribution.products``
        the sums over this rank's tokens, which enter the state summed over all ranks. Otherwise the second result is
        empty.
        """
        weight = self.weight if weight is None else weight
        dx, parameters, products = kernels.gradient(
            self._dy,
            self._x,
            self.padding,
            weight,
            mean,
            moment,
            self._times_loss_scale(nu),
            self._times_loss_scale(offset),
            None,
            None,
            self.inv_rms,
            self._groups,
            self._eps,
            sums,
        )
        if sums:
            self.contribution.products = self._over_loss_scale(products)
            self.contribution.products_reduced = not self._norm.synchronises()
        return dx, parameters

    def _times_loss_scale(self, vector: Tensor | None) -> Tensor | None:
        return vector if vector is None or self._loss_scale is None else vector * self._loss_scale

    def _over_loss_scale(self, products: Tensor) -> Tensor:
        return products if self._loss_scale is None else products / self._loss_scale


def _reduced(batch: Moments, group) -> Moments:
    """Moments of the tokens of all ranks.

    A second moment about the mean of a rank is moved to the mean of all ranks. The second moment about 0 minus the
    squared mean would lose precision.
    """
    sums = batch.count * (batch.moment if batch.mean is None else batch.mean)
    total, count = all_reduce_sum(torch.cat([sums, batch.count[None]]), group).split((sums.numel(), 1))
    tokens = count[0].clamp(min=1.0)
    if batch.mean is None:
        return Moments(None, total / tokens, count[0], reduced=True)
    mean = total / tokens
    squares = batch.count * (batch.moment + (batch.mean - mean).square())
    return Moments(mean, all_reduce_sum(squares, group) / tokens, count[0], reduced=True)


class Training(torch.autograd.Function):
    """A training step of ``norm``: its ``forward_pass``, then its ``backward_pass``.

    After the backward the norm keeps the contribution until the next flush. Neither pass writes the norm's state, so a
    recomputed forward sees what the first forward saw.
    """

    @staticmethod
    def forward(ctx, x, weight, bias, padding_mask, norm, contribution, *further):
        ctx.contribution = contribution
        tokens = Tokens(norm, contribution, x, padding_mask, weight, bias, further)
        y = norm.forward_pass(tokens, contribution)
        ctx.norm = norm
        ctx.save_for_backward(x, weight, bias, tokens.padding, tokens.inv_rms, *further)
        return y

    @staticmethod
    def backward(ctx, dy):
        kernels.refuse_second_derivative()
        x, weight, bias, padding, inv_rms, *further = ctx.saved_tensors
        # Each backward of a retained graph needs its own: the first one may wait for its flush, or have been flushed.
        contribution, norm = copy(ctx.contribution), ctx.norm
        scale = norm.current_loss_scale()
        tokens = Tokens(norm, contribution, x, padding, weight, bias, further, inv_rms, dy, scale)
        dx, parameters, *gradients = norm.backward_pass(tokens, contribution)
        norm.contribute(contribution)
        ctx.contribution.version = None  # a second backward of a retained graph contributes nothing
        gradients = [value.to(parameter.dtype) for value, parameter in zip(gradients, further, strict=True)]
        if weight is None:
            return dx, None, None, None, None, None, *gradients
        if parameters.dtype != weight.dtype:
            parameters = parameters.to(weight.dtype)
        dweight, dbias = parameters.unbind()
        return dx, dweight, dbias, None, None, None, *gradients
