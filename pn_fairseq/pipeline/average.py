"""``pn average``: the mean of several checkpoints of one training run, as one checkpoint."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path

from pn_fairseq.common.checkpoint_files import (
    LAST,
    CheckpointError,
    check_output_path,
    checkpoints_to_average,
    find_checkpoints,
)
from pn_fairseq.common.command import (
    ArgumentParser,
    UserError,
    say,
    say_next,
    shown,
    whole,
    without_fairseqs_log,
)
from pn_fairseq.common.files import only_writer, write_settings
from pn_fairseq.pipeline import RUN_HELP, add_norm_module, outdated, stamp
from pn_fairseq.pipeline.runs import Run, open_run

EPILOG = """\
examples:
  a run, with the number of checkpoints that its configuration sets (average_last):
    %(prog)s --run runs/demo
  the last 10 epochs in a folder of fairseq-train (--save-dir), as in the paper:
    %(prog)s --inputs checkpoints --last 10 --output checkpoints/averaged.pt
  a list of files, with running statistics that fit the averaged weights:
    %(prog)s --inputs checkpoint3.pt checkpoint7.pt --output averaged.pt --recalibrate data-bin

Weights and floating-point statistics are averaged in float64 and stored in their own dtype.
Everything else is copied from the newest checkpoint, the one with the most updates. Inputs are read
without executing code from them. With --run, %(prog)s does nothing if the output was made from the
same checkpoints with the same options. --recalibrate prints the validation loss before and after,
and uses a GPU if there is one (docs/averaging.md).
"""

#: Default number of training batches for --recalibrate.
BATCHES = 100
#: How the checkpoints were chosen if the user named them.
FILES = "files"


def _parser() -> ArgumentParser:
    description = "Average the weights of the last checkpoints of a training run."
    parser = ArgumentParser(prog="pn average", description=description, epilog=EPILOG)
    add = parser.add_argument
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--run", type=Path, metavar="DIR", help=RUN_HELP)
    inputs = (
        "checkpoint files; or one folder (fairseq's --save-dir), together with --last: its epoch "
        "checkpoints, else its update checkpoints, else only checkpoint_last.pt"
    )
    source.add_argument("--inputs", nargs="+", metavar="PATH", type=Path, help=inputs)
    output = (
        "the file to write, which must not be an input (default with --run: "
        "DIR/checkpoints/averaged.pt)"
    )
    add("--output", metavar="FILE", type=Path, help=output)
    last = (
        "average the N newest checkpoints of the run or folder, or all if there are fewer (default "
        "with --run: average_last of its configuration, else as many as it keeps)"
    )
    add("--last", type=whole, metavar="N", help=last)
    recalibrate = (
        "re-estimate the norms' running statistics with the averaged weights on this binarized "
        "data (default with --run: its training data); without this option the statistics are "
        "averaged as well"
    )
    add("--recalibrate", nargs="?", const=True, metavar="DATA", help=recalibrate)
    batches = f"at most N training batches for --recalibrate (default {BATCHES})"
    add("--batches", type=whole, metavar="N", help=batches)
    add_norm_module(parser)
    return parser


def _select(args: argparse.Namespace, run: Run | None) -> tuple[list[Path], str]:
    """The files to average, oldest first, and how they were chosen."""
    folder = run.checkpoints if run else args.inputs[0]
    if not run and (len(args.inputs) > 1 or not folder.is_dir()):
        if args.last:
            raise UserError(
                f"--last selects from a folder, but --inputs names files ('{folder}' is no folder)"
            )
        return args.inputs, FILES
    usual, last = "epoch", args.last
    if run:
        kept = run.get("checkpoint.keep_last_epochs", -1)
        of_updates = run.get("checkpoint.keep_interval_updates", -1)
        if of_updates > 0:
            usual, kept = "update", of_updates
        last = last or run.get("average_last") or run.get("scoring.average_last") or kept
    if not last or last < 1:
        raise UserError(
            f"'{folder}' is a folder of checkpoints: choose with --last N how many to average"
        )
    paths, kind, note = checkpoints_to_average(folder, last, usual)
    if note:
        say("average", note)
    return paths, kind


def _note_on_newer(paths: Sequence[Path], output: Path, updates: int | None = None) -> None:
    """Report a newer checkpoint in the folder of ``paths``, the newest of which was saved at update
    ``updates``; None: read the update from the last of them.

    The last model of a training is only in checkpoint_last.pt, unless the training saves at its
    update anyway.
    """
    folder = paths[0].parent
    last = folder / LAST
    others = [*find_checkpoints(folder, "epoch", 1), *find_checkpoints(folder, "update", 1)]
    from pn_fairseq.common.checkpoints import load_checkpoint
    from pn_fairseq.models.average_checkpoints import num_updates

    if updates is None:
        updates = num_updates(load_checkpoint(paths[-1]))
    for path in [last] if last.is_file() else others:
        if path in paths:
            continue
        try:
            own = num_updates(load_checkpoint(path))
        except CheckpointError as error:
            say("average", f"note: whether there is a newer checkpoint is not known: {error}")
            continue
        if own > updates:
            command = shown(["average", "--inputs", *paths[1:], path, "--output", output])
            newer = (
                f"{path} (update {own}) is newer than all of these (up to update {updates}), and "
                f"is left out"
            )
            say("average", f"note: {newer}; to average it as well: {command}")


@contextlib.contextmanager
def _explained(run: Run | None, paths: Sequence[Path]) -> Iterator[None]:
    """Explain the error if a listed file is gone because the run is being trained."""
    try:
        yield
    except (CheckpointError, OSError) as error:
        gone = [path for path in paths if not path.exists()]
        if run and gone and run.in_training:
            raise UserError(
                f"'{run.path}' is being trained, which has removed {gone[0].name} since it was "
                "listed: run the same command again, best when the training has ended"
            ) from error
        raise


def main(argv: Sequence[str] | None = None) -> int:
    args = _parser().parse_args(argv)
    if args.recalibrate is None and args.batches is not None:
        raise UserError("--batches goes with --recalibrate")
    if args.inputs and not args.output:
        raise UserError("--inputs needs --output FILE")
    if args.inputs and args.recalibrate is True:
        raise UserError(
            "--recalibrate needs DATA, the folder of the binarized data, unless --run names a run"
        )
    run = open_run(args.run) if args.run else None
    output = args.output or run.checkpoints / "averaged.pt"
    data = None
    if args.recalibrate is True:
        data = run.bin
    elif args.recalibrate:
        data = Path(args.recalibrate)
    if data and not any(data.glob("dict.*")):
        raise UserError(
            f"--recalibrate {data}: is not a folder of binarized data (fairseq-preprocess makes "
            "one)"
        )
    paths, kind = _select(args, run)
    batches, data_files = 0, []
    if data:
        batches = args.batches or BATCHES
        data_files = sorted(data.glob("[!.]*"))
    stamp_file = stamp.stamp_of(output)
    wanted: dict[str, str] = {}
    if run:
        settings = {
            **outdated.record_of_average(paths, kind),
            "recalibrated_on": batches,
            "norm_module": args.norm_module or "",
        }
        with _explained(run, paths):
            wanted = stamp.made_from(settings, {"checkpoints": paths, "data": data_files})
        if stamp.done("average", stamp_file, wanted, output):
            if outdated.of_average(output):
                _note_on_newer(paths, output)
            return 0
    check_output_path(output, paths)

    # Imported here, so that --help and a misspelt name are answered at once.
    from pn_fairseq.common.checkpoints import save_checkpoint
    from pn_fairseq.models.average_checkpoints import average_checkpoints, num_updates

    with only_writer(output):
        # Removed before the output changes: after an interruption the stamp must not describe
        # another file.
        stamp_file.unlink(missing_ok=True)
        with _explained(run, paths):
            state = average_checkpoints(paths)
        if kind != FILES:
            _note_on_newer(paths, output, num_updates(state))
        if args.norm_module:
            from pn_fairseq.models.from_checkpoint import with_model_settings

            state = with_model_settings(state, norm_module=args.norm_module)
        if data:
            _recalibrate(state, output, data, batches)
        save_checkpoint(state, output)
        if run:
            write_settings(stamp_file, wanted | outdated.record_of_training(run.path))
    print(f"wrote {output} (no optimizer state)")
    if run and not args.output:
        verb = "evaluate-lm" if run.get("task._name") == "language_modeling" else "generate"
        say_next("average", verb, "--run", args.run)
    return 0


@without_fairseqs_log()
def _recalibrate(state: dict, output: Path, data: Path, batches: int) -> None:
    # averaging without recalibration needs no fairseq
    from pn_fairseq.models.recalibrate_checkpoint import ModelWithData
    from pn_fairseq.norms import running_norms

    model = ModelWithData(state, f"the average ({output})", data)
    norms = running_norms(model.model)
    if not norms:
        print("nothing to recalibrate: the model has no running statistics")
        return
    print(f"validation loss before: {model.validate()}", flush=True)
    used = model.recalibrate(batches)
    model.store(state["model"])
    print(f"recalibrated {len(norms)} norms on {used} training batches", flush=True)
    print(f"validation loss after:  {model.validate()}", flush=True)
