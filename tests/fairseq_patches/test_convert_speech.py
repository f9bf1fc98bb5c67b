"""--convert-norms in fairseq's speech models, built tiny: two updates on random features, and
loaded again.
"""

from argparse import Namespace
from copy import deepcopy
from types import SimpleNamespace

import pytest
import torch
from fairseq import models
from fairseq.data import Dictionary
from fairseq.models.wav2vec.wav2vec2 import Wav2Vec2Config
from omegaconf import OmegaConf
from torch.testing import assert_close

import pn_fairseq.models  # noqa: F401
from pn_fairseq.norms import norm_report, running_norms

from ..models.helpers import both_sides

LENGTHS = torch.tensor([48, 24, 12])


def s2t(arch: str, **settings):
    """Filter banks (B, T, 80), and target tokens with padding."""
    dictionary = Dictionary()
    for index in range(20):
        dictionary.add_symbol(str(index))
    args = Namespace(
        arch=arch,
        input_feat_per_channel=80,
        input_channels=1,
        conv_channels=16,
        dropout=0.0,
        max_source_positions=100,
        max_target_positions=20,
        depthwise_conv_kernel_size=3,
        **both_sides(embed_dim=16, ffn_embed_dim=16, layers=2, attention_heads=2),
        convert_norms=["*=batch"],
        fp16=False,
        **settings,
    )
    task = SimpleNamespace(target_dictionary=dictionary, source_dictionary=None, data_cfg=None)
    target = torch.randint(4, 20, (3, 6))
    target[1:, 4:] = dictionary.pad()

    def run(model, x):
        return (
            model(src_tokens=x, src_lengths=LENGTHS, prev_output_tokens=target)[0].square().mean()
        )

    return lambda: models.build_model(deepcopy(args), task), run, torch.randn(3, 48, 80)


def pretraining(name: str, **settings):
    """Waveforms (B, samples), of which the last ones are padding; convolutions divide their
    number by 4.
    """
    sizes = {
        "encoder_layers": 2,
        "encoder_embed_dim": 16,
        "encoder_ffn_embed_dim": 16,
        "encoder_attention_heads": 2,
    }
    sizes |= {
        "conv_feature_layers": "[(16, 4, 4)]",
        "conv_pos": 4,
        "conv_pos_groups": 2,
        "final_dim": 8,
    }
    if name == "wav2vec2":
        cfg = OmegaConf.structured(
            Wav2Vec2Config(**sizes, latent_vars=8, num_negatives=3, **settings)
        )
        task = SimpleNamespace()
    else:
        from fairseq.models.hubert.hubert import HubertConfig

        cfg = OmegaConf.structured(HubertConfig(**sizes, label_rate=4000, **settings))
        label = Dictionary()
        task = SimpleNamespace(
            cfg=SimpleNamespace(sample_rate=16000),
            dictionaries=[label],
            source_dictionary=None,
            target_dictionary=None,
        )
    OmegaConf.set_struct(cfg, False)
    cfg._name = name
    cfg.convert_norms = ["encoder.*=batch"]
    samples = 4 * LENGTHS
    mask = torch.arange(192) >= samples[:, None]

    def run(model, x):
        found = model(x, padding_mask=mask, features_only=True, mask=False)
        return found["x"].square().mean()

    return lambda: models.build_model(deepcopy(cfg), task), run, torch.randn(3, 192)


CASES = {
    "s2t_transformer_s": lambda: s2t("s2t_transformer_s"),
    "s2t_conformer": lambda: s2t("s2t_conformer"),
    "wav2vec2": lambda: pretraining("wav2vec2"),
    "wav2vec2 conformer": lambda: pretraining(
        "wav2vec2", layer_type="conformer", depthwise_conv_kernel_size=3
    ),
    "hubert": lambda: pretraining("hubert"),
}


@pytest.mark.parametrize("name", CASES)
def test_speech(name, recwarn):
    build, run, x = CASES[name]()
    model = build()
    assert len(norm_report(model)) >= 5
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(2):
        optimizer.zero_grad()
        run(model, x).backward()
        optimizer.step()
    assert not [each for each in recwarn if "padding mask" in str(each.message)]
    state = model.state_dict()
    norms = running_norms(model)
    assert all(norm.num_batches_tracked == 2 for norm in norms)
    again = build()
    again.load_state_dict(deepcopy(state))
    with torch.no_grad():
        assert_close(run(model.eval(), x), run(again.eval(), x))


def test_the_norm_after_the_last_layer_has_the_mask_of_the_frames():
    """Also where the target, whose mask is an argument of the model, is as long as the frames."""
    build, _, x = s2t("s2t_transformer_s")
    # two convolutions halve the lengths
    encoder = build().encoder
    frames = torch.tensor([12, 6, 3])
    padding = torch.arange(12) >= frames[:, None]
    seen = []
    encoder.transformer_layers[-1].register_forward_hook(
        lambda module, args, y: seen.append(y.detach())
    )
    encoder(x, LENGTHS)["encoder_out"][0].sum().backward()
    (report,) = [each for each in norm_report(encoder) if each.name == "layer_norm"]
    assert report.line == 1
    assert report.decided == "the mask of the call"
    real = seen[0].transpose(0, 1)[~padding]
    assert_close(encoder.eval().layer_norm.running_mean, 0.1 * real.mean(0), rtol=1e-4, atol=1e-6)
    assert not encoder.layer_norm._forward_pre_hooks


def test_that_norm_ignores_the_mask_if_told_to():
    build, run, x = s2t("s2t_transformer_s", norm_ignore_mask=True)
    model = build()
    run(model, x).backward()
    assert model.encoder.layer_norm.mask_history.last.line == 12
