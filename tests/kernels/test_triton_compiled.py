"""Triton's kernels compiled for GPUs that need not be there: all of them compile, and none runs out of registers.

A table of what each needs: ``python -m tests.kernels.test_triton_compiled [CAPABILITY ...]``
"""

import re
import subprocess
import sys
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
from triton.runtime import JITFunction, driver  # noqa: E402

from pn_fairseq.kernels import triton_kernels, triton_ops  # noqa: E402

if triton_ops.INTERPRETED:
    pytest.skip("the interpreter is on, which compiles nothing", allow_module_level=True)

CUOBJDUMP = Path(nvidia.__file__).parent / "bin" / "cuobjdump"
NAMES = [
    name
    for name, value in vars(triton_kernels).items()
    if isinstance(value, JITFunction) and not name.startswith("_")
]

#: Token numbers of 64 bit, too; (rows, channels, groups).
SHAPES = [(4096, 512, 4), (4096, 1024, 16), (4099, 513, 3), (32768, 1024, 0), (4096, 4096, 16), (2**31, 8192, 1)]
MANY = (64, 20000, 1)


class _NoGpu:
    """A driver for a GPU that is not there. The kernels of each device are kept apart by its number."""

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
            self.compiled.append((self.kernel.__name__, grid, self.kernel.warmup(*args, grid=grid, **kwargs)))

        return compile


@contextmanager
def compiling(capability: int) -> Iterator[list]:
    """Within the block the operators launch nothing; the list receives (name, grid, compiled kernel)."""
    compiled: list = []
    kernels = SimpleNamespace(**{name: _Compiling(getattr(triton_kernels, name), compiled) for name in NAMES})
    driver.set_active(_NoGpu(capability))
    try:
        with mock.patch.multiple(triton_ops, kernels=kernels, _multiprocessors=lambda device: 132):
            yield compiled
    finally:
        driver.reset_active()


def call_all(rows: int, channels: int, groups: int, dtype: torch.dtype, masked: bool) -> None:
    """Every operator, on tensors without memory."""

    def empty(*shape, dtype=torch.float32):
        return torch.empty(*shape, dtype=dtype, device="meta")

    x, vector = empty(rows // 2, 2, channels, dtype=dtype), empty(channels)
    mask = empty(2, rows // 2, dtype=torch.bool) if masked else None
    scales, vectors, steps, tally = (
        empty(rows // 2, 2, groups),
        empty(5, channels),
        empty((), dtype=torch.int64),
        empty(4, dtype=torch.int64),
    )
    for warmup in (0, 2**62):
        triton_ops.power_forward(
            x, mask, vector, vector, vector, vector, steps, groups, 1e-5, 0.9, warmup, True
        )
    triton_ops.power_backward(
        x, x, mask, vector, scales, vectors, vector, vector, steps, tally, groups, 1e-5, 0.9, True
    )
    for mean in (None, vector):
        triton_ops.moments(x, mask, groups, 1e-5, mean is not None)
        triton_ops.normalize(x, vector, vector, mean, vector, scales if mean is None else None, groups, 1e-5)
        triton_ops.gradient_sums(x, x, mask, mean, scales, groups)
        triton_ops.gradient(x, x, mask, vector, vector, mean, mean, scales, groups, False)
    triton_ops.gradient(x, x, None, vector, None, None, None, scales, groups, True)


def resources(kernel) -> dict[str, int]:
    """Registers a thread, bytes of stack (register spills are there), shared and local memory."""
    with pytest.MonkeyPatch.context() as patch:
        import tempfile

        patch.setenv("LC_ALL", "C")
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(kernel.asm["cubin"])
            file.flush()
            command = [CUOBJDUMP, "--dump-resource-usage", file.name]
            text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return {name: int(value) for name, value in re.findall(r"\b(REG|STACK|SHARED|LOCAL):(\d+)", text)}


def accesses(kernel) -> tuple[int, int]:
    """Bytes of the widest load and of the widest store of global memory by one thread."""
    widest = {"ld": 0, "st": 0}
    for kind, vector, bits in re.findall(r"\b(ld|st)\.global[.\w:]*?(?:\.v(\d))?\.b(\d+)", kernel.asm["ptx"]):
        widest[kind] = max(widest[kind], int(vector or 1) * int(bits) // 8)
    return widest["ld"], widest["st"]


@pytest.mark.parametrize("capability", [80, 90])
def test_compiles(capability):
    seen = set()
    with compiling(capability) as compiled:
        for shape in [(4096, 1024, 16), (4099, 513, 3), MANY]:
            call_all(*shape, torch.bfloat16, masked=True)
    for name, _, kernel in compiled:
        seen.add(name)
        used = resources(kernel)
        assert used["LOCAL"] == 0 and used["STACK"] <= 16, (name, used)  # 8: a call of the division's slow path
        assert used["REG"] * kernel.metadata.num_warps * 32 <= 65536, (name, used)
    assert seen == set(NAMES)


def test_launches_and_access():
    """Two launches each way, with loads and stores of 16 bytes at the usual sizes."""
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        with compiling(90) as compiled:
            x, vector = torch.empty(2048, 2, 512, dtype=dtype, device="meta"), torch.empty(512, device="meta")
            steps = torch.empty((), dtype=torch.int64, device="meta")
            mask = torch.empty(2, 2048, dtype=torch.bool, device="meta")
            arguments = (x, mask, vector, vector, vector, vector, steps, 4, 1e-5, 0.9, 0, True)
            _, scales, vectors, tally = triton_ops.power_forward(*arguments)
            triton_ops.power_backward(
                x, x, mask, vector, scales, vectors, vector, vector, steps, tally, 4, 1e-5, 0.9, True
            )
        assert [name for name, *_ in compiled] == [
            "observe",
            "finish_power_forward",
            "differentiate",
            "finish_power_backward",
        ]
        for name, _, kernel in compiled:
            if name in ("observe", "differentiate"):
                assert accesses(kernel) == (16, 16), (dtype, name)


@pytest.mark.slow
@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
def test_compiles_for_all_shapes(dtype, capability):
    for shape in [*SHAPES, MANY]:
        for masked in (True, False):
            with compiling(capability) as compiled:
                call_all(*shape, dtype, masked)
            for name, _, kernel in compiled:
                used = resources(kernel)
                # float64 is there for gradient checks and may spill
                assert used["LOCAL"] == 0 and (used["STACK"] <= 16 or dtype is torch.float64), (shape, name, used)


def main(capabilities: list[int]) -> None:
    print("sm  dtype     rows x channels / groups  kernel                 grid         warps  registers  stack  shared")
    for capability in capabilities:
        for dtype in (torch.float32, torch.bfloat16):
            for rows, channels, groups in SHAPES:
                with compiling(capability) as compiled:
                    call_all(rows, channels, groups, dtype, True)
                for name, grid, kernel in compiled:
                    used = resources(kernel)
                    print(
                        f"{capability}  {str(dtype)[6:]:8}  {f'{rows} x {channels} / {groups}':24}  {name:21}  "
                        f"{f'{grid[0]} x {grid[1]}':11}  {kernel.metadata.num_warps:5}  {used['REG']:9}  "
                        f"{used['STACK']:5}  {used['SHARED']:6}",
                        flush=True,
                    )


if __name__ == "__main__":
    main([int(argument) for argument in sys.argv[1:]] or [80, 90])
