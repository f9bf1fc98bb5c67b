"""Getting published files: downloads by curl, members of tar archives."""

from __future__ import annotations

import gzip
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


class Damaged(UserError):
    """An archive that is cut off or damaged."""


#: Some servers refuse curl's own.
AGENT = "Mozilla/5.0"
#: curl's exit codes for what may be different a moment later: no connection, a connection that broke off.
TRANSIENT = {5, 6, 7, 16, 18, 28, 35, 52, 55, 56, 92}
#: The same for HTTP status codes (RFC 9110 and 6585).
TRANSIENT_STATUS = {408, 425, 429, 500, 502, 503, 504}
#: Bytes of a member of an archive. The largest one used here (Common Crawl of WMT14) has about 350 MB.
MEMBER_LIMIT = 4 << 30
#: What tarfile and the decompressors raise for a damaged archive; OverflowError, ValueError and MemoryError come of
#: sizes in a header that no file has.
DAMAGE = (tarfile.TarError, EOFError, zlib.error, OverflowError, ValueError, MemoryError)


def _address(url: str) -> str:
    """The URL, or that of the file of the same name in DATA_MIRROR, a folder or the URL of one."""
    mirror = os.environ.get("DATA_MIRROR", "")
    name = urllib.parse.unquote(urllib.parse.urlsplit(url).path).rsplit("/", 1)[-1]
    if mirror and "://" not in mirror:
        return (Path(mirror).absolute() / name).as_uri()
    return f"{mirror.rstrip('/')}/{urllib.parse.quote(name)}" if mirror else url


def _curl(address: str, partial: Path) -> tuple[int, int, str]:
    """Fetch what is missing of a file: (exit code, HTTP status, message)."""
    command = ["curl", "--fail", "--location", "--show-error", "--proto", "=http,https,file", "--continue-at", "-"]
    command += ["--connect-timeout", "60", "--speed-limit", "1", "--speed-time", "60", "--write-out", "%{http_code}"]
    command += ["--user-agent", AGENT]
    command += ["--progress-bar" if sys.stderr.isatty() else "--silent", "--output", str(partial), address]
    stderr = None if sys.stderr.isatty() else subprocess.PIPE
    # restore_signals=False: a limit on the size of files is an error of writing, as it is for Python, and no signal.
    result = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=stderr, text=True, errors="replace", restore_signals=False
    )
    said = (result.stderr or "").strip().splitlines()
    return result.returncode, int(result.stdout[-3:] or 0), said[-1] if said else f"curl: ({result.returncode})"


def _download(address: str, partial: Path, retries: int, pause: float) -> None:
    """Fetch a file; what an earlier attempt left of it is resumed."""
    failures = 0
    while True:
        before = partial.stat().st_size if partial.exists() else 0
        code, status, said = _curl(address, partial)
        size = partial.stat().st_size if partial.exists() else 0
        # The server cannot resume, or has no more than is here (416, which curl calls a success).
        if before and (status == 416 or code in (33, 36)):
            partial.unlink()
            continue
        if code == 0:
            return
        if code == 37:  # of file://
            raise UserError(f"there is no {urllib.parse.unquote(address.removeprefix('file://'))} (DATA_MIRROR)")
        if code == 23:
            raise UserError(f"cannot write {partial} ({said}); make room and run it again")
        failures = 1 if size > before else failures + 1
        transient = code in TRANSIENT or status in TRANSIENT_STATUS
        if not transient or failures > retries:
            kept = f"; {size} bytes are kept for the next run" if size else ""
            raise UserError(
                f"{address}: {said}{kept}; check the network, or get the file elsewhere and name its folder in "
                "DATA_MIRROR"
            )
        say("fetch", f"{partial.stem}: {said}; trying again")
        time.sleep(min(pause * 2 ** (failures - 1), 60))


def _wrong_type(path: Path) -> str | None:
    """Why the file is not what its name says, as words after "is", by its first bytes."""
    with path.open("rb") as file:
        head = file.read(512)
    if not head:
        return "an empty file"
    # Some servers send a web page with status 200 for a missing file; login pages of networks do so for every file.
    if head.removeprefix(b"\xef\xbb\xbf").lstrip().lower().startswith((b"<!doctype html", b"<html", b"<head")):
        return "an HTML page"
    if path.name.removesuffix(".partial").endswith((".tgz", ".gz")) and not head.startswith(b"\x1f\x8b"):
        return f"not a gzip archive (it begins with {head[:12]!r})"
    return None


def _damage(path: Path) -> str | None:
    """The same with a look at the whole file, which has a checksum if it is compressed."""
    wrong = _wrong_type(path)
    if wrong or not path.name.removesuffix(".partial").endswith((".tgz", ".gz")):
        return wrong
    try:
        with gzip.open(path) as file:
            while file.read(CHUNK):
                pass
    except (OSError, EOFError, zlib.error) as error:
        return f"damaged or cut off ({error})"
    return None


def _record(record: Path, name: str, digest: str) -> None:
    with atomic_write(record, "w") as output:
        output.write(f"{digest}  {name}\n")
    say("fetch", f"{name}: sha256 {digest} (kept in {record})")


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
    recorded = record.read_text("utf-8").split()[:1] if record.exists() and not sha256 else []
    expected = sha256.lower() or "".join(recorded)
    address = _address(url)
    if file.exists():
        digest = checksum(file)
        wrong = _damage(file) if not expected else f"not what it was (sha256 {digest}, not {expected})"
        if digest == expected or not wrong:
            if not expected:
                _record(record, file.name, digest)
            return
        say("fetch", f"{file} is {wrong}: getting it again")
        file.unlink()
    if not shutil.which("curl"):
        raise UserError(f"'curl' is not installed or not on the PATH; without it, download {url} to {file}")
    file.parent.mkdir(parents=True, exist_ok=True)
    while True:
        resumed = partial.exists()
        say("fetch", f"{file.name}: from {address}")
        _download(address, partial, retries, pause)
        digest = checksum(partial)
        wrong = _damage(partial)
        if not wrong and expected and digest != expected:
            wrong = f"another file: its sha256 is {digest}, not {expected}"
            wrong += f" (if it is the new version that you want, remove {record})" if recorded else ""
        if not wrong and md5 and not os.environ.get("DATA_MIRROR") and checksum(partial, "md5") != md5:
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
    what is extracted must be plain files. It is read to its end, where the checksum of a compressed one is.
    """
    if wrong := _wrong_type(archive):
        raise Damaged(f"{archive} is {wrong}")
    found, others = set(), []
    try:
        with atomic_folder(folder) as partial, tarfile.open(archive) as tar:
            for member in tar:
                tarfile.data_filter(member, str(partial))
                name = os.path.normpath(member.name)
                if name not in members:
                    others.append(name)
                    continue
                if name in found:
                    raise UserError(f"{archive} holds {name} twice")
                if not member.isreg() or member.issparse():
                    raise UserError(f"{archive}: its member {name} is a link or the like; do not use it")
                if member.size > MEMBER_LIMIT:
                    raise UserError(
                        f"{archive}: its member {name} has {member.size} bytes; {MEMBER_LIMIT} are the limit"
                    )
                found.add(name)
                target = partial / name
                target.parent.mkdir(parents=True, exist_ok=True)
                with target.open("wb") as file:
                    shutil.copyfileobj(tar.extractfile(member), file, CHUNK)
            while tar.fileobj.read(CHUNK):
                pass
            if missing := [name for name in members if name not in found]:
                more = f" and {len(others) - 8} more" if len(others) > 8 else ""
                raise UserError(
                    f"{archive} has no {' and '.join(missing)}; it holds {', '.join(others[:8]) or 'nothing'}{more}"
                )
    except tarfile.FilterError as error:
        raise UserError(f"{archive}: {error}; do not use it") from None
    except DAMAGE as error:
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise Damaged(f"{archive} is damaged or cut off ({reason})") from None
    except OSError as error:
        if error.errno is None:  # gzip's complaints about its data
            raise Damaged(f"{archive} is damaged or cut off ({error})") from None
        raise UserError(f"cannot extract {archive} to {folder}: {error.strerror}; is the disk full?") from None
