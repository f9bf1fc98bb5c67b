"""``pn score``: scores of decodings and of text files, and the significance of differences between runs."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from pn_fairseq.common.command import ArgumentParser, UserError, command, whole
from pn_fairseq.pipeline import RUN_HELP

if TYPE_CHECKING:  # imports sacrebleu and sacremoses, which --help does not need
    from pn_fairseq.pipeline.scoring import Comparison, Score

#: A difference counts as significant below this p-value.
LEVEL = 0.05

DESCRIPTION = """\
BLEU and chrF of the hypotheses of a run or of a text file, and the significance of differences between runs.

For a run, it prints these scores and writes them to scores.txt and scores.json:
  tokenized BLEU    on the tokens as prepared: the value of multi-bleu and fairseq-generate, and of the paper
  detokenized BLEU  sacreBLEU on plain text, with its signature; case is ignored if the data was lower-cased
  chrF              on plain text, the F-score of character n-grams
"""

EPILOG = """\
Without hypotheses of pn generate, --run scores generate-SUBSET.txt, which fairseq-generate --results-path DIR wrote.
The paired bootstrap of text files: sacrebleu REF -i BASELINE FILE --paired-bs
"""

#: Option -> the options of which it needs one.
NEEDS = {
    **{"subset": ("run", "compare"), "output": ("run",), "compound_split": ("run", "tokenized")},
    **{"resamples": ("compare",), "seed": ("compare",)},
    **{"ref": ("hyp",), "tokenized": ("hyp",), "lowercase": ("hyp",), "target": ("hyp",)},
}


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = ArgumentParser(prog="pn score", description=DESCRIPTION, epilog=EPILOG)
    mode = parser.add_mutually_exclusive_group(required=True)
    mode.add_argument("--run", type=Path, metavar="DIR", help=RUN_HELP)
    compare = "paired bootstrap by sacrebleu: could the difference between a run and the first one, the baseline, come "
    compare += "from the choice of test sentences? Runs that are not scored yet are scored first"
    mode.add_argument("--compare", type=Path, nargs="+", metavar="DIR", help=compare)
    mode.add_argument("--hyp", type=Path, metavar="FILE", help="hypotheses, a line for each sentence")
    add = parser.add_argument
    add("--ref", type=Path, metavar="FILE", help="with --hyp: references, a line for each sentence")
    add("--subset", metavar="NAME", help="of the runs: test (default) or valid")
    add("--output", type=Path, metavar="DIR", help="the --output of pn generate (default: RUN/generate/SUBSET)")
    split = 'in tokenized BLEU, split words with hyphens ("rich ##AT##-##AT## text"), as papers on WMT14 do (default: '
    split += "as the run's data was prepared)"
    add("--compound-split", action=argparse.BooleanOptionalAction, help=split)
    add("--resamples", type=whole, metavar="N", help="with --compare: resampled sets of sentences (default 1000)")
    add("--seed", type=whole, metavar="N", help="with --compare: seed of the resampling (default 12345)")
    add("--tokenized", action="store_true", default=None, help="the files hold tokens (default: plain text)")
    add("--lowercase", action="store_true", default=None, help="with --hyp: ignore case")
    add("--target", metavar="LANG", help="with --hyp: the language, which chooses sacrebleu's tokenizer (default: 13a)")
    args = parser.parse_args(argv)
    for option, modes in NEEDS.items():
        if getattr(args, option) is not None and all(getattr(args, name) is None for name in modes):
            raise UserError(f"--{option.replace('_', '-')} needs --{' or --'.join(modes)} (see --help)")
    if args.hyp and args.ref is None:
        raise UserError("--hyp needs --ref (see --help)")
    return args


@command("pn score")
def main(argv: Sequence[str] | None = None) -> None:
    args = _parse(argv)

    from pn_fairseq.pipeline import scoring

    if args.compare:
        options = {name: getattr(args, name) for name in ("resamples", "seed") if getattr(args, name) is not None}
        compare_runs(args.compare, args.subset or "test", options)
    elif args.run:
        scores = scoring.score_run(args.run, args.subset, args.output, args.compound_split)
        _print({metric: getattr(scores, metric) for metric in scoring.METRICS})
    else:
        score_file(args)


def _print(scores: Mapping[str, Score]) -> None:
    from pn_fairseq.pipeline.scoring import low_bleu, score_lines

    print(score_lines(scores), end="")
    if warning := low_bleu(next(iter(scores.values())).score):
        print(f"pn score: warning: {warning}", file=sys.stderr)


def score_file(args: argparse.Namespace) -> None:
    """Print the scores of a text file."""
    from pn_fairseq.pipeline.scoring import read_lines, score

    texts, case = (read_lines(args.hyp), read_lines(args.ref)), {"lowercase": bool(args.lowercase)}
    metrics = {"detokenized": {"target": args.target or ""}, "chrf": {}}
    if args.tokenized:
        metrics = {"tokenized": {"compound_split": bool(args.compound_split)}}
    _print({metric: score(metric, *texts, **case, **settings) for metric, settings in metrics.items()})


def compare_runs(runs: Sequence[Path], subset: str, bootstrap: Mapping[str, int]) -> None:
    """Print the comparison of runs, which are scored first if they are not."""
    from pn_fairseq.common.files import short_names
    from pn_fairseq.pipeline import scoring

    if len(runs) < 2:
        raise UserError("--compare needs two runs or more, the baseline first (see --help)")
    if len({run.resolve() for run in runs}) != len(runs):
        raise UserError("a run is named twice")
    for run in runs:
        if not scoring.is_scored(run, subset):  # a scored run needs its data no more
            scoring.score_run(run, subset)
    folders = {name: run / "generate" / subset for name, run in zip(short_names(runs), runs, strict=True)}
    sentences = scoring.read_scores(runs[0] / "generate" / subset).sentences
    print(show(scoring.compare_folders(folders, **bootstrap), f"{subset}, {sentences} sentences"))


def show(comparisons: Mapping[str, Comparison], text: str) -> str:
    """The comparisons as a table and as sentences."""
    from tabulate import tabulate

    from pn_fairseq.pipeline.scoring import METRICS, low_bleu, p_text

    bleu = next(iter(comparisons.values()))
    baseline, rows, verdicts = next(iter(bleu.results)), [], []
    for name in bleu.results:
        # Where nothing was learned, a significant difference would be one between two kinds of noise.
        low = next(filter(None, (low_bleu(bleu.results[system].score) for system in (name, baseline))), None)
        row = [f"{name} (baseline)" if name == baseline else name]
        for metric, comparison in comparisons.items():
            result = comparison.results[name]
            row.append(f"{result.score:.2f} ({result.mean:.2f} ± {result.ci:.2f})")
            if name == baseline or low:
                continue
            significant, p = result.p_value < LEVEL, p_text(result.p_value)
            row[-1] += f" {p}{' *' * significant}"
            difference = result.score - comparison.results[baseline].score
            verdict = f"the same as {baseline}'s"
            if difference:
                verdict = f"{abs(difference):.2f} {'higher' if difference > 0 else 'lower'} than {baseline}'s: "
                verdict += "significant" if significant else "inconclusive, it may be chance"
            verdicts.append(f"{name}: {METRICS[metric]} is {verdict} ({p})")
        if low and name != baseline:
            verdicts.append(f"{name} and {baseline}: not tested. {low}")
        rows.append(row)
    return "\n".join([
        f"paired bootstrap: {text}, {bleu.resamples} resamples, seed {bleu.seed}",
        f"score (mean of the resamples ± 95% confidence interval); * is p < {LEVEL} against the baseline",
        "",
        tabulate(rows, headers=["", *(METRICS[metric] for metric in comparisons)], tablefmt="plain"),
        "",
        *verdicts,
        "",
        "This tests variation over test sentences, not over training seeds; for the latter, train several seeds.",
        "The p-value is one-sided (sacrebleu's); a two-sided p-value would be about twice as large.",
        "",
        *(f"{METRICS[metric]}: {comparison.signature}" for metric, comparison in comparisons.items()),
    ])  # fmt: skip
