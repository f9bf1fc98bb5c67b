"""examples/images.py on images made here."""

import itertools
import shutil
import sys
import types

import numpy
import pandas
import pytest
import torch
from PIL import Image
from torch import nn

from pn_fairseq.report import figures

from .programs import load, refused

images = load("images")


def make(folder, shape, number):
    rng = numpy.random.default_rng(1)
    for part in ("train", "test"):
        for place, name in enumerate(("dark", "light")):
            (folder / part / name).mkdir(parents=True)
            for index in range(number):
                pixels = rng.integers(0, 128, shape) + 100 * place
                Image.fromarray(pixels.astype("uint8")).save(folder / part / name / f"{index}.png")
    return folder


@pytest.fixture
def cifar(tmp_path):
    return make(tmp_path / "cifar", (32, 32, 3), 12)


def test_resnet20_has_the_parameters_of_the_paper():
    """0.27 million: convolutions 9 (3 16 + 6 16^2 + 16 32 + 5 32^2 + 32 64 + 5 64^2), norms 2
    688, output 650.
    """
    model = images.resnet20(3, 10)
    assert sum(parameter.numel() for parameter in model.parameters()) == 269_722
    assert sum(isinstance(module, nn.Conv2d) for module in model.modules()) + 1 == 20
    assert model(torch.randn(2, 3, 32, 32)).shape == (2, 10)


def test_an_augmented_image_is_a_window_of_the_padded_one():
    pixels = torch.randn(64, 3, 8, 6)
    torch.manual_seed(1)
    changed = images.augment(pixels)
    padded = nn.functional.pad(pixels, (4, 4, 4, 4))
    places = set()
    for image, own in zip(changed, padded, strict=True):
        found = set()
        for row, column in itertools.product(range(9), range(9)):
            window = own[:, row : row + 8, column : column + 6]
            if torch.equal(image, window):
                found.add((row, column, "as it is"))
            if torch.equal(image, window.flip(2)):
                found.add((row, column, "mirrored"))
        assert found
        places |= found
    assert len({place[0] for place in places}) > 5
    assert {place[2] for place in places} == {"as it is", "mirrored"}


@pytest.mark.ci
def test_an_interrupted_training_continues_to_the_same_numbers(cifar, tmp_path, monkeypatch):
    arguments = f"{cifar} --norms batch --epochs 3 --output".split()
    images.main([*arguments, str(tmp_path / "whole")])
    calls = []

    def accuracy(*given):
        calls.append(given)
        if len(calls) == 3:  # in the second epoch, before its checkpoint
            raise KeyboardInterrupt
        return original(*given)

    original = images.accuracy
    monkeypatch.setattr(images, "accuracy", accuracy)
    with pytest.raises(KeyboardInterrupt):
        images.main([*arguments, str(tmp_path / "cut")])
    images.main([*arguments, str(tmp_path / "cut")])
    name = "resnet20_3epochs_batch_seed1"
    whole = pandas.read_csv(tmp_path / f"whole/{name}/epochs.csv")
    cut = pandas.read_csv(tmp_path / f"cut/{name}/epochs.csv")
    assert list(whole["epoch"]) == [1, 2, 3]
    pandas.testing.assert_frame_equal(whole, cut)
    assert (tmp_path / "cut/images.png").stat().st_size > 1000


def test_the_first_norm_is_recorded(cifar, tmp_path, monkeypatch):
    """`pn figures` draws Figures 2 and 3 of a training run on images."""
    monkeypatch.setattr(images, "INTERVAL", 2)
    # The tests of the report draw. Here it is which figures there are.
    monkeypatch.setattr("matplotlib.figure.Figure.savefig", lambda *_, **__: None)
    images.main(f"{cifar} --norms batch --epochs 5 --output {tmp_path / 'runs'}".split())
    run = tmp_path / "runs/resnet20_5epochs_batch_seed1"
    records = figures.read_probe(run / "norm_probe")
    assert list(records["update"]) == [2, 4]
    assert set(records["norm"]) == {"1"}
    assert set(records["tokens"]) == {24 * 32 * 32}
    assert set(records["kind"]) == {"batch"}
    assert set(records["sample_size"]) == {24}
    assert records["loss"].between(0, 10).all()  # per image
    assert records["loss_scale"].tolist() == pytest.approx([1 / 24] * len(records))
    figures.main([str(run), "--output", str(tmp_path / "figures")])
    drawn = {file.name for file in (tmp_path / "figures").glob("*.png")}
    assert drawn == {"figure-2.png", "figure-3.png", "figure-4.png"}


def test_mnist(tmp_path, capsys):
    folder = make(tmp_path / "mnist", (28, 28), 40)
    how = "--network mnist --norms ada --epochs 4 --validation 20"
    images.main(f"{folder} {how} --output {tmp_path / 'runs'}".split())
    table = pandas.read_csv(tmp_path / "runs/mnist_4epochs_20held_ada_seed1/epochs.csv")
    assert table["test accuracy"].iloc[-1] > 90  # of light and dark images
    assert "test accuracy" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("{0}", "train/CLASS"),
        (
            "{0}/cifar --epochs 0",
            "--epochs must be at least 1, and --validation from 0 to 23",
        ),
        ("{0}/cifar --validation 24", "--validation from 0 to 23"),
        ("{0}/cifar --output {0}/file", "File exists"),
        ("{0}/other", "other/test has classes that train has not: light"),
        ("{0}/new --download MNIST", "torchvision"),
    ],
)
def test_mistakes_are_one_line(arguments, message, cifar, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "torchvision", None)
    (tmp_path / "file").touch()
    shutil.copytree(cifar, tmp_path / "other")
    shutil.rmtree(tmp_path / "other/train/light")
    error = refused(images, capsys, *arguments.format(tmp_path).split())
    assert error.startswith("images: error: ")
    assert message in error
    assert not (tmp_path / "runs").exists()
    assert (tmp_path / "file").stat().st_size == 0


def test_a_class_that_has_no_test_images_keeps_its_number(cifar):
    shutil.rmtree(cifar / "test/dark")
    classes, _, labels = images.read(cifar, "test", None)
    assert classes == ["dark", "light"]
    assert set(labels.tolist()) == {1}


def test_torchvision_downloads(tmp_path, monkeypatch):
    """A stand-in for it: what it must be asked for, and what becomes of its arrays."""
    asked = []

    def dataset(folder, train, download):
        asked.append((folder, train, download))
        pixels = torch.full((4, 28, 28), 255, dtype=torch.uint8)
        targets = torch.tensor([0, 1, 1, 0])
        return types.SimpleNamespace(classes=["0", "1"], data=pixels, targets=targets)

    fake = types.SimpleNamespace(datasets=types.SimpleNamespace(MNIST=dataset))
    monkeypatch.setitem(sys.modules, "torchvision", fake)
    classes, pixels, labels = images.read(tmp_path, "train", "MNIST")
    assert asked == [(tmp_path, True, True)]
    assert classes == ["0", "1"]
    assert labels.tolist() == [0, 1, 1, 0]
    assert pixels.shape == (4, 1, 28, 28)
    assert (pixels == 1).all()


def test_options_of_norms():
    """AdaNorm's Table 3: DetachNorm of the mean or of the deviation only."""
    assert images.OPTIONS["detach-mean"] == {"norm": "detach", "detach": "mean"}
    model = nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6))
    images.convert_norms(model, layout="BCHW", **images.OPTIONS["detach-std"])
    assert model[1].detach == ("std",)
