"""Programs that need no seconds of imports: each is forked from a server that has imported torch and fairseq.

:func:`programs` is a copy of the environment's ``bin/`` in which fairseq's programs, and what else imports fairseq, ask
the server; the others there are the real ones, and ``warm-python`` always asks it. The forked process has the caller's
arguments, variables, directory, standard input and output; the caller gets its exit code, and it is killed when the
caller ends.

Not for tests that look for processes or send signals: the program is a child of the server.
"""

import atexit
import functools
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).parent
PROGRAMS = (
    *("fairseq-eval-lm", "fairseq-generate", "fairseq-hydra-train", "fairseq-interactive", "fairseq-preprocess"),
    *("fairseq-train", "fairseq-validate"),
)
#: What else starts warm: the first arguments of python.
PYTHON = (
    *("-m fairseq_cli.generate", "-c from pn_fairseq.norms"),
    *(f"-m pn_fairseq {verb}" for verb in ("average", "generate", "train", "translate")),
)


@functools.cache
def programs() -> Path:
    """The folder of the programs. The server is started by the first call and ends with this process."""
    folder = Path(tempfile.mkdtemp(prefix="warm-"))
    real, socket = Path(sys.executable).parent, folder / "socket"
    (folder / "bin").mkdir()
    client = shlex.join([sys.executable, "-I", "-S", str(HERE / "client.py"), str(socket)])
    for path in real.iterdir():
        if path.name in PROGRAMS:
            _write(folder / "bin" / path.name, f'exec {client} {path.name} "$@"')
        elif path.name != "python":
            (folder / "bin" / path.name).symlink_to(path)
    patterns = "|".join(f"'{words} '*" for words in PYTHON)
    ask = f'case "$* " in {patterns}) exec {client} "$@" ;; esac'
    _write(folder / "bin/python", f'{ask}\nexec {shlex.quote(sys.executable)} "$@"')
    _write(folder / "bin/warm-python", f'exec {client} "$@"')
    # It ends when its standard input does: with this process, however that ends.
    server = subprocess.Popen([sys.executable, str(HERE / "server.py"), str(socket)], stdin=subprocess.PIPE)

    @atexit.register
    def end() -> None:
        server.communicate()
        shutil.rmtree(folder)

    while not socket.exists():
        assert server.poll() is None, "the server has ended"
        time.sleep(0.02)
    return folder / "bin"


def _write(path: Path, text: str) -> None:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
