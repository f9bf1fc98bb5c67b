"""``pn-fold``: a checkpoint whose norms are part of the projections that follow them, for decoding."""

from __future__ import annotations

from collections.abc import Sequence

from pn_fairseq.checkpoints import load_checkpoint, save_checkpoint
from pn_fairseq.cli.conversion import conversion_parser, fairseq_needed, read_input
from pn_fairseq.pipeline.command import command

TOOL = "pn-fold"

DESCRIPTION = (
    "Fold the norms of a transformer_pn checkpoint into the linear layers that follow them. Decoding is faster and "
    "gives the same hypotheses."
)

EPILOG = """\
example:
  %(prog)s checkpoints/averaged.pt checkpoints/folded.pt
  fairseq-generate DATA --user-dir "$(python -m pn_fairseq --user-dir)" --path checkpoints/folded.pt \\
      --beam 5 --remove-bpe --required-batch-size-multiple 1

In evaluation PN, PN-V and BN multiply each channel by a constant and add another one. The linear layers that follow
(projections of the attention, fc1, and for the last norm of the encoder those of the decoder's attention to it) can do
that as well. Layer-scale stays. LayerNorm stays, and so does the last norm of a decoder whose output projection is
shared with its embeddings.

Before OUTPUT is written, both models run on random sentences, and the largest difference of their logits is printed.
More than 1e-4 of the largest logit is an error. OUTPUT cannot be trained. To average checkpoints, average before
folding. The optimizer's state is left out. CHECKPOINT is read without running code from it.
"""


@command(TOOL)
def main(argv: Sequence[str] | None = None) -> None:
    """Run the tool on ``argv`` (default: the process's arguments) and return its exit code: 0, 2, 130 or 143."""
    args = conversion_parser(TOOL, DESCRIPTION, EPILOG, "a checkpoint of transformer_pn").parse_args(argv)
    state = read_input(args, load_checkpoint)
    with fairseq_needed():
        # Here and not above: --help and a misspelt name are answered at once.
        from pn_fairseq.models.fold_checkpoint import fold_checkpoint

        folded, outcomes, difference = fold_checkpoint(state, str(args.checkpoint))
    print(*outcomes, difference, sep="\n")
    save_checkpoint(folded, args.output)
    print(f"wrote {args.output} ({sum('folded into' in line for line in outcomes)} of {len(outcomes)} norms folded)")
