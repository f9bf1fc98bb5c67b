"""Settings that no model can have: an error that names them, which fairseq's commands print in
one line.
"""

import pytest
import yaml

from ..tables import rows
from .helpers import ADAPTIVE, VOCABULARY, both_sides, build

#: Settings of transformer_un_tiny, and the message.
TRANSLATION = """
layer_scale_groups: 3 | num_features=128 is not divisible by groups=3
norm_variant: released | released.*paper, release
norm_options: window=0 | window=0 must be a whole number of at least 1
norm_options: window=2.5 | norm option window='2.5' is not a whole number
norm_options: {window: true} | norm option window=True is not a whole number
norm_options: {windw: 3} | unknown norm option 'windw', did you mean 'window'
norm_options: {ada_k: 0.1} | unknown norm option 'ada_k'.*the options of unified, layer are
norm_options: {alpha_fwd: 0.5} | it has the flag --norm-alpha-fwd
norm_options: {outlier_filtration: maybe} | outlier_filtration='maybe' is not true or false
norm_options: {adda: {ada_k: 1}} | unknown norm 'adda', did you mean 'ada'
norm_options: {ada: {ada_kk: 1}} | unknown norm option 'ada_kk', did you mean 'ada_k'
norm_options: 3 | norm_options=3 is not KEY=VALUE
encoder_norm_last: layre | unknown norm 'layre', did you mean 'layer'
{decoder_norm_last: rms, no_decoder_final_norm: true} | --no-decoder-final-norm
encoder_normalize_before: false | pre-norm
cross_self_attention: true | --cross-self-attention
tie_adaptive_weights: true | --tie-adaptive-weights
attention_init: kaiming | attention_init='kaiming' must be one of fairseq, torch
norm_sync: maybe | maybe.*auto, on, off
decoder_norm_placement: sandwhich | unknown placement 'sandwhich', did you mean 'sandwich'
"""
#: Of transformer_un_tiny: a placement, a setting that does not go with it, and what is said of the
#: setting.
PLACED = """
post | encoder_norm_last: rms | post has no norm after the last layer
b2t | decoder_norm_last: rms | b2t has no norm after the last layer
deep | decoder_layers_to_keep: 0,2 | layers of deep compute something else
mix | encoder_layers_to_keep: 0,2 | layers of mix compute something else
scaled | encoder_layers_to_keep: '1' | layers of scaled compute something else
"""
#: Of transformer_lm_pn_tiny.
LANGUAGE = """
character_embeddings: true | no --character-embeddings
adaptive_softmax_cutoff: 60,20 | ascending
decoder_norm: layers | unknown norm 'layers'
attention_init: kaiming | attention_init='kaiming' must be one of fairseq, torch
"""
beyond = f"20,{VOCABULARY + 1}"
LANGUAGE += f"adaptive_softmax_cutoff: {beyond} | cutoff {beyond} must be .* at most {VOCABULARY}"
#: Of transformer_lm_pn_tiny with ADAPTIVE.
OF_ADAPTIVE = """
adaptive_input: false | needs --adaptive-input
adaptive_input_cutoff: 30,60 | adaptive_input_cutoff=30,60
decoder_input_dim: 32 | decoder_input_dim=32
adaptive_input_cutoff: null | needs --adaptive-input-cutoff
adaptive_input_cutoff: 20,x | --adaptive-input-cutoff 20,x
"""
#: Of tensorized_lm_ln_tiny.
TENSORIZED = """
{decoder_norm_last: rms, decoder_final_norm: false} | --decoder-norm-last needs --decoder-final-norm
cores: 0 | --cores must be at least 1, not 0
core_rank: 0 | --core-rank must be at least 1, not 0
decoder_layers: 0 | --decoder-layers must be at least 1, not 0
decoder_norm_placement: peri | has only --post-norm
adaptive_softmax_cutoff: 60,20 | --adaptive-softmax-cutoff 60,20
adaptive_softmax_cutoff: 20,x | --adaptive-softmax-cutoff 20,x
adaptive_softmax_cutoff: '100' | --adaptive-softmax-cutoff 100
adaptive_softmax_cutoff: 0,20 | --adaptive-softmax-cutoff 0,20
"""
CASES = []
for arch, common, table in (
    ("transformer_un_tiny", {}, TRANSLATION),
    ("transformer_lm_pn_tiny", {}, LANGUAGE),
    ("transformer_lm_pn_tiny", ADAPTIVE, OF_ADAPTIVE),
    ("tensorized_lm_ln_tiny", {}, TENSORIZED),
):
    for settings, message in rows(table):
        CASES.append((arch, common, settings, message))
for placement, settings, message in rows(PLACED):
    flag = settings.partition(":")[0].replace("_", "-")
    placements = both_sides(norm_placement=placement)
    CASES.append(("transformer_un_tiny", placements, settings, f"^--{flag}: {message}"))


@pytest.mark.parametrize(("arch", "common", "settings", "message"), CASES)
def test_settings_that_a_model_cannot_have(arch, common, settings, message):
    with pytest.raises(ValueError, match=message):
        build(arch, **common | yaml.safe_load(settings))
