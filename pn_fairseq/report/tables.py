"""The tables of a report: data, results, training, settings and hardware of runs, and the rows of
``report.csv``.
"""

from __future__ import annotations

import math
import os
import re
import shlex
import statistics
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path

import pandas

from pn_fairseq.common.command import say
from pn_fairseq.pipeline.published import Row
from pn_fairseq.pipeline.setting_roles import role_of
from pn_fairseq.pipeline.training_log import TrainingLog
from pn_fairseq.report.intervals import signed
from pn_fairseq.report.markdown import Markdown, code, missing
from pn_fairseq.report.measures import LOSS
from pn_fairseq.report.runs import ReportedRun
from pn_fairseq.report.systems import CorpusRuns

#: Counts of prepared text -> their names in a report.
_COUNTS_OF_PAIRS = {split: f"sentence pairs, {split}" for split in ("train", "valid", "test")}
_COUNTS_OF_TOKENS = {split: f"tokens, {split}" for split in ("train", "valid", "test")} | {
    "vocabulary": "vocabulary",
    "train.unk_percent": "% <unk>, train",
    "test.unk_percent": "% <unk>, test",
}

#: Entries that describe a start of a training run, not the machine it ran on (pn train).
_OF_A_START = ("started", "command", "world_size", "tokens_per_update", "update_freq", "max_tokens")


def progress(text: str) -> None:
    """Print a line of progress if stderr is a terminal."""
    if sys.stderr.isatty():
        say("pn report", text)


def number(value: float, digits: int = 2) -> str:
    """A number with a fixed number of digits and commas for thousands."""
    if math.isfinite(value):
        return f"{value:,.{digits}f}"
    return "not finite"


def relative(text: str | Path) -> str:
    """A path, or a text that contains paths, with paths below the working directory made relative
    to it.
    """
    folder = os.getcwd().rstrip("/")
    if not folder:
        return str(text)
    # Only where a path begins, not in the middle of another one that contains the same names.
    below = rf"(?<![^\s'\"=:,(\[]){re.escape(folder)}/"
    return re.sub(below, "", str(text))


def data_table(corpus: CorpusRuns) -> pandas.DataFrame:
    """The location of the data, its settings that are not off, and its counts."""
    rows = {"prepared data": missing("not recorded")}
    folders = corpus.data_folders()
    if folders:
        rows["prepared data"] = code(", ".join(map(os.path.relpath, folders)))
    if corpus.data is None:
        rows["settings"] = missing("not recorded")
    for key, value in (corpus.data or {}).items():
        off = not value or (value == "0" and key not in ("lower", "bpe"))
        # a key with a dot is a file, with its checksum
        if not off and key not in ("folder", "clean_stage") and "." not in key:
            rows[code(key)] = code(value)
    counts = corpus.counts()
    titles = _COUNTS_OF_TOKENS
    if not corpus.runs[0].language_model:
        # a test set that was added later is not among the counts of the prepared data
        subset = corpus.runs[0].subset
        titles = _COUNTS_OF_PAIRS | {subset: f"sentence pairs, {subset}"}
        decoded = corpus.decoded
        if decoded is not None:
            counts.setdefault(subset, decoded)
    for name, title in titles.items():
        rows[title] = f"{counts[name]:,.12g}" if name in counts else missing("not known")
    return pandas.DataFrame({"data": rows.keys(), "value": rows.values()})


def results_table(
    corpus: CorpusRuns,
    verb: str,
    titles: Mapping[str, str],
    published: Mapping[str, Row] | None = None,
) -> pandas.DataFrame:
    """Means and deviations over seeds.

    Args:
        verb: how the numbers were obtained.
        titles: titles of measures that differ from the measure's own.
        published: the rows of a published table that are shown beside systems; None: no table is
            shown.
    """
    scores = corpus.scores()
    # A metric that cannot be computed (Japanese without its tokenizer) gets no column.
    shown = [name for name in corpus.measures if scored_by(corpus, name)] or list(corpus.measures)
    seeds = scores.groupby(level="system", sort=False)
    means = seeds.mean().reindex(list(corpus.settings))
    deviations = seeds.std().reindex(list(corpus.settings))
    rows = []
    for label in corpus.settings:
        runs = corpus.members(label)
        measured = _seeds([run for run in runs if run.measured])
        row = {"norm": label, f"seeds {verb}": _amount(runs, measured)}
        for name in shown:
            measure = corpus.measures[name]
            title = titles.get(name, measure.title)
            mean = means.loc[label, name]
            deviation = deviations.loc[label, name]
            if not measured:
                row[title] = row[f"std, {title}"] = _state(runs[0])
            elif math.isnan(mean):
                why = "no statistics" if name == "batch" else "not scored by it"
                row[title] = row[f"std, {title}"] = missing(why)
            else:
                row[title] = number(mean, measure.decimals)
                row[f"std, {title}"] = missing("– (one seed)")
                if not math.isnan(deviation):
                    row[f"std, {title}"] = number(deviation, measure.decimals)
            if name == "tokenized" and published is not None:
                row |= _beside(published.get(label), mean)
        rows.append(row)
    return pandas.DataFrame(rows)


def scored_by(corpus: CorpusRuns, measure: str) -> bool:
    return any(measure in run.values for run in corpus.runs)


def _seeds(runs: Sequence[ReportedRun]) -> list[str]:
    seeds = [_seed(run) for run in runs]
    return list(dict.fromkeys(seeds))


def _seed(run: ReportedRun) -> str:
    return "not known" if run.seed is None else str(run.seed)


def _amount(runs: Sequence[ReportedRun], measured: Sequence[str]) -> Markdown:
    """How many seeds of a system were measured, and which ones."""
    seeds = len(_seeds(runs))
    if len(measured) == seeds:
        amount = str(seeds)
    else:
        amount = f"{len(measured)} of {seeds}"
    if measured:
        which = f"({', '.join(measured)})"
    else:
        which = _state(runs[0])
    return Markdown(f"{amount} {which}")


def _beside(row: Row | None, mean: float) -> dict[str, str]:
    """The cells with a published BLEU (``row`` None: the table has none) and the difference from
    it.
    """
    if row is None or row.bleu is None:
        return {"paper": missing("not in the paper"), "difference": missing("–")}
    if math.isnan(row.bleu):
        return {"paper": missing("diverges"), "difference": missing("–")}
    if math.isnan(mean):
        difference = missing("–")
    else:
        difference = signed(mean - row.bleu)
    return {"paper": str(row.bleu), "difference": difference}


def csv_rows(corpus: CorpusRuns) -> list[dict[str, object]]:
    """The rows of ``report.csv``, one for each run, with each setting that differs between the
    systems.
    """
    values = corpus.setting_values
    differing = values.loc[:, values.nunique() > 1].to_dict("records")
    rows = []
    frame = corpus.frame
    described = zip(frame["run"], frame["system"], frame["seed"], differing, strict=True)
    for run, label, seed, settings in described:
        row = {"run": run.name, "data": "", "system": label, "norm": corpus.norm(label)}
        if run.data_folder:
            row["data"] = os.path.relpath(run.data_folder)
        row |= {"seed": seed, "machine": run.machine, "code": run.code}
        row["compared with"] = corpus.baselines.get(label)
        for name in corpus.measures:
            row[name] = run.values[name].value if name in run.values else math.nan
        if run.language_model:
            row["signature"] = run.perplexity.signature if run.perplexity else ""
        else:
            bleu = run.score("tokenized")
            row["parts of tokenized BLEU"] = bleu.verbose if bleu else ""
        row |= training_numbers(run)
        row |= settings
        row["state"] = _state(run).strip("*")
        row["problems"] = "; ".join(map(relative, run.problems))
        rows.append(row)
    return rows


def training_numbers(run: ReportedRun) -> dict[str, float]:
    """Numbers of a training run; NaN if the log lacks them."""
    log = run.log or TrainingLog()
    at_update = {loss: update for update, loss in log.valid.items() if math.isfinite(loss)}
    best = min(at_update, default=math.nan)
    speed = math.nan
    if log.tokens_per_second:
        speed = statistics.median(log.tokens_per_second.values())
    seconds = sum(start.seconds for start in log.starts) or math.nan
    tokens = sum(start.tokens for start in log.starts) or math.nan
    # `tokens` includes updates that were repeated after an interruption.
    done = sum(len(start.updates) for start in log.starts)
    repeated = done / max(1, len(log.train))
    per_update = math.nan
    if tokens > 0:
        per_update = round(tokens / (log.updates * repeated) / speed, 3)
    return {
        "updates": log.updates,
        LOSS: best,
        "at update": at_update.get(best, math.nan),
        "seconds": round(seconds, 1),
        "seconds per update": per_update,
        "tokens/s": speed,
        "tokens": tokens,
    }


def _state(run: ReportedRun) -> str:
    """One or two words for how far a run came."""
    if run.failed is not None:
        return missing(f"failed: {relative(run.failed) or 'no reason given'}")
    if not run.trained:
        return missing("not trained")
    if run.unfinished:
        return missing("not finished")
    if run.measured:
        return "complete"
    if run.language_model:
        return missing("trained, not measured")
    return missing("trained, not decoded" if run.decoded is None else "decoded, not scored")


def training_table(corpus: CorpusRuns) -> pandas.DataFrame:
    """How each run went."""
    rows = []
    for label, run in zip(corpus.frame["system"], corpus.runs, strict=True):
        log = run.log or TrainingLog()
        numbers = training_numbers(run)
        seed = missing("not known") if run.seed is None else str(run.seed)
        row = {"norm": label, "seed": seed, "run": code(run.name), "state": _state(run)}
        if run.max_update:
            limit = f"of {run.max_update:,}"
        else:
            limit = "(no limit)"
        row["updates"] = f"{log.updates:,} {limit}"
        if log.reason == "patience":
            row["updates"] += f" (patience {run.get('checkpoint.patience')})"
        loss = numbers[LOSS]
        update = numbers["at update"]
        row[LOSS] = _logged(loss, f"{loss:.3f} at {update:,.0f}")
        row["wall time"] = _wall_time(log, numbers["seconds"])
        per_update = numbers["seconds per update"]
        row["time per update"] = _logged(per_update, f"{per_update:.2f} s")
        row["tokens/s"] = _logged(numbers["tokens/s"], f"{numbers['tokens/s']:,.0f}")
        row["parameters"] = f"{log.parameters:,}" if log.parameters else _NOT_LOGGED
        rows.append(row)
    return pandas.DataFrame(rows)


_NOT_LOGGED = missing("not logged")


def _logged(value: float, text: str) -> str:
    if math.isnan(value):
        return _NOT_LOGGED
    return text


def _wall_time(log: TrainingLog, seconds: float) -> str:
    if math.isnan(seconds):
        return _NOT_LOGGED
    time = str(timedelta(seconds=round(seconds)))
    cut_off = any(start.done_seconds is None for start in log.starts)
    if cut_off:
        return f"at least {time}"
    return time


def machines_table(runs: Sequence[ReportedRun]) -> pandas.DataFrame:
    """Versions and hardware, as each start of a training run recorded them, without duplicates."""
    rows = []
    for run in runs:
        for start in run.starts:
            row = {"torch": "none"}
            for name, value in start.items():
                if name not in _OF_A_START:
                    row[name.replace("_", " ")] = _plain(value)
            row["runs"] = run.name
            started = str(start.get("started", "not recorded"))
            rows.append(row | {"starts": started, "first start": started, "last start": started})
    starts = pandas.DataFrame(rows).fillna("none")
    if starts.empty:
        return starts
    names = {"runs": lambda runs: ", ".join(dict.fromkeys(runs)), "starts": "count"}
    names |= {"first start": "min", "last start": "max"}
    described = [name for name in starts if name not in names]
    table = starts.groupby(described, sort=False).agg(names).reset_index()
    table.index = [f"machine {row + 1}" for row in table.index]
    if len(table) == 1:
        table.index = ["all starts"]
    return table.T.rename_axis("what").reset_index()


def _plain(value: object) -> str:
    """A value of starts.jsonl in words."""
    if isinstance(value, list):  # eight times the same GPU
        parts = []
        for text, times in Counter(map(_plain, value)).items():
            parts.append(f"{times} × {text}" if times > 1 else text)
        return "; ".join(parts) or "none"
    if value in (None, ""):
        return "none"
    return str(value)


def settings_tables(corpus: CorpusRuns) -> dict:
    """Tables of what differs between the systems (``differing``) and what does not (``common``)."""
    values = corpus.setting_values
    same = values.nunique() == 1
    by_system = values.loc[:, ~same].groupby(corpus.frame["system"], sort=False)
    differing = by_system.agg(lambda column: ", ".join(dict.fromkeys(column)))
    main = {}
    for name, value in values.loc[:, same].iloc[0].items():
        # fairseq's values for "off": false, -1, an empty text, and 0 as a limit.
        off = value in ("False", "-1", '""') or (value == "0" and "max_" in name)
        if role_of(name).main and not off:
            main[name] = value
    return {
        "differing": differing.T.rename(index=code).rename_axis("setting").reset_index(),
        "common": pandas.DataFrame({"setting": map(code, main), "value": main.values()}),
        "rest": sum(same) - len(main),
    }


def commands(corpus: CorpusRuns) -> list[str]:
    """The command of the last start of each run, whose settings are those of the run."""
    lines = []
    for run in corpus.runs:
        if run.starts and "command" in run.starts[-1]:
            arguments = map(relative, run.starts[-1]["command"])
            lines.append(shlex.join(["pn", "train", *arguments]))
    return lines


def signatures(corpus: CorpusRuns) -> dict[str, list[str]]:
    """Title of a measure -> the ways in which the runs were scored."""
    found: dict[str, set[str]] = {}
    for run in corpus.runs:
        for value in run.values.values():
            if value.signature:
                found.setdefault(value.measure.title, set()).add(value.signature)
    return {title: sorted(of_measure) for title, of_measure in found.items()}
