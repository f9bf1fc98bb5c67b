"""docs/figures: ``python -m docs.tools.figures`` draws the pictures again from the records in docs/figures.

``python -m docs.tools.figures RUNS [key=value...]`` first trains six models in RUNS, with these settings if any are
given, and writes the records and tables. Run again, it skips what is done and continues.

The trainings are seed 3 of scripts/compare_norms.sh with a probe, which changes no number.
``figure-N.png``, and of the norm of the third layer ``figure-4-layer-3.png``. ``records.parquet``: the recorded values
behind Figures 2 to 4 and 7. ``medians.csv``: of every box of Figures 2 to 4, for all norms. ``gains.csv``: medians over
the channels, of Figure 7. ``spectra.csv``: the values of Figure 6. docs.tools.results draws Figure 5.
"""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pandas

from pn_fairseq.common.files import atomic_write
from pn_fairseq.report.curves import headless_pyplot
from pn_fairseq.report.figures import FIGURES as DRAWINGS
from pn_fairseq.report.figures import Subject, read_subject, series_of, spectrum
from pn_fairseq.report.runs import Run, read_runs

from .generated import ROOT

FIGURES = ROOT / "docs/figures"
RECORDS = "records.parquet"
#: Columns of the probe that Figures 2 to 4 and 7 show, and the length of the training.
COLUMNS = ["update", "updates", "norm", "forward", "running", "tokens", "sample_size", "gamma_over_psi_batch"]
#: Name of a run in the tables -> its label, and its norm with settings, as in NORMS of scripts/reproduce_verses.sh.
MODELS = {
    "ln": ("LN", "ln"),
    "bn": ("BN", "bn"),
    "pnv": ("PN-V", "pnv+layer_scale_groups=0"),
    "pn": ("PN, layer-scale", "pn"),
    "bn_ls": ("BN, layer-scale", "bn+layer_scale_groups=4"),
    "pnv_ls": ("PN-V, layer-scale", "pnv"),
}
SEED, INTERVAL = 3, 20
#: Figures, the runs in them, the norm, and what is added to the names of the files.
DRAWN = [
    ((2, 3, 4, 7), ("ln", "bn", "pnv", "bn_ls", "pnv_ls"), None, ""),
    ((4,), ("ln", "bn", "pnv", "bn_ls", "pnv_ls"), "encoder.layers.2.self_attn_layer_norm", "-layer-3"),
    ((6,), tuple(MODELS), None, ""),
]


def folder_of(runs: Path, name: str) -> Path:
    return runs / f"{MODELS[name][1]}_seed{SEED}"


def train(runs: Path, settings: Sequence[str]) -> None:
    """The trainings that are not finished yet, averaged, decoded and scored."""
    for _, norm in MODELS.values():
        command = [sys.executable, "-m", "pn_fairseq", "reproduce", "verses", "--runs", runs]
        command += ["model.norm_probe='{run}/norm_probe'", f"model.norm_probe_interval={INTERVAL}", *settings]
        subprocess.run(command, env={**os.environ, "NORMS": norm, "SEEDS": str(SEED)}, check=True)


def record(runs: dict[str, Run]) -> pandas.DataFrame:
    """The recorded values of all runs (name -> run) that the figures show, in float32.

    These are the rows of single forwards, with the gains of the channels in the last update only.
    """
    frames = []
    for name, run in runs.items():
        probe = read_subject(run, name, name).probe
        last = probe["update"] == probe["update"].max()
        probe = probe[probe["forward"].notna() | last].assign(
            run=name, updates=max(run.log.updates, probe["update"].max())
        )
        probe["gamma_over_psi_batch"] = probe["gamma_over_psi_batch"].where(last)
        distances = [column for column in probe if column.endswith("_l2")]
        frames.append(probe[["run", *COLUMNS, *distances]].astype(dict.fromkeys(distances, "float32")))
    return pandas.concat(frames, ignore_index=True)


def subjects(names: tuple[str, ...], norm: str | None) -> list[Subject]:
    """The runs, from the files in docs/figures. ``norm``: the norm of Figures 2 to 4; None: the first."""
    spectra, file = pandas.read_csv(FIGURES / "spectra.csv"), FIGURES / RECORDS
    records = pandas.read_parquet(file) if file.is_file() else None
    subjects_of_runs = []
    for name in names:
        subject = Subject(name, MODELS[name][0], MODELS[name][0], spectrum=spectra[name].to_numpy())
        if records is not None:
            subject.probe = records[records["run"] == name]
            norm_of_run = norm or subject.probe["norm"].iloc[0]
            subject.series = series_of(subject.probe, norm_of_run, int(subject.probe["updates"].iloc[0]))
        subjects_of_runs.append(subject)
    return subjects_of_runs


def draw() -> None:
    """The pictures that the records in docs/figures are enough for."""
    pyplot = headless_pyplot()
    for numbers, names, norm, suffix in DRAWN:
        shown = subjects(names, norm)
        for number in numbers:
            if number != 6 and shown[0].probe is None:
                print(f"figure-{number}{suffix}.png is as it was: there is no {RECORDS}", file=sys.stderr)
                continue
            figure = DRAWINGS[number].draw(pyplot, shown)
            with atomic_write(FIGURES / f"figure-{number}{suffix}.png") as out:
                figure.savefig(out, dpi=130, format="png")
            pyplot.close(figure)


def medians(run: Run, name: str) -> list[dict]:
    """The median of every quantity in each fifth of the training, for each norm."""
    rows = []
    for norm in read_subject(run, name, name).probe["norm"].unique():
        series = read_subject(run, name, name, norm).series
        numbers = [column for column in series if column.endswith(("_l1", "_l2")) or column.startswith("tid_")]
        by_fifth = series.groupby("fifth")[numbers].median()
        for column in numbers:
            fifths = {f"to {20 * int(fifth)}%": value for fifth, value in by_fifth[column].items()}
            if not by_fifth[column].isna().all():
                rows.append({"run": name, "norm": norm, "quantity": column, **fifths})
    return rows


def gains(run: Run, name: str) -> list[dict]:
    """The median of gamma / psi_B over the channels, in the last recorded update."""
    column = "gamma_over_psi_batch"
    last = read_subject(run, name, name).probe.dropna(subset=[column]).drop_duplicates("norm", keep="last")
    values = {norm: pandas.Series(of_norm) for norm, of_norm in zip(last["norm"], last[column], strict=True)}
    return [
        {"run": name, "norm": norm, "median": of_norm.median(), "share above 1": (of_norm > 1).mean()}
        for norm, of_norm in values.items()
    ]


def write(folder: Path) -> None:
    """The records and tables of the runs in a folder."""
    runs = dict(zip(MODELS, read_runs([folder_of(folder, name) for name in MODELS]), strict=True))
    tables = {
        "medians.csv": pandas.DataFrame([row for name, run in runs.items() for row in medians(run, name)]),
        "gains.csv": pandas.DataFrame([row for name, run in runs.items() for row in gains(run, name)]),
        "spectra.csv": pandas.DataFrame(
            {name: spectrum(folder_of(folder, name) / "checkpoints/checkpoint_last.pt") for name in MODELS}
        ),
    }
    for name, table in tables.items():
        table.to_csv(FIGURES / name, index=False, float_format="%.4g")
    record(runs).to_parquet(FIGURES / RECORDS, index=False, compression="zstd")


def main(arguments: Sequence[str]) -> None:
    """Train and record in the folder that ``arguments`` name, if any, and draw."""
    if arguments:
        folder, *settings = arguments
        train(Path(folder).absolute(), settings)
        write(Path(folder).absolute())
    draw()


if __name__ == "__main__":
    main(sys.argv[1:])
