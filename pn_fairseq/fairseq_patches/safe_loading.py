"""``torch.load`` of torch 2.6 and later reads fairseq's checkpoints, and still runs no code from them.

By default it refuses everything but tensors and plain containers, and with that the settings in a checkpoint.
"""

from pn_fairseq.common.checkpoints import allow_fairseq_checkpoints
from pn_fairseq.common.environment import patches_enabled

if patches_enabled():
    allow_fairseq_checkpoints()
