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
import textwrap
from collections.abc import Sequence
from pathlib import Path

import pandas

from examples.smoothness import over_the_steps
from pn_fairseq.pipeline.published import PAPER_GAIN, PAPER_MEDIANS, PAPER_SPECTRA
from pn_fairseq.report.curves import save
from pn_fairseq.report.figures import FIGURES as DRAWINGS
from pn_fairseq.report.figures import Subject, read_subject, series_of, spectrum, values_of
from pn_fairseq.report.runs import ReportedRun, read_runs

from .generated import ROOT, markdown_table, write_parts

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


def record(runs: dict[str, ReportedRun]) -> pandas.DataFrame:
    """The recorded values of all runs (name -> run) that the figures show, in float32.

    These are the rows of single forwards, with the gains of the channels in the last update only.
    """
    frames = []
    for name, run in runs.items():
        probe = read_subject(run, name, name).probe
        updates = probe["update"].max()
        last = probe["update"] == updates
        if run.log:
            updates = max(run.log.updates, updates)
        shown = probe[probe["forward"].notna() | last].assign(run=name, updates=updates)
        shown["gamma_over_psi_batch"] = shown["gamma_over_psi_batch"].where(last)
        distances = [column for column in shown if column.endswith("_l2")]
        types = dict.fromkeys(distances, "float32")
        frames.append(shown[["run", *COLUMNS, *distances]].astype(types))
    return pandas.concat(frames, ignore_index=True)


def subjects(names: tuple[str, ...], norm: str | None) -> list[Subject]:
    """The runs, from the files in docs/figures.

    ``norm``: the norm of Figures 2 to 4; None: the first.
    """
    spectra = read("spectra.csv")
    files = (FIGURES / RECORDS, FIGURES / f"images-{RECORDS}")
    records = pandas.concat(map(pandas.read_parquet, files))
    shown = []
    for name in names:
        label = LABELS[name]
        if name in MODELS and not IMAGES.keys().isdisjoint(names):
            label += " on the verses"
        subject = Subject(name, label, label)
        if name in spectra:
            subject.spectrum = spectra[name].to_numpy()
        subject.probe = records[records["run"] == name]
        first = subject.probe.iloc[0]
        subject.series = series_of(subject.probe, norm or first["norm"], int(first["updates"]))
        shown.append(subject)
    return shown


def draw() -> None:
    """The pictures."""
    for numbers, names, norm, suffix in DRAWN:
        shown = subjects(names, norm)
        for number in numbers:
            save(DRAWINGS[number].draw(shown), FIGURES / f"figure-{number}{suffix}.png")


def medians(run: ReportedRun, name: str) -> list[dict]:
    """The median of every quantity in each fifth of the training run, for each norm."""
    rows = []
    for norm in read_subject(run, name, name).probe["norm"].unique():
        series = read_subject(run, name, name, norm).series
        quantities = series.filter(regex="_l1$|_l2$|^tid_").columns
        by_fifth = series.groupby("fifth")[list(quantities)].median()
        by_fifth.index = [f"to {20 * int(fifth)}%" for fifth in by_fifth.index]
        for column, fifths in by_fifth.dropna(axis="columns", how="all").items():
            rows.append({"run": name, "norm": norm, "quantity": column, **fifths})
    return rows


def gains(run: ReportedRun, name: str) -> list[dict]:
    """The median of gamma / psi_B over the channels, in the last recorded update."""
    column = "gamma_over_psi_batch"
    recorded = read_subject(run, name, name).probe.dropna(subset=[column])
    last = recorded.drop_duplicates("norm", keep="last").set_index("norm")[column]
    rows = []
    for norm, channels in last.items():
        values = pandas.Series(channels)
        row = {"run": name, "norm": norm, "median": values.median()}
        rows.append(row | {"share above 1": (values > 1).mean()})
    return rows


def write(folder: Path) -> None:
    """The records and tables of the runs in a folder."""
    folders = [folder_of(folder, name) for name in MODELS]
    runs = dict(zip(MODELS, read_runs(folders), strict=True))
    all_medians, all_gains, spectra = [], [], {}
    for name, run in runs.items():
        all_medians += medians(run, name)
        all_gains += gains(run, name)
        spectra[name] = spectrum(run.path / "checkpoints/checkpoint_last.pt")
    write_table("medians.csv", all_medians)
    write_table("gains.csv", all_gains)
    write_table("spectra.csv", spectra)
    record(runs).to_parquet(FIGURES / RECORDS, index=False, compression="zstd")


def write_table(name: str, values: list[dict] | dict) -> None:
    """A table in docs/figures."""
    pandas.DataFrame(values).to_csv(FIGURES / name, index=False, float_format="%.4g")


def write_images(folder: Path) -> None:
    """Write the pictures and tables of the training runs on images, and their accuracies."""
    folders = [folder / name for _, name in IMAGES.values()]
    runs = dict(zip(IMAGES, read_runs(folders), strict=True))
    rows = []
    for name, run in runs.items():
        rows += medians(run, name)
    write_table("images-medians.csv", rows)
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
    medians = read("images-medians.csv" if run in IMAGES else "medians.csv")
    row = medians.set_index(["run", "norm", "quantity"]).loc[(run, norm, quantity)]
    return row["to 20%"], row["to 100%"]


def sums(subject: Subject, quantity: str) -> list[float]:
    """The medians that Figure 3 shows of a gradient."""
    return values_of(subject.series, quantity).groupby(subject.series["fifth"]).median().tolist()


def arrow(values: Sequence[float], unit: float = 1) -> str:
    """The first and the last value, in units, with two significant digits."""
    first, last = (f"{values[place] / unit:#.2g}".rstrip(".") for place in (0, -1))
    return f"{first} → {last}"


def factor(values: Sequence[float]) -> str:
    """The last value over the first."""
    return f"{values[-1] / values[0]:.1f}"


def quantity_of(name: str, run: str) -> str:
    """What Figure 4 shows of a run: ``distance`` or gradient ``g``, through the variance or PN-V's
    mean square.
    """
    statistic = "psi2" if run.startswith("pnv") else "sigma2"
    return f"{statistic}_distance_l2" if name == "distance" else f"g_{statistic}_l2"


def figure_2() -> str:
    columns = {
        "mean, layer 1": (FIRST, "mu_distance_l2"),
        "variance, layer 1": (FIRST, "sigma2_distance_l2"),
        "variance, layer 3": (THIRD, "sigma2_distance_l2"),
        "relative, layer 1": (FIRST, "tid_var"),
        "relative, layer 3": (THIRD, "tid_var"),
    }
    rows = []
    for run, (label, _) in MODELS.items():
        row = {"run": label}
        for title, (norm, quantity) in columns.items():
            row[title] = arrow(course(run, norm, quantity))
        rows.append(row)
    paper = {"run": "the paper, BN on IWSLT14"}
    paper["mean, layer 1"] = arrow(PAPER_MEDIANS["mu_distance"][PAPER_BN])
    paper["variance, layer 1"] = arrow(PAPER_MEDIANS["sigma2_distance"][PAPER_BN])
    return markdown_table([*rows, paper])


def figure_3() -> str:
    statistics = {"mean": "g_mu", "variance": "g_sigma2"}
    rows = []
    for subject, (label, _) in zip(subjects(tuple(MODELS), FIRST), MODELS.values(), strict=True):
        row = {"run": label}
        for name, quantity in statistics.items():
            values = course(subject.run, FIRST, f"{quantity}_l2")
            row[f"{name}, 10⁻⁸"] = arrow(values, 1e-8)
            row[f"{name}, last / first"] = factor(values)
            row[f"{name}, as sums"] = arrow(sums(subject, f"{quantity}_l2"))
        rows.append(row)
    paper = {"run": "the paper, BN on IWSLT14"}
    for name, quantity in statistics.items():
        values = PAPER_MEDIANS[quantity][PAPER_BN]
        paper[f"{name}, last / first"] = factor(values)
        paper[f"{name}, as sums"] = arrow(values)
    return markdown_table([*rows, paper])


def figure_4() -> str:
    values: dict[str, dict[str, tuple[float, float]]] = {}
    rows = []
    for run in DRAWN[0][1]:
        values[run] = {}
        row = {"run": MODELS[run][0]}
        for title, what, unit in (("distance", "distance", 1), ("gradient", "g", 1e-8)):
            for layer, norm in ((1, FIRST), (3, THIRD)):
                found = course(run, norm, quantity_of(what, run))
                values[run][f"{title}, layer {layer}"] = found
                row[f"{title}, layer {layer}"] = arrow(found, unit)
        rows.append(row)
    for title, upper, lower in (
        ("PN-V / BN", "pnv", "bn"),
        ("PN-V / BN, both with layer-scale", "pnv_ls", "bn_ls"),
        ("BN / BN with layer-scale", "bn", "bn_ls"),
        ("PN-V / PN-V with layer-scale", "pnv", "pnv_ls"),
    ):
        row = {"run": f"**{title}**"}
        for column, found in values[upper].items():
            row[column] = arrow(ratios(found, values[lower][column]))
        rows.append(row)
    paper = {"run": "**the paper, PN-V / BN**"}
    for title, upper, lower in (
        ("distance", "psi2_distance", "sigma2_distance"),
        ("gradient", "g_psi2", "g_sigma2"),
    ):
        found = ratios(PAPER_MEDIANS[upper][PAPER_PNV], PAPER_MEDIANS[lower][PAPER_BN])
        paper[f"{title}, layer 1"] = arrow(found)
    return markdown_table([*rows, paper])


def ratios(upper: Sequence[float], lower: Sequence[float]) -> list[float]:
    return [a / b for a, b in zip(upper, lower, strict=True)]


def figure_5() -> str:
    """BLEU by norm and size of the mini-batch, and the difference from LN with the same size."""
    runs = pandas.read_csv(RESULTS / "runs.csv", dtype={"layer_scale_groups": "string"})
    runs = runs[runs["study"] == "mini-batches"]
    norms = runs["norm"].unique()
    runs = runs.sort_values("layer_scale_groups", na_position="first", kind="stable")
    rows = []
    control = runs[runs["norm"] == "LN"].set_index("max_tokens")["tokenized"]
    for norm in norms:
        systems = runs[runs["norm"] == norm].groupby("layer_scale_groups", dropna=False, sort=False)
        for groups, of_system in systems:
            system = norm if pandas.isna(groups) else f"{norm} (layer_scale_groups={groups})"
            row = {"encoder norm": system}
            scores = of_system.set_index("max_tokens")["tokenized"]
            for tokens in sorted(runs["max_tokens"].unique()):
                if tokens in scores:
                    text = f"{scores[tokens]:.2f}"
                    if norm != "LN":
                        text += f" ({scores[tokens] - control[tokens]:+.2f})".replace("-", "−")
                    row[f"BLEU, {tokens:,.0f}"] = text
            rows.append(row)
    return markdown_table(rows)


def figure_6() -> str:
    spectra = read("spectra.csv")
    shares = spectra / (spectra**2).sum() ** 0.5
    rows = []
    for run, (label, _) in MODELS.items():
        values, share = spectra[run], shares[run]
        row = {"run": label, "largest / second": f"{values[0] / values[1]:.2f}"}
        row["largest / Frobenius norm"] = f"{share.iloc[0]:.3f}"
        row["smallest / Frobenius norm"] = f"{share.iloc[-1]:.3f}"
        away = (share / shares["ln"] - 1).abs()
        row["farthest from LN"] = "–" if run == "ln" else f"{away.max():.1%}, index {away.idxmax()}"
        rows.append(row)
    for norm, values in PAPER_SPECTRA.items():
        largest = f"{values[0] / values[1]:.2f}"
        rows.append({"run": f"the paper, {norm}", "largest / second": largest})
    return markdown_table(rows)


def figure_7() -> str:
    gains_of_norms = read("gains.csv").set_index(["run", "norm"])
    places = {"self_attn_layer_norm": "self-attention", "final_layer_norm": "feed-forward"}
    rows = []
    for run in DRAWN[0][1]:
        row = {"run": MODELS[run][0]}
        for place, title in places.items():
            norms = [(run, f"encoder.layers.{layer}.{place}") for layer in range(3)]
            gains_of_place = gains_of_norms.loc[norms]
            row[f"medians before {title}"] = ", ".join(
                gains_of_place["median"].map("{:.2f}".format)
            )
            above = gains_of_place["share above 1"].map("{:.0%}".format)
            row[f"above 1 before {title}"] = ", ".join(above)
        rows.append(row)
    paper = {"run": "the paper, PN-V (6 layers)"}
    paper["medians before self-attention"] = ", ".join(map("{:.2f}".format, PAPER_GAIN))
    return markdown_table([*rows, paper])


def images() -> str:
    columns = {"mean": "mu_distance_l2", "variance": "sigma2_distance_l2"}
    columns |= {"mean, relative": "tid_mean", "deviation, relative": "tid_var"}
    gradients = {"gradient, mean": "g_mu_l2", "gradient, variance": "g_sigma2_l2"}
    rows = []
    for subject in subjects(("bn", *IMAGES), None):
        norm = subject.series["norm"].iloc[0]
        row = {"run": subject.label}
        for title, column in columns.items():
            row[title] = arrow(course(subject.run, norm, column))
        for title, column in gradients.items():
            row[title] = arrow(sums(subject, column))
        rows.append(row)
    for label in (PAPER_BN, "paper, ResNet20 on CIFAR-10"):
        row = {"run": f"the {label}"}
        for title, column in (columns | gradients).items():
            medians_of_column = PAPER_MEDIANS.get(column.removesuffix("_l2"), {})
            if label in medians_of_column:
                row[title] = arrow(medians_of_column[label])
        rows.append(row)
    return markdown_table(rows)


def smoothness() -> str:
    measured = over_the_steps(read("smoothness-steps.csv")).groupby("run", sort=False)
    rows = []
    for run, steps in measured:
        row = {"run": run}
        for name, (median, low, high) in steps.quantile([0.5, 0, 1]).items():
            row[name] = f"{median:.2f} ({low:.2f} to {high:.2f})"
        rows.append(row)
    return markdown_table(rows)


def relative() -> str:
    """A sentence for docs/why.md."""
    last = {run: course(run, THIRD, "tid_var")[1] for run in ("bn", "bn_ls", "pnv", "pnv_ls")}
    sentence = (
        "In the last fifth of the run, the batch's and the running standard deviations of BN "
        f"differ by {last['bn_ls']:.1%} with layer-scale and by {last['bn']:.1%} without it, those "
        f"of PN-V by {last['pnv_ls']:.1%} and {last['pnv']:.1%} (`tid_var` in "
        "[medians.csv](figures/medians.csv))."
    )
    return textwrap.fill(sentence, 100, break_on_hyphens=False)


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
