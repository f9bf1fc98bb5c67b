"""examples/tour.ipynb as a page: ``python -m docs.tools.tour`` runs the notebook and writes
docs/tour.md and pictures.

The notebook keeps its outputs. docs/figures/tour-N.png are the pictures in them, and
docs/figures/distances.png shows numbers of docs/figures/medians.csv. ``--no-run`` writes the page
and the pictures from the outputs that the notebook has; tests/docs/test_tour.py fails if they
differ.
"""

import base64
import logging
import sys

import nbformat
import pandas

from pn_fairseq.report.curves import headless_pyplot, save

from .generated import ROOT

NOTEBOOK = ROOT / "examples/tour.ipynb"
PAGE = ROOT / "docs/tour.md"
PICTURES = ROOT / "docs/figures"
COMMAND = "python -m docs.tools.tour"
NOTE = (
    f"<!-- Written by `{COMMAND}` from examples/tour.ipynb, which runs in Jupyter. Edit the "
    "notebook. -->"
)
#: The longest time of a cell, in seconds.
LIMIT = 600


def run(notebook):
    """The notebook with new outputs."""
    from nbclient import NotebookClient  # of the extra "docs"

    place = {"metadata": {"path": str(NOTEBOOK.parent)}}
    NotebookClient(notebook, timeout=LIMIT, resources=place).execute()
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)  # times
    notebook.metadata.language_info = {"name": "python"}
    return notebook


def page(notebook) -> tuple[str, dict[str, bytes]]:
    """The notebook as Markdown, and its pictures: name of the file -> PNG."""
    parts, pictures = [], {}
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            parts.append(cell.source)
            continue
        parts.append(f"```python\n{cell.source}\n```")
        text = "".join(output.get("text", "") for output in cell.outputs)
        if text:
            parts.append(f"```text\n{text.rstrip()}\n```")
        for output in cell.outputs:
            png = output.get("data", {}).get("image/png")
            if png:
                name = f"tour-{len(pictures) + 1}.png"
                pictures[name] = base64.b64decode(png)
                parts.append(f"![{cell.metadata.alt}](figures/{name})")
    title, *rest = parts
    return "\n\n".join([title, NOTE, *rest]) + "\n", pictures


def draw_distances() -> None:
    """Distances of batch and running statistics over a training run, with and without
    layer-scale.
    """
    table = pandas.read_csv(PICTURES / "medians.csv")
    table = table[table["norm"] == "encoder.layers.2.self_attn_layer_norm"]
    shown = {
        "BN: variance": ("bn", "sigma2_distance_l1", "C0", "-"),
        "BN after layer-scale": ("bn_ls", "sigma2_distance_l1", "C0", "--"),
        "PN-V: mean square": ("pnv", "psi2_distance_l1", "C2", "-"),
        "PN-V after layer-scale": ("pnv_ls", "psi2_distance_l1", "C2", "--"),
    }
    pyplot = headless_pyplot()
    figure, axes = pyplot.subplots(figsize=(6, 3))
    fifths = [column for column in table if column.startswith("to ")]
    for label, (run_name, quantity, color, style) in shown.items():
        row = table[(table["run"] == run_name) & (table["quantity"] == quantity)]
        look = {"color": color, "marker": "o", "markersize": 4, "label": label}
        axes.plot(fifths, row[fifths].iloc[0], style, **look)
    axes.set_ylim(0, None)
    axes.set_xlabel("part of the training")
    axes.set_ylabel("distance of batch\nand running statistics")
    axes.legend(fontsize="small")
    figure.tight_layout()
    save(figure, PICTURES / "distances.png", dpi=100)


def main() -> None:
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    if sys.argv[1:] not in ([], ["--no-run"]):
        sys.exit(f"usage: {COMMAND} [--no-run]")
    if not sys.argv[1:]:
        nbformat.write(run(notebook), NOTEBOOK)
    text, pictures = page(notebook)
    PAGE.write_text(text, "utf-8")
    for name, png in pictures.items():
        (PICTURES / name).write_bytes(png)
    draw_distances()


if __name__ == "__main__":
    logging.disable(logging.INFO)  # fairseq's import lets matplotlib's messages through
    main()
