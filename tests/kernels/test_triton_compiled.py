"""Triton's kernels compiled for GPUs that need not be there: all of them compile, and none runs out of registers.

A table of what each needs: ``python -m tests.kernels.test_triton_compiled [CAPABILITY ...]``
"""

import re
import subprocess
import sys
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
from triton.runtime import JITFunction, driver  # noqa: E402

from pn_fairseq.kernels import triton_kernels, triton_ops  # noqa: E402

if triton_ops.INTERPRETED:
    pytest.skip("the interpreter is on, which compiles nothing", allow_module_level=True)

CUOBJDUMP = Path(nvidia.__file__).parent / "bin" / "cuobjdump"
NAMES = [
    name for name, value in vars(triton_kernels).items() if isinstance(value, JITFunction) and not name.startswith("_")
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
    with (
        mock.patch.object(driver, "_active", _NoGpu(capability)),
        mock.patch.multiple(triton_ops, kernels=kernels, _multiprocessors=lambda device: 132),
    ):
        yield compiled


#: How dy and x lie in memory: one token's gradient for all of them, as that of a sum is, and channels apart.
LAYOUTS = ["contiguous", "expanded dy", "channels first"]


def call_all(
    rows: int, channels: int, groups: int, dtype: torch.dtype, masked: bool, layout: str = "contiguous"
) -> None:
    """Every operator, on tensors without memory."""

    def empty(*shape, dtype=torch.float32):
        return torch.empty(*shape, dtype=dtype, device="meta")

    x, vector = empty(rows // 2, 2, channels, dtype=dtype), empty(channels)
    if layout == "channels first":
        x = empty(channels, rows // 2, 2, dtype=dtype).permute(1, 2, 0)
    dy = empty((), dtype=dtype).expand(x.shape) if layout == "expanded dy" else x
    mask = empty(2, rows // 2, dtype=torch.bool) if masked else None
    scales, vectors, steps, tally = (
        empty(rows // 2, 2, groups),
        empty(5, channels),
        empty((), dtype=torch.int64),
        empty(4, dtype=torch.int64),
    )
    for warmup in (0, 2**62):
        triton_ops.power_forward(x, mask, vector, vector, vector, vector, steps, groups, 1e-5, 0.9, warmup, True)
    triton_ops.power_backward(
        dy, x, mask, vector, scales, vectors, vector, vector, steps, tally, groups, 1e-5, 0.9, True
    )
    for mean in (None, vector):
        state = mean, vector, steps
        triton_ops.batch_forward(x, mask, vector, vector, *state, groups, 1e-5, 0.9, mean is None, True)
        triton_ops.batch_backward(
            dy, x, mask, vector, scales, empty(2 if mean is None else 4, channels), *state, tally, groups, 1e-5, True
        )
        triton_ops.moments(x, mask, groups, 1e-5, mean is not None)
        triton_ops.normalize(x, vector, vector, mean, vector, scales if mean is None else None, groups, 1e-5)
        triton_ops.gradient_sums(dy, x, mask, mean, scales, groups)
        triton_ops.gradient(dy, x, mask, vector, vector, mean, mean, scales, groups, False)
    triton_ops.gradient(dy, x, None, vector, None, None, None, scales, groups, True)


def resources(kernel) -> dict[str, int]:
    """Registers of a thread, bytes of its stack, where registers spill to, and of shared and local memory."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        command = [CUOBJDUMP, "--dump-resource-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return {name: int(value) for name, value in re.findall(r"\b(REG|STACK|SHARED|LOCAL):(\d+)", text)}


def check_resources(compiled: list, stack: int = 16) -> None:
    """8 bytes of stack are a call of the slow path of a division."""
    for name, _, kernel in compiled:
        used = resources(kernel)
        assert used["LOCAL"] == 0 and used["STACK"] <= stack, (name, used)
        assert used["REG"] * kernel.metadata.num_warps * 32 <= 65536, (name, used)


def widest(kernel) -> dict[str, int]:
    """Bytes that one thread loads and stores at once in global memory, at most."""
    found = {"ld": 0, "st": 0}
    for kind, vector, bits in re.findall(r"\b(ld|st)\.global[.\w:]*?(?:\.v(\d))?\.b(\d+)", kernel.asm["ptx"]):
        found[kind] = max(found[kind], int(vector or 1) * int(bits) // 8)
    return found


def test_all_compile():
    with compiling(90) as compiled:
        call_all(4096, 1024, 16, torch.bfloat16, masked=True)
    check_resources(compiled)
    assert {name for name, *_ in compiled} == set(NAMES) - {"sum_over_groups"}


@pytest.mark.parametrize("layout", LAYOUTS[1:])
@pytest.mark.parametrize("capability", [80, 90])
def test_all_compile_for_channels_apart(capability, layout):
    with compiling(capability) as compiled:
        call_all(4096, 512, 4, torch.float32, masked=True, layout=layout)
    check_resources(compiled)
    assert {name for name, *_ in compiled} == set(NAMES) - {"sum_over_groups"}


@pytest.mark.parametrize(
    ("capability", "dtype"), [(80, torch.float16), (90, torch.bfloat16), (90, torch.float32)], ids=str
)
def test_a_step_is_two_launches_each_way_with_wide_accesses(capability, dtype):
    x, vector = torch.empty(2048, 2, 512, dtype=dtype, device="meta"), torch.empty(512, device="meta")
    mask = torch.empty(2, 2048, dtype=torch.bool, device="meta")
    steps = torch.empty((), dtype=torch.int64, device="meta")
    with compiling(capability) as compiled:
        _, scales, vectors, tally = triton_ops.power_forward(
            x, mask, vector, vector, vector, vector, steps, 4, 1e-5, 0.9, 0, True
        )
        triton_ops.power_backward(x, x, mask, vector, scales, vectors, vector, vector, steps, tally, 4, 1e-5, 0.9, True)
    (_, _, forward), (_, _, rest), (_, _, backward), (_, _, rest_of_backward) = compiled
    check_resources(compiled)
    for kernel in (forward, backward):
        assert widest(kernel) == {"ld": 16, "st": 16}
    for kernel in (rest, rest_of_backward):  # what others have written is read after a ticket was drawn, and not before
        ptx = re.sub(r"//.*|\s+", " ", kernel.asm["ptx"])
        assert re.search(r"bar\.sync[^@]*@\S+ atom\.global\.gpu\.acq_rel\.add\.f32.*?bar\.sync.*?ld\.global\.cg", ptx)


@pytest.mark.slow
@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
def test_all_compile_for_all_shapes(dtype, capability):
    for shape in [*SHAPES, MANY]:
        for masked in (True, False):
            with compiling(capability) as compiled:
                call_all(*shape, dtype, masked)
            # float64 is there for gradient checks and may spill
            check_resources(compiled, stack=4096 if dtype is torch.float64 else 16)


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
