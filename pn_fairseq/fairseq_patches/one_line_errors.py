"""A user's mistake ends fairseq's programs with one line and exit code 2.

fairseq shows a traceback, or hides the reason behind "Cannot load model parameters from checkpoint". The mistakes:
settings that a model refuses, a model folded by pn fold in a training, kernels that cannot run on the device, an
adaptive softmax without its criterion.
"""

from fairseq.criterions.adaptive_loss import AdaptiveLoss
from fairseq.tasks.fairseq_task import FairseqTask, LegacyFairseqTask
from fairseq.trainer import Trainer

from pn_fairseq.common.errors import Unavailable, one_line_errors
from pn_fairseq.fairseq_patches import patch
from pn_fairseq.models.normed_model import FoldedModelError, NormedModel
from pn_fairseq.models.transformer_lm_pn import check_criterion


def build_model(original, *args, **kwargs):
    with one_line_errors(ValueError):
        return original(*args, **kwargs)


patch(FairseqTask, "build_model", "self cfg from_checkpoint")(build_model)
patch(LegacyFairseqTask, "build_model", "self args from_checkpoint")(build_model)  # of language_modeling


@patch(Trainer, "__init__", "self cfg task model criterion quantizer")
def new_trainer(original, trainer, cfg, task, model, criterion, *args, **kwargs):
    with one_line_errors(FoldedModelError, ValueError):
        if getattr(model, "folded", False):
            raise FoldedModelError()
        if isinstance(model, NormedModel):
            check_criterion(model, isinstance(criterion, AdaptiveLoss))
    return original(trainer, cfg, task, model, criterion, *args, **kwargs)


@patch(Trainer, "load_checkpoint", "self filename reset_optimizer reset_lr_scheduler optimizer_overrides reset_meters")
def load_checkpoint(original, trainer, filename, *args, **kwargs):
    with one_line_errors(FoldedModelError):
        try:
            return original(trainer, filename, *args, **kwargs)
        except Exception as error:
            if isinstance(error.__context__, FoldedModelError):
                raise FoldedModelError(filename) from error
            raise


def compute(original, *args, **kwargs):
    """The first use of the kernels on a device can show that they cannot run there."""
    with one_line_errors(Unavailable):
        return original(*args, **kwargs)


patch(FairseqTask, "train_step", "self sample model criterion optimizer update_num ignore_grad")(compute)
patch(FairseqTask, "valid_step", "self sample model criterion")(compute)
patch(FairseqTask, "inference_step", "self generator models sample prefix_tokens constraints")(compute)
