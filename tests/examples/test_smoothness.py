"""examples/smoothness.py and examples/noisy_batch.py."""

import logging
import shutil
import sys
from copy import deepcopy

import numpy as np
import pandas
import pytest
import torch
from torch import nn
from torch.testing import assert_close

from pn_fairseq.norms import MaskedBatchNorm, build_norm
from pn_fairseq.norms.registry import load_norms

from ..scripts_helpers import in_process
from .programs import ROOT, load, refused

smoothness = load("smoothness")


@pytest.fixture(autouse=True)
def _logging():
    """The program turns the log of its process off."""
    yield
    logging.disable(logging.NOTSET)


class Quadratic(nn.Module):
    """L = |theta|^2 beta / 2 with two layers of an encoder and one of a decoder, coupled by
    ``coupling`` a . b.
    """

    def __init__(self, coupling=0.0):
        super().__init__()
        self.encoder = nn.Module()
        self.decoder = nn.Module()
        self.encoder.layers = nn.ModuleList(nn.Linear(3, 1, bias=False) for _ in range(2))
        self.decoder.layers = nn.ModuleList([nn.Linear(3, 1, bias=False)])
        self.coupling = coupling


def criterion(model, beta):
    a, b, c = model.parameters()
    squares = a.square().sum() + b.square().sum() + c.square().sum()
    loss = squares * beta / 2 + model.coupling * (a * b).sum()
    return 7 * loss, 7, None


def test_the_smoothness_of_a_quadratic_function_is_its_curvature():
    """theta' = (1 - eta beta) theta: L' = (1 - rho)^2 L with rho = eta beta, |g' - g| = rho |g|."""
    model = Quadratic()
    for row in smoothness.along_the_gradient(model, criterion, 2.5, [0.01, 0.1]):
        rho = row["relative step"]
        change = ((1 - rho) ** 2 - 1) * row["loss"]
        np.testing.assert_allclose(row["smoothness"], 2.5, rtol=1e-4)
        np.testing.assert_allclose(row["relative gradient change"], rho, rtol=1e-4)
        np.testing.assert_allclose(row["loss change"], change, rtol=1e-3)


def test_the_loss_is_summed_in_the_backward_pass():
    """As in training: PN subtracts its nu, which has the scale of the summed loss."""
    scales = []

    def hooked(model, beta):
        loss, tokens, log = criterion(model, beta)
        loss.register_hook(lambda gradient: scales.append(float(gradient)))
        return loss, tokens, log

    model = Quadratic()
    _, gradients = smoothness.loss_and_gradients(model, hooked, 2.0)
    assert scales == [1.0]
    weight = model.decoder.layers[0].weight.detach()
    assert_close(gradients["decoder.layers.0.weight"], 2.0 * weight)


def test_only_the_layers_before_move():
    """The gradient of b, beta b + kappa a, changes by kappa eta (beta a + kappa b); the others'
    do not.
    """
    model = Quadratic(0.5)
    beta = 2.0
    kappa = 0.5
    rows = smoothness.after_the_layers_before(model, criterion, beta, 0.1)
    layers = ["encoder.layers.0", "encoder.layers.1", "decoder.layers.0"]
    assert [row["layer"] for row in rows] == layers
    a, b, c = (weight.detach() for weight in model.parameters())
    of_a = beta * a + kappa * b
    of_b = beta * b + kappa * a
    gradient = torch.cat([of_a, of_b, beta * c])
    eta = 0.1 * torch.cat([a, b, c]).norm() / gradient.norm()
    change = kappa * eta * of_a.norm()
    assert rows[0]["gradient change"] == 0
    np.testing.assert_allclose(rows[1]["gradient change"], change, rtol=1e-4)
    assert rows[2]["gradient change"] == 0
    np.testing.assert_allclose(rows[0]["cosine"], 1, rtol=1e-6)
    assert rows[1]["cosine"] < 1


@pytest.mark.slow
def test_on_a_run_with_noisy_batch_normalization(data, tmp_path, capsys):
    updates = "optimization.max_update=2 checkpoint.save_interval_updates=1"
    model = f"model._name=transformer_bn_tiny model.encoder_norm=noisy-batch {updates}"
    module = f"+model.norm_module={ROOT}/examples/noisy_batch.py"
    run = tmp_path / "run"
    data = shutil.copytree(data, tmp_path / "data")
    words = ["verses_es_en", "--data", data, "--run", run, *model.split(), module]
    in_process("train", *words, "dataset.max_tokens=400")
    measure = f"{run} --last 1 --batches 2 --steps 1e-4 1e-3 --output {tmp_path}"
    smoothness.main(measure.split())
    steps = pandas.read_csv(tmp_path / "steps.csv")
    layers = pandas.read_csv(tmp_path / "layers.csv")
    assert len(steps) == 2 * 2
    assert (steps["gradient"] > 0).all()
    assert (steps["loss change"] < 0).all()
    assert set(layers["layer"]) >= {"encoder.layers.0", "decoder.layers.0"}
    assert (tmp_path / "smoothness.png").stat().st_size > 1000
    measured = smoothness.over_the_steps(steps)
    one = steps[steps["batch"] == 1]
    assert len(measured) == 2
    assert measured["effective smoothness"].iloc[1] == one["smoothness"].max()
    loss_range = abs(one["loss change"].diff().iloc[1])
    assert measured["range of the loss"].iloc[1] == pytest.approx(loss_range)
    assert f"{measured['range of the loss'].max():.3g}" in capsys.readouterr().out
    data.rename(tmp_path / "elsewhere")
    assert "dict.es.txt" in refused(smoothness, capsys, run, "--output", tmp_path / "new")
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("option", ["--batches", "--last", "--steps"])
def test_no_batches_checkpoints_or_steps(option, capsys):
    with pytest.raises(SystemExit) as exit:
        smoothness.main(["run", option, "0"])
    assert exit.value.code == 2
    assert "must be positive" in capsys.readouterr().err.splitlines()[-1]


def test_a_folder_without_checkpoints_is_one_line(tmp_path, capsys):
    (tmp_path / "checkpoints").mkdir()
    assert refused(smoothness, capsys, tmp_path)


def test_noise_is_what_the_paper_says(monkeypatch):
    """y = s BN(x) + m: the moments of m and s by channel and token; BN in evaluation and without
    the constants.
    """
    load_norms(f"{ROOT}/examples/noisy_batch.py")
    norm = build_norm("noisy-batch", 2000)
    x = torch.randn(40, 5, 2000)
    plain = MaskedBatchNorm(2000)
    normalized = plain(x)
    y = norm(x)
    slopes = ((y - y.mean((0, 1))) * normalized).mean((0, 1))  # sigma of a channel, with noise
    # 0.25 / sqrt(12) = 0.072
    assert (slopes.mean() - 1.125).abs() < 0.01
    assert 0.06 < slopes.std() < 0.09
    shifts = y.mean((0, 1))  # mu of a channel, with noise
    assert shifts.mean().abs() < 0.03
    assert (shifts.std() - 1 / 12**0.5).abs() < 0.02
    assert shifts.abs().max() < 0.6
    rest = (y - shifts - slopes * normalized).std()  # of m and s by token: 0.1 / sqrt(3) and 0.1
    assert (rest - (0.01 / 3 + 0.01) ** 0.5).abs() < 0.005
    expected = deepcopy(plain).eval()(x)
    assert_close(deepcopy(norm).eval()(x), expected)
    module = sys.modules[type(norm).__module__]
    for name in ("SHIFT", "SHIFT_RANGE", "SCALE_DEVIATION"):
        monkeypatch.setattr(module, name, 0.0)
    monkeypatch.setattr(module, "SCALE", 1.0)
    assert norm(x).equal(normalized)
