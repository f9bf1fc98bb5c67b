"""``scripts/reproduce_CORPUS.sh``: every step from the raw text to a report, for a list of norms and seeds."""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pn_fairseq
from pn_fairseq.common.command import (
    ArgumentParser,
    Interrupted,
    UserError,
    deferred_signals,
    did_you_mean,
    run,
    say,
    whole_number,
)
from pn_fairseq.common.files import atomic_write
from pn_fairseq.common.published import PAPER, Table
from pn_fairseq.pipeline.launch import variable

ROOT = Path(pn_fairseq.__file__).resolve().parent.parent


@dataclass(frozen=True)
class Corpus:
    """What differs between corpora."""

    config: str  # a name in configs/
    size: str  # the architectures are MODEL_NORM_SIZE
    seeds: str = "1 2 3"
    models: tuple[str, ...] = ("transformer",)
    norms: str = "ln bn pnv pn"

    @property
    def steps(self) -> tuple[str, ...]:
        """scripts/STEP.sh, one after the other for each run."""
        return ("train", "average", *(("generate", "score") if "transformer" in self.models else ("evaluate_lm",)))

    @property
    def tables(self) -> dict[str, Table]:
        """The published tables of the corpus."""
        return {name: table for name, table in PAPER.items() if table.config.startswith(self.config)}


_TABLE_4 = "gn bn brn mabn pnv pn"
#: NAME, of scripts/prepare_NAME.sh and scripts/reproduce_NAME.sh.
CORPORA = {
    "verses": Corpus("verses_es_en", "tiny", seeds="1 2"),
    "multi30k": Corpus("multi30k_de_en", "tiny"),
    "iwslt14": Corpus("iwslt14_de_en", "iwslt"),
    "wmt14": Corpus("wmt14_en_de_big", "wmt_en_de_big", seeds="1"),
    "verses_lm": Corpus(
        "verses_lm_en",
        "tiny",
        models=("transformer_lm", "tensorized_lm"),
        norms=f"ln ln+layer_scale_groups=4 {_TABLE_4}",
    ),
    "ptb": Corpus("ptb_lm", "ptb", seeds="1", models=("tensorized_lm",), norms=f"ln {_TABLE_4}"),
    "wikitext103": Corpus("wikitext103_lm", "wt103", seeds="1", models=("tensorized_lm",)),
}

EPILOG = """\
environment:
  NORMS="{norms}"
                 the norms, as in {model}_NORM_{size}; NORM+key=value adds a setting of the model
  SEEDS="{seeds}"
                 one run is made for each norm and seed
  SIZE={size}
                 the size of the models; it needs a --runs of its own, since the names of runs do not have it
{more}
Run again, it skips what is done and continues with the rest. A run that fails is named at the end and in the report;
the others are still made.

One rank per visible GPU; train.sh --help explains NPROC, NNODES, NODE_RANK, MASTER_ADDR. On several machines, which see
the same files, give the same command on each. All of them train; the first one also does the other steps. The others
wait for it; stop them if it fails. In a SLURM job of several machines, call it once in the batch script; it calls srun.
"""

MODELS = """\
  MODELS="{}"
                 and for each of these models
"""

TABLES = """\
  TABLE=NAME     instead of NORMS: the rows of a published table, with its config (the runs go to runs/CONFIG). The
                 report, DIR/report-NAME, has the published numbers. NAME is one of
                 {}
"""


def _parser(name: str, corpus: Corpus) -> tuple[ArgumentParser, list[str]]:
    """The parser, and the options that are passed on to the preparation."""
    prepare, several = f"prepare_{name}.sh", len(corpus.models) > 1
    more = MODELS.format(" ".join(corpus.models)) if several else ""
    more += TABLES.format(" ".join(corpus.tables)) if corpus.tables else ""
    about = f"From raw text to a table. For every norm and seed: {', '.join(corpus.steps)}; then one report over all."
    if "evaluate_lm" in corpus.steps:
        about += "\nThe language models are causal, unlike the code that the paper names (docs/language_modeling.md)."
    parser = ArgumentParser(
        prog=f"scripts/reproduce_{name}.sh",
        description=about,
        epilog=EPILOG.format(
            norms=corpus.norms,
            model=corpus.models[0],
            size=corpus.size,
            seeds=corpus.seeds,
            more=more,
        ),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add, run_name = parser.add_argument, f"{'MODEL_' if several else ''}NORM_seedN"
    settings = f"settings for train.sh that differ from configs/{corpus.config}.yaml"
    add("settings", nargs="*", default=[], metavar="key=value", help=settings)
    runs = f"where the runs go, as DIR/{run_name}, and the report, as DIR/report (default runs/{corpus.config})"
    add("--runs", metavar="DIR", help=runs)
    data = f"the prepared data, made if it is not there (default runs/data/{corpus.config})"
    add("--data", metavar="DIR", help=data)
    add("--dry-run", action="store_true", help="print the commands and do nothing")
    usage = subprocess.run([ROOT / "scripts" / prepare, "--help"], stdout=subprocess.PIPE, text=True).stdout
    group, passed_on = parser.add_argument_group(f"passed on to {prepare}"), []
    for option, value in re.findall(r"^  (--[a-z0-9-]+)(?: ([^ \n]+))?(?:  .*)?$", usage, re.M):
        if option != "--dest":
            group.add_argument(option, **({"metavar": value} if value else {"action": "store_true"}))
            passed_on.append(option)
    return parser, passed_on


def trainings(corpus: Corpus, norms: Sequence[str], env: Mapping[str, str]) -> dict[str, list[str]]:
    """The runs: their names and settings of the model and the seed."""
    from pn_fairseq.norms import NORMS

    models = env["MODELS"].split() if "MODELS" in env and len(corpus.models) > 1 else corpus.models
    seeds = [whole_number("SEEDS", seed) for seed in env.get("SEEDS", corpus.seeds).split()]
    if not (norms and seeds and models):
        raise UserError("NORMS, SEEDS and MODELS must each name at least one")
    for model in models:
        if model not in corpus.models:
            raise UserError(f"MODELS: unknown model '{model}'; there are {' '.join(corpus.models)}")
    known = [entry.short for entry in NORMS.values()]
    found: dict[str, list[str]] = {}
    for model, norm, seed in itertools.product(models, norms, seeds):
        short, *settings = norm.split("+")
        if short not in known:
            raise UserError(f"NORMS: unknown norm '{short}'{did_you_mean(short, known)}; there are {' '.join(known)}")
        name = f"{f'{model}_' if len(corpus.models) > 1 else ''}{norm}_seed{seed}"
        if name in found:
            raise UserError(f"NORMS and SEEDS name {name} twice")
        found[name] = [f"model._name={model}_{short}_{env.get('SIZE') or corpus.size}", f"common.seed={seed}"]
        found[name] += [f"model.{setting}" for setting in settings]
    return found


def _machines(env: Mapping[str, str]) -> tuple[int, list[str]]:
    """Which of several machines this is, and the command that launches a training on all of them."""
    if env.get("NNODES"):
        return variable(env, "NODE_RANK", 0), []
    if env.get("SLURM_JOB_ID") and variable(env, "SLURM_JOB_NUM_NODES", 1) > 1:
        if env.get("SLURM_STEP_NUM_TASKS"):  # srun alone sets it
            raise UserError("call it once, in the batch script and not by srun: it calls srun itself")
        return 0, ["srun", "--ntasks-per-node=1", "--kill-on-bad-exit=1"]
    return 0, []


def execute(command: Sequence[str | Path], messages: Path | None = None) -> int:
    """Run a step to its end and return its exit code. What it writes to stderr goes to the file ``messages``, too."""
    process = reader = None

    def copy() -> None:
        for block in iter(process.stderr.read1, b""):
            with contextlib.suppress(OSError):  # a full disk; the step must be able to write
                kept.write(block)
            with contextlib.suppress(OSError):  # `| head`
                sys.stderr.buffer.write(block)
                sys.stderr.buffer.flush()

    with messages.open("wb", buffering=0) if messages else contextlib.nullcontext() as kept:
        try:
            with deferred_signals():
                process = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stderr=subprocess.PIPE if messages else None,
                    env={**os.environ, "PN_FAIRSEQ_STEP": "1"},  # the line about an interruption comes from here
                )
                if messages:
                    reader = threading.Thread(target=copy)
                    reader.start()
            code = process.wait()
        except (Interrupted, KeyboardInterrupt):
            if process:
                with deferred_signals():
                    process.terminate()
                    process.wait()
            raise
        finally:
            if reader:
                reader.join()
    code = code if code >= 0 else 128 - code
    if code in (130, 143):
        raise Interrupted(code - 128)
    return code


def reproduce(name: str, words: Sequence[str]) -> int:
    """scripts/reproduce_NAME.sh with the arguments ``words``; returns the exit code."""
    corpus, env, tool = CORPORA[name], os.environ, f"reproduce_{name}"
    parser, passed_on = _parser(name, corpus)
    args = parser.parse_intermixed_args(words)
    for setting in args.settings:
        if "=" not in setting:
            raise UserError(f"unexpected argument '{setting}': settings are key=value (see --help)")
    norms, config, report_name = env.get("NORMS", corpus.norms).split(), corpus.config, "report"
    if table := env.get("TABLE"):
        for other, what in {"NORMS": "which norms", "SIZE": "the size of the models"}.items():
            if other in env:
                raise UserError(f"TABLE and {other} both say {what}: give one of them")
        if table not in corpus.tables:
            known = " ".join(corpus.tables) or "none of this corpus"
            raise UserError(f"TABLE: unknown table '{table}'{did_you_mean(table, corpus.tables)}; there are {known}")
        from pn_fairseq.norms import NORMS

        config, rows = corpus.tables[table].config, corpus.tables[table].rows
        norms = ["+".join([NORMS[row.norm].short, *map("=".join, row.settings.items())]) for row in rows]
        report_name = f"report-{table}"
    planned = trainings(corpus, norms, env)
    machine, launch = _machines(env)

    # Every command, in order.
    scripts, runs = ROOT / "scripts", Path(args.runs or ROOT / "runs" / config).absolute()
    data = Path(args.data or ROOT / "runs/data" / corpus.config).absolute()
    preparation = [scripts / f"prepare_{name}.sh", "--dest", data]
    for option in passed_on:
        if value := getattr(args, option[2:].replace("-", "_")):
            preparation += [option] if value is True else [option, value]
    commands: dict[str, dict[str, list]] = {}
    for run_name, settings in planned.items():
        commands[run_name] = {step: [scripts / f"{step}.sh", "--run", runs / run_name] for step in corpus.steps}
        train = [*launch, scripts / "train.sh", config, "--data", data, "--run", runs / run_name]
        commands[run_name]["train"] = [*train, *settings, *args.settings]
    report = ["pn-report", *(runs / run_name for run_name in commands), "--output", runs / report_name]
    if table:
        report += ["--paper", table]
    if args.dry_run:
        for command in (preparation, *(each for steps in commands.values() for each in steps.values()), report):
            print(shlex.join(str(word).replace(f"{ROOT}/", "") for word in command))
        return 0
    for program in ("pn-report", *launch[:1]):
        if not shutil.which(program):
            raise UserError(f"'{program}' is not installed or not on the PATH")

    # Before the hours of the preparation: each norm with settings of its own, or else one norm of each model.
    for model in corpus.models:
        of_model = [(arch, *more) for arch, _, *more in planned.values() if arch.startswith(f"model._name={model}_")]
        for settings in dict.fromkeys(words for words in of_model if len(words) > 1) or of_model[:1]:
            _must([scripts / "train.sh", config, "--check", *settings, *args.settings])
    if machine:
        # The first machine decodes between two trainings, and the others wait for it.
        os.environ.setdefault("START_TIMEOUT", "604800")
        commands = {run_name: {"train": steps["train"]} for run_name, steps in commands.items()}
        if not (data / "bin").is_dir():
            say(tool, f"waiting for the first machine to prepare {data}")
        while not (data / "bin").is_dir():
            time.sleep(5)
    else:
        _must(preparation)
    failed = [run_name for run_name, steps in commands.items() if not _make(tool, runs / run_name, steps, machine)]
    if not machine:
        say(tool, "report")
        _must(report)
        if failed:
            count = f"{len(failed)} of {len(commands)} runs failed: {' '.join(failed)}"
            say(tool, f"{count} (the report says why); the same command tries them again")
    return 1 if failed else 0


def _must(command: Sequence[str | Path]) -> None:
    """Run a step without which nothing else can be done; it has named the reason if it fails."""
    if code := execute(command):
        sys.exit(code)


def _make(tool: str, path: Path, steps: Mapping[str, Sequence], machine: int) -> bool:
    """One run through its steps; False after a failure, which is noted in its folder and ends this run only."""
    # Not beside the runs: pn-report DIR/*_seed* finds runs alone.
    work = path.parent / "logs" / path.name / (f"machine{machine}" if machine else "")
    work.mkdir(parents=True, exist_ok=True)
    for step, command in steps.items():
        say(tool, f"{path.name}: {step}")
        messages = work / f"{step}.err"
        if not (code := execute(command, messages)):
            continue
        say(tool, f"{path.name} failed in {step} (its messages are in {work})")
        if not machine:
            path.mkdir(parents=True, exist_ok=True)
            said = [line for line in messages.read_text("utf-8", "replace").splitlines() if line.strip()]
            reason = said[-1] if said else "it printed no reason"
            if code > 128:
                reason = f"killed by {signal.Signals(code - 128).name}, as happens when memory runs out"
            with atomic_write(path / "failed", "w") as file:
                file.write(f"{step}: {reason}\n")
        return False
    if not machine:
        (path / "failed").unlink(missing_ok=True)
    return True


def main(argv: Sequence[str]) -> int:
    known = bool(argv) and argv[0] in CORPORA

    def body() -> int:
        about = "What scripts/reproduce_CORPUS.sh calls; its --help has the options."
        parser = ArgumentParser(prog="python -m pn_fairseq reproduce", description=about)
        parser.add_argument("corpus", choices=CORPORA)
        return reproduce(parser.parse_args(argv[:1]).corpus, argv[1:])

    return run(f"reproduce_{argv[0]}.sh" if known else "pn-reproduce", body)
