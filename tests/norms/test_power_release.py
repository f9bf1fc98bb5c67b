"""PN as in the authors' release, against an oracle that does step by step what they are known to do."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from pn_fairseq.norms import NORMS, VARIANTS, PowerNorm, PowerNormRelease, build_norm

from .helpers import (
    CHANNELS,
    affine_of,
    assert_close,
    assert_state_close,
    assert_state_unchanged,
    assert_states_equal,
    assert_steps_close,
    oracle_step,
    random_batch,
    randomize_affine,
    rng,
    state_of,
    to_mask,
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


def release_state(oracle):
    """The oracle's state under our names, with nu as the contract derives it from ema_gz."""
    return {
        "running_psi2": oracle.running_phi,
        "nu": (1 - oracle.alpha_bwd) * oracle.ema_gz,
        "num_batches_tracked": np.asarray(oracle.iters),
    }


def make_pair(alpha_fwd=0.9, alpha_bwd=0.9, affine=True, groups=0, warmup=0, eps=1e-5, without=()):
    norm = PowerNormRelease(
        CHANNELS,
        eps=eps,
        alpha_fwd=alpha_fwd,
        alpha_bwd=alpha_bwd,
        affine=affine,
        layer_scale_groups=groups,
        psi_warmup_updates=warmup,
    )
    randomize_affine(norm)
    oracle = ReleaseOracle(CHANNELS, alpha_fwd, alpha_bwd, warmup, without, groups=groups, eps=eps, **affine_of(norm))
    return norm.train(), oracle


def batches(masked=True, steps=STEPS, seed=0, low=0.6, high=1.6):
    """Batches of changing shape, level and spread. Levels stay where the unguarded recursion converges."""
    generator = rng(seed)
    for step in range(steps):
        yield random_batch(generator, (2 + step % 5, 3 - step % 2, CHANNELS), masked, generator.uniform(low, high))


def run_against_oracle(norm, oracle, steps, rtol=2e-5, dtype=torch.float32, update_freq=None):
    for step, (x, mask, dy) in enumerate(steps):
        if update_freq is not None:
            norm.set_num_updates(step // update_freq)
            oracle.set_num_updates(step // update_freq)
        actual = train_step(norm, x, mask, dy, dtype)
        assert_steps_close(actual, oracle_step(oracle, x, mask, dy), rtol, f"step {step}:")
        assert_state_close(norm, release_state(oracle), rtol, f"step {step}:")
    assert_close(norm.eval()(torch.tensor(x, dtype=dtype)), oracle.evaluate(x), rtol, "eval")


@pytest.mark.every_implementation
@pytest.mark.parametrize(
    ("warmup", "masked", "groups", "affine"),
    [(0, True, 0, True), (1, True, 4, False), (2, False, 4, True), (WARMUP, True, 0, False), (WARMUP, False, 4, True)]
    + [(100, True, 4, True)],
)
def test_training_follows_the_release(warmup, masked, groups, affine):
    norm, oracle = make_pair(groups=groups, warmup=warmup, affine=affine)
    run_against_oracle(norm, oracle, batches(masked), rtol=5e-5)


@pytest.mark.parametrize(("alpha_fwd", "alpha_bwd"), [(0.5, 0.95), (0.99, 0.7)])
def test_in_float64_with_other_alphas_and_a_large_eps(alpha_fwd, alpha_bwd):
    norm, oracle = make_pair(alpha_fwd, alpha_bwd, groups=4, warmup=WARMUP, eps=0.3)
    run_against_oracle(norm.double(), oracle, batches(), rtol=5e-6, dtype=torch.float64)


def test_another_eps_also_changes_layer_scale_here_and_not_in_the_release():
    """The released group scaling keeps 1e-5. Where a group of a token has the mean square m, the released y is larger
    by sqrt((m + eps) / (m + 1e-5)), as long as psi is the same; psi is about the scaled activations and then differs.
    """
    groups, eps = 4, 1e-3
    norm, _ = make_pair(groups=groups, eps=eps, affine=False)
    released = ReleaseOracle(CHANNELS, eps=eps)
    for step, (x, mask, dy) in enumerate(batches(steps=3)):
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


def test_two_dimensional_input():
    norm, oracle = make_pair(warmup=3)
    generator = rng(1)
    run_against_oracle(norm, oracle, [random_batch(generator, (3 + step % 4, CHANNELS)) for step in range(STEPS)], 5e-5)


@pytest.mark.parametrize("update_freq", [1, 3])
def test_warmup_counts_forwards_and_not_updates(update_freq):
    norm, oracle = make_pair(warmup=WARMUP)
    run_against_oracle(norm, oracle, batches(), rtol=5e-5, update_freq=update_freq)
    untold, _ = make_pair(warmup=WARMUP)
    for batch in batches():
        train_step(untold, *batch)
    assert_states_equal(norm, untold)


def largest_deviation(without, **options):
    """Between the module and an oracle that lacks some of the differences, over outputs, gradients and state."""
    norm, oracle = make_pair(groups=0, warmup=WARMUP, without=without, **options)
    worst = 0.0
    for step, (x, mask, dy) in enumerate(batches(high=3.0)):
        norm.set_num_updates(step // 2)
        oracle.set_num_updates(step // 2)
        actual, expected = train_step(norm.double(), x, mask, dy, torch.float64), oracle_step(oracle, x, mask, dy)
        actual |= {name: buffer.double().numpy() for name, buffer in state_of(norm).items()}
        expected |= release_state(oracle)
        for key, value in actual.items():
            worst = max(worst, np.abs(value - expected[key]).max() / np.abs(expected[key]).max())
    return worst


@pytest.mark.parametrize("letter", DIFFERENCES)
def test_each_difference_matters(letter):
    options = {"alpha_bwd": 0.3, "alpha_fwd": 0.99} if letter == "d" else {}  # many a Gamma above 1 / (1 - alpha_bwd)
    assert largest_deviation((letter,), **options) > 1e-2
    assert largest_deviation((), **options) < 2e-6


@pytest.mark.parametrize("update_freq", [None, 2])
def test_without_the_differences_it_would_be_the_paper(update_freq):
    """Of the oracle: its list of differences is complete."""
    release = ReleaseOracle(CHANNELS, 0.8, 0.7, WARMUP, DIFFERENCES, groups=4)
    paper = PowerNormOracle(CHANNELS, 0.8, 0.7, WARMUP, groups=4)
    for step, batch in enumerate(batches(high=4.0)):
        if update_freq is not None:
            release.set_num_updates(step // update_freq)
            paper.set_num_updates(step // update_freq)
        elif release.iters == WARMUP - 1:
            break  # the last step of a warm-up that counts forwards is one of the differences
        actual, expected = oracle_step(release, *batch), oracle_step(paper, *batch)
        for key, value in expected.items():
            assert_close(actual[key], value, 1e-9, f"step {step} {key}")
        for key, value in oracle_state(paper).items():
            assert_close(release_state(release)[key], value, 1e-9, f"step {step} {key}")


def test_agrees_with_the_paper_without_padding_warmup_and_guard_except_for_the_divisor():
    paper, release = PowerNorm(CHANNELS).double(), PowerNormRelease(CHANNELS).double()
    for step, (x, _, dy) in enumerate(batches(masked=False)):
        x = np.sign(x) * np.clip(np.abs(x), 0.7, 2.0)
        root = np.sqrt(state_of(paper)["running_psi2"].double().numpy() + 1e-5)
        own_root = np.sqrt((x**2).mean(axis=(0, 1)) + 1e-5)
        assert ((own_root / root) ** 2 < 10).all(), "the guard is not to act"
        expected = train_step(paper, x, None, dy, torch.float64)
        actual = train_step(release, x, None, dy, torch.float64)
        assert_close(actual.pop("dx") * own_root, expected.pop("dx") * root, 1e-9, f"step {step} dx")
        assert_steps_close(actual, expected, 1e-9, f"step {step}")
        assert_state_close(release, state_of(paper), 1e-6, f"step {step}")


def test_agrees_with_the_paper_altogether_where_the_batch_has_the_running_psi():
    paper, release = PowerNorm(CHANNELS).double(), PowerNormRelease(CHANNELS).double()
    generator = rng(3)
    for step in range(STEPS):
        x = generator.choice([-1.0, 1.0], size=(5, 3, CHANNELS))
        dy = generator.normal(size=x.shape)
        expected = train_step(paper, x, None, dy, torch.float64)
        assert_steps_close(train_step(release, x, None, dy, torch.float64), expected, 1e-9, f"step {step}")
        assert_state_close(release, state_of(paper), 1e-9, f"step {step}")


def test_large_batches_make_nu_diverge_as_users_report():
    generator = rng(4)
    paper, release = PowerNorm(CHANNELS, alpha_fwd=0.999), PowerNormRelease(CHANNELS, alpha_fwd=0.999)
    for _ in range(20):
        batch = random_batch(generator, scale=20.0)
        train_step(paper, *batch)
        train_step(release, *batch)
    assert release.nu.abs().min() > 1e6 * paper.nu.abs().max()


def a_trained_norm(groups=4, steps=4, warmup=3, affine=True):
    norm, _ = make_pair(groups=groups, warmup=warmup, affine=affine)
    for batch in batches(steps=steps, seed=5):
        train_step(norm, *batch)
    return norm


@pytest.mark.parametrize("bad", [np.inf, 1e30])
@pytest.mark.parametrize("where", ["x", "dy", "x at padding", "no real token"])
@pytest.mark.parametrize("steps", [1, 6], ids=["in-warm-up", "after-it"])
def test_faulty_batch_changes_no_state(bad, where, steps):
    norm = a_trained_norm(groups=0, steps=steps)
    before = state_of(norm)
    x, mask, dy = random_batch(rng(6))
    if where == "no real token":
        mask[:] = True
    else:
        (dy if where == "dy" else x)[0, 0, 5] = bad * (1e10 if where == "dy" else 1)
        mask[0, 0] = where == "x at padding"
    gradients = train_step(norm, x, mask, dy)
    assert_state_unchanged(norm, before)
    if where == "no real token":
        assert all(np.isfinite(value).all() for value in gradients.values())
        assert np.abs(gradients["dx"]).max() < 100
    train_step(norm, *random_batch(rng(7)))
    assert int(state_of(norm)["num_batches_tracked"]) == steps + 1


def test_two_forwards_before_two_backwards_follow_the_release():
    norm, oracle = make_pair(groups=4, warmup=5)
    steps = list(batches(steps=12, seed=10))
    for pair in zip(steps[::2], steps[1::2], strict=True):
        work = []
        for x, mask, dy in pair:
            leaf = torch.tensor(x, dtype=torch.float32, requires_grad=True)
            work.append((leaf, norm(leaf, to_mask(mask)), dy, oracle.forward(x, mask)[1]))
        for leaf, y, dy, ctx in work[::-1]:
            y.backward(torch.tensor(dy, dtype=torch.float32))
            assert_close(leaf.grad, oracle.backward(dy, ctx)[0], 1e-4)
        assert_state_close(norm, release_state(oracle), 5e-5)


def test_diagnostics():
    norm, _ = make_pair(alpha_fwd=0.99)
    norm.collecting = True
    x = 2 * torch.ones(4, CHANNELS)
    norm(x.requires_grad_()).sum().backward()
    report = norm.diagnostics()
    assert float(report["psi_distance"]) == pytest.approx(np.log(2), rel=1e-5)
    assert float(report["gamma_max"]) == pytest.approx(4, rel=1e-4)
    assert float(report["nu_rms"]) == pytest.approx(float(norm.nu.square().mean().sqrt()), rel=1e-5)
    norm(torch.full((4, CHANNELS), float("nan")).requires_grad_()).sum().backward()
    assert int(norm.diagnostics()["nonfinite_steps"]) == 1


def test_build_norm_knows_the_variants():
    assert VARIANTS == ("paper", "release")
    assert type(build_norm("power", CHANNELS)) is type(build_norm("power", CHANNELS, variant="paper")) is PowerNorm
    norm = build_norm("power", CHANNELS, variant="release", alpha_bwd=0.7, psi_warmup_updates=3, layer_scale_groups=4)
    assert type(norm) is PowerNormRelease
    assert (norm.alpha_bwd, norm.psi_warmup_updates, norm.layer_scale.groups) == (0.7, 3, 4)


@pytest.mark.parametrize("name", NORMS)
def test_norms_without_a_variant_ignore_it(name):
    for variant in VARIANTS:
        assert type(build_norm(name, CHANNELS, variant=variant)) is NORMS[name].variant(variant)
        assert variant in NORMS[name].variants or NORMS[name].variant(variant) is NORMS[name].cls
    with pytest.raises(ValueError, match="'releases'.*paper, release"):
        build_norm(name, CHANNELS, variant="releases")
