"""``pn import-release``: convert a checkpoint of the code released with the PowerNorm paper for
this plugin.
"""

import logging
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from pn_fairseq.common.checkpoints import (
    check_output_path,
    load_checkpoint,
    save_checkpoint,
)
from pn_fairseq.common.command import ArgumentParser, UserError, without_fairseqs_log

DESCRIPTION = (
    "Turn a checkpoint of the code released with the PowerNorm paper (a fork of fairseq 0.8) into "
    "one of the model transformer_pn with --norm-variant release."
)

EPILOG = """\
example:
  %(prog)s release/checkpoint_best.pt imported.pt
  fairseq-generate DATA --user-dir "$(pn --user-dir)" --path imported.pt \\
      --beam 5 --remove-bpe --required-batch-size-multiple 1

DATA must be binarized with the dictionaries that the model was trained with. Norms "layer" and
"power" can be imported, one kind for the encoder and one for the decoder. A tensor that is missing
or unknown is an error. The optimizer state is left out: to continue training, use fairseq-train
--finetune-from-model and --norm-variant release. The file is read without executing code from it.
"""


class _Meter:
    """Replaces the meters of fairseq 0.8 in its checkpoints: only their numbers are read."""


def load_release(path: Path) -> dict:
    """Read a checkpoint that fairseq 0.8 wrote, as
    :func:`pn_fairseq.common.checkpoints.load_checkpoint` does.
    """
    meters = [
        (_Meter, f"fairseq.meters.{name}")
        for name in ("AverageMeter", "StopwatchMeter", "TimeMeter")
    ]
    with torch.serialization.safe_globals(meters):
        return load_checkpoint(path)


def main(argv: Sequence[str] | None = None) -> None:
    parser = ArgumentParser(prog="pn import-release", description=DESCRIPTION, epilog=EPILOG)
    parser.add_argument(
        "checkpoint", metavar="CHECKPOINT", type=Path, help="the file that the release wrote"
    )
    parser.add_argument(
        "output", metavar="OUTPUT", type=Path, help="the file to write; not CHECKPOINT"
    )
    for option, statistic in (
        ("fwd", "psi^2"),
        ("bwd", "nu; it scales the imported nu, (1 - A) ema_gz"),
    ):
        meaning = f"decay of {statistic} in training (default 0.9); decoding does not depend on it"
        parser.add_argument(f"--alpha-{option}", type=float, default=0.9, metavar="A", help=meaning)
    args = parser.parse_args(argv)
    check_output_path(args.output, [args.checkpoint])
    state = load_release(args.checkpoint)
    with without_fairseqs_log(logging.CRITICAL):
        # Imported here, so that --help and a misspelt name are answered at once.
        from pn_fairseq.models.import_release import import_release

        imported = import_release(state, str(args.checkpoint), args.alpha_fwd, args.alpha_bwd)
    faulty = [key for key, value in imported["model"].items() if not value.isfinite().all()]
    others = [key for key in faulty if not key.endswith(".nu")]
    if others:
        what = f"{len(others)} of its tensors are not finite ({others[0]}, ...)"
        raise UserError(f"{args.checkpoint}: {what}; use another checkpoint")
    if faulty:  # only nu, which decoding does not need
        text = (
            f"nu of {len(faulty)} norms is not finite ({faulty[0]}, ...): use it for decoding only"
        )
        print(f"pn import-release: warning: {text}", file=sys.stderr)
    save_checkpoint(imported, args.output)
    settings = imported["args"]
    norms = f"encoder norm {settings.encoder_norm}, decoder norm {settings.decoder_norm}"
    print(f"wrote {args.output} ({settings.arch}, {norms}, {len(imported['model'])} tensors)")
