"""As in oracle.py, the norms with windows: MABN of Yan et al. 2020 and UN of Yang et al. 2022."""

from types import SimpleNamespace

import numpy as np

from .oracle import QuadraticMeanOracle, mean_over


class _WindowOracle(QuadraticMeanOracle):
    """Statistics of the last steps by number; the package keeps them in rows, number modulo
    size.
    """

    def __init__(self, channels, alpha, warmup, window, **common):
        super().__init__(channels, alpha, **common)
        self.warmup = warmup
        self.size = window
        self.psi2s = {}
        self.lambdas = {}

    def last(self, values, number, own):
        """The values of the steps before step ``number``, and its own."""
        first = number - self.size + 1
        return [values[n] for n in range(first, number)] + [own]

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


class MovingAverageOracle(_WindowOracle):
    """MABN: Yan et al. 2020, without the centralization of weights."""

    def __init__(self, channels, alpha=0.98, warmup=0, window=16, **common):
        super().__init__(channels, alpha, warmup, window, **common)

    def _normalize(self, x, real):
        number = self.count + 1
        own = mean_over(x**2, real)
        psi2 = own
        if not self.early(number):
            psi2 = np.mean(self.last(self.psi2s, number, own), axis=0)
        root = np.sqrt(psi2 + self.eps)
        r = self.ratio(number, root)
        z = x / root
        return r * z, SimpleNamespace(number=number, own=own, psi2=psi2, root=root, r=r, z=z)

    def _input_gradient(self, dxhat, ctx):
        saved = ctx.saved
        g = dxhat * ctx.saved.r
        saved.lambda_ = average = mean_over(g * saved.z, ctx.real)
        if not self.early(saved.number):
            average = np.mean(self.last(self.lambdas, saved.number, saved.lambda_), axis=0)
        along = ctx.real[:, None] * saved.z * average
        return (g - along) / saved.root

    def _update(self, dxhat, ctx):
        self.count += 1
        self.psi2s[self.count] = ctx.saved.own
        self.lambdas[self.count] = ctx.saved.lambda_
        self.psi2 = self.alpha * self.psi2 + (1 - self.alpha) * ctx.saved.psi2


class UnifiedOracle(_WindowOracle):
    """UN: Yang et al. 2022; ``release``: padding counts everywhere, and r is in the gradient of
    the weight.
    """

    def __init__(
        self,
        channels,
        alpha=0.9,
        alpha_bwd=0.9,
        warmup=0,
        window=4,
        filtration=False,
        release=False,
        **common,
    ):
        super().__init__(channels, alpha, warmup, window, **common)
        self.alpha_bwd = alpha_bwd
        self.filtration = filtration
        self.release = release
        self.nu = np.zeros(channels)
        self.skipped = []

    def _skip(self, number, own):
        if self.size == 1:
            return True
        if not self.filtration or self.early(number):
            return False
        bound = np.var(np.sqrt(self.psi2_window), ddof=1) * self.size
        window = np.array(self.last(self.psi2s, number, own))
        gap = window.mean(0) - self.geometric_mean(window)
        return bool((gap > bound).any())

    def geometric_mean(self, window):
        return np.prod(window, axis=0) ** (1 / self.size)

    def _normalize(self, x, real):
        number = self.count + 1
        counted = np.ones_like(real) if self.release else real
        own = mean_over(x**2, counted)
        skip = self._skip(number, own)
        early = self.early(number) or skip
        psi2 = own
        if not early:
            psi2 = self.geometric_mean(self.last(self.psi2s, number, own))
        root = np.sqrt(psi2 + self.eps)
        r = np.ones(self.channels) if skip else self.ratio(number, root)
        saved = SimpleNamespace(
            number=number, own=own, skip=skip, early=early, psi2=psi2, root=root, r=r
        )
        saved.counted = counted
        saved.nu = self.nu
        return x / root, saved

    def _input_gradient(self, dxhat, ctx):
        saved = ctx.saved
        g = dxhat * ctx.saved.r
        saved.lambda_ = saved.average = mean_over(g * ctx.xhat, saved.counted)
        if not saved.early:
            saved.average = np.mean(self.last(self.lambdas, saved.number, saved.lambda_), axis=0)
        nu = saved.lambda_
        if not saved.skip:
            nu = self.alpha_bwd * saved.nu + (1 - self.alpha_bwd) * saved.average
        along = saved.counted[:, None] * ctx.xhat * nu
        return (g - along) / saved.root

    def backward(self, dy, ctx):
        dx, dweight, dbias = super().backward(dy, ctx)
        if self.release:
            dweight = dweight * ctx.saved.r
        return dx, dweight, dbias

    def _update(self, dxhat, ctx):
        saved = ctx.saved
        self.count += 1
        self.skipped.append(saved.skip)
        self.psi2s[self.count] = self.psi2 if saved.skip else saved.own
        self.lambdas[self.count] = self.nu if saved.skip else saved.lambda_
        self.psi2 = self.alpha * self.psi2 + (1 - self.alpha) * saved.psi2
        self.nu = self.alpha_bwd * self.nu + (1 - self.alpha_bwd) * saved.average
