"""One training step of a norm: the tokens of its batch, the state that its forward read, and the
contribution of its backward.
"""

from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from pn_fairseq import kernels
from pn_fairseq.norms.core.distributed import all_reduce_sum


class Moments(NamedTuple):
    """Statistics of a batch over its real tokens, per channel, in the accumulation dtype.

    Attributes:
        mean: (C,); None if the moment is about 0.
        moment: the second moment about the mean (biased), (C,).
        count: number of real tokens N, 0-d; if it is 0, so are mean and moment.
        reduced: whether the statistics of a synchronized norm cover all ranks; otherwise true.
    """

    mean: Tensor | None
    moment: Tensor
    count: Tensor
    reduced: bool


class Forward:
    """What a backward must know about its forward before it may move the state.

    Attributes:
        counts: whether the step must still enter the state. A step enters once, even if its graph
            is retained.
        epoch: :attr:`.StatefulNorm.epoch` at the forward.
        buffers: the buffers of the module at the forward, by name.
    """

    __slots__ = ("buffers", "counts", "epoch")

    def __init__(self, norm):
        self.counts, self.epoch, self.buffers = True, norm.epoch, dict(norm._buffers)


class Step:
    """The tokens of one batch with their mask and layer-scale, and the results of the passes over
    them.

    h denotes the layer-scaled activations, D = sqrt(moment + eps), x_hat = (h - mean) / D, dx_hat =
    weight * dy / s with the loss scale s (:func:`.set_loss_scale`; 1 without): what the state keeps
    of gradients does not depend on s. ``weight`` and ``bias`` belong to the norm unless an argument
    replaces them. In a synchronized norm, statistics cover all ranks.

    In further attributes, named in :attr:`.RunningNorm.keeps`, a norm stores what its later passes
    need.

    Attributes:
        weight, bias: (C,) parameters of the norm, or None.
        further: the parameters of :meth:`.RunningNorm.further_parameters`.
        state: the state that the forward read, by name: copies, which later steps do not change.
        padding: the mask in the order of x, or None.
        padding_counts: while True, all tokens count as real, unless the batch is ignored in a
            synchronized norm, where the mask excludes all of them.
        ignored: the batch must not count (:attr:`.RunningNorm.ignoring`).
        inv_rms: factors of layer-scale, (..., G); None before the forward has computed them.
        batch: :class:`Moments` of the batch. In ``update`` they cover all ranks.
        products: (2, C), sums over the real tokens of dx_hat * x_hat and of dx_hat; in ``update``
            over all ranks. Divide them by ``batch.count`` for means. Zeros if no backward runs.
        has_gradient: whether a backward runs.
        forward: :class:`Forward`; None in a compiled graph, or if no backward runs.
        taken_in: whether the state has moved by this step.
    """

    padding_counts = False
    inv_rms: Tensor | None = None
    batch: Moments | None = None
    products: Tensor | None = None
    products_reduced = False
    has_gradient = True
    forward: Forward | None = None
    taken_in = False
    dy: Tensor | None = None
    loss_scale: Tensor | None = None
    #: The sums of :meth:`start_sum` and its asynchronous all-reduce.
    sums: Tensor | None = None
    work = None
    #: On a GPU: when ``sums`` has been computed.
    event = None

    def __init__(
        self,
        norm,
        state: dict[str, Tensor],
        padding: Tensor | None,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        *further: Tensor,
    ):
        self.norm, self.state, self.padding, self.x = norm, state, padding, x
        self.weight, self.bias, self.further = weight, bias, further
        self.ignored = norm.ignoring

    def _mask(self) -> Tensor | None:
        if self.ignored and self.norm.synchronises():
            return self.padding
        return None if self.padding_counts else self.padding

    def mark_taken_in(self) -> None:
        """To be called when the state has moved by this step, so that it does not move again."""
        self.taken_in = True
        if self.forward is not None:
            self.forward.counts = False

    def times_weight(self, factor: Tensor) -> Tensor:
        """``factor`` times the weight of the norm, if it has one, (C,)."""
        return factor if self.weight is None else factor * self.weight

    # The forward.

    def moments(self, centered: bool = False) -> Moments:
        """Statistics of the batch, before it is normalized, over all ranks; also stored as
        :attr:`batch`.

        ``centered``: the mean, and the second moment about it; otherwise the second moment about 0.
        """
        norm = self.norm
        self.inv_rms, mean, moment, count = kernels.moments(
            self.x, self._mask(), norm.layer_scale_groups, norm.eps, centered
        )
        batch = Moments(mean if centered else None, moment, count, reduced=True)
        if norm.synchronises():
            batch = _reduced(batch, norm.process_group)
        self.batch = batch
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

        ``moments``: the same pass computes :attr:`batch`, the second moment about 0 of this rank's
        tokens. The backward starts the sum over all ranks, which enters the state; the forward does
        not wait for it.
        """
        y, inv_rms, batch_moment, count = kernels.normalize(
            self.x,
            self.weight if weight is None else weight,
            self.bias if bias is None else bias,
            mean,
            moment,
            self._mask(),
            self.inv_rms,
            self.norm.layer_scale_groups,
            self.norm.eps,
            moments,
        )
        if self.inv_rms is None:
            self.inv_rms = inv_rms
        if moments:
            self.batch = Moments(None, batch_moment, count, reduced=not self.norm.synchronises())
        return y

    # The backward.

    def gradient_sums(
        self, moment: Tensor, mean: Tensor | None = None, weight: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """The sums over tokens that dx needs: ``parameters`` and ``products``, each (2, C).

        ``parameters``: the sums of dy * x_hat and of dy over all tokens of this rank, the gradients
        of weight and bias. ``products``: the sums of dx_hat * x_hat and of dx_hat over the real
        tokens of all ranks; also stored as :attr:`products`.
        """
        norm = self.norm
        weight = self.weight if weight is None else weight
        parameters, products = kernels.gradient_sums(
            self.dy,
            self.x,
            self._mask(),
            weight,
            mean,
            moment,
            self.loss_scale,
            self.inv_rms,
            norm.layer_scale_groups,
            norm.eps,
        )
        if norm.synchronises():
            products = all_reduce_sum(products, norm.process_group)
        self.products, self.products_reduced = products, True
        return parameters, products

    def gradient(
        self,
        moment: Tensor,
        mean: Tensor | None = None,
        nu: Tensor | None = None,
        offset: Tensor | None = None,
        weight: Tensor | None = None,
        count: Tensor | None = None,
        sums: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """dx, where dh = s (dx_hat - 1_M (nu * x_hat + offset)) / D and 1_M is 1 on real tokens and
        0 on padding.

        ``count``: ``nu`` and ``offset`` are divided by it, if it is at least 1. ``sums``: the same
        pass also computes ``parameters`` as in :meth:`gradient_sums`, and stores as
        :attr:`products` the sums over this rank's tokens, which enter the state summed over all
        ranks. Without ``sums`` the second result is empty.
        """
        norm = self.norm
        dx, parameters, products = kernels.gradient(
            self.dy,
            self.x,
            self._mask(),
            self.weight if weight is None else weight,
            mean,
            moment,
            nu,
            offset,
            count,
            self.loss_scale,
            self.inv_rms,
            norm.layer_scale_groups,
            norm.eps,
            sums,
        )
        if sums:
            self.products, self.products_reduced = products, not norm.synchronises()
        return dx, parameters

    # The sum over the ranks.

    def start_sum(self, group, wait: bool) -> None:
        """Start the sum over the ranks of ``group`` of whatever does not cover all ranks yet;
        ``wait``: also wait for the result.
        """
        if self.batch.reduced and self.products_reduced:
            return
        batch = self.batch
        local = batch.moment * batch.count, *self.products, batch.count[None]
        self.sums = torch.cat(local)
        if wait:
            self.sums = all_reduce_sum(self.sums, group)
        else:
            self.work = dist.all_reduce(self.sums, group=group, async_op=True)

    def finish_sum(self) -> None:
        """Wait for the sum that :meth:`start_sum` started, and store its results."""
        if self.sums is None:
            return
        if self.work is not None:
            self.work.wait()
        channels = self.batch.moment.numel()
        moment, *products, count = self.sums.split([channels] * 3 + [1])
        if not self.batch.reduced:
            self.batch = Moments(None, moment / count.clamp(min=1.0), count[0], reduced=True)
        if not self.products_reduced:
            self.products, self.products_reduced = torch.stack(products), True
        self.sums = self.work = None


def _reduced(batch: Moments, group) -> Moments:
    """Moments of the tokens of all ranks.

    A second moment about the mean of a rank is moved to the mean of all ranks. The second moment
    about 0 minus the squared mean would lose precision.
    """
    sums = batch.count * (batch.moment if batch.mean is None else batch.mean)
    total, count = all_reduce_sum(torch.cat([sums, batch.count[None]]), group).split(
        (sums.numel(), 1)
    )
    tokens = count[0].clamp(min=1.0)
    if batch.mean is None:
        return Moments(None, total / tokens, count[0], reduced=True)
    mean = total / tokens
    squares = batch.count * (batch.moment + (batch.mean - mean).square())
    return Moments(mean, all_reduce_sum(squares, group) / tokens, count[0], reduced=True)


class Training(torch.autograd.Function):
    """A training step of ``norm``: its ``forward_pass``, then its ``backward_pass``, which moves
    the state. A norm's :attr:`.RunningNorm.whole_step`, if any, does the same in C++.

    The forward changes no state. The backward gets a :class:`Step` of its own: ``torch.compile``
    does not allow it to change an object of the forward.
    """

    @staticmethod
    def forward(ctx, norm, state, padding, x, weight, bias, *further):
        step = Step(norm, state, padding, x, weight, bias, *further)
        y = norm.forward_pass(step)
        ctx.norm, ctx.ignored = norm, step.ignored
        ctx.forward = None if torch.compiler.is_compiling() else Forward(norm)
        # Kept here, per-channel vectors bypass hooks on saved tensors.
        ctx.state, ctx.batch = state, step.batch
        ctx.kept = [getattr(step, name) for name in norm.keeps]
        ctx.save_for_backward(step.inv_rms, padding, x, weight, bias, *further)
        return y

    @staticmethod
    def backward(ctx, dy):
        kernels.refuse_second_derivative()
        norm = ctx.norm
        inv_rms, padding, x, weight, bias, *further = ctx.saved_tensors
        step = Step(norm, ctx.state, padding, x, weight, bias, *further)
        step.dy, step.loss_scale = dy, norm.current_loss_scale()
        step.inv_rms, step.batch = inv_rms, ctx.batch
        step.forward, step.ignored = ctx.forward, ctx.ignored
        for name, value in zip(norm.keeps, ctx.kept, strict=True):
            setattr(step, name, value)
        dx, parameters, *gradients = norm.backward_pass(step)
        if not step.taken_in:
            norm.contribute(step)
        further_gradients = []
        for parameter, gradient in zip(further, gradients, strict=True):
            further_gradients.append(gradient.to(parameter.dtype))
        dweight = dbias = None
        if weight is not None:
            if parameters.dtype != weight.dtype:
                parameters = parameters.to(weight.dtype)
            dweight, dbias = parameters.unbind()
        if bias is None:
            dbias = None
        return None, None, None, dx, dweight, dbias, *further_gradients
