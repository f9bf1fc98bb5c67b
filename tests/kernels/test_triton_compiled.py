"""Triton's kernels compiled ahead of time, for GPUs that this machine need not have: none spills
registers.
"""

import re
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

triton = pytest.importorskip("triton")
nvidia = pytest.importorskip("triton.backends.nvidia")

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import CompiledKernel  # noqa: E402
from triton.runtime import JITFunction, driver  # noqa: E402

import pn_fairseq.norms  # noqa: E402, F401 (defines operators)
from pn_fairseq import kernels  # noqa: E402
from pn_fairseq.kernels import triton_kernels, triton_ops  # noqa: E402

from ..pairwise import pairwise  # noqa: E402
from .checks import call  # noqa: E402

if triton_ops.INTERPRETED:
    pytest.skip("the interpreter is on, which compiles nothing", allow_module_level=True)

CUOBJDUMP = Path(nvidia.__file__).parent / "bin" / "cuobjdump"
KERNELS = {}
for name, value in vars(triton_kernels).items():
    if isinstance(value, JITFunction):
        KERNELS[name] = value

#: Tokens, channels, groups of layer-scale.
SHAPES = [
    (4096, 512, 4),
    (4096, 1024, 16),
    (4099, 513, 3),
    (32768, 1024, 0),
    (4096, 4096, 16),
    (2**21, 8192, 1),
]


class _NoGpu:
    """A driver for a GPU that is not there.

    Triton keeps the kernels of each device apart by its number.
    """

    def __init__(self, capability: int):
        self.capability = capability

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self) -> int:
        return self.capability

    def get_current_stream(self, device: int) -> int:
        return 0


class _Compiling:
    """Stands for a kernel, and compiles it for the arguments that it is launched with."""

    def __init__(self, kernel: JITFunction, compiled: list):
        self.kernel = kernel
        self.compiled = compiled

    def __getitem__(self, grid):
        def compile(*args, **kwargs):
            kernel = self.kernel.warmup(*args, grid=grid, **kwargs)
            self.compiled.append((self.kernel.__name__, grid, kernel))

        return compile


@contextmanager
def compiling(capability: int) -> Iterator[list]:
    """Within the block the operators launch nothing; the list receives (name, grid, compiled
    kernel).
    """
    compiled: list = []
    kernels = {name: _Compiling(kernel, compiled) for name, kernel in KERNELS.items()}
    stand_ins = {"kernels": SimpleNamespace(**kernels), "_multiprocessors": lambda device: 132}
    no_gpu = mock.patch.object(driver, "_active", _NoGpu(capability))
    with no_gpu, mock.patch.multiple(triton_ops, **stand_ins):
        triton_ops._tokens_of.cache_clear()
        yield compiled


def empty(*shape, dtype=torch.float32):
    """A tensor without memory."""
    return torch.empty(shape, dtype=dtype, device="meta")


#: Norm -> the operators of a training step, and what the next ones call their results. PN is after
#: its warm-up.
STEPS = {
    "pn": {"normalize": "y inv_rms batch_psi2 count", "power_step_": ""},
    "pn-v": {"batch_normalize": "y inv_rms y moment count", "batch_step_": ""},
    "bn": {"batch_normalize": "y inv_rms mean moment count", "batch_step_": ""},
    "un": {
        "moments": "inv_rms y batch_psi2 count",
        "window_statistics": "psi2 y marks",
        "window_update_": "",
    },
    "gn": {"standardize": "y stats", "standardize_gradient": ""},
    "dyt": {"squash": "", "squash_gradient": ""},
}
STEPS |= {"mabn": STEPS["un"], "ada": STEPS["gn"], "derf": STEPS["dyt"]}


def step(norm: str, **given) -> None:
    """A training step by Triton."""
    for operator, results in STEPS[norm].items():
        values = call(operator, triton_ops, **given)
        if results:
            given |= zip(results.split(), values, strict=True)
            given.pop("y", None)


def train(
    norm: str,
    rows: int,
    channels: int,
    groups: int,
    dtype,
    masked: bool,
    parameters=torch.float32,
    turned=False,
) -> None:
    """A training step of tensors without memory.

    ``parameters``: the type of weight and bias; None: there are none. ``turned``: x is (T, B, C) of
    (B, T, C).
    """
    x = empty(rows, channels, dtype=dtype)
    vector = empty(channels)
    count = empty(dtype=torch.int64)
    if turned:
        x = empty(8, rows // 8, channels, dtype=dtype).transpose(0, 1)
    given = dict.fromkeys(("x", "dy"), x) | dict.fromkeys(("num_batches", "seen_batches"), count)
    if masked:
        padding = empty(*x.shape[:-1], dtype=torch.bool)
        given |= {"padding": padding, "loss_scale": empty(1), "completed": count}
    if parameters is not None:
        given |= dict.fromkeys(("weight", "bias"), empty(channels, dtype=parameters))
    state = ["moment", "psi2", "nu", "used_psi2", "running_nu", "running_moment", "running_psi2"]
    if norm in ("bn", "un"):
        state += ["running_mean", "seen_nu"]
    if norm == "mabn":
        state.remove("nu")
    given |= dict.fromkeys(state, vector) | {"diagnostics": empty(4)}
    acc = torch.float64 if dtype == torch.float64 else torch.float32
    windows = ("psi2_window", "lambda_window", "seen_lambda")
    given |= dict.fromkeys(windows, empty(8, channels)) | {"ratio_warmup": 1000}
    given |= {"products": empty(2, channels, dtype=acc), "counted_tokens": empty(dtype=acc)}
    given |= {"groups": groups, "centered": norm in ("bn", "gn", "ada"), "unbiased": norm == "bn"}
    given |= {"geometric": norm == "un", "filtration": norm == "un"}
    if norm in ("dyt", "derf"):
        given |= {"alpha": empty(1), "erf": norm == "derf"}
        given["shift"] = empty(1) if given["erf"] else None
    if norm in ("gn", "ada"):
        given |= {"groups": max(groups, 1), "sums": parameters is not None}
    if norm == "ada":
        given |= {"gain": 2.0, "gain_slope": -0.2}
    step(norm, **given)


def resources(kernel) -> dict[str, int]:
    """Registers of a thread, bytes of its stack, where registers spill to, and of shared and
    local memory.
    """
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        command = [CUOBJDUMP, "--dump-resource-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.findall(r"\b(REG|STACK|SHARED|LOCAL):(\d+)", text)
    return {name: int(value) for name, value in found}


def check_resources(compiled: list, stack: int = 16) -> None:
    """8 bytes of stack are a call of the slow path of a division."""
    for name, _, kernel in compiled:
        used = resources(kernel)
        assert used["LOCAL"] == 0 and used["STACK"] <= stack, (name, used)
        assert used["REG"] * kernel.metadata.num_warps * 32 <= 65536, (name, used)


def widest(kernel) -> dict[str, int]:
    """Bytes that one thread loads and stores at once in global memory, at most."""
    found = {"ld": 0, "st": 0}
    accesses = re.findall(r"\b(ld|st)\.global[.\w:]*?(?:\.v(\d))?\.b(\d+)", kernel.asm["ptx"])
    for kind, vector, bits in accesses:
        size = int(vector or 1) * int(bits) // 8
        found[kind] = max(found[kind], size)
    return found


def test_every_operator_has_its_kernels():
    """Without them a GPU would compute it by plain PyTorch, in silence."""
    assert set(kernels.OPERATORS) <= set(vars(triton_ops))


#: What a training step launches.
LAUNCHES = {
    "pn": ["norm_forward", "finish_moments", "norm_backward", "finish_power_step"],
    "gn": ["standardize", "standardize_gradient", "finish_gradient_sums"],
    "derf": ["squash", "squash_gradient", "finish_gradient_sums"],
    "un": ["norm_forward", "finish_moments", "window_statistics", "window_update_"],
}


@pytest.mark.parametrize("turned", [False, True], ids=["contiguous", "transposed"])
@pytest.mark.parametrize(
    ("capability", "dtype"), [(80, torch.float16), (90, torch.bfloat16)], ids=str
)
@pytest.mark.parametrize("norm", LAUNCHES)
def test_a_step_compiles_to_wide_accesses_without_spills(norm, capability, dtype, turned):
    with compiling(capability) as compiled:
        train(norm, 4096, 512, 4, dtype, masked=True, turned=turned)
    assert [name for name, *_ in compiled] == LAUNCHES[norm]
    check_resources(compiled)
    for name, _, kernel in compiled:
        if not name.startswith(("finish", "window")):  # those read vectors
            assert widest(kernel) == {"ld": 16, "st": 16}, name


class _Runs:
    """Stands for the launches of compiled kernels on a GPU that is not there: notes them."""

    def __init__(self, monkeypatch):
        self.seen = []
        self.searched = []
        monkeypatch.setattr(driver, "_active", _NoGpu(90))
        monkeypatch.setattr(triton_ops, "_multiprocessors", lambda device: 132)
        monkeypatch.setattr(triton_ops, "_compiled", {})
        kernels = {name: _Searched(kernel, self.searched) for name, kernel in KERNELS.items()}
        monkeypatch.setattr(triton_ops, "kernels", SimpleNamespace(**kernels))
        runs = self

        def load(kernel):
            kernel._run = lambda *arguments: runs.note(kernel.name, arguments)
            kernel.module = 1
            kernel.function = 0

        monkeypatch.setattr(CompiledKernel, "_init_handles", load)
        triton_ops._tokens_of.cache_clear()

    def note(self, name: str, arguments: tuple) -> None:
        """Kernel, grid and arguments of a launch; tensors by shape and type."""
        noted = []
        for value in arguments[9:]:
            is_tensor = isinstance(value, torch.Tensor)
            noted.append((value.shape, value.dtype) if is_tensor else value)
        self.seen.append((name, arguments[:3], noted))

    def of(self, call) -> list[tuple]:
        """The launches of ``call``."""
        self.seen.clear()
        call()
        return list(self.seen)


class _Searched:
    """Stands for a kernel, and notes that triton is asked for it."""

    def __init__(self, kernel: JITFunction, searched: list):
        self.kernel = kernel
        self.searched = searched
        self.arg_names = kernel.arg_names

    def __getitem__(self, grid):
        self.searched.append(self.kernel.__name__)
        return self.kernel[grid]


def steps(x, padding) -> None:
    """A training step of PN, one of BN, and one of GN."""
    ones = torch.ones(x.size(-1))
    state = ("moment", "used_psi2", "nu", "running_moment", "running_mean", "psi2", "running_nu")
    given = dict.fromkeys(("weight", "bias", *state), ones)
    given |= dict(x=x, dy=torch.zeros(x.shape), padding=padding, groups=2)
    given |= dict(num_batches=torch.tensor(3), diagnostics=torch.zeros(4))
    step("pn", **given, warmup=2**62)
    step("bn", **given)
    step("gn", **given)


OF_STEPS = [
    *("norm_forward", "finish_moments", "norm_backward", "finish_power_step"),
    *("norm_forward", "finish_moments", "norm_forward"),
    *("norm_backward", "finish_gradient_sums", "norm_backward", "running_average_"),
    *("standardize", "standardize_gradient", "finish_gradient_sums"),
]


@pytest.mark.skipif(
    not triton_ops.LAUNCHES_COMPILED, reason="this triton launches kernels by itself"
)
@pytest.mark.parametrize("masked", [False, True])
def test_a_second_launch_does_not_ask_triton_for_the_kernel_and_gives_it_the_same_arguments(
    monkeypatch, masked
):
    runs = _Runs(monkeypatch)
    x = torch.zeros(6, 4, 8)
    padding = torch.zeros(4, 6, dtype=torch.bool).t() if masked else None
    first = runs.of(lambda: steps(x, padding))
    assert [name for name, *_ in first] == OF_STEPS
    runs.searched.clear()
    assert runs.of(lambda: steps(x.clone(), padding)) == first and runs.searched == []
    runs.of(lambda: steps(x[:5], padding[:5] if masked else None))  # another number of tokens
    assert runs.searched == []
    apart = torch.zeros(1 + x.numel())[1:].view_as(x)  # memory that is not aligned
    assert apart.data_ptr() % 16 == 4
    runs.of(lambda: steps(apart, padding))
    assert "norm_forward" in runs.searched
    runs.searched.clear()
    assert runs.of(lambda: steps(x, padding)) == first and runs.searched == []


NORMS = ("pn", "pn-v", "bn", "un", "mabn", "gn", "ada", "dyt", "derf")

MATRIX = pairwise(
    shape=SHAPES,
    dtype=(torch.float32, torch.float16, torch.bfloat16, torch.float64),
    norm=NORMS,
    capability=(80, 90),
    masked=(True, False),
    parameters=(torch.float32, torch.bfloat16, None),
)


@pytest.mark.slow
@pytest.mark.parametrize("case", MATRIX, ids=lambda case: "-".join(map(str, case.values())))
def test_everything_compiles_without_spills(case):
    with compiling(case["capability"]) as compiled:
        train(case["norm"], *case["shape"], case["dtype"], case["masked"], case["parameters"])
    # float64 is there for gradient checks and may spill
    check_resources(compiled, stack=4096 if case["dtype"] is torch.float64 else 16)
