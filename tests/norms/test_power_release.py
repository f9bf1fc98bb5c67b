"""PN as in the authors' release, against an oracle that does step by step what they are known to
do.
"""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from pn_fairseq.norms import PowerNormRelease

from .helpers import (
    CHANNELS,
    affine_of,
    assert_close,
    assert_state_unchanged,
    assert_states_equal,
    assert_training_follows,
    batches,
    random_batch,
    randomize_affine,
    rng,
    state_of,
    train_step,
)
from .oracle import QuadraticMeanOracle, mean_over

STEPS = 34
WARMUP = 9


class ReleaseOracle(QuadraticMeanOracle):
    """The released code's arithmetic and bookkeeping: ``psi2`` and ``count`` are its running_phi
    and iters.
    """

    def __init__(self, channels, alpha_fwd=0.9, alpha_bwd=0.9, warmup=0, **common):
        super().__init__(channels, alpha_fwd, **common)
        self.alpha_bwd = alpha_bwd
        self.warmup = warmup
        self.ema_gz = np.zeros(channels)

    def set_num_updates(self, num_updates):
        """The release counts forwards."""

    def _normalize(self, x, real):
        own = mean_over(x**2, real)
        number = self.count + 1
        root = np.sqrt((own if number <= self.warmup else self.psi2) + self.eps)
        return x / root, SimpleNamespace(own=own, ema_gz=self.ema_gz, cumulate=number < self.warmup)

    def _input_gradient(self, dxhat, ctx):
        correction = (1 - self.alpha_bwd) * ctx.saved.ema_gz * ctx.xhat  # at padding as well
        return (dxhat - correction) / np.sqrt(ctx.saved.own + self.eps)

    def _update(self, dxhat, ctx):
        own = ctx.saved.own
        self.count += 1
        if ctx.saved.cumulate:
            self.psi2 = (self.psi2 * (self.count - 1) + own) / self.count
        self.psi2 = self.alpha * self.psi2 + (1 - self.alpha) * own
        factor = 1 - (1 - self.alpha_bwd) * (ctx.xhat**2).mean(0)
        self.ema_gz = self.ema_gz * factor + (dxhat * ctx.xhat).mean(0)

    # as the contract derives it from ema_gz
    nu = property(lambda self: (1 - self.alpha_bwd) * self.ema_gz)


def make_pair(alpha_fwd=0.9, alpha_bwd=0.9, affine=True, groups=0, warmup=0, eps=1e-5):
    options = {"alpha_fwd": alpha_fwd, "eps": eps, "affine": affine, "layer_scale_groups": groups}
    norm = PowerNormRelease(CHANNELS, alpha_bwd, warmup, **options)
    randomize_affine(norm)
    oracle = ReleaseOracle(
        CHANNELS, alpha_fwd, alpha_bwd, warmup, groups=groups, eps=eps, **affine_of(norm)
    )
    return norm.train(), oracle


def some_batches(masked=True, steps=STEPS):
    """Levels stay where the unguarded recursion converges."""
    return batches(steps, masked, low=0.6, high=1.6, sentences=2)


@pytest.mark.every_implementation
@pytest.mark.parametrize(
    ("warmup", "masked", "groups", "options"),
    [
        (0, True, 0, {}),
        (1, True, 4, {"affine": False}),
        (2, False, 4, {"alpha_fwd": 0.5, "alpha_bwd": 0.95}),
        (WARMUP, True, 0, {"affine": False, "alpha_fwd": 0.99, "alpha_bwd": 0.7}),
        (WARMUP, False, 4, {"eps": 0.3}),
        (100, True, 4, {}),
    ],
    ids=str,
)
def test_training_follows_the_release(warmup, masked, groups, options):
    norm, oracle = make_pair(groups=groups, warmup=warmup, **options)
    assert_training_follows(norm, oracle, some_batches(masked), rtol=5e-5)


def test_another_eps_also_changes_layer_scale_here_and_not_in_the_release():
    """The released group scaling keeps 1e-5. Where a group of a token has the mean square m, the
    released y is larger by sqrt((m + eps) / (m + 1e-5)), as long as psi is the same; psi is about
    the scaled activations and then differs.
    """
    groups = 4
    eps = 1e-3
    norm, _ = make_pair(groups=groups, eps=eps, affine=False)
    released = ReleaseOracle(CHANNELS, eps=eps)
    for step, (x, mask, dy) in enumerate(some_batches(steps=3)):
        x = 0.05 * x
        parts = x.reshape(*x.shape[:-1], groups, -1)
        m = (parts**2).mean(-1).repeat(CHANNELS // groups, axis=-1)
        actual = train_step(norm, x, mask, dy, torch.float64)["y"]
        y, ctx = released.forward(x / np.sqrt(m + 1e-5), mask)
        released.backward(dy, ctx)
        if step == 0:
            assert_close(actual * np.sqrt((m + eps) / (m + 1e-5)), y, 1e-7)
            assert np.abs(actual - y).max() > 0.05 * np.abs(y).max()
    assert (state_of(norm)["running_psi2"].numpy() < released.psi2).all()


def test_warmup_counts_forwards_and_not_updates():
    norm, oracle = make_pair(warmup=WARMUP)
    assert_training_follows(norm, oracle, some_batches(), rtol=5e-5, update_freq=3)
    untold, _ = make_pair(warmup=WARMUP)
    for batch in some_batches():
        train_step(untold, *batch)
    assert_states_equal(norm, untold)


@pytest.mark.parametrize("bad", [np.inf, 1e30])
def test_a_fault_at_padding_changes_no_state(bad):
    """Here padding counts. The square of 1e30 is not finite."""
    norm, _ = make_pair(warmup=3)
    for batch in some_batches(steps=6):
        train_step(norm, *batch)
    before = state_of(norm)
    x, mask, dy = random_batch(rng(6))
    mask[0, 0], x[0, 0, 5] = True, bad
    train_step(norm, x, mask, dy)
    assert_state_unchanged(norm, before)
