"""What synchronized statistics cost an update: ``torchrun --standalone --nproc-per-node N -m
benchmarks.ranks``.

One rank for each GPU, by NCCL, or on the CPU by gloo; every rank has a batch of its own. Measured
are whole updates: forward, backward and SGD of the encoder of :mod:`benchmarks.compile` in
``DistributedDataParallel``, with and without synchronized norms in turn. Printed are the
all-reduces of each norm that an update waits for, the asynchronous ones, and their bytes, counted
where the norms call ``torch.distributed``; the medians of both times in milliseconds; the share of
an update that synchronizing takes, (with - without) / with in the same round, with quartiles; and
the time of an all-reduce by itself. The share of ``layer``, which has nothing to synchronize, is
noise. :mod:`benchmarks.slow_link` starts this on a slow link.
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
from benchmarks.norms import DTYPES
from benchmarks.results import in_turns, output_file, positive, quartiles, ratios, write_csv
from pn_fairseq.common import command
from pn_fairseq.norms import running_norms

#: Norms with and without synchronized statistics.
NORMS = ("batch", "power-v", "power")


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
    work = {}
    rows = []
    for norm in ("layer", *NORMS):
        for sync in (True, False):
            encoder, work[norm, sync] = updates(norm, sync, args, device)
            if sync:
                waited, beside = count_all_reduces(work[norm, sync])
        norms = len(running_norms(encoder))
        row = {"norm": norm, "norms": norms, "waited_for": len(waited)}
        row |= {"asynchronous": len(beside), "bytes": sum(waited + beside)}
        for key in ("waited_for", "asynchronous", "bytes"):
            row[key] /= max(norms, 1)
        rows.append(row)
    gradient = sum(value.nbytes for value in encoder.parameters())
    of_one = seconds_of_an_all_reduce(args.channels, device)
    seconds = in_turns(work, args.rounds, warm=2)
    for row in rows:
        both = seconds[row["norm"], True]
        alone = seconds[row["norm"], False]
        low, middle, high = (round(1 - ratio, 4) for ratio in reversed(ratios(alone, both)))
        row["milliseconds"] = round(1e3 * quartiles(both)[1], 1)
        row["milliseconds_unsynced"] = round(1e3 * quartiles(alone)[1], 1)
        row |= {"share": middle, "share_low": low, "share_high": high}
        row |= {"all_reduce_milliseconds": round(1e3 * of_one, 3), "gradient_bytes": gradient}
    return rows


def parse(argv) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="benchmarks.ranks", description=__doc__.split("\n")[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
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
    missing = {"RANK", "WORLD_SIZE", "LOCAL_RANK"} - set(os.environ)
    if missing:
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
        rows = measure_updates(args, device)
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
