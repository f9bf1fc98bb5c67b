"""Decoding by several processes: with a model, and with a stand-in for fairseq-generate that fails on request."""

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from ..fixtures.runs import make_run, small_run, untrained_checkpoint
from ..scripts_helpers import ROOT, SCRIPTS, assert_refused, environment, refused, run, verb, wait_for

main = verb("generate")

SENTENCES = 37

#: Writes down how it was called, and translates every sentence of its share into "translation NUMBER".
STAND_IN = """
import json, os, signal, sys, time
options = dict(zip(sys.argv[1:], sys.argv[2:] + [""]))
rank, world = int(options["--distributed-rank"]), int(options["--distributed-world-size"])
batch, mode = int(options["--batch-size"]), os.environ.get("MODE", "")
called = {"pid": os.getpid(), "arguments": sys.argv[1:], "gpu": os.environ.get("CUDA_VISIBLE_DEVICES")}
with open(f"{os.environ['CALLS']}/{time.time_ns()}", "w") as file:
    json.dump({**called, "rank": rank, "threads": os.environ.get("OMP_NUM_THREADS")}, file)
if mode == "fail" and rank == 1:
    sys.exit("Traceback (most recent call last):\\n  File ...\\ntorch.OutOfMemoryError: CUDA out of memory.\\n\\nmore")
if mode == "killed" and rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
if mode == "chatter":
    while True:
        print("still here", flush=True)
        time.sleep(0.02)
if mode in ("fail", "killed", "sleep"):
    time.sleep(300)
for number in reversed(range(37)):
    if number // batch % world == rank and not (mode == "lose" and number == 5):
        print(f"S-{number}\\tsource {number}")
        print(f"T-{number}\\ttarget {number}")
        for which in range(int(options["--nbest"])):
            named = 5 if mode == "twice" and number == 6 else number
            print(f"H-{named}\\t-{which}.5\\ttranslation {number}" + "+" * which)
            print(f"D-{number}\\t-0.5\\tnone of ours")
            print(f"P-{number}\\t" + " ".join(["-0.1"] * (21 if number in (3, 30) else 20)))
"""


@pytest.fixture(scope="module")
def untrained(data, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("untrained") / "run, with 'a' model"
    untrained_checkpoint(data, folder / "checkpoints/averaged.pt")
    return make_run(folder, data)


def lines(path: Path) -> list[str]:
    return path.read_text("utf-8").removesuffix("\n").split("\n")


def call(*arguments) -> int:
    return main([str(argument) for argument in arguments])


def test_the_result_does_not_depend_on_the_number_of_processes(untrained, data, tmp_path):
    outputs = [tmp_path / f"by {count}" for count in (1, 2)]
    for count, output in enumerate(outputs, start=1):
        words = ("--run", untrained, "--batch-size", 8, "--max-len-b", 8, "--output", f"{output}/", "--ranks", count)
        messages = run("pn", "generate", *words, CUDA_VISIBLE_DEVICES="").stderr
        assert f"processes on the CPU: {count}" in messages and f"{SENTENCES} hypotheses" in messages
        assert {path.name for path in output.iterdir()} == {"hyp.tok", "ref.tok", "src.tok", "generate.log", "made.txt"}
        # Each process translated a part.
        *parts, rest = re.split(
            r"^Generate test with beam=3: .*$", (output / "generate.log").read_text("utf-8"), flags=re.M
        )
        shares = [len(re.findall("^H-", part, re.M)) for part in parts]
        assert len(shares) == count and sum(shares) == SENTENCES and all(shares) and "H-" not in rest
    hypotheses = [(output / "hyp.tok").read_bytes() for output in outputs]
    assert hypotheses[0] == hypotheses[1]
    assert len(set(lines(outputs[0] / "hyp.tok"))) > SENTENCES / 2, "they would be the same in any order"
    # fairseq numbers the sentences as the lines of the text.
    source = lines(data / "tok/test.es")
    found = re.findall(r"^S-(\d+)\t(.*)$", (outputs[1] / "generate.log").read_text("utf-8"), re.M)
    assert sorted(int(number) for number, _ in found) == list(range(SENTENCES))
    assert all(text == source[int(number)] for number, text in found if "<unk>" not in text)
    assert sum("<unk>" not in text for _, text in found) > SENTENCES / 2


MOVED = """
from pn_fairseq.norms import register_norm
from pn_fairseq.norms.power_v import PowerNormV

@register_norm("moved", "mvd", "PN-V by another name")
class Moved(PowerNormV):
    pass
"""


def test_the_file_of_a_norm_that_was_moved(data, tmp_path):
    """generate, average and fold name the option, and take the file where it is now; what they write names it, too."""
    old, new, checkpoint = tmp_path / "old.py", tmp_path / "new.py", tmp_path / "run/checkpoints/averaged.pt"
    old.write_text(MOVED)
    # In processes of their own: this one must not know the norm.
    flags = ("--norm-module", str(old), "--encoder-norm", "moved", "--max-tokens", "400")
    code = f"from tests.fixtures.runs import *; untrained_checkpoint(Path({str(data)!r}), "
    run("warm-python", "-c", f"{code}Path({str(checkpoint)!r}), *{flags})", cwd=ROOT)
    old.rename(new)
    folder, moved = make_run(tmp_path / "run", data), ("--norm-module", new)
    decode = ("pn", "generate", "--run", folder, "--beam", 1, "--max-len-b", 5)
    fold = ("pn", "fold", checkpoint, tmp_path / "folded.pt")
    assert_refused(run(*decode, check=False), f"norm module '{old}' is not a file", "--norm-module FILE")
    assert_refused(run(*fold, check=False), "--norm-module FILE")
    run(*decode, *moved)
    run(*fold, *moved)
    for options in ((), ("--recalibrate", data / "bin", "--batches", 1)):
        run("pn", "average", "--inputs", checkpoint, "--output", tmp_path / "averaged.pt", *moved, *options)
    # Both at once; test_fold.py compares what folded models compute.
    run(*decode, "--checkpoint", tmp_path / "folded.pt", tmp_path / "averaged.pt")


@pytest.fixture
def place(tmp_path, monkeypatch) -> Path:
    """A run with small data, a checkpoint of one number, and the stand-in."""
    small_run(tmp_path, SENTENCES)
    package = tmp_path / "stand-in/fairseq_cli"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "generate.py").write_text(STAND_IN)
    (tmp_path / "calls").mkdir()
    changes = {"PYTHONPATH": package.parent, "CALLS": tmp_path / "calls", "CUDA_VISIBLE_DEVICES": ""}
    for name, value in changes.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.delenv("MODE", raising=False)
    return tmp_path


def generate(place: Path, *options) -> int:
    return call("--run", place / "run", "--batch-size", 5, "--ranks", 3, *options)


def calls(place: Path) -> list[dict]:
    """How the stand-in was called since the last time, by rank."""
    found = []
    for path in (place / "calls").iterdir():
        if text := path.read_text():  # else it was killed while it wrote
            found.append(json.loads(text))
        path.unlink()
    return sorted(found, key=lambda call: call["rank"])


def options_of(called: dict) -> dict[str, str]:
    return dict(zip(called["arguments"], [*called["arguments"][1:], ""], strict=True))


def test_the_shares_are_merged_in_the_order_of_the_text(place):
    assert generate(place) == 0
    output = place / "run/generate/test"
    assert lines(output / "hyp.tok") == [f"translation {number}" for number in range(SENTENCES)]
    for name, language in (("src", "es"), ("ref", "en")):
        assert (output / f"{name}.tok").read_bytes() == (place / f"data/tok/test.{language}").read_bytes()
    assert len(re.findall("^H-", (output / "generate.log").read_text(), re.M)) == SENTENCES
    called = calls(place)
    assert len(called) == 3
    for rank, one in enumerate(called):
        expected = f"--distributed-rank {rank} --distributed-world-size 3 --beam 3 --lenpen 0.6 --max-len-a 0 "
        expected += "--max-len-b 20 --nbest 1 --remove-bpe subword_nmt --required-batch-size-multiple 1 --batch-size 5 "
        expected += f"--max-tokens 8000 --path {place}/run/checkpoints/averaged.pt"
        words = expected.split(" ")
        assert {*zip(words[::2], words[1::2], strict=True)} <= {*options_of(one).items()}
        assert "--fp16" not in one["arguments"]
        assert one["arguments"][0] == str(place / "data/bin")


def test_options_of_decoding_and_an_ensemble(place, capsys):
    torch.save({"model": {"w": torch.zeros(1)}}, place / "other.pt")
    checkpoints = (place / "run/checkpoints/averaged.pt", place / "other.pt")
    chosen = ("--checkpoint", *checkpoints, "--max-len-a", "1.5", "--max-len-b", 7, "--lenpen", 2, "--nbest", 2)
    assert generate(place, *chosen[:-2]) == 0 and calls(place)  # only the best: not enough for two
    assert generate(place, *chosen) == 0
    expected = {
        **{"--max-len-a": "1.5", "--max-len-b": "7", "--lenpen": "2.0", "--nbest": "2", "--beam": "3"},
        **{"--path": ":".join(map(str, checkpoints))},
    }
    assert expected.items() <= options_of(calls(place)[0]).items()
    output = place / "run/generate/test"
    assert lines(output / "hyp.tok") == [f"translation {number}" for number in range(SENTENCES)]
    found = [line.split("\t") for line in lines(output / "nbest.tok")]
    assert len(found) == 2 * SENTENCES
    assert found[2:4] == [["2", "-0.5", "translation 1"], ["2", "-1.5", "translation 1+"]]
    assert generate(place, *chosen) == 0 and "already" in capsys.readouterr().err
    refused(capsys, generate(place, "--nbest", 4), "--nbest 4", "beam of 3")


def test_a_folder_of_fairseq_train(place, tmp_path, capsys):
    """Settings from the checkpoint, data from fairseq-preprocess, sources and references from fairseq's output."""
    folder = tmp_path / "checkpoints of fairseq-train"
    folder.mkdir()
    (place / "data/settings.txt").unlink()
    cfg = {"task": {"data": str(place / "data/bin"), "source_lang": "es", "target_lang": "en"}, "model": None}
    torch.save({"model": {"w": torch.ones(1)}, "cfg": cfg}, folder / "checkpoint_last.pt")
    shutil.copy(folder / "checkpoint_last.pt", folder / "averaged.pt")
    assert call("--run", folder, "--batch-size", 5, "--beam", 2) == 0
    output = folder / "generate/test"
    assert lines(output / "hyp.tok") == [f"translation {number}" for number in range(SENTENCES)]
    assert lines(output / "src.tok") == [f"source {number}" for number in range(SENTENCES)]
    assert lines(output / "ref.tok") == [f"target {number}" for number in range(SENTENCES)]
    refused(capsys, call("--run", folder, "--subset", "valid"), "data/bin' has no subset 'valid'")


def test_hypotheses_that_are_as_long_as_they_may_be_are_counted(place, capsys):
    """20 subwords and the end of the sentence; with --max-len-a the limit depends on the source."""
    of_source = ("--max-len-a", 1, "--max-len-b", 10)
    for options, count, first in (((), 2, 4), (("--max-len-b", 19), 37, 1), (of_source, 8, 1)):
        assert generate(place, *options) == 0
        assert f"note: {count} of 37 hypotheses are as long as they may be" in (messages := capsys.readouterr().err)
        assert f"the first in line {first}\n" in messages
    assert generate(place, "--max-len-b", 21) == 0 and "note" not in capsys.readouterr().err


def test_no_process_is_left_without_a_batch(place):
    """fairseq-generate divides by zero then."""
    assert generate(place, "--batch-size", 20, "--ranks", 8) == 0
    assert len(calls(place)) == 2


@pytest.mark.parametrize("segmentation", ["sentencepiece", "subword-nmt"])
def test_subwords_are_joined_as_the_data_was_segmented(segmentation, place):
    for settings in (place / "data/settings.txt", place / "run/data.settings"):
        settings.write_text(f"source=es\ntarget=en\nsegmentation={segmentation}\n")
    assert generate(place) == 0
    assert options_of(calls(place)[0])["--remove-bpe"] == segmentation.replace("-", "_")


@pytest.fixture
def gpus(place, monkeypatch):
    """torch.cuda sees as many GPUs as CUDA_VISIBLE_DEVICES names."""

    def count() -> int:
        return len(os.environ["CUDA_VISIBLE_DEVICES"].split(",")) if os.environ["CUDA_VISIBLE_DEVICES"] else 0

    monkeypatch.setattr(torch.cuda, "device_count", count)
    return lambda devices: monkeypatch.setenv("CUDA_VISIBLE_DEVICES", devices)


@pytest.mark.parametrize(("chosen", "devices"), [("0,1,2", ["0", "1", "2"]), ("GPU-af,7", ["GPU-af", "7"])])
def test_one_process_on_each_visible_gpu(chosen, devices, place, gpus, capsys):
    (place / "run/config.yaml").write_text("common: {fp16: true}\n")
    gpus(chosen)
    assert call("--run", place / "run", "--batch-size", 5) == 0
    messages = capsys.readouterr().err
    assert f"GPUs: {len(devices)}" in messages and "fp16" in messages and "beam 5, length penalty 1," in messages
    called = calls(place)
    assert [call["gpu"] for call in called] == devices
    assert all("--fp16" in call["arguments"] for call in called)
    refused(capsys, generate(place, "--beam", 2, "--ranks", 4), "--ranks 4")
    assert generate(place, "--beam", 2, "--ranks", 1) == 0
    assert [call["gpu"] for call in calls(place)] == devices[:1]


def test_half_precision_is_for_gpus_and_as_the_run_was_trained(place, gpus, capsys):
    (place / "run/config.yaml").write_text("common: {fp16: true}\n")
    refused(capsys, generate(place, "--fp16"), "--fp16 needs a GPU")
    assert generate(place) == 0
    assert "--fp16" not in calls(place)[0]["arguments"]
    # What is there was decoded in single precision: it will do, unless the other is asked for.
    gpus("0")
    for options in ((), ("--no-fp16",)):
        assert generate(place, "--ranks", 1, *options) == 0 and "already" in capsys.readouterr().err
    assert generate(place, "--fp16", "--ranks", 1) == 0
    assert "--fp16" in calls(place)[0]["arguments"]


def test_a_decoding_is_done_as_long_as_nothing_that_matters_changed(place, capsys):
    assert generate(place) == 0
    output = place / "run/generate/test"
    (output / "scores.json").write_text("of these hypotheses")
    calls(place)
    checkpoint = place / "run/checkpoints/averaged.pt"
    os.utime(checkpoint, (time.time() + 1000, time.time() + 1000))
    shutil.copy(checkpoint, place / "copy.pt")
    for options in ((), ("--checkpoint", place / "copy.pt"), ("--beam", 3, "--lenpen", "0.60"), ("--max-tokens", 500)):
        assert generate(place, *options) == 0 and "already" in capsys.readouterr().err
    # A copy of the run is as good: contents are compared, not times and places.
    shutil.copytree(place / "run", place / "moved", copy_function=shutil.copyfile)
    assert call("--run", place / "moved", "--batch-size", 5) == 0 and "already" in capsys.readouterr().err
    assert calls(place) == [] and (output / "scores.json").exists()

    torch.save({"model": {"w": torch.zeros(1)}}, checkpoint)
    assert generate(place) == 0
    assert len(calls(place)) == 3 and not (output / "scores.json").exists(), "the scores are of other hypotheses"
    for options in (("--beam", 2), ("--beam", 2, "--lenpen", 1)):
        assert generate(place, *options) == 0
        assert len(calls(place)) == 3
    (place / "data/bin/test.es-en.es.bin").write_text("binarized again")
    assert generate(place, "--beam", 2, "--lenpen", 1) == 0
    assert len(calls(place)) == 3


def alive(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.parametrize(
    ("mode", "needles"),
    [
        ("fail", ("CUDA out of memory", "--batch-size", "test.err")),
        ("killed", ("SIGKILL", "memory")),
        ("lose", (f"{SENTENCES} sentences went in and {SENTENCES - 1} hypotheses", "line 6")),
        ("twice", (f"{SENTENCES} hypotheses of {SENTENCES - 1} sentences", "line 7")),
    ],
)
def test_one_share_that_fails_fails_all(mode, needles, place, capsys, monkeypatch):
    generate(place)
    calls(place)
    output = place / "run/generate/test"
    before = {path: path.read_bytes() for path in output.iterdir()}
    torch.save({"model": {"w": torch.zeros(1)}}, place / "run/checkpoints/averaged.pt")
    began = time.monotonic()
    monkeypatch.setenv("MODE", mode)
    refused(capsys, generate(place), *needles)
    assert time.monotonic() - began < 200, "the others were not ended"  # they sleep for 300 seconds
    assert not any(alive(call["pid"]) for call in calls(place))
    assert {path: path.read_bytes() for path in output.iterdir()} == before, "what was there is whole"
    errors = output.with_name("test.err")
    assert {path.name for path in output.parent.iterdir()} == {"test", *(["test.err"] if errors.exists() else [])}
    if mode == "fail":
        assert "Traceback" in errors.read_text()
    monkeypatch.delenv("MODE")
    assert generate(place) == 0
    assert not errors.exists(), "the old messages are removed"


def test_progress_counts_sentences_on_a_terminal(place, capsys, monkeypatch):
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    assert generate(place, "--nbest", 3) == 0
    assert re.findall(r"generate:.* (\d+)/37 ", capsys.readouterr().err)[-1] == "37"


def test_checkpoints_that_are_there_are_named(place, capsys):
    checkpoints = place / "run/checkpoints"
    (checkpoints / "averaged.pt").rename(checkpoints / "checkpoint_best.pt")
    refused(capsys, generate(place), "no checkpoint", "pn average", "has checkpoint_best.pt (--checkpoint FILE)")


def test_a_checkpoint_that_is_cut_off_or_of_another_vocabulary_is_named(untrained, tmp_path):
    """test_train.py has other weights that do not fit."""
    state, path = torch.load(untrained / "checkpoints/averaged.pt", weights_only=False), tmp_path / "other.pt"
    rows, columns = state["model"]["encoder.embed_tokens.weight"].shape
    shorter = {key: value[:-9] if value.shape[:1] == (rows,) else value for key, value in state["model"].items()}
    torch.save({**state, "model": shorter}, path)
    words = ("pn", "generate", "--run", untrained, "--checkpoint", path, "--output", tmp_path / "out")
    assert_refused(
        run(*words, check=False), path.name, f"[{rows - 9}, {columns}] in the checkpoint", "another vocabulary"
    )
    path.write_bytes(path.read_bytes()[:-100])
    assert_refused(run(*words, check=False), f"error: {path}: is cut off or damaged")
    assert not (tmp_path / "out").exists()


def test_fairseqs_own_commands_refuse_bad_checkpoints(untrained, data, tmp_path):
    """One line and exit code 2: a flipped bit, weights that do not fit, code in the file; without torch's advice."""
    state = torch.load(untrained / "checkpoints/averaged.pt", weights_only=False)
    flipped, misfit, hostile = (tmp_path / f"{name}.pt" for name in ("flipped", "misfit", "hostile"))
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
    training = ("--arch", "transformer_pn_tiny", "--share-all-embeddings", "--optimizer", "adam", "--max-tokens", 400)
    train = ("fairseq-train", *plain, *training, "--max-update", 1)
    for command, needles in (
        (("fairseq-generate", *plain, "--path", flipped), ("flipped.pt: is damaged", "checksum")),
        (("fairseq-generate", *plain, "--path", hostile), ("asks for", "system", "nothing in it was executed")),
        ((*train, "--save-dir", tmp_path / "b", "--restore-file", hostile), ("hostile.pt: asks for",)),
        ((*train, "--save-dir", tmp_path / "c", "--restore-file", misfit), ("no encoder.layers.0.fc1.bias",)),
    ):
        ended = run(*command, check=False)
        assert ended.returncode == 2, ended.stderr
        (line,) = [line for line in ended.stderr.splitlines() if line.startswith(f"{command[0]}: error: ")]
        assert all(needle in line for needle in needles), line
        assert "Traceback" not in ended.stderr and "weights_only=False" not in ended.stderr + ended.stdout


@contextlib.contextmanager
def decoding(place: Path, mode: str) -> Iterator[subprocess.Popen]:
    """pn generate, when its three processes run."""
    process = subprocess.Popen(
        ["bash", SCRIPTS / "generate.sh", "--run", place / "run", "--batch-size", "5", "--ranks", "3"],
        **{"env": environment(MODE=mode), "stderr": subprocess.PIPE, "text": True},
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN),  # as in the background of a shell
    )
    try:
        wait_for(lambda: sum(path.stat().st_size > 0 for path in (place / "calls").iterdir()) == 3, process)
        yield process
    finally:
        process.kill()
        process.communicate()


#: test_train.py sends SIGINT, too.
SIGNALS = [pytest.param(signal.SIGINT, 130, marks=pytest.mark.slow), (signal.SIGTERM, 143)]


@pytest.mark.parametrize(("number", "code"), SIGNALS)
def test_an_interruption_leaves_nothing_behind(number, code, place):
    with decoding(place, "sleep") as process:
        processes = [call["pid"] for call in calls(place)]
        process.send_signal(number)
        _, messages = process.communicate(timeout=120)
    assert process.returncode == code
    assert messages.splitlines()[1:] == ["pn generate: interrupted; run the same command again to resume"]
    assert not any(map(alive, processes))
    assert list((place / "run/generate").iterdir()) == []


def test_the_processes_end_when_the_one_above_them_is_killed(place):
    with decoding(place, "chatter") as process:
        processes = [call["pid"] for call in calls(place)]
        process.kill()
        process.communicate(timeout=30)
    wait_for(lambda: not any(map(alive, processes)))
    generate(place)
    assert [path.name for path in (place / "run/generate").iterdir()] == ["test"]


def test_a_directory_with_other_files_is_not_overwritten(place, capsys):
    home = place / "home"
    home.mkdir()
    (home / "thesis.tex").write_text("years of work")
    for output in (home, home / "thesis.tex"):
        refused(capsys, generate(place, "--output", output), "refusing to overwrite", str(home))
    assert (home / "thesis.tex").read_text() == "years of work" and calls(place) == []
    (place / "empty").mkdir()
    assert generate(place, "--output", place / "empty") == 0
    assert len(lines(place / "empty/hyp.tok")) == SENTENCES
    refused(capsys, generate(place, "--output", home / "thesis.tex/below"), "thesis.tex")


def test_mistakes_in_the_data_get_one_line(place, capsys):
    settings = place / "data/settings.txt"
    settings.write_text(settings.read_text().replace("lower=1", "lower=0"))
    refused(capsys, generate(place), "prepared again", "data.settings")
    settings.write_text("lower=1\n")
    shutil.copy(settings, place / "run/data.settings")
    refused(capsys, generate(place), str(settings), "source language")
    settings.unlink()
    refused(capsys, generate(place), str(settings))
    shutil.rmtree(place / "data/bin")
    refused(capsys, generate(place), "is gone", "data/bin")
