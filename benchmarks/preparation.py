"""Speed of the steps of the preparation: ``python -m benchmarks.preparation [CORPUS]``.

Each step runs as scripts/lib/prepare.sh runs it, and serially with the same tools, as in the released scripts. Both
take turns on the same files, so that other load on the machine affects both. The results must be the same bytes.
Printed are sentences of both languages a second, medians over the rounds.
"""

import argparse
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from pn_fairseq.machine import describe
from pn_fairseq.pipeline.data.pairs import lines
from pn_fairseq.pipeline.files import write_settings

ROOT = Path(__file__).resolve().parent.parent
SPLITS = ("train", "valid", "test")
LOWER_CASE = "import sys; sys.stdout.writelines(line.lower() for line in sys.stdin)"


def run(*command, source: Path | None = None, output: Path | None = None, cwd: Path | None = None) -> None:
    with open(source or "/dev/null", "rb") as stdin, open(output or "/dev/null", "wb") as stdout:
        command = [str(part) for part in command]
        subprocess.run(command, stdin=stdin, stdout=stdout, stderr=subprocess.DEVNULL, cwd=cwd, check=True)


def step(folder: Path, workers: int, *arguments) -> None:
    run(sys.executable, "-m", "pn_fairseq", "data", "--dest", folder, "--workers", workers, *arguments)


class Steps:
    """The steps in their order, each as (name, serial, in parallel); both write into the folder they are given."""

    def __init__(self, work: Path, languages: tuple[str, str], operations: int, workers: int):
        self.raw, self.ours = work / "raw", work / "ours"
        self.languages, self.operations, self.workers = languages, operations, workers
        self.files = [f"{split}.{lang}" for split in SPLITS for lang in languages]
        self.training = [self.ours / f"tok/train.{lang}" for lang in languages]

    def all(self) -> list[tuple[str, Callable[[Path], None], Callable[[Path], None]]]:
        return [
            ("tokenize, lower-case", self.tokenize_serially, self.tokenize),
            ("learn BPE", self.learn_serially, self.learn),
            ("apply BPE", self.apply_serially, self.apply),
            ("binarize", self.binarize_serially, self.binarize),
        ]

    def tokenize_serially(self, folder: Path) -> None:
        for name in self.files:
            cased = folder / f"tok/{name}.cased"
            run("sacremoses", "-l", name.split(".")[1], "-q", "tokenize", source=self.raw / name, output=cased)
            run(sys.executable, "-c", LOWER_CASE, source=cased, output=folder / "tok" / name)
            cased.unlink()

    def tokenize(self, folder: Path) -> None:
        # tokenizer=sacremoses leaves out this project's rule for the last full stop, which sacremoses' command lacks.
        settings = {"lower": 1, "bpe": self.operations, "tokenizer": "sacremoses"}
        settings |= dict(zip(("source", "target"), self.languages, strict=True))
        write_settings(folder / "settings", settings)
        step(folder, self.workers, "tokenize", self.raw, "tok")

    def learn_serially(self, folder: Path) -> None:
        with (folder / "joint").open("wb") as joint:
            for path in self.training:
                with path.open("rb") as file:
                    shutil.copyfileobj(file, joint)
        run("subword-nmt", "learn-bpe", "-s", self.operations, source=folder / "joint", output=folder / "bpe/codes")
        (folder / "joint").unlink()

    def learn(self, folder: Path) -> None:
        step(folder, self.workers, "learn-bpe", "tok", "bpe")

    def apply_serially(self, folder: Path) -> None:
        for name in self.files:
            codes = self.ours / "bpe/codes"
            run("subword-nmt", "apply-bpe", "-c", codes, source=self.ours / "tok" / name, output=folder / "bpe" / name)

    def apply(self, folder: Path) -> None:
        step(folder, self.workers, "apply-bpe", "tok", "bpe")

    def binarize_serially(self, folder: Path) -> None:
        texts = [flag for split in SPLITS for flag in (f"--{split}pref", self.ours / "bpe" / split)]
        source, target = self.languages
        flags = ("--source-lang", source, "--target-lang", target, "--joined-dictionary", *texts)
        run("fairseq-preprocess", *flags, "--destdir", "bin", "--workers", 1, cwd=folder)

    def binarize(self, folder: Path) -> None:
        step(folder, self.workers, "binarize")


def same_files(first: Path, second: Path) -> None:
    """Both folders must hold the same bytes, logs apart."""
    names = [sorted(path.name for path in folder.iterdir() if path.suffix != ".log") for folder in (first, second)]
    if names[0] != names[1]:
        sys.exit(f"{first} and {second} do not hold the same files")
    for name in names[0]:
        if (first / name).read_bytes() != (second / name).read_bytes():
            sys.exit(f"{first / name} and {second / name} differ")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.preparation", description=__doc__.split("\n")[0])
    parser.add_argument(
        "corpus",
        nargs="?",
        type=Path,
        default=ROOT / "data/verses.es-en",
        help="folder with train, valid and test in both languages, plain or .gz (default: the verses)",
    )
    parser.add_argument("--source", default="es", help="language (default: es)")
    parser.add_argument("--target", default="en", help="language (default: en)")
    parser.add_argument("--bpe", type=int, default=4000, help="merge operations (default: 4000)")
    parser.add_argument("--workers", type=int, default=describe()["cores"], help="processes (default: all cores)")
    parser.add_argument("--rounds", type=int, default=3, help="rounds (default: 3)")
    parser.add_argument("--work", type=Path, help="folder for temporary files (default: the system's)")
    args = parser.parse_args()

    with tempfile.TemporaryDirectory(dir=args.work) as temporary:
        work = Path(temporary)
        steps = Steps(work, (args.source, args.target), args.bpe, args.workers)
        steps.raw.mkdir()
        for name in steps.files:
            (steps.raw / name).write_text("".join(lines(args.corpus / name)), encoding="utf-8")
        sentences = sum(path.read_bytes().count(b"\n") for path in steps.raw.iterdir())
        seconds = {(name, kind): [] for name, _, _ in steps.all() for kind in ("serial", "ours")}
        for number in range(args.rounds):
            folders = {"serial": work / "serial", "ours": steps.ours}
            for folder in folders.values():
                shutil.rmtree(folder, ignore_errors=True)
                for stage in ("tok", "bpe"):
                    (folder / stage).mkdir(parents=True)
            for name, serially, ours in steps.all():
                # The order alternates.
                order = [("ours", ours), ("serial", serially)]
                for kind, do in order if number % 2 else reversed(order):
                    begin = time.perf_counter()
                    do(folders[kind])
                    seconds[name, kind].append(time.perf_counter() - begin)
                print(f"round {number + 1} of {args.rounds}: {name}", file=sys.stderr)
            for stage in ("tok", "bpe", "bin"):
                same_files(folders["serial"] / stage, folders["ours"] / stage)

    machine = describe()
    print(f"{args.corpus.name}, {sentences} sentences of both languages, BPE {args.bpe}, {args.workers} processes")
    print(f"{machine['cpu']}, {machine['cores']} cores, Python {machine['python']}; medians of {args.rounds} rounds")
    print(f"{'step':22} {'serial':>10} {'ours':>10}   times as fast (lowest, highest)")
    print(f"{'':22} {'sentences a second':>21}")
    for kind in ("serial", "ours"):
        seconds["all", kind] = [
            sum(times) for times in zip(*(values for (_, of), values in seconds.items() if of == kind), strict=True)
        ]
    for name in [*(name for name, _, _ in steps.all()), "all"]:
        serial, ours = seconds[name, "serial"], seconds[name, "ours"]
        ratios = [one / other for one, other in zip(serial, ours, strict=True)]
        speeds = [sentences / statistics.median(values) for values in (serial, ours)]
        print(
            f"{name:22} {speeds[0]:10.0f} {speeds[1]:10.0f}   "
            f"{statistics.median(ratios):.2f} ({min(ratios):.2f}, {max(ratios):.2f})"
        )


if __name__ == "__main__":
    main()
