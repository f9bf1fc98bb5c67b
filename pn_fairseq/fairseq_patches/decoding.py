"""``--replace-unk``, ``--diverse-beam-groups`` and ``--print-step`` work.

fairseq interprets ``--replace-unk`` without a file as the file "@@ ". Diverse beam search stores
its penalties by the place of a sentence in the batch, but looks them up by the number of the
sentence in the test set: it fails in the second batch, and if the numbers of a batch are smaller
than its size, penalties come from other sentences. Only models that decode all words at once count
their steps. If no sentence is decoded, fairseq divides by 0.
"""

import torch
from fairseq import utils
from fairseq.search import DiverseBeamSearch
from fairseq.sequence_generator import SequenceGenerator, SequenceGeneratorWithAlignment
from fairseq.sequence_scorer import SequenceScorer

from pn_fairseq.common.errors import one_line_errors
from pn_fairseq.fairseq_patches import patch, running_program


@patch(utils, "load_align_dict", "replace_unk")
def load_align_dict(original, replace_unk):
    """ "@@ " is the value of the flag without a file.

    An empty name means to copy the source word.
    """
    return original("" if replace_unk == "@@ " else replace_unk)


@patch(DiverseBeamSearch, "step", "self step lprobs scores prev_output_tokens original_batch_idxs")
def step(original, search, step, lprobs, scores, prev_output_tokens=None, original_batch_idxs=None):
    if step == 0:
        search.sentences = original_batch_idxs
    rows = torch.eq(original_batch_idxs[:, None], search.sentences).int().argmax(dim=1)
    return original(search, step, lprobs, scores, prev_output_tokens, rows)


def generate(original, *args, **kwargs):
    """Count a step for each token in a search from left to right."""
    hypotheses = original(*args, **kwargs)
    for beam in hypotheses:
        for hypothesis in beam:
            hypothesis.setdefault("steps", len(hypothesis["tokens"]))
    return hypotheses


for generator in (SequenceGenerator, SequenceGeneratorWithAlignment, SequenceScorer):
    patch(generator, "generate", "self models sample kwargs")(generate)


def main(original, cfg, output_file):
    try:
        return original(cfg, output_file)
    except ZeroDivisionError as error:  # from the line about the speed
        with one_line_errors(ValueError):
            raise ValueError(
                "no sentence was decoded: the subset is empty, its sentences were skipped because "
                "of their lengths, --required-batch-size-multiple is larger, or there are more "
                "ranks than batches"
            ) from error


program = running_program("fairseq_cli.generate")
if program is not None:
    patch(program, "_main", "cfg output_file")(main)
