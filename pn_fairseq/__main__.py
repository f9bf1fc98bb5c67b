"""``pn COMMAND ...``, the only program of this project; ``python -m pn_fairseq COMMAND ...`` is
the same.
"""

from __future__ import annotations

import atexit
import importlib
import os
import sys
import warnings
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

from pn_fairseq.common.command import (
    ArgumentParser,
    UserError,
    did_you_mean,
    handle_signals,
    run,
    say,
)

#: Heading in ``pn --help`` -> its commands -> the module of this package whose ``main(argv)`` the
#: command calls (or MODULE:FUNCTION), and its help line. The module is imported only when called:
#: most commands need no torch.
COMMANDS = {
    "data and training": {
        "prepare": (
            "pipeline.prepare",
            "turn a corpus with a recipe, or text of your own, into binary data",
        ),
        "train": ("pipeline.train", "train with the settings of a configuration and yours"),
        "average": ("pipeline.average", "average the last checkpoints of a run"),
        "reproduce": (
            "pipeline.reproduce",
            "run all steps from text to a report, for a list of norms and seeds",
        ),
    },
    "translations and scores": {
        "generate": (
            "pipeline.generate",
            "translate a subset of the prepared data with the model of a run",
        ),
        "translate": (
            "pipeline.translate",
            "translate text from a file or stdin with the model of a run",
        ),
        "score": (
            "pipeline.score",
            "compute BLEU, chrF and TER of hypotheses, and test differences",
        ),
        "evaluate-lm": ("pipeline.evaluate_lm", "compute the perplexity of a language model"),
        "report": (
            "report.command",
            "write one page about runs: scores, intervals, learning curves, settings",
        ),
        "figures": ("report.figures", "draw the paper's figures from runs"),
    },
    "checkpoints": {
        "fold": ("pipeline.fold", "fuse the norms of a checkpoint into linear layers"),
        "export": (
            "pipeline.export",
            "write encoder and decoder step of a checkpoint as ONNX or torch.export files",
        ),
        "import-release": (
            "pipeline.import_release",
            "convert a checkpoint of the PowerNorm authors' code",
        ),
    },
    "norms": {
        "norms": ("pipeline.norms", "list the norms, with their options and defaults"),
        "test-norms": ("testing.command", "run the shared tests on the norms of a file"),
    },
    "this installation": {
        "check": (
            "pipeline.info:check",
            "compare the kernels that this machine can run with plain PyTorch",
        ),
        "info": (
            "pipeline.info",
            "print version, kernels in use, patches of fairseq, folder for --user-dir",
        ),
    },
}
VERBS = {verb: line for group in COMMANDS.values() for verb, line in group.items()}

#: Verbs whose speed depends on the kernels.
COMPUTING = ("evaluate-lm", "generate", "reproduce", "train", "translate")
#: Verbs that continue where they were interrupted.
RESUMING = ("evaluate-lm", "generate", "prepare", "reproduce", "train")
#: Options that make a verb only print or check something.
TALKING = {"-h", "--help", "--check", "--dry-run"}

#: Variables that must be set before a process starts. With the first, Python reads text as UTF-8 in
#: every locale. Without the next two, glibc returns large blocks to the system at once, and page
#: faults then cost more than the arithmetic: an update of a small model took 0.63 instead of 0.26
#: seconds on 2 cores. Without the last, an OpenMP thread that waits for the others spins: beside
#: another busy process, training took twice as long (docs/speed.md).
ENVIRONMENT = {
    "PYTHONUTF8": "1",
    "MALLOC_MMAP_THRESHOLD_": "1000000000",
    "MALLOC_TRIM_THRESHOLD_": "8000000000",
    "OMP_WAIT_POLICY": "passive",
}


def main() -> NoReturn:
    if not ENVIRONMENT.keys() <= os.environ.keys():
        os.environ.update({**ENVIRONMENT, **os.environ})
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])
    handle_signals()
    code = call(sys.argv[1:])
    # sys.exit would finalize the interpreter while the daemon thread in which fairseq loads batches
    # still runs. If that thread then returns from torch, the process aborts: "terminate called
    # without an active exception".
    atexit._run_exitfuncs()
    # What was printed before an interruption, or by atexit, may still wait in the buffer. `call`
    # has already reported a closed pipe or a full disk.
    with suppress(OSError):
        sys.stdout.flush()
    os._exit(code)


def call(argv: list[str]) -> int:
    """Call the verb that the first argument names, or handle the options of the program itself."""
    if not argv or argv[0].startswith("-"):
        return run("pn", lambda: options(argv))
    verb, *rest = argv
    works = not TALKING & {*rest}

    def body() -> int | None:
        if verb not in VERBS:
            raise UserError(f"unknown command {verb!r}{did_you_mean(verb, VERBS)} (see pn --help)")
        if verb in COMPUTING and works:
            warn_without_kernels()
        module, _, function = VERBS[verb][0].partition(":")
        return getattr(importlib.import_module(f"pn_fairseq.{module}"), function or "main")(rest)

    return run(f"pn {verb}" if verb in VERBS else "pn", body, resumes=verb in RESUMING and works)


def options(argv: list[str]) -> int:
    """The program without a verb."""
    listed = ""
    for heading, group in COMMANDS.items():
        listed += (
            f"{heading}:\n"
            + "".join(f"  {verb:<15} {line}\n" for verb, (_, line) in group.items())
            + "\n"
        )
    parser = ArgumentParser(
        prog="pn",
        usage="pn COMMAND [options]",
        description="Norms for padded batches (Power Normalization and its relatives) in PyTorch "
        "and fairseq, and all\n"
        "steps of an experiment, from raw text to a report.",
        epilog=f"""{listed}examples:
  pn reproduce demo                    a small translation model, from text to BLEU
  pn train verses_es_en model._name=transformer_bn_tiny
  pn COMMAND --help                    what a command does, its options, examples
""",
    )
    folder = 'print the folder for fairseq: fairseq-train --user-dir "$(pn --user-dir)" ...'
    parser.add_argument("--user-dir", action="store_true", help=folder)
    if parser.parse_args(argv).user_dir:
        print(Path(__file__).resolve().parent)
        return 0
    raise UserError("a command is missing (see pn --help)")


def warn_without_kernels() -> None:
    """Say once, on stderr, that no kernels are compiled: the verbs write the norms' own warning
    only into their logs.
    """
    compiled = any((Path(__file__).parent / "kernels").glob("_cpp_*"))
    if compiled or os.environ.get("PN_FAIRSEQ_KERNELS") or "PN_FAIRSEQ_STEP" in os.environ:
        return
    advice = (
        "run 'make venv' in the checkout, or install with a C++ compiler (pip install "
        "--no-build-isolation)"
    )
    say(
        "pn",
        "the C++ kernels are not compiled: on the CPU the norms are computed by plain PyTorch, "
        f"slowly; {advice}",
    )
    warnings.filterwarnings("ignore", "pn_fairseq computes without its C")


if __name__ == "__main__":
    main()
