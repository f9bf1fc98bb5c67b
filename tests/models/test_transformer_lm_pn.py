"""The ordinary decoder, and what it has in common with the tensorized one."""

from argparse import Namespace
from copy import deepcopy

import pytest
import torch
import torch.nn.functional as F
from fairseq.models import ARCH_MODEL_NAME_REGISTRY
from fairseq.models.transformer_lm import TransformerLanguageModel, base_lm_architecture
from torch.testing import assert_close

from pn_fairseq.norms import NORMS
from pn_fairseq.norms.core.base import ChannelNorm
from pn_fairseq.norms.registry import HEADS

from .helpers import (
    ADAPTIVE,
    BLOCK,
    MODEL_NORMS,
    VOCABULARY,
    arch_args,
    assert_same_training,
    build,
    make_task,
)

MODELS = ("transformer_lm", "tensorized_lm")
EVERY_KIND = pytest.mark.parametrize("name", MODEL_NORMS)
BOTH = pytest.mark.parametrize("stem", MODELS)


def tiny(stem, name, **flags):
    torch.manual_seed(1)
    return build(f"{stem}_{NORMS[name].short}_tiny", **flags)


def blocks(seed=0, batch=3, length=BLOCK, padded=True):
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(4, VOCABULARY, (batch, length), generator=generator)
    if padded:
        tokens[1, -4:] = 1
    return tokens


def trained(model, updates=2):
    """The model after some updates, so that its statistics are not the initial ones, in
    evaluation.
    """
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for update in range(updates):
        model.set_num_updates(update)
        tokens = blocks(update, padded=False)
        logits = model(tokens)[0].flatten(0, 1)
        F.cross_entropy(logits, tokens.flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.eval()


@pytest.mark.parametrize(
    ("stem", "sizes"),
    [
        ("transformer_lm", ("tiny", "base", "wiki103")),
        ("tensorized_lm", ("tiny", "ptb", "wt103")),
    ],
)
def test_every_norm_has_every_size(stem, sizes):
    registered = {arch for arch, model in ARCH_MODEL_NAME_REGISTRY.items() if model == f"{stem}_pn"}
    expected = {f"{stem}_{entry.short}_{size}" for entry in NORMS.values() for size in sizes}
    assert registered == {f"{stem}_pn", *expected}


def norms_of(model):
    return [module for module in model.modules() if isinstance(module, ChannelNorm)]


@pytest.mark.parametrize("name", NORMS)
@BOTH
def test_norms_are_in_every_place(stem, name):
    norms = norms_of(tiny(stem, name, layer_scale_groups=2))
    assert len(norms) == 2 * 3 + 1
    assert {type(norm) for norm in norms} == {NORMS[name].cls}
    assert {norm.layer_scale.groups for norm in norms} == {2}


@EVERY_KIND
def test_layer_scale_has_a_group_for_each_head(name):
    with torch.device("meta"):
        norms = norms_of(build(f"transformer_lm_{NORMS[name].short}_base"))
    found = {norm.layer_scale.groups for norm in norms}
    assert found == {8 if NORMS[name].default("layer_scale_groups") is HEADS else 0}


@pytest.mark.parametrize(
    "flags", [{"share_decoder_input_output_embed": True}, ADAPTIVE], ids=["tied", "adaptive"]
)
def test_layer_norm_model_is_fairseqs_own(flags):
    flags = {"decoder_embed_dim": 64, "decoder_ffn_embed_dim": 96, "decoder_layers": 2, **flags}
    ours = build("transformer_lm_ln_base", **flags).eval()
    settings = Namespace(tokens_per_sample=BLOCK, **flags)
    base_lm_architecture(settings)
    theirs = TransformerLanguageModel.build_model(settings, make_task()).eval()
    theirs.load_state_dict(ours.state_dict())  # also the same names
    with torch.no_grad():
        for padded in (True, False):
            tokens = blocks(padded=padded)
            found = ours(tokens)
            expected = theirs(tokens)
            assert_close(found[0], expected[0])
            sample = {"target": tokens}
            found = ours.get_normalized_probs(found, True, sample)
            expected = theirs.get_normalized_probs(expected, True, sample)
            assert_close(found, expected)


@EVERY_KIND
@BOTH
def test_prefix_has_the_outputs_that_it_has_in_the_whole_block(stem, name):
    """In evaluation nothing depends on what comes after."""
    # fairseq's softmax and positions stay float32
    model = trained(tiny(stem, name, decoder_layers=1).double())
    tokens = blocks(5, padded=False)
    with torch.no_grad():
        whole = model(tokens)[0]
        close = {"rtol": 0, "atol": 1e-5 * whole.abs().max().item()}
        for end in (1, 5, 8, 9):
            found = model(tokens[:, :end])[0]
            expected = whole[:, :end]
            assert_close(found, expected, **close)
        if stem == "transformer_lm":
            state = {}
            steps = []
            for end in range(1, BLOCK + 1):
                logits, _ = model.decoder(tokens[:, :end], incremental_state=state)
                steps.append(logits)
            assert_close(torch.cat(steps, dim=1), whole, **close)


@EVERY_KIND
@BOTH
def test_more_padding_changes_nothing_in_training(stem, name):
    size = {"decoder_layers": 1, "max_target_positions": BLOCK + 3}
    narrow = tiny(stem, name, dropout=0.0, **size).double()
    wide = deepcopy(narrow)
    tokens = blocks()
    losses = []
    for model, inputs in ((narrow, tokens), (wide, F.pad(tokens, (0, 3), value=1))):
        logits = model(inputs)[0].flatten(0, 1)
        loss = F.cross_entropy(logits, inputs.flatten(), ignore_index=1)
        loss.backward()
        losses.append(loss)
    assert_close(losses[0], losses[1], rtol=1e-9, atol=0)
    assert_same_training(narrow, wide, state=(1e-6, 1e-7), rtol=1e-6, atol=1e-9)


def test_some_layers_of_a_checkpoint_are_kept():
    """What fairseq does with --decoder-layers-to-keep when a model is loaded to be pruned."""
    whole = build("transformer_lm_pn_tiny")
    kept = build("transformer_lm_pn_tiny", decoder_layers_to_keep="1")
    assert len(whole.decoder.layers) == 3
    assert len(kept.decoder.layers) == 1
    settings = Namespace(arch="transformer_lm_pn_tiny", decoder_layers_to_keep="1")
    kept.load_state_dict(whole.state_dict(), model_cfg=settings)
    assert torch.equal(kept.decoder.layers[0].fc1.weight, whole.decoder.layers[1].fc1.weight)


def test_wiki103_has_the_settings_of_fairseqs():
    args = arch_args("transformer_lm_pn_wiki103")
    assert args.decoder_layers == 16
    assert args.decoder_embed_dim == 1024
    assert args.adaptive_softmax_cutoff == "20000,60000"
    assert args.no_decoder_final_norm
    assert args.tie_adaptive_weights
    assert args.decoder_norm == "power"
