"""``pn prepare iwslt14`` on a small archive in the original layout, against a simple second
reading of it.
"""

import os
import re
import resource
import signal
import subprocess
from pathlib import Path

import pytest
from fairseq.data import Dictionary
from fairseq.data.data_utils import load_indexed_dataset
from sacremoses import MosesTokenizer

from pn_fairseq.common.files import read_settings

from ...fixtures.corpora import (
    LANGUAGES,
    TEST_SETS,
    iwslt14_members,
    lines,
    wmt14_members,
    write_archives,
)
from ...scripts_helpers import (
    SCRIPTS,
    assert_refused,
    environment,
    files_of,
    in_process,
    run,
    wait_for,
)

OPERATIONS = 400
#: On the PYTHONPATH, it kills a process at a point of its work.
KILLING = Path(__file__).parent / "killing"

members = pytest.fixture(iwslt14_members, scope="module")


@pytest.fixture(scope="module")
def archive(members, tmp_path_factory) -> Path:
    return write_archives(tmp_path_factory.mktemp("mirror"), {"de-en.tgz": members}) / "de-en.tgz"


def prepare(dest: Path, *options, **kwargs) -> subprocess.CompletedProcess:
    words = ("--dest", dest, "--bpe", OPERATIONS)
    return in_process("prepare", "iwslt14", *words, *options, **kwargs)


@pytest.fixture(scope="module")
def prepared(archive, tmp_path_factory) -> Path:
    """By three processes, from a mirror."""
    dest = tmp_path_factory.mktemp("prepared") / "my, data"
    done = prepare(dest, "--workers", 3, "--mirror", archive.parent)
    # a note says that the original has other counts
    assert "160,239" in done.stderr.splitlines()[-2]
    return dest


def tokens(sentence: str, lang: str) -> str:
    text = MosesTokenizer(lang).tokenize(sentence, return_str=True).lower()
    # as Moses since November 2018
    if text.endswith(".") and not text.endswith((" .", "..")) and text != ".":
        text = text[:-1] + " ."
    return text


@pytest.fixture(scope="module")
def reading(members) -> dict[str, list]:
    """What the recipe makes of the archive:

    (raw, tokens) of both sides, by split; the numbers of "removed" lines.
    """
    sides = []
    for lang in LANGUAGES:
        side = []
        for line in members[f"de-en/train.tags.de-en.{lang}"].split("\n"):
            if "<url>" in line or "<talkid>" in line or "<keywords>" in line:
                continue
            for tag in ("<title>", "</title>", "<description>", "</description>"):
                line = "".join(line.split(tag))
            side.append((line.strip().replace("\r", " "), tokens(line, lang)))
        sides.append(side)
    kept, removed, test = [], [], []
    for number, pair in enumerate(zip(*sides, strict=True), start=1):
        words = [text.split() for _, text in pair]
        least, most = sorted(len(side) for side in words)
        fine = 1 <= least and most <= 175 and 2 * most <= 3 * least
        if fine and max(len(word) for side in words for word in side) <= 1000:
            kept.append(pair)
        else:
            removed.append(number)
    for name in TEST_SETS:
        sides = []
        for lang in LANGUAGES:
            text = members[f"de-en/IWSLT14.{name}.de-en.{lang}.xml"]
            side = []
            for segment in re.findall(r'<seg id="\d+">(.*)</seg>', text):
                side.append((segment.strip(), tokens(segment.replace("’", "'"), lang)))
            sides.append(side)
        test += zip(*sides, strict=True)
    train = [pair for number, pair in enumerate(kept) if number % 23 != 22]
    return {"train": train, "valid": kept[22::23], "test": test, "removed": removed}


@pytest.mark.ci
@pytest.mark.parametrize("split", ["train", "valid", "test"])
def test_text_and_tokens_are_those_of_the_recipe(split, prepared, reading):
    for lang, side in zip(LANGUAGES, zip(*reading[split], strict=True), strict=True):
        found = (lines(prepared / f"{folder}/{split}.{lang}") for folder in ("raw", "tok"))
        assert list(zip(*found, strict=True)) == list(side)
    assert len(reading["test"]) == 4 + 5 + 6 + 7 + 8


@pytest.mark.ci
def test_removed_pairs_are_counted_and_listed(prepared, reading):
    counts = read_settings(prepared / "counts.txt")
    sizes = {part: len(pairs) for part, pairs in reading.items()}
    for split in ("train", "valid", "test"):
        assert int(counts[split]) == sizes[split]
    assert int(counts["train.removed"]) == sizes["removed"] > 10
    assert int(counts["train.read"]) == sizes["train"] + sizes["valid"] + sizes["removed"]
    # The reasons, for the lines that were made for them.
    text = lines(prepared / "text/train.de")
    removed, reasons = [], {}
    for row in lines(prepared / "removed.tsv")[1:]:
        _, number, reason, *_ = row.split("\t")
        removed.append(int(number))
        reasons[text[int(number) - 1]] = reason
    assert removed == reading["removed"]
    assert reasons["Nur Deutsch hier."] == "empty" and reasons["vier ganz kurze Wörter"] == "ratio"
    assert reasons[("wort " * 176).strip()] == "too long" and reasons["x" * 1001] == "long token"


@pytest.mark.ci
def test_subwords_are_those_of_subword_nmt(prepared, tmp_path):
    """The codes and the segmentation of its own commands, on both languages' training text."""
    with (tmp_path / "joint").open("wb") as file:
        for lang in LANGUAGES:
            file.write((prepared / f"tok/train.{lang}").read_bytes())
    codes = tmp_path / "codes"
    run("subword-nmt", "learn-bpe", "-s", OPERATIONS, "-i", tmp_path / "joint", "-o", codes)
    assert (prepared / "bpe/codes").read_bytes() == codes.read_bytes()
    for name in ("train.en", "test.de"):
        places = ("-i", prepared / "tok" / name, "-o", tmp_path / name)
        run("subword-nmt", "apply-bpe", "-c", codes, *places)
        assert (prepared / "bpe" / name).read_bytes() == (tmp_path / name).read_bytes()


@pytest.mark.ci
def test_binary_data_holds_the_subwords(prepared):
    files = [prepared / f"bin/dict.{lang}.txt" for lang in LANGUAGES]
    assert files[0].read_bytes() == files[1].read_bytes()
    dictionary = Dictionary.load(str(files[0]))
    for split in ("train", "valid", "test"):
        for lang in LANGUAGES:
            data = load_indexed_dataset(str(prepared / f"bin/{split}.de-en.{lang}"), dictionary)
            for ids, line in zip(data, lines(prepared / f"bpe/{split}.{lang}"), strict=True):
                # A character that only the test set has is <unk>.
                expected = [word if word in dictionary else "<unk>" for word in line.split()]
                assert dictionary.string(ids).split() == expected


def made(folder: Path) -> dict[str, bytes]:
    """All files but logs, and the archive."""
    found = files_of(folder)
    for name in list(found):
        if re.search(r"\.log$|^download/", name):
            del found[name]
    return found


def command(archive: Path, dest: Path) -> list[str]:
    program = ("bash", SCRIPTS / "prepare_iwslt14.sh", "--dest", dest)
    words = (*program, "--archive", archive, "--bpe", OPERATIONS, "--workers", 2)
    return [str(word) for word in words]


#: A file that a preparation makes, the signal that is sent then, and whether to the script or to
#: its process group.
ENDED = [
    ("partial/unpacked", signal.SIGTERM, os.kill),
    ("partial/text", signal.SIGKILL, os.kill),
    ("counts.txt", signal.SIGINT, os.killpg),
    ("bin.partial", signal.SIGTERM, os.kill),
]


@pytest.mark.slow
def test_ended_by_a_signal_it_resumes_and_ends_in_the_same_bytes(archive, prepared, tmp_path):
    """By a signal to the process only, or to its process group. The processes that it leaves after
    a kill -9 end, or the next run waits for them.
    """
    dest = tmp_path / "data"
    for mark, number, kill in ENDED:
        process = subprocess.Popen(
            command(archive, dest),
            env=environment(),
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        wait_for(lambda: any(dest.glob(mark)), process)  # noqa: B023 (it is called in this round only)
        kill(process.pid, number)
        if number == signal.SIGKILL:
            process.wait()
            process.stderr.close()
            continue
        # ends when the script and all its children have ended
        _, stderr = process.communicate(timeout=120)
        assert process.returncode == 128 + number, (mark, stderr)
        said = [line for line in stderr.splitlines() if not line.startswith("[")]
        assert said == ["pn prepare: interrupted; run the same command again to resume"], mark
        assert not [*dest.glob("*partial*")]
    run(*command(archive, dest))
    assert made(dest) == made(prepared)


TRANSLATION = """
settings.txt text stages/tok/train.en raw tok removed.tsv counts.txt bin bpe/codes bpe/test.en
"""
TEXT_LM = "settings.txt raw tok/train.txt tok/valid.txt tok/test.txt bin counts.txt"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("corpus", "least", "files"),
    [("iwslt14", 19, TRANSLATION), ("wmt14", 19, TRANSLATION), ("text_lm", 7, TEXT_LM)],
)
def test_killed_before_every_renaming_it_ends_in_the_same_bytes(
    corpus, least, files, archive, tmp_path
):
    """Once before each file and folder that any step replaces; so between all of them, and with
    nothing left to do.
    """
    words = command(archive, tmp_path / "data")
    if corpus == "wmt14":
        words = [word.replace("iwslt14", "wmt14") for word in words]
        archives = write_archives(tmp_path / "archives", wmt14_members())
        words[words.index("--archive") + 1] = str(archives)
    elif corpus == "text_lm":
        for split in ("train", "valid", "test"):
            (tmp_path / f"{split}.txt").write_text("The cat sat.\n" * 9)
        flags = ["--dest", words[3], "--corpus", str(tmp_path), "--tokenize", "en"]
        words = ["bash", str(SCRIPTS / "prepare.sh"), "text_lm", *flags]
    run(*words)
    undisturbed = (tmp_path / "data").rename(tmp_path / "undisturbed")
    names = tmp_path / "killed at"
    hook = environment(PYTHONPATH=str(KILLING), KILLED=str(names))
    runs = 1
    while subprocess.run(words, env=hook, start_new_session=True).returncode == -signal.SIGKILL:
        runs += 1
    at = {str(Path(name).relative_to(tmp_path / "data")) for name in names.read_text().splitlines()}
    assert runs == len(at) + 1 and len(at) >= least and at >= set(files.split())
    assert made(tmp_path / "data") == made(undisturbed)


@pytest.mark.parametrize("share", [0.1, 0.99, 1.01], ids=["download", "extraction", "tokenization"])
def test_a_file_that_cannot_be_written_to_its_end(share, archive, members, tmp_path):
    """A limit on the size of files, which is met in the middle of one like the end of a disk."""
    limit = int(share * max(len(text.encode()) for text in members.values()))
    dest = tmp_path / "data"
    words = ["bash", SCRIPTS / "prepare_iwslt14.sh", "--dest", dest]
    result = subprocess.run(
        [*words, "--workers", "2", "--mirror", archive.parent],
        env=environment(),
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit)),
        capture_output=True,
        text=True,
    )
    assert_refused(result, "File too large", str(dest))
    left = [path.name for path in dest.rglob("*") if "partial" in path.name]
    # what came is kept for the next run
    assert left == (["de-en.tgz.partial"] if share == 0.1 else [])
