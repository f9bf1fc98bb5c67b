"""docs/tools/papers.py: what is finished stands beside the papers' numbers, and what is missing is named."""

import re

import pandas
import pytest
from scipy import stats

from docs.tools import papers, results
from pn_fairseq.report.significance import LOSS


def cells(text: str, first: str) -> list[str]:
    (line,) = (line for line in text.splitlines() if line.startswith(f"| {first} "))
    return [cell.strip() for cell in line.strip("|").split("|")]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(results, "RESULTS", tmp_path)
    return tmp_path


def test_rows_of_adanorms_tables(folder):
    assert papers.adanorm().endswith("0 of 36 planned runs are finished.")
    assert "not finished" in papers.effects() and papers.bytes_of_verses() == results.NOTHING
    bleu = {"ln": (24.0, 24.6, 24.1), "lns+decoder_norm=layer-simple": (23.1, 23.4, 23.5),
            "dn+decoder_norm=detach": (22.0, 22.9, 22.1), "none+decoder_norm=none": (21.5,)}  # fmt: skip
    rows = [
        {"run": f"{name}_seed{seed}", "system": f"label of {name}", "norm": "X", "seed": seed, "machine": "M",
         "compared with": "", "tokenized": score, LOSS: 3 + score / 100, "state": "complete", "problems": ""}
        for name, scores in bleu.items() for seed, score in enumerate(scores, 5)
    ]  # fmt: skip
    (folder / "adanorm").mkdir()
    pandas.DataFrame(rows).to_csv(folder / "adanorm/report.csv", index=False)
    text = papers.adanorm()
    assert text.endswith("10 of 36 planned runs are finished.")
    assert cells(text, "LayerNorm")[:3] == ["LayerNorm", "3", "24.23 ± 0.32"]
    assert cells(text, "w/o Norm")[-3:] == ["34.0", "28.4", "diverges"]
    assert cells(text, "w/o Norm")[3] == "−2.50 not tested: one seed"  # from LN of the same seed
    assert cells(text, "AdaNorm, C = 2, last only")[1] == "not finished" and len(re.findall("^[|]", text, re.M)) == 14
    text = papers.effects()
    test = stats.ttest_rel(bleu["lns+decoder_norm=layer-simple"], bleu["dn+decoder_norm=detach"])
    low, high = test.confidence_interval(0.95)
    derivatives = cells(text, "the derivatives of mean and deviation")
    assert derivatives[2] == f"+1.00 ({low:+.2f} to {high:+.2f}) not resolved".replace("-", "−")
    assert derivatives[-3:] == ["+1.6", "+3.9", "diverges"]
    assert cells(text, "normalizing forward")[2] == "+0.50 not tested: w/o Norm has one seed"
    # Xu et al. 2019, section 4: C is 2 for German-English and English-German, 1 for English-Vietnamese
    assert cells(text, "AdaNorm's gain, C = 1")[2:] == ["not finished", "not finished", "–", "+0.2", "–"]
    assert cells(text, "AdaNorm's gain, C = 2")[2:] == ["not finished", "not finished", "+0.1", "–", "+0.2"]


def test_results_of_the_examples(folder):
    def task(first: str) -> str:
        return cells(papers.tasks(), first)[3]

    assert task("RT, accuracy (AdaNorm)") == task("CIFAR-10, accuracy (PowerNorm, Figures 2, 3)") == "not yet"
    (folder / "sentiment").mkdir()
    (folder / "sentiment/sentiment.csv").write_text(
        "task,norm,seed,test accuracy\nrt,layer,1,70\nrt,ada,1,75\nrt,layer,2,72\n"
    )
    assert task("RT, accuracy (AdaNorm)") == "LN 71.00 (2), AdaNorm 75.00 (1)"
    assert task("SST5, accuracy (AdaNorm)") == "not yet"
    for network, rows in {"resnet20": "1,0,50\n2,0,40\n", "mnist": "1,99,98\n2,98,97\n"}.items():
        training = folder / f"images/{network}_2epochs_batch_seed1"
        training.mkdir(parents=True)
        (training / "epochs.csv").write_text(f"epoch,validation accuracy,test accuracy\n{rows}")
    assert task("CIFAR-10, accuracy (PowerNorm, Figures 2, 3)") == "BN 40.00 (1)"
    assert task("MNIST, accuracy (AdaNorm)") == "BN 98.00 (1)"


def test_sentences_are_compared_with_layer_norm(folder):
    assert papers.sentiment() == results.NOTHING
    scores = {"layer": (70.0, 72.0, 71.0), "ada": (71.0, 72.5, 72.5)}
    rows = [f"rt,{norm},{seed},{score}" for norm, values in scores.items() for seed, score in enumerate(values, 1)]
    (folder / "sentiment").mkdir()
    (folder / "sentiment/sentiment.csv").write_text("\n".join(["task,norm,seed,test accuracy", *rows]))
    low, high = stats.ttest_rel(scores["ada"], scores["layer"]).confidence_interval(0.95)
    row = cells(papers.sentiment(), "AdaNorm")
    assert row == ["AdaNorm", "72.00 ± 0.87 (3)", f"+1.00 ({low:+.2f} to {high:+.2f})".replace("-", "−"), "77.5"]
    assert cells(papers.sentiment(), "LN")[2:] == ["–", "77.21"]


def test_placements_are_compared_with_pre(folder):
    assert papers.placements().endswith("0 of 36 planned runs are finished.")
    assert papers.placements("placements-deep").endswith("0 of 13 planned runs are finished.")

    def report(**runs: tuple[float, float]) -> None:
        rows = [
            {"run": f"{name}_seed{seed}", "system": "label", "norm": "LN", "seed": seed, "machine": "M",
             "compared with": "", "tokenized": score, LOSS: score / 10, "state": "complete", "problems": ""}
            for name, scores in runs.items() for seed, score in enumerate(scores, 5)
        ]  # fmt: skip
        pandas.DataFrame(rows).to_csv(folder / "placements/report.csv", index=False)

    def interval(one, other) -> str:
        low, high = stats.ttest_rel(one, other).confidence_interval(0.95)
        return f"({low:+.2f} to {high:+.2f}) not resolved".replace("-", "−")

    (folder / "placements").mkdir()
    of_post = "+encoder_norm_placement=post+decoder_norm_placement=post"
    pre, post, power = (24, 24.6), (23, 23.4), (23.5, 24.5)
    report(**{"ln": pre, f"ln{of_post}": post})
    text = papers.placements()
    assert cells(text, "`post`")[3] == f"−1.10 {interval(post, pre)}"
    assert cells(text, "`sub`, PN in the encoder")[1] == "not finished"
    assert text.endswith("4 of 36 planned runs are finished.")
    report(**{f"ln{of_post}": post, f"pn{of_post}": power})
    text = papers.norms_of_placements()
    assert cells(text, "`post`")[1] == f"+0.80 {interval(power, post)}"
    assert cells(text, "`sub`")[1] == "not finished"
