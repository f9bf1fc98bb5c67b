from copy import deepcopy

import pytest
import torch
from torch.testing import assert_close

from pn_fairseq.fairseq_patches.training import padding_of_inputs
from pn_fairseq.models.layers import mask_of

from .helpers import assert_same_training, build, loss_of, make_task, padded_batch


def test_all_hidden_states_are_returned_when_asked_for():
    model = build("transformer_pn_tiny").eval()
    src, _ = padded_batch()
    out = model.encoder(src, return_all_hiddens=True)
    assert len(out["encoder_states"]) == 4
    assert len(out["fc_results"]) == 3
    assert out["encoder_out"][0].shape == (7, 3, 128)
    assert out["src_lengths"][0].flatten().tolist() == [7, 4, 7]


@pytest.mark.parametrize("variant", ["paper", "release"])
def test_embeddings_at_padding_are_zeroed_but_not_in_the_release(variant):
    """fairseq 0.8, which the release is a fork of, leaves them; the release's nu takes in what
    stands at padding.
    """
    model = build("transformer_pn_tiny", norm_variant=variant, dropout=0.0)
    with torch.no_grad():
        # the row of padding is trained where embeddings are shared
        model.encoder.embed_tokens.weight[1] = 0.3
    seen = []
    model.encoder.layers[0].register_forward_pre_hook(
        lambda _, arguments: seen.append(arguments[0])
    )
    src, prev = padded_batch()
    model(src, None, prev)
    embedded = 128**0.5 * model.encoder.embed_tokens(src) + model.encoder.embed_positions(src)
    expected = embedded if variant == "release" else embedded * src.ne(1).unsqueeze(-1)
    assert_close(seen[0].transpose(0, 1), expected)
    assert (expected[1, 0] != 0).all() == (variant == "release"), "source 1 begins with padding"


@pytest.mark.slow
def test_compiled_model_trains_and_evaluates_like_the_plain_one():
    torch.manual_seed(1)
    one_layer = {"encoder_layers": 1, "decoder_layers": 1, "dropout": 0.0, "attention_dropout": 0.0}
    plain = build("transformer_pn_tiny", psi_warmup_updates=1, **one_layer).double()
    other = deepcopy(plain)
    compiled = torch.compile(other, backend="eager")
    src, prev = padded_batch(batch=4)
    for update in range(3):
        for model, call in ((plain, plain), (other, compiled)):
            model.zero_grad()
            model.set_num_updates(update)
            loss_of(call, src, prev).backward()
        assert_same_training(plain, other, rtol=1e-9, atol=1e-12)
    plain.eval()
    compiled.eval()
    with torch.no_grad():
        found = compiled(src, None, prev)[0]
        expected = plain(src, None, prev)[0]
        assert_close(found, expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        (
            {"decoder_norm": "batch"},
            "decoder.layers.0.self_attn_layer_norm and 9 other norms are in a decoder and, in",
        ),
        (
            {"decoder_norm": "power", "psi_warmup_updates": 9},
            "for the 9 updates of the psi warm-up, in training",
        ),
        ({"decoder_norm": "power", "psi_warmup_updates": 0}, ""),
        ({}, ""),  # PN in the encoder only
    ],
)
def test_training_tells_once_that_a_decoder_sees_future_tokens(settings, told, caplog):
    model = build("transformer_pn_tiny", **settings)
    assert not caplog.text  # a checkpoint is loaded without a word
    model.eval()
    model.train()
    model.train()
    assert told in caplog.text
    assert caplog.text.count("(a leak)") == bool(told)


def test_tokens_that_are_known_to_hold_no_padding_are_not_looked_at(monkeypatch):
    """On a GPU a look at values waits for the device."""
    task = make_task()
    tokens = torch.tensor([[5, 6, 7], [8, 9, 1]])
    sample = {"net_input": {"src_tokens": tokens, "prev_output_tokens": tokens[:1]}}
    assert padding_of_inputs(task, sample) == {"src_tokens": True, "prev_output_tokens": False}
    assert padding_of_inputs(task, None) == padding_of_inputs(task, {}) == {}
    for known, expected in ((True, tokens.eq(1)), (False, None)):
        told = tokens.clone()
        told.has_padding = known
        with monkeypatch.context() as blind:
            blind.setattr(torch.Tensor, "any", None)
            mask = mask_of(told, 1)
        assert mask is expected or torch.equal(mask, expected)
    assert mask_of(tokens[:1], 1) is None
    assert torch.equal(mask_of(tokens, 1), tokens.eq(1))


@pytest.mark.ci
def test_compiled_layers_train_as_plain_ones(monkeypatch):
    """Three graphs serve all layers, lengths and padding: one for the encoder, one for the decoder,
    and one for the decoder's last layer, which fairseq asks for the attention weights.

    The keys of the state stay, and a copy of the model, as for an average of weights, has layers
    of its own.
    """
    compile_layer = torch.nn.Module.compile
    monkeypatch.setattr(
        torch.nn.Module,
        "compile",
        lambda layer, **options: compile_layer(layer, backend="aot_eager", **options),
    )
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    small = {"encoder_layers": 2, "decoder_layers": 3, "dropout": 0.0}
    plain, compiled = (
        build("transformer_pn_tiny", compile_layers=flag, **small) for flag in (False, True)
    )
    compiled.load_state_dict(plain.state_dict())
    for model in (plain, compiled):
        model.train().compile_layers()
        for number in range(4):
            model.set_num_updates(number + 1)
            src, prev = padded_batch(number, source=7 + number % 3, target=5 + number % 2)
            if number == 2:
                src, prev = src.masked_fill(src == 1, 7), prev.masked_fill(prev == 1, 7)
            loss_of(model, src, prev).backward()
    assert_same_training(compiled, plain, state=(1e-5, 1e-6), rtol=1e-4, atol=1e-5)
    assert compiled.state_dict().keys() == plain.state_dict().keys()
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 3
    averaged = deepcopy(compiled)
    with torch.no_grad():
        for parameter in averaged.parameters():
            parameter.zero_()
    found = loss_of(compiled, *padded_batch())
    expected = loss_of(averaged, *padded_batch())
    assert found != expected
