"""Measures that pn report reads from measures.json, which anything may write."""

import dataclasses
import functools
import json
import os
import shutil

import pandas
import pytest
from scipy import stats

from pn_fairseq.common.command import UserError
from pn_fairseq.pipeline.evaluate_lm import Perplexity, result_file
from pn_fairseq.pipeline.metrics import METRICS
from pn_fairseq.report import curves, intervals, perplexity, translation
from pn_fairseq.report.measures import MEASURES, of_file
from pn_fairseq.report.runs import read_runs
from pn_fairseq.report.systems import comparable, group
from pn_fairseq.report.tables import csv_rows

from ..docs.pages import ROOT, blocks
from ..fixtures.reports import make_run, make_runs, report
from ..scripts_helpers import in_process, refused, verb

COMET = {"name": "COMET", "better": "higher", "margin": 0.005, "signature": "wmt22-comet-da|x"}
ERRORS = {"name": "errors", "better": "lower", "margin": 1}
SCORES = {"ln": (0.8112, 0.8131, 0.8102), "pn": (0.8203, 0.8211, 0.8199)}


def write(run, *measures: dict):
    (run / "generate/test").mkdir(parents=True, exist_ok=True)
    (run / "generate/test/measures.json").write_text(json.dumps(measures))
    return run


@pytest.fixture
def runs(tmp_path):
    """LN and PN with COMET and a number that is better if it is lower; BN without."""
    made = []
    for norm, scores in SCORES.items():
        for seed, value in enumerate(scores, 1):
            run = make_run(tmp_path / f"{norm}_{seed}", norm, seed)
            errors = ERRORS | {"value": round(1000 * value)}
            made.append(write(run, COMET | {"value": value}, errors))
    made += [make_run(tmp_path / f"bn_{seed}", "bn", seed) for seed in (1, 2)]
    return made


def test_a_measure_of_a_file_is_shown_and_compared(runs, tmp_path):
    output = tmp_path / "out"
    options = ("--resamples", "10", "--planned", "PN:COMET")
    page = report(*runs, output=output, options=options)
    for norm, row in (("ln", page.systems["LN"]), ("pn", page.systems["PN"])):
        values = pandas.Series(SCORES[norm])
        assert row["COMET"] == f"{values.mean():.4f}"
        assert row["std, COMET"] == f"{values.std():.4f}"
    assert page.systems["BN"]["COMET"] == "not scored by it"
    assert page.says("Signature of COMET: wmt22-comet-da|x")

    # Two systems in blocks of seeds: the paired t-test.
    test = stats.ttest_rel(SCORES["pn"], SCORES["ln"])
    low, high = test.confidence_interval()
    middle = (low + high) / 2
    interval = f"{middle:+.4f} ({low:+.4f} to {high:+.4f})"
    differences = {row["system"]: row for row in page.table("system", "COMET", "errors")}
    assert differences["PN"]["COMET"] == f"{interval} better"
    assert differences["PN"]["errors"].startswith("+9.0 (")
    assert differences["PN"]["errors"].endswith(" worse")
    assert differences["BN"]["COMET"] == "not tested: not measured"
    assert f"**COMET:** better than LN: PN {interval}." in page.headline
    assert f"PN − LN: {interval}, p = {test.pvalue:.3f}, higher in 3 of 3 blocks" in page.headline
    assert page.says("±0.005 for COMET, ±1 for errors; grey in the picture")

    rows = pandas.read_csv(output / "report.csv").set_index("run")
    assert list(rows.loc[["ln_1", "ln_2", "ln_3"], "COMET"]) == list(SCORES["ln"])
    assert rows.loc["bn_1", ["COMET", "errors"]].isna().all()


def test_the_picture_has_a_panel_for_it(runs, tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr(intervals, "save", lambda figure, file: drawn.append(figure))
    monkeypatch.setattr(curves, "plot", lambda rows, file: file.touch())
    arguments = [*runs, "--output", tmp_path / "out", "--resamples", "10"]
    assert verb("report")(arguments) == 0
    (figure,) = drawn
    panels = {axis.get_title(): axis.get_xlabel() for axis in figure.axes}
    assert panels["COMET"] == "better →" and panels["errors"] == "← better"


def test_without_a_margin_a_measure_is_shown_and_not_tested(tmp_path):
    words = {"name": "words", "better": "higher", "margin": None}
    runs = make_runs(tmp_path, ("ln", 1), ("ln", 2), ("pn", 1), ("pn", 2))
    for run, value in zip(runs, (8, 9, 8, 9), strict=True):
        write(run, words | {"value": value})
    page = report(*runs)
    assert page.systems["PN"]["words"] == "8.50"
    assert "words" not in page.table("system", "tokenized BLEU")[0]


def test_the_program_of_the_page(tmp_path, monkeypatch):
    run = make_run(tmp_path / "runs/compare/pn_seed1")
    (program,) = [block for block in blocks(ROOT / "docs/compare.md", "python")]
    monkeypatch.chdir(tmp_path)
    exec(program, {"my_score": lambda hypotheses, references: len(hypotheses) / len(references)})
    (value,) = of_file(run / "generate/test")
    assert (value.value, value.measure.margin, value.measure.decimals) == (1.0, 0.005, 4)


MISTAKES = {
    "{": "cannot be read as JSON",
    "{}": "is not a list of measures",
    "[3]": "measure 1 is not a mapping of name, value, better, margin, signature",
    '[{"name": "a", "value": 1, "better": "higher", "margn": 1}]': "did you mean 'margin'",
    '[{"value": 1, "better": "higher"}]': "measure 1 has no 'name'",
    '[{"name": "a", "better": "higher"}]': "measure 1 has no 'value'",
    '[{"name": "a", "value": 1}]': "measure 1 has no 'better'",
    '[{"name": "a:b", "value": 1, "better": "higher"}]': "the name 'a:b' must be text",
    '[{"name": "", "value": 1, "better": "higher"}]': "the name '' must be text",
    '[{"name": "bleu", "value": 1, "better": "higher"}]': "the name 'bleu' is taken",
    '[{"name": "seed", "value": 1, "better": "higher"}]': "the name 'seed' is taken",
    '[{"name": "a", "value": 1, "better": "high"}]': "it must be 'higher' or 'lower'",
    '[{"name": "a", "value": "1", "better": "lower"}]': "must be a finite number",
    '[{"name": "a", "value": true, "better": "lower"}]': "must be a finite number",
    '[{"name": "a", "value": NaN, "better": "lower"}]': "must be a finite number",
    '[{"name": "a", "value": 1, "better": "lower", "margin": 0}]': "must be a number above 0",
    '[{"name": "a", "value": 1, "better": "lower", "signature": 2}]': "must be text",
    json.dumps([{"name": "a", "value": 1, "better": "lower"}] * 2): "names 'a' twice",
}


@pytest.mark.parametrize("text", MISTAKES)
def test_mistakes_in_the_file_are_one_line(text, tmp_path):
    (tmp_path / "measures.json").write_text(text)
    with pytest.raises(UserError) as caught:
        of_file(tmp_path)
    (line,) = str(caught.value).splitlines()
    assert MISTAKES[text] in line and "measures.json" in line


def columns(*runs, content) -> set[str]:
    """Of report.csv, of the table of results and of the frame of the runs, without settings."""
    (corpus,) = group(read_runs(runs))
    shown = {*corpus.frame, *csv_rows(corpus)[0], *content(corpus)["results"]}
    return shown - comparable(corpus.runs[0]).keys()


@pytest.mark.parametrize("unit", ["word", "byte"])
def test_no_measure_has_the_name_of_a_column(unit, tmp_path):
    translations = make_runs(tmp_path, ("ln", 1), ("pn", 1))
    compare = functools.partial(translation.content, paper="powernorm-1", resamples=10)
    taken = columns(*translations, content=compare)
    language_model = make_run(tmp_path / "lm", decoded=False, task___name="language_modeling")
    result = result_file(language_model, "test")
    result.parent.mkdir()
    measured = Perplexity(5.0, "test", 100, unit, 50, 3, 8, 0, True)
    result.write_text(json.dumps(dataclasses.asdict(measured)))
    measure = functools.partial(perplexity.content, paper="none", subset="test")
    taken |= columns(language_model, content=measure)
    title = "bits per byte" if unit == "byte" else "bits per token"
    assert {"std, tokenized BLEU", "paper", title} <= taken
    for name in taken:
        entry = {"name": name, "value": 1, "better": "higher"}
        (tmp_path / "measures.json").write_text(json.dumps([entry]))
        with pytest.raises(UserError, match="is taken by a column"):
            of_file(tmp_path)


def test_a_subset_may_have_measures_of_a_file_alone(tmp_path):
    """Then no score is of this project's detokenized hypotheses."""
    run = write(make_run(tmp_path / "run"), COMET | {"value": 0.8})
    (run / "generate/spoken").mkdir()
    shutil.move(run / "generate/test/measures.json", run / "generate/spoken")
    page = report(run, options=("--subset", "spoken"))
    assert page.systems["PN"]["COMET"] == "0.8000"
    assert page.says("Signature of COMET: wmt22-comet-da|x") and not page.says("detokenized")
    assert not page.says("not decoded: ")
    page = report(run)
    sentence = "Of hypotheses detokenized by sacremoses and, for typographic quotation marks, by "
    sentence += "rules of this project (+quotes): detokenized BLEU, chrF2."
    assert page.says(sentence)


def test_a_new_metric_is_in_the_help(monkeypatch):
    metric = dataclasses.replace(METRICS["ter"], title="New", short="new", about="in no paper")
    monkeypatch.setitem(METRICS, "new", metric)
    monkeypatch.setitem(MEASURES, "new", metric)
    assert "\n  New               in no paper\n" in in_process("score", "--help").stdout
    words = " ".join(in_process("report", "--help").stdout.split())
    assert "MEASURE is bleu (tokenized BLEU), chrf (chrF2), ter (TER), " in words
    assert "bits (test loss), new (New) or a name in measures.json" in words


def test_the_report_lists_a_bad_file_and_an_old_one(tmp_path):
    bad = write(make_run(tmp_path / "bad"), {"name": "a"})
    old = write(make_run(tmp_path / "old", seed=2), COMET | {"value": 0.8})
    os.utime(old / "generate/test/measures.json", (1, 1))
    page = report(bad, old)
    assert page.says("its measures are not shown: ") and page.says("measure 1 has no 'value'")
    assert page.says("measures.json is older than hyp.tok and may belong to other hypotheses")
    assert page.says("2 have problems") and page.systems["PN"]["COMET"] == "0.8000"


def test_runs_that_do_not_agree_on_a_measure_are_refused(tmp_path, capsys):
    runs = [make_run(tmp_path / name, seed=seed) for seed, name in enumerate("ab", 1)]
    write(runs[0], COMET | {"value": 0.8})
    write(runs[1], COMET | {"value": 0.8, "better": "lower"})
    code = verb("report")([*runs, "--output", tmp_path / "out"])
    refused(capsys, code, "a and b do not agree on 'COMET'")
    assert not (tmp_path / "out").exists()


def test_a_measure_that_is_named_like_a_setting_is_refused(tmp_path, capsys):
    measure = {"name": "model.dropout", "value": 1, "better": "lower"}
    run = write(make_run(tmp_path / "run"), measure)
    code = verb("report")([run, "--output", tmp_path / "out"])
    refused(capsys, code, "run has a measure 'model.dropout', which is a setting: rename it")


def test_a_planned_comparison_by_a_measure_that_no_run_has(runs, tmp_path, capsys):
    arguments = [*runs, "--output", tmp_path / "out", "--planned", "PN:COMT"]
    refused(capsys, verb("report")(arguments), "PN:COMT", "did you mean 'COMET'")
