"""What the report's template (``report.md.j2``) shows about runs: numbers and tables."""

from __future__ import annotations

import math
import os
import re
import shlex
import statistics
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path

import pandas

from pn_fairseq import __version__
from pn_fairseq.common.command import UserError, say
from pn_fairseq.common.files import atomic_write, read_settings, recorded
from pn_fairseq.common.published import PAPER, Row, Table, recognise
from pn_fairseq.pipeline.bootstrap import compare_folders, p_text
from pn_fairseq.pipeline.metrics import METRICS
from pn_fairseq.pipeline.scoring import low_bleu
from pn_fairseq.pipeline.training_log import TrainingLog
from pn_fairseq.report import curves, intervals
from pn_fairseq.report.figures import find_probe
from pn_fairseq.report.intervals import Compared, count, signed
from pn_fairseq.report.markdown import Markdown, code, missing, template
from pn_fairseq.report.runs import Run
from pn_fairseq.report.significance import LOSS, MEASURES
from pn_fairseq.report.systems import SEED, Corpus, as_text, comparable, norm_labels

#: Pictures in the folder of the report.
CURVES, INTERVALS = "report-curves-{}.png", "report-intervals-{}.png"

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

#: Systems in one picture of learning curves, without LN; more would look alike.
_OF_A_PICTURE = 5

#: What describes a start of a training and not the machine it ran on (pn train).
_OF_A_START = ("started", "command", "world_size", "tokens_per_update", "update_freq", "max_tokens")


def progress(text: str) -> None:
    """A line of progress, where stderr is a terminal."""
    if sys.stderr.isatty():
        say("pn report", text)


def number(value: float, digits: int = 2) -> str:
    """A number with a fixed number of digits and a comma in the thousands."""
    return f"{value:,.{digits}f}" if math.isfinite(value) else "not finite"


def relative(words: str | Path) -> str:
    """A path, or a text with paths in it, relative to the working directory where they are below it."""
    folder = os.getcwd().rstrip("/")
    # Where a path begins: not in the middle of another one that has the same names in it.
    return re.sub(rf"(?<![^\s'\"=:,(\[]){re.escape(folder)}/", "", str(words)) if folder else str(words)


def _plain(value: object) -> str:
    if isinstance(value, dict):
        parts = {name.replace("_", " "): part for name, part in value.items()}
        return ", ".join(f"{name} {_plain(part)}" if part else f"no {name}" for name, part in parts.items()) or "none"
    if isinstance(value, list):  # eight times the same GPU
        counts = Counter(map(_plain, value))
        return "; ".join(f"{times} × {text}" if times > 1 else text for text, times in counts.items()) or "none"
    return "none" if value in (None, "") else str(value)


def _data(corpus: Corpus) -> pandas.DataFrame:
    """Where the data is, its settings that are not off, and its counts."""
    places = list(dict.fromkeys(os.path.relpath(run.data_folder) for run in corpus.runs if run.data_folder))
    rows = {"prepared data": code(", ".join(places)) if places else missing("not recorded")}
    if corpus.data is None:
        rows["settings"] = missing("not recorded")
    settings = corpus.data or {}
    for key, value in settings.items():
        off = not value or value == "0" and key not in ("lower", "bpe")
        if not off and key not in ("folder", "clean_stage") and "." not in key:  # with a dot: a file, and its checksum
            rows[code(key)] = code(value)
    files = [recorded(run.data_folder, "counts") for run in corpus.runs if run.data_folder]
    counts = next((read_settings(file) for file in files if file.is_file()), {})  # empty if the data is gone
    titles = _COUNTS_OF_TOKENS if corpus.runs[0].language_model else _COUNTS_OF_PAIRS
    for name, title in titles.items():
        rows[title] = f"{float(counts[name]):,.12g}" if name in counts else missing("not known")
    return pandas.DataFrame({"data": rows.keys(), "value": rows.values()})


def _published(corpus: Corpus, paper: Table | None) -> dict[str, Row]:
    """System -> its row in the paper's table, of those that have one."""
    names = {label: name for name, label in norm_labels().items()}
    rows = {
        label: paper.row(names.get(corpus.norm(label)), settings)
        for label, settings in corpus.settings.items()
        if paper
    }
    return {label: row for label, row in rows.items() if row}


def results(corpus: Corpus, measures: Mapping[str, str], verb: str, paper: Table | None = None) -> pandas.DataFrame:
    """Means and deviations of ``measures`` (name -> title) over seeds; ``verb`` says how they come about."""
    scores, rows, published = corpus.scores(), [], _published(corpus, paper)
    means = scores.groupby(level="system", sort=False).agg(["mean", "std"]).reindex(list(corpus.settings))
    for label in corpus.settings:
        runs = corpus.members(label)
        measured = {"not known" if run.seed is None else run.seed: None for run in runs if run.measured}
        seeds, why = len({run.seed for run in runs}), _state(runs[0])
        amount = f"{len(measured)} of {seeds}" if len(measured) < seeds else str(seeds)
        numbers = f"({', '.join(map(str, measured))})" if measured else why
        row = {"norm": label, f"seeds {verb}": Markdown(f"{amount} {numbers}")}
        for measure, name in measures.items():
            mean, deviation = means.loc[label, measure]
            digits = MEASURES[measure].decimals if measure in MEASURES else 2
            lacking = missing("not scored by it" if measure in METRICS else "no statistics")
            absent = why if not measured else lacking if math.isnan(mean) else None
            spread = missing("– (one seed)") if math.isnan(deviation) else number(deviation, digits)
            row |= {name: absent or number(mean, digits), f"std, {name}": absent or spread}
            if measure == "tokenized" and paper:
                bleu = published[label].bleu if label in published else None
                known = bleu is not None and not math.isnan(bleu)
                absent = missing("not in the paper" if bleu is None else "diverges")
                row["paper"] = str(bleu) if known else absent
                row["difference"] = signed(mean - bleu) if known and measured else missing("–")
        rows.append(row)
    return pandas.DataFrame(rows)


def _headline(corpus: Corpus, compared: Mapping[str, Compared]) -> list[tuple[str, str]]:
    """The results, as (measure, sentence); first the settings that differ and are not the norm."""
    headline, systems = [], {}
    for label, other in corpus.baselines.items():
        if names := corpus.beside_the_norm(label, other):
            systems.setdefault((other, *names), []).append(label)
    for (other, *names), labels in systems.items():
        verb = "differs" if len(labels) == 1 else "differ"
        sentence = f"{', '.join(labels)} {verb} from {other} in {', '.join(names)}."
        headline.append(("Not only the norms differ", sentence))
    for of_measure in compared.values():
        for family in of_measure.families:
            where = f" ({family.control})" if len(of_measure.families) > 1 else ""
            headline.append((f"{of_measure.measure.heading}{where}", of_measure.sentence(family)))
    if any(of_measure.families for of_measure in compared.values()):
        return headline
    scored = corpus.scores().index.unique("system")
    if not len(scored):
        return [*headline, ("Not known", "no run was scored.")]
    if len(scored) == 1:
        return [*headline, ("Nothing to compare", f"{scored[0]} is the only system that was scored.")]
    why = dict.fromkeys(reason for of_measure in compared.values() for reason in of_measure.untested.values())
    lacking = "; ".join(why) or "no control (LN), with which the systems could be compared"
    return [*headline, ("No difference is tested over seeds", f"{lacking}.")]


def _of_a_seed(run: Run, other: Run, resamples: int, comparisons: int) -> dict[str, str]:
    """Score -> the difference of a run from another one, and p, corrected by Bonferroni for the ``comparisons``."""
    try:
        compared = compare_folders({"baseline": other.result, "system": run.result}, resamples=resamples)
    except (UserError, OSError) as error:
        return dict.fromkeys(METRICS, f"not computed ({' '.join(str(error).split())})")
    low = any(low_bleu(result.score) for result in compared["tokenized"].results.values())
    texts = {}
    for measure, comparison in compared.items():
        baseline, system = comparison.results.values()
        p = "not tested (BLEU below 1)" if low else p_text(min(1.0, system.p_value * comparisons))
        texts[measure] = f"{signed(system.score - baseline.score)}, {p}"
    return texts


def bootstrap(corpus: Corpus, resamples: int) -> tuple[pandas.DataFrame, int]:
    """Every scored system against LN over test sentences, and by how many comparisons each p is corrected."""
    scored = set(corpus.scores().index.unique("system"))
    tested = {label: baseline for label, baseline in corpus.baselines.items() if {label, baseline} <= scored}
    rows = []
    for label, baseline in tested.items():
        progress(f"comparing {label} with {baseline}")
        parts = {measure: [] for measure in METRICS}
        for run in corpus.members(label):
            partner = next((one for one in corpus.members(baseline) if one.scores and one.seed == run.seed), None)
            if run.scores and partner:
                for measure, text in _of_a_seed(run, partner, resamples, len(tested)).items():
                    parts[measure].append(f"seed {'not known' if run.seed is None else run.seed}: {text}")
        for measure, metric in METRICS.items():
            text = "; ".join(parts[measure]) or missing("– (no seed in common)")
            rows.append({"norm": label, "measure": metric.title, "difference and p, per seed": text})
    return pandas.DataFrame(rows), len(tested)


def raw_scores(corpora: Sequence[Corpus]) -> pandas.DataFrame:
    """A row for each run, with a column for each setting that differs between the systems of its corpus."""
    rows = []
    for corpus in corpora:
        settings = _setting_values(corpus)
        differing = settings.loc[:, settings.nunique() > 1].reset_index(drop=True)
        for number, (label, seed, run) in enumerate(corpus.frame[["system", "seed", "run"]].itertuples(index=False)):
            parts = {"parts of tokenized BLEU": run.score("tokenized").verbose if run.scores else ""}
            if run.language_model:
                parts = {"signature": run.perplexity.signature if run.perplexity else ""}
            rows.append(
                {"run": run.name, "data": os.path.relpath(run.data_folder) if run.data_folder else "", "system": label}
                | {"norm": corpus.norm(label), "seed": seed, "machine": run.machine, "code": run.code}
                | {"compared with": corpus.baselines.get(label), **run.measures, **parts}
                | _of_training(run)
                | differing.loc[number].to_dict()
                | {"state": _state(run).strip("*"), "problems": "; ".join(map(relative, run.problems))}
            )
    return pandas.DataFrame(rows)


def _of_training(run: Run) -> dict[str, float]:
    """Numbers of a training: NaN where the log does not have them."""
    log = run.log or TrainingLog()
    valid = {loss: update for update, loss in log.valid.items() if math.isfinite(loss)}
    best, speed = min(valid, default=math.nan), statistics.median(log.tokens_per_second.values() or [math.nan])
    seconds, tokens = (sum(getattr(start, what) for start in log.starts) or math.nan for what in ("seconds", "tokens"))
    # `tokens` includes updates that were repeated after an interruption.
    repeated = sum(len(start.updates) for start in log.starts) / max(1, len(log.train))
    return {
        "updates": log.updates,
        LOSS: best,
        "at update": valid.get(best, math.nan),
        "seconds": round(seconds, 1),
        "seconds per update": round(tokens / (log.updates * repeated) / speed, 3) if tokens > 0 else math.nan,
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
        wall_time = "" if math.isnan(numbers["seconds"]) else str(timedelta(seconds=round(numbers["seconds"])))
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
            | {"updates": f"{log.updates:,} " + (f"of {run.max_update:,}" if run.max_update else "(no limit)")}
            | {name: missing("not logged") if "nan" in text else text for name, text in texts.items()}
        )
    return pandas.DataFrame(rows)


def _machines(runs: Sequence[Run]) -> pandas.DataFrame:
    """Versions and hardware, as each start of a training recorded them; the same ones once."""
    starts = pandas.DataFrame(
        {"torch": "none"}
        | {name.replace("_", " "): _plain(value) for name, value in start.items() if name not in _OF_A_START}
        | {"runs": run.name}
        | dict.fromkeys(("starts", "first start", "last start"), str(start.get("started", "not recorded")))
        for run in runs
        for start in run.starts
    ).fillna("none")
    if starts.empty:
        return starts
    names = {"runs": lambda runs: ", ".join(dict.fromkeys(runs)), "starts": "count"}
    names |= {"first start": "min", "last start": "max"}
    table = starts.groupby([name for name in starts if name not in names], sort=False).agg(names).reset_index()
    table.index = ["all starts"] if len(table) == 1 else [f"machine {row + 1}" for row in table.index]
    return table.T.rename_axis("what").reset_index()


def _setting_values(corpus: Corpus) -> pandas.DataFrame:
    """The settings of each run in the order of ``corpus.runs``, a column for each, by system; without the seed."""
    rows = [
        {"system": label} | {name: as_text(value) for name, value in comparable(run).items() if name != SEED}
        for label, run in zip(corpus.frame["system"], corpus.runs, strict=True)
    ]
    return pandas.DataFrame(rows).fillna(as_text(None)).set_index("system")


def _settings(corpus: Corpus) -> dict:
    """Tables of what differs between the systems (``differing``) and what does not (``common``)."""
    values = _setting_values(corpus)
    same = values.nunique() == 1
    differ = (
        values.loc[:, ~same].groupby(level="system", sort=False).agg(lambda column: ", ".join(dict.fromkeys(column)))
    )
    # fairseq's ways to say "not": false, -1, no text; and 0 as a limit.
    main = {
        name: value
        for name, value in values.loc[:, same].iloc[0].items()
        if _MAIN_SETTINGS.match(name) and value not in ("False", "-1", '""') and not (value == "0" and "max_" in name)
    }
    return {
        "differing": differ.T.rename(index=code).rename_axis("setting").reset_index(),
        "common": pandas.DataFrame({"setting": map(code, main), "value": main.values()}),
        "rest": sum(same) - len(main),
    }


def _commands(corpus: Corpus) -> list[str]:
    """The commands of pn train."""
    starts = [run.starts[0] for run in corpus.runs if run.starts]
    return [shlex.join(["pn", "train", *map(relative, start["command"])]) for start in starts if "command" in start]


def _signatures(corpus: Corpus) -> dict[str, list[str]]:
    """Title of a score -> the ways in which the runs were scored."""
    signatures: dict[str, set[str]] = {}
    for run in corpus.runs:
        scores = {metric.title: run.score(name) for name, metric in METRICS.items()}
        for title, score in (scores | {"perplexity": run.perplexity}).items():
            if score:
                signatures.setdefault(title, set()).add(score.signature)
    return {title: sorted(of_score) for title, of_score in signatures.items()}


def about(corpus: Corpus, paper: str | Table, resamples: int) -> dict:
    """What ``translation.md.j2`` shows of the runs on a corpus.

    ``paper``: a table, the name of one, auto or none.
    """
    runs = corpus.runs
    size = next((run.decoded for run in runs if run.decoded), None)
    # Runs that were scored before a metric existed are shown without it.
    metrics = {name: metric.title for name, metric in METRICS.items() if any(run.score(name) for run in runs)}
    titles = metrics or {name: metric.title for name, metric in METRICS.items()}
    name = (recognise(corpus.data or {}, size) or "none") if paper == "auto" else paper
    table = name if isinstance(name, Table) else PAPER.get(name)
    rows = _published(corpus, table)
    return {
        "results": results(corpus, titles, "scored", table),
        "paper": table,
        "otherwise": {label: row.missing(corpus.settings[label]) for label, row in rows.items()},
        "score_lines": [
            (label, row, run.seed, run.score("tokenized"))
            for label, row in rows.items()
            if row.signature
            for run in corpus.members(label)
            if run.scores
        ],
        "size": size,
        "split": bool(table)
        and any(run.score("tokenized").compound_split != table.compound_split for run in runs if run.scores),
        "decodings": sorted({run.decoding for run in runs if run.decoding}),
        "bootstrap": bootstrap(corpus, resamples),
    }


def _together(corpus: Corpus) -> list[list[str]]:
    """The systems in the order of the tables, a few for each picture, each with the LN that it is compared with."""
    baselines = corpus.baselines
    others = [label for label in corpus.settings if label not in baselines.values()]
    parts = [others[start : start + _OF_A_PICTURE] for start in range(0, len(others), _OF_A_PICTURE)]
    shown = [{*part, *(baselines[label] for label in part if label in baselines)} for part in parts]
    return [[label for label in corpus.settings if label in part] for part in shown]


def _learning_curves(corpora: Sequence[Corpus], table: Path) -> list[list[str]]:
    """Write the records of the learning curves into ``table``, draw them, and name the pictures of each corpus."""
    records, pictures = [], []
    for corpus in corpora:
        pictures.append([])
        for labels in _together(corpus):
            logs = {label: {run.name: run.log for run in corpus.members(label) if run.log} for label in labels}
            picture = CURVES.format(sum(map(len, pictures)) + 1)
            if rows := curves.records(picture, logs, corpus.baselines):
                records += rows
                pictures[-1].append(picture)
    progress("drawing learning curves")
    with atomic_write(table, "w") as file:
        pandas.DataFrame(records, columns=curves.COLUMNS).to_csv(file, index=False)
    curves.draw(table)
    return pictures


def build(
    runs: Sequence[Run],
    corpora: Sequence[Corpus],
    folder: Path,
    about: Callable[[Corpus], dict],
    planned: Sequence[tuple[str, str]] = (),
    **settings,
) -> tuple[str, list[str]]:
    """A report about runs as Markdown, and the names of its pictures.

    Args:
        runs: as :func:`pn_fairseq.report.runs.read_runs` returns them.
        corpora: the runs that are known, by corpus.
        folder: where the pictures and the records of the learning curves go.
        about: returns what the template shows of the results on a corpus.
        planned: (system, column of report.csv) of comparisons that were planned before the runs.
        settings: the template also shows them.
    """
    pictures, shown_corpora = _learning_curves(corpora, folder / "report-curves.csv"), []
    for place, (corpus, drawn) in enumerate(zip(corpora, pictures, strict=True), 1):
        frame = raw_scores([corpus])
        compared = intervals.compare(frame)
        picture = intervals.plot(compared, list(corpus.settings), folder / INTERVALS.format(place))
        data = corpus.data or {}
        languages = [data.get("source"), data.get("target")]
        title = " to ".join(languages) if all(languages) else f"Data not known: {corpus.runs[0].name}"
        shown_corpora.append(
            {
                "title": data.get("corpus") or title,
                "data": _data(corpus),
                "signatures": _signatures(corpus),
                "pictures": drawn,
                "baselines": corpus.baselines,
                "headline": _headline(corpus, compared),
                "measures": compared.values(),
                "differences": intervals.table(compared),
                "intervals": picture,
                "machines": list(frame["machine"].unique()),
                "planned": [
                    (compared[column].measure.title, text)
                    for system, column in planned
                    if column in compared and (text := compared[column].planned(system))
                ],
                "training": training(corpus),
                "settings": _settings(corpus),
                "commands": _commands(corpus),
                **about(corpus),
            }
        )
    rendered = template("report.md.j2").render(
        settings, version=__version__, runs=runs, corpora=shown_corpora, machines=_machines(runs),
        systems=sum(len(corpus.settings) for corpus in corpora),
        problems=[(relative(run.path), relative(problem)) for run in runs for problem in run.problems],
        repeated=[
            (*system_and_seed, [run.name for run in repeated])
            for corpus in corpora
            for system_and_seed, repeated in corpus.frame.groupby(["system", "seed"], sort=False)["run"]
            if len(repeated) > 1
        ],
        probes=[(run.name, relative(str(probe))) for run in runs if (probe := find_probe(run))],
        figures=[file.name for file in sorted(folder.glob("figure-[2-7].png"))],  # of pn figures
        count=count,
    )  # fmt: skip
    intervals_drawn = [shown["intervals"] for shown in shown_corpora if shown["intervals"]]
    return re.sub(r"\n{3,}", "\n\n", rendered), sum(pictures, intervals_drawn)
