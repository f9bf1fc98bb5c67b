"""pn report on run directories that are written here, file by file; what it says is checked against other sources."""

import argparse
import contextlib
import csv
import dataclasses
import html
import itertools
import json
import re
from pathlib import Path
from types import SimpleNamespace
from unittest import mock
from xml.etree import ElementTree

import numpy
import pandas
import pytest
import torch
import yaml
from markdown_it import MarkdownIt
from scipy import stats

from pn_fairseq import norms
from pn_fairseq.common.published import PAPER
from pn_fairseq.pipeline.metrics import METRICS, Metric, Scoring, TokenizedBLEU
from pn_fairseq.pipeline.scoring import Text, score_lines, score_texts
from pn_fairseq.report import markdown, translation
from pn_fairseq.report.runs import read_runs
from pn_fairseq.report.significance import Design
from pn_fairseq.report.systems import names
from pn_fairseq.report.tables import relative

from ..fixtures.reports import (
    DATA,
    ERRORS,
    START,
    corpus_text,
    make_run,
    settings,
    train_log,
    with_score,
    write_scores,
)
from ..scripts_helpers import verb

main = verb("report")


class Page:
    """report.md as a renderer of Markdown reads it: its tables and its text."""

    def __init__(self, text: str):
        rendered = MarkdownIt("commonmark", {"html": False, "xhtmlOut": True}).enable("table").render(text)
        self.tree = ElementTree.fromstring(f"<body>{rendered}</body>")
        tables = (table.iter("tr") for table in self.tree.iter("table"))
        self.tables = [[["".join(cell.itertext()) for cell in row] for row in rows] for rows in tables]

    def table(self, *columns: str) -> list[dict[str, str]]:
        """The rows of the first table that has these columns; a second column of a name counts as ``NAME 2``."""
        for header, *rows in self.tables:
            names = [f"{n} {header[: i + 1].count(n)}" if n in header[:i] else n for i, n in enumerate(header)]
            if set(columns) <= set(names):
                return [dict(zip(names, row, strict=True)) for row in rows]
        raise AssertionError(f"no table has {columns}")

    def says(self, text: str) -> bool:
        return text in " ".join("".join(self.tree.itertext()).split())


def report(*runs: Path, output: Path, options=("--resamples", "10"), draw: bool = False) -> Page:
    def no_plot(rows, file):
        file.write_bytes(b"PNG")

    with contextlib.nullcontext() if draw else mock.patch("pn_fairseq.report.curves.plot", no_plot):
        assert main([*map(str, runs), "--output", str(output), *options]) == 0
    return Page((output / "report.md").read_text("utf-8"))


@pytest.fixture(scope="module")
def comparison(tmp_path_factory) -> tuple[dict[str, list[Path]], Path, Page]:
    """Four norms, three seeds; runs by norm, the report's folder and its HTML page."""
    base = tmp_path_factory.mktemp("comparison")
    runs = {norm: [make_run(base / f"{norm}_{seed}", norm, seed) for seed in (1, 2, 3)] for norm in LABELS}
    # The order of the arguments has no influence on the order of the table.
    given = [run for norm in ("pn", "bn", "ln", "pnv") for run in runs[norm]]
    return runs, base / "out", report(*given, output=base / "out", options=("--resamples", "100"), draw=True)


def scores_of(runs: list[Path], measure: str) -> list[float]:
    return [json.loads((run / "generate/test/scores.json").read_text())[measure]["score"] for run in runs]


LABELS = {"ln": "LN", "bn": "BN", "pnv": "PN-V", "pn": "PN"}


def test_means_and_deviations_over_seeds(comparison):
    runs, _, page = comparison
    rows = page.table("norm", "seeds scored", "tokenized BLEU")
    assert [row["norm"] for row in rows] == list(LABELS.values())
    for row, norm in zip(rows, LABELS, strict=True):
        assert row["seeds scored"] == "3 (1, 2, 3)"
        for measure, name in (("tokenized", "tokenized BLEU"), ("detokenized", "detokenized BLEU"), ("chrf", "chrF2")):
            values = numpy.array(scores_of(runs[norm], measure))
            assert row[name] == f"{values.mean():.2f}"
            assert row[f"std, {name}"] == f"{values.std(ddof=1):.2f}"


def test_differences_over_seeds(comparison):
    """Means, noise and intervals by hand: balanced blocks change the noise and nothing else."""
    runs, output, page = comparison
    rows = {row["system"]: row for row in page.table("system", "tokenized BLEU", "chrF2")}
    values = numpy.array([scores_of(runs[norm], "tokenized") for norm in ("ln", "bn", "pnv", "pn")])
    plain = values - values.mean(axis=0) + values.mean()
    noise = ((plain - plain.mean(axis=1, keepdims=True)) ** 2).sum() / 6  # 4 systems, 3 seeds: (4 - 1) (3 - 1)
    design = Design([(str(system), seed) for system in range(4) for seed in range(3)], "0")
    assert design.degrees == 6 and design.critical() == pytest.approx(3.10, abs=0.0075)  # Dunnett 1964
    half = design.critical() * (noise * 2 / 3) ** 0.5
    for norm, mine in zip(("bn", "pnv", "pn"), values[1:], strict=True):
        difference = mine.mean() - values[0].mean()
        ends = " to ".join(f"{difference + side * half:+.2f}" for side in (-1, 1))
        verdict = "worse" if difference + half < 0 else "better" if difference > half else "not resolved"
        assert rows[LABELS[norm]]["tokenized BLEU"] == f"{difference:+.2f} ({ends}) {verdict}".replace("-", "−")
    for norm, seed in itertools.product(("bn", "pn"), (1, 2, 3)):
        one = scores_of(runs[norm], "tokenized")[seed - 1] - scores_of(runs["ln"], "tokenized")[seed - 1]
        row = next(row for row in page.table("measure", "norm") if row["norm"] == LABELS[norm])
        assert f"seed {seed}: {one:+.2f}".replace("-", "−") in row["difference and p, per seed"]
    worst = next(row for row in page.table("measure", "norm") if row["norm"] == "BN")
    # The least p of 100 resamples, 1 / 101, for three systems.
    assert "p = 0.030" in worst["difference and p, per seed"] and "p = 0.010" not in worst["difference and p, per seed"]
    picture = (output / "report-intervals-1.png").read_bytes()
    assert picture.startswith(b"\x89PNG")


class LengthRatio(TokenizedBLEU):
    """A metric of somebody's own: 100 times the length of the hypotheses, relative to the references."""

    def corpus_score(self, hypotheses, references):
        result = super().corpus_score(hypotheses, references)
        result.score = 100 * result.ratio
        return result


def test_a_metric_is_added_in_one_place(tmp_path, monkeypatch):
    """Scores, their lines and the report show it, beside a run that was scored before it existed."""
    ratio = Metric("ratio", "length ratio", "ratio", compute=lambda scoring: LengthRatio(False, False), on_tokens=True)
    monkeypatch.setitem(METRICS, "ratio", ratio)
    runs = [make_run(tmp_path / norm, norm) for norm in ("ln", "pn")]
    scores, _ = score_texts(Scoring(), tokens=Text(["a b c"] * 2, [["a b c d"] * 2]))
    assert re.match(r"length ratio:     BLEU\|nrefs:1.* = 75\.00", score_lines(scores)[-1])
    file = runs[1] / "generate/test/scores.json"
    values = json.loads(file.read_text()) | {"ratio": dataclasses.asdict(scores["ratio"])}
    file.write_text(json.dumps(values))
    page = report(*runs, output=tmp_path / "report")
    rows = page.table("norm", "length ratio")
    assert [row["length ratio"] for row in rows] == ["not scored by it", "75.00"]
    with open(tmp_path / "report/report.csv") as table:
        assert [row["ratio"] for row in csv.DictReader(table)] == ["", "75.0"]


def test_training_table(comparison):
    _, _, page = comparison
    rows = page.table("norm", "seed", "state", "wall time")
    assert len(rows) == 12
    row = rows[-1]  # PN, seed 3
    assert (row["norm"], row["seed"], row["run"], row["state"]) == ("PN", "3", "pn_3", "complete")
    assert row["updates"] == "40 of 40" and row["parameters"] == "1,508,352"
    assert row["best validation loss (bits/token)"] == "4.780 at 40"  # 5 + 0.25 + 0.03 - 0.5
    assert row["wall time"] == "0:00:12"
    assert row["tokens/s"] == "1,025"  # median of 1010, 1020, 1030, 1540
    assert row["time per update"] == "0.10 s"  # 100 / 1,025


def test_csv_has_the_scores_of_every_run(comparison):
    runs, output, _ = comparison
    rows = list(csv.DictReader((output / "report.csv").read_text("utf-8").splitlines()))
    assert [row["run"] for row in rows] == [run.name for norm in LABELS for run in runs[norm]]
    for row, run in zip(rows, itertools.chain(*(runs[norm] for norm in LABELS)), strict=True):
        scores = json.loads((run / "generate/test/scores.json").read_text())
        for measure in ("tokenized", "detokenized", "chrf"):
            assert float(row[measure]) == pytest.approx(scores[measure]["score"])
    last = rows[-1]  # PN, seed 3
    assert (last["norm"], last["seed"], last["updates"], last["seconds"], last["state"]) == (
        "PN", "3", "40", "12.5", "complete",
    )  # fmt: skip
    assert Path(last["data"]).resolve() == Path("/data/not there")
    assert float(last["best validation loss (bits/token)"]) == pytest.approx(4.78)


def test_page_is_whole(comparison):
    runs, output, page = comparison
    files = ["report-curves-1.png", "report-curves.csv", "report-intervals-1.png"]
    files += ["report.csv", "report.md"]
    assert sorted(path.name for path in output.iterdir()) == files
    assert page.says("Nothing: every run was trained to its end, decoded and scored.")
    pictures = {image.get("src") for image in page.tree.iter("img")}
    assert pictures == {name for name in files if name.endswith(".png")}
    text = (output / "report.md").read_text("utf-8")
    assert "](report-curves-1.png)" in text
    for table in page.tables:
        assert all(cell.strip() for row in table for cell in row)
    for signature in ("|tok:none|", "|tok:13a|", "|nc:6|", "beam=5 lenpen=1.0"):
        assert page.says(signature)
    assert page.says("Imaginary 9000") and page.says("2 × H <x> & y")
    assert str(runs["pn"][0]) in text
    assert "pn train verses_es_en --data '/data/not there'" in text
    assert "model._name=transformer_pnv_tiny" in text


def test_settings_that_differ(comparison, tmp_path):
    _, _, page = comparison
    (row,) = page.table("setting", "LN", "PN")
    assert row == {"setting": "encoder norm", "LN": "LN", "BN": "BN", "PN-V": "PN-V", "PN": "PN"}
    runs = [
        make_run(tmp_path / "a", "pn", 1, log=train_log(5)),
        make_run(tmp_path / "b", "pn", 2, dataset__num_workers=3, common__log_interval=50),
        make_run(tmp_path / "c", "pn", 1, model__dropout=0.3),
        make_run(tmp_path / "d", "pn", 1, model__norm_variant="release"),
    ]
    page = report(*runs, output=tmp_path / "out")
    labels = [row["norm"] for row in page.table("norm", "seeds scored")]
    plain, dropout, release = labels
    assert plain == "PN" and dropout == "PN (dropout=0.3)" and release == "PN (norm_variant=release)"
    assert page.table("norm", "seeds scored")[0]["seeds scored"] == "2 (1, 2)"
    differing = {row["setting"]: row for row in page.table("setting", plain)}
    assert differing["model.dropout"][dropout] == "0.3"
    assert differing["dataset.num_workers"][plain] == "default, 3"
    assert not {"common.seed", "task.data", "common.log_file", "optimizer.lr"} & set(differing)
    assert page.says("Nothing to compare: LN, or every other system, is missing")


def test_one_seed_has_no_deviation(tmp_path):
    runs = [make_run(tmp_path / norm, norm) for norm in ("ln", "pn")]
    page = report(*runs, output=tmp_path / "out")
    for row in page.table("norm", "seeds scored", "std, tokenized BLEU"):
        assert row["seeds scored"] == "1 (1)" and row["std, tokenized BLEU"] == row["std, chrF2"] == "– (one seed)"
    (row,) = page.table("system", "tokenized BLEU")
    assert row["tokenized BLEU"] == row["chrF2"] == "not tested: one seed"
    row = page.table("measure", "difference and p, per seed")[0]
    assert re.fullmatch(r"seed 1: \+\d\S+, p [<=] \S+", row["difference and p, per seed"])


def test_other_data_is_compared_with_nothing(tmp_path):
    other = DATA.replace("bpe=4000", "bpe=8000")
    runs = [make_run(tmp_path / "ln", "ln"), make_run(tmp_path / "pn", "pn", data=other)]
    page = report(*runs, output=tmp_path / "out")
    results = [table for table in page.tables if table[0][:2] == ["norm", "seeds scored"]]
    assert [[row[0] for row in table[1:]] for table in results] == [["LN"], ["PN"]]
    assert page.says("Nothing to compare: LN, or every other system, is missing or was not measured.")
    assert (tmp_path / "out/report-curves-2.png").exists()


@pytest.mark.parametrize(
    ("options", "data", "expected"),
    [
        ((), "source=de\ntarget=en\nlower=1\nbpe=10000\n", None),  # not the size of its test set
        (("--paper", "powernorm-1"), "source=de\ntarget=en\nlower=1\nbpe=300\n", (35.5, 34.4, 35.5, 35.9)),
        (("--paper", "powernorm-1-wmt14"), DATA, (29.5, 28.1, 28.5, 30.1)),
    ],
)
def test_paper(options, data, expected, tmp_path):
    run = make_run(tmp_path / "run", "pn", data=data)
    page = report(run, output=tmp_path / "out", options=options)
    rows = {row["norm"]: row for row in page.table("norm", "seeds scored")}
    if expected is None:
        assert "paper" not in rows["PN"]
        return
    assert rows["PN"]["paper"] == str(expected[3])
    ours = float(rows["PN"]["tokenized BLEU"])
    assert float(rows["PN"]["difference"].replace("−", "-")) == pytest.approx(ours - expected[3], abs=0.006)
    assert page.says("Not comparable with the paper: its test set has")
    assert page.says("The paper's number for PN is of models with model.norm_variant=release.")
    assert not page.says("The paper's number for LN")
    assert page.says("The same table has, from other papers:") and page.says("DS-Init (Zhang et al. 2019a) 34.4") == (
        "wmt" not in options[1]
    )
    page = report(run, output=tmp_path / "out", options=("--paper", "adanorm-1-wmt14"))
    assert not page.says("from other papers") and page.says("the norms inside the layers stay LN")


def test_a_published_table_of_ones_own(tmp_path):
    """Beside the systems with its settings, with the published score line and the line of every run."""
    table = tmp_path / "published.yaml"
    table.write_text(
        "source: A. Author 2026\nexact: true\nrows:\n"
        "- {label: Their LN, norm: layer, bleu: 41.02, signature: '71.0/47.5 (BP = 0.999)', settings: {dropout: 0.3}}\n"
    )
    runs = [make_run(tmp_path / name, "ln", model__dropout=dropout) for name, dropout in (("ln", 0.3), ("other", 0.1))]
    page = report(*runs, output=tmp_path / "out", options=("--paper", table))
    papers = [row["paper"] for row in page.table("norm", "seeds scored")]
    assert sorted(papers) == ["41.02", "not in the paper"]
    assert page.says("Paper: tokenized BLEU. A. Author 2026.")
    assert page.says("Their LN, as published: 71.0/47.5 (BP = 0.999).") and page.says("seed 1: 3")
    assert not page.says("Not comparable")


def test_rows_of_a_table_that_share_a_norm(tmp_path):
    """Each system is shown with the row whose settings it has."""
    runs = []
    for name, detach in (("one", "mean"), ("other", "std")):
        options = {"model__norm_options": {"detach": detach}}
        runs.append(make_run(tmp_path / name, "dn", model__decoder_norm="detach", **options))
    options = ("--paper", "adanorm-3")
    page = report(*runs, output=tmp_path / "out", options=options)
    rows = {row["norm"]: row["paper"] for row in page.table("norm", "seeds scored")}
    assert rows == {"DetachNorm (detach=mean)": "35.6", "DetachNorm (detach=std)": "34.2"}
    page = report(runs[0], output=tmp_path / "out", options=options)
    rows = {row["norm"]: row["paper"] for row in page.table("norm", "seeds scored")}
    assert rows == {"DetachNorm": "35.6"}
    assert not page.says("is of models with")
    every = make_run(tmp_path / "every", "none", model__decoder_norm="none")
    page = report(every, output=tmp_path / "out", options=("--paper", "adanorm-1-wmt14"))
    assert [page.table("norm", "paper")[0][name] for name in ("paper", "difference")] == ["diverges", "–"]
    last = {"model__encoder_norm_last": "layer-simple", "model__decoder_norm_last": "layer-simple"}
    runs = [make_run(tmp_path / "inside", "ln", **last), make_run(tmp_path / "plain", "ln")]
    page = report(*runs, output=tmp_path / "out", options=("--paper", "adanorm-4-code-iwslt15"))
    assert {row["paper"] for row in page.table("norm", "paper")} == {"31.6", "31.2"}
    unlike = make_run(tmp_path / "unlike", "dn")
    page = report(unlike, output=tmp_path / "out", options=options)
    assert page.table("norm", "seeds scored")[0]["paper"] == "not in the paper"


@pytest.mark.parametrize(("name", "count"), [("powernorm-1", 6750), ("powernorm-1-wmt14", 3003)])
def test_paper_is_recognised_by_the_data(name, count, tmp_path):
    settings = {
        "powernorm-1": "source=de\ntarget=en\nlower=1\nbpe=10000\n",
        "powernorm-1-wmt14": "source=en\ntarget=de\nlower=0\nbpe=32764\naggressive=1\ncompound_split=1\n",
    }
    run = make_run(tmp_path / "run", "ln", data=settings[name], count=1)
    folder = run / "generate/test"
    for file in ("hyp.tok", "ref.tok"):
        (folder / file).write_text("a\n" * count)
    scores = json.loads((folder / "scores.json").read_text())
    scores["tokenized"]["compound_split"] = name == "powernorm-1-wmt14"
    (folder / "scores.json").write_text(json.dumps(scores | {"sentences": count}))
    page = report(run, output=tmp_path / "out")
    assert page.table("norm", "paper")[0]["paper"] == str(PAPER[name].row("layer", {}).bleu)
    assert not page.says("Not comparable")
    assert page.says("35.4 in its text") == (name == "powernorm-1")
    scores["tokenized"]["compound_split"] = name != "powernorm-1-wmt14"
    (folder / "scores.json").write_text(json.dumps(scores | {"sentences": count}))
    page = report(run, output=tmp_path / "out")
    without = "without" if name == "powernorm-1-wmt14" else "with"
    assert page.says(f"Not comparable with the paper: scored {without} compound splitting")


BROKEN = '{"loss": "1", "num_up\n'


PATIENCE = "early stop since valid performance hasn't improved for last 5 runs\ndone training in 3.0 seconds\n"
NAN = re.sub(r'"loss": "[0-9.]+"(?=.*"num_updates": "[34]0")', '"loss": "nan"', train_log(5))
NOT_VALIDATED = "".join(line for line in train_log(5).splitlines(True) if "valid" not in line)
#: What is damaged -> the file, its text or None if it is missing, the run's state, and what the report says.
DAMAGES = {
    "failed": ("failed", "train: boom <b>\n", "failed: train: boom <b>", ["failed: train: boom <b>"]),
    "unfinished": ("train.log", train_log(5, 20, done=None), "not finished", ["not finished: update 20 of 40"]),
    "cut off": ("train.log", train_log(5, done=None), "complete", ["training cut off, but at update 40 of 40"]),
    "patience": ("train.log", train_log(5, 20, done=None) + PATIENCE, "complete",
                 ["training ended at update 20 of 40: no better validation loss 5 times in a row"]),
    "nan": ("train.log", NAN, "complete", ["the training loss is not finite", "2 of 4 records, first at update 30"]),
    "faults": ("train.log", train_log(5) + "NaN detected in output of fc1\n", "complete", ["an infinity in 1 lines"]),
    "never validated": ("train.log", NOT_VALIDATED, "complete", ["never validated"]),
    "no log": ("train.log", None, "not trained", ["not trained: there is no train.log"]),
    "empty log": ("train.log", "nothing\n", "not trained", ["not trained: train.log has no record"]),
    "broken line": ("train.log", train_log(5) + BROKEN, "complete", ["1 line of train.log cannot be read"]),
    "no checkpoint": ("checkpoints/averaged.pt", None, "trained, not decoded", [", and there is no checkpoint"]),
    "not decoded": ("generate/test/hyp.tok", None, "trained, not decoded", ["there is no generate/test/hyp.tok"]),
    "not scored": ("generate/test/scores.json", None, "decoded, not scored", ["scores.json' (pn score writes it)"]),
    "bad scores": ("generate/test/scores.json", "{}", "decoded, not scored", ["is not a file of pn score"]),
    "old scores": ("generate/test/scores.json.made.txt", "hypotheses=0\n", "decoded, not scored",
                   ["scores.json belongs to other hypotheses"]),
    "no starts": ("starts.jsonl", None, "complete", ["there is no starts.jsonl", "Not recorded"]),
    "bad start": ("starts.jsonl", json.dumps(START) + "\n{\n", "complete", ["line 2 of starts.jsonl cannot be read"]),
    "no data.settings": ("data.settings", None, "complete", ["data.settings does not exist", "Data not known"]),
    "bad config": ("config.yaml", "a: [", "complete", ["config.yaml cannot be read"]),
}  # fmt: skip


def test_no_hole(tmp_path):
    runs = {}
    for what, (name, text, *_) in DAMAGES.items():
        run = runs[what] = make_run(tmp_path / what)
        (run / name).unlink() if text is None else (run / name).write_text(text)
        if what == "no checkpoint":
            (run / "generate/test/hyp.tok").unlink()
        elif what == "patience":
            (run / "config.yaml").write_text(yaml.safe_dump(settings() | {"checkpoint": {"patience": 5}}))
    page = report(*runs.values(), output=tmp_path / "out")
    states = {row[2]: row[3] for table in page.tables if table[0][3:4] == ["state"] for row in table[1:]}
    bullets = re.findall(r"^- `(.+?)`: (.+)$", html.unescape((tmp_path / "out/report.md").read_text("utf-8")), re.M)
    for what, (_, _, state, needles) in DAMAGES.items():
        assert states[what] == state
        sentences = " ".join(text for path, text in bullets if path == str(runs[what])).replace("\\", "")
        for needle in needles:
            assert needle in sentences or page.says(needle), needle
        assert sentences
    assert not page.says("Nothing: every run")
    for table in page.tables:
        assert all(cell.strip() for row in table for cell in row)


def test_a_run_that_never_began_is_named(tmp_path):
    (tmp_path / "pn_1").mkdir()
    (tmp_path / "pn_1/failed").write_text("train: no such norm\n")
    page = report(tmp_path / "pn_1", make_run(tmp_path / "ln_1", "ln"), output=tmp_path / "out")
    assert page.says("pn_1: failed: train: no such norm") and page.says("pn_1: never began: there is neither")
    page = report(tmp_path / "pn_1", output=tmp_path / "out")  # and without others
    assert page.says("failed: train: no such norm")


def test_restarts_are_added_up(tmp_path):
    # The first start was cut off after update 30, the second resumed from update 20 and finished.
    log = train_log(5, updates=30, done=None) + train_log(5, first=30, done=4.0)
    page = report(make_run(tmp_path / "run", log=log), output=tmp_path / "out")
    row = page.table("state", "wall time")[0]
    assert row["updates"] == "40 of 40" and row["state"] == "complete"
    (of_csv,) = csv.DictReader((tmp_path / "out/report.csv").read_text("utf-8").splitlines())
    assert of_csv["tokens"] == "5000.0"  # 30 updates, and 20 more
    cut_off = sum(10 * 100 / (1000 + update) for update in (10, 20, 30))
    assert cut_off < 3  # fairseq's own clock, "wall", counted 3 seconds
    assert row["wall time"] == "at least 0:00:07"
    assert row["time per update"] == "0.10 s"  # of 50 updates of 100 tokens, the median of 1010, ..., 1030, 1030, 1540


def test_a_validation_alone_is_a_training_that_began(tmp_path):
    log = '{"valid_nll_loss": "9.5", "valid_num_updates": "20"}\n'
    row = report(make_run(tmp_path / "run", log=log), output=tmp_path / "out").table("state", "wall time")[0]
    assert row["updates"] == "20 of 40" and row["tokens/s"] == row["wall time"] == row["parameters"] == "not logged"


def test_variants_are_named_by_what_differs_from_most_runs(tmp_path):
    """Norms with several seeds and norms with one, variants of a norm, and a learning rate for two norms."""
    variants = {
        "ln_seed1": ("ln", 1, {}), "ln_seed2": ("ln", 2, {}), "bn_seed1": ("bn", 1, {}), "pn_seed1": ("pn", 1, {}),
        "pn_seed2": ("pn", 2, {}), "a/ln_seed1": ("ln", 1, {"optimization__lr": [0.01], "optimizer__lr": [0.01]}),
        "a/pn_seed1": ("pn", 1, {"optimization__lr": [0.01], "optimizer__lr": [0.01]}),
        "pn+norm_alpha_fwd=0.99_seed1": ("pn", 1, {"model__norm_alpha_fwd": 0.99}),
        "pn+norm_alpha_bwd=0.9_seed1": ("pn", 1, {"model__norm_alpha_fwd": 0.9, "model__norm_alpha_bwd": 0.95}),
        "bn+norm_variant=release_seed1": ("bn", 1, {"model__norm_variant": "release"}),
        "ln+layer_scale_groups=4_seed1": ("ln", 1, {"model__layer_scale_groups": 4}),
    }  # fmt: skip
    runs = [make_run(tmp_path / name, norm, seed, **changes) for name, (norm, seed, changes) in variants.items()]
    page = report(*sorted(runs), output=tmp_path / "out")
    against = {
        "LN (lr=0.01)": "LN", "LN (layer_scale_groups=4)": "LN", "BN": "LN", "BN (norm_variant=release)": "LN",
        "PN": "LN",
        "PN (lr=0.01)": "LN (lr=0.01)", "PN (norm_alpha_fwd=0.99)": "LN",
        "PN (norm_alpha_bwd=0.95, norm_alpha_fwd=0.9)": "LN",
    }  # fmt: skip
    seeds = {row["norm"]: row["seeds scored"] for row in page.table("norm", "seeds scored")}
    assert list(seeds)[0] == "LN" and seeds.keys() == {"LN", *against}
    assert {label for label, seed in seeds.items() if seed == "2 (1, 2)"} == {"LN", "PN"}
    tests = {row["system"]: row["tokenized BLEU"] for row in page.table("system", "tokenized BLEU")}
    assert tests.keys() == against.keys()
    for label, other in against.items():
        assert page.says(f"{label} is compared with {other}.")
        assert tests[label].startswith("not tested: ") == (label != "PN")
    assert page.says("1 system and LN, up to 2 blocks; noise") and page.says("corrected by Bonferroni for 8 systems")
    # LN with five others, LN and LN (lr=0.01) with the rest.
    pictures = sorted(path.name for path in (tmp_path / "out").glob("*.png"))
    assert pictures == ["report-curves-1.png", "report-curves-2.png", "report-intervals-1.png"]


def test_a_batch_is_the_same_on_any_number_of_ranks(tmp_path):
    for name, workers, update_freq in (("a", 1, 2), ("b", 2, 1)):
        # The task language_modeling has a copy of the seed.
        run = make_run(tmp_path / name, seed=workers, optimization__update_freq=[update_freq], task__seed=workers)
        (run / "starts.jsonl").write_text(json.dumps(START | {"world_size": workers, "tokens_per_update": 4096}) + "\n")
    page = report(tmp_path / "a", tmp_path / "b", output=tmp_path / "out")
    assert [row["seeds scored"] for row in page.table("norm", "seeds scored")] == ["2 (1, 2)"]
    # Without a record it follows from the settings and the log: 2048 tokens x 2 x 1 rank in one, x 1 in the other.
    for name in ("a", "b"):
        (tmp_path / name / "starts.jsonl").unlink()
    page = report(tmp_path / "a", tmp_path / "b", output=tmp_path / "out")
    assert [row["norm"] for row in page.table("norm", "seeds scored")] == [
        "PN (tokens_per_update=4096)", "PN (tokens_per_update=2048)",
    ]  # fmt: skip


def test_a_mini_batch_is_a_setting_of_norms_that_read_it(tmp_path):
    """LN is the same with any; BN is not."""
    runs = [
        make_run(tmp_path / f"{norm}{tokens}", norm, dataset__max_tokens=tokens, optimization__update_freq=[freq])
        for norm in ("ln", "bn")
        for tokens, freq in ((1024, 4), (4096, 1))
    ]
    for run in runs:
        (run / "starts.jsonl").write_text(json.dumps(START | {"tokens_per_update": 4096}) + "\n")
    page = report(*runs, output=tmp_path / "out")
    systems = [row["norm"] for row in page.table("norm", "seeds scored")]
    assert systems == ["LN", "BN (max_tokens=1024)", "BN (max_tokens=4096)"]
    assert names(read_runs(runs)) == [("LN", "LN"), ("LN", "LN"), (systems[1], "BN"), (systems[2], "BN")]
    other = make_run(tmp_path / "other", data=DATA.replace("4000", "8000"))
    *_, last = mixed = read_runs([*runs, other])
    assert names(mixed)[-1] == (last.name, last.name)


def test_seeds_on_one_side_and_seeds_not_known(tmp_path):
    runs = [make_run(tmp_path / f"{norm}{n}", norm, n) for norm, n in (("ln", 1), ("ln", 2), ("pn", 2), ("pn", 3))]
    runs += [make_run(tmp_path / norm, norm, common__seed=None) for norm in ("ln", "pn")]
    page = report(*runs, output=tmp_path / "out")
    text = page.table("measure", "difference and p, per seed")[0]["difference and p, per seed"]
    assert re.fullmatch(r"seed 2: \S+, p [<=] \S+; seed not known: \S+, p [<=] \S+", text)
    rows = page.table("norm", "seeds scored")
    assert [row["seeds scored"] for row in rows] == ["3 (1, 2, not known)", "3 (2, 3, not known)"]


def test_counts_of_the_prepared_text(tmp_path):
    run = make_run(tmp_path / "run", decoded=False)
    (run / "data").write_text(f"{tmp_path}\n")
    (tmp_path / "counts.txt").write_text("train=28170\ntest.read=9\n")
    page = report(run, output=tmp_path / "out")
    rows = {row["data"]: row["value"] for row in page.table("data", "value")}
    assert rows["sentence pairs, train"] == "28,170" and rows["sentence pairs, test"] == "not known"


def test_a_seed_that_was_run_twice_counts_once(tmp_path):
    runs = [make_run(tmp_path / name, "pn", seed) for name, seed in (("a", 1), ("b", 1), ("c", 2))]
    references, hypotheses = corpus_text(0.5, 5)
    write_scores(runs[1] / "generate/test", hypotheses, references)
    page = report(*runs, output=tmp_path / "out")
    a, b, c = scores_of(runs, "tokenized")
    row = page.table("norm", "seeds scored")[0]
    assert row["seeds scored"] == "2 (1, 2)"
    assert row["tokenized BLEU"] == f"{((a + b) / 2 + c) / 2:.2f}"
    assert page.says("PN, seed 1 was run more than once (a, b)")


@pytest.mark.parametrize("name", ["a <b> & c", "pipe|and`tick`", "_x_ *y* [z](w)", "$x$ %20#?", "ünï 'quote\" \\ back"])
def test_odd_names_are_shown_as_they_are(name, tmp_path):
    runs = [make_run(tmp_path / name / f"{norm}{name}", norm, model__note=name) for norm in ("ln", "pn")]
    runs.append(make_run(tmp_path / name / f"other{name}", "pn", model__note=f"{name}2"))
    page = report(*runs, output=tmp_path / f"out {name}")
    assert page.says(name)
    assert f"pn{name}" in [row["run"] for row in page.table("norm", "seed", "run")]
    assert f"PN (note={' '.join(name.split())}2)" in [row["norm"] for row in page.table("norm", "seeds scored")]
    # A bar ends a cell unless a backslash stands before it.
    for table in re.findall(r"(?:^\|.*\n)+", (tmp_path / f"out {name}/report.md").read_text("utf-8"), re.M):
        assert len({len(re.findall(r"(?<!\\)\|", line)) for line in table.splitlines()}) == 1


def test_settings_without_text_are_shown(tmp_path):
    runs = [make_run(tmp_path / name, "pn", task__name=name * (name == "a")) for name in ("a", "b")]
    for run in runs:
        (run / "data.settings").write_text(DATA.replace("lower=1", "lower=") + "=1\n")
    page = report(*runs, output=tmp_path / "out")
    (row,) = page.table("setting", "PN (name=a)")
    assert row["setting"] == "task.name" and row['PN (name="")'] == '""'


def test_paths_are_shown_from_the_working_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert relative(f"{tmp_path}/runs/a") == relative(tmp_path / "runs/a") == "runs/a"
    assert relative(f"score: '{tmp_path}/a' and model.path={tmp_path}/b") == "score: 'a' and model.path=b"
    other = f"/backup{tmp_path}/runs/a"  # the same names, elsewhere
    assert relative(other) == other
    monkeypatch.chdir("/")
    assert relative("tcp://host:1 and /a") == "tcp://host:1 and /a"


def test_machines(comparison, tmp_path):
    _, _, page = comparison
    rows = {row["what"]: row["all starts"] for row in page.table("what", "all starts")}
    assert rows["torch"] == "2.13.0" and rows["starts"] == "12"
    runs = [make_run(tmp_path / "a"), make_run(tmp_path / "b", seed=2)]
    with (runs[1] / "starts.jsonl").open("a") as file:
        file.write(json.dumps(START | {"torch": "2.14.0", "started": "2026-01-03T00:00:00+00:00"}) + "\n")
    with (runs[0] / "starts.jsonl").open("a") as file:
        file.write(json.dumps(START | {"machines": [{"ranks": 1, "gpus": []}] * 2, "torch": ""}) + "\n")
    page = report(*runs, output=tmp_path / "out")
    assert page.table("what", "machine 2")[-5]["machine 2"] == "2 × ranks 1, no gpus"
    rows = {row["what"]: row for row in page.table("what", "machine 1", "machine 3")}
    assert rows["torch"]["machine 3"] == "2.14.0" and rows["runs"]["machine 1"] == "a, b"
    assert rows["runs"]["machine 3"] == "b" and rows["last start"]["machine 3"] == "2026-01-03T00:00:00+00:00"
    assert rows["torch"]["machine 2"] == "none"


def headline(*runs: Path, output: Path, options=()) -> str:
    report(*runs, output=output, options=("--resamples", "10", *options))
    lines = (output / "report.md").read_text("utf-8").split("\n\n")
    return " ".join(lines[1:3]).replace("\\", "")


def with_scores(folder: Path, bleu: dict[str, tuple[float, ...]]) -> list[Path]:
    """Runs of the seeds 1, 2, ... (norm -> the BLEU of each)."""
    runs = [(norm, seed, score) for norm, scores in bleu.items() for seed, score in enumerate(scores, 1)]
    return [with_score(make_run(folder / f"{norm}_seed{seed}", norm, seed), score) for norm, seed, score in runs]


@pytest.mark.parametrize(
    ("bleu", "needles"),
    [
        ({"ln": (20.0, 20.2), "pn": (25.0, 25.1)}, ["**Tokenized BLEU:** better than LN: PN +4.95 (+4.31 to +5.59)."]),
        ({"ln": (20.0, 22.0), "pn": (21.0, 22.0)}, ["no system is shown to differ from LN; not resolved: PN +0.50"]),
        ({"ln": (20.0, 20.2), "pn": (18.0, 18.1)}, ["worse than LN: PN −2.05"]),
        ({"ln": (20.0, 21.0, 22.0), "pn": (20.1, 21.0, 22.1)}, ["equivalent to LN within ±0.3: PN +0.07"]),
        ({"ln": (20.0,), "pn": (25.0,)}, ["**No difference is tested over seeds:** one seed."]),
        ({"bn": (20.0, 20.2), "pn": (25.0, 25.1)}, ["no control (LN), with which the systems could be compared"]),
        # A system with one seed is not tested and does not count.
        ({"ln": (20.0, 20.2), "bn": (10.0,), "pn": (25.0, 25.1)}, ["better than LN: PN +4.95 (+4.31 to +5.59)."]),
        ({"pn": (20.0, 20.2)}, ["PN is the only system that was scored"]),
        ({}, ["no run was scored"]),
    ],
)
def test_the_first_sentences_say_what_differs(bleu, needles, tmp_path):
    runs = with_scores(tmp_path, bleu) or [make_run(tmp_path / "x", "pn", decoded=False)]
    sentence = headline(*runs, output=tmp_path / "out")
    assert all(needle in sentence for needle in needles), sentence


def test_planned_comparisons_are_tested_apart(tmp_path):
    """Without correction, by the noise of all systems: a t-test of the linear model, by hand."""
    bleu = {"ln": (20.0, 20.6, 20.4), "bn": (20.5, 20.9, 21.1), "pn": (21.0, 21.8, 21.2)}
    runs = with_scores(tmp_path, bleu)
    sentence = headline(*runs, output=tmp_path / "out", options=("--planned", "PN:bleu"))
    table = numpy.array(list(bleu.values()))
    residual = table - table.mean(axis=1, keepdims=True) - table.mean(axis=0) + table.mean()
    half = stats.t.isf(0.025, 4) * ((residual**2).sum() / 4 * 2 / 3) ** 0.5
    assert f"PN − LN: +1.00 ({1 - half:+.2f} to {1 + half:+.2f}), p = " in sentence
    assert "higher in 3 of 3 blocks (not corrected" in sentence


def test_systems_of_other_machines_are_not_compared(tmp_path):
    bleu = {"ln": (20.0, 20.6), "pn": (21.0, 21.8), "bn": (21.0, 21.1)}
    runs = with_scores(tmp_path, bleu)
    for run in runs[4:]:
        other = START | {"gpus": [], "cpu": "Other 1"}
        starts = [other | {"git_commit": commit} for commit in ("1a", "1a", "2b-modified")]
        (run / "starts.jsonl").write_text("".join(f"{json.dumps(start)}\n" for start in starts))
    page = report(*runs, output=tmp_path / "out")
    rows = {row["system"]: row["tokenized BLEU"] for row in page.table("system", "tokenized BLEU")}
    assert rows["BN"] == "not tested: no seed on one machine in common with LN" and rows["PN"].startswith("+1.10 (")
    assert page.says("The runs are of several machines (H <x> & y; Other 1)")
    of_csv = pandas.read_csv(tmp_path / "out/report.csv")
    assert list(of_csv["machine"]) == ["H <x> & y"] * 2 + ["Other 1"] * 2 + ["H <x> & y"] * 2
    assert list(of_csv["code"].fillna("")) == ["", "", "1a and 2b-modified", "1a and 2b-modified", "", ""]


def test_more_than_the_norm_differs(tmp_path):
    """The first sentence says so, and the labels show it; options of norms are part of the norm."""
    runs = [
        make_run(tmp_path / "a", "ln"),
        make_run(tmp_path / "b", "pn", model__dropout=0.3, model__norm_alpha_fwd=0.5),
    ]
    sentence = "PN (dropout=0.3, norm_alpha_fwd=0.5) differs from LN (dropout=0.1) in dropout."
    assert f"**Not only the norms differ:** {sentence}" in headline(*runs, output=tmp_path / "out")
    changes = {f"model__x{number}": number for number in range(6)}
    runs = [make_run(tmp_path / "c", "ln"), make_run(tmp_path / "d", "pn", **changes)]
    sentence = headline(*runs, output=tmp_path / "out")
    assert "PN (6 settings differ) differs from LN in x0, x1, x2, x3, x4, x5." in sentence


def test_a_bleu_below_1_is_a_problem(tmp_path, monkeypatch):
    page = report(with_score(make_run(tmp_path / "run"), 0.03), output=tmp_path / "out")
    assert page.says("tokenized BLEU is 0.03, below 1: the model has hardly learned")
    assert page.says("1 of the runs was trained, decoded and scored; 1 has problems, listed below.")
    of = {name: SimpleNamespace(score=score, p_value=0.01) for name, score in (("baseline", 20.0), ("system", 0.9))}
    compared = dict.fromkeys(("tokenized", "chrf"), SimpleNamespace(results=of))
    monkeypatch.setattr(translation, "compare_folders", lambda folders, resamples: compared)
    (run,) = read_runs([tmp_path / "run"])
    assert translation._differences(run, run, 1, 1)["chrf"] == "−19.10, not tested (BLEU below 1)"
    of["system"].score = 1.0
    for comparisons, p in ((3, "0.030"), (200, "1.000")):
        assert translation._differences(run, run, 1, comparisons)["chrf"] == f"−19.00, p = {p}"


def settings_of_fairseq(seed: int, norm: str, data: Path) -> dict:
    """What fairseq keeps in a checkpoint and in hydra's file, in part."""
    return {
        "common": {"seed": seed, "log_format": "json"},
        "dataset": {"max_tokens": 2048},
        "optimization": {"max_update": 40, "update_freq": [1]},
        "model": {"_name": f"transformer_{norm}_tiny"},
        "task": {"_name": "translation", "data": str(data), "source_lang": None, "target_lang": None},
    }


def plain_run(folder: Path, norm: str, seed: int, data: Path) -> Path:
    """A folder of fairseq-train: saved output and checkpoints; decoded and scored."""
    folder.mkdir()
    (folder / "output.txt").write_text(train_log(5))
    settings = settings_of_fairseq(seed, norm, data)
    # The model of fairseq-train has the flags of all sections, also those that differ between the runs.
    settings["model"] = argparse.Namespace(seed=seed, save_dir=str(folder), betas=(0.9, 0.98), **settings["model"])
    settings["checkpoint"] = {"save_dir": str(folder)}
    torch.save({"cfg": settings, "model": {"w": torch.zeros(1)}}, folder / "checkpoint_last.pt")
    write_scores(folder / "generate/test", *reversed(corpus_text(ERRORS[norm], seed)))
    return folder


def test_folders_of_fairseq_train(tmp_path):
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/train.es-en.es.bin").touch()
    runs = [plain_run(tmp_path / f"{norm}{n}", norm, n, tmp_path / "bin") for norm in ("ln", "pn") for n in (1, 2)]
    page = report(*runs, output=tmp_path / "out")
    rows = page.table("norm", "seeds scored")
    assert [(row["norm"], row["seeds scored"]) for row in rows] == [("LN", "2 (1, 2)"), ("PN", "2 (1, 2)")]
    assert page.says("es to en") and page.says("Nothing: every run was trained to its end")
    assert page.table("state", "updates")[0]["updates"] == "40 of 40"
    # Prepared by the scripts: comparable with runs of pn train.
    (tmp_path / "settings.txt").write_text(DATA)
    page = report(*runs, make_run(tmp_path / "other", "bn"), output=tmp_path / "out")
    assert [row["norm"].split()[0] for row in page.table("norm", "seeds scored")] == ["LN", "BN", "PN"]


def test_jobs_of_a_sweep(tmp_path):
    sweep = tmp_path / "sweep"
    for norm in ("ln", "pn"):
        job = sweep / f"model._name=transformer_{norm}_tiny"
        (job / ".hydra").mkdir(parents=True)
        (job / ".hydra/config.yaml").write_text(json.dumps(settings_of_fairseq(1, norm, tmp_path)))
        (job / "train.log").write_text(train_log(5))
    (sweep / "multirun.yaml").touch()
    (sweep / ".hydra").mkdir()
    for given in ([sweep], [path for path in sweep.iterdir() if path.name != ".hydra"]):
        page = report(*given, output=tmp_path / "out")
        assert [row["norm"] for row in page.table("norm", "state")] == ["LN", "PN"]
        problems = re.findall(r"^- `.*transformer_pn_tiny`: (.*)", (tmp_path / "out/report.md").read_text(), re.M)
        assert problems == ["not decoded: there is no generate/test/hyp.tok, and there is no checkpoint"]


def test_norms_from_outside_the_package(tmp_path, monkeypatch):
    entries = dict(norms.NORMS)
    entries["mine"] = dataclasses.replace(entries["layer"], short="mn", title="a norm without an abbreviation")
    entries["yours"] = dataclasses.replace(entries["layer"], short="yn", title="your norm (YOURS)")
    monkeypatch.setattr(norms, "NORMS", entries)
    runs = [make_run(tmp_path / short, "pn", model___name=f"transformer_{short}_tiny") for short in ("yn", "mn")]
    page = report(*runs, make_run(tmp_path / "ln", "ln"), output=tmp_path / "out")
    assert [row["norm"] for row in page.table("norm", "seeds scored")] == ["LN", "MN", "YOURS"]


def test_many_settings_that_differ_are_left_to_their_table(tmp_path):
    runs = [make_run(tmp_path / str(n), "pn", **{f"model__x{i}": n for i in range(9)}) for n in (1, 2)]
    page = report(*runs, output=tmp_path / "out")
    assert [row["norm"] for row in page.table("norm", "seeds scored")] == ["PN (settings 1)", "PN (settings 2)"]
    assert page.table("setting", "PN (settings 2)")[8]["PN (settings 2)"] == "2"


def test_only_its_own_files_are_written(tmp_path):
    run = make_run(tmp_path / "run")
    output = tmp_path / "deep/er/out"
    report(run, output=output)
    (output / "mine.png").write_text("mine")
    first = {path.name: path.read_bytes() for path in output.iterdir()}
    report(run, output=output)
    assert {path.name: path.read_bytes() for path in output.iterdir()} == first


def test_a_table_with_a_hole_is_refused():
    with pytest.raises(ValueError, match="hole"):
        markdown.table(pandas.DataFrame({"a": ["1"], "b": [""]}))


def test_markdown_by_hand():
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
