"""Speed and memory of training with several norms: ``python -m benchmarks.training``.

One trainer of ``fairseq-train`` for each norm (forward, loss, backward, gradient clipping, Adam) makes updates on the
same random batches, all trainers in turn, so that other load on the machine affects all of them. Printed are
medians: target tokens per second, and how many times as many as with LayerNorm in the same round; and the peak memory
of weights, optimizer and updates. The psi warm-up is over.
"""

import argparse
import json
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from fairseq import options, tasks
from fairseq.data.language_pair_dataset import collate
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from fairseq.trainer import Trainer

from benchmarks import hide_messages, keep_memory
from benchmarks.models import make_dictionary
from benchmarks.results import quartiles, ratios, write_csv
from pn_fairseq.models.architectures import SIZES
from pn_fairseq.norms import NORMS

#: The norm that the others are compared with.
BASE = "ln"

#: The norms of the paper.
DEFAULT = [BASE, "bn", "pnv", "pn"]

SHORT = [entry.short for entry in NORMS.values()]

PRECISIONS = {"float32": (), "bfloat16": ("bf16",), "float16": ("fp16",)}

#: Number of different batches, which every trainer sees in turn.
BATCHES = 4


def make_trainer(arch: str, args: argparse.Namespace) -> Trainer:
    """The trainer of ``fairseq-train``, on generated dictionaries."""
    with tempfile.TemporaryDirectory() as data:
        dictionary = make_dictionary(args.vocabulary)
        for side in ("src", "tgt"):
            dictionary.save(str(Path(data) / f"dict.{side}.txt"))
        flags = [
            *(data, "--task", "translation", "--source-lang", "src", "--target-lang", "tgt", "--arch", arch),
            *("--share-all-embeddings", "--optimizer", "adam", "--adam-betas", "(0.9, 0.98)", "--clip-norm", "0.1"),
            *("--lr", "1e-5", "--criterion", "label_smoothed_cross_entropy", "--label-smoothing", "0.1"),
            *("--dropout", "0.3", "--psi-warmup-updates", "0", "--max-tokens", str(args.tokens)),
            *(["--cpu"] if args.device == "cpu" else []),
        ]
        cfg = convert_namespace_to_omegaconf(options.parse_args_and_arch(options.get_training_parser(), flags))
        # Set here, because fairseq accepts the flag --bf16 for TPUs only.
        for name in PRECISIONS[args.dtype]:
            cfg.common[name] = True
        if args.dtype == "float16":
            cfg.common.fp16_init_scale = 4  # an overflow would skip part of an update
            cfg.common.fp16_no_flatten_grads = args.device == "cpu"
        task = tasks.setup_task(cfg.task)
    torch.manual_seed(1)
    return Trainer(cfg, task, task.build_model(cfg.model), task.build_criterion(cfg.criterion))


def make_batches(args: argparse.Namespace) -> list[dict]:
    """Batches of at most ``tokens`` a side with about 10% padding, as in batches of sentences of similar length."""
    generator = torch.Generator().manual_seed(0)

    def draw(length: int) -> torch.Tensor:
        length -= int(torch.randint(0, max(1, length // 5), (), generator=generator))
        tokens = torch.randint(4, args.vocabulary, (length,), generator=generator)
        tokens[-1] = 2
        return tokens

    sentences = max(1, args.tokens // args.length)
    return [
        collate(
            [{"id": n, "source": draw(args.length), "target": draw(args.length)} for n in range(sentences)],
            pad_idx=1,
            eos_idx=2,
        )
        for _ in range(BATCHES)
    ]


def update(trainer: Trainer, batch: dict) -> None:
    if trainer.train_step([batch]) is None:
        raise RuntimeError("an update was skipped: its gradient overflowed")
    if trainer.cuda:
        torch.cuda.synchronize()


def resident(what: str) -> int:
    """Memory of this process in bytes: ``VmRSS``, now, or ``VmHWM``, the peak.

    ``getrusage`` would include the peak of the parent process.
    """
    status = Path("/proc/self/status").read_text("utf-8")
    return int(re.search(rf"^{what}:\s+(\d+) kB", status, re.M)[1]) * 1024


def memory_on_cpu(short: str, argv: list[str]) -> int:
    """Bytes that a few updates need in a new process, less what it uses before the model is built."""
    command = [sys.executable, "-m", "benchmarks.training", *argv, "--memory-of", short]
    result = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).resolve().parent.parent)
    if result.returncode:
        raise RuntimeError(result.stderr)
    return json.loads(result.stdout.splitlines()[-1])


def parse(argv) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.training", description=__doc__.split("\n")[0])
    parser.add_argument("--size", choices=list(SIZES), default="iwslt", help="size of the models (default: iwslt)")
    parser.add_argument("--norms", nargs="+", choices=SHORT, default=DEFAULT, help=f"default: {' '.join(DEFAULT)}")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--dtype", choices=list(PRECISIONS), default="float32")
    parser.add_argument("--tokens", type=int, help="tokens a batch and side (default: 4096, or 1024 on a CPU)")
    parser.add_argument("--length", type=int, default=32, help="tokens of the longest sentence (default: 32)")
    parser.add_argument("--vocabulary", type=int, default=10000, help="size of the dictionary (default: 10000)")
    parser.add_argument("--rounds", type=int, help="measured updates of each (default: 100, or 10 on a CPU)")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="threads (default: torch's)")
    parser.add_argument("--no-memory", action="store_true", help="on a CPU, leave out the measurement of memory")
    parser.add_argument("--output", metavar="FILE", help="also write a CSV file")
    parser.add_argument("--memory-of", choices=SHORT, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    args.tokens = args.tokens or (1024 if args.device == "cpu" else 4096)
    args.rounds = args.rounds or (10 if args.device == "cpu" else 100)
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch sees no GPU")
    return args


def main(argv=None) -> None:
    args = parse(argv)
    keep_memory()
    hide_messages()
    torch.set_num_threads(args.threads)
    batches = make_batches(args)

    if args.memory_of:
        Path("/proc/self/clear_refs").write_text("5", "utf-8")  # forget the peak of the imports
        before = resident("VmRSS")
        trainer = make_trainer(f"transformer_{args.memory_of}_{args.size}", args)
        for batch in batches:
            update(trainer, batch)
        print(json.dumps(resident("VmHWM") - before))
        return

    trainers, memory = {}, {}
    names = list(dict.fromkeys([BASE, *args.norms]))
    for short in names:
        held = torch.cuda.memory_allocated() if args.device == "cuda" else 0
        trainers[short] = make_trainer(f"transformer_{short}_{args.size}", args)
        update(trainers[short], batches[0])  # makes the optimizer's state
        if args.device == "cuda":
            memory[short] = torch.cuda.memory_allocated() - held
        elif not args.no_memory:
            memory[short] = memory_on_cpu(short, sys.argv[1:] if argv is None else argv)

    seconds = {short: [] for short in names}
    extra = dict.fromkeys(names, 0)
    warm = BATCHES if args.device == "cuda" else 1  # each shape once
    for number in range(args.rounds + warm):
        batch = batches[number % BATCHES]
        for short in names[number % len(names) :] + names[: number % len(names)]:
            if args.device == "cuda":
                torch.cuda.reset_peak_memory_stats()
                held = torch.cuda.memory_allocated()
            start = time.perf_counter()
            update(trainers[short], batch)
            if number >= warm:
                seconds[short].append(time.perf_counter() - start)
            if args.device == "cuda":
                extra[short] = max(extra[short], torch.cuda.max_memory_allocated() - held)
        print(f"\rround {number + 1} of {args.rounds + warm}", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    memory = {short: value + extra[short] for short, value in memory.items()}

    tokens = [batches[(number + warm) % BATCHES]["ntokens"] for number in range(args.rounds)]
    print(
        f"transformer_*_{args.size}, {args.tokens} tokens a batch, {args.dtype}, {args.device}, {args.threads} "
        f"threads, torch {torch.__version__}"
    )
    print(f"{'norm':6} {'tokens/s':>10}  times {BASE} (first quartile, third quartile)  peak memory, times {BASE}")
    rows = []
    for short in names:
        speed = quartiles([count / taken for count, taken in zip(tokens, seconds[short], strict=True)])[1]
        low, middle, high = ratios(seconds[BASE], seconds[short])  # of speeds: the inverse of times
        row = {"tokens_per_s": speed, f"times_{BASE}": middle, "times_low": low, "times_high": high}
        line = f"{short:6} {speed:10.0f}  {middle:.3f} ({low:.3f}, {high:.3f})"
        row["memory_mb"] = row["memory_times"] = None
        if memory:
            row["memory_mb"], row["memory_times"] = memory[short] / 1e6, memory[short] / memory[BASE]
            line += f"  {row['memory_mb']:.0f} MB, {row['memory_times']:.3f}"
        print(line)
        settings = {
            key: value for key, value in vars(args).items() if key not in ("output", "memory_of", "no_memory", "norms")
        }
        rows.append({"norm": short, **settings, **{k: None if v is None else f"{v:.4g}" for k, v in row.items()}})
    if args.output:
        write_csv(args.output, rows)


if __name__ == "__main__":
    main()
