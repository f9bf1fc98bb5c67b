"""Commands of the pages: all are parsed by their own parsers, and run unless that takes days,
GPUs or a network.
"""

import argparse
import contextlib
import importlib
import itertools
import re
import shlex
import shutil
import sys

import pytest

from pn_fairseq.__main__ import call

from ..scripts_helpers import cut_corpus, in_process, run
from .pages import ASSIGNMENT, PAGES, ROOT, USER_DIR, Command, block_commands, ours

#: Commands that are not run here -> the reason.
NOT_RUN = {
    r"make .*|\. .*|export .*|pn (info|check)": "the environment: other tests",
    r"pn reproduce demo .*|pn score --compare runs/demo-ln .*": "tests/scripts/test_end_to_end.py",
    r"pn reproduce --study batch_size.*": "tests/scripts/test_studies.py",
    r"pn train .* --ranks 2|srun .*|fairseq-hydra-train .*": "several ranks and sweeps: "
    "tests/pipeline/test_ranks.py",
    r"pn import-release .*": "tests/pipeline/test_import_release.py",
    r"fairseq-generate .* --path imported\.pt .*": "tests/pipeline/test_import_release.py",
    r"pn prepare verses_lm": "tests/pipeline/data/test_prepare_corpora.py; its data is cut here",
    r"pn (report|figures) .*": "the tests of the report",
    r"echo .*": "the input of the command after it",
}
#: Text of a command -> what replaces it, so that a training takes seconds.
SMALL = {
    r"optimization\.max_update=\d+": "",
    r"(pn (?:train|reproduce) (?:verses_\w+_en|own_text(?:_lm)?) (?!--check))": r"\1"
    "optimization.max_update=6 dataset.validate_interval_updates=3 "
    "checkpoint.save_interval_updates=3 dataset.max_tokens=400 "
    "tokens_per_update=400 lr_scheduler.warmup_updates=2 ",
    r"checkpoint\.save_interval_updates=(?!3 )\d+": "",
    r"(verses_lm_en --run.*)": r"\1 task.tokens_per_sample=16",
    r"dataset\.validate_interval_updates=(?!3 )\d+": "",
    r"--seeds 1,2,3": "--seeds 1",
    r"--bpe 8000": "--bpe 300",
    r"_iwslt ": "_tiny ",
    r"--max-update 100000": "--max-epoch 2 --cpu",
    r"(pn average --inputs checkpoints --last) 5": r"\1 2",
    r"--batches 100": "--batches 2",
    r"(pn (generate|translate)\b)": r"\1 --max-len-b 10",
    r"(fairseq-generate)": r"\1 --max-len-b 10 --cpu",
}
#: Commands of the README that others run: a pattern, and the file of tests, or of continuous
#: integration.
RUN_ELSEWHERE = {
    r"make venv.*|\. \.venv/bin/activate": ".ci/run",
    r"make demo.*": "test_end_to_end.py",
}
PLAIN = ROOT / "docs/plain_fairseq.md"
#: Pages whose commands are run.
RUN = (
    "README.md",
    "own_data.md",
    "compare.md",
    "plain_fairseq.md",
    "learning_rate.md",
    "decoding.md",
    "averaging.md",
    "language_modeling.md",
    "training.md",
    "figures.md",
)


def all_commands() -> list[Command]:
    return list(dict.fromkeys(itertools.chain(*map(block_commands, PAGES))))


def reason(command: Command) -> str | None:
    if command.not_run:
        return "marked on the page"
    for pattern, why in NOT_RUN.items():
        if re.fullmatch(pattern, command.text):
            return why
    return None


class Parsed(BaseException):
    """The command line was accepted."""


@contextlib.contextmanager
def only_parsing(monkeypatch):
    for name in ("parse_args", "parse_intermixed_args"):
        original = getattr(argparse.ArgumentParser, name)

        def parse(parser, args=None, namespace=None, original=original):
            original(parser, args, namespace)
            raise Parsed

        monkeypatch.setattr(argparse.ArgumentParser, name, parse)
    yield


@pytest.mark.parametrize("command", all_commands(), ids=str)
def test_every_command_is_accepted_by_its_parser(command, monkeypatch, capsys):
    """Values and positions of arguments, too, and not only the names of options."""
    tool, words = ours(command) or ("", [])
    user_dir = str(ROOT / "pn_fairseq")
    words = [word.replace(f"$({USER_DIR})", user_dir).replace("$SEED", "1") for word in words]
    if tool.startswith("pn ") and "$SETTINGS" not in words:
        with only_parsing(monkeypatch), pytest.raises(Parsed):
            code = call([*tool.split()[1:], *words])
            pytest.fail(f"exit code {code}: {capsys.readouterr().err}")
    elif tool in ("fairseq-train", "fairseq-generate"):
        from fairseq import options

        importlib.import_module("pn_fairseq.models")
        parser = options.get_generation_parser()
        if tool == "fairseq-train":
            parser = options.get_training_parser()
        monkeypatch.setattr(sys, "argv", [tool, *words])
        options.parse_args_and_arch(parser, words)


def test_every_command_is_run_or_has_a_reason():
    for command in all_commands():
        known = command.page in RUN or reason(command)
        assert known, f"add the page to RUN, or a reason to NOT_RUN: {command}"


def test_each_command_of_the_readme_is_run_by_a_test_or_marked():
    assert "README.md" in RUN
    for command in block_commands(ROOT / "README.md"):
        elsewhere = False
        for pattern, place in RUN_ELSEWHERE.items():
            if re.fullmatch(pattern, command.text):
                elsewhere = True
                assert (ROOT / place).exists() or list((ROOT / "tests").rglob(place)), place
        assert command.not_run or elsewhere or not reason(command), command


@pytest.fixture(scope="module")
def place(data, tmp_path_factory):
    """A folder with the corpora, data and runs that the pages name, all of them small."""
    place = tmp_path_factory.mktemp("pages")
    for name in ("scripts", "configs"):
        (place / name).symlink_to(ROOT / name)
    cut = cut_corpus(place / "cut", train=300, valid=20, test=9)
    (place / "my-text").mkdir()
    for path in list(cut.iterdir()):
        shutil.copy(path, place / "my-text" / path.name.replace(".es", ".fr"))
        path.rename(path.with_name(path.name.replace(".es", ".de")))
    flags = ("--source", "de", "--target", "en", "--dest", place / "de-en", "--bpe", "300")
    in_process("prepare", "text", "--corpus", cut, *flags)
    for lang in ("fr", "en"):
        shutil.copy(place / f"my-text/test.{lang}", place / f"my-text/test2017.{lang}")
    (place / "new-text").symlink_to("my-text")
    (place / "my-tokens").mkdir()
    for path in (place / "de-en/tok").iterdir():
        shutil.copy(path, place / "my-tokens" / path.name.replace(".de", ".fr"))
    shutil.copy(place / "de-en/bpe/codes", place / "my-tokens/bpe-codes")
    for folder in ("data-bin", "runs/data", "text"):
        (place / folder).mkdir(parents=True)
    (place / "data-bin/iwslt14.de-en").symlink_to(place / "de-en/bin")
    (place / "runs/data/verses_es_en").symlink_to(data)
    for split in ("train", "valid", "test"):
        shutil.copy(cut / f"{split}.en", place / f"text/{split}.txt")
    (place / "my-lines").symlink_to("text")
    flags = ("--dest", place / "runs/data/verses_lm_en", "--workers", 1)
    in_process("prepare", "text_lm", "--corpus", place / "text", *flags)
    for name in ("a.txt", "b.txt", "ref.txt", "hyp.txt"):
        shutil.copy(cut / "test.en", place / name)
    for command in (
        "pn train verses_es_en --run runs/demo model._name=transformer_pn_tiny",
        "pn average --run runs/demo",
    ):
        execute(command, place)
    for command in block_commands(PLAIN):
        if command.words[:1] == ["fairseq-train"]:
            execute(command.text, place)
    execute("pn average --inputs checkpoints --last 2 --output checkpoints/averaged.pt", place)
    return place


def execute(command: str, place):
    """Run a command of a page with small settings; without a shell where it needs none, and in
    this process if it is one of pn.
    """
    for text, replacement in SMALL.items():
        command = re.sub(text, replacement, command)
    command = command.replace(f"$({USER_DIR})", str(ROOT / "pn_fairseq"))
    if re.search(r"[|*<>$]|&&", command):
        # These runs end within their first epoch: the checkpoints of updates are kept.
        return run("bash", "-c", command, cwd=place, CUDA_VISIBLE_DEVICES="")
    words, variables = shlex.split(command), {"CUDA_VISIBLE_DEVICES": ""}
    while ASSIGNMENT.match(words[0]):
        name, _, variables[name] = words.pop(0).partition("=")
    if words[0] == "pn":
        return in_process(*words[1:], cwd=place, **variables)
    return run(*words, cwd=place, **variables)


@pytest.mark.slow
@pytest.mark.parametrize("page", RUN)
def test_the_commands_of_a_page_run(page, place):
    """In the order of RUN and of the page, in one folder: a page may use what an earlier one has
    made.
    """
    for command in all_commands():
        if command.page != page or reason(command):
            continue
        text = command.text
        if "pn translate" in text:
            text = f'echo "Y dijo Dios: Sea la luz." | {text}'
        execute(text, place)
