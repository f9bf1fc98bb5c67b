"""The report about language models: what its template (``perplexity.md.j2``) shows. ``tables.py`` has translation's."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence

import pandas

from pn_fairseq.pipeline.command import UserError
from pn_fairseq.pipeline.evaluate_lm import different
from pn_fairseq.pipeline.files import read_settings
from pn_fairseq.pipeline.scoring import p_text
from pn_fairseq.report import tables
from pn_fairseq.report.markdown import Markdown, code, missing, text
from pn_fairseq.report.paper import LM_NAMES, LM_PAPER
from pn_fairseq.report.runs import Run
from pn_fairseq.report.significance import corrected, welch
from pn_fairseq.report.systems import SIZE, Corpus

#: Counts of prepared data that a report shows.
_COUNTS = ("train", "valid", "test", "vocabulary", "train.unk_percent", "test.unk_percent")


def of_language_models(runs: Sequence[Run]) -> bool:
    """Whether the runs are language models.

    Raises:
        UserError: some are and some are not.
    """
    kinds = {run.language_model for run in runs if run.settings is not None}
    if len(kinds) > 1:
        raise UserError("some runs are language models and some are not: report on them apart")
    return kinds == {True}


def _measured(corpus: Corpus) -> pandas.DataFrame:
    """A row for each (system, seed) that was measured; of a seed that was run twice the last."""
    rows = [
        {"system": label, "seed": "not known" if run.seed is None else str(run.seed), "causal": run.perplexity.causal}
        | {"perplexity": run.perplexity.perplexity, "bits": run.perplexity.bits}
        | {"batch": math.nan if run.perplexity.batch_nll is None else math.exp(run.perplexity.batch_nll)}
        for label, run in zip(corpus.frame["system"], corpus.runs, strict=True)
        if run.perplexity
    ]
    columns = ["system", "seed", "causal", "perplexity", "bits", "batch"]
    return pandas.DataFrame(rows, columns=columns).drop_duplicates(["system", "seed"], keep="last").set_index("system")


def _results(corpus: Corpus) -> pandas.DataFrame:
    measured, rows, why = _measured(corpus), [], missing("not measured")
    for label in corpus.settings:
        found = measured[measured.index == label]
        means, batch = found[["perplexity", "bits"]].mean(), found["batch"].mean()
        name = label if found["causal"].all() else Markdown(f"{text(label)} **(not causal)**")
        row = {"norm": name, "seeds": ", ".join(found["seed"]) or missing("none measured")}
        row["perplexity"] = tables.number(means["perplexity"]) if len(found) else why
        one_seed = missing("– (one seed)")
        row["std"] = tables.number(found["perplexity"].std()) if len(found) > 1 else one_seed if len(found) else why
        row["bits per token"] = tables.number(means["bits"], 3) if len(found) else why
        row["with statistics of the batch"] = missing("no statistics") if math.isnan(batch) else tables.number(batch)
        rows.append(row)
    return pandas.DataFrame(rows)


def _baseline(corpus: Corpus, label: str) -> str | None:
    """The LN system of the same model, and as causal as this one."""
    measured = _measured(corpus)

    def kind(one: str) -> tuple:
        return corpus.settings[one].get(SIZE), measured[measured.index == one]["causal"].all()

    same = [one for one in corpus.ln if label not in corpus.ln and kind(one) == kind(label)]
    return min(same, key=lambda one: len(corpus.settings[one]), default=None)


def _significance(corpus: Corpus, baselines: dict[str, str]) -> tuple[pandas.DataFrame, int]:
    """Every system against LN in the same model, in bits per token: Welch's t-test over seeds; and their number."""
    measured = _measured(corpus)
    bits = {label: list(measured[measured.index == label]["bits"]) for label in corpus.settings}
    comparisons = sum(bool(bits[label] and bits[baseline]) for label, baseline in baselines.items())
    rows = []
    for label, baseline in baselines.items():
        mine, theirs = bits[label], bits[baseline]
        cells = [missing("not measured")] * 2
        if mine and theirs:
            test, over_seeds = welch(mine, theirs), missing("– (needs two seeds of each, and spread)")
            if test:
                p = p_text(corrected(test.p_value, comparisons))
                over_seeds = f"{test.low:+.3f} to {test.high:+.3f}, {p}".replace("-", "−")
            difference = statistics.fmean(mine) - statistics.fmean(theirs)
            cells = [f"{difference:+.3f}".replace("-", "−"), over_seeds]
        names = ("difference of means, bits per token", "over seeds: Welch's t-test")
        rows.append({"norm": label, "compared with": baseline, **dict(zip(names, cells, strict=True))})
    return pandas.DataFrame(rows), comparisons


def _data(corpus: Corpus) -> pandas.DataFrame:
    data = corpus.data or {}
    rows = {name: value for name, value in data.items() if "." not in name and name != "task"}
    for run in corpus.runs:
        if run.data_path and (run.data_path / "counts").is_file():
            counts = read_settings(run.data_path / "counts")
            rows |= {f"tokens, {name}" if name in ("train", "valid", "test") else name: f"{float(counts[name]):,g}"
                     for name in _COUNTS if name in counts}  # fmt: skip
            break
    shown = {
        name.replace("_", " ").replace("unk percent", "% <unk>"): str(value) or "none" for name, value in rows.items()
    }
    return pandas.DataFrame({"data": shown.keys(), "value": shown.values()})


def _of_runs(corpus: Corpus) -> pandas.DataFrame:
    rows = []
    for cells, run in tables.rows_of(corpus):
        found = run.perplexity
        numbers = [missing("not measured")] * 4
        if found:
            batch = missing("–") if found.batch_nll is None else tables.number(math.exp(found.batch_nll))
            caution = "" if found.causal else " (not causal)"
            numbers = [tables.number(found.perplexity) + caution, f"{found.bits:.4f}", batch, code(found.signature)]
        names = ("perplexity", "bits per token", "with statistics of the batch", "signature")
        rows.append(cells | dict(zip(names, numbers, strict=True)))
    return pandas.DataFrame(rows)


def _published(corpus: Corpus, paper: str) -> dict | None:
    """The paper's table beside which the runs are, by the name of the corpus."""
    name = (corpus.data or {}).get("corpus") if paper == "auto" else LM_NAMES.get(paper)
    if name not in LM_PAPER:
        return None
    rows = [
        {"published": model, "validation": missing("–") if valid is None else f"{valid:.1f}", "test": f"{test:.1f}"}
        for model, (valid, test) in LM_PAPER[name].items()
    ]
    return {"name": name, "table": pandas.DataFrame(rows)}


def about(corpus: Corpus, said: Callable[[str], None], *, subset: str, paper: str, sentence: str, source: str) -> dict:
    """What ``perplexity.md.j2`` shows of the runs on a corpus; the other arguments are for the template alone."""
    baselines = {label: other for label in corpus.settings if (other := _baseline(corpus, label))}
    table, comparisons = _significance(corpus, baselines)
    found = [(run, run.perplexity) for run in corpus.runs if run.perplexity]
    return {
        "title": str((corpus.data or {}).get("corpus", "Data not known")),
        "data": _data(corpus),
        "results": _results(corpus),
        "apart": next((why for _, each in found[1:] if (why := different(found[0][1], each))), ""),
        "unmasked": any(not each.causal for _, each in found),
        "published": _published(corpus, paper),
        "baselines": baselines,
        "significance": table,
        "comparisons": comparisons,
        "runs": _of_runs(corpus),
    }
