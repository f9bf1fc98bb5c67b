"""``python -m benchmarks.gpu``: its sections run, fail, are cut off and run again as they should,
and measure what they say.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import zipfile
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from benchmarks import gpu, gpu_sections
from benchmarks.gpu_sections import Batch, Kit, Section
from pn_fairseq import kernels
from pn_fairseq.common.command import UserError
from pn_fairseq.kernels.selection import EXTENSION
from pn_fairseq.norms import build_norm, running_norms

from ..scripts_helpers import ROOT, environment, run, wait_for

#: Enough for a machine that is busy with other tests.
SECONDS = "6000"
#: Sections that compile, which takes a while.
SLOW = ("warm", "inductor", "compiled")


@pytest.fixture(autouse=True)
def _signals():
    """The command handles them."""
    numbers = signal.SIGINT, signal.SIGTERM
    before = [signal.getsignal(number) for number in numbers]
    yield
    for number, handler in zip(numbers, before, strict=True):
        signal.signal(number, handler)


# Sections of the tests. Processes find them by their names in this module.


def finishes(kit):
    kit.row("Finished", part=kit.part, cases=str(kit.own("abcde")))


def raises(kit):
    kit.row("Failed", value=1.5)
    with kit.trying("the second case"):
        raise ValueError("the reason\nand more")
    kit.row("Failed", value=2.5)


def is_killed(kit):
    os.kill(os.getpid(), signal.SIGKILL)


def hangs(kit):
    kit.row("Cut off", value=1234.5)
    subprocess.Popen(["sleep", "600"])
    time.sleep(600)


def use(monkeypatch, **sections):
    """Other sections, by name: how long they may take, what they do, in how many parts."""
    made = [Section(name, *values) for name, values in sections.items()]
    monkeypatch.setattr(gpu, "SECTIONS", made)
    monkeypatch.setattr(gpu, "GOALS", ())


def measure(out, seconds=SECONDS, *more):
    return gpu.main(["--out", str(out), "--seconds", seconds, "--tiny", *more])


def sections_of(out):
    return json.loads((out / "gpu.json").read_text())["sections"]


def test_a_section_that_fails_leaves_a_line_and_the_next_begins(tmp_path, monkeypatch, capfd):
    use(monkeypatch, first=(1, raises), second=(1, is_killed), third=(1, finishes, 5))
    assert measure(tmp_path) == 1
    found = sections_of(tmp_path)
    assert [part["state"] for part in found.values()] == ["failed", "failed", "finished"]
    assert found["first"]["rows"] == [["Failed", {"value": 1.5}], ["Failed", {"value": 2.5}]]
    assert found["first"]["notes"] == ["the second case failed: ValueError: the reason"]
    assert found["second"]["notes"] == ["a process ended by SIGKILL"]
    rows = sorted(row["cases"] for _, row in found["third"]["rows"])
    assert rows == ["['a', 'c', 'e']", "['b', 'd']"]  # a dry run has two processes at most
    page = (tmp_path / "gpu.md").read_text()
    assert "| first | failed |" in page
    assert "- first: the second case failed: " in page
    assert "not finished: first, second (run the same command again)" in capfd.readouterr().err
    assert "and more" in (tmp_path / "log.txt").read_text()  # the traceback


def test_a_section_that_hangs_is_cut_off_and_keeps_its_rows(tmp_path, monkeypatch):
    use(monkeypatch, first=(8, hangs), second=(20, finishes))
    begin = time.monotonic()
    assert measure(tmp_path, "28") == 0
    assert time.monotonic() - begin < 200
    found = sections_of(tmp_path)
    assert found["first"]["state"] == "cut off"
    assert found["second"]["state"] == "finished"
    assert "| 1,234 |" in (tmp_path / "gpu.md").read_text()


def test_finished_sections_are_not_repeated(tmp_path, monkeypatch):
    use(monkeypatch, first=(1, finishes), second=(1, raises))
    measure(tmp_path)
    before = sections_of(tmp_path)
    use(monkeypatch, first=(1, is_killed), second=(1, finishes))
    assert measure(tmp_path) == 0
    after = sections_of(tmp_path)
    assert after["first"] == before["first"]
    assert after["second"]["state"] == "finished"
    assert [table for table, _ in after["second"]["rows"]] == ["Finished"]


def test_an_interrupted_section_is_written_and_ended(tmp_path, monkeypatch):
    use(monkeypatch, first=(1, hangs))
    monkeypatch.setattr(gpu, "receive", partial(interrupted, gpu.receive))
    with pytest.raises(KeyboardInterrupt):
        measure(tmp_path)
    found = sections_of(tmp_path)["first"]
    assert found["state"] == "cut off"
    assert found["rows"] == [["Cut off", {"value": 1234.5}]]


def interrupted(receive, pipes, until, result):
    while not result.rows:
        receive(pipes, time.monotonic() + 0.1, result)
    raise KeyboardInterrupt


def test_a_section_gets_the_time_that_others_leave():
    sections = [Section(str(seconds), seconds, finishes) for seconds in (90, 20, 60)]
    given = partial(gpu.seconds_for, sections[0], sections[1:])
    assert given(170) == 90
    assert given(200) == 120
    assert given(50) == 50


def test_the_sections_fit_into_the_time():
    assert sum(section.seconds for section in gpu.SECTIONS) <= gpu.parse(["--out", "x"]).seconds
    names = [section.name for section in gpu.SECTIONS]
    assert len({*names}) == len(names)
    assert {goal.section for goal in gpu.GOALS} <= {*names}


def test_goals_by_hand(monkeypatch):
    most = gpu.Goal("most", "a", "T", ("x", "y"), 1.05, {"model": "tiny"})
    least = gpu.Goal("least", "a", "T", ("y",), 0.8, at_most=False)
    later = gpu.Goal("later", "b", "U", ("x",), 1.0)
    monkeypatch.setattr(gpu, "GOALS", (most, least, later))
    rows = [{"model": "tiny", "x": 1.01, "y": 1.05}, {"model": "big", "x": 2.0, "y": 0.7}]
    result = gpu.Result("finished")
    found = gpu.goal_rows({"a": result}, {"T": rows})
    assert [row["worst"] for row in found] == [1.05, 0.7, None]
    assert [row["reached"] for row in found] == ["yes", "no", "not measured"]
    assert [row["limit"] for row in found] == ["at most 1.05", "at least 0.8", "at most 1"]
    result.state = "cut off"
    rows = [{"model": "tiny", "x": float("nan")}]
    (first, *_) = gpu.goal_rows({"a": result}, {"T": rows})
    assert first["reached"] == "no, of what was measured"


def test_the_goals_are_about_columns_that_exist(monkeypatch):
    """Their names are those of the dry run, and of the shapes of a GPU."""
    assert gpu_sections.LARGE in gpu_sections.SHAPES
    bandwidth = next(goal for goal in gpu.GOALS if goal.section == "bandwidth")
    assert bandwidth.where == {"shape": "131072x1024"}
    assert len(bandwidth.columns) == 10
    updates = [goal for goal in gpu.GOALS if goal.section == "updates"]
    assert [goal.limit for goal in updates] == [1.05, 1.02, 1.10, 1.04]
    assert {goal.where["model"] for goal in updates} == {*gpu_sections.SIZES}


def test_the_page_has_these_goals():
    page = (ROOT / "docs/results/gpu.md").read_text("utf-8")
    (goals,) = re.findall(r"\| measured \| goal \|\n\|---\|---\|\n((?:\|.*\|\n)+)", page)
    listed = re.findall(r"at (?:most|least) ([\d.]+%?) \|", goals)
    expected = []
    for goal in gpu.GOALS:
        if goal.section == "updates":
            expected.append(f"{goal.limit:.2f}")
        if goal.section == "bandwidth":
            expected.append(f"{goal.limit:.0%}")
    assert sorted(listed) == sorted(expected)


def test_a_fallback_to_the_reference_is_a_failure(monkeypatch):
    reason = {"CPU": ("reference", "no compiler")}
    monkeypatch.setattr(kernels, "describe", lambda: reason)
    with pytest.raises(RuntimeError, match="plain PyTorch computed in place of .*no compiler"):
        gpu_sections.check_kernels(kit())


def test_dry_run(tmp_path, monkeypatch):
    """All sections but those that compile."""
    quick = [section for section in gpu.SECTIONS if section.name not in SLOW]
    monkeypatch.setattr(gpu, "SECTIONS", quick)
    assert measure(tmp_path) == 0, (tmp_path / "log.txt").read_text()[-3000:]
    check_dry_run(tmp_path, {section.name for section in quick})


def check_dry_run(out: Path, names: set[str]) -> None:
    found = sections_of(out)
    assert found.keys() == names
    for part in found.values():
        assert part["state"] == "finished"
        assert part["notes"] == []
    check_norms(rows_of(found, "norms"))
    ranks = rows_of(found, "ranks")
    assert [row["norm"] for row in ranks] == ["batch", "power-v", "power"]
    assert max(row["of the tolerance"] for row in ranks) < 1
    replays = rows_of(found, "replays")
    assert len(replays) == 10
    for row in replays:
        assert row["counted"] == row["steps"] == 6
        assert row["state differs by"] == 0
    (update,) = rows_of(found, "updates")
    assert update["trainer"] == "fairseq"
    assert update["ln"] == 1
    assert {"bn", "pn", "rms", "pn, diagnostics", "ln again"} <= update.keys()
    steps = {row["norm"] for row in rows_of(found, "steps")}
    assert {"torch LN", "pn", "pn, diagnostics", "un"} <= steps
    for row in rows_of(found, "bandwidth"):
        assert {*gpu_sections.KERNEL_COLUMNS} <= row.keys()
    page = (out / "gpu.md").read_text()
    assert page.startswith("<!-- not of runs.csv: ")
    assert f"PyTorch {torch.__version__}" in page
    assert " commit " in page
    assert "| at most 1.05 |" in page


def rows_of(found: dict, name: str) -> list[dict]:
    return [row for _, row in found[name]["rows"]]


def check_norms(rows):
    """All modules in three types."""
    assert len(rows) == 3 * len(gpu_sections.modules()) == 3 * 48
    for row in rows:
        assert row["largest difference"] < row["tolerance"]
    summary = gpu_sections.summary_of_check(rows)
    assert [row["modules"] for row in summary] == [48, 48, 48]


@pytest.mark.slow
def test_a_killed_dry_run_is_finished_by_the_same_command(tmp_path):
    command = [sys.executable, "-m", "benchmarks.gpu", "--tiny", "--seconds", SECONDS]
    command += ["--out", str(tmp_path)]
    options = {"cwd": ROOT, "env": environment(), "stderr": subprocess.DEVNULL}
    process = subprocess.Popen(command, **options)
    figures = tmp_path / "gpu.json"
    ranks = '"ranks": {"state": "finished"'
    wait_for(lambda: figures.exists() and ranks in figures.read_text(), process, 1500)
    process.kill()
    process.wait()
    before = sections_of(tmp_path)
    result = subprocess.run(command, **options)
    assert result.returncode == 0, (tmp_path / "log.txt").read_text()[-3000:]
    check_dry_run(tmp_path, {section.name for section in gpu.SECTIONS})
    after = sections_of(tmp_path)
    for name, part in before.items():
        assert after[name] == part
    compiled = rows_of(after, "compiled")
    assert len(compiled) == 6
    assert [row["missed"] for row in compiled] == [0, 0, 0, None, None, None]
    for row in rows_of(after, "inductor"):
        assert row["results differ by"] < 2e-6
    assert "not measured" in (tmp_path / "gpu.md").read_text()  # of the large model and shapes


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--out . --seconds 0 --tiny", "--seconds: must be a whole number of at least 1, not '0'"),
        ("--tiny", "the following arguments are required: --out"),
        ("--out file --tiny", "file: File exists"),
        ("--out .", "torch sees no GPU; --tiny is a dry run of all sections on the CPU"),
        ("--out other --tiny", "has figures of another machine or version (torch 1.0, now "),
    ],
)
def test_mistakes(flags, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(gpu, "measure", lambda *_: pytest.fail("measured"))
    (tmp_path / "file").touch()
    (tmp_path / "other").mkdir()
    saved = {"machine": {**gpu.describe_machine(), "torch": "1.0"}, "sections": {}}
    (tmp_path / "other/gpu.json").write_text(json.dumps(saved))
    assert gpu.command.run(gpu.TOOL, lambda: gpu.main(flags.split())) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("benchmarks.gpu: error: ")
    assert message in line


@pytest.mark.slow
def test_what_the_processes_begin_with_uses_no_gpu():
    """A process that is forked from one that has used a GPU cannot use it."""
    code = """
import torch
def used(*_):
    raise SystemExit("a GPU is looked for")
for name in ("is_available", "device_count", "init", "_lazy_init", "get_device_name"):
    setattr(torch.cuda, name, used)
torch._C._cuda_getDeviceCount = used
import benchmarks.gpu_sections
print("nothing")
"""
    assert run(sys.executable, "-c", code, cwd=ROOT).stdout == "nothing\n"


# What is measured.

#: torch warns that a pre-norm encoder uses no nested tensors.
of_transformers = pytest.mark.filterwarnings("ignore:enable_nested_tensor is True")


def kit(send=lambda message: None) -> Kit:
    return Kit(tiny=True, part=0, parts=1, send=send)


def expected_of(norm: nn.Module, batch: Batch, state: dict) -> tuple:
    """y, dx and the gradients of gain and bias of a training step of a norm."""
    norm.load_state_dict(state, strict=False)
    x = batch.x.clone().requires_grad_()
    y = norm(x, batch.mask)
    y.backward(batch.dy)
    gradients = [parameter.grad for parameter in norm.parameters()]
    return y.detach(), x.grad, torch.stack(gradients)


@pytest.mark.parametrize(
    ("name", "groups"), [("power", 0), ("power", 4), ("batch", 0), ("layer", 0), ("rms", 0)]
)
def test_the_measured_passes_are_those_of_the_norms(name, groups):
    batch = Batch.of(kit(), 37, 32, "float32")
    weight, bias, moment, nu, _ = batch.vectors
    state = {"weight": weight, "bias": bias, "running_psi2": moment, "nu": nu}
    passes = {
        "power": partial(gpu_sections.pn_passes, groups=groups),
        "batch": gpu_sections.bn_passes,
        "layer": gpu_sections.ln_passes,
        "rms": gpu_sections.rms_passes,
    }
    forward, backward = passes[name](gpu_sections.own_operators(), batch)
    y, (dx, parameters, *_) = forward()[0], backward()
    norm = build_norm(name, 32, layer_scale_groups=groups)
    expected = expected_of(norm, batch, state)
    assert_close(y, expected[0])
    assert_close(dx, expected[1])
    assert_close(parameters[: len(expected[2])], expected[2])


def test_torchs_layer_norm_is_measured():
    batch = Batch.of(kit(), 37, 32, "float32")
    forward, backward = gpu_sections.torch_ln_passes(batch)
    norm = nn.LayerNorm(32)
    norm.load_state_dict({"weight": batch.vectors[0], "bias": batch.vectors[1]})
    x = batch.x.clone().requires_grad_()
    y = norm(x)
    y.backward(batch.dy)
    assert_close(forward()[0], y)
    assert_close(backward()[0], x.grad)


@of_transformers
@pytest.mark.parametrize(
    ("dtype", "broken"),
    [("float32", False), ("bfloat16", False), ("float16", False), ("float32", True)],
)
def test_updates_without_fairseq(dtype, broken, monkeypatch, tmp_path):
    """Models of torch replace fairseq's where fairseq is missing or broken, and a line says so."""
    reason = "ModuleNotFoundError"
    monkeypatch.setitem(sys.modules, "fairseq", None)
    if broken:
        reason = "RuntimeError: the reason"
        (tmp_path / "fairseq.py").write_text("raise RuntimeError('the reason')")
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.delitem(sys.modules, "fairseq")
    before = {}
    monkeypatch.setattr(gpu_sections, "in_turns", partial(once, before))
    monkeypatch.setattr(gpu_sections, "DTYPES", {"float32": gpu_sections.DTYPES[dtype]})
    messages = []
    gpu_sections.updates(kit(messages.append))
    (kind, note), (_, table, row) = messages
    assert kind == "note"
    assert f"no fairseq ({reason}" in note
    assert table == gpu_sections.UPDATES
    assert row["trainer"] == "torch"
    assert list(before) == ["ln", "bn", "pn", "rms", "pn, diagnostics", "ln again"]


def once(done, work, rounds, warm):
    for name, update in work.items():
        update(0)
        done[name] = [1.0, 1.0]
    return done


@of_transformers
def test_a_model_of_torch_has_its_norms_in_the_encoder():
    torch.manual_seed(0)
    sizes = gpu_sections.SIZES["tiny"]
    model = gpu_sections.TorchModel(sizes, "pn", 50)
    norms = running_norms(model.transformer.encoder)
    assert len(norms) == len(running_norms(model)) == 2 * sizes.layers + 1
    assert {norm.layer_scale_groups for norm in norms} == {sizes.heads}
    gpu_sections.watched(model)
    update = gpu_sections._torch_update(kit(), model, 50, torch.float32)
    before = model.embedding.weight.clone()
    update(0)
    assert not model.embedding.weight.equal(before)
    for norm in norms:
        assert norm.num_batches_tracked == 1
        assert norm.diagnostics()


def test_the_profiler_is_loaded_after_all_host_times(monkeypatch):
    """It would slow down the launches that follow."""
    calls = []
    monkeypatch.setattr(Kit, "times", lambda *_: calls.append("time") or (1.0, 1.0))
    monkeypatch.setattr(Kit, "device_time", lambda *_: 1.0)
    monkeypatch.setattr(gpu_sections, "_launches", lambda *_: calls.append("profile"))
    gpu_sections.steps(kit())
    count = len(gpu_sections._contestants(8))
    assert calls == ["time"] * count + ["profile"] * count


def test_a_section_that_cannot_be_compiled_leaves_the_others(monkeypatch):
    begun = []

    def broken(kit):
        begun.append("broken")
        raise RuntimeError("the reason")

    for name in ("updates", "compiled", "inductor", "bandwidth", "steps"):
        monkeypatch.setattr(gpu_sections, name, broken)
    messages = []
    gpu_sections.warm(kit(messages.append))
    assert begun == ["broken"] * 5
    assert {*messages} == {("note", "broken failed: RuntimeError: the reason")}


def test_the_page_says_that_there_are_no_cpp_kernels(tmp_path, monkeypatch):
    use(monkeypatch, first=(1, finishes))
    monkeypatch.setattr(gpu, "CPP_MISSING", "no compiler")
    measure(tmp_path)
    assert "; without the C++ kernels (no compiler); " in (tmp_path / "gpu.md").read_text()
    monkeypatch.setattr(gpu, "CPP_MISSING", None)
    with pytest.raises(UserError, match="no C\\+\\+ kernels no compiler, now None"):
        measure(tmp_path)


def test_a_wrong_norm_is_found(monkeypatch):
    """The check against float64 can fail."""
    rows = []
    monkeypatch.setattr(gpu_sections, "modules", lambda: [("power", "paper", 0)])
    monkeypatch.setattr(gpu_sections, "DTYPES", {"float32": torch.float32})
    right = kernels.OPERATORS["normalize"]
    gpu_sections.check_norms(kit(rows.append))
    with kernels.using("reference"):
        library = torch.library.Library("pn_fairseq", "IMPL")
        library.impl("normalize", partial(slightly_off, right), "CPU", allow_override=True)
        gpu_sections.check_norms(kit(rows.append))
        library._destroy()
    good, bad = (row["largest difference"] for _, _, row in rows)
    assert good < 2e-6 < 1e-4 < bad


def slightly_off(right, x, *rest):
    y, *others = right(x, *rest)
    return y * 1.001 if x.dtype == torch.float32 else y, *others


# The script for a machine without internet.


@pytest.fixture
def script(tmp_path):
    """The script in a checkout of its own, on a machine without a GPU. It finds a wheel without a
    use and a kernel of an earlier call.
    """
    checkout = tmp_path / "checkout"
    for folder in ("benchmarks", "pn_fairseq"):
        without = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / folder, checkout / folder, ignore=without)
    for name in ("setup.py", "pyproject.toml", "README.md"):
        shutil.copy2(ROOT / name, checkout)
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    with zipfile.ZipFile(wheels / "bitarray-99.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("carried.py", "")
        info = "Metadata-Version: 2.1\nName: bitarray\nVersion: 99.0\n"
        wheel.writestr("bitarray-99.0.dist-info/METADATA", info)
        kind = "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        wheel.writestr("bitarray-99.0.dist-info/WHEEL", kind)
        wheel.writestr("bitarray-99.0.dist-info/RECORD", "")
    kernel = tmp_path / f"pn_fairseq_compiled_{os.getuid()}" / "triton" / "KEY"
    kernel.mkdir(parents=True)
    for name in ("kernel.cubin", "kernel.json", "kernel.ttir", "kernel.ptx", "__grp__kernel.json"):
        (kernel / name).write_text(name)
    variables = {"PYTHON": sys.executable, "WHEELS": str(wheels), "CUDA_VISIBLE_DEVICES": ""}
    command = ["bash", checkout / "benchmarks/gpu.sh"]
    return partial(run, *command, check=False, TMPDIR=str(tmp_path), **variables)


@pytest.mark.slow
def test_the_script_installs_what_was_carried_along(tmp_path, script):
    out = tmp_path / "out"
    done = script("measure", out, "500")
    assert done.returncode == 2
    assert f"torch {torch.__version__}" in done.stderr
    assert "bitarray 99.0" in done.stderr
    assert "compiles the C++ kernels" not in done.stderr
    assert "benchmarks.gpu: error: torch sees no GPU" in done.stderr
    torn = tmp_path / "wheels/torn-1.0-py3-none-any.whl"
    torn.write_text("no archive")
    done = script("measure", out, "500")
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith("gpu.sh: error: pip cannot install the wheels")


@pytest.mark.slow
def test_the_script_keeps_what_was_compiled(tmp_path, script):
    """Of Triton's kernels what runs, and the C++ kernels; in the next call, at the same place."""
    out = tmp_path / "out"
    script("measure", out, "500")
    (kernels_of_this,) = tmp_path.glob("pn_fairseq_compiled_*")
    shutil.rmtree(kernels_of_this)
    own = tmp_path / "checkout/pn_fairseq/kernels"
    libraries = {file.name for file in own.glob("_cpp_*.so")}
    for name in libraries:
        (own / name).unlink()
    archive = out / "compiled.tar.gz"
    done = script("measure", out, "500", COMPILED=str(archive))
    assert f"uses the kernels in {archive}" in done.stderr
    assert {*os.listdir(kernels_of_this / "triton/KEY")} == {
        "__grp__kernel.json",
        "kernel.cubin",
        "kernel.json",
    }
    assert "compiles the C++ kernels" not in done.stderr
    assert {file.name for file in own.glob("_cpp_*.so")} == libraries != set()
    archive.write_bytes(archive.read_bytes()[:1000])
    done = script("measure", out, "500", COMPILED=str(archive))
    assert f"goes on without '{archive}'" in done.stderr


@pytest.mark.slow
def test_the_script_compiles_the_cpp_kernels(tmp_path, script):
    """A library that is older than its sources is replaced."""
    own = tmp_path / "checkout/pn_fairseq/kernels"
    (before,) = own.glob(f"{EXTENSION.rpartition('.')[2]}.so")
    old = before.stat().st_ino
    os.utime(before, (0, 0))
    (tmp_path / "list").write_text("info\n")
    done = script("train", "out", "500", tmp_path / "list")
    assert "compiles the C++ kernels" in done.stderr
    assert "goes on without" not in done.stderr
    assert before.stat().st_ino != old
    log = tmp_path / "checkout/runs/logs/1.log"
    assert "cpp" in log.read_text()


@pytest.mark.slow
def test_the_script_trains(tmp_path, script):
    (tmp_path / "list").write_text("--version\n")
    done = script("train", tmp_path / "out", "500", tmp_path / "list")
    assert done.returncode == 0, done.stderr
    assert "pn --version: finished" in done.stderr
    log = tmp_path / "checkout/runs/logs/1.log"
    assert log.read_text().startswith("pn_fairseq ")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--tiny", "expected download, measure or train (see --help), not '--tiny'"),
        ("measure", "expected measure OUT SECONDS (see --help)"),
        ("measure out", "expected measure OUT SECONDS (see --help)"),
        ("measure out soon", "expected measure OUT SECONDS (see --help)"),
        ("train out 60", "train needs a file with a list (see --help)"),
        ("train out 60 missing", "train needs a file with a list (see --help)"),
        ("download", "download needs the Python of the GPU's machine, such as 3.12"),
        ("download 2.7", "download needs the Python of the GPU's machine, such as 3.12"),
    ],
)
def test_mistakes_of_the_script(words, message):
    done = run("bash", ROOT / "benchmarks/gpu.sh", *words.split(), check=False)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"gpu.sh: error: {message}")
