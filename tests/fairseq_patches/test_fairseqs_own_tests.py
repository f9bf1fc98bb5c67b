"""fairseq's own tests, with and without the plugin.

``FAIRSEQ=/path/to/a/checkout/of/fairseq`` says where they are.
"""

import os
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path
from xml.etree import ElementTree

import pytest

from ..scripts_helpers import ROOT, environment

#: They need GPUs or audio.
LEFT_OUT = ("gpu", "speech", "speech_recognition")
START = "import sys, pytest; {}; sys.exit(pytest.main(sys.argv[1:]))"
PLUGIN = "import fairseq.models, pn_fairseq"


def outcomes(tests: Path, results: Path, load: str) -> dict[str, str]:
    """Name of each test -> "passed", "failed" or "skipped"."""
    options = [
        "-q",
        "-p",
        "no:cacheprovider",
        "--continue-on-collection-errors",
        f"--junitxml={results}",
    ]
    options += [f"--ignore=tests/{name}" for name in LEFT_OUT]
    command = [sys.executable, "-c", START.format(load), *options, "tests"]
    path = os.pathsep.join([str(tests), str(ROOT)])
    subprocess.run(
        command,
        cwd=tests,
        env=environment(PYTHONPATH=path, OMP_NUM_THREADS="1"),
        stdout=subprocess.DEVNULL,
    )
    found = {}
    for case in ElementTree.parse(results).iter("testcase"):
        tags = {each.tag for each in case}
        outcome = "passed"
        if "skipped" in tags:
            outcome = "skipped"
        if tags & {"failure", "error"}:
            outcome = "failed"
        found[f"{case.get('classname')}.{case.get('name')}"] = outcome
    return found


@pytest.mark.slow
@pytest.mark.skipif("FAIRSEQ" not in os.environ, reason="FAIRSEQ names no checkout of fairseq")
def test_nothing_that_passes_without_the_plugin_fails_with_it(tmp_path, capsys):
    # A copy: in the checkout its own package would be imported instead of the installed one.
    for folder in ("tests", "examples"):
        shutil.copytree(Path(os.environ["FAIRSEQ"]) / folder, tmp_path / folder, symlinks=True)
    without = outcomes(tmp_path, tmp_path / "without.xml", "pass")
    with_plugin = outcomes(tmp_path, tmp_path / "with.xml", PLUGIN)
    with capsys.disabled():
        for name, found in (("without", without), ("with", with_plugin)):
            print(f"\n{name} the plugin: {dict(Counter(found.values()))}")
        for name in sorted({*without, *with_plugin}):
            before = without.get(name)
            after = with_plugin.get(name)
            if before != after:
                print(f"{name}: {before} without the plugin, {after} with it")
    passed = {name for name, outcome in without.items() if outcome == "passed"}
    assert len(passed) > 100
    for name in passed:
        assert with_plugin.get(name) == "passed", name
