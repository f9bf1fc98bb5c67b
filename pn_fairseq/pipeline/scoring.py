"""Scores of translations: BLEU on tokens and on plain text, chrF, and the significance of a difference.

The folder of one decoding (``RUN/generate/SUBSET``) holds, line for line:

``hyp.tok``, ``ref.tok``
    hypothesis and reference in the form of the model's data: tokens (lower-cased or not), subwords joined.
``hyp.txt``, ``ref.txt``
    plain text: the detokenized hypothesis, and the reference before any preparation.
``scores.json``, ``scores.txt``
    the results of :func:`score_run`, for programs and for people.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from unittest import mock

import sacremoses
from sacrebleu.metrics import BLEU, CHRF
from sacrebleu.significance import PairedTest, Result

from pn_fairseq.common.command import UserError
from pn_fairseq.common.files import read_settings, recorded, write_settings
from pn_fairseq.pipeline.data.binarize import sentences as indexed
from pn_fairseq.pipeline.generate import hypotheses, texts_of, write_lines
from pn_fairseq.pipeline.runs import Run, open_run

#: Score -> its title, in the order in which they are shown.
METRICS = {"tokenized": "tokenized BLEU", "detokenized": "detokenized BLEU", "chrf": "chrF"}

#: Default resamples and seed of the paired bootstrap, as in sacrebleu.
RESAMPLES = 1000
SEED = 12345


class ScoringError(UserError, ValueError):
    """Texts or scores that cannot be used."""


@dataclass(frozen=True)
class Score:
    """One corpus score.

    In the signature ``detok:`` names the detokenizer of the hypotheses (:func:`detokenize`); ``ref:detok`` means that
    the references were detokenized by it as well.
    """

    score: float  # from 0 to 100
    signature: str  # how it was computed, in sacrebleu's notation
    verbose: str  # precisions (BP = ... ratio = ... hyp_len = ... ref_len = ...); empty for chrF
    compound_split: bool = False  # whether words with hyphens were split (split_compounds)


@dataclass(frozen=True)
class Scores:
    """All scores of one decoded subset."""

    subset: str
    sentences: int
    tokenized: Score
    detokenized: Score
    chrf: Score
    lowercase: bool  # plain text was scored without case, because the model's data is lower-cased
    target: str  # language


@dataclass(frozen=True)
class Comparison:
    """The result of :func:`paired_bootstrap`: a metric's signature, and one result for the name of each system.

    A result has the ``score`` on the whole text, the ``mean`` of the scores over the resamples, half the width ``ci``
    of their 95% confidence interval, and ``p_value`` of no difference from the baseline, which is the first system and
    has no p. p is 1 if every resample gives both systems the same score.
    """

    signature: str
    resamples: int
    seed: int
    results: dict[str, Result]


def score_lines(scores: Mapping[str, Score]) -> str:
    """A line for each metric: title, signature, score, parts."""
    lines = []
    for metric, found in scores.items():
        name = "chrF2" if metric == "chrf" else "BLEU"
        lines.append(f"{METRICS[metric] + ':':17} {name}|{found.signature} = {found.score:.2f} {found.verbose}")
    return "".join(f"{line.rstrip()}\n" for line in lines)


def low_bleu(bleu: float) -> str | None:
    """A warning if BLEU is so low that it says little about a model."""
    if bleu >= 1:
        return None
    return (
        f"BLEU is {bleu:.2f}, below 1: the model has hardly learned to translate, or hypotheses and references do not "
        "belong together"
    )


def p_text(p: float) -> str:
    """A p-value as it is printed everywhere."""
    return "p < 0.001" if p < 0.001 else f"p = {p:.3f}"


#: Spaces for str.split() that are no spaces for Perl's split -> private characters that stand for them.
_NO_SPACES_IN_PERL = {
    code: chr(0xF0000 + code)
    for code in range(sys.maxunicode + 1)
    if chr(code).isspace() and chr(code) not in " \t\n\r\v\f"
}


def split_compounds(line: str) -> str:
    """Words with hyphens in parts, as in the WMT14 scores of the literature.

    Perl's ``s{(\\S)-(\\S)}{$1 ##AT##-##AT## $2}g``, from fairseq's ``scripts/compound_split_bleu.sh``. As Perl reads
    without ``-C``, ``\\S`` is a byte of UTF-8, and matches do not overlap: ``a-b-c`` becomes ``a ##AT##-##AT## b-c``,
    but ``a-é-c``, whose middle has two bytes, is split at both hyphens.
    """
    return re.sub(rb"(\S)-(\S)", rb"\1 ##AT##-##AT## \2", line.encode()).decode()


class _Metric:
    """One of :data:`METRICS`: sacrebleu's object, the text in the form that it expects, and their common signature."""

    def __init__(self, metric: str, lowercase: bool = False, compound_split: bool = False, target: str = ""):
        if metric not in METRICS:
            raise ScoringError(f"unknown metric '{metric}'; known: {', '.join(METRICS)}")
        self.tokenized, self.lowercase, self.compound_split = metric == "tokenized", lowercase, compound_split
        try:
            self.sacrebleu = {
                "tokenized": lambda: BLEU(tokenize="none", smooth_method="none", force=True),
                "detokenized": lambda: BLEU(lowercase=lowercase, trg_lang=target, force=True),
                "chrf": lambda: CHRF(lowercase=lowercase),
            }[metric]()
        except (ImportError, RuntimeError) as error:
            # The tokenizers of Japanese and Korean are separate packages.
            raise ScoringError(f"sacrebleu cannot tokenize '{target}': {' '.join(str(error).split())}") from error

    def text(self, lines: Iterable[str]) -> list[str]:
        if not self.tokenized:
            return list(lines)
        # str.split has to cut where Perl cuts bytes, at ASCII spaces only, and to lower-case A to Z only.
        lines = (split_compounds(line) if self.compound_split else line for line in lines)
        lines = (line.encode().lower().decode() if self.lowercase else line for line in lines)
        return [line.translate(_NO_SPACES_IN_PERL) for line in lines]

    def signature(self, sacrebleu_signature) -> str:
        if self.tokenized and self.lowercase:
            sacrebleu_signature.update("case", "lc[ascii]")
        if self.tokenized and self.compound_split:
            sacrebleu_signature.update("compounds", "split")
        return str(sacrebleu_signature)


def score(metric: str, hypotheses: Sequence[str], references: Sequence[str], **settings) -> Score:
    """Score a text.

    Args:
        metric: ``tokenized``, BLEU (Papineni et al. 2002) of tokens: ``BP * exp(mean of log p_n, n = 1..4)`` without
            smoothing; 0 if no n-gram of some order matches. Equal to Moses' ``multi-bleu.perl`` (with ``lowercase``,
            ``multi-bleu.perl -lc``, which lower-cases A to Z only) for texts whose last line ends in a newline: tokens
            are separated by ASCII spaces. Or ``detokenized``, sacreBLEU (Post 2018) of plain text. Or ``chrf``,
            chrF2 (Popović 2015) of plain text: F-score of character n-grams up to 6, in which recall counts twice.
        hypotheses, references: a line for each sentence.
        settings: ``lowercase``: ignore case. ``compound_split``: :func:`split_compounds` of both (``tokenized`` only).
            ``target``: the language, which chooses sacrebleu's tokenizer (``detokenized`` only; 13a for most).

    Raises:
        ScoringError: the texts have different numbers of lines, or none; or sacrebleu lacks the language's tokenizer.
    """
    scorer = _Metric(metric, **settings)
    _check_same_length({"hypotheses": hypotheses}, references)
    result = scorer.sacrebleu.corpus_score(scorer.text(hypotheses), [scorer.text(references)])
    signature = scorer.signature(scorer.sacrebleu.get_signature())
    return Score(float(result.score), signature, result._verbose, scorer.compound_split)


#: Languages in which “ and ‘ close a quotation (and „ opens it), instead of opening it.
_LOW_OPENING_QUOTES = frozenset("bg cs da de et hr is lt mk sk sl sq sr".split())

#: sacremoses joins these marks alternately to the next and to the previous word, though each has one side. They are
#: replaced by characters that occur in no text and that sacremoses leaves unchanged.
_ALTERNATING_QUOTES = "„“"
_HIDDEN_QUOTES = "\ufdd0\ufdd1"

#: The name of :func:`detokenize` in signatures.
DETOKENIZER = f"sacremoses-{sacremoses.__version__}+quotes"


def detokenize(lines: Iterable[str], language: str) -> list[str]:
    """Plain text of Moses-style tokens: sacremoses' detokenizer, and rules of this project for typographic quotes.

    sacremoses leaves typographic quotation marks and apostrophes apart from their words, or joins them to the wrong
    words; the rules join them to the right ones. If a text has such marks, detokenized BLEU and chrF therefore differ
    from ``sacremoses detokenize | sacrebleu``. The references of the verses, tokenized and detokenized, score 99.8
    against the raw text with the rules, and 95.0 without.
    """
    detokenizer = sacremoses.MosesDetokenizer(lang=language)
    hide = str.maketrans(_ALTERNATING_QUOTES, _HIDDEN_QUOTES)
    show = str.maketrans(_HIDDEN_QUOTES, _ALTERNATING_QUOTES)
    opening, closing = ("„‚", "“”‘") if language in _LOW_OPENING_QUOTES else ("“‘", "”’")
    rules = (
        (re.compile(r" ’ (s|t|d|m|re|ve|ll)\b"), r"’\1"),
        (re.compile(f"([{opening}]) "), r"\1"),
        (re.compile(f" ([{closing}])"), r"\1"),
    )
    result = []
    for line in lines:
        text = detokenizer.detokenize(line.translate(hide).split()).translate(show)
        for pattern, replacement in rules:
            text = pattern.sub(replacement, text)
        result.append(text)
    return result


def read_lines(path: str | Path) -> list[str]:
    """The lines of a UTF-8 file, cut at line feeds only; the last line may lack one."""
    try:
        text = Path(path).read_bytes().decode("utf-8")
    except UnicodeDecodeError as error:
        raise ScoringError(f"{path} is not UTF-8 (byte {error.start})") from error
    return text.removesuffix("\n").split("\n") if text else []


def _check_same_length(texts: Mapping[str, Sequence[str]], reference: Sequence[str], name: str = "the reference"):
    for text, lines in texts.items():
        if len(lines) != len(reference):
            raise ScoringError(f"{text}: {len(lines)} lines, but {name} has {len(reference)}: sentences were lost")
    if not reference:
        raise ScoringError("there is no sentence to score")


def results_of_fairseq(run: Path, subset: str) -> Path | None:
    """The file that ``fairseq-generate --results-path RUN`` (or ``RUN/checkpoints``) wrote, if there is one."""
    paths = (folder / f"generate-{subset}.txt" for folder in (run, run / "checkpoints"))
    return next((path for path in paths if path.is_file()), None)


def _import_results(results: Path, run: Run, subset: str, folder: Path) -> None:
    """Write ``hyp.tok`` and ``ref.tok`` from the output of fairseq-generate.

    Raises:
        ScoringError: a sentence of the subset has no hypothesis or no reference, or the hypotheses are subwords.
    """
    index = next(run.bin.glob(f"{subset}.*.idx"), None)
    if index is None:
        raise ScoringError(f"'{run.bin}' has no subset '{subset}'")
    try:
        lines = read_lines(results)
        best = [options[0][1] for options in hypotheses(lines, indexed(index), nbest=sys.maxsize)]
        references = texts_of(lines, "T", len(best))
    except UserError as error:
        raise ScoringError(f"{results}: {error}; decode with --required-batch-size-multiple 1") from error
    except KeyError as error:
        raise ScoringError(f"{results} has no reference (T-) of sentence {error}") from error
    if any("@@ " in line or "\u2581" in line for line in best):
        raise ScoringError(f"{results} has subwords: run fairseq-generate with --remove-bpe")
    if run.data:  # fairseq prints <<unk>> for words of the reference that are not in its dictionary
        references = read_lines(run.data / "tok" / f"{subset}.{run.settings()['target']}")
    folder.mkdir(parents=True, exist_ok=True)
    write_lines(folder / "ref.tok", references)
    write_settings(folder / "made.txt", {"results": results.name})
    write_lines(folder / "hyp.tok", best)


def score_run(
    path: Path, subset: str | None = None, output: Path | None = None, compound_split: bool | None = None
) -> Scores:
    """Detokenize a run's hypotheses, compute all scores, and write plain text and scores into their folder.

    Args:
        path, subset, output: the options of pn score.
        compound_split: for the tokenized BLEU (default: as the data was prepared).

    Raises:
        UserError: something is missing, or the line counts differ; no score is written then.
    """
    run, subset = open_run(path, same_data=True), subset or "test"
    folder = output or path / "generate" / subset
    decoded, mark = folder / "hyp.tok", recorded(folder, "made")
    imported = mark.is_file() and "results" in read_settings(mark)
    if (results := results_of_fairseq(path, subset)) and (imported or not decoded.is_file()):
        _import_results(results, run, subset, folder)
    if not decoded.is_file():
        raise ScoringError(f"there is no '{decoded}' (pn generate writes it)")
    settings = run.settings()
    target, lowercase = settings["target"], settings.get("lower") == "1"
    if compound_split is None:
        compound_split = settings.get("compound_split") == "1"
    translated, tokens = (read_lines(folder / f"{kind}.tok") for kind in ("hyp", "ref"))
    _check_same_length({str(decoded): translated}, tokens, str(folder / "ref.tok"))
    # If the text before any preparation is not known, detokenized references replace it.
    raw = run.data / "raw" / f"{subset}.{target}" if run.data else None
    plain = read_lines(raw) if raw else detokenize(tokens, target)
    _check_same_length({str(decoded): translated}, plain, str(raw))
    translations = detokenize(translated, target)
    note = f"|detok:{DETOKENIZER}{'' if raw else '|ref:detok'}"

    def of_plain_text(metric: str, **settings) -> Score:
        found = score(metric, translations, plain, lowercase=lowercase, **settings)
        return replace(found, signature=found.signature + note)

    scores = Scores(
        subset=subset,
        sentences=len(translated),
        tokenized=score("tokenized", translated, tokens, compound_split=compound_split),
        detokenized=of_plain_text("detokenized", target=target),
        chrf=of_plain_text("chrf"),
        lowercase=lowercase,
        target=target,
    )
    write_lines(folder / "ref.txt", plain)
    write_lines(folder / "hyp.txt", translations)
    lines = score_lines({metric: getattr(scores, metric) for metric in METRICS})
    write_lines(folder / "scores.txt", lines.splitlines())
    # Written last: if this file exists, the others exist as well.
    write_lines(folder / "scores.json", [json.dumps(asdict(scores), indent=2)])
    return scores


def is_scored(run: Path, subset: str) -> bool:
    """Whether ``scores.json`` is there, and newer than the hypotheses."""
    folder = run / "generate" / subset
    scores, decoded = folder / "scores.json", (folder / "hyp.tok", results_of_fairseq(run, subset))
    times = [path.stat().st_mtime_ns for path in decoded if path and path.is_file()]
    return scores.is_file() and max(times, default=0) <= scores.stat().st_mtime_ns


def read_scores(folder: str | Path) -> Scores:
    """The scores that :func:`score_run` wrote into ``folder``."""
    path = Path(folder) / "scores.json"
    if not path.is_file():
        raise ScoringError(f"there is no '{path}' (pn score writes it)")
    try:
        values = json.loads("\n".join(read_lines(path)))
        return Scores(**values | {metric: Score(**values[metric]) for metric in METRICS})
    except (KeyError, TypeError, ValueError) as error:
        raise ScoringError(f"{path} is not a file of pn score ({error}); score the run again") from error


def paired_bootstrap(
    systems: Mapping[str, Sequence[str]],
    reference: Sequence[str],
    *,
    metric: str = "detokenized",
    resamples: int = RESAMPLES,
    seed: int = SEED,
    **settings,
) -> Comparison:
    """Test whether each system differs from the first, the baseline, by more than the choice of test sentences.

    Paired bootstrap resampling (Koehn 2004, "Statistical significance tests for machine translation evaluation") by
    sacrebleu's ``PairedTest``: the same resampled sets of sentences for both. With the difference ``d`` of scores on
    the whole text, and ``d_b`` on the b-th set, ``p = (1 + #{b: |d_b| - mean(|d_b|) > |d|}) / (1 + resamples)``. If
    ``d`` is large compared with the spread of ``d_b``, this is the area under one tail: a two-sided p would be twice as
    large. If ``d`` is 0, p is about 0.42, and not 1. The test does not cover the variation over training seeds. It
    needs about 80 bytes of memory for each sentence and resample.

    Args:
        systems: name -> hypotheses; the baseline first.
        reference, metric, settings: as for :func:`score`.
        resamples: number of resampled sets.
        seed: seed of the resampling, at least 1 (0 means no seed to sacrebleu).
    """
    _check_same_length(systems, reference)
    scorer = _Metric(metric, **settings)
    named = [(name, scorer.text(lines)) for name, lines in systems.items()]
    # sacrebleu takes the seed of its tests from the environment.
    with mock.patch.dict(os.environ, SACREBLEU_SEED=str(seed)):
        test = PairedTest(named, {metric: scorer.sacrebleu}, [scorer.text(reference)], "bs", n_samples=resamples)
        signatures, table = test()
    ((key, signature),) = signatures.items()
    results = table[key]
    for result in results[1:]:
        # If no resample makes a difference, sacrebleu's formula gives its smallest p.
        if (result.score, result.mean, result.ci) == (results[0].score, results[0].mean, results[0].ci):
            result.p_value = 1.0
    return Comparison(scorer.signature(signature), resamples, seed, dict(zip(systems, results, strict=True)))


def compare_folders(folders: Mapping[str, str | Path], **bootstrap) -> dict[str, Comparison]:
    """:func:`paired_bootstrap` for decodings that :func:`score_run` has scored, by all :data:`METRICS`.

    ``folders`` maps the name of a system to its folder, the baseline first. All systems must have translated the same
    text and be scored in the same way.
    """
    folders = {name: Path(folder) for name, folder in folders.items()}
    scores = {name: read_scores(folder) for name, folder in folders.items()}
    first, expected = next(iter(scores.items()))
    for name, mine in scores.items():
        for kind in ("ref.tok", "ref.txt"):
            if (folders[name] / kind).read_bytes() != (folders[first] / kind).read_bytes():
                raise ScoringError(
                    f"{first} and {name} translate different text ({kind} in {folders[first]} and {folders[name]})"
                )
        for metric in METRICS:
            if (usual := getattr(expected, metric).signature) != (other := getattr(mine, metric).signature):
                raise ScoringError(f"{first} and {name} were scored in different ways: {usual} and {other}")
    settings = {
        "tokenized": {"compound_split": expected.tokenized.compound_split},
        "detokenized": {"lowercase": expected.lowercase, "target": expected.target},
        "chrf": {"lowercase": expected.lowercase},
    }
    comparisons = {}
    for metric, of_metric in settings.items():
        kind = "tok" if metric == "tokenized" else "txt"
        systems = {name: read_lines(folder / f"hyp.{kind}") for name, folder in folders.items()}
        reference = read_lines(folders[first] / f"ref.{kind}")
        comparison = paired_bootstrap(systems, reference, metric=metric, **bootstrap, **of_metric)
        # The detokenizer is named as in the scores.
        note = "".join(re.findall(r"\|(?:detok|ref):[^|]*", getattr(expected, metric).signature))
        comparisons[metric] = replace(comparison, signature=comparison.signature + note)
    return comparisons
