"""Reference implementations in float64 NumPy, written from the papers' formulas and not from the package.

Everything works on a list of tokens: ``x`` has shape (rows, C) and ``real`` (rows,) is True for a token that is no
padding. Padding is normalized like the rest and enters no mean over tokens, neither in forward nor in backward. A
forward changes no state; its backward does. Loops over tokens and channels are on purpose: nothing here shares a trick
with the code under test.

Sources: Shen et al. 2020, "PowerNorm: Rethinking Batch Normalization in Transformers" (PN: Definition 3, Algorithm 2;
PN-V: Definition 1 and Eq. 6), Ioffe & Szegedy 2015 (BN), Zhang & Sennrich 2019 (LayerScale with
one group is RMSNorm without a gain), Ioffe 2017 (BRN), Yan et al. 2020 (MABN), Yang et al. 2022 (UN), Wang et al. 2022
(RBN), Guo et al. 2024 (PRepBN).
"""

import math
from types import SimpleNamespace

import numpy as np

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
        """One training forward: (y, ctx). ``ctx`` belongs only to this forward and goes to ``backward``."""
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
    """PN: Shen et al. 2020, Algorithm 2, with the warm-up of psi and the guard max(0, .) for Assumption 10."""

    def __init__(self, channels, alpha=0.9, alpha_bwd=0.9, warmup=0, **common):
        super().__init__(channels, **common)
        self.alpha = alpha
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
            self.psi2 = self.alpha * self.psi2 + (1 - self.alpha) * ctx.saved.batch_psi2
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
        n = self._counted(ctx)
        self.mean = self.alpha * self.mean + (1 - self.alpha) * ctx.saved.mean
        self.var = self.alpha * self.var + (1 - self.alpha) * ctx.saved.var * n / (n - 1)
        self.count += 1

    def _counted(self, ctx):
        return ctx.real.sum()

    def _input_gradient(self, dxhat, ctx):
        through_mean = mean_over(dxhat, ctx.real)
        through_var = ctx.xhat * mean_over(dxhat * ctx.xhat, ctx.real)
        return (dxhat - ctx.real[:, None] * (through_mean + through_var)) / ctx.saved.denominator

    def _normalize_eval(self, x):
        return (x - self.mean) / np.sqrt(self.var + self.eps)


class BatchNormReleaseOracle(BatchNormOracle):
    """The release's BN: padding is filled with the mean of the real tokens and counted."""

    def __init__(self, channels, alpha=0.95, **common):
        super().__init__(channels, alpha, **common)

    def _normalize(self, x, real):
        mean = mean_over(x, real)
        filled = np.where(real[:, None], x, mean)
        assert np.allclose(filled.mean(0), mean)
        var = ((filled - mean) ** 2).mean(0)
        denominator = np.sqrt(var + self.eps)
        return (x - mean) / denominator, SimpleNamespace(denominator=denominator, mean=mean, var=var)

    def _counted(self, ctx):
        return len(ctx.real)

    def _input_gradient(self, dxhat, ctx):
        slope = (ctx.real[:, None] * dxhat * ctx.xhat).mean(0)  # over all positions
        through = mean_over(dxhat, ctx.real) + ctx.xhat * slope
        return (dxhat - ctx.real[:, None] * through) / ctx.saved.denominator


class BatchRenormOracle(_Oracle):
    """BRN: Ioffe 2017, Algorithm 1. What takes part in the gradients of weight and x is x_hat r + d."""

    def __init__(self, channels, alpha=0.99, updates=40_000, r_max=3.0, d_max=5.0, **common):
        super().__init__(channels, **common)
        self.alpha, self.updates, self.r_max, self.d_max = alpha, updates, r_max, d_max
        self.mean, self.sigma = np.zeros(channels), np.full(channels, np.sqrt(1 + self.eps))
        self.count = 0

    @property
    def var(self):
        return self.sigma**2 - self.eps

    def limits(self):
        """With the paper's numbers, scaled: 5,000, 25,000 and 40,000 steps."""
        step = 40_000 * self.count / self.updates
        r_max = np.interp(step, [5_000, 40_000], [1, self.r_max])
        return r_max, np.interp(step, [5_000, 25_000], [0, self.d_max])

    def _normalize(self, x, real):
        mean = mean_over(x, real)
        sigma = np.sqrt(mean_over((x - mean) ** 2, real) + self.eps)
        r_max, d_max = self.limits()
        r = np.clip(sigma / self.sigma, 1 / r_max, r_max)
        d = np.clip((mean - self.mean) / self.sigma, -d_max, d_max)
        plain = (x - mean) / sigma
        return plain * r + d, SimpleNamespace(sigma=sigma, mean=mean, r=r, plain=plain)

    def _input_gradient(self, dxhat, ctx):
        saved, h = ctx.saved, dxhat * ctx.saved.r
        through = mean_over(h, ctx.real) + saved.plain * mean_over(h * saved.plain, ctx.real)
        return (h - ctx.real[:, None] * through) / saved.sigma

    def _update(self, dxhat, ctx):
        self.mean = self.alpha * self.mean + (1 - self.alpha) * ctx.saved.mean
        self.sigma = self.alpha * self.sigma + (1 - self.alpha) * ctx.saved.sigma
        self.count += 1

    def _normalize_eval(self, x):
        return (x - self.mean) / self.sigma


class _WindowOracle(_Oracle):
    """Statistics of the last steps by number; the package keeps them in rows, number modulo size."""

    def __init__(self, channels, alpha, warmup, window, **common):
        super().__init__(channels, **common)
        self.alpha, self.warmup, self.size = alpha, warmup, window
        self.psi2 = np.ones(channels)
        self.count = 0
        self.psi2s, self.lambdas = {}, {}

    def last(self, values, number):
        return [values[n] for n in range(number - self.size + 1, number + 1)]

    def rows(self, values):
        rows = np.zeros((self.size, self.channels))
        for number in range(max(1, self.count - self.size + 1), self.count + 1):
            rows[number % self.size] = values[number]
        return rows

    @property
    def psi2_window(self):
        return self.rows(self.psi2s)

    @property
    def lambda_window(self):
        return self.rows(self.lambdas)

    def early(self, number):
        return number <= self.size or number < self.warmup

    def ratio(self, number, root):
        if number <= max(1000, self.warmup):
            return np.ones(self.channels)
        return np.clip(root / np.sqrt(self.psi2 + self.eps), 1 / 5, 5)

    def _normalize_eval(self, x):
        return x / np.sqrt(self.psi2 + self.eps)


class MovingAverageOracle(_WindowOracle):
    """MABN: Yan et al. 2020, without the centralization of weights."""

    def __init__(self, channels, alpha=0.98, warmup=0, window=16, **common):
        super().__init__(channels, alpha, warmup, window, **common)

    def _normalize(self, x, real):
        number = self.count + 1
        own = mean_over(x**2, real)
        psi2 = own if self.early(number) else np.mean(self.last(self.psi2s | {number: own}, number), axis=0)
        root = np.sqrt(psi2 + self.eps)
        r = self.ratio(number, root)
        return r * x / root, SimpleNamespace(number=number, own=own, psi2=psi2, root=root, r=r, z=x / root)

    def _input_gradient(self, dxhat, ctx):
        saved, g = ctx.saved, dxhat * ctx.saved.r
        saved.lambda_ = average = mean_over(g * saved.z, ctx.real)
        if not self.early(saved.number):
            average = np.mean(self.last(self.lambdas | {saved.number: average}, saved.number), axis=0)
        return (g - ctx.real[:, None] * saved.z * average) / saved.root

    def _update(self, dxhat, ctx):
        self.count += 1
        self.psi2s[self.count], self.lambdas[self.count] = ctx.saved.own, ctx.saved.lambda_
        self.psi2 = self.alpha * self.psi2 + (1 - self.alpha) * ctx.saved.psi2


class UnifiedOracle(_WindowOracle):
    """UN: Yang et al. 2022; ``release``: padding counts everywhere, and r is in the gradient of the weight."""

    def __init__(
        self, channels, alpha=0.9, alpha_bwd=0.9, warmup=0, window=4, filtration=False, release=False, **common
    ):
        super().__init__(channels, alpha, warmup, window, **common)
        self.alpha_bwd, self.filtration, self.release = alpha_bwd, filtration, release
        self.nu = np.zeros(channels)
        self.skipped = []

    def _skip(self, number, own):
        if self.size == 1:
            return True
        if not self.filtration or self.early(number):
            return False
        bound = np.var(np.sqrt(self.psi2_window), ddof=1) * self.size
        window = np.array(self.last(self.psi2s | {number: own}, number))
        return bool((window.mean(0) - np.prod(window, axis=0) ** (1 / self.size) > bound).any())

    def _normalize(self, x, real):
        number = self.count + 1
        counted = np.ones_like(real) if self.release else real
        own = mean_over(x**2, counted)
        skip = self._skip(number, own)
        early = self.early(number) or skip
        psi2 = own if early else np.prod(self.last(self.psi2s | {number: own}, number), axis=0) ** (1 / self.size)
        root = np.sqrt(psi2 + self.eps)
        r = np.ones(self.channels) if skip else self.ratio(number, root)
        saved = SimpleNamespace(number=number, own=own, skip=skip, early=early, psi2=psi2, root=root, r=r)
        saved.counted, saved.nu = counted, self.nu.copy()
        return x / root, saved

    def _input_gradient(self, dxhat, ctx):
        saved, g = ctx.saved, dxhat * ctx.saved.r
        saved.lambda_ = saved.average = mean_over(g * ctx.xhat, saved.counted)
        if not saved.early:
            saved.average = np.mean(self.last(self.lambdas | {saved.number: saved.lambda_}, saved.number), axis=0)
        nu = saved.lambda_ if saved.skip else self.alpha_bwd * saved.nu + (1 - self.alpha_bwd) * saved.average
        return (g - saved.counted[:, None] * ctx.xhat * nu) / saved.root

    def backward(self, dy, ctx):
        dx, dweight, dbias = super().backward(dy, ctx)
        return dx, dweight * ctx.saved.r if self.release else dweight, dbias

    def _update(self, dxhat, ctx):
        saved = ctx.saved
        self.count += 1
        self.skipped.append(saved.skip)
        self.psi2s[self.count] = self.psi2 if saved.skip else saved.own
        self.lambdas[self.count] = self.nu if saved.skip else saved.lambda_
        self.psi2 = self.alpha * self.psi2 + (1 - self.alpha) * saved.psi2
        self.nu = self.alpha_bwd * self.nu + (1 - self.alpha_bwd) * saved.average


class RegularizedOracle(BatchNormOracle):
    """RBN: Wang et al. 2022; ``release``: absolute differences of variances, statistics that hold the batch already,
    biased variances of at least eps."""

    def __init__(self, channels, alpha=0.95, lambda_mean=0.1, lambda_var=0.01, release=False, **common):
        super().__init__(channels, alpha, **common)
        self.lambda_mean, self.lambda_var, self.release = lambda_mean, lambda_var, release

    def _normalize(self, x, real):
        mean = mean_over(x, real)
        var = mean_over((x - mean) ** 2, real)
        denominator = np.sqrt(np.maximum(var, self.eps) if self.release else var + self.eps)
        old = SimpleNamespace(mean=self.mean.copy(), var=self.var.copy())
        return (x - mean) / denominator, SimpleNamespace(denominator=denominator, mean=mean, var=var, old=old)

    def _input_gradient(self, dxhat, ctx):
        saved, old, n = ctx.saved, ctx.saved.old, ctx.real.sum()
        centred = ctx.xhat * saved.denominator
        if self.release:
            assert (saved.var > self.eps).all()
            new_mean = self.alpha * old.mean + (1 - self.alpha) * saved.mean
            new_var = self.alpha * old.var + (1 - self.alpha) * saved.var
            by_mean = 2 * self.lambda_mean * (saved.mean - new_mean)
            by_var = self.lambda_var * np.sign(saved.var - new_var)
        else:
            by_mean = 2 * self.lambda_mean * (saved.mean - old.mean)
            gap = saved.denominator - np.sqrt(old.var + self.eps)
            by_var = 2 * self.lambda_var * gap / (2 * saved.denominator)
        penalty = (by_mean + by_var * 2 * centred) / n
        return super()._input_gradient(dxhat, ctx) + ctx.real[:, None] * penalty

    def _update(self, dxhat, ctx):
        super()._update(dxhat, ctx)
        if self.release:
            n = ctx.real.sum()
            self.var = self.var - (1 - self.alpha) * ctx.saved.var * (n / (n - 1) - 1)

    def _normalize_eval(self, x):
        return (x - self.mean) / np.sqrt(np.maximum(self.var, self.eps) if self.release else self.var + self.eps)


class PerTokenOracle(_Oracle):
    """One of the norms of a single token, by its name; parameters besides gain and bias are keyword arguments.

    Sources: Ba et al. 2016 (layer), Xu et al. 2019 (layer-simple, detach, ada), Zhang & Sennrich 2019 (rms), Nguyen &
    Salazar 2019 (scale), Wu & He 2018 (group), Zhu et al. 2025 (dyt), Chen et al. 2025 (derf); none is the identity.
    """

    def __init__(self, channels, name, spans=1, detach=("mean", "std"), k=0.1, scale=1.0, **common):
        self.parameters = {key: float(common.pop(key)[0]) for key in ("g", "alpha", "shift") if key in common}
        super().__init__(channels, **common)
        self.name, self.spans, self.detach, self.k, self.scale = name, spans, detach, k, scale

    def backward(self, dy, ctx):
        self.gradients = dict.fromkeys(self.parameters, 0.0)
        return super().backward(dy, ctx)

    def _normalize(self, x, real):
        rows = [[self._span(part) for part in np.split(row, self.spans)] for row in x]
        xhat = np.array([np.concatenate([part[0] for part in row]) for row in rows]).reshape(x.shape)
        return xhat, rows

    def _normalize_eval(self, x):
        return self._normalize(x, None)[0]

    def _input_gradient(self, dxhat, ctx):
        dx = np.empty_like(dxhat)
        for i, row in enumerate(ctx.saved):
            parts = zip(np.split(ctx.scaled[i], self.spans), np.split(dxhat[i], self.spans), row, strict=True)
            dx[i] = np.concatenate([self._gradient(x, g, *saved) for x, g, saved in parts])
        return dx

    def _span(self, x):
        """What is multiplied with the gain, and the two values that the gradient needs: z and the divisor."""
        if self.name == "none":
            return x, x, 1.0
        if self.name in ("dyt", "derf"):
            argument = self.parameters["alpha"] * x + self.parameters.get("shift", 0.0)
            value = np.tanh(argument) if self.name == "dyt" else np.array([math.erf(each) for each in argument])
            return value, argument, 1.0
        if self.name == "scale":
            length = max(np.sqrt(np.sum(x**2)), self.eps)
            return self.parameters["g"] * x / length, x / length, length
        if self.name == "rms":
            divisor = np.sqrt(np.mean(x**2) + self.eps)
            return x / divisor, x / divisor, divisor
        divisor = np.sqrt(np.mean((x - x.mean()) ** 2) + self.eps)
        z = (x - x.mean()) / divisor
        return (self.scale * (1 - self.k * z) * z if self.name == "ada" else z), z, divisor

    def _gradient(self, x, g, value, z, divisor):
        """dx of one span, where g is the gradient of ``value``."""
        if self.name == "none":
            return g
        if self.name in ("dyt", "derf"):
            slope = 1 - value**2 if self.name == "dyt" else 2 / np.sqrt(np.pi) * np.exp(-(z**2))
            self.gradients["alpha"] += np.sum(g * slope * x)
            if "shift" in self.gradients:
                self.gradients["shift"] += np.sum(g * slope)
            return g * slope * self.parameters["alpha"]
        if self.name == "scale":
            self.gradients["g"] += np.sum(g * z)
            return self.parameters["g"] * (g - z * np.sum(g * z)) / divisor
        if self.name == "ada":
            g = g * self.scale * (1 - self.k * z)
        mean = 0.0 if self.name == "rms" or (self.name == "detach" and "mean" in self.detach) else g.mean()
        along = 0.0 if self.name == "detach" and "std" in self.detach else z * np.mean(g * z)
        return (g - mean - along) / divisor


class ProgressiveOracle(BatchNormOracle):
    """PRepBN: Guo et al. 2024; gain and bias of its LN, and its alpha."""

    def __init__(self, channels, alpha=0.9, fade=60_000, ln_weight=None, ln_bias=None, rep_alpha=1.0, **common):
        super().__init__(channels, alpha, **common)
        self.layer = PerTokenOracle(channels, "layer", eps=self.eps, groups=self.groups, weight=ln_weight, bias=ln_bias)
        self.fade, self.rep_alpha = fade, rep_alpha

    def forward(self, x, padding_mask=None):
        share = max(0.0, 1 - self.count / self.fade)
        layer, layer_ctx = self.layer.forward(x, padding_mask)
        batch, ctx = super().forward(x, padding_mask)
        ctx.share, ctx.layer = share, layer_ctx
        rep = batch + (self.rep_alpha * ctx.scaled).reshape(np.shape(x))
        return share * layer + (1 - share) * rep, ctx

    def backward(self, dy, ctx):
        share, dy = ctx.share, np.asarray(dy, dtype=np.float64)
        through_layer, by_weight, by_bias = self.layer.backward(share * dy, ctx.layer)
        through_batch, dweight, dbias = super().backward((1 - share) * dy, ctx)
        rows = (1 - share) * dy.reshape(ctx.scaled.shape)
        direct = layer_scale_backward(self.rep_alpha * rows, ctx.scaled, ctx.rms, self.groups).reshape(ctx.shape)
        self.gradients = {"ln_weight": by_weight, "ln_bias": by_bias, "rep_alpha": (rows * ctx.scaled).sum()}
        return through_layer + through_batch + direct, dweight, dbias

    def evaluate(self, x):
        rows, _ = flatten_tokens(x)
        scaled, _ = layer_scale_forward(rows, self.groups, self.eps)
        return super().evaluate(x) + (self.rep_alpha * scaled).reshape(np.shape(x))


def oracle_state(oracle):
    """The state under the buffer names of the package."""
    state = {}
    for ours, theirs in (
        ("psi2", "running_psi2"),
        ("psi2_window", "psi2_window"),
        ("lambda_window", "lambda_window"),
        ("nu", "nu"),
        ("mean", "running_mean"),
        ("var", "running_var"),
        ("count", "num_batches_tracked"),
    ):
        if hasattr(oracle, ours):
            state[theirs] = np.asarray(getattr(oracle, ours))
    return state
