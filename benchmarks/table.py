"""The rows of :mod:`benchmarks.norms` as tables, as a picture, and compared with this project's
targets.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import pandas

from pn_fairseq.common.files import atomic_write
from pn_fairseq.report.curves import headless_pyplot

#: The columns that say what was measured.
SETTING = ("shape", "dtype", "device", "threads", "padding")

PHASES = ("forward", "backward", "both")

#: Okabe and Ito's colours, which colour-blind readers can tell apart.
COLOURS = {
    "": "#999999",
    "reference": "#E69F00",
    "compiled": "#CC79A7",
    "cpp": "#0072B2",
    "triton": "#009E73",
}


def _grouped(rows: Iterable[dict], *keys: str) -> dict[tuple, list[dict]]:
    found: dict[tuple, list[dict]] = {}
    for row in rows:
        found.setdefault(tuple(row[key] for key in keys), []).append(row)
    return found


def setting(row: dict) -> str:
    """The setting of a row in words."""
    threads = (
        f", {row['threads']} thread{'s' if row['threads'] > 1 else ''}" if row["threads"] else ""
    )
    padding = f"{row['padding']:.0%} padding" if row["padding"] else "no mask"
    return f"{row['shape']} {row['dtype']}, {row['device']}{threads}, {padding}"


def _with_quartiles(row: dict, column: str) -> str:
    return f"{row[column]:.3f} ({row[column + '_low']:.2f}, {row[column + '_high']:.2f})"


def _bytes_of_x(row: dict) -> float:
    """Bytes that were read and written, in multiples of those of the activations; NaN if they
    are not known.
    """
    tokens, channels = map(int, row["shape"].split("x"))
    size = tokens * channels * {"float32": 4, "bfloat16": 2, "float16": 2}[row["dtype"]]
    return (
        math.nan if row["bytes_read"] is None else (row["bytes_read"] + row["bytes_written"]) / size
    )


def _shown(rows: Iterable[dict]) -> pandas.DataFrame:
    """What tables show: a row for each setting and contestant."""
    found = []
    for own in _grouped(rows, *SETTING, "contestant").values():
        phases = {row["phase"]: row for row in own}
        both, each = phases["both"], [phases["forward"], phases["backward"]]
        found.append(
            {"setting": setting(both), "ratio to LayerNorm": both["contestant"]}
            | {phase: _with_quartiles(phases[phase], "ratio") for phase in PHASES}
            | {
                "of least": f"{both['ratio_of_least']:.3f}",
                "turns of one step": _with_quartiles(both, "ratio_single"),
            }
            | {
                "peak memory, ratio": f"{both['extra_ratio']:.3f}",
                "kernels": " + ".join(str(row["kernels"]) for row in each),
            }
            | {
                "bytes / bytes of x": " + ".join(f"{_bytes_of_x(row):.2f}" for row in each).replace(
                    "nan", "unknown"
                )
            }
        )
    return pandas.DataFrame(found).set_index(["setting", "ratio to LayerNorm"])


def text(rows: list[dict]) -> str:
    """All of one setting, for a terminal."""
    return (
        f"\n{setting(rows[0])}, ratio to "
        f"LayerNorm\n{_shown(rows).droplevel('setting').rename_axis(None).to_string()}"
    )


def markdown_table(
    header: Sequence[str], lines: Iterable[Sequence[str]], align: str = "---:"
) -> str:
    """A table with its first column aligned left, the others as ``align``."""
    rows = [header, ["---"] + [align] * (len(header) - 1), *lines]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in rows)


def markdown(rows: list[dict]) -> str:
    """Tables of forward and backward for every setting, in turns of several and of one step, and
    of the costs.
    """
    shown = _shown(rows)
    settings, names = (shown.index.unique(level) for level in shown.index.names)
    tables = {
        "forward + backward, ratio to LayerNorm": "both",
        "the same in turns of one step": "turns of one step",
    }
    found = []
    for title, column in tables.items():
        wide = shown[column].unstack("setting").reindex(names)[list(settings)].fillna("")
        found.append(markdown_table([title, *settings], wide.reset_index().values.tolist()))
    costs = shown.loc[
        settings[0], ["peak memory, ratio", "kernels", "bytes / bytes of x"]
    ].reset_index()
    found.append(markdown_table([settings[0], *costs.columns[1:]], costs.values.tolist()))
    return "\n\n".join(found)


def draw(rows: list[dict], output: Path) -> None:
    """Draw the ratios of forward and backward with their quartiles, a frame for each setting
    (.png, .pdf or .svg).
    """
    from matplotlib.ticker import FixedLocator, NullLocator, StrMethodFormatter

    pyplot = headless_pyplot()
    settings = _grouped((row for row in rows if row["phase"] == "both"), *SETTING)
    most = max(len(own) for own in settings.values())
    figure, axes = pyplot.subplots(  # one below the other: readable at the width of a column
        len(settings),
        1,
        figsize=(5.2, len(settings) * (1.1 + 0.24 * most)),
        squeeze=False,
        constrained_layout=True,
    )
    for axis, own in zip(axes.flat, settings.values(), strict=False):
        places = range(len(own), 0, -1)
        middle = [row["ratio"] for row in own]
        quartiles = [
            [row["ratio"] - row["ratio_low"] for row in own],
            [row["ratio_high"] - row["ratio"] for row in own],
        ]
        axis.errorbar(
            middle,
            places,
            xerr=quartiles,
            fmt="none",
            ecolor="black",
            elinewidth=1.2,
            capsize=3,
            zorder=1,
        )
        axis.scatter(
            middle,
            places,
            c=[COLOURS[row["implementation"]] for row in own],
            edgecolors="black",
            s=34,
            zorder=2,
        )
        for row, place in zip(own, places, strict=True):
            axis.annotate(
                f"{row['ratio']:.2f}",
                (row["ratio_high"], place),
                (4, 0),
                textcoords="offset points",
                va="center",
                fontsize=9,
                bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.8},
            )
        axis.axvline(1.0, color="black", linewidth=0.9, linestyle=(0, (4, 2)))
        axis.set_xscale("log")
        axis.set_xlim(
            min([0.5, *(0.8 * row["ratio_low"] for row in own)]),
            1.6 * max(row["ratio_high"] for row in own),
        )
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
    frame = pandas.DataFrame(
        [row for row in rows if row["phase"] == "both" and row["contestant"] != "LayerNorm"]
    )
    frame = frame.assign(tokens=frame["shape"].str.split("x").str[0].astype(int))
    names, dtypes, threads = (
        frame["contestant"].unique(),
        frame["dtype"].unique(),
        sorted(frame["threads"].unique()),
    )
    figure, axes = pyplot.subplots(
        len(dtypes),
        len(threads),
        figsize=(3.4 * len(threads) + 1.8, 3.0 * len(dtypes)),
        squeeze=False,
        sharex=True,
        sharey=True,
        constrained_layout=True,
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
        axis.set_title(f"{dtype}, {number} thread{'s' if number > 1 else ''}", fontsize=10)
        axis.grid(alpha=0.3)
    axes[0][0].set_ylim(bottom=0)
    figure.supxlabel("tokens", fontsize=10)
    figure.supylabel("time of forward and backward, ratio to torch.nn.LayerNorm", fontsize=10)
    figure.legend(*axes[0][0].get_legend_handles_labels(), loc="outside right", fontsize=9)
    with atomic_write(output) as file:
        figure.savefig(file, dpi=130, format=output.suffix[1:])
    pyplot.close(figure)


def draw_points(panels: Mapping[str, Mapping[str, pandas.Series]], output: Path) -> None:
    """Panels side by side, by their titles; in each a row for each name in the series, and a
    marker for each series.
    """
    pyplot = headless_pyplot()
    most = max([len(values) for found in panels.values() for values in found.values()], default=1)
    size = (5 * len(panels), 2.5 + 0.26 * most)
    figure, axes = pyplot.subplots(1, len(panels), figsize=size, constrained_layout=True)
    for axis, (title, found) in zip(axes, panels.items(), strict=True):
        names = dict.fromkeys(name for values in found.values() for name in values.index)
        places = {name: -place for place, name in enumerate(names)}
        for marker, (label, values) in zip("osD^v<>P", found.items(), strict=False):
            axis.plot(
                values, [places[name] for name in values.index], marker, label=label, alpha=0.7
            )
        axis.set_yticks(list(places.values()), list(places), fontsize=9)
        spread = max(
            (values.max() / max(values.min(), 1e-3) for values in found.values()), default=1
        )
        axis.set(xlabel=title, xscale="log" if spread > 20 else "linear")
        axis.axvline(1.0, color="black", linewidth=0.9, linestyle=(0, (4, 2)))
        axis.grid(alpha=0.3)
        if found:
            axis.legend(fontsize=8, loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=2)
    with atomic_write(output) as file:
        figure.savefig(file, dpi=110, format=output.suffix[1:])
    pyplot.close(figure)


_FLOAT32_LS, _BFLOAT16_LS = (
    f"dtype == '{dtype}' and layer_scale > 0 and padding > 0" for dtype in ("float32", "bfloat16")
)
_EVERYWHERE = (
    ("peak memory, ratio to LayerNorm", "extra_ratio", "at most", 1.02, "tokens > 0"),
    ("times faster than the reference", "times_reference", "at least", 4.0, "tokens > 0"),
)

#: Targets of PN's forward and backward with the kernels that are the default: title, column (of
#: ratios over rounds the median), bound, limit, and the rows that it is about.
TARGETS = {
    "cpu": (
        (
            "float32, C = 512, turns of one step",
            "ratio_single",
            "at most",
            0.95,
            f"channels == 512 and {_FLOAT32_LS}",
        ),
        (
            "bfloat16, C = 512, turns of one step",
            "ratio_single",
            "at most",
            0.55,
            f"channels == 512 and {_BFLOAT16_LS}",
        ),
        (
            "float32 with layer-scale and mask, 1 thread",
            "ratio",
            "at most",
            0.95,
            f"threads == 1 and {_FLOAT32_LS}",
        ),
        (
            "float32 with layer-scale and mask, 2 threads",
            "ratio",
            "at most",
            0.90,
            f"threads == 2 and {_FLOAT32_LS}",
        ),
        ("bfloat16 with layer-scale and mask", "ratio", "at most", 0.50, _BFLOAT16_LS),
        (
            "float32 without layer-scale",
            "ratio",
            "at most",
            0.85,
            "dtype == 'float32' and layer_scale == 0",
        ),
        (
            "bfloat16 without layer-scale",
            "ratio",
            "at most",
            0.40,
            "dtype == 'bfloat16' and layer_scale == 0",
        ),
        *_EVERYWHERE,
    ),
    "cuda": (
        ("4096 tokens", "ratio", "at most", 1.0, "tokens == 4096"),
        ("32768 tokens and more", "ratio", "at most", 0.95, "tokens >= 32768"),
        (
            "share of a copy's bandwidth, 32768 tokens and more",
            "copy_bandwidth",
            "at least",
            0.8,
            "tokens >= 32768",
        ),
        *_EVERYWHERE,
    ),
}


def targets(rows: list[dict], device: str, implementation: str) -> str:
    """A table of PN by ``implementation`` and the targets for ``device``,

    with a line for every setting.
    """
    frame = pandas.DataFrame(rows)
    frame[["tokens", "channels"]] = frame["shape"].str.split("x", expand=True).astype(int)
    frame = frame[
        (frame["phase"] == "both")
        & (frame["norm"] == "power")
        & (frame["implementation"] == implementation)
    ]
    lines = []
    for title, column, bound, limit, where in TARGETS[device]:
        about = frame.query(where, engine="python")
        about = about[about[column] != ""]
        if about.empty:
            lines.append([title, f"{bound} {limit:g}", "", "", "not measured"])
        for _, own in about.groupby(["dtype", "threads", "padding", "layer_scale"], sort=False):
            row = own.iloc[0]
            setting_of = setting(row).split(" ", 1)[1] + (", +LS" if row["layer_scale"] else "")
            quartiles = f"{column}_low" in own
            texts = [
                _with_quartiles(one, column) if quartiles else f"{one[column]:.3f}"
                for _, one in own.iterrows()
            ]
            measured = ", ".join(
                f"{shape}: {text}" for shape, text in zip(own["shape"], texts, strict=True)
            )
            reached = (own[column] <= limit if bound == "at most" else own[column] >= limit).all()
            lines.append(
                [title, f"{bound} {limit:g}", setting_of, measured, "yes" if reached else "no"]
            )
    return markdown_table(
        [f"PN ({implementation}), forward + backward", "target", "setting", "measured", "reached"],
        lines,
        "---",
    )
