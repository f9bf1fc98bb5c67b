"""The penalty of regularized batch normalization has the scale of the loss.

The norms add its gradient in their backward pass, where they cannot see what the loss was multiplied by: the loss scale
of fp16, or 0 for a rank that has run out of data. fairseq has a place for auxiliary losses only in the criteria of
wav2vec and HuBERT. So the norms are given the scale by the gradient that reaches the loss of any criterion.
"""

from fairseq.tasks.fairseq_task import FairseqTask

from pn_fairseq.fairseq_patches import patch
from pn_fairseq.norms.base import running_norms


@patch(FairseqTask, "train_step", "self sample model criterion optimizer update_num ignore_grad")
def train_step(original, task, sample, model, criterion, *arguments, **options):
    norms = [norm for norm in running_norms(model) if hasattr(norm, "penalty_scale")]
    if not norms:
        return original(task, sample, model, criterion, *arguments, **options)

    def tell(gradient):
        for norm in norms:
            norm.penalty_scale = gradient

    def watch(module, inputs, output):
        output[0].register_hook(tell)

    handle = criterion.register_forward_hook(watch)
    try:
        return original(task, sample, model, criterion, *arguments, **options)
    finally:
        handle.remove()
