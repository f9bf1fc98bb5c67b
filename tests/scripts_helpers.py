"""Running the scripts as a user does."""

import gzip
import os
import subprocess
import sys
from pathlib import Path

from . import warm

ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = ROOT / "scripts"


def environment(tools: Path = Path(sys.executable).parent, **changes: str) -> dict[str, str]:
    """This process's environment, with the tools of the running interpreter first on the PATH."""
    fixed = {"PATH": f"{tools}:{os.environ['PATH']}", "VENV": str(tools.parent)}
    # `make test PYTHON=... TORCH=...` says how to make the environment; the tests use the one that is there.
    inherited = {name: value for name, value in os.environ.items() if name not in ("PYTHON", "TORCH")}
    return {**inherited, **fixed, **changes}


def run(*command, cwd=None, check=True, **changes: str) -> subprocess.CompletedProcess:
    """Run a command to its end; with ``check`` it must succeed, and its output is shown if it does not.

    What imports fairseq starts warm (see ``tests.warm``).
    """
    result = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env=environment(warm.programs(), **changes),
        capture_output=True,
        text=True,
        timeout=600,
    )
    if check:
        assert result.returncode == 0, f"{command}\n{result.stdout[-3000:]}\n{result.stderr[-3000:]}"
    return result


def script(name: str, *arguments, **options) -> subprocess.CompletedProcess:
    return run("bash", SCRIPTS / name, *arguments, **options)


def assert_refused(result: subprocess.CompletedProcess, *needles: str) -> None:
    """A user's mistake: exit code 2, and beside lines of progress one line that names what is wrong."""
    lines = [line for line in result.stderr.strip().splitlines() if not line.startswith("[")]
    assert result.returncode == 2, (result.returncode, result.stderr)
    assert len(lines) == 1 and ": error: " in lines[0], lines
    for needle in needles:
        assert needle in lines[0], (needle, lines[0])


def cut_corpus(dest: Path, train: int = 600, valid: int = 40, test: int = 37) -> Path:
    """The first lines of each split of the corpus in the repository.

    37 and 600 are no multiples of 8: fairseq's default batch multiple would drop sentences.
    """
    dest.mkdir(parents=True, exist_ok=True)
    for split, count in (("train", train), ("valid", valid), ("test", test)):
        for lang in ("es", "en"):
            with gzip.open(ROOT / f"data/verses.es-en/{split}.{lang}.gz", "rt", encoding="utf-8") as file:
                lines = [next(file) for _ in range(count)]
            (dest / f"{split}.{lang}").write_text("".join(lines), encoding="utf-8")
    return dest


def prepare(corpus: Path, dest: Path, *options, **kwargs):
    flags = ("--corpus", corpus, "--source", "es", "--target", "en", "--dest", dest, "--bpe", 300)
    return script("prepare_text.sh", *flags, *options, **kwargs)
