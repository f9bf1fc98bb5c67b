"""pn export: two graphs of a model, without fairseq and without this package, against fairseq."""

import re

import numpy as np
import pytest
import torch
from torch import nn
from torch.testing import assert_close

from ..fixtures.checkpoints import hypotheses, make, state_of
from ..scripts_helpers import verb
from .helpers import MODEL_NORMS, VOCABULARY, build, padded_batch

main = verb("export")

PAD = 1
EOS = 2
BEAM = 4
LONGEST = 12


def test_the_encoder_is_one_graph():
    """The graph is for batches with padding and without, and computes what the layers compute
    without a mask.
    """
    encoder = build("transformer_pn_tiny", encoder_layers=1, dropout=0.0).eval().encoder
    compiled = torch.compile(encoder, backend="aot_eager", fullgraph=True)
    src, _ = padded_batch()
    for tokens in (src, src.masked_fill(src.eq(PAD), 7)):
        actual = compiled(tokens)
        expected = encoder(tokens)
        assert torch.equal(actual["encoder_padding_mask"][0], tokens.eq(PAD))
        found = actual["encoder_out"][0]
        assert_close(found, expected["encoder_out"][0], rtol=1e-5, atol=1e-6)
    torch._dynamo.reset()


@pytest.mark.parametrize(
    "norm",
    [one if one == "power" else pytest.param(one, marks=pytest.mark.slow) for one in MODEL_NORMS],
)
def test_torchscript_traces_a_model_and_refuses_to_compile_it(norm):
    """The model exports methods, so torch compiles what it finds in its modules.

    The graph is for other lengths.
    """
    model = build(
        "transformer_pn_tiny", encoder_norm=norm, encoder_layers=1, decoder_layers=1
    ).eval()
    wrapped = nn.Module()
    wrapped.model = model
    wrapped.forward = lambda source, target: model(source, None, target)[0]
    with torch.no_grad():
        traced = torch.jit.trace(wrapped, padded_batch(), check_trace=False)
        for batch in (padded_batch(1), padded_batch(2, batch=2, source=9, target=4)):
            assert_close(traced(*batch), wrapped(*batch), rtol=1e-4, atol=1e-4)
    with pytest.raises(
        RuntimeError, match=r"^torch.jit.script cannot compile norms of pn_fairseq; use [^\n]*$"
    ):
        torch.jit.script(model)


def run(module, inputs):
    tensors = [torch.tensor(value).contiguous() for value in inputs]
    return [result.numpy() for result in module(*tensors)]


def load(folder, kind):
    """Encoder and decoder step as functions of NumPy arrays."""
    if kind == "onnx":
        runtime = pytest.importorskip("onnxruntime", reason="needs the extra [export]")

        def function(name):
            session = runtime.InferenceSession(folder / f"{name}.onnx")
            names = [each.name for each in session.get_inputs()]
            return lambda *inputs: session.run(None, dict(zip(names, inputs, strict=True)))
    else:

        def function(name):
            program = torch.export.load(folder / f"{name}.pt2")
            assert not any("pn_fairseq" in str(node.target) for node in program.graph.nodes)
            module = program.module()
            return lambda *inputs: run(module, inputs)

    return function("encoder"), function("decoder")


def beam_search(encoder, decoder, sentence):
    """The beam of one sentence, best first, as fairseq's SequenceGenerator defines it."""
    keys, values, padding = encoder(sentence[None])
    memory = keys.repeat(BEAM, 1), values.repeat(BEAM, 1), padding.repeat(BEAM, 0)
    keys = values = memory[0][:, :, :, :0]
    prefixes = [[EOS]] * BEAM
    scores = np.array([0.0] + [-np.inf] * (BEAM - 1))
    finished = []
    for step in range(LONGEST + 1):
        tokens = np.array([prefix[-1:] for prefix in prefixes])
        logits, keys, values = decoder(tokens, *memory, keys, values)
        total = scores[:, None] + torch.tensor(logits).log_softmax(-1).numpy()
        total[:, PAD] = -np.inf
        if step == 0:
            total[:, EOS] = -np.inf
        if step == LONGEST:
            total[:, np.arange(VOCABULARY) != EOS] = -np.inf
        kept = []
        best = np.argsort(-total, axis=None, kind="stable")[: 2 * BEAM]
        for rank, place in enumerate(best):
            row, token = divmod(int(place), VOCABULARY)
            score = total[row, token]
            if token != EOS:
                kept.append((row, token, score))
            elif rank < BEAM and len(finished) < BEAM and score > -np.inf:
                finished.append((score / (step + 1), [*prefixes[row][1:], EOS]))
        if len(finished) == BEAM or step == LONGEST:
            break
        rows, chosen, scores = map(np.array, zip(*kept[:BEAM], strict=True))
        prefixes = [
            [*prefixes[row], token] for row, token in zip(rows, chosen.tolist(), strict=True)
        ]
        keys = keys[:, rows]
        values = values[:, rows]
    return [tokens for _, tokens in sorted(finished, key=lambda each: -each[0])]


SEPARATE = {"share_all_embeddings": False, "decoder_norm": "batch"}
LEARNED = {"encoder_learned_pos": True, "decoder_learned_pos": True, "decoder_norm": "layer"}
NO_POSITIONS = {"no_token_positional_embeddings": True}
CASES = {
    "pt2": pytest.param("pt2", "power", {"encoder_layers": 1}, marks=pytest.mark.ci),
    "onnx": ("onnx", "power", {"encoder_layers": 1}),
    "pt2-learned-positions": ("pt2", "layer", LEARNED),
    "pt2-no-positions": ("pt2", "batch", NO_POSITIONS),
    "onnx-all-folded": ("onnx", "prep-batch", SEPARATE),
    "pt2-post": ("pt2", "power", {"encoder_norm_placement": "post"}),
    "pt2-qk-norm": ("pt2", "power", {"qk_norm": "rms"}),
    "pt2-checkpointing": ("pt2", "dyt", {"checkpoint_activations": True}),
}


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "norm", "flags"), CASES.values(), ids=CASES)
def test_a_beam_search_over_the_graphs_gives_fairseqs_hypotheses(
    kind, norm, flags, dictionaries, tmp_path, capsys
):
    if kind == "onnx":
        pytest.importorskip("onnxscript", reason="needs the extra [export]")
    model, args = make(norm, **flags)
    torch.save(state_of(model, args, dictionaries), tmp_path / "trained.pt")
    assert main([tmp_path / "trained.pt", f"--{kind}", tmp_path / "out"]) == 0
    printed = capsys.readouterr().out
    difference, largest = re.search(r"difference (\S+) \(largest logit (\S+),", printed).groups()
    tolerance = 1e-5 * max(1.0, float(largest))
    np.testing.assert_allclose(float(difference), 0, atol=tolerance)
    assert printed.endswith(
        f"wrote {tmp_path}/out/encoder.{kind} and {tmp_path}/out/decoder.{kind}\n"
    )
    encoder, decoder = load(tmp_path / "out", kind)
    generator = torch.Generator().manual_seed(5)
    for length in (1, 2, 6, 11):
        sentence = torch.randint(4, VOCABULARY, (length,), generator=generator)
        expected = hypotheses(model, sentence[None])[0]
        assert beam_search(encoder, decoder, sentence.numpy()) == expected, length


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            {"adaptive_softmax_cutoff": "40,60", "share_all_embeddings": False},
            "--adaptive-softmax-cutoff",
        ),
        ({"no_cross_attention": True}, "--no-cross-attention"),
        ({}, "its model is not one of transformer_pn's"),
    ],
)
def test_a_model_that_cannot_be_exported_is_refused_in_a_line(
    flags, message, dictionaries, tmp_path, capsys
):
    model, args = make("layer", **flags)
    args.arch = args.arch if flags else "transformer"
    torch.save(state_of(model, args, dictionaries), tmp_path / "trained.pt")
    assert main([tmp_path / "trained.pt", "--pt2", tmp_path / "out"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("pn export: error: ")
    assert message in error
    assert error.count("\n") == 1


def test_a_runtime_that_is_not_installed_is_named_in_a_line(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(
        "importlib.util.find_spec", lambda name: None if name == "onnxruntime" else name
    )
    assert main([tmp_path / "trained.pt", "--onnx", tmp_path]) == 2
    error = capsys.readouterr().err
    assert error.startswith("pn export: error: ")
    assert "pip install onnxruntime" in error
    assert error.count("\n") == 1
