"""The norms that docs/adding_a_norm.md prints: the shared suite, an oracle, and a training with
fairseq.
"""

import re
import shutil
import sys

import numpy as np
import pytest
import torch

import pn_fairseq.models  # noqa: F401 (registers them for --arch, also where a test has imported the package before)
from pn_fairseq.common.checkpoint_files import find_checkpoints
from pn_fairseq.common.checkpoints import load_checkpoint
from pn_fairseq.norms import NORMS, build_norm, load_norms

from ..fixtures.training import model_of, train
from ..norms.helpers import (
    CHANNELS,
    affine_of,
    assert_close,
    assert_training_follows,
    batches,
    random_batch,
    randomize_affine,
    rng,
    train_step,
)
from ..norms.oracle_windows import UnifiedOracle
from ..scripts_helpers import ROOT, refused, run, verb

BLOCKS = re.findall(
    r"^```python\n(.*?)^```", (ROOT / "docs/adding_a_norm.md").read_text("utf-8"), re.M | re.S
)
LONGEST = {"my-unified": 80, "my-mix": 45, "l1": 25}


@pytest.fixture(scope="module")
def norm_modules(tmp_path_factory):
    """Name -> file."""
    folder, files = tmp_path_factory.mktemp("norms"), {}
    for name, code in zip(LONGEST, BLOCKS, strict=True):
        files[name] = folder / f"my_{name.removeprefix('my-')}.py"
        files[name].write_text(code, "utf-8")
        load_norms(files[name])
    return files


def test_the_examples_are_short_and_use_public_names_alone(norm_modules):
    for name, code in zip(LONGEST, BLOCKS, strict=True):
        assert len([line for line in code.splitlines() if line.strip()]) <= LONGEST[name]
        assert NORMS[name].cls.__module__.startswith("pn_fairseq_norm_module_my_")
        imports = re.findall(r"^(?:from|import) (\S+)", code, re.M)
        assert set(imports) <= {"dataclasses", "torch", "pn_fairseq.norms"}
        assert not re.search(r"(?<!\w)_[a-z]", code), "a private name"


def suite(files, *options, cwd):
    """pn test-norms in another process."""
    modules = ",".join(map(str, files))
    return run("pn", "test-norms", "--norm-module", modules, *options, cwd=cwd, check=False)


@pytest.mark.ci
def test_the_shared_suite_from_outside(norm_modules, tmp_path):
    """test_planted_bugs_are_named runs some of it."""
    result = suite(norm_modules.values(), cwd=tmp_path)
    assert result.returncode == 0, result.stdout[-5000:] + result.stderr[-2000:]
    assert int(re.search(r"(\d+) passed", result.stdout)[1]) > 180 and "failed" not in result.stdout
    assert list(tmp_path.iterdir()) == []


def test_a_name_that_a_norm_misspells_is_one_line(tmp_path, norm_modules, capsys):
    code = planted("typo", 'name = "running_psi2"', 'name = "running_psi"')
    (tmp_path / "typo.py").write_text(code, "utf-8")
    needles = "'typo': moment_name names 'running_psi'", "makes", "running_psi2"
    code = verb("test-norms")(["--norm-module", tmp_path / "typo.py"])
    line = refused(capsys, code, *needles)
    assert line.startswith("pn test-norms: error: ")


def planted(name, right, wrong):
    """The first norm of the page, registered as ``name``, with a bug."""
    code = BLOCKS[0]
    assert right in code
    for old, new in (('"myun"', '"my-unified"'), ("my-unified", name), (right, wrong)):
        code = code.replace(old, new)
    return code


#: Name -> what is planted, and how the suite says it.
BUGS = {
    "sum": (" / step.batch.count.clamp(min=1)", "", "depends on how many tokens a batch has"),
}
derivative = "dx is wrong: along a direction the derivative is"
BUGS["factor"] = ("psi2, nu=nu", "psi2, nu=1.5 * nu", derivative)
never = '    mixes_tokens = "never"\n    moment_name'
BUGS["mixes"] = ("    moment_name", never, "mixes_tokens is 'never', but in")
reading = "        float(step.state['nu'][0])\n        parameters, _"
BUGS["read"] = ("        parameters, _", reading, "a training step reads")


@pytest.mark.ci
def test_planted_bugs_are_named(norm_modules, tmp_path):
    """In norms that have some, and in no other."""
    code = "\n".join(planted(name, right, wrong) for name, (right, wrong, _) in BUGS.items())
    (tmp_path / "bugs.py").write_text(code, "utf-8")
    tests = "means_over or is_a_derivative or tokens_as_the or no_value_is or state_dict"
    result = suite([*norm_modules.values(), "bugs.py"], "--", "-k", tests, cwd=tmp_path)
    assert result.returncode == 1
    assert re.match(rf"\d+ tests of .*, {', '.join(BUGS)}\n", result.stdout)
    failures = re.findall(r"^FAILED \w+\[(\w+).*?\]: AssertionError: (.*)", result.stdout, re.M)
    for name, (_, _, message) in BUGS.items():
        messages = [text for failed, text in failures if failed == name]
        assert any(message in text for text in messages), f"{name}: {messages}"
    assert len(failures) == int(re.search(r"(\d+) failed", result.stdout)[1])
    assert {name for name, _ in failures} == {*BUGS}
    assert {path.name for path in tmp_path.iterdir()} <= {"bugs.py", "__pycache__"}


@pytest.mark.parametrize("warmup", [0, 8])
@pytest.mark.parametrize("before", [0, 996], ids=["new", "old enough for r"])
def test_unified_normalization_follows_the_formulas(warmup, before, norm_modules):
    options = {"alpha_fwd": 0.8, "alpha_bwd": 0.7, "psi_warmup_updates": warmup}
    norm = randomize_affine(build_norm("my-unified", CHANNELS, **options)).double().train()
    oracle = UnifiedOracle(CHANNELS, 0.8, 0.7, warmup, **affine_of(norm))
    if before:  # the first steps of a training that had taken so many
        norm.num_batches_tracked.fill_(before)
        norm.psi2_window.fill_(1.0)
        norm.lambda_window.fill_(1.0)
        oracle.count = before
        for number in range(before - 3, before + 1):
            oracle.psi2s[number] = oracle.lambdas[number] = np.ones(CHANNELS)
    steps = batches(16, seed=1, low=0.1, high=9, sentences=3)
    assert_training_follows(norm, oracle, steps, rtol=5e-6, dtype=torch.float64)


IN_THE_PACKAGE = """
from pathlib import Path

import pn_fairseq.models
from docs.tools.generated import properties
from fairseq.models import ARCH_MODEL_REGISTRY
from pn_fairseq.__main__ import call
from pn_fairseq.report.systems import norm_labels
from pn_fairseq.testing.command import main

assert Path(pn_fairseq.models.__file__).is_relative_to(Path.cwd())
assert call(["norms"]) == call(["norms", "l1"]) == 0
stems = ("transformer", "transformer_lm", "tensorized_lm")
assert all(f"{stem}_l1_tiny" in ARCH_MODEL_REGISTRY for stem in stems)
assert norm_labels()["l1"] == "L1" and "| `l1` | `weight` (C,), `bias` (C,) |" in properties()
assert main(["l1", "--", "-k", "state or batch_first"]) == 0
"""


@pytest.mark.ci
def test_a_norm_of_the_package_stands_in_three_places(tmp_path):
    """Its file, its entry in the registry and its row on the page; all that lists norms follows."""
    package = tmp_path / "pn_fairseq"
    shutil.copytree(ROOT / "pn_fairseq", package, ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "data").symlink_to(ROOT / "data")
    code = re.sub(r"^@register_norm.*\n", "", BLOCKS[-1], flags=re.M).replace(", register_norm", "")
    code = code.replace("pn_fairseq.norms import", "pn_fairseq.norms.core.base import")
    (package / "norms/l1.py").write_text(code)
    registry = (package / "norms/registry.py").read_text("utf-8")
    imported = "\nfrom pn_fairseq.norms.l1 import L1Norm\n\n#: Constructor"
    registry = registry.replace("\n\n#: Constructor", imported, 1)
    before, after = registry.rsplit("\n}", 1)  # the end of NORMS
    entry = '\n    "l1": NormEntry(L1Norm, "l1", "L1 normalization (L1)"),\n}'
    (package / "norms/registry.py").write_text(before + entry + after, "utf-8")
    places = {"cwd": tmp_path, "PYTHONPATH": f"{tmp_path}:{ROOT}"}
    result = run(sys.executable, "-c", IN_THE_PACKAGE, **places)
    assert "L1 normalization (L1)" in result.stdout and "failed" not in result.stdout
    # test_table_of_norms_is_the_registry asks for the row.


def test_l1_norm_follows_its_formula(norm_modules):
    norm, x = randomize_affine(build_norm("l1", CHANNELS)), random_batch(rng(2))[0]
    weight, bias = (parameter.detach().double().numpy() for parameter in (norm.weight, norm.bias))
    expected = weight * x / (np.abs(x).mean(-1, keepdims=True) + norm.eps) + bias
    assert_close(norm(torch.tensor(x, dtype=torch.float32)), expected, 1e-6)


def test_the_mixed_norm_has_the_gradients_of_its_formula(norm_modules):
    """By torch's batch_norm and rms_norm in float64, without padding."""
    norm = randomize_affine(build_norm("my-mix", CHANNELS)).double().train()
    x, _, dy = random_batch(rng(3), (7, CHANNELS))
    actual = train_step(norm, x, None, dy, torch.float64)
    leaf = torch.tensor(x, requires_grad=True)
    batch = torch.nn.functional.batch_norm(leaf, None, None, norm.weight, norm.bias, training=True)
    token = torch.nn.functional.rms_norm(leaf, (CHANNELS,), eps=norm.eps)
    y = norm.batch_share * batch + norm.token_share * token
    names, parameters = zip(*norm.named_parameters(), strict=True)
    expected = torch.autograd.grad(y, (leaf, *parameters), torch.tensor(dy))
    assert_close(actual["y"], y, 1e-10)
    for name, gradient in zip(("dx", *(f"d{name}" for name in names)), expected, strict=True):
        assert_close(actual[name], gradient, 1e-10, name)


@pytest.mark.ci
def test_training_with_fairseq(norm_modules, data, tmp_path, monkeypatch, capfd):
    """Trained, resumed, reported, averaged, recalibrated and decoded, from other folders than
    that of the file.
    """
    for folder in ("straight", "stopped"):  # from which the files are named
        (tmp_path / folder).mkdir()
        for file in norm_modules.values():
            (tmp_path / folder / file.name).symlink_to(file)
    flags = "--norm-module my_unified.py,my_l1.py --encoder-norm my-unified --decoder-norm l1"
    flags += " --norm-options window=3 --norm-stats-interval 1 --save-interval-updates 1"
    flags = flags.split()
    log = train(data, tmp_path / "straight", *flags, updates=3)
    straight = model_of(tmp_path / "straight")
    for key, value in straight.items():
        assert not key.endswith("num_batches_tracked") or int(value) == 3, key
    assert straight["encoder.layer_norm.lambda_window"].shape == (3, 128)
    assert "decoder.layer_norm.weight" in straight and "decoder.layer_norm.nu" not in straight
    assert all(f'"norm_{name}"' in log for name in ("psi_distance", "nonfinite_steps"))

    for updates in (1, 3):
        train(data, tmp_path / "stopped", *flags, updates=updates)
    resumed = model_of(tmp_path / "stopped")
    for key, value in straight.items():
        assert torch.equal(resumed[key], value), key

    monkeypatch.chdir(tmp_path)
    newest = find_checkpoints(tmp_path / "straight/checkpoints", "update", last=2)
    inputs = ("--inputs", *newest, "--output", tmp_path / "averaged.pt")
    code = verb("average")([*inputs, "--recalibrate", data / "bin", "--batches", 2])
    assert code == 0, capfd.readouterr().err
    averaged = load_checkpoint(tmp_path / "averaged.pt")
    psi2 = averaged["model"]["encoder.layer_norm.running_psi2"]
    assert not torch.equal(psi2, straight["encoder.layer_norm.nu"])
    assert "recalibrated 7 norms" in capfd.readouterr().out

    # In another process, which has not seen the file.
    files = ("--user-dir", ROOT / "pn_fairseq", "--path", tmp_path / "averaged.pt")
    how = "--gen-subset valid --max-tokens 2000 --cpu --beam 1 --max-len-b 5".split()
    result = run("fairseq-generate", data / "bin", *files, *how)
    assert len(re.findall(r"^H-", result.stdout, re.M)) == 40
