"""Settings that no model can have: an error that names them, which fairseq's commands print in
one line.
"""

import pytest

from .helpers import ADAPTIVE, VOCABULARY, build


def both(placement: str, **changes) -> dict:
    return {"encoder_norm_placement": placement, "decoder_norm_placement": placement, **changes}


#: Of transformer_un_tiny.
TRANSLATION = [
    ({"layer_scale_groups": 3}, "num_features=128 is not divisible by groups=3"),
    ({"norm_variant": "released"}, "released.*paper, release"),
    ({"norm_options": "window=0"}, "window=0 must be a whole number of at least 1"),
    ({"norm_options": "window=2.5"}, "norm option window='2.5' is not a whole number"),
    ({"norm_options": {"window": True}}, "norm option window=True is not a whole number"),
    ({"norm_options": {"windw": 3}}, "unknown norm option 'windw', did you mean 'window'"),
    (
        {"norm_options": {"ada_k": 0.1}},
        "unknown norm option 'ada_k'.*the options of unified, layer are",
    ),
    ({"norm_options": {"alpha_fwd": 0.5}}, "it has the flag --norm-alpha-fwd"),
    (
        {"norm_options": {"outlier_filtration": "maybe"}},
        "outlier_filtration='maybe' is not true or false",
    ),
    ({"norm_options": {"adda": {"ada_k": 1}}}, "unknown norm 'adda', did you mean 'ada'"),
    (
        {"norm_options": {"ada": {"ada_kk": 1}}},
        "unknown norm option 'ada_kk', did you mean 'ada_k'",
    ),
    ({"norm_options": 3}, "norm_options=3 is not KEY=VALUE"),
    ({"encoder_norm_last": "layre"}, "unknown norm 'layre', did you mean 'layer'"),
    ({"decoder_norm_last": "rms", "no_decoder_final_norm": True}, "--no-decoder-final-norm"),
    ({"encoder_normalize_before": False}, "pre-norm"),
    ({"cross_self_attention": True}, "--cross-self-attention"),
    ({"tie_adaptive_weights": True}, "--tie-adaptive-weights"),
    ({"attention_init": "kaiming"}, "attention_init='kaiming' must be one of fairseq, torch"),
    ({"norm_sync": "maybe"}, "maybe.*auto, on, off"),
    (both("sandwhich"), "unknown placement 'sandwhich', did you mean 'sandwich'"),
    (
        both("post", encoder_norm_last="rms"),
        "^--encoder-norm-last: post has no norm after the last layer",
    ),
    (
        both("b2t", decoder_norm_last="rms"),
        "^--decoder-norm-last: b2t has no norm after the last layer",
    ),
    (
        both("deep", decoder_layers_to_keep="0,2"),
        "^--decoder-layers-to-keep: layers of deep compute something else",
    ),
    (
        both("mix", encoder_layers_to_keep="0,2"),
        "^--encoder-layers-to-keep: layers of mix compute something else",
    ),
    (
        both("scaled", encoder_layers_to_keep="1"),
        "^--encoder-layers-to-keep: layers of scaled compute",
    ),
]
#: Of transformer_lm_pn_tiny.
LANGUAGE = [
    ({"character_embeddings": True}, "no --character-embeddings"),
    ({**ADAPTIVE, "adaptive_input": False}, "needs --adaptive-input"),
    ({**ADAPTIVE, "adaptive_input_cutoff": "30,60"}, "adaptive_input_cutoff=30,60"),
    ({**ADAPTIVE, "decoder_input_dim": 32}, "decoder_input_dim=32"),
    ({**ADAPTIVE, "adaptive_input_cutoff": None}, "needs --adaptive-input-cutoff"),
    (
        {"adaptive_softmax_cutoff": f"20,{VOCABULARY + 1}"},
        f"cutoff 20,{VOCABULARY + 1} must be .* at most {VOCABULARY}",
    ),
    ({"adaptive_softmax_cutoff": "60,20"}, "ascending"),
    ({**ADAPTIVE, "adaptive_input_cutoff": "20,x"}, "--adaptive-input-cutoff 20,x"),
    ({"decoder_norm": "layers"}, "unknown norm 'layers'"),
    ({"attention_init": "kaiming"}, "attention_init='kaiming' must be one of fairseq, torch"),
]
#: Of tensorized_lm_ln_tiny.
TENSORIZED = [
    (
        {"decoder_norm_last": "rms", "decoder_final_norm": False},
        "--decoder-norm-last needs --decoder-final-norm",
    ),
    ({"cores": 0}, "--cores must be at least 1, not 0"),
    ({"core_rank": 0}, "--core-rank must be at least 1, not 0"),
    ({"decoder_layers": 0}, "--decoder-layers must be at least 1, not 0"),
    ({"decoder_norm_placement": "peri"}, "has only --post-norm"),
]
for cutoff in ("60,20", "20,x", "100", "0,20"):
    flags = {"adaptive_softmax_cutoff": cutoff}
    TENSORIZED.append((flags, f"--adaptive-softmax-cutoff {cutoff}"))
TABLE = {
    "transformer_un_tiny": TRANSLATION,
    "transformer_lm_pn_tiny": LANGUAGE,
    "tensorized_lm_ln_tiny": TENSORIZED,
}


@pytest.mark.parametrize(
    ("arch", "flags", "message"),
    [(arch, *row) for arch, rows in TABLE.items() for row in rows],
    ids=str,
)
def test_settings_that_a_model_cannot_have(arch, flags, message):
    with pytest.raises(ValueError, match=message):
        build(arch, **flags)
