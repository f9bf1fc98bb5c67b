"""README.md: what it says is true, and its commands run."""

import re
import shutil

import pytest
import torch

from pn_fairseq.norms import NORMS

from ..scripts_helpers import cut_corpus, run
from .pages import ROOT, block_commands, blocks
from .test_commands_run import execute

PATH = ROOT / "README.md"
README = PATH.read_text("utf-8")
NORMS_ROW = re.compile(r"^\| `([a-z-]+)` \| `transformer_([a-z]+)_\*` \|.*", re.M)

#: Commands that others run: a pattern, and the file of tests, or of continuous integration.
RUN_ELSEWHERE = {r"make venv.*|\. \.venv/bin/activate": ".ci/run", r"make demo": "test_demo.py"}


def test_fits_on_a_few_screens():
    assert len(README.splitlines()) <= 200


def test_table_of_norms_is_the_registry():
    rows = NORMS_ROW.findall(README)
    assert rows == [(name, entry.short) for name, entry in NORMS.items()]


def test_table_of_norms_is_that_of_the_docs():
    def table(text):
        return [match[0] for match in NORMS_ROW.finditer(text)]

    assert table(README) == table((ROOT / "docs/norms.md").read_text("utf-8"))


def test_named_files_exist():
    named = set(re.findall(r"(?<![\w/])((?:scripts|configs|data|benchmarks|docs)/[\w./-]+\w)", README))
    named |= set(re.findall(r"\]\((?!http)([^)#]+)\)", README))
    assert len(named) > 15
    assert [path for path in sorted(named) if not (ROOT / path).exists()] == []


def test_the_repository_names_no_path_outside_itself():
    assert not re.search(r"(?<![\w.])(/home|/root|/tmp)/", README)


def test_python_runs():
    x, padding_mask = torch.randn(5, 2, 512), torch.zeros(2, 5, dtype=torch.bool)
    for block in blocks(PATH, "python"):
        names = {"x": x, "padding_mask": padding_mask}
        exec(block, names)
        assert names["y"].shape == x.shape


def test_each_command_is_run_by_a_test_or_marked():
    for command in block_commands(PATH):
        if command.not_run or command in run_here():
            continue
        places = [place for pattern, place in RUN_ELSEWHERE.items() if re.fullmatch(pattern, command.text)]
        assert places, f"no test runs {command.text!r}: mark it with '# not run ...'"
        assert (ROOT / places[0]).exists() or list((ROOT / "tests").rglob(places[0])), places


def run_here() -> list:
    """The commands that the slow tests below run."""
    return [
        command
        for command in block_commands(PATH)
        if re.match(r"scripts/(?!reproduce)|fairseq-|pn average", command.text)
    ]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder in which the README's commands work: scripts/, and the corpora that it names, much smaller."""
    place = tmp_path_factory.mktemp("readme")
    (place / "scripts").symlink_to(ROOT / "scripts")
    cut = cut_corpus(place / "cut", train=300, valid=20, test=9)
    (place / "my-text").mkdir()
    for path in cut.iterdir():
        shutil.copy(path, place / "my-text" / path.name.replace(".es", ".fr"))
    for path in cut.iterdir():
        path.rename(path.with_name(path.name.replace(".es", ".de")))
    return place


@pytest.mark.slow
def test_commands_on_own_data(place):
    """As printed, with 4 updates and 300 merges."""
    small = {"max_update=4000": "max_update=4 checkpoint.save_interval_updates=2", "--bpe 8000": "--bpe 300"}
    commands = [command.text for command in run_here() if command.text.startswith("scripts/")]
    compare = commands.pop()
    assert "--compare" in compare and len(commands) == 5
    baseline = [command.replace("my-pn", "my-ln").replace("pn_tiny", "ln_tiny") for command in commands[1:]]
    for command in commands + baseline:
        for text, replacement in small.items():
            command = command.replace(text, replacement)
        execute(command, place)
    assert "my-pn" in execute(compare, place).stdout


@pytest.mark.slow
def test_commands_of_plain_fairseq(place):
    """As printed, with a tiny model and 2 epochs."""
    flags = ("--corpus", place / "cut", "--source", "de", "--target", "en", "--dest", place / "de-en", "--bpe", "300")
    run("bash", ROOT / "scripts/prepare_text.sh", *flags)
    (place / "data-bin").mkdir()
    (place / "data-bin/iwslt14.de-en").symlink_to(place / "de-en/bin")
    commands = [command.text for command in run_here() if not command.text.startswith("scripts/")]
    assert len(commands) == 3
    for command in commands:
        command = command.replace("_iwslt ", "_tiny ").replace("--max-update 100000", "--max-epoch 2 --cpu")
        command = command.replace("--last 5", "--last 2")
        result = execute(command, place)
    assert len(re.findall(r"^H-\d+", result.stdout, re.M)) == 9
