"""docs/results/masks.md: differences with and without the mask, and the files beside them."""

import re

import numpy as np
import pandas
import pytest
import yaml
from scipy import stats

from docs.tools import masks, results
from pn_fairseq.common.probe_files import write_update

from ..report.test_report import make_run, with_score

#: BLEU by system and seed, in batches by length.
SCORES = {
    "ln": (20.0, 20.4, 20.1),
    "bn": (21.0, 21.3, 21.1),
    "pn": (22.0, 22.6, 22.1),
    "bn+norm_ignore_mask=true": (20.9, 21.4, 21.2),
    "pn+norm_ignore_mask=true": (21.0, 21.5, 21.0),
}


def make(folder, kind: str, seeds) -> None:
    for name, scores in SCORES.items():
        norm, ignores, _ = name.partition("+")
        for seed in seeds:
            changes = {"model__norm_ignore_mask": True} if ignores else {}
            run = make_run(folder / f"masks_{kind}/{name}_seed{seed}", norm, seed, **changes)
            with_score(run, scores[seed - 5])
            statistics = "psi2" if norm == "pn" else "mu,sigma2,psi2" if norm == "bn" else ""
            row = {"forward": 0, "norm": "encoder.layer_norm", "running": statistics, "tid_var": 0.1 * seed}
            (run / "norm_probe").mkdir()
            for update in (800, 850):
                write_update(run / "norm_probe", update, [row | {"update": update, "psi_batch_over_psi": [2, 0.8]}], "")


@pytest.fixture
def place(tmp_path, monkeypatch):
    monkeypatch.setattr(results, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(masks, "FOLDER", tmp_path / "results/masks")
    monkeypatch.setattr("pn_fairseq.pipeline.bootstrap.RESAMPLES", 10)
    for module in ("curves", "intervals"):  # which tests/report draws
        monkeypatch.setattr(f"pn_fairseq.report.{module}.plot", lambda *_: False)
    (tmp_path / "results").mkdir()
    monkeypatch.setattr(masks, "padding", lambda run: [{"side": "source", "batches of the epoch": 9} | SIZES, TARGET])
    monkeypatch.setattr(masks, "changed", lambda run: [{"sentences": 1000, "changed": int(run.name[-1])}])
    return tmp_path


SIZES = {"positions": 200, "tokens": 150}
TARGET = {"side": "target", "batches of the epoch": 9, "positions": 100, "tokens": 90}


def test_differences_have_the_noise_of_all_systems(place):
    """Against a two-way analysis of variance by hand; the second session adds to the first."""
    make(place / "first", "by_length", (5, 6))
    make(place / "second", "by_length", (7,))
    make(place / "second", "random", (5,))
    masks.add(place / "first")
    masks.add(place / "second")
    values = np.array(list(SCORES.values()))  # (systems, seeds)
    rest = values - values.mean(axis=0) - values.mean(axis=1, keepdims=True) + values.mean()
    half = stats.t.isf(0.025, 8) * np.sqrt((rest**2).sum() / 8 * 2 / 3)
    text = masks.answer()
    for norm, row in (("BN", 1), ("PN", 2)):
        mean = (values[row] - values[row + 2]).mean()
        found = f"{mean:+.2f} ({mean - half:+.2f} to {mean + half:+.2f})".replace("-", "−")
        assert f"- **{norm}, batches by length, tokenized BLEU:** {found}" in text
    assert "higher in 3 of 3 seeds: better" in text
    assert "- **PN, random batches, tokenized BLEU:** +1.00 with seed 5: not tested" in text
    assert "**In 1 of 2 tested comparisons the interval excludes 0:** PN, batches by length, tokenized BLEU." in text
    assert "6 of the 8 planned comparisons are not tested yet." in text  # the losses have no spread over seeds
    assert "- **Decoding:** 115 of 20,000 translations (20 runs) depend" in text  # 5 systems of 5 + 6 + 7, and of 5
    assert "20 of 40 planned runs are finished" in masks.missing()
    assert "- random batches, seed 6: `ln`, `bn`" in masks.missing() and "length, seed 7" not in masks.missing()
    assert re.search(r"\| PN without the mask +\| 3 +\|", masks.table())
    masks.draw()
    assert (place / "results/masks.png").read_bytes().startswith(b"\x89PNG")
    # LN, BN and PN in batches by length are also blocks of the verses; norms without the mask are not.
    verses = results.subjects()[results.CORPORA["verses"]]
    assert set(verses["run"]) == {f"verses/{norm}_seed{seed}" for norm in ("ln", "bn", "pn") for seed in (5, 6, 7)}


def test_files_beside_the_scores(place):
    make(place / "runs", "by_length", (5, 6))
    masks.add(place / "runs")
    masks.add(place / "runs")  # adds nothing
    assert len(pandas.read_csv(place / "results/masks/padding.csv")) == 4  # 2 seeds, 2 sides
    assert re.search(r"\| batches by length \| 25\.0% +\| 10\.0% +\| 9 +\|", masks.padding_shares())
    # Of PN mean(abs(1 / 2 - 1), abs(1 / 0.8 - 1)); of the others tid_var, the mean over seeds 5 and 6.
    text = masks.distance_table()
    assert re.search(r"\| PN without the mask \| 37\.50%", text) and re.search(r"\| BN +\| 55\.00% +\| –", text)
    assert re.search(r"\| LN +\| 5 of 1,000, 6 of 1,000 +\| –", masks.changed_table())


def test_changed_sentences(tmp_path, monkeypatch):
    (tmp_path / "run/generate/test").mkdir(parents=True)
    (tmp_path / "run/generate/test/hyp.tok").write_text("a b\nc\nd\n")

    def generate(words):
        assert words[:5] == ["generate", "--run", str(tmp_path / "run"), "--batch-size", "1"]
        (output := masks.Path(words[-1])).mkdir()
        (output / "hyp.tok").write_text("a b\nd\nd\n")
        return 0

    monkeypatch.setattr(masks, "call", generate)
    assert masks.changed(tmp_path / "run") == [{"sentences": 3, "changed": 1}]


def test_padding_of_training_batches(data, tmp_path):
    """The tokens are those of the text; random batches hold more padding."""
    pytest.importorskip("fairseq")
    lengths = {
        side: sum(len(line.split()) + 1 for line in (data / f"bpe/train.{language}").read_text("utf-8").splitlines())
        for side, language in (("source", "es"), ("target", "en"))
    }
    shares = {}
    for task in ("translation", "translation_random_batches"):
        settings = {"task": {"_name": task}, "dataset": {"max_tokens": 512, "required_batch_size_multiple": 1}}
        (tmp_path / task).mkdir()
        (tmp_path / task / "config.yaml").write_text(yaml.safe_dump(settings | {"common": {"seed": 1}}))
        (tmp_path / task / "data").write_text(f"{data}\n")
        rows = masks.padding(tmp_path / task)
        assert {row["side"]: row["tokens"] for row in rows} == lengths
        shares[task] = {row["side"]: 1 - row["tokens"] / row["positions"] for row in rows}
    assert all(share < shares["translation_random_batches"][side] for side, share in shares["translation"].items())
