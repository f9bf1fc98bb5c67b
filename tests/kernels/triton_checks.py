"""Triton's operators against the reference in float64; for the interpreter and for a GPU."""

from dataclasses import dataclass

import torch
from torch import Tensor

from pn_fairseq import kernels
from pn_fairseq.kernels import triton_ops

EPS = 1e-5

#: Largest relative error: of sums and vectors in float32, and one unit in the last place of each type.
CLOSE = 2e-6
ULP = {torch.float64: 1e-13, torch.float32: CLOSE, torch.float16: 2**-10, torch.bfloat16: 2**-7}


@dataclass
class Case:
    """Activations (tokens, C) and vectors (C,) for one call. ``parameters``: type of weight and bias; None: none."""

    shape: tuple[int, int]
    groups: int
    dtype: torch.dtype = torch.float32
    masked: bool = True
    parameters: torch.dtype | None = torch.float32
    device: str = "cpu"
    seed: int = 0

    def __post_init__(self):
        generator = torch.Generator(self.device).manual_seed(self.seed)

        def draw(*shape):
            return torch.randn(*shape, device=self.device, generator=generator)

        tokens, channels = self.shape
        self.x, self.dy = (draw(*self.shape) * 2 + 0.5).to(self.dtype), (draw(*self.shape) + 0.1).to(self.dtype)
        self.padding = draw(tokens) < -0.5 if self.masked else None
        self.weight, self.bias = (
            None if self.parameters is None else draw(channels).to(self.parameters) for _ in range(2)
        )
        self.mean, self.moment = draw(channels), draw(channels).square() + 0.5
        self.nu, self.offset = draw(channels), draw(channels)


def largest(values: Tensor) -> float:
    values = values.detach()[values.isfinite()].abs().double()
    return values.max().item() if len(values) else 0.0


def assert_close(actual: Tensor, expected: Tensor, what: str, terms: float = 0.0, tolerance: float | None = None):
    """Half types element by element, others relative to the largest value; ``terms``: what was added up to it.

    What is not finite has to be so in the same places.
    """
    assert actual.shape == expected.shape, f"{what}: {tuple(actual.shape)} in place of {tuple(expected.shape)}"
    if not actual.is_floating_point():
        assert torch.equal(actual, expected), what
        return
    wide, expected = actual.double(), expected.double()
    finite = expected.isfinite()
    assert torch.equal(finite, wide.isfinite()), f"{what}: not finite in other places"
    ulp = tolerance or ULP[actual.dtype]
    size = max(largest(expected), terms, 1e-30)
    half = actual.dtype in (torch.float16, torch.bfloat16)
    allowed = ulp * expected.abs() + CLOSE * size if half else torch.full_like(expected, ulp * size)
    error = (wide - expected).abs() - allowed
    assert (error[finite] <= 0).all(), f"{what}: off by {largest(error):.2e} more than {allowed.max():.2e}"


def check(
    name: str, *args, terms: float | tuple[float, ...] = 0.0, tolerance: float | None = None
) -> tuple[Tensor, ...]:
    """Call an operator, and compare its results and their types with the reference's; ``terms`` of all, or of each."""
    reference = kernels.OPERATORS[name]
    wide = [arg.double() if isinstance(arg, Tensor) and arg.is_floating_point() else arg for arg in args]

    def call(function, given) -> tuple[Tensor, ...]:
        found = function(*given)
        return (found,) if isinstance(found, Tensor) else found

    results = call(getattr(triton_ops, name), args)
    expected, types = call(reference, wide), call(reference, args)
    each = terms if isinstance(terms, tuple) else (terms,) * len(results)
    for number, (one, other, added) in enumerate(zip(results, expected, each, strict=True)):
        assert_close(one, other, f"{name}, result {number}", added, tolerance)
        assert one.is_contiguous(), f"{name}, result {number}"
    assert [one.dtype for one in results] == [other.dtype for other in types], name
    return results


def check_tokens(case: Case) -> None:
    """All operators over tokens, as the norms call them."""
    x, dy, padding, weight, mean, moment = case.x, case.dy, case.padding, case.weight, case.mean, case.moment
    rest = case.groups, EPS
    _, inv_rms, _, _ = check("normalize", x, weight, case.bias, None, moment, padding, None, *rest, True)  # PN
    check("normalize", x, weight, case.bias, mean, moment, None, inv_rms, *rest, False)  # BN
    check("normalize", x, *[None] * 6, *rest, False)  # only layer-scale
    check("moments", x, padding, *rest, False)
    check("moments", x, padding, *rest, True, terms=largest(x) if case.groups == 0 else 1.0)
    steep = 4 * largest(dy) * max(largest(inv_rms), 1.0)
    sums = 4 * largest(dy) * max(case.shape[0], 1) ** 0.5
    check("gradient_sums", dy, x, padding, weight, mean, moment, inv_rms, *rest, terms=sums)
    arguments = dy, x, padding, weight, None, moment, case.nu, None, inv_rms, *rest, True  # PN
    check("gradient", *arguments, terms=max(steep, sums))
    arguments = dy, x, padding, weight, mean, moment, case.nu, case.offset, inv_rms, *rest, False  # BN
    check("gradient", *arguments, terms=steep)
    check("gradient", dy, x, None, *[None] * 5, inv_rms, *rest, False, terms=steep)  # only layer-scale
    if padding is not None:
        check_unused_tokens(case, steep, sums)
    check_tokens_by_themselves(case)


def check_unused_tokens(case: Case, steep: float, sums: float) -> None:
    """NaN in padding, whose dy is 0."""
    unused = case.padding.unsqueeze(-1)
    x, dy = case.x.masked_fill(unused, float("nan")), case.dy.masked_fill(unused, 0.0)
    weight, groups = case.weight, case.groups
    inv_rms = triton_ops.moments(x, case.padding, groups, EPS, False)[0]
    vectors = weight, None, case.moment
    for arguments in ((case.padding, *vectors, case.nu), (None, *vectors, None)):
        found = check("gradient", dy, x, *arguments, None, inv_rms, groups, EPS, True, terms=max(steep, sums))
        assert all(values.isfinite().all() for values in found)
    divisor, curve, through = PER_TOKEN["gn"]
    _, stats = triton_ops.standardize(x, weight, None, max(groups, 1), *divisor, *curve)
    arguments = dy, x, weight, stats, max(groups, 1), *curve, *through, True
    assert all(values.isfinite().all() for values in triton_ops.standardize_gradient(*arguments))
    assert all(
        values.isfinite().all() for values in triton_ops.squash_gradient(dy, x, weight, case.moment[:1], None, False)
    )


#: Of ``standardize``, and of its gradient: which norm, the divisor, the curve, what the gradient goes through.
PER_TOKEN = {
    "gn": ((True, 1.0, EPS, 0.0, 0.0), (1.0, 0.0), (True, True)),
    "ada": ((True, 1.25, 0.0, 1e-3, 0.0), (2.0, -0.2), (False, True)),
    "sn": ((False, 12.0, 0.0, 0.0, 6.0), (1.0, 0.0), (True, False)),  # some tokens are below the bound
}


def check_tokens_by_themselves(case: Case) -> None:
    """The operators of norms without statistics of the batch, with and without what may be left out."""
    x, dy, weight, groups = case.x, case.dy, case.weight, max(case.groups, 1)
    total = 4 * largest(dy) * max(len(x), 1) ** 0.5
    for name, (divisor, curve, through) in PER_TOKEN.items():
        sums = name != "ada"
        given = (weight, case.bias) if sums else (None, None)
        _, stats = check("standardize", x, *given, groups, *divisor, *curve)
        arguments = dy, x, given[0], stats, groups, *curve, *through, sums
        check("standardize_gradient", *arguments, terms=(4 * largest(dy) * largest(stats[1]), total))
    for erf, shift in ((True, case.nu[:1]), (False, None)):
        scalars = case.moment[:1], shift, erf
        check("squash", x, weight, case.bias, *scalars)
        of_all = 4 * float((dy.double() * x.double()).norm())
        check("squash_gradient", dy, x, weight, *scalars, terms=(0.0, total, of_all))


def check_state(channels: int, device: str = "cpu", **changed) -> None:
    """The operators of the state; ``changed``: what takes the place of an argument of both."""
    case = Case((3, channels), 0, device=device)
    products = torch.stack([case.nu, case.offset])
    for acc in (torch.float32, torch.float64):
        given = {
            "moment": case.moment,
            "mean": case.mean,
            "num_batches": torch.tensor(3, device=device),
            "batch_moment": case.moment.to(acc) * 2,
            "batch_mean": case.offset.to(acc),
            "products": products.to(acc),
            "count": torch.tensor(11.0, device=device, dtype=acc),
            "warmup": 0,
        } | {
            name: value.to(acc) if isinstance(value, Tensor) and value.is_floating_point() else value
            for name, value in changed.items()
        }
        check("running_average", *given.values(), 0.9, tolerance=CLOSE)
        given["mean"] = given["batch_mean"] = None
        check("running_average", *given.values(), 0.9, tolerance=CLOSE)
        used = case.moment.to(acc) if given["warmup"] == 0 else given["batch_moment"]
        state = case.moment, case.nu, given["num_batches"], given["batch_moment"], used
        rest = given["products"], given["count"], EPS, given["warmup"], 0.9, 0.95
        check("power_update", *state, *rest, tolerance=CLOSE)
