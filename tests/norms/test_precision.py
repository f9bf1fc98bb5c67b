"""float64 input loses nothing by a float32 state, nor does a slow average. Half precision is in the shared suite."""

import copy

import numpy as np
import pytest
import torch

from pn_fairseq.norms import build_norm
from pn_fairseq.testing.helpers import cases

from .helpers import (
    CHANNELS,
    STATEFUL,
    assert_close,
    assert_steps_close,
    flushed,
    random_batch,
    rng,
    train_step,
)


@pytest.mark.parametrize("case", cases(STATEFUL), ids=str)
def test_arithmetic_with_float64_input_is_float64(case):
    """Of a float32 state: the results are as with a float64 state of the same values."""
    norm = case.build(window=2).double()
    generator = rng(3)
    for update in (0, 1, 2, 1001):  # warm-ups and schedules are over then
        norm.set_num_updates(update)
        x, mask, dy = random_batch(generator)
        narrow, wide = flushed(norm), copy.deepcopy(norm)
        for state in wide.buffers():
            state.data = state.data.double() if state.is_floating_point() else state.data
        expected = train_step(wide, x, mask, dy, torch.float64)
        assert_steps_close(train_step(narrow, x, mask, dy, torch.float64), expected, 1e-12)


@pytest.mark.parametrize("name", STATEFUL)
def test_slow_moving_average_does_not_stall(name):
    """With alpha = 0.999 a bfloat16 average of level 1 does not move: its steps are below half a unit."""
    norm = build_norm(name, CHANNELS, alpha_fwd=0.999).bfloat16()
    x = torch.full((8, CHANNELS), 2.0, dtype=torch.bfloat16)
    x[::2] = -1.0
    for _ in range(50):
        norm(x.requires_grad_()).backward(torch.zeros_like(x))
    norm.eval()
    mean, moment = norm.evaluation_statistics()
    target = 2.5 if mean is None else float(x.detach().double().var(0)[0])
    expected = target + (1 - target) * 0.999**50
    if name == "batch-renorm":  # it averages biased standard deviations
        target = (float(x.detach().double().var(0, correction=0)[0]) + norm.eps) ** 0.5
        expected = (target + ((1 + norm.eps) ** 0.5 - target) * 0.999**50) ** 2 - norm.eps
    assert_close(moment, np.full(CHANNELS, expected), 2e-5)
