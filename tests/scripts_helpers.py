"""Running the programs: in this process, and in one that is forked from a process that has their
imports, where a test needs a real one. ``run`` of anything else starts it as a user does.
"""

import gzip
import importlib.util
import io
import itertools
import logging
import multiprocessing.forkserver
import os
import re
import runpy
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from unittest import mock

ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = ROOT / "scripts"

#: Forks a process for each program and each rank from one that has imported what takes seconds, and
#: not this project: a server of its own, for the conformance suite preloads the project's modules
#: into the default one. ``make test`` starts about 120 programs of fairseq or of this project: if
#: each imported fairseq anew, imports alone would take most of the 600 CPU seconds of the tests.
_server = multiprocessing.forkserver.ForkServer()
_server.set_forkserver_preload(
    ["fairseq_cli.generate", "fairseq_cli.preprocess", "fairseq_cli.train", "torch._dynamo"]
)
_connect = multiprocessing.forkserver.connect_to_new_process
multiprocessing.forkserver.connect_to_new_process = _server.connect_to_new_process


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

    ``pn``, the programs of fairseq (also those that ``pn`` starts) and ``warm-python`` (``-c`` or
    ``-m``) need no time for imports. They are not for tests that send signals.
    """
    words = [str(part) for part in command]
    if words[0] in ("pn", "warm-python") or words[0].startswith("fairseq-"):
        result = _forked(words, str(cwd or os.getcwd()), environment(**changes))
    else:
        call = {"cwd": cwd, "env": environment(**changes), "timeout": 600}
        result = subprocess.run(words, capture_output=True, text=True, **call)
    if check:
        said = f"{result.stdout[-3000:]}\n{result.stderr[-3000:]}"
        assert result.returncode == 0, f"{command}\n{said}"
    return result


def words_of(name: str) -> list[str]:
    """The words after ``pn`` in ``scripts/NAME``; none if the script does not only call it."""
    found = re.search(r'/pn" (.+) "\$@"$', (SCRIPTS / name).read_text("utf-8"), re.M)
    return found[1].split() if found else []


def script(name: str, *arguments, **options) -> subprocess.CompletedProcess:
    """Run ``scripts/NAME``; the program ``pn`` at once, where the script only calls it."""
    words = words_of(name)
    program = ["pn", *words] if words else ["bash", SCRIPTS / name]
    return run(*program, *arguments, **options)


def in_process(*words, **changes: str) -> subprocess.CompletedProcess:
    """``pn WORDS`` in this process, in its folder."""
    from pn_fairseq.__main__ import call

    out = io.StringIO()
    err = io.TextIOWrapper(io.BytesIO(), write_through=True)
    with mock.patch.dict(os.environ, changes), redirect_stdout(out), redirect_stderr(err):
        code = call(list(map(str, words)))
    return subprocess.CompletedProcess(words, code, out.getvalue(), err.buffer.getvalue().decode())


def _forked(words: list[str], cwd: str, env: dict[str, str]) -> subprocess.CompletedProcess:
    # without these variables the program would start itself again
    from pn_fairseq.__main__ import ENVIRONMENT

    env = {**ENVIRONMENT, **env}
    with tempfile.TemporaryDirectory() as folder:
        files = [f"{folder}/out", f"{folder}/err"]
        process = multiprocessing.get_context("forkserver").Process(
            target=_child, args=(words, cwd, env, *files)
        )
        process.start()
        process.join(600)
        if process.is_alive():
            process.kill()
            raise TimeoutError(words)
        out, err = [Path(file).read_text("utf-8", "replace") for file in files]
        return subprocess.CompletedProcess(words, process.exitcode, out, err)


def _child(words: list[str], cwd: str, env: dict[str, str], out: str, err: str) -> None:
    for number, file in enumerate((os.devnull, out, err)):
        os.dup2(os.open(file, os.O_RDWR | os.O_CREAT), number)
    # As in a program that was not forked. Its ranks get a server of its own, for the lock of the
    # one that forked it is locked here. Workers of a data loader then end with it; another server
    # would stay.
    multiprocessing.forkserver.connect_to_new_process = _connect
    multiprocessing.set_start_method("fork", force=True)
    subprocess.Popen = _Popen
    _run_and_exit(words, cwd, env)


class _Popen(subprocess.Popen):
    """Forks ``python -m fairseq_cli.PROGRAM`` and ``-m pn_fairseq`` from this process, which has
    their imports.
    """

    def _execute_child(self, args, executable, preexec_fn, close_fds, pass_fds, cwd, env, *others):
        words = [str(word) for word in args] if isinstance(args, list | tuple) else []
        if not any(word.startswith("fairseq_cli.") or word == "pn_fairseq" for word in words):
            return super()._execute_child(
                args, executable, preexec_fn, close_fds, pass_fds, cwd, env, *others
            )
        # after startupinfo, creationflags and shell: (to read, to write) of stdin, stdout, stderr
        pipes = others[3:9]
        self.pid = os.fork()
        if not self.pid:
            os.setsid()
            for number, file in enumerate((pipes[0], pipes[3], pipes[5])):
                if file != -1:
                    os.dup2(file, number)
            for number in (signal.SIGINT, signal.SIGTERM):
                signal.signal(number, signal.SIG_DFL)
            if preexec_fn:
                preexec_fn()
            program = ["python", *words[words.index("-m") :]]
            _run_and_exit(program, str(cwd or os.getcwd()), dict(env or os.environ))
        self._child_created = True
        self._close_pipe_fds(*pipes)


def _run_and_exit(words: list[str], cwd: str, env: dict[str, str]) -> None:
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    sys.path[:0] = filter(None, env.get("PYTHONPATH", "").split(":"))
    logging.getLogger().handlers.clear()  # fairseq, which is imported already, configures logging
    logging.getLogger().setLevel(logging.WARNING)
    logging.disable(logging.NOTSET)
    code = 1
    try:
        code = _program(words)
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    os._exit((code or 0) & 255)


def verb(name: str):
    """``pn NAME`` in this process: a function from its arguments to its exit code."""
    from pn_fairseq.__main__ import call

    return lambda arguments: call([name, *map(str, arguments)])


def _program(words: list[str]) -> int | None:
    """As the interpreter runs a console script, ``-c CODE`` or ``-m MODULE``."""
    if words[0] == "pn":
        from pn_fairseq.__main__ import main

        sys.argv = words
        return main()
    if words[0].startswith("fairseq-"):
        sys.argv = words
        importlib.import_module(
            f"fairseq_cli.{words[0].removeprefix('fairseq-').replace('-', '_')}"
        ).cli_main()
    elif words[1] == "-c":
        sys.argv = words[1:2] + words[3:]
        sys.path.insert(0, "")
        exec(words[2], {"__name__": "__main__"})
    else:
        from pn_fairseq.__main__ import ENVIRONMENT

        # with these it does not start itself again
        os.environ.update({**ENVIRONMENT, **os.environ})
        del sys.modules["pn_fairseq.__main__"]  # of which runpy would warn
        sys.argv = words[2:]
        sys.path.insert(0, os.getcwd())
        runpy.run_module(words[2], run_name="__main__", alter_sys=True)
    return 0


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
