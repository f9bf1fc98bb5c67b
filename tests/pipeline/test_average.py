"""pn average: the numbers, what is kept and refused, the selection of checkpoints, and that a
run is averaged once.
"""

import argparse
import os
from collections import OrderedDict

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf
from torch.testing import assert_close

from pn_fairseq.common.checkpoints import CheckpointError, load_checkpoint
from pn_fairseq.common.files import read_settings
from pn_fairseq.models import average_checkpoints as tool
from pn_fairseq.models.average_checkpoints import average_checkpoints
from pn_fairseq.pipeline import average

from ..scripts_helpers import assert_refused, in_process, locked_by_another, verb

main = verb("average")


def write(path, model, num_updates=None, cfg=None):
    """What pn average reads of a checkpoint of fairseq; ``model`` maps names to tensors."""
    history = {"optimizer_name": "FairseqAdam"}
    if num_updates is not None:
        history["num_updates"] = num_updates
    state = {
        "cfg": cfg or {"model": argparse.Namespace(arch="t", written_at=num_updates)},
        "model": OrderedDict(model),
        "optimizer_history": [history],
        "extra_state": {"val_loss": num_updates},
        "last_optimizer_state": {"state": {0: {"exp_avg": torch.zeros(3)}}},
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(state, path)
    return path


def write_all(directory, *models):
    """A checkpoint of each model, after 0, 1, 2, ... updates."""
    return [write(directory / f"{n}.pt", model, n) for n, model in enumerate(models)]


def write_values(directory, values, dtype=torch.float32):
    """One checkpoint per entry of ``values``, each with the one tensor ``w``."""
    paths = []
    for n, value in enumerate(values, start=1):
        model = {"w": torch.tensor(value, dtype=dtype)}
        paths.append(write(directory / f"checkpoint{n}.pt", model, 100 * n))
    return paths


def checkpoint(path, value, cfg=None):
    """One tensor ``w`` with this value, after as many updates."""
    write(path, {"w": torch.tensor([float(value)])}, value, cfg)


def averaged(path) -> float:
    return load_checkpoint(path)["model"]["w"].item()


def test_a_newer_checkpoint_than_those_averaged_is_named(tmp_path, capsys):
    """The last model of a run that ends between two saves; the command that averages it, too."""
    for update in (10, 20, 30):
        checkpoint(tmp_path / f"checkpoint_1_{update}.pt", update)
    last = tmp_path / "checkpoint_last.pt"
    checkpoint(last, 30)
    output = tmp_path / "mean.pt"
    words = ("average", "--inputs", tmp_path, "--last", 3, "--output", output)
    assert "is newer than" not in in_process(*words).stderr
    checkpoint(last, 37)
    said = in_process(*words).stderr
    assert f"{last} (update 37) is newer than all of these (up to update 30)" in said
    assert averaged(output) == 20
    advised = said.partition("to average it as well: pn ")[2].split()
    assert "is newer than" not in in_process(*advised).stderr
    assert averaged(output) == (20 + 30 + 37) / 3
    last.unlink()
    checkpoint(tmp_path / "checkpoint4.pt", 40)
    checkpoint(tmp_path / "checkpoint_5_45.pt", 45)
    newer = "checkpoint_5_45.pt (update 45) is newer than all of these (up to update 40)"
    assert newer in in_process(*words).stderr
    last.write_bytes(b"damaged")
    assert "whether there is a newer checkpoint is not known" in in_process(*words).stderr


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_against_numpy(tmp_path, dtype):
    # 7 files and odd shapes: nothing divides evenly. A sum is out of the range of float16.
    tensors = [torch.randn(7, 13).mul(10.0 ** (n - 3)).to(dtype) for n in range(7)]
    for tensor in tensors:
        tensor[0, 0] = 60_000
    paths = write_all(tmp_path, *({"w": tensor} for tensor in tensors))
    expected = np.mean([tensor.double().numpy() for tensor in tensors], axis=0)
    result = average_checkpoints(paths)["model"]["w"]
    assert result.dtype == dtype
    if dtype == torch.float64:
        np.testing.assert_allclose(result.numpy(), expected, rtol=1e-13)
    else:
        assert torch.equal(result, torch.from_numpy(expected).to(dtype))


def test_statistics_of_the_norms_are_averaged_and_counters_are_not(tmp_path):
    names = ("norm.running_psi2", "norm.nu", "norm.running_mean", "norm.running_var")
    models = []
    for n in (1, 2):
        model = {name: torch.tensor([float(n), 10.0 * n]) for name in names}
        model["norm.num_batches_tracked"] = torch.tensor(n * 7)
        model["norm.warm"] = torch.tensor([n == 2])
        models.append(model)
    expected = models[1] | {name: torch.tensor([1.5, 15.0]) for name in names}
    found = average_checkpoints(write_all(tmp_path, *models))["model"]
    assert_close(dict(found), expected, rtol=0, atol=0)


def test_order_of_inputs_does_not_matter(tmp_path):
    models = {n: {"w": torch.randn(50), "steps": torch.tensor(n)} for n in (9, 10, 100, 20)}
    paths = [write(tmp_path / f"{n}.pt", model, n) for n, model in models.items()]
    first = average_checkpoints(paths)
    assert first["model"]["steps"].item() == 100
    assert first["extra_state"]["val_loss"] == first["cfg"]["model"].written_at == 100
    assert first["optimizer_history"][-1]["num_updates"] == 100
    assert "last_optimizer_state" not in first
    for order in (paths[::-1], paths[2:] + paths[:2]):
        other = average_checkpoints(order)
        assert_close(other["model"], first["model"], rtol=0, atol=0)
        assert other["cfg"] == first["cfg"]


@pytest.mark.parametrize(
    ("updates", "newest"), [((None, None), 1), ((5, None), 0), ((None, 5), 1), ((5, 5), 1)]
)
def test_newest_without_update_numbers(tmp_path, updates, newest):
    paths = []
    for n, update in enumerate(updates):
        paths.append(write(tmp_path / f"{n}.pt", {"i": torch.tensor(n)}, update))
    assert average_checkpoints(paths)["model"]["i"].item() == newest


def test_order_and_metadata_of_the_model_are_kept(tmp_path):
    model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3)).state_dict()
    paths = [tmp_path / f"{n}.pt" for n in (1, 2)]
    for n, path in enumerate(paths):
        torch.save({"model": model, "optimizer_history": [{"num_updates": n}]}, path)
    result = average_checkpoints(paths)["model"]
    assert list(result) == list(model) and result._metadata == model._metadata


def tied_model(value, tied=True):
    embedding = torch.full((4, 3), value)
    return {
        "encoder.embed.weight": embedding,
        "decoder.embed.weight": embedding if tied else embedding + 1,
        "decoder.out.weight": embedding,
    }


def test_tied_tensors_stay_tied(tmp_path):
    paths = write_all(tmp_path, *(tied_model(value) for value in (1.0, 2.0, 6.0)))
    output = tmp_path / "out.pt"
    assert main(["--inputs", *paths, "--output", output]) == 0
    model = load_checkpoint(output)["model"]
    assert len({value.data_ptr() for value in model.values()}) == 1
    assert torch.equal(model["decoder.out.weight"], torch.full((4, 3), 3.0))


def test_tied_tensors_stay_tied_in_whatever_order_files_have_them(tmp_path):
    reversed_model = dict(reversed(tied_model(1.0).items()))
    for models in ([reversed_model, tied_model(3.0)], [tied_model(3.0), reversed_model]):
        model = average_checkpoints(write_all(tmp_path, *models))["model"]
        assert len({value.data_ptr() for value in model.values()}) == 1
        assert torch.equal(model["decoder.out.weight"], torch.full((4, 3), 2.0))


@pytest.mark.parametrize("untied", [0, 1, 2])
def test_tensors_tied_in_some_inputs_only_are_averaged_apart(tmp_path, untied):
    models = [tied_model(float(n), tied=n != untied) for n in range(3)]
    model = average_checkpoints(write_all(tmp_path, *models))["model"]
    for name in ("encoder.embed.weight", "decoder.out.weight"):
        assert torch.allclose(model[name], torch.tensor(1.0))
    assert torch.allclose(model["decoder.embed.weight"], torch.tensor(1.0 + 1 / 3))


def test_overlapping_views_are_averaged_apart(tmp_path):
    # float64 needs no cast, so sums made in place would write into the file's own tensors, which
    # overlap here.
    models = []
    for n in (1, 3):
        flat = torch.arange(6, dtype=torch.float64) * n
        models.append({"a": flat[:4], "b": flat[2:], "c": flat[:1].expand(3)})
    model = average_checkpoints(write_all(tmp_path, *models))["model"]
    assert model["a"].tolist() == [0.0, 2.0, 4.0, 6.0]
    assert model["b"].tolist() == [4.0, 6.0, 8.0, 10.0]
    assert model["c"].tolist() == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_non_finite_values_are_refused(tmp_path, value, dtype):
    paths = write_values(tmp_path, [[1.0, 2.0], [1.0, value]], dtype)
    with pytest.raises(CheckpointError, match="checkpoint2.pt: w holds a NaN or an infinity"):
        average_checkpoints(paths)


def test_uninitialised_buffers_of_fairseq_may_hold_anything(tmp_path):
    name = "decoder.embed_positions._float_tensor"
    models = [{"w": torch.ones(1), name: torch.tensor([value])} for value in (float("nan"), 4.0)]
    assert average_checkpoints(write_all(tmp_path, *models))["model"][name].item() == 4.0


BASE = {"a": torch.ones(2, 3), "b": torch.ones(4), "c": torch.ones(1), "n": torch.tensor(1)}


@pytest.mark.parametrize(
    ("name", "tensor", "words"),
    [
        ("b", None, "b is absent, not [4] torch.float32"),
        ("x", torch.ones(1), "x is [1] torch.float32, not absent"),
        ("a", torch.ones(3, 2), "a is [3, 2] torch.float32, not [2, 3] torch.float32"),
        ("c", torch.ones(1).half(), "c is [1] torch.float16, not [1] torch.float32"),
        ("n", torch.tensor(1.0), "n is [] torch.float32, not [] torch.int64"),
    ],
)
def test_checkpoints_that_do_not_match(tmp_path, name, tensor, words):
    good = write(tmp_path / "good.pt", BASE, 1)
    model = {**BASE, name: tensor}
    if tensor is None:
        del model[name]
    bad = write(tmp_path / "bad.pt", model, 2)
    result = in_process(
        "average", "--inputs", good, bad, "--output", tmp_path / "out.pt", check=False
    )
    assert_refused(result, f"{bad}: does not match {good}: ", words)
    assert not (tmp_path / "out.pt").exists()


def test_selection_from_a_directory(tmp_path):
    paths = write_values(tmp_path, [[float(n)] for n in range(1, 12)])
    output = tmp_path / "average.pt"
    result = in_process(
        "average", "--inputs", tmp_path, "--output", output, "--last", 3, check=False
    )
    assert result.returncode == 0 and result.stderr == ""
    assert averaged(output) == 10
    *lines, last = result.stdout.splitlines()
    # Numbers, not strings: 9 comes before 10.
    assert lines == [f"[{n - 8}/3] {paths[n - 1]}: update {n}00, 1 tensors" for n in (9, 10, 11)]
    assert str(output) in last


def test_a_copy_among_the_inputs_gives_a_warning(tmp_path):
    paths = write_values(tmp_path, [[1.0], [2.0]])
    best = tmp_path / "checkpoint_best.pt"
    best.write_bytes(paths[0].read_bytes())
    result = in_process(
        "average", "--inputs", *paths, best, "--output", tmp_path / "out.pt", check=False
    )
    assert result.returncode == 0 and result.stderr.count("\n") == 1
    assert f"{paths[0]} and {best} are both of update 100" in result.stderr


def test_wrong_output_is_found_before_anything_is_read(tmp_path, monkeypatch):
    paths = write_values(tmp_path, [[1.0], [2.0]])
    monkeypatch.setattr(tool, "load_checkpoint", lambda path: pytest.fail("read too early"))
    words = ("average", "--inputs", *paths)
    assert_refused(in_process(*words, "--output", tmp_path / "none/out.pt", check=False))
    assert_refused(
        in_process(*words, tmp_path / "none.pt", "--output", tmp_path / "out.pt", check=False)
    )


def test_one_checkpoint_in_memory_at_a_time(tmp_path, monkeypatch):
    paths = write_values(tmp_path, [[1.0], [2.0], [3.0], [4.0]])
    models = []

    def load_alone(path):
        assert not any(value is not None for model in models for value in model.values())
        state = load_checkpoint(path)
        models.append(state["model"])
        return state

    monkeypatch.setattr(tool, "load_checkpoint", load_alone)
    assert tool.average_checkpoints(paths)["model"]["w"].item() == 2.5
    assert len(models) == 4


KEEPS = {"keep_last_epochs": 10, "keep_interval_updates": -1}


@pytest.fixture
def run(tmp_path, capsys):
    """``run(...)`` calls pn average for a run and returns its output and the average."""
    folder = tmp_path / "run"
    (tmp_path / "data/bin").mkdir(parents=True)
    folder.mkdir()
    (folder / "data").write_text(f"{tmp_path}/data\n")

    def average(*options, code=0) -> tuple[str, float | None]:
        assert main(["--run", folder, *options]) == code
        output = folder / "checkpoints/averaged.pt"
        value = averaged(output) if output.exists() else None
        return capsys.readouterr().err, value

    def configure(average_last=None, **settings):
        config = {"checkpoint": {**KEEPS, **settings}, "average_last": average_last}
        (folder / "config.yaml").write_text(OmegaConf.to_yaml(OmegaConf.create(config)))

    def save(*epochs):
        for epoch in epochs:
            checkpoint(folder / f"checkpoints/checkpoint{epoch}.pt", epoch)

    average.folder = folder
    average.checkpoints = folder / "checkpoints"
    average.configure = configure
    average.save = save
    configure()
    return average


def test_as_many_as_the_configuration_averages_or_the_run_keeps(run, tmp_path):
    run.save(*range(1, 13))
    checkpoint(run.checkpoints / "checkpoint_1_100.pt", 100)
    assert run()[1] == 7.5
    run.configure(average_last=2)
    assert run()[1] == 11.5
    assert run("--last", 3)[1] == 11
    run.configure(keep_interval_updates=4, average_last=1)
    assert run()[1] == 100
    run.configure(keep_interval_updates=1)
    assert run()[1] == 100
    run.configure(keep_last_epochs=-1)
    assert "--last" in run(code=2)[0]
    assert "--last" in run("--last", 0, code=2)[0]
    (tmp_path / "data/bin").rmdir()
    messages, _ = run(code=2)
    assert "is gone" in messages and "data/bin" in messages


def test_a_short_run(run):
    run.checkpoints.mkdir()
    messages, _ = run(code=2)
    assert "none of the 10 epoch checkpoints" in messages and messages.count("\n") == 1
    checkpoint(run.checkpoints / "checkpoint_last.pt", 3)
    messages, value = run()
    assert "using only checkpoint_last.pt" in messages and value == 3
    made = read_settings(run.checkpoints / "averaged.pt.made.txt")
    assert (made["averaged"], made["recalibrated_on"]) == ("last 1", "0")
    run.save(1, 2)
    for count, options in ((10, ()), (3, ("--last", 3))):
        messages, value = run(*options)
        assert f"averaging 2 epoch checkpoints instead of {count}" in messages and value == 1.5
    assert read_settings(run.checkpoints / "averaged.pt.made.txt")["averaged"] == "epoch 2"


def test_it_is_done_once_until_something_changes(run):
    run.save(1, 2)
    assert run("--last", 2)[1] == 1.5
    output = run.checkpoints / "averaged.pt"
    before = output.read_bytes(), output.stat().st_mtime_ns
    assert "already" in run("--last", 2)[0]
    assert (output.read_bytes(), output.stat().st_mtime_ns) == before
    # Contents are compared, not times.
    os.utime(run.checkpoints / "checkpoint1.pt")
    assert "already" in run("--last", 2)[0]
    output.with_name("averaged.pt.made.txt").write_text("damaged\n")
    assert "averaged.pt is incomplete; making it again" in run("--last", 2)[0]
    assert output.read_bytes() == before[0] and "already" in run("--last", 2)[0]
    messages, value = run("--last", 1)
    assert "other values of averaged, checkpoints; making it again" in messages and value == 2
    assert "already" not in run("--last", 1, "--norm-module", __file__)[0]
    checkpoint(run.checkpoints / "checkpoint2.pt", 3)
    assert run("--last", 1)[1] == 3


def test_a_damaged_checkpoint_leaves_the_earlier_average_without_its_mark(run):
    run.save(1)
    assert run("--last", 1)[1] == 1
    (run.checkpoints / "checkpoint2.pt").write_bytes(b"PK")
    messages, value = run("--last", 2, code=2)
    assert "checkpoint2.pt: is cut off or damaged" in messages.splitlines()[-1] and value == 1
    assert not (run.checkpoints / "averaged.pt.made.txt").exists()


def test_a_file_that_a_training_removes_meanwhile(run, monkeypatch):
    """It keeps the newest checkpoints only."""
    run.save(1, 2)
    lister = average.checkpoints_to_average

    def rotated(*given):
        listed = lister(*given)
        (run.checkpoints / "checkpoint1.pt").unlink(missing_ok=True)
        return listed

    monkeypatch.setattr(average, "checkpoints_to_average", rotated)
    with locked_by_another(run.folder / ".lock"):
        line = run("--last", 2, code=2)[0].splitlines()[-1]
    assert f"'{run.folder}' is being trained, which has removed checkpoint1.pt" in line
    run.save(1)
    assert "being trained" not in run("--last", 2, code=2)[0]


def test_folders_of_fairseqs_own_commands(run, tmp_path, capsys):
    cfg = {"task": {"data": f"{tmp_path}/data/bin"}, "checkpoint": KEEPS, "model": None}
    plain = tmp_path / "save-dir"
    for epoch in (1, 3):
        checkpoint(plain / f"checkpoint{epoch}.pt", epoch, cfg)
    assert main(["--run", plain]) == 0
    assert averaged(plain / "averaged.pt") == 2
    job = tmp_path / "0_transformer_pn_tiny_seed1"
    (job / ".hydra").mkdir(parents=True)
    configuration = OmegaConf.to_yaml({**cfg, "scoring": {"average_last": 1}})
    (job / ".hydra/config.yaml").write_text(configuration)
    for epoch in (1, 3):
        checkpoint(job / f"checkpoints/checkpoint{epoch}.pt", epoch)
    assert main(["--run", job]) == 0
    assert averaged(job / "checkpoints/averaged.pt") == 3
