"""Scores of translations: BLEU on tokens and on plain text, chrF, and the significance of a difference.

The folder of one decoding (``RUN/generate/SUBSET``) holds, line for line:

``hyp.tok``, ``ref.tok``
    hypothesis and reference as the model's data has them: tokens (lower-cased or not), subwords joined.
``hyp.txt``, ``ref.txt``
    the same as plain text: the hypothesis detokenized, the reference as it was before any preparation.
``scores.json``, ``scores.txt``
    what :func:`score_run` computed, for programs and for people.
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
from pn_fairseq.common.files import atomic_write
from pn_fairseq.pipeline.runs import open_run

#: Score -> its title, in the order in which they are shown.
METRICS = {"tokenized": "tokenized BLEU", "detokenized": "detokenized BLEU", "chrf": "chrF"}

#: Default resamples and seed of the paired bootstrap, those of sacrebleu.
RESAMPLES = 1000
SEED = 12345


class ScoringError(UserError, ValueError):
    """Texts or scores that cannot be used; the message is one line that says what, where and what to do."""


@dataclass(frozen=True)
class Score:
    """One corpus score.

    In the signature ``detok:`` names what made plain text of the hypotheses (:func:`detokenize`), and ``ref:detok``
    says that it made the references, too.
    """

    score: float  # from 0 to 100
    signature: str  # how it was computed, in sacrebleu's notation
    verbose: str  # precisions (BP = ... ratio = ... hyp_len = ... ref_len = ...); empty for chrF


@dataclass(frozen=True)
class TokenizedScore(Score):
    """BLEU on tokens; ``compound_split``: whether words with hyphens were split (:func:`split_compounds`)."""

    compound_split: bool


@dataclass(frozen=True)
class Scores:
    """All scores of one decoded subset."""

    subset: str
    sentences: int
    tokenized: TokenizedScore
    detokenized: Score
    chrf: Score
    lowercase: bool  # plain text was scored without case, since the model's data has none
    target: str  # language


@dataclass(frozen=True)
class Comparison:
    """What :func:`paired_bootstrap` found: a metric's signature, and results by the name of the system.

    A result has the ``score`` on the whole text, the ``mean`` of the scores over the resamples, half the width ``ci``
    of their 95% confidence interval, and ``p_value`` of no difference from the baseline, which comes first and has no
    p. p is 1 where every resample gives both systems the same score.
    """

    signature: str
    resamples: int
    seed: int
    results: dict[str, Result]


def score_lines(scores: Mapping[str, Score]) -> str:
    """A line for each metric: title, signature, score, parts."""
    return "".join(
        f"{METRICS[metric] + ':':17} {'chrF2' if metric == 'chrf' else 'BLEU'}|{one.signature} = {one.score:.2f} "
        f"{one.verbose}".rstrip()
        + "\n"
        for metric, one in scores.items()
    )


def low_bleu(bleu: float) -> str | None:
    """A warning where BLEU is so low that it says little about a model."""
    if bleu >= 1:
        return None
    return (
        f"BLEU is {bleu:.2f}, below 1: the model has hardly learned to translate, or hypotheses and references do not "
        "belong together"
    )


def p_text(p: float) -> str:
    """A p-value as it is printed everywhere."""
    return "p < 0.001" if p < 0.001 else f"p = {p:.3f}"


#: What str.split() takes for a space and Perl's split does not. The stand-ins are private characters, one for each.
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
    """One of :data:`METRICS`: sacrebleu's object, the text as it takes it, and the signature of the two together."""

    def __init__(self, metric: str, lowercase: bool = False, compound_split: bool = False, target: str = ""):
        if metric not in METRICS:
            raise ScoringError(f"unknown metric '{metric}': one of {', '.join(METRICS)}")
        self.tokenized, self.lowercase, self.compound_split = metric == "tokenized", lowercase, compound_split
        if self.tokenized:
            self.sacrebleu = BLEU(tokenize="none", smooth_method="none", force=True)
        elif metric == "detokenized":
            try:
                self.sacrebleu = BLEU(lowercase=lowercase, trg_lang=target, force=True)
            except (ImportError, RuntimeError) as error:
                # The tokenizers of Japanese and Korean are packages of their own.
                raise ScoringError(f"sacrebleu cannot tokenize '{target}': {' '.join(str(error).split())}") from error
        else:
            self.sacrebleu = CHRF(lowercase=lowercase)

    def text(self, lines: Iterable[str]) -> list[str]:
        if not self.tokenized:
            return list(lines)
        # str.split is to cut where Perl cuts bytes, at ASCII spaces only, and to lower-case A to Z only.
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
            smoothing; 0 where no n-gram of some order matches. Equal to Moses' ``multi-bleu.perl`` (with ``lowercase``,
            ``multi-bleu.perl -lc``, which lower-cases A to Z only) for texts whose last line ends in a newline: tokens
            are what stands between ASCII spaces. Or ``detokenized``, sacreBLEU (Post 2018) of plain text. Or ``chrf``,
            chrF2 (Popović 2015) of plain text: F-score of character n-grams up to 6, where recall counts twice.
        hypotheses, references: a line for each sentence.
        settings: ``lowercase``: ignore case. ``compound_split``: :func:`split_compounds` of both (``tokenized`` only).
            ``target``: the language, which chooses sacrebleu's tokenizer (``detokenized`` only; 13a for most).

    Raises:
        ScoringError: the texts have different numbers of lines, or none; or sacrebleu lacks the language's tokenizer.
    """
    one = _Metric(metric, **settings)
    _check_same_length({"hypotheses": hypotheses}, references)
    result = one.sacrebleu.corpus_score(one.text(hypotheses), [one.text(references)])
    return Score(float(result.score), one.signature(one.sacrebleu.get_signature()), result._verbose)


#: Where “ and ‘ close a quotation (and „ opens it), instead of opening it.
_LOW_OPENING_QUOTES = frozenset("bg cs da de et hr is lt mk sk sl sq sr".split())

#: sacremoses joins these marks to the next and the previous word in turn, whatever their direction. They are replaced
#: by characters that occur in no text and that sacremoses leaves unchanged.
_QUOTES_IN_TURN = "„“"
_HIDDEN_QUOTES = "\ufdd0\ufdd1"

#: What :func:`detokenize` is called in signatures.
DETOKENIZER = f"sacremoses-{sacremoses.__version__}+quotes"


def detokenize(lines: Iterable[str], language: str) -> list[str]:
    """Plain text of Moses-style tokens: sacremoses' detokenizer, and rules of its own for typographic quotation marks.

    sacremoses leaves typographic quotation marks and apostrophes apart from their words, or joins them to the wrong
    ones; here they are joined. So detokenized BLEU and chrF are not those of ``sacremoses detokenize | sacrebleu``
    where a text has such marks: the verses' own references, tokenized and detokenized, score 99.8 against the raw text
    with these rules, and 95.0 without.
    """
    detokenizer = sacremoses.MosesDetokenizer(lang=language)
    hide = str.maketrans(_QUOTES_IN_TURN, _HIDDEN_QUOTES)
    show = str.maketrans(_HIDDEN_QUOTES, _QUOTES_IN_TURN)
    opening, closing = ("„‚", "“”‘") if language in _LOW_OPENING_QUOTES else ("“‘", "”’")
    joined = (
        (re.compile(r" ’ (s|t|d|m|re|ve|ll)\b"), r"’\1"),
        (re.compile(f"([{opening}]) "), r"\1"),
        (re.compile(f" ([{closing}])"), r"\1"),
    )
    result = []
    for line in lines:
        text = detokenizer.detokenize(line.translate(hide).split()).translate(show)
        for pattern, replacement in joined:
            text = pattern.sub(replacement, text)
        result.append(text)
    return result


def read_lines(path: str | Path) -> list[str]:
    """The lines of a UTF-8 file, cut at line feeds alone; a last line need not end in one."""
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


def score_run(
    path: Path, subset: str | None = None, output: Path | None = None, compound_split: bool | None = None
) -> Scores:
    """Detokenize a run's hypotheses, compute all scores, and write plain text and scores beside the hypotheses.

    Args:
        path, subset, output: as the options of scripts/score.sh.
        compound_split: for the tokenized BLEU (default: what the data was prepared for).

    Raises:
        UserError: something is missing, or the line counts differ; nothing is written then.
    """
    run, subset = open_run(path, same_data=True), subset or "test"
    folder = output or path / "generate" / subset
    if not (folder / "hyp.tok").is_file():
        raise ScoringError(f"there is no '{folder / 'hyp.tok'}' (scripts/generate.sh writes it)")
    settings = run.settings()
    target, lowercase = settings["target"], settings.get("lower") == "1"
    if compound_split is None:
        compound_split = settings.get("compound_split") == "1"
    hypotheses, tokens = (read_lines(folder / f"{kind}.tok") for kind in ("hyp", "ref"))
    _check_same_length({str(folder / "hyp.tok"): hypotheses}, tokens, str(folder / "ref.tok"))
    # Where the text before any preparation is not known, detokenized references stand in.
    raw = run.data / "raw" / f"{subset}.{target}" if run.data else None
    plain = read_lines(raw) if raw else detokenize(tokens, target)
    _check_same_length({str(folder / "hyp.tok"): hypotheses}, plain, str(raw))
    translations = detokenize(hypotheses, target)
    note = f"|detok:{DETOKENIZER}{'' if raw else '|ref:detok'}"

    def of_plain_text(metric: str, **settings) -> Score:
        found = score(metric, translations, plain, lowercase=lowercase, **settings)
        return Score(found.score, found.signature + note, found.verbose)

    tokenized = score("tokenized", hypotheses, tokens, compound_split=compound_split)
    scores = Scores(
        subset=subset,
        sentences=len(hypotheses),
        tokenized=TokenizedScore(**asdict(tokenized), compound_split=compound_split),
        detokenized=of_plain_text("detokenized", target=target),
        chrf=of_plain_text("chrf"),
        lowercase=lowercase,
        target=target,
    )
    files = {
        "ref.txt": "".join(f"{line}\n" for line in plain),
        "hyp.txt": "".join(f"{line}\n" for line in translations),
        "scores.txt": score_lines({metric: getattr(scores, metric) for metric in METRICS}),
        # Written last: where this file exists, the others exist, too.
        "scores.json": json.dumps(asdict(scores), indent=2) + "\n",
    }
    for name, text in files.items():
        with atomic_write(folder / name) as file:
            file.write(text.encode())
    return scores


def read_scores(folder: str | Path) -> Scores:
    """What :func:`score_run` wrote into ``folder``."""
    path = Path(folder) / "scores.json"
    if not path.is_file():
        raise ScoringError(f"there is no '{path}' (scripts/score.sh writes it)")
    try:
        found = json.loads("\n".join(read_lines(path)))
        scores = {metric: Score(**found[metric]) for metric in ("detokenized", "chrf")}
        return Scores(**found | scores | {"tokenized": TokenizedScore(**found["tokenized"])})
    except (KeyError, TypeError, ValueError) as error:
        raise ScoringError(f"{path} is not what scripts/score.sh writes ({error}); run it again") from error


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
    the whole text, and ``d_b`` on the b-th set, ``p = (1 + #{b: |d_b| - mean(|d_b|) > |d|}) / (1 + resamples)``. Where
    ``d`` is large beside the spread of ``d_b`` this is the area under one tail: two-sided, it would be twice as large.
    Where ``d`` is 0 it is about 0.42, and not 1. It says nothing about other training seeds. Needs about 80
    bytes of memory for each sentence and resample.

    Args:
        systems: name -> hypotheses; the baseline first.
        reference, metric, settings: as for :func:`score`.
        resamples: number of resampled sets.
        seed: of the resampling, at least 1 (sacrebleu takes 0 for none).
    """
    _check_same_length(systems, reference)
    one = _Metric(metric, **settings)
    named = [(name, one.text(hypotheses)) for name, hypotheses in systems.items()]
    # sacrebleu takes the seed of its tests from the environment.
    with mock.patch.dict(os.environ, SACREBLEU_SEED=str(seed)):
        test = PairedTest(named, {metric: one.sacrebleu}, [one.text(reference)], test_type="bs", n_samples=resamples)
        signatures, table = test()
    ((key, signature),) = signatures.items()
    results = table[key]
    for result in results[1:]:
        # Where no resample makes a difference, sacrebleu's formula gives its smallest p.
        if (result.score, result.mean, result.ci) == (results[0].score, results[0].mean, results[0].ci):
            result.p_value = 1.0
    return Comparison(one.signature(signature), resamples, seed, dict(zip(systems, results, strict=True)))


def compare_folders(folders: Mapping[str, str | Path], **bootstrap) -> dict[str, Comparison]:
    """:func:`paired_bootstrap` for decodings that :func:`score_run` has scored, by each of :data:`METRICS`.

    ``folders`` maps the name of a system to its folder, the baseline first. They must translate the same text, and be
    scored in the same way.
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
            if (one := getattr(expected, metric).signature) != (other := getattr(mine, metric).signature):
                raise ScoringError(f"{first} and {name} were scored in different ways: {one} and {other}")
    settings = {
        "tokenized": {"compound_split": expected.tokenized.compound_split},
        "detokenized": {"lowercase": expected.lowercase, "target": expected.target},
        "chrf": {"lowercase": expected.lowercase},
    }
    found = {}
    for metric, of_metric in settings.items():
        kind = "tok" if metric == "tokenized" else "txt"
        systems = {name: read_lines(folder / f"hyp.{kind}") for name, folder in folders.items()}
        reference = read_lines(folders[first] / f"ref.{kind}")
        one = paired_bootstrap(systems, reference, metric=metric, **bootstrap, **of_metric)
        # As in the scores: what made plain text.
        note = "".join(re.findall(r"\|(?:detok|ref):[^|]*", getattr(expected, metric).signature))
        found[metric] = replace(one, signature=one.signature + note)
    return found
