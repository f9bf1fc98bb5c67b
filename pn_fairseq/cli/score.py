"""``python -m pn_fairseq.cli.score``: scores of one decoding, or of the differences between runs. For ``score.sh``."""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from pn_fairseq.cli import ArgumentParser, UserError, command
from pn_fairseq.scoring import (
    RESAMPLES,
    SEED,
    Comparison,
    ScoringError,
    compare_folders,
    read_lines,
    read_scores,
    score_folder,
)

TOOL = "score.sh"
TITLES = {"tokenized": "tokenized BLEU", "detokenized": "detokenized BLEU", "chrf": "chrF"}

#: A difference counts as significant below this p-value.
LEVEL = 0.05


def names_of(runs: Sequence[Path]) -> list[str]:
    """The names of the runs' directories, or, where two have the same, their paths."""
    if len({run.resolve() for run in runs}) != len(runs):
        raise UserError("a run is named twice")
    names = [run.resolve().name for run in runs]
    return names if len(set(names)) == len(names) else [str(run) for run in runs]


def scored(run: Path, subset: str) -> Path:
    """The folder of a run's decoding, which is scored first if it is not."""
    folder = run / "generate" / subset
    scores, hypotheses = folder / "scores.json", folder / "hyp.tok"
    if not scores.is_file() or (hypotheses.is_file() and hypotheses.stat().st_mtime_ns > scores.stat().st_mtime_ns):
        score_folder(folder, Path("\n".join(read_lines(run / "data"))), subset)
    return folder


def show(comparisons: Mapping[str, Comparison], subset: str, sentences: int) -> str:
    """The comparisons as a table and as plain language."""
    first = next(iter(comparisons.values()))
    rows = [["", *(TITLES[metric] for metric in comparisons)]]
    for number in range(len(first.systems) + 1):
        results = [(one.baseline, *one.systems)[number] for one in comparisons.values()]
        cells = []
        for result in results:
            cell = f"{result.score:.2f} ({result.mean:.2f} ± {result.ci:.2f})"
            if result.p_value is not None:
                cell += f" p = {result.p_value:.4f}{' *' if result.p_value < LEVEL else ''}"
            cells.append(cell)
        rows.append([f"{results[0].name}{' (baseline)' * (number == 0)}", *cells])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        f"paired bootstrap: {subset}, {sentences} sentences, {first.resamples} resamples, seed {first.seed}",
        "score (mean of the resamples ± 95% confidence interval); * is p < 0.05, two-sided, against the baseline",
        "",
        *("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows),
        "",
    ]
    for number, system in enumerate(first.systems):
        for metric, one in comparisons.items():
            result = one.systems[number]
            difference = result.score - one.baseline.score
            verdict = "significant" if result.p_value < LEVEL else "not significant, it may be chance"
            what = f"{abs(difference):.2f} {'higher' if difference > 0 else 'lower'}" if difference else "the same"
            lines.append(
                f"{system.name}: {TITLES[metric]} is {what} {'than' if difference else 'as'} {one.baseline.name}'s: "
                f"{verdict} (p = {result.p_value:.4f})"
            )
    lines += [
        "",
        "This is about the choice of the test's sentences, not of a training's seed: train several seeds for that.",
    ]
    lines += ["", *(f"{TITLES[metric]}: {one.signature}" for metric, one in comparisons.items())]
    return "\n".join(lines)


@command(TOOL, ScoringError)
def main(argv: Sequence[str] | None = None) -> None:
    """Run the tool on ``argv`` (by default the process's arguments) and return its exit code: 0, 2 or 130."""
    parser = ArgumentParser(prog=TOOL, description="Score translations that scripts/generate.sh made.")
    commands = parser.add_subparsers(dest="command", required=True, parser_class=ArgumentParser)
    one = commands.add_parser("one", help="BLEU and chrF of one folder")
    one.add_argument("folder", type=Path, help="what generate.sh made: RUN/generate/SUBSET")
    one.add_argument("data", type=Path, help="the prepared data")
    one.add_argument("subset")
    one.add_argument("--compound-split", action="store_true", default=None)
    one.add_argument("--no-compound-split", dest="compound_split", action="store_false")
    compare = commands.add_parser("compare", help="paired bootstrap of runs, the first is the baseline")
    compare.add_argument("subset")
    compare.add_argument("runs", nargs="+", type=Path, metavar="run", help="what train.sh made")
    compare.add_argument("--resamples", type=int, default=RESAMPLES)
    compare.add_argument("--seed", type=int, default=SEED)
    args = parser.parse_args(argv)
    if args.command == "one":
        print(score_folder(args.folder, args.data, args.subset, compound_split=args.compound_split).text(), end="")
        return
    names = names_of(args.runs)
    folders = [scored(run, args.subset) for run in args.runs]
    found = compare_folders(
        (names[0], folders[0]),
        dict(zip(names[1:], folders[1:], strict=True)),
        resamples=args.resamples,
        seed=args.seed,
    )
    print(show(found, args.subset, read_scores(folders[0]).sentences))


if __name__ == "__main__":
    sys.exit(main())
