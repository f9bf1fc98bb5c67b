from argparse import Namespace

import pytest
import torch
from fairseq.models import ARCH_MODEL_NAME_REGISTRY
from fairseq.models.transformer.transformer_legacy import transformer_wmt_en_de_big_t2t

from pn_fairseq.norms import NORMS

from ..norms.oracle import FACTS
from .helpers import VOCABULARY, arch_args, build

#: size -> embedding, feed-forward, heads, layers on each side: the numbers of the papers.
SIZES = {"tiny": (128, 256, 4, 3), "iwslt": (512, 1024, 4, 6), "wmt_en_de_big": (1024, 4096, 16, 6)}
ARCHS = []
#: Every norm in one size and every size with PN; the others take seconds.
SOME = []
for _name, _entry in NORMS.items():
    for _size in SIZES:
        _arch = (f"transformer_{_entry.short}_{_size}", _name, _size)
        ARCHS.append(_arch)
        is_quick = _name == "power" or _size == "tiny"
        SOME.append(pytest.param(*_arch, marks=() if is_quick else pytest.mark.slow))


def expected_parameters(name: str, width: int, inner: int, layers: int) -> int:
    """Parameters of a pre-norm transformer with one shared embedding, counted by hand."""
    attention = 4 * (width * width + width)
    feed_forward = width * inner + inner + inner * width + width
    layer_norm = 2 * width
    norm = FACTS[name].parameters(width)
    encoder_layer = attention + feed_forward + 2 * norm
    decoder_layer = 2 * attention + feed_forward + 3 * layer_norm
    return VOCABULARY * width + layers * (encoder_layer + decoder_layer) + norm + layer_norm


def test_every_norm_has_every_size_and_nothing_else_is_registered():
    registered = set()
    for arch, model in ARCH_MODEL_NAME_REGISTRY.items():
        if model == "transformer_pn":
            registered.add(arch)
    assert registered == {"transformer_pn", *(arch for arch, _, _ in ARCHS)}
    found = {f"transformer_{norm}_iwslt" for norm in ("ln", "bn", "pnv", "pn")}
    assert found <= registered


@pytest.mark.parametrize(("arch", "norm", "size"), SOME)
def test_architecture_has_the_sizes_of_the_papers(arch, norm, size):
    width, inner, heads, layers = SIZES[size]
    with torch.device("meta"):  # the big ones would need seconds and gigabytes
        model = build(arch)
    found = sum(parameter.numel() for parameter in model.parameters())
    assert found == expected_parameters(norm, width, inner, layers)
    for stack in (model.encoder, model.decoder):
        assert len(stack.layers) == layers
        assert all(layer.self_attn.num_heads == heads for layer in stack.layers)
    cls = NORMS[norm].cls
    layer_norm = NORMS["layer"].cls
    groups = heads if norm in ("power", "power-v") else 0
    encoder_norms = [model.encoder.layer_norm]
    decoder_norms = [model.decoder.layer_norm]
    for layer in model.encoder.layers:
        encoder_norms += [layer.self_attn_layer_norm, layer.final_layer_norm]
    for layer in model.decoder.layers:
        decoder_norms += [
            layer.self_attn_layer_norm,
            layer.encoder_attn_layer_norm,
            layer.final_layer_norm,
        ]
    for module in encoder_norms:
        assert type(module) is cls
        assert module.layer_scale.groups == groups
    for module in decoder_norms:
        assert type(module) is layer_norm
        assert module.layer_scale.groups == 0


def test_big_architecture_has_the_dropouts_of_tensor2tensor():
    args = arch_args("transformer_pn_wmt_en_de_big")
    reference = Namespace()
    transformer_wmt_en_de_big_t2t(reference)
    for name in ("dropout", "attention_dropout", "activation_dropout", "decoder_ffn_embed_dim"):
        assert getattr(args, name) == getattr(reference, name)
    assert args.dropout == 0.3
    assert args.attention_dropout == 0.1
    assert args.activation_dropout == 0.1


def test_same_seed_gives_all_norms_the_same_weights():
    """Two architectures of one size differ in the norm, not in the draw of the weights."""
    weights = []
    for entry in NORMS.values():
        torch.manual_seed(1)
        model = build(f"transformer_{entry.short}_tiny", encoder_layers=2, decoder_layers=1)
        weights.append(model.encoder.layers[1].fc1.weight)
    assert all(torch.equal(weights[0], other) for other in weights[1:])
