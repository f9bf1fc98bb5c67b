"""Placements of norms: against fairseq's own model, formulas written apart, and published
initializations.
"""

import math
from argparse import Namespace
from copy import deepcopy

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from fairseq.models.transformer import TransformerModel

from benchmarks.models import arch_args, make_task
from pn_fairseq.common.checkpoints import CheckpointError
from pn_fairseq.models.fold_checkpoint import fold_checkpoint
from pn_fairseq.models.norm_probe import NormProbe
from pn_fairseq.models.placements import PLACEMENTS, register_placement
from pn_fairseq.norms import recalibrating, running_norms
from pn_fairseq.norms.core.base import ChannelNorm
from pn_fairseq.report.figures import read_probe
from pn_fairseq.testing.helpers import assert_close

from .helpers import assert_same_training, both_sides, build, loss_of, padded_batch


def small(placement: str, norm: str = "layer") -> dict:
    layers = 4 if placement == "mix" else 2  # of fewer layers mix is pre
    return {"dropout": 0.0, **both_sides(norm=norm, norm_placement=placement, layers=layers)}


def placed(placement: str, norm: str = "layer", **changes):
    torch.manual_seed(1)
    return build("transformer_pn_tiny", **small(placement, norm) | changes)


def train(model, src, prev, updates=3):
    """Forwards and backwards without an optimizer; returns the last loss."""
    model.train()
    for update in range(updates):
        model.set_num_updates(update)
        model.zero_grad()
        loss = loss_of(model, src, prev)
        loss.backward()
    model.set_num_updates(updates)
    return loss


@pytest.mark.parametrize(("placement", "without"), [("pre", False), ("post", False), ("pre", True)])
def test_with_layer_norm_it_is_fairseqs_transformer_to_the_bit(placement, without):
    flags = {"dropout": 0.1, "no_cross_attention": without, "layernorm_embedding": without}
    ours = placed(placement, **flags)
    torch.manual_seed(1)
    args = arch_args("transformer_pn_tiny", **{**small(placement), **flags})
    args.encoder_normalize_before = args.decoder_normalize_before = placement == "pre"
    fairseqs = TransformerModel.build_model(args, make_task())
    assert ours.state_dict().keys() == fairseqs.state_dict().keys()
    src, prev = padded_batch()
    results = []
    for model in (ours, fairseqs):
        model.train()
        torch.manual_seed(3)
        loss = loss_of(model, src, prev)
        loss.backward()
        gradients = [
            parameter.grad for parameter in model.parameters() if parameter.grad is not None
        ]
        model.eval()
        logits, extra = model(src, None, prev, alignment_heads=2)
        attention = [one for one in extra["attn"] if one is not None]
        results.append((loss, logits, model.decoder(prev)[0], *attention, *gradients))
    assert all(map(torch.equal, *results))


# --- formulas ---


def heads(module, x):
    """(B, heads, T, C / heads)"""
    return x.unflatten(-1, (module.num_heads, -1)).transpose(1, 2)


def attention(module, query, key, causal: bool, padding):
    """On (B, T, C), by torch."""
    q = heads(module, module.q_proj(query))
    k = heads(module, module.k_proj(key))
    v = heads(module, module.v_proj(key))
    real = ~padding[:, None, None]
    if causal:
        real = real & torch.ones(q.size(2), k.size(2), dtype=torch.bool).tril()
    return F.scaled_dot_product_attention(q, k, v, real).transpose(1, 2).flatten(2)


def layer_norm(module):
    """torch's, with the parameters of a norm."""
    return lambda x: F.layer_norm(x, x.shape[-1:], module.weight, module.bias, module.eps)


def sublayers(layer, padding, memory, memory_padding):
    """(norm of the sublayer, its second norm or None, F) in order."""
    own = layer.self_attn
    cross = getattr(layer, "encoder_attn", None)

    def last(module, h):  # of placement sub: a norm and the projection
        if not hasattr(module, "norm"):
            return module(h)
        return module.linear(layer_norm(module.norm)(h))

    def self_attention(h):
        return last(own.out_proj, attention(own, h, h, memory is not None, padding))

    def cross_attention(h):
        return cross.out_proj(attention(cross, h, memory, False, memory_padding))

    def feed_forward(h):
        return last(layer.fc2, F.relu(layer.fc1(h)))

    functions = {"self_attn": self_attention, "final": feed_forward}
    if cross:
        functions["encoder_attn"] = cross_attention
    for name in ("self_attn", "encoder_attn", "final"):
        if name in functions:
            first = getattr(layer, f"{name}_layer_norm")
            second = getattr(layer, f"{name}_output_layer_norm", None)
            yield layer_norm(first), second and layer_norm(second), functions[name]


def stack(placement, side, x, padding, memory=None, memory_padding=None):
    """All layers of a side by the formulas of the papers, on (B, T, C)."""
    count = len(side.layers)
    r = x
    alpha = 1.0
    if placement == "deep":
        of_encoder = 0.81 * (count**4 * count) ** (1 / 16)
        alpha = of_encoder if memory is None else (3 * count) ** (1 / 4)
    if placement == "peri":
        x = layer_norm(side.input_norm)(x)
    for number, layer in enumerate(side.layers, 1):
        entry = x
        steps = list(sublayers(layer, padding, memory, memory_padding))
        for step, (norm, second, sublayer) in enumerate(steps, 1):
            if placement in ("pre", "sub") or (placement == "mix" and number > count // 4):
                x = x + sublayer(norm(x))
            elif placement in ("post", "mix", "deep"):
                x = norm(alpha * x + sublayer(x))
            elif placement in ("sandwich", "peri"):
                x = x + second(sublayer(norm(x)))
            elif placement == "scaled":
                x = x + sublayer(norm(x) / math.sqrt(number))
            elif placement == "b2t":
                x = norm(x + sublayer(x) + (entry if step == len(steps) else 0.0))
            elif placement == "resi-dual":
                f = sublayer(x)
                r = r + f
                x = norm(x + f)
    if placement == "resi-dual":
        return x + layer_norm(side.layer_norm)(r)
    return x if side.layer_norm is None else layer_norm(side.layer_norm)(x)


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_outputs_are_those_of_the_formula(placement):
    model = placed(placement).double().eval()
    src, prev = padded_batch()
    with torch.no_grad():
        for name, parameter in model.named_parameters():  # gains and biases that matter
            if "norm" in name:
                parameter.add_(torch.randn_like(parameter) / 4)
        embedded, _ = model.encoder.forward_embedding(src)
        embedded = embedded.masked_fill(src.eq(1)[..., None], 0)
        memory = stack(placement, model.encoder, embedded, src.eq(1))
        decoder = model.decoder
        x = decoder.embed_scale * decoder.embed_tokens(prev) + decoder.embed_positions(prev)
        x = stack(placement, decoder, x, prev.eq(1), memory, src.eq(1))
        expected = decoder.output_projection(x)
        got = model(src, None, prev)[0]
    real = prev.ne(1)
    # fairseq computes the softmax of cross-attention in float32.
    torch.testing.assert_close(got[real], expected[real], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("placement", "encoder", "decoder", "number"),
    [
        ("deep", 1.15 * (6**4 * 3) ** (-1 / 16), (12 * 3) ** -0.25, 6 * 8 + 3 * 12),
        ("sub", math.sqrt(math.log(9) * math.log(12) / 3), math.sqrt(math.log(9)), 6 * 8 + 3 * 8),
        ("b2t", 6**-0.5, 3**-0.5, 6 * 6 + 3 * 10),
    ],
)
def test_initial_weights(placement, encoder, decoder, number):
    """Of the weights of `pre` with the same seed, fc1, fc2, v_proj and out_proj are multiplied, and
    no others; of `b2t` every weight matrix of a layer, and no bias and no embedding, as in
    takase/b2t_connection.
    """
    depths = {"encoder_layers": 6, "decoder_layers": 3}
    excluded = {"encoder_attn"} if placement == "sub" else set()
    base = dict(placed("pre", **depths).named_parameters())
    scaled = dict(placed(placement, **depths).named_parameters())
    for name, weight in scaled.items():
        plain = name.replace(".linear.", ".")
        if plain not in base:
            continue
        parts = set(name.split("."))
        if placement == "b2t":
            chosen = "layers" in parts and weight.dim() == 2
        else:
            chosen = parts & {"fc1", "fc2", "v_proj", "out_proj"} and not parts & excluded
        factor = 1.0
        if chosen:
            factor = encoder if "encoder" in parts else decoder
        expected = base[plain] * factor
        torch.testing.assert_close(weight, expected, rtol=1e-6, atol=0, msg=name)
        number -= bool(chosen)
    assert number == 0


def test_initial_weights_of_a_model_with_only_a_decoder():
    def weights(placement):
        torch.manual_seed(1)
        model = build(
            "transformer_lm_pn_tiny", decoder_norm="layer", decoder_norm_placement=placement
        )
        return dict(model.named_parameters()), len(model.decoder.layers)

    base, layers = weights("pre")
    deep = weights("deep")[0]
    sub = weights("sub")[0]
    name = "decoder.layers.0.fc1.weight"
    expected = base[name] * (8 * layers) ** -0.25
    torch.testing.assert_close(deep[name], expected, rtol=1e-6, atol=0)
    expected = base[name] * math.log(2 * layers) ** 0.5
    torch.testing.assert_close(sub[name], expected, rtol=1e-6, atol=0)


def test_mix_of_fewer_than_four_layers_is_pre():
    src, prev = padded_batch()
    depths = {"encoder_layers": 3, "decoder_layers": 3}
    pre = placed("pre", **depths)(src, None, prev)[0]
    mix = placed("mix", **depths)(src, None, prev)[0]
    assert pre.equal(mix)


def test_resi_dual_without_a_norm_after_the_last_layer():
    """x + r, as `pre` without that norm is the plain stream."""
    model = placed("resi-dual", no_decoder_final_norm=True).eval()
    src, prev = padded_batch()
    model.decoder.output_projection = torch.nn.Identity()
    streams = []
    model.decoder.layers[-1].register_forward_hook(
        lambda layer, inputs, output: streams.append(output[0])
    )
    got = model(src, None, prev)[0]
    x, r = streams[0].transpose(0, 1).chunk(2, -1)
    assert got.equal(x + r)


# --- what holds for each placement ---


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_padding_changes_nothing_in_training(placement):
    """Every norm has its padding mask."""
    narrow = placed(placement, "power", qk_norm="batch", psi_warmup_updates=2).double()
    wide = deepcopy(narrow)
    src, prev = padded_batch(batch=4)
    loss = train(narrow, src, prev)
    wide_src = F.pad(src, (4, 0), value=1)
    wide_prev = F.pad(prev, (0, 3), value=1)
    padded_loss = train(wide, wide_src, wide_prev)
    # fairseq takes its softmax in float32, also in a float64 model, and the last digits depend on
    # the processor: 2**-24 times the condition, 150 by the error of a model whose softmax is in
    # float64. A missing mask changes the first digit. Some gradients are zero but for rounding, so
    # that the scale is the largest one.
    close = 5 * 150 * 2**-24
    assert_close(padded_loss, loss, close)
    largest = max(parameter.grad.abs().max().item() for parameter in narrow.parameters())
    for (name, one), two in zip(narrow.named_parameters(), wide.parameters(), strict=True):
        assert_close(two.grad, one.grad, close, name, terms=largest)
    for (name, one), two in zip(narrow.named_buffers(), wide.buffers(), strict=True):
        assert_close(two, one, close, name)


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_incremental_decoding_is_full_decoding(placement):
    model = placed(placement, "power", qk_norm="rms").eval()
    src, prev = padded_batch()
    prev = prev[1:]  # without padding
    with torch.no_grad():
        encoder_out = model.encoder(src[1:], None)
        full = model.decoder(prev, encoder_out)[0]
        state = {}
        steps = []
        for end in range(1, prev.size(1) + 1):
            logits, _ = model.decoder(prev[:, :end], encoder_out, state)
            steps.append(logits[:, -1])
    found = torch.stack(steps, 1)
    torch.testing.assert_close(found, full, rtol=1e-4, atol=5e-5)


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_recomputed_activations_give_the_same_training(placement):
    plain = placed(placement, "power", qk_norm="rms", checkpoint_activations=False)
    recomputed = placed(placement, "power", qk_norm="rms", checkpoint_activations=True)
    for model in (plain, recomputed):
        train(model, *padded_batch(), updates=2)
    assert_same_training(plain, recomputed, state=(1e-5, 1e-6))


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize(
    "changes", [{"encoder_layerdrop": 0.5, "decoder_layerdrop": 0.5}, {"quant_noise_pq": 0.1}]
)
def test_other_options_of_fairseq(placement, changes):
    model = placed(placement, "power", psi_warmup_updates=2, **changes)
    assert torch.isfinite(train(model, *padded_batch()))


@pytest.mark.parametrize(
    "dtype", [torch.float16, pytest.param(torch.bfloat16, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_half_precision(placement, dtype):
    """Logits are as in float32 but for rounding to 8 and 11 bits, and the statistics stay in
    float32.
    """
    src, prev = padded_batch()
    plain = placed(placement, "power")
    half = deepcopy(plain).to(dtype)
    logits = plain.train()(src, None, prev)[0]
    in_half = half.train()(src, None, prev)[0].float()
    error = (in_half - logits).norm() / logits.norm()
    assert error < (0.02 if dtype == torch.bfloat16 else 0.0025)
    loss_of(half, src, prev).backward()
    assert all(parameter.grad.isfinite().all() for parameter in half.parameters())
    assert {norm.running_psi2.dtype for norm in running_norms(half)} == {torch.float32}


class SumOverTokens(torch.nn.Module):
    """A criterion as fairseq's."""

    def forward(self, model, sample):
        return loss_of(model, *sample), 1, {}


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_statistics_are_recorded_and_estimated_again(placement, tmp_path):
    """The probe records each norm of the encoder, and `recalibrating` reaches every norm of the
    model.
    """
    model = placed(placement, "power", qk_norm="rms").train()
    sample = padded_batch()
    probe = NormProbe(model, tmp_path, 1)
    criterion = SumOverTokens()
    probe.begin(0, criterion, "")
    criterion(model, sample)[0].backward()
    probe.end(1)
    inside = {
        name for name, module in model.encoder.named_modules() if isinstance(module, ChannelNorm)
    }
    assert set(read_probe(tmp_path)["norm"]) == {f"encoder.{name}" for name in inside}
    before = [norm.running_psi2.clone() for norm in running_norms(model)]
    with torch.no_grad(), recalibrating(model):
        model(sample[0], None, sample[1])
    for norm, old in zip(running_norms(model), before, strict=True):
        assert not norm.running_psi2.equal(old)


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_folding_works_or_is_one_line(placement, tmp_path):
    model = placed(placement, "batch")
    state = {
        "model": model.state_dict(),
        "args": arch_args("transformer_pn_tiny", **small(placement, "batch")),
    }
    found = PLACEMENTS[placement].folds
    expected = placement in ("pre", "sandwich", "peri", "sub")
    assert found == expected
    if PLACEMENTS[placement].folds:
        folded, lines, _, difference = fold_checkpoint(state, "it")
        assert difference.accepted
        assert any("folded" in line for line in lines)
        assert len(folded["model"]) < len(state["model"])
    else:
        with pytest.raises(
            CheckpointError,
            match=f"encoder_norm_placement={placement}: such norms cannot be folded$",
        ):
            fold_checkpoint(state, "it")


# --- queries and keys ---


def test_qk_norm_is_the_formula():
    """Henry et al. 2020: L2-normalized queries and keys of each head, times a learned scale."""
    model = placed("pre", qk_norm="scale").double().eval()
    own = model.encoder.layers[0].self_attn
    x = torch.randn(5, 2, own.embed_dim, dtype=torch.double)
    d = own.head_dim
    with torch.no_grad():
        for gain in (own.q_proj.norm, own.k_proj.norm):
            [parameter] = gain.parameters()
            np.testing.assert_allclose(parameter.item(), math.sqrt(d), rtol=1e-6)
            parameter.mul_(1.3)
        got = own(x, x, x, need_weights=False)[0].transpose(0, 1)
        h = x.transpose(0, 1)
        q = heads(own, own.q_proj.linear(h))
        k = heads(own, own.k_proj.linear(h))
        v = heads(own, own.v_proj(h))
        cosine = F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).transpose(2, 3)
        y = (1.3**2 * math.sqrt(d) * cosine).softmax(-1) @ v
        expected = own.out_proj(y.transpose(1, 2).flatten(2))
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


# --- what is refused, and what comes from outside ---


@pytest.mark.parametrize("placement", [name for name, cls in PLACEMENTS.items() if cls.prunes])
def test_pruned_layers_compute_what_they_did(placement):
    """fairseq's pruning, which LayerDrop prepares, against the same layers of the whole model."""
    four = {"qk_norm": "rms", "encoder_layers": 4, "decoder_layers": 4}
    whole, (src, prev) = placed(placement, **four).eval(), padded_batch()
    keep = {"encoder_layers_to_keep": "1,3", "decoder_layers_to_keep": "0,3"}
    pruned = placed(placement, **four, **keep).eval()
    pruned.load_state_dict(
        whole.state_dict(), model_cfg=Namespace(arch="transformer_pn_tiny", **keep)
    )
    for side, kept in ((whole.encoder, (1, 3)), (whole.decoder, (0, 3))):
        side.layers = torch.nn.ModuleList(side.layers[index] for index in kept)
    assert pruned(src, None, prev)[0].equal(whole(src, None, prev)[0])


def test_a_placement_must_be_one():
    with pytest.raises(
        ValueError, match=r"'other' is not a subclass of pn_fairseq.models.placements.Pre"
    ):
        register_placement("other")(torch.nn.Module)
    with pytest.raises(ValueError, match="'pre' exists already"):
        register_placement("pre")(PLACEMENTS["pre"])


def test_a_placement_from_outside(tmp_path):
    file = tmp_path / "double.py"
    file.write_text(
        "from pn_fairseq.models.placements import Pre, register_placement\n\n\n"
        "@register_placement('double')\n"
        "class Double(Pre):\n"
        "    def after(self, layer, sublayer, x, output, mask, entry):\n"
        "        return super().after(layer, sublayer, x, 2 * output, mask, entry)\n"
    )
    src, prev = padded_batch()
    try:
        model = placed("double", norm_module=str(file)).eval()
        with torch.no_grad():
            got = model(src, None, prev)[0]
            for layer in [*model.encoder.layers, *model.decoder.layers]:
                layer.placement = PLACEMENTS["pre"](layer.placement.depth)
                for module in (
                    layer.self_attn.out_proj,
                    layer.fc2,
                    getattr(layer, "encoder_attn", None),
                ):
                    for linear in filter(None, [getattr(module, "out_proj", module)]):
                        linear.weight.mul_(2), linear.bias.mul_(2)
            expected = model(src, None, prev)[0]
        torch.testing.assert_close(got, expected)
    finally:
        PLACEMENTS.pop("double", None)
