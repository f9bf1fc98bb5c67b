"""``pn-import-release``: a checkpoint of the code released with the PowerNorm paper, as one that this plugin loads."""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from pn_fairseq.checkpoints import CheckpointError, check_output_path, load_checkpoint, save_checkpoint
from pn_fairseq.cli import ArgumentParser, UserError, command, without_fairseqs_log

TOOL = "pn-import-release"

EPILOG = """\
example:
  %(prog)s release/checkpoint_best.pt imported.pt
  fairseq-generate DATA --user-dir $(python -m pn_fairseq --user-dir) --path imported.pt \\
      --beam 5 --remove-bpe --required-batch-size-multiple 1

DATA has to be binarized with the dictionaries that the model was trained with. Norms "layer" and "power" can be
imported, one kind for the encoder and one for the decoder. A tensor that is missing or unknown is an error. The
optimizer's state is left out: go on with fairseq-train --finetune-from-model and --norm-variant release. The file is
read without running code from it.
"""


class _Meter:
    """Stands for the meters of fairseq 0.8 that its checkpoints hold: their numbers are read, and nothing else."""


def load_release(path: str | os.PathLike) -> dict:
    """Read a checkpoint that fairseq 0.8 wrote, as :func:`pn_fairseq.checkpoints.load_checkpoint` does."""
    meters = [(_Meter, f"fairseq.meters.{name}") for name in ("AverageMeter", "StopwatchMeter", "TimeMeter")]
    with torch.serialization.safe_globals(meters):
        return load_checkpoint(path)


def _alpha(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number strictly between 0 and 1")
    return value


def _parser() -> ArgumentParser:
    parser = ArgumentParser(
        prog=TOOL,
        description="Turn a checkpoint of the code released with the PowerNorm paper (a fork of fairseq 0.8) into one "
        "of the model transformer_pn with --norm-variant release.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("checkpoint", metavar="CHECKPOINT", help="the file that the release wrote")
    parser.add_argument("output", metavar="OUTPUT", help="where to write ours; not CHECKPOINT")
    for option, meaning in (("fwd", "psi^2"), ("bwd", "nu; it scales the imported nu, (1 - A) ema_gz")):
        parser.add_argument(
            f"--alpha-{option}",
            type=_alpha,
            default=0.9,
            metavar="A",
            help=f"decay that the model was trained with for {meaning} (default 0.9); decoding does not depend on it",
        )
    return parser


@command(TOOL, CheckpointError)
def main(argv: Sequence[str] | None = None) -> None:
    """Run the tool on ``argv`` (by default the process's arguments) and return its exit code: 0, 2 or 130."""
    args = _parser().parse_args(argv)
    source, output = Path(args.checkpoint), Path(args.output)
    check_output_path(output)
    if output.exists() and source.exists() and os.path.samefile(source, output):
        raise UserError(f"OUTPUT {output} is CHECKPOINT itself; choose another name")
    state = load_release(source)
    with without_fairseqs_log(logging.CRITICAL):
        try:
            # Here and not above: --help and a misspelt name are to be answered at once.
            from pn_fairseq.models.import_release import import_release
        except ModuleNotFoundError as error:
            raise UserError(f"fairseq is needed to build the model, and {error.name} is not installed") from error
        imported = import_release(state, str(source), args.alpha_fwd, args.alpha_bwd)
    floating = {key: value for key, value in imported["model"].items() if value.is_floating_point()}
    # fairseq's _float_tensor is memory that was never written: it carries a type and a device alone.
    faulty = [
        key for key, value in floating.items() if not key.endswith("_float_tensor") and not value.isfinite().all()
    ]
    unusable = [key for key in faulty if key.endswith(".nu")]
    if others := [key for key in faulty if key not in unusable]:
        raise UserError(f"{source}: {len(others)} of its tensors are not finite ({others[0]}, ...), so it is of no use")
    if unusable:
        text = f"warning: nu of {len(unusable)} norms is not finite ({unusable[0]}, ...): decode, but do not train on"
        print(f"{TOOL}: {text}", file=sys.stderr)
    save_checkpoint(imported, output)
    settings = imported["args"]
    norms = f"encoder norm {settings.encoder_norm}, decoder norm {settings.decoder_norm}"
    print(f"wrote {output} ({settings.arch}, {norms}, {len(imported['model'])} tensors)")


if __name__ == "__main__":
    sys.exit(main())
