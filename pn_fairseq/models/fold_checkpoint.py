"""Fold the norms of a checkpoint into the projections that follow them: the model computes the same
function with less work.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from fairseq.models import ARCH_MODEL_REGISTRY
from torch import Tensor, nn

from pn_fairseq.common.checkpoints import CheckpointError
from pn_fairseq.models import architectures  # noqa: F401 (registers what is looked up below)
from pn_fairseq.models.from_checkpoint import (
    changed,
    model_of,
    model_settings_of,
    with_model_settings,
)
from pn_fairseq.models.normed_model import FOLDED_MARK
from pn_fairseq.models.transformer_pn import TransformerPNModel
from pn_fairseq.norms.conversion.convert import named_norms
from pn_fairseq.norms.core.base import ChannelNorm, RunningNorm
from pn_fairseq.norms.fold import folded_linear

#: Accepted difference of logits, as a fraction of the largest logit. In exact arithmetic, folding
#: would change no logit.
TOLERANCE = 1e-4

#: Norm of a layer -> the projections of the layer that read it; in a pre-norm transformer nothing
#: else does.
_IN_LAYER = {
    "self_attn_layer_norm": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "encoder_attn_layer_norm": ("encoder_attn.q_proj",),
    "final_layer_norm": ("fc1",),
}


@dataclass(frozen=True)
class Difference:
    """How much the outputs of two models differ on one batch.

    Attributes:
        logits: largest absolute difference of two logits.
        largest: largest absolute logit of the first model.
        same_choice: number of positions at which both models assign the highest logit to the same
            token.
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
            f"maximum logit difference {self.logits:.2g} (largest logit {self.largest:.3g}, random "
            f"tokens, float32); the same greedy choice at {self.same_choice} of {self.positions} "
            "positions"
        )


def _folds(norm: nn.Module | None) -> bool:
    return isinstance(norm, RunningNorm) and norm.folds


def projections_after(model: TransformerPNModel) -> dict[str, list[str]]:
    """Name of each norm that can be folded -> names of the projections that read it."""
    after = {}
    for side in ("encoder", "decoder"):
        for number, layer in getattr(model, side).layers.named_children():
            prefix = f"{side}.layers.{number}"
            for norm, projections in _IN_LAYER.items():
                if _folds(getattr(layer, norm, None)):
                    names = [f"{prefix}.{projection}" for projection in projections]
                    after[f"{prefix}.{norm}"] = names
    if _folds(model.encoder.layer_norm):
        readers = []
        for number, layer in model.decoder.layers.named_children():
            if layer.encoder_attn is not None:
                prefix = f"decoder.layers.{number}.encoder_attn"
                readers += [f"{prefix}.k_proj", f"{prefix}.v_proj"]
        after["encoder.layer_norm"] = readers
    if _folds(model.decoder.layer_norm) and model.decoder.last_norm_folds:
        after["decoder.layer_norm"] = ["decoder.output_projection"]
    return after


def fold_weights(model: TransformerPNModel) -> tuple[dict[str, Tensor], set[str]]:
    """The weights, float64, that differ in the folded form of ``model``, and the names of the
    weights that it lacks.

    Raises:
        TypeError: a projection is not a plain linear map; the message names it.
    """
    weights: dict[str, Tensor] = {}
    gone: set[str] = set()
    for name, projections in projections_after(model).items():
        norm = model.get_submodule(name)
        gone.update(norm.state_dict(prefix=f"{name}."))
        for projection in projections:
            linear = model.get_submodule(projection)
            if type(linear) is not nn.Linear:
                raise TypeError(
                    f"{projection} is a {type(linear).__name__} and not a plain linear projection"
                )
            weight, bias = folded_linear(norm, linear.weight, linear.bias)
            weights[f"{projection}.weight"], weights[f"{projection}.bias"] = weight, bias
    return weights, gone


@torch.no_grad()
def compare(model: nn.Module, other: nn.Module) -> Difference:
    """Compare the logits of two transformers in evaluation on 16 random sentences, some of them
    padded.

    A sentence contains at most 32 tokens of the vocabularies; sources are padded on the left,
    targets on the right. All real target positions count, each given the tokens before it.
    """
    generator = torch.Generator().manual_seed(0)
    sentences = 16
    length = min(32, *model.max_positions())
    position = torch.arange(length)

    def draw(dictionary) -> tuple[Tensor, Tensor]:
        size = len(dictionary)
        first_word = min(4, size - 1)  # after the special symbols
        tokens = torch.randint(first_word, size, (sentences, length), generator=generator)
        lengths = torch.randint(1, length + 1, (sentences, 1), generator=generator)
        lengths[0] = length
        return tokens, lengths

    src, src_lengths = draw(model.encoder.dictionary)
    src = src.masked_fill(position < length - src_lengths, model.encoder.padding_idx)
    prev, prev_lengths = draw(model.decoder.dictionary)
    real = position < prev_lengths
    prev = prev.masked_fill(~real, model.decoder.padding_idx)
    logits = []
    for decode in (model, other):
        everywhere, *_ = decode(src, src_lengths.flatten(), prev)
        logits.append(everywhere[real].double())
    first, second = logits
    return Difference(
        logits=(first - second).abs().max().item(),
        largest=first.abs().max().item(),
        same_choice=int((first.argmax(-1) == second.argmax(-1)).sum()),
        positions=len(first),
    )


def fold_checkpoint(state: dict, name: str) -> tuple[dict, list[str], int, Difference]:
    """The checkpoint ``state`` with its norms folded, for decoding.

    Folded weights are computed in float64 and stored in float32 or wider, even in a checkpoint of
    half precision: the norms' statistics are float32 there too, and fairseq casts all weights to
    the precision that it decodes in. The state of the optimizer and a moving average of the weights
    (``--store-ema``) are left out.

    Args:
        state: what :func:`pn_fairseq.common.checkpoints.load_checkpoint` read.
        name: name of the checkpoint in error messages.

    Returns:
        The new checkpoint, one line for each norm, how many of the norms are folded, and the
        difference between the logits of the two models.

    Raises:
        CheckpointError: ``state`` is not a checkpoint of ``transformer_pn``, was folded already,
            contains nothing to fold or something that cannot be folded, or its logits change by
            more than :data:`TOLERANCE` of the largest.
    """
    settings = model_settings_of(state, name)
    _check(settings, state, name)
    stored = state["model"]
    model = model_of(settings, stored, name)
    for side in ("encoder", "decoder"):
        if not getattr(model, side).placement.folds:
            placement = getattr(settings, f"{side}_norm_placement")
            raise CheckpointError(
                f"{name}: {side}_norm_placement={placement}: such norms cannot be folded"
            )
    after = projections_after(model)
    norms = named_norms(model)
    if not after:
        kinds = ", ".join(sorted({type(norm).__name__ for norm in norms.values()}))
        raise CheckpointError(f"{name}: there is nothing to fold, all of its norms are {kinds}")
    try:
        folded, gone = fold_weights(model)
    except TypeError as error:
        raise CheckpointError(f"{name}: cannot be folded, {error}") from error

    weights = {}
    for key, value in model.state_dict().items():
        if key not in gone:
            weights[key] = stored.get(key, value)
    for key, value in folded.items():
        dtype = stored[key].dtype if key in stored else torch.float32
        weights[key] = value.to(torch.promote_types(dtype, torch.float32))
    weights[FOLDED_MARK] = torch.ones((), dtype=torch.int64)
    other = model_of(changed(settings, **{FOLDED_MARK: True}), weights, name)
    difference = compare(model, other)
    if not difference.accepted:
        raise CheckpointError(
            f"{name}: cannot be folded in float32: {difference}; at most {TOLERANCE:g} of the "
            "largest logit is accepted"
        )
    outcomes = [_outcome(key, norm, after.get(key)) for key, norm in norms.items()]
    return _new_state(state, weights), outcomes, len(after), difference


def _check(settings, state: dict, name: str) -> None:
    arch = getattr(settings, "_name", None) or getattr(settings, "arch", None)
    if not issubclass(ARCH_MODEL_REGISTRY.get(arch, object), TransformerPNModel):
        raise CheckpointError(
            f"{name}: its architecture {arch} is not one of transformer_pn's, which can be folded"
        )
    if FOLDED_MARK in state["model"]:
        raise CheckpointError(f"{name}: was folded already")
    if getattr(settings, "quant_noise_scalar", 0):
        raise CheckpointError(
            f"{name}: decodes with weights rounded to 8 bits (quant_noise_scalar); it cannot be "
            "folded"
        )
    for key in ("encoder_layers_to_keep", "decoder_layers_to_keep"):
        kept = getattr(settings, key, None)
        if kept:
            raise CheckpointError(
                f"{name}: its settings prune layers ({key} is {kept}); fold the whole model and "
                "prune when it decodes"
            )


def _outcome(name: str, norm: ChannelNorm, projections: list[str] | None) -> str:
    kind = type(norm).__name__
    if projections is None:
        return f"{name}: {kind} stays"
    line = f"{name}: {kind} folded into {', '.join(projections)}"
    groups = norm.layer_scale.groups
    if not groups:
        return line
    return f"{line}; layer-scale ({groups} group{'s' if groups > 1 else ''}) stays"


def _new_state(state: dict, weights: dict[str, Tensor]) -> dict:
    """``state`` with other weights, marked, and without what only training needs."""
    new = {**state, "model": weights}
    new.pop("last_optimizer_state", None)
    extra = new.get("extra_state")
    if isinstance(extra, dict):
        kept = {key: value for key, value in extra.items() if not key.startswith("ema")}
        new["extra_state"] = kept
    return with_model_settings(new, **{FOLDED_MARK: True})
