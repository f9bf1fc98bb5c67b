"""``--store-ema`` works with norms that count their batches, with pre-norm encoders and with shared
embeddings.

fairseq multiplies each entry of the state dict by the decay, which torch refuses for an int64
buffer such as ``num_batches_tracked`` ("result type Float can't be cast to the desired output type
Long"). Embeddings that are one tensor under three names decay three times per update. The average
also loses the norm after the last encoder layer: fairseq loads the average without
``encoder.version``, as if the model were older than that norm.
"""

import torch
from fairseq.models.ema.ema import EMA

from pn_fairseq.fairseq_patches import patch


@patch(EMA, "_step_internal", "self new_model updates")
@torch.no_grad()
def step(original, ema, new_model, updates=None):
    """average <- decay * average + (1 - decay) * value, in place; integers and ``skip_keys`` are
    copied. fairseq's ``restore()``, whose ``load_state_dict`` loses the norm, is not called.
    """
    model = ema.model.state_dict()
    averages = ema.fp32_params if ema.config.ema_fp32 else model
    done = set()
    for key, value in new_model.state_dict().items():
        average = averages[key]
        if average.data_ptr() in done:
            continue
        done.add(average.data_ptr())
        if key in ema.skip_keys or not average.is_floating_point():
            average.copy_(value)
        else:
            average.mul_(ema.decay).add_(value.to(average), alpha=1 - ema.decay)
    for key, average in averages.items():
        # the float32 copy of a model in half precision
        if average.data_ptr() != model[key].data_ptr():
            model[key].copy_(average)
