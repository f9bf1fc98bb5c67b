"""The numbers of docs/results/*.md are those of docs/results/runs.csv, a row for
each training run.

In a page, ``<!-- runs: QUERY -->`` selects rows (a query of pandas) for the text and the tables
below it, until the next one. It may end in ``; control: SYSTEM``, which is then the control of all
others, and ``; rows: COLUMN``, what the first column of the tables names (default: the system).
``<!-- not of runs.csv: SOURCE -->`` stands before other text.
"""

import re
from pathlib import Path

import pandas
import pytest
from scipy import stats

from docs.tools.results import with_control
from pn_fairseq.pipeline.published import LM_PAPER, PAPER
from pn_fairseq.report import intervals
from pn_fairseq.report.measures import LOSS, MEASURES

from .pages import ROOT

RESULTS = ROOT / "docs/results"
PAGES = sorted(RESULTS.glob("*.md"))
SETTINGS = (
    "ada_scale init_seed layer_scale_groups lr max_tokens norm_alpha_bwd norm_alpha_fwd".split()
)
RUNS = pandas.read_csv(RESULTS / "runs.csv", dtype=dict.fromkeys(SETTINGS, "string"))
RUNS["run"] = RUNS["norm"] + ", seed " + RUNS["seed"].astype(str)
#: Title of a column -> column of runs.csv, and decimals.
COLUMNS = {
    "BLEU": ("tokenized", 2),
    "BLEU on both test sets": ("tokenized test1", 2),
    "chrF2": ("chrf", 2),
    "perplexity": ("perplexity", 2),
    "validation perplexity": ("valid perplexity", 2),
    "with statistics of the batch": ("batch", 2),
    "test loss": ("bits", 3),
    "validation loss": (LOSS, 3),
    "ended at update": ("updates", 0),
}
#: Title of a column -> place of its number in PowerNorm's Table 2.
PUBLISHED = {"published validation perplexity": 0, "published perplexity": 1}
SELECTION = re.compile(
    r"<!-- (?:runs: (.+?)(?:; control: (.+?))?(?:; rows: (.+?))?|not of runs\.csv: (.+)) -->"
)
INTERVAL = re.compile(r"([+−]?\d+\.\d+) \(([+−]?\d+\.\d+) to ([+−]?\d+\.\d+)\)")


class Selection:
    """The runs that a part of a page is about."""

    def __init__(self, query: str, control: str | None, rows: str | None, runs: pandas.DataFrame):
        self.frame, self.rows = runs.query(query), rows or "system"
        assert len(self.frame), f"no run: {query}"
        if control:
            self.frame = with_control(self.frame, control)
        self.compared = intervals.compare(self.frame.drop(columns="detokenized"))  # no page has it

    def intervals(self) -> set[str]:
        """Every difference with its simultaneous or separate interval, as pages write it."""
        texts = set()
        for comparison in self.compared.values():
            for family in comparison.families:
                for interval in (*family.intervals.values(), *family.separate.values()):
                    texts.add(comparison.text(interval))
        return texts

    def cell(self, name: str, title: str) -> str:
        """The cell of a table in the row ``name`` and the column ``title``: "MEASURE" or
        "MEASURE, NORM".
        """
        title, _, norm = title.partition(", ")
        runs = self.frame[self.frame[self.rows] == name]
        runs = runs[runs["norm"] == norm] if norm else runs
        blocks = runs.groupby(["machine", "seed"])
        if title == "blocks":
            return str(len(blocks))
        if title == "seeds":
            return str(runs["seed"].nunique())
        if title in PUBLISHED:
            (norm,) = runs["norm"].unique()
            return f"{LM_PAPER['ptb']['rows'][f'core-1 + {norm} *'][PUBLISHED[title]]}"
        column, digits = COLUMNS[title.removeprefix("difference in ")]
        if title.startswith("difference in "):
            (system,) = runs["system"].unique()
            return self.difference(system, column)
        values = blocks[column].mean().dropna()
        if values.empty:
            return "–"
        mean = f"{values.mean():,.{digits}f}"
        return f"{mean} ± {values.std():.{digits}f}" if len(values) > 1 else mean

    def difference(self, system: str, column: str) -> str:
        """A difference with its interval and verdict, or why there is none; a control has "–"."""
        comparison = self.compared[column]
        if system in comparison.intervals:
            interval = comparison.intervals[system]
            return f"{comparison.text(interval)} {comparison.verdict(interval)}"
        return comparison.untested.get(system, "–")


def parts(text: str):
    """The groups of each selection of a page, and the text below it; first the text above all
    selections.
    """
    groups = SELECTION.groups
    pieces = [None] * groups + SELECTION.split(text)
    return zip(*(pieces[place :: groups + 1] for place in range(groups + 1)), strict=True)


def tables(text: str):
    """The tables of a text: titles of the columns, and rows of cells."""
    for table in re.findall(r"(?:^\|.*\|\n)+", text + "\n", re.M):
        titles, _, *rows = map(cells_of, table.splitlines())
        yield titles, rows


def cells_of(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|").split("|")]


def words(page: Path) -> str:
    """The text of a page without its line breaks."""
    return " ".join(page.read_text("utf-8").split())


def differences_of(text: str, runs: pandas.DataFrame) -> list[str]:
    """What a page says, and what the runs say."""
    wrong = []
    for query, control, first_column, source, part in parts(text):
        if not query:
            if not source and (INTERVAL.search(part) or [*tables(part)]):
                wrong.append(f"numbers without a selection: {part[:80]!r}")
            continue
        selection = Selection(query, control, first_column, runs)
        for titles, rows in tables(part):
            for name, *cells in rows:
                for title, cell in zip(titles[1:], cells, strict=True):
                    expected = selection.cell(name, title)
                    if expected != cell:
                        wrong.append(f"{name}, {title}: {cell}, and the runs have {expected}")
        known = selection.intervals()
        sentences = re.sub(r"(?m)^\|.*\|$", "", part)
        # a line may end within an interval
        for found in INTERVAL.finditer(" ".join(sentences.split())):
            if found[0] not in known:
                wrong.append(f"{found[0]} is no difference of {query}")
    return wrong


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_numbers_of_a_page_are_those_of_its_runs(page):
    assert differences_of(page.read_text("utf-8"), RUNS) == []


def test_the_published_score_and_the_runs_that_repeat_it():
    (published,) = PAPER["multi30k-tiny"].rows
    runs = RUNS.query("study == 'published' and encoder_norm_placement == 'post'")
    page = (RESULTS / "multi30k.md").read_text("utf-8")
    mean = runs["tokenized"].mean()
    first = " ".join(page.split("\n\n")[1].split())
    assert f"reaches {mean:.2f} BLEU" in first
    assert f"{mean - published.bleu:.2f} above the {published.bleu}" in first
    assert f"reaches {mean:.2f} BLEU" in words(ROOT / "README.md")
    parts = r"(\S+) \(BP = (\S+),? ratio = \S+ hyp_len = (\d+) ref_len = 12103\)"
    repeated = "study.str.startswith('published') and encoder_norm_placement == 'post'"
    for run in RUNS.query(repeated).to_dict("records"):
        precisions, brevity, tokens = re.fullmatch(parts, run["parts of tokenized BLEU"]).groups()
        name = f"seed {run['seed']}"
        if run["study"] == "published, repeated":
            name += ", again"
        cells = (name, f"{run['tokenized']:.2f}", precisions, brevity, f"{int(tokens):,}")
        assert f"| {' | '.join(cells)} |" in page


@pytest.mark.ci
def test_a_digit_that_is_changed_in_a_page_or_in_the_table_is_noticed():
    page = (RESULTS / "masks.md").read_text("utf-8")
    places, changed = [*INTERVAL.finditer(page)][:20], list(page)
    for place in places:
        last = place.end(3) - 1
        changed[last] = str((int(changed[last]) + 1) % 10)
    assert len(differences_of("".join(changed), RUNS)) == len(places)
    frame = RUNS.copy()
    run = frame.query("study == 'masks, random' and system == 'PN'").index[0]
    frame.loc[run, "tokenized"] += 0.1
    assert differences_of(page, frame)


def test_each_run_has_what_it_was_trained_with():
    known = ["study", "corpus", "system", "norm", "seed", "machine", "commit", LOSS]
    assert RUNS[known].notna().all(axis=None)
    different = ["study", "corpus", "system", "model", "max_tokens", "seed", "machine"]
    assert not RUNS.duplicated(different).any()
    shown = {column for column, _ in COLUMNS.values()}
    assert shown <= {*RUNS} and shown & {*MEASURES} == {*MEASURES} & {*RUNS} - {"detokenized"}


def test_the_runs_of_the_part_of_iwslt14():
    page, index = (words(RESULTS / name) for name in ("iwslt14_sample.md", "index.md"))
    runs = RUNS.query("study == 'part of IWSLT14'").pivot(index="norm", columns="seed")
    curves = pandas.read_csv(RESULTS / "iwslt14-sample-curves.csv")
    curves = curves.pivot(index="update", columns=["system", "seed"])
    assert (curves["valid"].min().unstack() == runs[LOSS]).all(axis=None)
    above = (curves["valid"]["PN"] >= curves["valid"]["LN"]).any(axis=1)
    assert f"Up to update {above.index[above][-1]:,}" in page
    for column, unit, digits in (("tokenized", "BLEU", 2), (LOSS, "bits", 3)):
        pn, ln = runs[column].loc["PN"], runs[column].loc["LN"]
        test, difference = stats.ttest_rel(pn, ln), (pn - ln).mean()
        ends = " to ".join(f"{end:+.{digits}f}" for end in test.confidence_interval())
        planned = f"PN − LN: {difference:+.{digits}f} ({ends}), p = {test.pvalue:.3f}, "
        assert planned.replace("-", "−") in page
        assert f"{abs(difference):.{digits}f} {unit}" in index


def test_the_planned_comparison_of_the_pre_norm_models():
    page, index = (words(RESULTS / name) for name in ("multi30k.md", "index.md"))
    runs = RUNS.query("study == 'published, pre-norm'")
    runs = runs.drop(columns=["tokenized", "detokenized", "chrf"])
    runs = runs.rename(columns={"tokenized test1": "tokenized"})
    for machine in (runs["machine"], "any"):  # PN with seed 1 was trained on two machines
        compared = intervals.compare(runs.assign(machine=machine))
        for comparison in compared.values():
            assert comparison.planned("PN") in page
    for comparison in compared.values():
        assert comparison.text(comparison.intervals["BN"]) in page
        difference = comparison.text(comparison.intervals["PN"]).split()[0]
        assert difference.lstrip("+−") in index


def test_the_planned_comparisons_on_penn_treebank():
    """PN and LN, causal and with the leak, and what the leak changes."""
    page, index = (words(RESULTS / name) for name in ("penn_treebank.md", "index.md"))
    runs = RUNS.query("study == 'Penn Treebank'").drop(columns="detokenized")
    compared = intervals.compare(runs)["bits"]
    leaks = " (tensorized_unmasked=True)"
    assert f"Causal, test loss, {compared.planned('PN')}" in page
    leaking = compared.planned(f"PN{leaks}").replace(leaks, "")
    assert f"With the leak, test loss, {leaking}" in page
    difference, bounds = compared.text(compared.intervals["PN"]).rstrip(")").split(" (")
    text = f"PN − LN, is {difference} bits per token (95% interval {bounds}, three seeds)"
    assert text in index
    first = runs[runs["seed"] == 1].set_index("system")["bits"]
    lower = {norm: first[norm] - first[f"{norm}{leaks}"] for norm in ("LN", "PN")}
    assert f"by {lower['LN']:.3f} bits per token with LN and by {lower['PN']:.3f} with PN" in page
