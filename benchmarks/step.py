"""Time of one training step with each norm: ``python -m benchmarks.step``.

Models of one size that differ in the encoder's norm take steps in turn on the same batch, so that whatever else the
machine does meets all of them. Printed are medians: milliseconds a step, and the ratio to LayerNorm of the same round.
"""

import argparse
import platform
import statistics
import sys
import time
from argparse import Namespace
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from fairseq.data import Dictionary
from fairseq.models import ARCH_CONFIG_REGISTRY, ARCH_MODEL_REGISTRY

import pn_fairseq.models  # noqa: F401 (registers the architectures)
from benchmarks import keep_memory
from pn_fairseq.models.architectures import SIZES
from pn_fairseq.norms import NORMS


def make_model(arch: str, vocabulary: int) -> torch.nn.Module:
    dictionary = Dictionary()
    for index in range(vocabulary - len(dictionary)):
        dictionary.add_symbol(f"w{index}")
    args = Namespace(arch=arch, share_all_embeddings=True)
    ARCH_CONFIG_REGISTRY[arch](args)
    task = SimpleNamespace(source_dictionary=dictionary, target_dictionary=dictionary)
    return ARCH_MODEL_REGISTRY[arch].build_model(args, task).train()


def make_batch(sentences: int, length: int, vocabulary: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Source and target tokens with about 10% padding, source padded left and target right, as in fairseq."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(4, vocabulary, (2, sentences, length), generator=generator)
    lengths = length - torch.randint(0, max(1, length // 5), (2, sentences, 1), generator=generator)
    positions = torch.arange(length)
    return tokens[0].masked_fill(positions < length - lengths[0], 1), tokens[1].masked_fill(positions >= lengths[1], 1)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.step", description=__doc__.split("\n")[0])
    parser.add_argument("--size", choices=list(SIZES), default="tiny", help="size of the models (default: tiny)")
    parser.add_argument("--rounds", type=int, default=30, help="steps of each model (default: 30)")
    parser.add_argument("--sentences", type=int, default=64, help="sentences a batch (default: 64)")
    parser.add_argument("--length", type=int, default=32, help="tokens a sentence (default: 32)")
    parser.add_argument("--vocabulary", type=int, default=4000, help="size of the dictionary (default: 4000)")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="threads (default: torch's)")
    args = parser.parse_args()
    keep_memory()
    torch.set_num_threads(args.threads)

    src, tgt = make_batch(args.sentences, args.length, args.vocabulary)
    models, optimizers = {}, {}
    for name, entry in NORMS.items():
        torch.manual_seed(1)
        models[name] = make_model(f"transformer_{entry.short}_{args.size}", args.vocabulary)
        optimizers[name] = torch.optim.Adam(models[name].parameters(), lr=1e-4)

    times = {name: [] for name in models}
    for number in range(args.rounds + 2):
        for name, model in models.items():
            start = time.perf_counter()
            model.set_num_updates(number)
            optimizers[name].zero_grad()
            logits = model(src, None, tgt)[0]
            F.cross_entropy(logits.flatten(0, 1), tgt.flatten(), ignore_index=1).backward()
            optimizers[name].step()
            if number >= 2:  # the first steps allocate
                times[name].append(time.perf_counter() - start)
        print(f"\rround {number + 1} of {args.rounds + 2}", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)

    print(
        f"transformer_*_{args.size}, {args.sentences} x {args.length} tokens, float32, {args.threads} threads, "
        f"torch {torch.__version__}, {platform.machine()}"
    )
    print(f"{'norm':8} {'ms a step':>9}  ratio to layer (lowest quarter, highest quarter)")
    for name, values in times.items():
        ratios = [value / base for value, base in zip(values, times["layer"], strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4)
        print(f"{name:8} {1000 * statistics.median(values):9.1f}  {middle:.3f} ({low:.3f}, {high:.3f})")


if __name__ == "__main__":
    main()
