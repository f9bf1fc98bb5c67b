"""Tokenization, and the rule for the last full stop, which sacremoses lacks."""

import shutil

import pytest

from pn_fairseq.common.command import UserError
from pn_fairseq.pipeline.data import tokens
from pn_fairseq.pipeline.data.settings import Settings


def tokenize(line: str, lang: str = "en", straighten: bool = False, **changes: object) -> str:
    return tokens.sacremoses(Settings(source="de", target="en", **changes), lang, straighten)(line)


@pytest.mark.parametrize(
    ("lang", "line", "expected"),
    [
        ("en", "I live in the U.S.", "I live in the U.S ."),
        ("en", "He is with Mr.", "He is with Mr ."),
        ("en", "Mr. Smith left at 5 a.m. today.", "Mr. Smith left at 5 a.m. today ."),
        ("en", "It was No. 1.", "It was No. 1 ."),
        ("en", "And then ...", "And then ..."),
        ("en", "And then...", "And then ..."),
        ("en", ".", "."),
        ("en", "He said: “No.”", "He said : “ No . ”"),
        ("de", "eine Person blickt aus dem Fenster auf einen Bus der Linie A.", None),
        ("de", "der Spieler im schwarzen Trikot mit der Nummer 10.", None),
        ("de", "Das war am 3. Mai.", "Das war am 3. Mai ."),
        ("de", "", ""),
        # Moses deletes control characters that Python takes for white space, and a tab is a blank.
        ("en", "one\x1ctwo \x1d three\tfour\x0bfive", "onetwo three four five"),
        # The rules of a tag's language.
        ("fra_Latn", "L'homme .", "L&apos; homme ."),
        ("en-GB", "the man's", "the man &apos;s"),
    ],
)
def test_the_last_full_stop_is_a_token(lang, line, expected):
    """As mosesdecoder's tokenizer.perl since November 2018."""
    assert tokenize(line, lang) == (expected if expected is not None else f"{line[:-1]} .")


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
    [("b c", "a b c", "empty or has white space"), ("x*", "a", "empty or"), ("a", f"a {tokens._MARK}", "for itself")],
)
def test_text_that_cannot_be_protected(pattern, text, message):
    with pytest.raises(UserError, match=message):
        tokens.tokenizer(Settings(source="de", target="en", protect=[pattern]), "en")(f"{text}\n".encode())


def test_tokenized_text_loses_only_spaces():
    settings = Settings(source="de", target="en", tokenizer="none")
    assert tokens.tokenizer(settings, "en")(b"It 's  a &apos;\n").decode() == "It 's a &apos;\n"


@pytest.mark.skipif(not shutil.which("perl"), reason="Moses' scripts need perl")
def test_moses_scripts_run_in_their_order_with_their_flags(tmp_path, monkeypatch):
    chosen = Settings(source="de", target="en", tokenizer="moses", normalize=True, lower=True, aggressive=True)
    for script in tokens.scripts(chosen).values():
        (tmp_path / script).parent.mkdir(parents=True, exist_ok=True)
        name = script.split("/")[-1].split(".")[0]
        (tmp_path / script).write_text(f'while (<STDIN>) {{ chomp; print "$_ {name}(@ARGV)\\n"; }}')
    work = tokens.tokenizer(chosen, "de", True, tmp_path)
    tokenized = "x' normalize-punctuation(de) tokenizer(-q -l de -a) lowercase()\n"
    assert work("x’\nx’\n".encode()).decode() == tokenized * 2
