"""The adaptive loss counts every word.

fairseq ignores the number of padding, 1, even in a tail band, where it is the number of a word: the
second word of each band adds only the choice of its band to the loss.
"""

from itertools import pairwise

import torch
from fairseq.criterions.adaptive_loss import AdaptiveLoss
from torch.nn.functional import cross_entropy

from pn_fairseq.fairseq_patches import patch


@patch(AdaptiveLoss, "forward", "self model sample reduce")
def forward(_, criterion, model, sample, reduce=True):
    """The loss, (1,), or without ``reduce`` that of each token, (B T,); the sample size; the logged
    values.
    """
    output = model(**sample["net_input"])
    target = model.get_targets(sample, output)
    sentences, target = target.size(0), target.flatten()
    softmax = model.decoder.adaptive_softmax
    (head, *tails), (of_head, *of_tails) = softmax(output[0], target)
    loss = cross_entropy(head, of_head, ignore_index=criterion.padding_idx, reduction="none")
    for logits, of_tail, (first, end) in zip(
        tails, of_tails, pairwise(softmax.cutoff), strict=True
    ):
        if of_tail is not None:
            inside = target.ge(first) & target.lt(end)
            loss = loss.masked_scatter(
                inside, loss[inside] + cross_entropy(logits, of_tail, reduction="none")
            )
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
