"""The code of docs/hugging_face.md runs, and padding changes nothing."""

from types import SimpleNamespace

import pytest
import torch

from pn_fairseq.norms import norm_report, running_norms

from ..fixtures.hugging_face import hugging_face
from .pages import ROOT, blocks


def test_code_runs(tmp_path, monkeypatch, capsys):
    hugging_face()  # or skips
    monkeypatch.chdir(tmp_path)
    names: dict = {}
    for block in blocks(ROOT / "docs/hugging_face.md", "python"):
        exec(block, names)
    assert names["loss"].isfinite() and "attention_mask" in capsys.readouterr().out
    model, again, mask = (
        names[key].eval() if key != "attention_mask" else names[key] for key in ("model", "again", "attention_mask")
    )
    assert len(norm_report(again)) == len(norm_report(model)) >= 6
    assert names["with_mask"] < 1e-5 < 0.01 < names["without_mask"]
    for key, tensor in model.state_dict().items():
        torch.testing.assert_close(names["from_folder"].state_dict()[key], tensor)
    assert all(norm.running_mean.abs().max() > 0 for norm in running_norms(names["pretrained"]))
    names["CountUpdates"]().on_step_begin(None, SimpleNamespace(global_step=5), None, model=model)
    assert all(norm.completed_updates() == 5 for norm in running_norms(model))
    logs: dict = {}
    for _ in range(2):
        names["LogNorms"]().on_log(None, None, None, model=model.train(), logs=logs)
        for _ in range(2):  # the second forward takes in the step of the first
            model(input_ids=names["tokens"], attention_mask=mask).logits.sum().backward()
    model.eval()
    names["LogNorms"]().on_log(None, None, None, model=model, logs=logs)
    assert logs["bert.embeddings.LayerNorm/psi_distance"] > 0 == logs["bert.embeddings.LayerNorm/nonfinite_steps"]
    again.load_state_dict(model.state_dict())
    with pytest.raises(RuntimeError, match="running_mean"):
        names["BertForMaskedLM"](names["config"]).load_state_dict(model.state_dict())
    outputs = [
        each(input_ids=names["tokens"].masked_fill(mask == 0, content), attention_mask=mask).logits[mask == 1]
        for each, content in ((model, 7), (again, 9))
    ]
    torch.testing.assert_close(*outputs, rtol=1e-4, atol=1e-4)
    with pytest.raises(AssertionError):
        torch.testing.assert_close(
            outputs[0], names["BertForMaskedLM"](names["config"])(input_ids=names["tokens"]).logits[mask == 1]
        )
