"""The files of a report: the page, with the template ``report.md.j2``, its pictures and tables."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from pathlib import Path

import pandas

from pn_fairseq import __version__
from pn_fairseq.common.files import atomic_write
from pn_fairseq.report import curves, intervals, tables
from pn_fairseq.report.markdown import template
from pn_fairseq.report.runs import Run
from pn_fairseq.report.systems import Corpus

#: Pictures in the folder of the report.
CURVES, INTERVALS = "report-curves-{}.png", "report-intervals-{}.png"

#: Systems in one picture of learning curves, without LN; more would look alike.
_OF_A_PICTURE = 5


def _headline(corpus: Corpus, compared: Mapping[str, intervals.Compared]) -> list[tuple[str, str]]:
    """The results, as (measure, sentence); first the settings that differ and are not the norm."""
    headline, systems = [], {}
    for label, baseline in corpus.baselines.items():
        if names := corpus.beside_the_norm(label, baseline):
            systems.setdefault((baseline, *names), []).append(label)
    for (baseline, *names), labels in systems.items():
        verb = "differs" if len(labels) == 1 else "differ"
        sentence = f"{', '.join(labels)} {verb} from {baseline} in {', '.join(names)}."
        headline.append(("Not only the norms differ", sentence))
    for of_measure in compared.values():
        for family in of_measure.families:
            control = f" ({family.control})" if len(of_measure.families) > 1 else ""
            headline.append((f"{of_measure.measure.heading}{control}", of_measure.sentence(family)))
    if any(of_measure.families for of_measure in compared.values()):
        return headline
    scored = corpus.scores().index.unique("system")
    if not len(scored):
        return [*headline, ("Not known", "no run was scored.")]
    if len(scored) == 1:
        return [
            *headline,
            ("Nothing to compare", f"{scored[0]} is the only system that was scored."),
        ]
    reasons = dict.fromkeys(
        chain.from_iterable(of_measure.untested.values() for of_measure in compared.values())
    )
    lacking = "; ".join(reasons) or "no control (LN), with which the systems could be compared"
    return [*headline, ("No difference is tested over seeds", f"{lacking}.")]


def _together(corpus: Corpus) -> list[list[str]]:
    """The systems in the order of the tables, a few for each picture, each with the LN that it
    is compared with.
    """
    baselines = corpus.baselines
    others = [label for label in corpus.settings if label not in baselines.values()]
    parts = [
        others[start : start + _OF_A_PICTURE] for start in range(0, len(others), _OF_A_PICTURE)
    ]
    shown = [{*part, *(baselines[label] for label in part if label in baselines)} for part in parts]
    return [[label for label in corpus.settings if label in part] for part in shown]


def _learning_curves(corpora: Sequence[Corpus], folder: Path) -> list[list[str]]:
    """Draw the learning curves, write their records, and name the pictures of each corpus."""
    tables.progress("drawing learning curves")
    records, pictures = [], []
    for corpus in corpora:
        pictures.append([])
        for labels in _together(corpus):
            logs = {
                label: {run.name: run.log for run in corpus.members(label) if run.log}
                for label in labels
            }
            picture = CURVES.format(sum(map(len, pictures)) + 1)
            if rows := curves.records(picture, logs, corpus.baselines):
                curves.plot(pandas.DataFrame(rows), folder / picture)
                records += rows
                pictures[-1].append(picture)
    with atomic_write(folder / "report-curves.csv", "w") as file:
        pandas.DataFrame(records, columns=curves.COLUMNS).to_csv(file, index=False)
    return pictures


def _section(
    corpus: Corpus, frame: pandas.DataFrame, picture: Path, planned: Sequence[tuple[str, str]]
) -> dict:
    """What the template shows of the runs on a corpus besides their scores; draws ``picture``."""
    compared = intervals.compare(frame)
    data = corpus.data or {}
    languages = [data.get("source"), data.get("target")]
    title = " to ".join(languages) if all(languages) else f"Data not known: {corpus.runs[0].name}"
    answers = [
        (compared[column].measure.title, compared[column].planned(system))
        for system, column in planned
        if column in compared
    ]
    return {
        "title": data.get("corpus") or title,
        "data": tables.data(corpus),
        "signatures": tables.signatures(corpus),
        "baselines": corpus.baselines,
        "headline": _headline(corpus, compared),
        "measures": compared.values(),
        "differences": intervals.table(compared),
        "intervals": intervals.plot(
            compared, list(corpus.settings), picture, intervals.seeds_of(frame)
        ),
        "machines": list(frame["machine"].unique()),
        "planned": [(measure, answer) for measure, answer in answers if answer],
        "training": tables.training(corpus),
        "settings": tables.settings(corpus),
        "commands": tables.commands(corpus),
    }


def write(
    folder: Path,
    runs: Sequence[Run],
    corpora: Sequence[Corpus],
    content: Callable[[Corpus], dict],
    planned: Sequence[tuple[str, str]] = (),
    **settings,
) -> list[Path]:
    """Write ``report.md`` and ``report.csv``, whose paths are returned, and the pictures.

    Args:
        folder: created if needed. Pictures of an earlier report are deleted.
        runs: as :func:`pn_fairseq.report.runs.read_runs` returns them.
        corpora: the runs that are known, by corpus.
        content: returns what the template shows of the scores on a corpus.
        planned: (system, column of report.csv) of comparisons that were planned before the runs.
        settings: the template also shows them.

    Raises:
        OSError: a file cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    rows = [tables.rows(corpus) for corpus in corpora]
    drawn, sections = _learning_curves(corpora, folder), []
    for number, (corpus, of_corpus, pictures) in enumerate(
        zip(corpora, rows, drawn, strict=True), 1
    ):
        section = _section(
            corpus, pandas.DataFrame(of_corpus), folder / INTERVALS.format(number), planned
        )
        sections.append({**section, "pictures": pictures, **content(corpus)})
    page = template("report.md.j2").render(
        settings,
        version=__version__,
        runs=runs,
        corpora=sections,
        machines=tables.machines(runs),
        systems=sum(len(corpus.settings) for corpus in corpora),
        problems=[
            (tables.relative(run.path), tables.relative(problem))
            for run in runs
            for problem in run.problems
        ],
        repeated=[
            (*system_and_seed, [run.name for run in repeated])
            for corpus in corpora
            for system_and_seed, repeated in corpus.frame.groupby(["system", "seed"], sort=False)[
                "run"
            ]
            if len(repeated) > 1
        ],
        probes=[(run.name, tables.relative(run.probe)) for run in runs if run.probe],
        figures=[file.name for file in sorted(folder.glob("figure-[2-7].png"))],  # of pn figures
        count=intervals.count,
    )
    files = {"report.md": re.sub(r"\n{3,}", "\n\n", page)}
    files["report.csv"] = pandas.DataFrame(list(chain.from_iterable(rows))).to_csv(index=False)
    for name, text in files.items():
        with atomic_write(folder / name) as file:
            # A file name may hold bytes that are not UTF-8.
            file.write(text.encode("utf-8", errors="backslashreplace"))
    kept = [*chain.from_iterable(drawn), *(section["intervals"] for section in sections)]
    for pattern in (CURVES, INTERVALS):
        for picture in folder.glob(pattern.format("[0-9]*")):
            if picture.name not in kept:
                picture.unlink()
    return [folder / name for name in files]
