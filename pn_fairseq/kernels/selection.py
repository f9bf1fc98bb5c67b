"""Which implementation of the kernels computes, and why."""

import importlib.util
import os
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from types import ModuleType

import torch

from pn_fairseq.common.errors import Unavailable
from pn_fairseq.kernels.ops import NAMESPACE, OPERATORS, for_every_operator

#: Environment variable that forces an implementation.
VARIABLE = "PN_FAIRSEQ_KERNELS"

#: Implementation -> dispatch key of the device that it is for; None: any.
IMPLEMENTATIONS = {"reference": None, "triton": "CUDA", "cpp": "CPU"}

#: One more whenever the schema of an operator changes. torch would end the process that loads kernels of other schemas.
SCHEMAS = 2

#: The compiled kernels, which fit one version of torch and these schemas; setup.py gives them the same name.
EXTENSION = "pn_fairseq.kernels._cpp_" + re.sub(r"\W", "_", f"{torch.__version__}_{SCHEMAS}")

#: Lowest compute capability on which the Triton kernels are used. They have been compiled for 7.0, 7.5, 8.0 and 9.0.
LOWEST_CAPABILITY = (7, 0)


def _load_cpp() -> str | None:
    """Load the C++ kernels; why they cannot be loaded, or None."""
    spec = importlib.util.find_spec(EXTENSION)
    if spec is None:
        missing = (
            f"they are not compiled for torch {torch.__version__} and this version of pn_fairseq; install it again "
            "(make venv, or pip with --no-build-isolation) where there is a C++ compiler"
        )
        if not os.environ.get(VARIABLE):
            warnings.warn(f"pn_fairseq computes without its C++ kernels: {missing}", stacklevel=2)
        return missing
    try:
        torch.ops.load_library(spec.origin)
    except (OSError, RuntimeError) as error:
        reason = str(error).strip().splitlines()[0]
        missing = f"{spec.origin} cannot be loaded ({reason}); install pn_fairseq again (pip: --no-build-isolation)"
        warnings.warn(f"pn_fairseq computes without its C++ kernels: {missing}", stacklevel=2)
        return missing
    return None


@cache
def _load_triton() -> tuple[ModuleType | None, str]:
    """The operators by Triton, or None and the reason. Importing triton is slow: call this only when it is needed."""
    if importlib.util.find_spec("triton") is None:
        return None, "triton is not installed"
    try:
        from pn_fairseq.kernels import triton_ops
    except Exception as error:  # an installation that does not fit this torch or this machine raises any error
        return None, f"the installed triton cannot be used ({_first_line(error)})"
    return triton_ops, ""


@cache
def _why_no_triton_on(device: torch.device) -> str:
    """Why Triton cannot compute on this GPU; empty if it can. Launches a small kernel: not before the GPU is used."""
    module, missing = _load_triton()
    if module is None or module.INTERPRETED:
        return missing
    try:
        capability = torch.cuda.get_device_capability(device)
        if torch.version.cuda and capability < LOWEST_CAPABILITY:
            needed, found = (".".join(map(str, each)) for each in (LOWEST_CAPABILITY, capability))
            return f"the kernels need compute capability {needed}, and {torch.cuda.get_device_name(device)} has {found}"
        # Some versions of triton cannot compile bfloat16 for older GPUs.
        x = torch.ones((1, 1), dtype=torch.bfloat16, device=device)
        module.normalize(x, *[None] * 6, 0, 1e-5, False)
    except Exception as error:  # triton compiles with a C compiler and Python's headers, which may be missing
        return f"the installed triton cannot launch a kernel ({_first_line(error)})"
    return ""


#: GPU -> why its results are not used; empty if they are.
_compared: dict[torch.device, str] = {}


def _why_triton_is_off(x: torch.Tensor) -> str:
    """Why the results of Triton on the GPU of ``x`` are not used; empty if they are. Compares them at the first use."""
    module, missing = _load_triton()
    if module is None or module.INTERPRETED or x.device in _compared:
        return _compared.get(x.device, missing)
    if torch.cuda.is_current_stream_capturing():  # nothing can be compared in a CUDA graph
        return ""
    from pn_fairseq.kernels.check import first_use  # imports this module

    try:
        off = first_use(module, x.dtype, x.device)
    except Exception as error:  # what triton raises for a kernel that does not compile
        off = f"cannot launch a kernel ({_first_line(error)})"
    _compared[x.device] = f"the installed triton {off}" if off else ""
    return _compared[x.device]


def _first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


@cache
def _warn_without_triton(missing: str) -> None:
    warnings.warn(f"pn_fairseq computes by plain PyTorch on CUDA, which is slow: {missing}", stacklevel=4)


def _by_triton(name: str):
    def implementation(*args):
        missing = _why_no_triton_on(args[0].device) or _why_triton_is_off(args[0])
        if not missing:
            return getattr(_load_triton()[0], name, OPERATORS[name])(*args)
        if FORCED == "triton":
            raise Unavailable(f"{VARIABLE}=triton: {missing}")
        _warn_without_triton(missing)
        return OPERATORS[name](*args)

    return implementation


def _refuse(name: str, device: str):
    def implementation(*args):
        hint = ", unless TRITON_INTERPRET=1 is set" if name == "triton" else ""
        raise Unavailable(
            f"{VARIABLE}={name} computes on {IMPLEMENTATIONS[name]} only{hint}, and this input is on {device}"
        )

    return implementation


def _select() -> tuple[str | None, str | None]:
    """Load what the environment variable allows: the name that it forces, and why there are no C++ kernels."""
    forced = os.environ.get(VARIABLE) or None
    if forced not in (None, *IMPLEMENTATIONS):
        raise Unavailable(f"{VARIABLE}={forced} is not one of {', '.join(IMPLEMENTATIONS)}")
    if forced == "reference":
        return forced, f"{VARIABLE}=reference"
    if forced == "triton":
        module, missing = _load_triton()
        if missing:
            raise Unavailable(f"{VARIABLE}=triton: {missing}")

        def attach(name):
            _others.impl(name, _by_triton(name), "CUDA")
            interpreted = getattr(module, name, OPERATORS[name])
            _others.impl(name, interpreted if module.INTERPRETED else _refuse("triton", "the CPU"), "CPU")

        for_every_operator(attach)
        return forced, f"{VARIABLE}=triton"
    missing = _load_cpp()
    if forced is None:
        for_every_operator(lambda name: _others.impl(name, _by_triton(name), "CUDA"))
    if forced == "cpp":
        if missing:
            raise Unavailable(f"{VARIABLE}=cpp, but there are no C++ kernels: {missing}")
        for_every_operator(lambda name: _others.impl(name, _refuse("cpp", "CUDA"), "CUDA"))
    return forced, missing


_others = torch.library.Library(NAMESPACE, "IMPL")
FORCED, CPP_MISSING = _select()


def forced() -> str | None:
    """The implementation that the environment variable forces."""
    return FORCED


def available() -> list[str]:
    """The implementations that can run here."""
    return ["reference"] + ([] if CPP_MISSING else ["cpp"]) + ([] if _why_no_triton() else ["triton"])


def describe() -> dict[str, tuple[str, str]]:
    """Device -> the implementation in use there, and why."""
    if FORCED == "reference":
        return dict.fromkeys(("CPU", "CUDA"), ("reference", f"{VARIABLE}=reference"))
    why = f"{VARIABLE}={FORCED}" if FORCED else "automatically"
    if FORCED == "triton":
        interpreted = _load_triton()[0].INTERPRETED
        missing = torch.cuda.is_available() and _why_no_triton()
        return {
            "CPU": ("triton", f"{why}, interpreted") if interpreted else ("none", why),
            "CUDA": ("none", f"{why}, but {missing}") if missing else ("triton", why),
        }
    if CPP_MISSING:
        cpu = ("reference", f"no C++ kernels: {CPP_MISSING}")
    else:
        cpu = ("cpp", f"{why}; compiled for {torch.ops.pn_fairseq.cpu_capability()}")
    if FORCED == "cpp":
        return {"CPU": cpu, "CUDA": ("none", f"{VARIABLE}=cpp")}
    if not torch.cuda.is_available():
        return {"CPU": cpu, "CUDA": ("none", "no CUDA device")}
    missing = _why_no_triton() or _why_triton_is_off(torch.empty(0, device="cuda"))
    return {"CPU": cpu, "CUDA": ("reference", missing) if missing else ("triton", why)}


def _why_no_triton() -> str:
    """Why Triton can compute nothing here; empty if it can."""
    if FORCED not in (None, "triton"):
        return f"{VARIABLE}={FORCED}"
    if torch.cuda.is_available():
        return _why_no_triton_on(torch.device("cuda", torch.cuda.current_device()))
    if os.environ.get("TRITON_INTERPRET", "0") in ("", "0"):
        return "no CUDA device, and TRITON_INTERPRET=1 is not set"
    return _load_triton()[1]


@contextmanager
def using(name: str) -> Iterator[None]:
    """Compute with one implementation inside the ``with`` block, as tests and benchmarks do.

    Raises:
        Unavailable: it cannot run here.
    """
    if name not in available():
        raise Unavailable(f"kernels {name!r} cannot run here: {_why_not(name)}")
    if name == "cpp" or available() == ["reference"]:
        yield
        return
    triton = _load_triton()[0] if name == "triton" else None
    devices = ["CUDA"] if torch.cuda.is_available() else []
    if triton is None or triton.INTERPRETED:
        devices.append("CPU")
    library = torch.library.Library(NAMESPACE, "IMPL")
    with warnings.catch_warnings():  # of replacing, which is what is wanted here
        warnings.filterwarnings("ignore", "(?s).*([Oo]verrid|only once for all operators)")
        for operator, function in OPERATORS.items():
            for device in devices:
                library.impl(operator, getattr(triton, operator, function), device, allow_override=True)
    try:
        yield
    finally:
        library._destroy()


def _why_not(name: str) -> str | None:
    reasons = {"triton": _why_no_triton(), "cpp": CPP_MISSING}
    return reasons.get(name, f"not one of {', '.join(IMPLEMENTATIONS)}")
