"""Graphs of norms in evaluation that leave this process: a ``.pt2`` and TorchScript without this
package, and ONNX.
"""

import sys
import warnings

import pytest
import torch
from torch.export import Dim

from pn_fairseq.testing.helpers import cases

from ..scripts_helpers import run
from .helpers import CHANNELS, rng, tensors

#: Runs where pn_fairseq cannot be imported: file of the graph, of its inputs, and of the outputs to
#: write.
LOAD_AND_RUN = """
import sys
sys.modules["pn_fairseq"] = None
import torch
file, inputs, outputs = sys.argv[1:]
model = torch.export.load(file).module() if file.endswith(".pt2") else torch.jit.load(file)
torch.save(model(torch.load(inputs)), outputs)
"""


class Norms(torch.nn.Module):
    """The outputs of several norms for one input: a conversion takes seconds."""

    def __init__(self, names):
        super().__init__()
        self.names = [str(case) for case in cases(names)]
        self.norms = torch.nn.ModuleList(case.trained(4) for case in cases(names)).eval()

    def forward(self, x):
        return tuple(norm(x) for norm in self.norms)

    def compare(self, found, x):
        for name, actual, expected in zip(self.names, found, self(x), strict=True):
            torch.testing.assert_close(actual, expected, rtol=1e-5, atol=2e-6, msg=name)


@pytest.fixture(
    scope="module",
    params=[
        # The three operators that evaluation uses, and a norm with its own evaluation.
        pytest.param(["power", "prep-batch", "scale", "dyt"], id="some"),
        pytest.param(None, id="all", marks=pytest.mark.slow),
    ],
)
def norms(request):
    return Norms(request.param)


def other_shape():
    """An input of another shape than the one that the graph was made from."""
    return torch.randn(7, 2, CHANNELS, generator=torch.Generator().manual_seed(4))


def exported(norms):
    x, _, _ = tensors(rng(2))
    return torch.export.export(norms, (x,), dynamic_shapes={"x": {0: Dim.AUTO, 1: Dim.AUTO}})


@pytest.mark.slow
@pytest.mark.parametrize("kind", [pytest.param("pt2", marks=pytest.mark.ci), "torchscript"])
def test_a_saved_graph_needs_no_pn_fairseq(norms, tmp_path, kind):
    if kind == "pt2":
        torch.export.save(exported(norms), tmp_path / "graph.pt2")
    else:
        # the checks of arguments
        with warnings.catch_warnings(action="ignore", category=torch.jit.TracerWarning):
            torch.jit.trace(norms, (tensors(rng(2))[0],)).save(tmp_path / "graph.torchscript")
    x = other_shape()
    torch.save(x, tmp_path / "x.pt")
    run(sys.executable, "-c", LOAD_AND_RUN, f"graph.{kind}", "x.pt", "y.pt", cwd=tmp_path)
    norms.compare(torch.load(tmp_path / "y.pt"), x)


@pytest.mark.slow
def test_onnx_computes_the_same(norms, tmp_path):
    pytest.importorskip("onnxscript", reason="needs the extra [export]")
    runtime = pytest.importorskip("onnxruntime", reason="needs the extra [export]")
    file = tmp_path / "norms.onnx"
    torch.onnx.export(exported(norms), (tensors(rng(2))[0],), verbose=False).save(file)
    x = other_shape()
    session = runtime.InferenceSession(file)
    found = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    norms.compare(map(torch.tensor, found), x)
