"""Published files: downloads by curl, members of tar archives."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import time
import urllib.parse
import zlib
from collections.abc import Collection
from pathlib import Path

from pn_fairseq.common.command import UserError, say
from pn_fairseq.common.files import atomic_folder, atomic_write, checksum

CHUNK = 1 << 20
#: Some servers refuse curl's own.
AGENT = "Mozilla/5.0"
#: Failures that stay: curl's exit codes for a protocol or an address that it does not know, HTTP's codes but these.
PERMANENT = {1, 3}
TRANSIENT_STATUS = {408, 425, 429, 500, 502, 503, 504}
#: Bytes that an archive may unpack, in all. The largest text used here, WMT14's Common Crawl, has about 700 MB.
LIMIT = 4 << 30
#: What tarfile, zipfile and the decompressors raise for a damaged archive; OverflowError, ValueError and
#: MemoryError are raised for sizes in a header that no file has.
DAMAGE = (tarfile.TarError, EOFError, zlib.error, OverflowError, ValueError, MemoryError)


class Damaged(UserError):
    """An archive that is cut off or damaged."""


def _address(url: str) -> str:
    """The URL, or that of the file of the same name in DATA_MIRROR, a folder or the URL of one."""
    mirror = os.environ.get("DATA_MIRROR", "")
    name = urllib.parse.unquote(urllib.parse.urlsplit(url).path).rsplit("/", 1)[-1]
    if mirror and "://" not in mirror:
        return (Path(mirror).absolute() / name).as_uri()
    return f"{mirror.rstrip('/')}/{urllib.parse.quote(name)}" if mirror else url


def _download(address: str, partial: Path, retries: int, pause: float) -> None:
    """Fetch a file; what an earlier attempt left of it is resumed."""
    command = ["curl", "--fail", "--location", "--show-error", "--proto", "=http,https,file", "--continue-at", "-"]
    command += ["--connect-timeout", "60", "--speed-limit", "1", "--speed-time", "60", "--write-out", "%{http_code}"]
    command += ["--user-agent", AGENT, "--progress-bar" if sys.stderr.isatty() else "--silent"]
    command += ["--output", str(partial), address]
    failures = 0
    while True:
        before = partial.stat().st_size if partial.exists() else 0
        # close_fds=False: it inherits the lock of DEST. restore_signals=False: a limit on the size of files is an error
        # of writing, as it is for Python, and no signal.
        stderr = None if sys.stderr.isatty() else subprocess.PIPE
        result = subprocess.run(
            command, stdout=subprocess.PIPE, stderr=stderr, errors="replace", close_fds=False, restore_signals=False
        )
        code, status = result.returncode, int(result.stdout[-3:] or 0)
        message = [f"curl: ({code})", *(result.stderr or "").strip().splitlines()][-1]
        size = partial.stat().st_size if partial.exists() else 0
        # The server cannot resume, or has no more than is here (416, which curl calls a success).
        if before and (status == 416 or code in (33, 36)):
            partial.unlink()
        elif code == 0:
            return
        elif code == 37:  # of file://
            raise UserError(f"there is no {urllib.parse.unquote(address.removeprefix('file://'))} (DATA_MIRROR)")
        elif code == 23:
            raise UserError(f"cannot write {partial} ({message}); make room and run the same command again")
        else:
            failures = 1 if size > before else failures + 1
            if code in PERMANENT or (code == 22 and status not in TRANSIENT_STATUS) or failures > retries:
                kept = f"; {size} bytes are kept for the next run" if size else ""
                advice = "check the network, or get the file elsewhere and name its folder in DATA_MIRROR"
                raise UserError(f"{address}: {message}{kept}; {advice}")
            say("prepare", f"{partial.stem}: {message}; trying again")
            time.sleep(min(pause * 2 ** (failures - 1), 60))


def _record(record: Path, name: str, digest: str) -> None:
    with atomic_write(record, "w") as output:
        output.write(f"{digest}  {name}\n")
    say("prepare", f"{name}: sha256 {digest} (kept in {record})")


def fetch(url: str, file: Path, sha256: str = "", md5: str = "", retries: int = 4, pause: float = 1) -> None:
    """Download a file, unless it is there with the right checksum.

    Without ``sha256`` the checksum of the first download is kept in FILE.sha256, in the format of sha256sum, and must
    be matched from then on.

    Args:
        url: address; DATA_MIRROR may replace all but the name of the file.
        file: where to put it.
        sha256: checksum that it must have.
        md5: the same where only that is published; a mirror may hold another file on purpose.
        retries: attempts in a row that may fail without a byte.
        pause: seconds before the second attempt, doubled each time.
    """
    if sha256 and not re.fullmatch("[0-9a-fA-F]{64}", sha256):
        raise UserError(f"--sha256: '{sha256}' is not of 64 hexadecimal digits")
    record, partial = file.with_name(f"{file.name}.sha256"), file.with_name(f"{file.name}.partial")
    first = record.read_text("utf-8").split()[:1] if record.exists() and not sha256 else []
    expected, address = sha256.lower() or "".join(first), _address(url)
    if file.exists():
        if (digest := checksum(file)) == (expected or digest):
            return None if expected else _record(record, file.name, digest)
        say("prepare", f"{file} is not what it was (sha256 {digest}, not {expected}): getting it again")
        file.unlink()
    if not shutil.which("curl"):
        raise UserError(f"'curl' is not installed or not on the PATH; without it, download {url} to {file}")
    file.parent.mkdir(parents=True, exist_ok=True)
    while True:
        resumed = partial.exists()
        say("prepare", f"{file.name}: from {address}")
        _download(address, partial, retries, pause)
        digest, wrong = checksum(partial), ""
        if not partial.stat().st_size:
            wrong = "an empty file"
        elif expected and digest != expected:
            wrong = f"another file: its sha256 is {digest}, not {expected}"
            wrong += f" (if it is the new version that you want, remove {record})" if first else ""
        elif md5 and not os.environ.get("DATA_MIRROR") and checksum(partial, "md5") != md5:
            wrong = f"another file: its md5 is {checksum(partial, 'md5')}, not {md5}"
        if not wrong:
            break
        partial.unlink()
        if not resumed:
            raise UserError(f"{address} is {wrong}; open it in a browser, or put the right file at {file}")
        # Else it may be the beginning of one version and the rest of another.
    if not expected:
        _record(record, file.name, digest)
    partial.rename(file)


def unpack(archive: Path, folder: Path, members: Collection[str]) -> None:
    """Extract these members of a tar archive, by their paths, into a folder.

    The archive is not trusted: a path or a link that leaves the folder or a device ends it with nothing extracted, and
    what is extracted must be plain files of at most :data:`LIMIT` bytes in all. It is read to its end, where the
    checksum of a compressed one is.

    Raises:
        Damaged: it is cut off, damaged, or no archive.
        UserError: it has not all of the members, it is hostile, or the disk is full.
    """
    names, unpacked = [], 0
    try:
        with atomic_folder(folder) as partial, tarfile.open(archive) as tar:
            for member in tar:
                tarfile.data_filter(member, str(partial))
                names.append(os.path.normpath(member.name))
                if names[-1] not in members:
                    continue
                if not member.isreg() or member.issparse():
                    raise UserError(f"{archive}: its member {names[-1]} is a link or the like; do not use it")
                unpacked += member.size
                if unpacked > LIMIT:
                    raise UserError(f"{archive} has more than {LIMIT} bytes of text, the limit; do not use it")
                target = partial / names[-1]
                target.parent.mkdir(parents=True, exist_ok=True)
                with target.open("wb") as file:
                    shutil.copyfileobj(tar.extractfile(member), file, CHUNK)
            while tar.fileobj.read(CHUNK):
                pass
            refuse_missing(archive, members, names)
    except tarfile.FilterError as error:
        raise UserError(f"{archive}: {error}; do not use it") from None
    except DAMAGE as error:
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise Damaged(f"{archive} is not an archive, or is damaged or cut off ({reason})") from None
    except OSError as error:
        if error.errno is None:  # gzip's complaints about its data
            raise Damaged(f"{archive} is damaged or cut off ({error})") from None
        advice = "make room and run the same command again"
        raise UserError(f"cannot extract {archive} to {folder}: {error.strerror}; {advice}") from None


def refuse_missing(archive: Path, members: Collection[str], names: Collection[str]) -> None:
    """Raise a UserError if not all ``members`` are among the ``names`` that an archive holds."""
    if missing := [name for name in members if name not in names]:
        more = f" and {len(names) - 12} more" if len(names) > 12 else ""
        content = ", ".join([*names][:12]) + more if names else "nothing"
        raise UserError(f"{archive} has no {' and '.join(missing)}; it holds {content}")
