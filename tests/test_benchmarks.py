"""The benchmarks run, and write what they print; what they measure is not for a test to say."""

import csv
import logging

import pytest
import torch

from benchmarks import ALLOCATOR, decoding, training
from benchmarks.results import ratios, spread
from pn_fairseq.norms import NORMS

SHORT = [entry.short for entry in NORMS.values()]


@pytest.fixture(autouse=True)
def _in_this_process(monkeypatch):
    """Not started anew for the sake of the allocator, and logging as it was."""
    for name, value in ALLOCATOR.items():
        monkeypatch.setenv(name, value)
    threads, disabled = torch.get_num_threads(), logging.root.manager.disable
    yield
    torch.set_num_threads(threads)
    logging.disable(disabled)


def read(path):
    with open(path, newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def test_ratios_are_of_the_same_round():
    assert ratios([2.0, 40.0, 6.0], [1.0, 20.0, 3.0]) == (2.0, 2.0, 2.0)
    assert spread([4.0, 1.0, 2.0, 3.0, 5.0]) == (2.0, 3.0, 4.0)
    assert spread([7.0]) == (7.0, 7.0, 7.0)


def test_decoding(tmp_path, capsys):
    flags = (
        "--size tiny --rounds 2 --sentences 3 --source-length 5 --target-length 4 --beam 2 --vocabulary 50 --threads 1"
    )
    decoding.main([*flags.split(), "--threads", "1", "--output", str(tmp_path / "decoding.csv")])
    rows = read(tmp_path / "decoding.csv")
    assert [row["norm"] for row in rows] == [
        "ln",
        "bn",
        "bn folded",
        "pnv",
        "pnv folded",
        "pn",
        "pn folded",
        "ln again",
    ]
    printed = capsys.readouterr()
    for row in rows:
        assert float(row["sentences_per_s"]) > 0 and float(row["times_low"]) <= float(row["times_high"])
        assert row["torch"] == torch.__version__ and row["cores"] and row["date"]
        assert f"{row['norm']:12} " in printed.out
    assert printed.err.count("maximum logit difference") == 3
    assert rows[0]["times_ln"] == "1"


def test_training(tmp_path, capsys):
    flags = "--size tiny --rounds 2 --tokens 24 --length 6 --vocabulary 50 --threads 1 --no-memory"
    training.main([*flags.split(), "--output", str(tmp_path / "training.csv")])
    rows = read(tmp_path / "training.csv")
    assert [row["norm"] for row in rows] == SHORT
    printed = capsys.readouterr().out
    for row in rows:
        assert float(row["tokens_per_s"]) > 0 and row["memory_mb"] == ""
        assert f"{row['norm']:6} " in printed
    assert rows[0]["times_ln"] == "1"


@pytest.mark.slow
def test_memory_of_training_is_that_of_the_model_at_least():
    flags = "--size tiny --tokens 24 --length 6 --vocabulary 20000 --threads 1".split()
    # Embeddings, their gradient and Adam's two averages, 20,000 x 128 float32 each.
    assert 4 * 20000 * 128 * 4 < training.memory_on_cpu("ln", flags) < 1e9
