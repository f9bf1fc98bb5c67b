import errno
import sys
import zipfile

import pytest

from .scripts_helpers import SCRIPTS, run

sys.path.insert(0, str(SCRIPTS / "lib"))
import repair_checkpoints  # noqa: E402 (a script's library, not a package)


def write(path, text):
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("data", text)


def repair(folder):
    return run(sys.executable, SCRIPTS / "lib/repair_checkpoints.py", folder).stdout


def content(path):
    with zipfile.ZipFile(path) as archive:
        return archive.read("data").decode()


def test_whole_checkpoints_are_left_alone(tmp_path):
    write(tmp_path / "checkpoint_last.pt", "last")
    write(tmp_path / "checkpoint1.pt", "first")
    assert repair(tmp_path) == ""
    assert content(tmp_path / "checkpoint_last.pt") == "last"
    assert repair(tmp_path / "none") == ""


def test_cut_off_copy_is_made_again_from_the_newest_whole_checkpoint(tmp_path):
    for number in (1, 2):
        write(tmp_path / f"checkpoint{number}.pt", f"epoch {number}")
    for name in ("checkpoint_last.pt", "checkpoint_best.pt"):
        (tmp_path / name).write_bytes((tmp_path / "checkpoint2.pt").read_bytes()[:40])
    told = repair(tmp_path)
    assert "checkpoint_last.pt was cut off" in told and "checkpoint2.pt" in told
    assert content(tmp_path / "checkpoint_last.pt") == content(tmp_path / "checkpoint_best.pt") == "epoch 2"


def test_flipped_bit_is_noticed(tmp_path):
    write(tmp_path / "checkpoint1.pt", "good weights")
    write(tmp_path / "checkpoint_last.pt", "good weights")
    damaged = (tmp_path / "checkpoint_last.pt").read_bytes().replace(b"good", b"gooe")
    (tmp_path / "checkpoint_last.pt").write_bytes(damaged)
    assert "made again" in repair(tmp_path)
    assert content(tmp_path / "checkpoint_last.pt") == "good weights"


def test_without_any_whole_checkpoint_the_damaged_one_goes(tmp_path):
    (tmp_path / "checkpoint_last.pt").write_bytes(b"PK\x03\x04 half")
    assert "starting afresh" in repair(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_checkpoint_that_cannot_be_read_is_not_thrown_away(tmp_path, monkeypatch):
    """As when a file server has a bad moment."""

    def fail(path):
        raise OSError(errno.EIO, "Input/output error", str(path))

    write(tmp_path / "checkpoint_last.pt", "last")
    monkeypatch.setattr(repair_checkpoints.zipfile, "ZipFile", fail)
    with pytest.raises(OSError, match="Input/output error"):
        list(repair_checkpoints.repair(tmp_path))
    monkeypatch.undo()
    assert content(tmp_path / "checkpoint_last.pt") == "last"


def test_missing_last_checkpoint_is_made_from_the_newest(tmp_path):
    for number in (1, 2):
        write(tmp_path / f"checkpoint_1_{number}.pt", f"update {number}")
    assert "was missing; made again from checkpoint_1_2.pt" in repair(tmp_path)
    assert content(tmp_path / "checkpoint_last.pt") == "update 2"
    assert repair(tmp_path) == ""


def test_best_checkpoint_serves_where_it_is_the_only_whole_one(tmp_path):
    write(tmp_path / "checkpoint_best.pt", "best")
    (tmp_path / "checkpoint_last.pt").write_bytes(b"PK half")
    assert "made again from checkpoint_best.pt" in repair(tmp_path)
    (tmp_path / "checkpoint_last.pt").unlink()
    assert "was missing; made again from checkpoint_best.pt" in repair(tmp_path)
    assert content(tmp_path / "checkpoint_last.pt") == "best"
