import argparse

import pytest
import torch

from pn_fairseq.report.runs import Run, read_runs

MADE = "averaged.pt is the average of 3, not of average_last=10 checkpoints"


@pytest.mark.parametrize(
    ("made", "wanted", "listed"),
    [("update 3", 10, True), ("update 10", 10, False), ("update 3", None, False), (None, 10, False), ("", 10, False)],
)
def test_an_average_of_fewer_checkpoints_than_asked_for_is_a_problem(made, wanted, listed, tmp_path):
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "generate/test").mkdir(parents=True)
    (tmp_path / "generate/test/hyp.tok").write_text("a\n")
    (tmp_path / "config.yaml").write_text("{}" if wanted is None else f"average_last: {wanted}\n")
    if made is not None:
        (tmp_path / "checkpoints/averaged.pt.made.txt").write_text(f"averaged={made}\n")
    assert (MADE in Run(tmp_path, "run").problems) == listed


def checkpoint(file, update, train, valid, **settings):
    """As fairseq-train saves it: settings, with a Namespace of all flags as the model, and the sums of its meters."""
    model = argparse.Namespace(arch="transformer_pn_tiny", _name="transformer_pn_tiny", seed=3, dropout=0.3)
    cfg = {"common": {"seed": 3}, "task": {"_name": "translation", "data": "/nowhere"}, "model": model} | settings
    cfg["optimization"] = {"max_update": 40}
    metrics = {
        group: [(0, name, "AverageMeter", {"sum": torch.tensor(loss * 50.0), "count": torch.tensor(50), "round": 3})
                for name, loss in (("loss", nll + 1), ("nll_loss", nll))]
        for group, nll in (("train", train), ("valid", valid))
    }  # fmt: skip
    state = {"cfg": cfg, "model": {"w": torch.zeros(1)}, "optimizer_history": [{"num_updates": update}]}
    torch.save(state | {"extra_state": {"metrics": metrics}}, file)


def test_a_folder_of_fairseq_train_without_a_log(tmp_path):
    """Settings and losses are read from the checkpoints, and the report says so; also if the log is not JSON."""
    for name, update in (("checkpoint1.pt", 20), ("checkpoint_last.pt", 40), ("checkpoint_best.pt", 40)):
        checkpoint(tmp_path / name, update, 8 - update / 20, 7 - update / 20)
    checkpoint(tmp_path / "averaged.pt", 0, 1, 1)  # no checkpoint of the training
    for text in (None, "num. shared model params: 5\nepoch 001:  10 / 20 loss=3, num_updates=10\n"):
        if text:
            (tmp_path / "saved.txt").write_text(text)
        (run,) = read_runs([tmp_path])
        assert run.log.train_nll == {20: 7.0, 40: 6.0} and run.log.train == {20: 8.0, 40: 7.0}
        assert run.log.valid == {20: 6.0, 40: 5.0} and run.seed == 3
        assert run.get("model.dropout") == 0.3 and run.get("model._name") == "transformer_pn_tiny"
        assert any("no log in JSON: settings and losses are from 3 checkpoints" in each for each in run.problems)
        assert not any("not finished" in each for each in run.problems)
