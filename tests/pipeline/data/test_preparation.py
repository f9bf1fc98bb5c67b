"""Recipes and their options, and what a preparation says where another one works in the same folder."""

import fcntl
import threading

import pytest

from pn_fairseq.pipeline.data import tokens
from pn_fairseq.pipeline.data.preparation import Preparation
from pn_fairseq.pipeline.data.recipes import RECIPES

from ...scripts_helpers import ROOT, cut_corpus, verb


@pytest.fixture
def corpus(tmp_path):
    return cut_corpus(tmp_path / "corpus", 9, 3, 3)


def run(corpus, *options: str) -> int:
    flags = ("--corpus", corpus, "--source", "es", "--target", "en", "--dest", corpus.parent / "data", *options)
    return verb("prepare")(["text", *map(str, flags), "--workers", "1"])


def test_every_corpus_has_its_wrapper_and_its_options_are_arguments():
    wrappers = {path.stem.removeprefix("prepare_") for path in (ROOT / "scripts").glob("prepare_*.sh")}
    assert wrappers == RECIPES.keys()
    for name, recipe in RECIPES.items():
        text = (ROOT / f"scripts/prepare_{name}.sh").read_text()
        assert text.endswith(f'/pn" prepare {name} "$@"\n') and len(text.splitlines()) == 2
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


def test_a_recipe_with_an_unknown_setting(tmp_path):
    with pytest.raises(TypeError, match="there is no setting lowwer"):
        Preparation(tmp_path / "data", workers=1).begin("", source="de", target="en", lowwer=1)
    assert not (tmp_path / "data").exists()


def test_a_memory_that_is_too_small_is_one_line(corpus, monkeypatch, capsys):
    def too_much(*args):
        raise MemoryError

    monkeypatch.setattr(tokens, "per_line", lambda function: too_much)
    assert run(corpus) == 2
    assert "not enough memory; use fewer processes" in capsys.readouterr().err
    assert not list((corpus.parent / "data/tok").iterdir())


def test_a_second_preparation_waits(tmp_path, capsys):
    first, second = (Preparation(tmp_path, workers=1) for _ in range(2))
    first.open("", {})
    thread = threading.Thread(target=second.open, args=("", {}))
    thread.start()
    thread.join(0.3)
    assert thread.is_alive()
    first.close()
    thread.join()
    assert f"another process prepares {tmp_path}; waiting for it to end" in capsys.readouterr().err
    with (tmp_path / ".lock").open() as lock, pytest.raises(BlockingIOError):
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    second.close()
