"""pn reproduce with every real step, for a few updates; tests/scripts/test_demo.py does the same for translation."""

import json

import pytest

from ..scripts_helpers import run


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
