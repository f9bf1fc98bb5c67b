"""What a report says, from its title to its last table."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from pn_fairseq import __version__
from pn_fairseq.report import results, settings, training
from pn_fairseq.report.curves import plot
from pn_fairseq.report.page import Bullets, Code, Element, Heading, Inline, Missing, Paragraph, Picture, Strong, Table
from pn_fairseq.report.runs import Run, is_bare
from pn_fairseq.report.systems import Corpus, group
from pn_fairseq.report.wording import count, here, listed
from pn_fairseq.scoring import RESAMPLES

_YES = {"1": "yes"}
#: Setting of prepared data -> what it is, and what its values mean.
_DATA_WORDS = {
    "lower": ("case", {"1": "lower-cased", "0": "kept"}),
    "bpe": ("subword operations, on both languages together", {}),
    "normalize": ("punctuation normalized", _YES),
    "nonprinting": ("non-printing characters removed", _YES),
    "aggressive": ("hyphens split (@-@)", _YES),
    "compound_split": ("compounds split for tokenized BLEU (##AT##-##AT##)", _YES),
    "clean": ("cleaned by length (shortest, longest, ratio)", {}),
    "clean_stage": ("lengths counted in", {"tok": "tokens", "bpe": "subwords"}),
    "valid_every": ("validation is every n-th training pair, n", {}),
}


def build(
    runs: Sequence[Run],
    folder: Path,
    prefix: str,
    subset: str = "test",
    paper: str = "auto",
    resamples: int = RESAMPLES,
    said: Callable[[str], None] = lambda text: None,
) -> tuple[list[Element], list[str]]:
    """The document about runs, and the names of its pictures, which are written into ``folder``.

    Args:
        runs: as :func:`pn_fairseq.report.runs.read_runs` returns them.
        folder: where the pictures go.
        prefix: what their names begin with.
        subset: which decoded subset the scores are of.
        paper: whose numbers stand beside ours: a key of :data:`pn_fairseq.report.paper.PAPER`, ``none``, or ``auto``.
        resamples: of the bootstrap.
        said: called with lines of progress.
    """
    corpora = group([run for run in runs if not is_bare(run)])
    elements: list[Element] = [Heading(1, f"Report of {count(len(runs), 'training run')}"), *_summary(runs, corpora)]
    pictures = []
    for index, corpus in enumerate(corpora, 1):
        elements.append(Heading(2, _title(corpus)))
        elements += _data(corpus, len(corpora) > 1)
        beside = results.paper_of(corpus, paper, subset)
        elements += results.results(corpus, beside, subset)
        elements += results.significance(corpus, subset, resamples, said)
        said("drawing learning curves")
        name = f"{prefix}{index}.png"
        pictures.append(name)
        elements += _curves(corpus, folder / name)
        elements += results.scores_of_runs(corpus)
        elements += training.training(corpus)
        elements += training.diagnostics(corpus)
        elements += settings.settings(corpus)
        elements += settings.commands(corpus)
    if bare := [run for run in runs if is_bare(run)]:
        elements += _bare(bare)
    elements += training.machines(list(runs))
    elements.append(Paragraph(["Written by ", Code("pn-report"), f" of pn_fairseq {__version__}."]))
    return elements, pictures


def _summary(runs: Sequence[Run], corpora: Sequence[Corpus]) -> list[Element]:
    complete = sum(run.scores is not None and not run.problems for run in runs)
    scored = sum(run.scores is not None for run in runs)
    systems = sum(len(corpus.systems) for corpus in corpora)
    elements: list[Element] = [
        Paragraph(
            f"{count(len(runs), 'run')} of {count(systems, 'system')} (runs that differ by their seed alone are one) "
            f"on {count(len(corpora), 'corpus', 'corpora')}. {scored} of them trained, decoded and scored; nothing to "
            f"remark on {complete}."
        ),
        Heading(2, "What failed or is missing"),
    ]
    remarks: list[Inline] = [[Code(here(run.path)), f": {here(problem)}"] for run in runs for problem in run.problems]
    remarks += _repeated(corpora)
    if remarks:
        elements.append(Bullets(remarks))
    else:
        elements.append(Paragraph("Nothing: every run was trained to its end, decoded and scored."))
    return elements


def _repeated(corpora: Sequence[Corpus]) -> list[Inline]:
    found: list[Inline] = []
    for corpus in corpora:
        for system in corpus.systems:
            seeds = [run.seed for run in system.runs]
            for seed in dict.fromkeys(seeds):
                if seeds.count(seed) > 1 and seed is not None:
                    names = listed([run.name for run in system.runs if run.seed == seed])
                    found.append(
                        f"{system.label}, seed {seed} was run more than once ({names}): it counts as one seed, by the "
                        "mean of its scores"
                    )
    return found


def _bare(runs: Sequence[Run]) -> list[Element]:
    rows: list[list[Inline]] = [[Code(here(run.path)), training.state(run)] for run in runs]
    return [
        Heading(2, "Runs that never began"),
        Paragraph("They have neither settings nor a log, so it is not known what they would have been."),
        Table(["run", "state"], rows),
    ]


def _title(corpus: Corpus) -> str:
    if corpus.data is None:
        return f"Data not known: {corpus.runs[0].name}"
    return f"{corpus.data.get('source', '?')} to {corpus.data.get('target', '?')}"


def _data(corpus: Corpus, several: bool) -> list[Element]:
    elements: list[Element] = []
    if several:
        elements.append(
            Paragraph("Runs on other data stand in sections of their own and are compared with none of these.")
        )
    places = list(dict.fromkeys(here(run.data_path) for run in corpus.runs if run.data_path))
    rows: list[list[Inline]] = [["prepared data", Code(", ".join(places)) if places else Missing("not recorded")]]
    if corpus.data is None:
        rows.append(["settings", Missing("not recorded")])
    else:
        for key, value in corpus.data.items():
            if key not in ("source", "target") and not key.startswith("sha256 "):
                name, meanings = _DATA_WORDS.get(key, (key.replace("_", " "), {}))
                rows.append([name, meanings.get(value, value)])
    for split in ("train", "valid", "test"):
        amount = results.count_split(corpus, split)
        rows.append(
            [
                f"sentence pairs, {split}",
                Missing("not known: the prepared data is not there") if amount is None else f"{amount:,}",
            ]
        )
    elements.append(Table(["data", "value"], rows))
    return elements


def _curves(corpus: Corpus, file: Path) -> list[Element]:
    systems = {system.label: [run.log.curve for run in system.runs if run.log] for system in corpus.systems}
    drawn = plot(systems, file)
    caption = "Learning curves: loss in bits per token against updates."
    notes = ["Left training, right validation, over optimizer updates."]
    if any(len(curves) > 1 for curves in systems.values()):
        notes.append(
            "Thin lines are single seeds, the thick line is their mean over the updates that all have reached."
        )
    if drawn.cut:
        notes.append("The losses of the first updates lie above the frame.")
    elements: list[Element] = [Heading(3, "Learning curves"), Picture(file.name, caption), Paragraph(" ".join(notes))]
    remarks: list[Inline] = []
    if drawn.nonfinite:
        remarks.append([Strong("Not finite somewhere, where the line has a gap: "), ", ".join(drawn.nonfinite)])
    if drawn.missing:
        remarks.append([Strong("Nothing to draw, in one picture or both: "), ", ".join(drawn.missing)])
    if remarks:
        elements.append(Bullets(remarks))
    return elements
