"""The files of a report: the page, with the template ``report.md.j2``, its pictures and tables."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pandas

from pn_fairseq import __version__
from pn_fairseq.common.files import atomic_write
from pn_fairseq.pipeline.metrics import Measure
from pn_fairseq.report import curves, intervals, tables
from pn_fairseq.report.markdown import Markdown, code, template
from pn_fairseq.report.measures import LOSS, MEASURES
from pn_fairseq.report.runs import ReportedRun
from pn_fairseq.report.systems import CorpusRuns

#: Pictures in the folder of the report.
CURVES = "report-curves-{}.png"
INTERVALS = "report-intervals-{}.png"

#: Systems in one picture of learning curves, without LN; more would look alike.
_OF_A_PICTURE = 5


def _headline(
    corpus: CorpusRuns, compared: Mapping[str, intervals.Compared]
) -> list[tuple[str, str]]:
    """The results, as (measure, sentence); first the differing settings other than the norm."""
    headline = _beside_the_norms(corpus)
    tested = [comparison for comparison in compared.values() if comparison.families]
    for comparison in tested:
        for family in comparison.families:
            title = comparison.measure.heading
            if len(comparison.families) > 1:
                title += f" ({family.control})"
            headline.append((title, comparison.sentence(family)))
    if tested:
        return headline
    scored = corpus.scores().index.unique("system")
    if len(scored) == 0:
        nothing = ("Not known", "no run was scored.")
    elif len(scored) == 1:
        nothing = ("Nothing to compare", f"{scored[0]} is the only system that was scored.")
    else:
        reasons: dict[str, None] = {}
        for comparison in compared.values():
            reasons |= dict.fromkeys(comparison.untested.values())
        control = "no control (LN), with which the systems could be compared"
        nothing = ("No difference is tested over seeds", f"{'; '.join(reasons) or control}.")
    return [*headline, nothing]


def _beside_the_norms(corpus: CorpusRuns) -> list[tuple[str, str]]:
    """Sentences about the systems that differ from their baseline in more than the norm."""
    systems: dict[tuple[str, ...], list[str]] = {}
    for label, baseline in corpus.baselines.items():
        names = corpus.beside_the_norm(label, baseline)
        if names:
            systems.setdefault((baseline, *names), []).append(label)
    sentences = []
    for (baseline, *names), labels in systems.items():
        verb = "differs" if len(labels) == 1 else "differ"
        sentence = f"{', '.join(labels)} {verb} from {baseline} in {', '.join(names)}."
        sentences.append(("Not only the norms differ", sentence))
    return sentences


def _together(corpus: CorpusRuns) -> list[list[str]]:
    """The systems in the order of the tables, a few for each picture, each with the LN system with
    which it is compared.
    """
    baselines = corpus.baselines
    others = [label for label in corpus.settings if label not in baselines.values()]
    pictures = []
    for start in range(0, len(others), _OF_A_PICTURE):
        shown = set(others[start : start + _OF_A_PICTURE])
        shown |= {baselines[label] for label in shown if label in baselines}
        pictures.append([label for label in corpus.settings if label in shown])
    return pictures


def _learning_curves(corpora: Sequence[CorpusRuns], folder: Path) -> list[list[str]]:
    """Draw the learning curves, write their records, and name the pictures of each corpus."""
    tables.progress("drawing learning curves")
    records: list[dict] = []
    pictures: list[list[str]] = []
    drawn = 0
    for corpus in corpora:
        pictures.append([])
        for labels in _together(corpus):
            logs = {}
            for label in labels:
                logs[label] = {run.name: run.log for run in corpus.members(label) if run.log}
            picture = CURVES.format(drawn + 1)
            rows = curves.records(picture, logs, corpus.baselines)
            if rows:
                curves.plot(pandas.DataFrame(rows), folder / picture)
                records += rows
                pictures[-1].append(picture)
                drawn += 1
    with atomic_write(folder / "report-curves.csv", "w") as file:
        pandas.DataFrame(records, columns=curves.COLUMNS).to_csv(file, index=False)
    return pictures


def _section(
    corpus: CorpusRuns,
    frame: pandas.DataFrame,
    picture: Path,
    planned: Sequence[tuple[str, str]],
) -> dict:
    """What the template shows of the runs on a corpus except their scores; draws ``picture``."""
    compared = intervals.compare(frame, _compared_by(corpus))
    answers = []
    for system, column in planned:
        if column in compared:
            answer = compared[column].planned(system)
            if answer:
                answers.append((compared[column].measure.title, answer))
    order = list(corpus.settings)
    seeds = intervals.seeds_of(frame)
    return {
        "data": tables.data_table(corpus),
        "signatures": tables.signatures(corpus),
        "baselines": corpus.baselines,
        "headline": _headline(corpus, compared),
        "measures": compared.values(),
        "differences": intervals.differences_table(compared),
        "intervals": intervals.plot(compared, order, picture, seeds),
        "machines": list(frame["machine"].unique()),
        "planned": answers,
        "training": tables.training_table(corpus),
        "settings": tables.settings_tables(corpus),
        "commands": tables.commands(corpus),
    }


def _compared_by(corpus: CorpusRuns) -> dict[str, Measure]:
    """The measures of a corpus and the validation loss, in the order of the tables."""
    shown = {}
    for name, measure in MEASURES.items():
        if name == LOSS or name in corpus.measures:
            shown[name] = measure
    return shown | corpus.measures


def _title(corpus: CorpusRuns) -> str:
    data = corpus.data or {}
    source = data.get("source")
    target = data.get("target")
    if source and target:
        languages = f"{source} to {target}"
    else:
        languages = ""
    return data.get("corpus") or languages or f"Data not known: {corpus.runs[0].name}"


def _titles(corpora: Sequence[CorpusRuns]) -> list[str]:
    """Titles that tell ``corpora`` apart: equal ones also name the data and, if they are still
    equal, the runs.
    """
    titles = [_title(corpus) for corpus in corpora]
    folders = []
    names = []
    for corpus in corpora:
        folders.append(", ".join(map(os.path.relpath, corpus.data_folders())))
        names.append(", ".join(run.name for run in corpus.runs))
    for details in (folders, names):
        times = Counter(titles)
        for number, (title, detail) in enumerate(zip(list(titles), details, strict=True)):
            if times[title] > 1 and detail:
                titles[number] = f"{title} ({detail})"
    return titles


def write(
    folder: Path,
    runs: Sequence[ReportedRun],
    corpora: Sequence[CorpusRuns],
    content: Callable[[CorpusRuns], dict],
    planned: Sequence[tuple[str, str]] = (),
    **settings,
) -> list[Path]:
    """Write ``report.md`` and ``report.csv``, whose paths are returned, and the pictures.

    Args:
        folder: created if needed. Pictures of an earlier report are deleted.
        runs: as :func:`pn_fairseq.report.runs.read_runs` returns them.
        corpora: the known runs, by corpus.
        content: returns what the template shows of the scores on a corpus.
        planned: (system, column of report.csv) of comparisons that were planned before the runs.
        settings: further values for the template.

    Raises:
        OSError: a file cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    all_rows: list[dict] = []
    sections = []
    drawn = _learning_curves(corpora, folder)
    titles = _titles(corpora)
    for number, (corpus, pictures) in enumerate(zip(corpora, drawn, strict=True), 1):
        rows = tables.csv_rows(corpus)
        all_rows += rows
        picture = folder / INTERVALS.format(number)
        section = _section(corpus, pandas.DataFrame(rows), picture, planned)
        section |= {"title": titles[number - 1], "pictures": pictures}
        sections.append(section | content(corpus))
    figures = sorted(folder.glob("figure-[2-7].png"))  # from pn figures
    probes = [(run.name, tables.relative(run.probe)) for run in runs if run.probe]
    systems = sum(len(corpus.settings) for corpus in corpora)
    page = template("report.md.j2").render(
        settings,
        version=__version__,
        runs=runs,
        corpora=sections,
        machines=tables.machines_table(runs),
        systems=systems,
        problems=_problems(runs),
        repeated=_repeated(corpora),
        probes=probes,
        figures=[file.name for file in figures],
        count=intervals.count,
    )
    files = {
        "report.md": re.sub(r"\n{3,}", "\n\n", page),
        "report.csv": pandas.DataFrame(all_rows).to_csv(index=False),
    }
    for name, text in files.items():
        with atomic_write(folder / name) as file:
            # A file name may contain bytes that are not UTF-8.
            file.write(text.encode("utf-8", errors="backslashreplace"))
    kept = {section["intervals"] for section in sections}.union(*drawn)
    for pattern in (CURVES, INTERVALS):
        for picture in folder.glob(pattern.format("[0-9]*")):
            if picture.name not in kept:
                picture.unlink()
    return [folder / name for name in files]


def _problems(runs: Sequence[ReportedRun]) -> list[tuple[Markdown, str]]:
    """Runs, and what failed or is missing in them; a problem of several runs is listed once."""
    runs_of: dict[str, list[ReportedRun]] = {}
    for run in runs:
        for problem in dict.fromkeys(run.problems):
            in_run = problem.replace(f"{run.path}/", "")
            runs_of.setdefault(in_run, []).append(run)
    problems = []
    for problem, faulty in runs_of.items():
        paths = [tables.relative(run.path) for run in faulty]
        names = ", ".join(code(path, in_table=False) for path in paths)
        if len(faulty) == len(runs) > 1:
            names = f"all {len(runs)} runs"
        elif len(faulty) > 1:
            names = f"{len(faulty)} of {len(runs)} runs ({names})"
        problems.append((Markdown(names), tables.relative(problem)))
    return problems


def _repeated(corpora: Sequence[CorpusRuns]) -> list[tuple]:
    """System, seed and run names, if a system was run more than once with a seed."""
    repeated = []
    for corpus in corpora:
        groups = corpus.frame.groupby(["system", "seed"], sort=False)["run"]
        for (system, seed), runs in groups:
            if len(runs) > 1:
                repeated.append((system, seed, [run.name for run in runs]))
    return repeated
