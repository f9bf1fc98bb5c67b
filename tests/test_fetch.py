"""Downloads: scripts/lib/fetch.py against a server on this machine that misbehaves in all the usual ways."""

import fcntl
import hashlib
import http.server
import json
import random
import signal
import subprocess
import threading
import time
from pathlib import Path

import pytest

from .scripts_helpers import SCRIPTS, assert_refused, environment, run

# Not a multiple of any block size, and without any inner repetition.
CONTENT = b"\x1f\x8b" + random.Random(1).randbytes(300_001)
OTHER = b"\x1f\x8b" + random.Random(2).randbytes(300_001)


class Handler(http.server.BaseHTTPRequestHandler):
    """Serves ``server.content`` in the manner of ``server.manner`` and notes what was asked."""

    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def do_GET(self):
        server = self.server
        wanted = self.headers.get("Range")
        server.requests.append((self.path, wanted, self.headers.get("If-Range")))
        self.close_connection = True
        if server.statuses:
            self.send_response(server.statuses.pop(0))
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        body, first = server.content, 0
        same = self.headers.get("If-Range") in (None, server.etag, server.modified) or not server.if_range
        if wanted and server.ranges and same:
            first = int(wanted.removeprefix("bytes=").removesuffix("-"))
            self.send_response(206)
            self.send_header("Content-Range", f"bytes {first + server.shift}-{len(body) - 1}/{len(body)}")
        else:
            self.send_response(200)
        if server.etag:
            self.send_header("ETag", server.etag)
        if server.modified:
            self.send_header("Last-Modified", server.modified)
        part = body[first:]
        if server.chunked:
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            self.wfile.write(b"%x\r\n%b\r\n" % (len(part), part))
            if not server.drops:
                self.wfile.write(b"0\r\n\r\n")
            return
        self.send_header("Content-Length", str(len(part)))
        self.end_headers()
        self.wfile.write(part[: server.drops.pop(0)] if server.drops else part)


@pytest.fixture
def server():
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.content, server.etag, server.modified = CONTENT, '"1"', None
    server.ranges, server.if_range, server.chunked, server.shift = True, True, False, 0
    server.drops, server.statuses, server.requests = [], [], []
    server.url = f"http://127.0.0.1:{server.server_address[1]}/data/x.tgz"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()


def fetch(url: str, file: Path, *options, **changes):
    no_proxy = {"http_proxy": "", "https_proxy": "", "no_proxy": "*", "DATA_MIRROR": "", **changes}
    command = ("python", SCRIPTS / "lib/fetch.py", url, file, "--pause", "0.05", *options)
    return run(*command, check=False, **no_proxy)


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def listing(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


@pytest.fixture
def file(tmp_path) -> Path:
    """In a folder that is not there yet, with a name that shells and URLs stumble over."""
    return tmp_path / "a folder, 100%" / "x.tgz"


def assert_fetched(result, file, content=CONTENT):
    assert result.returncode == 0, result.stderr
    assert file.read_bytes() == content
    assert listing(file.parent) <= {"x.tgz", "x.tgz.sha256"}


def test_whole_download_and_its_checksum(server, file):
    result = fetch(server.url, file)
    assert_fetched(result, file)
    assert sha256(CONTENT) in result.stderr
    assert run("sha256sum", "--check", "x.tgz.sha256", cwd=file.parent).stdout == "x.tgz: OK\n"
    assert fetch(server.url, file).returncode == 0
    assert len(server.requests) == 1, "a file that is there is not asked for"
    with file.open("ab") as damaged:
        damaged.write(b"x")
    assert_refused(fetch(server.url, file), str(file), sha256(CONTENT), "remove it")


def test_known_checksum(server, file):
    assert_fetched(fetch(server.url, file, "--sha256", sha256(CONTENT).upper()), file)
    assert listing(file.parent) == {"x.tgz"}
    file.unlink()
    result = fetch(server.url, file, "--sha256", sha256(OTHER))
    assert_refused(result, server.url, sha256(CONTENT), sha256(OTHER))
    assert listing(file.parent) == set(), "a wrong file is not kept"
    assert_refused(fetch(server.url, file, "--md5", hashlib.md5(OTHER).hexdigest()), server.url, "md5")
    assert_fetched(fetch(server.url, file, "--md5", hashlib.md5(CONTENT).hexdigest()), file)


def test_another_file_at_the_same_address_is_noticed(server, file):
    assert_fetched(fetch(server.url, file), file)
    file.unlink()
    server.content = OTHER
    assert_refused(fetch(server.url, file), server.url, sha256(OTHER), sha256(CONTENT), "x.tgz.sha256")
    assert listing(file.parent) == {"x.tgz.sha256"}
    (file.parent / "x.tgz.sha256").unlink()
    assert_fetched(fetch(server.url, file), file, OTHER)


@pytest.mark.parametrize("validator", ["ETag", "Last-Modified"])
def test_a_dropped_connection_is_taken_up_where_it_broke(server, file, validator):
    if validator == "Last-Modified":
        server.etag, server.modified = None, "Wed, 21 Oct 2015 07:28:00 GMT"
    server.drops = [100_000, 50_000]
    assert_fetched(fetch(server.url, file), file)
    ranges = [wanted for _, wanted, _ in server.requests]
    assert ranges == [None, "bytes=100000-", "bytes=150000-"]
    assert {version for _, _, version in server.requests} == {None, server.etag or server.modified}


def test_a_later_run_takes_up_a_dropped_download(server, file):
    server.drops = [100_000]
    result = fetch(server.url, file, "--retries", "0")
    assert_refused(result, server.url, "0.1 MB of 0.3 MB", "kept")
    assert listing(file.parent) == {"x.tgz.partial", "x.tgz.partial.json"}
    assert_fetched(fetch(server.url, file), file)
    assert server.requests[1][1] == "bytes=100000-"


def test_a_download_that_was_complete_but_not_renamed(server, file):
    file.parent.mkdir()
    notes = {"url": server.url, "version": '"1"', "length": len(CONTENT)}
    (file.parent / "x.tgz.partial").write_bytes(CONTENT)
    (file.parent / "x.tgz.partial.json").write_text(json.dumps(notes))
    assert_fetched(fetch(server.url, file), file)
    assert server.requests == []


PARTS = ["changed", "ignores If-Range", "no ranges", "no validator", "weak ETag", "other address", "wrong part"]


@pytest.mark.parametrize("case", PARTS)
def test_a_part_of_another_version_is_never_continued(server, file, case):
    """Half of one file and half of another would have the right length."""
    server.drops = [100_000]
    if case in ("no validator", "weak ETag"):
        server.etag = {"no validator": None, "weak ETag": 'W/"1"'}[case]
    url = server.url
    assert fetch(url, file, "--retries", "0").returncode == 2
    server.content = OTHER
    if case == "changed":
        server.etag = '"2"'
    elif case == "ignores If-Range":
        server.etag, server.if_range = '"2"', False
    elif case == "no ranges":
        server.ranges, server.etag = False, '"2"'
    elif case == "other address":
        url = url.replace("x.tgz", "y.tgz")
    elif case == "wrong part":
        server.shift = -1
    assert_fetched(fetch(url, file), file, OTHER)


def test_a_partial_file_without_notes_is_not_trusted(server, file):
    file.parent.mkdir()
    (file.parent / "x.tgz.partial").write_bytes(OTHER[:1000])
    assert_fetched(fetch(server.url, file), file)
    assert server.requests[0][1] is None


def test_more_here_than_there(server, file):
    """The server's 416 (nothing at that range) begins again."""
    file.parent.mkdir()
    notes = {"url": server.url, "version": '"1"', "length": 10**6}
    (file.parent / "x.tgz.partial").write_bytes(OTHER + OTHER)
    (file.parent / "x.tgz.partial.json").write_text(json.dumps(notes))
    server.statuses = [416]
    assert_fetched(fetch(server.url, file), file)


def test_a_stream_of_unknown_length(server, file):
    server.chunked = True
    server.drops = [1]
    assert_refused(fetch(server.url, file, "--retries", "1"), server.url, "broke off")
    assert not file.exists()
    server.drops = []
    assert_fetched(fetch(server.url, file), file)


def test_answers_that_pass(server, file):
    server.statuses = [503, 429]
    assert_fetched(fetch(server.url, file), file)
    server.statuses = [503] * 9
    file.unlink()
    assert_refused(fetch(server.url, file, "--retries", "2"), server.url, "503", "3 times")


@pytest.mark.parametrize("status", [404, 403])
def test_answers_that_do_not_pass(server, file, status):
    server.statuses = [status]
    assert_refused(fetch(server.url, file), server.url, str(status), str(file), "DATA_MIRROR")
    assert len(server.requests) == 1
    assert listing(file.parent) == set()


@pytest.mark.parametrize(
    ("content", "name", "needle"),
    [
        (b"\n <!DOCTYPE html>\n<html><body>Log in to the hotel's network</body></html>", "x.tgz", "HTML"),
        (b"\xef\xbb\xbf<HTML>\nmoved", "train.en", "HTML"),
        (b"This file has moved.", "x.tgz", "not a gzip archive"),
        (b"This file has moved.", "x.zip", "not a zip archive"),
        (b"", "train.en", "empty"),
    ],
    ids=["page", "page for a text", "text for tgz", "text for zip", "empty"],
)
def test_something_else_with_the_status_of_success(server, file, content, name, needle):
    server.content = content
    file = file.with_name(name)
    assert_refused(fetch(server.url, file), server.url, needle, str(file))
    assert listing(file.parent) == set()


def test_no_network(tmp_path):
    result = fetch("http://127.0.0.1:9/x.tgz", tmp_path / "x.tgz", "--retries", "1")
    assert_refused(result, "http://127.0.0.1:9/x.tgz", "no connection", "network", "DATA_MIRROR")
    result = fetch("http://no-such-host.invalid/x.tgz", tmp_path / "x.tgz", "--retries", "0")
    assert_refused(result, "no-such-host.invalid", "no connection")
    assert listing(tmp_path) == set()


def test_a_full_disk(server, file):
    """A limit on the size of a file stands for the end of the disk."""
    command = f"ulimit -f 100; exec python '{SCRIPTS}/lib/fetch.py' '{server.url}' '{file}'"
    result = run("bash", "-c", command, check=False, no_proxy="*")
    assert_refused(result, "x.tgz.partial", "make room")
    assert not file.exists()
    assert_fetched(fetch(server.url, file), file)


def test_mirror(server, file, tmp_path):
    mirror = tmp_path / "the mirror"
    mirror.mkdir()
    assert_refused(fetch(server.url, file, DATA_MIRROR=str(mirror)), f"{mirror}/x.tgz", server.url)
    (mirror / "x.tgz").write_bytes(b"<html>")
    assert_refused(fetch(server.url, file, DATA_MIRROR=str(mirror)), f"{mirror}/x.tgz", "HTML")
    (mirror / "x.tgz").write_bytes(OTHER)
    result = fetch(server.url, file, "--sha256", sha256(CONTENT), DATA_MIRROR=str(mirror))
    assert_refused(result, f"{mirror}/x.tgz", sha256(CONTENT))
    assert listing(file.parent) == set()
    assert_fetched(fetch(server.url, file, DATA_MIRROR=str(mirror)), file, OTHER)
    assert server.requests == []
    file.unlink()
    (file.parent / "x.tgz.sha256").unlink()
    assert_fetched(fetch(server.url, file, DATA_MIRROR=mirror.as_uri()), file, OTHER)
    file.unlink()
    (file.parent / "x.tgz.sha256").unlink()
    at = server.url.replace("data/x.tgz", "elsewhere/")
    assert_fetched(fetch("https://example.org/x.tgz?download=1", file, DATA_MIRROR=at), file)
    assert [path for path, _, _ in server.requests] == ["/elsewhere/x.tgz"]


def test_proxy(server, file):
    proxy = server.url.removesuffix("/data/x.tgz")
    assert_fetched(fetch("http://far-away.invalid/x.tgz", file, http_proxy=proxy, no_proxy=""), file)
    assert server.requests[0][0] == "http://far-away.invalid/x.tgz", "a proxy is asked for the whole address"


def test_two_at_once(server, file):
    file.parent.mkdir()
    with (file.parent / "x.tgz.lock").open("w") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        assert_refused(fetch(server.url, file), str(file), "another process")
    assert_fetched(fetch(server.url, file), file)


@pytest.mark.parametrize(
    ("arguments", "needle"),
    [
        (("no-address", "x"), "no-address"),
        (("ftp://example.org/x", "x"), "ftp://example.org/x"),
        (("http://example.org/x", "."), "folder"),
        (("http://example.org/x", "x", "--sha256", "abc"), "abc"),
        (("http://example.org/x",), "FILE"),
        (("http://example.org/x", "/dev/null/x"), "/dev/null"),
    ],
)
def test_mistakes(arguments, needle, tmp_path):
    result = run("python", SCRIPTS / "lib/fetch.py", *arguments, cwd=tmp_path, check=False)
    assert_refused(result, needle)
    assert listing(tmp_path) == set()


def test_ctrl_c_keeps_what_came(server, file):
    """An interrupted download ends with the code of an interruption, and the next run goes on."""
    server.content = CONTENT[:2] + random.Random(3).randbytes(3_000_000)
    release = threading.Event()
    original = Handler.do_GET

    def slow(handler):
        write = handler.wfile.write

        def stall(part):
            if len(part) < 1_000_000:
                return write(part)
            write(part[:2_000_000])
            handler.wfile.flush()
            release.wait(30)

        handler.wfile.write = stall
        original(handler)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Handler, "do_GET", slow)
        command = ["python", str(SCRIPTS / "lib/fetch.py"), server.url, str(file)]
        process = subprocess.Popen(command, env=environment(no_proxy="*"), stderr=subprocess.PIPE, text=True)
        partial = file.with_name("x.tgz.partial")
        deadline = time.monotonic() + 20
        while not (partial.exists() and partial.stat().st_size) and time.monotonic() < deadline:
            time.sleep(0.02)
        process.send_signal(signal.SIGINT)
        _, stderr = process.communicate(timeout=20)
        release.set()
    assert process.returncode == 130 and stderr.endswith("fetch: interrupted\n"), stderr
    assert_fetched(fetch(server.url, file), file, server.content)
    assert server.requests[-1][1] == f"bytes={1 << 20}-"


def test_starts_at_once():
    """Without torch: the scripts call it for every file."""
    code = "import sys; sys.argv = ['fetch', '--help']; import fetch; print(*sys.modules)"
    modules = run("python", "-c", code, PYTHONPATH=str(SCRIPTS / "lib")).stdout.split()
    assert "conventions" in modules and "torch" not in modules and "numpy" not in modules
