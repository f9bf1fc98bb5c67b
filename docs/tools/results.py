"""docs/results: ``python -m docs.tools.results`` draws the pictures again, from runs.csv and the
records of curves.

Those of :data:`INTERVALS` show the runs that a query of runs.csv selects, as ``pn report`` does;
those of :data:`CURVES` the records in a CSV file beside them.
"""

import logging
from pathlib import Path

import pandas

from pn_fairseq.report import intervals
from pn_fairseq.report.curves import plot, save, style
from pn_fairseq.report.measures import LOSS, MEASURES

from .generated import ROOT

RESULTS = ROOT / "docs/results"
NORMS = (
    'corpus == "verses" and study in ("norms", "masks, by length") and lr.isna() and '
    "init_seed.isna() and norm_alpha_fwd.isna() and norm_ignore_mask.isna()"
)
#: Picture -> query of runs.csv.
INTERVALS = {
    "intervals-verses.png": NORMS,
    "intervals-transformer_lm.png": 'corpus == "verses_lm" and model == "transformer_lm"',
    "intervals-tensorized_lm.png": 'corpus == "verses_lm" and model == "tensorized_lm"',
    "adanorm.png": 'study == "adanorm"',
}
#: Picture -> file with the records, and system -> the one that it is compared with; None: the file
#: is the report's own, which names the pictures and what each system is compared with.
CURVES = {
    "multi30k.png": ("multi30k-curves.csv", dict.fromkeys(("LN (post)", "PN", "BN"), "LN")),
    "iwslt14-sample.png": ("iwslt14-sample-curves.csv", {"PN": "LN"}),
    "penn-treebank.png": ("penn-treebank-curves.csv", None),
    "penn-treebank-leak.png": ("penn-treebank-curves.csv", None),
    "example/report-curves-1.png": ("example/report-curves.csv", None),
}
#: Systems of the records that no picture shows.
LEFT_OUT = ("LN (post), again",)
#: The runs of multi30k.png that reached max_update; all others of it ended by patience
#: (docs/results/multi30k.md).
MAX_UPDATE = 8000


def runs() -> pandas.DataFrame:
    """runs.csv, without detokenized BLEU, which no page shows."""
    return pandas.read_csv(RESULTS / "runs.csv", dtype={"layer_scale_groups": "string"}).drop(
        columns="detokenized"
    )


def draw_intervals(frame: pandas.DataFrame, output: Path) -> None:
    compared = intervals.compare(frame)
    assert intervals.plot(
        compared, list(frame["system"].unique()), output, intervals.seeds_of(frame)
    )


def placements() -> pandas.DataFrame:
    """The runs of models with LN, as systems that are named after their placements; the control
    is pre.
    """
    frame = runs().query('study == "placements" and norm == "LN"')
    frame = frame.drop(columns="chrf").assign(system=frame["encoder_norm_placement"])
    return with_control(frame, "pre")


def with_control(frame: pandas.DataFrame, control: str) -> pandas.DataFrame:
    """The rows with ``control`` as the system that all others are compared with."""
    compared = pandas.Series(control, frame.index).where(frame["system"] != control)
    return frame.assign(**{"compared with": compared})


def records_of(picture: str) -> pandas.DataFrame:
    """The records that a picture of :data:`CURVES` shows, as text, with the columns of
    :func:`pn_fairseq.report.curves.records`.
    """
    file, baselines = CURVES[picture]
    rows = pandas.read_csv(RESULTS / file, dtype=str, keep_default_na=False)
    if baselines is None:
        return rows[rows["picture"] == Path(picture).name]
    rows = rows[~rows["system"].isin(LEFT_OUT)].rename(columns={"seed": "run"})
    rows["compared with"] = rows["system"].map(baselines).fillna("")
    updates = rows["update"].astype(int)
    last = updates.groupby([rows["system"], rows["run"]]).transform("max")
    early = (updates == last) & (last < 0.98 * MAX_UPDATE)
    rows["end"] = early.map({True: "patience", False: ""})
    return rows


def draw_masks(output: Path) -> None:
    """BN and PN with the mask against the same norm without it, in both kinds of batches; every
    pair is a mark.
    """
    rows = [
        ("BN", "by length", "BN, batches by length"),
        ("PN", "by length", "PN, batches by length"),
        ("BN", "random", "BN, random batches"),
        ("PN", "random", "PN, random batches"),
    ]
    measures = [MEASURES[LOSS], MEASURES["tokenized"]]
    families, names = [], []
    for norm, kind, name in rows:
        frame = runs().query(f'study == "masks, {kind}"')
        frame = with_control(frame, f"{norm} (norm_ignore_mask=True)")
        compared = intervals.compare(frame)
        families.append([compared[measure.name].families[0] for measure in measures])
        seeds = intervals.count(intervals.seeds_of(frame)[norm], "seed")
        names.append(f"{name}, {seeds}")
    difference = (
        "difference from the same norm without the mask,\nwith 95% intervals; light: each seed"
    )
    figure, axes = intervals.panels(measures, names, 3.4, difference, "mask better")
    for number, (norm, kind, _) in enumerate(rows):
        look = style(1 if kind == "by length" else 2) | {"linestyle": "none"}
        for axis, family in zip(axes, families[number], strict=True):
            pairs = list(family.pairs[norm].values())
            axis.plot(pairs, [number] * len(pairs), alpha=0.4, **look)
            interval = family.separate[norm]
            half = interval.difference - interval.low
            axis.errorbar(interval.difference, number, xerr=half, capsize=3, **look)
    save(figure, output)


def draw() -> None:
    for name, query in INTERVALS.items():
        draw_intervals(runs().query(query), RESULTS / name)
    draw_intervals(placements(), RESULTS / "placements.png")
    draw_masks(RESULTS / "masks.png")
    for picture in CURVES:
        plot(records_of(picture), RESULTS / picture)


if __name__ == "__main__":
    logging.disable(logging.INFO)  # fairseq's import lets matplotlib's messages through
    draw()
