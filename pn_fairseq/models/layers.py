"""Pre-norm transformer layers that take their norms from the options and hand them the padding mask."""

import torch
from fairseq.distributed import fsdp_wrap
from fairseq.modules.checkpoint_activations import checkpoint_wrapper
from fairseq.modules.transformer_layer import TransformerDecoderLayerBase, TransformerEncoderLayerBase
from torch import Tensor, nn


def wrap_layer(layer: nn.Module, cfg) -> nn.Module:
    """Apply ``--checkpoint-activations`` and FSDP, as fairseq's ``build_*_layer`` do."""
    if cfg.checkpoint_activations:
        layer = checkpoint_wrapper(layer, offload_to_cpu=cfg.offload_activations)
    # FSDP always wraps a checkpointed layer, also a small one.
    return fsdp_wrap(layer, min_num_params=0 if cfg.checkpoint_activations else cfg.min_params_to_wrap)


def mask_of(padding: Tensor) -> Tensor | None:
    """The padding mask (B, T), True = padding, for the layers: None if there is no padding, which is faster.

    A graph that is compiled, traced or exported always takes the mask: it is also for other batches.
    """
    return padding if torch.compiler.is_compiling() or torch.jit.is_tracing() or padding.any() else None


class TransformerPNEncoderLayer(TransformerEncoderLayerBase):
    """fairseq's pre-norm encoder layer with both norms built by ``cfg.norms``."""

    def __init__(self, cfg, return_fc: bool = False):
        super().__init__(cfg, return_fc=return_fc)
        heads = cfg.encoder.attention_heads
        self.self_attn_layer_norm = cfg.norms.build_encoder_norm(self.embed_dim, heads)
        self.final_layer_norm = cfg.norms.build_encoder_norm(self.embed_dim, heads)

    def forward(self, x: Tensor, encoder_padding_mask: Tensor | None, attn_mask: Tensor | None = None):
        """``x`` (T, B, C); ``encoder_padding_mask`` (B, T) bool or None; ``attn_mask`` (T, T), nonzero = masked."""
        if attn_mask is not None:
            # Finite: a row whose positions are all masked would give NaN in the softmax.
            attn_mask = attn_mask.masked_fill(attn_mask.to(torch.bool), -1e8 if x.dtype == torch.float32 else -1e4)

        residual = x
        x = self.self_attn_layer_norm(x, encoder_padding_mask)
        x, _ = self.self_attn(
            query=x,
            key=x,
            value=x,
            key_padding_mask=encoder_padding_mask,
            need_weights=False,
            attn_mask=attn_mask,
        )
        x = self.residual_connection(self.dropout_module(x), residual)

        residual = x
        x = self.final_layer_norm(x, encoder_padding_mask)
        x = self.activation_dropout_module(self.activation_fn(self.fc1(x)))
        fc_result = self.fc2(x)
        x = self.residual_connection(self.dropout_module(fc_result), residual)
        return (x, fc_result) if self.return_fc else x


class TransformerPNDecoderLayer(TransformerDecoderLayerBase):
    """fairseq's pre-norm decoder layer with its norms built by ``cfg.norms``."""

    def __init__(self, cfg, no_encoder_attn: bool = False):
        super().__init__(cfg, no_encoder_attn)
        heads = cfg.decoder.attention_heads
        self.self_attn_layer_norm = cfg.norms.build_decoder_norm(self.embed_dim, heads)
        if self.encoder_attn is not None:
            self.encoder_attn_layer_norm = cfg.norms.build_decoder_norm(self.embed_dim, heads)
        self.final_layer_norm = cfg.norms.build_decoder_norm(self.embed_dim, heads)

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

        residual = x
        x = self.self_attn_layer_norm(x, self_attn_padding_mask)
        x, attn = self.self_attn(
            query=x,
            key=x,
            value=x,
            key_padding_mask=self_attn_padding_mask,
            incremental_state=incremental_state,
            need_weights=False,
            attn_mask=self_attn_mask,
        )
        x = self.residual_connection(self.dropout_module(x), residual)

        if self.encoder_attn is not None and encoder_out is not None:
            residual = x
            x = self.encoder_attn_layer_norm(x, self_attn_padding_mask)
            x, attn = self.encoder_attn(
                query=x,
                key=encoder_out,
                value=encoder_out,
                key_padding_mask=encoder_padding_mask,
                incremental_state=incremental_state,
                static_kv=True,
                need_weights=need_attn or (not self.training and self.need_attn),
                need_head_weights=need_head_weights,
            )
            x = self.residual_connection(self.dropout_module(x), residual)

        residual = x
        x = self.final_layer_norm(x, self_attn_padding_mask)
        x = self.activation_dropout_module(self.activation_fn(self.fc1(x)))
        x = self.residual_connection(self.dropout_module(self.fc2(x)), residual)
        return x, attn, None
