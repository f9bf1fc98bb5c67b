"""Compiled against eager: every norm, and an encoder of 6 layers with it: ``python -m
benchmarks.compile``.

A norm gets (32, 128, 512) activations, the encoder (``torch.nn.TransformerEncoder``, converted,
pre-norm, 256 channels) 16 sentences of up to 64 tokens; both have a mask with 10% padding. The
eager and the compiled module (``torch.compile`` with ``fullgraph=True``) take turns of one step:
training (forward and backward) or evaluation without gradients. torch's own norms show what the
compiler costs by itself, and an encoder with ``none`` what it costs without norms. The encoder's
activation is GELU: with ReLU, inductor's kernel for it alone makes a step 1.19 times as long (torch
2.13). Printed are medians in milliseconds, and the quartiles of compiled / eager in the same round.
"""

import argparse
import copy
import itertools
from collections.abc import Callable

import pandas
import torch
from torch import nn

from benchmarks import hide_messages, keep_memory
from benchmarks.norms import add_only
from benchmarks.results import in_turns, output_file, positive, quartiles, ratios, write_csv
from pn_fairseq.norms import NORMS, build_norm, convert_norms

SHAPE = (32, 128, 512)
SENTENCES = 16
LENGTH = 64
CHANNELS = 256
LAYERS = 6


#: torch's norms: measured by themselves, without a mask.
TORCH = {"torch.nn.LayerNorm": nn.LayerNorm, "torch.nn.BatchNorm1d": nn.BatchNorm1d}


class Norm(nn.Module):
    """One norm and its batch."""

    def __init__(self, name: str):
        super().__init__()
        self.of_torch = name in TORCH
        if self.of_torch:
            self.norm = TORCH[name](SHAPE[-1])
        else:
            self.norm = build_norm(name, SHAPE[-1])
        self.mask = _padding(SHAPE[1], SHAPE[0])

    def batch(self) -> torch.Tensor:
        return torch.randn(SHAPE)

    def forward(self, x):
        if self.of_torch:
            return self.norm(x.flatten(0, 1)).view(x.shape)
        return self.norm(x, self.mask)


class Encoder(nn.Module):
    """An encoder whose norms are ``name``, with ``options``, and its batch."""

    def __init__(
        self,
        name: str,
        sentences: int = SENTENCES,
        channels: int = CHANNELS,
        layers: int = LAYERS,
        **options,
    ):
        super().__init__()
        layer = nn.TransformerEncoderLayer(
            channels, 4, 4 * channels, 0.0, "gelu", norm_first=True, batch_first=True
        )
        encoder = nn.TransformerEncoder(
            layer, layers, nn.LayerNorm(channels), enable_nested_tensor=False
        )
        if name == "power":
            # most steps of a training are after the warm-up
            options = {"psi_warmup_updates": 0, **options}
        self.encoder = convert_norms(
            encoder, name, mask_from="src_key_padding_mask", layout="BTC", **options
        )
        self.register_buffer("mask", _padding(sentences, LENGTH), persistent=False)
        self.channels = channels

    def batch(self) -> torch.Tensor:
        return torch.randn(*self.mask.shape, self.channels)

    def forward(self, x):
        return self.encoder(x, src_key_padding_mask=self.mask)


def _padding(sentences: int, length: int) -> torch.Tensor:
    """(B, T), True = padding; every fifth sentence is half padding."""
    mask = torch.zeros(sentences, length, dtype=torch.bool)
    mask[::5, length // 2 :] = True
    return mask


MODULES = {"norm": Norm, "encoder": Encoder}


def work(call: Callable, module: nn.Module, training: bool) -> Callable[[int], None]:
    """A function that takes a step, as :func:`.in_turns` calls it."""
    x = module.batch().requires_grad_(training)
    dy = torch.randn_like(x)

    def turn(number: int) -> None:
        if not training:
            with torch.no_grad():
                call(x)
            return
        x.grad = None
        module.zero_grad(set_to_none=True)
        call(x).backward(dy)

    return turn


def main(argv=None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.compile", description=__doc__.split("\n")[0]
    )
    add_only(parser)
    parser.add_argument(
        "--rounds", type=positive, default=20, help="turns of one step (default: 20)"
    )
    parser.add_argument(
        "--threads", type=positive, nargs="+", default=[1, 2], help="(default: 1 2)"
    )
    parser.add_argument(
        "--modules", nargs="+", choices=MODULES, default=list(MODULES), help="(default: both)"
    )
    parser.add_argument(
        "--backend", default="inductor", help="of torch.compile (default: inductor)"
    )
    parser.add_argument("--output", type=output_file, metavar="FILE", help="also write a CSV file")
    args = parser.parse_args(argv)
    keep_memory()
    hide_messages()
    rows = []
    settings = itertools.product(
        filter(args.only.search, (*TORCH, *NORMS)), args.modules, args.threads, (True, False)
    )
    for name, module, threads, training in settings:
        if name in TORCH and module == "encoder":
            continue
        torch.set_num_threads(threads)
        torch._dynamo.reset()
        eager = MODULES[module](name).train(training)
        other = copy.deepcopy(eager)
        compiled = torch.compile(other, fullgraph=True, backend=args.backend)
        turns = {"eager": work(eager, eager, training), "compiled": work(compiled, other, training)}
        seconds = in_turns(turns, args.rounds, warm=5)
        low, middle, high = ratios(seconds["compiled"], seconds["eager"])
        row = {
            "norm": name,
            "module": module,
            "mode": "training" if training else "evaluation",
            "threads": threads,
        }
        row |= {f"{key}_ms": quartiles(own)[1] * 1e3 for key, own in seconds.items()}
        row |= {"ratio": middle, "ratio_low": low, "ratio_high": high}
        rows.append(
            {
                key: f"{value:.4g}" if isinstance(value, float) else value
                for key, value in row.items()
            }
        )
    print(pandas.DataFrame(rows).to_string(index=False))
    if args.output:
        write_csv(
            args.output, [{"rounds": args.rounds, "backend": args.backend, **row} for row in rows]
        )


if __name__ == "__main__":
    main()
