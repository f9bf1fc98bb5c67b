"""An implementation of the operators against the reference in float64, over the samples of ``pn
check``.
"""

import inspect

import torch
from torch import Tensor

from pn_fairseq import kernels
from pn_fairseq.kernels.first_use import results_of, samples

EPS = 1e-5

#: Largest relative error: of sums and vectors in float32, and one unit in the last place of each
#: type.
CLOSE = 2e-6
ULP = {torch.float64: 1e-13, torch.float32: CLOSE, torch.float16: 2**-10, torch.bfloat16: 2**-7}


def largest(values: Tensor) -> float:
    values = values.detach()[values.isfinite()].abs().double()
    return values.max().item() if len(values) else 0.0


def terms_of(name: str, arguments: tuple) -> tuple[float, ...]:
    """Of each result the size of the terms that may cancel in it; 0: of the results that have none.
    Behind the results are the arguments that the operator changes.
    """
    x = arguments[0]  # or dy
    total, size = 4 * largest(x) * max(x.shape[:-1].numel(), 1) ** 0.5, 4 * largest(x)
    if name in ("moments", "batch_normalize"):
        *_, groups, _, centered = arguments
        terms = 0.0 if not centered else 1.0 if groups else largest(x)
        if name == "moments":
            return (terms,) * 4
        steep = EPS**-0.5 if x.shape[:-1].numel() == 1 else 4.0  # y = (h - mean) / D
        return steep * terms, *(terms,) * 4
    if name == "gradient_sums":
        return total, total
    if name == "gradient":
        *_, inv_rms, _, _, sums = arguments
        steep = size * max(largest(inv_rms), 1.0)
        return (max(steep, total) if sums else steep,) * 3
    if name in ("power_step_", "batch_step_"):
        inv_rms = arguments[7 if name == "power_step_" else 8]
        return max(total, size * max(largest(inv_rms), 1.0)), total, 0.0, total, 0.0, 0.0
    if name == "standardize_gradient":
        return size * largest(arguments[3][1]), total
    if name == "squash_gradient":
        return 0.0, total, 4 * float((x.double() * arguments[1].double()).norm())
    return (0.0,) * 5


def assert_close(
    actual: Tensor, expected: Tensor, what: str, terms: float = 0.0, ulp: float | None = None
):
    """Half types element by element, others relative to the largest value; ``terms``: what was
    added up to it.
    """
    assert actual.shape == expected.shape, (
        f"{what}: {tuple(actual.shape)} in place of {tuple(expected.shape)}"
    )
    if not actual.is_floating_point():
        assert torch.equal(actual, expected), what
        return
    wide, expected, finite = (
        actual.double(),
        expected.double(),
        expected.to(actual.dtype).isfinite(),
    )
    assert torch.equal(finite, wide.isfinite()), f"{what}: not finite in other places"
    ulp, size = ulp or ULP[actual.dtype], max(largest(expected), terms, 1e-30)
    half = actual.dtype in (torch.float16, torch.bfloat16)
    allowed = ulp * expected.abs() + CLOSE * size if half else torch.full_like(expected, ulp * size)
    error = (wide - expected).abs() - allowed
    assert (error[finite] <= 0).all(), (
        f"{what}: off by {largest(error):.2e} more than {allowed.max():.2e}"
    )


def check(name: str, *arguments) -> tuple[Tensor, ...]:
    """Call an operator, and compare its results and their types with the reference's, and what
    it changes.
    """
    wide = [
        value.double() if isinstance(value, Tensor) and value.is_floating_point() else value
        for value in arguments
    ]
    results, reference = (
        results_of(getattr(torch.ops.pn_fairseq, name), name, arguments),
        kernels.OPERATORS[name],
    )
    expected, types = results_of(reference, name, wide), results_of(reference, name, arguments)
    assert [one.dtype for one in results] == [other.dtype for other in types], name
    changed = sum(arguments[place] is not None for place in kernels.CHANGED[name])
    for number, (one, other, terms) in enumerate(
        zip(results, expected, terms_of(name, arguments), strict=False)
    ):
        # float32, also of a float64 batch
        of_state = CLOSE if number >= len(results) - changed else None
        assert_close(one, other, f"{name}, result {number}", terms, of_state)
        assert one.is_contiguous(), f"{name}, result {number}"
    return results


def apart(values: Tensor) -> Tensor:
    """The same tokens (A, B, C), in memory apart from each other and in the order (B, A, C); or
    their mask (A, B).
    """
    if values.dim() == 2:
        return apart(values.unsqueeze(-1))[..., 0]
    filling = torch.nan if values.is_floating_point() else True
    wide = values.new_full((values.size(1), values.size(0), values.size(2) + 3), filling).transpose(
        0, 1
    )
    wide[..., 1:-2] = values
    return wide[..., 1:-2]


def moved(*places: int, masks: bool = False):
    """The tokens (N, C) become (A, B, C), and those at ``places`` of the arguments lie apart; or
    the ``masks``.
    """

    def change(arguments: list, count: int, channels: int) -> list:
        axes = (count // 2, 2) if count % 2 == 0 else (count, 1)
        for place, value in enumerate(arguments):
            if isinstance(value, Tensor) and (
                value.dtype == torch.bool or value.shape[-2:-1] == (count,)
            ):
                value = value.unflatten(0 if value.dim() < 3 else 1, axes)
                lies_apart = masks if value.dtype == torch.bool else place in places
                fits = value.shape in (axes, (*axes, channels))
                arguments[place] = apart(value) if lies_apart and fits else value
        return arguments

    return change


def dy_of_a_sum(arguments: list, count: int, channels: int) -> list:
    if getattr(arguments[1], "shape", ()) == (count, channels):  # behind dy comes x
        arguments[0] = torch.ones((), dtype=arguments[0].dtype, device=arguments[0].device).expand(
            count, channels
        )
    return arguments


#: Vectors over channels that may have any type in all operators; "mean" and "moment" are given
#: statistics in some.
VECTORS = ("weight", "bias", "nu", "offset", "used_psi2")


def with_vectors_in_bfloat16(name: str, arguments: tuple) -> list:
    vectors = VECTORS if kernels.CHANGED[name] else (*VECTORS, "mean", "moment")
    names = list(inspect.signature(kernels.OPERATORS[name]).parameters)[: len(arguments)]
    result = list(arguments)
    for place, argument in enumerate(names):
        if (
            argument in vectors
            and place not in kernels.CHANGED[name]
            and arguments[place] is not None
        ):
            result[place] = arguments[place].bfloat16()
    return result


def all_padding(arguments: list, count: int, channels: int) -> list:
    return [
        torch.ones_like(value) if getattr(value, "dtype", 0) == torch.bool else value
        for value in arguments
    ]


#: What differs from the samples.
CHANGES = {
    "nothing": lambda arguments, count, channels: arguments,
    "vectors in bfloat16": lambda arguments, count, channels: arguments,  # in check_samples
    "nothing but padding": all_padding,
    "x or dy apart": moved(0),
    "x apart and not dy": moved(1),
    "x and dy apart": moved(0, 1),
    "mask apart": moved(masks=True),
    "all apart": moved(0, 1, masks=True),
    "dy of a sum": dy_of_a_sum,
}


def check_samples(
    tokens: int, channels: int, groups: int, dtype, device="cpu", change="nothing"
) -> None:
    for name, arguments in samples(dtype, torch.device(device), [(tokens, channels, groups)]):
        if change == "vectors in bfloat16":
            arguments = with_vectors_in_bfloat16(name, arguments)
        elif arguments[0].dim() > 1:
            arguments = CHANGES[change](list(arguments), tokens, channels)
        check(name, *arguments)


def check_faults(channels: int, device: str) -> None:
    """Neither a number that is not finite nor a batch without a token moves the state;
    diagnostics tell the first.
    """
    moment, number = torch.ones(channels, device=device), torch.tensor(3, device=device)
    noted = torch.zeros(4, device=device)
    faulty = torch.ones(2, channels, device=device)
    faulty[1, -1] = torch.nan
    infinite = moment.clone()
    infinite[0] = torch.inf
    fine = torch.ones_like(faulty)
    cases = (
        (faulty, 7.0, moment * 2, 1),
        (fine, 0.0, moment * 2, 0),
        (fine, 7.0, infinite, 1),
        (faulty, 0.0, moment, 0),
    )
    for products, tokens, batch_moment, faults in cases:
        count = torch.tensor(tokens, device=device)
        batch = batch_moment, moment * 3, products, count
        used = moment * 0.01
        for after in (
            check("running_average_", moment, moment, number, noted, *batch, 0.9, False),
            check(
                "power_update_",
                moment,
                moment,
                number,
                noted,
                batch[0],
                used,
                *batch[2:],
                EPS,
                0,
                0.9,
                0.95,
                True,
            ),
        ):
            assert torch.equal(after[0], moment) and torch.equal(after[1], moment) and after[2] == 3
            assert after[3][:2].tolist() == [faults, 0]
    # a token has no unbiased variance
    alone = moment * 2, moment * 3, fine, torch.tensor(1.0, device=device)
    after = check("running_average_", moment, moment, number, noted, *alone, 0.9, True)
    assert (
        torch.equal(after[0], moment)
        and torch.equal(after[1], moment)
        and after[2] == 3
        and after[3][0] == 1
    )
