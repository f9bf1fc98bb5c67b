"""Time, peak memory, kernels and bytes of every norm on a CPU, against LayerNorm: ``python -m
benchmarks.norms``.

All contestants take turns on the same activations, so that other load on the machine affects all of
them. There are two measures of time, both medians over the rounds of the ratio to
``torch.nn.LayerNorm`` in the same round, with the quartiles:

- *turns of several steps*, in a random order that changes in each round; a turn begins with untimed
  steps. The caches hold what the contestant needs. "Of least" is the ratio of the shortest times,
  the steadier measure under other load.
- *turns of one step*: LayerNorm, the contestant, LayerNorm, ..., nothing warmed up in between. The
  caches are cold and Python's overhead counts, as in training, where other layers compute between
  two norms.

A second LayerNorm shows the noise. Beside this project's norms, by implementation of their kernels,
are torch's own norms, batch normalization on gathered tokens, PN's reference under
``torch.compile``, and a lower bound for any norm: a copy forward and an addition backward. Kernels
and bytes are those of :func:`benchmarks.profiling.count`, the same on every machine. On a GPU,
:mod:`benchmarks.gpu` measures norms.
"""

import argparse
import importlib.util
import itertools
import math
import os
import random
import re
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from unittest.mock import patch

import torch
from torch import Tensor, nn

from benchmarks import keep_memory
from benchmarks.profiling import Counts, count, peak_memory
from benchmarks.results import (
    output_file,
    positive,
    quartiles,
    ratios,
    show_round,
    write_csv,
)
from benchmarks.table import draw, draw_sizes, targets, text
from pn_fairseq import kernels
from pn_fairseq.kernels.selection import IMPLEMENTATIONS
from pn_fairseq.norms import NORMS, RunningNorm, build_norm

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

#: Rows x channels: shapes of translation models, and shapes that no vector width divides.
SHAPES = ("4096x512", "4096x1024")
ODD = ("4095x515", "1x512")

#: Time steps of a batch at least, if its number of rows allows.
STEPS = 32

#: Forward reads x and writes y, backward reads x and dy and writes dx; these are multiples of the
#: bytes of x.
PHASES = {"forward": 2, "backward": 3, "both": 5}

#: With --sizes a batch of fewer rows than this has as many times more rounds: each of them is
#: short.
FULL_SIZE = 4096

#: Layer-scale groups of what has +LS, and groups of GN.
GROUPS = 4

BASE = "LayerNorm"
COPY = "copy and add"

#: Rounds at the beginning that are not counted: memory is allocated, code compiled.
WARM = 3

#: Steps at the beginning of a turn that are not timed. With a single one, the caches would still be
#: cold after a large contestant.
UNTIMED = 5

#: Steps that are timed together in a turn.
REPEATS = 3


@dataclass
class Contestant:
    """Something with a forward and a backward.

    Attributes:
        name: as in the tables.
        module: called with activations and a padding mask or None.
        norm: the registered name of the norm; for others what it is.
        layer_scale: its layer-scale groups, 0 without.
        implementation: of the kernels, for registered norms.
        computing: makes the context that it computes in.
        opaque: whether code runs there that is not an operator.
        seconds: of each phase, by round, in turns of several steps.
        single: ratio of a step to LayerNorm's step before it, by round, in turns of one step.
        extra_bytes: peak memory of a step.
        counts: of forward and backward.
    """

    name: str
    module: nn.Module | Callable[[Tensor, Tensor | None], Tensor]
    norm: str
    layer_scale: int = 0
    implementation: str = ""
    computing: Callable[[], AbstractContextManager] = nullcontext
    opaque: bool = False
    seconds: dict[str, list[float]] = field(default_factory=lambda: {phase: [] for phase in PHASES})
    single: list[float] = field(default_factory=list)
    extra_bytes: int = 0
    counts: dict[str, Counts] = field(default_factory=dict)

    def forget(self, x: Tensor) -> None:
        """Free all gradients."""
        x.grad = None
        if isinstance(self.module, nn.Module):
            self.module.zero_grad(set_to_none=True)


class Gathered(nn.Module):
    """``BatchNorm1d``, or another norm of rows, on the real tokens; padding is copied."""

    def __init__(self, channels: int, norm: Callable[[int], nn.Module] = nn.BatchNorm1d):
        super().__init__()
        self.norm = norm(channels)

    def forward(self, x: Tensor, padding_mask: Tensor | None) -> Tensor:
        if padding_mask is None:
            return self.norm(x.flatten(0, 1)).view_as(x)
        real = ~padding_mask.t()
        y = x.clone()
        y[real] = self.norm(x[real])
        return y


class Unmasked(nn.Module):
    """A norm of each token alone, which needs no mask."""

    def __init__(self, norm: nn.Module):
        super().__init__()
        self.norm = norm

    def forward(self, x: Tensor, padding_mask: Tensor | None) -> Tensor:
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


def _compiled(threads: int) -> Callable[[], AbstractContextManager]:
    """Contexts in which PN's two passes over the tokens are those of the reference, each
    compiled by inductor.
    """
    torch._dynamo.reset()
    options = {"cpp.enable_kernel_profile": True, "cpp.threads": threads}
    functions = {
        name: torch.compile(kernels.OPERATORS[name], fullgraph=True, dynamic=False, options=options)
        for name in ("normalize", "gradient")
    }
    return lambda: patch.multiple(kernels, **functions)


def contestants(channels: int, threads: int) -> list[Contestant]:
    """LayerNorm first; norms with running statistics with and without layer-scale.

    There are :data:`GROUPS` layer-scale groups, and as many groups of GN, or the largest number
    that divides both them and the channels.
    """
    found = [
        Contestant(BASE, Unmasked(nn.LayerNorm(channels)), "LayerNorm"),
        Contestant(f"{BASE} again", Unmasked(nn.LayerNorm(channels)), "LayerNorm"),
        Contestant("RMSNorm", Unmasked(nn.RMSNorm(channels)), "RMSNorm"),
        Contestant("BatchNorm1d gathered", Gathered(channels), "BatchNorm1d"),
        Contestant(COPY, lambda x, _: _CopyAndAdd.apply(x), COPY),
    ]
    ways = {}
    for implementation in reversed(kernels.available()):
        if IMPLEMENTATIONS[implementation] in (None, "CPU"):
            ways[implementation] = partial(kernels.using, implementation)
    compiled = _compiled(threads)
    heads = math.gcd(GROUPS, channels)
    for norm, entry in NORMS.items():
        if norm == "layer":
            continue
        own_ways = {**ways, "compiled": compiled} if norm == "power" else ways
        scales = (0, heads) if issubclass(entry.cls, RunningNorm) else (0,)
        for (implementation, computing), scaled in itertools.product(own_ways.items(), scales):
            label = f"{entry.short}{' +LS' if scaled else ''} {implementation}"
            module = build_norm(norm, channels, layer_scale_groups=scaled, groups=heads)
            opaque = implementation == "compiled"
            found.append(Contestant(label, module, norm, scaled, implementation, computing, opaque))
    return found


def time_and_batch(rows: int) -> tuple[int, int]:
    """Factors of ``rows``: the least divisor that is at least ``STEPS``, or ``rows`` itself if
    below, and the rest.
    """
    steps = next(number for number in range(min(STEPS, rows), rows + 1) if rows % number == 0)
    return steps, rows // steps


def make_batch(
    shape: tuple[int, int, int], padding: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Activations that need a gradient, the output's gradient, and a mask with about ``padding`` of
    it at the ends.

    Without padding the mask is None.
    """
    steps, sentences, _ = shape
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(shape, generator=generator, dtype=dtype)
    dy = torch.randn(shape, generator=generator, dtype=dtype)
    mask = None
    if padding:
        shortest = max(round(steps * (1 - 2 * padding)), 1)
        lengths = torch.randint(shortest, steps + 1, (sentences, 1), generator=generator)
        mask = torch.arange(steps) >= lengths
    return x.requires_grad_(), dy, mask


def step(contestant: Contestant, batch, mark: Callable[[], None]) -> None:
    """Forward and backward, with a call of ``mark`` before, between and after."""
    x, dy, mask = batch
    contestant.forget(x)
    mark()
    y = contestant.module(x, mask)
    mark()
    y.backward(dy)
    mark()


def seconds_of_steps(contestant: Contestant, batch) -> list[float]:
    """Mean seconds of forward, backward and both."""
    marks: list[float] = []
    for _ in range(REPEATS):
        step(contestant, batch, lambda: marks.append(time.perf_counter()))
    forward = backward = 0.0
    for first in range(0, len(marks), 3):
        begin, middle, end = marks[first : first + 3]
        forward += (middle - begin) / REPEATS
        backward += (end - middle) / REPEATS
    return [forward, backward, forward + backward]


def take_turns(found: list[Contestant], batch, rounds: int) -> None:
    """Fill in ``seconds``."""
    order = random.Random(0)
    for number in range(rounds + WARM):
        for contestant in order.sample(found, len(found)):
            with contestant.computing():
                for _ in range(UNTIMED):
                    step(contestant, batch, lambda: None)
                taken = seconds_of_steps(contestant, batch)
            contestant.forget(batch[0])
            if number >= WARM:
                for phase, seconds in zip(PHASES, taken, strict=True):
                    contestant.seconds[phase].append(seconds)
        show_round(number, WARM, rounds)
    print(file=sys.stderr)


def alternate(found: list[Contestant], batch, rounds: int) -> None:
    """Fill in ``single``: the first contestant and another take turns step by step."""

    def seconds(contestant: Contestant) -> float:
        contestant.forget(batch[0])
        begin = time.perf_counter()
        step(contestant, batch, lambda: None)
        return time.perf_counter() - begin

    base = found[0]
    base.single = [1.0] * rounds
    for contestant in found[1:]:
        with contestant.computing():
            for number in range(rounds + WARM):
                before = seconds(base)
                ratio = seconds(contestant) / before
                if number >= WARM:
                    contestant.single.append(ratio)
        contestant.forget(batch[0])


def profile_all(found: list[Contestant], batch) -> None:
    """Fill in ``extra_bytes`` and ``counts``."""
    x, dy, mask = batch
    for contestant in found:
        made_of_others = "pn_fairseq" if contestant.implementation == "reference" else None
        counted = partial(count, look_into=made_of_others, opaque=contestant.opaque)
        with contestant.computing():
            contestant.forget(x)
            whole = partial(step, contestant, batch, lambda: None)
            contestant.extra_bytes = peak_memory(whole, torch.device("cpu"))
            contestant.forget(x)
            contestant.counts["forward"] = counted(partial(contestant.module, x, mask))
            y = contestant.module(x, mask)
            contestant.counts["backward"] = counted(partial(y.backward, dy))
            contestant.forget(x)


def _sum(values: Sequence[int | None]) -> int | None:
    if None in values:
        return None
    return sum(values)


def _rounded(column: str, values: Sequence[float]) -> dict[str, float | str]:
    """First quartile, median and third quartile as columns, empty without values."""
    low, middle, high = [round(value, 3) for value in values] or [""] * 3
    return {column: middle, f"{column}_low": low, f"{column}_high": high}


def rows_of(found: list[Contestant], common: dict) -> list[dict]:
    """What was measured of the contestants, the first of which is the base: a row for each of
    them and each phase.
    """
    rows = []
    for phase, contestant in itertools.product(PHASES, found):
        rows.append({**common, **_row_of(contestant, phase, found)})
    return rows


def _row_of(contestant: Contestant, phase: str, found: list[Contestant]) -> dict:
    base = found[0]
    own = contestant.seconds[phase]
    if phase != "both":
        counts = [contestant.counts[phase]]
    else:
        counts = [*contestant.counts.values()]
    extra_ratio = contestant.extra_bytes / base.extra_bytes
    row = {
        "phase": phase,
        "contestant": contestant.name,
        "norm": contestant.norm,
        "layer_scale": contestant.layer_scale,
        "implementation": contestant.implementation,
        "milliseconds": round(1000 * quartiles(own)[1], 5),
    }
    row |= _rounded("ratio", ratios(own, base.seconds[phase]))
    row["ratio_of_least"] = round(min(own) / min(base.seconds[phase]), 3)
    row |= _rounded("ratio_single", quartiles(contestant.single) if phase == "both" else ())
    row["times_reference"] = _times_reference(contestant, phase, found)
    row["copy_bandwidth"] = _copy_bandwidth(contestant, phase, found)
    row["extra_bytes"] = contestant.extra_bytes
    row["extra_ratio"] = round(extra_ratio, 4)
    row["kernels"] = sum(each.kernels for each in counts)
    row["bytes_read"] = _sum([each.bytes_read for each in counts])
    row["bytes_written"] = _sum([each.bytes_written for each in counts])
    return row


def _times_reference(contestant: Contestant, phase: str, found: list[Contestant]) -> float | str:
    """How many times faster than the same norm by the reference; empty for others."""
    key = contestant.norm, contestant.layer_scale
    for other in found:
        if other.implementation == "reference" and (other.norm, other.layer_scale) == key:
            return round(ratios(other.seconds[phase], contestant.seconds[phase])[1], 3)
    return ""


def _copy_bandwidth(contestant: Contestant, phase: str, found: list[Contestant]) -> float | str:
    """The share of a copy's bandwidth that a norm reaches; empty where no copy was measured."""
    copies = [other for other in found if other.name == COPY]
    if not copies:
        return ""
    shares = []
    for copying, own in zip(copies[0].seconds["forward"], contestant.seconds[phase], strict=True):
        shares.append(PHASES[phase] / 2 * copying / own)
    return round(quartiles(shares)[1], 3)


def _able(contestant: Contestant, batch) -> bool:
    """Whether a contestant can run; if not (no compiler, too few tokens), a line on stderr says
    why.
    """
    try:
        with contestant.computing():
            step(contestant, batch, lambda: None)
    except (RuntimeError, ValueError) as error:
        print(f"{contestant.name}: left out: {str(error).strip().splitlines()[0]}", file=sys.stderr)
        return False
    return True


def measure(
    args: argparse.Namespace, threads: int, shape: tuple[int, int], dtype: str, padding: float
) -> list[dict]:
    """Measure all that ``args.only`` allows under one setting."""
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    rows, channels = shape
    found = contestants(channels, threads)
    if args.only is not None:
        named = [each for each in found[1:] if args.only.search(each.name)]
        found = [found[0], *named]
    for contestant in found:
        if isinstance(contestant.module, nn.Module):
            contestant.module.to(DTYPES[dtype]).train()
    batch = make_batch((*time_and_batch(rows), channels), padding, DTYPES[dtype])
    found = [contestant for contestant in found if _able(contestant, batch)]
    if args.sizes:
        rounds = args.rounds * max(1, FULL_SIZE // rows)
    else:
        rounds = args.rounds
    take_turns(found, batch, rounds)
    alternate(found, batch, rounds)
    profile_all(found, batch)
    common = {
        "device": "cpu",
        "threads": threads,
        "shape": f"{rows}x{channels}",
        "dtype": dtype,
        "padding": padding,
        "rounds": rounds,
    }
    return rows_of(found, common)


def _shape(value: str) -> tuple[int, int]:
    if not re.fullmatch(r"[1-9]\d*x[1-9]\d*", value):
        raise argparse.ArgumentTypeError(f"{value!r} is not ROWSxCHANNELS")
    rows, channels = value.split("x")
    return int(rows), int(channels)


def _padding(value: str) -> float:
    try:
        share = float(value)
    except ValueError:
        share = math.nan
    if not 0 <= share <= 0.5:
        raise argparse.ArgumentTypeError(f"{value!r} is not a share between 0 and 0.5")
    return share


def pattern(value: str) -> re.Pattern:
    try:
        return re.compile(value)
    except re.error as error:
        raise argparse.ArgumentTypeError(
            f"{value!r} is not a regular expression: {error}"
        ) from error


def add_only(parser: argparse.ArgumentParser) -> None:
    """The option that selects norms of this project by their names."""
    parser.add_argument(
        "--only",
        type=pattern,
        default=re.compile(""),
        metavar="PATTERN",
        help="the norms in whose registered names this regular expression is found",
    )


def _picture(value: str) -> Path:
    if Path(value).suffix not in (".png", ".pdf", ".svg"):
        raise argparse.ArgumentTypeError(f"{value!r} does not end in .png, .pdf or .svg")
    return output_file(value)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.norms", description=__doc__.split("\n")[0]
    )
    parser.add_argument(
        "--shapes",
        nargs="+",
        type=_shape,
        default=[_shape(shape) for shape in SHAPES],
        metavar="ROWSxC",
        help=f"rows and channels, such as {', '.join(SHAPES + ODD)} (default: {' '.join(SHAPES)})",
    )
    parser.add_argument(
        "--dtypes",
        nargs="+",
        default=["float32", "bfloat16"],
        choices=list(DTYPES),
        help="default: float32 bfloat16",
    )
    parser.add_argument(
        "--threads", nargs="+", type=positive, metavar="N", help="numbers of threads (default: 1)"
    )
    parser.add_argument(
        "--padding",
        nargs="+",
        type=_padding,
        default=[0.1],
        metavar="SHARE",
        help="shares of padding; 0 is no mask at all (default: 0.1)",
    )
    parser.add_argument(
        "--rounds", type=positive, default=40, metavar="N", help="turns of each (default: 40)"
    )
    parser.add_argument(
        "--only",
        type=pattern,
        metavar="PATTERN",
        help="LayerNorm, and of the others those in whose names this regular expression is found",
    )
    parser.add_argument(
        "--targets",
        action="store_true",
        help="measure what this project's targets are about, with 1 and 2 threads, and say which "
        "are reached",
    )
    parser.add_argument(
        "--csv", type=output_file, metavar="FILE", help="write all figures to a CSV file"
    )
    parser.add_argument(
        "--picture", type=_picture, metavar="FILE", help="draw the ratios (.png, .pdf or .svg)"
    )
    parser.add_argument(
        "--sizes",
        type=_picture,
        metavar="FILE",
        help="draw the ratios in turns of one step against the number of rows; with fewer rows "
        f"than {FULL_SIZE} there are more rounds than --rounds",
    )
    args = parser.parse_args(argv)
    if (args.picture or args.sizes) and importlib.util.find_spec("matplotlib") is None:
        parser.error("a picture needs matplotlib, which is not installed")
    if args.targets:
        args.ours = kernels.describe()["CPU"][0]
        about = rf"^(pn( \+LS)? ({args.ours}|reference)|{COPY}|{BASE} again)$"
        args.only = args.only or re.compile(about)
    if args.threads is None:
        both = args.targets and (os.cpu_count() or 1) > 1
        args.threads = [1, 2] if both else [1]
    return args


def main(argv: Sequence[str] | None = None) -> None:
    args = parse(argv)
    keep_memory()
    rows = []
    for setting in itertools.product(args.threads, args.shapes, args.dtypes, args.padding):
        new = measure(args, *setting)
        if not args.targets:
            print(text(new))
        rows += new
    if args.csv:
        write_csv(args.csv, rows)
    if args.picture:
        draw(rows, args.picture)
    if args.sizes:
        draw_sizes(rows, args.sizes)
    if args.targets:
        print(targets(rows, args.ours))


if __name__ == "__main__":
    main()
