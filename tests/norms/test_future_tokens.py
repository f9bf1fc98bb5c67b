"""The warning of norms that show a causal decoder its future tokens, and the psi warm-up of
converted models.
"""

from copy import deepcopy

import pytest
import torch
from torch import nn

from pn_fairseq.norms import build_norm, convert_norms, norm_report, padding
from pn_fairseq.norms.conversion.future_tokens import is_in_causal_part, mixes

from ..fixtures.hugging_face import hugging_face
from .converted import recorded

C = 16
B = 3
T = 5


def told(model, norm="batch", **options):
    """The text of the one warning; "": there is none."""
    with recorded() as texts:
        convert_norms(model, norm, layout="BTC", **options)
    assert len(texts) < 2
    return "".join(texts)


def transformer():
    return nn.Transformer(C, 2, 1, 1, 32, batch_first=True)


def test_the_decoder_of_torch():
    text = told(transformer())
    assert text.startswith(
        "decoder.layers.0.norm1 and 3 other norms are in a decoder and, in training, compute with"
    )
    advice = (
        "Convert only the encoder (only='encoder.*'), or take a norm that never mixes tokens, such "
        "as 'rms'"
    )
    for words in ("a causal decoder sees future tokens", "(a leak)", advice):
        assert words in text
    assert "psi_warmup_updates" not in text
    assert told(transformer(), only="encoder.*") == told(transformer(), "rms") == ""
    assert told(nn.TransformerDecoderLayer(C, 2, 32), only="norm3").startswith(
        "norm3 is in a decoder and, in training"
    )
    alone = told(nn.TransformerDecoder(nn.TransformerDecoderLayer(C, 2, 32), 1), "power")
    assert "generates. Give psi_warmup_updates=0, or take a norm" in alone
    assert "encoder" not in alone
    found = told(nn.TransformerEncoder(nn.TransformerEncoderLayer(C, 2, 32), 1, nn.LayerNorm(C)))
    assert found == ""


def test_a_warm_up_mixes_tokens():
    text = told(transformer(), "power")
    assert "are in a decoder and, for the 1000 updates of the psi warm-up, in training" in text
    assert "give psi_warmup_updates=0, or take a norm that never" in text
    assert told(transformer(), "power", psi_warmup_updates=0) == ""
    assert "at first, in training" in told(transformer(), "mabn")


def test_no_encoder_beside_a_decoder():
    """Also one of one's own, of which nothing says that it is an encoder."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedded = nn.LayerNorm(C)
            self.first = nn.Sequential(nn.MultiheadAttention(C, 2), nn.LayerNorm(C))
            self.encoder = nn.Sequential(nn.Linear(C, C), nn.LayerNorm(C))
            self.second = nn.TransformerDecoder(nn.TransformerDecoderLayer(C, 2, 32), 1)

    model = Model()
    assert told(model).startswith("second.layers.0.norm1 and 2 other norms")
    found = [each.name for each in norm_report(model) if is_in_causal_part(model, each.name)]
    assert found == [f"second.layers.0.norm{number}" for number in (1, 2, 3)]


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(C)


class Attending(Layer):
    def forward(self, x, mem):
        return self.norm(x)


@pytest.mark.parametrize(
    ("parts", "first"),
    [
        ({"encoder": Layer, "decoder": Attending}, "decoder.norm"),
        ({"encoder": Layer, "decoder": lambda: nn.Sequential(Attending())}, "decoder.0.norm"),
        ({"one": Layer, "two": type("TextDecoder", (Attending,), {})}, "two.norm"),
        ({"encoder": Layer, "decoder": Layer}, ""),  # of an autoencoder
        ({"encoder": Attending, "reader": Attending}, ""),
        ({"model": type("EncoderDecoder", (Attending,), {})}, ""),
    ],
)
def test_a_decoder_of_ones_own(parts, first):
    """It is called a decoder and attends to something."""
    text = told(nn.ModuleDict({name: make() for name, make in parts.items()}))
    assert text.startswith(f"{first} is in a decoder" if first else "")
    assert bool(text) == bool(first)
    assert ("only='encoder.*'" in text) == ("encoder" in parts and bool(first))


def test_a_decoder_of_fairseq():
    decoder = type(
        "TransformerDecoder", (type("FairseqIncrementalDecoder", (nn.Sequential,), {}),), {}
    )
    model = nn.ModuleDict(
        {"encoder": nn.Sequential(nn.LayerNorm(C)), "decoder": decoder(nn.LayerNorm(C))}
    )
    assert told(model).startswith("decoder.0 is in a decoder")


@pytest.mark.parametrize(
    ("name", "in_decoder", "only"),
    [
        ("Bert", 0, ""),
        ("Llama", 3, "generates. Take a norm that"),
        ("Marian", 3, "(only='encoder.*')"),
        ("T5", 4, "(only='encoder.*')"),
    ],
)
def test_models_of_hugging_face(name, in_decoder, only):
    hf = hugging_face()
    stack = {
        "hidden_size": C,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 32,
    }
    sides = {
        f"{side}_{key}": 2
        for side in ("encoder", "decoder")
        for key in ("attention_heads", "ffn_dim")
    }
    sides |= {"d_model": C, "encoder_layers": 1, "decoder_layers": 1, "pad_token_id": 1}
    sizes = {
        "Marian": sides,
        "T5": {"d_model": C, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2},
    }
    config = getattr(hf, f"{name}Config")(vocab_size=40, **sizes.get(name, stack))
    model = getattr(hf, f"{name}Model")(config)
    text = told(model)
    assert bool(text) == bool(in_decoder)
    assert only in text
    names = [each.name for each in norm_report(model)]
    assert sum(is_in_causal_part(model, each) for each in names) == in_decoder


@pytest.mark.parametrize("name", ["layer", "rms", "batch", "power", "mabn", "unified"])
def test_which_norms_mix_tokens(name):
    """In the first step, of a sentence whose last token changes."""
    for warmup in (0, 2):
        norm = build_norm(name, C, batch_first=True, psi_warmup_updates=warmup)
        x = torch.randn(B, T, C)
        other = x.clone()
        other[:, -1] = 3.0
        y = deepcopy(norm)(x)[:, :-1]
        changed = deepcopy(norm)(other)[:, :-1]
        expected = not torch.allclose(y, changed, rtol=0, atol=1e-6)
        assert mixes(norm) == expected


# PN out of the box.


def test_power_has_the_warm_up_of_the_papers_models():
    model = convert_norms(nn.Sequential(nn.LayerNorm(C)), "power")
    assert model[0].psi_warmup_updates == norm_report(model)[0].psi_warmup_updates == 1000
    assert "0: PowerNorm for LayerNorm, psi warm-up of 1000 updates, layout" in str(
        norm_report(model)[0]
    )
    found = convert_norms(nn.Sequential(nn.LayerNorm(C)), "power", psi_warmup_updates=7)[
        0
    ].psi_warmup_updates
    assert found == 7
    (report,) = norm_report(convert_norms(nn.Sequential(nn.LayerNorm(C)), "batch"))
    assert report.psi_warmup_updates is None


@pytest.mark.parametrize(("warmup", "is_calm"), [(None, True), (0, False)])
def test_an_encoder_with_large_activations_trains(warmup, is_calm):
    """A regression from input of variance 9: without a warm-up psi is 1 at first, and nothing is
    normalized.
    """
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(C, 2, 32, dropout=0.0, batch_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    options = {} if warmup is None else {"psi_warmup_updates": warmup}
    model = convert_norms(model, "power", layout="BTC", **options).train()
    x = 3 * torch.randn(8, 10, C)
    target = torch.randn(8, 10, C)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(20):
        with padding(None):
            loss = (model(x) - target).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert (max(losses) < 3) == is_calm
    assert not is_calm or losses[-1] < losses[0]
