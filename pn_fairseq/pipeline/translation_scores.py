"""Scores of hypotheses by all :data:`~.metrics.METRICS`.

The folder of one decoding (``RUN/generate/SUBSET``) holds, line for line:

``hyp.tok``, ``ref.tok``
    hypothesis and reference in the form of the model's data: tokens (lower-cased or not), subwords
    joined.
``hyp.txt``, ``ref.txt``
    plain text: the detokenized hypothesis, and the reference before any preparation.
``scores.json``, ``scores.txt``
    the results of :func:`score_run`, for programs and for people.
"""

import contextlib
import json
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

import sacrebleu
from sacrebleu.metrics.base import Metric as SacrebleuMetric

from pn_fairseq.common.command import UserError
from pn_fairseq.common.files import read_lines, read_settings, write_lines, write_settings
from pn_fairseq.pipeline import stamp
from pn_fairseq.pipeline.data.binarize import sentences as indexed
from pn_fairseq.pipeline.data.tokens import DETOKENIZER, detokenize
from pn_fairseq.pipeline.generate import hypotheses, texts_of
from pn_fairseq.pipeline.metrics import METRICS, Scoring
from pn_fairseq.pipeline.runs import Run, check_translates, open_run


@dataclass(frozen=True)
class Score:
    """One corpus score.

    In the signature ``detok:`` names the detokenizer of the hypotheses (:func:`detokenize`);
    ``ref:detok`` means that it also detokenized the references.
    """

    score: float  # from 0 to 100
    signature: str  # how it was computed, in sacrebleu's notation
    verbose: str  # for BLEU: precisions (BP = ... ratio = ... hyp_len = ... ref_len = ...)
    compound_split: bool = False  # whether words with hyphens were split (split_compounds)


@dataclass(frozen=True)
class Scores:
    """All scores of one decoded subset.

    ``scores.json`` contains the same, with a key for each metric.
    """

    subset: str
    sentences: int
    lowercase: bool  # plain text was scored without case, because the model's data is lower-cased
    target: str  # language
    by_metric: dict[str, Score]  # only metrics that can be computed
    warnings: list[str] = field(default_factory=list)  # what makes the scores doubtful


def score_lines(scores: Mapping[str, Score]) -> list[str]:
    """A line for each metric: title, signature, score, parts."""
    lines = []
    for name, score in scores.items():
        metric = METRICS[name]
        number = f"{score.score:.{metric.decimals}f}"
        line = f"{metric.title + ':':17} {metric.symbol}|{score.signature} = {number} "
        lines.append(f"{line}{score.verbose}".rstrip())
    return lines


def low_bleu(bleu: float) -> str | None:
    """A warning if BLEU is so low that it says little about a model."""
    reason = (
        "the model has hardly learned to translate, or hypotheses and references do not belong "
        "together"
    )
    return f"BLEU is {bleu:.2f}, below 1: {reason}" if bleu < 1 else None


def score(metric: SacrebleuMetric, hypotheses: Sequence[str], *references: Sequence[str]) -> Score:
    """Score a text; hypotheses and references have a line for each sentence.

    Raises:
        UserError: the texts have different numbers of lines, or none.
    """
    for reference in references:
        check_same_length({"hypotheses": hypotheses}, reference)
    result = metric.corpus_score(hypotheses, references)
    compound_split = getattr(metric, "compound_split", False)
    return Score(float(result.score), str(metric.get_signature()), result._verbose, compound_split)


class Text(NamedTuple):
    """Hypotheses and the references of each sentence, a line for each sentence."""

    hypotheses: Sequence[str]
    references: Sequence[Sequence[str]]


def score_texts(
    scoring: Scoring, tokens: Text | None = None, plain: Text | None = None
) -> tuple[dict, list[str]]:
    """The scores of tokens and of plain text by name of the metric, and what makes them
    doubtful.
    """
    scores, warnings = {}, []
    for name, metric in METRICS.items():
        text = tokens if metric.on_tokens else plain
        if text is None:
            continue
        try:
            computed = metric.compute(scoring)
        except UserError as error:
            warnings.append(f"no {metric.title}: {error}")
        else:
            scores[name] = score(computed, text.hypotheses, *text.references)
    for text in filter(None, (tokens, plain)):
        if not scoring.lowercase and only_references_have_case(text):
            advice = "add --lowercase (with --hyp) to ignore case"
            warnings.append(f"the hypotheses are lower-cased, and the references are not: {advice}")
        warnings += doubts(text, tokenized=text is tokens)
    return scores, list(dict.fromkeys(warnings))


#: Punctuation separated from the word before it, and Moses' escapes: both are rare in plain text.
_OF_TOKENS = re.compile(r"\S [.,。，、](\s|$)|&(apos|quot|amp|#124|#91|#93);|@-@")
_OF_SUBWORDS = re.compile(r"@@( |$)|\u2581")


def doubts(text: Text, tokenized: bool) -> list[str]:
    """Signs that a text is not what should be scored: subwords, tokens in plain text, or references
    as hypotheses.
    """
    warnings, names = [], ["the hypotheses", *["the references"] * len(text.references)]
    for name, lines in zip(names, (text.hypotheses, *text.references), strict=True):
        if any(map(_OF_SUBWORDS.search, lines)):
            warnings.append(
                f"{name} hold subwords ('@@ ' or '\u2581'), which are scored as words: join them "
                "first"
            )
        elif not tokenized and sum(map(bool, map(_OF_TOKENS.search, lines))) > 0.2 * len(lines):
            warnings.append(
                f"{name} look tokenized, but are scored as plain text: detokenize them, or use "
                "--tokenized"
            )
    if any(list(text.hypotheses) == list(reference) for reference in text.references):
        warnings.append(
            "the hypotheses are the references, line for line (fairseq-generate --score-reference?)"
        )
    return warnings


def only_references_have_case(text: Text) -> bool:
    """Whether no hypothesis contains an upper-case letter, but more than a fifth of the lines of a
    reference do.
    """
    hypotheses_have_case = any(map(_has_upper_case, text.hypotheses))
    if hypotheses_have_case or not any(map(str.islower, text.hypotheses)):
        return False
    return any(sum(map(_has_upper_case, lines)) > 0.2 * len(lines) for lines in text.references)


def _has_upper_case(line: str) -> bool:
    return line != line.lower()


def check_same_length(
    texts: Mapping[str, Sequence[str]], reference: Sequence[str], name: str = "the reference"
):
    for text, lines in texts.items():
        if len(lines) != len(reference):
            count = f"{len(lines)} line{'s' * (len(lines) != 1)}"
            raise UserError(
                f"{text}: {count}, but {name} has {len(reference)}: sentences were lost"
            )
    if not reference:
        raise UserError("there is no sentence to score")


def results_of_fairseq(run: Path, subset: str, folder: Path) -> Path | None:
    """The file that ``fairseq-generate --results-path RUN`` (or ``RUN/checkpoints``) wrote, unless
    ``pn generate`` decoded.
    """
    made, paths = (
        folder / "made.txt",
        [parent / f"generate-{subset}.txt" for parent in (run, run / "checkpoints")],
    )
    if (folder / "hyp.tok").is_file() and not (made.is_file() and "results" in read_settings(made)):
        return None
    return next((path for path in paths if path.is_file()), None)


def _import_results(results: Path, run: Run, subset: str, folder: Path) -> None:
    """Write ``hyp.tok`` and ``ref.tok`` from the output of fairseq-generate.

    Raises:
        UserError: a sentence of the subset has no hypothesis or no reference, or the hypotheses are
            subwords.
    """
    index = next(run.bin.glob(f"{subset}.*.idx"), None)
    if index is None:
        raise UserError(
            f"'{run.bin}' has no subset '{subset}' (pn prepare text --test NAME adds one)"
        )
    lines = read_lines(results)
    try:
        best = [options[0][1] for options in hypotheses(lines, indexed(index), nbest=sys.maxsize)]
        references = texts_of(lines, "T", len(best))
    except UserError as error:
        raise UserError(
            f"{results}: {error}; decode with --required-batch-size-multiple 1"
        ) from error
    except KeyError as error:
        raise UserError(f"{results} has no reference (T-) of sentence {error}") from error
    if any("@@ " in line or "\u2581" in line for line in best):
        raise UserError(f"{results} has subwords: run fairseq-generate with --remove-bpe")
    if run.data:  # fairseq prints <<unk>> for words of the reference that its dictionary lacks
        references = read_lines(run.data / "tok" / f"{subset}.{run.settings_of_data().target}")
    folder.mkdir(parents=True, exist_ok=True)
    write_lines(folder / "ref.tok", references)
    write_settings(folder / "made.txt", {"results": results.name})
    write_lines(folder / "hyp.tok", best)


def score_run(
    path: Path,
    subset: str | None = None,
    output: Path | None = None,
    compound_split: bool | None = None,
) -> Scores:
    """Detokenize a run's hypotheses, compute all scores, and write plain text and scores into their
    folder.

    Args:
        path, subset, output: the options of pn score.
        compound_split: for the tokenized BLEU (default: as the data was prepared).

    Raises:
        UserError: something is missing, or the line counts differ; then no score is written.
    """
    run = open_run(path, same_data=True)
    check_translates(run)
    decoded_subset = stamp.read(output / "made.txt").get("subset") if output else None
    if subset and decoded_subset and subset != decoded_subset:
        raise UserError(
            f"'{output}' has hypotheses of {decoded_subset}, and --subset says {subset}"
        )
    subset = subset or decoded_subset or "test"
    folder = output or path / "generate" / subset
    results = results_of_fairseq(path, subset, folder)
    if results:
        _import_results(results, run, subset, folder)
    decoded = folder / "hyp.tok"
    if not decoded.is_file():
        raise UserError(f"there is no '{decoded}' (pn generate writes it)")
    how = run.settings_of_data()
    if compound_split is None:
        compound_split = how.compound_split
    translated, tokens = read_lines(decoded), read_lines(folder / "ref.tok")
    check_same_length({str(decoded): translated}, tokens, str(folder / "ref.tok"))
    references = [folder / "ref.tok"]
    note = f"|detok:{DETOKENIZER}"
    if run.data:
        raw = run.data / "raw" / f"{subset}.{how.target}"
        plain = read_lines(raw)
        check_same_length({str(decoded): translated}, plain, str(raw))
        references.append(raw)
    else:
        # The text before any preparation is unknown: detokenized references replace it.
        plain = detokenize(tokens, how.target)
        note += "|ref:detok"
    settings = {
        "lowercase": how.lower,
        "target": how.target,
        "compound_split": compound_split,
        "detokenizer": DETOKENIZER,
        "metrics": " ".join(METRICS),
        "sacrebleu": sacrebleu.__version__,
    }
    inputs = {"hypotheses": [results or decoded], "references": references}
    wanted = stamp.made_from(settings, inputs)
    made = stamp.stamp_of(folder / "scores.json")
    if stamp.done("score", made, wanted, folder / "scores.json"):
        with contextlib.suppress(UserError):  # a damaged file
            return read_scores(folder)
    made.unlink(missing_ok=True)
    translations = detokenize(translated, how.target)
    scored, warnings = score_texts(
        Scoring(how.lower, how.target, compound_split),
        Text(translated, [tokens]),
        Text(translations, [plain]),
    )
    for name, value in scored.items():
        if not METRICS[name].on_tokens:
            scored[name] = replace(value, signature=value.signature + note)
    scores = Scores(subset, len(translated), how.lower, how.target, scored, warnings)
    write_lines(folder / "ref.txt", plain)
    write_lines(folder / "hyp.txt", translations)
    write_lines(folder / "scores.txt", score_lines(scored))
    values = asdict(scores)
    values |= values.pop("by_metric")
    write_lines(folder / "scores.json", [json.dumps(values, indent=2)])
    write_settings(made, wanted)
    return scores


def is_scored(run: Path, subset: str) -> bool:
    """Whether ``scores.json`` exists and belongs to the present hypotheses."""
    folder = run / "generate" / subset
    scores = folder / "scores.json"
    if not scores.is_file():
        return False
    decoded = results_of_fairseq(run, subset, folder) or folder / "hyp.tok"
    wanted = stamp.made_from({}, {"hypotheses": [decoded]})
    return not stamp.differences(stamp.stamp_of(scores), wanted)


def read_scores(folder: Path) -> Scores:
    """The scores that :func:`score_run` wrote into ``folder``."""
    path = folder / "scores.json"
    try:
        values = json.loads(path.read_bytes())
        by_metric = {metric: Score(**values.pop(metric)) for metric in METRICS if metric in values}
        if "tokenized" not in by_metric:
            raise ValueError("it has no tokenized BLEU")
        return Scores(by_metric=by_metric, **values)
    except FileNotFoundError:
        raise UserError(f"there is no '{path}' (pn score writes it)") from None
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(
            f"{path} is not a file of pn score ({error}); score the run again"
        ) from error
