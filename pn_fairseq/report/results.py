"""The sections of a report about scores: the table beside the paper's, the scores of each run, and significance."""

from __future__ import annotations

from collections.abc import Sequence

from pn_fairseq.report.page import Bullets, Code, Element, Heading, Inline, Missing, Paragraph, Strong, Table
from pn_fairseq.report.paper import PAPER, SOURCE, PaperResult, recognise
from pn_fairseq.report.runs import Run, count_lines
from pn_fairseq.report.significance import MEASURES, Pair, mean_and_deviation, pairs, welch
from pn_fairseq.report.systems import LABELS, Corpus, System
from pn_fairseq.report.wording import listed, number, p_value, signed
from pn_fairseq.scoring import RESAMPLES

#: Measure -> what a report calls it.
NAMES = {"tokenized": "tokenized BLEU", "detokenized": "detokenized BLEU", "chrf": "chrF2"}
_ONE_SEED = Missing("– (one seed)")


def sentences(corpus: Corpus, subset: str) -> int | None:
    """Size of the subset, by what was decoded, or else by the prepared data, if that is still there."""
    for run in corpus.runs:
        if run.decoded is not None:
            return run.decoded
    return count_split(corpus, subset)


def count_split(corpus: Corpus, split: str) -> int | None:
    """Sentence pairs of a split in the prepared data; None if it is not there any more."""
    source = (corpus.data or {}).get("source")
    for run in corpus.runs:
        if run.data_path is not None and source:
            amount = count_lines(run.data_path / "bpe" / f"{split}.{source}")
            if amount is not None:
                return amount
    return None


def paper_of(corpus: Corpus, choice: str, subset: str) -> PaperResult | None:
    """The paper's numbers that stand beside the corpus': by ``--paper``, or by what its data says."""
    if choice == "auto":
        choice = recognise(corpus.data or {}, sentences(corpus, subset)) if subset == "test" else None
    return PAPER.get(choice)


def results(corpus: Corpus, paper: PaperResult | None, subset: str) -> list[Element]:
    """The table of the systems."""
    header: list[Inline] = ["norm", "seeds scored"]
    for measure in MEASURES:
        header += [NAMES[measure], "std"]
        if measure == "tokenized" and paper:
            header += ["paper", "difference"]
    rows = [_result_row(system, paper) for system in corpus.systems]
    absent: list[tuple[int, list[Inline]]] = []
    there = {system.norm for system in corpus.systems}
    for place, (norm, bleu) in enumerate(paper.bleu.items() if paper else ()):
        if norm not in there:
            nothing = Missing("no run")
            # Before the systems of the norms that come after it in the paper's table.
            later = list(paper.bleu)[place + 1 :]
            index = next((i for i, system in enumerate(corpus.systems) if system.norm in later), None)
            row = [norm, nothing, nothing, nothing, number(bleu, 1), *[nothing] * 5]
            absent.append((len(rows) if index is None else index, row))
    for index, row in reversed(absent):
        rows.insert(index, row)
    elements: list[Element] = [
        Heading(3, f"Results ({subset} set)"),
        Table(header, rows, frozenset(range(2, len(header)))),
    ]
    notes: list[Inline] = [
        "Mean and sample standard deviation (n − 1) over the seeds that were scored. One seed has no deviation.",
    ]
    if paper:
        notes.append(f"Paper: {paper.title}, {paper.measure}. {SOURCE}.")
        if paper.note:
            notes.append(paper.note)
        size = sentences(corpus, subset)
        if size != paper.sentences:
            found = "not known here" if size is None else f"one of {size:,} here"
            notes.append(
                [Strong("Not comparable with the paper: "), f"its test set has {paper.sentences:,} sentences, {found}."]
            )
    signatures = {found for system in corpus.systems for found in _signatures(system)}
    for measure in MEASURES:
        of_measure = sorted(signature for name, signature in signatures if name == measure)
        notes += [[f"Signature of {NAMES[measure]}: ", Code(signature)] for signature in of_measure]
        if len(of_measure) > 1:
            notes.append(
                [Strong("The runs were scored in different ways: "), f"{NAMES[measure]} differs by that, too."]
            )
    if not signatures:
        notes.append(Missing("No signatures: no run was scored."))
    decodings = sorted({run.decoding for run in corpus.runs if run.decoding})
    if decodings:
        notes.append(["Decoded with ", Code("; ".join(decodings)), "."])
    if len(decodings) > 1:
        notes.append([Strong("The runs were decoded in different ways: "), "their scores differ by that, too."])
    elements.append(Bullets(notes))
    return elements


def _result_row(system: System, paper: PaperResult | None) -> list[Inline]:
    scored = sorted({_seed_text(run) for run in system.runs if run.scores})
    seeds = {_seed_text(run) for run in system.runs}
    if not scored:
        amount: Inline = [f"0 of {len(seeds)} ", Missing(_why_unscored(system.runs))]
    elif len(scored) < len(seeds):
        amount = f"{len(scored)} of {len(seeds)} ({listed(_seeds(scored))})"
    else:
        amount = f"{len(scored)} ({listed(_seeds(scored))})"
    row: list[Inline] = [system.label, amount]
    for measure in MEASURES:
        values = list(system.scores(measure).values())
        if values:
            mean, deviation = mean_and_deviation(values)
            row += [number(mean), _ONE_SEED if deviation is None else number(deviation)]
        else:
            mean = None
            row += [Missing(_why_unscored(system.runs))] * 2
        if measure == "tokenized" and paper:
            published = paper.bleu.get(system.norm)
            row.append(Missing("not in the paper") if published is None else number(published, 1))
            if published is None or mean is None:
                row.append(Missing("–"))
            else:
                row.append(signed(mean - published))
    return row


def _seeds(texts: Sequence[str]) -> list[object]:
    return sorted(int(text) for text in texts) if all(text.isdecimal() for text in texts) else list(texts)


def _why_unscored(runs: Sequence[Run]) -> str:
    if any(run.decoded is not None for run in runs):
        return "not scored"
    if any(run.log is not None for run in runs):
        return "not decoded"
    return "not trained"


def _signatures(system: System) -> set[tuple[str, str]]:
    return {
        (measure, str(getattr(run.scores, measure).signature))
        for run in system.runs
        if run.scores
        for measure in MEASURES
    }


def scores_of_runs(corpus: Corpus) -> list[Element]:
    """Each run's scores, with the parts of BLEU."""
    rows = []
    for system in corpus.systems:
        for run in system.runs:
            row: list[Inline] = [system.label, _seed(run), Code(run.name)]
            if run.scores is None:
                row += [Missing(_why_unscored([run]))] * 5
            else:
                row += [number(getattr(run.scores, measure).score) for measure in MEASURES]
                row += [run.scores.tokenized.verbose or Missing("not recorded"), f"{run.scores.sentences:,}"]
            rows.append(row)
    header = ["norm", "seed", "run", *NAMES.values(), "precisions and brevity penalty (tokenized)", "sentences"]
    return [Heading(3, "Scores of each run"), Table(header, rows, frozenset({3, 4, 5, 7}))]


def _seed_text(run: Run) -> str:
    return "not known" if run.seed is None else str(run.seed)


def _seed(run: Run) -> Inline:
    return Missing("not known") if run.seed is None else str(run.seed)


def significance(corpus: Corpus, subset: str, resamples: int = RESAMPLES, said=lambda text: None) -> list[Element]:
    """Every system against LN.

    Args:
        corpus: the systems.
        subset: which decoded subset.
        resamples: of the bootstrap.
        said: called with a line of progress before each comparison.
    """
    elements: list[Element] = [Heading(3, "Significance of the differences from LN")]
    others = [(system, baseline) for system in corpus.systems if (baseline := corpus.baseline(system))]
    if not others:
        there = any(system.norm == LABELS["layer"] for system in corpus.systems)
        reason = "LN is the only norm here." if there else "There is no run with LN to compare with."
        return [*elements, Paragraph(Missing(reason))]
    rows = []
    for system, baseline in others:
        said(f"comparing {system.label} with {baseline.label}")
        found = pairs(system, baseline, subset, resamples)
        for measure in MEASURES:
            rows.append([system.label, NAMES[measure], *_comparison(system, baseline, measure, found)])
    several = len({baseline.label for _, baseline in others}) > 1
    if several:
        elements.append(Bullets([f"{system.label} is compared with {baseline.label}." for system, baseline in others]))
    header = [
        "norm",
        "measure",
        "difference of means",
        "over seeds: Welch's t-test",
        "over sentences: paired bootstrap, per seed",
    ]
    elements.append(Table(header, rows, frozenset({2})))
    elements.append(
        Bullets(
            [
                "Two things vary, and each test looks at one of them. Welch's t-test takes the scores of the seeds: "
                "would other seeds give the same order? It shows the 95% confidence interval of the difference and "
                "the two-sided p, needs two scored seeds on both sides, and is the one that speaks about norms.",
                f"The paired bootstrap (Koehn 2004; sacrebleu, {resamples:,} resamples) takes two trained models of "
                "one seed on resampled test sentences: would another test set of the same kind give the same order? "
                "It says nothing about other seeds: a small p shows that these two models differ, not that their "
                "norms do.",
                "The seeds are not joined into one text for the bootstrap: the same sentences several times are no "
                "larger test set, and would make every difference look surer than it is.",
            ]
        )
    )
    if len(others) > 1:
        elements.append(
            Paragraph(
                f"The p are not corrected for the number of comparisons; for {len(others)} systems against LN, 0.05 "
                f"becomes {0.05 / len(others):.3f} (Bonferroni)."
            )
        )
    return elements


def _comparison(system: System, baseline: System, measure: str, found: list[Pair]) -> list[Inline]:
    mine, theirs = system.scores(measure), baseline.scores(measure)
    if not mine or not theirs:
        lacking = system if not mine else baseline
        return [Missing(f"{lacking.label}: {_why_unscored(lacking.runs)}")] * 3
    difference = mean_and_deviation(list(mine.values()))[0] - mean_and_deviation(list(theirs.values()))[0]
    test = welch(list(mine.values()), list(theirs.values()))
    if test is not None:
        over_seeds: Inline = f"{signed(test.low)} to {signed(test.high)}, {p_value(test.p_value)}"
    elif min(len(mine), len(theirs)) < 2:
        over_seeds = Missing("– (needs two seeds of each)")
    else:
        over_seeds = Missing("– (no spread over seeds)")
    parts = []
    for pair in found:
        if measure in pair.system:
            result, other = pair.system[measure], pair.baseline[measure]
            parts.append(f"seed {pair.seed}: {signed(result.score - other.score)}, {p_value(result.p_value)}")
        else:
            parts.append(f"seed {pair.seed}: not computed ({pair.reason})")
    alone = sorted((set(mine) | set(theirs)) - {pair.seed for pair in found}, key=str)
    if alone:
        parts.append(f"seed {listed(alone)}: on one side only")
    return [signed(difference), over_seeds, "; ".join(parts)]
