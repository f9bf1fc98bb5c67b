"""Scores against what others compute: Moses' multi-bleu.perl, sacrebleu's command line."""

import json
import random
import re
import sys

import numpy
import pytest

from pn_fairseq.common.command import UserError
from pn_fairseq.pipeline.metrics import METRICS, split_compounds
from pn_fairseq.pipeline.paired_bootstrap import paired_bootstrap

from ..fixtures.translations import metric_of, noisy, reference, score, text_file
from ..scripts_helpers import refused, run, verb
from ..tables import rows

main = verb("score")

#: Sentences of a text.
LINES = 24
#: The scores of plain text.
PLAIN = ("detokenized", "chrf", "ter")


def joined_by(lines: list[str], seed: int, *spaces: str) -> list[str]:
    rng = random.Random(seed)
    return [re.sub(" ", lambda _: rng.choice([" "] * 20 + [*spaces]), line) for line in lines]


TEXT = reference()
ODD = joined_by(TEXT, 7, "\xa0", "\u3000", "\u2028", "\x85", "\x1c", "\x1f")
WITH_HYPHENS = joined_by(TEXT, 9, "-", "-é-", " @-@ ")
WITH_MORE_HYPHENS = noisy(joined_by(WITH_HYPHENS, 10, "-", " - ", "--"), 11)


def emptied(lines: list[str], each: int) -> list[str]:
    """One line of ``each`` lines is empty, and the first is."""
    return [line * (number % each > 0) for number, line in enumerate(lines)]


#: name -> hypotheses and references
CASES = {
    "shorter": (noisy(TEXT, 1, drop=0.2, double=0), TEXT),
    "longer": (noisy(TEXT, 2, drop=0, double=0.3), TEXT),
    "equal": (TEXT, TEXT),
    "one line": (["the cat sat on the the mat ."], ["the cat sat on the mat ."]),
}
backwards = [" ".join(line.split()[::-1]) for line in TEXT[:9]]
CASES["no 4-gram"] = backwards, TEXT[:9]
CASES["short lines"] = [line[:9] for line in TEXT], [line[:11] for line in TEXT]
CASES["empty lines"] = emptied(noisy(TEXT, 4), 3), emptied(TEXT, 5)
# Perl splits bytes at ASCII spaces, of which these are some ...
spaced = joined_by(noisy(TEXT, 5), 5, "\t", "  ", "\v", "\f", "\r", " \t ")
CASES["ASCII spaces"] = (
    [f" {line}\t " for line in spaced],
    [f"{line}  " for line in joined_by(TEXT, 6, "  ", "\t")],
)
# ... and these are none, though Python takes them for spaces.
CASES["other spaces"] = noisy(ODD, 8), ODD
# A to Z only: É stays.
capitals = str.maketrans("aeo", "ÁEO")
CASES["lower case"] = (
    [line.translate(capitals) for line in noisy(TEXT, 9)],
    [line.replace("a", "Á") for line in TEXT],
)
CASES["compounds"] = CASES["hyphens as they are"] = WITH_MORE_HYPHENS, WITH_HYPHENS
SETTINGS = {"lower case": {"lowercase": True}, "compounds": {"compound_split": True}}

#: What multi-bleu.perl prints for them (moses-smt/mosesdecoder, scripts/generic/multi-bleu.perl as
#: of commit 31473d88, perl 5.36; "lower case" with -lc; "compounds" after `perl -ple
#: 's{(\S)-(\S)}{$1 ##AT##-##AT## $2}g'` of both texts).
GOLDEN = {
    "shorter": "BLEU = 41.94, 100.0/62.9/44.6/32.5 (BP=0.764, ratio=0.788, hyp_len=3962, "
    "ref_len=5030)",
    "longer": "BLEU = 42.57, 76.4/57.0/34.9/21.6 (BP=1.000, ratio=1.309, hyp_len=6585, "
    "ref_len=5030)",
    "equal": "BLEU = 100.00, 100.0/100.0/100.0/100.0 (BP=1.000, ratio=1.000, hyp_len=5030, "
    "ref_len=5030)",
    "one line": "BLEU = 66.87, 87.5/85.7/66.7/40.0 (BP=1.000, ratio=1.143, hyp_len=8, ref_len=7)",
    "no 4-gram": "BLEU = 0.00, 100.0/1.0/0.0/0.0 (BP=1.000, ratio=1.000, hyp_len=201, ref_len=201)",
    "short lines": "BLEU = 0.00, 73.2/50.6/13.6/0.0 (BP=0.827, ratio=0.840, hyp_len=437, "
    "ref_len=520)",
    "empty lines": "BLEU = 34.83, 73.8/50.2/36.4/26.8 (BP=0.799, ratio=0.817, hyp_len=3323, "
    "ref_len=4069)",
    "ASCII spaces": "BLEU = 53.48, 91.6/62.7/45.2/33.0 (BP=0.989, ratio=0.989, hyp_len=4975, "
    "ref_len=5030)",
    "other spaces": "BLEU = 53.56, 90.7/62.4/45.2/32.5 (BP=0.997, ratio=0.997, hyp_len=3923, "
    "ref_len=3933)",
    "lower case": "BLEU = 51.41, 90.8/60.7/43.2/30.7 (BP=0.988, ratio=0.988, hyp_len=4972, "
    "ref_len=5030)",
    "compounds": "BLEU = 50.12, 81.9/57.0/42.6/31.7 (BP=1.000, ratio=1.081, hyp_len=7077, "
    "ref_len=6548)",
    "hyphens as they are": "BLEU = 36.58, 80.2/47.8/29.9/18.7 (BP=0.955, ratio=0.956, "
    "hyp_len=4639, ref_len=4852)",
}


@pytest.mark.parametrize("name", CASES)
def test_tokenized_bleu_is_what_multi_bleu_printed(name):
    found = score("tokenized", *CASES[name], **SETTINGS.get(name, {}))
    verbose = re.sub(" (?=ratio|hyp_len|ref_len)", ", ", found.verbose.replace(" = ", "="))
    assert f"BLEU = {found.score:.2f}, {verbose}" == GOLDEN[name]


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
    with pytest.raises(UserError, match="b: 1 line, but the reference has 2"):
        paired_bootstrap({"a": ["x", "y"], "b": ["x"]}, ["x", "y"], metric_of(metric))


def sacrebleu_says(*arguments) -> list[dict]:
    words = ("-m", "sacrebleu", *arguments, "-f", "json", "-w", 8)
    return json.loads(run(sys.executable, *words).stdout)


def test_scores_of_plain_text_are_those_of_sacrebleus_command(tmp_path):
    references = reference()[:LINES]
    hypotheses = [line.upper() for line in noisy(references, 12)]
    files = text_file(tmp_path / "ref", references), "-i", text_file(tmp_path / "hyp", hypotheses)
    expected = sacrebleu_says(*files, "-m", "bleu", "chrf", "ter", "-lc", "--chrf-lowercase")
    for metric, line in zip(PLAIN, expected, strict=True):
        found = score(metric, hypotheses, references, lowercase=True)
        assert found.score == pytest.approx(line["score"], abs=1e-7)
        assert found.signature == line["signature"]
        if metric == "detokenized":
            assert found.verbose == line["verbose_score"]
            with_case = score(metric, hypotheses, references)
            assert with_case.score < found.score, "case counts unless lowercase is set"


def test_the_tokenizer_is_that_of_the_language():
    lines = ["这是一个测试。", "你好，世界！"]
    for target in ("zh", "zho_Hans"):
        assert "tok:zh" in score("detokenized", lines, lines, target=target).signature
    with pytest.raises(UserError, match="'ja'"):
        score("detokenized", lines, lines, target="ja")


def test_paired_bootstrap_is_sacrebleus(tmp_path):
    """The command line of sacrebleu, with the same seed, finds the same."""
    systems = {
        "a": noisy(reference(), 13),
        "b": noisy(reference(), 14, swap=0.1),
        "c": noisy(reference(), 15, swap=0.2),
    }
    files = [text_file(tmp_path / name, lines) for name, lines in systems.items()]
    command = [text_file(tmp_path / "ref", reference()), "-i", *files]
    command += "--paired-bs --paired-bs-n 300 -m bleu chrf -f latex -w 6".split()
    table = run(sys.executable, "-m", "sacrebleu", *command).stdout
    # Of each metric: score (mean ± interval), and of the two systems (p = ...)
    body = table.partition(r"\midrule")[2].splitlines()
    rows = [re.findall(r"\d+\.\d+", line) for line in body[1:4]]
    assert [len(row) for row in rows] == [6, 8, 8]
    for place, metric in enumerate(("detokenized", "chrf")):
        found = paired_bootstrap(systems, reference(), metric_of(metric), 300)
        assert found.signature in table and "bs:300|seed:12345" in found.signature
        for result, row in zip(found.results.values(), rows, strict=True):
            half = len(row) // 2
            printed = [float(number) for number in row[place * half :][:half]]
            values = [result.score, result.mean, result.ci]
            assert values == pytest.approx(printed[:3], abs=1e-6)
            if result.p_value is not None:
                values.append(round(result.p_value, 4))
            assert values[3:] == printed[3:]
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
    differences, scores = [], []
    for draw in draws:
        drawn = [references[i] for i in draw]
        a = bleu([texts["a"][i] for i in draw], drawn)
        b = bleu([texts["b"][i] for i in draw], drawn)
        scores.append(b)
        differences.append(abs(b - a))
    real = abs(bleu(texts["b"], references) - bleu(texts["a"], references))
    result = found.results["b"]
    scores.sort()
    assert result.mean == pytest.approx(numpy.mean(scores), abs=1e-3)
    assert result.ci == pytest.approx((scores[-2] - scores[1]) / 2, abs=1e-3)
    larger = sum(differences - numpy.mean(differences) > real)
    assert result.p_value == (larger + 1) / (resamples + 1)
    assert 0 < result.p_value < 1


def test_the_same_translations_do_not_differ():
    """sacrebleu's formula gives its smallest p here."""
    references = reference()[:LINES]
    lines = noisy(references, 18)
    systems = {"a": lines, "other": noisy(references, 19), "same": lines}
    for metric in METRICS:
        found = paired_bootstrap(systems, references, metric_of(metric), 20)
        assert found.results["same"].p_value == 1 and found.results["other"].p_value < 1


def test_any_text_is_scored(tmp_path, capsys):
    texts = {"ref": reference()[:30], "b": noisy(reference()[:30], 1)}
    ref, hyp = (text_file(tmp_path / name, lines) for name, lines in texts.items())
    words = ("--hyp", hyp, "--ref", ref)
    assert main(words) == 0
    printed = capsys.readouterr().out.splitlines()
    for metric, line in zip(PLAIN, printed, strict=True):
        expected = score(metric, texts["b"], texts["ref"])
        assert line.startswith(METRICS[metric].title)
        assert f"|{expected.signature} = {expected.score:.2f}" in line
        assert "detok:" not in line, "nothing was detokenized"
    assert main([*words, "--tokenized"]) == 0
    expected = score("tokenized", texts["b"], texts["ref"])
    assert f"= {expected.score:.2f} " in capsys.readouterr().out
    assert main([*words, "--tokenized", "--lowercase", "--compound-split"]) == 0
    printed = capsys.readouterr().out
    assert "case:lc[ascii]|" in printed and "compounds:split" in printed


#: A hypothesis, options, and what is said of it beside the references "A man sees it."
LOOKS = """
A man , who sees &apos; it . |  | the hypotheses look tokenized
Ein Mann , der sieht . |  | the hypotheses look tokenized
A m@@ an sees it. |  | the hypotheses hold subwords
A m@@ an sees it . | --tokenized | the hypotheses hold subwords
\u2581A \u2581man |  | the hypotheses hold subwords
A man sees it. |  | the hypotheses are the references
A man, who sees it, comes at 5 p.m. |  | nothing
Vois-tu ? Oui ! |  | nothing
A man sees it . | --tokenized | nothing
a man sees it . | --tokenized | the references are not: add --lowercase
a man, who sees it, comes. |  | the hypotheses are lower-cased, and \
the references are not: add --lowercase
a man, who sees it, comes. | --lowercase | nothing
3.14 |  | nothing
"""


@pytest.mark.parametrize(("hypothesis", "options", "warning"), rows(LOOKS))
def test_text_that_is_not_what_is_scored_warns(hypothesis, options, warning, tmp_path, capsys):
    texts = {"hyp": [hypothesis] * 9, "ref": ["A man sees it."] * 9}
    hypotheses, references = (text_file(tmp_path / name, lines) for name, lines in texts.items())
    assert main(["--hyp", hypotheses, "--ref", references, *options.split()]) == 0
    said = [line for line in capsys.readouterr().err.splitlines() if "below 1" not in line]
    if warning == "nothing":
        assert not said
    else:
        (line,) = said
        assert warning in line


def test_several_references_are_those_of_sacrebleu(tmp_path, capsys):
    texts = {name: noisy(reference()[:30], seed) for seed, name in enumerate(("hyp", "one", "two"))}
    hyp, one, two = (text_file(tmp_path / name, lines) for name, lines in texts.items())
    words = ("--hyp", hyp, "--ref", one, two)
    assert main(words) == 0
    lines = capsys.readouterr().out.splitlines()
    expected = sacrebleu_says(one, two, "-i", hyp, "-m", "bleu", "chrf", "ter")
    for line, says in zip(lines, expected, strict=True):
        assert f"|{says['signature']} = {says['score']:.2f}" in line
        assert "nrefs:2" in line
    for file in (one, two):
        file.write_text("a m@@ an\n" * 30)
    assert main(words) == 0
    assert capsys.readouterr().err.count("the references hold subwords") == 1
    two.write_text("a\n")
    for wrong in (words, ("--hyp", two, "--ref", one)):
        refused(capsys, main(wrong), "two: 1 line, but", "one has 30")
