"""From raw text to BLEU on a small cut of the corpus, with the scripts and the tools that users have."""

import re
from pathlib import Path

import pytest
import sacrebleu

from ..scripts_helpers import script

#: A training of seconds. The psi warm-up ends at update 6, in the middle.
SHORT = (
    *("optimization.max_update=12", "checkpoint.save_interval_updates=4", "dataset.validate_interval_updates=100"),
    *("tokens_per_update=400", "lr_scheduler.warmup_updates=6", "common.log_interval=2"),
)


@pytest.fixture(scope="module")
def trained(data, tmp_path_factory) -> Path:
    run_dir = tmp_path_factory.mktemp("trained") / "run"
    script("train.sh", "verses_es_en", "--data", data, "--run", run_dir, *SHORT)
    return run_dir


@pytest.fixture(scope="module")
def decoded(trained) -> Path:
    script("average.sh", "--run", trained, "--last", 2)
    script("generate.sh", "--run", trained, "--max-len-b", 20, cwd="/")
    return trained / "generate/test"


def test_both_bleu_flavours(data, trained, decoded):
    """Tokenized BLEU is what fairseq-generate prints; both are what sacrebleu's library computes."""
    output = script("score.sh", "--run", trained).stdout
    tokenized, detokenized, chrf, ter = output.splitlines()
    assert tokenized.startswith("tokenized BLEU:") and detokenized.startswith("detokenized BLEU:")
    assert "tok:none" in tokenized and "version:" in detokenized and "case:lc" in detokenized
    assert chrf.startswith("chrF2:") and "case:lc" in chrf and ter.startswith("TER:")

    fairseq = float(re.search(r"BLEU4 = ([\d.]+),", (decoded / "generate.log").read_text("utf-8"))[1])
    hypotheses = (decoded / "hyp.tok").read_text("utf-8").splitlines()
    references = (data / "tok/test.en").read_text("utf-8").splitlines()
    own = sacrebleu.corpus_bleu(hypotheses, [references], tokenize="none", smooth_method="none", force=True).score
    printed = float(re.search(r"= ([\d.]+) ", tokenized)[1])
    assert printed == pytest.approx(own, abs=0.006) and printed == pytest.approx(fairseq, abs=0.011)

    raw = (data / "raw/test.en").read_text("utf-8").splitlines()
    plain = (decoded / "hyp.txt").read_text("utf-8").splitlines()
    own = sacrebleu.corpus_bleu(plain, [raw], lowercase=True).score
    assert float(re.search(r"= ([\d.]+) ", detokenized)[1]) == pytest.approx(own, abs=0.006)
