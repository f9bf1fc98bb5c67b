"""pn report on run directories that are written here, file by file; what it says is checked
against other sources.
"""

import csv
import itertools
import json
import re
from pathlib import Path

import numpy
import pandas
import pytest
from scipy import stats

from pn_fairseq.pipeline.published import PAPER
from pn_fairseq.report import markdown
from pn_fairseq.report.significance import Design
from pn_fairseq.report.tables import relative

from ..fixtures.reports import DATA, START, Page, make_run, report, scores_of, with_score

LABELS = {"ln": "LN", "bn": "BN", "pnv": "PN-V", "pn": "PN"}


@pytest.fixture(scope="module")
def comparison(tmp_path_factory) -> tuple[dict[str, list[Path]], Path, Page]:
    """Four norms, three seeds; runs by norm, the report's folder and its HTML page."""
    base = tmp_path_factory.mktemp("comparison")
    runs = {
        norm: [make_run(base / f"{norm}_{seed}", norm, seed) for seed in (1, 2, 3)]
        for norm in LABELS
    }
    # The order of the arguments has no influence on the order of the table.
    given = [run for norm in ("pn", "bn", "ln", "pnv") for run in runs[norm]]
    return (
        runs,
        base / "out",
        report(*given, output=base / "out", options=("--resamples", "100"), draw=True),
    )


def test_means_and_deviations_over_seeds(comparison):
    runs, _, page = comparison
    assert [*page.systems] == [*LABELS.values()]
    for row, norm in zip(page.systems.values(), LABELS, strict=True):
        assert row["seeds scored"] == "3 (1, 2, 3)"
        for measure, name in (
            ("tokenized", "tokenized BLEU"),
            ("detokenized", "detokenized BLEU"),
            ("chrf", "chrF2"),
        ):
            values = numpy.array(scores_of(runs[norm], measure))
            assert row[name] == f"{values.mean():.2f}"
            assert row[f"std, {name}"] == f"{values.std(ddof=1):.2f}"


def test_differences_over_seeds(comparison):
    """Means, noise and intervals by hand: balanced blocks change the noise and nothing else."""
    runs, output, page = comparison
    rows = {row["system"]: row for row in page.table("system", "tokenized BLEU", "chrF2")}
    values = numpy.array([scores_of(runs[norm], "tokenized") for norm in ("ln", "bn", "pnv", "pn")])
    plain = values - values.mean(axis=0) + values.mean()
    # 4 systems, 3 seeds: (4 - 1) (3 - 1)
    noise = ((plain - plain.mean(axis=1, keepdims=True)) ** 2).sum() / 6
    design = Design([(str(system), seed) for system in range(4) for seed in range(3)], "0")
    # Dunnett 1964
    assert design.degrees == 6 and design.critical() == pytest.approx(3.10, abs=0.0075)
    half = design.critical() * (noise * 2 / 3) ** 0.5
    for norm, mine in zip(("bn", "pnv", "pn"), values[1:], strict=True):
        difference = mine.mean() - values[0].mean()
        ends = " to ".join(f"{difference + side * half:+.2f}" for side in (-1, 1))
        verdict = (
            "worse" if difference + half < 0 else "better" if difference > half else "inconclusive"
        )
        assert rows[LABELS[norm]][
            "tokenized BLEU"
        ] == f"{difference:+.2f} ({ends}) {verdict}".replace("-", "−")
        (per_seed, *_) = [
            row["difference and p, per seed"]
            for row in page.table("measure", "norm")
            if row["norm"] == LABELS[norm]
        ]
        for seed, difference in enumerate(mine - values[0], 1):
            assert f"seed {seed}: {difference:+.2f}".replace("-", "−") in per_seed
        if norm == "bn":  # the least p of 100 resamples, 1 / 101, for three systems
            assert "p = 0.030" in per_seed and "p = 0.010" not in per_seed
    assert (output / "report-intervals-1.png").read_bytes().startswith(b"\x89PNG")


def test_training_table(comparison):
    rows = comparison[2].table("norm", "seed", "state", "wall time")
    assert len(rows) == 12
    expected = {
        "norm": "PN",
        "seed": "3",
        "run": "pn_3",
        "state": "complete",
        "updates": "40 of 40",
    }
    expected |= {"best validation loss (bits/token)": "4.780 at 40"}  # 5 + 0.25 + 0.03 - 0.5
    # The median of 1010, 1020, 1030, 1540, and 100 / 1,025.
    expected |= {
        "parameters": "1,508,352",
        "wall time": "0:00:12",
        "tokens/s": "1,025",
        "time per update": "0.10 s",
    }
    assert rows[-1].items() >= expected.items()


def test_csv_has_the_scores_of_every_run(comparison):
    runs, output, _ = comparison
    rows = list(csv.DictReader((output / "report.csv").read_text("utf-8").splitlines()))
    given = [*itertools.chain(*(runs[norm] for norm in LABELS))]
    assert [row["run"] for row in rows] == [run.name for run in given]
    for measure in ("tokenized", "detokenized", "chrf"):
        assert [float(row[measure]) for row in rows] == pytest.approx(scores_of(given, measure))
    last = rows[-1]
    expected = {"norm": "PN", "seed": "3", "updates": "40", "seconds": "12.5", "state": "complete"}
    assert last.items() >= expected.items() and Path(last["data"]).resolve() == Path(
        "/data/not there"
    )
    assert float(last["best validation loss (bits/token)"]) == pytest.approx(4.78)


def test_page_is_whole(comparison):
    runs, output, page = comparison
    files = [
        "report-curves-1.png",
        "report-curves.csv",
        "report-intervals-1.png",
        "report.csv",
        "report.md",
    ]
    assert sorted(path.name for path in output.iterdir()) == files
    assert page.says("Nothing: every run was trained to its end, decoded and scored.")
    pictures = {image.get("src") for image in page.tree.iter("img")}
    assert pictures == {name for name in files if name.endswith(".png")}
    for words in (
        "|tok:none|",
        "|tok:13a|",
        "|nc:6|",
        "beam=5 lenpen=1.0",
        "Imaginary 9000",
        "2 × H <x> & y",
    ):
        assert page.says(words)
    command = "pn train verses_es_en --data '/data/not there'"
    for words in (
        "](report-curves-1.png)",
        str(runs["pn"][0]),
        command,
        "model._name=transformer_pnv_tiny",
    ):
        assert words in page.text


def test_one_seed_has_no_deviation(tmp_path):
    runs = [make_run(tmp_path / norm, norm) for norm in ("ln", "pn")]
    page = report(*runs, output=tmp_path / "out")
    for row in page.systems.values():
        assert (
            row["seeds scored"] == "1 (1)"
            and row["std, tokenized BLEU"] == row["std, chrF2"] == "– (one seed)"
        )
    assert "**No difference is tested over seeds:** one seed." in page.headline
    (row,) = page.table("system", "tokenized BLEU")
    assert row["tokenized BLEU"] == row["chrF2"] == "not tested: one seed"
    row = page.table("measure", "difference and p, per seed")[0]
    assert re.fullmatch(r"seed 1: \+\d\S+, p [<=] \S+", row["difference and p, per seed"])


def test_other_data_is_compared_with_nothing(tmp_path):
    """One of them has counts of its text."""
    runs = [
        make_run(tmp_path / "ln", "ln"),
        make_run(tmp_path / "pn", data=DATA.replace("bpe=4000", "bpe=8000")),
    ]
    (runs[0] / "data").write_text(f"{tmp_path}\n")
    (tmp_path / "counts.txt").write_text("train=28170\ntest.read=9\n")
    page = report(*runs, output=tmp_path / "out")
    results = [table for table in page.tables if table[0][:2] == ["norm", "seeds scored"]]
    assert [[row[0] for row in table[1:]] for table in results] == [["LN"], ["PN"]]
    assert page.says(
        "Nothing to compare: LN, or every other system, is missing or was not measured."
    )
    assert (tmp_path / "out/report-curves-2.png").exists()
    rows = {row["data"]: row["value"] for row in page.table("data", "value")}
    assert rows["sentence pairs, train"] == "28,170" and rows["sentence pairs, test"] == "not known"


def test_paths_are_shown_from_the_working_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert relative(f"{tmp_path}/runs/a") == relative(tmp_path / "runs/a") == "runs/a"
    assert (
        relative(f"score: '{tmp_path}/a' and model.path={tmp_path}/b")
        == "score: 'a' and model.path=b"
    )
    other = f"/backup{tmp_path}/runs/a"  # the same names, elsewhere
    assert relative(other) == other
    monkeypatch.chdir("/")
    assert relative("tcp://host:1 and /a") == "tcp://host:1 and /a"


def with_scores(folder: Path, bleu: dict[str, tuple[float, ...]]) -> list[Path]:
    """Runs of the seeds 1, 2, ... (norm -> the BLEU of each)."""
    runs = [
        (norm, seed, score) for norm, scores in bleu.items() for seed, score in enumerate(scores, 1)
    ]
    return [
        with_score(make_run(folder / f"{norm}_seed{seed}", norm, seed), score)
        for norm, seed, score in runs
    ]


@pytest.mark.parametrize(
    ("bleu", "sentence"),
    [
        (
            {"ln": (20.0, 20.2), "pn": (25.0, 25.1)},
            "**Tokenized BLEU:** better than LN: PN +4.95 (+4.31 to +5.59).",
        ),
        (
            {"ln": (20.0, 22.0), "pn": (21.0, 22.0)},
            "no system differs significantly from LN; inconclusive: PN +0.50",
        ),
        ({"ln": (20.0, 20.2), "pn": (18.0, 18.1)}, "worse than LN: PN −2.05"),
        (
            {"ln": (20.0, 21.0, 22.0), "pn": (20.1, 21.0, 22.1)},
            "equivalent to LN within ±0.3: PN +0.07",
        ),
        (
            {"bn": (20.0, 20.2), "pn": (25.0, 25.1)},
            "no control (LN), with which the systems could be compared",
        ),
        # A system with one seed is not tested and does not count.
        (
            {"ln": (20.0, 20.2), "bn": (10.0,), "pn": (25.0, 25.1)},
            "better than LN: PN +4.95 (+4.31 to +5.59).",
        ),
        ({"pn": (20.0, 20.2)}, "PN is the only system that was scored"),
        ({}, "no run was scored"),
    ],
)
def test_the_first_sentences_say_what_differs(bleu, sentence, tmp_path):
    """Also beside a run that was not decoded."""
    runs = [*with_scores(tmp_path, bleu), make_run(tmp_path / "x", "pnv", decoded=False)]
    assert sentence in report(*runs, output=tmp_path / "out").headline


def test_planned_comparisons_are_tested_apart(tmp_path):
    """Without correction, by the noise of all systems: a t-test of the linear model, by hand."""
    bleu = {"ln": (20.0, 20.6, 20.4), "bn": (20.5, 20.9, 21.1), "pn": (21.0, 21.8, 21.2)}
    options = ("--resamples", "10", "--planned", "PN:bleu")
    sentence = report(
        *with_scores(tmp_path, bleu), output=tmp_path / "out", options=options
    ).headline
    table = numpy.array(list(bleu.values()))
    residual = table - table.mean(axis=1, keepdims=True) - table.mean(axis=0) + table.mean()
    half = stats.t.isf(0.025, 4) * ((residual**2).sum() / 4 * 2 / 3) ** 0.5
    assert f"PN − LN: +1.00 ({1 - half:+.2f} to {1 + half:+.2f}), p = " in sentence
    assert "higher in 3 of 3 blocks (not corrected" in sentence


def test_systems_of_other_machines_are_not_compared(tmp_path):
    runs = with_scores(tmp_path, {"ln": (20.0, 20.6), "pn": (21.0, 21.8), "bn": (21.0, 21.1)})
    for run in runs[4:]:
        other = START | {"gpus": [], "cpu": "Other 1"}
        starts = [other | {"git_commit": commit} for commit in ("1a", "1a", "2b-modified")]
        (run / "starts.jsonl").write_text("".join(f"{json.dumps(start)}\n" for start in starts))
    page = report(*runs, output=tmp_path / "out")
    rows = {row["system"]: row["tokenized BLEU"] for row in page.table("system", "tokenized BLEU")}
    assert rows["BN"] == "not tested: no seed on one machine in common with LN" and rows[
        "PN"
    ].startswith("+1.10 (")
    assert page.says("The runs are of several machines (H <x> & y; Other 1)")
    of_csv = pandas.read_csv(tmp_path / "out/report.csv")
    assert list(of_csv["machine"]) == ["H <x> & y"] * 2 + ["Other 1"] * 2 + ["H <x> & y"] * 2
    assert list(of_csv["code"].fillna("")) == [
        "",
        "",
        "1a and 2b-modified",
        "1a and 2b-modified",
        "",
        "",
    ]


def test_only_its_own_files_are_written(tmp_path):
    run = make_run(tmp_path / "run")
    output = tmp_path / "deep/er/out"
    report(run, output=output)
    (output / "mine.png").write_text("mine")
    first = {path.name: path.read_bytes() for path in output.iterdir()}
    report(run, output=output)
    assert {path.name: path.read_bytes() for path in output.iterdir()} == first


def test_markdown_by_hand():
    """A table with a hole is refused."""
    with pytest.raises(ValueError, match="hole"):
        markdown.table(pandas.DataFrame({"a": ["1"], "b": [""]}))
    frame = pandas.DataFrame({"a": [markdown.code("p|q")], "b": ["1.5"], "c": ["r|s"]})
    code, missing = markdown.code("x`y|z", in_table=False), markdown.missing("none_of_it _at_ all")
    text = f"# A &lt;b&gt;\n\nsee {code}: {missing}\n\n{markdown.table(frame)}"
    assert text == (
        "# A &lt;b&gt;\n\nsee ``x`y|z``: *none_of_it \\_at\\_ all*\n\n"
        "| a      |   b | c    |\n|:-------|----:|:-----|\n| `p\\|q` | 1.5 | r\\|s |"
    )
    page = Page(text)
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
    page = report(run, output=tmp_path / "out", options=options)
    row = page.systems["PN"]
    assert row["paper"] == str(expected)
    ours = float(row["tokenized BLEU"])
    assert float(row["difference"].replace("−", "-")) == pytest.approx(ours - expected, abs=0.006)
    assert page.says("Not comparable with the paper: its test set has")
    assert page.says("The paper's number for PN is of models with model.norm_variant=release.")
    assert not page.says("The paper's number for LN")
    assert page.says("The same table has, from other papers:") and page.says(
        "DS-Init (Zhang et al. 2019a) 34.4"
    ) == ("wmt" not in options[1])
    page = report(run, output=tmp_path / "out", options=("--paper", "adanorm-1-wmt14"))
    assert not page.says("from other papers") and page.says("the norms inside the layers stay LN")


def test_a_published_table_of_ones_own(tmp_path):
    """Beside the systems with its settings,

    with the published score line and the line of every run.
    """
    table = tmp_path / "published.yaml"
    table.write_text(
        "source: A. Author 2026\nexact: true\nrows:\n"
        "- {label: Their LN, norm: layer, bleu: 41.02, signature: '71.0/47.5 (BP = 0.999)', "
        "settings: {dropout: 0.3}}\n"
    )
    runs = [
        make_run(tmp_path / name, "ln", model__dropout=dropout)
        for name, dropout in (("ln", 0.3), ("other", 0.1))
    ]
    page = report(*runs, output=tmp_path / "out", options=("--paper", table))
    assert sorted(row["paper"] for row in page.systems.values()) == ["41.02", "not in the paper"]
    assert page.says("Paper: tokenized BLEU. A. Author 2026.")
    assert page.says("Their LN, as published: 71.0/47.5 (BP = 0.999).") and page.says("seed 1: 3")
    assert not page.says("Not comparable")


def test_rows_of_a_table_that_share_a_norm(tmp_path):
    """Each system is shown with the row whose settings it has."""

    def papers(*runs, table="adanorm-3"):
        page = report(*runs, output=tmp_path / "out", options=("--paper", table))
        assert not page.says("is of models with")
        return {norm: row["paper"] for norm, row in page.systems.items()}, page

    options = {"model__decoder_norm": "detach"}
    runs = [
        make_run(tmp_path / name, "dn", model__norm_options={"detach": name}, **options)
        for name in ("mean", "std")
    ]
    assert papers(*runs)[0] == {
        "DetachNorm (detach=mean)": "35.6",
        "DetachNorm (detach=std)": "34.2",
    }
    assert papers(runs[0])[0] == {"DetachNorm": "35.6"}
    assert papers(make_run(tmp_path / "unlike", "dn"))[0] == {"DetachNorm": "not in the paper"}
    found, page = papers(
        make_run(tmp_path / "every", "none", model__decoder_norm="none"), table="adanorm-1-wmt14"
    )
    assert [*found.values()] == ["diverges"] and page.table("norm", "paper")[0]["difference"] == "–"
    last = {f"model__{side}_norm_last": "layer-simple" for side in ("encoder", "decoder")}
    runs = [make_run(tmp_path / "inside", "ln", **last), make_run(tmp_path / "plain", "ln")]
    assert {*papers(*runs, table="adanorm-4-code-iwslt15")[0].values()} == {"31.6", "31.2"}


@pytest.mark.parametrize(
    ("name", "count", "data"),
    [
        ("powernorm-1", 6750, "source=de\ntarget=en\nlower=1\nbpe=10000\n"),
        (
            "powernorm-1-wmt14",
            3003,
            "source=en\ntarget=de\nlower=0\nbpe=32764\naggressive=1\ncompound_split=1\n",
        ),
    ],
)
def test_paper_is_recognised_by_the_data(name, count, data, tmp_path):
    run = make_run(tmp_path / "run", "ln", data=data, count=1)
    folder, split = run / "generate/test", name == "powernorm-1-wmt14"
    # not the size of its test set
    assert "paper" not in report(run, output=tmp_path / "out").systems["LN"]
    for file in ("hyp.tok", "ref.tok"):
        (folder / file).write_text("a\n" * count)
    scores = json.loads((folder / "scores.json").read_text()) | {"sentences": count}
    for compound_split in (split, not split):
        scores["tokenized"]["compound_split"] = compound_split
        (folder / "scores.json").write_text(json.dumps(scores))
        page = report(run, output=tmp_path / "out")
        assert page.table("norm", "paper")[0]["paper"] == str(PAPER[name].row("layer", {}).bleu)
        assert page.says("Not comparable") is (compound_split is not split)
        assert page.says("35.4 in its text") == (not split)
    assert page.says(
        f"Not comparable with the paper: scored {'without' if split else 'with'} compound splitting"
    )
    if not split:  # training sets: the whole one after another tokenizer, and a part of the corpus
        (run / "data").write_text(f"{tmp_path}\n")
        for pairs in (160_215, 14_410):
            (tmp_path / "counts.txt").write_text(f"train={pairs}\n")
            assert ("paper" in report(run, output=tmp_path / "out").systems["LN"]) is (
                pairs > 150_000
            )
        page = report(run, "--paper", name, output=tmp_path / "out")
        assert page.says(
            "Not comparable with the paper: its training set has 160,239 pairs, this one 14,410."
        )
