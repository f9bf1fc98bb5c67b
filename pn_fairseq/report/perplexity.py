"""The report about language models: what its template (``perplexity.md.j2``) shows. ``tables.py`` has translation's."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pandas

from pn_fairseq.common.command import UserError
from pn_fairseq.common.published import LM_NAMES, LM_OTHERS, LM_PAPER, LM_SOURCE, LM_TOKENS
from pn_fairseq.pipeline.evaluate_lm import different
from pn_fairseq.report import tables
from pn_fairseq.report.markdown import Markdown, code, missing, text
from pn_fairseq.report.runs import Run
from pn_fairseq.report.systems import Corpus

#: Counts of prepared data that a report shows, and what it calls them.
_COUNTS = {split: f"tokens, {split}" for split in ("train", "valid", "test")} | {
    "vocabulary": "vocabulary",
    "train.unk_percent": "% <unk>, train",
    "test.unk_percent": "% <unk>, test",
}


def of_language_models(runs: Sequence[Run]) -> bool:
    """Whether the runs are language models.

    Raises:
        UserError: some are and some are not.
    """
    kinds = {run.language_model for run in runs if run.settings_by_name}
    if len(kinds) > 1:
        raise UserError("some runs are language models and some are not: report on them apart")
    return kinds == {True}


def _unit(corpus: Corpus) -> str:
    """What a token is called: a byte, if all are."""
    return "byte" if {run.perplexity.unit for run in corpus.runs if run.perplexity} == {"byte"} else "token"


def _results(corpus: Corpus) -> pandas.DataFrame:
    table = tables.results(corpus, {"perplexity": "perplexity", "bits": f"bits per {_unit(corpus)}"}, "measured")
    batch = tables.means_of(corpus)["batch", "mean"]
    table["with statistics of the batch"] = [
        missing("no statistics") if math.isnan(value) else tables.number(value) for value in batch
    ]
    causal = [_causal(corpus.members(label)) for label in corpus.settings]
    table["norm"] = [
        label if known else Markdown(f"{text(label)} **(not causal)**")
        for label, known in zip(table["norm"], causal, strict=True)
    ]
    return table


def _causal(runs: Sequence[Run]) -> bool:
    return all(run.perplexity.causal for run in runs if run.perplexity)


def _of_runs(corpus: Corpus) -> pandas.DataFrame:
    rows = []
    for cells, run in tables.rows_of(corpus):
        numbers = [missing("not measured")] * 4
        if measured := run.perplexity:
            batch = missing("–") if measured.batch_nll is None else tables.number(measured.batch_perplexity)
            caution = "" if measured.causal else " (not causal)"
            numbers = [
                tables.number(measured.perplexity) + caution,
                f"{measured.bits:.4f}",
                batch,
                code(measured.signature),
            ]
        names = ("perplexity", f"bits per {_unit(corpus)}", "with statistics of the batch", "signature")
        rows.append(cells | dict(zip(names, numbers, strict=True)))
    return pandas.DataFrame(rows)


def _published(corpus: Corpus, paper: str, subset: str) -> dict | None:
    """The paper's table of the corpus, and the numbers of tokens of runs on ``others`` than its text."""
    name = (corpus.data or {}).get("corpus") if paper == "auto" else LM_NAMES.get(paper)
    if name not in LM_PAPER:
        return None
    measure, source = LM_OTHERS.get(name, ("perplexity", LM_SOURCE))
    digits = 1 if measure == "perplexity" else 2
    rows = [
        {"published": model}
        | {"validation": missing("–") if valid is None else tables.number(valid, digits)}
        | {"test": tables.number(test, digits)}
        for model, (valid, test) in LM_PAPER[name].items()
    ]
    tokens = LM_TOKENS.get(name, {}).get(subset)
    counted = {run.perplexity.tokens for run in corpus.runs if run.perplexity}
    others = sorted(counted - {tokens}) if tokens else []
    about = {"name": name, "measure": measure, "source": source, "tensorized": source == LM_SOURCE}
    return about | {"table": pandas.DataFrame(rows), "tokens": tokens, "others": others}


def about(corpus: Corpus, *, subset: str, paper: str, sentence: str) -> dict:
    """What ``perplexity.md.j2`` shows of the runs on a corpus; only the template uses the other arguments."""
    measured = [run.perplexity for run in corpus.runs if run.perplexity]
    return {
        "title": str((corpus.data or {}).get("corpus", "Data not known")),
        "data": tables.data(corpus, _COUNTS),
        "results": _results(corpus),
        "apart": next((why for other in measured[1:] if (why := different(measured[0], other))), ""),
        "unmasked": not _causal(corpus.runs),
        "published": _published(corpus, paper, subset),
        "runs": _of_runs(corpus),
    }
