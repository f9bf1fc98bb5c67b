"""pn import-release on checkpoints built from the description of the release's layout."""

import re
import sys
import types
from argparse import Namespace
from collections import OrderedDict

import pytest
import torch
import yaml
from fairseq import checkpoint_utils
from fairseq.data import Dictionary
from torch.testing import assert_close

from pn_fairseq.common.checkpoints import CheckpointError, load_checkpoint
from pn_fairseq.norms import PowerNormRelease
from pn_fairseq.norms.core.base import running_norms

from ..fixtures.checkpoints import randomize
from ..models.helpers import arch_args, padded_batch, write_data
from ..scripts_helpers import ROOT, assert_refused, in_process, verb
from ..tables import rows

main = verb("import-release")

LAYERS = 2
WARMUP = 40

#: Of the settings that fairseq 0.8 stored, those that fairseq 0.12 has under another name, with
#: another default or not at all; the settings of a translation model; and those of its norms.
SETTINGS = yaml.safe_load(f"""
arch: transformer_iwslt_de_en_v2
task: translation
criterion: label_smoothed_cross_entropy
optimizer: adam
adam_betas: (0.9, 0.98)
adam_eps: 1.0e-8
weight_decay: 0.0001
clip_norm: 0.0
lr: [0.0015]
lr_scheduler: inverse_sqrt
warmup_updates: {WARMUP}
warmup_init_lr: 1.0e-7
min_lr: 1.0e-9
max_update: 0
update_freq: [1]
max_tokens: 4096
max_sentences: null
fp16: false
max_tokens_valid: 4096
max_sentences_valid: null
ddp_backend: c10d
tensorboard_logdir: ''
no_progress_bar: true
tbmf_wrapper: false
user_dir: gone
keep_last_epochs: 5
data: data-bin/iwslt14.tokenized.de-en.joined
source_lang: de
target_lang: en
lazy_load: false
raw_text: false
load_alignments: false
left_pad_source: 'True'
left_pad_target: 'False'
max_source_positions: 1024
max_target_positions: 1024
upsample_primary: 1
label_smoothing: 0.1
dropout: 0.3
attention_dropout: 0.1
activation_dropout: 0.1
activation_fn: relu
encoder_embed_path: gone.vec
decoder_embed_path: null
encoder_embed_dim: 16
encoder_ffn_embed_dim: 24
encoder_layers: {LAYERS}
encoder_attention_heads: 4
decoder_embed_dim: 16
decoder_ffn_embed_dim: 24
decoder_layers: {LAYERS}
decoder_attention_heads: 4
encoder_normalize_before: true
decoder_normalize_before: true
encoder_learned_pos: false
decoder_learned_pos: false
share_decoder_input_output_embed: false
share_all_embeddings: true
no_token_positional_embeddings: false
adaptive_softmax_cutoff: null
adaptive_softmax_dropout: 0
adaptive_input: false
decoder_output_dim: 16
decoder_input_dim: 16
encoder_norm_self: power
encoder_norm_ff: power
decoder_norm_self: layer
decoder_norm_ff: layer
""")

#: Of the state of the training run, what the imported file holds.
KEPT = {"train_iterator": {"epoch": 8, "iterations_in_epoch": 0}, "val_loss": 3.9}

DIMENSIONS = """
encoder_embed_dim encoder_ffn_embed_dim encoder_layers encoder_attention_heads
decoder_embed_dim decoder_ffn_embed_dim decoder_layers decoder_attention_heads
""".split()


def ours(dictionary: Dictionary, **flags):
    """This project's model with random weights and statistics, and its settings."""
    from fairseq.models import ARCH_MODEL_REGISTRY

    flags = {"decoder_norm": "layer", "share_all_embeddings": True, **flags}
    dimensions = {name: SETTINGS[name] for name in DIMENSIONS}
    args = arch_args("transformer_pn_iwslt", norm_variant="release", **dimensions, **flags)
    task = Namespace(source_dictionary=dictionary, target_dictionary=dictionary)
    model = ARCH_MODEL_REGISTRY[args.arch].build_model(args, task).eval()
    randomize(model)
    for norm in running_norms(model):
        norm.num_batches_tracked.fill_(1234)
    return model, args


def as_release(model, alpha_bwd=0.9, stacked=True) -> OrderedDict:
    """The state dict of ``model`` under the names, and in the shapes, of the release."""
    weights = OrderedDict((key, value.clone()) for key, value in model.state_dict().items())
    for prefix, norm in model.named_modules():
        if isinstance(norm, PowerNormRelease):
            psi2 = weights.pop(f"{prefix}.running_psi2")
            nu = weights.pop(f"{prefix}.nu")
            batches = weights.pop(f"{prefix}.num_batches_tracked")
            weights[f"{prefix}.running_phi"] = psi2.reshape(1, -1, 1, 1)
            weights[f"{prefix}.ema_gz"] = nu.reshape(1, -1, 1, 1) / (1 - alpha_bwd)
            weights[f"{prefix}.iters"] = batches.reshape(1)
        if stacked and prefix.endswith(("self_attn", "encoder_attn")):
            for kind in ("weight", "bias"):
                parts = [weights.pop(f"{prefix}.{name}_proj.{kind}") for name in "qkv"]
                weights[f"{prefix}.in_proj_{kind}"] = torch.cat(parts)
    output = weights.pop("decoder.output_projection.weight")
    if model.decoder.output_projection.weight is not model.decoder.embed_tokens.weight:
        weights["decoder.embed_out"] = output
    for side in ("encoder", "decoder"):
        weights[f"{side}.embed_positions._float_tensor"] = torch.full((1,), float("nan"))
    return weights


def meters() -> OrderedDict:
    """The meters that fairseq 0.8 put into its checkpoints, of a module that today's fairseq
    does not have.
    """
    module = types.ModuleType("fairseq.meters")
    for name in ("AverageMeter", "TimeMeter", "StopwatchMeter"):
        setattr(module, name, type(name, (), {"__module__": "fairseq.meters"}))
    sys.modules["fairseq.meters"] = module
    meter = module.AverageMeter()
    meter.__dict__ |= {"val": 1.5, "avg": torch.tensor(1.25), "sum": 2.5, "count": 2}
    return OrderedDict(train_loss=meter, wps=module.TimeMeter(), train_wall=module.StopwatchMeter())


def write(path, weights, settings=(), zipped=False):
    """A checkpoint as fairseq 0.8 wrote it, by default in the file format of its time."""
    moments = {"step": 1234, "exp_avg": torch.zeros(3)}
    state = {
        "args": Namespace(**{**SETTINGS, **dict(settings)}),
        "model": weights,
        "optimizer_history": [{"lr_scheduler_state": {"best": 3.9}, "num_updates": 1234}],
        "extra_state": {**KEPT, "best": 3.9, "train_meters": meters()},
        "last_optimizer_state": {"state": {0: moments}, "param_groups": []},
    }
    try:
        torch.save(state, path, _use_new_zipfile_serialization=zipped)
    finally:
        del sys.modules["fairseq.meters"]
    return path


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Binarized data of 11 sentences and their dictionary."""
    return write_data(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def dictionary(data):
    return Dictionary.load(str(data / "dict.de.txt"))


@pytest.fixture(scope="module")
def model(dictionary):
    return ours(dictionary)[0]


def load(path, data):
    place = {"data": str(data)}
    (imported,), _, _ = checkpoint_utils.load_model_ensemble_and_task([str(path)], place)
    return imported.eval()


def assert_same(imported, model):
    assert imported.state_dict().keys() == model.state_dict().keys()
    for key, value in model.state_dict().items():
        assert_close(imported.state_dict()[key], value, rtol=1e-6, atol=0, msg=key)
    src, prev = (batch.clamp(max=30) for batch in padded_batch())
    with torch.no_grad():
        found, expected = (each(src, None, prev)[0] for each in (imported, model))
    assert_close(found, expected, rtol=1e-6, atol=1e-6)


@pytest.fixture
def run(tmp_path):
    """``run(weights)`` imports a checkpoint of the release with these weights."""

    def import_release(weights, settings=(), options=(), zipped=False):
        source = write(tmp_path / "release.pt", weights, settings, zipped)
        imported = tmp_path / "imported.pt"
        assert main([source, imported, *options]) == 0
        return imported

    return import_release


@pytest.mark.parametrize(
    ("stacked", "zipped"),
    [
        (True, False),
        (False, True),
        *(pytest.param(same, same, marks=pytest.mark.slow) for same in (True, False)),
    ],
    ids=["in_proj, old format", "q-k-v, zip", "in_proj, zip", "q-k-v, old format"],
)
def test_imported_model_is_the_one_in_the_file(stacked, zipped, model, data, run, capsys):
    path = run(as_release(model, stacked=stacked), zipped=zipped)
    printed = capsys.readouterr()
    assert "transformer_pn_iwslt, encoder norm power, decoder norm layer" in printed.out
    assert not printed.err
    imported = load(path, data)
    assert_same(imported, model)
    norms = running_norms(imported)
    assert len(norms) == 2 * LAYERS + 1
    for norm in norms:
        assert type(norm) is PowerNormRelease and norm.layer_scale.groups == 4
        assert norm.running_psi2.dtype == norm.nu.dtype == torch.float32
    assert [norm.psi_warmup_updates for norm in norms] == [WARMUP] * (2 * LAYERS) + [1000]
    assert not hasattr(imported.decoder.layer_norm, "nu")


def test_what_the_imported_file_holds(model, tmp_path):
    source = write(tmp_path / "release.pt", as_release(model))
    before = source.read_bytes()
    assert main([source, tmp_path / "imported.pt"]) == 0
    assert source.read_bytes() == before
    state = load_checkpoint(tmp_path / "imported.pt")
    assert state["optimizer_history"][0]["num_updates"] == 1234
    assert state["extra_state"] == KEPT
    assert "last_optimizer_state" not in state
    args = state["args"]
    assert args.norm_variant == "release" and not hasattr(args, "encoder_norm_self")
    weights = state["model"]
    output = weights["decoder.output_projection.weight"]
    assert output.data_ptr() == weights["encoder.embed_tokens.weight"].data_ptr()


def test_alphas(model, data, run):
    options = ("--alpha-bwd", 0.6, "--alpha-fwd", 0.8)
    imported = load(run(as_release(model, alpha_bwd=0.6), options=options), data)
    assert_same(imported, model)
    norm = imported.encoder.layer_norm
    assert (norm.alpha_fwd, norm.alpha_bwd) == (0.8, 0.6)


EXCHANGED = {
    "share_all_embeddings": False,
    "encoder_norm_self": "layer",
    "encoder_norm_ff": "layer",
    "decoder_norm_self": "power",
    "decoder_norm_ff": "power",
}
OTHER_NORMS = {"encoder_norm": "layer", "decoder_norm": "power", "share_all_embeddings": False}
LEARNED = {"encoder_learned_pos": True}
OLDER = {
    "arch": "transformer_wmt_en_de_big_t2t_v2",
    "lr": 0.0015,
    "data": ["data-bin/iwslt14"],
    "max_sentences": 8,
    "fp16": True,
}


@pytest.mark.parametrize(
    ("flags", "settings"),
    [
        (OTHER_NORMS, EXCHANGED),
        pytest.param(LEARNED, LEARNED, marks=pytest.mark.slow),
        ({}, OLDER),
    ],
    ids=["other norms, untied", "learned-positions", "wmt, older settings"],
)
def test_other_models(flags, settings, dictionary, data, run):
    model, _ = ours(dictionary, **flags)
    weights = as_release(model)
    if flags is LEARNED:
        del weights["encoder.embed_positions._float_tensor"]
    assert_same(load(run(weights, settings), data), model)


def test_half_precision_file(model, run):
    weights = as_release(model)
    for key, value in weights.items():
        if value.is_floating_point():
            weights[key] = value.half()
    for key, value in load_checkpoint(run(weights))["model"].items():
        if key.endswith((".running_psi2", ".nu")):
            assert value.dtype == torch.float32
            assert_close(value, model.state_dict()[key], rtol=2e-3, atol=1e-3)


@pytest.mark.slow
def test_decoding_and_fine_tuning_with_fairseqs_commands(
    model, dictionary, data, run, tmp_path, monkeypatch
):
    """fairseq-generate writes what it writes for the same model in our own layout."""
    own = load_checkpoint(run(as_release(model)))
    own["model"] = model.state_dict()
    own["args"] = Namespace(**{**SETTINGS, **vars(ours(dictionary)[1])})
    torch.save(own, tmp_path / "own.pt")

    def fairseq(program: str, *arguments: str) -> str:
        flags = "--required-batch-size-multiple=1 --cpu --user-dir".split()
        place = [data, *flags, ROOT / "pn_fairseq"]
        return in_process(f"fairseq-{program}", *place, *arguments).stdout

    monkeypatch.chdir(tmp_path)
    decoded = []
    for name in ("imported.pt", "own.pt"):
        output = fairseq("generate", "--path", name, "--beam", "3")
        decoded.append(sorted(re.findall(r"^[HP]-.*", output, re.M)))
    assert len(decoded[0]) == 2 * 11
    assert decoded[0] == decoded[1]

    dimensions = [f"--{name.replace('_', '-')}={SETTINGS[name]}" for name in DIMENSIONS]
    words = (
        "--arch transformer_pn_iwslt --norm-variant release --share-all-embeddings --save-dir "
        "tuned --finetune-from-model imported.pt --optimizer sgd --lr 0.001 --max-tokens 1000 "
        "--max-update 1 --no-epoch-checkpoints"
    )
    fairseq("train", *words.split(), *dimensions)
    weights = load_checkpoint(tmp_path / "tuned/checkpoint_last.pt")["model"]
    assert int(weights["encoder.layer_norm.num_batches_tracked"]) == 1235


@pytest.mark.slow
def test_file_without_its_training_state(model, data, tmp_path, caplog):
    """As people share them. With fp16, ``ema_gz`` holds a loss scale that is not known then."""
    release, imported = str(tmp_path / "release.pt"), tmp_path / "imported.pt"
    for fp16, optimizer in ((False, None), (True, None), (True, {"loss_scale": 64.0})):
        weights = as_release(model)
        if optimizer:
            for key in weights:
                if key.endswith(".ema_gz"):
                    weights[key] *= 64
        args = Namespace(**{**SETTINGS, "fp16": fp16})
        torch.save({"args": args, "model": weights, "last_optimizer_state": optimizer}, release)
        caplog.clear()
        assert main([release, imported]) == 0
        assert_same(load(imported, data), model)
        parts = [record.message.partition(": nu of") for record in caplog.records]
        warned = [name for name, found, _ in parts if found]
        assert warned == ([release] if fp16 and not optimizer else [])


def test_nu_that_has_diverged_is_told(model, run, capsys):
    weights = as_release(model)
    weights["encoder.layer_norm.ema_gz"].view(-1)[0] = float("nan")
    run(weights)
    assert "nu of 1 norms is not finite (encoder.layer_norm.nu" in capsys.readouterr().err


#: What is done to the tensors, and how the line says it; ``;`` stands between several.
TENSORS = """
without encoder.layer_norm.running_phi | 1 (encoder.layer_norm.running_phi) missing
without encoder.layers.1.self_attn.in_proj_weight | 3 (encoder.layers.1.self_attn.; q_proj.weight
without encoder.version | 1 (encoder.version) missing
without encoder.embed_tokens.weight | 1 (encoder.embed_tokens.weight) missing
more encoder.layers.0.ls.scale | 1 (encoder.layers.0.ls.scale) unknown
more encoder.layers.2.fc1.bias | 1 (encoder.layers.2.fc1.bias) unknown
more encoder.layers.0.self_attn.q_proj.bias | in_proj_bias; missing; unknown
more x0 x1 x2 x3 x4 x5 x6 | 7 (x0, x1, x2, x3, x4, ...) unknown
more decoder.version | decoder.version [3] instead of [1]
zero decoder.version | decoder.version is 0
zero decoder.embed_tokens.weight | embed_tokens; differ
flat encoder.layer_norm.ema_gz | [16] instead of [1, 16, 1, 1]) of another shape
nan encoder.layer_norm.running_phi | 1 of its tensors are not finite
nan decoder.layers.0.fc1.weight | 1 of its tensors are not finite
"""
#: The same of settings.
CHANGED_SETTINGS = """
encoder_norm_ff: layer | encoder_norm_self is power and encoder_norm_ff is layer
{decoder_norm_self: batch, decoder_norm_ff: batch} | decoder_norm_self is batch; layer and power
encoder_norm_self: null | not a checkpoint of the authors' release; encoder_norm_self
decoder_attention_heads: null | decoder_attention_heads
arch: lstm | architecture lstm
encoder_normalize_before: false | pre-norm
task: no_such_task | fairseq does not take its settings
encoder_layers: 3 | missing; encoder.layers.2.
"""


def assert_names_what_does_not_fit(tmp_path, weights, settings, needles):
    source = write(tmp_path / "release.pt", weights, settings)
    refused = in_process("import-release", source, tmp_path / "imported.pt", check=False)
    assert_refused(refused, str(source), *needles)
    assert not (tmp_path / "imported.pt").exists() and not refused.stdout


@pytest.mark.parametrize(("change", "needles"), rows(TENSORS))
def test_tensors_that_do_not_fit_are_named(change, needles, model, tmp_path):
    weights = as_release(model)
    verb, *keys = change.split()
    for key in keys:
        if verb == "without":
            del weights[key]
        elif verb == "more":
            weights[key] = torch.zeros(3)
        elif verb == "zero":
            weights[key] *= 0
        elif verb == "flat":
            weights[key] = weights[key].flatten()
        else:
            weights[key].view(-1)[0] = float("nan")
    assert_names_what_does_not_fit(tmp_path, weights, {}, needles.split("; "))


@pytest.mark.parametrize(("settings", "needles"), rows(CHANGED_SETTINGS))
def test_settings_that_do_not_fit_are_named(settings, needles, model, tmp_path):
    changes = yaml.safe_load(settings)
    assert_names_what_does_not_fit(tmp_path, as_release(model), changes, needles.split("; "))


def test_code_among_the_settings_is_named(model, tmp_path):
    needles = ("print", "nothing in it was executed")
    assert_names_what_does_not_fit(tmp_path, as_release(model), {"extra": print}, needles)


def test_damaged_files(model, tmp_path):
    source = write(tmp_path / "release.pt", as_release(model), zipped=True)
    refused = in_process(
        "import-release", source, tmp_path / "out.pt", "--alpha-bwd", "1", check=False
    )
    assert_refused(refused, "alpha_bwd=1.0", "between 0 and 1")
    whole = source.read_bytes()
    for damaged in (whole[: len(whole) // 2], whole[:5000] + b"\xff" * 50 + whole[5050:]):
        source.write_bytes(damaged)
        assert_refused(
            in_process("import-release", source, tmp_path / "out.pt", check=False), "damaged"
        )
    assert {path.name for path in tmp_path.iterdir()} == {"release.pt"}


def test_meters_are_read_by_the_importer_only(model, tmp_path):
    with pytest.raises(CheckpointError, match="fairseq.meters"):
        load_checkpoint(write(tmp_path / "release.pt", as_release(model)))
