"""The norms inside torch's own transformer modules, which compute LayerNorm themselves in
evaluation: the fast path.
"""

import copy
import io
import pickle

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from pn_fairseq.norms import build_norm, running_norms
from pn_fairseq.testing.helpers import Case, cases

from ..pairwise import in_pairs
from .helpers import randomize_affine

DIM = 8
HEADS = 2
LAYER = Case("layer", "paper")
POWER = Case("power", "paper")


def new_norm(case=POWER, **options):
    """With random weights and statistics."""
    norm = randomize_affine(build_norm(case.name, DIM, case.variant, batch_first=True, **options))
    for number in range(3 * len(running_norms(norm))):
        norm(torch.randn(3, 5, DIM, requires_grad=True) * (number + 1)).sum().backward()
    return norm


def encoder_layer(norm_first, case=POWER, **options):
    layer = nn.TransformerEncoderLayer(DIM, HEADS, 16, batch_first=True, norm_first=norm_first)
    layer.norm1, layer.norm2 = (new_norm(case, **options) for _ in range(2))
    return layer.eval()


def by_formula(layer, x, padding):
    """What the layer computes, written out: no code of torch that looks at norms."""

    def attend(h):
        return layer.self_attn(h, h, h, key_padding_mask=padding, need_weights=False)[0]

    def feed_forward(h):
        return layer.linear2(torch.relu(layer.linear1(h)))

    if layer.norm_first:
        x = x + attend(layer.norm1(x))
        return x + feed_forward(layer.norm2(x))
    x = layer.norm1(x + attend(x))
    return layer.norm2(x + feed_forward(x))


#: (3, 5), at the end of the sentences or at their beginning; torch makes nested tensors of the
#: former.
LAST = torch.arange(5) >= torch.tensor([[5], [3], [1]])
PADDINGS = {"none": None, "last": LAST, "first": LAST.flip(1)}


def assert_equal_at_tokens(found, expected, padding):
    real = slice(None) if padding is None else ~padding
    assert_close(found[real], expected[real], rtol=1e-5, atol=3e-5)


@in_pairs(
    case=cases(),
    padded=list(PADDINGS),
    options=[{}, {"affine": False}, {"layer_scale_groups": 2}],
    norm_first=[False, True],
)
def test_encoder_layer(case, padded, options, norm_first):
    torch.manual_seed(0)
    layer = encoder_layer(norm_first, case, **options)
    x = torch.randn(3, 5, DIM)
    padding = PADDINGS[padded]
    with torch.no_grad():
        assert_equal_at_tokens(
            layer(x, src_key_padding_mask=padding), by_formula(layer, x, padding), padding
        )


@pytest.mark.filterwarnings(
    "ignore:enable_nested_tensor", "ignore:The PyTorch API of nested tensors"
)
@in_pairs(case=cases(), padded=list(PADDINGS), norm_first=[False, True], nested=[False, True])
def test_encoder(case, padded, norm_first, nested):
    """A stack, and a norm after it."""
    torch.manual_seed(1)
    layer = encoder_layer(norm_first, case)
    last = new_norm(case)
    x = torch.randn(3, 5, DIM)
    encoder = nn.TransformerEncoder(layer, 2, norm=last, enable_nested_tensor=nested).eval()
    padding = PADDINGS[padded]
    with torch.no_grad():
        expected = last(
            by_formula(encoder.layers[1], by_formula(encoder.layers[0], x, padding), padding)
        )
        assert_equal_at_tokens(encoder(x, src_key_padding_mask=padding), expected, padding)


def saved(module):
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module)), saved]
)
def test_a_copy_is_computed_by_the_norm_too(copied):
    layer = encoder_layer(False)
    x = torch.randn(3, 5, DIM)
    with torch.no_grad():
        assert_close(copied(layer)(x), by_formula(layer, x, None), rtol=1e-5, atol=1e-5)


def test_layer_norm_stays_on_the_fast_path(monkeypatch):
    """There torch computes the same, and faster; a class that is derived from it may compute
    something else.
    """
    called = []
    monkeypatch.setattr(torch, "_transformer_encoder_layer_fwd", lambda *args: called.append(args))
    layers = [
        encoder_layer(False, LAYER),
        encoder_layer(False),
        encoder_layer(False, LAYER, layer_scale_groups=2),
    ]
    with torch.no_grad():
        for layer in layers:
            layer(torch.randn(3, 5, DIM))
    assert len(called) == 1


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@in_pairs(case=cases(), layout=[torch.strided, torch.jagged], training=[True, False])
def test_nested_tensors(case, layout, training):
    """The tokens of all sequences form one batch: y, gradients and state."""
    torch.manual_seed(3)
    norm = new_norm(case).train(training)
    other = copy.deepcopy(norm)
    sequences = [torch.randn(length, DIM, requires_grad=True) for length in (4, 1, 2)]
    tokens = torch.cat(sequences).detach().requires_grad_()
    y = norm(torch.nested.as_nested_tensor(sequences, layout=layout))
    expected = other(tokens)
    dy = torch.randn_like(expected)
    assert y.is_nested
    assert y.layout == layout
    found = torch.cat(y.unbind())
    assert_close(found, expected)
    gradients = torch.autograd.grad(found, sequences, dy)
    (expected_gradient,) = torch.autograd.grad(expected, tokens, dy)
    assert_close(torch.cat(gradients), expected_gradient)
    assert_close(norm.state_dict(), other.state_dict())


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_inputs_that_are_refused():
    starts = torch.tensor([1, 0])
    lengths = torch.tensor([2, 3])
    with_gaps = torch.randn(2, 4, DIM)
    with_gaps = torch.nested.narrow(with_gaps, 1, starts, lengths, layout=torch.jagged)
    refused = {
        "expected a floating-point input": torch.ones(4, 2, DIM, dtype=torch.long),
        "got one of 4 axes": torch.nested.as_nested_tensor([torch.randn(4, 2, DIM)]),
        "without gaps": with_gaps,
    }
    for message, wrong in refused.items():
        with pytest.raises(ValueError, match=message):
            new_norm(POWER)(wrong)
    x = torch.nested.as_nested_tensor([torch.randn(4, DIM), torch.randn(1, DIM)])
    for case in (LAYER, POWER):
        with pytest.raises(ValueError, match="no padding_mask"):
            new_norm(case)(x, torch.zeros(2, 4, dtype=torch.bool))
