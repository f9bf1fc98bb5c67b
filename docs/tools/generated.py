"""The tables of the documentation that are computed: ``python -m docs.tools.generated`` writes them
into docs/*.md.

A table stands between ``<!-- NAME: generated -->`` and ``<!-- end of NAME -->``.
tests/docs/test_project_files.py fails if a page differs from what is computed.
"""

import argparse
import csv
import math
import re
from collections.abc import Callable, Sequence
from pathlib import Path

import pandas

from pn_fairseq.models.norm_options import NormOptions
from pn_fairseq.norms import NORMS, RunningNorm, build_norm
from pn_fairseq.norms.base import COUNT
from pn_fairseq.norms.registry import HEADS, SHARED
from pn_fairseq.pipeline.published import PAPER
from tests.norms import compilation, invariances, test_frameworks

ROOT = Path(__file__).resolve().parents[2]
CHANNELS = 512


#: Flags that stand in the table, of those that norms share.
_FLAGS = ("alpha_fwd", "alpha_bwd", "psi_warmup_updates")


def properties() -> str:
    """What the registry and the classes say: parameters, state, mixing of tokens, defaults,
    flags, variants.
    """
    titles = (
        "norm",
        "parameters",
        "state",
        "training mixes tokens",
        "default in a Transformer",
        "flags",
        "own options",
        "`release` differs",
    )
    lines = [f"| {' | '.join(titles)} |", "|---" * len(titles) + "|"]
    for name, entry in NORMS.items():
        norm = build_norm(name, CHANNELS)
        parameters = [f"`{key}` {_shape(value)}" for key, value in norm.named_parameters()]
        state = [f"`{key}` {_shape(value)}" for key, value in norm.named_buffers() if key != COUNT]
        defaults = ["layer-scale per head"] if entry.default("layer_scale_groups") is HEADS else []
        if isinstance(norm, RunningNorm):
            defaults.append("synchronized" if entry.default("sync") else "not synchronized")
        flags = [f"`{SHARED[option]}`" for option in _FLAGS if option in entry.options]
        own = [f"`{option}`" for option in entry.own_options]
        cells = [parameters, state, [entry.cls.mixes_tokens], defaults, flags, own]
        cells.append(["yes"] if "release" in entry.variants else [])
        lines.append(f"| `{name}` | " + " | ".join(", ".join(cell) or "–" for cell in cells) + " |")
    return "\n".join(lines)


def _shape(tensor) -> str:
    sizes = ["C" if size == CHANNELS else str(size) for size in tensor.shape]
    return f"({', '.join(sizes)}{',' if len(sizes) == 1 else ''})"


#: Column of the published scores -> the pattern of its tables, which have the same scores for the
#: same rows.
_PUBLISHED = {
    "PowerNorm, IWSLT14": r"powernorm-\d",
    "PowerNorm, WMT14": r"powernorm-\d-wmt14",
    "AdaNorm, IWSLT14": r"adanorm-\d",
    "AdaNorm, IWSLT15": r"adanorm-\d-iwslt15",
    "AdaNorm, WMT14": r"adanorm-\d-wmt14",
}


def published() -> str:
    """BLEU in the tables of :data:`PAPER`, by norm."""
    lines = [f"| norm | {' | '.join(_PUBLISHED)} |", "|---" * (1 + len(_PUBLISHED)) + "|"]
    for name in NORMS:
        cells = []
        for pattern in _PUBLISHED.values():
            tables = [table for title, table in PAPER.items() if re.fullmatch(pattern, title)]
            rows = {
                row.label: row.bleu for table in tables for row in table.rows if row.norm == name
            }
            scores = {
                label: "diverges" if math.isnan(bleu) else str(bleu) for label, bleu in rows.items()
            }
            named = (
                f"{score} ({label})" if len(scores) > 1 else score
                for label, score in scores.items()
            )
            cells.append("; ".join(named) or "–")
        if {*cells} != {"–"}:
            lines.append(f"| `{name}` | {' | '.join(cells)} |")
    return "\n".join(lines)


def cost() -> str:
    """docs/speed/norms.csv: forward and backward without layer-scale, as ratios to LayerNorm, of
    the C++ kernels.
    """
    with open(ROOT / "docs/speed/norms.csv", encoding="utf-8") as file:
        rows = [
            row
            for row in csv.DictReader(file)
            if (row["phase"], row["implementation"], row["layer_scale"], row["threads"])
            == ("both", "cpp", "0", "1")
        ]
    settings = dict.fromkeys(
        (row["dtype"], row["shape"])
        for row in sorted(rows, key=lambda row: row["dtype"] != "float32")
    )
    found = {(row["norm"], row["dtype"], row["shape"]): row for row in rows}
    titles = [f"{dtype}, {shape.replace('x', ' × ')}" for dtype, shape in settings]
    lines = ["| norm | " + " | ".join(titles) + " |", "|---" + "|---:" * len(titles) + "|"]
    for name in NORMS:
        cells = ["1" if name == "layer" else _ratio(found.get((name, *each))) for each in settings]
        lines.append(f"| `{name}` | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def under_compile() -> str:
    """docs/speed/compile.csv: compiled / eager, of norms by themselves."""
    with open(ROOT / "docs/speed/compile.csv", encoding="utf-8") as file:
        found = {
            (row["norm"], row["module"], row["mode"], row["threads"]): row
            for row in csv.DictReader(file)
        }
    settings = list(dict.fromkeys(key[1:] for key in found if key[1] == "norm"))
    titles = [f"{module}, {mode}, {threads}" for module, mode, threads in settings]
    lines = ["| norm | " + " | ".join(titles) + " |", "|---" + "|---:" * len(titles) + "|"]
    for name in dict.fromkeys(key[0] for key in found):
        cells = [_ratio(found.get((name, *each))) for each in settings]
        lines.append(f"| `{name}` | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _ratio(row: dict | None) -> str:
    return f"{float(row['ratio']):.2f}" if row else "not measured"


#: The model of docs/speed.md for a network of GPUs: seconds of a step, bytes a second, channels,
#: and steps by setting.
STEP, BANDWIDTH, CHANNELS = 5e-6, 10e9, 512
STEPS = {"8 GPUs": 2 * math.log2(8), "64 GPUs": 2 * math.log2(64), "64 GPUs, ring": 2 * 63}


def over_ranks() -> str:
    """docs/speed/ranks.csv: the shares of an update, and what the model makes of its counts."""
    measured = pandas.read_csv(ROOT / "docs/speed/ranks.csv")
    lines = []
    for norm, rows in measured.groupby("norm", sort=False):
        first = rows.iloc[0]
        size = first["bytes"] / int(first["shape"].split("x")[1])
        line = {"norm": f"`{norm}`", "waited for": f"{first.waited_for:.0f}"}
        line |= {"asynchronous": f"{first.asynchronous:.0f}", "bytes / C": f"{size:.0f}"}
        for row in rows.itertuples():
            setting = f"{row.ranks} ranks, {int(row.shape.split('x')[0]):,} tokens"
            line[setting] = f"{row.share:.2f} ({row.share_low:.2f} to {row.share_high:.2f})"
        for setting, steps in STEPS.items():
            seconds = (
                first.waited_for * steps * STEP
                + bool(first.waited_for) * 2 * size * CHANNELS / BANDWIDTH
            )
            line[setting] = f"{1e3 * first.norms * seconds:.1f} ms"
        lines.append(line)
    return table(lines)


def flags() -> str:
    """The flags of the norms, as ``--help`` of an architecture describes them."""
    parser = argparse.ArgumentParser(add_help=False)
    NormOptions.add_args(parser)
    lines = ["| flag | meaning |", "|---|---|"]
    for action in parser._actions:
        value = action.metavar or " or ".join(action.choices or ())
        name = f"{action.option_strings[0]} {value}".strip()
        meaning = re.sub(r"docs/(\w+)\.md", r"[docs/\1.md](\1.md)", action.help)
        lines.append(f"| `{name}` | {meaning} |")
    return "\n".join(lines)


#: Page in docs/ -> name of a table -> what computes it.
TABLES: dict[str, dict[str, Callable[[], str]]] = {
    "norms.md": {"properties": properties, "published": published, "cost": cost, "flags": flags},
    "theory.md": {"invariances": invariances.table},
    "own_model.md": {"compiled": compilation.table},
    "frameworks.md": {"frameworks": test_frameworks.table},
    "speed.md": {"under_compile": under_compile, "over_ranks": over_ranks},
}


def block(name: str) -> re.Pattern:
    """A computed part of a page, between its comments."""
    return re.compile(
        rf"(?<=<!-- {name}: generated -->\n\n).*?(?=\n\n<!-- end of {name} -->)", re.S
    )


def table(rows: Sequence[dict[str, str]]) -> str:
    """Rows as Markdown; a row may lack columns."""
    frame = pandas.DataFrame(rows).fillna("–")
    return frame.to_markdown(index=False, tablefmt="pipe", disable_numparse=True)


def write_parts(pages: dict[str, dict[str, Callable[[], str]]]) -> None:
    """Compute the parts of pages in docs, page -> name -> what computes it, and write them
    between their comments.
    """
    for page, parts in pages.items():
        path = ROOT / "docs" / page
        text = path.read_text("utf-8")
        for name, compute in parts.items():
            new = compute()
            text, times = block(name).subn(lambda _, new=new: new, text)
            assert times == 1, f"{page} has {times} parts {name}"
        path.write_text(text, "utf-8")


if __name__ == "__main__":
    write_parts(TABLES)
