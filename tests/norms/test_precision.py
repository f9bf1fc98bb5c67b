"""float64 input loses nothing by a float32 state, nor does a slow average. Half precision is in the shared suite."""

import copy

import pytest
import torch

from pn_fairseq.testing.helpers import cases

from .helpers import (
    STATEFUL,
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
