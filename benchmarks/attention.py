"""Tensorized attention beside ordinary attention: ``python -m benchmarks.attention``.

One layer each, of the sizes of the authors' scripts, forward and backward in turn in the same round. Printed are
medians: milliseconds, how many times as long as ordinary causal attention with one head in the same round (a second
copy of it tells how large a difference means nothing), and the megabytes that are kept for the backward pass.
"""

import argparse

import torch
from fairseq.modules import MultiheadAttention
from tabulate import tabulate

from benchmarks import hide_messages, keep_memory
from benchmarks.results import in_turns, output_file, positive, quartiles, ratios, write_csv
from pn_fairseq.models import tensorized_attention
from pn_fairseq.models.tensorized_attention import TensorizedAttention

#: Name -> block length, blocks at once, rank.
SIZES = {"ptb": (32, 120, 40), "wt103": (80, 60, 40)}
DIM = 256
BASE = "ordinary"


def make_layers(length: int, rank: int, device: str) -> dict:
    """Name -> function of the input (T, B, C)."""
    mask = torch.triu(torch.full((length, length), float("-inf"), device=device), 1)
    found = {}
    for name in (BASE, f"{BASE} again"):
        ordinary = MultiheadAttention(DIM, 1, self_attention=True).to(device)
        found[name] = lambda x, layer=ordinary: layer(x, x, x, need_weights=False, attn_mask=mask)[0]
    positions = torch.randn(length, DIM, device=device)
    biases = torch.zeros(2, rank, device=device)
    for name, masked, rows in (
        ("tensorized", True, tensorized_attention.ROWS),
        ("tensorized, all rows at once", True, length),
        ("tensorized, unmasked", False, length),
    ):
        layer = TensorizedAttention(DIM, rank, length, masked=masked).to(device)

        def compute(x, layer=layer, rows=rows):
            tensorized_attention.ROWS = rows
            return layer(x, positions, *biases)

        found[name] = compute
    return found


def kept(function, x: torch.Tensor) -> float:
    """Megabytes of the tensors that autograd keeps for the backward pass, those of the parameters included."""
    storages = {}

    def keep(tensor):
        storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        function(x).sum()
    return sum(storages.values()) / 1e6


def step(function, x: torch.Tensor) -> None:
    function(x).sum().backward()
    if x.is_cuda:
        torch.cuda.synchronize()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, nargs="+", default=list(SIZES), help="default: all")
    parser.add_argument("--rounds", type=positive, default=7, metavar="N", help="default: 7")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--output", type=output_file, metavar="FILE", help="also write a CSV file")
    args = parser.parse_args()
    keep_memory()
    hide_messages()
    written = []
    for size in args.size:
        length, blocks, rank = SIZES[size]
        layers = make_layers(length, rank, args.device)
        x = torch.randn(length, blocks, DIM, device=args.device, requires_grad=True)
        memory = {name: kept(layer, x) for name, layer in layers.items()}
        work = {name: lambda _, layer=layer, x=x: step(layer, x) for name, layer in layers.items()}
        times = in_turns(work, args.rounds, warm=1)
        rows = []
        for name in layers:
            low, middle, high = ratios(times[name], times[BASE])
            milliseconds = 1000 * quartiles(times[name])[1]
            relative = f"{middle:.2f} ({low:.2f} to {high:.2f})"
            rows.append([name, f"{milliseconds:.1f}", relative, f"{memory[name]:.1f}"])
            numbers = (milliseconds, middle, low, high, memory[name])
            names = ("milliseconds", "times_ordinary", "times_low", "times_high", "megabytes_kept")
            measured = {column: f"{number:.4g}" for column, number in zip(names, numbers, strict=True)}
            settings = {"length": length, "blocks": blocks, "rank": rank, "device": args.device, "rounds": args.rounds}
            written.append({"size": size, "layer": name, **settings, "threads": torch.get_num_threads(), **measured})
        print(f"{size}: {blocks} blocks of {length} tokens, {DIM} channels, R {rank}, {args.device}")
        print(tabulate(rows, headers=["", "ms", f"times {BASE}", "MB kept"], tablefmt="plain", disable_numparse=True))
        print()
    if args.output:
        write_csv(args.output, written)


if __name__ == "__main__":
    main()
