"""Subwords: our faster learner finds the merges of subword-nmt."""

import gzip
import io
import random
from collections import Counter

import pytest
from subword_nmt.learn_bpe import learn_bpe

from pn_fairseq.pipeline.command import UserError
from pn_fairseq.pipeline.data.subwords import learn, learn_merges, segmenter
from tests.scripts_helpers import ROOT


def own_merges(words: Counter, operations: int) -> list[str]:
    return [" ".join(pair) for pair in learn_merges(words, operations)]


def library_merges(words: Counter, operations: int) -> list[str]:
    codes = io.StringIO()
    learn_bpe((f"{word} {count}" for word, count in words.items()), codes, operations, is_dict=True)
    return codes.getvalue().splitlines()[1:]


def test_merges_are_those_of_the_library():
    """Words of few letters, where pairs overlap and tie; and a text with many rare pairs, which the library prunes."""
    chance = random.Random(1)
    for letters in ("a", "ab", "abc") * 8:
        words = ["".join(chance.choices(letters, k=chance.randint(2, 12))) for _ in range(chance.randint(2, 60))]
        counted = Counter({word: chance.randint(1, 60) for word in words})
        assert own_merges(counted, 200) == library_merges(counted, 200), counted
    counted = Counter()
    for lang in ("es", "en"):
        with gzip.open(ROOT / f"data/verses.es-en/train.{lang}.gz", "rt", encoding="utf-8") as file:
            counted.update(word for _ in range(500) for word in next(file).split())
    assert own_merges(counted, 400) == library_merges(counted, 400)


def test_a_vocabulary_that_sentencepiece_cannot_make(tmp_path):
    (tmp_path / "text").write_text("some words and some more words\n" * 3)
    with pytest.raises(UserError, match="--bpe 5000: Vocabulary size too high.*another --bpe"):
        learn("sentencepiece", 5000, tmp_path / "model", [tmp_path / "text"], 1)
    assert not (tmp_path / "model").exists()


def test_text_without_words(tmp_path):
    (tmp_path / "text").write_text("a b c\n")
    with pytest.raises(UserError, match="text: there is no word of two characters"):
        learn("subword-nmt", 10, tmp_path / "codes", [tmp_path / "text"], 1)


@pytest.mark.parametrize("kind", ["subword-nmt", "sentencepiece"])
def test_joining_the_subwords_gives_the_tokens_back(kind, tmp_path):
    lines = ["the lower lowest words , and the newest", "the new low words"]
    (tmp_path / "text").write_text("\n".join(lines * 5))
    learn(kind, 30, tmp_path / "model", [tmp_path / "text"], 1)
    segment = segmenter(kind, tmp_path / "model")
    for line in [*lines, "an unseen wordlet"]:
        subwords = segment(line)
        joined = subwords.replace("@@ ", "") if kind == "subword-nmt" else subwords.replace(" ", "").replace("▁", " ")
        assert joined.strip() == line
