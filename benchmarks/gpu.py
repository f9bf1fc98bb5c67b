"""All evidence that a machine with GPUs can give: ``python -m benchmarks.gpu --out DIR --minutes
N``.

The kernels are compared with plain PyTorch, the tests that need CUDA run, and norms, training,
decoding and NCCL are measured, in parts that are commands of their own. A part begins if it is
likely to end within the minutes, and is cut off if it does not. A finished part is not repeated:
the same command, given again, does the rest. DIR receives of each part what it printed (PART.txt,
PART.log) and its figures (PART.csv), and of all a page, gpu.md, and a picture, gpu.png.
"""

import json
import math
import os
import shlex
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pandas
import torch

from benchmarks.norms import COPY, DTYPES, LARGE, PHASES, SHAPES
from benchmarks.table import draw_points, markdown_table
from pn_fairseq.common import command
from pn_fairseq.common.files import atomic_write
from pn_fairseq.pipeline.machine import describe

ROOT = Path(__file__).resolve().parents[1]

#: Options of each benchmark. Of the norms: torch's, ours by Triton, and PN also by plain PyTorch
#: and torch.compile.
FULL = {
    "norms": r"--rounds 10 --only ^(?!.*(reference|compiled)$)|^pn(.\+LS)?.(reference|compiled)$",
    "training": "--norms bn pnv pn rms gn dyt",
    "decoding": "--rounds 20",
    "ranks": "--dtype bfloat16",
}
TINY = {
    "norms": "--rounds 1 --threads 1 --only ^(pn|dyt).(cpp|ref)|Batch|copy",
    "training": "--tokens 24 --length 6 --vocabulary 50 --rounds 1 --threads 1 --no-memory --norms "
    "pn",
    "decoding": "--sentences 2 --source-length 5 --target-length 4 --beam 2 --vocabulary 50 "
    "--rounds 1 --norms pn",
    "ranks": "--rows 48 --channels 16 --rounds 1 --dtype float32",
}


@dataclass(frozen=True)
class Part:
    """``python -m`` and ``words``, which take some ``minutes``.

    ``figures``: the option that names the CSV file.
    """

    name: str
    minutes: float
    words: tuple[str, ...]
    figures: str = ""

    def command(self, out: Path) -> list[str]:
        return [
            "-m",
            *self.words,
            *([self.figures, str(out / f"{self.name}.csv")] if self.figures else []),
        ]

    def result(self, out: Path) -> dict | None:
        """Exit code and seconds, if it has ended."""
        file = out / f"{self.name}.json"
        return json.loads(file.read_text("utf-8")) if file.exists() else None

    def run(self, out: Path, seconds: float) -> int | None:
        """The exit code; None if it was cut off after ``seconds``."""
        with (
            (out / f"{self.name}.txt").open("wb") as text,
            (out / f"{self.name}.log").open("wb") as log,
        ):
            options = {"stdout": text, "stderr": log, "cwd": ROOT, "start_new_session": True}
            process = subprocess.Popen([sys.executable, *self.command(out)], **options)
            try:
                return process.wait(seconds)
            except subprocess.TimeoutExpired:
                return None
            finally:
                # torchrun passes the first one on to its ranks
                for number in (signal.SIGTERM, signal.SIGKILL):
                    if process.poll() is None:
                        with suppress(ProcessLookupError, subprocess.TimeoutExpired):
                            os.killpg(process.pid, number)
                            process.wait(10)


def parts(tiny: bool) -> list[Part]:
    """What is wanted most comes first."""

    def measured(kind: str, name: str, minutes: float, options: str = "", start: str = "") -> Part:
        device = "cpu" if tiny else "cuda"
        sizes = (TINY if tiny else FULL)[kind]
        words = f"{start} benchmarks.{kind} --device {device} {options} {sizes}".split()
        return Part(
            name, 0 if tiny else minutes, tuple(words), "--csv" if kind == "norms" else "--output"
        )

    def tests(name: str, which: str) -> Part:
        where = ("check.py", "-k", "samples") if tiny else ("cuda.py", "-k", which)
        return Part(
            name,
            0 if tiny else 4,
            ("pytest", "-q", "-n0", f"tests/kernels/test_{where[0]}", *where[1:]),
        )

    found = [
        Part("check", 0 if tiny else 2, ("pn_fairseq", "check")),
        tests("tests", "not test_operators"),
    ]
    for shape in ("40x8",) if tiny else (*SHAPES, *LARGE):
        for dtype in ("float32",) if tiny else ("bfloat16", "float32"):
            options = f"--shapes {shape} --dtypes {dtype} --targets"
            found.append(measured("norms", f"norms-{shape}-{dtype}", 5, options))
    for size, minutes in ({"tiny": 0} if tiny else {"iwslt": 3, "wmt_en_de_big": 6}).items():
        for dtype in ("bfloat16",) if tiny else ("float16", "bfloat16"):
            found.append(
                measured(
                    "training",
                    f"training-{size}-{dtype}",
                    minutes,
                    f"--size {size} --dtype {dtype}",
                )
            )
        dtype = "float32" if tiny else "float16"
        found.append(
            measured(
                "decoding", f"decoding-{size}-{dtype}", minutes, f"--size {size} --dtype {dtype}"
            )
        )
    ranks = 2 if tiny else torch.cuda.device_count()
    start = f"torch.distributed.run --standalone --nproc-per-node {ranks} -m"
    found.append(measured("ranks", f"ranks-{ranks}", 3, start=start))
    found.append(measured("ranks", f"updates-{ranks}", 3, "--encoder", start))
    types = () if tiny else (*DTYPES.values(), torch.float64)
    return found + [
        tests(f"tests-{str(dtype)[6:]}", f"test_operators and {dtype}") for dtype in types
    ]


def figures(of: list[Part], out: Path, kind: str) -> dict[str, pandas.DataFrame]:
    """The figures of the finished parts of a kind, by the rest of their names, with a row for
    each norm.
    """
    found = {}
    for part in of:
        if part.name.startswith(f"{kind}-") and (how := part.result(out)) and not how["code"]:
            rows = pandas.read_csv(out / f"{part.name}.csv")
            both = (
                rows[rows["phase"] == "both"].set_index("contestant")
                if kind == "norms"
                else rows.set_index("norm")
            )
            found[part.name.partition("-")[2]] = both
    return found


def page(of: list[Part], out: Path, machine: dict) -> str:
    """Everything in Markdown."""
    results = {part: part.result(out) for part in of}
    text = [
        f"# Measurements on {', '.join(machine['gpus']) or 'a CPU: a test'}",
        "![All ratios.](gpu.png)",
    ]
    text.append(
        markdown_table(["", ""], [[key, str(value)] for key, value in machine.items()], "---")
    )
    states = {None: "not run yet", 0: "finished"}
    lines = [
        [
            part.name,
            states.get(how and how["code"], "FAILED"),
            f"{how['seconds']:.0f}" if how else "",
        ]
        for part, how in results.items()
    ]
    text.append(markdown_table(["part", "state", "seconds"], lines))
    if settings := figures(of, out, "norms"):
        text.append(
            "## Norms\n\nForward and backward: time as a ratio to LayerNorm's, and share of a "
            "copy's bandwidth."
        )
        wide = pandas.DataFrame(
            {
                name: rows["ratio"].map("{:.2f}, ".format)
                + rows["copy_bandwidth"].map("{:.0%}".format)
                for name, rows in settings.items()
            }
        ).reindex(dict.fromkeys(name for rows in settings.values() for name in rows.index))
        copies = [rows.loc[COPY] for rows in settings.values()]
        speeds = []
        for row in copies:
            elements = math.prod(map(int, row["shape"].split("x")))
            moved = PHASES["both"] * elements * DTYPES[row["dtype"]].itemsize
            speeds.append(f"{moved / row['milliseconds'] / 1e6:.1f}")
        wide.loc["the copy and addition, GB/s"] = speeds
        text.append(markdown_table(["", *settings], wide.fillna("").reset_index().values.tolist()))
    for part, how in results.items():
        if how:
            printed = (out / f"{part.name}.txt").read_text("utf-8", "replace").strip()
            if how["code"]:
                printed += (
                    "\n" + (out / f"{part.name}.log").read_text("utf-8", "replace").strip()[-3000:]
                )
            text.append(f"## {part.name}\n\n`python {shlex.join(part.command(Path('DIR')))}`")
            text.append(printed if printed.startswith("|") else f"```\n{printed}\n```")
    return "\n\n".join(text) + "\n"


def draw(of: list[Part], out: Path) -> None:
    """Ratios of times and shares of a copy's bandwidth of all norms,

    and speeds of training and decoding.
    """
    norms, training, decoding = (
        figures(of, out, kind) for kind in ("norms", "training", "decoding")
    )
    speeds = {f"training {key}": rows["times_ln"] for key, rows in training.items()}
    speeds |= {f"decoding {key}": rows["times_ln"] for key, rows in decoding.items()}
    panels = {
        "time, ratio to LayerNorm": {key: rows["ratio"] for key, rows in norms.items()},
        "share of a copy's bandwidth": {key: rows["copy_bandwidth"] for key, rows in norms.items()},
        "speed, times LN's": speeds,
    }
    draw_points(panels, out / "gpu.png")


def check_machine(out: Path, machine: dict) -> None:
    """Figures of different machines or versions do not belong on one page."""
    file = out / "machine.json"
    before = json.loads(file.read_text("utf-8")) if file.exists() else machine
    for key in machine:
        if before.get(key) != machine[key]:
            was = f"{key} {before.get(key)}, now {machine[key]}"
            raise command.UserError(
                f"{out} has figures of another machine or version ({was}); choose another --out"
            )
    with atomic_write(file, "w") as opened:
        json.dump(machine, opened)


def main(argv: list[str] | None = None) -> int:
    parser = command.ArgumentParser(
        prog="python -m benchmarks.gpu", description=__doc__.split("\n")[0]
    )
    parser.add_argument(
        "--out", required=True, type=Path, metavar="DIR", help="where the results go"
    )
    parser.add_argument(
        "--minutes",
        required=True,
        type=command.whole,
        metavar="N",
        help="how long this run may take",
    )
    parser.add_argument(
        "--tiny", action="store_true", help="a test: all parts on the CPU, with tiny sizes"
    )
    args = parser.parse_args(argv)
    if not (args.tiny or torch.cuda.is_available()):
        raise command.UserError(
            "torch sees no GPU; --tiny runs all parts on the CPU, with tiny sizes"
        )
    command.handle_signals()
    end, out, of = time.monotonic() + 60 * args.minutes, args.out.resolve(), parts(args.tiny)
    out.mkdir(parents=True, exist_ok=True)
    machine = {**describe(), "tiny": args.tiny}
    check_machine(out, machine)
    tried = False
    for part in of:
        begin, before = time.monotonic(), part.result(out)
        if (
            before
            and not before["code"]
            or end <= begin
            or tried
            and end - begin < 60 * part.minutes
        ):
            continue
        tried, code = True, part.run(out, end - begin)
        seconds = time.monotonic() - begin
        state = {0: "finished", None: "cut off; it needs more minutes"}.get(
            code, f"FAILED, see {out / part.name}.log"
        )
        command.say("benchmarks.gpu", f"{part.name}: {state} ({seconds:.0f} s)")
        if code is not None:
            with atomic_write(out / f"{part.name}.json", "w") as file:
                json.dump({"code": code, "seconds": seconds}, file)
    with atomic_write(out / "gpu.md", "w") as file:
        file.write(page(of, out, machine))
    draw(of, out)
    results = [part.result(out) for part in of]
    left, failed = results.count(None), sum(bool(how and how["code"]) for how in results)
    again = "; run the same command again for the rest" if left or failed else ""
    command.say(
        "benchmarks.gpu",
        f"{out / 'gpu.md'}: {len(of)} parts, {left} not run yet, {failed} failed{again}",
    )
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(command.run("benchmarks.gpu", main))
