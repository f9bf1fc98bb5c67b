"""From raw text to BLEU on a small cut of the corpus, with the scripts and the tools that users have."""

import re
from pathlib import Path

import pytest
import sacrebleu

from ..scripts_helpers import assert_refused, cut_corpus, prepare, script

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


def line_count(path: Path) -> int:
    return len(path.read_bytes().splitlines())


def test_preparation_keeps_every_sentence(data):
    for split, count in (("train", 600), ("valid", 40), ("test", 37)):
        for stage in ("raw", "tok", "bpe"):
            for lang in ("es", "en"):
                assert line_count(data / stage / f"{split}.{lang}") == count
    assert (data / "tok/test.es").read_text("utf-8") == (data / "tok/test.es").read_text("utf-8").lower()
    joined = (data / "bin/dict.es.txt").read_bytes()
    assert joined == (data / "bin/dict.en.txt").read_bytes()
    # Gluing the subwords gives the tokens back.
    assert (data / "bpe/test.en").read_text("utf-8").replace("@@ ", "") == (data / "tok/test.en").read_text("utf-8")


def test_text_that_was_corrected_is_taken(tmp_path):
    corpus = cut_corpus(tmp_path / "corpus", train=80)
    good = (corpus / "train.es").read_bytes()
    (corpus / "train.es").write_bytes(good + b"one more\n")
    assert_refused(prepare(corpus, tmp_path / "data", check=False), "81 lines", "not translations of each other")
    (corpus / "train.es").write_bytes(good)
    prepare(corpus, tmp_path / "data")
    assert line_count(tmp_path / "data/bpe/train.es") == 80


def test_case_is_kept_when_asked_for_and_a_folder_may_have_any_name(tmp_path):
    corpus = cut_corpus(tmp_path / "corpus", train=80)
    dest = tmp_path / "my josé (1), a=b 'x'"
    prepare(corpus, dest, "--keep-case")
    text = (dest / "tok/test.en").read_text("utf-8")
    assert text != text.lower()
    assert (dest / "settings.txt").read_text().splitlines()[2] == "lower=0"


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
