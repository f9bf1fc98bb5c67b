"""What a single call of a norm costs on a few tokens, where only the overhead counts: ``python -m
benchmarks.calls``.

x is (2, 2, 512) with a mask of one padding position. torch.nn.LayerNorm and this project's norms
take turns of 200 calls: a training step (forward and backward), and a forward in evaluation without
gradients. Printed are the medians over the rounds in microseconds of this process, which other
processes do not count in, and the ratios to torch.nn.LayerNorm in the same round.
"""

import argparse
import time
from collections.abc import Callable
from functools import partial

import pandas
import torch
from torch import nn

from benchmarks import keep_memory
from benchmarks.norms import Contestant, Unmasked, add_only, step
from benchmarks.results import in_turns, output_file, positive, quartiles, ratios, write_csv
from pn_fairseq.norms import NORMS, build_norm

SHAPE = (2, 2, 512)
CALLS = 200
BASE = "torch.nn.LayerNorm"


def work(mode: str, module: nn.Module) -> Callable[[int], None]:
    """A function that takes one turn of ``module``, as :func:`.in_turns` calls it."""
    x = torch.randn(SHAPE, requires_grad=mode == "training")
    dy = torch.randn(SHAPE)
    mask = torch.tensor([[False, False], [False, True]])
    module.train(mode == "training")

    contestant = Contestant("", module, "")

    def turn(number: int) -> None:
        for _ in range(CALLS):
            if mode == "training":
                step(contestant, (x, dy, mask), lambda: None)
            else:
                with torch.no_grad():
                    module(x, mask)

    return turn


def main(argv=None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.calls", description=__doc__.split("\n")[0]
    )
    add_only(parser)
    parser.add_argument(
        "--rounds", type=positive, default=30, help=f"turns of {CALLS} calls (default: 30)"
    )
    parser.add_argument("--output", type=output_file, metavar="FILE", help="also write a CSV file")
    args = parser.parse_args(argv)
    keep_memory()
    torch.set_num_threads(1)
    makers = {BASE: lambda: Unmasked(nn.LayerNorm(SHAPE[-1]))}
    for name in NORMS:
        if args.only.search(name):
            makers[name] = partial(build_norm, name, SHAPE[-1], groups=1)
    rows = []
    for mode in ("training", "evaluation"):
        turns = {name: work(mode, make()) for name, make in makers.items()}
        seconds = in_turns(turns, args.rounds, warm=2, clock=time.process_time)
        for name, own in seconds.items():
            low, middle, high = ratios(own, seconds[BASE])
            median = quartiles(own)[1]
            measured = {
                "microseconds": median / CALLS * 1e6,
                "least_microseconds": min(own) / CALLS * 1e6,
                "ratio": middle,
                "ratio_low": low,
                "ratio_high": high,
            }
            row = {"norm": name, "mode": mode}
            row |= {key: f"{value:.4g}" for key, value in measured.items()}
            rows.append(row)
    print(pandas.DataFrame(rows).to_string(index=False))
    if args.output:
        write_csv(args.output, [{"rounds": args.rounds, **row} for row in rows])


if __name__ == "__main__":
    main()
