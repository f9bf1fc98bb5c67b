"""``--store-ema`` works with norms that count their batches.

fairseq multiplies every entry of the state dict by the decay. torch refuses that for an int64 buffer such as
``num_batches_tracked``, with "result type Float can't be cast to the desired output type Long". Here the average takes
integers over as they are.
"""

import torch
from fairseq.models.ema.ema import EMA

from pn_fairseq.fairseq_patches import patch


@patch(EMA, "__init__", "self model config device skip_keys")
def new_ema(original, ema, *args, **kwargs):
    original(ema, *args, **kwargs)
    state = ema.model.state_dict()
    integers = {key for key, value in state.items() if torch.is_tensor(value) and not value.is_floating_point()}
    ema.skip_keys = {*ema.skip_keys, *integers}
