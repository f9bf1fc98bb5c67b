"""Everything that a GPU can tell, in nine minutes: ``python -m benchmarks.gpu --out DIR``.

The sections (:data:`benchmarks.gpu_sections.SECTIONS`) run one after another, the most wanted
first, in processes of their own, so that one that fails or hangs cannot harm the next. DIR receives
``gpu.md``, the tables with this project's goals, which is written again after every section;
``gpu.json``, the same figures; and ``log.txt``, what the sections printed. The same command, given
again, runs the sections that are not finished.
"""

import argparse
import json
import multiprocessing
import os
import signal
import sys
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from multiprocessing import connection
from pathlib import Path

from benchmarks.gpu_sections import (
    BANDWIDTH,
    CHECK,
    COMPILED,
    INDUCTOR,
    LARGE,
    ON_DEVICE,
    ON_HOST,
    OWN_COLUMNS,
    RANKS,
    REPLAYS,
    SECTIONS,
    SHARE,
    UPDATES,
    Section,
    run,
)
from benchmarks.table import markdown_table
from pn_fairseq.common import command
from pn_fairseq.common.files import atomic_write
from pn_fairseq.kernels.selection import CPP_MISSING
from pn_fairseq.pipeline.machine import describe_machine

TOOL = "benchmarks.gpu"
#: A process begins as a copy of one that has imported what takes seconds and has used no GPU.
CONTEXT = multiprocessing.get_context("forkserver")
PRELOADED = ["benchmarks.gpu_sections"]
#: No section begins with fewer seconds than these.
LEAST_SECONDS = 10.0

FINISHED = "finished"
FAILED = "failed"
CUT_OFF = "cut off"


@dataclass
class Result:
    """What a section gave.

    Attributes:
        state: ``finished``, ``failed`` (some rows may be missing) or ``cut off``.
        seconds: how long it ran.
        rows: table and values of each row.
        notes: lines, among them those of errors.
    """

    state: str = CUT_OFF
    seconds: float = 0.0
    rows: list[tuple[str, dict]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Goal:
    """A limit for some columns of those rows of a table whose values are those of ``where``."""

    title: str
    section: str
    table: str
    columns: tuple[str, ...]
    limit: float
    where: dict = field(default_factory=dict)
    at_most: bool = True

    def worst(self, rows: list[dict]) -> float | None:
        """The value that is farthest from the goal; None: nothing was measured."""
        found = []
        for row in rows:
            if all(row.get(key) == value for key, value in self.where.items()):
                values = [row.get(column) for column in self.columns]
                found += [value for value in values if value is not None]
        if not found:
            return None
        if self.at_most:
            return max(found)
        return min(found)

    def reached(self, value: float) -> bool:
        if self.at_most:
            return value <= self.limit
        return value >= self.limit


def _updates_goal(size: str, name: str, column: str, limit: float) -> Goal:
    title = f"an update of the {size} model with {name}, times LN's"
    return Goal(title, "updates", UPDATES, (column,), limit, {"model": size})


#: PN as `pn train` runs it.
PN = "PN and diagnostics"
GOALS = (
    Goal("a norm's difference from float64, of the tolerance", "norms", CHECK, (SHARE,), 1.0),
    Goal("an all-reduce's difference, of the tolerance", "ranks", RANKS, (SHARE,), 1.0),
    Goal("replayed steps that were not counted", "replays", REPLAYS, ("missed",), 0.0),
    _updates_goal("tiny", PN, "pn, diagnostics", 1.05),
    _updates_goal("iwslt", PN, "pn, diagnostics", 1.02),
    _updates_goal("tiny", "BN", "bn", 1.10),
    _updates_goal("iwslt", "BN", "bn", 1.04),
    Goal("inductor on the device, times Triton", "inductor", INDUCTOR, (ON_DEVICE,), 1.1),
    Goal("inductor on the host, times Triton", "inductor", INDUCTOR, (ON_HOST,), 1.0),
    Goal(
        f"a kernel on {LARGE[0]} x {LARGE[1]}, share of a copy's bandwidth",
        "bandwidth",
        BANDWIDTH,
        OWN_COLUMNS,
        0.8,
        {"shape": f"{LARGE[0]}x{LARGE[1]}"},
        at_most=False,
    ),
    Goal("compiled steps that were not counted", "compiled", COMPILED, ("missed",), 0.0),
)


def measure(section: Section, seconds: float, tiny: bool, log: Path, result: Result) -> None:
    """Run a section for at most ``seconds``, and fill in its ``result``."""
    parts = min(section.parts, 2) if tiny else section.parts
    begin = time.monotonic()
    processes = []
    open_pipes = []
    try:
        for part in range(parts):
            receiver, sender = CONTEXT.Pipe(duplex=False)
            arguments = section, tiny, part, parts, log, sender
            process = CONTEXT.Process(target=run, args=arguments)
            process.start()
            sender.close()
            processes.append(process)
            open_pipes.append(receiver)
        ended = receive(open_pipes, begin + seconds, result)
        if ended:
            result.state = FINISHED
            for process in processes:
                process.join()
                if process.exitcode:
                    result.state = FAILED
                if process.exitcode < 0:
                    name = signal.Signals(-process.exitcode).name
                    result.notes.append(f"a process ended by {name}")
    finally:
        for process in processes:
            end(process)
        result.seconds = time.monotonic() - begin


def receive(open_pipes: list, until: float, result: Result) -> bool:
    """Receive messages until all pipes are closed (True) or the time is over (False)."""
    while open_pipes:
        ready = connection.wait(open_pipes, max(until - time.monotonic(), 0))
        if not ready:
            return False
        for pipe in ready:
            try:
                kind, *message = pipe.recv()
            except EOFError:
                open_pipes.remove(pipe)
                continue
            if kind == "row":
                result.rows.append(tuple(message))
            else:
                result.notes += message
    return True


def end(process) -> None:
    """End a process and all that it has started."""
    if process.is_alive():
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.kill()  # it may not lead a group yet
        process.join()


def tables_of(section: Section, result: Result) -> dict[str, list[dict]]:
    """The tables of a section as the page shows them."""
    found: dict[str, list[dict]] = {}
    for table, row in result.rows:
        found.setdefault(table, []).append(row)
    if section.summary is not None:
        found = {table: section.summary(rows) for table, rows in found.items()}
    return found


def shown(value: object) -> str:
    """A value as a cell."""
    if value is None or value == "":
        return "–"
    if isinstance(value, float):
        if 1000 <= value < 1e9:
            return f"{value:,.0f}"
        return f"{value:.4g}"
    return str(value)


def table(rows: list[dict]) -> str:
    """Rows in Markdown; what a row lacks is left open."""
    columns = list(dict.fromkeys(column for row in rows for column in row))
    lines = []
    for row in rows:
        lines.append([shown(row.get(column)) for column in columns])
    return markdown_table(columns, lines, "---")


def goal_rows(results: dict[str, Result], tables: dict[str, list[dict]]) -> list[dict]:
    """A row for each goal, beside what was measured."""
    found = []
    for goal in GOALS:
        worst = goal.worst(tables.get(goal.table, []))
        verdict = "not measured"
        if worst is not None:
            verdict = "yes" if goal.reached(worst) else "no"
            if results[goal.section].state != FINISHED:
                verdict += ", of what was measured"
        bound = "at most" if goal.at_most else "at least"
        limit = f"{bound} {goal.limit:g}"
        found.append({"goal": goal.title, "limit": limit, "worst": worst, "reached": verdict})
    return found


def page(results: dict[str, Result], machine: dict) -> str:
    """Everything in Markdown, as it can stand on docs/results/gpu.md."""
    where = ", ".join(machine["gpus"])
    if machine["tiny"]:
        where = "a CPU: a dry run with small sizes, whose figures mean nothing"
    text = [
        "<!-- not of runs.csv: the output of python -m benchmarks.gpu -->",
        f"## Measurements on {where}",
        described(machine),
    ]
    tables: dict[str, list[dict]] = {}
    for section in SECTIONS:
        if section.name in results:
            tables |= tables_of(section, results[section.name])
    text += ["### Goals", table(goal_rows(results, tables))]
    for title, rows in tables.items():
        text += [f"### {title}", table(rows)]
    text += ["### Sections", table(section_rows(results))]
    for name, result in results.items():
        for note in dict.fromkeys(result.notes):  # several processes can say the same
            text.append(f"- {name}: {note}")
    return "\n\n".join(text) + "\n"


def described(machine: dict) -> str:
    """Versions, commit, machine and date in a sentence."""
    named = {
        "PyTorch": machine["torch"],
        "CUDA": machine["cuda"],
        "Triton": machine["triton"],
        "Python": machine["python"],
        "fairseq": machine["fairseq"],
    }
    versions = ", ".join(f"{name} {version or 'not there'}" for name, version in named.items())
    if machine["no C++ kernels"]:
        versions += f"; without the C++ kernels ({machine['no C++ kernels']})"
    return (
        f"{versions}; {machine['cores']} cores of {machine['cpu']}; commit "
        f"{machine['git_commit'] or 'unknown'}; {datetime.now(UTC):%d %B %Y}."
    )


def section_rows(results: dict[str, Result]) -> list[dict]:
    found = []
    for section in SECTIONS:
        result = results.get(section.name)
        state = result.state if result else "not run yet"
        seconds = f"{result.seconds:.0f}" if result else None
        found.append({"section": section.name, "state": state, "seconds": seconds})
    return found


def triton_version() -> str | None:
    try:
        import triton
    except ImportError:
        return None
    return triton.__version__


def load(file: Path, machine: dict) -> dict[str, Result]:
    """The results of an earlier call, which must be of the same machine and code."""
    if not file.exists():
        return {}
    saved = json.loads(file.read_text("utf-8"))
    for key, value in machine.items():
        if saved["machine"].get(key) != value:
            was = f"{key} {saved['machine'].get(key)}, now {value}"
            raise command.UserError(
                f"{file.parent} has figures of another machine or version ({was}); choose another "
                "--out"
            )
    return {name: Result(**values) for name, values in saved["sections"].items()}


def save(out: Path, results: dict[str, Result], machine: dict) -> None:
    sections = {name: asdict(result) for name, result in results.items()}
    with atomic_write(out / "gpu.json", "w") as file:
        json.dump({"machine": machine, "sections": sections}, file)
    with atomic_write(out / "gpu.md", "w") as file:
        file.write(page(results, machine))


def seconds_for(section: Section, waiting: list[Section], left: float) -> float:
    """What a section may take of the time that is left: its own, and what the others leave."""
    later = sum(other.seconds for other in waiting)
    return min(left, max(section.seconds, left - later))


def measure_all(args: argparse.Namespace, machine: dict) -> dict[str, Result]:
    """Run the sections that are not finished, as far as the seconds go."""
    out = args.out.resolve()
    deadline = time.monotonic() + args.seconds
    out.mkdir(parents=True, exist_ok=True)
    results = load(out / "gpu.json", machine)
    save(out, results, machine)
    waiting = []
    for section in SECTIONS:
        known = results.get(section.name)
        if known is None or known.state != FINISHED:
            waiting.append(section)
    CONTEXT.set_forkserver_preload(PRELOADED)
    while waiting and deadline - time.monotonic() > LEAST_SECONDS:
        section = waiting.pop(0)
        seconds = seconds_for(section, waiting, deadline - time.monotonic())
        result = results[section.name] = Result()
        try:
            measure(section, seconds, args.tiny, out / "log.txt", result)
        finally:
            save(out, results, machine)
        command.say(TOOL, f"{section.name}: {result.state} ({result.seconds:.0f} s)")
    return results


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = command.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    parser.add_argument(
        "--out", required=True, type=Path, metavar="DIR", help="where the results go"
    )
    parser.add_argument(
        "--seconds",
        type=command.whole,
        default=520,
        metavar="N",
        help="how long this call may take (default: 520)",
    )
    parser.add_argument(
        "--commit",
        default=None,
        metavar="HASH",
        help="the commit of this code, for a copy without its history",
    )
    parser.add_argument(
        "--tiny", action="store_true", help="a dry run: all sections on the CPU, with small sizes"
    )
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    import torch

    args = parse(argv)
    if not (args.tiny or torch.cuda.is_available()):
        raise command.UserError(
            "torch sees no GPU; --tiny is a dry run of all sections on the CPU, with small sizes"
        )
    command.handle_signals()
    machine = {**describe_machine(), "triton": triton_version(), "tiny": args.tiny}
    # Without them, Python code calls the Triton kernels, which takes longer.
    machine["no C++ kernels"] = CPP_MISSING
    if machine["git_commit"] is None:
        machine["git_commit"] = args.commit
    results = measure_all(args, machine)
    unfinished = []
    for section in SECTIONS:
        if section.name not in results or results[section.name].state != FINISHED:
            unfinished.append(section.name)
    again = ""
    if unfinished:
        again = f"; not finished: {', '.join(unfinished)} (run the same command again)"
    command.say(TOOL, f"{args.out / 'gpu.md'} is written{again}")
    return int(any(result.state == FAILED for result in results.values()))


if __name__ == "__main__":
    sys.exit(command.run(TOOL, main))
