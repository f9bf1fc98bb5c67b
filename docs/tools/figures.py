"""docs/figures: ``python -m docs.tools.figures`` draws the pictures again from the records in
docs/figures.

``python -m docs.tools.figures RUNS [key=value...]`` first trains six models in RUNS, with these
settings if any are given, and writes the records and tables. Run again, it skips what is done and
continues. ``python -m docs.tools.figures --images OUTPUT`` writes the pictures and tables of the
runs of examples/images.py in OUTPUT.

The training runs are seed 3 of pn reproduce --study compare_norms with a probe, which changes no
number. Both compute the tables of docs/figures.md and the numbers of docs/why.md from the records.
``figure-N.png``, and of the norm of the third layer ``figure-4-layer-3.png``. ``records.parquet``:
the recorded values behind Figures 2 to 4 and 7. ``medians.csv``: of every box of Figures 2 to 4,
for all norms. ``gains.csv``: medians over the channels, of Figure 7. ``spectra.csv``: the values of
Figure 6. ``images-records.parquet`` and ``images-medians.csv`` are of images.
"""

import logging
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pandas

from examples.smoothness import over_the_steps
from pn_fairseq.pipeline.published import PAPER_GAIN, PAPER_MEDIANS, PAPER_SPECTRA
from pn_fairseq.report.curves import save
from pn_fairseq.report.figures import FIGURES as DRAWINGS
from pn_fairseq.report.figures import Subject, read_subject, series_of, spectrum, values_of
from pn_fairseq.report.runs import Run, read_runs

from .generated import ROOT, table, write_parts

RESULTS = ROOT / "docs/results"
FIGURES = ROOT / "docs/figures"
RECORDS = "records.parquet"
#: Columns of the probe that Figures 2 to 4 and 7 show, and the length of the training.
COLUMNS = [
    "update",
    "updates",
    "norm",
    "forward",
    "running",
    "tokens",
    "sample_size",
    "gamma_over_psi_batch",
]
#: Name of a run in the tables -> its label, and its norm with settings, as in --norms of pn
#: reproduce verses.
MODELS = {
    "ln": ("LN", "ln"),
    "bn": ("BN", "bn"),
    "pnv": ("PN-V", "pnv+layer_scale_groups=0"),
    "pn": ("PN, layer-scale", "pn"),
    "bn_ls": ("BN, layer-scale", "bn+layer_scale_groups=4"),
    "pnv_ls": ("PN-V, layer-scale", "pnv"),
}
#: The training runs on images, with their folders.
IMAGES = {
    f"resnet20_{name}": (f"{label}, ResNet20 on CIFAR-10", f"resnet20_20epochs_{norm}_seed1")
    for name, label, norm in (("bn", "BN", "batch"), ("pn", "PN", "power"))
}
LABELS = {name: label for name, (label, _) in (MODELS | IMAGES).items()}
SEED, INTERVAL = 3, 20
#: Figures, the runs in them, the norm, and what is added to the names of the files.
DRAWN = [
    ((2, 3, 4, 7), ("ln", "bn", "pnv", "bn_ls", "pnv_ls"), None, ""),
    (
        (4,),
        ("ln", "bn", "pnv", "bn_ls", "pnv_ls"),
        "encoder.layers.2.self_attn_layer_norm",
        "-layer-3",
    ),
    ((6,), tuple(MODELS), None, ""),
    ((2, 3), ("bn", *IMAGES), None, "-images"),
]


def read(name: str) -> pandas.DataFrame:
    """A table in docs/figures."""
    return pandas.read_csv(FIGURES / name, dtype={"norm": str})


def folder_of(runs: Path, name: str) -> Path:
    return runs / f"{MODELS[name][1]}_seed{SEED}"


def train(runs: Path, settings: Sequence[str]) -> None:
    """Train the models that are not finished yet; average, decode and score them."""
    for _, norm in MODELS.values():
        command = [sys.executable, "-m", "pn_fairseq", "reproduce", "verses", "--runs", runs]
        command += [
            "model.norm_probe='{run}/norm_probe'",
            f"model.norm_probe_interval={INTERVAL}",
            *settings,
        ]
        subprocess.run([*command, "--norms", norm, "--seeds", str(SEED)], check=True)


def record(runs: dict[str, Run]) -> pandas.DataFrame:
    """The recorded values of all runs (name -> run) that the figures show, in float32.

    These are the rows of single forwards, with the gains of the channels in the last update only.
    """
    frames = []
    for name, run in runs.items():
        probe = read_subject(run, name, name).probe
        last, trained = probe["update"] == probe["update"].max(), run.log.updates if run.log else 0
        probe = probe[probe["forward"].notna() | last].assign(
            run=name, updates=max(trained, probe["update"].max())
        )
        probe["gamma_over_psi_batch"] = probe["gamma_over_psi_batch"].where(last)
        distances = [column for column in probe if column.endswith("_l2")]
        frames.append(
            probe[["run", *COLUMNS, *distances]].astype(dict.fromkeys(distances, "float32"))
        )
    return pandas.concat(frames, ignore_index=True)


def subjects(names: tuple[str, ...], norm: str | None) -> list[Subject]:
    """The runs, from the files in docs/figures.

    ``norm``: the norm of Figures 2 to 4; None: the first.
    """
    spectra = read("spectra.csv")
    records = pandas.concat(
        [pandas.read_parquet(FIGURES / file) for file in (RECORDS, f"images-{RECORDS}")]
    )
    subjects_of_runs = []
    for name in names:
        spectrum = spectra[name].to_numpy() if name in spectra else None
        label = LABELS[name] + " on the verses" * (
            name in MODELS and not IMAGES.keys().isdisjoint(names)
        )
        subject = Subject(name, label, label, spectrum=spectrum)
        subject.probe = records[records["run"] == name]
        norm_of_run = norm or subject.probe["norm"].iloc[0]
        subject.series = series_of(
            subject.probe, norm_of_run, int(subject.probe["updates"].iloc[0])
        )
        subjects_of_runs.append(subject)
    return subjects_of_runs


def draw() -> None:
    """The pictures."""
    for numbers, names, norm, suffix in DRAWN:
        shown = subjects(names, norm)
        for number in numbers:
            save(DRAWINGS[number].draw(shown), FIGURES / f"figure-{number}{suffix}.png")


def medians(run: Run, name: str) -> list[dict]:
    """The median of every quantity in each fifth of the training run, for each norm."""
    rows = []
    for norm in read_subject(run, name, name).probe["norm"].unique():
        series = read_subject(run, name, name, norm).series
        numbers = [
            column
            for column in series
            if column.endswith(("_l1", "_l2")) or column.startswith("tid_")
        ]
        by_fifth = series.groupby("fifth")[numbers].median()
        for column in numbers:
            fifths = {f"to {20 * int(fifth)}%": value for fifth, value in by_fifth[column].items()}
            if not by_fifth[column].isna().all():
                rows.append({"run": name, "norm": norm, "quantity": column, **fifths})
    return rows


def gains(run: Run, name: str) -> list[dict]:
    """The median of gamma / psi_B over the channels, in the last recorded update."""
    column = "gamma_over_psi_batch"
    last = (
        read_subject(run, name, name)
        .probe.dropna(subset=[column])
        .drop_duplicates("norm", keep="last")
    )
    values = {
        norm: pandas.Series(of_norm)
        for norm, of_norm in zip(last["norm"], last[column], strict=True)
    }
    return [
        {
            "run": name,
            "norm": norm,
            "median": of_norm.median(),
            "share above 1": (of_norm > 1).mean(),
        }
        for norm, of_norm in values.items()
    ]


def write(folder: Path) -> None:
    """The records and tables of the runs in a folder."""
    runs = dict(zip(MODELS, read_runs([folder_of(folder, name) for name in MODELS]), strict=True))
    tables = {
        "medians.csv": pandas.DataFrame(
            [row for name, run in runs.items() for row in medians(run, name)]
        ),
        "gains.csv": pandas.DataFrame(
            [row for name, run in runs.items() for row in gains(run, name)]
        ),
        "spectra.csv": pandas.DataFrame(
            {
                name: spectrum(folder_of(folder, name) / "checkpoints/checkpoint_last.pt")
                for name in MODELS
            }
        ),
    }
    for name, frame in tables.items():
        frame.to_csv(FIGURES / name, index=False, float_format="%.4g")
    record(runs).to_parquet(FIGURES / RECORDS, index=False, compression="zstd")


def write_images(folder: Path) -> None:
    """Write the pictures and tables of the training runs on images, and their accuracies."""
    runs = dict(zip(IMAGES, read_runs([folder / name for _, name in IMAGES.values()]), strict=True))
    table = pandas.DataFrame([row for name, run in runs.items() for row in medians(run, name)])
    table.to_csv(FIGURES / "images-medians.csv", index=False, float_format="%.4g")
    record(runs).to_parquet(FIGURES / f"images-{RECORDS}", index=False, compression="zstd")
    for _, name in IMAGES.values():
        (RESULTS / "images" / name).mkdir(parents=True, exist_ok=True)
        shutil.copy(folder / name / "epochs.csv", RESULTS / "images" / name)


# The tables of docs/figures.md.

#: The labels of the paper's numbers.
PAPER_BN, PAPER_PNV = "paper, BN on IWSLT14", "paper, PN-V on IWSLT14"
#: The norms before self-attention of the first and of the third layer.
FIRST, THIRD = (f"encoder.layers.{layer}.self_attn_layer_norm" for layer in (0, 2))


def course(run: str, norm: str, quantity: str) -> tuple[float, float]:
    """The medians of a quantity in the first and the last fifth of the training run."""
    table = read("images-medians.csv" if run in IMAGES else "medians.csv").set_index(
        ["run", "norm", "quantity"]
    )
    return tuple(table.loc[(run, norm, quantity), ["to 20%", "to 100%"]])


def sums(subject: Subject, quantity: str) -> list[float]:
    """The medians that Figure 3 shows of a gradient."""
    return values_of(subject.series, quantity).groupby(subject.series["fifth"]).median().tolist()


def arrow(values: Sequence[float], unit: float = 1) -> str:
    """The first and the last value, in units, with two significant digits."""
    return " → ".join(f"{value / unit:#.2g}".rstrip(".") for value in (values[0], values[-1]))


def quantity_of(name: str, run: str) -> str:
    """What Figure 4 shows of a run:

    ``distance`` or gradient ``g``, through the variance or PN-V's mean square.
    """
    statistic = "psi2" if run.startswith("pnv") else "sigma2"
    return f"{statistic}_distance_l2" if name == "distance" else f"g_{statistic}_l2"


def figure_2() -> str:
    columns = {
        "mean, layer 1": (FIRST, "mu_distance_l2"),
        "variance, layer 1": (FIRST, "sigma2_distance_l2"),
    }
    columns |= {"variance, layer 3": (THIRD, "sigma2_distance_l2")}
    columns |= {
        f"relative, layer {layer}": (norm, "tid_var") for layer, norm in ((1, FIRST), (3, THIRD))
    }
    rows = [
        {"run": label} | {title: arrow(course(run, *column)) for title, column in columns.items()}
        for run, (label, _) in MODELS.items()
    ]
    paper = {
        "run": "the paper, BN on IWSLT14",
        "mean, layer 1": arrow(PAPER_MEDIANS["mu_distance"][PAPER_BN]),
    }
    return table(
        [*rows, paper | {"variance, layer 1": arrow(PAPER_MEDIANS["sigma2_distance"][PAPER_BN])}]
    )


def figure_3() -> str:
    rows, unit = [], 1e-8
    for subject, (label, _) in zip(subjects(tuple(MODELS), FIRST), MODELS.values(), strict=True):
        row = {"run": label}
        for name, quantity in (("mean", "g_mu_l2"), ("variance", "g_sigma2_l2")):
            values = course(subject.run, FIRST, quantity)
            row[f"{name}, 10⁻⁸"] = arrow(values, unit)
            row[f"{name}, last / first"] = f"{values[1] / values[0]:.1f}"
            row[f"{name}, as sums"] = arrow(sums(subject, quantity))
        rows.append(row)
    paper = {"run": "the paper, BN on IWSLT14"}
    for name, quantity in (("mean", "g_mu"), ("variance", "g_sigma2")):
        values = PAPER_MEDIANS[quantity][PAPER_BN]
        paper |= {
            f"{name}, last / first": f"{values[-1] / values[0]:.1f}",
            f"{name}, as sums": arrow(values),
        }
    return table([*rows, paper])


def figure_4() -> str:
    columns = {
        f"{name}, layer {layer}": (norm, what)
        for name, what in (("distance", "distance"), ("gradient", "g"))
        for layer, norm in ((1, FIRST), (3, THIRD))
    }
    values = {
        run: {
            title: course(run, norm, quantity_of(what, run))
            for title, (norm, what) in columns.items()
        }
        for run in DRAWN[0][1]
    }
    rows = [
        {"run": MODELS[run][0]}
        | {
            title: arrow(found, 1e-8 if title.startswith("gradient") else 1)
            for title, found in of_run.items()
        }
        for run, of_run in values.items()
    ]
    for title, upper, lower in (
        ("PN-V / BN", "pnv", "bn"),
        ("PN-V / BN, both with layer-scale", "pnv_ls", "bn_ls"),
        ("BN / BN with layer-scale", "bn", "bn_ls"),
        ("PN-V / PN-V with layer-scale", "pnv", "pnv_ls"),
    ):
        ratios = {
            column: [
                a / b for a, b in zip(values[upper][column], values[lower][column], strict=True)
            ]
            for column in columns
        }
        rows.append(
            {"run": f"**{title}**"} | {column: arrow(found) for column, found in ratios.items()}
        )
    paper = {"run": "**the paper, PN-V / BN**"}
    for title, upper, lower in (
        ("distance", "psi2_distance", "sigma2_distance"),
        ("gradient", "g_psi2", "g_sigma2"),
    ):
        pairs = zip(PAPER_MEDIANS[upper][PAPER_PNV], PAPER_MEDIANS[lower][PAPER_BN], strict=True)
        paper[f"{title}, layer 1"] = arrow([a / b for a, b in pairs])
    return table([*rows, paper])


def figure_5() -> str:
    """BLEU by norm and size of the mini-batch, and the difference from LN with the same size."""
    runs = pandas.read_csv(RESULTS / "runs.csv", dtype={"layer_scale_groups": "string"}).query(
        "study == 'mini-batches'"
    )
    scores = runs.pivot(
        index=["norm", "layer_scale_groups"], columns="max_tokens", values="tokenized"
    )
    differences = scores - scores.loc["LN"].iloc[0]
    rows = []
    for norm, groups in sorted(
        scores.index, key=lambda system: list(runs["norm"].unique()).index(system[0])
    ):
        row = {
            "encoder norm": norm if pandas.isna(groups) else f"{norm} (layer_scale_groups={groups})"
        }
        for tokens in scores:
            score, difference = (frame[tokens][norm, groups] for frame in (scores, differences))
            if pandas.notna(score):
                change = "" if norm == "LN" else f" ({difference:+.2f})".replace("-", "−")
                row[f"BLEU, {tokens:,.0f}"] = f"{score:.2f}{change}"
        rows.append(row)
    return table(rows)


def figure_6() -> str:
    spectra, rows = read("spectra.csv"), []
    shares = spectra / (spectra**2).sum() ** 0.5
    ratios = shares.div(shares["ln"], axis=0)
    for run, (label, _) in MODELS.items():
        first, *_, last = shares[run]
        row = {"run": label, "largest / second": f"{spectra[run][0] / spectra[run][1]:.2f}"}
        row |= {
            "largest / Frobenius norm": f"{first:.3f}",
            "smallest / Frobenius norm": f"{last:.3f}",
        }
        away = (ratios[run] - 1).abs()
        row["farthest from LN"] = "–" if run == "ln" else f"{away.max():.1%}, index {away.idxmax()}"
        rows.append(row)
    rows += [
        {"run": f"the paper, {norm}", "largest / second": f"{values[0] / values[1]:.2f}"}
        for norm, values in PAPER_SPECTRA.items()
    ]
    return table(rows)


def figure_7() -> str:
    gains_of_norms = read("gains.csv").set_index(["run", "norm"])
    places, rows = (
        {"self_attn_layer_norm": "self-attention", "final_layer_norm": "feed-forward"},
        [],
    )
    for run in DRAWN[0][1]:
        row = {"run": MODELS[run][0]}
        for place, title in places.items():
            of_place = gains_of_norms.loc[
                [(run, f"encoder.layers.{layer}.{place}") for layer in range(3)]
            ]
            row[f"medians before {title}"] = ", ".join(
                f"{value:.2f}" for value in of_place["median"]
            )
            row[f"above 1 before {title}"] = ", ".join(
                f"{value:.0%}" for value in of_place["share above 1"]
            )
        rows.append(row)
    paper = {"run": "the paper, PN-V (6 layers)"}
    paper |= {"medians before self-attention": ", ".join(f"{value:.2f}" for value in PAPER_GAIN)}
    return table([*rows, paper])


def images() -> str:
    columns = {"mean": "mu_distance_l2", "variance": "sigma2_distance_l2"}
    columns |= {"mean, relative": "tid_mean", "deviation, relative": "tid_var"}
    gradients = {"gradient, mean": "g_mu_l2", "gradient, variance": "g_sigma2_l2"}
    rows = []
    for subject in subjects(("bn", *IMAGES), None):
        (norm,) = subject.series["norm"].unique()
        row = {"run": subject.label} | {
            title: arrow(course(subject.run, norm, column)) for title, column in columns.items()
        }
        rows.append(
            row | {title: arrow(sums(subject, column)) for title, column in gradients.items()}
        )
    for label in (PAPER_BN, "paper, ResNet20 on CIFAR-10"):
        row = {"run": f"the {label}"}
        for title, column in (columns | gradients).items():
            if values := PAPER_MEDIANS.get(column.removesuffix("_l2"), {}).get(label):
                row[title] = arrow(values)
        rows.append(row)
    return table(rows)


def smoothness() -> str:
    measured = over_the_steps(read("smoothness-steps.csv")).groupby("run", sort=False)
    quantiles = {run: of_run.quantile([0.5, 0, 1]) for run, of_run in measured}
    return table(
        [
            {"run": run}
            | {name: "{:.2f} ({:.2f} to {:.2f})".format(*of_run[name]) for name in of_run}
            for run, of_run in quantiles.items()
        ]
    )


def relative() -> str:
    """One sentence for docs/why.md."""
    last = {run: course(run, THIRD, "tid_var")[1] for run in ("bn", "bn_ls", "pnv", "pnv_ls")}
    return (
        "In the last fifth of the run the relative distances of the standard deviations are "
        f"{last['bn_ls']:.3f} with and {last['bn']:.3f} without layer-scale for BN, "
        f"{last['pnv_ls']:.3f} "
        f"and {last['pnv']:.3f} for PN-V (`tid_var` in [medians.csv](figures/medians.csv))."
    )


PAGES = {
    "figures.md": {
        "figure 2": figure_2,
        "figure 3": figure_3,
        "figure 4": figure_4,
        "figure 5": figure_5,
        "figure 6": figure_6,
        "figure 7": figure_7,
        "images": images,
        "smoothness": smoothness,
    },
    "why.md": {"relative distances": relative},
}


def main(arguments: Sequence[str]) -> None:
    """Train and record in the folder that ``arguments`` name, if any, and draw."""
    logging.disable(logging.INFO)  # fairseq's import lets matplotlib's messages through
    match arguments:
        case []:
            pass
        case ["--images", folder]:
            write_images(Path(folder))
        case [folder, *settings] if not folder.startswith("-"):
            train(Path(folder).absolute(), settings)
            write(Path(folder).absolute())
        case _:
            raise SystemExit("python -m docs.tools.figures [RUNS [key=value...] | --images OUTPUT]")
    draw()
    write_parts(PAGES)


if __name__ == "__main__":
    main(sys.argv[1:])
