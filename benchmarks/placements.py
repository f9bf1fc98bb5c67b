"""Gradient norms by layer for every placement: ``python -m benchmarks.placements --output FOLDER``.

Transformers of tiny width and of several depths learn to copy made-up sentences. Before the first
update and after the last one, the program takes the L2 norm of the gradient of all weights of each
layer. It writes ``FOLDER/gradients.csv`` and draws ``FOLDER/gradients-NORM.png`` from it;
``--draw`` only draws.
"""

import argparse
from pathlib import Path

import pandas
import torch
from torch.nn import functional as F

from benchmarks import hide_messages
from benchmarks.models import build
from benchmarks.results import positive, write_csv
from pn_fairseq.models.placements import PLACEMENTS

PAD = 1
FIRST = 4
VOCABULARY = 100
STYLES = ["-", "--", "-.", ":"]


def batch(
    generator: torch.Generator, sentences: int = 16, length: int = 12
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sources with padding on the left, and the same sentences with padding on the right:

    (B, T) both.
    """
    src = torch.randint(FIRST, VOCABULARY, (sentences, length), generator=generator)
    lengths = torch.randint(3, length + 1, (sentences, 1), generator=generator)
    position = torch.arange(length)
    target = src.masked_fill(position >= lengths, PAD)
    padding = length - lengths
    moved = target.gather(1, (position - padding) % length)
    source = moved.masked_fill(position < padding, PAD)
    return source, target


def loss_of(model: torch.nn.Module, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    prev = torch.cat((torch.full_like(target[:, :1], 2), target[:, :-1]), dim=1)
    logits = model(source, None, prev)[0]
    return F.cross_entropy(logits.flatten(0, 1), target.flatten(), ignore_index=PAD)


def gradients(layers: torch.nn.ModuleList) -> list[float]:
    """L2 norm of the gradient of the weights of each layer."""
    found = []
    for layer in layers:
        norms = torch.stack([parameter.grad.norm() for parameter in layer.parameters()])
        found.append(norms.norm().item())
    return found


def measure(norm: str, placement: str, layers: int, updates: int) -> list[dict]:
    """Rows of the gradients before the first update and after the last one."""
    torch.manual_seed(1)
    generator = torch.Generator().manual_seed(1)
    both = {f"{side}_norm_placement": placement for side in ("encoder", "decoder")}
    depth = {f"{side}_layers": layers for side in ("encoder", "decoder")}
    width = {"encoder_embed_dim": 64, "decoder_embed_dim": 64, "encoder_ffn_embed_dim": 128}
    width |= {"decoder_ffn_embed_dim": 128, "dropout": 0.0, "psi_warmup_updates": updates // 2}
    # PN stands in the encoder only, as in the paper.
    sizes = {**depth, **width}
    model = build("transformer_pn_tiny", VOCABULARY, encoder_norm=norm, **both, **sizes)
    model.train()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    rows = []
    for update in range(updates + 1):
        model.set_num_updates(update)
        for group in optimizer.param_groups:
            group["lr"] = 1e-3 * min(1, (update + 1) / (updates / 2))
        model.zero_grad()
        loss = loss_of(model, *batch(generator))
        loss.backward()
        if update in (0, updates):
            where = {"norm": norm, "placement": placement, "layers": layers, "update": update}
            for side in ("encoder", "decoder"):
                values = [f"{value:.4g}" for value in gradients(getattr(model, side).layers)]
                row = {"loss": f"{loss.item():.4f}", "side": side, "gradients": " ".join(values)}
                rows.append({**where, **row})
        optimizer.step()
    return rows


def draw(folder: Path) -> None:
    """One picture for each norm: columns are depths, rows are side and update; a line for each
    placement.
    """
    from pn_fairseq.report.curves import headless_pyplot

    frame = pandas.read_csv(folder / "gradients.csv")
    plt = headless_pyplot()
    for norm, of_norm in frame.groupby("norm"):
        depths = sorted(of_norm["layers"].unique())
        updates = sorted(of_norm["update"].unique())
        rows = [(side, update) for side in ("encoder", "decoder") for update in updates]
        size = (3.4 * len(depths), 2.4 * len(rows))
        options = {"squeeze": False, "sharey": "row", "layout": "constrained"}
        figure, axes = plt.subplots(len(rows), len(depths), figsize=size, **options)
        for (side, update), line in zip(rows, axes, strict=True):
            for depth, axis in zip(depths, line, strict=True):
                of_side = of_norm[of_norm["side"] == side]
                of_update = of_side[of_side["update"] == update]
                panel = of_update[of_update["layers"] == depth]
                for index, name in enumerate(panel["placement"]):
                    values = [float(value) for value in panel["gradients"].iloc[index].split()]
                    style = STYLES[index // 3 % len(STYLES)]
                    colour = f"C{index % 10}"
                    places = range(1, depth + 1)
                    axis.plot(places, values, label=name, color=colour, linestyle=style)
                axis.set(yscale="log", xlabel="layer")
                axis.set_title(f"{side}, {depth} layers, after {update} updates", fontsize=9)
                axis.xaxis.get_major_locator().set_params(integer=True)
            line[0].set_ylabel("norm of the gradient")
        handles, labels = axes[0][0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=5)
        figure.savefig(folder / f"gradients-{norm}.png", dpi=110)
        plt.close(figure)


def main(argv=None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.placements", description=__doc__.split("\n")[0]
    )
    add = parser.add_argument
    add(
        "--output",
        type=Path,
        required=True,
        metavar="FOLDER",
        help="where the table and the pictures go",
    )
    add(
        "--norms",
        nargs="+",
        default=["layer", "power"],
        help="norms of the encoder (default: layer power)",
    )
    add(
        "--layers",
        nargs="+",
        type=positive,
        default=[6, 12, 18],
        help="layers of each side (default: 6 12 18)",
    )
    add(
        "--updates",
        type=positive,
        default=100,
        help="updates before the second measurement (default: 100)",
    )
    add("--draw", action="store_true", help="only draw FOLDER/gradients.csv")
    args = parser.parse_args(argv)
    hide_messages()
    if not args.draw:
        torch.set_num_threads(1)
        args.output.mkdir(parents=True, exist_ok=True)
        rows = []
        for norm in args.norms:
            for layers in args.layers:
                for placement in PLACEMENTS:
                    rows += measure(norm, placement, layers, args.updates)
                    print(
                        f"{norm}, {placement}, {layers} layers: loss {rows[-1]['loss']}", flush=True
                    )
        write_csv(args.output / "gradients.csv", rows)
    draw(args.output)


if __name__ == "__main__":
    main()
