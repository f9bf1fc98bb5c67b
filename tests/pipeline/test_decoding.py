"""Decoding with a model: pn generate, pn translate, and fairseq's own commands on the same
checkpoint.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from pn_fairseq.common.command import UserError
from pn_fairseq.norms import NORMS
from pn_fairseq.pipeline.data.tokens import detokenize
from pn_fairseq.pipeline.translate import check_output

from ..fixtures.corpora import lines
from ..fixtures.runs import make_run, untrained_checkpoint
from ..scripts_helpers import ROOT, SCRIPTS, assert_refused, environment, in_process

#: Untrained models do not end their sentences.
SHORT = ("--max-len-b", "8")
SENTENCES = 37


@pytest.fixture(scope="module")
def untrained(data, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("untrained") / "run, with 'a' model"
    untrained_checkpoint(data, folder / "checkpoints/averaged.pt")
    return make_run(folder, data)


@pytest.mark.ci
def test_the_result_does_not_depend_on_the_number_of_processes(untrained, data, tmp_path):
    hypotheses = []
    for count in (1, 2):
        output = tmp_path / f"by {count}"
        words = ("--run", untrained, "--batch-size", 8, *SHORT, "--ranks", count)
        done = in_process("generate", *words, "--output", f"{output}/", CUDA_VISIBLE_DEVICES="")
        assert f"processes on the CPU: {count}" in done.stderr
        assert f"{SENTENCES} hypotheses" in done.stderr
        names = ["generate.log", "hyp.tok", "made.txt", "ref.tok", "src.tok"]
        assert sorted(os.listdir(output)) == names
        log = (output / "generate.log").read_text("utf-8")
        # Each process translated a part.
        *parts, rest = re.split(r"(?m)^Generate test with beam=3: .*$", log)
        shares = [len(re.findall("^H-", part, re.M)) for part in parts]
        assert len(shares) == count and all(shares) and "H-" not in rest
        assert sum(shares) == SENTENCES
        hypotheses.append(lines(output / "hyp.tok"))
    assert hypotheses[0] == hypotheses[1]
    different = len(set(hypotheses[0]))
    assert different > SENTENCES / 2, "they would be the same in any order"
    # fairseq numbers the sentences as the lines of the text.
    source = lines(data / "tok/test.es")
    found = {int(number): text for number, text in re.findall(r"(?m)^S-(\d+)\t(.*)$", log)}
    assert sorted(found) == list(range(SENTENCES))
    known = {number: text for number, text in found.items() if "<unk>" not in text}
    assert len(known) > SENTENCES / 2
    for number, text in known.items():
        assert text == source[number]


MOVED = """
from pn_fairseq.norms import register_norm
from pn_fairseq.norms.power_v import PowerNormV

@register_norm("moved", "mvd", "PN-V by another name")
class Moved(PowerNormV):
    pass
"""


def anew(*words, **options) -> subprocess.CompletedProcess:
    """A command of this process, which has forgotten the files of norms."""
    NORMS.pop("moved", None)
    for name in list(sys.modules):
        if name.startswith("pn_fairseq_norm_module_"):
            del sys.modules[name]
    return in_process(*words, **options)


@pytest.mark.slow
def test_the_file_of_a_norm_that_was_moved(data, tmp_path):
    """generate, average and fold name the option, and take the file where it is now; what they
    write names it, too.
    """
    old, new = tmp_path / "old.py", tmp_path / "new.py"
    checkpoint = tmp_path / "run/checkpoints/averaged.pt"
    old.write_text(MOVED)
    flags = ("--norm-module", str(old), "--encoder-norm", "moved", "--max-tokens", "400")
    untrained_checkpoint(data, checkpoint, *flags)
    old.rename(new)
    folder, moved = make_run(tmp_path / "run", data), ("--norm-module", new)
    decode = ("generate", "--run", folder, "--beam", 1, "--max-len-b", 5)
    fold = ("fold", checkpoint, tmp_path / "folded.pt")
    refused = anew(*decode, check=False)
    assert_refused(refused, f"norm module '{old}' is not a file", "--norm-module FILE")
    assert_refused(anew(*fold, check=False), "--norm-module FILE")
    anew(*decode, *moved)
    anew(*fold, *moved)
    average = ("--inputs", checkpoint, "--output", tmp_path / "averaged.pt")
    for options in ((), ("--recalibrate", data / "bin", "--batches", 1)):
        anew("average", *average, *moved, *options)
    # Both at once; test_fold.py compares what folded models compute.
    anew(*decode, "--checkpoint", tmp_path / "folded.pt", tmp_path / "averaged.pt")


def test_a_checkpoint_that_is_cut_off_or_of_another_vocabulary_is_named(untrained, tmp_path):
    """test_train.py has other weights that do not fit."""
    state = torch.load(untrained / "checkpoints/averaged.pt", weights_only=False)
    path = tmp_path / "other.pt"
    weights = state["model"]
    rows, columns = weights["encoder.embed_tokens.weight"].shape
    for key, value in weights.items():
        if value.shape[:1] == (rows,):
            weights[key] = value[:-9]
    torch.save(state, path)
    places = ("--run", untrained, "--checkpoint", path, "--output", tmp_path / "out")
    words = ("generate", *places)
    needles = (path.name, f"[{rows - 9}, {columns}] in the checkpoint", "another vocabulary")
    assert_refused(in_process(*words, check=False), *needles)
    path.write_bytes(path.read_bytes()[:-100])
    assert_refused(in_process(*words, check=False), f"error: {path}: is cut off or damaged")
    assert not (tmp_path / "out").exists()


def test_fairseqs_own_commands_refuse_bad_checkpoints(untrained, data, tmp_path):
    """One line and exit code 2: a flipped bit, weights that do not fit, code in the file;
    without torch's advice.
    """
    state = torch.load(untrained / "checkpoints/averaged.pt", weights_only=False)
    flipped, misfit, hostile = (
        tmp_path / f"{name}.pt" for name in ("flipped", "misfit", "hostile")
    )
    torch.save(state, flipped)
    content = bytearray(flipped.read_bytes())
    content[len(content) // 2] ^= 1  # in the middle of the file, which is a weight
    flipped.write_bytes(content)
    weights = dict(state["model"])
    del weights["encoder.layers.0.fc1.bias"]
    torch.save({**state, "model": weights}, misfit)
    torch.save({**state, "extra_state": os.system}, hostile)
    languages = ("--source-lang", "es", "--target-lang", "en")
    plain = (data / "bin", "--user-dir", ROOT / "pn_fairseq", *languages, "--cpu")
    training = (
        "--arch transformer_pn_tiny --share-all-embeddings --optimizer adam --max-tokens 400 "
        "--max-update 1"
    )
    generate = ("fairseq-generate", *plain, "--path")
    train = ("fairseq-train", *plain, *training.split(), "--save-dir", tmp_path / "new")
    for command, needles in (
        ((*generate, flipped), ("flipped.pt: is damaged", "checksum")),
        ((*generate, hostile), ("asks for", "system", "nothing in it was executed")),
        ((*train, "--restore-file", hostile), ("hostile.pt: asks for",)),
        ((*train, "--restore-file", misfit), ("no encoder.layers.0.fc1.bias",)),
    ):
        ended = in_process(*command, check=False)
        assert ended.returncode == 2, ended.stderr
        (line,) = re.findall(f"(?m)^{command[0]}: error: .*", ended.stderr)
        for needle in needles:
            assert needle in line
        assert "Traceback" not in ended.stderr
        assert "weights_only=False" not in ended.stderr + ended.stdout


# --- pn translate: plain text in, plain text out, tokenized and segmented as the data was ---


def test_the_test_set_becomes_what_generate_makes_of_it(untrained, data, tmp_path):
    """The same hypotheses, detokenized; an empty line stays empty, and as many lines come out as
    go in.
    """
    in_process("generate", "--run", untrained, *SHORT)
    text = lines(data / "raw/test.es")
    source, output = tmp_path / "text", tmp_path / "translation"
    source.write_text("\n".join(["", *text[:20], "", *text[20:]]), encoding="utf-8")
    words = ("--run", untrained, "--input", source, "--output", output, *SHORT)
    said = in_process("translate", *words).stderr
    (warning,) = [line for line in said.splitlines() if "may be cut off" in line]
    pattern = rf"(\d+) of {SENTENCES} translations are as long as they may be .*: lines (.*) and"
    cut, first = re.search(pattern, warning).groups()
    named = first.split(", ")
    assert int(cut) > 10 and len(named) == 10 and {"1", "22"}.isdisjoint(named)
    plain = detokenize(lines(untrained / "generate/test/hyp.tok"), "en")
    assert lines(output) == ["", *plain[:20], "", *plain[20:]]


def test_lines_that_are_too_long_are_named_and_the_others_translated(untrained, tmp_path):
    """Of the model, of --max-tokens; and translations that are as long as they may be."""
    long = "la " * 1100
    (tmp_path / "text").write_text(f"Dios\n{long}\nY dijo\n")
    (tmp_path / "long").write_text(f"{long}\n")
    words = ("translate", "--run", untrained, "--beam", 1, "--max-len-b", 2, "--input")
    done = in_process(*words, tmp_path / "text")
    assert [bool(line) for line in done.stdout.split("\n")] == [True, False, True, False]
    first, cut = done.stderr.splitlines()
    long = r".* line 2 is not translated: it has 1,1\d\d subwords, and the model takes 1,023"
    assert re.fullmatch(long, first)
    assert "2 of 2 translations are as long as they may be (--max-len-b 2, " in cut
    assert cut.endswith("may be cut off: lines 1, 3")
    refused = in_process(*words, tmp_path / "long", "--max-tokens", 30, check=False)
    assert refused.returncode == 2 and "no line of the input can be translated" in refused.stderr
    assert "and --max-tokens allows 29" in refused.stderr


@pytest.mark.slow
def test_from_standard_input(untrained):
    program = ["bash", SCRIPTS / "translate.sh", "--run", untrained]
    words = [*program, *"--beam 1 --max-len-b 5".split()]
    how = {"env": environment(), "capture_output": True, "text": True}
    result = subprocess.run(words, input="Dios\n", **how)
    assert result.returncode == 0 and result.stdout.count("\n") == 1, result.stderr


def test_input_without_a_word_or_not_utf_8(untrained, tmp_path):
    words = ("translate", "--run", untrained, "--input", tmp_path / "text")
    for text in ("", "\n", "\n\n"):
        (tmp_path / "text").write_text(text)
        result = in_process(*words, check=False)
        assert (result.returncode, result.stdout) == (0, text)
    (tmp_path / "text").write_bytes(b"ma\xf1ana\n")
    assert_refused(in_process(*words, check=False), "text", "not UTF-8")


def test_data_that_moses_tokenized_needs_moses(data, untrained, tmp_path):
    shutil.copytree(data, tmp_path / "data", ignore=shutil.ignore_patterns("raw", "tok"))
    settings = tmp_path / "data/settings.txt"
    settings.write_text(re.sub("(?m)^tokenizer=.*", "tokenizer=moses", settings.read_text()))
    folder = make_run(tmp_path / "run", tmp_path / "data")
    shutil.copy(settings, folder / "data.settings")
    shutil.copy(untrained / "checkpoints/averaged.pt", folder / "checkpoints")
    (tmp_path / "text").write_text("Dios\n")
    words = ("translate", "--run", folder, "--input", tmp_path / "text")
    assert_refused(in_process(*words, check=False), "name a checkout of mosesdecoder (--moses DIR)")
    refused = in_process(*words, "--moses", "/nowhere", check=False)
    assert_refused(refused, "--moses /nowhere is not a checkout of mosesdecoder")


def test_the_output_of_a_translation_does_not_replace_its_input(tmp_path, monkeypatch):
    (tmp_path / "text.es").write_text("Hola.\n", "utf-8")
    (tmp_path / "link.es").symlink_to("text.es")
    monkeypatch.chdir(tmp_path)
    for output in ("text.es", "link.es"):
        with pytest.raises(UserError, match="is the file of --input"):
            check_output(Path(output), tmp_path / "text.es")
    check_output(Path("other.en"), Path("text.es"))
    check_output(None, Path("text.es"))
