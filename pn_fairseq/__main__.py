"""``python -m pn_fairseq VERB ...``: the one way in to everything that runs. ``pn-VERB`` is the same command."""

from __future__ import annotations

import importlib
import signal
import sys
from pathlib import Path

from pn_fairseq import __version__
from pn_fairseq.common.command import ArgumentParser, UserError, did_you_mean, handle_signals, run

#: Verb -> module whose ``main(argv)`` it calls. Imported only when it is called: most need no torch.
VERBS = {
    "average": "pn_fairseq.pipeline.average",
    "average-checkpoints": "pn_fairseq.pipeline.average_checkpoints",
    "data": "pn_fairseq.pipeline.data.steps",
    "evaluate-lm": "pn_fairseq.pipeline.evaluate_lm",
    "figures": "pn_fairseq.report.figures",
    "fold": "pn_fairseq.pipeline.fold",
    "generate": "pn_fairseq.pipeline.generate",
    "import-release": "pn_fairseq.pipeline.import_release",
    "norms": "pn_fairseq.norms.command",
    "plot-curves": "pn_fairseq.report.curves",
    "report": "pn_fairseq.report.command",
    "reproduce": "pn_fairseq.pipeline.reproduce",
    "score": "pn_fairseq.pipeline.score",
    "test-norms": "pn_fairseq.testing.command",
    "train": "pn_fairseq.pipeline.train",
    "translate": "pn_fairseq.pipeline.translate",
}


def info() -> str:
    """Which implementation of the kernels computes on which device, and why; the patches of fairseq."""
    import torch

    from pn_fairseq import fairseq_patches, kernels
    from pn_fairseq.common.environment import SWITCH, patches_enabled

    lines = [f"pn_fairseq {__version__}, torch {torch.__version__}"]
    lines += [f"kernels on {device}: {name} ({why})" for device, (name, why) in kernels.describe().items()]
    state = "on" if patches_enabled() else "off"
    lines.append(f"patches of fairseq: {state} ({SWITCH}=1 turns them off)")
    lines += [f"  {name}: {mends}" for name, mends in fairseq_patches.patches().items()]
    return "\n".join(lines)


def options(argv: list[str]) -> int:
    """The command without a verb: what someone needs to know to use the plugin."""
    parser = ArgumentParser(
        prog="python -m pn_fairseq",
        description="Power Normalization for fairseq.",
        epilog=f"Verbs, each with its own --help: {', '.join(sorted(VERBS))}.",
    )
    what = parser.add_mutually_exclusive_group()
    what.add_argument(
        "--user-dir",
        action="store_true",
        help='print the directory for fairseq: fairseq-train --user-dir "$(python -m pn_fairseq --user-dir)" ...',
    )
    what.add_argument("--info", action="store_true", help="print which kernels are in use, and the patches of fairseq")
    what.add_argument(
        "--check",
        action="store_true",
        help="compare the kernels that this machine can run with plain PyTorch; exit code 1 if one is wrong",
    )
    args = parser.parse_args(argv)
    if args.user_dir:
        print(Path(__file__).resolve().parent)
        return 0
    try:
        if args.check:
            import pn_fairseq.norms  # noqa: F401 (defines operators)
            from pn_fairseq.kernels.check import check

            table, fine = check()
            print(table)
            return 0 if fine else 1
        if args.info:
            print(info())
            return 0
    except RuntimeError as error:
        raise UserError(str(error)) from error
    raise UserError("give a verb or an option (see --help)")


def main() -> int:
    handle_signals()
    try:
        return call(Path(sys.argv[0]).name, sys.argv[1:])
    finally:
        # What a handler raises while Python shuts down is printed and ignored: from here a signal ends the process.
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)


def call(program: str, argv: list[str]) -> int:
    """Call the verb that the name of the program (``pn-VERB``) or else the first argument names."""
    if program.startswith("pn-"):
        verb, argv = program.removeprefix("pn-"), argv
    elif argv and not argv[0].startswith("-"):
        verb, argv = argv[0], argv[1:]
    else:
        return run("python -m pn_fairseq", lambda: options(argv))

    def unknown() -> int:
        raise UserError(f"unknown verb {verb!r}{did_you_mean(verb, VERBS)}; known: {', '.join(sorted(VERBS))}")

    if verb not in VERBS:
        return run("python -m pn_fairseq", unknown)
    return run(f"pn-{verb}", lambda: importlib.import_module(VERBS[verb]).main(argv))


if __name__ == "__main__":
    sys.exit(main())
