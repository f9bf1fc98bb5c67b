"""pn score on runs: what is scored, when it is scored again, and comparisons of runs."""

import json
import os
import re
import shutil
from pathlib import Path

import pytest

from pn_fairseq.common.command import UserError
from pn_fairseq.pipeline.data.binarize import MAGIC
from pn_fairseq.pipeline.data.settings import Settings
from pn_fairseq.pipeline.data.tokens import DETOKENIZER, detokenize
from pn_fairseq.pipeline.metrics import METRICS
from pn_fairseq.pipeline.paired_bootstrap import compare_folders
from pn_fairseq.pipeline.translation_scores import is_scored, read_scores, score_run

from ..fixtures import runs
from ..fixtures.corpora import lines
from ..fixtures.translations import noisy, reference, score, text_file
from ..scripts_helpers import files_of, refused, verb

main = verb("score")

#: Sentences of a run.
LINES = 24
SETTINGS = Settings(source="es", target="en", lower=True, bpe=300).as_text()


def make_run(folder: Path, seed: int, **settings: str) -> Path:
    """A run that was trained and decoded, as far as scoring needs it."""
    texts = [line.replace("’", "'") for line in reference()[:LINES]]
    data, decoded = folder.parent / "data", folder / "generate/test"
    for part in (data / "raw", data / "tok", data / "bin", decoded):
        part.mkdir(parents=True, exist_ok=True)
    given = "".join(f"{key}={value}\n" for key, value in {**SETTINGS, **settings}.items())
    # As in real settings, checksums follow.
    (data / "settings.txt").write_text(f"{given}{'0' * 64}  test.en\n")
    text_file(data / "raw/test.en", texts)
    tokens = [line.lower().replace(",", " ,").replace(".", " .") for line in texts]
    text_file(decoded / "ref.tok", tokens)
    text_file(decoded / "hyp.tok", noisy(tokens, seed))
    return runs.make_run(folder, data, "task: {}\n")


def test_the_subset_of_hypotheses_is_that_of_their_decoding(tmp_path, capsys):
    """`pn score --output` of another subset used the plain references of test."""
    run_dir = make_run(tmp_path / "run", 1)
    decoded = (run_dir / "generate/test").rename(run_dir / "generate/test2017")
    (decoded / "made.txt").write_text("subset=test2017\n")
    raw = tmp_path / "data/raw"
    (raw / "test.en").rename(raw / "test2017.en")
    text_file(raw / "test.en", ["Something else."] * LINES)
    assert score_run(run_dir, output=decoded) == score_run(run_dir, "test2017")
    assert (decoded / "ref.txt").read_bytes() == (raw / "test2017.en").read_bytes()
    words = ("--run", run_dir, "--output", decoded, "--subset", "valid")
    refused(capsys, main(words), "has hypotheses of test2017, and --subset says valid")


def as_job_of_hydra(folder: Path) -> None:
    """A folder of fairseq-hydra-train in the place of a run, on data that others prepared."""
    (folder / "config.yaml").unlink()
    (folder / ".hydra").mkdir()
    task = f"task: {{data: {folder.parent / 'data/bin'}, source_lang: es, target_lang: en}}\n"
    (folder / ".hydra/config.yaml").write_text(task)


def titles(printed: list[str]) -> list[str]:
    return [line.split(":")[0] for line in printed]


def test_a_folder_is_scored(tmp_path):
    run_dir = make_run(tmp_path / "run", 1)
    decoded = run_dir / "generate/test"
    scores = score_run(run_dir)
    tokens = [lines(decoded / f"{kind}.tok") for kind in ("hyp", "ref")]
    plain = [lines(decoded / f"{kind}.txt") for kind in ("hyp", "ref")]
    assert plain == [detokenize(tokens[0], "en"), lines(tmp_path / "data/raw/test.en")]
    assert (scores.subset, scores.target) == ("test", "en")
    assert scores.sentences == LINES and scores.lowercase
    assert list(scores.by_metric) == list(METRICS) and not scores.warnings
    for name, own in scores.by_metric.items():
        if METRICS[name].on_tokens:
            expected, note = score(name, *tokens), ""
        else:
            expected, note = score(name, *plain, lowercase=True), f"|detok:{DETOKENIZER}"
            assert "case:lc" in own.signature
        assert own.signature == f"{expected.signature}{note}"
        assert own.score == expected.score
    assert 10 < scores.by_metric["tokenized"].score < 90

    assert read_scores(decoded) == scores
    written = json.loads((decoded / "scores.json").read_text())
    assert {"subset", "sentences", *METRICS} <= written.keys()
    assert written["tokenized"].keys() == {"score", "signature", "verbose", "compound_split"}
    printed = lines(decoded / "scores.txt")
    assert titles(printed) == ["tokenized BLEU", "detokenized BLEU", "chrF2", "TER"]
    for line, one in zip(printed, scores.by_metric.values(), strict=True):
        assert f"|{one.signature} = {one.score:.2f}" in line
    suffixes = sorted(path.suffix for path in decoded.iterdir())
    assert suffixes == [".json", ".tok", ".tok", ".txt", ".txt", ".txt", ".txt"]


def test_scores_that_need_no_tokenizer_are_given(tmp_path, capsys):
    run_dir = make_run(tmp_path / "run", 1, target="ja")
    (tmp_path / "data/raw/test.en").rename(tmp_path / "data/raw/test.ja")
    assert main(["--run", run_dir]) == 0
    printed = capsys.readouterr()
    assert titles(printed.out.splitlines()) == ["tokenized BLEU", "chrF2", "TER"]
    assert "warning: no detokenized BLEU: sacrebleu cannot tokenize 'ja'" in printed.err
    scores = read_scores(run_dir / "generate/test")
    assert list(scores.by_metric) == [name for name in METRICS if name != "detokenized"]


def test_it_is_scored_once_until_something_changes(tmp_path, capsys):
    """Contents are compared, not times."""
    run_dir = make_run(tmp_path / "run", 1)
    decoded = run_dir / "generate/test"
    scores = score_run(run_dir)
    assert not is_scored(run_dir, "valid") and "already" not in capsys.readouterr().err
    shutil.copytree(run_dir, tmp_path / "copy", copy_function=shutil.copyfile)
    os.utime(decoded / "hyp.tok")
    for folder in (run_dir, tmp_path / "copy"):
        assert is_scored(folder, "test") and score_run(folder) == scores
        assert "scores.json already exists" in capsys.readouterr().err
    text_file(decoded / "hyp.tok", ["a"] * LINES)
    assert not is_scored(run_dir, "test") and score_run(run_dir) != scores
    assert "was made with other values of hypotheses; making it again" in capsys.readouterr().err
    (decoded / "scores.json.made.txt").unlink()
    assert not is_scored(run_dir, "test") and score_run(run_dir).sentences == LINES
    assert "scores.json is incomplete; making it again" in capsys.readouterr().err


def test_the_datas_settings_say_how_it_is_scored(tmp_path):
    run_dir = make_run(tmp_path / "run", 1, lower="0", compound_split="1")
    decoded = run_dir / "generate/test"
    for kind in ("hyp", "ref"):
        first = f"{'ir' * (kind == 'ref')}rich-text"
        text_file(decoded / f"{kind}.tok", [f"{first} {line}" for line in reference()[:LINES]])
    by_metric = score_run(run_dir).by_metric
    for name in ("detokenized", "chrf"):
        assert "case:mixed" in by_metric[name].signature
    split = by_metric["tokenized"]
    assert split.compound_split and "compounds:split" in split.signature
    scores = score_run(run_dir, compound_split=False)
    assert scores == read_scores(decoded)
    whole = scores.by_metric["tokenized"]
    assert not whole.compound_split and "compounds" not in whole.signature
    assert whole.score < split.score


def test_a_line_ends_at_a_line_feed_and_nowhere_else(tmp_path):
    run_dir = make_run(tmp_path / "run", 1)
    decoded = run_dir / "generate/test"
    odd = "a\u2028b\x85c\x0bd\x0ce\x1cf\rg"
    text_file(decoded / "hyp.tok", [odd] * LINES)
    text_file(decoded / "ref.tok", [odd] * LINES)
    assert score_run(run_dir).sentences == LINES
    assert (decoded / "hyp.txt").read_bytes() == b"a b c d e f g\n" * LINES


HYP, REF = "run/generate/test/hyp.tok", "run/generate/test/ref.tok"
OWN_SETTINGS, RUN_SETTINGS = "data/settings.txt", "run/data.settings"


@pytest.mark.parametrize(
    ("files", "content", "message"),
    [
        ([HYP], None, "hyp.tok.*pn generate"),
        ([REF], None, "No such file.*ref.tok"),
        ([HYP], b"a\n" * 23, "23 lines, .*ref.tok has 24"),
        (["data/raw/test.en"], b"a\n" * 25, "24 lines, .*test.en has 25"),
        (["data/raw/test.en"], b"\xff\n" * LINES, "test.en: line 1 is not UTF-8"),
        (["data"], None, "the data of .* is gone"),
        ([OWN_SETTINGS], b"lower=1\n", "prepared again"),
        ([OWN_SETTINGS, RUN_SETTINGS], b"lower=1\n", "source language"),
    ],
    ids=str,
)
def test_a_folder_that_cannot_be_scored_stays_as_it_was(files, content, message, tmp_path):
    """One without these files, or with others in their place."""
    decoded = make_run(tmp_path / "run", 1) / "generate/test"
    for file in files:
        if content is None:
            shutil.move(tmp_path / file, tmp_path / "away")
        else:
            (tmp_path / file).write_bytes(content)
    before = files_of(decoded)
    with pytest.raises((UserError, OSError), match=message):
        score_run(tmp_path / "run")
    assert files_of(decoded) == before


def test_scores_that_are_none_of_ours_are_refused(tmp_path):
    with pytest.raises(UserError, match="pn score writes it"):
        read_scores(tmp_path)
    for text in (
        "{",
        "[]",
        '{"subset": "test"}',
        '{"subset": "test", "sentences": 1, "tokenized": {"score": 1}}',
    ):
        (tmp_path / "scores.json").write_text(text)
        with pytest.raises(UserError, match="score the run again"):
            read_scores(tmp_path)


@pytest.fixture
def two_runs(tmp_path) -> tuple[Path, Path]:
    """Scored folders of a run and of a worse one."""
    folders = []
    for name, seed in (("good", 1), ("bad", 2)):
        decoded = make_run(tmp_path / name, seed) / "generate/test"
        if name == "bad":
            text_file(decoded / "hyp.tok", noisy(lines(decoded / "hyp.tok"), 3))
        score_run(tmp_path / name)
        folders.append(decoded)
    return tuple(folders)


def test_folders_are_compared(two_runs, tmp_path):
    """Unless their texts or their settings differ."""
    good, bad = two_runs
    found = compare_folders({"good": good, "bad": bad}, resamples=100)
    assert list(found) == list(METRICS)
    for metric in METRICS:
        results = found[metric].results
        for name, folder in (("good", good), ("bad", bad)):
            own = read_scores(folder).by_metric[metric]
            assert results[name].score == pytest.approx(own.score, abs=1e-9)
        assert results["bad"].p_value < 0.05
        assert own.signature.split("|case")[1] in found[metric].signature
    score_run(tmp_path / "bad", compound_split=True)
    with pytest.raises(UserError, match="scored in different ways: .* and .*compounds:split"):
        compare_folders({"good": good, "bad": bad})
    score_run(tmp_path / "bad")
    (bad / "ref.tok").write_text((bad / "ref.tok").read_text("utf-8").replace("the", "an"), "utf-8")
    with pytest.raises(UserError, match="different text .ref.tok"):
        compare_folders({"good": good, "bad": bad})


def test_a_comparison_in_words(two_runs, capsys):
    good, bad = two_runs
    folders = [folder.parents[1] for folder in two_runs]
    assert main(["--compare", *folders, "--resamples", 100]) == 0
    text = capsys.readouterr().out
    assert "|bs:100|seed:12345|" in text and f"test, {LINES} sentences" in text
    header, *rows = text.split("\n\n")[1].splitlines()
    assert re.split(" {2,}", header.strip()) == [metric.title for metric in METRICS.values()]
    for row, name, folder in zip(rows, ("good (baseline)  ", "bad  "), two_runs, strict=True):
        chrf = read_scores(folder).by_metric["chrf"]
        assert row.startswith(name) and f"{chrf.score:.2f} (" in row
    assert rows[1].count(") p = 0.010 *") == len(METRICS) and "p = " not in rows[0]
    assert "not over training seeds" in text

    refused(capsys, main(["--compare", *folders, f"{folders[1]}/"]), "twice")
    (bad / "scores.json").write_text("{}")
    refused(capsys, main(["--compare", *folders]), "score the run again")


def test_runs_are_scored_where_they_are_not_before_they_are_compared(tmp_path, capsys):
    good, bad = make_run(tmp_path / "it's, good", 1), make_run(tmp_path / "bad", 2)
    assert main(["--compare", good, bad, "--resamples", 10]) == 0
    assert "it's, good (baseline)" in capsys.readouterr().out
    assert (bad / "generate/test/scores.json").is_file()


def test_a_bleu_below_1_warns(tmp_path, capsys):
    run_dir = make_run(tmp_path / "run", 1)
    text_file(run_dir / "generate/test/hyp.tok", ["the"] * LINES)
    assert main(["--run", run_dir]) == 0
    assert "warning: BLEU is 0.00, below 1" in capsys.readouterr().err
    good = make_run(tmp_path / "good", 1)
    assert main(["--compare", good, run_dir, "--resamples", 20]) == 0
    printed = capsys.readouterr().out
    assert "run is not tested: BLEU is 0.00" in printed
    assert "p =" not in printed and " *\n" not in printed


def test_a_run_on_data_of_others_is_scored_with_detokenized_references(tmp_path):
    job = make_run(tmp_path / "run", 1)
    as_job_of_hydra(job)
    known = score_run(job)
    (tmp_path / "data/settings.txt").unlink()
    scores = score_run(job)
    tokens = lines(job / "generate/test/ref.tok")
    assert lines(job / "generate/test/ref.txt") == detokenize(tokens, "en")
    signature = scores.by_metric["chrf"].signature
    assert signature.endswith(f"|detok:{DETOKENIZER}|ref:detok")
    assert known.lowercase and not scores.lowercase
    assert "ref:" not in known.by_metric["chrf"].signature
    assert scores.by_metric["tokenized"] == known.by_metric["tokenized"]


def write_results(
    path: Path, run_dir: Path, order: list[int], lose: str = "", subwords: bool = False
) -> list[str]:
    """What fairseq-generate --results-path writes, in batches of its own order, with n-best;
    returns the hypotheses.
    """
    hypotheses, references = (
        lines(run_dir / f"generate/test/{kind}.tok") for kind in ("hyp", "ref")
    )
    written = []
    for n in order:
        hypothesis = hypotheses[n]
        if subwords:
            hypothesis = hypothesis.replace("the", "th@@ e")
        written += [f"S-{n}\tsource", f"T-{n}\t{references[n]}", f"H-{n}\t-0.5\t{hypothesis}"]
        written += [f"D-{n}\t-0.5\tx", f"P-{n}\t-0.1", f"H-{n}\t-0.9\tsecond best"]
    if lose:
        written = [line for line in written if not line.startswith(lose)]
    text_file(path, [*written, "Generate test with beam=5: BLEU4 = 1.00"])
    return hypotheses


def test_results_of_fairseq_generate_are_scored(tmp_path, capsys):
    """`--results-path RUN` writes generate-test.txt; pn generate's same hypotheses have the same
    scores.
    """
    run_dir = make_run(tmp_path / "run", 1)
    decoded, results = run_dir / "generate/test", run_dir / "generate-test.txt"
    expected = score_run(run_dir)
    index = tmp_path / "data/bin/test.es-en.es.idx"
    index.write_bytes(MAGIC + b"\x04" + LINES.to_bytes(8, "little"))
    (tmp_path / "data/tok").mkdir(exist_ok=True)
    shutil.copy(decoded / "ref.tok", tmp_path / "data/tok/test.en")
    order = sorted(range(LINES), key=lambda n: (n % 7, n))
    for fault, needle in (
        ({"order": order[1:]}, "line 1; decode with --required-batch-size-multiple 1"),
        ({"order": order, "lose": "H-3\t"}, "line 4"),
        ({"order": order, "lose": "T-3\t"}, "no reference (T-) of sentence 3"),
        ({"order": order, "subwords": True}, "--remove-bpe"),
    ):
        write_results(results, run_dir, **fault)
        assert score_run(run_dir) == expected and capsys.readouterr(), "pn generate decoded"
        shutil.move(decoded, tmp_path / "away")
        refused(capsys, main(["--run", run_dir]), needle, str(results))
        assert not decoded.exists()
        shutil.move(tmp_path / "away", decoded)
    hypotheses = write_results(results, run_dir, order)
    shutil.rmtree(decoded)
    text = results.read_bytes()
    results.write_bytes(b"na\xefve\n" + text)
    assert main(["--run", run_dir]) == 2
    said = capsys.readouterr().err
    assert f"error: {results}: line 1 is not UTF-8" in said
    assert "required-batch-size" not in said
    results.write_bytes(text)
    assert main(["--run", run_dir]) == 0
    assert read_scores(decoded) == expected and lines(decoded / "hyp.tok") == hypotheses
    # Decoded again: the new file is scored; the references are fairseq's where only it knows them.
    (tmp_path / "data/settings.txt").unlink()
    as_job_of_hydra(run_dir)
    shutil.copy(decoded / "ref.tok", decoded / "hyp.tok")
    write_results(results, run_dir, order)
    text_file(decoded / "hyp.tok", ["a"] * LINES)
    assert score_run(run_dir).by_metric["tokenized"].score == pytest.approx(100)
    shutil.move(results, run_dir / "checkpoints-test.txt")
    assert score_run(run_dir).by_metric["tokenized"].score == pytest.approx(100)
