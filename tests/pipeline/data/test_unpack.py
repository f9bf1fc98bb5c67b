"""Extraction: archives that are made to harm, damaged, or not what was expected."""

import io
import os
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import pytest

from pn_fairseq.common.command import UserError
from pn_fairseq.pipeline.data import archives
from pn_fairseq.pipeline.data.archives import unpack
from pn_fairseq.pipeline.data.preparation import Preparation
from tests.scripts_helpers import environment, run

TEXT = b"ein Satz\nund noch einer\n" * 20_000


def tar_of(path: Path, *members, mode: str = "w:gz") -> Path:
    """A tar of (name, content) and (name, TarInfo type, link target) in this order."""
    with tarfile.open(path, mode) as tar:
        for name, *rest in members:
            info = tarfile.TarInfo(name)
            if len(rest) == 1:
                info.size = len(rest[0])
                tar.addfile(info, io.BytesIO(rest[0]))
            else:
                info.type, info.linkname = rest
                tar.addfile(info)
    return path


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
def folder(tmp_path) -> Path:
    return tmp_path / "a folder, 100%" / "out"


def refused(archive: Path, folder: Path, members: list[str], *needles: str) -> None:
    """One line that names the archive, and nothing is left."""
    with pytest.raises(UserError) as error:
        unpack(archive, folder, members)
    assert "\n" not in str(error.value)
    for needle in (archive.name, *needles):
        assert needle in str(error.value), (needle, str(error.value))
    assert not folder.exists() and (not folder.parent.exists() or not any(folder.parent.iterdir()))


@pytest.mark.parametrize(("kind", "mode"), [("x.tgz", "w:gz"), ("x.tar", "w"), ("x.tar.xz", "w:xz")])
def test_named_members_and_no_others(tmp_path, folder, kind, mode):
    members = [("top.en", TEXT), ("./a/deep/x.en", b"1\n"), ("a/other", b"3\n"), ("a/x y.en", b"4")]
    unpack(tar_of(tmp_path / kind, *members, mode=mode), folder, ["top.en", "a/deep/x.en", "a/x y.en"])
    assert contents(folder) == {"top.en": TEXT, "a/deep/x.en": b"1\n", "a/x y.en": b"4"}


@pytest.mark.parametrize("name", ["../evil", "a/../../evil"])
def test_paths_that_leave_the_folder(tmp_path, folder, name):
    archive = tar_of(tmp_path / "x.tgz", ("a/x", b"1"), (name, b"2"))
    refused(archive, folder, ["a/x"], "evil", "outside the destination", "do not use it")
    assert not list(tmp_path.rglob("evil"))


@pytest.mark.parametrize(
    ("member", "needle"),
    [
        (("x", tarfile.SYMTYPE, "/etc/passwd"), "x"),
        (("x", tarfile.SYMTYPE, "../../outside"), "outside the destination"),
        (("x", tarfile.SYMTYPE, "x"), "link"),
        (("x", tarfile.SYMTYPE, "other"), "link"),
        (("x", tarfile.LNKTYPE, "/etc/passwd"), "x"),
        (("x", tarfile.LNKTYPE, "other"), "link"),
        (("x", tarfile.CHRTYPE, ""), "x"),
        (("x", tarfile.FIFOTYPE, ""), "x"),
    ],
    ids=["absolute", "outside", "loop", "inside", "hard, absolute", "hard, inside", "device", "fifo"],
)
def test_members_that_are_no_plain_files(tmp_path, folder, member, needle):
    refused(tar_of(tmp_path / "x.tgz", ("other", b"1"), member), folder, ["x"], needle, "do not use it")


def test_members_that_would_fill_the_disk(tmp_path, folder, monkeypatch):
    """A sparse member, and text that is too much in all: both are a few bytes in the archive."""
    (tmp_path / "sparse").open("wb").truncate(3 << 30)
    run("tar", "-C", tmp_path, "--sparse", "-czf", tmp_path / "x.tgz", "sparse")
    refused(tmp_path / "x.tgz", folder, ["sparse"], "member sparse", "do not use it")
    monkeypatch.setattr(archives, "LIMIT", 2 * len(TEXT) - 1)
    archive = tar_of(tmp_path / "y.tgz", ("a", TEXT), ("b", TEXT), ("c", b"1"))
    refused(archive, folder, ["a", "b"], f"more than {2 * len(TEXT) - 1} bytes", "do not use it")
    unpack(archive, folder, ["a", "c"])


def test_a_size_that_no_file_has(tmp_path, folder):
    info = tarfile.TarInfo("x")
    info.size = 1 << 80
    (tmp_path / "x.tar").write_bytes(info.tobuf(tarfile.GNU_FORMAT) + bytes(1024))
    refused(tmp_path / "x.tar", folder, ["x"], "x")
    refused(tmp_path / "x.tar", folder, ["y"], "x.tar")


def test_missing_members_are_named(tmp_path, folder):
    archive = tar_of(tmp_path / "x.tgz", *((f"a/file{number}", b"1") for number in range(20)))
    refused(archive, folder, ["a/file3", "b/x.en", "b/y.de"], "has no b/x.en and b/y.de", "a/file3", "8 more")
    (tmp_path / "z").mkdir()
    refused(tar_of(tmp_path / "z/z.tgz", ("a", b"1"), ("b", b"2")), folder, ["a", "b", "c"], "has no c; it holds a, b")


@pytest.mark.parametrize("kept", [0.5, 0.999, 100])
def test_cut_off(tmp_path, folder, kept):
    """Also where the cut comes after everything that is wanted."""
    archive = tar_of(tmp_path / "x.tgz", ("a", b"1"), ("b", os.urandom(100_000)))
    os.truncate(archive, int(archive.stat().st_size * kept) if kept < 1 else kept)
    refused(archive, folder, ["a"], "damaged or cut off")


def test_damaged_in_the_middle(tmp_path, folder):
    archive = tar_of(tmp_path / "x.tgz", ("a", os.urandom(100_000)))
    with archive.open("r+b") as file:
        file.seek(50_000)
        file.write(b"damage")
    refused(archive, folder, ["a"], "damaged or cut off")


@pytest.mark.parametrize(
    ("name", "content"),
    [("x.tgz", b"<!DOCTYPE html>404"), ("x.tgz", b"no archive"), ("x.tar", b"no archive" * 100), ("x.tgz", b"")],
)
def test_no_archive(tmp_path, folder, name, content):
    (tmp_path / name).write_bytes(content)
    refused(tmp_path / name, folder, ["x"], "not an archive, or is damaged")


def test_a_damaged_download_is_removed(tmp_path):
    archive = tar_of(tmp_path / "x.tgz", ("a", TEXT))
    os.truncate(archive, 100)
    data = Preparation(tmp_path, workers=1)
    data.open("")
    with pytest.raises(UserError, match="get it again"):
        data.unpack(archive, ["a"])
    (tmp_path / "download").mkdir()
    (tmp_path / "download/x.tgz.sha256").write_text("")
    archive = archive.rename(tmp_path / "download/x.tgz")
    with pytest.raises(UserError, match="it was removed, and the same command downloads it again"):
        data.unpack(archive, ["a"])
    data.close()
    assert not any((tmp_path / "download").iterdir())


def command(archive: Path, dest: Path, *members: str) -> list[str]:
    """Extract in a process of its own, which ends as a command does."""
    code = "import sys; from pathlib import Path; from pn_fairseq.common.command import handle_signals, run; "
    code += "from pn_fairseq.pipeline.data.archives import unpack; handle_signals(); "
    code += "sys.exit(run('unpack', lambda: unpack(*map(Path, sys.argv[1:3]), sys.argv[3:])))"
    return [sys.executable, "-c", code, str(archive), str(dest / "unpacked/x.tgz"), *members]


def test_a_full_disk(tmp_path):
    """A limit on the size of files stands for the end of the disk."""
    archive = tar_of(tmp_path / "x.tgz", ("a", TEXT))
    limited = ["bash", "-c", 'ulimit -f 100; exec "$@"', "bash", *command(archive, tmp_path, "a")]
    result = run(*limited, check=False)
    assert result.returncode == 2 and "File too large" in result.stderr and "make room" in result.stderr
    assert len(result.stderr.splitlines()) == 1 and not list(tmp_path.rglob("unpacked/*"))


def test_ctrl_c_leaves_nothing(tmp_path):
    archive = tar_of(tmp_path / "x.tgz", ("a", bytes(80_000_000)))
    process = subprocess.Popen(command(archive, tmp_path, "a"), env=environment(), stderr=subprocess.PIPE, text=True)
    partial = tmp_path / "unpacked/x.tgz.partial/a"
    while process.poll() is None and not (partial.exists() and partial.stat().st_size):
        time.sleep(0.001)
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 130 and len(stderr.splitlines()) == 1 and "interrupted" in stderr
    assert not any((tmp_path / "unpacked").iterdir())
