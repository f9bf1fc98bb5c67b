"""docs/figures: ``python -m tests.docs.figures RUNS`` trains six models in RUNS, and writes pictures and numbers.

The trainings are those of scripts/compare_norms.sh with seed 3, and record a probe, which changes no number.
``figure-N.png``, and of the norm of the third layer ``figure-4-layer-3.png``. ``medians.csv``: of every box of
Figures 2 to 4, for all norms. ``gains.csv``: medians over the channels, of Figure 7. ``spectra.csv``: Figure 6.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pandas

from pn_fairseq.report.figures import main as pn_figures
from pn_fairseq.report.figures import read_subject, spectrum
from pn_fairseq.report.runs import Run, read_runs

from .pages import ROOT

FIGURES = ROOT / "docs/figures"
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
    ((2, 3, 4, 7), ("bn", "pnv", "bn_ls", "pnv_ls"), None, ""),
    ((4,), ("bn", "pnv", "bn_ls", "pnv_ls"), "encoder.layers.2.self_attn_layer_norm", "-layer-3"),
    ((6,), tuple(MODELS), None, ""),
]


def folder_of(runs: Path, name: str) -> Path:
    return runs / f"{MODELS[name][1]}_seed{SEED}"


def train(runs: Path) -> None:
    for name, (_, norm) in MODELS.items():
        probe = f"model.norm_probe='{folder_of(runs, name)}/norm_probe'"  # its = would be one of the setting
        command = [ROOT / "scripts/reproduce_verses.sh", "--runs", runs, probe, f"model.norm_probe_interval={INTERVAL}"]
        subprocess.run(command, env={**os.environ, "NORMS": norm, "SEEDS": str(SEED)}, check=True)


def draw(runs: Path) -> None:
    for numbers, names, norm, suffix in DRAWN:
        with tempfile.TemporaryDirectory() as folder:
            arguments = [*(str(folder_of(runs, name)) for name in names), "--output", folder, "--labels"]
            arguments += [MODELS[name][0] for name in names] + (["--norm", norm] if norm else [])
            if pn_figures(arguments) != 0:
                raise SystemExit(1)
            for number in numbers:
                shutil.copy(f"{folder}/figure-{number}.png", FIGURES / f"figure-{number}{suffix}.png")


def medians(run: Run, name: str) -> list[dict]:
    """The median of every quantity in each fifth of the training, for each norm."""
    rows = []
    for norm in read_subject(run, name, name).probe["norm"].unique():
        series = read_subject(run, name, name, norm).series
        numbers = [column for column in series if column.endswith(("_l1", "_l2")) or column.startswith("tid_")]
        found = series.groupby("fifth")[numbers].median()
        for column in numbers:
            fifths = {f"to {20 * int(fifth)}%": value for fifth, value in found[column].items()}
            if not found[column].isna().all():
                rows.append({"run": name, "norm": norm, "quantity": column, **fifths})
    return rows


def gains(run: Run, name: str) -> list[dict]:
    """The median of gamma / psi_B over the channels, in the last recorded update."""
    column = "gamma_over_psi_batch"
    last = read_subject(run, name, name).probe.dropna(subset=[column]).drop_duplicates("norm", keep="last")
    values = {norm: pandas.Series(of_norm) for norm, of_norm in zip(last["norm"], last[column], strict=True)}
    return [
        {"run": name, "norm": norm, "median": each.median(), "share above 1": (each > 1).mean()}
        for norm, each in values.items()
    ]


def write(folder: Path) -> None:
    """The pictures and tables of the runs in a folder."""
    draw(folder)
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


if __name__ == "__main__":
    train(Path(sys.argv[1]).absolute())
    write(Path(sys.argv[1]).absolute())
