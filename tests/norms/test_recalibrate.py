"""Recalibration against torch's update_bn. The rest is in the shared suite."""

import numpy as np
import pytest
import torch
from torch import nn

from pn_fairseq.norms import MaskedBatchNorm, build_norm, recalibrating

from .converted import silent
from .helpers import CHANNELS, assert_close, rng, to_tensor


def test_batch_norm_as_update_bn():
    between = [nn.Linear(CHANNELS, CHANNELS), nn.ReLU()]
    own = nn.Sequential(MaskedBatchNorm(CHANNELS), *between, MaskedBatchNorm(CHANNELS))
    theirs = nn.Sequential(nn.BatchNorm1d(CHANNELS), *between, nn.BatchNorm1d(CHANNELS))
    generator = rng(3)
    data = []
    for n in range(4):
        x = generator.normal(n, 1 + n, size=(5 + 3 * n, CHANNELS))
        data.append(to_tensor(x))
    torch.optim.swa_utils.update_bn(data, theirs)
    with torch.no_grad(), recalibrating(own):
        for batch in data:
            own(batch)
    for place in (0, 3):
        assert_close(own[place].running_mean, theirs[place].running_mean)
        assert_close(own[place].running_var, theirs[place].running_var)
    assert_close(own.eval()(data[0]), theirs.eval()(data[0]))


def test_the_psi_warmup_does_not_begin_again():
    norm = build_norm("power", CHANNELS, psi_warmup_updates=1).train()
    norm(torch.full((4, CHANNELS), 2.0, requires_grad=True)).sum().backward()
    with torch.no_grad(), recalibrating(norm):
        norm(torch.full((4, CHANNELS), 3.0))
    # the running psi divides
    assert_close(norm(torch.ones(4, CHANNELS)), np.full((4, CHANNELS), 1 / 3), 1e-5)


def test_a_model_without_running_statistics():
    model = nn.Sequential(nn.Linear(CHANNELS, CHANNELS), build_norm("layer", CHANNELS))
    with silent(), recalibrating(model) as norms:
        model(torch.randn(2, 3, CHANNELS))
    assert norms == []
    with pytest.warns(UserWarning, match=r"recalibrating\(Linear\) changes nothing: .* no norm of"):
        with recalibrating(model[0]) as norms:
            pass
    assert norms == []
