"""pn fold on checkpoints of small models with random weights and statistics."""

import copy
import re

import pytest
import torch
from fairseq import checkpoint_utils, tasks
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from fairseq.trainer import Trainer
from torch.testing import assert_close

from pn_fairseq.common.checkpoints import load_checkpoint
from pn_fairseq.models.fold_checkpoint import TOLERANCE, compare, fold_weights
from pn_fairseq.models.normed_model import FOLDED_MARK, FoldedModelError
from pn_fairseq.norms import NORMS, LayerScale, fold_norms
from pn_fairseq.norms.core.base import ChannelNorm, RunningNorm, running_norms

from ..fixtures.checkpoints import HEADS, LAYERS, hypotheses, make, state_of, with_task
from ..models.helpers import both_sides, padded_batch
from ..scripts_helpers import assert_refused, call_in, in_process, verb

main = verb("fold")

STATEFUL = [name for name, entry in NORMS.items() if issubclass(entry.cls, RunningNorm)]


def fold(state, tmp_path):
    torch.save(state, tmp_path / "trained.pt")
    assert main([tmp_path / "trained.pt", tmp_path / "folded.pt"]) == 0
    return tmp_path / "folded.pt"


def load(path, dictionaries):
    place = {"data": str(dictionaries)}
    (model,), _, _ = checkpoint_utils.load_model_ensemble_and_task([str(path)], place)
    return model


#: Norms that differ in kind, and their groups of layer-scale, that are folded by default.
SOME = [
    ("power", 0),
    ("power", 1),
    ("power", HEADS),
    ("power", None),
    ("batch", None),
    ("prep-batch", HEADS),
]
CASES = []
for name in STATEFUL:
    in_both = {"decoder_norm": name, "share_all_embeddings": False}
    for groups, flags in ((0, {}), (1, {}), (HEADS, {}), (None, in_both)):
        marks = () if (name, groups) in SOME else pytest.mark.slow
        CASES.append(pytest.param(name, groups, flags, marks=marks))
CASES += [("power", 2, {"norm_variant": "release", "decoder_norm": "batch"})]
LAST = {"encoder_norm_last": "power", "decoder_norm_last": "batch", "share_all_embeddings": False}
CASES += [("batch", 2, LAST)]
CASES += [("batch", 2, both_sides(norm_placement=name)) for name in ("peri", "sub")]


def test_a_norm_that_is_no_affine_map_in_evaluation_stays(dictionaries, tmp_path, monkeypatch):
    """One with ``folds = False``, in the decoder of a model whose encoder folds, and by
    fold_norms.
    """
    monkeypatch.setattr(NORMS["batch"].cls, "folds", False)
    model, args = make("power", decoder_norm="batch", share_all_embeddings=False)
    folded = load(fold(state_of(model, args, dictionaries), tmp_path), dictionaries)
    assert not running_norms(folded.encoder)
    assert len(running_norms(folded.decoder)) == len(running_norms(model.decoder)) == 3 * LAYERS + 1
    chain = torch.nn.Sequential(NORMS["batch"].cls(4), torch.nn.Linear(4, 4)).eval()
    assert fold_norms(chain, torch.randn(5, 4)) == []
    monkeypatch.setattr(NORMS["batch"].cls, "folds", True)
    assert fold_norms(chain, torch.randn(5, 4)) == [("0", "1")]


@pytest.mark.parametrize(("norm", "groups", "flags"), CASES, ids=str)
def test_folded_model_is_the_same_function(norm, groups, flags, dictionaries, tmp_path):
    model, args = make(norm, layer_scale_groups=groups, **flags)
    path = fold(state_of(model, args, dictionaries), tmp_path)
    folded = load(path, dictionaries)
    assert folded.folded and not folded.training

    # Exactly: both models and the folding in float64.
    src, prev = padded_batch(batch=5)
    wide, wide_folded = copy.deepcopy(model).double(), copy.deepcopy(folded).double()
    weights, gone = fold_weights(wide)
    own = {key: value for key, value in wide.state_dict().items() if key not in gone}
    wide_folded.load_state_dict({**own, **weights, FOLDED_MARK: torch.tensor(1)})
    with torch.no_grad():
        expected, exact = (each(src, None, prev)[0] for each in (wide, wide_folded))
        trained, found = (each(src, None, prev)[0] for each in (model, folded))
    assert_close(exact, expected, rtol=1e-10, atol=1e-10)
    # What was written is float32.
    scale = float(expected.abs().max())
    assert_close(found.double(), expected, rtol=0, atol=1e-5 * scale)
    assert_close(found, trained, rtol=0, atol=TOLERANCE * scale)
    assert hypotheses(folded, src) == hypotheses(model, src)

    # What is left.
    decoder_groups = {"power": HEADS, "power-v": HEADS}
    for key, old in model.named_modules():
        if not isinstance(old, ChannelNorm):
            continue
        new = folded.get_submodule(key)
        last_of_shared = key == "decoder.layer_norm" and args.share_all_embeddings
        # of the placements peri and sub
        followed_by_none = "_output_" in key or key.endswith((".norm", "input_norm"))
        if isinstance(old, RunningNorm) and not last_of_shared and not followed_by_none:
            assert type(new) is LayerScale and new.groups == old.layer_scale.groups
            if groups is None or key.startswith("encoder"):
                assert new.groups == (decoder_groups.get(norm, 0) if groups is None else groups)
        else:
            assert type(new) is type(old)


@pytest.mark.ci
@pytest.mark.parametrize("kind", ["args", "hydra", "half", "quant-noise"])
def test_other_checkpoints(kind, dictionaries, tmp_path):
    """Settings in other forms, weights in half precision, hooks on the projections."""
    flags = {"quant_noise_pq": 0.1, "quant_noise_pq_block_size": 4} if kind == "quant-noise" else {}
    model, args = make(checkpoint_activations=True, **flags)
    if kind == "half":
        model.half()
    state = state_of(model, args, dictionaries)
    if kind == "args":
        state |= {"args": with_task(args, dictionaries), "cfg": None}
    if kind == "hydra":
        state["cfg"]["model"] = {"_name": args.arch, **vars(args)}
    before = copy.deepcopy(state)
    path = fold(state, tmp_path)
    folded = load(path, dictionaries)
    src, prev = padded_batch()
    model = load(tmp_path / "trained.pt", dictionaries).eval()
    with torch.no_grad():
        exact = model(src, None, prev)[0]
        assert_close(folded(src, None, prev)[0], exact, rtol=1e-5, atol=2e-5)
        if kind == "half":
            # decoding in half precision: no worse than the original
            halves = [each.half()(src, None, prev)[0] for each in (folded, model)]
            errors = [(half - exact).abs().max() for half in halves]
            assert errors[0] < 2 * errors[1]

    written = load_checkpoint(path)
    assert load_checkpoint(tmp_path / "trained.pt").keys() == before.keys()
    assert "last_optimizer_state" not in written
    assert set(written["extra_state"]) == {"train_iterator"}
    assert written["optimizer_history"] == before["optimizer_history"]
    weights = written["model"]
    assert not [key for key in weights if key.startswith("encoder") and "norm" in key]
    output = weights["decoder.output_projection.weight"]
    assert output.data_ptr() == weights["encoder.embed_tokens.weight"].data_ptr()
    changed = r"encoder\.layers\..*\.([qkv]_proj|fc1)\.\w+|.*\.encoder_attn\.[kv]_proj\.\w+"
    for key in weights.keys() & before["model"].keys():
        new, old = weights[key], before["model"][key]
        if re.fullmatch(changed, key):
            assert new.dtype == torch.float32, key
            assert not torch.equal(new, old.float()), key
        else:
            assert_close(new, old, rtol=0, atol=0)


def test_what_is_printed(dictionaries, tmp_path, capsys):
    fold(state_of(*make(), dictionaries), tmp_path)
    captured = capsys.readouterr()
    lines = captured.out.splitlines()
    assert captured.err == ""
    layer = "encoder.layers.0.self_attn"
    assert lines[0] == (
        f"{layer}_layer_norm: PowerNorm folded into {layer}.q_proj, {layer}.k_proj, "
        f"{layer}.v_proj; layer-scale (4 groups) stays"
    )
    last = "encoder.layer_norm: PowerNorm folded into decoder.layers.0."
    assert captured.out.count(last) == 1
    assert "decoder.layer_norm: LayerNorm stays" in lines
    assert lines[-2].startswith("maximum logit difference ") and "positions" in lines[-2]
    assert lines[-1] == f"wrote {tmp_path / 'folded.pt'} (5 of 12 norms folded)"


def test_difference_is_what_it_says():
    model, _ = make()
    other = copy.deepcopy(model)
    assert compare(model, other).logits == 0.0 and compare(model, other).accepted
    with torch.no_grad():
        other.decoder.layer_norm.bias.add_(1e-2)
    difference = compare(model, other)
    shift = (model.decoder.output_projection.weight.detach().sum(1) * 1e-2).abs().max()
    assert difference.logits == pytest.approx(float(shift), rel=1e-3) and not difference.accepted
    assert 0 < difference.same_choice <= difference.positions
    with torch.no_grad():
        other.decoder.layer_norm.bias.fill_(float("nan"))
    assert not compare(model, other).accepted


def test_training_a_folded_model_is_refused(dictionaries, tmp_path, capsys):
    path = fold(state_of(*make(), dictionaries), tmp_path)
    folded = load(path, dictionaries)
    with pytest.raises(FoldedModelError, match="pn fold"):
        folded.train()
    assert not any(module.training for module in folded.modules())

    model, args = make()
    cfg = convert_namespace_to_omegaconf(with_task(args, dictionaries, cpu=True))
    task = tasks.setup_task(cfg.task)
    criterion = torch.nn.Module()
    trainer = Trainer(cfg, task, model, criterion)
    before = copy.deepcopy(model.state_dict())
    for attempt, words in (
        (lambda: trainer.load_checkpoint(str(path)), [f"{path} was folded by pn fold"]),
        (lambda: Trainer(cfg, task, folded, criterion), ["folded by pn fold"]),
    ):
        with pytest.raises(FoldedModelError):
            attempt()
        capsys.readouterr()
        with pytest.raises(SystemExit) as stop:
            call_in("fairseq_cli", "/site-packages/fairseq_cli/train.py", attempt)
        assert stop.value.code == 2
        error = capsys.readouterr().err
        assert error.startswith("fairseq-train: error: ") and error.count("\n") == 1
        assert all(word in error for word in words)
    assert_close(model.state_dict(), before, rtol=0, atol=0)


def spoil(name, value):
    def change(state):
        state["model"][name].view(-1)[0] = value

    return change


def assert_not_folded(state, tmp_path, *words):
    torch.save(state, tmp_path / "trained.pt")
    result = in_process("fold", tmp_path / "trained.pt", tmp_path / "folded.pt", check=False)
    assert_refused(result, str(tmp_path / "trained.pt"), *words)
    assert {path.name for path in tmp_path.iterdir()} == {"trained.pt"}


def setting(**values):
    return lambda state: vars(state["cfg"]["model"]).update(values)


NOT_FINITE = "maximum logit difference nan"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (setting(arch="lstm", _name="lstm"), ["architecture lstm is not one of transformer_pn's"]),
        (setting(encoder_normalize_before=False), ["pre-norm"]),
        (setting(encoder_layers=3), ["do not fit", "encoder.layers.2"]),
        (setting(encoder_layers_to_keep="0"), ["encoder_layers_to_keep is 0"]),
        (setting(quant_noise_scalar=0.1), ["8 bits"]),
        (spoil("encoder.layers.0.fc1.weight", float("nan")), [NOT_FINITE]),
        (spoil("encoder.layers.0.self_attn_layer_norm.running_psi2", -1.0), [NOT_FINITE]),
        (lambda state: state.update(cfg=None), ["no settings"]),
        (lambda state: state["cfg"].pop("model"), ["no settings of a model"]),
        (
            lambda state: state["model"].pop("encoder.layer_norm.nu"),
            ["do not fit", "encoder.layer_norm.nu"],
        ),
    ],
)
def test_a_checkpoint_that_is_changed_is_told_in_one_line(change, words, dictionaries, tmp_path):
    state = state_of(*make(), dictionaries)
    change(state)
    assert_not_folded(state, tmp_path, *words)


def test_models_that_cannot_be_folded_are_told_in_one_line(dictionaries, tmp_path):
    for flags, words in (
        ({"norm": "layer"}, ["nothing to fold", "LayerNorm"]),
        (
            {"encoder_norm_placement": "post"},
            ["encoder_norm_placement=post: such norms cannot be folded"],
        ),
        ({"qk_norm": "rms"}, ["self_attn.q_proj is a HeadNorm and not a plain linear projection"]),
    ):
        assert_not_folded(state_of(*make(**flags), dictionaries), tmp_path, *words)


def test_a_difference_beyond_the_tolerance_is_refused(dictionaries, tmp_path, monkeypatch):
    monkeypatch.setattr("pn_fairseq.models.fold_checkpoint.TOLERANCE", 1e-12)
    words = ("cannot be folded in float32", "maximum logit difference", "at most 1e-12")
    assert_not_folded(state_of(*make(), dictionaries), tmp_path, *words)


def test_a_folded_and_a_damaged_file(dictionaries, tmp_path):
    source, output = tmp_path / "trained.pt", tmp_path / "folded.pt"
    fold(state_of(*make(), dictionaries), tmp_path)
    assert_refused(in_process("fold", output, tmp_path / "again.pt", check=False), "folded already")
    source.write_bytes(source.read_bytes()[:5000])
    assert_refused(in_process("fold", source, tmp_path / "again.pt", check=False), "damaged")
    assert {path.name for path in tmp_path.iterdir()} == {"trained.pt", "folded.pt"}
