"""Reference implementations in float64 NumPy, written from the papers' formulas and not from the
package.

Everything works on a list of tokens: ``x`` has shape (rows, C) and ``real`` (rows,) is True for a
token that is no padding. Padding is normalized like the rest and enters no mean over tokens,
neither in forward nor in backward. A forward changes no state; its backward does. Nothing here
shares a trick with the code under test.

Sources: Shen et al. 2020, "PowerNorm: Rethinking Batch Normalization in Transformers" (PN:
Definition 3, Algorithm 2; PN-V: Definition 1 and Eq. 6), Ioffe & Szegedy 2015 (BN), Zhang &
Sennrich 2019 (LayerScale with one group is RMSNorm without a gain), Ioffe 2017 (BRN), Wang et al.
2022 (RBN), Guo et al. 2024 (PRepBN).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace

import numpy as np

EPS = 1e-5


def flatten_tokens(x, padding_mask=None):
    """(T, B, C) or (N, C) with a (B, T) or (N,) padding mask -> (rows, C) and the boolean
    ``real`` of each row.
    """
    x = np.asarray(x, dtype=np.float64)
    real = np.ones(x.shape[:-1], dtype=bool)
    if padding_mask is not None:
        real = ~np.asarray(padding_mask).T
    return x.reshape(-1, x.shape[-1]), real.reshape(-1)


def mean_over(values, real):
    """Per-channel mean over the real tokens."""
    return values[real].mean(0)


def layer_scale_forward(x, groups, eps=EPS):
    """Each group of channels of each token over its root mean square; returns y and the roots
    (rows, groups, 1).
    """
    if groups == 0:
        return x, None
    parts = x.reshape(len(x), groups, -1)
    rms = np.sqrt((parts**2).mean(-1, keepdims=True) + eps)
    return (parts / rms).reshape(x.shape), rms


def layer_scale_backward(dy, y, rms):
    """dx_k = (dy_k - y_k mean_j(dy_j y_j)) / rms within a group, as d rms / dx_k = y_k / K."""
    if rms is None:
        return dy
    dy = dy.reshape(*rms.shape[:2], -1)
    parts = y.reshape(*rms.shape[:2], -1)
    along = (dy * parts).mean(-1, keepdims=True)
    dx = (dy - parts * along) / rms
    return dx.reshape(y.shape)


class _Oracle:
    """Affine part, layer scale and the bookkeeping that all norms share."""

    def __init__(self, channels, eps=EPS, groups=0, weight=None, bias=None):
        self.channels = channels
        self.eps = eps
        self.groups = groups
        self.weight = np.ones(channels)
        self.bias = np.zeros(channels)
        if weight is not None:
            self.weight = np.asarray(weight, dtype=np.float64)
        if bias is not None:
            self.bias = np.asarray(bias, dtype=np.float64)

    def forward(self, x, padding_mask=None):
        """One training forward: (y, ctx). ``ctx`` belongs to this forward only and goes to
        ``backward``.
        """
        rows, real = flatten_tokens(x, padding_mask)
        scaled, rms = layer_scale_forward(rows, self.groups, self.eps)
        xhat, saved = self._normalize(scaled, real)
        ctx = SimpleNamespace(
            shape=np.shape(x), real=real, scaled=scaled, rms=rms, xhat=xhat, saved=saved
        )
        y = self.weight * xhat + self.bias
        return y.reshape(np.shape(x)), ctx

    def backward(self, dy, ctx):
        """(dx, dweight, dbias) of the forward that made ``ctx``; the state takes in what the two
        have seen.
        """
        dy = np.asarray(dy, dtype=np.float64).reshape(ctx.xhat.shape)
        dxhat = self.weight * dy
        dscaled = self._input_gradient(dxhat, ctx)
        self._update(dxhat, ctx)
        dx = layer_scale_backward(dscaled, ctx.scaled, ctx.rms)
        dweight = (dy * ctx.xhat).sum(0)
        return dx.reshape(ctx.shape), dweight, dy.sum(0)

    def _update(self, dxhat, ctx):
        pass

    def evaluate(self, x):
        rows, _ = flatten_tokens(x)
        scaled, _ = layer_scale_forward(rows, self.groups, self.eps)
        y = self.weight * self._normalize_eval(scaled) + self.bias
        return y.reshape(np.shape(x))


class QuadraticMeanOracle(_Oracle):
    """Evaluation divides by the root of a running quadratic mean."""

    def __init__(self, channels, alpha=0.9, **common):
        super().__init__(channels, **common)
        self.alpha = alpha
        self.psi2 = np.ones(channels)
        self.count = 0

    def _normalize_eval(self, x):
        return x / np.sqrt(self.psi2 + self.eps)


class PowerNormOracle(QuadraticMeanOracle):
    """PN: Shen et al. 2020, Algorithm 2, with the warm-up of psi and the guard max(0, .) for
    Assumption 10.
    """

    def __init__(self, channels, alpha=0.9, alpha_bwd=0.9, warmup=0, **common):
        super().__init__(channels, alpha, **common)
        self.alpha_bwd = alpha_bwd
        self.warmup = warmup
        self.nu = np.zeros(channels)
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
        psi2 = batch_psi2 if warming else self.psi2
        denominator = np.sqrt(psi2 + self.eps)
        saved = SimpleNamespace(
            denominator=denominator, nu=self.nu, batch_psi2=batch_psi2, warming=warming
        )
        return x / denominator, saved

    def _input_gradient(self, dxhat, ctx):
        along_nu = ctx.real[:, None] * ctx.saved.nu * ctx.xhat
        return (dxhat - along_nu) / ctx.saved.denominator

    def _update(self, dxhat, ctx):
        # Without a trainer the warm-up counts steps taken in, of which there may have been more
        # since the forward.
        warming = self.in_warmup() if self.num_updates is None else ctx.saved.warming
        self.count += 1
        if warming:
            self.psi2 = self.psi2 + (ctx.saved.batch_psi2 - self.psi2) / self.count
        else:
            self.psi2 = self.alpha * self.psi2 + (1 - self.alpha) * ctx.saved.batch_psi2
        gamma = mean_over(ctx.xhat**2, ctx.real)
        lam = mean_over(dxhat * ctx.xhat, ctx.real)
        # The gradient takes the nu of its forward; the recursion continues from the present nu.
        step = 1 - self.alpha_bwd
        kept = np.maximum(0.0, 1 - step * gamma)
        self.nu = self.nu * kept + step * lam


class PowerNormVOracle(QuadraticMeanOracle):
    """PN-V: Shen et al. 2020, Definition 1 and Eq. 6."""

    def _normalize(self, x, real):
        batch_psi2 = mean_over(x**2, real)
        denominator = np.sqrt(batch_psi2 + self.eps)
        return x / denominator, SimpleNamespace(denominator=denominator, batch_psi2=batch_psi2)

    def _update(self, dxhat, ctx):
        self.psi2 = self.alpha * self.psi2 + (1 - self.alpha) * ctx.saved.batch_psi2
        self.count += 1

    def _input_gradient(self, dxhat, ctx):
        lam = mean_over(dxhat * ctx.xhat, ctx.real)
        along_lam = ctx.real[:, None] * ctx.xhat * lam
        return (dxhat - along_lam) / ctx.saved.denominator


class BatchNormOracle(_Oracle):
    """BN over the real tokens: biased variance in the normalization, unbiased in the running
    variance.
    """

    def __init__(self, channels, alpha=0.9, **common):
        super().__init__(channels, **common)
        self.alpha = alpha
        self.mean = np.zeros(channels)
        self.var = np.ones(channels)
        self.count = 0

    def _normalize(self, x, real):
        mean = mean_over(x, real)
        var = self._variance(x, mean, real)
        denominator = self._denominator(var)
        saved = SimpleNamespace(denominator=denominator, mean=mean, var=var)
        return (x - mean) / denominator, saved

    def _variance(self, x, mean, real):
        return mean_over((x - mean) ** 2, real)

    def _denominator(self, var):
        return np.sqrt(var + self.eps)

    def _update(self, dxhat, ctx):
        n = self._counted(ctx)
        unbiased = ctx.saved.var * n / (n - 1)
        self.mean = self.alpha * self.mean + (1 - self.alpha) * ctx.saved.mean
        self.var = self.alpha * self.var + (1 - self.alpha) * unbiased
        self.count += 1

    def _counted(self, ctx):
        return ctx.real.sum()

    def _input_gradient(self, dxhat, ctx):
        through_mean = mean_over(dxhat, ctx.real)
        through_var = ctx.xhat * mean_over(dxhat * ctx.xhat, ctx.real)
        through = ctx.real[:, None] * (through_mean + through_var)
        return (dxhat - through) / ctx.saved.denominator

    def _normalize_eval(self, x):
        return (x - self.mean) / self._denominator(self.var)


class BatchNormReleaseOracle(BatchNormOracle):
    """The release's BN: padding is filled with the mean of the real tokens and counted."""

    def __init__(self, channels, alpha=0.95, **common):
        super().__init__(channels, alpha, **common)

    def _variance(self, x, mean, real):
        filled = np.where(real[:, None], x, mean)
        assert np.allclose(filled.mean(0), mean)
        return ((filled - mean) ** 2).mean(0)

    def _counted(self, ctx):
        return len(ctx.real)

    def _input_gradient(self, dxhat, ctx):
        slope = (ctx.real[:, None] * dxhat * ctx.xhat).mean(0)  # over all positions
        through = mean_over(dxhat, ctx.real) + ctx.xhat * slope
        return (dxhat - ctx.real[:, None] * through) / ctx.saved.denominator


class BatchRenormOracle(_Oracle):
    """BRN: Ioffe 2017, Algorithm 1. What takes part in the gradients of weight and x is
    x_hat r + d.
    """

    def __init__(self, channels, alpha=0.99, updates=40_000, r_max=3.0, d_max=5.0, **common):
        super().__init__(channels, **common)
        self.alpha = alpha
        self.updates = updates
        self.r_max = r_max
        self.d_max = d_max
        self.mean = np.zeros(channels)
        self.sigma = np.full(channels, np.sqrt(1 + self.eps))
        self.count = 0

    @property
    def var(self):
        return self.sigma**2 - self.eps

    def limits(self):
        """With the paper's numbers, scaled: 5,000, 25,000 and 40,000 steps."""
        step = 40_000 * self.count / self.updates
        r_max = np.interp(step, [5_000, 40_000], [1, self.r_max])
        d_max = np.interp(step, [5_000, 25_000], [0, self.d_max])
        return r_max, d_max

    def _normalize(self, x, real):
        mean = mean_over(x, real)
        sigma = np.sqrt(mean_over((x - mean) ** 2, real) + self.eps)
        r_max, d_max = self.limits()
        r = np.clip(sigma / self.sigma, 1 / r_max, r_max)
        d = np.clip((mean - self.mean) / self.sigma, -d_max, d_max)
        plain = (x - mean) / sigma
        saved = SimpleNamespace(sigma=sigma, mean=mean, r=r, plain=plain)
        return plain * r + d, saved

    def _input_gradient(self, dxhat, ctx):
        saved = ctx.saved
        h = dxhat * ctx.saved.r
        through_mean = mean_over(h, ctx.real)
        through_sigma = saved.plain * mean_over(h * saved.plain, ctx.real)
        through = ctx.real[:, None] * (through_mean + through_sigma)
        return (h - through) / saved.sigma

    def _update(self, dxhat, ctx):
        self.mean = self.alpha * self.mean + (1 - self.alpha) * ctx.saved.mean
        self.sigma = self.alpha * self.sigma + (1 - self.alpha) * ctx.saved.sigma
        self.count += 1

    def _normalize_eval(self, x):
        return (x - self.mean) / self.sigma


class RegularizedOracle(BatchNormOracle):
    """RBN: Wang et al. 2022; ``release``: absolute differences of variances, statistics that hold
    the batch already, biased variances of at least eps.
    """

    def __init__(
        self, channels, alpha=0.95, lambda_mean=0.1, lambda_var=0.01, release=False, **common
    ):
        super().__init__(channels, alpha, **common)
        self.lambda_mean = lambda_mean
        self.lambda_var = lambda_var
        self.release = release

    def _denominator(self, var):
        if self.release:
            return np.sqrt(np.maximum(var, self.eps))
        return np.sqrt(var + self.eps)

    def _normalize(self, x, real):
        xhat, saved = super()._normalize(x, real)
        saved.old = SimpleNamespace(mean=self.mean, var=self.var)
        return xhat, saved

    def _input_gradient(self, dxhat, ctx):
        saved = ctx.saved
        old = ctx.saved.old
        n = ctx.real.sum()
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
            biased = ctx.saved.var
            unbiased = biased * n / (n - 1)
            self.var = self.var - (1 - self.alpha) * (unbiased - biased)


class PerTokenOracle(_Oracle):
    """One of the norms of a single token, by its name; parameters besides gain and bias are keyword
    arguments.

    Sources: Ba et al. 2016 (layer), Xu et al. 2019 (layer-simple, detach, ada), Zhang & Sennrich
    2019 (rms), Nguyen & Salazar 2019 (scale), Wu & He 2018 (group), Zhu et al. 2025 (dyt), Chen et
    al. 2025 (derf); none is the identity.
    """

    def __init__(self, channels, name, spans=1, detach=("mean", "std"), k=0.1, scale=1.0, **common):
        self.parameters = {}
        for key in ("g", "alpha", "shift"):
            if key in common:
                self.parameters[key] = float(common.pop(key)[0])
        super().__init__(channels, **common)
        self.name = name
        self.spans = spans
        self.detach = detach
        self.k = k
        self.scale = scale

    def _normalize(self, x, real):
        value, z, divisor = self._spans(x.reshape(len(x), self.spans, -1))
        saved = SimpleNamespace(value=value, z=z, divisor=divisor)
        return value.reshape(x.shape), saved

    def _normalize_eval(self, x):
        return self._normalize(x, None)[0]

    def _spans(self, x):
        """What is multiplied with the gain, and the two values that the gradient needs: z and
        the divisor.
        """
        if self.name == "none":
            return x, x, 1.0
        if self.name in ("dyt", "derf"):
            squash = np.tanh if self.name == "dyt" else np.vectorize(math.erf)
            argument = self.parameters["alpha"] * x + self.parameters.get("shift", 0.0)
            return squash(argument), argument, 1.0
        if self.name == "scale":
            length = np.sqrt((x**2).sum(-1, keepdims=True))
            length = np.maximum(length, self.eps)
            return self.parameters["g"] * x / length, x / length, length
        centred = x if self.name == "rms" else x - x.mean(-1, keepdims=True)
        divisor = np.sqrt((centred**2).mean(-1, keepdims=True) + self.eps)
        z = centred / divisor
        if self.name == "ada":
            return self.scale * (1 - self.k * z) * z, z, divisor
        return z, z, divisor

    def _input_gradient(self, dxhat, ctx):
        x = ctx.scaled.reshape(ctx.saved.z.shape)
        g = dxhat.reshape(ctx.saved.z.shape)
        dx = self._gradient(x, g, **vars(ctx.saved))
        return dx.reshape(dxhat.shape)

    def _gradient(self, x, g, value, z, divisor):
        """dx of the spans, where g is the gradient of ``value``."""
        self.gradients = {}
        if self.name == "none":
            return g
        if self.name in ("dyt", "derf"):
            slope = 1 - value**2
            if self.name == "derf":
                slope = 2 / np.sqrt(np.pi) * np.exp(-(z**2))
            through = g * slope
            factors = {"alpha": x, "shift": 1.0}
            for key in self.parameters:
                self.gradients[key] = np.sum(through * factors[key])
            return through * self.parameters["alpha"]
        if self.name == "scale":
            self.gradients["g"] = np.sum(g * z)
            along = z * (g * z).sum(-1, keepdims=True)
            return self.parameters["g"] * (g - along) / divisor
        if self.name == "ada":
            g = g * self.scale * (1 - self.k * z)
        # What has no gradient here: rms does not subtract a mean.
        detached = {"detach": self.detach, "rms": ("mean",)}.get(self.name, ())
        dx = g
        if "mean" not in detached:
            dx = dx - g.mean(-1, keepdims=True)
        if "std" not in detached:
            dx = dx - z * (g * z).mean(-1, keepdims=True)
        return dx / divisor


class ProgressiveOracle(BatchNormOracle):
    """PRepBN: Guo et al. 2024; gain and bias of its LN, and its alpha."""

    def __init__(
        self,
        channels,
        alpha=0.9,
        fade=60_000,
        ln_weight=None,
        ln_bias=None,
        rep_alpha=1.0,
        **common,
    ):
        super().__init__(channels, alpha, **common)
        self.layer = PerTokenOracle(
            channels, "layer", eps=self.eps, groups=self.groups, weight=ln_weight, bias=ln_bias
        )
        self.fade = fade
        self.rep_alpha = rep_alpha

    def forward(self, x, padding_mask=None):
        share = max(0.0, 1 - self.count / self.fade)
        layer, layer_ctx = self.layer.forward(x, padding_mask)
        batch, ctx = super().forward(x, padding_mask)
        ctx.share = share
        ctx.layer = layer_ctx
        direct = self.rep_alpha * ctx.scaled
        rep = batch + direct.reshape(np.shape(x))
        return share * layer + (1 - share) * rep, ctx

    def backward(self, dy, ctx):
        share = ctx.share
        dy = np.asarray(dy, dtype=np.float64)
        through_layer, by_weight, by_bias = self.layer.backward(share * dy, ctx.layer)
        through_batch, dweight, dbias = super().backward((1 - share) * dy, ctx)
        rows = (1 - share) * dy.reshape(ctx.scaled.shape)
        direct = layer_scale_backward(self.rep_alpha * rows, ctx.scaled, ctx.rms)
        by_alpha = (rows * ctx.scaled).sum()
        self.gradients = {"ln_weight": by_weight, "ln_bias": by_bias, "rep_alpha": by_alpha}
        dx = through_layer + through_batch + direct.reshape(ctx.shape)
        return dx, dweight, dbias

    def evaluate(self, x):
        rows, _ = flatten_tokens(x)
        scaled, _ = layer_scale_forward(rows, self.groups, self.eps)
        direct = self.rep_alpha * scaled
        return super().evaluate(x) + direct.reshape(np.shape(x))


def oracle_state(oracle):
    """The state under the buffer names of the package."""
    names = {
        "psi2": "running_psi2",
        "psi2_window": "psi2_window",
        "lambda_window": "lambda_window",
        "nu": "nu",
        "mean": "running_mean",
        "var": "running_var",
        "count": "num_batches_tracked",
    }
    state = {}
    for ours, theirs in names.items():
        if hasattr(oracle, ours):
            state[theirs] = np.asarray(getattr(oracle, ours))
    return state


@dataclass(frozen=True)
class Facts:
    """What the tests know of a norm besides its formula.

    Attributes:
        options: a text for ``--norm-options`` that sets every option of its own.
        attributes: what the text sets: attributes of the module, none of which is the default.
        parameters: their number in a norm over so many channels, counted by hand.
        settings: of a norm of single tokens: options of build_norm, and the same for
            :class:`PerTokenOracle`.
    """

    options: str = ""
    attributes: dict[str, object] = field(default_factory=dict)
    parameters: Callable[[int], int] = lambda width: 2 * width  # gain and bias
    settings: tuple[tuple[dict, dict], ...] = (({}, {}),)


def no_parameters(width: int) -> int:
    return 0


FACTS: dict[str, Facts] = {
    "layer": Facts(),
    "batch": Facts(),
    "power-v": Facts(),
    "power": Facts(),
    "batch-renorm": Facts(
        "renorm_updates=8,renorm_r_max=2,renorm_d_max=0",
        {"renorm_updates": 8, "renorm_r_max": 2.0, "renorm_d_max": 0.0},
    ),
    "mabn": Facts("window=3", {"window": 3}),
    "unified": Facts("window=3,outlier_filtration=true", {"window": 3, "outlier_filtration": True}),
    "batch-reg": Facts("lambda_mean=60,lambda_var=0.0", {"lambda_mean": 60.0, "lambda_var": 0.0}),
    "prep-batch": Facts(
        "fade_updates=7", {"fade_updates": 7}, parameters=lambda width: 4 * width + 1
    ),
    "none": Facts(parameters=no_parameters),
    "layer-simple": Facts(parameters=no_parameters),
    "detach": Facts(
        "detach=std",
        {"detach": ("std",)},
        no_parameters,
        (
            ({"detach": "mean"}, {"detach": ("mean",)}),
            ({"detach": "std"}, {"detach": ("std",)}),
            ({"detach": "mean,std"}, {"detach": ("mean", "std")}),
        ),
    ),
    "ada": Facts(
        "ada_k=0.2,ada_scale=2",
        {"ada_k": 0.2, "ada_scale": 2.0},
        no_parameters,
        (({}, {}), ({"ada_k": 0.3, "ada_scale": 2.0}, {"k": 0.3, "scale": 2.0})),
    ),
    "rms": Facts(parameters=lambda width: width),
    "scale": Facts(parameters=lambda width: 1),
    "group": Facts(
        "groups=16",
        {"groups": 16},
        settings=(
            ({"groups": 1}, {"spans": 1}),
            ({"groups": 3}, {"spans": 3}),
            ({"groups": 4}, {"spans": 4}),
        ),
    ),
    "dyt": Facts(
        "alpha_init=0.8",
        {"alpha_init": 0.8},
        parameters=lambda width: 2 * width + 1,
        settings=(({"alpha_init": 0.8}, {}),),
    ),
    "derf": Facts("alpha_init=8e-1", {"alpha_init": 0.8}, parameters=lambda width: 2 * width + 2),
}
