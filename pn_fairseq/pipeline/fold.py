"""``pn fold``: a checkpoint whose norms are fused into the projections that follow them, for
decoding.
"""

import logging
from collections.abc import Sequence
from pathlib import Path

from pn_fairseq.common.checkpoints import (
    check_output_path,
    load_checkpoint,
    save_checkpoint,
)
from pn_fairseq.common.command import ArgumentParser, without_fairseqs_log
from pn_fairseq.pipeline import add_norm_module, outdated

DESCRIPTION = (
    "Fuse the norms of a transformer_pn checkpoint into the linear layers that follow them. "
    "Decoding then computes fewer norms and gives the same hypotheses."
)

EPILOG = """\
example:
  %(prog)s checkpoints/averaged.pt checkpoints/folded.pt
  fairseq-generate DATA --user-dir "$(pn --user-dir)" --path checkpoints/folded.pt \\
      --beam 5 --remove-bpe --required-batch-size-multiple 1

Norms with running statistics, such as PN, PN-V and BN, are folded. Other norms stay, and so does
the last norm of a decoder whose output projection is shared with its embeddings. Before OUTPUT is
written, both models run on random sentences, and the largest difference of their logits is printed;
more than 1e-4 of the largest logit is an error. OUTPUT cannot be trained, and contains no optimizer
state. Average checkpoints before you fold. CHECKPOINT is read without executing code from it.
"""


def main(argv: Sequence[str] | None = None) -> None:
    parser = ArgumentParser(prog="pn fold", description=DESCRIPTION, epilog=EPILOG)
    parser.add_argument(
        "checkpoint", metavar="CHECKPOINT", type=Path, help="a checkpoint of transformer_pn"
    )
    parser.add_argument(
        "output", metavar="OUTPUT", type=Path, help="the file to write; not CHECKPOINT"
    )
    add_norm_module(parser)
    args = parser.parse_args(argv)
    check_output_path(args.output, [args.checkpoint])
    state = load_checkpoint(args.checkpoint)
    outdated.note_on_average("fold", [args.checkpoint])
    with without_fairseqs_log(logging.CRITICAL):
        # Imported here, so that --help and a misspelt name are answered at once.
        from pn_fairseq.models.fold_checkpoint import fold_checkpoint
        from pn_fairseq.models.from_checkpoint import with_norm_module

        state = with_norm_module(state, args.norm_module)
        folded, outcomes, number, difference = fold_checkpoint(state, str(args.checkpoint))
    print(*outcomes, difference, sep="\n")
    save_checkpoint(folded, args.output)
    print(f"wrote {args.output} ({number} of {len(outcomes)} norms folded)")
