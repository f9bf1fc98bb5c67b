"""Translate a subset with one fairseq-generate for each GPU, or several on the CPU. Called by generate.sh.

Each of N processes gets every N-th batch of the same batches, so that the result does not depend on N. The hypotheses
are merged by the number of their sentence and counted; the output directory is swapped in whole.
"""

import hashlib
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from conventions import ArgumentParser, UserError, command

TOOL = "generate.sh"
SEGMENTATIONS = {"subword-nmt": "subword_nmt", "sentencepiece": "sentencepiece"}  # ours -> fairseq's --remove-bpe


class Stopped(Exception):
    """A signal asked for the end."""

    def __init__(self, number: int):
        self.number = number


@dataclass
class Shard:
    process: subprocess.Popen
    reader: threading.Thread
    log: Path
    errors: Path


def settings_of(data: Path) -> dict[str, str]:
    pairs = (line.partition("=") for line in (data / "settings").read_text("utf-8").splitlines())
    settings = {key: value for key, equals, value in pairs if equals}
    for key in ("source", "target"):
        if key not in settings:
            raise UserError(f"{data / 'settings'} does not name the {key} language (scripts/prepare_*.sh write it)")
    return settings


def line_count(path: Path) -> int:
    """As awk counts: a last line without a newline is one."""
    text = path.read_bytes()
    return text.count(b"\n") + (not text.endswith(b"\n") and text != b"")


def sha256(*paths: Path) -> str:
    """Of the contents of the files together."""
    digest = hashlib.sha256()
    for path in paths:
        with path.open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()


def visible_gpus() -> list[str]:
    """As CUDA_VISIBLE_DEVICES names them."""
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen in ("", "-1"):
        return []
    import torch

    count = torch.cuda.device_count()
    return chosen.split(",")[:count] if chosen else [str(number) for number in range(count)]


def whole_number(text: str, name: str) -> int:
    if not re.fullmatch("[1-9][0-9]*", text):
        raise UserError(f"{name} must be a whole number of at least 1, not '{text}'")
    return int(text)


def number(text: str, name: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise UserError(f"{name} must be a number, not '{text}'")
    return value


def read_made(folder: Path) -> dict[str, str]:
    try:
        return dict(line.split("=", 1) for line in (folder / "made").read_text("utf-8").splitlines())
    except (OSError, ValueError):
        return {}


class Decoder:
    """The processes, their progress and their end."""

    def __init__(self, folder: Path, sentences: int):
        self.folder, self.sentences = folder, sentences
        self.shards: list[Shard] = []
        self.done = 0
        self.stop = 0
        self.lock = threading.Lock()
        for name in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            # A flag, and no exception: one that comes while a process is started would leave that process behind.
            if signal.getsignal(name) != signal.SIG_IGN:  # as nohup has it
                signal.signal(name, self.stopped)

    def stopped(self, signal_number: int, _frame) -> None:
        self.stop = signal_number

    def start(self, command_line: list[str], environment: dict[str, str]) -> None:
        number = len(self.shards)
        log, errors = self.folder / f"shard{number}.log", self.folder / f"shard{number}.err"
        with errors.open("wb") as stderr:
            process = subprocess.Popen(
                command_line, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=stderr, env=environment
            )
        reader = threading.Thread(target=self.read, args=(process.stdout, log), daemon=True)
        self.shards.append(Shard(process, reader, log, errors))
        reader.start()

    def read(self, stream, log: Path) -> None:
        """Through a pipe, so that the processes end by themselves if this one is killed."""
        with stream, log.open("wb") as file:
            for line in stream:
                file.write(line)
                if line.startswith(b"H-"):
                    with self.lock:
                        self.done += 1

    def show(self, end: str = "") -> None:
        if sys.stderr.isatty():
            print(f"\r[generate] {self.done}/{self.sentences} sentences", end=end, file=sys.stderr, flush=True)

    def wait(self) -> None:
        while not self.stop and any(shard.process.poll() is None for shard in self.shards):
            failed = next((shard for shard in self.shards if shard.process.poll()), None)
            if failed:
                break
            self.show()
            time.sleep(0.1)
        if self.stop:
            raise Stopped(self.stop)
        for shard in self.shards:
            if shard.process.poll():
                raise UserError(self.reason(shard))
        for shard in self.shards:
            shard.reader.join()
        self.show("\n")

    def reason(self, shard: Shard) -> str:
        """Why it failed, with all that it said kept beside the output."""
        lines = shard.errors.read_text("utf-8", "replace").strip().splitlines()
        exceptions = [line for line in lines if re.match(r"[\w.]+(Error|Exception)\b", line)]
        words = (exceptions or lines or ["it said nothing"])[-1]
        code = shard.process.returncode
        if code < 0:
            words = f"killed by {signal.Signals(-code).name}, as happens when memory runs out"
        if "out of memory" in words:
            words += " - smaller batches need less (--batch-size, --max-tokens)"
        kept = self.folder.with_suffix(".err")
        shutil.copyfile(shard.errors, kept)
        return f"fairseq-generate failed: {words} (all of it in {kept})"

    def end(self) -> None:
        """No process stays behind."""
        for shard in self.shards:
            if shard.process.poll() is None:
                shard.process.terminate()
        for shard in self.shards:
            try:
                shard.process.wait(5)
            except subprocess.TimeoutExpired:
                shard.process.kill()
                shard.process.wait()


def hypotheses(logs: list[Path], sentences: int) -> Iterator[str]:
    """The one hypothesis of every sentence, in the order of the text."""
    found: dict[int, str] = {}
    lines = 0
    for log in logs:
        for line in log.read_bytes().decode("utf-8").split("\n"):
            if line.startswith("H-"):
                name, _score, text = line.split("\t", 2)
                found[int(name[2:])] = text
                lines += 1
    if lines != sentences or found.keys() != set(range(sentences)):
        missing = [str(number + 1) for number in range(sentences) if number not in found]
        raise UserError(
            f"{sentences} sentences went in and {lines} hypotheses of {len(found)} sentences came out"
            + (f"; the first without one is in line {missing[0]}" if missing else "")
        )
    return (found[number] for number in range(sentences))


@command(TOOL)
def main(argv: list[str] | None = None) -> int:
    try:
        return decode(argv)
    except OSError as error:
        named = f"{error.filename}: " if error.filename else ""
        raise UserError(f"{named}{error.strerror or error}") from error


def decode(argv: list[str] | None) -> int:
    parser = ArgumentParser(prog=TOOL)
    parser.add_argument("run", type=Path)
    parser.add_argument("user_dir", type=Path)
    for option in ("checkpoint", "output"):
        parser.add_argument(f"--{option}", type=Path)
    for option, default in (("subset", "test"), ("beam", None), ("lenpen", None)):
        parser.add_argument(f"--{option}", default=default)
    parser.add_argument("--batch-size", default="128")
    parser.add_argument("--max-tokens", default="8000")
    parser.add_argument("--fp16", action="store_const", const=True)
    parser.add_argument("--no-fp16", dest="fp16", action="store_const", const=False)
    args = parser.parse_args(argv)

    batch_size = whole_number(args.batch_size, "--batch-size")
    max_tokens = whole_number(args.max_tokens, "--max-tokens")
    processes = whole_number(os.environ["NPROC"], "NPROC") if os.environ.get("NPROC") else None
    checkpoint = args.checkpoint or args.run / "checkpoints/averaged.pt"
    if not checkpoint.is_file():
        raise UserError(f"there is no checkpoint '{checkpoint}' (scripts/average.sh makes averaged.pt)")
    data = Path((args.run / "data").read_text("utf-8").removesuffix("\n"))
    settings = settings_of(data)
    source, target = settings["source"], settings["target"]
    texts = {"src.tok": data / f"tok/{args.subset}.{source}", "ref.tok": data / f"tok/{args.subset}.{target}"}
    if "/" in args.subset or not texts["src.tok"].is_file():
        raise UserError(f"'{data}' has no subset '{args.subset}'")
    segmentation = settings.get("segmentation", "subword-nmt")
    if segmentation not in SEGMENTATIONS:
        raise UserError(f"{data / 'settings'}: segmentation={segmentation} is none of {', '.join(SEGMENTATIONS)}")
    for path in (checkpoint, data):
        if ":" in str(path):
            raise UserError(f"'{path}' has a colon, at which fairseq splits paths; use another place")

    from omegaconf import OmegaConf

    config = OmegaConf.load(args.run / "config.yaml")

    def setting(key: str, default):
        value = OmegaConf.select(config, key)
        return default if value is None else value

    beam = whole_number(str(args.beam or setting("generation.beam", 5)), "--beam")
    lenpen = number(str(args.lenpen or setting("generation.lenpen", 1.0)), "--lenpen")
    bins = sorted(path for pattern in (f"{args.subset}.*", "dict.*") for path in (data / "bin").glob(pattern))
    wanted = {
        "checkpoint": sha256(checkpoint),
        "data": sha256(data / "settings", *bins, *texts.values()),
        "subset": args.subset,
        "beam": str(beam),
        "lenpen": str(lenpen),
        "max_len_a": str(setting("generation.max_len_a", 0)),
        "max_len_b": str(setting("generation.max_len_b", 200)),
    }
    if args.fp16 is not None:
        wanted["fp16"] = str(int(args.fp16))
    output = (args.output or args.run / "generate" / args.subset).resolve()
    made = read_made(output)
    if (output / "hyp.tok").is_file() and wanted.items() <= made.items():
        print(f"[generate] {output / 'hyp.tok'} is there already", file=sys.stderr)
        return 0
    if output.exists() and not made and (not output.is_dir() or any(output.iterdir())):
        raise UserError(f"'{output}' holds something else: it is left alone; name another directory (--output)")

    gpus = visible_gpus()
    if gpus and processes is not None and processes > len(gpus):
        raise UserError(f"NPROC={processes}, but a GPU takes one process and {len(gpus)} are visible")
    if args.fp16 and not gpus:
        raise UserError("--fp16 needs a GPU")
    fp16 = bool(gpus) and (bool(setting("common.fp16", False)) if args.fp16 is None else args.fp16)
    sentences = line_count(texts["src.tok"])
    # There are at least as many batches as sentences / batch size; fairseq-generate divides by zero without a batch.
    shards = min(processes or len(gpus) or 1, max(1, math.ceil(sentences / batch_size)))
    print(
        f"[generate] decoding {args.subset} with {checkpoint} (beam {beam}, length penalty {lenpen:g}, "
        f"{'fp16' if fp16 else 'fp32'}, processes on the {'GPUs' if gpus else 'CPU'}: {shards})",
        file=sys.stderr,
    )
    partial = output.with_name(f"{output.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        partial.mkdir(parents=True)
    except OSError as error:
        raise UserError(f"cannot make the directory '{partial}' (--output): {error.strerror}") from error
    environment = {**os.environ, "PYTHONUTF8": "1"}
    if not gpus and "OMP_NUM_THREADS" not in os.environ:
        environment["OMP_NUM_THREADS"] = str(max(1, len(os.sched_getaffinity(0)) // shards))
    decoder = Decoder(partial, sentences)
    try:
        for shard in range(shards):
            if gpus:
                environment["CUDA_VISIBLE_DEVICES"] = gpus[shard]
            decoder.start(
                [
                    *("fairseq-generate", str(data / "bin"), "--user-dir", str(args.user_dir)),
                    *("--path", str(checkpoint), "--gen-subset", args.subset),
                    *("--source-lang", source, "--target-lang", target),
                    *("--beam", str(beam), "--lenpen", str(lenpen), "--remove-bpe", SEGMENTATIONS[segmentation]),
                    *("--max-len-a", wanted["max_len_a"], "--max-len-b", wanted["max_len_b"]),
                    *("--max-tokens", str(max_tokens), "--batch-size", str(batch_size)),
                    # With the default of 8 fairseq drops the last sentences of a batch without a word.
                    *("--required-batch-size-multiple", "1", "--num-workers", "0", "--log-format", "none"),
                    # --num-shards and --shard-id are accepted and not read: every process would decode everything.
                    *("--distributed-world-size", str(shards), "--distributed-rank", str(shard)),
                    *(["--fp16"] if fp16 else []),
                ],
                environment,
            )
        decoder.wait()
        with (partial / "hyp.tok").open("w", encoding="utf-8", newline="\n") as file:
            file.writelines(f"{line}\n" for line in hypotheses([shard.log for shard in decoder.shards], sentences))
        for name, text in texts.items():
            shutil.copyfile(text, partial / name)
        if line_count(partial / "ref.tok") != sentences:
            raise UserError(f"{texts['ref.tok']} has not the {sentences} lines of {texts['src.tok']}")
        with (partial / "generate.log").open("wb") as log:
            for shard in decoder.shards:
                log.write(shard.log.read_bytes())
                shard.log.unlink()
                shard.errors.unlink()
        made = "".join(f"{key}={value}\n" for key, value in {**wanted, "fp16": str(int(fp16))}.items())
        (partial / "made").write_text(made, "utf-8")
        shutil.rmtree(output, ignore_errors=True)
        partial.rename(output)
        output.with_name(f"{output.name}.err").unlink(missing_ok=True)
    except Stopped as stopped:
        print(f"{TOOL}: interrupted", file=sys.stderr)
        return 128 + stopped.number
    finally:
        decoder.end()
        shutil.rmtree(partial, ignore_errors=True)
    print(f"[generate] {output / 'hyp.tok'} has {sentences} hypotheses", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
