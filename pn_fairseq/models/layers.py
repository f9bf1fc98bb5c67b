"""Transformer layers that build their norms from the options and pass them the padding mask."""

from functools import partial

import torch
from fairseq.distributed import fsdp_wrap
from fairseq.modules.checkpoint_activations import checkpoint_wrapper
from fairseq.modules.transformer_layer import (
    TransformerDecoderLayerBase,
    TransformerEncoderLayerBase,
)
from torch import Tensor, nn

from pn_fairseq.models.initial_weights import init_attention
from pn_fairseq.models.inner_norms import add_qk_norm, inner_masks
from pn_fairseq.models.placements import Depth, Pre, find_placement


def wrap_layer(layer: nn.Module, cfg) -> nn.Module:
    """Apply ``--checkpoint-activations`` and FSDP, as fairseq's ``build_*_layer`` do."""
    if cfg.checkpoint_activations:
        layer = checkpoint_wrapper(layer, offload_to_cpu=cfg.offload_activations)
    # FSDP always wraps a checkpointed layer, even a small one.
    smallest = 0 if cfg.checkpoint_activations else cfg.min_params_to_wrap
    return fsdp_wrap(layer, min_num_params=smallest)


def mask_of(tokens: Tensor, padding_idx: int, always: bool = False) -> Tensor | None:
    """The padding mask (B, T), True = padding, for the layers: None if there is no padding, which
    is faster.

    A graph that is compiled, traced or exported always gets the mask, because the same graph also
    serves batches with padding; ``always``: the layers are such graphs. Otherwise
    ``tokens.has_padding``, which :mod:`pn_fairseq.fairseq_patches.training` sets before a batch is
    copied to a GPU, avoids reading its values there.
    """
    padding = tokens.eq(padding_idx)
    if always or torch.compiler.is_compiling() or torch.jit.is_tracing():
        return padding
    has_padding = getattr(tokens, "has_padding", None)
    if has_padding is None:
        has_padding = bool(padding.any())
    return padding if has_padding else None


class LayerStack:
    """An encoder or decoder with ``layers``. If they are compiled, the inputs from every batch fit
    the same graphs.
    """

    #: Set by :meth:`.NormedModel.compile_layers`.
    layers_are_compiled = False

    def mask_of(self, tokens: Tensor) -> Tensor | None:
        """:func:`mask_of` for the layers."""
        return mask_of(tokens, self.padding_idx, self.layers_are_compiled)

    def layer_input(self, x: Tensor | None) -> Tensor | None:
        """``x``, or for compiled layers a contiguous copy: torch.compile would compile a layer once
        more for an input that is a view, or whose strides do not follow from its shape.
        """
        if x is None or not self.layers_are_compiled:
            return x
        return x.clone(memory_format=torch.contiguous_format)


def placement_of(cfg, side: str, number: int = 1, cross_attention: bool = True) -> Pre:
    """The placement of the norms of layer ``number`` of the "encoder" or "decoder".

    ``cross_attention=False``: the model has only a decoder.
    """
    encoder_layers = cfg.encoder.layers if cross_attention else 0
    depth = Depth(side, encoder_layers, cfg.decoder.layers)
    placement = find_placement(getattr(cfg.norms, f"{side}_norm_placement"))
    return placement(depth, number)


class NormedLayer:
    """The sublayers of a fairseq layer with their norms; must precede fairseq's class in the bases.

    ``x``, (T, B, C), is the stream before a sublayer, ``entry`` the stream before the layer, and
    ``mask``, (B, T) bool, True = padding, or None, the padding of both, which every norm gets.
    """

    def add_norms(self, cfg, side: str, number: int, cross_attention: bool = True) -> None:
        """Replace fairseq's norms, and initialize the attention, of layer ``number`` of the
        "encoder" or "decoder".
        """
        attentions = {}
        for name in ("self_attn", "encoder_attn"):
            if getattr(self, name, None) is not None:
                attentions[name] = getattr(self, name)
        init_attention(cfg, attentions.values())
        build = partial(cfg.norms.build, side, heads=getattr(cfg, side).attention_heads)
        for sublayer in (*attentions, "final"):
            setattr(self, f"{sublayer}_layer_norm", build(self.embed_dim))
        self.placement = placement_of(cfg, side, number, cross_attention)
        self.placement.equip(self, partial(build, folds=False))
        if cfg.norms.qk_norm:
            for attention in attentions.values():
                add_qk_norm(attention, cfg.norms.build_qk_norm)

    def attend(
        self, name: str, x: Tensor, mask: Tensor | None, entry: Tensor, memory=None, **options
    ):
        """The stream after the attention ``name``, and its weights.

        ``memory``: keys, and their padding in the form for fairseq's attention; by default those of
        x.
        ``options`` are further arguments of the attention.
        """
        attention = getattr(self, name)
        h = self.placement.before(self, name, x, mask)
        keys, key_mask = (h, mask) if memory is None else memory
        with inner_masks(attention, mask, key_mask):
            h, weights = attention(h, keys, keys, key_padding_mask=key_mask, **options)
        h = self.dropout_module(h)
        return self.placement.after(self, name, x, h, mask, entry), weights

    def feed_forward(self, x: Tensor, mask: Tensor | None, entry: Tensor) -> Tensor:
        """The stream after the feed-forward network."""
        h = self.placement.before(self, "final", x, mask)
        h = self.activation_fn(self.fc1(h))
        h = self.activation_dropout_module(h)
        with inner_masks(self.fc2, mask):
            h = self.fc2(h)
        h = self.dropout_module(h)
        return self.placement.after(self, "final", x, h, mask, entry)


class TransformerPNEncoderLayer(NormedLayer, TransformerEncoderLayerBase):
    """fairseq's encoder layer with its norms built by ``cfg.norms``; ``number`` is 1 for the first
    layer.
    """

    def __init__(self, cfg, number: int):
        super().__init__(cfg)
        self.add_norms(cfg, "encoder", number)

    def forward(self, x: Tensor, encoder_padding_mask: Tensor | None):
        """``x`` (T, B, C); ``encoder_padding_mask`` (B, T) bool or None."""
        entry, mask = x, encoder_padding_mask
        x, _ = self.attend("self_attn", x, mask, entry, need_weights=False)
        return self.feed_forward(x, mask, entry)


class TransformerPNDecoderLayer(NormedLayer, TransformerDecoderLayerBase):
    """fairseq's decoder layer with its norms built by ``cfg.norms``; ``number`` is 1 for the first
    layer.
    """

    def __init__(self, cfg, no_encoder_attn: bool, number: int):
        super().__init__(cfg, no_encoder_attn)
        self.add_norms(cfg, "decoder", number, not no_encoder_attn)

    def forward(
        self,
        x: Tensor,
        encoder_out: Tensor | None = None,
        encoder_padding_mask: Tensor | None = None,
        incremental_state: dict | None = None,
        self_attn_mask: Tensor | None = None,
        self_attn_padding_mask: Tensor | None = None,
        need_attn: bool = False,
        need_head_weights: bool = False,
    ):
        """Arguments and results as in fairseq's layer, without the arguments for ONNX; ``x`` is (T,
        B, C).

        ``self_attn_padding_mask`` (B, T) bool, True = padding, is also the mask of the norms.
        """
        need_attn = need_attn or need_head_weights or (not self.training and self.need_attn)
        entry, mask = x, self_attn_padding_mask
        x, attn = self.attend(
            "self_attn",
            x,
            mask,
            entry,
            incremental_state=incremental_state,
            need_weights=False,
            attn_mask=self_attn_mask,
        )
        if self.encoder_attn is not None and encoder_out is not None:
            memory = (encoder_out, encoder_padding_mask)
            x, attn = self.attend(
                "encoder_attn",
                x,
                mask,
                entry,
                memory,
                incremental_state=incremental_state,
                static_kv=True,
                need_weights=need_attn,
                need_head_weights=need_head_weights,
            )
        return self.feed_forward(x, mask, entry), attn, None
