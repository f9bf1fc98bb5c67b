"""What the report shows of language models (``perplexity.md.j2``) in place of scores."""

from __future__ import annotations

import pandas

from pn_fairseq.pipeline.published import LM_PAPER
from pn_fairseq.report.markdown import missing
from pn_fairseq.report.systems import Corpus
from pn_fairseq.report.tables import number, results


def _published(corpus: Corpus, paper: str, subset: str) -> dict | None:
    """The paper's table of the corpus,

    and the numbers of tokens of runs on ``others`` than its text.
    """
    names = {known["name"]: key for key, known in LM_PAPER.items()}
    name = names.get((corpus.data or {}).get("corpus")) if paper == "auto" else paper
    if name not in LM_PAPER:
        return None
    known = LM_PAPER[name]
    digits = 1 if known["measure"] == "perplexity" else 2
    rows = [
        {"published": model}
        | {"validation": missing("–") if valid is None else number(valid, digits)}
        | {"test": number(test, digits)}
        for model, (valid, test) in known["rows"].items()
    ]
    tokens = known.get("tokens", {}).get(subset)
    counted = {run.perplexity.tokens for run in corpus.runs if run.perplexity}
    others = sorted(counted - {tokens}) if tokens else []
    return {
        "note": None,
        **known,
        "table": pandas.DataFrame(rows),
        "tokens": tokens,
        "others": others,
    }


def content(corpus: Corpus, paper: str, subset: str) -> dict:
    """What the template shows of the runs on a corpus."""
    measured = {
        label: [run.perplexity for run in corpus.members(label) if run.perplexity]
        for label in corpus.settings
    }
    units = {one.unit for of_system in measured.values() for one in of_system}
    titles = {
        "perplexity": "perplexity",
        "bits": f"bits per {'byte' if units == {'byte'} else 'token'}",
    }
    return {
        "results": results(corpus, titles | {"batch": "with statistics of the batch"}, "measured"),
        "unmasked": [
            label
            for label, of_system in measured.items()
            if not all(one.causal for one in of_system)
        ],
        "published": _published(corpus, paper, subset),
    }
