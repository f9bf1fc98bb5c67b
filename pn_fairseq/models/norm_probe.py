r"""``--norm-probe``: the statistics of batches and of their gradients, norm by norm, while a model
trains.

Hooks outside of the norms compute them in each recorded update and the ten before it; at other
times no hooks are set.
"""

import fnmatch
import inspect
from collections import deque
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from pn_fairseq import kernels
from pn_fairseq.common.errors import one_line_errors
from pn_fairseq.fairseq_patches import SWITCH, patches_enabled
from pn_fairseq.models import probe_files
from pn_fairseq.norms import NORMS, ChannelNorm, RunningNorm
from pn_fairseq.norms.conversion.convert import named_norms
from pn_fairseq.norms.conversion.converted_norm import ConvertedNorm
from pn_fairseq.norms.core.distributed import all_reduce_sum, world_size

#: If a norm keeps no running average of a statistic, the probe averages it over the batches of this
#: many updates, with this decay.
WINDOW = 10
ALPHA = 0.9

#: Number of vectors over channels that each use of a norm adds to: sums over real tokens of h, h^2,
#: dy and dy * h.
_SUMS = 4

#: Number of values that precede the sums of the norms: see :meth:`NormProbe._flat`.
_SCALARS = 4


@dataclass
class _Forward:
    """One forward and backward of the criterion."""

    recorded: bool
    loss: Tensor | float = 0.0
    sample_size: Tensor | float = 0.0
    #: d(what is differentiated) / d(loss of the criterion), that is, the loss scale of fp16; 0: the
    #: batch of a rank without data.
    scale: Tensor | None = None
    #: Norm -> count and sums of this rank, (1 + 4 C,) float64.
    sums: dict[str, Tensor] = field(default_factory=dict)
    #: Norm -> its state before this batch, and its gain.
    states: dict[str, dict[str, Tensor]] = field(default_factory=dict)


class NormProbe:
    r"""Records the norms in every ``interval``-th update of a training run under fairseq's trainer
    (``--norm-probe``).

    h, (tokens, C), is what a norm's layer-scale hands on, without padding; y is the norm's output;
    d = C.
    :math:`\mu_B, \sigma_B^2, \psi_B^2` are mean, biased variance and second moment of the batch,
    :math:`\mu, \sigma^2, \psi^2` the running ones before the batch, :math:`\epsilon` is the norm's.
    L is the mean loss per token in nats (per unit of the criterion's sample size). A gradient is
    divided by the loss scale of fp16 and by the sample size. One row per update, norm and forward:

    - ``update`` counts from 1. ``forward`` counts from 0 in the update (``--update-freq``); where
      there are several, a row with ``forward`` null compares all tokens of the update, as one
      batch, with the running statistics before it.
    - ``norm`` is the module's name, ``kind`` the name in ``NORMS``. ``running`` names the
      statistics that the norm keeps itself, separated by commas. For the others the probe computes
      an exponential average over the batches of the ten updates before (in a row with ``forward``
      null, over these updates) with the norm's decay (0.9 if it has none), so that per-token norms
      can be compared.
    - ``channels`` is d, ``tokens`` counts the real tokens of the batch; ``sample_size``, ``loss``
      (L), ``loss_scale``.
    - ``mu_distance``, ``sigma2_distance``, ``psi2_distance``: the running minus the batch
      statistics.
    - ``g_mu`` = mean of dL/dy; ``g_sigma2`` = mean of dL/dy * (h - mu_B) / sqrt(sigma_B^2 + eps);
      ``g_psi2`` = mean of dL/dy * h / sqrt(psi_B^2 + eps): d-vectors, means over the real tokens of
      the batch (dy is before the gain). Each of these six vectors v has columns ``v_l1`` =
      sum(abs(v)) / d and ``v_l2`` = sqrt(sum(v^2)) / d.
    - ``nu_xhat_l2`` = sqrt(sum_c nu_c^2 psi_B,c^2 / (psi_c^2 + eps)) / d: PN's correction per
      token, root mean square over tokens. nu includes the gain. It is an average over updates and
      is divided by the sample size of this one.
    - ``tid_mean`` = mean_c abs(mu - mu_B) / sigma_B and ``tid_var`` = mean_c abs(sigma / sigma_B -
      1): the training-inference discrepancy of RBN's paper, where sigma is sqrt(sigma^2 + eps).
    - ``gamma_over_psi_batch`` and ``psi_batch_over_psi``: per channel gain / sqrt(psi_B^2 + eps),
      and sqrt(psi_B^2 + eps) / sqrt(psi^2 + eps).

    A value that does not exist is null. On several ranks the batch contains the tokens of all
    ranks; for a norm that is not synchronized, those of rank 0. A skipped update (an overflow) is
    not recorded.

    Args:
        model: the model whose norms are recorded.
        folder: see :mod:`pn_fairseq.models.probe_files`.
        interval: updates.
        layers: shell patterns of module names, separated by commas; None: the norms of the encoder,
            or all in a model without one.

    Raises:
        ValueError: a pattern fits no norm, or a norm of :func:`convert_norms` does not normalize
            images (B, C, H, W).
    """

    def __init__(self, model: nn.Module, folder: str, interval: int, layers: str | None = None):
        self.folder, self.interval = Path(folder), interval
        names = {}
        for name, norm in named_norms(model).items():
            plain = name.replace("_fsdp_wrapped_module.", "").replace("_fpw_module.", "")
            names[plain] = norm
        if layers is None:
            layers = "encoder.*" if any(name.startswith("encoder.") for name in names) else "*"
        self.norms: dict[str, ChannelNorm] = {}
        for pattern in layers.split(","):
            matching = fnmatch.filter(names, pattern.strip())
            if not matching:
                raise ValueError(
                    f"--norm-probe-layers {pattern.strip()} fits no norm; the model has "
                    f"{', '.join(names)}"
                )
            self.norms |= {name: names[name] for name in matching}
        for name, norm in self.norms.items():
            if isinstance(norm, ConvertedNorm) and norm.layout.name != "BCHW":
                raise ValueError(
                    f"{name} was converted and takes its mask from the context, which the probe "
                    "cannot read"
                )
        self._window: deque[list[_Forward]] = deque(maxlen=WINDOW)
        self._forwards: list[_Forward] = []
        self._handles: list = []
        self._last: int | None = None
        self._training = ""

    def refuse_without_patches(self) -> None:
        """Raise ValueError if fairseq's trainer does not call the probe."""
        with one_line_errors(ValueError):
            if not patches_enabled():
                raise ValueError(
                    f"--norm-probe needs the patches of fairseq, which {SWITCH} turns off"
                )

    # What the trainer calls (pn_fairseq.fairseq_patches.training).

    def begin(self, completed: int, criterion: nn.Module, training: str) -> None:
        """Called before an update, when ``completed`` updates are done; ``criterion`` computes the
        losses of the update.

        Args:
            training: identifies the run by the folder of its checkpoints.

        Raises:
            ValueError, OSError: see :func:`pn_fairseq.models.probe_files.open_probe`.
        """
        self._stop()
        if self._last is None and _first_rank():
            probe_files.open_probe(self.folder, completed, training)
        self._last, self._training = completed, training
        since_record = (completed + 1) % self.interval
        recorded = since_record == 0
        if not recorded and self.interval - since_record > WINDOW:
            self._window.clear()
            return

        def start(module, inputs):
            self._forwards.append(_Forward(recorded))

        def at_loss(module, inputs, output):
            forward = self._forwards[-1]
            forward.loss, forward.sample_size = output[0].detach(), output[1]

            def at_gradient(gradient):
                forward.scale = gradient.detach().double()

            output[0].register_hook(at_gradient)

        self._handles = [
            criterion.register_forward_pre_hook(start),
            criterion.register_forward_hook(at_loss),
        ]
        for name, norm in self.norms.items():
            hook = partial(self._at_forward, name)
            self._handles.append(norm.register_forward_hook(hook, with_kwargs=True))

    def end(self, completed: int) -> None:
        """Called on every rank after an update. A skipped update leaves ``completed`` unchanged.

        Raises:
            OSError: the update cannot be written.
        """
        forwards = self._forwards
        self._stop()
        if not forwards or completed == self._last:
            return
        if forwards[0].recorded:
            self._record(completed, forwards)
        for forward in forwards:
            forward.states.clear()
        self._window.append(forwards)

    def _stop(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles, self._forwards = [], []

    # Hooks.

    def _at_forward(
        self, name: str, norm: ChannelNorm, args: tuple, kwargs: dict, y: Tensor
    ) -> None:
        # the first computation of a checkpointed layer; only the second one has a gradient
        if not y.requires_grad:
            return
        forward = self._forwards[-1]
        given = inspect.signature(norm.forward).bind(*args, **kwargs).arguments
        x, mask = _channels_last(norm, given["x"]), given.get("padding_mask")
        if forward.recorded and name not in forward.states:
            forward.states[name] = _state(norm)
        # The hook runs once per backward, however often a forward is recomputed, and when the loss
        # scale is known.
        y.register_hook(partial(_at_gradient, forward, name, norm, x.detach(), mask))

    # Recording.

    def _record(self, update: int, forwards: list[_Forward]) -> None:
        past_and_now = list(chain(*self._window, forwards))
        device = forwards[0].loss.device
        own = torch.cat([self._flat(forward, device) for forward in past_and_now])
        total = all_reduce_sum(own) if world_size() > 1 else own
        if not _first_rank():
            return
        own_table, table = (_numpy(flat).reshape(len(past_and_now), -1) for flat in (own, total))
        window = [len(past) for past in self._window]
        rows, start = [], _SCALARS
        for name, norm in self.norms.items():
            end = start + _width(norm)
            source = table
            if isinstance(norm, RunningNorm) and not norm.synchronises():
                source = own_table
            sums, scalars = source[:, start:end], source[:, :_SCALARS]
            rows += self._rows(name, norm, forwards, sums, scalars, window)
            start = end
        rows = [{"update": update, **row} for row in rows]
        probe_files.write_update(self.folder, update, rows, self._training)

    def _flat(self, forward: _Forward, device) -> Tensor:
        """Whether the batch counts, its sample size, loss and loss scale; the sums of all norms, 0
        for a norm that did not run.
        """
        scale = 0.0 if forward.scale is None else forward.scale
        counts = float(scale != 0)
        values = [counts, forward.sample_size * counts, forward.loss * counts, scale]
        parts = []
        for value in values:
            parts.append(torch.as_tensor(value, device=device).double().view(1))
        for name, norm in self.norms.items():
            sums = forward.sums.get(name)
            if sums is None:
                sums = torch.zeros(_width(norm), device=device)
            parts.append(sums.double())
        return torch.cat(parts)

    def _rows(self, name, norm, forwards, sums, scalars, window: list[int]) -> list[dict]:
        """The rows of one norm; ``sums`` and ``scalars`` begin with the forwards of earlier
        updates; ``window`` holds the number of forwards in each of these.
        """
        past = sum(window)
        decay = norm.alpha_fwd if isinstance(norm, RunningNorm) else ALPHA
        states = [forward.states.get(name) for forward in forwards]
        before = sums[:past]
        batches = []
        for index, state in enumerate(states):
            end = past + index
            batches.append((index, state, sums[:end], sums[end], scalars[end]))
        if len(forwards) > 1:
            state = next((state for state in states if state is not None), None)
            if window:  # each earlier update as one batch
                before = np.add.reduceat(before, np.cumsum([0, *window[:-1]]))
            batches.append((None, state, before, sums[past:].sum(0), scalars[past:].sum(0)))
        rows = []
        for index, own_state, earlier, batch, (counts, sample_size, loss, scale) in batches:
            if own_state is None or not batch[0] or not sample_size:
                continue  # layer-drop, or no real token
            kept = {key: _numpy(value) for key, value in own_state.items()}
            row = quantities(batch, kept, _average(earlier, decay), norm.eps, sample_size)
            row["forward"], row["norm"] = index, name
            row["kind"], row["channels"] = _kind(norm), norm.num_features
            row["sample_size"], row["loss"] = sample_size, loss / sample_size
            row["loss_scale"] = scale / counts
            rows.append(row)
        return rows


def quantities(batch, state: dict, average: dict, eps: float, sample_size: float) -> dict:
    """The columns of one batch, see :class:`NormProbe`.

    Args:
        batch: number of real tokens and their sums of h, h^2, dy / loss scale and dy * h / loss
            scale, (1 + 4 C,).
        state: ``mu``, ``sigma2``, ``psi2`` that the norm keeps, ``nu``, and its ``gain``, each
            (C,); a norm may lack some of them.
        average: substitutes for statistics that the norm does not keep.
        sample_size: the divisor of the criterion's loss.
    """
    count = batch[0]
    mean_h, psi2, mean_dy, mean_dyh = batch[1:].reshape(_SUMS, -1) / count
    now = {"mu": mean_h, "sigma2": np.maximum(psi2 - mean_h**2, 0.0), "psi2": psi2}
    kept = {key: value for key, value in state.items() if key in now}
    running = average | kept
    sigma, psi = np.sqrt(now["sigma2"] + eps), np.sqrt(psi2 + eps)
    vectors = {}
    for key, value in now.items():
        if key in running:
            vectors[f"{key}_distance"] = running[key] - value
    vectors["g_mu"] = mean_dy / sample_size
    vectors["g_sigma2"] = (mean_dyh - mean_h * mean_dy) / sigma / sample_size
    vectors["g_psi2"] = mean_dyh / psi / sample_size
    row = {"tokens": count, "running": ",".join(key for key in now if key in kept)}
    for key, vector in vectors.items():
        row[f"{key}_l1"] = np.abs(vector).mean()
        row[f"{key}_l2"] = np.linalg.norm(vector) / len(vector)
    if "mu" in running:
        row["tid_mean"] = (np.abs(running["mu"] - mean_h) / sigma).mean()
    if "sigma2" in running:
        running_sigma = np.sqrt(running["sigma2"] + eps)
        row["tid_var"] = np.abs(running_sigma / sigma - 1).mean()
    if "gain" in state:
        row["gamma_over_psi_batch"] = state["gain"] / psi
    if "psi2" in running:
        moment = running["psi2"] + eps
        row["psi_batch_over_psi"] = psi / np.sqrt(moment)
        if "nu" in state:
            square = (state["nu"] / sample_size) ** 2 * psi2 / moment
            row["nu_xhat_l2"] = np.sqrt(square.sum()) / len(moment)
    return row


def _at_gradient(
    forward: _Forward, name: str, norm: ChannelNorm, x: Tensor, mask: Tensor | None, dy: Tensor
) -> None:
    """Add the sums of one use of a norm to ``forward``, once the gradient of its y is known.

    Changes no gradient.
    """
    if mask is not None:  # from (B, T) to the order of x
        if mask.dim() == 2 and not norm.batch_first:
            mask = mask.t()
        mask = mask.contiguous()
    groups, eps = norm.layer_scale_groups, norm.eps
    inv_rms, mean, variance, count = kernels.moments(x, mask, groups, eps, True)
    wide_mean, wide_variance, wide_count = mean.double(), variance.double(), count.double()
    psi2 = wide_variance + wide_mean.square()
    sum_dy = sum_dyh = torch.zeros_like(wide_mean)
    if forward.recorded:
        dy = _channels_last(norm, dy.detach().to(x.dtype))
        _, products = kernels.gradient_sums(
            dy, x, mask, None, mean, variance, None, inv_rms, groups, eps
        )
        scale = torch.where(forward.scale == 0, 1.0, forward.scale)
        dy_xhat, sum_dy = products.double() / scale
        sum_dyh = dy_xhat * (wide_variance + eps).sqrt() + wide_mean * sum_dy
    sums = [wide_count[None], wide_mean * wide_count, psi2 * wide_count, sum_dy, sum_dyh]
    flat = torch.cat(sums) * (forward.scale != 0)
    forward.sums[name] = forward.sums.get(name, 0) + flat


def _channels_last(norm: ChannelNorm, x: Tensor) -> Tensor:
    """(N H W, C) instead of (N, C, H, W), the input of a norm in an image model after
    :func:`convert_norms`.
    """
    return x.movedim(1, -1).flatten(0, -2) if isinstance(norm, ConvertedNorm) else x


def _state(norm: ChannelNorm) -> dict[str, Tensor]:
    """The present running statistics and nu of the norm, and its gain."""
    state = {}
    if isinstance(norm, RunningNorm):
        mean, moment = norm.evaluation_statistics()
        if mean is None:
            state = {"psi2": moment}
        else:
            state = {"mu": mean, "sigma2": moment, "psi2": moment + mean.square()}
        if "nu" in dict(norm.named_buffers(recurse=False)):
            state["nu"] = norm.nu
    if norm.gain is not None and norm.gain.numel() == norm.num_features:
        state["gain"] = norm.gain
    return {key: value.detach().clone() for key, value in state.items()}


def _average(sums: np.ndarray, decay: float) -> dict[str, np.ndarray]:
    """The exponential average of the statistics of batches, (n, 1 + 4 C), of which the last is the
    newest.
    """
    sums = sums[sums[:, 0] > 0]
    if not len(sums):
        return {}
    weights = decay ** np.arange(len(sums) - 1, -1, -1)
    weights = (weights / weights.sum())[:, None]
    counts, totals = sums[:, :1], sums[:, 1:].reshape(len(sums), _SUMS, -1)
    mean_h, psi2 = totals[:, 0] / counts, totals[:, 1] / counts
    return {
        "mu": (weights * mean_h).sum(0),
        "sigma2": (weights * (psi2 - mean_h**2)).sum(0),
        "psi2": (weights * psi2).sum(0),
    }


def _width(norm: ChannelNorm) -> int:
    """How many numbers a forward records of ``norm``: the number of tokens and the sums of each
    channel.
    """
    return 1 + _SUMS * norm.num_features


def _kind(norm: ChannelNorm) -> str:
    names = {}
    for name, entry in NORMS.items():
        for cls in (entry.cls, *entry.variants.values()):
            names[cls] = name
    for cls in type(norm).__mro__:
        if cls in names:
            return names[cls]
    return type(norm).__name__


def _numpy(values: Tensor) -> np.ndarray:
    return values.detach().double().cpu().numpy()


def _first_rank() -> bool:
    return world_size() == 1 or dist.get_rank() == 0
