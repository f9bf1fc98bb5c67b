"""``pn report``: a page about training runs, with published numbers next to their results."""

from __future__ import annotations

import argparse
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from pn_fairseq.common.command import ArgumentParser, UserError, did_you_mean, whole
from pn_fairseq.common.errors import unknown
from pn_fairseq.common.files import check_can_be_folder, check_folders
from pn_fairseq.pipeline.published import LM_PAPER, PAPER, read_table
from pn_fairseq.report.measures import MEASURES

if TYPE_CHECKING:
    from pn_fairseq.report.systems import CorpusRuns

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

RUN/generate/SUBSET/measures.json adds scores of your own, such as COMET (docs/compare.md).

Runs that differ only by their seed are averaged. Systems are compared with LN within blocks, the
runs of one seed on one machine; runs on different data are never compared. The report lists what
failed or is missing in a run. The numbers of the PowerNorm paper's Table 1 are shown next to runs
on its data, recognised by languages, case, BPE and the size of the test set; --paper selects
another table, or none. The report on language models shows perplexities.
"""


_PAPER_HELP = f"""\
the published table to show next to the results: a YAML file of yours (docs/compare.md), none, or
one of {", ".join(PAPER)}; for language models ptb or wikitext103 (Tables 2 and 3 of the PowerNorm
paper) or enwik8 (AdaNorm paper); default: chosen by the data"""

_PLANNED_HELP = """\
a comparison with LN that was planned before the runs, such as PN:loss; tested without correction
for the other comparisons. MEASURE is {measures} or a name in measures.json. May be
repeated"""


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = ArgumentParser(
        prog="pn report",
        description="Report on training runs: scores over seeds, published scores, differences "
        "from LN, learning curves, settings, versions, hardware, speed, and failures.",
        epilog=_EPILOG,
    )
    add = parser.add_argument
    add("runs", nargs="+", type=Path, metavar="RUN", help="folder of a run")
    output = "where to write; created if needed"
    add("--output", required=True, type=Path, metavar="DIR", help=output)
    add("--subset", default="test", help="decoded subset to report on (default: test)")
    add("--paper", metavar="TABLE", default="auto", help=_PAPER_HELP)
    tested = [measure for measure in MEASURES.values() if measure.margin]
    listed = [f"{measure.short} ({measure.title.partition(' (')[0]})" for measure in tested]
    planned = _PLANNED_HELP.format(measures=", ".join(listed))
    add("--planned", action="append", default=[], metavar="SYSTEM:MEASURE", help=planned)
    resamples = "texts in the paired bootstrap (default: sacrebleu's, 1000)"
    add("--resamples", type=whole, metavar="N", help=resamples)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    """Run ``pn report`` on ``argv`` (by default the process's arguments)."""
    args = _parse(argv)
    check_folders(path for path in args.runs if path.name != "multirun.yaml")  # from `SWEEP/*`
    check_can_be_folder(args.output, "--output")

    # Imported here, so that --help and a misspelt name are answered at once.
    from pn_fairseq.pipeline.paired_bootstrap import RESAMPLES
    from pn_fairseq.report import page, perplexity, translation
    from pn_fairseq.report.runs import read_runs
    from pn_fairseq.report.systems import group

    paper = args.paper
    known_tables = ("auto", *PAPER, *LM_PAPER, "none")
    if paper.endswith((".yaml", ".yml")):
        paper = read_table(Path(paper))
    elif paper not in known_tables:
        raise UserError(f"--paper: {unknown('table', paper, known_tables)}")
    runs = read_runs(args.runs, args.subset)
    corpora = group([run for run in runs if run.known])
    planned = [_planned(text, corpora) for text in args.planned]
    kinds = {run.language_model for run in runs if run.settings_by_name}
    if len(kinds) > 1:
        raise UserError("some runs are language models and some are not: report on them apart")
    language_models = kinds == {True}
    for_language_models = args.paper in LM_PAPER
    is_table = args.paper not in ("auto", "none")
    if is_table and kinds and for_language_models != language_models:
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


def _planned(text: str, corpora: Sequence[CorpusRuns]) -> tuple[str, str]:
    """The system and the column of report.csv that ``--planned`` names."""
    measures = dict(MEASURES)
    systems = set()
    for corpus in corpora:
        measures |= corpus.measures
        systems |= corpus.settings.keys()
    columns = {measure.short: name for name, measure in measures.items() if measure.margin}
    system, _, measure = text.rpartition(":")
    if not system or measure not in columns:
        system, _, measure = text.replace("=", ":").rpartition(":")
        if system and measure in columns:
            hint = f", did you mean '{system}:{measure}'?"
        else:
            listed = f"; MEASURE is {', '.join(columns)}"
            hint = f", such as PN:loss{did_you_mean(measure, columns) or listed}"
        raise UserError(f"--planned {text!r} is not SYSTEM:MEASURE{hint}")
    if system not in systems:
        hint = did_you_mean(system, systems)
        raise UserError(f"--planned {system}: there is no such system{hint}")
    return system, columns[measure]
