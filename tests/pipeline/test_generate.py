"""Decoding by several processes, with a stand-in for fairseq-generate that fails on request."""

import contextlib
import itertools
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

from pn_fairseq.common.files import write_settings
from pn_fairseq.pipeline.data.settings import Settings

from ..fixtures.corpora import lines
from ..fixtures.runs import small_run
from ..scripts_helpers import SCRIPTS, environment, files_of, refused, verb, wait_for

main = verb("generate")

SENTENCES = 37

#: Writes down how it was called, and translates every sentence of its share into "translation
#: NUMBER".
STAND_IN = """
import json, os, signal, sys, time
options = dict(zip(sys.argv[1:], sys.argv[2:] + [""]))
rank, world = int(options["--distributed-rank"]), int(options["--distributed-world-size"])
batch, mode = int(options["--batch-size"]), os.environ.get("MODE", "")
called = {"pid": os.getpid(), "arguments": sys.argv[1:]}
called["gpu"] = os.environ.get("CUDA_VISIBLE_DEVICES")
with open(f"{os.environ['CALLS']}/{time.time_ns()}", "w") as file:
    json.dump({**called, "rank": rank, "threads": os.environ.get("OMP_NUM_THREADS")}, file)
if mode == "fail" and rank == 1:
    error = "torch.OutOfMemoryError: CUDA out of memory."
    sys.exit(f"Traceback (most recent call last):\\n  File ...\\n{error}\\n\\nmore")
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


@pytest.fixture
def place(tmp_path, monkeypatch) -> Path:
    """A run with small data, a checkpoint of one number, and the stand-in."""
    small_run(tmp_path, SENTENCES)
    package = tmp_path / "stand-in/fairseq_cli"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "generate.py").write_text(STAND_IN)
    (tmp_path / "calls").mkdir()
    monkeypatch.setenv("PYTHONPATH", str(package.parent))
    monkeypatch.setenv("CALLS", str(tmp_path / "calls"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.delenv("MODE", raising=False)
    return tmp_path


def generate(place: Path, *options) -> int:
    return main(["--run", place / "run", "--batch-size", 5, "--ranks", 3, *options])


def calls(place: Path) -> list[dict]:
    """How the stand-in was called since the last time, by rank."""
    found = []
    for path in (place / "calls").iterdir():
        text = path.read_text()
        if text:  # else it was killed while it wrote
            found.append(json.loads(text))
        path.unlink()
    return sorted(found, key=lambda call: call["rank"])


def assert_options(called: dict, expected: str) -> None:
    """Each of the pairs "--option value" is among the words of a call."""
    words = expected.split(" ")
    found = called["arguments"]
    assert {*zip(words[::2], words[1::2], strict=True)} <= {*itertools.pairwise(found)}


def numbered(word: str) -> list[str]:
    return [f"{word} {number}" for number in range(SENTENCES)]


def test_the_shares_are_merged_in_the_order_of_the_text(place):
    assert generate(place) == 0
    output = place / "run/generate/test"
    assert lines(output / "hyp.tok") == numbered("translation")
    for name, language in (("src", "es"), ("ref", "en")):
        assert lines(output / f"{name}.tok") == lines(place / f"data/tok/test.{language}")
    assert len(re.findall("^H-", (output / "generate.log").read_text(), re.M)) == SENTENCES
    called = calls(place)
    assert len(called) == 3
    for rank, one in enumerate(called):
        expected = (
            f"--distributed-rank {rank} --distributed-world-size 3 --beam 3 --lenpen 0.6 "
            f"--max-len-a 0 --max-len-b 20 --nbest 1 --remove-bpe subword_nmt --batch-size 5 "
            f"--required-batch-size-multiple 1 --max-tokens 8000 "
            f"--path {place}/run/checkpoints/averaged.pt"
        )
        assert_options(one, expected)
        assert "--fp16" not in one["arguments"]
        assert one["arguments"][0] == str(place / "data/bin")


def test_options_of_decoding_and_an_ensemble(place, capsys):
    torch.save({"model": {"w": torch.zeros(1)}}, place / "other.pt")
    checkpoints = (place / "run/checkpoints/averaged.pt", place / "other.pt")
    limits = "--max-len-a 1.5 --max-len-b 7 --lenpen 2".split()
    best = ("--checkpoint", *checkpoints, *limits)
    chosen = (*best, "--nbest", 2)
    assert generate(place, *best) == 0 and calls(place)  # only the best: not enough for two
    assert generate(place, *chosen) == 0
    expected = "--max-len-a 1.5 --max-len-b 7 --lenpen 2.0 --nbest 2 --beam 3 --path "
    assert_options(calls(place)[0], expected + ":".join(map(str, checkpoints)))
    output = place / "run/generate/test"
    assert lines(output / "hyp.tok") == numbered("translation")
    found = [line.split("\t") for line in lines(output / "nbest.tok")]
    assert len(found) == 2 * SENTENCES
    assert found[2:4] == [["2", "-0.5", "translation 1"], ["2", "-1.5", "translation 1+"]]
    assert generate(place, *chosen) == 0 and "already" in capsys.readouterr().err
    refused(capsys, generate(place, "--nbest", 4), "--nbest 4", "beam of 3")


@pytest.mark.parametrize(
    "languages", [{"source_lang": "es", "target_lang": "en"}, {"source_lang": None}]
)
def test_a_folder_of_fairseq_train(languages, place, tmp_path, capsys):
    """Settings from the checkpoint, data from fairseq-preprocess, sources and references from
    fairseq's output.

    Without --source-lang and --target-lang, fairseq takes the languages from the names of the
    files.
    """
    folder = tmp_path / "checkpoints of fairseq-train"
    folder.mkdir()
    (place / "data/settings.txt").unlink()
    cfg = {"task": {"data": str(place / "data/bin"), **languages}, "model": None}
    torch.save({"model": {"w": torch.ones(1)}, "cfg": cfg}, folder / "checkpoint_last.pt")
    shutil.copy(folder / "checkpoint_last.pt", folder / "averaged.pt")
    assert main(["--run", folder, "--batch-size", 5, "--beam", 2]) == 0
    output = folder / "generate/test"
    for name, word in (("hyp", "translation"), ("src", "source"), ("ref", "target")):
        assert lines(output / f"{name}.tok") == numbered(word)
    assert_options(calls(place)[0], "--source-lang es --target-lang en")
    refused(capsys, main(["--run", folder, "--subset", "valid"]), "data/bin' has no subset 'valid'")
    if not languages["source_lang"]:
        for path in (place / "data/bin").iterdir():
            path.rename(path.with_name(path.name.replace("es-en", "esen")))
        needles = "is named SPLIT.SOURCE-TARGET.LANG.bin", "no --source-lang"
        refused(capsys, main(["--run", folder]), *needles)


def test_hypotheses_that_are_as_long_as_they_may_be_are_counted(place, capsys):
    """20 subwords and the end of the sentence; with --max-len-a the limit depends on the source."""
    of_source = ("--max-len-a", 1, "--max-len-b", 10)
    for options, count, first in (((), 2, 4), (("--max-len-b", 19), 37, 1), (of_source, 8, 1)):
        assert generate(place, *options) == 0
        messages = capsys.readouterr().err
        assert f"note: {count} of 37 hypotheses are as long as they may be" in messages
        assert f"the first in line {first}\n" in messages
    assert generate(place, "--max-len-b", 21) == 0 and "note" not in capsys.readouterr().err


def test_no_process_is_left_without_a_batch(place):
    """fairseq-generate divides by zero then."""
    assert generate(place, "--batch-size", 20, "--ranks", 8) == 0
    assert len(calls(place)) == 2


@pytest.mark.parametrize("segmentation", ["sentencepiece", "subword-nmt"])
def test_subwords_are_joined_as_the_data_was_segmented(segmentation, place):
    for settings in (place / "data/settings.txt", place / "run/data.settings"):
        made_with = Settings(source="es", target="en", segmentation=segmentation)
        write_settings(settings, made_with.as_text())
    assert generate(place) == 0
    assert_options(calls(place)[0], f"--remove-bpe {segmentation.replace('-', '_')}")


@pytest.fixture
def gpus(place, monkeypatch):
    """torch.cuda sees as many GPUs as CUDA_VISIBLE_DEVICES names."""

    def count() -> int:
        return len(re.findall("[^,]+", os.environ["CUDA_VISIBLE_DEVICES"]))

    monkeypatch.setattr(torch.cuda, "device_count", count)
    return lambda devices: monkeypatch.setenv("CUDA_VISIBLE_DEVICES", devices)


@pytest.mark.parametrize("devices", [["0", "1", "2"], ["GPU-af", "7"]])
def test_one_process_on_each_visible_gpu(devices, place, gpus, capsys):
    (place / "run/config.yaml").write_text("common: {fp16: true}\n")
    gpus(",".join(devices))
    assert main(["--run", place / "run", "--batch-size", 5]) == 0
    messages = capsys.readouterr().err
    for words in (f"GPUs: {len(devices)}", "fp16", "beam 5, length penalty 1,"):
        assert words in messages
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
    for options in (
        (),
        ("--checkpoint", place / "copy.pt"),
        ("--beam", 3, "--lenpen", "0.60"),
        ("--max-tokens", 500),
    ):
        assert generate(place, *options) == 0 and "already" in capsys.readouterr().err
    # A copy of the run is as good: contents are compared, not times and places.
    shutil.copytree(place / "run", place / "moved", copy_function=shutil.copyfile)
    assert main(["--run", place / "moved", "--batch-size", 5]) == 0
    assert "already" in capsys.readouterr().err
    assert calls(place) == [] and (output / "scores.json").exists()

    def assert_decoded_again(*options):
        assert generate(place, *options) == 0
        assert len(calls(place)) == 3

    torch.save({"model": {"w": torch.zeros(1)}}, checkpoint)
    assert_decoded_again()
    assert not (output / "scores.json").exists(), "the scores are of other hypotheses"
    assert_decoded_again("--beam", 2)
    assert_decoded_again("--beam", 2, "--lenpen", 1)
    (place / "data/bin/test.es-en.es.bin").write_text("binarized again")
    assert_decoded_again("--beam", 2, "--lenpen", 1)


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
    before = files_of(output)
    torch.save({"model": {"w": torch.zeros(1)}}, place / "run/checkpoints/averaged.pt")
    began = time.monotonic()
    monkeypatch.setenv("MODE", mode)
    refused(capsys, generate(place), *needles)
    assert time.monotonic() - began < 200, "the others were not ended"  # they sleep for 300 seconds
    assert not any(alive(call["pid"]) for call in calls(place))
    assert files_of(output) == before, "what was there is whole"
    errors = output.with_name("test.err")
    assert set(output.parent.iterdir()) <= {output, errors}
    if mode == "fail":
        assert "Traceback" in errors.read_text()
    monkeypatch.delenv("MODE")
    assert generate(place) == 0
    assert not errors.exists(), "the old messages are removed"


def test_progress_counts_sentences_on_a_terminal(place, capsys, monkeypatch):
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    assert generate(place, "--nbest", 3) == 0
    assert re.findall(r"generate:.* (\d+)/37 ", capsys.readouterr().err)[-1] == "37"


@contextlib.contextmanager
def decoding(place: Path, mode: str) -> Iterator[subprocess.Popen]:
    """pn generate, when its three processes run."""
    words = ["bash", SCRIPTS / "generate.sh", "--run", place / "run"]
    words += "--batch-size 5 --ranks 3".split()
    how = {"env": environment(MODE=mode), "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen(words, **how)

    def all_run() -> bool:
        return sum(path.stat().st_size > 0 for path in (place / "calls").iterdir()) == 3

    try:
        wait_for(all_run, process)
        yield process
    finally:
        process.kill()
        process.communicate()


@pytest.mark.ci
def test_an_interruption_leaves_nothing_behind(place):
    """test_train.py sends SIGINT."""
    with decoding(place, "sleep") as process:
        processes = [call["pid"] for call in calls(place)]
        process.send_signal(signal.SIGTERM)
        _, messages = process.communicate(timeout=120)
    assert process.returncode == 143
    assert messages.splitlines()[1:] == [
        "pn generate: interrupted before anything was saved; the same command begins again"
    ]
    assert not any(map(alive, processes))
    assert list((place / "run/generate").iterdir()) == []


@pytest.mark.ci
def test_a_second_process_is_told_that_the_run_is_being_decoded(place, capsys):
    made = f"'{place}/run/generate/test' is being made by another process"
    with decoding(place, "sleep") as process:
        refused(capsys, generate(place), f"{made} ({process.pid}): wait")
        assert sorted(os.listdir(place / "run/generate")) == [".test.lock", "test.partial"]


@pytest.mark.ci
def test_the_processes_end_when_the_one_above_them_is_killed(place):
    with decoding(place, "chatter") as process:
        processes = [call["pid"] for call in calls(place)]
        process.kill()
        process.communicate(timeout=30)
    wait_for(lambda: not any(map(alive, processes)))
    generate(place)
    assert os.listdir(place / "run/generate") == ["test"]


def test_a_further_test_set(place, capsys):
    for folder in ("bin", "tok"):
        for path in (place / "data" / folder).iterdir():
            shutil.copy(path, path.with_name(path.name.replace("test", "test2017", 1)))
    assert generate(place, "--subset", "test2017") == 0
    run = place / "run"
    assert f"next: pn score --run {run} --subset test2017\n" in capsys.readouterr().err
    assert lines(run / "generate/test2017/hyp.tok") == numbered("translation")
    advice = "it has test, test2017 (pn prepare text --test NAME adds one)"
    refused(capsys, generate(place, "--subset", "test1"), advice)


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


def test_a_run_is_not_replaced_by_its_hypotheses(place, capsys):
    """pn train also writes a made.txt."""
    run = place / "run"
    (run / "made.txt").write_text("optimization.max_update=6\n")
    before = files_of(run)
    refused(capsys, generate(place, "--output", run), "refusing to overwrite", str(run))
    (place / "decoded").mkdir()
    for name in ("made.txt", "config.yaml"):
        shutil.copy(run / name, place / "decoded")
    with (place / "decoded/made.txt").open("a") as file:
        file.write("subset=test\n")
    refused(capsys, generate(place, "--output", place / "decoded"), "refusing to overwrite")
    assert files_of(run) == before and calls(place) == []


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
