"""Norms with statistics of all ranks: ``torchrun --standalone --nproc-per-node N -m
benchmarks.ranks``.

One rank for each GPU, by NCCL, or on the CPU by gloo; every rank has a batch of its own. Of each
norm is printed the time of forward and backward, as a ratio to ``torch.nn.LayerNorm``, which needs
no other rank, in the same round; and the largest difference, relative to the largest value, between
what the ranks compute on parts of a batch and what one computes on the whole. "SyncBatchNorm
gathered" is torch's on the real tokens.

``--encoder`` measures whole updates instead: forward, backward and SGD of the encoder of
:mod:`benchmarks.compile` in ``DistributedDataParallel``, with and without synchronized norms in
turn. Printed are the all-reduces of each norm that an update waits for, the asynchronous ones, and
their bytes, counted where the norms call ``torch.distributed``; the medians of both times in
milliseconds; the share of an update that synchronizing takes, (with - without) / with in the same
round, with quartiles; and the time of an all-reduce by itself. The share of ``layer``, which has
nothing to synchronize, is noise. :mod:`benchmarks.slow_link` starts this on a slow link.
"""

import argparse
import os
import sys
from collections.abc import Callable
from pathlib import Path
from unittest.mock import patch

import pandas
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks import hide_messages
from benchmarks.compile import LENGTH, Encoder
from benchmarks.norms import (
    BASE,
    DTYPES,
    Contestant,
    Gathered,
    Unmasked,
    make_batch,
    take_turns,
    time_and_batch,
)
from benchmarks.results import in_turns, output_file, positive, quartiles, ratios, write_csv
from pn_fairseq.common import command
from pn_fairseq.kernels.first_use import difference
from pn_fairseq.norms import build_norm, running_norms

#: Norms with and without synchronized statistics.
NORMS = ("batch", "power-v", "power")


def contestants(channels: int, device: str) -> list[Contestant]:
    """LayerNorm first. torch's SyncBatchNorm computes on GPUs only."""
    found = [
        Contestant(name, Unmasked(nn.LayerNorm(channels)), BASE) for name in (BASE, f"{BASE} again")
    ]
    if device == "cuda":
        found.append(
            Contestant(
                "SyncBatchNorm gathered", Gathered(channels, nn.SyncBatchNorm), "SyncBatchNorm"
            )
        )
    for norm in NORMS:
        for sync in (True, False):
            name = f"{norm}{', synchronized' if sync else ''}"
            found.append(Contestant(name, build_norm(norm, channels, sync=sync), norm))
    return found


def difference_to_one_rank(
    norm: str, channels: int, rank: int, world: int, device: torch.device
) -> float:
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


def measure_norms(args: argparse.Namespace, device: torch.device) -> list[dict]:
    ranks = dist.get_rank(), dist.get_world_size()
    differences = {
        norm: difference_to_one_rank(norm, args.channels, *ranks, device) for norm in NORMS
    }
    torch.manual_seed(0)
    found = contestants(args.channels, args.device)
    batch = make_batch((*time_and_batch(args.rows), args.channels), 0.1, DTYPES[args.dtype], device)
    for contestant in found:
        contestant.module.to(device, DTYPES[args.dtype])
    take_turns(found, batch, args.rounds, device)  # in the same order on all ranks
    rows = []
    for each in found:
        seconds = each.seconds["both"]
        low, middle, high = (round(value, 3) for value in ratios(seconds, found[0].seconds["both"]))
        row = {"contestant": each.name, "milliseconds": round(1000 * quartiles(seconds)[1], 4)}
        off = differences.get(each.norm, "") if each.name.endswith("synchronized") else ""
        rows.append(
            {
                **row,
                "ratio": middle,
                "ratio_low": low,
                "ratio_high": high,
                "difference": off and f"{off:.1e}",
            }
        )
    return rows


def updates(
    norm: str, sync: bool, args: argparse.Namespace, device: torch.device
) -> tuple[nn.Module, Callable]:
    """An encoder, and a function that updates it once."""
    torch.manual_seed(dist.get_rank())  # DistributedDataParallel copies the parameters of rank 0
    options = {} if norm == "layer" else {"sync": sync}
    encoder = Encoder(norm, -(-args.rows // LENGTH), args.channels, **options).to(
        device, DTYPES[args.dtype]
    )
    model = DistributedDataParallel(encoder, broadcast_buffers=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    x, dy = (encoder.batch().to(device, DTYPES[args.dtype]) for _ in range(2))

    def update(number: int) -> None:
        model(x).backward(dy)
        optimizer.step()
        optimizer.zero_grad()
        for module in running_norms(model):
            module.set_num_updates(number + 1)  # waits for the sums of the backward
        if device.type == "cuda":
            torch.cuda.synchronize()

    return encoder, update


def count_all_reduces(update: Callable) -> tuple[list[int], list[int]]:
    """Bytes of each all-reduce of the norms in an update: of those waited for, and of the
    asynchronous ones.
    """
    sizes = ([], [])
    all_reduce = dist.all_reduce

    def counted(tensor, *args, async_op=False, **options):
        sizes[async_op].append(tensor.nbytes)
        return all_reduce(tensor, *args, async_op=async_op, **options)

    with patch.object(dist, "all_reduce", counted):
        update(0)
    return sizes


def seconds_of_an_all_reduce(channels: int, device: torch.device) -> float:
    """The median, of as many values as a norm sums in a backward, with nothing else on the
    network.
    """
    values = torch.zeros(2 * channels, device=device)

    def turn(number: int) -> None:
        dist.all_reduce(values)
        values.sum().item()  # waits for a GPU

    return quartiles(in_turns({"": turn}, rounds=20, warm=5)[""])[1]


def measure_updates(args: argparse.Namespace, device: torch.device) -> list[dict]:
    work, rows = {}, []
    for norm in ("layer", *NORMS):
        for sync in (True, False):
            encoder, work[norm, sync] = updates(norm, sync, args, device)
            if sync:
                waited, beside = count_all_reduces(work[norm, sync])
        norms = len(running_norms(encoder))
        counts = {
            "waited_for": len(waited),
            "asynchronous": len(beside),
            "bytes": sum(waited + beside),
        }
        rows.append(
            {
                "norm": norm,
                "norms": norms,
                **{key: value / max(norms, 1) for key, value in counts.items()},
            }
        )
    gradient = sum(value.nbytes for value in encoder.parameters())
    of_one = seconds_of_an_all_reduce(args.channels, device)
    seconds = in_turns(work, args.rounds, warm=2)
    for row in rows:
        both, alone = (seconds[row["norm"], sync] for sync in (True, False))
        low, middle, high = (round(1 - ratio, 4) for ratio in reversed(ratios(alone, both)))
        for name, values in {"milliseconds": both, "milliseconds_unsynced": alone}.items():
            row[name] = round(1e3 * quartiles(values)[1], 1)
        row |= {"share": middle, "share_low": low, "share_high": high}
        row |= {"all_reduce_milliseconds": round(1e3 * of_one, 3), "gradient_bytes": gradient}
    return rows


def parse(argv) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="benchmarks.ranks", description=__doc__.split("\n")[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument(
        "--encoder",
        action="store_true",
        help="measure updates of an encoder, not norms by themselves",
    )
    parser.add_argument(
        "--rows", type=positive, default=4096, help="tokens of a rank (default: 4096)"
    )
    parser.add_argument("--channels", type=positive, default=512, help="default: 512")
    parser.add_argument(
        "--dtype", choices=list(DTYPES), default="bfloat16", help="default: bfloat16"
    )
    parser.add_argument("--rounds", type=positive, default=40, help="turns of each (default: 40)")
    parser.add_argument("--output", type=output_file, metavar="FILE", help="also write a CSV file")
    return parser.parse_args(argv)


def main(argv=None) -> None:
    args = parse(argv)
    if missing := {"RANK", "WORLD_SIZE", "LOCAL_RANK"} - set(os.environ):
        raise command.UserError(
            f"torchrun has to start it, which sets {', '.join(sorted(missing))}"
        )
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
        rows = (measure_updates if args.encoder else measure_norms)(args, device)
        settings = {"ranks": dist.get_world_size(), "backend": dist.get_backend()}
        settings |= {"shape": f"{args.rows}x{args.channels}", "dtype": args.dtype}
        rows = [{**settings, **row} for row in rows]
        if dist.get_rank():
            return
    finally:
        dist.destroy_process_group()
    print(pandas.DataFrame(rows).to_string(index=False))
    if args.output:
        write_csv(Path(args.output), rows)


if __name__ == "__main__":
    sys.exit(command.run("benchmarks.ranks", main))
