"""Speed and memory of training with several norms: ``python -m benchmarks.training``.

One trainer of ``fairseq-train`` for each norm (forward, loss, backward, gradient clipping, Adam)
makes updates on the same random batches, all trainers in turn, so that other load on the machine
affects all of them. Printed are medians: target tokens per second, and how many times as many as
with LayerNorm in the same round; and the peak memory of weights, optimizer and updates. The psi
warm-up is over. With several --dtype, every norm is trained in each, and all are compared with
LayerNorm in the first one. The model "fairseq" is fairseq's own transformer of the same size, with
LayerNorm before each sublayer.
"""

import argparse
import tempfile
from functools import partial
from pathlib import Path

import torch
from fairseq import options, tasks
from fairseq.data.language_pair_dataset import collate
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from fairseq.trainer import Trainer

from benchmarks import hide_messages, keep_memory
from benchmarks.models import BASE, DEFAULT, SHORT
from benchmarks.profiling import peak_memory
from benchmarks.results import in_turns, output_file, positive, report_speeds, settings_of
from pn_fairseq.models.architectures import SIZES
from pn_fairseq.models.from_checkpoint import make_dictionary

PRECISIONS = {"float32": (), "bfloat16": ("bf16",), "float16": ("fp16",)}

#: Fairseq's own model, as a name beside those of the norms.
FAIRSEQ = "fairseq"

#: Settings of all trainers.
FLAGS = (
    *"--task translation --source-lang src --target-lang tgt --share-all-embeddings".split(),
    *"--criterion label_smoothed_cross_entropy --label-smoothing 0.1 --dropout 0.3".split(),
    *"--optimizer adam --clip-norm 0.1 --lr 1e-5 --psi-warmup-updates 0".split(),
    *("--adam-betas", "(0.9, 0.98)"),
)

#: Number of different batches, which every trainer sees in turn.
BATCHES = 4


def make_trainer(short: str, dtype: str, args: argparse.Namespace) -> Trainer:
    """The trainer of ``fairseq-train`` for a norm or for fairseq's own model, on generated
    dictionaries.
    """
    arch = f"transformer_{BASE if short == FAIRSEQ else short}_{args.size}"
    with tempfile.TemporaryDirectory() as data:
        dictionary = make_dictionary(args.vocabulary)
        for side in ("src", "tgt"):
            dictionary.save(str(Path(data) / f"dict.{side}.txt"))
        flags = [data, "--arch", arch, *FLAGS, "--max-tokens", str(args.tokens)]
        if args.device == "cpu":
            flags.append("--cpu")
        settings = options.parse_args_and_arch(options.get_training_parser(), flags)
        if short == FAIRSEQ:
            settings.arch = "transformer"  # the sizes are those of the other models
        cfg = convert_namespace_to_omegaconf(settings)
        # Set here, because fairseq accepts the flag --bf16 for TPUs only.
        for name in PRECISIONS[dtype]:
            cfg.common[name] = True
        if dtype == "float16":
            cfg.common.fp16_init_scale = 4  # an overflow would skip part of an update
            cfg.common.fp16_no_flatten_grads = args.device == "cpu"
        task = tasks.setup_task(cfg.task)
    torch.manual_seed(1)
    return Trainer(cfg, task, task.build_model(cfg.model), task.build_criterion(cfg.criterion))


def make_batches(args: argparse.Namespace) -> list[dict]:
    """Batches of at most ``tokens`` a side with about 10% padding, as in batches of sentences of
    similar length.
    """
    generator = torch.Generator().manual_seed(0)

    def draw(length: int) -> torch.Tensor:
        length -= int(torch.randint(0, max(1, length // 5), (), generator=generator))
        tokens = torch.randint(4, args.vocabulary, (length,), generator=generator)
        tokens[-1] = 2
        return tokens

    batches = []
    for _ in range(BATCHES):
        samples = []
        for number in range(max(1, args.tokens // args.length)):
            sides = {"source": draw(args.length), "target": draw(args.length)}
            samples.append({"id": number, **sides})
        batches.append(collate(samples, pad_idx=1, eos_idx=2))
    return batches


def update(trainer: Trainer, batch: dict) -> None:
    if trainer.train_step([batch]) is None:
        raise RuntimeError("an update was skipped: its gradient overflowed")
    if trainer.cuda:
        torch.cuda.synchronize()


def update_by(trainer: Trainer, batches: list[dict], number: int) -> None:
    """An update on one of the batches, as :func:`.in_turns` calls it."""
    update(trainer, batches[number % len(batches)])


def memory_of(short: str, dtype: str, args: argparse.Namespace, batches: list[dict]) -> int:
    """Peak of the bytes of weights, optimizer and updates."""

    def train() -> None:
        trainer = make_trainer(short, dtype, args)
        for batch in batches:
            update(trainer, batch)

    return peak_memory(train, torch.device(args.device))


def parse(argv) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.training", description=__doc__.split("\n")[0]
    )
    parser.add_argument(
        "--size", choices=list(SIZES), default="iwslt", help="size of the models (default: iwslt)"
    )
    norms = [FAIRSEQ, *DEFAULT]
    parser.add_argument(
        "--norms",
        nargs="+",
        choices=[FAIRSEQ, *SHORT],
        default=norms,
        help=f"default: {' '.join(norms)}",
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--dtype", choices=list(PRECISIONS), nargs="+", default=["float32"])
    parser.add_argument(
        "--tokens", type=int, help="tokens a batch and side (default: 4096, or 1024 on a CPU)"
    )
    parser.add_argument(
        "--length", type=int, default=32, help="tokens of the longest sentence (default: 32)"
    )
    parser.add_argument(
        "--vocabulary", type=int, default=10000, help="size of the dictionary (default: 10000)"
    )
    parser.add_argument(
        "--rounds", type=positive, help="measured updates of each (default: 100, or 10 on a CPU)"
    )
    parser.add_argument(
        "--threads", type=int, default=torch.get_num_threads(), help="threads (default: torch's)"
    )
    parser.add_argument(
        "--no-memory", action="store_true", help="leave out the measurement of memory"
    )
    parser.add_argument("--output", type=output_file, metavar="FILE", help="also write a CSV file")
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

    names = {}
    for dtype in args.dtype:
        for short in [BASE, *args.norms]:
            if dtype == args.dtype[0]:
                name = short
            else:
                name = f"{short} {dtype}"
            names[name] = short, dtype
    memory = {}
    if not args.no_memory:
        for name, each in names.items():
            memory[name] = memory_of(*each, args, batches)
    work = {}
    for name, each in names.items():
        work[name] = partial(update_by, make_trainer(*each, args), batches)
    # each shape once; the first makes the optimizer's state
    warm = BATCHES if args.device == "cuda" else 1
    seconds = in_turns(work, args.rounds, warm)
    tokens = [batches[(number + warm) % BATCHES]["ntokens"] for number in range(args.rounds)]
    more = {}
    for name, (_, dtype) in names.items():
        more[name] = {"dtype": dtype, "memory_mb": None, "memory_times": None}
        if name in memory:
            more[name]["memory_mb"] = memory[name] / 1e6
            more[name]["memory_times"] = memory[name] / memory[BASE]
    print(
        f"transformer_*_{args.size}, {args.tokens} tokens a batch, {args.device}, {args.threads} "
        f"threads, torch {torch.__version__}"
    )
    report_speeds("tokens", tokens, seconds, BASE, settings_of(args), more, args.output)


if __name__ == "__main__":
    main()
