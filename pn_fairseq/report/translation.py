"""What the report shows of translations (``translation.md.j2``): scores beside a published
table, and the bootstrap.
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
from pn_fairseq.report.runs import Run
from pn_fairseq.report.systems import Corpus, norm_labels
from pn_fairseq.report.tables import progress, results


def _differences(run: Run, baseline: Run, resamples: int, comparisons: int) -> dict[str, str]:
    """Score -> the difference of a run from another one, and p, corrected by Bonferroni for the
    ``comparisons``.
    """
    try:
        compared = compare_folders(
            {"baseline": baseline.result, "system": run.result}, resamples=resamples
        )
    except (UserError, OSError) as error:
        return dict.fromkeys(METRICS, f"not computed ({' '.join(str(error).split())})")
    low = any(low_bleu(result.score) for result in compared["tokenized"].results.values())
    texts = {}
    for measure, comparison in compared.items():
        of_baseline, of_run = comparison.results.values()
        p = "not tested (BLEU below 1)" if low else p_text(min(1.0, of_run.p_value * comparisons))
        texts[measure] = f"{signed(of_run.score - of_baseline.score)}, {p}"
    return texts


def bootstrap(corpus: Corpus, resamples: int) -> tuple[pandas.DataFrame, int]:
    """Every scored system against LN over test sentences,

    and by how many comparisons each p is corrected.
    """
    scored = set(corpus.scores().index.unique("system"))
    tested = {
        label: baseline
        for label, baseline in corpus.baselines.items()
        if {label, baseline} <= scored
    }
    rows = []
    for label, baseline in tested.items():
        progress(f"comparing {label} with {baseline}")
        partners = {run.seed: run for run in reversed(corpus.members(baseline)) if run.scores}
        texts = {measure: [] for measure in METRICS}
        for run in corpus.members(label):
            if run.scores and run.seed in partners:
                seed = "not known" if run.seed is None else run.seed
                for measure, text in _differences(
                    run, partners[run.seed], resamples, len(tested)
                ).items():
                    texts[measure].append(f"seed {seed}: {text}")
        for measure, metric in METRICS.items():
            text = "; ".join(texts[measure]) or missing("– (no seed in common)")
            rows.append(
                {"norm": label, "measure": metric.title, "difference and p, per seed": text}
            )
    return pandas.DataFrame(rows), len(tested)


def content(corpus: Corpus, paper: str | Table, resamples: int) -> dict:
    """What the template shows of the runs on a corpus.

    ``paper``: a table, the name of one, auto or none.
    """
    scored = [run for run in corpus.runs if run.scores]
    size = next((run.decoded for run in corpus.runs if run.decoded), None)
    pairs = corpus.counts().get("train")
    # Runs that were scored before a metric existed are shown without it.
    metrics = [name for name in METRICS if any(run.score(name) for run in scored)] or METRICS
    if paper == "auto":
        paper = recognise(corpus.data or {}, size, pairs)
    table = paper if isinstance(paper, Table) else PAPER.get(paper)
    published = {}
    if table:
        norms = {label: name for name, label in norm_labels().items()}
        rows = {
            label: table.row(norms.get(corpus.norm(label)), own)
            for label, own in corpus.settings.items()
        }
        published = {label: row for label, row in rows.items() if row}
    return {
        "results": results(
            corpus,
            {name: METRICS[name].title for name in metrics},
            "scored",
            published if table else None,
        ),
        "paper": table,
        "otherwise": {
            label: row.missing(corpus.settings[label]) for label, row in published.items()
        },
        "score_lines": [
            (label, row, run.seed, run.score("tokenized"))
            for label, row in published.items()
            if row.signature
            for run in corpus.members(label)
            if run.scores
        ],
        "size": size,
        "pairs": pairs,
        "split": bool(table)
        and any(run.score("tokenized").compound_split != table.compound_split for run in scored),
        "decodings": sorted({run.decoding for run in corpus.runs if run.decoding}),
        "bootstrap": bootstrap(corpus, resamples),
    }
