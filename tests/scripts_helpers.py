"""Running the programs: in this process, and as a user starts them."""

import gzip
import importlib
import io
import itertools
import logging
import os
import re
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import chdir, contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from unittest import mock

from pn_fairseq.pipeline import programs

ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = ROOT / "scripts"
START_PYTHON = programs.start_python


def environment(**changes: str) -> dict[str, str]:
    """This process's environment, with the tools of the running interpreter first on the PATH."""
    tools = Path(sys.executable).parent
    fixed = {"PATH": f"{tools}:{os.environ['PATH']}", "VENV": str(tools.parent)}
    # `make test PYTHON=... TORCH=...` says how to make the environment; the tests use the one that
    # is there.
    found = dict(os.environ)
    for name in ("PYTHON", "TORCH"):
        found.pop(name, None)
    return {**found, **fixed, **changes}


def run(*command, cwd=None, check=True, **changes: str) -> subprocess.CompletedProcess:
    """Run a command to its end; with ``check`` it must succeed, and its output is shown if it does
    not.
    """
    words = [str(part) for part in command]
    call = {"cwd": cwd, "env": environment(**changes), "timeout": 600}
    return checked(subprocess.run(words, capture_output=True, text=True, **call), check)


def checked(result: subprocess.CompletedProcess, check: bool) -> subprocess.CompletedProcess:
    said = f"{result.stdout[-3000:]}\n{result.stderr[-3000:]}"
    assert not check or result.returncode == 0, f"{result.args}\n{said}"
    return result


def words_of(name: str) -> list[str]:
    """The words after ``pn`` in ``scripts/NAME``; none if the script does not only call it."""
    found = re.search(r'/pn" (.+) "\$@"$', (SCRIPTS / name).read_text("utf-8"), re.M)
    return found[1].split() if found else []


def script(name: str, *arguments, **options) -> subprocess.CompletedProcess:
    """Run ``scripts/NAME`` as a user does."""
    return run("bash", SCRIPTS / name, *arguments, **options)


def in_process(*words, cwd=None, check=True, **changes: str) -> subprocess.CompletedProcess:
    """``pn WORDS``, or a program of fairseq with its words, in this process; likewise the programs
    that it starts, unless a test has replaced them.
    """
    name, *rest = map(str, words)
    module, arguments = "pn_fairseq", [name, *rest]
    if name.startswith("fairseq-"):
        module = f"fairseq_cli.{name.removeprefix('fairseq-').replace('-', '_')}"
        arguments = rest
        if name != "fairseq-preprocess":
            # A worker would be forked from a thread of this process, whose other threads, and the
            # process groups of torch.distributed that they have left, it would not survive.
            arguments += ["--num-workers", "0"]
    env = {**os.environ, **changes}
    replaced = programs.start_python is not START_PYTHON
    children = programs.start_python if replaced else Ended
    with mock.patch.object(programs, "start_python", children):
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        ended = Ended("-m", module, *arguments, cwd=cwd, env=env, **pipes)
    result = subprocess.CompletedProcess(words, ended.returncode, *ended.communicate())
    return checked(result, check)


class Ended:
    """What ``subprocess.Popen`` is of ``python [-P] -m MODULE ARGUMENTS`` that ended already: the
    module ran in this process.
    """

    def __init__(self, *words, cwd=None, env=None, stdout=None, stderr=None, **_unneeded):
        module, *arguments = map(str, words[words.index("-m") + 1 :])
        out = sys.stdout if stdout is None else io.TextIOWrapper(io.BytesIO(), "utf-8")
        err = sys.stderr if stderr is None else io.TextIOWrapper(io.BytesIO(), "utf-8")
        changes = mock.patch.dict(os.environ, env or os.environ, clear=True)
        with changes, redirect_stdout(out), redirect_stderr(err), chdir(cwd or os.curdir):
            self.returncode = call(module, arguments)
        self.stdout = read_again(out, stdout)
        self.stderr = read_again(err, stderr)

    def communicate(self) -> list[str]:
        return [pipe.read().decode() for pipe in (self.stdout, self.stderr)]

    def wait(self, timeout=None) -> int:
        return self.returncode

    def kill(self) -> None:
        """It has ended."""

    def __enter__(self):
        return self

    def __exit__(self, *_error):
        """Nothing is open."""


def read_again(written, wanted) -> io.BytesIO:
    """What a program has written: to read, if ``wanted`` is a pipe; a file gets it."""
    if wanted in (None, subprocess.DEVNULL):
        return io.BytesIO()
    written.flush()
    content = written.buffer.getvalue()
    if wanted == subprocess.PIPE:
        return io.BytesIO(content)
    wanted.write(content)
    wanted.flush()
    return io.BytesIO()


def call(module: str, arguments: list[str]) -> int:
    """``python -m MODULE ARGUMENTS`` in this process; the exit code."""
    if module == "pn_fairseq":
        from pn_fairseq.__main__ import call as pn

        return pn(arguments)
    root, own = logging.getLogger(), logging.getLogger(module)
    level = root.level
    program = importlib.import_module(module)
    with (
        mock.patch.object(sys, "argv", [module.rpartition(".")[2], *arguments]),
        mock.patch.object(root, "handlers", [logging.StreamHandler(sys.stdout)]),
        mock.patch.object(own, "handlers", []),  # fairseq-preprocess adds its log file
    ):
        root.setLevel(logging.INFO)
        try:
            program.cli_main()
        except SystemExit as end:
            return end.code if isinstance(end.code, int) else int(end.code is not None)
        except Exception:
            traceback.print_exc()
            return 1
        finally:
            root.setLevel(level)
    return 0


def replace_steps(monkeypatch, command) -> None:
    """``pn reproduce`` starts ``command(STEP)`` instead of ``pn STEP``."""

    def start(*words, **options) -> subprocess.Popen:
        step = words[words.index("pn_fairseq") + 1 :]
        return subprocess.Popen(command(step), **options)

    monkeypatch.setattr(programs, "start_python", start)


def verb(name: str):
    """``pn NAME`` in this process: a function from its arguments to its exit code."""
    from pn_fairseq.__main__ import call

    return lambda arguments: call([name, *map(str, arguments)])


def assert_refused(result: subprocess.CompletedProcess, *needles: str) -> None:
    """A user's mistake: exit code 2, and beside lines of progress one line that names what is
    wrong.
    """
    lines = [line for line in result.stderr.strip().splitlines() if not line.startswith("[")]
    assert result.returncode == 2, (result.returncode, result.stderr)
    assert len(lines) == 1, lines
    assert ": error: " in lines[0], lines
    for needle in needles:
        assert needle in lines[0], (needle, lines[0])


def refused(capsys, code: int, *needles: str) -> str:
    """The line of a mistake in a command of this process, which returned ``code``."""
    result = subprocess.CompletedProcess((), code, "", capsys.readouterr().err)
    assert_refused(result, *needles)
    return result.stderr.splitlines()[-1]


def verses(lang: str, count: int, skip: int = 0, split: str = "train") -> list[str]:
    """Lines of a split of the corpus in the repository."""
    with gzip.open(ROOT / f"data/verses.es-en/{split}.{lang}.gz", "rt", encoding="utf-8") as file:
        return [line.removesuffix("\n") for line in itertools.islice(file, skip, skip + count)]


def cut_corpus(dest: Path, train: int = 600, valid: int = 40, test: int = 37) -> Path:
    """The first lines of each split of the corpus in the repository.

    37 and 600 are no multiples of 8: fairseq's default batch multiple would drop sentences.
    """
    dest.mkdir(parents=True, exist_ok=True)
    for split, count in (("train", train), ("valid", valid), ("test", test)):
        for lang in ("es", "en"):
            text = "".join(f"{line}\n" for line in verses(lang, count, split=split))
            (dest / f"{split}.{lang}").write_text(text, encoding="utf-8")
    return dest


def prepare(corpus: Path, dest: Path, *options, **kwargs):
    places = ("--corpus", corpus, "--dest", dest)
    how = "--source es --target en --bpe 300 --workers 1".split()
    return run("pn", "prepare", "text", *places, *how, *options, **kwargs)


def files_of(folder: Path) -> dict[str, bytes]:
    """The files below a folder, by their paths in it."""
    found = {}
    for path in folder.rglob("*"):
        if path.is_file():
            found[str(path.relative_to(folder))] = path.read_bytes()
    return found


def wait_for(condition, process: subprocess.Popen | None = None, seconds: float = 300) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it took too long"
        assert process is None or process.poll() is None, process.communicate()
        time.sleep(0.005)


@contextmanager
def locked_by_another(file: Path) -> Iterator[None]:
    """Another process holds the lock of a file, as one that trains a run."""
    code = "import fcntl, sys; f = open(sys.argv[1], 'w'); fcntl.lockf(f, fcntl.LOCK_EX); print(1)"
    code += "; sys.stdout.flush(); sys.stdin.read()"
    words = [sys.executable, "-c", code, str(file)]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        process.stdout.readline()
        yield
        process.stdin.close()


def call_in(package: str, file: str, function):
    """Call ``function`` from a function of a module that looks like one of fairseq's programs,
    or like another.
    """
    namespace = {"__package__": package, "function": function}
    exec(compile("def main():\n    return function()", file, "exec"), namespace)
    return namespace["main"]()
