"""Transformer layers that take their norms from the options and hand them the padding mask."""

import argparse
from functools import partial

import torch
from fairseq.distributed import fsdp_wrap
from fairseq.modules.checkpoint_activations import checkpoint_wrapper
from fairseq.modules.transformer_layer import TransformerDecoderLayerBase, TransformerEncoderLayerBase
from torch import Tensor, nn

from pn_fairseq.models.inner_norms import add_qk_norm, inner_masks
from pn_fairseq.models.placements import Depth, Pre, find_placement


def wrap_layer(layer: nn.Module, cfg) -> nn.Module:
    """Apply ``--checkpoint-activations`` and FSDP, as fairseq's ``build_*_layer`` do."""
    if cfg.checkpoint_activations:
        layer = checkpoint_wrapper(layer, offload_to_cpu=cfg.offload_activations)
    # FSDP always wraps a checkpointed layer, also a small one.
    return fsdp_wrap(layer, min_num_params=0 if cfg.checkpoint_activations else cfg.min_params_to_wrap)


def mask_of(padding: Tensor) -> Tensor | None:
    """The padding mask (B, T), True = padding, for the layers: None if there is no padding, which is faster.

    A graph that is compiled, traced or exported always takes the mask, because the same graph also serves batches with
    padding.
    """
    return padding if torch.compiler.is_compiling() or torch.jit.is_tracing() or padding.any() else None


def placement_of(cfg, side: str, number: int = 1, cross_attention: bool = True) -> Pre:
    """The placement of the norms of layer ``number`` of the "encoder" or "decoder".

    ``cross_attention=False``: the model has only a decoder.
    """
    depth = Depth(side, cfg.encoder.layers if cross_attention else 0, cfg.decoder.layers)
    return find_placement(getattr(cfg.norms, f"{side}_norm_placement"))(depth, number)


#: Values of ``--attention-init``.
ATTENTION_INIT = ("fairseq", "torch")


def add_attention_init(parser: argparse.ArgumentParser) -> None:
    """Add the flag ``--attention-init``."""
    text = "initial weights of attention: fairseq's (default), or torch.nn.Linear's, as AdaNorm's authors advise"
    parser.add_argument("--attention-init", choices=ATTENTION_INIT, help=text)


def init_attention(cfg, *attentions: nn.Module | None) -> None:
    """Give the projections to queries, keys, values and output the initial weights of ``cfg.attention_init``.

    None or "fairseq": they stay as fairseq drew them, Xavier uniform and biases of torch (0 for the output). "torch":
    torch.nn.Linear's, "Kaiming uniform", between -1/sqrt(inputs) and 1/sqrt(inputs), also for biases.

    Raises:
        ValueError: the setting has another value.
    """
    if (given := cfg.attention_init) not in (None, *ATTENTION_INIT):
        raise ValueError(f"attention_init={given!r} must be one of {', '.join(ATTENTION_INIT)}")
    for attention in filter(None, attentions if given == "torch" else ()):
        for linear in (attention.q_proj, attention.k_proj, attention.v_proj, attention.out_proj):
            linear.reset_parameters()


class TransformerPNEncoderLayer(TransformerEncoderLayerBase):
    """fairseq's encoder layer with its norms built by ``cfg.norms``; ``number`` is 1 for the first layer."""

    def __init__(self, cfg, return_fc: bool = False, number: int = 1):
        super().__init__(cfg, return_fc=return_fc)
        init_attention(cfg, self.self_attn)
        build = partial(cfg.norms.build_encoder_norm, heads=cfg.encoder.attention_heads)
        self.self_attn_layer_norm = build(self.embed_dim)
        self.final_layer_norm = build(self.embed_dim)
        self.placement = placement_of(cfg, "encoder", number)
        self.placement.equip(self, partial(build, folds=False))
        if cfg.norms.qk_norm:
            add_qk_norm(self.self_attn, cfg.norms.build_qk_norm)

    def forward(self, x: Tensor, encoder_padding_mask: Tensor | None, attn_mask: Tensor | None = None):
        """``x`` (T, B, C); ``encoder_padding_mask`` (B, T) bool or None; ``attn_mask`` (T, T), nonzero = masked."""
        if attn_mask is not None:
            # Finite: a row whose positions are all masked would give NaN in the softmax.
            attn_mask = attn_mask.masked_fill(attn_mask.to(torch.bool), -1e8 if x.dtype == torch.float32 else -1e4)

        entry = x
        h = self.placement.before(self, "self_attn", x, encoder_padding_mask)
        with inner_masks(self.self_attn, encoder_padding_mask, encoder_padding_mask):
            h, _ = self.self_attn(
                query=h,
                key=h,
                value=h,
                key_padding_mask=encoder_padding_mask,
                need_weights=False,
                attn_mask=attn_mask,
            )
        x = self.placement.after(self, "self_attn", x, self.dropout_module(h), encoder_padding_mask, entry)

        h = self.placement.before(self, "final", x, encoder_padding_mask)
        h = self.activation_dropout_module(self.activation_fn(self.fc1(h)))
        with inner_masks(self.fc2, encoder_padding_mask):
            fc_result = self.fc2(h)
        x = self.placement.after(self, "final", x, self.dropout_module(fc_result), encoder_padding_mask, entry)
        return (x, fc_result) if self.return_fc else x


class TransformerPNDecoderLayer(TransformerDecoderLayerBase):
    """fairseq's decoder layer with its norms built by ``cfg.norms``; ``number`` is 1 for the first layer."""

    def __init__(self, cfg, no_encoder_attn: bool = False, number: int = 1):
        super().__init__(cfg, no_encoder_attn)
        init_attention(cfg, self.self_attn, self.encoder_attn)
        build = partial(cfg.norms.build_decoder_norm, heads=cfg.decoder.attention_heads)
        self.self_attn_layer_norm = build(self.embed_dim)
        if self.encoder_attn is not None:
            self.encoder_attn_layer_norm = build(self.embed_dim)
        self.final_layer_norm = build(self.embed_dim)
        self.placement = placement_of(cfg, "decoder", number, not no_encoder_attn)
        self.placement.equip(self, partial(build, folds=False))
        if cfg.norms.qk_norm:
            for attention in filter(None, (self.self_attn, self.encoder_attn)):
                add_qk_norm(attention, cfg.norms.build_qk_norm)

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
        """Arguments and results as in fairseq's layer, without the arguments for ONNX; ``x`` is (T, B, C).

        ``self_attn_padding_mask`` (B, T) bool, True = padding, is also the mask of the norms.
        """
        need_attn = need_attn or need_head_weights

        entry = x
        h = self.placement.before(self, "self_attn", x, self_attn_padding_mask)
        with inner_masks(self.self_attn, self_attn_padding_mask, self_attn_padding_mask):
            h, attn = self.self_attn(
                query=h,
                key=h,
                value=h,
                key_padding_mask=self_attn_padding_mask,
                incremental_state=incremental_state,
                need_weights=False,
                attn_mask=self_attn_mask,
            )
        x = self.placement.after(self, "self_attn", x, self.dropout_module(h), self_attn_padding_mask, entry)

        if self.encoder_attn is not None and encoder_out is not None:
            h = self.placement.before(self, "encoder_attn", x, self_attn_padding_mask)
            with inner_masks(self.encoder_attn, self_attn_padding_mask, encoder_padding_mask):
                h, attn = self.encoder_attn(
                    query=h,
                    key=encoder_out,
                    value=encoder_out,
                    key_padding_mask=encoder_padding_mask,
                    incremental_state=incremental_state,
                    static_kv=True,
                    need_weights=need_attn or (not self.training and self.need_attn),
                    need_head_weights=need_head_weights,
                )
            x = self.placement.after(self, "encoder_attn", x, self.dropout_module(h), self_attn_padding_mask, entry)

        h = self.placement.before(self, "final", x, self_attn_padding_mask)
        h = self.activation_dropout_module(self.activation_fn(self.fc1(h)))
        with inner_masks(self.fc2, self_attn_padding_mask):
            h = self.fc2(h)
        x = self.placement.after(self, "final", x, self.dropout_module(h), self_attn_padding_mask, entry)
        return x, attn, None
