"""Extract named members of an archive: unpack.py ARCHIVE FOLDER --member PATTERN [--member PATTERN ...].

ARCHIVE is a tar (plain, .gz, .bz2, .xz) or a zip. A member whose whole path matches a PATTERN (*, ? and [] as in the
shell, but * matches / too; a leading ./ of a path does not count) is put at the same relative path in FOLDER, which
is made beside and renamed. Every PATTERN must match something, and FOLDER must not be there.

The archive is not trusted: a path that leaves FOLDER, a device, a link to the outside end it with nothing extracted.
It is read to its end, so that a damaged or cut-off one is noticed.
"""

import argparse
import errno
import fnmatch
import lzma
import shutil
import stat
import sys
import tarfile
import zipfile
import zlib
from pathlib import Path, PurePosixPath

from conventions import ArgumentParser, UserError, command
from filetype import HEAD, wrong_type

CHUNK = 1 << 20
LISTED = 8
"""How many names of members an error message lists."""
DAMAGE = (tarfile.ReadError, EOFError, zlib.error, lzma.LZMAError, zipfile.BadZipFile)


class Choice:
    """The patterns, which of them have matched, and what else there was."""

    def __init__(self, archive: Path, patterns: list[str]):
        self.archive, self.patterns = archive, patterns
        self.unmatched = set(patterns)
        self.taken: set[str] = set()
        self.seen: list[str] = []

    def takes(self, name: str, is_folder: bool) -> bool:
        """Whether to extract the member, whose path must be one that stays within the folder."""
        path = PurePosixPath(name)
        if path.is_absolute() or ".." in path.parts or "\\" in name or "\0" in name:
            raise UserError(f"{self.archive}: its member {name!r} leaves the folder; do not use it")
        if is_folder:
            return False
        plain = str(path)
        self.seen.append(plain)
        matched = {pattern for pattern in self.patterns if fnmatch.fnmatchcase(plain, pattern)}
        self.unmatched -= matched
        if not matched:
            return False
        if plain in self.taken:
            raise UserError(f"{self.archive} holds {plain} twice")
        self.taken.add(plain)
        return True

    def check(self) -> None:
        """Every pattern must have matched."""
        if self.unmatched:
            missing = " and ".join(pattern for pattern in self.patterns if pattern in self.unmatched)
            there = ", ".join(self.seen[:LISTED]) or "nothing"
            more = f" and {len(self.seen) - LISTED} more" if len(self.seen) > LISTED else ""
            raise UserError(f"{self.archive} has no {missing}; it holds {there}{more}")


def unpack_tar(archive: Path, folder: Path, choice: Choice) -> None:
    with tarfile.open(archive) as tar:
        for member in tar:
            if not choice.takes(member.name, member.isdir()):
                continue
            if not (member.isreg() or member.issym() or member.islnk()):
                raise UserError(f"{archive}: its member {member.name} is a device or the like; do not use it")
            try:
                tar.extract(member, folder, filter="data")
            except tarfile.FilterError as error:
                raise UserError(f"{archive}: {error}; do not use it") from None
            except KeyError:
                raise UserError(f"{archive}: its member {member.name} is a link to nothing") from None
        # tarfile takes a damaged header in the middle, or the end of a cut-off plain file, for the end of the archive,
        # which is a block of zeros; and the checksum of a compressed one comes after that.
        tar.fileobj.seek(tar.offset)
        block = tar.fileobj.read(tarfile.BLOCKSIZE)
        if not block or any(block):
            raise tarfile.ReadError(f"no readable member at byte {tar.offset}")
        while tar.fileobj.read(CHUNK):
            pass


def unpack_zip(archive: Path, folder: Path, choice: Choice) -> None:
    with zipfile.ZipFile(archive) as zipped:
        for member in zipped.infolist():
            if not choice.takes(member.filename, member.is_dir()):
                continue
            kind = stat.S_IFMT(member.external_attr >> 16)
            if kind not in (0, stat.S_IFREG):
                raise UserError(f"{archive}: its member {member.filename} is a link or a device; do not use it")
            if member.flag_bits & 1:
                raise UserError(f"{archive}: its member {member.filename} is encrypted")
            target = folder / PurePosixPath(member.filename)
            target.parent.mkdir(parents=True, exist_ok=True)
            with zipped.open(member) as packed, target.open("wb") as file:
                shutil.copyfileobj(packed, file, CHUNK)


def check_extracted(archive: Path, folder: Path, choice: Choice) -> None:
    """What was extracted is files within the folder; a link may lead to another one of them."""
    top = folder.resolve()
    for name in sorted(choice.taken):
        path = (folder / name).resolve()
        if not path.is_file() or not path.is_relative_to(top):
            raise UserError(f"{archive}: its member {name} is a link to something that was not extracted")


def unpack(archive: Path, folder: Path, patterns: list[str]) -> None:
    """FOLDER with the matching members of the archive."""
    if not archive.is_file():
        raise UserError(f"there is no archive {archive}")
    if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        raise UserError(f"{folder} is there already; remove it or name another folder")
    with archive.open("rb") as file:
        head = file.read(HEAD)
    record = archive.with_name(archive.name + ".sha256")
    again = f"remove {archive}{' and its .sha256' if record.exists() else ''} and get it again"
    if problem := wrong_type(head, archive.name) or ("an empty file" if not head else None):
        raise UserError(f"{archive} is {problem}; {again}")
    partial = folder.with_name(folder.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    choice = Choice(archive, patterns)
    try:
        (unpack_zip if head.startswith(b"PK") else unpack_tar)(archive, partial, choice)
        choice.check()
        check_extracted(archive, partial, choice)
        partial.replace(folder)
    except DAMAGE as error:
        raise UserError(f"{archive} is damaged or cut off ({error}); {again}") from None
    except OSError as error:
        if error.errno is None:
            # gzip's and bz2's complaints about their data.
            raise UserError(f"{archive} is damaged or cut off ({error}); {again}") from None
        hint = "; make room and run it again" if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG) else ""
        raise UserError(f"cannot extract {archive} to {folder}: {error.strerror}{hint}") from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)


@command("unpack", OSError)
def main(argv: list[str] | None = None) -> None:
    description, _, rest = __doc__.partition("\n\n")
    parser = ArgumentParser(
        prog="unpack.py",
        description=description.split(":")[0] + ".",
        epilog=rest,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("archive", metavar="ARCHIVE", type=Path)
    parser.add_argument("folder", metavar="FOLDER", type=Path, help="the folder to be made")
    parser.add_argument("--member", metavar="PATTERN", action="append", required=True, help="path in the archive")
    arguments = parser.parse_args(argv)
    unpack(arguments.archive, arguments.folder, arguments.member)


if __name__ == "__main__":
    sys.exit(main())
