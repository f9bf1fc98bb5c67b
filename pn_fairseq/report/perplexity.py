"""The report about language models: what its template (``perplexity.md.j2``) shows. ``tables.py`` has translation's."""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path

import pandas

from pn_fairseq import __version__
from pn_fairseq.pipeline.command import UserError
from pn_fairseq.pipeline.evaluate_lm import Perplexity, different
from pn_fairseq.pipeline.files import read_settings
from pn_fairseq.pipeline.scoring import p_text
from pn_fairseq.report import curves, tables
from pn_fairseq.report.markdown import Markdown, code, missing, template
from pn_fairseq.report.paper import LM_NAMES, LM_PAPER, LM_SENTENCE, LM_SOURCE
from pn_fairseq.report.runs import Run
from pn_fairseq.report.significance import welch
from pn_fairseq.report.systems import SIZE, Corpus, group

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
        names = tables.listed(["not known" if seed is None else seed for seed in found])
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


def _significance(corpus: Corpus) -> tuple[pandas.DataFrame, dict[str, str]]:
    """Every system against LN in the same model, in bits per token: Welch's t-test over seeds."""
    rows, baselines = [], {}
    for label in corpus.settings:
        if not (baseline := _baseline(corpus, label)):
            continue
        baselines[label] = baseline
        mine, theirs = ([each.bits for each in _perplexities(corpus, one).values()] for one in (label, baseline))
        if not mine or not theirs:
            cells = [missing("not measured")] * 2
        else:
            test = welch(mine, theirs)
            why = missing("– (needs two seeds of each, and spread)")
            difference = statistics.fmean(mine) - statistics.fmean(theirs)
            interval = f"{test.low:+.3f} to {test.high:+.3f}, {p_text(test.p_value)}".replace("-", "−") if test else why
            cells = [f"{difference:+.3f}".replace("-", "−"), interval]
        names = ("difference of means, bits per token", "over seeds: Welch's t-test")
        rows.append({"norm": label, "compared with": baseline, **dict(zip(names, cells, strict=True))})
    return pandas.DataFrame(rows), baselines


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
    for cells, run in tables._rows(corpus):
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


def _about(corpus: Corpus, picture: Path, paper: str, said: Callable[[str], None]) -> dict:
    table, baselines = _significance(corpus)
    said("drawing learning curves")
    logs = {label: [run.log for run in corpus.members(label) if run.log] for label in corpus.settings}
    found = [(run, run.perplexity) for run in corpus.runs if run.perplexity]
    apart = next((why for _, each in found[1:] if (why := different(found[0][1], each))), "")
    commands = tables._commands(corpus.runs)
    return {
        "title": str((corpus.data or {}).get("corpus", "Data not known")),
        "data": _data(corpus),
        "results": _results(corpus),
        "apart": apart,
        "unmasked": any(not each.causal for _, each in found),
        "published": _published(corpus, paper),
        "significance": table,
        "curves": curves.plot(logs, picture, baselines),
        "picture": picture.name,
        "runs": _of_runs(corpus),
        "training": tables._training(corpus),
        "diagnostics": tables._diagnostics(corpus),
        "settings": tables._settings(corpus),
        "commands": list(commands.values()),
        "lacking": [run.name for run in corpus.runs if run.name not in commands],
    }


def build(
    runs: Sequence[Run], folder: Path, prefix: str, subset: str, paper: str, said: Callable[[str], None]
) -> tuple[str, list[str]]:
    """The report as Markdown and the names of its pictures; arguments as in :func:`.tables.build`."""
    corpora = group([run for run in runs if run.known])
    pictures = [f"{prefix}{index}.png" for index in range(1, len(corpora) + 1)]
    page = template("perplexity.md.j2").render(
        version=__version__, subset=subset, runs=len(runs), sentence=LM_SENTENCE, source=LM_SOURCE,
        problems=[(tables.here(run.path), tables.here(problem)) for run in runs for problem in run.problems],
        corpora=[
            _about(corpus, folder / name, paper, said) for corpus, name in zip(corpora, pictures, strict=True)
        ],
        machines=tables._machines(runs),
        count=tables.count,
    )  # fmt: skip
    return re.sub(r"\n{3,}", "\n\n", page), pictures
