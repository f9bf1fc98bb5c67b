"""The demo from end to end, with a handful of updates."""

import pytest

from ..scripts_helpers import assert_refused, script


@pytest.mark.slow
def test_demo(tmp_path, monkeypatch):
    """Prepares the whole corpus in the repository, so it takes a minute or two."""
    monkeypatch.chdir(tmp_path)
    few = ["optimization.max_update=6", "checkpoint.save_interval_updates=2", "dataset.validate_interval_updates=6"]
    few.append("generation.max_len_b=20")  # a model that has learned nothing does not end its sentences
    result = script("demo.sh", "--run", tmp_path / "run", *few)
    for part in ("Sample translations", "tokenized BLEU:", "detokenized BLEU:", "report-curves-1.png"):
        assert part in result.stdout
    assert len({line for line in result.stdout.splitlines() if line.startswith("  source ")}) == 5
    assert (tmp_path / "run/report/report-curves-1.png").stat().st_size > 10_000
    again = script("demo.sh", "--run", tmp_path / "run", *few)
    assert "already trained" in again.stderr and "already exists" in again.stderr
    shown = "Sample translations"
    assert again.stdout.partition(shown)[2] == result.stdout.partition(shown)[2]
    refused = script("demo.sh", "--run", tmp_path / "other", "common.sed=1", check=False)
    assert_refused(refused, "common.sed", "did you mean 'common.seed'")
    assert "preparing" not in refused.stderr and not (tmp_path / "other").exists()
    refused = script("demo.sh", "--run", tmp_path / "other", "--arch", "transformer_pm_tiny", check=False)
    assert_refused(refused, "did you mean 'transformer_pn_tiny'")
