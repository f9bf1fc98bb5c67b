"""A training on several ranks can be resumed with torch 2.6 and later.

Rank 0 reads the checkpoint and sends it to the others, which unpickle it by ``torch.load``; from torch 2.6 on that
refuses the settings in it. The sender is the same program, so what it sends needs no safe loader.
"""

import torch
from fairseq.distributed import utils as distributed_utils

from pn_fairseq.fairseq_patches import patch


@patch(distributed_utils, "_broadcast_object_slow", "obj src_rank group dist_device")
def broadcast_object(_, obj, src_rank, group, dist_device):
    holder = [obj]
    torch.distributed.broadcast_object_list(holder, src=src_rank, group=group, device=dist_device)
    return holder[0]
