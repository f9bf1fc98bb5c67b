"""docs/results, and what other pages show of it: ``python -m docs.tools.results [FOLDER [REPORT...]]`` writes them.

With FOLDER, in which runs were made, `pn report` writes reports of the runs that are finished or failed, as
docs/results/REPORT (default: all of `RUNS`, in a copy of the repository in which the scripts were run). REPORT=GLOB
names the runs below FOLDER. Rows of report.csv whose runs FOLDER does not have stay, so that runs of several sessions
accumulate in one report; report.md describes the runs of the last call. A corpus can have several reports, REPORT and
REPORT-NAME; the page compares the runs of all within blocks (one seed on one machine). Everything between
``<!-- NAME: generated -->`` and ``<!-- end of NAME -->`` is computed from the reports, and the pictures of the
intervals, of Figure 5 and of learning curves (report-curves.csv) are drawn.
tests/docs/test_generated.py fails if a page differs.
"""

import contextlib
import functools
import io
import logging
import math
import os
import re
import sys
from collections import Counter
from pathlib import Path

import pandas
from scipy import stats

from pn_fairseq.__main__ import call
from pn_fairseq.common.files import atomic_write
from pn_fairseq.pipeline import experiments
from pn_fairseq.pipeline.bootstrap import p_text
from pn_fairseq.pipeline.metrics import Measure
from pn_fairseq.pipeline.reproduce import CORPORA as CORPORA_OF_RUNS
from pn_fairseq.pipeline.reproduce import trainings
from pn_fairseq.report import curves, figures, intervals
from pn_fairseq.report.curves import save
from pn_fairseq.report.intervals import Compared, count, signed
from pn_fairseq.report.significance import LOSS, MEASURES, SHORT_NAMES, Family, blocks_needed

from .generated import ROOT, write_parts

RESULTS = ROOT / "docs/results"
CORPORA = {"verses": "Bible verses, Spanish to English", "multi30k": "Multi30k, German to English"}
#: The report of the language models, and its models; scripts/reproduce_verses_lm.sh makes their runs.
LM = "verses_lm"
MODELS = {
    "transformer_lm": "English verses, language model",
    "tensorized_lm": "English verses, tensorized language model",
}
PLANNED_TITLES = CORPORA | {LM: "English verses, language models"}
#: The report of the runs with different mini-batches, and the folder of these runs; scripts/sweep_batch_size.sh.
SWEEP = "batch_size"
PICTURE = ROOT / "docs/figures/figure-5.png"
#: Report -> its runs. Those with other learning rates are in folders of their own, CORPUS_lr*.
RUNS = {
    **{corpus: f"runs/compare_norms/{corpus}*/*_seed*" for corpus in CORPORA},
    LM: f"runs/{LM}_en/*_seed*",
    SWEEP: "runs/batch_size_verses/tokens*/*_seed*",
}
#: Corpus -> reports of other studies with the same trainings.
SHARED = {"verses": ["masks/by_length"]}
MARGIN = MEASURES["tokenized"].margin
#: The planned comparisons were chosen when these seeds were known.
KNOWN_SEEDS = 3
#: What pairs of PN and LN are grouped by.
NAMES = {"rate": "learning rate", "order": "data order"}
#: The differences whose blocks are counted.
DIFFERENCES = {MEASURES["tokenized"]: (0.5, 1.0), MEASURES[LOSS]: (0.02, 0.05)}

NOTHING = "No run is finished."
UNCOMPARED = "There is no result yet: fewer than two of these runs are finished."
#: Runs that are not in the table of norms: they have tables of their own.
OWN_TABLES = r"_lr[\d.]+/|_init/|norm_alpha_|norm_ignore_mask"
#: A run that has one of these is finished or has failed.
RESULT_FILES = ("generate/test/scores.json", "evaluate_lm/test.json", "failed")


def write_reports(folder: Path, *wanted: str) -> None:
    """`pn report` of what is finished. ``wanted``: REPORT or REPORT=GLOB (default: all of :data:`RUNS`)."""
    with contextlib.chdir(folder):  # so that the reports name paths below it
        for name in wanted or RUNS:
            report, _, pattern = name.partition("=")
            done = [str(run) for run in with_results(Path("."), pattern or RUNS[report.partition("-")[0]])]
            if not done and wanted:
                raise SystemExit(f"{report}: no run is finished")
            if not done:
                continue
            table = RESULTS / report / "report.csv"
            earlier = pandas.read_csv(table) if table.is_file() else pandas.DataFrame()
            if call(["report", *done, "--output", str(RESULTS / report)]) != 0:
                raise SystemExit(f"no report of {report}")
            for file in (table, table.with_name("report.md")):
                text = without_places(file.read_text("utf-8"), done)
                with atomic_write(file, "w") as out:
                    out.write(text)
            with atomic_write(table, "w") as file:
                joined(earlier, pandas.read_csv(table), report.partition("-")[0]).to_csv(file, index=False)


def with_results(folder: Path, pattern: str) -> list[Path]:
    """The runs in a folder that have results or have failed."""
    return sorted(run for run in folder.glob(pattern) if any((run / result).exists() for result in RESULT_FILES))


def without_places(text: str, runs: list[str]) -> str:
    """A text with ``data/NAME`` for prepared data that is not below the working directory."""
    for place in {(Path(run) / "data").read_text("utf-8").strip() for run in runs if (Path(run) / "data").is_file()}:
        if not Path(place).is_relative_to(Path.cwd()):
            for name in (place, os.path.relpath(place)):
                text = text.replace(name, f"data/{Path(place).name}")
    return text


def joined(earlier: pandas.DataFrame, rows: pandas.DataFrame, corpus: str) -> pandas.DataFrame:
    """``rows`` of report.csv after those ``earlier`` ones whose run was not repeated on its machine."""
    if earlier.empty:
        return rows
    known, new = (
        pandas.MultiIndex.from_arrays([with_folder(frame["run"], corpus), frame["machine"]])
        for frame in (earlier, rows)
    )
    return pandas.concat([earlier[~known.isin(new)], rows], ignore_index=True)


def with_folder(runs: pandas.Series, corpus: str) -> pandas.Series:
    """The names of runs with their folder, also if their report has only one."""
    return runs.where(runs.str.contains("/"), f"{corpus}/" + runs)


def folders(corpus: str) -> list[Path]:
    """Where the reports of a corpus are."""
    own = sorted([*RESULTS.glob(f"{corpus}/report.csv"), *RESULTS.glob(f"{corpus}-*/report.csv")])
    shared = [RESULTS / name / "report.csv" for name in SHARED.get(corpus, ())]
    return [file.parent for file in [*own, *shared] if file.is_file()]


def read(folder: Path, corpus: str) -> pandas.DataFrame:
    """The rows of a report of a corpus."""
    frame = pandas.read_csv(folder / "report.csv")
    return frame.assign(run=with_folder(frame["run"], corpus))


def runs_of(corpus: str) -> pandas.DataFrame:
    """The runs of all reports of a corpus, by norm."""
    frame = pandas.concat([read(folder, corpus) for folder in folders(corpus)], ignore_index=True)
    order = {norm: number for number, norm in enumerate(frame["norm"].unique())}
    return frame.sort_values("norm", key=lambda norms: norms.map(order), kind="stable", ignore_index=True)


def reports() -> dict[str, pandas.DataFrame]:
    """Corpus -> its runs, of those that have a report."""
    return {corpus: runs_of(corpus) for corpus in CORPORA if folders(corpus)}


def subjects() -> dict[str, pandas.DataFrame]:
    """Title -> the runs in which norms are compared: of each corpus and each kind of language model."""
    frames = {CORPORA[name]: frame[~frame["run"].str.contains(OWN_TABLES)] for name, frame in reports().items()}
    if folders(LM):
        frame = runs_of(LM)
        for model, title in MODELS.items():
            of_model = frame[frame["run"].str.contains(f"/{model}_")].copy()
            for column in ("system", "compared with"):  # the title names the model
                of_model[column] = of_model[column].str.replace(rf"{model} \w+(, )?", "", regex=True)
                of_model[column] = of_model[column].str.replace(r"(, )?\)$|^(.*) \($", r")", regex=True)
                of_model[column] = of_model[column].str.replace(" ()", "")
            frames[title] = of_model
    return frames


@functools.cache
def _compare(rows: str) -> dict[str, Compared]:
    """The comparisons of the rows of report.csv in a text."""
    return intervals.compare(pandas.read_csv(io.StringIO(rows)))


def compared(title: str) -> dict[str, Compared]:
    """The comparisons of a subject by column of report.csv; none if nothing is tested."""
    by_measure = _compare(subjects()[title].to_csv(index=False)) if title in subjects() else {}
    return by_measure if any(one.families for one in by_measure.values()) else {}


def families(title: str) -> list[tuple[Measure, Family, str]]:
    """The families of a subject: measure, family, and the sentence on its differences."""
    return [
        (of_measure.measure, family, of_measure.sentence(family))
        for of_measure in compared(title).values()
        for family in of_measure.families
    ]


def pictures() -> dict[str, Path]:
    """Title of a subject -> its picture, of those in which anything is tested."""
    slugs = {title: key for key, title in (CORPORA | MODELS).items()}
    return {title: RESULTS / f"intervals-{slugs[title]}.png" for title in subjects() if compared(title)}


def draw() -> None:
    """The pictures of the intervals, of Figure 5, and of the learning curves whose records are here."""
    for file in RESULTS.rglob("report-curves.csv"):
        curves.draw(file)
    for stale in set(RESULTS.glob("intervals-*.png")) - set(pictures().values()):
        stale.unlink()
    for title, file in pictures().items():
        intervals.plot(compared(title), list(subjects()[title]["system"].unique()), file)
    if folders(SWEEP):
        runs = pandas.read_csv(RESULTS / SWEEP / "report.csv").dropna(subset=["tokenized"])
        lines = [figures.Subject(row["run"], "", *_line(row), bleu=row["tokenized"]) for _, row in runs.iterrows()]
        save(figures.batch_size(lines), PICTURE)


def planned() -> dict[str, Counter]:
    """Corpus -> folder and norm with its settings, as in ``experiments.norms`` -> number of seeds."""
    runs = {corpus: Counter() for corpus in CORPORA}
    of_models = {*trainings(CORPORA_OF_RUNS[LM], CORPORA_OF_RUNS[LM].norms.split(), {})}
    for part in experiments.norms().parts:
        if part.corpus == LM:
            of_models |= {f"{part.models}_{norm}_seed{part.seed}" for norm in part.norms.split()}
        else:
            runs[part.corpus].update(f"{part.folder}/{norm}" for norm in part.norms.split())
    return runs | {LM: Counter(f"{LM}/{without_seed(run)}" for run in of_models)}


def without_seed(run: str) -> str:
    return re.sub(r"_seed\d+$", "", run)


def finished(corpus: str) -> tuple[Counter, int]:
    """The finished seeds of each name of :func:`planned`, and how many of the planned runs that is."""
    seeds = Counter(map(without_seed, sorted(set(runs_of(corpus)["run"])) if folders(corpus) else ()))
    return seeds, sum(min(seeds[name], amount) for name, amount in planned()[corpus].items())


def planned_comparisons() -> list[tuple[str, str]]:
    """System and column of report.csv of ``experiments.norms``."""
    pairs = [text.split(":") for text in experiments.norms().planned]
    return [(system, SHORT_NAMES[measure]) for system, measure in pairs]


def answer() -> str:
    """One sentence for each corpus and measure."""
    lines = [
        f"- **{title}, {measure.title}:** {sentence}"
        for title in subjects()
        for measure, _, sentence in families(title)
    ]
    return "\n".join(lines) or "No norm has several seeds yet, so no conclusion is possible."


def planned_answer() -> str:
    """The planned comparisons, on each corpus, and over the pairs of runs of all blocks and corpora."""
    lines = []
    for system, column in planned_comparisons():
        for kind, titles in (("translation", CORPORA.values()), ("language models", MODELS.values())):
            parts, differences, later = [], [], []
            for of_measure, title in ((compared(title).get(column), title) for title in titles):
                if of_measure and (text := of_measure.planned(system)):
                    parts.append(f"    - {title}: {text.partition(': ')[2]}")
                    pairs = of_measure.family_of(system).pairs[system]
                    differences += pairs.values()
                    later += [difference for (_, seed), difference in pairs.items() if seed > KNOWN_SEEDS]
            if not parts:
                continue
            measure, mean = MEASURES[column], sum(differences) / len(differences)
            lines.append(
                f"- **{system} − LN, {measure.title}, {kind}:** {intervals.side_of(differences)} pairs of runs with "
                f"the same seed and machine, mean {intervals.signed(mean, measure.decimals)} (one-sample t-test, "
                f"{p_text(stats.ttest_1samp(differences, 0).pvalue)})."
            )
            lines += parts
            if later:
                mean = intervals.signed(sum(later) / len(later), measure.decimals)
                lines.append(
                    f"    - Pairs trained after the comparison was chosen: {intervals.side_of(later)}, mean {mean}"
                )
    return "\n".join(lines) or UNCOMPARED


def strength() -> str:
    """What each design can detect."""
    rows = []
    for title in subjects():
        if of_title := families(title):
            _, first, _ = of_title[0]
            rows.append(
                {"runs": title, "systems and LN": f"{len(first.intervals)} + 1", "most blocks": str(first.blocks)}
                | {"degrees of freedom": str(first.design.degrees)}
                | {"half interval; detectable": "; ".join(_reach(measure, family) for measure, family, _ in of_title)}
            )
    return to_table(rows) if rows else UNCOMPARED


def needed() -> str:
    """The blocks that would find a difference, by the noise that was measured."""
    rows = []
    for title in subjects():
        for measure, family, _ in families(title):
            for difference in DIFFERENCES.get(measure, ()):
                sizes = difference / family.deviation, len(family.intervals)
                rows.append(
                    {"runs": title, "difference": f"{difference:g}, {measure.title}"}
                    | {"noise": f"{family.deviation:.{measure.decimals}f}"}
                    | {"blocks, planned comparison": str(blocks_needed(*sizes, planned=True))}
                    | {"blocks, all systems": str(blocks_needed(*sizes))}
                )
    return to_table(rows) if rows else UNCOMPARED


def _reach(measure, family) -> str:
    return f"{measure.title} ±{family.half_width:.{measure.decimals}f}; {family.detectable:.{measure.decimals}f}"


def _went_wrong(row) -> bool:
    """Whether a run failed or diverged."""
    return "not finite" in str(row.problems) or "NaN" in str(row.problems) or "failed" in str(row.state)


def _spread(values: pandas.Series, digits: int = 2) -> str:
    deviation = f" ± {values.std():.{digits}f}" if len(values) > 1 else ""
    return f"{values.mean():.{digits}f}{deviation}" if len(values) else "–"


def _signed(value: float, digits: int = 2) -> str:
    return "–" if math.isnan(value) else intervals.signed(value, digits)


def to_table(rows: list[dict[str, str]]) -> str:
    frame = pandas.DataFrame(rows)
    numbers = ("BLEU", "perplexity", "with", "validation", "α_bwd")
    sides = ["right" if name.startswith(numbers) else "left" for name in frame]
    return frame.to_markdown(index=False, tablefmt="pipe", disable_numparse=True, colalign=sides)


def system_rows(frame: pandas.DataFrame, measures: dict[str, str]) -> list[dict[str, str]]:
    """The systems of a subject: means (column of report.csv -> title), and differences from LN."""
    rows, by_measure = [], _compare(frame.to_csv(index=False))
    for label, runs in frame.groupby("system", sort=False):
        row = {"encoder norm": label, "blocks": str(len(_by_block(runs.dropna(subset=list(measures)), LOSS)))}
        for column, title in measures.items():
            digits, of_measure = MEASURES[column].decimals, by_measure.get(column)
            row[title] = _spread(_by_block(runs, column), digits)
            difference = "–"
            if of_measure and label in of_measure.intervals:
                interval = of_measure.intervals[label]
                difference = f"{of_measure.text(interval)} {of_measure.verdict(interval)}"
            elif of_measure and label in of_measure.untested:
                control = frame[frame["system"] == runs["compared with"].iloc[0]]
                mean = (_by_block(runs, column) - _by_block(control, column)).mean()
                difference = f"{_signed(mean, digits)} not tested: {of_measure.untested[label]}"
            row[f"difference in {title}"] = difference
        if wrong := [
            f"seed {run.seed}: {run.problems.partition('; ')[0]}" for run in runs.itertuples() if _went_wrong(run)
        ]:
            row["encoder norm"] += f" ({'; '.join(wrong)})".replace("|", "\\|")
        rows.append(row)
    return rows


def _by_block(runs: pandas.DataFrame, column: str) -> pandas.Series:
    """A measure of the runs of a system, by machine and seed."""
    return runs.dropna(subset=[column]).groupby(["machine", "seed"])[column].mean()


def table() -> str:
    """The measurements, by corpus."""
    parts = []
    for corpus, frame in reports().items():
        title = CORPORA[corpus]
        parts.append(f"### {title}")
        if title in pictures():
            parts.append(f"![Differences from LN with simultaneous 95% intervals.]({pictures()[title].name})")
        parts.append(to_table(system_rows(subjects()[title], {"tokenized": "BLEU", LOSS: "validation loss"})))
        correlation = frame["tokenized"].corr(frame[LOSS])
        parts.append(f"Correlation of BLEU with validation loss over all runs: {_signed(correlation)}.")
        wrong = sum(map(_went_wrong, frame.itertuples()))
        parts.append(f"Runs that failed, or whose loss or gradient was not finite: {wrong} of {len(frame)}.")
        links = [
            f"[{name}]({name}/report.md) ([scores]({name}/report.csv))"
            for name in (folder.relative_to(RESULTS) for folder in folders(corpus))
        ]
        machines = ", ".join(f"{machine} ({len(runs)} runs)" for machine, runs in frame.groupby("machine", sort=False))
        parts.append(
            f"Reports: {', '.join(links)} · {machines} · {max(frame['updates']):,} updates · tokenized BLEU of the "
            "test set and best validation loss in bits per token, mean ± standard deviation over blocks"
        )
        if text := repeated(corpus):
            parts.append(text)
    return "\n\n".join(parts) or NOTHING


def repeated(corpus: str) -> str:
    """The scores of runs from the same seed and settings on several machines."""
    runs = runs_of(corpus).dropna(subset=["tokenized"])
    scores = runs.groupby(["run", "machine"], sort=False)["tokenized"].mean().groupby(level="run", sort=False)
    texts = [f"`{run}` {' and '.join(f'{bleu:.2f}' for bleu in of_run)}" for run, of_run in scores if len(of_run) > 1]
    return f"BLEU from the same seed and settings on several machines: {', '.join(texts)}." if texts else ""


def _first_seeds(pattern: str) -> pandas.DataFrame:
    """The runs of the verses with seed 1 whose folder and norm match; the matches are the index.

    They are of the report that has the most of them: runs of one machine.
    """
    best = pandas.DataFrame()
    for folder in folders("verses"):
        frame = read(folder, "verses")
        settings = frame["run"].str.extract(f"^{pattern}_seed1$")
        known = settings.notna().any(axis=1) & frame[["tokenized", LOSS]].notna().all(axis=1)
        if known.sum() > len(best):
            best = frame[known].set_index(pandas.MultiIndex.from_frame(settings[known].fillna("")))
    return best


def decays() -> str:
    """PN's validation loss by its two decays."""
    number = r"([\d.]+)"
    runs = _first_seeds(rf"verses/(pn)(?:\+norm_alpha_fwd={number}\+norm_alpha_bwd={number})?")
    if len(runs) < 2:
        return UNCOMPARED
    losses = {(float(fwd or 0.9), float(bwd or 0.9)): row[LOSS] for (_, fwd, bwd), row in runs.iterrows()}
    best, grid = min(losses, key=losses.get), sorted({decay for pair in losses for decay in pair})
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
    return f"{to_table(rows)}\n\n{lowest}"


def _range(values) -> str:
    return f"{max(values) - min(values):.3f} bits"


def learning_rates() -> str:
    """LN, PN and BN by learning rate, over the blocks in which LN was trained with every rate."""
    frame = runs_of("verses").dropna(subset=["tokenized", LOSS])
    names = frame["run"].str.extract(r"^verses(?:_lr(?P<rate>[\d.]+))?/(?P<norm>ln|pn|bn)_seed(?P<seed>\d+)$")
    runs = frame[["machine", "tokenized", LOSS]].join(names).dropna(subset=["norm"]).fillna({"rate": "0.005"})
    runs = runs.assign(rate=runs["rate"].astype(float))
    blocks = runs[runs["norm"] == "ln"].groupby(["machine", "seed"])["rate"].agg(frozenset)
    most = max(blocks, key=len, default=frozenset())
    complete = blocks.index[blocks == most]
    if len(most) < 2:
        return UNCOMPARED
    runs = runs[pandas.MultiIndex.from_frame(runs[["machine", "seed"]]).isin(complete) & runs["rate"].isin(most)]
    means = runs.groupby(["rate", "norm"])[["tokenized", LOSS]].mean()
    sizes = runs.groupby(["rate", "norm"]).size()
    rows = []
    for rate in sorted(most):
        row = {"learning rate": f"{rate:g}"}
        for norm in ("ln", "pn", "bn"):
            if norm in set(runs["norm"]):
                bleu, loss = means.loc[rate, norm] if (rate, norm) in means.index else (math.nan, math.nan)
                size = sizes.get((rate, norm), 0)
                fewer = f" ({size})" if size < len(complete) else ""
                row[f"BLEU, {norm.upper()}"] = "–" if math.isnan(bleu) else f"{bleu:.2f}{fewer}"
                row[f"validation loss, {norm.upper()}"] = "–" if math.isnan(loss) else f"{loss:.3f}{fewer}"
        rows.append(row)
    bleu = means["tokenized"].unstack()
    differences = (bleu["pn"] - bleu["ln"]).dropna() if "pn" in bleu else ()
    above, below = (sum(sign * difference >= MARGIN for difference in differences) for sign in (1, -1))
    pairs = _pn_minus_ln(runs, ["rate", "machine", "seed"])
    return (
        f"{to_table(rows)}\n\nMeans over {count(len(complete), 'block')}; in brackets: over fewer. PN's BLEU is at "
        f"least {MARGIN} above LN's with {above} of the {len(differences)} learning rates, and at least {MARGIN} below "
        f"it with {below}. With the other {len(differences) - above - below} the difference is smaller.{pairs}"
    )


def _pn_minus_ln(runs: pandas.DataFrame, by: list[str]) -> str:
    """PN's validation loss minus LN's in the pairs of runs that are equal in ``by``, grouped by its first column."""
    pairs = runs.pivot_table(values=LOSS, index=by, columns="norm")
    if not {"pn", "ln"} <= {*pairs}:
        return ""
    texts = []
    for value, difference in (pairs["pn"] - pairs["ln"]).dropna().groupby(by[0]):
        lower = f"lower in {(difference < 0).sum()} of {count(len(difference), 'pair')}"
        texts.append(f"{value:g}: {signed(difference.mean(), 3)} ({lower})")
    return f" PN's validation loss minus LN's, in bits per token, by {NAMES[by[0]]}: {'; '.join(texts)}."


def noise_sources() -> str:
    """Which of the data order and the initial weights is the noise, from runs with each pair of several of both.

    The standard deviations of a two-way model with random effects, without repeated runs: of an effect it is the root
    of (mean square − mean square of the rest) / levels of the other effect, 0 where that is negative.
    """
    frame = runs_of("verses")
    names = frame["run"].str.extract(
        r"^verses(?:_init)?/(?P<norm>ln|pn)(?:\+init_seed=(?P<init>\d+))?_seed(?P<order>\d+)$"
    )
    runs = frame[["machine", "tokenized", LOSS]].join(names).dropna(subset=["norm"])
    runs["init"] = runs["init"].fillna(runs["order"])
    rows = []
    for (machine, norm), of_norm in runs.groupby(["machine", "norm"], sort=False):
        for column in (LOSS, "tokenized"):
            grid = of_norm.pivot_table(values=column, index="order", columns="init")
            grid = grid.loc[grid.notna().sum(axis=1) > 1].dropna(axis="columns")
            orders, inits = grid.shape
            if min(orders, inits) < 2:
                continue
            effects = {"data orders": (grid.mean(axis=1), inits), "initial weights": (grid.mean(axis=0), orders)}
            rest = grid.sub(grid.mean(axis=1), axis=0) - grid.mean(axis=0) + grid.to_numpy().mean()
            noise = (rest.to_numpy() ** 2).sum() / ((orders - 1) * (inits - 1))
            row = {"norm": norm.upper(), "machine": machine, "measure": MEASURES[column].title}
            row["runs"] = f"{orders} × {inits}"
            for effect, (means, repeats) in effects.items():
                deviation = math.sqrt(max(0.0, means.var() - noise / repeats))
                row[f"deviation between {effect}"] = f"{deviation:.{MEASURES[column].decimals}f}"
            rows.append(row | {"rest": f"{math.sqrt(noise):.{MEASURES[column].decimals}f}"})
    if not rows:
        return UNCOMPARED
    orders, inits = (f"deviation between {effect}" for effect in ("data orders", "initial weights"))
    larger = sum(float(row[orders]) > float(row[inits]) for row in rows)
    crossed = runs["init"].isin(runs.loc[runs["init"] != runs["order"], "init"])
    of_grids = runs[crossed & runs["machine"].isin({row["machine"] for row in rows})].astype({"order": int})
    return (
        f"{to_table(rows)}\n\nThe deviation between data orders is the larger one in {larger} of the {len(rows)} rows."
        f"{_pn_minus_ln(of_grids, ['order', 'machine', 'init'])}"
    )


def open_questions() -> str:
    """What the study plans and no run has answered."""
    lines = []
    for corpus, wanted in planned().items():
        seeds, done = finished(corpus)
        more = seeds.total() - done
        further = f", and {count(more, 'run')} that this study does not plan" if more else ""
        lines.append(f"- {PLANNED_TITLES[corpus]}: {done} of {wanted.total()} planned runs are finished{further}.")
        if not seeds:
            continue
        absent = [f"`{name}` ({amount})" for name, amount in sorted(wanted.items()) if not seeds[name]]
        fewer = [f"`{name}` ({seeds[name]} of {amount})" for name, amount in sorted(wanted.items())
                 if 0 < seeds[name] < amount]  # fmt: skip
        lines += [
            f"    - {words}: {', '.join(names)}."
            for words, names in (
                ("No run is finished (in brackets: the number of planned seeds)", absent),
                ("Fewer seeds than planned", fewer),
            )
            if names
        ]
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
    where = f"results/{LM}/report"
    texts = [
        f"- **{title}, {measure.title}:** {sentence}"
        for title in MODELS.values()
        for measure, _, sentence in families(title)
    ]
    shown = [
        f"![Differences from LN, {title}.](results/{file.name})"
        for title, file in pictures().items()
        if title in MODELS.values()
    ]
    return "\n\n".join([
        f"Test perplexity of the English verses, {max(frame['updates']):,} updates, mean ± standard deviation over "
        f"seeds; {finished(LM)[1]} of {planned()[LM].total()} planned runs are finished.",
        to_table(rows),
        '"With statistics of the batch": the norms read the evaluated batch, as in training. If a norm reads the '
        "tokens that are predicted, this number is not a valid perplexity. The difference is the cost of the change "
        "from training to evaluation.",
        "Differences from LN of the same model, with "
        "[simultaneous 95% intervals](results/index.md#how-to-read-the-intervals):",
        "\n".join(texts) or UNCOMPARED,
        *shown,
        f"[Report]({where}.md) with times · [all numbers]({where}.csv)",
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
        f"{to_table(rows)}\n\n{len(frame)} runs of {max(frame['updates']):,} updates, "
        f"{'one seed' if seeds == 1 else f'{seeds} seeds'}; in brackets the difference from LN at the same size. "
        f"The {len(ln)} values of LN have a range of {ln.max() - ln.min():.2f} BLEU. "
        f"[Report](results/{SWEEP}/report.md) · [scores](results/{SWEEP}/report.csv)"
    )


def readme() -> str:
    """The four norms of the paper's Table 1 on the verses: scores, validation loss, intervals."""
    title = CORPORA["verses"]
    if (frame := subjects().get(title)) is None:
        return NOTHING
    rows_by_norm = {
        row["encoder norm"]: row for row in system_rows(frame, {"tokenized": "BLEU", LOSS: "validation loss"})
    }
    columns = next(iter(rows_by_norm.values()))
    rows = [
        rows_by_norm.get(norm, dict.fromkeys(columns, "–") | {"encoder norm": norm, "blocks": "not finished"})
        for norm in ("LN", "BN", "PN-V", "PN")
    ]
    text = "\n".join((folder / "report.md").read_text("utf-8") for folder in folders("verses"))
    signature = re.search(r"^- Signature of tokenized BLEU: (`.+?`)$", text, re.M)[1]
    sentences = [f"- **{measure.heading}:** {sentence}" for measure, _, sentence in families(title)]
    return "\n\n".join(
        [
            f"{title}, test set, {max(frame['updates']):,} updates, mean ± standard deviation over blocks (a block is "
            "one seed on one machine).",
            to_table(rows),
            f"Tokenized BLEU ({signature}) and best validation loss in bits per token. In brackets is the interval of "
            "the difference from LN. The intervals of one measure are simultaneous: with a probability of 95% all of "
            "them contain the true differences. *Not resolved*: the interval contains 0, and is not within the margin "
            f"of equivalence (±{MARGIN} BLEU, ±{MEASURES[LOSS].margin} bits).",
            "All norms on this corpus, also those that are not in the table:",
            "\n".join(sentences) or "No norm has several seeds yet.",
        ]
    )


def first_result() -> str:
    """One sentence for the first screen: PN and LN on the verses, the planned comparison."""
    if (loss := compared(title := CORPORA["verses"]).get(LOSS)) is None or (text := loss.planned("PN")) is None:
        return NOTHING
    return (
        f"One result ({title}): the validation loss of PN minus that of LN, in bits per token, is "
        f"{text.partition(': ')[2]}. A block is one seed on one machine. The brackets contain the 95% interval of this "
        "comparison. It is not corrected for the other comparisons. The comparison was chosen after seeds 1 to "
        f"{KNOWN_SEEDS} were known. The table below has the simultaneous interval of the same difference. It is wider, "
        "so the verdict in the table can be *not resolved*."
    )


PAGES = {
    "../README.md": {"first result": first_result, "results": readme},
    "figures.md": {"mini-batches": mini_batches},
    "language_modeling.md": {"language models": language_models},
    "results/index.md": {
        "answer": answer,
        "planned": planned_answer,
        "strength": strength,
        "needed": needed,
        "table": table,
        "decays": decays,
        "learning rates": learning_rates,
        "noise": noise_sources,
        "open questions": open_questions,
    },
}


def main() -> None:
    logging.disable(logging.INFO)  # of sacrebleu
    if len(sys.argv) > 1:
        write_reports(Path(sys.argv[1]).resolve(), *sys.argv[2:])
    draw()
    write_parts(PAGES)


if __name__ == "__main__":
    main()
