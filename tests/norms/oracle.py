"""Reference implementations in float64 NumPy, written from the papers' formulas and not from the package.

Everything works on a list of tokens: ``x`` has shape (rows, C) and ``real`` (rows,) is True for a token that is no
padding. Padding is normalized like the rest and enters no mean over tokens, neither in forward nor in backward. A
forward changes no state; its backward does. Loops over tokens and channels are on purpose: nothing here shares a trick
with the code under test.

Sources: Shen et al. 2020, "PowerNorm: Rethinking Batch Normalization in Transformers" (PN: Definition 3, Algorithm 2;
PN-V: Definition 1 and Eq. 6), Ioffe & Szegedy 2015 (BN), Ba et al. 2016 (LN), Zhang & Sennrich 2019 (LayerScale with
one group is RMSNorm without a gain).
"""

from types import SimpleNamespace

import numpy as np
import pytest

EPS = 1e-5


def flatten_tokens(x, padding_mask=None):
    """(T, B, C) or (N, C) with a (B, T) or (N,) padding mask -> (rows, C) and the boolean ``real`` of each row."""
    x = np.asarray(x, dtype=np.float64)
    if x.ndim == 2:
        real = np.ones(len(x), dtype=bool) if padding_mask is None else ~np.asarray(padding_mask)
        return x, real
    time, batch, channels = x.shape
    rows = np.empty((time * batch, channels))
    real = np.ones(time * batch, dtype=bool)
    for t in range(time):
        for b in range(batch):
            rows[t * batch + b] = x[t, b]
            if padding_mask is not None:
                real[t * batch + b] = not bool(padding_mask[b, t])
    return rows, real


def mean_over(values, real):
    """Per-channel mean over the real tokens."""
    total = np.zeros(values.shape[1])
    count = 0
    for row, is_real in zip(values, real, strict=True):
        if is_real:
            total += row
            count += 1
    return total / count


def layer_scale_forward(x, groups, eps=EPS):
    """Each group of channels of each token over its root mean square; returns y and the roots (rows, groups)."""
    if groups == 0:
        return x.copy(), None
    size = x.shape[1] // groups
    y = np.empty_like(x)
    rms = np.empty((len(x), groups))
    for i in range(len(x)):
        for g in range(groups):
            span = slice(g * size, (g + 1) * size)
            rms[i, g] = np.sqrt(np.mean(x[i, span] ** 2) + eps)
            y[i, span] = x[i, span] / rms[i, g]
    return y, rms


def layer_scale_backward(dy, y, rms, groups):
    """dx_k = (dy_k - y_k mean_j(dy_j y_j)) / rms within a group, as d rms / dx_k = y_k / K."""
    if groups == 0:
        return dy.copy()
    size = y.shape[1] // groups
    dx = np.empty_like(y)
    for i in range(len(y)):
        for g in range(groups):
            span = slice(g * size, (g + 1) * size)
            dx[i, span] = (dy[i, span] - y[i, span] * np.mean(dy[i, span] * y[i, span])) / rms[i, g]
    return dx


class _Oracle:
    """Affine part, layer scale and the bookkeeping that all norms share."""

    def __init__(self, channels, eps=EPS, groups=0, weight=None, bias=None):
        self.channels = channels
        self.eps = eps
        self.groups = groups
        self.weight = np.ones(channels) if weight is None else np.asarray(weight, dtype=np.float64)
        self.bias = np.zeros(channels) if bias is None else np.asarray(bias, dtype=np.float64)

    def forward(self, x, padding_mask=None):
        """One training forward: (y, ctx). ``ctx`` belongs to this forward alone and goes to ``backward``."""
        rows, real = flatten_tokens(x, padding_mask)
        scaled, rms = layer_scale_forward(rows, self.groups, self.eps)
        xhat, saved = self._normalize(scaled, real)
        ctx = SimpleNamespace(shape=np.shape(x), real=real, scaled=scaled, rms=rms, xhat=xhat, saved=saved)
        return (self.weight * xhat + self.bias).reshape(np.shape(x)), ctx

    def backward(self, dy, ctx):
        """(dx, dweight, dbias) of the forward that made ``ctx``; the state takes in what the two have seen."""
        dy = np.asarray(dy, dtype=np.float64).reshape(ctx.xhat.shape)
        dweight = np.zeros(self.channels)
        dbias = np.zeros(self.channels)
        for i in range(len(dy)):
            dweight += dy[i] * ctx.xhat[i]
            dbias += dy[i]
        dscaled = self._input_gradient(self.weight * dy, ctx)
        self._update(self.weight * dy, ctx)
        return layer_scale_backward(dscaled, ctx.scaled, ctx.rms, self.groups).reshape(ctx.shape), dweight, dbias

    def _update(self, dxhat, ctx):
        pass

    def evaluate(self, x):
        rows, _ = flatten_tokens(x)
        scaled, _ = layer_scale_forward(rows, self.groups, self.eps)
        return (self.weight * self._normalize_eval(scaled) + self.bias).reshape(np.shape(x))


class PowerNormOracle(_Oracle):
    """PN: Shen et al. 2020, Algorithm 2, with the warm-up of psi and Assumption 10 enforced by max(0, .)."""

    def __init__(self, channels, alpha_fwd=0.9, alpha_bwd=0.9, warmup=0, **common):
        super().__init__(channels, **common)
        self.alpha_fwd = alpha_fwd
        self.alpha_bwd = alpha_bwd
        self.warmup = warmup
        self.psi2 = np.ones(channels)
        self.nu = np.zeros(channels)
        self.count = 0
        self.num_updates = None

    def set_num_updates(self, num_updates):
        if num_updates == 0 and self.num_updates != 0:
            self.count = 0  # a warm-up begins: its cumulative mean counts from here
        self.num_updates = num_updates

    def in_warmup(self):
        completed = self.count if self.num_updates is None else self.num_updates
        return completed < self.warmup

    def _normalize(self, x, real):
        batch_psi2 = mean_over(x**2, real)
        warming = self.in_warmup()
        denominator = np.sqrt((batch_psi2 if warming else self.psi2) + self.eps)
        saved = SimpleNamespace(denominator=denominator, nu=self.nu.copy(), batch_psi2=batch_psi2, warming=warming)
        return x / denominator, saved

    def _input_gradient(self, dxhat, ctx):
        denominator, nu = ctx.saved.denominator, ctx.saved.nu
        dx = np.empty_like(dxhat)
        for i in range(len(dxhat)):
            dx[i] = (dxhat[i] - nu * ctx.xhat[i]) / denominator if ctx.real[i] else dxhat[i] / denominator
        return dx

    def _update(self, dxhat, ctx):
        # Without a trainer the warm-up counts steps taken in, of which there may have been more since the forward.
        warming = self.in_warmup() if self.num_updates is None else ctx.saved.warming
        self.count += 1
        if warming:
            self.psi2 = self.psi2 + (ctx.saved.batch_psi2 - self.psi2) / self.count
        else:
            self.psi2 = self.alpha_fwd * self.psi2 + (1 - self.alpha_fwd) * ctx.saved.batch_psi2
        gamma = mean_over(ctx.xhat**2, ctx.real)
        lam = mean_over(dxhat * ctx.xhat, ctx.real)
        # The gradient takes the nu of its forward; the recursion continues from the present nu.
        self.nu = self.nu * np.maximum(0.0, 1 - (1 - self.alpha_bwd) * gamma) + (1 - self.alpha_bwd) * lam

    def _normalize_eval(self, x):
        return x / np.sqrt(self.psi2 + self.eps)


class PowerNormVOracle(_Oracle):
    """PN-V: Shen et al. 2020, Definition 1 and Eq. 6."""

    def __init__(self, channels, alpha=0.9, **common):
        super().__init__(channels, **common)
        self.alpha = alpha
        self.psi2 = np.ones(channels)
        self.count = 0

    def _normalize(self, x, real):
        batch_psi2 = mean_over(x**2, real)
        denominator = np.sqrt(batch_psi2 + self.eps)
        return x / denominator, SimpleNamespace(denominator=denominator, batch_psi2=batch_psi2)

    def _update(self, dxhat, ctx):
        self.psi2 = self.alpha * self.psi2 + (1 - self.alpha) * ctx.saved.batch_psi2
        self.count += 1

    def _input_gradient(self, dxhat, ctx):
        lam = mean_over(dxhat * ctx.xhat, ctx.real)
        return (dxhat - ctx.real[:, None] * ctx.xhat * lam) / ctx.saved.denominator

    def _normalize_eval(self, x):
        return x / np.sqrt(self.psi2 + self.eps)


class BatchNormOracle(_Oracle):
    """BN over the real tokens: biased variance in the normalization, unbiased in the running variance."""

    def __init__(self, channels, alpha=0.9, **common):
        super().__init__(channels, **common)
        self.alpha = alpha
        self.mean = np.zeros(channels)
        self.var = np.ones(channels)
        self.count = 0

    def _normalize(self, x, real):
        mean = mean_over(x, real)
        var = mean_over((x - mean) ** 2, real)
        denominator = np.sqrt(var + self.eps)
        return (x - mean) / denominator, SimpleNamespace(denominator=denominator, mean=mean, var=var)

    def _update(self, dxhat, ctx):
        n = ctx.real.sum()
        self.mean = self.alpha * self.mean + (1 - self.alpha) * ctx.saved.mean
        self.var = self.alpha * self.var + (1 - self.alpha) * ctx.saved.var * n / (n - 1)
        self.count += 1

    def _input_gradient(self, dxhat, ctx):
        through_mean = mean_over(dxhat, ctx.real)
        through_var = ctx.xhat * mean_over(dxhat * ctx.xhat, ctx.real)
        return (dxhat - ctx.real[:, None] * (through_mean + through_var)) / ctx.saved.denominator

    def _normalize_eval(self, x):
        return (x - self.mean) / np.sqrt(self.var + self.eps)


class LayerNormOracle(_Oracle):
    """LN: every token over its own mean and biased variance; no state, and padding makes no difference."""

    def _normalize(self, x, real):
        xhat = np.empty_like(x)
        denominator = np.empty(len(x))
        for i in range(len(x)):
            centred = x[i] - x[i].mean()
            denominator[i] = np.sqrt(np.mean(centred**2) + self.eps)
            xhat[i] = centred / denominator[i]
        return xhat, SimpleNamespace(denominator=denominator)

    def _input_gradient(self, dxhat, ctx):
        dx = np.empty_like(dxhat)
        for i in range(len(dxhat)):
            centred = dxhat[i] - dxhat[i].mean() - ctx.xhat[i] * np.mean(dxhat[i] * ctx.xhat[i])
            dx[i] = centred / ctx.saved.denominator[i]
        return dx

    def _normalize_eval(self, x):
        return self._normalize(x, None)[0]


ORACLES = {
    "power": lambda channels, alpha_fwd, alpha_bwd, warmup, **common: PowerNormOracle(
        channels, alpha_fwd, alpha_bwd, warmup, **common
    ),
    "power-v": lambda channels, alpha_fwd, alpha_bwd, warmup, **common: PowerNormVOracle(channels, alpha_fwd, **common),
    "batch": lambda channels, alpha_fwd, alpha_bwd, warmup, **common: BatchNormOracle(channels, alpha_fwd, **common),
    "layer": lambda channels, alpha_fwd, alpha_bwd, warmup, **common: LayerNormOracle(channels, **common),
}


def make_oracle(name, channels, alpha_fwd=0.9, alpha_bwd=0.9, psi_warmup_updates=0, layer_scale_groups=0, **common):
    """The oracle of a registered norm, with the options of ``build_norm``. Without one the test is skipped."""
    if name not in ORACLES:
        pytest.skip(f"no oracle for the norm {name!r} in tests/norms/oracle.py")
    return ORACLES[name](channels, alpha_fwd, alpha_bwd, psi_warmup_updates, groups=layer_scale_groups, **common)


def oracle_state(oracle):
    """The state under the buffer names of the package."""
    state = {}
    for ours, theirs in (
        ("psi2", "running_psi2"),
        ("nu", "nu"),
        ("mean", "running_mean"),
        ("var", "running_var"),
        ("count", "num_batches_tracked"),
    ):
        if hasattr(oracle, ours):
            state[theirs] = np.asarray(getattr(oracle, ours))
    return state
