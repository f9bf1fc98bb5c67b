"""The tables of the documentation that are computed: ``python -m docs.tools.generated`` writes them
into docs/*.md.

A table stands between ``<!-- NAME: generated -->`` and ``<!-- end of NAME -->``.
tests/docs/test_project_files.py fails if a page differs from what is computed.
"""

import argparse
import math
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import pandas

from benchmarks.table import markdown_table as table_of_lines
from docs.tools.compilation import table_of_compiled_norms
from docs.tools.frameworks import table_of_frameworks
from docs.tools.invariances import table_of_invariances
from pn_fairseq.models.norm_options import NormOptions
from pn_fairseq.norms import NORMS, RunningNorm, build_norm
from pn_fairseq.norms.core.base import COUNT
from pn_fairseq.norms.registry import HEADS, SHARED
from pn_fairseq.pipeline.published import PAPER

ROOT = Path(__file__).resolve().parents[2]
CHANNELS = 512


#: Flags that stand in the table, of those that norms share.
_FLAGS = ("alpha_fwd", "alpha_bwd", "psi_warmup_updates")


def properties() -> str:
    """What the registry and the classes say: parameters, state, mixing of tokens, defaults, flags,
    variants.
    """
    rows = []
    for name, entry in NORMS.items():
        norm = build_norm(name, CHANNELS)
        defaults = []
        if entry.default("layer_scale_groups") is HEADS:
            defaults.append("layer-scale per head")
        if isinstance(norm, RunningNorm):
            defaults.append("synchronized" if entry.default("sync") else "not synchronized")
        buffers = [(key, value) for key, value in norm.named_buffers() if key != COUNT]
        flags = []
        for option in _FLAGS:
            if option in entry.options:
                default = entry.default(option)
                value = f" {default}" if isinstance(default, float) else ""
                flags.append(f"`{SHARED[option]}`{value}")
        row = {"norm": f"`{name}`"}
        row["parameters"] = _listed(f"`{key}` {_shape(p)}" for key, p in norm.named_parameters())
        row["state"] = _listed(f"`{key}` {_shape(value)}" for key, value in buffers)
        row["training mixes tokens"] = entry.cls.mixes_tokens
        row["default in a Transformer"] = _listed(defaults)
        row["flags"] = _listed(flags)
        row["own options"] = _listed(f"`{option}`" for option in entry.own_options)
        row["`release` differs"] = "yes" if "release" in entry.variants else "–"
        rows.append(row)
    return plain_table(rows)


def _listed(texts: Iterable[str]) -> str:
    return ", ".join(texts) or "–"


def plain_table(rows: Sequence[dict[str, str]], rule: str = "---") -> str:
    """Rows as Markdown without spaces for alignment; ``rule``: of all columns but the first."""
    return table_of_lines(list(rows[0]), [list(row.values()) for row in rows], rule)


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
    rows = []
    for name in NORMS:
        row = {"norm": f"`{name}`"}
        for title, pattern in _PUBLISHED.items():
            row[title] = _scores_of(name, pattern)
        if set(row.values()) != {row["norm"], "–"}:
            rows.append(row)
    return plain_table(rows)


def _scores_of(norm: str, pattern: str) -> str:
    """BLEU of a norm in the tables whose names match."""
    scores = {}
    for title, table in PAPER.items():
        if re.fullmatch(pattern, title):
            for row in table.rows:
                if row.norm == norm:
                    scores[row.label] = "diverges" if math.isnan(row.bleu) else str(row.bleu)
    if len(scores) == 1:
        return scores.popitem()[1]
    return "; ".join(f"{score} ({label})" for label, score in scores.items()) or "–"


def cost() -> str:
    """docs/speed/norms.csv: forward and backward without layer-scale, as ratios to LayerNorm, of
    the C++ kernels.
    """
    measured = pandas.read_csv(ROOT / "docs/speed/norms.csv")
    measured = measured.query(
        'phase == "both" and implementation == "cpp" and layer_scale == 0 and threads == 1'
    )
    measured = measured.sort_values("dtype", key=lambda dtypes: dtypes != "float32", kind="stable")
    ratios = measured.set_index(["norm", "dtype", "shape"])["ratio"]
    settings = measured[["dtype", "shape"]].drop_duplicates()
    rows = []
    for name in NORMS:
        row = {"norm": f"`{name}`"}
        for dtype, shape in settings.itertuples(index=False):
            ratio = "1" if name == "layer" else _ratio(ratios, (name, dtype, shape))
            row[f"{dtype}, {shape.replace('x', ' × ')}"] = ratio
        rows.append(row)
    return plain_table(rows, "---:")


def under_compile() -> str:
    """docs/speed/compile.csv: compiled / eager, of norms by themselves."""
    measured = pandas.read_csv(ROOT / "docs/speed/compile.csv")
    keys = ["module", "mode", "threads"]
    ratios = measured.set_index(["norm", *keys])["ratio"]
    settings = measured.loc[measured["module"] == "norm", keys].drop_duplicates()
    rows = []
    for name in measured["norm"].unique():
        row = {"norm": f"`{name}`"}
        for module, mode, threads in settings.itertuples(index=False):
            row[f"{module}, {mode}, {threads}"] = _ratio(ratios, (name, module, mode, threads))
        rows.append(row)
    return plain_table(rows, "---:")


def _ratio(ratios: pandas.Series, key: tuple) -> str:
    return f"{ratios[key]:.2f}" if key in ratios else "not measured"


#: The model of docs/speed.md for a network of GPUs: seconds of a step, bytes a second, channels,
#: and steps by setting.
STEP, BANDWIDTH, CHANNELS = 5e-6, 10e9, 512
STEPS = {"8 GPUs": 2 * math.log2(8), "64 GPUs": 2 * math.log2(64), "64 GPUs, ring": 2 * 63}


def over_ranks() -> str:
    """docs/speed/ranks.csv: the shares of an update, and what the model makes of its counts."""
    measured = pandas.read_csv(ROOT / "docs/speed/ranks.csv")
    rows = []
    for norm, of_norm in measured.groupby("norm", sort=False):
        first = of_norm.iloc[0]
        size = first["bytes"] / int(first["shape"].split("x")[1])
        row = {"norm": f"`{norm}`", "waited for": f"{first.waited_for:.0f}"}
        row |= {"asynchronous": f"{first.asynchronous:.0f}", "bytes / C": f"{size:.0f}"}
        for setting in of_norm.itertuples():
            title = f"{setting.ranks} ranks, {int(setting.shape.split('x')[0]):,} tokens"
            row[title] = (
                f"{setting.share:.2f} ({setting.share_low:.2f} to {setting.share_high:.2f})"
            )
        for title, steps in STEPS.items():
            seconds = first.waited_for * steps * STEP
            if first.waited_for:
                seconds += 2 * size * CHANNELS / BANDWIDTH
            row[title] = f"{1e3 * first.norms * seconds:.1f} ms"
        rows.append(row)
    return markdown_table(rows)


def flags() -> str:
    """The flags of the norms, as ``--help`` of an architecture describes them."""
    parser = argparse.ArgumentParser(add_help=False)
    NormOptions.add_args(parser)
    rows = []
    for action in parser._actions:
        value = action.metavar or " or ".join(action.choices or ())
        name = f"{action.option_strings[0]} {value}".strip()
        meaning = re.sub(r"docs/(\w+)\.md", r"[docs/\1.md](\1.md)", action.help)
        rows.append({"flag": f"`{name}`", "meaning": meaning})
    return plain_table(rows)


def configurations() -> str:
    """The line about each configuration in its opening comment."""
    rows = []
    for path in sorted((ROOT / "configs").glob("*.yaml")):
        line = re.search(r"^# docs/configurations\.md: (.*)$", path.read_text("utf-8"), re.M)[1]
        corpus, size, model = line.split(" | ")
        row = {"`configs/`": f"`{path.name}`", "corpus": corpus}
        row |= {"size (sentence pairs, or tokens)": size, "model": model}
        rows.append(row)
    return plain_table(rows)


#: Page in docs/ -> name of a table -> what computes it.
TABLES: dict[str, dict[str, Callable[[], str]]] = {
    "configurations.md": {"configurations": configurations},
    "norms.md": {"properties": properties, "published": published, "cost": cost, "flags": flags},
    "theory.md": {"invariances": table_of_invariances},
    "own_model.md": {"compiled": table_of_compiled_norms},
    "frameworks.md": {"frameworks": table_of_frameworks},
    "speed.md": {"under_compile": under_compile, "over_ranks": over_ranks},
}


def block(name: str) -> re.Pattern:
    """A computed part of a page, between its comments."""
    return re.compile(
        rf"(?<=<!-- {name}: generated -->\n\n).*?(?=\n\n<!-- end of {name} -->)", re.S
    )


def markdown_table(rows: Sequence[dict[str, str]]) -> str:
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
