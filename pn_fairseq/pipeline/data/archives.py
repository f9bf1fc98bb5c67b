"""Published files: downloads, and the members of archives."""

from __future__ import annotations

import errno
import gzip
import http.client
import os
import tarfile
import time
import urllib.error
import urllib.parse
import urllib.request
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path

from pn_fairseq.common.command import UserError, say
from pn_fairseq.common.files import atomic_folder, checksum
from pn_fairseq.pipeline.data.parallel import progress

CHUNK = 1 << 20
#: Some servers refuse Python's own.
AGENT = "Mozilla/5.0"
#: HTTP's codes for failures that may have passed a moment later.
TRANSIENT = {408, 425, 429, 500, 502, 503, 504}
#: What the system reports where no more can be written.
FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
#: Bytes that an archive may unpack, in all. The largest text used here, WMT14's Common Crawl, has about 700 MB.
LIMIT = 4 << 30
#: What is raised for a damaged archive; the last two for a size in a header that no file has.
DAMAGE = (tarfile.TarError, zipfile.BadZipFile, gzip.BadGzipFile, zlib.error, EOFError, ValueError, OverflowError)


class Damaged(UserError):
    """An archive that is cut off or damaged."""


def _address(url: str) -> str:
    """The URL, or that of the file of the same name in DATA_MIRROR, a folder or the URL of one."""
    mirror = os.environ.get("DATA_MIRROR", "")
    name = urllib.parse.unquote(urllib.parse.urlsplit(url).path).rsplit("/", 1)[-1]
    if mirror and "://" not in mirror:
        return (Path(mirror).absolute() / name).as_uri()
    return f"{mirror.rstrip('/')}/{urllib.parse.quote(name)}" if mirror else url


def _transfer(address: str, partial: Path, begin: int) -> None:
    """Append the bytes from ``begin`` on to ``partial``; a server that cannot do that sends the whole file."""
    headers = {"User-Agent": AGENT, **({"Range": f"bytes={begin}-"} if begin else {})}
    with urllib.request.urlopen(urllib.request.Request(address, headers=headers), timeout=60) as answer:
        total = int(answer.headers["Content-Length"] or 0)
        mode = "ab" if answer.status == 206 else "wb"
        with partial.open(mode) as file, progress(total=total, desc=partial.stem, unit="B", unit_scale=True) as bar:
            while block := answer.read(CHUNK):
                file.write(block)
                bar.update(len(block))
        if missing := getattr(answer, "length", 0):  # of HTTP's Content-Length
            raise http.client.IncompleteRead(b"", missing)


def _download(address: str, partial: Path, retries: int, pause: float) -> None:
    """Fetch a file; what an earlier attempt left of it is resumed."""
    failures, before = 0, -1
    while True:
        begin = partial.stat().st_size if partial.exists() else 0
        failures = 0 if begin > before else failures
        before = begin
        try:
            return _transfer(address, partial, begin)
        except (OSError, http.client.HTTPException) as error:
            status, failures = getattr(error, "code", None), failures + 1
            if getattr(error, "errno", None) in FULL:
                raise
            if status == 416 and begin:  # the server has no more than is here: it may be the end of another version
                partial.unlink()
            elif failures > retries or address.startswith("file:") or (status and status not in TRANSIENT):
                size = partial.stat().st_size if partial.exists() else 0
                kept = f"; {size} bytes are kept for the next run" if size else ""
                advice = "check the network, or get the file elsewhere and name its folder in DATA_MIRROR"
                raise UserError(f"{address}: {error}{kept}; {advice}") from None
            else:
                say("prepare", f"{partial.stem}: {error}; trying again")
                time.sleep(min(pause * 2 ** (failures - 1), 60))


def fetch(url: str, file: Path, known: str = "", retries: int = 4, pause: float = 1) -> None:
    """Download a file, unless it is there.

    Args:
        url: address; DATA_MIRROR may replace all but the name of the file.
        file: where to put it.
        known: the checksum that it must have, sha256 or (32 digits) md5; "": any.
        retries: attempts in a row that may fail without a byte.
        pause: seconds before the second attempt, doubled each time.
    """
    algorithm, known, address = "md5" if len(known) == 32 else "sha256", known.lower(), _address(url)
    if file.exists():
        if not known or checksum(file, algorithm) == known:
            return
        say("prepare", f"{file} does not have the {algorithm} {known}: getting it again")
    file.parent.mkdir(parents=True, exist_ok=True)
    partial = file.with_name(f"{file.name}.partial")
    while True:
        resumed = partial.exists()
        say("prepare", f"{file.name}: from {address}")
        _download(address, partial, retries, pause)
        if not known or (digest := checksum(partial, algorithm)) == known:
            break
        partial.unlink()
        if not resumed:  # else it may be the beginning of one version and the rest of another
            advice = f"open it in a browser, or put the right file at {file}"
            raise UserError(f"{address} is another file: its {algorithm} is {digest}, not {known}; {advice}")
    partial.rename(file)


def _check(archive: Path, members: Sequence[str], sizes: Mapping[str, int]) -> None:
    """Refuse an archive without these members, or with too many bytes in them. ``sizes``: of its plain files."""
    if missing := [name for name in members if name not in sizes]:
        more = f" and {len(sizes) - 12} more" if len(sizes) > 12 else ""
        content = ", ".join([*sizes][:12]) + more if sizes else "nothing"
        raise UserError(f"{archive} has no {' and '.join(missing)}; the files in it are {content}")
    if sum(sizes[name] for name in members) > LIMIT:
        raise UserError(f"{archive} has more than {LIMIT} bytes of text, the limit; do not use it")


def unpack(archive: Path, folder: Path, members: Sequence[str]) -> list[Path]:
    """Extract these members of a tar or zip archive, by their paths, into a folder.

    The archive is not trusted: members must be plain files that stay in the folder, of at most :data:`LIMIT` bytes in
    all. A tar archive is read to its end, where the checksum of a compressed one is, before anything is written.

    Raises:
        Damaged: it is cut off, damaged, or no archive.
        UserError: it does not have all of the members, or too many bytes.
    """
    try:
        with atomic_folder(folder) as partial:
            if archive.suffix == ".zip":
                with zipfile.ZipFile(archive) as file:
                    _check(archive, members, {member.filename: member.file_size for member in file.infolist()})
                    file.extractall(partial, members)
            else:
                with tarfile.open(archive) as file:
                    content = {os.path.normpath(member.name): member for member in file}
                    while file.fileobj.read(CHUNK):
                        pass
                    _check(archive, members, {name: each.size for name, each in content.items() if each.isreg()})
                    wanted = [member for name, member in content.items() if name in members]
                    file.extractall(partial, wanted, filter="data")
    except DAMAGE as error:
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise Damaged(f"{archive} is not an archive, or is damaged or cut off ({reason})") from None
    return [folder / member for member in members]
