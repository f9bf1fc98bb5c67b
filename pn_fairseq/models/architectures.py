"""The named architectures: every registered norm in every size."""

from functools import partial

from fairseq.models import register_model_architecture
from fairseq.models.transformer.transformer_legacy import (
    base_architecture,
    transformer_iwslt_de_en,
    transformer_wmt_en_de_big_t2t,
)
from fairseq.models.transformer_lm import (
    DEFAULT_MIN_PARAMS_TO_WRAP,
    base_lm_architecture,
    transformer_lm_baevski_wiki103,
)

from pn_fairseq.models import (  # noqa: F401 (an architecture needs its model to be registered)
    tensorized_lm_pn,
    transformer_lm_pn,
    transformer_pn,
)
from pn_fairseq.norms import NORMS


def _defaults(args, **values) -> None:
    for name, value in values.items():
        if getattr(args, name, None) is None:  # hydra allows an explicit null
            setattr(args, name, value)


def _tiny(args):
    _defaults(
        args,
        encoder_embed_dim=128,
        encoder_ffn_embed_dim=256,
        encoder_attention_heads=4,
        encoder_layers=3,
        decoder_attention_heads=4,
        decoder_layers=3,
    )
    base_architecture(args)


#: Name of a size -> the function that fills in its defaults. The big size is tensor2tensor's.
SIZES = {
    "iwslt": transformer_iwslt_de_en,
    "wmt_en_de_big": transformer_wmt_en_de_big_t2t,
    "tiny": _tiny,
}


def _lm_tiny(args):
    _defaults(
        args,
        decoder_embed_dim=128,
        decoder_ffn_embed_dim=512,
        decoder_attention_heads=4,
        decoder_layers=3,
        share_decoder_input_output_embed=True,
    )
    base_lm_architecture(args)


#: The same for ``transformer_lm_pn``. The last size is that of Baevski & Auli (2019), under
#: fairseq's name for it.
LM_SIZES = {
    "tiny": _lm_tiny,
    "base": base_lm_architecture,
    "wiki103": transformer_lm_baevski_wiki103,
}


def _tensorized_tiny(args):
    _defaults(
        args,
        decoder_embed_dim=128,
        decoder_ffn_embed_dim=512,
        dropout=0.1,
        decoder_final_norm=not getattr(args, "post_norm", False),
    )
    _tensorized_ptb(args)


def _tensorized_ptb(args):
    """The settings of run_ptb.sh in the authors' code, except for the placement of the norms."""
    _defaults(
        args,
        decoder_embed_dim=256,
        decoder_ffn_embed_dim=2100,
        decoder_layers=3,
        core_rank=40,
        cores=1,
        dropout=0.3,
        post_norm=False,
        decoder_final_norm=False,
        adaptive_softmax_cutoff="",
        core_softmax=True,
        tensorized_unmasked=False,
        checkpoint_activations=False,
        offload_activations=False,
        min_params_to_wrap=DEFAULT_MIN_PARAMS_TO_WRAP,
    )
    _defaults(args, activation_dropout=args.dropout)


def _tensorized_wt103(args):
    """The settings of run_wt103.sh, with the same exception."""
    _defaults(args, decoder_layers=6, dropout=0.1, adaptive_softmax_cutoff="20000,40000,200000")
    _tensorized_ptb(args)


#: The same for ``tensorized_lm_pn``.
TENSORIZED_SIZES = {"tiny": _tensorized_tiny, "ptb": _tensorized_ptb, "wt103": _tensorized_wt103}


def _pre_norm(args, norm: str, size) -> None:
    _defaults(args, encoder_norm=norm, encoder_normalize_before=True, decoder_normalize_before=True)
    size(args)


def _decoder_alone(args, norm: str, size) -> None:
    _defaults(args, decoder_norm=norm)
    size(args)


#: Model -> the stem of its architectures' names, the function that fills them in, its sizes, and
#: the size that the model's own name means.
MODELS = {
    "transformer_pn": ("transformer", _pre_norm, SIZES, base_architecture),
    "transformer_lm_pn": ("transformer_lm", _decoder_alone, LM_SIZES, base_lm_architecture),
    "tensorized_lm_pn": ("tensorized_lm", _decoder_alone, TENSORIZED_SIZES, _tensorized_ptb),
}

for _model, (_stem, _fill, _sizes, _own_size) in MODELS.items():
    register_model_architecture(_model, _model)(partial(_fill, norm="power", size=_own_size))
    for _norm, _entry in NORMS.items():
        for _name, _size in _sizes.items():
            _register = register_model_architecture(_model, f"{_stem}_{_entry.short}_{_name}")
            _register(partial(_fill, norm=_norm, size=_size))
