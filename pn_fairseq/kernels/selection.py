"""Which implementation of the kernels computes, and why."""

import importlib.util
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from pn_fairseq.kernels import reference
from pn_fairseq.kernels.ops import NAMESPACE, SCHEMAS

#: Environment variable that forces an implementation.
VARIABLE = "PN_FAIRSEQ_KERNELS"

#: Implementation -> dispatch key of the device that it is for; None: any.
IMPLEMENTATIONS = {"reference": None, "cpp": "CPU"}

EXTENSION = "pn_fairseq.kernels._cpp"


class Unavailable(RuntimeError):
    """An implementation was asked for that cannot run here; the message says why and what to do."""


def _load_cpp() -> str | None:
    """Load the C++ kernels; why they cannot be loaded, or None."""
    spec = importlib.util.find_spec(EXTENSION)
    if spec is None:
        return "they are not compiled; install pn_fairseq again where there is a C++ compiler"
    try:
        torch.ops.load_library(spec.origin)
    except (OSError, RuntimeError) as error:
        reason = str(error).strip().splitlines()[0]
        missing = (
            f"{spec.origin} was compiled for another version of torch or of this package ({reason}); install again"
        )
        warnings.warn(f"pn_fairseq computes without its C++ kernels: {missing}", stacklevel=2)
        return missing
    return None


def _refuse(name: str, device: str):
    def implementation(*args):
        raise Unavailable(f"{VARIABLE}={name} computes on {IMPLEMENTATIONS[name]} only, and this input is on {device}")

    return implementation


def _select() -> tuple[str | None, str | None]:
    """Load what the environment variable allows: the name that it forces, and why there are no C++ kernels."""
    forced = os.environ.get(VARIABLE) or None
    if forced not in (None, *IMPLEMENTATIONS):
        raise Unavailable(f"{VARIABLE}={forced} is not one of {', '.join(IMPLEMENTATIONS)}")
    if forced == "reference":
        return forced, f"{VARIABLE}=reference"
    missing = _load_cpp()
    if forced == "cpp":
        if missing:
            raise Unavailable(f"{VARIABLE}=cpp, but there are no C++ kernels: {missing}")
        for name in SCHEMAS:
            _others.impl(name, _refuse("cpp", "CUDA"), "CUDA")
    return forced, missing


_others = torch.library.Library(NAMESPACE, "IMPL")
FORCED, CPP_MISSING = _select()


def forced() -> str | None:
    """The implementation that the environment variable forces."""
    return FORCED


def available() -> list[str]:
    """The implementations that can run here."""
    return ["reference"] + ([] if CPP_MISSING else ["cpp"])


def describe() -> dict[str, tuple[str, str]]:
    """Device -> the implementation in use there, and why."""
    if FORCED == "reference":
        return dict.fromkeys(("CPU", "CUDA"), ("reference", f"{VARIABLE}=reference"))
    why = f"{VARIABLE}={FORCED}" if FORCED else "automatically"
    if CPP_MISSING:
        cpu = ("reference", f"no C++ kernels: {CPP_MISSING}")
    else:
        cpu = ("cpp", f"{why}; compiled for {torch.ops.pn_fairseq.cpu_capability()}")
    if FORCED == "cpp":
        return {"CPU": cpu, "CUDA": ("none", f"{VARIABLE}=cpp")}
    cuda = "no CUDA kernels" if torch.cuda.is_available() else "no CUDA device"
    return {"CPU": cpu, "CUDA": ("reference", cuda)}


@contextmanager
def using(name: str) -> Iterator[None]:
    """Compute with one implementation inside the ``with`` block, as tests and benchmarks do.

    Raises:
        Unavailable: it cannot run here.
    """
    if name not in available():
        raise Unavailable(f"kernels {name!r} cannot run here: {CPP_MISSING}")
    if name != "reference" or available() == ["reference"]:
        yield
        return
    library = torch.library.Library(NAMESPACE, "IMPL")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "(?s).*[Oo]verrid")  # that is what is wanted here
        for operator in SCHEMAS:
            library.impl(operator, getattr(reference, operator), "CPU", allow_override=True)
    try:
        yield
    finally:
        library._destroy()
