"""The named architectures: every registered norm in every size."""

from fairseq.models import register_model_architecture
from fairseq.models.transformer.transformer_legacy import (
    base_architecture,
    transformer_iwslt_de_en,
    transformer_wmt_en_de_big_t2t,
)

from pn_fairseq.models import transformer_pn  # noqa: F401 (an architecture needs its model to be registered)
from pn_fairseq.norms import NORMS


def _tiny(args):
    args.encoder_embed_dim = getattr(args, "encoder_embed_dim", 128)
    args.encoder_ffn_embed_dim = getattr(args, "encoder_ffn_embed_dim", 256)
    args.encoder_attention_heads = getattr(args, "encoder_attention_heads", 4)
    args.encoder_layers = getattr(args, "encoder_layers", 3)
    args.decoder_attention_heads = getattr(args, "decoder_attention_heads", 4)
    args.decoder_layers = getattr(args, "decoder_layers", 3)
    base_architecture(args)


#: Name of a size -> the function that fills in its defaults. The big one is tensor2tensor's.
SIZES = {
    "iwslt": transformer_iwslt_de_en,
    "wmt_en_de_big": transformer_wmt_en_de_big_t2t,
    "tiny": _tiny,
}


def _pre_norm(args, encoder_norm: str, size) -> None:
    if getattr(args, "encoder_norm", None) is None:  # hydra can hold an explicit null
        args.encoder_norm = encoder_norm
    args.encoder_normalize_before = getattr(args, "encoder_normalize_before", True)
    args.decoder_normalize_before = getattr(args, "decoder_normalize_before", True)
    size(args)


def _register(name: str, encoder_norm: str, size) -> None:
    register_model_architecture("transformer_pn", name)(lambda args: _pre_norm(args, encoder_norm, size))


_register("transformer_pn", "power", base_architecture)
for _norm, _entry in NORMS.items():
    for _size_name, _size in SIZES.items():
        _register(f"transformer_{_entry.short}_{_size_name}", _norm, _size)
