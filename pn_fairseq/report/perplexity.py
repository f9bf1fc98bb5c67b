"""The report about language models: what its template (``perplexity.md.j2``) shows. ``tables.py`` has translation's."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence

import pandas

from pn_fairseq.pipeline.command import UserError
from pn_fairseq.pipeline.evaluate_lm import Perplexity, different
from pn_fairseq.pipeline.files import read_settings
from pn_fairseq.pipeline.scoring import p_text
from pn_fairseq.report import tables
from pn_fairseq.report.markdown import Markdown, code, missing
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


def _perplexities(corpus: Corpus, label: str) -> dict[int | None, Perplexity]:
    """Seed -> perplexity of a system's runs; of a seed that was run twice the last."""
    return {run.seed: run.perplexity for run in corpus.members(label) if run.perplexity}


def _mean_and_deviation(values: Sequence[float], digits: int = 2) -> tuple[str, str]:
    if not values:
        return missing("not measured"), missing("not measured")
    spread = tables.number(statistics.stdev(values), digits) if len(values) > 1 else missing("– (one seed)")
    return tables.number(statistics.fmean(values), digits), spread


def _name(corpus: Corpus, label: str) -> Markdown | str:
    found = _perplexities(corpus, label).values()
    return Markdown(f"{label} **(not causal)**") if any(not each.causal for each in found) else label


def _results(corpus: Corpus) -> pandas.DataFrame:
    rows = []
    for label in corpus.settings:
        found = _perplexities(corpus, label)
        plain = [each.perplexity for each in found.values()]
        batch = [math.exp(each.batch_nll) for each in found.values() if each.batch_nll is not None]
        names = ", ".join("not known" if seed is None else str(seed) for seed in found)
        row = {"norm": _name(corpus, label), "seeds": names or missing("none measured")}
        row["perplexity"], row["std"] = _mean_and_deviation(plain)
        row["bits per token"], _ = _mean_and_deviation([each.bits for each in found.values()], 3)
        row["with statistics of the batch"], _ = _mean_and_deviation(batch) if batch else (missing("no statistics"), "")
        rows.append(row)
    return pandas.DataFrame(rows)


def _baseline(corpus: Corpus, label: str) -> str | None:
    """The LN system of the same model, and as causal as this one."""

    def kind(one: str) -> tuple:
        return corpus.settings[one].get(SIZE), all(each.causal for each in _perplexities(corpus, one).values())

    if label in corpus.ln:
        return None
    same = [one for one in corpus.ln if kind(one) == kind(label)]
    return min(same, key=lambda one: len(corpus.settings[one]), default=None)


def _significance(corpus: Corpus, baselines: dict[str, str]) -> tuple[pandas.DataFrame, int]:
    """Every system against LN in the same model, in bits per token: Welch's t-test over seeds; and their number."""
    bits = {label: [each.bits for each in _perplexities(corpus, label).values()] for label in corpus.settings}
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
