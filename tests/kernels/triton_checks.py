"""What Triton's kernels have to compute, by a float64 formula of its own; for the interpreter and for a GPU."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from pn_fairseq.kernels import triton_ops

EPS, ALPHA = 1e-5, 0.9

#: Relative error that is allowed: of float32 sums and vectors, and one unit in the last place of each type.
CLOSE = 1e-6
ULP = {torch.float64: 1e-13, torch.float32: CLOSE, torch.float16: 2**-10, torch.bfloat16: 2**-7}


@dataclass
class Case:
    """Activations and state for one call. ``layout`` is what the strides of x and dy are like."""

    shape: tuple[int, ...]
    groups: int
    dtype: torch.dtype = torch.float32
    masked: bool = True
    affine: bool = True
    layout: str = "contiguous"
    warmup: int = 0
    steps: int = 3
    device: str = "cpu"
    seed: int = 0
    tensors: dict = field(default_factory=dict, repr=False)

    def __post_init__(self):
        generator = torch.Generator(self.device).manual_seed(self.seed)

        def draw(*shape):
            return torch.randn(*shape, device=self.device, generator=generator)

        channels = self.shape[-1]
        self.x = self._laid_out(draw(*self.shape) * 2 + 0.5)
        self.dy = self._laid_out(draw(*self.shape) + 0.1)
        if self.layout == "expanded dy":  # what the gradient of a sum is
            self.dy = draw(1).to(self.dtype).expand(self.shape)
        self.mask = draw(*self.shape[-2::-1]) < -0.5 if self.masked else None
        self.weight, self.bias = (draw(channels), draw(channels)) if self.affine else (None, None)
        self.mean = draw(channels)
        self.psi2, self.nu = draw(channels).square() + 0.5, draw(channels)
        self.count = torch.tensor(self.steps, device=self.device)

    def _laid_out(self, values: Tensor) -> Tensor:
        values = values.to(self.dtype)
        if self.layout == "batch first":
            return values.transpose(0, 1).contiguous().transpose(0, 1)
        if self.layout == "slice":
            wide = torch.full((*values.shape[:-1], values.size(-1) + 5), float("nan"), device=self.device).to(
                self.dtype
            )
            wide[..., 2:-3] = values
            return wide[..., 2:-3]
        if self.layout == "channels first":
            return values.transpose(-1, 0).contiguous().transpose(-1, 0)
        return values

    @property
    def real(self) -> Tensor:
        tokens = self.shape[:-1]
        return (
            torch.ones(tokens, dtype=torch.bool, device=self.device)
            if self.mask is None
            else ~self.mask.transpose(0, -1)
        )


def scaled(x: Tensor, groups: int) -> Tensor:
    if groups == 0:
        return x
    parts = [part * (part.pow(2).mean(-1, keepdim=True) + EPS) ** -0.5 for part in x.chunk(groups, -1)]
    return torch.cat(parts, -1)


def largest(values: Tensor | None) -> float:
    values = [] if values is None else values.detach()[values.isfinite()].abs().double()
    return values.max().item() if len(values) else 0.0


def assert_close(actual: Tensor, expected: Tensor, tolerance: float, what: str, among: Tensor | None = None) -> None:
    """Largest difference relative to the largest value, or to what it was left of when terms of the size of ``among``
    cancelled; and the same values that are not finite."""
    assert actual.shape == expected.shape, f"{what}: {tuple(actual.shape)} in place of {tuple(expected.shape)}"
    actual, expected = actual.double(), expected.double()
    finite = expected.isfinite()
    assert torch.equal(finite, actual.isfinite()), f"{what}: not finite in other places"
    if not finite.any():
        return
    error = largest((actual - expected)[finite]) / max(largest(expected), largest(among), 1e-30)
    assert error <= tolerance, f"{what}: off by {error:.2e}, {tolerance:.2e} is allowed"


def assert_rounded(actual: Tensor, expected: Tensor, what: str, among: Tensor | None = None) -> None:
    """The same, and for half types element by element within one unit in the last place."""
    if actual.dtype in (torch.float32, torch.float64):
        return assert_close(actual, expected, ULP[actual.dtype], what, among)
    assert actual.shape == expected.shape, what
    difference = (actual.double() - expected.double()).abs()
    allowed = ULP[actual.dtype] * expected.double().abs() + CLOSE * max(largest(expected), largest(among))
    assert (difference <= allowed).all(), f"{what}: off by {(difference - allowed).max():.2e} too much"


def check_power(case: Case) -> None:
    """A forward and a backward of PN, with everything that they change."""
    psi2, nu, count = case.psi2.clone(), case.nu.clone(), case.count.clone()
    y, inv_rms, vectors, tally = triton_ops.power_forward(
        case.x, case.mask, case.weight, case.bias, psi2, nu, count, case.groups, EPS, ALPHA, case.warmup, True
    )
    real = case.real
    tokens = int(real.sum())
    x = case.x.double().requires_grad_()
    h = scaled(x, case.groups)
    squares = h.detach()[real].pow(2).sum(0)
    batch = squares / max(tokens, 1)
    before, nu_before = case.psi2.double(), case.nu.double()
    warming_up = case.steps < case.warmup
    used = batch if warming_up and tokens else before
    weight = torch.ones_like(used) if case.weight is None else case.weight.double()
    bias = torch.zeros_like(used) if case.bias is None else case.bias.double()
    x_hat = h.detach() / (used + EPS).sqrt()
    counted = tokens > 0 and bool(batch.isfinite().all())
    share = 1 / (case.steps + 1) if warming_up else 1 - ALPHA
    after = before + share * (batch - before) if counted else before
    close = ULP[case.dtype] if case.dtype == torch.float64 else CLOSE

    assert y.stride() == torch.empty_like(case.x).stride()
    assert_rounded(y, x_hat * weight + bias, "y")
    for name, actual, expected in (
        ("squares", vectors[0], squares),
        ("psi2 under the divisor", vectors[1], used),
        ("psi2 of the batch", vectors[4], batch),
        ("running psi2", psi2, after),
    ):
        assert_close(actual, expected, max(close, CLOSE if actual is psi2 else 0), name)
    assert torch.equal(vectors[2], case.nu.to(vectors.dtype)) and torch.equal(vectors[3], case.psi2.to(vectors.dtype))
    assert tally.tolist() == [tokens, counted, warming_up, case.steps]
    assert count.item() == case.steps + counted

    dx, dweight, dbias, lambda_total = triton_ops.power_backward(
        case.dy, case.x, case.mask, case.weight, inv_rms, vectors, psi2, nu, count, tally, case.groups, EPS, ALPHA, True
    )
    dy = case.dy.double()
    dh = (weight * dy - real.unsqueeze(-1) * nu_before * x_hat) / (used + EPS).sqrt()
    (expected_dx,) = torch.autograd.grad(h, x, dh)
    along = dy * x_hat
    expected_lambda = (weight * along)[real].sum(0)
    gamma = batch / (used + EPS)
    decay = (1 - (1 - ALPHA) * gamma).clamp(min=0)
    finite = bool(gamma.isfinite().all() and expected_lambda.isfinite().all())
    expected_nu = nu_before * decay + (1 - ALPHA) * expected_lambda / max(tokens, 1) if tokens and finite else nu_before

    assert dx.stride() == torch.empty_like(case.x).stride()
    assert_rounded(dx, expected_dx, "dx", dh * largest(inv_rms) if case.groups else None)
    assert_close(lambda_total, expected_lambda, 3 * close, "Lambda")
    assert_close(nu, expected_nu, 3 * CLOSE, "nu")
    if case.affine:
        assert_close(dweight, along.flatten(0, -2).sum(0), 3 * CLOSE, "dweight")
        assert_close(dbias, dy.flatten(0, -2).sum(0), 3 * CLOSE, "dbias")
    else:
        assert dweight.numel() == dbias.numel() == 0
    assert count.item() == (case.steps + counted if finite else case.steps)
    assert tally[1].item() == (counted and finite)
    if not finite:
        assert torch.equal(psi2, case.psi2)


def check_batch(case: Case, centred: bool) -> None:
    """A forward and a backward of BN, or of PN-V, with everything that they change."""
    moment, mean, count = case.psi2.clone(), case.mean.clone() if centred else None, case.count.clone()
    cumulative = case.warmup > 0
    y, inv_rms, vectors, tally = triton_ops.batch_forward(
        case.x, case.mask, case.weight, case.bias, mean, moment, count, case.groups, EPS, ALPHA, cumulative, True
    )
    real = case.real
    tokens = int(real.sum())
    x = case.x.double().requires_grad_()
    h = scaled(x, case.groups)
    centre = h[real].sum(0) / max(tokens, 1) if centred else torch.zeros_like(case.mean, dtype=torch.float64)
    second = (h - centre)[real].pow(2).sum(0) / max(tokens, 1)
    root = (second + EPS).sqrt()
    x_hat = torch.where(real.unsqueeze(-1), (h - centre) / root, (h - centre.detach()) / root.detach())
    weight = torch.ones_like(root).detach() if case.weight is None else case.weight.double()
    bias = torch.zeros_like(weight) if case.bias is None else case.bias.double()
    result = x_hat * weight + bias
    unbiased = second.detach() * tokens / max(tokens - 1, 1) if centred else second.detach()
    finite = bool(centre.isfinite().all() and unbiased.isfinite().all()) and not (centred and tokens == 1)
    counted = tokens > 0 and finite
    share = (1 / (case.steps + 1) if cumulative else 1 - ALPHA) if counted else 0.0
    close = ULP[case.dtype] if case.dtype == torch.float64 else CLOSE

    def moved(before: Tensor, batch: Tensor) -> Tensor:
        return before.double() + share * (batch.detach() - before) if counted else before.double()

    # Where all tokens are alike, what is left of h - mean is divided by sqrt(eps).
    steep = (weight / root).detach()
    terms = (h.detach().abs() + centre.detach().abs()) * steep if centred else None
    assert y.stride() == torch.empty_like(case.x).stride()
    assert_rounded(y, result.detach(), "y", terms)
    assert_close(vectors[0], second.detach(), 3 * close, "moment", among=h[real].pow(2))
    assert torch.equal(vectors[1], case.psi2.to(vectors.dtype))
    assert_close(moment, moved(case.psi2, unbiased), 3 * CLOSE, "running moment", among=h[real].pow(2))
    if centred:
        assert_close(vectors[2], centre.detach(), close, "mean", among=h[real])
        assert torch.equal(vectors[3], case.mean.to(vectors.dtype))
        assert_close(mean, moved(case.mean, centre), 3 * CLOSE, "running mean", among=h[real])
    assert len(vectors) == (4 if centred else 2)
    assert tally.tolist() == [tokens, counted, cumulative, case.steps]
    assert count.item() == case.steps + counted

    state = mean, moment, count
    dx, dweight, dbias, sums = triton_ops.batch_backward(
        case.dy, case.x, case.mask, case.weight, inv_rms, vectors, *state, tally, case.groups, EPS, True
    )
    dy = case.dy.double()
    (expected_dx,) = torch.autograd.grad(result, x, dy)
    along = dy * (h - centre).detach()
    expected = torch.stack([along[real].sum(0), dy[real].sum(0)])
    assert dx.stride() == torch.empty_like(case.x).stride()
    if finite:
        assert_rounded(dx, expected_dx, "dx", dy * steep * max(largest(inv_rms), 1))
    size = along.abs().flatten(0, -2).sum(0)
    assert_close(sums, expected, 3 * close, "sums", among=size)
    if case.affine:
        product = (dy * x_hat).detach().flatten(0, -2).sum(0)
        assert_close(dweight, product, 3 * CLOSE, "dweight", among=size / root.detach())
        assert_close(dbias, dy.flatten(0, -2).sum(0), 3 * CLOSE, "dbias")
    else:
        assert dweight.numel() == dbias.numel() == 0
    kept = bool(expected.isfinite().all())
    assert count.item() == (case.steps + counted if kept else case.steps)
    assert tally[1].item() == (counted and kept)
    if not kept:
        assert torch.equal(moment, case.psi2) and (mean is None or torch.equal(mean, case.mean))


def check_parts(case: Case) -> None:
    """The operators of PN-V, BN and evaluation."""
    close = ULP[case.dtype] if case.dtype == torch.float64 else CLOSE
    real, x = case.real, case.x.double().requires_grad_()
    h = scaled(x, case.groups)
    values = h.detach()
    for centred in (False, True):
        inv_rms, mean, squares, count = triton_ops.moments(case.x, case.mask, case.groups, EPS, centred)
        centre = values[real].sum(0) / max(int(real.sum()), 1) if centred else values.new_zeros(case.shape[-1])
        deviations = (values - centre).pow(2)
        if centred:
            assert_close(mean, centre, close, "mean", among=values)
        else:
            assert mean.numel() == 0
        expected = torch.stack([deviations[real].sum(0), deviations[~real].sum(0)])
        assert_close(squares, expected, 3 * close, f"squares, centred={centred}")
        assert count.item() == int(real.sum())

    mean, moment = case.mean.double(), case.psi2.double()
    weight = torch.ones_like(mean) if case.weight is None else case.weight.double()
    bias = torch.zeros_like(mean) if case.bias is None else case.bias.double()
    for given in (None, inv_rms):
        y, scales = triton_ops.normalize(case.x, case.weight, case.bias, case.mean, case.psi2, given, case.groups, EPS)
        assert_rounded(y, (values - mean) / (moment + EPS).sqrt() * weight + bias, "y")
        assert torch.equal(scales, inv_rms) if given is None else scales.numel() == 0
    alone, _ = triton_ops.normalize(case.x, None, None, None, None, None, case.groups, EPS)
    assert_rounded(alone, values, "layer-scale alone")

    dy = case.dy.double()
    product, slope, offset = dy * (values - mean), case.nu.double(), bias
    sums = torch.stack([torch.stack([product[keep].sum(0), dy[keep].sum(0)]) for keep in (real, ~real)])
    assert_close(
        triton_ops.gradient_sums(case.dy, case.x, case.mask, case.mean, inv_rms, case.groups), sums, 3 * close, "sums"
    )
    for wanted in (False, True):
        dx, found = triton_ops.gradient(
            case.dy, case.x, case.mask, case.weight, case.nu, case.bias, case.mean, inv_rms, case.groups, wanted
        )
        dh = weight * dy - real.unsqueeze(-1) * (slope * (values - mean) + offset)
        assert_rounded(dx, torch.autograd.grad(h, x, dh, retain_graph=True)[0], "dx", dh * max(largest(inv_rms), 1))
        if wanted:
            assert_close(found, sums, 3 * close, "sums with dx")
        else:
            assert found.numel() == 0
    dx, _ = triton_ops.gradient(case.dy, case.x, None, None, None, None, None, inv_rms, case.groups, False)
    assert_rounded(dx, torch.autograd.grad(h, x, dy)[0], "dx of layer-scale alone", dy * max(largest(inv_rms), 1))
