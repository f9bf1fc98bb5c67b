"""What the report shows of language models (``perplexity.md.j2``) instead of scores."""

from __future__ import annotations

import pandas

from pn_fairseq.pipeline.published import LM_PAPER
from pn_fairseq.report.markdown import missing
from pn_fairseq.report.systems import CorpusRuns
from pn_fairseq.report.tables import number, results_table


def _published(corpus: CorpusRuns, paper: str, subset: str) -> dict | None:
    """The table of LM_PAPER for the corpus; None: there is none.

    Entries are added: ``table``, its rows as a frame; ``tokens`` of its ``subset``; ``others``, the
    numbers of tokens of runs on another text.
    """
    name = (corpus.data or {}).get("corpus")
    if paper == "auto":
        table = next((table for table in LM_PAPER.values() if table["name"] == name), None)
    else:
        table = LM_PAPER.get(paper)
    if table is None:
        return None
    digits = 1 if table["measure"] == "perplexity" else 2
    rows = []
    for model, (valid, test) in table["rows"].items():
        if valid is None:
            validation = missing("–")
        else:
            validation = number(valid, digits)
        rows.append({"published": model, "validation": validation, "test": number(test, digits)})
    tokens = table.get("tokens", {}).get(subset)
    others = set()
    if tokens:
        others = {run.perplexity.tokens for run in corpus.runs if run.perplexity} - {tokens}
    shown = {"table": pandas.DataFrame(rows), "tokens": tokens, "others": sorted(others)}
    return {"note": None, **table, **shown}


def content(corpus: CorpusRuns, paper: str, subset: str) -> dict:
    """What the template shows of the runs on a corpus."""
    units = set()
    unmasked = []
    for label in corpus.settings:
        measured = [run.perplexity for run in corpus.members(label) if run.perplexity]
        units.update(perplexity.unit for perplexity in measured)
        if not all(perplexity.causal for perplexity in measured):
            unmasked.append(label)
    titles = {"bits": "bits per byte" if units == {"byte"} else "bits per token"}
    return {
        "results": results_table(corpus, "measured", titles),
        "unmasked": unmasked,
        "published": _published(corpus, paper, subset),
    }
