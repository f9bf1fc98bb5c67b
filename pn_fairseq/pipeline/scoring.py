"""``pn score``: BLEU on tokens and on plain text, chrF, and the significance of differences.

The folder of one decoding (``RUN/generate/SUBSET``) holds, line for line:

``hyp.tok``, ``ref.tok``
    hypothesis and reference in the form of the model's data: tokens (lower-cased or not), subwords joined.
``hyp.txt``, ``ref.txt``
    plain text: the detokenized hypothesis, and the reference before any preparation.
``scores.json``, ``scores.txt``
    the results of :func:`score_run`, for programs and for people.
"""

import argparse
import json
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import NamedTuple

import sacremoses
from sacrebleu.metrics import BLEU, CHRF
from sacrebleu.metrics.base import Metric, Signature
from sacrebleu.significance import PairedTest, Result
from tabulate import tabulate

from pn_fairseq.common.command import ArgumentParser, UserError, whole
from pn_fairseq.common.files import read_settings, short_names, write_lines, write_settings
from pn_fairseq.pipeline import RUN_HELP
from pn_fairseq.pipeline.data.binarize import sentences as indexed
from pn_fairseq.pipeline.generate import hypotheses, texts_of
from pn_fairseq.pipeline.runs import Run, open_run

#: Score -> its title, in the order in which they are shown.
METRICS = {"tokenized": "tokenized BLEU", "detokenized": "detokenized BLEU", "chrf": "chrF"}

#: Default number of resamples of the paired bootstrap, as in sacrebleu.
RESAMPLES = 1000
#: A difference counts as significant below this p-value.
LEVEL = 0.05


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


class Comparison(NamedTuple):
    """The result of :func:`paired_bootstrap`: a metric's signature, and one result for the name of each system.

    A result has the ``score`` on the whole text, the ``mean`` of the scores over the resamples, half the width ``ci``
    of their 95% confidence interval, and ``p_value`` of no difference from the baseline, which is the first system and
    has no p. p is 1 if every resample gives both systems the same score.
    """

    signature: str
    results: dict[str, Result]


def score_lines(scores: Mapping[str, Score]) -> list[str]:
    """A line for each metric: title, signature, score, parts."""
    lines = []
    for metric, found in scores.items():
        name = "chrF2" if metric == "chrf" else "BLEU"
        lines.append(f"{METRICS[metric] + ':':17} {name}|{found.signature} = {found.score:.2f} {found.verbose}")
    return [line.rstrip() for line in lines]


def low_bleu(bleu: float) -> str | None:
    """A warning if BLEU is so low that it says little about a model."""
    reason = "the model has hardly learned to translate, or hypotheses and references do not belong together"
    return f"BLEU is {bleu:.2f}, below 1: {reason}" if bleu < 1 else None


def p_text(p: float) -> str:
    """A p-value as it is printed everywhere."""
    return "p < 0.001" if p < 0.001 else f"p = {p:.3f}"


def split_compounds(line: str) -> str:
    """Words with hyphens in parts, as in the WMT14 scores of the literature.

    Perl's ``s{(\\S)-(\\S)}{$1 ##AT##-##AT## $2}g``, from fairseq's ``scripts/compound_split_bleu.sh``. As Perl reads
    without ``-C``, ``\\S`` is a byte of UTF-8, and matches do not overlap: ``a-b-c`` becomes ``a ##AT##-##AT## b-c``,
    but ``a-é-c``, whose middle has two bytes, is split at both hyphens.
    """
    return re.sub(rb"(\S)-(\S)", rb"\1 ##AT##-##AT## \2", line.encode()).decode()


class TokenizedBLEU(BLEU):
    """BLEU of tokens as Moses' ``multi-bleu.perl`` computes it, and its ``-lc`` for ``lowercase``.

    As Perl reads without ``-C``, only ASCII spaces separate tokens, and only A to Z are lower-cased.
    """

    def __init__(self, lowercase: bool, compound_split: bool):
        super().__init__(tokenize="none", smooth_method="none", force=True)
        self.ascii_lowercase, self.compound_split = lowercase, compound_split

    def _preprocess_segment(self, sent: str) -> str:
        text = (split_compounds(sent) if self.compound_split else sent).encode()
        tokens = (text.lower() if self.ascii_lowercase else text).split()
        # sacrebleu splits at all spaces of Unicode. BLEU depends only on which tokens are equal.
        return " ".join(token.hex() for token in tokens)

    def get_signature(self) -> Signature:
        signature = super().get_signature()
        if self.ascii_lowercase:
            signature.update("case", "lc[ascii]")
        if self.compound_split:
            signature.update("compounds", "split")
        return signature


def make_metrics(
    lowercase: bool, target: str, compound_split: bool = False, lowercase_tokens: bool = False
) -> dict[str, Metric]:
    """All :data:`METRICS`.

    ``tokenized`` is BLEU (Papineni et al. 2002) of tokens: ``BP * exp(mean of log p_n, n = 1..4)`` without smoothing; 0
    if no n-gram of some order matches. ``detokenized`` is sacreBLEU (Post 2018) of plain text. ``chrf`` is chrF2
    (Popović 2015) of plain text: F-score of character n-grams up to 6, in which recall counts twice.

    Args:
        lowercase: ignore the case of plain text.
        target: the language, which chooses sacrebleu's tokenizer (13a for most).
        compound_split: :func:`split_compounds` of tokens.
        lowercase_tokens: ignore the case of tokens, A to Z only.

    Raises:
        UserError: sacrebleu lacks the language's tokenizer.
    """
    try:
        detokenized = BLEU(lowercase=lowercase, trg_lang=target, force=True)
    except (ImportError, RuntimeError) as error:
        # The tokenizers of Japanese and Korean are separate packages.
        raise UserError(f"sacrebleu cannot tokenize '{target}': {' '.join(str(error).split())}") from error
    tokenized = TokenizedBLEU(lowercase_tokens, compound_split)
    return {"tokenized": tokenized, "detokenized": detokenized, "chrf": CHRF(lowercase=lowercase)}


def score(metric: Metric, hypotheses: Sequence[str], references: Sequence[str]) -> Score:
    """Score a text; hypotheses and references are a line for each sentence.

    Raises:
        UserError: the texts have different numbers of lines, or none.
    """
    _check_same_length({"hypotheses": hypotheses}, references)
    result = metric.corpus_score(hypotheses, [references])
    compound_split = getattr(metric, "compound_split", False)
    return Score(float(result.score), str(metric.get_signature()), result._verbose, compound_split)


#: Languages in which “ and ‘ close a quotation (and „ opens it), instead of opening it.
_LOW_OPENING_QUOTES = frozenset("bg cs da de et hr is lt mk sk sl sq sr".split())

#: sacremoses joins „ and “ alternately to the next and to the previous word, though each has one side. They are
#: replaced by characters that occur in no text and that sacremoses leaves unchanged.
_HIDE, _SHOW = str.maketrans("„“", "\ufdd0\ufdd1"), str.maketrans("\ufdd0\ufdd1", "„“")

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
    opening, closing = ("„‚", "“”‘") if language in _LOW_OPENING_QUOTES else ("“‘", "”’")

    def plain(line: str) -> str:
        text = detokenizer.detokenize(line.translate(_HIDE).split()).translate(_SHOW)
        text = re.sub(r" ’ (s|t|d|m|re|ve|ll)\b", r"’\1", text)
        text = re.sub(f"([{opening}]) ", r"\1", text)
        return re.sub(f" ([{closing}])", r"\1", text)

    return [plain(line) for line in lines]


def read_lines(path: Path | None) -> list[str]:
    """The lines of UTF-8 text, by default of standard input, cut at line feeds only; the last line may lack one."""
    try:
        text = (path.read_bytes() if path else sys.stdin.buffer.read()).decode("utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"{path or 'standard input'} is not UTF-8 (byte {error.start})") from error
    return text.removesuffix("\n").split("\n") if text else []


def _check_same_length(texts: Mapping[str, Sequence[str]], reference: Sequence[str], name: str = "the reference"):
    for text, lines in texts.items():
        if len(lines) != len(reference):
            raise UserError(f"{text}: {len(lines)} lines, but {name} has {len(reference)}: sentences were lost")
    if not reference:
        raise UserError("there is no sentence to score")


def results_of_fairseq(run: Path, subset: str, folder: Path) -> Path | None:
    """What ``fairseq-generate --results-path RUN`` (or ``RUN/checkpoints``) wrote, unless ``pn generate`` decoded."""
    mark, paths = folder / "made.txt", (run / f"{place}generate-{subset}.txt" for place in ("", "checkpoints/"))
    if (folder / "hyp.tok").is_file() and not (mark.is_file() and "results" in read_settings(mark)):
        return None
    return next((path for path in paths if path.is_file()), None)


def _import_results(results: Path, run: Run, subset: str, folder: Path) -> None:
    """Write ``hyp.tok`` and ``ref.tok`` from the output of fairseq-generate.

    Raises:
        UserError: a sentence of the subset has no hypothesis or no reference, or the hypotheses are subwords.
    """
    index = next(run.bin.glob(f"{subset}.*.idx"), None)
    if index is None:
        raise UserError(f"'{run.bin}' has no subset '{subset}'")
    try:
        lines = read_lines(results)
        best = [options[0][1] for options in hypotheses(lines, indexed(index), nbest=sys.maxsize)]
        references = texts_of(lines, "T", len(best))
    except UserError as error:
        raise UserError(f"{results}: {error}; decode with --required-batch-size-multiple 1") from error
    except KeyError as error:
        raise UserError(f"{results} has no reference (T-) of sentence {error}") from error
    if any("@@ " in line or "\u2581" in line for line in best):
        raise UserError(f"{results} has subwords: run fairseq-generate with --remove-bpe")
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
    if results := results_of_fairseq(path, subset, folder):
        _import_results(results, run, subset, folder)
    if not (decoded := folder / "hyp.tok").is_file():
        raise UserError(f"there is no '{decoded}' (pn generate writes it)")
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
    translations, note = detokenize(translated, target), f"|detok:{DETOKENIZER}{'' if raw else '|ref:detok'}"
    found = {}
    for name, metric in make_metrics(lowercase, target, compound_split).items():
        if name == "tokenized":
            found[name] = score(metric, translated, tokens)
        else:
            found[name] = score(metric, translations, plain)
            found[name] = replace(found[name], signature=found[name].signature + note)
    scores = Scores(subset=subset, sentences=len(translated), **found, lowercase=lowercase, target=target)
    write_lines(folder / "ref.txt", plain)
    write_lines(folder / "hyp.txt", translations)
    write_lines(folder / "scores.txt", score_lines(found))
    # Written last: if this file exists, the others exist as well.
    write_lines(folder / "scores.json", [json.dumps(asdict(scores), indent=2)])
    return scores


def is_scored(run: Path, subset: str) -> bool:
    """Whether ``scores.json`` is there, and newer than the hypotheses."""
    folder = run / "generate" / subset
    scores, decoded = folder / "scores.json", (folder / "hyp.tok", results_of_fairseq(run, subset, folder))
    times = [path.stat().st_mtime_ns for path in decoded if path and path.is_file()]
    return scores.is_file() and max(times, default=0) <= scores.stat().st_mtime_ns


def read_scores(folder: Path) -> Scores:
    """The scores that :func:`score_run` wrote into ``folder``."""
    path = folder / "scores.json"
    try:
        values = json.loads(path.read_bytes())
        return Scores(**values | {metric: Score(**values[metric]) for metric in METRICS})
    except FileNotFoundError:
        raise UserError(f"there is no '{path}' (pn score writes it)") from None
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(f"{path} is not a file of pn score ({error}); score the run again") from error


def paired_bootstrap(
    systems: Mapping[str, Sequence[str]], reference: Sequence[str], metric: Metric, resamples: int = RESAMPLES
) -> Comparison:
    """Test whether each system differs from the first, the baseline, by more than the choice of test sentences.

    Paired bootstrap resampling (Koehn 2004, "Statistical significance tests for machine translation evaluation") by
    sacrebleu's ``PairedTest``: the same resampled sets of sentences for both. With the difference ``d`` of scores on
    the whole text, and ``d_b`` on the b-th set, ``p = (1 + #{b: |d_b| - mean(|d_b|) > |d|}) / (1 + resamples)``. If
    ``d`` is large compared with the spread of ``d_b``, this is the area under one tail: a two-sided p would be twice as
    large. If ``d`` is 0, p is about 0.42, and not 1. The test does not cover the variation over training seeds. It
    needs about 80 bytes of memory for each sentence and resample. The seed is sacrebleu's, 12345 or SACREBLEU_SEED.

    Args:
        systems: name -> hypotheses; the baseline first.
        reference: a line for each sentence.
        metric: one of :func:`make_metrics`.
        resamples: number of resampled sets.
    """
    _check_same_length(systems, reference)
    signatures, table = PairedTest(list(systems.items()), {"": metric}, [reference], "bs", n_samples=resamples)()
    ((key, signature),) = signatures.items()
    results = table[key]
    for result in results[1:]:
        # If no resample makes a difference, sacrebleu's formula gives its smallest p.
        if (result.score, result.mean, result.ci) == (results[0].score, results[0].mean, results[0].ci):
            result.p_value = 1.0
    return Comparison(str(signature), dict(zip(systems, results, strict=True)))


def compare_folders(folders: Mapping[str, Path], resamples: int = RESAMPLES) -> dict[str, Comparison]:
    """:func:`paired_bootstrap` for decodings that :func:`score_run` has scored, by all :data:`METRICS`.

    ``folders`` maps the name of a system to its folder, the baseline first. All systems must have translated the same
    text and be scored in the same way.
    """
    scores = {name: read_scores(folder) for name, folder in folders.items()}
    first, expected = next(iter(scores.items()))
    for name, mine in scores.items():
        for kind in ("ref.tok", "ref.txt"):
            if (folders[name] / kind).read_bytes() != (folders[first] / kind).read_bytes():
                where = f"{kind} in {folders[first]} and {folders[name]}"
                raise UserError(f"{first} and {name} translate different text ({where})")
        for metric in METRICS:
            if (usual := getattr(expected, metric).signature) != (other := getattr(mine, metric).signature):
                raise UserError(f"{first} and {name} were scored in different ways: {usual} and {other}")
    comparisons = {}
    for name, metric in make_metrics(expected.lowercase, expected.target, expected.tokenized.compound_split).items():
        kind = "tok" if name == "tokenized" else "txt"
        systems = {system: read_lines(folder / f"hyp.{kind}") for system, folder in folders.items()}
        comparison = paired_bootstrap(systems, read_lines(folders[first] / f"ref.{kind}"), metric, resamples)
        # The detokenizer is named as in the scores.
        note = re.search(r"(\|detok:.*)?$", getattr(expected, name).signature)[0]
        comparisons[name] = comparison._replace(signature=comparison.signature + note)
    return comparisons


DESCRIPTION = """\
BLEU and chrF of the hypotheses of a run or of a text file, and the significance of differences between runs.

For a run, it prints these scores and writes them to scores.txt and scores.json:
  tokenized BLEU    on the tokens as prepared: the value of multi-bleu and fairseq-generate, and of the paper
  detokenized BLEU  sacreBLEU on plain text, with its signature; case is ignored if the data was lower-cased
  chrF              on plain text, the F-score of character n-grams
"""

EPILOG = """\
Without hypotheses of pn generate, --run scores generate-SUBSET.txt, which fairseq-generate --results-path DIR wrote.
The paired bootstrap of text files: sacrebleu REF -i BASELINE FILE --paired-bs
"""

#: Option -> the options of which it needs one.
NEEDS = {
    **{"subset": ("run", "compare"), "output": ("run",), "compound_split": ("run", "tokenized")},
    **{"resamples": ("compare",), "ref": ("hyp",), "tokenized": ("hyp",), "lowercase": ("hyp",), "target": ("hyp",)},
}


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = ArgumentParser(prog="pn score", description=DESCRIPTION, epilog=EPILOG)
    add, mode = parser.add_argument, parser.add_mutually_exclusive_group(required=True)
    mode.add_argument("--run", type=Path, metavar="DIR", help=RUN_HELP)
    compare = "paired bootstrap by sacrebleu: could the difference between a run and the first one, the baseline, come "
    compare += "from the choice of test sentences? Runs that are not scored yet are scored first"
    mode.add_argument("--compare", type=Path, nargs="+", metavar="DIR", help=compare)
    mode.add_argument("--hyp", type=Path, metavar="FILE", help="hypotheses, a line for each sentence")
    add("--ref", type=Path, metavar="FILE", help="with --hyp: references, a line for each sentence")
    add("--subset", metavar="NAME", help="of the runs: test (default) or valid")
    add("--output", type=Path, metavar="DIR", help="the --output of pn generate (default: RUN/generate/SUBSET)")
    split = 'in tokenized BLEU, split words with hyphens ("rich ##AT##-##AT## text"), as papers on WMT14 do (default: '
    split += "as the run's data was prepared)"
    add("--compound-split", action=argparse.BooleanOptionalAction, help=split)
    add("--resamples", type=whole, metavar="N", help=f"with --compare: resampled texts (default {RESAMPLES})")
    add("--tokenized", action="store_true", default=None, help="the files hold tokens (default: plain text)")
    add("--lowercase", action="store_true", default=None, help="with --hyp: ignore case")
    add("--target", metavar="LANG", help="with --hyp: the language, which chooses sacrebleu's tokenizer (default: 13a)")
    args = parser.parse_args(argv)
    for option, modes in NEEDS.items():
        if getattr(args, option) is not None and all(getattr(args, name) is None for name in modes):
            raise UserError(f"--{option.replace('_', '-')} needs --{' or --'.join(modes)} (see --help)")
    if args.hyp and args.ref is None:
        raise UserError("--hyp needs --ref (see --help)")
    return args


def show(comparisons: Mapping[str, Comparison], text: str) -> str:
    """The comparisons as a table."""
    bleu = comparisons["tokenized"].results
    baseline, rows, untested = next(iter(bleu)), [], []
    for name in bleu:
        # Where nothing was learned, a significant difference would be one between two kinds of noise.
        low = low_bleu(min(bleu[name].score, bleu[baseline].score))
        row = [f"{name} (baseline)" if name == baseline else name]
        for comparison in comparisons.values():
            result = comparison.results[name]
            row.append(f"{result.score:.2f} ({result.mean:.2f} ± {result.ci:.2f})")
            if name != baseline and not low:
                row[-1] += f" {p_text(result.p_value)}{' *' * (result.p_value < LEVEL)}"
        rows.append(row)
        untested += [f"{name} is not tested: {low}"] if name != baseline and low else []
    return "\n".join([
        f"paired bootstrap: {text}",
        "score (mean of the resamples ± 95% confidence interval), p of no difference from the baseline",
        "",
        tabulate(rows, headers=["", *(METRICS[metric] for metric in comparisons)], tablefmt="plain"),
        "",
        *untested,
        f"* is significant (p < {LEVEL}). Without *, a difference is inconclusive: it may be chance.",
        "This tests variation over test sentences, not over training seeds; for the latter, train several seeds.",
        "The p-value is one-sided (sacrebleu's); a two-sided p-value would be about twice as large.",
        "",
        *(f"{METRICS[metric]}: {comparison.signature}" for metric, comparison in comparisons.items()),
    ])  # fmt: skip


def compare_runs(runs: Sequence[Path], subset: str, resamples: int) -> str:
    """The comparison of runs, which are scored first if they are not."""
    if len(runs) < 2:
        raise UserError("--compare needs two runs or more, the baseline first (see --help)")
    if len({run.resolve() for run in runs}) != len(runs):
        raise UserError("a run is named twice")
    for run in runs:
        if not is_scored(run, subset):  # a scored run needs its data no more
            score_run(run, subset)
    folders = {name: run / "generate" / subset for name, run in zip(short_names(runs), runs, strict=True)}
    sentences = read_scores(runs[0] / "generate" / subset).sentences
    return show(compare_folders(folders, resamples), f"{subset}, {sentences} sentences")


def main(argv: Sequence[str] | None = None) -> None:
    args = _parse(argv)
    if args.compare:
        print(compare_runs(args.compare, args.subset or "test", args.resamples or RESAMPLES))
        return
    if args.run:
        scored = score_run(args.run, args.subset, args.output, args.compound_split)
        scores = {metric: getattr(scored, metric) for metric in METRICS}
    else:
        texts, lowercase = (read_lines(args.hyp), read_lines(args.ref)), bool(args.lowercase)
        metrics = make_metrics(lowercase, args.target or "", bool(args.compound_split), lowercase)
        names = ["tokenized"] if args.tokenized else ["detokenized", "chrf"]
        scores = {name: score(metrics[name], *texts) for name in names}
    print(*score_lines(scores), sep="\n")
    if warning := low_bleu(next(iter(scores.values())).score):
        print(f"pn score: warning: {warning}", file=sys.stderr)
