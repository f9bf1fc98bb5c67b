"""An implementation of the operators against the reference in float64, over the samples of ``pn
check``.
"""

import torch
from torch import Tensor

from pn_fairseq.kernels.first_use import results_of, samples
from pn_fairseq.kernels.ops import ARGUMENTS, CHANGED, OPERATORS

OPS = torch.ops.pn_fairseq
EPS = 1e-5

#: What an operator is given where a test says nothing else; an argument that is missing here is
#: None.
DEFAULTS = {"groups": 0, "eps": EPS, "sums": True, "centered": True, "unbiased": True, "warmup": 0}
DEFAULTS |= {"alpha": 0.9, "alpha_fwd": 0.9, "alpha_bwd": 0.9, "has_gradient": True}
DEFAULTS |= {"square_factor": 1.0, "eps_in_root": EPS, "eps_outside": 0.0, "min_divisor": 0.0}
DEFAULTS |= {"gain": 1.0, "gain_slope": 0.0, "through_mean": True, "through_divisor": True}

NAMES = {argument for arguments in ARGUMENTS.values() for argument in arguments}


def call(name: str, module=OPS, **given):
    """Call an operator, of ``module``, with its arguments among those that are ``given``."""
    return getattr(module, name)(*arguments_of(name, **given))


def arguments_of(name: str, **given) -> list:
    assert given.keys() <= NAMES, given.keys() - NAMES
    values = DEFAULTS | given
    return [values.get(argument) for argument in ARGUMENTS[name]]


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
    given = dict(zip(ARGUMENTS[name], arguments, strict=True))
    x = arguments[0]  # or dy
    tokens = x.shape[:-1].numel()
    size = 4 * largest(x)
    total = size * max(tokens, 1) ** 0.5
    if name in ("moments", "batch_normalize"):
        terms = 1.0 if given["groups"] else largest(x)
        if not given["centered"]:
            terms = 0.0
        if name == "moments":
            return (terms,) * 4
        steep = EPS**-0.5 if tokens == 1 else 4.0  # y = (h - mean) / D
        return steep * terms, terms, terms, terms, terms
    if name == "gradient_sums":
        return total, total
    if name in ("gradient", "power_step_", "batch_step_"):
        steep = size * max(largest(given["inv_rms"]), 1.0)
        if name == "gradient":
            return (max(steep, total) if given["sums"] else steep,) * 3
        return max(steep, total), total, 0.0, total, 0.0, 0.0
    if name == "standardize_gradient":
        return size * largest(given["stats"][1]), total
    if name == "squash_gradient":
        return 0.0, total, 4 * float((x.double() * given["x"].double()).norm())
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
    wide = actual.double()
    expected = expected.double()
    finite = expected.to(actual.dtype).isfinite()
    assert torch.equal(finite, wide.isfinite()), f"{what}: not finite in other places"
    ulp = ulp or ULP[actual.dtype]
    size = max(largest(expected), terms, 1e-30)
    allowed = torch.full_like(expected, ulp * size)
    if actual.dtype in (torch.float16, torch.bfloat16):
        allowed = ulp * expected.abs() + CLOSE * size
    error = (wide - expected).abs() - allowed
    assert (error[finite] <= 0).all(), f"{what}: {largest(error):.2e} more off than allowed"


def check(name: str, *arguments) -> tuple[Tensor, ...]:
    """Call an operator, and compare its results and their types with the reference's, and what
    it changes.
    """
    wide = []
    for value in arguments:
        is_floating = isinstance(value, Tensor) and value.is_floating_point()
        wide.append(value.double() if is_floating else value)
    results = results_of(getattr(OPS, name), name, arguments)
    expected = results_of(OPERATORS[name], name, wide)
    types = [value.dtype for value in results_of(OPERATORS[name], name, arguments)]
    assert [value.dtype for value in results] == types, name
    changed = sum(arguments[place] is not None for place in CHANGED[name])
    cancelling = terms_of(name, arguments)
    for number, (result, exact) in enumerate(zip(results, expected, strict=True)):
        # float32, also of a float64 batch
        of_state = CLOSE if number >= len(results) - changed else None
        terms = cancelling[number] if number < len(cancelling) else 0.0
        assert_close(result, exact, f"{name}, result {number}", terms, of_state)
        assert result.is_contiguous(), f"{name}, result {number}"
    return results


def apart(values: Tensor) -> Tensor:
    """The same tokens (A, B, C), in memory apart from each other and in the order (B, A, C); or
    their mask (A, B).
    """
    if values.dim() == 2:
        return apart(values.unsqueeze(-1))[..., 0]
    filling = torch.nan if values.is_floating_point() else True
    tokens, batch, channels = values.shape
    wide = values.new_full((batch, tokens, channels + 3), filling).transpose(0, 1)
    inner = wide[..., 1:-2]
    inner.copy_(values)
    return inner


def moved(*places: int, masks: bool = False):
    """The tokens (N, C) become (A, B, C), and those at ``places`` of the arguments lie apart; or
    the ``masks``.
    """

    def change(arguments: list, count: int, channels: int) -> list:
        axes = (count // 2, 2) if count % 2 == 0 else (count, 1)
        for place, value in enumerate(arguments):
            if not isinstance(value, Tensor):
                continue
            is_mask = value.dtype == torch.bool
            if not is_mask and value.shape[-2:-1] != (count,):
                continue
            value = value.unflatten(0 if value.dim() < 3 else 1, axes)
            lies_apart = masks if is_mask else place in places
            if lies_apart and value.shape in (axes, (*axes, channels)):
                value = apart(value)
            arguments[place] = value
        return arguments

    return change


def dy_of_a_sum(arguments: list, count: int, channels: int) -> list:
    dy = arguments[0]
    if getattr(arguments[1], "shape", ()) == (count, channels):  # behind dy comes x
        arguments[0] = dy.new_ones(()).expand(count, channels)
    return arguments


#: Vectors over channels that may have any type in all operators; "mean" and "moment" are given
#: statistics in some.
VECTORS = ("weight", "bias", "nu", "offset", "used_psi2")


def with_vectors_in_bfloat16(name: str, arguments: tuple) -> list:
    vectors = VECTORS if CHANGED[name] else (*VECTORS, "mean", "moment")
    result = []
    for place, (argument, value) in enumerate(zip(ARGUMENTS[name], arguments, strict=True)):
        is_vector = argument in vectors and place not in CHANGED[name] and value is not None
        result.append(value.bfloat16() if is_vector else value)
    return result


def all_padding(arguments: list, count: int, channels: int) -> list:
    for place, value in enumerate(arguments):
        if getattr(value, "dtype", None) == torch.bool:
            arguments[place] = torch.ones_like(value)
    return arguments


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
    ones = torch.ones(channels, device=device)
    number = torch.tensor(3, device=device)
    state = {"num_batches": number, "diagnostics": torch.zeros(4, device=device)}
    state |= dict.fromkeys(("moment", "mean", "psi2", "nu"), ones)
    fine = torch.ones(2, channels, device=device)
    faulty = fine.clone()
    faulty[1, -1] = torch.nan
    infinite = ones.clone()
    infinite[0] = torch.inf

    def check_unmoved(name: str, faults: int, products, tokens: float, moment, **given) -> None:
        given |= {"batch_moment": moment, "batch_psi2": moment, "products": products}
        given |= {"batch_mean": ones * 3, "used_psi2": ones * 0.01, "alpha_bwd": 0.95}
        given["count"] = torch.tensor(tokens, device=device)
        after = check(name, *arguments_of(name, **state, **given))
        for value in after[:2]:
            assert torch.equal(value, ones)
        assert after[2] == 3 and after[3][:2].tolist() == [faults, 0]

    for name in ("running_average_", "power_update_"):
        check_unmoved(name, 1, faulty, 7.0, ones * 2, unbiased=False)
        check_unmoved(name, 0, fine, 0.0, ones * 2, unbiased=False)
        check_unmoved(name, 1, fine, 7.0, infinite, unbiased=False)
        check_unmoved(name, 0, faulty, 0.0, ones, unbiased=False)
    # a token has no unbiased variance
    check_unmoved("running_average_", 1, fine, 1.0, ones * 2)
