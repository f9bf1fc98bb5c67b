"""common/checkpoints.py and checkpoint_files.py: what is read, what is refused and with which
words, and that writing is all or nothing.
"""

import argparse
import builtins
import errno
import io
import os
import pickle
from collections import OrderedDict
from unittest import mock

import numpy as np
import pytest
import torch

from pn_fairseq.common import checkpoints
from pn_fairseq.common.checkpoint_files import (
    CheckpointError,
    check_output_path,
    checkpoints_to_average,
    find_checkpoints,
)
from pn_fairseq.common.checkpoints import (
    allow_fairseq_checkpoints,
    load_checkpoint,
    save_checkpoint,
)

from ..scripts_helpers import files_of


def state_with(**model):
    cfg = {"model": argparse.Namespace(arch="t")}
    return {"args": None, "cfg": cfg, "model": OrderedDict(model), "extra_state": {}}


def save(path, state, **options):
    torch.save(state, path, **options)
    return path


class RunsCode:
    """Unpickled without care, it creates the file ``marker``."""

    def __init__(self, marker):
        self.marker = str(marker)

    def __reduce__(self):
        return builtins.open, (self.marker, "w")


class Unknown:
    pass


def refused(path, match):
    """In one line that names the file."""
    with pytest.raises(CheckpointError, match=match) as error:
        load_checkpoint(path)
    assert str(path) in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("zip_format", [True, False])
def test_loads_what_fairseq_stores(tmp_path, zip_format):
    state = state_with(weight=torch.arange(6.0).view(2, 3), steps=torch.tensor(7))
    # The metrics of an --eval-bleu run hold arrays and numbers of NumPy; torch.save pickles them as
    # Python does.
    metrics = {
        "counts": np.array([3, 2, 1, 0]),
        "sum": np.array([0.5], dtype=np.float32),
        "val_loss": np.float64(27.5),
        "best": np.float32(1.5),
        "n": np.int64(4),
        "flag": np.bool_(True),
    }
    state["extra_state"] = metrics
    path = save(tmp_path / "a.pt", state, _use_new_zipfile_serialization=zip_format)
    loaded = load_checkpoint(path)
    assert torch.equal(loaded["model"]["weight"], state["model"]["weight"])
    assert loaded["model"]["steps"].item() == 7
    assert loaded["cfg"]["model"] == argparse.Namespace(arch="t")
    np.testing.assert_equal(loaded["extra_state"], metrics)


@pytest.mark.parametrize("package", ["numpy.core", "numpy._core"])
def test_loads_numpy_scalars_of_either_numpy_version(tmp_path, package):
    # The module's name as the other NumPy writes it. The legacy format has no checksums that would
    # have to follow.
    path = tmp_path / "a.pt"
    buffer = io.BytesIO()
    torch.save({"model": {}, "loss": np.float64(2.5)}, buffer, _use_new_zipfile_serialization=False)
    data = buffer.getvalue().replace(b"numpy._core.", b"numpy.core.")
    path.write_bytes(data.replace(b"numpy.core.", package.encode() + b"."))
    allow_fairseq_checkpoints()
    assert torch.load(path, weights_only=True)["loss"] == 2.5


@pytest.mark.parametrize("protocol", [0, 2, 4, 5])
def test_code_in_a_plain_pickle_does_not_run(tmp_path, protocol):
    path, marker = tmp_path / "evil.pt", tmp_path / "marker"
    path.write_bytes(pickle.dumps({"model": RunsCode(marker)}, protocol=protocol))
    refused(path, "nothing in it was executed|not a PyTorch checkpoint|damaged")
    assert not marker.exists()


@pytest.mark.parametrize("zip_format", [True, False])
def test_code_in_a_torch_file_does_not_run_and_is_named(tmp_path, zip_format):
    path, marker = tmp_path / "evil.pt", tmp_path / "marker"
    state = state_with(w=torch.ones(2))
    state["extra_state"] = {"callback": RunsCode(marker)}
    save(path, state, _use_new_zipfile_serialization=zip_format)
    refused(path, r"asks for \S*open, .*nothing in it was executed")
    assert not marker.exists()


@pytest.mark.parametrize(
    ("value", "name"),
    [
        (Unknown(), "Unknown"),
        (os.system, "posix.system|nt.system"),
        (np.array([None]), "numpy.dtypes.ObjectDType"),
    ],
)
def test_objects_outside_the_list_are_named(tmp_path, value, name):
    path = save(tmp_path / "a.pt", {**state_with(w=torch.ones(2)), "other": value})
    refused(path, name)


@pytest.mark.parametrize("zip_format", [True, False])
def test_truncated_at_any_length(tmp_path, zip_format):
    state = state_with(w=torch.randn(300), v=torch.randn(5))
    path = save(tmp_path / "cut.pt", state, _use_new_zipfile_serialization=zip_format)
    whole = path.read_bytes()
    lengths = [1, 2, 3, 4, 30, 100, 1000, len(whole) // 2, len(whole) - 1]
    if zip_format:
        lengths += range(len(whole) - 400, len(whole), 41)
    for length in lengths:
        path.write_bytes(whole[:length])
        refused(path, "damaged")


def test_flipped_bit_in_a_weight(tmp_path):
    path = tmp_path / "a.pt"
    weight = torch.randn(1000)
    data = bytearray(save(path, state_with(w=weight)).read_bytes())
    data[bytes(data).index(weight.numpy().tobytes()) + 1234] ^= 1
    path.write_bytes(data)
    torch.serialization.add_safe_globals([argparse.Namespace])
    torch.load(path)  # torch does not notice
    refused(path, "damaged .*checksum")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "is empty"),
        (b"hello world\nthis is a log\n", "not a PyTorch checkpoint"),
        (b"d" * 500, "not a PyTorch"),
    ],
)
def test_files_that_are_no_checkpoints(tmp_path, content, words):
    path = tmp_path / "a.pt"
    path.write_bytes(content)
    refused(path, words)


@pytest.mark.parametrize(
    "model", [{}, torch.ones(2), {"w": 3}, {1: torch.ones(2)}, {"w": torch.eye(2).to_sparse()}]
)
def test_models_of_another_kind(tmp_path, model):
    refused(save(tmp_path / "a.pt", {"model": model}), "not a fairseq checkpoint")


def test_torch_files_of_another_kind(tmp_path):
    for state in (torch.ones(3), [1, 2], {"weights": {}}):
        refused(save(tmp_path / "a.pt", state), "not a fairseq checkpoint")


def test_missing_file_directory_and_device(tmp_path):
    refused(tmp_path / "none.pt", "No such file")
    refused(tmp_path, "not a regular file")
    refused(os.devnull, "not a regular file")


@pytest.mark.skipif(
    not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may read and write everything"
)
def test_missing_permissions(tmp_path):
    path = save(tmp_path / "a.pt", state_with(w=torch.ones(2)))
    path.chmod(0)
    refused(path, "cannot be read")
    tmp_path.chmod(0o500)
    with pytest.raises(CheckpointError, match="no permission"):
        save_checkpoint({}, tmp_path / "b.pt")


def test_save_and_load(tmp_path):
    path = tmp_path / "out.pt"
    path.write_text("an earlier file")
    save_checkpoint(state_with(w=torch.arange(3.0)), path)
    assert load_checkpoint(path)["model"]["w"].tolist() == [0.0, 1.0, 2.0]
    assert os.listdir(tmp_path) == ["out.pt"]
    plain = tmp_path / "plain"
    plain.touch()
    assert path.stat().st_mode == plain.stat().st_mode


def test_save_keeps_a_symbolic_link(tmp_path):
    (tmp_path / "disk").mkdir()
    link = tmp_path / "out.pt"
    link.symlink_to(tmp_path / "disk/real.pt")
    save_checkpoint(state_with(w=torch.ones(1)), link)
    assert link.is_symlink() and os.listdir(tmp_path / "disk") == ["real.pt"]


@pytest.mark.parametrize(
    ("failure", "expected"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), CheckpointError),
        (KeyboardInterrupt(), KeyboardInterrupt),
    ],
)
def test_failure_while_writing_leaves_the_earlier_file(tmp_path, monkeypatch, failure, expected):
    """After 300 bytes, as on a full disk or at a Ctrl-C; torch's writer turns both into a
    RuntimeError.
    """
    path = tmp_path / "out.pt"
    path.write_text("an earlier file")

    class FailingFile(io.FileIO):
        def write(self, data):
            if self.tell() > 300:
                raise failure
            return super().write(data)

    monkeypatch.setattr("pathlib.Path.open", lambda path, mode, encoding: FailingFile(path, mode))
    with pytest.raises(expected) as error:
        save_checkpoint(state_with(w=torch.randn(1000)), path)
    monkeypatch.undo()
    if expected is CheckpointError:
        assert "No space left" in str(error.value) and "\n" not in str(error.value)
    assert files_of(tmp_path) == {"out.pt": b"an earlier file"}


def test_failure_after_writing_leaves_the_earlier_file(tmp_path):
    path = tmp_path / "out.pt"
    path.write_text("an earlier file")
    failure = OSError(errno.EIO, "Input/output error")
    with (
        mock.patch.object(checkpoints.os, "replace", side_effect=failure),
        pytest.raises(CheckpointError, match="Input/out"),
    ):
        save_checkpoint(state_with(w=torch.ones(3)), path)
    assert files_of(tmp_path) == {"out.pt": b"an earlier file"}


def test_unwritable_outputs(tmp_path):
    for path, needle in (
        (tmp_path / "none/out.pt", "there is no directory"),
        (tmp_path, "not a regular file"),
    ):
        with pytest.raises(CheckpointError, match=needle):
            save_checkpoint({}, path)
    with pytest.raises(CheckpointError, match="not a regular file"):
        check_output_path(os.devnull)


FILES = """
checkpoint1.pt checkpoint2.pt checkpoint9.pt checkpoint10.pt checkpoint11.pt checkpoint_1_500.pt
checkpoint_1_1000.pt checkpoint_2_1500.pt checkpoint_10_9500.pt checkpoint_11_10000.pt
checkpoint_best.pt checkpoint_last.pt checkpoint.best_bleu_27.5.pt checkpoint12.pt.tmp
checkpoint13-shard0.pt mycheckpoint14.pt notes.txt
"""


@pytest.fixture
def save_dir(tmp_path):
    for name in FILES.split():
        (tmp_path / name).touch()
    (tmp_path / "checkpoint15.pt").mkdir()
    return tmp_path


def test_find(save_dir):
    for options, expected in (
        ({}, ["11", "10", "9", "2", "1"]),
        ({"last": 6}, ["11", "10", "9", "2", "1"]),
        ({"last": 3}, ["11", "10", "9"]),
        ({"by": "update", "last": 3}, ["_11_10000", "_10_9500", "_2_1500"]),
    ):
        paths = [save_dir / f"checkpoint{name}.pt" for name in expected]
        assert find_checkpoints(save_dir, **options) == paths
    with pytest.raises(CheckpointError, match="cannot list"):
        find_checkpoints(save_dir / "none", last=1)


def test_checkpoints_to_average(save_dir):
    def names(*args, **options):
        paths, kind, differs = checkpoints_to_average(save_dir, *args, **options)
        return [path.name for path in paths], kind, differs.removeprefix(str(save_dir))

    assert names(2) == (["checkpoint10.pt", "checkpoint11.pt"], "epoch", "")
    found, kind, differs = names(6)
    assert (len(found), kind) == (5, "epoch")
    assert differs == ": averaging 5 epoch checkpoints instead of 6 epoch checkpoints"
    (save_dir / "checkpoint15.pt").rmdir()
    for path in save_dir.glob("checkpoint[0-9]*"):
        path.unlink()
    found, kind, differs = names(2)
    assert found == ["checkpoint_10_9500.pt", "checkpoint_11_10000.pt"] and kind == "update"
    # it has three of them
    assert differs == ": averaging 2 update checkpoints instead of 2 epoch checkpoints"
    assert names(2, "update") == (found, "update", "")
    for path in save_dir.glob("checkpoint_[0-9]*"):
        path.unlink()
    found, kind, differs = names(2)
    assert (found, kind) == (["checkpoint_last.pt"], "last")
    assert "using only checkpoint_last.pt" in differs
    (save_dir / "checkpoint_last.pt").unlink()
    needle = r"none of the 2 epoch checkpoints; it has checkpoint_best.pt \(--inputs "
    with pytest.raises(CheckpointError, match=needle):
        checkpoints_to_average(save_dir, 2)
    (save_dir / "checkpoint_best.pt").unlink()
    needle = r"epoch checkpoints, nor any other: train first \(pn train\)"
    with pytest.raises(CheckpointError, match=needle):
        checkpoints_to_average(save_dir, 2)
