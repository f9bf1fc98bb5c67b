"""From raw text to BLEU on a small cut of the corpus, with the scripts and the tools that users have."""

import os
import re
from pathlib import Path

import pytest
import sacrebleu

from pn_fairseq.common.checkpoints import load_checkpoint

from ..scripts_helpers import ROOT, assert_refused, cut_corpus, prepare, run, script

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


def snapshot(*folders: Path) -> dict[Path, int]:
    """Modification times of all files but raw text, which is read each time."""
    return {
        path: path.stat().st_mtime_ns
        for top in folders
        for path in sorted(top.rglob("*"))
        if path.is_file() and path.parent.name != "raw"
    }


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


def test_second_preparation_does_nothing(data):
    before = snapshot(data)
    prepare(data.parent / "corpus", data)
    assert snapshot(data) == before


def test_preparation_with_other_settings_or_text_is_refused(data, tmp_path):
    before = snapshot(data / "bin")
    assert_refused(prepare(data.parent / "corpus", data, "--keep-case", check=False), "other settings", str(data))
    changed = cut_corpus(tmp_path / "corpus")
    (changed / "train.en").write_text((changed / "train.en").read_text("utf-8").replace("God", "Dog"), encoding="utf-8")
    assert_refused(prepare(changed, data, check=False), "other text", str(data))
    assert snapshot(data / "bin") == before


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


@pytest.mark.parametrize(
    ("file", "content", "needle"),
    [
        ("train.en", None, "train.en"),
        ("test.en", b"one line\n", "test.en 1"),
        ("train.es", b"fine\na\xff\xfe\n" * 300, "line 2 is not UTF-8"),
    ],
    ids=["missing", "fewer lines", "not UTF-8"],
)
def test_text_that_cannot_be_used_is_refused(file, content, needle, tmp_path):
    corpus = cut_corpus(tmp_path / "corpus")
    (corpus / file).unlink()
    if content is not None:
        (corpus / file).write_bytes(content)
    assert_refused(prepare(corpus, tmp_path / "data", check=False), needle)
    assert not (tmp_path / "data/bin").exists()


def test_as_many_hypotheses_as_sentences_in_the_order_of_the_text(data, decoded):
    assert line_count(decoded / "hyp.tok") == 37
    assert (decoded / "src.tok").read_bytes() == (data / "tok/test.es").read_bytes()
    sources = [
        line.split("\t", 1) for line in (decoded / "generate.log").read_text("utf-8").splitlines() if line[:2] == "S-"
    ]
    text = (decoded / "src.tok").read_text("utf-8").splitlines()
    for number, source in sources:  # fairseq numbers the lines (rare characters come out as <unk>)
        if "<unk>" not in source:
            assert source == text[int(number[2:])]


@pytest.mark.slow
def test_decoding_of_the_validation_set_elsewhere(trained, tmp_path):
    where = tmp_path / "somewhere else"
    script("generate.sh", "--run", trained, "--subset", "valid", "--output", where, "--beam", 1)
    assert line_count(where / "hyp.tok") == 40


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


@pytest.mark.slow
def test_plain_fairseq_commands_from_another_folder(data, tmp_path):
    """fairseq-train, fairseq-validate, the average, fairseq-generate, with --user-dir and without scripts/."""
    flags = (
        *("--user-dir", os.path.relpath(ROOT / "pn_fairseq", tmp_path), "--source-lang", "es", "--target-lang", "en"),
        *("--required-batch-size-multiple", "1", "--max-tokens", "400"),
    )
    run(
        *("fairseq-train", data / "bin", *flags, "--arch", "transformer_pn_tiny", "--share-all-embeddings"),
        *("--optimizer", "adam", "--lr", "0.001", "--lr-scheduler", "inverse_sqrt", "--warmup-updates", "4"),
        *("--max-update", "6", "--save-interval-updates", "3", "--no-epoch-checkpoints", "--save-dir", "checkpoints"),
        cwd=tmp_path,
    )
    run(
        *("pn", "average", "--inputs", "checkpoints", "--last", "2", "--output", "averaged.pt"),
        cwd=tmp_path,
    )
    args = load_checkpoint(tmp_path / "averaged.pt")["cfg"]["model"]
    assert args.psi_warmup_updates == 4 and args.encoder_norm == "power"
    # No --arch: what a checkpoint holds is enough.
    run("fairseq-validate", data / "bin", *flags, "--task", "translation", "--path", "averaged.pt", cwd=tmp_path)
    decoded = run("fairseq-generate", data / "bin", *flags, "--path", "averaged.pt", "--beam", "2", cwd=tmp_path)
    assert len(re.findall(r"^H-", decoded.stdout, re.M)) == 37
    ensemble = ("--path", "averaged.pt:checkpoints/checkpoint_last.pt")
    decoded = run("fairseq-generate", data / "bin", *flags, *ensemble, "--beam", "2", cwd=tmp_path)
    assert len(re.findall(r"^H-", decoded.stdout, re.M)) == 37
