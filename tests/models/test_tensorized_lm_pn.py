import math
from argparse import Namespace
from copy import deepcopy
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from fairseq.models import ARCH_MODEL_REGISTRY
from torch.testing import assert_close

from pn_fairseq.models.from_checkpoint import make_dictionary
from pn_fairseq.models.tensorized_attention import ROWS, TensorizedAttention
from pn_fairseq.models.tensorized_lm_pn import sinusoids
from pn_fairseq.norms.core.base import ChannelNorm

from .helpers import BLOCK, VOCABULARY, arch_args, assert_same_training, build

DIM, RANK, LENGTH = 6, 5, ROWS + 3  # the rows are computed in two parts


def attention(seed=0, **settings):
    torch.manual_seed(seed)
    layer = TensorizedAttention(DIM, RANK, LENGTH, std=0.5, **settings).double()
    x = torch.randn(LENGTH, 2, DIM, dtype=torch.float64)
    others = torch.randn(LENGTH, DIM), torch.randn(RANK), torch.randn(RANK)
    return layer, x, *(each.double() for each in others)


def triple_loop(layer, x, positions, u, w, masked, mask=None):
    """The formula of the class, one scalar at a time."""
    x, positions, u, w = (each.detach().numpy() for each in (x, positions, u, w))
    weights = {name: parameter.detach().numpy() for name, parameter in layer.named_parameters()}
    cores = weights["core"]
    if layer.softmax:
        cores = np.exp(cores) / np.exp(cores).sum(1, keepdims=True)
    y = np.zeros_like(x)
    for b in range(x.shape[1]):
        q, k, v = np.split(x[:, b] @ weights["in_proj.weight"].T, 3, axis=1)
        p = positions @ weights["position_proj.weight"].T
        for i in range(len(x)):
            for j in range(len(x)):
                for n in range(len(x)):
                    if masked and (j > i or n > i):
                        continue
                    if mask is not None and (mask[b, j] or mask[b, n]):
                        continue
                    a = 0.0
                    for g in cores:
                        for r in range(RANK):
                            of_content = (q[i, r] + u[r]) * k[j, r]
                            of_position = (q[i, r] + w[r]) * p[j, r]
                            a += g[r] * (of_content + of_position) * v[n, r]
                    y[i, b] += a / len(cores) * weights["out_proj"][j, n]
    return y


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.parametrize(("cores", "softmax"), [(1, True), (3, True), (2, False)])
def test_attention_is_the_triple_loop(cores, softmax, masked, padded):
    layer, *inputs = attention(cores=cores, softmax=softmax, masked=masked)
    mask = torch.zeros(2, LENGTH, dtype=torch.bool)
    mask[1, -3:] = True
    mask = mask if padded else None
    expected = triple_loop(layer, *inputs, masked, mask)
    found = layer(*inputs, mask).detach().numpy()
    np.testing.assert_allclose(found, expected, rtol=1e-10, atol=1e-10)


def test_the_core_starts_on_the_simplex():
    for softmax in (True, False):
        layer, *_ = attention(softmax=softmax)
        core = layer.core.softmax(-1) if softmax else layer.core
        assert (core > 0).all()
        np.testing.assert_allclose(core.sum().item(), 1, rtol=1e-6)


@pytest.mark.parametrize(
    ("arch", "vocabulary", "tokens", "parameters"),
    [
        ("tensorized_lm_ln_ptb", 10_000, 32, 6_715_252),
        ("tensorized_lm_ln_wt103", 267_735, 80, 85_356_626),
    ],
)
def test_parameters_are_as_many_as_in_the_authors_code(arch, vocabulary, tokens, parameters):
    """Counted by running the authors' run_ptb.sh and run_wt103.sh; these have LayerNorm, 2 x C
    parameters.
    """
    words = make_dictionary(vocabulary)
    task = SimpleNamespace(
        args=Namespace(tokens_per_sample=tokens), source_dictionary=words, target_dictionary=words
    )
    with torch.device("meta"):
        model = ARCH_MODEL_REGISTRY[arch].build_model(arch_args(arch), task)
    assert sum(parameter.numel() for parameter in model.parameters()) == parameters


def test_positions_are_distances_to_the_end_of_the_longest_block():
    table = sinusoids(5, 4)
    for row, distance in enumerate((4, 3, 2, 1, 0)):
        angles = distance, distance / 100
        expected = [*map(math.sin, angles), *map(math.cos, angles)]
        assert_close(table[row], torch.tensor(expected), rtol=0, atol=1e-6)


@pytest.mark.parametrize("post_norm", [False, True])
def test_model_is_its_formula(post_norm):
    """Of one layer with LN, in float64, with the attention that is tested above."""
    model = build(
        "tensorized_lm_ln_tiny", post_norm=post_norm, decoder_layers=1, decoder_final_norm=False
    )
    model = model.double().eval()
    assert sum(isinstance(each, ChannelNorm) for each in model.modules()) == 2
    decoder = model.decoder
    layer = model.decoder.layers[0]
    tokens = torch.randint(4, VOCABULARY, (2, BLOCK))

    def norm(x):
        variance = x.var(-1, correction=0, keepdim=True)
        return (x - x.mean(-1, keepdim=True)) / (variance + 1e-5).sqrt()

    def feed_forward(x):
        hidden = x @ layer.fc1.weight.T + layer.fc1.bias
        return hidden.clamp(min=0) @ layer.fc2.weight.T + layer.fc2.bias

    def attend(x):
        arguments = decoder.positions.double(), decoder.content_bias, decoder.position_bias
        return layer.attention(x.transpose(0, 1), *arguments).transpose(0, 1)

    x = 128**0.5 * decoder.embed_tokens.weight[tokens]
    if post_norm:
        y = norm(x + attend(x))
        y = norm(y + feed_forward(y))
    else:
        y = x + attend(norm(x))
        y = y + feed_forward(norm(y))
    expected = y @ decoder.embed_tokens.weight.T + decoder.output_bias
    assert_close(model(tokens)[0], expected)


def test_adaptive_softmax_is_normalized_and_shares_the_embedding():
    model = build("tensorized_lm_ln_tiny", adaptive_softmax_cutoff="20,60").double().eval()
    softmax = model.decoder.adaptive_softmax
    weight = model.decoder.embed_tokens.weight
    with torch.no_grad():
        softmax.bias.normal_()
        softmax.clusters.bias.normal_()
    features = torch.randn(1, 7, 128, dtype=torch.float64)
    target = torch.tensor([[4, 19, 20, 59, 60, 99, 30]])
    whole = softmax.get_log_prob(features, None)
    found = whole.exp().sum(-1)
    assert_close(found, torch.ones(1, 7, dtype=torch.float64))
    logits = features[0] @ weight.T + softmax.bias
    clusters = softmax.clusters(features[0])
    head = torch.cat([logits[:, :20], clusters], 1).log_softmax(1)
    first = logits[:, 20:60].log_softmax(1) + head[:, [20]]
    second = logits[:, 60:].log_softmax(1) + head[:, [21]]
    expected = torch.cat([head[:, :20], first, second], 1)
    assert_close(whole[0], expected)
    outputs, targets = softmax(features, target)  # what the criterion adaptive_loss takes
    loss = 0.0
    for output, chosen in zip(outputs, targets, strict=True):
        loss += torch.nn.functional.cross_entropy(output, chosen, reduction="sum")
    assert_close(loss, -expected.gather(1, target.T).sum())


def test_copy_of_the_model_has_its_own_embedding():
    """--store-ema copies the model."""
    model = build("tensorized_lm_ln_tiny", adaptive_softmax_cutoff="20,60").eval()
    other = deepcopy(model)
    features = torch.randn(1, 3, 128)
    before = model.decoder.adaptive_softmax.get_log_prob(features, None)
    torch.nn.init.normal_(other.decoder.embed_tokens.weight)
    own = model.decoder.adaptive_softmax.get_log_prob(features, None)
    of_copy = other.decoder.adaptive_softmax.get_log_prob(features, None)
    assert torch.equal(own, before)
    assert not torch.equal(of_copy, before)


def test_block_that_is_too_long_is_refused():
    with pytest.raises(
        ValueError, match=f"{BLOCK + 1} tokens is longer.*--tokens-per-sample {BLOCK}"
    ):
        build("tensorized_lm_ln_tiny")(torch.full((1, BLOCK + 1), 5))


def test_unmasked_model_warns_and_is_not_causal(caplog):
    caplog.set_level("WARNING")
    model = build("tensorized_lm_ln_tiny", tensorized_unmasked=True).eval()
    assert "not causal" in caplog.text
    tokens = torch.randint(4, VOCABULARY, (1, BLOCK))
    changed = tokens.clone()
    changed[0, -1] += 1 if tokens[0, -1] < VOCABULARY - 1 else -1
    first = model(tokens)[0][0, 0]
    assert not torch.equal(first, model(changed)[0][0, 0])


@pytest.mark.parametrize("offload", [False, True])
def test_activation_checkpointing_gives_the_same_gradients(offload):
    plain = build("tensorized_lm_pn_tiny", dropout=0.0)
    other = build(
        "tensorized_lm_pn_tiny",
        dropout=0.0,
        checkpoint_activations=True,
        offload_activations=offload,
    )
    other.load_state_dict(plain.state_dict())
    tokens = torch.randint(4, VOCABULARY, (2, BLOCK))
    for model in (plain, other):
        model(tokens)[0].square().mean().backward()
    assert_same_training(plain, other)
