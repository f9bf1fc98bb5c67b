"""Tokens, with the rule for the last full stop, which sacremoses lacks, plain text of them, and
subwords.
"""

import shutil

import pytest
import sacremoses

from pn_fairseq.common.command import UserError
from pn_fairseq.pipeline.data import tokens
from pn_fairseq.pipeline.data.languages import language_of
from pn_fairseq.pipeline.data.settings import Settings
from pn_fairseq.pipeline.data.subwords import are_in, count_merges, learn, segmenter
from pn_fairseq.pipeline.data.tokens import detokenize

from ...scripts_helpers import verses
from ...tables import rows


def tokenize(line: str, lang: str = "en", straighten: bool = False, **changes: object) -> str:
    return tokens.sacremoses(Settings(source="de", target="en", **changes), lang, straighten)(line)


TOKENIZED = """
en       | I live in the U.S.              | I live in the U.S .
en       | He is with Mr.                  | He is with Mr .
en       | Mr. Smith left at 5 a.m. today. | Mr. Smith left at 5 a.m. today .
en       | It was No. 1.                   | It was No. 1 .
en       | And then ...                    | And then ...
en       | And then...                     | And then ...
en       | .                               | .
en       | He said: “No.”                  | He said : “ No . ”
de       | auf einen Bus der Linie A.      | auf einen Bus der Linie A .
de       | im Trikot mit der Nummer 10.    | im Trikot mit der Nummer 10 .
de       | Das war am 3. Mai.              | Das war am 3. Mai .
fra_Latn | L'homme .                       | L&apos; homme .
en-GB    | the man's                       | the man &apos;s
"""


@pytest.mark.parametrize(("lang", "line", "expected"), rows(TOKENIZED))
def test_the_last_full_stop_is_a_token(lang, line, expected):
    """As mosesdecoder's tokenizer.perl since November 2018; by the rules of a tag's language."""
    assert tokenize(line, lang) == expected


def test_white_space():
    """Moses deletes control characters that Python takes for white space, and a tab is a blank."""
    assert tokenize("one\x1ctwo \x1d three\tfour\x0bfive") == "onetwo three four five"
    assert tokenize("", "de") == ""


def test_without_the_rule_for_the_last_full_stop():
    assert tokenize("I live in the U.S.", tokenizer="sacremoses") == "I live in the U.S."


@pytest.mark.parametrize(
    ("changes", "line", "expected"),
    [
        ({"lower": True}, "ÄÖÜ Straße", "äöü straße"),
        ({"straighten": True}, "They’re “it’s”", "They &apos;re “ it &apos;s ”"),
        ({"aggressive": True}, "well-known", "well @-@ known"),
        ({"normalize": True}, "“Quotes” – and more…", "&quot; Quotes &quot; - and more ..."),
        ({"normalize": True}, "a\rb", "ab"),
        ({"nonprinting": True}, "a\u200bb\x07c", "a b c"),
    ],
)
def test_settings(changes, line, expected):
    assert tokenize(line, **changes) == expected


@pytest.mark.parametrize(
    ("pattern", "text", "message"),
    [
        ("b c", "a b c", "empty or has white space"),
        ("x*", "a", "empty or"),
        ("a", f"a {tokens._MARK}", "for itself"),
    ],
)
def test_text_that_cannot_be_protected(pattern, text, message):
    work = tokens.tokenizer(Settings(source="de", target="en", protect=[pattern]), "en")
    with pytest.raises(UserError, match=message):
        work(f"{text}\n".encode())


def test_tokenized_text_loses_only_spaces():
    settings = Settings(source="de", target="en", tokenizer="none")
    assert tokens.tokenizer(settings, "en")(b"It 's  a &apos;\n").decode() == "It 's a &apos;\n"


@pytest.mark.skipif(not shutil.which("perl"), reason="Moses' scripts need perl")
def test_moses_scripts_run_in_their_order_with_their_flags(tmp_path, monkeypatch):
    chosen = Settings(
        source="de", target="en", tokenizer="moses", normalize=True, lower=True, aggressive=True
    )
    for script in tokens.scripts(chosen).values():
        (tmp_path / script).parent.mkdir(parents=True, exist_ok=True)
        name = script.split("/")[-1].split(".")[0]
        (tmp_path / script).write_text(f'while (<STDIN>) {{ chomp; print "$_ {name}(@ARGV)\\n"; }}')
    work = tokens.tokenizer(chosen, "de", True, tmp_path)
    tokenized = "x' normalize-punctuation(de) tokenizer(-q -l de -a) lowercase()\n"
    assert work("x’\nx’\n".encode()).decode() == tokenized * 2


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
    ("text", "expected"),
    [("a@@ b" + " c" * 998, True), ("a@@ b" + " c" * 999, False), ("@@ b", False), ("", False)],
)
def test_text_in_subwords_has_one_token_of_a_thousand_that_is_continued(text, expected, tmp_path):
    (tmp_path / "text").write_text(f"{text}\n")
    assert are_in([tmp_path / "text"]) is expected


@pytest.mark.parametrize("kind", ["subword-nmt", "sentencepiece"])
def test_joining_the_subwords_gives_the_tokens_back(kind, tmp_path):
    lines = ["the lower lowest words , and the newest", "the new low words ½ …"]
    (tmp_path / "text").write_text("\n".join(lines * 5))
    learn(kind, 30, tmp_path / "model", [tmp_path / "text"])
    segment = segmenter(kind, tmp_path / "model")
    for line in [*lines, "an unseen wordlet"]:
        joined = segment(line)
        if kind == "subword-nmt":
            joined = joined.replace("@@ ", "")
        else:
            joined = joined.replace(" ", "").replace("▁", " ")
        assert joined.strip() == line


TAGS = """
zh | zh zho_Hans zh_CN zh-TW cmn_Hant
ja | ja jpn_Jpan ja_XX
ko | ko kor_Hang
pt | pt-BR por_Latn
de | de deu_Latn de_DE
ar | arb_Arab
source | source
"""


def test_tags_of_languages():
    """FLORES, BCP 47, mBART and glibc's tags; what is no tag stays."""
    for language, tags in rows(TAGS):
        assert {language_of(tag) for tag in tags.split()} == {language}
    assert language_of("") == ""


PLAIN = """
en | well @-@ known , isn &apos;t it ? | well-known, isn't it?
en | a @-@ b @-@ c - d | a-b-c - d
en | he said , “ it ’ s late . ” ( really ) | he said, “it’s late.” (really)
en | “ go , ” he said , “ now . ” ( “ why ‘ now ’ ? ” ) | “go,” he said, “now.” (“why ‘now’?”)
en | &quot; yes &quot; &amp; &#91; no &#93; &lt; x &#124; y | "yes" & [no] < x \\| y
de | er sagte : „ es ist spät “ und ging . | er sagte: „es ist spät“ und ging.
de | „ ja “ , sagte er , „ nein “ . | „ja“, sagte er, „nein“.
cs | „ ano “ , „ ne “ . | „ano“, „ne“.
vi | xin chào , thế giới ! | xin chào, thế giới!
"""


@pytest.mark.parametrize(("language", "tokens", "text"), rows(PLAIN))
def test_tokens_become_plain_text(language, tokens, text):
    assert detokenize([tokens], language) == [text.replace("\\|", "|")]


def test_white_space_of_tokens():
    assert detokenize(["", "one\xa0two\u2028three"], "en") == ["", "one two three"]


def test_plain_text_survives_its_tokens():
    """Sentences of the corpus with several quotations."""
    lines = verses("en", 1000, split="test")
    quoting = [line for line in lines if line.count("“") > 1 and "—" not in line]
    assert len(quoting) > 15
    tokenizer = sacremoses.MosesTokenizer(lang="en")
    tokenized = [tokenizer.tokenize(line, return_str=True) for line in quoting]
    assert detokenize(tokenized, "en") == quoting
