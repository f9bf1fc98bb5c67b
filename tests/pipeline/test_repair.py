"""Mending the checkpoints of a training that was killed while it saved one."""

import errno
import os

import pytest
import torch

from pn_fairseq.pipeline import repair as module
from pn_fairseq.pipeline.repair import repair, resumed_from


def write(path, updates, val_loss=None, best=None):
    extra_state = {"val_loss": val_loss, **({"best": best} if best else {})}
    state = {"model": {"w": torch.tensor([1.0 * updates])}, "optimizer_history": [{"num_updates": updates}]}
    torch.save({**state, "extra_state": extra_state}, path)
    os.utime(path, ns=(updates * 10**9, updates * 10**9))


def updates(path):
    return torch.load(path, weights_only=True)["optimizer_history"][0]["num_updates"]


def repaired(folder) -> str:
    return "\n".join(repair(folder))


def test_whole_checkpoints_are_left_alone(tmp_path):
    write(tmp_path / "checkpoint1.pt", 1)
    write(tmp_path / "checkpoint_last.pt", 2)
    assert repaired(tmp_path) == ""
    assert updates(tmp_path / "checkpoint_last.pt") == 2
    # An older state with a newer date, as of a copy by hand.
    os.utime(tmp_path / "checkpoint1.pt")
    assert repaired(tmp_path) == "" and repaired(tmp_path / "none") == ""


def test_cut_off_copy_is_made_again_from_the_newest_whole_checkpoint(tmp_path):
    for number in (1, 2):
        write(tmp_path / f"checkpoint{number}.pt", number)
    for name in ("checkpoint_last.pt", "checkpoint_best.pt"):
        (tmp_path / name).write_bytes((tmp_path / "checkpoint2.pt").read_bytes()[:40])
    assert resumed_from(tmp_path) == tmp_path / "checkpoint2.pt"
    told = repaired(tmp_path)
    assert "checkpoint_last.pt was cut off" in told and "checkpoint2.pt" in told
    assert updates(tmp_path / "checkpoint_last.pt") == updates(tmp_path / "checkpoint_best.pt") == 2


@pytest.mark.parametrize("best", [False, True])
def test_a_copy_that_was_not_begun_is_made(best, tmp_path):
    """Killed between checkpoint_1_4.pt and its copies, which include the best one if it was the best."""
    write(tmp_path / "checkpoint_best.pt", 2, 5.0, 5.0)
    write(tmp_path / "checkpoint_last.pt", 3, 6.0, 5.0)
    write(tmp_path / "checkpoint_1_4.pt", 4, *((4.0, 4.0) if best else (6.0, 5.0)))
    told = repaired(tmp_path)
    assert "checkpoint_last.pt was older; made again from checkpoint_1_4.pt" in told
    assert updates(tmp_path / "checkpoint_last.pt") == 4
    assert updates(tmp_path / "checkpoint_best.pt") == (4 if best else 2)
    assert repaired(tmp_path) == ""


def test_flipped_bit_is_noticed(tmp_path):
    write(tmp_path / "checkpoint1.pt", 1)
    write(tmp_path / "checkpoint_last.pt", 1)
    content = (tmp_path / "checkpoint_last.pt").read_bytes()
    weight = torch.tensor([1.0]).numpy().tobytes()
    assert content.count(weight)
    (tmp_path / "checkpoint_last.pt").write_bytes(content.replace(weight, b"\0\0\0\1"))
    assert "made again" in repaired(tmp_path)
    assert (tmp_path / "checkpoint_last.pt").read_bytes() == (tmp_path / "checkpoint1.pt").read_bytes()


def test_without_any_whole_checkpoint_the_damaged_one_goes(tmp_path):
    (tmp_path / "checkpoint_last.pt").write_bytes(b"PK\x03\x04 half")
    assert "starting from the beginning" in repaired(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_checkpoint_that_cannot_be_read_is_not_thrown_away(tmp_path, monkeypatch):
    """As when a file server fails for a moment."""

    def fail(path):
        raise OSError(errno.EIO, "Input/output error", str(path))

    write(tmp_path / "checkpoint_last.pt", 3)
    with monkeypatch.context() as patch:
        patch.setattr(module.zipfile, "ZipFile", fail)
        with pytest.raises(OSError, match="Input/output error"):
            list(repair(tmp_path))
    assert updates(tmp_path / "checkpoint_last.pt") == 3


def test_missing_last_checkpoint_is_made_from_the_newest(tmp_path):
    for number in (1, 2):
        write(tmp_path / f"checkpoint_1_{number}.pt", number)
    assert "was missing; made again from checkpoint_1_2.pt" in repaired(tmp_path)
    assert updates(tmp_path / "checkpoint_last.pt") == 2
    assert repaired(tmp_path) == ""


def test_best_checkpoint_serves_where_it_is_the_only_whole_one(tmp_path):
    write(tmp_path / "checkpoint_best.pt", 2)
    (tmp_path / "checkpoint_last.pt").write_bytes(b"PK half")
    assert "made again from checkpoint_best.pt" in repaired(tmp_path)
    (tmp_path / "checkpoint_last.pt").unlink()
    assert "was missing; made again from checkpoint_best.pt" in repaired(tmp_path)
    assert updates(tmp_path / "checkpoint_last.pt") == 2
