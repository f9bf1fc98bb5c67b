"""``pn-report``: a page about training runs, beside the paper's numbers."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from pn_fairseq.common.command import ArgumentParser, UserError, command
from pn_fairseq.common.files import atomic_write
from pn_fairseq.common.published import LM_NAMES, LM_SENTENCE, LM_SOURCE, PAPER

#: Names of the files that the tool writes; it touches no others.
_MARKDOWN, _HTML, _CSV, _PICTURES = "report.md", "report.html", "report.csv", "report-curves-"

_EPILOG = """\
example:
  %(prog)s runs/iwslt14_de_en/*_seed* --output runs/iwslt14_de_en/report

RUN is the folder of a run of scripts/train.sh; or of fairseq-train, with its --log-file or saved output in it and what
pn-score --run wrote; or of a job of fairseq-hydra-train -m, or of all jobs together.

Writes into DIR, in place of what it wrote there before:
  report.md            for GitHub, with the pictures beside it
  report.html          one file with the pictures in it, to be read offline or printed
  report.csv           scores, validation loss and time of every run
  report-curves-N.png  learning curves, of LN and a few other systems in each picture

Figures that pn-figures wrote into DIR are shown, and the files of --norm-probe named.

Runs that differ by their seed alone are averaged; runs on different data are never compared. The report lists what
failed or is missing in a run. The numbers of the PowerNorm paper's Table 1 are shown beside runs on its data,
recognised by languages, case, BPE and the size of the test set; --paper names another table, or none. Language models
get a report of their own, with perplexities.
"""


@command("pn-report")
def main(argv: Sequence[str] | None = None) -> None:
    """Run ``pn-report`` on ``argv`` (by default the process's arguments)."""
    parser = ArgumentParser(
        prog="pn-report",
        description="Report on training runs: scores over seeds beside the paper's, significance, learning curves, "
        "settings, versions, hardware, speed, and what failed.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="folder of a run")
    parser.add_argument("--output", required=True, type=Path, metavar="DIR", help="where to write; created if needed")
    parser.add_argument("--subset", default="test", help="decoded subset that the scores are of (default: test)")
    parser.add_argument(
        "--paper",
        choices=("auto", *PAPER, *LM_NAMES, "none"),
        default="auto",
        help="the published table to show beside the results; of language models Table 2 (ptb) or 3 (wikitext103) of "
        "the PowerNorm paper (default: by the data)",
    )
    parser.add_argument(
        "--resamples", type=int, metavar="N", help="resamples of the paired bootstrap (default: sacrebleu's, 1000)"
    )
    args = parser.parse_args(argv)
    if args.resamples is not None and args.resamples < 1:
        raise UserError(f"--resamples must be at least 1, not {args.resamples}")
    if "/" in args.subset or args.subset in ("", ".", ".."):
        raise UserError(f"--subset {args.subset!r}: the name of a decoded subset, such as test or valid")

    # Here and not above: --help is to be answered at once.
    from pn_fairseq.pipeline.scoring import RESAMPLES
    from pn_fairseq.report import perplexity, tables
    from pn_fairseq.report.markdown import html
    from pn_fairseq.report.runs import read_runs

    runs = read_runs(args.runs, args.subset)
    language_models = perplexity.of_language_models(runs)
    if args.paper in LM_NAMES and not language_models:
        raise UserError(f"--paper {args.paper} is of language models, and the runs are not")

    try:
        args.output.mkdir(parents=True, exist_ok=True)
        settings = {"subset": args.subset, "paper": args.paper}
        if language_models:
            kind, about = "perplexity.md.j2", perplexity.about
            settings |= {"sentence": LM_SENTENCE, "source": LM_SOURCE}
        else:
            kind, about = "report.md.j2", tables.about
            settings |= {"resamples": args.resamples or RESAMPLES}
        page, pictures = tables.build(runs, args.output, _PICTURES, kind, about, **settings)
        texts = {_MARKDOWN: page, _HTML: html(page, args.output), _CSV: tables.raw_scores(runs).to_csv(index=False)}
        for name, text in texts.items():
            with atomic_write(args.output / name) as file:
                # A file name may hold bytes that are not UTF-8.
                file.write(text.encode("utf-8", errors="backslashreplace"))
        for stale in args.output.glob(f"{_PICTURES}[0-9]*.png"):
            if stale.name not in pictures:
                stale.unlink()
    except OSError as error:
        place = error.filename2 or error.filename or args.output
        raise UserError(f"cannot write to --output {args.output}: {error.strerror} ({place})") from error
    print(*(args.output / name for name in texts), sep="\n")
