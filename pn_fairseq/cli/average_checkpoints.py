"""``pn-average-checkpoints``: the mean of several fairseq checkpoints of one training run, as one checkpoint."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from pn_fairseq.checkpoints import (
    CheckpointError,
    check_input_path,
    check_output_path,
    find_checkpoints,
    load_checkpoint,
    save_checkpoint,
)
from pn_fairseq.cli import ArgumentParser, UserError, command, without_fairseqs_log

TOOL = "pn-average-checkpoints"

EPILOG = """\
examples:
  the last 10 epochs, as in the paper:
    %(prog)s --inputs checkpoints/ --last 10 --output checkpoints/averaged.pt
  the last 5 update checkpoints up to update 20000:
    %(prog)s --inputs checkpoints/ --by update --last 5 --upper-bound 20000 --output averaged.pt
  files of your own choice:
    %(prog)s --inputs checkpoint3.pt checkpoint7.pt --output averaged.pt
  the last 5 epochs, with running statistics that fit the averaged weights:
    %(prog)s --inputs checkpoints/ --last 5 --output averaged.pt --recalibrate data-bin/

Weights and floating-point statistics (running_mean, running_psi2, nu, ...) are averaged in float64 and stored in their
own dtype. Integer and boolean buffers, the settings and the training state come from the newest checkpoint, the one
with the most updates. Inputs are read without running code from them.

--recalibrate replaces the averaged running statistics by those of the averaged weights, without dropout, and prints
the validation loss (subset "valid", without label smoothing) before and after. It builds the model through fairseq,
with the task, model, max_tokens and seed of the newest checkpoint, and uses a GPU if there is one.
"""

#: Training batches for --recalibrate, unless told otherwise.
BATCHES = 100


@dataclass(frozen=True)
class CheckpointInfo:
    """What a checkpoint says about itself.

    Attributes:
        path: the file.
        epoch: epoch in which it was written, from 1; None if it does not say.
        num_updates: optimizer updates made before it was written; None if it does not say.
        num_tensors: number of tensors in ``state["model"]``.
    """

    path: Path
    epoch: int | None
    num_updates: int | None
    num_tensors: int

    @classmethod
    def of(cls, path: Path, state: dict) -> CheckpointInfo:
        """Read the numbers out of a loaded checkpoint; an odd or old structure gives None for them."""
        epoch = num_updates = None
        try:
            iterator = state["extra_state"]["train_iterator"]
            # At the end of an epoch fairseq stores the next epoch's number, with nothing of it consumed.
            epoch = int(iterator["epoch"]) - (iterator["iterations_in_epoch"] == 0)
        except (KeyError, TypeError, ValueError):
            pass
        try:
            num_updates = int(state["optimizer_history"][-1]["num_updates"])
        except (KeyError, IndexError, TypeError, ValueError):
            pass
        return cls(path, epoch, num_updates, len(state["model"]))

    def __str__(self) -> str:
        epoch = "?" if self.epoch is None else self.epoch
        num_updates = "?" if self.num_updates is None else self.num_updates
        return f"{self.path}: epoch {epoch}, update {num_updates}, {self.num_tensors} tensors"


@torch.no_grad()
def average_checkpoints(
    paths: Sequence[str | os.PathLike],
    keep_optimizer_state: bool = False,
    report: Callable[[CheckpointInfo], None] | None = None,
) -> dict:
    """The arithmetic mean of fairseq checkpoints, as a checkpoint that fairseq loads.

    Every floating-point tensor of ``state["model"]`` is summed in float64, divided by the number of checkpoints and
    cast back to its dtype. All else is the newest checkpoint's: integer and boolean buffers (``num_batches_tracked``),
    ``cfg``, ``extra_state``. The newest is the one with the most updates; one that does not tell its updates counts as
    older than one that does, and among equals the last in ``paths`` is the newest. But for that tie, and for float64's
    rounding, the order of ``paths`` has no influence. Tensors that share their memory in every input (tied embeddings)
    share it in the result. One checkpoint is in memory at a time, beside the float64 sums.

    Args:
        paths: the files, all different, at least one.
        keep_optimizer_state: keep the newest checkpoint's ``last_optimizer_state``. It is not an average, and belongs
            to weights that the result does not hold; by default it is dropped.
        report: called with each checkpoint's :class:`CheckpointInfo` once it is read.

    Raises:
        CheckpointError: a file appears twice, cannot be loaded, differs from the first in its keys, shapes or dtypes,
            or holds a NaN or an infinity.
    """
    paths = [Path(path) for path in paths]
    if not paths:
        raise CheckpointError("there are no checkpoints to average")
    _check_inputs(paths)

    reference: dict[str, tuple] = {}
    sums: dict[str, torch.Tensor] = {}
    leader: dict[str, str] = {}  # averaged key -> the key under which its sum is kept; another one if they are tied
    newest: dict = {}
    newest_updates = -1
    for path in paths:
        state = load_checkpoint(path)
        if not keep_optimizer_state:
            state.pop("last_optimizer_state", None)
        model = state["model"]
        info = CheckpointInfo.of(path, state)

        layout = {key: (tuple(value.shape), value.dtype) for key, value in model.items()}
        groups = _memory_groups(model)
        if not reference:
            reference = layout
            leader = {key: groups[key] for key, value in model.items() if _is_averaged(key, value)}
        elif layout != reference:
            raise CheckpointError(f"{path}: does not match {paths[0]}: {_differences(layout, reference)}")

        for key, first in leader.items():
            if first != key and groups[first] != groups[key]:
                # Tied so far, but not in this file: from here on the sums can differ.
                leader[key] = key
                sums[key] = sums[first].clone()
        for key, first in leader.items():
            if first == key:
                _add(sums, key, model[key], path)

        num_updates = -1 if info.num_updates is None else info.num_updates
        # The sums hold what is needed of these; keeping them as well would double the memory.
        for key in leader:
            model[key] = None
        if num_updates >= newest_updates:
            newest, newest_updates = state, num_updates
        del state, model
        if report is not None:
            report(info)

    means: dict[str, torch.Tensor] = {}
    for key in newest["model"]:
        if key in leader:
            first = leader[key]
            if first not in means:
                means[first] = sums.pop(first).div_(len(paths)).to(reference[key][1])
            newest["model"][key] = means[first]
    return newest


def _check_inputs(paths: list[Path]) -> None:
    # All of them before the first is read: a misspelt name is not to show up after minutes of work.
    seen: dict[tuple[int, int], Path] = {}
    for path in paths:
        info = check_input_path(path)
        other = seen.setdefault((info.st_dev, info.st_ino), path)
        if other is not path:
            raise CheckpointError(f"{path}: is given twice (also as {other}); name each checkpoint once")


def _is_averaged(key: str, value: torch.Tensor) -> bool:
    # fairseq's _float_tensor buffers are uninitialised memory (only their dtype and device matter): any bits, NaN too.
    return value.is_floating_point() and key.rpartition(".")[2] != "_float_tensor"


def _memory_groups(model: dict[str, torch.Tensor]) -> dict[str, str]:
    """Map each key to the first key whose tensor is the same view of the same memory."""
    first_at: dict[tuple, str] = {}
    groups = {}
    for key, value in model.items():
        place = (
            value.untyped_storage().data_ptr(),
            value.storage_offset(),
            tuple(value.shape),
            value.stride(),
            value.dtype,
        )
        groups[key] = first_at.setdefault(place, key)
    return groups


def _add(sums: dict[str, torch.Tensor], key: str, value: torch.Tensor, path: Path) -> None:
    wide = value.to(torch.float64)
    if not torch.isfinite(wide).all():
        raise CheckpointError(f"{path}: {key} holds a NaN or an infinity; leave this checkpoint out")
    if key in sums:
        sums[key] += wide
    else:
        # A copy of its own: a float64 input comes through .to() unchanged, and may overlap another tensor of the file.
        sums[key] = wide.clone(memory_format=torch.contiguous_format)


def _differences(layout: dict[str, tuple], reference: dict[str, tuple]) -> str:
    common = [key for key in reference if key in layout]
    reshaped = [
        f"{key} {list(layout[key][0])} instead of {list(reference[key][0])}"
        for key in common
        if layout[key][0] != reference[key][0]
    ]
    recast = [
        f"{key} {str(layout[key][1])[6:]} instead of {str(reference[key][1])[6:]}"
        for key in common
        if layout[key][1] != reference[key][1]
    ]
    kinds = {
        "missing": [key for key in reference if key not in layout],
        "unexpected": [key for key in layout if key not in reference],
        "of another shape": reshaped,
        "of another dtype": recast,
    }
    return "; ".join(f"{len(items)} {kind} ({_first_few(items)})" for kind, items in kinds.items() if items)


def _first_few(items: list[str], limit: int = 3) -> str:
    return ", ".join(items[:limit] + ["..."] * (len(items) > limit))


def _parser() -> ArgumentParser:
    parser = ArgumentParser(
        prog=TOOL,
        description="Average the weights of several fairseq checkpoints of one training run into one checkpoint.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--inputs",
        nargs="+",
        required=True,
        metavar="PATH",
        help="the checkpoint files; or one directory (fairseq's --save-dir), together with --last",
    )
    parser.add_argument(
        "--output", required=True, metavar="FILE", help="where to write the average; none of the inputs"
    )
    parser.add_argument("--last", type=int, metavar="N", help="with a directory: average its N newest checkpoints")
    parser.add_argument(
        "--by",
        choices=("epoch", "update"),
        help="with a directory: take its checkpoint{epoch}.pt (epoch, the default) or its "
        "checkpoint_{epoch}_{update}.pt (update)",
    )
    parser.add_argument(
        "--upper-bound",
        type=int,
        metavar="K",
        help="with a directory: leave out checkpoints whose epoch (or, with --by update, update) number is above K",
    )
    parser.add_argument(
        "--keep-optimizer-state",
        action="store_true",
        help="keep the newest checkpoint's optimizer state (it is not averaged; by default it is dropped)",
    )
    parser.add_argument(
        "--recalibrate",
        metavar="DATA",
        help="re-estimate the norms' running statistics with the averaged weights on this folder of binarized data",
    )
    parser.add_argument(
        "--batches",
        type=int,
        metavar="N",
        help=f"with --recalibrate: number of training batches to use, all if there are fewer (default {BATCHES})",
    )
    return parser


def _select(inputs: list[str], last: int | None, by: str | None, upper_bound: int | None) -> list[Path]:
    """The files to average, oldest first."""
    paths = [Path(path) for path in inputs]
    if last is not None and last < 1:
        raise UserError(f"--last {last}: at least 1 checkpoint is needed")
    if len(paths) == 1 and paths[0].is_dir():
        if last is None:
            raise UserError(f"{paths[0]} is a directory: say with --last N how many of its checkpoints to average")
        return find_checkpoints(paths[0], by or "epoch", last, upper_bound)[::-1]
    for path in paths:
        if path.is_dir():
            raise UserError(f"--inputs takes files or one directory, and {path} is a directory among several inputs")
    for option, value in (("--last", last), ("--by", by), ("--upper-bound", upper_bound)):
        if value is not None:
            raise UserError(f"{option} selects from a directory, but --inputs names files: drop one of the two")
    return paths


def _check_output(output: Path, paths: list[Path]) -> None:
    check_output_path(output)
    for path in paths:
        if output.exists() and path.exists() and os.path.samefile(output, path):
            raise UserError(f"--output {output} is one of the inputs ({path}); choose another name")


def _check_recalibration(data: str | None, batches: int | None) -> None:
    if data is None:
        if batches is not None:
            raise UserError("--batches goes with --recalibrate DATA")
        return
    if batches is not None and batches < 1:
        raise UserError(f"--batches {batches}: at least 1 batch is needed")
    if not any(Path(data).glob("dict.*")):
        raise UserError(f"--recalibrate {data}: is no folder of binarized data (fairseq-preprocess makes one)")


@without_fairseqs_log()
def _recalibrate(state: dict, output: Path, data: Path, batches: int) -> None:
    try:
        # Here and not above: averaging alone is to work without fairseq, and at once.
        from pn_fairseq.models.recalibrate_checkpoint import RecalibrationModel
    except ModuleNotFoundError as error:
        raise UserError(f"--recalibrate needs fairseq, and {error.name} is not installed") from error
    model = RecalibrationModel(state, f"the average ({output})", data)
    if not model.num_norms:
        print("nothing to recalibrate: the model has no running statistics")
        return
    print(f"validation loss before: {model.validate()}", flush=True)
    used = model.recalibrate(batches)
    model.store(state["model"])
    print(f"recalibrated {model.num_norms} norms on {used} training batches", flush=True)
    print(f"validation loss after:  {model.validate()}", flush=True)


@command(TOOL, CheckpointError)
def main(argv: Sequence[str] | None = None) -> None:
    """Run the tool on ``argv`` (by default the process's arguments) and return its exit code: 0, 2 or 130."""
    args = _parser().parse_args(argv)
    output = Path(args.output)
    paths = _select(args.inputs, args.last, args.by, args.upper_bound)
    _check_output(output, paths)
    _check_recalibration(args.recalibrate, args.batches)

    # When the lines below go to a terminal they show the progress themselves.
    show_progress = sys.stderr.isatty() and not sys.stdout.isatty()
    path_of_update: dict[int, Path] = {}
    done = 0

    def report(info: CheckpointInfo) -> None:
        nonlocal done
        done += 1
        print(f"[{done}/{len(paths)}] {info}", flush=True)
        if show_progress:
            print(f"\r{done}/{len(paths)} checkpoints read", end="", file=sys.stderr, flush=True)
        if info.num_updates is not None:
            other = path_of_update.setdefault(info.num_updates, info.path)
            if other != info.path:
                # fairseq copies: checkpoint_best.pt and checkpoint_last.pt repeat an epoch's checkpoint.
                line = f"warning: {other} and {info.path} are both of update {info.num_updates}; is one a copy?"
                print(f"{TOOL}: {line}", file=sys.stderr)

    print(f"averaging {len(paths)} checkpoint{'s' * (len(paths) > 1)}", flush=True)
    try:
        state = average_checkpoints(paths, args.keep_optimizer_state, report)
    finally:
        if show_progress:
            print(file=sys.stderr)
    if args.recalibrate is not None:
        _recalibrate(state, output, Path(args.recalibrate), args.batches or BATCHES)
    save_checkpoint(state, output)
    kept = "the newest one's" if "last_optimizer_state" in state else "no"
    print(f"wrote {output} ({kept} optimizer state)")


if __name__ == "__main__":
    sys.exit(main())
