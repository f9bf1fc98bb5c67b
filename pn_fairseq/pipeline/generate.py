"""``pn generate``: translate a subset with one fairseq-generate for each GPU, or several on the
CPU.

Each of N processes decodes every N-th batch of the same batches, so the result does not depend on
N. The hypotheses are merged by sentence number and counted; the output folder is replaced as a
whole.
"""

import argparse
import math
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from pathlib import Path

import numpy as np

from pn_fairseq.common.command import ArgumentParser, UserError, say, say_next, whole, why_it_failed
from pn_fairseq.common.files import PACKAGE, atomic_folder, only_writer, write_lines, write_settings
from pn_fairseq.common.machine import own_cores
from pn_fairseq.pipeline import RUN_HELP, SUBSET_HELP, add_norm_module, stamp
from pn_fairseq.pipeline.data.binarize import HEADER
from pn_fairseq.pipeline.data.binarize import sentences as sentences_in
from pn_fairseq.pipeline.data.parallel import progress
from pn_fairseq.pipeline.launch import processes
from pn_fairseq.pipeline.runs import Run, open_run

#: Search settings that neither the command line nor the run's configuration specifies.
SEARCH = {"beam": 5, "lenpen": 1.0, "max_len_a": 0, "max_len_b": 200}

EPILOG = """\
Decodes on all visible GPUs (CUDA_VISIBLE_DEVICES=0,1 selects some), one process on each, or else on
the CPU. Fails unless every sentence gets a hypothesis. Does nothing if the output was made from
these checkpoints and this data with these settings.
"""


def add_decoding_options(parser: ArgumentParser) -> None:
    """The options that pn generate and pn translate share."""
    add = parser.add_argument
    averaged = (
        "default DIR/checkpoints/averaged.pt (written by pn average); several form an ensemble"
    )
    add("--run", type=Path, required=True, metavar="DIR", help=RUN_HELP)
    add("--checkpoint", type=Path, nargs="+", metavar="FILE", help=averaged)
    add(
        "--beam",
        type=whole,
        metavar="N",
        help="beam size (this and the next three default to the run's settings)",
    )
    add("--lenpen", type=float, metavar="X", help="length penalty")
    add(
        "--max-len-a",
        type=float,
        metavar="A",
        help="at most A x (length of the source) + B subwords per hypothesis",
    )
    add("--max-len-b", type=whole, metavar="B", help="B in --max-len-a")
    add(
        "--batch-size",
        type=whole,
        default=128,
        metavar="N",
        help="at most N sentences per batch (default 128)",
    )
    tokens = (
        "at most N source tokens per batch, padding included (default 8000); lower it if memory "
        "runs out"
    )
    add("--max-tokens", type=whole, default=8000, metavar="N", help=tokens)
    half = "decode in half precision, which needs a GPU (default: as the run was trained)"
    add("--fp16", action=argparse.BooleanOptionalAction, help=half)
    add_norm_module(parser)


def _parser() -> ArgumentParser:
    description = "Translate a subset of the data that a model was trained on."
    parser = ArgumentParser(prog="pn generate", description=description, epilog=EPILOG)
    add_decoding_options(parser)
    parser.add_argument(
        "--ranks", type=whole, metavar="N", help="processes (default: one per visible GPU, or one)"
    )
    parser.add_argument("--subset", default="test", metavar="NAME", help=SUBSET_HELP)
    parser.add_argument(
        "--nbest", type=whole, default=1, metavar="N", help="also write the N best to nbest.tok"
    )
    output = (
        "default DIR/generate/SUBSET; the folder for hyp.tok (one hypothesis per line, in the "
        "order of the text), "
    )
    output += "ref.tok, src.tok and generate.log, the output of fairseq"
    parser.add_argument("--output", type=Path, metavar="DIR", help=output)
    return parser


class Decoding:
    """The model and the decoding settings, as command-line options of fairseq.

    Raises:
        UserError: a checkpoint is missing, or an option does not fit.
    """

    def __init__(self, args: argparse.Namespace, run: Run):
        self.checkpoints = run.checkpoint_files(args.checkpoint)
        for path in (*self.checkpoints, run.bin):
            if ":" in str(path):
                raise UserError(
                    f"'{path}' has a colon, at which fairseq splits paths; use another path"
                )
        self.text = run.settings_of_data()
        given = {name: getattr(args, name) for name in SEARCH if getattr(args, name) is not None}
        self.search = {
            name: given.get(name, run.get(f"generation.{name}", value))
            for name, value in SEARCH.items()
        }
        self.search["lenpen"] = float(self.search["lenpen"])
        self.max_tokens = args.max_tokens
        self.max_positions = {side: positions(run, side) for side in ("source", "target")}
        self.gpus = visible_gpus()
        if args.fp16 and not self.gpus:
            raise UserError("--fp16 needs a GPU")
        self.fp16 = bool(self.gpus) and bool(
            run.get("common.fp16", False) if args.fp16 is None else args.fp16
        )
        self.options = [
            *("--user-dir", str(PACKAGE), "--path", ":".join(map(str, self.checkpoints))),
            *("--source-lang", self.text.source, "--target-lang", self.text.target),
            *(
                text
                for name, value in self.search.items()
                for text in (f"--{name.replace('_', '-')}", str(value))
            ),
            *("--remove-bpe", self.text.segmentation.replace("-", "_")),
            *("--max-tokens", str(args.max_tokens), "--batch-size", str(args.batch_size)),
            # With its default of 8, fairseq silently drops the last batch unless it has a multiple
            # of 8 sentences.
            *("--required-batch-size-multiple", "1", "--num-workers", "0", "--log-format", "none"),
            *(["--fp16"] if self.fp16 else []),
            *(
                ["--model-overrides", repr({"norm_module": args.norm_module})]
                if args.norm_module
                else []
            ),
        ]

    def too_long(self, lines: Sequence[str]) -> dict[int, str]:
        """Number of each line of subwords that the model cannot take -> why;

        fairseq would translate nothing.
        """
        limits = self.max_positions["source"], self.max_tokens
        most = min(limits) - 1  # the end of the sentence is a subword
        reason = "the model takes" if limits[0] <= limits[1] else "--max-tokens allows"
        counts = {number: len(line.split()) for number, line in enumerate(lines, 1)}
        return {
            n: f"{count:,} subwords, and {reason} {most:,}"
            for n, count in counts.items()
            if count > most
        }

    def at_limit(self, log: Iterable[str], lengths: Mapping[int, int]) -> list[int]:
        """The numbers of the sentences, from 0, whose best hypothesis has as many subwords as it
        may have.

        Args:
            log: of fairseq, whose lines P- have a score for each subword and for the end of the
                sentence. lengths: of the sources, with their ends.
        """
        a, b, most = (
            self.search["max_len_a"],
            self.search["max_len_b"],
            self.max_positions["target"] - 1,
        )
        scores = {
            sentence: len(fields[0][0].split()) for sentence, fields in _printed(log, "P").items()
        }
        return [
            n
            for n, count in sorted(scores.items())
            if count - 1 >= min(int(a * lengths.get(n, 0) + b), most)
        ]

    def run(
        self, verb: str, commands: Sequence[list[str]], sentences: int, kept: Path
    ) -> list[str]:
        """The lines that ``python -m COMMAND`` prints, for all commands; they run at once, one on
        each GPU.

        Raises:
            UserError: a command failed: the others are ended, and what it wrote to stderr is in the
                file ``kept``.
        """
        printed, translated = [[] for _ in commands], [0] * len(commands)

        def read(shard: int, process: subprocess.Popen) -> int:
            with process:
                for line in process.stdout:
                    printed[shard].append(line.decode("utf-8").removesuffix("\n"))
                    translated[shard] += line.startswith(b"S-")
            return process.returncode

        threads = str(max(1, own_cores() // len(commands)))
        environment = {"OMP_NUM_THREADS": threads, **os.environ, "PYTHONUTF8": "1"}
        started, running = [], set()
        bar = progress(total=sentences, desc=verb, unit="sentence")
        with (
            bar,
            ThreadPoolExecutor(len(commands)) as pool,
            tempfile.NamedTemporaryFile() as errors,
        ):
            try:
                for shard, command in enumerate(commands):
                    if self.gpus:
                        environment["CUDA_VISIBLE_DEVICES"] = self.gpus[shard]
                    # A pipe, so that the processes end when this one is killed.
                    pipes = {
                        "stdin": subprocess.DEVNULL,
                        "stdout": subprocess.PIPE,
                        "stderr": errors,
                    }
                    started.append(
                        subprocess.Popen([sys.executable, "-m", *command], env=environment, **pipes)
                    )
                    running.add(pool.submit(read, shard, started[-1]))
                while running:
                    # A batch is printed at once: counted line by line, its first sentence would
                    # take all its time.
                    ended, running = wait(running, timeout=1, return_when=FIRST_COMPLETED)
                    bar.update(sum(translated) - bar.n)
                    for result in ended:
                        if code := result.result():
                            raise UserError(
                                _reason(
                                    code, Path(errors.name).read_bytes(), kept, self.checkpoints
                                )
                            )
            finally:
                for process in started:
                    process.kill()
        return [line for lines in printed for line in lines]


def positions(run: Run, side: str) -> int:
    """The most subwords that a model takes on a side, the end of the sentence included."""
    given = [run.get(f"{section}.max_{side}_positions") for section in ("model", "task")]
    return min((int(limit) for limit in given if limit), default=1024)  # fairseq's default


def visible_gpus() -> list[str]:
    """The names of the GPUs, as in CUDA_VISIBLE_DEVICES."""
    import torch

    count = torch.cuda.device_count()
    names = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(count)))
    return names.split(",")[:count]


def main(argv: list[str] | None = None) -> int:
    args = _parser().parse_args(argv)
    run = open_run(args.run, same_data=True)
    decoding = Decoding(args, run)
    if args.nbest > decoding.search["beam"]:
        raise UserError(
            f"--nbest {args.nbest} is larger than the beam of {decoding.search['beam']}"
        )
    files = {"src.tok": decoding.text.source, "ref.tok": decoding.text.target}
    texts = {
        name: run.data / f"tok/{args.subset}.{lang}" for name, lang in files.items() if run.data
    }
    bins = sorted(
        path for pattern in (f"{args.subset}.*", "dict.*") for path in run.bin.glob(pattern)
    )
    indices = (path for path in bins if path.name.endswith(f".{decoding.text.source}.idx"))
    index = next(indices, None)
    if "/" in args.subset or index is None or not all(path.is_file() for path in texts.values()):
        indices = run.bin.glob(f"*.{decoding.text.source}.idx")
        names = ", ".join(sorted(path.name.partition(".")[0] for path in indices))
        advice = f"it has {names} (pn prepare text --test NAME adds one)"
        raise UserError(f"'{run.data or run.bin}' has no subset '{args.subset}'; {advice}")
    settings = {"subset": args.subset, **decoding.search}
    settings |= {"nbest": args.nbest} if args.nbest > 1 else {}
    settings |= {"fp16": int(args.fp16)} if args.fp16 is not None else {}
    data = [*([run.data / "settings.txt"] if run.data else []), *bins, *texts.values()]
    wanted = stamp.made_from(settings, {"checkpoint": decoding.checkpoints, "data": data})
    output = (args.output or args.run / "generate" / args.subset).resolve()
    made = output / "made.txt"
    if stamp.done("generate", made, wanted, output / "hyp.tok"):
        return 0
    if output.exists() and not made.is_file() and (not output.is_dir() or any(output.iterdir())):
        raise UserError(
            f"refusing to overwrite '{output}', which has other files; choose another --output"
        )

    sentences = sentences_in(index)
    # There are at least as many batches as sentences / batch size; fairseq-generate divides by zero
    # without a batch.
    shards = min(
        processes(args.ranks, len(decoding.gpus)), max(1, math.ceil(sentences / args.batch_size))
    )
    names, device = " + ".join(map(str, decoding.checkpoints)), "GPUs" if decoding.gpus else "CPU"
    how = f"beam {decoding.search['beam']}, length penalty {decoding.search['lenpen']:g}"
    how += f", {'fp16' if decoding.fp16 else 'fp32'}, processes on the {device}: {shards}"
    say("generate", f"decoding {args.subset} with {names} ({how})")
    common = ["fairseq_cli.generate", str(run.bin), "--gen-subset", args.subset, *decoding.options]
    # --num-shards and --shard-id are accepted and not read: every process would decode everything.
    common += [
        "--nbest",
        str(args.nbest),
        "--distributed-world-size",
        str(shards),
        "--distributed-rank",
    ]
    kept = output.with_name(f"{output.name}.err")
    with only_writer(output), atomic_folder(output) as partial:
        commands = [[*common, str(shard)] for shard in range(shards)]
        log = decoding.run("generate", commands, sentences, kept)
        best = hypotheses(log, sentences, args.nbest)
        write_lines(partial / "hyp.tok", (options[0][1] for options in best))
        if args.nbest > 1:
            lines = (
                f"{n}\t{score}\t{text}"
                for n, options in enumerate(best, 1)
                for score, text in options
            )
            write_lines(partial / "nbest.tok", lines)
        for name, kind in (("src.tok", "S"), ("ref.tok", "T")):
            if texts:
                shutil.copyfile(texts[name], partial / name)
            else:
                write_lines(partial / name, texts_of(log, kind, sentences))
        write_lines(partial / "generate.log", log)
        write_settings(partial / "made.txt", {**wanted, "fp16": int(decoding.fp16)})
    kept.unlink(missing_ok=True)
    lengths = dict(enumerate(np.fromfile(index, np.int32, sentences, offset=HEADER).tolist()))
    if cut := decoding.at_limit(log, lengths):
        options = (
            f"--max-len-b {decoding.search['max_len_b']}, --max-len-a "
            f"{decoding.search['max_len_a']}"
        )
        first = f"the first in line {cut[0] + 1}"
        say(
            "generate",
            f"note: {len(cut)} of {sentences} hypotheses are as long as they may be ({options}), "
            f"{first}",
        )
    say("generate", f"{output / 'hyp.tok'} has {sentences} hypotheses")
    subset = ["--subset", args.subset] if args.subset != "test" else []
    say_next(
        "generate",
        "score",
        "--run",
        args.run,
        *subset,
        *(["--output", output] if args.output else []),
    )
    return 0


def _reason(code: int, errors: bytes, kept: Path, checkpoints: Sequence[Path]) -> str:
    """Why a process failed; what it wrote to stderr is kept."""
    lines = errors.decode("utf-8", "replace").strip().splitlines()
    for line in reversed(lines):
        if mistake := re.match(r"fairseq-\w+: error: (.*)", line):
            names = f"{' + '.join(map(str, checkpoints))}: "
            # a line of fairseq_patches may name the file already
            return names + mistake[1].removeprefix(names)
    exceptions = [line for line in lines if re.match(r"[\w.]+(Error|Exception)\b", line)]
    reason = why_it_failed(code, exceptions or lines)
    if "out of memory" in reason:
        reason += " - smaller batches need less (--batch-size, --max-tokens)"
    kept.write_bytes(errors)
    return f"fairseq failed: {reason} (its whole output is in {kept})"


def _printed(lines: Iterable[str], kind: str) -> dict[int, list[list[str]]]:
    """Sentence number -> the fields of each of its lines of one kind (S, T, H) in fairseq's
    output.
    """
    printed: dict[int, list[list[str]]] = {}
    for line in lines:
        if line.startswith(f"{kind}-"):
            name, *fields = line.split("\t", 2 if kind == "H" else 1)
            printed.setdefault(int(name[2:]), []).append(fields)
    return printed


def texts_of(lines: Iterable[str], kind: str, sentences: int) -> list[str]:
    """The sources (S) or references (T) of all sentences, in the order of the text."""
    texts = _printed(lines, kind)
    return [texts[sentence][0][0] for sentence in range(sentences)]


def hypotheses(lines: Iterable[str], sentences: int, nbest: int = 1) -> list[list[list[str]]]:
    """Score and text of the best hypotheses of every sentence, in the order of the text.

    Raises:
        UserError: a sentence has no hypothesis, or more than ``nbest``; the message names the first
            one.
    """
    options = _printed(lines, "H")
    if options.keys() != set(range(sentences)) or any(
        len(texts) > nbest for texts in options.values()
    ):
        missing = next(
            (sentence + 1 for sentence in range(sentences) if sentence not in options), None
        )
        first = f"; the first sentence without one is in line {missing}" if missing else ""
        came_out = (
            f"{sum(map(len, options.values()))} hypotheses of {len(options)} sentences came "
            f"out{first}"
        )
        raise UserError(f"{sentences} sentences went in and {came_out}")
    return [options[sentence] for sentence in range(sentences)]
