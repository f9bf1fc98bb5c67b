"""Extraction: archives that are made to harm, damaged, or not what was expected."""

import io
import os
import tarfile
import zipfile
from pathlib import Path

import pytest

from pn_fairseq.common.command import UserError
from pn_fairseq.pipeline.data import archives
from pn_fairseq.pipeline.data.archives import unpack
from tests.scripts_helpers import files_of

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


def zip_of(path: Path, **members: bytes) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
        for name, content in members.items():
            file.writestr(name, content)
    return path


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
    assert not folder.exists() or not any(folder.iterdir())


@pytest.mark.parametrize(
    ("kind", "mode"), [("x.tgz", "w:gz"), ("x.tar", "w"), ("x.tar.xz", "w:xz")]
)
def test_named_members_and_no_others(tmp_path, folder, kind, mode):
    members = [("top.en", TEXT), ("./a/deep/x.en", b"1\n"), ("a/other", b"3\n"), ("a/x y.en", b"4")]
    unpack(
        tar_of(tmp_path / kind, *members, mode=mode), folder, ["top.en", "a/deep/x.en", "a/x y.en"]
    )
    assert files_of(folder) == {"top.en": TEXT, "a/deep/x.en": b"1\n", "a/x y.en": b"4"}


@pytest.mark.parametrize(
    "member",
    [
        ("../x", b"1"),
        ("x", tarfile.SYMTYPE, "/etc/passwd"),
        ("x", tarfile.SYMTYPE, "other"),
        ("x", tarfile.LNKTYPE, "other"),
        ("x", tarfile.FIFOTYPE, ""),
    ],
    ids=["outside", "absolute", "link", "hard link", "fifo"],
)
def test_members_that_are_no_plain_files_of_the_folder(tmp_path, folder, member):
    refused(tar_of(tmp_path / "x.tgz", ("other", b"1"), member), folder, ["x"], "has no x")


def test_members_that_leave_the_folder(tmp_path, folder):
    """Where nobody asks for them they are not extracted, and a file does not go through a link
    that leaves it.
    """
    members = [
        ("../evil", b"1"),
        ("/evil", b"1"),
        ("a", tarfile.SYMTYPE, "../.."),
        ("a/x", b"2"),
        ("../y", b"3"),
    ]
    archive = tar_of(tmp_path / "x.tgz", *members)
    refused(archive, folder, ["../y"], "outside the destination")
    unpack(archive, folder, ["a/x"])
    assert files_of(folder) == {"a/x": b"2"} and not list(tmp_path.rglob("evil"))


@pytest.mark.parametrize("kind", ["tar", "zip"])
def test_members_that_would_fill_the_disk(tmp_path, folder, monkeypatch, kind):
    """Repeated text is a few bytes in the archive."""
    monkeypatch.setattr(archives, "LIMIT", 2 * len(TEXT) - 1)
    if kind == "tar":
        archive = tar_of(tmp_path / "x.tgz", ("a", TEXT), ("b", TEXT), ("c", b"1"))
    else:
        archive = zip_of(tmp_path / "x.zip", a=TEXT, b=TEXT, c=b"1")
    refused(archive, folder, ["a", "b"], f"more than {2 * len(TEXT) - 1} bytes", "do not use it")
    unpack(archive, folder, ["a", "c"])
    assert files_of(folder) == {"a": TEXT, "c": b"1"}


@pytest.mark.parametrize("kind", ["tgz", "zip"])
def test_missing_members_are_named(tmp_path, folder, kind):
    names = [f"a/file{number}" for number in range(20)]
    pack = zip_of if kind == "zip" else lambda path, **members: tar_of(path, *members.items())
    archive = pack(tmp_path / f"x.{kind}", **dict.fromkeys(names, b"1"))
    refused(archive, folder, [names[3], "b/x.en", "b/y.de"], "has no b/x.en and b/y.de", "a/file3")
    archive.unlink()
    archive = pack(archive, a=b"1", b=b"2")
    refused(archive, folder, ["a", "b", "c"], "has no c; it begins with a, b")


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
    [
        *(
            ("x.tgz", b"<!DOCTYPE html>404"),
            ("x.tgz", b"no archive"),
            ("x.tar", b"no archive" * 100),
            ("x.tgz", b""),
        ),
        *(("x.zip", b"PK\x03\x04 not a zip"), ("x.zip", b"")),
    ],
)
def test_no_archive(tmp_path, folder, name, content):
    (tmp_path / name).write_bytes(content)
    refused(tmp_path / name, folder, ["x"], "not an archive, or is damaged")
