"""Extraction: scripts/lib/unpack.py with archives that are made to harm, damaged, or not what was expected."""

import io
import os
import signal
import stat
import subprocess
import tarfile
import time
import zipfile
from pathlib import Path

import pytest

from .scripts_helpers import SCRIPTS, assert_refused, environment, run

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


def zip_of(path: Path, *members) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members:
            archive.writestr(name, content)
    return path


def unpack(archive: Path, folder: Path, *members: str, **options):
    flags = [word for member in members for word in ("--member", member)]
    return run("python", SCRIPTS / "lib/unpack.py", archive, folder, *flags, check=False, **options)


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
def folder(tmp_path) -> Path:
    return tmp_path / "a folder, 100%" / "out"


def assert_nothing_left(folder: Path):
    assert not folder.exists() and (not folder.parent.exists() or not any(folder.parent.iterdir()))


@pytest.mark.parametrize("kind", ["x.tgz", "x.tar", "x.tar.xz", "x.tar.bz2", "x.zip"])
def test_named_members_and_no_others(tmp_path, folder, kind):
    members = [
        ("top.en", TEXT),
        ("a/deep/x.en", b"1\n"),
        ("a/deep/y.de", b"2\n"),
        ("a/other", b"3\n"),
        ("a/x y.en", b"4"),
    ]
    make = zip_of if kind.endswith("zip") else tar_of
    options = (
        {} if kind.endswith("zip") else {"mode": {"x.tgz": "w:gz", "x.tar": "w", "x.tar.xz": "w:xz"}.get(kind, "w:bz2")}
    )
    archive = make(tmp_path / kind, *members, **options)
    result = unpack(archive, folder, "top.en", "a/*.en", "a/deep/y.de")
    assert (result.returncode, result.stderr) == (0, "")
    names = {"top.en", "a/deep/x.en", "a/deep/y.de", "a/x y.en"}
    assert contents(folder) == {name: content for name, content in members if name in names}
    assert_refused(unpack(archive, folder, "top.en"), str(folder), "already")
    assert contents(folder).keys() == names


def test_leading_dot_and_an_empty_folder(tmp_path, folder):
    archive = tar_of(tmp_path / "x.tgz", ("./a/x", b"1"))
    folder.mkdir(parents=True)
    assert unpack(archive, folder, "a/x").returncode == 0
    assert contents(folder) == {"a/x": b"1"}


@pytest.mark.parametrize("name", ["/etc/evil", "../evil", "a/../../evil", "a/..", "..\\evil"])
@pytest.mark.parametrize("make", [tar_of, zip_of])
def test_paths_that_leave_the_folder(tmp_path, folder, make, name):
    archive = make(tmp_path / ("x.zip" if make is zip_of else "x.tgz"), ("a/x", b"1"), (name, b"2"))
    for pattern in ("*", "a/x"):
        assert_refused(unpack(archive, folder, pattern), str(archive), "leaves the folder")
    assert_nothing_left(folder)
    assert not (tmp_path / "evil").exists()


@pytest.mark.parametrize(
    ("members", "needle"),
    [
        ([("x", tarfile.SYMTYPE, "/etc/passwd")], "x"),
        ([("x", tarfile.SYMTYPE, "../../outside")], "x"),
        ([("a", tarfile.SYMTYPE, ".."), ("a/evil", b"1")], "a"),
        ([("x", tarfile.SYMTYPE, "not-taken")], "x"),
        ([("x", tarfile.LNKTYPE, "/etc/passwd")], "x"),
        ([("x", tarfile.LNKTYPE, "no-such-member")], "x"),
        ([("x", tarfile.CHRTYPE, "")], "device"),
        ([("x", tarfile.FIFOTYPE, "")], "device"),
        ([("x", b"1"), ("./x", b"2")], "twice"),
    ],
    ids=[
        "absolute",
        "outside",
        "through a link",
        "to nothing",
        "hard, absolute",
        "hard, nothing",
        "device",
        "fifo",
        "twice",
    ],
)
def test_members_that_are_no_plain_files(tmp_path, folder, members, needle):
    (tmp_path / "outside").write_text("secret")
    archive = tar_of(tmp_path / "x.tgz", *members)
    assert_refused(unpack(archive, folder, "*"), str(archive), needle)
    assert_nothing_left(folder)
    assert not (folder.parent / "evil").exists()


def test_links_within_the_archive(tmp_path, folder):
    archive = tar_of(
        tmp_path / "x.tgz", ("a/x", b"1"), ("a/soft", tarfile.SYMTYPE, "x"), ("a/hard", tarfile.LNKTYPE, "a/x")
    )
    assert unpack(archive, folder, "a/*").returncode == 0
    assert contents(folder) == {"a/x": b"1", "a/soft": b"1", "a/hard": b"1"}


def test_link_in_a_zip(tmp_path, folder):
    info = zipfile.ZipInfo("x")
    info.external_attr = (stat.S_IFLNK | 0o777) << 16
    with zipfile.ZipFile(tmp_path / "x.zip", "w") as archive:
        archive.writestr(info, "/etc/passwd")
    assert_refused(unpack(tmp_path / "x.zip", folder, "x"), "link")
    assert_nothing_left(folder)


def test_missing_members_are_named(tmp_path, folder):
    archive = tar_of(tmp_path / "x.tgz", *((f"a/file{number}", b"1") for number in range(20)))
    result = unpack(archive, folder, "a/file3", "b/x.en", "b/*.de")
    assert_refused(result, "b/x.en and b/*.de", "a/file0, a/file1", "12 more")
    assert "a/file9" not in result.stderr, "the list is short"
    assert_nothing_left(folder)


@pytest.mark.parametrize("kind", ["x.tgz", "x.tar", "x.zip"])
@pytest.mark.parametrize("kept", [0.5, 0.999, 100])
def test_cut_off(tmp_path, folder, kind, kept):
    """Also where the cut comes after everything that is wanted."""
    make = zip_of if kind == "x.zip" else tar_of
    archive = make(
        tmp_path / kind, ("a", b"1"), ("b", os.urandom(100_000)), **({"mode": "w"} if kind == "x.tar" else {})
    )
    size = archive.stat().st_size
    if kind == "x.tar":
        size = 512 * 2 + 512 + 100_000  # without the blocks of zeros at its end, which carry nothing
    os.truncate(archive, int(size * kept) if kept < 1 else kept)
    assert_refused(unpack(archive, folder, "a"), str(archive), "damaged or cut off", "get it again")
    assert_nothing_left(folder)


@pytest.mark.parametrize("kind", ["x.tgz", "x.zip"])
def test_damaged_in_the_middle(tmp_path, folder, kind):
    make = zip_of if kind == "x.zip" else tar_of
    archive = make(tmp_path / kind, ("a", os.urandom(100_000)))
    with archive.open("r+b") as file:
        file.seek(50_000)
        file.write(b"damage")
    assert_refused(unpack(archive, folder, "a"), str(archive), "damaged or cut off")
    assert_nothing_left(folder)


def test_a_damaged_header_is_not_the_end(tmp_path, folder):
    """tarfile would stop there without a word, and "*" would have matched something."""
    archive = tar_of(tmp_path / "x.tar", ("a", b"1"), ("b", b"2"), mode="w")
    with archive.open("r+b") as file:
        file.seek(1024)
        file.write(b"damage" * 20)
    assert_refused(unpack(archive, folder, "*"), str(archive), "byte 1024")
    assert_nothing_left(folder)


@pytest.mark.parametrize(
    ("name", "content", "needle"),
    [
        ("x.tgz", b"<!DOCTYPE html><html>404</html>", "HTML"),
        ("x.tgz", b"no archive at all", "not a gzip"),
        ("x.tar", b"no archive at all" * 100, "damaged"),
        ("x.tgz", b"", "empty"),
    ],
)
def test_no_archive(tmp_path, folder, name, content, needle):
    (tmp_path / name).write_bytes(content)
    assert_refused(unpack(tmp_path / name, folder, "x"), name, needle)
    assert_refused(unpack(tmp_path / "nowhere.tgz", folder, "x"), "nowhere.tgz")
    assert_refused(run("python", SCRIPTS / "lib/unpack.py", "x.tgz", folder, check=False), "--member", "--help")
    assert_nothing_left(folder)


def test_a_full_disk(tmp_path, folder):
    """A limit on the size of a file stands for the end of the disk."""
    archive = tar_of(tmp_path / "x.tgz", ("a", TEXT))
    command = f"ulimit -f 100; exec python '{SCRIPTS}/lib/unpack.py' '{archive}' '{folder}' --member a"
    assert_refused(run("bash", "-c", command, check=False), str(folder), "make room")
    assert_nothing_left(folder)


def test_ctrl_c_leaves_nothing(tmp_path, folder):
    archive = tar_of(tmp_path / "x.tgz", ("a", bytes(300_000_000)))
    command = ["python", str(SCRIPTS / "lib/unpack.py"), str(archive), str(folder), "--member", "a"]
    process = subprocess.Popen(command, env=environment(), stderr=subprocess.PIPE, text=True)
    partial = folder.with_name("out.partial") / "a"
    while process.poll() is None and not (partial.exists() and partial.stat().st_size):
        time.sleep(0.001)
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=20)
    assert (process.returncode, stderr) == (130, "unpack: interrupted\n")
    assert_nothing_left(folder)
