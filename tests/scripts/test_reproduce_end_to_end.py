"""pn reproduce with every real step, on small archives in the originals' layout, for a few updates."""

import json

import pytest

from ..fixtures.corpora import iwslt14_members, write_archives
from ..scripts_helpers import run, script

SMALL = ("+model.encoder_layers=1", "+model.decoder_layers=1", "optimization.max_update=2", "checkpoint.patience=-1")
STEPS = ("train", "average", "generate", "score")


def check(runs, names, subset_size):
    for name in names:
        scores = json.loads((runs / name / "generate/test/scores.json").read_text())
        assert scores["sentences"] == subset_size
        assert len((runs / name / "generate/test/hyp.tok").read_text().splitlines()) == subset_size
        assert not (runs / name / "failed").exists()
    return (runs / "report/report.md").read_text("utf-8")


@pytest.mark.slow
def test_iwslt14(tmp_path):
    archive = write_archives(tmp_path / "mirror", {"de-en.tgz": iwslt14_members()}) / "de-en.tgz"
    options = ("--archive", archive, "--bpe", 150, "--data", tmp_path / "data", "--runs", tmp_path / "runs")
    done = script("reproduce_iwslt14.sh", *options, *SMALL, "--norms", "ln,pn", "--seeds", 1)
    for name in ("ln_seed1", "pn_seed1"):
        assert all(f"{name}: {step}" in done.stderr for step in STEPS)
    report = check(tmp_path / "runs", ("ln_seed1", "pn_seed1"), 30)
    assert "LN" in report and "PN" in report
    again = script("reproduce_iwslt14.sh", *options, *SMALL, "--norms", "ln,pn", "--seeds", 1)
    assert again.stderr.count("already trained") == 2 and again.stderr.count("already exists") >= 4


@pytest.mark.slow
def test_verses_lm(tmp_path):
    narrow = ("model.decoder_embed_dim=16", "model.decoder_ffn_embed_dim=16", "model.decoder_layers=1")
    fast = ("optimization.max_update=2", "checkpoint.save_interval_updates=2", "checkpoint.patience=-1")
    options = ("--data", tmp_path / "data", "--runs", tmp_path / "runs", *narrow, *fast)
    done = run("pn", "reproduce", "verses_lm", *options, "--norms", "ln,ln+layer_scale_groups=4,bn", "--seeds", 1)
    names = [
        f"{m}_lm_{n}_seed1" for m in ("transformer", "tensorized") for n in ("ln", "ln+layer_scale_groups=4", "bn")
    ]
    for name in names:
        assert all(f"{name}: {step}" in done.stderr for step in ("train", "average", "evaluate-lm"))
        found = json.loads((tmp_path / f"runs/{name}/evaluate_lm/test.json").read_text())
        assert found["tokens"] == 47_381 and found["unit"] == "word" and found["causal"]
    report = (tmp_path / "runs/report/report.md").read_text("utf-8")
    assert "BN (tensorized_lm tiny)" in report and "LN (layer_scale_groups=4, tr" in report
