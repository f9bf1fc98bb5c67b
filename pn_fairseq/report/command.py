"""``pn report``: a page about training runs, with published numbers next to their results."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path

from pn_fairseq.common.command import ArgumentParser, UserError, did_you_mean, whole
from pn_fairseq.common.errors import unknown
from pn_fairseq.common.files import check_folders
from pn_fairseq.pipeline.published import LM_PAPER, PAPER, read_table

_EPILOG = """\
example:
  %(prog)s runs/iwslt14_de_en/*_seed* --output runs/iwslt14_de_en/report

RUN is a folder of pn train; of fairseq-train, with the files of pn score --run and a log
(--log-file, or the output of --log-format json) or only checkpoints; or of one job, or of all jobs,
of fairseq-hydra-train -m.

Writes into DIR and replaces the files of an earlier report:
  report.md               for GitHub, with the pictures next to it
  report.csv              scores, validation loss, machine, commit of the code and time of every run
  report-intervals-N.png  differences from LN with simultaneous 95%% intervals
  report-curves-N.png     learning curves, of LN and a few other systems in each picture
  report-curves.csv       the records behind these curves

If pn figures wrote figures into DIR, the report shows them. It also lists the files of
--norm-probe.

Runs that differ only by their seed are averaged. Systems are compared with LN within blocks, the
runs of one seed on one machine; runs on different data are never compared. The report lists what
failed or is missing in a run. The numbers of the PowerNorm paper's Table 1 are shown next to runs
on its data, recognised by languages, case, BPE and the size of the test set; --paper selects
another table, or none. The report on language models shows perplexities.
"""


def main(argv: Sequence[str] | None = None) -> None:
    """Run ``pn report`` on ``argv`` (by default the process's arguments)."""
    parser = ArgumentParser(
        prog="pn report",
        description="Report on training runs: scores over seeds, published scores, differences "
        "from LN, learning "
        "curves, settings, versions, hardware, speed, and failures.",
        epilog=_EPILOG,
    )
    add = parser.add_argument
    add("runs", nargs="+", type=Path, metavar="RUN", help="folder of a run")
    add(
        "--output",
        required=True,
        type=Path,
        metavar="DIR",
        help="where to write; created if needed",
    )
    add("--subset", default="test", help="decoded subset to report on (default: test)")
    table = (
        "the published table to show next to the results: a YAML file of yours (docs/compare.md), "
        "none, or one of "
    )
    table += (
        f"{', '.join(PAPER)}; for language models ptb or wikitext103 (Tables 2 and 3 of the "
        f"PowerNorm paper) or "
    )
    table += "enwik8 (AdaNorm paper); default: chosen by the data"
    add("--paper", metavar="TABLE", default="auto", help=table)
    comparison = (
        "a comparison with LN that was planned before the runs, such as PN:loss; tested without "
        "correction "
    )
    comparison += (
        "for the other comparisons. MEASURE is bleu, chrf, ter, loss (validation) or bits (test "
        "loss of a "
    )
    comparison += "language model). May be repeated"
    add("--planned", action="append", default=[], metavar="SYSTEM:MEASURE", help=comparison)
    add(
        "--resamples",
        type=whole,
        metavar="N",
        help="texts in the paired bootstrap (default: sacrebleu's, 1000)",
    )
    args = parser.parse_args(argv)
    check_folders(args.runs)

    # Imported here, so that --help and a misspelt name are answered at once.
    from pn_fairseq.pipeline.paired_bootstrap import RESAMPLES
    from pn_fairseq.report import page, perplexity, translation
    from pn_fairseq.report.runs import read_runs
    from pn_fairseq.report.significance import SHORT_NAMES
    from pn_fairseq.report.systems import group

    paper = args.paper
    if paper.endswith((".yaml", ".yml")):
        paper = read_table(Path(paper))
    elif paper not in (known := ("auto", *PAPER, *LM_PAPER, "none")):
        raise UserError(f"--paper: {unknown('table', paper, known)}")
    planned = []
    for text in args.planned:
        system, _, measure = text.rpartition(":")
        if not system or measure not in SHORT_NAMES:
            hint = did_you_mean(measure, SHORT_NAMES) or f"; MEASURE is {', '.join(SHORT_NAMES)}"
            raise UserError(f"--planned {text!r} is not SYSTEM:MEASURE, such as PN:loss{hint}")
        planned.append((system, SHORT_NAMES[measure]))
    runs = read_runs(args.runs, args.subset)
    corpora = group([run for run in runs if run.known])
    systems = {label for corpus in corpora for label in corpus.settings}
    if absent := [system for system, _ in planned if system not in systems]:
        raise UserError(
            f"--planned {absent[0]}: there is no such system{did_you_mean(absent[0], systems)}"
        )
    kinds = {run.language_model for run in runs if run.settings_by_name}
    if len(kinds) > 1:
        raise UserError("some runs are language models and some are not: report on them apart")
    language_models = kinds == {True}
    if args.paper not in ("auto", "none") and language_models is not (args.paper in LM_PAPER):
        raise UserError(
            f"--paper {args.paper} is {'not ' if language_models else ''}of language models, "
            "unlike the runs"
        )

    resamples = args.resamples or RESAMPLES
    if language_models:
        content = functools.partial(perplexity.content, paper=paper, subset=args.subset)
    else:
        content = functools.partial(translation.content, paper=paper, resamples=resamples)
    shown = {"language_models": language_models, "subset": args.subset, "resamples": resamples}
    print(*page.write(args.output, runs, corpora, content, planned, **shown), sep="\n")
