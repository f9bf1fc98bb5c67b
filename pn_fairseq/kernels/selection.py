"""Which implementation of the kernels computes, and why."""

import importlib.util
import os
import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from types import ModuleType

import torch

from pn_fairseq.common.errors import Unavailable
from pn_fairseq.kernels.first_use import wrong_operators
from pn_fairseq.kernels.ops import COMPILED, NAMESPACE, OPERATORS, warn_by_reference

#: Environment variable that forces an implementation.
VARIABLE = "PN_FAIRSEQ_KERNELS"

#: Implementation -> dispatch key of its device; None: any.
IMPLEMENTATIONS = {"reference": None, "triton": "CUDA", "cpp": "CPU"}

#: Increase this number whenever the schema of an operator changes: torch would end a process that
#: loads kernels with other schemas.
SCHEMAS = 6

#: The compiled kernels, which fit one version of torch and these schemas; setup.py uses the same
#: name.
EXTENSION = "pn_fairseq.kernels._cpp_" + re.sub(r"\W", "_", f"{torch.__version__}_{SCHEMAS}")

#: Lowest compute capability on which the Triton kernels are used. The tests compile them for 8.0
#: and 9.0.
LOWEST_CAPABILITY = (7, 0)


def _load_cpp() -> str | None:
    """Load the C++ kernels. Returns None, or the reason why they cannot be loaded."""
    spec = importlib.util.find_spec(EXTENSION)
    if spec is None:
        missing = (
            f"they are not compiled for torch {torch.__version__} and this version of pn_fairseq; "
            "install it again (pip install --no-build-isolation) where there is a C++ compiler"
        )
    else:
        try:
            torch.ops.load_library(spec.origin)
            for name in ("evaluate", "standardized", "squashed", "power_train", "batch_train"):
                COMPILED[name] = getattr(torch.ops.pn_fairseq, name).default
            return None
        except (OSError, RuntimeError) as error:
            reason = f"{spec.origin} cannot be loaded ({_first_line(error)})"
            missing = f"{reason}; install pn_fairseq again (pip: --no-build-isolation)"
    if not os.environ.get(VARIABLE):
        warnings.warn(f"pn_fairseq computes without its C++ kernels: {missing}", stacklevel=2)
    return missing


@cache
def _triton_operators() -> ModuleType:
    """The Triton operators. Called only where needed, because importing triton is slow."""
    from pn_fairseq.kernels import triton_ops

    return triton_ops


@cache
def _no_triton_on(device: torch.device) -> str:
    """Why Triton cannot compute on ``device``; empty if it can.

    Launches a small kernel, so it is not called before a GPU is used.
    """
    if device.type == "cpu" and os.environ.get("TRITON_INTERPRET", "0") in ("", "0"):
        return "triton computes on CUDA, and on the CPU only with TRITON_INTERPRET=1"
    try:
        module = _triton_operators()
    except Exception as error:
        # an installation that does not fit this torch or this machine can raise any error
        return f"triton cannot be used ({_first_line(error)})"
    if module.INTERPRETED:
        return ""
    try:
        capability = torch.cuda.get_device_capability(device)
        if torch.version.cuda and capability < LOWEST_CAPABILITY:
            needed = "{}.{}".format(*LOWEST_CAPABILITY)
            offered = "{}.{}".format(*capability)
            name = torch.cuda.get_device_name(device)
            return f"the kernels need compute capability {needed}, and {name} has {offered}"
        # Some versions of triton cannot compile bfloat16 for older GPUs.
        x = torch.ones((1, 1), dtype=torch.bfloat16, device=device)
        module.normalize(x, *[None] * 6, 0, 1e-5, False)
    except Exception as error:
        # triton compiles with a C compiler and Python's headers, which may be missing
        return f"the installed triton cannot launch a kernel ({_first_line(error)})"
    return ""


#: GPU -> how the results of Triton on it are wrong; empty if they are correct.
_compared: dict[torch.device, str] = {}


def _wrong_on(x: torch.Tensor) -> str:
    """How the results of Triton are wrong on the GPU of ``x``; empty if they are correct.

    Each GPU is compared once.
    """
    module = _triton_operators()
    if module.INTERPRETED or x.device in _compared:
        return _compared.get(x.device, "")
    if torch.cuda.is_current_stream_capturing():  # nothing can be compared in a CUDA graph
        return ""
    try:
        wrong = wrong_operators(module, x.dtype, x.device)
    except Exception as error:  # what triton raises for a kernel that does not compile
        wrong = f"cannot launch a kernel ({_first_line(error)})"
    _compared[x.device] = f"the installed triton {wrong}" if wrong else ""
    return _compared[x.device]


def _first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def _by_triton(name: str) -> Callable:
    def implementation(*args):
        reason = _compared.get(args[0].device)
        if reason is None:
            reason = _no_triton_on(args[0].device) or _wrong_on(args[0])
        if not reason:
            return getattr(_triton_operators(), name)(*args)
        if FORCED == "triton":
            raise Unavailable(f"{VARIABLE}=triton: {reason}")
        warn_by_reference(reason)
        return OPERATORS[name](*args)

    return implementation


def _refuse_cuda(*_) -> None:
    raise Unavailable(f"{VARIABLE}=cpp computes on the CPU only, and this input is on CUDA")


def _select() -> tuple[str | None, str | None]:
    """Register what the environment variable allows. Returns the name that it forces, and why there
    are no C++ kernels.

    torch must know the operators before the first call, so this runs on import. Triton is imported
    at the first call.
    """
    forced = os.environ.get(VARIABLE) or None
    if forced not in (None, *IMPLEMENTATIONS):
        raise Unavailable(f"{VARIABLE}={forced} is not one of {', '.join(IMPLEMENTATIONS)}")
    if forced == "triton" and importlib.util.find_spec("triton") is None:
        raise Unavailable(f"{VARIABLE}=triton: triton is not installed")
    missing = _load_cpp() if forced in (None, "cpp") else f"{VARIABLE}={forced}"
    if forced == "cpp" and missing:
        raise Unavailable(f"{VARIABLE}=cpp, but there are no C++ kernels: {missing}")
    devices = {None: ["CUDA"], "triton": ["CUDA", "CPU"]}.get(forced, [])
    for name in OPERATORS:
        for device in devices:
            _others.impl(name, _by_triton(name), device)
        if forced == "cpp":
            _others.impl(name, _refuse_cuda, "CUDA")
    return forced, missing


_others = torch.library.Library(NAMESPACE, "IMPL")
#: The implementation that the environment variable forces, and why there are no C++ kernels.
FORCED, CPP_MISSING = _select()


def missing(name: str) -> str:
    """Why the implementation ``name`` cannot run here; empty if it can."""
    if name == "cpp":
        return CPP_MISSING or ""
    if name != "triton":
        return "" if name == "reference" else f"not one of {', '.join(IMPLEMENTATIONS)}"
    if FORCED not in (None, "triton"):
        return f"{VARIABLE}={FORCED}"
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", torch.cuda.current_device())
    return _no_triton_on(device)


def available() -> list[str]:
    """The implementations that can run here."""
    return [name for name in ("reference", "cpp", "triton") if not missing(name)]


def describe() -> dict[str, tuple[str, str]]:
    """Device -> the implementation in use there, and why."""
    why = f"{VARIABLE}={FORCED}" if FORCED else "automatically"
    devices = {"CPU": _on_cpu(why), "CUDA": _on_cuda(why)}
    for name, kind in (("MPS", torch.backends.mps), ("XPU", torch.xpu)):
        if kind.is_available():
            no_kernels = "there are no kernels for this device"
            devices[name] = "reference", why if FORCED == "reference" else no_kernels
    return devices


def _on_cpu(why: str) -> tuple[str, str]:
    if FORCED == "triton":
        if _no_triton_on(torch.device("cpu")):
            return "none", why
        return "triton", f"{why}, interpreted"
    if FORCED == "reference":
        return "reference", why
    if CPP_MISSING:
        return "reference", f"no C++ kernels: {CPP_MISSING}"
    return "cpp", f"{why}; compiled for {torch.ops.pn_fairseq.cpu_capability()}"


def _on_cuda(why: str) -> tuple[str, str]:
    if FORCED == "reference":
        return "reference", why
    if FORCED == "cpp":
        return "none", why
    if not torch.cuda.is_available():
        return "none", "no CUDA device"
    reason = missing("triton") or _wrong_on(torch.empty(0, device="cuda"))
    if not reason:
        return "triton", why
    return ("none", f"{why}, but {reason}") if FORCED else ("reference", reason)


#: The implementation that :func:`using` chose, and its registration.
_chosen: tuple[str | None, torch.library.Library | None] = None, None


@contextmanager
def using(name: str) -> Iterator[None]:
    """Compute with one implementation inside the ``with`` block, as tests and benchmarks do.

    Raises:
        Unavailable: it cannot run here.
    """
    reason = missing(name)
    if reason:
        raise Unavailable(f"kernels {name!r} cannot run here: {reason}")
    before = _chosen[0]
    _choose(name)
    try:
        yield
    finally:
        _choose(before)


def _choose(name: str | None) -> None:
    """Give the functions of an implementation precedence over all others; None: restore the
    machine's selection.
    """
    global _chosen
    if _chosen[1] is not None:
        _chosen[1]._destroy()
    _chosen = name, None
    if name not in ("triton", "reference"):  # the compiled kernels are already registered
        return
    functions = OPERATORS
    on_cpu = True
    if name == "triton":
        module = _triton_operators()
        functions = {operator: getattr(module, operator) for operator in OPERATORS}
        on_cpu = module.INTERPRETED
    devices = ["CPU"] if on_cpu else []
    if torch.cuda.is_available():
        devices.append("CUDA")
    library = torch.library.Library(NAMESPACE, "IMPL")
    _chosen = name, library
    with warnings.catch_warnings():  # about replacing kernels, which is intended here
        warnings.filterwarnings("ignore", "(?s).*([Oo]verrid|only once for all operators)")
        for operator, function in functions.items():
            for device in devices:
                library.impl(operator, function, device, allow_override=True)
