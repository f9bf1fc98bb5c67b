"""The first use of a GPU: before its results are used, each operator is compared with the reference
once.
"""

import hashlib
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from pn_fairseq.kernels.ops import ARGUMENTS, CHANGED, OPERATORS
from pn_fairseq.kernels.reference import acc_dtype

#: Largest allowed difference, relative to the largest value of a result. It covers sums in another
#: order and one rounding.
TOLERANCE = {
    torch.float64: 1e-11,
    torch.float32: 2e-5,
    torch.bfloat16: 2.0**-7,
    torch.float16: 2.0**-10,
}

#: Tokens, channels and layer-scale groups: those of a translation model, and numbers that no vector
#: width divides.
SHAPES = ((96, 512, 8), (37, 67, 0))

#: Arguments that are numbers, vectors in the accumulation dtype, and windows of vectors; other
#: tensors, unless :func:`_values` sets them, are vectors over channels in float32.
SETTINGS = dict(
    eps=1e-5,
    centered=True,
    sums=True,
    alpha=0.9,
    alpha_fwd=0.9,
    alpha_bwd=0.8,
    warmup=0,
    ratio_warmup=1000,
    unbiased=True,
    has_gradient=True,
)
OF_BATCH = ("batch_moment", "batch_mean", "batch_psi2")
WINDOWS = ("psi2_window", "lambda_window", "seen_lambda")


def samples(
    dtype: torch.dtype, device: torch.device, shapes: Iterable[tuple[int, int, int]] = SHAPES
) -> Iterator[tuple[str, tuple]]:
    """Arguments of every operator, with and without the optional ones."""
    for shape in shapes:
        values = _values(dtype, device, *shape)
        for name, changes in (*_of_batches(values), *_of_tokens(values), *_of_state(values)):
            given = values | changes
            yield name, tuple(given[argument] for argument in ARGUMENTS[name])


def _values(dtype, device, tokens: int, channels: int, groups: int) -> dict[str, Any]:
    """Name of an argument -> a value."""
    # independent of the defaults that the caller has set
    like = {"generator": torch.Generator().manual_seed(0), "device": "cpu", "dtype": torch.float32}

    def uniform(*shape: int) -> Tensor:
        return (torch.rand(shape, **like) + 0.5).to(device)

    x, dy = torch.randn((2, tokens, channels), **like).to(device, dtype)
    acc = acc_dtype(x)
    values = {name: uniform(channels) for names in ARGUMENTS.values() for name in names}
    values |= SETTINGS | {"x": x, "dy": dy, "groups": groups}
    values["padding"] = (torch.rand(tokens, **like) < 0.2).to(device)
    values["inv_rms"] = OPERATORS["moments"](x, None, groups, SETTINGS["eps"], False)[0]
    values["loss_scale"] = torch.full((1,), 8.0, device=device)
    values["products"] = torch.randn((2, channels), **like).to(device, acc)
    for name in OF_BATCH:
        values[name] = values[name].to(acc)
    for name in WINDOWS:
        values[name] = uniform(2, channels)
    for name in ("num_batches", "seen_batches"):
        values[name] = torch.tensor(3, device=device)
    for name in ("count", "counted_tokens"):
        values[name] = torch.tensor(7.0, dtype=acc, device=device)
    # diagnostics are float32, but would be compared with float64's tolerance
    values["diagnostics"] = None if acc == torch.float64 else torch.zeros(4, device=device)
    return values


#: The arguments of a call that differ from :func:`_values`.
Calls = Iterator[tuple[str, dict[str, Any]]]


def _of_batches(values: dict) -> Calls:
    """Norms with batch statistics, by passes and by whole steps."""
    of_batch = values["batch_moment"]
    scale = values["loss_scale"]
    for absent in ((), ("padding", "loss_scale", "diagnostics", "running_mean")):
        given = dict.fromkeys(absent)
        yield "normalize", given | {"mean": None, "inv_rms": None}
        yield "moments", given | {"centered": False}
        yield "moments", given
        yield "gradient", given | dict.fromkeys(("mean", "offset", "count", "loss_scale"))
        yield "gradient", given | {"loss_scale": scale, "sums": False}
        yield "gradient_sums", given
        yield "power_step_", given
        yield "batch_normalize", given | {"centered": not absent}
        mean = None if absent else values["mean"]
        yield "batch_step_", given | {"mean": mean, "moment": of_batch, "unbiased": not absent}
    plain = {"padding": None, "weight": None, "bias": None, "sums": False}
    yield "normalize", plain
    nothing = plain | dict.fromkeys(("mean", "moment", "nu", "offset", "count", "loss_scale"))
    yield "normalize", nothing | {"inv_rms": None}  # layer-scale by itself
    yield "gradient", nothing


def _of_tokens(values: dict) -> Calls:
    """Norms that normalize each token by itself."""
    x = values["x"]
    bias = values["bias"]
    channels = x.size(-1)
    groups = max(values["groups"], 1)
    plain = {"groups": groups, "gain": 1.0, "gain_slope": 0.0}
    plain |= {"weight": None, "bias": None, "sums": False}
    curved = {"groups": groups, "gain": 2.0, "gain_slope": -0.2}
    names = ARGUMENTS["standardize"][4:9]
    for divisor in (
        (True, 1.0, 1e-5, 0.0, 0.0),
        (True, 1.1, 0.0, 1e-5, 0.0),
        # half of the tokens are below this bound
        (False, float(channels), 0.0, 0.0, channels**0.5),
    ):
        given = dict(zip(names, divisor, strict=True))
        yield "standardize", given | curved
        yield "standardize", given | plain
        stats = OPERATORS["standardize"](x, None, None, groups, *divisor, 1.0, 0.0)[1]
        for through_mean, through_divisor in ((True, True), (False, True), (True, False)):
            given = dict(stats=stats, through_mean=through_mean, through_divisor=through_divisor)
            yield "standardize_gradient", given | curved
            yield "standardize_gradient", given | plain
    for erf, shift in ((True, bias[:1]), (False, None)):
        given = {"alpha": values["nu"][:1], "shift": shift, "erf": erf}
        yield "squash", given
        yield "squash_gradient", given


def _of_state(values: dict) -> Calls:
    """Operators that read or move the state."""
    batch = values["batch_psi2"]
    number = values["num_batches"]
    marks = torch.tensor([False, batch.numel() % 2 == 1], device=batch.device)
    of_un = {"completed": number * 466}
    of_mabn = {"completed": None, "nu": None, "seen_nu": None}
    for unified, given in ((True, of_un), (False, of_mabn)):
        kind = {"geometric": unified, "filtration": unified, "warmup": 2}
        yield "window_statistics", given | kind
        of_step = {"psi2": batch, "marks": marks, "has_gradient": unified}
        yield "window_update_", given | of_step
    yield "running_average_", {}
    absent = dict.fromkeys(("mean", "diagnostics", "batch_mean"))
    yield "running_average_", absent | {"unbiased": False}
    yield "power_update_", {"diagnostics": None}
    yield "power_update_", {"warmup": 9}
    yield "power_update_", {"diagnostics": None, "has_gradient": False}


def results_of(function: Callable, name: str, arguments: Sequence) -> tuple[Tensor, ...]:
    """The results of ``function``, an implementation of the operator ``name``, and copies of the
    arguments that it changes; the given arguments stay unchanged.
    """
    given = list(arguments)
    changed = []
    for place in CHANGED[name]:
        if given[place] is not None:
            given[place] = given[place].clone()
            changed.append(given[place])
    results = function(*given)
    if results is None:
        return tuple(changed)
    return *((results,) if isinstance(results, Tensor) else results), *changed


def difference(result: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> float:
    """The largest difference between two results, relative to the largest value; infinite if shape
    or type differs.
    """
    worst = 0.0
    for ours, wanted in zip(result, expected, strict=True):
        if ours.shape != wanted.shape or ours.dtype != wanted.dtype:
            return float("inf")
        if wanted.numel():
            exact = wanted.double()
            error = (ours.double() - exact).abs().max() / exact.abs().max().clamp(min=1e-30)
            worst = max(worst, float(error.nan_to_num(float("inf"))))
    return worst


def largest_differences(module: ModuleType, calls: Iterable[tuple[str, tuple]]) -> dict[str, float]:
    """Operator -> the largest :func:`difference` of what ``module`` and the reference compute."""
    worst: dict[str, float] = {}
    for name, arguments in calls:
        expected = results_of(OPERATORS[name], name, arguments)
        results = results_of(getattr(module, name), name, arguments)
        worst[name] = max(worst.get(name, 0.0), difference(results, expected))
    return worst


def wrong_operators(module: ModuleType, dtype: torch.dtype, device: torch.device) -> str:
    """Which operators of ``module`` give wrong results on ``device``, in one line; empty if none
    does.

    Each operator is compared in one type, since compiling takes most of the time. The second result
    is compared, because its kernels are launched like all later ones. If all results are correct, a
    file records this, and they are not compared again until the GPU, its driver, torch, Triton or
    the kernels change.
    """
    passed = cache_file(module, dtype, device)
    if passed.exists():
        return ""
    first_arguments: dict[str, tuple] = {}
    for name, arguments in samples(dtype, device):
        first_arguments.setdefault(name, arguments)
    largest_differences(module, first_arguments.items())
    wrong = []
    for name, error in largest_differences(module, first_arguments.items()).items():
        if error > TOLERANCE[dtype]:
            wrong.append(f"{name} by {error:.0e}")
    if wrong:
        of_type = f"differs from plain PyTorch in {str(dtype)[6:]}"
        return f"{of_type}: {', '.join(wrong)} (pn check shows more)"
    try:
        passed.parent.mkdir(parents=True, exist_ok=True)
        passed.touch()
    except OSError:  # the next process compares again
        pass
    return ""


def cache_file(module: ModuleType, dtype: torch.dtype, device: torch.device) -> Path:
    """The file whose existence records that no result is wrong."""
    sources = sorted(Path(__file__).parent.glob("triton_*.py"))
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in sources))
    gpu = torch.cuda.get_device_name(device)
    versions = (torch.__version__, module.triton.__version__, dtype, gpu, driver())
    digest.update("\n".join(map(str, versions)).encode())
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(cache, "pn_fairseq", digest.hexdigest()[:16])


def driver() -> str:
    """The version of the GPU's driver or, if the system does not report it, of the CUDA that it
    supports.
    """
    try:
        return Path("/proc/driver/nvidia/version").read_text("utf-8")
    except OSError:
        supported = getattr(torch._C, "_cuda_getDriverVersion", None)
        return str(supported()) if supported else ""
