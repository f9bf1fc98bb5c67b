"""``--init-seed N``: the initial weights of a model follow a seed of their own.

fairseq's ``--seed`` decides the initial weights, the order of the batches and dropout. With ``--init-seed`` it decides
the order of the batches and dropout only. ``--init-seed N --seed N`` is the same training as ``--seed N``.
"""

import argparse
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from fairseq.utils import safe_getattr


def add_init_seed(parser: argparse.ArgumentParser) -> None:
    text = "seed of the initial weights; --seed then decides the order of the batches and dropout only"
    parser.add_argument("--init-seed", type=int, metavar="N", help=f"{text} (default: --seed decides all three)")


@contextmanager
def initial_weights(args) -> Iterator[None]:
    """In this block the random numbers of the CPU, where weights are drawn, follow the setting ``init_seed``.

    After the block they continue as if nothing had been drawn. Without the setting the block changes nothing.
    """
    if (seed := safe_getattr(args, "init_seed")) is None:
        yield
        return
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(int(seed))
        yield
