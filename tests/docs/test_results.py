"""docs/results and README.md say what the reports of the runs say."""

import math
import re
import shutil

import numpy as np
import pandas
import pytest
from scipy import stats

from docs.tools import results
from pn_fairseq.report.significance import POWER

from ..report.test_report import make_run, with_score, with_scores


@pytest.mark.parametrize("title", list(results.subjects()))
def test_family_wise_error_and_power_of_the_published_designs(title):
    """Without true differences at most 5.5% of the experiments call one; the detectable difference is found in 80%."""
    measure, family, _ = results.families(title)[0]
    design, critical = family.design, family.design.critical()
    differences, deviation = design.fit(np.random.default_rng(4).normal(size=(design.runs, 40_000)))
    bounds = critical * deviation * design.errors[:, None]
    assert 0.045 < (np.abs(differences) > bounds).any(axis=0).mean() <= 0.055
    system = int(np.argsort(design.errors)[(len(design.errors) - 1) // 2])  # with the median standard error
    shift = family.detectable / family.deviation * design.errors[system] / np.median(design.errors)
    found = np.abs(differences[system] + shift) > bounds[system]
    assert found.mean() == pytest.approx(POWER, abs=0.01)


def test_every_picture_has_its_records():
    """Intervals are drawn from report.csv, and each learning curve from report-curves.csv."""
    for picture in results.RESULTS.rglob("*/report-*.png"):
        kind = picture.stem.rpartition("-")[0]
        records = pandas.read_csv(picture.parent / ("report-curves.csv" if kind == "report-curves" else "report.csv"))
        assert kind != "report-curves" or picture.name in set(records["picture"])
        assert picture.name in (picture.parent / "report.md").read_text("utf-8")


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Reports of one system with three seeds, others with one, a run that failed and one that is not finished."""
    checkout = tmp_path_factory.mktemp("checkout")
    runs = checkout / "runs/compare_norms"
    scores = {"ln": (20.0, 20.4, 20.2), "pn": (25.0, 25.1, 25.3), "bn": (20.1,), "dn": (17.0,)}
    with_scores(runs / "verses", scores)
    rate = {"optimization__lr": [0.01], "optimizer__lr": [0.01]}
    with_score(make_run(runs / "verses_lr0.01/ln_seed1", "ln", **rate), 19.0)
    failed = make_run(runs / "verses/pn+norm_variant=release_seed1", "pn", decoded=False, model__norm_variant="release")
    (failed / "failed").write_text("train: Nan/Inf gradients\n")
    make_run(runs / "verses/pnv_seed1", "pnv", decoded=False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(results, "RESULTS", checkout / "results")
        patch.setattr("pn_fairseq.pipeline.bootstrap.RESAMPLES", 10)
        results.write_reports(checkout)
        yield scores


VERSES = "Bible verses, Spanish to English"


def test_what_is_finished_is_reported(made):
    (frame,) = results.reports().values()
    assert len(frame) == 10 and not any("pnv" in run for run in frame["run"])
    for text in ((results.RESULTS / f"verses/report.{kind}").read_text("utf-8") for kind in ("md", "csv")):
        assert str(results.RESULTS.parent) not in text and "/data/not there" not in text and "data/not there" in text
    test = stats.ttest_rel(made["pn"], made["ln"])  # the only one with several seeds
    low, high = test.confidence_interval(0.95)
    difference = f"+4.93 ({low:+.2f} to {high:+.2f})"
    assert f"- **{VERSES}, tokenized BLEU:** better than LN: PN {difference}." in results.answer()
    assert f"- **Tokenized BLEU:** better than LN: PN {difference}." in results.readme()
    rows = {line.split("|")[1].strip(): line for line in results.table().splitlines() if line.startswith("|")}
    assert f"{difference} better" in rows["PN"] and "25.13 ± 0.15" in rows["PN"]
    assert "−0.10 not tested: one seed" in rows["BN"].replace("+0.10", "−0.10")  # from LN of the same seed
    assert "seed 1: failed: train: Nan/Inf gradients" in results.table() and "lr=0.01" not in results.table()
    assert "was not finite: 1 of 10." in results.table()
    shown = results.readme()
    assert re.search(r"\| PN-V +\| not finished \|", shown) and "20.20 ± 0.20" in shown and "tok:none" in shown
    (picture,) = results.pictures().values()
    results.draw()
    assert picture.name == "intervals-verses.png" and picture.read_bytes().startswith(b"\x89PNG")


def test_planned_comparisons(made, monkeypatch):
    assert results.planned_comparisons() == [("PN", results.LOSS), ("PN", "bits")]
    assert results.planned_answer() == results.UNCOMPARED  # these losses have no spread over seeds
    monkeypatch.setattr(results, "planned_comparisons", lambda: [("PN", "tokenized"), ("PN", "bits")])
    text = results.planned_answer()
    assert "**PN − LN, tokenized BLEU, translation:** higher in 3 of 3 pairs" in text and "mean +4.93 (" in text
    assert f"    - {VERSES}: +4.93 (" in text and "test loss" not in text and "trained after" not in text
    monkeypatch.setattr(results, "KNOWN_SEEDS", 1)
    assert (
        "    - Pairs trained after the comparison was chosen: higher in 2 of 2, mean +4.90" in results.planned_answer()
    )
    assert re.search(rf"{VERSES} +\| 1 \+ 1 +\| 3 +\| 2 ", results.strength())


def test_reports_of_a_corpus_are_joined(tmp_path, monkeypatch):
    """Adding a folder is enough: what a machine does to all systems cancels, and the blocks of all count together."""
    monkeypatch.setattr(results, "RESULTS", tmp_path)
    monkeypatch.setattr("pn_fairseq.pipeline.bootstrap.RESAMPLES", 10)
    scores = {"ln": (20.1, 20.3, 20.2), "pn": (22.0, 22.5, 22.2)}
    for report, seeds, shift in (("verses", (1, 2), 0.0), ("verses-second", (1, 3), 10.0)):
        for norm, seed in ((norm, seed) for norm in scores for seed in seeds):
            run = make_run(tmp_path / f"{report}/{norm}_seed{seed}", norm, seed)
            with_score(run, scores[norm][seed - 1] + shift)
            text = (run / "starts.jsonl").read_text().replace("H <x> & y", f"GPU of {report}")
            (run / "starts.jsonl").write_text(text)
        results.write_reports(tmp_path / report, f"{report}=*_seed*")
    blocks = [(ln, pn) for ln, pn in zip(*scores.values(), strict=True)]
    expected = stats.ttest_rel(*reversed(list(zip(*[*blocks, blocks[0]], strict=True))))
    low, high = expected.confidence_interval(0.95)
    (bleu,) = (line for line in results.answer().splitlines() if "tokenized BLEU" in line)
    assert f"better than LN: PN +2.00 ({low:+.2f} to {high:+.2f})." in bleu
    links = "Reports: [verses](verses/report.md) ([scores](verses/report.csv)), [verses-second]"
    assert links in results.table() and "GPU of verses (4 runs), GPU of verses-second (4 runs)" in results.table()
    again = "on several machines: `verses/ln_seed1` 20.10 and 30.10, `verses/pn_seed1` 22.00 and 32.00."
    assert results.table().endswith(again)
    with pytest.raises(SystemExit, match="no run is finished"):
        results.write_reports(tmp_path, "verses-third=*_seed*")


def test_runs_of_several_sessions_accumulate(tmp_path, monkeypatch):
    """Rows of earlier runs stay, also when their folders are gone; a run that was made again replaces its row."""
    monkeypatch.setattr(results, "RESULTS", tmp_path / "results")
    monkeypatch.setattr("pn_fairseq.pipeline.bootstrap.RESAMPLES", 10)
    for session, runs in (("one", {"ln": 20.0, "pn": 21.0}), ("two", {"ln": 20.5, "bn": 22.0})):
        for norm, score in runs.items():
            seed = 4 if norm == "ln" else 5
            with_score(make_run(tmp_path / f"{session}/verses/{norm}_seed{seed}", norm, seed), score)
        results.write_reports(tmp_path / session, "verses-seeds=verses/*_seed*")
    frame = pandas.read_csv(tmp_path / "results/verses-seeds/report.csv")
    assert dict(zip(frame["run"], frame["tokenized"], strict=True)) == {
        "pn_seed5": 21.0, "ln_seed4": 20.5, "bn_seed5": 22.0,
    }  # fmt: skip
    assert set(results.reports()["verses"]["run"]) == {"verses/pn_seed5", "verses/ln_seed4", "verses/bn_seed5"}


def test_what_is_planned_and_not_run_is_named(made):
    wanted = results.planned()
    assert wanted["verses"].total() + wanted["multi30k"].total() == 150  # docs/reproducing.md
    assert wanted["verses"]["verses/ln"] == 8 and wanted["verses"]["verses_lr0.01/ln"] == 3
    text = results.open_questions()
    assert "10 of 120 planned runs are finished" in text and "0 of 30 planned runs" in text
    lacking, fewer = (
        next(line for line in text.splitlines() if words in line) for words in ("No run is finished", "Fewer seeds")
    )
    assert "`verses/pnv` (8)" in lacking and "`verses_lr0.0025/ln` (3)" in lacking and "`verses/ln`" not in lacking
    assert "`verses/bn` (1 of 8)" in fewer and "`verses/pn+norm_variant=release` (1 of 3)" in fewer
    assert "`verses/dn`" not in fewer


def test_decays_and_learning_rates(tmp_path, monkeypatch):
    """The tables are of one report, the one that has more of their runs."""
    monkeypatch.setattr(results, "RESULTS", tmp_path)
    columns = ["run", "norm", "machine", "tokenized", results.LOSS]

    def write(report: str, runs: dict[str, tuple[float, float]]) -> None:
        (tmp_path / report).mkdir()
        rows = [(name, "any", report, bleu, loss) for name, (bleu, loss) in runs.items()]
        pandas.DataFrame(rows, columns=columns).to_csv(tmp_path / report / "report.csv")

    write(
        "verses", {"ln_seed1": (30.0, 1.0), "pn_seed1": (31.0, 1.0), "pn_seed2": (20.0, 4.0), "pn_seed3": (20.0, 4.9)}
    )
    assert results.decays() == results.learning_rates() == results.UNCOMPARED
    others = {
        "verses/ln_seed1": (24.0, 5.0),
        "verses/pn_seed1": (24.5, 4.9),
        "verses/pn+norm_alpha_fwd=0.95+norm_alpha_bwd=0.99_seed1": (23.0, 4.8),
        "verses_lr0.01/ln_seed1": (22.0, 5.5),
        "verses_lr0.01/pn_seed1": (21.9, 5.6),
        "verses_lr0.0025/pn_seed1": (float("nan"), float("nan")),  # failed
    }
    write("verses-second", others)
    text = results.decays()
    assert re.search(r"\| 0\.9 +\| +4\.900 \| +– \|", text) and re.search(r"\| 0\.95 +\| +– \| +– \| +4\.800 \|", text)
    assert "lowest is that of α_fwd = 0.95 and α_bwd = 0.99. The range is 0.100 bits." in text
    assert "seeds of PN with 0.9 and 0.9 have a range of 3.900 bits on one machine" in text
    text = results.learning_rates()
    assert re.search(r"\| 0\.01 +\| +22\.00 \| +5\.500 \| +21\.90 \| +5\.600 \|", text)
    assert (
        "PN's BLEU is at least 0.3 above LN's with 1 of the 2 learning rates, and at least 0.3 below it with 0." in text
    )
    assert "by learning rate: 0.005: −0.100 (lower in 1 of 1 pair); 0.01: +0.100 (lower in 0 of 1 pair)." in text


def test_noise_of_data_orders_and_initial_weights(tmp_path, monkeypatch):
    """Two-way analysis of variance by hand: 3 data orders and 3 initial weights; other norms and machines are apart."""
    monkeypatch.setattr(results, "RESULTS", tmp_path)
    grid = np.array([[3.0, 3.1, 3.3], [4.0, 4.2, 4.2], [5.1, 5.0, 5.3]])  # by data order and initial weights
    rows = [
        ("verses/pn_seed1", "one", 2.0, 2.0),
        ("verses/ln_seed4", "one", 9.0, 9.0),
        ("verses/ln_seed1", "b", 9.0, 9.0),
    ]
    for order, init in np.ndindex(3, 3):
        name = f"verses/ln_seed{order + 1}" if order == init else f"verses_init/ln+init_seed={init + 1}_seed{order + 1}"
        rows.append((name, "one", grid[order, init], grid[order, init] / 10))
    (tmp_path / "verses").mkdir()
    columns = ["run", "machine", "tokenized", results.LOSS]
    frame = pandas.DataFrame(rows, columns=columns).assign(norm="LN")
    frame.to_csv(tmp_path / "verses/report.csv", index=False)
    rest = grid - grid.mean(axis=1, keepdims=True) - grid.mean(axis=0) + grid.mean()
    noise = (rest**2).sum() / 4
    orders, inits = (np.sqrt(max(0, grid.mean(axis=axis).var(ddof=1) - noise / 3)) for axis in (1, 0))
    cells = rf"LN +\| one +\| tokenized BLEU +\| 3 × 3 +\| {orders:.2f} +\| {inits:.2f} +\| {noise**0.5:.2f}"
    assert re.search(cells, results.noise_sources())
    assert f"{orders / 10:.3f}" in results.noise_sources() and "PN |" not in results.noise_sources()
    assert "between data orders is the larger one in 2 of the 2 rows." in results.noise_sources()
    # PN's only run has 2.0, LN's 0.3 with the same data order and initial weights.
    assert "by data order: 1: +1.700 (lower in 0 of 1 pair)." in results.noise_sources()
    frame[~frame["run"].str.contains("_init")].to_csv(tmp_path / "verses/report.csv", index=False)
    assert results.noise_sources() == results.UNCOMPARED


def test_perplexities_of_the_language_models(tmp_path, monkeypatch):
    monkeypatch.setattr(results, "RESULTS", tmp_path)
    assert results.language_models() == results.NOTHING
    (tmp_path / results.LM).mkdir()
    rows = (
        ("transformer_lm_ln_seed1", "LN", "", 60.0, "", "yes"),
        ("transformer_lm_ln_seed2", "LN", "", 61.0, "", "yes"),
        ("transformer_lm_bn_seed1", "BN", "LN", 70.0, 50.0, "yes"),
        ("transformer_lm_pn_seed1", "PN", "LN", 99.0, 99.0, "yes"),
        ("transformer_lm_pn_seed2", "PN", "LN", 100.5, 100.5, "yes"),
        ("tensorized_lm_ln+tensorized_unmasked=true_seed1", "LN (unmasked)", "", 1.5, "", "NO"),
    )
    lines = (
        f"{run},{system},{system},{run[-1]},CPU,{other},1200,{perplexity},{math.log2(perplexity)},{batch},causal:{causal},,"
        for run, system, other, perplexity, batch, causal in rows
    )
    header = "run,system,norm,seed,machine,compared with,updates,perplexity,bits,batch,signature,state,problems"
    (tmp_path / results.LM / "report.csv").write_text("\n".join([header, *lines]))
    text = results.language_models()
    assert "5 of 81 planned runs are finished" in text
    assert re.search(r"LN +\| 2 +\| +60\.50 ± 0\.71 \| +– \|", text)
    assert re.search(r"BN +\| 1 +\| +70\.00 \| +50\.00 \|", text)
    assert "**English verses, language model, test loss (bits/token):** worse than LN: PN +0.7" in text
    assert "](results/intervals-transformer_lm.png)" in text
    assert re.search(r"LN \(unmasked\), \*\*not causal\*\* +\| 1 +\| +1\.50 \|", text)


def test_scores_by_mini_batch(tmp_path, monkeypatch):
    monkeypatch.setattr(results, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(results, "PICTURE", tmp_path / "picture.png")
    monkeypatch.setattr("pn_fairseq.pipeline.bootstrap.RESAMPLES", 10)
    assert results.mini_batches() == results.NOTHING
    runs = tmp_path / "runs/batch_size_verses"
    scores = {"ln": (20.0, 20.5, 20.25, 19.9), "bn": (18.0, 18.5, 18.75, 19.5), "bn+layer_scale_groups=4": (19.0,)}
    for name, of_norm in scores.items():
        norm, plus, _ = name.partition("+")
        scale = {"model__layer_scale_groups": 4} if plus else {}
        for tokens, score in zip((512, 1024, 2048, 4096), of_norm, strict=False):
            run = make_run(runs / f"tokens{tokens}/{name}_seed1", norm, 1, dataset__max_tokens=tokens, **scale)
            with_score(run, score)
    results.write_reports(tmp_path, results.SWEEP)
    results.draw()
    assert results.PICTURE.read_bytes().startswith(b"\x89PNG")
    text = results.mini_batches()
    assert re.search(r"\| LN +\| +20\.00 \| +20\.50 \| +20\.25 \| +19\.90 \|", text)
    assert re.search(
        r"\| BN +\| 18\.00 \(−2\.00\) \| 18\.50 \(−2\.00\) \| 18\.75 \(−1\.50\) \| 19\.50 \(−0\.40\) \|", text
    )
    assert re.search(r"\| BN \(layer_scale_groups=4\) +\| 19\.00 \(−1\.00\) \| +– \| +– \|", text)
    assert "9 runs of 40 updates, one seed; in brackets" in text and "The 4 values of LN have a range of 0.60" in text
    for folder in runs.glob("tokens[124]*"):
        folder.rename(tmp_path / folder.name)
    shutil.rmtree(results.RESULTS / results.SWEEP)
    results.write_reports(tmp_path, results.SWEEP)
    assert results.mini_batches() == results.UNCOMPARED
