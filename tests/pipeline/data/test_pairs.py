import gzip
import lzma
import tempfile
from pathlib import Path

import pytest

from pn_fairseq.common.command import UserError
from pn_fairseq.pipeline.data import pairs
from pn_fairseq.pipeline.data.pairs import (
    as_is,
    segments,
    strip_tags,
    tokens,
    without_carriage_returns,
)
from pn_fairseq.pipeline.data.preparation import Preparation
from pn_fairseq.pipeline.data.recipes.wmt14 import sacrebleus_segments
from pn_fairseq.pipeline.data.settings import Settings


def write(folder: Path, **contents: bytes) -> tuple[Path, Path]:
    for name, content in contents.items():
        (folder / f"text.{name}").write_bytes(content)
    return tuple(folder / f"text.{name}" for name in contents)


def take(reader: pairs.Reader, tmp_path: Path, de: bytes, en: bytes) -> tuple[list[str], list[str]]:
    with tempfile.TemporaryDirectory() as folder:
        data = Preparation(Path(folder), Settings(source="de", target="en"))
        data.take(reader, "train", write(tmp_path, de=de, en=en))
        texts = [
            (data.partial / f"text/train.{lang}").read_bytes().decode() for lang in ("de", "en")
        ]
    assert all(text.endswith("\n") for text in texts)
    return tuple(text.removesuffix("\n").split("\n") for text in texts)


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
    assert (
        capsys.readouterr().err
        == f"[prepare] note: {tmp_path / 'z.de'} is used, and not z.de.xz beside it\n"
    )
    with pytest.raises(UserError, match=r"there is no .*/y.de, plain or compressed \(.gz, .xz\)"):
        list(pairs.as_is(tmp_path / "y.de"))


def test_what_users_do_not_see_is_said_with_counts(tmp_path, capsys):
    """A byte order mark would be a token, which no model produces."""
    sides = take(as_is, tmp_path, b"\xef\xbb\xbfein Mann\n\nx\n\n", b"a man\nb\nc\n\n")
    assert sides[0][0] == "ein Mann"
    notes = capsys.readouterr().err
    assert "text.de begins with a byte order mark, which is left out" in notes
    assert (
        "2 of the 4 lines of" in notes
        and "1 of the 4 lines of" in notes
        and "text.en are empty" in notes
    )


@pytest.mark.parametrize(
    ("reader", "de", "en", "needle"),
    [
        (
            as_is,
            b"a\nb\n",
            b"c\n",
            "text.de has 2 lines and .*text.en 1: they are not translations of each other",
        ),
        (as_is, b"a\n", b"c\nd\n", "text.de has 1 line and .*text.en 2"),
        (as_is, b"a\n", b"", "text.en is empty"),
        (as_is, b"a\n\xff\n", b"c\nd\n", "text.de: line 2 is not UTF-8"),
        (as_is, b"a\nb\rc\n", b"c\nd\n", "text.de: line 2 has a carriage return in the middle"),
        (segments, b"a\n", b"b\n", "text.de is empty, or no text that can be read here"),
        (
            segments,
            b'<seg id="1">a</seg>\n<seg id="2">b\n',
            b"c\nd\n",
            "text.de: line 2 is not of the form <seg",
        ),
    ],
)
def test_text_that_cannot_be_used(reader, de, en, needle, tmp_path):
    with pytest.raises(UserError, match=needle):
        take(reader, tmp_path, de, en)


@pytest.mark.parametrize(
    ("reader", "text", "expected"),
    [
        (without_carriage_returns, b"a\rb\r\nc\n", ["ab", "c"]),  # as normalize-punctuation.perl
        (tokens, "a\u00a0b  c\u2028d\n\n".encode(), ["a b c d", ""]),
        (
            strip_tags,
            b"<url>x</url>\n<title>T &amp; U</title>\n  a\rb \n<speaker>S</speaker>\n",
            None,
        ),
        (segments, b'<doc>\n<seg id="1"> a\rb </seg>\n<seg id="2"></seg>\n</doc>\n', ["a b", ""]),
        (
            sacrebleus_segments,
            '<seg id="1">\u00a0a\r</seg>\n<seg id="2">b</seg>\n'.encode(),
            ["\u00a0a", "b"],
        ),
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


def test_removed_pairs_and_counts(tmp_path):
    """Lengths are numbers of tokens. Only training pairs are removed."""
    for folder in ("text", "stages/tok"):
        (tmp_path / folder).mkdir(parents=True)
        for split in ("train", "valid", "test"):
            for lang, lines in (("de", "a b\nx y z\n"), ("en", "c d\nx\n")):
                text = lines if folder == "stages/tok" else lines.replace(" ", "")
                (tmp_path / f"{folder}/{split}.{lang}").write_text(text)
    Preparation(tmp_path, Settings(source="de", target="en", clean=(1, 9, 1.5))).select()
    assert (tmp_path / "raw/train.de").read_text() == "ab\n" and (
        tmp_path / "tok/train.en"
    ).read_text() == "c d\n"
    assert (tmp_path / "raw/test.de").read_text() == "ab\nxyz\n"
    assert (tmp_path / "removed.tsv").read_text().splitlines() == [
        "split\tline\treason\ttokens de\ttokens en",
        "train\t2\tratio\t3\t1",
    ]
    counts = [
        "train.read=2",
        "train.removed=1",
        "train.removed.ratio=1",
        "train=1",
        "valid=2",
        "test=2",
    ]
    assert (tmp_path / "counts.txt").read_text().splitlines() == counts


def test_a_split_without_a_pair(tmp_path):
    for folder in ("text", "stages/tok"):
        (tmp_path / folder).mkdir(parents=True)
        for name in ("train.de", "train.en", "test.de", "test.en"):
            (tmp_path / folder / name).write_text("a\n" * 5)
    with pytest.raises(
        UserError,
        match="no sentence pair of valid is left .*train.read=5.*train=5, valid=0, test=5",
    ):
        Preparation(
            tmp_path, Settings(source="de", target="en", clean=(1, 9, 1.5), valid_every=6)
        ).select()
    assert not (tmp_path / "counts.txt").exists()
