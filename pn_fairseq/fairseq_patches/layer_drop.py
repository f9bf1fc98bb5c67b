"""All ranks drop the same layers under ``--encoder-layerdrop`` and ``--decoder-layerdrop``.

fairseq draws the layers from the generator of the CPU. On CPUs dropout draws from the same
generator, by an amount that depends on the size of the batch: ranks drop different layers, and
their collective calls inside layers (such as the calls of synchronized norms) no longer match. Here
several ranks draw the layers from a separate generator, which restarts with each seed; fairseq sets
the same seed on all ranks before each update. When fairseq loads a model with fewer layers from a
trained one, ``--encoder-layers-to-keep`` alone drops all layers of the decoder, and vice versa.
"""

import copy
from itertools import compress

import torch
from fairseq import checkpoint_utils
from fairseq.modules.layer_drop import LayerDropModuleList
from torch import distributed

from pn_fairseq.fairseq_patches import patch

_generator = torch.Generator()


@patch(LayerDropModuleList, "__iter__", "self")
def layers(original, modules):
    if (
        not modules.training
        or not distributed.is_initialized()
        or distributed.get_world_size() == 1
    ):
        return original(modules)
    if _generator.initial_seed() != torch.initial_seed():
        _generator.manual_seed(torch.initial_seed())
    kept = torch.empty(len(modules)).uniform_(generator=_generator) > modules.p
    return compress(torch.nn.ModuleList.__iter__(modules), kept)


@patch(checkpoint_utils, "prune_state_dict", "state_dict model_cfg")
def prune_state_dict(original, state_dict, model_cfg):
    kept = {
        side: getattr(model_cfg, f"{side}_layers_to_keep", None) for side in ("encoder", "decoder")
    }
    if not any(kept.values()) or all(kept.values()):
        return original(state_dict, model_cfg)
    model_cfg = copy.deepcopy(model_cfg)
    for side in kept:
        if not kept[side]:
            numbers = {key.split(".")[2] for key in state_dict if key.startswith(f"{side}.layers.")}
            setattr(model_cfg, f"{side}_layers_to_keep", ",".join(sorted(numbers, key=int)))
    return original(state_dict, model_cfg)
