"""examples/sentiment.py on sentences made here."""

import csv
import random

import pytest
import torch

from pn_fairseq.norms import DetachNorm

from .programs import load, refused

sentiment = load("sentiment")


@pytest.fixture
def rt(tmp_path):
    r"""RT's size, with a word that tells the sides apart, and \x85, which str.splitlines takes
    for a line's end.
    """
    rng = random.Random(1)
    for side, word in (("pos", "good"), ("neg", "bad")):
        text = ""
        for _ in range(5331):
            others = rng.choices("abcdefgh\x85", k=rng.randint(1, 9))
            text += " ".join([word, *others]) + "\n"
        (tmp_path / f"rt-polarity.{side}").write_text(text, "latin-1")
    return tmp_path


@pytest.fixture
def sst5(tmp_path):
    for name, size in (("train", 40), ("dev", 10), ("test", 12)):
        lines = [f"{k % 5} word{k % 5} x y\n" for k in range(size)]
        (tmp_path / f"stsa.fine.{name}").write_text("".join(lines))
    return tmp_path


def test_rt_is_split_as_in_the_paper_and_no_sentence_is_lost(rt):
    parts = sentiment.read("rt", rt)
    assert len(parts["training"]) == 8608 + 1
    assert len(parts["validation"]) == 964
    assert len(parts["test"]) == 1089
    labels = []
    for examples in parts.values():
        labels += [label for _, label in examples]
    assert labels.count(0) == 5331
    assert labels.count(1) == 5331
    for words, label in parts["test"]:
        assert ("good" in words) == (label == 1)
    assert parts == sentiment.read("rt", rt)


def test_batches_have_every_sentence_once_and_at_most_4096_tokens():
    examples = [([str(k)] * (1 + k % 300), k) for k in range(500)]
    vocabulary = {str(k): k + 2 for k in range(500)}
    for shuffle in (None, random.Random(1)):
        seen = []
        for ids, labels in sentiment.batches(examples, vocabulary, shuffle):
            assert ids.numel() <= 4096
            for row, label in zip(ids, labels.tolist(), strict=True):
                tokens = row[row != sentiment.PAD]
                assert tokens.tolist() == [label + 2] * (1 + label % 300)
                seen.append(label)
        assert sorted(seen) == list(range(500))


def test_weights_of_attention_are_kaiming_uniform():
    """Between -1/sqrt(C) and 1/sqrt(C), as torch.nn.Linear draws them: the paper's footnote 6."""
    attention = sentiment.Classifier(20, 2, "layer").layers[0].attention
    for weight in (attention.in_proj_weight, attention.out_proj.weight):
        assert 0.99 < weight.abs().max() * sentiment.CHANNELS**0.5 <= 1


@pytest.mark.parametrize("norm", ["layer", "batch", "power"])
def test_padding_changes_no_logits(norm, monkeypatch):
    torch.manual_seed(1)
    model = sentiment.Classifier(20, 2, norm).double()
    ids = torch.randint(2, 20, (3, 7))
    ids[1, 4:] = ids[2, 2:] = sentiment.PAD
    wider = torch.nn.functional.pad(ids, (0, 5), value=sentiment.PAD)
    monkeypatch.setattr(sentiment, "DROPOUT", 0.0)
    for layer in model.layers:
        layer.attention.dropout = layer.ffn[2].p = 0.0
    for training in (True, False):  # in training also no statistics of the batch
        model.train(training)
        torch.testing.assert_close(model(ids), model(wider), rtol=1e-6, atol=1e-9)


def test_each_model_is_a_row_that_a_second_run_does_not_repeat(sst5, tmp_path, monkeypatch, capsys):
    options = f"--task sst5 --norms layer ada --epochs 2 --output {tmp_path / 'runs'}"
    arguments = [str(sst5), *options.split(), "--seeds"]
    sentiment.main([*arguments, "1"])
    assert "40 training, 10 validation, 12 test" in capsys.readouterr().err
    table = tmp_path / "runs/sentiment.csv"
    first = list(csv.DictReader(table.open()))
    assert [row["norm"] for row in first] == ["layer", "ada"]
    for row in first:
        assert row["task"] == "sst5"
        assert row["seed"] == "1"
        assert 0 <= float(row["test accuracy"]) <= 100
    assert (tmp_path / "runs/sentiment.png").stat().st_size > 1000
    trained = []

    def train(*given):
        trained.append(given[-1])
        return {"best epoch": 1, "test accuracy": 50}

    monkeypatch.setattr(sentiment, "train", train)
    sentiment.main([*arguments, "1", "2"])
    assert trained == ["sst5 layer seed 2", "sst5 ada seed 2"]
    assert list(csv.DictReader(table.open()))[:2] == first


@pytest.mark.slow
def test_it_learns_a_word_that_decides(rt):
    parts = sentiment.read("rt", rt)
    for part, size in {"training": 200, "validation": 50, "test": 50}.items():
        parts[part] = parts[part][:size]
    result = sentiment.train(parts, 2, "power", 1, 14, "")
    assert result["test accuracy"] > 95


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("{0}/new", "rt-polarity.neg"),
        ("{0} --task sst5 --epochs 0", "--epochs must be at least 1"),
        ("{0} --task sst5 --output {0}/stsa.fine.dev", "File exists"),
    ],
)
def test_mistakes_are_one_line(arguments, message, sst5, capsys):
    before = set(sst5.iterdir())
    error = refused(sentiment, capsys, *arguments.format(sst5).split())
    assert set(sst5.iterdir()) == before
    assert error.startswith("sentiment: error: ")
    assert message in error


def test_the_parts_of_detachnorm():
    """AdaNorm's Table 3."""
    model = sentiment.Classifier(9, 2, "detach-mean")
    norms = [module for module in model.modules() if isinstance(module, DetachNorm)]
    assert {norm.detach for norm in norms} == {("mean",)}
