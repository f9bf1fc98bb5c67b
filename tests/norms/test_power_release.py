"""PN as in the authors' release, against an oracle that does step by step what they are known to do."""

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
    oracle_step,
    random_batch,
    randomize_affine,
    rng,
    state_of,
    train_step,
)
from .oracle import PowerNormOracle, _Oracle, mean_over, oracle_state

STEPS = 34
WARMUP = 9
DIFFERENCES = ("a", "b", "c-means", "c-padding", "d", "e")


class ReleaseOracle(_Oracle):
    """The released code's arithmetic and bookkeeping: ``running_phi``, ``ema_gz`` and ``iters``, in loops.

    ``without`` names differences from the paper that are undone, by their letters in ``PowerNormRelease``.
    """

    def __init__(self, channels, alpha_fwd=0.9, alpha_bwd=0.9, warmup=0, without=(), **common):
        super().__init__(channels, **common)
        self.alpha_fwd, self.alpha_bwd, self.warmup, self.without = alpha_fwd, alpha_bwd, warmup, without
        self.running_phi = np.ones(channels)
        self.ema_gz = np.zeros(channels)
        self.iters = 0
        self.num_updates = None

    def set_num_updates(self, num_updates):
        self.num_updates = num_updates

    def _normalize(self, x, real):
        own = mean_over(x**2, real)
        number = self.iters + 1
        if "e" in self.without and self.num_updates is not None:
            use_own = self.num_updates < self.warmup
            cumulate = use_own
        else:
            use_own = number <= self.warmup
            cumulate = number < self.warmup
        root = np.sqrt((own if use_own else self.running_phi) + self.eps)
        saved = SimpleNamespace(root=root, own=own, ema_gz=self.ema_gz.copy(), use_own=use_own, cumulate=cumulate)
        return x / root, saved

    def _input_gradient(self, dxhat, ctx):
        divisor = ctx.saved.root if "a" in self.without else np.sqrt(ctx.saved.own + self.eps)
        subtract_at = ctx.real if "c-padding" in self.without else np.ones(len(dxhat), dtype=bool)
        dx = np.empty_like(dxhat)
        for i in range(len(dxhat)):
            correction = (1 - self.alpha_bwd) * ctx.saved.ema_gz * ctx.xhat[i] if subtract_at[i] else 0.0
            dx[i] = (dxhat[i] - correction) / divisor
        return dx

    def _update(self, dxhat, ctx):
        own = ctx.saved.own
        self.iters += 1
        if "b" in self.without:
            if ctx.saved.use_own:
                self.running_phi = (self.running_phi * (self.iters - 1) + own) / self.iters
            else:
                self.running_phi = self.alpha_fwd * self.running_phi + (1 - self.alpha_fwd) * own
        else:
            if ctx.saved.cumulate:
                self.running_phi = (self.running_phi * (self.iters - 1) + own) / self.iters
            self.running_phi = self.alpha_fwd * self.running_phi + (1 - self.alpha_fwd) * own
        means_over = ctx.real if "c-means" in self.without else np.ones(len(dxhat), dtype=bool)
        factor = 1 - (1 - self.alpha_bwd) * mean_over(ctx.xhat**2, means_over)
        if "d" in self.without:
            factor = np.maximum(0.0, factor)
        self.ema_gz = self.ema_gz * factor + mean_over(dxhat * ctx.xhat, means_over)

    def _normalize_eval(self, x):
        return x / np.sqrt(self.running_phi + self.eps)

    # The state by the names of the other oracles, with nu as the contract derives it from ema_gz.

    @property
    def psi2(self):
        return self.running_phi

    @property
    def nu(self):
        return (1 - self.alpha_bwd) * self.ema_gz

    @property
    def count(self):
        return self.iters


def make_pair(alpha_fwd=0.9, alpha_bwd=0.9, affine=True, groups=0, warmup=0, eps=1e-5, without=()):
    options = {"alpha_fwd": alpha_fwd, "eps": eps, "affine": affine, "layer_scale_groups": groups}
    norm = PowerNormRelease(CHANNELS, alpha_bwd, warmup, **options)
    randomize_affine(norm)
    oracle = ReleaseOracle(CHANNELS, alpha_fwd, alpha_bwd, warmup, without, groups=groups, eps=eps, **affine_of(norm))
    return norm.train(), oracle


def some_batches(masked=True, steps=STEPS, high=1.6):
    """Levels stay where the unguarded recursion converges."""
    return batches(steps, masked, low=0.6, high=high, sentences=2)


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
    """The released group scaling keeps 1e-5. Where a group of a token has the mean square m, the released y is larger
    by sqrt((m + eps) / (m + 1e-5)), as long as psi is the same; psi is about the scaled activations and then differs.
    """
    groups, eps = 4, 1e-3
    norm, _ = make_pair(groups=groups, eps=eps, affine=False)
    released = ReleaseOracle(CHANNELS, eps=eps)
    for step, (x, mask, dy) in enumerate(some_batches(steps=3)):
        x = 0.05 * x
        m = (x.reshape(*x.shape[:-1], groups, -1) ** 2).mean(-1).repeat(CHANNELS // groups, axis=-1)
        actual = train_step(norm, x, mask, dy, torch.float64)["y"]
        y, ctx = released.forward(x / np.sqrt(m + 1e-5), mask)
        released.backward(dy, ctx)
        if step == 0:
            assert_close(actual * np.sqrt((m + eps) / (m + 1e-5)), y, 1e-7)
            assert np.abs(actual - y).max() > 0.05 * np.abs(y).max()
    psi2, phi = state_of(norm)["running_psi2"].numpy(), released.running_phi
    assert (psi2 < phi).all()


def test_warmup_counts_forwards_and_not_updates():
    norm, oracle = make_pair(warmup=WARMUP)
    assert_training_follows(norm, oracle, some_batches(), rtol=5e-5, update_freq=3)
    untold, _ = make_pair(warmup=WARMUP)
    for batch in some_batches():
        train_step(untold, *batch)
    assert_states_equal(norm, untold)


def largest_deviation(without, **options):
    """Between the module and an oracle that lacks some of the differences, over outputs, gradients and state."""
    norm, oracle = make_pair(groups=0, warmup=WARMUP, without=without, **options)
    worst = 0.0
    for step, (x, mask, dy) in enumerate(some_batches(high=3.0)):
        norm.set_num_updates(step // 2)
        oracle.set_num_updates(step // 2)
        actual, expected = train_step(norm.double(), x, mask, dy, torch.float64), oracle_step(oracle, x, mask, dy)
        actual |= {name: buffer.double().numpy() for name, buffer in state_of(norm).items()}
        expected |= oracle_state(oracle)
        for key, value in actual.items():
            worst = max(worst, np.abs(value - expected[key]).max() / np.abs(expected[key]).max())
    return worst


@pytest.mark.parametrize("letter", DIFFERENCES)
def test_each_difference_matters(letter):
    options = {"alpha_bwd": 0.3, "alpha_fwd": 0.99} if letter == "d" else {}  # many a Gamma above 1 / (1 - alpha_bwd)
    assert largest_deviation((letter,), **options) > 1e-2
    assert largest_deviation((), **options) == pytest.approx(0, abs=1e-5)


@pytest.mark.parametrize("update_freq", [None, 2])
def test_without_the_differences_it_would_be_the_paper(update_freq):
    """Of the oracle: its list of differences is complete."""
    release = ReleaseOracle(CHANNELS, 0.8, 0.7, WARMUP, DIFFERENCES, groups=4)
    paper = PowerNormOracle(CHANNELS, 0.8, 0.7, WARMUP, groups=4)
    for step, batch in enumerate(some_batches(high=4.0)):
        if update_freq is not None:
            release.set_num_updates(step // update_freq)
            paper.set_num_updates(step // update_freq)
        elif release.iters == WARMUP - 1:
            break  # the last step of a warm-up that counts forwards is one of the differences
        actual, expected = oracle_step(release, *batch), oracle_step(paper, *batch)
        for key, value in expected.items():
            assert_close(actual[key], value, 1e-9, f"step {step} {key}")
        for key, value in oracle_state(paper).items():
            assert_close(oracle_state(release)[key], value, 1e-9, f"step {step} {key}")


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
