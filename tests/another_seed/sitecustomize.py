"""Imported by every Python with this folder on its PYTHONPATH: each seed becomes the next one."""

import numpy as np
import torch


class Generator(torch.Generator):
    def manual_seed(self, seed: int):
        return super().manual_seed(seed + 1)


def shifted(function):
    return lambda seed=None: function(seed + 1 if isinstance(seed, int) else seed)


torch.Generator = Generator
torch.manual_seed, np.random.default_rng = (
    shifted(torch.manual_seed),
    shifted(np.random.default_rng),
)
