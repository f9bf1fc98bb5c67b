"""``pn-score``: scores of a decoding or of text files, and whether two of them differ significantly."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from pn_fairseq.pipeline.command import ArgumentParser, UserError, command

#: A difference counts as significant below this p-value.
LEVEL = 0.05

_USAGE = """\
pn-score --run DIR [--subset test] [--output DIR] [--compound-split | --no-compound-split]
       pn-score --compare BASELINE DIR [DIR ...] [--subset test] [--resamples N] [--seed N]
       pn-score --hyp FILE --ref FILE [--tokenized] [--lowercase] [--target LANG] [--compare FILE ...]"""

_DESCRIPTION = """\
BLEU and chrF of the hypotheses of a run, or of any text, and whether the difference between two is significant.

Of a run it prints, and writes to scores.txt and scores.json:
  tokenized BLEU    on the tokens as prepared: what multi-bleu and fairseq-generate print and the paper reports
  detokenized BLEU  sacreBLEU on plain text, with its signature; case is ignored if the data was lower-cased. The
                    hypotheses are detokenized by sacremoses and, for typographic quotation marks, by rules of this
                    project ("+quotes" in the signature)
  chrF              the same for character n-grams
"""


@command("pn-score")
def main(argv: Sequence[str] | None = None) -> None:
    """Run ``pn-score`` on ``argv`` (by default the process's arguments)."""
    from pn_fairseq.pipeline.scoring import RESAMPLES, SEED, score_run

    parser = ArgumentParser(
        prog="pn-score",
        usage=_USAGE,
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--run", type=Path, metavar="DIR", help="a run of scripts/train.sh that scripts/generate.sh decoded; or a folder "
        "of fairseq-train with the generate-SUBSET.txt of fairseq-generate --results-path DIR --remove-bpe")  # fmt: skip
    add("--subset", help="test (default) or valid")
    add("--output", type=Path, metavar="DIR", help="what generate.sh was given (default: RUN/generate/SUBSET)")
    add("--compound-split", action=argparse.BooleanOptionalAction, help='in tokenized BLEU, split words with hyphens '
        '("rich ##AT##-##AT## text"), as papers on WMT14 do (default: what the data was prepared for)')  # fmt: skip
    add("--hyp", type=Path, metavar="FILE", help="hypotheses, a line for each sentence")
    add("--ref", type=Path, metavar="FILE", help="references, a line for each sentence")
    add("--tokenized", action="store_true", help="the files hold tokens: tokenized BLEU (default: plain text)")
    add("--lowercase", action="store_true", help="ignore case")
    add("--target", metavar="LANG", help="language of the text, which chooses sacrebleu's tokenizer (default: 13a); of a "
        "run it is known")  # fmt: skip
    add("--compare", type=Path, nargs="+", metavar="PATH", help="is the difference between each run and the first, or "
        "each file and --hyp, more than the choice of test sentences? Paired bootstrap by sacrebleu: a table and what it "
        "means")  # fmt: skip
    add("--resamples", type=int, metavar="N", help=f"resampled sets of sentences (default: {RESAMPLES})")
    add("--seed", type=int, metavar="N", help=f"of the resampling (default: {SEED})")
    args = parser.parse_args(argv)
    given = {
        name
        for name, value in vars(args).items()
        if value not in (None, False) or name == "compound_split" and value is False
    }

    def check(mode: str, needed: set[str], optional: set[str]) -> bool:
        """Whether the mode is chosen; its options must be there, and no others."""
        if not given & needed:
            return False
        for name in sorted(needed - given):
            raise UserError(f"{mode} needs --{name}, too (see pn-score --help)")
        for name in sorted(given - needed - optional):
            raise UserError(f"--{name.replace('_', '-')} does not go with {mode} (see pn-score --help)")
        return True

    bootstrap = {"resamples", "seed"}
    if given & bootstrap and "compare" not in given:
        raise UserError(f"--{min(given & bootstrap)} goes with --compare (see pn-score --help)")
    options = {"resamples": RESAMPLES if args.resamples is None else args.resamples, "seed": args.seed or SEED}
    if args.seed is not None and args.seed < 1 or options["resamples"] < 1:
        raise UserError("--resamples and --seed must be at least 1")
    subset = args.subset or "test"
    if check("--hyp", {"hyp", "ref"}, {"tokenized", "lowercase", "target", "compound_split", "compare", *bootstrap}):
        score_files(args, options)
    elif check("--run", {"run"}, {"subset", "output", "compound_split"}):
        scores = score_run(args.run, subset, args.output, args.compound_split)
        print(scores.text(), end="")
        _warn(scores.tokenized.score)
    elif check("--compare", {"compare"}, {"subset", *bootstrap}):
        compare_runs(args.compare, subset, options)
    else:
        raise UserError("--run, --compare or --hyp is needed (see pn-score --help)")


def _warn(bleu: float) -> None:
    from pn_fairseq.pipeline.scoring import LEAST_BLEU

    if bleu < LEAST_BLEU:
        print(
            f"pn-score: warning: BLEU is below {LEAST_BLEU:g}: the model has hardly learned to translate, or hypotheses "
            "and references do not belong together",
            file=sys.stderr,
        )


def compare_runs(runs: Sequence[Path], subset: str, options: Mapping[str, int]) -> None:
    """Print the comparison of runs, which are scored first where they are not."""
    from pn_fairseq.pipeline.scoring import compare_folders, read_scores, score_run
    from pn_fairseq.report.runs import short_names

    if len(runs) < 2:
        raise UserError("--compare needs two runs or more, the baseline first (see pn-score --help)")
    if len({run.resolve() for run in runs}) != len(runs):
        raise UserError("a run is named twice")
    folders = {name: run / "generate" / subset for name, run in zip(short_names(runs), runs, strict=True)}
    for run, folder in zip(runs, folders.values(), strict=True):
        scores, hypotheses = folder / "scores.json", folder / "hyp.tok"
        # What is scored needs its data no more.
        if not scores.is_file() or (hypotheses.is_file() and hypotheses.stat().st_mtime_ns > scores.stat().st_mtime_ns):
            score_run(run, subset)
    found = compare_folders(folders, **options)
    print(show(found, f"{subset}, {read_scores(folders[next(iter(folders))]).sentences} sentences", **options))


def score_files(args: argparse.Namespace, options: Mapping[str, int]) -> None:
    """Print the scores of text files, or their comparison."""
    from pn_fairseq.pipeline.scoring import paired_bootstrap, read_lines, score, score_lines
    from pn_fairseq.report.runs import short_names

    settings = {"lowercase": args.lowercase}
    metrics = {"detokenized": settings | {"target": args.target or ""}, "chrf": settings}
    if args.tokenized:
        metrics = {"tokenized": settings | {"compound_split": bool(args.compound_split)}}
    files = [args.hyp, *(args.compare or [])]
    texts = dict(zip(short_names(files), map(read_lines, files), strict=True))
    reference = read_lines(args.ref)
    if len(texts) != len(files):
        raise UserError("a file of hypotheses is named twice")
    if args.compare:
        found = {
            metric: paired_bootstrap(texts, reference, metric=metric, **options, **of_metric)
            for metric, of_metric in metrics.items()
        }
        print(show(found, f"{args.ref.name}, {len(reference)} sentences", **options))
        return
    scores = {metric: score(metric, next(iter(texts.values())), reference, **one) for metric, one in metrics.items()}
    print(score_lines(scores), end="")
    _warn(next(iter(scores.values())).score)


def show(comparisons: Mapping, text: str, resamples: int, seed: int) -> str:
    """The comparisons as a table and as plain language."""
    from tabulate import tabulate

    from pn_fairseq.pipeline.scoring import METRICS, p_text

    baseline, *others = next(iter(comparisons.values())).results
    rows, verdicts = [], []
    for name in (baseline, *others):
        row = [f"{name} (baseline)" if name == baseline else name]
        for metric, comparison in comparisons.items():
            one, first = comparison.results[name], comparison.results[baseline]
            row.append(f"{one.score:.2f} ({one.mean:.2f} ± {one.ci:.2f})")
            if name == baseline:
                continue
            significant = one.p_value < LEVEL
            row[-1] += f" {p_text(one.p_value)}{' *' * significant}"
            if one.score == first.score:
                verdicts.append(f"{name}: {METRICS[metric]} is the same as {baseline}'s ({p_text(one.p_value)})")
                continue
            verdicts.append(
                f"{name}: {METRICS[metric]} is {abs(one.score - first.score):.2f} "
                f"{'higher' if one.score > first.score else 'lower'} than {baseline}'s: "
                f"{'significant' if significant else 'inconclusive, it may be chance'} ({p_text(one.p_value)})"
            )
        rows.append(row)
    return "\n".join([
        f"paired bootstrap: {text}, {resamples} resamples, seed {seed}",
        f"score (mean of the resamples ± 95% confidence interval); * is p < {LEVEL} against the baseline",
        "",
        tabulate(rows, headers=["", *(METRICS[metric] for metric in comparisons)], tablefmt="plain"),
        "",
        *verdicts,
        "",
        "This tests variation over test sentences, not over training seeds; for the latter, train several seeds.",
        "p is sacrebleu's, which counts one tail: a two-sided p would be about twice as large.",
        "",
        *(f"{METRICS[metric]}: {comparison.signature}" for metric, comparison in comparisons.items()),
    ])  # fmt: skip
