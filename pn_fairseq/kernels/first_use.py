"""The first use of a GPU: each operator is compared with the reference once, before its results
are used.
"""

import hashlib
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from types import ModuleType

import torch
from torch import Tensor

from pn_fairseq.kernels.ops import CHANGED, OPERATORS
from pn_fairseq.kernels.reference import acc_dtype

#: Largest difference that is allowed, relative to the largest value of a result: sums in another
#: order, one rounding.
TOLERANCE = {
    torch.float64: 1e-11,
    torch.float32: 2e-5,
    torch.bfloat16: 2.0**-7,
    torch.float16: 2.0**-10,
}

#: Tokens, channels and layer-scale groups: a translation model's, and numbers that no vector width
#: divides.
SHAPES = ((96, 512, 8), (37, 67, 0))


def samples(
    dtype: torch.dtype, device: torch.device, shapes: Iterable[tuple[int, int, int]] = SHAPES
) -> Iterator[tuple[str, tuple]]:
    """Arguments of every operator, with and without what may be left out."""
    # Whatever defaults the caller has set.
    like = {"generator": torch.Generator().manual_seed(0), "device": "cpu", "dtype": torch.float32}
    for tokens, channels, groups in shapes:
        x, dy = torch.randn((2, tokens, channels), **like).to(device, dtype)
        padding = (torch.rand(tokens, **like) < 0.2).to(device)
        weight, bias, mean, moment, nu, offset = (torch.rand((6, channels), **like) + 0.5).to(
            device
        )
        inv_rms = OPERATORS["moments"](x, None, groups, 1e-5, False)[0]
        acc = acc_dtype(x)
        count, number = torch.tensor(7.0, dtype=acc, device=device), torch.tensor(3, device=device)
        scale, diagnostics = torch.full((1,), 8.0, device=device), torch.zeros(4, device=device)
        # the diagnostics are float32, and compared with float64's tolerance
        if acc == torch.float64:
            diagnostics = None
        products = torch.randn((2, channels), **like).to(device, acc)
        batch = (moment.to(acc), mean.to(acc), products, count)
        for mask, center, loss_scale, noted in (
            (padding, mean, scale, diagnostics),
            (None, None, None, None),
        ):
            yield "normalize", (x, weight, bias, None, moment, mask, None, groups, 1e-5, True)
            for centered in (False, True):
                yield "moments", (x, mask, groups, 1e-5, centered)
            vectors = (weight, mean, moment)
            yield (
                "gradient",
                (dy, x, mask, weight, None, moment, nu, *[None] * 3, inv_rms, groups, 1e-5, True),
            )
            yield (
                "gradient",
                (dy, x, mask, *vectors, nu, offset, count, scale, inv_rms, groups, 1e-5, False),
            )
            yield "gradient_sums", (dy, x, mask, *vectors, loss_scale, inv_rms, groups, 1e-5)
            state, of_batch = (moment, nu, number, noted), (batch[0], count)
            of_forward = (weight, moment, nu, loss_scale, inv_rms)
            yield (
                "power_step_",
                (dy, x, mask, *of_forward, *state, *of_batch, groups, 1e-5, 0, 0.9, 0.9),
            )
            centered = center is not None
            yield "batch_normalize", (x, weight, bias, mask, groups, 1e-5, centered)
            state, of_forward = (
                (moment, center, number, noted),
                (weight, center, batch[0], count, loss_scale, inv_rms),
            )
            yield "batch_step_", (dy, x, mask, *of_forward, *state, groups, 1e-5, 0.9, centered)
        yield "normalize", (x, None, None, mean, moment, None, inv_rms, groups, 1e-5, False)
        yield "normalize", (x, *[None] * 6, groups, 1e-5, False)  # layer-scale by itself
        yield "gradient", (dy, x, *[None] * 8, inv_rms, groups, 1e-5, False)
        spans = max(groups, 1)
        for divisor in (
            (True, 1.0, 1e-5, 0.0, 0.0),
            (True, 1.1, 0.0, 1e-5, 0.0),
            # of which half the tokens are below the bound
            (False, float(channels), 0.0, 0.0, channels**0.5),
        ):
            stats = OPERATORS["standardize"](x, None, None, spans, *divisor, 1.0, 0.0)[1]
            yield "standardize", (x, weight, bias, spans, *divisor, 2.0, -0.2)
            yield "standardize", (x, None, None, spans, *divisor, 1.0, 0.0)
            for through in ((True, True), (False, True), (True, False)):
                yield (
                    "standardize_gradient",
                    (dy, x, weight, stats, spans, 2.0, -0.2, *through, True),
                )
                yield "standardize_gradient", (dy, x, None, stats, spans, 1.0, 0.0, *through, False)
        for erf, shift in ((True, bias[:1]), (False, None)):
            yield "squash", (x, weight, bias, nu[:1], shift, erf)
            yield "squash_gradient", (dy, x, weight, nu[:1], shift, erf)
        windows = torch.rand((2, 2, channels), **like).to(device) + 0.5
        for geometric, filtration, seen in ((True, True, nu), (False, False, None)):
            state = windows[0], moment, number, count.long() * 200 if filtration else None
            yield (
                "window_statistics",
                (*state, batch[0] * 1.5, weight, 2, 1000, 1e-5, geometric, filtration),
            )
            state = moment, seen, windows[0], windows[1], number, diagnostics
            marks = torch.tensor([False, channels % 2 == 1], device=device)
            of_step = seen, windows[1], number, batch[0], batch[1], marks, products, count, count
            yield "window_update_", (*state, *of_step, 0.9, 0.8, geometric)
        state = moment, mean, number, diagnostics
        yield "running_average_", (*state, *batch, 0.9, True)
        yield (
            "running_average_",
            (moment, None, number, None, batch[0], None, *batch[2:], 0.9, False),
        )
        for warmup, has_gradient in ((0, True), (9, True), (0, False)):
            state = moment, nu, number, diagnostics if warmup else None
            of_batch = batch[0], moment, products, count
            yield "power_update_", (*state, *of_batch, 1e-5, warmup, 0.9, 0.9, has_gradient)


def results_of(function: Callable, name: str, arguments: Sequence) -> tuple[Tensor, ...]:
    """What ``function``, an implementation of the operator ``name``, returns, and what it makes of
    the arguments that it changes: of copies, so that those that are given stay as they are.
    """
    given = list(arguments)
    for place in CHANGED[name]:
        given[place] = None if given[place] is None else given[place].clone()
    results = function(*given)
    if isinstance(results, Tensor):
        results = (results,)
    changed = [given[place] for place in CHANGED[name]]
    return *(results or ()), *(value for value in changed if value is not None)


def difference(result: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> float:
    """The largest difference of two results, relative to the largest value; infinite if shape or
    type differ.
    """
    worst = 0.0
    for ours, wanted in zip(result, expected, strict=True):
        if ours.shape != wanted.shape or ours.dtype != wanted.dtype:
            return float("inf")
        if wanted.numel():
            error = (
                ours.double() - wanted.double()
            ).abs().max() / wanted.double().abs().max().clamp(min=1e-30)
            worst = max(worst, float(error.nan_to_num(float("inf"))))
    return worst


def first_use(module: ModuleType, dtype: torch.dtype, device: torch.device) -> str:
    """Which operators of ``module`` give wrong results on ``device``, in one line; empty if none
    does.

    Each operator is compared in one type: most of the time is spent on compiling them. It is the
    second result that is compared: its kernels are launched as all later ones are. A correct result
    is noted in a file, and not compared again until the GPU, its driver, torch, Triton or the
    kernels change.
    """
    passed = cache_file(module, dtype, device)
    if passed.exists():
        return ""
    first_arguments: dict[str, tuple] = {}
    for name, arguments in samples(dtype, device):
        first_arguments.setdefault(name, arguments)
    off = []
    for name, arguments in first_arguments.items():
        results_of(getattr(module, name), name, arguments)
        expected = results_of(OPERATORS[name], name, arguments)
        error = difference(results_of(getattr(module, name), name, arguments), expected)
        if error > TOLERANCE[dtype]:
            off.append(f"{name} by {error:.0e}")
    if off:
        return f"differs from it in {str(dtype)[6:]}: {', '.join(off)} (pn check shows more)"
    try:
        passed.parent.mkdir(parents=True, exist_ok=True)
        passed.touch()
    except OSError:  # the next process compares again
        pass
    return ""


def cache_file(module: ModuleType, dtype: torch.dtype, device: torch.device) -> Path:
    """The file that says that nothing is off."""
    folder = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "pn_fairseq")
    sources = [path.read_bytes() for path in sorted(Path(__file__).parent.glob("triton_*.py"))]
    versions = [
        torch.__version__,
        module.triton.__version__,
        dtype,
        torch.cuda.get_device_name(device),
        driver(),
    ]
    return (
        folder
        / hashlib.sha256(
            b"\n".join([*sources, *(str(version).encode() for version in versions)])
        ).hexdigest()[:16]
    )


def driver() -> str:
    """The version of the GPU's driver; of the CUDA that it supports where the system does not
    tell.
    """
    try:
        return Path("/proc/driver/nvidia/version").read_text("utf-8")
    except OSError:
        return (
            str(torch._C._cuda_getDriverVersion())
            if hasattr(torch._C, "_cuda_getDriverVersion")
            else ""
        )
