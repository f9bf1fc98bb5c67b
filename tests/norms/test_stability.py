"""The guard of PN's backward recursion under stress, and the diagnostics of it."""

import itertools
import math
from copy import deepcopy

import numpy as np
import pytest
import torch

from benchmarks.stability import CHANNELS, SPIKE, Stress, growing, one_large
from pn_fairseq.norms import NORMS, PowerNorm, PowerNormV, build_norm

from .helpers import random_batch, randomize_affine, rng, train_step


def test_growing_activations_stay_finite_where_the_unguarded_recursion_diverges():
    stress = Stress(growing)
    assert stress.finite
    guarded = max(float(nu.abs().max()) for nu in stress.nu)
    unguarded = [float(nu.abs().max()) for nu in stress.unguarded]
    assert guarded < 2.0
    assert unguarded[SPIKE + 9] > 1e15
    # It grows by about (1 - alpha) Gamma - 1 in every step.
    for earlier, later in itertools.pairwise(unguarded[SPIKE : SPIKE + 10]):
        assert later > 5 * earlier
    assert int(stress.norm.diagnostics()["guarded_steps"]) == 10


def test_one_batch_100_times_larger():
    stress = Stress(one_large)
    assert stress.finite
    assert stress.nu[SPIKE].abs().max() < 10.0
    assert stress.unguarded[SPIKE].abs().max() > 300.0
    assert int(stress.norm.diagnostics()["guarded_steps"]) == 1


def test_diagnostics_of_pn_are_those_of_the_last_batch():
    norm = PowerNorm(CHANNELS)
    norm.collecting = True
    x = 2 * torch.randn(500, CHANNELS, dtype=torch.float64)
    psi2 = x.square().mean(0)
    norm(x.requires_grad_()).backward(torch.randn_like(x))
    report = norm.diagnostics()
    # psi was 1 before this first batch; the distance is to the statistic that the batch found.
    expected = {
        "psi_distance": psi2.sqrt().log().abs().mean(),
        "gamma_max": psi2.max() / (1 + 1e-5),
        "nu_rms": norm.nu.square().mean().sqrt(),
    }
    for name, value in expected.items():
        np.testing.assert_allclose(report[name], value.detach(), rtol=1e-6, err_msg=name)
    assert int(report["guarded_steps"]) == 0
    assert int(report["nonfinite_steps"]) == 0


def test_a_guarded_step_is_counted_if_it_enters_the_state():
    norm = PowerNorm(CHANNELS)
    x = torch.full((5, CHANNELS), 15.0**0.5, requires_grad=True)
    norm.collecting = True
    norm(x).backward(torch.ones_like(x))  # Gamma is 15, and 1 - (1 - 0.9) Gamma below 0
    norm(10 * x).backward(torch.full_like(x, math.nan))
    report = norm.diagnostics()
    assert int(report["guarded_steps"]) == 1
    assert int(report["nonfinite_steps"]) == 1


def test_psi_distance_of_pn_v():
    norm = PowerNormV(CHANNELS)
    norm.collecting = True
    # below the running psi, which is 1
    norm(0.5 * torch.ones(4, CHANNELS, requires_grad=True)).sum().backward()
    np.testing.assert_allclose(norm.diagnostics()["psi_distance"], math.log(2), rtol=1e-6)


@pytest.mark.parametrize("groups", [0, 4])
@pytest.mark.parametrize("name", NORMS)
def test_what_is_not_finite_at_padding_reaches_no_gradient(name, groups):
    """dy is 0 there. LN is torch's function, and 0 * NaN is NaN in it."""
    clean = randomize_affine(build_norm(name, 12, layer_scale_groups=groups)).train()
    faulty = deepcopy(clean)
    generator = rng(4)
    for step, bad in enumerate((math.nan, math.inf, -math.inf)):
        x, mask, dy = random_batch(generator)
        dy[mask.T] = 0
        expected = train_step(clean, x, mask, dy)
        x[mask.T] = np.where(generator.random(12) < 0.5, bad, 1.0)
        found = train_step(faulty, x, mask, dy)
        if name == "layer":
            assert np.isnan(found["dweight"]).any()
            continue
        for key in found.keys() - {"y"}:
            np.testing.assert_array_equal(found[key], expected[key], f"step {step}: {key}")
        assert name == "none" or not found["dx"][mask.T].any()
