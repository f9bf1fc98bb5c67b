"""Downloads from a server on this machine that misbehaves in all the usual ways."""

import gzip
import hashlib
import http.server
import random
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from pn_fairseq.common.command import UserError
from pn_fairseq.pipeline.data.archives import fetch
from tests.scripts_helpers import environment, wait_for

# Archives without any inner repetition, whose lengths are no multiple of a block size.
CONTENT = gzip.compress(random.Random(1).randbytes(300_001))
OTHER = gzip.compress(random.Random(2).randbytes(300_001))


class Handler(http.server.BaseHTTPRequestHandler):
    """Serves ``server.content`` in the manner of ``server.manner`` and notes what was asked."""

    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def do_GET(self):
        server, wanted = self.server, self.headers.get("Range")
        server.requests.append((self.path, wanted))
        self.close_connection = True
        first = (
            int(wanted.removeprefix("bytes=").removesuffix("-")) if wanted and server.ranges else 0
        )
        if server.statuses or first >= len(server.content) > 0:
            self.send_response(server.statuses.pop(0) if server.statuses else 416)
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        part = server.content[first:]
        self.send_response(206 if first else 200)
        self.send_header("Content-Length", str(len(part)))
        self.end_headers()
        self.wfile.write(part[: server.drops.pop(0)] if server.drops else part)
        self.wfile.flush()
        server.release.wait(60)


@pytest.fixture
def server():
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.content, server.ranges = CONTENT, True
    server.drops, server.statuses, server.requests, server.release = [], [], [], threading.Event()
    server.release.set()  # else an answer does not end
    server.url = f"http://127.0.0.1:{server.server_address[1]}/data/x.tgz"
    thread = threading.Thread(
        target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True
    )
    thread.start()
    yield server
    server.shutdown()
    server.server_close()


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def listing(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()} if folder.exists() else set()


@pytest.fixture(autouse=True)
def _direct(monkeypatch):
    """No proxy and no mirror, in any environment of the tests."""
    monkeypatch.setattr("urllib.request._opener", None)  # it has read these variables
    for name in ("http_proxy", "https_proxy", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("no_proxy", "*")


@pytest.fixture
def file(tmp_path) -> Path:
    """In a folder that does not exist yet, with a name that shells and URLs stumble over."""
    return tmp_path / "a folder, 100%" / "x.tgz"


def refused(
    *needles: str, url: str, file: Path, known: str = "", mirror: str | None = None
) -> None:
    with pytest.raises(UserError) as error:
        fetch(url, file, known, mirror)
    for needle in needles:
        assert needle in str(error.value), (needle, str(error.value))


def fetched(
    url: str, file: Path, content: bytes = CONTENT, known: str = "", mirror: str | None = None
) -> None:
    fetch(url, file, known, mirror)
    assert file.read_bytes() == content
    assert listing(file.parent) == {"x.tgz"}


def test_a_file_that_exists_is_not_asked_for(server, file):
    for _ in range(2):
        fetched(server.url, file)
    assert server.requests == [("/data/x.tgz", None)]


def test_known_checksum(server, file):
    """A wrong file is not kept: one that was there, or half of one version and half of another."""
    fetched(server.url, file, known=sha256(CONTENT).upper())
    refused(
        str(file),
        server.url,
        sha256(CONTENT),
        sha256(OTHER),
        url=server.url,
        file=file,
        known=sha256(OTHER),
    )
    assert listing(file.parent) == set() and len(server.requests) == 1
    file.parent.mkdir()
    (file.parent / "x.tgz.partial").write_bytes(OTHER[:1000])
    refused(
        "md5", "it was removed", url=server.url, file=file, known=hashlib.md5(CONTENT).hexdigest()
    )
    fetched(server.url, file, known=hashlib.md5(CONTENT).hexdigest())
    assert [wanted for _, wanted in server.requests] == [None, "bytes=1000-", None]


def test_a_dropped_connection_resumes_where_it_broke(server, file):
    """As long as something comes."""
    server.drops = [100_000, 50_000, 1]
    fetched(server.url, file)
    assert [wanted for _, wanted in server.requests] == [
        None,
        "bytes=100000-",
        "bytes=150000-",
        "bytes=150001-",
    ]


def test_a_later_run_resumes_a_dropped_download(server, file):
    server.drops = [100_000, 0]
    refused(server.url, "100000 bytes are kept", url=server.url, file=file)
    assert listing(file.parent) == {"x.tgz.partial"}
    fetched(server.url, file)
    assert server.requests[2][1] == "bytes=100000-"


@pytest.mark.parametrize("case", ["no ranges", "complete", "more than there is"])
def test_a_part_that_does_not_fit_is_fetched_whole(server, file, case):
    file.parent.mkdir()
    left = {"no ranges": CONTENT[:1000], "complete": CONTENT}.get(case, OTHER + OTHER)
    (file.parent / "x.tgz.partial").write_bytes(left)
    server.ranges = case != "no ranges"
    fetched(server.url, file)


@pytest.mark.parametrize("status", [404, 403, 416, 503])
def test_answers_without_the_file(server, file, status):
    server.statuses = [status]
    refused(server.url, str(status), "--mirror", url=server.url, file=file)
    assert len(server.requests) == 1 and listing(file.parent) == set()


def test_no_network(file):
    url = "http://127.0.0.1:9/x.tgz"
    refused(url, "refused", "network", "--mirror", url=url, file=file)
    assert not file.parent.exists()  # it was made for the download


def test_mirror(server, file, tmp_path):
    mirror = tmp_path / "the mirror"
    mirror.mkdir()
    of_mirror = {"url": server.url, "file": file, "mirror": str(mirror)}
    refused(f"{mirror}/x.tgz", **of_mirror)
    (mirror / "x.tgz").write_bytes(OTHER)
    refused(sha256(CONTENT), known=sha256(CONTENT), **of_mirror)
    assert listing(file.parent) == set()
    for address in (str(mirror), mirror.as_uri(), server.url.replace("data/x.tgz", "elsewhere/")):
        file.unlink(missing_ok=True)
        content = CONTENT if address.startswith("http") else OTHER
        fetched("https://example.org/x.tgz", file, content, mirror=address)
    assert [path for path, _ in server.requests] == ["/elsewhere/x.tgz"]


CODE = """
import sys
from pathlib import Path
from pn_fairseq.common.command import handle_signals, run
from pn_fairseq.pipeline.data.archives import fetch
handle_signals()
sys.exit(run("fetch", lambda: fetch(sys.argv[1], Path(sys.argv[2])), resumes=True))
"""


def test_ctrl_c_keeps_what_came(server, file):
    """The exit code is that of an interruption."""
    server.content = CONTENT + bytes(3_000_000)
    server.drops = [2_000_000]
    server.release.clear()
    command = [sys.executable, "-c", CODE, server.url, str(file)]
    process = subprocess.Popen(
        command, env=environment(no_proxy="*"), stderr=subprocess.PIPE, text=True
    )
    partial = file.with_name("x.tgz.partial")
    wait_for(lambda: partial.exists() and partial.stat().st_size, process)
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=60)
    server.release.set()
    assert process.returncode == 130 and stderr.splitlines()[-1].endswith(
        "run the same command again to resume"
    )
    assert "Traceback" not in stderr and 0 < partial.stat().st_size <= 2_000_000
