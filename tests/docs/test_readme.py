"""README.md: what it says is true, and its commands run."""

import re

import torch
from torch import nn

from pn_fairseq.norms import norm_report

from .pages import ROOT, blocks

PATH = ROOT / "README.md"
README = PATH.read_text("utf-8")


def test_fits_on_a_few_screens():
    """The first of them shows a picture, the snippet and the demo."""
    assert len(README.splitlines()) <= 110
    first = "\n".join(README.splitlines()[:24])
    assert "![" in first and "convert_norms(" in first and "make demo" in first


def test_named_files_exist():
    named = set(re.findall(r"(?<![\w/])((?:scripts|configs|data|benchmarks|docs|examples)/[\w./-]+\w)", README))
    named |= set(re.findall(r"\]\((?!http)([^)#]+)\)", README))
    assert len(named) > 15
    assert [path for path in sorted(named) if not (ROOT / path).exists()] == []


def test_the_repository_names_no_path_outside_itself():
    assert not re.search(r"(?<![\w.])(/home|/root|/tmp)/", README)


def test_python_runs():
    """The content of padding changes no real token with the converted norm, and does with BatchNorm1d."""

    class Transposed(nn.BatchNorm1d):
        def forward(self, x):
            return super().forward(x.transpose(1, 2)).transpose(1, 2)

    torch.manual_seed(1)
    x, lengths = torch.randn(3, 7, 8), torch.tensor([7, 4, 2])
    mask = torch.arange(7) >= lengths[:, None]
    (block,) = blocks(PATH, "python")
    assert block in (ROOT / "docs/index.md").read_text("utf-8")
    found = []
    for content in (0.0, 100.0):
        model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8))
        model[0].load_state_dict({"weight": torch.eye(8), "bias": torch.zeros(8)})
        names = {"model": model, "x": torch.where(mask[..., None], content, x), "lengths": lengths}
        exec(block, names)
        assert len(norm_report(names["model"])) == 1
        found.append(names["y"][~mask])
    torch.testing.assert_close(*found)
    one, other = (Transposed(8)(torch.where(mask[..., None], content, x))[~mask] for content in (0.0, 100.0))
    assert (one - other).abs().max() > 0.1
