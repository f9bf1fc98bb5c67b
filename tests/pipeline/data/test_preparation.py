"""What a preparation says where the machine is too small, and while another one works in the same folder."""

import errno
import fcntl
import threading

import pytest

from pn_fairseq.common.command import UserError
from pn_fairseq.pipeline.data import prepare, settings, tokens
from pn_fairseq.pipeline.data.preparation import Preparation
from pn_fairseq.pipeline.data.recipes import RECIPES

from ...scripts_helpers import ROOT, cut_corpus


@pytest.fixture
def corpus(tmp_path):
    return cut_corpus(tmp_path / "corpus", 9, 3, 3)


def run(corpus, *options: str) -> int:
    flags = ("--corpus", corpus, "--source", "es", "--target", "en", "--dest", corpus.parent / "data", *options)
    return prepare.main(["text", *map(str, flags), "--workers", "1"])


def test_every_corpus_has_its_wrapper_and_its_options_are_arguments():
    wrappers = {path.stem.removeprefix("prepare_") for path in (ROOT / "scripts").glob("prepare_*.sh")}
    assert wrappers == RECIPES.keys()
    for name, recipe in RECIPES.items():
        text = (ROOT / f"scripts/prepare_{name}.sh").read_text()
        assert text.endswith(f'/pn" prepare {name} "$@"\n') and len(text.splitlines()) == 3
        arguments = recipe.prepare.__code__.co_varnames[1 : recipe.prepare.__code__.co_argcount]
        assert {flag[2:].replace("-", "_") for flag in recipe.OPTIONS} == set(arguments)
        assert not recipe.CONFIG or (ROOT / f"configs/{recipe.CONFIG}.yaml").is_file()


@pytest.mark.parametrize(
    ("options", "kind", "needle"),
    [
        (("--bpe", "many"), "", "--bpe: must be a whole number of at least 1, not 'many'"),
        (("--target", "es"), "", "--source and --target are both 'es'"),
        ((), "unigram", "BPE must be subword-nmt or sentencepiece, not 'unigram'"),
    ],
)
def test_values_that_cannot_be_used(options, kind, needle, corpus, monkeypatch, capsys):
    monkeypatch.setenv("BPE", kind)
    assert run(corpus, *options) == 2
    assert needle in capsys.readouterr().err and not (corpus.parent / "data").exists()


@pytest.mark.parametrize("place", ["folder", "piece", "file", "text"])
def test_a_full_disk_is_one_line_that_names_the_file(place, corpus, monkeypatch, capsys):
    def full(*args, **options):
        raise OSError(errno.ENOSPC, "No space left on device")

    if place == "folder":
        monkeypatch.setattr("pathlib.Path.mkdir", full)
    elif place == "piece":
        monkeypatch.setattr("pathlib.Path.write_bytes", full)
    elif place == "file":
        monkeypatch.setattr("os.replace", full)
    else:
        monkeypatch.setattr("pn_fairseq.pipeline.data.pairs.lines", full)
    assert run(corpus) == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if not line.startswith("[")]
    assert line.startswith("pn prepare: error: ") and f"{corpus.parent}/data" in line and "No space left" in line
    if place != "folder":
        assert line.endswith("make room and run the same command again")
    assert not (corpus.parent / "data").exists() or not list((corpus.parent / "data").rglob("*.partial"))


def test_a_memory_that_is_too_small_is_one_line(corpus, monkeypatch, capsys):
    def too_much(*args):
        raise MemoryError

    monkeypatch.setattr(tokens, "per_line", lambda function: too_much)
    assert run(corpus) == 2
    assert "not enough memory; use fewer processes" in capsys.readouterr().err
    assert not list((corpus.parent / "data/tok").iterdir())


def test_a_second_preparation_waits(tmp_path, capsys):
    first, second = (Preparation(tmp_path, workers=1) for _ in range(2))
    first.open("")
    thread = threading.Thread(target=second.open, args=("",))
    thread.start()
    thread.join(0.3)
    assert thread.is_alive()
    first.close()
    thread.join()
    assert f"another process prepares {tmp_path}; waiting for it to end" in capsys.readouterr().err
    with (tmp_path / ".lock").open() as lock, pytest.raises(BlockingIOError):
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    second.close()


def test_moses_is_asked_for(tmp_path, monkeypatch):
    """Never a script below the current folder."""
    from pn_fairseq.pipeline.data.tokens import tokenizer

    script = tmp_path / "scripts/tokenizer/tokenizer.perl"
    script.parent.mkdir(parents=True)
    script.touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MOSES", raising=False)
    with pytest.raises(UserError, match="set MOSES to a checkout of mosesdecoder"):
        tokenizer({**settings.DEFAULTS, "tokenizer": "moses"}, "en")
    monkeypatch.setenv("MOSES", ".")
    assert tokenizer({**settings.DEFAULTS, "tokenizer": "moses"}, "en").__closure__
