"""pn report on run directories that are written here, file by file; what it says is checked
against other sources.
"""

import itertools
import json
import re
from pathlib import Path

import numpy
import pandas
import pytest
from scipy import stats

from pn_fairseq.common.files import write_settings
from pn_fairseq.pipeline import stamp
from pn_fairseq.pipeline.published import PAPER, Row
from pn_fairseq.report import markdown
from pn_fairseq.report.significance import Design
from pn_fairseq.report.tables import relative

from ..fixtures.reports import DATA, START, Page, make_run, report, scores_of, with_score
from ..scripts_helpers import files_of

LABELS = {"ln": "LN", "bn": "BN", "pnv": "PN-V", "pn": "PN"}


@pytest.fixture(scope="module")
def comparison(tmp_path_factory) -> tuple[dict[str, list[Path]], Path, Page]:
    """Four norms, three seeds; runs by norm, the report's folder and its HTML page."""
    base = tmp_path_factory.mktemp("comparison")
    output = base / "out"
    runs = {}
    for norm in LABELS:
        runs[norm] = [make_run(base / f"{norm}_{seed}", norm, seed) for seed in (1, 2, 3)]
    # The order of the arguments has no influence on the order of the table.
    given = [*runs["pn"], *runs["bn"], *runs["ln"], *runs["pnv"]]
    page = report(*given, output=output, options=("--resamples", "100"), draw=True)
    return runs, output, page


#: BLEU of two seeds.
LOW, HIGH = (20.0, 20.2), (25.0, 25.1)
BETTER = "better than LN: PN +4.95 (+4.31 to +5.59)."
INCONCLUSIVE = "no system differs significantly from LN; inconclusive: PN +0.50"
#: Measure -> its title.
TITLES = {"tokenized": "tokenized BLEU", "detokenized": "detokenized BLEU", "chrf": "chrF2"}


def minus(text: str) -> str:
    """A text with the minus of typography, as reports write it."""
    return text.replace("-", "−")


@pytest.mark.ci
def test_means_and_deviations_over_seeds(comparison):
    runs, _, page = comparison
    assert [*page.systems] == [*LABELS.values()]
    for row, norm in zip(page.systems.values(), LABELS, strict=True):
        assert row["seeds scored"] == "3 (1, 2, 3)"
        for measure, name in TITLES.items():
            values = numpy.array(scores_of(runs[norm], measure))
            assert row[name] == f"{values.mean():.2f}"
            assert row[f"std, {name}"] == f"{values.std(ddof=1):.2f}"


def test_differences_over_seeds(comparison):
    """Means, noise and intervals by hand: balanced blocks change the noise and nothing else."""
    runs, output, page = comparison
    values = numpy.array([scores_of(runs[norm], "tokenized") for norm in LABELS])
    plain = values - values.mean(axis=0)
    residual = plain - plain.mean(axis=1, keepdims=True)
    # 4 systems, 3 seeds: (4 - 1) (3 - 1)
    noise = (residual**2).sum() / 6
    design = Design(list(itertools.product("0123", range(3))), "0")
    # Dunnett 1964
    assert design.degrees == 6
    assert design.critical() == pytest.approx(3.10, abs=0.0075)
    half = design.critical() * (noise * 2 / 3) ** 0.5
    cells = page.column("system", "tokenized BLEU")
    bootstrap = {}
    for row in page.table("measure", "norm"):
        bootstrap.setdefault(row["norm"], row["difference and p, per seed"])
    for norm, mine in zip(("bn", "pnv", "pn"), values[1:], strict=True):
        label = LABELS[norm]
        difference = mine.mean() - values[0].mean()
        low, high = difference - half, difference + half
        verdict = "inconclusive"
        if low > 0 or high < 0:
            verdict = "better" if low > 0 else "worse"
        assert cells[label] == minus(f"{difference:+.2f} ({low:+.2f} to {high:+.2f}) {verdict}")
        per_seed = bootstrap[label]
        for seed, difference in enumerate(mine - values[0], 1):
            assert minus(f"seed {seed}: {difference:+.2f}") in per_seed
        if norm == "bn":  # the least p of 100 resamples, 1 / 101, for three systems
            assert "p = 0.030" in per_seed and "p = 0.010" not in per_seed
    assert (output / "report-intervals-1.png").read_bytes().startswith(b"\x89PNG")


def test_training_table(comparison):
    rows = comparison[2].table("norm", "seed", "state", "wall time")
    assert len(rows) == 12
    assert rows[-1] == {
        "norm": "PN",
        "seed": "3",
        "run": "pn_3",
        "state": "complete",
        "updates": "40 of 40",
        "best validation loss (bits/token)": "4.780 at 40",  # 5 + 0.25 + 0.03 - 0.5
        "wall time": "0:00:12",
        "time per update": "0.10 s",  # 100 / 1,025
        "tokens/s": "1,025",  # the median of 1010, 1020, 1030, 1540
        "parameters": "1,508,352",
    }


def test_csv_has_the_scores_of_every_run(comparison):
    runs, output, _ = comparison
    rows = pandas.read_csv(output / "report.csv")
    given = list(itertools.chain(*runs.values()))
    assert list(rows["run"]) == [run.name for run in given]
    for measure in TITLES:
        assert list(rows[measure]) == pytest.approx(scores_of(given, measure))
    last = rows.iloc[-1]
    assert last["norm"] == "PN" and last["state"] == "complete"
    assert (last["seed"], last["updates"], last["seconds"]) == (3, 40, 12.5)
    assert Path(last["data"]).resolve() == Path("/data/not there")
    assert last["best validation loss (bits/token)"] == pytest.approx(4.78)


def test_page_is_whole(comparison):
    runs, output, page = comparison
    pictures = {"report-curves-1.png", "report-intervals-1.png"}
    files = {path.name for path in output.iterdir()}
    assert files == pictures | {"report-curves.csv", "report.csv", "report.md"}
    assert page.says("Nothing: every run was trained to its end, decoded and scored.")
    assert {image.get("src") for image in page.tree.iter("img")} == pictures
    for words in ("|tok:none|", "|tok:13a|", "|nc:6|", "beam=5 lenpen=1.0"):
        assert page.says(words)
    assert page.says("Imaginary 9000") and page.says("2 × H <x> & y")
    command = "pn train verses_es_en --data '/data/not there'"
    assert "](report-curves-1.png)" in page.text and str(runs["pn"][0]) in page.text
    assert command in page.text and "model._name=transformer_pnv_tiny" in page.text


def test_one_seed_has_no_deviation(tmp_path):
    runs = [make_run(tmp_path / norm, norm) for norm in ("ln", "pn")]
    page = report(*runs)
    for row in page.systems.values():
        assert row["seeds scored"] == "1 (1)"
        assert row["std, tokenized BLEU"] == row["std, chrF2"] == "– (one seed)"
    assert "**No difference is tested over seeds:** one seed." in page.headline
    (row,) = page.table("system", "tokenized BLEU")
    assert row["tokenized BLEU"] == row["chrF2"] == "not tested: one seed"
    row = page.table("measure", "difference and p, per seed")[0]
    assert re.fullmatch(r"seed 1: \+\d\S+, p [<=] \S+", row["difference and p, per seed"])


def test_other_data_is_compared_with_nothing(tmp_path):
    """One of them has counts of its text."""
    control = make_run(tmp_path / "ln", "ln")
    other = make_run(tmp_path / "pn", data=DATA.replace("bpe=4000", "bpe=8000"))
    (control / "data").write_text(f"{tmp_path}\n")
    (tmp_path / "counts.txt").write_text("train=28170\ntest.read=9\n")
    page = report(control, other)
    systems = []
    for titles, *rows in page.tables:
        if titles[:2] == ["norm", "seeds scored"]:
            systems.append([row[0] for row in rows])
    assert systems == [["LN"], ["PN"]]
    nothing = "Nothing to compare: LN, or every other system, is missing or was not measured."
    assert page.says(nothing)
    assert (tmp_path / "out/report-curves-2.png").exists()
    rows = page.column("data", "value")
    assert rows["sentence pairs, train"] == "28,170"
    assert rows["sentence pairs, valid"] == "not known"
    assert rows["sentence pairs, test"] == "30"  # as many as were decoded


def test_paths_are_shown_from_the_working_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert relative(f"{tmp_path}/runs/a") == relative(tmp_path / "runs/a") == "runs/a"
    text = f"score: '{tmp_path}/a' and model.path={tmp_path}/b"
    assert relative(text) == "score: 'a' and model.path=b"
    other = f"/backup{tmp_path}/runs/a"  # the same names, elsewhere
    assert relative(other) == other
    monkeypatch.chdir("/")
    assert relative("tcp://host:1 and /a") == "tcp://host:1 and /a"


def with_scores(folder: Path, bleu: dict[str, tuple[float, ...]]) -> list[Path]:
    """Runs of the seeds 1, 2, ... (norm -> the BLEU of each)."""
    runs = []
    for norm, scores in bleu.items():
        for seed, score in enumerate(scores, 1):
            run = make_run(folder / f"{norm}_seed{seed}", norm, seed)
            runs.append(with_score(run, score))
    return runs


@pytest.mark.parametrize(
    ("bleu", "sentence"),
    [
        # A system with one seed is not tested and does not count.
        ({"ln": LOW, "bn": (10.0,), "pn": HIGH}, BETTER),
        ({"ln": LOW, "pn": HIGH}, f"**Tokenized BLEU:** {BETTER}"),
        ({"ln": (20, 22), "pn": (21, 22)}, INCONCLUSIVE),
        ({"ln": LOW, "pn": (18.0, 18.1)}, "worse than LN: PN −2.05"),
        ({"ln": (20, 21, 22), "pn": (20.1, 21, 22.1)}, "equivalent to LN within ±0.3: PN +0.07"),
        ({"bn": LOW, "pn": HIGH}, "no control (LN), with which the systems could be compared"),
        ({"pn": LOW}, "PN is the only system that was scored"),
        ({}, "no run was scored"),
    ],
)
def test_the_first_sentences_say_what_differs(bleu, sentence, tmp_path):
    """Also beside a run that was not decoded."""
    runs = [*with_scores(tmp_path, bleu), make_run(tmp_path / "x", "pnv", decoded=False)]
    assert sentence in report(*runs).headline


def test_planned_comparisons_are_tested_apart(tmp_path):
    """Without correction, by the noise of all systems: a t-test of the linear model, by hand."""
    bleu = {"ln": (20.0, 20.6, 20.4), "bn": (20.5, 20.9, 21.1), "pn": (21.0, 21.8, 21.2)}
    options = ("--resamples", "10", "--planned", "PN:bleu")
    runs = with_scores(tmp_path, bleu)
    sentence = report(*runs, options=options).headline
    table = numpy.array(list(bleu.values()))
    plain = table - table.mean(axis=1, keepdims=True)
    residual = plain - plain.mean(axis=0)
    variance = (residual**2).sum() / 4
    half = stats.t.isf(0.025, 4) * (variance * 2 / 3) ** 0.5
    assert f"PN − LN: +1.00 ({1 - half:+.2f} to {1 + half:+.2f}), p = " in sentence
    assert "higher in 3 of 3 blocks (not corrected" in sentence


def test_systems_of_other_machines_are_not_compared(tmp_path):
    runs = with_scores(tmp_path, {"ln": (20.0, 20.6), "pn": (21.0, 21.8), "bn": (21.0, 21.1)})
    for run in runs[4:]:
        other = START | {"gpus": [], "cpu": "Other 1"}
        starts = [other | {"git_commit": commit} for commit in ("1a", "1a", "2b-modified")]
        (run / "starts.jsonl").write_text("".join(f"{json.dumps(start)}\n" for start in starts))
    page = report(*runs)
    rows = page.column("system", "tokenized BLEU")
    assert rows["BN"] == "not tested: no seed on one machine in common with LN"
    assert rows["PN"].startswith("+1.10 (")
    assert page.says("The runs are of several machines (H <x> & y; Other 1)")
    written = pandas.read_csv(tmp_path / "out/report.csv", keep_default_na=False)
    written = written.set_index("system")
    of_bn = written.loc["BN"]
    assert set(of_bn["machine"]) == {"Other 1"} and set(of_bn["code"]) == {"1a and 2b-modified"}
    others = written.drop("BN")
    assert set(others["machine"]) == {"H <x> & y"} and set(others["code"]) == {""}


def test_only_its_own_files_are_written(tmp_path):
    run = make_run(tmp_path / "run")
    output = tmp_path / "deep/er/out"
    report(run, output=output)
    (output / "mine.png").write_text("mine")
    first = files_of(output)
    report(run, output=output)
    assert files_of(output) == first


def test_markdown_by_hand():
    """A table with a hole is refused."""
    with pytest.raises(ValueError, match="hole"):
        markdown.table(pandas.DataFrame({"a": ["1"], "b": [""]}))
    frame = pandas.DataFrame({"a": [markdown.code("p|q")], "b": ["1.5"], "c": ["r|s"]})
    table = markdown.table(frame)
    assert table.splitlines() == [
        "| a      |   b | c    |",
        "|:-------|----:|:-----|",
        "| `p\\|q` | 1.5 | r\\|s |",
    ]
    code = markdown.code("x`y|z", in_table=False)
    missing = markdown.missing("none_of_it _at_ all")
    assert (code, missing) == ("``x`y|z``", "*none_of_it \\_at\\_ all*")
    page = Page(f"# A &lt;b&gt;\n\nsee {code}: {missing}\n\n{table}")
    assert page.tables == [[["a", "b", "c"], ["p|q", "1.5", "r|s"]]]
    assert page.says("A <b>") and page.says("see x`y|z: none_of_it _at_ all")


# --- Published scores (--paper) ---


@pytest.mark.parametrize(
    ("options", "data", "expected"),
    [
        (("--paper", "powernorm-1"), "source=de\ntarget=en\nlower=1\nbpe=300\n", 35.9),
        (("--paper", "powernorm-1-wmt14"), DATA, 30.1),
    ],
)
def test_paper(options, data, expected, tmp_path):
    run = make_run(tmp_path / "run", "pn", data=data)
    page = report(run, options=options)
    row = page.systems["PN"]
    assert row["paper"] == str(expected)
    ours = float(row["tokenized BLEU"])
    assert float(row["difference"].replace("−", "-")) == pytest.approx(ours - expected, abs=0.006)
    assert page.says("Not comparable with the paper: its test set has")
    assert page.says("The paper's number for PN is of models with model.norm_variant=release.")
    assert not page.says("The paper's number for LN")
    assert page.says("The same table has, from other papers:")
    assert page.says("DS-Init (Zhang et al. 2019a) 34.4") == ("wmt" not in options[1])
    page = report(run, options=("--paper", "adanorm-1-wmt14"))
    assert not page.says("from other papers")
    assert page.says("the norms inside the layers stay LN")


def test_a_published_table_of_ones_own(tmp_path):
    """Beside the systems with its settings, with the published score line and the line of every
    run.
    """
    table = tmp_path / "published.yaml"
    table.write_text(
        "source: A. Author 2026\nexact: true\nrows:\n"
        "- {label: Their LN, norm: layer, bleu: 41.02, signature: '71.0/47.5 (BP = 0.999)', "
        "settings: {dropout: 0.3}}\n"
    )
    run = make_run(tmp_path / "ln", "ln", model__dropout=0.3)
    other = make_run(tmp_path / "other", "ln", model__dropout=0.1)
    page = report(run, other, options=("--paper", table))
    papers = {row["paper"] for row in page.systems.values()}
    assert papers == {"41.02", "not in the paper"}
    assert page.says("Paper: tokenized BLEU. A. Author 2026.")
    assert page.says("Their LN, as published: 71.0/47.5 (BP = 0.999).") and page.says("seed 1: 3")
    assert not page.says("Not comparable")


def test_rows_of_a_table_that_share_a_norm(tmp_path):
    """Each system is shown with the row whose settings it has."""

    def papers(*runs, table="adanorm-3"):
        page = report(*runs, options=("--paper", table))
        assert not page.says("is of models with")
        return page.column("norm", "paper"), page

    runs = []
    for name in ("mean", "std"):
        settings = {"model__decoder_norm": "detach", "model__norm_options": {"detach": name}}
        runs.append(make_run(tmp_path / name, "dn", **settings))
    found, _ = papers(*runs)
    assert found == {"DetachNorm (detach=mean)": "35.6", "DetachNorm (detach=std)": "34.2"}
    assert papers(runs[0])[0] == {"DetachNorm": "35.6"}
    assert papers(make_run(tmp_path / "unlike", "dn"))[0] == {"DetachNorm": "not in the paper"}
    without = make_run(tmp_path / "every", "none", model__decoder_norm="none")
    found, page = papers(without, table="adanorm-1-wmt14")
    assert list(found.values()) == ["diverges"]
    assert page.table("norm", "paper")[0]["difference"] == "–"
    last = {"model__encoder_norm_last": "layer-simple", "model__decoder_norm_last": "layer-simple"}
    runs = [make_run(tmp_path / "inside", "ln", **last), make_run(tmp_path / "plain", "ln")]
    found, _ = papers(*runs, table="adanorm-4-code-iwslt15")
    assert set(found.values()) == {"31.6", "31.2"}


IWSLT14 = "source=de\ntarget=en\nlower=1\nbpe=10000\n"
WMT14 = "source=en\ntarget=de\nlower=0\nbpe=32764\naggressive=1\ncompound_split=1\n"


@pytest.mark.parametrize(
    ("name", "count", "data"),
    [("powernorm-1", 6750, IWSLT14), ("powernorm-1-wmt14", 3003, WMT14)],
)
def test_paper_is_recognised_by_the_data(name, count, data, tmp_path):
    run = make_run(tmp_path / "run", "ln", data=data, count=1)
    folder, split = run / "generate/test", name == "powernorm-1-wmt14"
    # not the size of its test set
    assert "paper" not in report(run).systems["LN"]
    for file in ("hyp.tok", "ref.tok"):
        (folder / file).write_text("a\n" * count)
    scores = json.loads((folder / "scores.json").read_text()) | {"sentences": count}
    made_from = stamp.made_from({}, {"hypotheses": [folder / "hyp.tok"]})
    write_settings(stamp.stamp_of(folder / "scores.json"), made_from)
    for compound_split in (split, not split):
        scores["tokenized"]["compound_split"] = compound_split
        (folder / "scores.json").write_text(json.dumps(scores))
        page = report(run)
        assert page.column("norm", "paper") == {"LN": str(PAPER[name].row("layer", {}).bleu)}
        assert page.says("Not comparable") is (compound_split is not split)
        assert page.says("35.4 in its text") == (not split)
    how = "without" if split else "with"
    assert page.says(f"Not comparable with the paper: scored {how} compound splitting")
    if not split:  # training sets: the whole one after another tokenizer, and a part of the corpus
        (run / "data").write_text(f"{tmp_path}\n")
        for pairs in (160_215, 14_410):
            (tmp_path / "counts.txt").write_text(f"train={pairs}\n")
            row = report(run).systems["LN"]
            assert ("paper" in row) is (pairs > 150_000)
        page = report(run, "--paper", name)
        sizes = "its training set has 160,239 pairs, this one 14,410."
        assert page.says(f"Not comparable with the paper: {sizes}")


def test_a_setting_of_a_published_row_is_the_runs_or_the_default():
    settings = {"dropout": "0", "share_all_embeddings": "False", "norm_variant": "paper"}
    row = Row(label="x", norm="power", settings=settings)
    of_run = {"model.dropout": 0, "model.share_all_embeddings": False, "model.norm_variant": None}
    assert row.missing(of_run) == []
    of_run["model.dropout"] = 0.1
    assert row.missing(of_run) == ["model.dropout=0"]
