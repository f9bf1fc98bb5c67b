"""What the report shows of translations (``translation.md.j2``): scores beside a published table,
and the bootstrap.
"""

from __future__ import annotations

import pandas

from pn_fairseq.common.command import UserError
from pn_fairseq.pipeline.metrics import METRICS
from pn_fairseq.pipeline.paired_bootstrap import compare_folders, p_text
from pn_fairseq.pipeline.published import PAPER, Table, recognise
from pn_fairseq.pipeline.translation_scores import low_bleu
from pn_fairseq.report.intervals import signed
from pn_fairseq.report.markdown import missing
from pn_fairseq.report.runs import ReportedRun
from pn_fairseq.report.systems import CorpusRuns, norm_labels
from pn_fairseq.report.tables import progress, results_table, scored_by


def bootstrap_texts(
    run: ReportedRun, baseline: ReportedRun, resamples: int, comparisons: int
) -> dict[str, str]:
    """Metric -> the difference of a run from another, and p, with Bonferroni correction for the
    ``comparisons``.
    """
    folders = {"baseline": baseline.result, "system": run.result}
    try:
        compared = compare_folders(folders, resamples=resamples)
    except (UserError, OSError) as error:
        return dict.fromkeys(METRICS, f"not computed ({' '.join(str(error).split())})")
    tokenized = compared["tokenized"].results.values()
    low = any(low_bleu(result.score) for result in tokenized)
    texts = {}
    for metric, comparison in compared.items():
        of_baseline, of_run = comparison.results.values()
        p = "not tested (BLEU below 1)"
        if not low:
            p = p_text(min(1.0, of_run.p_value * comparisons))
        difference = of_run.score - of_baseline.score
        texts[metric] = f"{signed(difference)}, {p}"
    return texts


def bootstrap(corpus: CorpusRuns, resamples: int) -> tuple[pandas.DataFrame, int]:
    """Every scored system against LN over test sentences, and the number of comparisons for which
    each p is corrected.
    """
    scored = {label for label in corpus.settings if _scored_runs(corpus, label)}
    tested = {}
    for label, baseline in corpus.baselines.items():
        if label in scored and baseline in scored:
            tested[label] = baseline
    rows = []
    for label, baseline in tested.items():
        progress(f"comparing {label} with {baseline}")
        of_baseline = _scored_runs(corpus, baseline)
        partners = {run.seed: run for run in reversed(of_baseline)}
        texts: dict[str, list[str]] = {metric: [] for metric in METRICS}
        for run in _scored_runs(corpus, label):
            if run.seed not in partners:
                continue
            seed = "not known" if run.seed is None else run.seed
            differences = bootstrap_texts(run, partners[run.seed], resamples, len(tested))
            for metric, text in differences.items():
                texts[metric].append(f"seed {seed}: {text}")
        for name, metric in METRICS.items():
            text = "; ".join(texts[name]) or missing("– (no seed in common)")
            row = {"norm": label, "measure": metric.title, "difference and p, per seed": text}
            rows.append(row)
    return pandas.DataFrame(rows), len(tested)


def _scored_runs(corpus: CorpusRuns, label: str) -> list[ReportedRun]:
    return [run for run in corpus.members(label) if run.scores]


def content(corpus: CorpusRuns, paper: str | Table, resamples: int) -> dict:
    """What the template shows of the runs on a corpus.

    ``paper``: a table, the name of one, auto or none.
    """
    size = corpus.decoded
    pairs = corpus.counts().get("train")
    if paper == "auto":
        paper = recognise(corpus.data or {}, size, pairs)
    if isinstance(paper, Table):
        table = paper
    else:
        table = PAPER.get(paper)
    published = {}
    otherwise = {}
    score_lines = []
    norms = {label: name for name, label in norm_labels().items()}
    for label, settings in corpus.settings.items():
        row = table and table.row(norms.get(corpus.norm(label)), settings)
        if not row:
            continue
        published[label] = row
        otherwise[label] = row.missing(settings)
        if row.signature:
            for run in _scored_runs(corpus, label):
                score_lines.append((label, row, run.seed, run.score("tokenized")))
    split_differs = False  # whether compounds were split before the score
    if table:
        scores = [run.score("tokenized") for run in corpus.runs if run.scores]
        split_differs = any(score.compound_split != table.compound_split for score in scores)
    plain = [metric for metric in METRICS.values() if not metric.on_tokens]
    return {
        "results": results_table(corpus, "scored", {}, published if table else None),
        "paper": table,
        "otherwise": otherwise,
        "score_lines": score_lines,
        "size": size,
        "pairs": pairs,
        "split": split_differs,
        "on_plain_text": [metric.title for metric in plain if scored_by(corpus, metric.name)],
        "decodings": sorted({run.decoding for run in corpus.runs if run.decoding}),
        "bootstrap": bootstrap(corpus, resamples),
    }
