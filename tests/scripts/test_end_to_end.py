"""From raw text to BLEU, perplexity and the report, with the scripts and the tools that users
have.
"""

import itertools
import json
import re
from pathlib import Path

import pytest
import sacrebleu

from ..scripts_helpers import assert_refused, run, script

SHORT = "optimization.max_update=4 checkpoint.save_interval_updates=2 tokens_per_update=400".split()


@pytest.fixture(scope="module")
def trained(data, tmp_path_factory) -> Path:
    run_dir = tmp_path_factory.mktemp("trained") / "run"
    script("train.sh", "verses_es_en", "--data", data, "--run", run_dir, *SHORT)
    return run_dir


@pytest.fixture(scope="module")
def decoded(trained) -> Path:
    script("average.sh", "--run", trained, "--last", 2)
    script("generate.sh", "--run", trained, "--beam", 2, "--max-len-b", 20, cwd="/")
    return trained / "generate/test"


@pytest.mark.ci
def test_both_bleu_flavours(data, trained, decoded):
    """Tokenized BLEU is what fairseq-generate prints; both are what sacrebleu's library
    computes.
    """
    output = script("score.sh", "--run", trained).stdout
    tokenized, detokenized, chrf, ter = output.splitlines()
    assert tokenized.startswith("tokenized BLEU:") and detokenized.startswith("detokenized BLEU:")
    assert "tok:none" in tokenized and "version:" in detokenized and "case:lc" in detokenized
    assert chrf.startswith("chrF2:") and "case:lc" in chrf and ter.startswith("TER:")

    fairseq = float(
        re.search(r"BLEU4 = ([\d.]+),", (decoded / "generate.log").read_text("utf-8"))[1]
    )
    hypotheses = (decoded / "hyp.tok").read_text("utf-8").splitlines()
    references = (data / "tok/test.en").read_text("utf-8").splitlines()
    own = sacrebleu.corpus_bleu(
        hypotheses, [references], tokenize="none", smooth_method="none", force=True
    ).score
    printed = float(re.search(r"= ([\d.]+) ", tokenized)[1])
    assert printed == pytest.approx(own, abs=0.006) and printed == pytest.approx(fairseq, abs=0.011)

    raw = (data / "raw/test.en").read_text("utf-8").splitlines()
    plain = (decoded / "hyp.txt").read_text("utf-8").splitlines()
    own = sacrebleu.corpus_bleu(plain, [raw], lowercase=True).score
    assert float(re.search(r"= ([\d.]+) ", detokenized)[1]) == pytest.approx(own, abs=0.006)


@pytest.mark.slow
def test_demo(tmp_path, monkeypatch):
    """Prepares the whole corpus in the repository, so it takes a minute or two."""
    monkeypatch.chdir(tmp_path)
    few = [
        "optimization.max_update=6",
        "checkpoint.save_interval_updates=2",
        "dataset.validate_interval_updates=6",
    ]
    # a model that has learned nothing does not end its sentences
    few.append("generation.max_len_b=20")
    result = script("demo.sh", "--run", tmp_path / "run", *few)
    for part in (
        "Sample translations",
        "tokenized BLEU:",
        "detokenized BLEU:",
        "report-curves-1.png",
    ):
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
    refused = script(
        "demo.sh", "--run", tmp_path / "other", "--arch", "transformer_pm_tiny", check=False
    )
    assert_refused(refused, "did you mean 'transformer_pn_tiny'")


@pytest.mark.slow
def test_verses_lm(tmp_path):
    narrow = (
        "model.decoder_embed_dim=16",
        "model.decoder_ffn_embed_dim=16",
        "model.decoder_layers=1",
    )
    fast = (
        "optimization.max_update=2",
        "checkpoint.save_interval_updates=2",
        "checkpoint.patience=-1",
    )
    options = ("--data", tmp_path / "data", "--runs", tmp_path / "runs", *narrow, *fast)
    done = run(
        "pn",
        "reproduce",
        "verses_lm",
        *options,
        "--norms",
        "ln,ln+layer_scale_groups=4,bn",
        "--seeds",
        1,
    )
    for model, norm in itertools.product(
        ("transformer", "tensorized"), ("ln", "ln+layer_scale_groups=4", "bn")
    ):
        name = f"{model}_lm_{norm}_seed1"
        assert all(f"{name}: {step}" in done.stderr for step in ("train", "average", "evaluate-lm"))
        found = json.loads((tmp_path / f"runs/{name}/evaluate_lm/test.json").read_text())
        assert found["tokens"] == 47_381 and found["unit"] == "word" and found["causal"]
    report = (tmp_path / "runs/report/report.md").read_text("utf-8")
    assert "BN (tensorized_lm tiny)" in report and "LN (layer_scale_groups=4, tr" in report
