"""PsiWarmup: when the warm-up of psi is on, and how a batch is weighted."""

import numpy as np
import pytest
import torch

from pn_fairseq.norms import PsiWarmup

from .helpers import assert_close, rng


@pytest.mark.parametrize("updates", [0, 1, 7, 8000])
def test_is_on_for_the_first_updates_only(updates):
    warmup = PsiWarmup(updates)
    for completed in {0, 1, 6, 7, 8, 7999, 8000, 100000}:
        assert bool(warmup.active(completed)) == (completed < updates)


def test_is_off_by_default():
    assert not PsiWarmup().active(0)


def test_a_counter_may_be_a_tensor():
    warmup = PsiWarmup(3)
    assert [bool(warmup.active(torch.tensor(n))) for n in range(5)] == [True, True, True, False, False]


@pytest.mark.parametrize("as_tensor", [False, True])
def test_weights_during_the_warmup_make_a_cumulative_mean(as_tensor):
    values = rng(1).uniform(0.1, 5, size=9)
    warmup = PsiWarmup(100)
    psi2 = 1.0
    for step, value in enumerate(values, start=1):
        step_number = torch.tensor(step) if as_tensor else step
        active = torch.tensor(True) if as_tensor else True
        psi2 = psi2 + float(warmup.weight(active, step_number, 0.9)) * (value - psi2)
        assert_close(psi2, np.mean(values[:step]), 1e-6)


@pytest.mark.parametrize("alpha", [0.5, 0.9, 0.99])
@pytest.mark.parametrize("as_tensor", [False, True])
def test_weight_after_the_warmup_makes_an_exponential_average(alpha, as_tensor):
    active = torch.tensor(False) if as_tensor else False
    for step in (1, 2, 1000):
        step_number = torch.tensor(step) if as_tensor else step
        assert_close(float(PsiWarmup(7).weight(active, step_number, alpha)), 1 - alpha, 1e-6)


@pytest.mark.parametrize("updates", [-1, -8000])
def test_negative_length(updates):
    with pytest.raises(ValueError, match=str(updates)):
        PsiWarmup(updates)
