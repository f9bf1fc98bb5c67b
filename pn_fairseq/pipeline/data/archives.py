"""Published files: downloads, and the members of archives."""

from __future__ import annotations

import contextlib
import gzip
import http.client
import lzma
import os
import ssl
import tarfile
import urllib.error
import urllib.request
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path

from pn_fairseq.common.command import UserError, absolute, say
from pn_fairseq.common.files import checksum
from pn_fairseq.pipeline.data.parallel import progress

CHUNK = 1 << 20
#: Some servers refuse Python's own user agent.
AGENT = "Mozilla/5.0"
#: What a server or the network may raise, even in the middle of a file.
NETWORK = (
    urllib.error.URLError,
    http.client.HTTPException,
    ConnectionError,
    TimeoutError,
    ssl.SSLError,
)
#: Total bytes that an archive may unpack to. The largest text used here, WMT14's Common Crawl, has
#: about 700 MB.
LIMIT = 4 << 30
#: What is raised for a damaged archive.
DAMAGE = (
    tarfile.TarError,
    zipfile.BadZipFile,
    gzip.BadGzipFile,
    zlib.error,
    lzma.LZMAError,
    EOFError,
    OverflowError,
)


def _address(url: str, mirror: str | None) -> str:
    """The URL, or that of the file with the same name in ``mirror``, a folder or a folder's URL."""
    name = url.rsplit("/", 1)[-1]
    if not mirror:
        return url
    if "://" in mirror:
        return f"{mirror.rstrip('/')}/{name}"
    return (absolute(mirror) / name).as_uri()


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _transfer(address: str, partial: Path) -> None:
    """Append the bytes that ``partial`` still lacks; a server that cannot resume sends the whole
    file.
    """
    begin = _size(partial)
    headers = {"User-Agent": AGENT, **({"Range": f"bytes={begin}-"} if begin else {})}
    with urllib.request.urlopen(
        urllib.request.Request(address, headers=headers), timeout=60
    ) as answer:
        total = int(answer.headers["Content-Length"] or 0)
        mode = "ab" if answer.status == 206 else "wb"
        with (
            partial.open(mode) as file,
            progress(total=total, desc=partial.stem, unit="B", unit_scale=True) as bar,
        ):
            for block in iter(lambda: answer.read(CHUNK), b""):
                file.write(block)
                bar.update(len(block))
        missing = getattr(answer, "length", 0)  # the unread part of HTTP's Content-Length
        if missing:
            raise http.client.IncompleteRead(b"", missing)


def fetch(url: str, file: Path, known: str = "", mirror: str | None = None) -> None:
    """Download a file unless it exists. If the connection breaks, the download is resumed as long
    as data arrives.

    Args:
        url: address.
        file: where to store the file.
        known: the checksum that the file must have, sha256 or (32 digits) md5; "": any.
        mirror: a folder, or the URL of one, that replaces all of ``url`` but the file name.
    """
    partial = file.with_name(f"{file.name}.partial")
    file.parent.mkdir(parents=True, exist_ok=True)
    try:
        _fetch(_address(url, mirror), file, partial, known)
    finally:  # if nothing was downloaded, leave nothing behind
        if not _size(partial):
            partial.unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # the folder is not empty
            file.parent.rmdir()


def _fetch(address: str, file: Path, partial: Path, known: str) -> None:
    while not file.exists():
        before = _size(partial)
        say("prepare", f"{file.name}: from {address}")
        try:
            _transfer(address, partial)
            partial.rename(file)
        except NETWORK as error:
            size = _size(partial)
            if getattr(error, "code", None) == 416 and size:
                # the server has no more bytes, so the partial file may be of another version
                partial.unlink()
            elif size <= before:
                kept = f"; {size} bytes are kept for the next run" if size else ""
                advice = (
                    "check the network and retry, or get the file elsewhere and name its folder "
                    "(--mirror)"
                )
                raise UserError(f"{address}: {error}{kept}; {advice}") from None
    algorithm = "md5" if len(known) == 32 else "sha256"
    digest = checksum(file, algorithm) if known else ""
    if digest != known.lower():
        file.unlink()
        advice = "it was removed; run the same command again, or put the right file there"
        raise UserError(
            f"{file} ({address}) is another file: its {algorithm} is {digest}, not {known}; "
            f"{advice}"
        )


def _check(archive: Path, members: Sequence[str], sizes: Mapping[str, int]) -> None:
    """Refuse an archive without these members, or with too many bytes in them.

    ``sizes``: the sizes of its plain files.
    """
    missing = [name for name in members if name not in sizes]
    if missing:
        content = ", ".join([*sizes][:12]) or "nothing"
        raise UserError(f"{archive} has no {' and '.join(missing)}; it begins with {content}")
    if sum(sizes[name] for name in members) > LIMIT:
        raise UserError(f"{archive} has more than {LIMIT} bytes of text, the limit; do not use it")


def unpack(archive: Path, folder: Path, members: Sequence[str]) -> list[Path]:
    """Extract the ``members`` with these paths from a tar or zip archive into a folder.

    The archive is not trusted: members must be plain files that stay in the folder, at most
    :data:`LIMIT` bytes in all. Before anything is written, a tar archive is read to its end, where
    a compressed one stores its checksum.
    """
    try:
        if archive.suffix == ".zip":
            with zipfile.ZipFile(archive) as file:
                _check(
                    archive,
                    members,
                    {member.filename: member.file_size for member in file.infolist()},
                )
                file.extractall(folder, members)
        else:
            with tarfile.open(archive) as file:
                content = {os.path.normpath(member.name): member for member in file}
                while file.fileobj.read(CHUNK):
                    pass
                _check(
                    archive,
                    members,
                    {name: member.size for name, member in content.items() if member.isreg()},
                )
                file.extractall(
                    folder, [content[name] for name in content if name in members], filter="data"
                )
    except DAMAGE as error:
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        advice = "remove it and get it again (without --archive the same command does)"
        raise UserError(
            f"{archive} is not an archive, or is damaged or cut off ({reason}); {advice}"
        ) from None
    return [folder / member for member in members]
