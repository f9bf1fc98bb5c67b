"""docs/results, and what other pages show of it: ``python -m tests.docs.results [CHECKOUT [REPORT...]]`` writes them.

With CHECKOUT, the copy of the repository in which scripts/compare_norms.sh, scripts/reproduce_verses_lm.sh and
scripts/sweep_batch_size.sh were run, `pn-report` writes the reports anew from the runs that are finished or failed, as
docs/results/REPORT (default: all of `RUNS`). A corpus can have reports of several copies, as REPORT and REPORT-NAME;
the page shows the runs of all. The sweep also has a picture, docs/figures/figure-5.png. Everything between
``<!-- NAME: generated -->`` and ``<!-- end of NAME -->`` is computed from the reports; test_results.py fails where a
page says anything else.
"""

import contextlib
import logging
import math
import re
import shutil
import sys
from collections import Counter
from pathlib import Path

import pandas

from pn_fairseq.pipeline.experiments import manifest
from pn_fairseq.pipeline.reproduce import CORPORA as CORPORA_OF_RUNS
from pn_fairseq.pipeline.reproduce import trainings
from pn_fairseq.report.command import main as pn_report
from pn_fairseq.report.significance import corrected, welch

from .generated import block
from .pages import ROOT

RESULTS = ROOT / "docs/results"
CORPORA = {"verses": "Bible verses, Spanish to English", "multi30k": "Multi30k, German to English"}
#: The report of the language models; scripts/reproduce_verses_lm.sh makes their runs.
LM = "verses_lm"
#: The report of the runs with different mini-batches, and the folder of these runs; scripts/sweep_batch_size.sh.
SWEEP = "batch_size"
SWEEP_RUNS = "batch_size_verses"
PICTURE = ROOT / "docs/figures/figure-5.png"
#: Report -> its runs. Those with other learning rates are in folders of their own, CORPUS_lr*.
RUNS = {
    **{corpus: f"compare_norms/{corpus}*/*_seed*" for corpus in CORPORA},
    LM: f"{LM}_en/*_seed*",
    SWEEP: f"{SWEEP_RUNS}/tokens*/*_seed*",
}
COMMAND = "python -m tests.docs.results"

#: A difference of BLEU from one seed that is smaller is not named at all.
SMALLEST = 0.3
#: How `systems` begins what it says of a significant difference.
SIDES = ("above", "below")
NOTHING = "No run is finished."
UNCOMPARED = "No two of these runs are finished."
#: Runs that are not in the table of norms: they have tables of their own.
OWN_TABLES = r"_lr[\d.]+/|norm_alpha_"
LOSS = "best validation loss (bits/token)"
#: A run that has one of these is finished or has failed.
RESULT_FILES = ("generate/test/scores.json", "evaluate_lm/test.json", "failed")


def write_reports(checkout: Path, *wanted: str) -> None:
    """`pn-report` of what is finished. ``wanted``: names of reports, REPORT or REPORT-NAME (default: all)."""
    with contextlib.chdir(checkout):  # so that the reports name paths below it
        for report in wanted or RUNS:
            folders = sorted(Path("runs").glob(RUNS[report.partition("-")[0]]))
            done = [each for each in folders if any((each / result).exists() for result in RESULT_FILES)]
            if done and pn_report([*map(str, done), "--output", str(RESULTS / report)]) != 0:
                raise SystemExit(f"no report of {report}")
            if done and report == SWEEP:
                shutil.copy(f"runs/{SWEEP_RUNS}/figures/figure-5.png", PICTURE)


def folders(corpus: str) -> list[Path]:
    """Where the reports of a corpus are."""
    return sorted(
        file.parent for file in [*RESULTS.glob(f"{corpus}/report.csv"), *RESULTS.glob(f"{corpus}-*/report.csv")]
    )


def read(folder: Path) -> pandas.DataFrame:
    """The rows of a report of a corpus. Where it has runs of one folder, its names have no folder; here all do."""
    frame = pandas.read_csv(folder / "report.csv")
    corpus = folder.name.partition("-")[0]
    return frame.assign(run=frame["run"].where(frame["run"].str.contains("/"), f"{corpus}/" + frame["run"]))


def runs_of(corpus: str) -> pandas.DataFrame:
    """The runs of all reports of a corpus, by norm."""
    frame = pandas.concat(map(read, folders(corpus)), ignore_index=True)
    order = {norm: number for number, norm in enumerate(frame["norm"].unique())}
    return frame.sort_values("norm", key=lambda norms: norms.map(order), kind="stable", ignore_index=True)


def reports() -> dict[str, pandas.DataFrame]:
    """Corpus -> its runs, of those that have a report. One that is in several reports counts once, from the first."""
    return {corpus: runs_of(corpus).drop_duplicates("run", ignore_index=True) for corpus in CORPORA if folders(corpus)}


def repeated(corpus: str) -> str:
    """The scores of runs that are in several reports: from the same seed and settings, on another machine."""
    twice = runs_of(corpus).dropna(subset=["tokenized"])
    twice = twice[twice.duplicated("run", keep=False)].groupby("run", sort=False)["tokenized"]
    told = [f"`{run}` {' and '.join(f'{score:.2f}' for score in scores)}" for run, scores in twice]
    return f"Trained again from the same seed, on another machine: {', '.join(told)}." if told else ""


def planned() -> dict[str, Counter]:
    """Corpus -> folder and norm with its settings, as in ``experiments.manifest`` -> number of seeds."""
    found = {corpus: Counter() for corpus in CORPORA}
    for part in manifest():
        found[part.corpus].update(f"{part.folder}/{norm}" for norm in part.norms.split())
    return found


def systems(frame: pandas.DataFrame) -> pandas.DataFrame:
    """System -> ``norm``, ``compared with``, its ``scores`` by seed, the ``difference`` from LN, and what to ``say``.

    A system with one seed is compared with the LN of that seed alone. ``noise`` is half the interval of the difference
    over seeds, where it is tested.
    """
    scored = frame.dropna(subset=["tokenized"]).groupby(["system", "seed"], sort=False)["tokenized"].mean()
    found = frame.groupby("system", sort=False)[["norm", "compared with"]].first()
    by_seed = {label: scored[label] if label in scored else pandas.Series() for label in found.index}
    found["scores"] = [list(by_seed[label]) for label in found.index]
    found["say"], found["difference"], found["noise"], tests = "–", math.nan, math.nan, {}
    for label, other in found["compared with"].items():
        mine, theirs = by_seed[label], by_seed.get(other, pandas.Series())
        if len(mine) == 1:
            theirs = theirs[theirs.index.isin(mine.index)]
        if len(mine) and len(theirs):
            found.loc[label, "difference"] = mine.mean() - theirs.mean()
            tests[label] = welch(list(mine), list(theirs))
    for label, test in tests.items():
        difference = found["difference"][label]
        higher = "higher" if difference > 0 else "lower"
        above = "above" if difference > 0 else "below"
        if test is None:
            large = abs(difference) >= SMALLEST
            say = (
                f"{higher} with one seed; not tested over seeds"
                if large
                else f"inconclusive: one seed, difference below {SMALLEST}"
            )
        else:
            found.loc[label, "noise"] = (test.high - test.low) / 2
            p = corrected(test.p_value, sum(each is not None for each in tests.values()))
            say = f"{above} LN" if p < 0.05 else "inconclusive"
            say += f" (95% interval {test.low:+.2f} to {test.high:+.2f}, p = {p:.3f})".replace("-", "−")
        found.loc[label, "say"] = say
    for row in frame.itertuples():
        if _went_wrong(row):
            found.loc[row.system, "say"] += f"; seed {row.seed}: {str(row.problems).partition('; ')[0]}"
    return found


def _went_wrong(row) -> bool:
    """Whether a run failed or diverged."""
    return "not finite" in str(row.problems) or "NaN" in str(row.problems) or "failed" in str(row.state)


def _spread(values: pandas.Series) -> str:
    return f"{values.mean():.2f}" + (f" ± {values.std():.2f}" if len(values) > 1 else "")


def _signed(value: float) -> str:
    return "–" if math.isnan(value) else f"{round(value, 2) + 0.0:+.2f}".replace("-", "−")  # no −0.00


def _table(rows: list[dict[str, str]]) -> str:
    frame = pandas.DataFrame(rows)
    numbers = ("BLEU", "difference", "perplexity", "with", "validation", "α_bwd")
    sides = ["right" if name.startswith(numbers) else "left" for name in frame]
    return frame.to_markdown(index=False, tablefmt="pipe", disable_numparse=True, colalign=sides)


def answer() -> str:
    """Which norms are above LN, corpus by corpus."""
    lines = [f"- **{CORPORA[corpus]}**: {_answer(systems(frame))}" for corpus, frame in reports().items()]
    return "\n".join(lines) or NOTHING


def _answer(found: pandas.DataFrame) -> str:
    """Which of the systems with several seeds are above LN, and which is the highest."""
    tested = found[found["noise"].notna()]
    if tested.empty:
        return "No norm has several seeds yet, so no conclusion is possible."
    better = tested.index[tested["say"].str.startswith("above LN")]
    count = "1 system was" if len(tested) == 1 else f"{len(tested)} systems were"
    names, are = ", ".join(better) or "no norm", "are" if len(better) > 1 else "is"
    highest = found.loc[tested["difference"].idxmax()]
    score, difference = _spread(pandas.Series(highest["scores"])), highest["difference"]
    return (
        f"{count} compared with LN over several seeds (Welch's t-test, corrected by Bonferroni): "
        f"{names} {are} significantly above it. {highest.name} has the highest mean tokenized BLEU of them, {score}. "
        f"Its mean is {abs(difference):.2f} {'above' if difference > 0 else 'below'} LN's: {highest['say']}. With its "
        f"seeds, differences below about {highest['noise']:.1f} cannot be told from noise."
    )


def table() -> str:
    """What was measured, corpus by corpus."""
    parts = []
    for corpus, frame in reports().items():
        rows = [
            {
                "encoder norm": label,
                "seeds": str(len(row["scores"])),
                "BLEU": _spread(pandas.Series(row["scores"])) if row["scores"] else "–",
                "difference from LN": _signed(row["difference"]),
                "conclusion": row["say"].replace("|", "\\|"),
            }
            for label, row in systems(frame[~frame["run"].str.contains(OWN_TABLES)]).iterrows()
        ]
        parts += [f"### {CORPORA[corpus]}", _table(rows)]
        wrong = sum(map(_went_wrong, frame.itertuples()))
        parts.append(f"Runs that failed, or whose loss or gradient was not finite: {wrong} of {len(frame)}.")
        links = [f"[{each.name}]({each.name}/report.md) ([scores]({each.name}/report.csv))" for each in folders(corpus)]
        parts.append(
            f"Reports: {', '.join(links)} · {max(frame['updates']):,} updates · tokenized BLEU of the test set, "
            "mean ± standard deviation over seeds"
        )
        if text := repeated(corpus):
            parts.append(text)
    return "\n\n".join(parts) or NOTHING


def _first_seeds(pattern: str) -> pandas.DataFrame:
    """The runs of the verses with seed 1 whose folder and norm match; the matches are the index.

    They are those of the report that has the most of them: runs of one machine.
    """
    best = pandas.DataFrame()
    for folder in folders("verses"):
        frame = read(folder)
        found = frame["run"].str.extract(f"^{pattern}_seed1$")
        known = found.notna().any(axis=1) & frame[["tokenized", LOSS]].notna().all(axis=1)
        if known.sum() > len(best):
            best = frame[known].set_index(pandas.MultiIndex.from_frame(found[known].fillna("")))
    return best


def decays() -> str:
    """PN's validation loss by its two decays."""
    number = r"([\d.]+)"
    found = _first_seeds(rf"verses/(pn)(?:\+norm_alpha_fwd={number}\+norm_alpha_bwd={number})?")
    if len(found) < 2:
        return UNCOMPARED
    losses = {(float(fwd or 0.9), float(bwd or 0.9)): row[LOSS] for (_, fwd, bwd), row in found.iterrows()}
    best, grid = min(losses, key=losses.get), sorted({each for pair in losses for each in pair})
    rows = [
        {"α_fwd": f"{fwd:g}"}
        | {f"α_bwd={bwd:g}": f"{losses[fwd, bwd]:.3f}" if (fwd, bwd) in losses else "–" for bwd in grid}
        for fwd in grid
    ]
    lowest = (
        f"The lowest is that of α_fwd = {best[0]:g} and α_bwd = {best[1]:g}. The range is {_range(losses.values())}."
    )
    frame = reports()["verses"]
    seeds = frame.loc[frame["run"].str.fullmatch(r"verses/pn_seed\d+"), LOSS].dropna()
    if len(seeds) > 1:
        lowest += f" The seeds of PN with 0.9 and 0.9 have a range of {_range(seeds)}: smaller differences are noise."
    return f"{_table(rows)}\n\n{lowest}"


def _range(values) -> str:
    return f"{max(values) - min(values):.3f} bits"


def learning_rates() -> str:
    """LN and PN with half, the configured and twice the learning rate."""
    found = _first_seeds(r"verses(?:_lr([\d.]+))?/(ln|pn)")
    cells = {(float(rate or 0.005), norm): row for (rate, norm), row in found.iterrows()}
    rates = sorted({rate for rate, _ in cells})
    if len(rates) < 2:
        return UNCOMPARED
    rows, differences = [], []
    for rate in rates:
        ln, pn = (cells.get((rate, norm)) for norm in ("ln", "pn"))
        row = {"learning rate": f"{rate:g}"}
        for name, one in (("LN", ln), ("PN", pn)):
            row[f"BLEU, {name}"] = "–" if one is None else f"{one['tokenized']:.2f}"
            row[f"validation loss, {name}"] = "–" if one is None else f"{one[LOSS]:.3f}"
        if ln is not None and pn is not None:
            differences.append(pn["tokenized"] - ln["tokenized"])
        rows.append(row)
    above, below = (sum(sign * each >= SMALLEST for each in differences) for sign in (1, -1))
    count = len(differences)
    return (
        f"{_table(rows)}\n\nOf {count} learning rates PN is above LN at {above} and below at {below}, each by "
        f"{SMALLEST} BLEU or more and with one seed; at {count - above - below} the difference is smaller "
        "(inconclusive)."
    )


def open_questions() -> str:
    """What the manifest plans and no run has answered."""
    found, lines = reports(), []
    for corpus, wanted in planned().items():
        runs, norms = [], Counter()
        if corpus in found:
            runs = found[corpus]["run"]
            norms = Counter(runs.str.replace(r"_seed\d+$", "", regex=True))
        lacking = sorted(name for name in wanted if not norms[name])
        fewer = sorted(name for name in wanted if 0 < norms[name] < wanted[name])
        lines.append(f"- {CORPORA[corpus]}: {len(runs)} of {wanted.total()} planned runs are finished.")
        if not norms:
            continue
        for words, names in (("No run", lacking), ("Fewer seeds than planned", fewer)):
            if names:
                lines.append(f"    - {words}: {', '.join(f'`{name}`' for name in names)}.")
    return "\n".join(lines)


def language_models() -> str:
    """Perplexities of the language models, and how many runs are finished."""
    if not (RESULTS / LM / "report.csv").exists():
        return NOTHING
    frame = pandas.read_csv(RESULTS / LM / "report.csv")
    rows = []
    for label, runs in frame.groupby("system", sort=False):
        batch = runs["batch"].dropna()
        leaks = runs["signature"].str.contains("causal:NO").any()
        rows.append({
            "model": f"{label}, **not causal**" if leaks else label,
            "seeds": str(runs["perplexity"].count()),
            "perplexity": _spread(runs["perplexity"].dropna()),
            "with statistics of the batch": _spread(batch) if len(batch) else "–",
        })  # fmt: skip
    planned = trainings(CORPORA_OF_RUNS[LM], CORPORA_OF_RUNS[LM].norms.split(), {})
    finished = len(planned.keys() & {str(run).rpartition("/")[2] for run in frame["run"]})
    where = f"results/{LM}/report"
    return "\n\n".join([
        f"Test perplexity of the English verses, {max(frame['updates']):,} updates, mean ± standard deviation over "
        f"seeds; {finished} of {len(planned)} planned runs are finished.",
        _table(rows),
        '"With statistics of the batch": the norms read the evaluated batch, as in training. A norm that reads the '
        "tokens that are predicted has no valid perplexity there. The difference is the cost of the change from "
        "training to evaluation.",
        _against_ln(frame),
        f"[Report]({where}.md) with differences from LN, curves and times · [all numbers]({where}.csv)",
    ])  # fmt: skip


def _against_ln(frame: pandas.DataFrame) -> str:
    """Which language models differ from LN over seeds."""
    found = systems(frame.assign(tokenized=frame["bits"]))
    compared = found["difference"].notna().sum()
    worse, better = ([label for label, say in found["say"].items() if say.startswith(f"{side} LN")] for side in SIDES)
    return (
        f"Compared with LN of the same model over seeds (Welch's t-test, p < 0.05 after Bonferroni's correction for "
        f"{compared} comparisons): lower perplexity: {', '.join(better) or 'none'}; higher perplexity: "
        f"{', '.join(worse) or 'none'}; all others are inconclusive."
    )


def mini_batches() -> str:
    """BLEU of each norm, and its difference from LN, by the tokens of a mini-batch."""
    if not (RESULTS / SWEEP / "report.csv").exists():
        return NOTHING
    frame = pandas.read_csv(RESULTS / SWEEP / "report.csv").dropna(subset=["tokenized"])
    name = frame["run"].str.extract(r"tokens(?P<tokens>\d+)/[^+]+(?P<settings>.*)_seed\d+$")
    if name["tokens"].nunique() < 2 or "LN" not in set(frame["norm"]):
        return UNCOMPARED
    named = name["settings"].str.lstrip("+").str.replace("+", ", ")
    frame["norm"] += (" (" + named + ")").where(named != "", "")
    scores = frame.groupby(["norm", name["tokens"].astype(int)])["tokenized"].mean()
    bleu = scores.unstack().loc[frame["norm"].unique()]
    less = bleu - bleu.loc["LN"]

    def cell(norm: str, tokens: int) -> str:
        difference = "" if norm == "LN" else f" ({_signed(less.loc[norm, tokens])})"
        return "–" if math.isnan(bleu.loc[norm, tokens]) else f"{bleu.loc[norm, tokens]:.2f}{difference}"

    rows = [{"encoder norm": norm, **{f"BLEU, {one:,}": cell(norm, one) for one in bleu}} for norm in bleu.index]
    seeds, ln = frame["seed"].nunique(), bleu.loc["LN"].dropna()
    return (
        f"{_table(rows)}\n\n{len(frame)} runs of {max(frame['updates']):,} updates, "
        f"{'one seed' if seeds == 1 else f'{seeds} seeds'}; in brackets the difference from LN at the same size. "
        f"The {len(ln)} values of LN have a range of {ln.max() - ln.min():.2f} BLEU. "
        f"[Report](results/{SWEEP}/report.md) · [scores](results/{SWEEP}/report.csv)"
    )


def readme() -> str:
    """The four norms of the paper's Table 1 on the verses, and which norms are above LN."""
    if (frame := reports().get("verses")) is None:
        return NOTHING
    rows = []
    for label in ("LN", "BN", "PN-V", "PN"):
        of_norm = frame[(frame["system"] == label) & frame["tokenized"].notna()]
        row = {"encoder norm": label, "seeds": ", ".join(map(str, of_norm["seed"])) or "not finished"}
        for measure, name in {
            "tokenized": "BLEU, tokenized",
            "detokenized": "BLEU, detokenized",
            "chrf": "chrF",
        }.items():
            row[name] = _spread(of_norm[measure]) if len(of_norm) else "–"
        rows.append(row)
    text = (RESULTS / "verses/report.md").read_text("utf-8")
    signatures = re.findall(r"^- Signature of (.+?): (`.+?`)$", text, re.M)
    seeds = int(frame.groupby("system")["seed"].nunique().max())
    return "\n\n".join(
        [
            f"{CORPORA['verses']}, test set, {max(frame['updates']):,} updates"
            + (", mean ± standard deviation over seeds." if seeds > 1 else ", one seed."),
            _table(rows),
            "Signatures: " + ", ".join(f"{name} {signature}" for name, signature in signatures) + ".",
            _answer(systems(frame)),
        ]
    )


PAGES = {
    "README.md": {"results": readme},
    "docs/figures.md": {"mini-batches": mini_batches},
    "docs/language_modeling.md": {"language models": language_models},
    "docs/results/index.md": {
        "answer": answer,
        "table": table,
        "decays": decays,
        "learning rates": learning_rates,
        "open questions": open_questions,
    },
}


def main() -> None:
    logging.disable(logging.INFO)  # of sacrebleu
    if len(sys.argv) > 1:
        write_reports(Path(sys.argv[1]).resolve(), *sys.argv[2:])
    for page, parts in PAGES.items():
        text = (ROOT / page).read_text("utf-8")
        for name, compute in parts.items():
            new = compute()
            text, times = block(page, name).subn(lambda _, new=new: new, text)
            assert times == 1, f"{page} has {times} parts {name}"
        (ROOT / page).write_text(text, "utf-8")


if __name__ == "__main__":
    main()
