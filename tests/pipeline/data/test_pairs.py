import gzip
import lzma
import tempfile
from pathlib import Path

import pytest

from pn_fairseq.common.command import UserError
from pn_fairseq.pipeline.data import pairs
from pn_fairseq.pipeline.data.folder import DataFolder
from pn_fairseq.pipeline.data.pairs import (
    as_is,
    segments,
    strip_tags,
    tokens,
    without_carriage_returns,
)
from pn_fairseq.pipeline.data.recipes.wmt14 import sacrebleus_segments
from pn_fairseq.pipeline.data.settings import Settings

from ...fixtures.corpora import lines


def write(folder: Path, **contents: bytes) -> tuple[Path, Path]:
    for name, content in contents.items():
        (folder / f"text.{name}").write_bytes(content)
    return tuple(folder / f"text.{name}" for name in contents)


def take(reader: pairs.Reader, tmp_path: Path, de: bytes, en: bytes) -> tuple[list[str], list[str]]:
    with tempfile.TemporaryDirectory() as folder:
        data = DataFolder(Path(folder), Settings(source="de", target="en"))
        data.take(reader, "train", write(tmp_path, de=de, en=en))
        return tuple(lines(data.partial / f"text/train.{lang}") for lang in ("de", "en"))


def test_text_as_it_is(tmp_path, capsys):
    assert take(as_is, tmp_path, b"a\r\n b \n", b"c\nd") == (["a\r", " b "], ["c", "d"])
    assert capsys.readouterr().err == ""


def test_packed_text(tmp_path, capsys):
    (tmp_path / "x.de.gz").write_bytes(gzip.compress(b"eins\n"))
    assert list(pairs.as_is(tmp_path / "x.de")) == ["eins\n"]
    (tmp_path / "x.de.gz").write_bytes(gzip.compress(b"eins\n" * 999)[:-9])
    with pytest.raises(UserError, match="x.de.gz is damaged or cut off"):
        list(pairs.as_is(tmp_path / "x.de"))
    (tmp_path / "z.de").write_bytes(lzma.compress(b"zwei\n"))
    (tmp_path / "z.de.xz").write_bytes(b"")
    assert list(pairs.as_is(tmp_path / "z.de")) == ["zwei\n"]
    note = f"[prepare] note: {tmp_path / 'z.de'} is used, and not z.de.xz beside it\n"
    assert capsys.readouterr().err == note
    with pytest.raises(UserError, match=r"there is no .*/y.de, plain or compressed \(.gz, .xz\)"):
        list(pairs.as_is(tmp_path / "y.de"))


def test_what_users_do_not_see_is_said_with_counts(tmp_path, capsys):
    """A byte order mark would be a token, which no model produces."""
    sides = take(as_is, tmp_path, b"\xef\xbb\xbfein Mann\n\nx\n\n", b"a man\nb\nc\n\n")
    assert sides[0][0] == "ein Mann"
    notes = capsys.readouterr().err
    assert "text.de begins with a byte order mark, which is left out" in notes
    for words in ("2 of the 4 lines of", "1 of the 4 lines of", "text.en are empty"):
        assert words in notes


APART = "text.de has 2 lines and .*text.en 1: they are not translations of each other"
OPEN = b'<seg id="1">a</seg>\n<seg id="2">b\n'


@pytest.mark.parametrize(
    ("reader", "de", "en", "needle"),
    [
        (as_is, b"a\nb\n", b"c\n", APART),
        (as_is, b"a\n", b"c\nd\n", "text.de has 1 line and .*text.en 2"),
        (as_is, b"a\n", b"", "text.en is empty"),
        (as_is, b"a\n\xff\n", b"c\nd\n", "text.de: line 2 is not UTF-8"),
        (as_is, b"a\nb\rc\n", b"c\nd\n", "text.de: line 2 has a carriage return in the middle"),
        (segments, b"a\n", b"b\n", "text.de is empty, or no text that can be read here"),
        (segments, OPEN, b"c\nd\n", "text.de: line 2 is not of the form <seg"),
    ],
)
def test_text_that_cannot_be_used(reader, de, en, needle, tmp_path):
    with pytest.raises(UserError, match=needle):
        take(reader, tmp_path, de, en)


TAGGED = "<url>x</url>\n<title>T &amp; U</title>\n  a\rb \n<speaker>S</speaker>\n"
SEGMENTS = '<doc>\n<seg id="1"> a\rb </seg>\n<seg id="2"></seg>\n</doc>\n'
SACREBLEUS = '<seg id="1">\u00a0a\r</seg>\n<seg id="2">b</seg>\n'


@pytest.mark.parametrize(
    ("reader", "text", "expected"),
    [
        (without_carriage_returns, "a\rb\r\nc\n", ["ab", "c"]),  # as normalize-punctuation.perl
        (tokens, "a\u00a0b  c\u2028d\n\n", ["a b c d", ""]),
        (strip_tags, TAGGED, ["T &amp; U", "a b", "<speaker>S</speaker>"]),
        (segments, SEGMENTS, ["a b", ""]),
        (sacrebleus_segments, SACREBLEUS, ["\u00a0a", "b"]),
    ],
)
def test_kinds_of_published_text(reader, text, expected, tmp_path):
    assert take(reader, tmp_path, text.encode(), text.encode()) == (expected, expected)


@pytest.mark.parametrize(
    ("source", "target", "reason"),
    [
        ("a b c", "a b", None),
        ("a b c d", "a b", "ratio"),
        ("", "a", "empty"),
        ("a " * 176, "a " * 176, "too long"),
        ("a " * 175, "a " * 175, None),
        ("x" * 1000, "a", None),
        ("x" * 1001, "a", "long token"),
    ],
)
def test_the_rule_of_cleaning(source, target, reason):
    assert pairs.objection(source.split(), target.split(), 1, 175, 1.5) == reason
    assert pairs.objection(target.split(), source.split(), 1, 175, 1.5) == reason
    assert pairs.objection(["a"], ["a"], 2, 175, 1.5) == "too short"


def test_removed_pairs_and_counts(tmp_path):
    """Lengths are numbers of tokens. Only training pairs are removed."""
    for folder in ("text", "stages/tok"):
        (tmp_path / folder).mkdir(parents=True)
        for split in ("train", "valid", "test"):
            for lang, text in (("de", "a b\nx y z\n"), ("en", "c d\nx\n")):
                if folder == "text":
                    text = text.replace(" ", "")
                (tmp_path / f"{folder}/{split}.{lang}").write_text(text)
    DataFolder(tmp_path, Settings(source="de", target="en", clean=(1, 9, 1.5))).select()
    counts = "train.read=2 train.removed=1 train.removed.ratio=1 train=1 valid=2 test=2".split()
    for name, expected in (
        ("raw/train.de", ["ab"]),
        ("tok/train.en", ["c d"]),
        ("raw/test.de", ["ab", "xyz"]),
        ("removed.tsv", ["split\tline\treason\ttokens de\ttokens en", "train\t2\tratio\t3\t1"]),
        ("counts.txt", counts),
    ):
        assert lines(tmp_path / name) == expected


def test_a_split_without_a_pair(tmp_path):
    for folder in ("text", "stages/tok"):
        (tmp_path / folder).mkdir(parents=True)
        for name in ("train.de", "train.en", "test.de", "test.en"):
            (tmp_path / folder / name).write_text("a\n" * 5)
    settings = Settings(source="de", target="en", clean=(1, 9, 1.5), valid_every=6)
    message = "no sentence pair of valid is left .*train.read=5.*train=5, valid=0, test=5"
    with pytest.raises(UserError, match=message):
        DataFolder(tmp_path, settings).select()
    assert not (tmp_path / "counts.txt").exists()
