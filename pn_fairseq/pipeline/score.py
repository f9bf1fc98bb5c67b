"""``pn score``: scores of a run or of text files, and comparisons of runs."""

import argparse
import sys
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path

from tabulate import tabulate

from pn_fairseq.common.command import ArgumentParser, UserError, say, whole
from pn_fairseq.common.files import check_file, read_lines, short_names
from pn_fairseq.pipeline import RUN_HELP, SUBSET_HELP, outdated
from pn_fairseq.pipeline.data.languages import check_tag
from pn_fairseq.pipeline.metrics import METRICS, Scoring
from pn_fairseq.pipeline.paired_bootstrap import RESAMPLES, Comparison, compare_folders, p_text
from pn_fairseq.pipeline.runs import Run
from pn_fairseq.pipeline.translation_scores import (
    Text,
    check_same_length,
    is_scored,
    low_bleu,
    read_scores,
    score_lines,
    score_run,
    score_texts,
)

#: A difference counts as significant below this p-value.
LEVEL = 0.05

DESCRIPTION = """\
Score the hypotheses of a run or of a text file, or test whether runs differ significantly.

For a run, it prints these scores and writes them to scores.txt and scores.json:
"""

EPILOG = """\
Without hypotheses of pn generate, --run scores generate-SUBSET.txt, which
fairseq-generate --results-path DIR wrote.
The paired bootstrap of text files: sacrebleu REF -i BASELINE FILE --paired-bs
"""

#: Option -> options of which it needs one.
NEEDS = {
    "subset": ("run", "compare"),
    "output": ("run",),
    "compound_split": ("run", "tokenized"),
    "resamples": ("compare",),
    "ref": ("hyp",),
    "tokenized": ("hyp",),
    "lowercase": ("hyp",),
    "target": ("hyp",),
}


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    description = DESCRIPTION
    for metric in METRICS.values():
        line = f"  {metric.title:18}{metric.about}"
        description += textwrap.fill(line, 100, subsequent_indent=" " * 20) + "\n"
    parser = ArgumentParser(prog="pn score", description=description, epilog=EPILOG)
    add, mode = parser.add_argument, parser.add_mutually_exclusive_group(required=True)
    mode.add_argument("--run", type=Path, metavar="DIR", help=RUN_HELP)
    compare = (
        "paired bootstrap by sacrebleu: could the difference between a run and the first one, the "
        "baseline, come from the choice of test sentences? Runs that are not scored yet are scored "
        "first"
    )
    mode.add_argument("--compare", type=Path, nargs="+", metavar="DIR", help=compare)
    mode.add_argument("--hyp", type=Path, metavar="FILE", help="hypotheses, one sentence per line")
    references = (
        "with --hyp: references, one sentence per line; several files give several references per "
        "sentence"
    )
    add("--ref", type=Path, nargs="+", metavar="FILE", help=references)
    add("--subset", metavar="NAME", help=f"subset of the runs: {SUBSET_HELP}")
    add(
        "--output",
        type=Path,
        metavar="DIR",
        help="the --output of pn generate (default: RUN/generate/SUBSET)",
    )
    split = (
        'in tokenized BLEU, split words with hyphens ("rich ##AT##-##AT## text"), as papers on '
        "WMT14 do (default: as the run's data was prepared)"
    )
    add("--compound-split", action=argparse.BooleanOptionalAction, help=split)
    add(
        "--resamples",
        type=whole,
        metavar="N",
        help=f"with --compare: number of resampled texts (default {RESAMPLES})",
    )
    add(
        "--tokenized",
        action="store_true",
        default=None,
        help="the files contain tokens (default: plain text)",
    )
    add("--lowercase", action="store_true", default=None, help="with --hyp: ignore case")
    add(
        "--target",
        metavar="LANG",
        help="with --hyp: the language, which chooses sacrebleu's tokenizer (default: 13a)",
    )
    args = parser.parse_args(argv)
    given = {option for option, value in vars(args).items() if value is not None}
    for option, modes in NEEDS.items():
        if option in given and given.isdisjoint(modes):
            raise UserError(
                f"--{option.replace('_', '-')} needs --{' or --'.join(modes)} (see --help)"
            )
    if args.target:
        check_tag(args.target, "--target")
    if args.hyp and args.ref is None:
        raise UserError("--hyp needs --ref (see --help)")
    return args


def show(comparisons: Mapping[str, Comparison], text: str) -> str:
    """The comparisons as a table."""
    bleu = comparisons["tokenized"].results
    baseline = next(iter(bleu))
    rows, untested = [], []
    for name in bleu:
        # If nothing was learned, a significant difference would only separate two kinds of noise.
        low = low_bleu(min(bleu[name].score, bleu[baseline].score))
        tested = name != baseline and not low
        row = [f"{name} (baseline)" if name == baseline else name]
        for comparison in comparisons.values():
            result = comparison.results[name]
            cell = f"{result.score:.2f} ({result.mean:.2f} ± {result.ci:.2f})"
            if tested:
                cell += f" {p_text(result.p_value)}{' *' * (result.p_value < LEVEL)}"
            row.append(cell)
        rows.append(row)
        if low and name != baseline:
            untested.append(f"{name} is not tested: {low}")
    titles = {name: METRICS[name].title for name in comparisons}
    signatures = [f"{titles[name]}: {each.signature}" for name, each in comparisons.items()]
    lines = [
        f"paired bootstrap: {text}",
        "score (mean of the resamples ± 95% confidence interval), p of no difference from the "
        "baseline",
        "",
        tabulate(rows, headers=["", *titles.values()], tablefmt="plain"),
        "",
        *untested,
        f"* is significant (p < {LEVEL}). Without *, a difference is inconclusive: it may be "
        "chance.",
        "This tests variation over test sentences, not over training seeds; for the latter, "
        "train several seeds.",
        "The p-value is one-sided (sacrebleu's); a two-sided p-value would be about twice as "
        "large.",
        "",
        *signatures,
    ]
    return "\n".join(lines)


def compare_runs(runs: Sequence[Path], subset: str, resamples: int) -> str:
    """The comparison of runs, which are scored first if needed."""
    if len(runs) < 2:
        raise UserError("--compare needs two runs or more, the baseline first (see --help)")
    if len({run.resolve() for run in runs}) != len(runs):
        raise UserError("a run is named twice")
    for run in runs:
        if not is_scored(run, subset):  # a scored run no longer needs its data
            score_run(run, subset)
    folders = {}
    for name, run in zip(short_names(runs), runs, strict=True):
        folders[name] = run / "generate" / subset
        _note_on_outdated(run, folders[name])
    sentences = read_scores(runs[0] / "generate" / subset).sentences
    return show(compare_folders(folders, resamples), f"{subset}, {sentences} sentences")


def _note_on_outdated(run: Path, folder: Path) -> None:
    """Print a note if the run was trained further or averaged again after decoding."""
    hypotheses = folder / "hyp.tok"
    for text in outdated.of_result(str(hypotheses), folder / "made.txt", Run(run).averaged):
        say("score", f"note: {text}")


def main(argv: Sequence[str] | None = None) -> None:
    args = _parse(argv)
    if args.compare:
        print(compare_runs(args.compare, args.subset or "test", args.resamples or RESAMPLES))
        return
    if args.run:
        run = score_run(args.run, args.subset, args.output, args.compound_split)
        scores, warnings = run.by_metric, run.warnings
        _note_on_outdated(args.run, args.output or args.run / "generate" / run.subset)
    else:
        for option, file in [("--hyp", args.hyp), *(("--ref", ref) for ref in args.ref)]:
            check_file(file, option)
        texts = {str(file): read_lines(file) for file in (args.hyp, *args.ref)}
        text = Text(texts[str(args.hyp)], [texts[str(file)] for file in args.ref])
        check_same_length(texts, text.references[0], str(args.ref[0]))
        lowercase = bool(args.lowercase)
        scoring = Scoring(lowercase, args.target or "", bool(args.compound_split), lowercase)
        kind = "tokens" if args.tokenized else "plain"
        scores, warnings = score_texts(scoring, **{kind: text})
    print(*score_lines(scores), sep="\n")
    bleu = scores.get("tokenized") or scores.get("detokenized")
    low = low_bleu(bleu.score) if bleu else None
    if low:
        warnings = [*warnings, low]
    for warning in warnings:
        print(f"pn score: warning: {warning}", file=sys.stderr)
