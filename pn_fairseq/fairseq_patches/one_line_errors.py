"""A user's mistake ends fairseq's programs with one line and exit code 2.

fairseq shows a traceback, or hides the reason behind "Cannot load model parameters from
checkpoint". The mistakes are: settings that a model refuses, training a model that pn fold has
folded, kernels that cannot run on the device, an adaptive softmax without its criterion, a choice
of checkpoints by a BLEU that is not computed, and settings with which nothing is trained, after
which fairseq ends with exit code 0.
"""

import torch
from fairseq.criterions.adaptive_loss import AdaptiveLoss
from fairseq.data.iterators import GroupedIterator
from fairseq.tasks.fairseq_task import FairseqTask, LegacyFairseqTask
from fairseq.trainer import Trainer
from fairseq.utils import safe_getattr

from pn_fairseq.common.errors import FoldedModelError, Unavailable, one_line_errors
from pn_fairseq.fairseq_patches import patch
from pn_fairseq.fairseq_patches.run_settings import writable


def build_model(original, task, cfg, *args, **kwargs):
    # The command line parses lists of layers, but fairseq's models expect text.
    for name in ("encoder_layers_to_keep", "decoder_layers_to_keep"):
        layers = safe_getattr(cfg, name)
        if layers and not isinstance(layers, str):
            with writable(cfg):
                setattr(cfg, name, ",".join(map(str, layers)))
    with one_line_errors(ValueError):
        if safe_getattr(cfg, "base_layers", 0) and not torch.distributed.is_initialized():
            raise ValueError("--base-layers needs several ranks")
        try:
            return original(task, cfg, *args, **kwargs)
        except AssertionError as error:
            if str(error):  # such as a number of attention heads that does not divide the channels
                raise ValueError(str(error)) from error
            raise


patch(FairseqTask, "build_model", "self cfg from_checkpoint")(build_model)
# the class of the task language_modeling
patch(LegacyFairseqTask, "build_model", "self args from_checkpoint")(build_model)


@patch(Trainer, "__init__", "self cfg task model criterion quantizer")
def new_trainer(original, trainer, cfg, task, model, criterion, *args, **kwargs):
    with one_line_errors(FoldedModelError, ValueError):
        if getattr(model, "folded", False):
            raise FoldedModelError()
        check_criterion(model, isinstance(criterion, AdaptiveLoss))
        by_bleu = (
            cfg.checkpoint.best_checkpoint_metric == "bleu" and not cfg.dataset.disable_validation
        )
        if by_bleu and getattr(cfg.task, "eval_bleu", None) is False:
            raise ValueError("--best-checkpoint-metric bleu needs --eval-bleu")
    return original(trainer, cfg, task, model, criterion, *args, **kwargs)


def check_criterion(model, adaptive_loss: bool) -> None:
    """Refuse an adaptive softmax without ``--criterion adaptive_loss``, and vice versa.

    Raises:
        ValueError: model and criterion do not fit each other.
    """
    decoder = getattr(model, "decoder", None)
    if (
        decoder is not None
        and (getattr(decoder, "adaptive_softmax", None) is not None) != adaptive_loss
    ):
        settings = ["adaptive_softmax_cutoff of the model", "criterion adaptive_loss"]
        given, needed = reversed(settings) if adaptive_loss else settings
        raise ValueError(f"{given} needs {needed}")


@patch(GroupedIterator, "__init__", "self iterable chunk_size skip_remainder_batch")
def grouped(original, iterator, iterable, chunk_size, skip_remainder_batch=False):
    with one_line_errors(ValueError):
        if skip_remainder_batch and len(iterable) < chunk_size:
            raise ValueError(
                f"--skip-remainder-batch leaves nothing to train: an epoch has {len(iterable)} "
                f"batches, and an update --update-freq {chunk_size}"
            )
    return original(iterator, iterable, chunk_size, skip_remainder_batch)


def compute(original, *args, **kwargs):
    """The first use of the kernels on a device can show that they cannot run there."""
    with one_line_errors(Unavailable):
        return original(*args, **kwargs)


patch(FairseqTask, "valid_step", "self sample model criterion")(compute)
patch(FairseqTask, "inference_step", "self generator models sample prefix_tokens constraints")(
    compute
)
