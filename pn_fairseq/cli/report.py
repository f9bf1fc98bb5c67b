"""``pn-report``: a page about training runs, beside the paper's numbers."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from pn_fairseq.cli import ArgumentParser, UserError, command
from pn_fairseq.report.paper import PAPER

TOOL = "pn-report"

#: Names of the files that the tool writes; it touches no others.
PAGES = ("report.md", "report.html")
PICTURES = "report-curves-"

EPILOG = """\
example:
  %(prog)s runs/iwslt14_de_en/*_seed* --output runs/iwslt14_de_en/report

Writes into DIR, in place of what it wrote there before:
  report.md            for GitHub, with the pictures beside it
  report.html          one file with the pictures in it, to be read offline or printed
  report-curves-N.png  learning curves, one picture for each corpus

Runs that differ by their seed alone are averaged; runs on different data are never compared. What failed or is missing
in a run is said in the report. The paper's numbers stand beside runs on its data, recognised by languages, case, BPE
and the size of the test set; --paper says otherwise.
"""


def _parser() -> ArgumentParser:
    parser = ArgumentParser(
        prog=TOOL,
        description="Report on training runs: scores over seeds beside the paper's, significance, learning curves, "
        "settings, versions, hardware, speed, and what failed.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="directory of a run of scripts/train.sh")
    parser.add_argument("--output", required=True, type=Path, metavar="DIR", help="where to write; made if need be")
    parser.add_argument("--subset", default="test", help="decoded subset that the scores are of (default: test)")
    parser.add_argument(
        "--paper",
        choices=("auto", *PAPER, "none"),
        default="auto",
        help="whose row of the paper's Table 1 stands beside the runs (default: by the data)",
    )
    parser.add_argument(
        "--resamples", type=int, metavar="N", help="resamples of the paired bootstrap (default: sacrebleu's, 1000)"
    )
    return parser


def _write(file: Path, text: str) -> None:
    partial = file.with_name(f"{file.name}.partial")
    try:
        # A file name may hold bytes that are no UTF-8.
        partial.write_text(text, encoding="utf-8", errors="backslashreplace")
        os.replace(partial, file)
    finally:
        partial.unlink(missing_ok=True)


@command(TOOL)
def main(argv: Sequence[str] | None = None) -> None:
    """Run the tool on ``argv`` (by default the process's arguments) and return its exit code: 0, 2 or 130."""
    args = _parser().parse_args(argv)
    if args.resamples is not None and args.resamples < 1:
        raise UserError(f"--resamples must be at least 1, not {args.resamples}")
    if "/" in args.subset or args.subset in ("", ".", ".."):
        raise UserError(f"--subset {args.subset!r}: the name of a decoded subset, such as test or valid")

    # Here and not above: --help is to be answered at once.
    from pn_fairseq.report.document import build
    from pn_fairseq.report.page import html, markdown
    from pn_fairseq.report.runs import NoRun, read_runs
    from pn_fairseq.scoring import RESAMPLES

    try:
        runs = read_runs(args.runs, args.subset)
    except NoRun as error:
        raise UserError(str(error)) from error

    shows_progress = sys.stderr.isatty()

    def said(text: str) -> None:
        if shows_progress:
            print(f"[{TOOL}] {text}", file=sys.stderr)

    try:
        args.output.mkdir(parents=True, exist_ok=True)
        elements, pictures = build(
            runs, args.output, PICTURES, args.subset, args.paper, args.resamples or RESAMPLES, said
        )
        _write(args.output / PAGES[1], html(elements, {name: args.output / name for name in pictures}))
        _write(args.output / PAGES[0], markdown(elements))
        for stale in args.output.glob(f"{PICTURES}[0-9]*.png"):
            if stale.name not in pictures:
                stale.unlink()
    except OSError as error:
        place = error.filename2 or error.filename or args.output
        raise UserError(f"cannot write to --output {args.output}: {error.strerror} ({place})") from error
    for page in PAGES:
        print(args.output / page)


if __name__ == "__main__":
    sys.exit(main())
