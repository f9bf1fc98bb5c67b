"""``pn-fold``: a checkpoint whose norms are part of the projections that follow them, for decoding."""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from pn_fairseq.checkpoints import CheckpointError, check_output_path, load_checkpoint, save_checkpoint
from pn_fairseq.cli import ArgumentParser, UserError, command, without_fairseqs_log

TOOL = "pn-fold"

EPILOG = """\
example:
  %(prog)s checkpoints/averaged.pt checkpoints/folded.pt
  fairseq-generate DATA --user-dir $(python -m pn_fairseq --user-dir) --path checkpoints/folded.pt \\
      --beam 5 --remove-bpe --required-batch-size-multiple 1

In evaluation PN, PN-V and BN multiply each channel by a constant and add another, which the projections that follow
(of the attention, fc1, and for the last norm of the encoder those of the decoder's attention to it) can do as well. A
norm without layer-scale vanishes; of one with layer-scale only that is left. LayerNorm stays, and so does the last
norm of a decoder whose output projection is shared with its embeddings.

Before OUTPUT is written both models run on made-up sentences, and the largest difference of their logits is printed;
one above 1e-4 of the largest logit is an error. OUTPUT cannot be trained, and averages of folded checkpoints are not
the folded average: average first. The optimizer's state is left out. CHECKPOINT is read without running code from it.
"""


def _parser() -> ArgumentParser:
    parser = ArgumentParser(
        prog=TOOL,
        description="Fold the norms of a transformer_pn checkpoint into the projections that follow them. It decodes "
        "to the same hypotheses, faster.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("checkpoint", metavar="CHECKPOINT", help="a checkpoint of transformer_pn")
    parser.add_argument("output", metavar="OUTPUT", help="where to write the folded one; not CHECKPOINT")
    return parser


@command(TOOL, CheckpointError)
def main(argv: Sequence[str] | None = None) -> None:
    """Run the tool on ``argv`` (by default the process's arguments) and return its exit code: 0, 2 or 130."""
    args = _parser().parse_args(argv)
    source, output = Path(args.checkpoint), Path(args.output)
    check_output_path(output)
    if output.exists() and source.exists() and os.path.samefile(source, output):
        raise UserError(f"OUTPUT {output} is CHECKPOINT itself; choose another name")
    state = load_checkpoint(source)
    with without_fairseqs_log(logging.CRITICAL):
        try:
            # Here and not above: --help and a misspelt name are to be answered at once.
            from pn_fairseq.models.fold_checkpoint import fold_checkpoint
        except ModuleNotFoundError as error:
            raise UserError(f"fairseq is needed to build the model, and {error.name} is not installed") from error
        folded, outcomes, difference = fold_checkpoint(state, str(source))
    for outcome in outcomes:
        print(outcome)
    print(difference)
    save_checkpoint(folded, output)
    print(f"wrote {output} ({sum(o.projections is not None for o in outcomes)} of {len(outcomes)} norms folded)")


if __name__ == "__main__":
    sys.exit(main())
