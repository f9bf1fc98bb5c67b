"""Time and memory of every norm against LayerNorm: ``python -m benchmarks.norms``.

All contestants take turns on the same activations, so that whatever else the machine does meets all of them. A figure
is the median over the rounds of the ratio to ``torch.nn.LayerNorm`` in the same round, with the quarters of the
distribution; "of least" is the ratio of the shortest times, which says more on a machine that is busy. Beside our
norms, by implementation of their kernels, stand torch's own, batch normalization on gathered tokens, and the least that
any norm can cost: a copy forward and an addition backward.
"""

import argparse
import csv
import datetime
import itertools
import os
import platform
import re
import statistics
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn

from benchmarks import keep_memory
from pn_fairseq import __version__, kernels
from pn_fairseq.norms import NORMS, build_norm

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
#: (T, B, C): the shapes of translation models, and with --odd what no vector width divides.
SHAPES = {"4096x512": (32, 128, 512), "4096x1024": (32, 128, 1024)}
LARGE = {"32768x1024": (64, 512, 1024)}
ODD = {"4095x515": (35, 117, 515), "1x512": (1, 1, 512)}
PHASES = ("forward", "backward", "both")
BASE = "LayerNorm"
FIELDS = (
    "date", "machine", "cores", "torch", "pn_fairseq", "device", "threads", "shape", "dtype", "phase", "contestant",
    "milliseconds", "ratio", "ratio_low", "ratio_high", "ratio_of_least", "extra_bytes",
)  # fmt: skip


@dataclass
class Contestant:
    """Something with a forward and a backward; ``module`` is called with activations and a padding mask."""

    name: str
    module: nn.Module | Callable[[Tensor, Tensor], Tensor]
    implementation: str | None = None
    times: dict[str, list[float]] = field(default_factory=lambda: {phase: [] for phase in PHASES})
    extra_bytes: int | None = None

    def computing(self):
        return kernels.using(self.implementation) if self.implementation else nullcontext()

    def clear(self) -> None:
        if isinstance(self.module, nn.Module):
            self.module.zero_grad(set_to_none=True)


class Gathered(nn.Module):
    """``BatchNorm1d`` on the real tokens alone, the others as they are."""

    def __init__(self, channels: int):
        super().__init__()
        self.norm = nn.BatchNorm1d(channels)

    def forward(self, x: Tensor, padding_mask: Tensor) -> Tensor:
        real = ~padding_mask.t()
        y = x.clone()
        y[real] = self.norm(x[real])
        return y


class Unmasked(nn.Module):
    def __init__(self, norm: nn.Module):
        super().__init__()
        self.norm = norm

    def forward(self, x: Tensor, padding_mask: Tensor) -> Tensor:
        return self.norm(x)


class _CopyAndAdd(torch.autograd.Function):
    """Reads the input and writes as much; reads input and gradient and writes as much."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.clone()

    @staticmethod
    def backward(ctx, dy):
        return ctx.saved_tensors[0] + dy


def contestants(channels: int, groups: int) -> list[Contestant]:
    found = [
        Contestant(BASE, Unmasked(nn.LayerNorm(channels))),
        Contestant("RMSNorm", Unmasked(nn.RMSNorm(channels))),
        Contestant("BatchNorm1d gathered", Gathered(channels)),
        Contestant("copy and add", lambda x, _: _CopyAndAdd.apply(x)),
    ]
    for name, entry in NORMS.items():
        if name == "layer":
            continue
        for implementation in reversed(kernels.available()):
            for scaled in (0, groups):
                label = f"{entry.short}{' +LS' if scaled else ''} {implementation}"
                norm = build_norm(name, channels, layer_scale_groups=scaled)
                found.append(Contestant(label, norm, implementation))
    return found


def make_batch(shape: tuple[int, int, int], padding: float, dtype, device) -> tuple[Tensor, Tensor, Tensor]:
    """Activations that need a gradient, that of the output, and a mask with about ``padding`` of it at the ends."""
    time_steps, sentences, channels = shape
    generator = torch.Generator().manual_seed(0)
    x, dy = (torch.randn(shape, generator=generator).to(device, dtype) for _ in range(2))
    shortest = round(time_steps * (1 - 2 * padding))
    lengths = torch.randint(shortest, time_steps + 1, (sentences, 1), generator=generator)
    mask = torch.arange(time_steps) >= lengths.clamp(min=1)
    return x.requires_grad_(), dy, mask.to(device)


def take_turns(found: list[Contestant], batch, rounds: int, synchronize: Callable[[], None]) -> None:
    """Fill in ``times``; the first rounds, in which memory is allocated, do not count."""
    x, dy, mask = batch
    for turn in range(rounds + 3):
        for contestant in found:
            contestant.clear()
            x.grad = None
            with contestant.computing():
                synchronize()
                start = time.perf_counter()
                y = contestant.module(x, mask)
                synchronize()
                middle = time.perf_counter()
                y.backward(dy)
                synchronize()
                end = time.perf_counter()
            del y
            if turn >= 3:
                for phase, seconds in zip(PHASES, (middle - start, end - middle, end - start), strict=True):
                    contestant.times[phase].append(seconds)


class PeakMemory:
    """The most bytes in use beyond those at the beginning: from the allocator on CUDA, from the profiler on CPU."""

    def __init__(self, device: torch.device):
        self.device = device

    def of(self, run: Callable[[], None]) -> int:
        if self.device.type == "cuda":
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            run()
            torch.cuda.synchronize()
            return torch.cuda.max_memory_allocated() - before
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
            run()
        in_use = most = 0
        for event in profile.profiler.kineto_results.events():
            if event.name() == "[memory]":
                in_use += event.nbytes()
                most = max(most, in_use)
        return most


def measure_memory(found: list[Contestant], batch, device: torch.device) -> None:
    x, dy, mask = batch

    def step(contestant: Contestant) -> None:
        contestant.module(x, mask).backward(dy)

    for contestant in found:
        contestant.clear()
        x.grad = None
        with contestant.computing():
            contestant.extra_bytes = PeakMemory(device).of(lambda chosen=contestant: step(chosen))
        contestant.clear()
        x.grad = None


def rows_of(found: list[Contestant], common: dict) -> list[dict]:
    base = found[0]
    rows = []
    for phase, contestant in itertools.product(PHASES, found):
        own, ours = contestant.times[phase], base.times[phase]
        ratios = [value / other for value, other in zip(own, ours, strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4)
        rows.append(
            {
                **common,
                "phase": phase,
                "contestant": contestant.name,
                "milliseconds": round(1000 * statistics.median(own), 4),
                "ratio": round(middle, 3),
                "ratio_low": round(low, 3),
                "ratio_high": round(high, 3),
                "ratio_of_least": round(min(own) / min(ours), 3),
                "extra_bytes": contestant.extra_bytes,
            }
        )
    return rows


def print_table(rows: list[dict], common: dict) -> None:
    print(f"\n{common['shape']} {common['dtype']} {common['device']} {common['threads']} threads")
    print(f"{'ratio to LayerNorm':24}" + "".join(f"{phase:>26}" for phase in PHASES) + f"{'of least':>10}{'memory':>9}")
    by_name: dict[str, dict[str, dict]] = {}
    for row in rows:
        by_name.setdefault(row["contestant"], {})[row["phase"]] = row
    base = by_name[BASE]["both"]["extra_bytes"]
    for name, phases in by_name.items():
        cells = "".join(
            "{:>12} {:>13}".format(f"{row['ratio']:.3f}", f"({row['ratio_low']:.2f}, {row['ratio_high']:.2f})")
            for row in (phases[phase] for phase in PHASES)
        )
        both = phases["both"]
        print(f"{name:24}{cells}{both['ratio_of_least']:10.3f}{both['extra_bytes'] / base:9.3f}")


def machine() -> dict:
    return {
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
        "machine": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "torch": torch.__version__,
        "pn_fairseq": __version__,
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.norms", description=__doc__.split("\n")[0])
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES), metavar="ROWSxC",
                        choices=[*SHAPES, *LARGE, *ODD], help=f"of {', '.join([*SHAPES, *LARGE, *ODD])}")  # fmt: skip
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"], choices=list(DTYPES))
    parser.add_argument("--threads", nargs="+", type=int, default=[1], help="numbers of threads, on CPU (default: 1)")
    parser.add_argument("--device", default="cpu", help="cpu or cuda (default: cpu)")
    parser.add_argument("--groups", type=int, default=4, help="layer-scale groups of what has +LS (default: 4)")
    parser.add_argument("--padding", type=float, default=0.1, help="share of padding (default: 0.1)")
    parser.add_argument("--rounds", type=int, default=40, help="turns of each contestant (default: 40)")
    parser.add_argument("--only", metavar="PATTERN", help="LayerNorm, and of the others what matches PATTERN")
    parser.add_argument("--csv", type=Path, help="write all figures to this file")
    args = parser.parse_args()
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler, which counts the memory, would talk
    keep_memory()
    device = torch.device(args.device)
    synchronize = torch.cuda.synchronize if device.type == "cuda" else (lambda: None)

    rows = []
    for threads, shape, dtype in itertools.product(args.threads, args.shapes, args.dtypes):
        torch.set_num_threads(threads)
        size = {**SHAPES, **LARGE, **ODD}[shape]
        torch.manual_seed(0)
        groups = args.groups if size[-1] % args.groups == 0 else 1
        found = contestants(size[-1], groups)
        found = found[:1] + [each for each in found[1:] if not args.only or re.search(args.only, each.name)]
        for contestant in found:
            if isinstance(contestant.module, nn.Module):
                contestant.module.to(device, DTYPES[dtype]).train()
        batch = make_batch(size, args.padding, DTYPES[dtype], device)
        take_turns(found, batch, args.rounds, synchronize)
        measure_memory(found, batch, device)
        common = {**machine(), "device": args.device, "threads": threads, "shape": shape, "dtype": dtype}
        new = rows_of(found, common)
        print_table(new, common)
        rows += new
    if args.csv:
        with args.csv.open("w", newline="") as file:
            writer = csv.DictWriter(file, FIELDS)
            writer.writeheader()
            writer.writerows(rows)


if __name__ == "__main__":
    main()
