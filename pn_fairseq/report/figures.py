"""``pn figures``: Figures 2 to 7 of the PowerNorm paper, from the probes, scores and checkpoints of
your runs.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import pandas
import pyarrow as pa
import pyarrow.parquet as pq

from pn_fairseq.common.checkpoint_files import LAST
from pn_fairseq.common.command import ArgumentParser, UserError, did_you_mean
from pn_fairseq.common.files import check_can_be_folder
from pn_fairseq.pipeline.published import (
    PAPER_BLEU,
    PAPER_GAIN,
    PAPER_MEDIANS,
    PAPER_SPECTRA,
    SPECTRA_INDICES,
)
from pn_fairseq.report.curves import headless_pyplot, legend, save, style

if TYPE_CHECKING:
    from pn_fairseq.report.runs import ReportedRun

#: Marks that tell boxes apart in grey. Their number differs from that of the colours, so a repeated
#: colour gets another mark.
_HATCHES = ("", "////", "....", "xxxx", "\\\\\\\\", "oo")

_KINDS = ("png", "pdf")

_PAPER_MARKS = {
    "paper, ResNet20 on CIFAR-10": "D",
    "paper, BN on IWSLT14": "*",
    "paper, PN-V on IWSLT14": "P",
}

_PAPER_STYLE = {
    "linestyle": ":",
    "color": "#555555",
    "markersize": 5,
    "markerfacecolor": "white",
    "linewidth": 1,
}

_AXES = {
    "mu_distance": r"$\frac{1}{d}\|\mu-\mu_B\|$",
    "sigma2_distance": r"$\frac{1}{d}\|\sigma^2-\sigma_B^2\|$",
    "psi2_distance": r"$\frac{1}{d}\|\psi^2-\psi_B^2\|$",
    "g_mu": r"$\frac{1}{d}\|g_\mu\|$",
    "g_sigma2": r"$\frac{1}{d}\|g_{\sigma^2}\|$",
    "g_psi2": r"$\frac{1}{d}\|g_{\psi^2}\|$",
}


class Absent(Exception):
    """The runs lack what a figure shows; the message says what."""


@dataclass
class Subject:
    """What figures show of one run."""

    run: str  # its name
    label: str  # its name in the legends
    line: str  # its name in Figure 5, the same for all sizes of mini-batches
    probe: pandas.DataFrame | None = None  # the rows of its --norm-probe file
    tokens: int | None = None  # of a mini-batch
    bleu: float | None = None  # tokenized
    checkpoint: Path | None = None  # its last checkpoint
    series: pandas.DataFrame | None = None  # from series_of, for the norm of Figures 2 to 4
    # spectrum of the word embeddings, if it is known without the checkpoint
    spectrum: np.ndarray | None = None


def read_probe(folder: Path) -> pandas.DataFrame:
    """The rows of a file of ``--norm-probe``, in the order of their updates.

    Raises:
        UserError: the file cannot be read.
    """
    # not the folder as a whole: a killed run may have left an incomplete file in it
    files = sorted(folder.glob("update-*.parquet"))
    try:
        return pq.ParquetDataset(files).read().to_pandas()
    except (pa.ArrowException, OSError) as error:
        raise UserError(f"{folder} cannot be read: {str(error).splitlines()[0]}") from error


def series_of(probe: pandas.DataFrame, norm: str, updates: int) -> pandas.DataFrame:
    """The rows of a norm, one for each forward, with the ``fifth`` of the run's ``updates``."""
    series = probe[(probe["norm"] == norm) & probe["forward"].notna()]
    return series.assign(fifth=np.ceil(5 * series["update"] / updates).clip(1, 5))


def read_subject(run: ReportedRun, label: str, line: str, norm: str | None = None) -> Subject:
    """What the figures show of a run.

    ``norm``: the norm of Figures 2 to 4; None: the first recorded norm.

    Raises:
        UserError: the run's probe cannot be read, or contains no norm with that name.
    """
    subject = Subject(run.name, label, line)
    tokens = run.get("dataset.max_tokens")
    if tokens:
        subject.tokens = tokens * run.world_size
    bleu = run.score("tokenized")
    if bleu:
        subject.bleu = bleu.score
    last = run.folder.checkpoints / LAST
    if last.is_file():
        subject.checkpoint = last
    if run.probe:
        _read_probe_of(run, norm, subject)
    return subject


def _read_probe_of(run: ReportedRun, norm: str | None, subject: Subject) -> None:
    subject.probe = read_probe(run.probe)
    known = list(subject.probe["norm"].unique())
    if norm is not None and norm not in known:
        hint = did_you_mean(norm, known)
        raise UserError(f"{run.probe} has no norm {norm!r} (it has {', '.join(known)}){hint}")
    updates = run.log.updates if run.log else 0
    if not (run.log and run.log.ended):
        updates = run.max_update or updates
    updates = max(updates, int(subject.probe["update"].max()))
    subject.series = series_of(subject.probe, norm or known[0], updates)


# Panels.


def _stacked(titles: Sequence[str], height: float, **options):
    """A figure with a panel for each title, stacked vertically, and the panels."""
    count = len(titles)
    size = (6.4, height * count)
    figure, axes = headless_pyplot().subplots(
        count, 1, figsize=size, layout="constrained", squeeze=False, **options
    )
    for axis, title in zip(axes[:, 0], titles, strict=True):
        axis.set_title(title, loc="left", parse_math=False)
    return figure, axes[:, 0]


def _boxes(
    axis,
    groups: Mapping[str, Sequence[np.ndarray]],
    ticks: Sequence,
    medians: Mapping[str, Sequence[float]],
):
    """A group of box plots at each tick (label -> values at each tick), and the paper's medians
    next to them.

    Whiskers reach 1.5 interquartile ranges, as in the paper; points beyond are drawn.
    """
    width = 0.8 / len(groups)
    handles = {}
    for index, (label, values) in enumerate(groups.items()):
        look = style(index)
        shift = (index - (len(groups) - 1) / 2) * width
        finite = [at_tick[np.isfinite(at_tick)] for at_tick in values]
        drawn = axis.boxplot(
            finite,
            positions=np.arange(len(values)) + shift,
            widths=0.85 * width,
            whis=1.5,
            patch_artist=True,
            manage_ticks=False,
            medianprops={"color": "black", "linewidth": 1.6},
            flierprops={"marker": look["marker"], "markersize": 2.5, "alpha": 0.5},
        )
        hatch = _HATCHES[index % len(_HATCHES)]
        for box in drawn["boxes"]:
            box.set(edgecolor=look["color"], facecolor=f"{look['color']}55", hatch=hatch)
        handles[label] = drawn["boxes"][0]
    # at the ticks: a shifted line would be read at another place
    for label, values in medians.items():
        places = range(len(values))
        mark = _PAPER_MARKS[label]
        (handles[label],) = axis.plot(places, values, marker=mark, zorder=5, **_PAPER_STYLE)
    axis.set_xticks(range(len(ticks)), ticks)
    axis.grid(axis="y", alpha=0.3)
    return handles


def values_of(series: pandas.DataFrame, column: str) -> pandas.Series:
    """The values of a column that Figures 2 to 4 show. A gradient belongs to the summed loss, and
    is summed over the tokens.
    """
    if column.startswith("g_"):
        return series[column] * (series["tokens"] * series["sample_size"])
    return series[column]


def _fifths(subjects: Sequence[Subject], column: str) -> list[np.ndarray]:
    """The values of a column in each fifth of training, of all runs."""
    values = pandas.concat([values_of(subject.series, column) for subject in subjects])
    fifths = pandas.concat([subject.series["fifth"] for subject in subjects])
    return [values[fifths == fifth].to_numpy() for fifth in range(1, 6)]


def _by_label(subjects: Sequence[Subject]) -> dict[str, list[Subject]]:
    by_label: dict[str, list[Subject]] = {}
    for subject in subjects:
        by_label.setdefault(subject.label, []).append(subject)
    return by_label


def _legend(figure, handles: Mapping[str, object]) -> None:
    columns = 3 if max(map(len, handles)) < 25 else 1
    legend(figure, handles, columns)


def _over_training(subjects: Sequence[Subject], panels: Sequence[Sequence[str]]):
    """Box plots over fifths of training; of two columns, norms with running psi^2 show the last."""
    systems = _by_label(subjects)
    norms: dict[str, None] = {}
    for subject in subjects:
        norms |= dict.fromkeys(subject.series["norm"])
    counts = sorted({len(runs) for runs in systems.values()})
    if len(counts) > 1:
        several = f"{counts[0]} to {counts[-1]}"
    else:
        several = str(counts[0])
    runs_of_a_box = f"{several} run{'s' * (several != '1')}"
    figure, axes = _stacked([", ".join(norms)] * len(panels), 4.2)
    handles = {}
    for axis, columns in zip(axes, panels, strict=True):
        groups = {}
        for label, runs in systems.items():
            shows_psi = runs[0].series["running"].iloc[0] == "psi2"
            if shows_psi:
                column = columns[-1]
            else:
                column = columns[0]
            groups[label] = _fifths(runs, f"{column}_l2")
        handles |= _boxes(axis, groups, (20, 40, 60, 80, 100), _paper_medians(columns))
        name = " or ".join(_AXES[column] for column in columns)
        if columns[0].startswith("g_"):
            name += "\nof the summed loss (nats),\nsummed over tokens"
        xlabel = f"percent of training (each box: the fifth before it, of {runs_of_a_box})"
        axis.set(xlabel=xlabel, yscale="log", ylabel=name)
    _legend(figure, handles)
    return figure


def _paper_medians(columns: Sequence[str]) -> dict[str, Sequence[float]]:
    """Label -> the paper's medians; its Figure 4 shows none for CIFAR."""
    medians = {}
    for column in columns:
        for label, values in PAPER_MEDIANS[column].items():
            if len(columns) == 1 or "CIFAR" not in label:
                medians[label] = values
    return medians


#: Figures 2, 3 and 4.
distances = partial(_over_training, panels=[("mu_distance",), ("sigma2_distance",)])
gradients = partial(_over_training, panels=[("g_mu",), ("g_sigma2",)])
of_the_running_statistic = partial(
    _over_training, panels=[("sigma2_distance", "psi2_distance"), ("g_sigma2", "g_psi2")]
)


def batch_size(subjects: Sequence[Subject]):
    """Figure 5."""
    columns = ["line", "tokens", "bleu"]
    points = [(subject.line, subject.tokens, subject.bleu) for subject in subjects]
    in_paper = []
    for norm, scores in PAPER_BLEU.items():
        in_paper += [(norm, tokens, bleu) for tokens, bleu in scores.items()]
    ours, paper = (pandas.DataFrame(rows, columns=columns) for rows in (points, in_paper))
    figure, axes = _stacked(["these runs", "the paper, IWSLT14 German-English"], 4, sharex=True)
    sizes = pandas.concat([ours["tokens"], paper["tokens"]]).sort_values().unique()
    # the same style on both sides
    lines = list(dict.fromkeys([*PAPER_BLEU, *ours["line"]]))
    # the same number of BLEU per inch in both panels
    span = 1.1 * max(np.ptp(ours["bleu"]), np.ptp(paper["bleu"])) or 1
    handles = {}
    for axis, drawn in zip(axes, (ours, paper), strict=True):
        for line, scores in drawn.groupby("line", sort=False):
            means = scores.groupby("tokens")["bleu"].mean()
            look = style(lines.index(line))
            # Draw no line across a size that was not trained.
            first = means.index[0]
            last = means.index[-1]
            within = [size for size in sizes if first <= size <= last]
            gaps = means.reindex(within)
            (handles[line],) = axis.plot(gaps.index, gaps, label=line, **look)
            # points for every seed
            axis.plot(scores["tokens"], scores["bleu"], ".", color=look["color"], alpha=0.5)
        middle = (drawn["bleu"].max() + drawn["bleu"].min()) / 2
        axis.set_xscale("log", base=2)
        axis.set_ylim(middle - span / 2, middle + span / 2)
        axis.set(xlabel="tokens per mini-batch", ylabel="tokenized BLEU")
        ticks = sorted(drawn["tokens"].unique())
        axis.set_xticks(ticks, [f"{size:,}" for size in ticks])
        axis.grid(alpha=0.3)
    legend_columns = 2
    if max(map(len, lines)) < 20:
        legend_columns = 3
    legend(figure, {line: handles[line] for line in lines}, legend_columns)
    return figure


def spectrum(checkpoint: Path) -> np.ndarray:
    """Singular values of the encoder's word embeddings (for a language model the decoder's), the
    largest first, float64.

    Raises:
        Absent: the checkpoint has none.
    """
    import torch

    from pn_fairseq.common.checkpoints import load_checkpoint

    model = load_checkpoint(checkpoint)["model"]
    for side in ("encoder", "decoder"):
        weight = model.get(f"{side}.embed_tokens.weight")
        if weight is not None:
            return torch.linalg.svdvals(weight.double()).numpy()
    raise Absent(f"{checkpoint} has no word embeddings, encoder. or decoder.embed_tokens.weight")


def spectra(subjects: Sequence[Subject]):
    """Figure 6: the singular values, and the same as ratios to LN's."""
    systems: dict[str, list[np.ndarray]] = {}
    for subject in subjects:
        values = subject.spectrum
        if values is None:
            values = spectrum(subject.checkpoint)
        systems.setdefault(subject.label, []).append(values)
    lengths = {len(values) for seeds in systems.values() for values in seeds}
    base = None
    if len(lengths) == 1:
        controls = [label for label in systems if label == "LN" or label.startswith("LN (")]
        base = next(iter(controls), None)
    titles = [
        "divided by the largest, as in the paper",
        "divided by the second",
        "divided by the Frobenius norm",
    ]
    if base is not None:
        titles.append(f"divided by the Frobenius norm, ratio to {base}")
        relative = [values / np.linalg.norm(values) for values in systems[base]]
        mean = np.mean(relative, axis=0)
    figure, axes = _stacked(titles, 3.6)
    handles = {}
    for index, (label, seeds) in enumerate(systems.items()):
        look = style(index) | {"marker": None}
        for values in seeds:
            norm = np.linalg.norm(values)
            divisors = [values[0], values[1], norm]
            if base is not None:
                divisors.append(norm * mean)
            for axis, divisor in zip(axes, divisors, strict=True):
                (handles[label],) = axis.plot(values / divisor, **look)
    for axis in axes:
        axis.set(yscale="log", ylabel="singular value of\nthe word embeddings")
        axis.grid(alpha=0.3)
    if base is not None:
        axes[-1].set(yscale="linear", ylabel="ratio")
    # The values of the paper's larger matrix, at the same fraction of all values.
    indices = np.array(SPECTRA_INDICES) / 1024 * max(lengths)
    for (label, values), marker in zip(PAPER_SPECTRA.items(), "D*", strict=True):
        title = f"paper, {label}, WMT14 big (1,024 values, index to scale)"
        for axis, divisor in ((axes[0], values[0]), (axes[1], values[1])):
            ratios = np.array(values) / divisor
            (handles[title],) = axis.plot(indices, ratios, marker=marker, **_PAPER_STYLE)
    axes[-1].set_xlabel("index of the singular value")
    _legend(figure, handles)
    return figure


#: Norm of a layer -> its position.
_OF_LAYER = {
    "self_attn_layer_norm": "before self-attention",
    "final_layer_norm": "before the feed-forward network",
}


def _last_gains(subject: Subject) -> pandas.DataFrame:
    """The last row of each norm of a layer with a gain per channel, and its ``side``, ``layer`` and
    ``position``.
    """
    recorded = subject.probe.dropna(subset=["gamma_over_psi_batch"])
    last = recorded.drop_duplicates("norm", keep="last")
    pattern = r"^(?P<side>encoder|decoder)\.layers\.(?P<layer>\d+)\.(?P<position>.+)$"
    names = last["norm"].str.extract(pattern)
    names["position"] = names["position"].map(_OF_LAYER)
    of_layers = last.join(names).dropna(subset=["position"])
    return of_layers.assign(label=subject.label, layer=of_layers["layer"].astype(int))


def gains(subjects: Sequence[Subject]):
    """Figure 7."""
    last = pandas.concat(map(_last_gains, subjects))
    side = "encoder" if (last["side"] == "encoder").any() else "decoder"  # for language models
    last = last[last["side"] == side]
    recorded = set(last["position"])
    positions = [position for position in _OF_LAYER.values() if position in recorded]
    figure, axes = _stacked(positions, 4.2)
    handles = {}
    for axis, position in zip(axes, positions, strict=True):
        drawn = last[last["position"] == position]
        layers = sorted(drawn["layer"].unique())
        groups = {}
        # also labels without values here, so that the others keep their colours
        for label in last["label"].unique():
            own = drawn[drawn["label"] == label]
            groups[label] = [_channels(own[own["layer"] == layer]) for layer in layers]
        paper = [PAPER_GAIN[layer] if layer < len(PAPER_GAIN) else np.nan for layer in layers]
        ticks = [layer + 1 for layer in layers]
        handles |= _boxes(axis, groups, ticks, {"paper, PN-V on IWSLT14": paper})
        axis.axhline(1, linestyle="--", color="black", linewidth=1)
        ylabel = r"$\gamma/\psi_B$ of each channel, last recorded update"
        axis.set(xlabel=f"{side} layer", ylabel=ylabel)
    _legend(figure, handles)
    return figure


def _channels(rows: pandas.DataFrame) -> np.ndarray:
    return np.concatenate([[], *rows["gamma_over_psi_batch"]])


class Figure(NamedTuple):
    """How a figure is drawn."""

    draw: Callable  # draw(subjects) -> figure
    shows: Callable[[Subject], bool]  # whether a run has what the figure needs
    needs: str  # the name of what the figure needs


def _has_probe(subject: Subject) -> bool:
    return subject.probe is not None


def _has_score(subject: Subject) -> bool:
    return subject.bleu is not None and subject.tokens is not None


def _has_checkpoint(subject: Subject) -> bool:
    return subject.checkpoint is not None


def _has_gains(subject: Subject) -> bool:
    return subject.probe is not None and not _last_gains(subject).empty


_PROBE = "a --norm-probe file"

#: The figures by their number in the paper.
FIGURES: dict[int, Figure] = {
    2: Figure(distances, _has_probe, _PROBE),
    3: Figure(gradients, _has_probe, _PROBE),
    4: Figure(of_the_running_statistic, _has_probe, _PROBE),
    5: Figure(batch_size, _has_score, "scores (pn score) and dataset.max_tokens"),
    6: Figure(spectra, _has_checkpoint, "a checkpoint_last.pt"),
    7: Figure(gains, _has_gains, "a --norm-probe file with gains of a layer's norms"),
}

_EPILOG = """\
RUN is a folder as for pn report. Figures 2, 3, 4 and 7 need --norm-probe, Figure 5 needs scores and
Figure 6 checkpoints. A run without the data for a figure is left out of it, with a line that says
so. The paper's medians are drawn next to the runs. docs/figures.md describes each figure.

Writes DIR/figure-N.png and DIR/figure-N.pdf, and replaces earlier ones.
"""


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    description = "Draw Figures 2 to 7 of the PowerNorm paper from training runs."
    parser = ArgumentParser(prog="pn figures", description=description, epilog=_EPILOG)
    add = parser.add_argument
    add("runs", nargs="+", type=Path, metavar="RUN", help="folder of a run")
    output = "where to write; created if needed"
    add("--output", required=True, type=Path, metavar="DIR", help=output)
    labels = (
        "names for the legends (default: as in the tables of pn report, by norm and settings); "
        "runs with the same label are drawn as one"
    )
    add("--labels", nargs="+", metavar="LABEL", help=labels)
    norm = (
        "norm of Figures 2 to 4, such as encoder.layers.0.final_layer_norm (default: the first one "
        "of the model)"
    )
    add("--norm", metavar="NAME", help=norm)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    """Run ``pn figures`` on ``argv`` (by default the process's arguments)."""
    args = _parse(argv)

    from pn_fairseq.report.runs import read_runs
    from pn_fairseq.report.systems import labels_of

    check_can_be_folder(args.output, "--output")
    runs = read_runs(args.runs)
    if not args.labels:
        labels = labels_of(runs)
    elif len(args.labels) == len(runs):
        labels = [(label, label) for label in args.labels]
    else:
        raise UserError(f"{len(runs)} runs but {len(args.labels)} --labels")
    subjects = []
    for run, (label, line) in zip(runs, labels, strict=True):
        subjects.append(read_subject(run, label, line, args.norm))

    drawn = {}
    absent = []
    without = []
    for number, figure in FIGURES.items():
        shown = [subject for subject in subjects if figure.shows(subject)]
        left_out = [subject.run for subject in subjects if not figure.shows(subject)]
        try:
            if not shown:
                raise Absent(f"no run has {figure.needs}")
            drawn[number] = figure.draw(shown)
        except Absent as error:
            absent.append(f"Figure {number}: {error}")
            continue
        if left_out:
            names = ", ".join(left_out)
            without.append(f"Figure {number} is without {names}: not every run has {figure.needs}")
    if not drawn:
        raise UserError(f"nothing to draw: {'; '.join(absent)}")
    written = []
    args.output.mkdir(parents=True, exist_ok=True)
    for number, kind in itertools.product(FIGURES, _KINDS):
        file = args.output / f"figure-{number}.{kind}"
        if number in drawn:
            save(drawn[number], file)
            written.append(file)
        else:  # a file from an earlier call
            file.unlink(missing_ok=True)
    for line in [*(f"not drawn: {reason}" for reason in absent), *without]:
        print(f"pn figures: {line}", file=sys.stderr)
    print(*written, sep="\n")
