"""``--init-seed`` and ``--attention-init``: how the initial weights of a model are drawn.

fairseq's ``--seed`` determines the initial weights, the order of the batches and dropout. With
``--init-seed`` it determines only the order of the batches and dropout. ``--init-seed N --seed N``
trains the same as ``--seed N``.
"""

import argparse
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from fairseq.utils import safe_getattr
from torch import nn

#: Values of ``--attention-init``.
ATTENTION_INIT = ("fairseq", "torch")


def add_flags(parser: argparse.ArgumentParser, attention: bool = True) -> None:
    """Add the flags; ``attention=False``: the model does not use fairseq's attention."""
    text = (
        "seed of the initial weights; --seed then decides the order of the batches and dropout only"
    )
    parser.add_argument(
        "--init-seed", type=int, metavar="N", help=f"{text} (default: --seed decides all three)"
    )
    if attention:
        text = (
            "initial weights of attention: fairseq's (default), or torch.nn.Linear's, as AdaNorm's "
            "authors advise"
        )
        parser.add_argument("--attention-init", choices=ATTENTION_INIT, help=text)


@contextmanager
def initial_weights(args) -> Iterator[None]:
    """In this block the random numbers of the CPU, from which weights are drawn, follow the setting
    ``init_seed``.

    After the block the random numbers continue as if none had been drawn. Without the setting the
    block changes nothing.
    """
    seed = safe_getattr(args, "init_seed")
    if seed is None:
        yield
        return
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(int(seed))
        yield


def init_attention(cfg, attentions: Iterable[nn.Module]) -> None:
    """Give the projections to queries, keys, values and output the initial weights of
    ``cfg.attention_init``.

    None or "fairseq": they stay as fairseq drew them, Xavier uniform with torch's biases (0 for the
    output). "torch": as in torch.nn.Linear, "Kaiming uniform", between -1/sqrt(inputs) and
    1/sqrt(inputs), also for biases.

    Raises:
        ValueError: the setting has another value.
    """
    given = cfg.attention_init
    if given not in (None, *ATTENTION_INIT):
        raise ValueError(f"attention_init={given!r} must be one of {', '.join(ATTENTION_INIT)}")
    if given != "torch":
        return
    for attention in attentions:
        for linear in (attention.q_proj, attention.k_proj, attention.v_proj, attention.out_proj):
            linear.reset_parameters()
