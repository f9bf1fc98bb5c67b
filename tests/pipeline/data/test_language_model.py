import gzip
import hashlib
import zipfile

import pytest
from fairseq.data.indexed_dataset import MMapIndexedDataset
from numpy import memmap

from pn_fairseq.common.command import UserError
from pn_fairseq.common.files import read_settings
from pn_fairseq.pipeline.data.folder import DataFolder
from pn_fairseq.pipeline.data.recipes import enwik8
from pn_fairseq.pipeline.data.recipes.verses_lm import BOOKS, split_by_book

from ...fixtures.corpora import lines
from ...scripts_helpers import ROOT, assert_refused, in_process

TEXTS = {
    "train": "The cat sat. \nThe  dog <unk> sat .\n\n" + "a dog\n" * 5,
    "valid": "The bird sat\n",
    "test": "a cat\na <unk> bird\n",
}


def write(folder, texts=TEXTS, pattern="{}.txt"):
    folder.mkdir(exist_ok=True)
    for split, text in texts.items():
        (folder / pattern.format(split)).write_text(text)
    return folder


def prepare(corpus, dest, *options):
    flags = ("--corpus", corpus, "--dest", dest, "--workers", 1)
    in_process("prepare", "text_lm", *flags, *options)


def verses(kind, split):
    return gzip.open(ROOT / f"data/verses.es-en/{split}.{kind}.gz", "rt").read().split("\n")[:-1]


def test_verses_are_split_by_book_in_the_order_of_the_text(tmp_path):
    split_by_book(ROOT / "data/verses.es-en", tmp_path / "texts")
    found = {split: lines(tmp_path / f"texts/{split}.txt") for split in ("train", *BOOKS)}
    of_book = {}
    for split in ("train", "valid", "test"):
        for reference, verse in zip(verses("refs", split), verses("en", split), strict=True):
            book, _, place = reference.rpartition(" ")
            chapter, number = place.split(":")
            of_book.setdefault(book, []).append((int(chapter), int(number), verse))
    for split, books in BOOKS.items():
        expected = []
        for book in books:
            expected += [verse for *_, verse in sorted(of_book.pop(book))]
        assert found[split] == expected
    # the others
    assert sum(map(len, found.values())) == 30_170 and len(of_book) == 52
    assert found["train"][0].startswith("In the beginning")
    assert len(found["train"]) == sum(map(len, of_book.values()))


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    folder = tmp_path_factory.mktemp("lm")
    prepare(write(folder / "texts"), folder / "data", "--lower", "--min-count", 2)
    return folder


def test_text_becomes_words_and_numbers(prepared):
    data = prepared / "data"
    expected = "the cat sat.\nthe dog <unk> sat .\n\n" + "a dog\n" * 5
    assert (data / "tok/train.txt").read_text() == expected
    words = {line.split()[0] for line in lines(data / "bin/dict.txt")}
    assert {"the", "dog", "a"} <= words
    counts = read_settings(data / "counts.txt")
    assert [counts[split] for split in ("train", "valid", "test")] == ["26", "4", "7"]
    assert MMapIndexedDataset(str(data / "bin/train")).sizes.tolist() == [4, 6, 1, 3, 3, 3, 3, 3]
    assert counts["train.lines"] == "8" and counts["vocabulary"] == "3"
    assert float(counts["test.unk_percent"]) == pytest.approx(100 * 2 / 7, abs=0.1)  # cat, bird
    settings = read_settings(data / "settings.txt")
    assert settings["min_count"] == "2"
    assert settings["train.txt"] == hashlib.sha256(TEXTS["train"].encode()).hexdigest()


def test_a_second_preparation_is_the_same_or_refused(prepared, tmp_path):
    words = ("prepare", "text_lm", "--dest", prepared / "data", "--workers", 1, "--corpus")
    own, same = (*words, prepared / "texts"), ("--lower", "--min-count", 2)
    before = (prepared / "data/bin/train.bin").stat().st_mtime_ns
    for check in ((), ("--check",)):
        again = in_process(*own, *same, *check)
        assert not check or again.stderr == ""
        # a configuration that is named after no other corpus
        advice = f"next: pn train own_text_lm --data {prepared / 'data'}\n"
        assert (advice in again.stderr) == (not check)
    binary = prepared / "data/bin/train.bin"
    assert binary.stat().st_mtime_ns == before
    content = binary.read_bytes()
    binary.write_bytes(content[:-2])
    assert "bytes instead of" in in_process(*own, *same).stderr
    assert binary.read_bytes() == content
    assert_refused(in_process(*own, "--lower", check=False), "min_count=2, not 1")
    assert_refused(in_process(*own, "--check", check=False), "lower=1, not 0")
    for text, needle in (("b\n", "other text"), ("", "test.txt is empty")):
        other = write(tmp_path / "texts", {**TEXTS, "test": text})
        assert_refused(in_process(*words, other, *same, check=False), needle)


def test_tokenizer(tmp_path):
    prepare(write(tmp_path / "texts"), tmp_path / "data", "--tokenize", "en")
    assert (tmp_path / "data/tok/valid.txt").read_text() == "The bird sat\n"
    assert (tmp_path / "data/tok/train.txt").read_text().startswith("The cat sat .\n")


def test_bytes(tmp_path):
    """Every byte and end of a line is a token, even where the bytes are no text."""
    texts = {"train": bytes(range(256)) * 2, "valid": "é\n\n".encode(), "test": b"\xff\r\nab"}
    for split, text in texts.items():
        (tmp_path / f"{split}.txt").write_bytes(text)
    data = tmp_path / "data"
    flags = ("--corpus", tmp_path, "--dest", data, "--unit", "byte", "--lower")
    refused = in_process("prepare", "text_lm", *flags, check=False)
    assert_refused(refused, "--unit byte takes the text as it is")
    prepare(tmp_path, data, "--unit", "byte")
    assert (data / "tok/valid.txt").read_text() == "c3 a9\n\n"
    assert (data / "tok/test.txt").read_text() == "ff 0d\n61 62\n"
    # fairseq's four symbols, of which the data has the end of a line
    symbols = ["", "", "0a", ""]
    symbols += [line.split()[0] for line in lines(data / "bin/dict.txt")]
    for split, text in texts.items():
        numbers = memmap(data / f"bin/{split}.bin", "uint16", "r")
        back = bytes.fromhex("".join(symbols[number] for number in numbers))
        assert back == text.removesuffix(b"\n") + b"\n", split
    counts = read_settings(data / "counts.txt")
    assert (counts["train"], counts["vocabulary"]) == ("513", "255")
    assert counts["test.unk_percent"] == "0.0"
    assert read_settings(data / "settings.txt")["unit"] == "byte"


def test_enwik8_is_cut_by_numbers_of_bytes(tmp_path, monkeypatch):
    monkeypatch.setattr(enwik8, "SIZES", (300, 150, 62))
    monkeypatch.setattr(enwik8, "SHA256", "")
    splits = []
    monkeypatch.setattr(enwik8.language_model, "prepare", lambda data, texts: splits.extend(texts))
    plan = DataFolder(tmp_path / "data", enwik8.settings(None), archive=tmp_path)
    assert plan.settings.unit == "byte"
    text = bytes(range(256)) * 2

    def prepare(content: bytes) -> None:
        with zipfile.ZipFile(tmp_path / "enwik8.zip", "w") as file:
            file.writestr("enwik8", content)
        enwik8.prepare(plan, None)

    prepare(text)
    assert b"".join(path.read_bytes() for path in splits) == text
    with pytest.raises(UserError, match="it has 511 bytes, and enwik8 has 512"):
        prepare(text[1:])
    assert [path.stat().st_size for path in splits] == [300, 150, 62]


def test_text_that_is_not_the_published_one_is_refused(tmp_path):
    corpus = write(tmp_path / "ptb", pattern="ptb.{}.txt")
    words = ("--corpus", corpus, "--dest", tmp_path / "data", "--workers", 1)
    result = in_process("prepare", "ptb", *words, check=False)
    assert_refused(result, "not PTB", "26 / 4 / 7", "929,589 / 73,760 / 82,430")
    assert not (tmp_path / "data/bin").exists()


def test_wikitext_archive_is_checked(tmp_path):
    with zipfile.ZipFile(tmp_path / "wikitext-103-v1.zip", "w") as file:
        for split, text in TEXTS.items():
            file.writestr(f"wikitext-103/wiki.{split}.tokens", text)
    words = ("prepare", "wikitext103", "--dest", tmp_path / "data", "--workers", 1)
    counts = "not WikiText-103", "26 / 4 / 7", "103,227,021 / 217,646 / 245,569"
    for source, needles in (
        (("--archive", tmp_path), counts),
        (("--archive", tmp_path / "x"), ("smerity.com",)),
        (("--mirror", tmp_path), ("sha256", "242ba0f20b32")),
    ):
        assert_refused(in_process(*words, *source, check=False), *needles)
