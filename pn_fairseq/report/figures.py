"""``pn figures``:

Figures 2 to 7 of the PowerNorm paper, from the probes, scores and checkpoints of your runs.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas

from pn_fairseq.common.command import ArgumentParser, UserError, did_you_mean
from pn_fairseq.pipeline.published import (
    PAPER_BLEU,
    PAPER_GAIN,
    PAPER_MEDIANS,
    PAPER_SPECTRA,
    SPECTRA_INDICES,
)
from pn_fairseq.report.curves import COLOURS, headless_pyplot, legend, save, style

#: Marks that tell boxes apart in grey.
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
    """The runs do not have what a figure shows; the message says what."""


@dataclass
class Subject:
    """What figures show of one run."""

    run: str  # its name
    label: str  # its name in the legends
    line: str  # its name in Figure 5, the same with all sizes of mini-batches
    probe: pandas.DataFrame | None = None  # the rows of its --norm-probe file
    tokens: int | None = None  # of a mini-batch
    bleu: float | None = None  # tokenized
    checkpoint: Path | None = None  # its last one
    series: pandas.DataFrame | None = None  # of series_of, of the norm of Figures 2 to 4
    # of the word embeddings, if it is known without the checkpoint
    spectrum: np.ndarray | None = None


def series_of(probe: pandas.DataFrame, norm: str, updates: int) -> pandas.DataFrame:
    """The rows of a norm, one for each forward, with the ``fifth`` of the ``updates`` of the
    run.
    """
    series = probe[(probe["norm"] == norm) & probe["forward"].notna()]
    return series.assign(fifth=np.ceil(5 * series["update"] / updates).clip(1, 5))


def read_subject(run, label: str, line: str, name: str | None = None) -> Subject:
    """``name`` is the norm of Figures 2 to 4; None: the first one that was recorded.

    Raises:
        UserError: the run's probe cannot be read, or has no norm of that name.
    """
    from pn_fairseq.common.probe_files import read_probe

    tokens, last = run.get("dataset.max_tokens"), run.checkpoints / "checkpoint_last.pt"
    subject = Subject(run.name, label, line, tokens=tokens * run.world_size if tokens else None)
    subject.bleu = run.score("tokenized").score if run.scores else None
    subject.checkpoint = last if last.is_file() else None
    if folder := run.probe:
        try:
            subject.probe = probe = read_probe(folder)
        except ValueError as error:
            raise UserError(str(error)) from error
        known = list(probe["norm"].unique())
        if name is not None and name not in known:
            raise UserError(
                f"{folder} has no norm {name!r} (it has "
                f"{', '.join(known)}){did_you_mean(name, known)}"
            )
        logged = run.log.updates if run.log else 0
        planned = logged if run.log and run.log.ended else run.max_update or logged
        subject.series = series_of(
            probe, name or known[0], max(planned, int(probe["update"].max()))
        )
    return subject


# Panels.


def _stacked(titles: Sequence[str], height: float, **options):
    """A figure with a panel for each title, one below the other, and the panels."""
    size, count = (6.4, height * len(titles)), len(titles)
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
    slots = max(len(groups), 1)
    width = 0.8 / slots
    handles = {}
    for index, (label, values) in enumerate(groups.items()):
        positions = np.arange(len(values)) + (index - (slots - 1) / 2) * width
        finite = [np.asarray(of_tick)[np.isfinite(of_tick)] for of_tick in values]
        drawn = axis.boxplot(
            finite,
            positions=positions,
            widths=0.85 * width,
            whis=1.5,
            patch_artist=True,
            manage_ticks=False,
            medianprops={"color": "black", "linewidth": 1.6},
            flierprops={"marker": style(index)["marker"], "markersize": 2.5, "alpha": 0.5},
        )
        for box in drawn["boxes"]:
            colour = style(index)["color"]
            # When the colours begin again, each has another hatch.
            box.set(
                edgecolor=colour,
                facecolor=f"{colour}55",
                hatch=_HATCHES[(index + index // len(COLOURS)) % 6],
            )
        handles[label] = drawn["boxes"][0]
    # at the ticks: a line that is shifted is read at another place
    for label, values in medians.items():
        handles[label] = axis.plot(
            range(len(values)), values, marker=_PAPER_MARKS[label], zorder=5, **_PAPER_STYLE
        )[0]
    axis.set_xticks(range(len(ticks)), ticks)
    axis.grid(axis="y", alpha=0.3)
    return handles


def values_of(series: pandas.DataFrame, column: str) -> pandas.Series:
    """What Figures 2 to 4 show of a column; a gradient is of the summed loss, and summed over
    the tokens.
    """
    return series[column] * (
        series["tokens"] * series["sample_size"] if column.startswith("g_") else 1
    )


def _fifths(subjects: Sequence[Subject], column: str) -> list[np.ndarray]:
    """The values of a column in each fifth of training, of all runs."""
    runs = [(values_of(subject.series, column), subject.series["fifth"]) for subject in subjects]
    return [
        np.concatenate([values[fifths == fifth] for values, fifths in runs])
        for fifth in range(1, 6)
    ]


def _by_label(subjects: Sequence[Subject]) -> dict[str, list[Subject]]:
    labels = dict.fromkeys(subject.label for subject in subjects)
    return {label: [subject for subject in subjects if subject.label == label] for label in labels}


def _legend(figure, handles: Mapping[str, object]) -> None:
    legend(figure, handles, columns=3 if max(map(len, handles)) < 25 else 1)


def _over_training(panels: Sequence[Sequence[str]]):
    """A figure of box plots over fifths of training; of two columns, norms with running psi^2
    show the last.
    """

    def draw(subjects: Sequence[Subject]):
        systems, handles = _by_label(subjects), {}
        norms = dict.fromkeys(
            norm for subject in subjects for norm in subject.series["norm"].unique()
        )
        figure, axes = _stacked([", ".join(norms)] * len(panels), 4.2)
        for axis, columns in zip(axes, panels, strict=True):
            groups = {}
            for label, runs in systems.items():
                of_power = runs[0].series["running"].iloc[0] == "psi2"
                groups[label] = _fifths(runs, f"{columns[-1 if of_power else 0]}_l2")
            medians = {
                label: values
                for column in columns
                for label, values in PAPER_MEDIANS[column].items()
                if len(columns) == 1 or "CIFAR" not in label  # the paper's Figure 4 has none
            }
            handles |= _boxes(axis, groups, (20, 40, 60, 80, 100), medians)
            name = " or ".join(_AXES[column] for column in columns)
            name += "\nof the summed loss (nats),\nsummed over tokens" * columns[0].startswith("g_")
            counts = sorted({len(runs) for runs in systems.values()})
            several = str(counts[0]) if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
            of_runs = f"{several} run{'s' * (several != '1')}"
            xlabel = f"percent of training (each box: the fifth before it, of {of_runs})"
            axis.set(xlabel=xlabel, yscale="log", ylabel=name)
        _legend(figure, handles)
        return figure

    return draw


def batch_size(subjects: Sequence[Subject]):
    """Figure 5."""
    points = [(subject.line, subject.tokens, subject.bleu) for subject in subjects]
    paper = [
        (norm, tokens, bleu)
        for norm, of_norm in PAPER_BLEU.items()
        for tokens, bleu in of_norm.items()
    ]
    titles = {"these runs": points, "the paper, IWSLT14 German-English": paper}
    frames = {
        title: pandas.DataFrame(rows, columns=["line", "tokens", "bleu"])
        for title, rows in titles.items()
    }
    figure, axes = _stacked(list(titles), 4, sharex=True)
    sizes = sorted({tokens for _, tokens, _ in [*points, *paper]})
    # the same style on both sides
    lines = list(dict.fromkeys([*PAPER_BLEU, *(line for line, _, _ in points)]))
    span = 1.1 * max(frame["bleu"].max() - frame["bleu"].min() for frame in frames.values()) or 1
    for axis, drawn in zip(axes, frames.values(), strict=True):
        for line, of_line in drawn.groupby("line", sort=False):
            means, look = of_line.groupby("tokens")["bleu"].mean(), style(lines.index(line))
            # No line across a size that was not trained, and the same number of BLEU per inch in
            # both panels.
            gaps = means.reindex(
                [size for size in sizes if means.index[0] <= size <= means.index[-1]]
            )
            axis.plot(gaps.index, gaps, label=line, **look)
            # every seed
            axis.plot(of_line["tokens"], of_line["bleu"], ".", color=look["color"], alpha=0.5)
        axis.set_xscale("log", base=2)
        middle, ticks = (
            (drawn["bleu"].max() + drawn["bleu"].min()) / 2,
            sorted(drawn["tokens"].unique()),
        )
        axis.set(
            ylim=(middle - span / 2, middle + span / 2),
            xlabel="tokens per mini-batch",
            ylabel="tokenized BLEU",
        )
        axis.set_xticks(ticks, [f"{size:,}" for size in ticks])
        axis.grid(alpha=0.3)
    handles = {
        label: handle
        for axis in axes
        for handle, label in zip(*axis.get_legend_handles_labels(), strict=True)
    }
    legend(
        figure,
        {line: handles[line] for line in lines},
        columns=3 if max(map(len, lines)) < 20 else 2,
    )
    return figure


def spectrum(checkpoint: Path) -> np.ndarray:
    """Singular values of the encoder's word embeddings (of a language model the decoder's), the
    largest first, float64.

    Raises:
        Absent: the checkpoint has none.
    """
    import torch

    from pn_fairseq.common.checkpoints import load_checkpoint

    model = load_checkpoint(checkpoint)["model"]
    for side in ("encoder", "decoder"):
        if (weight := model.get(f"{side}.embed_tokens.weight")) is not None:
            return torch.linalg.svdvals(weight.double()).numpy()
    raise Absent(f"{checkpoint} has no word embeddings, encoder. or decoder.embed_tokens.weight")


def spectra(subjects: Sequence[Subject]):
    """Figure 6: the singular values, and the same as ratios to LN's."""
    spectra_by_label = {
        label: [
            run.spectrum if run.spectrum is not None else spectrum(run.checkpoint) for run in runs
        ]
        for label, runs in _by_label(subjects).items()
    }
    divisors = {
        "divided by the largest, as in the paper": lambda values: values[0],
        "divided by the second": lambda values: values[1],
        "divided by the Frobenius norm": np.linalg.norm,
    }
    base = next(
        (label for label in spectra_by_label if label == "LN" or label.startswith("LN (")), None
    )
    lengths = {len(values) for of_seeds in spectra_by_label.values() for values in of_seeds}
    if base is not None and len(lengths) == 1:
        mean = np.mean(
            [values / np.linalg.norm(values) for values in spectra_by_label[base]], axis=0
        )
        divisors[f"divided by the Frobenius norm, ratio to {base}"] = lambda values: (
            np.linalg.norm(values) * mean
        )
    figure, axes = _stacked(list(divisors), 3.6)
    handles = {}
    for axis, divisor in zip(axes, divisors.values(), strict=True):
        for index, (label, of_seeds) in enumerate(spectra_by_label.items()):
            for values in of_seeds:
                handles[label] = axis.plot(
                    values / divisor(values), **style(index) | {"marker": None}
                )[0]
        axis.set(yscale="log", ylabel="singular value of\nthe word embeddings")
        axis.grid(alpha=0.3)
    for axis in axes[3:]:
        axis.set(yscale="linear", ylabel="ratio")
    # The values of the paper's larger matrix at the same fraction of all.
    indices = np.array(SPECTRA_INDICES) / 1024 * max(lengths)
    for (label, values), marker in zip(PAPER_SPECTRA.items(), "D*", strict=True):
        for axis, divisor in ((axes[0], values[0]), (axes[1], values[1])):
            drawn = axis.plot(indices, np.array(values) / divisor, marker=marker, **_PAPER_STYLE)
            handles[f"paper, {label}, WMT14 big (1,024 values, index to scale)"] = drawn[0]
    axes[-1].set_xlabel("index of the singular value")
    _legend(figure, handles)
    return figure


#: Norms of a layer, and where they stand.
_OF_LAYER = {
    "self_attn_layer_norm": "before self-attention",
    "final_layer_norm": "before the feed-forward network",
}


def _last_gains(subject: Subject) -> pandas.DataFrame:
    """The last row of each norm of a layer with a gain per channel, and its ``side``, ``layer``
    and ``position``.
    """
    last = subject.probe.dropna(subset=["gamma_over_psi_batch"]).drop_duplicates(
        "norm", keep="last"
    )
    names = last["norm"].str.extract(
        r"^(?P<side>encoder|decoder)\.layers\.(?P<layer>\d+)\.(?P<position>.+)$"
    )
    names["position"] = names["position"].map(_OF_LAYER)
    return last.join(names).dropna(subset=["position"]).assign(label=subject.label)


def gains(subjects: Sequence[Subject]):
    """Figure 7."""
    last = pandas.concat(map(_last_gains, subjects))
    side = "encoder" if (last["side"] == "encoder").any() else "decoder"  # of language models
    last = last[last["side"] == side]
    positions = [
        position for position in _OF_LAYER.values() if (last["position"] == position).any()
    ]
    figure, axes = _stacked(positions, 4.2)
    handles = {}
    for axis, position in zip(axes, positions, strict=True):
        of_position = last[last["position"] == position]
        layers = sorted(map(int, of_position["layer"].unique()))
        groups = {}
        # also one that has none here, so that the others keep their colours
        for label in last["label"].unique():
            own = of_position[of_position["label"] == label]
            of_layers = (own.loc[own["layer"] == str(n), "gamma_over_psi_batch"] for n in layers)
            groups[label] = [np.concatenate([[], *of_layer]) for of_layer in of_layers]
        paper = [PAPER_GAIN[n] if n < len(PAPER_GAIN) else np.nan for n in layers]
        handles |= _boxes(axis, groups, [n + 1 for n in layers], {"paper, PN-V on IWSLT14": paper})
        axis.axhline(1, linestyle="--", color="black", linewidth=1)
        axis.set(
            xlabel=f"{side} layer", ylabel=r"$\gamma/\psi_B$ of each channel, last recorded update"
        )
    _legend(figure, handles)
    return figure


class Figure(NamedTuple):
    """How a figure is drawn."""

    draw: Callable  # draw(subjects) -> figure
    shows: Callable[[Subject], bool]  # whether a run has what the figure needs
    needs: str  # the name of that


_PROBE = (lambda subject: subject.probe is not None, "a --norm-probe file")

#: By their number in the paper.
FIGURES: dict[int, Figure] = {
    2: Figure(_over_training([("mu_distance",), ("sigma2_distance",)]), *_PROBE),
    3: Figure(_over_training([("g_mu",), ("g_sigma2",)]), *_PROBE),
    4: Figure(
        _over_training([("sigma2_distance", "psi2_distance"), ("g_sigma2", "g_psi2")]), *_PROBE
    ),
    5: Figure(
        batch_size,
        lambda subject: subject.bleu is not None and subject.tokens is not None,
        "scores (pn score) and dataset.max_tokens",
    ),
    6: Figure(spectra, lambda subject: subject.checkpoint is not None, "a checkpoint_last.pt"),
    7: Figure(
        gains,
        lambda subject: subject.probe is not None and not _last_gains(subject).empty,
        "a --norm-probe file with gains of a layer's norms",
    ),
}

_EPILOG = """\
RUN is a folder as for pn report. Figures 2, 3, 4 and 7 need --norm-probe, Figure 5 needs scores and
Figure 6 checkpoints. A run without the data for a figure is left out of it, with a line that says
so. The paper's medians are drawn next to the runs. docs/figures.md describes each figure.

Writes DIR/figure-N.png and DIR/figure-N.pdf, and replaces earlier ones.
"""


def main(argv: Sequence[str] | None = None) -> None:
    """Run ``pn figures`` on ``argv`` (by default the process's arguments)."""
    description = "Draw Figures 2 to 7 of the PowerNorm paper from training runs."
    parser = ArgumentParser(prog="pn figures", description=description, epilog=_EPILOG)
    add = parser.add_argument
    add("runs", nargs="+", type=Path, metavar="RUN", help="folder of a run")
    add(
        "--output",
        required=True,
        type=Path,
        metavar="DIR",
        help="where to write; created if needed",
    )
    labels = (
        "names for the legends (default: as in the tables of pn report, by norm and settings); "
        "runs with the same "
    )
    add("--labels", nargs="+", metavar="LABEL", help=f"{labels}label are drawn as one")
    norm = (
        "norm of Figures 2 to 4, such as encoder.layers.0.final_layer_norm (default: the first one "
        "of the model)"
    )
    add("--norm", metavar="NAME", help=norm)
    args = parser.parse_args(argv)

    from pn_fairseq.report.runs import read_runs
    from pn_fairseq.report.systems import names

    runs = read_runs(args.runs)
    if args.labels and len(args.labels) != len(runs):
        raise UserError(f"{len(runs)} runs but {len(args.labels)} --labels")
    labels = [(label, label) for label in args.labels] if args.labels else names(runs)
    subjects = [
        read_subject(run, *of_run, args.norm) for run, of_run in zip(runs, labels, strict=True)
    ]

    drawn, absent, without = {}, [], []
    for number, (draw, shows, needs) in FIGURES.items():
        shown = [subject for subject in subjects if shows(subject)]
        left_out = ", ".join(subject.run for subject in subjects if not shows(subject))
        try:
            if not shown:
                raise Absent(f"no run has {needs}")
            drawn[number] = draw(shown)
        except Absent as error:
            absent.append(f"Figure {number}: {error}")
            continue
        if left_out:
            without.append(f"Figure {number} is without {left_out}: not every run has {needs}")
    if not drawn:
        raise UserError(f"nothing to draw: {'; '.join(absent)}")
    written = []
    args.output.mkdir(parents=True, exist_ok=True)
    for number, kind in itertools.product(FIGURES, _KINDS):
        file = args.output / f"figure-{number}.{kind}"
        if number in drawn:
            save(drawn[number], file)
            written.append(file)
        else:  # of an earlier call
            file.unlink(missing_ok=True)
    for line in [*(f"not drawn: {reason}" for reason in absent), *without]:
        print(f"pn figures: {line}", file=sys.stderr)
    print(*written, sep="\n")
