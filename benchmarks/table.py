"""The rows of :mod:`benchmarks.norms` as tables, as a picture, and compared with this project's
targets.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pandas

from pn_fairseq.common.files import atomic_write
from pn_fairseq.report.curves import headless_pyplot

#: The columns that say what was measured.
SETTING = ("shape", "dtype", "device", "threads", "padding")

#: Okabe and Ito's colours, which colour-blind readers can tell apart.
COLOURS = {
    "": "#999999",
    "reference": "#E69F00",
    "compiled": "#CC79A7",
    "cpp": "#0072B2",
}


def _grouped(rows: Iterable[dict], *keys: str) -> dict[tuple, list[dict]]:
    found: dict[tuple, list[dict]] = {}
    for row in rows:
        found.setdefault(tuple(row[key] for key in keys), []).append(row)
    return found


def setting(row: dict) -> str:
    """The setting of a row in words."""
    threads = _threads(row["threads"])
    padding = f"{row['padding']:.0%} padding" if row["padding"] else "no mask"
    return f"{row['shape']} {row['dtype']}, {row['device']}, {threads}, {padding}"


def _threads(number: int) -> str:
    return f"{number} thread{'s' if number > 1 else ''}"


def _with_quartiles(row: dict, column: str) -> str:
    low = row[f"{column}_low"]
    high = row[f"{column}_high"]
    return f"{row[column]:.3f} ({low:.2f}, {high:.2f})"


def _bytes_of_x(row: dict) -> str:
    """Bytes that were read and written, in multiples of those of the activations."""
    if row["bytes_read"] is None:
        return "unknown"
    tokens, channels = map(int, row["shape"].split("x"))
    bytes_of_a_number = {"float32": 4, "bfloat16": 2, "float16": 2}[row["dtype"]]
    moved = row["bytes_read"] + row["bytes_written"]
    return f"{moved / (tokens * channels * bytes_of_a_number):.2f}"


def text(rows: list[dict]) -> str:
    """All of one setting, for a terminal: a line for each contestant."""
    found = {}
    for name, own in _grouped(rows, "contestant").items():
        phases = {row["phase"]: row for row in own}
        both = phases["both"]
        each = [phases["forward"], phases["backward"]]
        line = {phase: _with_quartiles(row, "ratio") for phase, row in phases.items()}
        line["of least"] = f"{both['ratio_of_least']:.3f}"
        line["turns of one step"] = _with_quartiles(both, "ratio_single")
        line["peak memory, ratio"] = f"{both['extra_ratio']:.3f}"
        line["kernels"] = " + ".join(str(row["kernels"]) for row in each)
        line["bytes / bytes of x"] = " + ".join(map(_bytes_of_x, each))
        found[name[0]] = line
    table = pandas.DataFrame.from_dict(found, orient="index").to_string()
    return f"\n{setting(rows[0])}, ratio to LayerNorm\n{table}"


def markdown_table(
    header: Sequence[str], lines: Iterable[Sequence[str]], align: str = "---:"
) -> str:
    """A table with its first column aligned left, the others as ``align``."""
    rows = [f"| {' | '.join(cells)} |" for cells in (header, *lines)]
    rows.insert(1, "|---|" + f"{align}|" * (len(header) - 1))
    return "\n".join(rows)


def draw(rows: list[dict], output: Path) -> None:
    """Draw the ratios of forward and backward with their quartiles, a frame for each setting
    (.png, .pdf or .svg).
    """
    from matplotlib.ticker import FixedLocator, NullLocator, StrMethodFormatter

    pyplot = headless_pyplot()
    both = [row for row in rows if row["phase"] == "both"]
    settings = _grouped(both, *SETTING)
    most = max(len(own) for own in settings.values())
    size = (5.2, len(settings) * (1.1 + 0.24 * most))
    figure, axes = pyplot.subplots(  # one below the other: readable at the width of a column
        len(settings), 1, figsize=size, squeeze=False, constrained_layout=True
    )
    for axis, own in zip(axes.flat, settings.values(), strict=False):
        places = range(len(own), 0, -1)
        middle = [row["ratio"] for row in own]
        below = [row["ratio"] - row["ratio_low"] for row in own]
        above = [row["ratio_high"] - row["ratio"] for row in own]
        bars = {"fmt": "none", "ecolor": "black", "elinewidth": 1.2, "capsize": 3}
        axis.errorbar(middle, places, xerr=[below, above], zorder=1, **bars)
        colours = [COLOURS[row["implementation"]] for row in own]
        axis.scatter(middle, places, c=colours, edgecolors="black", s=34, zorder=2)
        look = {"textcoords": "offset points", "va": "center", "fontsize": 9}
        box = {"facecolor": "white", "edgecolor": "none", "pad": 0.8}
        for row, place in zip(own, places, strict=True):
            end = (row["ratio_high"], place)
            axis.annotate(f"{row['ratio']:.2f}", end, (4, 0), bbox=box, **look)
        axis.axvline(1.0, color="black", linewidth=0.9, linestyle=(0, (4, 2)))
        axis.set_xscale("log")
        lowest = min(row["ratio_low"] for row in own)
        highest = max(row["ratio_high"] for row in own)
        axis.set_xlim(min(0.5, 0.8 * lowest), 1.6 * highest)
        axis.xaxis.set_major_locator(FixedLocator([0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100]))
        axis.xaxis.set_minor_locator(NullLocator())
        axis.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
        axis.set_yticks(list(places), [row["contestant"] for row in own], fontsize=10)
        axis.set_ylim(0.4, len(own) + 0.6)
        axis.set_title(setting(own[0]), fontsize=11, loc="right")
        axis.set_xlabel(
            "time of forward and backward, ratio to torch.nn.LayerNorm", fontsize=10, loc="right"
        )
        axis.tick_params(axis="x", labelsize=10)
        axis.grid(axis="x", alpha=0.3)
        axis.set_axisbelow(True)
    for axis in axes.flat[len(settings) :]:
        axis.set_visible(False)
    with atomic_write(output) as file:
        figure.savefig(file, dpi=130, format=output.suffix[1:])
    pyplot.close(figure)


def draw_sizes(rows: list[dict], output: Path) -> None:
    """Draw ratios in turns of one step against the number of tokens (.png, .pdf or .svg).

    Quartiles are shaded. There is a panel for each type and number of threads, and a line for each
    contestant but the first LayerNorm.
    """
    pyplot = headless_pyplot()
    both = [row for row in rows if row["phase"] == "both"]
    frame = pandas.DataFrame(row for row in both if row["contestant"] != "LayerNorm")
    tokens_of_shape = frame["shape"].str.split("x").str[0]
    frame = frame.assign(tokens=tokens_of_shape.astype(int))
    names = frame["contestant"].unique()
    dtypes = frame["dtype"].unique()
    threads = sorted(frame["threads"].unique())
    size = (3.4 * len(threads) + 1.8, 3.0 * len(dtypes))
    shared = {"squeeze": False, "sharex": True, "sharey": True}
    figure, axes = pyplot.subplots(
        len(dtypes), len(threads), figsize=size, constrained_layout=True, **shared
    )
    for (dtype, number), panel in frame.groupby(["dtype", "threads"]):
        axis = axes[list(dtypes).index(dtype)][threads.index(number)]
        for marker, name in zip("osD^v<>PX", names, strict=False):
            own = panel[panel["contestant"] == name].sort_values("tokens")
            (line,) = axis.plot(
                own["tokens"], own["ratio_single"], marker=marker, markersize=4, label=name
            )
            bounds = own["ratio_single_low"], own["ratio_single_high"]
            axis.fill_between(
                own["tokens"], *bounds, color=line.get_color(), alpha=0.2, linewidth=0
            )
        axis.axhline(1.0, color="black", linewidth=0.9, linestyle=(0, (4, 2)))
        axis.set_xscale("log", base=2)
        tokens = sorted(frame["tokens"].unique())
        axis.set_xticks(tokens, [f"{each:,}" for each in tokens], fontsize=8, rotation=45)
        axis.set_title(f"{dtype}, {_threads(number)}", fontsize=10)
        axis.grid(alpha=0.3)
    axes[0][0].set_ylim(bottom=0)
    figure.supxlabel("tokens", fontsize=10)
    figure.supylabel("time of forward and backward, ratio to torch.nn.LayerNorm", fontsize=10)
    figure.legend(*axes[0][0].get_legend_handles_labels(), loc="outside right", fontsize=9)
    with atomic_write(output) as file:
        figure.savefig(file, dpi=130, format=output.suffix[1:])
    pyplot.close(figure)


@dataclass(frozen=True)
class Target:
    """A limit for a column of the rows that ``where`` selects."""

    title: str
    column: str
    limit: float
    where: str = "tokens > 0"
    at_most: bool = True

    @property
    def bound(self) -> str:
        return f"{'at most' if self.at_most else 'at least'} {self.limit:g}"

    def reached(self, values: pandas.Series) -> bool:
        if self.at_most:
            return bool((values <= self.limit).all())
        return bool((values >= self.limit).all())


_FLOAT32_LS = "dtype == 'float32' and layer_scale > 0 and padding > 0"
_BFLOAT16_LS = "dtype == 'bfloat16' and layer_scale > 0 and padding > 0"

#: Targets of PN's forward and backward with the kernels that are the default.
TARGETS = (
    Target(
        "float32, C = 512, turns of one step",
        "ratio_single",
        0.95,
        f"channels == 512 and {_FLOAT32_LS}",
    ),
    Target(
        "bfloat16, C = 512, turns of one step",
        "ratio_single",
        0.55,
        f"channels == 512 and {_BFLOAT16_LS}",
    ),
    Target(
        "float32 with layer-scale and mask, 1 thread",
        "ratio",
        0.95,
        f"threads == 1 and {_FLOAT32_LS}",
    ),
    Target(
        "float32 with layer-scale and mask, 2 threads",
        "ratio",
        0.90,
        f"threads == 2 and {_FLOAT32_LS}",
    ),
    Target("bfloat16 with layer-scale and mask", "ratio", 0.50, _BFLOAT16_LS),
    Target("float32 without layer-scale", "ratio", 0.85, "dtype == 'float32' and layer_scale == 0"),
    Target(
        "bfloat16 without layer-scale", "ratio", 0.40, "dtype == 'bfloat16' and layer_scale == 0"
    ),
    Target("peak memory, ratio to LayerNorm", "extra_ratio", 1.02),
    Target("times faster than the reference", "times_reference", 4.0, at_most=False),
)


def targets(rows: list[dict], implementation: str) -> str:
    """A table of PN by ``implementation`` and the targets, with a line for every setting."""
    frame = pandas.DataFrame(rows)
    frame[["tokens", "channels"]] = frame["shape"].str.split("x", expand=True).astype(int)
    of_pn = (frame["norm"] == "power") & (frame["implementation"] == implementation)
    frame = frame[of_pn & (frame["phase"] == "both")]
    lines = []
    for target in TARGETS:
        lines += _lines_of(target, frame)
    title = f"PN ({implementation}), forward + backward"
    return markdown_table([title, "target", "setting", "measured", "reached"], lines, "---")


def _lines_of(target: Target, frame: pandas.DataFrame) -> list[list[str]]:
    about = frame.query(target.where, engine="python")
    about = about[about[target.column] != ""]
    if about.empty:
        return [[target.title, target.bound, "", "", "not measured"]]
    lines = []
    for _, own in about.groupby(["dtype", "threads", "padding", "layer_scale"], sort=False):
        measured = []
        for _, row in own.iterrows():
            value = f"{row[target.column]:.3f}"
            if f"{target.column}_low" in own:
                value = _with_quartiles(row, target.column)
            measured.append(f"{row['shape']}: {value}")
        first = own.iloc[0]
        scaled = ", +LS" if first["layer_scale"] else ""
        where = setting(first).partition(" ")[2] + scaled
        reached = "yes" if target.reached(own[target.column]) else "no"
        lines.append([target.title, target.bound, where, ", ".join(measured), reached])
    return lines
