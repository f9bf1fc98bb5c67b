"""``pn generate``: translate a subset with one fairseq-generate for each GPU, or several on the
CPU.

Each of N processes decodes every N-th batch of the same batches, so the result does not depend on
N. The hypotheses are merged by sentence number and counted; the output folder is replaced as a
whole.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import math
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path

from pn_fairseq.common.command import (
    ArgumentParser,
    NothingSaved,
    UserError,
    say,
    say_next,
    whole,
    why_it_failed,
)
from pn_fairseq.common.files import PACKAGE, atomic_folder, only_writer, write_lines, write_settings
from pn_fairseq.pipeline import RUN_HELP, SUBSET_HELP, add_norm_module, outdated, programs, stamp
from pn_fairseq.pipeline.data.binarize import lengths
from pn_fairseq.pipeline.data.binarize import sentences as sentences_in
from pn_fairseq.pipeline.data.parallel import progress
from pn_fairseq.pipeline.data.settings import Settings
from pn_fairseq.pipeline.launch import processes
from pn_fairseq.pipeline.machine import own_cores
from pn_fairseq.pipeline.runs import Run, check_translates, open_run

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
        "order of the text), ref.tok, src.tok and generate.log, the output of fairseq"
    )
    parser.add_argument("--output", type=Path, metavar="DIR", help=output)
    return parser


class Decoding:
    """The model and the decoding settings, as command-line options of fairseq.

    Raises:
        UserError: a checkpoint is missing, or an option does not fit.
    """

    def __init__(self, args: argparse.Namespace, run: Run, step: str):
        self.checkpoints = run.checkpoint_files(args.checkpoint, step)
        for path in (*self.checkpoints, run.bin):
            if ":" in str(path):
                raise UserError(
                    f"'{path}' has a colon, at which fairseq splits paths; use another path"
                )
        self.text = run.settings_of_data()
        self.search = {}
        for name, default in SEARCH.items():
            given = getattr(args, name)
            self.search[name] = run.get(f"generation.{name}", default) if given is None else given
        self.search["lenpen"] = float(self.search["lenpen"])
        self.max_tokens = args.max_tokens
        self.max_positions = {side: positions(run, side) for side in ("source", "target")}
        self.gpus = visible_gpus()
        if args.fp16 and not self.gpus:
            raise UserError("--fp16 needs a GPU")
        wanted = run.get("common.fp16", False) if args.fp16 is None else args.fp16
        self.fp16 = bool(self.gpus and wanted)
        self.options = self._options(args)

    def _options(self, args: argparse.Namespace) -> list[str]:
        options = ["--user-dir", str(PACKAGE), "--path", ":".join(map(str, self.checkpoints))]
        options += ["--source-lang", self.text.source, "--target-lang", self.text.target]
        for name, value in self.search.items():
            options += [f"--{name.replace('_', '-')}", str(value)]
        options += ["--remove-bpe", self.text.segmentation.replace("-", "_")]
        options += ["--max-tokens", str(args.max_tokens), "--batch-size", str(args.batch_size)]
        # With its default of 8, fairseq silently drops the last batch unless it contains a multiple
        # of 8 sentences.
        options += ["--required-batch-size-multiple", "1"]
        options += ["--num-workers", "0", "--log-format", "none"]
        if self.fp16:
            options.append("--fp16")
        if args.norm_module:
            options += ["--model-overrides", repr({"norm_module": args.norm_module})]
        return options

    def too_long(self, lines: Sequence[str]) -> dict[int, str]:
        """Number of each line of subwords that is too long for the model -> why; with such a line
        fairseq would translate nothing.
        """
        positions = self.max_positions["source"]
        reason = "the model takes" if positions <= self.max_tokens else "--max-tokens allows"
        most = min(positions, self.max_tokens) - 1  # the end of the sentence is a subword
        reasons = {}
        for number, line in enumerate(lines, 1):
            count = len(line.split())
            if count > most:
                reasons[number] = f"{count:,} subwords, and {reason} {most:,}"
        return reasons

    def at_limit(self, log: Iterable[str], lengths: Sequence[int]) -> list[int]:
        """The numbers, from 0, of the sentences whose best hypothesis is as long as allowed.

        Args:
            log: fairseq's log, whose lines P- contain a score for each subword and for the end of
                the sentence.
            lengths: lengths of the sources, with their ends.
        """
        a, b = self.search["max_len_a"], self.search["max_len_b"]
        positions = self.max_positions["target"] - 1
        cut = []
        for sentence, fields in sorted(_printed(log, "P").items()):
            subwords = len(fields[0][0].split()) - 1
            if subwords >= min(int(a * lengths[sentence] + b), positions):
                cut.append(sentence)
        return cut

    @property
    def limit(self) -> str:
        """The options that limit the length of a hypothesis."""
        a, b = self.search["max_len_a"], self.search["max_len_b"]
        return f"--max-len-b {b}, --max-len-a {a}"

    def run(
        self, verb: str, commands: Sequence[list[str]], sentences: int, kept: Path
    ) -> list[str]:
        """The lines that ``python -m COMMAND`` prints, for all commands, which run in parallel, one
        on each GPU.

        Raises:
            UserError: a command failed: the others are ended, and the file ``kept`` holds what it
                wrote to stderr.
        """
        printed: list[list[str]] = [[] for _ in commands]
        translated = [0] * len(commands)

        def read(shard: int, process: subprocess.Popen) -> int:
            with process:
                for line in process.stdout:
                    printed[shard].append(line.decode("utf-8").removesuffix("\n"))
                    translated[shard] += line.startswith(b"S-")
            return process.returncode

        started: list[subprocess.Popen] = []
        running = set()
        with (
            progress(total=sentences, desc=verb, unit="sentence") as bar,
            ThreadPoolExecutor(len(commands)) as pool,
            tempfile.NamedTemporaryFile() as errors,
        ):
            try:
                for shard, command in enumerate(commands):
                    process = self._start(command, shard, len(commands), errors)
                    started.append(process)
                    running.add(pool.submit(read, shard, process))
                while running:
                    # A batch is printed all at once: counted line by line, its first sentence would
                    # seem to take all the time.
                    ended, running = wait(running, timeout=1, return_when=FIRST_COMPLETED)
                    bar.update(sum(translated) - bar.n)
                    for code in filter(None, (result.result() for result in ended)):
                        messages = Path(errors.name).read_bytes()
                        raise UserError(_reason(code, messages, kept, self.checkpoints))
            finally:
                for process in started:
                    process.kill()
        return list(itertools.chain.from_iterable(printed))

    def _start(self, command: list[str], shard: int, shards: int, errors) -> subprocess.Popen:
        environment = {"OMP_NUM_THREADS": str(max(1, own_cores() // shards)), **os.environ}
        environment["PYTHONUTF8"] = "1"
        if self.gpus:
            environment["CUDA_VISIBLE_DEVICES"] = self.gpus[shard]
        return programs.start_python(
            "-m",
            *command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,  # so that the process ends when this one is killed
            stderr=errors,
        )


def positions(run: Run, side: str) -> int:
    """The most subwords that a model accepts on a side, the end of the sentence included."""
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
    check_translates(run)
    decoding = Decoding(args, run, "generate")
    if args.nbest > decoding.search["beam"]:
        raise UserError(
            f"--nbest {args.nbest} is larger than the beam of {decoding.search['beam']}"
        )
    subset = Subset.find(run, args.subset, decoding.text)
    wanted = _stamp(args, decoding, run, subset)
    output = (args.output or args.run / "generate" / args.subset).resolve()
    stamp_file = output / "made.txt"
    if stamp.done("generate", stamp_file, wanted, output / "hyp.tok"):
        return 0
    if output.exists() and not _may_be_replaced(output):
        raise UserError(
            f"refusing to overwrite '{output}', which has other files; choose another --output"
        )
    try:
        log = _decode(args, decoding, run, subset, output, wanted)
    except KeyboardInterrupt as interruption:
        raise NothingSaved(*interruption.args) from None
    cut = decoding.at_limit(log, lengths(subset.index))
    if cut:
        say(
            "generate",
            f"note: {len(cut)} of {subset.sentences} hypotheses are as long as they may be "
            f"({decoding.limit}), the first in line {cut[0] + 1}",
        )
    say("generate", f"{output / 'hyp.tok'} has {subset.sentences} hypotheses")
    score = ["score", "--run", args.run]
    if args.subset != "test":
        score += ["--subset", args.subset]
    if args.output:
        score += ["--output", output]
    say_next("generate", *score)
    return 0


def _may_be_replaced(output: Path) -> bool:
    """Whether ``output`` is an empty folder, or contains hypotheses and what belongs to them."""
    if not output.is_dir():
        return False
    names = {path.name for path in output.iterdir()}
    # pn train also writes a made.txt, but it names no subset
    is_decoded = "subset" in stamp.read(output / "made.txt")
    others = {"config.yaml", "settings.txt", "checkpoints", "bin"}
    return not names or (is_decoded and not names & others)


@dataclass(frozen=True)
class Subset:
    """A subset of prepared data."""

    files: list[Path]  # its binary data, and the dictionaries
    index: Path  # of its sources
    texts: dict[str, Path]  # src.tok and ref.tok -> the text; empty if it is unknown

    @classmethod
    def find(cls, run: Run, name: str, text: Settings) -> Subset:
        """The subset ``name`` of a run's data.

        Raises:
            UserError: there is no such subset; the text names the existing ones.
        """
        texts = {}
        if run.data:
            texts["src.tok"] = run.data / f"tok/{name}.{text.source}"
            texts["ref.tok"] = run.data / f"tok/{name}.{text.target}"
        indices = sorted(run.bin.glob(f"*.{text.source}.idx"))
        own = [index for index in indices if index.name.startswith(f"{name}.")]
        if "/" in name or not own or not all(path.is_file() for path in texts.values()):
            names = ", ".join(index.name.partition(".")[0] for index in indices)
            raise UserError(
                f"'{run.data or run.bin}' has no subset '{name}'; it has {names} (pn prepare text "
                "--test NAME adds one)"
            )
        files = sorted([*run.bin.glob(f"{name}.*"), *run.bin.glob("dict.*")])
        return cls(files, own[0], texts)

    @functools.cached_property
    def sentences(self) -> int:
        return sentences_in(self.index)


def _stamp(
    args: argparse.Namespace, decoding: Decoding, run: Run, subset: Subset
) -> dict[str, str]:
    """The inputs that the hypotheses are made from."""
    settings = {"subset": args.subset, **decoding.search}
    if args.nbest > 1:
        settings["nbest"] = args.nbest
    if args.fp16 is not None:
        settings["fp16"] = int(args.fp16)
    data = [*subset.files, *subset.texts.values()]
    if run.data:
        data.insert(0, run.data / "settings.txt")
    return stamp.made_from(settings, {"checkpoint": decoding.checkpoints, "data": data})


def _decode(
    args: argparse.Namespace,
    decoding: Decoding,
    run: Run,
    subset: Subset,
    output: Path,
    wanted: Mapping[str, str],
) -> list[str]:
    """Decode the subset into the folder ``output``, and return the output of fairseq."""
    # The number of batches is at least sentences / batch size; fairseq-generate divides by zero
    # without a batch.
    batches = max(1, math.ceil(subset.sentences / args.batch_size))
    shards = min(processes(args.ranks, len(decoding.gpus)), batches)
    say(
        "generate",
        f"decoding {args.subset} with {' + '.join(map(str, decoding.checkpoints))} (beam "
        f"{decoding.search['beam']}, length penalty {decoding.search['lenpen']:g}, "
        f"{'fp16' if decoding.fp16 else 'fp32'}, processes on the "
        f"{'GPUs' if decoding.gpus else 'CPU'}: {shards})",
    )
    common = ["fairseq_cli.generate", str(run.bin), "--gen-subset", args.subset, *decoding.options]
    common += ["--nbest", str(args.nbest)]
    # fairseq accepts --num-shards and --shard-id but does not read them: every process would decode
    # everything.
    common += ["--distributed-world-size", str(shards), "--distributed-rank"]
    kept = output.with_name(f"{output.name}.err")
    with only_writer(output), atomic_folder(output) as partial:
        commands = [[*common, str(shard)] for shard in range(shards)]
        log = decoding.run("generate", commands, subset.sentences, kept)
        best = hypotheses(log, subset.sentences, args.nbest)
        write_lines(partial / "hyp.tok", [options[0][1] for options in best])
        if args.nbest > 1:
            lines = []
            for number, options in enumerate(best, 1):
                lines += [f"{number}\t{score}\t{text}" for score, text in options]
            write_lines(partial / "nbest.tok", lines)
        for name, kind in (("src.tok", "S"), ("ref.tok", "T")):
            if subset.texts:
                shutil.copyfile(subset.texts[name], partial / name)
            else:
                write_lines(partial / name, texts_of(log, kind, subset.sentences))
        write_lines(partial / "generate.log", log)
        recorded = {**wanted, "fp16": int(decoding.fp16)}
        recorded |= outdated.record_of_result(decoding.checkpoints, run.checkpoints)
        write_settings(partial / "made.txt", recorded)
    kept.unlink(missing_ok=True)
    return log


def _reason(code: int, errors: bytes, kept: Path, checkpoints: Sequence[Path]) -> str:
    """Why a process failed; what it wrote to stderr is kept."""
    lines = errors.decode("utf-8", "replace").strip().splitlines()
    for line in reversed(lines):
        mistake = re.match(r"fairseq-\w+: error: (.*)", line)
        if mistake:
            names = f"{' + '.join(map(str, checkpoints))}: "
            # a line from fairseq_patches may already name the file
            return names + mistake[1].removeprefix(names)
    exceptions = [line for line in lines if re.match(r"[\w.]+(Error|Exception)\b", line)]
    reason = why_it_failed(code, exceptions or lines)
    if "out of memory" in reason:
        reason += " - smaller batches need less (--batch-size, --max-tokens)"
    kept.write_bytes(errors)
    return f"fairseq failed: {reason} (its whole output is in {kept})"


def _printed(lines: Iterable[str], kind: str) -> dict[int, list[list[str]]]:
    """Sentence number -> the fields of each of its lines of one kind (S, T, H, P) in
    fairseq's output.
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
            such sentence.
    """
    options = _printed(lines, "H")
    missing = [sentence for sentence in range(sentences) if sentence not in options]
    too_many = any(len(texts) > nbest for texts in options.values())
    if missing or too_many or len(options) > sentences:
        count = sum(map(len, options.values()))
        first = f"; the first sentence without one is in line {missing[0] + 1}" if missing else ""
        raise UserError(
            f"{sentences} sentences went in and {count} hypotheses of {len(options)} sentences "
            f"came out{first}"
        )
    return [options[sentence] for sentence in range(sentences)]
