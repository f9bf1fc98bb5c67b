"""The theorems of the papers, as properties of the norms here: docs/theory.md."""

import math

import numpy as np
import pytest
import torch

from docs.tools.invariances import CHANGES, ROWS, invariances, marks
from pn_fairseq.norms import NORMS, build_norm

from .helpers import real_tokens, rng, to_mask

EPS = 1e-14
WIDTHS = (2, 3, 12, 64, 515)


def draws(width: int, number: int = 50) -> tuple[np.ndarray, np.ndarray]:
    """Tokens and gradients, (number, width), of several distributions: normal, heavy-tailed, one
    large channel.
    """
    generator = rng(width)
    x = generator.normal(size=(number, width)) + generator.normal(size=(number, 1))
    x[::3] = generator.standard_t(2, size=x[::3].shape)
    x[::7, 0] += 100
    x[x.std(1) < 0.1, 0] += 1  # the theorems hold with eps = 0
    g = generator.standard_t(3, size=(number, width)) + generator.normal(size=(number, 1))
    return x, g


def normalized(x: np.ndarray) -> np.ndarray:
    return (x - x.mean(1, keepdims=True)) / x.std(1, keepdims=True)


def gradient(norm, x: np.ndarray, g: np.ndarray) -> np.ndarray:
    x = torch.tensor(x, requires_grad=True)
    norm(x).backward(torch.tensor(g))
    return x.grad.numpy()


# Xu et al. 2019, Theorem 1: mean and variance over channels of the gradient.


@pytest.mark.parametrize("width", WIDTHS)
def test_theorem_1_of_adanorm(width):
    x, g = draws(width)
    sigma = x.std(1)
    y = normalized(x)
    both = gradient(build_norm("detach", width, eps=EPS, detach="mean,std"), x, g)
    mean = gradient(build_norm("detach", width, eps=EPS, detach="mean"), x, g)
    std = gradient(build_norm("detach", width, eps=EPS, detach="std"), x, g)
    standard = gradient(build_norm("layer-simple", width, eps=EPS), x, g)
    close = dict(rtol=1e-8, atol=1e-10 * np.abs(g).max() / sigma.min())
    # Re-centred unless the mean is detached.
    for each in (both, mean):
        np.testing.assert_allclose(each.mean(1), g.mean(1) / sigma, **close)
    for each in (standard, std):
        np.testing.assert_allclose(each.mean(1), 0 * sigma, **close)
    # Of the same variance if the deviation is detached, and otherwise smaller, by this much.
    variance = g.var(1) / sigma**2
    less = (g * y).mean(1) ** 2 / sigma**2
    for each in (both, std):
        np.testing.assert_allclose(each.var(1), variance, rtol=1e-8)
    close = dict(rtol=1e-6, atol=1e-9 * variance.max())
    for each in (standard, mean):
        np.testing.assert_allclose(each.var(1), variance - less, **close)


# Xu et al. 2019, Theorem 2: phi(y) = C (1 - k y) is the function with a constant mean over channels
# and a bounded mean of z = phi(y) y. As mean(y) = 0 and mean(y^2) = 1, every quadratic phi has a
# constant mean; only without the square is the mean of z bounded.


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize(("k", "scale"), [(0.1, 1.0), (0.1, 2.0), (0.3, 0.7)])
def test_theorem_2_of_adanorm(width, k, scale):
    x, _ = draws(width)
    norm = build_norm("ada", width, eps=EPS, ada_k=k, ada_scale=scale)
    z = norm(torch.tensor(x)).numpy()
    y = normalized(x)
    np.testing.assert_allclose(z.mean(1), -scale * k, rtol=1e-8)
    # phi is what z has been divided by, where y is not about 0.
    phi = scale * (1 - k * y)
    clear = np.abs(y) > 1e-3
    phi[clear] = z[clear] / y[clear]
    np.testing.assert_allclose(phi.mean(1), scale, rtol=1e-8)


@pytest.mark.parametrize("width", WIDTHS)
def test_most_channels_keep_their_sign(width):
    """Chebyshev's inequality, the paper's reason for k = 1/10: abs(y) < 1/k for a share of at
    least 1 - k^2.
    """
    x, _ = draws(width)
    y = build_norm("ada", width, eps=EPS)(torch.tensor(x)).numpy()
    same_sign = y * (x - x.mean(1, keepdims=True)) > 0
    assert (same_sign.mean(1) >= 1 - 0.1**2 - 1e-12).all()


# Shen et al. 2020, Lemma 2. Assumption 9: the gradient of the output is that of the loss without a
# norm.


@pytest.mark.parametrize("masked", [False, True])
def test_lemma_2_of_powernorm(masked):
    generator = rng(3)
    channels = 12
    x = generator.normal(size=(9, 5, channels))
    x *= generator.uniform(0.2, 5, channels)
    x += generator.normal(size=channels)
    dy = generator.standard_t(3, size=x.shape)
    mask = None
    if masked:
        mask = np.arange(9) >= generator.integers(3, 10, (5, 1))
    real = real_tokens(x.shape, mask)
    dy[~real] = 0  # the loss does not depend on padding
    norm = build_norm("power-v", channels, eps=EPS).double()
    with torch.no_grad():
        norm.weight.copy_(torch.tensor(generator.uniform(-2, 2, channels)))
    leaf = torch.tensor(x, requires_grad=True)
    norm(leaf, to_mask(mask)).backward(torch.tensor(dy))
    h = x[real]
    g = dy[real]
    dx = leaf.grad.numpy()[real]
    psi2 = (h**2).mean(0)
    gamma = norm.weight.detach().numpy()
    inner = (g * h).sum(0) / np.sqrt(psi2 * real.sum())
    expected = gamma**2 / psi2 * ((g**2).sum(0) - inner**2)
    np.testing.assert_allclose((dx**2).sum(0), expected, rtol=1e-9)
    # So the Lipschitz constant is not larger where abs(gamma) <= psi.
    smaller = gamma**2 <= psi2
    assert smaller.any()
    assert ((dx**2).sum(0) <= (g**2).sum(0))[smaller].all()


# Shen et al. 2020, Theorem 4 and Lemma 11, per channel: PN's gradient and nu are bounded under
# Assumption 10.


def steps_of_pn(alpha: float, x_hat_limit: float):
    """Heavy-tailed training steps of PN whose |x_hat| is at most ``x_hat_limit``: x_hat, dx_hat,
    dx, psi and nu.
    """
    generator = rng(11)
    channels = 6
    norm = build_norm("power", channels, eps=EPS, alpha_bwd=alpha).double()
    for _ in range(round(30 / (1 - alpha))):
        psi = norm.running_psi2.double().sqrt().numpy().copy()
        nu = norm.nu.double().numpy().copy()
        x = generator.standard_t(3, size=(20, channels)) * generator.uniform(0.3, 3, channels)
        x_hat = np.clip(x / psi, -x_hat_limit, x_hat_limit)
        # aligned with x_hat: |Lambda| is large
        dx_hat = np.clip(x_hat + generator.standard_t(2, size=x.shape), -2, 2)
        yield x_hat, dx_hat, gradient(norm, x_hat * psi, dx_hat), psi, nu


def constants_of_lemma_11(
    alpha: float, gammas: np.ndarray, c1: float, c2: float
) -> tuple[int, float, float]:
    """K, C3 and the bound C4 of docs/theory.md, from the Gamma of all steps."""
    average = 0.0
    lowest = np.inf
    for gamma in gammas:
        average = alpha * average + (1 - alpha) * gamma
        lowest = min(lowest, average.min())
    window = math.ceil(math.log(lowest / (2 * c1**2)) / math.log(alpha))
    bound = (1 - alpha) * window * c1 * c2 / (1 - math.exp(-lowest / 2))
    return window, lowest, bound


@pytest.mark.parametrize("alpha", [0.9, 0.95, 0.99])
def test_theorem_4_and_lemma_11(alpha):
    c1 = 0.98 / math.sqrt(1 - alpha)
    c2 = 2.0
    steps = list(steps_of_pn(alpha, c1))
    gammas = np.stack([(x_hat**2).mean(0) for x_hat, *_ in steps])
    lambdas = np.stack([(x_hat * dx_hat).mean(0) for x_hat, dx_hat, *_ in steps])
    assert (gammas <= c1**2).all()
    assert (np.abs(lambdas) <= c1 * c2).all()
    # Under Assumption 10 the guard max(0, .) never acts: nu is the paper's recursion.
    nu = np.zeros(6)
    for gamma, lambda_, (*_, found) in zip(gammas, lambdas, steps, strict=True):
        np.testing.assert_allclose(found, nu, rtol=1e-4, atol=1e-6)  # the state is float32
        nu = (1 - (1 - alpha) * gamma) * nu + (1 - alpha) * lambda_
    window, c3, c4 = constants_of_lemma_11(alpha, gammas, c1, c2)
    logarithms = np.log(1 - (1 - alpha) * gammas).cumsum(0)
    assert len(gammas) > 2 * window
    # K steps multiply an old nu by this much
    assert (logarithms[window:] - logarithms[:-window] <= -c3 / 2).all()
    c0 = min(psi.min() for *_, psi, _ in steps)
    bound = (c2 + c1 * c4) / c0
    for x_hat, dx_hat, dx, psi, nu in steps:
        assert (np.abs(nu) <= c4).all()
        np.testing.assert_allclose(dx, (dx_hat - nu * x_hat) / psi, rtol=1e-5, atol=1e-6)
        assert (np.abs(dx) <= bound).all()


# Invariances.


@pytest.mark.parametrize(
    ("name", "expected"),
    [("batch", "✓–✓✓✓–"), ("layer", "✓✓–✓–✓"), ("rms", "✓––✓–✓")],
    ids=["batch", "layer", "rms"],
)
def test_invariances_that_are_published(name, expected):
    """Zhang & Sennrich 2019, Table 1."""
    assert marks(invariances(name)) == list(expected)


def test_the_table_of_invariances_has_every_norm():
    assert {name for name, _ in ROWS.values()} == set(NORMS)
    assert len(CHANGES) == 6
