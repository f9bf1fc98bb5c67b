"""Recipes and their options, and what a preparation says where another one works in the same
folder.
"""

import fcntl
import re
import shutil
import textwrap
import threading
from pathlib import Path

import pytest
from sentencepiece import SentencePieceProcessor

from pn_fairseq.pipeline.data import languages, pairs, subwords, tokens
from pn_fairseq.pipeline.data.binarize import SPLITS
from pn_fairseq.pipeline.data.folder import DataFolder, locked
from pn_fairseq.pipeline.data.recipes import RECIPES
from pn_fairseq.pipeline.data.settings import Settings, read
from pn_fairseq.pipeline.data.suspicious import notes_on
from pn_fairseq.pipeline.runs import Run
from pn_fairseq.pipeline.translate import to_subwords

from ...fixtures.corpora import lines
from ...scripts_helpers import ROOT, assert_refused, cut_corpus, files_of, in_process, verb


@pytest.fixture
def corpus(tmp_path):
    return cut_corpus(tmp_path / "corpus", 9, 3, 3)


LANGUAGES = ("--source", "es", "--target", "en", "--bpe", 150)


def prepare(corpus: Path, dest: Path, *options) -> str:
    """What it says."""
    words = ("--corpus", corpus, "--dest", dest, "--workers", 1, *options)
    return in_process("prepare", "text", *words).stderr


def assert_not_prepared(corpus: Path, needle: str, *options) -> None:
    places = ("--corpus", corpus, "--dest", corpus.parent / "data", "--workers", 1)
    assert_refused(
        in_process("prepare", "text", *LANGUAGES, *places, *options, check=False), needle
    )


def test_every_corpus_has_its_configuration():
    for recipe in RECIPES.values():
        assert not recipe.CONFIG or (ROOT / f"configs/{recipe.CONFIG}.yaml").is_file()


@pytest.mark.parametrize("kind", subwords.MODELS)
def test_tags_that_survive(kind, corpus, tmp_path):
    """In front of a word, inside a line and alone, through tokens, subwords, and the text to
    translate.
    """
    for file in corpus.glob("*.e?"):
        text = file.read_text("utf-8").splitlines()
        file.write_text("".join(f"<2en>{line} [BT] <b>\n" for line in text), "utf-8")
    tags, data, folder = (tmp_path / name for name in ("tags", "data", "run"))
    tags.write_text("<2\\w\\w>\n\n\\[BT\\]\n")
    prepare(corpus, data, *LANGUAGES, "--segmentation", kind, "--protect", tags)
    for part, mark in (("tok", ""), ("bpe", "\u2581" if kind == "sentencepiece" else "")):
        for line in lines(data / part / "test.es"):
            words = line.split(" ")
            assert words[0] == f"{mark}<2en>" and f"{mark}[BT]" in words
            assert not any("<b" in word for word in words)
    segment = subwords.segmenter(kind, data / "bpe" / subwords.MODELS[kind])
    assert segment("<2en>") not in ("<2en>", "\u2581<2en>"), "it is no subword by itself"
    folder.mkdir()
    (folder / "data").write_text(f"{data}\n")
    (folder / "config.yaml").write_text("task: {}\n")
    (source,) = to_subwords(Run(folder), ["<2en>Hola [BT]"], None)
    assert source.split()[0].endswith("<2en>") and source.split()[-1].endswith("[BT]")


TOKENIZER = "while (<STDIN>) { s/([.,:;!?])/ $1/g; print; }"
LOWERCASE = (
    'use utf8; binmode(STDIN, ":utf8"); binmode(STDOUT, ":utf8"); while (<STDIN>) { print lc($_); }'
)


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("perl"), reason="Moses' scripts need perl")
def test_moses_scripts_and_sentencepiece(corpus, tmp_path):
    """Scripts in the place of Moses' that do something easy to say; all the rest of the way with
    sentencepiece.
    """
    moses, data = tmp_path / "moses decoder", tmp_path / "data"
    options = (*LANGUAGES, "--moses", moses, "--segmentation", "sentencepiece")
    for name, code in (("tokenizer", TOKENIZER), ("lower", LOWERCASE)):
        missing = f"--moses {moses} is not a checkout of mosesdecoder: {tokens.SCRIPTS[name]}"
        assert_not_prepared(corpus, missing, *options)
        assert not data.exists()
        file = moses / tokens.SCRIPTS[name]
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(code)
    prepare(corpus, data, *options)
    assert (data / "settings.txt").read_text().count("tokenizer=moses\n") == 1
    model = SentencePieceProcessor(model_file=str(data / "bpe/sentencepiece.model"))
    assert model.vocab_size() == 150
    for name in ("train.es", "valid.en", "test.es"):
        raw, tok, bpe = (lines(data / folder / name) for folder in ("raw", "tok", "bpe"))
        assert tok == [re.sub(r"([.,:;!?])", r" \1", line).lower() for line in raw]
        # As fairseq joins the pieces with --remove-bpe=sentencepiece.
        assert [line.replace(" ", "").replace("▁", " ").strip() for line in bpe] == tok
    shutil.rmtree(data)
    tokenizer = moses / tokens.SCRIPTS["tokenizer"]
    tokenizer.write_text('die "the tokenizer is out of order\\n";')
    failed = f"{tokenizer} failed: the tokenizer is out of order"
    assert_not_prepared(corpus, failed, *options)
    assert not list((data / "tok").iterdir())


def test_text_for_a_model_of_other_data(corpus, tmp_path):
    """Its codes, dictionary and settings; characters that it lacks are counted.

    A folder may have any name.
    """
    old, new = tmp_path / "my josé (1), a=b 'x'", tmp_path / "new"
    assert "merges, fewer than --bpe 10,000" in prepare(corpus, old, *LANGUAGES[:4], "--keep-case")
    for name in ("train", "valid", "test"):
        (corpus / f"{name}.es").write_text("Hola Ω, mundo\n" * 3)
        (corpus / f"{name}.en").write_text("Hello\n" * 3)
    said = prepare(corpus, new, "--like", old)
    assert re.search(r"note: \d[\d.]+% of the subwords of train.es are not in the dictionary", said)
    assert "learning" not in said
    weights = "checkpoint.finetune_from_model=RUN/checkpoints/averaged.pt"
    assert f"next: pn train own_text --data {new} --run NEW-RUN {weights}\n" in said
    for name in ("bin/dict.es.txt", "bpe/codes"):
        assert (new / name).read_bytes() == (old / name).read_bytes()
    assert read(new / "settings.txt") == read(old / "settings.txt")
    assert (new / "tok/test.es").read_text("utf-8").startswith("Hola Ω , mundo\n")
    assert "is complete" in prepare(corpus, new, "--like", old)
    words = ("prepare", "text", "--corpus", corpus, "--dest", tmp_path / "third", "--like")
    pieces = (old, "--segmentation", "sentencepiece")
    for options, needle in (
        ((old, "--target", "de"), "has target=en, not de"),
        ((old / "bin",), "is inside of prepared data"),
        (pieces, "has segmentation=subword-nmt, not sentencepiece"),
        ((old, "--moses", old), "has tokenizer=sacremoses+final-stop, not moses"),
    ):
        assert_refused(in_process(*words, *options, check=False), needle)
        assert not (tmp_path / "third").exists()


def test_the_same_text_on_both_sides_is_said(tmp_path, capsys):
    (tmp_path / "partial/text").mkdir(parents=True)
    texts = {"train": "uno\ndos\ntres\n", "valid": "uno\ndos\nthree\n", "test": "uno\ntwo\nthree\n"}
    for split, english in texts.items():
        (tmp_path / f"partial/text/{split}.es").write_text("uno\ndos\ntres\n")
        (tmp_path / f"partial/text/{split}.en").write_text(english)
    DataFolder(tmp_path, Settings(source="es", target="en"))._note_on_text()
    said = capsys.readouterr().err.splitlines()
    same = "are the same on both sides"
    assert said == [
        f"[prepare] note: 3 of the 3 pairs of train.es and train.en {same}",
        f"[prepare] note: 2 of the 3 pairs of valid.es and valid.en {same}",
        "[prepare] note: 2 of 3 pairs of valid are in train: its loss is that of training text",
        "[prepare] note: 1 of 3 pairs of test are in train: its BLEU is that of training text",
    ]


def texts_of(folder: Path) -> dict[str, list[Path]]:
    """Split -> its files in both languages."""
    return {split: [folder / f"{split}.es", folder / f"{split}.en"] for split in SPLITS}


def swap(folder: Path, split: str) -> None:
    """Give the files of the two languages each other's names."""
    source, target = folder / f"{split}.es", folder / f"{split}.en"
    source.rename(folder / "other")
    target.rename(source)
    (folder / "other").rename(target)


@pytest.mark.parametrize(
    ("swapped", "named"),
    [
        ((), ""),
        (("train",), "train"),
        (("valid", "test"), "train"),
        (("valid",), "valid"),
        (("test",), "test"),
        (("train", "valid", "test"), ""),
    ],
)
def test_swapped_sides_of_a_split_are_said(swapped, named, tmp_path):
    corpus = cut_corpus(tmp_path, 400, 40, 40)
    for split in swapped:
        swap(corpus, split)
    notes = list(notes_on(texts_of(corpus), SPLITS))
    assert [note.partition(" seem")[0] for note in notes] == (
        [f"the two languages of {named}"] if named else []
    )


def test_sides_that_share_their_words_are_not_swapped(tmp_path):
    """Sides in one language, and sets of few words."""
    corpus = cut_corpus(tmp_path, 400, 40, 40)
    english = {split: [corpus / f"{split}.en"] * 2 for split in SPLITS}
    assert not any("swapped" in note for note in notes_on(english, SPLITS))
    small = cut_corpus(tmp_path / "small", 400, 3, 3)
    swap(small, "train")
    assert not list(notes_on(texts_of(small), SPLITS))


def test_sentences_of_other_splits_in_train_are_counted(tmp_path):
    corpus = cut_corpus(tmp_path, 400, 40, 40)
    copy_split(corpus, "train", "test")
    texts = texts_of(corpus)
    for lang in ("es", "en"):
        text = (corpus / f"train.{lang}").read_text("utf-8").splitlines()
        valid = corpus / f"valid.{lang}"
        # 2 of 42 are less than 5%, 3 of 43 are more; empty pairs do not count
        valid.write_text("\n".join([valid.read_text("utf-8"), *text[:2], "", "", ""]), "utf-8")
    of_test = "400 of 400 pairs of test are in train: its BLEU is that of training text"
    assert list(notes_on(texts, SPLITS)) == [of_test]
    for lang in ("es", "en"):
        with (corpus / f"valid.{lang}").open("a", encoding="utf-8") as file:
            file.write((corpus / f"train.{lang}").read_text("utf-8").splitlines()[7] + "\n")
    of_valid = "3 of 43 pairs of valid are in train: its loss is that of training text"
    assert list(notes_on(texts, SPLITS)) == [of_valid, of_test]
    # language models: short lines recur in any text
    lines_of = {split: [corpus / f"{split}.txt"] for split in SPLITS}
    heading = "= = = A heading = = =\n"
    one, other = (f"no one has ever said anything that sounds like {w}\n" for w in ("a", "b"))
    lines_of["train"][0].write_text(f"{heading}\n{one}")
    lines_of["valid"][0].write_text(f"{heading}\n{other}")
    lines_of["test"][0].write_text(f"{one}{other}")
    (note,) = notes_on(lines_of, SPLITS)
    assert note.startswith("1 of 2 lines of at least 10 words of test are in train: its perplexity")


def set_of(data: Path, name: str) -> dict[str, bytes]:
    """The contents of the files of a set, by what is beside its name in theirs."""
    found = {}
    for folder in ("raw", "tok", "bpe", "bin"):
        for path in (data / folder).glob(f"{name}.*"):
            found[folder + path.name.removeprefix(name)] = path.read_bytes()
    assert len(found) == 10 and all(found.values())
    return found


def copy_split(folder: Path, split: str, to: str) -> None:
    for lang in ("es", "en"):
        shutil.copy(folder / f"{split}.{lang}", folder / f"{to}.{lang}")


@pytest.mark.ci
@pytest.mark.parametrize("tokenized", [pytest.param(False, marks=pytest.mark.slow), True])
def test_further_test_sets(tokenized, corpus, tmp_path):
    """test1 with the rest, and test2017 afterwards: as the same text is prepared under the name
    test.
    """
    data, alike = tmp_path / "data", tmp_path / "alike"
    if tokenized:
        for file in corpus.iterdir():
            file.write_text(file.read_text("utf-8").lower().replace(".", " ."), "utf-8")
    copy_split(corpus, "valid", "test1")
    copy_split(corpus, "train", "test2017")
    said = prepare(corpus, data, *LANGUAGES, *(["--tokenized"] if tokenized else []))
    command = f"pn prepare text --corpus {corpus} --dest {data} --test test2017"
    assert f"note: {corpus}/test2017.* is left out; to add it afterwards: {command}\n" in said
    assert "9 train, 3 valid, 3 test, 3 test1" in said
    assert set_of(data, "test1") == set_of(data, "valid")
    before = (data / "settings.txt").read_bytes()
    said = prepare(corpus, data, "--test", "test2017")
    assert "note: 9 of 9 pairs of test2017 are in train" in said
    assert "has the test set test2017: 9 pairs" in said
    assert "next: pn generate --run RUN --subset test2017" in said
    assert (data / "settings.txt").read_bytes() == before, "runs on this data stay valid"
    for lang in ("es", "en"):
        (corpus / f"odd.{lang}").write_text("ωωω\n", "utf-8")
    said = prepare(corpus, data, "--test", "odd")
    assert f"of the subwords of odd.es are not in the dictionary of {data}\n" in said
    for odd in corpus.glob("odd.*"):
        odd.unlink()
    copy_split(corpus, "train", "test")
    prepare(corpus, alike, "--like", data)
    assert set_of(data, "test2017") == set_of(alike, "test")
    assert not (data / "partial").exists()
    words = ("prepare", "text", "--corpus", corpus, "--dest", data, "--test")
    assert "already exists" in in_process(*words, "test2017").stderr
    copy_split(corpus, "valid", "test2017")
    for options, needle in (
        (("test2017",), "has another text as test2017"),
        (("test1",), "has a test1 since it was prepared"),
        (("valid",), "other than train, valid, test"),
        (("../x",), "other than train, valid, test"),
        (("none",), "there is no"),
        (("new", "--keep-case"), "leave out --keep-case"),
        (("new", "--source", "de"), "has source=es, not de (--test)"),
        (("new", "--like", alike), "leave out --like"),
        (("new", "--dest", tmp_path / "nowhere"), "is not prepared data"),
    ):
        assert_refused(in_process(*words, *options, check=False), needle)
    (corpus / "test3.es").touch()
    shutil.rmtree(data)
    assert_not_prepared(corpus, "has test3, but no test2: number them from 1")


def test_damaged_binary_data_is_made_again(corpus, tmp_path):
    """To the same bytes, as pn train asks for it."""
    data, words = tmp_path / "data", ("--test", "extra")
    copy_split(corpus, "valid", "extra")
    prepare(corpus, data, *LANGUAGES)
    prepare(corpus, data, *words)
    before = files_of(data / "bin")
    source = data / "bin/train.es-en.es.bin"
    for damage, needle in (
        (lambda: (data / "bin/valid.es-en.en.bin").unlink(), "bin has no valid.es-en.en; making"),
        (lambda: source.write_bytes(source.read_bytes()[:-30]), "bytes instead of"),
        (lambda: (data / "bin/dict.en.txt").unlink(), "only 0 subwords; making"),
        (lambda: (data / "bin/test.es-en.en.idx").write_bytes(b"MMIDIDX"), "is cut off or damaged"),
    ):
        damage()
        said = prepare(corpus, data, *LANGUAGES)
        assert needle in said and "already exists" not in said and "is complete" in said
        assert "note: add the test set extra again" in said
        assert "bin has no extra.es-en.es; making it again" in prepare(corpus, data, *words)
        made = files_of(data / "bin")
        assert made.keys() == before.keys()
        for name, content in before.items():
            assert name == "preprocess.log" or made[name] == content, name
    assert "bin already exists" in prepare(corpus, data, *LANGUAGES)
    (data / "bin/extra.es-en.es.bin").write_bytes(b"")
    assert "bytes instead of" in prepare(corpus, data, *words)
    assert (data / "bin/extra.es-en.es.bin").read_bytes() == before["extra.es-en.es.bin"]


def test_a_test_set_that_was_added_to_the_text_is_named(corpus):
    prepare(corpus, corpus.parent / "data", *LANGUAGES)
    copy_split(corpus, "valid", "test1")
    needle = "was made without test1.es: add this test set with --test test1"
    assert_not_prepared(corpus, needle)


def test_languages_whose_scores_need_a_package(corpus, monkeypatch):
    def without_mecab(name):
        return None if "MeCab" in name else name

    monkeypatch.setattr(languages.importlib.util, "find_spec", without_mecab)
    words = (*LANGUAGES, "--target", "jpn_Jpan", "--corpus", corpus)  # whose files do not exist
    words = ("prepare", "text", *words, "--dest", corpus.parent / "data")
    said = in_process(*words, check=False).stderr
    assert "detokenized BLEU of jpn_Jpan needs: pip install 'sacrebleu[ja]'" in said


@pytest.mark.parametrize(
    ("text", "needle"),
    [
        (
            "El Mu\u0308ller dijo .\n",
            "note: detokenization does not join words of 3 of 3 lines of valid.es again",
        ),
        ("El Mu\u0308ller dijo .\n", "normalize it to NFC first"),
        ("\u0e07\u0e48\u0e32\u0e22\n", "give it in tokens of another tokenizer (--tokenized)"),
        ("\u0645\u0627\u061f\n", "does not join the punctuation of 3 of 3 lines of valid.es"),
        ("\u0645\u0627\u061f\n" + "uno\n" * 19, ""),  # 5% of the lines
        ('(uno), "dos"; tres!\n', ""),
    ],
)
def test_what_detokenization_does_not_restore_is_said(text, needle, tmp_path, capsys):
    (tmp_path / "raw").mkdir()
    for lang, content in (("es", text * 3), ("en", "It\u2019s mine.\n")):
        (tmp_path / f"raw/valid.{lang}").write_text(content, "utf-8")
    DataFolder(tmp_path, Settings(source="es", target="en"), splits=["valid"]).tokenize(
        "raw", "tok"
    )
    said = capsys.readouterr().err
    assert needle in said and ("note:" in said) is bool(needle)


def test_text_that_is_tokenized_already_is_said(tmp_path, capsys):
    (tmp_path / "in").write_text("it &apos;s mine .\nand\n")
    pairs.append(pairs.as_is, tmp_path / "in", tmp_path / "out")
    said = capsys.readouterr().err
    assert "note: 1 of the 2 lines of" in said and "--tokenized" in said
    pairs.append(pairs.own_tokens, tmp_path / "in", tmp_path / "out")
    assert not capsys.readouterr().err


def test_an_error_leaves_nothing(corpus):
    """Nor does it take anything away."""
    (corpus / "test.es").write_text("")
    assert_not_prepared(corpus, "test.es is empty")
    assert not (corpus.parent / "data").exists()
    (corpus.parent / "data").mkdir()
    (corpus.parent / "data/mine").touch()
    assert_not_prepared(corpus, "test.es is empty")
    assert [path.name for path in (corpus.parent / "data").iterdir()] == ["mine"]


@pytest.mark.ci
def test_the_recipe_of_the_page_in_a_file_of_ones_own(tmp_path, monkeypatch):
    """With its data in runs/data, as those of the package."""
    monkeypatch.chdir(tmp_path)
    page = (ROOT / "docs/adding_a_corpus.md").read_text("utf-8")
    code = re.search(r"```python\n(.*?)```", page, re.S)[1]
    recipe = textwrap.dedent(code).replace('source="fr"', 'source="es"')
    (tmp_path / "my_corpus.py").write_text(recipe)
    words = ("my_corpus.py", "--corpus", cut_corpus(tmp_path / "text", 9, 3, 3), "--bpe", 150)
    said = in_process("prepare", *words).stderr
    assert "train has 9 sentence pairs here; the published one has 12000" in said
    assert (tmp_path / "runs/data/my_corpus/bin/dict.en.txt").is_file()
    # the second place: its configuration, beside the recipe
    shutil.copy(ROOT / "configs/verses_es_en.yaml", "my_corpus.yaml")
    assert verb("train")(["my_corpus.yaml", "--check"]) == 0
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir("elsewhere")
    chosen = ("--norms", "ln", "--seeds", 2, "--dry-run")
    result = in_process("reproduce", "../my_corpus.py", *words[1:], *chosen, check=False)
    del RECIPES["my_corpus"]
    assert result.returncode == 0, result.stderr
    prepares, trains, *_, reports = result.stdout.splitlines()
    options = f"--dest runs/data/my_corpus --corpus {tmp_path}/text --bpe 150"
    assert prepares == f"pn prepare {tmp_path}/my_corpus.py {options}"
    where = "--data runs/data/my_corpus --run runs/my_corpus/ln_seed2"
    settings = "model._name=transformer_ln_tiny common.seed=2"
    assert trains == f"pn train {tmp_path}/my_corpus.yaml {where} {settings}"
    assert reports == "pn report runs/my_corpus/ln_seed2 --output runs/my_corpus/report"


def test_a_recipe_that_says_nothing_of_an_experiment(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    recipe = (ROOT / "pn_fairseq/pipeline/data/recipes/verses.py").read_text("utf-8")
    Path("silent.py").write_text(recipe.replace("REPRODUCE =", "_ ="), "utf-8")
    result = in_process("reproduce", "silent.py", "--dry-run", check=False)
    del RECIPES["silent"]
    assert_refused(result, "error: silent.py has no REPRODUCE")


def test_a_memory_that_is_too_small_is_one_line(corpus, monkeypatch):
    def too_much(*args):
        raise MemoryError

    monkeypatch.setattr(tokens, "per_line", lambda function: too_much)
    assert_not_prepared(corpus, "not enough memory; use fewer processes")
    assert not list((corpus.parent / "data/tok").iterdir())


def test_a_second_preparation_waits(tmp_path, capsys):
    first, second = locked(tmp_path), locked(tmp_path)
    first.__enter__()
    thread = threading.Thread(target=second.__enter__)
    thread.start()
    thread.join(0.3)
    assert thread.is_alive()
    first.__exit__(None, None, None)
    thread.join()
    assert f"another process prepares {tmp_path}; waiting for it to end" in capsys.readouterr().err
    with (tmp_path / ".lock").open() as lock, pytest.raises(BlockingIOError):
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    second.__exit__(None, None, None)
