"""Converted models in evaluation: folded norms, torch's fast path, and export."""

import pytest
import torch
from torch import nn
from torch.nn.utils import prune
from torch.testing import assert_close

from pn_fairseq.norms import convert_norms, fold_norms, norm_report, padding
from pn_fairseq.norms.core.compiled import open_scopes

from .converted import (
    MASK,
    B,
    ByVariance,
    C,
    converted,
    random_tokens,
    randomized,
    refuses,
)


def test_training_cannot_be_exported():
    model = converted("power")
    with pytest.raises(RuntimeError, match=r"torch.export .* call eval\(\) first"):
        torch.export.export(model, (random_tokens(),), strict=False)
    assert not open_scopes  # a model that is compiled next would run in them


class PreNorm(nn.Module):
    """A norm that two linear maps take, one after a grouped convolution, one before a padded
    one, and a post-norm.
    """

    def __init__(self):
        super().__init__()
        self.first = nn.LayerNorm(C)
        self.q = nn.Linear(C, C, bias=False)
        self.k = nn.Linear(C, C)
        self.convolution = nn.Conv1d(C, C, 3, padding=1, groups=C, bias=False)
        self.middle = nn.BatchNorm1d(C)
        self.edge = nn.BatchNorm1d(C)
        self.padded = nn.Conv1d(C, C, 3, padding=1)
        self.post = nn.LayerNorm(C)

    def forward(self, x):
        h = self.first(x)
        x = (x + self.q(input=h) * self.k(h)).transpose(1, 2)
        x = self.middle(self.convolution(x)).relu()
        x = self.padded(self.edge(x)).transpose(1, 2)
        return self.post(x + 1) * 2


@pytest.mark.parametrize("norm", ["batch", "power"])
def test_folding(norm):
    model = convert_norms(randomized(PreNorm()), norm)
    x = random_tokens()
    for _ in range(3):
        with padding(MASK):
            model(x).square().sum().backward()
    with refuses("call eval"):
        fold_norms(model, x)
    expected = model.eval()(x)
    # Zeros that a convolution pads with are not normalized, and the post-norm is followed by no
    # map.
    assert fold_norms(model, x) == [("first", "q, k"), ("middle", "convolution")]
    assert_close(model(x), expected, rtol=1e-4, atol=1e-5)
    assert [each.name for each in norm_report(model)] == ["edge", "post"]
    assert fold_norms(convert_norms(PreNorm(), norm, zero_padding=True).eval(), x) == []
    chain = InADict(nn.LayerNorm(C), nn.Linear(C, C))
    assert folded(chain, norm, x) == [("0", "1")]
    chain = nn.Sequential(nn.Linear(C, C), nn.LayerNorm(C))
    assert folded(chain, norm, x) == [("1", "0")]
    chain = nn.Sequential(nn.BatchNorm1d(C), nn.Conv1d(C, C, 2))
    assert folded(chain, norm, x.transpose(1, 2)) == [("0", "1")]


def folded(chain, norm, example):
    """What is folded of a converted model with random parameters."""
    return fold_norms(randomized(convert_norms(chain, norm)).eval(), example)


@pytest.mark.parametrize("norm_first", [True, False])
@pytest.mark.parametrize("only", ["*", "*.norm2"])
def test_folding_torchs_encoder(norm_first, only):
    """Its layers read eps of their norms, and have a fast path that computes LayerNorm."""
    layer = nn.TransformerEncoderLayer(C, 2, 32, batch_first=True, norm_first=norm_first)
    model = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
    convert_norms(model, "batch", only=only)
    model = randomized(model).eval()
    x = random_tokens()
    expected = model(x)
    expected_names = [("layers.0.norm2", "layers.0.linear1")] if norm_first else []
    assert fold_norms(model, x) == expected_names
    assert_close(model(x), expected, rtol=1e-4, atol=1e-5)
    with torch.no_grad():
        assert_close(model(x), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("offset", "gain"), [(1.0, "weight"), (0.0, "scale")])
def test_torchs_encoder_reads_no_gain_that_is_stored_in_another_way(offset, gain):
    """Its fast path, and that with nested tensors, which a mask of sentences with their padding
    last starts.
    """
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(C, 2, 32, batch_first=True), 2)
    for layer in model.layers:
        layer.norm1 = ByVariance(offset, gain)
        layer.norm2 = ByVariance(offset, gain)
    convert_norms(model, "layer").eval()
    x = random_tokens()
    for mask in (None, MASK):
        expected = model(x, src_key_padding_mask=mask)
        with torch.no_grad():
            found = model(x, src_key_padding_mask=mask)
            assert_close(found, expected, rtol=1e-4, atol=1e-5)


def before(linear):
    return nn.Sequential(nn.ReLU(), nn.LayerNorm(C), linear)


class InADict(nn.Sequential):
    def forward(self, x):
        return {"y": (super().forward(x), 3)}


class ReadsItsNorm(nn.Sequential):
    def forward(self, x):
        return super().forward(x) * self[1].weight.mean()


class Tied(nn.Sequential):
    """As an output projection that is tied to the embeddings."""

    def __init__(self):
        first = nn.Linear(C, C)
        last = nn.Linear(C, C)
        last.weight = first.weight
        super().__init__(first, nn.ReLU(), nn.LayerNorm(C), last)


@pytest.mark.parametrize(
    "make",
    [
        Tied,
        lambda: before(nn.utils.parametrizations.weight_norm(nn.Linear(C, C))),
        lambda: before(prune.identity(nn.Linear(C, C), "weight")),
        lambda: ReadsItsNorm(nn.ReLU(), nn.LayerNorm(C), nn.Linear(C, C)),
    ],
    ids=["tied", "weight norm", "pruned", "read"],
)
def test_what_cannot_be_folded_is_left_as_it_is(make):
    model = randomized(convert_norms(make(), "batch")).eval()
    x = torch.randn(B, C)
    expected = model(x)
    modules = dict(model.named_modules())
    parameters = [*map(id, model.parameters())]
    assert fold_norms(model, x) == []
    assert dict(model.named_modules()) == modules
    assert model(x).equal(expected)
    assert [*map(id, model.parameters())] == parameters
