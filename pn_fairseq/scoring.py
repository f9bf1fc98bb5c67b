"""Scores of translations: BLEU on tokens and on plain text, chrF, and the significance of a difference.

A folder with the results of one decoding (``RUN/generate/SUBSET``) holds, line for line:

``hyp.tok``, ``ref.tok``
    hypothesis and reference as the model's data has them: tokens (lower-cased or not), subwords joined.
``hyp.txt``, ``ref.txt``
    the same as plain text: the hypothesis detokenized, the reference as it was before any preparation.
``scores.json``, ``scores.txt``
    what :func:`score_folder` computed, for programs and for people.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from sacrebleu.metrics import BLEU, CHRF
from sacrebleu.significance import PairedTest
from sacremoses import MosesDetokenizer

#: The scores that a decoding gets, in the order in which they are shown.
METRICS = ("tokenized", "detokenized", "chrf")

#: Resamples and seed of the paired bootstrap, unless told otherwise. sacrebleu's own defaults.
RESAMPLES = 1000
SEED = 12345


class ScoringError(ValueError):
    """Texts or scores that cannot be used; the message is one line that says what, where and what to do."""


@dataclass(frozen=True)
class Score:
    """One corpus score.

    Attributes:
        score: from 0 to 100.
        signature: how it was computed, in sacrebleu's notation.
        verbose: the parts of BLEU, ``precisions (BP = ... ratio = ... hyp_len = ... ref_len = ...)``; empty for chrF.
    """

    score: float
    signature: str
    verbose: str


@dataclass(frozen=True)
class TokenizedScore(Score):
    """BLEU on tokens as prepared.

    Attributes:
        compound_split: whether words with hyphens were split (:func:`split_compounds`).
    """

    compound_split: bool


@dataclass(frozen=True)
class Scores:
    """All scores of one decoded subset.

    Attributes:
        subset: its name, such as ``test``.
        sentences: how many it has.
        tokenized: BLEU on tokens, the paper's (:func:`tokenized_bleu`).
        detokenized: sacreBLEU on plain text (:func:`detokenized_bleu`).
        chrf: chrF on plain text (:func:`chrf`).
        lowercase: whether case was ignored in the two scores on plain text, since the model's data has no case.
        target: language of the translations.
    """

    subset: str
    sentences: int
    tokenized: TokenizedScore
    detokenized: Score
    chrf: Score
    lowercase: bool
    target: str

    def text(self) -> str:
        """Three lines for people."""
        named = (
            ("tokenized BLEU:  ", "BLEU", self.tokenized),
            ("detokenized BLEU:", "BLEU", self.detokenized),
            ("chrF:            ", "chrF2", self.chrf),
        )
        return "".join(
            f"{label} {name}|{score.signature} = {score.score:.2f} {score.verbose}".rstrip() + "\n"
            for label, name, score in named
        )


@dataclass(frozen=True)
class SystemResult:
    """One system in a comparison.

    Attributes:
        name: what the caller calls it.
        score: its score on the whole text.
        mean: the mean of its scores over the resamples.
        ci: half the width of the 95% confidence interval: the true score is in ``mean - ci .. mean + ci``.
        p_value: two-sided, of no difference from the baseline; None for the baseline itself; 1 where every resample
            gives both the same score.
    """

    name: str
    score: float
    mean: float
    ci: float
    p_value: float | None


@dataclass(frozen=True)
class Comparison:
    """What :func:`paired_bootstrap` found.

    Attributes:
        metric: ``tokenized``, ``detokenized`` or ``chrf``.
        signature: of the metric, with the number of resamples (``bs``) and the seed.
        resamples, seed: of the bootstrap.
        baseline: what the others are compared with.
        systems: the others, in the order they were given in.
    """

    metric: str
    signature: str
    resamples: int
    seed: int
    baseline: SystemResult
    systems: tuple[SystemResult, ...]


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


def _as_perl_splits(line: str, lowercase: bool) -> str:
    """``line`` such that ``str.split`` cuts it where Perl cuts bytes: at ASCII spaces only."""
    text = line.encode()
    if lowercase:
        text = text.lower()  # of bytes, as Perl without a locale: A to Z only
    return text.decode().translate(_NO_SPACES_IN_PERL)


class _Metric:
    """One of :data:`METRICS`: sacrebleu's object, the text as it takes it, and the signature of the two together."""

    def __init__(self, metric: str, lowercase: bool = False, compound_split: bool = False, target: str = ""):
        if metric not in METRICS:
            raise ScoringError(f"there is no metric '{metric}': one of {', '.join(METRICS)}")
        self.name, self.lowercase, self.compound_split = metric, lowercase, compound_split
        if metric == "tokenized":
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
        if self.name != "tokenized":
            return list(lines)
        if self.compound_split:
            lines = map(split_compounds, lines)
        return [_as_perl_splits(line, self.lowercase) for line in lines]

    def signature(self, sacrebleu_signature) -> str:
        if self.name == "tokenized":
            if self.lowercase:
                sacrebleu_signature.update("case", "lc[ascii]")
            if self.compound_split:
                sacrebleu_signature.update("compounds", "split")
        return str(sacrebleu_signature)

    def score(self, hypotheses: Sequence[str], references: Sequence[str]) -> Score:
        _check_same_length({"hypotheses": hypotheses}, references)
        result = self.sacrebleu.corpus_score(self.text(hypotheses), [self.text(references)])
        return Score(float(result.score), self.signature(self.sacrebleu.get_signature()), result._verbose)


def tokenized_bleu(
    hypotheses: Sequence[str], references: Sequence[str], *, lowercase: bool = False, compound_split: bool = False
) -> TokenizedScore:
    """BLEU (Papineni et al. 2002) of tokens: ``BP * exp(mean of log p_n, n = 1..4)`` without smoothing.

    Equal to Moses' ``multi-bleu.perl`` (with ``lowercase``, ``multi-bleu.perl -lc``, which lower-cases A to Z only) for
    texts whose last line ends in a newline: tokens are what lies between ASCII spaces. 0 where no n-gram of some order
    matches or the hypotheses are empty.

    Args:
        hypotheses, references: a line for each sentence.
        lowercase: ignore the case of A to Z.
        compound_split: :func:`split_compounds` of both first.

    Raises:
        ScoringError: they have different numbers of lines, or none.
    """
    score = _Metric("tokenized", lowercase, compound_split).score(hypotheses, references)
    return TokenizedScore(**asdict(score), compound_split=compound_split)


def detokenized_bleu(
    hypotheses: Sequence[str], references: Sequence[str], *, lowercase: bool = False, target: str = ""
) -> Score:
    """sacreBLEU (Post 2018) of plain text.

    Args:
        hypotheses, references: a line for each sentence.
        lowercase: ignore case.
        target: language, which chooses sacrebleu's tokenizer (13a for most).

    Raises:
        ScoringError: they have different numbers of lines, or none; or sacrebleu lacks the language's tokenizer.
    """
    return _Metric("detokenized", lowercase, target=target).score(hypotheses, references)


def chrf(hypotheses: Sequence[str], references: Sequence[str], *, lowercase: bool = False) -> Score:
    """chrF2 (Popović 2015) of plain text: F-score of character n-grams up to 6, recall counting twice.

    Args and errors are those of :func:`detokenized_bleu`.
    """
    return _Metric("chrf", lowercase).score(hypotheses, references)


#: Where “ and ‘ close a quotation (and „ opens it), instead of opening it.
_LOW_OPENING_QUOTES = frozenset("bg cs da de et hr is lt mk sk sl sq sr".split())


def detokenize(lines: Iterable[str], language: str) -> list[str]:
    """Plain text of Moses-style tokens.

    sacremoses' port of Moses' detokenizer, which joins ``@-@`` too, but leaves typographic quotation marks and
    apostrophes apart from their words; these are joined here.
    """
    detokenizer = MosesDetokenizer(lang=language)
    opening, closing = ("„‚", "“”‘") if language in _LOW_OPENING_QUOTES else ("“‘", "”’")
    joined = (
        (re.compile(r" ’ (s|t|d|m|re|ve|ll)\b"), r"’\1"),
        (re.compile(f"([{opening}]) "), r"\1"),
        (re.compile(f" ([{closing}])"), r"\1"),
    )
    result = []
    for line in lines:
        text = detokenizer.detokenize(line.split())
        for pattern, replacement in joined:
            text = pattern.sub(replacement, text)
        result.append(text)
    return result


def read_lines(path: str | Path) -> list[str]:
    """The lines of a UTF-8 file, cut at line feeds alone; a last line need not end in one.

    Raises:
        ScoringError: it cannot be read, or is not UTF-8.
    """
    try:
        text = Path(path).read_bytes().decode("utf-8")
    except OSError as error:
        raise ScoringError(f"cannot read {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ScoringError(f"{path} is not UTF-8 (byte {error.start})") from error
    return text.removesuffix("\n").split("\n") if text else []


def _write(path: Path, text: str) -> None:
    """A whole file or none: written beside and renamed."""
    partial = path.with_name(f"{path.name}.partial")
    try:
        partial.write_bytes(text.encode())
        os.replace(partial, path)
    except OSError as error:
        raise ScoringError(f"cannot write {path}: {error.strerror}") from error
    finally:
        partial.unlink(missing_ok=True)


def _check_same_length(texts: Mapping[str, Sequence[str]], reference: Sequence[str]) -> None:
    for name, lines in texts.items():
        if len(lines) != len(reference):
            raise ScoringError(
                f"{name}: {len(lines)} lines, but the reference has {len(reference)}: sentences were lost"
            )
    if not reference:
        raise ScoringError("there is no sentence to score")


def read_settings(data: str | Path) -> dict[str, str]:
    """The ``key=value`` lines of a prepared data directory's ``settings``; other lines (checksums) are passed over.

    Raises:
        ScoringError: there are none.
    """
    pairs = (line.partition("=") for line in read_lines(Path(data) / "settings"))
    return {key: value for key, equals, value in pairs if equals and key.isidentifier()}


def score_folder(folder: str | Path, data: str | Path, subset: str, *, compound_split: bool | None = None) -> Scores:
    """Detokenize the hypotheses in ``folder``, compute all scores, and write ``hyp.txt``, ``ref.txt`` and the scores.

    Args:
        folder: what ``scripts/generate.sh`` made, with ``hyp.tok`` and ``ref.tok``.
        data: the prepared data they belong to, with ``raw/`` and ``settings``.
        subset: ``test`` or ``valid``.
        compound_split: for the tokenized BLEU (by default the data's setting ``compound_split``).

    Raises:
        ScoringError: something is missing, or the line counts differ; nothing is written then.
    """
    folder, data = Path(folder), Path(data)
    if not (folder / "hyp.tok").is_file():
        raise ScoringError(f"there is no '{folder / 'hyp.tok'}' (scripts/generate.sh makes it)")
    settings = read_settings(data)
    if "target" not in settings:
        raise ScoringError(f"{data / 'settings'} does not name the target language (scripts/prepare_*.sh write it)")
    target, lowercase = settings["target"], settings.get("lower", "0") == "1"
    if compound_split is None:
        compound_split = settings.get("compound_split", "0") == "1"
    hypotheses = read_lines(folder / "hyp.tok")
    tokens, plain = (read_lines(path) for path in (folder / "ref.tok", data / "raw" / f"{subset}.{target}"))
    for path, reference in ((folder / "ref.tok", tokens), (data / "raw" / f"{subset}.{target}", plain)):
        if len(hypotheses) != len(reference):
            raise ScoringError(
                f"{folder / 'hyp.tok'} has {len(hypotheses)} lines, but {path} has {len(reference)}: "
                "sentences were lost"
            )
    translations = detokenize(hypotheses, target)
    scores = Scores(
        subset=subset,
        sentences=len(hypotheses),
        tokenized=tokenized_bleu(hypotheses, tokens, compound_split=compound_split),
        detokenized=detokenized_bleu(translations, plain, lowercase=lowercase, target=target),
        chrf=chrf(translations, plain, lowercase=lowercase),
        lowercase=lowercase,
        target=target,
    )
    _write(folder / "ref.txt", "".join(f"{line}\n" for line in plain))
    _write(folder / "hyp.txt", "".join(f"{line}\n" for line in translations))
    _write(folder / "scores.txt", scores.text())
    # The last, so that whoever finds it finds the others, too.
    _write(folder / "scores.json", json.dumps(asdict(scores), indent=2) + "\n")
    return scores


def read_scores(folder: str | Path) -> Scores:
    """What :func:`score_folder` wrote into ``folder``.

    Raises:
        ScoringError: there is no ``scores.json``, or it is none of ours.
    """
    path = Path(folder) / "scores.json"
    if not path.is_file():
        raise ScoringError(f"there is no '{path}' (scripts/score.sh makes it)")
    try:
        found = json.loads("\n".join(read_lines(path)))
        return Scores(
            subset=str(found["subset"]),
            sentences=int(found["sentences"]),
            tokenized=TokenizedScore(**found["tokenized"]),
            detokenized=Score(**found["detokenized"]),
            chrf=Score(**found["chrf"]),
            lowercase=bool(found["lowercase"]),
            target=str(found["target"]),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise ScoringError(f"{path} is not what scripts/score.sh writes ({error}); run it again") from error


@contextmanager
def _sacrebleu_seed(seed: int) -> Iterator[None]:
    """sacrebleu takes the seed of its tests from the environment."""
    name = "SACREBLEU_SEED"
    before = os.environ.get(name)
    os.environ[name] = str(seed)
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def paired_bootstrap(
    baseline: tuple[str, Sequence[str]],
    systems: Mapping[str, Sequence[str]],
    reference: Sequence[str],
    *,
    metric: str = "detokenized",
    lowercase: bool = False,
    compound_split: bool = False,
    target: str = "",
    resamples: int = RESAMPLES,
    seed: int = SEED,
) -> Comparison:
    """Is the difference between each system and the baseline more than the choice of test sentences?

    Paired bootstrap resampling (Koehn 2004, "Statistical significance tests for machine translation evaluation") by
    sacrebleu's ``PairedTest``: the same resampled sets of sentences for both, and a two-sided p-value. It says nothing
    about the choice of a training's seed. Needs about 80 bytes of memory for each sentence and resample.

    Args:
        baseline: name and hypotheses of the system to compare with.
        systems: name -> hypotheses of the others.
        reference: one line for each hypothesis. Tokens for ``tokenized``, plain text for the two others; so are the
            hypotheses.
        metric: ``tokenized``, ``detokenized`` (both BLEU) or ``chrf``.
        lowercase: ignore case.
        compound_split: split words with hyphens first (``tokenized`` only).
        target: language of the translations, which chooses sacrebleu's tokenizer (``detokenized`` only).
        resamples: number of resampled sets, at least 1.
        seed: of the resampling, at least 1 (sacrebleu takes 0 for none).

    Raises:
        ScoringError: the texts have different numbers of lines, or none; or a setting is out of range.
    """
    for name, value in (("resamples", resamples), ("seed", seed)):
        if value < 1:
            raise ScoringError(f"{name} must be at least 1, not {value}")
    _check_same_length({baseline[0]: baseline[1], **systems}, reference)
    one = _Metric(metric, lowercase, compound_split, target)
    named = [(name, one.text(hypotheses)) for name, hypotheses in (baseline, *systems.items())]
    with _sacrebleu_seed(seed):
        test = PairedTest(named, {metric: one.sacrebleu}, [one.text(reference)], test_type="bs", n_samples=resamples)
        signatures, table = test()
    ((key, signature),) = signatures.items()
    first, *others = table[key]

    def p_value(result) -> float:
        # Where no resample makes a difference, sacrebleu's formula gives its smallest p.
        same = (result.score, result.mean, result.ci) == (first.score, first.mean, first.ci)
        return 1.0 if same else float(result.p_value)

    def numbers(result) -> tuple[float, float, float]:
        return float(result.score), float(result.mean), float(result.ci)

    return Comparison(
        metric=metric,
        signature=one.signature(signature),
        resamples=resamples,
        seed=seed,
        baseline=SystemResult(baseline[0], *numbers(first), p_value=None),
        systems=tuple(
            SystemResult(name, *numbers(result), p_value=p_value(result))
            for (name, _), result in zip(named[1:], others, strict=True)
        ),
    )


def compare_folders(
    baseline: tuple[str, str | Path],
    systems: Mapping[str, str | Path],
    *,
    metrics: Sequence[str] = METRICS,
    resamples: int = RESAMPLES,
    seed: int = SEED,
) -> dict[str, Comparison]:
    """:func:`paired_bootstrap` for folders that :func:`score_folder` was run on; metric -> comparison.

    Raises:
        ScoringError: a folder is not scored, or they translate different text, or were scored in different ways.
    """
    first_name, first = baseline[0], Path(baseline[1])
    if first_name in systems:
        raise ScoringError(f"two systems have the name {first_name}")
    expected = read_scores(first)
    folders = {first_name: first, **{name: Path(folder) for name, folder in systems.items()}}
    references = {kind: read_lines(first / f"ref.{kind}") for kind in ("tok", "txt")}
    for name, folder in folders.items():
        scores = read_scores(folder)
        for kind, reference in references.items():
            if read_lines(folder / f"ref.{kind}") != reference:
                raise ScoringError(
                    f"{first_name} and {name} translate different text (ref.{kind} in {first} and {folder})"
                )
        for what, mine, theirs in (
            ("lower-casing", expected.lowercase, scores.lowercase),
            ("target language", expected.target, scores.target),
            ("compound splitting", expected.tokenized.compound_split, scores.tokenized.compound_split),
        ):
            if mine != theirs:
                raise ScoringError(
                    f"{first_name} and {name} were scored with different settings: {what} {mine} and {theirs}"
                )
    found = {}
    for metric in metrics:
        kind = "tok" if metric == "tokenized" else "txt"
        texts = {name: read_lines(folder / f"hyp.{kind}") for name, folder in folders.items()}
        found[metric] = paired_bootstrap(
            (first_name, texts.pop(first_name)),
            texts,
            references[kind],
            metric=metric,
            # The tokens have the case of the model's data.
            lowercase=expected.lowercase and metric != "tokenized",
            compound_split=expected.tokenized.compound_split,
            target=expected.target,
            resamples=resamples,
            seed=seed,
        )
    return found
