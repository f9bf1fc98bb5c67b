"""Scores against what others compute: Moses' multi-bleu.perl, sacrebleu's command line."""

import gzip
import json
import os
import random
import re
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

import numpy
import pytest
import sacremoses

from pn_fairseq.common.command import UserError
from pn_fairseq.pipeline import scoring
from pn_fairseq.pipeline.bootstrap import compare_folders, paired_bootstrap
from pn_fairseq.pipeline.data.binarize import MAGIC
from pn_fairseq.pipeline.data.languages import language_of
from pn_fairseq.pipeline.data.tokens import DETOKENIZER, detokenize
from pn_fairseq.pipeline.metrics import METRICS, Scoring, split_compounds
from pn_fairseq.pipeline.scoring import is_scored, read_scores, score_run

from ..scripts_helpers import ROOT, refused, run, verb

main = verb("score")

#: Sentences of a run.
LINES = 24


def metric_of(name: str, lowercase: bool = False, compound_split: bool = False, target: str = ""):
    return METRICS[name].compute(Scoring(lowercase, target, compound_split, lowercase))


def score(name: str, hypotheses: list[str], references: list[str], **settings) -> scoring.Score:
    return scoring.score(metric_of(name, **settings), hypotheses, references)


@cache
def reference() -> list[str]:
    with gzip.open(ROOT / "data/verses.es-en/test.en.gz", "rt", encoding="utf-8") as file:
        return [next(file).rstrip("\n") for _ in range(200)]


def noisy(lines: list[str], seed: int, drop: float = 0.1, double: float = 0.1, swap: float = 0.1) -> list[str]:
    """Like translations of some quality: words are missing, repeated or exchanged."""
    rng = random.Random(seed)
    result = []
    for line in lines:
        words = line.split(" ")
        for place in range(len(words) - 1):
            if rng.random() < swap:
                words[place : place + 2] = words[place + 1], words[place]
        kept = [[word, word] if rng.random() < double else [word] for word in words if rng.random() >= drop]
        result.append(" ".join(sum(kept, [])))
    return result


def joined_by(lines: list[str], seed: int, *spaces: str) -> list[str]:
    rng = random.Random(seed)
    return [re.sub(" ", lambda _: rng.choice([" "] * 20 + [*spaces]), line) for line in lines]


OTHER_SPACES = ("\xa0", "\u3000", "\u2028", "\x85", "\x1c", "\x1f")

#: name -> hypotheses, references, and the settings
CASES = {
    "shorter": (lambda: (noisy(reference(), 1, drop=0.2, double=0), reference()), {}),
    "longer": (lambda: (noisy(reference(), 2, drop=0, double=0.3), reference()), {}),
    "equal": (lambda: (reference(), reference()), {}),
    "one line": (lambda: (["the cat sat on the the mat ."], ["the cat sat on the mat ."]), {}),
    "no 4-gram": (lambda: ([" ".join(line.split()[::-1]) for line in reference()[:9]], reference()[:9]), {}),
    "short lines": (lambda: ([line[:9] for line in reference()], [line[:11] for line in reference()]), {}),
    "empty lines": (
        lambda: (
            [line * (number % 3 > 0) for number, line in enumerate(noisy(reference(), 4))],
            [line * (number % 5 > 0) for number, line in enumerate(reference())],
        ),
        {},
    ),
    # Perl splits bytes at ASCII spaces, of which these are some ...
    "ASCII spaces": (
        lambda: (
            [f" {line}\t " for line in joined_by(noisy(reference(), 5), 5, "\t", "  ", "\v", "\f", "\r", " \t ")],
            [f"{line}  " for line in joined_by(reference(), 6, "  ", "\t")],
        ),
        {},
    ),
    # ... and these are none, though Python takes them for spaces.
    "other spaces": (lambda: (noisy(odd := joined_by(reference(), 7, *OTHER_SPACES), 8), odd), {}),
    # A to Z only: É stays.
    "lower case": (
        lambda: (
            [re.sub("[aeo]", lambda m: {"a": "Á", "e": "E", "o": "O"}[m[0]], line) for line in noisy(reference(), 9)],
            [line.replace("a", "Á") for line in reference()],
        ),
        {"lowercase": True},
    ),
    "compounds": (
        lambda: (
            noisy(joined_by(words := joined_by(reference(), 9, "-", "-é-", " @-@ "), 10, "-", " - ", "--"), 11),
            words,
        ),
        {"compound_split": True},
    ),
    "hyphens as they are": (lambda: (*CASES["compounds"][0](),), {}),
}

#: What multi-bleu.perl prints for them (moses-smt/mosesdecoder, scripts/generic/multi-bleu.perl as of commit 31473d88,
#: perl 5.36; "lower case" with -lc; "compounds" after `perl -ple 's{(\S)-(\S)}{$1 ##AT##-##AT## $2}g'` of both texts).
GOLDEN = {
    "shorter": "BLEU = 41.94, 100.0/62.9/44.6/32.5 (BP=0.764, ratio=0.788, hyp_len=3962, ref_len=5030)",
    "longer": "BLEU = 42.57, 76.4/57.0/34.9/21.6 (BP=1.000, ratio=1.309, hyp_len=6585, ref_len=5030)",
    "equal": "BLEU = 100.00, 100.0/100.0/100.0/100.0 (BP=1.000, ratio=1.000, hyp_len=5030, ref_len=5030)",
    "one line": "BLEU = 66.87, 87.5/85.7/66.7/40.0 (BP=1.000, ratio=1.143, hyp_len=8, ref_len=7)",
    "no 4-gram": "BLEU = 0.00, 100.0/1.0/0.0/0.0 (BP=1.000, ratio=1.000, hyp_len=201, ref_len=201)",
    "short lines": "BLEU = 0.00, 73.2/50.6/13.6/0.0 (BP=0.827, ratio=0.840, hyp_len=437, ref_len=520)",
    "empty lines": "BLEU = 34.83, 73.8/50.2/36.4/26.8 (BP=0.799, ratio=0.817, hyp_len=3323, ref_len=4069)",
    "ASCII spaces": "BLEU = 53.48, 91.6/62.7/45.2/33.0 (BP=0.989, ratio=0.989, hyp_len=4975, ref_len=5030)",
    "other spaces": "BLEU = 53.56, 90.7/62.4/45.2/32.5 (BP=0.997, ratio=0.997, hyp_len=3923, ref_len=3933)",
    "lower case": "BLEU = 51.41, 90.8/60.7/43.2/30.7 (BP=0.988, ratio=0.988, hyp_len=4972, ref_len=5030)",
    "compounds": "BLEU = 50.12, 81.9/57.0/42.6/31.7 (BP=1.000, ratio=1.081, hyp_len=7077, ref_len=6548)",
    "hyphens as they are": "BLEU = 36.58, 80.2/47.8/29.9/18.7 (BP=0.955, ratio=0.956, hyp_len=4639, ref_len=4852)",
}


def ours(hypotheses: list[str], references: list[str], **settings) -> str:
    """In multi-bleu's notation."""
    found = score("tokenized", hypotheses, references, **settings)
    parts = found.verbose.replace(" = ", "=").replace(" ratio", ", ratio").replace(" hyp_len", ", hyp_len")
    return f"BLEU = {found.score:.2f}, {parts.replace(' ref_len', ', ref_len')}"


def text_file(path: Path, lines: list[str]) -> Path:
    path.write_bytes("".join(f"{line}\n" for line in lines).encode())
    return path


@pytest.mark.parametrize("name", CASES)
def test_tokenized_bleu_is_what_multi_bleu_printed(name):
    texts, settings = CASES[name]
    assert ours(*texts(), **settings) == GOLDEN[name]


def test_compounds_are_split_as_perl_splits_them():
    r"""What perl -ple 's{(\S)-(\S)}{$1 ##AT##-##AT## $2}g' prints."""
    cut = " ##AT##-##AT## "
    texts = {
        "a-b": f"a{cut}b",
        "a-b-c": f"a{cut}b-c",  # matches do not overlap
        "1-2-3-4": f"1{cut}2-3{cut}4",
        "a--b": f"a{cut}-b",
        "@-@": f"@{cut}@",
        "a-é-c": f"a{cut}é{cut}c",  # é has two bytes
        "x\xa0-y": f"x\xa0{cut}y",  # no ASCII space
        "- -a b- ---": f"- -a b- -{cut}-",
        "": "",
    }
    assert {text: split_compounds(text) for text in texts} == texts


def test_nothing_translated_is_no_score_and_no_error():
    nothing = [""] * len(reference())
    for name, metric in METRICS.items():
        worst = 0 if metric.better == "higher" else 100
        assert score(name, nothing, reference()).score == worst
        assert score(name, reference(), nothing).score == worst


@pytest.mark.parametrize("metric", METRICS)
def test_texts_that_do_not_belong_together_are_refused(metric):
    with pytest.raises(UserError, match="3 lines, but the reference has 2"):
        score(metric, ["a"] * 3, ["a"] * 2)
    with pytest.raises(UserError, match="no sentence"):
        score(metric, [], [])


def sacrebleu_says(*arguments) -> list[dict]:
    return json.loads(run("sacrebleu", *arguments, "-f", "json", "-w", "8").stdout)


def test_scores_of_plain_text_are_those_of_sacrebleus_command(tmp_path):
    references = reference()[:LINES]
    hypotheses = [line.upper() for line in noisy(references, 12)]
    files = text_file(tmp_path / "ref", references), "-i", text_file(tmp_path / "hyp", hypotheses)
    expected = sacrebleu_says(*files, "-m", "bleu", "chrf", "ter", "-lc", "--chrf-lowercase")
    found = [score(metric, hypotheses, references, lowercase=True) for metric in ("detokenized", "chrf", "ter")]
    assert [one.score for one in found] == [pytest.approx(one["score"], abs=1e-7) for one in expected]
    assert [one.signature for one in found] == [one["signature"] for one in expected]
    assert found[0].verbose == expected[0]["verbose_score"]
    assert score("detokenized", hypotheses, references).score < found[0].score, "case counts unless lowercase is set"


def test_the_tokenizer_is_that_of_the_language():
    lines = ["这是一个测试。", "你好，世界！"]
    for target in ("zh", "zho_Hans"):
        assert "tok:zh" in score("detokenized", lines, lines, target=target).signature
    with pytest.raises(UserError, match="'ja'"):
        score("detokenized", lines, lines, target="ja")


def test_tags_of_languages():
    """FLORES, BCP 47, mBART and glibc's tags; what is no tag stays."""
    for language, tags in {
        "zh": "zh zho_Hans zh_CN zh-TW cmn_Hant", "ja": "ja jpn_Jpan ja_XX", "ko": "ko kor_Hang",
        "pt": "pt-BR por_Latn", "de": "de deu_Latn de_DE", "ar": "arb_Arab", "source": "source", "": "",
    }.items():  # fmt: skip
        assert {language_of(tag) for tag in tags.split(" ")} == {language}


def test_scores_that_need_no_tokenizer_are_given(tmp_path, capsys):
    run_dir = make_run(tmp_path / "run", 1, target="ja")
    (tmp_path / "data/raw/test.en").rename(tmp_path / "data/raw/test.ja")
    assert main(["--run", str(run_dir)]) == 0
    printed = capsys.readouterr()
    assert [line.split(":")[0] for line in printed.out.splitlines()] == ["tokenized BLEU", "chrF2", "TER"]
    assert "warning: no detokenized BLEU: sacrebleu cannot tokenize 'ja'" in printed.err


@pytest.mark.parametrize(
    ("language", "tokens", "text"),
    [
        ("en", "well @-@ known , isn &apos;t it ?", "well-known, isn't it?"),
        ("en", "a @-@ b @-@ c - d", "a-b-c - d"),
        ("en", "he said , “ it ’ s late . ” ( really )", "he said, “it’s late.” (really)"),
        ("en", "“ go , ” he said , “ now . ” ( “ why ‘ now ’ ? ” )", "“go,” he said, “now.” (“why ‘now’?”)"),
        ("en", "&quot; yes &quot; &amp; &#91; no &#93; &lt; x &#124; y", '"yes" & [no] < x | y'),
        ("de", "er sagte : „ es ist spät “ und ging .", "er sagte: „es ist spät“ und ging."),
        ("de", "„ ja “ , sagte er , „ nein “ .", "„ja“, sagte er, „nein“."),
        ("cs", "„ ano “ , „ ne “ .", "„ano“, „ne“."),
        ("vi", "xin chào , thế giới !", "xin chào, thế giới!"),
        ("en", "", ""),
        ("en", "one\xa0two\u2028three", "one two three"),
    ],
)
def test_tokens_become_plain_text(language, tokens, text):
    assert detokenize([tokens], language) == [text]


def test_plain_text_survives_its_tokens():
    """Sentences of the corpus with several quotations."""
    with gzip.open(ROOT / "data/verses.es-en/test.en.gz", "rt", encoding="utf-8") as file:
        quoting = [line.rstrip("\n") for line in file if line.count("“") > 1 and "—" not in line]
    assert len(quoting) > 15
    tokenizer = sacremoses.MosesTokenizer(lang="en")
    assert detokenize([tokenizer.tokenize(line, return_str=True) for line in quoting], "en") == quoting


SETTINGS = {"source": "es", "target": "en", "lower": "1", "bpe": "300"}


def make_run(folder: Path, seed: int, lines: int = LINES, **settings: str) -> Path:
    """A run that was trained and decoded, as far as scoring needs it."""
    texts = [line.replace("’", "'") for line in reference()[:lines]]
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
    (folder / "data").write_text(f"{data}\n")
    (folder / "config.yaml").write_text("task: {}\n")
    shutil.copy(data / "settings.txt", folder / "data.settings")
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_a_folder_is_scored(tmp_path):
    run_dir = make_run(tmp_path / "run", 1)
    decoded = run_dir / "generate/test"
    scores = score_run(run_dir)
    tokens = {kind: (decoded / f"{kind}.tok").read_text("utf-8").splitlines() for kind in ("hyp", "ref")}
    plain = {kind: (decoded / f"{kind}.txt").read_text("utf-8").splitlines() for kind in ("hyp", "ref")}
    assert plain["ref"] == (tmp_path / "data/raw/test.en").read_text("utf-8").splitlines()
    assert plain["hyp"] == detokenize(tokens["hyp"], "en")
    assert (scores.subset, scores.sentences, scores.lowercase, scores.target) == ("test", LINES, True, "en")
    assert list(scores.by_metric) == list(METRICS) and not scores.warnings
    for name, own in scores.by_metric.items():
        texts, note = (tokens, "") if METRICS[name].on_tokens else (plain, f"|detok:{DETOKENIZER}")
        expected = score(name, texts["hyp"], texts["ref"], lowercase=not METRICS[name].on_tokens)
        assert (own.score, own.signature) == (expected.score, f"{expected.signature}{note}")
    assert 10 < scores.by_metric["tokenized"].score < 90 and "case:lc" in scores.by_metric["chrf"].signature

    assert read_scores(decoded) == scores
    written = json.loads((decoded / "scores.json").read_text())
    assert {"subset", "sentences", *METRICS} <= written.keys()
    assert written["tokenized"].keys() == {"score", "signature", "verbose", "compound_split"}
    lines = (decoded / "scores.txt").read_text().splitlines()
    assert [line.split(":")[0] for line in lines] == ["tokenized BLEU", "detokenized BLEU", "chrF2", "TER"]
    for line, one in zip(lines, scores.by_metric.values(), strict=True):
        assert f"|{one.signature} = {one.score:.2f}" in line
    # A run that was scored before a metric existed is still scored.
    written.pop("ter")
    (decoded / "scores.json").write_text(json.dumps(written))
    assert list(read_scores(decoded).by_metric) == [name for name in METRICS if name != "ter"]
    assert sorted(path.suffix for path in decoded.iterdir()) == [".json", *[".tok"] * 2, *[".txt"] * 4]


def test_it_is_scored_once_until_something_changes(tmp_path, capsys):
    """Contents are compared, not times; earlier versions wrote no stamp."""
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
    assert is_scored(run_dir, "test")


def test_the_datas_settings_say_how_it_is_scored(tmp_path):
    run_dir = make_run(tmp_path / "run", 1, lower="0", compound_split="1")
    decoded = run_dir / "generate/test"
    for kind in ("hyp", "ref"):
        first = f"{'ir' * (kind == 'ref')}rich-text"
        text_file(decoded / f"{kind}.tok", [f"{first} {line}" for line in reference()[:LINES]])
    split = score_run(run_dir)
    assert split.by_metric["tokenized"].compound_split and "compounds:split" in split.by_metric["tokenized"].signature
    assert (
        "case:mixed" in split.by_metric["detokenized"].signature and "case:mixed" in split.by_metric["chrf"].signature
    )
    whole = score_run(run_dir, compound_split=False)
    assert whole == read_scores(decoded)
    assert not whole.by_metric["tokenized"].compound_split and "compounds" not in whole.by_metric["tokenized"].signature
    assert whole.by_metric["tokenized"].score < split.by_metric["tokenized"].score


def test_a_line_ends_at_a_line_feed_and_nowhere_else(tmp_path):
    run_dir = make_run(tmp_path / "run", 1)
    decoded = run_dir / "generate/test"
    odd = "a\u2028b\x85c\x0bd\x0ce\x1cf\rg"
    text_file(decoded / "hyp.tok", [odd] * LINES)
    text_file(decoded / "ref.tok", [odd] * LINES)
    assert score_run(run_dir).sentences == LINES
    assert (decoded / "hyp.txt").read_bytes() == b"a b c d e f g\n" * LINES


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda base: (base / "run/generate/test/hyp.tok").unlink(), "hyp.tok.*pn generate"),
        (lambda base: (base / "run/generate/test/ref.tok").unlink(), "No such file.*ref.tok"),
        (lambda base: text_file(base / "run/generate/test/hyp.tok", ["a"] * 23), "23 lines, .*ref.tok has 24"),
        (lambda base: text_file(base / "data/raw/test.en", ["a"] * 25), "24 lines, .*test.en has 25"),
        (lambda base: (base / "data/raw/test.en").write_bytes(b"\xff\n" * LINES), "test.en is not UTF-8"),
        (lambda base: shutil.rmtree(base / "data"), "the data of .* is gone"),
        (lambda base: (base / "data/settings.txt").write_text("lower=1\n"), "prepared again"),
        (
            lambda base: [(base / f).write_text("lower=1\n") for f in ("data/settings.txt", "run/data.settings")],
            "source language",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_folder_that_cannot_be_scored_stays_as_it_was(spoil, message, tmp_path):
    decoded = make_run(tmp_path / "run", 1) / "generate/test"
    spoil(tmp_path)
    before = contents(decoded)
    with pytest.raises((UserError, OSError), match=message):
        score_run(tmp_path / "run")
    assert contents(decoded) == before


def test_scores_that_are_none_of_ours_are_refused(tmp_path):
    with pytest.raises(UserError, match="pn score writes it"):
        read_scores(tmp_path)
    for text in ("{", "[]", '{"subset": "test"}', '{"subset": "test", "sentences": 1, "tokenized": {"score": 1}}'):
        (tmp_path / "scores.json").write_text(text)
        with pytest.raises(UserError, match="score the run again"):
            read_scores(tmp_path)


def test_paired_bootstrap_is_sacrebleus(tmp_path):
    """The command line of sacrebleu, with the same seed, finds the same."""
    systems = {name: noisy(reference(), seed, swap=swap) for name, seed, swap in (("b", 14, 0.1), ("c", 15, 0.2))}
    baseline = noisy(reference(), 13)
    files = {name: text_file(tmp_path / name, lines) for name, lines in {"a": baseline, **systems}.items()}
    command = [text_file(tmp_path / "ref", reference()), "-i", *files.values(), "--paired-bs", "--paired-bs-n", "300"]
    table = run("sacrebleu", *command, "-m", "bleu", "chrf", "-f", "latex", "-w", "6").stdout
    # Of each metric: score (mean ± interval), and of the two systems (p = ...)
    rows = [re.findall(r"\d+\.\d+", line) for line in table.partition(r"\midrule")[2].splitlines()[1:4]]
    assert [len(row) for row in rows] == [6, 8, 8]
    for place, metric in enumerate(("detokenized", "chrf")):
        found = paired_bootstrap({"a": baseline, **systems}, reference(), metric_of(metric), 300)
        assert found.signature in table and "bs:300|seed:12345" in found.signature
        for result, row in zip(found.results.values(), rows, strict=True):
            half = len(row) // 2
            score, mean, ci, *p_value = map(float, row[place * half :][:half])
            assert (result.score, result.mean, result.ci) == pytest.approx((score, mean, ci), abs=1e-6)
            assert ([] if result.p_value is None else [round(result.p_value, 4)]) == p_value
    assert list(found.results) == ["a", "b", "c"]
    assert found.results["b"].p_value > 0.05 > found.results["c"].p_value


def test_paired_bootstrap_of_tokens_against_resampled_texts(monkeypatch):
    """From the texts themselves: draw sentences, score them, compare (Koehn 2004)."""

    def bleu(hypotheses, references):
        return score("tokenized", hypotheses, references).score

    count, resamples, seed = 40, 50, 7
    monkeypatch.setenv("SACREBLEU_SEED", str(seed))
    references = reference()[:count]
    texts = {"a": noisy(references, 16), "b": noisy(references, 17, swap=0.15)}
    found = paired_bootstrap(texts, references, metric_of("tokenized"), resamples)
    draws = numpy.random.default_rng(seed).choice(count, size=(resamples, count), replace=True)
    scores = {
        name: numpy.array([bleu([lines[i] for i in draw], [references[i] for i in draw]) for draw in draws])
        for name, lines in texts.items()
    }
    differences = abs(scores["b"] - scores["a"])
    real = abs(bleu(texts["b"], references) - bleu(texts["a"], references))
    result = found.results["b"]
    assert result.mean == pytest.approx(scores["b"].mean(), abs=1e-3)
    assert result.ci == pytest.approx((numpy.sort(scores["b"])[-2] - numpy.sort(scores["b"])[1]) / 2, abs=1e-3)
    assert result.p_value == (sum(differences - differences.mean() > real) + 1) / (resamples + 1)
    assert 0 < result.p_value < 1


def test_the_same_translations_do_not_differ():
    """sacrebleu's formula gives its smallest p here."""
    references = reference()[:LINES]
    lines = noisy(references, 18)
    systems = {"a": lines, "other": noisy(references, 19), "same": lines}
    for metric in METRICS:
        found = paired_bootstrap(systems, references, metric_of(metric), 20)
        assert found.results["same"].p_value == 1 and found.results["other"].p_value < 1


def test_systems_of_another_length_are_refused():
    with pytest.raises(UserError, match="b: 1 line, but the reference has 2"):
        paired_bootstrap({"a": ["x", "y"], "b": ["x"]}, ["x", "y"], metric_of("chrf"))


@pytest.fixture
def two_runs(tmp_path) -> tuple[Path, Path]:
    """Scored folders of a run and of a worse one."""
    folders = []
    for name, seed in (("good", 1), ("bad", 2)):
        decoded = make_run(tmp_path / name, seed) / "generate/test"
        if name == "bad":
            text_file(decoded / "hyp.tok", noisy((decoded / "hyp.tok").read_text("utf-8").splitlines(), 3))
        score_run(tmp_path / name)
        folders.append(decoded)
    return tuple(folders)


def test_folders_are_compared(two_runs):
    good, bad = two_runs
    found = compare_folders({"good": good, "bad": bad}, resamples=100)
    assert list(found) == list(METRICS)
    for metric in METRICS:
        for result, folder in zip(found[metric].results.values(), (good, bad), strict=True):
            assert result.score == pytest.approx(read_scores(folder).by_metric[metric].score, abs=1e-9)
        assert found[metric].results["bad"].p_value < 0.05
        assert read_scores(good).by_metric[metric].signature.split("|case")[1] in found[metric].signature


def test_folders_with_different_text_or_settings_are_not_compared(two_runs, tmp_path):
    good, bad = two_runs
    score_run(tmp_path / "bad", compound_split=True)
    with pytest.raises(UserError, match="scored in different ways: .* and .*compounds:split"):
        compare_folders({"good": good, "bad": bad})
    score_run(tmp_path / "bad")
    (bad / "ref.tok").write_text((bad / "ref.tok").read_text("utf-8").replace("the", "an"), "utf-8")
    with pytest.raises(UserError, match="different text .ref.tok"):
        compare_folders({"good": good, "bad": bad})


def test_a_comparison_in_words(two_runs, capsys):
    good, bad = two_runs
    runs = [str(folder.parents[1]) for folder in two_runs]
    assert main(["--compare", *runs, "--resamples", "100"]) == 0
    text = capsys.readouterr().out
    assert "|bs:100|seed:12345|" in text and f"test, {LINES} sentences" in text
    scores = read_scores(good), read_scores(bad)
    header, first, second = (line.split("  ") for line in text.split("\n\n")[1].splitlines())
    assert [cell.strip() for cell in header if cell.strip()] == [metric.title for metric in METRICS.values()]
    assert first[0] == "good (baseline)" and second[0] == "bad"
    assert f"{scores[0].by_metric['chrf'].score:.2f} (" in " ".join(
        first
    ) and f"{scores[1].by_metric['chrf'].score:.2f} (" in " ".join(second)
    assert " ".join(second).count(") p = 0.010 *") == len(METRICS) and "p = " not in "".join(first)
    assert "not over training seeds" in text

    refused(capsys, main(["--compare", *runs, f"{runs[1]}/"]), "twice")
    (bad / "scores.json").write_text("{}")
    refused(capsys, main(["--compare", *runs]), "score the run again")


def test_runs_are_scored_where_they_are_not_before_they_are_compared(tmp_path, capsys):
    good, bad = (make_run(tmp_path / name, seed) for name, seed in (("it's, good", 1), ("bad", 2)))
    assert main(["--compare", str(good), str(bad), "--resamples", "10"]) == 0
    assert "it's, good (baseline)" in capsys.readouterr().out and (bad / "generate/test/scores.json").is_file()


def test_any_text_is_scored(tmp_path, capsys):
    texts = {"ref": reference()[:30], "a": reference()[:30], "b": noisy(reference()[:30], 1)}
    files = {name: str(text_file(tmp_path / name, lines)) for name, lines in texts.items()}
    assert main(["--hyp", files["b"], "--ref", files["ref"]]) == 0
    for metric, line in zip(("detokenized", "chrf", "ter"), capsys.readouterr().out.splitlines(), strict=True):
        one = score(metric, texts["b"], texts["ref"])
        assert line.startswith(METRICS[metric].title) and f"|{one.signature} = {one.score:.2f}" in line
        assert "detok:" not in line, "nothing was detokenized"
    assert main(["--hyp", files["b"], "--ref", files["ref"], "--tokenized"]) == 0
    assert f"= {score('tokenized', texts['b'], texts['ref']).score:.2f} " in capsys.readouterr().out
    assert main(["--hyp", files["a"], "--ref", files["ref"], "--tokenized", "--lowercase", "--compound-split"]) == 0
    assert "case:lc[ascii]|" in (printed := capsys.readouterr().out) and "compounds:split" in printed


def test_a_bleu_below_1_warns(tmp_path, capsys):
    run_dir = make_run(tmp_path / "run", 1)
    text_file(run_dir / "generate/test/hyp.tok", ["the"] * LINES)
    assert main(["--run", str(run_dir)]) == 0
    assert "warning: BLEU is 0.00, below 1" in capsys.readouterr().err
    good = make_run(tmp_path / "good", 1)
    assert main(["--compare", str(good), str(run_dir), "--resamples", "20"]) == 0
    printed = capsys.readouterr().out
    assert "run is not tested: BLEU is 0.00" in printed
    assert "p =" not in printed and " *\n" not in printed


@pytest.mark.parametrize(
    ("hypothesis", "options", "warning"),
    [
        ("a man , who sees &apos; it .", (), "the hypotheses look tokenized"),
        ("ein Mann , der sieht .", (), "the hypotheses look tokenized"),
        ("a m@@ an sees it.", (), "the hypotheses hold subwords"),
        ("a m@@ an sees it .", ("--tokenized",), "the hypotheses hold subwords"),
        ("\u2581a \u2581man", (), "the hypotheses hold subwords"),
        ("A man sees it.", (), "the hypotheses are the references"),
        ("A man, who sees it, comes at 5 p.m.", (), ""),
        ("Vois-tu ? Oui !", (), ""),
        ("a man sees it .", ("--tokenized",), ""),
    ],
)
def test_text_that_is_not_what_is_scored_warns(hypothesis, options, warning, tmp_path, capsys):
    hypotheses, references = (
        text_file(tmp_path / "hyp", [hypothesis] * 9),
        text_file(tmp_path / "ref", ["A man sees it."] * 9),
    )
    assert main(["--hyp", str(hypotheses), "--ref", str(references), *options]) == 0
    warnings = [line for line in capsys.readouterr().err.splitlines() if "below 1" not in line]
    assert len(warnings) == bool(warning) and all(warning in line for line in warnings)


def test_several_references_are_those_of_sacrebleu(tmp_path, capsys):
    texts = {name: noisy(reference()[:30], seed) for seed, name in enumerate(("hyp", "one", "two"))}
    files = {name: text_file(tmp_path / name, lines) for name, lines in texts.items()}
    assert main(["--hyp", str(files["hyp"]), "--ref", str(files["one"]), str(files["two"])]) == 0
    lines = capsys.readouterr().out.splitlines()
    expected = sacrebleu_says(files["one"], files["two"], "-i", files["hyp"], "-m", "bleu", "chrf", "ter")
    for line, of_sacrebleu in zip(lines, expected, strict=True):
        assert f"|{of_sacrebleu['signature']} = {of_sacrebleu['score']:.2f}" in line and "nrefs:2" in line
    (tmp_path / "two").write_text("a\n")
    words = ("--hyp", files["hyp"], "--ref", files["one"], files["two"])
    refused(capsys, main(words), "30 lines, but the reference has 1")
    refused(capsys, main(["--hyp", files["two"], "--ref", files["one"]]), "1 line, but the reference has 30")


def test_a_run_on_data_of_others_is_scored_with_detokenized_references(tmp_path):
    job = make_run(tmp_path / "run", 1)
    (job / "config.yaml").unlink()
    (job / ".hydra").mkdir()
    languages = f"{{data: {tmp_path / 'data/bin'}, source_lang: es, target_lang: en}}"
    (job / ".hydra/config.yaml").write_text(f"task: {languages}\n")
    known = score_run(job)
    (tmp_path / "data/settings.txt").unlink()
    scores = score_run(job)
    tokens = (job / "generate/test/ref.tok").read_text("utf-8").splitlines()
    assert (job / "generate/test/ref.txt").read_text("utf-8").splitlines() == detokenize(tokens, "en")
    assert scores.by_metric["chrf"].signature.endswith(f"|detok:{DETOKENIZER}|ref:detok") and not scores.lowercase
    assert known.lowercase and "ref:" not in known.by_metric["chrf"].signature
    assert scores.by_metric["tokenized"] == known.by_metric["tokenized"]


def write_results(path: Path, run_dir: Path, order: list[int], lose: str = "", subwords: bool = False) -> list[str]:
    """What fairseq-generate --results-path writes, in batches of its own order, with n-best; returns the hypotheses."""
    decoded = run_dir / "generate/test"
    texts = {kind: (decoded / f"{kind}.tok").read_text("utf-8").splitlines() for kind in ("hyp", "ref")}
    lines = []
    for n in order:
        hypothesis = texts["hyp"][n].replace("the", "th@@ e") if subwords else texts["hyp"][n]
        lines += [f"S-{n}\tsource", f"T-{n}\t{texts['ref'][n]}", f"H-{n}\t-0.5\t{hypothesis}", f"D-{n}\t-0.5\tx"]
        lines += [f"P-{n}\t-0.1", f"H-{n}\t-0.9\tsecond best"]
    lines = [line for line in lines if not (lose and line.startswith(lose))]
    text_file(path, [*lines, "Generate test with beam=5: BLEU4 = 1.00"])
    return texts["hyp"]


def test_results_of_fairseq_generate_are_scored(tmp_path, capsys):
    """`--results-path RUN` writes generate-test.txt; pn generate's same hypotheses have the same scores."""
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
    assert main(["--run", str(run_dir)]) == 0
    assert read_scores(decoded) == expected and (decoded / "hyp.tok").read_text("utf-8").splitlines() == hypotheses
    # Decoded again: the new file is scored; the references are fairseq's where only it knows them.
    (tmp_path / "data/settings.txt").unlink()
    (run_dir / "config.yaml").unlink()
    (run_dir / ".hydra").mkdir()
    task = f"task: {{data: {tmp_path / 'data/bin'}, source_lang: es, target_lang: en}}\n"
    (run_dir / ".hydra/config.yaml").write_text(task)
    shutil.copy(decoded / "ref.tok", decoded / "hyp.tok")
    write_results(results, run_dir, order)
    text_file(decoded / "hyp.tok", ["a"] * LINES)
    assert score_run(run_dir).by_metric["tokenized"].score == pytest.approx(100)
    shutil.move(results, run_dir / "checkpoints-test.txt")
    assert score_run(run_dir).by_metric["tokenized"].score == pytest.approx(100)


def test_help_needs_no_fairseq():
    """The packages that take seconds to import are needed when a command runs, not for its --help."""
    verbs = ["score", "generate", "translate", "average", "evaluate-lm", "fold", "import-release"]
    others = "fairseq fairseq_cli sentencepiece subword_nmt pandas hydra".split()
    code = f"""
import sys
sys.modules.update(dict.fromkeys({others}))
from pn_fairseq.__main__ import call
for verb in {verbs}:
    try:
        code = call([verb, "--help"])
    except SystemExit as end:
        code = end.code
    assert not code, verb
"""
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert re.findall(r"^usage: pn (\S+) ", printed, re.M) == verbs
