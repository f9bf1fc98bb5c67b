import pytest

from pn_fairseq.common.command import UserError
from pn_fairseq.pipeline.data.subwords import are_in, count_merges, learn, segmenter


def test_a_vocabulary_that_sentencepiece_cannot_make(tmp_path):
    (tmp_path / "text").write_text("some words and some more words\n" * 3)
    with pytest.raises(UserError, match="--bpe 5000: Vocabulary size too high.*another --bpe"):
        learn("sentencepiece", 5000, tmp_path / "model", [tmp_path / "text"])
    assert not (tmp_path / "model").exists()


def test_text_without_words(tmp_path):
    (tmp_path / "text").write_text("a b c\n")
    with pytest.raises(UserError, match="the training text has no word of two characters"):
        learn("subword-nmt", 10, tmp_path / "codes", [tmp_path / "text"])
    with pytest.raises(UserError, match="the text came in subwords, without the codes"):
        segmenter("subword-nmt", tmp_path / "codes")


def test_text_with_fewer_merges_is_said(tmp_path, capsys):
    text, codes = tmp_path / "text", tmp_path / "codes"
    text.write_text("lower lower\n")
    for operations, note in ((5, "note: the text has 4 merges, fewer than --bpe 5;"), (4, "")):
        learn("subword-nmt", operations, codes, [text])
        said = capsys.readouterr().err
        assert count_merges(codes) == 4 and note in said and ("note" in said) is bool(note)


@pytest.mark.parametrize(
    ("text", "expected"), [("a@@ b" + " c" * 998, True), ("a@@ b" + " c" * 999, False), ("@@ b", False), ("", False)]
)
def test_text_in_subwords_has_one_token_of_a_thousand_that_is_continued(text, expected, tmp_path):
    (tmp_path / "text").write_text(f"{text}\n")
    assert are_in([tmp_path / "text"]) is expected


@pytest.mark.parametrize("kind", ["subword-nmt", "sentencepiece"])
def test_joining_the_subwords_gives_the_tokens_back(kind, tmp_path):
    lines = ["the lower lowest words , and the newest", "the new low words"]
    (tmp_path / "text").write_text("\n".join(lines * 5))
    learn(kind, 30, tmp_path / "model", [tmp_path / "text"])
    segment = segmenter(kind, tmp_path / "model")
    for line in [*lines, "an unseen wordlet"]:
        subwords = segment(line)
        joined = subwords.replace("@@ ", "") if kind == "subword-nmt" else subwords.replace(" ", "").replace("▁", " ")
        assert joined.strip() == line
