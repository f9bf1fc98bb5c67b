"""The adaptive loss counts every word.

fairseq ignores the number of padding, 1, even in a tail band, where it is the number of a word: the
second word of each band adds only the choice of its band to the loss.
"""

from itertools import pairwise

import torch
from fairseq.criterions.adaptive_loss import AdaptiveLoss
from fairseq.modules import AdaptiveSoftmax
from torch.nn.functional import cross_entropy

from pn_fairseq.fairseq_patches import patch


def losses(
    softmax: AdaptiveSoftmax, output: torch.Tensor, target: torch.Tensor, padding: int
) -> torch.Tensor:
    """The loss of each token in nats, (B T,); 0 of the padding.

    Args:
        output: of the model, (B, T, C).
        target: the tokens, (B, T) or (B T,).
        padding: the number of the padding in the dictionary.
    """
    target = target.flatten()
    (head, *tails), (of_head, *of_tails) = softmax(output, target)
    loss = cross_entropy(head, of_head, ignore_index=padding, reduction="none")
    bands = pairwise(softmax.cutoff)
    for logits, of_tail, (first, end) in zip(tails, of_tails, bands, strict=True):
        if of_tail is not None:
            inside = target.ge(first) & target.lt(end)
            of_band = cross_entropy(logits, of_tail, reduction="none")
            loss = loss.masked_scatter(inside, loss[inside] + of_band)
    return loss


@patch(AdaptiveLoss, "forward", "self model sample reduce")
def forward(_, criterion, model, sample, reduce=True):
    """The loss, (1,), or without ``reduce`` that of each token, (B T,); the sample size; the logged
    values.
    """
    output = model(**sample["net_input"])
    target = model.get_targets(sample, output)
    sentences, target = target.size(0), target.flatten()
    loss = losses(model.decoder.adaptive_softmax, output[0], target, criterion.padding_idx)
    loss = loss.sum(dim=0, keepdim=True) if reduce else loss
    tokens = torch.count_nonzero(target.ne(criterion.padding_idx)).item()
    sample_size = sample["target"].size(0) if criterion.sentence_avg else tokens
    logged = {
        "loss": loss.data,
        "ntokens": tokens,
        "nsentences": sentences,
        "sample_size": sample_size,
    }
    return loss, sample_size, logged
