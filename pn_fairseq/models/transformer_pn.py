"""The model ``transformer_pn``: fairseq's pre-norm transformer with a choice of norms."""

from dataclasses import dataclass
from functools import partial

import torch
from fairseq.models import register_model
from fairseq.models.transformer import (
    TransformerConfig,
    TransformerDecoderBase,
    TransformerEncoderBase,
)
from fairseq.models.transformer.transformer_legacy import TransformerModel
from torch import nn

from pn_fairseq.models.initial_weights import add_flags, initial_weights
from pn_fairseq.models.layers import (
    LayerStack,
    TransformerPNDecoderLayer,
    TransformerPNEncoderLayer,
    placement_of,
    wrap_layer,
)
from pn_fairseq.models.norm_options import NormOptions
from pn_fairseq.models.normed_model import NormedModel
from pn_fairseq.norms import LayerScale


@dataclass
class TransformerPNConfig(TransformerConfig):
    """fairseq's transformer settings and the norms.

    fairseq builds a TransformerConfig from its argument and drops what that class does not know,
    unless the argument is already an instance. This subclass preserves the norms.
    """

    norms: NormOptions = NormOptions()
    attention_init: str | None = None  # see init_attention

    @classmethod
    def from_args(cls, args) -> "TransformerPNConfig":
        """Settings from a Namespace or hydra's ``model`` node.

        Raises:
            ValueError: the settings request something that this model does not support.
        """
        cfg = cls.from_namespace(args)
        if not (cfg.encoder.normalize_before and cfg.decoder.normalize_before):
            raise ValueError(
                "transformer_pn is a pre-norm model: encoder and decoder need normalize_before=True"
            )
        if cfg.cross_self_attention:
            raise ValueError("transformer_pn has no --cross-self-attention; leave the flag out")
        if cfg.tie_adaptive_weights:
            raise ValueError(
                "transformer_pn has no --tie-adaptive-weights, which ties weights of an adaptive "
                "input"
            )
        cfg.norms = NormOptions.from_args(args)
        return cfg


class TransformerPNEncoder(LayerStack, TransformerEncoderBase):
    """fairseq's encoder with norms built by ``cfg.norms``, each of which sees the padding mask."""

    def __init__(self, cfg, dictionary, embed_tokens):
        super().__init__(cfg, dictionary, embed_tokens)
        self.placement = placement_of(cfg, "encoder")
        build = partial(
            cfg.norms.build, "encoder", cfg.encoder.embed_dim, cfg.encoder.attention_heads
        )
        self.layer_norm = build(last=True) if self.placement.last_norm else None
        self.input_norm = build(folds=False) if self.placement.input_norm else None
        #: fairseq 0.8, of which the release is a fork, does not set the embeddings at padding to 0,
        #: and the release's PN counts padding in its backward statistics.
        self.keeps_padding_embeddings = cfg.norms.norm_variant == "release"

    def build_encoder_layer(self, cfg):
        self.built = getattr(self, "built", 0) + 1  # fairseq builds layer after layer
        return wrap_layer(TransformerPNEncoderLayer(cfg, self.built), cfg)

    def forward_scriptable(
        self, src_tokens, src_lengths=None, return_all_hiddens=False, token_embeddings=None
    ):
        """Arguments and results as in fairseq's encoder; ``src_tokens`` is (B, T).

        Overridden as a whole because fairseq's calls the norm after the last layer without a mask.
        """
        padding = src_tokens.eq(self.padding_idx)
        mask = self.mask_of(src_tokens)
        x, embedding = self.forward_embedding(src_tokens, token_embeddings)
        if mask is not None and not self.keeps_padding_embeddings:
            x = x.masked_fill(mask.unsqueeze(-1), 0.0)
        x = x.transpose(0, 1)
        if self.input_norm is not None:
            x = self.input_norm(x, mask)
        x = self.layer_input(self.placement.enter(x))

        states, fc_results = [x] if return_all_hiddens else [], []
        for layer in self.layers:
            x = layer(x, encoder_padding_mask=mask)
            if return_all_hiddens:
                states.append(x)
                fc_results.append(None)  # only fairseq's own layers return them

        lengths = padding.logical_not().sum(dim=1, dtype=torch.int32).reshape(-1, 1).contiguous()
        return {
            "encoder_out": [self.placement.leave(x, self.layer_norm, mask)],
            "encoder_padding_mask": [padding],
            "encoder_embedding": [embedding],
            "encoder_states": states,
            "fc_results": fc_results,
            "src_tokens": [],
            "src_lengths": [lengths],
        }


class TransformerPNDecoder(LayerStack, TransformerDecoderBase):
    """fairseq's decoder with norms built by ``cfg.norms``, each of which sees the target's padding
    mask.
    """

    def __init__(self, cfg, dictionary, embed_tokens, no_encoder_attn: bool):
        super().__init__(cfg, dictionary, embed_tokens, no_encoder_attn)
        #: Whether a linear projection to the vocabulary, shared with nothing, follows the norm
        #: after the last layer.
        self.last_norm_folds = (
            self.adaptive_softmax is None
            and self.project_out_dim is None
            and not self.share_input_output_embed
        )
        self.placement = placement_of(cfg, "decoder", cross_attention=not no_encoder_attn)
        build = partial(
            cfg.norms.build, "decoder", cfg.decoder.embed_dim, cfg.decoder.attention_heads
        )
        self.input_norm = build(folds=False) if self.placement.input_norm else None
        if self.layer_norm is None and cfg.norms.decoder_norm_last:
            raise ValueError(
                "--decoder-norm-last contradicts --no-decoder-final-norm: leave one of them out"
            )
        if not self.placement.last_norm:
            self.layer_norm = None
        if self.layer_norm is not None:
            self.layer_norm = build(last=True, folds=self.last_norm_folds)
            if isinstance(self.layer_norm, LayerScale):  # the shift of the folded norm needs a bias
                self.output_projection = nn.Linear(self.output_embed_dim, len(dictionary))

    def build_decoder_layer(self, cfg, no_encoder_attn: bool = False):
        self.built = getattr(self, "built", 0) + 1  # fairseq builds layer after layer
        return wrap_layer(TransformerPNDecoderLayer(cfg, no_encoder_attn, self.built), cfg)

    def extract_features_scriptable(
        self,
        prev_output_tokens,
        encoder_out,
        incremental_state=None,
        full_context_alignment=False,
        alignment_layer=None,
        alignment_heads=None,
    ):
        """Arguments and results as in fairseq's decoder; ``prev_output_tokens`` is (B, T).

        Overridden as a whole because fairseq's calls the norm after the last layer without a mask.
        """
        if alignment_layer is None:
            alignment_layer = self.num_layers - 1

        encoder_out = encoder_out or {}
        memory = next(iter(encoder_out.get("encoder_out", [])), None)
        memory_mask = next(iter(encoder_out.get("encoder_padding_mask", [])), None)

        positions = None
        if self.embed_positions is not None:
            positions = self.embed_positions(
                prev_output_tokens, incremental_state=incremental_state
            )
        if incremental_state is not None:
            prev_output_tokens = prev_output_tokens[:, -1:]
            if positions is not None:
                positions = positions[:, -1:]

        x = self.embed_scale * self.embed_tokens(prev_output_tokens.contiguous())
        if self.quant_noise is not None:
            x = self.quant_noise(x)
        if self.project_in_dim is not None:
            x = self.project_in_dim(x)
        if positions is not None:
            x = x + positions
        if self.layernorm_embedding is not None:
            x = self.layernorm_embedding(x)
        x = self.dropout_module(x).transpose(0, 1)

        mask = self.mask_of(prev_output_tokens)
        if self.input_norm is not None:
            x = self.input_norm(x, mask)
        x = self.layer_input(self.placement.enter(x))
        causal = None
        if incremental_state is None and not full_context_alignment:
            causal = self.layer_input(self.buffered_future_mask(x))
        attention, inner_states = None, [x]
        for index, layer in enumerate(self.layers):
            aligns = index == alignment_layer
            x, layer_attention, _ = layer(
                x,
                memory,
                memory_mask,
                incremental_state,
                self_attn_mask=causal,
                self_attn_padding_mask=mask,
                need_attn=aligns,
                need_head_weights=aligns,
            )
            inner_states.append(x)
            if layer_attention is not None and aligns:
                attention = layer_attention.float().to(x)

        if attention is not None:
            if alignment_heads is not None:
                attention = attention[:alignment_heads]
            attention = attention.mean(dim=0)

        x = self.placement.leave(x, self.layer_norm, mask).transpose(0, 1)
        if self.project_out_dim is not None:
            x = self.project_out_dim(x)
        return x, {"attn": [attention], "inner_states": inner_states}


@register_model("transformer_pn")
class TransformerPNModel(NormedModel, TransformerModel):
    """fairseq's pre-norm transformer with the norms of ``--encoder-norm`` and ``--decoder-norm``.

    A legacy model in fairseq's terms, without a registered dataclass: ``fairseq-train`` silently
    ignores the flags of a model that is registered with a subclass of TransformerConfig.
    """

    def __init__(self, args, encoder, decoder):
        super().__init__(args, encoder, decoder)
        self.use_norms(args.norms)

    @classmethod
    def add_args(cls, parser):
        super().add_args(parser)
        NormOptions.add_args(parser)
        add_flags(parser)

    @classmethod
    def build_model(cls, args, task):
        with initial_weights(args):
            return super().build_model(TransformerPNConfig.from_args(args), task)

    @classmethod
    def build_encoder(cls, args, src_dict, embed_tokens):
        return TransformerPNEncoder(args, src_dict, embed_tokens)

    @classmethod
    def build_decoder(cls, args, tgt_dict, embed_tokens):
        return TransformerPNDecoder(
            args, tgt_dict, embed_tokens, no_encoder_attn=args.no_cross_attention
        )
