"""``pn-average-checkpoints``: the mean of several fairseq checkpoints of one training run, as one checkpoint."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from pn_fairseq.common.checkpoints import (
    CheckpointError,
    check_input_path,
    check_output_path,
    checkpoints_to_average,
    load_checkpoint,
    save_checkpoint,
)
from pn_fairseq.common.command import ArgumentParser, UserError, command, whole, without_fairseqs_log

TOOL = "pn-average-checkpoints"

EPILOG = """\
examples:
  the last 10 epochs, as in the paper:
    %(prog)s --inputs checkpoints/ --last 10 --output checkpoints/averaged.pt
  files of your own choice, with running statistics that fit the averaged weights:
    %(prog)s --inputs checkpoint3.pt checkpoint7.pt --output averaged.pt --recalibrate data-bin/

Weights and floating-point statistics are averaged in float64 and stored in their own dtype. All else comes from the
newest checkpoint, the one with the most updates. Inputs are read without running code from them. --recalibrate prints
the validation loss before and after, and uses a GPU if there is one (docs/averaging.md).
"""


def num_updates(state: dict) -> int:
    """Updates made before a checkpoint was written; -1 where it does not say."""
    history = state.get("optimizer_history") or [{}]
    return history[-1].get("num_updates", -1)


@torch.no_grad()
def average_checkpoints(paths: Sequence[str | os.PathLike], keep_optimizer_state: bool = False) -> dict:
    """The arithmetic mean of fairseq checkpoints, as a checkpoint that fairseq loads.

    Every floating-point tensor of ``state["model"]`` is summed in float64, divided by the number of checkpoints and
    cast back to its dtype. All else is the newest checkpoint's: integer and boolean buffers (``num_batches_tracked``),
    ``cfg``, ``extra_state``. The newest is the one with the most updates; one that does not tell its updates counts as
    older than one that does, and among equals the last in ``paths`` is the newest. But for that tie, and for float64's
    rounding, the order of ``paths`` has no influence. Tensors that share their memory in every input (tied embeddings)
    share it in the result. One checkpoint is in memory at a time, beside the float64 sums. Prints a line for each.

    Args:
        paths: the files, all different, at least one.
        keep_optimizer_state: keep the newest checkpoint's ``last_optimizer_state``. It is not an average, and belongs
            to weights that the result does not hold; by default it is dropped.

    Raises:
        CheckpointError: a file appears twice, cannot be loaded, differs from the first in its keys, shapes or dtypes,
            or holds a NaN or an infinity.
    """
    paths = [Path(path) for path in paths]
    # All of them before the first is read: a misspelt name must not show up after minutes of work.
    seen: dict[tuple[int, int], Path] = {}
    for path in paths:
        info = check_input_path(path)
        if (other := seen.setdefault((info.st_dev, info.st_ino), path)) is not path:
            raise CheckpointError(f"{path}: is given twice (also as {other}); name each checkpoint once")

    reference: dict[str, tuple] = {}
    sums: dict[str, torch.Tensor] = {}
    tied: set[tuple[str, str]] = set()  # key, and the first key with the same memory, in all files
    newest: dict = {}
    path_of_update: dict[int, Path] = {}
    for number, path in enumerate(paths, 1):
        state = load_checkpoint(path)
        if not keep_optimizer_state:
            state.pop("last_optimizer_state", None)
        model, updates = state["model"], num_updates(state)
        print(f"[{number}/{len(paths)}] {path}: update {updates}, {len(model)} tensors", flush=True)
        if updates >= 0 and (other := path_of_update.setdefault(updates, path)) != path:
            # fairseq copies: checkpoint_best.pt and checkpoint_last.pt repeat an epoch's checkpoint.
            line = f"warning: {other} and {path} are both of update {updates}; is one a copy?"
            print(f"{TOOL}: {line}", file=sys.stderr)
        layout = {key: (list(value.shape), value.dtype) for key, value in model.items()}
        averaged = [key for key, value in model.items() if _is_averaged(key, value)]
        groups = set(_memory_groups({key: model[key] for key in averaged}).items())
        if not reference:
            reference, tied = layout, groups
        elif layout != reference:
            raise CheckpointError(f"{path}: does not match {paths[0]}: {_differences(layout, reference)}")
        tied &= groups
        for key in averaged:
            wide = model[key].to(torch.float64)
            if not torch.isfinite(wide).all():
                raise CheckpointError(f"{path}: {key} holds a NaN or an infinity; leave this checkpoint out")
            # A copy: a float64 input comes through .to() unchanged, and may overlap another tensor of the file.
            sums[key] = sums[key].add_(wide) if key in sums else wide.clone(memory_format=torch.contiguous_format)
            model[key] = None  # keeping it beside the sum would double the memory
        if not newest or updates >= num_updates(newest):
            newest = state
        del state, model

    first = dict(tied)
    means: dict[str, torch.Tensor] = {}
    for key in list(sums):
        total = sums.pop(key)
        if first.get(key, key) not in means:
            means[key] = total.div_(len(paths)).to(reference[key][1])
        newest["model"][key] = means[first.get(key, key)]
    return newest


def _is_averaged(key: str, value: torch.Tensor) -> bool:
    # fairseq's _float_tensor buffers are uninitialised memory (only their dtype and device matter): any bits, NaN too.
    return value.is_floating_point() and key.rpartition(".")[2] != "_float_tensor"


def _memory_groups(model: dict[str, torch.Tensor]) -> dict[str, str]:
    """Map each key to the first key whose tensor is the same view of the same memory."""
    first_at: dict[tuple, str] = {}

    def place(value: torch.Tensor) -> tuple:
        start = value.untyped_storage().data_ptr(), value.storage_offset()
        return *start, tuple(value.shape), value.stride(), value.dtype

    return {key: first_at.setdefault(place(value), key) for key, value in model.items()}


def _differences(layout: dict[str, tuple], reference: dict[str, tuple]) -> str:
    """How many tensors differ, and in what the first of them."""
    keys = [key for key in {**reference, **layout} if layout.get(key) != reference.get(key)]
    here, there = ("{} {}".format(*each[keys[0]]) if keys[0] in each else "absent" for each in (layout, reference))
    return f"tensors that differ: {len(keys)} ({keys[0]} is {here}, not {there})"


def _parser() -> ArgumentParser:
    parser = ArgumentParser(
        prog=TOOL,
        description="Average the weights of several fairseq checkpoints of one training run into one checkpoint.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    inputs = "the checkpoint files; or one directory (fairseq's --save-dir), together with --last"
    add("--inputs", nargs="+", required=True, metavar="PATH", type=Path, help=inputs)
    add("--output", required=True, metavar="FILE", type=Path, help="where to write the average; none of the inputs")
    add("--last", type=whole, metavar="N", help="with a directory: average its N newest checkpoints, or what there is")
    by = "with a directory: take checkpoint{epoch}.pt (epoch) or checkpoint_{epoch}_{update}.pt (update); default: "
    by += "those of epochs, else of updates, else checkpoint_last.pt alone"
    add("--by", choices=("epoch", "update"), help=by)
    bound = "with a directory: leave out checkpoints whose epoch (with --by update: update) number is above K"
    add("--upper-bound", type=int, metavar="K", help=bound)
    keep = "keep the newest checkpoint's optimizer state (it is not averaged; by default it is dropped)"
    add("--keep-optimizer-state", action="store_true", help=keep)
    recalibrate = "re-estimate the norms' running statistics with the averaged weights on this binarized data"
    add("--recalibrate", metavar="DATA", type=Path, help=recalibrate)
    batches = "with --recalibrate: number of training batches to use, all if there are fewer (default 100)"
    add("--batches", type=whole, metavar="N", help=batches)
    return parser


def _select(args: argparse.Namespace) -> list[Path]:
    """The files to average, oldest first."""
    folder = args.inputs[0]
    if len(args.inputs) > 1 or not folder.is_dir():
        for option in ("last", "by", "upper_bound"):
            if getattr(args, option) is not None:
                if not folder.exists():
                    raise UserError(f"there is no directory '{folder}' (--inputs)")
                raise UserError(f"--{option.replace('_', '-')} selects from a directory, but --inputs names files")
        return args.inputs
    if args.last is None:
        raise UserError(f"{folder} is a directory: say with --last N how many of its checkpoints to average")
    kinds = (args.by,) if args.by else ("epoch",) if args.upper_bound is not None else ("epoch", "update")
    chosen, _, differs = checkpoints_to_average(folder, args.last, kinds, args.upper_bound)
    if differs:
        print(f"{TOOL}: note: {differs}", file=sys.stderr)
    return chosen


@command(TOOL)
def main(argv: Sequence[str] | None = None) -> None:
    args = _parser().parse_args(argv)
    if args.recalibrate is None and args.batches is not None:
        raise UserError("--batches goes with --recalibrate DATA")
    average(_select(args), args.output, args.recalibrate, args.batches or 100, args.keep_optimizer_state)


def average(
    paths: list[Path], output: Path, data: Path | None = None, batches: int = 100, keep_optimizer_state=False
) -> None:
    """Write the average of ``paths`` to ``output``, recalibrated on the binarized ``data`` if given, and tell of it."""
    check_output_path(output, paths)
    if data is not None and not any(data.glob("dict.*")):
        raise UserError(f"--recalibrate {data}: is not a folder of binarized data (fairseq-preprocess makes one)")
    print(f"averaging {len(paths)} checkpoint{'s' * (len(paths) > 1)}", flush=True)
    state = average_checkpoints(paths, keep_optimizer_state)
    if data is not None:
        _recalibrate(state, output, data, batches)
    save_checkpoint(state, output)
    kept = "the newest one's" if "last_optimizer_state" in state else "no"
    print(f"wrote {output} ({kept} optimizer state)")


@without_fairseqs_log()
def _recalibrate(state: dict, output: Path, data: Path, batches: int) -> None:
    # Here and not above: averaging alone works without fairseq, and at once.
    from pn_fairseq.models.recalibrate_checkpoint import RecalibrationModel

    model = RecalibrationModel(state, f"the average ({output})", data)
    if not model.num_norms:
        print("nothing to recalibrate: the model has no running statistics")
        return
    print(f"validation loss before: {model.validate()}", flush=True)
    used = model.recalibrate(batches)
    model.store(state["model"])
    print(f"recalibrated {model.num_norms} norms on {used} training batches", flush=True)
    print(f"validation loss after:  {model.validate()}", flush=True)
