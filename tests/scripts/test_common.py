"""What all scripts share: scripts/lib/common.sh."""

import signal
import subprocess
import time

import pytest

from ..scripts_helpers import SCRIPTS, assert_refused, environment, run, script

USER_SCRIPTS = sorted(path.name for path in SCRIPTS.glob("*.sh"))

SCRIPT = """
usage() {
    cat <<'END'
usage: scripts/example.sh [options]

  --some-dir DIR  where
  --keep-case     a flag
  --no-fold       sets fold to 0
  --bpe N         number
END
}
some_dir="" keep_case=0 fold=1 bpe=3
"""
SHOW = 'parse_options "$@"; echo "$some_dir|$keep_case|$fold|$bpe|${arguments[*]-}"; step ${STEP-true}'


@pytest.fixture
def example(tmp_path):
    """Runs a script that has these options and takes arguments if asked to."""

    def call(*words: str, takes: bool = False, **options):
        path = tmp_path / "example.sh"
        path.write_text(f"set -euo pipefail\n{SCRIPT}source '{SCRIPTS}/lib/common.sh'\n")
        with path.open("a") as file:
            file.write(f"{'arguments=()' if takes else ''}\n{SHOW}\n")
        return run("bash", path, *words, check=False, **options)

    return call


def test_options_are_those_of_the_usage_text(example):
    assert example().stdout == "|0|1|3|\n"
    assert example("--some-dir", "a b", "--keep-case", "--no-fold", "--bpe", "-1").stdout == "a b|1|0|-1|\n"
    assert example("x=1", "--bpe", "4", "y", takes=True).stdout == "|0|1|4|x=1 y\n"
    assert "--keep-case     a flag" in example("--keep-case", "-h").stdout
    assert example("--version").stdout.startswith("pn_fairseq 0.")


@pytest.mark.parametrize(
    ("words", "needle"),
    [
        (["--bp", "3"], "unknown option '--bp', did you mean '--bpe'? (see --help)"),
        (["--nowhere"], "unknown option '--nowhere' (see --help)"),
        (["--bpe"], "--bpe needs a value"),
        (["--some-dir", "--keep-case"], "--some-dir needs a value"),
        (["word"], "unexpected argument 'word'"),
    ],
)
def test_mistakes_in_options(words, needle, example):
    assert_refused(example(*words), needle)


@pytest.mark.parametrize("name", [name for name in USER_SCRIPTS if "parse_options" in (SCRIPTS / name).read_text()])
def test_every_line_of_a_usage_text_that_looks_like_an_option_is_one(name):
    usage = script(name, "--help").stdout
    options = run("bash", "-c", f'source {SCRIPTS}/lib/common.sh; usage_options <<<"$0"', usage).stdout
    assert len(options.splitlines()) == sum(line.startswith("  --") for line in usage.splitlines())


def test_a_failed_step_ends_the_script_with_its_exit_code(example):
    assert example(STEP="false").returncode == 1
    assert example(STEP="timeout").returncode == 125  # its code for missing arguments


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
@pytest.mark.parametrize("in_background", [False, True])
def test_a_signal_to_the_script_alone_ends_its_step(number, code, in_background, example, tmp_path):
    """Also where SIGINT is ignored, as in the background of a shell that is not interactive."""
    example()
    ignore = signal.SIG_IGN if in_background else signal.SIG_DFL
    process = subprocess.Popen(
        ["bash", str(tmp_path / "example.sh")],
        env=environment(STEP="sleep 100"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, ignore),
    )
    assert process.stdout.readline() == "|0|1|3|\n"
    time.sleep(0.2)
    process.send_signal(number)
    _, stderr = process.communicate(timeout=60)  # ends when sleep has ended, too
    assert (process.returncode, stderr) == (code, "example.sh: interrupted; run the same command again to resume\n")
