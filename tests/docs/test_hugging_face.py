"""The code of docs/hugging_face.md runs, and padding changes nothing."""

import pytest
import torch

from pn_fairseq.norms import norm_report

from ..norms.test_convert_models import hugging_face
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
    outputs = [
        each(input_ids=names["tokens"].masked_fill(mask == 0, content), attention_mask=mask).logits[mask == 1]
        for each, content in ((model, 7), (again, 9))
    ]
    torch.testing.assert_close(*outputs, rtol=1e-4, atol=1e-4)
    with pytest.raises(AssertionError):
        torch.testing.assert_close(
            outputs[0], names["BertForMaskedLM"](names["config"])(input_ids=names["tokens"]).logits[mask == 1]
        )
