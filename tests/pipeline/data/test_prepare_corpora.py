"""``pn prepare`` of wmt14, iwslt15_envi and multi30k on small stand-ins in the layout of the
originals.

What comes out is compared with a second, simple reading of the same files.
"""

import gzip
import hashlib
import html
import io
import lzma
import re
from pathlib import Path

import pytest
from sacremoses import MosesDetokenizer, MosesPunctNormalizer, MosesTokenizer
from subword_nmt.apply_bpe import BPE
from subword_nmt.learn_bpe import learn_bpe

from pn_fairseq.common.files import read_settings

from ...fixtures.corpora import ARCHIVES, TEST_SET, lines, verses, wmt14_members, write_archives
from ...fixtures.translations import text_file
from ...scripts_helpers import assert_refused, in_process

KEPT = {"raw", "tok", "bpe", "bin", "settings.txt", "counts.txt"}


def state(folder: Path) -> dict[str, tuple[str, int]]:
    """Contents and times of what a preparation leaves."""
    found = {}
    for path in folder.rglob("*"):
        part = path.relative_to(folder).parts[0]
        if path.is_file() and path.suffix != ".log" and part in KEPT:
            digest = hashlib.sha256(path.read_bytes()).hexdigest()
            found[str(path.relative_to(folder))] = digest, path.stat().st_mtime_ns
    return found


def assert_settings(folder: Path, **expected: str) -> None:
    assert expected.items() <= read_settings(folder / "settings.txt").items()


def tokens_with_final_stop(tokenizer: MosesTokenizer, text: str, **options) -> str:
    """As Moses since November 2018."""
    line = tokenizer.tokenize(text, return_str=True, **options)
    return re.sub(r"([^\s.])\.$", r"\1 .", line)


def without_spaces(path: Path) -> list[str]:
    return [line.replace(" ", "") for line in lines(path)]


def assert_not_begun(folder: Path):
    """After a refusal no step has left anything that a later run would take for its own."""
    left = {path.name for path in folder.iterdir()} if folder.exists() else set()
    assert left <= {"download"}, left


def assert_joined_and_binarized(
    folder: Path, source: str, target: str, joined: bool = True, **counts: int
):
    """With one dictionary for both languages, or a dictionary of the subwords of each."""
    words, used = {}, {}
    for lang in (source, target):
        dictionary = lines(folder / f"bin/dict.{lang}.txt")
        words[lang] = {word.split()[0] for word in dictionary if not word.startswith("madeupword")}
        used[lang] = set((folder / f"bpe/train.{lang}").read_text("utf-8").split())
    if joined:
        used[source] = used[target] = used[source] | used[target]
    assert words == used
    assert (words[source] == words[target]) is joined
    for split, count in counts.items():
        for lang in (source, target):
            assert len(lines(folder / f"raw/{split}.{lang}")) == count
            subwords = lines(folder / f"bpe/{split}.{lang}")
            tokens = lines(folder / f"tok/{split}.{lang}")
            assert [line.replace("@@ ", "") for line in subwords] == tokens
            index = (folder / f"bin/{split}.{source}-{target}.{lang}.idx").read_bytes()
            assert int.from_bytes(index[18:26], "little") == count


# WMT14


@pytest.fixture(scope="module")
def wmt14(tmp_path_factory) -> Path:
    """Prepared where something like a kill -9 has left files."""
    base = tmp_path_factory.mktemp("wmt14 of 2,014")
    archives = write_archives(base / "my archives", wmt14_members())
    dest = base / "data"
    for left in (
        "partial/unpacked/x.tgz/x.en",
        "partial/text/train.en",
        "stages/tok/test.en.partial",
    ):
        (dest / left).parent.mkdir(parents=True, exist_ok=True)
        (dest / left).write_text("half a li")
    words = ("--dest", dest, "--archive", archives, "--bpe", 150, "--workers", 2)
    in_process("prepare", "wmt14", *words)
    assert {path.name for path in dest.iterdir()} <= KEPT | {"text", "removed.tsv"}
    return dest


def wmt14_reading() -> dict[str, list[tuple[str, str, str, str]]]:
    """Split -> (English, German, English tokens, German tokens) by the recipe, one line at a
    time.
    """
    tokenizers = {lang: MosesTokenizer(lang) for lang in ("en", "de")}
    normalizers = {lang: MosesPunctNormalizer(lang, perl_parity=True) for lang in ("en", "de")}

    def tokens(lang: str, text: str, normalize: bool) -> str:
        if normalize:
            text = normalizers[lang].normalize(text + "\n")
            # remove-non-printing-char.perl: Unicode's category "other" (control, format, ...).
            text = re.sub("[\x00-\x1f\x7f-\x9f\u00ad\u200b-\u200f\u2028-\u202e\ufeff]", " ", text)
        else:
            text = text.replace("’", "'")
        return tokens_with_final_stop(tokenizers[lang], text, aggressive_dash_splits=True)

    def read(text: str) -> list[str]:
        # normalize-punctuation.perl deletes them
        return text.replace("\r", "").removesuffix("\n").split("\n")

    reading = {"train": [], "valid": [], "test": []}
    members = wmt14_members()
    for archive, prefix in ARCHIVES.items():
        split = "valid" if archive == "dev.tgz" else "train"
        sides = [read(members[archive][f"{prefix}{lang}"]) for lang in ("en", "de")]
        for english, german in zip(*sides, strict=True):
            pair = tokens("en", english, True), tokens("de", german, True)
            least, most = sorted(len(side.split()) for side in pair)
            if split == "valid" or (1 <= least and most <= 250 and most <= 1.5 * least):
                reading[split].append((english, german, *pair))
    for english, german in TEST_SET:
        pair = english.strip(), german.strip()
        tokenized = tokens("en", pair[0], False), tokens("de", pair[1], False)
        reading["test"].append((*pair, *tokenized))
    return reading


@pytest.mark.ci
def test_wmt14_against_a_simple_reading(wmt14):
    reading = wmt14_reading()
    columns = [("raw", "en"), ("raw", "de"), ("tok", "en"), ("tok", "de")]
    for split, pairs in reading.items():
        for (folder, lang), expected in zip(columns, zip(*pairs, strict=True), strict=True):
            file = wmt14 / folder / f"{split}.{lang}"
            assert lines(file) == list(expected), file
    counts = {split: len(pairs) for split, pairs in reading.items()}
    assert_joined_and_binarized(wmt14, "en", "de", **counts)
    languages = {"source": "en", "target": "de"}
    assert_settings(wmt14, **languages, lower="0", bpe="150", aggressive="1", compound_split="1")


def test_wmt14_again(wmt14):
    before = state(wmt14)
    for archives in (wmt14.parent / "my archives", wmt14.parent):  # the latter has none
        done = in_process(
            "prepare", "wmt14", "--dest", wmt14, "--archive", archives, "--bpe", 150, check=False
        )
        assert done.returncode == 0 and "is complete" in done.stderr
    assert state(wmt14) == before


def test_wmt14_test_set_from_elsewhere_is_refused(wmt14, tmp_path):
    """A file of the same name, in a mirror; the other archives are taken as they are."""
    words = ("--dest", tmp_path, "--mirror", wmt14.parent / "my archives")
    result = in_process("prepare", "wmt14", *words, check=False)
    assert_refused(result, "test-full.tgz", "its md5 is", "a8cd784e006feb32ac6f3d9ec7eb389a")
    assert_not_begun(tmp_path)
    # what is wrong is removed
    assert {path.name for path in (tmp_path / "download").iterdir()} == set(ARCHIVES)


# IWSLT15 English-Vietnamese

SENTENCES = [
    ("I &apos;d like to &quot; talk &quot; .", "Tôi &apos; muốn &quot; nói &quot; ."),
    ("Headlines of R &amp; D , 5 &#91; five &#93; .", "Tiêu đề R &amp; D , 5 &#91; năm &#93; ."),
    ("a\u00a0b  c", "a\u00a0b  c"),
    ("", "trống"),
]


def iwslt15_files() -> dict[str, str]:
    files = {}
    for skip, (name, count) in enumerate((("train", 60), ("tst2012", 5), ("tst2013", 7))):
        sides = verses("en", count, 60 * skip), verses("es", count, 60 * skip)
        odd = zip(*(SENTENCES if name == "train" else SENTENCES[:2]), strict=True)
        for lang, side, more in zip(("en", "vi"), sides, odd, strict=True):
            tokens = [MosesTokenizer(lang).tokenize(line, return_str=True) for line in side]
            files[f"{name}.{lang}"] = "\n".join([*more, *tokens]) + "\n"
    return files


def write_files(folder: Path, files: dict[str, str]) -> Path:
    folder.mkdir(parents=True)
    for name, text in files.items():
        (folder / name).write_bytes(text.encode())
    return folder


@pytest.mark.slow
def test_iwslt15_against_a_simple_reading(tmp_path):
    files, data = iwslt15_files(), tmp_path / "data"
    flags = ("--dest", data, "--archive", write_files(tmp_path / "archives", files), "--bpe", 150)
    said = in_process("prepare", "iwslt15_envi", *flags).stderr
    assert "train has 64 sentence pairs here; the published one has 133317" in said
    names = {"train": "train", "valid": "tst2012", "test": "tst2013"}
    for lang in ("en", "vi"):
        detokenize = MosesDetokenizer(lang).detokenize
        for split, name in names.items():
            given = files[f"{name}.{lang}"].removesuffix("\n").split("\n")
            assert lines(data / f"tok/{split}.{lang}") == [" ".join(line.split()) for line in given]
            raw = data / f"raw/{split}.{lang}"
            plain = [html.unescape(line).replace("@-@", "-") for line in given]
            assert without_spaces(raw) == [re.sub("[ \xa0]", "", line) for line in plain]
            simple = [detokenize(line.split()) for line in given if not set(line) & set("“”‘’")]
            assert set(simple) <= set(lines(raw))
    first, second = lines(data / "raw/train.en")[:2]
    assert first == 'I\'d like to "talk".'
    assert second == "Headlines of R & D, 5 [five]."
    assert_joined_and_binarized(data, "en", "vi", joined=False, train=64, valid=7, test=9)
    assert_settings(data, source="en", target="vi", lower="0", bpe="150")


# Text that others have prepared


def given_text(
    folder: Path, marked: bool, counts=(("train", 200), ("valid", 5), ("test", 7))
) -> Path:
    """Verses in Moses' tokens, lower-cased, or in subwords of 60 merges; the codes of these; one
    file compressed.
    """
    tokenized = {}
    for lang in ("en", "es"):
        tokenize = MosesTokenizer(lang).tokenize
        tokenized[lang] = [tokenize(line, return_str=True).lower() for line in verses(lang, 212)]
    merges = io.StringIO()
    learn_bpe([line for side in tokenized.values() for line in side[:200]], merges, 60)
    segment = BPE(io.StringIO(merges.getvalue())).process_line if marked else str
    files, first = {"bpe-codes": merges.getvalue()}, 0
    for name, count in counts:
        for lang, text in tokenized.items():
            part = text[first : first + count]
            files[f"{name}.{lang}"] = "".join(f"{segment(line)}\n" for line in part)
        first += count
    write_files(folder, files)
    # found by its content
    (folder / "train.es").write_bytes(lzma.compress((folder / "train.es").read_bytes()))
    (folder / "bpe-codes.gz").write_bytes(gzip.compress((folder / "bpe-codes").read_bytes()))
    return folder


def given(dest: Path, corpus: Path, *options) -> tuple:
    flags = ("--source", "en", "--target", "es", "--tokenized", "--workers", 1)
    return ("prepare", "text", "--dest", dest, "--corpus", corpus, *flags, *options)


@pytest.mark.ci
@pytest.mark.parametrize(("kind", "folder"), [("subwords", "bpe"), ("tokens", "tok")])
def test_text_that_others_prepared_is_taken_as_it_is(kind, folder, tmp_path):
    corpus, dest = given_text(tmp_path / "given", kind == "subwords"), tmp_path / "data"
    said = in_process(*given(dest, corpus, "--codes", corpus / "bpe-codes.gz")).stderr
    assert f"the text comes in {kind}" in said and "learning" not in said
    assert_joined_and_binarized(dest, "en", "es", train=200, valid=5, test=7)
    for lang in ("en", "es"):
        file = f"valid.{lang}"
        assert lines(dest / folder / file) == lines(corpus / file)
        tokens = without_spaces(dest / "tok" / file)
        assert without_spaces(dest / "raw" / file) == [html.unescape(line) for line in tokens]
    assert (dest / "bpe/codes").read_bytes() == (corpus / "bpe-codes").read_bytes()
    assert_settings(dest, tokenizer="none", lower="1", bpe="60")
    before = state(dest)
    words = given(dest, corpus, "--codes", corpus / "bpe-codes")
    again = in_process(*words)
    assert "is complete" in again.stderr
    assert "the text comes in" not in again.stderr
    (corpus / "bpe-codes").write_text("#version: 0.2\n" + "e n\n" * 60)
    assert_refused(in_process(*words, check=False), str(dest), "other text")
    assert state(dest) == before


def test_given_text_that_does_not_fit(tmp_path):
    corpus, dest = given_text(tmp_path / "given", False), tmp_path / "data"
    codes = ("--codes", corpus / "bpe-codes", "--segmentation", "sentencepiece")
    for options, needle in (
        (("--codes", corpus / "valid.en"), "valid.en: line 1 is not a merge of subword-nmt"),
        (codes, "--codes has merges of subword-nmt"),
    ):
        assert_refused(in_process(*given(dest, corpus, *options), check=False), needle)
    (corpus / "valid.es").write_text("Dios\n" * 5)
    result = in_process(*given(dest, corpus), check=False)
    assert_refused(result, "valid.es: line 1 has upper case", "--keep-case")
    assert_not_begun(dest)


@pytest.mark.ci
def test_multi30k_as_published(tmp_path):
    """Two test sets; the counts, subwords and tokens of the published files are compared in
    docs/results.
    """
    counts = (("train", 190), ("valid", 5), ("test.2016", 7), ("test.2017", 10))
    corpus = given_text(tmp_path / "given", True, counts)
    for file in corpus.glob("*.es"):
        file.rename(file.with_suffix(".de"))
    flags = ("--dest", tmp_path / "data", "--corpus", corpus, "--workers", 1)
    said = in_process("prepare", "multi30k_published", *flags).stderr
    assert "test.2017 has" not in said and "test has 7 sentence pairs here" not in said
    assert_joined_and_binarized(tmp_path / "data", "en", "de", train=190, valid=5, test=7, test1=17)
    assert "190 train, 5 valid, 7 test, 17 test1" in said
    both = lines(corpus / "test.2016.de") + lines(corpus / "test.2017.de")
    assert lines(tmp_path / "data/bpe/test1.de") == both


# Multi30k


@pytest.fixture
def multi30k(tmp_path) -> Path:
    """A stand-in, one file of it packed."""
    folder = tmp_path / "my captions"
    folder.mkdir()
    counts = {"train": 60, "valid": 5, "test2016": 7, "test2017": 6}
    for name, count in counts.items():
        for lang, other in (("de", "es"), ("en", "en")):
            text_file(folder / f"{name}.{lang}", verses(other, count))
    train = folder / "train.de"
    (folder / "train.de.gz").write_bytes(gzip.compress(train.read_bytes()))
    train.unlink()
    return folder


@pytest.mark.slow
def test_multi30k_against_a_simple_reading(multi30k, tmp_path):
    dest = tmp_path / "data"
    words = ("prepare", "multi30k", "--dest", dest, "--corpus", multi30k, "--bpe", 150)
    result = in_process(*words, "--test", "test2017")
    assert "test2017 has 6 sentence pairs here; the published one has 1000" in result.stderr
    for lang, other in (("de", "es"), ("en", "en")):
        tokenizer = MosesTokenizer(lang)
        for split, count in (("train", 60), ("valid", 5), ("test", 6)):
            text = verses(other, count)
            assert lines(dest / f"raw/{split}.{lang}") == text
            tokens = [tokens_with_final_stop(tokenizer, line).lower() for line in text]
            assert lines(dest / f"tok/{split}.{lang}") == tokens
    assert_joined_and_binarized(dest, "de", "en", train=60, valid=5, test=6)
    assert_settings(dest, source="de", target="en", lower="1", bpe="150")
    before = state(dest)
    assert "is complete" in in_process(*words, "--test", "test2017").stderr
    assert_refused(in_process(*words, check=False), str(dest), "other text")
    assert state(dest) == before


def test_multi30k_without_a_test_set(multi30k, tmp_path):
    words = ("--dest", tmp_path / "data", "--corpus", multi30k, "--test", "test2018")
    assert_refused(in_process("prepare", "multi30k", *words, check=False), "test2018.de")
    assert_not_begun(tmp_path / "data")
