"""Image classification with any norm, in plain PyTorch: ResNet20 on CIFAR-10, and the AdaNorm
paper's network on MNIST.

    python examples/images.py DATA --norms batch power --epochs 20 --output runs/images
    python examples/images.py DATA --network mnist --norms layer ada detach-mean --validation 5000

DATA has a folder of images (PNG, JPEG) for each class: ``train/CLASS/*`` and ``test/CLASS/*``; with
``--download`` torchvision (pip install '.[examples]') fills it. Writes OUTPUT/images.png, and for
each training a folder with epochs.csv, the checkpoint and norm_probe: the statistics of the first
norm of ResNet20, recorded every 20 updates; give the folder to ``pn figures``. A training that was
interrupted continues after its last whole epoch.

ResNet20 (He et al. 2016, arXiv 1512.03385, section 4.2): batches of 128, SGD with momentum 0.9,
weight decay 0.0001, learning rate 0.1, divided by 10 after half and three quarters of the epochs;
crops of images padded by 4 pixels, flips; shortcuts without parameters. MNIST (arXiv 1911.07013,
appendix): convolutions from 1 to 20 and to 50 channels, batches of 32, Adam with learning rate
0.001, a norm in the linear layer. Our choice: 5 x 5 kernels, pooling by 2, 500 channels.
"""

import argparse
import logging
from pathlib import Path

import numpy
import pandas
import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from PIL import Image
from torch import Tensor, nn
from torch.optim.lr_scheduler import MultiStepLR
from tqdm import tqdm

from pn_fairseq.models.norm_probe import NormProbe
from pn_fairseq.norms import NORMS, ChannelNorm, convert_norms

#: What a norm gets besides its defaults: AdaNorm's C on MNIST; for PN a warm-up of psi of two
#: epochs of CIFAR-10.
OPTIONS = {"ada": {"ada_scale": 2.0}, "power": {"psi_warmup_updates": 800}}
OPTIONS |= {f"detach-{part}": {"norm": "detach", "detach": part} for part in ("mean", "std")}
INTERVAL = 20  # updates from one record of the probe to the next


class Block(nn.Module):
    """Two convolutions with their norms, and a shortcut that pads new channels with zeros."""

    def __init__(self, before: int, channels: int, stride: int):
        super().__init__()
        self.conv1 = nn.Conv2d(before, channels, 3, stride, padding=1, bias=False)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm1, self.norm2 = nn.BatchNorm2d(channels), nn.BatchNorm2d(channels)
        self.stride, self.added = stride, (channels - before) // 2

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x)))))
        return F.relu(
            h + F.pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, self.added, self.added))
        )


def resnet20(colours: int, classes: int) -> nn.Module:
    blocks = (
        [(16, 16, 1)] * 3 + [(16, 32, 2)] + [(32, 32, 1)] * 2 + [(32, 64, 2)] + [(64, 64, 1)] * 2
    )
    stem = [nn.Conv2d(colours, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU()]
    stages = [Block(*block) for block in blocks]
    return nn.Sequential(
        *stem, *stages, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, classes)
    )


def mnist(colours: int, classes: int) -> nn.Module:
    stem = [
        nn.Conv2d(colours, 20, 5),
        nn.MaxPool2d(2),
        nn.ReLU(),
        nn.Conv2d(20, 50, 5),
        nn.MaxPool2d(2),
        nn.ReLU(),
    ]
    return nn.Sequential(
        *stem,
        nn.Flatten(),
        nn.LazyLinear(500),
        nn.LayerNorm(500),
        nn.ReLU(),
        nn.Linear(500, classes),
    )


NETWORKS = {"resnet20": resnet20, "mnist": mnist}


# for NormProbe: the summed loss, and the sample size by which it must still be divided
class CrossEntropy(nn.Module):
    def forward(self, model: nn.Module, images: Tensor, labels: Tensor) -> tuple[Tensor, int]:
        return F.cross_entropy(model(images), labels, reduction="sum"), len(labels)


def read(folder: Path, part: str, dataset: str | None) -> tuple[list[str], Tensor, Tensor]:
    """Classes, images (N, C, H, W) from -1 to 1, and labels (N,), of one part ("train" or
    "test").
    """
    if dataset:
        from torchvision import datasets

        downloaded = getattr(datasets, dataset)(folder, part == "train", download=True)
        classes, images, labels = downloaded.classes, downloaded.data, downloaded.targets
    else:
        files = [
            file
            for file in sorted(folder.glob(f"{part}/*/*"))
            if file.suffix in (".png", ".jpg", ".jpeg")
        ]
        if not files:
            raise FileNotFoundError(f"{folder} has no {part}/CLASS/*.png or *.jpg")
        classes = sorted({file.parent.name for file in folder.glob("train/*/*")})
        if unknown := {file.parent.name for file in files}.difference(classes):
            raise ValueError(
                f"{folder}/{part} has classes that train has not: {', '.join(sorted(unknown))}"
            )
        images = numpy.stack([numpy.asarray(Image.open(file)) for file in tqdm(files, part)])
        labels = [classes.index(file.parent.name) for file in files]
    images = torch.as_tensor(images) / 127.5 - 1
    return (
        classes,
        images.movedim(-1, 1) if images.dim() == 4 else images[:, None],
        torch.as_tensor(labels),
    )


def augment(images: Tensor) -> Tensor:
    """Each image at a random place of itself padded by 4 pixels, and half of the images
    mirrored.
    """
    number, _, height, width = images.shape
    places = F.pad(images, (4, 4, 4, 4)).unfold(2, height, 1).unfold(3, width, 1)
    images = places[
        torch.arange(number), :, torch.randint(9, (number,)), torch.randint(9, (number,))
    ]
    return torch.where(torch.rand(number, 1, 1, 1) < 0.5, images.flip(3), images)


@torch.no_grad()
def accuracy(model: nn.Module, images: Tensor, labels: Tensor) -> float:
    model.eval()
    parts = zip(images.split(500), labels.split(500), strict=True)
    return (
        100
        * sum((model(part).argmax(1) == of_part).sum().item() for part, of_part in parts)
        / max(len(labels), 1)
    )


def train(
    network: str, norm: str, seed: int, epochs: int, data: dict, classes: int, folder: Path
) -> None:
    """Trains the epochs that are not done yet, and writes a row of epochs.csv after each of
    them.
    """
    torch.manual_seed(seed)
    images, labels = data["train"]
    model = NETWORKS[network](images.size(1), classes).eval()
    model(images[:2])  # sets the sizes that it reads from its input
    convert_norms(model, layout="BCHW", **{"norm": norm} | OPTIONS.get(norm, {}))
    model.to(memory_format=torch.channels_last)  # 1.3 times as fast on a CPU
    size, optimizer, milestones = 32, torch.optim.Adam(model.parameters(), lr=0.001), []
    if network == "resnet20":
        size, milestones = 128, [epochs // 2, epochs * 3 // 4]
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
    parts = {"model": model, "optimizer": optimizer, "schedule": MultiStepLR(optimizer, milestones)}
    criterion, updates, rows, checkpoint = CrossEntropy(), 0, [], folder / "checkpoint.pt"
    first = next(name for name, module in model.named_modules() if isinstance(module, ChannelNorm))
    probe = (
        NormProbe(model, str(folder / "norm_probe"), INTERVAL, first)
        if network == "resnet20"
        else None
    )
    if checkpoint.exists():
        state = torch.load(checkpoint, weights_only=True)
        for name, part in parts.items():
            part.load_state_dict(state[name])
        updates, rows = state["updates"], state["rows"]
        torch.set_rng_state(state["random"])
    for epoch in range(len(rows) + 1, epochs + 1):
        total = 0.0
        model.train()
        order = torch.randperm(len(labels)).split(size)
        for batch in tqdm(
            order, desc=f"{network} {norm} seed {seed}, epoch {epoch} of {epochs}", disable=None
        ):
            if probe:
                probe.begin(updates, criterion, str(folder))
            loss, number = criterion(
                model, augment(images[batch]) if milestones else images[batch], labels[batch]
            )
            optimizer.zero_grad()
            (loss / number).backward()
            optimizer.step()
            updates += 1
            if probe:
                probe.end(updates)
            total += loss.item() / number
        parts["schedule"].step()
        scores = {
            f"{part} accuracy": accuracy(model, *data[part]) for part in ("validation", "test")
        }
        rows.append({"epoch": epoch, "loss": total / len(order), **scores})
        state = {"updates": updates, "rows": rows, "random": torch.get_rng_state()}
        torch.save(
            state | {name: part.state_dict() for name, part in parts.items()}, folder / "partial.pt"
        )
        (folder / "partial.pt").replace(checkpoint)
        pandas.DataFrame(rows).to_csv(folder / "epochs.csv", index=False, float_format="%.6g")


def draw(folders: list[Path], file: Path) -> None:
    axis = (figure := Figure(figsize=(4.8, 3.2), layout="constrained")).subplots()
    for folder in folders:
        table = pandas.read_csv(folder / "epochs.csv")
        axis.plot(table["epoch"], table["test accuracy"], label=folder.name)
        # without validation images: the last epoch
        best = table.nlargest(1, "validation accuracy", keep="last")
        print(f"{folder.name}:", best[["epoch", "test accuracy"]].to_dict("records")[0])
    axis.set(xlabel="epoch", ylabel="test accuracy (%)")
    axis.legend()
    figure.savefig(file, dpi=130)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("data", type=Path, metavar="DATA")
    parser.add_argument("--download", choices=["CIFAR10", "MNIST"])
    parser.add_argument("--network", choices=list(NETWORKS), default="resnet20")
    parser.add_argument(
        "--norms", nargs="+", choices=NORMS | OPTIONS, default=["batch", "power"], metavar="NORM"
    )
    parser.add_argument("--seeds", nargs="+", type=int, default=[1], metavar="SEED")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument(
        "--validation", type=int, default=0, metavar="N", help="training images that are held out"
    )
    parser.add_argument("--output", type=Path, default=Path("runs/images"), metavar="DIR")
    options = parser.parse_args(arguments)
    for library in ("matplotlib", "PIL"):  # fairseq turns all messages on
        logging.getLogger(library).setLevel(logging.WARNING)
    try:
        data = {part: read(options.data, part, options.download) for part in ("train", "test")}
        (classes, images, labels), (_, test_images, test_labels) = data.values()
        if options.epochs < 1 or not 0 <= options.validation < len(labels):
            raise ValueError(
                f"--epochs must be at least 1, and --validation from 0 to {len(labels) - 1}"
            )
        options.output.mkdir(parents=True, exist_ok=True)
    except (ImportError, OSError, ValueError) as error:
        parser.exit(2, f"images: error: {error}; see --help\n")
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(1)).tensor_split(
        [options.validation]
    )
    parts = {
        name: (images[part], labels[part])
        for name, part in zip(("validation", "train"), order, strict=True)
    }
    parts["test"] = test_images, test_labels
    name = f"{options.network}_{options.epochs}epochs" + f"_{options.validation}held" * bool(
        options.validation
    )
    runs = {
        options.output / f"{name}_{norm}_seed{k}": (norm, k)
        for k in options.seeds
        for norm in options.norms
    }
    for folder, (norm, seed) in runs.items():
        folder.mkdir(exist_ok=True)
        train(options.network, norm, seed, options.epochs, parts, len(classes), folder)
    draw(list(runs), options.output / "images.png")


if __name__ == "__main__":
    main()
