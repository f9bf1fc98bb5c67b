import argparse

import pytest
import torch

from pn_fairseq.common.command import UserError
from pn_fairseq.pipeline.runs import open_run


def test_a_run_of_fairseq_train_without_a_log(tmp_path):
    model = argparse.Namespace(_name="transformer_pn_tiny", arch="transformer_pn_tiny", dropout=0.1, seed=3, data="x")
    cfg = {
        "_name": None,
        "common": {"seed": 3},
        "task": {"_name": "translation", "data": f"{tmp_path}/bin:y"},
        "model": model,
    }
    torch.save({"model": {"w": torch.ones(1)}, "cfg": cfg}, tmp_path / "checkpoint_last.pt")
    (tmp_path / "bin").mkdir()
    run = open_run(tmp_path)
    assert not run.ours and run.checkpoints == tmp_path and run.bin == tmp_path / "bin" and run.data is None
    assert run.log is None and run.get("common.seed") == 3
    assert run.settings_by_name["model.dropout"] == 0.1 and "model.seed" not in run.settings_by_name
    assert run.get("model._name") == "transformer_pn_tiny"


@pytest.mark.parametrize(("text", "reason"), [("", "holds no settings"), ("a: [1", "cannot be read as settings")])
def test_a_damaged_config(text, reason, tmp_path):
    (tmp_path / "config.yaml").write_text(text)
    with pytest.raises(UserError, match=f"config.yaml {reason}"):
        open_run(tmp_path)


def test_a_folder_that_is_not_a_run(tmp_path):
    with pytest.raises(UserError, match="is not a training run"):
        open_run(tmp_path)
