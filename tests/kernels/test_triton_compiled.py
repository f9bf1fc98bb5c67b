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

if triton_ops.INTERPRETED:
    pytest.skip("the interpreter is on, which compiles nothing", allow_module_level=True)

CUOBJDUMP = Path(nvidia.__file__).parent / "bin" / "cuobjdump"
KERNELS = {
    name: value for name, value in vars(triton_kernels).items() if isinstance(value, JITFunction)
}

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
        self.kernel, self.compiled = kernel, compiled

    def __getitem__(self, grid):
        def compile(*args, **kwargs):
            self.compiled.append(
                (self.kernel.__name__, grid, self.kernel.warmup(*args, grid=grid, **kwargs))
            )

        return compile


@contextmanager
def compiling(capability: int) -> Iterator[list]:
    """Within the block the operators launch nothing; the list receives (name, grid, compiled
    kernel).
    """
    compiled: list = []
    kernels = SimpleNamespace(
        **{name: _Compiling(kernel, compiled) for name, kernel in KERNELS.items()}
    )
    with (
        mock.patch.object(driver, "_active", _NoGpu(capability)),
        mock.patch.multiple(triton_ops, kernels=kernels, _multiprocessors=lambda device: 132),
    ):
        triton_ops._tokens_of.cache_clear()
        yield compiled


def empty(*shape, dtype=torch.float32):
    """A tensor without memory."""
    return torch.empty(shape, dtype=dtype, device="meta")


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
    """The operators of a training step of PN after the warm-up (``pn``), PN-V (``pn-v``), BN, GN,
    AdaNorm, DyT or Derf.

    ``parameters``: the type of weight and bias; None: there are none. ``turned``: x is (T, B, C) of
    (B, T, C).
    """
    x, vector, count = empty(rows, channels, dtype=dtype), empty(channels), empty(dtype=torch.int64)
    if turned:
        x = empty(8, rows // 8, channels, dtype=dtype).transpose(0, 1)
    padding = empty(*x.shape[:-1], dtype=torch.bool) if masked else None
    weight = bias = None if parameters is None else empty(channels, dtype=parameters)
    rest, loss_scale = (groups, 1e-5), empty(1) if masked else None
    if norm == "pn":
        _, inv_rms, batch, tokens = triton_ops.normalize(
            x, weight, bias, None, vector, padding, None, *rest, True
        )
        state = vector, vector, count, empty(4)
        given = x, x, padding, weight, vector, vector, loss_scale, inv_rms
        triton_ops.power_step_(*given, *state, batch, tokens, *rest, 0, 0.9, 0.9)
    elif norm in ("un", "mabn"):
        unified, windows = norm == "un", empty(8, channels)
        _, _, batch, tokens = triton_ops.moments(x, padding, *rest, False)
        given = windows, vector, count, count if masked else None, batch, 0, 1000, 1e-5
        psi2, _, marks = triton_ops.window_statistics(*given, unified, unified)
        nu, products = vector if unified else None, empty(2, channels, dtype=batch.dtype)
        state = vector, nu, windows, windows, count, empty(4)
        of_step = psi2, batch, marks, products, tokens, tokens
        triton_ops.window_update_(*state, nu, windows, count, *of_step, 0.9, 0.9, True)
    elif norm in ("gn", "ada"):
        curve = (2.0, -0.2) if norm == "ada" else (1.0, 0.0)
        _, stats = triton_ops.standardize(
            x, weight, bias, max(groups, 1), True, 1.0, 1e-5, 0.0, 0.0, *curve
        )
        arguments = weight, stats, max(groups, 1), *curve, True, True, weight is not None
        triton_ops.standardize_gradient(x, x, *arguments)
    elif norm in ("dyt", "derf"):
        arguments = empty(1), empty(1) if norm == "derf" else None, norm == "derf"
        triton_ops.squash(x, weight, bias, *arguments)
        triton_ops.squash_gradient(x, x, weight, *arguments)
    else:
        centered = norm == "bn"
        _, inv_rms, mean, moment, tokens = triton_ops.batch_normalize(
            x, weight, bias, padding, *rest, centered
        )
        running_mean, mean = (vector, mean) if centered else (None, None)
        state = vector, running_mean, count, empty(4)
        given = x, x, padding, weight, mean, moment, tokens, loss_scale, inv_rms
        triton_ops.batch_step_(*given, *state, *rest, 0.9, centered)


def resources(kernel) -> dict[str, int]:
    """Registers of a thread, bytes of its stack, where registers spill to, and of shared and
    local memory.
    """
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        command = [CUOBJDUMP, "--dump-resource-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return {
        name: int(value) for name, value in re.findall(r"\b(REG|STACK|SHARED|LOCAL):(\d+)", text)
    }


def check_resources(compiled: list, stack: int = 16) -> None:
    """8 bytes of stack are a call of the slow path of a division."""
    for name, _, kernel in compiled:
        used = resources(kernel)
        assert used["LOCAL"] == 0 and used["STACK"] <= stack, (name, used)
        assert used["REG"] * kernel.metadata.num_warps * 32 <= 65536, (name, used)


def widest(kernel) -> dict[str, int]:
    """Bytes that one thread loads and stores at once in global memory, at most."""
    found = {"ld": 0, "st": 0}
    for kind, vector, bits in re.findall(
        r"\b(ld|st)\.global[.\w:]*?(?:\.v(\d))?\.b(\d+)", kernel.asm["ptx"]
    ):
        found[kind] = max(found[kind], int(vector or 1) * int(bits) // 8)
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
        self.seen, self.searched = [], []
        monkeypatch.setattr(driver, "_active", _NoGpu(90))
        monkeypatch.setattr(triton_ops, "_multiprocessors", lambda device: 132)
        monkeypatch.setattr(triton_ops, "_compiled", {})
        monkeypatch.setattr(
            triton_ops, "kernels", SimpleNamespace(**{name: self.noting(name) for name in KERNELS})
        )
        runs = self

        def load(kernel):
            def run(*arguments):
                runs.seen.append((kernel.name, arguments[:3], arguments[9:]))

            kernel._run, kernel.module, kernel.function = run, 1, 0

        monkeypatch.setattr(CompiledKernel, "_init_handles", load)
        triton_ops._tokens_of.cache_clear()

    def noting(self, name):
        def find(grid):
            self.searched.append(name)
            return KERNELS[name][grid]

        return type(
            "",
            (),
            {"__getitem__": lambda _, grid: find(grid), "arg_names": KERNELS[name].arg_names},
        )()

    def of(self, call) -> list[tuple]:
        """Kernel, grid and arguments of each launch of ``call``; tensors by shape and type."""
        self.seen.clear()
        call()
        return [
            (
                name,
                grid,
                [
                    (value.shape, value.dtype) if isinstance(value, torch.Tensor) else value
                    for value in values
                ],
            )
            for name, grid, values in self.seen
        ]


def steps(x, padding) -> None:
    """A training step of PN, one of BN, and one of GN."""
    weight, bias, vector = torch.ones(3, x.size(-1))
    state = vector, vector.clone(), torch.tensor(3), torch.zeros(4)
    y, inv_rms, moment, count = triton_ops.normalize(
        x, weight, bias, None, vector, padding, None, 2, 1e-5, True
    )
    given = y, x, padding, weight, vector, vector, None, inv_rms
    triton_ops.power_step_(*given, *state, moment, count, 2, 1e-5, 2**62, 0.9, 0.9)
    y, inv_rms, mean, moment, count = triton_ops.batch_normalize(
        x, weight, bias, padding, 2, 1e-5, True
    )
    given = y, x, padding, weight, mean, moment, count, None, inv_rms
    triton_ops.batch_step_(*given, *state, 2, 1e-5, 0.9, True)
    stats = triton_ops.standardize(x, weight, bias, 2, True, 1.0, 1e-5, 0.0, 0.0, 1.0, 0.0)[1]
    triton_ops.standardize_gradient(y, x, weight, stats, 2, 1.0, 0.0, True, True, True)


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
    runs.of(lambda: steps(torch.zeros(5, 4, 8), None if padding is None else padding[:5]))
    assert runs.searched == []  # another number of tokens
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
