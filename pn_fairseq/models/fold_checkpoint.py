"""Folding the norms of a checkpoint into the projections that follow them: the same function, with less to compute."""

from __future__ import annotations

import copy
import re
from contextlib import ExitStack
from dataclasses import dataclass

import torch
from fairseq.models import ARCH_MODEL_REGISTRY
from omegaconf import OmegaConf, open_dict
from torch import Tensor, nn

from pn_fairseq.checkpoints import CheckpointError
from pn_fairseq.models import architectures  # noqa: F401 (registers what is looked up below)
from pn_fairseq.models.from_checkpoint import model_of, model_settings_of
from pn_fairseq.models.transformer_pn import FOLDED_MARK, TransformerPNModel
from pn_fairseq.norms.base import ChannelNorm, RunningNorm
from pn_fairseq.norms.fold import folded_linear

#: Accepted difference of logits, as part of the largest logit. Folding in exact arithmetic would change none.
TOLERANCE = 1e-4

_ATTENTION = tuple(f"self_attn.{projection}_proj" for projection in "qkv")

#: Norm of a layer -> the projections of the layer that read it; nothing else does, in a pre-norm transformer.
_IN_LAYER = {
    "self_attn_layer_norm": _ATTENTION,
    "encoder_attn_layer_norm": ("encoder_attn.q_proj",),
    "final_layer_norm": ("fc1",),
}


@dataclass(frozen=True)
class Outcome:
    """What became of a norm.

    Attributes:
        name: its name in the model.
        norm: the norm.
        projections: what it was folded into; None: it is as it was.
    """

    name: str
    norm: ChannelNorm
    projections: tuple[str, ...] | None

    def __str__(self) -> str:
        kind = type(self.norm).__name__
        if self.projections is None:
            return f"{self.name}: {kind} stays"
        groups = self.norm.layer_scale.groups
        rest = f", layer-scale ({groups} group{'s' * (groups > 1)}) stays" if groups else ""
        return f"{self.name}: {kind} -> {_summary(self.projections)}{rest}"


@dataclass(frozen=True)
class Difference:
    """How far the outputs of two models are apart on one batch.

    Attributes:
        logits: largest absolute difference of two logits.
        largest: largest absolute logit of the first model.
        same_choice: number of positions at which both give the same token the highest logit.
        positions: number of positions.
    """

    logits: float
    largest: float
    same_choice: int
    positions: int

    @property
    def accepted(self) -> bool:
        return self.logits <= TOLERANCE * self.largest  # False for NaN

    def __str__(self) -> str:
        return (
            f"maximum logit difference {self.logits:.2g} (largest logit {self.largest:.3g}, random tokens, float32); "
            f"the same greedy choice at {self.same_choice} of {self.positions} positions"
        )


def projections_after(model: TransformerPNModel) -> dict[str, tuple[str, ...]]:
    """Name of each norm that can be folded -> names of the projections that read it."""
    after = {}
    for side in ("encoder", "decoder"):
        for number, layer in getattr(model, side).layers.named_children():
            for norm, projections in _IN_LAYER.items():
                if isinstance(getattr(layer, norm, None), RunningNorm):
                    prefix = f"{side}.layers.{number}"
                    after[f"{prefix}.{norm}"] = tuple(f"{prefix}.{projection}" for projection in projections)
    if isinstance(model.encoder.layer_norm, RunningNorm):
        after["encoder.layer_norm"] = tuple(
            f"decoder.layers.{number}.encoder_attn.{projection}_proj"
            for number, layer in model.decoder.layers.named_children()
            if layer.encoder_attn is not None
            for projection in "kv"
        )
    if isinstance(model.decoder.layer_norm, RunningNorm) and model.decoder.last_norm_folds:
        after["decoder.layer_norm"] = ("decoder.output_projection",)
    return after


def fold_weights(model: TransformerPNModel) -> tuple[dict[str, Tensor], set[str]]:
    """What sets the folded form of ``model`` apart: its weights that are others, float64, and names that are gone.

    Raises:
        TypeError: a projection is something that cannot take a norm in; the message names it.
    """
    weights: dict[str, Tensor] = {}
    gone: set[str] = set()
    for name, projections in projections_after(model).items():
        norm = model.get_submodule(name)
        gone.update(norm.state_dict(prefix=f"{name}."))
        for projection in projections:
            linear = model.get_submodule(projection)
            if type(linear) is not nn.Linear:
                raise TypeError(f"{projection} is a {type(linear).__name__} and no plain linear projection")
            weight, bias = folded_linear(norm, linear.weight, linear.bias)
            weights[f"{projection}.weight"], weights[f"{projection}.bias"] = weight, bias
    return weights, gone


@torch.no_grad()
def compare(model: nn.Module, other: nn.Module, sentences: int = 16, length: int = 32, seed: int = 0) -> Difference:
    """Compare the logits of two transformers in evaluation on made-up sentences, some of them padded.

    At most ``length`` tokens a sentence, drawn from the vocabularies with ``seed``, source padded on the left and
    target on the right. All real target positions count, each with the tokens before it given.
    """
    generator = torch.Generator().manual_seed(seed)
    length = min(length, *model.max_positions())

    def draw(vocabulary: int) -> tuple[Tensor, Tensor]:
        tokens = torch.randint(min(4, vocabulary - 1), vocabulary, (sentences, length), generator=generator)
        lengths = torch.randint(1, length + 1, (sentences, 1), generator=generator)
        lengths[0] = length
        return tokens, lengths

    position = torch.arange(length)
    src, src_lengths = draw(len(model.encoder.dictionary))
    src = src.masked_fill(position < length - src_lengths, model.encoder.padding_idx)
    prev, prev_lengths = draw(len(model.decoder.dictionary))
    real = position < prev_lengths
    prev = prev.masked_fill(~real, model.decoder.padding_idx)
    first, second = (each(src, src_lengths.flatten(), prev)[0][real].double() for each in (model, other))
    return Difference(
        logits=(first - second).abs().max().item(),
        largest=first.abs().max().item(),
        same_choice=int((first.argmax(-1) == second.argmax(-1)).sum()),
        positions=len(first),
    )


def fold_checkpoint(state: dict, name: str) -> tuple[dict, list[Outcome], Difference]:
    """The checkpoint ``state`` with its norms folded, for decoding.

    Folded weights are computed in float64 and stored in float32 (or what is wider), also in a checkpoint of half
    precision: the norms' statistics are float32 in it, too, and fairseq casts all weights to the precision that it
    decodes in. The state of optimizer and of a moving average of the weights (``--store-ema``) is left out.

    Args:
        state: what :func:`pn_fairseq.checkpoints.load_checkpoint` read.
        name: how error messages call it.

    Returns:
        The new checkpoint, what became of each norm, and the difference between the logits of the two models.

    Raises:
        CheckpointError: it is no checkpoint of ``transformer_pn``, was folded already, has nothing to fold or something
            that cannot be folded, or its logits change by more than :data:`TOLERANCE` of the largest.
    """
    settings = model_settings_of(state, name)
    _check(settings, state, name)
    model = model_of(settings, state["model"], name)
    after = projections_after(model)
    norms = {key: module for key, module in model.named_modules() if isinstance(module, ChannelNorm)}
    if not after:
        kinds = ", ".join(sorted({type(norm).__name__ for norm in norms.values()}))
        raise CheckpointError(f"{name}: there is nothing to fold, all of its norms are {kinds}")
    try:
        folded_weights, gone = fold_weights(model)
    except TypeError as error:
        raise CheckpointError(f"{name}: cannot be folded, {error}") from error

    file = state["model"]
    weights = {key: file.get(key, value) for key, value in model.state_dict().items() if key not in gone}
    for key, value in folded_weights.items():
        weights[key] = value.to(torch.promote_types(file[key].dtype if key in file else torch.float32, torch.float32))
    weights[FOLDED_MARK] = torch.ones((), dtype=torch.int64)
    difference = compare(model, model_of(_marked(settings), weights, name))
    if not difference.accepted:
        raise CheckpointError(
            f"{name}: cannot be folded in float32: {difference}, and at most {TOLERANCE:g} of the largest logit is "
            "accepted"
        )
    outcomes = [Outcome(key, norm, after.get(key)) for key, norm in norms.items()]
    return _new_state(state, weights), outcomes, difference


def _check(settings, state: dict, name: str) -> None:
    arch = getattr(settings, "_name", None) or getattr(settings, "arch", None)
    registered = ARCH_MODEL_REGISTRY.get(arch)
    if registered is None or not issubclass(registered, TransformerPNModel):
        raise CheckpointError(f"{name}: its architecture {arch} is none of transformer_pn's, which alone can be folded")
    if FOLDED_MARK in state["model"] or getattr(settings, FOLDED_MARK, False):
        raise CheckpointError(f"{name}: was folded already")
    if getattr(settings, "quant_noise_scalar", 0):
        raise CheckpointError(
            f"{name}: decodes with weights rounded to 8 bits (quant_noise_scalar), and those of its folded form would "
            "be rounded otherwise"
        )
    for side in ("encoder", "decoder"):
        if kept := getattr(settings, f"{side}_layers_to_keep", None):
            raise CheckpointError(
                f"{name}: its settings prune layers ({side}_layers_to_keep is {kept}); fold the whole model and prune "
                "when it decodes"
            )


def _marked(settings):
    """A copy of a model's settings, a Namespace, a node of hydra's or a dict, that says that it is folded."""
    settings = copy.deepcopy(settings)
    if isinstance(settings, dict):
        settings[FOLDED_MARK] = True
        return settings
    with open_dict(settings) if OmegaConf.is_config(settings) else ExitStack():
        setattr(settings, FOLDED_MARK, True)
    return settings


def _new_state(state: dict, weights: dict[str, Tensor]) -> dict:
    """``state`` with other weights, marked, and without what only training needs."""
    new = {key: value for key, value in state.items() if key != "last_optimizer_state"}
    new["model"] = weights
    if new.get("args") is not None:
        new["args"] = _marked(new["args"])
    else:
        new["cfg"] = {**new["cfg"], "model": _marked(new["cfg"]["model"])}
    if isinstance(new.get("optimizer_history"), list):
        new["optimizer_history"] = [
            {key: value for key, value in entry.items() if key != "optimizer"} for entry in new["optimizer_history"]
        ]
    if isinstance(new.get("extra_state"), dict):
        new["extra_state"] = {key: value for key, value in new["extra_state"].items() if not key.startswith("ema")}
    return new


def _summary(projections: tuple[str, ...]) -> str:
    """``a.q_proj, a.k_proj`` as ``a.{q,k}_proj``, and the same projections of several layers as one."""
    layers = {re.sub(r"\.layers\.\d+\.", ".layers.*.", projection): None for projection in projections}
    several = len(layers) < len(projections)
    names = list(layers) if several else list(projections)
    letters = [match for match in (re.fullmatch(r"(.+\.)([qkv])_proj", each) for each in names) if match]
    if len(letters) > 1 and len(letters) == len(names):
        return f"{letters[0][1]}{{{','.join(match[2] for match in letters)}}}_proj"
    return ", ".join(names)
