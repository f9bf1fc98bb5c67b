"""``scripts/score.sh`` and ``pn-score``: scores of decodings and of text files, and the significance of differences."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from pn_fairseq.common.command import ArgumentParser, UserError, command, whole
from pn_fairseq.pipeline import scoring

#: A difference counts as significant below this p-value.
LEVEL = 0.05

#: Both names are the same command.
_TOOL = "pn-score" if Path(sys.argv[0]).name == "pn-score" else "score.sh"

_USAGE = """\
scripts/score.sh --run DIR [--subset test] [--output DIR] [--compound-split | --no-compound-split]
       scripts/score.sh --compare BASELINE DIR [DIR ...] [--subset test] [--resamples N] [--seed N]
       scripts/score.sh --hyp FILE --ref FILE [--tokenized [--compound-split]] [--lowercase] [--target LANG]
                        [--compare FILE ... [--resamples N] [--seed N]]"""

_DESCRIPTION = """\
BLEU and chrF of the hypotheses of a run, or of any text, and whether differences are significant.

Of a run it prints, and writes to scores.txt and scores.json:
  tokenized BLEU    on the tokens as prepared: what multi-bleu and fairseq-generate print and the paper reports
  detokenized BLEU  sacreBLEU on plain text, with its signature; case is ignored if the data was lower-cased. The
                    hypotheses are detokenized by sacremoses and, for typographic quotation marks, by rules of this
                    project ("+quotes" in the signature)
  chrF              the same for character n-grams
"""

#: Option that chooses what is done -> the options that go with it.
_MODES = {
    "hyp": {"hyp", "ref", "tokenized", "compound_split", "lowercase", "target", "compare", "resamples", "seed"},
    "run": {"run", "subset", "output", "compound_split"},
    "compare": {"compare", "subset", "resamples", "seed"},
}


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = ArgumentParser(
        prog=_TOOL,
        usage=_USAGE.replace("scripts/score.sh", "pn-score") if _TOOL == "pn-score" else _USAGE,
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
    )
    for name, meaning, settings in (
        ("run", "a run that scripts/generate.sh has decoded: of train.sh, fairseq-train or a job of a sweep",
         {"type": Path, "metavar": "DIR"}),
        ("subset", "test (default) or valid", {"metavar": "NAME"}),
        ("output", "the --output of generate.sh (default: RUN/generate/SUBSET)", {"type": Path, "metavar": "DIR"}),
        ("compound-split", 'in tokenized BLEU, split words with hyphens ("rich ##AT##-##AT## text"), as papers on '
         "WMT14 do (default: what the run's data was prepared for)", {"action": argparse.BooleanOptionalAction}),
        ("hyp", "hypotheses, a line for each sentence", {"type": Path, "metavar": "FILE"}),
        ("ref", "references, a line for each sentence", {"type": Path, "metavar": "FILE"}),
        ("tokenized", "the files hold tokens: print tokenized BLEU (default: they hold plain text)",
         {"action": "store_true"}),
        ("lowercase", "ignore case", {"action": "store_true"}),
        ("target", "language of the text, which chooses sacrebleu's tokenizer (default: 13a)", {"metavar": "LANG"}),
        ("compare", "paired bootstrap by sacrebleu: could the difference between each run and the first, or between "
         "each file and --hyp, come from the choice of test sentences?",
         {"type": Path, "nargs": "+", "metavar": "PATH"}),
        ("resamples", "resampled sets of sentences (default: 1000)", {"type": whole, "metavar": "N"}),
        ("seed", "seed of the resampling (default: 12345)", {"type": whole, "metavar": "N"}),
    ):  # fmt: skip
        parser.add_argument(f"--{name}", help=meaning, **settings)
    args = parser.parse_args(argv)
    args.mode = next((mode for mode in _MODES if mode in args), None)
    if args.mode is None:
        raise UserError("--run, --compare or --hyp is needed (see --help)")
    for name in sorted(vars(args).keys() - _MODES[args.mode] - {"mode"}):
        where = "--compare" if name in ("resamples", "seed") else f"--{args.mode}"
        raise UserError(f"--{name.replace('_', '-')} goes {'with' if where == '--compare' else 'not with'} {where}")
    if args.mode == "hyp" and "ref" not in args:
        raise UserError("--hyp needs --ref, too (see --help)")
    return args


@command(_TOOL)
def main(argv: Sequence[str] | None = None) -> None:
    """Run ``score.sh`` on ``argv`` (by default the process's arguments)."""
    args = _parse(argv)
    given = vars(args)
    bootstrap = {name: given[name] for name in ("resamples", "seed") if name in given}
    if args.mode == "hyp":
        score_files(given, bootstrap)
    elif args.mode == "compare":
        compare_runs(args.compare, given.get("subset", "test"), bootstrap)
    else:
        scores = scoring.score_run(args.run, *(given.get(name) for name in ("subset", "output", "compound_split")))
        _print({metric: getattr(scores, metric) for metric in scoring.METRICS})


def _print(scores: Mapping[str, scoring.Score]) -> None:
    print(scoring.score_lines(scores), end="")
    if warning := scoring.low_bleu(next(iter(scores.values())).score):
        print(f"{_TOOL}: warning: {warning}", file=sys.stderr)


def named(paths: Sequence[Path]) -> dict[str, Path]:
    """What tells the paths apart -> path."""
    from pn_fairseq.common.files import short_names

    if len({path.resolve() for path in paths}) != len(paths):
        raise UserError("a run or a file is named twice")
    return dict(zip(short_names(paths), paths, strict=True))


def compare_runs(runs: Sequence[Path], subset: str, bootstrap: Mapping[str, int]) -> None:
    """Print the comparison of runs, which are scored first where they are not."""
    if len(runs) < 2:
        raise UserError("--compare needs two runs or more, the baseline first (see --help)")
    folders = {name: run / "generate" / subset for name, run in named(runs).items()}
    for run, folder in zip(runs, folders.values(), strict=True):
        scores, hypotheses = folder / "scores.json", folder / "hyp.tok"
        # What is scored needs its data no more.
        if not scores.is_file() or (hypotheses.is_file() and hypotheses.stat().st_mtime_ns > scores.stat().st_mtime_ns):
            scoring.score_run(run, subset)
    found = scoring.compare_folders(folders, **bootstrap)
    print(show(found, f"{subset}, {scoring.read_scores(folder).sentences} sentences"))


def score_files(given: Mapping, bootstrap: Mapping[str, int]) -> None:
    """Print the scores of text files, or their comparison."""
    settings = {"lowercase": "lowercase" in given}
    metrics = {"detokenized": settings | {"target": given.get("target", "")}, "chrf": settings}
    if "tokenized" in given:
        metrics = {"tokenized": settings | {"compound_split": given.get("compound_split", False)}}
    files = named([given["hyp"], *given.get("compare", [])])
    texts = {name: scoring.read_lines(file) for name, file in files.items()}
    reference = scoring.read_lines(given["ref"])
    if "compare" in given:
        found = {
            metric: scoring.paired_bootstrap(texts, reference, metric=metric, **bootstrap, **of_metric)
            for metric, of_metric in metrics.items()
        }
        print(show(found, f"{given['ref'].name}, {len(reference)} sentences"))
        return
    (hypotheses,) = texts.values()
    _print({metric: scoring.score(metric, hypotheses, reference, **each) for metric, each in metrics.items()})


def show(comparisons: Mapping, text: str) -> str:
    """The comparisons as a table and as plain language."""
    from tabulate import tabulate

    one = next(iter(comparisons.values()))
    baseline, rows, verdicts = next(iter(one.results)), [], []
    for name in one.results:
        row = [f"{name} (baseline)" if name == baseline else name]
        for metric, comparison in comparisons.items():
            result, first = comparison.results[name], comparison.results[baseline]
            row.append(f"{result.score:.2f} ({result.mean:.2f} ± {result.ci:.2f})")
            if name == baseline:
                continue
            significant, p = result.p_value < LEVEL, scoring.p_text(result.p_value)
            row[-1] += f" {p}{' *' * significant}"
            difference = result.score - first.score
            verdict = f"the same as {baseline}'s"
            if difference:
                verdict = f"{abs(difference):.2f} {'higher' if difference > 0 else 'lower'} than {baseline}'s: "
                verdict += "significant" if significant else "inconclusive, it may be chance"
            verdicts.append(f"{name}: {scoring.METRICS[metric]} is {verdict} ({p})")
        rows.append(row)
    return "\n".join([
        f"paired bootstrap: {text}, {one.resamples} resamples, seed {one.seed}",
        f"score (mean of the resamples ± 95% confidence interval); * is p < {LEVEL} against the baseline",
        "",
        tabulate(rows, headers=["", *(scoring.METRICS[metric] for metric in comparisons)], tablefmt="plain"),
        "",
        *verdicts,
        "",
        "This tests variation over test sentences, not over training seeds; for the latter, train several seeds.",
        "p is sacrebleu's, which counts one tail: a two-sided p would be about twice as large.",
        "",
        *(f"{scoring.METRICS[metric]}: {comparison.signature}" for metric, comparison in comparisons.items()),
    ])  # fmt: skip
