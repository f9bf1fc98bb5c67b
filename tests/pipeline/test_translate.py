"""pn translate: plain text in, plain text out, tokenized and segmented as the data was."""

import re
import shutil
import subprocess

import pytest

from pn_fairseq.pipeline.data.tokens import detokenize

from ..fixtures.runs import make_run, untrained_checkpoint
from ..scripts_helpers import SCRIPTS, assert_refused, environment, in_process, run

#: Untrained models do not end their sentences.
SHORT = ("--max-len-b", "8")


@pytest.fixture(scope="module")
def untrained(data, tmp_path_factory):
    folder = tmp_path_factory.mktemp("untrained") / "run"
    untrained_checkpoint(data, folder / "checkpoints/averaged.pt")
    return make_run(folder, data)


def test_the_test_set_becomes_what_generate_makes_of_it(untrained, data, tmp_path):
    """The same hypotheses, detokenized; an empty line stays empty, and as many lines come out as go in."""
    run("pn", "generate", "--run", untrained, *SHORT)
    hypotheses = (untrained / "generate/test/hyp.tok").read_text("utf-8").splitlines()
    text = (data / "raw/test.es").read_text("utf-8").splitlines()
    source, output = tmp_path / "text", tmp_path / "translation"
    source.write_text("\n".join(["", *text[:20], "", *text[20:]]), encoding="utf-8")
    run("pn", "translate", "--run", untrained, "--input", source, "--output", output, *SHORT)
    plain = detokenize(hypotheses, "en")
    assert output.read_text("utf-8") == "".join(f"{line}\n" for line in ["", *plain[:20], "", *plain[20:]])


def test_lines_that_are_too_long_are_named_and_the_others_translated(untrained, tmp_path):
    """Of the model, of --max-tokens; and translations that are as long as they may be."""
    long = "la " * 1100
    (tmp_path / "text").write_text(f"Dios\n{long}\nY dijo\n")
    (tmp_path / "long").write_text(f"{long}\n")
    words = ("pn", "translate", "--run", untrained, "--beam", 1, "--max-len-b", 2, "--input")
    done = run(*words, tmp_path / "text")
    assert [bool(line) for line in done.stdout.split("\n")] == [True, False, True, False]
    first, *cut = done.stderr.splitlines()
    assert re.fullmatch(r".* line 2 is not translated: it has 1,1\d\d subwords, and the model takes 1,023", first)
    assert [re.search(r"line (\d) is as long as --max-len-b 2 allows", text)[1] for text in cut] == ["1", "3"]
    refused = run(*words, tmp_path / "text", "--max-tokens", 30, check=False)
    assert "and --max-tokens allows 29" in refused.stderr and not refused.returncode
    refused = run(*words, tmp_path / "long", check=False)
    assert refused.returncode == 2 and "no line of the input can be translated" in refused.stderr


@pytest.mark.slow
def test_from_standard_input(untrained):
    command = ["bash", SCRIPTS / "translate.sh", "--run", untrained, "--beam", "1", "--max-len-b", "5"]
    result = subprocess.run(command, env=environment(), input="Dios\n", capture_output=True, text=True)
    assert result.returncode == 0 and result.stdout.count("\n") == 1, result.stderr


@pytest.mark.parametrize("text", ["", "\n", "\n\n"])
def test_input_without_a_word(text, untrained, tmp_path):
    (tmp_path / "text").write_text(text)
    result = in_process("translate", "--run", untrained, "--input", tmp_path / "text")
    assert (result.returncode, result.stdout) == (0, text)


@pytest.mark.parametrize(
    ("option", "needle"),
    [
        ((), "name a checkout of mosesdecoder (--moses DIR)"),
        (("--moses", "/nowhere"), "--moses /nowhere is not a checkout of mosesdecoder"),
    ],
)
def test_data_that_moses_tokenized_needs_moses(option, needle, data, untrained, tmp_path):
    shutil.copytree(data, tmp_path / "data", ignore=shutil.ignore_patterns("raw", "tok"))
    settings = tmp_path / "data/settings.txt"
    settings.write_text(re.sub("(?m)^tokenizer=.*", "tokenizer=moses", settings.read_text()))
    run = make_run(tmp_path / "run", tmp_path / "data")
    shutil.copy(settings, run / "data.settings")
    shutil.copy(untrained / "checkpoints/averaged.pt", run / "checkpoints")
    (tmp_path / "text").write_text("Dios\n")
    assert_refused(in_process("translate", "--run", run, "--input", tmp_path / "text", *option), needle)


def test_text_that_is_not_utf_8_is_refused(untrained, tmp_path):
    (tmp_path / "latin1").write_bytes(b"ma\xf1ana\n")
    result = in_process("translate", "--run", untrained, "--input", tmp_path / "latin1")
    assert_refused(result, "latin1", "not UTF-8")
