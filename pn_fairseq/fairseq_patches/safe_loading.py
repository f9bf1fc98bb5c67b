"""fairseq reads its checkpoints with torch 2.6 and later, compares their checksums, and names what does not fit.

From torch 2.6 on, ``torch.load`` refuses everything except tensors and plain containers, and with that the settings in
a checkpoint, also in the copies that rank 0 sends to the other ranks; its message advises to execute what the file
holds. ``torch.load`` compares no checksums: fairseq decodes with a weight that has a flipped bit. About weights that do
not fit a model fairseq says that architectures differ.
"""

import os
import pickle

import torch
from fairseq import checkpoint_utils
from fairseq.distributed import utils as distributed_utils
from fairseq.models import BaseFairseqModel

from pn_fairseq.common.checkpoints import (
    CheckpointError,
    allow_fairseq_checkpoints,
    explain_misfit,
    readable,
    without_loss_scale,
)
from pn_fairseq.common.environment import patches_enabled
from pn_fairseq.common.errors import one_line_errors
from pn_fairseq.fairseq_patches import patch

if patches_enabled():
    allow_fairseq_checkpoints()


class MisfitError(RuntimeError):
    """Weights do not fit a model; the message names one of them."""


@patch(checkpoint_utils, "load_checkpoint_to_cpu", "path arg_overrides load_on_all_ranks")
def load_checkpoint_to_cpu(original, path, *args, **kwargs):
    if not os.path.isfile(path):  # a remote path, or no file: fairseq's own messages
        return original(path, *args, **kwargs)
    with one_line_errors(CheckpointError), readable(path, pickle.UnpicklingError, RuntimeError, EOFError):
        state = original(path, *args, **kwargs)
    return without_loss_scale(state, path)


@patch(BaseFairseqModel, "load_state_dict", "self state_dict strict model_cfg args")
def load_state_dict(original, model, *args, **kwargs):
    with one_line_errors(MisfitError):
        try:
            return original(model, *args, **kwargs)
        except RuntimeError as error:
            raise MisfitError(explain_misfit(error)) from error


@patch(distributed_utils, "_broadcast_object_slow", "obj src_rank group dist_device")
def broadcast_object(_, obj, src_rank, group, dist_device):
    """The sender of a checkpoint is the same program, so what it sends needs no safe loader."""
    holder = [obj]
    torch.distributed.broadcast_object_list(holder, src=src_rank, group=group, device=dist_device)
    return holder[0]
