"""The message on a NaN: the first module, also where fairseq's own hooks fail."""

from types import SimpleNamespace

import pytest
import torch
from fairseq.nan_detector import NanDetector
from torch import nn

import pn_fairseq.models  # noqa: F401 (applies the patches)
from pn_fairseq.common.errors import NotFiniteError
from pn_fairseq.fairseq_patches import training


class Encoder(nn.Module):
    """As fairseq's encoders: the output is a dict, here without a tensor of its own level."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(2, 2)
        self.second = nn.Linear(2, 2)

    def forward(self, x, times=1.0):
        return {"states": [self.second(self.first(x) * times)]}


@pytest.mark.parametrize(
    ("x", "times", "found"),
    [
        (float("nan"), 1.0, "NaN first in the output of encoder.first"),
        (1.0, float("inf"), "Inf first in the output of encoder.second"),
    ],
)
def test_first_module_forward(x, times, found):
    training._first_modules.clear()
    model = nn.ModuleDict({"encoder": Encoder()})
    nn.init.ones_(model.encoder.first.weight)
    nn.init.ones_(model.encoder.second.weight)
    with NanDetector(model):
        (state,) = model.encoder(torch.full((1, 2), x), times)["states"]
        state.sum().backward()
    assert training._first_modules[0] == found


def test_first_module_backward():
    training._first_modules.clear()
    model = nn.ModuleDict({"encoder": Encoder()})
    with NanDetector(model):
        (state,) = model.encoder(torch.ones(1, 2))["states"]
        (state * 0).sqrt().sum().backward()
    ends = [f"first in the gradient of the output of encoder{part}" for part in ("", ".second")]
    assert training._first_modules[0].endswith(tuple(ends))


@pytest.mark.parametrize(
    ("error", "mended"),
    [
        (FloatingPointError("gradients are Nan/Inf"), True),
        (FloatingPointError("Minimum loss scale reached (0.0001)."), True),
        (
            FloatingPointError(
                "Fatal error: gradients are inconsistent between workers.\nrank 0 = nan"
            ),
            True,
        ),
        (
            FloatingPointError(
                "Fatal error: gradients are inconsistent between workers.\nrank 0 = 1.5"
            ),
            False,
        ),
        (ValueError("another"), False),
    ],
)
def test_which_errors_are_meant(error, mended):
    scaler = SimpleNamespace(loss_scale=0.5)
    trainer = SimpleNamespace(optimizer=SimpleNamespace(scaler=scaler), get_num_updates=lambda: 7)
    with pytest.raises(NotFiniteError if mended else type(error)) as caught:
        with training.explained(trainer):
            raise error
    assert (caught.value is not error) is mended
    if mended:
        assert "in update 8 with the loss scale 0.5" in str(caught.value)
