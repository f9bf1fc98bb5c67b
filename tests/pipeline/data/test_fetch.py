"""Downloads by curl from a server on this machine that misbehaves in all the usual ways."""

import gzip
import hashlib
import http.server
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from pn_fairseq.common.command import UserError
from pn_fairseq.pipeline.data.archives import fetch
from tests.scripts_helpers import environment, run

# Archives without any inner repetition, whose lengths are no multiple of a block size.
CONTENT = gzip.compress(random.Random(1).randbytes(300_001))
OTHER = gzip.compress(random.Random(2).randbytes(300_001))


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
            if first >= len(body):
                server.statuses.insert(0, 416)
                server.requests.pop()
                return self.do_GET()
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


def command(url: str, file: Path) -> list[str]:
    """Fetch in a process of its own, which ends as a command does."""
    code = "import sys; from pathlib import Path; from pn_fairseq.common.command import handle_signals, run; "
    code += "from pn_fairseq.pipeline.data.archives import fetch; handle_signals(); "
    code += "sys.exit(run('fetch', lambda: fetch(sys.argv[1], Path(sys.argv[2]))))"
    return [sys.executable, "-c", code, url, str(file)]


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def listing(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()} if folder.exists() else set()


@pytest.fixture(autouse=True)
def _direct(monkeypatch):
    """No proxy and no mirror, whatever the environment of the tests."""
    for name in ("http_proxy", "https_proxy", "all_proxy", "ALL_PROXY", "DATA_MIRROR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("no_proxy", "*")


@pytest.fixture
def file(tmp_path) -> Path:
    """In a folder that does not exist yet, with a name that shells and URLs stumble over."""
    return tmp_path / "a folder, 100%" / "x.tgz"


def refused(*needles: str, url: str, file: Path, **options) -> None:
    with pytest.raises(UserError) as error:
        fetch(url, file, **{"pause": 0.01, **options})
    for needle in needles:
        assert needle in str(error.value), (needle, str(error.value))


def fetched(url: str, file: Path, content: bytes = CONTENT, **options) -> None:
    fetch(url, file, pause=0.01, **options)
    assert file.read_bytes() == content
    assert listing(file.parent) <= {"x.tgz", "x.tgz.sha256"}


def test_whole_download_and_its_checksum(server, file, capfd):
    fetched(server.url, file)
    assert sha256(CONTENT) in capfd.readouterr().err
    assert run("sha256sum", "--check", "x.tgz.sha256", cwd=file.parent).stdout == "x.tgz: OK\n"
    fetched(server.url, file)
    assert len(server.requests) == 1, "a file that exists is not asked for"


def test_a_damaged_download_is_fetched_again(server, file, capfd):
    fetched(server.url, file)
    file.write_bytes(CONTENT[:1000])
    fetched(server.url, file)
    assert "getting it again" in capfd.readouterr().err and len(server.requests) == 2


def test_a_part_of_another_version_is_fetched_whole(server, file):
    """Half of one version and half of another have the right length, but not the checksum."""
    file.parent.mkdir()
    (file.parent / "x.tgz.partial").write_bytes(OTHER[:1000])
    fetched(server.url, file, sha256=sha256(CONTENT))
    assert len(server.requests) == 2


def test_known_checksum(server, file):
    fetched(server.url, file, sha256=sha256(CONTENT).upper())
    assert listing(file.parent) == {"x.tgz"}
    refused(server.url, sha256(CONTENT), sha256(OTHER), url=server.url, file=file, sha256=sha256(OTHER))
    assert listing(file.parent) == set(), "a wrong file is not kept"
    refused(server.url, "md5", url=server.url, file=file, md5=hashlib.md5(OTHER).hexdigest())
    fetched(server.url, file, md5=hashlib.md5(CONTENT).hexdigest())
    refused("abc", "64", url=server.url, file=file, sha256="abc")


def test_another_file_at_the_same_address_is_noticed(server, file):
    fetched(server.url, file)
    file.unlink()
    server.content = OTHER
    refused(server.url, sha256(OTHER), sha256(CONTENT), "x.tgz.sha256", url=server.url, file=file)
    assert listing(file.parent) == {"x.tgz.sha256"}
    (file.parent / "x.tgz.sha256").unlink()
    fetched(server.url, file, OTHER)


def test_a_dropped_connection_resumes_where_it_broke(server, file):
    server.drops = [100_000, 50_000]
    fetched(server.url, file)
    assert [wanted for _, wanted, _ in server.requests] == [None, "bytes=100000-", "bytes=150000-"]


def test_a_later_run_resumes_a_dropped_download(server, file):
    server.drops = [100_000]
    refused(server.url, "100000 bytes are kept", url=server.url, file=file, retries=0)
    assert listing(file.parent) == {"x.tgz.partial"}
    fetched(server.url, file)
    assert server.requests[1][1] == "bytes=100000-"


@pytest.mark.parametrize("case", ["no ranges", "complete", "more than there is"])
def test_a_part_that_does_not_fit_is_fetched_whole(server, file, case):
    file.parent.mkdir()
    left = {"no ranges": CONTENT[:1000], "complete": CONTENT}.get(case, OTHER + OTHER)
    (file.parent / "x.tgz.partial").write_bytes(left)
    server.ranges = case != "no ranges"
    fetched(server.url, file)


def test_a_stream_of_unknown_length(server, file):
    server.chunked = True
    server.drops = [1]
    refused(server.url, url=server.url, file=file, retries=0)
    assert not file.exists()
    server.drops = []
    fetched(server.url, file)


def test_answers_that_may_be_different_a_moment_later(server, file):
    server.statuses = [503, 429]
    fetched(server.url, file)
    server.statuses = [503] * 9
    file.unlink()
    refused(server.url, "503", url=server.url, file=file, retries=2)
    assert len(server.statuses) == 6


@pytest.mark.parametrize("status", [404, 403])
def test_answers_that_stay(server, file, status):
    server.statuses = [status]
    refused(server.url, str(status), "DATA_MIRROR", url=server.url, file=file)
    assert len(server.requests) == 1 and listing(file.parent) == set()


def test_an_empty_file_with_the_status_of_success(server, file):
    server.content = b""
    refused(server.url, "empty", str(file), url=server.url, file=file)
    assert listing(file.parent) == set()


def test_no_network(tmp_path):
    url = "http://127.0.0.1:9/x.tgz"
    refused(url, "curl: (7)", "network", "DATA_MIRROR", url=url, file=tmp_path / "x.tgz", retries=1)
    refused("curl: (1)", url="ftp://example.org/x.tgz", file=tmp_path / "x.tgz", retries=1)
    assert listing(tmp_path) == set()


def test_without_curl(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    refused("'curl' is not installed", url="http://127.0.0.1:9/x.tgz", file=tmp_path / "x.tgz")


def test_a_full_disk(server, file):
    """A limit on the size of a file stands for the end of the disk."""
    limited = ["bash", "-c", 'ulimit -f 100; exec "$@"', "bash", *command(server.url, file)]
    result = run(*limited, check=False, no_proxy="*")
    assert result.returncode == 2 and "x.tgz.partial" in result.stderr and "make room" in result.stderr
    assert not file.exists()
    fetched(server.url, file)


def test_mirror(server, file, tmp_path, monkeypatch):
    mirror = tmp_path / "the mirror"
    mirror.mkdir()
    monkeypatch.setenv("DATA_MIRROR", str(mirror))
    refused(f"{mirror}/x.tgz", url=server.url, file=file)
    (mirror / "x.tgz").write_bytes(OTHER)
    refused(sha256(CONTENT), url=server.url, file=file, sha256=sha256(CONTENT))
    assert listing(file.parent) == set()
    fetched(server.url, file, OTHER, md5="of the published file")
    assert server.requests == []
    for address in (mirror.as_uri(), server.url.replace("data/x.tgz", "elsewhere/")):
        for path in file.parent.iterdir():
            path.unlink()
        monkeypatch.setenv("DATA_MIRROR", address)
        fetched("https://example.org/x.tgz?download=1", file, OTHER if address.startswith("file") else CONTENT)
    assert [path for path, _, _ in server.requests] == ["/elsewhere/x.tgz"]


def test_proxy(server, file, monkeypatch):
    monkeypatch.setenv("http_proxy", server.url.removesuffix("/data/x.tgz"))
    monkeypatch.setenv("no_proxy", "")
    fetched("http://far-away.invalid/x.tgz", file)
    assert server.requests[0][0] == "http://far-away.invalid/x.tgz", "a proxy is asked for the whole address"


def test_ctrl_c_keeps_what_came(server, file):
    """The exit code is that of an interruption, and the next run resumes."""
    server.content = CONTENT + bytes(3_000_000)
    release = threading.Event()
    original = Handler.do_GET

    def slow(handler):
        write = handler.wfile.write

        def stall(part):
            write(part[:1_000_000])
            handler.wfile.flush()
            if len(part) > 1_000_000:
                release.wait(60)

        handler.wfile.write = stall
        original(handler)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Handler, "do_GET", slow)
        process = subprocess.Popen(
            command(server.url, file), env=environment(no_proxy="*"), stderr=subprocess.PIPE, text=True
        )
        partial = file.with_name("x.tgz.partial")
        deadline = time.monotonic() + 60
        while not (partial.exists() and partial.stat().st_size) and time.monotonic() < deadline:
            time.sleep(0.02)
        process.send_signal(signal.SIGINT)
        _, stderr = process.communicate(timeout=60)
        release.set()
    assert process.returncode == 130 and stderr.splitlines()[-1].endswith("run the same command again to resume")
    assert "Traceback" not in stderr and 0 < partial.stat().st_size <= 1_000_000
