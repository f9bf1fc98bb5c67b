"""The tables of a report: data, results, training, settings and hardware of runs, and the rows
of ``report.csv``.
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
from pn_fairseq.pipeline.metrics import METRICS
from pn_fairseq.pipeline.published import Row
from pn_fairseq.pipeline.training_log import TrainingLog
from pn_fairseq.report.intervals import signed
from pn_fairseq.report.markdown import Markdown, code, missing
from pn_fairseq.report.runs import Run
from pn_fairseq.report.significance import LOSS, MEASURES
from pn_fairseq.report.systems import Corpus

#: Counts of prepared text, and what a report calls them.
_COUNTS_OF_PAIRS = {split: f"sentence pairs, {split}" for split in ("train", "valid", "test")}
_COUNTS_OF_TOKENS = {split: f"tokens, {split}" for split in ("train", "valid", "test")} | {
    "vocabulary": "vocabulary",
    "train.unk_percent": "% <unk>, train",
    "test.unk_percent": "% <unk>, test",
}

#: The settings that one asks for first; all others are in config.yaml.
_MAIN_SETTINGS = re.compile(
    r".*\._name$|encoder norm$|size$|average_last$|tokens_per_update$|sentences per update$"
    r"|model\.|criterion\.|optimizer\.|lr_scheduler\."
    r"|optimization\.(max_update|max_epoch|lr|stop_min_lr|clip_norm)$"
    r"|dataset\.(max_tokens|required_batch_size_multiple|validate_interval_updates)$"
    r"|checkpoint\.(keep_last_epochs|keep_interval_updates|save_interval_updates|patience)$"
    r"|common\.(seed|fp16|bf16|amp|memory_efficient_fp16)$|generation\.(beam|lenpen)$"
)

#: What describes a start of a training run and not the machine it ran on (pn train).
_OF_A_START = ("started", "command", "world_size", "tokens_per_update", "update_freq", "max_tokens")


def progress(text: str) -> None:
    """A line of progress, where stderr is a terminal."""
    if sys.stderr.isatty():
        say("pn report", text)


def number(value: float, digits: int = 2) -> str:
    """A number with a fixed number of digits and a comma in the thousands."""
    return f"{value:,.{digits}f}" if math.isfinite(value) else "not finite"


def relative(text: str | Path) -> str:
    """A path, or a text with paths in it, relative to the working directory where they are below
    it.
    """
    folder = os.getcwd().rstrip("/")
    # Where a path begins: not in the middle of another one that has the same names in it.
    return (
        re.sub(rf"(?<![^\s'\"=:,(\[]){re.escape(folder)}/", "", str(text)) if folder else str(text)
    )


def _plain(value: object) -> str:
    if isinstance(value, dict):
        parts = {name.replace("_", " "): part for name, part in value.items()}
        return (
            ", ".join(
                f"{name} {_plain(part)}" if part else f"no {name}" for name, part in parts.items()
            )
            or "none"
        )
    if isinstance(value, list):  # eight times the same GPU
        counts = Counter(map(_plain, value))
        return (
            "; ".join(f"{times} × {text}" if times > 1 else text for text, times in counts.items())
            or "none"
        )
    return "none" if value in (None, "") else str(value)


def data(corpus: Corpus) -> pandas.DataFrame:
    """Where the data is, its settings that are not off, and its counts."""
    folders = corpus.data_folders()
    rows = {
        "prepared data": code(", ".join(map(os.path.relpath, folders)))
        if folders
        else missing("not recorded")
    }
    if corpus.data is None:
        rows["settings"] = missing("not recorded")
    for key, value in (corpus.data or {}).items():
        off = not value or value == "0" and key not in ("lower", "bpe")
        # with a dot: a file, and its checksum
        if not off and key not in ("folder", "clean_stage") and "." not in key:
            rows[code(key)] = code(value)
    counts = corpus.counts()
    titles = _COUNTS_OF_TOKENS if corpus.runs[0].language_model else _COUNTS_OF_PAIRS
    for name, title in titles.items():
        rows[title] = f"{counts[name]:,.12g}" if name in counts else missing("not known")
    return pandas.DataFrame({"data": rows.keys(), "value": rows.values()})


def results(
    corpus: Corpus,
    measures: Mapping[str, str],
    verb: str,
    published: Mapping[str, Row] | None = None,
) -> pandas.DataFrame:
    """Means and deviations over seeds.

    Args:
        measures: name -> title.
        verb: how the numbers were obtained.
        published: the rows of a published table that are shown beside systems; None: no table is
            shown.
    """
    scores, rows = corpus.scores(), []
    means = (
        scores.groupby(level="system", sort=False)
        .agg(["mean", "std"])
        .reindex(list(corpus.settings))
    )
    for label in corpus.settings:
        runs = corpus.members(label)
        measured = {
            "not known" if run.seed is None else run.seed: None for run in runs if run.measured
        }
        seeds, state = len({run.seed for run in runs}), _state(runs[0])
        amount = f"{len(measured)} of {seeds}" if len(measured) < seeds else str(seeds)
        names = f"({', '.join(map(str, measured))})" if measured else state
        row = {"norm": label, f"seeds {verb}": Markdown(f"{amount} {names}")}
        for measure, name in measures.items():
            mean, deviation = means.loc[label, measure]
            digits = MEASURES[measure].decimals if measure in MEASURES else 2
            lacking = missing("not scored by it" if measure in METRICS else "no statistics")
            absent = state if not measured else lacking if math.isnan(mean) else None
            spread = missing("– (one seed)") if math.isnan(deviation) else number(deviation, digits)
            row |= {name: absent or number(mean, digits), f"std, {name}": absent or spread}
            if measure == "tokenized" and published is not None:
                bleu = published[label].bleu if label in published else None
                known = bleu is not None and not math.isnan(bleu)
                absent = missing("not in the paper" if bleu is None else "diverges")
                row["paper"] = str(bleu) if known else absent
                row["difference"] = signed(mean - bleu) if known and measured else missing("–")
        rows.append(row)
    return pandas.DataFrame(rows)


def rows(corpus: Corpus) -> list[dict[str, object]]:
    """The rows of ``report.csv``, one for each run, with each setting that differs between the
    systems.
    """
    values = corpus.setting_values
    differing = values.loc[:, values.nunique() > 1].to_dict("records")
    made = []
    for (label, seed, run), settings in zip(
        corpus.frame[["system", "seed", "run"]].itertuples(index=False), differing, strict=True
    ):
        parts = {"parts of tokenized BLEU": run.score("tokenized").verbose if run.scores else ""}
        if run.language_model:
            parts = {"signature": run.perplexity.signature if run.perplexity else ""}
        made.append(
            {
                "run": run.name,
                "data": os.path.relpath(run.data_folder) if run.data_folder else "",
                "system": label,
            }
            | {"norm": corpus.norm(label), "seed": seed, "machine": run.machine, "code": run.code}
            | {"compared with": corpus.baselines.get(label), **run.measures, **parts}
            | _of_training(run)
            | settings
            | {"state": _state(run).strip("*"), "problems": "; ".join(map(relative, run.problems))}
        )
    return made


def _of_training(run: Run) -> dict[str, float]:
    """Numbers of a training run: NaN where the log does not have them."""
    log = run.log or TrainingLog()
    valid = {loss: update for update, loss in log.valid.items() if math.isfinite(loss)}
    best, speed = (
        min(valid, default=math.nan),
        statistics.median(log.tokens_per_second.values() or [math.nan]),
    )
    seconds, tokens = (
        sum(getattr(start, what) for start in log.starts) or math.nan
        for what in ("seconds", "tokens")
    )
    # `tokens` includes updates that were repeated after an interruption.
    repeated = sum(len(start.updates) for start in log.starts) / max(1, len(log.train))
    return {
        "updates": log.updates,
        LOSS: best,
        "at update": valid.get(best, math.nan),
        "seconds": round(seconds, 1),
        "seconds per update": round(tokens / (log.updates * repeated) / speed, 3)
        if tokens > 0
        else math.nan,
        "tokens/s": speed,
        "tokens": tokens,
    }


def _state(run: Run) -> str:
    """One word or two for how far a run came."""
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


def training(corpus: Corpus) -> pandas.DataFrame:
    """How each run went."""
    rows = []
    for label, run in zip(corpus.frame["system"], corpus.runs, strict=True):
        numbers, log = _of_training(run), run.log or TrainingLog()
        whole = all(start.done_seconds is not None for start in log.starts)
        limit = f"of {run.max_update:,}" if run.max_update else "(no limit)"
        patience = (
            f" (patience {run.get('checkpoint.patience')})" if log.reason == "patience" else ""
        )
        wall_time = (
            ""
            if math.isnan(numbers["seconds"])
            else str(timedelta(seconds=round(numbers["seconds"])))
        )
        texts = {
            LOSS: f"{numbers[LOSS]:.3f} at {numbers['at update']:,.0f}",
            "wall time": f"{'' if whole else 'at least '}{wall_time or math.nan}",
            "time per update": f"{numbers['seconds per update']:.2f} s",
            "tokens/s": f"{numbers['tokens/s']:,.0f}",
            "parameters": f"{log.parameters or math.nan:,}",
        }
        rows.append(
            {"norm": label, "seed": missing("not known") if run.seed is None else str(run.seed)}
            | {"run": code(run.name), "state": _state(run)}
            | {"updates": f"{log.updates:,} {limit}{patience}"}
            | {
                name: missing("not logged") if "nan" in text else text
                for name, text in texts.items()
            }
        )
    return pandas.DataFrame(rows)


def machines(runs: Sequence[Run]) -> pandas.DataFrame:
    """Versions and hardware, as each start of a training run recorded them; the same ones once."""
    starts = pandas.DataFrame(
        {"torch": "none"}
        | {
            name.replace("_", " "): _plain(value)
            for name, value in start.items()
            if name not in _OF_A_START
        }
        | {"runs": run.name}
        | dict.fromkeys(
            ("starts", "first start", "last start"), str(start.get("started", "not recorded"))
        )
        for run in runs
        for start in run.starts
    ).fillna("none")
    if starts.empty:
        return starts
    names = {"runs": lambda runs: ", ".join(dict.fromkeys(runs)), "starts": "count"}
    names |= {"first start": "min", "last start": "max"}
    table = (
        starts.groupby([name for name in starts if name not in names], sort=False)
        .agg(names)
        .reset_index()
    )
    table.index = (
        ["all starts"] if len(table) == 1 else [f"machine {row + 1}" for row in table.index]
    )
    return table.T.rename_axis("what").reset_index()


def settings(corpus: Corpus) -> dict:
    """Tables of what differs between the systems (``differing``) and what does not (``common``)."""
    values = corpus.setting_values
    same = values.nunique() == 1
    by_system = values.loc[:, ~same].groupby(corpus.frame["system"], sort=False)
    differing = by_system.agg(lambda column: ", ".join(dict.fromkeys(column)))
    # fairseq's ways to say "not": false, -1, no text; and 0 as a limit.
    main = {
        name: value
        for name, value in values.loc[:, same].iloc[0].items()
        if _MAIN_SETTINGS.match(name)
        and value not in ("False", "-1", '""')
        and not (value == "0" and "max_" in name)
    }
    return {
        "differing": differing.T.rename(index=code).rename_axis("setting").reset_index(),
        "common": pandas.DataFrame({"setting": map(code, main), "value": main.values()}),
        "rest": sum(same) - len(main),
    }


def commands(corpus: Corpus) -> list[str]:
    """The commands of pn train, of the last start of each run: its settings are those of the
    run.
    """
    starts = [run.starts[-1] for run in corpus.runs if run.starts]
    return [
        shlex.join(["pn", "train", *map(relative, start["command"])])
        for start in starts
        if "command" in start
    ]


def signatures(corpus: Corpus) -> dict[str, list[str]]:
    """Title of a score -> the ways in which the runs were scored."""
    signatures: dict[str, set[str]] = {}
    for run in corpus.runs:
        scores = {metric.title: run.score(name) for name, metric in METRICS.items()}
        for title, score in (scores | {"perplexity": run.perplexity}).items():
            if score:
                signatures.setdefault(title, set()).add(score.signature)
    return {title: sorted(of_score) for title, of_score in signatures.items()}
