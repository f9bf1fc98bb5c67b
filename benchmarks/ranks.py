"""Norms with statistics of all ranks: ``torchrun --standalone --nproc-per-node N -m benchmarks.ranks``.

One rank for each GPU, by NCCL, or on the CPU by gloo; every rank has a batch of its own. Of each norm is printed the
time of forward and backward, as a ratio to ``torch.nn.LayerNorm``, which needs no other rank, in the same round; and
the largest difference, relative to the largest value, between what the ranks compute on parts of a batch and what one
computes on the whole. "SyncBatchNorm gathered" is torch's on the real tokens.
"""

import argparse
import os
import sys
from pathlib import Path

import pandas
import torch
import torch.distributed as dist
from torch import nn

from benchmarks import hide_messages
from benchmarks.norms import BASE, DTYPES, Contestant, Gathered, Unmasked, make_batch, take_turns, time_and_batch
from benchmarks.results import output_file, positive, quartiles, ratios, write_csv
from pn_fairseq.common import command
from pn_fairseq.kernels.first_use import difference
from pn_fairseq.norms import build_norm

#: Norms with and without synchronized statistics.
NORMS = ("batch", "power-v", "power")


def contestants(channels: int, device: str) -> list[Contestant]:
    """LayerNorm first. torch's SyncBatchNorm computes on GPUs only."""
    found = [Contestant(name, Unmasked(nn.LayerNorm(channels)), BASE) for name in (BASE, f"{BASE} again")]
    if device == "cuda":
        found.append(Contestant("SyncBatchNorm gathered", Gathered(channels, nn.SyncBatchNorm), "SyncBatchNorm"))
    for norm in NORMS:
        for sync in (True, False):
            name = f"{norm}{', synchronized' if sync else ''}"
            found.append(Contestant(name, build_norm(norm, channels, sync=sync), norm))
    return found


def difference_to_one_rank(norm: str, channels: int, rank: int, world: int, device: torch.device) -> float:
    """Of y, dx and the state after two steps, in float32."""
    steps, sentences = 8, 3
    x, dy, mask = make_batch((steps, sentences * world, channels), 0.2, torch.float32, device)
    own = slice(rank * sentences, (rank + 1) * sentences)
    parts = [(x, dy, mask), (x[:, own], dy[:, own], mask[own])]
    results = []
    for sync, (x, dy, mask) in zip((False, True), parts, strict=True):
        module = build_norm(norm, channels, sync=sync).to(device)
        for _ in range(2):
            leaf = x.detach().clone().requires_grad_()
            y = module(leaf, mask)
            y.backward(dy)
        place = slice(None) if sync else own
        results.append((y[:, place], leaf.grad[:, place], *module.state_dict().values()))
    worst = torch.tensor(difference(*reversed(results)), device=device)
    dist.all_reduce(worst, dist.ReduceOp.MAX)
    return float(worst)


def parse(argv) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="benchmarks.ranks", description=__doc__.split("\n")[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--rows", type=positive, default=4096, help="tokens of a rank (default: 4096)")
    parser.add_argument("--channels", type=positive, default=512, help="default: 512")
    parser.add_argument("--dtype", choices=list(DTYPES), default="bfloat16", help="default: bfloat16")
    parser.add_argument("--rounds", type=positive, default=40, help="turns of each (default: 40)")
    parser.add_argument("--output", type=output_file, metavar="FILE", help="also write a CSV file")
    return parser.parse_args(argv)


def main(argv=None) -> None:
    args = parse(argv)
    if missing := {"RANK", "WORLD_SIZE", "LOCAL_RANK"} - set(os.environ):
        raise command.UserError(f"torchrun has to start it, which sets {', '.join(sorted(missing))}")
    if args.device == "cuda" and torch.cuda.device_count() <= int(os.environ["LOCAL_RANK"]):
        raise command.UserError(f"{torch.cuda.device_count()} GPUs are fewer than there are ranks")
    hide_messages()
    device = torch.device(args.device)
    if args.device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    else:
        torch.set_num_threads(1)
    dist.init_process_group("nccl" if args.device == "cuda" else "gloo")
    try:
        measure(args, device, dist.get_rank(), dist.get_world_size())
    finally:
        dist.destroy_process_group()


def measure(args: argparse.Namespace, device: torch.device, rank: int, world: int) -> None:
    differences = {norm: difference_to_one_rank(norm, args.channels, rank, world, device) for norm in NORMS}
    torch.manual_seed(0)
    found = contestants(args.channels, args.device)
    batch = make_batch((*time_and_batch(args.rows), args.channels), 0.1, DTYPES[args.dtype], device)
    for contestant in found:
        contestant.module.to(device, DTYPES[args.dtype])
    take_turns(found, batch, args.rounds, device)  # in the same order on all ranks
    if rank:
        return
    settings = {"ranks": world, "backend": dist.get_backend(), "shape": f"{args.rows}x{args.channels}"}
    rows = []
    for each in found:
        seconds = each.seconds["both"]
        low, middle, high = (round(value, 3) for value in ratios(seconds, found[0].seconds["both"]))
        own = {"contestant": each.name, "milliseconds": round(1000 * quartiles(seconds)[1], 4)}
        off = differences.get(each.norm, "") if each.name.endswith("synchronized") else ""
        own |= {"ratio": middle, "ratio_low": low, "ratio_high": high, "difference": off and f"{off:.1e}"}
        rows.append({**settings, "dtype": args.dtype, **own})
    print(pandas.DataFrame(rows).to_string(index=False))
    if args.output:
        write_csv(Path(args.output), rows)


if __name__ == "__main__":
    sys.exit(command.run("benchmarks.ranks", main))
