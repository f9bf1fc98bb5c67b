"""docs/results, and what other pages show of it: ``python -m docs.tools.results [FOLDER [REPORT...]]`` writes them.

With FOLDER, in which runs were made, `pn report` writes reports of the runs that are finished or failed, as
docs/results/REPORT (default: all of `RUNS`, in a copy of the repository in which the scripts were run). REPORT=GLOB
names the runs below FOLDER. A corpus can have several reports, REPORT and REPORT-NAME; the page shows the runs of all.
Machines are never mixed in a comparison. Everything between ``<!-- NAME: generated -->`` and ``<!-- end of NAME -->``
is computed from the reports, and the pictures of the intervals and of Figure 5 are drawn. tests/docs/test_results.py
fails if a page differs.
"""

import contextlib
import functools
import io
import logging
import math
import re
import sys
from collections import Counter
from pathlib import Path

import pandas
from scipy import stats

from pn_fairseq.common.files import atomic_write
from pn_fairseq.pipeline.experiments import PLANNED, manifest
from pn_fairseq.pipeline.reproduce import CORPORA as CORPORA_OF_RUNS
from pn_fairseq.pipeline.reproduce import trainings
from pn_fairseq.pipeline.scoring import p_text
from pn_fairseq.report import figures, intervals
from pn_fairseq.report.command import main as pn_report
from pn_fairseq.report.curves import headless_pyplot
from pn_fairseq.report.intervals import Compared, count
from pn_fairseq.report.significance import LOSS, MEASURES, SHORT_NAMES

from .generated import ROOT, block

RESULTS = ROOT / "docs/results"
CORPORA = {"verses": "Bible verses, Spanish to English", "multi30k": "Multi30k, German to English"}
#: The report of the language models, and its models; scripts/reproduce_verses_lm.sh makes their runs.
LM = "verses_lm"
MODELS = {
    "transformer_lm": "English verses, language model",
    "tensorized_lm": "English verses, tensorized language model",
}
#: The report of the runs with different mini-batches, and the folder of these runs; scripts/sweep_batch_size.sh.
SWEEP = "batch_size"
PICTURE = ROOT / "docs/figures/figure-5.png"
#: Report -> its runs. Those with other learning rates are in folders of their own, CORPUS_lr*.
RUNS = {
    **{corpus: f"runs/compare_norms/{corpus}*/*_seed*" for corpus in CORPORA},
    LM: f"runs/{LM}_en/*_seed*",
    SWEEP: "runs/batch_size_verses/tokens*/*_seed*",
}
MARGIN = MEASURES["tokenized"].margin
COMMAND = "python -m docs.tools.results"

NOTHING = "No run is finished."
UNCOMPARED = "No two of these runs are finished."
#: Runs that are not in the table of norms: they have tables of their own.
OWN_TABLES = r"_lr[\d.]+/|norm_alpha_"
#: A run that has one of these is finished or has failed.
RESULT_FILES = ("generate/test/scores.json", "evaluate_lm/test.json", "failed")


def write_reports(folder: Path, *wanted: str) -> None:
    """`pn report` of what is finished. ``wanted``: REPORT or REPORT=GLOB (default: all of :data:`RUNS`)."""
    with contextlib.chdir(folder):  # so that the reports name paths below it
        for name in wanted or RUNS:
            report, _, pattern = name.partition("=")
            runs = sorted(Path(".").glob(pattern or RUNS[report.partition("-")[0]]))
            done = [str(run) for run in runs if any((run / result).exists() for result in RESULT_FILES)]
            if not done and wanted:
                raise SystemExit(f"{report}: no run is finished")
            if done and pn_report([*done, "--output", str(RESULTS / report)]) != 0:
                raise SystemExit(f"no report of {report}")


def folders(corpus: str) -> list[Path]:
    """Where the reports of a corpus are."""
    return sorted(
        file.parent for file in [*RESULTS.glob(f"{corpus}/report.csv"), *RESULTS.glob(f"{corpus}-*/report.csv")]
    )


def read(folder: Path) -> pandas.DataFrame:
    """The rows of a report of a corpus. The names of runs have their folder, also if the report has only one."""
    frame = pandas.read_csv(folder / "report.csv")
    corpus = folder.name.partition("-")[0]
    return frame.assign(run=frame["run"].where(frame["run"].str.contains("/"), f"{corpus}/" + frame["run"]))


def runs_of(corpus: str) -> pandas.DataFrame:
    """The runs of all reports of a corpus, by norm."""
    frame = pandas.concat(map(read, folders(corpus)), ignore_index=True)
    order = {norm: number for number, norm in enumerate(frame["norm"].unique())}
    return frame.sort_values("norm", key=lambda norms: norms.map(order), kind="stable", ignore_index=True)


def reports() -> dict[str, pandas.DataFrame]:
    """Corpus -> its runs, of those that have a report."""
    return {corpus: runs_of(corpus) for corpus in CORPORA if folders(corpus)}


def subjects() -> dict[str, pandas.DataFrame]:
    """Title -> the runs in which norms are compared: of each corpus and each kind of language model."""
    found = {CORPORA[name]: frame[~frame["run"].str.contains(OWN_TABLES)] for name, frame in reports().items()}
    if folders(LM):
        frame = runs_of(LM)
        for model, title in MODELS.items():
            of_model = frame[frame["run"].str.contains(f"/{model}_")].copy()
            for column in ("system", "compared with"):  # the title names the model
                of_model[column] = of_model[column].str.replace(rf"{model} \w+(, )?", "", regex=True)
                of_model[column] = of_model[column].str.replace(r"(, )?\)$|^(.*) \($", r")", regex=True)
                of_model[column] = of_model[column].str.replace(" ()", "")
            found[title] = of_model
    return found


def by_machine(frame: pandas.DataFrame) -> dict[str, pandas.DataFrame]:
    """Machine -> its runs; the machine with most runs of the control is the first."""
    controls = frame[frame["compared with"].isna()].groupby("machine").size()
    order = sorted(frame["machine"].unique(), key=lambda name: (-controls.get(name, 0), -sum(frame["machine"] == name)))
    return {machine: frame[frame["machine"] == machine] for machine in order}


@functools.cache
def _compare(rows: str) -> dict[str, Compared]:
    """The comparisons of the rows of report.csv in a text."""
    return intervals.compare(pandas.read_csv(io.StringIO(rows)))


def compared(title: str) -> list[tuple[str, dict[str, Compared]]]:
    """Machine, and its comparisons, of the machines on which anything is tested."""
    frames = by_machine(subjects()[title])
    found = [(machine, _compare(frame.to_csv(index=False))) for machine, frame in frames.items()]
    return [(machine, each) for machine, each in found if any(one.families for one in each.values())]


def pictures() -> dict[Path, tuple[str, str, dict[str, Compared]]]:
    """File of a picture -> title, machine and comparisons."""
    slugs = {title: key for key, title in (CORPORA | MODELS).items()}
    return {
        RESULTS / f"intervals-{slugs[title]}{f'-{number}' if number > 1 else ''}.png": (title, machine, each)
        for title in subjects()
        for number, (machine, each) in enumerate(compared(title), 1)
    }


def draw() -> None:
    """The pictures of the intervals and of Figure 5."""
    wanted = pictures()
    for stale in set(RESULTS.glob("intervals-*.png")) - set(wanted):
        stale.unlink()
    for file, (title, machine, each) in wanted.items():
        frame = by_machine(subjects()[title])[machine]
        intervals.plot(each, list(frame["system"].unique()), file)
    if folders(SWEEP):
        runs = pandas.read_csv(RESULTS / SWEEP / "report.csv").dropna(subset=["tokenized"])
        lines = [figures.Subject(row["run"], "", *_line(row), bleu=row["tokenized"]) for _, row in runs.iterrows()]
        pyplot = headless_pyplot()
        figure = figures.batch_size(pyplot, lines)
        with atomic_write(PICTURE) as out:
            figure.savefig(out, dpi=130, format="png")
        pyplot.close(figure)


def planned() -> dict[str, Counter]:
    """Corpus -> folder and norm with its settings, as in ``experiments.manifest`` -> number of seeds."""
    found = {corpus: Counter() for corpus in CORPORA}
    for part in manifest():
        found[part.corpus].update(f"{part.folder}/{norm}" for norm in part.norms.split())
    return found


def planned_comparisons() -> list[tuple[str, str]]:
    """System and column of report.csv of ``experiments.PLANNED``."""
    pairs = [text.split(":") for text in PLANNED]
    return [(system, SHORT_NAMES[measure]) for system, measure in pairs]


def answer() -> str:
    """One sentence for each corpus and measure."""
    lines = []
    for title in subjects():
        several = len(compared(title)) > 1
        for machine, each in compared(title):
            where = f", {machine}" if several else ""
            lines += [
                f"- **{title}{where}, {one.measure.title}:** {one.sentence(family)}"
                for one in each.values()
                for family in one.families
            ]
    return "\n".join(lines) or "No norm has several seeds yet, so no conclusion is possible."


def planned_answer() -> str:
    """The planned comparisons, on each corpus, and over all pairs of runs of one seed, corpus and machine."""
    lines = []
    for system, column in planned_comparisons():
        for kind, titles in (("translation", CORPORA.values()), ("language models", MODELS.values())):
            parts, pairs = [], []
            for title in titles:
                for machine, each in compared(title) if title in subjects() else ():
                    text = each[column].planned(system) if column in each else None
                    if text:
                        frame = by_machine(subjects()[title])[machine]
                        scores = frame.pivot_table(values=column, index="system", columns="seed")
                        pairs += list((scores.loc[system] - scores.loc["LN"]).dropna())
                        parts.append(f"    - {title}: {text.partition(': ')[2]}")
            if not parts:
                continue
            higher = sum(one > 0 for one in pairs)
            side, amount = ("higher", higher) if 2 * higher > len(pairs) else ("lower", sum(one < 0 for one in pairs))
            measure, mean = MEASURES[column], sum(pairs) / len(pairs)
            lines.append(
                f"- **{system} − LN, {measure.title}, {kind}:** {side} in {amount} of {len(pairs)} pairs of runs with "
                f"the same seed, mean {intervals.signed(mean, measure.digits)} (one-sample t-test, "
                f"{p_text(stats.ttest_1samp(pairs, 0).pvalue)})."
            )
            lines += parts
    return "\n".join(lines) or UNCOMPARED


def strength() -> str:
    """What each design can detect."""
    rows = []
    for title in subjects():
        for machine, each in compared(title):
            families = [(one.measure, family) for one in each.values() for family in one.families]
            first = families[0][1]
            rows.append(
                {"runs": title, "machine": machine, "systems and LN": f"{len(first.intervals)} + 1"}
                | {"most seeds": str(first.seeds), "degrees of freedom": str(first.degrees)}
                | {"half interval; detectable": "; ".join(_reach(measure, family) for measure, family in families)}
            )
    return _table(rows) if rows else UNCOMPARED


def _reach(measure, family) -> str:
    return f"{measure.title} ±{family.half_width:.{measure.digits}f}; {family.detectable:.{measure.digits}f}"


def _went_wrong(row) -> bool:
    """Whether a run failed or diverged."""
    return "not finite" in str(row.problems) or "NaN" in str(row.problems) or "failed" in str(row.state)


def _spread(values: pandas.Series, digits: int = 2) -> str:
    deviation = f" ± {values.std():.{digits}f}" if len(values) > 1 else ""
    return f"{values.mean():.{digits}f}{deviation}" if len(values) else "–"


def _signed(value: float, digits: int = 2) -> str:
    return "–" if math.isnan(value) else intervals.signed(value, digits)


def _table(rows: list[dict[str, str]]) -> str:
    frame = pandas.DataFrame(rows)
    numbers = ("BLEU", "perplexity", "with", "validation", "α_bwd")
    sides = ["right" if name.startswith(numbers) else "left" for name in frame]
    return frame.to_markdown(index=False, tablefmt="pipe", disable_numparse=True, colalign=sides)


def _rows(frame: pandas.DataFrame, measures: dict[str, str]) -> list[dict[str, str]]:
    """The systems of one machine: means (column of report.csv -> title), and differences from LN."""
    rows, each = [], _compare(frame.to_csv(index=False))
    for label, runs in frame.groupby("system", sort=False):
        row = {"encoder norm": label, "seeds": str(runs[list(measures)].notna().all(axis=1).sum())}
        for column, title in measures.items():
            digits, one = MEASURES[column].digits, each.get(column)
            row[title] = _spread(runs[column].dropna(), digits)
            difference = "–"
            if one and label in one.intervals:
                difference = f"{one.text(one.intervals[label])} {one.verdict(one.intervals[label])}"
            elif one and label in one.untested:
                same = frame[(frame["system"] == runs["compared with"].iloc[0]) & frame["seed"].isin(runs["seed"])]
                less = runs.groupby("seed")[column].mean() - same.groupby("seed")[column].mean()
                difference = f"{_signed(less.mean(), digits)} not tested: {one.untested[label]}"
            row[f"difference in {title}"] = difference
        if wrong := [
            f"seed {run.seed}: {run.problems.partition('; ')[0]}" for run in runs.itertuples() if _went_wrong(run)
        ]:
            row["encoder norm"] += f" ({'; '.join(wrong)})".replace("|", "\\|")
        rows.append(row)
    return rows


def table() -> str:
    """The measurements, by corpus and machine."""
    parts = []
    for corpus, frame in reports().items():
        parts.append(f"### {CORPORA[corpus]}")
        files = {(title, machine): file.name for file, (title, machine, _) in pictures().items()}
        for machine, of_machine in by_machine(subjects()[CORPORA[corpus]]).items():
            parts.append(f"**{machine}**")
            if name := files.get((CORPORA[corpus], machine)):
                parts.append(f"![Differences from LN with simultaneous 95% intervals.]({name})")
            parts.append(_table(_rows(of_machine, {"tokenized": "BLEU", LOSS: "validation loss"})))
        wrong = sum(map(_went_wrong, frame.itertuples()))
        parts.append(f"Runs that failed, or whose loss or gradient was not finite: {wrong} of {len(frame)}.")
        links = [f"[{each.name}]({each.name}/report.md) ([scores]({each.name}/report.csv))" for each in folders(corpus)]
        parts.append(
            f"Reports: {', '.join(links)} · {max(frame['updates']):,} updates · tokenized BLEU of the test set and "
            "best validation loss in bits per token, mean ± standard deviation over seeds"
        )
        if text := repeated(corpus):
            parts.append(text)
    return "\n\n".join(parts) or NOTHING


def repeated(corpus: str) -> str:
    """The scores of runs from the same seed and settings on several machines."""
    twice = runs_of(corpus).dropna(subset=["tokenized"])
    twice = twice.groupby(["run", "machine"], sort=False)["tokenized"].mean().groupby(level="run", sort=False)
    texts = [f"`{run}` {' and '.join(f'{one:.2f}' for one in scores)}" for run, scores in twice if len(scores) > 1]
    return f"BLEU from the same seed and settings on several machines: {', '.join(texts)}." if texts else ""


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
    of_seeds = frame[frame["run"].str.fullmatch(r"verses/pn_seed\d+")].dropna(subset=[LOSS]).groupby("machine")[LOSS]
    seeds = max((losses for _, losses in of_seeds), key=len, default=())
    if len(seeds) > 1:
        lowest += f" The seeds of PN with 0.9 and 0.9 have a range of {_range(seeds)} on one machine: "
        lowest += "smaller differences are noise."
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
    above, below = (sum(sign * each >= MARGIN for each in differences) for sign in (1, -1))
    count = len(differences)
    return (
        f"{_table(rows)}\n\nOf {count} learning rates PN is above LN at {above} and below at {below}, each by "
        f"{MARGIN} BLEU or more and with one seed; at {count - above - below} the difference is smaller "
        "(inconclusive)."
    )


def open_questions() -> str:
    """What the manifest plans and no run has answered."""
    found, lines = reports(), []
    for corpus, wanted in planned().items():
        runs = sorted(set(found[corpus]["run"])) if corpus in found else []
        norms = Counter(re.sub(r"_seed\d+$", "", run) for run in runs)
        finished = sum(min(norms[name], seeds) for name, seeds in wanted.items())
        further = f"; {count(len(runs) - finished, 'further run')}" if len(runs) > finished else ""
        lacking = sorted(name for name in wanted if not norms[name])
        fewer = sorted(name for name in wanted if 0 < norms[name] < wanted[name])
        lines.append(f"- {CORPORA[corpus]}: {finished} of {wanted.total()} planned runs are finished{further}.")
        if not norms:
            continue
        for words, names in (("No run", lacking), ("Fewer seeds than planned", fewer)):
            if names:
                lines.append(f"    - {words}: {', '.join(f'`{name}`' for name in names)}.")
    return "\n".join(lines)


def language_models() -> str:
    """Perplexities of the language models, their differences from LN, and how many runs are finished."""
    if not folders(LM):
        return NOTHING
    frame, rows = runs_of(LM), []
    for label, runs in frame.groupby("system", sort=False):
        leaks = runs["signature"].str.contains("causal:NO").any()
        rows.append({
            "model": f"{label}, **not causal**" if leaks else label,
            "seeds": str(runs["perplexity"].count()),
            "perplexity": _spread(runs["perplexity"].dropna()),
            "with statistics of the batch": _spread(runs["batch"].dropna()),
        })  # fmt: skip
    planned_runs = trainings(CORPORA_OF_RUNS[LM], CORPORA_OF_RUNS[LM].norms.split(), {})
    finished = len(planned_runs.keys() & {str(run).rpartition("/")[2] for run in frame["run"]})
    where = f"results/{LM}/report"
    texts = [
        f"- **{title}, {one.measure.title}:** {one.sentence(family)}"
        for title in MODELS.values()
        for _, each in compared(title)
        for one in each.values()
        for family in one.families
    ]
    shown = [
        f"![Differences from LN, {title}.](results/{file.name})"
        for file, (title, _, _) in pictures().items()
        if title in MODELS.values()
    ]
    return "\n\n".join([
        f"Test perplexity of the English verses, {max(frame['updates']):,} updates, mean ± standard deviation over "
        f"seeds; {finished} of {len(planned_runs)} planned runs are finished.",
        _table(rows),
        '"With statistics of the batch": the norms read the evaluated batch, as in training. If a norm reads the '
        "tokens that are predicted, this number is not a valid perplexity. The difference is the cost of the change "
        "from training to evaluation.",
        "Differences from LN of the same model, with "
        "[simultaneous 95% intervals](results/index.md#how-to-read-the-intervals):",
        "\n".join(texts) or UNCOMPARED,
        *shown,
        f"[Report]({where}.md) with curves and times · [all numbers]({where}.csv)",
    ])  # fmt: skip


def _line(row: pandas.Series) -> tuple[str, object, int]:
    """The name of a run's line in Figure 5, nothing, and its tokens per mini-batch."""
    tokens, settings = re.search(r"tokens(\d+)/[^+]+(.*)_seed\d+$", row["run"]).groups()
    options = settings.lstrip("+").replace("+", ", ")
    return f"{row['norm']} ({options})" if options else row["norm"], None, int(tokens)


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
    """The four norms of the paper's Table 1 on the verses: one machine, scores, validation loss, intervals."""
    if (frame := subjects().get(CORPORA["verses"])) is None:
        return NOTHING
    four = ("LN", "BN", "PN-V", "PN")
    of_four = by_machine(frame[frame["system"].isin(four)])
    machine, runs = next(iter(of_four.items()))
    every = by_machine(frame)[machine]
    found = {row["encoder norm"]: row for row in _rows(every, {"tokenized": "BLEU", LOSS: "validation loss"})}
    rows = [found.get(label, {"encoder norm": label, "seeds": "not finished"}) for label in four]
    text = "\n".join((each / "report.md").read_text("utf-8") for each in folders("verses"))
    signature = re.search(r"^- Signature of tokenized BLEU: (`.+?`)$", text, re.M)[1]
    seeds = int(runs.groupby("system")["seed"].nunique().max())
    sentences = [
        f"- **{one.measure.heading}:** {one.sentence(family)}"
        for name, each in compared(CORPORA["verses"])
        for one in each.values()
        for family in one.families
        if name == machine
    ]
    return "\n\n".join(
        [
            f"{CORPORA['verses']}, test set, {max(frame['updates']):,} updates, {machine}"
            + (", mean ± standard deviation over seeds." if seeds > 1 else ", one seed."),
            _table([{name: row.get(name, "–") for name in next(iter(found.values()))} for row in rows]),
            f"Tokenized BLEU ({signature}) and best validation loss in bits per token. In brackets a simultaneous 95% "
            "interval of the difference from LN over all norms of this machine:",
            "\n".join(sentences) or "No norm has several seeds yet.",
        ]
    )


PAGES = {
    "README.md": {"results": readme},
    "docs/figures.md": {"mini-batches": mini_batches},
    "docs/language_modeling.md": {"language models": language_models},
    "docs/results/index.md": {
        "answer": answer,
        "planned": planned_answer,
        "strength": strength,
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
    draw()
    for page, parts in PAGES.items():
        text = (ROOT / page).read_text("utf-8")
        for name, compute in parts.items():
            new = compute()
            text, times = block(page, name).subn(lambda _, new=new: new, text)
            assert times == 1, f"{page} has {times} parts {name}"
        (ROOT / page).write_text(text, "utf-8")


if __name__ == "__main__":
    main()
