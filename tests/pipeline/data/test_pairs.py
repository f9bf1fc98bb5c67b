"""Reading published text in pairs, and choosing among the pairs."""

import gzip
from pathlib import Path

import pytest

from pn_fairseq.common.command import UserError
from pn_fairseq.pipeline.data import pairs, settings
from pn_fairseq.pipeline.data.pairs import (
    as_is,
    segments,
    strip_tags,
    tokens,
    without_carriage_returns,
    wmt_segments,
)
from pn_fairseq.pipeline.data.preparation import Preparation


def write(folder: Path, **contents: bytes) -> tuple[Path, Path]:
    for name, content in contents.items():
        (folder / f"text.{name}").write_bytes(content)
    return tuple(folder / f"text.{name}" for name in contents)


def take(reader: pairs.Reader, tmp_path: Path, de: bytes, en: bytes) -> tuple[list[str], list[str]]:
    outputs = tmp_path / "out/train.de", tmp_path / "out/train.en"
    count = pairs.take(reader, write(tmp_path, de=de, en=en), outputs)
    sides = [output.read_bytes().decode().removesuffix("\n").split("\n") for output in outputs]
    assert len(sides[0]) == len(sides[1]) == count
    return tuple(sides)


def test_text_as_it_is(tmp_path, capsys):
    assert take(as_is, tmp_path, b"a\r\n b \n", b"c\nd") == (["a\r", " b "], ["c", "d"])
    assert (tmp_path / "out/train.en").read_bytes() == b"c\nd", "byte for byte"
    assert capsys.readouterr().err == ""


def test_packed_text(tmp_path):
    (tmp_path / "x.de.gz").write_bytes(gzip.compress(b"eins\n"))
    assert list(pairs.as_is(tmp_path / "x.de")) == ["eins\n"]
    (tmp_path / "x.de.gz").write_bytes(gzip.compress(b"eins\n" * 999)[:-9])
    with pytest.raises(UserError, match="x.de.gz is damaged or cut off"):
        list(pairs.as_is(tmp_path / "x.de"))


def test_what_users_do_not_see_is_said_with_counts(tmp_path, capsys):
    """A byte order mark would be a token, which no model produces."""
    sides = take(as_is, tmp_path, b"\xef\xbb\xbfein Mann\n\nx\0y\n\n", b"a man\nb\nc\n\n")
    assert sides[0][0] == "ein Mann"
    notes = capsys.readouterr().err
    assert "text.de begins with a byte order mark, which is left out" in notes
    assert "2 of the 4 pairs of" in notes and "have an empty side" in notes
    assert "1 pairs of" in notes and "NUL characters, which the tokenizer removes" in notes


@pytest.mark.parametrize(
    ("reader", "de", "en", "needle"),
    [
        (as_is, b"a\nb\n", b"c\n", "text.de has 2 lines and .*text.en 1: they are not translations of each other"),
        (as_is, b"a\n", b"c\nd\n", "text.de has 1 lines and .*text.en 2"),
        (as_is, b"a\n", b"", "text.en: is empty"),
        (as_is, b"a\n\xff\n", b"c\nd\n", "text.de: line 2 is not UTF-8"),
        (as_is, b"a\nb\rc\n", b"c\nd\n", "text.de: line 2 has a carriage return in the middle"),
        (tokens, b"a\n" + b"b" * (1 << 20) + b"\n", b"c\nd\n", "text.de: line 2 has more than 1048576 bytes"),
        (segments, b"a\n", b"b\n", "text.de: is empty, or no text that can be read here .segments"),
        (segments, b'<seg id="1">a</seg>\n<seg id="2">b\n', b"c\nd\n", "text.de: line 2 is not of the form <seg"),
    ],
)
def test_text_that_cannot_be_used(reader, de, en, needle, tmp_path):
    with pytest.raises(UserError, match=needle):
        take(reader, tmp_path, de, en)


def test_messages_name_archive_and_member(tmp_path):
    """Not the place to which the member is extracted for a moment."""
    folder = tmp_path / "unpacked/de-en.tgz/de-en"
    folder.mkdir(parents=True)
    (folder / "train.tags.de-en.de").write_bytes(b"\xff\n")
    with pytest.raises(UserError, match=r"^de-en.tgz/de-en/train.tags.de-en.de: line 1 is not UTF-8"):
        list(pairs.strip_tags(folder / "train.tags.de-en.de"))


@pytest.mark.parametrize(
    ("reader", "text", "expected"),
    [
        (without_carriage_returns, b"a\rb\r\nc\n", ["ab", "c"]),  # as normalize-punctuation.perl
        (tokens, "a\u00a0b  c\u2028d\n\n".encode(), ["a b c d", ""]),
        (strip_tags, b"<url>x</url>\n<title>T &amp; U</title>\n  a\rb \n<speaker>S</speaker>\n", None),
        (segments, b'<doc>\n<seg id="1"> a\rb </seg>\n<seg id="2"></seg>\n</doc>\n', ["a b", ""]),
        (wmt_segments, '<seg id="1">\u00a0a\r</seg>\n<seg id="2">b</seg>\n'.encode(), ["\u00a0a", "b"]),
    ],
)
def test_kinds_of_published_text(reader, text, expected, tmp_path):
    expected = expected or ["T &amp; U", "a b", "<speaker>S</speaker>"]
    assert take(reader, tmp_path, text, text) == (expected, expected)


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


def test_a_literal_mark_of_sentencepiece_is_said(tmp_path, capsys):
    (tmp_path / "tok").mkdir()
    for name, line in (("train.de", "eins ▁ zwei"), ("train.en", "one two"), ("valid.de", "a"), ("valid.en", "b")):
        (tmp_path / "tok" / name).write_text(f"{line}\n" * 9)
    data = Preparation(tmp_path, workers=1)
    data.open("")
    data.settings = settings.check({"source": "de", "target": "en", "segmentation": "sentencepiece", "bpe": 14})
    data.segment()
    data.close()
    notes = capsys.readouterr().err
    assert "9 lines of" in notes and "tok/train.de have U+2581 (▁), which sentencepiece takes for a blank" in notes


def test_pairs_are_removed_by_their_subwords(tmp_path):
    """And DEST/bpe gets the codes, too."""
    lines = {"raw": ("a b", "ab"), "tok": ("a b", "ab"), "bpe": ("a b", "a@@ b")}
    for folder, pair in lines.items():
        (tmp_path / "in" / folder).mkdir(parents=True)
        for split in ("train", "valid", "test"):
            for lang, line in zip(("de", "en"), pair, strict=True):
                (tmp_path / f"in/{folder}/{split}.{lang}").write_text(f"{line}\nx y z\n")
    (tmp_path / "in/bpe/train.en").write_text("a@@ b\nx\n")
    (tmp_path / "in/bpe/codes").write_text("codes")
    chosen = settings.check({"source": "de", "target": "en", "clean": "1 9 1.5", "clean_stage": "bpe"})
    pairs.select(tmp_path, chosen, {name: tmp_path / "in" / name for name in lines}, tmp_path / "partial")
    assert (tmp_path / "raw/train.de").read_text() == "a b\n" and (tmp_path / "bpe/codes").read_text() == "codes"
    assert (tmp_path / "removed.tsv").read_text().splitlines()[1] == "train\t2\tratio\t3\t1"
    assert (tmp_path / "counts.txt").read_text().splitlines() == [
        *("train.read=2", "train.removed=1", "train.removed.ratio=1", "valid.read=2", "test.read=2"),
        *("train=1", "valid=2", "test=2"),
    ]


def test_files_of_different_lengths_are_not_selected(tmp_path):
    for folder, count in (("text", 5), ("tok", 4)):
        (tmp_path / folder).mkdir()
        for name in ("train.de", "train.en", "test.de", "test.en"):
            (tmp_path / folder / name).write_text("a\n" * count)
    chosen = settings.check({"source": "de", "target": "en", "valid_every": 2})
    folders = {"raw": tmp_path / "text", "tok": tmp_path / "tok"}
    with pytest.raises(UserError, match="different numbers of lines after line 4"):
        pairs.select(tmp_path, chosen, folders, tmp_path / "partial")
    assert not (tmp_path / "counts.txt").exists()
