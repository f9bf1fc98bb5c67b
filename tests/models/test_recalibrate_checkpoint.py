"""pn average --recalibrate, on a model that fairseq has trained."""

import itertools
import math
import re
import shutil
from itertools import islice

import numpy as np
import pytest
import torch
from fairseq import checkpoint_utils
from torch.nn import functional as F

from pn_fairseq.common.checkpoint_files import find_checkpoints
from pn_fairseq.common.checkpoints import load_checkpoint, save_checkpoint
from pn_fairseq.models.recalibrate_checkpoint import ModelWithData

from ..scripts_helpers import verb

main = verb("average")


@pytest.fixture(scope="module")
def trained(data, tmp_path_factory):
    """A run whose learning rate is high enough for the weights, and with them the activations,
    to move.
    """
    run_dir = tmp_path_factory.mktemp("recalibrate") / "run"
    settings = (
        "optimization.max_update=6 checkpoint.save_interval_updates=3 model.dropout=0.3 "
        "dataset.validate_interval_updates=100 dataset.max_tokens=400 lr_scheduler.warmup_updates=4"
    )
    words = ["verses_es_en", "--data", data, "--run", run_dir, *settings.split()]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUDA_VISIBLE_DEVICES", "")
        assert verb("train")(words) == 0
    return run_dir


def average(trained, output, capsys, *options):
    """Exit code, standard output and standard error of averaging the run's last 2 checkpoints."""
    inputs = ("--inputs", *find_checkpoints(trained / "checkpoints", "update", last=2)[::-1])
    code = main([*inputs, "--output", output, *options])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


@pytest.fixture
def plain(trained, tmp_path, capsys):
    assert average(trained, tmp_path / "plain.pt", capsys)[0] == 0
    return tmp_path / "plain.pt"


def loss_by_sentence(path, data):
    """Bits per token of the validation data as fairseq loads model and data, without batches and
    without padding.
    """
    settings = {"data": str(data / "bin")}
    models, _, task = checkpoint_utils.load_model_ensemble_and_task([str(path)], settings)
    (model,) = models
    task.load_dataset("valid")
    dataset = task.dataset("valid")
    total = 0.0
    tokens = 0
    model.eval()
    with torch.no_grad():
        for number in range(len(dataset)):
            sample = dataset.collater([dataset[number]])
            logits, _ = model(**sample["net_input"])
            target = sample["target"][0]
            total += F.cross_entropy(logits[0].double(), target, reduction="sum").item()
            tokens += sample["target"].numel()
    return total / tokens / math.log(2.0), len(dataset), tokens


@pytest.mark.slow
def test_losses_are_those_of_the_files_over_all_sentences(trained, data, plain, tmp_path, capsys):
    output = tmp_path / "recalibrated.pt"
    options = ("--recalibrate", data / "bin", "--batches", 10**6)
    code, out, err = average(trained, output, capsys, *options)
    assert code == 0
    assert err == ""
    used = int(re.search(r"recalibrated 7 norms on (\d+) training batches", out)[1])
    model = ModelWithData(load_checkpoint(plain), "plain", data / "bin")
    batches = list(model.batches("train", train=True))
    assert used == len(batches)  # all, where more were asked for than there are
    assert sum(len(batch["id"]) for batch in batches) == 600  # and none is lost to a batch multiple

    line = (
        r"validation loss (before|after): +([\d.]+) bits per token \((\d+) sentences, (\d+) "
        r"tokens\)"
    )
    losses = re.findall(line, out)
    assert [loss[0] for loss in losses] == ["before", "after"]
    for path, (_, bits, sentences, tokens) in zip((plain, output), losses, strict=True):
        expected = loss_by_sentence(path, data)
        np.testing.assert_allclose(float(bits), expected[0], rtol=0, atol=2e-4)
        assert (int(sentences), int(tokens)) == expected[1:]
    assert sentences == "40"  # the whole of valid, and no multiple of fairseq's 8 is needed
    assert losses[0][1] != losses[1][1]


@pytest.mark.ci
def test_only_the_running_statistics_change_and_they_fit_the_averaged_weights(
    trained, data, plain, tmp_path, capsys
):
    outputs = [tmp_path / name for name in ("one.pt", "two.pt")]
    for output in outputs:
        _, out, _ = average(trained, output, capsys, "--recalibrate", data / "bin", "--batches", 4)
        assert "recalibrated 7 norms on 4 training batches" in out
    before = load_checkpoint(plain)["model"]
    after, again = (load_checkpoint(path)["model"] for path in outputs)
    assert list(before) == list(after)
    for key, value in after.items():
        assert value.dtype == before[key].dtype
        assert torch.equal(value, again[key])
        if not key.endswith("_float_tensor"):
            assert torch.equal(value, before[key]) != key.endswith("running_psi2"), key

    model = ModelWithData(load_checkpoint(plain), "plain", data / "bin")
    norm = model.model.encoder.layers[0].self_attn_layer_norm
    psi2 = []

    def look(module, arguments):
        x, mask = arguments
        groups = x.double().unflatten(-1, (module.layer_scale.groups, -1))
        squares = groups.square().mean(-1, keepdim=True)
        scaled = (groups / (squares + module.eps).sqrt()).flatten(-2).transpose(0, 1)
        real = scaled.flatten(0, 1) if mask is None else scaled[~mask]
        psi2.append(real.square().mean(0))

    norm.register_forward_pre_hook(look)
    with torch.no_grad():
        for sample in islice(model.batches("train", train=True), 4):
            model.model(**sample["net_input"])
    expected = torch.stack(psi2).mean(0)
    found = after["encoder.layers.0.self_attn_layer_norm.running_psi2"]
    torch.testing.assert_close(found.double(), expected, rtol=5e-6, atol=0)  # it is float32


def test_half_precision_weights_stay_so_and_arithmetic_is_float32(plain, data):
    state = load_checkpoint(plain)
    weights = state["model"]
    expected = ModelWithData(state, "plain", data / "bin").validate()
    for key, value in weights.items():
        if value.is_floating_point() and not key.endswith(("running_psi2", "nu")):
            weights[key] = value.half()
    dtypes = {key: value.dtype for key, value in weights.items()}
    model = ModelWithData(state, "half", data / "bin")
    np.testing.assert_allclose(model.validate().bits, expected.bits, rtol=0, atol=0.01)
    model.recalibrate(2)
    model.store(weights)
    assert {key: value.dtype for key, value in weights.items()} == dtypes
    assert {parameter.dtype for parameter in model.model.parameters()} == {torch.float32}


def test_nothing_to_recalibrate(trained, plain, data, tmp_path, capsys):
    """A model with LayerNorm: the PN model's checkpoint without its statistics."""
    state = load_checkpoint(plain)
    statistics = ("running_psi2", ".nu", "num_batches_tracked")
    for key in list(state["model"]):
        if key.endswith(statistics):
            del state["model"][key]
    model = state["cfg"]["model"]
    if isinstance(model, dict):
        model["encoder_norm"] = "layer"
    else:
        model.encoder_norm = "layer"
    save_checkpoint(state, tmp_path / "ln.pt")
    files = ["--inputs", tmp_path / "ln.pt", "--output", tmp_path / "out.pt"]
    assert main([*files, "--recalibrate", data / "bin"]) == 0
    captured = capsys.readouterr()
    assert "nothing to recalibrate" in captured.out
    assert captured.err == ""
    written = load_checkpoint(tmp_path / "out.pt")["model"]
    for key, value in state["model"].items():
        if "_float_tensor" not in key:
            assert torch.equal(written[key], value), key


def longer_dictionary(bin_folder):
    for lang in ("es", "en"):
        with (bin_folder / f"dict.{lang}.txt").open("a", encoding="utf-8") as file:
            file.write("neverseen 1\n")


def without(pattern):
    def change(bin_folder):
        for path in list(bin_folder.glob(pattern)):
            path.unlink()

    return change


@pytest.mark.parametrize(
    ("change", "needles"),
    [
        (longer_dictionary, ("embed_tokens", "another vocabulary")),
        (without("dict.en.txt"), ("dict.en.txt",)),
        (without("dict.*"), ("not a folder of binarized data", "fairseq-preprocess")),
        (without("train.*"), ("subset 'train'",)),
        (without("valid.*"), ("subset 'valid'",)),
    ],
    ids=[
        "other dictionary",
        "half a dictionary",
        "no dictionary",
        "no training data",
        "no validation data",
    ],
)
def test_data_that_does_not_fit(change, needles, trained, data, tmp_path, capsys):
    shutil.copytree(data / "bin", tmp_path / "bin")
    change(tmp_path / "bin")
    code, _, err = average(trained, tmp_path / "out.pt", capsys, "--recalibrate", tmp_path / "bin")
    assert code == 2
    assert err.count("\n") == 1
    assert str(tmp_path / "bin") in err
    assert all(needle in err for needle in needles), err
    assert [path.name for path in tmp_path.iterdir()] == ["bin"], "something was written"


@pytest.mark.slow
def test_the_script_knows_how_the_average_was_made(trained, tmp_path, capsys):
    """Recalibrated or not is a part of what was made; the default is not."""
    averaged = tmp_path / "averaged.pt"
    flags = ("--run", trained, "--last", 2, "--output", averaged)
    psi2 = []
    for options, averaged_again in itertools.product((["--recalibrate"], []), (True, False)):
        assert main([*flags, *options]) == 0
        printed = capsys.readouterr()
        assert ("already" not in printed.err) == averaged_again, options
        assert ("validation loss after" in printed.out) == (averaged_again and bool(options))
        psi2.append(load_checkpoint(averaged)["model"]["encoder.layer_norm.running_psi2"])
    assert torch.equal(psi2[0], psi2[1])
    assert not torch.equal(psi2[1], psi2[2])
    assert torch.equal(psi2[2], psi2[3])
