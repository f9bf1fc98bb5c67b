"""Download a file: fetch.py URL FILE [--sha256 HEX | --md5 HEX].

FILE is either whole or not there. A download that was cut off stays as FILE.partial, with what the server said of its
version in FILE.partial.json, and the next run asks for the rest of the same version, and for all of it if the server
has another one by now or cannot send parts.

With --sha256, or --md5 where only that is published, the file must have that checksum. Without, its sha256 is said and
kept in FILE.sha256 (in the format of sha256sum), which FILE must match from then on, also when it is downloaded again.

DATA_MIRROR, a folder or the URL of one, is where the file of the same name is taken from instead (for work offline).
http_proxy and https_proxy are respected.
"""

import argparse
import contextlib
import errno
import fcntl
import functools
import hashlib
import http.client
import json
import os
import shutil
import ssl
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path

from conventions import ArgumentParser, UserError, command
from filetype import HEAD, wrong_type

CHUNK = 1 << 20
AGENT = "pn_fairseq"
# Answers that may be another one a moment later (RFC 9110 and 6585).
PASSING = {408, 425, 429, 500, 502, 503, 504}


class Dropped(Exception):
    """The connection failed in a way that may pass."""


def say(text: str) -> None:
    print(f"[fetch] {text}", file=sys.stderr)


def megabytes(count: int) -> str:
    return f"{count / 1e6:.1f} MB"


def checksum(path: Path, algorithm: str) -> str:
    """The checksum of a file, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, algorithm).hexdigest()


def version_of(answer: http.client.HTTPResponse) -> str | None:
    """What stands for the version of what is served, and may be asked for by If-Range; None if nothing does."""
    etag = answer.headers.get("ETag", "")
    # A weak ETag, W/"...", does not promise the same bytes (RFC 9110, 13.1.5).
    return etag if etag.startswith('"') else answer.headers.get("Last-Modified")


class Progress:
    """One line on stderr that is written over, where stderr is a terminal."""

    def __init__(self, name: str, done: int, total: int | None):
        self.name, self.first, self.total = name, done, total
        self.start = self.shown = time.monotonic()
        self.active = sys.stderr.isatty()

    def update(self, done: int) -> None:
        now = time.monotonic()
        if not self.active or now - self.shown < 0.5:
            return
        self.shown = now
        speed = (done - self.first) / (now - self.start)
        text = f"{self.name}: {megabytes(done)}"
        if self.total:
            text += f" of {megabytes(self.total)} ({done / self.total:.0%})"
            if speed:
                text += f", {(self.total - done) / speed:.0f} s left"
        print(f"\r\x1b[K{text}, {speed / 1e6:.1f} MB/s", end="", file=sys.stderr, flush=True)

    def close(self) -> None:
        if self.active and self.shown > self.start:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)


class Download:
    """FILE.partial, what is known of its version, and how to get the rest of it."""

    def __init__(self, url: str, file: Path, timeout: float):
        self.url, self.file, self.timeout = url, file, timeout
        self.partial = file.with_name(file.name + ".partial")
        self.notes = file.with_name(file.name + ".partial.json")

    def size(self) -> int:
        return self.partial.stat().st_size if self.partial.exists() else 0

    def known(self) -> dict:
        """What the server said when FILE.partial was begun; empty if that is not known or was another address."""
        try:
            notes = json.loads(self.notes.read_text("utf-8"))
        except (OSError, ValueError):
            return {}
        return notes if isinstance(notes, dict) and notes.get("url") == self.url else {}

    def discard(self) -> None:
        self.partial.unlink(missing_ok=True)
        self.notes.unlink(missing_ok=True)

    def run(self) -> None:
        """Fetch what is missing of FILE.partial.

        Raises:
            Dropped: it may work a moment later, with what is there kept.
            UserError: it will not.
        """
        size, known = self.size(), self.known()
        if size and known.get("length") == size:
            return
        request = urllib.request.Request(self.url, headers={"User-Agent": AGENT, "Accept-Encoding": "identity"})
        version = known.get("version")
        if size and version:
            request.add_header("Range", f"bytes={size}-")
            request.add_header("If-Range", version)
        with self.connection(request) as answer:
            if answer.status == 206 and not self.continues(answer, size, known):
                self.discard()
                raise Dropped("the server sent another part than the one asked for")
            if answer.status != 206:
                size = 0
                known = self.begin(answer)
            elif size:
                say(f"{self.file.name}: going on after {megabytes(size)}")
            self.receive(answer, size, known.get("length"))

    @contextlib.contextmanager
    def connection(self, request: urllib.request.Request) -> Iterator[http.client.HTTPResponse]:
        """The server's answer; all that can go wrong until its end becomes Dropped or UserError."""
        try:
            with urllib.request.urlopen(request, timeout=self.timeout) as answer:
                yield answer
        except urllib.error.HTTPError as error:
            if error.code == 416:
                self.discard()
                raise Dropped("the server has less than what is here already") from None
            problem = f"the server says {error.code} {error.reason}"
            if error.code in PASSING:
                raise Dropped(problem) from None
            raise UserError(
                f"{self.url}: {problem}; get the file elsewhere and put it at {self.file}, "
                "or its folder's name into DATA_MIRROR"
            ) from None
        except urllib.error.URLError as error:
            reason = error.reason
            if isinstance(reason, ssl.SSLCertVerificationError):
                raise UserError(f"{self.url}: the server's certificate is not valid: {reason.verify_message}") from None
            raise Dropped(f"no connection: {getattr(reason, 'strerror', None) or reason}") from None
        except (http.client.HTTPException, ConnectionError, TimeoutError, ssl.SSLError) as error:
            raise Dropped(f"the connection broke off ({error or type(error).__name__})") from None

    def continues(self, answer: http.client.HTTPResponse, size: int, known: dict) -> bool:
        """Whether a 206 is the rest of FILE.partial: its version, with Content-Range ``bytes SIZE-LAST/LENGTH``."""
        # Some servers send parts without a look at If-Range.
        if version_of(answer) not in (None, known.get("version")):
            return False
        unit, _, extent = answer.headers.get("Content-Range", "").partition(" ")
        extent, _, length = extent.partition("/")
        first = extent.partition("-")[0]
        return (unit, first) == ("bytes", str(size)) and length in ("*", str(known.get("length")))

    def begin(self, answer: http.client.HTTPResponse) -> dict:
        """An empty FILE.partial and the notes for what is to come."""
        length = answer.headers.get("Content-Length", "")
        known = {"url": self.url, "version": version_of(answer), "length": int(length) if length.isdigit() else None}
        self.discard()
        self.partial.touch()
        self.notes.write_text(json.dumps(known), encoding="utf-8")
        room = shutil.disk_usage(self.partial.parent).free
        if known["length"] and known["length"] > room:
            self.discard()
            raise UserError(
                f"{self.file.parent} has {megabytes(room)} free, but {self.file.name} needs "
                f"{megabytes(known['length'])}; make room and run it again"
            )
        return known

    def receive(self, answer: http.client.HTTPResponse, size: int, length: int | None) -> None:
        """Append the body of the answer to FILE.partial."""
        progress = Progress(self.file.name, size, length)
        try:
            with self.partial.open("ab") as partial:
                while chunk := answer.read(CHUNK):
                    if size == 0:
                        self.check_type(chunk[:HEAD])
                    self.write(partial, chunk)
                    size += len(chunk)
                    progress.update(size)
        finally:
            progress.close()
        if length is not None and size < length:
            raise Dropped(f"the connection broke off after {megabytes(size)} of {megabytes(length)}")
        if size == 0:
            self.check_type(b"")
        if length is not None and size > length:
            self.discard()
            raise UserError(f"{self.url}: the server sent {size} bytes after it had announced {length}")

    def check_type(self, head: bytes) -> None:
        problem = wrong_type(head, self.file.name) or ("an empty file" if not head else None)
        if problem:
            self.discard()
            raise UserError(
                f"{self.url}: what the server sent is {problem}; open the address in a browser to see why, "
                f"or put the right file at {self.file}"
            )

    def write(self, partial, chunk: bytes) -> None:
        try:
            partial.write(chunk)
            partial.flush()
        except OSError as error:
            raise write_failed(self.partial, error) from None


def write_failed(path: Path, error: OSError) -> UserError:
    hint = "make room and run it again" if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG) else "see to it"
    return UserError(f"cannot write {path}: {error.strerror}; {hint}")


def download(url: str, file: Path, retries: int, pause: float, timeout: float) -> Path:
    """Fetch the URL with new attempts after failures that may pass; the attempts are counted anew when bytes came."""
    job = Download(url, file, timeout)
    failures = 0
    while True:
        before = job.size()
        try:
            job.run()
            return job.partial
        except Dropped as problem:
            failures = 1 if job.size() > before else failures + 1
            if failures > retries:
                kept = f"; {megabytes(job.size())} are kept for the next run" if job.size() else ""
                raise UserError(
                    f"{url}: {problem}{f', {failures} times in a row' if failures > 1 else ''}{kept}; "
                    f"check the network, or put the file at {file} or its folder's name into DATA_MIRROR"
                ) from None
            wait = min(pause * 2 ** (failures - 1), 60)
            say(f"{file.name}: {problem}; trying again in {wait:g} s")
            time.sleep(wait)


def copy(source: Path, file: Path, origin: str) -> Path:
    """FILE.partial as a copy of a file of this machine."""
    partial = file.with_name(file.name + ".partial")
    if not source.is_file():
        raise UserError(f"there is no {source} ({origin}); put the file there")
    try:
        with source.open("rb") as there:
            head = there.read(HEAD)
    except OSError as error:
        raise UserError(f"cannot read {source}: {error.strerror}") from None
    if problem := wrong_type(head, file.name) or ("an empty file" if not head else None):
        raise UserError(f"{source} is {problem}; put the right file there")
    try:
        shutil.copyfile(source, partial)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise write_failed(partial, error) from None
    return partial


def kept_checksum(file: Path) -> str | None:
    """The checksum in FILE.sha256, if that is there."""
    record = file.with_name(file.name + ".sha256")
    if not record.exists():
        return None
    words = record.read_text("utf-8").split()
    if not words or len(words[0]) != 64:
        raise UserError(f"{record} does not hold a sha256; remove it")
    return words[0].lower()


def keep_checksum(file: Path, digest: str) -> None:
    record = file.with_name(file.name + ".sha256")
    beside = record.with_name(record.name + ".partial")
    beside.write_text(f"{digest}  {file.name}\n", encoding="utf-8")
    beside.replace(record)
    say(f"{file.name}: sha256 {digest} (not known before; kept in {record})")


def source_of(url: str) -> tuple[str | Path, str]:
    """Where the file comes from: a path on this machine or a URL; and how to call that in a message."""
    mirror = os.environ.get("DATA_MIRROR", "")
    parts = urllib.parse.urlsplit(url)
    name = urllib.parse.unquote(parts.path).rsplit("/", 1)[-1]
    if mirror and not name:
        raise UserError(f"{url} does not end in the name of a file, so DATA_MIRROR cannot replace it")
    if mirror and "://" not in mirror:
        return Path(mirror) / name, f"DATA_MIRROR, for {url}"
    if mirror:
        url = f"{mirror.rstrip('/')}/{urllib.parse.quote(name)}"
        parts = urllib.parse.urlsplit(url)
    if parts.scheme == "file":
        return Path(urllib.request.url2pathname(parts.path)), url
    if parts.scheme not in ("http", "https") or not parts.netloc:
        raise UserError(f"'{url}' is no address that can be downloaded (http://, https:// or file://)")
    return url, url


@contextlib.contextmanager
def alone(file: Path) -> Iterator[None]:
    """Nobody else downloads to the same FILE meanwhile."""
    lock = file.with_name(file.name + ".lock")
    with lock.open("w") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # The other one removes it at its end, and a third may have made another one by then.
            if not lock.exists() or not os.path.samestat(lock.stat(), os.fstat(handle.fileno())):
                raise BlockingIOError
        except BlockingIOError:
            raise UserError(f"another process is downloading {file}; wait for it to end") from None
        except OSError:
            # A file system without locks; two downloads at once are then the user's to avoid.
            pass
        try:
            yield
        finally:
            lock.unlink(missing_ok=True)


def fetch(url: str, file: Path, known: tuple[str, str] | None, retries: int, pause: float, timeout: float) -> None:
    """FILE with the content of the URL and the right checksum, (algorithm, digits); nothing to do if that is there."""
    recorded = None if known else kept_checksum(file)
    algorithm, expected = known or ("sha256", recorded)
    if file.exists():
        digest = checksum(file, algorithm)
        if expected is None:
            keep_checksum(file, digest)
        elif digest != expected:
            raise UserError(
                f"{file} has the {algorithm} {digest}, not {expected}; remove it, and it will be fetched again"
            )
        return
    source, origin = source_of(url)
    say(f"{file.name}: from {source}")
    if isinstance(source, Path):
        partial = copy(source, file, origin)
    else:
        partial = download(source, file, retries, pause, timeout)
    digest = checksum(partial, algorithm)
    if expected is not None and digest != expected:
        partial.unlink()
        file.with_name(file.name + ".partial.json").unlink(missing_ok=True)
        advice = (
            f"if the new version is wanted, remove {file}.sha256"
            if recorded
            else "the file there was changed or damaged on its way; try again or get it elsewhere"
        )
        raise UserError(f"{source}: its {algorithm} is {digest}, not {expected}; {advice}")
    if expected is None:
        keep_checksum(file, digest)
    partial.replace(file)
    file.with_name(file.name + ".partial.json").unlink(missing_ok=True)


def known_checksum(algorithm: str, text: str) -> tuple[str, str]:
    digits = hashlib.new(algorithm).digest_size * 2
    if len(text) != digits or set(text.lower()) - set("0123456789abcdef"):
        raise argparse.ArgumentTypeError(f"'{text}' is not of {digits} hexadecimal digits")
    return algorithm, text.lower()


@command("fetch", OSError)
def main(argv: list[str] | None = None) -> None:
    description, _, rest = __doc__.partition("\n\n")
    parser = ArgumentParser(
        prog="fetch.py",
        description=description.split(":")[0] + ".",
        epilog=rest,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("url", metavar="URL", help="http://, https:// or file://")
    parser.add_argument("file", metavar="FILE", type=Path, help="where to put it; folders on the way are made")
    checksums = parser.add_mutually_exclusive_group()
    for algorithm in ("sha256", "md5"):
        convert = functools.partial(known_checksum, algorithm)
        checksums.add_argument(f"--{algorithm}", dest="known", type=convert, metavar="HEX", help="what it must be")
    parser.add_argument("--retries", type=int, default=4, help="new attempts in a row without a byte (default: 4)")
    parser.add_argument("--pause", type=float, default=1, help="seconds before the first, doubled each time (1)")
    parser.add_argument("--timeout", type=float, default=60, help="seconds of silence that end an attempt (60)")
    arguments = parser.parse_args(argv)
    file = arguments.file
    if file.is_dir():
        raise UserError(f"{file} is a folder; name the file to be made")
    file.parent.mkdir(parents=True, exist_ok=True)
    with alone(file):
        fetch(arguments.url, file, arguments.known, arguments.retries, arguments.pause, arguments.timeout)


if __name__ == "__main__":
    sys.exit(main())
