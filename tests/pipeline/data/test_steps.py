"""What the steps of a preparation say where the machine is too small."""

import errno

import pytest

from pn_fairseq.pipeline.data import parallel, steps

COPY = ("copy", "text", "raw")


@pytest.fixture
def dest(tmp_path):
    (tmp_path / "settings").write_text("source=de\ntarget=en\n")
    (tmp_path / "text").mkdir()
    for split in steps.SPLITS:
        for lang in ("de", "en"):
            (tmp_path / f"text/{split}.{lang}").write_text("a\n")
    return tmp_path


def run(dest, *words: str) -> int:
    return steps.main(["--dest", str(dest), *words])


def test_text_is_copied(dest):
    assert run(dest, *COPY) == 0
    assert sorted(path.name for path in (dest / "raw").iterdir()) == sorted(
        path.name for path in (dest / "text").iterdir()
    )


@pytest.mark.parametrize("place", ["folder", "file"])
def test_a_disk_without_inodes_is_one_line(place, dest, monkeypatch, capsys):
    def full(*args, **options):
        raise OSError(errno.ENOSPC, "No space left on device", str(dest / "raw"))

    if place == "folder":
        monkeypatch.setattr("pathlib.Path.mkdir", full)
    else:
        monkeypatch.setattr(parallel, "atomic_write", full)
    assert run(dest, *COPY) == 2
    assert capsys.readouterr().err == f"pn-data: error: {dest}/raw: No space left on device\n"


def test_a_memory_that_is_too_small_is_one_line(dest, monkeypatch, capsys):
    def too_much(*args):
        raise MemoryError

    monkeypatch.setattr(parallel, "_read", too_much)
    assert run(dest, *COPY) == 2
    assert "not enough memory; use fewer processes" in capsys.readouterr().err
    assert not list((dest / "raw").iterdir())
