"""A gradient overflow of fp16 on a CPU skips its step, as on a GPU.

fairseq creates the gradient norm of a skipped step on the GPU, also in a training on a CPU, and fails without a GPU.
"""

from unittest import mock

import torch
from fairseq.trainer import Trainer

from pn_fairseq.fairseq_patches import patch


@patch(Trainer, "train_step", "self samples raise_oom")
def train_step(original, trainer, *args, **kwargs):
    if trainer.cuda:
        return original(trainer, *args, **kwargs)
    with mock.patch.object(torch.Tensor, "cuda", lambda tensor, *_, **__: tensor):
        return original(trainer, *args, **kwargs)
