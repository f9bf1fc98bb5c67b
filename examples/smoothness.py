"""How smooth is the loss of a trained translation model along its gradient? (Santurkar et al. 2018,
arXiv 1805.11604)

    python examples/smoothness.py RUN... --output runs/smoothness

RUN is a folder of ``pn train``; several runs must have been trained on the same data. For each
checkpoint theta and each of the first training batches, with the loss L per token (nats), in
training mode but without dropout:

    g = dL/dtheta,   theta' = theta - eta g,   L' and g' at theta'

for steps eta with a relative length rho = eta |g| / |theta| of --steps. Norms read the statistics
of the batch at theta and at theta' alike; PN's running statistics are those of the checkpoint.
Writes OUTPUT/steps.csv:

    loss change       L' - L; its range over the steps is how much the loss varies
    gradient change   |g' - g|, and divided by |g|
    smoothness        |g' - g| / |theta' - theta|; its maximum over the steps is the effective
                      beta-smoothness

OUTPUT/layers.csv: for each layer the change of its gradient G if only the layers before it move by
the middle step, |G' - G|, divided by |G|, and the cosine of G and G': internal covariate shift as
that paper measures it (section 2.2). The embeddings are before all layers; where the output
projection shares their weights, it moves as well. And OUTPUT/smoothness.png: medians and quartiles
over checkpoints and batches. Prints the range of the loss and the effective beta-smoothness of each
run: median, least and greatest over checkpoints and batches.
"""

import argparse
import copy
import logging
import warnings
from pathlib import Path

import pandas
import torch
import torch.nn.functional as F
from fairseq import checkpoint_utils, utils
from torch import Tensor, nn
from tqdm import tqdm

import pn_fairseq.models  # noqa: F401  registers the models
from pn_fairseq.common.checkpoint_files import find_checkpoints
from pn_fairseq.common.command import UserError

STEPS = [0.0003, 0.001, 0.003, 0.01, 0.03]


def load(checkpoint: Path, batches: int):
    """The model of a checkpoint without dropout, its criterion, and the first batches of its
    training data.
    """
    (model,), config, task = checkpoint_utils.load_model_ensemble_and_task([str(checkpoint)])
    for module in model.modules():
        if type(getattr(module, "dropout", None)) is float:  # attention
            module.dropout = 0.0
        elif hasattr(module, "p"):
            module.p = 0.0
    task.load_dataset("train")
    longest = utils.resolve_max_positions(task.max_positions(), model.max_positions())
    iterator = task.get_batch_iterator(
        task.dataset("train"),
        max_tokens=config.dataset.max_tokens,
        max_sentences=config.dataset.batch_size,
        max_positions=longest,
        ignore_invalid_inputs=True,
        seed=1,
    )
    epoch = iterator.next_epoch_itr(shuffle=True)
    criterion = task.build_criterion(config.criterion)
    return model.train(), criterion, [next(epoch) for _ in range(batches)]


def moved(model: nn.Module, gradients: dict[str, Tensor], step: float) -> nn.Module:
    """A copy of the model after a step against the gradients."""
    model = copy.deepcopy(model)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name in gradients:
                parameter -= step * gradients[name]
    return model


def loss_and_gradients(model: nn.Module, criterion, batch: dict) -> tuple[float, dict[str, Tensor]]:
    """The loss per token, and its gradient by parameter; ``model`` itself is not changed."""
    model = copy.deepcopy(model)
    torch.manual_seed(1)  # of noisy BN
    loss, tokens, _ = criterion(model, batch)
    loss.backward()  # of the sum, as in training: PN's nu in the checkpoint has its scale
    gradients = {}
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            gradients[name] = parameter.grad / tokens
    return float(loss.detach() / tokens), gradients


def flat(tensors: dict[str, Tensor]) -> Tensor:
    return torch.cat([tensor.double().flatten() for tensor in tensors.values()])


def theta_over_gradient(model: nn.Module, gradients: dict[str, Tensor]) -> float:
    """|theta| / |g|, by which a relative length rho is multiplied to give the step eta."""
    parameters = dict(model.named_parameters())
    theta = flat({name: parameters[name].detach() for name in gradients})
    return float(theta.norm() / flat(gradients).norm())


def along_the_gradient(model: nn.Module, criterion, batch: dict, steps: list[float]) -> list[dict]:
    """A row for each relative step length."""
    loss, gradients = loss_and_gradients(model, criterion, batch)
    g = flat(gradients)
    norm = float(g.norm())
    ratio = theta_over_gradient(model, gradients)
    rows = []
    for step in steps:
        eta = step * ratio
        new_loss, new_gradients = loss_and_gradients(moved(model, gradients, eta), criterion, batch)
        change = float((flat(new_gradients) - g).norm())
        row = {
            "relative step": step,
            "loss": loss,
            "loss change": new_loss - loss,
            "gradient": norm,
            "gradient change": change,
            "relative gradient change": change / norm,
            "smoothness": change / (eta * norm),
        }
        rows.append(row)
    return rows


def layers_of(model: nn.Module) -> list[tuple[str, str]]:
    """The side and the name of each layer: "encoder", "encoder.layers.0."."""
    layers = []
    for side in ("encoder", "decoder"):
        number = len(getattr(model, side).layers)
        layers += [(side, f"{side}.layers.{index}.") for index in range(number)]
    return layers


def starting_with(start: str | tuple[str, ...], tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Those of the tensors whose names start so."""
    return {name: tensor for name, tensor in tensors.items() if name.startswith(start)}


def after_the_layers_before(model: nn.Module, criterion, batch: dict, step: float) -> list[dict]:
    """A row for each layer of encoder and decoder, whose gradient changes because the layers
    before it moved.
    """
    _, gradients = loss_and_gradients(model, criterion, batch)
    eta = step * theta_over_gradient(model, gradients)
    rows = []
    before = {}
    for side, layer in layers_of(model):
        if side == "encoder":
            before |= starting_with("encoder.embed", gradients)
        else:
            before |= starting_with(("encoder.", "decoder.embed"), gradients)
        own = starting_with(layer, gradients)
        _, new_gradients = loss_and_gradients(moved(model, before, eta), criterion, batch)
        old = flat(own)
        new = flat({name: new_gradients[name] for name in own})
        change = (new - old).norm()
        row = {
            "layer": layer.rstrip("."),
            "gradient": float(old.norm()),
            "gradient change": float(change),
            "relative gradient change": float(change / old.norm()),
            "cosine": float(F.cosine_similarity(old, new, dim=0)),
        }
        rows.append(row)
        before |= own
    return rows


def over_the_steps(steps: pandas.DataFrame) -> pandas.DataFrame:
    """The range of the loss and the effective beta-smoothness, a row for each run, checkpoint
    and batch.
    """
    groups = steps.groupby(["run", "update", "batch"], sort=False)
    ranges = groups["loss change"].max() - groups["loss change"].min()
    smoothness = groups["smoothness"].max()
    return pandas.DataFrame({"range of the loss": ranges, "effective smoothness": smoothness})


def draw(steps: pandas.DataFrame, layers: pandas.DataFrame, file: Path) -> None:
    """Medians and quartiles of each run; curves over the steps, points for the layers."""
    from matplotlib.figure import Figure  # after main() has silenced its messages

    figure = Figure(figsize=(10.5, 3.4), layout="constrained")
    axes = figure.subplots(1, 4)
    panels = ["loss change", "relative gradient change", "smoothness"]
    for number, (run, rows) in enumerate(steps.groupby("run", sort=False)):
        color = f"C{number}"
        for axis, column in zip(axes, panels, strict=False):
            values = rows.groupby("relative step")[column]
            middle = values.median()
            axis.plot(middle.index, middle, f"{color}-o", markersize=3, label=run)
            quartiles = values.quantile(0.25), values.quantile(0.75)
            axis.fill_between(middle.index, *quartiles, color=color, alpha=0.2)
        cosines = layers[layers["run"] == run].groupby("layer", sort=False)["cosine"].median()
        names = [name.replace(".layers.", " ") for name in cosines.index]
        places = range(len(names))
        axes[3].plot(cosines.to_numpy(), places, f"{color}-o", markersize=3)
        axes[3].set_yticks(places, names)
    for axis, column in zip(axes, panels, strict=False):
        axis.set(title=column, xscale="log", xlabel="relative step")
    axes[2].set(yscale="log")
    axes[3].set(title="gradient of a layer:\nothers before it moved", xlabel="cosine")
    axes[3].invert_yaxis()
    axes[0].legend(fontsize="small")
    figure.savefig(file, dpi=130)


def main(arguments: list[str] | None = None) -> None:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    add = parser.add_argument
    newest = "the newest N checkpoints (default 5)"
    add("runs", type=Path, nargs="+", metavar="RUN")
    add("--last", type=int, default=5, metavar="N", help=newest)
    add("--batches", type=int, default=4, metavar="N", help="training batches (default 4)")
    add("--steps", type=float, nargs="+", default=STEPS, metavar="RHO", help=f"default {STEPS}")
    add("--output", type=Path, default=Path("runs/smoothness"), metavar="DIR")
    options = parser.parse_args(arguments)
    if min(options.last, options.batches, *options.steps) <= 0:
        parser.error("--last, --batches and --steps must be positive")
    logging.disable(logging.WARNING)  # of fairseq
    warnings.simplefilter("ignore")  # of torch's data loader and attention
    checkpoints = []
    try:
        for run in options.runs:
            found = find_checkpoints(run / "checkpoints", "update", options.last)
            if not found:
                raise UserError(f"no checkpoint_EPOCH_UPDATE.pt in {run}")
            checkpoints += [(run, checkpoint) for checkpoint in reversed(found)]
        # so that data that was moved is said before anything is computed
        load(checkpoints[0][1], 1)
        options.output.mkdir(parents=True, exist_ok=True)
    except (UserError, OSError) as error:
        parser.exit(2, f"smoothness: error: {error}\n")
    lengths = sorted(options.steps)
    middle = lengths[len(lengths) // 2]
    steps = []
    layers = []
    for run, checkpoint in tqdm(checkpoints, desc="checkpoints", disable=None):
        model, criterion, batches = load(checkpoint, options.batches)
        update = int(checkpoint.stem.rpartition("_")[2])
        for number, batch in enumerate(batches):
            place = {"run": run.name, "update": update, "batch": number}
            along = along_the_gradient(model, criterion, batch, lengths)
            steps += [place | row for row in along]
            after = after_the_layers_before(model, criterion, batch, middle)
            layers += [place | row for row in after]
    tables = {"steps": pandas.DataFrame(steps), "layers": pandas.DataFrame(layers)}
    for name, table in tables.items():
        table.to_csv(options.output / f"{name}.csv", index=False, float_format="%.6g")
    draw(*tables.values(), options.output / "smoothness.png")
    by_run = over_the_steps(tables["steps"]).groupby("run", sort=False)
    print(by_run.agg(["median", "min", "max"]).to_string(float_format="%.3g"))


if __name__ == "__main__":
    main()
